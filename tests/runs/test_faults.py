"""Failures during a run: rewards that fail or hang, unusual responses, memory that runs out."""

import ctypes
import json
import os
import signal
import time

import pytest
import tiny
import torch
from test_invariants import filled_rollout, gradients, make_run, same
from tiny import WORDS, flags, load_weights, read_jsonl, word_tokenizer

from errors import InputError
from trainer import train_ppo
from trainer.compute.memory import attempt, each_micro_batch
from trainer.runs.optimizer_step import Updater
from trainer.session import StopRequest

RUN = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 4, "epochs": 9, "device": "cpu"}
RUN |= {"critic_warmup_steps": 1, "run_name": "r", "log_interval": 1000, "save_interval": 100}


def argv_of(files, out_dir, **more):
    return flags(**{**RUN, **files, "out_dir": out_dir, **more})


def metrics_of(folder):
    return [m for m in read_jsonl(folder / "r" / "metrics.jsonl") if m["step"]]


# the time is up every second
SHIELDED = "try:\n    time.sleep(100)\nexcept BaseException: pass\ntime.sleep(100)"
FAULTS = {  # what it may return: rewards/test_reward_function.py, test_fuzz.py
    "it raises": ("raise ValueError('no')", r"ValueError: no at .*combine.py:\d+"),
    "it leaves": ("sys.exit(3)", "SystemExit: 3"),
    "it interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "it hangs and shields itself": (SHIELDED, "no answer after 1 s; speed it up or raise --reward_timeout"),
    "it raises in an evaluation": ("raise ValueError('x\\n' * 1000)", "ValueError: x"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_reward_that_fails_saves_and_ends_in_one_line(files, tmp_path, monkeypatch, capsys, what):
    """At the second call, or in the evaluation after step 2: the first one is two calls, as both steps."""
    code, message = FAULTS[what]
    argv = argv_of(files, tmp_path, reward_timeout=1)
    evaluates = what == "it raises in an evaluation"
    if evaluates:
        argv += flags(eval_data_path=files["data_path"], eval_interval=2)
    fail(monkeypatch, code, call=5 if evaluates else 2)
    line = tiny.refused(message, train_ppo.main, argv)
    assert line.startswith("--reward_fn") and len(line) < 500
    saved = tmp_path / "r" / "checkpoints" / f"step_{2 if evaluates else 1}"
    assert f"saved: {saved}\n" in capsys.readouterr().out
    if what.startswith("it raises"):
        monkeypatch.delenv("FAULT_AT")
        train_ppo.main([*argv, "--resume", "auto"])
        steps = metrics_of(tmp_path)
        assert [m["step"] for m in steps] == [1, 2, 3, 4]
        assert ("eval/score" in steps[-1]) is evaluates


def fail(monkeypatch, code, call=2):
    """At this call of it the reward function executes the code."""
    monkeypatch.setenv("FAULT", code)
    monkeypatch.setenv("FAULT_AT", str(call))


def test_a_run_folder_that_is_removed_is_noticed_in_the_same_step(files, tmp_path, monkeypatch, capsys):
    fail(monkeypatch, f"import shutil; shutil.rmtree({str(tmp_path / 'r')!r})")
    written = r"metrics\.jsonl: cannot be written \(No such file"
    tiny.refused(written, train_ppo.main, argv_of(files, tmp_path))
    assert not (tmp_path / "r").exists()
    said = capsys.readouterr().out
    assert "to go on" not in said
    assert "report   " not in said


POOL = """import multiprocessing
def length(text):
    return -0.1 * len(text)
def score(prompts, responses, answers):
    process = multiprocessing.get_context("fork").Process(target=length, args=("abc",))
    process.start()
    process.terminate()
    process.join()
    for messages in prompts:
        messages[0]["content"] = "CHANGED"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(length, responses)
"""


def test_a_reward_function_may_fork_and_change_what_it_is_given(files, tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    messages = [{"prompt": [{"role": "user", "content": f"{a} {b}"}]} for a in WORDS for b in WORDS]
    change = {"data_path": tiny.write_jsonl(tmp_path / "messages.jsonl", messages)}
    change |= {"reward_fn": f"{tmp_path / 'pool.py'}:score", "max_steps": 2}
    _, err = tiny.finish(tiny.launch(argv_of(files | change, tmp_path)))
    assert "stopping" not in err
    assert "CHANGED" not in (tmp_path / "r" / "samples.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_forked_process_that_hangs_in_a_lock_can_be_ended(number):
    """It waits in C, where Python's handlers do not run, for what nobody gives back. Ctrl-C is not for it."""
    lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t
    take = ctypes.CDLL(None).pthread_mutex_lock
    take(lock)
    with StopRequest() as stopping:
        child = os.fork()
        if not child:
            take(lock)
            os._exit(1)
        time.sleep(0.2)
        os.kill(child, number)
        time.sleep(0.2)
        ended = os.waitpid(child, os.WNOHANG)[0]
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert bool(ended) == (number == signal.SIGTERM)
        os.kill(os.getpid(), number)
        assert stopping.number == number


def always_end(model):
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))


def never_end(model):
    """The EOS has a logit of 0: at a low temperature it is hardly ever sampled."""
    model.get_input_embeddings().weight[0].zero_()


SAME = "def score(prompts, *more):\n    return [1.0] * len(prompts)\n"
ALL_SAME = {"reward_fn": "same.py:score", "reward_model": "", "missing_eos_penalty": 0, "reasoning": 0}


# a change of the policy, flags, and metrics of every step
@pytest.mark.parametrize(
    ("change", "more", "wanted"),
    [
        (always_end, {}, {"rollout/length": 1.0, "rollout/finished": 1.0}),
        (never_end, {"temperature": 0.03}, {"rollout/finished": 0.0, "reward/missing_eos": -1.0}),
        (lambda model: None, ALL_SAME, {"reward/score_std": 0.0}),
    ],
    ids=["all are empty", "none ends", "all score the same"],
)
def test_unusual_responses_are_trained_on(files, tmp_path, monkeypatch, change, more, wanted):
    tokenizer = word_tokenizer(WORDS, chat=True)
    model = tiny.tiny_llama(len(tokenizer), layers=2, spread=2.0)
    with torch.no_grad():
        change(model)
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    (tmp_path / "same.py").write_text(SAME)
    monkeypatch.chdir(tmp_path)
    train_ppo.main(argv_of({**files, "model": str(tmp_path / "policy"), **more}, tmp_path))
    for metrics in metrics_of(tmp_path):
        assert {name: metrics[name] for name in wanted} == wanted
        assert metrics["policy/skipped_steps"] == 0
        # null where all returns are equal: nothing to explain
        assert {name for name in metrics if metrics[name] is None} <= {"value/explained_variance"}
    assert all(p.isfinite().all() for p in load_weights(tmp_path / "r", 4).values())
    texts = {s["response"] for s in read_jsonl(tmp_path / "r" / "samples.jsonl")}
    assert (texts == {""}) is (change is always_end)


def full(rows, most):
    """Run out of memory, by a real allocation that fails, if there are more than ``most`` rows."""
    torch.empty(1 << 50 if len(rows) > most else 1)


def token_budget(run):
    return json.loads((run / "checkpoints" / "step_2" / "state.json").read_text())["token_budget"]


def test_a_minibatch_that_does_not_fit_is_done_again_with_less_and_said(files, tmp_path, monkeypatch, capsys):
    backward = Updater.backward
    budgets = []

    def cramped(updater, sources, token_budget):
        budgets.append(token_budget)
        full(budgets, len(budgets) if token_budget <= fits else 0)
        return backward(updater, sources, token_budget)

    monkeypatch.setattr(Updater, "backward", cramped)
    fits = 40
    train_ppo.main(argv_of(files, tmp_path, max_steps=2))
    assert "note: memory ran out in step 1; updates take fewer tokens at a time" in capsys.readouterr().out
    assert token_budget(tmp_path / "r") <= fits < max(budgets)
    fits = 0
    with pytest.raises(InputError, match="out of memory for a single sequence of "):
        train_ppo.main(argv_of(files, tmp_path / "none", max_steps=2))


def test_micro_batches_are_halved_until_they_fit_and_only_a_lack_of_memory_is_tried_again():
    done = []

    def work(rows):
        full(rows, 3)
        done.append(rows)

    each_micro_batch([10] * 16, 1000, work)
    assert sorted(row for rows in done for row in rows) == list(range(16))
    assert max(map(len, done)) <= 3
    with pytest.raises(InputError, match="out of memory for a single sequence of 12 tokens"):
        each_micro_batch([12, 5], 100, lambda rows: full(rows, 0))
    assert attempt(lambda: 3) == (True, 3)
    assert attempt(full, [1, 2], 1) == (False, None)
    with pytest.raises(RuntimeError, match="shape"):
        attempt(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))


def test_gradients_of_a_minibatch_that_did_not_fit_are_not_counted_twice(files):
    """The second micro-batch fails once: the gradients of the first must be dropped."""
    results = []
    for budget, fails in ((32, 0), (64, 2)):
        run, prompts = make_run({k: v for k, v in files.items() if k != "reward_fn"})
        minibatch = filled_rollout(run, prompts)[0].rows(range(8))
        run.progress.token_budget = budget
        calls = []

        def failing(*sequences, value=run.models.value_scorer.forward, calls=calls, fails=fails):
            calls.append(1)
            full(range(len(calls) == fails), 0)
            return value(*sequences)

        run.models.value_scorer.forward = failing
        gradients(run, minibatch)
        assert len(calls) > 2
        results.append(
            [p.grad.clone() for m in (run.models.actor, run.models.critic) for p in m.parameters()]
        )
        assert run.progress.token_budget == 32
    assert same(*results)
