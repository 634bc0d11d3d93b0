"""Cases of test_gradient_sums.py that need several processes; the test starts this script once in each.

argv: a JSON file of {"files": {flag: path}, "texts": path, "moe": {flag: path}}, then names of cases, or
nothing for all. Each process writes what it found as RANK.json beside that file.
"""

import copy
import gc
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from tiny import flags
from torch import nn

from dataset.data_order import local_positions
from trainer import supervised, train_ppo, train_sft
from trainer.build_run import build_run
from trainer.inputs import load_inputs
from trainer.runs import gradient_sums
from trainer.runs.distributed import World, init_world
from trainer.runs.gradient_sums import GradientSums
from trainer.runs.metrics import Metrics

FEW, ALL = 2500, 1 << 24  # numbers in a bucket: a model has several buckets then, or one
PPO = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "critic_warmup_steps": 0, "max_steps": 9}
PPO |= {"device": "cpu", "dtype": "float32", "epochs": 99, "ppo_epochs": 2, "accumulation_steps": 2}
PPO |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3}
CASES = {
    "demonstrations": {"ptx_coef": 0.3},
    "stops": {"target_kl": 1e-4},
    "fp16": {"dtype": "float16", "vf_coef": 1000},  # too large for its first loss scale
    "adapters": {"lora_r": 4, "gradient_checkpointing": 1},
    "experts": {"moe": True, "dtype": "bfloat16", "accumulation_steps": 1},
    "sums in bf16": {"grad_sum_dtype": "bfloat16"},
}
begun = []  # of each bucket that was sent: whether it was during a backward


def watch(sums):
    """Note when ``sums`` sends its buckets."""
    send = sums._send

    def noted():
        begun.append(sums.last)
        send()

    sums._send = noted


def after_the_backward(pieces, more=False):
    """Instead of ``GradientSums.overlap``: all sums begin in ``finish``."""
    yield from pieces


def choose(learner, overlap):
    """Sums during the backward, which are watched, or after it."""
    if overlap:
        watch(learner.sums)
    else:
        learner.sums.overlap = after_the_backward


def make(given, world, case, overlap=True):
    """The run of this case. Without ``overlap`` its gradients are summed after the backward, all at once."""
    gradient_sums.BUCKET = FEW if overlap else ALL
    values, sources = dict(CASES[case]), given["files"]
    if values.pop("moe", False):
        sources = {**sources, **given["moe"]}
    if "ptx_coef" in values:
        values["ptx_data_path"] = given["texts"]
    args = train_ppo.parse_args(flags(**{**sources, **PPO, **values}))
    actor, tokenizer, prompts, *_ = load_inputs(args, world)
    run = build_run(args, train_ppo.flag_parser().flags, world, actor, tokenizer, prompts)
    for learner in run.learners.values():
        choose(learner, overlap)
    return run


def filled(run, step):
    """Sampled responses with all that is learned from them."""
    size, world = PPO["batch_size"], run.world
    places = local_positions(size, PPO["mini_batch_size"], world.rank, world.size)
    first = (step * world.size + world.rank) * size
    records = [run.prompts[i] for i in range(first, first + size)]
    batch = train_ppo.collect(run, step, iter([records]), places)
    return train_ppo.fill_rollout(run, step, batch, Metrics())


def weights(run):
    models = [learner.model for learner in run.learners.values()]
    return [p.detach().clone() for model in models for p in model.parameters() if p.requires_grad]


def same(left, right):
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


def furthest(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def updates(given, world, case):
    """Two batches of PPO with sums during the backward, and the same with sums after it."""
    found, results = [], {}
    begun.clear()
    for overlap in (True, False):
        run, sums = make(given, world, case, overlap), Metrics()
        start = weights(run)
        for step in range(2):
            train_ppo.update(run, filled(run, step), step, sums)
            world.check_identical(**{name: x.model for name, x in run.learners.items()})
        found.append(weights(run))
        results = {"stops": sums.total("policy/early_stop"), "skipped": run.progress.skipped_steps}
        results["moved"] = furthest(start, found[-1])
    apart = {"same": same(*found), "apart": furthest(*found)}
    kind = str(run.learners["actor"].sums.dtype)
    return results | apart | {"begun": sum(begun), "sent": len(begun), "dtype": kind}


def stage(given, world):
    """Supervised fine-tuning, several micro-batches a step."""
    found = []
    begun.clear()
    for overlap in (True, False):
        gradient_sums.BUCKET = FEW if overlap else ALL
        sizes = {"batch_size": 4, "learning_rate": 1e-3, "epochs": 9, "device": "cpu", "dtype": "float32"}
        sizes["grad_sum_dtype"] = "bfloat16"
        argv = flags(model=given["files"]["model"], data_path=given["texts"], out_dir="/nowhere", **sizes)
        run = train_sft.build(train_sft.parse_args(argv), world)
        run.progress.token_budget = 20
        choose(run.learner, overlap)
        for step in range(3):
            first = (world.size * step + world.rank) * 4
            supervised.learn(run, step, [run.data[i] for i in range(first, first + 4)])
            world.check_identical(model=run.trained)
        found.append([p.detach().clone() for p in run.trained.parameters()])
    return {
        "same": same(*found),
        "begun": sum(begun),
        "sent": len(begun),
        "dtype": str(run.learner.sums.dtype),
    }


class Faults:
    """Memory runs out at the events ``due``: a forward, a gradient that arrives, a sum that begins."""

    def __init__(self, actor):
        self.count, self.due, self.met = 0, (), 0
        actor.get_input_embeddings().register_forward_pre_hook(lambda *_: self.event())
        for p in actor.parameters():
            p.register_post_accumulate_grad_hook(lambda _: self.event())
        begin = World.begin_sum

        def begin_sum(world, tensor):
            self.event()
            return begin(world, tensor)

        World.begin_sum = begin_sum

    def event(self):
        self.count += 1
        if self.count in self.due:
            self.met += 1
            raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_memory(given, world):
    """Gradients of an actor's step with demonstrations, while memory runs out in one process: at each place
    once, at some of them twice."""
    run = make(given, world, "demonstrations")
    run.args.grad_clip = 1e6
    minibatch = filled(run, 0).rows(range(4))
    count = world.sum(minibatch.response_len.sum()).item()
    optimizer, faults, budget = run.learners["actor"].optimizer, Faults(run.actor), run.progress.token_budget
    found, parameters = [], list(run.actor.parameters())
    optimizer.step = lambda: found.append([p.grad.clone() for p in parameters])

    def gradients(due):
        run.progress.token_budget, faults.count, faults.met, faults.due = budget, 0, 0, due
        train_ppo.train_model(run, "actor", minibatch, count, 0, Metrics())
        sums = [grad.double().sum().item() for grad in found[-1]]
        assert all(other == sums for other in world.gather(sums))
        return found[-1]

    gc.freeze()  # all objects are searched each time that memory runs out
    wanted = gradients(())
    places, apart, met = max(world.gather(faults.count)), [], [0, 0, 0]
    for place in range(1, places + 1):
        due = (place, place + 30) if place % 3 == 0 else (place,)
        apart.append(furthest(gradients(due if world.rank == place % world.size else ()), wanted))
        met[faults.met] += 1
    largest = max(grad.abs().max().item() for grad in wanted)
    return {"apart": max(apart) / largest, "met": met, "places": places}


class Experts(nn.Module):
    """Two experts behind a common layer. A token goes through one; the other has no gradient then."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(60, 60) for _ in range(2))
        self.first = nn.Linear(60, 60)

    def forward(self, x, expert):
        return self.experts[expert](self.first(x)).square().sum()


def unreached(world):
    """Which expert a process' tokens reach in the first micro-batch and in the last -> what becomes of it."""
    torch.manual_seed(0)
    gradient_sums.BUCKET, model = FEW, Experts()
    x = torch.randn(4, 60, generator=torch.Generator().manual_seed(world.rank))
    cases = {"all": [0, 1], "one": [1, 1], "another": [1, world.rank], "each its own": [world.rank] * 2}
    return {name: summed(world, model, x, list(enumerate(chosen))) for name, chosen in cases.items()}


def summed(world, model, x, pieces):
    """The sums of gradients beside those of each parameter on its own, after the backward."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        module = copy.deepcopy(model)
        sums = GradientSums(module.parameters(), world, dtype)
        begun.clear()
        watch(sums)
        for row, expert in sums.overlap(pieces):
            module(x[2 * row : 2 * row + 2], expert).backward()
        sums.finish()
        found.append([p.grad for p in module.parameters()])
    for row, expert in pieces:
        model(x[2 * row : 2 * row + 2], expert).backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    wanted = [world.sum(grad.clone()) for grad in wanted]
    model.zero_grad()
    exact, rounded = found
    relative = max(
        (a - b).norm().item() / b.norm().clamp_min(1e-9).item() for a, b in zip(rounded, wanted, strict=True)
    )
    return {"same": same(exact, wanted), "relative": relative, "begun": begun.copy()}


def main(path, *names):
    given = json.loads(Path(path).read_text())
    with init_world("cpu") as world:
        results = {case: updates(given, world, case) for case in CASES if not names or case in names}
        if not names:
            results["stage 1"] = stage(given, world)
            results["unreached"] = unreached(world)
            results["out of memory"] = out_of_memory(given, world)  # last: what it changes stays
        Path(path).with_name(f"{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
