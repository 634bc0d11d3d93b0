"""PTX: the loss of demonstrations in the actor's steps (trainer/options/ptx.py)."""

import pytest
import torch
from steps import add_gradients, collected, filled
from test_invariants import ALONE, make_run
from tiny import WORDS, read_jsonl, refused, run_files, train, write_jsonl

from dataset.lm_dataset import global_batch
from trainer.options.ptx import Ptx
from trainer.runs.distributed import World


def demonstrations(count=40):
    """Conversations, one in four with two answers, and plain texts"""
    found = []
    for n in range(count):
        words = [WORDS[(3 * n + i) % 8] for i in range(2 + n % 5)]
        turns = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": " ".join(words)}]
        found.append({"text": " ".join(words)} if n % 3 == 0 else {"messages": turns * (1 + (n % 4 == 0))})
    return found


@pytest.fixture(scope="module")
def ptx_path(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("ptx") / "demonstrations.jsonl", demonstrations())


def nll(model, items):
    found = []
    for ids, mask in items:
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        found += [-log_p[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]]
    return torch.stack(found).mean()


def minibatch_of(run, prompts, step=0):
    return filled(run, step, collected(run, step, [prompts[i] for i in range(16)])).rows(range(8))


def actor_gradient(run, minibatch, number, budget):
    run.updater.forget_gradients()
    count = minibatch.response_len.sum()
    run.progress.token_budget = budget
    sums = add_gradients(run, "actor", minibatch, count, number)
    return {name: p.grad.clone() for name, p in run.models.actor.named_parameters() if p.requires_grad}, sums


@pytest.mark.parametrize("budget", [4096, 16])
def test_the_gradient_is_the_policys_plus_the_coefficient_times_the_mean_nlls(files, ptx_path, budget):
    run, prompts = make_run(files, ptx_data_path=ptx_path, ptx_coef=0.3, ppo_epochs=2, temperature=0.7)
    [ptx] = run.options
    minibatch, number = minibatch_of(run, prompts), 3
    mixed, sums = actor_gradient(run, minibatch, number, budget)
    items = [ptx.data[i] for i in global_batch(40, run.args.seed, number, 8)]
    assert items == ptx.items[number]
    loss = nll(run.models.actor, items)
    assert sums.means(ALONE)["policy/ptx_loss"] == pytest.approx(loss.item(), rel=1e-5)
    run.updater.forget_gradients()
    (0.3 * loss).backward()
    alone = {name: p.grad.clone() for name, p in run.models.actor.named_parameters()}
    run.options.clear()
    policy, _ = actor_gradient(run, minibatch, number, budget)
    for name, grad in mixed.items():
        assert torch.allclose(grad, policy[name] + alone[name], atol=1e-6), name


def test_each_step_has_its_own_records_the_same_for_any_number_of_processes(ptx_path, files):
    run, _ = make_run(files, ptx_data_path=ptx_path, ppo_epochs=2)
    [alone], both = run.options, []
    alone.before_estimate(1, None)
    assert list(alone.items) == [4, 5, 6, 7]  # the numbers of batch 1's optimizer steps
    counts = []

    class Two(World):
        def gather(self, item):
            return [item]

        def sum(self, tensor):
            counts.append(tensor.tolist())
            return tensor + 100

    for rank in (0, 1):
        two = Two(rank, 2, torch.device("cpu"))
        part = Ptx(alone.data, run.args.completed(mini_batch_size=4), None, 4, two)
        part.before_estimate(1, None)
        both.append(part.items)
        assert part.learned == {n: c + 100 for n, c in zip(part.items, counts[-1], strict=True)}
    for number, items in alone.items.items():
        assert sorted(map(str, items)) == sorted(map(str, both[0][number] + both[1][number]))
        assert alone.learned[number] == sum(sum(mask[1:]) for _, mask in items)
    first = {str(x) for x in alone.items[4]}
    assert first != {str(x) for x in alone.items[5]}
    alone.before_estimate(0, None)
    alone.before_estimate(1, None)
    assert list(alone.items) == [4, 5, 6, 7] and {str(x) for x in alone.items[4]} == first
    for text, learned in (([1, 1], 1), ([1, 0], 1), ([0, 1, 1], 2)):  # masks; a loss is divided by at least 1
        few = Ptx([([5] * len(text), text)], run.args.completed(mini_batch_size=1), None, 1, ALONE)
        few.before_estimate(0, None)
        assert few.learned == {0: learned}


def test_memory_that_runs_out_does_demonstrations_again_too(files, ptx_path, monkeypatch):
    run, prompts = make_run(files, ptx_data_path=ptx_path, ptx_coef=0.3)
    minibatch = minibatch_of(run, prompts)
    wanted, _ = actor_gradient(run, minibatch, 0, 4096)
    failed, source = [], Ptx.further_loss

    def full_once(self, number):
        found = source(self, number)

        def loss(rows):
            if not failed:
                failed.append(run.progress.token_budget)
                raise torch.OutOfMemoryError("out of memory")
            return found.loss_of(rows)

        return found._replace(loss_of=loss)

    monkeypatch.setattr(Ptx, "further_loss", full_once)
    again, sums = actor_gradient(run, minibatch, 0, 4096)
    assert failed and run.progress.token_budget < failed[0]
    for name, grad in again.items():
        assert torch.allclose(grad, wanted[name], atol=1e-6), name
    assert sums._totals["policy/ptx_loss"][1] == run.options[0].learned[0]  # counted once


def test_a_run_is_resumed_with_the_same_demonstrations_only(tmp_path, ptx_path):
    found = run_files(tmp_path) | {"out_dir": tmp_path, "run_name": "r", "lr_schedule": "constant"}
    options = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "critic_warmup_steps": 1}
    train(**found, **options, ptx_data_path=ptx_path, max_steps=2)
    lines = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert ["policy/ptx_loss" in line for line in lines] == ["policy/loss" in line for line in lines]
    assert sum("policy/ptx_loss" in line for line in lines) == 1
    found |= {"max_steps": 3, "resume": "auto", **options}
    refused(r"--ptx_coef was 0.1 and is now None", train, **found)
    other = write_jsonl(tmp_path / "other.jsonl", demonstrations(39))
    refused("--ptx_data_path .*other.jsonl does not hold what", train, **found, ptx_data_path=other)


def test_what_is_refused_and_what_is_said(tmp_path, files, ptx_path):
    texts = [{"text": "a " * count} for count in (36, 38, 300)]  # 37 tokens with the EOS, 39, 301
    long = write_jsonl(tmp_path / "long.jsonl", [*demonstrations(6), *texts])
    run, _ = make_run(files, ptx_data_path=long, max_seq_len=30)
    assert run.args.ptx_coef == 0.1
    wanted = "7 (2 of 9 read dropped, longer than --max_seq_len + --max_gen_len or the model), "
    wanted += "weight 0.1 (--ptx_coef)"
    assert run.about().count("\nptx      ") == 1 and wanted in run.about()
    repeated = "note     a minibatch takes 8 records of 7: some are in it several times"
    for size in (4, 8):
        run, _ = make_run(files, ptx_data_path=long, max_seq_len=30, mini_batch_size=size)
        assert run.about().count(repeated) == (size == 8)
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a " * 256}, {"text": "a"}])
    run, _ = make_run(files, ptx_data_path=path, max_seq_len=250)
    assert (len(run.demonstrations), run.demonstrations.dropped) == (1, 1)
    refused(r"no answer to learn from", make_run, files, ptx_data_path=files["data_path"])
    turns = write_jsonl(tmp_path / "turns.jsonl", demonstrations(2)[1:])
    endless = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    given = files | {"ptx_data_path": turns, "prompt_template": endless}
    run, _ = make_run(given)
    assert run.demonstrations.ends == [0] and "</s> is put behind the last one, and learned" in run.about()
