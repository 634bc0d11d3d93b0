"""Scores, gradients and whole runs on a GPU beside the CPU's; its kernels, waits, memory and processes."""

import gc
import shutil

import on_gpu
import pytest
import tiny
import torch
import transformers
from on_gpu import HALVES, MODELS, MOE, PROMPTS, assert_near, made, memory_of, run_files, train
from same_runs import same_weights

from model.critic import CriticModel
from model.lora import add_adapters
from trainer.compute.attention import ATTENTION
from trainer.compute.batching import Layout
from trainer.compute.fused_layers import KNOWN
from trainer.compute.precision import set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer, pack_sequences, prepare_training
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys

pytestmark = on_gpu.needs_gpu
UNFREEZES = True  # see conftest.py: the models of a run must be gone when the next one looks for free memory


@pytest.fixture(autouse=True)
def precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def prepared(model, device="cuda", dtype=torch.float32, checkpointing=0, lora_r=0):
    """-> (a rollout of the model where it was, with two answers to a prompt, the model and its scorer, a
    critic and its scorer)"""
    prompts = [prompt for prompt in PROMPTS[:12] for _ in range(2)]
    rollout = Sampler(model).sample(prompts, noise_keys(1, 2, range(24)), [0], 10, 1.0)
    critic = CriticModel.from_model(model).eval()
    generator = torch.Generator().manual_seed(0)
    head = critic.value_head.weight.data
    head.copy_(torch.randn(head.shape, generator=generator))  # the same numbers on both devices
    model, critic = model.to(device), critic.to(device)
    model.requires_grad_(True)
    for backbone in (model.base_model, critic.backbone):
        prepare_training(backbone, checkpointing)
        if lora_r:
            pytest.importorskip("peft")
            add_adapters(backbone, lora_r, seed=3)
            for name, p in backbone.named_parameters():
                if "lora_B" in name:  # it starts at zero, and so would the gradient of the other one
                    p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return rollout, (model, PolicyScorer(model, dtype)), (critic, ValueScorer(critic, dtype))


def scored(model, device, *more, shared=False, **others):
    """-> {name: tensor on the CPU}: what one micro-batch gives, and every gradient. shared: whether equal
    prompts are computed once"""
    rollout, (model, policy), (critic, value) = prepared(model, device, *more, **others)
    there = rollout.layout
    assert len({*there.prompt}) == 12
    layout = Layout.of_responses(there.prompt_len, there.response_len, device, there.prompt, shared)
    parts = rollout.tokens.to(device), layout
    logprobs, entropy, balance = policy(*parts, 0.9)
    (logprobs.sin().sum() + balance).backward()
    values, _ = value(*parts)
    values.cos().sum().backward()
    found = {"logprobs": logprobs, "entropy": entropy, "values": values, "balance": torch.as_tensor(balance)}
    for kind, module in (("actor", model), ("critic", critic)):
        found |= {f"{kind}.{n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {name: x.detach().float().cpu() for name, x in found.items()}


def worst_gap(here, there):
    """The largest difference, as a share of the tensor's largest number, and where it is."""
    assert here.keys() == there.keys()
    gaps = {n: ((here[n] - there[n]).abs().max() / (here[n].abs().max() + 1e-3)).item() for n in here}
    name = max(gaps, key=gaps.get)
    return gaps[name], name


def likeness(here, there):
    """The cosine between all gradients of the two, as one vector each."""
    a, b = (torch.cat([x[n].flatten() for n in sorted(here) if "." in n]) for x in (here, there))
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


PARTS = [(name, {}) for name in (*MODELS, *MOE, "wide")]
PARTS += [("Qwen3", {"checkpointing": 1}), ("MiniMind 3 MoE", {"checkpointing": 1}), ("Qwen2", {"lora_r": 4})]


@pytest.mark.parametrize(("name", "more"), PARTS, ids=str)
def test_scores_and_gradients_are_the_cpus(name, more):
    here = scored(made(name), "cpu", **more)
    for shared in (False, True):
        gap, where = worst_gap(here, scored(made(name), "cuda", shared=shared, **more))
        assert gap < 2e-3, (shared, where)
        if name in MOE:
            break


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*MODELS, "wide"])
def test_in_half_precision_gradients_point_where_those_of_fp32_do(name, dtype):
    here, there = scored(made(name), "cpu"), scored(made(name), "cuda", dtype, shared=True)
    assert likeness(here, there) > 0.99
    assert name == "wide" or (here["logprobs"] - there["logprobs"]).abs().max() < 0.2


# ------------------------------------------------------------------------------- what the GPU's own code is


def wide(family, heads):
    """One layer of the sizes of a small real model, so that TF32 would show."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 1, "vocab_size": 640}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": 64}
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_sequences_are_packed_and_layers_fused(family, heads, dtype):
    """Under the precision that a run sets: where TF32 made the comparison fail, all would train padded."""
    set_precision(dtype, torch.device("cuda", 0))
    backbone = wide(family, heads).cuda().base_model
    assert pack_sequences(backbone)
    assert backbone.config._attn_implementation == ATTENTION
    known = [m for m in backbone.modules() if type(m).__name__ in KNOWN]
    assert known
    assert [type(m).__name__ for m in known if "forward" not in vars(m)] == []


@on_gpu.needs_real_gpu
@on_gpu.needs_bf16
def test_the_kernels_that_attention_runs():
    """In bf16 with gradients: flash attention, and none of cuDNN's."""
    set_precision("auto", torch.device("cuda", 0))
    rollout, (_, scorer), _ = prepared(wide("Llama", 2).cuda(), dtype=torch.bfloat16)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        scorer(rollout.tokens, rollout.layout, 1.0)[0].sum().backward()
        torch.cuda.synchronize()
    names = {event.key.lower() for event in profile.key_averages()}
    assert not [n for n in names if "cudnn" in n and ("sdpa" in n or "attention" in n or "flash" in n)]
    if torch.cuda.get_device_capability() >= (8, 0):
        assert [n for n in names if "flash" in n], sorted(names)


def test_a_micro_batch_hardly_waits_for_the_gpu():
    """At most two waits for forward and backward together, the choice of its rows included."""
    rollout, (_, policy), (_, value) = prepared(made("Llama, tied").cuda())
    for scorer, more in ((policy, [1.0]), (value, [])):
        for turn in range(2):  # the first may set something up
            with on_gpu.waits() as found:
                some = rollout.rows(range(8 * turn, 8 * turn + 8), scorer.shares_prompts)
                scorer(some.tokens, some.layout, *more)[0].sum().backward()
        assert len(found) <= 2, (scorer, [str(w.message) for w in found])


# --------------------------------------------------------------------------------------------- whole runs

RUNS = {
    "plain": {},
    "KL in the reward": {"kl_in": "reward", "normalize_reward": 1, "accumulation_steps": 3},
    "old actor": {"update_old_actor_freq": 2, "target_kl": 0.5},
    "several turns": {"env": "Game", "max_gen_len": 24, "kl_in": "reward", "replay_batches": 1},
    "LoRA, checkpointing": {"lora_r": 2, "gradient_checkpointing": 1},
}


@pytest.mark.parametrize("name", [*RUNS, "Qwen2", "Qwen3", "Mistral", "GPT-2", *MOE])
def test_a_run_in_fp32_logs_what_the_cpu_logs(tmp_path, name):
    """Of the usual model with these flags, or of a family, which trains in mixed precision too."""
    files = run_files(tmp_path / "files", None if name in RUNS else name, **RUNS.get(name, {}))
    here = train(tmp_path / "cpu", **{**files, "device": "cpu", "dtype": "float32"})
    assert_near(here, train(tmp_path / "gpu", **files, dtype="float32"), 2e-2)
    if name not in RUNS:
        assert train(tmp_path / "half", **files, dtype="auto")[-1]["rollout/sampler_gap"] < 0.1


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("more", [{}, {"lora_r": 2, "update_old_actor_freq": 2}], ids=str)
def test_a_deterministic_run_resumes_bit_for_bit(tmp_path, more, dtype):
    files = run_files(tmp_path / "files", max_steps=4, save_interval=2, dtype=dtype, deterministic=1, **more)
    try:
        for name in ("whole", "parts"):
            train(tmp_path / name, **files)
        shutil.rmtree(tmp_path / "parts/r/checkpoints/step_4")
        train(tmp_path / "parts", **files, resume="auto")
    finally:
        torch.use_deterministic_algorithms(False)
    tiny.same_run(tmp_path / "whole/r", tmp_path / "parts/r", 4)


@on_gpu.needs_real_gpu
def test_two_processes_equal_one(tmp_path):
    """Each on a GPU of its own, or on the only one."""
    more = {"batch_size": 16, "mini_batch_size": 8, "epochs": 9, "max_steps": 4, "save_interval": 4}
    more |= {"learning_rate": 1e-3, "run_name": "r", "device": "cuda", "dtype": "float32"}
    files = run_files(tmp_path / "files", **more)
    one, two = tmp_path / "one/r", tmp_path / "two/r"
    train(one.parent, **files)
    half = {"batch_size": 8, "mini_batch_size": 4, "out_dir": two.parent, "device": "cuda:0"}
    tiny.finish(tiny.launch_torchrun(2, tiny.flags(**{**files, **half})), seconds=180)
    assert_near(*(tiny.read_jsonl(folder / "metrics.jsonl") for folder in (one, two)), 1e-3)
    same_weights(one, two, 4, names=("actor", "critic"), most=1e-4)


@on_gpu.needs_real_gpu
def test_a_run_with_too_little_memory_takes_smaller_pieces(tmp_path):
    """The pieces change no result. Memory for about half of the first micro-batch is given."""
    tokenizer = tiny.word_tokenizer([*tiny.WORDS, *(f"w{i}" for i in range(30_000))], chat=True)
    policy = tiny.save_policy_dir(tmp_path / "policy", tokenizer, hidden=256, layers=4)
    sizes = {"batch_size": 32, "mini_batch_size": 32, "max_gen_len": 100, "max_steps": 2, "ppo_epochs": 1}
    files = run_files(tmp_path / "files", dtype="float32", epochs=9, critic_warmup_steps=0, **sizes)
    files |= {"model": policy, "reward_model": tiny.save_reward_dir(tmp_path / "reward", tokenizer)}
    torch.cuda.reset_peak_memory_stats()
    wanted = train(tmp_path / "whole", **files)
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    with memory_of(0.7 * peak):
        found = train(tmp_path / "less", **files)
    assert_near(wanted, found, 2e-2)
    assert max(step.get("perf/out_of_memory", 0) for step in found) > 0
