"""Shared by all benchmarks: the models that are measured, alternating timing, facts about the machine."""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

VOCABULARY = 6400
# the sizes of MiniMind 2, and of a small model
SIZES = {
    "512x8": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1408,
    },
    "128x4": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
    },
}
EOS, PAD = 0, 1


def llama_config(size, vocabulary=VOCABULARY, **more):
    sizes = SIZES[size] if isinstance(size, str) else size
    ids = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    return LlamaConfig(vocab_size=vocabulary, max_position_embeddings=1024, **sizes, **ids, **more)


def policy(size, mean_length=None, vocabulary=VOCABULARY, seed=0):
    """A random Llama that ends a response with probability 1 / ``mean_length`` at every token; None: never.

    Every embedding has the same large first coordinate, and only the head's rows for EOS and pad use it. So
    the logit of EOS is the same in every state.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(size, vocabulary, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        tokens = torch.randint(2, vocabulary, (4, 32))
        state = model.base_model(tokens).last_hidden_state[..., 0].mean()
        head[[EOS, PAD]] = 0.0
        # Both are never sampled. (Peers would take a sampled pad token for padding.)
        head[[EOS, PAD], 0] = -30.0 / state
        for _ in range(4 if mean_length else 0):
            odds = model(tokens).logits.softmax(-1)[..., EOS].mean() * (mean_length - 1)
            head[EOS, 0] -= odds.log() / state
    return model


def reward_model(size, seed=1, vocabulary=VOCABULARY):
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(llama_config(size, vocabulary, num_labels=1)).eval()


def in_turns(functions, repetitions, warm_up=1):
    """Run the functions alternately, each ``repetitions`` times after ``warm_up`` -> {name: [seconds, …]}."""
    seconds = {name: [] for name in functions}
    for repetition in range(-warm_up, repetitions):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values, digits=3):
    """Numbers -> {"median", "least", "most"}."""
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def show(value):
    """A ``spread`` as the text of a table cell."""
    if value["least"] == value["most"]:  # measured only once
        return str(value["median"])
    return f"{value['median']} ({value['least']} to {value['most']})"


def machine():
    """The machine and versions that the figures were measured with."""
    facts = read("/proc/cpuinfo").splitlines()
    names = {line.split(":")[1].strip() for line in facts if "model name" in line}
    result = {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        result["gpu"] = torch.cuda.get_device_name()
    return result


def matrix_rate(dtype=torch.float32, size=2048, device="cpu"):
    """FLOP/s of a large matrix product: the best of six."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds = in_turns({"product": lambda: a @ a}, 6)["product"]
    return 2 * size**3 / min(seconds)


def copy_rate(device="cpu"):
    """Bytes read and written per second by a large copy: the best of four."""
    a = torch.empty(1 << 26, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / min(in_turns({"copy": lambda: b.copy_(a)}, 4)["copy"])


def read(path):
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def write_results(name, results):
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {path.relative_to(ROOT)}")


def table(rows):
    """Dicts with the same keys -> a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)
