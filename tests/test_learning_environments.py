"""Task (f), a game of several turns: its values are exact, and what is wrong on purpose is wrong as said."""

import json
from types import SimpleNamespace

import pytest
import torch

from trainer import advantages, train_ppo
from trainer.compute.batch import new_batch
from trainer.models import Models

BISECTION = {"": 4, "higher": 6, "lower": 2, "higher higher": 7, "higher lower": 5}
BISECTION |= {"lower higher": 3, "lower lower": 1}  # {what the game has said: the next guess}


@pytest.fixture
def task(benchmark):
    return benchmark("learning_environments")


class Player(torch.nn.Module):
    """Writes the guesses that a function chooses: what the game has said -> the chances of the numbers."""

    def __init__(self, task, tokenizer, as_tool, chances):
        super().__init__()
        self.tokenizer = tokenizer
        self.chances = chances
        texts = [
            tokenizer.apply_chat_template([task.turn_of(guess, as_tool)], tokenize=False)
            for guess in task.NUMBERS
        ]
        self.turns = [tokenizer(text).input_ids[1:] for text in texts]  # behind the name of the role
        self.assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
        self.known = {}

    def forward(self, rows):
        """rows [B, T] -> logits [B, T, vocabulary]; they matter behind the name of the assistant."""
        prefixes = [tuple(ids[: place + 1]) for ids in rows.tolist() for place in range(len(ids))]
        for prefix in {*prefixes} - self.known.keys():
            self.known[prefix] = self.next_chances(prefix)
        chances = torch.stack([self.known[prefix] for prefix in prefixes])
        return SimpleNamespace(logits=chances.clamp(min=1e-30).log().view(*rows.shape, -1))

    def next_chances(self, prefix):
        found = torch.zeros(len(self.tokenizer))
        if self.assistant not in prefix:
            return found
        begun = len(prefix) - prefix[::-1].index(self.assistant)
        words = self.tokenizer.convert_ids_to_tokens(prefix[:begun])
        said = " ".join(word for word in words if word in ("higher", "lower"))
        written = list(prefix[begun:])
        possible = [
            (turn[len(written) :], chance)
            for turn, chance in zip(self.turns, self.chances(said), strict=True)
            if turn[: len(written)] == written
        ]
        for following, chance in possible:
            if following:
                found[following[0]] += chance
        if written:
            return found / found.sum().clamp(min=1e-9)
        found[self.tokenizer.unk_token_id] = 1 - found.sum()
        return found


@pytest.mark.parametrize("as_tool", [False, True])
def test_values_of_the_game_are_exact(task, as_tool):
    """Bisection wins always, a random player with three of seven numbers drawn anew."""
    numbers = [*task.NUMBERS]
    random_play = 1 - (6 / 7) ** 3
    assert task.value_of_play(max, [], numbers) == 7
    assert task.value_of_play(min, [], numbers) == 1  # the same number again and again
    assert task.value_of_play(task.mean, [], numbers) == pytest.approx(7 * random_play)
    tokenizer = task.make_tokenizer()
    value = task.PolicyValue(tokenizer, as_tool)

    def of(chances):
        return value(Player(task, tokenizer, as_tool, chances))["optimum"]

    assert of(lambda said: [1 / 7] * 7) == pytest.approx(random_play, abs=1e-5)
    assert of(lambda said: [float(n == BISECTION[said]) for n in numbers]) == pytest.approx(1, abs=1e-5)
    assert of(lambda said: [float(n == 4) for n in numbers]) == pytest.approx(1 / 7, abs=1e-5)
    # Half of all turns are no guesses: such a game is lost.
    assert of(lambda said: [0.5 * (n == 4) for n in numbers]) == pytest.approx(0.5 / 7, abs=1e-5)


def test_both_kinds_of_the_game_say_the_same(benchmark):
    guess = benchmark("guess")
    for number in range(1, 8):
        for guesses in ([4, 2, 6], [7, 7, 7], [1, 2, 3], [9]):
            text = guess.Guess()
            text.reset(number)
            tool = guess.GuessTool()
            tool.reset(number, prompt="go")
            score = 0.0
            for turn in guesses:
                said, reward, over = text.step(str(turn))
                assert tool.guess(turn) == said
                score += reward
                if over:
                    break
            assert tool.get_reward() == score == float(number in guesses)
            if over:
                assert tool.guess(number) == "lost"  # too late
                assert tool.get_reward() == score


def test_games_of_stage_1_are_random_and_end_as_games_do(task):
    import random

    draw = random.Random(0)
    for as_tool in (False, True):
        games = [task.random_game(draw, as_tool) for _ in range(700)]
        first = [json.dumps(game[1]) for game in games]
        counts = [first.count(json.dumps(task.turn_of(guess, as_tool))) for guess in task.NUMBERS]
        assert sum(counts) == 700
        assert min(counts) > 60
        assert {game[-1]["role"] for game in games} == {"assistant"}
        assert max(len(game) for game in games) == (8 if as_tool else 6)


def batch_of(is_action):
    rows, columns = is_action.shape
    batch = new_batch(
        [[1]] * rows,
        torch.ones(rows, columns, dtype=torch.long),
        torch.zeros(rows, columns),
        torch.tensor([columns] * rows),
        torch.ones(rows, dtype=torch.bool),
    )
    batch.is_action = is_action
    return batch


@pytest.fixture
def put_back(monkeypatch):
    """What variants change is as before after the test."""
    monkeypatch.setattr(train_ppo, "sample", train_ppo.sample)
    monkeypatch.setattr(advantages, "gae", advantages.gae)
    monkeypatch.setattr(Models, "sampler_has_scored", Models.sampler_has_scored)


def test_variants_are_wrong_as_they_say(task, put_back, monkeypatch):
    is_action = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 0, 0, 1, 1]]).bool()
    given = lambda *_: batch_of(is_action.clone())  # noqa: E731
    monkeypatch.setattr(train_ppo, "sample", given)
    task.VARIANTS["ends of turns masked"]()
    expected = torch.tensor([[1, 0, 0, 0, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 0, 0, 1, 1]]).bool()
    assert train_ppo.sample(None, 0, []).action_mask.equal(expected)
    monkeypatch.setattr(train_ppo, "sample", given)
    task.VARIANTS["observations in the loss"]()
    assert train_ppo.sample(None, 0, []).action_mask.all()
    assert not Models.sampler_has_scored(None, 1)

    # One observation column between two actions: the right delta is V(next action) - V, with one gamma.
    mask = torch.tensor([[True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 9.0, 0.25]])
    order = batch_of(mask).action_order
    right, _ = advantages.gae(rewards, values, mask, 1.0, 0.5, order)
    assert right.tolist() == [[0.25 - 0.5 + 0.5 * 0.75, 0.0, 0.75]]
    task.VARIANTS["deltas over observations"]()
    wrong, returns = advantages.gae(rewards, values, mask, 1.0, 0.5, order)
    assert wrong.tolist() == [[-0.5 + 0.5 * 0.25 + 0.25 * 0.75, 0.0, 0.75]]
    assert returns[:, [0, 2]].equal((wrong + values)[:, [0, 2]])


def made_run(who="our_gae", variant="", rates=(1e-3, 2e-3), seed=0, shares=(0.4, 0.96, 0.97)):
    curve = {"samples": [0, 128, 256], "seconds": [0.0, 1.0, 2.0], "optimum": list(shares)}
    return {"who": who, "variant": variant, "rates": list(rates), "seed": seed, "curve": curve}


def test_the_table_has_the_best_rates_and_what_is_wrong(task, monkeypatch, tmp_path):
    monkeypatch.setattr(task, "FILE", tmp_path / "found.json")
    monkeypatch.setattr(task, "PAGE", tmp_path / "page.md")
    for seed in (1, 0):
        task.keep(made_run(seed=seed))
    task.keep(made_run(rates=(3e-3, 2e-3), shares=(0.4, 0.5, 0.6)))
    task.keep(made_run(variant="ends of turns masked", shares=(0.4, 0.5, 0.6)))
    task.keep(made_run("trl_tool", rates=[1e-3], shares=(0.4, 0.4, 0.99)))
    (tmp_path / "page.md").write_text("a\n<!-- environments -->\nold\n<!-- end of environments -->\nb\n")
    task.write_page()
    page = (tmp_path / "page.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| text | PPO |  | 0.001, 0.002 | 2 | 0.970 (0.970 to 0.970) | 128 | 2 |",
        "| text | PPO | ends of turns masked | 0.001, 0.002 | 1 | 0.600 | not reached | 2 |",
        "| calls | TRL's GRPO |  | 0.001 | 1 | 0.990 | 256 | 2 |",
    ]
    assert page.startswith("a\n<!-- environments -->\n|")
    assert page.endswith("|\n<!-- end of environments -->\nb\n")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["our_gae", "our_group_tool"])
def test_a_small_run_of_a_game(task, who, monkeypatch, tmp_path, put_back):
    monkeypatch.setattr(task.PpoRun, "evaluate", task.PpoRun.evaluate)
    monkeypatch.setitem(task.SIZES, "max_steps", 2)
    files = task.prepare(tmp_path, task.is_tool(who))
    request = {"who": who, "variant": "", "rates": [1e-3], "seed": 0, "files": files, "flags": {}}
    points = task.run_ours(request, tmp_path / "out")
    assert [point["samples"] for point in points] == [0, 128, 256]
    assert points[0]["optimum"] == pytest.approx(1 - (6 / 7) ** 3, abs=0.03)
    assert points[-1]["optimum"] != points[0]["optimum"]


def test_the_calculator_and_its_data(benchmark, tmp_path):
    """The demonstrated call gives the demonstrated answer; no sum is in two files."""
    calculator = benchmark("calculator")
    real = benchmark("real_model_tools")
    assert calculator.calculate("417 + 286") == "703"
    assert calculator.calculate(" -5 - 12 ") == "-17"
    for wrong in ("__import__('os')", "2 ** 9", "1 + 2 + 3", ""):
        with pytest.raises(ValueError, match="must be as"):
            calculator.calculate(wrong)
    said = ["The sum is 1,703.", "703", "703 + 1", ""]
    assert calculator.right(said, said, ["1703", "703", "703", "703"]) == [1, 1, 0, 0]
    real.make_data(tmp_path)
    asked = []
    for name, count in real.COUNTS.items():
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(records) == count
        for record in records:
            if name == "demonstrations":
                question, call, result, answer = record["messages"]
                (called,) = call["tool_calls"]
                assert calculator.calculate(**called["function"]["arguments"]) == result["content"]
                assert result["content"] == answer["content"]
                asked.append(question["content"])
            else:
                asked.append(record["prompt"])
    assert len(asked) == len(set(asked)) == sum(real.COUNTS.values())
