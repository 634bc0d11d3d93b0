"""Invariants of a PPO step: what padding, checkpointing, rounding and steps that are not finite leave as it
is. Whole steps beside plain torch: test_whole_step.py."""

import copy
from dataclasses import replace

import pytest
import torch
from steps import add_gradients, collected, filled, take_step, update
from tiny import flags, turn_files

from trainer import models as run_models
from trainer import train_ppo
from trainer.compute.batch import length_mask
from trainer.models import CHECK_SAMPLER, Models
from trainer.run import PpoRun
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import Step
from trainer.step_metrics import batch_metrics

ALONE = World(0, 1, torch.device("cpu"))


def make_run(files, completed=None, **values):
    """A Run as main builds it, with its prompts. None: a flag is left out. completed: {flag: a value that the
    command line refuses here}."""
    sizes = {"batch_size": 16, "mini_batch_size": 8, "max_gen_len": 8, "critic_warmup_steps": 0}
    sizes |= {"max_steps": 4, "dtype": "float32"}  # the invariants are exact, or to 1e-6
    given = {name: value for name, value in {**files, **sizes, **values}.items() if value is not None}
    args = train_ppo.parse_args(flags(**given)).completed(**completed or {})
    run = PpoRun(args, ALONE)
    return run, run.data


def filled_rollout(run, prompts, step=0):
    """Collect and fill a batch with the trainer's own functions -> (all its fields, metrics)."""
    batch = filled(run, step, collected(run, step, first(run, prompts)))
    metrics = batch_metrics(run.args, batch, run.models.critic, run.kl.coef, run.world)
    return batch, metrics


def first(run, prompts):
    """The first prompts, as many as a batch has."""
    return [prompts[i] for i in range(run.args.batch_size // run.args.num_generations)]


def gradients(run, minibatch):
    run.updater.forget_gradients()
    sums, tokens = Metrics(), minibatch.response_len.sum().item()
    for name in run.train_states:
        sums.merge(add_gradients(run, name, minibatch, tokens))
    grads = [p.grad.clone() for m in (run.models.actor, run.models.critic) for p in m.parameters()]
    return grads, sums


def weights(run):
    return [p.detach().clone() for m in (run.models.actor, run.models.critic) for p in m.parameters()]


def same(left, right):
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


def furthest(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def test_nothing_is_scored_that_is_not_needed(files, monkeypatch):
    """In fp32 the sampler's log-probs are the old ones, and without a KL nothing needs the reference's: two
    runs with and without them learn the same. A first step is scored anyway."""

    def learned(kl_coef=0.0):
        run, prompts = make_run(files, kl_coef=kl_coef, ppo_epochs=2)
        calls = dict.fromkeys(("old_actor", "reference"), 0)
        scorers = {"old_actor": run.models.old_actor_scorer, "reference": run.models.reference_scorer}
        assert bool(scorers["reference"]) == (kl_coef > 0)
        for name in filter(scorers.get, calls):

            def count(model, given, result, name=name):
                calls[name] += not result[0].requires_grad

            scorers[name].register_forward_hook(count)
        metrics = []
        for step in (CHECK_SAMPLER, 1):
            metrics.append(take_step(run, step, first(run, prompts))[0])
        return weights(run), calls, metrics

    sparing, calls, metrics = learned()
    assert calls == {"old_actor": 1, "reference": 0}
    assert [m.get("rollout/sampler_gap", 9) < 1e-5 for m in metrics] == [True, False]
    assert metrics[1]["policy/first_ratio"] == pytest.approx(1, abs=1e-5)
    assert not any(name.startswith("kl/") for m in metrics for name in m)
    monkeypatch.setattr(Models, "sampler_has_scored", lambda models, step: False)
    scored, calls, metrics = learned(kl_coef=1e-30)
    assert calls == {"old_actor": 2, "reference": 2}
    assert furthest(sparing, scored) < 1e-5
    assert metrics[1]["kl/k3"] > 0


@pytest.mark.parametrize("flag", [{"lora_r": 2}, {"update_old_actor_freq": 2}])
def test_a_reference_that_nothing_asks_takes_no_memory(files, flag):
    run, prompts = make_run(files, kl_coef=0.0, **flag)
    assert all(p.is_meta for p in run.models.reference.parameters())
    before = weights(run)
    take_step(run, 0, first(run, prompts))
    assert not same(before, weights(run))


def test_the_samplers_logprobs_are_the_old_ones_in_fp32_or_with_a_single_update_by_the_old_actor(files):
    given = files | {"reward_model": None, "advantage": "reinforce", "critic_warmup_steps": None}
    whole = {"mini_batch_size": 16, "dtype": "bfloat16"}
    exact, single, old = (make_run(given, **x)[0] for x in ({}, whole, whole | {"update_old_actor_freq": 2}))
    exact, single, old = exact.models, single.models, old.models
    assert single.single_update and not exact.single_update and not old.single_update
    assert [models.sampler_has_scored(1) for models in (exact, single, old)] == [True, True, False]
    assert not exact.sampler_has_scored(0) and not single.sampler_has_scored(0)
    for models in (exact, single):
        args = models.args
        for flag in ({"replay_batches": 1}, {"entropy_top": 0.5}):
            models.args = args.completed(**flag)
            assert not models.sampler_has_scored(1), flag
    single.args = args.completed(replay_batches=1)
    assert not single.single_update


def of_turns(folder):
    """Flags of a run in several turns."""
    given = turn_files(folder)
    return {"env": f"{given.pop('code')}:Game", "max_gen_len": 60, "kl_in": "reward", **given}


@pytest.mark.parametrize("several", [False, True])
def test_padding_changes_no_gradient(files, tmp_path, several):
    """Whatever stands in the padding, of tokens and of every [B, R] field, is never read; nor are these
    fields at observations."""
    run, prompts = make_run({}, **of_turns(tmp_path)) if several else make_run(files)
    rollout, _ = filled_rollout(run, prompts)
    assert (rollout.is_action is not None) == several
    minibatch = rollout.rows(range(8))
    plain, _ = gradients(run, minibatch)
    garbage, padded = copy.copy(minibatch), 0
    for name, x in vars(minibatch).items():
        if isinstance(x, torch.Tensor) and x.dim() == 2 and name != "is_action":
            real = (
                length_mask(minibatch.layout.length, x.shape[1])
                if name == "tokens"
                else minibatch.action_mask
            )
            setattr(garbage, name, x.masked_fill(~real, 3 if name == "tokens" else 1e6))
            padded += (~real).sum().item()
    assert padded > 50
    assert furthest(plain, gradients(run, garbage)[0]) < 1e-6


def test_an_observation_changes_no_gradient_of_the_tokens_before_it(tmp_path):
    """It is changed after the fact, and of each response the first turn is learned."""
    run, prompts = make_run({}, **of_turns(tmp_path))
    rollout, _ = filled_rollout(run, prompts)
    minibatch = rollout.rows(range(8))
    first = minibatch.is_action.long().cumprod(1).bool()  # [B, R], before the first observation
    assert (minibatch.is_action & ~first).any()
    columns = torch.arange(minibatch.tokens.shape[1]) - minibatch.prompt_len[:, None]
    behind = columns.clamp(0, first.shape[1] - 1)
    changed = (columns >= 0) & ~first.gather(1, behind)
    tokens = torch.where(changed, 1, minibatch.tokens)
    found = [
        gradients(run, replace(minibatch, is_action=first, tokens=x))[0] for x in (minibatch.tokens, tokens)
    ]
    assert changed.sum() > 20 and furthest(*found) < 1e-6
    whole = [gradients(run, replace(minibatch, tokens=x))[0] for x in (minibatch.tokens, tokens)]
    assert furthest(*whole) > 1e-3  # the later turns have read it


def test_micro_batches_and_prompts_computed_once_change_no_gradient(files):
    """Of actor and critic. What is computed is counted, and so it is with --accumulation_steps."""
    run, prompts = make_run(files, num_generations=4, mini_batch_size=16, ppo_epochs=1)
    batch, _ = filled_rollout(run, prompts)
    backbones = [run.models.actor.base_model, run.models.critic.backbone]
    computed, results = [], []
    for backbone in backbones:
        table = backbone.get_input_embeddings()
        table.register_forward_hook(lambda *given: computed[-1].append(given[1][0].numel()))
    for budget, pieces, shares in ((4096, 1, True), (4096, 3, True), (30, 1, True), (4096, 1, False)):
        run.progress.token_budget = budget
        run.args = run.args.completed(accumulation_steps=pieces)
        for backbone in backbones:
            backbone.shares_beginnings = shares
        computed.append([])
        results.append(gradients(run, batch)[0])
        assert furthest(results[0], results[-1]) < 1e-6
    once = sum(map(len, {tuple(x.prompt_ids) for x in batch.prompts})) + int(batch.response_len.sum())
    assert computed[0] == [once, once]
    assert len(computed[1]) >= 6 and max(computed[1]) <= once / 3 + 1
    assert max(computed[2]) <= 30 and len(computed[2]) > len(computed[1])
    assert computed[3] == [sum(batch.layout.lengths)] * 2
    run.progress.token_budget = 30
    for backbone in backbones:
        backbone.shares_beginnings = True
    computed.append([])
    update(run, 0, batch, Metrics())
    assert sorted(computed[4]) == sorted(computed[2])


def test_gradient_checkpointing_keeps_less_and_changes_no_gradient(files):
    kept, results = [], []
    for flag in (0, 1):
        run, prompts = make_run(files, gradient_checkpointing=flag)
        rollout, _ = filled_rollout(run, prompts)
        sizes = {}

        def note(x, sizes=sizes):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = run.models.actor_scorer(rollout.tokens, rollout.layout, 1.0)[0].sum()
        weights_too = {p.untyped_storage().data_ptr() for p in run.models.actor.parameters()}
        kept.append(sum(size for pointer, size in sizes.items() if pointer not in weights_too))
        loss.backward()
        results.append(gradients(run, rollout.rows(range(8)))[0])
    assert same(*results)
    assert kept[1] < 0.5 * kept[0]
    assert not run.models.actor.model.layers[
        0
    ].self_attn.training  # dropout, if there were any, would stay off


def test_the_critic_steps_before_the_actor_has_gradients(files):
    """Only one model's gradients are ever in memory."""
    run, prompts = make_run(files)
    rollout, _ = filled_rollout(run, prompts)
    models, seen = {"critic": run.models.critic, "actor": run.models.actor}, []

    def with_gradients(*_):
        seen.append({name for name, m in models.items() if any(p.grad is not None for p in m.parameters())})

    for model in models.values():
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(with_gradients)
    update(run, 0, rollout, Metrics())
    with_gradients()
    changes = [names for i, names in enumerate(seen) if not i or names != seen[i - 1]]
    assert changes == [{"critic"}, {"actor"}] * 2 + [set()]  # two minibatches, and nothing is left


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_no_step(files, where):
    run, prompts = make_run(files)
    rollout, _ = filled_rollout(run, prompts)
    update(run, 0, rollout, Metrics())  # momentum exists now
    before, moments = weights(run), copy.deepcopy(run.train_states["actor"].optimizer.state_dict()["state"])
    rollout, _ = filled_rollout(run, prompts, step=1)
    if where == "loss":
        rollout.returns[3, 0] = torch.inf  # one minibatch of two, the critic alone
    else:
        run.models.actor.model.norm.weight.register_hook(lambda grad: grad * torch.nan)
    metrics = Metrics()
    update(run, 1, rollout, metrics)
    skipped = metrics.means(ALONE)["policy/skipped_steps"]
    actor = [p.detach() for p in run.models.actor.parameters()]
    if where == "loss":
        assert skipped == 0.25  # one of four steps
        assert run.progress.skipped_steps == 1
        assert all(w.isfinite().all() for w in weights(run))
        done = {n: {int(s["step"]) for s in x.optimizer.state.values()} for n, x in run.train_states.items()}
        assert done == {"critic": {3}, "actor": {4}}
    else:
        assert skipped == 0.5
        assert run.progress.skipped_steps == run.progress.bad_steps == 2
        assert same(before[: len(actor)], actor)
        assert not same(before[len(actor) :], run.models.critic.parameters())  # its own steps were finite
        after = run.train_states["actor"].optimizer.state_dict()["state"]
        assert all(moments[k]["exp_avg"].equal(after[k]["exp_avg"]) for k in moments)


def test_bad_steps_of_different_models_end_a_run_together(files):
    """A minibatch counts once, and a good step of the other model does not set the count back."""
    run, _ = make_run(files)
    good, bad = Step(0.0, 1.0), Step(0.0, torch.inf)
    for steps in ([good, bad], [bad, good], [bad, bad], [good, bad]):
        run.updater.after_minibatch(steps)
    assert (run.progress.bad_steps, run.progress.skipped_steps) == (4, 5)
    with pytest.raises(SystemExit, match="5 optimizer steps in a row"):
        run.updater.after_minibatch([Step(torch.nan, 1.0)])
    run.updater.after_minibatch([good, good])
    assert run.progress.bad_steps == 0


def test_an_old_actor_of_one_batch_is_the_actor_itself(files):
    run, prompts = make_run(files, mini_batch_size=16, learning_rate=1e-2)  # none follows an update
    assert run.models.old_actor is run.models.actor
    assert set(run.modules) == {"actor", "critic"}
    dtypes = set()
    for step in range(3):
        metrics, _ = take_step(run, step, first(run, prompts))
        assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-9)
        dtypes |= {p.dtype for p in run.models.actor.parameters()}
    assert metrics["kl/k3"] > 1e-6  # it has moved
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("kind", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_rounding_what_is_frozen_changes_no_step(files, kind, monkeypatch):
    """Reference, old actor and reward model are rounded: scores and weights stay; trained ones are fp32."""
    results = []
    for rounded in (False, True):
        name = str(kind).removeprefix("torch.")
        with monkeypatch.context() as patch:
            for function in () if rounded else ("round_frozen", "halve_exact"):
                patch.setattr(run_models, function, lambda *given: None)
            run, prompts = make_run(files, dtype=name, update_old_actor_freq=2, learning_rate=1e-2)
        scores = []
        for step in range(3):
            _, batch = take_step(run, step, first(run, prompts))
            scores.append(batch.parts["model"])
        results.append([*scores, *weights(run)])
        (reward_model, _), dtype = run.reward.models["model"], kind if rounded else torch.float32
        for model in (run.models.reference, run.models.old_actor, reward_model.model):
            assert model.base_model.layers[0].mlp.up_proj.weight.dtype == dtype
        assert all(
            p.dtype == torch.float32
            for model in (run.models.actor, run.models.critic)
            for p in model.parameters()
        )
    assert same(*results)
