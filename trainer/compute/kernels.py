"""Compiled kernels: what a model computes besides matrix products, in few passes over memory.

A CPU's are C functions (cpu/kernels.py), a GPU's are written in Triton (cuda/kernels.py). Both offer the same
functions; only those of token log-probs differ in what they take (logprobs.py). A caller asks ``kernels_for``
with its tensors, and computes with torch's operations where the answer is None.
"""

import warnings
from functools import cache

import torch

from errors import first_line
from trainer.compute.cpu import kernels as cpu


def kernels_of(device_type):
    """The kernels of this kind of device ("cpu", "cuda"), or None where they cannot be compiled or run."""
    if device_type == "cpu":
        return cpu if cpu.library() is not None else None
    return _cuda() if device_type == "cuda" else None


@cache
def _cuda():
    try:
        from trainer.compute.cuda import kernels as cuda

        cuda.check()
    except Exception as error:  # no Triton, a GPU too old for it, no compiler: whatever it raises
        reason = first_line(error)[:120]
        warnings.warn(f"no Triton kernels, plain torch is slower: {reason}", stacklevel=3)
        return None
    return cuda


def kernels_for(*tensors, result=torch.float32):
    """The kernels that can compute with these tensors (None stands for one that is left out) and write a
    result in this dtype, where it is not that of the tensors; or None."""
    kernels = kernels_of(tensors[0].device.type)
    return kernels if kernels is not None and kernels.ready(*tensors, result=result) else None
