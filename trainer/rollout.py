"""Prompts -> responses: a sampler with a KV cache whose noise is a pure function of what is sampled.

Sampling is softmax(logits / temperature) over the whole vocabulary, no top-k and no top-p: that is the
distribution whose log-probs the losses use. Each token needs one uniform number, u(seed, step, prompt,
sample, token), turned into a token through the inverse CDF: the same prompt gets the same response whatever
row, batch or process it sits in, and a resumed run draws what the uninterrupted one would have.
"""

import torch
from transformers import DynamicCache

from trainer.ppo import length_mask, token_logprobs
from trainer.record import Rollout, pad_right


def _signed(x):
    """A 64-bit constant as the int64 torch stores."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 tensors, which wrap as uint64 does."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _absorb(state, value):
    """Fold one more index into a hash state."""
    return _mix((state ^ _mix(value + _signed(0x9E3779B97F4A7C15))) * 3 + _signed(0xD1B54A32D192ED03))


def noise_keys(seed, step, prompt_index, sample_index=0):
    """[B] int64 keys of a batch's rows. prompt_index [B]: the place of each prompt in the *global* batch."""
    prompt_index = torch.as_tensor(prompt_index, dtype=torch.int64)
    state = torch.full_like(prompt_index, seed)
    for value in (step, prompt_index, sample_index):
        state = _absorb(state, value + torch.zeros_like(prompt_index))
    return state


def uniform(keys, token_index):
    """keys [B] -> fp64 [B] in [0, 1), 32 random bits each, for response token ``token_index``."""
    bits = _absorb(keys, torch.full_like(keys, token_index)) >> 32 & 0xFFFFFFFF
    return bits.double() / (1 << 32)


def pick_tokens(logits, temperature, u):
    """Inverse-CDF sampling. logits [B, V], u [B] in [0, 1) -> tokens [B]; temperature 0 is greedy.

    The cumulative sum is in fp64, so that u * total stays below the total and no token of probability 0 is
    ever drawn.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cdf = torch.softmax(logits.float() / temperature, -1).cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1)


@torch.no_grad()
def sample(model, prompt_ids, keys, eos_ids, max_gen_len, temperature):
    """Sample one response a prompt.

    model: a causal LM; prompt_ids: B non-empty lists of ids; keys [B]: from ``noise_keys``; eos_ids: any of
    them ends a response; temperature 0 is greedy. Returns a ``Rollout`` with its first five fields filled.

    The cache keeps a row's padded prompt in its first columns and response token t in column P + t; the
    attention mask hides the padding between them, and positions count real tokens only.
    """
    device, head = model.device, model.get_output_embeddings()
    tokens, prompt_len = pad_right(prompt_ids, device)
    batch, width = tokens.shape
    rows, keys = torch.arange(batch, device=device), keys.to(device)
    eos = torch.tensor(eos_ids, device=device)
    cache = DynamicCache(config=model.config)
    visible = torch.zeros(batch, width + max_gen_len, dtype=torch.int64, device=device)
    visible[:, :width] = length_mask(prompt_len, width)

    positions = torch.arange(width, device=device).expand(batch, -1)
    hidden = model.base_model(
        input_ids=tokens, attention_mask=visible[:, :width], position_ids=positions, past_key_values=cache
    ).last_hidden_state
    hidden = hidden[rows, prompt_len - 1]  # [B, H]: the state of the first response token
    response = torch.zeros(batch, max_gen_len, dtype=torch.int64, device=device)
    logprobs = torch.zeros(batch, max_gen_len, device=device)
    response_len = torch.zeros_like(prompt_len)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)

    for t in range(max_gen_len):
        logits = head(hidden)
        token = pick_tokens(logits, temperature, uniform(keys, t))
        response[:, t] = token
        logprobs[:, t] = token_logprobs(logits, token, temperature or 1.0)[0]
        response_len += ~finished
        finished |= torch.isin(token, eos)
        if t + 1 == max_gen_len or finished.all():
            break
        visible[:, width + t] = 1
        hidden = model.base_model(
            input_ids=token[:, None],
            attention_mask=visible[:, : width + t + 1],
            position_ids=(prompt_len + t)[:, None],
            past_key_values=cache,
        ).last_hidden_state[:, -1]
    return _assemble(tokens, prompt_len, response, response_len, finished, logprobs)


def _assemble(prompts, prompt_len, response, response_len, finished, logprobs):
    """Put each response right behind its prompt: [B, P] and [B, R] -> tokens [B, T], right-padded."""
    width = int(response_len.max())
    response, logprobs = response[:, :width], logprobs[:, :width]
    real = length_mask(response_len, width)  # [B, R]
    tokens = prompts.new_zeros(len(prompts), int((prompt_len + response_len).max()))
    is_prompt = length_mask(prompt_len, prompts.shape[1])
    tokens[:, : prompts.shape[1]][is_prompt] = prompts[is_prompt]
    row, column = real.nonzero(as_tuple=True)
    tokens[row, prompt_len[row] + column] = response[row, column]
    return Rollout(tokens, prompt_len, response_len, finished, torch.where(real, logprobs, 0.0))


def response_texts(rollout, tokenizer):
    """The responses as text [B], without the EOS that ended them and without other special tokens."""
    ids = rollout.responses()
    ids = [r[:-1] if ended else r for r, ended in zip(ids, rollout.finished.tolist(), strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
