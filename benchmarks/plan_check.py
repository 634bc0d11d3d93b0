"""The memory plan beside measured runs: PPO steps on this CPU, each run in processes of its own.

    python benchmarks/plan.py --check                     all of CASES -> results/plan.json
    python benchmarks/plan.py --check "62M, fp32"         only these; the others keep their figures

The models have random weights and the shapes of ``SHAPES``; they are saved in bf16, as those on the hub are.
Measured is the most resident memory (VmHWM of /proc) from the building of the run to the end of two steps,
less what was resident after the imports. So Python and its libraries do not count, and neither does the
loading of the policy, which has its own plan (``check_loading`` in memory_plan.py). The plan is the one that
the run makes and prints, and what code takes that is loaded later (``LATER``).
With several processes the fullest one counts, for the loading the one that loads.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, made, read

from trainer.memory_plan import LOADING

VOCABULARY, MB = 16_384, 1e6
LATER = 80e6  # bytes of code that is loaded or compiled while a run goes on, by oneDNN, gloo and others
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SHAPES = {  # of Llamas with two heads for keys and values
    "14M": (384, 4, 6, 1024),
    "62M": (640, 12, 10, 1728),
    "154M": (896, 16, 14, 2432),
    "355M": (1152, 24, 18, 3072),
}
SHORT = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 16, "max_seq_len": 24, "max_steps": 2}
CRITIC, RLOO = {"critic_warmup_steps": 0}, {"advantage": "rloo", "num_generations": 2}
LONG = {"batch_size": 32, "mini_batch_size": 16, "max_gen_len": 112}  # micro-batches of 2,048 tokens
FP32, BF16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
CASES = {  # {name: (shape, flags, processes)}; a reward model, if any, has the policy's sizes
    "62M, fp32": ("62M", {**FP32, **CRITIC}, 1),
    "62M, bf16": ("62M", {**BF16, **CRITIC}, 1),
    "62M, fp32, long": ("62M", {**FP32, **CRITIC, **LONG}, 1),
    "62M, bf16, long": ("62M", {**BF16, **CRITIC, **LONG}, 1),
    "62M, bf16, long, checkpointing": ("62M", {**BF16, **CRITIC, **LONG, "gradient_checkpointing": 1}, 1),
    "62M, bf16, reward model": ("62M", {**BF16, **CRITIC, "reward_model": True}, 1),
    "154M, fp32": ("154M", {**FP32, **CRITIC}, 1),
    "154M, bf16, reward model": ("154M", {**BF16, **CRITIC, "reward_model": True}, 1),
    "154M, fp32, RLOO": ("154M", {**FP32, **RLOO}, 1),
    "154M, bf16, RLOO": ("154M", {**BF16, **RLOO}, 1),
    "355M, bf16, RLOO": ("355M", {**BF16, **RLOO}, 1),
    "355M, bf16, LoRA": ("355M", {**BF16, **CRITIC, "lora_r": 16}, 1),
    "355M, fp32, LoRA, RLOO": ("355M", {**FP32, **RLOO, "lora_r": 16}, 1),
    "62M, fp32, sharded": ("62M", {**FP32, **CRITIC, "shard": 1}, 2),
    "154M, bf16, RLOO, sharded": ("154M", {**BF16, **RLOO, "shard": 1}, 2),
}
PEAKS = ("building", "rollout", "update")  # what ``measure`` looks at after the loading
SCORE = "def score(prompts, responses, answers):\n    return [len(r) % 7 for r in responses]\n"


def write_inputs(folder, shape, reward):
    """A policy, prompts, and a reward model or function -> {flag: path}. reward: whether it is a model."""
    import torch
    from end_to_end import word_tokenizer

    tokenizer, sizes = word_tokenizer(VOCABULARY), dict(zip(NAMES, SHAPES[shape], strict=True))
    torch.manual_seed(0)
    for name in ("policy", "reward") if reward else ("policy",):
        more = {"classifier": True, "num_labels": 1} if name == "reward" else {}
        sizes |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
        made(sizes, VOCABULARY, **more).bfloat16().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [" ".join(f"w{2 + (16 * n + i) % 5000}" for i in range(16)) for n in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in lines))
    (folder / "score.py").write_text(SCORE)
    chosen = {"reward_model": folder / "reward"} if reward else {"reward_fn": f"{folder / 'score.py'}:score"}
    return {"model": folder / "policy", "data_path": folder / "prompts.jsonl", **chosen}


def memory_of(name):
    """VmRSS or VmHWM of this process, from /proc: bytes."""
    return int(read("/proc/self/status").split(f"{name}:")[1].split()[0]) * 1024


def forget_peak():
    """From here on VmHWM counts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(argv):
    """A run of these flags in this process: print what it planned and took, as JSON. With several processes
    the main one prints a line for each."""
    from one_step import take_step

    from dataset.lm_dataset import global_batch
    from trainer import run as building
    from trainer import train_ppo as T
    from trainer.compute.memory import free_unused_memory
    from trainer.inputs import load_actor, load_trained_tokenizer
    from trainer.memory_plan import ModelSizes
    from trainer.runs.distributed import init_world

    args, peaks = T.parse_args(argv), {}
    with init_world(args.device) as world:
        begun = memory_of("VmRSS")

        def note(phase):
            peaks[phase] = max(peaks.get(phase, 0), memory_of("VmHWM") - begun)
            forget_peak()

        actor = load_actor(args, load_trained_tokenizer(args))
        note("loading")
        free_unused_memory()  # as PpoRun does first
        forget_peak()
        numbers = ModelSizes(actor, actor.dtype).all
        building.load_actor = lambda *_: actor  # that above
        run = building.PpoRun(args, world)
        note("building")
        answers = args.num_generations
        steps, prompts = range(args.max_steps), world.size * args.batch_size // answers
        order = (global_batch(len(run.data), 42, s, prompts)[world.rank :: world.size] for s in steps)
        for step, places in zip(steps, order, strict=True):
            take_step(run, step, [run.data[place] for place in places], lambda batch: note("rollout"))
            note("update")
        found = {"numbers": numbers, "plan": run.plan.peak + LATER, "fullest": run.plan.fullest}
        parts = run.plan.phases[run.plan.fullest] | {"code loaded later": LATER}
        found |= {"parts": parts, "peaks": peaks}
        for line in world.gather(found):
            if world.is_main:
                print(f"MEASURED {json.dumps(line)}", flush=True)


def run_case(name):
    """Measure a case in processes of its own -> its row of the results, sizes in MB."""
    shape, flags, processes = CASES[name]
    flags = SHORT | {"reasoning": 0, "eval_interval": 0, "device": "cpu"} | flags
    with tempfile.TemporaryDirectory() as folder:
        flags |= write_inputs(Path(folder), shape, "reward_model" in flags) | {"out_dir": folder}
        found = start([str(x) for flag, value in flags.items() for x in (f"--{flag}", value)], processes)
    one = max(found, key=lambda one: max(one["peaks"][x] for x in PEAKS))
    measured = max(one["peaks"][x] for x in PEAKS)
    whole = {name: round(size / MB) for name, size in one["peaks"].items()}
    whole["loading"] = round(max(other["peaks"]["loading"] for other in found) / MB)
    parts = {name: round(size / MB) for name, size in one["parts"].items()}
    figures = {"plan": one["plan"], "measured": measured, "loading plan": LOADING * one["numbers"]}
    figures = {x: round(size / MB) for x, size in figures.items()}
    row = {"run": name, **figures, "ratio": round(one["plan"] / measured, 3)}
    return row | {"fullest": one["fullest"], "parts": parts, "peaks": whole, "processes": processes}


def start(argv, processes):
    """Measure a run of these flags in so many processes -> [what each has found]."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, started = [sys.executable, str(Path(__file__).with_name("plan.py")), "--measure", *argv], []
    for rank in range(processes):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        env = {**os.environ, **{key: str(value) for key, value in own.items()}}
        started.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"error: {' '.join(argv)}: exit codes {[p.returncode for p in started]}")
    return [json.loads(line[9:]) for line in said[0].splitlines() if line.startswith("MEASURED ")]
