"""Every form of record that docs/data.md names, as a prompt, a demonstration, a pair or a rated answer."""

import json

import pytest
from tiny import ROOT, assistant, refused, user

from dataset import formats
from dataset.answers import comparable
from dataset.chat_template import conversation_text, prompt_text, unmark
from dataset.formats import Keys, named, to_demonstration, to_messages, to_pair, to_prompt, to_rated


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


S = {"role": "system", "content": "short"}
U = user("hi")
A = assistant("5")
AND = user("and?")
THOUGHT = "<think>\nso\n</think>\n\n5"
MORE = [assistant("1"), AND, A]
HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "5"}
BOT = {"from": "bot", "value": "5"}
TALK = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 2 + 3"
ASKED = f"{TALK}\n\nAssistant:"
SAID = f"{ASKED} 5"
NESTED = {"extra_info": {"question": "hi", "answer": "5"}, "prompt": "another", "answer": "another"}
VERL = {"data_source": "openai/gsm8k", "prompt": [U], "extra_info": {"answer": "so\n#### 72"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLS = [
    U,
    assistant(None, tool_calls=[CALL]),
    {"role": "tool", "content": "22", "tool_call_id": "1"},
    assistant("Let me see.", tool_calls=[CALL]),
    {"role": "tool", "content": parts("23")},
    assistant("5", tool_calls=None),  # as tables have it, where another record has a call
]
OBSERVED = [HUMAN, {"from": "function_call", "value": '{"name": "f"}'}]
OBSERVED += [{"from": "observation", "value": "22"}, GPT]
FUNCTION = [U, assistant(None, function_call={"name": "f"}), {"role": "function", "content": "2"}, A]


def called(name, before=""):
    return assistant(f'{before}<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')


def tool(text):
    return {"role": "tool", "content": text}


CALLED = [U, called("weather"), tool("22"), called("weather", "Let me see.\n"), tool("23")]
FORMS = {  # name: (record, prompt, answer), beside the examples of docs/data.md
    "minimind without roles": ({"conversations": [{"content": "hi"}, {"content": "5"}]}, [U], "5"),
    "minimind placeholder": ({"conversations": [U, assistant("无")]}, [U], None),
    "roles in capitals": ({"messages": [{"role": "User", "content": "hi"}, BOT | {"from": "AI"}]}, [U], "5"),
    "turns as text": ({"messages": json.dumps([U, A], indent=1)}, [U], "5"),
    "a text of JSON": ({"prompt": '[{"role": 1'}, '[{"role": 1', None),
    "a thought": ({"messages": [U, assistant("5", reasoning_content="\nso\n")]}, [U], THOUGHT),
    "openai's parts": ({"messages": [{"role": "user", "content": parts("h", "i")}, A]}, [U], "5"),
    "openai's tools": ({"messages": CALLS}, CALLED, "5"),
    "openai's tools, before there were such": ({"messages": FUNCTION}, [U, called("f"), tool("2")], "5"),
    "sharegpt's tools": ({"conversations": OBSERVED}, [U, called("f"), tool("22")], "5"),
    "the only answer of a list": ({"prompt": "hi", "answer": [5]}, "hi", "5"),
    "turns with no answer beside them": ({"messages": [U, A], "answer": []}, [U], "5"),
    "a completion of turns is added": (
        {"prompt": "hi", "answer": None, "completion": MORE},
        [U, *MORE[:2]],
        "5",
    ),
    "an answer is what it is": ({"prompt": "is there any?", "answer": "无"}, "is there any?", "无"),
    "an answer that is no text": ({"prompt": "hi", "images": [], "answer": {"x": "ü"}}, "hi", '{"x": "ü"}'),
    "hh ending with a question": ({"text": TALK}, ASKED, None),
    "hh with the beginning of the answer": ({"prompt": f"{ASKED} So", "answer": " 5"}, f"{ASKED} So", " 5"),
    "alpaca with no input key": ({"instruction": "hi", "output": "5"}, "hi", "5"),
    "alpaca of llama-factory": (
        {"instruction": "and?", "output": "5", "system": " short ", "history": [["hi", "1"]]},
        [S, U, *MORE[:2]],
        "5",
    ),
    "alpaca with empty columns": (
        {"instruction": "hi", "output": "5", "system": "", "history": []},
        "hi",
        "5",
    ),
    "sharegpt's system": ({"conversations": [HUMAN, GPT], "system": "short"}, [S, U], "5"),
    "two system messages": ({"messages": [S, U, A], "system": "long"}, [S, U], "5"),
    "a system message before turns without roles": (
        {"messages": [S, {"content": "hi"}, {"content": "5"}]},
        [S, U],
        "5",
    ),
    "an empty column beside a conversation": ({"messages": [U, A], "output": ""}, [U], "5"),
}


NAMED = {  # name: (record, keys, prompt, answer)
    "both": ({"problem": "hi", "solution": "5"}, Keys("problem", "solution"), "hi", "5"),
    "paths": (NESTED, Keys("extra_info.question", "extra_info.answer"), "hi", "5"),
    "a turn": ({"prompt": "hi", "gold": [A]}, Keys("", "gold"), [U], "5"),
    "no text, beside turns": ({"messages": [U, A], "gold": {"x": 6}}, Keys("", "gold"), [U], '{"x": 6}'),
    "a list of one, beside turns": ({"messages": [U, A], "gold": ["6"]}, Keys("", "gold"), [U], "6"),
    "the prompt beside no text": ({"q": [U], "answer": {"x": 5}}, Keys("q"), [U], '{"x": 5}'),
    "a name with a dot": ({"a.b": "hi", "a": {"b": "no"}}, Keys("a.b"), "hi", None),
}


def read(form, record, keys=formats.BY_FORM):
    return form(named(record, keys))


@pytest.mark.parametrize("name", [*FORMS, *NAMED])
def test_prompts(name):
    record, *keys, prompt, answer = NAMED.get(name) or FORMS[name]
    before = json.dumps(record)
    assert read(to_prompt, record, *keys) == (prompt, answer)
    if answer is not None:
        assert read(to_demonstration, record, *keys) == (prompt, answer)
    assert json.dumps(record) == before


LISTS = (  # (a list of answers, what a prompt gets of it)
    (["5", "ü"], ["5", "ü"]),
    ([5, 0.5, "so\n#### 72", True], ["5", "0.5", "72", "true"]),
    (["", "5", None], "5"),
    ([["5"]], "5"),
    ([], None),
    ([""], None),
)
SEVERAL = r"an answer is a list of \d texts, where one is needed; write one in each line"


def test_a_list_is_several_right_answers_to_compare_with_and_none_to_learn():
    for several, right in LISTS:
        for record in ({"prompt": [U], "answer": several}, {"messages": [U], "output": several}):
            assert to_prompt(record) == ([U], right)
            assert to_prompt({"q": [U], **record, "gt": several}) == ([U], right)
        assert read(to_prompt, {"conversations": [U], "gt": several}, Keys(answer="gt")) == ([U], right)
        assert to_prompt(VERL | {"reward_model": {"ground_truth": several}}) == ([U], right)
        if len(several) != 1:  # one text is learned as if it were no list
            refused(SEVERAL, to_demonstration, {"prompt": [U], "answer": several})
            refused(SEVERAL, to_rated, {"prompt": "hi", "answer": several, "score": 1})
            refused(SEVERAL, to_pair, {"prompt": "hi", "chosen": several, "rejected": "5"})
            refused(SEVERAL, to_pair, {"prompt": "hi", "chosen": "5", "rejected": several})
    beside = {"messages": [U, A], "gt": ["5", "five"]}
    assert to_prompt(beside) == to_demonstration(beside) == ([U], "5")
    beside["answer"] = beside["gt"]  # the turns are learned, and the list is compared with
    assert (to_prompt(beside), to_demonstration(beside)) == (([U], ["5", "five"]), ([U], "5"))
    refused(SEVERAL, lambda record: read(to_demonstration, record, Keys(answer="gt")), beside)


SOLUTIONS = {
    "6*12 = <<6*12=72>>72\n#### 72": "72",
    "so\n#### 1,240": "1240",
    "so\n#### $-2.50\n": "-2.50",
    "#### 1. Data\n#### 2. Tools": "#### 1. Data\n#### 2. Tools",  # headings
    "#### 72 eggs": "#### 72 eggs",
}


def test_of_a_solution_the_final_number_is_the_answer_and_all_of_it_is_learned():
    for solution, answer in SOLUTIONS.items():
        record = {"question": "hi", "answer": solution}
        assert to_prompt(record) == ("hi", answer)
        assert to_demonstration(record) == ("hi", solution)
        assert to_prompt(named({"q": "hi", "a": solution}, Keys(prompt="q", answer="a"))) == ("hi", answer)
        assert to_prompt(VERL | {"reward_model": {"ground_truth": solution}}) == ([U], answer)


def test_verls_ground_truth():
    """It is the answer to compare with, as JSON if it is no text, and never an answer to learn."""
    for truth, answer in (("72", "72"), ({"x": "ü"}, '{"x": "ü"}'), (None, None)):
        record = VERL | {"reward_model": {"style": "rule", "ground_truth": truth}}
        assert to_prompt(record) == ([U], answer)
        refused(r"no answer to learn from .*; keys found: .*--answer_key", to_demonstration, record)
        assert to_prompt({**record, "answer": "5"}) == ([U], "5")
        assert to_prompt({**record, "reward_model": "a name"}) == ([U], None)


SHORT = ("72", " -1,240.5 ", "C", "Ada Lovelace", r"\frac{1}{2}", "苹果", "1" * 60)  # a number of any length
LONG = ("one\ntwo", "It is late, and so I go home.", "苹果是一种水果，" * 6)


def test_an_answer_that_a_response_can_equal_is_a_number_or_a_few_words():
    assert [comparable(text) for text in SHORT + LONG] == [True] * len(SHORT) + [False] * len(LONG)


WHOLE = [U, *MORE]
BEGUN = {"prompt": [A, U], "chosen": [A, U, A], "rejected": [A, U, assistant("6")]}
PAIRS = {  # name: (record, prompt, chosen, rejected)
    "explicit": ({"prompt": "hi", "chosen": "5", "rejected": "6"}, "hi", "5", "6"),
    "implicit, turns": ({"chosen": [U, A], "rejected": [U, assistant("6")]}, [U], "5", "6"),
    "the answer begins a repeated prompt": (BEGUN, [A, U], "5", "6"),
    "sharegpt": ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "6"}}, [U], "5", "6"),
    "a prompt with blanks": ({"prompt": "hi ", "chosen": [U, A], "rejected": [U, A]}, [U], "5", "5"),
    "the last question": ({"prompt": "and?", "chosen": WHOLE, "rejected": WHOLE}, WHOLE[:3], "5", "5"),
    "a system message beside it": (
        {"prompt": [U], "system": "short", "chosen": [A], "rejected": [assistant("6")]},
        [S, U],
        "5",
        "6",
    ),
    "one system message": ({"prompt": [S, U], "chosen": [U, A], "rejected": [S, U, A]}, [S, U], "5", "5"),
    "hh": ({"chosen": SAID, "rejected": f"{ASKED} 6"}, ASKED, "5", "6"),
    "an empty answer": ({"chosen": SAID, "rejected": f"{ASKED} "}, ASKED, "5", ""),
    "no text": ({"prompt": "hi", "chosen": ["5"], "rejected": 6}, "hi", "5", "6"),
}
KEYS = Keys("q.text", chosen="good", rejected="bad")


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    record, prompt, chosen, rejected = PAIRS[name]
    assert to_pair(record) == ([(prompt, chosen), (prompt, rejected)], 0.0)
    assert to_pair({**record, "margin": 2})[1] == 2.0
    assert to_prompt(record) == to_demonstration(record) == (prompt, chosen)
    sides = {"good": record["chosen"], "bad": record["rejected"]}
    others = {key: value for key, value in record.items() if key not in ("chosen", "rejected")}
    found = named(others | sides, Keys(chosen="good", rejected="bad"))
    assert to_pair(found) == to_pair(record)


def test_rated_answers_and_sides_with_prompts_of_their_own():
    both_asked = f"{TALK} one\n\nAssistant:", f"{TALK} two\n\nAssistant:"  # as a few pairs of HH-RLHF
    record = {"chosen": f"{both_asked[0]} 5", "rejected": f"{both_asked[1]} 5"}
    assert to_pair(record)[0] == [(asked, "5") for asked in both_asked]
    record = {"user_input": "hi", "completion": "5", "score": "4.5"}  # ChatLLaMA's own files quote it
    assert to_rated(record) == ([("hi", "5")], 4.5)
    assert to_rated({"prompt": [U], "answer": "5", "score": -1}) == ([([U], "5")], -1.0)
    assert to_rated({"prompt": "hi", "answer": "5", "score": True}) == ([("hi", "5")], 1.0)
    assert to_rated(named({"q": "hi", "a": "5", "score": 2}, Keys("q", "a"))) == ([("hi", "5")], 2.0)
    both = {"score": 2, "q": {"text": "hi"}, "good": "a", "bad": "b"}
    assert not formats.is_pair(both) and formats.is_pair(named(both, KEYS))


def test_a_transcript_is_turns_for_who_has_a_template_and_text_for_who_has_not(chat, plain):
    turns = [U, assistant("yes?"), user("2 + 3")]
    assert to_messages(ASKED) == turns
    asked = chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt_text(chat, ASKED) == asked
    assert prompt_text(plain, ASKED) == ASKED
    whole = chat.apply_chat_template([*turns, A], tokenize=False)
    assert unmark(conversation_text(chat, ASKED, "5")) == whole
    assert conversation_text(plain, ASKED, "5") == SAID  # as HH has it
    twice = "\n\nHuman: hi\n\nHuman: there\n\nAssistant: 5\n\nAssistant: 6\n\nHuman: so"
    assert to_messages(twice) == [user("hi\n\nthere"), assistant("5\n\n6"), user("so")]
    for text in ("Human: a word in a text", "he said\n\nHuman: hi\n\nAssistant:"):  # no transcripts
        assert to_messages(text) == [user(text)]


NO_TEXT = 'turn 1 of the conversation has no text "content"'
SIDE = "must be an answer to a prompt"
BAD = [  # (reader, record, what is said[, keys])
    (to_prompt, {"instruction": "hi", "response": "5"}, 'no prompt .*keys found: "instruction", "response"'),
    (to_prompt, {"instruction": " ", "input": "", "output": "5"}, "prompt is empty"),
    (to_prompt, {"prompt": " \n", "answer": "5"}, "prompt is empty"),
    (to_demonstration, {"prompt": [user(" ")], "answer": "5"}, "prompt is empty"),
    (to_prompt, {"messages": [S, A]}, "prompt is empty, or only a system message; fill it in"),
    (to_prompt, {"messages": [S, user(" ")]}, "or only a system message"),
    (to_demonstration, {"messages": [S, A]}, "or only a system message"),
    (to_rated, {"prompt": [S], "completion": "5", "score": 1}, "or only a system message"),
    (to_pair, {"prompt": [S], "chosen": "5", "rejected": "6"}, f'"chosen" {SIDE}'),
    (to_prompt, {"text": 3}, "must be text or a list of"),
    (to_prompt, {"messages": ["hi"]}, NO_TEXT),
    (to_prompt, {"conversations": []}, "not empty"),
    (to_prompt, {"conversations": [A]}, "prompt is empty"),
    (to_prompt, {"messages": [{"role": 3, "content": "hi"}]}, 'turn 1 .* "role" that is no text'),
    (to_prompt, {"messages": [assistant(None, tool_calls=[])]}, NO_TEXT),
    (to_demonstration, {"prompt": "hi", "answer": " "}, "no answer to learn from"),
    (to_demonstration, {"messages": CALLS[:3]}, r"no answer to learn from \(the result of a tool is none\)"),
    (to_pair, {"prompt": "hi", "chosen": "5"}, 'no "rejected"; keys found: "prompt", "chosen".*--rejected_k'),
    (to_pair, {"prompt": "", "chosen": "5", "rejected": "6"}, f'"chosen" {SIDE}'),
    (to_pair, {"prompt": " ", "chosen": "5", "rejected": "6"}, f'"chosen" {SIDE}'),
    (to_pair, {"chosen": SAID, "rejected": "6"}, f'"rejected" {SIDE}'),
    (to_pair, {"chosen": [A], "rejected": [A]}, f'"chosen" {SIDE}'),
    (to_pair, {"prompt": "hi", "chosen": "5", "rejected": "6", "margin": 10**400}, '"margin" must be'),
    (to_pair, {"prompt": "hi", "chosen": "5", "rejected": "6", "margin": None}, '"margin" must be'),
    (to_rated, {"user_input": "hi", "completion": "5"}, 'no rated answer; keys found: "user_input"'),
    (to_rated, {"user_input": "hi", "completion": "5", "score": "nan"}, '"score" must be'),
    (to_prompt, {"problem": "hi", "x": 1}, r'no "q" \(--prompt_key\); keys found: "problem", "x"', Keys("q")),
    (to_prompt, {"q": None}, r'no "q" \(--prompt_key\)', Keys("q")),
    (to_prompt, {"q": {"x": "hi"}}, r'no "q\.y" \(--prompt_key\); keys found: "q"$', Keys("q.y")),
    (to_demonstration, {"q": "hi", "a": [U]}, 'to learn .* found: "q", "a": end', Keys("q", "a")),
    (to_pair, {"q": {"text": "hi"}, "bad": "5"}, r"\(--chosen_key\)", KEYS),
    (to_pair, {"q": {"text": "hi"}, "good": "5"}, r"\(--rejected_key\)", KEYS),
    (to_prompt, {"messages": [user([{"type": "image_url"}])]}, f"{NO_TEXT}.*; only text can be read"),
    (to_prompt, {"prompt": "<image>hi", "images": ["a.png"]}, '"images" is not empty, and only text can be'),
    (to_pair, {"image": "a.png", "prompt": "hi", "chosen": "5", "rejected": "6"}, '"image" is not empty'),
    (to_prompt, {"messages": [user([*parts("a"), "b"])]}, f"{NO_TEXT}.*; only text can be read"),
]


def test_bad_records_are_said_in_one_line():
    for form, record, says, *keys in BAD:
        refused(says, read, form, record, *keys)
    line = formats.keys_found({f"key\n{i}": 1 for i in range(1000)})
    assert len(line) < 250 and "\n" not in line  # cut


def test_every_example_record_of_the_docs_is_read_as_their_table_says():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    records = [json.loads(line) for line in page.split("```json\n")[1].split("```")[0].splitlines()]
    assert len(records) > 12
    for record in records:
        prompt, answer = to_prompt(record)
        text = (
            prompt if isinstance(prompt, str) else [m["content"] for m in prompt if m["role"] == "user"][-1]
        )
        if "chosen" in record:
            assert to_pair(record)[0][0] == (prompt, answer) == to_demonstration(record)
        if "score" in record:
            assert to_rated(record) == ([(prompt, answer)], 4.5)
        if text.startswith("Once"):
            assert (answer, to_demonstration(record)) == (None, (None, text))
        else:
            assert "2 + 3?" in text and answer == "5"
