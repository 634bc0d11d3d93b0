"""What is chosen where no flag says it: rates, sizes that follow each other, warm-up, .pth."""

import pytest
from tiny import tiny_llama

from errors import InputError
from trainer import train_ppo
from trainer.inputs import DEMO, choose_rates, count_steps


def parsed(*argv):
    return train_ppo.flag_parser().parse_args(argv)


def completed(*argv):
    return train_ppo.parse_args(argv)


@pytest.mark.parametrize(
    ("given", "batch", "mini"),
    [
        ([], 128, 32),
        (["--batch_size", "4"], 4, 4),
        (["--batch_size", "48"], 48, 24),
        (["--batch_size", "37"], 37, 1),
        (["--mini_batch_size", "64"], 128, 64),
        (["--mini_batch_size", "48"], 144, 48),
        (["--mini_batch_size", "256"], 256, 256),
        (["--batch_size", "96", "--mini_batch_size", "8"], 96, 8),
    ],
)
def test_sizes_follow_each_other(given, batch, mini):
    args = completed(*given)
    assert (args.batch_size, args.mini_batch_size) == (batch, mini)


@pytest.mark.parametrize(
    ("answers", "given", "batch", "mini"),
    [
        (4, [], 128, 32),
        (8, [], 128, 32),
        (6, [], 192, 32),
        (48, [], 192, 32),
        (4, ["--batch_size", "48"], 48, 24),
        (3, ["--mini_batch_size", "8"], 144, 8),
        (4, ["--batch_size", "20"], 20, 20),
        (4, ["--mini_batch_size", "64"], 128, 64),
    ],
)
def test_sizes_hold_all_answers_to_a_prompt(answers, given, batch, mini):
    args = completed("--num_generations", str(answers), *given)
    assert (args.batch_size, args.mini_batch_size) == (batch, mini)
    assert count_steps(args, 10 * batch, 1)[0] == 10 * answers  # prompts are what epochs count


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--advantage", "reinforce"], "lam"),
        (["--advantage", "reinforce"], "critic_warmup_steps"),
        (["--advantage", "rloo", "--num_generations", "2"], "vf_coef"),
        (["--advantage", "group", "--num_generations", "2"], "cliprange_value"),
        ([], "overlong_penalty"),
        (["--offline_data_path", "x"], "overlong_penalty"),
    ],
)
def test_a_flag_that_asks_for_what_is_the_case_is_never_refused(given, name):
    value = 1 if name == "lam" else 0
    assert getattr(completed(*given, f"--{name}", str(value)), name) == value


def test_without_a_critic_there_is_no_lambda():
    assert completed("--advantage", "reinforce").lam == 1


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="--batch_size 32: must be a multiple"):
        completed("--num_generations", "3", "--batch_size", "32")
    with pytest.raises(InputError, match="--mini_batch_size 3: must divide --batch_size 8"):
        completed("--batch_size", "8", "--mini_batch_size", "3")
    with pytest.raises(InputError, match="--mini_batch_size 1048577: must be at most 1048576"):
        parsed("--mini_batch_size", "1048577")  # without an end, --batch_size would be as large


@pytest.mark.parametrize(("steps", "warmup"), [(46, 2), (8, 2), (7, 1), (4, 1), (3, 0), (1, 0)])
def test_a_short_run_warms_the_critic_up_for_a_quarter_at_most(steps, warmup):
    args = completed("--max_steps", str(steps))
    assert count_steps(args, 10**6, 1) == (steps, warmup)


@pytest.mark.parametrize(("tokens", "lam"), [(1, 0.95), (64, 0.95), (65, 1.0), (512, 1.0)])
def test_lambda_is_chosen_by_the_length_of_the_answers(tokens, lam):
    assert completed("--max_gen_len", str(tokens)).lam == lam
    assert completed("--max_gen_len", str(tokens), "--lam", "0").lam == 0


@pytest.mark.parametrize("steps", [4, 46])
def test_with_a_constant_rate_warmup_does_not_depend_on_the_length(steps):
    args = train_ppo.parse_args(["--max_steps", str(steps), "--epochs", "99", "--lr_schedule", "constant"])
    assert count_steps(args, 5888, 1)[1] == 2


def test_a_given_warmup_stays_and_may_not_take_the_whole_run():
    args = completed("--max_steps", "3", "--critic_warmup_steps", "2")
    assert count_steps(args, 10**6, 1) == (3, 2)
    args = args.completed(critic_warmup_steps=3)
    with pytest.raises(InputError, match=r"only 3 steps.* --epochs or --max_steps"):
        count_steps(args, 10**6, 1)


def test_the_rate_has_to_get_to_its_peak_in_the_batches_in_which_the_actor_trains():
    flags = ["--max_steps", "6", "--critic_warmup_steps", "2", "--lr_warmup_steps"]
    assert count_steps(completed(*flags, "3"), 10**6, 1) == (6, 2)
    with pytest.raises(InputError, match="--lr_warmup_steps 4: the actor trains in only 4 batches"):
        count_steps(completed(*flags, "4"), 10**6, 1)


@pytest.mark.parametrize("limit", ["1", "0.5"])
def test_a_dual_clip_that_would_stop_every_bad_token_is_refused(limit):
    with pytest.raises(InputError, match=f"--dual_clip {limit}: must be 0, for no limit, or above 1"):
        completed("--dual_clip", limit)


@pytest.mark.parametrize(
    ("given", "held_out"),
    [
        ([], str(DEMO["eval_data_path"])),
        (["--data_path", "mine.jsonl"], ""),
        (["--data_path", "mine.jsonl", "--eval_data_path", "held_out.jsonl"], "held_out.jsonl"),
        (["--eval_data_path", "held_out.jsonl"], "held_out.jsonl"),
    ],
)
def test_the_held_out_prompts_of_the_demo_belong_to_its_prompts(given, held_out):
    args = completed(*given)
    assert args.eval_data_path == held_out
    assert args.data_path == ("mine.jsonl" if "--data_path" in given else str(DEMO["data_path"]))
    assert args.model == str(DEMO["model"])


def test_the_demo_is_rewarded_for_its_format():
    assert completed().reasoning == 1


@pytest.mark.parametrize(
    ("there", "given", "name", "reasoning"),
    [
        (["reason"], None, "reason", 1),
        (["full_sft"], None, "full_sft", None),  # the answers decide later
        (["reason", "full_sft"], None, "reason", 1),
        (["reason", "full_sft"], 0, "full_sft", 0),
    ],
)
def test_which_pth_hidden_size_names(tmp_path, there, given, name, reasoning):
    for stem in there:
        (tmp_path / f"{stem}_64.pth").touch()
    more = [] if given is None else ["--reasoning", str(given)]
    argv = ["--hidden_size", "64", "--out_dir", str(tmp_path), "--data_path", "x", "--reward_url", "http://x"]
    args = completed(*argv, *more)
    assert args.model == str(tmp_path / f"{name}_64.pth")
    assert args.reasoning == reasoning


def given(**values):
    return train_ppo.flag_parser().parse_args([]).completed(**values)


def test_rates_are_chosen_by_size_and_said(monkeypatch):
    times = {"actor": 1, "critic": 2}
    monkeypatch.setattr("trainer.inputs.suited_rate", lambda kind, size, lora: times[kind] * size)
    small, large = tiny_llama(8), tiny_llama(8, layers=2)
    n, m = small.num_parameters(), large.num_parameters()
    args = given(learning_rate=None, critic_learning_rate=None)
    models = {"learning_rate": ("actor", small), "critic_learning_rate": ("critic", large)}
    args, suited, line = choose_rates(args, models)
    assert suited == {"learning_rate": n, "critic_learning_rate": 2 * m}
    assert (args.learning_rate, args.critic_learning_rate) == (n, 2 * m)
    assert "--learning_rate" in line and "--critic_learning_rate" in line
    args, _, line = choose_rates(given(learning_rate=3e-4, critic_learning_rate=None), models)
    assert "actor" not in line
    assert args.learning_rate == 3e-4
    assert choose_rates(given(learning_rate=3e-4, critic_learning_rate=1e-3), models)[2] is None
