"""The judge: it evaluates and never trains."""

import pytest
import tiny
import torch
from same_runs import same_weights
from test_invariants import ALONE

from trainer import train_ppo
from trainer.evaluation import Evaluation
from trainer.rewards.combine import EvalReward, modules_of
from trainer.rewards.reward_models import load_reward_model
from trainer.run import PpoRun

SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 2, "epochs": 9}
SIZES |= {"device": "cpu", "log_interval": 1000, "critic_warmup_steps": 0, "run_name": "r"}
JUDGE = """import random, torch
def judge(prompts, responses, answers, prompt):
    torch.rand(3), random.random()  # a judge may draw random numbers
    assert prompt == prompts
    return [100.0 + r.count("a") for r in responses]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "judge.py").write_text(JUDGE)
    found = tiny.run_files(folder, count=16)
    return found | {"eval_data_path": found["data_path"]}


@pytest.fixture(scope="module")
def judged(files):
    folder = files["data_path"].removesuffix("/prompts.jsonl")
    model = tiny.save_reward_dir(f"{folder}/other", tiny.word_tokenizer(list("abcdefgh"), chat=True), seed=7)
    return {"eval_reward_fn": f"{folder}/judge.py:judge", "eval_reward_model": f"{model}=-2"}


def argv_of(files, out, **more):
    return tiny.flags(**{**files, **SIZES, "out_dir": out, **more})


def evaluated_run(files):
    return PpoRun(train_ppo.parse_args(argv_of(files, "out", dtype="float32")), ALONE)


def test_training_is_bit_for_bit_the_same_with_a_judge(files, judged, tmp_path):
    lines = []
    for name, flags_ in (("with", judged), ("without", {})):
        train_ppo.main(argv_of({**files, **flags_}, tmp_path / name, lora_r=2, normalize_reward=1))
        found = tiny.without_time(tiny.read_jsonl(tmp_path / name / "r" / "metrics.jsonl"))
        judgements = [sum(key.startswith("eval/judge") for key in line) for line in found]
        assert judgements == ([7, 0, 7] if flags_ else [0, 0, 0])  # judge, two parts: sampled, greedy; a std
        lines.append([{k: v for k, v in r.items() if not k.startswith("eval/judge")} for r in found])
    assert lines[0] == lines[1]
    same_weights(tmp_path / "with" / "r", tmp_path / "without" / "r", 2, ("actor", "critic"), most=0)


def test_its_scores_are_sums_of_raw_ones(files, judged, monkeypatch):
    """As computed by hand of the same responses: neither clipped to ±3 nor normalised, times the weight."""
    run = evaluated_run(files | judged)
    found, _ = run.evaluate()
    model = load_reward_model(judged["eval_reward_model"].removesuffix("=-2"), run.world.device)
    answered, own = [], Evaluation.answer

    def noted(*given):
        answered.append(own(*given))
        return answered[-1]

    monkeypatch.setattr(Evaluation, "answer", noted)
    assert run.evaluate()[0] == found  # the same responses every time
    [batches] = answered
    assert batches["_greedy"].texts != batches[""].texts
    for kind, batch in batches.items():
        texts = batch.texts
        scores = model([(p.prompt, text) for p, text in zip(batch.prompts, texts, strict=True)])
        counts = sum(text.count("a") for text in texts) / len(texts)
        assert found[f"eval/judge_model{kind}"] == pytest.approx(-2 * scores.mean().item(), abs=1e-6)
        assert found[f"eval/judge_function{kind}"] == pytest.approx(100 + counts, abs=1e-4)
        each = torch.tensor([100.0 + text.count("a") for text in texts]) - 2 * scores
        assert kind or found["eval/judge_std"] == pytest.approx(each.std(correction=0).item(), abs=1e-3)
        assert found[f"eval/judge{kind}"] == pytest.approx(each.mean().item(), abs=1e-4)


def test_one_part_alone_has_no_second_name():
    def found(judge):
        scores = judge.combine(judge.score_parts(tiny.request_of(["p"], ["r"])))
        assert judge.names == list(scores)
        return {name: x.item() for name, x in scores.items()}

    ones = lambda p, r, a: [1.0] * len(r)  # noqa: E731
    assert found(EvalReward(functions={"function": (ones, 1.0)})) == {"judge": 1.0}
    two = EvalReward({"model": (lambda c: torch.ones(len(c)), 0.5)}, {"function": (ones, 1.0)})
    assert found(two) == {"judge": 1.5, "judge_model": 0.5, "judge_function": 1.0}
    assert found(EvalReward()) == {}


def test_a_judge_is_never_the_critics_start_nor_a_reward(files, judged):
    run = evaluated_run(files | judged | {"reward_model": ""})
    assert set(run.reward.models) == set()
    assert torch.all(run.models.critic.value_head.weight == 0)  # a reward model's head would not be 0
    assert [type(model).__name__ for model in modules_of(run.reward, run.eval_reward)] == [
        "LlamaForSequenceClassification"
    ]


WRONG = {
    "none.py:f": "--eval_reward_fn none.py:f: no such file",
    "FAILS.py:f": "--eval_reward_fn: ValueError: no at .*FAILS.py:2",
    "nowhere": "--eval_reward_model nowhere: no such folder here",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_wrong_with_a_judge_names_its_flag(files, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FAILS.py").write_text("def f(prompts, responses, answers):\n    raise ValueError('no')\n")
    flag = "eval_reward_fn" if ":" in given else "eval_reward_model"
    tiny.refused(WRONG[given], train_ppo.main, argv_of({**files, flag: given}, tmp_path / "out"))
