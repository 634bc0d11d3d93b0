"""The memory that a run needs: by hand, against a measured run, and what is said where it is too little."""

import re
from functools import cache

import pytest
import torch
import transformers as T
from same_runs import same_metrics, same_weights
from tiny import read_jsonl, refused, run_files, tiny_llama, train

from errors import InputError
from trainer import memory_plan as plans
from trainer import run as ppo_run
from trainer import train_ppo
from trainer.memory_plan import (
    GB,
    ModelSizes,
    PlannedRun,
    check_loading,
    check_memory,
    fitted_plan,
    memory_plan,
)
from trainer.rollout import RolloutEngine

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
TINY = {"batch_size": 4, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 1, "critic_warmup_steps": 0}
QWEN = {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True, "num_labels": 1}


LARGE = ["--model", "x", "--batch_size", "64", "--mini_batch_size", "16", "--max_gen_len", "512"]
# tiny_llama(10): hidden 32, one layer, tied: 10 x 32 embeddings, two norms in the layer and one more
LINEAR = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
TABLE = 10 * 32
TOTAL = LINEAR + TABLE + 3 * 32
FROZEN = 2 * TOTAL  # bytes of a copy that does not train, in bf16
ADAPTERS = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
ADAPTED = {"actor": 4 * TOTAL + 4 * ADAPTERS, "critic": 4 * ADAPTERS, "gradients": 4 * ADAPTERS}
ADAPTED |= {"moments": 8 * 2 * ADAPTERS, "reference": None}


def case_of(*argv, model=None, start=None, rewards=(), device=CPU, dtype=BF16, shard=0, processes=1):
    """A run of these flags. start: what the critic starts from, by default the model itself."""
    model = model or tiny_llama(10)
    more = ["--data_path", "x", "--reward_url", "http://x", "--batch_size", "8", "--max_gen_len", "6"]
    args = train_ppo.parse_args([*more, "--max_seq_len", "10", *argv]).completed(shard=shard)
    models = {"actor": ModelSizes(model, dtype)}
    if args.advantage == "gae":
        models["critic"] = ModelSizes((start or model).base_model, dtype)
    return PlannedRun(
        args=args,
        device=device,
        dtype=dtype,
        models=models,
        rewards=[ModelSizes(reward, dtype) for reward in rewards],
        responses=args.batch_size,
        width=args.max_seq_len + args.max_gen_len,
        processes=processes,
    )


def planned(*argv, budget=plans.LEAST_TOKENS, **more):
    return memory_plan(case_of(*argv, **more), token_budget=budget)


def standing(*argv, **more):
    phases = planned(*argv, **more).phases
    both = {part: size for part, size in phases["update"].items() if size and part in phases["rollout"]}
    assert both.pop("KV cache")  # it stays between rollouts
    return both


@cache
def half_on_meta():
    """A policy and a reward model of Qwen2.5-0.5B's shape, on no device."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = T.Qwen2Config(**dict(zip(names, (896, 24, 14, 4864), strict=True)), **QWEN)
    with torch.device("meta"):
        policy = T.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return policy, T.AutoModelForSequenceClassification.from_config(config, dtype=BF16)


def exact_llama():
    model = tiny_llama(10)
    for p in model.parameters():
        p.data = p.data.to(BF16).float()
    return model


@pytest.mark.parametrize(
    ("argv", "more", "parts"),
    [
        ("", {}, {"moments": 8 * 2 * TOTAL, "sampler": 2 * (TOTAL + TABLE), "reference": FROZEN}),
        ("", {"device": GPU}, {"sampler": 2 * TOTAL}),  # a CPU lays out the head once more
        ("--moments_dtype bfloat16", {}, {"moments": 4 * 2 * TOTAL}),
        ("--update_old_actor_freq 2", {}, {"old actor": FROZEN}),
        ("--kl_coef 0 --update_old_actor_freq 2", {}, {"old actor": FROZEN, "reference": None}),
        ("", {"dtype": torch.float32}, {"reference": 4 * TOTAL, "sampler": 4 * (TOTAL + TABLE)}),
        ("", {"rewards": [tiny_llama(10)] * 2}, {"reward models": 2 * 4 * TOTAL}),
        ("", {"rewards": [tiny_llama(10).half()], "dtype": torch.float32}, {"reward models": 2 * TOTAL}),
        ("--advantage reinforce", {}, {"critic": None, "moments": 8 * TOTAL}),
        ("--ema_beta 0.9", {}, {"average": 4 * TOTAL}),
        ("--ema_beta 0.9", {"device": GPU}, {"average": None}),  # it is in main memory
        ("--offload_frozen 1", {}, {"reference": None}),
        # Actor, critic and reference share the frozen weights: nothing is rounded that would change
        ("--lora_r 2", {"rewards": [tiny_llama(10)]}, ADAPTED | {"reward models": 4 * TOTAL}),
        ("--lora_r 2", {"model": exact_llama()}, ADAPTED | {"actor": 2 * TOTAL + 4 * ADAPTERS}),
    ],
)
def test_what_stands_by_hand(argv, more, parts):
    wanted = {"actor": 4 * TOTAL, "critic": 4 * TOTAL, "average": None, "gradients": 4 * TOTAL} | parts
    found = standing(*argv.split(), **more)
    found["gradients"] = planned(*argv.split(), **more).phases["update"]["gradients"]  # of one at a time
    assert {part: found.get(part) for part in wanted} == wanted


def test_a_process_of_a_sharded_run_has_its_part_of_what_stays_by_hand():
    given = {"rewards": [tiny_llama(10)], "device": GPU}
    all_of_it = standing("--update_old_actor_freq", "2", **given)
    sampler = all_of_it.pop("sampler")
    part = planned("--update_old_actor_freq", "2", shard=1, processes=4, **given)
    quarters = {name: size // 4 for name, size in all_of_it.items()}
    assert quarters.items() <= part.phases["update"].items()
    assert "sampler" not in part.phases["update"]
    assert part.phases["rollout"]["sampler"] == sampler
    assert part.phases["update"]["gradients"] == 4 * TOTAL // 4
    assert part.phases["update"]["gathered"] > 4 * TOTAL
    assert planned(shard=1, processes=1) == planned()  # alone it has all


def test_keys_and_values_and_activations_by_hand():
    sequence = 16 * 2 * 16 * 2  # 16 tokens, keys and values, one head of 16 numbers, bf16
    case = case_of()
    caches = []
    for case.responses in (8, 20, 1000):
        caches.append(memory_plan(case).phases["rollout"]["KV cache"] / sequence)
    assert caches == [8, 24, 256]  # in eights, at most 256 at a time
    case.responses = 8
    assert memory_plan(case).phases["rollout"]["logits"] == 16 * 8 * 10  # rows of ten words

    def activations(*argv):
        args = ["--batch_size", "64", "--mini_batch_size", "64", "--max_gen_len", "200", *argv]
        return planned(*args, budget=1 << 20).phases["update"]["micro-batch"]

    whole, half, quarter = (activations("--accumulation_steps", n) for n in ("2", "4", "8"))
    assert whole - half == pytest.approx(2 * (half - quarter), rel=0.01)


@pytest.mark.parametrize("device", [GPU, CPU])
def test_each_remedy_of_the_message_takes_less(device):
    """Where nothing fits, the line names flags: each of them makes the largest plan smaller."""
    policy, reward = half_on_meta()
    given = {"model": policy, "start": reward, "rewards": [reward], "device": device}
    plan = planned(*LARGE, **given)
    phases = planned(*LARGE, "--offload_frozen", "1", **given).phases
    assert {"reference", "reward models"} <= phases["rollout"].keys() - phases["update"].keys()
    named = dict(re.findall(r"(--\w+) (\w+)", plans.REMEDIES))
    assert len(named) == 6 and named.pop("--shard") == "1"
    assert planned(*LARGE, shard=1, processes=2, **given).peak < plan.peak
    for flag in [*named.items(), ("--max_gen_len", "256")]:
        assert planned(*LARGE, *flag, **given).peak < plan.peak, flag


def test_a_reward_model_of_its_own_code_may_have_no_embeddings():
    class Scorer(T.PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Linear(3, 5)

    sizes = ModelSizes(Scorer(T.PretrainedConfig()), BF16)
    assert (sizes.all, sizes.table, sizes.bytes) == (20, 0, 80)


def checked(monkeypatch, room, *argv, device=GPU):
    """``check_memory`` for these models where ``room`` bytes are there in all -> (plan, note)."""
    policy, reward = half_on_meta()  # they are elsewhere
    monkeypatch.setattr(plans, "free_memory", lambda device: int(room))
    return check_memory(case_of(*LARGE, *argv, model=policy, start=reward, rewards=[reward], device=device))


def test_micro_batches_on_a_gpu_follow_from_the_memory():
    """A sharded run cannot halve them when memory runs out; others begin with what should fit."""

    def budget(available, device=GPU, **more):
        policy, reward = half_on_meta()
        case = case_of(*LARGE, model=policy, start=reward, rewards=[reward], device=device, **more)
        return fitted_plan(case, available * GB).token_budget

    sharded = {"shard": 1, "processes": 2}
    for more, least in ((sharded, 9), ({}, 14)):
        budgets = [budget(available, **more) for available in (400, *range(35, least, -1))]
        assert budgets[0] == 1 << 16 and budgets[-1] == plans.LEAST_TOKENS
        assert budgets == sorted(budgets, reverse=True)
        assert len(set(budgets)) >= 3
        assert budget(400, device=CPU, **more) == 1 << 11
    torch.use_deterministic_algorithms(True)
    try:
        assert budget(400, **sharded) == 1 << 13
    finally:
        torch.use_deterministic_algorithms(False)


def test_fewer_sequences_are_sampled_together_where_memory_is_short(monkeypatch):
    argv = ["--gradient_checkpointing", "1", "--moments_dtype", "bfloat16", "--batch_size", "256"]
    argv += ["--max_gen_len", "2000", "--mini_batch_size", "4"]  # the rollout takes the most
    plan, _ = checked(monkeypatch, 40 * GB, *argv)
    fewer, note = checked(monkeypatch, 18 * GB, *argv)
    assert plan.slots == 256 > fewer.slots
    cache, less = (x.phases["rollout"]["KV cache"] for x in (plan, fewer))
    assert less == cache * fewer.slots // 256
    assert f" {fewer.slots} sequences sampled at a time" in note


def test_too_little_memory_is_said_before_anything_is_built(monkeypatch):
    case = case_of("--model", "x", dtype=torch.float32, rewards=[tiny_llama(10)])
    least = memory_plan(case)
    loaded = 2 * 4 * TOTAL  # actor and reward model, which are on the device: they need nothing more
    monkeypatch.setattr(plans, "free_memory", lambda device: least.peak / plans.USABLE - loaded - 1)
    with pytest.raises(InputError, match=r"--model x: does not fit: .* cpu can give, (.|\n)*; add --gradie"):
        check_memory(case)
    monkeypatch.setattr(plans, "free_memory", lambda device: least.peak / plans.USABLE - loaded + 1)
    assert check_memory(case)[0].peak == least.peak
    monkeypatch.setattr(plans, "free_memory", lambda device: 3 * GB)
    first = "memory   at least 1 MB of the 2.7 GB that cpu can give, with 8 sequences sampled at a time:\n"
    assert check_memory(case)[1].startswith(f"{first}         actor 0 MB, ")
    refused("--offload_frozen 1: there is no GPU", check_memory, case_of("--offload_frozen", "1"))


@pytest.mark.parametrize(
    ("config", "number"),  # bytes of the file for a number
    [('{"a": "é", "dtype": "bfloat16"}', 2), ('{"torch_dtype": "float16"}', 2), ("{}", 4), ("{", 4)],
)
def test_a_policy_that_would_fill_the_memory_is_not_loaded(monkeypatch, tmp_path, config, number):
    """In fp32, with the sampler's copy: 8 bytes a number."""
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(9_000_000))  # the same weights once more: not loaded
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "a.pth").write_bytes(bytes(2_000_000))
    (tmp_path / "b.pth").write_bytes(bytes(2_000_000))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(config)
    wanted = {tmp_path: 8 * 2_000_000 // number, tmp_path / "a.pth": 4_000_000}
    for path, needed in (wanted | {tmp_path / "b.pth": wanted[tmp_path]}).items():
        monkeypatch.setattr(plans, "free_memory", lambda device, needed=needed: needed)
        check_loading(path)
        monkeypatch.setattr(plans, "free_memory", lambda device, needed=needed: needed - 1)
        refused(rf"{path}: loading takes about {needed // 10**6} MB of main", check_loading, path)
    check_loading("hub/name")
    check_loading(tmp_path / "missing.pth")


def test_a_run_counts_its_held_out_prompts_and_reward_models(monkeypatch, tmp_path):
    counted = []

    def noted(case):
        counted.append((len(case.rewards), case.responses))
        assert case.width < 30  # as long as the prompts are, whatever the limit
        raise InputError("enough")

    monkeypatch.setattr(ppo_run, "check_memory", noted)
    files = run_files(tmp_path, count=8)
    model = files.pop("reward_model")
    held_out = {"eval_data_path": files["data_path"]}
    for more in ({"reward_model": model, **held_out}, {}, {"eval_reward_model": model, **held_out}):
        refused("enough", train, **TINY, **files, **more, out_dir=tmp_path / "out", max_seq_len=100)
    assert counted == [(1, 16), (0, 4), (1, 16)]  # a sampled and a greedy answer to each
    assert not (tmp_path / "out").exists()


def test_a_run_that_samples_fewer_sequences_together_is_the_same(monkeypatch, tmp_path):
    """Up to rounding: on some CPUs a row's sums depend on the rows beside it, in a model as small as this."""
    files = run_files(tmp_path, count=40)
    samplers = []
    respond = RolloutEngine.respond

    def noted(engine, *more):
        batch = respond(engine, *more)
        samplers.append(engine.sampler.slots)
        return batch

    monkeypatch.setattr(RolloutEngine, "respond", noted)
    sizes = {"batch_size": 20, "mini_batch_size": 20, "max_steps": 2}
    for name in ("all", "fewer"):
        train(**files, **{**TINY, **sizes}, dtype="float32", out_dir=tmp_path / name, run_name="r")
        monkeypatch.setattr(plans, "SLOTS", 8)
    assert samplers == [24] * 2 + [8] * 2  # in eights: products of as many rows
    runs = [tmp_path / name / "r" for name in ("all", "fewer")]
    texts = [[row["response"] for row in read_jsonl(run / "samples.jsonl")] for run in runs]
    assert texts[0] == texts[1]
    same_metrics(*runs, rel=1e-5, abs=1e-6)
    same_weights(*runs, step=2)
