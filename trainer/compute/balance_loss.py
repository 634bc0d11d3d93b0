"""The load-balancing loss of a mixture of experts (Fedus et al. 2021, arXiv:2101.03961, eq. 4)."""

import torch

from model.compatibility import is_moe


class BalanceLoss:
    """The load-balancing loss of a mixture of experts, times the weight in its config; 0 for other models.

    Call the backbone with the keyword arguments ``extra``, then this with the backbone's output and the
    lengths [B] -> the loss, a sum over sequences and layers.
    """

    def __init__(self, model):
        self.config = model.config
        self.weight = model.config.router_aux_loss_coef if is_moe(model) else 0.0
        self.extra = {"output_router_logits": True} if self.weight else {}

    def __call__(self, output, lengths):
        if not self.weight:
            return torch.zeros((), device=lengths.device)
        top_k = self.config.num_experts_per_tok
        return self.weight * load_balance_loss(output.router_logits, lengths, top_k)


def load_balance_loss(router_logits, lengths, top_k):
    """Mixture-of-experts load balancing, per sequence (arXiv:2101.03961, eq. 4), summed over B and layers.

    router_logits: one [N, E] for each layer, of the tokens of B sequences row by row; lengths [B] sum to N.
    For one sequence and layer it is E * sum_e f_e P_e, where f_e is the share of the sequence's choices that
    went to expert e, and P_e is the mean gate probability of e; it is 1 when balanced. It is computed per
    sequence, so that the cut into micro-batches does not change it.
    """
    total = torch.zeros((), device=lengths.device)
    rows = torch.arange(len(lengths), device=lengths.device)
    if router_logits:  # with its size given, a GPU is not asked for it
        row = torch.repeat_interleave(rows, lengths, output_size=len(router_logits[0]))
    for logits in router_logits:
        experts = logits.shape[-1]
        gate = logits.float().softmax(-1)
        chosen = torch.zeros_like(gate).scatter_(-1, gate.topk(top_k, dim=-1).indices, 1.0)
        per_sequence = torch.zeros(len(lengths), experts, device=lengths.device)
        share = per_sequence.index_add(0, row, chosen) / (lengths[:, None] * top_k)
        mean_gate = per_sequence.index_add(0, row, gate) / lengths[:, None]
        total = total + experts * (share * mean_gate).sum()
    return total
