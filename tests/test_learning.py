"""benchmarks/learning.py: its exact figure, its rewards, what TRL is given, its tables; a whole small run."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import ROOT, tiny_llama, word_tokenizer, write_jsonl

from trainer.rewards.combine import Reward


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


class Table(torch.nn.Module):
    """A policy with the same next-token log-probs everywhere."""

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


def test_all_answers_of_a_task_have_probability_1(benchmark):
    """Three tokens of five: EOS at every place, or none. A score of 1 for all makes the mean their sum."""
    tasks = benchmark("learning_tasks")
    reward = Reward(function=lambda prompts, texts, answers: [1.0] * len(texts))
    flags, prompt = SimpleNamespace(max_gen_len=3, kl_coef=0.2), SimpleNamespace(prompt_ids=[2, 3])
    model = tiny_llama(5, spread=3.0)
    found = tasks.exact_objective(flags, reward, word_tokenizer("abc"), prompt, model)(model)
    assert found["score"] == pytest.approx(1, abs=1e-6)
    assert found["kl"] == pytest.approx(0, abs=1e-9)


def test_neither_one_word_nor_one_phrase_nor_a_short_text_wins(benchmark):
    rewards = benchmark("learning_rewards")

    def score(text):
        return rewards.nature(None, [text], None)[0]

    varied = (
        "soft light on the river as petals whisper to the moon and shadows dance in mist by the sea of dawn"
    )
    assert score(varied) == pytest.approx(10 * 11 / 21)
    assert score("rain " * 30) < 0
    assert score("soft light of dawn and " * 6) < score(varied) / 2
    assert score("soft light") == pytest.approx(10 * 2 / 20)
    assert rewards.gold(None, ["soft pixels the of and to"], None)[0] == pytest.approx(0)
    assert rewards.spelling({"soft", "rain"}, ["Soft rain rnai"]) == [pytest.approx(2 / 3)]


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


def a_run(who, seed, closed, variant="", samples=25_600):
    curve = {"samples": [0, 100, 200], "seconds": [0, 1, 2], "closed": closed}
    curve |= {"score": closed, "kl": [0, 1, 1]}
    rates = [1e-3] * (1 + (who == "ours"))
    return dict(task="a", who=who, variant=variant, rates=rates, seed=seed, samples=samples, curve=curve)  # noqa: C408


def test_tables_have_the_median_the_samples_to_the_peers_end_and_differences_by_seed(benchmark):
    report = benchmark("learning_report")
    runs = [a_run("trl", s, [0, 0.3, 0.5 + s / 10]) for s in range(3)]
    runs += [a_run("ours", s, [0, 0.62, 0.7 + s / 10]) for s in range(3)]
    runs += [a_run("ours", s, [0, 0.5, 0.5 + s / 10], samples=6_400) for s in range(3)]
    runs += [a_run("ours", s, [0, 0.5, 0.55 + s / 5], "changed", 6_400) for s in range(2)]
    peer, _, ours = report.main_table(runs).splitlines()[2:]
    assert "| 0.600 (0.500 to 0.700) |" in peer
    assert "| 200 |" in peer
    assert "| 0.800 (0.700 to 0.900) |" in ours
    assert "| 100 |" in ours
    assert report.variants_table(runs).splitlines()[-1] == "| changed | 0.650 (+0.100 ± 0.050) |"
    assert report.until(runs[:3], 0.99) == "not reached"


def test_a_long_runs_rows_by_hand(benchmark):
    """Score less 0.02 times the KL; 16 samples a step; the highest rate first; a run of ten steps."""
    curve = {"samples": [0, 160], "score": [0.25, 1.5], "kl": [-0.0, 5.0]}
    curve |= {"gold": [0, 1], "spelling": [1, 0.5]}
    runs = [{"task": "e", "rates": [rate, 5e-4], "curve": curve} for rate in (1e-5, 3e-5)]
    lines = benchmark("learning_report").long_table(runs).splitlines()[2:]
    assert lines[:2] == [
        "| 3e-05 | 0 | 0.00 | 0.25 | 0.25 | 0.00 | 1.00 |",
        "| 3e-05 | 10 | 5.00 | 1.50 | 1.40 | 1.00 | 0.50 |",
    ]
    assert [line.partition(" |")[0] for line in lines[2:]] == ["| 1e-05"] * 2


def of_the_demo(variant, seed, accuracy, seconds, **more):
    curve = {
        "samples": [0, 5888],
        "seconds": [0, seconds],
        "accuracy": [0.5, accuracy],
        "kl": [0, 0.7],
    } | more
    facts = {"task": "b", "who": "ours", "variant": variant, "rates": [5e-4, 5e-4], "seed": seed}
    return facts | {"samples": 5888, "curve": curve}


def test_what_an_option_costs_and_gives_by_hand(benchmark):
    """Each beside the same seeds without it. What was sampled again counts. The average has its own row."""
    report = benchmark("learning_report")
    runs = [of_the_demo("", seed, 0.9 + seed / 100, 60) for seed in range(3)]
    runs += [of_the_demo("RLOO, half the rate", 1, 0.90, 40)]
    runs += [of_the_demo("RLOO, half the rate, groups filtered", 1, 0.92, 50, sampled=[0, 8000])]
    average = {"ema_accuracy": [0.5, 0.93], "ema_kl": [0, 0.5]}
    runs += [of_the_demo("average 0.9", seed, 0.91 + 2 * seed / 100, 66, **average) for seed in range(2)]
    runs += [of_the_demo("entropy 0.01", 7, 0.1, 66)]  # there is no such seed without it
    actor, mean, groups = report.options_table(runs).splitlines()[2:]
    assert actor == "| `--ema_beta 0.9`: the actor | 2 | 0.920 (+0.015 ± 0.005) | 0.70 | 5,888 | 1.10 |"
    assert mean == "| `--ema_beta 0.9`: the average | 2 | 0.930 (+0.025 ± 0.005) | 0.50 | 5,888 | 1.10 |"
    assert groups.endswith("| 1 | 0.920 (+0.020) | 0.70 | 8,000 | 1.25 |")
    row, _ = report.without_critic_table(runs).splitlines()[2:]
    assert row.startswith(
        "| RLOO, half the rate | `--num_generations 4 --learning_rate 2.5e-4` | 1 | 0.900 (-0.010)"
    )


def test_what_was_sampled_again_is_counted(benchmark, tmp_path):
    points = [{"samples": n} for n in (0, 200, 300)]
    lines = [{"step": 0}, *({"step": n, "rollout/sampled_again": n / 10} for n in (1, 2, 3))]
    benchmark("learning_run").count_sampled(points, Path(write_jsonl(tmp_path / "metrics.jsonl", lines)))
    assert [point["sampled"] for point in points] == [0, 230, 360]


def test_the_best_rate_is_that_of_the_first_seeds_end(benchmark):
    report = benchmark("learning_report")
    runs = [a_run("trl", 0, [0, 0, end]) | {"rates": [rate]} for rate, end in ((1, 0.2), (2, 0.5), (3, 0.4))]
    runs.append(a_run("trl", 1, [0, 0, 0.9]) | {"rates": [3]})
    assert report.best_rates(runs, "a", "trl") == [2]


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


def test_trls_trainer_on_the_closed_form(benchmark, tmp_path):
    pytest.importorskip("trl")
    run, learning = benchmark("learning_run"), benchmark("learning")
    request = {"task": "a", "who": "trl", "variant": "", "rates": [1e-3], "seed": 0, "samples": 512}
    request |= {"files": learning.prepare("a", tmp_path), "folder": str(tmp_path)}
    points = run.run_trl(request, tmp_path / "out")
    assert [p["samples"] for p in points] == [0, 256, 512]
    assert points[-1]["closed"] > points[0]["closed"] == 0
