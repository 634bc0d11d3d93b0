"""Bad input, said in one line.

Whatever a user can get wrong (a path, a file's content, a flag) raises ``InputError`` with a message that
names the flag, file or line at fault and the remedy. Scripts run their ``main`` through ``run_script``,
which prints that line and exits with code 2: no traceback for what is not a bug.
"""

import argparse
import sys


class InputError(ValueError):
    """The input is at fault, not the program. The message is one line: what, where, what to do."""

    agreed = False  # by all processes, where there are several


class SaidElsewhere(InputError):
    """The same on the other processes: only the one that raises ``InputError`` itself says it."""


class FlagParser(argparse.ArgumentParser):
    """argparse whose complaints are one line as well, without the usage text above them."""

    def error(self, message):
        raise InputError(f"{' '.join(message.split())[:300]}; --help lists all flags")


def run_script(main):
    """Call ``main()``; on ``InputError`` print its one line to stderr and exit with code 2."""
    try:
        main()
    except InputError as error:
        if not isinstance(error, SaidElsewhere):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, for a GPU
            raise
        print(f"error: {str(error).splitlines()[0]} Lower the sizes, or --device cpu", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
