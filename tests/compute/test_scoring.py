"""Log-probs and values of responses, against whole sequences through untouched models; balance losses."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_llama, values_of

from model.critic import CriticModel
from trainer.compute import scoring
from trainer.compute.batching import Layout
from trainer.compute.scoring import PolicyScorer, ValueScorer, pack_sequences, short_windows

TOKENS = torch.tensor([[2, 3, 4, 5, 6, 7], [7, 8, 9, 3, 0, 0]])
PROMPTS, RESPONSES = [2, 1], [4, 3]


def test_the_value_of_a_token_is_read_one_position_before_it():
    critic = CriticModel.from_model(tiny_llama(10, layers=2, spread=8.0))
    torch.nn.init.normal_(critic.value_head.weight)
    values, _ = ValueScorer(critic)(TOKENS, Layout.of_responses(PROMPTS, RESPONSES))
    for row, (start, count) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        whole = values_of(critic, TOKENS[row, None, : start + count])[0]
        assert values[row, :count].tolist() == pytest.approx(whole[start - 1 : -1].tolist(), abs=1e-5)
        assert (values[row, count:] == 0).all()


@pytest.mark.parametrize(
    ("temperature", "dtype", "close"),
    [(1.0, torch.float32, 1e-5), (0.5, torch.float32, 1e-5), (1.0, torch.bfloat16, 0.03)],
)
def test_log_probs_and_entropies_are_those_of_the_next_token(temperature, dtype, close):
    """In bf16 a CPU gets rows of padding behind the tokens."""
    policy = tiny_llama(10, layers=2, spread=8.0)
    plain = copy.deepcopy(policy)
    assert pack_sequences(policy.base_model)
    scored = PolicyScorer(policy, dtype)(TOKENS, Layout.of_responses(PROMPTS, RESPONSES), temperature)
    for row, (start, count) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = plain(TOKENS[row, None]).logits[0, start - 1 : start + count - 1]
        log_p = torch.log_softmax(logits / temperature, -1)
        chosen = log_p.gather(1, TOKENS[row, start : start + count, None])[:, 0]
        assert scored[0][row, :count].tolist() == pytest.approx(chosen.tolist(), abs=close)
        entropy = -(log_p.exp() * log_p).sum(-1)
        assert scored[1][row, :count].tolist() == pytest.approx(entropy.tolist(), abs=close)
    assert scored[2] == 0  # no experts
    assert scored[0].requires_grad and not scored[1].requires_grad


def test_the_balance_loss_by_hand():
    """Three experts of gates .5, .3, .2, two chosen: f = (1/2, 1/2, 0), 3 (.5 / 2 + .3 / 2) = 1.2. With one
    chosen it is 3 * .5. Its gradient lowers the gate of an expert that is chosen too often."""
    gates = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert scoring.load_balance_loss((gates,), Layout([1]), 2).item() == pytest.approx(1.2)
    assert scoring.load_balance_loss((gates,), Layout([1]), 1).item() == pytest.approx(1.5)
    logits = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], requires_grad=True)
    scoring.load_balance_loss((logits,), Layout([3]), 1).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 2] < 0).all()


class Numbers(scoring.Scorer):
    """Finds what a function of the rows says, twice: the second time multiplied"""

    name = "numbers"

    def __init__(self, of_rows):
        super().__init__(model=SimpleNamespace(base_model=None))
        self.of_rows = of_rows

    def forward(self, rows, layout, factor=1.0):
        found = self.of_rows(rows)
        return found, factor * found, None


def test_micro_batches_are_padded_on_the_right_and_come_back_in_row_order(monkeypatch):
    monkeypatch.setattr(scoring, "tokens_per_forward", lambda device: 4)  # each sequence on its own
    lengths = [4, 2, 3]
    rollout = SimpleNamespace(sampler_logprobs=torch.zeros(3, 4), tokens=torch.zeros(3, 4))
    rollout.rows = lambda rows, shared: SimpleNamespace(tokens=rows, layout=None)
    rollout.layout = SimpleNamespace(lengths=lengths, prompt=[0, 1, 2])
    scorer = Numbers(lambda rows: torch.full((len(rows), lengths[rows[0]]), rows[0] + 1.0))
    found, doubled = scoring.score_all(rollout, scorer, factor=2.0)
    assert found.tolist() == [[1, 1, 1, 1], [2, 2, 0, 0], [3, 3, 3, 0]]
    assert doubled.equal(2 * found)
    asked = []

    def of_rows(rows):
        asked.append(sorted(rows))
        return torch.zeros(len(rows), 4)

    scoring.score_all(rollout, Numbers(of_rows), token_budget=12)
    scoring.score_all(rollout, Numbers(of_rows), token_budget=1)  # less than the 4 above
    assert sorted(asked) == [[0], [0, 1, 2], [1], [2]]


def test_windows_are_short_in_the_block_and_what_they_were_behind_it():
    layer = torch.nn.Linear(1, 1)
    layer.sliding_window = 64
    model = torch.nn.Sequential(layer, torch.nn.Linear(1, 1))
    model.config = SimpleNamespace(sliding_window=32)
    with pytest.raises(KeyError), short_windows(model):
        assert (layer.sliding_window, model.config.sliding_window) == (4, 4)
        raise KeyError
    assert (layer.sliding_window, model.config.sliding_window) == (64, 32)
