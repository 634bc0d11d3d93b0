"""The lists of mutations.py: faults that change no result, and a few that no rule makes or no formula has."""

import re

# {file: the lines as the fault leaves them}; above them: why no result changes
EQUIVALENT = {
    "trainer/ppo.py": """
        # float32 is the default
        rewards = torch.zeros(mask.shape, device=mask.device)
        # where all values are 0, only gamma * lambda counts; with lambda 1 the values cancel out
        return gae(rewards, torch.zeros_like(rewards), mask, 1.0, gamma)[1]
        return gae(rewards, torch.ones_like(rewards), mask, gamma, 1.0)[1]
        # only a number that stands exactly at the limit is concerned, where both sides are right
        return torch.where(differences.abs() <= ROUNDING * size, 0.0, differences)
        return (mean, 0.0 if std < ROUNDING * abs(mean) else std)
        outside = (limited <= 1 - low) | (limited > 1 + high)
        outside = (limited < 1 - low) | (limited >= 1 + high)
        clipped = (change.abs() >= limit).float() * (clipped_error > error)
        clipped = (change.abs() > limit).float() * (clipped_error >= error)
        # a square has no sign
        k2 = kl_estimators(mb.ref_logprobs, logprobs)[1]
        # the last sum adds nothing
        while n <= x.shape[1]:
        # only padding is concerned, which no sum takes in
        log_ratio = torch.where(mb.mask, logprobs - mb.old_logprobs, 1.0)
        # an advantage of 0 has no loss
        per_token = torch.where(advantages <= 0, torch.min(per_token, -dual * advantages), per_token)
    """,
    "trainer/generation/sampling.py": """
        # blocks of any size give the same sums
        BLOCK = 65
        # the dimension meant is of that size, or at that place
        probs = logits.softmax(1, dtype=torch.float32)
        # a guard against the last bit of a sum
        return (place, inside.clamp(0, 1 + 2 ** (-33)))
        return (place, inside.clamp(0, 2 - 2 ** (-33)))
        return (place, inside.clamp(0, 1 - 2 * -33))
        return (place, inside.clamp(0, 1 - 3 ** (-33)))
        return (place, inside.clamp(0, 1 - 2 ** (-34)))
    """,
}
EQUIVALENT = {
    file: [line.strip() for line in text.strip().splitlines() if line.strip()[0] != "#"]
    for file, text in EQUIVALENT.items()
}

# What a referee broke once without any test noticing: a file, its tests, and what becomes what
HAND_WRITTEN = """
trainer/compute/scoring.py tests/compute/test_scoring.py
    F.pad(part, (0, width - part.shape[-1])) -> F.pad(part, (width - part.shape[-1], 0))
trainer/rewards/reward_models.py tests/rewards/test_rewards.py
    x[-self.max_length :] -> x[: self.max_length]
    scores - self.offset -> scores + self.offset
trainer/models.py tests/rewards/test_rewards.py
    abs(x[1]) -> (x[1])
trainer/options/best.py tests/test_best.py
    fingerprint, args.eval_reward_fn, *args.eval_reward_model] -> fingerprint]
trainer/rewards/combine.py tests/rewards/test_rewards.py
    rules.answer_text(text) if self.reasoning else None -> rules.answer_text(text)
trainer/rewards/rules.py tests/rewards/test_rules.py
    len(response.strip()) -> len(response)
trainer/value_scale.py tests/test_value_scale.py
    , "last") -> )
trainer/inputs.py tests/test_inputs.py
    warmup_steps >= steps -> warmup_steps > steps
    args.dual_clip <= 1 -> args.dual_clip < 1
trainer/runs/optimizer_step.py tests/compute/test_batching.py
    run.progress.token_budget = budget -> pass
trainer/runs/learning_rate.py tests/runs/test_learning_rate.py
    LORA_FACTOR = 4 -> LORA_FACTOR = 1
trainer/generation/sampling.py tests/generation/test_sampling.py
    (sums, target, right=True) -> (sums, target)
trainer/compute/precision.py tests/model/test_lora.py
    in kinds and "lora_" not in name -> in kinds
dataset/lm_dataset.py tests/dataset/test_dataset.py
    self.ids(said, opening=False) -> self.ids(said)
"""


def table(text: str) -> dict[str, list[tuple[str, str, str]]]:
    """-> {file: [(right, wrong, test file)]}"""
    found = {}
    for part in re.split(r"\n(?=\S)", text.strip()):
        head, *lines = part.splitlines()
        file, test = head.split()
        found[file] = [(*line.strip().split(" -> "), test) for line in lines]
    return found


HAND_WRITTEN = table(HAND_WRITTEN)
