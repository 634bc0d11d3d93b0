"""Reward models: a sequence classifier, or a model whose own code has ``get_score``.

Each has its own tokenizer and chat template. Messages go to them as messages; nobody parses them back out
of a prompt.
"""

import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from dataset.conversations import conversation_ids
from dataset.formats import to_messages
from errors import InputError
from model.checks import check_tokenizer
from model.hub import check_hub
from model.loading import as_input_error, load_tokenizer, quiet
from trainer.memory import each_micro_batch
from trainer.packing import pack_sequences, packed_states
from trainer.ppo import length_mask
from trainer.precision import autocast
from trainer.record import pad_right, tokens_per_pass


class ClassifierRewardModel:
    """An ``AutoModelForSequenceClassification`` with one label, its own tokenizer and chat template."""

    def __init__(self, path, device, trust_remote_code, dtype):
        self.dtype = dtype  # of mixed precision
        self.tokenizer = load_tokenizer(path, trust_remote_code)
        self.model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        if report["missing_keys"]:  # transformers fills them with random numbers
            raise InputError(f"its weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
        self.model.to(device).eval().requires_grad_(False)
        # One label too many, or a vocabulary too small, is the wrong model and not a wrong number.
        if self.model.config.num_labels != 1:
            raise InputError(f"it has {self.model.config.num_labels} labels, a reward model has one")
        check_tokenizer(self.tokenizer, self.model)
        self.pad_id = self.model.config.pad_token_id
        # The head that transformers' decoder classifiers apply to the state of the last token.
        self.head = dict(self.model.named_children()).get("score")
        self.packs = isinstance(self.head, torch.nn.Linear) and pack_sequences(self.model.base_model)
        self.max_length = getattr(self.model.config, "max_position_embeddings", 1 << 30)  # ALiBi has none
        self.offset = reward_offset(self.model.config)

    @torch.no_grad()
    def __call__(self, conversations):
        """[(prompt, response)] -> scores [N] on the CPU, batched by length. What is too long loses its
        beginning."""
        ids = [conversation_ids(self.tokenizer, *pair)[-self.max_length :] for pair in conversations]
        scores = torch.empty(len(ids))

        def fill(index):
            tokens, lengths = pad_right([ids[i] for i in index], self.model.device)
            score = self._packed_scores if self.packs else self._padded_scores
            with autocast(self.model.device, self.dtype):
                scores[index] = score(tokens, lengths).float().cpu()

        each_micro_batch([len(x) for x in ids], tokens_per_pass(self.model.device), fill)
        return scores - self.offset

    def _packed_scores(self, tokens, lengths):
        states = packed_states(self.model.base_model, tokens, lengths).last_hidden_state
        return self.head(states[score_places(tokens, lengths, self.pad_id)]).squeeze(-1)

    def _padded_scores(self, tokens, lengths):
        """For models with a head of their own. Where there is no pad token we pad with an id that ends no
        sequence of the batch, so that the last token is found."""
        pad = self.pad_id
        if pad is None:
            last = set(tokens[torch.arange(len(tokens)), lengths - 1].tolist())
            pad = self.model.config.pad_token_id = next(i for i in range(len(last) + 1) if i not in last)
        real = length_mask(lengths, tokens.shape[1])
        output = self.model(tokens.masked_fill(~real, pad), attention_mask=real.long())
        return output.logits.squeeze(-1)


def score_places(tokens, lengths, pad_id):
    """Where in the packed rows of tokens [B, T] a classifier reads its scores [B]: at the last token that is
    not the pad token, as transformers does. A model whose pad is its EOS was trained that way."""
    counts = length_mask(lengths, tokens.shape[1])
    if pad_id is not None:
        counts &= tokens != pad_id
    last = (counts * torch.arange(tokens.shape[1], device=tokens.device)).argmax(1)
    return lengths.cumsum(0) - lengths + last


def reward_offset(config):
    """The ``reward_offset`` of a classifier's config, 0 where it has none: what is taken off its scores. A
    linear head without a bias cannot hold it (see ``train_reward.py``)."""
    offset = config.to_dict().get("reward_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise InputError(f"the reward_offset of its config.json is {offset!r:.50}; make it a number")
    return float(offset)


class RemoteRewardModel:
    """A model whose own code has ``get_score(tokenizer, messages)``, as internlm2-reward does."""

    def __init__(self, path, device):
        self.tokenizer = load_tokenizer(path, trust_remote_code=True)
        self.model = AutoModel.from_pretrained(path, dtype=torch.float32, trust_remote_code=True)
        self.model.to(device).eval().requires_grad_(False)
        if not callable(getattr(self.model, "get_score", None)):
            raise InputError("its code has no get_score(tokenizer, messages)")

    @torch.no_grad()
    def __call__(self, conversations):
        """[(prompt, response)] -> scores [N] on the CPU, one at a time: the interface has no batch."""
        return torch.tensor([self._score(*pair) for pair in conversations], dtype=torch.float32)

    def _score(self, prompt, response):
        messages = [*to_messages(prompt), {"role": "assistant", "content": response}]
        with as_input_error("--reward_model: its get_score failed"):
            return float(self.model.get_score(self.tokenizer, messages))


def load_reward_model(path, device, trust_remote_code=False, dtype=torch.float32):
    """A directory or hub name -> callable [(prompt, response)] -> scores [N]. InputError if it is none."""
    with quiet(), as_input_error(f"--reward_model {path}: cannot be loaded"):
        check_hub(path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        architectures = config.architectures or []
        if any(name.endswith("ForSequenceClassification") for name in architectures):
            return ClassifierRewardModel(path, device, trust_remote_code, dtype)
        if "AutoModel" in config.to_dict().get("auto_map", {}):
            if not trust_remote_code:
                raise InputError("it brings its own code; add --trust_remote_code to run it")
            return RemoteRewardModel(path, device)
        raise InputError(
            f"{', '.join(architectures) or 'it'} is not a reward model; give a sequence classifier with one "
            "label, or a model whose code has get_score"
        )


def critic_start(critic_init, models, tokenizer):
    """The reward model that the critic starts from, None if it starts from the actor.

    ``auto``: the first that reads the policy's tokens. models: {name: (reward model, weight)}.
    """
    readers = [
        model.model
        for model, _ in models.values()
        if isinstance(model, ClassifierRewardModel) and model.tokenizer.get_vocab() == tokenizer.get_vocab()
    ]
    if critic_init == "reward" and not readers:
        raise InputError(
            "--critic_init reward: needs a --reward_model that is a sequence classifier with the policy's "
            "own tokenizer; leave the flag out"
        )
    return readers[0] if readers and critic_init != "actor" else None


def parse_spec(text):
    """``PATH`` or ``PATH=WEIGHT`` -> (path or hub name, weight)."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        weight = float(weight)
    except ValueError:
        return text, 1.0  # a path with such a sign in it, which is not there: loading says so
    if not 0 < abs(weight) < 1e6:
        raise InputError(f"--reward_model {text}: the weight must be a number other than 0")
    return path, weight


def load_reward_models(specs, device, trust_remote_code, dtype):
    """["PATH" or "PATH=WEIGHT", …] -> {name of the part: (model, weight)}.

    One is called "model", several after their folders.
    """
    loaded = {}
    for spec in specs:
        path, weight = parse_spec(spec)
        name = "model" if len(specs) == 1 else f"model_{Path(path).name}"
        while name in loaded:
            name += "_"
        loaded[name] = load_reward_model(path, device, trust_remote_code, dtype), weight
    return loaded
