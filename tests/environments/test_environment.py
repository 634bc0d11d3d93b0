"""Environments and tools of the user's: what is a tool, what reset gets, what methods return and raise."""

import json
import random
import threading
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from tiny import refused

from trainer.environments.environment import CallError, Episode, load_environments
from trainer.environments.running import Hung, run_all
from trainer.environments.tool_calls import error_result
from trainer.rewards.reward_function import load_reward_functions

RECORD = {"prompt": "p", "number": 5, "facts": ["a"]}
GAME = '''
class Base:
    """What it inherits is a tool too."""

    def look(self) -> str:
        """Look around."""
        return f"{self.number} of {self.high}"

    def _hidden(self):
        return 1


class Game(Base):
    high = 7

    def __init__(self):
        self.tries = 0
        self.closed = False

    @property
    def doubled(self):
        raise ValueError("nobody reads it")

    def reset(self, number, **columns):
        self.number = number
        self.columns = columns
        return f"from 1 to {self.high}"

    def guess(self, value: int, sure: bool = False) -> str:
        """Guess the number.

        Args:
            value: The guess.
            sure: Whether it is sure.
        """
        self.tries += 1
        return "right" if value == self.number else "higher" if value < self.number else "lower"

    async def ask(self, question: str) -> dict:
        """Ask something.

        Args:
            question: A text.
        """
        return {"é": question}

    @staticmethod
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: A number.
            b: A number.
        """
        return a + b

    @classmethod
    def highest(cls) -> int:
        """The highest number."""
        return cls.high

    def close(self):
        self.closed = True

    def get_reward(self):
        return 1.0 / self.tries if self.tries else None


def make():
    return Game()
'''


@pytest.fixture
def file(tmp_path):
    """A function that writes a file of the user's -> its path."""

    def write(text, name="game.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def begun(environments, record=RECORD, seed=3):
    episode = Episode(environments, record, seed)
    episode.reset()
    return episode


def of_class(file, body, **more):
    """The environments of a class with this body."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return load_environments(file(f"class Game:\n{lines}") + ":Game", "", **more)


TOOLS = ["add", "ask", "guess", "highest", "look"]


@pytest.mark.parametrize("name", ["Game", "make"])
def test_public_methods_are_tools_with_their_schemas(file, name):
    environments = load_environments(f"{file(GAME)}:{name}", "")
    assert [schema["function"]["name"] for schema in environments.schemas] == TOOLS
    assert environments.schemas[2] == {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "description": "The guess."},
                    "sure": {"type": "boolean", "description": "Whether it is sure."},
                },
                "required": ["value"],
            },
            "return": {"type": "string"},
        },
    }
    assert (environments.is_text_game, environments.has_reward) == (False, True)


def test_an_episode_from_reset_to_reward(file):
    environments = load_environments(f"{file(GAME)}:Game", [])
    episode = Episode(environments, RECORD, 0)
    assert episode.environment is None
    assert episode.reset() == "from 1 to 7"
    game = episode.environment
    assert (game.number, game.columns) == (5, {"prompt": "p", "facts": ["a"]})
    game.columns["facts"].clear()
    assert RECORD["facts"] == ["a"]
    assert episode.get_reward() is None
    calls = [("guess", {"value": 3}), ("guess", {"value": 5, "sure": True}), ("ask", {"question": "x"})]
    calls += [("add", {"a": 1, "b": 2}), ("highest", {}), ("look", {})]
    assert [episode.call(*call) for call in calls] == ["higher", "right", '{"é": "x"}', "3", "7", "5 of 7"]
    assert episode.get_reward() == 0.5
    assert not game.closed
    other = begun(environments)
    assert other.environment is not game
    assert other.environment.tries == 0


def said(episode, name, arguments):
    [result] = run_all([partial(episode.call, name, arguments)], 5, [episode.worker])
    return json.loads(error_result(result))["error"]


def test_calls_that_no_tool_can_be_given_and_errors_of_tools_are_told_apart(file):
    body = '''
def add(self, a: int, b: int = 2) -> int:
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    return self.missing(a)

def reset(self):
    pass

def missing(self) -> None:
    """Missing."""
'''
    episode = begun(of_class(file, body))
    assert said(episode, "mul", {}) == "there is no tool 'mul'; the tools are: add, missing"
    for name in ("reset", "_hidden", "__class__", ""):
        assert said(episode, name, {}).startswith(f"there is no tool {name!r}")
    assert said(episode, "add", {}) == "add: missing a required argument: 'a'"
    assert said(episode, "add", {"a": 1, "c": 2}) == "add: got an unexpected keyword argument 'c'"
    assert said(episode, "add", {"a": 1, "self": 2}) == "add: got an unexpected keyword argument 'self'"
    assert said(episode, "add", {"a": 1}).startswith("TypeError: Game.missing() takes 1 positional")
    with pytest.raises(CallError):
        episode.call("add", {})
    assert episode.call("missing", {}) == "None"


TOOL = '''
import threading, torch
calls = []
def f({arguments}):
    """A tool.

    Args:
        x: Anything.
    """
    calls.append(1)
    {line}
def g() -> int:
    """Count."""
    return len(calls)
def h(p, r, a):
    calls.append(1)
    return [len(calls) for _ in r]
'''


def tool_file(file, line="return x", arguments="x: int = 0", name="tools.py"):
    return file(TOOL.format(line=line, arguments=arguments), name)


RESULTS = [  # (what a tool returns, as text)
    ("'a'", "a"),
    ("None", "None"),
    ("0.5", "0.5"),
    ("[1, 'é', None]", '[1, "é", null]'),
    ("{'a': torch.tensor(1)}", '{"a": "tensor(1)"}'),
    ("{(1, 2): 3}", "{(1, 2): 3}"),
    ("(1, 2)", "(1, 2)"),
    ("True", "True"),
    ("'\\ud800'", "?"),
    ("{'a': '\\ud800'}", '{"a": "?"}'),
]


@pytest.mark.parametrize(("returned", "text"), RESULTS)
def test_results_are_texts(file, returned, text):
    environments = load_environments("", f"{tool_file(file, f'return {returned}')}:f")
    assert begun(environments).call("f", {}) == text


def test_hostile_tools_end_nothing(file):
    """Each result is a text or an exception, and the tool behind it works."""
    lines = {
        "raise SystemExit(3)": "RuntimeError: SystemExit: 3",
        "raise BaseException('x')": "RuntimeError: BaseException: x",
        "return type('T', (), {'__str__': lambda self: 1 / 0})()": "ZeroDivisionError: division by zero",
        "return f(x)": "RecursionError: maximum recursion depth exceeded",
        "x = []; [x := [x] for _ in range(10**5)]; return x": "RecursionError: maximum recursion depth",
        "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()": "E",
        "threading.Event().wait()": "Hung: no answer after 2 s",
    }
    for number, (line, says) in enumerate(lines.items()):
        environments = load_environments("", f"{tool_file(file, line, name=f't{number}.py')}:f,g")
        episodes = [begun(environments) for _ in range(2)]
        jobs = [partial(episode.call, name, {}) for episode, name in zip(episodes, "fg", strict=True)]
        seconds = 2.0 if says.startswith("Hung") else 600.0
        result, count = run_all(jobs, seconds, [episode.worker for episode in episodes])
        assert json.loads(error_result(result))["error"].startswith(says), line
        assert count.isdigit()
    environments = load_environments("", f"{tool_file(file, 'raise SystemExit')}:f")
    with pytest.raises(RuntimeError, match="SystemExit"):  # for who runs several calls in one job
        begun(environments).call("f", {})
    environments = load_environments("", f"{tool_file(file, 'return chr(120) * 10**6')}:f")
    assert begun(environments).call("f", {}) == "x" * 10**6


def test_arguments_are_copies_and_functions_have_no_object(file):
    environments = load_environments("", f"{tool_file(file, 'x.append(1); return x', 'x: list')}:f")
    episode = Episode(environments, RECORD, 0)
    assert (episode.reset(), episode.environment, episode.get_reward()) == (None, None, None)
    arguments = {"x": [0]}
    assert episode.call("f", arguments) == "[0, 1]"
    assert arguments == {"x": [0]}
    assert (environments.is_text_game, environments.has_reward) == (False, False)


def test_flags_that_name_one_file_share_its_state_and_their_code_has_a_hash(file):
    path = tool_file(file)
    modules = {}
    [(score, _)] = load_reward_functions([f"{path}:h"], modules).values()
    environments = load_environments("", [f"{path}:f,g", f"{file(GAME)}:make.py"][:1], modules)
    assert score([], ["r"], []) == [1]
    episode = begun(environments)
    episode.call("f", {})
    assert episode.call("g", {}) == "2"
    assert score([], ["r"], []) == [3]
    game = file(GAME)
    both = load_environments(f"{game}:Game", f"{path}:f {tool_file(file, name='u.py')}:g")
    assert [schema["function"]["name"] for schema in both.schemas] == ["f", "g", *TOOLS]
    assert begun(both).call("f", {"x": 3}) == "3"
    hashes = [both.code_hash]
    hashes.append(load_environments(f"{game}:Game", f"{path}:f").code_hash)
    hashes.append(load_environments("", f"{path}:f").code_hash)
    hashes.append(load_environments("", f"{path}:g").code_hash)
    hashes.append(load_environments(f"{game}:make", f"{path}:f").code_hash)
    file(f"{GAME}# changed\n")
    hashes.append(load_environments(f"{game}:make", f"{path}:f").code_hash)
    assert len({*hashes}) == len(hashes)
    assert hashes[-1] == load_environments(f"{game}:make", f"{path}:f").code_hash


# ---------------------------------------------------------------- reset


RESETS = [  # (parameters, what they are given)
    ("", {}),
    ("number", {"number": 5}),
    ("number, /, prompt", {"number": 5, "prompt": "p"}),
    ("rare=2, /, number=0", {"rare": 2, "number": 5}),
    ("number, seed", {"number": 5, "seed": 3}),
    ("*, seed=None, options=None", {"seed": 3, "options": None}),
    ("**columns", {"columns": RECORD}),
    ("number, **columns", {"number": 5, "columns": {"prompt": "p", "facts": ["a"]}}),
    ("number, /, **columns", {"number": 5, "columns": {"prompt": "p", "facts": ["a"]}}),
    ("*rest, number", {"rest": (), "number": 5}),
    ("rare", {"rare": None}),
]


@pytest.mark.parametrize(("parameters", "given"), RESETS)
def test_reset_gets_the_fields_that_it_names(file, parameters, given):
    body = "step = 1\ndef get_reward(self):\n    return 0\n"
    body += f"def reset(self, {parameters}):\n    self.given = locals()"
    given_to = begun(of_class(file, body)).environment.given
    assert {name: value for name, value in given_to.items() if name != "self"} == given


def test_what_a_class_sets_for_the_process_when_it_is_made_is_set_back(file):
    body = "def __init__(self):\n    import torch\n    torch.set_default_dtype(torch.float64)\n"
    of_class(file, body + "def get_reward(self):\n    return 0")
    assert torch.get_default_dtype() == torch.float32


def test_a_tool_is_called_as_the_flag_names_it(file):
    path = tool_file(file)
    file(f"{TOOL.format(line='return x', arguments='x: int = 0')}double = f\n", "tools.py")
    environments = load_environments("", f"{path}:double")
    assert [schema["function"]["name"] for schema in environments.schemas] == ["double"]
    assert begun(environments).call("double", {"x": 2}) == "2"


def test_a_seed_of_the_record_comes_before_that_of_the_run(file):
    body = "def get_reward(self):\n    return self.seed\ndef reset(self, seed):\n    self.seed = seed"
    environments = of_class(file, body)
    assert begun(environments, {"seed": 9}).get_reward() == 9
    assert begun(environments, {}).get_reward() == 3


def test_a_field_that_no_record_has_is_refused(file):
    body = "def get_reward(self):\n    return 0\ndef reset(self, number, seed, rare=1, *rest, **more): pass"
    environments = of_class(file, body)
    data = SimpleNamespace(columns={"prompt": None, "number": None}, path="a.jsonl")
    environments.check_fields(data, None)
    other = SimpleNamespace(columns={"prompt": None}, path="b.jsonl")
    says = (
        r"^--env: reset's parameter 'number' is no key of the records of b.jsonl; keys found: \"prompt\": ren"
    )
    refused(says, environments.check_fields, data, other)
    of_class(file, "def get_reward(self):\n    return 0").check_fields(other)  # no reset


def test_what_reset_may_return_and_not(file):
    body = "def get_reward(self):\n    return 0\nasync def reset(self, text):\n    return text"
    environments = of_class(file, body)
    for text, expected in (("a", "a"), (None, None), ("", ""), (("a", {}), "a"), ("\ud800", "?")):
        assert Episode(environments, {"text": text}, 0).reset() == expected
    for wrong in (3, ["a"], ("a", "b"), {"a": 1}):
        says = r"^--env: reset returned .* \((int|list|tuple|dict)\); it must return a text or None$"
        refused(says, Episode(environments, {"text": wrong}, 0).reset)


def test_an_error_of_reset_and_of_get_reward_has_its_place(file):
    body = "def reset(self, x):\n    return self.no\nasync def get_reward(self):\n    raise SystemExit(2)"
    environments = of_class(file, body)
    episode = Episode(environments, RECORD, 0)
    refused(r"^--env: reset: AttributeError: 'Game' object .* at .*game\.py:3; correct the", episode.reset)
    refused(r"^--env: get_reward: RuntimeError: SystemExit: 2 at .*game\.py:5; correct", episode.get_reward)
    [error] = run_all([episode.reset], 5, [episode.worker])
    assert "game.py:3;" in str(error)
    body = "n = 0\ndef __init__(self):\n    Game.n += 1\n    assert Game.n < 2\n"
    body += "def get_reward(self):\n    return 0"
    environments = of_class(file, body)
    refused(r"^--env: AssertionError at .*game\.py:5; correct", Episode(environments, RECORD, 0).reset)


def test_what_an_environment_draws_depends_on_its_seed_alone(file):
    """TRL's classes use the global generators."""
    path = file(
        "import random, numpy\nclass Game:\n    def draw(self) -> list:\n        'Draw.'\n"
        "        return [random.random(), float(numpy.random.rand())]\n"
        "    def reset(self):\n        self.number = random.random()\n"
    )
    environments = load_environments(f"{path}:Game", "")
    before = random.getstate()[1], numpy.random.get_state()[1].tolist()
    one, same, other = (begun(environments, seed=seed) for seed in (1, 1, 2))
    first = [one.call("draw", {}), one.call("draw", {})]
    drawn = [json.loads(text) for text in (*first, other.call("draw", {}))]
    assert [len({*numbers}) for numbers in zip(*drawn, strict=True)] == [3, 3]
    assert one.environment.number != other.environment.number
    assert one.environment.number == same.environment.number
    assert first == [same.call("draw", {}), same.call("draw", {})]
    assert before == (random.getstate()[1], numpy.random.get_state()[1].tolist())


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("returned", "reward"),
    [("None", None), ("True", 1.0), ("0", 0.0), ("torch.tensor(0.5)", 0.5), ("numpy.float32(2)", 2.0)],
)
def test_rewards(file, returned, reward):
    path = file(f"import numpy, torch\nclass Game:\n    def get_reward(self):\n        return {returned}\n")
    assert begun(load_environments(f"{path}:Game", "")).get_reward() == reward


@pytest.mark.parametrize("returned", ["float('nan')", "-1e999", "'0.5'", "[1, 2]", "1j", "10**400", "len"])
def test_what_is_no_reward_is_refused(file, returned):
    environments = of_class(file, f"def get_reward(self):\n    return {returned}")
    says = r"^--env: the reward of get_reward is .* \(\w+\); it must be a finite number"
    refused(says, begun(environments).get_reward)


def test_two_dimensions_are_no_reward(file):
    path = file("import torch\nclass Game:\n    def get_reward(self):\n        return torch.zeros(2)\n")
    refused("it must be a finite number", begun(load_environments(f"{path}:Game", "")).get_reward)


# ---------------------------------------------------------------- text games


GYM = """
class Text:
    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return "You see a door.", {}

    def render(self):
        pass

    def step(self, action):
        return RETURNED

    def close(self):
        pass
"""
STEPS = [
    ("action, 0.25, False", ("go", 0.25, False)),
    ("None, True, True", ("", 1.0, True)),
    ("[1], 0, 1", ("[1]", 0.0, True)),
    ("action, 1, False, {}", ("go", 1.0, False)),
    ("action, 1, False, False, {}", ("go", 1.0, False)),
    ("action, 1, True, False, {}", ("go", 1.0, True)),
    ("action, 1, False, True, {}", ("go", 1.0, True)),
    ("numpy.str_('a'), torch.tensor(1), numpy.bool_(True)", ("a", 1.0, True)),
]


def game(file, returned):
    return load_environments(f"{file('import numpy, torch' + GYM.replace('RETURNED', returned))}:Text", "")


@pytest.mark.parametrize(("returned", "step"), STEPS)
def test_a_class_with_step_is_a_text_game_without_tools(file, returned, step):
    environments = game(file, returned)
    assert (environments.is_text_game, environments.has_reward, environments.schemas) == (True, True, [])
    episode = Episode(environments, {"prompt": "p"}, 7)
    assert episode.reset() == "You see a door."
    assert episode.environment.seed == 7
    assert episode.step("go") == step
    assert episode.get_reward() is None


@pytest.mark.parametrize("returned", ["action", "(action, 1)", "(action, 1, 'no')", "None", "(1, 2, 3, 4)"])
def test_what_no_step_returns_is_refused(file, returned):
    refused(
        r"^--env: step returned .*; a text game returns \(observation, reward, done\), and a tool needs a",
        begun(game(file, returned)).step,
        "go",
    )


def test_a_wrong_reward_and_an_error_of_a_step_are_told(file):
    says = "^--env: the reward of step is nan"
    refused(says, begun(game(file, "action, float('nan'), True")).step, "go")
    says = r"^--env: step: ZeroDivisionError: division by zero at .*game\.py:\d+; correct"
    refused(says, begun(game(file, "1 / 0")).step, "go")


def test_an_async_step_that_never_ends_hangs(file):
    body = "async def step(self, text):\n    import asyncio\n    await asyncio.Event().wait()"
    episode = begun(of_class(file, body))
    assert isinstance(run_all([partial(episode.step, "a")], 0.1, [episode.worker])[0], Hung)


# ---------------------------------------------------------------- what is refused at the start


METHOD = "def f(self, {}):\n    '''Add.\n\n    Args:\n        x: A number.\n    '''"
WRONG = [  # (body of the class, what is said)
    (
        "def f(self, x: int): pass",
        "Game: f: .* no docstring.*; a tool needs a docstring, a type for each param",
    ),
    (METHOD.format("x"), "Game: f: .*missing a type hint.*; a tool needs"),
    (METHOD.format("x: int, y: int"), "Game: f: .*no description for the argument 'y'.*begins with _"),
    (METHOD.format("x: 'Nowhere'"), "Game: f: NameError: name 'Nowhere' is not defined; a tool"),
    (METHOD.format("x: int, /"), "Game: f: a call names each argument, which x: int does not allow"),
    (METHOD.format("*x: int"), r"Game: f: a call names each argument, which \*x: int does not allow"),
    ("pass", "Game: Game has no public method: each tool is one, with a docstring"),
    ("def reset(): pass", "Game: reset: ValueError: invalid method signature"),
    (
        "def step(self, text): pass\ndef get_reward(self): return 0",
        "Game: step: .* no docstring.*; a tool needs",
    ),
    ("def __init__(self, x): pass", "Game: it is called without arguments, but 'x' has no default"),
    ("def __init__(self):\n    1 / 0", r"Game: ZeroDivisionError: division by zero at .*game.py:3; correct"),
]


@pytest.mark.parametrize(("body", "says"), WRONG, ids=range(len(WRONG)))
def test_classes_that_are_refused(file, body, says):
    refused(rf"^--env \S*{says}", of_class, file, body)


def test_beside_get_reward_step_is_a_tool(file):
    """As TRL has it."""
    body = METHOD.format("x: int").replace("def f", "def step") + "\ndef get_reward(self):\n    return 1"
    environments = of_class(file, body)
    assert (environments.is_text_game, environments.methods) == (False, ["step"])


def test_flags_that_are_refused(file, tmp_path):
    path, game = tool_file(file), file(GAME)
    for env, tools, says in (
        (
            f"{tmp_path}/no.py:Game",
            "",
            r"^--env .*no\.py:Game: no such file, or no name behind it; write it as pa",
        ),
        ("Game", "", "^--env Game: no such file"),
        (f"{game}:Other", "", r"^--env .*game\.py: has no function or class 'Other'"),
        ("", f"{path}:f,other", r"^--tools .*tools\.py: has no function or class 'other'"),
        ("", f"{path}:f,f", r"^--tools .*tools\.py:f: there is another tool of this name; rename one"),
        ("", f"{path}:h", r"^--tools .*tools\.py:h: .*no docstring"),
        (
            file(GYM.replace("RETURNED", "1"), "t.py") + ":Text",
            f"{path}:f",
            "^--tools: .*t.py:Text has a step",
        ),
        (
            f"{game}:Game",
            file("def look() -> int:\n    'Look.'\n", "u.py") + ":look",
            "Game: look: there is ano",
        ),
        (file("import nowhere\n", "v.py") + ":Game", "", r"^--env .*v\.py: importing it failed: .*nowhere"),
    ):
        refused(says, load_environments, env, tools)


# ---------------------------------------------------------------- threads

SQL = '''
import sqlite3, threading
class Data:
    def reset(self, number):
        self.table = sqlite3.connect(":memory:")
        self.table.execute(f"create table t as select {number} as n")
    def query(self, sql: str) -> list:
        """Ask the table.

        Args:
            sql: A query.
        """
        return self.table.execute(sql).fetchall()
'''


def test_what_is_open_in_one_thread_only_stays_usable(file):
    """A connection of sqlite3, of its environment alone."""
    environments = load_environments(f"{file(SQL)}:Data", "")
    episodes = [Episode(environments, {"number": n}, 0) for n in range(3)]
    workers = [episode.worker for episode in episodes]
    assert run_all([episode.reset for episode in episodes], 5, workers) == [None] * 3
    for _ in range(2):
        jobs = [partial(episode.call, "query", {"sql": "select n from t"}) for episode in episodes[1:]]
        assert run_all(jobs, 5, workers[1:]) == ["[[1]]", "[[2]]"]
    [error] = run_all([partial(episodes[0].call, "query", {"sql": "select"})], 5, workers[:1])
    assert said(episodes[0], "query", {"sql": "select"}) == "OperationalError: incomplete input"
    assert torch.is_grad_enabled() and threading.active_count() < 50 and error
