"""--entropy_top: only tokens of high entropy count in the policy loss."""

from types import SimpleNamespace

import pytest
import torch
from test_invariants import ALONE, files, filled_rollout, make_run

from errors import InputError
from trainer import ppo, train_ppo
from trainer.compute.scoring import PolicyScorer, score_policy
from trainer.ppo import choose_tokens

assert files  # the fixture
ENTROPY = torch.tensor([[0.5, 0.1, 9.0], [0.3, 0.2, 0.4]])
MASK = torch.tensor([[True, True, False], [True, True, True]])  # five tokens; the 9.0 is padding


@pytest.mark.parametrize(
    ("share", "counted"),
    [
        (0.4, [[1, 0, 0], [0, 0, 1]]),
        (0.6, [[1, 0, 0], [1, 0, 1]]),
        (0.01, [[1, 0, 0], [0, 0, 0]]),  # at least one token
        (0.99, [[1, 1, 0], [1, 1, 1]]),
    ],
)
def test_the_share_by_hand(share, counted):
    found = choose_tokens(share, ENTROPY, MASK, ALONE.gather)
    assert found.tolist() == torch.tensor(counted).bool().tolist()


def test_equal_entropies_count_alike():
    found = choose_tokens(0.4, torch.ones(2, 3), MASK, ALONE.gather)
    assert found.equal(MASK)


def test_1_is_all_tokens_and_0_is_refused():
    assert choose_tokens(1.0, ENTROPY, MASK, ALONE.gather).equal(MASK)
    with pytest.raises(InputError, match="--entropy_top"):
        train_ppo.parse_args(["--entropy_top", "0"])


def test_the_threshold_is_that_of_all_processes():
    """The other process has five tokens with more entropy than any here: a share of 0.5 leaves none."""
    other = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    world = SimpleNamespace(gather=lambda mine: [mine, other])
    found = choose_tokens(0.5, ENTROPY, MASK, world.gather)
    assert not found.any()
    found = choose_tokens(0.6, ENTROPY, MASK, world.gather)
    assert found.nonzero().tolist() == [[0, 0]]


def rows(counted):
    """Five tokens of two sequences, off policy, with a reference of its own."""
    torch.manual_seed(0)
    old, ref, advantages = (torch.randn(2, 3).where(MASK, 0.0) for _ in range(3))
    return SimpleNamespace(
        old_logprobs=old,
        ref_logprobs=ref,
        advantages=advantages,
        mask=MASK,
        importance_weights=torch.full((2, 3), 0.9),
        counted=counted,
    )


def gradient(mb, kl_weight):
    logprobs = (mb.old_logprobs + 0.05).requires_grad_()
    loss, _ = ppo.policy_loss(logprobs, mb, 0.2, 0.2, kl_weight=kl_weight)
    loss.backward()
    return logprobs.grad


def test_other_tokens_have_no_policy_gradient_but_that_of_the_kl():
    """And those that count have what they have without the flag: the denominator is the same."""
    counted = torch.tensor([[True, False, False], [False, True, False]])
    for kl_weight in (0.0, 0.3):
        everywhere, top = gradient(rows(None), kl_weight), gradient(rows(counted), kl_weight)
        kl_alone = everywhere - gradient(rows(None), 0.0)
        assert top[counted].equal(everywhere[counted])
        assert torch.allclose(top[~counted], kl_alone[~counted], atol=1e-7)
        assert everywhere[MASK].all()


def test_entropies_come_with_the_log_probs_of_the_old_actor(files):
    run, prompts = make_run(files, entropy_top=0.3)
    rollout, _ = filled_rollout(run, prompts)
    scorer = PolicyScorer(run.old_actor, run.dtype)
    logprobs, entropy = score_policy(rollout, scorer, 1.0)
    assert rollout.old_logprobs.equal(logprobs)
    with torch.no_grad():
        for row in range(3):
            whole = run.actor(rollout.tokens[row : row + 1]).logits[0].log_softmax(-1)
            first, count = rollout.prompt_len[row] - 1, rollout.response_len[row]
            wanted = -(whole.exp() * whole).sum(-1)[first : first + count]
            assert torch.allclose(entropy[row, :count], wanted, atol=1e-5)
    least = entropy[rollout.mask].quantile(0.7, interpolation="higher")
    assert rollout.counted.equal((entropy >= least - 1e-7) & rollout.mask)
    assert 0.2 < rollout.counted.sum() / rollout.mask.sum() < 0.4
