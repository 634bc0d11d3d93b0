"""fp16: the loss scale by hand and in real runs, and what happens where fp16's range is too small."""

import copy
import json
import shutil

import pytest
import torch
from steps import add_gradients, update
from test_invariants import ALONE, filled_rollout, make_run, same, weights
from tiny import flags, read_jsonl, refused, request_of, same_run, save_reward_dir, tiny_llama, word_tokenizer

from errors import InputError
from trainer import train_ppo
from trainer.compute import precision
from trainer.compute.precision import LossScale
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.inputs import check_sampling
from trainer.rewards.combine import Reward
from trainer.rewards.reward_models import load_reward_model
from trainer.runs.metrics import Metrics

FP16 = torch.float16


def test_it_halves_at_an_overflow_and_doubles_after_good_steps(monkeypatch):
    monkeypatch.setattr(precision, "INTERVAL", 3)
    scale, seen = LossScale(FP16), []
    for finite in (True, True, False, True, True, True, True, True, True, False, False):
        lowered = scale.adapt(finite)
        seen.append((scale.value / 2**16, scale.good_steps))
        assert lowered == (not finite)
    halves = [(1, 1), (1, 2), (0.5, 0)]  # the overflow begins the count anew
    doubles = [(0.5, 1), (0.5, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert seen == [*halves, *doubles, (1, 0), (0.5, 0)]
    scale.value = 2.0
    assert [scale.adapt(False) for _ in range(2)] == [True, False]
    assert scale.value == precision.LEAST_SCALE


def test_in_other_types_there_is_none_and_a_checkpoint_keeps_it():
    scale = LossScale(torch.bfloat16)
    assert scale.value == 1.0
    assert not scale.adapt(False)
    scale.adapt(True)
    scale.load_state_dict({"value": 8.0, "good_steps": 0})  # --dtype auto, resumed on another machine
    assert scale.value == 1.0
    assert scale.state_dict() == {}
    scale = LossScale(FP16)
    scale.load_state_dict({"value": 512.0, "good_steps": 7})
    assert scale.state_dict() == {"value": 512.0, "good_steps": 7}
    scale.load_state_dict({})  # of a run in another type, or of an older program
    assert scale.value == 512.0


def moments(run):
    states = [train_state.optimizer.state_dict()["state"] for train_state in run.train_states.values()]
    return [x.clone() for state in states for p in state.values() for x in p.values()]


def test_an_overflow_is_skipped_and_counted_until_the_scale_is_low_enough(files):
    run, prompts = make_run(files, dtype="float16")
    rollout, _ = filled_rollout(run, prompts)
    update(run, 0, rollout, Metrics())  # momentum exists now
    assert run.progress.skipped_steps == 0
    run.loss_scale.value, overflows, adapt = 2.0**30, [], run.loss_scale.adapt
    run.loss_scale.adapt = lambda finite: overflows.append(not finite) or adapt(finite)
    before, metrics = (copy.deepcopy(weights(run)), moments(run)), Metrics()
    update(run, 1, rollout, metrics)
    assert same(before[0], weights(run))
    assert same(before[1], moments(run))
    means = metrics.means(ALONE)
    assert means["policy/skipped_steps"] == 1.0
    assert means["perf/loss_scale"] == (2**30 + 2**29) / 2
    for step in range(2, 10):  # more than MAX_BAD_STEPS of them do not end the run
        update(run, step, rollout, Metrics())
    assert not same(before[0], weights(run))
    assert all(w.isfinite().all() for w in weights(run))
    assert run.progress.bad_steps == 0
    # The models share the scale: it is halved once a minibatch, whether one of them overflows or both do.
    assert len(overflows) == 2 * 9
    assert run.loss_scale.value == 2.0 ** (30 - sum(overflows))
    assert 6 < sum(overflows) < 16
    assert sum(overflows) < run.progress.skipped_steps < 2 * sum(overflows)


def test_what_a_lower_scale_cannot_help_ends_the_run_and_names_fp32(files):
    """A loss that is not finite is not the fault of the scale: that stays."""
    run, prompts = make_run(files, dtype="float16")
    rollout, _ = filled_rollout(run, prompts)
    returns = rollout.returns.clone()
    rollout.returns[3, 0] = torch.inf  # one minibatch of two
    update(run, 0, rollout, Metrics())
    assert run.progress.skipped_steps == 1
    assert run.loss_scale.value == precision.FIRST_SCALE
    rollout.returns = returns
    run.progress.bad_steps = 0
    handle = run.models.actor.model.norm.weight.register_hook(lambda grad: grad * torch.nan)
    run.loss_scale.value = 4.0
    update(run, 0, rollout, Metrics())
    assert (run.loss_scale.value, run.progress.bad_steps) == (1.0, 0)
    with pytest.raises(SystemExit, match=r"in a row were not finite; .*, or use --dtype float32"):
        for step in (1, 2, 3):
            update(run, step, rollout, Metrics())
    assert run.progress.skipped_steps == 1 + 2 + 5
    handle.remove()


def test_gradients_are_those_of_fp32(files):
    """In fp16, scaled and unscaled, they differ from fp32's by fp16's rounding: relative 2^-11 a number."""
    grads, norms = {}, {}
    for dtype in ("float32", "float16"):
        run, prompts = make_run(files, dtype=dtype)
        if dtype == "float32":
            rollout, _ = filled_rollout(run, prompts)
            critic, scale = copy.deepcopy(run.models.critic.state_dict()), run.models.critic.scale
        run.models.critic.load_state_dict(critic)
        run.models.critic.scale = scale
        count = rollout.response_len.sum().item()
        for name in ("critic", "actor"):
            add_gradients(run, name, rollout, count)
        parameters = [p for model in (run.models.critic, run.models.actor) for p in model.parameters()]
        grads[dtype] = [p.grad / run.loss_scale.value for p in parameters]
        norms[dtype] = [run.updater.step(name, 0.0, 0).norm for name in run.train_states]
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.01)  # unscaled before they are clipped
    for exact, rounded in zip(grads["float32"], grads["float16"], strict=True):
        # The bias of the critic's head has a gradient of 0: its values are unbiased.
        assert (rounded - exact).norm() <= 0.01 * exact.norm() + 1e-5


SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 4, "epochs": 9}
SIZES |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "critic_warmup_steps": 0, "run_name": "r"}
SIZES |= {"device": "cpu", "log_interval": 1000, "save_interval": 2, "keep_checkpoints": 9}


def test_resumed_in_fp16_with_small_moments_it_ends_bit_for_bit_the_same(files, tmp_path, monkeypatch):
    """The critic's gradients overflow now and then, because the scale doubles after three good steps. AdamW's
    moments are in bf16; another type of them is another run."""
    monkeypatch.setattr(precision, "INTERVAL", 3)
    argv = flags(**files, **SIZES, dtype="float16", moments_dtype="bfloat16", vf_coef=100)
    train_ppo.main([*argv, "--out_dir", str(tmp_path / "whole")])
    whole = tmp_path / "whole" / "r"
    half = shutil.copytree(whole, tmp_path / "half" / "r")
    argv += ["--out_dir", str(tmp_path / "half")]
    train_ppo.main([*argv, "--resume", str(half / "checkpoints" / "step_2")])
    same_run(whole, half, step=4)
    logged = [read_jsonl(folder / "metrics.jsonl")[1:] for folder in (whole, half)]
    scales = [[line["perf/loss_scale"] for line in lines] for lines in logged]
    assert scales[0] == scales[1]
    assert len(set(scales[0])) > 2
    last = [folder / "checkpoints" / "step_4" for folder in (whole, half)]
    for name in ("state.json", "actor_optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
    sizes = [(last[0] / f"actor{kind}.safetensors").stat().st_size for kind in ("", "_optimizer")]
    assert sizes[1] < 1.2 * sizes[0]  # two moments of 16 bits for a weight of 32
    saved = json.loads((half / "checkpoints" / "step_2" / "state.json").read_text())
    assert saved["loss_scale"]["good_steps"] > 0  # the count must be kept, too
    assert 0 < saved["skipped_steps"] < 4
    with pytest.raises(InputError, match="--moments_dtype was 'bfloat16' and is now 'float32'"):
        train_ppo.main([*argv, "--resume", "auto", "--moments_dtype", "float32"])


# prompts, noise, the id of the end, the most tokens
GIVEN = [[2 + i % 7] * (1 + i % 5) for i in range(24)], noise_keys(7, 3, range(24)), [0], 10


def test_a_policy_that_overflows_while_sampling_is_one_line():
    """Its norm is so large that its logits, finite in fp32, are beyond fp16's range."""
    policy = tiny_llama(10, layers=2, spread=2.0)
    policy.model.norm.weight.data.fill_(6e4)
    check_sampling(policy, policy.device)
    for temperature in (0.0, 1.0):
        assert Sampler(policy, torch.float32).sample(*GIVEN, temperature).sampler_logprobs.isfinite().all()
        remedy = "in float16 the policy gives .* infinite; use --dtype float32"
        refused(remedy, Sampler(policy, FP16).sample, *GIVEN, temperature)


def test_a_reward_model_that_overflows_is_one_line(tmp_path):
    path = save_reward_dir(tmp_path, word_tokenizer(list("abcdefgh"), chat=True))
    model = load_reward_model(path, torch.device("cpu"), dtype=FP16)
    assert model([("a b", "c")]).isfinite().all()
    model.model.model.norm.weight.data.fill_(6e4)
    model.model.score.weight.data.fill_(6e4)
    reward = Reward(models={"model": (model, 1.0)})
    refused("--reward_model: the score .* --dtype float32 may help", reward, request_of(["a b"], ["c"]))
