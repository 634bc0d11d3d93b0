"""Shared by all benchmarks: the models that are measured, alternating timing, facts about the machine."""

import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("RESULTS") or ROOT / "benchmarks" / "results")
sys.path.insert(0, str(ROOT))

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from atomic_files import write_whole

VOCABULARY = 6400
QWEN_VOCABULARY = 151_936
# the sizes of MiniMind 2, of a small model, and of Qwen 2.5
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
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "1.5B": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
}
QWEN = ("0.5B", "1.5B")  # these are Qwen2 models, the others are Llamas
EOS, PAD = 0, 1


def made(size, vocabulary, classifier=False, **more):
    """A random model of this size (a name of SIZES, or the sizes), on torch's default device. Every model has
    a head of its own, also where Qwen's has the embedding's weights."""
    qwen = size in QWEN
    config_of, causal, scoring = (
        (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification)
        if qwen
        else (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification)
    )
    sizes = SIZES[size] if isinstance(size, str) else size
    ids = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    config = config_of(vocab_size=vocabulary, max_position_embeddings=2048, **sizes, **ids, **more)
    return (scoring if classifier else causal)(config).eval()


def vocabulary_of(size):
    return QWEN_VOCABULARY if size in QWEN else VOCABULARY


def policy(size, mean_length=None, vocabulary=VOCABULARY, seed=0, device="cpu"):
    """A random model that ends a response with probability 1 / ``mean_length`` at every token; None: never.

    Every embedding has the same large first coordinate, and only the head's rows for EOS and pad use it. So
    the logit of EOS is the same in every state.
    """
    torch.manual_seed(seed)
    with torch.device(device), torch.no_grad():
        model = made(size, vocabulary, tie_word_embeddings=False)
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


def reward_model(size, seed=1, vocabulary=VOCABULARY, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        return made(size, vocabulary, classifier=True, num_labels=1)


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
    """A ``spread`` as the text of a table cell; None stands for a peer that is not installed."""
    if value is None:
        return "not installed"
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


def matrix_rate(dtype=torch.float32, size=None, device="cpu"):
    """FLOP/s of a large matrix product: the best of six. On a GPU products are larger, and four follow each
    other, so that starting them and waiting for them costs nothing."""
    gpu = device != "cpu"
    size, products = size or (8192 if gpu else 2048), 4 if gpu else 1
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.empty_like(a)

    def multiply():
        for _ in range(products):
            torch.mm(a, a, out=b)

    return products * 2 * size**3 / min(in_turns({"product": multiply}, 6)["product"])


def copy_rate(device="cpu"):
    """Bytes read and written per second by a large copy: the best of four. On a GPU copies are larger, and
    eight follow each other."""
    gpu = device != "cpu"
    a, copies = torch.empty(1 << (28 if gpu else 26), device=device), 8 if gpu else 1
    b = torch.empty_like(a)

    def copy():
        for _ in range(copies):
            b.copy_(a)

    return copies * 2 * a.nbytes / min(in_turns({"copy": copy}, 4)["copy"])


def read(path):
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def peak_memory(device="cpu"):
    """The largest memory that this process has had so far, in GiB: of the CPU, or of the GPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**30
    # Not getrusage: its maximum includes the memory of the parent process at the start.
    status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def write_results(name, results):
    """Into benchmarks/results, or into the folder that the environment variable RESULTS names: a file of its
    own, or, where ALL_RESULTS names a file, an entry of that. Call it after each case: a process that is
    ended by force then loses only the case it was at."""
    RESULTS.mkdir(exist_ok=True, parents=True)
    found = {"machine": machine(), **results}
    path = RESULTS / f"{name}.json"
    if os.environ.get("ALL_RESULTS"):
        path = Path(os.environ["ALL_RESULTS"])
        found = json.loads(read(path) or "{}") | {name: found}
    text = json.dumps(found, indent=2) + "\n"
    write_whole(path, text)
    print(f"written to {path}", flush=True)


def installed(name):
    """Whether this package can be imported here."""
    return importlib.util.find_spec(name) is not None


def table(rows):
    """Dicts -> a Markdown table with all their keys; without dicts, no text."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)
