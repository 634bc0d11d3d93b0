"""The command line of train_ppo.py: what a run writes; bad input gives one error line and writes nothing."""

import json
import subprocess
import sys

import pytest
import tiny
import torch

from model.loading import load_policy, load_tokenizer
from trainer import train_ppo

PICTURES = True  # see pictures.py

WORDS = list("abcdefgh")
SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 2, "critic_warmup_steps": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    tokenizer = tiny.word_tokenizer(WORDS, chat=True)
    records = [{"prompt": f"{a} {b}", "answer": a} for a in WORDS for b in WORDS]
    return {
        "model": tiny.save_policy_dir(folder / "policy", tokenizer, spread=2.0),
        "reward_model": tiny.save_reward_dir(folder / "reward", tokenizer),
        "data_path": tiny.write_jsonl(folder / "prompts.jsonl", records),
        "eval_data_path": tiny.write_jsonl(folder / "eval.jsonl", records[:6]),
    }


def test_a_run_writes_config_metrics_samples_curves_and_weights(files, tmp_path):
    tiny.train(**files, **SIZES, out_dir=tmp_path, epochs=3, reasoning=1)
    run = tmp_path / "run_1"
    config = json.loads((run / "config.json").read_text())
    assert config["batch_size"] == 8
    assert config["versions"]["torch"] == torch.__version__
    metrics = tiny.read_jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2]
    groups = {name.split("/")[0] for m in metrics for name in m if name != "step"}
    assert groups == {"rollout", "reward", "kl", "policy", "value", "perf", "eval"}
    assert {"kl/k1", "kl/k3", "reward/format", "reward/marks", "reward/model", "eval/accuracy"} <= {
        name for m in metrics for name in m
    }
    sample = tiny.read_jsonl(run / "samples.jsonl")[0]
    assert sample["prompt"] in {f"{a} {b}" for a in WORDS for b in WORDS}  # as the file has it
    score = sample["parts"].pop("score")
    assert score == pytest.approx(sum(sample["parts"].values()), abs=1e-3)
    assert (run / "curves.png").stat().st_size > 10_000
    state = torch.load(tmp_path / "ppo_actor_32.pth", weights_only=True)
    assert {x.dtype for x in state.values()} == {torch.float16}
    assert "lm_head.weight" in state
    moved = load_policy(str(tmp_path / "ppo_actor_32.pth")), tiny.tiny_llama(10, spread=2.0)
    assert not all(a.half().equal(b.half()) for a, b in zip(*(m.parameters() for m in moved), strict=True))
    assert len(load_tokenizer(str(tmp_path / "ppo_actor_32"))) == 10


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    paths = {name: folder / name for name in ("text.jsonl", "empty.jsonl", "big", "fn.py")}
    paths["text.jsonl"].write_text('{"prompt": "a"}\nhello\n')
    paths["empty.jsonl"].write_text("")
    tiny.write_jsonl(folder / "long.jsonl", [{"prompt": "a " * 100}])
    broken = tiny.tiny_llama(10)
    broken.model.norm.weight.data[3] = torch.nan
    broken.save_pretrained(folder / "nan")
    tiny.word_tokenizer(WORDS, chat=True).save_pretrained(folder / "nan")
    tiny.word_tokenizer("abcdefghijklmnopqrstuvwxyz", chat=True).save_pretrained(paths["big"])
    paths["fn.py"].write_text("def f(prompts, responses, answers):\n    return [1.0]\n")
    return str(folder)


FROM_NONE = {"reward_model": "", "reward_fn": "{}/fn.py:f", "critic_init": "reward"}
BAD = [  # (what is wrong, flags with {} for the folder above, text that the error must contain)
    ("data missing", {"data_path": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ("data empty", {"data_path": "{}/empty.jsonl"}, "empty.jsonl: the file has no records"),
    ("data not JSON", {"data_path": "{}/text.jsonl"}, "text.jsonl:2"),
    ("every prompt too long", {"data_path": "{}/long.jsonl", "max_seq_len": 50}, "--max_seq_len"),
    ("held-out data missing", {"eval_data_path": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ("model missing", {"model": "/nowhere"}, "/nowhere"),
    ("weights that are not numbers", {"model": "{}/nan"}, "not finite"),
    ("MiniMind's name missing", {"model": "", "hidden_size": 512}, "full_sft_512.pth: no such file"),
    ("another hidden size", {"hidden_size": 64}, "--hidden_size 64"),
    ("tokenizer too big", {"tokenizer": "{}/big"}, "tokenizer"),
    ("tokenizer missing", {"tokenizer": "/nowhere"}, "/nowhere"),
    ("reward model missing", {"reward_model": "/nowhere"}, "--reward_model /nowhere"),
    ("reward model is a policy", {"reward_model": "{policy}"}, "no sequence classifier"),
    ("reward function missing", {"reward_fn": "{}/fn.py:g"}, "no function 'g'"),
    ("both: it is first", {"reward_fn": "{}/fn.py:g", "reward_model": "/nowhere"}, "no function 'g'"),
    ("reward function of one score", {"reward_fn": "{}/fn.py:f"}, "returned 1 scores for"),
    ("a run name that is a path", {"run_name": "../x"}, "--run_name ../x"),
    ("a run name that is a path on Windows", {"run_name": r"..\x"}, r"--run_name ..\x"),
    ("beyond the positions", {"max_gen_len": 1000}, "--max_gen_len 1000"),
    ("warm-up as long as the run", {"critic_warmup_steps": 2}, "--critic_warmup_steps 2"),
    ("critic from none", FROM_NONE, "--critic_init"),
    ("no such GPU", {"device": "cuda:7"}, "--device cuda:7"),
    ("another device of torch", {"device": "mps"}, "only cpu and cuda"),
    ("another device, its remedy", {"device": "meta"}, "--device cpu"),
    ("a folder that is a file", {"out_dir": "{}/text.jsonl"}, "--out_dir"),
    ("a run folder that is a file", {"out_dir": "{}", "run_name": "text.jsonl"}, "--run_name"),
    ("nothing to resume", {"resume": "/nowhere"}, "--resume /nowhere"),
]


@pytest.mark.parametrize(("what", "change", "named"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_one_line_and_writes_nothing(what, change, named, files, bad, tmp_path):
    change = {k: str(v).replace("{policy}", files["model"]).replace("{}", bad) for k, v in change.items()}
    argv = tiny.flags(**{**files, **SIZES, "device": "cpu", "out_dir": tmp_path / "out", **change})
    line = tiny.refused("", train_ppo.main, argv)
    assert named in line and len(line) < 400
    if what != "reward function of one score":  # this error appears only when the function is called
        assert not (tmp_path / "out").exists()


def test_bad_input_on_the_real_command_line_and_ddp_without_torchrun(files, tmp_path):
    process = tiny.launch(tiny.flags(**files, **SIZES | {"mini_batch_size": 16}, out_dir=tmp_path / "out"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 2
    assert err == "error: --mini_batch_size 16: must divide --batch_size 8\n"
    assert out == ""
    argv = tiny.flags(**files, **SIZES, out_dir=tmp_path / "out")
    tiny.refused("torchrun", train_ppo.main, [*argv, "--ddp"])


def test_it_runs_from_any_folder(files, tmp_path):
    argv = tiny.flags(**files, **SIZES | {"max_steps": 1}, out_dir=tmp_path, device="cpu", eval_interval=0)
    command = [sys.executable, "train_ppo.py", *argv]
    done = subprocess.run(command, cwd=tiny.ROOT / "trainer", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
