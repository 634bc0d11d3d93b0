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
from trainer.peer_flags import NOT_HERE, PEER_FLAGS, reason_of
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


OF_STAGES = {"accumulation_steps", "use_moe"}  # PPO has these, stages 1 and 2 answer them

# The names that are no flags of ours, and are fields of their own of TRL 1.16's configs, by the script that
# has most of them; then those of MiniMind's scripts.
NAMES = {
    ("GRPOConfig, RLOOConfig", train_ppo): """
        lr_scheduler_kwargs use_liger_kernel torch_empty_cache_steps logging_steps bf16 model_init_kwargs
        router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 remove_unused_columns num_generations_eval
        max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
        generation_batch_size steps_per_generation top_p top_k min_p generation_kwargs cache_implementation
        use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
        vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
        vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations
        epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
        vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
        scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps top_entropy_quantile use_adaptive_entropy entropy_coef_min entropy_coef_max
        entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
        num_completions_to_print log_unique_prompts log_completions_hub_repo
        use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
        vllm_importance_sampling_cap normalize_advantages reward_clip_range""",
    ("ModelConfig", train_ppo): """
        model_name_or_path model_revision attn_implementation use_peft lora_alpha lora_dropout
        lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora
        load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage""",
    ("SFTConfig", train_sft): """
        model_init_kwargs router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs
        dataset_config dataset_streaming ignore_bias_buffers
        dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy
        padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss
        activation_offloading pad_token""",
    ("RewardConfig", train_reward): """
        model_init_kwargs chat_template_path disable_dropout dataset_num_proc eos_token max_length
        pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token""",
    ("MiniMind's PPO, GRPO, agent and LoRA", train_ppo): """
        save_dir save_weight from_weight from_resume reward_model_path ppo_update_iters early_stop_kl
        debug_mode debug_interval debug_log_ratio use_compile rollout_engine sglang_base_url
        sglang_model_path sglang_shared_path max_total_len lora_name lora_weight load_from""",
    ("MiniMind's SFT", train_sft): "save_dir save_weight from_weight from_resume use_compile use_moe "
    "accumulation_steps lora_name",
}


@pytest.mark.parametrize(
    ("script", "names"), [(s, n) for (_, s), n in NAMES.items()], ids=[a for a, _ in NAMES]
)
def test_each_name_of_trls_and_minimind_gets_an_answer_of_its_own(script, names):
    for name in names.split():
        line = refused("", script.flag_parser().parse_args, [f"--{name}", "1"])
        assert re.search(r": (it is called --\w+ here|not a flag here: [\w-])", line), line


def test_whole_names_come_before_patterns_and_the_longest_pattern_first():
    assert "the whole distribution" in reason_of("vllm_structured_outputs_regex")
    assert "--importance_cap" in reason_of("vllm_importance_sampling_mode")
    assert "sample the responses themselves" in reason_of("vllm_server_host") == reason_of("use_vllm")
    patterns = {name: reason for name, reason in NOT_HERE.items() if "*" in name}
    assert len(patterns) > 10
    for flag in set(FLAGS) - OF_STAGES:  # nor does a typing error of ours get the reason of a pattern
        assert not reason_of(flag) and reason_of(f"{flag}x") not in patterns.values()


def says(name):
    return NOT_HERE.get(name) or PEER_FLAGS[name]


def test_names_of_other_trainers_are_answered():
    known = [*PEER_FLAGS, *NOT_HERE]
    assert len(known) > 150 and {ours for ours, *_ in PEER_FLAGS.values()} <= set(FLAGS)
    assert set(known) & set(FLAGS) == OF_STAGES and not set(NOT_HERE) & set(PEER_FLAGS)
    assert not [x for x in known for ending in known if x.endswith(f".{ending}") and says(x) == says(ending)]
    for name in set(known) - OF_STAGES:
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
    mask_truncated missing_eos_penalty env tools max_turns"""
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
