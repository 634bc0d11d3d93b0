"""The pure functions of PPO against numbers worked out by hand and closed forms."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trainer import advantages as adv
from trainer import losses, step_metrics
from trainer.compute.batch import Batch, length_mask
from trainer.options.filter_groups import rows_of_equal_groups
from trainer.runs.optimizer_step import TrainState

MASK = torch.tensor([[True, True, True], [True, False, False]])
CLIP = (0.2, 0.2)


def alone(total):
    return total


def test_padding_may_hold_anything():
    assert length_mask(torch.tensor([3, 1]), 3).equal(MASK)
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, float("nan"), float("inf")]])
    assert losses.masked_sum(x, MASK) == 10


def test_kl_estimators_by_hand_and_in_expectation():
    """p = 1/2, q = 1/4 at the sampled token: k1 = ln 2, k2 = ln^2(2) / 2, k3 = 1/2 - 1 + ln 2. Under p:
    E[k1] = E[k3] = KL(p || q), and k3 is never negative where k1 is."""
    found = losses.kl_estimators(torch.tensor(0.5).log(), torch.tensor(0.25).log())
    assert [k.item() for k in found] == pytest.approx([math.log(2), math.log(2) ** 2 / 2, math.log(2) - 0.5])
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    k1, _, k3 = losses.kl_estimators(p.log(), q.log())
    kl = (p * (p / q).log()).sum().item()
    assert [(p * k).sum().item() for k in (k1, k3)] == pytest.approx([kl, kl])
    assert (k1 < 0).any() and (k3 >= 0).all()


def gradient_of_expected(estimator):
    """d/d logits of sum_x stop_gradient(p(x)) k(x): the on-policy expectation of a KL loss' gradient."""
    logits, q = torch.tensor([0.5, -0.2, 0.1], requires_grad=True), torch.tensor([0.3, 0.3, 0.4])
    log_p = logits.log_softmax(-1)
    k = losses.kl_estimators(log_p, q.log())[estimator]
    (log_p.exp().detach() * k).sum().backward()
    return logits.grad


def test_the_gradients_of_k1_k2_k3():
    """Zero for k1, that of KL(p || q) for k2, that of KL(q || p) for k3 (why k2 is the loss)."""
    q = torch.tensor([0.3, 0.3, 0.4])
    logits = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    p = logits.softmax(-1)
    (reverse,) = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((q * (q / p).log()).sum(), logits)
    assert gradient_of_expected(0).abs().max() < 1e-7
    assert torch.allclose(gradient_of_expected(1), reverse, atol=1e-7)
    assert torch.allclose(gradient_of_expected(2), forward, atol=1e-7)
    assert not torch.allclose(reverse, forward, atol=1e-2)


def test_the_score_lands_on_the_last_token_and_the_kl_penalty_on_every_one_but_padding():
    """Steps keep their places: 1 and 2 in the first response, 4 in the second; the rest lands last."""
    scores, lengths = torch.tensor([5.0, -1.0]), torch.tensor([3, 1])
    assert adv.token_rewards(scores, lengths, MASK).tolist() == [[0, 0, 5], [-1, 0, 0]]
    penalty = torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0]])
    rewards = adv.token_rewards(scores, lengths, MASK, penalty)
    assert rewards.tolist() == [pytest.approx([-0.1, -0.2, 4.7]), pytest.approx([-1.4, 0, 0])]
    steps = torch.tensor([[1.0, 0.0, 2.0], [4.0, 0.0, 0.0]])
    assert adv.token_rewards(scores, lengths, MASK, steps=steps).tolist() == [[1, 0, 4], [-1, 0, 0]]
    both = adv.token_rewards(scores, lengths, MASK, penalty, steps)
    assert both[0].tolist() == pytest.approx([0.9, -0.2, 3.7])


def test_gae_by_hand_and_with_lambda_one_return_minus_value():
    """gamma 0.5, lambda 0.5. Row 0: deltas 1 + .5*4 - 2 = 1, 0 + .5*8 - 4 = 0, 2 - 8 = -6;
    A2 = -6, A1 = 0 + .25 * -6 = -1.5, A0 = 1 + .25 * -1.5 = 0.625. Row 1: one token, 3 - 1 = 2."""
    rewards = torch.tensor([[1.0, 0.0, 2.0], [3.0, 9.0, float("nan")]])  # padding may hold anything
    values = torch.tensor([[2.0, 4.0, 8.0], [1.0, 77.0, float("nan")]])
    advantages, returns = adv.gae(rewards, values, MASK, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.625, -1.5, -6.0], [2.0, 0.0, 0.0]]
    assert returns.tolist() == [[2.625, 2.5, 2.0], [3.0, 0.0, 0.0]]
    _, returns = adv.gae(rewards, values, MASK, gamma=1.0, lam=1.0)
    assert returns.tolist() == [[3, 2, 2], [3, 0, 0]]  # the rewards to go
    assert adv.gae(rewards[:, :1], values[:, :1], MASK[:, :1], 0.5, 0.5)[0].tolist() == [[-1], [2]]


def test_gae_goes_from_one_sampled_token_to_the_next_over_observations():
    """The rows of the test above with observations (rewards and values of which must not matter) between
    their tokens: the same numbers at the same tokens, 0 at observations."""
    junk = float("nan")
    places = [[0, 3, 5], [1]]
    mask = torch.zeros(2, 7, dtype=torch.bool)
    rewards, values = torch.full((2, 2, 7), junk)
    for row, columns in enumerate(places):
        mask[row, columns] = True
        rewards[row, columns] = torch.tensor([[1.0, 0.0, 2.0], [3.0]][row])
        values[row, columns] = torch.tensor([[2.0, 4.0, 8.0], [1.0]][row])
    batch = several_turns(mask, [6, 2])
    advantages, returns = adv.gae(rewards, values, mask, 0.5, 0.5, batch.action_order)
    assert advantages.tolist() == [[0.625, 0, 0, -1.5, 0, -6, 0], [0, 2, 0, 0, 0, 0, 0]]
    assert returns.tolist() == [[2.625, 0, 0, 2.5, 0, 2, 0], [0, 3, 0, 0, 0, 0, 0]]
    rewards = torch.where(mask, rewards, 0.0)
    sums = adv.discounted_sums(rewards, 0.5, batch.action_order)  # 1 + .25 * 2, .5 * 2, 2
    assert sums.tolist() == [[1.5, 0, 0, 1, 0, 2, 0], [0, 3, 0, 0, 0, 0, 0]]
    assert adv.discounted_sums(rewards, 0.5).tolist() != sums.tolist()


def several_turns(is_action, response_len):
    """A batch with observations; the prompts are one token each."""
    counts = torch.tensor(response_len)
    return Batch(
        tokens=torch.arange(is_action.numel() + len(counts)).view(len(counts), -1),
        prompt_len=torch.ones_like(counts),
        response_len=counts,
        finished=counts > 0,
        sampler_logprobs=torch.zeros(is_action.shape),
        is_action=is_action,
    )


def test_observations_are_no_actions():
    """Two turns with an observation of two tokens, and one turn; padding is no action either."""
    mask = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    batch = several_turns(mask, [5, 3])
    assert batch.action_mask.equal(mask)
    assert batch.lengths.tolist() == [3, 3]
    assert batch.responses() == [[1, 2, 3, 4, 5], [7, 8, 9]]
    assert batch.sampled() == [[1, 2, 5], [7, 8, 9]]
    assert batch.last_turns() == [4, 0]
    batch.scores = torch.tensor([1.0, math.nan])  # nothing is learned from the second
    assert batch.action_mask.tolist() == [mask[0].tolist(), [False] * 5]
    part = batch.rows([1])
    assert (part.lengths.tolist(), part.last_turns(), part.sampled()) == ([3], [0], [[7, 8, 9]])
    whole = replace(batch, is_action=None, scores=None)
    assert (whole.lengths.tolist(), whole.last_turns(), whole.action_order) == ([5, 3], [0, 0], None)


REWARDS = torch.tensor([[1.0, 0.0, 2.0], [5.0, 9.0, math.nan], [1.0, 1.0, 1.0], [0.0, 0.0, 7.0]])
FOUR = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [True, True, True]])


def test_estimators_without_a_critic_by_hand():
    """Rewards 3, 5 and 2, 7 of two answers to each of two prompts: each less the other. As four answers to
    one prompt: 3 - 14/3, 5 - 12/3, 2 - 15/3, 7 - 10/3. The std of 3 and 5 as a sample is sqrt(2)."""
    two, four = (adv.leave_one_out(REWARDS, FOUR, count) for count in (2, 4))
    assert two.tolist() == [[-2, -2, -2], [2, 0, 0], [-5, -5, 0], [5, 5, 5]]
    assert four[:, 0].tolist() == pytest.approx([-5 / 3, 1, -3, 11 / 3])
    advantages, stds = adv.group_normalized(REWARDS, FOUR, 2)
    assert stds[:, 2].tolist() == pytest.approx([2**0.5, 2**0.5, 12.5**0.5, 12.5**0.5])
    assert advantages[:2].tolist() == [pytest.approx([-(0.5**0.5)] * 3), pytest.approx([0.5**0.5, 0, 0])]
    for size in (1.0, 1e-5, 1e5):  # it has no unit
        rewards = size * torch.tensor([[0.0], [1.0], [2.0], [1.0]])
        advantages, _ = adv.group_normalized(rewards, torch.ones(4, 1, dtype=torch.bool), 4)
        assert advantages[:, 0].tolist() == pytest.approx([-(1.5**0.5), 0, 1.5**0.5, 0], abs=1e-6)


def test_the_root_mean_square_is_of_all_processes():
    """Squares 9 + 1 + 0 here and 16 + 4 + 0 there, over six tokens: sqrt(5)."""
    x = torch.tensor([[3.0, 1.0, 0.0, math.inf]])
    mask = torch.tensor([[True, True, True, False]])
    there = torch.tensor([6.0, 20.0, 3.0]).double()
    assert adv.root_mean_square(x, mask, lambda t: t + there) == pytest.approx(5**0.5)
    assert adv.root_mean_square(x, mask & False, alone) == 0
    assert adv.root_mean_square(x, x == 3, alone) == 3


def test_which_prompts_have_answers_that_score_differently():
    """A millionth of the score is rounding."""
    scores = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 1e6, 1e6 + 0.5, 1e6, 1e6, 1e6 + 2, 1e6])
    wanted = [True] * 3 + [False] * 3 + [False] * 3 + [True] * 3
    assert adv.scored_apart(scores, 3).tolist() == wanted


def test_centred_by_hand_over_processes_and_zeros_where_there_is_only_rounding():
    """1 and 3 here, 5 and 7 there: mean 4, std sqrt(5)."""
    mask = torch.tensor([[True, True, False]])
    there = torch.tensor([12.0, 74.0, 2.0]).double()
    x, std = adv.centred(torch.tensor([[1.0, 3.0, math.nan]]), mask, lambda t: t + there)
    assert x[mask].tolist() == [-3, -1]
    assert std == pytest.approx(5**0.5)
    for size in (1.0, 1e-5, 1e5):
        x, std = adv.centred(torch.tensor([[size, -size, math.nan]]), mask, alone)
        assert x[mask].tolist() == pytest.approx([size, -size])
        assert std == pytest.approx(size)
    x, std = adv.centred(torch.tensor([[2.31, 2.31, math.nan]]), mask, alone)
    assert (x.tolist(), std) == ([[0, 0, 0]], 0)


def test_regression_by_hand_over_processes():
    """x 10, 30 here and 50, 30 there; y 1, 1 and 5, 1: covariance 20, variance 200, so 0.1 x - 1."""
    mask = torch.tensor([[True, True, False]])
    x, y = torch.tensor([[10.0, 30.0, math.nan]]), torch.tensor([[1.0, 1.0, math.nan]])
    there = iter([[80.0, 3400.0, 2.0], [6.0, 26.0, 2.0], 20.0 * 3 + 0.0 * -1])
    line = adv.regression(x, y, mask, lambda t: t + torch.tensor(next(there)).double())
    assert line == (pytest.approx(0.1), pytest.approx(-1))
    for x, y, slope, intercept in (
        ([1.0, 3.0], [7.0, 2.0], 0, 4.5),  # never a slope below 0
        ([0.3, 0.3], [7.0, 2.0], 0, 4.5),
        ([1.0, 3.0], [0.3, 0.3], 0, 0.3),
        ([0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 2.0, 4.0], 1.2, 0.2),  # covariance 6/4, variance 5/4
    ):
        found = adv.regression(torch.tensor([x]), torch.tensor([y]), torch.ones(1, len(x)) > 0, alone)
        assert found == (pytest.approx(slope), pytest.approx(intercept))


@pytest.mark.parametrize("estimator", [adv.leave_one_out, lambda *rows: adv.group_normalized(*rows)[0]])
def test_equal_rewards_have_no_advantage_whatever_the_rounding(estimator):
    """Seven answers of 1000.1: their sum in fp32 is not seven times that. A difference of 0.01 counts."""
    rewards, mask = torch.full((7, 1), 1000.1), torch.ones(7, 1, dtype=torch.bool)
    assert estimator(rewards, mask, 7).tolist() == [[0]] * 7
    rewards[3] += 0.01
    assert estimator(rewards, mask, 7)[3] > 0


def rows(advantages, mask=None, old_logprobs=None, **fields):
    every = torch.ones_like(advantages)
    mask = every > 0 if mask is None else mask
    return SimpleNamespace(
        advantages=advantages,
        action_mask=mask,
        action_order=None,
        old_logprobs=0 * every if old_logprobs is None else old_logprobs,
        **({"importance_weights": every, "loss_mask": mask} | fields),
    )


@pytest.mark.parametrize(
    ("ratio", "advantages", "limits", "loss", "grad", "outside"),
    [
        # A = 1: min(1.5, 1.2) + min(0.5, 0.8); A = -1: min(-1.5, -1.2) + min(-0.5, -0.8)
        ([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0], CLIP, -1.7 + 2.3, [0.0, -0.5, 1.5, 0.0], 4),
        ([1.0, 1.0], [0.3, -0.7], CLIP, 0.4, [-0.3, 0.7], 0),  # the policy gradient
        ([1.4, 1.6, 0.7], [1.0, 1.0, -1.0], (0.2, 0.5), -1.4 - 1.5 + 0.8, [-1.4, 0.0, 0.0], 2),
        ([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], (*CLIP, 0.0), 5 + 2 - 1.2, [5.0, 2.0, 0.0], 3),
        ([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], (*CLIP, 3.0), 3 + 2 - 1.2, [0.0, 2.0, 0.0], 3),  # dual clip
        ([5.0, 1.1, 0.9], [-0.5, 0.5, 0.0], (*CLIP, 3.0), 3 * 0.5 - 0.55, [0.0, -0.55, 0.0], 1),
    ],
)
def test_policy_loss_by_hand(ratio, advantages, limits, loss, grad, outside):
    """The gradient is -A * ratio where the surrogate is not clipped. Behind the tokens there is padding."""
    logprobs = torch.tensor([[*ratio, 99.0]]).log().requires_grad_()
    mask = torch.arange(len(ratio) + 1)[None] < len(ratio)
    found, metrics = losses.policy_loss(logprobs, rows(torch.tensor([[*advantages, 7.0]]), mask), *limits)
    found.backward()
    assert (found.item(), metrics["policy/loss"].item()) == pytest.approx((loss, loss))
    assert logprobs.grad.tolist() == [pytest.approx([*grad, 0.0])]
    assert metrics["policy/clip_fraction"] == outside
    assert metrics["policy/ratio"].item() == pytest.approx(sum(ratio))
    k3 = sum(r - 1 - math.log(r) for r in ratio)
    assert metrics["policy/approx_kl"].item() == pytest.approx(k3, abs=1e-6)


def moved(*ratios):
    """A row of tokens of such ratios, padding where there is none -> (log-probs to learn, mask)."""
    width = max(map(len, ratios))
    rows = torch.tensor([[*row, *[99.0] * (width - len(row))] for row in ratios])
    return rows.log().requires_grad_(), length_mask(torch.tensor([len(row) for row in ratios]), width)


def test_cispo_by_hand_no_token_loses_its_gradient():
    """Weights 5 (of 6), 0.5, 1.5 and, with a lower clip too, 0.8 (of 0.5) and 1.2 (of 1.5); the gradient is
    -weight * A. The loss has log pi, which here is the log of the ratio."""
    for ratio, limits, weights, outside in (
        ([6.0, 0.5, 1.5], (1.0, 4.0), [5.0, 0.5, 1.5], 1),
        ([0.5, 1.1, 1.5], CLIP, [0.8, 1.1, 1.2], 2),
    ):
        logprobs, mask = moved(ratio, [3.0])
        advantages = torch.tensor([[1.0, 2.0, -1.0], [0.0, 7.0, 7.0]])
        loss, metrics = losses.policy_loss(logprobs, rows(advantages, mask), *limits, kind="cispo")
        loss.backward()
        wanted = [-w * a for w, a in zip(weights, (1, 2, -1), strict=True)]
        assert logprobs.grad.tolist() == [pytest.approx(wanted), [0, 0, 0]]
        assert loss.item() == pytest.approx(sum(g * math.log(r) for g, r in zip(wanted, ratio, strict=True)))
        assert metrics["policy/clip_fraction"] == outside + (limits == CLIP)
        assert metrics["policy/ratio"].item() == pytest.approx(sum(ratio) + 3)


def test_gspo_by_hand_every_token_has_the_ratio_of_its_response():
    """Ratios 1.5 and 0.5: sqrt(0.75) for both. 4 and 0.36: 1.2, outside of 0.1: the clip stops the token with
    A = 2, and not that with A = -1. 0.5 alone: outside of 0.2 below."""
    root = 0.75**0.5
    logprobs, mask = moved([1.5, 0.5], [4.0, 0.36], [0.5])
    advantages = torch.tensor([[2.0, -1.0], [2.0, -1.0], [3.0, 7.0]])
    mb = rows(advantages, mask)
    loss, metrics = losses.policy_loss(logprobs, mb, 0.2, 0.1, kind="gspo")
    loss.backward()
    wanted = [[-2 * root, root], [0, 1.2], [-1.5, 0]]
    assert logprobs.grad.tolist() == [pytest.approx(row, abs=1e-6) for row in wanted]
    assert loss.item() == pytest.approx(-root - 2 * 1.1 + 1.2 - 1.5)
    assert metrics["policy/clip_fraction"] == 3
    assert metrics["policy/ratio"].item() == pytest.approx(1.5 + 0.5 + 4 + 0.36 + 0.5)  # of tokens
    assert losses.policy_loss(logprobs, mb, 0.2, 0.1, 1.1, kind="gspo")[0].item() == pytest.approx(
        -root - 2 * 1.1 + 1.1 - 1.5
    )  # dual clip


def test_gspo_with_one_advantage_a_response_has_the_gradient_of_the_papers_sequence_loss():
    torch.manual_seed(0)
    logprobs = (0.3 * torch.randn(3, 3)).requires_grad_()
    advantages, mask = torch.tensor([[1.0], [-2.0], [0.5]]), length_mask(torch.tensor([3, 2, 1]), 3)
    mine, _ = losses.policy_loss(logprobs, rows(advantages.expand(3, 3), mask), *CLIP, kind="gspo")
    count = mask.sum(1, keepdim=True)
    s = ((logprobs * mask).sum(1, keepdim=True) / count).exp()
    theirs = -(count * torch.min(s * advantages, s.clamp(0.8, 1.2) * advantages)).sum()
    assert mine.item() == pytest.approx(theirs.item())
    (one,), (other,) = (torch.autograd.grad(loss, logprobs, retain_graph=True) for loss in (mine, theirs))
    assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "cispo", "gspo"])
def test_every_loss_begins_as_the_policy_gradient_and_has_the_same_kl(kind):
    """Before the first update the gradient is -A. The KL has the tokens' own ratios, which nothing clips."""
    advantages = torch.tensor([[0.3, -0.7, 1.0]])
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    mb = rows(advantages, old_logprobs=logprobs.detach(), loss_mask=torch.tensor([[True, True, False]]))
    loss, metrics = losses.policy_loss(logprobs, mb, 3e-4, 4e-4, kind=kind)
    loss.backward()
    assert logprobs.grad.tolist() == [pytest.approx([-0.3, 0.7, 0.0])]
    assert (metrics["policy/clip_fraction"], metrics["policy/approx_kl"]) == (0, 0)
    logprobs, _ = moved([1.5, 0.5])
    mb = rows(torch.zeros(1, 2), ref_logprobs=torch.tensor([[-1.0, 0.0]]))
    (
        losses.policy_loss(logprobs, mb, 3e-4, 4e-4, kind=kind)[0] + 0.5 * losses.kl_loss(logprobs, mb)
    ).backward()
    wanted = [0.5 * 1.5 * (math.log(1.5) + 1), 0.5 * 0.5 * math.log(0.5)]
    assert logprobs.grad.tolist() == [pytest.approx(wanted)]


def test_cut_answers_stay_out_of_the_policy_loss_and_in_the_number_of_tokens():
    """The second of three answers was cut. All cut: a loss and gradients of 0."""
    finished = torch.tensor([True, False, True])
    mask = length_mask(torch.tensor([2, 3, 1]), 3)
    mb = rows(torch.ones(3, 3), mask)
    of_entropy_top = torch.tensor([[False, True, False], [True, True, True], [True, False, False]])
    mb.loss_mask = of_entropy_top & finished[:, None]
    logprobs = torch.zeros(3, 3, requires_grad=True)
    loss, metrics = losses.policy_loss(logprobs, mb, *CLIP)
    loss.backward()
    assert (loss.item(), metrics["policy/ratio"].item()) == (-2, 6)  # the metrics are of all tokens
    assert logprobs.grad.tolist() == [[0, -1, 0], [0, 0, 0], [-1, 0, 0]]
    mb.loss_mask = torch.zeros(3, 3, dtype=torch.bool)
    logprobs.grad = None
    loss, _ = losses.policy_loss(logprobs, mb, *CLIP)
    loss.backward()
    assert loss.item() == 0 and not logprobs.grad.any()


def test_importance_weights_by_hand():
    """pi_old / pi_sampler = 1.5, 0.5 and 8, cut at 2; 1 on padding and where the cap is 0."""
    old, mask = torch.tensor([[1.5, 0.5, 8.0, 7.0]]).log(), torch.tensor([[True, True, True, False]])
    weights = losses.importance_weights(old, torch.zeros(1, 4), mask, 2.0)
    assert weights.tolist() == [pytest.approx([1.5, 0.5, 2.0, 1.0])]
    assert losses.importance_weights(old, torch.zeros(1, 4), mask, 0.0).tolist() == [[1.0] * 4]
    old, sampler = torch.tensor([[0.6, 0.5]]).log(), torch.tensor([[0.4, 1.0]]).log()
    assert losses.importance_weights(old, sampler, mask[:, :2], 2.0).tolist() == [pytest.approx([1.5, 0.5])]


def test_effective_sample_size_by_hand():
    """w = 1.5, 0.5 and 8, not cut: 10^2 / (3 * (2.25 + 0.25 + 64)). Equal weights: 1. A single one: 1/n."""
    mask = torch.tensor([[True, True, True, False]])

    def of(*weights):
        sampler = torch.tensor([[-0.5, -1.0, -2.0, -4.0]])
        logprobs = sampler + torch.tensor([weights], dtype=torch.float64).log().float()
        return step_metrics.effective_sample_size(logprobs, sampler, mask, alone)

    assert of(1.5, 0.5, 8.0, math.nan) == pytest.approx(100 / 199.5)
    assert of(1.0, 1.0, 1.0, 9.0) == pytest.approx(1)
    assert of(0.2, 0.2, 0.2, 9.0) == pytest.approx(1)
    assert of(1e60, 1e-60, 1e-60, 9.0) == pytest.approx(1 / 3)
    assert math.isnan(of(math.inf, 1.0, 1.0, 9.0))
    other = adv.moments(torch.tensor([[8.0]]), torch.tensor([[True]]))  # what another process has
    mine, there = torch.tensor([[1.5, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
    both = step_metrics.effective_sample_size(mine, torch.zeros(1, 2), there, lambda x: x + other)
    assert both == pytest.approx(100 / 199.5)


def test_importance_weights_multiply_every_tokens_loss_and_kl():
    logprobs, ref = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True), torch.tensor([[-1.5, -1.0, -1.0]])
    mb = rows(old_logprobs=logprobs.detach(), ref_logprobs=ref, advantages=torch.tensor([[0.3, -0.7, 1.0]]))
    mb.importance_weights = torch.tensor([[2.0, 0.5, 1.0]])
    (losses.policy_loss(logprobs, mb, *CLIP)[0] + 0.1 * losses.kl_loss(logprobs, mb)).backward()
    # ratio 1: -weight * A of the policy loss, weight * 0.1 * (log p - log ref) of the KL
    expected = [2 * (-0.3 + 0.1 * 0.5), 0.5 * (0.7 - 0.1 * 1.0), -1.0 + 0.1 * 0.5]
    assert logprobs.grad.tolist() == [pytest.approx(expected)]


def test_the_gradient_of_the_kl_loss_is_that_of_the_present_policy_after_updates_too():
    """Tokens of the old policy, whose expectation is taken exactly: with the ratio the gradient is that of
    KL(p || ref) of the present policy p, without it another one."""
    old, ref = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.3, 0.3, 0.4]])
    logits = torch.tensor([[0.5, -0.2, 0.1]], requires_grad=True)
    logprobs = logits.log_softmax(-1)
    fields = {"old_logprobs": old.log(), "ref_logprobs": ref.log(), "advantages": torch.zeros(1, 3)}
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref.log())).sum(), logits, retain_graph=True)
    # p = old * ratio: what each token is drawn with (old) stands in the place of the importance weight
    mb = rows(**fields, importance_weights=old)
    (found,) = torch.autograd.grad(losses.kl_loss(logprobs, mb), logits, retain_graph=True)
    (unweighted,) = torch.autograd.grad((old * 0.5 * (logprobs - ref.log()).square()).sum(), logits)
    assert torch.allclose(found, true, atol=1e-6)
    assert not torch.allclose(unweighted, true, atol=1e-2)


def test_discounted_sums_by_hand():
    x = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    assert adv.discounted_sums(x, 0.5).tolist() == [[3, 4, 4], [3, 0, 0]]
    assert adv.discounted_sums(x, 1.0).tolist() == [[7, 6, 4], [3, 0, 0]]
    assert adv.discounted_sums(x, 0.0).tolist() == x.tolist()
    longer = torch.rand(3, 37)
    by_one = [sum(0.9**n * longer[:, t + n] for n in range(37 - t)) for t in range(37)]
    assert torch.allclose(adv.discounted_sums(longer, 0.9), torch.stack(by_one, 1), atol=1e-5)


def test_the_kl_in_the_reward_follows_the_actor():
    """Two tokens, advantages 0 when the batch began. The actor has since made them more likely by 0.1 and 0.2
    nats: with weight 0.5 and decay 0.5 the advantages are now -0.5 * (0.1 + 0.5 * 0.2) and -0.5 * 0.2. Where
    no decay is given, later tokens count in full."""
    old = torch.tensor([[-1.0, -2.0, 9.0]])
    mb = rows(torch.zeros(1, 3), torch.tensor([[True, True, False]]), old)
    for decay, first in (({"decay": 0.5}, 0.1), ({}, 0.15)):
        logprobs = (old + torch.tensor([[0.1, 0.2, 5.0]])).requires_grad_()
        losses.policy_loss(logprobs, mb, 1.0, 1.0, kl_in_reward=0.5, **decay)[0].backward()
        expected = [first * math.exp(0.1), 0.1 * math.exp(0.2), 0.0]  # -advantage * ratio
        assert logprobs.grad.tolist() == [pytest.approx(expected)]


def test_value_loss_by_hand_and_in_units_of_the_scale():
    """V 3, old 1, range .5 -> clipped 1.5; G 2: max(1, .25) = 1. V 1.2, old 1, G 2: clip leaves it: .64.
    V 3, old 1, G 4: max(1, 6.25) = 6.25. Half the sum."""
    values, old = torch.tensor([[3.0, 1.2, 3.0, 9.0]]), torch.ones(1, 4)
    returns, mask = torch.tensor([[2.0, 2.0, 4.0, 0.0]]), torch.tensor([[True, True, True, False]])
    loss, metrics = losses.value_loss(values, old, returns, mask, cliprange=0.5, scale=1.0)
    assert loss.item() == pytest.approx(0.5 * (1 + 0.64 + 6.25))
    assert metrics["value/clip_fraction"] == 1
    without, metrics = losses.value_loss(values, old, returns, mask, cliprange=0.0, scale=1.0)
    assert without.item() == pytest.approx(0.5 * (1 + 0.64 + 1))
    assert metrics["value/clip_fraction"] == 0
    # From 1 to 3 is a quarter of the scale, half of the clip; the error is 1 / 8
    one = torch.ones(1, 1)
    loss, metrics = losses.value_loss(3 * one, one, 2 * one, one.bool(), cliprange=0.5, scale=8.0)
    assert loss.item() == metrics["value/loss"] == 0.5 / 64
    assert metrics["value/clip_fraction"] == 0
    # From 1 to 9 is all of it, twice the clip; errors 11 / 8 and, clipped, 15 / 8
    loss, metrics = losses.value_loss(9 * one, one, 20 * one, one.bool(), cliprange=0.5, scale=8.0)
    assert (loss.item(), metrics["value/clip_fraction"]) == (0.5 * 225 / 64, 1)


def test_what_a_critic_explains_by_hand():
    """Values of the wrong sign: 1 - 4; half as large: 1 - 1/4; too low by 1: all; others: errors -2, 0, 2."""
    mask = torch.tensor([[True, False], [True, True]])
    scores = torch.tensor([-1.0, 0.5])
    outcome = adv.discounted_sums(adv.token_rewards(scores, mask.sum(1), mask), 2.0)
    assert outcome.tolist() == [[-1, 0], [1, 0.5]]
    outcome = torch.tensor([[-1.0, math.nan], [1.0, 0.0]])

    def explained(values):
        return step_metrics.explained_variance(outcome, values, mask, alone)

    values = [-outcome, outcome / 2, outcome - 1, torch.tensor([[1.0, 7.0], [1.0, -2.0]])]
    assert [explained(x) for x in values] == pytest.approx([-3, 0.75, 1, -3])
    equal = torch.full((2, 2), 0.3)  # there is nothing to explain
    assert math.isnan(step_metrics.explained_variance(equal, equal + 0.01, mask, alone))


def test_learning_rates_by_hand():
    """A model that begins with the fourth of the run's optimizer steps: up in equal parts, then a cosine to a
    tenth in exactly the steps given; a constant rate does not depend on the length of the run."""

    def rates(total, warmup=0, schedule="cosine", count=None):
        train_state = TrainState(None, None, 2.0, total + 3, 1, 3, warmup, schedule)
        return [train_state.learning_rate(3 + step) for step in range(count or total)]

    falling = rates(11)
    assert [falling[0], falling[5], falling[10]] == pytest.approx([2.0, 1.1, 0.2])
    assert falling == sorted(falling, reverse=True)
    assert rates(1) == [2.0]
    assert rates(14, warmup=3) == [0.5, 1.0, 1.5, *falling]
    constant = rates(14, 3, "constant")
    assert constant == [0.5, 1.0, 1.5, *[2.0] * 11] == rates(10**6, 3, "constant", count=14)


def test_rounding_is_judged_by_the_largest_number_of_the_own_row():
    found = adv.without_rounding(
        torch.tensor([[1e-4, 1.0], [1e-4, 1e-4]]), torch.tensor([[1.0, 1e3], [1.0, 1.0]])
    )
    assert found.tolist() == torch.tensor([[0.0, 1.0], [1e-4, 1e-4]]).tolist()


ENTROPY = torch.tensor([[0.5, 0.1, 0.3], [0.2, 9.0, math.inf]])  # two of the six are padding


@pytest.mark.parametrize(
    ("share", "there", "counted"),
    [
        (0.5, [], [[1, 0, 1], [0, 0, 0]]),
        (0.75, [], [[1, 0, 1], [1, 0, 0]]),
        (0.01, [], [[1, 0, 0], [0, 0, 0]]),  # at least one token
        (0.99, [], MASK.tolist()),
        (1.0, [], MASK.tolist()),
        # All four tokens of another process have more entropy
        (0.5, [1.0, 2.0, 3.0, 4.0], [[0, 0, 0], [0, 0, 0]]),
        (0.6, [1.0, 2.0, 3.0, 4.0], [[1, 0, 0], [0, 0, 0]]),
    ],
)
def test_the_share_of_tokens_with_the_highest_entropy_of_all_processes(share, there, counted):
    def gather(mine):
        return [mine, torch.tensor(there)]

    assert (
        losses.choose_tokens(share, ENTROPY, MASK, gather).tolist() == torch.tensor(counted).bool().tolist()
    )
    if not there:  # equal entropies count alike
        assert losses.choose_tokens(share, torch.ones(2, 3), MASK, gather).equal(MASK)


def test_answers_without_a_score_leave_their_group():
    """Rewards 3, nothing, 2, 7 of four answers are as 3, 2, 7 of three: the estimators by hand, and groups of
    which one answer has a score, or none, say nothing."""
    scored = torch.tensor([True, False, True, True])
    three = adv.leave_one_out(REWARDS[scored], FOUR[scored], 3)
    assert three[:, 0].tolist() == pytest.approx([3 - 4.5, 2 - 5, 7 - 2.5])
    mask = FOUR & scored[:, None]
    assert torch.allclose(adv.leave_one_out(REWARDS, mask, 4)[scored], three)
    for found, wanted in zip(
        adv.group_normalized(REWARDS, mask, 4),
        adv.group_normalized(REWARDS[scored], FOUR[scored], 3),
        strict=True,
    ):
        assert torch.allclose(found[scored], wanted)
    for left in (mask & torch.tensor([False, True, True, False])[:, None], mask & False):
        assert not adv.leave_one_out(REWARDS, left, 4).any()
        advantages, stds = adv.group_normalized(REWARDS, left, 4)
        assert not advantages.any() and not stds.any()
    nan = math.nan
    scores = torch.tensor([1.0, nan, 1.0, 2.0, nan, 1.0, nan, nan, -0.1, -0.1, -0.1, nan])
    assert adv.scored_apart(scores, 4).tolist() == [True] * 4 + [False] * 8
    assert rows_of_equal_groups(scores, 4) == [*range(4, 12)]


def test_a_response_without_a_score_is_as_good_as_not_there():
    """Advantages, returns, scales and losses of six responses, two of them without a score, are those of the
    other four; and nothing but zeros where none has a score."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 2, 3, 2, 1])
    fields = dict.fromkeys(("sampler_logprobs", "old_logprobs", "ref_logprobs", "values"))
    rollout = Batch(
        tokens=torch.zeros(6, 5, dtype=torch.long),
        prompt_len=torch.full((6,), 2),
        response_len=lengths,
        finished=lengths < 3,
        scores=torch.tensor([1.0, math.nan, 0.0, 3.0, math.nan, 2.0]),
        importance_weights=torch.ones(6, 3),
        loss_mask=torch.ones(6, 3, dtype=torch.bool),
        **{name: torch.randn(6, 3) for name in fields},
    )
    rollout.step_rewards = torch.zeros(6, 3)
    now = torch.randn(6, 3)
    rows = [0, 2, 3, 5]

    def learned(rollout, now):
        mask = rollout.action_mask
        rewards = adv.token_rewards(rollout.scores, rollout.response_len, mask, steps=rollout.step_rewards)
        assert rewards.isfinite().all()
        found, rollout.returns = adv.gae(rewards, rollout.values, mask, 1.0, 0.9)
        found, std = adv.centred(found, mask, alone)
        has_signal = adv.scores_differ(rollout, alone)
        adv.AdvantageScale().whiten(rollout, found, std, has_signal)
        scales = rollout.advantage_std, rollout.advantage_scale
        loss, metrics = losses.policy_loss(now, rollout, *CLIP)
        value, _ = losses.value_loss(now, rollout.values, rollout.returns, mask, 0.2, 1.0)
        numbers = [loss, value, losses.kl_loss(now, rollout), mask.sum(), *metrics.values(), *scales]
        return rollout.advantages, torch.tensor([float(x) for x in numbers])

    whitened, numbers = learned(rollout, now)
    others, wanted = learned(rollout.rows(rows), now[rows])
    assert torch.allclose(whitened[rows], others, atol=1e-6)
    assert not whitened[[1, 4]].any()
    assert torch.allclose(numbers, wanted, atol=1e-5)
    rollout.scores = torch.full((6,), math.nan)
    whitened, numbers = learned(rollout, now)
    assert not whitened.any() and not numbers[:-1].any()
    everyone = losses.choose_tokens(0.5, now, rollout.action_mask, lambda x: [x])
    assert not everyone.any()
