"""Notes: what is far out of the usual in a run's metrics, said in plain words, each once in a run.

Every row of ``ROWS`` is a pure function: the metrics of the first and of the latest steps -> a sentence, ''
if all is well. The sentence has the number, what it means and the flag to change. For another note, add a
function to ``ROWS``.

The limits are far from what healthy runs have, so that such a run gets no note. The demo (seed 42) has a KL
of at most 0.052 nats a token and a clip fraction of at most 0.012. In docs/stages.md a run on human
preferences that worked had a KL of at most 0.06, and one that exploited its reward passed 0.4.
"""

import math
from collections import deque
from itertools import pairwise

from trainer.runs.displays import compared_name

WINDOW = 10  # steps at the start and at the end of the run so far that are compared
KL_LIMIT = 1.0  # nats a token
CLIP_LIMIT = 0.4  # share of tokens
FINISHED_STEPS = 3  # that the share of finished responses must be low in a row
EMPTY = 1.5  # tokens, of which one is the EOS
FINISHED_LEAST = 0.2  # a smaller share at the start cannot fall far


class Notes:
    """The notes of a run, step by step. ``given``: {name of the row: (step, sentence)}."""

    def __init__(self, records=()):
        """records: the steps so far of a run that is resumed, or that has ended; see ``add``."""
        self.given, self._first, self._latest = {}, [], deque(maxlen=WINDOW)
        for record in records:
            self.add(record["step"], record)

    def add(self, step, metrics):
        """Take in the metrics of a step -> the sentences that were not given before. Step 0 has none."""
        if not step:
            return []
        self._latest.append(metrics)
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        overlap = step < len(self._first) + len(self._latest)
        new = []
        for row in ROWS:
            if row.__name__ not in self.given and (text := row(self._first, list(self._latest), overlap)):
                self.given[row.__name__] = step, text
                new.append(text)
        return new


def high_kl(first, latest, overlap):
    """The policy has left the reference."""
    kl = latest[-1].get("kl/k1", 0.0)
    if not kl > KL_LIMIT:
        return ""
    return (
        f"the KL to the reference is {kl:.2f} nats per token, and below 0.1 is usual. The model is far from "
        "its start and may write nonsense: read samples.jsonl; lower --learning_rate or raise --kl_coef"
    )


def high_clip_fraction(first, latest, overlap):
    """The updates of a batch were far too large."""
    share = latest[-1].get("policy/clip_fraction", 0.0)
    if not share > CLIP_LIMIT:
        return ""
    return (
        f"the clip fraction is {share:.2f}, and below 0.2 is usual. One batch changed the probability of "
        f"{share:.0%} of its tokens by more than --clip_epsilon: lower --learning_rate or --ppo_epochs"
    )


def no_more_ends(first, latest, overlap):
    """Responses that ended by themselves at the start are now cut at --max_gen_len."""
    start = first[0].get("rollout/finished", 0.0)
    shares = [m.get("rollout/finished", 1.0) for m in latest[-FINISHED_STEPS:]]
    if len(shares) < FINISHED_STEPS or start < FINISHED_LEAST or not max(shares) < start / 2:
        return ""
    return (
        f"only {shares[-1]:.0%} of the responses end by themselves, at the start it was {start:.0%}. The "
        "model forgets to stop: raise --missing_eos_penalty, or lower --learning_rate"
    )


def empty_answers(first, latest, overlap):
    """The model has learned to end at once. A response's only token is then its EOS."""
    lengths = [latest[-1].get(name, math.inf) for name in ("rollout/length", "eval/length_greedy")]
    start = first[0].get("rollout/length", 0.0)
    if not (min(lengths) < EMPTY and start > 2 * EMPTY):
        return ""
    return (
        f"answers have {min(lengths):.1f} tokens, at the start {start:.1f}: most are empty. Ending at once "
        "pays more than answering: lower --missing_eos_penalty, raise --kl_coef, or look at the rewards of "
        "empty answers in samples.jsonl"
    )


def score_below_start(first, latest, overlap):
    """The score has been below its start for ``WINDOW`` steps, by more than it varies from step to step."""
    name = "reward/" + compared_name(first[0], "score")
    before, now = ([m[name] for m in steps if name in m] for steps in (first, latest))
    if overlap or len(before) < WINDOW or len(now) < WINDOW:
        return ""
    fall = sum(before) / WINDOW - sum(now) / WINDOW
    if not fall > max(2 * spread_of_steps(before), 0.0):
        return ""
    return (
        f"the mean {name} of the last {WINDOW} steps is {sum(now) / WINDOW:.3f}, that of the first {WINDOW} "
        f"was {sum(before) / WINDOW:.3f}. Training makes the model worse by its own reward: lower "
        "--learning_rate"
    )


ROWS = (high_kl, high_clip_fraction, no_more_ends, empty_answers, score_below_start)


def spread_of_steps(values):
    """How much a metric varies by chance from step to step, its standard deviation; NaN for fewer than 3.

    Taken from the differences of neighbouring steps: a slow rise or fall is hardly counted. For normally
    distributed x and y with standard deviation s the mean of |x - y| is 2 s / sqrt(pi).
    """
    if len(values) < 3:
        return math.nan
    jumps = [abs(b - a) for a, b in pairwise(values)]
    return sum(jumps) / len(jumps) * math.sqrt(math.pi) / 2
