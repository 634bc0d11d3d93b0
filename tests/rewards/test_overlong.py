"""The penalty of the last tokens before --max_gen_len (DAPO's soft overlong punishment)."""

import pytest
from tiny import flags, read_jsonl, request_of, run_files, train

from errors import InputError
from trainer import train_ppo
from trainer.rewards.combine import Reward
from trainer.rewards.rules import overlong_penalty


def test_the_penalty_by_hand():
    """DAPO's own numbers: at most 20,480 tokens, the last 4,096 of them cost."""
    wanted = {1: 0.0, 16_384: 0.0, 16_385: 1 / 4096, 18_432: 0.5, 20_479: 4095 / 4096, 20_480: 1.0}
    for length, penalty in wanted.items():
        assert overlong_penalty(length, 20_480, 4096, 1.0) == pytest.approx(penalty)
    assert [overlong_penalty(n, 4, 2, 0.5) for n in (1, 2, 3, 4)] == [0.0, 0.0, 0.25, 0.5]
    assert overlong_penalty(1, 4, 4, 1.0) == 0.25  # every token costs


def test_it_is_added_to_the_penalty_of_a_missing_eos():
    reward = Reward(
        function=lambda *_: [1.0, 1.0, 1.0],
        reasoning=False,
        missing_eos_penalty=2.0,
        length_reward=0.25,
        max_gen_len=8,
        overlong_buffer=4,
        overlong_penalty=0.5,
    )
    parts = reward(request_of(["p"] * 3, ["r"] * 3, finished=[True, True, False], lengths=[3, 7, 8]))
    assert parts["overlong"].tolist() == [0.0, -0.375, -0.5]
    assert parts["score"].tolist() == [0.75, 0.375, -1.75]
    assert reward.names == ["function", "length_reward", "missing_eos", "overlong", "score"]


def test_a_run_takes_it_off_the_score_of_long_responses(tmp_path, capsys):
    sizes = {"batch_size": 8, "mini_batch_size": 8, "max_gen_len": 6, "max_steps": 1}
    sizes |= {"critic_warmup_steps": 0, "critic_init": "actor"}
    files = run_files(tmp_path, count=8)
    train(**files, **sizes, overlong_buffer=5, overlong_penalty=0.8, out_dir=tmp_path, run_name="r")
    rows = read_jsonl(tmp_path / "r" / "samples.jsonl")
    for row in rows:
        assert row["parts"]["overlong"] == pytest.approx(-0.16 * (row["length"] - 1), abs=1e-4)
    assert {row["length"] for row in rows} & {2, 3, 4, 5}
    line = read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]
    parts = ("function", "model", "missing_eos", "overlong")
    assert line["reward/score"] == pytest.approx(sum(line[f"reward/{name}"] for name in parts), abs=1e-5)
    assert "overlong       --overlong_buffer 5\n" in capsys.readouterr().out


def test_a_buffer_longer_than_the_response_is_refused():
    with pytest.raises(InputError, match="--overlong_buffer 65: must be at most --max_gen_len 64"):
        train_ppo.parse_args(flags(overlong_buffer=65))


def test_a_penalty_without_a_buffer_is_refused():
    with pytest.raises(InputError, match=r"--overlong_penalty 2.0: is of use only with --overlong_buffer"):
        train_ppo.parse_args(flags(overlong_penalty=2))


@pytest.mark.parametrize("values", [{}, {"overlong_buffer": 8, "overlong_penalty": 0}])
def test_it_is_off_without_a_buffer_or_a_penalty(values):
    args = train_ppo.parse_args(flags(**values))
    assert not (args.overlong_buffer and args.overlong_penalty)
