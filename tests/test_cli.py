"""The command line of train_ppo.py: what a run writes; bad input gives one error line and writes nothing."""

import json

import pytest
import tiny
import torch

from errors import run_script
from model.loading import load_policy, load_tokenizer
from trainer import train_ppo

PICTURES = True  # see forks.py

SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 2, "critic_warmup_steps": 0}


def test_a_run_writes_config_metrics_samples_curves_and_weights(files, tmp_path):
    held_out = tiny.write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "a b", "answer": "a"}] * 6)
    tiny.train(**files, **SIZES, eval_data_path=held_out, out_dir=tmp_path, epochs=3, reasoning=1)
    run = tmp_path / "run_1"
    config = json.loads((run / "config.json").read_text())
    assert config["batch_size"] == 8
    assert config["versions"]["torch"] == torch.__version__
    metrics = tiny.read_jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2]
    names = {name for m in metrics for name in m}  # which there are: test_docs.py
    assert {"kl/k1", "reward/format", "reward/model", "value/loss", "eval/accuracy"} <= names
    sample = tiny.read_jsonl(run / "samples.jsonl")[0]
    assert sample["prompt"] in [record["prompt"] for record in tiny.read_jsonl(files["data_path"])]
    score = sample["parts"].pop("score")
    assert score == pytest.approx(sum(sample["parts"].values()), abs=1e-3)
    assert (run / "curves.png").stat().st_size > 10_000
    state = torch.load(tmp_path / "ppo_actor_32.pth", weights_only=True)
    assert {x.dtype for x in state.values()} == {torch.float16}
    assert "lm_head.weight" in state
    moved = load_policy(str(tmp_path / "ppo_actor_32.pth")), tiny.tiny_llama(10, layers=2, spread=2.0)
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
    tiny.word_tokenizer(tiny.WORDS, chat=True).save_pretrained(folder / "nan")
    tiny.word_tokenizer("abcdefghijklmnopqrstuvwxyz", chat=True).save_pretrained(paths["big"])
    tiny.save_policy_dir(folder / "adapted", tiny.word_tokenizer(tiny.WORDS), layers=2)
    (folder / "adapted" / "adapter_config.json").touch()
    paths["fn.py"].write_text("def f(prompts, responses, answers):\n    return [1.0]\n")
    return str(folder)


FROM_NONE = {"reward_model": "", "reward_fn": "{}/fn.py:f", "critic_init": "reward"}
BAD = [  # (what is wrong, flags with {} for the folder above, text that the error must contain)
    ("sizes", {"mini_batch_size": 16}, "error: --mini_batch_size 16: must divide --batch_size 8"),
    ("data missing", {"data_path": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ("data empty", {"data_path": "{}/empty.jsonl"}, "empty.jsonl: the file has no records"),
    ("data not JSON", {"data_path": "{}/text.jsonl"}, "text.jsonl:2"),
    ("every prompt too long", {"data_path": "{}/long.jsonl", "max_seq_len": 50}, "--max_seq_len"),
    ("model missing", {"model": "/nowhere"}, "/nowhere"),
    ("weights that are not numbers", {"model": "{}/nan"}, "not finite"),
    ("MiniMind's name missing", {"model": "", "hidden_size": 512}, "full_sft_512.pth: no such file"),
    ("another hidden size", {"hidden_size": 64}, "--hidden_size 64"),
    ("tokenizer too big", {"tokenizer": "{}/big"}, "tokenizer"),
    ("tokenizer missing", {"tokenizer": "/nowhere"}, "/nowhere"),
    ("reward model missing", {"reward_model": "/nowhere"}, "--reward_model /nowhere"),
    ("reward model is a policy", {"reward_model": "{policy}"}, "no sequence classifier"),
    ("reward function missing", {"reward_fn": "{}/fn.py:g"}, "no function or class 'g'"),
    ("reward function of one score", {"reward_fn": "{}/fn.py:f"}, "returned 1 scores for"),
    ("a run name that is a path", {"run_name": "../x"}, "--run_name ../x"),
    ("a run name that is a path on Windows", {"run_name": r"..\x"}, r"--run_name ..\x"),
    ("beyond the positions", {"max_gen_len": 1000}, "--max_gen_len 1000"),
    (
        "an adapter",
        {"model": "{}/adapted"},
        "adapted: a LoRA adapter lies there; merge it: with",
    ),
    ("warm-up as long as the run", {"critic_warmup_steps": 2}, "--critic_warmup_steps 2"),
    ("critic from none", FROM_NONE, "--critic_init"),
    ("no such GPU", {"device": "cuda:7"}, "--device cuda:7"),
    ("another device of torch", {"device": "xpu"}, "only cpu, cuda and mps"),
    ("no Mac", {"device": "mps"}, "--device mps: not usable here (--device cpu always is): torch finds no"),
    ("no Mac, numbered", {"device": "mps:0"}, "torch finds no GPU of a Mac"),
    ("a folder that is a file", {"out_dir": "{}/text.jsonl"}, "--out_dir"),
    ("a run folder that is a file", {"out_dir": "{}", "run_name": "text.jsonl"}, "--run_name"),
    ("a run folder that is the result's", {"run_name": "ppo_actor_32"}, "change --run_name"),
    ("nothing to resume", {"resume": "/nowhere"}, "--resume /nowhere"),
]


@pytest.mark.parametrize(("what", "change", "named"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_one_line_and_writes_nothing(what, change, named, files, bad, tmp_path, capfd):
    change = {k: str(v).replace("{policy}", files["model"]).replace("{}", bad) for k, v in change.items()}
    argv = tiny.flags(**{**files, **SIZES, "device": "cpu", "out_dir": tmp_path / "out", **change})
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: train_ppo.main(argv))
    line = capfd.readouterr().err
    assert ended.value.code == 2
    assert line.startswith("error: ") and named in line and len(line) < 400
    assert line.count("\n") == 1
    if what != "reward function of one score":  # this error appears only when the function is called
        assert not (tmp_path / "out").exists()


def test_ddp_without_torchrun_is_one_line(files, tmp_path):
    argv = tiny.flags(**files, **SIZES, out_dir=tmp_path / "out")
    tiny.refused("torchrun", train_ppo.main, [*argv, "--ddp"])
