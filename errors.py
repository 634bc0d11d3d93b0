"""``InputError``: mistakes of the user, which ``run_script`` reports in one line without a traceback.

Whatever a user can get wrong (a path, a file's content, a flag) raises ``InputError``. Its message names the
flag, file or line at fault and the remedy. Scripts run their ``main`` through ``run_script``, which prints
that line and exits with code 2. Bugs still give a traceback.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType


class InputError(ValueError):
    """A mistake in the input, not in the program. The message is one line: where, what, what to do."""


class CollectiveError(InputError):
    """An error that all processes of a run raise (``World.all_or_none`` in runs/distributed.py). Only that of
    the main process has a message."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, of the system's errors without number and file, or its type's
    name where it has no message."""
    message = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return message.splitlines()[0]


@contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """Turn an exception of a library into an ``InputError``: ``what``, then the exception's text."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    except BaseException as error:  # bad files and hubs lead to exceptions of every class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # but that one is of tokenizers' Rust code
        reason = " ".join(str(error).split())[:250]
        hint = " (see --trust_remote_code)" if "trust_remote_code" in str(error) else ""
        raise InputError(f"{what}: {type(error).__name__}: {reason}{hint}") from error


def say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C outside of ``run_script``, while a script imports: one line as well."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def run_script(main: Callable[[], object]) -> None:
    """Call ``main()``. On ``InputError`` print its one line to stderr and exit with code 2; on a GPU's
    out-of-memory error or a full disk under the output exit with code 1, on Ctrl-C with 130, without a word
    with 141 where the reader of the output has ended (``| head``). A character that the output cannot show is
    printed as a question mark."""
    sys.excepthook = say_interrupted
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr never fails on a character
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
        print(end="", flush=True)  # what fails when Python ends cannot be caught
    except OSError as error:
        try:
            print(flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(141 if isinstance(error, BrokenPipeError) else f"error: the output: {first_line(error)}")
        raise  # of another file than the output
    except InputError as error:
        if str(error):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch.OutOfMemoryError, without importing torch
            raise
        print(f"error: {first_line(error)} Lower the sizes, or --device cpu", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
