"""What it saves to compute a prompt once for all its answers: tokens, seconds and memory.

    python benchmarks/shared_prompts.py MODEL        # SmolLM2-135M-Instruct: 30 minutes
    python benchmarks/shared_prompts.py MODEL 55     # prompts of 55 tokens only

32 sequences of random tokens in fp32, in micro-batches as the trainer cuts them: log-probs (scoring), and the
gradient of a policy loss (update, without the optimizer's step). Each case runs in a process of its own, with
one thread: the seconds are CPU seconds, the memory is the most that the process has had. Prints a table and
writes benchmarks/results/shared_prompts.json.
"""

import json
import os
import subprocess
import sys
import time

import torch
from common import peak_memory, table, write_results

from model.loading import embeddings, load_policy
from trainer import losses
from trainer.compute.batch import Batch
from trainer.compute.batching import tokens_per_forward
from trainer.compute.memory import keep_freed_memory
from trainer.compute.precision import LossScale
from trainer.compute.scoring import PolicyScorer, prepare_training, score_all
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import GradientSource, Progress, Updater

PROMPTS = (55, 250, 1000)  # tokens
ANSWER = 44  # tokens
GROUPS = ((8, 4), (4, 8))  # prompts, answers to each


def make_batch(prompts, answers, prompt_len, vocabulary):
    rows = prompts * answers
    generator = torch.Generator().manual_seed(0)
    asked = torch.randint(vocabulary, (prompts, prompt_len), generator=generator)
    answered = torch.randint(vocabulary, (rows, ANSWER), generator=generator)
    numbers = torch.zeros(rows, ANSWER)
    return Batch(
        tokens=torch.cat([asked.repeat_interleave(answers, 0), answered], 1),
        prompt_len=torch.full((rows,), prompt_len),
        response_len=torch.full((rows,), ANSWER),
        finished=torch.ones(rows, dtype=torch.bool),
        sampler_logprobs=numbers,
        importance_weights=numbers + 1,
        loss_mask=numbers == 0,
        advantages=torch.randn(rows, ANSWER, generator=generator),
    )


def measure(path, prompts, answers, prompt_len, shared):
    """One case, in this process -> {name: number}"""
    keep_freed_memory()
    model = load_policy(path).requires_grad_(True)
    prepare_training(model.base_model, 0)
    if not shared:
        model.base_model.shares_beginnings = False
    scorer = PolicyScorer(model)
    batch = make_batch(prompts, answers, prompt_len, embeddings(model))
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda *given: tokens.append(given[1][0].numel()))

    def loss_of(rows):
        mb = batch.rows(rows, scorer.shares_prompts)
        logprobs, _, _ = scorer(mb.tokens, mb.layout)
        return losses.policy_loss(logprobs, mb, 0.2, 0.2)[0], Metrics()

    def update():
        progress = Progress(token_budget=tokens_per_forward(batch.tokens.device))
        updater = Updater(None, {}, LossScale(torch.float32), progress, grad_clip=1.0)
        layout = batch.layout
        updater.gradients([GradientSource(layout.lengths, loss_of, scorer.beginnings(layout))])

    batch.old_logprobs = torch.zeros_like(batch.advantages)
    found = {}
    for name, work in (("score", lambda: score_all(batch, scorer)), ("update", update)):
        start = time.process_time()
        result = work()
        found[f"{name} s"] = time.process_time() - start
        found[f"{name} GiB"] = peak_memory()
        if result:
            batch.old_logprobs = result[0]
    return {"tokens": sum(tokens) // 2, **found}


def rows(results):
    """The cases as lines of a table: shared, plain, and how many times as much plain is."""
    for case in results:
        line = {name: case[name] for name in ("prompt tokens", "prompts x answers")}
        for name, plain in case["plain"].items():
            shared = case["shared"][name]
            line[name] = f"{round(shared, 2)} / {round(plain, 2)} = 1 / {plain / shared:.2f}"
        yield line


def main(argv):
    path, *lengths = argv
    results = []
    for prompt_len in map(int, lengths or PROMPTS):
        for prompts, answers in GROUPS:
            case = {"prompt tokens": prompt_len, "prompts x answers": f"{prompts} x {answers}"}
            for name, shared in (("shared", 1), ("plain", 0)):
                given = [path, prompts, answers, prompt_len, shared]
                command = [sys.executable, __file__, "--case", *map(str, given)]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
                case[name] = json.loads(done.stdout.splitlines()[-1])
            results.append(case)
            write_results("shared_prompts", {"results": results})
            print(table(list(rows([case]))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        main(sys.argv[1:])
