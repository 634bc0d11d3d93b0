"""--entropy_top: only tokens of high entropy count in the policy loss."""

from types import SimpleNamespace

import pytest
import torch
from test_invariants import ALONE, files

from errors import InputError
from trainer import train_ppo
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


def test_1_is_all_tokens_equal_entropies_count_alike_and_0_is_refused():
    assert choose_tokens(1.0, ENTROPY, MASK, ALONE.gather).equal(MASK)
    assert choose_tokens(0.4, torch.ones(2, 3), MASK, ALONE.gather).equal(MASK)
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
