"""Start scripts of this repository as processes by forking, without importing torch each time.

``Forked`` is a ``subprocess.Popen`` for [python, script, *argv]. It is forked from a process that has already
imported everything, so a start costs a few milliseconds instead of seven seconds of CPU time. All else is as
usual: the process has its own pid, session, environment, files and signals, and the script runs as
``__main__``. (A start without forking is tested in test_platforms.py, and under torchrun.)
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from contextlib import suppress
from types import SimpleNamespace

# Short runs of tests draw nothing: that takes longer than all else they do, and needs matplotlib, which a
# machine lent with a GPU lacks. A test file that needs the drawings says so: ``PICTURES = True``.
WITHOUT = "RUNS_WITHOUT_PICTURES"  # an environment variable, which forked processes inherit
PLOTS = "trainer.runs.plots"  # in place of this module:
NO_PLOTS = SimpleNamespace(draw_svgs=lambda *given: {}, draw_png=lambda *given: None)

PR_SET_CHILD_SUBREAPER = 36
TESTS = os.path.dirname(os.path.abspath(__file__))
MOST_FILES = 1 << 16


class Forked(subprocess.Popen):
    """Linux only: once its own parent has ended, the forked process becomes our child: we can wait for it."""

    server = None  # the socket to the process that forks, once there is one

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[3:9]
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            request = json.dumps({"argv": args[1:], "cwd": str(cwd), "environment": dict(env)}).encode()
            read = [] if p2cread < 0 else [p2cread]
            if self.server is None:
                begin()
            socket.send_fds(self.server, [request], [c2pwrite, errwrite, *read])
            self.pid = int(self.server.recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def begin():
    """Fork the process that forks; in pytest before the first test, so that nothing of tests is in it."""
    from trainer import train_ppo  # noqa: F401  (with all that it imports)

    with suppress(ImportError):
        from trainer.runs import plots  # noqa: F401  (matplotlib, which a run imports when it first draws)

    Forked.server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.collect()
    gc.freeze()  # a run looks for garbage several times, and not through all these modules
    pid = os.fork()
    if not pid:
        serve(theirs.detach())
    theirs.close()
    atexit.register(os.waitpid, pid, 0)  # it ends when the socket is closed
    atexit.register(Forked.server.close)


def serve(number):
    """Fork a process for each request that comes from this socket, and run in it what it asks for."""
    os.setsid()
    weakref.finalize._registry.clear()  # of temporary folders, which are its parents' to remove at their end
    os.dup2(number, 3)
    os.closerange(4, MOST_FILES)  # those of the test process and of pytest
    connection = socket.socket(fileno=3)
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not text:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            run(json.loads(text), descriptors)
        os.waitpid(middle, 0)  # once it has ended, the new process is a child of the test process
        connection.send(os.read(reader, 32))
        for descriptor in (*descriptors, reader, writer):
            os.close(descriptor)


def run(request, descriptors):
    """Set session, folder, environment and files (output, errors, and input if there is one) as ``Popen``
    would, and what pytest has changed as Python would, run the script, and end."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, descriptor in zip((1, 2, 0), descriptors, strict=False):
        os.dup2(descriptor, number)
    os.closerange(3, MOST_FILES)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    sys.argv = request["argv"]
    ours = ("", os.path.dirname(TESTS))
    sys.path[:] = [path for path in sys.path if path not in ours and not path.startswith(TESTS)]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if WITHOUT in os.environ:
        sys.modules[PLOTS] = NO_PLOTS
    elif sys.modules.get(PLOTS) is NO_PLOTS:
        del sys.modules[PLOTS]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and end.code != code:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # as Python ends, but without taking apart all these modules, which takes longer than most runs
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
