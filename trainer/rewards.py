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

from errors import InputError
from trainer.interrupt import TimeUp, time_limit
from trainer.reward_models import load_reward_models
from trainer.reward_server import RewardServer

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT = re.compile(r"<think>\n.*?\n</think>\n{1,2}<answer>\n.*?\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REPEATED = re.compile(r"\w+|[^\w\s]")  # words and single signs: what trigrams are made of
LENGTHS = (20, 800)  # characters that a response should have
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


def repetition_penalty(response, largest):
    """0 for a response whose trigrams are all different, ``largest`` once half of them have been there before
    (as MiniMind's: largest 0.5)."""
    words = REPEATED.findall(response.lower())
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    repeated = 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0
    return largest * min(1.0, 2 * repeated)


def length_reward(response, size):
    """``size`` for 20 to 800 characters, else minus ``size`` (as MiniMind's: 0.5)."""
    return size if LENGTHS[0] <= len(response.strip()) <= LENGTHS[1] else -size


def is_correct(response, answer, reasoning):
    """Does the response give this answer? For evaluation only: the trainer is never rewarded with it."""
    given = answer_text(response) if reasoning else response.strip()
    return given == answer.strip()


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
    """All reward parts of a run. Call it with a batch of texts; it returns each part and their sum.

    models: {name of the part: (reward model, weight)}; function: the user's; server: a ``RewardServer``.
    """

    def __init__(
        self,
        models=None,
        function=None,
        server=None,
        reasoning=True,
        missing_eos_penalty=0.0,
        repetition_penalty=0.0,
        length_reward=0.0,
        timeout=0.0,
    ):
        self.models, self.function, self.server, self.timeout = models or {}, function, server, timeout
        self.reasoning, self.missing_eos_penalty = reasoning, missing_eos_penalty
        self.repetition_penalty, self.length_reward = repetition_penalty, length_reward

    def __call__(self, prompts, responses, answers, finished):
        """B prompts (text or messages), texts, answers (or None), bools -> {part: [B]}, "score" their sum.

        Raises InputError where a reward fails: an exception, no answer in time, a score that is no number.
        """
        parts = {}
        if self.reasoning:
            parts["format"] = torch.tensor([format_reward(r) for r in responses])
            parts["marks"] = torch.tensor([mark_reward(r) for r in responses])
        for name, (model, weight) in self.models.items():
            parts[name] = weight * self._model_scores(model, prompts, responses)
        if self.function:
            parts["function"] = self._function_scores(prompts, responses, answers)
        if self.server:
            parts["server"] = finite("--reward_url", self.server(prompts, responses, answers), responses)
        if self.repetition_penalty:
            penalties = [repetition_penalty(r, self.repetition_penalty) for r in responses]
            parts["repetition"] = -torch.tensor(penalties)
        if self.length_reward:
            parts["length"] = torch.tensor([length_reward(r, self.length_reward) for r in responses])
        if self.missing_eos_penalty:
            parts["missing_eos"] = -self.missing_eos_penalty * (~torch.tensor(finished)).float()
        parts["score"] = torch.stack(list(parts.values())).sum(0)
        return parts

    def _model_scores(self, model, prompts, responses):
        """[B], scores clipped; with an answer block 0.4 of the whole response + 0.6 of the answer alone."""
        conversations = list(zip(prompts, responses, strict=True))
        answers = [answer_text(r) if self.reasoning else None for r in responses]
        blocks = [i for i, answer in enumerate(answers) if answer is not None]
        scores = model(conversations + [(prompts[i], answers[i]) for i in blocks])
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


def load_reward(args, device, dtype, tokenizer):
    """Flags -> the reward of the run. ``tokenizer``: the policy's, whose prompts a reward server is sent."""
    return Reward(
        models=load_reward_models(args.reward_model, device, args.trust_remote_code, dtype),
        function=load_reward_function(args.reward_fn) if args.reward_fn else None,
        server=RewardServer(args.reward_url, args.reward_timeout, tokenizer) if args.reward_url else None,
        reasoning=args.reasoning,
        missing_eos_penalty=args.missing_eos_penalty,
        repetition_penalty=args.repetition_penalty,
        length_reward=args.length_reward,
        timeout=args.reward_timeout,
    )
