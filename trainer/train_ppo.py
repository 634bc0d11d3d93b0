"""PPO fine-tuning (RLHF) of a small causal language model, in one script.

    for each step, which is one batch of responses:                        loop.py
        collect   the old actor answers every prompt                       collect.py, generation/engine.py
                  the rewards score the answers                            rewards/combine.py
        learn
            fill_rollout     log-probs of reference and old actor; values  compute/scoring.py
                estimate     scores -> rewards of tokens -> advantages     ppo.py, value_scale.py
            update    for each PPO epoch, for each minibatch:
                                 train the critic: vf_coef * value loss
                                 train the actor, but not in the first --critic_warmup_steps batches:
                                                   clipped policy loss + kl_coef * KL to the reference
                                                   (- entropy_coef * entropy) (+ ptx_coef * loss of
                                                   demonstrations)
                             train: backward, clip, step                   runs/optimizer_step.py
                  every --update_old_actor_freq batches the old actor becomes a copy of the actor;
                  with 1, the default, it is the actor itself
        log, evaluate, save, stop

What each model starts from, and why the reference never changes: run.py. The flags come first; the
algorithm begins at ``collect``. Why each thing is as it is: docs/ppo.md. What is left out on purpose:
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
    model tokenizer hidden_size lora_r data_path eval_data_path max_seq_len reasoning reward_model reward_fn
    num_generations batch_size max_gen_len temperature epochs max_steps mini_batch_size learning_rate
    advantage kl_coef dtype device out_dir run_name resume eval_interval tracker"""

# Why flags exclude others, as declared with them below: {a flag, or "flag=value": why}.
LOGGED = {"offline_data_path": "nothing is sampled: prompts, answers and scores are those of that file"}
NO_CRITIC = {"advantage": "it has no critic"}
COMPARING = ("advantage=rloo", "advantage=group")
NO_GROUPS = dict.fromkeys(COMPARING, "logged answers are not in groups; use gae or reinforce")
NO_GSPO = {"policy_loss=gspo": "the ratio to the reference soon leaves so narrow a clip for good"}
WHOLE = dict.fromkeys(COMPARING, "it takes the whole response as one step")


def flag_parser() -> FlagParser:
    """All flags, in the groups of --help. Edit the defaults here, or give them on the command line. Where a
    type stands in the place of the default, inputs.py chooses it. The other keywords: ``Flag`` in flags.py.
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
    add("--reward_timeout", 600.0, "seconds for --reward_fn, _url", may_change=True)
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
    add("--gamma", 1.0, "discount", at_most=1, off=1.0, not_with=WHOLE)
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
        "says which weights are best; default: judge, function, accuracy or score",
        may_change=True,
    )
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)  # ``main`` parses them again

from collections.abc import Iterator, Sequence

import torch

from dataset.data_order import minibatch_order, minibatch_rows, next_batch
from progress_bar import phase
from trainer import ppo
from trainer.collect import (
    Batch,
    Seconds,
    noise_of_step,
    raw_scores,
    respond,
    sampling_from,
    step_rewards,
)
from trainer.compute.batching import send
from trainer.compute.rollout_data import Rollout
from trainer.compute.scoring import score_all
from trainer.evaluation import evaluate_actor
from trainer.flags import Flags
from trainer.inputs import complete_flags
from trainer.loop import build_and_train
from trainer.options.filter_groups import sample_again
from trainer.options.offline import collect_logged
from trainer.options.replay import newest_rows
from trainer.run import PpoRun
from trainer.runs.displays import StepLog
from trainer.runs.metrics import Loss, Metrics
from trainer.runs.optimizer_step import (
    GradientSource,
    Step,
    gradients_that_fit,
    note_steps,
    step_if_finite,
)
from trainer.step_metrics import note_rollout, rows_of_step, step_metrics
from trainer.value_scale import is_informative


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    return complete_flags(flag_parser().parse_args(argv))


# ------------------------------------------------------------------ collect: prompts -> scored responses


def collect(run: PpoRun, step: int, batches: Iterator[list]) -> Batch:
    """The next prompts -> the old actor's responses and their scores. Nothing is learned yet.

    Raises InputError on all processes where a record or a reward of one of them fails.
    """
    args = run.args
    if run.ptx:
        run.ptx.read(step)  # the demonstrations that this step learns from as well
    if args.offline_data_path:
        return collect_logged(run.world, batches)
    seconds = Seconds()
    with seconds.of("rollout"):
        with run.world.all_or_none():  # all have read their prompts, then all sample
            # ``Prompt``s (dataset/lm_dataset.py): with the text that the chat template makes, and its ids
            prompts = [prompt for prompt in next_batch(batches) for _ in range(args.num_generations)]
            noise = noise_of_step(args, step, run.positions)  # keys [B]: each response has its own
        with run.world.all_or_none(), sampling_from(run, run.old_actor):
            batch = respond(run, prompts, noise, args.temperature)
    batch.seconds = seconds
    # ``Reward.raw_scores`` (rewards/combine.py) of prompts, texts and lengths, and of whether they have ended
    with seconds.of("reward"), run.world.all_or_none():
        batch.raw = raw_scores(run, run.reward, batch)
    if args.filter_groups:
        sample_again(run, batch, step)
    # Normalised, clipped, weighed and summed -> {part: [B], "score": [B]}. Once a batch: the statistics of
    # --normalize_reward take it in.
    batch.scores = run.reward.combine(batch.raw, run.world)
    return batch


# ------------------------------------------------------------------- learn: scored responses -> weights


def fill_rollout(run: PpoRun, step: int, batch: Batch, metrics: Metrics) -> Rollout:
    """Score a batch with reference, old actor and critic, then ``estimate`` -> the rollout, which stays fixed
    during the update; fields are filled in the order of ``Rollout``. --replay_batches puts older batches
    above it: old actor and critic score them again, of the reference the log-probs are kept."""
    args = run.args
    new = batch.rollout
    new.scores = send(batch.scores["score"], new.tokens.device)
    new.step_rewards = step_rewards(batch, run.tokenizer)  # None without --reward_fn
    # Tokens of a micro-batch: as many as in an update, for which there is memory.
    per_update = sum(new.layout.lengths) * args.mini_batch_size // (args.batch_size * args.accumulation_steps)
    budget = min(run.progress.token_budget, per_update)
    with run.host.on_device(run.old_actor, run.ref):
        if run.uses_reference:
            new.ref_logprobs, _ = score_all(
                new, run.scorers["reference"], budget, temperature=args.temperature
            )
        rollout = run.replay.join(new) if args.replay_batches else new
        if args.offline_data_path:
            # Nobody knows who wrote the answers; the reference counts as it: the ratio is actor / reference.
            rollout.old_logprobs = rollout.sampler_logprobs = rollout.ref_logprobs
        elif run.sampler_has_scored(step):  # on a CPU in fp32, or with one update a batch; seldom not
            rollout.old_logprobs = rollout.sampler_logprobs
        else:
            scorer = run.scorers["old_actor"]
            rollout.old_logprobs, entropy = score_all(rollout, scorer, budget, temperature=args.temperature)
    if run.critic:
        [rollout.values] = score_all(rollout, run.value_scorer, budget)
    # min(pi_old / pi_sampler, --importance_cap): 1 where the sampler's log-probs are the old ones
    rollout.importance_weights = ppo.importance_weights(
        rollout.old_logprobs, rollout.sampler_logprobs, rollout.mask, args.importance_cap
    )
    rollout.counted = rollout.mask  # the tokens that the policy loss is of
    if args.entropy_top < 1:
        rollout.counted = ppo.choose_tokens(args.entropy_top, entropy, rollout.mask, run.world.gather)
    if args.mask_truncated:  # TRL's mask_truncated_completions; DAPO, arXiv:2503.14476, section 3.4
        rollout.counted = rollout.counted & rollout.finished[:, None]
    if args.kl_target:  # before ``estimate``, which uses the weight of the KL
        run.kl.follow(step, newest_rows(rollout, args.batch_size), run.world.sum)
    estimate(run, rollout)
    note_rollout(run, newest_rows(rollout, args.batch_size), metrics)  # all of it without replay
    if args.replay_batches:
        run.replay.keep(new)
    return rollout


def estimate(run: PpoRun, rollout: Rollout) -> None:
    """Scores [B] -> rewards of tokens -> advantages, and with a critic the returns it learns, all [B, R].

    With a critic the scale of its head follows the returns, which changes no value; of the first batch it is
    fitted to them, which does."""
    args = run.args
    world = run.world
    mask = rollout.mask
    penalty = None
    if args.kl_in == "reward" and run.uses_reference:
        k1, _, _ = ppo.kl_estimators(rollout.old_logprobs, rollout.ref_logprobs)
        penalty = run.kl.coef * k1
    rewards = ppo.token_rewards(
        rollout.scores, rollout.response_len, mask, kl_penalty=penalty, steps=rollout.step_rewards
    )
    rollout.rewards = rewards
    rollout.outcomes = ppo.discounted_sums(rewards, args.gamma)  # what values estimate, without any value
    informative = is_informative(rollout, world.sum)
    answers = args.num_generations if args.advantage in ("rloo", "group") else 0  # that are compared
    group_std = None
    if args.advantage == "gae":
        # Sets ``critic.scale``, the unit of the value loss. Values change with the first batch only.
        rollout.values = run.value_scale.rescale_critic(
            rollout.values, rollout.outcomes, mask, informative, world.sum
        )
        advantages, _ = ppo.gae(rewards, rollout.values, mask, args.gamma, args.lam)
        # The critic's returns have a lambda of their own.
        _, rollout.returns = ppo.gae(rewards, rollout.values, mask, args.gamma, args.critic_lam)
    elif args.advantage == "reinforce":
        advantages = rollout.outcomes
    elif args.advantage == "rloo":
        advantages = ppo.leave_one_out(rewards, mask, answers)
    else:
        advantages, group_std = ppo.group_normalized(rewards, mask, answers)
    # Of GAE and REINFORCE: less their mean. Of all but groups: divided by the unit, their standard deviation;
    # at least a tenth of that of earlier batches, all of it where all scores are equal. The KL is divided by
    # the unit in all.
    whitened = run.advantage_scale.whiten(
        advantages, rollout, informative, world.sum, answers=answers, group_std=group_std
    )
    rollout.advantages, rollout.advantage_std, rollout.advantage_unit = whitened


# Each loss is a sum over tokens, divided by the tokens of the whole minibatch over all processes; the
# load-balancing loss of experts by its sequences. So micro-batches and processes only have to be added up.


def critic_loss(run: PpoRun, mb: Rollout, token_count: float) -> Loss:
    """A micro-batch's share of the minibatch's value loss -> (loss, Metrics). ``--vf_coef`` matters only
    where --grad_clip binds: AdamW divides the scale of a gradient out again."""
    args = run.args
    metrics = Metrics()
    # balance: the load-balancing loss of experts, 0 for other models
    values, balance = run.value_scorer(mb.tokens, mb.layout)
    loss, info = ppo.value_loss(
        values, mb.values, mb.returns, mb.mask, cliprange=args.cliprange_value, scale=run.critic.scale
    )
    metrics.add_all(info, count=mb.mask.sum())
    metrics.add("value/balance_loss", balance, len(mb.tokens))
    return args.vf_coef * loss / token_count + balance / run.minibatch_size, metrics


def actor_loss(run: PpoRun, mb: Rollout, token_count: float) -> Loss:
    """A micro-batch's share of the minibatch's loss of the actor -> (loss, Metrics).

    (policy loss + kl_coef * KL - entropy_coef * entropy) / tokens + balance loss of experts / sequences. With
    --kl_in reward the advantages have the KL of before the updates (``estimate``), and ``policy_loss`` takes
    off what the updates have added to it since.
    """
    args = run.args
    metrics = Metrics()
    logprobs, entropy, balance = run.scorers["actor"](mb.tokens, mb.layout, args.temperature)
    if run.single_update:  # of the whole batch: the actor is still the old one, and this its forward
        mb.old_logprobs = logprobs.detach()
        mb.importance_weights = ppo.importance_weights(
            mb.old_logprobs, mb.sampler_logprobs, mb.mask, args.importance_cap
        )
    # Advantages were divided by this unit. So are KL and entropy: --kl_coef stays in reward units. It is what
    # ``coef`` always is, unless --kl_target moves it.
    kl_weight = run.kl.coef / mb.advantage_unit
    loss, info = ppo.policy_loss(
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
        loss = loss + kl_weight * ppo.kl_loss(logprobs, mb)
    total_entropy = ppo.masked_sum(entropy, mb.mask)
    if args.entropy_coef:
        loss = loss - args.entropy_coef / mb.advantage_unit * total_entropy
    metrics.add_all({**info, "policy/entropy": total_entropy}, count=mb.mask.sum())
    metrics.add("policy/balance_loss", balance, len(mb.tokens))
    return loss / token_count + balance / run.minibatch_size, metrics


def add_gradients(run: PpoRun, name: str, minibatch: Rollout, token_count: float, number: int) -> Metrics:
    """Backward of one model's loss, micro-batch by micro-batch; the actor's with the demonstrations of
    optimizer step ``number``, if there are any -> what the losses have measured.

    token_count: the minibatch's response tokens over all processes.
    """

    def loss_of(rows: list[int]) -> Loss:  # of a micro-batch
        loss = critic_loss if name == "critic" else actor_loss
        return loss(run, minibatch.rows(rows), token_count)

    sources: list[GradientSource] = [(minibatch.layout.lengths, loss_of)]
    if run.ptx and name == "actor":
        sources.append(run.ptx.source(number, run.scorers["actor"]))
    return gradients_that_fit(run, sources, run.args.accumulation_steps)


def train(
    run: PpoRun, name: str, minibatch: Rollout, token_count: float, number: int, metrics: Metrics
) -> Step | None:
    """Optimizer step ``number`` of the run, of the model "critic" or "actor": backward, sum over processes,
    clip, step. None, without a step, where ``--target_kl`` stops the actor."""
    learner = run.learners[name]
    measured = add_gradients(run, name, minibatch, token_count, number)
    metrics.merge(measured)
    metrics.keep_first("policy/ratio", "policy/first_ratio")  # of the first minibatch: it must be 1
    if name == "critic":
        [total_loss] = measured.sums(["value/loss"], run.world)
    else:
        total_loss, total_kl = measured.sums(["policy/loss", "policy/approx_kl"], run.world)
        stopped = 0 < run.args.target_kl < total_kl / token_count
        metrics.add("policy/early_stop", stopped)
        if stopped:
            learner.optimizer.zero_grad()  # no step: momentum must not move the weights either
            return None
    step = step_if_finite(run, learner, total_loss, number)
    metrics.add("policy/skipped_steps", not step.finite)
    group = "policy" if name == "actor" else "value"
    if step.finite:
        metrics.add(f"{group}/grad_norm", step.norm)
    metrics.add(f"{group}/learning_rate", learner.learning_rate(number))
    return step


def update(run: PpoRun, rollout: Rollout, step: int, metrics: Metrics) -> None:
    """PPO epochs over a rollout. It is cut into minibatches once; each epoch takes them in another order
    (``minibatch_order``; with --replay_batches, replayed batches and the new one take turns). In each
    minibatch the critic steps first, then the actor: only one model's gradients are in memory. Above
    --target_kl the actor stops for the rest of the batch; the critic goes on: the KL does not concern it."""
    args = run.args
    rows_of_minibatch = minibatch_rows(args.batch_size, args.mini_batch_size, args.num_generations)
    starts = range(0, len(rollout.tokens), args.batch_size)  # of the replayed batches and the new one
    minibatches = [
        rollout.rows([start + row for row in rows]) for start in starts for rows in rows_of_minibatch
    ]
    token_counts = run.world.sum(torch.stack([mb.mask.sum() for mb in minibatches])).clamp(min=1).tolist()
    order = minibatch_order(
        step, older=args.replay_batches, count=len(rows_of_minibatch), epochs=args.ppo_epochs, seed=args.seed
    )
    first_number = step * run.updates_per_batch  # optimizer steps before this batch
    actor_trains = step >= run.learners["actor"].first_batch  # --critic_warmup_steps
    with phase("updates", len(order), "minibatches") as bar:
        # number: of the optimizer step in the run; k: of the minibatch, the oldest batch's first
        for number, k in enumerate(order, first_number):
            steps = []
            if run.critic:
                steps.append(train(run, "critic", minibatches[k], token_counts[k], number, metrics))
            if actor_trains:
                steps.append(train(run, "actor", minibatches[k], token_counts[k], number, metrics))
                actor_trains = steps[-1] is not None  # None: --target_kl
            taken = [done for done in steps if done]
            if not taken:  # the actor has stopped, and there is no critic
                break
            note_steps(run, taken)
            bar.update()


def learn(run: PpoRun, step: int, batch: Batch) -> StepLog:
    """Update critic and actor with a batch -> (metrics, {file: rows to keep})."""
    args = run.args
    metrics = Metrics()
    with batch.seconds.of("score"):
        rollout = fill_rollout(run, step, batch, metrics)
    with batch.seconds.of("update"):
        update(run, rollout, step, metrics)
        if args.ema_beta:
            run.ema.follow(step)
        if run.old_actor is not run.actor and (step + 1) % args.update_old_actor_freq == 0:
            run.old_actor.load_state_dict(run.actor.state_dict())
    return step_metrics(run, batch, metrics), rows_of_step(run, batch)


def main(argv: Sequence[str] | None = None) -> None:
    build_and_train(
        build=PpoRun,
        given=parse_args(argv),
        collect=collect,
        learn=learn,
        evaluate=evaluate_actor,
    )


if __name__ == "__main__":
    run_script(main)
