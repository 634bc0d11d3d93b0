"""chat.py with tools and environments: it samples what training does, what a person sees, what is refused."""

import argparse
import json
import shlex
import signal
import time

import pytest
import tiny
import torch
from test_chat import BAD, start
from tiny import assistant, refused, user, write_jsonl
from tiny_templates import QWEN, with_template
from transformers import LlamaForCausalLM

import chat
from dataset.chat_template import encode, render
from dataset.demo.make_data import build_tokenizer
from dataset.formats import TurnText
from dataset.lm_dataset import RLAIFDataset
from model.loading import load_policy
from model.saving import save_policy
from trainer.environments.conversation import MultiTurn
from trainer.environments.environment import load_environments
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.rollout import RolloutEngine

ADD = '''
import time

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    BODY
'''
GAME = """
class Game:
    def reset(self, number):
        self.number = number
        return " From 1 to 7:"

    def step(self, text):
        guess = int(text)
        if guess == self.number:
            return f"right, it was {guess}", 1.0, True
        return "higher" if guess < self.number else "lower", -0.25, False
"""
SUM = "What is two plus three?"
OTHER_SUM = "What is two plus four?"
GUESS = "Guess a number."


def sum_of(question, a, b):
    """A conversation that calls ``add``."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    result = {"role": "tool", "content": str(a + b)}
    return [user(question), assistant(TurnText("", "", [call])), result, assistant(f"It is {a + b}.")]


def game_of(number):
    """A conversation that finds the number by bisection."""
    turns = [user(f"{GUESS} From 1 to 7:")]
    low, high, guess = 1, 7, 0
    while guess != number:
        guess = (low + high) // 2
        turns.append(assistant(str(guess)))
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        turns.append(user("higher" if guess < number else "lower"))
    return turns[:-1]


def learned(tokenizer, texts):
    """A Llama that has learned these texts by heart."""
    rows = encode(tokenizer, texts)
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, given in enumerate(rows):
        ids[row, : len(given)] = labels[row, : len(given)] = torch.tensor(given)
    torch.manual_seed(0)
    sizes = {"hidden": 64, "layers": 1, "max_position_embeddings": 256}
    model = LlamaForCausalLM(tiny.llama_config(len(tokenizer), **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(200):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with tools.py, game.py, game.jsonl and two policies: adder.pth calls, player.pth plays."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "tools.py").write_text(ADD.replace("BODY", "return a + b"))
    (folder / "game.py").write_text(GAME)
    write_jsonl(folder / "game.jsonl", [{"prompt": GUESS, "number": 7}])
    write_jsonl(folder / "bad.jsonl", [3, {}])
    sums = [sum_of(SUM, 2, 3), sum_of(OTHER_SUM, 2, 4)]
    games = [game_of(number) for number in range(1, 8)]
    schemas = load_environments("", f"{folder / 'tools.py'}:add").schemas
    plain = build_tokenizer(["user"])

    def texts(tokenizer):
        return {
            "adder": [render(tokenizer, turns, tools=schemas) for turns in sums],
            "player": [render(tokenizer, turns) for turns in games],
        }

    words = [text for written in texts(with_template(plain, QWEN)).values() for text in written]
    tokenizer = with_template(build_tokenizer([word for text in words for word in text.split("<|")]), QWEN)
    for name, written in texts(tokenizer).items():
        save_policy(learned(tokenizer, written), tokenizer, folder / f"{name}.pth")
    return folder


def player(world, name="adder", record="", **flags):
    """-> ``chat.Player`` of a policy in the folder. record: as --record."""
    given = (
        {"tools": [f"{world / 'tools.py'}:add"]} if name == "adder" else {"env": f"{world / 'game.py'}:Game"}
    )
    values = {**vars(chat.parse_args([])), "model": str(world / f"{name}.pth"), "max_gen_len": 100}
    args = argparse.Namespace(**{**values, **given, **flags})
    return chat.make_speaker(args, chat.read_record(record), torch.device("cpu"))


def of_training(one, records, seed):
    """The greedy response of training's rollout to the first of these records."""
    args = argparse.Namespace(max_gen_len=100, min_gen_len=0, max_turns=8, reward_timeout=60.0)
    model = load_policy(one.name)
    turns = MultiTurn(one.turns.environments, one.tokenizer, one.endings, None, args, longest_prompt=156)
    sampler = Sampler(model)
    engine = RolloutEngine(sampler, one.tokenizer, one.endings, args, sharded=False, turns=turns)
    prompt = RLAIFDataset(records, one.tokenizer, 250, tools=turns.environments.schemas)[0]
    return engine.respond([prompt], noise_keys(seed, 0, [0]), 1.0, greedy=[True])


def same_response(talk, batch):
    assert talk.ids == batch.responses()[0]
    assert talk.context == batch.tokens[0].tolist()
    assert talk.is_action == batch.is_action[0].tolist()
    assert talk.messages == batch.dialogues[0].messages
    assert talk.finished == batch.finished[0].item()


def test_a_tool_is_run_and_the_tokens_are_those_of_training(world, tmp_path, capsys):
    one = player(world)
    for question, result in ((SUM, 5), (OTHER_SUM, 6)):
        talk = one.play(question)
        said = capsys.readouterr()
        turn, answer = said.out.split("</tool_call>\n")
        assert turn.startswith("<tool_call>") and answer == f"It is {result}.\n"
        assert said.err == f"| add: {result}\n"
        records = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": question}])
        same_response(talk, of_training(one, records, 0))
    assert one.answer(SUM) == "It is 5."


def test_a_turn_may_end_with_a_stop_string(world, tmp_path, capsys):
    """The policy's own end of a turn is then a part of the observation."""
    one = player(world, stop=["</tool_call>"])
    talk = one.play(SUM)
    assert capsys.readouterr().out.endswith("</tool_call>\nIt is 5.\n")
    records = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": SUM}])
    same_response(talk, of_training(one, records, 0))
    assert talk.is_action[talk.turn_ends[0] + 1] is False
    assert talk.ids[talk.turn_ends[0] + 1] in one.endings.eos


def test_a_game_is_played_as_in_training(world, tmp_path, capsys):
    record = str(world / "game.jsonl")
    one = player(world, "player", record)
    talk = one.play(chat.asked_by(one.record))
    said = capsys.readouterr()
    assert said.out == "4\n6\n7\n"
    assert said.err.splitlines() == [
        f"| {GUESS} From 1 to 7:",
        *("| higher", "| higher", "| right, it was 7"),
        "(score 0.5)",
    ]
    batch = of_training(one, record, 0)
    same_response(talk, batch)
    assert batch.dialogues[0].score == 0.5


def test_the_seed_decides_what_reset_draws_as_in_training(world, tmp_path, capsys):
    path = tmp_path / "drawn.py"
    drawn = GAME.replace(
        "number):", "seed):\n        import random\n        number = random.Random(seed).randint(1, 7)"
    )
    path.write_text(drawn)
    one = player(world, "player", env=f"{path}:Game")
    found = set()
    for seed in range(4):
        torch.manual_seed(seed)
        talk = one.play(GUESS)
        records = write_jsonl(tmp_path / "guess.jsonl", [{"prompt": GUESS}])
        same_response(talk, of_training(one, records, seed))
        found.add(talk.episode.environment.number)
    assert len(found) > 1


def test_the_tools_of_a_record_are_shown_in_place_of_those_of_the_class(world, tmp_path):
    path = tmp_path / "tools.py"
    path.write_text(
        "class World:\n" + ADD.replace("(a", "(self, a").replace("BODY", "return 7").replace("\n", "\n    ")
    )
    schemas = load_environments("", [f"{world / 'tools.py'}:add"]).schemas
    text = json.dumps(schemas).replace("Add.", "Sum.")
    for record, shown in (("{}", "Add."), (f'{{"tools": {text}}}', "Sum.")):
        talk = player(world, record=record, tools=[], env=f"{path}:World").play(SUM)
        assert ("Add." in talk.prompt.text, "Sum." in talk.prompt.text) == (shown == "Add.", shown == "Sum.")


def test_a_class_and_functions_together_are_the_tools(world, tmp_path):
    """As the trainer takes them."""
    path = tmp_path / "world.py"
    path.write_text("class World:\n    def get_reward(self):\n        return 1.5\n")
    talk = player(world, tools=[f"{world / 'tools.py'}:add"], env=f"{path}:World").play(SUM)
    assert talk.episode.get_reward() == 1.5 and [x["content"] for x in talk.messages[1:2]] == ["5"]


def test_each_answer_closes_its_environment(world, tmp_path):
    path = tmp_path / "closes.py"
    path.write_text("CLOSED = []\n" + GAME + "\n    def close(self):\n        CLOSED.append(self.number)\n")
    one = player(world, "player", '{"number": 3}', env=f"{path}:Game")
    for count in (1, 2):
        talk = one.play(GUESS)
        assert type(talk.episode.environment).close.__globals__["CLOSED"] == [3] * count


def test_the_output_has_the_turns_and_stderr_the_rest(world):
    flags = ["--model", world / "player.pth", "--env", f"{world / 'game.py'}:Game", "--device", "cpu"]
    process = start(*flags, "--record", json.dumps({"number": 3}))
    output, noise = process.communicate(f"{GUESS}\n{GUESS}\n", timeout=300)
    assert process.returncode == 0
    assert output == 2 * f"> {GUESS}\n4\n2\n3\n"
    game = [f"| {GUESS} From 1 to 7:", "| lower", "| higher", "| right, it was 3", "(score 0.5)"]
    assert noise.splitlines()[1:] == [*game, *game]
    process = start(*flags, "--record", world / "game.jsonl")  # its prompt is asked, and no other
    output, _ = process.communicate("", timeout=300)
    assert (process.returncode, output) == (0, "4\n6\n7\n")
    process = start(*flags, "--record", world / "game.jsonl", "--prompt", f"{GUESS} Now.")
    _, noise = process.communicate("", timeout=300)
    assert f"| {GUESS} Now. From 1 to 7:" in noise


def test_why_an_answer_has_ended(world, tmp_path, capsys):
    def noise(**flags):
        player(world, **flags).answer(SUM)
        return capsys.readouterr().err.splitlines()

    assert noise(max_turns=1) == ["| add: 5", "(turn 1 of --max_turns)"]  # run, and read by nobody
    turn = len(player(world).play(SUM).turn_ends)
    assert turn == 2
    ids = player(world).play(SUM)
    capsys.readouterr()
    first, second = ids.turn_ends
    behind = ids.is_action.index(True, first + 1)  # where the second turn begins
    assert noise(max_gen_len=first) == [f"(cut after {first} tokens)"]
    no_room = f"(cut: {behind} tokens have no room for what answers this turn)"
    assert noise(max_gen_len=behind) == ["| add: 5", no_room]
    assert noise(max_gen_len=behind + 1) == ["| add: 5", f"(cut after {behind + 1} tokens)"]
    assert noise(max_gen_len=second + 1) == ["| add: 5"]


def test_errors_and_much_text_are_shown(world, tmp_path, capsys):
    for body, shown in (
        ("raise KeyError('no luck')", """| add: {"error": "KeyError: 'no luck'"}"""),
        ("return 'x' * 10_000", "| add: " + "x" * (chat.SHOWN - 5) + " … (8005 characters more)"),
        ("return 'one' + chr(10) + 'two'", "| add: one\n| two"),
    ):
        path = tmp_path / "tools.py"
        path.write_text(ADD.replace("BODY", body))
        player(world, tools=[f"{path}:add"]).answer(SUM)
        assert capsys.readouterr().err.startswith(shown + "\n")


def test_ctrl_c_ends_a_tool_that_hangs(world, tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(ADD.replace("BODY", "print('at work'); time.sleep(600)"))
    process = start(
        "--model", world / "adder.pth", "--tools", f"{path}:add", "--prompt", SUM, "--device", "cpu"
    )
    lines = iter(process.stderr.readline, "")
    assert "at work\n" in lines
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, noise = process.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert process.returncode == 130
    assert noise == "interrupted\n"
    assert output.endswith("</tool_call>\n") and "at work" not in output


WRONG = {
    ("--tools", "{folder}/none.py:add"): "--tools .*none.py:add: no such file",
    ("--tools", "{folder}/tools.py:sub"): "has no function or class 'sub'",
    ("--env", "{folder}/game.py:Games"): "has no function or class 'Games'",
    ("--env", "{folder}/game.py:Game"): "reset's parameter 'number' is not in the record; .* --record",
    ("--env", "{folder}/game.py:Game", "--record", "{{3"): "--record {3: .*; give a JSON object",
    ("--env", "{folder}/game.py:Game", "--record", "{folder}/none.jsonl"): "none.jsonl: cannot be read",
    ("--env", "{folder}/game.py:Game", "--record", "{folder}/bad.jsonl"): "bad.jsonl:1: ",
    ("--env", "{folder}/game.py:Game", "--tools", "{folder}/tools.py:add"): "a text game, which has no tools",
    ("--tools", "{folder}/tools.py:add", "--record", "{{}}"): "--record {}: is of use only with --env",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_is_wrong_is_one_line(flags, world):
    assert not set(WRONG) & set(BAD)
    given = [flag.format(folder=world) for flag in flags]
    refused(
        WRONG[flags],
        chat.main,
        ["--model", str(world / "player.pth"), "--device", "cpu", "--prompt", GUESS, *given],
    )


def test_the_users_code_and_templates_are_refused_in_one_line(world, tmp_path):
    one = player(world, "player", '{"number": "seven"}')
    refused("step.*TypeError.*game.py:11; correct", one.play, GUESS)
    one = player(world)
    too_long = r"the prompt has \d+ tokens, .* takes 1 to 255; shorten it"
    refused(too_long, one.play, SUM * 40)
    refused(too_long, player(world, "player", '{"number": 3}').play, GUESS * 80)
    one.tokenizer.chat_template = tiny.CHAT
    refused("the chat template does not show tools", one.play, SUM)


def test_the_greedy_answers_of_an_evaluation_are_those_of_chat(world, tmp_path, capsys):
    """A run of the script evaluates the policy before its first step."""
    record = str(world / "game.jsonl")
    files = {"model": world / "player.pth", "env": f"{world / 'game.py'}:Game", "data_path": record}
    sizes = {"max_steps": 1, "batch_size": 2, "mini_batch_size": 2, "max_gen_len": 100, "num_generations": 2}
    shown = {"eval_data_path": record, "out_dir": tmp_path, "run_name": "run"}
    tiny.train(**files, **sizes, **shown)
    [talk] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("talk ")]
    greedy = tiny.read_jsonl(tmp_path / "run" / "eval_samples.jsonl")[0]["greedy"]
    one = player(world, "player", record)
    played = one.play(chat.asked_by(one.record))
    assert greedy["messages"] == played.messages
    # The last line of the run names what chat.py needs: its policy plays the first record.
    args = chat.parse_args(shlex.split(talk)[3:])
    one = chat.make_speaker(args, chat.read_record(args.record), torch.device("cpu"))
    assert one.name == str(tmp_path / "ppo_actor_64.pth") and one.limits.max_turns == 8
    assert one.play(chat.asked_by(one.record)).episode.environment.number == one.record["number"]
    # reset may ask for an answer that stands under another name.
    keyed = write_jsonl(tmp_path / "keyed.jsonl", [{"prompt": GUESS, "truth": "5"}] * 4)
    asks = tmp_path / "asks.py"
    asks.write_text(
        GAME.replace("reset(self, number):", "reset(self, answer):\n        number = int(answer)")
    )
    files |= {"data_path": keyed, "answer_key": "truth", "env": f"{asks}:Game"}
    tiny.train(**files, **sizes, out_dir=tmp_path / "keyed")
    [talk] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("talk ")]
    args = chat.parse_args(shlex.split(talk)[3:])
    one = chat.make_speaker(args, chat.read_record(args.record), torch.device("cpu"))
    assert one.record == {"answer": "5", "prompt": GUESS, "truth": "5"}
