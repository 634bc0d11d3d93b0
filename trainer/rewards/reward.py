"""The reward of a response: its score is the plain sum of several parts, and every part is logged as well.

The parts: rules about the text (rules.py), reward models (reward_models.py), a function of the user's
(reward_function.py), a reward server (reward_server.py). All of them read text, never the policy's tokens;
reward models get messages as messages. Of a model that thinks, reward models and the repetition penalty see
what follows ``</think>``; all others see the whole response. With ``--reasoning 1`` all see the whole.

Where to add a reward of one's own:

- without changing this program: a Python function (``--reward_fn``, see reward_function.py) or a server
  (``--reward_url``, see reward_server.py);
- as a new part: write the rule in rules.py, put its scores [B] into ``parts`` in ``Reward.raw_scores``, add
  its flag to ``flag_parser`` in train_ppo.py, and pass the flag on in ``load_reward`` below.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from operator import call

import torch

from errors import InputError
from trainer.rewards import rules
from trainer.rewards.reward_function import call_reward_function, check_columns, load_reward_function
from trainer.rewards.reward_models import SCORE_LIMIT, clip_scores, load_reward_models, mix_with_answer
from trainer.rewards.reward_server import RewardServer
from trainer.rewards.running_stats import RunningStats

PENALTY_OF_BEFORE = 1.0  # the default of --missing_eos_penalty before it followed the rewards


@dataclass
class RawScores:
    """The scores of B responses, part by part, not yet normalised, clipped or multiplied by weights."""

    parts: dict = field(default_factory=dict)  # {name of the part: scores [B]}
    with_answer: list = field(default_factory=list)  # indices of the responses that have an answer block
    answer_only: dict = field(default_factory=dict)  # {part: [len(with_answer)]}: scores of that block
    # Of each response its (character offset or None, score), where the user's function gave steps. The part
    # "function" is their sum. [] without a function.
    steps: list = field(default_factory=list)
    judging_seconds: float = 0.0  # how long the reward models took for them

    def replaced(self, rows, new):
        """-> the same for all responses but those of ``rows`` (list), which get what ``new`` says of them."""
        where, parts = torch.tensor(rows), {}
        for name, scores in self.parts.items():
            parts[name] = scores.index_copy(0, where, new.parts[name])
        gone = set(rows)
        kept = [place for place, row in enumerate(self.with_answer) if row not in gone]
        pairs = [(self.with_answer[place], place) for place in kept]
        pairs += [(rows[row], len(self.with_answer) + place) for place, row in enumerate(new.with_answer)]
        order = torch.tensor([place for _, place in sorted(pairs)], dtype=torch.int64)
        both = {name: torch.cat([x, new.answer_only[name]])[order] for name, x in self.answer_only.items()}
        steps = dict(enumerate(self.steps)) | dict(zip(rows, new.steps, strict=False))
        seconds = self.judging_seconds + new.judging_seconds
        return RawScores(parts, sorted(row for row, _ in pairs), both, list(steps.values()), seconds)


class Reward:
    """All reward parts of a run. Call it with a batch of texts; it returns each part and their sum.

    models: {name of the part: (reward model, weight)}; function: the user's; server: a ``RewardServer``;
    timeout: seconds that the function may take, 0 for no limit; overlong: None, or the arguments of
    ``rules.overlong_penalty`` after the length; whole: thoughts are judged too, as always with reasoning;
    missing_eos_penalty: None until it is chosen (missing_eos.py): till then no response pays it.

    A call is ``raw_scores`` followed by ``combine``. Training calls the two separately: ``raw_scores`` may
    fail in one process, while ``combine`` exchanges statistics between all of them (``--normalize_reward``).
    ``running``: {part: ``RunningStats``} of the raw scores of all whole responses so far. Checkpoints keep it
    (``state_dict``).
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
        overlong=None,
        thinking_reward=0.0,
        whole=False,
    ):
        self.models, self.function, self.server, self.timeout = models or {}, function, server, timeout
        self.reasoning, self.missing_eos_penalty = reasoning, missing_eos_penalty
        self.whole = whole or reasoning
        self.repetition_penalty, self.length_reward = repetition_penalty, length_reward
        self.overlong = overlong
        self.thinking_reward = thinking_reward
        # Only these parts are normalised: the user chooses the scale of every other part.
        self.normalized = {*self.models, "server"} if normalize else set()
        self.running = {}

    @property
    def names(self):
        """The names of all scores that ``combine`` returns."""
        given = {
            "format": self.reasoning,
            "marks": self.reasoning,
            "thinking": self.thinking_reward,
            **dict.fromkeys(self.models, True),
            "function": self.function,
            "server": self.server,
            "repetition": self.repetition_penalty,
            "length_reward": self.length_reward,
            "missing_eos": self.missing_eos_penalty != 0,
            "overlong": self.overlong,
        }
        parts = [name for name, there in given.items() if there]
        raw = [f"{name}_raw" for name in parts if name in self.normalized]
        return [*parts, *(["score"] if parts else []), *raw, *(["score_raw"] if raw else [])]

    def __call__(self, prompts, responses, answers, finished, records=None, lengths=None, texts=None):
        return self.combine(self.raw_scores(prompts, responses, answers, finished, records, lengths, texts))

    def raw_scores(self, prompts, responses, answers, finished, records=None, lengths=None, texts=None):
        """Score B responses -> ``RawScores``.

        prompts: text or messages; responses: texts; answers: texts or None; finished: bools, False for a
        response that was cut at --max_gen_len; records: the dicts of the data file, for the user's function;
        lengths: in tokens, which only ``overlong`` needs; texts: the prompts as the policy reads them, which
        only a server and ``thinking_reward`` need.
        Raises InputError if a reward fails: it raises an exception, takes too long, or gives a score that is
        NaN or infinite.
        """
        raw = RawScores()
        parts = raw.parts
        if self.reasoning:
            parts["format"] = torch.tensor([rules.format_reward(r) for r in responses])
            parts["marks"] = torch.tensor([rules.mark_reward(r) for r in responses])
        if self.thinking_reward:
            size = self.thinking_reward
            points = [
                0.0 if rules.has_closed_thought(asked) else rules.thinking_reward(response, size)
                for asked, response in zip(texts, responses, strict=True)
            ]
            parts["thinking"] = torch.tensor(points)
        said = responses if self.whole else [rules.after_thinking(r) for r in responses]
        start = time.perf_counter()
        self._score_with_models(prompts, said, raw)
        raw.judging_seconds = time.perf_counter() - start
        if self.function:
            batch = prompts, responses, answers, records or [{}] * len(responses)
            scores, raw.steps = call_reward_function(self.function, *batch, self.timeout)
            parts["function"] = finite("--reward_fn", scores, responses)
        if self.server:
            parts["server"] = finite(
                "--reward_url", self.server(prompts, texts, responses, answers), responses
            )
        if self.repetition_penalty:
            penalties = [rules.repetition_penalty(r, self.repetition_penalty) for r in said]
            parts["repetition"] = -torch.tensor(penalties)
        if self.length_reward:
            sizes = [rules.length_reward(r, self.length_reward) for r in responses]
            parts["length_reward"] = torch.tensor(sizes)
        if self.missing_eos_penalty:
            parts["missing_eos"] = -self.missing_eos_penalty * (~torch.tensor(finished)).float()
        if self.overlong:
            penalties = [rules.overlong_penalty(length, *self.overlong) for length in lengths]
            parts["overlong"] = -torch.tensor(penalties)
        return raw

    def _score_with_models(self, prompts, responses, raw):
        """Score every whole response, and every answer block alone, in one call of each reward model."""
        if not self.models:
            return
        answers = [rules.answer_text(r) if self.reasoning else None for r in responses]
        raw.with_answer = [i for i, answer in enumerate(answers) if answer is not None]
        conversations = list(zip(prompts, responses, strict=True))
        conversations += [(prompts[i], answers[i]) for i in raw.with_answer]
        found = {name: model(conversations) for name, (model, _) in self.models.items()}
        for name, scores in found.items():  # all have scored: sharded ones need all processes
            scores = finite("--reward_model", scores, [text for _, text in conversations])
            raw.parts[name], raw.answer_only[name] = scores.split([len(responses), len(raw.with_answer)])

    def combine(self, raw, world=None):
        """``RawScores`` -> {part: [B], "score": [B]}; "score" is the sum of the parts; {} without any.

        With ``--normalize_reward`` the result also has "<part>_raw" of each normalised part, and "score_raw":
        the sum with raw scores times their weights in the place of normalised and clipped ones. Its scale
        stays the same in all steps. Training gives a ``world``: the running
        statistics first take in the raw scores of all its processes, so all processes must call this.
        Evaluation gives none: the statistics then stay as they are.
        """
        if world and self.normalized:
            mine = {name: RunningStats.of(x) for name, x in raw.parts.items() if name in self.normalized}
            for theirs in world.gather(mine):
                for name, new in theirs.items():
                    self.running[name] = self.running.get(name, RunningStats()) + new
        parts = {}
        for name, scores in raw.parts.items():
            stats = self.running.get(name, RunningStats()) if name in self.normalized else None
            if name in self.models:
                whole, answer = clip_scores(scores, stats), clip_scores(raw.answer_only[name], stats)
                scores = self.models[name][1] * mix_with_answer(whole, answer, raw.with_answer)
            elif stats is not None:
                scores = clip_scores(scores, stats)
            parts[name] = scores
        if not parts:
            return {}
        parts["score"] = torch.stack(list(parts.values())).sum(0)
        if not (raws := {name: x for name, x in raw.parts.items() if name in self.normalized}):
            return parts
        plain = [self._weight(name) * raws[name] if name in raws else parts[name] for name in raw.parts]
        named = {f"{name}_raw": x for name, x in raws.items()}
        return parts | named | {"score_raw": torch.stack(plain).sum(0)}

    def at_limit(self, raw):
        """[B], True where the score of a whole response by a reward model is at the limit of the clip or
        beyond it (``--normalize_reward``: the normalised score). raw: ``RawScores`` that were combined."""
        clipped = [clip_scores(raw.parts[name], self.running.get(name)) for name in self.models]
        return torch.stack(clipped).abs().ge(SCORE_LIMIT).any(0)

    def _weight(self, part):
        return self.models[part][1] if part in self.models else 1.0

    def metrics(self, raw):
        """{"reward/<part>_mean": …, "reward/<part>_std": …} of all raw scores so far, and how many seconds
        the reward models took for a batch (``RawScores``)."""
        running = {
            f"reward/{part}_{what}": getattr(stats, what)
            for part, stats in self.running.items()
            for what in ("mean", "std")
        }
        return running | ({"perf/reward_model_seconds": raw.judging_seconds} if self.models else {})

    def state_dict(self):
        """What a checkpoint keeps: {part: {"count": …, "mean": …, "squares": …}}, and the penalty."""
        running = {part: asdict(stats) for part, stats in self.running.items()}
        return {"missing_eos_penalty": self.missing_eos_penalty, **running}

    def load_state_dict(self, state):
        """Take over what ``state_dict`` returned. Raises ValueError or TypeError for anything else. A penalty
        that is given stays; a checkpoint from before it was chosen has that of then."""
        running = dict(state)
        kept = float(running.pop("missing_eos_penalty", PENALTY_OF_BEFORE))
        self.running = {part: RunningStats(**stats) for part, stats in running.items()}
        if self.missing_eos_penalty is None:
            self.missing_eos_penalty = kept


def finite(flag, scores, responses):
    """Return the scores [B]. Raises InputError if one is NaN or infinite: it would spoil the whole batch."""
    wrong = (~scores.isfinite()).nonzero()
    if len(wrong):
        score, response = scores[wrong[0]].item(), json.dumps(responses[wrong[0]], ensure_ascii=False)[:80]
        raise InputError(f"{flag}: the score {score} for the response {response}; scores must be finite")
    return scores


def load_reward(args, device, dtype, *datasets, load=call):
    """Flags -> the ``Reward`` of the run. datasets: those whose records a function may ask for, or None.
    load: as of ``load_reward_models``."""
    function = load_reward_function(args.reward_fn) if args.reward_fn else None
    for data in datasets if function else ():
        if data:
            check_columns(function, data.columns, data.path)
    return Reward(
        models=load_reward_models(
            args.reward_model, device, args.trust_remote_code, dtype, args.reward_dtype, load
        ),
        function=function,
        server=RewardServer(args.reward_url, args.reward_timeout) if args.reward_url else None,
        reasoning=args.reasoning,
        normalize=args.normalize_reward,
        missing_eos_penalty=args.missing_eos_penalty,
        repetition_penalty=args.repetition_penalty,
        length_reward=args.length_reward,
        timeout=args.reward_timeout,
        overlong=(args.max_gen_len, args.overlong_buffer, args.overlong_penalty)
        if args.overlong_buffer and args.overlong_penalty
        else None,
        thinking_reward=args.thinking_reward,
    )
