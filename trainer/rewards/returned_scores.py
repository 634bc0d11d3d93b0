"""What a reward function returned -> the scores of the responses, and the rewards of steps inside them.

For each response it may return a number, which is the score of the whole response, or a list of pairs
(character offset, score). Then each score is the reward of the step that ends with this character, and the
response's score is their sum. trainer/step_rewards.py finds the tokens.
"""

import operator

from errors import InputError

LARGEST = 3.4e38  # of fp32


def as_scores(returned, responses):
    """-> (a float for each response: its number, or the sum of its steps; a list of (offset or None, float)
    for each response, empty where a number was returned). responses: the texts that were scored.

    Raises InputError that says what is wrong with what was returned.
    """
    count = len(responses)
    remedy = f"return a list of {count} numbers, one for each response"
    if returned is None:
        raise InputError(f"--reward_fn: returned nothing; end it with return: {remedy}")
    shape = getattr(returned, "shape", None)
    if isinstance(shape, tuple) and len(shape) != 1:
        raise InputError(f"--reward_fn: returned the shape {list(shape)} and not [{count}]; {remedy}")
    if isinstance(returned, str | bytes | dict | set) or not hasattr(type(returned), "__iter__"):
        raise InputError(f"--reward_fn: returned {_shown(returned)}; {remedy}")
    scores = list(returned)
    if len(scores) != count:
        raise InputError(f"--reward_fn: returned {len(scores)} scores for {count} responses; return one each")
    found = [_score(x, f"score {i + 1}", len(responses[i])) for i, x in enumerate(scores)]
    return [total for total, _ in found], [steps for _, steps in found]


def _score(score, place, length):
    """What was returned for a response of ``length`` characters -> (its score, its steps)"""
    if not isinstance(score, list | tuple):
        return _number(score, place), []
    steps = []
    for number, pair in enumerate(score):
        here = f"{place}, entry {number + 1}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(
                f"--reward_fn: {here} is {_shown(pair)}; a list must hold pairs (character offset, score)"
            )
        steps.append((_offset(pair[0], here, length), _number(pair[1], f"{here}: its score")))
        if not abs(steps[-1][1]) <= LARGEST:
            raise InputError(f"--reward_fn: {here}: the score {steps[-1][1]}; scores must be finite")
    return sum((x for _, x in steps), 0.0), steps


def _offset(offset, here, length):
    if offset is None:
        return None
    try:
        offset = operator.index(offset)
    except TypeError:
        raise InputError(
            f"--reward_fn: {here}: the offset {_shown(offset)} is no whole number; give None for the end"
        ) from None
    if not 0 <= offset <= length:
        raise InputError(
            f"--reward_fn: {here}: the offset {offset} is outside of the response, which has {length} "
            "characters; count them from 0, or give None for the end"
        )
    return offset


def _number(score, place):
    try:
        return float(score)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"--reward_fn: {place} is {_shown(score)} and no number; correct it") from None


def _shown(value):
    return f"{' '.join(repr(value).split())[:60]} ({type(value).__name__})"
