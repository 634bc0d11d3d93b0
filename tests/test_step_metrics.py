"""What is logged of the responses of a batch as texts, against numbers worked out by hand."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import assistant, dialogue

from dataset.formats import TurnText
from trainer.compute.batch import Batch
from trainer.rewards.combine import Reward
from trainer.rewards.rules import repetition
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics
from trainer.step_metrics import add_scores, add_turns, answer_rows, metrics_over_processes, step_metrics

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([1, 2, 4, 1, 2, 4], 1 / 4),  # 124 241 412 124
        ([5] * 4, 1 / 2),
        ([5] * 7, 4 / 5),
        ([1, 2, 4, 4, 2, 1], 0),
        ([1, 0, 0, 1, 0], 0),  # 100 001 010
        *[([5] * count, 0) for count in (1, 2, 3)],  # at most a single trigram
    ],
)
def test_repetition_by_hand(ids, share):
    assert repetition(ids) == share


def test_scores_and_lengths_by_hand():
    """Lengths 1, 2, 3, 4, so deviations -1.5, -0.5, 0.5, 1.5; scores 1, 5, 1, 5: -2, 2, -2, 2. The std is 2,
    the correlation (3 - 1 - 1 + 3) / sqrt(5 * 16)."""
    responses = [[5] * n for n in (1, 2, 3, 4)]
    found = metrics_over_processes(responses, torch.tensor([1.0, 5.0, 1.0, 5.0]), ALONE)
    assert found["reward/score_std"] == 2.0
    assert found["rollout/score_length_corr"] == pytest.approx(4 / 80**0.5)
    for slope in (-0.1, 1e6):
        line = metrics_over_processes(responses, slope * torch.arange(4.0) + 3, ALONE)
        assert line["rollout/score_length_corr"] == pytest.approx(1 if slope > 0 else -1)


@pytest.mark.parametrize("score", [0.0, 0.1, -12345.678])
def test_scores_or_lengths_that_are_all_alike_have_no_correlation(score):
    alike = torch.full((7,), score)
    for scores in (alike, alike * (1 + 1e-7 * torch.arange(7.0)), alike[:1]):
        found = metrics_over_processes([[5] * n for n in range(1, len(scores) + 1)], scores, ALONE)
        assert found["reward/score_std"] == found["rollout/score_length_corr"] == 0
    found = metrics_over_processes([[5, 6], [6, 5], [5, 5]], torch.tensor([score, 1.0, 2.0]), ALONE)
    assert found["rollout/score_length_corr"] == 0
    assert found["reward/score_std"] > 0.1


def test_responses_without_a_score_are_counted_and_left_out():
    responses = [[5] * n for n in (1, 9, 2, 3, 4)]
    scores = torch.tensor([1.0, math.nan, 5.0, 1.0, 5.0])
    found = metrics_over_processes(responses, scores, ALONE)
    assert found.pop("reward/unscored") == pytest.approx(0.2)
    others = metrics_over_processes([responses[n] for n in (0, 2, 3, 4)], scores[[0, 2, 3, 4]], ALONE)
    assert found == others | {"rollout/distinct": 1.0}
    none = metrics_over_processes(responses, torch.full((5,), math.nan), ALONE)
    assert none == {
        "reward/unscored": 1,
        "rollout/distinct": 1,
        "reward/score_std": 0,
        "rollout/score_length_corr": 0,
    }
    metrics = Metrics()
    add_scores(metrics, "reward/f", scores)
    assert metrics.means(ALONE) == {"reward/f": 3.0}
    add_scores(metrics, "reward/g", scores[1:2])
    assert math.isnan(metrics.means(ALONE)["reward/g"])  # nothing was said: no 0


def test_responses_are_the_same_where_all_their_tokens_are():
    """Three of six: one occurs three times, to other prompts; one is the beginning of another one."""
    responses = [[5, 6], [5, 6], [5, 6, 6], [6, 5], [5, 6], [5, 6, 6]]
    assert metrics_over_processes(responses, torch.zeros(6), ALONE)["rollout/distinct"] == 3 / 6
    assert metrics_over_processes([[5], [6]], torch.zeros(2), ALONE)["rollout/distinct"] == 1


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALKS = [  # a call that fails, and one that does not; no call; one that hangs
    dialogue(
        assistant(TurnText("so", calls=[CALL, CALL])),
        {"role": "tool", "content": "no"},
        {"role": "tool", "content": "1"},
        "b",
        turns=2,
        calls=2,
        failed_calls=1,
        observation_tokens=3,
    ),
    dialogue("b"),
    dialogue(assistant(TurnText("", calls=[CALL])), calls=1, hung=True),
]


def batch_of_turns(dialogues=TALKS):
    """Tokens 5 are observations. Of the first two what was sampled is the same."""
    rows = [[1, 6, 7, 5, 5, 5, 7, 0], [1, 6, 7, 7, 0, 0, 0, 0], [1, 6, 6, 6, 6, 0, 0, 0]]
    tokens = torch.tensor(rows)
    return Batch(
        tokens=tokens,
        prompt_len=torch.ones(3, dtype=torch.long),
        response_len=torch.tensor([6, 3, 4]),
        finished=torch.tensor([True, True, False]),
        sampler_logprobs=torch.zeros(3, 7),
        prompts=[SimpleNamespace(prompt="p", tools=["add"])] * 3,
        texts=["b", "b", ""],
        is_action=(tokens != 5)[:, 1:] & (torch.arange(7) < torch.tensor([[6], [3], [4]])),
        dialogues=dialogues,
        parts={
            "environment": torch.tensor([2.0, math.nan, 1.0]),
            "score": torch.tensor([2.0, math.nan, 1.0]),
        },
    )


def test_of_several_turns_what_is_counted_and_only_sampled_tokens():
    """The share of failed calls is of the calls of all responses."""
    args = SimpleNamespace(filter_groups=0, num_generations=1, batch_size=3)
    seconds = {"rollout": 1.0}
    found = step_metrics(args, batch_of_turns(), Reward(environment=True), Metrics(), seconds, ALONE)
    assert found["rollout/turns"] == pytest.approx(4 / 3)
    assert found["rollout/calls"] == 1.0
    assert found["rollout/failed_calls"] == pytest.approx(1 / 3)
    assert found["rollout/observation_tokens"] == 1.0
    assert found["rollout/hung"] == pytest.approx(1 / 3)
    assert found["rollout/no_room"] == 0
    assert [row.get("cut_by") for row in answer_rows(batch_of_turns())] == [None, None, "--reward_timeout"]
    full = [*TALKS[:2], TALKS[2]._replace(hung=False, no_room=True)]
    found_full = step_metrics(args, batch_of_turns(full), Reward(), Metrics(), seconds, ALONE)
    assert found_full["rollout/no_room"] == pytest.approx(1 / 3)
    assert answer_rows(batch_of_turns(full))[2]["cut_by"] == "an observation that does not fit"
    long = [*TALKS[:2], TALKS[2]._replace(hung=False)]
    assert answer_rows(batch_of_turns(long))[2]["cut_by"] == "--max_gen_len"
    assert found["rollout/length"] == pytest.approx((3 + 3 + 4) / 3)
    assert found["rollout/repetition"] == pytest.approx((0 + 0 + 1 / 2) / 3)  # 5 5 5 is none
    assert found["rollout/distinct"] == pytest.approx(2 / 3)
    assert found["rollout/score_length_corr"] == pytest.approx(-1)
    assert found["reward/environment"] == 1.5
    silent = [dialogue("b")] * 3
    assert math.isnan(
        step_metrics(args, batch_of_turns(silent), Reward(), Metrics(), seconds, ALONE)[
            "rollout/failed_calls"
        ]
    )
    game = batch_of_turns()
    game.turn_rewards = torch.zeros(3, 7)
    found = step_metrics(args, game, Reward(), Metrics(), seconds, ALONE)
    assert found["rollout/turns"] == pytest.approx(4 / 3)
    assert not {"rollout/calls", "rollout/failed_calls"} & found.keys()
    no_tools = batch_of_turns()
    no_tools.prompts = [SimpleNamespace(prompt="p", tools=[])] * 3
    found = step_metrics(args, no_tools, Reward(), Metrics(), seconds, ALONE)
    assert "rollout/turns" in found and "rollout/calls" not in found
    plain = step_metrics(args, batch_of_turns([]), Reward(), Metrics(), seconds, ALONE)
    assert not [name for name in plain if name.endswith(("turns", "calls", "hung", "tokens"))]


def test_counts_of_turns_are_exact_over_processes():
    """One process has two responses, the other one; the share of failed calls is of all calls."""
    one, other = Metrics(), Metrics()
    batch = batch_of_turns()
    add_turns(one, "eval/{}_greedy", batch.rows([0, 1]))
    add_turns(other, "eval/{}_greedy", batch.rows([2]))
    one.merge(other)
    found = one.means(ALONE)
    assert found["eval/failed_calls_greedy"] == pytest.approx(1 / 3)
    assert found["eval/turns_greedy"] == pytest.approx(4 / 3)


def test_a_kept_response_in_several_turns_has_all_of_them():
    rows = answer_rows(batch_of_turns())
    first = [assistant("so", tool_calls=[CALL, CALL])]
    first += [{"role": "tool", "content": "no"}, {"role": "tool", "content": "1"}, assistant("b")]
    assert [row["messages"] for row in rows] == [first, [assistant("b")], [assistant("", tool_calls=[CALL])]]
    assert [row["response"] for row in rows] == ["b", "b", ""]
    assert [row["length"] for row in rows] == [3, 3, 4]
    assert json.loads(json.dumps(rows)) == rows
    assert "messages" not in answer_rows(batch_of_turns([]))[0]
