"""Stop strings, a least length, the penalty of length and step rewards together, in runs that are resumed and
in two processes."""

import json

import pytest
import same_runs
from tiny import flags, read_jsonl, run_files, train

from trainer import train_ppo

STEPS = """
def score(prompts, responses, answers):
    places = [[i for i, c in enumerate(r) if c in "be"] for r in responses]
    return [[(i, 0.5) for i in mine] if len(r) % 4 else 0.1 * len(r) for r, mine in zip(responses, places)]
"""
RUN = (
    same_runs.EXACT
    | same_runs.CRITIC
    | {"max_steps": 4, "eval_interval": 4, "critic_init": "actor", "max_gen_len": 8}
)
RUN |= {"min_gen_len": 3, "overlong_buffer": 3, "overlong_penalty": 0.5}
RUN |= {"replay_batches": 1, "update_old_actor_freq": 2}
ENDS = ["--stop", "b ", "d", "--stop_token_ids", "9"]
SAME = {"reward/score", "reward/function", "reward/overlong", "rollout/length", "rollout/finished", "kl/k1"}
SAME |= {"policy/entropy", "policy/first_ratio", "eval/score", "eval/length", "value/return"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = run_files(folder, count=64)
    (folder / "steps.py").write_text(STEPS)
    return found | {"reward_fn": f"{folder / 'steps.py'}:score", "eval_data_path": found["data_path"]}


def argv_of(files, out, responses=16):
    return [*flags(**files, **RUN, **same_runs.sizes(responses), out_dir=out), *ENDS]


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    train_ppo.main(argv_of(files, out))
    return out / "r"


def test_every_ending_occurs(whole):
    rows = [row for name in ("samples", "eval_samples") for row in read_jsonl(whole / f"{name}.jsonl")]
    assert all(3 <= row["length"] <= 8 for row in rows)
    assert {row["finished"] for row in rows} == {True, False}
    assert {row["parts"]["overlong"] < 0 for row in rows} == {True, False}
    words = [(row["response"].split(), row["length"]) for row in rows if row["finished"]]
    assert {length - len(found) for found, length in words} >= {1, 2}  # an EOS or "d", and "b "
    assert all({"d", "h"}.isdisjoint(found[2:]) for found, _ in words)  # a reward sees no end
    assert all(row["parts"]["missing_eos"] == 0 for row in rows if row["finished"])
    assert read_jsonl(whole / "metrics.jsonl")[1]["rollout/sampler_gap"] < 1e-5


def test_resuming_equals_never_having_stopped_bit_for_bit(whole, files, tmp_path):
    same_runs.resumed_is_the_same(whole, argv_of(files, tmp_path), tmp_path, last=4)


def test_two_processes_equal_one(whole, files, tmp_path):
    same_runs.run_in_two_processes(argv_of(files, tmp_path, responses=8))
    same_runs.same_weights(whole, tmp_path / "r", 4, ("actor", "critic"), most=2e-5)
    same_runs.same_metrics(whole, tmp_path / "r", SAME, rel=1e-4, abs=1e-5)


def test_the_result_knows_what_ends_its_answers(whole, files, tmp_path):
    """generation_config.json has the endings of this run, and none of an earlier one."""
    ends = json.loads((whole.parent / "ppo_actor_32" / "generation_config.json").read_text())
    assert (ends["stop_strings"], ends["eos_token_id"]) == (["b ", "d"], [0, 9])
    again = {**files, "model": whole.parent / "ppo_actor_32.pth", "max_gen_len": 4, "max_steps": 1}
    train(**again, batch_size=4, critic_init="actor", out_dir=tmp_path)
    ends = json.loads((tmp_path / "ppo_actor_32" / "generation_config.json").read_text())
    assert "stop_strings" not in ends and ends["eos_token_id"] == [0, 9]
