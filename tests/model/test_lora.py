"""LoRA: only adapters train, other weights stay bit for bit, and the result has the adapters merged in."""

import shutil
import sys

import pytest
import torch
from steps import add_gradients, take_step, update
from test_families import FAMILIES, build, logits
from test_invariants import filled_rollout, furthest, make_run, same
from tiny import WORDS, load_weights, train
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from errors import InputError
from model.loading import load_policy
from model.lora import adapted_layers, add_adapters, describe, frozen_copy, merged, trained
from model.saving import save_directory
from trainer import models
from trainer.compute.batching import Layout
from trainer.compute.scoring import PolicyScorer, prepare_training, score_all
from trainer.models import CHECK_SAMPLER
from trainer.runs.metrics import Metrics

RANK = 3  # so that alpha is not peft's default
FAST = {"lora_r": RANK, "learning_rate": 1e-2, "critic_learning_rate": 1e-2}
SMALL = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "epochs": 9, "critic_warmup_steps": 1}
SMALL |= {"ppo_epochs": 2, "dtype": "float32"}
HEAD = {"value_head.weight", "value_head.bias"}


def bits(module):
    return {name: x.clone() for name, x in module.state_dict().items()}


def frozen(module):
    return [p for p in module.parameters() if not p.requires_grad]


def pointers(parameters):
    return {p.data_ptr() for p in parameters}


def adapted(family, seed=0, spread=1.0):
    """-> (a model with adapters, B matrices random as after training; the model without adapters)"""
    plain = build(FAMILIES[family](), spread=spread).requires_grad_(False)
    model = frozen_copy(plain)
    prepare_training(model.base_model, False)
    add_adapters(model.base_model, RANK, seed)
    torch.manual_seed(seed + 1)
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    return model, plain


# Matrices in two layers, all of which get an adapter. A layer of MiniMind 2 MoE has four experts and a
# shared one, each with three matrices.
COUNTS = {"Llama": 2 * 7, "GPT-2": 2 * 4, "OPT-350m": 2 * 6, "MiniMind 2 MoE": 2 * (4 + 5 * 3)}
# One of its layers is dense; of the other one's experts, which are no matrices, none has an adapter.
COUNTS |= {"Qwen3-MoE, dense too": 7 + 4}


@pytest.mark.parametrize(("family", "count"), COUNTS.items())
def test_merged_weights_compute_what_the_adapters_do(family, count):
    model, plain = adapted(family)
    assert len(adapted_layers(model)) == count
    assert describe(model).startswith(f"adapters beside {count} matrices: 0.0")
    assert describe(plain) == ""
    state = dict(merged(model))
    assert state.keys() == plain.state_dict().keys()
    changed = {name for name, x in plain.state_dict().items() if not x.equal(state[name])}
    assert changed == {f"{name}.weight" for name in adapted_layers(model)}
    other = AutoModelForCausalLM.from_config(plain.config).eval()
    other.load_state_dict(state, strict=True)
    assert (logits(other) - logits(plain)).abs().max() > 0.02 * logits(plain).abs().max()  # it has changed
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-5)
    layers = adapted_layers(model)
    for layer in layers.values():  # a GPU has them, and with --offload_frozen not the adapters
        layer.base_layer.to("meta")
    assert {name for name, x in merged(model) if x.is_meta} >= {f"{name}.weight" for name in layers}


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_gradients_are_those_of_the_merged_matrix(family):
    """For W + s B A, with G the gradient of W: that of B is s G A', that of A is s B' G;
    s = alpha / r = 2. G comes from training all weights of the merged model."""
    model, plain = adapted(family)
    full = AutoModelForCausalLM.from_config(plain.config).eval()
    full.load_state_dict(dict(merged(model)))
    prepare_training(full.base_model, False)
    tokens = torch.randint(len(WORDS), (5, 20), generator=torch.Generator().manual_seed(2))
    prompt_len, response_len = [3, 5, 2, 7, 4], [9, 15, 6, 4, 16]
    for policy in (model, full):
        logprobs, _, _ = PolicyScorer(policy)(tokens, Layout.of_responses(prompt_len, response_len), 0.8)
        (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    for name, layer in adapted_layers(model).items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        g = full.get_submodule(name).weight.grad
        g = g.T if family == "GPT-2" else g  # its Conv1D holds the transposed matrix
        for grad, wanted in ((b.grad, 2 * g @ a.T), (a.grad, 2 * b.T @ g)):
            assert wanted.abs().max() > 1e-5
            torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())
    assert all(p.grad is None for p in frozen(model))


def test_a_seed_gives_the_adapters_and_leaves_torchs_random_state():
    torch.manual_seed(5)
    expected, found = torch.rand(1), []
    plain = build(FAMILIES["Llama"]()).requires_grad_(False)
    for seed in (1, 1, 2):
        model = frozen_copy(plain)
        torch.manual_seed(5)
        add_adapters(model.base_model, RANK, seed)
        assert torch.rand(1).equal(expected)
        found.append(bits(model))
    first, second, third = found
    assert all(first[name].equal(second[name]) for name in first)
    assert not any(first[name].equal(third[name]) for name in first if "lora_A" in name)


@pytest.mark.parametrize("start", ["actor", "reward"])
def test_everyone_shares_the_frozen_weights_and_nobody_an_adapter(files, start):
    run, _ = make_run(files, lora_r=RANK, critic_init=start, update_old_actor_freq=2, dtype="bfloat16")
    base = pointers(run.models.reference.parameters())
    ((reward_model, _),) = run.reward.models.values()
    assert pointers(frozen(run.models.actor)) == base
    old = dict(run.models.old_actor.named_parameters())
    assert pointers(p for name, p in old.items() if "lora" not in name) == base
    source = run.models.reference if start == "actor" else reward_model.model
    assert pointers(frozen(run.models.critic)) <= pointers(source.parameters())
    assert base.isdisjoint(pointers(reward_model.model.parameters()))
    for kind, more in (("actor", set()), ("critic", HEAD)):
        model = getattr(run.models, kind)
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {name for name in names if ".lora_" not in name} == more
        (group,) = run.train_states[kind].optimizer.param_groups
        assert pointers(group["params"]) == pointers(trained(model))
    sets = [pointers(trained(run.models.actor)), pointers(trained(run.models.critic))]
    sets.append(pointers(p for name, p in old.items() if "lora" in name))
    assert sum(map(len, sets)) == len(set().union(*sets))
    # B is 0 at the start, which bf16 holds; later it is not. Nor does it hold the frozen weights.
    models = (run.models.old_actor, run.models.actor, run.models.reference)
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in run.models.old_actor.parameters())


def models_of(run):
    ((reward_model, _),) = run.reward.models.values()
    models = run.models
    found = {"actor": models.actor, "critic": models.critic, "ref": models.reference}
    return found | {"reward": reward_model.model}


@pytest.fixture(scope="module")
def updated(files):
    """-> (a run after two steps, its prompts, the bits of its models before)"""
    run, prompts = make_run(files, **FAST, update_old_actor_freq=2)
    before = {name: bits(model) for name, model in models_of(run).items()}
    for step in range(2):
        update(run, step, filled_rollout(run, prompts, step)[0], Metrics())
    return run, prompts, before


def test_updates_move_the_adapters_and_not_one_bit_of_what_is_frozen(files, updated):
    run, prompts, before = updated
    for name, model in models_of(run).items():
        moved = {key for key, x in bits(model).items() if not x.equal(before[name][key])}
        assert {key for key in moved if ".lora_" not in key} == (HEAD if name == "critic" else set())
        assert (len(moved) >= 2 * 7) == (name in ("actor", "critic"))
    run.models.old_actor.load_state_dict(run.models.actor.state_dict())
    rollout, metrics = filled_rollout(run, prompts, CHECK_SAMPLER)
    original = load_policy(files["model"])
    prepare_training(original.base_model, False)
    untouched, _ = score_all(rollout, PolicyScorer(original), temperature=run.args.temperature)
    assert rollout.ref_logprobs.equal(untouched)
    assert not rollout.old_logprobs.allclose(untouched, atol=1e-2)
    assert metrics.means(run.world)["rollout/sampler_gap"] < 1e-5  # the sampler has the adapters merged in


def gradients_of_trained(run, minibatch):
    """A minibatch -> gradients of the trained parameters. What is frozen has none."""
    run.updater.forget_gradients()
    for name in run.train_states:
        add_gradients(run, name, minibatch, minibatch.response_len.sum().item())
    assert all(p.grad is None for m in (run.models.actor, run.models.critic) for p in frozen(m))
    return [p.grad.clone() for m in (run.models.actor, run.models.critic) for p in trained(m)]


def test_checkpointing_and_accumulation_change_no_gradient(files, updated):
    run, prompts, _ = updated
    minibatch = filled_rollout(run, prompts, 2)[0].rows(range(8))  # this rescales the critic
    other, _ = make_run(files, **FAST, accumulation_steps=8, gradient_checkpointing=1)
    for name in ("actor", "critic"):
        getattr(other.models, name).load_state_dict(getattr(run.models, name).state_dict())
    other.models.critic.scale = run.models.critic.scale
    found = [gradients_of_trained(one, minibatch) for one in (run, other)]
    assert max(g.abs().max() for g in found[0]) > 1e-3
    assert furthest(*found) < 1e-6


def test_a_checkpoint_holds_the_adapters_alone_and_the_result_has_them_merged_in(files, tmp_path):
    train(**files, **SMALL, **FAST, update_old_actor_freq=3, max_steps=3, run_name="r", out_dir=tmp_path)
    start, run = load_policy(files["model"]), tmp_path / "r"
    names = ("actor", "old_actor", "critic", "actor_optimizer")
    actor, old, critic, moments = (load_weights(run, 3, name) for name in names)
    assert len(actor) == 2 * 7 * 2  # A and B of seven matrices in two layers
    assert old.keys() == actor.keys()
    assert {name for name in critic if ".lora_" not in name} == HEAD
    size = sum(x.numel() for x in actor.values())
    layers = [m for m in start.base_model.layers.modules() if isinstance(m, nn.Linear)]
    assert size == sum(RANK * sum(m.weight.shape) for m in layers)
    assert moments["0.exp_avg"].numel() <= size

    state = torch.load(tmp_path / "ppo_actor_32.pth", weights_only=True)
    assert state.keys() == start.state_dict().keys()
    for name, x in start.state_dict().items():
        a, b = (actor.get(name.removesuffix("weight") + f"lora_{k}.default.weight") for k in "AB")
        wanted = x if a is None else x + 2 * b @ a
        torch.testing.assert_close(state[name], wanted.half(), rtol=0, atol=0 if a is None else 1e-3)
    assert any(not state[name].equal(x.half()) for name, x in start.state_dict().items())


def test_without_peft_such_a_run_is_one_line(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"--lora_r 3: needs peft; pip install 'peft>=0.18'"):
        train(**files, lora_r=RANK, out_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_frozen_weights_that_16_bits_hold_are_kept_in_them_and_nothing_else_changes(
    files, tmp_path, monkeypatch
):
    """A policy and a reward model that were saved in bf16: the same steps, with half of the bytes."""
    kinds = {"model": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        folder = shutil.copytree(files[name], tmp_path / name)
        kind.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    saved = files | {name: str(tmp_path / name) for name in kinds}
    results, sizes = [], []
    for halved in (False, True):
        with monkeypatch.context() as patch:
            if not halved:
                patch.setattr(models, "halve_exact", lambda *given: None)
            run, prompts = make_run(saved, critic_init="reward", dtype="bfloat16", **FAST)
        sizes.append(sum(p.numel() * p.element_size() for p in run.models.reference.parameters()))
        means, _ = take_step(
            run, 0, [prompts[i] for i in range(16)]
        )  # two minibatches, of which the second sees adapters
        rows = [torch.tensor([v for k, v in means.items() if not k.startswith("perf/")])]
        rows += [p for model in (run.models.actor, run.models.critic) for p in trained(model)]
        both = (run.models.actor, run.models.critic)
        assert all(p.dtype == torch.float32 for model in both for p in trained(model))
        result = dict(merged(run.models.actor))
        assert all(x.dtype == torch.float32 for name, x in result.items() if "proj" in name)
        results.append([*rows, *(x.float() for x in result.values())])
    assert same(*results)
    assert sizes[1] < 0.52 * sizes[0]
    assert run.models.reference.get_input_embeddings().weight.dtype == torch.bfloat16
    save_directory(run.models.actor, run.tokenizer, tmp_path / "out", torch.float32)
    again = load_policy(str(tmp_path / "out")).state_dict()
    assert all(again[name].equal(x.float()) for name, x in merged(run.models.actor))
