"""Samples a second of whole PPO steps: this trainer beside TRL's, in one process, step by step in turns.

The peer is TRL 1.12.0's PPOTrainer, the last release that has PPO (requirements-bench.txt). Both get the
same policy, reward model, prompts, batch, PPO epochs (one minibatch each) and longest response, and start the
critic from the reward model. TRL trains in fp32, ours in what ``--dtype auto`` chooses. "fixed": no response
ends early. "varying": an EOS that each token may be with probability 4 / max_gen_len. A step is rollout,
rewards, log-probs, values and updates; first of one PPO epoch, then of four. The first is warm-up, and of
ours the second as well, which takes the last of its memory from the system and keeps it. Rates are so low
that nothing is learned: lengths stay what they are. Memory: the peak of one such step with a vocabulary of
151,936, each trainer in its own process.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import EOS, PAD, VOCABULARY, policy, read, reward_model, show, spread
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

from dataset.order import local_positions
from trainer import train_ppo
from trainer.distributed import World
from trainer.inputs import load_inputs
from trainer.ppo_run import round_frozen

CHAT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
CASES = [("128x4", 64, 128), ("512x8", 32, 64)]  # (size, batch, longest response)
EPOCHS = [1, 1, 1, 4]  # PPO epochs of each step; the first step warms up
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
    """Policy, reward model and prompts of 16 to 48 words, as a user has them on disk."""
    tokenizer, rng = word_tokenizer(vocabulary), random.Random(0)
    for name, model in (
        ("policy", policy(size, mean_length, vocabulary)),
        ("reward", reward_model(size, vocabulary=vocabulary)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = []
    for _ in range(count):
        words = [f"w{rng.randrange(2, vocabulary)}" for _ in range(rng.randint(16, 48))]
        lines.append(json.dumps({"prompt": " ".join(words)}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


class Ours:
    """This trainer, one step at a time."""

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
        self.args = train_ppo.parse_args([x for k, v in flags.items() for x in (f"--{k}", str(v))])
        actor, tokenizer, self.prompts, _ = load_inputs(self.args)
        self.run = train_ppo.build_run(
            self.args, World(0, 1, torch.device(device)), actor, tokenizer, self.prompts
        )
        round_frozen(self.run)
        self.number, self.metrics = 0, []

    def step(self):
        size = self.args.batch_size
        start = self.number * size
        batch = [self.prompts[(start + i) % len(self.prompts)] for i in range(size)]
        positions = local_positions(size, size, 0, 1)
        collected = train_ppo.collect(self.run, self.number, iter([batch]), positions)
        metrics, _ = train_ppo.learn(self.run, self.number, collected)
        self.number += 1
        self.metrics.append(metrics)


def trl_trainer(folder, batch, new_tokens, callback, cpu):
    """TRL's PPOTrainer with the same settings, for the steps of the callback."""
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
        num_ppo_epochs=max(callback.epochs),  # room for so many; see Turns
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
        bf16=False,
        use_cpu=cpu,
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
    """TRL's steps, of ``epochs`` PPO epochs, which it reads at each; after each, one like it of ours."""

    def __init__(self, epochs, ours=None):
        self.epochs, self.ours, self.seconds = epochs, ours, {"trl": [], "ours": []}

    def on_train_begin(self, args, *rest, **kwargs):
        args.num_ppo_epochs = self.epochs[0]
        self.start = time.perf_counter()

    def on_step_end(self, args, *rest, **kwargs):
        end = time.perf_counter()
        self.seconds["trl"].append(end - self.start)
        if self.ours:
            self.ours.args.ppo_epochs = args.num_ppo_epochs
            self.ours.step()
            self.seconds["ours"].append(time.perf_counter() - end)
        done = len(self.seconds["trl"])
        args.num_ppo_epochs = (*self.epochs, 0)[done]
        self.start = time.perf_counter()


def measure(size, batch, new_tokens, varying, device):
    """-> a result for each number of PPO epochs."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_inputs(folder, size, new_tokens / 4 if varying else None, VOCABULARY)
        turns = Turns(EPOCHS, Ours(folder, EPOCHS[0], batch, new_tokens, device))
        turns.ours.step()
        trl_trainer(folder, batch, new_tokens, turns, device == "cpu").train()
    steps = list(zip(EPOCHS, *turns.seconds.values(), turns.ours.metrics[1:], strict=True))[1:]
    return [
        result(size, batch, new_tokens, varying, epochs, [step[1:] for step in steps if step[0] == epochs])
        for epochs in sorted({step[0] for step in steps})
    ]


def result(size, batch, new_tokens, varying, epochs, steps):
    """steps: (TRL's seconds, our seconds, our metrics) of each."""
    found = {
        "model": size,
        "lengths": "varying" if varying else "fixed",
        "PPO epochs": epochs,
        "batch": batch,
        "max_gen_len": new_tokens,
        "mean length": round(statistics.mean(m["rollout/length"] for *_, m in steps), 1),
        "ours samples/s": spread([batch / ours for _, ours, _ in steps], 2),
        "TRL samples/s": spread([batch / trl for trl, *_ in steps], 2),
        "ratio": spread([trl / ours for trl, ours, _ in steps], 2),
    }
    print(
        f"  {size} {found['lengths']}, {epochs} PPO epochs: {found['ratio']['median']} times TRL", flush=True
    )
    return found


def run(device, cases=CASES):
    return [x for case in cases for varying in (False, True) for x in measure(*case, varying, device)]


def rows(results):
    for r in results:
        setting = {k: r[k] for k in ("model", "lengths", "PPO epochs", "mean length")}
        rates = {k: r[k]["median"] for k in ("ours samples/s", "TRL samples/s")}
        yield setting | rates | {"ratio": show(r["ratio"])}


# ------------------------------------------------------------------------------------------------- memory


def use_memory(who, folder, device):
    """Two steps of batch 32 with responses of 64 tokens, since AdamW's moments are there from the second on;
    prints the peak memory in GiB."""
    if who == "ours":
        ours = Ours(folder, 1, 32, 64, device)
        for _ in range(2):
            ours.step()
    else:
        trl_trainer(folder, 32, 64, Turns([1, 1]), device == "cpu").train()
    print(f"peak {peak_memory(device):.3f}")


def peak_memory(device):
    """The most that this process has held so far, in GiB: of the CPU's memory, or of the GPU's."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**30
    # Not getrusage: its maximum begins with what the process that started this one held.
    status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def memory(device):
    """Peak memory of both at a vocabulary of 151,936, hidden size 256, 4 layers."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), MEMORY_SIZE, None, 151_936, count=64)
        for who in ("ours", "trl"):
            command = [sys.executable, __file__, who, folder, device]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            peaks[who] = float(done.stdout.split()[-1])
    return {"vocabulary": 151_936, "hidden": 256, "ours GiB": peaks["ours"], "TRL GiB": peaks["trl"]} | {
        "ratio": round(peaks["ours"] / peaks["trl"], 3)
    }


if __name__ == "__main__":  # started by memory(), in a process of its own
    use_memory(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
