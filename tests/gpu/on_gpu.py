"""Shared by the tests that need a GPU: what they are skipped by, models, prompts, and runs of the trainer.

A simulated GPU can run these tests too. It is a tool that is not in this repository: it lets torch's code
for CUDA run on a CPU, as a device with the name "simulated". It has no memory of its own, no kernels of CUDA
and no second process, so it skips the tests that are marked ``needs_real_gpu``.
"""

import warnings
from contextlib import contextmanager

import pytest
import tiny
import torch
import transformers
from test_families import FAMILIES, SIZES, build

from model.saving import save_policy
from trainer import train_ppo
from trainer.generation.cuda_graphs import CudaGraphs

THERE = torch.cuda.is_available()
REAL = THERE and torch.cuda.get_device_name() != "simulated"
needs_gpu = pytest.mark.skipif(not THERE, reason="needs a GPU")
needs_real_gpu = pytest.mark.skipif(not REAL, reason="needs a real GPU")
needs_bf16 = pytest.mark.skipif(
    not THERE or not torch.cuda.is_bf16_supported(including_emulation=False), reason="needs a GPU with bf16"
)
HALVES = [pytest.param(torch.bfloat16, marks=needs_bf16), torch.float16]

PROMPTS = [[2 + (3 * i + j) % 7 for j in range(1 + (5 * i) % 9)] for i in range(24)]
MODELS = {name: FAMILIES[name] for name in ("Llama, tied", "Qwen2", "Qwen3", "Mistral", "GPT-2", "Gemma 3")}
MOE = {name: FAMILIES[name] for name in ("MiniMind 2 MoE", "MiniMind 3 MoE", "Qwen3-MoE")}
WIDE = {**SIZES, "vocab_size": 151_936, "tie_word_embeddings": True}  # the vocabulary of Qwen 2.5


GAME = """class Game:
    def reset(self, seed):
        self.turns = seed % 2
    def step(self, text):
        self.turns += 1
        return "abcdefgh"[len(text) % 8], text.count("b") - 0.3, self.turns == 3
"""


def made(name):
    """A random model of a family of MODELS or MOE, or "wide", on the CPU. Its name decides the weights."""
    kinds = {**MODELS, **MOE, "wide": lambda: transformers.Qwen2Config(**WIDE)}
    return build(kinds[name](), spread=2.0).eval()


def changed(model):
    """Change every weight of the model a little, in place -> the model"""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.linspace(-1, 1, p.numel(), device=p.device).view(p.shape).to(p.dtype))
    return model


@contextmanager
def no_graphs():
    """Decoding steps are called and not captured, in the same shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphs, "run", lambda self, key, step, *more, **others: step())
        yield


@contextmanager
def waits():
    """-> a list that fills with the warnings of operations for which the host waits for the GPU"""
    before, found = torch.cuda.get_sync_debug_mode(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [w for w in caught if "synchronizing CUDA operation" in str(w.message)]


@contextmanager
def memory_of(size):
    """At most this many bytes of the GPU's memory are given in this block."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def run_files(folder, name=None, **more):
    """Flags of a short run with a policy of the family ``name`` (None: tiny.py's Llama) and tiny.py's other
    files, every file in ``folder``."""
    if "lora_r" in more:
        pytest.importorskip("peft")
    folder.mkdir(exist_ok=True)
    files = tiny.run_files(folder)
    if "env" in more:
        (folder / "game.py").write_text(GAME)
        more["env"] = f"{folder / 'game.py'}:{more['env']}"
    if name is not None:
        files["model"] = folder / "policy.pth"
        save_policy(made(name), tiny.word_tokenizer(tiny.WORDS, chat=True), files["model"], torch.float32)
    sizes = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 8, "max_steps": 3, "ppo_epochs": 2}
    sizes |= {"critic_warmup_steps": 1, "log_interval": 1000, "eval_interval": 0, "save_interval": 100}
    return {**files, **sizes, **more}


def train(out_dir, **values):
    """Run train_ppo.py's main -> the lines of metrics.jsonl of the run in out_dir/r"""
    before = torch.get_float32_matmul_precision()
    try:
        train_ppo.main(tiny.flags(**{"device": "cuda", "run_name": "r", **values}, out_dir=out_dir))
    finally:
        torch.set_float32_matmul_precision(before)  # a run sets it for its process
    return tiny.read_jsonl(out_dir / "r" / "metrics.jsonl")


def assert_near(here, there, tolerance):
    """Two runs logged the same numbers, up to rounding. Times are left out. Shares of tokens beyond a bound
    may differ by a few tokens, which lie at the bound."""
    for one, other in zip(here, there, strict=True):
        for name, value in one.items():
            if value is not None and not name.startswith("perf/") and "sampler_gap" not in name:
                least = max(tolerance, 0.1) if name.endswith("clip_fraction") else tolerance
                assert other[name] == pytest.approx(value, rel=tolerance, abs=least), name
