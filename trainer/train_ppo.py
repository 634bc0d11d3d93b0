"""PPO fine-tuning (RLHF) of a small causal language model, in one script.

    for each step, which is one batch of prompts:
        collect   the old actor answers every prompt                       generation/engine.py
                  the rewards score the answers                            rewards/reward.py
        learn     old / reference log-probs and values, computed once      compute/scoring.py
                  scores -> rewards of tokens -> advantages and returns    ppo.py
                  for each PPO epoch, for each minibatch:
                      critic: vf_coef * value loss
                      actor:  clipped policy loss + kl_coef * KL to the reference
                              (- entropy_coef * entropy) (+ ptx_coef * loss of demonstrations)
                      one after the other: backward, clip, step            runs/optimizer_step.py
                  every --update_old_actor_freq batches the old actor becomes a copy of the actor;
                  with 1, the default, it is the actor itself

Why each thing is as it is: docs/ppo.md. What is left out on purpose: README.md, "What is not supported".

    python trainer/train_ppo.py                                     the bundled demo, on a GPU or a CPU
    torchrun --nproc_per_node 2 trainer/train_ppo.py                on two GPUs or processes
    python trainer/train_ppo.py --model DIR_OR_PTH --reward_model DIR --data_path prompts.jsonl
    python trainer/train_ppo.py --offline_data_path pairs.jsonl     logged answers instead of samples
"""

import sys
import time
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
    add("--ptx_data_path", default="", type=path, may_change=True, help="demonstrations to mix in")
    add("--offline_data_path", default="", type=path, may_change=True, help="logged answers: no sampling")
    add("--prompt_key", default="", help="key of the prompt in a record; default: by the record's form")
    add("--answer_key", default="", help="key of the answer; a path as reward_model.ground_truth works")
    add("--system_prompt", type=str, help="system message of prompts that have none; default: model's own")
    add("--prompt_template", default="", help="text with {prompt}, Jinja, or a file of either")
    add("--chat_template_kwargs", type=str, help="JSON: the template's switches; default: model's own")
    share = "share of the prompts that are rendered with thinking"
    add("--thinking_ratio", type=float, at_least=0, at_most=1, help=share)
    add("--max_seq_len", default=256, at_least=1, at_most=MANY, help="longer prompts (in tokens) are dropped")
    add("--num_workers", default=0, at_least=0, at_most=64, may_change=True, help="data loader processes")
    p.group("reward: the sum of what is given")
    add("--reasoning", type=int, choices=[0, 1], help="1: reward <think> and <answer>; default: if used")
    add(
        "--thinking_reward", default=0.0, at_least=0, help="times MiniMind's points for a thought; 1 is usual"
    )
    add("--reward_model", nargs="*", default=[], type=path, may_change=True, help="PATH, or PATH=WEIGHT …")
    add("--reward_dtype", default="auto", choices=DTYPES, help="of its weights; auto: as the checkpoint's")
    add("--reward_fn", default="", type=path, may_change=True, help="a function of yours: path.py:function")
    add("--reward_url", default="", may_change=True, help="a server that scores; docs/rewards.md")
    add("--reward_timeout", default=600.0, at_least=0, may_change=True, help="seconds for --reward_fn, _url")
    add("--eval_reward_model", nargs="*", default=[], type=path, may_change=True, help="only evaluates")
    add("--eval_reward_fn", default="", type=path, may_change=True, help="only evaluates: path.py:function")
    spread = "what a response without an EOS loses; default: the spread of the scores"
    add("--missing_eos_penalty", type=float, at_least=0, at_most=1e6, help=spread)
    costs = "tokens before --max_gen_len in which each costs more"
    add("--overlong_buffer", default=0, at_least=0, at_most=MANY, help=costs)
    add("--overlong_penalty", default=1.0, at_least=0, help="what a response of --max_gen_len tokens loses")
    add("--repetition_penalty", default=0.0, at_least=0, help="largest penalty for repeated trigrams")
    add("--length_reward", default=0.0, at_least=0, help="added for 20 to 800 characters, else subtracted")
    add("--normalize_reward", default=0, choices=[0, 1], help="1: by running mean and standard deviation")
    add_ppo_flags(p)
    add_machine_flags(p, seed="of the prompt order and the sampling noise")
    add("--shard", default=0, choices=[0, 1], may_change=True, help="1: models are split over processes")
    add("--offload_frozen", default=0, choices=[0, 1], may_change=True, help="1: frozen models leave the GPU")
    add_output_flags(p, save_interval=20, eval_interval=20)
    best = "says which weights are best; default: judge, function, accuracy or score"
    add("--best_metric", default="", may_change=True, help=best)
    add("--strict_health", default=0, choices=[0, 1], may_change=True, help="1: end a run that is broken")
    return p


def add_ppo_flags(p):
    """The flags of rollout and PPO."""
    add = p.add_argument
    p.group("rollout")
    add("--num_generations", default=1, at_least=1, at_most=MANY, help="responses to each prompt")
    add("--batch_size", type=int, at_least=1, at_most=MANY, help="responses per step and process [128]")
    add("--max_gen_len", default=64, at_least=1, at_most=MANY, help="longest response in tokens")
    add("--min_gen_len", default=0, at_least=0, at_most=MANY, help="shortest response, its EOS counted")
    add("--stop", nargs="*", default=[], type=str, help="a response ends there; rewards see what is before")
    add("--stop_token_ids", nargs="*", default=[], type=int, help="ids that end a response as the EOS does")
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
    add("--clip_epsilon", default=0.2, above=0, at_most=0.999, help="clip of the ratio, below and above 1")
    add("--clip_epsilon_high", type=float, above=0, at_most=1e6, help="the clip above 1 [--clip_epsilon]")
    add("--dual_clip", default=0.0, at_least=0, help="a bad token counts at most X times; 0: no limit")
    add("--importance_cap", default=2.0, at_least=0, help="largest training / sampling probability; 0: off")
    again = "up to N times: sample again where a prompt's answers score alike"
    estimators = ["gae", "rloo", "group", "reinforce"]
    add("--advantage", default="gae", choices=estimators, help="all but gae need no critic: algorithms.md")
    add("--filter_groups", default=0, at_least=0, at_most=MANY, help=again)
    add("--vf_coef", default=0.5, at_least=0, help="weight of the value loss")
    add("--cliprange_value", default=0.5, at_least=0, help="clip of a value, in stds of returns; 0: none")
    add("--kl_coef", default=0.02, at_least=0, help="weight of the KL to the reference: reward per nat")
    kl_in = "k2 in the loss, or k1 taken off the rewards"
    add("--kl_in", default="loss", choices=["loss", "reward"], help=kl_in)
    target = "nats a response: moves --kl_coef to keep it; not --target_kl; 0: off"
    add("--kl_target", default=0.0, at_least=0, help=target)
    add("--kl_horizon", type=int, at_least=1, help="responses; longer: it moves slower [4 batches]")
    stop = "a batch's updates end at this KL to the old actor; not --kl_target"
    add("--target_kl", default=0.0, at_least=0, help=stop)
    add("--entropy_coef", default=0.0, at_least=0, help="bonus on the policy's entropy: reward per nat")
    add("--entropy_top", default=1.0, above=0, at_most=1, help="share of tokens that learn; 1: all")
    add("--gamma", default=1.0, at_least=0, at_most=1, help="discount")
    add("--lam", type=float, at_least=0, at_most=1, help="lambda of GAE; default: by --max_gen_len")
    add("--critic_lam", default=1.0, at_least=0, at_most=1, help="lambda of the critic's returns")
    add("--critic_init", default="auto", choices=["auto", "actor", "reward"], help="start of the critic")
    add("--critic_warmup_steps", type=steps_or_auto, at_least=0, help="critic alone; or auto [2 batches]")
    share = "share of the old average kept a batch, as 0.99; 0: none"
    add("--ema_beta", default=0.0, at_least=0, at_most=0.999999, help=share)
    add("--ptx_coef", type=float, above=0, at_most=1e6, help="weight of --ptx_data_path's loss [0.1]")
    add("--update_old_actor_freq", default=1, at_least=1, help="batches between two copies to the old actor")


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch

from dataset.data_order import RecordBatches, minibatch_order, minibatch_rows, next_batch, record_loader
from progress_bar import phase
from trainer import ppo
from trainer.batch import Batch
from trainer.best import keep_best, restore_best
from trainer.build_run import build_run
from trainer.compute.batching import send
from trainer.compute.scoring import score_entropy_too, score_policy, score_values
from trainer.entropy_top import choose_tokens
from trainer.evaluation import evaluate_actor
from trainer.filter_groups import sample_again, step_noise
from trainer.inputs import complete_flags, load_inputs
from trainer.missing_eos import choose_missing_eos_penalty
from trainer.offline import collect_logged, take_reference
from trainer.replay import newest_rows
from trainer.runs.distributed import init_world
from trainer.runs.interrupts import StopRequest
from trainer.runs.log_and_save import end_if_broken, log_step, run_to_the_end, save
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import gradients_that_fit, note_steps, step_if_finite
from trainer.runs.resume import start_or_resume
from trainer.runs.samples import rows_of_step
from trainer.step_metrics import note_rollout, note_step, step_metrics
from trainer.step_rewards import step_rewards


def parse_args(argv=None):
    parser = flag_parser()
    return complete_flags(parser.parse_args(argv), parser.flags)


# ------------------------------------------------------------------ collect: prompts -> scored responses


def collect(run, step, batches, positions):
    """Take the next prompts, sample responses to each from the old actor, score them -> ``Batch``.

    positions: of this process' responses in the global batch (``local_positions`` in dataset/data_order.py).
    Nothing has been learned yet. Raises InputError on all processes where one's file or reward fails.
    """
    start, args, again, more = time.perf_counter(), run.args, 0, 0.0
    if run.ptx:
        run.ptx.read(step)
    if args.offline_data_path:
        return collect_logged(run, batches)
    with run.world.all_or_none():
        prompts = [prompt for prompt in next_batch(batches) for _ in range(args.num_generations)]
    with run.world.all_or_none(), run.sampling_from(run.old_actor):
        rollout, texts = run.respond(prompts, step_noise(run, step, positions), args.temperature)
    sampled = time.perf_counter()
    with run.world.all_or_none():
        raw = run.raw_scores(run.reward, prompts, rollout, texts)
    if args.filter_groups:
        drawn = prompts, rollout, texts, raw
        with run.world.all_or_none(), run.sampling_from(run.old_actor):
            rollout, texts, raw, again, more = sample_again(run, step, positions, *drawn)
    scores = run.reward.combine(raw, run.world)
    seconds = {"rollout": sampled - start + more, "reward": time.perf_counter() - sampled - more}
    return Batch(prompts, rollout, texts, raw, scores, seconds, again)


# ------------------------------------------------------------------- learn: scored responses -> weights


def estimate_advantages(run, rollout):
    """Rewards of tokens, with a critic values too -> advantages, and with a critic its returns."""
    args, rewards, mask, kind = run.args, rollout.rewards, rollout.mask, run.args.advantage
    if kind == "gae":
        fields = rewards, rollout.values, mask, args.gamma
        advantages, _ = ppo.gae(*fields, args.lam)
        _, rollout.returns = ppo.gae(*fields, args.critic_lam)
    elif kind == "reinforce":
        advantages = ppo.monte_carlo_returns(rewards, mask, args.gamma)
    else:
        estimator = {"rloo": ppo.leave_one_out, "group": ppo.group_normalized}[kind]
        advantages = estimator(rewards, mask, args.num_generations)
    if kind in ("gae", "reinforce"):
        advantages, rollout.advantage_std = ppo.centred(advantages, mask, run.world.sum)
    else:  # a comparison of answers has its own zero
        rollout.advantage_std = ppo.root_mean_square(advantages, mask, run.world.sum)
    if kind != "group":  # whose advantages have a scale of their own
        scores = run.world.sum(ppo.moments(rollout.scores, torch.ones_like(rollout.finished)))
        informative = ppo.std_or_zero(scores) > 0
        rollout.advantage_unit = run.advantage_scale.unit(rollout.advantage_std, informative)
    rollout.advantages = torch.where(mask, advantages / rollout.advantage_unit, 0.0)


def fill_rollout(run, step, batch, metrics):
    """-> the new rollout and the replayed ones, with all that stays fixed while they are learned from:
    log-probs, values, rewards, advantages, returns."""
    args, new, penalty, entropy = run.args, batch.rollout, None, None
    old_actor, ref = run.scorers["old_actor"], run.scorers["reference"]
    with run.host.on_device(run.old_actor, run.ref):
        new.ref_logprobs = score_policy(new, ref, args.temperature)
        new.scores = send(batch.scores["score"], new.tokens.device)
        new.step_rewards = step_rewards(batch.raw.steps, batch.texts, new, run.tokenizer)
        rollout = run.replay.join(new)
        if args.offline_data_path:
            take_reference(rollout)
        else:
            wanted = args.temperature, args.entropy_top < 1
            rollout.old_logprobs, entropy = score_entropy_too(rollout, old_actor, *wanted)
    rollout.counted, least = choose_tokens(args.entropy_top, entropy, rollout.mask, run.world)
    metrics.add_all({} if least is None else {"policy/entropy_threshold": least}, 1)
    if run.critic:
        rollout.values = score_values(rollout, run.learners["critic"].scorer)
    old, sampled, mask = rollout.old_logprobs, rollout.sampler_logprobs, rollout.mask
    rollout.importance_weights = ppo.importance_weights(old, sampled, mask, args.importance_cap)
    run.kl.follow(step, rollout, len(new.tokens), run.world.sum)
    if args.kl_in == "reward":
        penalty = run.kl.coef * ppo.kl_estimators(old, rollout.ref_logprobs)[0]
    rollout.rewards = ppo.token_rewards(
        rollout.scores, rollout.response_len, mask, penalty, rollout.step_rewards
    )
    outcome = ppo.monte_carlo_returns(rollout.rewards, mask, args.gamma)
    if run.critic:
        run.value_scale.update(rollout, outcome, run.world.sum)
    estimate_advantages(run, rollout)
    latest, outcome = newest_rows(rollout, outcome, args.batch_size)
    if run.critic:
        run.critic_warmup.note(step, latest, outcome, run.world.sum)
    note_rollout(run, latest, outcome, metrics)
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
    kl_weight, decay = run.kl.coef / mb.advantage_unit, args.gamma * args.lam
    loss, info = ppo.policy_objective(logprobs, mb, run.clip, args.kl_in, kl_weight, decay)
    entropy = ppo.masked_sum(entropy, mb.mask)
    if args.entropy_coef:
        loss = loss - args.entropy_coef / mb.advantage_unit * entropy
    metrics.add_all({**info, "policy/entropy": entropy}, mb.response_len.sum())
    metrics.add("policy/balance_loss", balance, len(mb.tokens))
    return loss / token_count + balance / run.minibatch_size, metrics


LOSSES = {"critic": critic_loss, "actor": actor_loss}


def backward(run, minibatch, token_count, name, token_budget, number=0):
    """Gradients of one minibatch for this learner, micro-batch by micro-batch -> Metrics. The actor's have
    those of the demonstrations of optimizer step ``number`` in them, if there are any.

    token_count: the minibatch's response tokens over all processes. Every loss is a sum divided by it, so the
    sum of all processes' gradients is the gradient of the whole minibatch.
    """
    sums, mixed_in = Metrics(), run.ptx and name == "actor"

    def learn_from(rows):
        loss, metrics = LOSSES[name](run, minibatch.rows(rows), token_count)
        run.loss_scale.scaled(loss).backward()
        sums.merge(metrics)

    run.learners[name].each_micro_batch(minibatch.lengths.tolist(), token_budget, learn_from)
    if mixed_in:
        sums.merge(run.ptx.backward(run, number, token_budget))
    return sums


def train_model(run, name, minibatch, token_count, number, metrics):
    """Optimizer step ``number`` of one model -> ``Step``, or None where ``--target_kl`` stops the actor."""
    gradients = partial(backward, run, minibatch, token_count, name, number=number)
    lengths = minibatch.lengths.tolist() + (run.ptx.lengths(number) if run.ptx and name == "actor" else [])
    sums = gradients_that_fit(run, gradients, lengths, run.args.accumulation_steps)
    metrics.merge(sums)
    metrics.keep_first("policy/ratio", "policy/first_ratio")
    watched = {"critic": ["value/loss"], "actor": ["policy/loss", "policy/approx_kl"]}[name]
    totals = run.world.sum(sums.totals(watched, run.world.device))
    loss, *approx_kl = (totals / token_count).tolist()
    if name == "actor" and 0 < run.args.target_kl < approx_kl[0]:
        run.learners[name].optimizer.zero_grad()  # no step: momentum must not move the weights either
        return None
    step = step_if_finite(run, run.learners[name], loss, number)
    note_step(run, name, step, metrics)
    return step


def update(run, rollout, step, metrics):
    """PPO epochs over a rollout (``minibatch_order``). In each minibatch the critic steps first, then
    the actor, so only one model's gradients are in memory. Above ``target_kl`` the actor stops for the rest
    of the batch; the critic, if there is one, goes on: the KL does not concern it."""
    args, world, batch, count = run.args, run.world, run.args.batch_size, run.minibatches_per_batch
    first = step * args.ppo_epochs * count  # optimizer steps before this batch
    names = [name for name, learner in run.learners.items() if first >= learner.first_step]
    cut = minibatch_rows(batch, args.mini_batch_size, args.num_generations)
    starts = range(0, len(rollout.tokens), batch)  # of the replayed batches and the new one
    minibatches = [rollout.rows([start + row for row in rows]) for start in starts for rows in cut]
    token_counts = world.sum(torch.stack([mb.response_len.sum() for mb in minibatches])).tolist()
    order = minibatch_order(
        step, older=args.replay_batches, count=count, epochs=args.ppo_epochs, seed=args.seed
    )
    stopped = False  # by --target_kl
    with phase("updates", len(order), "minibatches") as bar:
        for number, k in enumerate(order, first):  # optimizer step, minibatch
            steps = {}
            for name in names:
                steps[name] = train_model(run, name, minibatches[k], token_counts[k], number, metrics)
            if not stopped:
                stopped = None in steps.values()
                metrics.add("policy/early_stop", stopped, 1)
                names = names[: -1 if stopped else None]  # without the actor, which is the last one
            if not names:
                break
            note_steps(run, filter(None, steps.values()))
            bar.done += 1


def learn(run, step, batch):
    """Fill the rollout's fields, update actor and critic -> (metrics, {file: rows to keep})."""
    args, metrics, clock = run.args, Metrics(), [time.perf_counter()]
    rollout = fill_rollout(run, step, batch, metrics)
    clock.append(time.perf_counter())
    update(run, rollout, step, metrics)
    run.ema.follow(step)
    if run.old_actor is not run.actor and (step + 1) % args.update_old_actor_freq == 0:
        run.old_actor.load_state_dict(run.actor.state_dict())
    clock.append(time.perf_counter())
    return step_metrics(run, batch, metrics, clock), rows_of_step(run, batch, rollout)


# -------------------------------------------------------------------------------------------- the loop


def train(run, logger):
    """The loop, from where the run stands to its end, or until someone asks it to stop or a reward fails."""
    args, world, progress = run.args, run.world, run.progress
    sizes = (args.batch_size, args.mini_batch_size, world.rank, world.size, args.num_generations)
    order = RecordBatches(len(run.prompts), args.seed, progress.step, run.total_steps, *sizes)
    stopping = StopRequest("\nstopping after this step; a second signal stops at once\n")
    with record_loader(run.prompts, order, args.num_workers) as batches, stopping as stop:
        if progress.step == run.total_steps:  # a run that was killed before its last .pth was there
            save(run, logger)
        if progress.step == 0:
            choose_missing_eos_penalty(run, logger)
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
            run = build_run(args, flag_parser().flags, world, *load_inputs(args, world))
        logger = start_or_resume(run, run.about(), sys.argv[1:] if argv is None else argv)
        restore_best(run, logger)
        run_to_the_end(run, logger, train)


if __name__ == "__main__":
    run_script(main)
