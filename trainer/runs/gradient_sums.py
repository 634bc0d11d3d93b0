"""Data-parallel training: gradients are added up over all processes while the backward still goes on.

Every process computes the gradients of its own share of a minibatch; the step is made with their sum
(distributed.py). Computing and sending take turns badly: so a part of the gradients is sent as soon as it is
complete, while the rest is still computed.

1. Parameters are cut into buckets, matrices first, in the reverse of their order in the model: a backward
   finishes the last layers first. The vectors (norms, biases) of all layers come last, they are small.
2. Torch calls ``_arrived`` each time that a backward has added all it has to a parameter's gradient. In the
   backward of the *last* micro-batch the gradient is complete then. When a bucket is complete, and those
   before it have been sent, ``_send`` begins its sum, which runs beside the rest of the backward: on a GPU on
   a stream of nccl, on a CPU in threads of gloo.
3. After the last micro-batch the rest is sent. A parameter that the last micro-batch did not use (an expert
   that none of its tokens reached) keeps its bucket, and those behind it, waiting until then. A parameter
   without any gradient counts as 0.
4. ``finish`` waits for all sums, before gradients are clipped. The host does not wait for a GPU.

No process may begin a sum that another one does not begin, or in another order: they would wait for ever, or
add what does not belong together. It cannot happen, though processes have different numbers of micro-batches,
and memory may run out in one of them alone:

- Each process begins the sum of each bucket exactly once a minibatch, in the order of the buckets, which is
  the same everywhere. No other sum begins between the first bucket and the last.
- Where memory runs out, all gradients of this process are computed again (``gradients_that_fit`` in
  optimizer_step.py). **A bucket that has been sent stays sent**: it was complete, whatever failed later. What
  the second attempt computes for it is the same up to rounding, and is freed as it arrives. Only the other
  buckets are sent. The other processes wait longer, and need not know.

Sharded models need none of this, nor does a single process: without parameters nothing here does anything.
"""

from functools import partial

import torch

from errors import InputError

BUCKET = 1 << 21  # numbers in one sum (8 MiB); a larger parameter is summed on its own


class GradientSums:
    """The sums of one model's gradients. parameters: of the model, those that train count; world: of the run;
    dtype: in which gradients are sent and added, float32 or bfloat16 (--grad_sum_dtype)."""

    def __init__(self, parameters, world, dtype=torch.float32):
        self.world, self.dtype = world, dtype
        trained = [p for p in reversed(list(parameters)) if p.requires_grad and world.size > 1]
        self.buckets = cut_into_buckets(sorted(trained, key=lambda p: p.dim() < 2))
        self.sent = []  # of the first buckets: (the numbers that are being added up, wait)
        self.kept = 0  # how many of them were sent before this attempt began
        self.last = False  # whether this is the backward of the last micro-batch
        self.missing = []  # of each bucket the parameters that this backward has not reached yet
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def overlap(self, pieces, more=False):
        """Yield the micro-batches of a minibatch, all that this process computes gradients of. Sums begin in
        the backward of the last one. more: others follow, in a call of their own."""
        self.kept = len(self.sent)
        for number, piece in enumerate(pieces, 1):
            self.last = number == len(pieces) and not more
            self.missing = [set(bucket) for bucket in self.buckets]
            yield piece
        if not more:
            self._send_rest()

    def finish(self):
        """Replace every parameter's gradient by its sum over all processes, once it is there."""
        self._send_rest()
        for bucket in self.buckets:
            numbers, wait = self.sent.pop(0)
            wait()
            for p, grad in zip(bucket, numbers.split([p.numel() for p in bucket]), strict=True):
                p.grad = grad.view_as(p).to(p.dtype)

    def _arrived(self, number, p):
        """Torch has added a backward's gradient to p, which is in this bucket."""
        if number < self.kept:
            p.grad = None
        elif self.last:
            if p not in self.missing[number]:
                raise InputError(
                    "this model adds to a gradient twice in one backward (checkpointing of its own code?); "
                    "train it with one process"
                )
            self.missing[number].remove(p)
            while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
                self._send()

    def _send(self):
        """Begin the sum of the next bucket. If memory runs out here, nothing has been sent."""
        bucket = self.buckets[len(self.sent)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        rows = [grad.reshape(-1).to(self.dtype) for grad in grads]
        # A single one, which is large, is summed where it lies: the gradient of a matrix is a result of its
        # own. That of a vector may share its memory with other gradients that the backward still reads.
        numbers = rows[0] if len(rows) == 1 and bucket[0].dim() > 1 else torch.cat(rows)
        self.sent.append((numbers, self.world.begin_sum(numbers)))
        for p in bucket:
            p.grad = None

    def _send_rest(self):
        """Begin the sums of all buckets that have not been sent."""
        self.last = False
        while len(self.sent) < len(self.buckets):
            self._send()


def cut_into_buckets(parameters):
    """Parameters -> lists of neighbours with at most BUCKET numbers in all, or of a single larger one."""
    found, count = [], 0
    for p in parameters:
        if not found or count + p.numel() > BUCKET:
            found.append([])
            count = 0
        found[-1].append(p)
        count += p.numel()
    return found
