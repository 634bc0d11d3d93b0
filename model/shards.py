"""Parameters of sharded models (``--shard 1``, trainer/compute/sharding.py): DTensors, of which this process
has some rows. Any other tensor is whole.
"""

from collections.abc import Iterable

from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Whether this process has only a part of a tensor."""
    return hasattr(x, "full_tensor")


def local_part(x: Tensor) -> Tensor:
    """What this process has of a tensor, in place: the rows of a sharded one, all of any other."""
    return x.to_local() if is_sharded(x) else x


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor. Of a sharded one all processes must ask for it, in the same order."""
    return x.full_tensor() if is_sharded(x) else x


def sharded_and_whole(tensors: Iterable[Tensor]) -> tuple[list, list]:
    """Tensors -> (those that are sharded, the others), in their order."""
    tensors = list(tensors)
    return [x for x in tensors if is_sharded(x)], [x for x in tensors if not is_sharded(x)]
