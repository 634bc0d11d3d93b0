"""Reward models: loading, scoring, the clip to ±3, and the choice of the model that the critic starts from.

Two kinds are supported: a sequence classifier with one label, and a model whose own code has ``get_score``.
Each uses its own tokenizer and chat template, and gets messages as messages. get_score_models.py has the
second kind.

``clip_scores`` clips every score to ±``SCORE_LIMIT`` = ±3, after normalising it if ``--normalize_reward`` is
on. If a response has an answer block, the whole response and the block are scored and clipped separately and
then mixed: 0.4 whole + 0.6 block (``mix_with_answer``). ``Reward.combine`` in reward.py calls both functions
and then applies the model's weight. It also clips a server's scores, but only with ``--normalize_reward``.
"""

import math
from contextlib import nullcontext
from functools import partial
from operator import call
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from dataset.tokenization import conversation_ids
from errors import InputError
from model.compatibility import check_tokenizer
from model.half_precision import keep_in_half, make_score_heads
from model.hub_connection import check_hub
from model.loading import as_input_error, load_tokenizer, quiet
from model.pretrained import check_report, fill_buffers, is_from_outside, load_config, load_pretrained
from trainer.compute.batching import pad_right, tokens_per_pass
from trainer.compute.layout import Layout
from trainer.compute.memory import each_micro_batch
from trainer.compute.packing import pack_sequences, packed_states
from trainer.compute.precision import autocast, check_finite, check_range
from trainer.compute.rollout_data import length_mask
from trainer.compute.sharding import shard
from trainer.rewards.get_score_models import RemoteRewardModel, run_as_outside_code

SCORE_LIMIT = 3.0  # scores are clipped to ±3, as in MiniMind


class ClassifierRewardModel:
    """A reward model that is an ``AutoModelForSequenceClassification`` with one label.

    Its linear layers and embeddings are kept in the dtype ``weights`` and compute as all models do, under
    autocast in ``dtype``; the score head computes in fp32. Code from outside runs without autocast. Raises
    InputError if its weights are incomplete, it has more than one label, its tokenizer does not fit, or its
    ``reward_offset`` is not a number, or a weight or a score is too large for fp16.
    """

    def __init__(self, path, device, trust_remote_code, dtype, weights):
        self.tokenizer = load_tokenizer(path, trust_remote_code)
        auto_class = AutoModelForSequenceClassification
        self.model, report = load_pretrained(auto_class, path, trust_remote_code, weights)
        check_report(report)
        if is_from_outside(self.model):
            self.dtype = torch.float32  # of mixed precision: none
            run_as_outside_code(self.model, device, weights)
        else:
            self.dtype = dtype
            keep_in_half(self.model)
            fill_buffers(self.model, fill=True, dtype=torch.float32)
            self.model.to(device).eval().requires_grad_(False)
            make_score_heads(self.model)
        # Several labels, or ids without an embedding, mean that this is the wrong model.
        if self.model.config.num_labels != 1:
            raise InputError(f"it has {self.model.config.num_labels} labels, a reward model has one")
        check_tokenizer(self.tokenizer, self.model)
        check_range(self.model, dtype, "")
        self.pad_id = self.model.config.pad_token_id
        # Decoder classifiers of transformers apply this linear layer to the state of the last token.
        self.head = dict(self.model.named_children()).get("score")
        backbone = self.model.base_model
        plain = isinstance(self.head, torch.nn.Linear) and backbone is not self.model
        self.packs = plain and pack_sequences(backbone)
        self.max_length = getattr(self.model.config, "max_position_embeddings", 1 << 30)  # ALiBi: no limit
        self.offset, self.root = reward_offset(self.model.config), None

    def shard(self, in_step):
        """Keep only a part of the weights in each process (``--shard``). From then on all processes must call
        the model together. Code from outside stays whole: it may use its weights in other ways."""
        if not is_from_outside(self.model):
            self.root = self.model.base_model if self.packs else self.model
            shard(self.root, in_step, self.dtype, self.model)
            self.root.in_step = in_step

    @torch.no_grad()
    def __call__(self, conversations):
        """N pairs (prompt, response) -> scores [N], fp32 on the CPU.

        Conversations of similar length share a micro-batch. One that is longer than the model's limit loses
        its beginning, because the score is read at the end.
        """
        in_step = getattr(self.root, "in_step", None)
        agreed = in_step.world.all_or_none if in_step else nullcontext
        with agreed():
            ids = [x[-self.max_length :] for x in conversation_ids(self.tokenizer, conversations)]
        found, places, scores = [], [], torch.empty(len(ids))

        def score_some(index):
            found.append(self._score([ids[i] for i in index]))
            places.extend(index)

        lengths, dummy = [len(x) for x in ids], partial(self._score, [[0]])
        budget = tokens_per_pass(self.model.device)
        each_micro_batch(lengths, budget, score_some, "reward model", self.root, dummy)
        if found:
            scores[places] = torch.cat(found).cpu()  # one copy from the device
        with agreed():
            if self.dtype == torch.float16:  # in other types reward.py names the response that has no score
                check_finite(scores, self.dtype, "the --reward_model")
        return scores - self.offset

    def _score(self, ids):
        """Lists of ids -> their scores, fp32 on the device."""
        tokens, lengths = pad_right(ids, self.model.device)
        score = self._packed_scores if self.packs else self._padded_scores
        with autocast(self.model.device, self.dtype):
            return score(tokens, lengths, Layout(map(len, ids))).float()

    def _packed_scores(self, tokens, lengths, layout):
        states = packed_states(self.model.base_model, tokens, layout).last_hidden_state
        return self.head(states[score_places(tokens, lengths, self.pad_id)]).squeeze(-1)

    def _padded_scores(self, tokens, lengths, _):
        """Scores [B] by the model's own forward, where it cannot be packed or has a head of its own.

        The model finds the last token by looking for its pad token. If it has none, pad with an id that is
        not the last one of any sequence in the batch.
        """
        pad = self.pad_id
        if pad is None:
            last = set(tokens[torch.arange(len(tokens)), lengths - 1].tolist())
            pad = self.model.config.pad_token_id = next(i for i in range(len(last) + 1) if i not in last)
        real = length_mask(lengths, tokens.shape[1])
        output = self.model(tokens.masked_fill(~real, pad), attention_mask=real.long())
        return output.logits.squeeze(-1)


def score_places(tokens, lengths, pad_id):
    """The places [B] among the packed tokens of [B, T] at which a classifier reads its scores.

    They are at each sequence's last token that is not the pad token, as in transformers. Models whose pad
    token is their EOS were trained that way as well.
    """
    counts = length_mask(lengths, tokens.shape[1])
    if pad_id is not None:
        counts &= tokens != pad_id
    last = (counts * torch.arange(tokens.shape[1], device=tokens.device)).argmax(1)
    return lengths.cumsum(0) - lengths + last


def reward_offset(config):
    """``reward_offset`` in a classifier's config, 0 if it has none: the number to subtract from its scores.

    It is in the config because a linear head without a bias cannot hold it. trainer/reward_offset.py writes
    it. Raises InputError if it is not a finite number.
    """
    offset = config.to_dict().get("reward_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise InputError(f"the reward_offset of its config.json is {offset!r:.50}; make it a number")
    return float(offset)


def load_reward_model(path, device, trust_remote_code=False, dtype=torch.float32, weights="auto", place=None):
    """A directory or hub name -> reward model: call it with N pairs (prompt, response) for scores [N].

    dtype: of mixed precision. weights: the dtype of its weights, "auto" for that of the checkpoint. place:
    where it waits until it is sharded; default: on the device. Raises InputError if it cannot be loaded or is
    not a reward model.
    """
    where = "cannot be loaded" if Path(path).exists() else "no such folder here, and not loaded from the hub"
    with quiet(), as_input_error(f"--reward_model {path}: {where}"):
        check_hub(path)
        config = load_config(path, trust_remote_code)
        architectures = config.architectures or []
        if any(name.endswith("ForSequenceClassification") for name in architectures):
            if weights == "auto" and (device.type, dtype) == ("cpu", torch.float32):
                # A CPU would spend a quarter of its time on making 16-bit weights fp32 at every call.
                weights = "auto" if is_from_outside(config) else torch.float32
            return ClassifierRewardModel(path, place or device, trust_remote_code, dtype, weights)
        if "AutoModel" in config.to_dict().get("auto_map", {}):
            if not trust_remote_code:
                raise InputError("it brings its own code; add --trust_remote_code to run it")
            return RemoteRewardModel(path, device, weights)
        raise InputError(
            f"{', '.join(architectures) or 'it'} is not a reward model; give a sequence classifier with one "
            "label, or a model whose code has get_score"
        )


def clip_scores(scores, stats=None):
    """Clip raw scores to ±3; with ``stats`` (``RunningStats``), normalise them first."""
    return (stats.scale(scores) if stats else scores).clamp(-SCORE_LIMIT, SCORE_LIMIT)


def mix_with_answer(whole, answer, with_answer):
    """Mix the scores of whole responses and of their answer blocks -> [B], as MiniMind does.

    whole: [B]; with_answer: indices of the responses that have an answer block; answer: the scores of these
    blocks, [len(with_answer)]. Responses with a block get 0.4 whole + 0.6 answer, others keep ``whole``.
    """
    mixed = whole.clone()
    mixed[with_answer] = 0.4 * whole[with_answer] + 0.6 * answer
    return mixed


def critic_start(critic_init, models, tokenizer):
    """(the classifier that the critic starts from, its weight), or None if the critic starts from the actor.

    critic_init "auto" or "reward": of the classifiers with the policy's vocabulary the one with the largest
    weight, whatever its sign, and the first of equals; without one, "auto" means the actor and "reward"
    raises InputError. models: {name: (reward model, weight)}.
    """
    readers = [
        (model.model, weight)
        for model, weight in models.values()
        if isinstance(model, ClassifierRewardModel) and model.tokenizer.get_vocab() == tokenizer.get_vocab()
    ]
    if critic_init == "reward" and not readers:
        raise InputError(
            "--critic_init reward: needs a --reward_model that is a sequence classifier with the policy's "
            "own tokenizer; leave the flag out"
        )
    return max(readers, key=lambda x: abs(x[1])) if readers and critic_init != "actor" else None


def parse_spec(text):
    """``PATH`` or ``PATH=WEIGHT`` -> (path or hub name, weight). InputError unless 0 < |weight| < 1e6."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        weight = float(weight)
    except ValueError:
        return text, 1.0  # a path that contains a = and does not exist: loading it raises InputError
    if not 0 < abs(weight) < 1e6:
        raise InputError(f"--reward_model {text}: the weight must be a number other than 0")
    return path, weight


def load_reward_models(specs, device, trust_remote_code, dtype, reward_dtype, load=call):
    """["PATH" or "PATH=WEIGHT", …] -> {name of the part: (model, weight)}.

    A single model is the part "model"; several are named after their folders, "model_<folder>". dtype: of
    mixed precision; reward_dtype: the flag. load(function, *arguments): loads one (``load_once`` in
    shard_run.py).
    """
    loaded, weights = {}, "auto" if reward_dtype == "auto" else getattr(torch, reward_dtype)
    for spec in specs:
        path, weight = parse_spec(spec)
        name = "model" if len(specs) == 1 else f"model_{Path(path).name}"
        while name in loaded:
            name += "_"
        how = device, trust_remote_code, dtype, weights
        loaded[name] = load(load_reward_model, path, *how), weight
    return loaded


def scoring_models(*rewards):
    """The reward models of these rewards (``Reward``, ``Judge``), as a list."""
    return [model for reward in rewards for model, _ in reward.models.values()]


def modules_of(*rewards):
    """The frozen modules of the reward models of these rewards, as a list."""
    return [model.model for model in scoring_models(*rewards)]
