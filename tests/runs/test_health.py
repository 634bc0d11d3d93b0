"""Findings: symptom, numbers, causes and remedy of what is unusual in a run, and none in a healthy run."""

import json
import shutil

import pytest
import torch
from tiny import ROOT, flags, health_of, read_jsonl, run_files, save_reward_dir, word_tokenizer

from trainer import train_ppo
from trainer.run import turns_of
from trainer.runs.health import RULES, TABLE, WINDOW, Health, History, one_line, spread_of_steps

DEMO = read_jsonl(ROOT / "tests" / "fixtures" / "demo_metrics.jsonl")  # python trainer/train_ppo.py, seed 42
# A step as the demo's, a little rounded.
USUAL = {"kl/k1": 0.03, "kl/sequence": 0.8, "rollout/finished": 1, "rollout/length": 28}
USUAL |= {"rollout/sampler_gap": 0.0002, "rollout/importance_weight": 1, "rollout/importance_ess": 1}
USUAL |= {"rollout/repetition": 0.05, "rollout/distinct": 0.98, "rollout/score_length_corr": 0.1}
USUAL |= {"rollout/turns": 2, "rollout/calls": 1, "rollout/failed_calls": 0, "rollout/hung": 0}
USUAL |= {"rollout/observation_tokens": 9, "rollout/no_room": 0}
USUAL |= {"rollout/equal_groups": 0.1, "reward/score": 1, "reward/score_std": 1, "reward/at_limit": 0}
USUAL |= {"reward/format": 0.5, "policy/loss": 0, "policy/approx_kl": 0.002, "policy/clip_fraction": 0.01}
USUAL |= {"policy/ratio": 1, "policy/first_ratio": 1, "policy/entropy": 0.1, "policy/advantage_std": 1}
USUAL |= {"policy/grad_norm": 0.5, "policy/early_stop": 0, "policy/skipped_steps": 0}
USUAL |= {"value/explained_variance": 0.1, "value/clip_fraction": 0.01}
FLAGS = {"learning_rate": 0.0005, "critic_learning_rate": 0.0005, "kl_coef": 0.02, "ppo_epochs": 4}
FLAGS |= {"update_old_actor_freq": 1, "clip_epsilon": 0.2, "cliprange_value": 0.5}
FLAGS |= {"missing_eos_penalty": 1, "target_kl": 0, "lam": 0.95, "grad_clip": 1}
FLAGS |= {"script": "train_ppo.py", "batch_size": 128, "processes": 1, "dtype": "float32", "total_steps": 46}
FLAGS |= {"reward_model": ["JUDGE"], "max_gen_len": 64, "max_seq_len": 256}
FACTS = {"prompts": 5888, "dropped_share": 0.0, "held_out": 500, "missing_header": "", "fewer_ids": None}
FACTS |= {"template_without_eos": False, "without_template": ""}
FACTS |= {"suited": {"learning_rate": 5e-4, "critic_learning_rate": 5e-4}}


def steps_of(changes):
    """Changes of the usual step -> the lines of metrics.jsonl of a run."""
    return [{"step": n + 1, **USUAL, **change} for n, change in enumerate(changes)]


def findings(changes, facts=FACTS, **args):
    """{name: finding} of a run whose steps are the usual one with these changes."""
    health = health_of(steps_of(changes), {"facts": facts, **FLAGS, **args})
    return {f.name: f for f in health.sorted}


def found_in(changes, facts=FACTS, **args):
    return {name: (f.level, f.step) for name, f in findings(changes, facts, **args).items()}


def run_of(count, late, early=None, turn=12):
    """``turn`` steps with the change ``early``, the rest of ``count`` with ``late``. The score rises."""
    steps = [(early or {}) if n < turn else late for n in range(count)]
    return [{"reward/score": 1 + 0.03 * n + 0.1 * (n % 2), **change} for n, change in enumerate(steps)]


def flat(count, change=()):
    return [{"reward/score": 1 + 0.1 * (n % 2), **dict(change)} for n in range(count)]


def evaluated(changes, *values, name="eval/accuracy"):
    """Changes of steps -> the same with evaluations, evenly spread from the first to the last step."""
    changes = [dict(change) for change in changes]
    for n, value in enumerate(values):
        changes[n * (len(changes) - 1) // (len(values) - 1)][name] = value
    return changes


def test_a_healthy_run_has_no_finding_and_neither_have_stages_1_and_2_and_what_is_missing_is_silent():
    assert len(DEMO) == 47
    falls = [{"step": n, "train/loss": 9.0, "eval/accuracy": 0.9 - 0.2 * (n > 20)} for n in range(30)]
    for script in ("train_sft.py", "train_reward.py"):
        assert health_of(falls, {"script": script, "batch_size": 1, "learning_rate": 1.0}).sorted == []
    little = [{"step": 0, "eval/score": 1.0}, {"step": 1, "train/loss": 3.0}]
    for records in (DEMO, [], [{"step": 0}], little):
        assert health_of(records).sorted == []
    nothing = [[dict.fromkeys(USUAL, x)] * 30 for x in (None, float("nan"))]
    for changes in ([{}] * 8, run_of(40, {}), *nothing):
        assert found_in(changes) == {}
    for rule in RULES:
        assert rule.look or rule.wrong
        assert not History({}).shown_by([*rule.look, *rule.wrong]), rule.name


# What a step shows, how many such steps it takes, and the finding. The next smaller number is no finding.
ONE_NUMBER = """
    kl/k1                     1.1    0.99    1  kl_far              look
    kl/k1                     3.1    -       1  kl_far              wrong
    kl/sequence               -1.1   -0.9    3  kl_negative         wrong
    policy/first_ratio        1.002  1.0005  1  first_ratio         wrong
    policy/first_ratio        0.998  0.9995  1  first_ratio         wrong
    policy/ratio              2.1    1.9     1  ratio_drastic       wrong
    policy/ratio              0.09   0.11    1  ratio_drastic       wrong
    policy/approx_kl          0.051  0.049   3  steps_too_large     look
    policy/approx_kl          0.51   -       1  steps_too_large     wrong
    policy/clip_fraction      0.41   0.39    3  steps_too_large     look
    rollout/sampler_gap       0.021  0.019   1  sampler_apart       look
    rollout/sampler_gap       0.11   -       1  sampler_apart       wrong
    rollout/importance_weight 2.1    1.9     1  sampler_apart       wrong
    rollout/importance_weight 0.49   0.51    1  sampler_apart       wrong
    rollout/importance_ess    0.29   -       1  sampler_apart       wrong
    rollout/importance_ess    0.89   0.91    1  sampler_apart       look
    policy/skipped_steps      0.25   0       3  updates_skipped     wrong
    policy/early_stop         0.5    0.4     3  early_stop_starves  look
    value/explained_variance  -0.11  -0.09   5  critic_useless      look
    value/explained_variance  -2.1   -       5  critic_useless      wrong
    value/clip_fraction       0.21   0.19    3  critic_is_held      look
    policy/advantage_std      0.04   0.06    3  advantages_gone     look
    rollout/finished          0.79   0.81    3  forgets_to_stop     look
    rollout/finished          0.4    -       3  forgets_to_stop     wrong
    rollout/length            1.4    1.6     1  empty_answers       wrong
    rollout/repetition        0.21   0.19    3  repetition          look
    rollout/repetition        0.65   -       3  repetition          wrong
    reward/at_limit           0.21   0.19    3  scores_at_limit     look
    reward/unscored           1      0.98    1  nothing_scored      look
    reward/format             0.009  0.011   3  format_unknown      look
    reward/score_std          101    99      2  kl_weighs_nothing   look
    rollout/equal_groups      0.81   0.79    5  groups_alike        look
    rollout/calls             0.01   0.03    3  never_calls         look
    rollout/failed_calls      0.51   0.49    3  calls_fail          look
    rollout/failed_calls      0.96   -       3  calls_fail          wrong
    rollout/no_room           0.21   0.19    3  observations_fill   look
    rollout/hung              0.03   0.01    1  environment_hangs   look
    rollout/hung              0.31   -       1  environment_hangs   wrong
"""


@pytest.mark.parametrize("row", ONE_NUMBER.strip().splitlines(), ids=lambda row: " ".join(row.split()[:2]))
def test_a_number_beyond_its_limit_is_a_finding_and_one_before_it_is_none(row):
    metric, bad, good, steps, name, level = row.split()
    begin = [{}] * 4
    bad = {metric: float(bad)}
    steps = int(steps)
    found = found_in([*begin, *[bad] * steps])
    assert found[name][0] == level
    assert found[name][1] in (4 + 1, 4 + steps)  # a "wrong" one may take fewer steps than a "look"
    if steps > 1:
        assert name not in found_in([*begin, *[bad] * (steps - 1)])
        assert name not in found_in([*begin, *[bad] * (steps - 1), {}, bad])
    if good != "-":
        assert name not in found_in([*begin, *[{metric: float(good)}] * 12])


def kl(sequence, token, count=3):
    return [{"kl/sequence": sequence, "kl/k1": token}] * count


def ended(*shares):
    return [{"rollout/finished": share} for share in shares]


SAME = {"reward/score_std": 0.0}
FAR, NEAR = ([{"reward/score": 1.05 - fall}] * WINDOW for fall in (0.212, 0.208))  # see ``LIMITS``
RAW = [step | {"reward/score_raw": 5.0} for step in (*flat(WINDOW), *FAR)]
STUCK = {"kl/sequence": 0.01}
FEW = {"batch_size": 4, "processes": 2}
FREE = {"missing_eos_penalty": 0.0}
LONGER = {"rollout/score_length_corr": 0.7}
TURNS = {"max_turns": 4, "missing_eos_penalty": 0.0}  # of at most 64 tokens


def talked(turns, calls, observed=9.0, ended=1.0):
    step = {"rollout/turns": turns, "rollout/calls": calls, "rollout/observation_tokens": observed}
    return [step | {"rollout/finished": ended}] * 3


# changes of steps, changes of flags, and all that is found
CASES = [
    # the KL of long answers
    (kl(20.0, 0.09, 5), {}, {}),
    (kl(9.9, 0.2, 5), {}, {}),
    ([{}, *kl(10.1, 0.11)], {}, {"kl_far": ("look", 2)}),
    # the ratio of the first minibatch is judged by precision and by the old actor
    ([{"policy/first_ratio": 1.01}], {"dtype": "bfloat16"}, {}),
    ([{"policy/first_ratio": 1.06}], {"dtype": "bfloat16"}, {"first_ratio": ("wrong", 1)}),
    ([{"policy/first_ratio": 0.94}], {"dtype": "bfloat16"}, {"first_ratio": ("wrong", 1)}),
    ([{"policy/first_ratio": 1.5}], {"update_old_actor_freq": 4}, {}),
    # a real model in bf16 rounds to 0.04: SmolLM2-135M
    ([{"rollout/sampler_gap": 0.059}], {"dtype": "bfloat16"}, {}),
    ([{"rollout/sampler_gap": 0.061}], {"dtype": "bfloat16"}, {"sampler_apart": ("look", 1)}),
    # how many responses end
    (ended(0, 0, 0), {}, {"few_end": ("wrong", 1)}),
    (ended(0), {}, {"few_end": ("look", 1)}),
    (ended(0.021, 0.021, 0.021), {}, {"few_end": ("look", 1)}),
    (ended(0.71, 0.71, 0.71), {}, {}),
    (ended(1, 1, 1, 0, 0, 0), {}, {"forgets_to_stop": ("wrong", 4)}),
    # where a cut answer costs nothing, only a fall of the ends is unusual, and one of few ends is not far
    (ended(0, 0, 0), FREE, {}),
    (ended(1, 1, 1, 0.4, 0.4, 0.4), FREE, {"forgets_to_stop": ("wrong", 4)}),
    (ended(0.29, 0.29, 0.29, 0.05, 0.05, 0.05), FREE, {}),
    # eight responses of a step do not say how many end, unless none does
    (ended(*[0.4] * 7), FEW, {"small_batch": ("look", 0)}),
    (ended(0.1, *[0] * 6), FEW, {"small_batch": ("look", 0)}),
    (ended(*[0] * 7), FEW, {"small_batch": ("look", 0), "few_end": ("look", 1)}),
    (ended(0), FEW | {"batch_size": 3}, {"small_batch": ("look", 0)}),
    (ended(*[0] * 8), FEW, {"small_batch": ("look", 0), "few_end": ("wrong", 1)}),
    (ended(0, 0, 0), {"missing_eos_penalty": 0.0, "mask_truncated": 1}, {"few_end": ("wrong", 1)}),
    (ended(0.4, 0.4, 0.4), {"missing_eos_penalty": 0.0, "mask_truncated": 1}, {"few_end": ("look", 1)}),
    (ended(*[1] * 8, *[0.4] * 3), FEW, {"small_batch": ("look", 0), "forgets_to_stop": ("wrong", 9)}),
    # equal scores from the start: 384 responses, and 500
    ([SAME] * 3, {}, {"scores_alike": ("look", 1)}),
    ([SAME] * 4, {}, {"scores_alike": ("wrong", 1)}),
    ([SAME] * 6, {"batch_size": 48, "processes": 2}, {"scores_alike": ("wrong", 1)}),
    ([{}, {}, {}, *[SAME] * 5], {}, {}),
    ([SAME, SAME, {}, *[SAME] * 5], {}, {"scores_alike": ("look", 1)}),
    # the score of the untrained policy is its length
    ([LONGER] * 3, {}, {"score_follows_length": ("look", 1)}),
    ([{"rollout/score_length_corr": -0.7}] * 3, {}, {"score_follows_length": ("look", 1)}),
    ([{"rollout/score_length_corr": 0.5}] * 3, {}, {}),
    ([{}, {}, {}, *[LONGER] * 5], {}, {}),
    # repetition counts where it has grown
    ([{"rollout/repetition": x} for x in (0.15, 0.15, 0.26, 0.26, 0.26)], {}, {"repetition": ("look", 3)}),
    ([{"rollout/repetition": x} for x in (0.15, 0.15, 0.24, 0.24, 0.24)], {}, {}),
    # LIMITS: the spread of steps is 0.1 sqrt(pi) / 2 = 0.0886, one standard error of the difference of a mean
    # of four and one of ten sqrt(1 / 4 + 1 / 10) times that: 0.0524. Four of them are 0.21.
    ([*flat(WINDOW), *FAR], {}, {"score_does_not_rise": ("wrong", 2 * WINDOW)}),
    ([*flat(WINDOW), *FAR[1:]], {}, {}),  # not yet for long
    ([*flat(WINDOW), *NEAR], {}, {"score_does_not_rise": ("look", 2 * WINDOW)}),
    # --normalize_reward: only the raw score can be compared
    (RAW, {}, {"score_does_not_rise": ("look", 2 * WINDOW)}),
    (evaluated([*flat(WINDOW), *FAR], 0.6, 0.9), {}, {}),
    (flat(20, {"kl/sequence": 0.11}), {}, {"score_does_not_rise": ("look", 20)}),
    (flat(20, {"kl/sequence": 0.09}), {}, {}),
    ([{"reward/score": 1 + 0.1 * (n % 2) + 0.2 * (n >= 10)} for n in range(20)], {}, {}),
    # a policy that does not move, where that helps nothing
    (flat(20, STUCK), {}, {"policy_is_stuck": ("look", 11)}),
    (flat(19, STUCK), {}, {}),  # nobody can tell
    (flat(20, {"kl/sequence": 0.04}), {}, {}),
    (flat(20, {"kl/sequence": -0.04}), {}, {}),
    (run_of(20, STUCK, STUCK), {}, {}),  # the score rises
    (flat(20, STUCK | SAME), {}, {"scores_alike": ("wrong", 1)}),
    ([*flat(11, STUCK | {"policy/grad_norm": None}), *flat(9, STUCK)], {}, {}),
    # what environment and tools say takes more than half of --max_gen_len, and responses are cut
    (talked(2.0, 1.0, 32.1, ended=0.69), TURNS, {"observations_fill": ("look", 1)}),
    (talked(2.0, 1.0, 31.9, ended=0.69), TURNS, {}),
    (talked(2.0, 1.0, 60.0, ended=0.71), TURNS, {}),
    # nearly all responses have all turns, and the last one still calls; a text game has no calls
    ([{}, *talked(3.81, 3.44)], TURNS, {"turns_run_out": ("look", 2)}),
    (talked(3.79, 3.79), TURNS, {}),
    ([{}, *talked(4.0, 4.0)[1:]], TURNS, {}),
    (talked(4.0, 3.59), TURNS, {}),
    (talked(4.0, None), TURNS, {}),
    (talked(2.0, 1.0), TURNS | {"max_turns": 2}, {}),  # a call, and the answer
    (talked(1.0, 1.0), TURNS | {"max_turns": 1}, {"turns_run_out": ("look", 1)}),
    # a finding is since the first of the values that show it, also where not every step has the metric
    (
        [{"value/clip_fraction": x} for x in (0, 0.5, None, None, 0.5, 0.5)],
        {},
        {"critic_is_held": ("look", 2)},
    ),
]


@pytest.mark.parametrize(("changes", "args", "found"), CASES)
def test_what_steps_show_together_is_found(changes, args, found):
    assert found_in(changes, **args) == found


ANSWERS = FACTS | {"answers_go_to": "reward function"}
ZERO = SAME | {"reward/function": 0.0, "reward/score": 0.0, "policy/advantage_std": 0.0}
CUT = ZERO | {"rollout/finished": 0.0, "reward/score": -1.0}
HALF_CUT = ZERO | {
    "rollout/finished": 0.5,
    "reward/score": -0.5,
    "reward/score_std": 0.5,
}  # of a penalty of 1
PLAYED = {name: x for name, x in ZERO.items() if "function" not in name} | {"reward/environment": 0.0}
PAID = ZERO | {"reward/function": 0.7, "reward/score": 0.7}
BEST = {"reward/score_std": 0.0, "reward/score": 1.0, "reward/function": 1.0}
RISING = [{"reward/score": 0.25 * n, "reward/function": 0.25 * n} for n in range(4)]
SMALL = {"batch_size": 16}

# Scores that are all equal: the steps, the facts and flags, the accuracy of evaluations before and at the
# newest step, and the finding, level and step
EQUAL = [
    # none has ended: at once, and wrong after 64 responses
    ([CUT], ANSWERS, SMALL, (), ("all_cut", "look", 1)),
    ([CUT] * 4, ANSWERS, SMALL, (), ("all_cut", "wrong", 1)),
    ([CUT], ANSWERS, SMALL | FREE, (0.0,), ("all_cut", "look", 1)),
    ([CUT], ANSWERS, {"batch_size": 8}, (), ("all_cut", "look", 1)),
    # all wrong: by the reward's 0, or the held-out answers too, also where some pay the penalty
    ([ZERO], ANSWERS, SMALL, (), ("all_wrong", "look", 1)),
    ([ZERO], ANSWERS, SMALL, (0.0,), ("all_wrong", "look", 1)),
    ([ZERO] * 5, ANSWERS, {}, (0.0, 0.0), ("all_wrong", "wrong", 1)),
    ([HALF_CUT], ANSWERS, SMALL, (0.0,), ("all_wrong", "look", 1)),
    ([HALF_CUT | {"reward/score_std": 0.6}] * 3, ANSWERS, SMALL, (0.0,), None),
    ([PLAYED], ANSWERS, SMALL, (), ("all_wrong", "look", 1)),
    ([PLAYED | {"rollout/finished": 0.0}], ANSWERS, SMALL, (), ("all_cut", "look", 1)),
    ([ZERO] * 2, ANSWERS, {"batch_size": 8}, (0.0,), ("all_wrong", "look", 1)),
    ([ZERO], ANSWERS, {"batch_size": 8}, (0.0,), None),  # too few
    # 16 wrong ones are chance where a twentieth of the answers is right (0.95^16 = 0.44), 144 are not: 0.0006
    ([ZERO], ANSWERS, SMALL, (0.05,), None),
    ([ZERO] * 9, ANSWERS, SMALL, (0.05,), ("scores_alike", "look", 1)),
    # a constant: where nothing is right or wrong, where the reward pays for wrong ones, where half are right
    ([ZERO], FACTS, SMALL, (), ("scores_alike", "look", 1)),
    ([PAID], ANSWERS, SMALL, (), ("scores_alike", "look", 1)),
    ([PAID], ANSWERS, SMALL, (0.0,), ("scores_alike", "look", 1)),
    ([PAID], ANSWERS, SMALL, (0.5,), ("scores_alike", "look", 1)),
    ([PAID] * 4, ANSWERS, {}, (0.5,), ("scores_alike", "wrong", 1)),
    # solved: from the start, or after a rise, by 64 responses
    ([BEST], ANSWERS, SMALL, (1.0,), ("all_solved", "look", 1)),
    ([*RISING, *[BEST] * 4], ANSWERS, SMALL, (), ("all_solved", "look", 5)),
    ([*RISING, *[BEST] * 4], ANSWERS, SMALL, (0.2, 0.9), ("all_solved", "look", 5)),
    ([*RISING, *[BEST] * 3], ANSWERS, SMALL, (), None),
    ([*RISING, *[BEST] * 3], ANSWERS, {}, (), ("all_solved", "look", 5)),
    # not where the score was higher, has not risen, or held-out answers are less often right, or never
    ([*RISING, *[BEST | {"reward/score": 0.7}] * 4], ANSWERS, SMALL, (), None),
    ([{"reward/score": 1.0}, *[BEST] * 4], ANSWERS, SMALL, (), None),
    ([*RISING, *[BEST] * 4], ANSWERS, SMALL, (0.9, 0.8), None),
    ([*RISING, *[BEST] * 4], ANSWERS, SMALL, (0.0, 0.0), None),
]


@pytest.mark.parametrize(("changes", "facts", "args", "accuracies", "wanted"), EQUAL)
def test_why_all_scores_are_equal_is_told_from_the_first_batch_on(changes, facts, args, accuracies, wanted):
    steps = steps_of(changes)
    if accuracies:
        steps = [{"step": 0, "eval/accuracy": accuracies[0]}, *steps]
        steps[-1]["eval/accuracy"] = accuracies[-1]
    found = health_of(steps, {"facts": facts, **FLAGS, **args}).sorted
    alike = ("all_cut", "all_wrong", "all_solved", "scores_alike", "few_end", "groups_alike")
    assert [(f.name, f.level, f.step) for f in found if f.name in alike] == [wanted] * bool(wanted)
    for finding in found:
        said = one_line(finding) + str(finding.causes)
        assert "nan" not in said.replace("nothing", "").split(), said
        assert ("the task is learned" in said) == (finding.name == "all_solved")


def test_the_sentences_on_equal_scores_have_the_numbers_of_the_run():
    tested = [{"step": 0, "eval/accuracy": 0.0}, *steps_of([ZERO])]
    (wrong,) = health_of(tested, {"facts": ANSWERS, **FLAGS, **SMALL}).sorted
    assert wrong.symptom.startswith("none of the first 16 responses earned anything")
    assert wrong.numbers == ["reward/function 0", "eval/accuracy 0.000", "rollout/finished 1.00"]
    assert "stage 1" in wrong.remedy and "easier prompts" in wrong.remedy and "a part" in wrong.remedy
    cut = findings([CUT], ANSWERS, **SMALL)["all_cut"]
    assert cut.symptom.startswith("all of the first 16 responses were cut at --max_gen_len and got the same")
    assert cut.numbers == ["rollout/finished 0.00", "reward/score -1", "--max_gen_len 64"]
    assert cut.remedy.startswith("--max_gen_len 256, or a reward that pays a part")
    same = findings([PAID], ANSWERS, **SMALL)["scores_alike"]
    assert same.numbers == ["0.7 for each, before --missing_eos_penalty", "different responses 0.98"]
    half = findings([HALF_CUT | {"reward/score": 0.2}], FACTS, **SMALL)["scores_alike"]
    assert half.numbers[0] == same.numbers[0]  # 0.2 is 0.7 without the penalty of 1, which a half paid
    assert "two different answers" in same.remedy
    solved = findings([*RISING, *[BEST] * 4], ANSWERS, **SMALL)["all_solved"]
    assert solved.symptom.startswith("all of 64 responses in a row got the same score, the best so far")
    assert solved.numbers == ["1 for each, before --missing_eos_penalty"]


def test_advantages_that_are_gone_have_no_number_that_is_not_known():
    gone = [{"policy/advantage_std": 0.0}] * 3
    (found,) = findings(gone, **FEW | {"batch_size": 8}).values()
    assert (found.name, found.numbers) == ("advantages_gone", ["policy/advantage_std 0", "reward/score 1"])


def test_an_accuracy_whose_answers_the_reward_gets_does_not_say_that_it_is_exploited():
    """It still says whether held-out answers are right more often; a judge comes before it."""
    falls = evaluated(run_of(20, {}), 0.9, 0.6)
    symptoms = [findings(falls, facts)["held_out_falls"].symptom for facts in (FACTS, ANSWERS)]
    assert ["exploited" in symptom for symptom in symptoms] == [True, False]
    longer = {"rollout/length": 42.0, "rollout/score_length_corr": 0.55}
    assert "length_is_gamed" not in findings(evaluated(run_of(24, longer), 0.6, 0.9, 0.9), ANSWERS)
    both = evaluated(evaluated(run_of(20, {}), 0.6, 0.9), 0.9, -9.9, name="eval/judge")
    both = [step | {"eval/judge_std": 1.0} for step in both]
    for facts, symptom in ((FACTS, None), (ANSWERS, "eval/judge falls while the score rises: the reward")):
        found = findings(both, facts).get("held_out_falls")
        assert (found is None) if symptom is None else found.symptom.startswith(symptom)


# a change of the last steps that is a finding where nothing gets better by an evaluation: how it is judged if
# the accuracy stays, rises, or is not known while the score rises
UNLESS_BETTER = [
    ({"rollout/distinct": 0.15}, {"rollout/distinct": 0.25}, "answers_alike", False),
    ({"policy/entropy": 0.009}, {"policy/entropy": 0.011}, "entropy_collapses", False),
    ({"policy/entropy": 0.5}, {"policy/entropy": 0.3}, "entropy_rises", False),
    (STUCK, {"kl/sequence": 0.04}, "policy_is_stuck", False),
]
for way, near in ((1, {"rollout/length": 36.0}), (-1, {"rollout/length": 20.0})):
    paid = {"rollout/score_length_corr": 0.55 * way}
    length = {"rollout/length": 42.0 if way > 0 else 15.0}
    UNLESS_BETTER += [
        (length | paid, near | paid, "length_is_gamed", True),
        (length | paid, length | {"rollout/score_length_corr": 0.45 * way}, "length_is_gamed", True),
        (length | paid, length | {"rollout/score_length_corr": -0.55 * way}, "length_is_gamed", True),
    ]


@pytest.mark.parametrize(("bad", "good", "name", "unknown"), UNLESS_BETTER)
def test_a_change_that_goes_with_better_answers_is_none(bad, good, name, unknown):
    """unknown: is it a finding where only the score is known to rise?"""
    steps = run_of(24, bad)
    assert name in found_in(evaluated(steps, 0.6, 0.6))
    assert name not in found_in(evaluated(steps, 0.6, 0.9, 0.9))
    assert (name in found_in(steps)) is unknown
    assert name not in found_in(evaluated(run_of(24, good), 0.6, 0.6))
    assert (name in found_in(evaluated(steps, 0.6, 0.9, name="eval/score"))) is unknown


# Evaluations from the first to the last, what else is known, and the level. Two standard errors of a
# difference are, of shares of 500 near 0.9, 2 sqrt(2) 0.3 / sqrt(500) = 0.038; of scores, where the mean of
# 128 varies by 0.0916 and one of them by 1.036, 2 sqrt(2) 1.036 / sqrt(500) = 0.131; of shares near
# a half 2 sqrt(2) 0.5 / sqrt(500) = 0.063.
HELD_OUT = """
accuracy     0.6  0.9  0.85   -                look
accuracy     0.6  0.9  0.87   -                -
accuracy     0.9  0.9  0.6    -                wrong
accuracy     0    0    0      -                -
score        3    4    3.86   -                look
score        3    4    3.87   -                -
score        3    3    1      -                wrong
judge        0.02 0.03 -0.1   std=1.2          -
judge        0.02 0.03 -0.1   std=0.3          wrong
chosen_preferred 0.5 0.6 0.54 -                -
chosen_preferred 0.5 0.6 0.53 -                look
chosen_preferred 0.5 0.5 0.3 -                 wrong
"""


@pytest.mark.parametrize("row", HELD_OUT.strip().splitlines())
def test_a_held_out_fall_is_told_from_chance(row):
    name, *values, also, level = row.split()
    kind, _, x = also.partition("=")
    name = f"eval/{name}"
    steps = evaluated(run_of(16, {}), *map(float, values), name=name)
    steps = [step | ({f"{name}_{kind}": float(x)} if x else {}) for step in steps]
    offline = {"offline_data_path": "x"} if "chosen" in name else {}
    found = findings(steps, **offline).get("held_out_falls")
    assert (found.level if found else "-") == level
    if found:
        assert found.step == 16
        assert found.symptom == f"{name} falls"  # after 16 steps nobody can tell what the score does
        first, best, last = (f"{float(value):.3f}" for value in values)
        assert found.numbers == [f"{name} {last}, at the start {first}, at the best {best}"]


def test_a_judge_that_falls_while_the_score_rises_says_that_the_reward_is_exploited():
    for steps, exploited in ((run_of(20, {}), True), (flat(20), False)):
        symptom = findings(evaluated(steps, 0.9, 0.6))["held_out_falls"].symptom
        assert ("while the score rises: the reward is exploited" in symptom) is exploited


START = """
    missing_header="assistant"        | missing_header wrong           | --prompt_template
    template_without_eos=true         | template_without_eos look      | eos_token
    fewer_ids=[300,400]               | other_tokenizer look           | --tokenizer
    without_template="model,other"    | judge_without_template look    | chat template
    dropped_share=0.21                | records_dropped look           | a larger --max_seq_len, up to
    dropped_share=0.91                | records_dropped wrong          | a larger --max_seq_len, up to
    dropped_share=0.19                |                                |
    kl_coef=0.0                       | nothing_holds_the_policy look  | --kl_coef 0.02
    kl_coef=0.0 reward_model=[]       |                                |
    temperature=0.1                   | unusual_flags look             | --temperature 1
    learning_rate=0.011               | unusual_flags look             | --learning_rate 0.0005
    learning_rate=0.009               |                                |
    learning_rate=1e-5                | unusual_flags look             | --learning_rate 0.0005
    critic_learning_rate=1e-7         | unusual_flags look             | --critic_learning_rate 0.0005
    cliprange_value=0.001             | unusual_flags look             | --cliprange_value 0.5
    cliprange_value=0.0               |                                |
    gamma=0 lam=0 target_kl=0         | unusual_flags look             | --gamma 1 --lam 1
    policy_loss="cispo"               |                                |
    policy_loss="gspo"                | unusual_flags look             | --clip_epsilon 0.0003
    clip_epsilon=0.0003               | unusual_flags look             | --clip_epsilon 0.2
    prompts=190                       | few_prompts look               | more data
    prompts=200                       |                                |
    prompts=190 num_generations=2     |                                |
    batch_size=15                     | small_batch look               | --batch_size
    batch_size=16                     |                                |
"""


@pytest.mark.parametrize("row", START.strip().splitlines(), ids=lambda row: row.split(" | ")[0].strip())
def test_flags_and_facts_that_are_far_from_the_usual_ones_are_found_before_the_first_step(row):
    given, wanted, remedy = map(str.strip, row.split("|"))
    change = {name: json.loads(value) for name, value in (pair.split("=") for pair in given.split())}
    facts = {name: change.pop(name, usual) for name, usual in FACTS.items()}
    found = findings([], facts, **change).values()
    assert " ".join(f"{f.name} {f.level}" for f in found) == wanted
    assert all(remedy in f.remedy for f in found)


def test_the_template_is_asked_for_the_header_and_the_eos():
    header = "{% if add_generation_prompt %}assistant {% endif %}"
    turns = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    thought = "('<think> </think> ' if m['role'] == 'assistant' else '') + m['content']"
    for template, eos, found in (
        (turns + header, 0, ("", True)),
        (turns, 0, ("assistant", True)),
        (turns + header, 5, ("", False)),
        (turns.replace("</s>", "") + header, 0, ("", False)),
        (turns.replace("m['content']", thought) + header, 0, ("", True)),
        (None, 0, ("", True)),
    ):
        tokenizer = word_tokenizer(["user", "assistant", "is", "<think>", "</think>", "Seven.", "a"])
        tokenizer.chat_template = template
        assert turns_of(tokenizer, [eos]) == found, template


def test_a_run_keeps_its_facts_and_says_a_finding_once_also_when_resumed(tmp_path, capsys):
    files = run_files(tmp_path, count=24)
    files["reward_model"] = save_reward_dir(tmp_path / "plain", word_tokenizer(list("abcdefgh")))
    sizes = {"batch_size": 8, "mini_batch_size": 8, "max_gen_len": 4, "max_seq_len": 5, "max_steps": 2}
    more = {"epochs": 9, "save_interval": 1, "device": "cpu", "out_dir": tmp_path / "out"}
    argv = flags(**files, **sizes, **more)
    train_ppo.main(argv)
    said = capsys.readouterr().out
    folder = tmp_path / "out" / "run_1"
    facts = json.loads((folder / "config.json").read_text())["facts"]
    assert 0 < facts["dropped_share"] == pytest.approx(1 - facts["prompts"] / 24)
    assert facts["without_template"] == "model"
    assert said.count("plain reads '{prompt}{response}{eos}' (--reward_template)") == 1
    assert facts["suited"]["learning_rate"] == 5e-4
    assert facts["dtype"] in ("float32", "bfloat16")  # what the CPU is good at
    plain = "health: look, since step 0: a reward model has no chat template"
    assert said.count(plain) == 1
    assert "**judge_without_template** (look, since step 0)" in (folder / "summary.md").read_text("utf-8")
    kept = read_jsonl(folder / "metrics.jsonl")
    shutil.rmtree(folder / "checkpoints" / "step_2")
    train_ppo.main([*argv, "--resume", str(folder)])
    assert plain not in capsys.readouterr().out
    assert len(read_jsonl(folder / "metrics.jsonl")) == len(kept)


def test_findings_are_sorted_and_each_is_said_once_and_again_when_it_becomes_wrong():
    """What was unusual before the first step comes first, then what is wrong, then by step."""
    health = Health({**FLAGS, "facts": FACTS, "learning_rate": 0.05})
    steps = [{"kl/k1": x} for x in (1.5, 1.6, 1.5, 3.5, 4)]
    steps[2]["policy/ratio"] = 5.0
    records = [{"step": 0}, *steps_of(steps)]
    said = [[(f.name, f.level) for f in health.add(record)] for record in records]
    assert said[:2] == [[("unusual_flags", "look")], [("kl_far", "look")]]
    assert said[2:] == [[], [("ratio_drastic", "wrong")], [("kl_far", "wrong")], []]
    unusual, far, drastic = health.sorted
    assert (unusual.name, unusual.level, unusual.step) == ("unusual_flags", "look", 0)
    assert (far.name, far.level, far.step) == ("kl_far", "wrong", 1)  # not when it became worse
    assert (drastic.name, drastic.level, drastic.step) == ("ratio_drastic", "wrong", 3)
    assert far.numbers[0].startswith("kl/k1 3.50 ")  # of the step that was said
    assert one_line(drastic).startswith("wrong, since step 3: the updates of one batch")


# a metric, its value, the finding, flags of the run, and the remedy
REMEDIES = """
policy/ratio 3 ratio_drastic ppo_epochs=1 | --learning_rate 0.000166667
policy/ratio 3 ratio_drastic ppo_epochs=1 learning_rate=0.006 | --learning_rate 0.0005
policy/ratio 3 ratio_drastic ppo_epochs=1 learning_rate=0.0009 | --learning_rate 0.0003
policy/ratio 3 ratio_drastic learning_rate=0.003 | --learning_rate 0.0005 --ppo_epochs 1
policy/approx_kl 0.1 steps_too_large ppo_epochs=1 | --learning_rate 0.000166667
policy/approx_kl 0.1 steps_too_large | --learning_rate 0.000166667 --ppo_epochs 1
policy/approx_kl 0.1 steps_too_large update_old_actor_freq=4 ppo_epochs=1 learning_rate=0.003
    | --learning_rate 0.0005 --update_old_actor_freq 1
rollout/repetition 0.5 repetition repetition_penalty=1 | --repetition_penalty 2 --kl_coef 0.06
rollout/length 1 empty_answers missing_eos_penalty=0
    | --kl_coef 0.06, or a reward that gives less to an empty answer
value/clip_fraction 0.5 critic_is_held | --critic_learning_rate 0.000166667
value/clip_fraction 0.5 critic_is_held cliprange_value=0.1
    | --cliprange_value 0.5 --critic_learning_rate 0.000166667
value/explained_variance -1 critic_useless lam=1
    | --critic_learning_rate 0.000166667, or a longer --critic_warmup_steps
policy/ratio 1 small_batch batch_size=4 | --batch_size 16, or more if a step may take longer
policy/early_stop 1 early_stop_starves target_kl=0.05 | --learning_rate 0.000166667
policy/early_stop 1 early_stop_starves target_kl=0.000001 | --target_kl 0.02 --learning_rate 0.000166667
kl/k1 2 kl_far kl_coef=1 | --learning_rate 0.000166667 --kl_coef 3
kl/k1 2 kl_far kl_coef=0 | --learning_rate 0.000166667 --kl_coef 0.02
"""


@pytest.mark.parametrize("row", REMEDIES.replace("\n    ", " ").strip().splitlines())
def test_a_remedy_comes_from_the_flags_of_the_run_and_is_not_what_it_has_already(row):
    given, remedy = row.split(" | ")
    metric, value, name, *changed = given.split()
    args = {flag: float(x) for flag, x in (pair.split("=") for pair in changed)}
    assert findings([{}, {}, *[{metric: float(value)}] * 5], **args)[name].remedy == remedy


def test_a_rate_goes_to_the_one_that_suits_the_model_or_beyond():
    still = evaluated(run_of(12, STUCK, STUCK), 0.6, 0.6)
    for rate, value in ((1e-4, "0.0005"), (5e-4, "0.0015")):
        remedy = findings(still, learning_rate=rate)["policy_is_stuck"].remedy
        assert remedy == f"--learning_rate {value}, or a smaller --kl_coef"
    unknown = {**FACTS, "suited": {}}  # of an older version
    found = findings([{"policy/ratio": 5.0}], unknown, learning_rate=6e-3, ppo_epochs=1)["ratio_drastic"]
    assert found.remedy == "--learning_rate 0.002"
    assert findings(flat(20))["score_does_not_rise"].remedy.endswith(", if not, --batch_size 256")


def test_what_is_not_known_is_left_out():
    """A run of an older version, without flags and with few metrics."""
    (found,) = health_of([{"step": 1, "policy/approx_kl": 0.6}]).sorted
    assert found.numbers == ["policy/approx_kl 0.600 (usual: below 0.05)"]
    remedies = [health_of([{"step": 1, name: 9.0}]).sorted[0].remedy for name in ("policy/ratio", "kl/k1")]
    assert remedies == ["--ppo_epochs 1", "--kl_coef 0.02"]
    held = [{"step": n, "value/clip_fraction": 0.5} for n in range(3)]
    assert health_of(held, {"cliprange_value": 0.5}).sorted[0].remedy == "see docs/health.md"


def test_numbers_are_those_of_the_run():
    found = findings(ended(0, 0, 0), {**FACTS, "prompts": 10})
    assert found["few_prompts"].numbers == ["10 prompts or logged answers", "589 passes"]
    assert found["few_end"].numbers == ["rollout/finished 0.000 in the first steps", "--max_gen_len 64"]


def test_a_narrow_clip_holds_many_tokens_in_a_healthy_run():
    held = [{"policy/clip_fraction": 0.9}] * 3
    assert "steps_too_large" not in findings(held, policy_loss="gspo", clip_epsilon=3e-4)
    assert "steps_too_large" in findings(held, policy_loss="clip", clip_epsilon=0.02)


def test_what_is_usual_is_what_the_flags_take():
    known = train_ppo.flag_parser().flags
    every = [TABLE["usual"], *TABLE["usual_with"].values()]
    for name, (least, most, usual) in [row for table in every for row in table.items()]:
        assert not [value for value in (least, most, usual) if value and known[name].problem(value)], name
        assert least <= usual <= most


def test_the_spread_of_steps_is_that_of_their_noise_and_not_of_their_trend():
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 3
    assert spread_of_steps(noise.tolist()) == pytest.approx(3, rel=0.05)
    assert spread_of_steps((noise + torch.arange(2000) * 0.1).tolist()) == pytest.approx(3, rel=0.05)
    assert spread_of_steps([1.0, 2.0]) != spread_of_steps([1.0, 2.0])  # NaN: too few


def test_evaluations_by_other_records_or_another_judge_are_left_out_once_there_are_new_ones():
    history = History({"facts": {"evaluated_by": "b", "evaluated_since": 3}})
    found = []
    for step in range(6):
        history.add({"step": step, "reward/score": step, "eval/score": step, "eval/judge": -step})
        found.append((history.since, history.ends("eval/score"), history.ends("eval/judge")))
    assert found[2] == (0, (0, 2), (0, -2))
    assert found[3:] == [(3, None, None), (3, (3, 4), (-3, -4)), (3, (3, 5), (-3, -5))]
    assert len(history.values["reward/score"]) == 6
