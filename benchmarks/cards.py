"""Peak memory of two runs that should fit a GPU of 24 GB, with no more than that to allocate.

"0.5B": all weights train, also with torch's ``expandable_segments``, which leave fewer gaps in memory. "1.5B,
LoRA": adapters train. All have a reward model of the policy's size, and 64
prompts of 60 tokens (``--max_seq_len 256``) with responses of 512 tokens. The models have the shapes of
Qwen 2.5, their heads have the embedding's weights, and all weights are random. On a larger GPU torch may
allocate no more than the 24 GB (``set_per_process_memory_fraction``). Each case runs in a process of its own,
two steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import made, vocabulary_of
from end_to_end import Ours, word_tokenizer

CARD = 24 * 10**9  # bytes; what is sold as 24 GB has 1.7e9 more, part of which CUDA itself takes
STEPS = 2
HALF = {"size": "0.5B", "reward": "0.5B", "flags": {"gradient_checkpointing": 1}}
CASES = {
    "0.5B": HALF,
    "1.5B, LoRA": {"size": "1.5B", "reward": "1.5B", "flags": {"gradient_checkpointing": 1, "lora_r": 16}},
    "0.5B, expandable": {**HALF, "environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
}
LENGTHS = {"batch": 64, "mini": 16, "max_seq_len": 256, "max_gen_len": 512}


def write_models(folder, size, reward, prompts=64):
    """A policy, a reward model and prompts of 60 words, as files; the models in bf16."""
    vocabulary = vocabulary_of(size)
    tokenizer = word_tokenizer(vocabulary)
    torch.manual_seed(0)
    for name, kind, more in (("policy", size, {}), ("reward", reward, {"classifier": True, "num_labels": 1})):
        with torch.device("cuda"):
            model = made(kind, vocabulary, tie_word_embeddings=True, **more)
        model.bfloat16().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        del model
    lines = [" ".join(f"w{2 + (64 * n + i) % 5000}" for i in range(60)) for n in range(prompts)]
    text = "".join(json.dumps({"prompt": line}) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text(text)


def limit_memory(size):
    """From here on there are ``size`` bytes of GPU memory."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    if size < total:
        torch.cuda.set_per_process_memory_fraction(size / total)


def use(name, folder, lengths=LENGTHS, card=CARD):
    """Run a case's steps in this process, and print what it took as JSON."""
    case = CASES[name]
    write_models(folder, case["size"], case["reward"], lengths["batch"])
    limit_memory(card)
    torch.cuda.reset_peak_memory_stats()
    more = {"max_seq_len": lengths["max_seq_len"], "mini_batch_size": lengths["mini"], **case["flags"]}
    ours = Ours(folder, 1, lengths["batch"], lengths["max_gen_len"], "cuda", **more)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        ours.step()
        seconds.append(round(time.perf_counter() - start, 1))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    found = {"run": name, "flags": " ".join(f"--{k} {v}" for k, v in more.items())}
    found |= {"allocated GB": round(peaks[0] / 1e9, 2), "reserved GB": round(peaks[1] / 1e9, 2)}
    found |= {"smaller pieces": max(m.get("perf/out_of_memory", 0) for m in ours.metrics)}
    print(json.dumps(found | {"seconds a step": seconds}))


def cases(device):
    if device == "cpu":
        raise SystemExit("error: cards: needs a GPU")
    return [partial(measure, name) for name in CASES]


def measure(name):
    """Run a case in a process of its own -> what it took, or "error" and the last line that it said."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, folder]
        environment = os.environ | CASES[name].get("environment", {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
    return json.loads(last[0]) if done.returncode == 0 else {"run": name, "error": " ".join(last)}


def rows(results):
    names = ("run", "flags", "allocated GB", "reserved GB", "smaller pieces", "seconds a step", "error")
    return [{name: r.get(name, "") for name in names} for r in results]


if __name__ == "__main__":  # started by measure(), in a process of its own
    use(sys.argv[1], Path(sys.argv[2]))
