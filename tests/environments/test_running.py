"""Jobs of the user's code: their order, their threads, the time limit, and what they cannot break."""

import asyncio
import gc
import io
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from tiny import PYTHON, ROOT, finish, start_script

from trainer import user_code
from trainer.environments import running
from trainer.environments.running import Hung, Worker, awaited, run_all

OPEN = threading.Event()  # nobody sets it
LIMIT = 1.0  # seconds


def sleep_then(seconds, value):
    time.sleep(seconds)
    return value


def fail(error):
    raise error


def compute_without_end():
    while True:
        with suppress(Exception):
            sum(range(100))


def test_results_stand_in_the_order_of_the_jobs():
    assert run_all([partial(sleep_then, 0.2 - 0.05 * n, n) for n in range(4)], 5) == [0, 1, 2, 3]
    assert run_all([lambda: None], 0) == [None]
    assert run_all([], 1) == []


def test_jobs_that_wait_run_at_the_same_time_and_short_ones_one_after_the_other(monkeypatch):
    barrier = threading.Barrier(4)
    assert sorted(run_all([partial(barrier.wait, 5)] * 4, 10)) == [0, 1, 2, 3]
    monkeypatch.setattr(running, "PATIENCE", 5.0)
    at_work = []

    def short():
        at_work.append(1)
        time.sleep(0.001)
        return len(at_work), at_work.pop()

    assert run_all([short] * 50, 5) == [(1, 1)] * 50


def test_many_that_wait_are_soon_at_work_together(monkeypatch):
    """The first one that takes long keeps the next one waiting, and no other does."""
    monkeypatch.setattr(running, "PATIENCE", 1.0)
    barrier = threading.Barrier(30)
    assert sorted(run_all([partial(barrier.wait, 20)] * 30, 60)) == [*range(30)]


def test_what_a_job_sets_for_the_process_stays_until_it_has_ended(tmp_path):
    before = os.getcwd(), sys.stdout

    def works(written, leaves=False):
        sys.stdout = written
        os.chdir(tmp_path)
        time.sleep(5 * running.PATIENCE)
        print("b")
        found = os.getcwd()
        if not leaves:
            os.chdir(before[0])
            sys.stdout = before[1]
        return found, written.getvalue()

    for leaves in (False, True):
        assert run_all([partial(works, io.StringIO(), leaves)], 5) == [(str(tmp_path), "b\n")]
        assert (os.getcwd(), sys.stdout) == before
    leave = partial(os.chdir, tmp_path)  # a short one is set back before the next
    assert run_all([leave, os.getcwd, leave, os.getcwd], 5) == [None, before[0]] * 2


def test_no_more_than_some_run_at_a_time_and_the_time_counts_from_the_start(monkeypatch):
    monkeypatch.setattr(running, "AT_ONCE", 1)
    now = []
    most = []

    def job():
        now.append(1)
        most.append(len(now))
        time.sleep(0.6 * LIMIT)
        now.pop()

    assert run_all([job] * 3, LIMIT) == [None] * 3  # the last one waits for longer than it may run
    assert max(most) == 1
    hung, one = run_all([OPEN.wait, lambda: 1], LIMIT)  # what hangs makes room
    assert (type(hung), one) == (Hung, 1)


def test_what_hangs_is_left_and_the_others_have_their_results():
    start = time.monotonic()
    alive = threading.active_count()
    jobs = [OPEN.wait, lambda: 1, compute_without_end, partial(fail, ValueError("x")), partial(OPEN.wait, 60)]
    hung, one, computing, error, other = run_all(jobs, LIMIT)
    assert time.monotonic() - start < 30
    assert [type(x) for x in (hung, one, computing, error, other)] == [Hung, int, Hung, ValueError, Hung]
    assert str(hung) == "no answer after 1 s"
    end = time.monotonic() + 30
    while threading.active_count() > alive + 2 and time.monotonic() < end:
        time.sleep(0.01)  # what computes is ended; the two that sleep are not
    assert threading.active_count() <= alive + 2


def test_ctrl_c_ends_the_wait_at_once_and_the_process_ends_while_jobs_hang(tmp_path):
    """A forked process, too, whose parent has an event loop."""

    async def none():
        pass

    assert run_all([lambda: awaited(none())], 5) == [None]
    path = tmp_path / "hangs.py"
    path.write_text(
        "import os, signal, threading, time\nfrom trainer.environments.running import run_all\n"
        "from trainer.environments.running import awaited\nasync def one():\n    return 1\n"
        "assert run_all([lambda: awaited(one())], 60) == [1]\n"
        "jobs = [lambda: time.sleep(600)]\nprint(run_all(jobs, 0.1))\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n    run_all(jobs, 0)\nexcept KeyboardInterrupt:\n    print('ended')\n"
    )
    process = start_script([PYTHON, str(path)], {"PYTHONPATH": str(ROOT)})
    out, err = finish(process, seconds=60)
    assert (out, err) == ("[Hung('no answer after 0.1 s')]\nended\n", "")


class Broken(BaseException):
    """No Exception."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Broken("b"), GeneratorExit()])
def test_whatever_a_job_raises_is_its_result(error):
    async def later():
        raise error

    for job in (partial(fail, error), lambda: awaited(later())):
        result, other = run_all([job, lambda: 2], 5)
        assert (type(result), str(result).split(":")[0]) == (RuntimeError, type(error).__name__)
        assert other == 2
    assert run_all([partial(fail, StopIteration(1)), partial(fail, MemoryError())], 5)[1].args == ()


def test_what_jobs_set_for_the_process_is_set_back_before_the_next_one(capsys):
    folder = os.getcwd()
    streams = sys.stdout, sys.stderr
    threads = torch.get_num_threads()

    def set_all():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        os.chdir("/")
        sys.stdout = None

    def look():
        print("printed")
        return torch.zeros(1).dtype, os.getcwd(), torch.is_grad_enabled()

    def say():
        sys.stdout.close()
        raise ValueError

    assert run_all([set_all, look], 5)[1] == (torch.float32, folder, True)
    assert capsys.readouterr().out == "printed\n"
    assert (sys.stdout, sys.stderr) == streams
    assert torch.get_num_threads() == threads
    assert torch.zeros(1).device.type == "cpu"
    late = partial(sleep_then, 0.1, None)  # the others have started
    assert run_all([lambda: late() or set_all(), lambda: 1], 5) == [None, 1]
    assert os.getcwd() == folder
    assert torch.get_default_dtype() == torch.float32
    mine = open(os.devnull, "w")  # noqa: SIM115
    try:
        sys.stdout = mine
        assert run_all([say, look], 5)[1][1] == folder  # print works
        assert not sys.stdout.closed
    finally:
        sys.stdout = streams[0]
        mine.close()


def test_all_jobs_of_a_worker_run_in_one_thread_which_ends_with_it():
    workers = [Worker(), Worker()]
    first, second = (run_all([threading.get_ident] * 2, 5, workers) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    ident = run_all([partial(time.sleep, 60), threading.get_ident], LIMIT, workers)[1]
    assert ident == first[1]
    assert run_all([threading.get_ident], 5, workers[:1])[0] != first[0]  # a new one, as the old one hangs
    threads = [worker.thread for worker in workers]
    result = run_all([partial(fail, ValueError(workers))], 5, workers[:1])
    del workers, result
    gc.collect()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


# ---------------------------------------------------------------- async


def test_async_functions_are_awaited_at_the_same_time_in_one_loop(monkeypatch):
    """None waits until the one before it has run for a while."""
    monkeypatch.setattr(running, "PATIENCE", 5.0)
    barrier = asyncio.Barrier(20)
    loops = set()

    async def meet(n):
        loops.add(asyncio.get_running_loop())
        await asyncio.wait_for(barrier.wait(), 5)
        return n

    assert run_all([lambda n=n: awaited(meet(n)) for n in range(20)], 10) == [*range(20)]
    assert len(loops) == 1
    assert awaited(meet) is meet  # no call


def test_two_threads_that_need_the_loop_at_once_get_one(monkeypatch):
    monkeypatch.setattr(running, "PATIENCE", 0.0)
    make = asyncio.new_event_loop
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: sleep_then(0.1, make()))
    user_code.event_loop.cache_clear()

    async def its_loop():
        return asyncio.get_running_loop()

    assert len({*run_all([lambda: awaited(its_loop())] * 2, 5)}) == 1


def test_an_async_function_that_never_ends_is_cancelled_and_the_loop_goes_on():
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    async def quick():
        return asyncio.get_running_loop()

    loop = run_all([lambda: awaited(quick())], 5)[0]
    hung, other = run_all([lambda: awaited(endless()), lambda: awaited(quick())], LIMIT)
    assert isinstance(hung, Hung)
    assert run_all([lambda: awaited(quick())], 5) == [loop] == [other]
    assert ended == [1]


def test_an_async_function_that_blocks_the_loop_is_left_with_it(monkeypatch):
    monkeypatch.setattr(user_code, "LOOP_ANSWERS", 0.1)

    async def blocking():
        OPEN.wait(60)

    async def quick():
        return 1

    assert isinstance(run_all([lambda: awaited(blocking())], LIMIT)[0], Hung)
    assert run_all([lambda: awaited(quick())], 5) == [1]
