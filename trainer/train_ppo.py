"""PPO fine-tuning (RLHF) of a small causal language model, in one script.

    for each step, which is one batch of prompts:
        collect   the old actor answers every prompt                       generation/engine.py
                  the rewards score the answers                            rewards/reward.py
        learn     old / reference log-probs and values, computed once      compute/scoring.py
                  scores -> rewards of tokens -> advantages and returns    ppo.py
                  for each PPO epoch, for each minibatch:
                      critic: vf_coef * value loss
                      actor:  clipped policy loss + kl_coef * KL to the reference
                      one after the other: backward, clip, step            runs/optimizer_step.py
                  every --update_old_actor_freq batches the old actor becomes a copy of the actor;
                  with 1, the default, it is the actor itself

Why each thing is as it is: docs/ppo.md. What is left out on purpose: README.md, "What is not supported".

    python trainer/train_ppo.py                                     the bundled demo, on a GPU or a CPU
    torchrun --nproc_per_node 2 trainer/train_ppo.py                on two GPUs or processes
    python trainer/train_ppo.py --model DIR_OR_PTH --reward_model DIR --data_path prompts.jsonl
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import InputError, run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import DTYPES, MANY, FlagParser, add_machine_flags, add_output_flags, path, steps_or_auto


def flag_parser():
    """All flags, in the groups of --help. Edit the defaults here, or give them on the command line."""
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add_argument
    p.group("models (without --model and --hidden_size: the bundled demo)")
    add("--model", default="", type=path, may_change=True, help="policy: a .pth, a directory or a hub name")
    add("--tokenizer", default="", type=path, may_change=True, help="directory or hub name; default: model's")
    add("--hidden_size", default=0, at_least=0, at_most=MANY, may_change=True, help="N: out/full_sft_N.pth")
    add("--num_hidden_layers", default=0, at_least=0, at_most=MANY, may_change=True, help="checked if given")
    add("--use_moe", default=0, choices=[0, 1], may_change=True, help="1: load the _moe checkpoint")
    add("--lora_r", default=0, at_least=0, help="rank of LoRA adapters; 0: every weight trains")
    add("--trust_remote_code", action="store_true", may_change=True, help="run code that a model brings")
    p.group("data")
    add("--data_path", default="", type=path, may_change=True, help="prompts: a file, or a hub name")
    add("--eval_data_path", default="", type=path, may_change=True, help="held-out prompts")
    add("--prompt_key", default="", help="key of the prompt in a record; default: by the record's form")
    add("--answer_key", default="", help="key of the answer; a path as reward_model.ground_truth works")
    add("--system_prompt", type=str, help="system message of prompts that have none; default: model's own")
    add("--prompt_template", default="", help="text with {prompt}, Jinja, or a file of either")
    add("--max_seq_len", default=256, at_least=1, at_most=MANY, help="longer prompts (in tokens) are dropped")
    add("--num_workers", default=0, at_least=0, at_most=64, may_change=True, help="data loader processes")
    p.group("reward: the sum of what is given")
    add("--reasoning", type=int, choices=[0, 1], help="1: reward <think> and <answer>; default: if used")
    add("--reward_model", nargs="*", default=[], type=path, may_change=True, help="PATH, or PATH=WEIGHT …")
    add("--reward_dtype", default="auto", choices=DTYPES, help="of its weights; auto: as the checkpoint's")
    add("--reward_fn", default="", type=path, may_change=True, help="a function of yours: path.py:function")
    add("--reward_url", default="", may_change=True, help="a server that scores; docs/rewards.md")
    add("--reward_timeout", default=600.0, at_least=0, may_change=True, help="seconds for --reward_fn, _url")
    add("--eval_reward_model", nargs="*", default=[], type=path, may_change=True, help="never trains")
    add("--eval_reward_fn", default="", type=path, may_change=True, help="never trains: path.py:function")
    add("--missing_eos_penalty", default=1.0, at_least=0, help="subtracted where a response has no EOS")
    add("--repetition_penalty", default=0.0, at_least=0, help="largest penalty for repeated trigrams")
    add("--length_reward", default=0.0, at_least=0, help="added for 20 to 800 characters, else subtracted")
    add("--normalize_reward", default=0, choices=[0, 1], help="1: by running mean and standard deviation")
    p.group("rollout")
    add("--batch_size", type=int, at_least=1, at_most=MANY, help="prompts per step and process [128]")
    add("--max_gen_len", default=64, at_least=1, at_most=MANY, help="longest response in tokens")
    add("--temperature", default=1.0, at_least=0.01, at_most=100, help="of sampling and of every log-prob")
    p.group("PPO")
    add("--epochs", default=1, at_least=1, at_most=MANY, help="passes over the prompts")
    add("--replay_batches", default=0, at_least=0, at_most=MANY, help="older batches to learn from again")
    add("--max_steps", default=0, at_least=0, at_most=MANY, help="stop after so many batches; 0: by --epochs")
    add("--ppo_epochs", default=1, at_least=1, at_most=MANY, help="passes over each batch")
    add("--mini_batch_size", type=int, at_least=1, at_most=MANY, help="sequences per update and process [32]")
    add("--accumulation_steps", default=1, at_least=1, at_most=MANY, may_change=True, help="saves memory")
    add("--learning_rate", type=float, above=0, at_most=1, help="actor's peak; default: by its size")
    add("--critic_learning_rate", type=float, above=0, at_most=1, help="critic's peak; default: by its size")
    add("--grad_clip", default=1.0, above=0, help="largest gradient norm, of each model on its own")
    add("--lr_schedule", default="cosine", choices=["cosine", "constant"], help="of the learning rates")
    add("--lr_warmup_steps", default=0, at_least=0, at_most=MANY, help="batches in which the rates rise")
    add("--clip_epsilon", default=0.2, above=0, help="clip of the ratio actor / old actor, below and above 1")
    add("--clip_epsilon_high", type=float, above=0, at_most=1e6, help="the clip above 1 [--clip_epsilon]")
    add("--dual_clip", default=0.0, at_least=0, help="a bad token counts at most X times; 0: no limit")
    add("--importance_cap", default=2.0, at_least=0, help="largest training / sampling probability; 0: off")
    add("--vf_coef", default=0.5, at_least=0, help="weight of the value loss")
    add("--cliprange_value", default=0.5, at_least=0, help="clip of a value, in stds of returns; 0: none")
    add("--kl_coef", default=0.02, at_least=0, help="weight of the KL to the reference: reward per nat")
    add("--kl_in", default="loss", choices=["loss", "reward"], help="k2 in the loss, or k1 off the rewards")
    add("--target_kl", default=0.0, at_least=0, help="above this KL the actor's updates on a batch end")
    add("--gamma", default=1.0, at_least=0, at_most=1, help="discount")
    add("--lam", type=float, at_least=0, at_most=1, help="lambda of GAE; default: by --max_gen_len")
    add("--critic_lam", default=1.0, at_least=0, at_most=1, help="lambda of the critic's returns")
    add("--critic_init", default="auto", choices=["auto", "actor", "reward"], help="start of the critic")
    add("--critic_warmup_steps", type=steps_or_auto, at_least=0, help="critic alone; or auto [2 batches]")
    add("--update_old_actor_freq", default=1, at_least=1, help="batches between two copies to the old actor")
    add_machine_flags(p, seed="of the prompt order and the sampling noise")
    add("--offload_frozen", default=0, choices=[0, 1], may_change=True, help="1: frozen models leave the GPU")
    add_output_flags(p, save_interval=20, eval_interval=20)
    add("--best_metric", default="", may_change=True, help="says which weights are best; default: accuracy")
    add("--strict_health", default=0, choices=[0, 1], may_change=True, help="1: end a run that is broken")
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch

from dataset.data_order import RecordBatches, epoch_order, next_batch, record_loader
from model.critic import CriticModel
from model.lora import add_adapters, frozen_copy, trained
from progress_bar import phase
from trainer import ppo
from trainer.best import choose_best, keep_best, restore_best
from trainer.compute.batching import micro_batches, send
from trainer.compute.memory import keep_freed_memory
from trainer.compute.precision import check_range, set_precision
from trainer.compute.rollout_data import Rollout
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training, score_policy, score_values
from trainer.evaluation import evaluate_actor
from trainer.generation.engine import Sampler
from trainer.generation.sampling_noise import noise_keys
from trainer.inputs import choose_rates, complete_flags, count_steps, load_inputs, sampling_sizes
from trainer.memory_check import check_memory
from trainer.ppo_models import PpoRun, prepare_frozen
from trainer.rewards.judge import load_judge
from trainer.rewards.reward import RawScores, load_reward
from trainer.rewards.reward_models import critic_start, modules_of
from trainer.runs.adamw import make_optimizer
from trainer.runs.distributed import init_world
from trainer.runs.interrupts import StopRequest
from trainer.runs.log_and_save import end_if_broken, log_step, run_to_the_end, save
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import Learner, gradients_that_fit, note_steps, step_if_finite
from trainer.runs.resume import start_or_resume
from trainer.runs.samples import rows_of_step


def parse_args(argv=None):
    return complete_flags(flag_parser().parse_args(argv))


def build_run(args, world, actor, tokenizer, prompts, held_out=None, notes=()):
    """The loaded policy -> all models of the run. Actor, old actor, reference and sampler start as the
    policy, the critic as its backbone or as a reward model's (``critic_start``). No model has dropout: the
    training forward is the scoring forward."""
    device, dtype = world.device, set_precision(args.dtype, world.device, args.deterministic)
    keep_freed_memory()
    check_range(actor, dtype, f"--model {args.model}: ")
    reward = load_reward(args, device, dtype, tokenizer, prompts, held_out)
    judge = load_judge(args, device, dtype, held_out)
    actor.to(device).eval().requires_grad_(not args.lora_r)
    start, weight = critic_start(args.critic_init, reward.models, tokenizer) or (actor, 1.0)
    sizes = sampling_sizes(args, prompts, held_out)
    plan, memory = check_memory(args, actor, start, modules_of(reward, judge), device, dtype, sizes)
    notes = [*notes, choose_rates(args, actor, start), memory]
    critic = CriticModel.from_model(start, args.lora_r > 0, weight).to(device).eval()
    room = plan.cache if device.type == "cuda" else None  # None: what suits a CPU
    sampler = Sampler(actor, dtype, plan.slots, room, sizes)
    for backbone in (actor.base_model, critic.backbone):
        prepare_training(backbone, args.gradient_checkpointing)
    ref = frozen_copy(actor)  # before there are adapters: the reference has none
    if args.lora_r:  # from here on only the adapters train; their models share the frozen weights
        add_adapters(actor.base_model, args.lora_r, args.seed)
        add_adapters(critic.backbone, args.lora_r, args.seed + 1)
    # With 1 it is the actor, which samples and scores before it learns. A copy has the actor's adapters.
    old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor)
    total_steps = count_steps(args, len(prompts), world.size)
    per_batch = args.ppo_epochs * (args.batch_size // args.mini_batch_size)
    schedule = {"warmup_steps": args.lr_warmup_steps * per_batch, "schedule": args.lr_schedule}

    def learner(model, scorer, peak):
        optimizer = make_optimizer(trained(model), peak, args.moments_dtype, args.seed, weight_decay=0.0)
        return Learner(model, scorer, optimizer, peak, total_steps * per_batch, **schedule)

    inputs = args, flag_parser().flags, world, dtype, tokenizer, prompts, held_out
    return PpoRun(
        *inputs,
        notes=[note for note in notes if note],
        reward=reward,
        judge=judge,
        best=choose_best(args, held_out, reward, judge),
        total_steps=total_steps,
        learners={
            "critic": learner(critic, ValueScorer(critic, dtype), args.critic_learning_rate),
            "actor": learner(actor, PolicyScorer(actor, dtype), args.learning_rate),
        },
        old_actor=old_actor,
        ref=ref,
        sampler=sampler,
        plan=plan,
    )


# ------------------------------------------------------------------ collect: prompts -> scored responses


@dataclass
class Batch:
    """What a step samples: this process' prompts, their responses and scores."""

    prompts: list  # of Prompt
    rollout: Rollout
    texts: list  # of the responses
    raw: RawScores  # before they are normalised, clipped and weighed
    scores: dict  # {part of the reward: [B]}, "score" is their sum
    seconds: dict  # {phase: how long it took}


def collect(run, step, batches, positions):
    """Take the next prompts, sample a response to each from the old actor, score them -> ``Batch``.

    Nothing has been learned yet. Raises InputError on all processes where one's file or reward fails.
    """
    start = time.perf_counter()
    with run.world.all_or_none():
        prompts = next_batch(batches)
        keys = noise_keys(run.args.seed, step, positions)
        rollout, texts = run.respond(run.old_actor, prompts, keys, run.args.temperature)
        sampled = time.perf_counter()
        raw = run.raw_scores(run.reward, prompts, rollout, texts)
    scores = run.reward.combine(raw, run.world)
    seconds = {"rollout": sampled - start, "reward": time.perf_counter() - sampled}
    return Batch(prompts, rollout, texts, raw, scores, seconds)


# ------------------------------------------------------------------- learn: scored responses -> weights


def estimate_advantages(run, rollout):
    """Rewards of tokens and values -> advantages and returns. Another estimator goes in the place of GAE."""
    args, fields = run.args, (rollout.rewards, rollout.values, rollout.mask, run.args.gamma)
    advantages, _ = ppo.gae(*fields, args.lam)
    _, rollout.returns = ppo.gae(*fields, args.critic_lam)
    rollout.advantages, rollout.advantage_std = ppo.whiten(advantages, rollout.mask, run.world.sum)


def fill_rollout(run, step, batch, metrics):
    """-> the new rollout and the replayed ones, with all that stays fixed while they are learned from:
    log-probs, values, rewards, advantages, returns."""
    args, new, penalty = run.args, batch.rollout, None
    old_actor, ref = (PolicyScorer(model, run.dtype) for model in (run.old_actor, run.ref))
    with run.host.on_device(run.old_actor, run.ref):
        new.ref_logprobs = score_policy(new, ref, args.temperature)
        new.scores = send(batch.scores["score"], new.tokens.device)
        rollout = run.replay.join(new)
        rollout.old_logprobs = score_policy(rollout, old_actor, args.temperature)
    rollout.values = score_values(rollout, run.learners["critic"].scorer)
    old, sampled, mask = rollout.old_logprobs, rollout.sampler_logprobs, rollout.mask
    rollout.importance_weights = ppo.importance_weights(old, sampled, mask, args.importance_cap)
    if args.kl_in == "reward":
        penalty = args.kl_coef * ppo.kl_estimators(old, rollout.ref_logprobs)[0]
    rollout.rewards = ppo.token_rewards(rollout.scores, rollout.response_len, mask, penalty)
    outcome = ppo.monte_carlo_returns(rollout.rewards, mask, args.gamma)
    run.value_scale.update(rollout, outcome, run.world.sum)
    estimate_advantages(run, rollout)
    run.note_rollout(step, rollout, outcome, metrics)
    run.replay.keep(new)
    return rollout


def critic_loss(run, mb, token_count):
    """A micro-batch's share of the minibatch's value loss -> (loss, Metrics).

    AdamW divides the scale of a gradient out again: ``--vf_coef`` matters only where --grad_clip binds.
    """
    (values, balance), metrics = run.learners["critic"].scorer.balanced(*mb.sequences), Metrics()
    clip, scale = run.args.cliprange_value, run.critic.scale
    loss, info = ppo.value_loss(values, mb.values, mb.returns, mb.mask, clip, scale)
    metrics.add_all({"value/loss": loss, **info}, mb.response_len.sum())
    metrics.add("value/balance_loss", balance, len(mb.tokens))
    return run.args.vf_coef * loss / token_count + balance / run.minibatch_size, metrics


def actor_loss(run, mb, token_count):
    """A micro-batch's share of the minibatch's policy loss, KL included -> (loss, Metrics)."""
    args, metrics = run.args, Metrics()
    logprobs, entropy, balance = run.learners["actor"].scorer(*mb.sequences, args.temperature)
    # Advantages were divided by their std. The KL is divided by it too: --kl_coef stays in reward units.
    kl_weight, decay = args.kl_coef / mb.advantage_std, args.gamma * args.lam
    loss, info = ppo.policy_objective(logprobs, mb, run.clip, args.kl_in, kl_weight, decay)
    metrics.add_all({**info, "policy/entropy": ppo.masked_sum(entropy, mb.mask)}, mb.response_len.sum())
    metrics.add("policy/balance_loss", balance, len(mb.tokens))
    return loss / token_count + balance / run.minibatch_size, metrics


LOSSES = {"critic": critic_loss, "actor": actor_loss}


def backward(run, minibatch, token_count, name, token_budget):
    """Gradients of one minibatch for this learner, micro-batch by micro-batch -> Metrics.

    token_count: the minibatch's response tokens over all processes. Every loss is a sum divided by it, so the
    sum of all processes' gradients is the gradient of the whole minibatch.
    """
    sums = Metrics()
    for index in micro_batches(minibatch.lengths.tolist(), token_budget):
        loss, metrics = LOSSES[name](run, minibatch.rows(index), token_count)
        run.loss_scale.scaled(loss).backward()
        sums.merge(metrics)
    return sums


def train_model(run, name, minibatch, token_count, number, metrics):
    """Optimizer step ``number`` of one model -> ``Step``, or None where ``--target_kl`` stops the actor."""
    gradients = partial(backward, run, minibatch, token_count, name)
    sums = gradients_that_fit(run, gradients, minibatch.lengths.tolist(), run.args.accumulation_steps)
    metrics.merge(sums)
    metrics.keep_first("policy/ratio", "policy/first_ratio")
    watched = {"critic": ["value/loss"], "actor": ["policy/loss", "policy/approx_kl"]}[name]
    totals = run.world.sum(sums.totals(watched, run.world.device))
    loss, *approx_kl = (totals / token_count).tolist()
    if name == "actor" and 0 < run.args.target_kl < approx_kl[0]:
        run.learners[name].optimizer.zero_grad()  # no step: momentum must not move the weights either
        return None
    step = step_if_finite(run, run.learners[name], loss, number)
    run.note_step(name, step, metrics)
    return step


def update(run, rollout, step, metrics):
    """PPO epochs over a rollout, minibatches in a new order each time. In each the critic steps first, then
    the actor, so only one model's gradients are in memory. Above ``target_kl`` the actor stops for the rest
    of the batch; the critic, which the KL does not concern, goes on."""
    args, world, size, count = run.args, run.world, run.args.mini_batch_size, run.minibatches_per_batch
    epoch = step * args.ppo_epochs  # this batch's first one in the run
    first = epoch * count  # optimizer steps before this batch
    names = [name for name, learner in run.learners.items() if first >= learner.first_step]
    pool = len(rollout.tokens) // size  # minibatches to draw from, those of replayed batches among them
    minibatches = [rollout.rows(range(k * size, (k + 1) * size)) for k in range(pool)]
    token_counts = world.sum(torch.stack([mb.response_len.sum() for mb in minibatches])).tolist()
    order = [k for i in range(args.ppo_epochs) for k in epoch_order(pool, args.seed, epoch + i)[:count]]
    stopped = False  # by --target_kl
    with phase("updates", len(order), "minibatches") as bar:
        for number, k in enumerate(order, first):  # optimizer step, minibatch
            steps = {}
            for name in names if not stopped else names[:1]:
                steps[name] = train_model(run, name, minibatches[k], token_counts[k], number, metrics)
            if not stopped:
                stopped = None in steps.values()
                metrics.add("policy/early_stop", stopped, 1)
            note_steps(run, filter(None, steps.values()))
            bar.done += 1


def learn(run, step, batch):
    """Fill the rollout's fields, update actor and critic -> (metrics, {file: rows to keep})."""
    args, metrics, clock = run.args, Metrics(), [time.perf_counter()]
    rollout = fill_rollout(run, step, batch, metrics)
    clock.append(time.perf_counter())
    update(run, rollout, step, metrics)
    if run.old_actor is not run.actor and (step + 1) % args.update_old_actor_freq == 0:
        run.old_actor.load_state_dict(run.actor.state_dict())
    clock.append(time.perf_counter())
    return run.step_metrics(batch, metrics, clock), rows_of_step(run, batch, rollout)


# -------------------------------------------------------------------------------------------- the loop


def train(run, logger):
    """The loop, from where the run stands to its end, or until someone asks it to stop or a reward fails."""
    args, world, progress = run.args, run.world, run.progress
    sizes = (args.batch_size, args.mini_batch_size, world.rank, world.size)
    order = RecordBatches(len(run.prompts), args.seed, progress.step, run.total_steps, *sizes)
    stopping = StopRequest("\nstopping after this step; a second signal stops at once\n")
    with record_loader(run.prompts, order, args.num_workers) as batches, stopping as stop:
        if progress.step == run.total_steps:  # a run that was killed before its last .pth was there
            save(run, logger)
        if progress.step == 0:
            metrics, rows = evaluate_actor(run, {}, {})
            log_step(run, logger, 0, metrics, rows)
            keep_best(run, logger, metrics)
            end_if_broken(run, logger)
        for step in order.steps:
            try:
                batch = collect(run, step, batches, order.positions)
            except InputError:
                save(run, logger)
                raise
            metrics, rows = learn(run, step, batch)
            world.check_identical(**{name: learner.model for name, learner in run.learners.items()})
            progress.step = done = step + 1
            last, signal = done == run.total_steps, stop.agreed(world)
            failed = None
            if last or (args.eval_interval and done % args.eval_interval == 0):
                try:
                    metrics, rows = evaluate_actor(run, metrics, rows)
                except InputError as error:  # a reward failed: first log and save what has been learned
                    failed = error
            log_step(run, logger, done, metrics, rows)
            keep_best(run, logger, metrics)
            if last or signal or failed or done % args.save_interval == 0:
                save(run, logger)
            if failed:
                raise failed
            end_if_broken(run, logger)
            if signal and not last:
                raise SystemExit(128 + signal)


def main(argv=None):
    args = parse_args(argv)
    with init_world(args.device, args.ddp) as world:
        with world.all_or_none():
            run = build_run(args, world, *load_inputs(args))
        logger = start_or_resume(run, run.about(), sys.argv[1:] if argv is None else argv)
        restore_best(run, logger)
        prepare_frozen(run)
        run_to_the_end(run, logger, train)


if __name__ == "__main__":
    run_script(main)
