"""Which slots have finished, as the host knows it.

The flags change on the device. On a CPU they are read when they are asked for. On a GPU, reading means
waiting until all queued steps are computed, and then the GPU has nothing to do until the host has queued
more. So the flags are copied to the host behind the steps of one check (``send``), and they are read at the
next check (``receive``), when further steps are queued already. They may then be a check too old. That is
safe: a sequence that has finished stays finished.
"""

import torch


class DoneFlags:
    """``done`` [slots], a bool tensor, on the host. late: whether the copy of the check before is read."""

    def __init__(self, done, late):
        self.done, self.late, self.sent = done, late, 0
        self.copy, self.copied = torch.zeros(len(done), dtype=torch.bool), None
        if done.is_cuda:  # a copy to pinned memory does not wait; the event says when it is there
            self.copy, self.copied = self.copy.pin_memory(), torch.cuda.Event()

    def send(self, live):
        """Start to copy the flags of the first ``live`` slots to the host."""
        if self.late:
            self.sent = live
            self.copy.copy_(self.done, non_blocking=True)
            if self.copied:
                self.copied.record()

    def receive(self, live):
        """-> list of ``live`` bools, whether each of the first slots has finished; False for slots that have
        been filled after the flags were sent."""
        if not self.late:
            return self.done[:live].tolist()
        if self.copied and self.sent:
            self.copied.synchronize()
        return self.copy[: self.sent].tolist() + [False] * (live - self.sent)
