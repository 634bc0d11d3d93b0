"""Command-line flags: each number has a range; wrong flags and other trainers' names give one error line."""

import math
import re
import subprocess
import sys

import pytest
from tiny import ROOT, refused

from errors import InputError
from trainer import train_ppo, train_reward, train_sft
from trainer.flags import Flag, FlagParser, path
from trainer.peer_flags import NOT_HERE, PEER_FLAGS
from trainer.runs.resume import check_same_run

SCRIPTS = {"ppo": train_ppo, "sft": train_sft, "reward": train_reward}
PARSER = train_ppo.flag_parser()
FLAGS = PARSER.flags


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--count", "11"], "--count 11: must be at most 10"),
        (["--rate", "0"], "--rate 0.0: must be above 0"),
        (["--rate", "nan"], "--rate nan: must be at most 1"),
        (["--size", "-1"], "--size -1: must be at least 0"),  # where nothing is said
        (["--weight", "-0.5"], "--weight -0.5: must be at least 0"),
        (["--weight", "inf"], "--weight inf: must be at most 1000000"),
        (["--count", "x"], "argument --count: invalid int value: 'x'; --help all lists all flags"),
        (["--cuont", "3"], "--cuont: no such flag; did you mean --count? --help all lists all flags"),
        (["--elephant"], "--elephant: no such flag; --help all lists all flags"),
        (["--cou", "3"], "--cou: no such flag; did you mean --count? --help all lists all flags"),
        (["--file", ""], "--file: its value is empty; give one, or leave the flag out"),
        (["--file="], "--file: its value is empty; give one, or leave the flag out"),
        (["3"], "3: not expected here; flags begin with --, --help all lists them"),
    ],
)
def test_a_wrong_flag_is_one_line(argv, line):
    p = FlagParser("a test")
    p.group("numbers")
    p.add("--count", 3, "a number", at_least=1, at_most=10)
    p.add("--rate", 0.5, "another", above=0, at_most=1)
    p.add("--size", 3, "how many")
    p.add("--weight", 0.5, "how much")
    p.add("--file", path, "one")
    p.add("--stop", [], "some")
    assert p.parse_args(["--stop", "a", "b", "--stop", "c"]).stop == ["a", "b", "c"]
    assert refused("", p.parse_args, argv) == line


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_number_of_the_scripts_is_checked(script):
    numbers = [flag for flag in script.flag_parser().flags.values() if flag.kind is float]
    assert len(numbers) >= 4
    for flag in numbers:
        assert flag.at_most < math.inf and max(flag.at_least, flag.above) >= 0


def says(name):
    return NOT_HERE.get(name) or PEER_FLAGS[name]


def test_names_of_other_trainers_are_answered():
    known = [*PEER_FLAGS, *NOT_HERE]
    assert len(known) > 150 and {ours for ours, *_ in PEER_FLAGS.values()} <= set(FLAGS)
    assert not set(known) & set(FLAGS) and not set(NOT_HERE) & set(PEER_FLAGS)
    assert not [x for x in known for ending in known if x.endswith(f".{ending}") and says(x) == says(ending)]
    for name in known:
        line = line_of(**{name: 1})
        if name in NOT_HERE:
            assert f"not a flag here: {NOT_HERE[name]}" in line
        else:
            ours, *value = PEER_FLAGS[name]
            assert line.endswith(f"is called --{ours} here" + "".join(f" (value: {x})" for x in value))


@pytest.mark.parametrize(
    ("script", "word", "line"),
    [
        (train_ppo, "actor_rollout_ref.actor.optim.lr=1e-6", "it is called --learning_rate here"),
        (train_ppo, "critic.optim.lr=1e-5", "it is called --critic_learning_rate here"),
        (train_ppo, "+algorithm.kl_ctrl.kl_coef=0.001", "it is called --kl_coef here"),
        (train_ppo, "algorithm.kl_ctrl.target_kl=6", "it is called --kl_target here"),  # not --target_kl
        (train_ppo, "data.train_batch_size=64", "not a flag here: --batch_size counts answers of a process"),
        (train_ppo, "--actor.eps_clip", "it is called --clip_epsilon here"),
        (train_ppo, "actor.policy_loss.loss_mode=gspo", "it is called --policy_loss here (value: clip, cis"),
        (train_ppo, "--actor.elephant", "no such flag; "),
        (train_ppo, "algorithm.elephant=1", "not expected here; "),
        (train_ppo, "kl_coef=0.1", "not expected here; "),
        (train_ppo, "--advantage=grpo", "invalid choice: 'grpo' (choose from 'gae', 'rloo', 'group', 'reinf"),
        (train_ppo, "--kl_target", "expected one argument; "),
        (train_reward, "--reference", "not a flag here: leave it out, scores are centred on"),
        (train_sft, "--save_steps", "it is called --save_interval here"),
        (train_sft, "--kl_estimator", "no such flag; "),  # the reason names a flag of PPO
    ],
)
def test_names_with_dots_other_scripts_and_wrong_values_are_answered_too(script, word, line):
    with pytest.raises(InputError) as caught:
        script.parse_args([word])
    name = word.split("=")[0]
    start = f"argument {name}: " if line.startswith(("invalid", "expected")) else f"{name}: "
    assert str(caught.value).startswith(start + line)


ASKING = {"advantage": "reinforce", "kl_in": "reward", "critic_init": "actor", "critic_warmup_steps": 1}


def asking(name):
    """A value with which the flag asks for something, and which is not its default."""
    flag = FLAGS[name]
    if name in ASKING:
        return ASKING[name]
    return flag.off + 1 if flag.kind is int else 0.25 if flag.kind is float else "x"


def off(name):
    return "" if FLAGS[name].kind in (path, str) and FLAGS[name].off == 0 else FLAGS[name].off


def line_of(**values):
    """The error line of these flags, "" if there is none."""
    try:
        PARSER.parse_args([f"--{name}={value}" for name, value in values.items() if value != ""])
    except InputError as error:
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
    """Those runs would crash, or compute something else."""
    mine = asking(name)
    theirs = value or asking(other)
    groups = {"num_generations": 2} if theirs in ("rloo", "group") else {}  # it needs them
    wanted = f"--{name} {mine}: not with --{other} {theirs}: {why}; leave one of them out"
    assert line_of(**{name: mine, other: theirs, **groups}) == wanted
    if off(name) is not None:  # what is the case anyway is not refused
        assert "not with" not in line_of(**{name: off(name), other: theirs})


@pytest.mark.parametrize(("name", "value", "needed"), NEEDED)
def test_a_flag_that_is_of_no_use_alone_names_what_it_needs(name, value, needed):
    value = value or asking(name)
    line = line_of(**{name: value, needed: off(needed)})
    assert line == f"--{name} {value}: is of use only with --{needed}; set that too"
    assert line_of(**{name: value, needed: asking(needed)}) == ""
    p = train_ppo.flag_parser()
    p.set_defaults(**{name: value})  # an edited default
    argv = [] if off(needed) == "" else [f"--{needed}={off(needed)}"]
    refused(f"--{name} {value}: is of use only with --{needed}", p.parse_args, argv)


OFFLINE = """data_path thinking_ratio thinking_reward reward_model reward_fn reward_url overlong_buffer
    overlong_penalty repetition_penalty length_reward normalize_reward num_generations min_gen_len
    replay_batches filter_groups kl_in kl_target kl_horizon entropy_top update_old_actor_freq
    mask_truncated missing_eos_penalty"""
WITHOUT_CRITIC = """critic_learning_rate vf_coef cliprange_value lam critic_lam critic_init
    critic_warmup_steps gamma kl_in offline_data_path"""


def test_flags_that_were_refused_still_are():
    """A declaration that gets lost would be lost in the tests above, too."""
    found = {}
    for name, other, _, _ in EXCLUDED:
        found.setdefault(other, set()).add(name)
    wanted = {"offline_data_path": OFFLINE, "advantage": WITHOUT_CRITIC, "shard": "ema_beta offload_frozen"}
    wanted |= {"policy_loss": "dual_clip offline_data_path", "chat_template_kwargs": "thinking_ratio"}
    assert found == {other: set(names.split()) for other, names in wanted.items()}
    assert len(NEEDED) == 7


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_what_people_set_and_help_all_groups_and_defaults(script, capsys):
    for more in ([], ["all"]):
        with pytest.raises(SystemExit) as ended:
            SCRIPTS[script].parse_args(["--help", *more])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        shown = re.findall(r"^  --(\w+)", out, re.MULTILINE)
        assert {"model", "data_path", "learning_rate", "resume"} <= set(shown)
        assert "--help all" in out
        if not more:
            assert 15 <= len(shown) <= 27
    assert set(shown) == set(SCRIPTS[script].flag_parser().flags)
    groups = {"data:", "machine:", "output:"} | ({"PPO:", "rollout:"} if script == "ppo" else set())
    assert groups <= {line.strip() for line in out.splitlines()}
    assert "[42]" in out and out.count("[0]") >= 3  # zeros are defaults as well
    assert "at 0x" not in out


@pytest.mark.parametrize(
    "script", ["train_ppo.py", "train_sft.py", "train_reward.py", "chat.py", "export.py"]
)
def test_wrong_flags_are_answered_before_torch_is_imported(script):
    """Importing torch and transformers takes seconds. Scripts also run in their own folder."""
    files = ["from", "to"] if script == "export.py" else []
    command = [sys.executable, "-X", "importtime", script, "--elephant", *files]
    folder = ROOT / "trainer" if "train" in script else ROOT
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    *imports, line = done.stderr.strip().splitlines()
    assert (done.returncode, line) == (2, "error: --elephant: no such flag; --help all lists all flags")
    names = {name.rsplit("|", 1)[-1].strip() for name in imports}
    assert "argparse" in names
    assert not names & {"torch", "transformers", "numpy"}


OF_FIELDS = {"data": "x", "fingerprints": {"data": "now", "data level": "before"}}
OF_DATA = {"data": "x", "reasoning": 0, "fingerprints": {"data": "before"}}


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ({"old": 3}, {"old": 3, "new": 0.95, "free": "x"}, None),  # flags that did not exist
        ({"old": 3}, {"old": 3, "new": 0.5}, r"--new was 0\.95 and is now 0\.5; set it back"),
        ({"old": 3}, {"old": 1}, "--old was 3 and is now 1; set it back"),
        ({"batch_size": 8}, {"batch_size": 4, "processes": 2}, None),  # sizes of all processes
        ({"batch_size": 8}, {"batch_size": 8, "processes": 2}, "--batch_size was 8 and is now 16 over"),
        ({"reward_fn": "x"}, {"reward_fn": "y"}, None),  # its content is compared apart
        ({"reward_fn": "x"}, {"reward_fn": ""}, "--reward_fn was .* set it back"),
        ({"reward_model": "x"}, {"reward_model": ""}, "--reward_model was .* set it back"),
        ({"reward_url": ""}, {"reward_url": "x"}, "--reward_url was .* set it back"),
        ({"reasoning": 0}, {"reasoning": 1}, "--reasoning was 0 and is now 1; set it back"),
        (OF_DATA, {"data": "y", "reasoning": 1}, "--data y does not hold what the run began with"),
        (OF_FIELDS, {"data": "y"}, r"--data y does not hold what .* \(level before, now now\)"),
        ({"data": "x", "fingerprints": {"data": "now"}}, {"data": "y"}, None),  # no function asked for it
    ],
)
def test_what_a_resumed_run_may_change(before, now, line):
    same = {"script": "train_ppo.py", "processes": 1, "total_steps": 4, "threads": 1}
    same |= {"versions": {}, "fingerprints": {"data": "now", "data level": "now"} if "data" in now else {}}
    flags = {name: Flag("", str, True) for name in ("reward_fn", "reward_url", "reward_model", "free")}
    flags |= {"batch_size": Flag(8, int, False), "old": Flag(1, int, False), "new": Flag(0.95, float, False)}
    flags |= {"reasoning": Flag(None, int), "data": Flag("", str, True)}
    flags = {name: flag for name, flag in flags.items() if name in now or name in before}
    if line is None:
        assert len(check_same_run(same | before, same | now, flags)) == ("processes" in now)  # a note
        return
    refused(f"^{line}", check_same_run, same | before, same | now, flags)
