"""Parameters of sharded models (``--shard 1``, trainer/compute/sharding.py): DTensors, of which this process
has some rows. Any other tensor is whole.

Only the main process loads a model (``load_once`` in shard_run.py). Until the models are sharded, the others
have its ``outline``, whose parameters are on torch's meta device: they have a shape and a dtype, but no
memory.
"""

import io
import pickle
from types import MethodType

import torch
from torch import nn
from transformers import PreTrainedModel


def is_sharded(x):
    """Whether this process has only a part of a tensor."""
    return hasattr(x, "full_tensor")


def local_part(x):
    """What this process has of a tensor, in place: the rows of a sharded one, all of any other."""
    return x.to_local() if is_sharded(x) else x


def whole(x):
    """The whole of a tensor. Of a sharded one all processes must ask for it, in the same order."""
    return x.full_tensor() if is_sharded(x) else x


def sharded_and_whole(tensors):
    """Tensors -> (those that are sharded, the others), as lists in their order."""
    tensors = list(tensors)
    return [x for x in tensors if is_sharded(x)], [x for x in tensors if not is_sharded(x)]


def outline(thing):
    """A model, or an object with models in it -> bytes, from which ``pickle.loads`` makes the same without
    the numbers of its parameters. Buffers keep theirs."""
    pickled = io.BytesIO()
    _OutlinePickler(pickled).dump(thing)
    return pickled.getvalue()


class _OutlinePickler(pickle.Pickler):
    def reducer_override(self, thing):
        if isinstance(thing, nn.Parameter):
            return without_memory, (thing.shape, thing.dtype, thing.requires_grad)
        if isinstance(thing, MethodType):  # a layer's forward that is not its class' own
            return bind, (thing.__func__, thing.__self__)
        if isinstance(thing, nn.Module):
            _stop_recording(thing)
        if isinstance(thing, PreTrainedModel):
            return build_outline, (type(thing), thing.config), vars(thing)
        return NotImplemented


def _stop_recording(module):
    """Remove the hooks with which transformers records what a router computes. They cannot be pickled, and
    the next forward that asks for it installs them again."""
    vars(module).pop("_output_capturing_hooks_installed", None)
    for key, hook in list(module._forward_hooks.items()):
        if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
            del module._forward_hooks[key]


def build_outline(kind, config):
    """A model of this class without memory, which gets another's state. It is built, and not only restored,
    because transformers learns there what the class can record."""
    with torch.device("meta"):
        return kind(config)


def bind(function, owner):
    """A function as a method of this object."""
    return MethodType(function, owner)


def without_memory(shape, dtype, trains):
    """A parameter on the meta device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), trains)


def with_memory(model, dtype, device):
    """{id: parameter} of those parameters that have no memory -> others that have some, whose numbers are not
    set. For ``copy.deepcopy``."""
    like = {"dtype": dtype, "device": device}
    found = (p for p in model.parameters() if p.is_meta)
    return {id(p): nn.Parameter(torch.empty_like(p, **like), p.requires_grad) for p in found}
