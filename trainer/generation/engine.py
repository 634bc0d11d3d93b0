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
from trainer.compute.memory import attempt, out_of_memory_error
from trainer.compute.precision import check_finite
from trainer.compute.rollout_data import as_rollout
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.kv_cache import KVCache, sequence_bytes
from trainer.generation.sampler_copy import SamplerCopy
from trainer.generation.sampling import sample_tokens, uniform
from trainer.generation.stops import early_ends

SLOTS = 256  # at most so many sequences decode together
NONE = (0, 0, 0)  # sizes of calls to come: none known
CACHE_BYTES = 4 << 30  # at most this much memory for their keys and values, where nothing else is asked for
# Compact the batch once an eighth of the rows have finished, because moving cache rows costs time
COMPACT_AT = 8
STEPS_PER_CHECK = 4  # on a GPU, decoding steps between two checks for finished sequences
MIN_GRAPH_COLUMNS = 128  # the least columns of a captured step; more double them
# On a CPU, decoded rows and the head's come in multiples of 8: in fp32, products of fewer rows may round
# differently, and in bf16 oneDNN compiles code for each new shape
ROW_MULTIPLE = 8


class Sampler:
    """Samples responses with its own copy of a policy. Build it once, then ``load`` newer weights into it.

    cache_bytes: of keys and values, at most; None: ``CACHE_BYTES``. sizes: (most prompts of a call, longest
    prompt plus response, longest response) of the calls to come, as far as they are known: the engine is
    built with room for them. device: default the policy's.
    """

    def __init__(self, policy, dtype=torch.float32, slots=SLOTS, cache_bytes=None, sizes=NONE, device=None):
        self.copy = SamplerCopy(policy, dtype, device or policy.device)
        self.slots = slots
        self.cache_bytes = cache_bytes
        self.graphs = CudaGraphs(self.copy.model.device)
        self.engine = None
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
        width = max(map(len, prompt_ids)) + max_gen_len

        def run():
            self._make_room(len(prompt_ids), width, max_gen_len)
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
                self.release()  # before anything is built again, so that no two caches fill the memory
                if self.tried == 1:
                    raise out_of_memory_error(width)
                self.slots = self.tried // 2
        rollout = self.engine.rollout()  # its tensors may take part in training
        check_finite(rollout.sampler_logprobs, self.copy.model.dtype, "the policy")
        return rollout

    def _make_room(self, *needs):
        """See to an engine for a call of these sizes, with as many slots as there is room for."""
        sizes = tuple(map(max, self.sizes, needs))
        if self.engine and sizes == self.sizes:
            return
        self.release()  # an engine goes before the new one allocates
        self.sizes = rows, width, limit = sizes
        model = self.copy.model
        room = self.cache_bytes or CACHE_BYTES
        most = rows if self.graphs.asynchronous else rows + -rows % ROW_MULTIPLE
        self.tried = min(self.slots, most, max(1, room // sequence_bytes(model, width)))
        self.engine = Engine(model, self.tried, rows, width, limit, self.graphs)


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
        self.model = model
        self.head = model.get_output_embeddings()
        self.sizes = rows, width, limit
        self.slots = slots
        self.unread_row = rows  # the last ones of the results
        self.unread_column = limit
        self.cache = KVCache(model, slots, width)
        self.graphs = graphs
        self.device = model.device

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=model.device)

        # begun: how much of a stop string the text ends with, a state of ``StopStrings``
        self.row, self.token, self.position, self.count, self.begun = (zeros(slots) for _ in range(5))
        self.done = zeros(slots, dtype=torch.bool)
        self.noise = zeros(rows + 1, limit + 1, dtype=torch.float64)
        self.tokens = zeros(rows + 1, limit + 1)
        self.logprobs = zeros(rows + 1, limit + 1, dtype=torch.float32)
        self.response_len = zeros(rows + 1)
        self.finished = zeros(rows + 1, dtype=torch.bool)
        self.limit = zeros(1)
        self.ends = {}
        # What the host knows of ``done``: the first ``sent`` slots, once the copy is there
        self.known = torch.zeros(slots, dtype=torch.bool, pin_memory=self.done.is_cuda)
        self.copied = torch.cuda.Event() if self.done.is_cuda else None
        self.state = [self.row, self.token, self.position, self.count, self.begun, self.done]
        self.results = [self.tokens, self.logprobs, self.response_len, self.finished]

    def start(self, prompt_ids, keys, eos_ids, max_gen_len, temperature, min_gen_len=0, stops=None):
        """Begin a call: all prompts wait, the longest first, so that similar ones are prefilled together."""
        self.prompt_ids = prompt_ids
        self.temperature = temperature
        ends = tuple(eos_ids), min_gen_len, stops
        if ends not in self.ends:  # kept, because captured steps read their tensors
            self.ends[ends] = (
                send(torch.tensor(eos_ids), self.device),
                early_ends(min_gen_len, eos_ids),
                send(stops.table, self.device) if stops else None,
            )
        self.eos, self.early_ends, self.stop_table = self.ends[ends]
        self.least = min_gen_len
        self.key = (temperature, *ends)  # what a captured step depends on, besides its shape
        self.waiting = sorted(range(len(prompt_ids)), key=lambda i: (len(prompt_ids[i]), -i))
        self.limit.fill_(max_gen_len)
        self.noise[: len(keys), :max_gen_len] = send(uniform(keys, max_gen_len), self.device)
        self.response_len.zero_()
        self.finished.zero_()
        self.longest = 0  # at most how many tokens the sequence in a slot has
        self._clear_slots(0)
        self.sent = 0

    def _clear_slots(self, live):
        """Mark the slots from ``live`` on as empty: what they write goes to the last row and column."""
        self.live = live
        self.row[live:] = self.unread_row
        self.position[live:] = 0
        self.done[live:] = True

    def admit(self):
        """Prefill waiting prompts into free slots, once an eighth of the slots are free, or enough for all
        waiting prompts, or no sequence is live. Rows with the same prompt share its computation."""
        free = min(self.slots - self.live, len(self.waiting))
        if self.live and free < min(len(self.waiting), max(1, self.slots // COMPACT_AT)):
            return
        groups = {}  # {prompt: its rows}
        for _ in range(free):
            row = self.waiting.pop()
            groups.setdefault(tuple(self.prompt_ids[row]), []).append(row)
        groups = list(groups.items())
        lengths = [len(prompt) for prompt, _ in groups]
        for index in micro_batches(lengths, tokens_per_pass(self.device)):
            self._prefill([groups[i] for i in index])
        self.longest = max(self.longest, *lengths, 0)

    def _prefill(self, groups):
        """Compute the prompts of these (prompt, rows), and sample the first token of each row."""
        tokens, lengths = pad_right([prompt for prompt, _ in groups], self.device)
        self.cache.prefill(self.live)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        states = self._hidden_states(tokens, positions, None)
        rows = [rows[0] for _, rows in groups]  # what was computed; the others get copies
        place = list(range(len(groups)))
        for i, (_, more) in enumerate(groups):
            rows += more[1:]
            place += [i] * (len(more) - 1)
        place = send(torch.tensor(place), self.device)
        new = slice(self.live, self.live + len(rows))
        if len(rows) > len(groups):
            slots = torch.arange(new.start, new.stop, device=self.device)
            copies = slice(len(groups), None)
            self.cache.move(slots[place[copies]], slots[copies], tokens.shape[1])
        lengths = lengths[place]
        self.row[new] = send(torch.tensor(rows), self.device)
        self.position[new] = lengths - 1
        self.count[new] = 0
        self.begun[new] = 0
        self.done[new] = False
        self._sample_and_store(new, states[place, lengths - 1])
        self.live = new.stop

    def advance(self):
        """Decode the next token of every live sequence; on a GPU, ``STEPS_PER_CHECK`` tokens without waiting
        for it."""
        steps = 1
        rows = min(self.slots, self.live + -self.live % ROW_MULTIPLE)
        if self.graphs.asynchronous:
            steps = STEPS_PER_CHECK
            rows = _bucket(self.live, 1, self.slots)
        least = MIN_GRAPH_COLUMNS if self.cache.needs_columns else self.cache.width
        for _ in range(steps):
            self.longest = columns = min(self.longest + 1, self.cache.width)
            if self.graphs.asynchronous:
                columns = _bucket(columns, least, self.cache.width)
            step = partial(self._decode, rows, columns)
            self.graphs.run((rows, columns, *self.key), step, self.state + self.results)

    def _decode(self, rows, columns):
        """Decode one token in each of the first ``rows`` slots; all positions are below ``columns``."""
        position = self.position[:rows]
        masks = self.cache.decode(position, columns)
        states = self._hidden_states(self.token[:rows, None], position[:, None], masks)[:, -1]
        self._sample_and_store(slice(0, rows), states)

    def _hidden_states(self, tokens, positions, masks):
        output = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=self.cache
        )
        return output.last_hidden_state

    def _sample_and_store(self, slots, states):
        """Sample a token for each of these n slots from its state [n, H], and store it. A response ends here:
        at an EOS, at a stop string, or at max_gen_len tokens, which leaves ``finished`` False."""
        row, position = self.row[slots], self.position[slots]  # views, as the next two
        count = self.count[slots]
        done = self.done[slots]
        logits = self._logits(states)
        if self.early_ends:
            self.early_ends.forbid_(logits, count)
        going_on = ~done
        position += going_on
        if (fused := getattr(kernels_for(logits), "sample_and_store", None)) is not None:  # a GPU's kernels
            state = row, self.token[slots], count, done
            fused(logits, self.temperature, self.noise, self.eos, self.limit, state, self.results)
        else:
            column = torch.where(done, self.unread_column, count)
            token, logprob = sample_tokens(logits, self.temperature, self.noise[row, column])
            ended = (token[:, None] == self.eos).any(1)
            self.tokens[row, column] = token
            self.logprobs[row, column] = logprob
            self.response_len[row] += going_on
            self.finished[row] |= ended & going_on
            self.token[slots] = token
            count += going_on
            done |= ended | (count >= self.limit)
        if self.stop_table is not None:
            states, ids = self.stop_table.shape
            found = self.stop_table[self.begun[slots], self.token[slots].clamp(max=ids - 1)]
            self.begun[slots] = found % states
            ended = (found >= states) & (count >= self.least) & going_on
            self.finished[row] |= ended
            done |= ended

    def _logits(self, states):
        """[n, H] -> [n, V], on a GPU in fp32: rounded to bf16, logits of 16 to 32 would be 0.125 apart"""
        if states.device.type == "cpu":
            return self.head(F.pad(states, (0, 0, 0, -len(states) % ROW_MULTIPLE)))[: len(states)]
        return head_logits(states, self.head.weight, self.head.bias, self.head.weight.dtype)

    def compact(self):
        """Remove finished sequences, once they are an eighth; the last live ones move into their slots.

        To read what a GPU computes means waiting until all queued steps are computed, and then it has nothing
        to do until the host has queued more. So flags are copied to the host behind the steps of one check
        and read at the next, when further steps are queued already: they are a check too old.
        """
        if not self.graphs.asynchronous:
            self._send_flags()
        elif self.copied:
            self.copied.synchronize()
        done = self.known[: self.sent].tolist()
        done += [False] * (self.live - self.sent)  # slots that have been filled since the flags were sent
        stay = [slot for slot, ended in enumerate(done) if not ended]
        if (self.live - len(stay)) * COMPACT_AT >= self.live:
            holes = [slot for slot in range(len(stay)) if done[slot]]
            if holes:
                source, target = send(torch.tensor([stay[-len(holes) :], holes]), self.device)
                self.cache.move(source, target, self.longest)
                for x in self.state:
                    x[target] = x[source]
            self._clear_slots(len(stay))
            if not self.graphs.asynchronous:  # a GPU would be waited for
                self.longest = int(self.position.max())
        if self.graphs.asynchronous:
            self._send_flags()

    def _send_flags(self):
        """Start to copy the flags of the live slots to pinned memory of the host. It does not wait."""
        self.sent = self.live
        self.known[: self.live].copy_(self.done[: self.live], non_blocking=True)
        if self.copied:
            self.copied.record()

    def rollout(self):
        """-> ``Rollout``: each response directly behind its prompt in tokens [B, T]; all right-padded."""
        return as_rollout(self.prompt_ids, *(x[: len(self.prompt_ids)] for x in self.results))


def _bucket(n, least, most):
    """The smallest of least, 2 least, 4 least, … that is not below n; never more than ``most``."""
    return min(most, least << max(0, -(-n // least) - 1).bit_length())
