"""What is chosen where no flag says it: rates, sizes that follow each other, warm-up, .pth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refused, tiny_llama

from errors import InputError
from trainer import train_ppo
from trainer.inputs import DEMO, LORA_FACTOR, RATES_BY_SIZE, choose_rates, choose_warmup, rate_by_size
from trainer.run import PpoRun
from trainer.runs.base import repeats_note
from trainer.runs.distributed import World


def completed(*argv, **values):
    return train_ppo.parse_args([*argv, *(f"--{name}={value}" for name, value in values.items())])


def steps_of(args, prompts, processes=1):
    run = object.__new__(PpoRun)
    run.args, run.data = args, range(prompts)
    run.responses_per_record = args.num_generations
    run.world = World(0, processes, torch.device("cpu"))
    return run.count_steps()


SIZES = [  # --num_generations, flags given, batch and minibatch
    (1, {}, 128, 32),
    (1, {"batch_size": 4}, 4, 4),
    (1, {"batch_size": 37}, 37, 1),
    (1, {"mini_batch_size": 48}, 144, 48),
    (1, {"mini_batch_size": 256}, 256, 256),
    (48, {}, 192, 32),
    (4, {"batch_size": 48}, 48, 24),
    (3, {"mini_batch_size": 8}, 144, 8),
]


def test_sizes_follow_each_other():
    for answers, sizes, batch, mini in SIZES:
        args = completed(num_generations=answers, **sizes)
        assert (args.batch_size, args.mini_batch_size) == (batch, mini), sizes


SIZE = st.none() | st.integers(1, 300)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(answers=st.integers(1, 50), batch=SIZE, mini=SIZE)
def test_sizes_fit_each_other_or_are_refused(answers, batch, mini):
    """A batch is whole minibatches, and whole prompts with all their answers; what was given stays."""
    wanted = {"batch_size": batch, "mini_batch_size": mini}
    wanted = {name: size for name, size in wanted.items() if size}
    try:
        args = completed(num_generations=answers, **wanted)
    except InputError as error:
        assert batch and (batch % answers or batch % mini)
        assert str(error).startswith(("--batch_size", "--mini_batch_size")[not batch % answers])
        return
    assert wanted.items() <= vars(args).items()
    assert args.batch_size % args.mini_batch_size == 0 == args.batch_size % answers
    assert steps_of(args, 10 * args.batch_size) == 10 * answers  # prompts are what epochs count


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"advantage": "reinforce"}, {"lam": 1, "critic_warmup_steps": 0}),
        ({"max_gen_len": 64}, {"lam": 0.95}),  # by the length of the answers
        ({"max_gen_len": 65}, {"lam": 1.0}),
        ({"max_gen_len": 65, "lam": 0}, {"lam": 0}),
        ({"advantage": "reinforce", "lam": 1, "critic_warmup_steps": 0}, {"lam": 1}),  # is not refused
        ({"advantage": "rloo", "num_generations": 2, "vf_coef": 0}, {"vf_coef": 0}),
        ({"offline_data_path": "x", "overlong_penalty": 0}, {"missing_eos_penalty": 0.0, "reasoning": 1}),
        ({"offline_data_path": "x"}, DEMO | {"data_path": "", "reward_model": []}),
        ({"clip_epsilon": 0.1}, {"clip_epsilon": 0.1, "clip_epsilon_high": None}),
        ({"policy_loss": "cispo"}, {"clip_epsilon": 1.0, "clip_epsilon_high": 4.0}),
        ({"policy_loss": "gspo"}, {"clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4}),
        ({"policy_loss": "gspo", "clip_epsilon_high": 1}, {"clip_epsilon": 3e-4, "clip_epsilon_high": 1}),
        ({"mask_truncated": 1}, {"missing_eos_penalty": 0.0}),
        ({"mask_truncated": 1, "missing_eos_penalty": 1}, {"missing_eos_penalty": 1}),
        ({"advantage": "rloo", "num_generations": 2}, {"kl_in": "reward", "missing_eos_penalty": None}),
        ({"ptx_data_path": "x"}, {"ptx_coef": 0.1}),
        ({"ptx_data_path": "x", "ptx_coef": 0.3}, {"ptx_coef": 0.3}),
        (
            {},
            DEMO
            | {"reasoning": 1, "reward_model": [DEMO["reward_model"]], "clip_epsilon": 0.2, "kl_in": "loss"},
        ),
        ({"data_path": "mine"}, {"data_path": "mine", "eval_data_path": "", "model": DEMO["model"]}),
        ({"data_path": "mine", "eval_data_path": "held_out"}, {"eval_data_path": "held_out"}),
        ({"eval_data_path": "held_out"}, {"data_path": DEMO["data_path"], "eval_data_path": "held_out"}),
        ({"reward_url": "http://x", "reasoning": 0}, {"reward_model": [], "reasoning": 0}),
    ],
)
def test_what_is_chosen(given, chosen):
    args = completed(**given)
    assert {name: getattr(args, name) for name in chosen} == chosen


OWN = {"model": "x", "data_path": "x", "reward_url": "http://x"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"mini_batch_size": 2**20 + 1}, "--mini_batch_size 1048577: must be at most 1048576"),
        ({"entropy_top": 0}, "--entropy_top 0.0: must be"),
        ({"dual_clip": 1}, "--dual_clip 1: must be 0, for no limit, or above 1"),
        (
            {"importance_cap": 0.99},
            "--importance_cap 0.99: must be 0, for no weights, or at least 1; 2 is usual",
        ),
        ({"min_gen_len": 65}, "--min_gen_len 65: must be at most --max_gen_len 64"),
        ({"overlong_buffer": 65}, "--overlong_buffer 65: must be at most --max_gen_len 64"),
        ({"model": "x", "reward_url": "http://x"}, "--data_path: name the JSONL file with the prompts"),
        ({"model": "x", "data_path": "x"}, "--reward_model: name one, or a function"),
        ({**OWN, "merge_history": 1}, "--merge_history: is of use only with --reward_model"),
        ({**OWN, "reward_template": "{prompt}{response}"}, "--reward_template: is of use only with --reward"),
        (
            {"reward_template": "{prompt}\\n"},
            "--reward_template: must hold {prompt} and {response} once each",
        ),
        ({**OWN, "best_metric": "x"}, "--best_metric: is of use in evaluations only"),
        ({**OWN, "eval_reward_fn": "x"}, "--eval_reward_fn: is of use in evaluations only"),
        ({**OWN, "eval_reward_model": "x"}, "--eval_reward_model: is of use in evaluations only"),
    ],
)
def test_what_does_not_fit_is_refused(given, line):
    assert refused("", completed, **given).startswith(line)


def test_an_address_has_a_host_and_may_have_a_port_and_a_path():
    for url in ("https://a-b.c:80/d?e=f%20#g", "http://[::1]:5000/", "http://ä/"):
        assert completed(reward_url=url).reward_url == url
    for url in ("x", "http://", "http://[::1", "http://a:b", "http://a b", "https://a/ä", "http://a:b@c:1"):
        refused(r"--reward_url .*: must be as http://host:port/path", completed, reward_url=url)


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        *[({"max_steps": steps}, steps, n) for steps, n in [(46, 2), (8, 2), (7, 1), (3, 0)]],
        ({"max_steps": 3, "critic_warmup_steps": 2}, 3, 2),  # a given one stays
        ({"max_steps": 4, "lr_schedule": "constant"}, 4, 2),  # the length may change
        ({"max_steps": 6, "critic_warmup_steps": 2, "lr_warmup_steps": 3}, 6, 2),
    ],
)
def test_a_short_run_warms_the_critic_up_for_a_quarter_at_most(given, steps, warmup):
    args = completed(**given)
    assert steps_of(args, 10**6) == steps
    choose_warmup(args, steps)
    assert args.critic_warmup_steps == warmup
    args.critic_warmup_steps = steps
    refused(f"--critic_warmup_steps {steps}: the run has only", choose_warmup, args, steps)
    args.critic_warmup_steps = warmup
    args.lr_warmup_steps = steps - warmup
    choose_warmup(args, steps)
    args.lr_warmup_steps += 1
    refused(
        f"--lr_warmup_steps .*: the actor trains in only {steps - warmup} steps", choose_warmup, args, steps
    )


def test_records_that_a_batch_takes_several_times_are_said():
    args = completed(batch_size=8, num_generations=2)
    assert [steps_of(args, n, processes=2) for n in (8, 7)] == [1, 1]
    for prompts, says in (
        (8, ""),
        (7, "note     a batch takes 8 records of 7: some are in it several times"),
    ):
        assert repeats_note("a batch", 8, prompts) == says


def test_steps_are_of_all_processes_and_epochs():
    args = completed(batch_size=8, num_generations=2, epochs=3)
    assert steps_of(args, 10, processes=2) == 4  # 30 prompts, 8 in a step


@pytest.mark.parametrize(
    ("there", "reasoning", "name", "chosen", "moe"),
    [
        (["full_sft"], None, "full_sft", None, "_moe"),  # the answers decide later
        (["reason", "full_sft"], None, "reason", 1, ""),
        (["reason", "full_sft"], 0, "full_sft", 0, ""),
        (["full_sft"], 1, "reason", 1, "_moe"),  # which is not there
    ],
)
def test_which_pth_hidden_size_names(tmp_path, there, reasoning, name, chosen, moe):
    for stem in there:
        (tmp_path / f"{stem}_64{moe}.pth").touch()
    more = {} if reasoning is None else {"reasoning": reasoning}
    own = {name: value for name, value in OWN.items() if name != "model"}
    args = completed(hidden_size=64, out_dir=tmp_path, use_moe=len(moe) // 4, **own, **more)
    assert args.model == str(tmp_path / f"{name}_64{moe}.pth")
    assert args.reasoning == chosen


def test_rates_are_chosen_by_size_and_said(monkeypatch):
    times = {"actor": 1, "critic": 2}
    monkeypatch.setattr("trainer.inputs.rate_by_size", lambda kind, size, lora: times[kind] * size)
    small, large = tiny_llama(8), tiny_llama(8, layers=2)
    models = {"learning_rate": ("actor", small), "critic_learning_rate": ("critic", large)}
    suited = {"learning_rate": small.num_parameters(), "critic_learning_rate": 2 * large.num_parameters()}
    for set_ in ({}, {"learning_rate": 3e-4}, {"learning_rate": 3e-4, "critic_learning_rate": 1e-3}):
        args = completed(**set_)
        found, line = choose_rates(args, models)
        assert found == suited
        chosen = suited | set_
        assert (args.learning_rate, args.critic_learning_rate) == tuple(chosen.values())
        assert [f"--{name}" in (line or "") for name in suited] == [name not in set_ for name in suited]


@pytest.mark.parametrize("kind", RATES_BY_SIZE)
def test_the_rate_of_a_point_is_the_points_it_is_level_beyond_the_ends_and_never_rises(kind):
    points = RATES_BY_SIZE[kind]
    for size, rate in points:
        assert rate_by_size(kind, size) == pytest.approx(rate, rel=1e-9)
    assert rate_by_size(kind, 10) == points[0][1]
    assert rate_by_size(kind, 70e9) == points[-1][1]
    rates = [rate_by_size(kind, 10 ** (x / 10)) for x in range(50, 105)]
    assert rates == sorted(rates, reverse=True)
    assert rate_by_size(kind, 5e8) <= 2e-5  # a pretrained 0.5B model must not get the demo's rate


def test_between_two_points_the_line_is_straight_in_logarithms_and_adapters_get_more(monkeypatch):
    monkeypatch.setitem(RATES_BY_SIZE, "actor", ((1e6, 1e-3), (1e8, 1e-5)))
    assert rate_by_size("actor", 1e7) == pytest.approx(1e-4)
    assert rate_by_size("actor", 3.1623e7) == pytest.approx(3.2e-5)  # 10^-4.5, of two digits
    assert LORA_FACTOR > 1
    assert rate_by_size("actor", 1e7, lora=True) == pytest.approx(LORA_FACTOR * 1e-4)
