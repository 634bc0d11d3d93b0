"""The list of mutations.py: wrong lines of code that a test must notice.

A row is (right, wrong, what is wrong). ``right`` must occur exactly once in its file. Where another test than
test_whole_step.py is to notice it, or a quicker one, its file (or file::test) is named behind.
"""

from typing import NamedTuple

WHOLE_STEP = "tests/test_whole_step.py"
FORMULAS, EVALUATION = "tests/test_ppo.py", "tests/test_evaluation.py"
LOGPROBS, SCORING = "tests/compute/test_logprobs.py", "tests/compute/test_scoring.py"
BALANCE, ENGINE = "tests/compute/test_balance_loss.py", "tests/generation/test_engine.py"
RESUMING = "tests/runs/test_checkpoints.py::test_resuming_equals_never_having_stopped_bit_for_bit"
STARTS = "tests/test_invariants.py::test_the_critic_starts_as_the_reward_model_times_its_weight"
REPLAY = "tests/test_replay.py"
TWO_PROCESSES = "tests/runs/test_processes.py::test_two_processes_of_batch_n_equal_one_of_batch_2n"
RESPONSES, REWARDS = "tests/test_response_stats.py", "tests/rewards/test_rewards.py"
BARS, TRACKED = "tests/test_progress_bar.py", "tests/runs/test_trackers.py"
VALUE_SCALE, WARMUP = "tests/test_value_scale.py", "tests/test_critic_warmup.py"


class Mutation(NamedTuple):
    """``old`` in ``file`` becomes ``new``; one of ``tests`` must fail."""

    file: str
    old: str
    new: str
    fault: str
    tests: tuple = (WHOLE_STEP,)


TRAIN_PPO = [
    (
        "epoch_order(pool, args.seed, epoch + i)[:count]",
        "range(count)",
        "minibatches are never reordered",
    ),
    ("epoch + i)[:count]", "epoch)[:count]", "the same order in every PPO epoch"),
    (
        "run.respond(run.old_actor, prompts",
        "run.respond(run.actor, prompts",
        "the actor samples, not the old actor",
    ),
    ("args.kl_coef / mb.advantage_std,", "args.kl_coef,", "the KL is not divided by the advantages' std"),
    (", args.gamma * args.lam\n", ", args.lam\n", "later tokens' KL is not discounted"),
    (
        "    return loss / token_count + balance / run.minibatch_size, metrics",
        "    return loss / token_count, metrics",
        "no balance loss of the actor",
    ),
    (
        "    return loss / token_count + balance / run.minibatch_size, metrics",
        "    return loss / token_count + balance / token_count, metrics",
        "the actor's balance loss is divided by tokens",
    ),
    (
        "args.vf_coef * loss / token_count + balance / run.minibatch_size",
        "args.vf_coef * loss / token_count",
        "no balance of the critic",
    ),
    (
        "new.ref_logprobs = score_policy(new, ref,",
        "new.ref_logprobs = score_policy(new, old_actor,",
        "reference is the old actor",
    ),
    ('    metrics.keep_first("policy/ratio", "policy/first_ratio")\n', "", "no ratio of the first minibatch"),
    ("run.replay.join(new)", "new", "nothing is replayed"),
    ("    run.replay.keep(new)\n", "", "no batch is kept for replay"),
    (
        "advantages, _ = ppo.gae(*fields, args.lam)",
        "advantages, _ = ppo.gae(*fields[:3], args.lam, args.gamma)",
        "gamma and lambda are swapped",
    ),
    (
        "ppo.gae(*fields, args.critic_lam)",
        "ppo.gae(*fields, args.lam)",
        "returns with the lambda of advantages",
    ),
    (
        "ppo.gae(*fields, args.lam)",
        "ppo.gae(*fields, args.critic_lam)",
        "advantages with the lambda of returns",
    ),
    (
        "ppo.whiten(advantages, rollout.mask, run.world.sum)\n",
        "ppo.whiten(advantages, rollout.mask, run.world.sum)\n"
        "    rollout.returns = rollout.advantages + rollout.values\n",
        "returns from whitened advantages",
    ),
    ("ppo.whiten(advantages, rollout.mask, run.world.sum)", "advantages, 1.0", "advantages are not whitened"),
    ("in (run.old_actor, run.ref))", "in (run.actor, run.ref))", "old log-probs are the actor's"),
    ("in (run.old_actor, run.ref))", "in (run.old_actor, run.actor))", "the reference is the actor"),
    (
        "ppo.kl_estimators(old, rollout.ref_logprobs)[0]",
        "ppo.kl_estimators(old, rollout.ref_logprobs)[1]",
        "k2 off rewards",
    ),
    ("penalty = args.kl_coef * ppo", "penalty = ppo", "the KL comes off the rewards without its coefficient"),
    (
        "importance_weights(old, sampled, mask, args",
        "importance_weights(sampled, old, mask, args",
        "weights turned round",
    ),
    (
        "importance_weights(old, sampled, mask, args.importance_cap)",
        "importance_weights(old, old, mask, 1)",
        "no weights",
    ),
    (
        "monte_carlo_returns(rollout.rewards, mask, args.gamma)",
        "monte_carlo_returns(rollout.rewards, mask, 1.0)",
        "gamma",
    ),
    ("    run.value_scale.update(rollout, outcome, run.world.sum)\n", "", "the value scale stays 1"),
    (
        "run.note_rollout(step, rollout, outcome, metrics)",
        "run.note_rollout(step, rollout, rollout.returns, metrics)",
        "critic's returns",
    ),
    (
        "PolicyScorer(actor, dtype), args.learning_rate)",
        "PolicyScorer(actor, dtype), args.critic_learning_rate)",
        "the actor learns at the critic's rate",
    ),
    (
        "ValueScorer(critic, dtype), args.critic_learning_rate)",
        "ValueScorer(critic, dtype), args.learning_rate)",
        "the critic learns at the actor's rate",
    ),
    (
        "peak, total_steps * per_batch, **schedule)",
        "peak, total_steps, **schedule)",
        "a schedule as long as batches",
    ),
    (
        '"warmup_steps": args.lr_warmup_steps * per_batch',
        '"warmup_steps": args.lr_warmup_steps',
        "warm-up in steps",
    ),
    (', "schedule": args.lr_schedule}', "}", "--lr_schedule is ignored"),
    (
        "for i in range(args.ppo_epochs) for k",
        "for i in range(1) for k",
        "one PPO epoch, whatever the flag",
    ),
    (
        "minibatches[k], token_counts[k]",
        "minibatches[k], token_counts[0]",
        "the first minibatch's token count for all",
    ),
    ("return run.args.vf_coef * loss / token_count", "return loss / token_count", "--vf_coef is ignored"),
    (
        "run.args.cliprange_value, run.critic.scale\n",
        "run.args.cliprange_value, 1.0\n",
        "the value loss forgets the scale",
    ),
    (
        "prompts, keys, run.args.temperature)",
        "prompts, keys, 1.0)",
        "samples at temperature 1, whatever the flag",
    ),
    (
        "scorer(*mb.sequences, args.temperature)",
        "scorer(*mb.sequences, 1.0)",
        "the actor is scored at temperature 1",
    ),
    (
        "noise_keys(run.args.seed, step, positions)",
        "noise_keys(run.args.seed, 0, positions)",
        "the same noise each step",
    ),
    (
        "(step + 1) % args.update_old_actor_freq == 0",
        "step % args.update_old_actor_freq == 0",
        "old actor a step late",
    ),
    (
        "names if not stopped else names[:1]",
        "names",
        "--target_kl does not stop the actor for the rest of a batch",
    ),
    ("names if not stopped else names[:1]", "names if not stopped else []", "--target_kl stops the critic"),
    ("if first >= learner.first_step]", "if first > learner.first_step]", "warm-up takes a batch more"),
    (
        "CriticModel.from_model(start, args.lora_r > 0, weight)",
        "CriticModel.from_model(start, args.lora_r > 0)",
        "the critic starts without the reward model's weight",
        STARTS,
    ),
]

PPO = [
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
    ('    if kl_in == "reward":\n', "    if True:\n", "KL in loss and reward"),
    (
        "advantages - kl_weight * discounted_sums",
        "advantages + kl_weight * discounted_sums",
        "the KL in the reward follows backwards",
    ),
    ("kl_weight * discounted_sums(moved, decay)", "kl_weight * moved", "later tokens' KL does not count"),
    ("F.pad(x[:, n:], (0, n))", "F.pad(x[:, :-n], (n, 0))", "earlier tokens' KL counts"),
    (
        "rewards.scatter_(1, response_len[:, None] - 1,",
        "rewards.scatter_(1, 0 * response_len[:, None],",
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
    ("(x - mean) / std, 0.0)", "x / std, 0.0)", "whitening keeps the mean"),
    (
        "return 1 - (error_std / return_std) ** 2",
        "return 1 - error_std / return_std",
        "ratio of std",
    ),
    (
        '"value/bias": rollout.values - returns',
        '"value/bias": returns - rollout.values',
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
    "trainer/value_scale.py": [
        (
            "self.critic.rescale(math.sqrt(self.variance))",
            "self.critic.rescale(self.variance)",
            "variance as scale",
        ),
        ("RATE = 0.1", "RATE = 1.0", "the scale is that of the last batch"),
        ("self.critic.shift(shift)", "self.critic.shift(-shift)", "the first shift has the other sign"),
        ("rollout.values + shift, 0.0)", "rollout.values, 0.0)", "the first batch's values are not shifted"),
        ("        if not self.batches:\n", "        if True:\n", "every batch shifts the values"),
        ("limit = GROWTH * max(", "limit = 1e9 * max(", "an outlier sets the scale", VALUE_SCALE),
        ("max(self.variance, self.last)", "self.variance", "a lasting change is not taken over", VALUE_SCALE),
    ],
    "model/critic.py": [
        ("p.mul_(self.scale / scale)", "p.mul_(scale / self.scale)", "a new scale multiplies the values"),
        ("p.mul_(self.scale / scale)", "p.mul_(1.0)", "a new scale changes the values"),
        ("bias += amount / self.scale", "bias += amount * self.scale", "a shift in other units", VALUE_SCALE),
    ],
    "trainer/critic_warmup.py": [
        (
            "error < FALLING * self.error",
            "error < self.error",
            "warm-up goes on while the error falls a little",
            WARMUP,
        ),
        ("batch >= self.most or ", "", "warm-up has no end", WARMUP),
        ("batch * self.per_batch", "batch", "the actor's first step is a batch's number"),
        (
            "rollout.values - returns, rollout.mask",
            "returns, rollout.mask",
            "the error has no values in it",
            WARMUP,
        ),
    ],
    "trainer/replay.py": [
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
    "trainer/response_stats.py": [
        ("(ids[:, 1:-1] << ID_BITS)", "(ids[:, 1:-1] << 1)", "trigrams that differ are the same", RESPONSES),
        ("rollout.prompt_len[:, None] + torch", "torch", "the prompt's trigrams count", RESPONSES),
        (
            "(trigrams[:, 1:] == trigrams[:, :-1]) & there[:, 1:]",
            "trigrams[:, 1:] == trigrams[:, :-1]",
            "padding repeats",
            RESPONSES,
        ),
        ("count.clamp(min=1)", "rollout.response_len", "repetition is divided by tokens", RESPONSES),
        (".sort(1)[0]", "", "only a trigram right behind its like counts", RESPONSES),
        ("hash(tuple(ids))", "hash(tuple(ids[:1]))", "responses that begin alike are the same", RESPONSES),
        ("in world.gather(mine) for", "in [mine] for", "only this process' responses", TWO_PROCESSES),
        ("score, len(ids))", "score, ids[0])", "the first token as length", RESPONSES),
        ("    x = x - mean\n", "    x = x - mean + 0.1\n", "a mean that is not taken off", RESPONSES),
        ("LEAST_SPREAD = 1e-6", "LEAST_SPREAD = 0.0", "rounding has a correlation", RESPONSES),
        ("(x @ y).item() / size if size", "(x @ y).item() / size**2 if size", "covariance", RESPONSES),
    ],
    "trainer/runs/metrics.py": [
        (
            "if name in self._totals and kept not in self._totals:",
            "if name in self._totals:",
            "every minibatch counts as the first",
        ),
    ],
    "trainer/ppo_models.py": [
        (
            "logprobs = new.old_logprobs, new.sampler_logprobs",
            "logprobs = new.old_logprobs, new.ref_logprobs",
            "effective sample size of the reference",
        ),
        (
            'batch_metrics(rollout, batch.scores["score"], self.world), 1)',
            'batch_metrics(rollout, batch.scores["missing_eos"], self.world), 1)',
            "statistics of a part of the score",
        ),
        (
            "self.reward.at_limit(batch.raw).sum(), count)",
            "self.reward.at_limit(batch.raw).sum(), 1)",
            "responses at the limit are counted, not their share",
            REWARDS,
        ),
        (
            "args.clip_epsilon_high or args.clip_epsilon,",
            "args.clip_epsilon,",
            "--clip_epsilon_high is ignored",
        ),
        (", args.dual_clip)", ")", "--dual_clip is ignored"),
        ("first = count - self.args.batch_size", "first = 0", "metrics of replayed batches too"),
        (
            "        self.critic_warmup.note(step, new, returns, self.world.sum)\n",
            "",
            "--critic_warmup_steps auto never ends",
        ),
        (
            '{"critic": "value", "actor": "policy"}',
            '{"critic": "policy", "actor": "value"}',
            "metrics of the other model",
        ),
        ("step.norm, 1)", "self.args.grad_clip, 1)", "the clip as the gradient's norm"),
        (
            'own = {"value_scale": self.value_scale,',
            "own = {",
            "checkpoints forget the value scale",
            RESUMING,
        ),
        (
            '"critic_warmup": self.critic_warmup}',
            "}",
            "checkpoints forget where the warm-up stands",
            RESUMING,
        ),
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
        ("grad = grad / ctx.temperature", "grad = grad * 1.0", "gradients forget the temperature", LOGPROBS),
    ],
    "trainer/compute/scoring.py": [
        (
            "            values = layout.spread(self.critic.read(states))\n",
            '            places = layout.on(tokens.device)["predicted_by"] + 1\n'
            "            states = take_rows(output.last_hidden_state, places)\n"
            "            values = layout.spread(self.critic.read(states))\n",
            "the critic reads the state behind its token",
            SCORING,
        ),
    ],
    "trainer/compute/balance_loss.py": [
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
        ("/ (lengths[:, None] * top_k)", "/ lengths[:, None]", "shares of choices without top_k", BALANCE),
        ("gate.topk(top_k, dim=-1)", "gate.topk(1, dim=-1)", "only the first choice counts", BALANCE),
    ],
}

ELSEWHERE = {
    "trainer/evaluation.py": [
        ("run.respond(run.actor,", "run.respond(run.old_actor,", "the old actor is evaluated", EVALUATION),
        (
            "EVAL_STEP, [p.index for p in prompts])",
            "EVAL_STEP, range(len(prompts)))",
            "evaluation's noise depends on the batch",
            EVALUATION,
        ),
        (
            "right = sum(is_correct(text, answer, reasoning) for",
            "right = sum(True for",
            "accuracy 1",
            EVALUATION,
        ),
        ("right, len(pairs))", "right, len(batch))", "records without an answer count as wrong", EVALUATION),
        ('("_greedy", 0.0)', '("_greedy", temperature)', "greedy results are sampled", EVALUATION),
        ('(("", temperature)', '(("", 1.0)', "evaluation samples at temperature 1", EVALUATION),
        (
            '(parts["format"] > 0).sum()',
            'parts["format"].sum()',
            "the format's rate is its reward",
            EVALUATION,
        ),
        (
            "rollout.finished.sum(), len(batch))",
            "rollout.finished.sum(), len(mine))",
            "share of batches",
            EVALUATION,
        ),
    ],
    "trainer/generation/engine.py": [
        ("[r[:-1] if ended else r for", "[r for", "the EOS stays in the text", ENGINE),
        ("[r[:-1] if ended else r for", "[r[:-1] for", "cut responses lose a token", ENGINE),
    ],
    "trainer/runs/learning_rate.py": [
        ("0.1 + 0.45 * (1 + math", "0.5 * (1 + math", "the rate falls to 0"),
        ("max(total - warmup - 1, 1)", "max(total - warmup, 1)", "the last step is not the last", FORMULAS),
        (
            "return peak * min(1.0, (step + 1)",
            "return peak * min(1.0, step",
            "the constant rate begins with 0",
        ),
    ],
    "trainer/runs/optimizer_step.py": [
        ("number - self.first_step, self.total", "number, self.total", "a schedule without its first step"),
        (
            "self.total_steps - self.first_step\n",
            "self.total_steps\n",
            "the actor's schedule is as long as the critic's",
        ),
        (
            "clip_grad_norm_(learner.model.parameters(), run.args.grad_clip)",
            "torch.ones(())",
            "no gradient clip",
        ),
        ('group["lr"] = learner.learning_rate(number)', 'group["lr"] = learner.peak', "the rate never falls"),
    ],
    "trainer/generation/sampling_noise.py": [
        (
            "for value in (step, prompt_index, sample_index)",
            "for value in (prompt_index, sample_index)",
            "no step",
            ENGINE,
        ),
    ],
    "trainer/rewards/reward.py": [
        (".abs().ge(SCORE_LIMIT)", ".ge(SCORE_LIMIT)", "scores at the lower limit do not count", REWARDS),
        (".abs().ge(SCORE_LIMIT)", ".abs().gt(SCORE_LIMIT)", "no clipped score counts", REWARDS),
        (".ge(SCORE_LIMIT).any(0)", ".ge(SCORE_LIMIT).all(0)", "every model must be at its limit", REWARDS),
        (
            "self.running.get(name)) for name in self.models]",
            "None) for name in self.models]",
            "raw scores where normalised ones are clipped",
            "tests/rewards/test_running_stats.py",
        ),
        ("* (~torch.tensor(finished))", "* torch.tensor(finished)", "the penalty is for responses that end"),
    ],
}

SHOWN = {  # what one sees of a run
    "progress_bar.py": [
        (">= DELAY", "< DELAY", "bars of short phases only", BARS),
        ("leave=False", "leave=True", "a bar stays", BARS),
        ('get("RANK", "0") == "0"', 'get("RANK", "0") != "x"', "every process shows bars", BARS),
        ("sys.stderr.isatty()", "True", "bars in files", BARS),
        ("self.bar.start_t = self.begun", "pass", "the clock starts late", BARS),
        ("            _phases.remove(this)\n", "            pass\n", "a phase never ends", BARS),
    ],
    "trainer/compute/memory.py": [
        ("bar.done += len(rows)", "bar.done += 1", "micro-batches are counted for sequences", BARS),
    ],
    "trainer/generation/engine.py": [
        (" - len(self.engine.waiting) - ", " - ", "waiting prompts count as responses", BARS),
    ],
    "trainer/evaluation.py": [
        ('"evaluation", 2 * len(mine)', '"evaluation", len(mine)', "the bar is full half-way", BARS),
    ],
    "trainer/runs/trackers.py": [
        ("if fresh and not tracker.fresh:", "if fresh:", "a resumed run lacks its first steps", TRACKED),
        ("        remove([path])\n", "", "steps are doubled in TensorBoard", TRACKED),
        ('remove([folder.path / "swanlog"])', "pass", "two runs in SwanLab", TRACKED),
        ('glob(f"offline-run-*-{name}")', 'glob("no-run")', "two runs in wandb", TRACKED),
        (
            "                del self._live[name]\n",
            "                pass\n",
            "a broken tracker is asked again",
            TRACKED,
        ),
        ("if (step, name) not in self._given:", "if True:", "two pictures of a step", TRACKED),
        ("html.escape(text)", "text", "a response's HTML is obeyed", TRACKED),
    ],
    "trainer/runs/run_logger.py": [
        (
            "begun, step = health.add(record)",
            "begun, step = self.health.sorted",
            "a finding at every step",
            TRACKED,
        ),
        ("if self._is_shown(step) else", "if step else", "a text at every step", TRACKED),
    ],
}


H = ("tests/runs/test_health.py",)
_HEALTH = "tests/runs/test_health.py::"
_LIMITS = _HEALTH + "test_no_remedy_goes_beyond_what_its_flag_takes_or_what_is_usual"
_HIGH = _HEALTH + "test_a_rate_that_is_high_is_not_raised"
_CAUSES = _HEALTH + "test_a_cause_that_the_flags_rule_out_is_not_named"
_STOPS = _HEALTH + "test_an_early_stop_is_the_rates_fault_where_the_target_is_not_small"
_BIAS = _HEALTH + "test_the_bias_of_the_critic_has_a_direction"
_FORM = _HEALTH + "test_the_judge_falls_by_more_than_chance_and_the_form_has_most_of_the_gain"
_ENDED = _HEALTH + "test_strict_health_ends_a_broken_run_saved_and_leaves_a_healthy_one_alone"
_BY_HAND = "tests/runs/test_health_read.py::test_a_folder_that_was_changed_by_hand_is_named_in_one_line"
_SHOWN = (
    "tests/runs/test_summary.py::test_a_number_that_cannot_be_is_shown_and_one_that_has_no_value_is_a_dash"
)
_DEMO = "tests/test_inputs.py::test_the_held_out_prompts_of_the_demo_belong_to_its_prompts"
_TRUSTED = (
    "tests/model/test_pretrained.py"
    "::test_models_without_code_of_their_own_are_the_same_with_trust_remote_code"
)
HEALTH = {
    "trainer/runs/health_past.py": [
        (
            "self._begin.setdefault(name, [])) < WINDOW",
            "self._begin.setdefault(name, [])) < 1e9",
            "the start moves",
            *H,
        ),
        ("spread = math.sqrt(max(best * (1 - best), 0.01))", "spread = 1.0", "a wider standard error", *H),
        ("found[2][1] - found[0][1] >", "found[1][1] - found[0][1] >", "the best evaluation is compared", *H),
        ('steps[0]["step"]', "self.step", "since the last of the steps that show it", *H),
        ("wanted = min(wanted, positions - other)", "pass", "answers longer than the model's positions", *H),
        ("wanted >= WORTH * value", "wanted > 0", "a remedy that the run has already", *H),
        ("value < WORTH * self.flag(name, 0)", "False", "a remedy that the run has nearly", _LIMITS),
        ("value = min(wanted, TOP[name])", "value = wanted", "a remedy that its flag does not take", _LIMITS),
        ("wanted = min(value * factor, TOP[name])", "wanted = value * factor", "too long a size", _LIMITS),
        ("rate >= TOP[name] or rate > 2", "rate > 2", "the highest rate is raised", _HIGH),
        ("rate > 2 * (suited or rate)", "False", "a rate that is high is raised", _HIGH),
        (
            'self.flag("ppo_epochs", 2) > 1',
            'self.flag("ppo_epochs", 2) > 0',
            "one epoch is too many",
            _CAUSES,
        ),
        ("count == 1 else 's'", "count == 0 else 's'", "1 steps", *H),
        ("min(rate / 3, suited or rate / 3)", "rate / 3", "a rate far too high is only cut to a third", *H),
    ],
    "trainer/runs/health_policy.py": [
        ("abs(x - 1) > limit, 1)", "x - 1 > limit, 1)", "a ratio below 1 is right", *H),
        ("not LEAST_RATIO < x < LARGEST_RATIO", "x > LARGEST_RATIO", "a small ratio is right", *H),
        ("or past.steps < 12 or", "or", "stuck after eight steps", *H),
        ("or past.score_rose()", "or False", "stuck although the score rises", *H),
        ("max(target, kl) >= USUAL_STOP", "target >= USUAL_STOP", "a small target hides a high rate", _STOPS),
        ("max(target, kl) >= USUAL_STOP", "kl >= USUAL_STOP", "a target of 0.05 is raised", _STOPS),
        ("target < USUAL_STOP", "True", "every target is too small", _STOPS),
        ("min(3 * target, STEP_KL)", "3 * target", "a target above what a step may move", _STOPS),
        ("limit = max(KL_LIMIT, KL_OF_A_TOKEN * length)", "limit = KL_LIMIT", "long answers are far", *H),
    ],
    "trainer/runs/health_critic.py": [
        ("abs(x) > BIASED * spread", "x > BIASED * spread", "values that are too low are right", *H),
        ("'high' if bias > 0 else 'low'", "'low' if bias > 0 else 'high'", "high and low exchanged", _BIAS),
        ('if past.flag("cliprange_value", 0.5) else ()', "", "a clip that is off is too small", _BIAS),
    ],
    "trainer/runs/health_responses.py": [
        ("now > start + 0.1", "now > start", "a little more repetition", *H),
        ("dear if penalty else ()", "dear", "a penalty of 0 is too large", _CAUSES),
        ("x < start / 2", "x < start", "half of the ends is not needed", *H),
        ("enough = 0.0 if cuts_are_free(past) else FEW_END", "enough = FEW_END", "cuts that are free", *H),
        ("LOOK if cuts_are_free(past) else WRONG", "WRONG", "cuts that are free are wrong", *H),
        ('past.facts.get("distinct_prompts", 1.0)', "1.0", "equal prompts need different responses", *H),
        ("count = past.steps_of(FEWEST)", "count = 1", "four responses say how many end", *H),
        ("WRONG if past.worsened() else LOOK", "WRONG if past.improved() is False else LOOK", "no rise", *H),
        ("or now < start / LONGER", "", "shorter answers are never gamed", *H),
        ('past.start("rollout/finished", count) >= NONE_ENDS', "False", "no end later is no end ever", *H),
    ],
    "trainer/runs/health_reward.py": [
        ("fall > max(2 * spread_of_steps(before), 0.0)", "fall > 0.0", "any fall is a fall", *H),
        ("max(0.02, chance)", "0.02", "the judge falls by chance", _FORM),
        ("max(0.02, chance)", "chance", "the judge falls by nothing", _FORM),
        ("2 * math.hypot(*spreads)", "math.hypot(*spreads)", "one standard error", _FORM),
        ("SHARE_OF_FORM = 0.8", "SHARE_OF_FORM = 0.2", "a small share is the form's alone", _FORM),
        (
            "or past.improved():\n        return None\n    gain",
            "or 0:\n        return None\n    gain",
            "all better",
            *H,
        ),
        ("moved > 0.1", "moved > 0.7", "a move of half a nat is none", *H),
        ('<= TOP["kl_coef"] else ""', '<= 1e9 else ""', "a price that is not usual", _LIMITS),
        ("price / spread < SMALLEST_PRICE", "price < SMALLEST_PRICE", "the scale of the scores", *H),
        ('2 * model["weight"]', '1 * model["weight"]', "the weight that the run has", *H),
        (
            'if past.flag("critic_init", "auto") != "actor":',
            "if False:",
            "the critic starts at the raw scale",
            *H,
        ),
        ('past.most("reward/score_std") >= SAME', "False", "equal scores at the end are wrong", *H),
        ("WRONG if past.steps * size >= SCORED else LOOK", "WRONG", "a few answers that fail are wrong", *H),
    ],
    "trainer/runs/health_start.py": [
        ('total == past.flag("max_steps")', "False", "epochs that do not end the run", *H),
        ("samples / prompts <= OFTEN", "prompts <= OFTEN", "prompts are counted, not samples of them", *H),
        ("WRONG if dropped / read > NEARLY_ALL else LOOK", "LOOK", "nearly all may be dropped", *H),
        ("suited / FAR <= rate <= suited * FAR", "rate <= suited * FAR", "a low rate is usual", *H),
    ],
    "trainer/runs/health.py": [
        ("if found and not (known and found.level == LOOK):", "if found:", "said at every step", *H),
        ("(f.level != WRONG, f.step,", "(f.step,", "the wrong ones are not first", *H),
        ("return int(any(f.level == WRONG for f in found))", "return 0", "the exit code is always 0", *H),
    ],
    "trainer/runs/log_and_save.py": [
        ("its line above and docs/health.md say", "{finding.symptom}", "a finding is said twice", *H),
        ("        logger.ended_by = finding\n", "", "nobody says that the run was ended", _ENDED),
        ("error.code, error.agreed = BROKEN, True", "error.agreed = True", "a broken run exits with 2", *H),
    ],
    "trainer/runs/run_logger.py": [
        (
            'how = "to go on all the same" if broken',
            'how = "to go on" if 0',
            "to go on with what is broken",
            _ENDED,
        ),
        ("            if remedy:\n", "            if 0:\n", "no remedy before the first step", *H),
    ],
    "trainer/runs/summary.py": [
        (
            'if "--strict_health" in state else []',
            "if 0 else []",
            "the summary does not say who ended it",
            _ENDED,
        ),
    ],
    "trainer/runs/health_read.py": [
        ('    "temperature",\n', "", "a temperature of words", _BY_HAND),
        ('record["step"] < 0', "False", "a step below 0", _BY_HAND),
        ("abs(x) > LARGEST:\n            raise", "False:\n            raise", "too large a number", _BY_HAND),
        ('facts.get("longest") is None', "False", "positions without the longest prompt", _BY_HAND),
        ('{"template", "sees_answer"} <= facts.keys()', "True", "a judge without its facts", _BY_HAND),
        ('and facts["weight"] != 0', "", "a weight of 0", _BY_HAND),
        ("is_number(value) and value >= 0", "is_number(value)", "a count below 0", _BY_HAND),
    ],
    "trainer/start_facts.py": [
        ("None if positions == math.inf else positions", "None", "the positions are not known", *H),
        ("return header, bool(set(ids) & set(eos))", "return header, True", "the template has an EOS", *H),
        ('"sees_answer": one != other', '"sees_answer": True', "every judge sees the answer", *H),
    ],
    "trainer/runs/displays.py": [
        ("name == UNDEFINED and math.isnan(x)", "math.isnan(x)", "a loss of NaN is not seen", _SHOWN),
        ("name == UNDEFINED and math.isnan(x)", "False", "nan where there is no value", _SHOWN),
    ],
    "trainer/inputs.py": [
        ("        if not args.data_path:  # the", "        if True:  # the", "evaluated on the demo", _DEMO),
    ],
    "model/pretrained.py": [
        ("fill=trust_remote_code)", "fill=is_from_outside(model))", "Llama's buffers are lost", _TRUSTED),
    ],
}


_REPORT = "tests/runs/test_report.py::test_"
KEPT, PROCESSES = (
    _REPORT + "of_a_step_the_first_two_and_those_that_stand_out_are_kept",
    _REPORT + "what_stands_out_is_taken_from_all_processes_and_nothing_is_at_a_limit_that_is_not",
)
COUNTED, MARKED = _REPORT + "a_histogram_by_hand", _REPORT + "changed_words_are_marked_and_counted"
COLUMNS, DUE = (
    _REPORT + "a_distribution_is_counted_again_in_rows_that_all_steps_share",
    _REPORT + "writing_it_takes_at_most_a_hundredth_of_the_time",
)
REPORT = {
    "trainer/runs/samples.py": [
        (
            "rollout.old_logprobs - rollout.ref_logprobs",
            "rollout.ref_logprobs - rollout.old_logprobs",
            "the sign of a response's KL",
            KEPT,
        ),
        ("torch.where(rollout.mask, ", "torch.where(rollout.mask | True, ", "padding counts as KL", KEPT),
        (".sum(1)[-count:]", ".sum(1)[:count]", "the KL of replayed responses", KEPT),
        (
            '"worst": lambda row: -row["parts"]["score"],',
            '"worst": lambda row: row["length"],',
            "the worst is another one",
            KEPT,
        ),
        ('row["limit"] >= AT_LIMIT', "True", "each step has one at the limit", PROCESSES),
        ('["parts"][name] / weight)', '["parts"][name])', "the limit forgets the weight", KEPT),
        (
            "for theirs in world.gather(mine) for",
            "for theirs in [mine] for",
            "answers of one process",
            _REPORT + "the_first_held_out_prompts_are_kept_by_number_over_processes",
        ),
        (
            "low, high = low - 0.5, low - 0.5 + bins * width",
            "high = low + bins * width",
            "lengths at an edge",
            COUNTED,
        ),
    ],
    "trainer/runs/report.py": [
        (
            "str(escape(text))",
            "str(text)",
            "HTML of a finding is obeyed",
            _REPORT + "a_flag_and_its_value_stay_together_and_texts_stay_escaped",
        ),
        (">= SHARE * self._seconds", ">= self._seconds", "it is written at every step", DUE),
        (
            "new, gone, word = new + d - c, gone + b - a,",
            "new, gone, word = new + b - a, gone + d - c,",
            "new and gone",
            MARKED,
        ),
        ("pieces += [(word, True)", "pieces += [(word, False)", "nothing is marked", MARKED),
        (
            '"worst": lambda row: row["parts"]["score"],',
            '"worst": lambda row: row["step"],',
            "the worst come first to last",
            _REPORT + "of_each_kind_the_most_outstanding_are_shown_once",
        ),
        (
            '"autoescape": True',
            '"autoescape": False',
            "the texts are HTML",
            _REPORT + "the_page_has_all_sections_plots_and_texts_and_no_script",
        ),
    ],
    "trainer/runs/report_plots.py": [
        ("below[0], below[-1] = 0, sum(counts)", "pass", "what lies far outside is left out", COLUMNS),
        (
            "np.searchsorted(np.cumsum(counts), counts.sum() / 2)",
            "np.argmax(counts)",
            "the mode as the median",
            COLUMNS,
        ),
        (
            "columns.append(counts / counts.sum())",
            "columns.append(counts)",
            "steps of more responses are stronger",
            COLUMNS,
        ),
    ],
}


def _rows():
    files = [("trainer/train_ppo.py", TRAIN_PPO), ("trainer/ppo.py", PPO)]
    for part in (CRITIC, COMPUTE, ELSEWHERE, SHOWN, HEALTH, REPORT):
        files += part.items()
    for file, rows in files:
        for old, new, fault, *tests in rows:
            yield Mutation(file, old, new, fault, tuple(tests) or (WHOLE_STEP,))


MUTATIONS = list(_rows())
