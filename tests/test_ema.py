"""--ema_beta: a moving average of the actor's weights, evaluated and saved beside the actor."""

import pytest
import torch
from same_runs import same_weights
from test_invariants import make_run
from tiny import flags, load_weights, read_jsonl, train, write_jsonl

from errors import InputError
from model.loading import load_policy
from trainer import train_ppo
from trainer.options.ema import Ema
from trainer.runs.optimizer_step import TrainState


def average_of(values, beta=0.5, first_batch=0):
    """Batches after which the only weight has these values -> (the average after each, the ``Ema``)."""
    model = torch.nn.Linear(1, 1, bias=False)
    train_state = TrainState(model, None, peak=1.0, total_steps=400, first_batch=first_batch)
    ema, found = Ema(train_state, beta), []
    for batch, value in enumerate(values):
        model.weight.data.fill_(value)
        ema.after_step(batch, None)
        found.append(ema.weights["weight"].item())
    return found, ema


def test_the_average_by_hand():
    """Weights 1, 3, 5 with beta 0.5: 1; (3 + 0.5) / 1.5; (5 + 1.5 + 0.25) / 1.75. Warm-up does not count."""
    assert average_of([1.0, 3.0, 5.0])[0] == pytest.approx([1, 3.5 / 1.5, 6.75 / 1.75])
    assert average_of([9.0, 9.0, 1.0, 3.0], first_batch=2)[0][2:] == pytest.approx([1, 3.5 / 1.5])
    _, resumed = average_of([5.0])
    resumed.load_state_dict(average_of([1.0, 3.0])[1].state_dict())
    resumed.after_step(2, None)
    assert resumed.weights["weight"].item() == pytest.approx(6.75 / 1.75)


def test_the_model_has_the_average_inside_the_block_only():
    _, ema = average_of([1.0, 3.0])
    weight = ema.train_state.model.weight
    with ema.in_place():
        assert weight.item() == pytest.approx(3.5 / 1.5)
    assert weight.item() == 3.0
    with pytest.raises(InputError), ema.in_place():
        raise InputError("a reward failed")
    assert weight.item() == 3.0
    assert ema.weights["weight"].item() == pytest.approx(3.5 / 1.5)


def test_with_adapters_only_these_are_averaged(files):
    run, _ = make_run(files, lora_r=2, ema_beta=0.9)
    assert run.ema.weights
    assert all(".lora_" in name for name in run.ema.weights)


RUN = {"batch_size": 16, "mini_batch_size": 8, "max_gen_len": 6, "epochs": 99, "learning_rate": 1e-2}
EACH = {"device": "cpu", "save_interval": 1, "eval_interval": 0}
RUN |= {"critic_warmup_steps": 1, "max_steps": 4, "run_name": "r", "keep_checkpoints": 9}


def test_a_run_evaluates_and_saves_the_average(files, tmp_path):
    """It is that of the weights in the checkpoints, its .pth too; the actor trains as without it."""
    prompts = read_jsonl(files["data_path"])[:30]
    more = {**files, "eval_data_path": write_jsonl(tmp_path / "eval.jsonl", prompts), "out_dir": tmp_path}
    train_ppo.main(flags(**more, **RUN, **EACH, ema_beta=0.5))
    folder, path = tmp_path / "r", tmp_path / "r/ema.pth"
    first, *_, last = read_jsonl(folder / "metrics.jsonl")
    assert "ema/score" not in first
    averages = {name.replace("ema/", "eval/") for name in last if "ema/" in name}
    assert averages == {name for name in last if "eval/" in name}
    assert last["ema/score"] != last["eval/score"]

    after = [load_weights(folder, step) for step in (2, 3, 4)]  # in step 1 only the critic trained
    wanted = {name: (after[2][name] + x / 2 + after[0][name] / 4) / 1.75 for name, x in after[1].items()}
    averaged = load_policy(str(path)).state_dict()
    for name, x in wanted.items():
        assert (averaged[name] - x).abs().max() < 1e-3 * x.abs().max(), name  # the file is in fp16
    assert path.with_suffix("").is_dir()
    kept = load_weights(folder, 4, "ema")
    assert kept.pop("batches") == 3
    tied = wanted["lm_head.weight"]  # a checkpoint of the actor has it under this name only
    assert all((x - wanted.get(name, tied)).abs().max() < 1e-6 for name, x in kept.items())

    train(**{**more, **RUN, "run_name": "plain"})
    same_weights(folder, tmp_path / "plain", 4, most=0)
