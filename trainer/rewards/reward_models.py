"""Reward models: loading and scoring. Their scores are clipped and weighed in combine.py.

Two kinds are supported: a sequence classifier with one label, and a model whose own code has
``get_score(tokenizer, messages)``, as internlm2-reward has it. Each uses its own tokenizer and chat template,
and gets messages as messages.

Code from outside runs as its authors ran it: weights in the dtype of the checkpoint, no autocast. Only a
score head is made fp32.
"""

import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dataset.chat_template import PLAIN, bos_and_eos, conversation_ids, pair_ids
from dataset.formats import AnyPrompt, Exchange, to_messages, whole_answer
from errors import InputError, as_input_error
from model.loading import (
    check_tokenizer,
    is_from_outside,
    load_config,
    load_pretrained,
    load_tokenizer,
    most_positions,
    quiet,
)
from model.weights import keep_in_half, make_score_heads, short_hash, weights_hash
from trainer.compute.batch import length_mask
from trainer.compute.batching import Beginnings, Layout, common_beginnings, pad_right, tokens_per_forward
from trainer.compute.memory import each_micro_batch
from trainer.compute.precision import autocast
from trainer.compute.scoring import pack_sequences, packed_states, shares_beginnings
from trainer.compute.sharding import ShardGroup

Conversations = list[Exchange]  # pairs of a prompt, messages or text, and a response

TRAINED = "{prompt}{response}{eos}"  # what TRL and OpenRLHF train a model without a chat template on
# Conversations that a model's get_score and get_scores both score, to be compared
TURNS = [{"role": role, "content": "b"} for role in ("system", "user", "assistant", "user")]
CHECKED: Conversations = [(prompt, "d e f g " * count) for prompt in ("a b c", TURNS) for count in (1, 3, 9)]
TOLERANCE = 2e-2  # by which they may differ, also in 16 bits


@dataclass(eq=False)
class RewardModel(ABC):
    """A frozen model that scores conversations, with its tokenizer. dtype: of mixed precision."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    form: str = ""  # --reward_template, or what a classifier without a chat template reads
    shard_group: ShardGroup | None = None  # where the model is sharded
    root: nn.Module = field(init=False)  # what is sharded, of a classifier

    pairs = False  # whether it reads prompt and response as two texts

    @abstractmethod
    def __post_init__(self) -> None:
        """Check the model, and choose how it computes. Raises InputError."""

    @abstractmethod
    def __call__(self, conversations: Conversations) -> Tensor:
        """N pairs (prompt, response) -> scores [N], fp32 on the CPU."""


RewardModels = dict[str, tuple[RewardModel, float]]  # {name of the part: (model, weight)}


class ClassifierRewardModel(RewardModel):
    """An ``AutoModelForSequenceClassification`` with one label. Its layers compute under autocast in
    ``dtype``, its score head in fp32. Raises InputError if it has more than one label, or its tokenizer does
    not fit."""

    def __post_init__(self) -> None:
        model = self.model
        config = model.config
        # Several labels, or ids without an embedding, mean that this is the wrong model.
        if config.num_labels != 1:
            raise InputError(f"it has {config.num_labels} labels, a reward model has one")
        check_tokenizer(self.tokenizer, model)
        # XLNet reads its score at the last column, padding or not.
        self.pad_id = None if config.model_type == "xlnet" else config.pad_token_id
        # Decoder classifiers of transformers apply this linear layer to the state of the last token.
        backbone = model.base_model
        self.causal = isinstance(getattr(model, "score", None), nn.Linear) and backbone is not model
        self.packs = self.causal and pack_sequences(backbone)
        self.root = backbone if self.packs else model
        plain = self.tokenizer.chat_template is None
        self.pairs = not self.causal and plain and self.tokenizer.is_fast
        if self.form:
            self.tokenizer.chat_template = None
        elif plain and not self.pairs:  # every model of stage 2 has the entry
            self.form = PLAIN if hasattr(config, "reward_offset") else TRAINED
        # RoBERTa has one type of tokens, DeBERTa v3 has none.
        types = "token_type_ids" in self.tokenizer.model_input_names
        self.has_types = self.pairs and types and getattr(config, "type_vocab_size", 0) > 1
        self.max_length = most_positions(config)
        for name, module in model.named_modules():  # RoBERTa's positions begin behind that of its pad token
            first = getattr(module, "padding_idx", None)
            if name.endswith("position_embeddings") and first is not None:
                self.max_length -= first + 1
        # What train_reward.py has put there, as a linear head without a bias cannot hold it.
        self.offset = float(getattr(config, "reward_offset", 0.0))

    @torch.no_grad()
    def __call__(self, conversations: Conversations) -> Tensor:
        """N pairs -> scores [N], fp32 on the CPU. A conversation that is longer than the model's limit loses
        its beginning, but not what the tokenizer puts before any text: the score is read at the end, or at
        that token (BERT). A sharded model needs all processes."""
        with self.shard_group.world.all_or_none() if self.shard_group else nullcontext():
            if self.pairs:
                ids, types = pair_ids(self.tokenizer, conversations)
            else:
                ids = types = conversation_ids(self.tokenizer, conversations, self.form)
            kept = len(bos_and_eos(self.tokenizer)[0])
            ids, types = ([x[:kept] + x[kept:][kept - self.max_length :] for x in y] for y in (ids, types))
        beginnings: Beginnings = ()
        if self.packs and shares_beginnings(self.model.base_model):
            beginnings = common_beginnings(ids, [repr(asked) for asked, _ in conversations])
        scores = torch.empty(len(ids))
        budget = tokens_per_forward(self.model.device)

        def score_some(rows):
            some = [[x[row] for row in rows] or [[0]] for x in (ids, types)]
            alike = [beginnings[row] for row in rows] if beginnings else []
            scores[rows] = self._score(some[0], some[1], alike).cpu()

        each_micro_batch(
            lengths=[len(x) for x in ids],
            # A model that looks for pad tokens and knows none gets conversations without any.
            token_budget=budget if self.packs or self.pad_id is not None else 1,
            work=score_some,
            name="reward model",
            shard_group=self.shard_group,
            beginnings=beginnings,
        )
        return scores - self.offset

    def _score(self, ids, types, beginnings):
        """Lists of ids and of token types -> their scores, fp32 on the device."""
        if self.packs:
            return score_packed(self.model, ids, self.dtype, beginnings)[0]
        tokens, lengths = pad_right(ids, self.model.device)
        real = length_mask(lengths, tokens.shape[1])
        tokens = tokens.masked_fill(~real, self.pad_id or 0)
        more = {"token_type_ids": pad_right(types, self.model.device)[0]} if self.has_types else {}
        with autocast(tokens.device, self.dtype):
            # The model finds the last token by looking for its pad token.
            return self.model(tokens, attention_mask=real.long(), **more).logits.squeeze(-1).float()


def score_packed(
    classifier: PreTrainedModel,
    conversations: list[list[int]],
    dtype: torch.dtype,
    beginnings: Beginnings = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of ids -> (scores [B] of a classifier with a linear head, in fp32 whatever the mixed precision;
    what ``packed_states`` gives: states, balance loss). dtype: of autocast.

    A score is read at a sequence's last token that is not the pad token, as in transformers. Models whose pad
    token is their EOS were trained that way as well."""
    tokens, _ = pad_right(conversations, classifier.device)
    layout = Layout(map(len, conversations), device=tokens.device, beginnings=beginnings)
    with autocast(tokens.device, dtype):
        states, balance = packed_states(classifier.base_model, tokens, layout)
    pad_id = classifier.config.pad_token_id
    last = [max((i for i, x in enumerate(ids) if x != pad_id), default=0) for ids in conversations]
    scores = classifier.get_submodule("score")(states[layout.places(last)])
    return scores.squeeze(-1), states, balance


class RemoteRewardModel(RewardModel):
    """A reward model whose own code has ``get_score(tokenizer, messages)``. If it also has
    ``get_scores(tokenizer, conversations)`` and both agree on some conversations, ``batched`` is True:
    conversations are scored in batches."""

    def __post_init__(self) -> None:
        if not hasattr(self.model, "get_score"):
            raise InputError(
                "it is no sequence classifier, and its code has no get_score(tokenizer, messages)"
            )
        self.batched = False
        if not hasattr(self.model, "get_scores"):
            return
        expected = self(CHECKED)
        self.batched = True
        difference = "its get_scores and get_score differ"
        try:
            if torch.allclose(self(CHECKED), expected, TOLERANCE, TOLERANCE):
                return
        except InputError as error:
            difference = str(error).removeprefix("--reward_model: ")
        self.batched = False
        tqdm.write(f"note: --reward_model: {difference}: scoring one at a time", file=sys.stderr)

    @torch.no_grad()
    def __call__(self, conversations: Conversations) -> Tensor:
        """N pairs -> scores [N], fp32 on the CPU. InputError if its code fails."""
        whole = [whole_answer(to_messages(asked), said) for asked, said in conversations]
        chats = [[*asked, {"role": "assistant", "content": said}] for asked, said in whole]
        scores = torch.empty(len(chats))
        name = "get_scores" if self.batched else "get_score"
        lengths = [1] * len(chats)
        budget = 1  # one at a time
        if self.batched:
            lengths = [len(ids) for ids in conversation_ids(self.tokenizer, conversations)]
            budget = tokens_per_forward(self.model.device)

        def score_some(rows):
            some = [chats[row] for row in rows] if self.batched else chats[rows[0]]
            found = getattr(self.model, name)(self.tokenizer, some)
            scores[rows] = torch.as_tensor(found).float().cpu().reshape(len(rows))  # some return one as 0-d

        with as_input_error(f"--reward_model: its {name} failed"):
            each_micro_batch(lengths, budget, score_some, "reward model")
        return scores


@contextmanager
def loading_errors(path: str) -> Iterator[None]:
    """In this block, errors are InputErrors that name this reward model."""
    where = "cannot be loaded" if Path(path).exists() else "no such folder here, and not loaded from the hub"
    with quiet(), as_input_error(f"--reward_model {path}: {where}"):
        yield


def check_reward_model(spec: str, trust_remote_code: bool) -> None:
    """Raise InputError where there is no reward model of this name, or its config cannot be read."""
    path, _ = parse_spec(spec)
    with loading_errors(path):
        load_config(path, trust_remote_code)


def load_reward_model(
    path: str,
    device: torch.device,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    weights: torch.dtype | str = "auto",
    form: str = "",
) -> RewardModel:
    """A directory or hub name -> reward model: call it with N pairs (prompt, response) for scores [N].

    dtype: of mixed precision. weights: in which linear layers and embeddings are kept, "auto" for that of the
    checkpoint; form: of --reward_template. Raises InputError if it cannot be loaded or is not a reward model.
    """
    with loading_errors(path):
        config = load_config(path, trust_remote_code)
        outside = is_from_outside(config)
        classifies = "ForSequenceClassification" in str(config.architectures)
        slow = config.dtype == torch.float16 if outside else dtype == torch.float32
        if weights == "auto" and device.type != "cuda" and slow:
            # A CPU would spend a quarter of its time on making 16-bit weights fp32 at every call. Code from
            # outside computes in the dtype of its weights: in fp16 slowly, or not at all. A Mac's GPU, which
            # computes in fp32 too, is treated alike.
            weights = torch.float32
        tokenizer = load_tokenizer(path, trust_remote_code)
        auto_class = AutoModelForSequenceClassification if classifies else AutoModel
        # No cache of keys and values: it would only take memory, and the one of transformers 4 is gone.
        config.use_cache = False
        model = load_pretrained(auto_class, path, trust_remote_code, config, weights)
        if getattr(model, "is_quantized", False) and not outside:
            raise InputError("its weights are quantized; take the model that it was made from")
        make_score_heads(model)
        if not outside:
            keep_in_half(model)
        nn.Module.to(model, device).requires_grad_(False)
        kind = ClassifierRewardModel if classifies else RemoteRewardModel
        # Code from outside knows no mixed precision.
        reward = kind(model, tokenizer, torch.float32 if is_from_outside(model) else dtype, form)
        if form and (reward.pairs or not classifies):
            raise InputError("it reads messages, or prompt and response as two; leave --reward_template out")
        return reward


def parse_spec(text: str, flag: str = "--reward_model") -> tuple[str, float]:
    """``PATH`` or ``PATH=WEIGHT`` -> (path or hub name, weight). InputError unless 0 < |weight| < 1e6."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        number = float(weight)
    except ValueError:
        return text, 1.0  # a path that contains a = and does not exist: loading it raises InputError
    if not 0 < abs(number) < 1e6:
        raise InputError(f"{flag} {text}: the weight must be a number other than 0")
    return path, number


def named_models(specs: list[str]) -> dict[str, tuple[str, float]]:
    """["PATH" or "PATH=WEIGHT", …] -> {name of the part: (path, weight)}. A single model is the part "model";
    several are named after their folders, "model_<folder>"."""
    found: dict[str, tuple[str, float]] = {}
    for spec in specs:
        path, weight = parse_spec(spec)
        name = "model" if len(specs) == 1 else f"model_{Path(path).name}"
        while name in found:
            name += "_"
        found[name] = path, weight
    return found


def load_reward_models(
    specs: list[str], args: Namespace, device: torch.device, dtype: torch.dtype
) -> RewardModels:
    """Specs as of ``named_models`` -> the models with their weights. args: the flags, for those that say how
    they are loaded; dtype: of mixed precision."""
    more = device, args.trust_remote_code, dtype, args.reward_dtype, args.reward_template
    return {
        name: (load_reward_model(path, *more), weight) for name, (path, weight) in named_models(specs).items()
    }


def merged_history(prompt: AnyPrompt) -> AnyPrompt:
    """--merge_history: a prompt of several messages -> a single one of the user, as MiniMind writes it."""
    *history, last = [(m["role"], m["content"].strip()) for m in to_messages(prompt)]
    if not history:
        return prompt
    before = "\n".join(f"{role}: {content}" for role, content in history)
    return to_messages(f"{before}\n以上是对话历史。我的新问题是：\n{last[1]}")


def models_hash(models: RewardModels) -> str:
    """The hash of all that scores depend on, whatever the paths; "" for no models. Call it before frozen
    weights are rounded."""
    found = []
    for model, weight in models.values():
        config = model.model.config.to_dict()
        found.append(
            [
                weights_hash(model.model),
                sorted(model.tokenizer.get_vocab().items()),
                model.tokenizer.chat_template,
                weight,
                config.get("reward_offset", 0.0),
                config.get("pad_token_id"),  # the score is read at the last token that is not this one
                *[form for form in [model.form] if form not in ("", PLAIN)],
            ]
        )
    return short_hash(found) if found else ""
