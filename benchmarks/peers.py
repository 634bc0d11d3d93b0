"""Whole steps of other trainers and of this one, in turns: samples a second, memory, share of the machine.

    python benchmarks/peers.py --python VENV/bin/python                  TRL's GRPO and RLOO
    python benchmarks/peers.py --python VENV/bin/python --minimind DIR   and MiniMind's train_ppo.py
    python benchmarks/peers.py --table                                   writes docs/performance.md's table

VENV has requirements.txt and the newest TRL, which has no PPO any more, so it is not that of
requirements-bench.txt. DIR is a checkout of MiniMind. Each trainer is a process of its own, and while one
takes a step, the other waits. Both have the same policy, prompts, reward function, batch (16 prompts, 8
answers each), longest answer, number type and number of optimizer steps, and rates so low that lengths stay
the same. The first step is warm-up; this trainer has one more, in which it takes the last of its memory.

- "fixed": answers of 64 tokens; "varying": 32 on average and 128 at most, each token an EOS with the same
  probability.
- TRL is set up for speed on a CPU: no gradient checkpointing, transformers' ``generate`` (its continuous
  batching took 1.5 times as long); bf16 is its flag ``bf16``. GRPO has no KL, which is TRL's default; RLOO
  has it in the reward.
- MiniMind's script runs as it is, in fp32 (on a CPU it has nothing else), but for its reward model of 1.8B:
  32 prompts of 30 to 50 tokens, answers of 64 tokens, its two PPO epochs with one minibatch each.

"of machine": the operations that the task needs, divided by those that a large matrix product of the same
number type could have done meanwhile. Needed are, for real tokens only: each prompt once and each sampled
token once to sample; a forward for the KL, if any; forward and backward of the update.
"""

import argparse
import itertools
import json
import os
import random
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path

import torch
from common import RESULTS, ROOT, machine, matrix_rate, peak_memory, read, show, spread, table, write_results
from transformers import Qwen3Config, Qwen3ForCausalLM

ANSWERS = 8  # to each prompt
BATCH = 16 * ANSWERS
DTYPES = ("float32", "bfloat16")
# (method, size, lengths, number type)
CASES = list(itertools.product(("GRPO", "RLOO"), ("512x8", "128x4"), ("fixed", "varying"), DTYPES))
LONGEST = {"fixed": 64, "varying": 128}  # varying: 32 on average
STEPS = {"128x4": 7, "512x8": 2}
KL = {"GRPO": 0.0, "RLOO": 0.02}
LOW_RATE = 1e-9
ROWS = 32  # answers in a pass of TRL's update: as fast as 128, and less memory
MINIMIND = {"hidden_size": 512, "num_hidden_layers": 8, "batch_size": 32, "mini_batch_size": 32}
MINIMIND |= {"max_gen_len": 64, "learning_rate": LOW_RATE, "critic_learning_rate": LOW_RATE}
WORDS = "red river stone bird apple chair window cloud night horse paper glass winter garden"
MARK = "a step: "  # before what a worker reports
FILE = "peers_cpu.json"
PAGE = ROOT / "docs" / "performance.md"


def score(prompts, completions, answers=None, **more):
    """The reward of this trainer and of TRL: the number of characters."""
    return [float(len(text)) for text in completions]


# ------------------------------------------------------------------------------------------------- turns


class Worker:
    """A trainer in a process of its own, which waits until it is asked for a step."""

    def __init__(self, python, name, request):
        self.said = deque(maxlen=20)  # its last lines, for the message if it fails
        self.process = subprocess.Popen(
            [python, __file__, "--worker", name, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def step(self):
        """-> {"seconds": of the step, "GiB": peak memory so far, and what else the trainer reports}"""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            self.said.append(line)
            _, mark, found = line.partition(MARK)
            if mark:
                return json.loads(found)
        raise RuntimeError(f"{self.process.args[3]} has ended:\n{''.join(self.said)}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()


class Turns:
    """The side of the worker's process: ``begin`` waits until a step is asked for, ``end`` reports it."""

    start = None

    def begin(self):
        if not sys.stdin.readline():
            sys.exit()  # nobody will ask
        self.start = time.perf_counter()

    def end(self, **facts):
        if self.start:
            seconds = time.perf_counter() - self.start
            print(MARK + json.dumps({"seconds": seconds, "GiB": peak_memory(), **facts}), flush=True)


def run_ours(request):
    from end_to_end import Ours

    ours = Ours(Path(request.pop("folder")), device="cpu", **request)
    turns = Turns()
    while True:
        turns.begin()
        rollout = ours.step()
        turns.end(length=ours.metrics[-1]["rollout/length"], operations=operations(ours, rollout))


def run_trl(request):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class InTurns(TrainerCallback):
        turns = Turns()

        def on_train_begin(self, *given, **more):
            self.turns.begin()

        def on_step_end(self, *given, **more):
            self.turns.end(version=trl.__version__)
            self.turns.begin()

    folder = Path(request["folder"])
    config = getattr(trl, f"{request['method']}Config")(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=BATCH // ROWS,
        num_generations=ANSWERS,
        max_completion_length=request["longest"],
        beta=request["kl"],
        learning_rate=LOW_RATE,
        max_steps=1000,
        bf16=request["dtype"] == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    prompts = [json.loads(line) for line in read(folder / "prompts.jsonl").splitlines()]
    getattr(trl, f"{request['method']}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy", padding_side="left"),
        callbacks=[InTurns()],
    ).train()


def run_minimind(request):
    """MiniMind's own script, but for its reward model; before each batch it waits."""
    sys.path.remove(str(ROOT))  # its packages have the names of ours
    sys.path.insert(0, request["repository"])
    os.chdir(Path(request["repository"], "trainer"))
    from trainer import trainer_utils

    class Characters:
        def __init__(self, *given, **more):
            """Loads nothing."""

        def get_score(self, messages, response):
            return float(len(response))

    class InTurns(trainer_utils.SkipBatchSampler):
        def __iter__(self):
            turns = Turns()
            for batch in super().__iter__():
                turns.end()
                turns.begin()
                yield batch

    trainer_utils.LMForRewardModel = Characters
    trainer_utils.SkipBatchSampler = InTurns
    flags = {**MINIMIND, **request["flags"], "device": "cpu", "num_workers": 0, "save_interval": 10**6}
    sys.argv = ["train_ppo.py", *(x for name, value in flags.items() for x in (f"--{name}", str(value)))]
    runpy.run_path("train_ppo.py", run_name="__main__")


WORKERS = {"ours": run_ours, "TRL": run_trl, "MiniMind": run_minimind}


def take_turns(ours, peer, dtype, steps):
    """-> for each of ``steps`` turns (what this trainer reports, what the peer does, the matrix rate)."""
    found = []
    ours.step()
    for number in range(1 + steps):
        before = matrix_rate(dtype)
        mine = ours.step()
        rate = (before + matrix_rate(dtype)) / 2  # the machine's speed is not constant
        theirs = peer.step()
        if number:
            found.append((mine, theirs, rate))
    return found


# ------------------------------------------------------------------------------------------- measurements


def operations(ours, rollout):
    """What the last step needed."""
    from update import needed_operations

    layout, model = rollout.layout, ours.run.models.actor
    predicted = sum(layout.response_len)
    forward = needed_operations(model, layout.lengths, predicted) / 3  # it counts the backward too
    prompts = needed_operations(model, layout.prompt_len, 0) / 3
    sampling = forward - prompts + prompts / ours.args.num_generations
    return sampling + (forward if ours.args.kl_coef else 0) + 3 * forward


def requests_of(method, lengths, dtype, folder):
    """-> (what ``run_ours`` is asked for, what ``run_trl`` is)."""
    longest = LONGEST[lengths]
    kl = KL[method]
    ours = {
        "epochs": 1,
        "batch": BATCH,
        "new_tokens": longest,
        "advantage": {"GRPO": "group", "RLOO": "rloo"}[method],
        "num_generations": ANSWERS,
        "kl_coef": kl,
        "kl_in": "reward" if kl else None,
        "dtype": dtype,
        "reward_model": None,
        "reward_fn": f"{__file__}:score",
        "critic_warmup_steps": None,
        "critic_learning_rate": None,
    }
    trl = {"method": method, "longest": longest, "kl": kl, "dtype": dtype}
    return [{"folder": folder, **request} for request in (ours, trl)]


def measure(python, method, size, lengths, dtype):
    """This trainer and TRL -> a line of the results."""
    from end_to_end import VOCABULARY, write_inputs

    with tempfile.TemporaryDirectory() as folder:
        mean = LONGEST[lengths] / 4 if lengths == "varying" else None
        write_inputs(Path(folder), size, mean, VOCABULARY)
        ours, trl = requests_of(method, lengths, dtype, folder)
        with Worker(sys.executable, "ours", ours) as mine, Worker(python, "TRL", trl) as theirs:
            steps = take_turns(mine, theirs, getattr(torch, dtype), STEPS.get(size, 1))
    version = steps[0][1]["version"]
    case = {"peer": f"{method}, TRL {version}", "model": size, "lengths": lengths, "dtype": dtype}
    return result(case, BATCH, steps, shares=True)


def measure_minimind(python, repository, dtype, steps=3):
    """This trainer and MiniMind's script, with the same checkpoint and the same prompts -> a line."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(repository, Path(folder, "minimind"))
        (copy / "out").mkdir(exist_ok=True)
        start = copy / "out" / f"full_sft_{MINIMIND['hidden_size']}.pth"
        write_minimind(start, Path(folder, "prompts.jsonl"), 32 * (steps + 4))
        given = {"data_path": f"{folder}/prompts.jsonl", "thinking_ratio": 0}
        ours = {
            "folder": folder,
            "epochs": 2,
            "batch": MINIMIND["batch_size"],
            "new_tokens": MINIMIND["max_gen_len"],
            "model": str(start),
            "tokenizer": str(copy / "model"),
            "reward_model": None,
            "reward_fn": f"{__file__}:score",
            "dtype": dtype,
            **given,
        }
        theirs = {"repository": str(copy), "flags": given}
        with Worker(sys.executable, "ours", ours) as mine, Worker(python, "MiniMind", theirs) as its:
            found = take_turns(mine, its, getattr(torch, dtype), steps)
    case = {"peer": "PPO, MiniMind", "model": "512x8", "lengths": "fixed", "dtype": dtype}
    return result(case, MINIMIND["batch_size"], found)


def write_minimind(path, prompts, count):
    """A random checkpoint of MiniMind 3, and prompts of one length."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=6400,
        hidden_size=MINIMIND["hidden_size"],
        num_hidden_layers=MINIMIND["num_hidden_layers"],
        intermediate_size=1664,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    state = Qwen3ForCausalLM(config).half().state_dict()
    torch.save(state, path)
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        question = " ".join(rng.choices(WORDS.split(), k=rng.randint(6, 14)))
        turns = [("system", "Be brief."), ("user", question), ("assistant", "")]
        lines.append(json.dumps({"conversations": [{"role": who, "content": text} for who, text in turns]}))
    prompts.write_text("\n".join(lines) + "\n")


def result(case, batch, steps, shares=False):
    """steps: of ``take_turns``."""
    ours, theirs, rates = zip(*steps, strict=True)
    found = {
        **case,
        "CPU": machine()["cpu"].partition("(R) Processor")[0].replace("(R)", ""),
        "mean length": round(statistics.mean(step["length"] for step in ours), 1),
        "ours samples/s": spread([batch / step["seconds"] for step in ours], 2),
        "peer samples/s": spread([batch / step["seconds"] for step in theirs], 2),
        "ratio": spread([b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)], 2),
        "ours GiB": round(ours[-1]["GiB"], 2),
        "peer GiB": round(theirs[-1]["GiB"], 2),
        "matrix GFLOP/s": spread([rate / 1e9 for rate in rates], 0),
    }
    if shares:
        for name, taken in (("ours", ours), ("peer", theirs)):
            possible = [step["seconds"] * rate for step, rate in zip(taken, rates, strict=True)]
            parts = [step["operations"] / x for step, x in zip(ours, possible, strict=True)]
            found[f"{name}, of machine"] = spread(parts, 2)
    print(table([row(found)]), flush=True)
    return found


def row(found):
    """A result as a row of the table."""
    memory = f"{found['ours GiB']} / {found['peer GiB']}"
    parts = [found.get(f"{name}, of machine", {}).get("median", "") for name in ("ours", "peer")]
    return {
        **{name: found[name] for name in ("peer", "CPU", "model", "dtype", "lengths", "mean length")},
        "ours samples/s": found["ours samples/s"]["median"],
        "peer samples/s": found["peer samples/s"]["median"],
        "ratio": show(found["ratio"]),
        "of machine, ours / peer": " / ".join(map(str, parts)) if parts[0] else "",
        "GiB, ours / peer": memory,
    }


def case_of(found):
    return tuple(found[name] for name in ("peer", "model", "lengths", "dtype"))


def write_table():
    """Put the table of the results between its marks."""
    place = re.compile("(?<=<!-- peers -->\n).*?(?=<!-- end of peers -->)", re.DOTALL)
    PAGE.write_text(place.sub(results_table() + "\n", read(PAGE)), encoding="utf-8")


def results_table():
    return table([row(found) for found in json.loads(read(RESULTS / FILE))["results"]])


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--python", default=sys.executable, help="the Python that has the peers' packages")
    p.add_argument("--minimind", default="", help="a checkout of MiniMind")
    p.add_argument("--only", nargs="*", default=[], help="cases with these words: GRPO 512x8 bfloat16 fixed")
    p.add_argument("--table", action="store_true", help="write the table of the results that are there")
    p.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.worker:
        name, request = args.worker
        return WORKERS[name](json.loads(request))
    if args.table:
        return write_table()
    cases = [partial(measure, args.python, *case) for case in CASES if set(args.only) <= set(case)]
    if args.minimind and set(args.only) <= {"MiniMind"}:
        cases += [partial(measure_minimind, args.python, args.minimind, dtype) for dtype in DTYPES]
    known = json.loads(read(RESULTS / FILE) or '{"results": []}')["results"]
    results = {case_of(found): found for found in known}  # what is measured again takes its place
    for case in cases:
        found = case()
        results[case_of(found)] = found
        write_results(FILE.removesuffix(".json"), {"results": list(results.values())})
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
