"""A whole run on a device that has no fp64, as a Mac's GPU:
``device_without_fp64.py sim train_ppo …``, with the flags of that script behind it.

A tensor of the device "sim" is a wrapper around a CPU tensor that holds its numbers. Every operation on one
is computed on the CPU. It raises an error where its result is fp64 on the device, and where it mixes tensors
of the device and of the CPU, but for numbers, indices and copies. So it shows where tensors are, and nothing
of the numbers that a real GPU computes. "cpu" in the place of "sim": the same on the CPU, without compiled
kernels.
"""

import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from model.loading import load_policy
from trainer import session
from trainer.compute import batching, logprobs
from trainer.compute.cpu import kernels
from trainer.inputs import check_device, check_sampling
from trainer.runs.distributed import World

MAY_MIX = ("_to_copy", "copy_", "to", "index", "index_put_", "_index_put_impl_")
ON_DEVICE = 0  # operations


class OnDevice(torch.Tensor):
    """numbers: a CPU tensor."""

    @staticmethod
    def __new__(cls, numbers):
        like = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        return cls._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device="sim:0", **like)

    def __init__(self, numbers):
        self.numbers = numbers

    def tolist(self):
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    global ON_DEVICE
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    ours = {id(x.numbers): x for x in tensors if isinstance(x, OnDevice)}
    devices = [x.type == "sim" for x in leaves if isinstance(x, torch.device)]
    there = devices[0] if devices else bool(ours)
    ON_DEVICE += there
    name = func._schema.name.removeprefix("aten::")
    if ours and name not in MAY_MIX and any(x.dim() for x in tensors if not isinstance(x, OnDevice)):
        raise RuntimeError(f"{name} mixes tensors of two devices")
    args, kwargs = tree_map_only(OnDevice, lambda x: x.numbers, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, lambda x: torch.device("cpu"), (args, kwargs))

    def placed(x):
        if id(x) in ours:
            return ours[id(x)] if there else x.clone()
        if there and x.dtype == torch.float64:
            raise RuntimeError(f"{name} makes fp64 numbers on a device that has none")
        return OnDevice(x) if there else x

    return tree_map_only(torch.Tensor, placed, func(*args, **kwargs))


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def begin():
    """From here on there is the device "sim"."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    torch.utils.rename_privateuse1_backend("sim")
    _setup_privateuseone_for_python_backend("sim")
    torch.sim.get_amp_supported_dtype = list
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied, as on real devices
    batching.NO_FP64 = "sim"
    for table in (logprobs.LOGITS_PER_CHUNK, logprobs.MAX_KEPT):
        table["sim"] = table["mps"]


def main(kind, name, *argv):
    kernels.library = lambda: None
    if kind == "sim":
        begin()
    device = torch.device(kind, 0)
    session.init_world = lambda *given: World(0, 1, device)
    script = importlib.import_module(f"trainer.{name}")
    with Device():
        policy = load_policy(script.parse_args(argv).model)
        check_device(policy, device)
        check_sampling(policy, device)
        script.main(argv)
    assert (ON_DEVICE > 1000) == (kind == "sim")


if __name__ == "__main__":
    main(*sys.argv[1:])
