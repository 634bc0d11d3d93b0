"""What a step of PPO collects, before anything is learned from it."""

from dataclasses import dataclass

from trainer.compute.rollout_data import Rollout
from trainer.rewards.reward import RawScores


@dataclass
class Batch:
    """What a step samples: this process' prompts, their responses and scores."""

    prompts: list  # of Prompt
    rollout: Rollout
    texts: list  # of the responses
    raw: RawScores  # before they are normalised, clipped and weighed
    scores: dict  # {part of the reward: [B]}, "score" is their sum
    seconds: dict  # {phase: how long it took}
    again: int = 0  # responses that --filter_groups sampled again
