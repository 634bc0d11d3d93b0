"""Prompts -> responses: a slot engine with continuous batching, for any transformers model with a KV cache.

A fixed number of slots each hold a sequence at its own position. Every step gives each live sequence one
token; finished ones leave, the rest close ranks, and the next prompts are prefilled into the slots behind.
What is sampled depends on none of that: see ``noise.py``.
"""

import torch

from trainer.behaviour import BehaviourCopy
from trainer.noise import pick_tokens, uniform
from trainer.ppo import length_mask
from trainer.record import Rollout, micro_batches, pad_right
from trainer.slots import SlotCache

SLOTS = 256  # sequences decoded together at the most
PREFILL_TOKENS = 1 << 13  # padded tokens of one prefill at the most
LEAVE = 8  # sequences leave once one in so many has finished: moving others has its price


class Sampler:
    """Answers prompts with a private copy of a policy. Build it once and ``load`` newer weights into it."""

    def __init__(self, policy, dtype=torch.float32, slots=SLOTS):
        self.copy, self.slots = BehaviourCopy(policy, dtype), slots
        self.model = self.copy.model

    def load(self, policy):
        """Sample from this policy's weights from now on. -> self"""
        self.copy.load(policy)
        return self

    @torch.no_grad()
    def sample(self, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        """One response a prompt -> ``Rollout`` with its first five fields, in the order of the prompts.

        prompt_ids: B non-empty lists of ids; keys [B]: from ``noise_keys``; eos_ids: any of them ends a
        response; temperature 0 is greedy.
        """
        batch = Batch(self, prompt_ids, keys, eos_ids, max_gen_len, temperature)
        while batch.waiting or batch.live:
            batch.admit()
            batch.step()
            batch.leave()
        return batch.rollout()


def sample(policy, prompt_ids, keys, eos_ids, max_gen_len, temperature, slots=SLOTS):
    """``Sampler.sample`` in the policy's own precision, for a single use."""
    return Sampler(policy, policy.dtype, slots).sample(prompt_ids, keys, eos_ids, max_gen_len, temperature)


class Batch:
    """The sequences of one call. [slots] tensors say what is in a slot; live ones are slots 0 … live - 1.

    [B, …] tensors are the results by prompt; their last column takes what finished slots go on to write.
    """

    def __init__(self, sampler, prompt_ids, keys, eos_ids, max_gen_len, temperature):
        model, total = sampler.model, len(prompt_ids)
        slots, device = min(sampler.slots, total), model.device
        width = max(map(len, prompt_ids)) + max_gen_len
        self.model, self.head, self.temperature = model, model.get_output_embeddings(), temperature
        self.cache = SlotCache(model.config, slots, width, device)
        self.prompt_ids, self.limit, self.slots = prompt_ids, max_gen_len, slots
        # Longest prompts first: what is prefilled together is then of similar length.
        self.waiting = sorted(range(total), key=lambda i: -len(prompt_ids[i]))[::-1]
        self.live, self.longest = 0, 0
        self.eos = torch.tensor(eos_ids, device=device)
        self.noise = uniform(keys.to(device), max_gen_len)

        def integers(*shape):
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.row, self.token, self.position, self.count = (integers(slots) for _ in range(4))
        self.done = torch.zeros(slots, dtype=torch.bool, device=device)
        self.tokens = integers(total, max_gen_len + 1)
        self.logprobs = torch.zeros(total, max_gen_len + 1, device=device)
        self.response_len, self.finished = (
            integers(total),
            torch.zeros(total, dtype=torch.bool, device=device),
        )

    def admit(self):
        """Prefill waiting prompts into the free slots, once there are enough of either."""
        free = min(self.slots - self.live, len(self.waiting))
        if free < min(len(self.waiting), max(1, self.slots // LEAVE)) and self.live:
            return
        rows = [self.waiting.pop() for _ in range(free)]
        for index in micro_batches([len(self.prompt_ids[row]) for row in rows], PREFILL_TOKENS):
            self._prefill([rows[i] for i in index])

    def _prefill(self, rows):
        tokens, lengths = pad_right([self.prompt_ids[row] for row in rows], self.model.device)
        new = slice(self.live, self.live + len(rows))
        self.cache.prefill(self.live)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = self._states(tokens, positions, None)[torch.arange(len(rows)), lengths - 1]
        self.row[new] = torch.tensor(rows, device=tokens.device)
        self.position[new], self.count[new], self.done[new] = lengths, 0, False
        self._emit(new, states)
        self.live += len(rows)
        self.longest = max(self.longest, tokens.shape[1])

    def step(self):
        """One more token for every live sequence."""
        live, self.longest = slice(0, self.live), self.longest + 1
        positions = self.position[live]
        masks = self.cache.decode(positions, self.longest)
        states = self._states(self.token[live, None], positions[:, None], masks)[:, -1]
        self.position[live] += 1
        self._emit(live, states)

    def _states(self, tokens, positions, masks):
        output = self.model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=self.cache
        )
        return output.last_hidden_state

    def _emit(self, slots, states):
        """Pick a token for each of these slots from its state [n, H], and note it down."""
        row, count, done = self.row[slots], self.count[slots], self.done[slots]
        column = torch.where(done, self.limit, count)  # the last column takes what no one wants
        noise = self.noise[row, column.clamp(max=self.limit - 1)]
        token, logprob = pick_tokens(self.head(states), self.temperature, noise)
        ended = (token[:, None] == self.eos).any(1)
        self.tokens[row, column], self.logprobs[row, column] = token, logprob
        self.response_len[row] += ~done
        self.finished[row] |= ended & ~done
        self.token[slots] = token
        done |= ended | (count + 1 >= self.limit)  # these two are views: written in place
        count += 1

    def leave(self):
        """Finished sequences leave, the last live ones take their slots."""
        done = self.done[: self.live].tolist()
        stay = [slot for slot, ended in enumerate(done) if not ended]
        if (self.live - len(stay)) * LEAVE < self.live:
            return
        holes = [slot for slot in range(len(stay)) if done[slot]]
        movers = stay[len(stay) - len(holes) :]
        self.live = len(stay)
        if movers:
            source, target = torch.tensor([movers, holes], device=self.row.device)
            self.cache.move(source, target, self.longest)
            for x in (self.row, self.token, self.position, self.count, self.done):
                x[target] = x[source]
        self.longest = int(self.position[: self.live].max()) if self.live else 0

    def rollout(self):
        """Each response right behind its prompt: tokens [B, T], log-probs [B, R], right-padded."""
        width = int(self.response_len.max())
        real = length_mask(self.response_len, width)  # [B, R]
        prompts, prompt_len = pad_right(self.prompt_ids, self.row.device)
        tokens = prompts.new_zeros(len(prompts), int((prompt_len + self.response_len).max()))
        tokens[:, : prompts.shape[1]] = prompts[:, : tokens.shape[1]]
        row, column = real.nonzero(as_tuple=True)
        tokens[row, prompt_len[row] + column] = self.tokens[row, column]
        logprobs = torch.where(real, self.logprobs[:, :width], 0.0)
        return Rollout(tokens, prompt_len, self.response_len, self.finished, logprobs)


def response_texts(rollout, tokenizer):
    """The responses as text [B], without the EOS that ended them and without other special tokens."""
    ids = rollout.responses()
    ids = [r[:-1] if ended else r for r, ended in zip(ids, rollout.finished.tolist(), strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
