"""The sampler: prompts -> responses by continuous batching, for any transformers model with a KV cache.

``Sampler.load`` says which policy samples: in training the old actor, in evaluation the actor.

A fixed number of slots each hold one sequence, at its own position. A decoding step gives every live sequence
one token. Finished sequences leave, the last live ones move into their slots, and waiting prompts are
prefilled into the slots behind. The sampled tokens do not depend on any of this, up to rounding: see
sampling.py. What ends a response: stops.py.

Of responses of several turns, keys and values stay until the slot is needed: a call begins a later turn with
the tokens that are new, where these are few (``Engine._go_on``).
"""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from errors import InputError
from progress_bar import phase
from trainer.compute.batch import Batch, new_batch
from trainer.compute.batching import fp64_device, micro_batches, pad_right, send, tokens_per_forward
from trainer.compute.kernels import kernels_for
from trainer.compute.logprobs import head_logits
from trainer.compute.memory import attempt, empty_device_cache, out_of_memory_error
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.kv_cache import KVCache, bytes_per_token
from trainer.generation.sampler_copy import SamplerCopy
from trainer.generation.sampling import GREEDY, sample_tokens, uniform
from trainer.generation.stops import Forbidden, StopStrings

SLOTS = 256  # at most so many sequences decode together
NONE = (0, 0, 0)  # sizes of calls to come: none known
CACHE_BYTES = 4 << 30  # at most this much memory for their keys and values, where nothing else is asked for
# Compact the batch once an eighth of the rows have finished, because moving cache rows costs time
COMPACT_AT = 8
STEPS_PER_CHECK = 8  # on a GPU, decoding steps between two checks for finished sequences, which wait for it
MIN_GRAPH_COLUMNS = 128  # the least columns of a captured step; more double them
GRAPH_ROWS = 32  # rows of a captured step: a power of 2 up to here, above it a multiple
FEW = 4  # a later turn goes on from the cache where at most one in so many of its tokens is new,
MOST = 64  # and no more than these: all rows of a call take as many steps as the one with the most
# On a CPU, decoded rows and the head's come in multiples of 8: in fp32, products of fewer rows may round
# differently, and in bf16 oneDNN compiles code for each new shape
ROW_MULTIPLE = 8

Ends = tuple[Forbidden, StopStrings | None]  # what ends a response: EOS ids, and from where on; its stops


class Sampler:
    """Samples responses with its own copy of a policy. Build it once, then ``load`` newer weights into it.

    cache_bytes: of keys and values, at most. sizes: (most prompts of a call, longest prompt plus response,
    longest response) of the calls to come, as far as they are known: the engine is built with room for them.
    device: default the policy's.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        dtype: torch.dtype = torch.float32,
        slots: int = SLOTS,
        cache_bytes: int = CACHE_BYTES,
        sizes: tuple[int, ...] = NONE,
        device: torch.device | None = None,
    ) -> None:
        self.copy = SamplerCopy(policy, dtype, device or policy.device)
        self.slots = slots
        self.cache_bytes = cache_bytes
        self.graphs = CudaGraphs(self.copy.model.device)
        self.engine: Engine | None = None
        self.sizes = sizes if self.graphs.asynchronous else NONE  # a CPU has no graphs to lose

    def load(self, policy: PreTrainedModel) -> "Sampler":
        """Copy this policy's weights into the sampler. -> self"""
        self.copy.load(policy)
        if self.engine:
            self.engine.ended = False  # keys and values are of the weights before
        return self

    def release(self) -> None:
        """Free the engine, with its keys and values and its graphs. The next ``sample`` builds them again."""
        self.engine = None
        self.graphs.forget()
        empty_device_cache()

    def sample(
        self,
        prompt_ids: list[list[int]],
        keys: Tensor,
        eos_ids: list[int],
        max_gen_len: int,
        temperature: float,
        min_gen_len: int = 0,
        stops: StopStrings | None = None,
        textless: tuple[tuple[int, int], ...] = (),
        greedy: Sequence[bool] = (),
        first_places: Sequence[int] = (),
    ) -> Batch:
        """One response a prompt -> ``Batch`` with its first five fields, in the order of the prompts.

        keys [B]: from ``noise_keys``; textless: of ``Forbidden``; greedy [B]: whose tokens are the likeliest
        ones; temperature 0: all, at 1. first_places [B], of several turns: how many tokens at the end of each
        prompt are of the response, its earlier turns: lengths and noise go on behind them.
        InputError if a single sequence does not fit, or if the model gives NaN.
        """
        count = len(prompt_ids)
        first = [*first_places] or [0] * count
        width = max(len(ids) - place for ids, place in zip(prompt_ids, first, strict=True)) + max_gen_len
        noise = uniform(keys, max_gen_len)
        noise.masked_fill_(torch.tensor(greedy or [temperature == 0] * count)[:, None], GREEDY)

        def run():
            sizes = tuple(map(max, self.sizes, (count, width, max_gen_len)))
            engine = self._engine(sizes, (Forbidden(min_gen_len, tuple(eos_ids), textless), stops))
            engine.start(prompt_ids, noise, temperature or 1.0, first, keeps=len(first_places) > 0)
            with phase("sampling", count, "responses") as bar:
                while engine.waiting or engine.live:
                    engine.admit()
                    engine.advance()
                    engine.compact()
                    bar.update(count - len(engine.waiting) - engine.live - bar.n)
            engine.ended = True
            return engine

        with torch.inference_mode():
            # Again with half the slots where memory runs out: the same tokens up to rounding
            while (engine := attempt(run)[1]) is None:
                self.release()  # before anything is built again, so that no two caches fill the memory
                if self.tried == 1:
                    raise out_of_memory_error(width)
                self.slots = self.tried // 2
        # Not in inference mode: its tensors may take part in training.
        tokens = engine.tokens[:count]
        logprobs = engine.logprobs[:count]
        response_len = engine.response_len[:count]
        if any(first):
            begun = send(torch.tensor(first), tokens.device)
            columns = begun[:, None] + torch.arange(max_gen_len, device=tokens.device)
            columns.clamp_(max=tokens.shape[1] - 1)
            tokens = tokens.gather(1, columns)
            logprobs = logprobs.gather(1, columns)
            response_len = response_len - begun
        batch = new_batch(prompt_ids, tokens, logprobs, response_len, engine.finished[:count])
        if not batch.sampler_logprobs.isfinite().all():
            raise InputError(
                f"in {str(self.copy.model.dtype)[6:]} the policy gives numbers that are NaN or infinite; "
                "use --dtype float32, or lower the learning rates"
            )
        return batch

    def _engine(self, sizes, ends):
        """The engine for a call of these sizes, with as many slots as there is room for."""
        if self.engine is None or (sizes, ends) != (self.sizes, self.engine.ends):
            self.release()  # an engine goes before the new one allocates
            self.sizes = sizes
            model = self.copy.model
            rows, width, _ = sizes
            most = rows + -rows % ROW_MULTIPLE
            sequence = width * bytes_per_token(model.config, model.dtype.itemsize)
            self.tried = min(self.slots, most, max(1, self.cache_bytes // sequence))
            self.engine = Engine(model, self.tried, sizes, ends, self.graphs)
        return self.engine


class Engine:
    """The slots, the sequences in them and the results. Tensors keep their addresses, as CUDA graphs require.

    sizes: (rows, most prompts of a call; width, of the cache; longest response). The first ``live`` slots
    hold sequences that go on; the others count as done: they are empty, or hold what is kept. ``state``
    [6, slots] describes the slots; tokens, logprobs and noise have a row for each prompt, and one with a
    column more: what slots that are done write.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, sizes: tuple[int, ...], ends: Ends, graphs: CudaGraphs
    ) -> None:
        rows, width, limit = sizes
        self.model = model
        self.head = model.get_output_embeddings()
        self.slots = slots
        self.ends = ends
        self.cache = KVCache(model, slots, width)
        names = inspect.signature(model.base_model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
        self.graphs = graphs
        self.device = model.device
        self.forbidden, stops = ends
        self.eos = send(torch.tensor(self.forbidden.end_ids), self.device)
        self.stop_table = send(stops.table, self.device) if stops else None
        zeros = self.eos.new_zeros  # ids, on the device
        # begun: how much of a stop string the text ends with, a state of ``StopStrings``. done: 0 while the
        # sequence goes on; 1 where it was cut, or the slot is empty; 2 or 3 where it has ended by itself
        self.state = zeros(6, slots)
        self.row, self.token, self.position, self.count, self.begun, self.done = self.state
        place = fp64_device(self.device)
        self.noise = zeros(rows + 1, limit + 1, dtype=torch.float64, device=place)
        self.tokens = zeros(rows + 1, limit + 1)
        self.logprobs = zeros(rows + 1, limit + 1, dtype=torch.float32)
        self.response_len = zeros(rows)
        self.finished = zeros(rows, dtype=torch.bool)
        self.keeps = False
        self.ended = False  # whether the cache holds what the last call has kept

    def start(
        self,
        prompt_ids: list[list[int]],
        noise: Tensor,
        temperature: float,
        first_places: list[int],
        keeps: bool,
    ) -> None:
        """Begin a call: all prompts wait, the longest first, so that similar ones are prefilled together.
        noise [B, longest response] fp64: of ``uniform``, or ``GREEDY``; first_places: as in ``sample``.
        keeps: finished sequences stay in free slots, for later turns in further calls."""
        kept = self._kept() if self.keeps and self.ended else {}
        self.ended = False  # until all responses are there
        self.keeps = keeps
        self.first_places = first_places
        self.prompts = [tuple(prompt) for prompt in prompt_ids]
        self.temperature = temperature
        self.limit = noise.shape[1]
        self.waiting = sorted(range(len(prompt_ids)), key=lambda i: (len(prompt_ids[i]), -i))
        self.noise[: len(noise), : self.limit] = send(noise, self.noise.device)
        self.longest = 0  # at most how many tokens the sequence in a slot has
        self._clear_slots(0)
        self._go_on(kept)

    def _clear_slots(self, live):
        """Mark the slots from ``live`` on as empty: what they write goes to the last row and column."""
        self.live = live
        self.row[live:] = len(self.tokens) - 1
        self.position[live:] = 0
        self.done[live:] = 1

    def _kept(self):
        """{tokens whose keys and values are in the cache: [the slots]} of sequences of the call before."""
        kept: dict[tuple[int, ...], list[int]] = defaultdict(list)
        tokens = self.tokens.tolist()
        for slot, (row, position) in enumerate(zip(self.row.tolist(), self.position.tolist(), strict=True)):
            if row + 1 < len(tokens):
                ids = (*self.prompts[row], *tokens[row][self.first_places[row] :])
                kept[ids[:position]].append(slot)
        return kept

    def _go_on(self, kept):
        """Let later turns go on from the cache: the tokens that are new are decoded, all but the last one of
        each. As long as there are slots for all, it does not depend on other rows which turns these are:
        rounding would, too."""
        found = []  # (row, slot, how many of its tokens are in the cache)
        counts = {len(ids) for ids in kept}
        for row in self.waiting if kept else ():
            prompt = self.prompts[row]
            most = min(len(prompt) // FEW, MOST, self.first_places[row])  # the first prompt is in the cache
            tried = counts & {*range(len(prompt) - most, len(prompt))}
            known = max((n for n in tried if kept.get(prompt[:n])), default=0)
            if known:
                found.append((row, kept[prompt[:known]].pop(), known))
        if not found:
            return
        rows, slots, lengths = zip(*found, strict=True)
        self.live = len(rows)
        self.waiting = [row for row in self.waiting if row not in rows]
        new = slice(0, self.live)
        self.cache.move(send(torch.tensor(slots), self.device), new, max(lengths))
        steps = max(len(self.prompts[row]) - known for row, _, known in found)
        places = []  # aligned at their ends: a row with fewer new tokens waits at its first one
        for row, _, known in found:
            end = len(self.prompts[row])
            places.append([known] * (steps - end + known) + [*range(known, end)])
        tokens = [[self.prompts[row][i] for i in mine] for row, mine in zip(rows, places, strict=True)]
        begun = [self.first_places[row] for row in rows]
        self.state[:, new] = 0
        self.row[new], self.count[new] = send(torch.tensor([rows, begun]), self.device)
        self.longest = max(len(self.prompts[row]) for row in rows)
        self._share()
        columns = send(torch.tensor([tokens, places]), self.device).unbind(2)
        for column in columns[:-1]:
            self.token[new], self.position[new] = column
            self._run(self._feed)
        self.token[new], self.position[new] = columns[-1]

    def admit(self) -> None:
        """Prefill waiting prompts into free slots, once an eighth of the slots are free, or enough for all
        waiting prompts, or no sequence is live. Rows with the same prompt share its computation."""
        free = min(self.slots - self.live, len(self.waiting))
        if not free or (self.live and free < min(len(self.waiting), self.slots // COMPACT_AT)):
            return
        groups = defaultdict(list)  # {prompt: its rows}
        for _ in range(free):
            row = self.waiting.pop()
            groups[self.prompts[row]].append(row)
        prompts = list(groups)
        lengths = [len(prompt) for prompt in prompts]
        for index in micro_batches(lengths, tokens_per_forward(self.device)):
            self._prefill([prompts[i] for i in index], [groups[prompts[i]] for i in index])
        self.longest = max(self.longest, *lengths)
        self._share()

    def _share(self):
        """Tell a CPU's cache which prompts are in the slots: it reads each once for all its answers."""
        if self.cache.block:
            rows = self.row[: self.live].tolist()
            self.cache.share(
                [self.prompts[row][: len(self.prompts[row]) - self.first_places[row]] for row in rows]
            )

    def _prefill(self, prompts, groups):
        """Compute these prompts, and sample the first token of each row of their groups."""
        tokens, lengths = pad_right(prompts, self.device)
        self.cache.prefill(self.live)
        positions = self.cache.numbers[: tokens.shape[1]].expand_as(tokens)
        states = self._hidden_states(tokens, positions, None)
        first = [(i, rows[0]) for i, rows in enumerate(groups)]
        again = [(i, row) for i, rows in enumerate(groups) for row in rows[1:]]
        new_rows = [(i, row, self.first_places[row]) for i, row in (*first, *again)]
        place, row, begun = send(torch.tensor(new_rows).T, self.device)
        new = slice(self.live, self.live + len(row))
        if again:
            self.cache.move(self.live + place, new, tokens.shape[1])
        last = lengths[place] - 1
        self.state[:, new] = 0
        self.row[new] = row
        self.count[new] = begun
        self.position[new] = last
        self._sample_and_store(new, states[place, last])
        self.live = new.stop

    def advance(self) -> None:
        """Decode the next token of every live sequence; on a GPU, ``STEPS_PER_CHECK`` tokens without waiting
        for it."""
        for _ in range(STEPS_PER_CHECK if self.graphs.asynchronous else 1):
            self.longest = min(self.longest + 1, self.cache.width)
            self._run(self._decode, self.temperature, self.limit)

    def _run(self, step, *constants):
        """Run a step of the live slots, whose positions are below ``longest``. constants: its others."""
        gpu = self.graphs.asynchronous
        multiple = _bucket(self.live, 1, GRAPH_ROWS) if gpu else ROW_MULTIPLE
        rows = min(self.slots, self.live + -self.live % multiple)
        columns = self.longest
        if gpu:
            least = self.cache.width if self.cache.fused else MIN_GRAPH_COLUMNS
            columns = _bucket(columns, least, self.cache.width)
        key = (rows, columns, *constants, step.__name__)
        self.graphs.run(key, partial(step, rows, columns), self.state)

    def _decode(self, rows, columns):
        """Decode one token in each of the first ``rows`` slots; all positions are below ``columns``."""
        states = self._feed(rows, columns)
        self._sample_and_store(slice(0, rows), states)

    def _feed(self, rows, columns):
        """Put the last token of each of these slots into the cache -> its state [rows, H]."""
        position = self.position[:rows]
        masks = self.cache.decode(position, columns)
        return self._hidden_states(self.token[:rows, None], position[:, None], masks)[:, -1]

    def _hidden_states(self, tokens, positions, masks):
        return self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=masks, **{self.cache_name: self.cache}
        ).last_hidden_state

    def _sample_and_store(self, slots, states):
        """Sample a token for each of these n slots from its state [n, H], and store it. A response ends here:
        at an EOS, at a stop string, or at max_gen_len tokens."""
        row, token, position, count, begun, done = self.state[:, slots]  # views
        logits = self._logits(states)
        if self.forbidden:
            self.forbidden.forbid_(logits, count)
        going_on = done == 0
        position += going_on
        fused = getattr(kernels_for(logits), "sample_and_store", None)
        if fused:  # a GPU's kernels
            state = row, token, count, done
            results = self.tokens, self.logprobs
            fused(logits, self.temperature, self.noise, self.eos, self.limit, state, results)
        else:
            column = torch.where(going_on, count, self.tokens.shape[1] - 1)
            place = self.noise.device
            noise = self.noise[row.to(place), column.to(place)]
            sampled = sample_tokens(logits.to(place), self.temperature, noise)
            drawn, logprob = (x.to(self.device) for x in sampled)
            ended = (drawn[:, None] == self.eos).any(1)
            self.tokens[row, column] = drawn
            self.logprobs[row, column] = logprob
            token.copy_(drawn)
            count += going_on
            done |= (ended & going_on) * 2 | (count >= self.limit)
        if self.stop_table is not None:
            known, ids = self.stop_table.shape
            found = self.stop_table[begun, token.clamp(max=ids - 1)]
            begun.copy_(found % known)
            done |= ((found >= known) & (count >= self.forbidden.min_gen_len) & going_on) * 2

    def _logits(self, states):
        """[n, H] -> [n, V], on a GPU in fp32: rounded to bf16, logits of 16 to 32 would be 0.125 apart"""
        if states.is_cpu:
            return self.head(F.pad(states, (0, 0, 0, -len(states) % ROW_MULTIPLE)))[: len(states)]
        return head_logits(states, self.head.weight, self.head.bias, self.head.weight.dtype)

    def compact(self) -> None:
        """Remove finished sequences, once they are an eighth; the last live ones move into their slots. Where
        sequences are kept, the two change places."""
        row, _, _, count, _, done = self.state[:, : self.live]
        gone = done.tolist()
        stay = [slot for slot, ended in enumerate(gone) if not ended]
        if (self.live - len(stay)) * COMPACT_AT < self.live:
            return
        self.response_len[row] = count
        self.finished[row] = done >= 2
        holes = [slot for slot in range(len(stay)) if gone[slot]]
        if holes:
            moved = stay[-len(holes) :]
            pairs = [moved + holes, holes + moved] if self.keeps else [moved, holes]
            source, target = send(torch.tensor(pairs), self.device)
            self.cache.move(source, target, self.longest)
            self.state[:, target] = self.state[:, source]
        self.live = len(stay)
        if not self.keeps:
            self._clear_slots(self.live)
        self.longest = int(self.position.max())
        self._share()


def _bucket(n, least, most):
    """The smallest power of 2 that is not below n, but never less than ``least`` or more than ``most``."""
    return min(most, max(least, 1 << (n - 1).bit_length()))
