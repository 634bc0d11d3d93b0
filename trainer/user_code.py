"""Files of the user's: they are imported once, their code is contained, and their mistakes become one line.

``--reward_fn``, ``--tools`` and ``--env`` name functions and classes in them. What these flags have imported
stands in one table of modules, so that flags which name one file share its state.
"""

import asyncio
import concurrent.futures
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from threading import Event, Lock, Thread
from types import ModuleType
from typing import Any

import torch

from errors import InputError

Modules = dict[str, ModuleType]  # {path: its module}
# Files that are not the user's, though the user's code is called through them.
BETWEEN = (__file__, os.path.dirname(asyncio.__file__), os.path.dirname(concurrent.futures.__file__))
LOOP_ANSWERS = (
    0.5  # seconds after which an event loop is blocked; less than between two signals of time_limit
)


def load_named(path: str, name: str, flag: str, modules: Modules) -> Callable[..., Any]:
    """The function or class of this name in a file, which is imported unless it is in ``modules``. flag: for
    errors. Raises InputError if there is none, or if importing the file fails."""
    if not Path(path).is_file():
        spec = f"{path}:{name}" if path else name
        raise InputError(f"{flag} {spec}: no such file, or no name behind it; write it as path.py:name")
    place = os.path.realpath(path)
    if place not in modules:
        modules[place] = import_file(path, flag)
    found: Any = vars(modules[place]).get(name)
    if not callable(found):
        raise InputError(f"{flag} {path}: has no function or class {name!r}")
    return found


def import_file(path: str, flag: str) -> ModuleType:
    """Import a file -> its module. Raises InputError."""
    # The prefix keeps a file called json.py from replacing Python's own module json.
    module = ModuleType(f"user_{Path(path).stem}")
    module.__file__ = os.path.abspath(path)  # the code may change the working directory
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    folder = os.path.dirname(module.__file__)
    if folder not in sys.path:  # files beside it can be imported, as when it is run as a script
        sys.path.append(folder)  # behind all that has such a name already
    try:
        with contained():
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise InputError(f"{flag} {path}: importing it failed: {repr(error)[:200]}") from error
    return module


def code_of(path: str, name: str) -> list[str]:
    """What the hash of a function or class is made of: its name, and the contents of its file and of the
    files beside it that this one imports."""
    finder = ModuleFinder([os.path.dirname(os.path.abspath(path))])  # other modules are not found
    finder.run_script(path)
    files = {str(module.__file__ or path) for module in finder.modules.values()} - {path}  # type: ignore[attr-defined]
    return [name, *(Path(file).read_bytes().hex() for file in (path, *sorted(files)))]


@contextmanager
def contained() -> Iterator[None]:
    """In this block the user's code runs. What it sets for the whole process is set back."""
    set_back = process_state()
    try:
        with torch.set_grad_enabled(True):
            yield
    finally:
        set_back()


def process_state() -> Callable[[], None]:
    """-> a function that sets back what the user's code may have set for the whole process since: the
    folder, the output streams, torch's defaults."""
    folder = os.getcwd()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    threads = torch.get_num_threads()
    streams = sys.stdout, sys.stderr

    def set_back() -> None:
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        sys.stdout, sys.stderr = streams
        for number, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name).closed:
                setattr(sys, name, open(number, "w", errors="replace", closefd=False))  # noqa: SIM115

    return set_back


def as_exception(error: BaseException) -> Exception:
    """SystemExit and its like end no run."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(described(error)).with_traceback(error.__traceback__)


def described(error: BaseException) -> str:
    """An exception of the user's code as one line: its class and its text, which may fail itself."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")


def shown(value: object) -> str:
    """What the user's code returned, for an error message."""
    try:
        text = repr(value)
    except Exception:
        text = "?"
    return f"{' '.join(text.split())[:60]} ({type(value).__name__})"


def mistake(what: str, error: BaseException, own: str) -> InputError:
    """An exception of the user's code -> an error with the line of the user's that raised it or called what
    did. own: the file or folder of ours whose code called it."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f" at {f.filename}:{f.lineno}" for f in frames if not f.filename.startswith((own, *BETWEEN))]
    place = places[0] if places else " when it was called"
    return InputError(f"{what}: {described(error)[:200]}{place}; correct the function")


# ---------------------------------------------------------------- async functions

ONE_LOOP = Lock()


@cache
def event_loop(process: int) -> asyncio.AbstractEventLoop:
    """One for all calls of a process, in a thread of its own, which a forked process has not: what async
    functions keep open between calls, such as a client, belongs to it."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def start_async(value: Awaitable) -> concurrent.futures.Future:
    """Set an async call to work -> what it ends with. SystemExit would end the event loop: it is a
    RuntimeError."""
    with ONE_LOOP:
        return asyncio.run_coroutine_threadsafe(end_of(value), event_loop(os.getpid()))


async def end_of(value: Any) -> Any:
    """What an async call ends with; anything else as it is."""
    try:
        return await value if isinstance(value, Awaitable) else value
    except (SystemExit, KeyboardInterrupt) as error:
        raise as_exception(error) from error


def end_async(future: concurrent.futures.Future) -> None:
    """Cancel an async call. Where it blocks the event loop, the next calls get another loop."""
    future.cancel()
    answer = Event()
    event_loop(os.getpid()).call_soon_threadsafe(answer.set)
    if not answer.wait(LOOP_ANSWERS):
        event_loop.cache_clear()
