"""Whole runs of offline PPO: what they say, with adapters and in half precision. See test_loss_options.py."""

import pytest
from same_runs import sizes
from test_loss_options import pair
from tiny import read_jsonl, run_files, train, write_jsonl

PICTURES = True  # see pictures.py

HALF = [pytest.param({"dtype": dtype}, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16")]


@pytest.mark.parametrize("options", [{"lora_r": 4, "gradient_checkpointing": 1}, *HALF])
def test_it_works_with(options, tmp_path, capsys):
    files = {"model": run_files(tmp_path)["model"]}
    files["offline_data_path"] = write_jsonl(tmp_path / "pairs.jsonl", map(pair, range(50)))
    files["eval_data_path"] = write_jsonl(tmp_path / "held_out.jsonl", map(pair, range(7)))
    train(**files, **sizes(16), max_gen_len=8, max_steps=3, **options, out_dir=tmp_path, run_name="r")
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
