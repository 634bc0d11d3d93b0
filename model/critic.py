"""The critic: the backbone of a language model and a value head that gives one value at every position.

PPO reads the value of response token t (t = 0 is the first) at sequence position prompt_len + t - 1. There
the backbone has read the prompt and the response tokens before t, but not token t itself: it is the value of
the state in which token t is chosen (``ValueScorer`` in trainer/compute/scoring.py).

Its first weights: ``--critic_init auto`` (the default) takes a ``--reward_model`` that is a classifier with
the policy's vocabulary, else the actor (``critic_start`` in trainer/models.py).
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.lora import frozen_copy
from model.weights import ScoreHead


class CriticModel(nn.Module):
    """The value at position p estimates the return after the tokens up to p have been written.

    ``last_hidden_state`` of ``backbone`` has gone through the final norm, so the head applies none. The head
    starts at zero (equal values everywhere), or at a reward model's score head, as in InstructGPT (Ouyang et
    al. 2022, arXiv:2203.02155, appendix C.4).
    """

    scale = 1.0  # what the head's output is multiplied by (``ValueScale``, trainer/advantages.py)

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = ScoreHead(hidden_size, 1)
        for p in self.value_head.parameters():
            nn.init.zeros_(p)

    @classmethod
    @torch.no_grad()
    def from_model(
        cls, model: PreTrainedModel, share: bool = False, weight: float = 1.0, lend: bool = False
    ) -> "CriticModel":
        """A trainable fp32 critic on a copy of ``model``'s backbone: of a causal LM or a reward model.

        share: for LoRA: frozen weights are shared, not copied, and become fp32 in both; nothing in the
        backbone trains until adapters are added. lend: as of ``frozen_copy``. weight: of the reward model;
        the critic's first values are weight * (score - reward_offset).
        """
        base = model.base_model
        backbone = frozen_copy(base, lend) if share or lend else copy.deepcopy(base)
        backbone.float().requires_grad_(not share)
        # Not config.hidden_size: OPT-350m has projections between embeddings and layers, so the two widths
        # differ, and last_hidden_state has the width of the embeddings.
        critic = cls(backbone, next(model.get_input_embeddings().parameters()).shape[1])
        head = critic.value_head.to(model.device)
        score = getattr(model, "score", None)  # the head of transformers' decoder classifiers
        if isinstance(score, nn.Linear):
            bias = 0.0 if score.bias is None else score.bias
            head.weight.copy_(weight * score.weight)
            head.bias.copy_(weight * (bias - getattr(model.config, "reward_offset", 0.0)))
        return critic

    def read(self, hidden: Tensor) -> Tensor:
        """Final hidden states [..., hidden] -> values [...] in fp32, autocast or not."""
        return self.scale * self.value_head(hidden).squeeze(-1)

    def rescale(self, scale: float) -> None:
        """Set the scale; the head is divided by its change, so all values stay."""
        self.map_values(self.scale / scale, 0.0)
        self.scale = scale

    @torch.no_grad()
    def map_values(self, slope: float, intercept: float) -> None:
        """Every value v becomes slope * v + intercept."""
        for p in self.value_head.parameters():
            p.mul_(slope)
        self.value_head.bias.add_(intercept / self.scale)
