"""The memory that a run needs: by hand, against a measured run, and what is said where it is too little."""

import subprocess
import sys

import pytest
import torch
from tiny import ROOT, run_files, tiny_llama, train

from errors import InputError
from trainer import memory_plan, train_ppo
from trainer.memory_plan import check_memory

CPU = torch.device("cpu")
TINY = {"batch_size": 4, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 1, "critic_warmup_steps": 0}


def arguments(*argv):
    return train_ppo.parse_args(["--batch_size", "8", "--max_gen_len", "6", "--max_seq_len", "10", *argv])


def test_weights_and_optimizers_by_hand():
    model = tiny_llama(
        10
    )  # hidden 32, 1 layer, tied: 10 x 32 embeddings, two norms in the layer and one more
    linear = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    total = linear + 10 * 32 + 3 * 32
    plan = memory_plan.memory_plan(arguments(), model, model, CPU, torch.bfloat16)
    sampler, frozen = 2 * total + 2 * linear, 2 * linear + 4 * (total - linear)
    assert plan["weights"] == sampler + 2 * frozen + 4 * total
    assert plan["optimizers"] == 12 * 2 * total
    assert plan["KV cache"] == 8 * 16 * (2 * 1 * 16 * 2)  # 8 slots of 16 tokens, one head of 16 numbers, bf16
    adapters = memory_plan.memory_plan(arguments("--lora_r", "2"), model, model, CPU, torch.bfloat16)
    assert adapters["optimizers"] == 12 * 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))


def test_held_out_prompts_and_accumulation_by_hand():
    model = tiny_llama(10)
    sequence = 16 * 2 * 16 * 2  # 16 tokens, keys and values, one head of 16 numbers, bf16

    def plan(held_out=0, *argv):
        args = arguments("--mini_batch_size", "4", *argv)
        return memory_plan.memory_plan(args, model, model, CPU, torch.bfloat16, held_out)

    caches = [plan(n)["KV cache"] / sequence for n in (0, 5, 20, 1000)]
    assert caches == [8, 8, 20, 256]  # --batch_size, then the evaluation, at most 256 at a time
    copies = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)  # the linear layers' weights in bf16
    one, four = (plan(0, "--accumulation_steps", n)["micro-batch"] - copies for n in ("1", "4"))
    assert one == pytest.approx(4 * four)


def test_a_run_counts_its_held_out_prompts(monkeypatch, tmp_path):
    counted = []
    monkeypatch.setattr(train_ppo, "check_memory", lambda *given: counted.append(given[-1]))
    files = run_files(tmp_path, count=8)
    train(**files, eval_data_path=files["data_path"], **TINY, out_dir=tmp_path / "out", run_name="r")
    train(**files, **TINY, out_dir=tmp_path / "out", run_name="s")
    assert counted == [8, 0]


def test_too_little_memory_is_said_before_anything_is_built(monkeypatch):
    model, args = tiny_llama(10), arguments("--model", "x", "--data_path", "x", "--reward_url", "http://x")
    plan = memory_plan.memory_plan(args, model, model, CPU, torch.float32)
    fixed = plan["weights"] + plan["optimizers"]
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: fixed - 1)
    with pytest.raises(InputError, match=r"--model x: the run needs .* are free on cpu; add --lora_r"):
        check_memory(args, model, model, CPU, torch.float32)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: fixed + 1)
    assert "in smaller pieces" in check_memory(args, model, model, CPU, torch.float32)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 1 << 50)
    assert "pieces" not in check_memory(args, model, model, CPU, torch.float32)


def test_processes_on_one_machine_share_its_memory(monkeypatch):
    alone = memory_plan.free_memory(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_plan.free_memory(CPU) == pytest.approx(alone / 4, rel=0.2)


MEASURE = """
import sys, threading, time
import psutil, torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trainer import train_ppo as T
from trainer.memory_plan import memory_plan
from trainer.runs.distributed import init_world
from dataset.lm_dataset import RLAIFDataset

tokenizer = AutoTokenizer.from_pretrained("model/demo/policy")
sizes = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6)
ids = dict(vocab_size=6400, eos_token_id=2, bos_token_id=1, pad_token_id=0, tie_word_embeddings=True)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_key_value_heads=2)).eval()
argv = ["--model", "x", "--data_path", "dataset/demo/ppo.jsonl", "--reward_fn", sys.argv[1]]
argv += ["--critic_warmup_steps", "0", "--max_steps", "1", "--batch_size", "16", "--max_gen_len", "16"]
argv += ["--max_seq_len", "24", "--reasoning", "0", "--dtype", "float32", "--out_dir", sys.argv[2]]
args, world = T.parse_args(argv), init_world("cpu")
prompts = RLAIFDataset(args.data_path, tokenizer, args.max_seq_len)
T.keep_freed_memory()
rss = psutil.Process().memory_info().rss
planned = sum(memory_plan(args, model, model, world.device, torch.float32).values())
peak = [0]

def watch():
    while True:
        peak[0] = max(peak[0], psutil.Process().memory_info().rss)
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
run = T.build_run(args, world, model, tokenizer, prompts)
T.prepare_frozen(run)
order = T.RecordBatches(len(prompts), 42, 0, 1, args.batch_size, args.mini_batch_size, 0, 1)
with T.record_loader(prompts, order, 0) as batches:
    for step in order.steps:
        T.learn(run, step, T.collect(run, step, batches, order.positions))
print(planned, peak[0] - rss)
"""


def test_the_plan_is_near_what_a_run_takes(tmp_path):
    """A model of 13M parameters in fp32, of whose memory the weights are the larger part."""
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompts, responses, answers):\n    return [len(r) % 3 for r in responses]\n")
    process = subprocess.run(
        [sys.executable, "-c", MEASURE, f"{reward}:score", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    planned, measured = map(int, process.stdout.split()[-2:])
    assert 0.75 * measured < planned < 1.35 * measured, (planned / 1e6, measured / 1e6)
