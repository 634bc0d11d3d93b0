"""Start scripts of this repository as processes by forking, without importing torch each time.

``Forked`` is a ``subprocess.Popen`` for [python, script, *argv]. It is forked from a process that has already
imported everything, so a start costs a few milliseconds instead of four seconds of CPU time. All else is as
usual: the process has its own pid, session, environment, files and signals, and the script runs as
``__main__``. (A start without forking is tested in test_platforms.py, and under torchrun.)
"""

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


class Forked(subprocess.Popen):
    """Linux only: once its own parent has ended, the forked process becomes our child: we can wait for it."""

    _server = None  # the socket to the process that forks, one for all tests of this process

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[3:9]
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            request = json.dumps({"argv": args[1:], "cwd": str(cwd), "environment": dict(env)}).encode()
            read = [] if p2cread < 0 else [p2cread]
            socket.send_fds(self._connection(), [request], [c2pwrite, errwrite, *read])
            self.pid = int(self._connection().recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    @classmethod
    def _connection(cls):
        if cls._server is None:
            cls._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}
            server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], **quiet
            )
            theirs.close()
            atexit.register(server.wait)  # it ends when the socket is closed
            atexit.register(cls._server.close)
        return cls._server


def serve(connection):
    """Fork a process for each request. Returns only in the forked process: the command line it has to run."""
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
            connection.close()
            return become(json.loads(text), descriptors, (reader, writer))
        os.waitpid(middle, 0)  # once it has ended, the new process is a child of the test process
        connection.send(os.read(reader, 32))
        for descriptor in (*descriptors, reader, writer):
            os.close(descriptor)


def become(request, descriptors, unwanted):
    """Set session, folder, environment and files (output, errors, and input if there is one) as ``Popen``
    would -> the command line."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, descriptor in zip((1, 2, 0), descriptors, strict=False):
        os.dup2(descriptor, number)
    for descriptor in (*descriptors, *unwanted):
        os.close(descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (it was /dev/null, now a pipe)
    return request["argv"]


if __name__ == "__main__":
    import runpy

    code = None  # with which the script ends, where it ends as it should

    @atexit.register  # registered first, it is called last
    def leave():
        """Python would now take apart all these modules, which takes longer than most runs of tests."""
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    import pictures

    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(folder)
    from trainer import train_ppo  # noqa: F401  (with all that it imports)
    from trainer.runs import plots  # noqa: F401  (matplotlib, which a run imports when it first draws)

    gc.collect()
    gc.freeze()  # a run looks for garbage several times, and not through all these modules
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    if pictures.WITHOUT in os.environ:
        pictures.leave_out()
    sys.path[0] = os.path.dirname(sys.argv[0])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
