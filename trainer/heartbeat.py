"""Do the other processes still live? A thread asks, since the main one may be waiting for a dead one.

Each process counts up a number in the store that ``torchrun`` keeps. One whose number has not moved for a
while is dead, stopped or cut off: nobody would ever hear of it on a GPU, where waiting has no end. Everyone
else then says so and ends.
"""

import os
import sys
import threading
import time

BEAT = 2.0  # seconds between two looks
LIMIT = 25.0  # seconds of silence that mean the end; torchrun then needs up to 30 for what does not react


class Heartbeat:
    """Begins at once, for process ``rank`` of ``size``. ``store``: a torch.distributed store of our own."""

    def __init__(self, store, rank, size):
        self.store, self.rank, self.size = store, rank, size
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def end(self):
        """This process ends on purpose: nobody need miss it."""
        self.ended.set()
        self.thread.join()

    def _watch(self):
        parent = os.getppid()
        others = [rank for rank in range(self.size) if rank != self.rank]
        heard = dict.fromkeys(others, (None, time.monotonic()))  # the last number, and since when
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
                        self._die(f"process {rank} has not been heard of for {LIMIT:.0f} s")
            self.store.set(f"beat/{self.rank}", "end")
        except RuntimeError as error:  # the store is gone, and with it whoever kept it
            if not self.ended.is_set():
                self._die(f"the store of torchrun is gone ({str(error).splitlines()[0][:80]})")

    def _beat_of(self, rank):
        """The other's last number, None before its first one."""
        key = f"beat/{rank}"
        return self.store.get(key) if self.store.check([key]) else None

    def _die(self, why):
        """Not sys.exit: the main thread may be waiting where no exception reaches it."""
        print(f"error: process {self.rank} ends: {why}; go on with --resume", file=sys.stderr, flush=True)
        os._exit(1)
