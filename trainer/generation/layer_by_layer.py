"""The sampler's copy in a run with ``--shard 1``, where a whole one does not fit: gathered layer by layer.

Embeddings, final norm and head are whole in every process, in the dtype of sampling. The weights of a layer
lie one behind the other, and each process keeps an equal part of them. While the model computes, all
processes gather one layer after the other, into two buffers that take turns: the next layer comes while one
computes. Each decoding step thus sends nearly the whole model. So it is slow, and memory_check.py chooses it
only where nothing else fits.

Processes sample different numbers of tokens, and they prefill and try again at different times. But each
forward of the model, whatever it is for, is one *round*: first all say whether they still sample, then come
the layers in order. A process that has sampled all goes on with rounds, in which it computes nothing, until
nobody samples (``together``). If memory runs out in the middle of a round, that process makes the rest of
this round's gathers before it tries again with fewer slots. So nobody waits for ever.

Tokens are those of a whole copy. On a CPU that copy lays out its weights for speed, which rounds products in
another way; here they are multiplied as they are.
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from errors import InputError
from model.shards import without_memory
from trainer.compute.sharding import layers_of
from trainer.generation.experts import use_all_experts
from trainer.generation.sampler_copy import JoinedLinear, SamplerCopy

ALIGNED = 128  # each weight begins at a multiple of so many numbers, as memory of its own would


class LayeredCopy(SamplerCopy):
    """A ``SamplerCopy`` of which each process has a part. All processes must make it, ``load`` it and sample
    from it (``together``) in the same order. policy: whether it can be packed has been tried, because here it
    has no numbers until ``load``; world: of these processes (``World``)."""

    steps_can_be_captured = False

    def __init__(self, policy, dtype, device, world):
        self.world = world
        self.parts = None  # of each layer [numbers of it / processes], while the copy is loaded
        self.gathering = None  # the gather that goes on
        self.expected = 0  # the layer that computes next in this round
        self.blocks = 0  # of ``together`` that this process is in
        super().__init__(policy, dtype, device)

    def _parameters_of(self, policy, dtype, device):
        return {id(p): without_memory(p.shape, dtype, False) for p in policy.parameters()}

    def _lay_out(self, device):
        """Let the weights of the layers be views of the two buffers, and gather them where they are used."""
        layers = layers_of(self.model.base_model)
        tensors = [list(layer.parameters()) for layer in layers]
        if device.type == "cuda":
            use_all_experts(self.model)
        self._join(JoinedLinear)  # from here on the layers have what is joined instead
        joined = [[x for x in layer.modules() if isinstance(x, JoinedLinear)] for layer in layers]
        for own, modules in zip(tensors, joined, strict=True):
            own += [x for module in modules for x in (module.weight, module.bias) if x is not None]
        views = self._views(tensors, device)
        for module in (module for modules in joined for module in modules):
            module.weight, module.bias = views[id(module.weight)], views.get(id(module.bias))
        for p in self.model.parameters():  # outside the layers
            if id(p) not in views:
                views[id(p)] = torch.empty_like(p, device=device)
        self.weights = {name: views[id(p)] for name, p in self.weights.items()}
        self.model._apply(lambda x: views[id(x)] if id(x) in views else x.to(device))
        self.sampling = torch.zeros(1, device=device)  # whether anybody samples
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._begin_layer, number))
        backbone = self.model.base_model
        backbone.forward = partial(self._round, backbone.forward)

    def _views(self, tensors, device):
        """Tensors of each layer, which have no memory -> {id: the same as a view of its buffer}"""
        starts = [_starts(own) for own in tensors]
        self.sizes = [size + -size % self.world.size for _, size in starts]
        largest, dtype = max(self.sizes), self.model.dtype
        self.buffers = [torch.empty(largest, dtype=dtype, device=device) for _ in range(2)]
        names, views = {id(p): name for name, p in self.weights.items()}, {}
        self.places = {}  # {name of a weight: (its layer, the place of its first number in the layer)}
        for number, (own, (begin, _)) in enumerate(zip(tensors, starts, strict=True)):
            for x in own:
                place = begin[x.untyped_storage()] + x.storage_offset()
                views[id(x)] = self.buffers[number % 2].as_strided(x.shape, x.stride(), place)
                if id(x) in names:
                    self.places[names[id(x)]] = number, place
        return views

    def load(self, policy):
        """Keep this process' part of the weights of a policy. All processes must call it. SystemExit if they
        have not laid out their copies alike."""
        places = self.world.gather(self.places)
        if any(other != places[0] for other in places):
            raise SystemExit("error: processes put the weights of the sampler into different places")
        like = self.buffers[0]
        self.parts = [like.new_empty(size // self.world.size) for size in self.sizes]
        super().load(policy)

    def _fill(self, name, x):
        if name not in self.places:
            super()._fill(name, x)
            return
        number, start = self.places[name]
        part = self.parts[number]
        first = self.world.rank * len(part)
        begin, end = max(start, first), min(start + x.numel(), first + len(part))
        if begin < end:
            part[begin - first : end - first] = x.flatten()[begin - start : end - start]

    def unload(self):
        """Free the memory of all weights and buffers, until the next ``load``."""
        super().unload()
        self.parts = None

    @contextmanager
    def together(self):
        """A block in which this process may sample any number of times. All processes must enter it, and it
        ends when all have done their work, or failed with an InputError. Blocks inside it do nothing."""
        failed, self.blocks = None, self.blocks + 1
        try:
            yield
        except InputError as error:
            failed = error
        self.blocks -= 1
        while not self.blocks and self._anybody_samples(False).item():
            self._gather(0)
            self._rest_of_round()
        if failed:
            raise failed

    def _round(self, forward, *inputs, **options):
        """The backbone's forward, for which all processes gather its layers."""
        self._anybody_samples(True)  # the answer is not read: a GPU would have to wait for it
        self._gather(0)
        try:
            return forward(*inputs, **options)
        except RuntimeError:  # memory may have run out: the others wait for the rest of this round
            self._rest_of_round()
            raise

    def _anybody_samples(self, here):
        """Begin a round -> a tensor [1], not 0 if a process samples. here: whether this one does."""
        self.sampling.fill_(here)
        self.world.collective(dist.all_reduce, self.sampling, dist.ReduceOp.MAX)
        self.expected = 0
        return self.sampling

    def _gather(self, number):
        """Begin to gather this layer into its buffer."""
        whole = self.buffers[number % 2][: self.sizes[number]]
        gather = partial(dist.all_gather_into_tensor, async_op=True)
        try:
            self.gathering = self.world.collective(gather, whole, self.parts[number])
        except torch.OutOfMemoryError:  # the others have begun this gather: there is no way back
            raise SystemExit("error: out of memory while layers are gathered; lower --max_gen_len") from None

    def _begin_layer(self, number, *_):
        """Wait for this layer, and begin to gather the next one: the layer before has left its buffer."""
        if number != self.expected:
            raise RuntimeError(f"layer {number} computes where layer {self.expected} was gathered")
        self.world.collective(self.gathering.wait)
        self.expected += 1
        if self.expected < len(self.sizes):
            self._gather(self.expected)

    def _rest_of_round(self):
        """Take part in the gathers of this round that are still to come."""
        while self.expected < len(self.sizes):
            self._begin_layer(self.expected)


def _starts(tensors):
    """Where the memory of these tensors, some of which share it, has its place in a layer -> ({storage: place
    of its first number}, numbers of the layer)."""
    begin, size = {}, 0
    for x in tensors:
        storage = x.untyped_storage()
        if storage not in begin:
            begin[storage] = size
            count = storage.nbytes() // x.element_size()
            size += count + -count % ALIGNED
    return begin, size
