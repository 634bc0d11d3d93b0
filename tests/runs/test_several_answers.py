"""Several answers to a prompt: those that score the same are sampled again. Runs: test_loss_options.py."""

import pytest
import torch
from same_runs import built, sizes
from test_invariants import ALONE
from test_loss_options import RUNS, files  # noqa: F401  (a fixture)

from trainer import train_ppo
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.options.filter_groups import rows_of_equal_groups, scores_to_compare
from trainer.rewards.combine import RawScores, Reward
from trainer.runs.metrics import Seconds


def test_rows_of_equal_groups():
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 0.0])
    assert rows_of_equal_groups(scores, 2) == [0, 1, 4, 5, 6, 7]
    assert rows_of_equal_groups(scores, 4) == []


def test_the_first_batchs_scores_are_compared_as_they_are_before_they_are_normalised():
    """Without a mean and standard deviation the clip would make 5 and 9 equal."""
    reward = Reward(reasoning=False, normalize_reward=True)
    raw = RawScores({"server": torch.tensor([5.0, 9.0, 6.0])})
    assert scores_to_compare(reward, raw).tolist() == [5, 9, 6]
    learned = reward.combine(raw, ALONE)["score"]
    assert scores_to_compare(reward, raw).equal(learned)
    plain = Reward(reasoning=False, functions={"function": (len, 1.0)})
    assert scores_to_compare(plain, RawScores({"function": torch.tensor([1.0])})).tolist() == [1]


def test_scores_are_compared_without_what_is_taken_off_for_length():
    """Two wrong answers, one of them cut and the other long: nothing to compare."""
    parts = {"function": [0.3, 0.3], "missing_eos": [-1.0, 0.0], "overlong": [0.0, -0.5]}
    raw = RawScores({name: torch.tensor(scores) for name, scores in parts.items()})
    scores = scores_to_compare(Reward(reasoning=False, functions={"function": (len, 1.0)}), raw)
    assert rows_of_equal_groups(scores, 2) == [0, 1]


class Coarse:
    """A reward model that finds nothing in most answers"""

    def __init__(self, judge):
        self.judge, self.model = judge, judge.model

    def __call__(self, conversations):
        return (self.judge(conversations) > 0.3).float()


@pytest.mark.parametrize("model", [False, True], ids=["function", "reward model"])
def test_prompts_whose_answers_score_the_same_are_sampled_again(files, tmp_path, model):  # noqa: F811
    """All others keep their answers; what is kept of the new ones is what a fresh score of them is."""
    given = files["several answers"] | RUNS["several answers"][0] | sizes(32) | {"out_dir": tmp_path / "out"}
    if model:
        given |= {"reward_model": files[""]["reward_model"], "reasoning": 1}
    batches = {}
    for times in (0, 1, 9):
        run = built(given, filter_groups=times)
        if model:
            judge, weight = run.reward.models["model"]
            run.reward.models["model"] = Coarse(judge), weight
        asked = [run.data[i] for i in range(8)]
        seconds = Seconds()
        sampled = train_ppo.sample(run, 0, asked)
        batches[times] = train_ppo.score(run, 0, sampled, seconds)
        batch = batches[times]
        assert seconds.keys() == ({"rollout", "reward"} if times else set())
        assert response_texts(batch, run.tokenizer) == batch.texts
        tokens = zip(batch.tokens.tolist(), batch.layout.prompt_len, strict=True)
        wanted = [prompt.prompt_ids for prompt in asked for _ in range(4)]
        assert [ids[:count] for ids, count in tokens] == [p.prompt_ids for p in batch.prompts] == wanted
        fresh = run.request_scores(run.reward, batch)
        assert fresh.parts.keys() == batch.raw.parts.keys()
        assert all(fresh.parts[name].equal(batch.raw.parts[name]) for name in fresh.parts)
        assert fresh.blocks.keys() == batch.raw.blocks.keys()
        for name, x in fresh.blocks.items():
            assert x.allclose(batch.raw.blocks[name], 0, 0, equal_nan=True)
    again = rows_of_equal_groups(batches[0].scores, 4)
    assert 0 < len(again) < 32
    assert batches[1].sampled_again == len(again)
    # With one process a row is its own place in the global batch; answers 4 to 7 are sampled the second time.
    noise = noise_keys(run.args.seed, 0, [row // 4 for row in again], [row % 4 + 4 for row in again])
    with run.engine.weights_of(run.models.old_actor):
        new = run.engine.respond([batches[0].prompts[row] for row in again], noise, run.args.temperature)
    answers = batches[1].responses()
    assert [answers[row] for row in again] == new.responses()
    left = len(rows_of_equal_groups(batches[1].scores, 4))
    assert 0 < left < len(again) or model
    assert batches[9].sampled_again >= len(again) + left
    for times in (1, 9):
        assert len(rows_of_equal_groups(batches[times].scores, 4)) <= left
        before, after = (batches[n].responses() for n in (0, times))
        for row in {*range(32)} - {*again}:
            assert before[row] == after[row]
            assert batches[times].texts[row] == batches[0].texts[row]
