"""PPO fine-tuning (RLHF) of a small causal language model, in one script.

    for each step, which is one batch of responses:                        ``main``, at the end of this file
        sample           the old actor answers every prompt                rollout.py, generation/engine.py
                         --env, --tools: in several turns, which tools     environments/
                         or an environment of the user's answer
        score            the rewards score the answers                     rewards/combine.py
        evaluate_tokens  log-probs of reference and old actor; values      compute/scoring.py
        reward_tokens    scores -> rewards of tokens (- kl_coef * KL with  advantages.py
                         --kl_in reward) -> Monte-Carlo returns
                         the critic's scale follows these returns          advantages.py, ``ValueScale``
        estimate         -> advantages, whitened; returns of the critic    advantages.py
        update           for each minibatch, in all PPO epochs:
                             train the critic: vf_coef * value loss        losses.py
                             train the actor, but not in the first --critic_warmup_steps batches:
                                               clipped policy loss + kl_coef * KL to the reference
                                               (- entropy_coef * entropy) (+ ptx_coef * loss of
                                               demonstrations)
                         train: backward, clip, step                       runs/optimizer_step.py
        conclude         log, evaluate, save, stop                         session.py

What each model starts from, and why the reference never changes: models.py. The flags come first; the
algorithm begins at ``sample``. Why each thing is as it is: docs/ppo.md. What is left out on purpose:
README.md, "What is not supported".

    python trainer/train_ppo.py                                     the bundled demo, on a GPU or a CPU
    torchrun --nproc_per_node 2 trainer/train_ppo.py                on two GPUs or processes
    python trainer/train_ppo.py --model DIR_OR_PTH --reward_model DIR --data_path prompts.jsonl
    python trainer/train_ppo.py --offline_data_path pairs.jsonl     logged answers instead of samples
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import (
    DTYPES,
    FlagParser,
    add_data_flags,
    add_machine_flags,
    add_model_flags,
    add_output_flags,
    path,
)

# What ``--help`` shows; ``--help all`` shows all.
COMMON = """
    model hidden_size lora_r data_path eval_data_path max_seq_len reasoning reward_model reward_fn
    num_generations batch_size max_gen_len env tools epochs max_steps mini_batch_size learning_rate
    advantage kl_coef dtype device out_dir run_name resume eval_interval tracker"""

# Why flags exclude others, as declared with them below: {a flag, or "flag=value": why}.
LOGGED = {"offline_data_path": "nothing is sampled: prompts, answers and scores are those of that file"}
NO_CRITIC = {"advantage": "it has no critic"}
COMPARING = ("advantage=rloo", "advantage=group")
NO_GROUPS = dict.fromkeys(COMPARING, "logged answers are not in groups; use gae or reinforce")
NO_GSPO = {"policy_loss=gspo": "the ratio to the reference soon leaves so narrow a clip for good"}
RESPONSE_LEVEL = dict.fromkeys(COMPARING, "it takes the whole response as one step")


def flag_parser() -> FlagParser:
    """All flags, in the groups of --help. Edit the defaults here, or give them on the command line. Where
    int, float or str stands in the place of the default, inputs.py, options/missing_eos.py or
    options/kl_target.py chooses it; --thinking_ratio stays off. The other keywords: ``Flag`` in flags.py.
    """
    p = FlagParser(description=__doc__, common=COMMON)
    add = p.add
    switch = partial(add, choices=[0, 1])
    add_sampled = partial(add, not_with=LOGGED)  # of answers that the policy samples
    add_critic = partial(add, not_with=NO_CRITIC)
    add_model_flags(
        p, "policy (without --model and --hidden_size: the bundled demo)", "N: out/full_sft_N.pth"
    )
    switch("--use_moe", 0, "1: load the _moe checkpoint", may_change=True)
    add("--lora_r", 0, "rank of LoRA adapters; 0: every weight trains")
    p.group("data")
    add_sampled("--data_path", path, "prompts: a file, or a hub name")
    add("--eval_data_path", path, "held-out prompts")
    add("--ptx_data_path", path, "demonstrations to mix in")
    add("--offline_data_path", path, "logged answers: no sampling", not_with=NO_GROUPS | NO_GSPO)
    add_data_flags(p, "prompts")
    add(
        "--thinking_ratio",
        float,
        "share of the prompts that are rendered with thinking",
        at_most=1,
        off=None,
        not_with=LOGGED | {"chat_template_kwargs": "it sets the template's switches too"},
    )
    p.group("reward: the sum of what is given")
    switch("--reasoning", int, "1: reward <think> and <answer>; default: if used")
    add_sampled("--thinking_reward", 0.0, "times MiniMind's points for a thought; 1 is usual")
    add_sampled("--reward_model", [], "PATH, or PATH=WEIGHT …", type=path)
    add("--reward_dtype", "auto", "of its weights; auto: as the checkpoint's", choices=DTYPES)
    add("--reward_template", "", "text with {prompt}, {response}, {eos} that reward models read")
    switch("--merge_history", 0, "1: reward models get a prompt's messages as one, as MiniMind's")
    add_sampled("--reward_fn", [], "functions of yours: path.py:function, or f.py:g=WEIGHT …", type=path)
    add_sampled("--reward_url", "", "a server that scores; docs/rewards.md", may_change=True)
    add("--reward_timeout", 600.0, "seconds for a call of --reward_fn, _url, --env, --tools", may_change=True)
    add("--eval_reward_model", [], "only evaluates", type=path)
    add("--eval_reward_fn", [], "only evaluates: path.py:function …", type=path)
    add_sampled(
        "--missing_eos_penalty",
        float,
        "what a response without an EOS loses; default: the spread of the scores",
    )
    add_sampled("--overlong_buffer", 0, "tokens before --max_gen_len in which each costs more")
    add_sampled(
        "--overlong_penalty",
        1.0,
        "what a response of --max_gen_len tokens loses",
        needs="overlong_buffer",
        off=(0, 1.0),
    )
    add_sampled("--repetition_penalty", 0.0, "largest penalty for repeated trigrams")
    add_sampled("--length_reward", 0.0, "added for 20 to 800 characters, else subtracted")
    switch("--normalize_reward", 0, "1: by running mean and standard deviation", not_with=LOGGED)
    p.group("rollout")
    add_sampled("--num_generations", 1, "responses to each prompt", at_least=1, off=1)
    add("--batch_size", int, "responses per step and process [128]", at_least=1)
    add("--max_gen_len", 64, "longest response in tokens", at_least=1)
    add_sampled("--min_gen_len", 0, "shortest response, its EOS counted")
    add("--stop", [], "a response ends there; rewards see what is before")
    add("--stop_token_ids", [], "ids that end a response as the EOS does", type=int)
    add("--temperature", 1.0, "of sampling and of every log-prob", at_least=0.01, at_most=100)
    add_sampled("--env", path, "several turns with a class of yours: path.py:Class; environments.md")
    add_sampled("--tools", [], "functions that the policy may call: path.py:f,g …", type=path)
    add_sampled("--max_turns", 8, "turns of a response, with --env or --tools", at_least=1, off=8)
    p.group("PPO")
    add("--epochs", 1, "passes over the prompts", at_least=1)
    add_sampled("--replay_batches", 0, "older batches to learn from again")
    add("--max_steps", 0, "stop after so many batches; 0: by --epochs")
    add("--ppo_epochs", 1, "passes over each batch", at_least=1)
    add("--mini_batch_size", int, "sequences per update and process [32]", at_least=1)
    add("--accumulation_steps", 1, "saves memory", at_least=1, may_change=True)
    add("--learning_rate", float, "actor's peak; default: by its size", above=0, at_most=1)
    add_critic("--critic_learning_rate", float, "critic's peak; default: by its size", above=0, at_most=1)
    add("--grad_clip", 1.0, "largest gradient norm, of each model on its own", above=0)
    add("--lr_schedule", "cosine", "of the learning rates", choices=["cosine", "constant"])
    add("--lr_warmup_steps", 0, "batches in which the rates rise")
    add("--policy_loss", "clip", "PPO's, or CISPO's or GSPO's", choices=["clip", "cispo", "gspo"], off="clip")
    add("--clip_epsilon", float, "clip below and above 1; default: by --policy_loss", above=0, at_most=1)
    add("--clip_epsilon_high", float, "the clip above 1; default: by --policy_loss", above=0)
    add(
        "--dual_clip",
        0.0,
        "a bad token counts at most X times; 0: no limit",
        not_with={"policy_loss=cispo": "its clip limits every token"},
    )
    add_sampled("--mask_truncated", 0, "1: the policy does not learn from cut answers", choices=[0, 1])
    add("--importance_cap", 2.0, "largest training / sampling probability; 0: off")
    add(
        "--advantage",
        "gae",
        "all but gae need no critic: algorithms.md",
        choices=["gae", "rloo", "group", "reinforce"],
        off="gae",
        needs={"rloo": "num_generations", "group": "num_generations"},
    )
    add_sampled(
        "--filter_groups",
        0,
        "up to N times: sample again where a prompt's answers score alike",
        needs="num_generations",
    )
    add_critic("--vf_coef", 0.5, "weight of the value loss", off=(0, 0.5))
    add_critic("--cliprange_value", 0.5, "clip of a value, in stds of returns; 0: none", off=(0, 0.5))
    add("--kl_coef", 0.02, "weight of the KL to the reference: reward per nat")
    add(
        "--kl_in",
        str,
        "k2 in the loss, or k1 taken off the rewards; default: reward with rloo, else loss",
        choices=["loss", "reward"],
        off="loss",
        not_with=LOGGED | {"advantage=group": "it has the KL in the loss"},
    )
    add_sampled(
        "--kl_target",
        0.0,
        "nats a response: moves --kl_coef to keep it; not --target_kl; 0: off",
        needs="kl_coef",
    )
    add_sampled(
        "--kl_horizon",
        int,
        "responses; longer: it moves slower [4 batches]",
        at_least=1,
        at_most=10**9,
        needs="kl_target",
    )
    add("--target_kl", 0.0, "the actor's updates of a batch end at this KL to the old one; not --kl_target")
    add("--entropy_coef", 0.0, "bonus on the policy's entropy: reward per nat")
    add_sampled("--entropy_top", 1.0, "share of tokens that learn; 1: all", above=0, at_most=1, off=1.0)
    add("--gamma", 1.0, "discount", at_most=1, off=1.0, not_with=RESPONSE_LEVEL)
    add_critic("--lam", float, "lambda of GAE; default: by --max_gen_len", at_most=1, off=1.0)
    add_critic("--critic_lam", 1.0, "lambda of the critic's returns", at_most=1, off=1.0)
    add_critic(
        "--critic_init", "auto", "start of the critic", choices=["auto", "actor", "reward"], off="auto"
    )
    add_critic("--critic_warmup_steps", int, "first batches, in which only the critic trains [2]")
    add(
        "--ema_beta",
        0.0,
        "share of the old average kept a batch, as 0.99; 0: none",
        at_most=0.999999,
        not_with={"shard": "the average is kept of whole weights"},
    )
    add("--ptx_coef", float, "weight of --ptx_data_path's loss [0.1]", above=0, needs="ptx_data_path")
    add_sampled(
        "--update_old_actor_freq",
        1,
        "batches between two copies to the old actor",
        at_least=1,
        off=1,
    )
    add_machine_flags(p)
    switch("--shard", 0, "1: models are split over processes", may_change=True)
    switch(
        "--offload_frozen",
        0,
        "1: frozen models leave the GPU",
        may_change=True,
        not_with={"shard": "frozen models are shared out instead"},
    )
    add_output_flags(p, interval=20)
    add(
        "--best_metric",
        "",
        "says which weights are best; default: judge, environment, function, accuracy or score",
        may_change=True,
    )
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)  # ``main`` parses them again

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from dataset.lm_dataset import permutation
from progress_bar import phase
from trainer import advantages, losses
from trainer.compute.batch import Batch
from trainer.compute.batching import send
from trainer.compute.scoring import score_all
from trainer.flags import Flags
from trainer.generation.sampling import noise_keys
from trainer.inputs import complete_flags
from trainer.models import Models
from trainer.options.filter_groups import sample_again
from trainer.options.offline import logged_batch
from trainer.options.option import Option
from trainer.run import PpoRun
from trainer.runs.distributed import World
from trainer.runs.metrics import Loss, Metrics, Seconds
from trainer.runs.optimizer_step import GradientSource, Step, Updater
from trainer.session import open_session
from trainer.step_metrics import batch_metrics, rows_of_step, step_metrics


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    return complete_flags(flag_parser().parse_args(argv))


# -------------------------------------------------------------------------- prompts -> responses -> scores
# Each phase fills fields of the batch, in the order of ``Batch`` (compute/batch.py). Running statistics of
# rewards and advantages follow each batch. No phase before ``update`` changes a weight, but for the critic's
# fit, which stands in ``main``.


def sample(run: PpoRun, step: int, records: list) -> Batch:
    """Records -> a batch of the old actor's responses, --num_generations to each, with their texts.
    --env, --tools: turn by turn, with what answers each turn in between (``in_turns`` in rollout.py).
    --offline_data_path: the answers of that file. InputError in all processes where one of them fails."""
    args = run.args
    if args.offline_data_path:
        return logged_batch(records, run.world.device)
    prompts = [prompt for prompt in records for _ in range(args.num_generations)]
    prompt, answer = np.divmod(run.positions, args.num_generations)  # [B] their places in the global batch
    noise = noise_keys(args.seed, step, prompt, answer)
    with run.world.all_or_none(), run.engine.weights_of(run.models.old_actor):
        return run.engine.respond(prompts, noise, args.temperature)


def score(run: PpoRun, step: int, batch: Batch, seconds: Seconds) -> Batch:
    """Scores of the rewards, and the rewards that belong to tokens inside a response. --filter_groups: the
    batch that comes back has other responses where all answers to a prompt have scored the same."""
    if run.args.offline_data_path:
        return batch  # the scores are those of the file
    with run.world.all_or_none():
        batch.raw = run.request_scores(run.reward, batch)
    if run.args.filter_groups:
        batch = sample_again(
            run.args,
            step,
            batch,
            world=run.world,
            engine=run.engine,
            old_actor=run.models.old_actor,
            reward=run.reward,
            request_scores=partial(run.request_scores, run.reward),
            positions=run.positions,
            seconds=seconds,
        )
    run.engine.end_turns(batch)  # --env: nothing more is asked of its objects
    # Normalised, clipped, weighed and summed. Once a batch: the statistics of --normalize_reward take it in.
    batch.parts = run.reward.combine(batch.raw, run.world)
    batch.scores = send(batch.parts["score"], batch.tokens.device)
    batch.step_rewards = advantages.step_rewards(batch, run.tokenizer)  # None without --reward_fn
    return batch


# ------------------------------------------------------------- log-probs, values -> rewards -> advantages


def evaluate_tokens(
    args: Namespace,
    step: int,
    batch: Batch,
    models: Models,
    options: list[Option],
    world: World,
    token_budget: int,
) -> Batch:
    """Log-probs of reference and old actor, the critic's values, and which tokens the policy loss is of.
    --replay_batches: in the batch that comes back the rows of older batches come first. Old actor and critic
    score them again; of the reference the log-probs are kept.
    """
    with models.host.on_device(models.old_actor, models.reference):
        if models.reference_scorer:
            batch.ref_logprobs, _ = score_all(
                batch, models.reference_scorer, token_budget, temperature=args.temperature
            )
        for option in options:
            batch = option.add_replayed(batch)
        if args.offline_data_path:
            # Nobody knows who wrote the answers: the reference is taken for that policy.
            batch.old_logprobs = batch.sampler_logprobs = batch.ref_logprobs
        elif models.sampler_has_scored(step):  # often on a CPU in fp32, or with one update a batch
            batch.old_logprobs = batch.sampler_logprobs
        else:
            batch.old_logprobs, entropy = score_all(
                batch, models.old_actor_scorer, token_budget, temperature=args.temperature
            )
    if models.value_scorer:
        [batch.values] = score_all(batch, models.value_scorer, token_budget)
    # min(pi_old / pi_sampler, --importance_cap): 1 where the sampler's log-probs are the old ones
    batch.importance_weights = losses.importance_weights(
        batch.old_logprobs, batch.sampler_logprobs, batch.action_mask, args.importance_cap
    )
    batch.loss_mask = batch.action_mask
    if args.entropy_top < 1:
        batch.loss_mask = losses.choose_tokens(args.entropy_top, entropy, batch.action_mask, world.gather)
    if args.mask_truncated:  # TRL's mask_truncated_completions; DAPO, arXiv:2503.14476, section 3.4
        batch.loss_mask = batch.loss_mask & batch.finished[:, None]
    return batch


def reward_tokens(args: Namespace, batch: Batch, kl_coef: float) -> None:
    """Scores [B] -> rewards of tokens [B, R] and their discounted sums, which values estimate."""
    penalty = None
    if args.kl_in == "reward" and kl_coef:
        k1, _, _ = losses.kl_estimators(batch.old_logprobs, batch.ref_logprobs)
        penalty = kl_coef * k1
    batch.rewards = advantages.token_rewards(
        batch.scores, batch.response_len, batch.action_mask, kl_penalty=penalty, steps=batch.step_rewards
    )
    batch.mc_returns = advantages.discounted_sums(batch.rewards, args.gamma, batch.action_order)


def estimate(
    args: Namespace, batch: Batch, has_signal: bool, scale: advantages.AdvantageScale, world: World
) -> None:
    """Rewards of tokens -> advantages, and with a critic the returns that it learns, all [B, R].

    Advantages of GAE and REINFORCE are taken less their mean, and divided by their standard deviation; RLOO's
    by ``group_spread``, GRPO's each by the standard deviation of its group. A batch without signal is divided
    by another size (``AdvantageScale``). has_signal: ``scores_differ`` of the batch.
    """
    rewards = batch.rewards
    mask = batch.action_mask
    order = batch.action_order
    group_size = args.num_generations
    if args.advantage == "gae":
        unwhitened, _ = advantages.gae(rewards, batch.values, mask, args.gamma, args.lam, order)
        # The critic's returns have a lambda of their own.
        _, batch.returns = advantages.gae(rewards, batch.values, mask, args.gamma, args.critic_lam, order)
        unwhitened, std = advantages.centred(unwhitened, mask, world.sum)
    elif args.advantage == "reinforce":
        unwhitened, std = advantages.centred(batch.mc_returns, mask, world.sum)
    elif args.advantage == "rloo":
        unwhitened = advantages.leave_one_out(rewards, mask, group_size)
        std = advantages.group_spread(unwhitened, batch, group_size, world.sum)
    else:  # GRPO
        unwhitened, group_std = advantages.group_normalized(rewards, mask, group_size)
        std = advantages.group_spread(group_std, batch, group_size, world.sum)
    scale.whiten(batch, unwhitened, std, has_signal, divided=args.advantage == "group")


# --------------------------------------------------------------------------------------- losses and steps
# Each loss is a sum over tokens, divided by the tokens of the whole minibatch over all processes; the
# load-balancing loss of experts by its sequences. So micro-batches and processes only have to be added up.


class Minibatch(NamedTuple):
    """The sequences of an optimizer step."""

    batch: Batch  # those of this process
    tokens: float  # their action tokens, over all processes
    sequences: int  # over all processes
    number: int  # of the optimizer step in the run


def critic_loss(args: Namespace, models: Models, minibatch: Minibatch, rows: list[int]) -> Loss:
    """A micro-batch's share of the minibatch's value loss -> (loss, Metrics). ``--vf_coef`` matters only
    where --grad_clip binds: AdamW divides the scale of a gradient out again."""
    assert models.critic and models.value_scorer
    mb = minibatch.batch.rows(rows, models.value_scorer.shares_prompts)
    metrics = Metrics()
    # aux_loss: the load-balancing loss of experts, 0 for other models
    values, aux_loss = models.value_scorer(mb.tokens, mb.layout)
    loss, info = losses.value_loss(
        values,
        mb.values,
        mb.returns,
        mb.action_mask,
        cliprange=args.cliprange_value,
        scale=models.critic.scale,
    )
    metrics.add_all(info, count=mb.action_mask.sum())
    metrics.add("value/balance_loss", aux_loss, len(mb.tokens))
    return args.vf_coef * loss / minibatch.tokens + aux_loss / minibatch.sequences, metrics


def actor_loss(
    args: Namespace, models: Models, kl_coef: float, minibatch: Minibatch, rows: list[int]
) -> Loss:
    """A micro-batch's share of the minibatch's loss of the actor -> (loss, Metrics).

    (policy loss + (kl_coef * KL - entropy_coef * entropy) / advantage_scale) / tokens + aux loss of experts /
    sequences. With --kl_in reward the advantages contain the KL as it was before the updates
    (``reward_tokens``), and ``policy_loss`` takes off what the updates have added to the KL since.
    """
    mb = minibatch.batch.rows(rows, models.actor_scorer.shares_prompts)
    metrics = Metrics()
    logprobs, entropy, aux_loss = models.actor_scorer(mb.tokens, mb.layout, args.temperature)
    mask = mb.action_mask
    if models.single_update:  # the actor is still the old one, so its forward gives the old log-probs
        old = logprobs.detach()
        weights = losses.importance_weights(old, mb.sampler_logprobs, mask, args.importance_cap)
        mb = replace(mb, old_logprobs=old, importance_weights=weights)
    # The advantages were divided by their scale. KL and entropy are divided by that scale too, so that
    # --kl_coef stays in reward units.
    kl_weight = kl_coef / mb.advantage_scale
    loss, info = losses.policy_loss(
        logprobs,
        mb,
        low=args.clip_epsilon,
        high=args.clip_epsilon_high or args.clip_epsilon,
        dual=args.dual_clip,
        kind=args.policy_loss,
        kl_in_reward=kl_weight if args.kl_in == "reward" else 0.0,
        decay=args.gamma * args.lam,  # of that KL, as in the advantages
    )
    if args.kl_in == "loss" and kl_weight:
        loss = loss + kl_weight * losses.kl_loss(logprobs, mb)
    total_entropy = losses.masked_sum(entropy, mask)
    if args.entropy_coef:
        loss = loss - args.entropy_coef / mb.advantage_scale * total_entropy
    metrics.add_all({**info, "policy/entropy": total_entropy}, count=mask.sum())
    metrics.add("policy/balance_loss", aux_loss, len(mb.tokens))
    return loss / minibatch.tokens + aux_loss / minibatch.sequences, metrics


def train_critic(
    args: Namespace, models: Models, updater: Updater, minibatch: Minibatch, metrics: Metrics
) -> Step:
    """An optimizer step of the critic: backward, sum over processes, clip, step."""
    assert models.value_scorer
    layout = minibatch.batch.layout
    loss_of = partial(critic_loss, args, models, minibatch)
    source = GradientSource(layout.lengths, loss_of, models.value_scorer.beginnings(layout))
    measured = updater.gradients([source], args.accumulation_steps)
    metrics.merge(measured)
    [total_loss] = measured.sums(["value/loss"], updater.world)
    return take_step(updater, "critic", "value", total_loss, minibatch.number, metrics)


def train_actor(
    args: Namespace,
    models: Models,
    updater: Updater,
    minibatch: Minibatch,
    metrics: Metrics,
    kl_coef: float,
    options: list[Option],
) -> Step | None:
    """An optimizer step of the actor. None, without a step, where ``--target_kl`` stops the actor."""
    layout = minibatch.batch.layout
    loss_of = partial(actor_loss, args, models, kl_coef, minibatch)
    sources = [GradientSource(layout.lengths, loss_of, models.actor_scorer.beginnings(layout))]
    sources += filter(None, (option.further_loss(minibatch.number) for option in options))
    measured = updater.gradients(sources, args.accumulation_steps)
    metrics.merge(measured)
    metrics.keep_first("policy/ratio", "policy/first_ratio")  # of the first minibatch: it must be 1
    total_loss, total_kl = measured.sums(["policy/loss", "policy/approx_kl"], updater.world)
    stopped = 0 < args.target_kl < total_kl / minibatch.tokens
    metrics.add("policy/early_stop", stopped)
    if stopped:
        updater.forget_gradients()  # no step: momentum must not move the weights either
        return None
    return take_step(updater, "actor", "policy", total_loss, minibatch.number, metrics)


def take_step(
    updater: Updater, name: str, metric_prefix: str, total_loss: float, number: int, metrics: Metrics
) -> Step:
    """Sum the gradients over processes, clip, step -> the ``Step``. metric_prefix: "policy" or "value"."""
    step = updater.step(name, total_loss, number)
    metrics.add("policy/skipped_steps", not step.finite)
    if step.finite:
        metrics.add(f"{metric_prefix}/grad_norm", step.norm)
    metrics.add(f"{metric_prefix}/learning_rate", updater.train_states[name].learning_rate(number))
    return step


def minibatch_rows(batch_size: int, mini_batch_size: int, group_size: int) -> list[list[int]]:
    """[the local rows of each minibatch of a batch]. Over all processes a minibatch is the same set of
    positions, whatever their number is.

    The responses to a prompt go into as many minibatches as can be: with a critic, four responses in one
    minibatch ended at 0.80 on the demo, in four minibatches at 0.95 (docs/log.md). Both ``group_size`` and
    ``mini_batch_size`` must divide ``batch_size``.
    """
    spread = math.gcd(batch_size // mini_batch_size, group_size)
    rows = mini_batch_size * spread  # of the prompts that share their minibatches
    return [
        [row for row in range(first, first + rows) if row % group_size % spread == part]
        for first in range(0, batch_size, rows)
        for part in range(spread)
    ]


def minibatch_order(step: int, older: int, count: int, epochs: int, seed: int) -> list[int]:
    """What step ``step`` learns from: numbers of minibatches, ``count`` * ``epochs`` of them.

    The step's own batch and up to ``older`` ones before it have ``count`` minibatches each, numbered from the
    oldest batch on. A batch's minibatches are in an order of their own, for each PPO epoch another. Each step
    in which the batch is kept takes the next few of them, so their uses differ by one at most.
    """
    total = count * epochs

    def share(born: int, now: int) -> int:
        """How many of a batch's minibatches a step takes; over all batches ``total``."""
        age = now - born
        batches = min(now, older) + 1
        return -(-(age + 1) * total // batches) + (-age * total // batches)

    places = []
    oldest = max(0, step - older)
    for born in range(oldest, step + 1):
        first = sum(share(born, now) for now in range(born, step))
        taken = share(born, step)
        for number in range(first, first + taken):
            epoch, place = divmod(number, count)
            minibatch = int(permutation(count, seed, born * epochs + epoch)[place])
            places.append(((number - first + 0.5) / taken, (born - oldest) * count + minibatch))
    return [minibatch for _, minibatch in sorted(places)]  # the batches take turns


def cut_into_minibatches(args: Namespace, step: int, batch: Batch, world: World) -> list[Minibatch]:
    """The minibatches of a step, in the order of their optimizer steps. A batch is cut once; each PPO epoch
    takes the minibatches in another order (``minibatch_order``). With --replay_batches, minibatches of
    replayed batches and of the new one take turns."""
    rows_of_minibatch = minibatch_rows(args.batch_size, args.mini_batch_size, args.num_generations)
    starts = range(0, len(batch.tokens), args.batch_size)  # of the replayed batches and the new one
    cut = [batch.rows([start + row for row in rows]) for start in starts for rows in rows_of_minibatch]
    tokens = world.sum(torch.stack([mb.action_mask.sum() for mb in cut])).clamp(min=1).tolist()
    count = len(rows_of_minibatch)
    order = minibatch_order(
        step, older=args.replay_batches, count=count, epochs=args.ppo_epochs, seed=args.seed
    )
    sequences = args.mini_batch_size * world.size
    first = step * args.ppo_epochs * count  # optimizer steps before this batch
    return [Minibatch(cut[k], tokens[k], sequences, number) for number, k in enumerate(order, first)]


def update(
    args: Namespace,
    step: int,
    batch: Batch,
    models: Models,
    updater: Updater,
    metrics: Metrics,
    kl_coef: float,
    options: list[Option],
) -> None:
    """PPO epochs over a batch. In each minibatch the critic steps first, then the actor: only one model's
    gradients are in memory. Above --target_kl the actor stops for the rest of the batch; the critic goes on:
    its loss has no KL."""
    minibatches = cut_into_minibatches(args, step, batch, updater.world)
    actor_trains = step >= args.critic_warmup_steps
    with phase("updates", len(minibatches), "minibatches") as bar:
        for minibatch in minibatches:
            steps: list[Step | None] = []
            if models.critic:
                steps.append(train_critic(args, models, updater, minibatch, metrics))
            if actor_trains:
                steps.append(train_actor(args, models, updater, minibatch, metrics, kl_coef, options))
                actor_trains = steps[-1] is not None  # None: --target_kl
            taken = [done for done in steps if done]
            if not taken:  # the actor has stopped, and there is no critic
                break
            updater.after_minibatch(taken)
            bar.update()


# ------------------------------------------------------------------------------------------------ the loop


def main(argv: Sequence[str] | None = None) -> None:
    with open_session(PpoRun, parse_args(argv)) as session:  # a new run, or one as its checkpoint left it
        run = session.run
        world = session.world
        args = run.args
        models = run.models
        options = run.options
        for step in session.steps():
            seconds = Seconds()
            with session.nothing_learned():  # a wrong record or reward: the run is saved, then it ends
                with seconds.of("rollout"):
                    rollout = sample(run, step, session.records(step))
                with seconds.of("reward"):
                    rollout = score(run, step, rollout, seconds)
                with seconds.of("score"):  # --replay_batches: in ``batch`` older rollouts come first
                    batch = evaluate_tokens(
                        args, step, rollout, models, options, world, run.progress.token_budget
                    )
                    for option in options:
                        option.before_estimate(step, batch)
            with seconds.of("score"):
                reward_tokens(args, batch, run.kl.coef)
                has_signal = advantages.scores_differ(batch, world.sum)
                if models.critic:  # this changes the critic: its scale, with the first batch its values too
                    run.value_scale.fit(batch, has_signal, world.sum)
                estimate(args, batch, has_signal, run.advantage_scale, world)
                metrics = batch_metrics(
                    args, batch.newest(args.batch_size), models.critic, run.kl.coef, world
                )
            with seconds.of("update"):
                update(args, step, batch, models, run.updater, metrics, run.kl.coef, options)
                for option in options:
                    option.after_step(step, rollout)
                models.refresh(step)  # the old actor, where it is not the actor itself
            means = step_metrics(args, rollout, run.reward, metrics, seconds, world)
            session.conclude(means, rows_of_step(rollout, world))


if __name__ == "__main__":
    run_script(main)
