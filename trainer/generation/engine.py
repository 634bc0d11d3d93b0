"""The sampler: prompts -> responses by continuous batching, for any transformers model with a KV cache.

Which policy samples is said by ``Sampler.load``: in training the old actor (``collect`` in train_ppo.py), in
evaluation the actor.

A fixed number of slots each hold one sequence, at its own position. A decoding step gives every live sequence
one token. Finished sequences leave, the last live ones move into their slots, and waiting prompts are
prefilled into the slots behind. The sampled tokens do not depend on any of this: see sampling_noise.py.

Where a response ends (``Engine._sample_and_store``): at its first EOS, which is any of ``eos_ids``, collected
from the tokenizer and the generation config (model/compatibility.py). The EOS is a response token, and
``finished`` is True. A response without an EOS is cut at ``max_gen_len`` tokens, and ``finished`` is False;
rewards/reward.py takes ``--missing_eos_penalty`` off its score. It is trained on like every other response.
"""

import torch

from trainer.compute.batching import micro_batches, pad_right, tokens_per_pass
from trainer.compute.memory import attempt, out_of_memory_error
from trainer.compute.precision import check_finite
from trainer.compute.rollout_data import Rollout, length_mask
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.kv_cache import KVCache, cache_dtype, slots_that_fit
from trainer.generation.sampler_copy import SamplerCopy
from trainer.generation.sampling import sample_tokens
from trainer.generation.sampling_noise import uniform

SLOTS = 256  # at most this many sequences decode together
CACHE_BYTES = 4 << 30  # at most this much memory for their keys and values; if it is too little, fewer slots
# Compact the batch once an eighth of the rows have finished, because moving cache rows costs time
COMPACT_AT = 8
# On a GPU, decoding steps between two checks for finished sequences: a check waits for the GPU
STEPS_PER_CHECK = 8
MIN_GRAPH_ROWS, MIN_GRAPH_COLUMNS = 8, 128  # the smallest shape of a captured step; larger ones double it
# On a CPU, decoded rows come in multiples of 8: oneDNN compiles code for each new shape (in bf16)
DECODE_ROW_MULTIPLE = 8


class Sampler:
    """Samples responses with its own copy of a policy. Build it once, then ``load`` newer weights into it."""

    def __init__(self, policy, dtype=torch.float32, slots=SLOTS):
        self.copy, self.slots = SamplerCopy(policy, dtype), slots
        self.engine = None

    def load(self, policy):
        """Copy this policy's weights into the sampler. -> self"""
        self.copy.load(policy)
        return self

    def sample(self, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        """One response a prompt -> ``Rollout`` with its first five fields, in the order of the prompts.

        prompt_ids: B non-empty lists of ids; keys [B]: from ``noise_keys``; eos_ids: each of them ends a
        response; max_gen_len: in tokens; temperature 0 is greedy. When memory runs out, sampling starts again
        with half the slots and gives the same tokens. InputError if a single sequence does not fit, or if
        the model gives NaN (a large model in fp16).
        """
        with torch.inference_mode():
            while not attempt(self._run, prompt_ids, keys, eos_ids, max_gen_len, temperature)[0]:
                self.engine, self.slots = None, min(self.slots, len(prompt_ids)) // 2
                if not self.slots:
                    raise out_of_memory_error(max(map(len, prompt_ids)) + max_gen_len)
        rollout = self.engine.rollout()
        check_finite(rollout.sampler_logprobs, self.copy.model.dtype, "the policy")
        return rollout

    def _run(self, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        needs = (len(prompt_ids), max(map(len, prompt_ids)) + max_gen_len, max_gen_len)
        if self.engine is None or any(a < b for a, b in zip(self.engine.sizes, needs, strict=True)):
            had = self.engine.sizes if self.engine else (0, 0, 0)
            self.engine = None  # let go of the old engine before the new one allocates
            self.engine = Engine(self.copy.model, self.slots, *map(max, had, needs))
        self.engine.start(prompt_ids, keys, eos_ids, max_gen_len, temperature)
        while self.engine.waiting or self.engine.live:
            self.engine.admit()
            self.engine.advance()
            self.engine.compact()


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

    def __init__(self, model, slots, rows, width, limit):
        device = model.device
        self.model, self.head = model, model.get_output_embeddings()
        fit = slots_that_fit(model.config, width, cache_dtype(model).itemsize, CACHE_BYTES)
        self.sizes, self.slots = (rows, width, limit), min(slots, rows, fit)
        self.unread_row, self.unread_column = rows, limit  # the last ones of the results
        self.cache = KVCache(model, self.slots, width)
        self.graphs = CudaGraphs(device)

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.row, self.token, self.position, self.count = (zeros(self.slots) for _ in range(4))
        self.done = zeros(self.slots, dtype=torch.bool)
        self.noise = zeros(rows + 1, limit + 1, dtype=torch.float64)
        self.tokens = zeros(rows + 1, limit + 1)
        self.logprobs = zeros(rows + 1, limit + 1, dtype=torch.float32)
        self.response_len, self.finished = zeros(rows + 1), zeros(rows + 1, dtype=torch.bool)
        self.limit, self.ends = zeros(1), {}
        self.state = [self.row, self.token, self.position, self.count, self.done]
        self.results = [self.tokens, self.logprobs, self.response_len, self.finished]

    def start(self, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        """Begin a call: all prompts wait, the longest first, so that prompts of similar length are prefilled
        together."""
        device = self.row.device
        self.prompt_ids, self.temperature = prompt_ids, temperature
        if tuple(eos_ids) not in self.ends:
            self.ends[tuple(eos_ids)] = torch.tensor(eos_ids, device=device)
        self.eos = self.ends[tuple(eos_ids)]
        self.key = (temperature, tuple(eos_ids))  # what a captured step depends on, besides its shape
        self.waiting = sorted(range(len(prompt_ids)), key=lambda i: (len(prompt_ids[i]), -i))
        self.limit.fill_(max_gen_len)
        self.noise[: len(keys), :max_gen_len] = uniform(keys.to(device), max_gen_len)
        self.response_len.zero_()
        self.finished.zero_()
        self._clear_slots(0)

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
        rows = [self.waiting.pop() for _ in range(free)]
        for index in micro_batches(
            [len(self.prompt_ids[row]) for row in rows], tokens_per_pass(self.row.device)
        ):
            self._prefill([rows[i] for i in index])
        self.longest = int(self.position.max())

    def _prefill(self, rows):
        tokens, lengths = pad_right([self.prompt_ids[row] for row in rows], self.row.device)
        new = slice(self.live, self.live + len(rows))
        self.cache.prefill(self.live)
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = self._hidden_states(tokens, places, None)
        self.row[new] = torch.tensor(rows, device=tokens.device)
        self.position[new], self.count[new], self.done[new] = lengths, 0, False
        self._sample_and_store(new, states[torch.arange(len(rows), device=tokens.device), lengths - 1])
        self.live += len(rows)

    def advance(self):
        """Decode the next token of every live sequence; on a GPU, ``STEPS_PER_CHECK`` tokens without waiting
        for it."""
        steps, rows = 1, min(self.slots, self.live + -self.live % DECODE_ROW_MULTIPLE)
        if self.graphs.possible:
            steps, rows = STEPS_PER_CHECK, _bucket(self.live, MIN_GRAPH_ROWS, self.slots)
        for _ in range(steps):
            self.longest = columns = min(self.longest + 1, self.cache.width)
            if self.graphs.possible:
                columns = _bucket(columns, MIN_GRAPH_COLUMNS, self.cache.width)
            step = (rows, columns)
            self.graphs.run((*step, *self.key), lambda s=step: self._decode(*s), self.state + self.results)

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
        column = torch.where(done, self.unread_column, count)
        token, logprob = sample_tokens(self.head(states), self.temperature, self.noise[row, column])
        ended = (token[:, None] == self.eos).any(1)
        self.tokens[row, column], self.logprobs[row, column] = token, logprob
        self.response_len[row] += ~done
        self.finished[row] |= ended & ~done
        self.token[slots] = token
        count += ~done  # count and done are views: both lines change the slots in place
        done |= ended | (count >= self.limit)

    def compact(self):
        """Remove finished sequences, once they are an eighth; the last live ones move into their slots."""
        done = self.done[: self.live].tolist()
        stay = [slot for slot, ended in enumerate(done) if not ended]
        if (self.live - len(stay)) * COMPACT_AT < self.live:
            return
        holes = [slot for slot in range(len(stay)) if done[slot]]
        if holes:
            movers = stay[-len(holes) :]
            source, target = torch.tensor([movers, holes], device=self.row.device)
            self.cache.move(source, target, self.longest)
            for x in self.state:
                x[target] = x[source]
        self._clear_slots(len(stay))
        self.longest = int(self.position.max())

    def rollout(self):
        """-> ``Rollout``: each response directly behind its prompt in tokens [B, T]; all right-padded."""
        total = len(self.prompt_ids)
        response_len, finished = self.response_len[:total].clone(), self.finished[:total].clone()
        real = length_mask(response_len, int(response_len.max()))  # [B, R]
        prompts, prompt_len = pad_right(self.prompt_ids, self.row.device)
        tokens = prompts.new_zeros(total, int((prompt_len + response_len).max()))
        tokens[:, : prompts.shape[1]] = prompts[:, : tokens.shape[1]]
        row, column = real.nonzero(as_tuple=True)
        tokens[row, prompt_len[row] + column] = self.tokens[row, column]
        logprobs = torch.where(real, self.logprobs[:total, : real.shape[1]], 0.0)
        return Rollout(tokens, prompt_len, response_len, finished, logprobs)


def _bucket(n, least, most):
    """The smallest of least, 2 least, 4 least, … that is not below n; never more than ``most``."""
    return min(most, least << max(0, -(-n // least) - 1).bit_length())


def response_texts(rollout, tokenizer):
    """The responses as B texts, without the EOS that ended them and without other special tokens."""
    ids = rollout.responses()
    ids = [r[:-1] if ended else r for r, ended in zip(ids, rollout.finished.tolist(), strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
