"""A preallocated KV cache whose rows stand at different positions.

Slot s of a layer holds the keys and values of one sequence from column 0 on. Sequences come (``prefill``) and
go (``move``), and the live ones fill the first n slots, so that everything is read through slices: no row is
copied to take a step, and attention reads no column beyond the longest live row.
"""

import torch
import torch.nn.functional as F
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from trainer import kernels
from trainer.attention import ATTENTION, out_of_sight
from trainer.layers import attention_forward, is_quick


def slots_that_fit(config, width, bytes_each, most_bytes):
    """How many sequences of ``width`` tokens a cache of ``most_bytes`` holds, one at least."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(1, most_bytes // (2 * config.num_hidden_layers * heads * dim * width * bytes_each))


def is_fused(model):
    """Whether one function computes what lies between the products of every attention layer."""
    layers = [module for module in model.modules() if is_quick(module, attention_forward)]
    return kernels.serve(model.device) and len(layers) == model.config.num_hidden_layers


def cache_dtype(model):
    """Of cached keys and values: on a CPU, torch's products of slices of a cache are slower in bf16, and
    copied."""
    ours = model.config._attn_implementation == ATTENTION and model.device.type == "cpu"
    return torch.float32 if ours and not is_fused(model) else model.dtype


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, heads, width, head_dim]; ``cache`` says where they go."""

    is_sliding = False  # a sliding window is a matter of the mask here

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states, value_states):
        # Zeros: what a row has not reached is masked, but 0 times a stray NaN would still be NaN.
        slots, width, dtype = self.cache.slots, self.cache.width, self.cache.dtype
        self.keys, self.values = (
            x.new_zeros(slots, x.shape[1], width, x.shape[3], dtype=dtype) for x in (key_states, value_states)
        )
        if self.cache.block:  # so many keys side by side are multiplied at once
            self.keys = self._in_blocks(self.keys).contiguous()
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new columns; -> the keys and values that this forward may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, (rows, _, columns, _) = self.cache, key_states.shape
        if cache.positions is None:  # new sequences attend to themselves alone
            new, keys = slice(cache.first, cache.first + rows), key_states
            if cache.block:
                keys = self._in_blocks(F.pad(keys, (0, 0, 0, -columns % cache.block)))
            self.keys[new, :, : keys.shape[2]] = keys
            self.values[new, :, :columns] = value_states
            return key_states, value_states
        place = (cache.numbers[:rows], slice(None), cache.positions)
        self.keys[place] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[place] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:rows, :, : cache.longest], self.values[:rows, :, : cache.longest]

    def move(self, source, target, longest):
        """The sequences in slots ``source`` [k] move to ``target`` [k]; ``longest``: of their lengths."""
        blocks = -(-longest // self.cache.block) if self.cache.block else longest
        self.keys[target, :, :blocks] = self.keys[source, :, :blocks]
        self.values[target, :, :longest] = self.values[source, :, :longest]

    def _in_blocks(self, keys):
        """[n, heads, width, head_dim] -> [n, heads, width / block, head_dim, block]"""
        return keys.unflatten(2, (-1, self.cache.block)).transpose(3, 4)

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return self.cache.width

    def get_mask_sizes(self, query_length):
        return query_length, 0


class SlotCache(Cache):
    """``slots`` sequences of at most ``width`` tokens. Before a forward, say ``prefill`` or ``decode``."""

    def __init__(self, model, slots, width):
        config, device = model.config, model.device
        self.config, self.slots = config, slots
        self.fused, self.dtype = is_fused(model), cache_dtype(model)
        self.block = kernels.lanes() if self.fused else None
        self.width = width = width + (-width % self.block if self.fused else 0)
        self.numbers = torch.arange(slots, device=device)
        self.columns = torch.arange(width, device=device)
        super().__init__(layers=[SlotLayer(self) for _ in range(config.num_hidden_layers)])

    def prefill(self, first):
        """The next forward brings whole prompts, for the slots from ``first`` on."""
        self.first, self.positions = first, None

    def decode(self, positions, longest):
        """The next forward brings one token for each of the first n slots, at ``positions`` [n], all below
        ``longest``. -> additive masks [n, 1, 1, longest], in the form that the model takes."""
        self.positions, self.longest = positions, longest
        if self.fused:  # nobody reads a mask; four dimensions mean that transformers need not make one
            return positions.new_zeros(1, 1, 1, 1, dtype=torch.bool)
        behind = positions[:, None] - self.columns[:longest]  # how far back each column lies
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        kinds = set(kinds or ["sliding_attention" if window else "full_attention"])
        zero, masks = torch.zeros((), dtype=self.dtype, device=behind.device), {}
        for kind in kinds:
            hidden = out_of_sight(behind, window if kind == "sliding_attention" else None)
            masks[kind] = zero.masked_fill(hidden, -torch.inf)[:, None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]

    def attend(self, layer, joint, cos, sin, norms, window):
        """Where the cache is ``fused``: the new tokens' queries, keys and values [n, 1, …] of an attention
        layer, not yet normed or rotated, into the cache, and attention over it -> [n, heads, head_dim]."""
        own = self.layers[layer.layer_idx]
        joint = joint.view(len(joint), -1, layer.head_dim)
        weights, eps = [getattr(x, "weight", None) for x in norms], getattr(norms[0], "variance_epsilon", 0.0)
        return kernels.decode_attention(
            joint, cos, sin, weights, eps, self.positions, own.keys, own.values, window, layer.scaling
        )

    def move(self, source, target, longest):
        """The sequences in slots ``source`` [k] move to ``target`` [k]; ``longest``: of their lengths."""
        for layer in self.layers:
            layer.move(source, target, longest)
