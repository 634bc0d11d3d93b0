"""The list of mutations.py: wrong lines of code that a test must notice.

A row is (right, wrong, what is wrong). ``right`` must occur exactly once in its file. Where another test than
test_whole_step.py is to notice it, or a quicker one, its file (or file::test) is named behind.
"""

from typing import NamedTuple

WHOLE_STEP = "tests/test_whole_step.py"
FORMULAS, EVALUATION = "tests/test_ppo.py", "tests/test_evaluation.py"
LOGPROBS, SCORING = "tests/compute/test_logprobs.py", "tests/compute/test_scoring.py"
BALANCE, ENGINE = "tests/compute/test_balance_loss.py", "tests/generation/test_engine.py"
RESUMING = "tests/runs/test_resume.py::test_resuming_equals_never_having_stopped_bit_for_bit"
STARTS = "tests/test_invariants.py::test_the_critic_starts_as_the_reward_model_times_its_weight"
REPLAY = "tests/test_replay.py"
TWO_PROCESSES = "tests/runs/test_processes.py::test_two_processes_of_batch_n_equal_one_of_batch_2n"
DATA = "tests/dataset/test_dataset.py"
RESPONSES, REWARDS = "tests/test_step_metrics.py", "tests/rewards/test_rewards.py"
BARS, TRACKED = "tests/test_progress_bar.py", "tests/runs/test_trackers.py"
SEVERAL = "tests/runs/test_several_answers.py::test_prompts_whose_answers_score_the_same_are_sampled_again"
COMPARED = "tests/runs/test_several_answers.py::test_scores_are_compared_without_what_is_taken_off_for_length"
NO_CRITIC = "tests/runs/test_several_answers.py::test_there_is_no_critic"
SEVERAL_PROCESSES = "tests/runs/test_several_answers.py::test_two_processes_equal_one"
VALUE_SCALE = "tests/test_value_scale.py"
LOSS_OPTIONS = "tests/runs/test_loss_options.py::test_from_a_checkpoint_a_run_goes_on_bit_for_bit"
EMA = "tests/test_ema.py"
ENTROPY_TOP = "tests/test_entropy_top.py"
KL_TARGET, ENTROPY = "tests/test_kl_target.py", "tests/compute/test_entropy_gradient.py"
PTX = "tests/test_ptx.py"
EXPERTS_RUN = "tests/runs/test_processes.py::test_sharded_mixtures_of_experts_and_adapters_equal_one_process"
SHARDING, RESUMED = "tests/compute/test_sharding.py", "tests/runs/test_processes.py"
PLAN, FREED = "tests/test_memory_plan.py::test_", "tests/compute/test_memory.py"
BUILT = f"{PLAN}what_is_there_while_a_run_is_built_by_hand"
SHARED = f"{PLAN}a_process_of_a_sharded_run_has_its_part_of_what_stays_by_hand"
GATHERED = f"{PLAN}what_a_sharded_run_gathers_by_hand"
OFFLINE, LOGGED = "tests/test_offline.py", "tests/dataset/test_logged_answers.py"
THINKING = "tests/test_thinking.py"


class Mutation(NamedTuple):
    """``old`` in ``file`` becomes ``new``; one of ``tests`` must fail."""

    file: str
    old: str
    new: str
    fault: str
    tests: tuple = (WHOLE_STEP,)


TRAIN_PPO = [
    (
        "            take_reference(rollout)\n",
        "            rollout.old_logprobs = rollout.sampler_logprobs\n",
        "logged answers have no old log-probs",
    ),
    (
        "run.ptx.source(number, ",
        "run.ptx.source(min(run.ptx.items), ",
        "the batch's first demonstrations every time",
    ),
    (
        'run.ptx and name == "actor":\n        sources',
        "run.ptx:\n        sources",
        "demonstrations also after the critic's gradients",
        PTX,
    ),
    ("run.kl.coef / mb.advantage_unit,", "run.kl.coef,", "the KL is not divided by the advantages' std"),
    ("args.entropy_coef / mb.advantage_unit", "args.entropy_coef", "the entropy is not divided by the std"),
    ("rollout.counted, least = chosen", "_, least = chosen", "all tokens count in the policy loss"),
    ("run.ema.follow(step)\n", "pass\n", "no weights are averaged", EMA),
    ("loss = loss - args.entropy_coef", "loss = loss + args.entropy_coef", "the entropy is punished"),
    ("decay=args.gamma * args.lam,", "decay=args.lam,", "later tokens' KL is not discounted"),
    (
        "    return loss / token_count + balance / run.sizes.minibatch, metrics",
        "    return loss / token_count, metrics",
        "no balance loss of the actor",
    ),
    (
        "    return loss / token_count + balance / run.sizes.minibatch, metrics",
        "    return loss / token_count + balance / token_count, metrics",
        "the actor's balance loss is divided by tokens",
    ),
    (
        "args.vf_coef * loss / token_count + balance / run.sizes.minibatch",
        "args.vf_coef * loss / token_count",
        "no balance of the critic",
    ),
    (
        'score_policy(new, run.scorers["reference"],',
        'score_policy(new, run.scorers["old_actor"],',
        "reference is the old actor",
    ),
    (
        '    metrics.keep_first("policy/ratio", "policy/first_ratio")',
        "    pass",
        "no ratio of the first minibatch",
    ),
    ("run.replay.join(new)", "new", "nothing is replayed"),
    ("    run.replay.keep(batch.rollout)\n", "", "no batch is kept for replay"),
    (
        "mask, args.gamma, args.lam)",
        "mask, args.lam, args.gamma)",
        "gamma and lambda are swapped",
    ),
    (
        "args.gamma, args.critic_lam)",
        "args.gamma, args.lam)",
        "returns with the lambda of advantages",
    ),
    (
        "args.gamma, args.lam)",
        "args.gamma, args.critic_lam)",
        "advantages with the lambda of returns",
    ),
    (
        "mask, advantages / rollout.advantage_unit, 0.0)\n",
        "mask, advantages / rollout.advantage_unit, 0.0)\n"
        "    if run.critic:\n"
        "        rollout.returns = rollout.advantages + rollout.values\n",
        "returns from whitened advantages",
    ),
    ("mask, advantages / rollout.advantage_unit, 0.0)", "mask, advantages, 0.0)", "no advantage is divided"),
    ('if args.advantage in ("rloo", "group"):', "if False:", "RLOO's advantages are whitened"),
    ('if args.advantage != "group":', "if True:", "the group's advantages are divided a second time"),
    ("informative = ppo.std_or_zero(total) > 0", "informative = True", "noise is a lesson", VALUE_SCALE),
    ("advantages = ppo.leave_one_out(", "advantages = ppo.group_normalized(", "RLOO is GRPO"),
    (
        "advantages = rollout.outcomes",
        "advantages = rewards",
        "REINFORCE without the rewards to come",
    ),
    ("if stopped and not run.critic:", "if stopped:", "--target_kl stops the critic too"),
    (
        "run.critic:\n        rollout.values = score",
        "not run.critic:\n        rollout.values = score",
        "no values",
    ),
    ('run.scorers["old_actor"]\n', 'run.scorers["actor"]\n', "old log-probs are the actor's"),
    ('run.scorers["reference"]', 'run.scorers["actor"]', "the reference is the actor"),
    (
        "ppo.kl_estimators(rollout.old_logprobs, rollout.ref_logprobs)[0]",
        "ppo.kl_estimators(rollout.old_logprobs, rollout.ref_logprobs)[1]",
        "k2 off rewards",
    ),
    (
        "run.kl.follow(step, newest_rows(rollout, count), run.world.sum)\n",
        "pass\n",
        "no weight follows the KL",
    ),
    (
        "newest_rows(rollout, count), run.world.sum)",
        "rollout, run.world.sum)",
        "replayed responses move the weight of the KL",
    ),
    ("penalty = run.kl.coef * ppo", "penalty = ppo", "the KL comes off the rewards without its coefficient"),
    (
        "rollout.old_logprobs, rollout.sampler_logprobs, rollout.mask",
        "rollout.sampler_logprobs, rollout.old_logprobs, rollout.mask",
        "weights turned round",
    ),
    (
        "rollout.old_logprobs, rollout.sampler_logprobs, rollout.mask",
        "rollout.old_logprobs, rollout.old_logprobs, rollout.mask",
        "no weights",
    ),
    (
        "monte_carlo_returns(rewards, mask, args.gamma)",
        "monte_carlo_returns(rewards, mask, 1.0)",
        "gamma",
    ),
    ("run.value_scale.update(rollout, world.sum)\n", "pass\n", "the value scale stays 1"),
    ("epochs=args.ppo_epochs,", "epochs=1,", "one PPO epoch, whatever the flag"),
    ("older=args.replay_batches,", "older=0,", "only the oldest kept batch is learned from"),
    (
        '"actor", minibatches[k], token_counts[k]',
        '"actor", minibatches[k], token_counts[0]',
        "the first minibatch's token count for all",
    ),
    ("return args.vf_coef * loss / token_count", "return loss / token_count", "--vf_coef is ignored"),
    (
        "scale=run.critic.scale",
        "scale=1.0",
        "the value loss forgets the scale",
    ),
    (
        '["actor"](mb.tokens, mb.layout, args.temperature)',
        '["actor"](mb.tokens, mb.layout, 1.0)',
        "the actor is scored at temperature 1",
    ),
    (
        "(step + 1) % run.args.update_old_actor_freq == 0",
        "step % run.args.update_old_actor_freq == 0",
        "old actor a step late",
    ),
    (
        "stopped = steps[-1] is None",
        "stopped = False",
        "--target_kl does not stop the actor for the rest of a batch",
    ),
    (
        'first_step >= run.learners["actor"].first_step',
        'step > run.learners["actor"].first_batch',
        "warm-up takes a batch more",
    ),
]

BUILD_RUN = [
    (
        "learner(self.actor, args.learning_rate)",
        "learner(self.actor, args.critic_learning_rate)",
        "the actor learns at the critic's rate",
    ),
    ("args.entropy_coef > 0)", "False)", "the entropy has no gradient"),
    (
        "learner(self.critic, args.critic_learning_rate)",
        "learner(self.critic, args.learning_rate)",
        "the critic learns at the actor's rate",
    ),
    (
        "total_steps=self.total_steps * self.sizes.steps,",
        "total_steps=self.total_steps,",
        "a schedule as long as batches",
    ),
    (
        "warmup_steps=args.lr_warmup_steps * self.sizes.steps",
        "warmup_steps=args.lr_warmup_steps",
        "warm-up in steps",
    ),
    ("            schedule=args.lr_schedule,\n", "", "--lr_schedule is ignored"),
    (
        "start, args.lora_r > 0, weight, lend",
        "start, args.lora_r > 0, 1.0, lend",
        "the critic starts without the reward model's weight",
        STARTS,
    ),
]

PPO = [
    (
        "return torch.where(mask, rewards, 0.0).sum(1).view(-1, answers)",
        "return rewards.sum(1).view(-1, answers)",
        "padding counts",
        FORMULAS,
    ),
    (
        "keepdim=True) - total) / (answers - 1)",
        "keepdim=True)) / answers",
        "the mean of all answers",
        FORMULAS,
    ),
    (
        "total.std(1, keepdim=True)",
        "total.std(1, keepdim=True, correction=0)",
        "the std of a population",
        FORMULAS,
    ),
    (".clamp(min=1)).sqrt().item()", ".clamp(min=1)).item()", "the mean square", FORMULAS),
    ("moments(x, mask & (x != 0))", "moments(x, mask)", "answers that say nothing count", FORMULAS),
    ("covariance / mean_std(x_total)[1] ** 2", "covariance / mean_std(x_total)[1]", "no slope", FORMULAS),
    ("y_mean - slope * x_mean", "y_mean", "a line that misses the means", FORMULAS),
    ("if std_or_zero(x_total) and std_or_zero(y_total):", "if True:", "a slope from rounding", FORMULAS),
    ("else weights * mb.counted", "else weights", "all tokens count in the loss", ENTROPY_TOP),
    ("masked_sum(weights * moved", "masked_sum(counted * moved", "other tokens have no KL", ENTROPY_TOP),
    ('if kl_in == "loss" and kl_weight:', "if False:", "no KL loss"),
    (
        "masked_sum(weights * moved.exp() * k2",
        "masked_sum(weights * k2",
        "the KL loss is not weighted by the ratio",
    ),
    (
        "masked_sum(weights * moved.exp() * k2",
        "masked_sum(moved.exp() * k2",
        "the KL loss has no importance weights",
    ),
    ('    if kl_in == "reward":', "    if True:", "KL in loss and reward"),
    (
        "advantages - kl_weight * discounted_sums",
        "advantages + kl_weight * discounted_sums",
        "the KL in the reward follows backwards",
    ),
    ("kl_weight * discounted_sums(moved, decay)", "kl_weight * moved", "later tokens' KL does not count"),
    ("F.pad(x[:, n:], (0, n))", "F.pad(x[:, :-n], (n, 0))", "earlier tokens' KL counts"),
    (
        "last = response_len[:, None] - 1\n",
        "last = 0 * response_len[:, None]\n",
        "score first",
    ),
    ("rewards -= torch.where", "rewards += torch.where", "the KL is added to the rewards"),
    ("following, alpha=gamma * lam", "following, alpha=lam", "GAE without gamma"),
    ("(rewards + gamma * F.pad", "(rewards + F.pad", "the next value is not discounted"),
    ("F.pad(values[:, 1:], (0, 1))", "F.pad(values, (1, 0))[:, :-1]", "the value before, not the next one"),
    ("mask, gamma, 1.0)[1]", "mask, gamma, 0.95)[1]", "Monte-Carlo returns with lambda 0.95"),
    (".exp().clamp(max=cap)", ".exp()", "importance weights have no cap"),
    ("    if not cap:\n", "    if False:\n", "--importance_cap 0 makes every weight 0"),
    (
        "total[0].square() / (total[1] * total[2])",
        "total[0].square() / total[1]",
        "tokens in the place of their share",
        FORMULAS,
    ),
    (
        "(old_logprobs - sampler_logprobs).double()",
        "(old_logprobs - sampler_logprobs)",
        "w in fp32",
        FORMULAS,
    ),
    ("(x - mean_std(total)[0] if std", "(x if std", "whitening keeps the mean"),
    (" if std else torch.zeros_like(x)), std", "), std", "advantages of rounding alone", FORMULAS),
    ("without_rounding(total - others, total)", "(total - others)", "RLOO learns from rounding", FORMULAS),
    (
        "without_rounding(total - total.mean(1, keepdim=True), total)",
        "total - total.mean(1, keepdim=True)",
        "GRPO learns from rounding",
        FORMULAS,
    ),
    (
        "return 1 - (error_std / return_std) ** 2",
        "return 1 - error_std / return_std",
        "ratio of std",
    ),
    (
        "bias = rollout.values - rollout.outcomes",
        "bias = rollout.outcomes - rollout.values",
        "the sign of the bias",
    ),
    (
        "masked_sum(k1, mask), len(rollout.tokens))",
        "masked_sum(k1, mask), tokens)",
        "kl/sequence is divided by tokens",
    ),
    (
        "kl_estimators(logprobs, mb.ref_logprobs)[1]",
        "kl_estimators(logprobs, mb.ref_logprobs)[0]",
        "KL loss by k1",
    ),
    (
        "kl_estimators(logprobs, mb.ref_logprobs)[1]",
        "kl_estimators(logprobs, mb.ref_logprobs)[2]",
        "KL loss by k3",
    ),
    (
        "kl_estimators(logprobs, mb.ref_logprobs)[1]",
        "kl_estimators(logprobs, mb.old_logprobs)[1]",
        "KL to the old actor",
    ),
    ("total + kl_weight * masked_sum", "total - kl_weight * masked_sum", "KL loss with the other sign"),
    ("logprobs.detach() - mb.old_logprobs", "logprobs - mb.old_logprobs", "the KL's ratio has a gradient"),
    (
        "masked_sum(weights * per_token, mask)",
        "masked_sum(per_token, mask)",
        "the policy loss has no importance weights",
    ),
    ("-torch.min(ratio * advantages", "-torch.max(ratio * advantages", "the clip takes the maximum"),
    ("ratio.clamp(1 - clip.low, 1 + clip.high)", "ratio.clamp(1 - clip.low, 9)", "no clip above"),
    (
        "ratio.clamp(1 - clip.low, 1 + clip.high)",
        "ratio.clamp(1 - clip.high, 1 + clip.high)",
        "the upper clip is the lower",
    ),
    (
        "torch.where(advantages < 0, torch.min",
        "torch.where(advantages > 0, torch.min",
        "dual clip of good tokens",
    ),
    ("torch.min(per_token, most)", "torch.max(per_token, most)", "dual clip from below"),
    (
        "masked_sum(torch.max(error, clipped_error)",
        "masked_sum(torch.min(error, clipped_error)",
        "value clip's minimum",
    ),
    ("torch.max(error, clipped_error)", "error", "values are not clipped"),
    ("cliprange or torch.inf", "cliprange", "--cliprange_value 0 holds every value fast"),
    (
        "change = (values - old_values) / scale",
        "change = values - old_values",
        "the value clip forgets the scale",
    ),
    (
        "error = ((values - returns) / scale).square()",
        "error = (values - returns).square()",
        "the value error forgets it",
    ),
    ("ratio - 1 - log_ratio", "log_ratio - ratio + 1", "the sign of approx_kl"),
]

CRITIC = {
    "trainer/options/value_scale.py": [
        (
            "self.critic.rescale(self.std)",
            "self.critic.rescale(self.variance)",
            "variance as scale",
        ),
        ("RATE = 0.1", "RATE = 1.0", "the scale is that of the last batch"),
        (
            "self.critic.map_values(slope, intercept)\n",
            "pass\n",
            "the critic is not fitted to the first batch",
        ),
        ("slope * rollout.values + intercept", "rollout.values", "the first batch's values are not fitted"),
        ("        if not self.batches:\n", "        if True:\n", "every batch sets the values"),
        ("LEAST_SHARE * self.std)", "0.0)", "scores that hardly differ are a full lesson", VALUE_SCALE),
        ("self.follow(size**2)", "self.follow(size)", "the running scale of advantages", VALUE_SCALE),
        (
            "max(size, self.std or 1.0)",
            "max(size, 1.0)",
            "rewards of size 1 where all are equal",
            VALUE_SCALE,
        ),
        ("limit = GROWTH * max(", "limit = 1e9 * max(", "an outlier sets the scale", VALUE_SCALE),
        ("max(self.variance, self.last)", "self.variance", "a lasting change is not taken over", VALUE_SCALE),
    ],
    "model/critic.py": [
        ("p.mul_(self.scale / scale)", "p.mul_(scale / self.scale)", "a new scale multiplies the values"),
        ("p.mul_(self.scale / scale)", "p.mul_(1.0)", "a new scale changes the values"),
        ("add_(intercept / self", "add_(intercept * self", "a shift in other units", VALUE_SCALE),
        ("p.mul_(slope)", "p.mul_(1.0)", "the first batch only shifts the values", VALUE_SCALE),
    ],
    "trainer/options/ema.py": [
        (" / (1 - self.beta**self.batches)", "", "the start counts in the average", EMA),
        ("self.weights[name].lerp_(_on_host(p), share)", "pass", "the average stays at the start", EMA),
        (" or step < self.learner.first_batch", "", "batches of warm-up count", EMA),
        ("            self.weights[name].copy_(p)\n", "", "the actor is lost after an evaluation", EMA),
        ("if p.requires_grad}", "}", "frozen weights are averaged", EMA),
        ('self.batches = int(state["b', 'int(state["b', "resuming forgets how many batches count", EMA),
    ],
    "trainer/ppo.py": [
        ("gather(entropy[mask].cpu())", "[entropy[mask].cpu()]", "a threshold of its own", ENTROPY_TOP),
        ("(entropy >= least) & mask", "entropy >= least", "padding counts", ENTROPY_TOP),
        ("len(everyone) - count + 1", "count", "the tokens of low entropy count", ENTROPY_TOP),
        ("(entropy >= least)", "(entropy > least)", "the last one does not count", ENTROPY_TOP),
    ],
    "trainer/options/kl_target.py": [
        ("* responses / self.horizon", "/ self.horizon", "the number of responses does not count", KL_TARGET),
        ("total / responses / self.target - 1", "1 - total / responses / self.target", "the sign", KL_TARGET),
        ("max(error, -LARGEST_ERROR)", "error", "the weight falls without a limit", KL_TARGET),
        ("min(max(", "max(max(", "the weight rises without a limit", KL_TARGET),
        (
            "step <= self.learner.first_batch",
            "step < self.learner.first_batch",
            "it moves a batch early",
            KL_TARGET,
        ),
        (" or step % self.every", "", "stale batches move the weight of the KL", KL_TARGET),
        ('kept = ("coef",)', "kept = ()", "a checkpoint forgets the weight of the KL", KL_TARGET),
        (
            "torch.where(newest.mask, newest.old_logprobs - newest.ref_logprobs, 0.0)",
            "(newest.old_logprobs - newest.ref_logprobs)",
            "padding counts in the KL",
            KL_TARGET,
        ),
    ],
    "trainer/options/replay.py": [
        ("first = len(rollout.tokens) - count", "first = 0", "metrics of replayed batches too"),
        (
            "self.batches[-self.size :]",
            "self.batches[: self.size]",
            "the first batches are replayed, not the last",
        ),
        (
            "x[self.positions]",
            "x[sorted(self.positions, reverse=True)]",
            "replayed rows in another order",
            REPLAY,
        ),
        (
            "for positions, _ in parts for place in positions]).argsort()",
            "for positions, _ in parts for place in positions])",
            "kept rows are not in the order of the batch",
            REPLAY,
        ),
    ],
    "trainer/runs/metrics.py": [
        (
            "if name in self._totals and kept not in self._totals:",
            "if name in self._totals:",
            "every minibatch counts as the first",
        ),
    ],
    "trainer/run.py": [
        (
            "args.clip_epsilon_high or args.clip_epsilon,",
            "args.clip_epsilon,",
            "--clip_epsilon_high is ignored",
        ),
        (", args.dual_clip)", ")", "--dual_clip is ignored"),
        ("with self.ema.in_place():\n                self", "if True:\n                self", "a copy", EMA),
        ("            remove_saved(self.ema_path)\n", "            pass\n", "an earlier file", EMA),
        (
            'self.options["value_scale"] = ',
            "",
            "checkpoints forget the value scale",
            RESUMING,
        ),
        ('            "kl": self.kl,\n', "", "checkpoints forget the weight of the KL", LOSS_OPTIONS),
        (
            '            "advantage_scale": self.advantage_scale,\n',
            "",
            "checkpoints forget the scale of advantages",
            NO_CRITIC,
        ),
        ("        if args.ema_beta:\n", "        if 0:\n", "checkpoints forget the average", LOSS_OPTIONS),
    ],
    "trainer/step_metrics.py": [
        ("zip(ids, ids[1:], ids[2:]", "zip(ids, ids[1:], ids[1:]", "bigrams for trigrams", RESPONSES),
        ("/ max(len(trigrams), 1)", "/ max(len(ids), 1)", "repetition is divided by tokens", RESPONSES),
        ("hash(tuple(ids))", "hash(tuple(ids[:1]))", "responses that begin alike are the same", RESPONSES),
        ("(world.gather(mine))", "([mine])", "only this process' responses", TWO_PROCESSES),
        ("x, len(ids))", "x, ids[0])", "the first token as length", RESPONSES),
        ("    x = x - mean\n", "    x = x - mean + 0.1\n", "a mean that is not taken off", RESPONSES),
        ("LEAST_SPREAD = 1e-6", "LEAST_SPREAD = 0.0", "rounding has a correlation", RESPONSES),
        ("length).item() / size if size", "length).item() / size**2 if size", "covariance", RESPONSES),
        (
            "new.old_logprobs, new.sampler_logprobs, new.mask",
            "new.old_logprobs, new.ref_logprobs, new.mask",
            "effective sample size of the reference",
        ),
        (
            'batch_metrics(responses, batch.scores["score"], run.world), 1)',
            'batch_metrics(rollout, batch.scores["missing_eos"], run.world), 1)',
            "statistics of a part of the score",
        ),
        ("metrics.add_all(sums, len(responses))", "metrics.add_all(sums, 1)", "sums, not shares and means"),
        (
            '"value" if name == "critic" else "policy"',
            '"policy" if name == "critic" else "value"',
            "metrics of the other model",
        ),
        ("step.norm, 1)", "run.args.grad_clip, 1)", "the clip as the gradient's norm"),
        (
            'batch.scores["score"], args.num_generations)',
            'batch.scores["score"], 2)',
            "groups of two",
        ),
    ],
    "dataset/data_order.py": [
        ("born * epochs + epoch)[place]", "epoch)[place]", "each batch has the same order"),
        ("divmod(number, count)", "(0, number % count)", "the same order in every PPO epoch"),
        ("sum(share(born, now) for now in range(born, step))", "0", "the same ones in each step", REPLAY),
        (
            "row % answers % spread == part",
            "row // answers % spread == part",
            "answers to a prompt together",
            DATA,
        ),
        (
            "math.gcd(batch_size // mini_batch_size, answers)\n    rows",
            "1\n    rows",
            "minibatches are too large",
            DATA,
        ),
        (
            "* math.gcd(batch_size // mini_batch_size, answers) // answers",
            "// answers",
            "blocks of one minibatch",
            DATA,
        ),
        (
            "prompt * answers + sample for prompt",
            "prompt + sample for prompt",
            "positions of other prompts",
            DATA,
        ),
        ("batch[position // self.answers]", "batch[position]", "prompts by the places of answers", DATA),
    ],
    "trainer/collect.py": [
        ("noise_keys(args.seed, step, places", "noise_keys(args.seed, 0, places", "the same noise each step"),
        ("places // answers, places", "places, places", "each answer has noise of a prompt of its own"),
        ("places % answers +", "0 * places +", "all answers to a prompt are the same"),
        (" + times * answers)", ")", "the same answers are sampled again", SEVERAL),
        ("keys, self.args.temperature)", "keys, 1.0)", "samples at temperature 1, whatever the flag"),
    ],
    "trainer/train_ppo.py": [
        ("collect(run.old_actor,", "collect(run.actor,", "the actor samples, not the old actor"),
    ],
    "trainer/options/filter_groups.py": [
        ("if name not in OF_LENGTH}", "}", "a group with one answer cut is a lesson", COMPARED),
        (
            "keys = noise_of_step(args, step, np.asarray(positions)[rows], times)",
            "keys = noise_of_step(args, step, rows, times)",
            "noise of the place in the process",
            SEVERAL_PROCESSES,
        ),
        (
            "groups.amax(1) == groups.amin(1)",
            "groups.amax(1) >= groups.amin(1)",
            "all prompts are sampled again",
            SEVERAL,
        ),
        (
            "order[row] = len(batch.prompts) + place",
            "order[row] = row",
            "the old answers are kept",
            SEVERAL,
        ),
        ("batch.raw.replace(rows, ", "(lambda *new: None)(rows, ", "the old scores are kept", SEVERAL),
        (
            'if reward.running else scores.get("score_raw", scores["score"])',
            'if True else scores["score"]',
            "scores that the clip made equal are compared",
            SEVERAL.split("::")[0]
            + "::test_the_first_batchs_scores_are_compared_as_they_are_before_they_are_normalised",
        ),
        (
            'with batch.seconds.of("rollout"):',
            "if True:",
            "sampling again is time of the reward",
            SEVERAL.split("::")[0] + "::test_sampling_again_is_time_of_the_rollout",
        ),
        ("batch.again += len(rows)", "batch.again = len(rows)", "only the last time is counted", SEVERAL),
    ],
}

COMPUTE = {
    "trainer/compute/logprobs.py": [
        (
            "total - z.mul_(p).sum(-1)",
            "z.mul_(p).sum(-1) - total",
            "the sign of the entropy without kernels",
            LOGPROBS,
        ),
        ("grad = grad / temperature\n", "pass\n", "gradients forget the temperature", LOGPROBS),
        ("grad_entropy / temperature", "grad_entropy * 1.0", "the entropy's forgets it", ENTROPY),
        (
            "temperature, dtype, *learned)",
            "temperature, dtype, None, None)",
            "no entropy's gradient",
            ENTROPY,
        ),
        (".sub_(p * entropy[:, None])", "", "the entropy's gradient without the entropy", ENTROPY),
        ("entropy if learn_entropy else entropy.detach()", "entropy.detach()", "it has no gradient", ENTROPY),
    ],
    "trainer/compute/cpu/tokens.c": [
        ("-g * p - PULL(p)", "-g * p + PULL(p)", "the entropy falls, with a CPU's kernels", ENTROPY),
        ("g * (1 - own) - PULL(all(own))", "all(g * (1 - own))", "not at the target", ENTROPY),
        ("(log_of(p) + spread)", "log_of(p)", "without the entropy, with a CPU's kernels", ENTROPY),
    ],
    "trainer/compute/cpu/vectors.h": [
        ("- n * 2.12194440e-4f);\n}\n\n/* 1 / x", "+ n * 2.12194440e-4f);\n}\n\n/* 1 / x", "ln 2", ENTROPY),
    ],
    "trainer/compute/cuda/triton_kernels.py": [
        ("load(grad_entropy + row) * scale", "load(grad_entropy + row)", "no temperature, entropy", ENTROPY),
        ("tl.where(p == 0, 0, log_p)", "log_p", "an impossible token gives NaN", ENTROPY),
    ],
    "trainer/compute/scoring.py": [
        (
            "index_select(0, layout.predicted_by)",
            "index_select(0, layout.predicted_by + 1)",
            "actor and critic read the state behind its token",
            SCORING,
        ),
        (
            "return self.weight * load_balance_loss",
            "return 0 * load_balance_loss",
            "balance loss is 0",
            BALANCE,
        ),
        (
            "return self.weight * load_balance_loss",
            "return load_balance_loss",
            "balance loss without weight",
            BALANCE,
        ),
        ("/ (length * top_k)", "/ length", "shares of choices without top_k", BALANCE),
        ("gate.topk(top_k, dim=-1)", "gate.topk(1, dim=-1)", "only the first choice counts", BALANCE),
    ],
}

ELSEWHERE = {
    "trainer/evaluation.py": [
        (
            "    with run.collector.sampling_from(run.actor)",
            "    with run.collector.sampling_from(run.old_actor)",
            "the old actor is evaluated",
            EVALUATION,
        ),
        (
            "EVAL_STEP, [p.index for p in prompts], samples)",
            "EVAL_STEP, range(len(prompts)), samples)",
            "evaluation's noise depends on the batch",
            EVALUATION,
        ),
        (
            "is_correct(text, prompt.answer, args.reasoning)\n",
            "True\n",
            "accuracy 1",
            EVALUATION,
        ),
        (" and comparable(prompt.answer)", "", "answers that nobody can say count as wrong", EVALUATION),
        (
            "sum(right), len(right))",
            "sum(right), len(texts))",
            "records without an answer count as wrong",
            EVALUATION,
        ),
        ('("_greedy", 0.0,', '("_greedy", args.temperature,', "greedy results are sampled", EVALUATION),
        ("math.comb(wrong, k) / math", "math.comb(k, wrong) / math", "pass@k turned round", EVALUATION),
        (
            "solved, len(groups))",
            "solved, len(prompts))",
            "pass@k of all prompts",
            EVALUATION,
        ),
        ("parts)[::count]", "parts)[count - 1 :: count]", "another of the answers is shown", EVALUATION),
        ("% count\n", "* 0\n", "the answers to a prompt are the same", EVALUATION),
        ('("", args.temperature,', '("", 1.0,', "evaluation samples at temperature 1", EVALUATION),
        (
            'parts["format"] > 0\n',
            'parts["format"]\n',
            "the format's rate is its reward",
            EVALUATION,
        ),
        (
            "measured.items()}, len(texts))",
            "measured.items()}, 1)",
            "share of batches",
            EVALUATION,
        ),
    ],
    "trainer/generation/stops.py": [
        ("ids[:-1] if ended else ids)", "ids)", "the EOS stays in the text", ENGINE),
        ("ids[:-1] if ended else ids)", "ids[:-1])", "cut responses lose a token", ENGINE),
    ],
    "trainer/runs/base.py": [
        ("0.1 + 0.45 * (1 + math", "0.5 * (1 + math", "the rate falls to 0"),
        ("max(falling - 1, 1)", "max(falling, 1)", "the last step is not the last", FORMULAS),
        (
            "return self.peak * min(1.0, (step + 1)",
            "return self.peak * min(1.0, step",
            "the constant rate begins with 0",
        ),
        ("step = number - self.first_step", "step = number", "a schedule without its first step"),
        (
            "self.total_steps - self.first_step - warmup",
            "self.total_steps - warmup",
            "the actor's schedule is as long as the critic's",
        ),
    ],
    "trainer/runs/optimizer_step.py": [
        (
            "clip_gradients(learner.model, run.args.grad_clip)",
            "1.0",
            "no gradient clip",
        ),
        ('group["lr"] = learner.learning_rate(number)', 'group["lr"] = learner.peak', "the rate never falls"),
        ("run.loss_scale.scaled(loss).backward()", "loss.backward()", "fp16's scale forgets the losses", PTX),
    ],
    "trainer/generation/sampling.py": [
        (
            "for value in others:",
            "for value in others[1:]:",
            "no step",
            ENGINE,
        ),
    ],
    "trainer/rewards/combine.py": [
        (".abs().ge(SCORE_LIMIT)", ".ge(SCORE_LIMIT)", "scores at the lower limit do not count", REWARDS),
        (".abs().ge(SCORE_LIMIT)", ".abs().gt(SCORE_LIMIT)", "no clipped score counts", REWARDS),
        (".ge(SCORE_LIMIT).any(0)", ".ge(SCORE_LIMIT).all(0)", "every model must be at its limit", REWARDS),
        (
            "self._clipped(name, raw.parts[name]) for name",
            "raw.parts[name].clamp(-SCORE_LIMIT, SCORE_LIMIT) for name",
            "raw scores where normalised ones are clipped",
            "tests/rewards/test_running_stats.py",
        ),
        (
            "* (not ended)",
            "* ended",
            "the penalty is for responses that end",
        ),
    ],
}

SHOWN = {  # what one sees of a run
    "progress_bar.py": [
        ("delay=DELAY", "delay=0.0", "bars of short phases", BARS),
        ("leave=False", "leave=True", "a bar stays", BARS),
        ('get("RANK", "0") == "0"', 'get("RANK", "0") != "x"', "every process shows bars", BARS),
        ("sys.stderr.isatty()", "True", "bars in files", BARS),
        ("        bar.update(0)\n", "        pass\n", "no clock where nothing is counted", BARS),
        ("self.update(count - self.n)", "self.update(count)", "what is done is added to it", BARS),
    ],
    "trainer/compute/memory.py": [
        ("1 << 20 if sharded else 1 << 25", "1 << 25", "sharded runs keep gaps", FREED),
        ("        libc.malloc_trim(0)\n", "        pass\n", "gaps stay", FREED),
        ("bar.done += len(rows)", "bar.done += 1", "micro-batches are counted for sequences", BARS),
    ],
    "trainer/generation/engine.py": [
        (" - len(engine.waiting) - ", " - ", "waiting prompts count as responses", BARS),
    ],
    "trainer/evaluation.py": [
        ("(args.num_generations + 1) * sum", "args.num_generations * sum", "the bar is full half-way", BARS),
    ],
    "trainer/runs/trackers.py": [
        ("if fresh and not tracker.fresh:", "if fresh:", "a resumed run lacks its first steps", TRACKED),
        (
            "    shutil.rmtree(path, ignore_errors=True)\n    writer",
            "    writer",
            "steps are doubled in TensorBoard",
            TRACKED,
        ),
        (
            "        shutil.rmtree(path, ignore_errors=True)\n    run",
            "        pass\n    run",
            "two runs in SwanLab",
            TRACKED,
        ),
        (
            'shutil.rmtree(folder / "wandb", ignore_errors=True)',
            "pass",
            "two runs in wandb",
            TRACKED,
        ),
        (
            "                del self._live[name]\n",
            "                pass\n",
            "a broken tracker is asked again",
            TRACKED,
        ),
        ("html.escape(text)", "text", "a response's HTML is obeyed", TRACKED),
    ],
    "trainer/runs/run_logger.py": [
        (
            "if step and (step == total or step % self.log_interval == 0):",
            "if True:",
            "a text at every step",
            TRACKED,
        ),
    ],
}


H = ("tests/runs/test_health.py",)
RUNS_OF_HEALTH = "tests/runs/test_health_runs.py"
PAIRS_FALL = "tests/runs/test_health.py::test_held_out_pairs_that_fall_are_found_offline"
BY_PAIRS = "tests/runs/test_summary.py::test_the_verdict_of_offline_ppo_takes_its_spread_from_the_evaluations"
_HEALTH = "tests/runs/test_health.py::"
_ENDED = _HEALTH + "test_strict_health_ends_a_broken_run_saved_and_leaves_a_healthy_one_alone"
_DEMO = "tests/test_inputs.py::test_the_held_out_prompts_of_the_demo_belong_to_its_prompts"
HEALTH = {
    "trainer/runs/health.py": [
        ("self.values[name][:count], count)", "self.values[name][-count:], count)", "the start moves", *H),
        ("math.sqrt(x * (1 - x)) for", "1.0 for", "a wider standard error", *H),
        ("CLEAR * max(spreads", "max(spreads", "one standard error", *H),
        ("default=math.nan) * math.sqrt(2 / count)", "default=math.nan) * math.sqrt(1 / count)", "one", *H),
        ("return CLEAR * changes", "return 2 * CLEAR * changes", "too cautious", PAIRS_FALL, BY_PAIRS),
        (
            "self.change(found[0], found[-1])",
            "self.change(max(found), found[-1])",
            "the best is compared",
            *H,
        ),
        ("self.step - count + 1", "self.step", "since the last of the steps that show it", *H),
        ("if sum(beyond) == count else", "if any(beyond) else", "one step is enough", *H),
        ("            if all(found):", "            if any(found):", "half of a condition is enough", *H),
        ('* start if "times" in words', '* 1.0 if "times" in words', "a limit is not that of the start", *H),
        ("min(WINDOW, math.ceil(ENOUGH", "min(1, math.ceil(ENOUGH", "four responses say how many end", *H),
        ("<= CLEAR if math.isnan(self.trend)", "<= CLEAR if True", "evaluations say nothing", *H),
        ("if self.known(condition) else {}", "if True else {}", "facts that are as they should be", *H),
        ('return "" if value ==', 'return "" if 0 ==', "a remedy that the run has already", *H),
        ("usual if now < least else", "", "a rate far too low is lowered", RUNS_OF_HEALTH),
        ("min(now / int(number), usual)", "now / int(number)", "a rate far too high is cut to a third", *H),
        ("max(now * int(number), usual)", "now * int(number)", "a small flag stays small", *H),
        ("[rate / FAR, rate", "[0.0, rate", "a low rate is usual", *H),
        ("if value and not least", "if not least", "what is off is unusual", *H),
        ('"wrong": share > NEARLY_ALL', '"wrong": False', "nearly all may be dropped", *H),
        ("return times > OFTEN", 'return past.known("prompts") > OFTEN', "prompts are counted", *H),
        ('abs(past.now("policy/first_ratio", 1) - 1)', '(past.now("policy/first_ratio", 1) - 1)', "<", *H),
        ('gets = "> 1.4" if paid > 0 else "< 0.7"', 'gets = "> 1.4"', "shorter answers are never gamed", *H),
        ("better = past.witness in JUDGES and", "better =", "the score is a witness", *H),
        (' and past.args.get("missing_eos_penalty") != 0', "", "cuts that are free", *H),
        ('"wrong": ends < NONE_ENDS', '"wrong": True', "some answers end", *H),
        ('fell["start"] > FALLS_FROM and', "", "a few ends fall by chance", *H),
        ("count = max(3, past.enough)", "count = 3", "twelve responses say how many end", *H),
        ("same = first < SAME and", "same =", "equal at the end", *H),
        ('"wrong": past.steps * past.responses >= SCORED', '"wrong": True', "a few answers that fail", *H),
        ("BY_LENGTH = 0.6", "BY_LENGTH = 0.8", "a score that is mostly length", *H),
        ("BROKEN = -4.0", "BROKEN = 0.0", "any fall is a fall", *H),
        ("MOVED = 0.1", "MOVED = 0.9", "a move of half a nat is none", *H),
        ("exploited = past.witness in JUDGES and", "exploited =", "each fall is an exploit", *H),
        ('"wrong": past.trend < -2', '"wrong": past.trend < -1', "a small fall is wrong", *H),
        ('known.level == LOOK and seen.get("wrong")', "known.level == LOOK", "the numbers move", *H),
        ('                seen["since"] = known.step\n', "                pass\n", "since it is wrong", *H),
        ("(f.step > 0, f.level", "(f.level", "the cause is not first", *H),
        ("f.level != WRONG, f.step)", "f.step)", "the wrong ones are not first", *H),
        ("return int(any(f.level == WRONG for f in found))", "return 0", "the exit code is always 0", *H),
        ("in lines[:-1]]", "in lines]", "half a line at the end is an error", *H),
        ('checked = args.get("script", SCRIPT) == SCRIPT', "checked = True", "stages", *H),
    ],
    "trainer/runs/health.toml": [
        ("policy/ratio < 0.1 in 1", "policy/ratio < 0.0 in 1", "a small ratio is right", *H),
        (" and kl/k1 > 0.1 in 3 steps", "", "long answers are far", *H),
        (', "policy/advantage_std < 1e-9 in 3 steps"', "", "advantages of 0 are fine", *H),
        (" and policy/grad_norm > 0 in 10 steps", "", "stuck while the critic warms up", *H),
        (" and rollout/distinct < 0.2 in 3 steps", "", "answers to one prompt that are alike", *H),
    ],
    "errors.py": [
        ("            sys.exit(141)\n", "            raise\n", "a traceback after | head", *H),
    ],
    "trainer/runs/log_and_save.py": [
        ("its line above and docs/health.md say", "{finding.symptom}", "a finding is said twice", *H),
        ("error.code = BROKEN", "error.code = 2", "a broken run exits with 2", *H),
    ],
    "trainer/runs/run_logger.py": [
        (
            'begun = self.health.add({"step": step, **metrics})',
            'self.health.add({"step": step, **metrics})\n        begun = self.health.sorted',
            "a finding at every step",
            "tests/runs/test_summary.py::test_findings_are_printed_at_any_step_and_once",
        ),
    ],
    "trainer/runs/report.py": [
        (
            "            shares=change,\n",
            "            shares=(0.9,),\n",
            "the spread of a share",
            "tests/runs/test_summary.py",
        ),
    ],
    "trainer/about_run.py": [
        ("not set(eos).isdisjoint(ids)", "True", "the template has an EOS", *H),
        ('if tokenizer.chat_template else ""', 'if False else ""', "every reward model has a template", *H),
    ],
    "trainer/inputs.py": [
        ("        if not args.data_path:  # the", "        if True:  # the", "evaluated on the demo", _DEMO),
    ],
}


_REPORT = "tests/runs/test_report.py::test_"
KEPT = _REPORT + "of_a_step_the_first_response_and_those_that_stand_out_are_kept"
REPORT = {
    "trainer/evaluation.py": [
        ('"worst": by_score[0]', '"worst": by_score[1]', "the worst is another one", KEPT),
        (
            "in run.world.gather(mine) for row in",
            "in [mine] for row in",
            "rows of one process",
            _REPORT + "what_stands_out_is_taken_from_all_processes",
        ),
        (
            "in run.world.gather(mine) for place,",
            "in [mine] for place,",
            "answers of one process",
            "tests/test_evaluation.py::test_the_first_held_out_prompts_are_kept_by_number_over_processes",
        ),
    ],
    "trainer/runs/run_logger.py": [
        (
            "end + SHARE * (end - start)",
            "end + end - start",
            "it is written at every step",
            _REPORT + "writing_it_takes_at_most_a_hundredth_of_the_time",
        ),
    ],
    "trainer/runs/report.py": [
        (
            'select_autoescape(["html.jinja2"])',
            "False",
            "the texts are HTML",
            _REPORT + "the_page_has_all_sections_plots_and_texts_and_no_script",
        ),
        (
            "1 if name.startswith(",
            "2 if name.startswith(",
            "the last two evaluations are averaged",
            "tests/runs/test_summary.py::test_the_table_has_first_and_last",
        ),
    ],
}

LOGGED_DATA = {  # demonstrations and logged answers
    "trainer/options/ptx.py": [
        ("return self.coef * loss, metrics", "return loss, metrics", "--ptx_coef is ignored"),
        ("loss = -logprobs.sum()", "loss = logprobs.sum()", "demonstrations are unlearned"),
        ("/ self.learned[number] +", "/ len(logprobs) +", "the mean of a micro-batch, not of all", PTX),
        (" + balance / self.size", "", "no balance loss of demonstrations"),
        ("self.seed, n, self.size)[mine]", "self.seed, batch, self.size)[mine]", "one minibatch a batch"),
        ("slice(self.world.rank, None,", "slice(0, None,", "all processes take the same records", PTX),
        ("zip(*self.world.gather(counts)", "zip(*[counts]", "the learned tokens of one process", PTX),
    ],
    "trainer/compute/scoring.py": [
        ("np.concatenate([[0, *mask[1:]]", "np.concatenate([[0, *mask[:-1]]", "the wrong tokens are learned"),
    ],
    "trainer/options/offline.py": [
        (
            "rollout.old_logprobs = rollout.sampler_logprobs = rollout.ref_logprobs",
            "rollout.old_logprobs = rollout.ref_logprobs",
            "importance weights of no sampler",
        ),
        (
            "answer.response_ids for answer in answers",
            "answer.response_ids[:-1] or [0] for answer in answers",
            "no EOS",
        ),
        (
            "actor - reference, 0.0)",
            "actor, 0.0)",
            "the KL forgets the reference",
            OFFLINE,
        ),
        ("(means[::2] - means[1::2])", "(means[1::2] - means[::2])", "the rejected answers' share", OFFLINE),
        ("/ rollout.response_len\n", "\n", "long answers have no chance", OFFLINE),
        ("(moved[::2] - moved[1::2])", "(moved[1::2] - moved[::2])", "the rejected are preferred", OFFLINE),
        ("x.square().sum()", "x.sum()", "the spread of the pairs", OFFLINE),
        (
            "torch.where(rollout.mask, actor - ref, 0.0)",
            "actor",
            "no reference",
            OFFLINE,
        ),
    ],
    "dataset/lm_dataset.py": [
        (
            "CHOSEN, REJECTED = 1.0, -1.0",
            "CHOSEN, REJECTED = -1.0, 1.0",
            "the rejected answers are the good ones",
            LOGGED,
        ),
        ("return ids[: place + 1]", "return ids[:place]", "answers do not end", LOGGED),
        (
            "response_ids) <= self.max_response",
            "response_ids) < self.max_response",
            "the longest is too long",
            LOGGED,
        ),
        (
            "return max(map(self.size, item))",
            "return self.size(item[0])",
            "rejected ones may be too long",
            LOGGED,
        ),
    ],
    "trainer/memory_plan.py": [
        (
            "case.width + case.demonstration",
            "case.width",
            "long demonstrations need no memory",
            PTX,
        ),
        ("4 * count // parts", "4 * count", "weights are not shared", SHARED),
        ("max(trained.values()) // parts", "max(trained.values())", "gradients are not shared", SHARED),
        ("if parts == 1:\n        standing[", "if True:\n        standing[", "the sampler stays", SHARED),
        ("2 * small * layer + 4", "small * layer + 4", "one layer", GATHERED),
        (" + 8 * model.table", "", "embeddings have no gradients", GATHERED),
        ("if parts == 1 or on_cpu:", "if True:", "a sharded run is built on GPUs", BUILT),
    ],
}


OVERLONG, LEAST = "tests/rewards/test_overlong.py", "tests/generation/test_min_gen_len.py"
STOPS, STEPS = "tests/generation/test_stops.py", "tests/test_step_rewards.py"
ENDS = {
    "trainer/rewards/rules.py": [
        (
            "(length - (longest - buffer)) / buffer",
            "(length - buffer) / buffer",
            "overlong, by the buffer",
            OVERLONG,
        ),
        (
            "max(0.0, (length",
            "max(-1.0, (length",
            "short ones are rewarded",
            OVERLONG,
        ),
        (
            "0.25 if response.count(TAGS[1]) == 1",
            "0.25 if response.count(TAGS[0]) == 1",
            "the other tag",
            THINKING,
        ),
        (".strip().removeprefix(TAGS[0]).strip()", "", "the tag counts as a thought", THINKING),
        (" or prompt.rstrip().endswith(TAGS[1])", "", "a second thought is paid for", THINKING),
    ],
    "dataset/chat_template.py": [
        ('f"{seed} {index}"', 'f"{index}"', "each seed has the same prompts think", THINKING),
    ],
    "trainer/rewards/combine.py": [
        (
            "said = texts if self.whole",
            "said = texts if not self.whole",
            "reward models see thoughts",
            THINKING,
        ),
        (
            "-rules.overlong_penalty(",
            "rules.overlong_penalty(",
            "length pays",
        ),
        (
            "max_gen_len=args.max_gen_len",
            "max_gen_len=args.max_seq_len",
            "of the prompt's length",
        ),
    ],
    "trainer/generation/stops.py": [
        ("places < self.least - 1\n", "places < self.least\n", "one token too many before an EOS"),
        ("places < self.least - 1\n", "places < self.least - 2\n", "one token too few before an EOS"),
        (
            "layout.response % layout.shape[1]",
            "layout.response",
            "only the first response has a least length",
        ),
        ("max(0, seen - len(stop) + 1)", "max(0, seen - len(stop))", "a stop string counts again", STOPS),
        ("max(0, seen - len(stop) + 1)", "seen", "a stop string that began before is missed", STOPS),
        (
            "seen = len(before.rstrip(HALF))",
            "seen = 0",
            "the text is cut where a stop string was ignored",
            STOPS,
        ),
        ("whole[: min(found)]", "whole[: min(found) + 1]", "the text is cut too late", STOPS),
        ("+ count * text.endswith(stops)", "", "no byte completes a stop string", STOPS),
        (" % count + count  # completed", "  # completed", "a stop string inside a token is missed", STOPS),
        ("bytes.fromhex(token[3:5])", 'b""', "single bytes are nothing", STOPS),
        ("bytes(BYTES.get(character, 0) for", "bytes(0 for", "halves of characters are nothing", STOPS),
        ("if ended and stops:", "if False:", "texts have stop strings", STOPS),
    ],
    "trainer/compute/logprobs.py": [
        ("        if forbid_:\n            forbid_(logits, c)\n", "", "the scorers may end early"),
        (
            "kept.pop(0) if keeps else logits_of(c, states, table, bias)",
            "kept.pop(0) if keeps else head_logits(states[c], table, bias, dtype)",
            "gradients of ends",
            LOGPROBS,
        ),
    ],
    "trainer/endings.py": [
        ('replace("\\\\n", "\\n")', 'replace("\\\\r", "\\n")', "no new line in --stop", STOPS),
        ("        eos.add(i)\n", "        pass\n", "--stop_token_ids end nothing", STOPS),
    ],
    "trainer/run.py": [
        (
            "early_ends=self.endings.early)",
            "early_ends=None)",
            "actor and reference may end early",
        )
    ],
    "trainer/generation/engine.py": [
        (
            "            self.early_ends.forbid_(logits, count)\n",
            "            pass\n",
            "the sampler ends early",
        ),
        ("(count >= self.least) & going_on", "going_on", "too short a response is stopped", STOPS),
        ("        self.begun[new] = 0\n", "", "a response goes on with another's stop string", STOPS),
        (
            "            self.finished[row] |= ended\n            done |= ended\n",
            "            done |= ended\n",
            "stopped responses have not finished",
            STOPS,
        ),
        (
            "            self.finished[row] |= ended\n            done |= ended\n",
            "            self.finished[row] |= ended\n",
            "sequences go on behind a stop string",
            STOPS,
        ),
        (
            "(sizes, ends) != (self.sizes, self.engine.ends)",
            "sizes != self.sizes",
            "a graph of another length",
            LEAST,
        ),
    ],
    "trainer/train_ppo.py": [
        ("steps=rollout.step_rewards", "steps=None", "all steps land at the end"),
    ],
    "trainer/ppo.py": [
        ("rest = rewards.gather(1, last) + rest - steps", "rest = rest - steps", "no step on the last token"),
        ("+ rest - steps.sum(1, keepdim=True)", "+ rest", "steps count twice"),
    ],
    "trainer/options/replay.py": [
        ('    "step_rewards",', "", "replayed steps land at the end"),
    ],
    "trainer/collect.py": [
        ("rewards[row, place] += score", "rewards[row, place] = score", "steps of one token", STEPS),
        ("[: offset + 1] == wanted", "[:offset] == wanted[:-1]", "the character before", STEPS),
        ("offset >= len(text)", "offset > len(text)", "behind the last character", STEPS),
        ("range(1, len(ids))", "range(len(ids))", "one token late", STEPS),
    ],
    "trainer/rewards/reward_function.py": [
        (
            "operator.index(offset) <= length",
            "operator.index(offset) < length",
            "no offset of the end",
            STEPS,
        ),
        (
            "sum(points for _, points in steps[-1])",
            "max(points for _, points in steps[-1])",
            "no sum",
            STEPS,
        ),
    ],
}


SCALE = {  # sharded models, more machines, and addresses
    "trainer/compute/sharding.py": [
        (
            "set_gradient_divide_factor(1.0)",
            "set_gradient_divide_factor(2.0)",
            "means of gradients",
            SHARDING,
        ),
        (
            "split(layer, None if dtype",
            "split(layer, torch.bfloat16 if dtype",
            "fp32 is gathered in bf16",
            SHARDING,
        ),
        ("return min(self.world.gather(", "return max(self.world.gather(", "the most", SHARDING),
    ],
    "trainer/memory_plan.py": [
        (
            "        room = in_step.least(room)\n",
            "",
            "processes plan for themselves",
            f"{PLAN}processes_plan_with_what_the_one_with_least_memory_has",
        ),
    ],
    "trainer/generation/cuda_graphs.py": [],
    "trainer/runs/optimizer_step.py": [
        (
            "norm = whole(norms[0])",
            "norm = local_part(norms[0])",
            "a part's norm",
            SHARDING,
        ),
    ],
    "trainer/runs/checkpoints.py": [
        ("local_part(x).copy_(local_part(stored))", "pass", "no rows", RESUMED),
        ('_fill(x, moments[f"{number}.{kind}"])', "pass", "no moments", RESUMED),
    ],
    "trainer/generation/sampler_copy.py": [
        (
            "for place in missing.pop(name, ()):",
            "for place in missing.pop(name, ())[:1]:",
            "a tied head keeps its weights",
            "tests/generation/test_engine.py",
        ),
        (
            "        for layer in self.joined:\n            layer.pack()\n\n\n",
            "\n\n",
            "bf16 keeps its weights",
            "tests/generation/test_engine.py",
        ),
    ],
}

OF_THE_PAIRS = "tests/test_offline.py::test_what_an_evaluation_says_of_pairs_by_hand"
GIVEN = "tests/test_flags.py"
SWAPPED = "tests/runs/test_processes.py::test_equal_weights_in_another_order_are_different_weights"
CHAT_STOPS = "tests/test_chat.py::test_an_answer_ends_before_the_stop_strings_of_training"
FROM_ABOVE_0 = "tests/test_best.py::test_the_accuracy_decides_from_its_first_value_above_0_on"
MISSING_EOS = "tests/test_missing_eos.py"
TALKS_ON = "tests/test_chat.py::test_transformers_ends_there_too_if_it_has_the_tokenizer"
SHOWN_LATE = "tests/test_chat.py::test_what_may_begin_a_stop_string_is_shown_late"
RESULT_ENDS = "tests/test_endings.py::test_the_result_knows_what_ends_its_answers"
UNREACHED = f"{SHARDING}::test_experts_that_a_process_does_not_reach_are_summed_too"
REST = {
    "chat.py": [
        (
            "text[: -held or None]",
            "text",
            "a stop string begins on screen",
            SHOWN_LATE,
        ),
        (
            "text = text[: min(ends)]",
            "text = text[:]",
            "the stop string is shown",
            CHAT_STOPS,
        ),
        ("while not finished and len(", "while len(", "it talks on", TALKS_ON),
    ],
    "trainer/endings.py": [
        (
            "config.stop_strings = endings.stops.texts if endings.stops else None",
            "config.stop_strings = endings.stops.texts if endings.stops else config.stop_strings",
            "stop strings of an earlier run",
            RESULT_ENDS,
        ),
        ("    if len(endings.eos) > 1:", "    if False:", "--stop_token_ids are not saved", RESULT_ENDS),
    ],
    "trainer/run.py": [
        ("keep_endings(self.endings, actor)\n", "pass\n", "the result does not know its endings", RESULT_ENDS)
    ],
    "trainer/flags.py": [
        ('value in ("", asked[other])', "True", "each value of a flag excludes", GIVEN),
    ],
    "trainer/compute/sharding.py": [
        ("unused_params(True)", "unused_params(False)", "sums of different experts", UNREACHED),
    ],
    "dataset/lm_dataset.py": [
        ("i % self.per_record()", "0", "the chosen side twice", LOGGED),
    ],
    "trainer/options/offline.py": [
        ("shares - chosen_shares(ref, rollout)", "shares", "the change is the share", OF_THE_PAIRS),
    ],
    "trainer/runs/distributed.py": [
        ("(bits * places[: len(bits)]).sum()", "bits.sum()", "the order of weights does not count", SWAPPED),
    ],
    "trainer/runs/report.py": [
        (
            'if not spreads and short != "accuracy":',
            "if not spreads:",
            "chance of held-out pairs is that of pairs that were learned",
            "tests/runs/test_summary.py::test_the_chance_of_an_accuracy_is_that_of_the_held_out_pairs",
        ),
    ],
    "trainer/options/missing_eos.py": [
        ("reward.running = {}", "pass", "the first samples count in the statistics", MISSING_EOS),
        ("UNKNOWN if spread < LEAST_SPREAD else ", "", "no penalty where all score alike", MISSING_EOS),
    ],
    "trainer/rewards/rules.py": [
        ("else final_number(said)", "else as_number(said)", "a number in a sentence is wrong", EVALUATION),
        ("as_number(said) if reasoning", "None if reasoning", "no number in a block", EVALUATION),
        ("else after_thinking(response)", "else response", "a number of the thought counts", EVALUATION),
    ],
    "trainer/options/best.py": [
        ("metrics.get(self.successor, 0.0) > 0", "self.successor", "accuracy 0 decides", FROM_ABOVE_0),
    ],
}

CUT_OR_OFFSET = f"{REWARDS}::test_a_score_loses_its_offset_and_a_long_conversation_its_beginning"
LARGEST_WEIGHT = f"{REWARDS}::test_the_critic_starts_from_the_model_of_the_largest_weight_whatever_its_sign"
KEEPS, RATES = "::test_what_a_checkpoint_keeps_restores_it", "tests/runs/test_learning_rate.py"
NEVER_DRAWN = f"{ENGINE}::test_a_token_of_probability_zero_is_never_drawn"
ROWS = f"{ENGINE}::test_rows_that_are_decoded_and_rows_of_the_head_come_in_multiples_of_eight"
RELEASED = f"{PLAN}a_run_that_releases_them_is_the_same"
REFEREED = {  # what no test of its module noticed once
    "trainer/compute/scoring.py": [
        (
            "F.pad(part, (0, width - part.shape[-1]))",
            "F.pad(part, (width - part.shape[-1], 0))",
            "on the left",
        ),
    ],
    "trainer/rewards/reward_models.py": [
        ("x[-self.max_length :]", "x[: self.max_length]", "a long conversation loses its end", CUT_OR_OFFSET),
        ("return scores - self.offset", "return scores + self.offset", "added offset", CUT_OR_OFFSET),
        ("key=lambda x: abs(x[1])", "key=lambda x: x[1]", "the largest signed weight", LARGEST_WEIGHT),
    ],
    "trainer/rewards/combine.py": [
        (
            "rules.answer_text(text) if self.reasoning else None",
            "rules.answer_text(text)",
            "the answer block is scored without --reasoning",
            f"{REWARDS}::test_without_reasoning_only_the_whole_is_scored",
        ),
    ],
    "trainer/rewards/rules.py": [
        (
            "<= len(response.strip()) <=",
            "<= len(response) <=",
            "spaces count as length",
            f"{REWARDS}::test_length_reward_by_hand",
        ),
    ],
    "trainer/options/value_scale.py": [
        (
            ', "last")',
            ")",
            "not in the checkpoint",
            f"{VALUE_SCALE}{KEEPS}",
        ),
        ("if variance and far_off:", "if far_off:", "equal returns end the head", VALUE_SCALE),
        ("MISLED = 1.1", "MISLED = 0.0", "good values are fitted too", VALUE_SCALE),
        ("SMALL = 0.1", "SMALL = 0.0", "rewards 100 times the model's scores", VALUE_SCALE),
    ],
    "trainer/options/best.py": [
        (
            'if name.startswith("judge") else []',
            "if False else []",
            "another judge is the same",
            "tests/test_best.py::test_another_judge_is_another_source_where_it_decides",
        ),
    ],
    "trainer/inputs.py": [
        (
            "rest = steps - warmup",
            "rest = steps",
            "the rate rises while only the critic trains",
            "tests/test_inputs.py",
        ),
        (
            "if 0 < args.dual_clip <= 1:",
            "if 0 < args.dual_clip < 1:",
            "--dual_clip 1 is accepted",
            "tests/test_inputs.py",
        ),
    ],
    "trainer/runs/optimizer_step.py": [
        (
            "run.progress.token_budget = budget",
            "pass",
            "what fitted is forgotten",
            "tests/compute/test_batching.py",
        ),
    ],
    "trainer/runs/learning_rate.py": [
        ("LORA_FACTOR = 4 ", "LORA_FACTOR = 1 ", "adapters get the rate of all weights", RATES),
    ],
    "trainer/generation/sampling.py": [
        (
            "(coarse, target, right=True)",
            "(coarse, target)",
            "leading blocks of probability 0 are drawn",
            NEVER_DRAWN,
        ),
        (
            "column = torch.searchsorted(fine, below, right=True)",
            "column = torch.searchsorted(fine, below)",
            "leading tokens of probability 0 are drawn",
            NEVER_DRAWN,
        ),
    ],
    "trainer/compute/precision.py": [
        (
            'in kinds and "lora_" not in name',
            "in kinds",
            "the old actor's adapters are rounded",
            "tests/model/test_lora.py::test_the_old_actor_keeps_its_adapter_until_it_is_due",
        ),
        ("native = onednn_takes_bf16() and any(", "native = any(", "bf16 that oneDNN refuses", ENGINE),
    ],
    "dataset/lm_dataset.py": [
        ("self.ids(said, opening=False)", "self.ids(said)", "a BOS inside", LOGGED),
    ],
    "trainer/options/replay.py": [
        (
            "for number in sorted(batches)]",
            "for number in batches]",
            "batch 10 before batch 2",
            f"{REPLAY}{KEEPS}",
        ),
    ],
    "trainer/generation/engine.py": [
        (
            "most = rows if self.graphs.asynchronous else rows + -rows % ROW_MULTIPLE",
            "most = rows",
            "slots",
            ROWS,
        ),
        ("F.pad(states, (0, 0, 0, -len(states) % ROW_MULTIPLE))", "states", "rows of the head", ROWS),
    ],
    "trainer/memory_plan.py": [
        ("    slots += -slots % ROW_MULTIPLE\n", "", "any number of slots", RELEASED),
    ],
}


def _rows():
    files = [("trainer/train_ppo.py", TRAIN_PPO), ("trainer/ppo.py", PPO)]
    files.append(("trainer/run.py", BUILD_RUN))
    for part in (CRITIC, COMPUTE, ELSEWHERE, SHOWN, HEALTH, REPORT, ENDS, LOGGED_DATA, SCALE, REST, REFEREED):
        files += part.items()
    for file, rows in files:
        for old, new, fault, *tests in rows:
            yield Mutation(file, old, new, fault, tuple(tests) or (WHOLE_STEP,))


MUTATIONS = list(_rows())
