"""The sampler's KV cache: allocated once, one sequence in each row (a slot), each at its own position.

Slot s of a layer holds the keys and values of one sequence, from column 0 on. ``prefill`` adds sequences, and
``move`` copies them into slots that have become free, so that the live ones fill the first n slots. The cache
can therefore be read through slices: a step copies no row, and attention reads no column behind the longest
live row.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel

from trainer.compute.attention import ATTENTION, hidden_places
from trainer.compute.fused_layers import attention_forward, is_fused, layer_forward
from trainer.compute.kernels import kernels_of

# Kinds of rotary positions whose angles depend on a token's own position alone. Those of "dynamic" and
# "longrope" depend on the length of the sequence too.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


def bytes_per_token(config: PretrainedConfig, bytes_each: int) -> int:
    """The bytes of one token's keys and values in all layers. bytes_each: a number's."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * bytes_each


def tabulate_rotary(model: PreTrainedModel, width: int) -> None:
    """Let the model look up the cosines and sines of rotary positions below ``width``, in its own dtype,
    while a GPU samples: transformers computes them at every step, in nine small kernels, and a small model
    has about 80 in a step. The numbers are the same. Models of other kinds stay as they are."""
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) not in ROTARY_KINDS:
        return
    like = model.get_input_embeddings().weight
    cos, sin = type(rotary).forward(rotary, like, torch.arange(width, device=model.device)[None])
    rotary.forward = lambda x, position_ids: (cos[0, position_ids], sin[0, position_ids])


class KVCache(Cache):
    """A cache of ``slots`` sequences of at most ``width`` tokens. Call ``prefill`` or ``decode`` before each
    forward of the model.

    ``keys`` and ``values``: {layer: [slots, heads, width, head_dim]}, from the first forward on. ``fused``: a
    kernel does all that every attention layer does between its products. Where it has a ``block``, keys lie
    as in ``_in_blocks``.
    """

    def __init__(self, model: PreTrainedModel, slots: int, width: int) -> None:
        super().__init__(layers=[])  # transformers takes it for empty: positions and masks are given
        self.config = model.config
        self.slots = slots
        kernels: Any = kernels_of(model.device.type)
        self.kernels = kernels
        able = kernels is not None and model.dtype in kernels.TYPES
        for forward in (attention_forward, layer_forward):
            count = sum(is_fused(module, forward) for module in model.modules())
            able = able and count == model.config.num_hidden_layers
        self.fused = able
        # Where torch decodes on a CPU, its products of cache slices are slower in bf16 and copy the slices.
        ours = self.config._attn_implementation == ATTENTION and model.device.type == "cpu"
        self.dtype = torch.float32 if ours and not self.fused else model.dtype
        self.block = self.kernels.lanes() if self.fused else None
        self.width = width + (-width % self.block if self.block else 0)
        if self.fused and not self.block:  # on a GPU, a step is bound by the number of its kernels
            tabulate_rotary(model, width)
        self.shared: tuple[Tensor, ...] = ()  # what only a CPU's ``decode_attention`` takes
        self.numbers = torch.arange(max(slots, self.width), device=model.device)  # of slots, of columns
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def prefill(self, first: int) -> None:
        """The next forward reads whole prompts and fills the slots from ``first`` on."""
        self.first = first
        self.positions: Tensor | None = None
        self.delta: Tensor | None = None  # what the next layer has still to add to the states

    def share(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """The first slots hold sequences that begin with these prompts. Where several have the same one,
        compiled attention on a CPU reads it in the first of their slots, once for all of them. Only for a
        cache with a ``block``; call it whenever sequences have come or moved."""
        first: dict[tuple[int, ...], int] = {}
        places = sorted((first.setdefault(prompt, slot), slot) for slot, prompt in enumerate(prompts))
        rows = [(slot, leader, len(prompts[slot]) if slot != leader else 0) for leader, slot in places]
        rows += [(slot, slot, 0) for slot in range(len(rows), self.slots)]
        self.shared = (torch.tensor(rows),)

    def decode(self, positions: Tensor, longest: int) -> Tensor | dict[str, Tensor]:
        """The next forward reads one token for each of the first n slots, at ``positions`` [n], all below
        ``longest``. -> the additive attention mask [n, 1, 1, longest], or {layer type: mask} where the layers
        differ. A ``fused`` cache reads no mask and returns the positions as a tensor of four dimensions:
        without any mask transformers would make one."""
        self.positions = positions
        self.longest = longest
        self.delta = None
        if self.fused:
            return positions.view(-1, 1, 1, 1)
        behind = positions[:, None] - self.numbers[:longest]  # how far back a column lies, [n, longest]
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        zero = behind.new_zeros((), dtype=self.dtype)
        masks = {}
        for kind in set(kinds or ["sliding_attention" if window else "full_attention"]):
            hidden = hidden_places(behind, window if kind == "sliding_attention" else None)
            masks[kind] = zero.masked_fill(hidden, -torch.inf)[:, None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [rows, heads, columns, head_dim] -> those that this forward may read."""
        rows, _, columns, _ = key_states.shape
        if layer_idx not in self.keys:
            self.keys[layer_idx] = self._in_blocks(self._room(key_states)).contiguous()
            self.values[layer_idx] = self._room(value_states)
        keys = self.keys[layer_idx]
        values = self.values[layer_idx]
        if self.positions is None:  # a prefill: new sequences attend to their own tokens alone
            new = slice(self.first, self.first + rows)
            blocks = self._in_blocks(key_states)
            keys[new, :, : blocks.shape[2]] = blocks
            values[new, :, :columns] = value_states
            return key_states, value_states
        place = (self.numbers[:rows], slice(None), self.positions)
        keys[place] = key_states[:, :, 0].to(self.dtype)
        values[place] = value_states[:, :, 0].to(self.dtype)
        return keys[:rows, :, : self.longest], values[:rows, :, : self.longest]

    def _room(self, x):
        """Keys or values of the cache, for new ones like x. Zeros: columns that a row has not reached are
        masked, but 0 times a stray NaN would be NaN"""
        return x.new_zeros(self.slots, x.shape[1], self.width, x.shape[3], dtype=self.dtype)

    def _in_blocks(self, keys):
        """[n, heads, width, head_dim] -> [n, heads, width / block, head_dim, block], the last block filled
        up: compiled attention on a CPU multiplies so many keys at once"""
        if not self.block:
            return keys
        keys = F.pad(keys, (0, 0, 0, -keys.shape[2] % self.block))
        return keys.unflatten(2, (-1, self.block)).transpose(3, 4)

    def attend(self, layer: Any, qkv: Tensor, cos: Tensor, sin: Tensor, window: int | None) -> Tensor:
        """Attention of one layer while decoding with a ``fused`` cache -> [n, heads, head_dim].

        qkv [n, 1, …]: queries, keys and values of the new tokens, which stand at ``positions`` of the first
        n slots; neither normed, if there are weights for it, nor rotated yet. Keys and values are written
        into the cache.
        """
        qkv = qkv.view(len(qkv), -1, layer.head_dim)
        norms = [getattr(getattr(layer, name, None), "weight", None) for name in ("q_norm", "k_norm")]
        keys = self.keys[layer.layer_idx]
        values = self.values[layer.layer_idx]
        n, heads, dim = qkv.shape
        kv_heads = values.shape[1]
        heads -= 2 * kv_heads
        out = qkv.new_empty(n, heads, dim)
        self.kernels.decode_attention(
            n, heads, kv_heads, dim, self.width, window or self.width,
            layer.scaling, float(self.config.rms_norm_eps),
            qkv, cos, sin, *norms, self.positions, keys, values, out, *self.shared,
        )  # fmt: skip
        return out

    def keeps(self, delta: Tensor, layer: int) -> bool:
        """Keep what this layer adds to the states as ``delta``, for the next one to add -> whether it is
        kept: on a GPU, while it decodes, if there is a next one."""
        kept = self.block is None and self.positions is not None
        kept = kept and layer + 1 < self.config.num_hidden_layers
        self.delta = delta if kept else None
        return kept

    def move(self, source: Tensor, target: Tensor | slice, longest: int) -> None:
        """Copy the sequences in slots ``source`` [k] to slots ``target`` [k], up to column ``longest``."""
        blocks = -(-longest // self.block) if self.block else longest
        for layer, keys in self.keys.items():
            values = self.values[layer]
            keys[target, :, :blocks] = keys[source, :, :blocks]
            values[target, :, :longest] = values[source, :, :longest]
