"""The lists of mutations.py: faults that change no result, and a few that no rule makes or no formula has."""

EXACTLY = "only a number that stands exactly at the limit is concerned, where both sides are right"
PADDING = "only padding is concerned, which no sum takes in"
# {file: {why no result changes: [the line as the fault leaves it]}}
SAME_PLACE = "the dimension meant is of that size, or at that place"
EQUIVALENT: dict[str, dict[str, list[str]]] = {
    "trainer/compute/scoring.py": {
        SAME_PLACE: [
            "experts = logits.shape[1]",
            "gate = logits.float().softmax(1)",
            "chosen = torch.zeros_like(gate).scatter_(1, gate.topk(top_k, dim=-1).indices, 1.0)",
            "chosen = torch.zeros_like(gate).scatter_(-1, gate.topk(top_k).indices, 1.0)",
            "chosen = torch.zeros_like(gate).scatter_(-1, gate.topk(top_k, dim=1).indices, 1.0)",
        ],
        "any row will do where there is none left": ["rows = index or [1]"],
        "every tokens_per_forward is larger": [
            "def score_all(batch: Batch, scorer: Scorer, token_budget: int=1, **more: float) -> list[Tensor]:"
        ],
    },
    "trainer/train_ppo.py": {
        EXACTLY: ["stopped = 0 < args.target_kl <= total_kl / minibatch.tokens"],
        "whichever comes to the GPU first": [
            "with models.host.on_device(models.reference, models.old_actor):"
        ],
        "what trains no more has no step to note": ["pass  # break"],
        "a greatest common divisor of two has no order": [
            "spread = math.gcd(group_size, batch_size // mini_batch_size)"
        ],
        "a share of 1 is all tokens": ["if args.entropy_top <= 1:", "if args.entropy_top < 2:"],
    },
    "trainer/environments/observations.py": {
        "any mark that no text has": ["TURN = 3 * MARK"],
        "how much is tokenised at first, before all of it is": [
            "enough = 2 * max(room, 257)",
            "if len(ids) < enough and len(text) > CHARACTERS * enough:",
            "if len(ids) <= enough and len(text) >= CHARACTERS * enough:",
            "if len(ids) <= enough and len(text) > CHARACTERS / enough:",
        ],
    },
    "trainer/environments/tool_calls.py": {
        "behind the end of a text there is none": ["while place <= len(text):"],
    },
    "trainer/options/offline.py": {
        "for type checkers only": ["Logged = TypeVar('Logged', LoggedPairs, LoggedAnswers)"],
        "these are overwritten before anything reads them": [
            "logprobs = torch.ones(tokens.shape, device=device)"
        ],
    },
    "trainer/options/missing_eos.py": {
        EXACTLY: [
            "penalty = UNKNOWN if statistics.std <= LEAST_SPREAD else float(f'{statistics.std:.2g}')",
            "if statistics.std <= LEAST_SPREAD:",
        ]
    },
    "trainer/advantages.py": {
        "float32 is the default": ["rewards = torch.zeros(mask.shape, device=mask.device)"],
        EXACTLY: [
            "return torch.where(differences.abs() <= ROUNDING * size, 0.0, differences)",
            "return (mean, 0.0 if std < ROUNDING * abs(mean) else std)",
            "if not (has_signal and 0 < size < LARGEST):",
            "if not (total[1] < LARGEST and error[1] <= LARGEST):",
            "if not (total[1] <= LARGEST and error[1] < LARGEST):",
            "misleading = error_std ** 2 >= WORSE_THAN_MEAN * variance",
            "flat = spread ** 2 <= NEARLY_CONSTANT * variance",
        ],
        "the last sum adds nothing": ["while n <= x.shape[1]:"],
        "no mask takes in a response without a score": [
            "rest = torch.where(scores.isnan(), 1.0, scores).float()[:, None]"
        ],
        "the sums of no numbers are 0": ["count = count or -1.0"],
    },
    "trainer/losses.py": {
        EXACTLY: [
            "outside = (limited <= 1 - low) | (limited > 1 + high)",
            "outside = (limited < 1 - low) | (limited >= 1 + high)",
            "clipped = (change.abs() >= limit).float() * (clipped_error > error)",
            "clipped = (change.abs() > limit).float() * (clipped_error >= error)",
        ],
        "a square has no sign": ["_, k2, _ = kl_estimators(mb.ref_logprobs, logprobs)"],
        PADDING: [
            "log_ratio = torch.where(mb.action_mask, logprobs - mb.old_logprobs, 1.0)",
            "ratio = torch.where(mb.action_mask, logprobs.detach() - mb.old_logprobs, 1.0).exp()",
        ],
        "an advantage of 0 has no loss": [
            "per_token = torch.where(advantages <= 0, torch.min(per_token, -dual * advantages), per_token)"
        ],
    },
    "trainer/generation/sampling.py": {
        "blocks of any size give the same sums": ["BLOCK = 65"],
        "numbers and addresses reach C in registers of their own, in whatever order": [
            "kernels.over_rows('sample_tokens', logits, u.contiguous(), token, float(temperature), logprob)"
        ],
        SAME_PLACE: [
            "probs = logits.softmax(1, dtype=torch.float32)",
            "token = torch.where(u[:, None] < 0, logits.argmax(1, keepdim=True), token)",
            "return (x.double() * 2 ** 52).long().cumsum(1).double() / 2 ** 52",
        ],
        "a guard against the last bit of a sum": [
            "return (place, inside.clamp(0, 1 + 2 ** (-33)))",
            "return (place, inside.clamp(0, 2 - 2 ** (-33)))",
            "return (place, inside.clamp(0, 1 - 2 * -33))",
            "return (place, inside.clamp(0, 1 - 3 ** (-33)))",
            "return (place, inside.clamp(0, 1 - 2 ** (-34)))",
        ],
    },
}

SEVERAL = "tests/runs/test_several_answers.py"
EVALUATION = "tests/test_evaluation.py"
TURNS = "tests/environments/test_conversation.py"
WHOLE_TURNS = "tests/test_whole_step.py::test_three_steps_equal_a_recomputation_in_plain_torch[several turns]"
ALONE = "tests/rewards/test_rewards.py::test_each_response_of_a_batch_is_scored_as_if_it_were_alone"
# {file: [(right, wrong, test file)]}: what a referee broke once without any test noticing, such as rows that
# changed places.
HAND_WRITTEN = {
    "trainer/compute/scoring.py": [
        (
            "F.pad(x, (0, width - x.shape[1]))",
            "F.pad(x, (width - x.shape[1], 0))",
            "tests/compute/test_scoring.py",
        )
    ],
    "trainer/rewards/reward_models.py": [
        ("x[kept:][kept - self.max_length :]", "x[kept : self.max_length]", "tests/rewards/test_rewards.py"),
        ("scores - self.offset", "scores + self.offset", "tests/rewards/test_rewards.py"),
    ],
    "trainer/models.py": [("abs(x[1])", "x[1]", "tests/rewards/test_rewards.py")],
    "trainer/run.py": [
        ("{self.held_out.fingerprint} ", "", "tests/test_best.py"),
        (" {self.eval_reward_hash}", "", "tests/test_best.py"),
    ],
    "trainer/rewards/combine.py": [
        (
            "for _, text in exchanges] if self.reasoning else []",
            "for _, text in exchanges]",
            "tests/rewards/test_rewards.py",
        ),
        ("[[*blocks]] = x[count:]", "[[*blocks]] = x[count:].flip(0)", ALONE),
        ("[(exchanges[row][0], block)", "[(exchanges[0][0], block)", ALONE),
    ],
    "trainer/rewards/reward_function.py": [
        ("zip(items, responses, strict=True), 1", "zip(items, responses[::-1], strict=True), 1", ALONE)
    ],
    "trainer/rewards/reward_server.py": [
        (
            "[prompt.text for prompt in prompts]",
            "[prompt.text for prompt in prompts[::-1]]",
            "tests/rewards/test_reward_server.py",
        )
    ],
    "trainer/options/filter_groups.py": [
        ("batch.prompts[row] for row in rows", "batch.prompts[row] for row in rows[::-1]", SEVERAL),
        ("[positions[row] for row in rows]", "[positions[row] for row in rows[::-1]]", SEVERAL),
        ('return scores["score"] if', 'return scores["score"].flip(0) if', SEVERAL),
    ],
    "trainer/options/offline.py": [
        ("batch.prompts = list(answers)", "batch.prompts = answers[::-1]", "tests/test_offline.py")
    ],
    "trainer/evaluation.py": [
        ("(places, prompts, answers,", "(places, prompts[::-1], answers,", EVALUATION),
        ("right[i : i + count]", "right[i // count :: len(right) // count]", EVALUATION),
    ],
    "trainer/rewards/rules.py": [("len(response.strip())", "len(response)", "tests/rewards/test_rules.py")],
    "trainer/advantages.py": [(', "last")', ")", "tests/test_value_scale.py")],
    "trainer/inputs.py": [
        ("warmup_steps >= steps", "warmup_steps > steps", "tests/test_inputs.py"),
        ("args.dual_clip <= 1", "args.dual_clip < 1", "tests/test_inputs.py"),
        ("LORA_FACTOR = 4", "LORA_FACTOR = 1", "tests/test_inputs.py"),
    ],
    "trainer/runs/optimizer_step.py": [
        (
            "self.progress.token_budget = budget",
            "pass",
            "tests/runs/test_faults.py::test_a_minibatch_that_does_not_fit_is_done_again_with_less_and_said",
        )
    ],
    "trainer/generation/sampling.py": [
        ("(sums, target, right=True)", "(sums, target)", "tests/generation/test_sampling.py"),
        ("uint64)[:, None], np", "uint64)[::-1, None], np", "tests/generation/test_sampling.py"),
    ],
    "trainer/generation/stops.py": [
        (
            "mine = places[chunk]",
            "mine = places[: chunk.stop - chunk.start]",
            "tests/generation/test_stops.py::test_ids_are_forbidden_in_the_first_tokens_of_each_response",
        )
    ],
    "trainer/compute/precision.py": [
        ('in kinds and "lora_" not in name', "in kinds", "tests/model/test_lora.py")
    ],
    # Of several turns: others' faults, see tests/environments and docs/ppo.md.
    "trainer/environments/conversation.py": [
        ("self.is_action += [False] * len(ids)", "self.is_action += [True] * len(ids)", TURNS),
        (
            "self.is_action += [True] * len(ids)",
            "self.is_action += [True] * (len(ids) - 1) + [False]",  # the end of a turn is not learned
            TURNS,
        ),
        ("self.turn_ends.append(len(self.ids) - 1)", "self.turn_ends.append(len(self.ids))", TURNS),
        ("zip(talks, scores, strict=True)\n", "zip(talks, scores[::-1], strict=True)\n", TURNS),
    ],
    "trainer/rollout.py": [
        ("[len(conversation.ids) for conversation in going_on]", "[0 for _ in going_on]", WHOLE_TURNS),
        ("keys[rows],", "keys[: len(rows)],", TURNS),
        ("[greedy[i] for i in rows]", "greedy[: len(rows)]", TURNS),
    ],
    "trainer/compute/batch.py": [
        ("mask if self.is_action is None else mask & self.is_action", "mask", WHOLE_TURNS),
        (
            "if self.is_action is None:\n            return None",
            "if True:\n            return None",
            WHOLE_TURNS,
        ),
    ],
    "dataset/lm_dataset.py": [
        ("self.ids(reply, context)", "self.ids(reply)", "tests/dataset/test_dataset.py")
    ],
}
