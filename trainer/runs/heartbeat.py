"""The heartbeat of processes: a thread in each process ends it if another one has died or stopped.

The main thread cannot do this, because it may itself be waiting for the dead process; on a GPU that wait has
no end. Every ``BEAT`` seconds each process counts up a number in the store that ``torchrun`` keeps. If the
number of another process stays the same for ``LIMIT`` seconds, that process is dead, stopped or disconnected:
this process then prints an error and ends. It also ends if torchrun itself has died.

A process whose main thread hangs, in a loop, a socket or an operation of all processes, goes on counting:
the others then end when an operation of all processes has taken ``PATIENCE`` (distributed.py), 30 minutes.
"""

import os
import sys
import threading
import time

BEAT = 2.0  # seconds between two heartbeats
# Seconds without a heartbeat after which a process counts as dead. Once one process has ended, torchrun takes
# up to 30 more seconds to end those that do not react.
LIMIT = 25.0


class Heartbeat:
    """The thread of process ``rank`` of ``size``; it starts at once.

    store: a connection to torchrun's torch.distributed store that only this thread uses.
    """

    def __init__(self, store, rank, size):
        self.store, self.rank, self.size = store, rank, size
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def end(self):
        """Stop the thread and tell the others that this process ends on purpose."""
        self.ended.set()
        self.thread.join()
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            self._wait_for_others()

    def _wait_for_others(self):
        """The store is in this process, and not torchrun's: it must not end before the others have."""
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit:
            if all(self._beat_of(rank) == b"end" for rank in range(1, self.size)):
                return
            time.sleep(0.02)

    def _watch(self):
        parent = os.getppid()
        others = [rank for rank in range(self.size) if rank != self.rank]
        heard = dict.fromkeys(others, (None, time.monotonic()))  # (the last number, the time when it came)
        count = 0
        try:
            while not self.ended.wait(BEAT):
                if os.getppid() != parent:
                    self._die("torchrun has died")
                count += 1
                self.store.set(f"beat/{self.rank}", str(count))
                for rank in others:
                    beat = self._beat_of(rank)
                    if beat != heard[rank][0]:
                        heard[rank] = (beat, time.monotonic())
                    elif beat != b"end" and time.monotonic() - heard[rank][1] > LIMIT:
                        self._die(f"process {rank} sent no heartbeat for {LIMIT:.0f} s")
            self.store.set(f"beat/{self.rank}", "end")
        except RuntimeError as error:  # the store is gone, so torchrun has ended
            if not self.ended.is_set():
                self._die(f"the store of torchrun is gone ({str(error).splitlines()[0][:80]})")

    def _beat_of(self, rank):
        """The last number of process ``rank``, None before its first one."""
        key = f"beat/{rank}"
        return self.store.get(key) if self.store.check([key]) else None

    def _die(self, why):
        """End this process. Not with sys.exit: while the main thread waits, no exception reaches it."""
        print(f"error: process {self.rank} ends: {why}; go on with --resume", file=sys.stderr, flush=True)
        os._exit(1)
