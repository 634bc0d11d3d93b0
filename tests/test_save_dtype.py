"""--save_dtype: a result keeps what was learned. In fp16 where rounding leaves the update as it is, else in
fp32, whatever the file and the script; what a file loses is said."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import flags, load_weights, read_jsonl, write_jsonl

from errors import InputError
from model.loading import load_policy, load_tokenizer
from model.saving import SaveDtype, kept_update
from trainer import train_ppo, train_reward, train_sft

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
DEMO = train_ppo.ROOT
STEP = 2.0**-10  # from 1 to fp16's next number


def test_what_is_kept_of_an_update_by_hand():
    """fp16 keeps a whole step and loses a quarter of one. A head without a start is left out, and so is what
    is no floating-point number."""
    start = {"w": torch.ones(2), "ids": torch.tensor([4097])}
    new = {"head": torch.tensor([100.03]), "ids": torch.tensor([4097])}
    moved = {"w": torch.tensor([1 + STEP, 1 + STEP / 4]), **new}
    share = 1 / math.sqrt(1 + 1 / 16)
    assert kept_update(moved, start, FP16) == pytest.approx((share, share), abs=1e-12)
    assert kept_update(moved, start, FP32) == pytest.approx((1.0, 1.0), abs=1e-12)
    assert kept_update({"w": torch.tensor([1 + STEP / 4, 1.0])}, start, FP16) == (0.0, 0.0)  # all is lost
    assert kept_update({"w": torch.ones(2)}, start, FP16) == (1.0, 1.0)
    inexact = {"w": torch.tensor([1 + STEP / 4, 1.0])}  # nothing was learned, and rounding changes it
    assert math.isnan(kept_update(inexact, inexact, FP16)[1])
    assert kept_update({"w": torch.tensor([7e4, 1.0])}, start, FP16)[1] == math.inf


class Weights(torch.nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(values))


def chosen(asked, learned, start=(1.0, 1.0), now=None):
    """-> (the dtype, what is said). start: of the run; now: what is read when it saves, None: nothing."""

    def read(dtype):
        if now is None:
            raise InputError("no such file")
        return Weights(*now).to(FP16 if dtype == "auto" else dtype)

    said = []
    state = {"w": torch.tensor(learned)}
    dtype = SaveDtype(asked, "--model m", read, Weights(*start)).choose(a_path("a.pth"), state, said.append)
    return dtype, "".join(said)


def a_path(name):
    return Path("/nowhere") / name


ONES, NEAR = (1.0, 1.0), (1 + STEP / 4, 1 + 2 * STEP)
CASES = {  # (asked, learned, start, now): (dtype, what is said of it)
    ("auto", (1 + STEP, 2.0), ONES, ONES): (
        FP16,
        "in float16 the update has cosine 1.0000 to what was learned",
    ),
    ("auto", NEAR, ONES, ONES): (
        FP32,
        "in float16 the update has cosine 0.9923 to what was learned and 0.992 of",
    ),
    ("float16", NEAR, ONES, ONES): (FP16, "in float16 the update has cosine 0.9923"),
    ("bfloat16", NEAR, ONES, ONES): (
        BF16,
        "in bfloat16 the update has cosine 0.0000 to what was learned and 0.000",
    ),
    ("float32", NEAR, ONES, ONES): (FP32, "nothing is rounded"),
    ("auto", (1 + STEP, 2.0), ONES, None): (
        FP32,
        "what float16 loses is unknown, as --model m has changed or is gone",
    ),
    ("auto", (1 + STEP, 2.0), ONES, (1.0, 1.5)): (FP32, "what float16 loses is unknown"),
    ("float16", (1 + STEP, 2.0), ONES, None): (FP16, "what float16 loses is unknown"),
    ("auto", (1 + STEP, 7e4), ONES, ONES): (FP32, "float16 cannot hold these weights"),
    ("auto", NEAR, NEAR, NEAR): (FP32, "no weight has changed"),
    # A start that its config.json calls fp16, and that is not.
    ("auto", (1 + STEP, 3.0), (1 + STEP / 4, 1.0), (1 + STEP / 4, 1.0)): (FP16, "cosine 1.0000"),
    # The direction is right and the length is not: 7/4 of a step become 2 in each.
    ("auto", (1 + 1.75 * STEP,) * 2, ONES, ONES): (
        FP32,
        "cosine 1.0000 to what was learned and 1.143 of its norm",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_dtype_and_why(case):
    dtype, said = chosen(*case)
    wanted, words = CASES[case]
    assert dtype == wanted
    assert said.startswith(f"saved    a.pth in {str(wanted)[6:]} (--save_dtype {case[0]}): ")
    assert words in said


def test_it_is_said_at_first_and_when_it_changes_of_each_file():
    said = []
    save_dtype = SaveDtype("auto", "--model m", lambda dtype: Weights(1.0), Weights(1.0))
    for name, value in (
        ("a", 2.0),
        ("a", 3.0),
        ("b", 2.0),
        ("a", 1 + STEP / 4),
        ("a", 1 - STEP / 8),
        ("a", 2.0),
    ):
        save_dtype.choose(a_path(name), {"w": torch.tensor([value])}, said.append)
    assert [line.split(":")[0].split()[1:4:2] for line in said] == [
        ["a", "float16"],
        ["b", "float16"],
        ["a", "float32"],
        ["a", "float16"],
    ]


# ------------------------------------------------------------------------------------------------ whole runs

SMALL = {"device": "cpu", "dtype": "float32", "run_name": "r", "eval_interval": 0, "log_interval": 1000}
PPO = {"batch_size": 8, "mini_batch_size": 8, "max_gen_len": 8, "advantage": "rloo"}
PPO |= {"num_generations": 2, "max_steps": 1}


def dtypes_in(path):
    return {x.dtype for x in torch.load(path, weights_only=True).values()}


def test_at_a_small_rate_the_demos_result_keeps_the_update(tmp_path, capsys):
    """It is the trained actor bit for bit; so is the average. Asked for fp16, a resumed run writes it, and
    says what it loses; asked for nothing again, it writes the same bytes as at first."""
    prompts = read_jsonl(DEMO / "dataset/demo/ppo.jsonl")[:20]
    more = {"model": DEMO / "model/demo/policy", "reward_model": DEMO / "model/demo/reward", "reasoning": 1}
    more |= {"data_path": write_jsonl(tmp_path / "few.jsonl", prompts), "out_dir": tmp_path}
    argv = flags(**SMALL, **PPO, **more, learning_rate=1e-7, ema_beta=0.5, missing_eos_penalty=1)
    train_ppo.main(argv)
    files = path, average = tmp_path / "ppo_actor_128.pth", tmp_path / "r/ema.pth"
    written = [file.read_bytes() for file in files]
    actor, start = (
        load_weights(tmp_path / "r", 1),
        load_policy(more["model"]).state_dict(),
    )
    for file in files:
        found = load_policy(file).state_dict()  # from which chat.py, export.py and all stages start
        assert dtypes_in(file) == {FP32}
        assert json.loads((file.with_suffix("") / "config.json").read_text())["dtype"] == "float32"
        assert all(x.equal(found[name]) for name, x in actor.items())
    assert not all(x.equal(start[name]) for name, x in actor.items())
    cosine, norm = kept_update(actor, start, FP16)
    assert cosine < 0.9
    lost = f"in float16 the update has cosine {cosine:.4f} to what was learned and {norm:.3f} of its norm\n"
    said = capsys.readouterr().out
    for file in files:
        assert said.count(f"saved    {file.name} in float32 (--save_dtype auto): {lost}") == 1
    end = said.rpartition("\nmodel ")[2]
    assert end.count(f"         in float32 (--save_dtype auto): {lost}") == 2

    train_ppo.main([*argv, "--resume", "auto", "--save_dtype", "float16"])
    assert dtypes_in(path) == dtypes_in(average) == {FP16}
    assert f"saved    {path.name} in float16 (--save_dtype float16): {lost}" in capsys.readouterr().out
    train_ppo.main([*argv, "--resume", "auto"])
    assert [file.read_bytes() for file in files] == written


@pytest.mark.parametrize("lora_r", [0, 4])
def test_at_a_usual_rate_it_is_in_fp16(files, lora_r, tmp_path, capsys):
    """The start is in fp16, as MiniMind's are. With adapters what is merged is measured."""
    start = load_policy(files["model"]).half()
    start.save_pretrained(tmp_path / "start")
    load_tokenizer(files["model"]).save_pretrained(tmp_path / "start")
    for rate, bits in ((3e-2, 16), (1e-5, 32)):
        out = tmp_path / str(bits)
        more = {**files, "model": tmp_path / "start", "learning_rate": rate, "lora_r": lora_r, "out_dir": out}
        train_ppo.main(flags(**SMALL, **PPO, **more))
        path = out / "ppo_actor_32.pth"
        assert dtypes_in(path) == {getattr(torch, f"float{bits}")}
        said = capsys.readouterr().out
        assert f"         in float{bits} (--save_dtype auto): in float16 the update has cosine " in said
        assert json.loads((out / "ppo_actor_32/config.json").read_text())["dtype"] == f"float{bits}"
        layers = [model.model.layers[0].mlp.up_proj.weight for model in (load_policy(path), start)]
        assert not layers[0].equal(layers[1].float())


STAGES = {  # {case: (script, rate, the result, its records, the model)}
    "sft from random weights": (train_sft, 1e-6, "full_sft_128", "sft", ""),
    "sft": (train_sft, 1e-7, "full_sft_128", "sft", DEMO / "model/demo/policy"),
    "reward": (train_reward, 1e-7, "reward_128", "preferences", DEMO / "model/demo/policy"),
}


@pytest.mark.parametrize("kind", STAGES)
def test_the_stages_results_keep_the_update_too(kind, tmp_path, capsys):
    """Stage 2: the new head has no start; it does not hide what the others lose."""
    script, rate, name, records, model = STAGES[kind]
    few = write_jsonl(tmp_path / "few.jsonl", read_jsonl(DEMO / f"dataset/demo/{records}.jsonl")[:20])
    more = {"model": model, "data_path": few, "learning_rate": rate, "out_dir": tmp_path}
    sizes = {"batch_size": 4, "max_steps": 1, "eval_size": 0}
    script.main(flags(**SMALL, **sizes, **more))
    trained = load_weights(tmp_path / "r", 1, "model")
    folder = tmp_path / name
    states = [load_file(folder / "model.safetensors")]
    if kind != "reward":
        states.append(torch.load(folder.with_suffix(".pth"), weights_only=True))
    for state in states:
        assert all(x.equal(state[key]) for key, x in trained.items() if key in state)
        assert {x.dtype for x in state.values()} == {FP32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    said = capsys.readouterr().out
    assert said.count(" in float32 (--save_dtype auto): in float16 the update has cosine 0.") == 2
