"""The sampler: prompts -> responses by continuous batching, for any transformers model with a KV cache.

``Sampler.load`` says which policy samples: in training the old actor, in evaluation the actor.

A fixed number of slots each hold one sequence, at its own position. A decoding step gives every live sequence
one token. Finished sequences leave, the last live ones move into their slots, and waiting prompts are
prefilled into the slots behind. The sampled tokens do not depend on any of this, up to rounding: see
sampling.py. What ends a response: stops.py.
"""

from functools import partial

import torch
import torch.nn.functional as F

from progress_bar import phase
from trainer.compute.batching import micro_batches, pad_right, send, tokens_per_pass
from trainer.compute.kernels import kernels_for
from trainer.compute.logprobs import head_logits
from trainer.compute.memory import attempt, free_memory, out_of_memory_error
from trainer.compute.precision import check_finite
from trainer.compute.rollout_data import as_rollout
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.kv_cache import KVCache, sequence_bytes
from trainer.generation.sampler_copy import SamplerCopy
from trainer.generation.sampling import sample_tokens, uniform
from trainer.generation.stops import HostCopy, StopChecks, early_ends

SLOTS, NONE = 256, (0, 0, 0)  # at most so many sequences decode together; sizes of calls to come: none known
# At most this much memory for their keys and values, on a GPU a share of what is free (``cache_room``)
CACHE_BYTES, CACHE_SHARE = 4 << 30, 1 / 4
# Compact the batch once an eighth of the rows have finished, because moving cache rows costs time
COMPACT_AT = 8
STEPS_PER_CHECK = 4  # on a GPU, decoding steps between two checks for finished sequences
MIN_GRAPH_ROWS, MIN_GRAPH_COLUMNS = 1, 128  # the smallest shape of a captured step; larger ones double it
# On a CPU, decoded rows and the head's come in multiples of 8: in fp32, products of fewer rows may round
# differently, and in bf16 oneDNN compiles code for each new shape
ROW_MULTIPLE = 8


class Sampler:
    """Samples responses with its own copy of a policy. Build it once, then ``load`` newer weights into it.

    cache_bytes: of keys and values, at most; None: ``cache_room``. sizes: (most prompts of a call, longest
    prompt plus response, longest response) of the calls to come, as far as they are known: the engine is
    built with room for them. device: default the policy's.
    """

    def __init__(self, policy, dtype=torch.float32, slots=SLOTS, cache_bytes=None, sizes=NONE, device=None):
        self.copy = SamplerCopy(policy, dtype, device or policy.device)
        self.slots, self.cache_bytes = slots, cache_bytes
        self.graphs, self.engine = CudaGraphs(self.copy.model.device), None
        self.sizes = sizes if self.graphs.asynchronous else NONE  # a CPU has no graphs to lose

    def load(self, policy):
        """Copy this policy's weights into the sampler. -> self"""
        self.copy.load(policy)
        return self

    def release(self):
        """Free the engine, with its keys and values and its graphs. The next ``sample`` builds them again."""
        self.engine = None
        self.graphs.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def sample(self, prompt_ids, keys, eos_ids, max_gen_len, temperature, min_gen_len=0, stops=None):
        """One response a prompt -> ``Rollout`` with its first five fields, in the order of the prompts.

        prompt_ids: B non-empty lists of ids; keys [B]: from ``noise_keys``; eos_ids: each of them ends a
        response; min_gen_len, max_gen_len: in tokens; temperature 0 is greedy; stops: ``StopStrings`` or
        None. When memory runs out, sampling starts again with half the slots: the same tokens up to rounding.
        InputError if a single sequence does not fit, or if the model gives NaN (a large model in fp16).
        """

        def run():
            self._make_room(len(prompt_ids), max(map(len, prompt_ids)) + max_gen_len, max_gen_len)
            engine = self.engine
            engine.start(prompt_ids, keys, eos_ids, max_gen_len, temperature, min_gen_len, stops)
            with phase("sampling", len(prompt_ids), "responses") as bar:
                while engine.waiting or engine.live:
                    engine.admit()
                    engine.advance()
                    engine.compact()
                    bar.done = len(prompt_ids) - len(engine.waiting) - engine.live

        with torch.inference_mode():
            while not attempt(run)[0]:
                slots, width = self.tried
                self.release()  # before anything is built again, so that no two caches fill the memory
                if slots == 1:
                    raise out_of_memory_error(width)
                self.cache_bytes = slots // 2 * sequence_bytes(self.copy.model, width)
        rollout = self.engine.rollout()  # its tensors may take part in training
        check_finite(rollout.sampler_logprobs, self.copy.model.dtype, "the policy")
        return rollout

    def _make_room(self, *needs):
        """See to an engine for a call of these sizes, with as many slots as there is room for."""
        has = self.engine.sizes if self.engine else self.sizes
        if self.engine and all(a >= b for a, b in zip(has, needs, strict=True)):
            return
        if self.engine:  # it goes before the new one allocates, and before free memory is counted
            self.release()
        rows, width, limit = map(max, has, needs)
        model = self.copy.model
        room = cache_room(model.device) if self.cache_bytes is None else self.cache_bytes
        most = rows if self.graphs.asynchronous else rows + -rows % ROW_MULTIPLE
        slots = min(self.slots, most, max(1, room // sequence_bytes(model, width)))
        self.tried = slots, width
        self.engine = Engine(model, slots, rows, width, limit, self.graphs)


def cache_room(device):
    """The most bytes for keys and values, where nothing else is asked for: on a GPU a share of the memory
    that is not in use; on a CPU, and with deterministic algorithms, a fixed number."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return CACHE_BYTES
    return int(CACHE_SHARE * free_memory(device))


def sample(policy, prompt_ids, keys, eos_ids, max_gen_len, temperature, slots=SLOTS):
    """``Sampler.sample`` with a sampler for this one call, in the policy's own dtype."""
    return Sampler(policy, policy.dtype, slots).sample(prompt_ids, keys, eos_ids, max_gen_len, temperature)


class Engine:
    """The slots, the sequences in them and the results. Tensors keep their addresses, as CUDA graphs require.

    rows: most prompts of a call; width: longest prompt plus response; limit: longest response, in tokens.
    [slots] tensors describe the slots. The first ``live`` slots hold sequences; the others are empty and
    count as done. [rows + 1, …] tensors hold the results, one row for each prompt. Slots that are done write
    to the last row or column, which is never read.
    """

    def __init__(self, model, slots, rows, width, limit, graphs):
        self.model, self.head = model, model.get_output_embeddings()
        self.sizes, self.slots = (rows, width, limit), slots
        self.unread_row, self.unread_column = rows, limit  # the last ones of the results
        self.cache, self.graphs = KVCache(model, slots, width), graphs
        self.device = device = model.device

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.row, self.token, self.position, self.count = (zeros(self.slots) for _ in range(4))
        self.done = zeros(self.slots, dtype=torch.bool)
        self.noise = zeros(rows + 1, limit + 1, dtype=torch.float64)
        self.tokens = zeros(rows + 1, limit + 1)
        self.logprobs = zeros(rows + 1, limit + 1, dtype=torch.float32)
        self.response_len, self.finished = zeros(rows + 1), zeros(rows + 1, dtype=torch.bool)
        self.limit, self.ends = zeros(1), {}
        self.flags = HostCopy(self.done, graphs.asynchronous)
        self.state = [self.row, self.token, self.position, self.count, self.done]
        self.results = [self.tokens, self.logprobs, self.response_len, self.finished]

    def start(self, prompt_ids, keys, eos_ids, max_gen_len, temperature, min_gen_len=0, stops=None):
        """Begin a call: all prompts wait, the longest first, so that similar ones are prefilled together."""
        self.prompt_ids, self.temperature = prompt_ids, temperature
        ends = tuple(eos_ids), min_gen_len
        if ends not in self.ends:  # kept, because captured steps read their tensors
            self.ends[ends] = send(torch.tensor(eos_ids), self.device), early_ends(min_gen_len, eos_ids)
        self.eos, self.early_ends = self.ends[ends]
        self.key = (temperature, *ends)  # what a captured step depends on, besides its shape
        self.waiting = sorted(range(len(prompt_ids)), key=lambda i: (len(prompt_ids[i]), -i))
        self.limit.fill_(max_gen_len)
        self.noise[: len(keys), :max_gen_len] = uniform(send(keys, self.device), max_gen_len)
        self.response_len.zero_()
        self.finished.zero_()
        self.lengths = []
        self.stops = StopChecks(stops, min_gen_len, self, STEPS_PER_CHECK + 1) if stops else None
        self._clear_slots(0)
        self.flags.send(self.done[:0])

    def _clear_slots(self, live):
        """Mark the slots from ``live`` on as empty: what they write goes to the last row and column."""
        self.live = live
        self.row[live:], self.position[live:], self.done[live:] = self.unread_row, 0, True

    def admit(self):
        """Prefill waiting prompts into free slots, once an eighth of the slots are free, or enough for all
        waiting prompts, or no sequence is live."""
        free = min(self.slots - self.live, len(self.waiting))
        if self.live and free < min(len(self.waiting), max(1, self.slots // COMPACT_AT)):
            return
        groups = {}  # rows with the same prompt, which is computed once
        for row in (self.waiting.pop() for _ in range(free)):
            groups.setdefault(tuple(self.prompt_ids[row]), []).append(row)
        groups = list(groups.values())
        lengths = [len(self.prompt_ids[rows[0]]) for rows in groups]
        for index in micro_batches(lengths, tokens_per_pass(self.device)):
            self._prefill([groups[i] for i in index])
        self.longest = self._longest()

    def _longest(self):
        """At most how many tokens the sequence in a slot has. A GPU is not asked: the host has counted."""
        if self.graphs.asynchronous:
            return max(self.lengths, default=0)
        return int(self.position.max())

    def _prefill(self, groups):
        """Compute the prompts of these groups of rows, and sample the first token of each row."""
        own = range(len(groups))  # the first row of each group is computed, the others get copies
        rows = [group[0] for group in groups] + [row for group in groups for row in group[1:]]
        place = send(torch.tensor([*own, *(i for i in own for _ in groups[i][1:])]), self.device)
        tokens, lengths = pad_right([self.prompt_ids[row] for row in rows[: len(own)]], self.device)
        new = slice(self.live, self.live + len(rows))
        self.cache.prefill(self.live)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        states = self._hidden_states(tokens, positions, None)
        if len(rows) > len(own):
            slots = torch.arange(new.start, new.stop, device=self.device)
            copied = slice(len(own), None)
            self.cache.move(slots[place[copied]], slots[copied], tokens.shape[1])
        lengths = lengths[place]
        self.row[new] = send(torch.tensor(rows), self.device)
        self.position[new], self.count[new], self.done[new] = lengths, 0, False
        self._sample_and_store(new, states[place, lengths - 1])
        self.lengths += [len(self.prompt_ids[row]) for row in rows]
        self.live += len(rows)

    def advance(self):
        """Decode the next token of every live sequence; on a GPU, ``STEPS_PER_CHECK`` tokens without waiting
        for it."""
        steps, rows = 1, min(self.slots, self.live + -self.live % ROW_MULTIPLE)
        if self.graphs.asynchronous:
            steps, rows = STEPS_PER_CHECK, _bucket(self.live, MIN_GRAPH_ROWS, self.slots)
        least = MIN_GRAPH_COLUMNS if self.cache.needs_columns else self.cache.width
        for _ in range(steps):
            self.longest = columns = min(self.longest + 1, self.cache.width)
            if self.graphs.asynchronous:
                columns = _bucket(columns, least, self.cache.width)
            step = partial(self._decode, rows, columns)
            self.graphs.run((rows, columns, *self.key), step, self.state + self.results)
        self.lengths = [min(length + steps, self.cache.width) for length in self.lengths]

    def _decode(self, rows, columns):
        """Decode one token in each of the first ``rows`` slots; all positions are below ``columns``."""
        position, done = self.position[:rows], self.done[:rows]
        masks = self.cache.decode(position, columns)
        states = self._hidden_states(self.token[:rows, None], position[:, None], masks)[:, -1]
        position += ~done
        self._sample_and_store(slice(0, rows), states)

    def _hidden_states(self, tokens, positions, masks):
        output = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=self.cache
        )
        return output.last_hidden_state

    def _sample_and_store(self, slots, states):
        """Sample a token for each of these n slots from its state [n, H], and store it. A response ends here:
        at an EOS, or at max_gen_len tokens, which leaves ``finished`` False."""
        row, count, done = self.row[slots], self.count[slots], self.done[slots]
        logits = self._logits(states)
        if self.early_ends:
            self.early_ends.forbid_(logits, count)
        if (fused := getattr(kernels_for(logits), "sample_and_store", None)) is not None:  # a GPU's kernels
            state = row, self.token[slots], count, done
            fused(logits, self.temperature, self.noise, self.eos, self.limit, state, self.results)
            return
        column = torch.where(done, self.unread_column, count)
        token, logprob = sample_tokens(logits, self.temperature, self.noise[row, column])
        ended = (token[:, None] == self.eos).any(1)
        self.tokens[row, column], self.logprobs[row, column] = token, logprob
        self.response_len[row] += ~done
        self.finished[row] |= ended & ~done
        self.token[slots] = token
        count += ~done  # count and done are views: both lines change the slots in place
        done |= ended | (count >= self.limit)

    def _logits(self, states):
        """[n, H] -> [n, V], on a GPU in fp32: rounded to bf16, logits of 16 to 32 would be 0.125 apart"""
        if states.device.type == "cpu":
            return self.head(F.pad(states, (0, 0, 0, -len(states) % ROW_MULTIPLE)))[: len(states)]
        return head_logits(states, self.head.weight, self.head.bias, self.head.weight.dtype)

    def compact(self):
        """Remove finished sequences, once they are an eighth; the last live ones move into their slots."""
        if self.stops:
            self.stops.check()
        done = self.flags.receive(self.done[: self.live]).tolist()
        done += [False] * (self.live - len(done))  # slots that have been filled since the flags were sent
        stay = [slot for slot, ended in enumerate(done) if not ended]
        if (self.live - len(stay)) * COMPACT_AT >= self.live:
            self._remove(done, stay)
        self.flags.send(self.done[: self.live])

    def _remove(self, done, stay):
        """Keep the sequences in slots ``stay``. done: whether each live slot has finished."""
        holes = [slot for slot in range(len(stay)) if done[slot]]
        if holes:
            movers = stay[-len(holes) :]
            source, target = send(torch.tensor([movers, holes]), self.device)
            self.cache.move(source, target, self.longest)
            for x in self.state:
                x[target] = x[source]
            for mover, hole in zip(movers, holes, strict=True):
                self.lengths[hole] = self.lengths[mover]
        self.lengths = self.lengths[: len(stay)]
        self._clear_slots(len(stay))
        self.longest = self._longest()

    def rollout(self):
        """-> ``Rollout``: each response directly behind its prompt in tokens [B, T]; all right-padded."""
        tokens, logprobs, response_len, finished = (x[: len(self.prompt_ids)] for x in self.results)
        if self.stops:
            response_len, finished = self.stops.finish(tokens, response_len, finished)
        return as_rollout(self.prompt_ids, tokens, logprobs, response_len, finished)


def _bucket(n, least, most):
    """The smallest of least, 2 least, 4 least, … that is not below n; never more than ``most``."""
    return min(most, least << max(0, -(-n // least) - 1).bit_length())
