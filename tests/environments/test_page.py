"""The examples of docs/environments.md do what the page says."""

import importlib.util
import re

import pytest
from tiny import ROOT

from trainer.environments.environment import Episode, load_environments
from trainer.environments.tool_calls import error_result

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n((?:#|import|class).*?)```", PAGE, re.DOTALL)


@pytest.fixture
def begin(tmp_path):
    """-> an episode of the example with this class or function, reset, and what reset returned."""

    def begun(name, flag="env", **record):
        (code,) = [block for block in BLOCKS if re.search(rf"^(class|def) {name}\b", block, re.MULTILINE)]
        path = tmp_path / "mine.py"
        path.write_text(code, encoding="utf-8")
        given = {"env": "", "tools": []} | {flag: f"{path}:{name}"}
        episode = Episode(load_environments(**given), record, seed=3)
        return episode, episode.reset()

    return begun


def test_the_tool(begin):
    episode, _ = begin("calculate", "tools")
    assert episode.call("calculate", {"expression": "4 * 5"}) == "20.0"
    with pytest.raises(ValueError, match="could not convert") as error:
        episode.call("calculate", {"expression": "four * 5"})
    assert error_result(error.value).startswith('{"error": "ValueError: ')


def test_the_class(begin):
    for guesses, results, reward in (([3, 5, 4], ["higher", "lower", "right"], 1.0), ([], [], 0.0)):
        episode, text = begin("Guess", number=4)
        assert text is None and [episode.call("guess", {"value": x}) for x in guesses] == results
        assert episode.get_reward() == reward


def test_the_text_game(begin):
    episode, text = begin("Count")
    assert text == " One number each. You begin."
    steps = [episode.step(said) for said in ("1", " 3", "5", "7", "9")]
    assert steps == [(str(n), 0.1, n == 10) for n in (2, 4, 6, 8, 10)]
    assert begin("Count")[0].step("2") == ("", 0.0, True)


@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="needs reasoning-gym")
def test_reasoning_gym(begin):
    episode, text = begin("Sums", number=5)
    assert text == episode.environment.task["question"]
    assert episode.step("no")[1:] == (pytest.approx(0, abs=0.1), False)
    assert episode.step(episode.environment.task["answer"])[1:] == (1.0, True)


@pytest.mark.skipif(not importlib.util.find_spec("gymnasium"), reason="needs gymnasium")
def test_gymnasium(begin):
    episode, text = begin("Lake")
    assert "SFFF" in re.sub(r"\x1b\[\d*m", "", text)
    assert episode.step("jump") == ("Write left, down, right or up.", -0.1, False)
    for move in ("down", "down", "right", "right", "down"):
        assert episode.step(move)[1:] == (0.0, False)
    assert episode.step("right")[1:] == (1.0, True)
