"""--missing_eos_penalty where it is not given: it follows the scores, is chosen once, and is kept."""

import json
import re
import shutil

import pytest
from same_runs import built, run_in_two_processes
from tiny import flags, read_jsonl, run_files, same_run

from dataset.lm_dataset import global_batch
from errors import InputError
from trainer import train_ppo
from trainer.generation.sampling import noise_keys
from trainer.rollout import RolloutEngine

# Counts the letter a, and keeps the scores of each call but the trial in a file of this process.
COUNTING = """import json, os
def score(prompts, responses, answers):
    scores = [float(r.split().count("a")) * float(os.environ.get("UNIT", 1)) for r in responses]
    if "The answer is 7." in responses:
        return scores
    with open(f"{os.environ['SCORES']}_{os.environ.get('RANK', '0')}", "a") as file:
        file.write(json.dumps(scores) + "\\n")
    return scores
"""
SIZES = {"batch_size": 32, "mini_batch_size": 8, "max_gen_len": 6, "critic_warmup_steps": 0, "epochs": 9}
SIZES |= {"dtype": "float32", "reasoning": 0, "device": "cpu", "eval_interval": 0, "log_interval": 1000}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "count.py").write_text(COUNTING)
    files = run_files(folder) | {"reward_fn": f"{folder / 'count.py'}:score"}
    return {n: x for n, x in files.items() if n not in ("missing_eos_penalty", "reward_model")}


def argv_of(files, out, **more):
    return flags(**{**files, **SIZES, "out_dir": out, "run_name": "r", **more})


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    """A run of three steps in one process -> its out folder, with the scores of each call."""
    out = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCORES", str(out / "scores"))
        train_ppo.main(argv_of(files, out, max_steps=3, save_interval=1))
    return out


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """The scores of each call in this test, of process 0."""
    monkeypatch.setenv("SCORES", str(tmp_path / "scores"))
    return tmp_path / "scores_0"


def spread(scores):
    mean = sum(scores) / len(scores)
    return (sum((x - mean) ** 2 for x in scores) / len(scores)) ** 0.5


def penalty_of(out):
    return json.loads((out / "r/config.json").read_text())["missing_eos_penalty"]


def test_it_is_the_standard_deviation_of_the_first_scores(files, one):
    """The answers to the first batch's prompts, with the noise of step -2."""
    probe, *trained = read_jsonl(one / "scores_0")
    assert (len(probe), len(trained)) == (32, 3)
    run = built(files, **SIZES)
    prompts = [run.data[place] for place in global_batch(len(run.data), run.args.seed, 0, 32)]
    with run.engine.weights_of(run.models.old_actor):
        texts = run.engine.respond(prompts, noise_keys(run.args.seed, -2, range(32)), 1.0).texts
    assert probe == [text.split().count("a") for text in texts]
    assert 0.3 < spread(probe) < 3
    assert penalty_of(one) == float(f"{spread(probe):.2g}")
    for record in read_jsonl(one / "r/metrics.jsonl")[1:]:
        assert 0.05 < record["rollout/finished"] < 0.95
        lost = penalty_of(one) * (1 - record["rollout/finished"])
        assert record["reward/missing_eos"] == pytest.approx(-lost, rel=1e-6)


@pytest.mark.parametrize(
    ("unit", "given", "chosen", "size"),
    [("100", "", None, 32), ("0", "", 0.5, 72), ("1", 0, 0, 32)],
)
def test_it_follows_the_scale(unit, given, chosen, size, files, one, tmp_path, scores, monkeypatch, capsys):
    """A half where all are alike, and what is given where it is; at most 64 answers are looked at."""
    monkeypatch.setenv("UNIT", unit)
    flag = {} if given == "" else {"missing_eos_penalty": given}
    train_ppo.main(argv_of(files, tmp_path, max_steps=1, batch_size=size, **flag))
    if chosen is None:
        chosen = float(f"{100 * spread(read_jsonl(one / 'scores_0')[0]):.2g}")  # the same answers
    assert penalty_of(tmp_path) == chosen
    assert [len(line) for line in read_jsonl(scores)] == [min(size, 64)] * (given == "") + [size]
    out = capsys.readouterr().out
    assert (f"penalty  {chosen:g} for a response that does not end" in out) == (given == "")
    if given == "":
        (line,) = (line for line in out.splitlines() if line.startswith("penalty "))
        why = ": all 64 scored 0, without a spread to follow, so half of a reward of 1; "
        assert (why in line) == (unit == "0")
        assert ("have the standard deviation" in line) == (unit != "0")
        assert re.search(rf"; [1-9]\d* of {min(size, 64)} ended$", line)


def test_it_says_where_none_of_the_first_responses_ends(files, tmp_path, scores, monkeypatch, capsys):
    respond = RolloutEngine.respond

    def cut(*given):
        batch = respond(*given)
        batch.finished[:] = False
        return batch

    monkeypatch.setattr(RolloutEngine, "respond", cut)
    train_ppo.main(argv_of(files, tmp_path, max_steps=1))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("penalty "))
    assert line.endswith("; none of 32 ended")


def test_normalised_scores_are_of_one_scale_and_their_statistics_begin_with_the_first_batch(tmp_path):
    """The model's normalised score has a standard deviation of 1, and here a weight of 2."""
    files = run_files(tmp_path)
    del files["missing_eos_penalty"], files["reward_fn"]
    files["reward_model"] += "=2"
    train_ppo.main(argv_of(files, tmp_path, normalize_reward=1, max_steps=1))
    assert penalty_of(tmp_path) == 2.0
    state = json.loads((tmp_path / "r/checkpoints/step_1/state.json").read_text())["raw_scores"]
    assert (state["model"]["count"], state["missing_eos_penalty"]) == (32, 2.0)


def test_two_processes_choose_the_same_as_one(files, one, tmp_path, scores):
    half = {"batch_size": 16, "mini_batch_size": 4, "max_steps": 1}
    run_in_two_processes(argv_of(files, tmp_path, **half))
    assert penalty_of(tmp_path) == penalty_of(one)
    assert len(read_jsonl(scores)[0]) == 16


def test_a_resumed_run_keeps_it_and_chooses_no_other(files, one, tmp_path, scores):
    out = shutil.copytree(one, tmp_path / "out")
    resumed = argv_of(files, out, max_steps=3, save_interval=1, resume=out / "r/checkpoints/step_2")
    with pytest.raises(InputError, match=r"--missing_eos_penalty was 0\.\d+ and is now 9\.0; set it back"):
        train_ppo.main([*resumed, "--missing_eos_penalty", "9"])
    train_ppo.main(resumed)
    assert len(read_jsonl(scores)) == 1  # step 3
    same_run(one / "r", out / "r", 3)
    assert penalty_of(out) == penalty_of(one)
