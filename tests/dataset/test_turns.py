"""Turns as other programs write them: parts of content, calls of tools, and what is said of them."""

import pytest
from tiny import flags, run_files, save_policy_dir, train, word_tokenizer, write_jsonl

from dataset.formats import as_messages, to_demonstration, to_prompt
from errors import InputError
from trainer import train_sft


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
OPENAI = [
    turn("user", "rain?"),
    turn("assistant", None, tool_calls=[CALL]),
    turn("tool", "22", tool_call_id="1"),
    turn("assistant", "Let me see.", tool_calls=[CALL]),
    turn("tool", [{"type": "text", "text": "23"}], tool_call_id="2"),
    turn("assistant", "no", tool_calls=None),  # as tables have it, where another record has a call
]
SHAREGPT = [
    {"from": "human", "value": "rain?"},
    {"from": "function_call", "value": "{}"},
    {"from": "observation", "value": "22"},
    {"from": "gpt", "value": "no"},
]
OLDER = [  # OpenAI before there were tools
    turn("user", "rain?"),
    turn("assistant", None, function_call={"name": "weather"}),
    turn("function", "22", name="weather"),
    turn("assistant", "no"),
]


@pytest.mark.parametrize("record", [{"messages": OPENAI}, {"conversations": SHAREGPT}, {"messages": OLDER}])
def test_turns_of_tools_are_left_out(record):
    assert to_prompt(record) == to_demonstration(record) == ([turn("user", "rain?")], "no")


def test_what_is_left_when_tools_are_left_out():
    assert to_prompt({"messages": OPENAI[:2]}) == ([turn("user", "rain?")], None)
    with pytest.raises(InputError, match=r"no answer to learn from \(a call of a tool is none\)"):
        to_demonstration({"messages": OPENAI[:2]})
    with pytest.raises(InputError, match="not only of tools"):
        as_messages(OPENAI[1:3])
    with pytest.raises(InputError, match='turn 1 of the conversation has no text "content"'):
        as_messages([turn("assistant", None, tool_calls=[])])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            'turn 1 of the conversation has no text "content".*; only text can be read',
        ),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "only text can be read"),
        ([{"type": "text"}], "only text can be read"),
        (["a"], 'turn 1 of the conversation has no text "content"'),
    ],
)
def test_parts_that_are_no_text_are_named(content, says):
    with pytest.raises(InputError, match=says):
        as_messages([turn("user", content)])


def test_a_run_says_it_in_one_line(tmp_path, capsys):
    files = run_files(tmp_path)
    path = write_jsonl(tmp_path / "tools.jsonl", [{"messages": OLDER, "tools": [{}]}] * 8)
    files |= {"data_path": path, "out_dir": tmp_path / "out"}
    sizes = {"batch_size": 4, "max_steps": 1, "max_seq_len": 32}
    train(**files, **sizes, mini_batch_size=4, max_gen_len=4, critic_warmup_steps=0)
    says = f"note     {path}: tools are ignored: turns"
    assert capsys.readouterr().out.count(says) == 1
    model = save_policy_dir(tmp_path / "sft", word_tokenizer(["rain?", "no"], chat=True))
    sizes |= {"data_path": path, "eval_size": 4, "out_dir": tmp_path / "out", "device": "cpu"}
    train_sft.main(flags(**sizes, model=model))
    assert capsys.readouterr().out.count(says) == 1
