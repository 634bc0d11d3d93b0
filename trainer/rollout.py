"""Prompts -> responses: a slot engine with continuous batching, for any transformers model with a KV cache.

A fixed number of slots each hold a sequence at its own position. Every step gives each live sequence one
token; finished ones leave, the rest close ranks, and the next prompts are prefilled into the slots behind.
What is sampled depends on none of that: see ``noise.py``.
"""

import torch

from trainer.behaviour import BehaviourCopy
from trainer.graphs import Graphs
from trainer.memory import attempt, too_long
from trainer.noise import pick_tokens, uniform
from trainer.ppo import length_mask
from trainer.record import Rollout, micro_batches, pad_right, tokens_per_pass
from trainer.slots import SlotCache, cache_dtype, slots_that_fit

SLOTS = 256  # sequences decoded together at the most
CACHE_BYTES = 4 << 30  # of their keys and values at the most: then there are fewer
LEAVE = 8  # sequences leave once one in so many has finished: closing ranks has its price
STEPS = 8  # on a GPU, steps between two looks at what has finished: looking waits for the GPU
LEAST_ROWS, LEAST_COLUMNS = 8, 128  # of a captured step; more come in powers of two
ROWS = 8  # a CPU decodes multiples of so many rows: where it compiles code for each shape, they come again


class Sampler:
    """Answers prompts with a private copy of a policy. Build it once and ``load`` newer weights into it."""

    def __init__(self, policy, dtype=torch.float32, slots=SLOTS):
        self.copy, self.slots = BehaviourCopy(policy, dtype), slots
        self.engine = None

    def load(self, policy):
        """Sample from this policy's weights from now on. -> self"""
        self.copy.load(policy)
        return self

    def sample(self, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        """One response a prompt -> ``Rollout`` with its first five fields, in the order of the prompts.

        prompt_ids: B non-empty lists of ids; keys [B]: from ``noise_keys``; eos_ids: any of them ends a
        response; temperature 0 is greedy.
        """
        with torch.inference_mode():
            while not attempt(self._run, prompt_ids, keys, eos_ids, max_gen_len, temperature)[0]:
                self.engine, self.slots = None, min(self.slots, len(prompt_ids)) // 2
                if not self.slots:
                    raise too_long(max(map(len, prompt_ids)) + max_gen_len)
        return self.engine.rollout()

    def _run(self, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        needs = (len(prompt_ids), max(map(len, prompt_ids)) + max_gen_len, max_gen_len)
        if self.engine is None or any(a < b for a, b in zip(self.engine.sizes, needs, strict=True)):
            had = self.engine.sizes if self.engine else (0, 0, 0)
            self.engine = None  # frees its memory before the next one takes some
            self.engine = Engine(self.copy.model, self.slots, *map(max, had, needs))
        self.engine.start(prompt_ids, keys, eos_ids, max_gen_len, temperature)
        while self.engine.waiting or self.engine.live:
            self.engine.admit()
            self.engine.advance()
            self.engine.leave()


def sample(policy, prompt_ids, keys, eos_ids, max_gen_len, temperature, slots=SLOTS):
    """``Sampler.sample`` in the policy's own precision, for a single use."""
    return Sampler(policy, policy.dtype, slots).sample(prompt_ids, keys, eos_ids, max_gen_len, temperature)


class Engine:
    """The slots and what is in them. Its tensors stay where they are from call to call, as graphs demand.

    [slots] tensors describe slots, of which the first ``live`` hold sequences; those behind are done.
    [rows + 1, …] tensors are the results by prompt; their last row and column take what is not to be kept.
    """

    def __init__(self, model, slots, rows, width, limit):
        device = model.device
        self.model, self.head = model, model.get_output_embeddings()
        fit = slots_that_fit(model.config, width, cache_dtype(model).itemsize, CACHE_BYTES)
        self.sizes, self.slots = (rows, width, limit), min(slots, rows, fit)
        self.cache = SlotCache(model, self.slots, width)
        self.graphs = Graphs(device)

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
        """Forget what was; these prompts wait from now on, the longest first: neighbours are alike then."""
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
        self._vacate(0)

    def _vacate(self, live):
        """The slots from ``live`` on hold nothing: what they write goes to the last row and column."""
        self.live = live
        self.row[live:], self.position[live:], self.done[live:] = self.sizes[0], 0, True

    def admit(self):
        """Prefill waiting prompts into the free slots, once there are enough of either."""
        free = min(self.slots - self.live, len(self.waiting))
        if self.live and free < min(len(self.waiting), max(1, self.slots // LEAVE)):
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
        states = self._states(tokens, places, None)
        self.row[new] = torch.tensor(rows, device=tokens.device)
        self.position[new], self.count[new], self.done[new] = lengths, 0, False
        self._emit(new, states[torch.arange(len(rows), device=tokens.device), lengths - 1])
        self.live += len(rows)

    def advance(self):
        """The next token of every live sequence; on a GPU the next few, without waiting for it."""
        steps, rows = 1, min(self.slots, self.live + -self.live % ROWS)
        if self.graphs.possible:
            steps, rows = STEPS, _bucket(self.live, LEAST_ROWS, self.slots)
        for _ in range(steps):
            self.longest = columns = min(self.longest + 1, self.cache.width)
            if self.graphs.possible:
                columns = _bucket(columns, LEAST_COLUMNS, self.cache.width)
            step = (rows, columns)
            self.graphs.run((*step, *self.key), lambda s=step: self._decode(*s), self.state + self.results)

    def _decode(self, rows, columns):
        """One more token for the first ``rows`` slots, whose sequences are shorter than ``columns``."""
        position, done = self.position[:rows], self.done[:rows]
        masks = self.cache.decode(position, columns)
        states = self._states(self.token[:rows, None], position[:, None], masks)[:, -1]
        position += ~done
        self._emit(slice(0, rows), states)

    def _states(self, tokens, positions, masks):
        output = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=self.cache
        )
        return output.last_hidden_state

    def _emit(self, slots, states):
        """Pick a token for each of these slots from its state [n, H], and note it down."""
        row, count, done = self.row[slots], self.count[slots], self.done[slots]
        column = torch.where(done, self.sizes[2], count)
        token, logprob = pick_tokens(self.head(states), self.temperature, self.noise[row, column])
        ended = (token[:, None] == self.eos).any(1)
        self.tokens[row, column], self.logprobs[row, column] = token, logprob
        self.response_len[row] += ~done
        self.finished[row] |= ended & ~done
        self.token[slots] = token
        count += ~done  # this and the next are views, written in place
        done |= ended | (count >= self.limit)

    def leave(self):
        """Finished sequences leave, the last live ones take their slots."""
        done = self.done[: self.live].tolist()
        stay = [slot for slot, ended in enumerate(done) if not ended]
        if (self.live - len(stay)) * LEAVE < self.live:
            return
        holes = [slot for slot in range(len(stay)) if done[slot]]
        if holes:
            movers = stay[-len(holes) :]
            source, target = torch.tensor([movers, holes], device=self.row.device)
            self.cache.move(source, target, self.longest)
            for x in self.state:
                x[target] = x[source]
        self._vacate(len(stay))
        self.longest = int(self.position.max())

    def rollout(self):
        """Each response right behind its prompt: tokens [B, T], log-probs [B, R], right-padded."""
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
    """The smallest of least, 2 least, 4 least, … that holds n, and ``most`` at the most."""
    return min(most, least << max(0, -(-n // least) - 1).bit_length())


def response_texts(rollout, tokenizer):
    """The responses as text [B], without the EOS that ended them and without other special tokens."""
    ids = rollout.responses()
    ids = [r[:-1] if ended else r for r, ended in zip(ids, rollout.finished.tolist(), strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
