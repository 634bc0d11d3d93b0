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
from dataclasses import dataclass, field
from pathlib import Path

import torch

from errors import InputError
from trainer.interrupt import TimeUp, time_limit
from trainer.reward_models import load_reward_models
from trainer.reward_server import RewardServer
from trainer.running import Running

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT = re.compile(r"<think>\n.*?\n</think>\n{1,2}<answer>\n.*?\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REPEATED = re.compile(r"\w+|[^\w\s]")  # words and single signs: what trigrams are made of
LENGTHS = (20, 800)  # characters that a response should have
SCORE_LIMIT = 3.0  # reward-model scores are clipped to ±3, normalised ones of a server as well


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


@dataclass
class Opinions:
    """What was said of B responses, before it is weighed: ``settle`` makes scores of it."""

    parts: dict = field(default_factory=dict)  # {name: [B]}, raw where the scale is the judge's own
    blocks: list = field(default_factory=list)  # which responses have an answer block
    alone: dict = field(default_factory=dict)  # {reward model: [len(blocks)]}, raw, of the answers alone


class Reward:
    """All reward parts of a run. Call it with a batch of texts; it returns each part and their sum.

    models: {name of the part: (reward model, weight)}; function: the user's; server: a ``RewardServer``.
    The call is ``ask``, then ``settle``; training has the other processes' scores come in between.
    """

    def __init__(
        self,
        models=None,
        function=None,
        server=None,
        reasoning=True,
        normalize=False,
        missing_eos_penalty=0.0,
        repetition_penalty=0.0,
        length_reward=0.0,
        timeout=0.0,
    ):
        self.models, self.function, self.server, self.timeout = models or {}, function, server, timeout
        self.reasoning, self.missing_eos_penalty = reasoning, missing_eos_penalty
        self.repetition_penalty, self.length_reward = repetition_penalty, length_reward
        self.normalized = {*self.models, "server"} if normalize else set()  # parts of a scale of their own

    def __call__(self, prompts, responses, answers, finished):
        return self.settle(self.ask(prompts, responses, answers, finished), {})

    def ask(self, prompts, responses, answers, finished):
        """B prompts (text or messages), texts, answers (or None), bools -> ``Opinions``.

        Raises InputError where a reward fails: an exception, no answer in time, a score that is no number.
        """
        opinions = Opinions()
        parts = opinions.parts
        if self.reasoning:
            parts["format"] = torch.tensor([format_reward(r) for r in responses])
            parts["marks"] = torch.tensor([mark_reward(r) for r in responses])
        for name, (model, _) in self.models.items():
            self._ask_model(name, model, prompts, responses, opinions)
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
        return opinions

    def _ask_model(self, name, model, prompts, responses, opinions):
        """Every whole response, and every answer block alone."""
        answers = [answer_text(r) if self.reasoning else None for r in responses]
        opinions.blocks = [i for i, answer in enumerate(answers) if answer is not None]
        asked = list(zip(prompts, responses, strict=True)) + [
            (prompts[i], answers[i]) for i in opinions.blocks
        ]
        scores = finite("--reward_model", model(asked), [text for _, text in asked])
        opinions.parts[name], opinions.alone[name] = scores.split([len(responses), len(opinions.blocks)])

    def settle(self, opinions, running, world=None):
        """``Opinions`` -> {part: [B]}, "score" their sum; with ``--normalize_reward`` "<part>_raw" beside it.

        running: {part: ``Running``} of all raw scores of whole responses. With a ``world`` they first take in
        those of all its processes, which all must call it; without, as in evaluation, they stay as they are.
        """
        if world:
            mine = {name: Running.of(x) for name, x in opinions.parts.items() if name in self.normalized}
            for theirs in world.gather(mine) if self.normalized else ():
                running.update({name: running.get(name, Running()) + new for name, new in theirs.items()})
        parts = {}
        for name, scores in opinions.parts.items():
            seen = running.get(name, Running()) if name in self.normalized else None
            if name in self.models:
                scores, alone = limited(scores, seen), limited(opinions.alone[name], seen)
                scores[opinions.blocks] = 0.4 * scores[opinions.blocks] + 0.6 * alone
                scores = self.models[name][1] * scores
            elif seen:
                scores = limited(scores, seen)
            parts[name] = scores
        parts["score"] = torch.stack(list(parts.values())).sum(0)
        raw = {f"{name}_raw": x for name, x in opinions.parts.items() if name in self.normalized}
        return parts | raw

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


def limited(scores, seen=None):
    """Raw scores within ±3, normalised by ``seen`` (a ``Running``) if there is one."""
    return (seen.scale(scores) if seen else scores).clamp(-SCORE_LIMIT, SCORE_LIMIT)


def running_metrics(running):
    """{part: Running} -> {"reward/<part>_mean", "reward/<part>_std"} of its raw scores so far."""
    return {
        f"reward/{part}_{what}": getattr(seen, what)
        for part, seen in running.items()
        for what in ("mean", "std")
    }


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
        normalize=args.normalize_reward,
        missing_eos_penalty=args.missing_eos_penalty,
        repetition_penalty=args.repetition_penalty,
        length_reward=args.length_reward,
        timeout=args.reward_timeout,
    )
