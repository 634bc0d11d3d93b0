"""Whole steps of other trainers and of this one, in turns: samples a second, memory, share of the machine.

    python benchmarks/peers.py --python ENV/bin/python --ppo_python PPO_ENV/bin/python --model MODEL
        a real model beside TRL's GRPO, RLOO and PPO; with --only GRPO 250 4x8 float32, this case alone
    python benchmarks/peers.py --python ENV/bin/python --minimind DIR
        small random models beside TRL's GRPO and RLOO, and MiniMind's train_ppo.py
    python benchmarks/peers.py --table
        writes the tables of docs/performance.md and of the READMEs

ENV has requirements.txt and the newest TRL, which has no PPO any more; PPO_ENV has requirements-bench.txt.
MODEL is a directory or a name of the hub (HuggingFaceTB/SmolLM2-135M-Instruct), DIR a checkout of MiniMind.
Each trainer is a process of its own, and while one takes a step, the other waits. Both have the same policy,
prompts, reward function, batch, longest answer, number type and number of optimizer steps, and rates so low
that lengths stay the same. The first step is warm-up. With small models this trainer has one more, in which
it takes the last of its memory.

- A real model's prompts are sums to work out, after solved ones if need be, so that each prompt has exactly
  55 or 250 tokens, those of the chat template included. Its answers have at most 64 tokens, and end where the
  model ends them. "8x4": 8 prompts, 4 answers each. TRL's PPO takes one answer a prompt; so does ours then.
- Small models have random weights, and 16 prompts of 16 to 48 tokens with 8 answers each. "fixed": answers of
  64 tokens; "varying": 32 on average and 128 at most, each token an EOS with the same probability.
- TRL is set up for speed on a CPU: no gradient checkpointing, transformers' ``generate`` (its continuous
  batching took 1.5 times as long); bf16 is its flag ``bf16``. GRPO has no KL, which is TRL's default; RLOO
  and PPO have it in the reward.
- MiniMind's script runs as it is, in fp32 (on a CPU it has nothing else), but for its reward model of 1.8B:
  32 prompts of 30 to 50 tokens, answers of 64 tokens, its two PPO epochs with one minibatch each.

"of machine": the operations that the task needs, divided by those that a large matrix product of the same
number type could have done meanwhile. Needed are, for real tokens only: a forward to sample, one for the KL,
if any, forward and backward of the update, and of PPO's critic a forward and an update. In each of them a
prompt counts once for all its answers. Each trainer's operations are those of its own answers.
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
from types import SimpleNamespace

import torch
from common import RESULTS, ROOT, machine, matrix_rate, peak_memory, read, show, spread, table, write_results
from transformers import Qwen3Config, Qwen3ForCausalLM

ANSWERS = 8  # to each prompt
BATCH = 16 * ANSWERS
DTYPES = ("float32", "bfloat16")
# (method, size, lengths, number type)
CASES = list(itertools.product(("GRPO", "RLOO"), ("512x8", "128x4"), ("fixed", "varying"), DTYPES))
# of a real model, by worth: (method, tokens of a prompt, prompts x answers, number type)
REAL_CASES = [
    (method, prompt, "32x1" if method == "PPO" else shape, dtype)
    for method, prompt, shape in (
        ("GRPO", "55", "8x4"),
        ("GRPO", "250", "4x8"),
        ("RLOO", "55", "8x4"),
        ("PPO", "55", "32x1"),
        ("RLOO", "250", "4x8"),
        ("PPO", "250", "32x1"),
        ("GRPO", "55", "4x8"),
        ("GRPO", "250", "8x4"),
        ("RLOO", "55", "4x8"),
        ("RLOO", "250", "8x4"),
        ("GRPO", "55", "8x8"),
        ("GRPO", "250", "8x8"),
    )
    for dtype in reversed(DTYPES)  # the faster one first
]
LONGEST = {"fixed": 64, "varying": 128, "real": 64}  # varying: 32 on average
STEPS = {"128x4": 7, "512x8": 2}
KL = {"GRPO": 0.0, "RLOO": 0.02, "PPO": 0.02}
LOW_RATE = 1e-9
ROWS = 32  # answers in a pass of TRL's update: as fast as 128, and less memory
REAL_ROWS = 8  # faster than 32, and half of the memory: the vocabulary is large
MINIMIND = {"hidden_size": 512, "num_hidden_layers": 8, "batch_size": 32, "mini_batch_size": 32}
MINIMIND |= {"max_gen_len": 64, "learning_rate": LOW_RATE, "critic_learning_rate": LOW_RATE}
WORDS = "red river stone bird apple chair window cloud night horse paper glass winter garden"
MARK = "a step: "  # before what a worker reports
FILE = "peers_cpu.json"
REAL_FILE = "peers_real.json"
PHASES = ("rollout", "reward", "score", "update")  # of a step of this trainer
PAGE = ROOT / "docs" / "performance.md"
README_WORDS = {
    "README.md": {
        "head": "| peer |",
        "setting": "{kind}, prompts of {prompt} tokens, {answers} answers: ",
        "comma": ", ",
        "semicolon": "; ",
    },
    "README_zh.md": {
        "head": "| 对比对象 |",
        "setting": "{kind}，prompt {prompt} token，{answers} 个回答：",
        "comma": "，",
        "semicolon": "；",
    },
}


def score(prompts, completions, answers=None, **more):
    """The reward of this trainer and of TRL: the number of characters. TRL answers messages with messages."""
    return [float(len(text if isinstance(text, str) else text[0]["content"])) for text in completions]


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
        layout = ours.step().layout
        metrics = ours.metrics[-1]
        turns.end(
            **facts_of(ours.run.models.actor, layout.prompt_len, layout.response_len, ours.args),
            phases={phase: metrics[f"perf/{phase}_seconds"] for phase in PHASES},
        )


def turns_of(facts):
    """-> a callback that waits before each step of TRL, and reports it with what ``facts()`` says of it."""
    from transformers import TrainerCallback

    class InTurns(TrainerCallback):
        turns = Turns()

        def on_train_begin(self, *given, **more):
            self.turns.begin()

        def on_step_end(self, *given, **more):
            self.turns.end(**facts())
            self.turns.begin()

    return InTurns()


def settings_of(request):
    """What the configurations of TRL's trainers have in common."""
    rows = request["rows"]
    return {
        "output_dir": str(Path(request["folder"], "trl")),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": request["batch"] // rows,
        "learning_rate": LOW_RATE,
        "bf16": request["dtype"] == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def prompts_of(request):
    lines = read(Path(request["folder"], "prompts.jsonl")).splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def run_trl(request):
    """TRL's GRPO or RLOO."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    prompt_len, response_len = [], []

    def counted(prompts, completions, completion_ids, **more):
        prompt_len[:] = (len(prompt_ids(tokenizer, prompt)) for prompt in prompts)
        response_len[:] = map(len, completion_ids)
        return score(prompts, completions)

    def facts():
        return facts_of(model, prompt_len, response_len, flags) | {"version": trl.__version__}

    flags = SimpleNamespace(num_generations=request["answers"], kl_coef=request["kl"], advantage="")
    config = getattr(trl, f"{request['method']}Config")(
        num_generations=request["answers"],
        max_completion_length=request["longest"],
        beta=request["kl"],
        max_steps=1000,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        **settings_of(request),
    )
    getattr(trl, f"{request['method']}Trainer")(
        model=model,
        reward_funcs=counted,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts_of(request)]),
        processing_class=tokenizer,
        callbacks=[turns_of(facts)],
    ).train()


def run_trl_ppo(request):
    """TRL's PPO, whose reward model is a network: a backbone that reads ids, and a score head."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(request["model"], padding_side="left")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})  # else TRL takes each EOS for padding
    prompts = [prompt_ids(tokenizer, prompt) for prompt in prompts_of(request)]
    width = len(prompts[0])  # of all of them
    response_len = []

    class Characters(torch.nn.Module):
        base_model_prefix = "read"

        def read(self, input_ids, attention_mask, **more):
            pairs = zip(input_ids[:, width:], attention_mask[:, width:].bool(), strict=True)
            answers = [ids[real] for ids, real in pairs]
            response_len.extend(map(len, answers))
            scores = torch.tensor(score(prompts, tokenizer.batch_decode(answers, skip_special_tokens=True)))
            return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

        def score(self, states):
            return states

    def facts():
        found = facts_of(model, [width] * len(response_len), response_len, flags)
        response_len.clear()
        return found | {"version": trl.__version__}

    flags = SimpleNamespace(num_generations=1, kl_coef=request["kl"], advantage="gae")
    load = partial(AutoModelForCausalLM.from_pretrained, request["model"], dtype=torch.float32)
    model = load()
    config = PPOConfig(
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=1000 * request["batch"],
        response_length=request["longest"],
        local_rollout_forward_batch_size=request["batch"],  # it samples so many at a time
        stop_token="eos",
        temperature=1.0,
        kl_coef=request["kl"],
        num_sample_generations=0,
        **settings_of(request),
    )
    PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=model,
        ref_model=load(),
        reward_model=Characters(),
        value_model=AutoModelForSequenceClassification.from_pretrained(
            request["model"], num_labels=1, dtype=torch.float32
        ),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        callbacks=[turns_of(facts)],
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


WORKERS = {"ours": run_ours, "TRL": run_trl, "TRL's PPO": run_trl_ppo, "MiniMind": run_minimind}


def take_turns(ours, peer, dtype, steps, warm_up=2):
    """-> for each of ``steps`` turns (what this trainer reports, what the peer does, the matrix rate).
    warm_up: steps of this trainer before them."""
    found = []
    for _ in range(warm_up):
        ours.step()
    peer.step()
    for _ in range(steps):
        before = matrix_rate(dtype)
        mine = ours.step()
        rate = (before + matrix_rate(dtype)) / 2  # the machine's speed is not constant
        found.append((mine, peer.step(), rate))
    return found


# ------------------------------------------------------------------------------------------- measurements


def facts_of(model, prompt_len, response_len, flags):
    """What a worker says of the answers of its last step. flags: of this trainer."""
    operations = needed(model, prompt_len, response_len, flags)
    return {"length": statistics.mean(response_len), "prompt": max(prompt_len), "operations": operations}


def needed(model, prompt_len, response_len, flags):
    """The operations that a step needs. prompt_len, response_len: of each answer."""
    from update import needed_operations

    lengths = [sum(both) for both in zip(prompt_len, response_len, strict=True)]
    # a forward is a third of what the function counts; the prompts of all but one answer need none
    repeated = needed_operations(model, prompt_len, 0) / 3 * (1 - 1 / flags.num_generations)
    forward = needed_operations(model, lengths, sum(response_len)) / 3 - repeated
    total = (5 if flags.kl_coef else 4) * forward  # sampling, KL, update: three
    if flags.advantage == "gae":  # the critic's values and its update
        total += 4 * (needed_operations(model, lengths, 0) / 3 - repeated)
    return total


def requests_of(method, dtype, folder, longest, batch=BATCH, answers=ANSWERS, model=None):
    """-> (what ``run_ours`` is asked for, what TRL's workers are). model: None for the small one, in
    folder/policy."""
    rows = REAL_ROWS if model else ROWS
    kl = KL[method]
    model = model or str(Path(folder, "policy"))
    ours = {
        "model": model,
        "epochs": 1,
        "batch": batch,
        "new_tokens": longest,
        "advantage": {"GRPO": "group", "RLOO": "rloo", "PPO": "gae"}[method],
        "num_generations": answers,
        "kl_coef": kl,
        "kl_in": "reward" if kl else None,
        "dtype": dtype,
        "reward_model": None,
        "reward_fn": f"{__file__}:score",
    }
    if method != "PPO":
        ours |= {"critic_warmup_steps": None, "critic_learning_rate": None}
    trl = {"method": method, "longest": longest, "kl": kl, "dtype": dtype, "model": model}
    trl |= {"batch": batch, "answers": answers, "rows": rows}
    return [{"folder": folder, **request} for request in (ours, trl)]


def measure(python, method, size, lengths, dtype):
    """This trainer and TRL -> a line of the results."""
    from end_to_end import VOCABULARY, write_inputs

    with tempfile.TemporaryDirectory() as folder:
        mean = LONGEST[lengths] / 4 if lengths == "varying" else None
        write_inputs(Path(folder), size, mean, VOCABULARY)
        ours, trl = requests_of(method, dtype, folder, LONGEST[lengths])
        with Worker(sys.executable, "ours", ours) as mine, Worker(python, "TRL", trl) as theirs:
            steps = take_turns(mine, theirs, getattr(torch, dtype), STEPS.get(size, 1))
    version = steps[0][1]["version"]
    case = {"peer": f"{method}, TRL {version}", "model": size, "lengths": lengths, "dtype": dtype}
    return result(case, BATCH, steps, shares=True)


def measure_real(python, ppo_python, model, steps, facts, method, prompt, shape, dtype):
    """This trainer and TRL with a real model, this many steps each -> a line of the results. facts: more of
    it."""
    count, answers = map(int, shape.split("x"))
    batch = count * answers
    ppo = method == "PPO"
    with tempfile.TemporaryDirectory() as folder:
        write_sums(Path(folder, "prompts.jsonl"), model, int(prompt))
        ours, trl = requests_of(method, dtype, folder, LONGEST["real"], batch, answers, model)
        name, python = ("TRL's PPO", ppo_python) if ppo else ("TRL", python)
        with Worker(sys.executable, "ours", ours) as mine, Worker(python, name, trl) as theirs:
            found = take_turns(mine, theirs, getattr(torch, dtype), steps, warm_up=1)
    read_by = {step["prompt"] for turn in found for step in turn[:2]}
    if read_by != {int(prompt)}:
        raise RuntimeError(f"prompts of {prompt} tokens were read as {sorted(read_by)}")
    peer = f"{method}, TRL {found[0][1]['version']}"
    case = {"peer": peer, "model": Path(model).name, "prompt": int(prompt), "answers": shape, "dtype": dtype}
    return result(case | facts, batch, found, shares=True)


def prompt_ids(tokenizer, prompt):
    """A prompt, a text or messages -> its ids."""
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


def write_sums(path, model, tokens, count=128):
    """Prompts of exactly so many tokens: a sum to work out, and before it as many solved ones as fit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    prompts = []
    for _ in range(1000 * count):
        terms = [rng.randint(1, 999) for _ in range(rng.randint(2, 5))]
        text = f"State the final answer to the following arithmetic problem: {' + '.join(map(str, terms))} ="
        while len(ids := prompt_ids(tokenizer, [{"role": "user", "content": text}])) < tokens:
            a, b = rng.randint(1, 999), rng.randint(1, 999)
            text = f"{a} + {b} = {a + b}\n{text}"
        if len(ids) == tokens:
            prompts.append({"prompt": [{"role": "user", "content": text}]})
        if len(prompts) == count:
            break
    else:
        raise SystemExit(f"error: --model: no prompt of {tokens} tokens could be made with its chat template")
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")


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
            parts = [step["operations"] / x for step, x in zip(taken, possible, strict=True)]
            found[f"{name}, of machine"] = spread(parts, 2)
        found["peer mean length"] = round(statistics.mean(step["length"] for step in theirs), 1)
    found["ours seconds"] = {
        phase: round(statistics.median(step["phases"][phase] for step in ours), 2) for phase in PHASES
    }
    print(table([row(found)]), flush=True)
    return found


def row(found):
    """A result as a row of a table."""
    memory = f"{found['ours GiB']} / {found['peer GiB']}"
    parts = [found.get(f"{name}, of machine", {}).get("median", "") for name in ("ours", "peer")]
    real = "prompt" in found
    setting = ("prompt", "answers") if real else ("lengths",)
    length = f"{found['mean length']} / {found['peer mean length']}" if real else found["mean length"]
    shown = {
        **{name: found[name] for name in ("peer", "CPU", "model", "dtype", *setting)},
        "mean length, ours / peer" if real else "mean length": length,
        "ours samples/s": found["ours samples/s"]["median"],
        "peer samples/s": found["peer samples/s"]["median"],
        "ratio": show(found["ratio"]),
        "of machine, ours / peer": " / ".join(map(str, parts)) if parts[0] else "",
        "GiB, ours / peer": memory,
    }
    if real:
        seconds = (str(found["ours seconds"][phase]) for phase in PHASES)
        shown[f"seconds of ours: {', '.join(PHASES)}"] = ", ".join(seconds)
    return shown


def case_of(found):
    setting = ("prompt", "answers") if "prompt" in found else ("lengths",)
    return tuple(found[name] for name in ("peer", "model", *setting, "dtype"))


# ------------------------------------------------------------------------------------------------ the pages


def results_of(file):
    return json.loads(read(RESULTS / file) or '{"results": []}')["results"]


def results_tables():
    """The tables of the results that are there: first of the real model, then of small ones."""
    found = (table([row(found) for found in results_of(file)]) for file in (REAL_FILE, FILE))
    return "\n\n".join(filter(None, found))


def readme_rows(name):
    """The rows of the real model in a README's table of peers: the first two settings of each method."""
    words = README_WORDS[name]
    of_peer = {}
    for found in results_of(REAL_FILE):
        if (found["prompt"], found["answers"]) in ((55, "8x4"), (250, "4x8"), (55, "32x1"), (250, "32x1")):
            of_peer.setdefault((found["peer"], found["model"]), []).append(found)
    rows = []
    for (peer, model), results in of_peer.items():
        method, library = peer.removesuffix(".0").split(", ")
        speeds = []
        for found in results:
            ours, theirs, ratio = (found[x]["median"] for x in ("ours samples/s", "peer samples/s", "ratio"))
            kind = {"float32": "fp32", "bfloat16": "bf16"}[found["dtype"]]
            setting = words["setting"].format(kind=kind, **found)
            speeds.append(f"{setting}{ours} / {theirs} = **{ratio}**")
        memory = max(results, key=lambda found: found["peer GiB"])
        cells = f"{memory['ours GiB']} / {memory['peer GiB']} | |"
        peer = f"**{model}** ({results[0]['CPU']}): {library}{words['comma']}{method}"
        rows.append(f"| {peer} | {words['semicolon'].join(speeds)} | {cells} |")
    return rows


def with_rows(name, page):
    """A README with these rows at the head of its table of peers, in the place of older ones."""
    lines = page.splitlines(keepends=True)
    (head,) = (i for i, line in enumerate(lines) if line.startswith(README_WORDS[name]["head"]))
    first = last = head + 2
    while lines[last].startswith("| **"):
        last += 1
    lines[first:last] = (line + "\n" for line in readme_rows(name))
    return "".join(lines)


def write_tables():
    """Put the tables of the results into the pages."""
    place = re.compile("(?<=<!-- peers -->\n).*?(?=<!-- end of peers -->)", re.DOTALL)
    PAGE.write_text(place.sub(results_tables() + "\n", read(PAGE)), encoding="utf-8")
    for name in README_WORDS:
        (ROOT / name).write_text(with_rows(name, read(ROOT / name)), encoding="utf-8")


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--python", default=sys.executable, help="the Python that has the newest TRL")
    p.add_argument("--ppo_python", default="", help="the Python that has TRL 1.12; without it, no PPO of TRL")
    p.add_argument("--model", default="", help="a real model: its directory, or its name on the hub")
    p.add_argument("--minimind", default="", help="a checkout of MiniMind")
    p.add_argument("--only", nargs="*", default=[], help="cases with these words: GRPO 512x8 bfloat16 fixed")
    p.add_argument("--steps", type=int, default=1, help="of the real model in each case, after the warm-up")
    p.add_argument("--minutes", type=float, default=1e9, help="begin no case that may end later than this")
    p.add_argument("--table", action="store_true", help="write the tables of the results that are there")
    p.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.worker:
        name, request = args.worker
        return WORKERS[name](json.loads(request))
    if args.table:
        return write_tables()
    file = REAL_FILE if args.model else FILE
    if args.model:
        facts = {"commit": commit(), "command": command(args, argv)}
        measure_case = partial(measure_real, args.python, args.ppo_python, args.model, args.steps, facts)
        possible = [case for case in REAL_CASES if args.ppo_python or case[0] != "PPO"]
    else:
        measure_case = partial(measure, args.python)
        possible = CASES
    cases = [partial(measure_case, *case) for case in possible if set(args.only) <= set(case)]
    if args.minimind and not args.model and set(args.only) <= {"MiniMind"}:
        cases += [partial(measure_minimind, args.python, args.minimind, dtype) for dtype in DTYPES]
    results = {case_of(found): found for found in results_of(file)}  # what is measured again takes its place
    begun, longest = time.monotonic(), 0.0
    for case in cases:
        start = time.monotonic()
        if start - begun + longest > 60 * args.minutes:
            break
        found = case()
        longest = max(longest, time.monotonic() - start)
        results[case_of(found)] = found
        write_results(file.removesuffix(".json"), {"results": list(results.values())})
    return None


def commit():
    """The commit of this checkout; "" outside of one."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(ask, capture_output=True, text=True).stdout.strip()


def command(args, argv):
    """The command without paths of this machine."""
    names = {args.python: "ENV/bin/python", args.ppo_python: "PPO_ENV/bin/python", args.model: "MODEL"}
    return " ".join(["python benchmarks/peers.py", *(names.get(word, word) for word in argv)])


if __name__ == "__main__":
    main(sys.argv[1:])
