"""A preallocated KV cache whose rows stand at different positions.

Slot s of a layer holds the keys and values of one sequence from column 0 on. Sequences come (``prefill``) and
go (``move``), and the live ones fill the first n slots, so that everything is read through slices: no row is
copied to take a step, and attention reads no column beyond the longest live row.
"""

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from trainer.attention import out_of_sight


def slots_that_fit(config, width, bytes_each, most_bytes):
    """How many sequences of ``width`` tokens a cache of ``most_bytes`` holds, one at least."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(1, most_bytes // (2 * config.num_hidden_layers * heads * dim * width * bytes_each))


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
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new columns; -> the keys and values that this forward may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, (rows, _, columns, _) = self.cache, key_states.shape
        if cache.positions is None:  # new sequences attend to themselves alone
            self.keys[cache.first : cache.first + rows, :, :columns] = key_states
            self.values[cache.first : cache.first + rows, :, :columns] = value_states
            return key_states, value_states
        place = (cache.numbers[:rows], slice(None), cache.positions)
        self.keys[place] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[place] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:rows, :, : cache.longest], self.values[:rows, :, : cache.longest]

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return self.cache.width

    def get_mask_sizes(self, query_length):
        return query_length, 0


class SlotCache(Cache):
    """``slots`` sequences of at most ``width`` tokens. Before a forward, say ``prefill`` or ``decode``."""

    def __init__(self, config, slots, width, device, dtype):
        self.config, self.slots, self.width, self.dtype = config, slots, width, dtype
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
        behind = positions[:, None] - self.columns[:longest]  # how far back each column lies
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        kinds = set(kinds or ["sliding_attention" if window else "full_attention"])
        zero, masks = torch.zeros((), dtype=self.dtype, device=behind.device), {}
        for kind in kinds:
            hidden = out_of_sight(behind, window if kind == "sliding_attention" else None)
            masks[kind] = zero.masked_fill(hidden, -torch.inf)[:, None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]

    def move(self, source, target, longest):
        """The sequences in slots ``source`` [k] move to ``target`` [k]; ``longest``: of their lengths."""
        for layer in self.layers:
            for x in (layer.keys, layer.values):
                x[target, :, :longest] = x[source, :, :longest]
