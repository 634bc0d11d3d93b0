"""Whole steps of PPO against a second implementation in plain torch, ``Plain`` below.

``Plain`` has models that nothing of this project has touched, a forward with padding and an attention mask,
and its own formulas for sampling, GAE, whitening, losses, clips, schedules and metrics. Both take the same
start, in which actor, old actor and reference all differ. After each of three steps all weights and all
metrics must agree. A metric that ``Plain`` does not compute fails the test.
"""

import copy
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from steps import take_step
from tiny import WORDS, flags, read_jsonl, run_files, write_jsonl
from torch.nn.utils.rnn import pad_sequence

from dataset.lm_dataset import epoch_order
from model.loading import load_policy, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_ppo
from trainer.compute import scoring
from trainer.generation.sampling import noise_keys, uniform
from trainer.models import Models
from trainer.rewards.rules import repetition
from trainer.run import PpoRun
from trainer.runs.distributed import World
from trainer.step_metrics import metrics_over_processes

ALONE = World(0, 1, torch.device("cpu"))

STEPS = 3
REWARD = """def steps(prompts, responses, answers):
    places = [[i for i, c in enumerate(r) if c == "a"] for r in responses]
    return [[(None, -0.1 * len(r)), *((i, 1) for i in mine)] for r, mine in zip(responses, places)]
"""
GAME = """class Game:
    def reset(self, prompt):
        self.turns = 0
    def step(self, text):
        self.turns += 1
        words = text.split()
        return "abcdefgh"[len(words) % 8], 0.5 * words.count("b") - 0.2, self.turns == 3 or "h" in words
"""


def options(text):
    """ "batch_size 16 seed 5" -> {"batch_size": "16", "seed": "5"}"""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


FLAGS = options(
    f"batch_size 16 mini_batch_size 4 ppo_epochs 2 max_steps {STEPS + 2} critic_warmup_steps 1 max_gen_len 8 "
    "update_old_actor_freq 2 accumulation_steps 2 temperature 0.7 gamma 0.9 lam 0.7 kl_coef 0.3 "
    "grad_clip 1.5 clip_epsilon 0.15 cliprange_value 0.3 vf_coef 0.4 missing_eos_penalty 0.75 "
    "learning_rate 1e-3 critic_learning_rate 4e-3 seed 5 dtype float32 critic_init actor"
)
NO_CRITIC = dict.fromkeys(
    ["critic_warmup_steps", "lam", "cliprange_value", "vf_coef", "critic_learning_rate", "critic_init"]
)
SPARING = "no KL, old log-probs from the sampler"
SINGLE = "one update a batch, whose forward gives the old log-probs"
CASES = {
    "all options": options(
        "kl_in loss critic_lam 0.6 importance_cap 1.05 cliprange_value 0.1 vf_coef 1.2 clip_epsilon_high 0.3 "
        "dual_clip 1.4 lr_schedule constant lr_warmup_steps 1 max_steps 12 replay_batches 1 "
        "overlong_buffer 5 overlong_penalty 0.6 min_gen_len 3 entropy_coef 0.2 entropy_top 0.6 ptx_coef 0.3 "
        "steps 1"
    ),
    "KL in the reward, early stop": options(
        "kl_in reward target_kl 0.02 replay_batches 2 kl_target 0.2 kl_horizon 20 batch_size 12 "
        "grad_clip 1.8 cliprange_value 0.2"
    ),
    "experts": options("kl_in loss experts 1 grad_clip 2.8 ptx_coef 0.5 ppo_epochs 1 batch_size 8"),
    "logged answers": options(
        "kl_in loss logged 1 ptx_coef 0.2 update_old_actor_freq 1 cliprange_value 0.1 missing_eos_penalty 0"
    ),
    "group, early stop": NO_CRITIC
    | options(
        "advantage group num_generations 2 kl_in loss gamma 1 target_kl 0.03 grad_clip 1.8 importance_cap 0 "
        "lr_warmup_steps 1"
    ),
    "RLOO": NO_CRITIC
    | options(
        "advantage rloo num_generations 4 kl_in reward gamma 1 replay_batches 1 batch_size 8 ppo_epochs 1"
    ),
    "CISPO, cut answers out": options(
        "kl_in reward policy_loss cispo clip_epsilon 0.1 clip_epsilon_high 0.2 mask_truncated 1 "
        "entropy_top 0.8 update_old_actor_freq 3 cliprange_value 0"
    ),
    "GSPO, four answers": options(
        "kl_in loss policy_loss gspo clip_epsilon 0.05 clip_epsilon_high 0.1 num_generations 4 "
        "replay_batches 1 mini_batch_size 8 cliprange_value 0.2"
    ),
    "several turns": options(
        "game 1 max_gen_len 24 max_turns 4 kl_in reward critic_lam 0.6 replay_batches 1 cliprange_value 0.05 "
        "entropy_top 0.8 vf_coef 1.2 min_gen_len 3"
    ),
    "several turns, RLOO": NO_CRITIC
    | options(
        "game 1 max_gen_len 24 advantage rloo num_generations 4 kl_in loss gamma 1 steps 1 max_turns 2 "
        "entropy_coef 0.2 mask_truncated 1 learning_rate 3e-3 grad_clip 0.4"
    ),
    "several turns, GSPO": options(
        "game 1 max_gen_len 24 kl_in loss policy_loss gspo clip_epsilon 0.05 clip_epsilon_high 0.1 "
        "num_generations 4 mini_batch_size 8 lam 1 grad_clip 0.6 cliprange_value 0.1"
    ),
    SINGLE: NO_CRITIC
    | options(
        "advantage reinforce kl_in reward mini_batch_size 16 ppo_epochs 1 update_old_actor_freq 1 "
        "importance_cap 1.05 grad_clip 2"
    ),
    SPARING: NO_CRITIC | options("advantage rloo num_generations 4 kl_in reward gamma 1 kl_coef 0"),
}


class Plain:
    """PPO once more. Sequences are padded rows; what belongs to response tokens is flat, one number a token,
    row after row: ``row`` says whose it is."""

    def __init__(self, run, policy, critic):
        """policy, critic: copies of the run's classes before the run has seen them."""
        self.args, self.total_steps = run.args, run.total_steps
        self.ids = len(run.tokenizer)  # models may have rows above these
        self.actor, self.old_actor, self.ref = (
            same_weights(policy, model)
            for model in (run.models.actor, run.models.old_actor, used_reference(run))
        )
        self.critic = same_weights(critic, run.models.critic) if critic else None
        self.scale, self.variances = 1.0, []  # of the critic's values and returns
        self.begins = run.args.critic_warmup_steps
        self.used, self.batches, self.scores = set(), [], torch.zeros(0)
        self.kl_coef = run.args.kl_coef
        self.sampler_has_scored = run.models.sampler_has_scored
        self.norms, self.packs, self.games = {"critic": [], "actor": []}, [], []
        path = run.args.ptx_data_path
        self.texts = [record["text"] for record in read_jsonl(path)] if path else []
        adam = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        self.adam = {
            name: torch.optim.AdamW(model.parameters(), lr=1.0, **adam)
            for name, model in (("critic", self.critic), ("actor", self.actor))
            if model
        }

    # ------------------------------------------------------------------------------------------- forwards

    def take(self, rollout):
        """The sampled tokens, as they are, below those of replayed batches"""
        count = max(self.args.replay_batches, 0)
        self.batches = [*self.batches[-count:], rollout] if count else [rollout]
        rows = [row for batch in self.batches for row in batch.tokens.tolist()]
        width = max(map(len, rows))
        self.tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        self.prompt_len = [n for batch in self.batches for n in batch.prompt_len.tolist()]
        self.response_len = [n for batch in self.batches for n in batch.response_len.tolist()]
        self.first_new = len(rows) - self.args.batch_size
        acted = [actions_of(batch)[row] for batch in self.batches for row in range(len(batch.tokens))]
        places = [(row, t) for row, mine in enumerate(acted) for t, sampled in enumerate(mine) if sampled]
        self.row = torch.tensor([row for row, _ in places])
        self.place = torch.tensor([self.prompt_len[row] + t for row, t in places])
        self.new = self.row >= self.first_new

    @property
    def sampled_logprobs(self):
        """The sampler's, of all response tokens"""
        return torch.cat([batch.sampler_logprobs[batch.action_mask] for batch in self.batches])

    def rows_of(self, k):
        """The rows of minibatch k: the answers to a prompt are dealt to as many minibatches as can be."""
        count, batch = self.args.num_generations, self.args.batch_size
        per_batch = batch // self.args.mini_batch_size
        dealt = math.gcd(count, per_batch)
        prompts = self.args.mini_batch_size * dealt // count  # that share these minibatches
        before = k // per_batch * batch
        place = [row // count // prompts * dealt + row % count % dealt for row in range(batch)]
        return [before + row for row in range(batch) if place[row] == k % per_batch]

    def inputs(self, rows):
        """These rows as (tokens, attention mask), and which flat response tokens are theirs."""
        lengths = torch.tensor(self.prompt_len) + torch.tensor(self.response_len)
        mask = torch.arange(self.tokens.shape[1]) < lengths[rows, None]
        return self.tokens[rows], mask.long(), torch.isin(self.row, torch.tensor(rows))

    def policy(self, model, rows):
        """-> (log-probs and entropies of the response tokens, balance loss of each sequence)"""
        tokens, mask, mine = self.inputs(rows)
        output = model.base_model(tokens, attention_mask=mask, **asked_of(model))
        row, place = torch.searchsorted(torch.tensor(rows), self.row[mine]), self.place[mine]
        logits = model.get_output_embeddings()(output.last_hidden_state)[row, place - 1]
        logits = logits / self.args.temperature
        early = place - torch.tensor(self.prompt_len)[self.row[mine]] < self.args.min_gen_len - 1
        logits = logits.masked_fill(early[:, None] & (torch.arange(logits.shape[1]) == 0), -1e30)  # 0 is EOS
        logits = logits.masked_fill(torch.arange(logits.shape[1]) >= self.ids, -1e30)
        log_p = torch.log_softmax(logits, -1)
        chosen = log_p[torch.arange(len(row)), tokens[row, place]]
        return chosen, -(log_p.exp() * log_p).sum(-1), balance_losses(output, mask, model.config)

    def values(self, rows):
        tokens, mask, mine = self.inputs(rows)
        output = self.critic.backbone(tokens, attention_mask=mask, **asked_of(self.critic.backbone))
        head = self.critic.value_head
        values = self.scale * (output.last_hidden_state @ head.weight[0] + head.bias)
        balance = balance_losses(output, mask, self.critic.backbone.config)
        row = torch.searchsorted(torch.tensor(rows), self.row[mine])
        return values[row, self.place[mine] - 1], balance

    # -------------------------------------------------------------------------------------------- collect

    @torch.no_grad()
    def responses(self, prompts, step, eos):
        """What the old actor answers with this step's noise: the first token whose cumulative probability
        exceeds the uniform number."""
        args, count = self.args, self.args.num_generations
        prompts = [prompt.prompt_ids for prompt in prompts for _ in range(count)]
        place = torch.arange(len(prompts))
        noise = uniform(noise_keys(args.seed, step, place // count, place % count), args.max_gen_len)
        found = [[] for _ in prompts]
        self.games = [Game() for _ in prompts]
        while going := [i for i, game in enumerate(self.games) if not game.over]:
            t = torch.tensor([len(found[i]) for i in going])
            rows = [torch.tensor([*prompts[i], *found[i]]) for i in going]
            last = torch.tensor([len(row) - 1 for row in rows])
            tokens = pad_sequence(rows, batch_first=True)
            mask = torch.arange(tokens.shape[1]) <= last[:, None]
            logits = (
                self.old_actor(tokens, attention_mask=mask.long()).logits[range(len(rows)), last].double()
            )
            logits[:, self.ids :] = -math.inf
            logits[(t < args.min_gen_len - 1).nonzero(), eos] = -math.inf
            below = torch.softmax(logits / args.temperature, -1).cumsum(-1) <= noise[going, t, None]
            for i, token in zip(going, below.sum(-1).tolist(), strict=True):
                found[i].append(token)
                self.games[i].follow(found[i], token in eos, args)
        return found

    def scored(self, responses, eos, logged=()):
        """-> {name: mean} of the parts of the reward, their sum, and the responses' lengths and ends. logged:
        the scores that came with them, if they did."""
        function, ended = [], [ids[-1] in eos for ids in responses]
        environment = {}
        if self.args.env:
            ended = [end and not game.full for end, game in zip(ended, self.games, strict=True)]
            environment = {"reward/environment": [sum(game.rewards.values()) for game in self.games]}
        last_turns = [
            ids[game.begun :] if self.args.env else ids
            for ids, game in zip(responses, self.games or responses, strict=True)
        ]
        for ids in last_turns:
            text = " ".join(words_of([i for i in ids if i not in eos]))
            function.append(text.split().count("a") - 0.1 * len(text))
        missing = [0.0 if end else -self.args.missing_eos_penalty for end in ended]
        numbers = {"reward/function": function, "reward/missing_eos": missing}
        if logged:
            function, missing, numbers = logged, [0.0] * len(logged), {}
        kept = self.scores[-self.first_new :] if self.first_new else self.scores[:0]
        numbers |= environment
        scores = torch.tensor(function) + torch.tensor(missing) + sum(map(torch.tensor, environment.values()))
        room, over = self.args.overlong_buffer, {}
        if room:  # eq. 13 of DAPO
            free = self.args.max_gen_len - room
            over = [0.0 if len(ids) <= free else (free - len(ids)) / room for ids in responses]
            over = {"reward/overlong": [self.args.overlong_penalty * x for x in over]}
            scores += torch.tensor(over["reward/overlong"])
        self.scores = torch.cat([kept, scores])
        numbers["rollout/finished"] = ended
        if self.args.env:
            counts = zip(self.games, responses, strict=True)
            responses = [[i for i, mine in zip(ids, game.acted, strict=True) if mine] for game, ids in counts]
            numbers["rollout/turns"] = [len(game.rewards) + game.cut for game in self.games]
            numbers["rollout/observation_tokens"] = [game.acted.count(False) for game in self.games]
            numbers["rollout/no_room"] = [game.full for game in self.games]
            numbers["rollout/hung"] = [0] * len(responses)
        lengths = [len(ids) for ids in responses]
        numbers |= {**over, "reward/score": scores.tolist(), "rollout/length": lengths}
        numbers["rollout/repetition"] = [repetition(ids) for ids in responses]
        means = {name: sum(x) / len(x) for name, x in numbers.items()}
        means |= metrics_over_processes(
            responses, scores, ALONE
        )  # by hand in test_step_metrics.py, as repetition is
        if (count := self.args.num_generations) > 1:
            groups = [{*scores.tolist()[i : i + count]} for i in range(0, len(scores), count)]
            means["rollout/equal_groups"] = sum(len(group) == 1 for group in groups) / len(groups)
        return means

    @torch.no_grad()
    def gap_of_samples(self):
        logprobs = self.policy(self.old_actor, list(range(self.first_new, len(self.prompt_len))))[0]
        return (logprobs - self.sampled_logprobs[self.new]).abs().max()

    # ---------------------------------------------------------------------------------------------- learn

    def learn(self, step):
        """-> {name: mean} of what learning measures"""
        args, self.noted = self.args, {}
        self.fill(step)
        count = args.batch_size // args.mini_batch_size
        dealt = iter(self.deal(step, count))
        actor_learns, stopped = step >= self.begins, False
        for epoch in range(args.ppo_epochs):
            for place in range(count):
                number = (step * args.ppo_epochs + epoch) * count + place
                rows_of_k = self.rows_of(next(dealt))
                if self.critic:
                    self.step("critic", self.critic_loss(rows_of_k), number)
                if actor_learns and not stopped:
                    loss, approx_kl = self.actor_loss(rows_of_k)
                    loss = loss + self.ptx_loss(number) if args.ptx_coef else loss
                    stopped = 0 < args.target_kl < approx_kl
                    if not stopped:
                        self.step("actor", loss, number)
                    self.note("policy/early_stop", torch.tensor([float(stopped)]))
        if (step + 1) % args.update_old_actor_freq == 0:
            self.old_actor = copy.deepcopy(self.actor)
        if args.offline_data_path:  # of the policy's own samples only
            of_samples = ("kl/", "rollout/")
            self.noted = {name: x for name, x in self.noted.items() if not name.startswith(of_samples)}
        return {name: torch.cat(parts).double().mean().item() for name, parts in self.noted.items()}

    def deal(self, step, count):
        """Each batch is a pack of its minibatches, in a new order for each PPO epoch. A step takes the next
        ones of the pack of each batch that is kept, in turn: as evenly as whole numbers are."""
        epochs, seed = self.args.ppo_epochs, self.args.seed
        orders = (epoch_order(count, seed, epoch) for epoch in itertools.count(step * epochs))
        self.packs.append(int(k) for order in orders for k in order)
        packs = self.packs[-1 - self.args.replay_batches :]
        share, taken = Fraction(count * epochs, len(packs)), []
        for age, pack in enumerate(reversed(packs)):
            mine = math.ceil((age + 1) * share) - math.ceil(age * share)
            place = len(packs) - 1 - age
            taken += [(Fraction(2 * i + 1, mine), place, place * count + next(pack)) for i in range(mine)]
        return [k for *_, k in sorted(taken)]

    @torch.no_grad()
    def fill(self, step):
        """What stays fixed while the batch is learned from, and its metrics"""
        args, rows = self.args, len(self.prompt_len)
        scored, entropy, _ = self.policy(self.old_actor, list(range(rows)))
        least = sorted(entropy.tolist())[-round(args.entropy_top * len(entropy))]
        self.counted = (entropy >= least).float()
        if args.mask_truncated:
            ended = [end for batch in self.batches for end in batch.finished.tolist()]
            self.counted *= torch.tensor(ended)[self.row]
        self.ref_logprobs = self.policy(self.ref, list(range(rows)))[0]
        sampled = self.sampled_logprobs
        if args.offline_data_path:  # whose the answers are is not known: the reference's
            scored = sampled = self.ref_logprobs
        before = sampled if self.sampler_has_scored(step) else scored  # the update
        self.old_logprobs = scored if args.mini_batch_size == args.batch_size else before
        self.weights = torch.exp(self.old_logprobs - sampled)
        uncut = self.weights[self.new].double()
        self.weights = self.weights.clamp(max=args.importance_cap) if args.importance_cap else self.weights**0
        k1 = before - self.ref_logprobs
        if args.kl_target:
            self.adapt(step, k1[self.new].sum().item() / args.batch_size)
        rewards = -self.kl_coef * k1 if args.kl_in == "reward" else torch.zeros_like(k1)
        last = [int((self.row <= i).sum()) - 1 for i in range(rows)]
        rewards[last] += self.scores
        if " ".join(args.reward_fn).endswith("steps"):  # of each score 1 belongs to every "a"
            there = self.tokens[self.row, self.place] == 2
            rewards += there.float()
            rewards[last] -= torch.tensor([there[self.row == i].sum() for i in range(rows)])
        if args.env:  # a turn's reward belongs to its last token
            turns = [batch.turn_rewards for batch in self.batches]
            turns = pad_sequence([row for batch in turns for row in batch], batch_first=True)
            there = turns[self.row, self.place - torch.tensor(self.prompt_len)[self.row]]
            rewards += there
            rewards[last] -= turns.sum(1)
        outcome = self.gae(rewards, torch.zeros_like(rewards), 1.0)
        if self.critic:
            self.old_values = self.values(list(range(rows)))[0]
            self.rescale(outcome)
        self.estimate(rewards, outcome)
        new, k1, outcome = self.new, k1[self.new], outcome[self.new]
        k1_of_rows = [k1[self.row[new] == i].sum() for i in range(self.first_new, rows)]
        if self.kl_coef:
            self.note("kl/k1", k1)
            self.note("kl/k3", torch.exp(-k1) - 1 + k1)
            self.note("kl/sequence", torch.stack(k1_of_rows))
        if not self.sampler_has_scored(step):
            self.note("rollout/sampler_gap", (self.sampled_logprobs - self.old_logprobs)[new].abs())
            self.note("rollout/importance_weight", self.weights[new])
            self.note("rollout/importance_ess", (uncut.sum() ** 2 / (uncut @ uncut) / len(uncut))[None])
        if not self.critic:
            return
        values = self.old_values[new]
        self.note("value/mean", values)
        self.note("value/return", outcome)
        self.note("value/scale", torch.tensor([self.scale]))
        self.note("value/explained_variance", 1 - ((outcome - values).var() / outcome.var())[None])

    def estimate(self, rewards, outcome):
        """Advantages and what they were divided by; the critic's returns"""
        args, kind = self.args, self.args.advantage
        if kind == "gae":
            self.returns = self.gae(rewards, self.old_values, args.critic_lam) + self.old_values
            advantages = self.gae(rewards, self.old_values, args.lam)
        elif kind == "reinforce":
            advantages = outcome
        else:
            sums = [rewards[self.row == i].sum().item() for i in range(len(self.prompt_len))]
            of_rows, stds = [], []
            for i, mine in enumerate(sums):
                first = i - i % args.num_generations
                group = sums[first : first + args.num_generations]
                if kind == "rloo":
                    of_rows.append(mine - (sum(group) - mine) / (len(group) - 1))
                else:
                    stds.append(np.std(group, ddof=1))
                    of_rows.append((mine - np.mean(group)) / (stds[-1] or 1.0))
            advantages = torch.tensor(of_rows)[self.row]
        std, middle = advantages.std(correction=0), advantages.mean()
        if kind in ("rloo", "group"):
            sizes = advantages if kind == "rloo" else torch.tensor(stds)[self.row]
            std, middle = sizes[sizes != 0].square().mean().sqrt(), 0.0
        self.note("policy/advantage_std", std[None])
        self.unit = std
        self.advantages = advantages if kind == "group" else (advantages - middle) / std

    def gae(self, rewards, values, lam):
        """Advantages, token by token from the end of each response"""
        advantages = torch.zeros_like(rewards)
        for i in range(len(self.prompt_len)):
            following_value = following = 0.0
            for t in reversed((self.row == i).nonzero()[:, 0].tolist()):
                delta = rewards[t] + self.args.gamma * following_value - values[t]
                advantages[t] = following = delta + self.args.gamma * lam * following
                following_value = values[t]
        return advantages

    def rescale(self, outcome):
        """Values are in units of the returns' running std; the first batch sets their mean
        and, where they are worse than that alone, their slope."""
        head = self.critic.value_head
        if not self.variances:
            slope = 1.0
            error = outcome - self.old_values
            if error.var() > 1.1 * outcome.var() or self.old_values.var() < 0.1 * outcome.var():
                slope = max(np.polyfit(self.old_values.double().numpy(), outcome.double().numpy(), 1)[0], 0.0)
            shift = outcome.mean() - slope * self.old_values.mean()
            head.weight *= slope
            head.bias.copy_(slope * head.bias + shift / self.scale)
            self.old_values = slope * self.old_values + shift
        new = outcome.var(correction=0).item()
        self.variances.append(new)
        if len(self.variances) > 1:
            new = min(new, 4 * max(self.scale**2, self.variances[-2]))
        share = max(1 / len(self.variances), 0.1)
        scale = math.sqrt((1 - share) * self.scale**2 + share * new)
        for p in head.parameters():
            p *= self.scale / scale
        self.scale = scale

    def adapt(self, step, kl):
        """--kl_target, once the actor has begun to learn: the first batch of each old actor"""
        first = step % self.args.update_old_actor_freq == 0
        if first and step > self.begins:
            error = max(-0.2, min(0.2, kl / self.args.kl_target - 1))
            self.kl_coef *= 1 + error * self.args.batch_size / self.args.kl_horizon
            self.used.add("weight of the KL")
        self.note("kl/coef", torch.tensor([self.kl_coef], dtype=torch.float64))

    def critic_loss(self, rows):
        mine = self.inputs(rows)[2]
        values, balance = self.values(rows)
        values, old, returns = (x / self.scale for x in (values, self.old_values[mine], self.returns[mine]))
        reach = self.args.cliprange_value or math.inf
        clipped = torch.minimum(torch.maximum(values, old - reach), old + reach)
        error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
        losses = torch.maximum(error, clipped_error) / 2
        self.note("value/loss", losses)
        binds = ((values - old).abs() > reach) & (clipped_error > error)
        self.note("value/clip_fraction", binds.float())
        self.note("value/balance_loss", balance)
        return self.args.vf_coef * losses.mean() + balance.mean()

    def actor_loss(self, rows):
        """-> (loss, the old policy's KL to the new one)"""
        args, mine = self.args, self.inputs(rows)[2]
        logprobs, entropy, balance = self.policy(self.actor, rows)
        ratio, advantages = torch.exp(logprobs - self.old_logprobs[mine]), self.advantages[mine].clone()
        if args.kl_in == "reward":  # later tokens' KL counts as in GAE
            moved, rows = (logprobs.detach() - self.old_logprobs[mine]), self.row[mine]
            for t in range(len(rows)):
                after = [u for u in range(t, len(rows)) if rows[u] == rows[t]]
                later = sum((args.gamma * args.lam) ** (u - t) * moved[u] for u in after)
                advantages[t] -= self.kl_coef / self.unit * later
        low, high = 1 - args.clip_epsilon, 1 + (args.clip_epsilon_high or args.clip_epsilon)
        limited = ratio
        if args.policy_loss == "gspo":
            row, log_ratio = self.row[mine], torch.log(ratio)
            mean = torch.stack([log_ratio[row == i].mean() for i in row]).detach()
            limited = torch.exp(mean) * ratio / ratio.detach()
        losses = -torch.minimum(limited * advantages, limited.clamp(low, high) * advantages)
        if args.policy_loss == "cispo":
            losses = -ratio.detach().clamp(low, high) * advantages * logprobs
        if args.dual_clip:
            bad = advantages < 0
            limit = -args.dual_clip * advantages[bad]
            self.used |= {"dual clip"} if (losses[bad] > limit).any() else set()
            losses[bad] = torch.minimum(losses[bad], limit)
            self.used |= {"upper clip"} if ((ratio > 1 + args.clip_epsilon) & (ratio < high)).any() else set()
            self.used |= {"cap"} if (self.weights == args.importance_cap).any() else set()
        losses = self.counted[mine] * self.weights[mine] * losses
        loss = losses.mean() + balance.mean()
        if args.kl_in == "loss":
            k2 = (logprobs - self.ref_logprobs[mine]) ** 2 / 2
            kl = self.weights[mine] * ratio.detach() * k2
            loss = loss + self.kl_coef / self.unit * kl.mean()
        loss = loss - args.entropy_coef / self.unit * entropy.mean()
        approx_kl = ratio - 1 - torch.log(ratio)
        if "policy/ratio" not in self.noted:
            self.note("policy/first_ratio", ratio)
        self.note("policy/loss", losses)
        self.note("policy/approx_kl", approx_kl)
        self.note("policy/ratio", ratio)
        self.note("policy/clip_fraction", ((limited < low) | (limited > high)).float())
        self.note("policy/entropy", entropy)
        self.note("policy/balance_loss", balance)
        return loss, approx_kl.mean().item()

    def ptx_loss(self, number):
        """The mean loss of optimizer step ``number``'s texts: all words but the first, and the EOS"""
        size, count = self.args.mini_batch_size, len(self.texts)
        places = range(number * size, (number + 1) * size)
        rows = [self.texts[epoch_order(count, self.args.seed, p // count)[p % count]] for p in places]
        ids = [[WORDS.index(word) + 2 for word in row.split()] + [0] for row in rows]
        tokens = torch.tensor([x + [0] * (max(map(len, ids)) - len(x)) for x in ids])
        real = torch.arange(tokens.shape[1]) < torch.tensor([len(x) for x in ids])[:, None]
        output = self.actor.base_model(tokens, attention_mask=real.long(), **asked_of(self.actor))
        logits = self.actor.get_output_embeddings()(output.last_hidden_state[:, :-1])
        log_p = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
        losses = -log_p[real[:, 1:]]
        self.note("policy/ptx_loss", losses)
        balance = balance_losses(output, real.long(), self.actor.config)
        return self.args.ptx_coef * (losses.mean() + balance.mean())

    def step(self, name, loss, number):
        """One optimizer step: gradient, clip by its norm, the rate of this step, AdamW."""
        adam, args = self.adam[name], self.args
        parameters = adam.param_groups[0]["params"]
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g * min(1.0, args.grad_clip / max(norm, 1e-9))
        per_batch = args.ppo_epochs * args.batch_size // args.mini_batch_size
        begin = {"critic": 0, "actor": self.begins * per_batch}[name]
        peak = {"critic": args.critic_learning_rate, "actor": args.learning_rate}[name]
        rising, done = args.lr_warmup_steps * per_batch, number - begin
        if done < rising:
            rate = peak * (done + 1) / (rising + 1)
        elif args.lr_schedule == "constant":
            rate = peak
        else:
            share = (done - rising) / (self.total_steps * per_batch - begin - rising - 1)
            rate = peak * (0.55 + 0.45 * math.cos(math.pi * share))
        adam.param_groups[0]["lr"] = rate
        adam.step()
        self.note("policy/skipped_steps", torch.zeros(1))
        self.norms[name].append(norm)
        group = {"critic": "value", "actor": "policy"}[name]
        self.note(f"{group}/grad_norm", torch.tensor([norm]))
        self.note(f"{group}/learning_rate", torch.tensor([rate]))

    def note(self, name, numbers):
        self.noted.setdefault(name, []).append(numbers.detach())


class Game:
    """What ``GAME`` and the chat template make of a response, by hand; without --env it ends with its EOS.
    Behind the EOS of a turn stand: user (unknown), a word, EOS, assistant (unknown)."""

    def __init__(self):
        self.over = self.full = self.cut = False
        self.begun = 0  # where the turn has begun
        self.acted, self.rewards = [], {}  # {place of a turn's last token: its reward}

    def follow(self, ids, ended, args):
        self.acted.append(True)
        self.over = ended or len(ids) == args.max_gen_len
        self.cut = not ended
        if not (ended and args.env):
            return
        words = words_of(ids[self.begun : -1])
        self.rewards[len(ids) - 1] = 0.5 * words.count("b") - 0.2
        if len(self.rewards) == min(3, args.max_turns) or "h" in words:
            return
        if len(ids) + 4 >= args.max_gen_len:
            self.full = True
            return
        self.over = False
        ids += [1, 2 + len(words) % 8, 0, 1]
        self.acted += [False] * 4
        self.begun = len(ids)


def words_of(ids):
    return [["</s>", "<unk>", *WORDS][i] for i in ids]


def actions_of(batch):
    """[B][R] which response tokens were sampled"""
    if batch.is_action is None:
        return [[True] * count for count in batch.response_len.tolist()]
    rows = zip(batch.is_action.tolist(), batch.response_len.tolist(), strict=True)
    return [row[:count] for row, count in rows]


def same_weights(untouched, model):
    """A copy of an untouched model with the weights of one that trains."""
    mine = copy.deepcopy(untouched)
    mine.load_state_dict(model.state_dict())
    return mine.requires_grad_(True)


def asked_of(model):
    return {"output_router_logits": True} if "use_moe" in vars(model.config) else {}


def balance_losses(output, mask, config):
    """[B], 0 without experts: of each sequence and layer E sum_e (share of choices) (mean gate), times its
    weight"""
    losses = []
    for i, real in enumerate(mask > 0):
        losses.append(torch.zeros(()))
        for logits in getattr(output, "router_logits", None) or ():
            gate = torch.softmax(logits.view(*mask.shape, -1)[i][real], -1)
            best = gate.argsort(-1, descending=True)[:, : config.num_experts_per_tok].flatten()
            shares = [(best == e).float().mean() for e in range(gate.shape[1])]
            found = gate.shape[1] * sum(share * gate[:, e].mean() for e, share in enumerate(shares))
            losses[-1] = losses[-1] + config.router_aux_loss_coef * found
    return torch.stack(losses)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = run_files(folder, count=48)
    prompts = read_jsonl(found["data_path"])
    answers = [" ".join(WORDS[n * i % 8] for i in range(n % 6)) for n in range(48)]
    logged = [{**p, "answer": x, "score": len(x) % 7 - 3} for p, x in zip(prompts, answers, strict=True)]
    (folder / "steps.py").write_text(REWARD)
    (folder / "game.py").write_text(GAME)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(found["model"])
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": len(tokenizer) + 3}  # never sampled
    experts = MiniMindConfig(**sizes, use_moe=True, eos_token_id=0, router_aux_loss_coef=0.5)
    MiniMindForCausalLM(experts).save_pretrained(folder / "experts")
    tokenizer.save_pretrained(folder / "experts")
    return found | {
        "experts": str(folder / "experts"),
        "steps": f"{folder / 'steps.py'}:steps",
        "game": f"{folder / 'game.py'}:Game",
        "offline_data_path": write_jsonl(folder / "logged.jsonl", logged),
        "ptx_data_path": write_jsonl(folder / "ptx.jsonl", [{"text": p["prompt"] + " h h"} for p in prompts]),
    }


def used_reference(run):
    """The reference, or the actor where nothing asks a reference, which then has no weights."""
    return run.models.reference if run.models.uses_reference else run.models.actor


def disturb(model, seed, size):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((10 if "value_head" in name else 1) * size * torch.randn(p.shape, generator=random))


def start(files, experts=False, steps=False, logged=False, game=False, **values):
    """-> (run, prompts, ``Plain``), all models disturbed by noise of their own."""
    named = {name: files[name] for name in (["offline_data_path"] if logged else ["reward_fn", "data_path"])}
    named["model"] = files["experts" if experts else "model"]
    named |= {"reward_fn": files["steps"]} if steps else {}
    named |= {"env": files["game"]} if game else {}
    named |= {"ptx_data_path": files["ptx_data_path"]} if "ptx_coef" in values else {}
    given = {name: x for name, x in {**named, **FLAGS, **values}.items() if x is not None}
    args = train_ppo.parse_args(flags(**given))
    untouched = load_policy(args.model)
    run = PpoRun(args, ALONE)
    assert ("never sampled: 3 ids that" in run.about()) == bool(experts)
    prompts = run.data
    critic = copy.deepcopy(run.models.critic)
    if critic:
        critic.backbone = copy.deepcopy(untouched.base_model)
    models = (run.models.actor, run.models.old_actor, used_reference(run), run.models.critic)
    for seed, model in enumerate(filter(None, models)):
        disturb(model, seed, 0.015)
    return run, prompts, Plain(run, untouched, critic)


def distance(model, other):
    """-> (largest difference of two models' weights, root of the mean square)"""
    other = other.state_dict()
    gaps = torch.cat([(x - other[name]).flatten() for name, x in model.state_dict().items()])
    return gaps.abs().max().item(), gaps.square().mean().sqrt().item()


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_a_recomputation_in_plain_torch(files, case, monkeypatch):
    # Several micro-batches, of other widths than the batch
    monkeypatch.setattr(scoring, "tokens_per_forward", lambda device: 64)
    if case not in (SPARING, SINGLE):
        monkeypatch.setattr(Models, "sampler_has_scored", lambda models, step: False)
    run, prompts, plain = start(files, **CASES[case])
    once = dict.fromkeys(run.train_states, 0)  # updates that compute a prompt once for several answers
    scorers = {"actor": run.models.actor_scorer, "critic": run.models.value_scorer}
    for name in once:

        def note(scorer, given, name=name):
            once[name] += torch.is_grad_enabled() and given[1].key_index is not None

        scorers[name].register_forward_pre_hook(note)
    size, lines = run.args.batch_size, []
    for step in range(STEPS):
        count = size // run.args.num_generations
        asked = [prompts[step * count + i] for i in range(count)]
        offline = bool(run.args.offline_data_path)
        seen = {}

        def between(batch, step=step, asked=asked, offline=offline, seen=seen):
            seen["responses"] = responses = batch.responses()
            answers = (
                [x.response_ids for x in asked] if offline else plain.responses(asked, step, run.endings.eos)
            )
            assert responses == answers
            assert offline or actions_of(batch) == [game.acted for game in plain.games]
            plain.take(batch)
            assert offline or plain.gap_of_samples() < 1e-4
            shape, random = batch.sampler_logprobs.shape, torch.Generator().manual_seed(step)
            # As if the sampler had computed in half precision
            batch.sampler_logprobs += 0.1 * torch.randn(shape, generator=random)

        metrics, _ = take_step(run, step, asked, between)
        wanted = plain.scored(seen["responses"], run.endings.eos, [x.score for x in asked] if offline else ())
        wanted |= plain.learn(step)
        metrics = {name: x for name, x in metrics.items() if not name.startswith("perf/")}
        assert metrics.keys() == wanted.keys()
        for name, x in wanted.items():
            assert metrics[name] == pytest.approx(x, rel=5e-4, abs=5e-5), f"{name} in step {step}"
        pairs = {"actor": plain.actor, "critic": plain.critic, "old_actor": plain.old_actor}
        pairs["reference"] = plain.ref
        left_out = {"critic": not run.models.critic, "reference": not run.models.uses_reference}
        for name in pairs:
            if left_out.get(name):
                continue
            largest, typical = distance(getattr(run.models, name), pairs[name])
            # Where a gradient is hardly more than rounding, AdamW makes a step of it
            assert largest < 3e-4 and typical < 2e-6, f"{name} in step {step}"
        lines.append(metrics)
    check_that_all_was_in_use(plain, lines)
    shares = ("RLOO", "GSPO, four answers", "several turns, GSPO")
    assert all(count > 0 for count in once.values()) == (case in shares)


def check_that_all_was_in_use(plain, lines):
    """A clip that never binds, or always, would hide a fault."""
    args = plain.args
    for name, norms in plain.norms.items():
        if norms or args.advantage == "gae":
            assert min(norms) < args.grad_clip < max(norms), name
    most = {name: max(line.get(name, 0.0) for line in lines) for name in {*lines[0], *lines[-1]}}
    single = args.mini_batch_size == args.batch_size  # then nothing can have moved
    assert most["policy/clip_fraction"] == 0 if single else 0.1 < most["policy/clip_fraction"] < 0.9
    assert not plain.critic or 0.1 < most["value/clip_fraction"] < 0.9 or args.cliprange_value == 0
    assert (most["policy/early_stop"] > 0) == (args.target_kl > 0)
    assert (most["policy/balance_loss"] > 0) == ("experts" in args.model)
    assert most["rollout/repetition"] > 0
    if not args.offline_data_path:
        assert 0.1 < lines[-1]["rollout/finished"] < 0.9
        assert most["rollout/importance_ess"] < 0.999 or plain.sampler_has_scored(STEPS - 1)
    moved = max(abs(line["policy/first_ratio"] - 1) for line in lines[1:] if "policy/ratio" in line)
    assert moved == 0 if single else moved > 1e-3
    if args.dual_clip:
        assert plain.used == {"dual clip", "upper clip", "cap"}
    assert ("weight of the KL" in plain.used) == (args.kl_target > 0)
