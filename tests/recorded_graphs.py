"""CUDA graphs on a CPU, for tests: a capture that refuses what a GPU's capture refuses, and a replay of it.

``RecordedGraphs`` takes the place of ``CudaGraphs``. While a step is recorded, nothing is written to memory
that existed before, as in a real capture. A replay computes the recorded operations on the recorded memory:
what Python decided during the recording is decided for good. The compiled kernels of compute/cpu are not
operations of torch, so tests switch them off (``without_kernels``).
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.compute.cpu import kernels
from trainer.generation import engine
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.sampler_copy import SamplerCopy

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "masked_scatter", "equal", "bincount", "_unique2"}
WAITS |= {"unique_dim", "lift_fresh"}  # torch.tensor(a list): a copy from memory that is not pinned


LAY_OUT = SamplerCopy._lay_out  # as a CPU's copy is


def without_kernels(monkeypatch):
    """Compute with torch's operations alone."""
    monkeypatch.setattr(kernels, "library", lambda: None)


def lay_out_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(SamplerCopy, "_lay_out", lambda copy, on_cpu: LAY_OUT(copy, False))


def sample_as_on_a_gpu(monkeypatch):
    """Samplers take the branches of a GPU, and capture their steps here."""
    without_kernels(monkeypatch)
    lay_out_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(engine, "CudaGraphs", RecordedGraphs)


class Waits(TorchDispatchMode):
    """Notes the operations for which the host would wait for a GPU, or for which a capture has no fixed
    size. refuse: whether they raise RuntimeError."""

    def __init__(self, refuse):
        super().__init__()
        self.refuse, self.found = refuse, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # in inference mode, operations come as they were called
                return func.decompose(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        found = name in WAITS
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # where is the mask True?
            found = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if func is torch.ops.aten.repeat_interleave.Tensor:
            found = kwargs.get("output_size") is None
        if found:
            self.found.append(name)
            if self.refuse:
                raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return self.compute(func, args, kwargs)

    def compute(self, func, args, kwargs):
        return func(*args, **kwargs)


class Recording(Waits):
    """Records operations: each with its arguments, and with its results where they are new tensors."""

    def __init__(self):
        super().__init__(refuse=True)
        self.calls, self.own = [], {}

    def compute(self, func, args, kwargs):
        schema = func._schema
        if schema.is_mutable:
            written = [a for a, b in zip(args, schema.arguments, strict=False) if b.is_write]
            self.calls.append((func, args, kwargs, None))
            if all(self._storage(x) in self.own for x in tree_leaves(written)):
                return func(*args, **kwargs)
            return args[0]  # memory of before the capture stays as it is
        out = func(*args, **kwargs)
        if not any(r.alias_info for r in schema.returns):  # a view is no operation on a GPU
            self.own |= {self._storage(x): x for x in tree_leaves(out)}
            self.calls.append((func, args, kwargs, out))
        return out

    @staticmethod
    def _storage(x):
        return x.untyped_storage()._cdata

    def replay(self):
        with torch.inference_mode():
            for func, args, kwargs, out in self.calls:
                result = func(*args, **kwargs)
                if out is not None:
                    for old, new in zip(tree_leaves(out), tree_leaves(result), strict=True):
                        old.copy_(new)


class RecordedGraphs(CudaGraphs):
    """``CudaGraphs`` with the captures of this file. ``warm_ups``: how many captures were tried."""

    def __init__(self, device, possible=True):
        super().__init__(device)
        self.possible, self.asynchronous = possible, True
        self.warm_ups = 0

    def warm_up(self, step):
        self.warm_ups += 1
        if not self.known:
            step()
        with Waits(refuse=True):
            step()

    def record(self, step):
        with Recording() as recording:
            step()
        return recording.replay
