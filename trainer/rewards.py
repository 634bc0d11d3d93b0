"""Responses -> scores: the reasoning format, a reward model, the user's own function; each part on its own.

A sequence's score is the plain sum of its parts. Nothing here knows about tokens of the policy: rewards see
text, and messages go to the reward model as messages.
"""

import copy
import importlib.util
import json
import re
import sys
import traceback
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from dataset.lm_dataset import conversation_ids
from errors import InputError
from model.checks import check_tokenizer
from model.loading import as_input_error, load_tokenizer, quiet
from trainer.interrupt import TimeUp, time_limit
from trainer.memory import each_micro_batch
from trainer.packing import pack_sequences, packed_states
from trainer.ppo import length_mask
from trainer.precision import autocast
from trainer.record import pad_right, tokens_per_pass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT = re.compile(r"<think>\n.*?\n</think>\n{1,2}<answer>\n.*?\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SCORE_LIMIT = 3.0  # reward-model scores are clipped to ±3


def format_reward(response):
    """0.5 for exactly the think / answer format, one or two newlines between the blocks, else 0."""
    return 0.5 * bool(FORMAT.fullmatch(response))


def mark_reward(response):
    """0.25 for each of the four tags that occurs exactly once: a slope towards the format."""
    return 0.25 * sum(response.count(tag) == 1 for tag in TAGS)


def answer_text(response):
    """The stripped text of the first answer block, or None where there is none."""
    match = ANSWER.search(response)
    return match.group(1).strip() if match else None


def is_correct(response, answer, reasoning):
    """Does the response give this answer? For evaluation only: the trainer is never rewarded with it."""
    given = answer_text(response) if reasoning else response.strip()
    return given == answer.strip()


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
        return scores

    def _packed_scores(self, tokens, lengths):
        """transformers reads the score at the last token that is not the pad token: so do we, since a model
        whose pad is its EOS was trained that way."""
        states = packed_states(self.model.base_model, tokens, lengths).last_hidden_state
        counts = length_mask(lengths, tokens.shape[1])
        if self.pad_id is not None:
            counts &= tokens != self.pad_id
        last = (counts * torch.arange(tokens.shape[1], device=tokens.device)).argmax(1)
        return self.head(states[lengths.cumsum(0) - lengths + last]).squeeze(-1)

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
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        with as_input_error("--reward_model: its get_score failed"):
            return float(
                self.model.get_score(self.tokenizer, [*messages, {"role": "assistant", "content": response}])
            )


def load_reward_model(path, device, trust_remote_code=False, dtype=torch.float32):
    """A directory or hub name -> callable [(prompt, response)] -> scores [N]. InputError if it is none."""
    with quiet(), as_input_error(f"--reward_model {path}: cannot be loaded"):
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


def starts_critic(critic_init, reward_model, tokenizer):
    """Does the critic start from the reward model? ``auto``: where that reads the policy's tokens."""
    same_tokens = isinstance(reward_model, ClassifierRewardModel)
    same_tokens = same_tokens and reward_model.tokenizer.get_vocab() == tokenizer.get_vocab()
    if critic_init == "reward" and not same_tokens:
        raise InputError(
            "--critic_init reward: needs a --reward_model that is a sequence classifier with the policy's "
            "own tokenizer; leave the flag out"
        )
    return same_tokens and critic_init != "actor"


def load_reward_function(spec):
    """``path.py:function`` -> the function of (prompts, responses, answers) -> scores."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise InputError(f"--reward_fn {spec}: no such file; write it as path.py:function")
    # Not the bare stem: a file called json.py must not become the module of that name for everybody.
    module_spec = importlib.util.spec_from_file_location(f"reward_fn_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except KeyboardInterrupt:  # Ctrl-C while loading
        raise
    except BaseException as error:  # whatever the user's file raises is the user's to see
        raise InputError(f"--reward_fn {path}: importing it failed: {repr(error)[:200]}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward_fn {path}: has no function {name!r}")
    return function


class Reward:
    """All reward parts of a run. Call it with a batch of texts; it returns each part and their sum."""

    def __init__(self, model=None, function=None, reasoning=True, missing_eos_penalty=0.0, timeout=0.0):
        self.model, self.function, self.timeout = model, function, timeout
        self.reasoning, self.missing_eos_penalty = reasoning, missing_eos_penalty

    def __call__(self, prompts, responses, answers, finished):
        """B prompts (text or messages), texts, answers (or None), bools -> {part: [B]}, "score" their sum.

        Raises InputError where a reward fails: an exception, no answer in time, a score that is no number.
        """
        parts = {}
        if self.reasoning:
            parts["format"] = torch.tensor([format_reward(r) for r in responses])
            parts["marks"] = torch.tensor([mark_reward(r) for r in responses])
        if self.model:
            parts["model"] = self._model_scores(prompts, responses)
        if self.function:
            parts["function"] = self._function_scores(prompts, responses, answers)
        if self.missing_eos_penalty:
            parts["missing_eos"] = -self.missing_eos_penalty * (~torch.tensor(finished)).float()
        parts["score"] = torch.stack(list(parts.values())).sum(0)
        return parts

    def _model_scores(self, prompts, responses):
        """[B], scores clipped; with an answer block 0.4 of the whole response + 0.6 of the answer alone."""
        conversations = list(zip(prompts, responses, strict=True))
        answers = [answer_text(r) if self.reasoning else None for r in responses]
        blocks = [i for i, answer in enumerate(answers) if answer is not None]
        scores = self.model(conversations + [(prompts[i], answers[i]) for i in blocks])
        scores = scores.clamp(-SCORE_LIMIT, SCORE_LIMIT)
        whole, alone = scores[: len(responses)], scores[len(responses) :]
        whole[blocks] = 0.4 * whole[blocks] + 0.6 * alone
        return finite("--reward_model", whole, responses)

    def _function_scores(self, prompts, responses, answers):
        try:
            copies = copy.deepcopy((prompts, responses, answers))  # it may change what it is given
            with time_limit(self.timeout):
                scores = [float(score) for score in self.function(*copies)]
        except TimeUp:
            raise InputError(
                f"--reward_fn: no answer after {self.timeout:g} s; speed it up or raise --reward_timeout"
            ) from None
        except BaseException as error:  # whatever the user's code raises is the user's to see
            frames = traceback.extract_tb(error.__traceback__)
            places = [f" at {f.filename}:{f.lineno}" for f in frames if f.filename != __file__]
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise InputError(
                f"--reward_fn: {reason}{places[0] if places else ', in what it returned'}; mend it"
            ) from error
        if len(scores) != len(responses):
            raise InputError(
                f"--reward_fn: returned {len(scores)} scores for {len(responses)} responses; return one each"
            )
        return finite("--reward_fn", torch.tensor(scores), responses)


def finite(flag, scores, responses):
    """The scores [B] as they are. InputError if one is NaN or infinite: it would spoil the whole batch."""
    wrong = (~scores.isfinite()).nonzero()
    if len(wrong):
        score, response = scores[wrong[0]].item(), json.dumps(responses[wrong[0]], ensure_ascii=False)[:80]
        raise InputError(f"{flag}: the score {score} for the response {response}; scores must be finite")
    return scores


def load_reward(args, device, dtype):
    """Flags -> the reward of the run."""
    model = function = None
    if args.reward_model:
        model = load_reward_model(args.reward_model, device, args.trust_remote_code, dtype)
    if args.reward_fn:
        function = load_reward_function(args.reward_fn)
    return Reward(model, function, args.reasoning, args.missing_eos_penalty, args.reward_timeout)
