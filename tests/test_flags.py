"""Command-line flags: each number has a range; wrong flags and other trainers' names give one error line."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from tiny import ROOT

from errors import InputError
from trainer import train_ppo, train_reward, train_sft
from trainer.flags import Flag, FlagParser, path
from trainer.peer_flags import NOT_HERE, PEER_FLAGS, VALUES
from trainer.runs.resume import check_same_run

SCRIPTS = {"ppo": train_ppo, "sft": train_sft, "reward": train_reward}


def parser():
    p = FlagParser("a test", common="count")
    p.group("numbers")
    p.add("--count", 3, "a number", at_least=1, at_most=10)
    p.add("--rate", 0.5, "another", above=0, at_most=1, may_change=True)
    return p


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--count", "11"], "--count 11: must be at most 10"),
        (["--rate", "0"], "--rate 0.0: must be above 0"),
        (["--rate", "nan"], "--rate nan: must be at most 1"),
        (["--rate", "inf"], "--rate inf: must be at most 1"),
        (["--count", "x"], "argument --count: invalid int value: 'x'; --help all lists all flags"),
        (["--cuont", "3"], "--cuont: no such flag; did you mean --count? --help all lists all flags"),
        (["--elephant"], "--elephant: no such flag; --help all lists all flags"),
        (["3"], "3: not expected here; flags begin with --, --help all lists them"),
    ],
)
def test_a_wrong_flag_is_one_line(argv, line):
    with pytest.raises(InputError) as caught:
        parser().parse_args(argv)
    assert str(caught.value) == line


def test_where_nothing_is_said_a_number_is_0_or_more_and_a_float_at_most_a_million():
    p = parser()
    p.add("--size", 3, "how many")
    p.add("--weight", 0.5, "how much")
    for argv, line in (
        (["--size", "-1"], "--size -1: must be at least 0"),
        (["--weight", "-0.5"], "--weight -0.5: must be at least 0"),
        (["--weight", "inf"], "--weight inf: must be at most 1000000"),
    ):
        with pytest.raises(InputError, match=line):
            p.parse_args(argv)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_number_of_the_scripts_is_checked(script):
    flags = script.flag_parser().flags
    numbers = {n for n, f in flags.items() if f.kind is float}
    assert len(numbers) >= 4
    for name in numbers:
        with pytest.raises(InputError, match=f"--{name} inf: must be at most"):
            script.parse_args([f"--{name}", "inf"])
        with pytest.raises(InputError, match=f"--{name} -1.0: must be"):
            script.parse_args([f"--{name}=-1"])


@pytest.mark.parametrize(("name", "ours"), PEER_FLAGS.items())
def test_a_flag_of_another_trainer_is_answered_with_our_name(name, ours):
    flags = train_ppo.flag_parser().flags
    assert ours in flags
    assert name not in flags
    with pytest.raises(InputError, match=f"it is called --{ours} here"):
        train_ppo.parse_args([f"--{name}", "1"])


def test_what_other_trainers_have_and_this_one_has_not():
    flags = train_ppo.flag_parser().flags
    assert not set(NOT_HERE) & set(flags)
    assert not set(NOT_HERE) & set(PEER_FLAGS)
    assert set(VALUES) <= set(PEER_FLAGS)
    known = [*PEER_FLAGS, *NOT_HERE]
    assert not [x for x in known for ending in known if x.endswith(f".{ending}") and says(x) == says(ending)]
    for name, reason in NOT_HERE.items():
        with pytest.raises(InputError) as caught:
            train_ppo.parse_args([f"--{name}=1"])
        assert str(caught.value) == f"--{name}: not a flag here: {reason}"


def says(name):
    """What is said of a peer's name, without the name."""
    return NOT_HERE.get(name) or (PEER_FLAGS[name], VALUES.get(name))


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "it is called --learning_rate here"),
        ("critic.optim.lr=1e-5", "it is called --critic_learning_rate here"),
        ("+algorithm.kl_ctrl.kl_coef=0.001", "it is called --kl_coef here"),
        ("algorithm.kl_ctrl.target_kl=6", "it is called --kl_target here"),  # not --target_kl
        ("data.train_batch_size=64", "not a flag here: --batch_size counts answers of a process: "),
        ("actor_rollout_ref.rollout.top_k=-1", "not a flag here: samples come from the whole distribution"),
        ("--actor.eps_clip", "it is called --clip_epsilon here"),
        ("--rollout.temperature", "it is called --temperature here"),
        ("--actor.elephant", "no such flag; "),
        ("algorithm.elephant=1", "not expected here; "),
        ("prompts.jsonl", "not expected here; "),
        ("kl_coef=0.1", "not expected here; "),
        ("--advantage=grpo", "invalid choice: 'grpo' (choose from 'gae', 'rloo', 'group', 'reinforce')"),
        ("--kl_target", "expected one argument; "),
    ],
)
def test_names_with_dots_and_wrong_values_are_answered_too(word, line):
    with pytest.raises(InputError) as caught:
        train_ppo.parse_args([word])
    name = word.split("=")[0]
    start = f"argument {name}: " if line.startswith(("invalid", "expected")) else f"{name}: "
    assert str(caught.value).startswith(start + line)


# ---------------------------------------------------------------- what a flag needs and what it excludes

FLAGS = train_ppo.flag_parser().flags
ASKING = {"advantage": "reinforce", "kl_in": "reward", "critic_init": "actor", "critic_warmup_steps": 1}


def asking(name):
    """A value with which the flag asks for something, and which is not its default."""
    flag = FLAGS[name]
    if name in ASKING:
        return ASKING[name]
    return flag.off + 1 if flag.kind is int else 0.25 if flag.kind is float else "x"


def off(name):
    """The value with which it asks for nothing."""
    return "" if FLAGS[name].kind in (path, str) and FLAGS[name].off == 0 else FLAGS[name].off


def line_of(**values):
    """The error line of these flags, "" if there is none."""
    try:
        train_ppo.flag_parser().parse_args([f"--{name}={value}" for name, value in values.items()])
    except InputError as error:
        assert error.code == 2
        return str(error)
    return ""


EXCLUDED = [
    (name, *condition.partition("=")[::2], why)
    for name, flag in FLAGS.items()
    for condition, why in flag.not_with.items()
]
NEEDED = [
    (name, value, needed)
    for name, flag in FLAGS.items()
    for value, needed in (flag.needs.items() if isinstance(flag.needs, dict) else [(None, flag.needs)])
    if needed
]


@pytest.mark.parametrize(("name", "other", "value", "why"), EXCLUDED)
def test_a_flag_that_excludes_another_is_one_line_with_both_and_the_reason(name, other, value, why):
    mine, theirs = asking(name), value or asking(other)
    groups = {"num_generations": 2} if theirs in ("rloo", "group") else {}  # it needs them
    line = line_of(**{name: mine, other: theirs, **groups})
    assert line == f"--{name} {mine}: not with --{other} {theirs}: {why}; leave one of them out"
    if FLAGS[name].off is not None:  # what is the case anyway is not refused
        assert "not with" not in line_of(**{name: off(name), other: theirs})


@pytest.mark.parametrize(("name", "value", "needed"), NEEDED)
def test_a_flag_that_is_of_no_use_alone_names_what_it_needs(name, value, needed):
    value = value or asking(name)
    line = line_of(**{name: value, needed: off(needed)})
    assert line == f"--{name} {value}: is of use only with --{needed}; set that too"
    assert line_of(**{name: value, needed: asking(needed)}) == ""


def test_flags_that_were_refused_still_are():
    """A declaration that gets lost would be lost in the tests above, too."""
    offline = "data_path thinking_ratio thinking_reward reward_model reward_fn reward_url overlong_buffer "
    offline += (
        "overlong_penalty repetition_penalty length_reward normalize_reward num_generations min_gen_len "
    )
    offline += "replay_batches filter_groups kl_in kl_target kl_horizon entropy_top update_old_actor_freq"
    without_critic = (
        "critic_learning_rate vf_coef cliprange_value lam critic_lam critic_init critic_warmup_steps"
    )
    found = [(name, other) for name, other, _, _ in EXCLUDED]
    assert {name for name, other in found if other == "offline_data_path"} == set(offline.split())
    assert {name for name, other in found if other == "advantage"} == {
        *without_critic.split(),
        "gamma",
        "kl_in",
        "offline_data_path",
    }
    assert {name for name, other in found if other == "shard"} == {"ema_beta", "offload_frozen"}
    assert len(NEEDED) == 7


@pytest.mark.parametrize(
    ("name", "default", "argv"),
    [
        ("num_generations", 4, ["--offline_data_path", "x"]),
        ("update_old_actor_freq", 4, ["--offline_data_path", "x"]),
        ("entropy_top", 0.2, ["--offline_data_path", "x"]),
        ("kl_in", "reward", ["--offline_data_path", "x"]),
        ("kl_in", "reward", ["--advantage", "group", "--num_generations", "2"]),
        ("gamma", 0.9, ["--advantage", "rloo", "--num_generations", "2"]),
        ("offline_data_path", "x", ["--advantage", "rloo", "--num_generations", "2"]),
        ("ema_beta", 0.99, ["--shard", "1"]),
        ("offload_frozen", 1, ["--shard", "1"]),
        ("critic_lam", 0.9, ["--advantage", "rloo", "--num_generations", "2"]),
        ("lam", 0.8, ["--advantage", "reinforce"]),
    ],
)
def test_an_edited_default_is_refused_as_a_flag_is(name, default, argv):
    """Those runs would crash, or compute something else."""
    p = train_ppo.flag_parser()
    p.set_defaults(**{name: default})
    p.flags[name] = replace(p.flags[name], default=default)
    with pytest.raises(InputError, match=f"--{name} .*: not with --{argv[0][2:]} "):
        p.parse_args(argv)
    assert getattr(p.parse_args([*argv, f"--{name}={off(name)}"]), name) == off(name)


def test_an_estimator_that_compares_answers_needs_several_even_as_the_default():
    p = train_ppo.flag_parser()
    p.set_defaults(advantage="rloo")
    p.flags["advantage"] = replace(p.flags["advantage"], default="rloo")
    with pytest.raises(InputError, match="--advantage rloo: is of use only with --num_generations"):
        p.parse_args([])


@pytest.mark.parametrize("script", ["train_ppo.py", "train_sft.py", "train_reward.py"])
def test_help_shows_groups_and_defaults(script):
    command = [sys.executable, str(ROOT / "trainer" / script), "--help", "all"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    groups = {"data:", "machine:", "output:"} | ({"PPO:", "rollout:"} if script == "train_ppo.py" else set())
    assert groups <= {line.strip() for line in out.splitlines()}
    assert "[42]" in out  # the seed's default
    assert out.count("[0]") >= 3  # zeros are defaults as well
    assert "at 0x" not in out


@pytest.mark.parametrize("script", ["train_ppo.py", "train_sft.py", "train_reward.py"])
def test_help_alone_shows_the_flags_that_people_set_and_how_to_see_all(script):
    command = [sys.executable, str(ROOT / "trainer" / script), "-h"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shown = re.findall(r"^  --(\w+)", out, re.MULTILINE)
    assert 15 <= len(shown) <= 27
    assert {"model", "data_path", "learning_rate", "resume"} <= set(shown)
    assert "--help all" in out


@pytest.mark.parametrize(
    "script",
    ["trainer/train_ppo.py", "trainer/train_sft.py", "trainer/train_reward.py", "chat.py", "export.py"],
)
def test_wrong_flags_are_answered_before_torch_is_imported(script):
    """Importing torch and transformers takes seconds."""
    files = ["from", "to"] if script == "export.py" else []
    command = [sys.executable, "-X", "importtime", str(ROOT / script), "--elephant", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    *imports, line = done.stderr.strip().splitlines()
    assert (done.returncode, line) == (2, "error: --elephant: no such flag; --help all lists all flags")
    names = {name.rsplit("|", 1)[-1].strip() for name in imports}
    assert "argparse" in names
    assert not names & {"torch", "transformers", "numpy"}


def configuration(**values):
    """What config.json holds for a run that has only these flags."""
    return {
        "script": "train_ppo.py",
        "processes": 1,
        "total_steps": 4,
        "threads": 1,
        "versions": {},
        "fingerprints": {},
        **values,
    }


def test_a_flag_that_did_not_exist_does_not_stop_an_old_run():
    flags = {"old": Flag(1, int, False), "new": Flag(0.95, float, False), "free": Flag("", str, True)}
    before = configuration(old=3)
    assert check_same_run(before, configuration(old=3, new=0.95, free="x"), flags) == []
    with pytest.raises(InputError, match=r"^--new was 0\.95 and is now 0\.5; set it back"):
        check_same_run(before, configuration(old=3, new=0.5, free=""), flags)
    with pytest.raises(InputError, match=r"^--old was 3 and is now 1; set it back"):
        check_same_run(before, configuration(old=1, new=0.95, free=""), flags)


def test_sizes_are_compared_over_all_processes():
    flags = {"batch_size": Flag(8, int, False)}
    before = configuration(batch_size=8)
    assert len(check_same_run(before, configuration(batch_size=4, processes=2), flags)) == 1  # a note
    with pytest.raises(InputError, match="--batch_size was 8 and is now 16 over all processes"):
        check_same_run(before, configuration(batch_size=8, processes=2), flags)


@pytest.mark.parametrize("name", ["reward_fn", "reward_url", "reward_model"])
def test_a_reward_that_comes_or_goes_is_another_run(name):
    flags = {name: Flag("", str, True)}
    with_it, without = configuration(**{name: "x"}), configuration(**{name: ""})
    for old, new in ((with_it, without), (without, with_it)):
        with pytest.raises(InputError, match=f"^--{name} was .* set it back"):
            check_same_run(old, new, flags)
    assert check_same_run(with_it, configuration(**{name: "y"}), flags) == []  # its content is compared apart
