"""The benchmarks still run: with tiny models, and with parts that fail or take too long."""

import importlib.util
import io
import sys

import pytest
import torch
from tiny import ROOT

TINY = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 64}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_whole_steps_are_measured_where_trl_is_not_installed(benchmark, monkeypatch):
    end_to_end = benchmark("end_to_end")
    monkeypatch.setattr(end_to_end, "installed", lambda name: False)
    monkeypatch.setattr(end_to_end, "EPOCHS", [1, 1, 4])
    results = end_to_end.measure(TINY, 4, 6, False, "cpu")
    assert [r["PPO epochs"] for r in results] == [1, 4]
    assert all(r["mean length"] == 6 and r["ours samples/s"]["median"] > 0 for r in results)
    assert {row["ratio"] for row in end_to_end.rows(results)} == {"not installed"}


def test_generation_beside_generate(benchmark, monkeypatch):
    generation = benchmark("generation")
    monkeypatch.setattr(generation, "REPETITIONS", 1)
    monkeypatch.setattr(generation, "copy_rate", lambda device: 1e9)
    prompts = generation.make_prompts(3, 4, 4)
    found = generation.measure("fixed", TINY, prompts, 5, None, [3], 2, "cpu", ["float32"])
    assert found["ratio"]["median"] == pytest.approx(
        found["engine tokens/s"]["median"] / found["generate tokens/s"]["median"], rel=0.02
    )
    assert found["of copy rate"] > 0


def test_what_decoding_reads_by_hand(benchmark):
    generation, common = benchmark("generation"), benchmark("common")
    model = common.policy(TINY, vocabulary=50)
    layer = 128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 64  # query and output, key and value, gate, up and down
    weights = 2 * (layer + 128 * 50)  # bytes, one layer and the head
    cache = 2 * 2 * 64  # bytes of a token: keys and values of 64 numbers
    # Two rounds of two slots, three steps each; a step of a sequence reads its prompt and the tokens so far.
    read = (4 + 5 + 6) + (7 + 8 + 9) + (4 + 5 + 6)
    wanted = 6 * weights + read * cache
    assert generation.needed_bytes(model, [[2] * 4, [2] * 7, [2] * 4], 3, 2, 2) == wanted


def test_a_model_ends_its_responses_at_the_rate_that_was_asked_for(benchmark):
    common = benchmark("common")
    model = common.policy("128x4", mean_length=20)
    with torch.no_grad():
        odds = model(torch.randint(2, 6400, (4, 32))).logits.softmax(-1)[..., common.EOS].mean()
    assert odds.item() == pytest.approx(1 / 20, rel=0.3)


def test_the_parts_for_a_gpu_end_in_time_and_say_how(benchmark, monkeypatch):
    gpu, log = benchmark("gpu"), io.StringIO()
    codes = {
        "good": "print('said')",
        "bad": "raise SystemExit(3)",
        "slow": "import time; print('begun', flush=True); time.sleep(60)",
    }
    monkeypatch.setattr(gpu, "command", lambda part: [sys.executable, "-c", codes[part]])
    assert [gpu.run_part(part, 5, log) for part in ("good", "bad")] == ["ok", "failed"]
    assert gpu.run_part("slow", 1, log) == "out of time"
    assert log.getvalue().split() == ["said", "begun"]


def test_parts_for_which_no_time_is_left_are_named(benchmark, monkeypatch, tmp_path, capsys):
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "write_results", lambda *args: None)
    monkeypatch.setattr(gpu, "command", lambda part: [sys.executable, "-c", ""])
    monkeypatch.setattr(gpu, "LEAST", 1000)
    with pytest.raises(SystemExit):
        gpu.main(["update", "phases", "--minutes", "1"])
    assert "python benchmarks gpu update phases" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "LEAST", 0)
    gpu.main(["update"])
    assert "| update |" in capsys.readouterr().out


def test_what_cannot_be_measured_is_said_in_one_line(benchmark, capsys):
    """No GPU, and names that there are not; --help measures nothing."""
    spec = importlib.util.spec_from_file_location("benchmarks_main", ROOT / "benchmarks" / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    main.main(["--help"])
    assert "python benchmarks gpu" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: nonsense: choose from generation, .*; or gpu$"):
        main.main(["nonsense"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="error: gpu: torch sees no GPU here"):
            main.main(["gpu"])
