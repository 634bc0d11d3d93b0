"""Files to prompts, demonstrations and preference pairs; and the order in which prompts are visited.

Every file is JSONL, one object a line:

    prompts      {"conversations": [{"role", "content"}, ...]}   the last turn a placeholder or the answer
                 {"prompt": text or messages, "answer": optional text}
    SFT          the same two forms, with the answer
    preferences  {"prompt": text or messages, "chosen": text, "rejected": text}
                 {"chosen": messages, "rejected": messages}

Nothing is ever truncated: what exceeds the limit is dropped when the file is read, counted in ``dropped``
and left for the script to report. Nothing is ever left-padded. Whatever is wrong in a file is an
``InputError`` that names the file and the line.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.utils.data import Dataset, Sampler

from dataset.conversations import (
    as_messages,
    conversation_ids,
    conversation_text,
    encode,
    for_tokenizer,
    read_jsonl,
    render,
    split_record,
)
from dataset.special_tokens import mark_special
from errors import InputError

__all__ = [
    "PreferenceDataset",
    "Prompt",
    "PromptBatches",
    "RLAIFDataset",
    "SFTDataset",
    "conversation_ids",
    "epoch_order",
    "global_batch",
    "length_batches",
    "local_positions",
    "read_jsonl",
    "right_pad",
]

# ---------------------------------------------------------------------------------------------------------
# Prompts for PPO


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``index`` is its place in the dataset; ``answer`` is for measuring, never for training."""

    index: int
    prompt: list | str  # as the file has it: messages or text; rewards have templates of their own
    prompt_ids: list
    answer: str | None


class RLAIFDataset(Dataset):
    """The prompts of a JSONL file as ``Prompt`` items; ``dropped`` counts those over ``max_length`` tokens.

    Raises InputError for a bad file, a line without a prompt, or when every prompt is too long.
    """

    def __init__(self, jsonl_path, tokenizer, max_length):
        rows, texts, wheres = [], [], []
        for number, record in read_jsonl(jsonl_path):
            where = f"{jsonl_path}:{number}"
            prompt, answer = split_record(record, where)
            asked = for_tokenizer(tokenizer, prompt)
            texts.append(asked if isinstance(asked, str) else render(tokenizer, asked, where, generate=True))
            rows.append((prompt, answer))
            wheres.append(where)
        self.prompts = []
        for (prompt, answer), ids, where in zip(rows, encode(tokenizer, texts), wheres, strict=True):
            if not ids:
                raise InputError(f"{where}: the prompt has no tokens; fill it in or delete the line")
            if len(ids) <= max_length:
                self.prompts.append(Prompt(len(self.prompts), prompt, ids, answer))
        self.dropped = len(rows) - len(self.prompts)
        check_any_left(self.prompts, jsonl_path, max_length)

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, index):
        return self.prompts[index]


def check_any_left(kept, path, max_length):
    """Raise InputError when nothing of a file fits into ``max_length`` tokens."""
    if not kept:
        raise InputError(f"{path}: every record is longer than {max_length} tokens; raise --max_seq_len")


# ---------------------------------------------------------------------------------------------------------
# The order of prompts: pure functions, the same whatever the number of processes


def epoch_order(n, seed, epoch):
    """A permutation of range(n), a pure function of its arguments."""
    return random.Random(f"{seed}/{epoch}").sample(range(n), n)


_epoch_order = lru_cache(maxsize=2)(epoch_order)  # a batch may reach into the next epoch


def global_batch(n, seed, step, size):
    """Dataset indices of global batch ``step``: ``size`` entries of the endless stream of epochs."""
    places = (divmod(position, n) for position in range(step * size, (step + 1) * size))
    return [_epoch_order(n, seed, epoch)[i] for epoch, i in places]


def local_positions(batch_size, mini_batch_size, rank, world):
    """Positions in the global batch of this process' rows, minibatch after minibatch.

    Minibatch k is the k-th slice of ``world * mini_batch_size`` positions, of which ``rank`` holds every
    ``world``-th: its local rows [k * mini_batch_size, (k + 1) * mini_batch_size).
    """
    positions = []
    for first in range(0, batch_size, mini_batch_size):
        last = min(first + mini_batch_size, batch_size)
        positions.extend(range(first * world + rank, last * world, world))
    return positions


class PromptBatches(Sampler):
    """For a DataLoader's ``batch_sampler``: this process' dataset indices, one list for each step in
    [first_step, last_step). ``batch_size`` and ``mini_batch_size`` are per process."""

    def __init__(self, n, seed, first_step, last_step, batch_size, mini_batch_size, rank, world):
        self.n, self.seed, self.size = n, seed, world * batch_size
        self.steps = range(first_step, last_step)
        self.positions = local_positions(batch_size, mini_batch_size, rank, world)

    def __len__(self):
        return len(self.steps)

    def __iter__(self):
        for step in self.steps:
            batch = global_batch(self.n, self.seed, step, self.size)
            yield [batch[position] for position in self.positions]


# ---------------------------------------------------------------------------------------------------------
# Demonstrations (stage 1) and preference pairs (stage 2)


class SFTDataset(Dataset):
    """Items (token ids, loss mask): the mask is 1 on what the assistant says, up to its end of turn.

    Text is tokenised piece by piece, prompt and answer apart, as it is when the model generates: no token
    spans the two. Raises InputError for a bad file, a line without an answer, or nothing short enough.
    """

    def __init__(self, path, tokenizer, max_length):
        conversations = []  # each a list of (text, trained?) pieces
        for number, record in read_jsonl(path):
            where = f"{path}:{number}"
            prompt, answer = split_record(record, where)
            if answer is None:
                raise InputError(
                    f'{where}: no answer to learn from; end it with the assistant\'s turn or "answer"'
                )
            prompt, answer = for_tokenizer(tokenizer, prompt), mark_special(tokenizer, answer)
            if isinstance(prompt, str):
                if tokenizer.eos_token is None:
                    raise InputError(
                        f"the tokenizer {tokenizer.name_or_path} has no EOS token to end answers with"
                    )
                conversations.append([(prompt, False), (answer + tokenizer.eos_token, True)])
            else:
                messages = [*prompt, {"role": "assistant", "content": answer}]
                conversations.append(chat_pieces(tokenizer, messages, where))
        first = encode(tokenizer, [pieces[0][0] for pieces in conversations])
        later = [text for pieces in conversations for text, _ in pieces[1:]]
        later = iter(encode(tokenizer, later, opening=False))
        self.samples = []
        for ids, pieces in zip(first, conversations, strict=True):
            ids, mask = list(ids), [0] * len(ids)
            for _, trained in pieces[1:]:
                piece = next(later)
                ids += piece
                mask += up_to_eos(piece, tokenizer.eos_token_id) if trained else [0] * len(piece)
            if len(ids) <= max_length:
                self.samples.append((ids, mask))
        self.dropped = len(conversations) - len(self.samples)
        check_any_left(self.samples, path, max_length)

    @property
    def fingerprint(self):
        return digest(self.samples)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def chat_pieces(tokenizer, messages, where):
    """Messages -> [(text, trained?), ...] whose texts concatenate to the rendered conversation."""
    full = render(tokenizer, messages, where)
    pieces, done = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        before = render(tokenizer, messages[:i], where, generate=True)
        after = render(tokenizer, messages[: i + 1], where)
        # Some templates rewrite earlier turns (Qwen3 strips old thoughts): such a turn is context only.
        if full.startswith(after) and after.startswith(before) and len(before) > done:
            pieces += [(full[done : len(before)], False), (full[len(before) : len(after)], True)]
            done = len(after)
    if done < len(full):
        raise InputError(f"{where}: this chat template cannot be split into prompt and answer for training")
    return pieces


def up_to_eos(ids, eos_id):
    """Mask of one assistant piece: a template may write a newline after the end of turn; nobody says that."""
    said = len(ids) - ids[::-1].index(eos_id) if eos_id in ids else len(ids)
    return [1] * said + [0] * (len(ids) - said)


class PreferenceDataset(Dataset):
    """Items (chosen ids, rejected ids), each exactly the ``conversation_ids`` that PPO will have scored.

    Raises InputError for a bad file, a line that is not a pair, or nothing short enough.
    """

    def __init__(self, path, tokenizer, max_length):
        texts, margins, asked = [], [], []
        for number, record in read_jsonl(path):
            for prompt, response in split_pair(record, f"{path}:{number}"):
                texts.append(conversation_text(tokenizer, prompt, response, f"{path}:{number}"))
            margins.append(number_in(record, "margin", f"{path}:{number}", 0.0))
            asked.append(prompt)
        ids = encode(tokenizer, texts)
        pairs = list(zip(ids[::2], ids[1::2], margins, strict=True))
        self._keep(pairs, [max(map(len, pair[:2])) for pair in pairs], asked, path, tokenizer, max_length)

    def _keep(self, items, lengths, asked, path, tokenizer, max_length):
        kept = [i for i, length in enumerate(lengths) if length <= max_length]
        self.items, self.asked, self.tokenizer = [items[i] for i in kept], [asked[i] for i in kept], tokenizer
        self.dropped = len(items) - len(kept)
        check_any_left(self.items, path, max_length)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    @property
    def fingerprint(self):
        return digest(self.items)

    def prompt(self, index):
        asked = for_tokenizer(self.tokenizer, self.asked[index])
        text = asked if isinstance(asked, str) else render(self.tokenizer, asked, generate=True)
        return Prompt(index, self.asked[index], encode(self.tokenizer, [text])[0], None)


class ScoreDataset(PreferenceDataset):
    def __init__(self, path, tokenizer, max_length):
        texts, scores, asked = [], [], []
        for number, record in read_jsonl(path):
            where = f"{path}:{number}"
            texts.append(conversation_text(tokenizer, record["user_input"], record["completion"], where))
            scores.append(number_in(record, "score", where))
            asked.append(record["user_input"])
        items = list(zip(encode(tokenizer, texts), scores, strict=True))
        self._keep(items, [len(ids) for ids, _ in items], asked, path, tokenizer, max_length)


def reward_dataset(path, tokenizer, max_length):
    _, record = next(read_jsonl(path))
    kind = ScoreDataset if "completion" in record else PreferenceDataset
    return kind(path, tokenizer, max_length)


def number_in(record, name, where, default=None):
    value = record.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f'{where}: "{name}" must be a number')
    return float(value)


def digest(items):
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()[:12]


def split_pair(record, where):
    """A preference record -> ((prompt, chosen text), (prompt, rejected text))."""
    sides = []
    for side in ("chosen", "rejected"):
        response = record.get(side)
        if isinstance(response, str) and "prompt" in record:
            sides.append((split_record({"prompt": record["prompt"]}, where)[0], response))
        elif isinstance(response, list):
            messages = as_messages(response, where)
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise InputError(f'{where}: "{side}" must be a question and end with an assistant turn')
            sides.append((messages[:-1], messages[-1]["content"]))
        else:
            raise InputError(f'{where}: "{side}" must be text beside a "prompt", or a list of messages')
    return sides


def length_batches(lengths, batch_size, seed, epoch):
    """Dataset indices in batches of like length, a pure function of its arguments: less padding to compute.

    A shuffled epoch is sorted by length within blocks of 16 batches, and the batches are shuffled again.
    """
    rng = random.Random(f"batches/{seed}/{epoch}")
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for first in range(0, len(order), 16 * batch_size):
        block = sorted(order[first : first + 16 * batch_size], key=lambda i: lengths[i])
        batches += [block[i : i + batch_size] for i in range(0, len(block), batch_size)]
    rng.shuffle(batches)
    return batches


def right_pad(rows, value=0):
    """Lists of numbers -> int64 [B, T], padded on the right with ``value``."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows])
