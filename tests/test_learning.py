"""benchmarks/learning.py: its exact figure, its rewards, what TRL is given, its tables; a whole small run."""

import importlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import ROOT, word_tokenizer

from trainer.rewards.combine import Reward


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


class Table(torch.nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits, self.config = logits, SimpleNamespace(vocab_size=len(logits))

    def forward(self, rows):
        return SimpleNamespace(logits=self.logits.expand(*rows.shape, -1))


def test_the_exact_figure_is_0_for_the_reference_and_1_for_the_best_policy(benchmark):
    tasks, tokenizer = benchmark("learning_tasks"), word_tokenizer("abc")
    scores, beta = {"": 0.3, "<unk>": 0.0, "a": 1.0, "b": -1.0, "c": 0.5}, 0.4
    reward = Reward(function=lambda prompts, texts, answers: [scores[text] for text in texts])
    flags = SimpleNamespace(max_gen_len=1, kl_coef=beta)
    logits = torch.tensor([0.1, -0.5, 0.3, 0.8, -0.2])
    prompt = SimpleNamespace(prompt_ids=[2, 3])
    measure = tasks.exact_objective(flags, reward, tokenizer, prompt, Table(logits))
    values = torch.tensor([scores[tokenizer.decode([i], skip_special_tokens=True)] for i in range(5)])
    assert measure(Table(logits)) == pytest.approx(
        {"closed": 0, "score": (values @ logits.softmax(0)).item(), "kl": 0}
    )
    best = measure(Table(logits + values / beta))
    assert best["closed"] == pytest.approx(1)
    p, q = (logits + values / beta).log_softmax(0), logits.log_softmax(0)
    assert best["kl"] == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)
    assert measure(Table(logits + 2 * values / beta))["closed"] < 0.99


def test_what_trl_is_given_scores_texts_as_training_here_does(benchmark):
    run, tokenizer = benchmark("learning_run"), word_tokenizer("abcd")
    seen = []

    def score(prompts, responses, answers):
        seen.extend(zip(prompts, responses, strict=True))
        return [float(len(text)) for text in responses]

    reward = Reward(function=score, reasoning=False, missing_eos_penalty=0.5)
    prompts = [
        SimpleNamespace(prompt=text, prompt_ids=tokenizer(text).input_ids, answer=None, record={})
        for text in ("a b", "c")
    ]
    scores = run.TextScores(reward, tokenizer, prompts, 2, 0)
    pad, (a, b, c, d) = 9, tokenizer("a b c d").input_ids
    rows = torch.tensor([[a, b, d, d, 0, pad], [pad, c, a, b, c, d]])
    output = scores.read(rows.masked_fill(rows == pad, 0), (rows != pad).long(), position_ids=None)
    assert scores.score(output.hidden_states[-1])[:, :, 0].tolist() == [[3.0] * 6, [6.5] * 6]
    assert seen == [("a b", "d d"), ("c", "a b c d")]


def test_a_small_run_of_this_trainer_and_its_place_in_the_file(benchmark, monkeypatch, tmp_path):
    learning, run = benchmark("learning"), benchmark("learning_run")
    monkeypatch.setattr(learning, "FILE", tmp_path / "learning.json")
    monkeypatch.setattr(run.train_ppo, "evaluate_actor", run.train_ppo.evaluate_actor)  # put back afterwards
    monkeypatch.setattr(run.train_ppo, "update", run.train_ppo.update)
    facts = {"task": "a", "who": "ours", "variant": "", "rates": [1e-3, 3e-3], "seed": 0, "samples": 1024}
    files = learning.prepare("a", tmp_path)
    request = facts | {
        "files": files,
        "folder": str(tmp_path),
        "flags": {"kl_in": "reward"},
        "patch": "deal anew",
    }
    points = run.run_ours(request, tmp_path / "out")
    assert [p["samples"] for p in points] == [0, 256, 512, 768, 1024]
    assert points[0]["closed"] == 0
    assert points[-1]["closed"] > 0.2
    assert points[-1]["seconds"] > points[1]["seconds"] > 0
    learning.keep(facts | {"curve": {}})
    learning.keep(facts | {"curve": {"kl": [1]}})
    learning.keep(facts | {"seed": 1, "curve": {}})
    assert [r["curve"] for r in learning.load()] == [{"kl": [1]}, {}]


def test_the_page_shows_the_tables_of_its_results(benchmark):
    report = benchmark("learning_report")
    runs = json.loads((ROOT / "benchmarks/results/learning.json").read_text(encoding="utf-8"))["runs"]
    text = (ROOT / "docs/learning.md").read_text(encoding="utf-8")
    assert all(table(runs) in text for table in report.TABLES.values())
    assert report.WITHOUT_CRITIC.keys() | report.OPTIONS.keys() <= benchmark("learning").OURS.keys()
    assert all(math.isfinite(report.figure(r)) for r in runs)
