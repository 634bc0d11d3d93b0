"""All three stages on real human preferences (HH-RLHF), with baselines for the reward model.

    python benchmarks/preferences.py --data harmless-test.jsonl.gz

The file is one of HH-RLHF (https://github.com/anthropics/hh-rlhf): pairs of transcripts. Its texts are often
offensive; they are not shown here and not kept. One half of the pairs trains everything: a tokenizer, a
language model of 4M parameters from random weights, stage 1 on the chosen answers, stage 2 on the pairs, PPO
on the prompts. The other half measures

    how often the reward model prefers the answer that people chose, compared with two simple baselines: the
    shorter answer wins (or the longer, whichever fits the first half better), and a logistic regression on
    word counts;
    the score of sampled answers before and after PPO, with the KL to the policy that PPO started from.

Prints the commands and a table, and writes benchmarks/results/preferences.json with facts about the machine.
"""

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from common import ROOT, read, table, write_results
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dataset.formats import to_pair
from dataset.record_files import open_records

VOCABULARY, HIDDEN, LAYERS = 2048, 256, 4
TEMPLATE = r"\n\nHuman: {prompt}\n\nAssistant:"
WORD = re.compile(r"\w+|[^\w\s]")
KNOWN_WORDS, FOLDS, PENALTIES = 2000, 5, (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
HELD_OUT_PROMPTS = 256


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def make_tokenizer(texts, folder):
    """Train a byte-level BPE tokenizer and save it -> its folder."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|pad|>"]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[1])
    tokenizer.save_pretrained(folder)
    return str(folder)


def stage(script, **values):
    """Print and run one of the trainer's scripts. values: its flags."""
    words = [f"{word}" for name, value in values.items() for word in (f"--{name}", value)]
    print(f"\n$ python trainer/{script}.py {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, str(ROOT / "trainer" / f"{script}.py"), *words], check=True)


def metrics(folder, run):
    return [json.loads(line) for line in read(folder / run / "metrics.jsonl").splitlines()]


# ---------------------------------------------------------------- baselines


def length_rule(train, test):
    """Accuracy on ``test`` of "the longer answer wins", or of the opposite if that fits ``train`` better.
    Ties count one half."""

    def longer_wins(pairs):
        signs = [len(chosen) - len(rejected) for chosen, rejected in pairs]
        return sum(0.5 if sign == 0 else float(sign > 0) for sign in signs) / len(signs)

    longer = longer_wins(train) >= 0.5
    return {
        "rule": "the longer" if longer else "the shorter",
        "accuracy": longer_wins(test) if longer else 1 - longer_wins(test),
    }


def word_counts(pairs, numbers):
    """-> [pairs, words]: log(1 + count) of each word in the chosen answer minus that in the rejected one."""
    x = torch.zeros(len(pairs), len(numbers))
    for row, pair in zip(x, pairs, strict=True):
        for text, sign in zip(pair, (1, -1), strict=True):
            for word, count in Counter(WORD.findall(text.lower())).items():
                if word in numbers:
                    row[numbers[word]] += sign * torch.tensor(1.0 + count).log()
    return x


def logistic_regression(x, penalty):
    """The weights w [words] that minimise mean(-log sigmoid(x w)) + penalty |w|^2."""
    w = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -F.logsigmoid(x @ w).mean() + penalty * w.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()


def bag_of_words(train, test):
    """Accuracy on ``test`` of a logistic regression. Cross-validation in ``train`` chooses its penalty."""
    known = Counter(word for pair in train for text in pair for word in set(WORD.findall(text.lower())))
    numbers = {word: i for i, (word, _) in enumerate(known.most_common(KNOWN_WORDS))}
    x = word_counts(train, numbers)
    fold = torch.arange(len(x)) % FOLDS

    def held_out(penalty):
        right = [x[fold == f] @ logistic_regression(x[fold != f], penalty) > 0 for f in range(FOLDS)]
        return torch.cat(right).float().mean().item()

    penalty = max(PENALTIES, key=held_out)
    right = word_counts(test, numbers) @ logistic_regression(x, penalty) > 0
    return {"penalty": penalty, "accuracy": right.float().mean().item()}


# ---------------------------------------------------------------- all stages


def run(path, folder, seed):
    records = open_records(path)
    lines = [records[i] for i in range(len(records))]
    random.Random(seed).shuffle(lines)
    half = len(lines) // 2
    train, test = lines[:half], lines[half:]
    data = write_jsonl(folder / "train.jsonl", train)
    held_out = write_jsonl(folder / "test.jsonl", test)
    texts = [line[side] for line in train for side in ("chosen", "rejected")]
    common = {"out_dir": folder, "seed": seed, "resume": "auto"}
    tokenizer = make_tokenizer(texts, folder / "tokenizer")

    stage(
        "train_sft",
        run_name="language",
        tokenizer=tokenizer,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        data_path=write_jsonl(folder / "texts.jsonl", [{"text": f"A conversation.{text}"} for text in texts]),
        max_seq_len=512,
        epochs=4,
        batch_size=16,
        learning_rate=1e-3,
        eval_size=128,
        hf_dir=folder / "language_model",
        **common,
    )
    stage(
        "train_sft",
        run_name="stage1",
        model=folder / "language_model",
        data_path=data,
        prompt_template=TEMPLATE,
        max_seq_len=512,
        epochs=3,
        batch_size=16,
        learning_rate=3e-4,
        eval_size=128,
        **common,
    )
    policy = folder / f"full_sft_{HIDDEN}"
    stage(
        "train_reward",
        run_name="stage2",
        model=policy,
        data_path=data,
        eval_data_path=held_out,
        max_seq_len=512,
        epochs=1,  # chosen, like the learning rate, on pairs of the first half
        batch_size=32,
        learning_rate=5e-4,
        eval_interval=0,
        **common,
    )
    stage(
        "train_ppo",
        run_name="ppo",
        model=policy,
        reward_model=folder / f"reward_{HIDDEN}",
        reasoning=0,
        data_path=data,
        eval_data_path=write_jsonl(folder / "prompts.jsonl", test[:HELD_OUT_PROMPTS]),
        max_seq_len=256,
        max_gen_len=64,
        batch_size=64,
        mini_batch_size=32,
        epochs=3,
        max_steps=40,
        learning_rate=1e-4,
        critic_learning_rate=3e-4,
        kl_coef=0.2,
        eval_interval=20,
        **common,
    )
    answers = [[[text for _, text in to_pair(record)[0]] for record in part] for part in (train, test)]
    ppo = metrics(folder, "ppo")
    samples = len(read(folder / "ppo" / "samples.jsonl").splitlines())
    return {
        "pairs": {"train": len(train), "test": len(test)},
        "language_model_loss": metrics(folder, "language")[-1]["eval/loss"],
        "stage1_loss": [m["eval/loss"] for m in metrics(folder, "stage1") if "eval/loss" in m],
        "accuracy": {
            "length": length_rule(*answers),
            "bag_of_words": bag_of_words(*answers),
            "reward_model": metrics(folder, "stage2")[-1]["eval/accuracy"],
        },
        "ppo": [
            {"step": m["step"]} | {name: m[f"eval/{name}"] for name in ("score", "length", "finished")}
            for m in ppo
            if "eval/score" in m
        ],
        "kl_a_token": {"last": ppo[-1]["kl/k1"], "most": max(m["kl/k3"] for m in ppo[1:])},
        "kl_a_response": ppo[-1]["kl/sequence"],
        "samples_written": samples,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="pairs of transcripts: JSONL, may be gzipped")
    parser.add_argument("--out", default="", help="folder that keeps all results; runs in it are resumed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = run(args.data, folder, args.seed)
    accuracy = results["accuracy"]
    rows = [
        {
            "prefers": f"{accuracy['length']['rule']} answer",
            "right on held-out pairs": accuracy["length"]["accuracy"],
        },
        {"prefers": "bag of words", "right on held-out pairs": accuracy["bag_of_words"]["accuracy"]},
        {"prefers": "the reward model", "right on held-out pairs": accuracy["reward_model"]},
    ]
    for row in rows:
        row["right on held-out pairs"] = f"{row['right on held-out pairs']:.3f}"
    print("\n" + table(rows))
    shown = ("score", "length", "finished")
    print("\n" + table([{"PPO step": r["step"]} | {n: f"{r[n]:.3f}" for n in shown} for r in results["ppo"]]))
    write_results("preferences", results)


if __name__ == "__main__":
    main()
