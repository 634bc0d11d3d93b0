"""Samples per second and peak memory of whole PPO steps: this trainer compared with TRL's PPOTrainer.

The peer is the PPOTrainer of TRL 1.12.0, the last release with PPO (requirements-bench.txt). Both trainers
run in one process and take steps alternately. Both get the same policy, reward model, prompts, batch, PPO
epochs (one minibatch each) and longest response, and start the critic from the reward model. Both compute in
the type that ``--dtype auto`` chooses (TRL: ``bf16`` where that is bf16, else fp32). Where TRL is not
installed, this trainer runs alone.

"fixed": no response ends early. "varying": each token is an EOS with probability 4 / max_gen_len. A step is
rollout, rewards, log-probs, values and updates, first with one PPO epoch, then with four. The first step is
warm-up. For this trainer the second is warm-up too: in it the trainer takes the last of its memory from the
system, and keeps it. The learning rates are so low that nothing is learned and lengths stay the same.
Memory: the peak of two steps with a vocabulary of 151,936, each trainer in a process of its own.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import (
    EOS,
    PAD,
    QWEN,
    VOCABULARY,
    installed,
    peak_memory,
    policy,
    reward_model,
    show,
    spread,
)
from one_step import take_step
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

from trainer import train_ppo
from trainer.compute.precision import fast_dtype
from trainer.run import PpoRun
from trainer.runs.distributed import World

CHAT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
CASES = [("128x4", 64, 128), ("512x8", 32, 64)]  # (size, batch, longest response)
GPU_CASES = [("512x8", 128, 128)]
EPOCHS = [1, 1, 1, 4]  # PPO epochs of each step; the first step is warm-up
MEMORY_SIZE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
}


def word_tokenizer(vocabulary):
    words = {"<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    return tokenizer


def write_inputs(folder, size, mean_length, vocabulary, count=256):
    """Write a policy, a reward model and prompts of 16 to 48 words to a folder, as a user would have them.
    Models of Qwen's sizes are written in bf16, as those on the hub are."""
    tokenizer, rng = word_tokenizer(vocabulary), random.Random(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, model in (
        ("policy", policy(size, mean_length, vocabulary, device=device)),
        ("reward", reward_model(size, vocabulary=vocabulary, device=device)),
    ):
        (model.bfloat16() if size in QWEN else model).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = []
    for _ in range(count):
        words = [f"w{rng.randrange(2, vocabulary)}" for _ in range(rng.randint(16, 48))]
        lines.append(json.dumps({"prompt": " ".join(words)}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


class Ours:
    """This trainer, for single steps. more: other flags; None leaves one out."""

    def __init__(self, folder, epochs, batch, new_tokens, device, steps=1000, **more):
        flags = {
            "model": folder / "policy",
            "reward_model": folder / "reward",
            "data_path": folder / "prompts.jsonl",
            "reasoning": 0,
            "batch_size": batch,
            "mini_batch_size": batch,
            "ppo_epochs": epochs,
            "max_gen_len": new_tokens,
            "max_steps": steps,
            "epochs": 1000,
            "critic_warmup_steps": 0,
            "learning_rate": 1e-9,
            "critic_learning_rate": 1e-9,
            "device": device,
            **more,
        }
        given = [x for k, v in flags.items() if v is not None for x in (f"--{k}", str(v))]
        self.args = train_ppo.parse_args(given)
        world = World(0, 1, torch.device("cuda", 0) if device == "cuda" else torch.device(device))
        self.run = PpoRun(self.args, world)
        self.prompts = self.run.data
        self.number, self.metrics = 0, []

    def step(self):
        """One step -> its rollout."""
        size = self.args.batch_size // self.args.num_generations
        start = self.number * size
        batch = [self.prompts[(start + i) % len(self.prompts)] for i in range(size)]
        metrics, new = take_step(self.run, self.number, batch)
        self.number += 1
        self.metrics.append(metrics)
        return new


def in_bf16(device):
    return fast_dtype("auto", torch.device(device)) == torch.bfloat16


def trl_trainer(folder, batch, new_tokens, callback, device):
    """TRL's PPOTrainer with the same settings. ``callback`` (``Turns``) has the number of steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts]})
    config = PPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=max(callback.epochs),  # TRL allocates for the most epochs; see Turns
        total_episodes=batch * len(callback.epochs),
        response_length=new_tokens,
        local_rollout_forward_batch_size=batch,
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.02,
        missing_eos_penalty=1.0,
        learning_rate=1e-9,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        bf16=in_bf16(device),
        use_cpu=device == "cpu",
        disable_tqdm=True,
    )
    load = AutoModelForCausalLM.from_pretrained
    classify = AutoModelForSequenceClassification.from_pretrained
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=load(folder / "policy"),
        ref_model=load(folder / "policy"),
        reward_model=classify(folder / "reward", num_labels=1),
        value_model=classify(folder / "reward", num_labels=1),
        train_dataset=data,
        callbacks=[callback],
    )


class Turns(TrainerCallback):
    """Sets the PPO epochs of each of TRL's steps (TRL reads the number at every step), and runs one step of
    this trainer with as many after each of them."""

    def __init__(self, epochs, ours=None):
        self.epochs, self.ours, self.seconds = epochs, ours, {"trl": [], "ours": []}

    def on_train_begin(self, args, *rest, **kwargs):
        args.num_ppo_epochs = self.epochs[0]
        self.start = time.perf_counter()

    def on_step_end(self, args, *rest, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.perf_counter()
        self.seconds["trl"].append(end - self.start)
        if self.ours:
            self.one_of_ours(args.num_ppo_epochs)
        done = len(self.seconds["trl"])
        args.num_ppo_epochs = (*self.epochs, 0)[done]
        self.start = time.perf_counter()

    def one_of_ours(self, epochs):
        start = time.perf_counter()
        self.ours.args = self.ours.args.completed(ppo_epochs=epochs)
        self.ours.step()
        self.seconds["ours"].append(time.perf_counter() - start)

    def alone(self):
        """The same steps without TRL."""
        for epochs in self.epochs:
            self.seconds["trl"].append(None)
            self.one_of_ours(epochs)


def measure(size, batch, new_tokens, varying, device):
    """Run both trainers -> one result for each number of PPO epochs."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_inputs(folder, size, new_tokens / 4 if varying else None, VOCABULARY)
        turns = Turns(EPOCHS, Ours(folder, EPOCHS[0], batch, new_tokens, device))
        turns.ours.step()
        if installed("trl"):
            trl_trainer(folder, batch, new_tokens, turns, device).train()
        else:
            turns.alone()
    steps = list(zip(EPOCHS, *turns.seconds.values(), turns.ours.metrics[1:], strict=True))[1:]
    more = {"TRL in": "bfloat16" if in_bf16(device) else "float32"}
    return [
        result(size, batch, new_tokens, varying, epochs, [x[1:] for x in steps if x[0] == epochs]) | more
        for epochs in sorted({step[0] for step in steps})
    ]


def result(size, batch, new_tokens, varying, epochs, steps):
    """One line of results. steps: for each step (TRL's seconds, our seconds, our metrics)."""
    found = {
        "model": size,
        "lengths": "varying" if varying else "fixed",
        "PPO epochs": epochs,
        "batch": batch,
        "max_gen_len": new_tokens,
        "mean length": round(statistics.mean(m["rollout/length"] for *_, m in steps), 1),
        "ours samples/s": spread([batch / ours for _, ours, _ in steps], 2),
    }
    if steps[0][0]:
        found["TRL samples/s"] = spread([batch / trl for trl, *_ in steps], 2)
        found["ratio"] = spread([trl / ours for trl, ours, _ in steps], 2)
    ratio = show(found.get("ratio"))
    print(f"  {size} {found['lengths']}, {epochs} PPO epochs: {ratio} times TRL", flush=True)
    return found


def cases(device):
    sizes = CASES if device == "cpu" else GPU_CASES
    return [partial(measure, *case, varying, device) for case in sizes for varying in (False, True)]


def rows(results):
    for r in results:
        setting = {k: r[k] for k in ("model", "lengths", "PPO epochs", "mean length")}
        rates = {k: show(r.get(k)) for k in ("ours samples/s", "TRL samples/s", "ratio")}
        yield setting | rates


# ------------------------------------------------------------------------------------------------- memory


def use_memory(who, folder, device):
    """Run two steps of batch 32 with responses of 64 tokens, and print the peak memory in GiB. Two, because
    AdamW's moments exist from the second step on."""
    if who == "ours":
        ours = Ours(folder, 1, 32, 64, device)
        for _ in range(2):
            ours.step()
    else:
        trl_trainer(folder, 32, 64, Turns([1, 1]), device).train()
    print(f"peak {peak_memory(device):.3f}")


def memory_cases(device):
    return [partial(memory, device)]


def memory(device):
    """Peak memory of both trainers with a vocabulary of 151,936, hidden size 256 and 4 layers."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), MEMORY_SIZE, None, 151_936, count=64)
        for who in ("ours", "trl") if installed("trl") else ("ours",):
            command = [sys.executable, __file__, who, folder, device]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            peaks[who] = float(done.stdout.split()[-1])
    found = {"vocabulary": 151_936, "hidden": 256, "ours GiB": peaks["ours"]}
    if "trl" in peaks:
        found |= {"TRL GiB": peaks["trl"], "ratio": round(peaks["ours"] / peaks["trl"], 3)}
    return found


if __name__ == "__main__":  # started by memory(), in a process of its own
    use_memory(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
