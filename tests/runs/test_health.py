"""Findings: symptom, numbers, causes and remedy of what is unusual in a run, and none in a healthy run."""

import json
import time

import pytest
from tiny import ROOT, flags, health_of, read_jsonl, run_files, save_reward_dir, word_tokenizer

from errors import run_script
from trainer import train_ppo
from trainer.about_run import turns_of
from trainer.runs.health import (
    RULES,
    TABLE,
    WINDOW,
    Health,
    Past,
    one_line,
    spread_of_steps,
)
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
    "reward/format": 0.5,
    "rollout/equal_groups": 0.1,
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
    "update_old_actor_freq": 1,
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
FACTS = {
    "prompts": 5888,
    "dropped_share": 0.0,
    "held_out": 500,
    "missing_header": "",
    "template_without_eos": False,
    "fewer_ids": None,
    "without_template": "",
    "suited": {"learning_rate": 5e-4, "critic_learning_rate": 5e-4},
}


def steps_of(*changes):
    """Changes of the usual step -> the lines of metrics.jsonl of a run."""
    return [{"step": n + 1, **USUAL, **change} for n, change in enumerate(changes)]


def findings(records, config):
    return health_of(records, config).sorted


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
    ("rollout/sampler_gap", 0.021, 0.019, 1, "sampler_apart", "look"),
    ("rollout/sampler_gap", 0.11, None, 1, "sampler_apart", "wrong"),
    ("rollout/importance_weight", 2.1, 1.9, 1, "sampler_apart", "wrong"),
    ("rollout/importance_ess", 0.29, 0.31, 1, "sampler_apart", "wrong"),
    ("policy/skipped_steps", 0.25, 0.0, 3, "updates_skipped", "wrong"),
    ("policy/early_stop", 0.5, 0.4, 3, "early_stop_starves", "look"),
    ("value/explained_variance", -0.11, -0.09, 5, "critic_useless", "look"),
    ("value/explained_variance", -2.1, None, 5, "critic_useless", "wrong"),
    ("value/clip_fraction", 0.21, 0.19, 3, "critic_is_held", "look"),
    ("policy/advantage_std", 0.04, 0.06, 3, "advantages_gone", "look"),
    ("rollout/finished", 0.79, 0.81, 3, "forgets_to_stop", "look"),
    ("rollout/finished", 0.4, None, 3, "forgets_to_stop", "wrong"),
    ("rollout/length", 1.4, 1.6, 1, "empty_answers", "wrong"),
    ("rollout/repetition", 0.21, 0.19, 3, "repetition", "look"),
    ("rollout/repetition", 0.65, None, 3, "repetition", "wrong"),
    ("reward/at_limit", 0.21, 0.19, 3, "scores_at_limit", "look"),
    ("reward/format", 0.009, 0.011, 3, "format_unknown", "look"),
    ("reward/score_std", 101.0, 99.0, 2, "kl_weighs_nothing", "look"),
    ("rollout/equal_groups", 0.81, 0.79, 5, "groups_alike", "look"),
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
    assert found_in([none] * 3)["advantages_gone"] == ("look", 1)
    assert "advantages_gone" in found_in([{}, {}, *[none] * 3])
    assert "advantages_gone" not in found_in([none] * 2)
    assert "advantages_gone" not in found_in([none, none, {}])  # the third batch has some


def test_since_when_is_the_first_step_of_those_that_show_it():
    assert found_in([{}, {}, *[{"kl/sequence": 11.0, "kl/k1": 0.2}] * 3])["kl_far"] == ("look", 3)
    assert found_in([{}, {}, {"policy/ratio": 3.0}])["ratio_drastic"] == ("wrong", 3)
    assert found_in([{}, {"policy/clip_fraction": 0.49}, {}]) == {}


def test_missing_and_infinite_numbers_are_silent():
    nothing = dict.fromkeys(USUAL)
    assert found_in([nothing] * 30) == {}
    assert found_in([{name: float("nan") for name in USUAL}] * 30) == {}
    assert findings([{"step": 0, "eval/score": 1.0}, {"step": 1, "train/loss": 3.0}], {}) == []
    for rule in RULES:
        assert not Past({}).holds([*rule.look, *rule.wrong]), rule.name


def test_long_answers_may_be_further_from_the_start():
    """More than 10 nats a response and more than 0.1 nats a token."""
    assert found_in([{"kl/sequence": 20.0, "kl/k1": 0.09}] * 5) == {}
    assert found_in([{"kl/sequence": 9.9, "kl/k1": 0.2}] * 5) == {}
    assert found_in([{"kl/sequence": 10.1, "kl/k1": 0.11}] * 2) == {}
    assert found_in([{}, *[{"kl/sequence": 10.1, "kl/k1": 0.11}] * 3]) == {"kl_far": ("look", 2)}


def test_a_ratio_of_the_first_minibatch_is_judged_by_precision_and_by_the_old_actor():
    one = [{"policy/first_ratio": 1.01}]
    assert found_in(one, dtype="bfloat16") == {}
    assert found_in(one, update_old_actor_freq=4) == {}
    assert "first_ratio" in found_in(one)


def test_steps_that_are_too_large_over_several_batches_of_one_old_actor():
    steps = steps_of(*[{"policy/approx_kl": 0.1}] * 3)
    (found,) = findings(steps, {**FLAGS, "facts": FACTS, "update_old_actor_freq": 4})
    assert found.causes[-1] == "a large --update_old_actor_freq"
    assert found.remedy == "--learning_rate 0.000166667 --ppo_epochs 1 --update_old_actor_freq 1"


def test_a_narrow_clip_comes_before_the_large_steps_that_it_seems_to_show():
    unusual, large = findings(
        steps_of(*[{"policy/clip_fraction": 0.9}] * 5), {**FLAGS, "facts": FACTS, "clip_epsilon": 0.001}
    )
    assert (unusual.name, unusual.step, unusual.remedy) == ("unusual_flags", 0, "--clip_epsilon 0.2")
    assert (large.name, large.level) == ("steps_too_large", "look")


def test_no_response_ends():
    none = {"rollout/finished": 0.0}
    assert found_in([none] * 3) == {"few_end": ("wrong", 1)}
    assert found_in([none] * 2) == {}
    assert found_in([{"rollout/finished": 0.021}] * 3) == {"few_end": ("look", 1)}
    assert found_in([{}, {}, {}, *[none] * 3]).keys() == {"forgets_to_stop"}
    without = {**FACTS, "template_without_eos": True}
    template, none_ends = findings(steps_of(*[none] * 3), {**FLAGS, "facts": without})
    assert (template.name, template.level) == ("template_without_eos", "look")  # the cause comes first
    assert (none_ends.name, none_ends.level) == ("few_end", "wrong")
    assert none_ends.remedy.startswith("--max_gen_len 256; where hardly a response ends, ")
    assert none_ends.numbers == "rollout/finished 0.000 in the first steps, --max_gen_len 64"


def test_a_few_responses_do_not_say_how_many_end():
    """Four of a step: of chance alone, steps without an end follow steps with some."""
    none, half = {"rollout/finished": 0.0}, {"rollout/finished": 0.5}
    few = {"batch_size": 4, "processes": 2, "max_gen_len": 64}
    assert found_in([none] * 7, **few).keys() == {"small_batch"}
    assert found_in([none] * 8, **few)["few_end"] == ("wrong", 1)
    one_ends = [none] * 4 + [{"rollout/finished": 1 / 64}] + [none] * 3
    assert found_in(one_ends, batch_size=64)["few_end"] == ("wrong", 1)
    seldom = [none, none, {"rollout/finished": 1 / 4}, none]
    assert found_in(seldom, batch_size=16)["few_end"] == ("look", 1)
    by_chance = [{}, none, {}, {}, half, {}, {}, none, {}, half, half, {}]
    assert found_in(by_chance, **few).keys() == {"small_batch", "few_end"}
    assert found_in([{}, none, {}, {}, half, {}, {}, {}], **few).keys() == {"small_batch"}
    assert found_in([half] * 7, **few).keys() == {"small_batch"}
    assert found_in([half] * 8, **few)["few_end"] == ("look", 1)
    assert found_in([{}] * 8 + [{"rollout/finished": 0.4}] * 3, **few)["forgets_to_stop"] == ("wrong", 9)


def test_where_a_cut_answer_costs_nothing_only_a_fall_of_the_ends_is_unusual():
    free = {"missing_eos_penalty": 0.0}
    none, some = {"rollout/finished": 0.0}, {"rollout/finished": 0.4}
    assert found_in([none] * 3, **free) == {}
    assert found_in([some] * 8, **free) == {}
    assert found_in([some] * 8) == {"few_end": ("look", 1)}
    assert found_in([{}] * 3 + [some] * 3, **free) == {"forgets_to_stop": ("wrong", 4)}
    assert found_in([{}] * 3 + [some] * 3) == {"forgets_to_stop": ("wrong", 4)}
    rare = [{"rollout/finished": 0.19}, *[{"rollout/finished": 0.05}] * 3]  # it cannot fall far
    assert found_in(rare, **free) == {}


def test_few_prompts_are_told_how_often_each_is_seen():
    """10 prompts, 46 steps of 128 responses."""
    (found,) = start_of(prompts=10).values()
    assert found.numbers == "10 prompts or logged answers, 589 samples or passes of each"


def test_one_word_answers_are_alike_and_that_is_a_finding_where_the_run_does_not_help():
    alike = run_of(30, {"rollout/distinct": 0.15})
    assert "answers_alike" in found_in(evaluated(alike, 0.60, 0.61, 0.62))
    assert "answers_alike" not in found_in(evaluated(run_of(30, {"rollout/distinct": 0.15}), 0.60, 0.90))
    assert "answers_alike" not in found_in(run_of(30, {"rollout/distinct": 0.15}))  # the score rises
    some = run_of(30, {"rollout/distinct": 0.25})  # four answers to a prompt may be alike
    assert "answers_alike" not in found_in(evaluated(some, 0.60, 0.61))


def test_all_scores_are_equal_from_the_start():
    same = {"reward/score_std": 0.0}
    assert found_in([same] * 3) == {"scores_alike": ("look", 1)}  # 384 responses of a hard task
    assert found_in([same] * 4) == {"scores_alike": ("wrong", 1)}
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


def test_length_that_changes_as_the_score_pays_for_it_is_a_finding_where_nothing_independent_gets_better():
    longer = {"rollout/length": 42.0, "rollout/score_length_corr": 0.55}
    shorter = {"rollout/length": 15.0, "rollout/score_length_corr": -0.55}
    for change in (longer, shorter):
        assert found_in(run_of(16, change)).keys() == {"length_is_gamed"}
        assert "length_is_gamed" in found_in(evaluated(run_of(16, change), 0.6, 0.6))
        assert "length_is_gamed" not in found_in(evaluated(run_of(16, change), 0.6, 0.9, 0.9))
        assert "length_is_gamed" in found_in(evaluated(run_of(20, change), 0.6, 0.9, 0.6))  # for a while
        assert "length_is_gamed" in found_in(evaluated(run_of(16, change), 0.6, 0.9, name="eval/score"))
        assert found_in(run_of(16, change | {"rollout/score_length_corr": 0.45})) == {}
        turned = {"rollout/score_length_corr": -change["rollout/score_length_corr"]}
        assert found_in(run_of(16, change | turned)) == {}
    assert found_in(run_of(16, longer | {"rollout/length": 36.0})) == {}
    assert found_in(run_of(16, shorter | {"rollout/length": 20.0})) == {}


def test_a_held_out_fall_is_told_from_chance_and_named_by_what_the_score_does():
    """Two standard errors of a difference of shares of 500 near 0.9: 2 sqrt(2) 0.3 / sqrt(500) = 0.038."""
    assert found_in(evaluated(run_of(16, {}), 0.6, 0.9, 0.85))["held_out_falls"] == ("look", 16)
    assert "held_out_falls" not in found_in(evaluated(run_of(16, {}), 0.6, 0.9, 0.87))
    assert found_in(evaluated(run_of(16, {}), 0.9, 0.85))["held_out_falls"] == ("look", 16)
    worse = evaluated(run_of(16, {}), 0.9, 0.6)
    assert found_in(worse)["held_out_falls"] == ("wrong", 16)
    rising = evaluated(run_of(20, {}), 0.9, 0.6)  # the score of the steps rises
    symptom = "eval/accuracy falls while the score rises: the reward is exploited"
    assert the("held_out_falls", rising).symptom == symptom
    assert the("held_out_falls", worse).symptom == "eval/accuracy falls"  # after 16 steps nobody can tell
    flat = evaluated([{} for _ in range(20)], 0.9, 0.6)
    assert the("held_out_falls", flat).symptom == "eval/accuracy falls"
    of_score = evaluated(run_of(20, {}), 3.0, 1.0, name="eval/score")
    assert the("held_out_falls", of_score).symptom == "eval/score falls"
    assert the("held_out_falls", worse).numbers == (
        "eval/accuracy 0.600, at the start 0.900, at the best 0.900"
    )
    assert (
        found_in(evaluated(run_of(16, {}), 3.0, 4.0, 3.0, name="eval/score"))["held_out_falls"][0] == "look"
    )
    # The mean of 128 scores varies by 0.0886, one of them by 1: 2 sqrt(2) / sqrt(500) = 0.127.
    assert found_in(evaluated(run_of(16, {}), 3.0, 4.0, 3.87, name="eval/score"))["held_out_falls"]
    assert "held_out_falls" not in found_in(evaluated(run_of(16, {}), 3.0, 4.0, 3.88, name="eval/score"))
    centred = evaluated(run_of(16, {}), 0.02, 0.03, -0.1, name="eval/judge")  # near 0, as reward models are
    assert "held_out_falls" not in found_in(evaluated(centred, 1.2, 1.2, 1.2, name="eval/judge_std"))
    assert found_in(evaluated(centred, 0.3, 0.3, 0.3, name="eval/judge_std"))["held_out_falls"][0] == "wrong"


def test_entropy_that_falls_or_rises_while_nothing_gets_better():
    low, high = {"policy/entropy": 0.009}, {"policy/entropy": 0.5}
    assert "entropy_collapses" in found_in(evaluated(run_of(16, low), 0.6, 0.6))
    assert "entropy_collapses" not in found_in(evaluated(run_of(16, low), 0.6, 0.9))
    assert "entropy_collapses" not in found_in(evaluated(run_of(16, {"policy/entropy": 0.011}), 0.6, 0.6))
    assert "entropy_rises" in found_in(evaluated(run_of(16, high), 0.6, 0.6))
    assert "entropy_rises" not in found_in(evaluated(run_of(16, high), 0.6, 0.9))
    assert "entropy_rises" not in found_in(evaluated(run_of(16, {"policy/entropy": 0.3}), 0.6, 0.6))


def test_a_score_that_falls_below_its_start():
    """The spread of steps is 0.1 sqrt(pi) / 2 = 0.0886, and one standard error of the difference of a mean
    of four and one of ten sqrt(1 / 4 + 1 / 10) times that: 0.0524. Four of them are 0.21."""
    start = [{"reward/score": 1.0 + 0.1 * (n % 2)} for n in range(WINDOW)]
    far, near = ([{"reward/score": 1.05 - fall}] * WINDOW for fall in (0.212, 0.208))
    assert found_in([*start, *far]) == {"score_does_not_rise": ("wrong", 2 * WINDOW)}
    assert found_in([*start, *far[:-1]]) == {}  # not yet for long
    assert found_in([*start, *near]) == {"score_does_not_rise": ("look", 2 * WINDOW)}
    raw = {"reward/score_raw": 5.0}  # --normalize_reward: only the raw score can be compared
    assert found_in([m | raw for m in (*start, *far)]) == {"score_does_not_rise": ("look", 2 * WINDOW)}
    assert found_in(evaluated([*start, *[dict(x) for x in far]], 0.6, 0.9)) == {}


def test_a_policy_that_does_not_move_or_moves_for_nothing():
    still = {"kl/sequence": 0.01}

    def flat(count, change):
        return [{"reward/score": 1 + 0.1 * (n % 2), **change} for n in range(count)]

    assert found_in(flat(20, still)) == {"policy_is_stuck": ("look", 11)}
    assert found_in(flat(19, still)) == {}  # nobody can tell
    assert found_in(evaluated(run_of(12, still, still), 0.6, 0.6))["policy_is_stuck"] == ("look", 3)
    assert "policy_is_stuck" not in found_in(evaluated(run_of(12, still, still), 0.6, 0.9))
    assert "policy_is_stuck" not in found_in(run_of(20, still, still))  # the score rises
    for kl in (0.04, -0.04):
        assert "policy_is_stuck" not in found_in(flat(20, {"kl/sequence": kl}))
    waits = [{**x, "policy/grad_norm": None} for x in flat(11, still)] + flat(9, still)
    assert found_in(waits) == {}  # only the critic has trained
    assert found_in(flat(20, {**still, "reward/score_std": 0.0})).keys() == {"scores_alike"}
    for kl, there in ((0.11, True), (0.09, False)):
        assert ("score_does_not_rise" in found_in(flat(20, {"kl/sequence": kl}))) is there
    assert found_in(flat(20, {})) == {"score_does_not_rise": ("look", 20)}
    assert found_in([{"reward/score": 1 + 0.1 * (n % 2) + 0.2 * (n >= 10)} for n in range(20)]) == {}


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
        ({"template_without_eos": True}, "template_without_eos", "look", "eos_token"),
        ({"fewer_ids": [300, 400]}, "other_tokenizer", "look", "--tokenizer"),
        ({"without_template": "model, other"}, "judge_without_template", "look", "chat template"),
        ({"dropped_share": 0.21}, "records_dropped", "look", "--max_seq_len 1024"),
        ({"dropped_share": 0.91}, "records_dropped", "wrong", "--max_seq_len 1024"),
        ({"kl_coef": 0.0}, "nothing_holds_the_policy", "look", "--kl_coef 0.02"),
        ({"temperature": 0.1}, "unusual_flags", "look", "--temperature 1"),
        ({"learning_rate": 0.011}, "unusual_flags", "look", "--learning_rate 0.0005"),
        ({"learning_rate": 1e-5}, "unusual_flags", "look", "--learning_rate 0.0005"),
        ({"critic_learning_rate": 1e-7}, "unusual_flags", "look", "--critic_learning_rate 0.0005"),
        ({"cliprange_value": 0.001}, "unusual_flags", "look", "--cliprange_value 0.5"),
        ({"prompts": 190}, "few_prompts", "look", "more data"),
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
        args = {**FLAGS, "offline_data_path": "x", "facts": {**FACTS, "held_out": 200}}
        values = {0: before, 4: best, 8: after}
        more = {n: {"eval/chosen_share": x, "eval/chosen_share_std": 0.1, **also} for n, x in values.items()}
        lines = [{"step": n, "policy/loss": 0.0, **more.get(n, {})} for n in range(9)]
        return {f.name: f for f in findings(lines, args)}.get("held_out_falls")

    assert found(0.5, 0.6, 0.581) is None
    seen = found(0.5, 0.6, 0.579)
    assert (seen.level, seen.step, seen.symptom) == ("look", 8, "eval/chosen_share falls")
    assert found(0.5, 0.5, 0.459).level == "wrong"  # also where it has never been above its start
    changes = {"eval/chosen_share_change_std": 0.02}  # pair by pair: 2 * 0.02 / sqrt(200) = 0.0028
    assert found(0.5, 0.6, 0.598, **changes) is None
    assert found(0.5, 0.6, 0.597, **changes).level == "look"


def test_flags_and_facts_that_are_usual():
    usual = {
        "dropped_share": 0.19,
        "prompts": 200,
        "batch_size": 16,
        "learning_rate": 0.009,
    }
    for name, value in usual.items():
        assert start_of(**{name: value}) == {}, name
    assert start_of(kl_coef=0.0, reward_model=[]) == {}  # a reward that cannot be deceived
    assert start_of(cliprange_value=0.0) == {}  # switched off


def test_stages_1_and_2_have_no_findings():
    record = {"train/loss": 9.0, "train/grad_norm": 1e6, "eval/accuracy": 0.1}
    steps = [{"step": n, **record} for n in range(30)]
    assert findings(steps, {"script": "train_sft.py", "batch_size": 1, "learning_rate": 1.0}) == []
    falls = [{"step": n, "eval/accuracy": 0.9 - 0.2 * (n > 20)} for n in range(30)]
    assert findings(falls, {"script": "train_reward.py"}) == []


# ------------------------------------------------------------------------------------------- facts of a start


def template_tokenizer(template):
    tokenizer = word_tokenizer(["user", "assistant", "is", "<think>", "</think>", "Seven.", "a"])
    tokenizer.chat_template = template
    return tokenizer


def test_the_template_is_asked_for_the_header_and_the_eos():
    header = "{% if add_generation_prompt %}assistant {% endif %}"
    turns = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    assert turns_of(template_tokenizer(turns + header), [0]) == ("", True)
    assert turns_of(template_tokenizer(turns), [0]) == ("assistant", True)
    assert turns_of(template_tokenizer(turns + header), [5]) == ("", False)
    assert turns_of(template_tokenizer(turns.replace("</s>", "") + header), [0]) == ("", False)
    thought = turns.replace(
        "m['content']", "('<think> </think> ' if m['role'] == 'assistant' else '') + m['content']"
    )
    assert turns_of(template_tokenizer(thought + header), [0]) == ("", True)
    assert turns_of(template_tokenizer(None), [0]) == ("", True)


def test_a_run_keeps_its_facts_and_says_a_finding_once_also_when_resumed(tmp_path, capsys):
    files = run_files(tmp_path, count=24)
    files["reward_model"] = save_reward_dir(tmp_path / "plain", word_tokenizer(list("abcdefgh")))
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
    assert facts["dropped_share"] == pytest.approx(1 - facts["prompts"] / 24)
    assert facts["dropped_share"] > 0
    assert facts["without_template"] == "model"
    assert facts["suited"]["learning_rate"] == 5e-4
    assert facts["dtype"] in ("float32", "bfloat16")  # what the CPU is good at
    plain = "health: look, since step 0: a reward model has no chat template"
    assert said.count(plain) == 1
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert "**judge_without_template** (look, since step 0)" in summary
    metrics = folder / "metrics.jsonl"
    kept = metrics.read_text(encoding="utf-8")
    for late in ("step_2", "step_3"):
        for file in sorted((folder / "checkpoints" / late).rglob("*")):
            file.unlink()
        (folder / "checkpoints" / late).rmdir() if (folder / "checkpoints" / late).exists() else None
    train_ppo.main([*argv, "--resume", str(folder)])
    assert plain not in capsys.readouterr().out
    assert len(metrics.read_text(encoding="utf-8").splitlines()) == len(kept.splitlines())


def test_another_pipe_that_breaks_is_a_fault(capsys):
    def main():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_script(main)


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
    assert one_line(found[0]).startswith("wrong, since step 5: the updates of one batch")


BOTH = "--cliprange_value 0.5 --critic_learning_rate 0.000166667"


@pytest.mark.parametrize(
    ("metric", "value", "name", "args", "remedy"),
    [
        ("policy/ratio", 3.0, "ratio_drastic", {"ppo_epochs": 1}, "--learning_rate 0.000166667"),
        (
            "policy/approx_kl",
            0.1,
            "steps_too_large",
            {"ppo_epochs": 1},
            "--learning_rate 0.000166667",
        ),
        (
            "policy/approx_kl",
            0.1,
            "steps_too_large",
            {},
            "--learning_rate 0.000166667 --ppo_epochs 1",
        ),
        (
            "rollout/repetition",
            0.5,
            "repetition",
            {"repetition_penalty": 1.0},
            "--repetition_penalty 2 --kl_coef 0.06",
        ),
        (
            "rollout/length",
            1.0,
            "empty_answers",
            {"missing_eos_penalty": 0.0},
            "--kl_coef 0.06, or a reward that gives less to an empty answer",
        ),
        ("value/clip_fraction", 0.5, "critic_is_held", {}, "--critic_learning_rate 0.000166667"),
        ("value/clip_fraction", 0.5, "critic_is_held", {"cliprange_value": 0.1}, BOTH),
        (
            "value/explained_variance",
            -1.0,
            "critic_useless",
            {"lam": 1.0},
            "--critic_learning_rate 0.000166667, or a longer --critic_warmup_steps",
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
    stays = findings(steps_of({"kl/k1": 1.5}, {"kl/k1": 1.6}), {})
    assert stays[0].numbers.startswith("kl/k1 1.50 ")  # of the step that was said


def test_what_was_unusual_before_the_first_step_comes_first_and_its_value_is_that_of_all_remedies():
    """A rate of 0.05 is a hundred times what suits the model; a third of it would still break the run."""
    rate = {**FLAGS, "facts": FACTS, "learning_rate": 0.05}
    health = Health(rate)
    said = [health.add(record) for record in steps_of({}, {"policy/ratio": 3.0})]
    assert [[(f.name, f.level) for f in found] for found in said] == [
        [("unusual_flags", "look")],
        [("ratio_drastic", "wrong")],
    ]
    unusual, drastic = health.sorted
    assert unusual.remedy == "--learning_rate 0.0005"
    assert drastic.remedy == "--learning_rate 0.0005 --ppo_epochs 1"


def test_the_limit_of_the_first_ratio_is_that_of_the_type_in_which_the_run_computed():
    steps = steps_of({"policy/first_ratio": 1.01})
    for dtype, count in (("float32", 1), ("bfloat16", 0)):
        found = findings(steps, {**FLAGS, "dtype": "auto", "facts": {**FACTS, "dtype": dtype}})
        assert [f.name for f in found].count("first_ratio") == count


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


def the(name, changes, facts=FACTS, **args):
    """The finding of this name of a run whose steps are the usual one with these changes."""
    found = findings(steps_of(*changes), {"facts": facts, **FLAGS, **args})
    return next(f for f in found if f.name == name)


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        (0.05, "--learning_rate 0.000166667"),
        (0.02, "--learning_rate 0.000166667"),
        (1e-6, "--target_kl 0.02 --learning_rate 0.000166667"),
    ],
)
def test_an_early_stop_is_the_rates_fault_where_the_target_is_not_small(target, remedy):
    assert the("early_stop_starves", [{"policy/early_stop": 1.0}] * 3, target_kl=target).remedy == remedy


def test_a_rate_goes_to_the_one_that_suits_the_model_or_beyond():
    still = evaluated(run_of(12, {"kl/sequence": 0.01}, {"kl/sequence": 0.01}), 0.6, 0.6)
    for rate, value in ((1e-4, "0.0005"), (5e-4, "0.0015")):
        remedy = the("policy_is_stuck", still, learning_rate=rate).remedy
        assert remedy == f"--learning_rate {value}, or a smaller --kl_coef"
    drastic = [{"policy/ratio": 5.0}]
    unknown = {**FACTS, "suited": {}}  # of an older version
    for rate, facts, value in ((6e-3, FACTS, "0.0005"), (9e-4, FACTS, "0.0003"), (6e-3, unknown, "0.002")):
        found = the("ratio_drastic", drastic, facts, learning_rate=rate, ppo_epochs=1)
        assert found.remedy == f"--learning_rate {value}"


def test_what_is_not_known_is_left_out():
    """A run of an older version, without flags and with few metrics."""
    (found,) = findings([{"step": 1, "policy/approx_kl": 0.6}], {})
    assert found.numbers == "policy/approx_kl 0.600 (usual: below 0.05)"
    found = [findings([{"step": 1, name: 9.0}], {})[0].remedy for name in ("policy/ratio", "kl/k1")]
    assert found == ["--ppo_epochs 1", "--kl_coef 0.02"]
    held = [{"step": n, "value/clip_fraction": 0.5} for n in range(3)]
    (found,) = findings(held, {"cliprange_value": 0.5})
    assert found.remedy == "see docs/health.md"


def test_what_is_usual_is_what_the_flags_take():
    known = train_ppo.flag_parser().flags
    for name, (least, most, usual) in TABLE["usual"].items():
        for value in (least, most, usual):
            if value:
                assert not known[name].problem(value), name
        assert least <= usual <= most
    far = [{"kl/k1": 2.0}]
    assert the("kl_far", far, kl_coef=1.0).remedy == "--learning_rate 0.000166667 --kl_coef 3"
    assert the("kl_far", far, kl_coef=0.0).remedy == "--learning_rate 0.000166667 --kl_coef 0.02"
    flat = [{"reward/score": 1 + 0.1 * (n % 2)} for n in range(20)]
    assert the("score_does_not_rise", flat).remedy.endswith("mend the reward, if not, --batch_size 256")


def test_each_row_has_conditions():
    assert [rule.name for rule in RULES if not (rule.look or rule.wrong)] == []
