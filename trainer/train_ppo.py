"""PPO fine-tuning (RLHF) of a small causal language model, in one script.

    for each batch of prompts:
        the old actor answers every prompt                          rollout.py
        format, reward model and your function score the answers    rewards.py
        old / reference log-probs and values are computed once      scoring.py
        GAE turns scores and values into advantages and returns     ppo.py
        for each PPO epoch, for each minibatch:
            clipped policy loss + vf_coef * value loss + kl_coef * KL to the reference
            backward, clip, step: actor and critic, each its own optimizer
        the old actor becomes a copy of the actor

Left out on purpose: top-k / top-p (what is sampled is what is scored), adaptive KL coefficients, entropy
bonuses, a value head on the actor. Why each thing is as it is: docs/ppo.md.

    python trainer/train_ppo.py                                     the bundled demo, on a GPU or a CPU
    torchrun --nproc_per_node 2 trainer/train_ppo.py                on two GPUs or processes
    python trainer/train_ppo.py --model DIR_OR_PTH --reward_model DIR --data_path prompts.jsonl
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch.optim import AdamW

from dataset.lm_dataset import RLAIFDataset
from dataset.order import PromptBatches, epoch_order, local_positions, next_batch, prompt_loader
from errors import FlagParser, InputError, run_script
from files import writing
from model.checks import eos_ids, is_moe
from model.critic import CriticModel
from model.lora import add_adapters, frozen_copy, learned, trained
from model.saving import save_policy
from trainer import ppo
from trainer.checkpoints import Progress
from trainer.distributed import World, init_world
from trainer.evaluation import evaluate
from trainer.inputs import check_ppo_flags, count_steps, fill_paths, load_inputs
from trainer.interrupt import StopRequest
from trainer.keeping import begin, record, save
from trainer.memory import keep_freed_memory
from trainer.noise import noise_keys
from trainer.ppo_run import LOOK, fingerprints, introduction, round_frozen
from trainer.precision import set_precision
from trainer.record import micro_batches, tokens_per_pass
from trainer.reward_models import critic_start
from trainer.rewards import Reward, load_reward, running_metrics
from trainer.rollout import Sampler, response_texts
from trainer.scoring import PolicyScorer, ValueScorer, prepare, score_all
from trainer.stepping import forget_gradients, gradients_that_fit, step_if_finite
from trainer.tracking import Metrics, sample_rows

EVAL_STEP = -1  # evaluation's noise: no training step has this number


def parse_args(argv=None):
    """All flags. Edit the defaults here, or give them on the command line."""
    p = FlagParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    # models: without --model and --hidden_size, the bundled demo
    p.add_argument("--model", default="", help="policy: a .pth, a directory or a hub name")
    p.add_argument("--tokenizer", default="", help="directory or hub name; default: beside the model")
    p.add_argument("--hidden_size", type=int, default=0, help="load out/{reason|full_sft}_{hidden_size}.pth")
    p.add_argument("--num_hidden_layers", type=int, default=0, help="checked against the model if given")
    p.add_argument("--use_moe", type=int, default=0, choices=[0, 1], help="load the _moe checkpoint")
    p.add_argument("--lora_r", type=int, default=0, help="rank of LoRA adapters; 0: every weight trains")
    p.add_argument("--trust_remote_code", action="store_true", help="run code that a model brings along")
    # data
    p.add_argument("--data_path", default="", help="prompts: a file, or a hub name; docs/data.md")
    p.add_argument("--eval_data_path", default="", help="held-out prompts")
    p.add_argument("--system_prompt", default="", help="system message of every prompt that has none")
    p.add_argument("--prompt_template", default="", help="text with {prompt}, Jinja, or a file of either")
    p.add_argument("--max_seq_len", type=int, default=256, help="longest prompt in tokens; longer: dropped")
    p.add_argument("--num_workers", type=int, default=0, help="data loader processes")
    # reward: the sum of what is given
    p.add_argument("--reasoning", type=int, default=1, choices=[0, 1], help="1: think/answer format, marks")
    p.add_argument("--reward_model", nargs="*", default=[], help="PATH, or several: PATH=WEIGHT PATH=WEIGHT")
    p.add_argument("--reward_fn", default="", help="path.py:function of (prompts, responses, answers)")
    p.add_argument("--missing_eos_penalty", type=float, default=1.0, help="off the score of a cut answer")
    p.add_argument("--reward_url", default="", help="server: POST {query, prompts, labels} -> {rewards}")
    p.add_argument("--reward_timeout", type=float, default=600, help="seconds for function or server; 0: any")
    p.add_argument("--repetition_penalty", type=float, default=0.0, help="at most, off for repeated trigrams")
    p.add_argument("--length_reward", type=float, default=0.0, help="for 20 to 800 characters, off otherwise")
    p.add_argument("--normalize_reward", type=int, default=0, choices=[0, 1], help="by running mean, std")
    # rollout
    p.add_argument("--batch_size", type=int, default=128, help="prompts a step, per process")
    p.add_argument("--max_gen_len", type=int, default=64, help="longest response in tokens")
    p.add_argument("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    # PPO
    p.add_argument("--epochs", type=int, default=1, help="passes over the prompts")
    p.add_argument("--max_steps", type=int, default=0, help="stop after so many batches; 0: by --epochs")
    p.add_argument("--ppo_epochs", type=int, default=1, help="passes over each batch")
    p.add_argument("--mini_batch_size", type=int, default=32, help="sequences an optimizer step, per process")
    p.add_argument("--accumulation_steps", type=int, default=1, help="pieces of a minibatch; same result")
    p.add_argument("--learning_rate", type=float, default=5e-4, help="actor; cosine down to a tenth")
    p.add_argument("--critic_learning_rate", type=float, default=5e-4, help="critic; cosine down to a tenth")
    p.add_argument("--grad_clip", type=float, default=1.0, help="largest gradient norm, each model its own")
    p.add_argument("--clip_epsilon", type=float, default=0.2, help="clip of the ratio actor / old actor")
    p.add_argument("--vf_coef", type=float, default=0.5, help="weight of the value loss")
    p.add_argument("--cliprange_value", type=float, default=0.5, help="clip of a value's change in a batch")
    p.add_argument("--kl_coef", type=float, default=0.02, help="reward units a nat of KL to the reference")
    p.add_argument("--kl_in", default="loss", choices=["loss", "reward"], help="k2 loss, or k1 off rewards")
    p.add_argument("--target_kl", type=float, default=0.0, help="end a batch's updates above it; 0: never")
    p.add_argument("--gamma", type=float, default=1.0, help="discount")
    p.add_argument("--lam", type=float, default=0.95, help="GAE lambda")
    p.add_argument("--critic_init", default="auto", choices=["auto", "actor", "reward"], help="its start")
    p.add_argument("--critic_warmup_steps", type=int, default=2, help="batches that train only the critic")
    p.add_argument("--update_old_actor_freq", type=int, default=1, help="batches between old actor <- actor")
    # machine
    p.add_argument("--device", default="", help="cpu, cuda, cuda:1; default: a GPU where there is one")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="mixed precision")
    p.add_argument("--ddp", action="store_true", help="insist on having been started by torchrun")
    p.add_argument("--gradient_checkpointing", type=int, default=0, choices=[0, 1], help="saves memory")
    p.add_argument("--seed", type=int, default=42, help="of the prompt order and the sampling noise")
    # output
    p.add_argument("--out_dir", default=str(ROOT / "out"), help="where everything is written")
    p.add_argument("--run_name", default="", help="folder of this run; default: run_1, run_2, …")
    p.add_argument("--resume", default="", help="auto, or a run or checkpoint folder")
    p.add_argument("--log_interval", type=int, default=5, help="steps between printed lines and samples")
    p.add_argument("--save_interval", type=int, default=20, help="steps between checkpoints")
    p.add_argument("--keep_checkpoints", type=int, default=2, help="newest checkpoints kept")
    p.add_argument("--eval_interval", type=int, default=20, help="steps between evaluations; 0: ends only")
    p.add_argument("--use_wandb", action="store_true", help="log to SwanLab as well")
    p.add_argument("--wandb_project", default="small-lm-ppo", help="SwanLab project")
    args = p.parse_args(argv)
    check_ppo_flags(args)
    fill_paths(args)
    return args


@dataclass
class Run:
    """What every phase needs: the models, how they are stepped, and what does not change in a run."""

    args: argparse.Namespace
    world: World
    dtype: torch.dtype  # of mixed precision and sampling
    tokenizer: object
    prompts: RLAIFDataset
    eos: list  # token ids that end a response
    reward: Reward
    total_steps: int
    actor: torch.nn.Module  # trained
    old_actor: torch.nn.Module  # the behaviour policy
    sampler: Sampler  # samples from a copy of the old actor (or of the actor, to evaluate it)
    ref: torch.nn.Module  # the actor's start, frozen
    critic: torch.nn.Module  # trained
    policy: PolicyScorer  # of the actor
    value: ValueScorer  # of the critic
    actor_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    progress: Progress
    # what keeping.py asks of a run
    script, look, judged_by_name, fingerprints = "train_ppo.py", LOOK, frozenset(), fingerprints

    @property
    def modules(self):
        """{file name: what a checkpoint has the weights of}, with adapters: what has been learned of them"""
        modules = {"actor": self.actor, "critic": self.critic}
        if self.args.update_old_actor_freq > 1:  # otherwise it equals the actor between steps
            modules["old_actor"] = self.old_actor
        return {name: learned(module) for name, module in modules.items()}

    @property
    def optimizers(self):
        return {"actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}

    @property
    def minibatches(self):
        return self.args.batch_size // self.args.mini_batch_size

    @property
    def pth_path(self):
        moe = "_moe" if is_moe(self.actor) else ""
        return Path(self.args.out_dir) / f"ppo_actor_{self.actor.config.hidden_size}{moe}.pth"

    def save_result(self):
        with writing(self.pth_path):
            save_policy(self.actor, self.tokenizer, self.pth_path)

    def results(self):
        return f"model    {self.pth_path}\ntalk     python chat.py --model {self.pth_path}"


def build_run(args, world, actor, tokenizer, prompts):
    """Actor, old actor, reference and critic all start from the loaded policy (the critic may start from the
    reward model); with --lora_r they share its weights, frozen, and differ in their adapters. Models are in
    eval mode throughout: the training forward is the scoring forward."""
    device, dtype = world.device, set_precision(args.dtype, world.device)
    keep_freed_memory()
    reward = load_reward(args, device, dtype, tokenizer)
    actor.to(device).eval().requires_grad_(not args.lora_r)
    start = critic_start(args.critic_init, reward.models, tokenizer) or actor
    critic = CriticModel.from_model(start, share=args.lora_r > 0).to(device).eval()
    backbones = actor.base_model, critic.backbone
    for backbone in backbones:
        prepare(backbone, args.gradient_checkpointing)
    ref = frozen_copy(actor)
    for number, backbone in enumerate(backbones if args.lora_r else ()):
        add_adapters(backbone, args.lora_r, args.seed + number)
    options = {"weight_decay": 0.0, "fused": True}
    run = Run(
        args=args,
        world=world,
        dtype=dtype,
        tokenizer=tokenizer,
        eos=eos_ids(tokenizer, actor),
        reward=reward,
        prompts=prompts,
        total_steps=count_steps(args, len(prompts), world.size),
        actor=actor,
        old_actor=frozen_copy(actor),
        sampler=Sampler(ref, dtype),
        ref=ref,
        critic=critic,
        policy=PolicyScorer(actor, dtype),
        value=ValueScorer(critic, dtype),
        actor_optimizer=AdamW(trained(actor), args.learning_rate, **options),
        critic_optimizer=AdamW(trained(critic), args.critic_learning_rate, **options),
        progress=Progress(token_budget=tokens_per_pass(device)),
    )
    if Path(args.model).resolve() == run.pth_path.resolve():
        raise InputError(f"--model {args.model}: this run would write its result there; copy it elsewhere")
    return run


def roll_out(run, model, prompts, keys, temperature):
    """Prompts -> (rollout, response texts)."""
    ids = [p.prompt_ids for p in prompts]
    rollout = run.sampler.load(model).sample(ids, keys, run.eos, run.args.max_gen_len, temperature)
    return rollout, response_texts(rollout, run.tokenizer)


def judge(run, prompts, rollout, texts):
    """Responses -> opinions: what each reward says of them, before it is weighed."""
    answers = [p.answer for p in prompts]
    return run.reward.ask([p.prompt for p in prompts], texts, answers, rollout.finished.tolist())


def fill_rollout(run, rollout, scores, metrics):
    """Old and reference log-probs, values, rewards, advantages, returns -> the advantages' std."""
    args, mask = run.args, rollout.mask
    for name, model in (("old_logprobs", run.old_actor), ("ref_logprobs", run.ref)):
        scorer = PolicyScorer(model, run.dtype)
        setattr(rollout, name, score_all(rollout, lambda r, s=scorer: s(*r.sequences, args.temperature)[0]))
    critic = ValueScorer(run.critic, run.dtype)
    rollout.values = score_all(rollout, lambda r: critic(*r.sequences))

    k1, k2, k3 = ppo.kl_estimators(rollout.old_logprobs, rollout.ref_logprobs)
    penalty = args.kl_coef * k1 if args.kl_in == "reward" else None
    rollout.rewards = ppo.token_rewards(scores.to(mask.device), rollout.response_len, mask, penalty)
    rollout.advantages, rollout.returns = ppo.gae(rollout.rewards, rollout.values, mask, args.gamma, args.lam)

    errors = rollout.returns - rollout.values
    totals = torch.stack([ppo.moments(x, mask) for x in (rollout.advantages, rollout.returns, errors)])
    (mean, std), (_, return_std), (_, error_std) = map(ppo.mean_std, run.world.sum(totals))
    std = max(std, 1e-4)  # all advantages equal: nothing to learn from, and nothing to divide by
    rollout.advantages = torch.where(mask, (rollout.advantages - mean) / std, 0.0)

    gap = (rollout.sampler_logprobs - rollout.old_logprobs).abs()
    for name, x in (("kl/k1", k1), ("kl/k2", k2), ("kl/k3", k3), ("rollout/sampler_gap", gap)):
        metrics.add(name, ppo.masked_sum(x, mask), rollout.response_len.sum())
    metrics.add("kl/sequence", ppo.masked_sum(k1, mask), len(scores))
    metrics.add("value/explained_variance", 1 - (error_std / max(return_std, 1e-8)) ** 2, 1)
    return std


def backward(run, minibatch, tokens, std, train_actor, token_budget):
    """Gradients of one minibatch, micro-batch by micro-batch -> metrics, as sums over this process' tokens.

    ``tokens`` counts the minibatch's response tokens over all processes: every loss is a sum divided by it,
    and the sum of all processes' gradients is the gradient of the whole minibatch.
    """
    args, sums, sequences = run.args, Metrics(), run.args.mini_batch_size * run.world.size
    pieces = [minibatch.rows(index) for index in micro_batches(minibatch.lengths.tolist(), token_budget)]
    for mb in pieces:
        values = run.value(*mb.sequences)
        loss, info = ppo.value_loss(values, mb.values, mb.returns, mb.mask, args.cliprange_value)
        (args.vf_coef * loss / tokens).backward()
        sums.add_all({"value/loss": loss, **info}, mb.response_len.sum())
    for mb in pieces if train_actor else ():
        logprobs, entropy, balance = run.policy(*mb.sequences, args.temperature)
        loss, info = ppo.policy_loss(logprobs, mb.old_logprobs, mb.advantages, mb.mask, args.clip_epsilon)
        total = loss
        if args.kl_in == "loss":  # divided by the advantages' std, as the advantages were
            k2 = ppo.kl_estimators(logprobs, mb.ref_logprobs)[1]
            total = total + args.kl_coef / std * ppo.masked_sum(k2, mb.mask)
        (total / tokens + balance / sequences).backward()
        info |= {"policy/loss": loss, "policy/entropy": ppo.masked_sum(entropy, mb.mask)}
        sums.add_all(info, mb.response_len.sum())
        sums.add("policy/balance_loss", balance, len(mb.tokens))
    return sums


def backward_that_fits(run, minibatch, *more):
    """``backward`` in as many pieces as --accumulation_steps wants, or in more, as small as memory wants."""
    lengths, pieces = minibatch.lengths.tolist(), run.args.accumulation_steps
    return gradients_that_fit(run, lambda budget: backward(run, minibatch, *more, budget), lengths, pieces)


def optimizer_step(run, number, loss, train_actor):
    """Optimizer step ``number`` of the run, of critic and actor -> False if it was not finite and is none."""
    args = run.args
    per_batch = args.ppo_epochs * run.minibatches
    start, total = args.critic_warmup_steps * per_batch, run.total_steps * per_batch
    both = [(run.critic, run.critic_optimizer, ppo.cosine_lr(args.critic_learning_rate, number, total))]
    if train_actor:
        lr = ppo.cosine_lr(args.learning_rate, number - start, total - start)
        both.append((run.actor, run.actor_optimizer, lr))
    return step_if_finite(run, loss, both)[0]


def update(run, rollout, step, std, metrics):
    """PPO epochs over a rollout, minibatches in a new order each time; ends early above ``target_kl``."""
    args, world = run.args, run.world
    size, train_actor = args.mini_batch_size, step >= args.critic_warmup_steps
    minibatches = [rollout.rows(range(k * size, (k + 1) * size)) for k in range(run.minibatches)]
    tokens = world.sum(torch.stack([mb.response_len.sum() for mb in minibatches])).tolist()
    for epoch in range(step * args.ppo_epochs, (step + 1) * args.ppo_epochs):
        for place, k in enumerate(epoch_order(run.minibatches, args.seed, epoch)):
            sums = backward_that_fits(run, minibatches[k], tokens[k], std, train_actor)
            metrics.merge(sums)
            totals = [sums.total(name) for name in ("policy/approx_kl", "policy/loss", "value/loss")]
            totals = torch.tensor(totals, dtype=torch.float64, device=world.device)
            approx_kl, *losses = (world.sum(totals) / tokens[k]).tolist()
            stop = 0 < args.target_kl < approx_kl
            metrics.add("policy/early_stop", stop, 1)
            if stop:  # before the step, not after: momentum must not move the weights either
                forget_gradients(run)
                return
            stepped = optimizer_step(run, epoch * run.minibatches + place, sum(losses), train_actor)
            metrics.add("policy/skipped_steps", not stepped, 1)


def collect(run, step, batches, positions):
    """The next prompts, which the old actor answers and the rewards judge -> (prompts, rollout, texts, score
    parts, seconds).

    Nothing has been learned yet. Raises InputError on all processes where one's file or reward fails.
    """
    start = time.perf_counter()
    with run.world.all_or_none():
        batch = next_batch(batches)
        keys = noise_keys(run.args.seed, step, positions)
        rollout, texts = roll_out(run, run.old_actor, batch, keys, run.args.temperature)
        sampled = time.perf_counter()
        opinions = judge(run, batch, rollout, texts)
    parts = run.reward.settle(opinions, run.progress.raw_scores, run.world)
    seconds = {"rollout": sampled - start, "reward": time.perf_counter() - sampled}
    return batch, rollout, texts, parts, seconds


def learn(run, step, collected):
    """Fill the rollout, update the models -> (metrics, rows for samples.jsonl)."""
    args, metrics, clock = run.args, Metrics(), [time.perf_counter()]
    batch, rollout, texts, parts, seconds = collected
    std = fill_rollout(run, rollout, parts["score"], metrics)
    clock.append(time.perf_counter())
    update(run, rollout, step, std, metrics)
    if (step + 1) % args.update_old_actor_freq == 0:
        run.old_actor.load_state_dict(run.actor.state_dict())
    clock.append(time.perf_counter())

    metrics.add_all({f"reward/{name}": x.sum() for name, x in parts.items()}, len(batch))
    metrics.add("rollout/length", rollout.response_len.sum(), len(batch))
    metrics.add("rollout/finished", rollout.finished.sum(), len(batch))
    means = metrics.means(run.world)
    seconds = {**seconds, "score": clock[1] - clock[0], "update": clock[2] - clock[1]}
    means |= {f"perf/{name}_seconds": x for name, x in seconds.items()}
    means |= running_metrics(run.progress.raw_scores)
    means["perf/samples_per_second"] = args.batch_size * run.world.size / sum(seconds.values())
    return means, sample_rows(batch, texts, parts)


def evaluate_actor(run, prompts):
    """The actor on the held-out prompts: {"eval/…": mean}, nothing without ``--eval_data_path``."""
    if prompts is None:
        return {}

    def answer(batch, temperature):
        keys = noise_keys(run.args.seed, EVAL_STEP, [p.index for p in batch])
        rollout, texts = roll_out(run, run.actor, batch, keys, temperature)
        return rollout, texts, run.reward.settle(judge(run, batch, rollout, texts), run.progress.raw_scores)

    return evaluate(answer, prompts, run.args.temperature, run.args.reasoning, run.world)


def train(run, held_out, tracker):
    """The loop, from where the run stands to its end, or until someone asks it to stop or a reward fails."""
    args, world, progress = run.args, run.world, run.progress
    share = (args.batch_size, args.mini_batch_size, world.rank, world.size)
    order = PromptBatches(len(run.prompts), args.seed, progress.step, run.total_steps, *share)
    batches = iter(prompt_loader(run.prompts, order, args.num_workers))
    with StopRequest("\nstopping after this step; once more: at once\n") as stop:
        if progress.step == run.total_steps:  # a run that was killed before its last .pth was there
            save(run, tracker)
        if progress.step == 0:
            record(run, tracker, 0, evaluate_actor(run, held_out))
        for step in order.steps:
            try:
                collected = collect(run, step, batches, local_positions(*share))
            except InputError:
                save(run, tracker)
                raise
            metrics, rows = learn(run, step, collected)
            world.check_identical(actor=run.actor, critic=run.critic)
            progress.step = done = step + 1
            last, signal = done == run.total_steps, stop.agreed(world)
            failed = None
            if last or (args.eval_interval and done % args.eval_interval == 0):
                try:
                    metrics |= evaluate_actor(run, held_out)
                except InputError as error:  # of a reward as well
                    failed = error
            record(run, tracker, done, metrics, rows)
            if last or signal or failed or done % args.save_interval == 0:
                save(run, tracker)
            if failed:
                raise failed
            if signal and not last:
                raise SystemExit(128 + signal)


def main(argv=None):
    args = parse_args(argv)
    with init_world(args.device, args.ddp) as world:
        with world.all_or_none():
            actor, tokenizer, prompts, held_out = load_inputs(args)
            run = build_run(args, world, actor, tokenizer, prompts)
        tracker = begin(run, introduction(run, held_out), sys.argv[1:] if argv is None else argv)
        if args.update_old_actor_freq == 1:  # a checkpoint has no old actor of its own then
            run.old_actor.load_state_dict(run.actor.state_dict())
        round_frozen(run)
        try:
            train(run, held_out, tracker)
            tracker.summary(run)
        except (InputError, SystemExit):
            tracker.stopped()
            raise
        finally:
            tracker.finish()


if __name__ == "__main__":
    run_script(main)
