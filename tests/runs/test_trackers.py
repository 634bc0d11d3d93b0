"""Trackers with their real libraries, offline: what they hold of a run that was resumed, and when they fail.

What they wrote is read back: TensorBoard's events and SwanLab's records by their own readers, of wandb the
files of texts. All get the same values.
"""

import html
import importlib.util
import json
import os
import sys

import matplotlib
import pytest
from test_report import HTML, Page
from test_summary import logger_of
from tiny import DIE, finish, flags, launch, read_jsonl, refused, run_files, write_jsonl

from trainer import train_ppo, train_reward, train_sft
from trainer.runs import plots, trackers

ALL = ("swanlab", "tensorboard", "wandb")
SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 5, "critic_warmup_steps": 0}
SIZES |= {"save_interval": 2, "eval_interval": 3, "log_interval": 2, "run_name": "r", "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A home in which nobody is logged in. matplotlib's list of fonts, which takes seconds to make, stays."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("SWANLAB_API_KEY", "WANDB_API_KEY", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        yield


def in_tensorboard(folder):
    """-> ({metric: [(step, value), …]}, {name: [(step, text), …]})"""
    from tensorboard.backend.event_processing import event_accumulator as accumulators

    sizes = {"scalars": 0, "tensors": 0}
    events = accumulators.EventAccumulator(str(folder / "tensorboard"), size_guidance=sizes)
    events.Reload()
    tags, texts = events.Tags(), {}
    for name in tags["tensors"]:
        said = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(name)]
        texts[name.removesuffix("/text_summary")] = said
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in tags["scalars"]}, texts


def in_swanlab(folder):
    """The same from the newest run of SwanLab."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    run = max((folder / "swanlog").glob("run-*"))
    (path,) = run.glob("*.swanlab")
    reader, scalars, texts = DataStoreReader(), {}, {}
    reader.open(path)
    for record in map(Record.FromString, reader):
        if record.HasField("scalar"):
            scalar = record.scalar
            scalars.setdefault(scalar.key, []).append((scalar.step, scalar.value.number))
        elif record.HasField("media"):
            for item in record.media.value.items:
                text = (run / "media" / "text" / item.filename).read_text()
                texts.setdefault(record.media.key, []).append((record.media.step, text))
    reader.close()
    return scalars, texts


READERS = {"swanlab": in_swanlab, "tensorboard": in_tensorboard}


def in_wandb(folder, name):
    """The texts of this name in the newest offline run of wandb."""
    run = max((folder / "wandb").glob("offline-run-*"))
    return [path.read_text() for path in (run / "files" / "media" / "html").glob(f"{name}_*")]


def check_all_steps(name, folder, after=-1):
    """A tracker has every metric of every step of metrics.jsonl once, and no other step -> its texts. after:
    the step after which the newest run of SwanLab begins."""
    scalars, texts = READERS[name](folder)
    after = -1 if name == "tensorboard" else after
    records = [r for r in read_jsonl(folder / "metrics.jsonl") if r["step"] > after]
    metrics = {m for record in records for m in record if m != "step"}
    assert {m for m in scalars if not m.startswith("__swanlab__")} == metrics, name  # those are the machine's
    for metric in metrics:
        expected = [(r["step"], r[metric]) for r in records if metric in r]
        assert [step for step, _ in scalars[metric]] == [step for step, _ in expected], metric
        values = [value for _, value in scalars[metric]]
        assert values == pytest.approx([value for _, value in expected], rel=1e-6, abs=1e-6), metric
    return texts


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    held_out = write_jsonl(folder / "eval.jsonl", [{"prompt": "a b", "answer": "a"}])
    return run_files(folder, words=HTML) | {"eval_data_path": held_out}


def argv_of(files, out_dir, *names):
    """A run with these trackers, or the rest of it."""
    return [*flags(**files, **SIZES, out_dir=out_dir), "--tracker", *names, "--resume", "auto"]


@pytest.fixture(scope="module")
def resumed(files, tmp_path_factory):
    """The folder of a run with all trackers, killed in step 4 after a checkpoint of step 2, and resumed."""
    out = tmp_path_factory.mktemp("resumed")
    argv = argv_of(files, out, *ALL)
    finish(launch(argv, FAULT=DIE, FAULT_AT="8"), code=-9)  # calls 1, 2, 6, 7 evaluate
    assert read_jsonl(out / "r" / "metrics.jsonl")[-1]["step"] == 3
    train_ppo.main(argv)
    return out / "r"


def responses_of(folder, step):
    return [row["response"] for row in read_jsonl(folder / "samples.jsonl") if row["step"] == step]


def test_a_resumed_run_goes_on_where_its_checkpoint_was(resumed):
    """What the policy writes is HTML, which goes to all of them as text. wandb's steps have no reader."""
    for name in READERS:
        texts = check_all_steps(name, resumed, after=2)
        shown = [2, 4, 5] if name == "tensorboard" else [4, 5]  # every --log_interval steps, and the last
        assert [step for step, _ in texts["samples"]] == shown
        for step, text in texts["samples"]:
            assert len(responses_of(resumed, step)) >= 2
            assert all(response in text for response in responses_of(resumed, step))
        assert [step for step, _ in texts["summary"]] == [5]
    assert len(in_wandb(resumed, "summary")) == 1
    texts = in_wandb(resumed, "samples")
    for step in (4, 5):
        assert any(all(html.escape(x) in text for x in responses_of(resumed, step)) for text in texts)
    assert not any("<script>" in text for text in texts)
    run_id = json.loads((resumed / "config.json").read_text())["run_id"]
    found = [*resumed.glob("swanlog/run-*"), *resumed.glob("wandb/offline-run-*")]
    assert [folder.name.endswith(run_id) for folder in found] == [True] * 4


BREAK = """
import psutil
for process in psutil.Process().children(recursive=True):
    if "wandb-core" in process.name():
        process.kill()
        process.wait()
"""


def test_a_tracker_that_fails_leaves_the_run_and_the_others_alone(files, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_SERVICE")]:
        monkeypatch.delenv(name)  # of an earlier run of this process: this one starts wandb's process itself
    argv = argv_of(files, tmp_path, "wandb", "tensorboard")
    said, _ = finish(launch(argv, FAULT=BREAK, FAULT_AT="5"))  # in step 3
    assert said.count("note: --tracker wandb: it failed (") == 1, said
    assert said.count("gets nothing more; the run goes on") == 1
    check_all_steps("tensorboard", tmp_path / "r")
    assert (tmp_path / "ppo_actor_32.pth").exists()


def test_a_tracker_that_cannot_start_ends_the_run_in_one_line(files, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    line = refused("", train_ppo.main, argv_of(files, tmp_path, "wandb"))
    assert line.startswith("--tracker wandb: cannot start (")
    assert line.endswith("mend that, or leave it out")


@pytest.mark.parametrize("script", [train_sft, train_reward], ids=["sft", "reward"])
def test_the_stages_before_have_trackers_and_a_report_of_curves_too(files, tmp_path, script, monkeypatch):
    monkeypatch.setitem(sys.modules, plots.__name__, plots)  # which conftest.py leaves out
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"conversations": turns, "prompt": "a", "chosen": "a b", "rejected": "b"}] * 8
    data = write_jsonl(tmp_path / "data.jsonl", records)
    sizes = {"max_steps": 2, "batch_size": 4, "eval_size": 2, "run_name": "r", "device": "cpu"}
    argv = flags(model=files["model"], data_path=data, out_dir=tmp_path / "out", **sizes)
    script.main([*argv, "--tracker", "tensorboard", "--moments_dtype", "bfloat16"])
    assert "held" in check_all_steps("tensorboard", tmp_path / "out" / "r")["summary"][0][1]
    page = Page(tmp_path / "out" / "r" / "report.html")
    assert [a["id"] for a in page.all("section")] == ["verdict", "curves", "configuration"]
    assert len(page.all("svg")) == 3
    assert f"{script.__name__.partition('.')[2]}.py: step 2 of 2, ended" in page.text
    assert "No finding" not in page.text  # nothing is watched


def test_a_text_with_ends_of_lines_is_shown_by_tensorboard_as_it_is(tmp_path):
    """Its Markdown: each line is indented, also after those that only str.splitlines takes for ends."""
    row = {"prompt": "<b>?", "response": "\n# **x** \u2028 \x85", "parts": {"score": 1.0}}
    logger = logger_of(tmp_path, total_steps=2, log_interval=1, trackers=["tensorboard"])
    logger.log(1, {"kl/k1": 0.1}, {"samples.jsonl": [row]})
    logger.finish()
    ((_, shown),) = check_all_steps("tensorboard", tmp_path / "r")["samples"]
    assert "# **x**" in shown
    assert not any(line[:4].strip() for line in shown.split("\n"))


def test_the_flags_name_each_tracker_once():
    def wanted(*argv):
        return trackers.wanted(train_ppo.flag_parser().parse_args(argv))

    assert wanted() == wanted("--tracker") == wanted("--tracker", "none") == []
    assert wanted("--use_wandb") == wanted("--use_wandb", "--tracker", "swanlab") == ["swanlab"]
    assert wanted("--tracker", "wandb", "tensorboard", "wandb") == ["tensorboard", "wandb"]
    assert wanted("--use_wandb", "--tracker", "none") == ["swanlab"]
    refused("argument --tracker: invalid choice: 'mlflow'", train_ppo.parse_args, ["--tracker", "mlflow"])


def test_a_package_that_is_missing_is_one_line_and_leaves_no_folder(files, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    argv = [*flags(**files, **SIZES, out_dir=tmp_path / "out"), "--tracker", "wandb"]
    assert refused("", train_ppo.main, argv) == "--tracker wandb: needs wandb; pip install wandb"
    assert not (tmp_path / "out").exists()
