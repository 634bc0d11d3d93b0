"""The calls in a turn's text: each form, and all that a model can write instead."""

import json
import warnings

import pytest
from tiny import word_tokenizer

from trainer.environments.tool_calls import (
    DEEPEST,
    BadCall,
    Call,
    CallError,
    Turn,
    error_result,
    read_turn,
)

TOKENIZER = word_tokenizer("ab")
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CALL = Call("add", {"a": 1, "b": 2})
NONE = Call("now", {})


def tagged(text):
    return f"<tool_call>\n{text}\n</tool_call>"


def read(text, before=""):
    return read_turn(TOKENIZER, text, before)


TURNS = [  # (text, content, calls, thought)
    ("no call", "no call", [], ""),
    ("", "", [], ""),
    (tagged(ADD), "", [CALL], ""),
    (f"<tool_call>{ADD}</tool_call>", "", [CALL], ""),
    (f"So:\n{tagged(ADD)}\nand\n{tagged(ADD)} end", "So:\n\nand\n end", [CALL, CALL], ""),
    (tagged(f"[{ADD}, {ADD}]"), "", [CALL, CALL], ""),
    (tagged('{"function": ' + ADD + ', "type": "function"}'), "", [CALL], ""),
    (tagged('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'), "", [CALL], ""),
    (tagged('{"name": "add", "parameters": {"a": 1, "b": 2}}'), "", [CALL], ""),
    (tagged('{"name": "now"}'), "", [NONE], ""),
    (tagged('{"name": "now", "arguments": null}'), "", [NONE], ""),
    (tagged('{"name": "say", "arguments": {"x": "é\\ud83d\\ude00"}}'), "", [Call("say", {"x": "é😀"})], ""),
    (
        tagged('{"name": "say", "arguments": {"x": "</tool_call><think>"}}'),
        "",
        [Call("say", {"x": "</tool_call><think>"})],
        "",
    ),
    # as Hermes' data has it
    (tagged("{'arguments': {'a': 1, 'b': 2}, 'name': 'add'}"), "", [CALL], ""),
    (tagged("[{'name': 'now', 'arguments': None}, {'name': 'now'}]"), "", [NONE, NONE], ""),
    (tagged("{'name': 'say', 'arguments': {'x': \"it's \\d\"}}"), "", [Call("say", {"x": r"it's \d"})], ""),
    # the whole turn, as Llama 3 writes it
    ('{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [CALL], ""),
    (f"<think>a</think>\n\n{ADD}\n", "", [CALL], "a"),
    (f"So {ADD}", f"So {ADD}", [], ""),
    (f"<think>{ADD}</think>", "", [], ADD),
    ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", [CALL], ""),
    (tagged("{'name': 'say', 'arguments': {'x': (1, {2: 3})}}"), "", [Call("say", {"x": [1, {"2": 3}]})], ""),
    ('{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', [], ""),
    ('{"name": "add", "parameters": {', '{"name": "add", "parameters": {', [], ""),
    # thoughts
    (f"<think>\nI call {tagged(ADD)}\n</think>\n\nNo.", "No.", [], f"I call {tagged(ADD)}"),
    (f"<think>a</think>{tagged(ADD)}<think>b</think>c", "c", [CALL], "a\nb"),
    (f"<think>{tagged(ADD)}", "", [], tagged(ADD)),
    (f"I call {tagged(ADD)}", "I call", [CALL], ""),
    (f"the prompt opened it</think>{tagged(ADD)}", "", [CALL], "the prompt opened it"),
    ("<think>\n\n</think>\n\nYes", "Yes", [], ""),
    (f"a</think>b</think>{tagged(ADD)}", "b", [CALL], "a"),
]


@pytest.mark.parametrize(("text", "content", "calls", "thought"), TURNS, ids=range(len(TURNS)))
def test_a_turn_is_read_as_content_calls_and_thought(text, content, calls, thought):
    assert read(text) == Turn(content, calls, thought)


def test_a_thought_that_the_prompt_opened_is_one():
    text = f"hm {tagged(ADD)}"
    assert read(text, "<|im_start|>assistant\n<think>\n") == Turn("", [], text)
    assert read(f"{text}</think>x", "…<think>\n") == Turn("x", [], text)
    assert read(text, "<think>\n\n</think>\n\n").calls == [CALL]


DEEP = "[" * 40 + "]" * 40
BROKEN = [  # (text, what is said)
    ("{", "no JSON in a call: JSONDecodeError: Expecting property name"),
    ("", "no JSON in a call: JSONDecodeError: Expecting value"),
    ("add(1, 2)", "no JSON in a call"),
    ("{'name': add}", "no JSON in a call"),
    ("{'name': 'add', 'arguments': {'a': {1}}}", "no JSON in a call"),
    ("{'name': 'add', 'arguments': {'a': b'x'}}", "no JSON in a call"),
    ("{'name': 'add', 'arguments': (1, 2)}", '"arguments" of add must be an object'),
    ("{'a'}", "no JSON in a call"),
    (ADD + ADD, "more than one JSON value in a call"),
    (ADD + " }", "more than one JSON value in a call"),
    ("[]", "a call is empty"),
    ("3", 'a call has no "name"'),
    ('"add"', 'a call has no "name"'),
    ('{"arguments": {}}', 'a call has no "name"'),
    ('{"function": "add"}', 'a call has no "name"'),
    ('{"name": 3}', 'the "name" of a call is no text'),
    ('{"name": ""}', 'the "name" of a call is no text'),
    ('{"name": "add", "arguments": [1, 2]}', '"arguments" of add must be an object'),
    ('{"name": "add", "arguments": 3}', '"arguments" of add must be an object'),
    ('{"name": "add", "arguments": "a=1"}', '"arguments" of add: JSONDecodeError'),
    ('{"name": "add", "arguments": {"a": NaN}}', "no JSON in a call: ValueError: NaN is no JSON"),
    ('{"name": "add", "arguments": "[Infinity]"}', '"arguments" of add: ValueError: Infinity is no JSON'),
    ('{"name": "add", "arguments": {"a": "\\ud800"}}', '"arguments" of add: UnicodeEncodeError'),
    ('{"name": "a\\ud800", "arguments": {}}', '"arguments" of a?: UnicodeEncodeError'),
    ('{"name": "add", "arguments": {"a": ' + DEEP + "}}", '"arguments" of add: ValueError: more than 32 lev'),
    ("[" * 100_000, "no JSON in a call: RecursionError"),
    ("9" * 10_000, "no JSON in a call: ValueError: Exceeds the limit"),
    (f"<tool_call>{ADD}", "no JSON in a call"),
]


@pytest.mark.parametrize(("text", "says"), BROKEN, ids=range(len(BROKEN)))
def test_a_call_that_cannot_be_read_is_one_with_its_error_and_stays_in_the_content(text, says):
    """The next one counts."""
    turn = read(f"a {tagged(text)}{tagged(ADD)}")
    broken, good = turn.calls
    assert isinstance(broken, BadCall)
    assert broken.error.startswith(says)
    assert good == CALL
    assert turn.content == f"a {tagged(text)}"


def test_a_whole_turn_is_a_call_of_a_tool_only():
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = '{"name": "Ann", "parameters": {}}'
    assert read(text) == Turn("", [Call("Ann", {})], "")
    assert read_turn(TOKENIZER, text, tools=tools) == Turn(text, [], "")
    assert read_turn(TOKENIZER, ADD, tools=tools) == Turn("", [CALL], "")
    broken = '{"name": "add", "parameters": [1]}'
    turn = read(broken)
    assert isinstance(turn.calls[0], BadCall) and turn.content == broken


def test_a_text_of_python_warns_of_nothing():
    with warnings.catch_warnings(action="error"):
        assert read(tagged("{'name': 'say', 'arguments': {'x': '\\d'}}")).calls == [Call("say", {"x": r"\d"})]


def test_calls_are_as_deep_as_what_renders_them_can_bear():
    def nested(levels):
        return json.dumps({"name": "f", "arguments": {"x": levels * "["}}).replace(
            f'"{levels * "["}"', levels * "[" + levels * "]"
        )

    [call] = read(tagged(nested(DEEPEST - 1))).calls
    assert isinstance(call, Call)
    [call] = read(tagged(nested(DEEPEST))).calls
    assert isinstance(call, BadCall)


def test_a_list_with_a_broken_call_has_the_others_too():
    turn = read(tagged(f"[{ADD}, 3]"))
    assert turn.calls[0] == CALL and isinstance(turn.calls[1], BadCall) and len(turn.calls) == 2
    assert turn.content == tagged(f"[{ADD}, 3]")


def test_a_call_that_is_not_closed_is_none():
    for text in (f"<tool_call>{ADD}", "<tool_call>\n{", "<tool_call>", f"<tool_call>{ADD}</tool_cal"):
        turn = read(f"a {text}")
        assert [call.error.partition(";")[0] for call in turn.calls] == ["</tool_call> is missing"]
        assert turn.content == f"a {text}"
    # The first one swallows the second: what stands in it was not meant as a call of its own
    [call] = read(f"<tool_call>{ADD}\n{tagged(ADD)}").calls
    assert call.error.startswith("more than one JSON value in a call; write {")


def test_what_answers_a_call_that_failed():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    errors = [
        BadCall("é"),
        CallError("add: x"),
        ValueError("a\nb"),
        KeyError("k"),
        Mute(),
        ValueError("\ud800"),
    ]
    said = ["é", "add: x", "ValueError: a b", "KeyError: 'k'", "Mute", "ValueError: ?"]
    assert [error_result(error) for error in errors] == [
        json.dumps({"error": text}, ensure_ascii=False) for text in said
    ]


# ---------------------------------------------------------------- the tokenizer's own format

TEMPLATE = {  # calls as <<name {…}>>
    "defaults": {"role": "assistant"},
    "start_anchor": "<start>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<<(?P<name>\w+) ",
            "close_pattern": ">>(</s>)?",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}


def test_a_tokenizer_with_a_response_template_reads_its_own_format():
    tokenizer = word_tokenizer("ab")
    tokenizer.response_template = TEMPLATE
    before = "<start>user\nx<start>assistant\n"

    def read(text, before=before):
        return read_turn(tokenizer, text, before)

    assert read('So <<add {"a": 1, "b": 2}>>') == Turn("So", [CALL], "")
    assert read('<think>t</think><<now {}>> <<add {"a": 1, "b": 2}>>') == Turn("", [NONE, CALL], "t")
    assert read("hm <<now {}>></think>No", f"{before}<think>") == Turn("No", [], "hm <<now {}>>")
    assert read(tagged(ADD)) == Turn(tagged(ADD), [], "")  # not its format
    assert read("") == Turn("", [], "")
    broken = read("So <<add {>>")
    assert broken.content == "So <<add {>>"
    assert broken.calls[0].error.startswith("a call cannot be read: ")
    assert read("<<add [1]>>").calls == [BadCall('"arguments" of add must be an object, {"name": value}')]


def with_calls(**field):
    """A tokenizer with another form of calls."""
    tokenizer = word_tokenizer("ab")
    transform = {"function": {"name": "{name}", "arguments": "{content}"}}
    fields = {"tool_calls": {"transform": transform, **field}, "content": {"content": "text"}}
    tokenizer.response_template = TEMPLATE | {"fields": fields}
    return tokenizer


def test_a_call_may_end_with_the_token_that_ends_the_turn_as_llamas():
    opening = r'\{"name": "(?P<name>\w+)", "parameters": '
    tokenizer = with_calls(open_pattern=opening, close="}</s>", content="json")
    assert read_turn(tokenizer, '{"name": "add", "parameters": {"a": 1, "b": 2}}') == Turn("", [CALL], "")
    assert read_turn(tokenizer, "text") == Turn("text", [], "")


def test_arguments_that_are_texts_are_converted_by_the_schemas():
    pattern = {"tag_pattern": r"(?P<key>\w+)=(?P<value>\w+)"}
    tokenizer = with_calls(
        open_pattern=r"<<(?P<name>\w+) ", close=">>", content="xml-inline", content_args=pattern
    )
    number = {"type": "integer"}
    schema = {"name": "add", "parameters": {"properties": {"a": number, "b": number}}}
    turn = read_turn(tokenizer, "<<add a=1 b=2>>", tools=[{"type": "function", "function": schema}])
    assert turn == Turn("", [CALL], "")


def test_any_text_is_read_without_an_error():
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", ADD, "{", "x", " ", '"']
    state = 1
    for _ in range(3000):
        text = ""
        for _ in range(8):
            state = (state * 1103515245 + 12345) % 2**31
            text += pieces[(state >> 16) % len(pieces)]
        turn = read(text)
        assert all(isinstance(call, Call | BadCall) for call in turn.calls)
        assert len(turn.calls) <= max(text.count("<tool_call>"), turn.content == "")
        assert all(call in (CALL,) or isinstance(call, BadCall) for call in turn.calls)


def test_calls_are_not_read_slowly():
    """A turn of a thousand broken calls."""
    assert len(read("<tool_call>{" * 1000).calls) == 1
    assert len(read(tagged("{") * 1000).calls) == 1000
