"""``--out_dir s3://…`` with a real S3 server: moto's, in a process of its own."""

import json
import os
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import fsspec
import pytest
from tiny import (
    DIE,
    FAULTY_REWARD,
    PYTHON,
    finish,
    flags,
    launch,
    launch_torchrun,
    load_weights,
    read_jsonl,
    run_files,
    same_run,
    wait_for,
    write_jsonl,
)

from errors import InputError
from trainer import train_ppo, train_reward, train_sft
from trainer.flags import mirror_of
from trainer.runs.checkpoints import SUMS, list_checkpoints
from trainer.runs.job import check_shards
from trainer.runs.remote_folder import WRITER, RemoteFolder
from trainer.runs.run_folder import choose

URL = "s3://bucket/out"
RUN = {"max_gen_len": 4, "max_steps": 6, "epochs": 99, "seed": 1, "dtype": "float32", "device": "cpu"}
RUN |= {"critic_warmup_steps": 1, "log_interval": 1000, "save_interval": 1, "keep_checkpoints": 2}
RUN |= {"batch_size": 8, "mini_batch_size": 4, "eval_interval": 2, "run_name": "r"}

SLOW_REWARD = """import pathlib
def slow(prompts, responses, answers):
    time.sleep(float(pathlib.Path(__file__).with_name("pause.txt").read_text()))
    return fast(prompts, responses, answers)
"""

SERVER = """import sys, logging
logging.disable(logging.CRITICAL)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Server:
    """An S3 server with one empty bucket, in a process of its own, as long as that lives."""

    def __init__(self, port=0):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([PYTHON, "-c", SERVER, str(port)], text=True, **pipes)
        self.port = next(int(line) for line in self.process.stdout if line.strip().isdigit())
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self.port}"
        self.fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        self.fs.mkdir("bucket")

    def names(self, below="out"):
        return sorted(name.removeprefix(f"bucket/{below}/") for name in self.fs.find(f"bucket/{below}"))

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Credentials that moto takes, and only one attempt of botocore's own."""
    names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    names |= {"AWS_MAX_ATTEMPTS": "1", "AWS_ENDPOINT_URL": ""}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    yield
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def running(environment):
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running):
    """The server, its bucket empty."""
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{running.port}"
    if names := running.fs.find("bucket"):
        running.fs.rm(names)
    return running


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that gives this test another, empty machine -> the folder of the run there."""

    def change(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return Path(mirror_of(URL)) / "r"

    change("first")
    return change


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    found = run_files(tmp_path_factory.mktemp("files"))
    return found | {"eval_data_path": found["data_path"]}


@pytest.fixture(scope="module")
def never_stopped(files, tmp_path_factory):
    """The run in a local folder -> --out_dir."""
    out = tmp_path_factory.mktemp("local")
    train_ppo.main(argv_of(files, out))
    return out


def argv_of(files, out_dir=URL, **more):
    return flags(**{**files, **RUN, "out_dir": out_dir, **more})


# ------------------------------------------------------------------------------- parts, with the same server


def a_run(folder, steps, run_id="1"):
    """Write a run folder as a run does: checkpoints with sums, a log, a config."""
    from trainer.runs import checkpoints

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"run_id": run_id, "processes": 1}))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(max(steps) + 1)))
    for step in steps:
        path = folder / "checkpoints" / f"step_{step}"
        path.mkdir(parents=True)
        for name in ("config.json", "state.json"):
            (path / name).write_text(json.dumps({"run_id": run_id, "step": step}))
        checkpoints._seal(path)
    return folder


def remote(keep=2, holder="me"):
    return RemoteFolder(URL, mirror_of(URL), keep, holder)


def steps_of(names):
    return sorted({int(name.split("/")[2].split("_")[1]) for name in names if "/checkpoints/" in name})


@pytest.fixture
def sent(server, machine):
    """A run with checkpoints 5 and 10, sent from a first machine -> the server."""
    a_run(machine("first"), [5, 10])
    remote().send("r")
    return server


def test_an_incomplete_checkpoint_does_not_count(sent, machine):
    sent.fs.rm_file(f"bucket/out/r/checkpoints/step_10/{SUMS}")
    here = machine("second")
    remote().fetch("r")
    assert [path.name for path in list_checkpoints(here)] == ["step_5"]


def test_the_one_before_a_damaged_checkpoint_is_fetched_too(sent, machine):
    sent.fs.pipe_file("bucket/out/r/checkpoints/step_10/state.json", b"{}")
    here = machine("second")
    remote().fetch("r")
    assert [path.name for path in list_checkpoints(here)] == ["step_5", "step_10"]


def test_the_sums_are_sent_last_and_removed_first(server, machine, monkeypatch):
    """A process that dies between two requests leaves no checkpoint that counts."""
    here, done = a_run(machine("first"), [5]), []
    folder = remote(keep=1)
    put, rm_file = folder.fs.put, folder.fs.rm_file
    folder.fs.put = lambda files, places: (done.extend(places), put(files, places))
    folder.fs.rm_file = lambda place: (done.append(place), rm_file(place))
    folder.send("r")
    part = [place for place in done if "step_5" in place]
    assert len(part) == 3
    assert part[-1].endswith(SUMS)
    shutil.rmtree(here / "checkpoints")
    a_run(here, [10])
    done.clear()
    folder.send("r")
    part = [place for place in done if "step_5" in place]
    assert len(part) == 3
    assert part[0].endswith(SUMS)
    assert steps_of(server.names()) == [10]


def test_a_checkpoint_that_was_written_again_is_sent_again(sent, machine):
    """As after --resume of an older one: what is later goes there too."""
    here = machine("first")
    folder = remote()
    folder.look()
    shutil.rmtree(here / "checkpoints" / "step_10")
    folder.send("r")
    assert steps_of(sent.names()) == [5]
    a_run(here, [10], run_id="1 again")
    folder.send("r")
    state = json.loads(sent.fs.cat_file("bucket/out/r/checkpoints/step_10/state.json"))
    assert state["run_id"] == "1 again"


def test_only_what_has_changed_is_sent(sent, machine):
    here = machine("first")
    folder = remote()
    folder.send("r")
    done, put = [], folder.fs.put
    folder.fs.put = lambda files, places: (done.extend(places), put(files, places))
    folder.send("r")
    assert done == []
    with open(here / "metrics.jsonl", "a") as file:
        file.write("{}\n")
    folder.send("r")
    assert done == ["bucket/out/r/metrics.jsonl"]
    assert sent.fs.cat_file(done[0]).endswith(b"{}\n")


@pytest.mark.parametrize("mine", ["later", "older", "of another run", "the same"])
def test_which_of_two_copies_a_resumed_run_takes(sent, machine, mine):
    """This machine may be ahead, if the network broke; else it has what is there."""
    here = machine("second")
    steps = {"later": [15], "older": [5], "of another run": [15], "the same": [10]}[mine]
    a_run(here, steps, run_id="2" if mine == "of another run" else "1")
    (here / "note.txt").write_text("mine")
    remote().fetch("r")
    kept = mine in ("later", "the same")
    assert (here / "note.txt").exists() == kept
    assert list_checkpoints(here)[-1].name == ("step_15" if mine == "later" else "step_10")


def test_the_last_process_that_takes_up_a_run_keeps_it(sent, machine):
    first, second = remote(holder="one"), remote(holder="two")
    first.send("r")
    second.send("r")
    (machine("first") / "note.txt").write_text("of the first")
    with pytest.raises(InputError, match="r there belongs to two now, so this process ends"):
        first.send("r")
    assert "r/note.txt" not in sent.names()
    first.send("r")  # at its end: nothing more
    sent.fs.rm("bucket/out/r", recursive=True)
    with pytest.raises(InputError, match="nobody"):
        second.send("r")


def test_a_new_run_gets_a_free_number_and_replaces_the_best_of_the_one_before(sent, machine):
    a_run(machine("first").with_name("run_3"), [1])
    for name in ("ppo_actor_8.pth", "ppo_actor_8_best.pth", "ppo_actor_8_best/config.json"):
        path = Path(mirror_of(URL)) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    remote().send("run_3")
    here = machine("second").parent
    folder = remote()
    folder.look()
    assert choose(str(here), "", "", "run")[0].name == "run_4"
    assert not (here / "ppo_actor_8.pth").exists()
    shutil.rmtree(here / "ppo_actor_8_best")
    (here / "ppo_actor_8_best.pth").unlink()
    a_run(here / "run_4", [1])
    folder.send("run_4")
    assert [name for name in sent.names() if name.startswith("ppo")] == ["ppo_actor_8.pth"]


def test_a_run_that_learned_nothing_leaves_nothing(sent, machine):
    folder = remote()
    folder.send("r")
    shutil.rmtree(machine("first"))
    folder.send("r")
    assert sent.names() == []


def test_a_machine_without_the_main_process_fetches_the_checkpoint(sent, machine):
    sums = (machine("first") / "checkpoints" / "step_10" / SUMS).read_bytes()
    here = a_run(machine("second"), [10], run_id="another")  # of the same name
    copy = remote().copy_of("r/checkpoints/step_10", sums)
    assert copy == here / "checkpoints" / "step_10"
    assert (copy / SUMS).read_bytes() == sums
    assert json.loads((copy / "state.json").read_text())["run_id"] == "1"


def test_after_a_failure_nothing_more_is_sent(sent, machine, monkeypatch):
    """The end of the run does not wait for the network once more."""
    monkeypatch.setattr("trainer.runs.remote_folder.PAUSES", (0.0, None))
    folder, calls = remote(), []

    def fail(*words):
        calls.append(words)
        raise OSError("the cable is out")

    folder.fs.put = fail
    with pytest.raises(InputError, match=r"OSError: the cable is out\); all of this run is in "):
        folder.send("r")
    folder.send("r")
    assert len(calls) == 2  # both of the first time


def test_folders_in_a_checkpoint_go_there_and_back(server, machine):
    first = a_run(machine("first"), [5]) / "checkpoints" / "step_5"
    (first / "parts").mkdir()
    (first / "parts" / "0.bin").write_bytes(b"0")
    remote().send("r")
    second = machine("second") / "checkpoints" / "step_5"
    remote().fetch("r")
    assert (second / "parts" / "0.bin").read_bytes() == b"0"


# ------------------------------------------------------------------------------------------- what is refused


def refuses(message, script=train_ppo, **given):
    with pytest.raises(InputError, match=message):
        script.main(flags(**given))


def test_other_flags_take_no_address(files):
    refuses("--model s3://b/policy: is an address", model="s3://b/policy")
    refuses("--data_path s3://b/x.jsonl: is an address", script=train_sft, data_path="s3://b/x.jsonl")
    refuses("--hf_dir s3://b/x: is an address", script=train_sft, hf_dir="s3://b/x")
    refuses("--resume s3://b/run_1: is not below --out_dir", resume="s3://b/run_1")
    refuses("--resume s3://c/run_1: is not below", resume="s3://c/run_1", out_dir="s3://b")
    refuses("--resume out/run_1: give auto, or an address below", resume="out/run_1", out_dir="s3://b")
    import chat

    with pytest.raises(InputError, match="--out_dir s3://b: is an address"):
        chat.parse_args(["--out_dir", "s3://b"])


def test_shards_of_several_machines_need_a_disk_in_common():
    args = Namespace(out_url=URL, shard=1)
    check_shards(args, ["a/1/0", "a/2/0"])
    with pytest.raises(InputError, match=f"--out_dir {URL}: with --shard 1 the 2 machines write"):
        check_shards(args, ["a/1/0", "b/1/0"])
    check_shards(Namespace(out_url="", shard=1), ["a/1/0", "b/1/0"])
    check_shards(Namespace(out_url=URL, shard=0), ["a/1/0", "b/1/0"])


def test_addresses_that_do_not_work_are_one_line(files, server, machine, monkeypatch):
    monkeypatch.setattr("trainer.runs.remote_folder.PAUSES", (0.1, None))
    refuses(r"--out_dir s3://none/x: does not work \(FileNotFoundError: .*bucket", out_dir="s3://none/x")
    refuses(r"--out_dir nonsense://x: cannot be opened", out_dir="nonsense://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
    refuses("--out_dir s3://bucket/out: needs s3fs; pip install s3fs", out_dir=URL)


def test_a_name_that_holds_a_run_there_is_refused(sent, machine, files):
    machine("second")
    refuses("--run_name r: .*holds a run; add --resume auto", **{**files, **RUN, "out_dir": URL})


# ------------------------------------------------------------------------------- whole runs


def test_killed_and_resumed_on_an_empty_machine_it_ends_bit_for_bit_the_same(
    files, server, machine, never_stopped
):
    first = machine("first")
    finish(launch(argv_of(files), FAULT=DIE, FAULT_AT="8"), code=-9)
    assert list_checkpoints(first)
    there = server.names()
    assert f"r/checkpoints/step_3/{SUMS}" in there
    shutil.rmtree(first.parent)
    second = machine("second")
    train_ppo.main(argv_of(files, resume="auto"))
    same_run(never_stopped / "r", second, 6)
    there = server.names()
    assert {name.split("/")[2] for name in there if "/checkpoints/" in name} == {"step_5", "step_6"}
    wanted = [path for path in never_stopped.rglob("*") if path.is_file()]
    wanted = {path.relative_to(never_stopped).as_posix() for path in wanted if not path.name.startswith(".")}
    assert set(there) - {f"r/{WRITER}"} == wanted
    for name in ("ppo_actor_32.pth", "r/checkpoints/step_6/actor.safetensors", "r/samples.jsonl"):
        assert server.fs.cat_file(f"bucket/out/{name}") == (never_stopped / name).read_bytes()
    command = json.loads((second / "config.json").read_text())["resume_command"]
    assert f"--out_dir {URL} " in command
    assert command.endswith(f"--resume {URL}/r")


def test_a_network_that_breaks_is_one_line_and_the_run_goes_on_from_this_machine(
    files, machine, never_stopped, monkeypatch, capsys
):
    """The reward ends the server in step 3: the checkpoint of that step is only here, and is not lost."""
    monkeypatch.setattr("trainer.runs.remote_folder.PAUSES", (0.1, None))
    here, server = machine("first"), Server()
    fault = f"os.kill({server.process.pid}, 9)"
    _, err = finish(launch(argv_of(files), FAULT=fault, FAULT_AT="7"), code=2)
    assert err.count("\n") == 1
    assert err.startswith(f"error: --out_dir {URL}: does not work (")
    assert f"all of this run is in {here.parent}: when it works again, add --resume auto" in err
    assert list_checkpoints(here)[-1].name == "step_3"
    server.stop()
    again = Server(server.port)
    train_ppo.main(argv_of(files, resume="auto"))
    assert "resumed  after step 3" in capsys.readouterr().out
    same_run(never_stopped / "r", here, 6)
    assert "ppo_actor_32.pth" in again.names()
    again.stop()


def test_two_machines_go_on_from_an_address(files, server, machine, never_stopped, tmp_path):
    """Each has only what it fetches; the second machine's copy has only the checkpoint."""
    here = machine("first")
    shutil.copytree(never_stopped, here.parent)
    shutil.rmtree(here / "checkpoints" / "step_6")
    remote().send("r")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
    }
    argv = argv_of(files, resume=f"{URL}/r", batch_size=4, mini_batch_size=2)
    nodes = [
        launch(argv, RANK=str(n), LOCAL_RANK="0", XDG_CACHE_HOME=str(tmp_path / f"node{n}"), **shared)
        for n in range(2)
    ]
    (out, _), _ = map(finish, nodes)
    assert "resumed  after step 5" in out
    machine("node1")
    assert [path.name for path in list_checkpoints(Path(mirror_of(URL)) / "r")] == ["step_5"]
    ended = load_weights(machine("node0"), 6)
    wanted = load_weights(never_stopped / "r", 6)
    assert max((ended[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-5


MEETING_PLACE = """import sys, time
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_machine_of_the_main_process_is_lost_and_another_goes_on(files, server, machine, tmp_path):
    """Two machines with disks of their own, and an agent's kill -9: what the first one has written is lost
    with it, and the second one fetches the run from the address."""
    train_ppo.main(argv_of(files, tmp_path / "local", max_steps=30, keep_checkpoints=99, eval_interval=0))
    pause = tmp_path / "pause.txt"
    pause.write_text("0.6")
    (tmp_path / "slow.py").write_text(f"{FAULTY_REWARD}fast = score\n{SLOW_REWARD}")
    argv = argv_of(
        files | {"reward_fn": f"{tmp_path / 'slow.py'}:slow"},
        max_steps=30,
        keep_checkpoints=99,
        eval_interval=0,
        batch_size=4,
        mini_batch_size=2,
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    place = subprocess.Popen([PYTHON, "-c", MEETING_PLACE, "0"], **pipes)
    port = int(place.stdout.readline())
    options = ["--nnodes", "1:2", "--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_id", "7"]
    options += ["--rdzv_endpoint", f"localhost:{port}", "--rdzv_conf", "last_call_timeout=8,is_host=0"]
    fresh, nodes = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, []
    for n in range(2):
        cache = {"XDG_CACHE_HOME": str(tmp_path / f"node{n}")}
        nodes.append(launch_torchrun(1, argv, *options, **cache, **fresh))
    runs = [machine("node0"), machine("node1")]

    def rows(run):
        return len(read_jsonl(run / "metrics.jsonl")) if (run / "metrics.jsonl").is_file() else 0

    wait_for(lambda: max(map(rows, runs)) > 4, nodes[0])
    main = max((0, 1), key=lambda n: rows(runs[n]))
    config = json.loads((runs[main] / "config.json").read_text())
    nodes[main].kill()
    nodes[main].communicate(timeout=60)
    shutil.rmtree(runs[main].parent)
    pause.write_text("0")
    out, _ = finish(nodes[1 - main])
    place.kill()
    place.communicate()
    assert config["processes"] == 2
    assert "note: 1 in place of 2 processes: --batch_size 8 and --mini_batch_size 4 for each" in out
    assert "resumed  after step" in out
    assert [m["step"] for m in read_jsonl(runs[1 - main] / "metrics.jsonl")] == list(range(31))
    ended, wanted = (load_weights(run, 30) for run in (runs[1 - main], tmp_path / "local" / "r"))
    difference = max((ended[name] - wanted[name]).abs().max().item() for name in wanted)
    print(f"process 0 was on node {main}; largest weight difference: {difference:.1e}")
    assert difference < 1e-5


def test_stages_1_and_2_have_their_results_there(files, server, machine, tmp_path):
    """And a new run on an empty machine gets a number that is free there."""
    turns = [{"conversations": [{"content": "a b"}, {"content": "c d"}]}] * 8
    pairs = [{"prompt": "a b", "chosen": "c", "rejected": "d"}] * 8
    sizes = {"device": "cpu", "dtype": "float32", "batch_size": 4, "max_steps": 2, "out_dir": URL}
    for script, records in ((train_sft, turns), (train_reward, pairs), (train_sft, turns)):
        machine(f"{script.__name__} {len(server.names())}")
        data = write_jsonl(tmp_path / "data.jsonl", records)
        script.main(flags(model=files["model"], data_path=data, eval_size=0, **sizes))
    there = set(server.names())
    assert {"full_sft_32.pth", "full_sft_32/config.json", "reward_32/config.json"} <= there
    assert {f"{run}/checkpoints/step_2/{SUMS}" for run in ("sft_1", "reward_run_1", "sft_2")} <= there
