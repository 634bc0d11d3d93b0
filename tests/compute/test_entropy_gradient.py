"""The gradient of the entropy through the chunked head, for --entropy_coef."""

import pytest
import torch
from test_logprobs import functions, sizes

from trainer.compute.logprobs import token_logprobs

assert functions, sizes  # fixtures: a CPU's, torch's and a GPU's functions; chunks, kept or computed again


def gradients(head, states, targets, upstream, dtype=None):
    """Log-probs, entropies and the gradients of (log-probs, entropies) times ``upstream`` [2, N], by this
    project; dtype: of autocast."""
    states = states.clone().requires_grad_()
    head.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        found = token_logprobs(head, states, targets, 0.7, learn_entropy=True)
    (torch.stack(found) * upstream).sum().backward()
    return [*(x.detach() for x in found), states.grad, *(p.grad for p in head.parameters())]


def exact_gradients(head, states, targets, upstream):
    """The same by autograd over log_softmax, in fp64"""
    states = states.double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in head.parameters()]
    log_p = torch.log_softmax(torch.nn.functional.linear(states, *weights) / 0.7, -1)
    entropy = torch.where(log_p.isinf(), 0.0, -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0))).sum(-1)
    found = log_p.gather(1, targets[:, None]).squeeze(1), entropy
    inputs = [states, *weights]
    return [*found, *torch.autograd.grad((torch.stack(found) * upstream).sum(), inputs)]


def draw(spread=1.0, bias=True):
    """A head of 50 tokens whose logits vary by ``spread``, 33 states, targets, upstream gradients."""
    torch.manual_seed(0)
    head, states = torch.nn.Linear(16, 50, bias=bias), torch.randn(33, 16)
    with torch.no_grad():
        head.weight.mul_(spread)
    return head, states, torch.randint(50, (33,)), torch.randn(2, 33)


def same(ours, wanted, tolerance=1e-5):
    for one, other in zip(ours, wanted, strict=True):
        assert (one - other).abs().max() < tolerance * max(1.0, other.abs().max())


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_that_of_autograd(sizes, bias):
    drawn = draw(bias=bias)
    same(gradients(*drawn), exact_gradients(*drawn))


def test_where_nearly_all_probability_is_on_one_token(sizes):
    """Logits between -70 and 70: probabilities down to e^-100 and below."""
    drawn = draw(spread=40.0)
    same(gradients(*drawn), exact_gradients(*drawn), 3e-5)


def test_of_impossible_tokens_it_is_0(sizes):
    head, states, targets, upstream = draw()
    with torch.no_grad():
        head.bias[3:20] = -torch.inf
    targets %= 3
    ours, wanted = (f(head, states, targets, upstream) for f in (gradients, exact_gradients))
    same(ours, wanted)
    assert not ours[-1][3:20].any()


def test_in_half_precision_it_is_near(sizes):
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        drawn = draw()
        for ours, exact in zip(gradients(*drawn, dtype), exact_gradients(*drawn), strict=True):
            assert (ours - exact).norm() < tolerance * exact.norm()


def test_without_learn_entropy_there_is_none_and_the_rest_has_the_same_bits(sizes):
    """With it, and no weight on the entropy, the log-probs' gradient differs by rounding at most."""
    head, states, targets, upstream = draw()
    found = []
    for learn in (False, True):
        inputs = states.clone().requires_grad_()
        logprobs, entropy = token_logprobs(head, inputs, targets, 0.7, learn_entropy=learn)
        assert entropy.requires_grad == learn
        (logprobs * upstream[0]).sum().backward()
        found.append([logprobs.detach(), entropy.detach(), inputs.grad])
    assert all(a.equal(b) for a, b in zip(*[x[:2] for x in found], strict=True))
    same(found[1], found[0], 1e-6)


def test_without_a_gradient_nothing_is_kept():
    head, states, targets, _ = draw()
    with torch.no_grad():
        logprobs, entropy = token_logprobs(head, states, targets, 0.7, learn_entropy=True)
    assert not (logprobs.requires_grad or entropy.requires_grad)
