"""Several processes (DDP): the same result as one process; all of them end when one dies or hangs."""

import json
import os
import shutil
import signal
from functools import cache

import pytest
import tiny
import torch
from same_runs import CRITIC, EXACT, run_in_two_processes, same_metrics, same_weights, sizes
from test_families import FAMILIES, build
from test_resume import steps_in, wait_for_steps
from tiny import finish, flags, launch_torchrun, launch_two, read_jsonl
from transformers import AutoTokenizer

from errors import InputError
from model.loading import load_policy
from model.weights import PIECE
from trainer import train_ppo
from trainer.runs import distributed
from trainer.runs.distributed import World, init_world

ALONE = World(0, 1, torch.device("cpu"))
STEPS = 6
SAVED = 4  # and the last one
RUN = EXACT | CRITIC | {"max_gen_len": 6, "max_steps": STEPS, "ppo_epochs": 2, "seed": 5}
RUN |= {"normalize_reward": 1, "critic_lam": 0.97, "dual_clip": 3.0, "clip_epsilon_high": 0.3}
RUN |= {"replay_batches": 1, "best_metric": "score_raw", "ptx_coef": 0.2, "target_kl": 2e-3}
RUN |= {"save_interval": SAVED, "eval_interval": 0, "accumulation_steps": 2}
SAME = "reward/score reward/score_std reward/at_limit reward/model "
SAME += "rollout/length rollout/finished rollout/repetition rollout/distinct kl/k1 "
SAME += "rollout/score_length_corr rollout/importance_ess policy/approx_kl policy/early_stop eval/length "
SAME += "policy/skipped_steps policy/entropy policy/first_ratio policy/ptx_loss eval/score"
BOTH = ("actor", "critic")

# One response scores so high that the value loss overflows: an optimizer step that is really not finite.
OVERFLOW = '[3e19 if a == "overflow" else s for a, s in zip(answers, scores)]'


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = tiny.run_files(folder, count=89)
    (folder / "combine.py").write_text(tiny.FAULTY_REWARD.replace("return scores", f"return {OVERFLOW}"))
    prompts = read_jsonl(found["data_path"])
    prompts[0]["answer"] = "overflow"
    tiny.write_jsonl(folder / "prompts.jsonl", prompts)
    texts = [{"text": f"{p['prompt']} h"} for p in prompts[:30]]
    found["ptx_data_path"] = tiny.write_jsonl(folder / "texts.jsonl", texts)
    return found | {"eval_data_path": tiny.write_jsonl(folder / "eval.jsonl", prompts[5:10])}  # uneven shares


def argv_of(files, out_dir, processes, **more):
    return flags(**{**files, **RUN, **sizes(16 // processes), "out_dir": out_dir, **more})


@pytest.fixture(scope="module")
def run_in(files, tmp_path_factory):
    @cache
    def folder(processes, shard):
        out = tmp_path_factory.mktemp(f"in_{processes}_{shard}")
        argv = argv_of(files, out, processes, shard=shard)
        if processes == 1:
            train_ppo.main(argv)
        launched = tiny.launch_all([*argv, "--ddp"], processes) if processes > 1 else ()
        said = [finish(process) for process in launched]
        assert not any("FutureWarning" in errors for _, errors in said)
        if said:  # of whole weights, which one of them measures and writes
            words = (
                "saved    ppo_actor_32.pth in float16 (--save_dtype auto): in float16 the update has cosine "
            )
            assert [words in text for text, _ in said] == [True] + [False] * (processes - 1)
        return out / "r"

    return folder


LAST = f"checkpoints/step_{STEPS}"


def sizes_in(checkpoint):
    """{file: its size, where it holds tensors}"""
    files = checkpoint.iterdir()
    return {file.name: file.stat().st_size if file.suffix == ".safetensors" else 0 for file in files}


SLOW_WORLDS = [pytest.param(*several, marks=pytest.mark.slow) for several in ((2, 0), (4, 1))]


@pytest.mark.parametrize(("processes", "shard"), [(2, 1), *SLOW_WORLDS])
def test_processes_of_batch_n_equal_one_of_a_batch_as_large_as_theirs(run_in, processes, shard):
    """The same samples and weights over all steps, with PPO epochs, accumulation, whitening, normalised
    scores, critic warm-up, early stops, a step that was skipped, PTX, replayed batches, epochs that end
    inside a batch and uneven evaluation; with --shard 1 no process has a whole model. (Whole models in
    two processes, in make test: test_loss_options.py.)"""
    runs = one, two = run_in(1, 0), run_in(processes, shard)
    left, right = (sizes_in(run / LAST) for run in runs)
    assert left == right
    same_weights(one, two, STEPS, BOTH)
    same_metrics(one, two, {*SAME.split()}, rel=1e-4, abs=2e-5)
    lines = read_jsonl(one / "metrics.jsonl")
    stops = {m["policy/early_stop"] > 0 for m in lines if "policy/loss" in m}  # not in the warm-up
    assert stops == {True, False}
    assert json.loads((one / LAST / "state.json").read_text())["skipped_steps"] > 0
    best = [json.loads((run / "best.json").read_text()) for run in runs]
    assert [x["step"] for x in best] == [STEPS, STEPS]
    assert best[0]["value"] == pytest.approx(best[1]["value"], rel=1e-4)
    for run in runs:
        result = run.parent / "ppo_actor_32.pth"
        assert (run / "best.pth").read_bytes() == result.read_bytes()
        saved = torch.load(result, weights_only=True)
        assert all(x.half().equal(saved[name]) for name, x in tiny.load_weights(run, STEPS).items())
    left, right = (read_jsonl(run / "samples.jsonl") for run in runs)
    assert len(left) == 4 * STEPS  # of the longest there may be several
    for a, b in zip(left, right, strict=True):
        assert (a["step"], a["kind"]) == (b["step"], b["kind"])
        if a["kind"] == "first":  # position 0 of each global batch
            assert a["response"] == b["response"]
        elif a["kind"] != "longest":
            assert a["parts"]["score"] == pytest.approx(b["parts"]["score"], rel=1e-4, abs=2e-4)
    left, right = (read_jsonl(run / "eval_samples.jsonl") for run in runs)
    assert {row["place"] for row in left} == set(range(5))
    for a, b in zip(left, right, strict=True):
        assert all(a[name] == b[name] for name in ("step", "place", "prompt", "response"))
        assert a["greedy"]["response"] == b["greedy"]["response"]


CHANGES = [((2, 1), (1, 0)), ((1, 0), (2, 1))]
SLOW_CHANGES = [((2, 0), (1, 0)), ((1, 0), (2, 0)), ((2, 1), (4, 1))]
CHANGES += [pytest.param(*change, marks=pytest.mark.slow) for change in SLOW_CHANGES]


@pytest.mark.parametrize(("was", "now"), CHANGES)
def test_resuming_with_other_processes(files, run_in, tmp_path, was, now, capsys):
    """Only the batch size over all processes has to stay. Sharded runs go on as others, and vice versa."""
    shutil.copytree(run_in(*was), tmp_path / "r")
    count, shard = now
    resume = tmp_path / "r" / "checkpoints" / f"step_{SAVED}"
    argv = argv_of(files, tmp_path, count, shard=shard, resume=resume)
    if count == 1:
        train_ppo.main(argv)
        out = capsys.readouterr().out
    else:
        (out, _), *_ = map(finish, tiny.launch_all(argv, count))
    assert f"note: processes were {was[0]} and are {count}" in out
    same_weights(run_in(1, 0), tmp_path / "r", STEPS, BOTH)
    assert steps_in(tmp_path / "r") == list(range(STEPS + 1))


ADAPTERS = {
    "lora_r": 3,
    "learning_rate": 1e-2,
    "save_dtype": "float32",
    "gradient_checkpointing": 1,
    "ppo_epochs": 1,
}
KINDS = {"sharded adapters": ADAPTERS | {"shard": 1}, "adapters": ADAPTERS}
KINDS |= {family: {"shard": 1} for family in ("Qwen3-MoE", "MiniMind 3 MoE", "Llama, tied")}
KINDS["MiniMind 3 MoE"]["kl_coef"] = 0  # a reference that nothing asks is not cut either
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:]]


@pytest.mark.parametrize("kind", ["sharded adapters", *SLOW_KINDS])
def test_two_processes_with_experts_tied_weights_and_adapters_equal_one(files, tmp_path, kind):
    """Three steps, with all that the runs above have."""
    more = {"target_kl": 0, "update_old_actor_freq": 2, "max_steps": 3, **KINDS[kind]}
    if kind in FAMILIES:
        build(FAMILIES[kind](), spread=1.0).save_pretrained(tmp_path / "policy")
        AutoTokenizer.from_pretrained(files["model"]).save_pretrained(tmp_path / "policy")
        more["model"] = tmp_path / "policy"
    train_ppo.main(argv_of(files, tmp_path / "one", 1, **more))
    run_in_two_processes(argv_of(files, tmp_path / "two", 2, **more))
    one, two = (tmp_path / name / "r" for name in ("one", "two"))
    same_weights(one, two, 3, BOTH)
    same_metrics(one, two, {*SAME.split()}, abs=1e-3)
    (name,) = (path.name for path in one.parent.glob("ppo_actor_32*.pth"))
    left, right = (load_policy(run.parent / name).state_dict() for run in (one, two))
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)


DRIFT = """from trainer.runs.distributed import World
def drift(world, actor, critic, check=World.check_identical):
    w = actor.get_input_embeddings().weight.data  # one bit of one weight
    w[3, 3] = w[3, 3].nextafter(w.new_tensor(9.0))
    check(world, actor=actor, critic=critic)
World.check_identical = drift
"""
# what the second of two processes does in step 4, how they end, what they say how often, what is saved
FAULTS = {
    "dies": (tiny.DIE, [1, -9], "process 0 lost contact with the others", 1, [2]),
    "raises": ("raise KeyError('no')", [2, 2], "process 1: --reward_fn: KeyError: 'no' at", 1, [2, 3]),
    "drifts apart": (DRIFT, [1, 1], "processes hold different weights", 2, [2]),
}


@pytest.mark.parametrize("what", FAULTS)
def test_when_one_process_fails_both_end_and_the_run_resumes(files, tmp_path, what):
    """In the sixth call of its reward function, of which two are the first evaluation."""
    fault, codes, error, times, saved = FAULTS[what]
    more = {"target_kl": 0, "max_steps": 5, "save_interval": 2}
    argv = argv_of(files, tmp_path, 2, **more)
    processes = launch_two(argv, FAULT=fault, FAULT_RANK="1", FAULT_AT="6")
    said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == codes
    assert sum(err.count("error: ") for _, err in said) == times
    assert sum(err.count(f"error: {error}") for _, err in said) == times
    assert steps_in(tmp_path / "r") == [0, 1, 2, 3]  # batch 4 is not learned from
    found = (tmp_path / "r" / "checkpoints").iterdir()
    assert sorted(path.name for path in found) == [f"step_{step}" for step in saved]
    launcher = f"{tiny.PYTHON} -m torch.distributed.run --nproc_per_node 2"
    assert f"to go on: {launcher} {tiny.ROOT}/trainer/train_ppo.py --model" in said[0][0]
    if what == "dies":
        train_ppo.main(argv_of(files, tmp_path, 1, **more, resume="auto"))
        assert steps_in(tmp_path / "r") == list(range(6))


def test_bad_input_is_said_once(files, tmp_path):
    argv = argv_of(files, tmp_path / "out", 2, data_path="/nowhere.jsonl")
    said = "".join(finish(process, code=2)[1] for process in launch_two(argv))
    assert said.count("error: ") == said.count("error: /nowhere.jsonl") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def saved_once(folder, out):
    done = read_jsonl(folder / "metrics.jsonl")[-1]["step"]
    assert out.count("saved: ") == 1
    assert f"step_{done}\n" in out
    assert (folder / "checkpoints" / f"step_{done}" / "SHA256SUMS").is_file()


def test_a_signal_to_one_process_saves_and_ends_all(files, tmp_path):
    one, two = launch_two(argv_of(files, tmp_path, 2, max_steps=900, save_interval=1000))
    wait_for_steps(tmp_path / "r", 1, one)
    two.send_signal(signal.SIGTERM)
    finish(two, code=128 + signal.SIGTERM)
    saved_once(tmp_path / "r", finish(one, code=128 + signal.SIGTERM)[0])


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False])
def test_signals_under_torchrun_save_once_and_end(files, tmp_path, group):
    """Ctrl-C reaches every process, and torchrun sends it once more: it must count as one request."""
    process = launch_torchrun(2, argv_of(files, tmp_path, 2, max_steps=900, save_interval=1000))
    wait_for_steps(tmp_path / "r", 3, process)
    if group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    saved_once(tmp_path / "r", out)


HANG = """import sys
from datetime import timedelta
sys.path.insert(0, sys.argv.pop(1))
from trainer.runs import distributed
from trainer import train_ppo
distributed.PATIENCE = timedelta(seconds=8)
train_ppo.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["import ctypes; ctypes.PyDLL(None).sleep(100)", tiny.DIE], ids=["hangs", "dies"]
)
def test_one_that_hangs_or_dies_is_noticed_under_torchrun(files, tmp_path, fault):
    """A C function that does not return and holds the GIL: the other process waits as long as it may."""
    (tmp_path / "hang.py").write_text(HANG)
    argv = [str(tiny.ROOT), *argv_of(files, tmp_path, 2, target_kl=0)]
    environment = {"FAULT": fault, "FAULT_RANK": "1", "FAULT_AT": "6"}
    process = launch_torchrun(2, argv, script=tmp_path / "hang.py", **environment)
    _, err = finish(process, code=1, seconds=200)
    assert "error: process 0 lost contact with the others" in err


@pytest.mark.slow
def test_two_nodes(files, run_in, tmp_path):
    """Two torchrun agents with one rendezvous, as on two machines, with one process each."""
    place = ["--rdzv_endpoint", f"localhost:{tiny.free_port()}", "--rdzv_id", "7"]
    options = ["--nnodes", "2", "--rdzv_backend", "c10d", *place]
    nodes = [launch_torchrun(1, argv_of(files, tmp_path, 2), *options) for _ in range(2)]
    for node in nodes:
        finish(node)
    same_weights(run_in(1, 0), tmp_path / "r", STEPS, BOTH)


class Twice(World):
    """A world of two processes with the same numbers."""

    def sum(self, tensor):
        return tensor.mul_(2)


def test_gradients_are_summed_in_parts_and_one_that_is_missing_is_0(monkeypatch):
    monkeypatch.setattr("trainer.runs.distributed.SUMMED", 28)
    parameters = [torch.nn.Parameter(torch.ones(n, 2)) for n in (1, 2, 5, 1)]
    parameters.append(torch.nn.Parameter(torch.ones(3), requires_grad=False))
    for number, p in enumerate(parameters[:3], 1):
        p.grad = torch.full_like(p, number)
    ALONE.sum_gradients(parameters)
    assert parameters[3].grad is None
    Twice(0, 2, ALONE.device).sum_gradients(parameters)
    assert [p.grad.unique().tolist() for p in parameters[:4]] == [[2.0], [4.0], [6.0], [0.0]]
    assert [p.grad.shape for p in parameters[:4]] == [p.shape for p in parameters[:4]]
    assert parameters[4].grad is None


def test_equal_weights_in_another_order_are_different_weights(monkeypatch):
    """Swapped: neighbours, a number and its negative, pieces of a checksum, parameters; and one bit."""
    sent = []
    monkeypatch.setattr(World, "gather", lambda world, item: sent.append(item) or [item])
    numbers = torch.arange(1.0, 3 * PIECE + 1)
    numbers[7] = -numbers[3]
    order = torch.arange(len(numbers))
    orders = [order, order, order.clone(), order.clone(), order.roll(PIECE)]
    orders[2][[0, 1]] = order[[1, 0]]
    orders[3][[3, 7]] = order[[7, 3]]
    pairs = [(numbers[order], torch.ones(2)) for order in orders]
    pairs += [(numbers, torch.tensor([1.0, 1.0000001])), (torch.ones(2), numbers)]
    for pair in pairs:
        World(0, 2, ALONE.device).check_identical(actor=torch.nn.ParameterList(pair))
    assert sent[0] == sent[1]
    assert len({checksum["actor"] for checksum in sent}) == len(sent) - 1


GPUS = [  # --device, GPUs, processes here -> the GPU of process 1 and what sums go through
    ("cuda", 2, "2", "cuda:1", "nccl"),
    ("cuda:0", 2, "2", "cuda:1", "nccl"),  # MiniMind's default means no one GPU
    ("cuda:0", 1, "2", "cuda:0", "gloo"),  # nccl refuses two processes on one GPU
    ("", 1, "2", "--device cuda: .*: 2 processes and 1 GPUs here: start one for each GPU", ""),
    ("cuda:0", 1, "3", "3 processes and 1 GPUs here", ""),  # of four; other machines may use nccl
    ("cuda", 1, "1", "cuda:1", "nccl"),  # two machines: this one's launcher counts otherwise
]


@pytest.mark.parametrize(("device", "gpus", "here", "wanted", "backend"), GPUS)
def test_each_process_takes_a_gpu(monkeypatch, device, gpus, here, wanted, backend):
    started = []
    size = "4" if here == "3" else "2"
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.setattr(distributed.torch, "zeros", lambda size, device: None)
    monkeypatch.setattr(distributed.dist, "rendezvous", lambda url: iter([(None, 1, 2)]))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda name, **more: started.append(name))
    if not backend:
        with pytest.raises(InputError, match=wanted):
            init_world(device)
    else:
        assert init_world(device) == World(1, 2, torch.device(wanted))
        assert started == [backend]
