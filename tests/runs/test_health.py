"""Findings: symptom, numbers, causes and remedy of what is unusual in a run, and none in a healthy run."""

import json
import os
import subprocess
import time

import pytest
from tiny import PYTHON, ROOT, finish, flags, launch, read_jsonl, run_files, save_reward_dir, word_tokenizer

from errors import InputError
from trainer import train_ppo
from trainer.about_run import turns_of
from trainer.runs.health import Health, as_markdown, findings, main, one_line, read_run
from trainer.runs.health_past import WINDOW, Past, spread_of_steps
from trainer.runs.health_rules import RULES, TOP
from trainer.runs.log_and_save import collected_between_steps

PICTURES = True  # see pictures.py

DEMO = read_jsonl(ROOT / "tests" / "fixtures" / "demo_metrics.jsonl")  # python trainer/train_ppo.py, seed 42
# A step as the demo's, a little rounded.
USUAL = {
    "kl/k1": 0.03,
    "kl/sequence": 0.8,
    "rollout/finished": 1.0,
    "rollout/length": 28.0,
    "rollout/sampler_gap": 2e-4,
    "rollout/importance_weight": 1.0,
    "rollout/importance_ess": 1.0,
    "rollout/repetition": 0.05,
    "rollout/distinct": 0.98,
    "rollout/score_length_corr": 0.1,
    "reward/score": 1.0,
    "reward/score_std": 1.0,
    "reward/at_limit": 0.0,
    "policy/loss": 0.0,
    "policy/approx_kl": 0.002,
    "policy/clip_fraction": 0.01,
    "policy/ratio": 1.0,
    "policy/first_ratio": 1.0,
    "policy/entropy": 0.1,
    "policy/advantage_std": 1.0,
    "policy/grad_norm": 0.5,
    "policy/early_stop": 0.0,
    "policy/skipped_steps": 0.0,
    "value/explained_variance": 0.1,
    "value/bias": 0.05,
    "value/error": 0.5,
    "value/clip_fraction": 0.01,
}
FLAGS = {
    "script": "train_ppo.py",
    "learning_rate": 5e-4,
    "critic_learning_rate": 5e-4,
    "kl_coef": 0.02,
    "ppo_epochs": 4,
    "clip_epsilon": 0.2,
    "cliprange_value": 0.5,
    "max_gen_len": 64,
    "missing_eos_penalty": 1.0,
    "target_kl": 0.0,
    "lam": 0.95,
    "grad_clip": 1.0,
    "batch_size": 128,
    "processes": 1,
    "dtype": "float32",
    "reward_model": ["JUDGE"],
    "reasoning": 1,
    "max_seq_len": 256,
    "epochs": 1,
    "total_steps": 46,
}
JUDGE = {"weight": 1.0, "template": True, "sees_answer": True}
FACTS = {
    "prompts": 5888,
    "read": 5888,
    "dropped": 0,
    "long_answers": 0,
    "held_out": 500,
    "chat_template": True,
    "missing_header": "",
    "template_has_eos": True,
    "unknown_tokens": 0.0,
    "fewer_ids": None,
    "suited": {"learning_rate": 5e-4, "critic_learning_rate": 5e-4},
    "reward_models": {"model": JUDGE},
}


def steps_of(*changes):
    """Changes of the usual step -> the lines of metrics.jsonl of a run."""
    return [{"step": n + 1, **USUAL, **change} for n, change in enumerate(changes)]


def found_in(changes, facts=FACTS, **args):
    """{name: (level, step)} of a run whose steps are the usual one with these changes."""
    return {
        f.name: (f.level, f.step) for f in findings(steps_of(*changes), {"facts": facts, **FLAGS, **args})
    }


def run_of(count, late, early=None, turn=12):
    """``turn`` steps with the change ``early``, the rest of ``count`` with ``late``. The score rises."""
    return [
        {"reward/score": 1 + 0.03 * n + 0.1 * (n % 2), **(early or {} if n < turn else late)}
        for n in range(count)
    ]


def evaluated(changes, *shares, name="eval/accuracy"):
    """Changes of steps -> the same with evaluations, evenly spread from the first to the last step."""
    for n, share in enumerate(shares):
        changes[n * (len(changes) - 1) // (len(shares) - 1)][name] = share
    return changes


def test_a_healthy_run_has_no_finding():
    assert len(DEMO) == 47
    assert findings(DEMO, {}) == []
    assert found_in([{}] * 8) == {}
    assert found_in(run_of(40, {})) == {}
    assert findings([], {}) == findings([{"step": 0}], {}) == []


# What a step shows, how many such steps it takes, and the finding. The next smaller number is no finding.
ONE_NUMBER = [
    ("kl/sequence", 10.1, 9.9, 3, "kl_far", "look"),
    ("kl/k1", 1.1, 0.99, 1, "kl_far", "look"),
    ("kl/k1", 3.1, None, 1, "kl_far", "wrong"),
    ("kl/sequence", -1.1, -0.9, 3, "kl_negative", "wrong"),
    ("policy/first_ratio", 1.002, 1.0005, 1, "first_ratio", "wrong"),
    ("policy/first_ratio", 0.998, 0.9995, 1, "first_ratio", "wrong"),
    ("policy/ratio", 2.1, 1.9, 1, "ratio_drastic", "wrong"),
    ("policy/ratio", 0.09, 0.11, 1, "ratio_drastic", "wrong"),
    ("policy/approx_kl", 0.051, 0.049, 3, "steps_too_large", "look"),
    ("policy/approx_kl", 0.51, None, 1, "steps_too_large", "wrong"),
    ("policy/clip_fraction", 0.41, 0.39, 3, "steps_too_large", "look"),
    ("policy/clip_fraction", 0.51, 0.39, 1, "steps_too_large", "look"),
    ("policy/clip_fraction", 0.61, None, 1, "steps_too_large", "wrong"),
    ("rollout/sampler_gap", 0.021, 0.019, 1, "sampler_apart", "look"),
    ("rollout/sampler_gap", 0.11, None, 1, "sampler_apart", "wrong"),
    ("rollout/importance_weight", 2.1, 1.9, 1, "sampler_apart", "wrong"),
    ("rollout/importance_ess", 0.29, 0.31, 1, "sampler_apart", "wrong"),
    ("policy/skipped_steps", 0.25, 0.0, 3, "updates_skipped", "wrong"),
    ("policy/early_stop", 0.5, 0.4, 3, "early_stop_starves", "look"),
    ("policy/grad_norm", 31.0, 29.0, 5, "gradient_is_cut", "look"),
    ("value/explained_variance", -0.11, -0.09, 5, "critic_useless", "look"),
    ("value/explained_variance", -2.1, None, 5, "critic_useless", "wrong"),
    ("value/bias", -0.71, -0.69, 5, "critic_biased", "look"),
    ("value/error", 1.6, 1.4, 5, "critic_learns_nothing", "look"),
    ("value/clip_fraction", 0.21, 0.19, 3, "critic_is_held", "look"),
    ("policy/advantage_std", 0.04, 0.06, 3, "advantages_gone", "look"),
    ("rollout/finished", 0.6, 0.85, 3, "few_end", "look"),
    ("rollout/finished", 0.4, None, 3, "few_end", "wrong"),
    ("rollout/length", 1.4, 1.6, 1, "empty_answers", "wrong"),
    ("rollout/repetition", 0.21, 0.19, 3, "repetition", "look"),
    ("rollout/repetition", 0.65, None, 3, "repetition", "wrong"),
    ("rollout/distinct", 0.4, 0.6, 3, "answers_alike", "look"),
    ("reward/at_limit", 0.21, 0.19, 3, "scores_at_limit", "look"),
]


@pytest.mark.parametrize(("metric", "bad", "good", "steps", "name", "level"), ONE_NUMBER)
def test_a_number_beyond_its_limit_is_a_finding_and_one_before_it_is_none(
    metric, bad, good, steps, name, level
):
    begin = [{}] * 4
    found = found_in([*begin, *[{metric: bad}] * steps])
    assert found.keys() >= {name}
    assert found[name][0] == level
    if steps > 1:
        assert name not in found_in([*begin, *[{metric: bad}] * (steps - 1)])
        assert name not in found_in([*begin, *[{metric: bad}] * (steps - 1), {}, {metric: bad}])
    if good is not None:
        assert name not in found_in([*begin, *[{metric: good}] * 12])


def test_advantages_that_are_all_0_are_a_finding_from_the_first_steps_on():
    none = {"policy/advantage_std": 0.0}
    assert found_in([none] * 3)["advantages_gone"] == ("look", 3)
    assert "advantages_gone" in found_in([{}, {}, *[none] * 3])
    assert "advantages_gone" not in found_in([none] * 2)
    assert "advantages_gone" not in found_in([none, none, {}])  # the third batch has some


def test_since_when_is_the_first_step_of_those_that_show_it():
    assert found_in([{}, {}, *[{"kl/sequence": 11.0}] * 3])["kl_far"] == ("look", 3)
    assert found_in([{}, {}, {"policy/ratio": 3.0}])["ratio_drastic"] == ("wrong", 3)
    assert found_in([{}, {"policy/clip_fraction": 0.49}, {}]) == {}


def test_missing_and_infinite_numbers_are_silent():
    nothing = dict.fromkeys(USUAL)
    assert found_in([nothing] * 30) == {}
    assert found_in([{name: float("nan") for name in USUAL}] * 30) == {}
    assert findings([{"step": 0, "eval/score": 1.0}, {"step": 1, "train/loss": 3.0}], {}) == []
    for rule in RULES:
        assert not rule.when(Past({})), rule.name


def test_long_answers_may_be_further_from_the_start():
    far = {"kl/sequence": 20.0, "rollout/length": 300.0}
    assert found_in([far] * 5) == {}
    assert "kl_far" in found_in([far | {"kl/sequence": 31.0}] * 5)


def test_a_ratio_of_the_first_minibatch_is_judged_by_precision_and_by_the_old_actor():
    one = [{"policy/first_ratio": 1.01}]
    assert found_in(one, dtype="bfloat16") == {}
    assert found_in(one, update_old_actor_freq=4) == {}
    assert "first_ratio" in found_in(one)


def test_steps_that_are_too_large_over_several_batches_of_one_old_actor():
    steps = steps_of(*[{"policy/approx_kl": 0.1}] * 3)
    (found,) = findings(steps, {**FLAGS, "facts": FACTS, "update_old_actor_freq": 4, "target_kl": 0.01})
    assert "4 batches move" in found.symptom
    assert found.causes[-1] == "--update_old_actor_freq is too large"
    assert found.remedy == "--learning_rate 0.00017 --ppo_epochs 1 --update_old_actor_freq 1"


def test_a_narrow_clip_is_named_as_such_and_not_as_large_steps():
    found = found_in([{"policy/clip_fraction": 0.9}] * 5, clip_epsilon=0.001)
    assert found == {"unusual_flags": ("look", 0)}


def test_no_response_ends():
    assert found_in([{"rollout/finished": 0.0}] * 2) == {"never_ends": ("wrong", 1)}
    assert "never_ends" not in found_in([{}, *[{"rollout/finished": 0.0}] * 3])
    without = {**FACTS, "template_has_eos": False}
    (template, none_ends) = sorted(
        findings(steps_of(*[{"rollout/finished": 0.0}] * 2), {**FLAGS, "facts": without}),
        key=lambda f: f.step,
    )
    assert template.name == "template_without_eos"
    assert none_ends.causes[0].startswith("the chat template")


def test_a_few_responses_do_not_say_how_many_end():
    """Four of a step: of chance alone, steps without an end follow steps with some."""
    none, half = {"rollout/finished": 0.0}, {"rollout/finished": 0.5}
    few = {"batch_size": 4, "processes": 2, "max_gen_len": 64}
    assert found_in([none] * 7, **few).keys() == {"small_batch"}
    assert found_in([none] * 8, **few)["never_ends"] == ("wrong", 1)
    one_ends = [none] * 4 + [{"rollout/finished": 1 / 64}] + [none] * 3
    assert found_in(one_ends, batch_size=64)["never_ends"] == ("wrong", 1)
    assert (
        found_in([none, none, {"rollout/finished": 1 / 16}, none], batch_size=16)["never_ends"][0] == "wrong"
    )
    by_chance = [{"rollout/finished": 0.75}, *[half, none, none, none, half] * 3]
    assert found_in(by_chance, **few)["few_end"][0] == "look"
    assert "few_end" not in found_in([{}, *[half] * 3], **few)
    assert found_in([{}] * 8 + [{"rollout/finished": 0.4}] * 8, **few)["few_end"] == ("wrong", 9)


def test_where_a_cut_answer_costs_nothing_only_a_fall_of_the_ends_is_unusual():
    free = {"missing_eos_penalty": 0.0}
    none, some = {"rollout/finished": 0.0}, {"rollout/finished": 0.4}
    assert found_in([none] * 2, **free) == {"never_ends": ("look", 1)}
    assert found_in([some] * 8, **free) == {}
    assert found_in([some] * 8) == {"few_end": ("look", 1)}
    assert found_in([{}] * 3 + [some] * 3, **free)["few_end"] == ("wrong", 4)


def test_equal_prompts_may_get_equal_responses():
    """Half of the different prompts, or of the different responses at the start if there were fewer."""
    changes = run_of(30, {"rollout/distinct": 0.1})
    for share, there in ((1.0, True), (0.21, True), (0.19, False), (1 / 64, False)):
        found = found_in(changes, {**FACTS, "distinct_prompts": share})
        assert ("answers_alike" in found) is there, share


def test_the_end_of_a_run_with_few_prompts_is_named_by_its_own_flag():
    (by_epochs,) = start_of(prompts=10, epochs=50).values()
    assert by_epochs.remedy == "more prompts in --data_path, or --epochs 5"
    (by_steps,) = start_of(prompts=10, epochs=10**6, max_steps=46).values()
    assert by_steps.remedy == "more prompts in --data_path, or --max_steps 4"


def test_one_word_answers_are_alike_and_nothing_is_wrong_unless_the_evaluations_fall():
    changes = run_of(30, {"rollout/distinct": 0.05})

    def level(*shares):
        return found_in(evaluated([dict(x) for x in changes], *shares))["answers_alike"][0]

    assert level(0.60, 0.61, 0.62) == "look"
    assert level(0.60, 0.40, 0.30) == "wrong"


def test_no_response_has_the_format():
    assert found_in([{"reward/format": 0.009}] * 2) == {"format_unknown": ("look", 1)}
    assert found_in([{"reward/format": 0.011}] * 2) == {}
    assert found_in([{"reward/format": 0.0}] * 2, reasoning=0) == {}
    assert found_in([{}, {}, {"reward/format": 0.0}, {"reward/format": 0.0}]) == {}


def test_most_prompts_have_answers_that_score_the_same():
    alike = {"rollout/equal_groups": 0.81}
    compared = {"advantage": "rloo", "num_generations": 4}
    assert found_in([alike] * 5, **compared) == {"groups_alike": ("look", 1)}
    assert found_in([{"rollout/equal_groups": 0.79}] * 5, **compared) == {}
    assert found_in([alike] * 4, **compared) == {}
    assert found_in([alike] * 5, num_generations=4) == {}  # a critic compares with what it expects


def test_answers_to_one_prompt_may_be_alike():
    changes = run_of(30, {"rollout/distinct": 0.2})
    for answers, there in ((1, True), (2, True), (4, False)):
        found = found_in(changes, num_generations=answers)
        assert ("answers_alike" in found) is there, answers


def test_all_scores_are_equal_from_the_start():
    same = {"reward/score_std": 0.0}
    assert found_in([same] * 3) == {"scores_alike": ("look", 1)}  # 384 responses of a hard task
    assert found_in([same] * 4) == {"scores_alike": ("wrong", 1)}
    assert found_in([*[same] * 12, {}, *[same] * 30], batch_size=16)["scores_alike"] == ("look", 1)
    assert found_in([same] * 9, batch_size=48) == {"scores_alike": ("look", 1)}
    assert found_in([same] * 6, batch_size=48, processes=2) == {"scores_alike": ("wrong", 1)}
    assert "scores_alike" not in found_in([{}, *[same] * 5])  # later: all is learned


def test_a_score_that_follows_length_before_the_policy_has_moved():
    longer = {"rollout/score_length_corr": 0.7}
    assert found_in([longer] * 3) == {"score_follows_length": ("look", 1)}
    assert found_in([{"rollout/score_length_corr": -0.7}] * 3).keys() == {"score_follows_length"}
    assert found_in([{"rollout/score_length_corr": 0.5}] * 3) == {}
    assert found_in([{}, {}, {}, *[longer] * 5]) == {}


def test_repetition_counts_where_it_has_grown_by_a_tenth():
    start = [{"rollout/repetition": 0.15}] * 3
    assert "repetition" in found_in([*start, *[{"rollout/repetition": 0.26}] * 3])
    assert "repetition" not in found_in([*start, *[{"rollout/repetition": 0.24}] * 3])


def test_length_that_changes_is_a_finding_where_nothing_independent_gets_better():
    longer = {"rollout/length": 42.0}
    assert "length_is_gamed" in found_in(evaluated(run_of(16, longer), 0.6, 0.6))
    assert "length_is_gamed" in found_in(evaluated(run_of(16, {"rollout/length": 15.0}), 0.6, 0.6))
    assert "length_is_gamed" not in found_in(evaluated(run_of(16, longer), 0.6, 0.9))
    assert "length_is_gamed" in found_in(evaluated(run_of(16, longer), 0.6, 0.9, 0.6))  # better for a while
    assert "length_is_gamed" not in found_in(evaluated(run_of(16, {"rollout/length": 36.0}), 0.6, 0.6))
    assert "length_is_gamed" not in found_in(run_of(16, longer))  # nobody can tell
    paid = longer | {"rollout/score_length_corr": 0.55}
    assert "length_is_gamed" in found_in(run_of(16, paid))
    assert "length_is_gamed" not in found_in(run_of(16, longer | {"rollout/score_length_corr": -0.55}))
    assert "length_is_gamed" not in found_in(evaluated(run_of(16, longer), 0.0, 0.0))  # of another form


def test_a_held_out_fall_is_told_from_chance_and_named_by_what_the_score_does():
    """Two standard errors of a difference of shares of 500 near 0.9: 2 sqrt(2) 0.3 / sqrt(500) = 0.038."""
    assert found_in(evaluated(run_of(16, {}), 0.6, 0.9, 0.85))["held_out_falls"] == ("look", 16)
    assert "held_out_falls" not in found_in(evaluated(run_of(16, {}), 0.6, 0.9, 0.87))
    worse = evaluated(run_of(16, {}), 0.9, 0.6)
    assert found_in(worse)["held_out_falls"] == ("wrong", 16)
    rising = evaluated(evaluated(run_of(16, {}), 0.9, 0.6), 1.0, 2.0, name="eval/score")
    assert "reward is exploited" in findings(steps_of(*rising), {})[0].symptom
    assert "reward is exploited" not in findings(steps_of(*worse), {})[0].symptom
    assert (
        found_in(evaluated(run_of(16, {}), 3.0, 4.0, 3.0, name="eval/judge"))["held_out_falls"][0] == "look"
    )
    assert "held_out_falls" not in found_in(evaluated(run_of(16, {}), 3.0, 4.0, 3.6, name="eval/judge"))
    centred = evaluated(run_of(16, {}), 0.02, 0.03, -0.1, name="eval/judge")  # near 0, as reward models are
    assert found_in(centred)["held_out_falls"][0] == "wrong"  # of an older version, which has no spread
    assert "held_out_falls" not in found_in(evaluated(centred, 1.2, 1.2, 1.2, name="eval/judge_std"))
    assert found_in(evaluated(centred, 0.3, 0.3, 0.3, name="eval/judge_std"))["held_out_falls"][0] == "wrong"


def test_a_policy_that_knows_nothing_of_the_prompts():
    """Half of ln 389 is 2.98 nats."""
    facts = {**FACTS, "vocabulary": 389}
    assert found_in([{"policy/entropy": 3.0}], facts=facts) == {"policy_is_lost": ("look", 1)}
    assert found_in([{"policy/entropy": 2.9}], facts=facts) == {}
    assert found_in([{}, {"policy/entropy": 3.0}], facts=facts) == {}
    assert found_in([{"policy/entropy": 3.0}], facts={**FACTS, "vocabulary": 99}) == {}


def test_entropy_that_falls_or_rises_while_nothing_gets_better():
    low, high = {"policy/entropy": 0.009}, {"policy/entropy": 0.5}
    assert "entropy_collapses" in found_in(evaluated(run_of(16, low), 0.6, 0.6))
    assert "entropy_collapses" not in found_in(evaluated(run_of(16, low), 0.6, 0.9))
    assert "entropy_collapses" not in found_in(evaluated(run_of(16, {"policy/entropy": 0.011}), 0.6, 0.6))
    assert "entropy_rises" in found_in(evaluated(run_of(16, high), 0.6, 0.6))
    assert "entropy_rises" not in found_in(evaluated(run_of(16, high), 0.6, 0.9))
    assert "entropy_rises" not in found_in(evaluated(run_of(16, {"policy/entropy": 0.3}), 0.6, 0.6))


def test_a_score_that_stays_below_its_start():
    start = [{"reward/score": 1.0 + 0.1 * (n % 2)} for n in range(WINDOW)]
    spread = spread_of_steps([m["reward/score"] for m in start])
    far, near = ([{"reward/score": 1.05 - times * spread}] * WINDOW for times in (2.1, 1.9))
    assert found_in([*start, *far])["score_below_start"] == ("wrong", WINDOW + 1)
    assert "score_below_start" not in found_in([*start, *far[:-1]])  # not yet for long
    assert "score_below_start" not in found_in([*start, *near])
    raw = {"reward/score_raw": 5.0}  # --normalize_reward: only the raw score can be compared
    assert "score_below_start" not in found_in([m | raw for m in (*start, *far)])


def test_a_policy_that_does_not_move_or_moves_for_nothing():
    still = {"kl/sequence": 0.01}
    assert found_in(run_of(12, still, still))["policy_is_stuck"] == ("look", 5)
    assert "policy_is_stuck" not in found_in(run_of(11, still, still))
    assert "policy_is_stuck" not in found_in(run_of(12, {"kl/sequence": 0.04}, {"kl/sequence": 0.04}))
    (stuck,) = findings(steps_of(*run_of(12, still, still)), {**FLAGS, "kl_coef": 1.0, "facts": FACTS})
    assert stuck.remedy == "--kl_coef 0.02"
    heavy = {**still, "reward/score_std": 0.02, "value/bias": 0.0}
    (stuck,) = findings(steps_of(*run_of(12, heavy, heavy)), {**FLAGS, "facts": FACTS})
    assert stuck.remedy == "--kl_coef 0.002"  # not what the run has already
    target = {**FLAGS, "facts": FACTS, "kl_target": 2.0}  # it moves the coefficient
    assert findings(steps_of(*run_of(12, heavy, heavy)), target)[0].remedy.startswith("--learning_rate")
    same = {**still, "reward/score_std": 0.0}
    assert found_in(run_of(12, same, same)).keys() == {"scores_alike"}
    late = [{"kl/sequence": 0.8 if n < 12 else 0.01} for n in range(20)]
    assert "policy_is_stuck" in found_in(
        [{**x, "reward/score": 1 + 0.1 * (n % 2)} for n, x in enumerate(late)]
    )
    assert "policy_is_stuck" not in found_in([{**x, **y} for x, y in zip(run_of(20, {}), late, strict=True)])
    for kl, there in ((0.11, True), (0.09, False)):
        flat = [{"reward/score": 1 + 0.1 * (n % 2), "kl/sequence": kl} for n in range(20)]
        assert ("score_is_flat" in found_in(flat)) is there
    moved = [{"reward/score": 1 + 0.1 * (n % 2)} for n in range(20)]
    assert found_in(moved) == {"score_is_flat": ("look", 20)}
    assert found_in([{"reward/score": 1 + 0.1 * (n % 2) + 0.2 * (n >= 10)} for n in range(20)]) == {}


def test_the_format_alone_rises():
    early = {"reward/format": 0.1, "reward/marks": 0.5, "reward/model": 0.5}
    late = {"reward/format": 0.5, "reward/marks": 1.0, "reward/model": 0.3}
    steps = [{**(early if n < 10 else late), "reward/score": 1.1 + 0.7 * (n >= 10)} for n in range(20)]
    assert found_in(steps)["form_gains_judge_loses"] == ("wrong", 20)
    facts = {**FACTS, "reward_models": {"model": {**JUDGE, "weight": 0.5}}}
    for given, weight in (("a/DIR=0.5", facts), ("a/DIR", FACTS)):
        found = findings(steps_of(*steps), {**FLAGS, "reward_model": [given], "facts": weight})
        (remedy,) = [f.remedy for f in found if f.name == "form_gains_judge_loses"]
        assert remedy == f"--reward_model a/DIR={'1' if '=' in given else '2'}, or --reasoning 0"
    (remedy,) = [f.remedy for f in findings(steps_of(*steps), {}) if f.name == "form_gains_judge_loses"]
    assert remedy == "larger scores in the rest of the reward, or --reasoning 0"  # of an older version
    two = [{("reward/model_a" if n == "reward/model" else n): x for n, x in s.items()} for s in steps]
    two = [{**s, "reward/model_b": 0.2, "reward/score": s["reward/score"] + 0.2} for s in two]
    judges = {"model_a": JUDGE, "model_b": {**JUDGE, "weight": -0.5}}
    flags = {"reward_model": ["x/a", "y/b=-0.5"], "facts": {**FACTS, "reward_models": judges}}
    form = the("form_gains_judge_loses", two, **flags)
    assert form.remedy == "--reward_model x/a=2 y/b=-1, or --reasoning 0"
    assert form.numbers == "format +0.40, marks +0.50, model_a -0.20, model_b +0.00"
    stands = [{**s, "reward/model": 0.5, "reward/score": 1.1 + 0.9 * (n >= 10)} for n, s in enumerate(steps)]
    assert found_in(stands)["form_gains_judge_loses"] == ("look", 20)
    assert "form_gains_judge_loses" not in found_in(evaluated([dict(s) for s in steps], 0.6, 0.9))
    assert "form_gains_judge_loses" in found_in(evaluated([dict(s) for s in steps], 0.6, 0.6))


def forms(rise, noise=0.0, parts=("format", "marks", "model")):
    """20 steps: two rules gain 0.9, and the third part, the user's, rises so much and goes up and down by
    ``noise`` from step to step."""
    rows = [(0.4 * (n >= 10), 0.5 * (n >= 10), rise * (n >= 10) + noise * (n % 2)) for n in range(20)]
    named = [dict(zip((f"reward/{part}" for part in parts), row, strict=True)) for row in rows]
    return [{**row, "reward/score": sum(row.values())} for row in named]


def test_the_users_part_does_not_rise_or_falls_and_the_form_has_most_of_the_gain():
    """Noise of 0.2 up and down is a standard deviation of 0.2 sqrt(pi) / 2 = 0.177; two standard errors of
    the difference of two means of ten are 2 sqrt(2 / 10) 0.177 = 0.159."""

    def level(*args, **more):
        return found_in(forms(*args), **more).get("form_gains_judge_loses", ("", 0))[0]

    eos = "missing_eos", "repetition"
    for parts in (("format", "marks", "model"), (*eos, "function"), (*eos, "server"), (*eos, "model_rm")):
        assert level(-0.021, 0.0, parts) == "wrong" and level(-0.019, 0.0, parts) == "look"
        assert level(-0.17, 0.2, parts) == "wrong" and level(-0.15, 0.2, parts) == "look"
        assert level(0.15, 0.2, parts) == "look" and level(0.17, 0.2, parts) == ""
        assert level(0.22, 0.5, parts) == "look" and level(0.23, 0.5, parts) == ""  # a fifth of the gain
    for name, there in (("score", True), ("judge", False)):  # a score that rises by rules is no witness
        steps = evaluated(forms(0.0), 0.1, 1.0, name=f"eval/{name}")
        assert ("form_gains_judge_loses" in found_in(steps)) is there
    (found,) = findings(steps_of(*forms(0.0, 0.0, (*eos, "function"))), {"facts": {}})
    assert found.numbers == "missing_eos +0.40, repetition +0.50, function +0.00"
    assert found.remedy == "larger scores in the rest of the reward, or a smaller --repetition_penalty"


def test_a_score_that_is_normalised_is_told_from_its_rules_by_the_raw_one():
    """The raw score rises by what missing_eos gives; the model's normalised score moves with its scale."""
    steps = [{"reward/model": 0.5 * (n >= 10), "reward/missing_eos": 0.4 * (n >= 10)} for n in range(20)]
    steps = [{**s, "reward/score": 1.0, "reward/score_raw": 8 + s["reward/missing_eos"]} for s in steps]
    assert found_in(steps)["form_gains_judge_loses"] == ("look", 20)
    risen = [{**s, "reward/score_raw": 8 + s["reward/missing_eos"] + s["reward/model"]} for s in steps]
    assert "form_gains_judge_loses" not in found_in(risen)


def test_a_kl_that_weighs_nothing_beside_the_scores():
    assert found_in([{"reward/score_std": 101.0}] * 2) == {"kl_weighs_nothing": ("look", 1)}
    assert found_in([{"reward/score_std": 99.0}] * 2) == {}
    moved = {**FLAGS, "facts": FACTS, "kl_target": 2.0}
    assert findings(steps_of(*[{"reward/score_std": 101.0}] * 2), moved) == []


# ------------------------------------------------------------------------------------ what a run begins with


def start_of(**change):
    """The findings of a run with these flags or facts, before it has trained."""
    facts = {**FACTS, **{name: x for name, x in change.items() if name in FACTS}}
    args = {**FLAGS, **{name: x for name, x in change.items() if name not in FACTS}, "facts": facts}
    return {f.name: f for f in findings([{"step": 0}], args)}


@pytest.mark.parametrize(
    ("change", "name", "level", "remedy"),
    [
        ({"missing_header": "assistant"}, "missing_header", "wrong", "--prompt_template"),
        ({"template_has_eos": False}, "template_without_eos", "look", "eos_token"),
        ({"unknown_tokens": 0.03}, "other_tokenizer", "look", "--tokenizer"),
        ({"fewer_ids": [300, 400]}, "other_tokenizer", "look", "--tokenizer"),
        ({"dropped": 1200}, "records_dropped", "look", "--max_seq_len 1024"),
        ({"dropped": 5400}, "records_dropped", "wrong", "--max_seq_len 1024"),
        ({"kl_coef": 0.0}, "nothing_holds_the_policy", "look", "--kl_coef 0.02"),
        ({"temperature": 0.1}, "unusual_flags", "look", "--temperature 1"),
        ({"learning_rate": 0.011}, "unusual_flags", "look", "--learning_rate 0.0005"),
        ({"learning_rate": 1e-5}, "unusual_flags", "look", "--learning_rate 0.0005"),
        ({"critic_learning_rate": 1e-7}, "unusual_flags", "look", "--critic_learning_rate 0.0005"),
        ({"cliprange_value": 0.001}, "unusual_flags", "look", "--cliprange_value 0.5"),
        ({"prompts": 190}, "few_prompts", "look", "--data_path"),
        ({"batch_size": 15}, "small_batch", "look", "--batch_size"),
    ],
)
def test_flags_and_facts_that_are_far_from_the_usual_ones(change, name, level, remedy):
    found = start_of(**change)
    assert found.keys() == {name}
    assert found[name].level == level
    assert remedy in found[name].remedy


def test_held_out_pairs_that_fall_are_found_offline():
    """By hand: 2 sqrt(2) 0.1 / sqrt(200) = 0.02 with 200 pairs."""

    def found(before, best, after, **also):
        args = {**FLAGS, "offline_data_path": "x", "facts": {**FACTS, "held_out_pairs": 200}}
        values = {0: before, 4: best, 8: after}
        more = {n: {"eval/chosen_share": x, "eval/chosen_share_std": 0.1, **also} for n, x in values.items()}
        lines = [{"step": n, "policy/loss": 0.0, **more.get(n, {})} for n in range(9)]
        return {f.name: f for f in findings(lines, args)}.get("held_out_falls")

    assert found(0.5, 0.6, 0.581) is None
    seen = found(0.5, 0.6, 0.579)
    assert (seen.level, seen.step, seen.symptom) == ("look", 8, "the held-out chosen_share falls")
    assert found(0.5, 0.5, 0.459).level == "wrong"  # also where it has never been above its start
    changes = {"eval/chosen_share_change_std": 0.02}  # pair by pair: 2 * 0.02 / sqrt(200) = 0.0028
    assert found(0.5, 0.6, 0.598, **changes) is None
    assert found(0.5, 0.6, 0.597, **changes).level == "look"


def test_what_is_left_out_or_too_few_offline_is_named_by_the_flags_of_logged_answers():
    found = start_of(dropped=1200, long_answers=601, offline_data_path="x")["records_dropped"]
    assert found.symptom == "many logged answers are longer than --max_gen_len and are left out"
    assert found.remedy == "--max_gen_len 256" and found.causes[0].startswith("--max_gen_len")
    found = start_of(dropped=1200, long_answers=599, offline_data_path="x")["records_dropped"]
    assert found.symptom.startswith("many prompts") and found.remedy == "--max_seq_len 1024"
    found = start_of(prompts=190, offline_data_path="x")["few_prompts"]
    assert found.symptom.startswith("few answers for so many passes")
    assert found.numbers.startswith("190 answers, ") and found.numbers.endswith(" passes")
    assert found.remedy.startswith("more answers in --offline_data_path, or --")


def test_flags_and_facts_that_are_usual():
    usual = {
        "dropped": 1100,
        "unknown_tokens": 0.01,
        "prompts": 200,
        "batch_size": 16,
        "learning_rate": 0.009,
    }
    for name, value in usual.items():
        assert start_of(**{name: value}) == {}, name
    assert start_of(kl_coef=0.0, reward_model=[]) == {}  # a reward that cannot be deceived
    assert start_of(cliprange_value=0.0) == {}  # switched off


def test_reward_models_that_cannot_be_right():
    def judge(**change):
        return {"model": {**JUDGE, **change}}

    assert start_of(reward_models=judge(sees_answer=False)).keys() == {"judge_is_blind"}
    assert start_of(reward_models=judge(template=False)).keys() == {"judge_without_template"}
    assert start_of(reward_models=judge(template=False), chat_template=False) == {}
    assert start_of(reward_models=judge(weight=-1.0)).keys() == {"judge_against"}
    weak = start_of(reward_models=judge(weight=0.02), reward_model=["DIR=0.02"])
    assert weak.keys() == {"form_outweighs_judge"}
    assert weak["form_outweighs_judge"].remedy == "--reward_model DIR=0.5, or --reasoning 0"
    two = judge() | {"other": {**JUDGE, "weight": -0.5}}
    against = start_of(reward_models=two, reward_model=["a=b/DIR", "OTHER=-0.5"])
    assert against["judge_against"].remedy == "--reward_model a=b/DIR OTHER=0.5"
    assert start_of(reward_models=two, reward_model=[])["judge_against"].remedy == (
        "--reward_model PATH PATH=0.5"
    )
    assert start_of(reward_models=judge(weight=0.6)) == {}
    assert start_of(reward_models=judge(weight=0.02), reasoning=0) == {}


def test_stages_1_and_2_have_no_findings():
    record = {"train/loss": 9.0, "train/grad_norm": 1e6, "eval/accuracy": 0.1}
    steps = [{"step": n, **record} for n in range(30)]
    assert findings(steps, {"script": "train_sft.py", "batch_size": 1, "learning_rate": 1.0}) == []
    falls = [{"step": n, "eval/accuracy": 0.9 - 0.2 * (n > 20)} for n in range(30)]
    assert findings(falls, {"script": "train_reward.py"}) == []


def test_a_longer_size_is_named_as_far_as_the_positions_of_the_model_go():
    """128 positions, the longest prompt has 40 tokens: answers of 88 tokens have room, and no more."""

    def remedy(name, steps, **args):
        found = findings(steps_of(*steps), {**FLAGS, "facts": {**FACTS, **small}, **args})
        return next(f.remedy for f in found if f.name == name)

    small = {"positions": 128, "longest": 40}
    none, few = [{"rollout/finished": 0.0}] * 2, [{"rollout/finished": 0.5}] * 4
    assert remedy("never_ends", none, max_gen_len=22).startswith("--max_gen_len 88; or check eos_token")
    assert remedy("never_ends", none, max_gen_len=30).startswith("--max_gen_len 88; or check eos_token")
    assert remedy("never_ends", none, max_gen_len=71).startswith("check eos_token")  # hardly longer than now
    assert remedy("few_end", few, max_gen_len=44) == "--max_gen_len 88"
    assert remedy("few_end", few, max_gen_len=70) == "--max_gen_len 88"
    assert remedy("few_end", few, max_gen_len=88).startswith("--missing_eos_penalty 2, or shorter prompts")
    small["dropped"] = 3000
    assert remedy("records_dropped", [{}], max_seq_len=16) == "--max_seq_len 64"
    assert remedy("records_dropped", [{}], max_seq_len=40) == "--max_seq_len 64"
    assert remedy("records_dropped", [{}], max_seq_len=64).startswith(
        "shorter prompts, or a smaller --max_gen_len"
    )
    small["positions"] = None  # no limit
    assert remedy("records_dropped", [{}], max_seq_len=64) == "--max_seq_len 256"
    assert remedy("never_ends", none, max_gen_len=88).startswith("--max_gen_len 352;")
    assert remedy("few_end", few, max_gen_len=88) == "--max_gen_len 176"


# ------------------------------------------------------------------------------------------- facts of a start


def template_tokenizer(template):
    tokenizer = word_tokenizer(["user", "assistant", "is", "<think>", "</think>", "Seven.", "a"])
    tokenizer.chat_template = template
    return tokenizer


def test_the_template_is_asked_for_the_header_and_the_eos():
    header = "{% if add_generation_prompt %}assistant {% endif %}"
    turns = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    assert turns_of(template_tokenizer(turns + header), "a", [0]) == ("", True)
    assert turns_of(template_tokenizer(turns), "a", [0]) == ("assistant", True)
    assert turns_of(template_tokenizer(turns + header), "a", [5]) == ("", False)
    assert turns_of(template_tokenizer(turns.replace("</s>", "") + header), "a", [0]) == ("", False)
    thought = turns.replace(
        "m['content']", "('<think> </think> ' if m['role'] == 'assistant' else '') + m['content']"
    )
    assert turns_of(template_tokenizer(thought + header), "a", [0]) == ("", True)
    assert turns_of(template_tokenizer(None), "a", [0]) == ("", True)


def test_a_run_keeps_its_facts_and_says_a_finding_once_also_when_resumed(tmp_path, capsys):
    files = run_files(tmp_path, count=24)
    blind = word_tokenizer(list("abcdefgh"))
    blind.chat_template = "{{ messages[0]['content'] }}"
    files["reward_model"] = save_reward_dir(tmp_path / "blind", blind)
    sizes = {
        "batch_size": 8,
        "mini_batch_size": 8,
        "max_gen_len": 4,
        "max_seq_len": 5,
        "critic_warmup_steps": 0,
    }
    argv = flags(**files, **sizes, max_steps=3, save_interval=1, device="cpu", out_dir=tmp_path / "out")
    train_ppo.main(argv)
    said = capsys.readouterr().out
    folder = tmp_path / "out" / "run_1"
    facts = json.loads((folder / "config.json").read_text())["facts"]
    assert facts["read"] == 24
    assert facts["dropped"] == facts["read"] - facts["prompts"] > 0
    assert facts["reward_models"]["model"] == {"weight": 1.0, "template": True, "sees_answer": False}
    assert facts["suited"]["learning_rate"] == 5e-4
    assert facts["positions"] == 256
    assert 0 < facts["distinct_prompts"] <= 1
    assert facts["longest"] <= 5
    blindness = "health: wrong, since step 0: a reward model does not see the answers"
    assert said.count(blindness) == 1
    assert "**judge_is_blind** (wrong, since step 0)" in (folder / "summary.md").read_text(encoding="utf-8")
    metrics = folder / "metrics.jsonl"
    kept = metrics.read_text(encoding="utf-8")
    for late in ("step_2", "step_3"):
        for file in sorted((folder / "checkpoints" / late).rglob("*")):
            file.unlink()
        (folder / "checkpoints" / late).rmdir() if (folder / "checkpoints" / late).exists() else None
    train_ppo.main([*argv, "--resume", str(folder)])
    assert blindness not in capsys.readouterr().out
    assert len(metrics.read_text(encoding="utf-8").splitlines()) == len(kept.splitlines())


def test_strict_health_ends_a_broken_run_saved_and_leaves_a_healthy_one_alone(tmp_path):
    files = run_files(tmp_path, count=640)
    (tmp_path / "same.py").write_text(
        "def score(prompts, responses, answers):\n    return [1.0] * len(prompts)\n"
    )
    files["reward_fn"] = f"{tmp_path / 'same.py'}:score"
    del files["reward_model"]
    sizes = {
        "batch_size": 128,
        "mini_batch_size": 128,
        "max_gen_len": 4,
        "max_steps": 5,
        "missing_eos_penalty": 0,
    }
    argv = flags(**files | sizes, device="cpu", out_dir=tmp_path / "out", strict_health=1)
    out, err = finish(launch(argv), code=3)
    assert err == (
        "error: --strict_health 1: ended by scores_alike, wrong since step 1; its line above and "
        "docs/health.md say what to try\n"
    )
    assert out.count("health: wrong, since step 1: all responses get the same score") == 1
    assert (tmp_path / "out/run_1/checkpoints/step_4").is_dir()
    assert len(read_jsonl(tmp_path / "out/run_1/metrics.jsonl")) == 5
    said = out[out.index("saved: ") :].splitlines()
    assert said[1] == (
        "start a new run with the remedy: call the reward on two different answers yourself; "
        "see docs/rewards.md"
    )
    assert said[2].startswith("to go on all the same: ") and "--resume" in said[2]
    ended = "ended by --strict_health 1: scores_alike"
    assert f"- The run was {ended}" in (tmp_path / "out/run_1/summary.md").read_text(encoding="utf-8")
    report = (tmp_path / "out/run_1/report.html").read_text(encoding="utf-8")
    assert ended in report
    assert " | ev - | " in out and "nan" not in out  # all returns are equal
    assert read_jsonl(tmp_path / "out/run_1/metrics.jsonl")[1]["value/explained_variance"] is None
    train_ppo.main(
        [*argv, "--resume", str(tmp_path / "out/run_1")]
    )  # it has been said: the user wants to go on
    assert len(read_jsonl(tmp_path / "out/run_1/metrics.jsonl")) == 6
    assert "ended by" not in (tmp_path / "out/run_1/summary.md").read_text(encoding="utf-8")


def test_strict_health_ends_a_run_that_cannot_be_right_before_it_learns(tmp_path):
    files = run_files(tmp_path, count=4)
    with open(files["data_path"], "a", encoding="utf-8") as file:
        file.write((json.dumps({"prompt": "how much is " * 9}) + "\n") * 60)
    argv = flags(**files, batch_size=4, max_gen_len=4, max_seq_len=20, device="cpu", out_dir=tmp_path / "out")
    out, err = finish(launch([*argv, "--strict_health", "1"]), code=3)
    assert err.startswith(
        "error: --strict_health 1: ended by records_dropped, wrong since step 0; its line above"
    )
    assert out.count("health: wrong, since step 0: many prompts are longer") == 1
    assert "start a new run with the remedy: --max_seq_len 80" in out
    assert "nothing was learned" in out
    assert "step 1/" not in out


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_speaks_of_any_run_folder(tmp_path):
    def ask(*words):
        command = [PYTHON, "-m", "trainer.runs.health", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout, done.stderr

    folder = tmp_path / "run_1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    lines = [json.dumps(line) for line in DEMO]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 47, "kl')  # killed while it wrote
    code, out, _ = ask(folder)
    assert (code, out) == (0, f"{folder}: 46 steps\n\nHealth: nothing unusual was found.\n")
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 47, "policy/ratio": 9.0}\n']))
    code, out, _ = ask(folder)
    assert code == 1
    assert "**ratio_drastic** (wrong, since step 47)" in out
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert ask(folder)[1].startswith(f"{folder}: 1 step\n")
    (folder / "config.json").write_text('{"script": "train_sft.py"}')
    assert ask(folder)[:2] == (0, f"{folder}: a run of train_sft.py; only runs of train_ppo.py are checked\n")
    for wrong in ([tmp_path / "nothing"], [ROOT / "docs"], [], ["--help"], [folder, folder]):
        code, _, err = ask(*wrong)
        assert code == 2
        assert len(err.splitlines()) == 1


def test_for_a_folder_of_runs_the_command_judges_the_one_that_was_logged_last(tmp_path, capsys):
    for name, when in (("run_1", 100), ("run_3", 300), ("run_2", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"step": 1, "policy/ratio": {when / 100}}}\n')
        os.utime(tmp_path / name / "metrics.jsonl", (when, when))
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'run_3'}, the newest run in {tmp_path}: 1 step\n")
    assert "policy/ratio 3" in said
    assert main([str(tmp_path / "run_1")]) == 0


def test_what_cannot_be_read_is_named_in_one_line_and_half_a_line_at_the_end_is_left_out(tmp_path):
    config, metrics = tmp_path / "config.json", tmp_path / "metrics.jsonl"
    config.write_text('{"critic_warmup_steps": "auto"}')
    metrics.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "kl')
    assert read_run(tmp_path) == ([{"step": 0}, {"step": 1}], {"critic_warmup_steps": "auto"})
    metrics.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: is no line of metrics \(.*\); restore it"):
        read_run(tmp_path)
    config.write_text("{")
    with pytest.raises(InputError, match=r"is no run folder .*; name one such as out/run_1"):
        read_run(tmp_path)


def test_the_command_ends_without_a_word_where_its_reader_has_ended(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy/ratio": 9.0}\n')
    reader, writer = os.pipe()
    os.close(reader)
    command = [PYTHON, "-m", "trainer.runs.health", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=600)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


# ------------------------------------------------------------------------------------------- how it is said


def test_findings_are_sorted_and_remedies_come_from_the_flags_of_the_run():
    steps = [
        {"policy/early_stop": 1.0, "kl/k1": 1.5, "policy/ratio": 5.0 if n == 4 else 1.0} for n in range(6)
    ]
    found = findings(steps_of(*steps), {**FLAGS, "facts": FACTS, "learning_rate": 3e-3, "target_kl": 0.002})
    assert [(f.name, f.level) for f in found] == [
        ("ratio_drastic", "wrong"),
        ("kl_far", "look"),
        ("early_stop_starves", "look"),
    ]
    assert found[0].remedy == "--learning_rate 0.0005 --ppo_epochs 1"  # what suits it is below a third
    assert found[1].remedy == "--learning_rate 0.0005 --kl_coef 0.06"
    text = as_markdown(found)
    assert text.index("ratio_drastic") < text.index("kl_far")
    assert one_line(found[0]).startswith("wrong, since step 5: the updates of one batch")


@pytest.mark.parametrize(
    ("metric", "value", "name", "args", "remedy"),
    [
        ("policy/ratio", 3.0, "ratio_drastic", {"ppo_epochs": 1}, "--learning_rate 0.00017"),
        (
            "policy/approx_kl",
            0.1,
            "steps_too_large",
            {"ppo_epochs": 1, "target_kl": 0.02},
            "--learning_rate 0.00017",
        ),
        (
            "policy/approx_kl",
            0.1,
            "steps_too_large",
            {},
            "--learning_rate 0.00017 --ppo_epochs 1 --target_kl 0.05",
        ),
        ("policy/grad_norm", 99.0, "gradient_is_cut", {"grad_clip": 2.0}, "--grad_clip 20"),
        ("policy/grad_norm", 99.0, "gradient_is_cut", {"grad_clip": 0.01}, "--grad_clip 1"),
        ("rollout/sampler_gap", 0.2, "sampler_apart", {}, "report it on the project's issue page"),
        (
            "rollout/sampler_gap",
            0.2,
            "sampler_apart",
            {"dtype": "auto"},
            "--dtype float32; if it stays, report it on the project's issue page",
        ),
        (
            "rollout/repetition",
            0.5,
            "repetition",
            {"repetition_penalty": 1.0},
            "--repetition_penalty 2 --kl_coef 0.06",
        ),
        ("rollout/length", 1.0, "empty_answers", {"missing_eos_penalty": 0.0}, "--kl_coef 0.06"),
        (
            "reward/at_limit",
            0.5,
            "scores_at_limit",
            {"normalize_reward": 1},
            "--kl_coef 0.06, or another reward",
        ),
        ("reward/at_limit", 0.5, "scores_at_limit", {}, "--normalize_reward 1 --critic_init actor"),
        ("reward/at_limit", 0.5, "scores_at_limit", {"critic_init": "actor"}, "--normalize_reward 1"),
        (
            "value/bias",
            2.0,
            "critic_biased",
            {"critic_learning_rate": 0.5, "lam": 1.0},
            "--critic_learning_rate 0.0005",
        ),
        (
            "value/explained_variance",
            -1.0,
            "critic_useless",
            {"critic_warmup_steps": 10, "lam": 1.0},
            "--critic_learning_rate 0.00017 --critic_warmup_steps 20",
        ),
    ],
)
def test_a_remedy_is_not_what_the_run_has_already(metric, value, name, args, remedy):
    steps = steps_of(*[{}] * 2, *[{metric: value}] * 5)
    found = findings(steps, {**FLAGS, "facts": FACTS, **args})
    assert [f.remedy for f in found if f.name == name] == [remedy]


def test_a_finding_that_becomes_wrong_is_said_again_and_then_never():
    health = Health({})
    said = [
        [f.level for f in health.add(r)] for r in steps_of(*[{"kl/k1": x} for x in (1.5, 1.6, 3.5, 4.0, 1.5)])
    ]
    assert said == [["look"], [], ["wrong"], [], []]
    assert [f.step for f in health.sorted] == [1]  # since when, not when it became worse


@pytest.mark.parametrize(
    ("flag", "value", "change", "escalates"),
    [
        ("learning_rate", 0.05, {"policy/ratio": 3.0}, True),
        ("learning_rate", 1e-6, {"policy/ratio": 3.0}, False),  # this is not what a low rate does
        ("learning_rate", 0.05, {"policy/first_ratio": 2.0}, False),  # nor this what a high one does
        ("critic_learning_rate", 0.05, {"policy/ratio": 3.0}, False),
        ("critic_learning_rate", 0.05, {"value/explained_variance": -3.0}, True),
        ("ppo_epochs", 30, {"policy/ratio": 3.0}, True),
    ],
)
def test_an_unusual_flag_is_wrong_and_first_once_the_run_breaks_by_it(flag, value, change, escalates):
    health = Health({**FLAGS, "facts": FACTS, flag: value})
    said = [health.add(record) for record in steps_of({}, *[change] * 5)]
    assert [(f.name, f.level) for f in said[0]] == [("unusual_flags", "look")]
    begun = next(found for found in said[1:] if any(f.level == "wrong" for f in found))
    assert (begun[0].name == "unusual_flags") is escalates
    assert (health.sorted[0].name == "unusual_flags") is escalates
    unusual = next(f for f in health.sorted if f.name == "unusual_flags")
    assert (unusual.level, unusual.symptom.endswith("the run breaks: change it first")) == (
        ("wrong", True) if escalates else ("look", False)
    )


def test_no_report_moves_a_flag_both_ways():
    critic = {"value/explained_variance": -0.5, "value/bias": 2.0}
    useless, biased = findings(steps_of(*[critic] * 5), {**FLAGS, "facts": FACTS})
    assert useless.remedy.startswith("--critic_learning_rate 0.00017 --lam 1")
    assert biased.remedy == "(--critic_learning_rate: do first what critic_useless says) --lam 1"
    useless, biased = findings(steps_of(*[critic] * 5), {})  # of an old version: the rate is not known
    assert useless.remedy.startswith("a smaller --critic_learning_rate --lam 1")
    assert biased.remedy == "(--critic_learning_rate: do first what critic_useless says) --lam 1"
    broken = [{"value/bias": 2.0}] * 5 + [{"value/bias": 2.0, "value/explained_variance": -3.0}] * 5
    useless, biased = findings(steps_of(*broken), {**FLAGS, "facts": FACTS})  # the wrong one begins later
    assert (useless.name, useless.level, useless.step) == ("critic_useless", "wrong", 6)
    assert "critic_useless" in biased.remedy
    full = {**FACTS, "dropped": 3000, "positions": 128, "longest": 40}
    few = [{"rollout/finished": 0.5}] * 4
    dropped, cut = findings(steps_of(*few), {**FLAGS, "facts": full, "max_seq_len": 64, "max_gen_len": 60})
    assert dropped.remedy.startswith("shorter prompts, or a smaller --max_gen_len")
    assert cut.remedy == "(--max_gen_len: do first what records_dropped says)"


def test_a_policy_that_is_far_is_wrong_only_where_an_evaluation_clearly_fell():
    far = [{"kl/sequence": 20.0, "rollout/length": 30.0}] * 3
    for last, level in ((0.51, "look"), (0.2, "wrong")):
        steps = [{"step": 0, "eval/accuracy": 0.5}, *steps_of(*far)]
        steps[-1]["eval/accuracy"] = last
        found = findings(steps, {**FLAGS, "facts": FACTS})
        assert [f.level for f in found if f.name == "kl_far"] == [level]


def test_the_limit_of_the_first_ratio_is_that_of_the_type_in_which_the_run_computed():
    steps = steps_of({"policy/first_ratio": 1.01})
    for dtype, count in (("float32", 1), ("bfloat16", 0)):
        found = findings(steps, {**FLAGS, "dtype": "auto", "facts": {**FACTS, "dtype": dtype}})
        assert [f.name for f in found].count("first_ratio") == count


def test_a_run_without_a_step_is_said_to_have_none(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 0
    assert "no step was logged yet" in capsys.readouterr().out


def test_a_step_costs_the_same_however_long_the_run_is():
    """A step of the demo takes half a second; the limit is wide for a slow machine."""
    health, args = Health({**FLAGS, "facts": FACTS}), []
    with collected_between_steps():  # else the collector looks through what other tests have left
        for n in range(1000):
            start = time.process_time()
            health.add({"step": n + 1, **USUAL, "reward/score": 1 + 0.1 * (n % 2), "eval/accuracy": 0.5})
            args.append(time.process_time() - start)
    assert sum(args[-100:]) / 100 < 2e-2
    assert sum(args[-100:]) < 3 * sum(args[100:200]) + 0.1


def test_the_spread_of_steps_is_that_of_their_noise_and_not_of_their_trend():
    import torch

    noise = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 3
    assert spread_of_steps(noise.tolist()) == pytest.approx(3, rel=0.05)
    assert spread_of_steps((noise + torch.arange(2000) * 0.1).tolist()) == pytest.approx(3, rel=0.05)
    assert spread_of_steps([1.0, 2.0]) != spread_of_steps([1.0, 2.0])  # NaN: too few


# ----------------------------------------------------------------------------------- causes and remedies


COMPARE = "compare a step's best and worst answers in samples.jsonl: if they are alike, mend the reward"


def the(name, changes, facts=FACTS, **args):
    """The finding of this name of a run whose steps are the usual one with these changes."""
    found = findings(steps_of(*changes), {"facts": facts, **FLAGS, **args})
    return next(f for f in found if f.name == name)


@pytest.mark.parametrize(
    ("target", "kl", "cause", "remedy"),
    [
        (0.05, 0.04, "--learning_rate is too high", "--learning_rate 0.00017"),
        (0.02, 0.01, "--learning_rate is too high", "--learning_rate 0.00017"),
        (0.019, 0.01, "--target_kl is too small", "--target_kl 0.05"),
        (1e-6, 0.019, "--target_kl is too small", "--target_kl 0.02"),
        (1e-6, 0.03, "--learning_rate is too high", "--learning_rate 0.00017 --target_kl 0.02"),
    ],
)
def test_an_early_stop_is_the_rates_fault_where_the_target_is_not_small(target, kl, cause, remedy):
    stops = [{"policy/early_stop": 1.0, "policy/approx_kl": kl}] * 3
    found = the("early_stop_starves", stops, target_kl=target)
    assert (found.causes[0], found.remedy) == (cause, remedy)


def test_a_rate_that_is_high_is_not_raised():
    still = run_of(12, {"kl/sequence": 0.01}, {"kl/sequence": 0.01})
    biased, error = [{"value/bias": 2.0}] * 5, [{"value/error": 2.0}] * 5
    critic, unknown = "--critic_learning_rate", {**FACTS, "suited": {}}
    for name, flag, changes, more in (
        ("policy_is_stuck", "--learning_rate", still, ""),
        ("critic_biased", critic, biased, " --lam 1"),
        ("critic_learns_nothing", critic, error, ""),
    ):
        for rate, word, value in (
            (1.1e-3, "high", "0.00037"),
            (9e-4, "low", "0.0027"),
            (1.0, "high", "0.0005"),
        ):
            found = the(name, changes, **{flag[2:]: rate})
            assert found.causes[0] == f"{flag} is too {word}"
            assert found.remedy == f"{flag} {value}{more}"
        assert the(name, changes, unknown, **{flag[2:]: 1.0}).remedy == f"{flag} 0.33{more}"


def test_the_bias_of_the_critic_has_a_direction():
    for bias, word in ((2.0, "high"), (-2.0, "low")):
        found = the("critic_biased", [{"value/bias": bias}] * 5)
        assert found.symptom.startswith(f"the critic's values are too {word}:")
    assert "--cliprange_value is too small" in found.causes
    unclipped = the("critic_biased", [{"value/bias": 2.0}] * 5, cliprange_value=0)
    assert "--cliprange_value is too small" not in unclipped.causes


def test_a_cause_that_the_flags_rule_out_is_not_named():
    for name, change in (
        ("steps_too_large", {"policy/approx_kl": 0.1}),
        ("kl_far", {"kl/sequence": 20.0}),
        ("ratio_drastic", {"policy/ratio": 5.0}),
    ):
        for epochs, there in ((1, False), (2, True), (None, True)):  # of an old version: not known
            found = the(name, [change] * 3, ppo_epochs=epochs)
            assert ("--ppo_epochs is too large" in found.causes) is there, name
    for penalty in (1.0, 0.0):
        found = the("empty_answers", [{}, {"rollout/length": 1.0}], missing_eos_penalty=penalty)
        assert ("--missing_eos_penalty is too large" in found.causes) is bool(penalty)


def test_no_remedy_goes_beyond_what_its_flag_takes_or_what_is_usual():
    known = train_ppo.flag_parser().flags
    for name, most in TOP.items():
        assert not known[name].problem(most), name
    far = [{"kl/sequence": 20.0}] * 3
    assert the("kl_far", far, kl_coef=1.0).remedy == "--learning_rate 0.00017 --kl_coef 2"
    assert the("kl_far", far, kl_coef=1.7).remedy == "--learning_rate 0.00017"
    longer = [{"rollout/length": 28.0, "rollout/score_length_corr": 0.7}] * 3
    assert the("score_follows_length", longer, kl_coef=2.0).remedy == "another reward"
    empty = [{}, {"rollout/length": 1.0}]
    words = "a reward that gives less to an empty answer"
    assert the("empty_answers", empty, kl_coef=2.0, missing_eos_penalty=0).remedy == words
    assert the("empty_answers", empty, kl_coef=2.0).remedy == "--missing_eos_penalty 0.3"
    large = [{"reward/score_std": 1000.0}] * 2
    assert the("kl_weighs_nothing", large).remedy == "a reward divided by 1e+03"
    assert (
        the("kl_weighs_nothing", [{}] * 2, kl_coef=1e-4).remedy == "--kl_coef 0.02, or a reward divided by 1"
    )
    cut, few = [{"policy/grad_norm": 1e9}] * 5, [{"rollout/finished": 0.5}] * 4
    assert the("gradient_is_cut", cut, grad_clip=1e6).remedy == "a reward with a smaller scale"
    assert the("few_end", few, max_gen_len=2**19 + 2**18).remedy == "--max_gen_len 1048576"
    flat = [{"reward/score": 1 + 0.1 * (n % 2)} for n in range(20)]
    assert the("score_is_flat", flat).remedy == f"{COMPARE}; --batch_size 256"
    assert the("score_is_flat", flat, batch_size=2**20).remedy == COMPARE
    repeated = [{}, *[{"rollout/repetition": 0.5}] * 3]
    assert (
        the("repetition", repeated, repetition_penalty=1e6, kl_coef=2.0).remedy == "--learning_rate 0.00017"
    )
