"""The broken runs of health.py: what is changed of the demo, and which finding should say so.

``BROKEN``: {name: (what is changed, flags, findings of which one should be the first or the second)}, from
the files of ``make_files``. ``FAULTS``: {name: a function}, for the runs that need a fault in the program;
the function puts it there.
"""

import argparse
import itertools
import math

from common import ROOT
from health_files import CALCULATES, CALCULATOR, DEMO

from trainer import train_ppo
from trainer.generation import engine

# Broken runs with fewer steps, because what is wrong with them shows early.
SHORTER = {
    4: (
        "tools without stage 1",
        "a tool that waits",
        "other arguments",
        "long observations",
        "calls without end",
    ),
    8: (
        "rate 1e-8",
        "no KL",
        "coarse reward",
        "no EOS",
        "constant",
        "silent",
        "too hard",
        "all cut",
        "thousands",
        "30 PPO epochs",
        "clip 0.001",
        "grad_clip 1e-6",
        "no header",
        "other template",
        "other tokenizer",
        "temperature 0.1",
        "temperature 3",
        "judge without template",
        "more embeddings",
        "shifted log-probs",
        "losses not finite",
        "prompts dropped",
        "gamma 0.5",
    ),
    16: (
        "rate x12",
        "rate x1/15",
        "KL alone",
        "answers cut",
        "pays for length",
        "pays for shortness",
        "one answer",
        "wrong answers",
        "repetition",
        "never ends",
        "scores at the limit",
        "critic starved",
        "critic x100",
        "critic held",
        "target_kl 1e-6",
        "sampler apart",
        "judge turned round",
        "small batch",
        "wrong temperature",
    ),
}


def BROKEN(f):
    """The files of ``make_files`` -> the broken runs."""

    def fn(name, **more):
        return {"reward_fn": f"{f['rewards']}:{name}", **more}

    rates = ("unusual_flags", "steps_too_large", "kl_far", "ratio_drastic")
    judge = str(DEMO / "reward")
    environments = ROOT / "benchmarks" / "health_environments.py"
    game = {"reasoning": 0, "learning_rate": 2e-4}
    return {
        "rate x30": ("--learning_rate 0.015", {"learning_rate": 0.015}, rates),
        "rate x100": ("--learning_rate 0.05", {"learning_rate": 0.05}, rates),
        "rate x12": (
            "--learning_rate 0.006 --ppo_epochs 4",
            {"learning_rate": 0.006, "ppo_epochs": 4},
            rates,
        ),
        "rate 1e-8": ("--learning_rate 1e-8", {"learning_rate": 1e-8}, ("unusual_flags", "policy_is_stuck")),
        "rate x1/15": ("--learning_rate 3e-5", {"learning_rate": 3e-5}, ("policy_is_stuck",)),
        "no KL": ("--kl_coef 0", {"kl_coef": 0}, ("nothing_holds_the_policy",)),
        "KL alone": ("--kl_coef 50", {"kl_coef": 50}, ("unusual_flags", "policy_is_stuck")),
        "no EOS": (
            "a policy whose EOS is another token",
            {"model": f["no_eos"], **demo(judge)},
            ("few_end", "template_without_eos"),
        ),
        "answers cut": ("--max_gen_len 12", {"max_gen_len": 12}, ("few_end",)),
        "pays for length": (
            "a reward function: length",
            fn("longer", reasoning=0),
            ("length_is_gamed", "score_follows_length"),
        ),
        "pays for shortness": (
            "a reward function: minus length",
            fn("shorter", reasoning=0),
            ("length_is_gamed", "score_follows_length", "empty_answers"),
        ),
        "noise": ("a reward function: a hash", fn("noise", reasoning=0), ("score_does_not_rise",)),
        "noise, rate x4": (
            "a reward function: a hash; --learning_rate 0.002",
            fn("noise", reasoning=0, learning_rate=0.002),
            (*rates, "entropy_rises"),
        ),
        "coarse reward": (
            "--advantage rloo --num_generations 4, a reward function: 1 for the answer 17, else 0",
            {**fn("seldom", reasoning=0), "advantage": "rloo", "num_generations": 4},
            ("groups_alike",),
        ),
        "constant": ("a reward function: always 1", fn("constant", reasoning=0), ("scores_alike",)),
        "silent": ("a reward function: always None", fn("silent", reasoning=0), ("nothing_scored",)),
        "too hard": (
            "a reward function: right answers, which no response has",
            fn("right", reasoning=0, data_path=f["hard"], eval_data_path=f["hard"]),
            ("all_wrong",),
        ),
        "learned early": (
            "a reward function: 1 for an answer block",
            fn("blocks", reasoning=0),
            ("all_solved",),
        ),
        "all cut": (
            "a reward function: right answers; --max_gen_len 4",
            fn("right", reasoning=0, max_gen_len=4),
            ("all_cut",),
        ),
        "thousands": ("a reward function times 1000", fn("thousands"), ("kl_weighs_nothing",)),
        "wrong answers": ("a reward function that pays for wrong answers", fn("wrong"), ("held_out_falls",)),
        "repetition": (
            "a reward function: repeated words",
            fn("repeated", reasoning=0, missing_eos_penalty=0),
            ("repetition", "score_follows_length"),
        ),
        "one answer": (
            "a reward function: 7 is always right",
            fn("seven"),
            ("held_out_falls", "answers_alike"),
        ),
        "never ends": (
            "a reward function: signs and length",
            fn("never", reasoning=0, missing_eos_penalty=0),
            ("few_end", "length_is_gamed", "score_follows_length"),
        ),
        "scores at the limit": (
            "a reward model times 10",
            {"reward_model": f["large_scores"]},
            ("scores_at_limit",),
        ),
        "critic starved": (
            "--critic_learning_rate 1e-7",
            {"critic_learning_rate": 1e-7},
            ("unusual_flags",),
        ),
        "critic x100": (
            "--critic_learning_rate 0.05",
            {"critic_learning_rate": 0.05},
            ("unusual_flags", "critic_useless"),
        ),
        "critic held": (
            "--cliprange_value 0.001",
            {"cliprange_value": 0.001},
            ("unusual_flags", "critic_is_held"),
        ),
        "30 PPO epochs": (
            "--ppo_epochs 30",
            {"ppo_epochs": 30},
            ("unusual_flags", "steps_too_large"),
        ),
        "rate x10, target_kl 0.05": (
            "--learning_rate 0.005 --target_kl 0.05",
            {"learning_rate": 0.005, "target_kl": 0.05},
            (*rates, "early_stop_starves"),
        ),
        "target_kl 1e-6": ("--target_kl 1e-6", {"target_kl": 1e-6}, ("early_stop_starves", "unusual_flags")),
        "clip 0.001": ("--clip_epsilon 0.001", {"clip_epsilon": 0.001}, ("unusual_flags",)),
        "grad_clip 1e-6": ("--grad_clip 1e-6", {"grad_clip": 1e-6}, ("unusual_flags",)),
        "no header": (
            "a chat template without the assistant's header",
            {"model": f["no_header"], **demo(judge)},
            ("missing_header",),
        ),
        "other template": (
            "another chat template",
            {"model": f["other_template"], **demo(judge)},
            ("template_without_eos", "few_end", "format_unknown"),
        ),
        "other tokenizer": (
            "a tokenizer with other ids",
            {"model": f["other_tokenizer"], **demo(judge)},
            ("other_tokenizer", "format_unknown"),
        ),
        "more embeddings": (
            "a policy with 512 embeddings, of which the tokenizer has 389",
            {"model": f["more_embeddings"], **demo(judge)},
            ("other_tokenizer",),
        ),
        "few prompts": ("16 prompts", {"data_path": f["few"], "epochs": 96}, ("few_prompts",)),
        "temperature 0.1": ("--temperature 0.1", {"temperature": 0.1}, ("unusual_flags",)),
        "temperature 3": ("--temperature 3", {"temperature": 3}, ("unusual_flags", "few_end")),
        "sampler apart": (
            "a policy that bf16 cannot hold",
            {"model": f["sharp"], **demo(judge), "dtype": "bfloat16"},
            ("sampler_apart",),
        ),
        "judge turned round": (
            "the judge's weight -1",
            {"reward_model": f"{judge}=-1"},
            ("held_out_falls",),
        ),
        "prompts dropped": (
            "--max_seq_len 16, for prompts of 16 and 17 tokens",
            {"max_seq_len": 16},
            ("records_dropped",),
        ),
        "small batch": (
            "--batch_size 4",
            {"batch_size": 4, "mini_batch_size": 4},
            ("small_batch",),
        ),
        "gamma 0.5": ("--gamma 0.5", {"gamma": 0.5}, ("unusual_flags",)),
        "judge without template": (
            "a reward model without its chat template",
            {"reward_model": f["no_template"]},
            ("judge_without_template",),
        ),
        "form against judge": (
            "a reward model of code that counts characters; --temperature 1.3",
            {"reward_model": f["likes_length"], "trust_remote_code": [], "temperature": 1.3},
            ("score_follows_length",),
        ),
        "nothing left": (
            "a reward function that knows only right and wrong forms",
            fn("tagged", reasoning=0, max_steps=64, batch_size=16, mini_batch_size=4),
            ("advantages_gone", "all_solved"),
        ),
        "losses not finite": (
            "the program: every fourth loss of the actor is NaN",
            {},
            ("updates_skipped",),
        ),
        "wrong temperature": (
            "the program: updates forget --temperature 0.8",
            {"temperature": 0.8, "dtype": "float32"},
            ("first_ratio",),
        ),
        "shifted log-probs": (
            "the program: log-probs are those of the token before",
            {},
            ("sampler_apart", "first_ratio", "ratio_drastic"),
        ),
        "stale sampler": (
            "the program: the sampler never gets new weights",
            {},
            ("kl_negative",),
        ),
        "tools without stage 1": (
            "a calculator, for the demo's policy that never saw a call",
            {
                "tools": f"{CALCULATOR}:calculate",
                "prompt_template": str(DEMO / "tools_policy" / "chat_template.jinja"),
            },
            ("never_calls",),
        ),
        "a tool that waits": (
            "a game that takes 3 s for a quarter of the answers; --reward_timeout 2",
            {**game, "env": f"{environments}:Waits", "reward_timeout": 2},
            ("environment_hangs",),
        ),
        "other arguments": (
            "a calculator with other arguments than those of stage 1",
            {**CALCULATES, "tools": f"{environments}:calculate"},
            ("calls_fail",),
        ),
        "long observations": (
            "a game whose observation has 85 tokens; --max_gen_len 128",
            {**game, "env": f"{environments}:Explains", "max_gen_len": 128},
            ("observations_fill",),
        ),
        "calls without end": (
            "a policy that learned to call in each turn; --max_turns 3",
            {**CALCULATES, "model": f["only_calls"], "max_turns": 3, "max_gen_len": 256},
            ("turns_run_out",),
        ),
    }


def forget_temperature():
    """Updates compute the log-probs at temperature 1; the old actor's are at that of the flag."""
    loss = train_ppo.actor_loss

    def forgetful(args, *rest):
        return loss(argparse.Namespace(**{**vars(args), "temperature": 1.0}), *rest)

    train_ppo.actor_loss = forgetful


def keep_first_weights():
    """The sampler keeps the weights with which it began."""
    engine.Sampler.load = lambda sampler, policy: sampler


def lose_losses():
    """Every fourth loss of the actor is NaN."""
    loss, calls = train_ppo.actor_loss, itertools.count(1)

    def sometimes_nan(*given):
        found, metrics = loss(*given)
        return found * (1.0 if next(calls) % 4 else math.nan), metrics

    train_ppo.actor_loss = sometimes_nan


def shift_logprobs():
    """The log-probs of all tokens are those of the token before."""
    score = train_ppo.score_all

    def shifted(rollout, scorer, *rest, **more):
        found = score(rollout, scorer, *rest, **more)
        return [x.roll(1, 1) for x in found] if scorer.name == "log-probs" else found

    train_ppo.score_all = shifted


FAULTS = {
    "shifted log-probs": shift_logprobs,
    "wrong temperature": forget_temperature,
    "stale sampler": keep_first_weights,
    "losses not finite": lose_losses,
}


def demo(judge):
    """The flags of the demo beside --model, which are not filled in where a model is named."""
    return {"reward_model": judge, "data_path": str(ROOT / "dataset" / "demo" / "ppo.jsonl"), "reasoning": 1}


REMEDIES = (
    "rate x30",
    "rate x12",
    "rate x1/15",
    "rate x10, target_kl 0.05",
    "no KL",
    "KL alone",
    "answers cut",
    "scores at the limit",
    "critic starved",
    "critic held",
    "target_kl 1e-6",
    "clip 0.001",
    "temperature 0.1",
    "prompts dropped",
    "small batch",
    "a tool that waits",
    "long observations",
)
