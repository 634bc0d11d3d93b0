"""The critic: a language-model backbone and a head that reads one value at every position."""

import copy

import torch
from torch import nn

from model.loading import disable_dropout
from model.lora import frozen_copy


class CriticModel(nn.Module):
    """``values[b, t]`` estimates the return of the state in which ``tokens[b, : t + 1]`` has been written.

    ``backbone`` is the ``base_model`` of a transformers model, whose ``last_hidden_state`` has already gone
    through the final norm: the head reads it as it is. The head starts at zero, so that the first values are
    0 everywhere instead of noise for the advantages to inherit; a critic that starts from a reward model
    takes over its score head instead, as in InstructGPT (Ouyang et al. 2022, arXiv:2203.02155, appendix C.4).
    """

    def __init__(self, backbone, hidden_size):
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def from_model(cls, model, share=False):
        """A trainable fp32 critic on a copy of ``model``'s backbone, on its device, with dropout off.

        ``model`` is a causal language model or a sequence classifier (a reward model) of transformers; it is
        left as it was. ``share``: the weights of its backbone, frozen in both, are not copied; adapters are
        to train in their place.
        """
        if share:
            backbone = frozen_copy(model.base_model)
        else:
            backbone = copy.deepcopy(model.base_model).float().requires_grad_(True)
        disable_dropout(backbone)
        # The width of the embeddings and not config.hidden_size: with projections in between (OPT-350m) the
        # two differ, and last_hidden_state has the former.
        width = backbone.get_input_embeddings().embedding_dim
        critic = cls(backbone, width).to(model.device)
        score = dict(model.named_children()).get("score")  # the head of transformers' decoder classifiers
        if isinstance(score, nn.Linear) and score.weight.shape == critic.value_head.weight.shape:
            critic.value_head.weight.data.copy_(score.weight)
            critic.value_head.bias.data.fill_(-model.config.to_dict().get("reward_offset", 0.0))
        return critic

    def forward(self, tokens):
        """``tokens`` [B, T], right-padded -> values [B, T] in fp32, autocast or not."""
        return self.read(self.backbone(tokens, use_cache=False).last_hidden_state)

    def read(self, hidden):
        """Final hidden states [..., hidden] -> values [...] in fp32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)
