"""The judge: an evaluation reward that never trains (--eval_reward_model, --eval_reward_fn).

A policy can raise the reward that it is trained on without getting better (reward hacking). Where the records
have answers, the accuracy shows it. Where they have none, a second reward can: one that PPO does not see. It
is called in evaluations only and logged as ``eval/judge``. Its scores are taken as they are, neither clipped
nor normalised. Its models see a thought only with ``--reasoning 1``, as those that train.
"""

import re
from contextlib import contextmanager
from operator import call

import torch

from errors import InputError
from trainer.rewards.reward import Reward
from trainer.rewards.reward_function import check_columns, load_reward_function
from trainer.rewards.reward_models import load_reward_models


class Judge:
    """The evaluation reward of a run, used as a ``Reward`` is. Without any model or function it has no
    scores. models: {name of the part: (reward model, weight)}; function: the user's; timeout: its seconds;
    whole: as of ``Reward``.

    ``names``: of the scores that ``combine`` returns: "judge", and with more than one part "judge_<part>".
    """

    def __init__(self, models=None, function=None, timeout=0.0, whole=False):
        self._reward = Reward(models, function, reasoning=False, timeout=timeout, whole=whole)
        self.models = self._reward.models
        parts = [*self.models, *(["function"] if function else [])]
        more = [f"judge_{part}" for part in parts] if len(parts) > 1 else []
        self.names = ["judge", *more] if parts else []

    def raw_scores(self, prompts, responses, answers, finished, records=None, lengths=None, texts=None):
        """Score B responses -> ``RawScores``. Arguments and errors as of ``Reward.raw_scores``."""
        with named_as_evaluation():
            return self._reward.raw_scores(prompts, responses, answers, finished, records)

    def combine(self, raw):
        """``RawScores`` -> {name: scores [B]}, "judge" is the sum of the others; {} without a judge."""
        parts = {name: self.models.get(name, (None, 1.0))[1] * x for name, x in raw.parts.items()}
        if not parts:
            return {}
        more = {f"judge_{name}": x for name, x in parts.items()} if len(parts) > 1 else {}
        return {"judge": torch.stack(list(parts.values())).sum(0)} | more


def load_judge(args, device, dtype, held_out, load=call):
    """Flags -> the ``Judge`` of the run. held_out: the dataset whose records its function may ask for, or
    None. load: as of ``load_reward_models``. Raises InputError as ``load_reward`` does, with the names of
    these flags."""
    with named_as_evaluation():
        function = load_reward_function(args.eval_reward_fn) if args.eval_reward_fn else None
        if function and held_out:
            check_columns(function, held_out.columns, held_out.path)
        how = device, args.trust_remote_code, dtype, args.reward_dtype
        models = load_reward_models(args.eval_reward_model, *how, load)
        return Judge(models, function, args.reward_timeout, whole=bool(args.reasoning))


@contextmanager
def named_as_evaluation():
    """In this block, errors on --reward_fn and --reward_model name --eval_reward_fn and
    --eval_reward_model: the code that raises them is the same."""
    try:
        yield
    except InputError as error:
        raise error.reworded(re.sub(r"--reward_(fn|model)\b", r"--eval_reward_\1", str(error))) from error
