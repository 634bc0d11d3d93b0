"""Reward models: loading, scoring, and the choice of the model that the critic starts from.

Two kinds are supported: a sequence classifier with one label, and a model whose own code has
``get_score(tokenizer, messages)``, as internlm2-reward has it. Each uses its own tokenizer and chat template,
and gets messages as messages. reward.py clips the scores and weighs them.

Code from outside runs as its authors ran it: weights in the dtype of the checkpoint, no autocast. Only a
score head is made fp32.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModel, AutoModelForSequenceClassification

from dataset.chat_template import conversation_ids
from dataset.formats import to_messages
from errors import InputError
from model.loading import (
    as_input_error,
    check_tokenizer,
    embeddings,
    fill_buffers,
    is_from_outside,
    load_config,
    load_pretrained,
    load_tokenizer,
    quiet,
)
from model.weights import keep_in_half, make_score_heads
from progress_bar import phase
from trainer.compute.batching import pad_right, tokens_per_pass
from trainer.compute.memory import each_micro_batch
from trainer.compute.packing import pack_sequences, packed_states
from trainer.compute.precision import autocast, check_finite, check_range
from trainer.compute.rollout_data import length_mask

# Conversations that a model's get_score and get_scores both score, to be compared
TURNS = [{"role": role, "content": "b"} for role in ("system", "user", "assistant", "user")]
CHECKED = [(prompt, "d e f g " * count) for prompt in ("a b c", TURNS) for count in (1, 3, 9)]
TOLERANCE = 1e-3  # of a score between -1 and 1
TOLERANCE_16 = 2e-2  # the same of a model in 16 bits


class ClassifierRewardModel:
    """A reward model that is an ``AutoModelForSequenceClassification`` with one label.

    Its linear layers and embeddings are kept in the dtype ``weights`` and compute as all models do, under
    autocast in ``dtype``; the score head computes in fp32. Code from outside runs without autocast. Raises
    InputError if its weights are incomplete, it has more than one label, its tokenizer does not fit, or a
    weight is too large for fp16.
    """

    def __init__(self, path, device, trust_remote_code, dtype, weights):
        self.tokenizer = load_tokenizer(path, trust_remote_code)
        auto_class = AutoModelForSequenceClassification
        self.model = load_pretrained(auto_class, path, trust_remote_code, weights)
        outside = is_from_outside(self.model)
        self.dtype = torch.float32 if outside else dtype  # of mixed precision
        if not outside:
            keep_in_half(self.model)
            fill_buffers(self.model, torch.float32)
        make_ready(self.model, device, outside and weights == "auto")
        # Several labels, or ids without an embedding, mean that this is the wrong model.
        if self.model.config.num_labels != 1:
            raise InputError(f"it has {self.model.config.num_labels} labels, a reward model has one")
        check_tokenizer(self.tokenizer, self.model)
        check_range(self.model, dtype, "")
        self.pad_id = self.model.config.pad_token_id
        # Decoder classifiers of transformers apply this linear layer to the state of the last token.
        head = getattr(self.model, "score", None)
        backbone = self.model.base_model
        plain = isinstance(head, torch.nn.Linear) and backbone is not self.model
        self.packs = plain and pack_sequences(backbone)
        self.root = backbone if self.packs else self.model  # what is sharded, with --shard 1
        self.max_length = getattr(self.model.config, "max_position_embeddings", 1 << 30)  # ALiBi: no limit
        # What train_reward.py has put there, as a linear head without a bias cannot hold it.
        self.offset = float(getattr(self.model.config, "reward_offset", 0.0))

    @torch.no_grad()
    def __call__(self, conversations):
        """N pairs (prompt, response) -> scores [N], fp32 on the CPU.

        Conversations of similar length share a micro-batch. One that is longer than the model's limit loses
        its beginning, because the score is read at the end. A sharded one needs all processes.
        """
        in_step = getattr(self.root, "in_step", None)
        together = in_step.world.all_or_none if in_step else nullcontext
        with together():
            ids = [x[-self.max_length :] for x in conversation_ids(self.tokenizer, conversations)]
        scores = torch.empty(len(ids))

        def score_some(rows):
            scores[rows] = self._score([ids[row] for row in rows]).cpu()

        def score_nothing():
            self._score([[0]])

        budget = tokens_per_pass(self.model.device)
        each_micro_batch([len(x) for x in ids], budget, score_some, "reward model", self.root, score_nothing)
        with together():
            if self.dtype == torch.float16:  # in other types reward.py names the response that has no score
                check_finite(scores, self.dtype, "the --reward_model")
        return scores - self.offset

    def _score(self, ids):
        """Lists of ids -> their scores, fp32 on the device."""
        tokens, lengths = pad_right(ids, self.model.device)
        with autocast(self.model.device, self.dtype):
            if not self.packs:
                return self._padded_scores(tokens, lengths).float()
            states = packed_states(self.model.base_model, tokens, map(len, ids)).last_hidden_state
            return self.model.score(states[score_places(tokens, lengths, self.pad_id)]).squeeze(-1).float()

    def _padded_scores(self, tokens, lengths):
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


class RemoteRewardModel:
    """A reward model whose own code has ``get_score(tokenizer, messages)``.

    If the code also has ``get_scores(tokenizer, conversations)`` and both agree on some conversations,
    ``batched`` is True: conversations are scored in batches.
    """

    def __init__(self, path, device, weights):
        self.tokenizer = load_tokenizer(path, trust_remote_code=True)
        # No cache of keys and values: it would only take memory, and the one of transformers 4 is gone.
        self.model = load_pretrained(AutoModel, path, True, weights)
        self.model.config.use_cache = False
        make_ready(self.model, device, weights == "auto")
        if not hasattr(self.model, "get_score"):
            raise InputError("its code has no get_score(tokenizer, messages)")
        self.batched = hasattr(self.model, "get_scores") and self._agrees()

    @torch.no_grad()
    def __call__(self, conversations):
        """N pairs (prompt, response) -> scores [N], fp32 on the CPU. InputError if its code fails."""
        return self._in_batches(conversations) if self.batched else self._one_by_one(conversations)

    def _one_by_one(self, conversations):
        scores = []
        bar = phase("reward model", len(conversations), "sequences")
        with as_input_error("--reward_model: its get_score failed"), bar as counted:
            for pair in conversations:
                scores.append(float(self.model.get_score(self.tokenizer, as_chat(*pair))))
                counted.done += 1
        return torch.tensor(scores, dtype=torch.float32)

    def _in_batches(self, conversations):
        """Similar lengths share a batch, which is halved where memory runs out."""
        scores = torch.empty(len(conversations))
        lengths = [len(ids) for ids in conversation_ids(self.tokenizer, conversations)]

        def fill(rows):
            found = self.model.get_scores(self.tokenizer, [as_chat(*conversations[row]) for row in rows])
            scores[rows] = torch.as_tensor(found).float().cpu().reshape(len(rows))  # some return one as 0-d

        with as_input_error("--reward_model: its get_scores failed"):
            each_micro_batch(lengths, tokens_per_pass(self.model.device), fill, "reward model")
        return scores

    @torch.no_grad()
    def _agrees(self):
        """Whether get_scores does the same as get_score; says so where it does not."""
        expected = self._one_by_one(CHECKED)
        try:
            gap = (self._in_batches(CHECKED) - expected).abs()
        except InputError as error:
            difference = str(error).removeprefix("--reward_model: ")
        else:
            tolerance = TOLERANCE if self.model.dtype == torch.float32 else TOLERANCE_16
            if (gap <= tolerance * expected.abs().clamp_min(1)).all():
                return True
            difference = f"its get_scores and get_score differ by {gap.max():.2g}"
        tqdm.write(f"note: --reward_model: {difference}: scoring one at a time", file=sys.stderr)
        return False


def as_chat(prompt, response):
    """A prompt (text or messages) and the response to it -> messages."""
    return [*to_messages(prompt), {"role": "assistant", "content": response}]


def make_ready(model, device, widen):
    """Make a loaded model ready to score: on its device, its score head in fp32.

    widen: whether fp16 becomes fp32 on a CPU: the numbers are the same, and CPUs compute in fp16 slowly or
    not at all.
    """
    if widen and device.type == "cpu" and model.dtype == torch.float16:
        model.float()
        fill_buffers(model)
    model.to(device).eval().requires_grad_(False)
    make_score_heads(model)


def load_reward_model(path, device, trust_remote_code=False, dtype=torch.float32, weights="auto"):
    """A directory or hub name -> reward model: call it with N pairs (prompt, response) for scores [N].

    dtype: of mixed precision. weights: the dtype of its weights, "auto" for that of the checkpoint. Raises
    InputError if it cannot be loaded or is not a reward model.
    """
    where = "cannot be loaded" if Path(path).exists() else "no such folder here, and not loaded from the hub"
    with quiet(), as_input_error(f"--reward_model {path}: {where}"):
        config = load_config(path, trust_remote_code)
        architectures = config.architectures or []
        if any(name.endswith("ForSequenceClassification") for name in architectures):
            if weights == "auto" and (device.type, dtype) == ("cpu", torch.float32):
                # A CPU would spend a quarter of its time on making 16-bit weights fp32 at every call.
                weights = "auto" if is_from_outside(config) else torch.float32
            return ClassifierRewardModel(path, device, trust_remote_code, dtype, weights)
        if "AutoModel" in config.to_dict().get("auto_map", {}):
            if not trust_remote_code:
                raise InputError("it brings its own code; add --trust_remote_code to run it")
            return RemoteRewardModel(path, device, weights)
        raise InputError(
            f"{', '.join(architectures) or 'it'} is not a reward model; give a sequence classifier with one "
            "label, or a model whose code has get_score"
        )


def critic_start(critic_init, models, policy, tokenizer):
    """(the classifier that the critic starts from, its weight), or None if the critic starts from the actor.

    critic_init "auto" or "reward": of the classifiers that can read what the policy writes the one with the
    largest weight, whatever its sign, and the first of equals; without one, "auto" means the actor and
    "reward" raises InputError. models: {name: (reward model, weight)}.
    """
    rows = embeddings(policy)  # often more than the tokenizer has ids: the policy can sample each of them
    readers = [
        (model.model, weight)
        for model, weight in models.values()
        if isinstance(model, ClassifierRewardModel)
        and model.tokenizer.get_vocab() == tokenizer.get_vocab()
        and embeddings(model.model) >= rows
    ]
    if critic_init == "reward" and not readers:
        raise InputError(
            "--critic_init reward: needs a --reward_model that is a sequence classifier with the policy's "
            f"own tokenizer and at least its {rows} embeddings; leave the flag out"
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


def load_reward_models(specs: list[str], args, device, dtype) -> dict:
    """["PATH" or "PATH=WEIGHT", …] -> {name of the part: (model, weight)}.

    A single model is the part "model"; several are named after their folders, "model_<folder>". args: the
    flags, for --trust_remote_code and --reward_dtype; dtype: of mixed precision.
    """
    loaded = {}
    weights = "auto" if args.reward_dtype == "auto" else getattr(torch, args.reward_dtype)
    for spec in specs:
        path, weight = parse_spec(spec)
        name = "model" if len(specs) == 1 else f"model_{Path(path).name}"
        while name in loaded:
            name += "_"
        model = load_reward_model(path, device, args.trust_remote_code, dtype, weights)
        loaded[name] = model, weight
    return loaded


def scoring_models(*rewards):
    """The reward models of these rewards (``Reward``, ``Judge``), as a list."""
    return [model for reward in rewards for model, _ in reward.models.values()]


def modules_of(*rewards):
    """The frozen modules of the reward models of these rewards, as a list."""
    return [model.model for model in scoring_models(*rewards)]
