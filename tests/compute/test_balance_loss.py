"""``balance_loss`` of whole models, beside the formula by hand (tests/test_ppo.py)."""

import pytest
import torch
from tiny import tiny_llama

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.compute.batching import Layout
from trainer.compute.scoring import balance_loss, load_balance_loss, packed_states

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 12, "use_moe": True, "eos_token_id": 0}


def test_each_of_top_k_choices_counts():
    """Three experts of gates .5, .3, .2, two chosen: f = (1/2, 1/2, 0), 3 (.5 / 2 + .3 / 2) = 1.2. With one
    chosen it is 3 * .5."""
    gates = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert load_balance_loss((gates,), Layout([1]), 2).item() == pytest.approx(1.2)
    assert load_balance_loss((gates,), Layout([1]), 1).item() == pytest.approx(1.5)


@pytest.mark.parametrize("chosen", [1, 3])
def test_a_models_loss_has_the_weight_and_top_k_of_its_config(chosen):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig(**SIZES, router_aux_loss_coef=0.25, num_experts_per_tok=chosen)
    ).eval()
    output = packed_states(model.base_model, torch.tensor([[2, 3, 4, 5, 6]]), Layout([5]))
    gates = [x.softmax(-1) for x in output.router_logits]
    wanted = 0.0
    for gate in gates:
        choices = gate.argsort(-1, descending=True)[:, :chosen]
        share = torch.tensor([(choices == e).sum() / choices.numel() for e in range(4)])
        wanted += 4 * (share * gate.mean(0)).sum().item()
    assert balance_loss(model, output, Layout([5])).item() == pytest.approx(0.25 * wanted, rel=1e-5)
    assert wanted != pytest.approx(2.0, abs=1e-3)  # not perfectly balanced: shares matter


def test_its_gradient_lowers_the_gate_of_the_expert_that_is_chosen_too_often():
    logits = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], requires_grad=True)
    load_balance_loss((logits,), Layout([3]), 1).backward()
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 2] < 0).all()


def test_a_dense_model_has_none():
    assert balance_loss(tiny_llama(8), None, Layout([3])) == 0
