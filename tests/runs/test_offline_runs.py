"""Whole runs of offline PPO: several processes, resuming, adapters, half precision."""

import pytest
from same_runs import (
    CRITIC,
    EXACT,
    resumed_is_the_same,
    run_in_two_processes,
    same_metrics,
    same_weights,
    sizes,
)
from tiny import flags, read_jsonl, train, write_jsonl
from tiny import run_files as policy_files

from errors import InputError
from trainer import train_ppo

PICTURES = True  # see pictures.py

RUN = EXACT | CRITIC | {"max_gen_len": 8, "max_steps": 4, "ppo_epochs": 2, "seed": 1}
RUN |= {"accumulation_steps": 2, "eval_interval": 2, "lr_schedule": "constant"}
ONE, TWO = sizes(16), sizes(8)


def pair(n):
    words = {"chosen": "a " * (1 + n % 5), "rejected": "b " * (1 + n % 3)}
    return {"prompt": f"c {'d' if n % 2 else 'e'}", **words}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {
        "model": policy_files(folder)["model"],
        "offline_data_path": write_jsonl(folder / "pairs.jsonl", map(pair, range(50))),
        "eval_data_path": write_jsonl(folder / "held_out.jsonl", map(pair, range(7))),
        "ptx_data_path": write_jsonl(folder / "texts.jsonl", [{"text": "a b c"}, {"text": "d d"}]),
    }


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    train_ppo.main(flags(**files, **RUN, **ONE, out_dir=out))
    return out / "r"


@pytest.mark.slow
def test_two_processes_equal_one(files, one, tmp_path):
    run_in_two_processes(flags(**files, **RUN, **TWO, out_dir=tmp_path))
    same_weights(one, tmp_path / "r", 4, ("actor", "critic"))
    same_metrics(one, tmp_path / "r", rel=1e-3, abs=1e-4)
    last = read_jsonl(one / "metrics.jsonl")[-1]
    assert last["eval/chosen_preferred"] > 0.5 and "policy/ptx_loss" in last


def test_a_resumed_run_equals_one_that_never_stopped(files, one, tmp_path):
    argv = flags(**files, **RUN, **ONE, out_dir=tmp_path)
    resumed_is_the_same(one, argv, tmp_path, last=4)
    with pytest.raises(InputError, match=r"offline_data_path .* does not hold what the run began with"):
        other = write_jsonl(tmp_path / "other.jsonl", map(pair, range(1, 51)))
        train_ppo.main([*argv, "--resume", "auto", "--offline_data_path", other])


HALF = [pytest.param({"dtype": dtype}, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16")]


@pytest.mark.parametrize("options", [{"lora_r": 4, "gradient_checkpointing": 1}, *HALF])
def test_it_works_with(options, files, tmp_path, capsys):
    train(**files, **ONE, max_gen_len=8, max_steps=3, **options, out_dir=tmp_path, run_name="r")
    lines = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert lines[-1]["eval/chosen_preferred"] > lines[0]["eval/chosen_preferred"]
    text = (tmp_path / "r" / "summary.md").read_text()
    assert "The chosen_preferred" in text and "on 7 held-out pairs" in text
    assert "can be chance" in text or "rose" in text
    assert "score" not in text.split("Health")[0]
    said = capsys.readouterr().out
    assert "the scores of" in said and "answers  100, 7 prompts held out" in said  # 50 pairs
    assert "3 steps of 16 logged answers, 1 x cpu" in said
    assert (tmp_path / "r" / "report.html").is_file()
