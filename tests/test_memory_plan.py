"""The memory that a run needs: by hand, against a measured run, and what is said where it is too little."""

import importlib
import json
import re
import shlex
from argparse import Namespace

import pytest
import torch
from tiny import ROOT, run_files, same_run, tiny_llama, train
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from errors import InputError, run_script
from trainer import memory_plan as plans
from trainer import run as ppo_run
from trainer import train_ppo
from trainer.compute import memory
from trainer.memory_plan import GB, Sizes, check_loading, check_memory, memory_plan

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
TINY = {"batch_size": 4, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 1, "critic_warmup_steps": 0}
QWEN = {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True, "num_labels": 1}
HALF = Qwen2Config(
    hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864, **QWEN
)
ONE_AND_A_HALF = Qwen2Config(
    hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, intermediate_size=8960, **QWEN
)
SAMPLED = (8, 10 + 6, 6)  # responses, tokens of the longest prompt and response, of a response
LARGE = ["--model", "x", "--batch_size", "64", "--mini_batch_size", "16", "--max_gen_len", "512"]


def arguments(*argv):
    more = ["--data_path", "x", "--reward_url", "http://x"]
    return train_ppo.parse_args(
        ["--batch_size", "8", "--max_gen_len", "6", "--max_seq_len", "10", *more, *argv]
    )


def planned(*argv, model=None, start=None, rewards=(), device=CPU, dtype=BF16, shard=0, responses=0, **more):
    """The plan for a model; start: what the critic starts from, by default the model itself."""
    model = model or tiny_llama(10)
    args = arguments(*argv)
    args = args.completed(shard=shard)
    sizes = {
        "actor": Sizes(model, dtype),
        "rewards": [Sizes(m, dtype) for m in rewards],
        "responses": responses or args.batch_size,
        "width": args.max_seq_len + args.max_gen_len,
        "demonstration": 0,
    }
    if args.advantage == "gae":
        sizes["critic"] = Sizes((start or model).base_model, dtype)
    return memory_plan(args, sizes, device, dtype, **more)


def standing(*argv, **more):
    """{part: bytes} of what such a run has all the time: its fullest phases have it and more."""
    return standing_of(planned(*argv, **more))


def standing_of(plan):
    comes_and_goes = ("gradients", "micro-batch", "gathered", "KV cache")
    return {part: size for part, size in plan.phases["update"].items() if size and part not in comes_and_goes}


def test_without_a_critic_its_weights_and_moments_are_not_counted():
    with_critic, without = planned(), planned("--advantage", "reinforce")
    saved = sum(standing_of(with_critic).values()) - sum(standing_of(without).values())
    assert saved == (4 + 8) * TOTAL
    assert not any("critic" in parts for parts in without.phases.values())


def on_meta(config, reward_dtype=BF16):
    """A policy and a reward model of this shape, without memory."""
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return policy, AutoModelForSequenceClassification.from_config(config, dtype=reward_dtype)


# ------------------------------------------------------------------------------------------------- by hand

# tiny_llama(10): hidden 32, one layer, tied: 10 x 32 embeddings, two norms in the layer and one more
LINEAR = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
TABLE = 10 * 32
TOTAL = LINEAR + TABLE + 3 * 32


def test_weights_and_moments_by_hand():
    plan = planned()
    assert standing_of(plan) == {
        "actor": 4 * TOTAL,
        "critic": 4 * TOTAL,
        "reference": 2 * LINEAR + 4 * (TOTAL - LINEAR),
        "sampler": 2 * (TOTAL + TABLE),  # the head is laid out once more, the embeddings stay
        "moments": 8 * 2 * TOTAL,
    }
    assert plan.cache == 8 * 16 * (2 * 1 * 16 * 2)  # 8 slots of 16 tokens, one head of 16 numbers, bf16
    assert plan.phases["update"]["gradients"] == 4 * TOTAL  # of one model at a time
    assert standing(device=GPU)["sampler"] == 2 * TOTAL
    assert standing("--moments_dtype", "bfloat16")["moments"] == 4 * 2 * TOTAL
    older = standing("--update_old_actor_freq", "2")
    assert older["old actor"] == older["reference"] == 2 * LINEAR + 4 * (TOTAL - LINEAR)
    assert standing(dtype=torch.float32)["reference"] == 4 * TOTAL


def test_weights_that_16_bits_hold_by_hand():
    model = tiny_llama(10)
    for p in model.parameters():
        p.data = p.data.to(BF16).float()
    assert standing(model=model)["reference"] == 2 * (LINEAR + TABLE) + 4 * 3 * 32


def test_adapters_by_hand():
    adapters = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    model, start = tiny_llama(10), tiny_llama(10, seed=1)
    own = standing("--lora_r", "2", model=model)
    assert own["moments"] == 8 * 2 * adapters
    assert own["actor"] == 4 * TOTAL + 4 * adapters
    assert own["critic"] == 4 * adapters  # on the actor's weights
    assert "reference" not in own  # it is the actor without adapters
    shared = standing("--lora_r", "2", model=model, start=start, rewards=[start])
    assert shared == own | {"reward models": 4 * TOTAL}  # which the critic shares: they count once
    apart = standing("--lora_r", "2", model=model, rewards=[start])
    assert apart == own | {"reward models": 4 * TOTAL}  # with adapters nothing is rounded that would change


def test_a_process_of_a_sharded_run_has_its_part_of_what_stays_by_hand():
    reward = on_meta(HALF, BF16)[1]
    given = {"rewards": [reward], "device": GPU}
    whole, part = (
        planned("--update_old_actor_freq", "2", shard=shard, processes=4, **given) for shard in (0, 1)
    )
    all_of_it = standing_of(whole)
    sampler = all_of_it.pop("sampler")
    mine = {name: size // 4 for name, size in all_of_it.items()}
    assert standing_of(part) == mine
    assert part.phases["rollout"] == whole.phases["rollout"] | mine | {"gathered": 4 * TABLE}
    assert part.phases["rollout"]["sampler"] == sampler
    assert part.phases["update"]["gradients"] == 4 * TOTAL // 4
    assert part.cache == whole.cache
    assert planned(shard=1, processes=1) == planned()  # alone it has all


def test_what_is_there_while_a_run_is_built_by_hand():
    """The loaded models and the sampler, not yet rounded; of a sharded run in main memory."""
    start = tiny_llama(10, seed=1)
    models = {"actor": 4 * TOTAL, "sampler": 4 * (TOTAL + TABLE), "reward models": 4 * TOTAL}
    assert planned(start=start, rewards=[start]).phases["building"] == models
    sharded = {"start": start, "rewards": [start], "shard": 1, "processes": 2}
    assert planned(**sharded).phases["building"] == models
    assert "building" not in planned(**sharded, device=GPU).phases


def test_what_a_sharded_run_gathers_by_hand():
    """The only layer counts twice, as if another one followed. The embeddings are the head as well."""
    layer = TOTAL - TABLE
    update = planned(shard=1, processes=2, device=GPU).phases["update"]
    gradients = (2 + 4) * layer + 8 * TABLE
    assert update["gathered"] == 2 * 2 * layer + 4 * TABLE + gradients
    exact = planned(shard=1, processes=2, device=GPU, dtype=torch.float32).phases["update"]
    assert exact["gathered"] == 2 * 4 * layer + 4 * TABLE + (4 + 4) * layer + 8 * TABLE
    adapters = planned("--lora_r", "2", shard=1, processes=2, device=GPU).phases["update"]
    assert adapters["gathered"] == 4 * layer + 4 * TABLE  # what is frozen has no gradients


def test_processes_plan_with_what_the_one_with_least_memory_has(monkeypatch):
    monkeypatch.setattr(plans, "free_memory", lambda device: 3 * GB)
    model, asked = tiny_llama(10), []
    in_step = Namespace(least=lambda number: asked.append(number) or 2 * GB)
    given = arguments(), model, model, [], CPU, BF16, SAMPLED
    assert "of the 2.0 GB that cpu can give" in check_memory(*given, in_step=in_step)[1]
    assert asked == [pytest.approx(0.95 * 3 * GB - plans.LATER, rel=1e-3)] and plans.LATER > 0


def test_sharding_is_suggested_where_there_are_several_processes(monkeypatch):
    parsed = train_ppo.parse_args
    monkeypatch.setattr(train_ppo, "parse_args", lambda argv: Namespace(**{"shard": 0} | vars(parsed(argv))))
    given = monkeypatch, ONE_AND_A_HALF, 52 * GB, "--gradient_checkpointing", "1"
    for processes, remedy in (("1", "--moments_dtype bfloat16"), ("4", "--shard 1")):
        monkeypatch.setenv("WORLD_SIZE", processes)
        with pytest.raises(InputError, match=f"does not fit: (.|\n)*; add {remedy}$"):
            checked(*given)


def test_reward_models_count_as_they_are_loaded():
    for kind in (torch.float32, BF16):
        policy, reward = on_meta(HALF, kind)
        reward.score.float()
        parts = standing(model=policy, start=reward, rewards=[reward], dtype=BF16)
        assert parts["reward models"] == pytest.approx(0.988 * GB, rel=0.01)  # rounded where it was fp32
        parts = standing(model=policy, start=reward, rewards=[reward], dtype=torch.float32)
        assert parts["reward models"] == pytest.approx(
            (1.976 if kind == torch.float32 else 0.988) * GB, rel=0.01
        )


def test_held_out_prompts_accumulation_and_pieces_by_hand():
    sequence = 16 * 2 * 16 * 2  # 16 tokens, keys and values, one head of 16 numbers, bf16
    caches = [planned(responses=n).cache / sequence for n in (8, 20, 1000)]
    assert caches == [8, 24, 256]  # in eights, at most 256 at a time

    def activations(*argv):
        args = ["--batch_size", "64", "--mini_batch_size", "64", "--max_gen_len", "200", *argv]
        return planned(*args, budget=1 << 20).phases["update"]["micro-batch"]

    whole, half, quarter = (activations("--accumulation_steps", n) for n in ("2", "4", "8"))
    assert whole - half == pytest.approx(2 * (half - quarter), rel=0.01)


def test_a_phase_has_what_it_needs_and_keys_and_values_unless_they_are_released():
    policy, reward = on_meta(HALF)
    given = {"model": policy, "start": reward, "rewards": [reward], "device": GPU}
    plan = planned(*LARGE, "--offload_frozen", "1", **given)
    for phase in ("update", "rollout"):
        assert not {"reference", "reward models"} & set(plan.phases[phase])
    assert {"reference", "reward models", "KV cache"} < set(plan.phases["scoring"])
    assert "KV cache" in plan.phases["update"]
    released = planned(*LARGE, "--offload_frozen", "1", **given, release_cache=True)
    assert "KV cache" not in released.phases["update"]
    assert released.phases["rollout"] == plan.phases["rollout"]
    assert plan.peak - released.peak == plan.cache


# ----------------------------------------------------------------------------------- 24 GB, by arithmetic


def checked(monkeypatch, config, room, *argv, device=GPU, reward_dtype=BF16):
    """``check_memory`` for this shape where ``room`` bytes are there in all -> (plan, note)."""
    policy, reward = on_meta(config, reward_dtype)
    loaded = sum(p.numel() * p.element_size() for m in (policy, reward) for p in m.parameters())
    in_step = None
    if "--shard" in argv:  # then the models are elsewhere
        loaded, in_step = 0, Namespace(least=int, world=Namespace(from_main=lambda sizes: sizes))
    monkeypatch.setattr(plans, "free_memory", lambda device: int(room - loaded))
    args = arguments(*LARGE, *argv)
    sampled = args.batch_size, args.max_seq_len + args.max_gen_len, args.max_gen_len
    return check_memory(args, policy, reward, [reward], device, BF16, sampled, in_step=in_step)


def test_half_a_billion_with_a_reward_model_of_its_size_fits_24_gb(monkeypatch):
    """All weights train, 64 prompts of 256 tokens at most, responses of 512."""
    plan, note = checked(monkeypatch, HALF, 24 * GB, "--gradient_checkpointing", "1")
    assert plan.peak < 0.9 * 24 * GB
    assert plan.token_budget >= 4096
    assert "sampled at a time" not in note
    short, note = checked(monkeypatch, HALF, 24 * GB)
    assert short.peak < 0.9 * 24 * GB
    assert short.token_budget == plans.SMALL_BUDGET
    assert "with 1024 tokens in a micro-batch, 64 sequences sampled at a time and the KV cache freed" in note


def test_adapters_for_one_and_a_half_billion_fit_24_gb(monkeypatch):
    plan, note = checked(
        monkeypatch, ONE_AND_A_HALF, 24 * GB, "--lora_r", "16", "--gradient_checkpointing", "1"
    )
    assert plan.peak < 0.9 * 24 * GB
    assert "sampled at a time" not in note
    assert standing_of(plan)["reward models"] < 3.2 * GB  # shared with the critic, in bf16


# ------------------------------------------------------------------------------------ what is said and done


def test_micro_batches_of_a_gpu_follow_from_its_memory(monkeypatch):
    budgets = [checked(monkeypatch, HALF, room * GB)[0].token_budget for room in (400, 60, 48, 30)]
    assert budgets[0] == 1 << 16
    assert budgets == sorted(budgets, reverse=True)
    assert len(set(budgets)) == 4 or budgets[-1] == 4096
    torch.use_deterministic_algorithms(True)
    try:
        assert checked(monkeypatch, HALF, 400 * GB)[0].token_budget == 1 << 13
    finally:
        torch.use_deterministic_algorithms(False)
    cpu = checked(monkeypatch, HALF, 400 * GB, device=CPU)
    assert cpu[0].token_budget == 1 << 11


def test_keys_and_values_are_released_only_where_memory_is_short(monkeypatch):
    argv = ["--gradient_checkpointing", "1", "--moments_dtype", "bfloat16", "--batch_size", "256"]
    plan, _ = checked(monkeypatch, HALF, 40 * GB, *argv)
    assert not plan.release_cache
    short, note = checked(monkeypatch, HALF, 18 * GB, *argv)
    assert short.release_cache
    assert "256 sequences sampled at a time and the KV cache freed after sampling" in note
    argv += ["--max_gen_len", "2000", "--mini_batch_size", "4"]  # the rollout takes the most
    plan, _ = checked(monkeypatch, HALF, 40 * GB, *argv)
    fewer, note = checked(monkeypatch, HALF, 18 * GB, *argv)
    assert (plan.slots, fewer.slots) == (256, 128)
    assert fewer.cache == plan.cache // 2
    assert f" {fewer.slots} sequences" in note


def test_a_run_that_releases_them_is_the_same(monkeypatch, tmp_path):
    files, engines, learn, plan = run_files(tmp_path, count=16), [], train_ppo.learn, memory_plan
    monkeypatch.setattr(
        train_ppo,
        "learn",
        lambda run, *more: (
            engines.append((run.collector.sampler.engine, run.collector.sampler.slots)) or learn(run, *more)
        ),
    )
    for name in ("kept", "released"):
        train(**files, **{**TINY, "max_steps": 3}, dtype="float32", out_dir=tmp_path / name, run_name="r")
        monkeypatch.setattr(
            plans,
            "memory_plan",
            lambda *given: plan(*given[:6], release_cache=True, slots=2),
        )
    assert [engine is None for engine, _ in engines] == [False] * 3 + [True] * 3
    assert [slots for _, slots in engines] == [8] * 6  # 4 and 2 rounded up: products of as many rows
    same_run(tmp_path / "kept" / "r", tmp_path / "released" / "r", step=3)


ROOMS = [23, 20, 18, 16, 14, 12, 10, 8, 6]


@pytest.mark.parametrize("device", [GPU, CPU])
def test_what_is_suggested_fits_and_without_it_the_run_is_refused_or_smaller(monkeypatch, device):
    """The flags of the message, typed, make the run fit; LoRA is named only where nothing else helps."""
    seen = []
    for room in ROOMS:
        try:
            _, said = checked(monkeypatch, HALF, room * GB, device=device)
        except InputError as error:
            said = str(error)
            assert said.startswith("--model x: does not fit: about ")
        seen.append(re.findall(r"--\w+ \S+", said.partition("fit")[2] or said))
        remedy = re.search(r"add (--.*)$", said)
        if remedy:
            plan, _ = checked(monkeypatch, HALF, room * GB, *shlex.split(remedy[1]), device=device)
            assert plan.peak <= room * GB * (0.9 if device is GPU else 0.95)
        else:
            assert "no flags make it fit" in said or said.startswith("memory   about ")
    text = [" ".join(flags) for flags in seen]
    assert any("--moments_dtype bfloat16" in flags and "lora" not in flags for flags in text)
    assert any("--lora_r 16" in flags for flags in text)
    assert [("lora" in flags) for flags in text if flags] == sorted(
        "lora" in flags for flags in text if flags
    )
    assert any("offload_frozen" in flags for flags in text) == (device == GPU)


def test_too_little_memory_is_said_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(plans, "LATER", 0)
    model, args = tiny_llama(10), arguments("--model", "x")
    peak = planned(model=model, dtype=torch.float32, release_cache=True).peak
    given = model, model, [], CPU, torch.float32, SAMPLED
    loaded = 4 * TOTAL
    monkeypatch.setattr(plans, "free_memory", lambda device: peak / 0.95 - loaded - 1)
    with pytest.raises(
        InputError, match=r"--model x: does not fit: .* cpu can give, (.|\n)*; add --\w+"
    ) as ended:
        check_memory(args, *given)
    assert (
        ": about 1 MB of the 1 MB that cpu can give, with 1024 tokens in a micro-batch, 8 sequences "
        in str(ended.value)
    )
    assert ":\n         actor 0 MB, critic 0 MB, " in str(ended.value)
    monkeypatch.setattr(plans, "free_memory", lambda device: peak / 0.95 - loaded + 1)
    plan, note = check_memory(args, *given)
    assert plan.peak == peak
    assert "the KV cache freed after sampling" in note
    monkeypatch.setattr(plans, "free_memory", lambda device: 3 * GB)
    note = check_memory(args, *given)[1]
    first = "memory   about 1 MB of the 2.9 GB that cpu can give:"
    assert note.startswith(f"{first}\n         actor 0 MB, ")


def test_a_policy_that_would_fill_the_memory_is_not_loaded(monkeypatch, tmp_path):
    """In fp32, with two copies for the test of sampling: 12 bytes a number."""
    free, numbers = [0], 1_000_000
    monkeypatch.setattr(plans, "free_memory", lambda device: free[0])
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(bytes(2 * numbers))
    (policy / "pytorch_model.bin").write_bytes(bytes(10 * numbers))  # the same weights once more: not loaded
    for settings, bytes_each in (
        ({"a": "é", "dtype": "bfloat16"}, 2),
        ({"torch_dtype": "float16"}, 2),
        ({}, 4),
        (None, 4),
    ):
        (policy / "config.json").write_text(json.dumps(settings) if settings is not None else "{")
        free[0] = 12 * 2 * numbers // bytes_each
        check_loading(policy)
        free[0] -= 1
        with pytest.raises(InputError, match=r"policy: loading takes about (6|12) MB of main memory"):
            check_loading(policy)
    (tmp_path / "a.pth").write_bytes(bytes(400))
    free[0] = 1199
    with pytest.raises(InputError, match=r"a\.pth: loading takes"):
        check_loading(tmp_path / "a.pth")
    check_loading("hub/name")
    check_loading(tmp_path / "missing.pth")


def test_offloading_without_a_gpu_is_refused(monkeypatch):
    with pytest.raises(InputError, match="--offload_frozen 1: there is no GPU"):
        checked(monkeypatch, HALF, 400 * GB, "--offload_frozen", "1", device=CPU)


def test_a_run_counts_its_held_out_prompts_and_reward_models(monkeypatch, tmp_path):
    counted, check = [], ppo_run.check_memory

    def noted(*given, **more):
        counted.append((len(given[3]), given[-1]))
        return check(*given, **more)

    monkeypatch.setattr(ppo_run, "check_memory", noted)
    files = run_files(tmp_path, count=8)
    train(**files, eval_data_path=files["data_path"], **TINY, out_dir=tmp_path / "out", run_name="r")
    held_out = {"eval_data_path": files["data_path"], "eval_reward_model": files.pop("reward_model")}
    train(**files, **TINY, out_dir=tmp_path / "out", run_name="s")
    train(**files, **held_out, **TINY, out_dir=tmp_path / "out", run_name="t")
    assert [(models, sampled[0]) for models, sampled in counted] == [(1, 8), (0, 4), (1, 8)]


def test_a_reward_model_of_its_own_code_may_have_no_embeddings():
    class Scorer(PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Linear(3, 5)

    sizes = Sizes(Scorer(PretrainedConfig()), BF16)
    assert (sizes.all, sizes.linear, sizes.table, sizes.bytes) == (20, 15, 0, 80)


def test_prompts_count_as_long_as_they_are_whatever_the_limit(monkeypatch):
    monkeypatch.setattr(plans, "free_memory", lambda device: GB)
    model = tiny_llama(10)

    def plan(limit, longest):
        args = arguments("--max_seq_len", str(limit))
        return check_memory(args, model, model, [], CPU, BF16, (8, longest + 6, 6))[0]

    assert plan(20_000, 10) == plan(10, 10)
    assert plan(20_000, 10_000).peak > plan(10, 10).peak


def test_a_run_in_a_container_that_is_too_small_ends_with_code_2(monkeypatch, tmp_path, capsys):
    """There is room to load the policy (12 bytes a number), not to train it. Nothing is written."""
    files = run_files(tmp_path, count=8)
    numbers = (tmp_path / "policy/model.safetensors").stat().st_size // 4
    monkeypatch.setattr(memory, "free_in_groups", lambda: 20 * numbers)
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: train(**files, **TINY, out_dir=tmp_path / "out"))
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "does not fit" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["critic", "no critic"])
def test_the_plan_is_near_what_a_run_takes(monkeypatch, name):
    """A model of 14M parameters in fp32. Larger ones, of which Python's libraries are a smaller part:
    benchmarks/results/plan.json. How much of the libraries counts depends on what else the machine does: on
    the same code the ratio was 0.8 to 1.12."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plan_check = importlib.import_module("plan_check")
    more = plan_check.CRITIC if name == "critic" else plan_check.RLOO
    monkeypatch.setitem(plan_check.CASES, name, ("14M", {**plan_check.FP32, **more}, 1))
    row = plan_check.run_case(name)
    assert 0.75 < row["ratio"] < 1.2, row
