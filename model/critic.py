"""The critic: the backbone of a language model and a value head that gives one value at every position.

PPO reads the value of response token t (t = 0 is the first) at sequence position prompt_len + t - 1. There
the backbone has read the prompt and the response tokens before t, but not token t itself: it is the value of
the state in which token t is chosen. ``ValueScorer`` in trainer/compute/scoring.py does it: it takes the last
hidden states at these positions (``states_at``) and applies ``CriticModel.read`` to them.

Its first weights: ``--critic_init auto`` (the default) takes a ``--reward_model`` that is a classifier with
the policy's vocabulary, with its weight and sign, else the actor (``critic_start`` in
trainer/rewards/reward_models.py).
"""

import copy

import torch
from torch import nn

from model.half_precision import fp32_head, make_fp32
from model.loading import disable_dropout
from model.lora import frozen_copy


class CriticModel(nn.Module):
    """``values[b, p]`` estimates the return after ``tokens[b, : p + 1]`` have been written.

    ``backbone`` is the ``base_model`` of a transformers model. Its ``last_hidden_state`` has already gone
    through the final norm, so the head applies no norm. The head starts at zero: the first values are equal
    everywhere, and no random values get into the advantages. A critic that starts from a reward model
    takes over its score head instead, as in InstructGPT (Ouyang et al. 2022, arXiv:2203.02155, appendix C.4).
    ``scale``: what the head's output is multiplied by (trainer/options/value_scale.py).
    """

    scale = 1.0

    def __init__(self, backbone, hidden_size):
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def from_model(cls, model, share=False, weight=1.0, lend=False):
        """A trainable fp32 critic on a copy of ``model``'s backbone, on its device, with dropout off.

        ``model`` is a causal language model or a sequence classifier (a reward model) of transformers. Its
        results do not change. ``share=True`` is for LoRA: frozen weights of the backbone are shared, not
        copied, and become fp32 in both; nothing in the backbone trains until adapters are added.
        lend: as of ``frozen_copy``. ``weight``: of the reward model. The critic's first values are weight *
        (score - reward_offset).
        """
        if share:
            backbone = frozen_copy(model.base_model)
        else:
            base = model.base_model
            backbone = (frozen_copy(base, lend) if lend else copy.deepcopy(base)).requires_grad_(True)
        make_fp32(backbone)
        disable_dropout(backbone)
        # Not config.hidden_size: OPT-350m has projections between embeddings and layers, so the two widths
        # differ, and last_hidden_state has the width of the embeddings.
        width = backbone.get_input_embeddings().embedding_dim
        critic = cls(backbone, width)
        critic.value_head.to(model.device)
        score = dict(model.named_children()).get("score")  # the head of transformers' decoder classifiers
        if isinstance(score, nn.Linear) and score.weight.shape == critic.value_head.weight.shape:
            bias = torch.zeros(1) if score.bias is None else score.bias.detach()
            offset = model.config.to_dict().get("reward_offset", 0.0)
            critic.value_head.weight.data.copy_(weight * score.weight)
            critic.value_head.bias.data.copy_(weight * (bias - offset))
        return critic

    def forward(self, tokens):
        """``tokens`` [B, T], right-padded -> values [B, T] in fp32, autocast or not."""
        return self.read(self.backbone(tokens, use_cache=False).last_hidden_state)

    def read(self, hidden):
        """Final hidden states [..., hidden] -> values [...] in fp32."""
        return self.scale * fp32_head(self.value_head, hidden).squeeze(-1)

    @torch.no_grad()
    def rescale(self, scale):
        """Multiply the head's output by ``scale`` from now on, and divide the head by as much: all values
        stay."""
        for p in self.value_head.parameters():
            p.mul_(self.scale / scale)
        self.scale = scale

    @torch.no_grad()
    def map_values(self, slope: float, intercept: float) -> None:
        """Every value v becomes slope * v + intercept."""
        for p in self.value_head.parameters():
            p.mul_(slope)
        self.value_head.bias += intercept / self.scale
