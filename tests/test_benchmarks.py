"""The benchmarks still run: with tiny models, and with parts that fail or take too long."""

import importlib.util
import io
import json
import sys
from types import SimpleNamespace

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


def test_other_peers_of_generation(benchmark):
    """transformers' continuous batching, and the engine without its parts. One that fails is a line."""
    generation = benchmark("generation")
    prompts = generation.make_prompts(3, 4, 4)
    found = generation.measure_peers("fixed", TINY, prompts, 5, None, "cpu", torch.float32)
    rates = {name: rate for name, rate in found.items() if name.endswith(", tokens/s")}
    assert len(rates) == 4 and all(rate > 0 for rate in rates.values())
    assert generation.attempted("a peer", lambda: 1 / 0) == "ZeroDivisionError: division by zero"
    spread = {"median": 2.0, "least": 1.0, "most": 3.0}
    ours = {"case": "fixed", "model": "a", "engine tokens/s": spread, "ratio": spread}
    (row,) = generation.rows([ours, found | {"model": "a"}])
    assert row == {
        "case": "fixed",
        "model": "a",
        "engine tokens/s": "2",
        "ratio": "2.0 (1.0 to 3.0)",
        **rates,
    }


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


def test_an_update_and_all_checks_of_the_smoke_test(benchmark, monkeypatch):
    update, smoke = benchmark("update"), benchmark("smoke")
    for module in (update, smoke):
        monkeypatch.setattr(module, "matrix_rate", lambda dtype, device: 1e12)
    monkeypatch.setattr(smoke, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(smoke, "SMALL", TINY)
    monkeypatch.setattr(update, "REPETITIONS", 1)
    assert update.measure(TINY, "float32", "cpu", 4, 6)["ours"]["median"] > 0
    sizes = {"size": TINY, "rows": 4, "new_tokens": 6, "response": 6}
    monkeypatch.setattr(smoke, "LARGE", sizes)

    def fails(device):
        raise ValueError("no luck")

    *found, failed = [smoke.checked(check, "cpu") for check in [*smoke.CHECKS, fails]]
    assert not [line for line in found if "error" in line]
    assert found[-2]["tokens/s"] > 0
    assert float(found[-2]["sampler gap"]) < {"float32": 1e-5, "bfloat16": 1e-2}[found[0]["dtype"]]
    assert failed == {"check": "fails", "seconds": 0.0, "error": "ValueError: no luck"}


PARTS = {
    "good": "print('said'); write_results('good', {'results': [1, 2]})",
    "bad": "raise SystemExit(3)",
    # It writes what it has, then hangs; interrupted, it ends, or it does not.
    "slow": "write_results('slow', {'results': [1]}); print('begun', flush=True); time.sleep(60)",
    "deaf": "signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


def test_the_parts_for_a_gpu_end_in_time_and_keep_what_they_had(benchmark, monkeypatch, tmp_path, capsys):
    gpu, log = benchmark("gpu"), io.StringIO()
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setenv("ALL_RESULTS", "")
    start = f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); "
    start += "from common import write_results; "
    monkeypatch.setattr(gpu, "command", lambda part: [sys.executable, "-c", start + PARTS[part]])
    monkeypatch.setattr(gpu, "PATIENCE", 2)
    quick = [gpu.run_part(part, 60, log) for part in ("good", "bad", "killed")]
    assert quick == ["ok", "failed", "failed"]

    follow = gpu.follow

    def until_it_hangs(process, seconds, log):
        """Its time is up once it has said something."""
        said = len(log.getvalue())
        while len(log.getvalue()) == said and not follow(process, 0.1, log):
            pass
        return process.poll() is not None

    for part in ("slow", "deaf"):
        turns = iter([until_it_hangs])
        monkeypatch.setattr(gpu, "follow", lambda *given, turns=turns: next(turns, follow)(*given))
        assert gpu.run_part(part, 60, log) == "out of time"
    assert {"said", "begun", "deaf"} <= {*log.getvalue().split()}
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["good"]["results"] == [1, 2]
    assert results["slow"]["results"] == [1]
    monkeypatch.setattr(gpu, "installed", lambda name: False)
    assert gpu.run_part("tests", 60, log) == "needs pytest"


def test_a_case_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    main = benchmarks_main(monkeypatch)
    cases = [lambda: {"x": 1}, lambda: 1 / 0, lambda: [{"x": 2}]]
    module = SimpleNamespace(cases=lambda device: cases, rows=lambda results: results)
    monkeypatch.setitem(sys.modules, "generation", module)
    written = []
    monkeypatch.setattr(main, "write_results", lambda name, found: written.append(len(found["results"])))
    with pytest.raises(SystemExit, match="not all could be measured: generation"):
        main.main(["--device", "cpu", "generation"])
    assert written == [1, 2, 3]
    cases[:] = [lambda: {"error": "no luck"}]
    monkeypatch.setitem(sys.modules, "smoke", module)
    assert not main.run("smoke", "cpu")  # a check that failed is a line, and the part has failed
    assert "| x |\n|---|\n| 1 |\n| 2 |" in capsys.readouterr().out


def benchmarks_main(monkeypatch):
    """benchmarks/__main__.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmarks_main", ROOT / "benchmarks" / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    return main


def test_parts_for_which_no_time_is_left_are_named(benchmark, monkeypatch, tmp_path, capsys):
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setenv("ALL_RESULTS", "")
    monkeypatch.setattr(gpu, "write_results", lambda *args: None)
    monkeypatch.setattr(gpu, "command", lambda part: [sys.executable, "-c", ""])
    monkeypatch.setattr(gpu, "LEAST", 1000)
    with pytest.raises(SystemExit):
        gpu.main(["update", "phases", "--minutes", "1"])
    assert "python benchmarks gpu update phases" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "LEAST", 0)
    says = "print('noise'); print('## update, cuda'); print(); print('| ratio |')"
    monkeypatch.setattr(gpu, "command", lambda part: [sys.executable, "-c", says])
    gpu.main(["update"])
    assert f"to send: {tmp_path / 'gpu.md'}" in capsys.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# {'cpu'") and "| update |" in page
    assert page.endswith("\n## update, cuda\n\n| ratio |\n") and "noise" not in page


def test_what_cannot_be_measured_is_said_in_one_line(monkeypatch, capsys):
    """No GPU, and names that there are not; --help measures nothing."""
    main = benchmarks_main(monkeypatch)
    main.main(["--help"])
    assert "python benchmarks gpu" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: nonsense: choose from generation, .*; or gpu$"):
        main.main(["nonsense"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="error: gpu: torch sees no GPU here"):
            main.main(["gpu"])
