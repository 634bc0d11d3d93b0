"""The benchmarks run with tiny models, and with parts that fail or take too long; pages have their tables."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny import PYTHON, ROOT, WORDS, save_policy_dir, word_tokenizer

from dataset.formats import Keys
from dataset.lm_dataset import RLAIFDataset
from model.loading import load_tokenizer
from trainer.compute.cpu import kernels as cpu
from trainer.compute.kernels import kernels_of
from trainer.generation.engine import Engine
from trainer.rewards.combine import Reward

TINY = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 64}


def test_whole_steps_are_measured_where_trl_is_not_installed(benchmark, monkeypatch):
    end_to_end = benchmark("end_to_end")
    monkeypatch.setattr(end_to_end, "installed", lambda name: False)
    monkeypatch.setattr(end_to_end, "EPOCHS", [1, 1, 4])
    results = end_to_end.measure(TINY, 4, 6, False, "cpu")
    assert [r["PPO epochs"] for r in results] == [1, 4]
    assert all(r["mean length"] == 6 and r["ours samples/s"]["median"] > 0 for r in results)
    assert {row["ratio"] for row in end_to_end.rows(results)} == {"not installed"}


@pytest.mark.slow
def test_trainers_take_turns(benchmark, monkeypatch, tmp_path):
    """Both are this trainer here. A worker that cannot start is an error with what it said."""
    peers, end_to_end = benchmark("peers"), benchmark("end_to_end")
    monkeypatch.setattr(peers, "matrix_rate", lambda dtype: 1e12)
    end_to_end.write_inputs(tmp_path, TINY, None, 60)
    request, trl = peers.requests_of("RLOO", "float32", str(tmp_path), longest=5)
    assert (trl["method"], trl["longest"], trl["kl"], trl["batch"], trl["answers"]) == (
        "RLOO",
        5,
        0.02,
        128,
        8,
    )
    workers = [peers.Worker(sys.executable, "ours", request) for _ in range(2)]
    with workers[0] as mine, workers[1] as theirs:
        steps = peers.take_turns(mine, theirs, torch.float32, 1)
    case = {"peer": "itself", "model": "tiny", "lengths": "fixed", "dtype": "float32"}
    found = peers.result(case, 128, steps, shares=True)
    ((taken, other, _),) = steps
    assert found["mean length"] == 5
    assert found["ours samples/s"]["median"] == round(128 / taken["seconds"], 2)
    assert found["ratio"]["median"] == round(other["seconds"] / taken["seconds"], 2)
    assert found["peer, of machine"]["median"] == round(other["operations"] / other["seconds"] / 1e12, 2)
    assert 0 < sum(taken["phases"].values()) < taken["seconds"]  # what is shown of them is rounded
    assert found["ours seconds"] == {phase: round(taken["phases"][phase], 2) for phase in peers.PHASES}
    assert 0.1 < found["ours GiB"] < 8
    assert peers.row(found)["GiB, ours / peer"] == f"{found['ours GiB']} / {found['peer GiB']}"
    with (
        peers.Worker(sys.executable, "nobody", {}) as bad,
        pytest.raises(RuntimeError, match=r"(?s)nobody has ended:.*KeyError: 'nobody'"),
    ):
        bad.step()


@pytest.mark.slow
@pytest.mark.parametrize("method, shape", [("GRPO", "2x2"), ("PPO", "4x1")])
def test_a_real_model_is_measured(benchmark, monkeypatch, method, shape):
    """The demo's policy. Both are this trainer again."""
    peers = benchmark("peers")
    asked = {}
    worker_step = peers.Worker.step

    class Both(peers.Worker):
        def __init__(self, python, name, request):
            asked[name] = request
            super().__init__(sys.executable, "ours", asked["ours"])

        def step(self):
            return super().step() | {"version": "1.16.0"}

    monkeypatch.setattr(peers, "Worker", Both)
    monkeypatch.setattr(peers, "matrix_rate", lambda dtype: 1e12)
    monkeypatch.setattr(peers, "write_sums", partial(peers.write_sums, count=8))
    monkeypatch.setitem(peers.LONGEST, "real", 8)
    model = str(ROOT / "model/demo/policy")
    found = peers.measure_real("new", "old", model, 1, {"commit": "c"}, method, "60", shape, "float32")
    assert (found["prompt"], found["answers"], found["model"], found["commit"]) == (60, shape, "policy", "c")
    assert found["peer"] == f"{method}, TRL 1.16.0"
    assert 1 <= found["mean length"] <= 8
    trl = asked["TRL's PPO" if method == "PPO" else "TRL"]
    assert (trl["batch"], trl["answers"], trl["model"]) == (4, int(shape[2]), model)
    assert ("critic_learning_rate" in asked["ours"]) == (method != "PPO")  # None: there is no critic
    monkeypatch.setattr(Both, "step", lambda worker: worker_step(worker) | {"version": "", "prompt": 59})
    with pytest.raises(RuntimeError, match=r"prompts of 60 tokens were read as \[59\]"):
        peers.measure_real("new", "old", model, 1, {}, method, "60", shape, "float32")


def test_generation_beside_generate_and_other_peers(benchmark, monkeypatch):
    """transformers' continuous batching, and the engine without its parts. One that fails is a line."""
    generation, continuous = benchmark("generation"), benchmark("continuous")
    for module in (generation, continuous):
        monkeypatch.setattr(module, "REPETITIONS", 1)
    monkeypatch.setattr(generation, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(continuous, "in_a_process", lambda work, *given: work(*given))
    given = "fixed", TINY, generation.make_prompts(3, 4, 4), 5, None
    beside = {
        "generate": generation.measure(*given, [3], 2, "cpu", ["float32"]),
        "continuous batching": continuous.measure(*given, "cpu"),
    }
    for (name, found), rounded in zip(beside.items(), (0.02, 0.05), strict=True):
        ours, theirs = (found[f"{which} tokens/s"]["median"] for which in ("engine", name))
        assert found["ratio"]["median"] == pytest.approx(ours / theirs, rel=rounded)
    assert beside["generate"]["of copy rate"] > 0
    assert next(continuous.rows([found]))["engine tokens/s"] == f"{ours:.0f}"
    assert [len(case.args[2]) for case in continuous.cases("cpu")] == [64, 64, 256, 256]
    found = generation.measure_peers(*given, "cpu", torch.float32)
    rates = {name: rate for name, rate in found.items() if name.endswith(", tokens/s")}
    assert len(rates) == 4 and all(rate > 0 for rate in rates.values())
    fused = {}
    for parts in ((), ("kernels",)):
        with generation.without(*parts):
            sampler = generation.make_sampler(benchmark("common").policy(TINY), torch.float32, 2, given[2], 5)
            generation.engine(sampler, given[2], 5)
            assert sampler.engine.slots == 2  # of three sequences
            fused[parts] = sampler.engine.cache.fused, kernels_of("cpu")
    assert fused == {(): (True, cpu), ("kernels",): (False, None)}
    assert generation.attempted("a peer", lambda: 1 / 0) == "ZeroDivisionError: division by zero"
    spread = {"median": 2.0, "least": 1.0, "most": 3.0}
    ours = {"case": "fixed", "model": "a", "engine tokens/s": spread, "ratio": spread}
    shown = {"case": "fixed", "model": "a", "engine tokens/s": "2", "ratio": "2.0 (1.0 to 3.0)"}
    assert [*generation.rows([ours, rates])] == [shown, rates]
    calls = []
    monkeypatch.setattr(generation, "generate", lambda *given: calls.append(given) or 15)
    for longest, count in ((0, 1), (60, 2)):  # on a GPU a slow peer is measured once
        monkeypatch.setattr(generation, "LONG", longest)
        found = generation.measure(*given, [3], 2, torch.device("cpu"), ["float32"])  # which is not "cpu"
        assert len(calls) == count and found["generate tokens/s"]["median"] > 0
        calls.clear()
    assert [case.args[1] for case in generation.peer_cases("cpu")] == [
        case[1] for case in generation.workloads_of_gpu()
    ]


def test_a_real_model_beside_generate(benchmark, tmp_path):
    """What has to be computed: a prompt once for its answers, and no answer's last token."""
    generation = benchmark("generation")
    model = benchmark("common").policy(TINY)
    model.save_pretrained(tmp_path)
    found = generation.measure_model(tmp_path, 2, "float32", repetitions=1)
    rates = [found[f"{who} tokens/s"]["median"] for who in ("engine", "generate")]
    assert found["ratio"]["median"] == pytest.approx(rates[0] / rates[1], rel=0.05)
    assert 0 < found["engine, of machine"]["median"] < 1
    counted = generation.needed_operations(model, [[2] * 3, [2] * 3, [4] * 2], [2, 1, 3])
    width, head = model.config.hidden_size, model.config.hidden_size * model.config.vocab_size
    tokens = 3 + 1 + 2 + 2
    pairs = (1 + 2 + 3) + 4 + (1 + 2) + (3 + 4)
    weights = generation.weights_per_token(model)
    layers = model.config.num_hidden_layers
    assert counted == 2 * (weights * tokens + head * 6) + 4 * layers * width * pairs


def test_prompts_computed_once_beside_whole_sequences(benchmark, monkeypatch, tmp_path):
    module = benchmark("shared_prompts")
    monkeypatch.setattr(module, "ANSWER", 3)
    path = save_policy_dir(tmp_path, word_tokenizer(WORDS))
    case = {"prompt tokens": 5, "prompts x answers": "2 x 2"}
    case |= {name: module.measure(path, 2, 2, 5, name == "shared") for name in ("shared", "plain")}
    (row,) = module.rows([case])
    assert row["tokens"] == "22 / 32 = 1 / 1.45"
    assert set(row) == {*case, "tokens", "score s", "score GiB", "update s", "update GiB"} - {
        "shared",
        "plain",
    }


def test_later_turns_from_the_cache_and_anew(benchmark, monkeypatch, tmp_path):
    module = benchmark("later_turns")
    for name, value in {"PROMPT": 40, "TURN": 4, "OBSERVATION": 2, "LONGEST": 18}.items():
        monkeypatch.setattr(module, name, value)
    path = save_policy_dir(tmp_path, word_tokenizer(WORDS))
    computed = []
    plain = Engine._prefill
    monkeypatch.setattr(Engine, "_prefill", lambda *given: (computed.append(given[1]), plain(*given)))
    counts = []
    for keeps in (True, False):
        computed.clear()
        assert len(module.measure(path, keeps)) == 3
        counts.append(sum(len(prompt) for prompts in computed for prompt in prompts))
    assert counts == [4 * 40, 4 * 40 + 16 * (46 + 52)]


def test_what_decoding_and_a_step_without_a_critic_need_by_hand(benchmark):
    generation, peers = benchmark("generation"), benchmark("peers")
    model = benchmark("common").policy(TINY, vocabulary=50)
    layer = 128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 64  # query and output, key and value, gate, up and down
    weights = 2 * (layer + 128 * 50)  # bytes, one layer and the head
    cache = 2 * 2 * 64  # bytes of a token: keys and values of 64 numbers
    # Two rounds of two slots, three steps each; a step of a sequence reads its prompt and the tokens so far.
    read = (4 + 5 + 6) + (7 + 8 + 9) + (4 + 5 + 6)
    wanted = 6 * weights + read * cache
    assert generation.needed_bytes(model, [[2] * 4, [2] * 7, [2] * 4], 3, 2, 2) == wanted
    pair = 4 * 128  # of attention, a token and one that it sees
    prompt = 2 * layer * 4 + pair * (1 + 2 + 3 + 4)
    answers = 2 * layer * (3 + 2) + pair * (5 + 6 + 7 + 5 + 6) + 2 * 128 * 50 * (3 + 2)
    head = 2 * 128 * 50 * (3 + 2)
    for advantage, kl_coef, prompts, wanted in (
        ("group", 0.0, 1, 4 * (prompt + answers)),
        ("rloo", 0.02, 1, 5 * (prompt + answers)),
        ("gae", 0.02, 2, 5 * (2 * prompt + answers) + 4 * (2 * prompt + answers - head)),  # and the critic
    ):
        flags = SimpleNamespace(num_generations=2 // prompts, kl_coef=kl_coef, advantage=advantage)
        facts = peers.facts_of(model, [4, 4], [3, 2], flags)
        assert facts == {"length": 2.5, "prompt": 4, "operations": pytest.approx(wanted)}


@pytest.mark.parametrize("tokens", [60, 250])
def test_sums_have_exactly_so_many_tokens(benchmark, tmp_path, tokens):
    """Ours reads them with that many, too."""
    peers = benchmark("peers")
    policy = ROOT / "model/demo/policy"
    peers.write_sums(tmp_path / "sums.jsonl", policy, tokens, count=20)
    prompts = RLAIFDataset(str(tmp_path / "sums.jsonl"), load_tokenizer(str(policy)), 300, keys=Keys())
    assert [len(prompts[i].prompt_ids) for i in range(len(prompts))] == [tokens] * 20
    assert len({prompts[i].text for i in range(20)}) == 20
    with pytest.raises(SystemExit, match="error: --model: no prompt of 3 tokens"):
        peers.write_sums(tmp_path / "sums.jsonl", policy, 3, count=1)


def measured(peers, method="GRPO", prompt="55", shape="8x4", dtype="float32", facts=()):
    """A result of ``measure_real``: the peer takes four times as long for twice the operations."""
    ours, theirs = (
        [
            {
                "seconds": x,
                "GiB": x,
                "length": x,
                "operations": 1.5e12 * x**0.5,
                "phases": dict.fromkeys(peers.PHASES, x),
            }
        ]
        for x in (4.0, 16.0)
    )
    steps = [*zip(ours, theirs, [1e12], strict=True)]
    case = {"peer": f"{method}, TRL 1.16.0", "model": "M", "prompt": int(prompt), "answers": shape}
    return peers.result(case | {"dtype": dtype} | dict(facts), 32, steps, shares=True)


def test_the_real_model_stands_first_on_each_page(benchmark, monkeypatch, tmp_path):
    peers = benchmark("peers")
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    for name, head in (("README.md", "| peer | x |"), ("README_zh.md", "| 对比对象 | x |")):
        (tmp_path / name).write_text(f"before\n{head}\n|---|---|\n| small | 1 |\n\n| **other** |\n")
    before = (tmp_path / "README.md").read_text()
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- peers -->\nold\n<!-- end of peers -->\nb\n")
    monkeypatch.setattr(peers, "PAGE", page)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    peers.write_tables()
    assert (tmp_path / "README.md").read_text() == before  # nothing is measured yet
    results = [measured(peers), measured(peers, dtype="bfloat16"), measured(peers, shape="8x8")]
    (tmp_path / "peers_real.json").write_text(json.dumps({"results": [*results, measured(peers, "RLOO")]}))
    small = {name: x for name, x in results[0].items() if name not in ("prompt", "answers")}
    (tmp_path / "peers_cpu.json").write_text(json.dumps({"results": [small | {"lengths": "fixed"}]}))
    for _ in range(2):  # the second time they are replaced
        peers.write_tables()
        rows = (tmp_path / "README.md").read_text().splitlines()
        cpu = results[0]["CPU"]
        assert rows[3] == (
            f"| **M** ({cpu}): TRL 1.16, GRPO | "
            "fp32, prompts of 55 tokens, 8x4 answers: 8.0 / 2.0 = **4.0**; "
            "bf16, prompts of 55 tokens, 8x4 answers: 8.0 / 2.0 = **4.0** | 4.0 / 16.0 | | |"
        )
        assert rows[4].startswith(f"| **M** ({cpu}): TRL 1.16, RLOO | ")
        assert rows[5:] == ["| small | 1 |", "", "| **other** |"]
        chinese = (tmp_path / "README_zh.md").read_text(encoding="utf-8")
        assert f"| **M** ({cpu}): TRL 1.16，GRPO | fp32，prompt 55 token，8x4 个回答：8.0 / 2.0" in chinese
        real, other = page.read_text().split("\n\n")
        assert real.startswith("a\n<!-- peers -->\n| peer | CPU | model | dtype | prompt | answers |")
        assert (
            "| 55 | 8x8 | 4.0 / 16.0 | 8.0 | 2.0 | 4.0 | 0.75 / 0.38 | 4.0 / 16.0 | 4.0, 4.0, 4.0, 4.0 |"
            in real
        )
        assert other.startswith("| peer | CPU | model | dtype | lengths | mean length |")
        assert other.endswith("|\n<!-- end of peers -->\nb\n")


def test_cases_of_the_real_model_are_measured_by_worth_and_kept(benchmark, monkeypatch, tmp_path):
    peers, common = benchmark("peers"), benchmark("common")
    for module in (peers, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    clock, asked = [0.0], []

    def measure_real(python, ppo_python, model, steps, facts, *case):
        asked.append(case)
        clock[0] += 60
        return measured(peers, *case, facts=facts)

    monkeypatch.setattr(peers, "measure_real", measure_real)
    monkeypatch.setattr(peers.time, "monotonic", lambda: clock[0])
    peers.main(["--python", "/my/python", "--model", "/my/M", "--minutes", "3.5"])
    assert asked == peers.REAL_CASES[:3]
    asked.clear()
    peers.main(["--model", "/my/M", "--only", "55", "float32"])  # no PPO: there is no Python for it
    assert {case[0] for case in asked} == {"GRPO", "RLOO"} and len(asked) == 5
    found = json.loads((tmp_path / "peers_real.json").read_text())
    assert found["machine"]["torch"] == torch.__version__
    first, *_ = found["results"]
    assert len(found["results"]) == 7
    assert (
        first["command"] == "python benchmarks/peers.py --python ENV/bin/python --model MODEL --minutes 3.5"
    )
    assert first["commit"] == peers.commit()


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
    monkeypatch.setattr(smoke, "fast_dtype", lambda name, device: torch.float32)  # bf16 on some CPUs
    monkeypatch.setattr(smoke, "SMALL", TINY)
    monkeypatch.setattr(update, "REPETITIONS", 1)
    assert update.measure(TINY, "float32", "cpu", 4, 6)["ours"]["median"] > 0
    monkeypatch.setattr(smoke, "LARGE", {"size": TINY, "rows": 4, "new_tokens": 6, "response": 6})

    def fails(device):
        raise ValueError("no luck")

    *found, failed = [smoke.checked(check, "cpu") for check in [*smoke.CHECKS, fails]]
    assert not [line for line in found if "error" in line]
    assert found[-2]["tokens/s"] > 0
    assert float(found[-2]["sampler gap"]) < {"float32": 1e-5, "bfloat16": 1e-2}[found[0]["dtype"]]
    assert failed == {"check": "fails", "seconds": 0.0, "error": "ValueError: no luck"}


PARTS = {
    "good": "print(os.environ['ALL_RESULTS'])",
    "bad": "raise SystemExit(3)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "slow": "end = lambda *given: sys.exit('interrupted'); signal.signal(signal.SIGINT, end); time.sleep(99)",
    "deaf": "signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
}


def test_the_parts_for_a_gpu_end_in_time_and_keep_what_they_had(benchmark, monkeypatch, tmp_path, capsys):
    gpu, common, log = benchmark("gpu"), benchmark("common"), io.StringIO()
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    start = [sys.executable, "-c"]
    monkeypatch.setattr(gpu, "command", lambda part: [*start, f"import os, signal, sys, time; {PARTS[part]}"])
    monkeypatch.setattr(gpu, "PATIENCE", 1)
    with ThreadPoolExecutor() as threads:  # each waits for a process
        seconds = [60, 60, 60, 2, 2]
        ended = [*threads.map(gpu.run_part, PARTS, seconds, [log] * len(PARTS))]
    assert ended == ["ok", "failed", "ended by signal 9", "out of time", "out of time"]
    assert {*log.getvalue().splitlines()} == {str(tmp_path / "gpu.json"), "interrupted", "deaf"}
    monkeypatch.setenv("ALL_RESULTS", str(tmp_path / "gpu.json"))
    kept = {"good": [1, 2], "slow": [1]}
    for name, cases in kept.items():
        common.write_results(name, {"results": cases})
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: found["results"] for name, found in results.items()} == kept
    monkeypatch.setattr(gpu, "installed", lambda name: False)
    assert gpu.run_part("tests", 60, log) == "needs pytest"
    said = "before\n## update, cuda\n\n| x |\n|---|\n| 1 |\nstep 3\nFAILED a.py - c\n== 1 failed in 3 s ==\n"
    page = gpu.write_page("| part |", io.StringIO(said), begun=len("before\n")).read_text()
    wanted = "\n## update, cuda\n\n| x |\n|---|\n| 1 |\n\nFAILED a.py - c\n\n\n== 1 failed in 3 s ==\n\n"
    assert page.partition("| part |\n")[2] == wanted


END_OF_GPU = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import gpu
gpu.command = lambda part: [sys.executable, "-c", "import os, time; print(os.getpid()); time.sleep(600)"]
gpu.main(["smoke"], time.monotonic())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_part_ends_with_the_program_that_started_it(tmp_path, number):
    environment = {**os.environ, "RESULTS": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", END_OF_GPU, str(ROOT / "benchmarks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        part = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(part, 0)


def test_the_tests_for_a_gpu_start_without_xdist():
    command = [
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:xdist",
        "--collect-only",
        "tests/gpu",
    ]
    assert subprocess.run(command, cwd=ROOT, timeout=600).returncode == 0


def test_a_case_that_fails_leaves_the_others(benchmark, monkeypatch, capsys):
    main = benchmark("benchmarks.__main__")
    cases = [lambda: {"x": 1}, lambda: 1 / 0, lambda: [{"x": 2}]]
    module = SimpleNamespace(cases=lambda device: cases, rows=lambda results: results)
    monkeypatch.setitem(sys.modules, "generation", module)
    written = []
    monkeypatch.setattr(main, "write_results", lambda name, found: written.append(len(found["results"])))
    with pytest.raises(SystemExit, match="not all could be measured: generation"):
        main.main(["--device", "cpu", "generation"])
    assert written == [1, 2, 3]
    cases[1] = partial(signal.raise_signal, signal.SIGINT)  # its time is up: what it has is shown
    capsys.readouterr()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            main.main(["--device", "cpu", "generation"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert "## generation, cpu\n\n| x |\n|---|\n| 1 |\n\n" in capsys.readouterr().out
    cases[1] = lambda: 1 / 0
    assert not main.run("generation", "cpu")
    cases[:] = [lambda: {"error": "no luck"}]
    monkeypatch.setitem(sys.modules, "smoke", module)
    assert not main.run("smoke", "cpu")  # a check that failed is a line, and the part has failed
    said = capsys.readouterr().out
    assert "error: a case of generation: ZeroDivisionError: division by zero\n" in said
    assert "| x |\n|---|\n| 1 |\n| 2 |" in said


def test_what_cannot_be_measured_is_said_in_one_line(benchmark, capsys):
    """No GPU, and names that there are not; --help measures nothing."""
    main = benchmark("benchmarks.__main__")
    main.main(["--help"])
    assert "python benchmarks gpu" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: nonsense: choose from generation, .*; or gpu$"):
        main.main(["nonsense"])
    with pytest.raises(SystemExit, match="error: no flag: --table or --check"):
        benchmark("plan").main([])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="error: gpu: torch sees no GPU here"):
            main.main(["gpu"])


class Table(torch.nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits, self.config = logits, SimpleNamespace(vocab_size=len(logits))

    def forward(self, rows):
        return SimpleNamespace(logits=self.logits.expand(*rows.shape, -1))


def test_the_exact_figure_is_0_for_the_reference_and_1_for_the_best_policy(benchmark):
    tasks, tokenizer = benchmark("learning_tasks"), word_tokenizer("abc")
    scores, beta = {"": 0.3, "<unk>": 0.0, "a": 1.0, "b": -1.0, "c": 0.5}, 0.4
    function = lambda prompts, texts, answers: [scores[text] for text in texts]  # noqa: E731
    reward = Reward(functions={"function": (function, 1.0)})
    flags = SimpleNamespace(max_gen_len=1, kl_coef=beta)
    logits = torch.tensor([0.1, -0.5, 0.3, 0.8, -0.2])
    prompt = SimpleNamespace(prompt_ids=[2, 3])
    measure = tasks.exact_objective(flags, reward, tokenizer, prompt, Table(logits))
    values = torch.tensor([scores[tokenizer.decode([i], skip_special_tokens=True)] for i in range(5)])
    start = {"closed": 0, "score": (values @ logits.softmax(0)).item(), "kl": 0}
    assert measure(Table(logits)) == pytest.approx(start)
    best = measure(Table(logits + values / beta))
    assert best["closed"] == pytest.approx(1)
    p, q = (logits + values / beta).log_softmax(0), logits.log_softmax(0)
    assert best["kl"] == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)
    assert measure(Table(logits + 2 * values / beta))["closed"] < 0.99


def test_what_trl_is_given_scores_texts_as_training_here_does(benchmark):
    run, tokenizer = benchmark("learning_run"), word_tokenizer("abcd")
    seen = []

    def score(prompts, responses, answers):
        seen.extend(zip(prompts, responses, strict=True))
        return [float(len(text)) for text in responses]

    reward = Reward(functions={"function": (score, 1.0)}, reasoning=False, missing_eos_penalty=0.5)
    asked = [{"prompt": text, "prompt_ids": tokenizer(text).input_ids} for text in ("a b", "c")]
    prompts = [SimpleNamespace(**one, answer=None, record={}) for one in asked]
    scores = run.TextScores(reward, tokenizer, prompts, 2, 0)
    pad, (a, b, c, d) = 9, tokenizer("a b c d").input_ids
    rows = torch.tensor([[a, b, d, d, 0, pad], [pad, c, a, b, c, d]])
    output = scores.read(rows.masked_fill(rows == pad, 0), (rows != pad).long(), position_ids=None)
    assert scores.score(output.hidden_states[-1])[:, :, 0].tolist() == [[3.0] * 6, [6.5] * 6]
    assert seen == [("a b", "d d"), ("c", "a b c d")]
    seen.clear()
    score_completions = run.completion_scores(reward, tokenizer, prompts, 0)
    completions = {"completions": ["not read"] * 3, "completion_ids": [[a, b, c, d], [d, d, 0], [0]]}
    assert score_completions(**completions, place=[1, 0, 0]) == [6.5, 3.0, 0.0]
    assert seen == [("c", "a b c d"), ("a b", "d d"), ("a b", "")]


def test_runs_at_the_defaults_of_an_estimator_differ_in_its_flags_only(benchmark, tmp_path):
    run, tasks = benchmark("learning_run"), benchmark("learning_tasks")
    request = {"task": "d", "seed": 3, "samples": 1536, "files": {}}
    rates = {"our_gae": [1e-4, 2e-4], "our_rloo": [1e-4], "our_group": [1e-4], "rloo": [1e-4]}
    flags = {who: run.flags_of(request | {"who": who, "rates": rates[who]}, tmp_path) for who in rates}
    common = flags.pop("rloo").items()  # what TRL's runs read
    assert ("max_steps", 12) in common
    for who, these in flags.items():
        own = dict(zip(run.RATES, rates[who], strict=False)) | tasks.AT_DEFAULTS[who]
        assert dict(these.items() - common) == own
        assert common <= these.items()


@pytest.mark.slow
def test_a_small_run_of_this_trainer_and_its_place_in_the_file(benchmark, monkeypatch, tmp_path):
    learning, run = benchmark("learning"), benchmark("learning_run")
    monkeypatch.setattr(learning, "FILE", tmp_path / "learning.json")
    monkeypatch.setattr(run.PpoRun, "evaluate", run.PpoRun.evaluate)  # put back afterwards
    monkeypatch.setattr(run.train_ppo, "update", run.train_ppo.update)
    facts = {"task": "a", "who": "ours", "variant": "", "rates": [1e-3, 3e-3], "seed": 0, "samples": 1024}
    more = {"files": learning.prepare("a", tmp_path), "folder": str(tmp_path), "patch": "deal anew"}
    points = run.run_ours(facts | more | {"flags": {"kl_in": "reward"}}, tmp_path / "out")
    assert [p["samples"] for p in points] == [0, 256, 512, 768, 1024]
    assert points[0]["closed"] == 0
    assert points[-1]["closed"] > 0.2
    assert points[-1]["seconds"] > points[1]["seconds"] > 0
    learning.keep(facts | {"curve": {}})
    learning.keep(facts | {"curve": {"kl": [1]}})
    learning.keep(facts | {"seed": 1, "curve": {}})
    assert [r["curve"] for r in learning.load()] == [{"kl": [1]}, {}]


def test_pages_have_the_tables_of_their_results(benchmark):
    pages = {
        name: (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for name in ("learning", "performance", "scale")
    }
    report, plan = benchmark("learning_report"), benchmark("plan")
    runs = json.loads((ROOT / "benchmarks/results/learning.json").read_text(encoding="utf-8"))["runs"]
    assert all(table(runs) in pages["learning"] for table in report.TABLES.values())
    assert report.WITHOUT_CRITIC.keys() | report.OPTIONS.keys() <= benchmark("learning").OURS.keys()
    assert all(math.isfinite(report.figure(r)) for r in runs)
    peers = benchmark("peers")
    assert f"<!-- peers -->\n{peers.results_tables()}\n<!-- end" in pages["performance"]
    for name in peers.README_WORDS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert peers.with_rows(name, text) == text
    assert plan.table(plan.fewest()) in pages["scale"]
    task = benchmark("learning_environments")
    assert f"<!-- environments -->\n{task.results_table(task.load())}\n<!-- end" in pages["learning"]


def test_the_plan_was_within_a_tenth_of_every_measured_run(benchmark):
    plan = benchmark("plan")
    runs = json.loads((ROOT / "benchmarks/results/plan.json").read_text(encoding="utf-8"))["runs"]
    assert [run["run"] for run in runs] == list(plan.CASES)
    for run in runs:
        assert run["ratio"] == pytest.approx(run["plan"] / run["measured"], abs=2e-3)
        assert run["measured"] == max(run["peaks"][phase] for phase in ("building", "rollout", "update"))
        assert abs(run["ratio"] - 1) <= 0.1, run["run"]
        assert run["plan"] == pytest.approx(sum(run["parts"].values()), abs=len(run["parts"]))
        # The check of loading is a limit that is always enough: sometimes gaps are used again, sometimes not.
        assert 1 <= run["loading plan"] / run["peaks"]["loading"] <= 1.45, run["run"]
