"""Records with tools: their list, calls, results. Thoughts beside answers. Where a template ends answers.

The templates here behave as those of Qwen and MiniMind, Llama 3, SmolLM2, Phi-3, Qwen3.5 and gpt-oss do."""

import json
import pickle

import pytest
import tiny
from tiny_templates import (
    ALL,
    CHANNELS,
    LLAMA,
    MINIMIND3,
    PHI,
    QWEN,
    QWEN3,
    READS,
    START,
    with_template,
)

from dataset.chat_template import conversation_text, set_template_kwargs, unmark
from dataset.formats import Keys, to_pair, to_prompt
from dataset.lm_dataset import LoggedAnswers, PreferenceDataset, RLAIFDataset, SFTDataset

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"name": "sum", "description": "It adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"x": "2 + 3"}}}
WORDS = '<tool_call>\n{"name": "sum", "arguments": {"x": "2 + 3"}}\n</tool_call>'
U, A = tiny.user("2 + 3?"), tiny.assistant("It is 5.")
RESULT = {"role": "tool", "content": "5"}
CALLED = tiny.assistant("", tool_calls=[CALL])
TALK = [U, CALLED, RESULT, A]


def rendered(tokenizer, turns, **more):
    return tokenizer.apply_chat_template(turns, tokenize=False, **more)


def learned(tokenizer, item):
    return [tokenizer.decode([i for i, m in zip(*item, strict=True) if m == side]) for side in (1, 0)]


def carried(text, tools):
    return {"conversations": [{"role": "system", "content": text, "tools": tools}, U, tiny.assistant("")]}


LISTS = {  # name: (record, the turns of its prompt)
    "minimind": (carried("", json.dumps([TOOL])), [U]),  # an empty turn that has the tools is none
    "minimind with a text": (carried("Be short.", [TOOL]), [{"role": "system", "content": "Be short."}, U]),
    "minimind in a table": ({"messages": json.dumps(carried("S", [TOOL])["conversations"])}, None),
    "a list": ({"prompt": [U], "tools": [TOOL]}, [U]),
    "a text": ({"question": "2 + 3?", "tools": json.dumps([TOOL])}, [U]),
    "texts": ({"messages": [U, A], "tools": [json.dumps(TOOL)]}, [U]),
    "functions": ({"messages": [U, A], "functions": [FUNCTION]}, [U]),
    "LLaMA-Factory's": ({"messages": [U, A], "tools": json.dumps([FUNCTION]), "functions": None}, [U]),
}
SHOWN = "no tool is run; lists of tools are shown as the chat template writes them"
HIDDEN = "no tool is run; lists of tools are left out"


@pytest.mark.parametrize("name", LISTS)
def test_the_template_gets_the_tools_of_a_record(chat, jsonl, name):
    record, turns = LISTS[name]
    turns = turns or [{"role": "system", "content": "S"}, U]
    tokenizer = with_template(chat, QWEN)
    data = RLAIFDataset(jsonl(record), tokenizer, 2000)
    assert data[0].text == rendered(tokenizer, turns, tools=[TOOL], add_generation_prompt=True)
    assert '"description": "It adds."' in data[0].text
    assert (data[0].tools, data[0].record, data.notes()) == ([TOOL], record, [SHOWN])
    for template in (ALL, None):
        plain = with_template(chat, template)
        data = RLAIFDataset(jsonl(record), plain, 2000)
        whole = template and rendered(plain, turns, add_generation_prompt=True)
        assert data[0].text == (whole or "\n".join(turn["content"] for turn in turns))
        assert data.notes() == [HIDDEN]
    data = RLAIFDataset(jsonl(record), tokenizer, 2000, "System.")
    asked = turns if turns[1:] else [{"role": "system", "content": "System."}, U]
    assert data[0].text == rendered(tokenizer, asked, tools=[TOOL], add_generation_prompt=True)


def test_tools_in_a_turn_are_found_where_the_key_of_the_prompt_is_named(chat, jsonl):
    path = jsonl({"q": carried("", [TOOL])["conversations"]})
    (prompt,) = RLAIFDataset(path, with_template(chat, QWEN), 2000, keys=Keys("q"))
    assert prompt.tools == [TOOL]


def test_no_tools_are_no_tools(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    for none in (None, [], "[]", "", "null"):
        data = RLAIFDataset(jsonl({"prompt": [U], "tools": none}), tokenizer, 2000)
        assert (data[0].text, data.notes()) == (rendered(tokenizer, [U], add_generation_prompt=True), [])
    for wrong in ("[{", ["sum"], {"name": "sum"}):
        says = r'jsonl:1: "tools" \(or "functions"\) must be a list of JSON objects'
        tiny.refused(says, RLAIFDataset, jsonl({"prompt": [U], "tools": wrong}), tokenizer, 2000)


def test_miniminds_gt_is_the_answer_where_there_is_no_other():
    for gt, right in (
        (["21"], "21"),
        (["21", "sunny"], ["21", "sunny"]),
        (21, "21"),
        ([], None),
        (None, None),
    ):
        assert to_prompt(carried("", []) | {"gt": gt})[1] == right
    assert to_prompt({"messages": [U, A], "gt": ["7"]})[1] == "It is 5."
    assert to_prompt({"prompt": [U], "answer": "5", "gt": ["7"]})[1] == "5"


def roles(call, result):
    said = {"from": call, "value": json.dumps(CALL["function"])}
    return [{"from": "human", "value": "2 + 3?"}, said, {"from": result, "value": "5"}, A]


HERMES = [U, tiny.assistant(WORDS), {"role": "tool", "content": "<tool_response>\n5\n</tool_response>"}, A]
OPENAI = {"name": "sum", "arguments": '{"x": "2 + 3"}'}
FORMS = {
    "openai": [U, tiny.assistant(None, tool_calls=[CALL | {"function": OPENAI}]), RESULT, A],
    "openai, before there were such": [U, {"role": "assistant", "function_call": OPENAI}, RESULT, A],
    "minimind": [U, tiny.assistant("", tool_calls=json.dumps([CALL["function"]])), RESULT, A],
    "sharegpt": roles("function_call", "observation"),
    "ms-swift": roles("tool_call", "tool_response"),
    "llama": [U, CALLED, {"role": "ipython", "content": "5"}, A],
    "a number": [U, CALLED, {"role": "function", "name": "sum", "content": 5}, A],
}


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_learned_and_results_are_context(chat, jsonl, name):
    path = jsonl({"messages": FORMS[name]})
    for template, call in (
        (QWEN, WORDS),
        (LLAMA, '{"name": "sum", "parameters": {"x": "2 + 3"}}'),
        (ALL, WORDS),
    ):
        tokenizer = with_template(chat, template)
        data = SFTDataset(path, tokenizer, 2000)
        ours, others = learned(tokenizer, data[0])
        assert ours == f"{call}<|im_end|>It is 5.<|im_end|>"
        turns = [U, tiny.assistant(WORDS), RESULT, A] if template == ALL else TALK
        assert tokenizer.decode(data[0][0]) == rendered(tokenizer, turns)
        assert "5" in others and data.notes() == [SHOWN if template == QWEN else HIDDEN]
        (prompt,) = RLAIFDataset(path, tokenizer, 2000)
        assert prompt.text == rendered(tokenizer, turns[:-1], add_generation_prompt=True)
        assert prompt.answer == "It is 5."
    assert prompt.prompt == [U, tiny.assistant(WORDS), RESULT]  # what a reward function gets
    again = pickle.loads(pickle.dumps(prompt))
    assert again == prompt and vars(again.prompt[1]["content"]) == vars(prompt.prompt[1]["content"])


def test_the_tags_of_hermes_files_are_written_once(chat, jsonl):
    path = jsonl({"conversations": HERMES})
    for template, turns in ((QWEN, [U, HERMES[1], RESULT, A]), (ALL, HERMES)):
        tokenizer = with_template(chat, template)
        (item,) = SFTDataset(path, tokenizer, 2000)
        assert tokenizer.decode(item[0]) == rendered(tokenizer, turns)
        assert learned(tokenizer, item)[0] == f"{WORDS}<|im_end|>It is 5.<|im_end|>"


def test_several_results_in_a_row_and_a_call_at_the_end(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    two = [U, tiny.assistant("So:", tool_calls=[CALL, CALL]), RESULT, RESULT | {"content": "6"}, CALLED]
    (item,) = SFTDataset(jsonl({"messages": two, "tools": [TOOL]}), tokenizer, 2000)
    assert tokenizer.decode(item[0]) == rendered(tokenizer, two, tools=[TOOL])
    assert learned(tokenizer, item)[0] == f"So:\n{WORDS}\n{WORDS}<|im_end|>{WORDS}<|im_end|>"
    says = r"no answer to learn from \(the result of a tool is none\)"
    tiny.refused(says, SFTDataset, jsonl({"messages": two[:-1]}), tokenizer, 2000)
    (prompt,) = RLAIFDataset(jsonl({"messages": two[:-1]}), tokenizer, 2000)
    assert prompt.text == rendered(tokenizer, two[:-1], add_generation_prompt=True) and prompt.answer is None


NO_THOUGHT = "<think>\n\n</think>\n\n"


def test_a_call_is_learned_where_the_template_drops_its_empty_thought_later(chat, jsonl):
    """As the policy has sampled it, with what it has read: nothing of it is written again."""
    turns = [U, CALLED, RESULT, RESULT, CALLED, RESULT, A]
    words = [f"{WORDS}<|im_end|>", f"{WORDS}<|im_end|>", "It is 5.<|im_end|>"]
    for template, kwargs, said in (
        (QWEN3, "{}", "".join(NO_THOUGHT + text for text in words)),
        (QWEN3, '{"enable_thinking": false}', "".join(words)),
        (MINIMIND3, "{}", "".join(words)),
    ):
        tokenizer = with_template(chat, template)
        set_template_kwargs(tokenizer, kwargs)
        data = SFTDataset(jsonl({"messages": turns}), tokenizer, 2000)
        assert learned(tokenizer, data[0])[0] == said and data.notes() == [SHOWN]
        assert tokenizer.decode(data[0][0]).count(NO_THOUGHT) == 3
    thoughts = [CALLED | {"reasoning_content": "so"}, A | {"reasoning_content": "thus"}]
    tokenizer = with_template(chat, QWEN3)
    (item,) = SFTDataset(jsonl({"messages": [U, thoughts[0], RESULT, thoughts[1]]}), tokenizer, 2000)
    said = f"<think>\nso\n</think>\n\n\n{WORDS}<|im_end|><think>\nthus\n</think>\n\nIt is 5.<|im_end|>"
    assert learned(tokenizer, item)[0] == said
    # An earlier question's answers have lost their thoughts where the next one is asked.
    data = SFTDataset(jsonl({"messages": [*TALK, *TALK]}), tokenizer, 2000)
    assert any("context only: 2" in note for note in data.notes())
    assert learned(tokenizer, data[0])[0] == f"{NO_THOUGHT}{words[0]}{NO_THOUGHT}{words[2]}"


def test_what_a_template_leaves_out_is_refused_in_every_stage(chat, jsonl):
    says = r"jsonl:1: the chat template leaves out calls or results of tools; .*--prompt_template"
    drops = QWEN.replace("c.function.name", "'f'")
    for template in (PHI, drops):
        for kind in (SFTDataset, RLAIFDataset):
            tiny.refused(says, kind, jsonl({"messages": TALK}), with_template(chat, template), 2000)
    seldom = with_template(chat, QWEN.replace("m.tool_calls or []", "(m.tool_calls or []) if not m.content"))
    says = "jsonl:1: the chat template changes the answer or leaves out a part"
    turns = [U, tiny.assistant("So:", tool_calls=[CALL]), RESULT, A]
    for tools in ([TOOL], []):  # with them the name is in the text anyway
        says = says if tools else "leaves out calls"
        tiny.refused(says, SFTDataset, jsonl({"messages": turns, "tools": tools}), seldom, 2000)
    quoted = [U, CALLED, RESULT | {"content": 'the "sum":\n5'}, A]
    assert len(SFTDataset(jsonl({"messages": quoted}), with_template(chat, LLAMA), 2000)) == 1
    nameless = [U, tiny.assistant("So:", tool_calls=[{"arguments": {}}]), RESULT, A]
    tiny.refused(
        'jsonl:1: the call of a tool has no "name": {"arg',
        SFTDataset,
        jsonl({"messages": nameless}),
        chat,
        2000,
    )


def test_special_tokens_in_tools_calls_and_results_are_text(chat, jsonl):
    tokenizer = with_template(chat, QWEN)

    def count(text):
        function = {"name": "sum", "arguments": {f"x{text}": [text]}}
        turns = [U, tiny.assistant("", tool_calls=[{"function": function}]), RESULT | {"content": text}, A]
        record = {"messages": turns, "tools": [{"function": {"name": "sum", "description": text}}]}
        (item,) = SFTDataset(jsonl(record), tokenizer, 2000)
        assert RLAIFDataset(jsonl(record), tokenizer, 2000)[0].prompt_ids.count(tokenizer.eos_token_id) == 4
        ends = item[0].count(tokenizer.eos_token_id)
        assert tokenizer.decode(item[0]).count(text) == 4 + ends * (text == tokenizer.eos_token)
        return ends

    assert count("<|im_end|>") == count("hello") == 5


def test_pairs_and_logged_answers(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    pair = {"prompt": [U], "chosen": [CALLED], "rejected": [CALLED, RESULT, A], "tools": [TOOL]}
    assert to_pair(pair)[0] == [([U], WORDS), ([U, tiny.assistant(WORDS), RESULT], "It is 5.")]
    data = PreferenceDataset(jsonl(pair), tokenizer, 2000)
    texts = [tokenizer.decode(ids) for ids in data[0][:2]]
    assert texts == [rendered(tokenizer, [U, CALLED]), rendered(tokenizer, TALK)]
    assert data.notes() == [HIDDEN]
    llama = with_template(chat, LLAMA)  # what its policy samples is no <tool_call>
    assert unmark(conversation_text(llama, *to_pair(pair)[0][0])) == rendered(llama, [U, CALLED])
    both = LoggedAnswers(jsonl(pair), tokenizer, 2000, max_response=200, eos=[tokenizer.eos_token_id])
    for item, turns in zip(both, ([U, CALLED], TALK), strict=True):
        whole = tokenizer.decode(item.prompt_ids + item.response_ids) + "\n"
        assert (whole, item.tools) == (rendered(tokenizer, turns, tools=[TOOL]), [TOOL])


# ---------------------------------------------------------------- with --tools or --env

ADD = {"type": "function", "function": FUNCTION | {"name": "add"}}
IN_PLACE = "records list tools: these are shown, and not those of --tools or --env"
UNKNOWN = "tools that records list and no flag has, so that calls get an error: sum"


def test_a_record_without_tools_is_shown_those_of_the_flags_and_they_count(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    path = jsonl({"prompt": [U]}, {"prompt": [U], "tools": []})
    data = RLAIFDataset(path, tokenizer, 2000, tools=[ADD])
    for prompt in data:
        assert prompt.text == rendered(tokenizer, [U], tools=[ADD], add_generation_prompt=True)
        assert prompt.tools == [ADD]
    assert data.notes() == []
    length = len(data[0].prompt_ids)
    assert data.longest == length > RLAIFDataset(path, tokenizer, 2000).longest
    tiny.refused("every record is longer", RLAIFDataset, path, tokenizer, length - 1, tools=[ADD])
    assert data.fingerprint != RLAIFDataset(path, tokenizer, 2000, tools=[TOOL]).fingerprint
    path = jsonl({"messages": TALK})
    (item,) = SFTDataset(path, tokenizer, 2000, tools=[ADD])
    assert tokenizer.decode(item[0]) == rendered(tokenizer, TALK, tools=[ADD])


def test_a_record_keeps_its_own_tools_and_those_that_cannot_be_run_are_named(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    for name, (record, _) in LISTS.items():
        for tools, notes in (([ADD], [IN_PLACE, UNKNOWN]), ([ADD, TOOL], [IN_PLACE])):
            data = RLAIFDataset(jsonl(record), tokenizer, 2000, tools=tools)
            assert (data[0].tools, data.notes()) == ([TOOL], notes), name
    functions = [FUNCTION | {"name": f"f{i}"} for i in range(8)]
    data = RLAIFDataset(jsonl({"prompt": [U], "tools": functions}), tokenizer, 2000, tools=[ADD])
    assert data.notes()[1].endswith("error: f0, f1, f2, f3, f4 and 3 more")


SYSTEM = "You call functions. The signatures are within <tools> </tools>: <tools> [{}] </tools>"
HERMES_FILE = {  # a line of Hermes' files: the list as a column, and in the text of the system turn
    "id": "1",
    "conversations": [
        {"from": "system", "value": SYSTEM.format(TOOL)},
        {"from": "human", "value": "2 + 3?"},
        {"from": "gpt", "value": WORDS},
        {"from": "tool", "value": "<tool_response>\n5\n</tool_response>"},
        {"from": "gpt", "value": "It is 5."},
    ],
    "tools": json.dumps([TOOL]),
    "category": "Sums",
}
MINIMIND_FILE = {  # a line of agent_rl.jsonl
    "conversations": [
        {"role": "system", "content": "Be short.", "tools": json.dumps([TOOL])},
        U,
        A,
        tiny.user("2 + 3?"),
        tiny.assistant(""),
    ],
    "gt": ["5"],
}


def test_lines_of_hermes_and_minimind_are_prompts_that_end_behind_a_user_turn(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    told = {"role": "system", "content": SYSTEM.format(TOOL)}
    (prompt,) = RLAIFDataset(jsonl(HERMES_FILE), tokenizer, 2000, tools=[TOOL])
    assert (prompt.prompt, prompt.tools, prompt.answer) == ([told, U], (), "It is 5.")
    assert prompt.text == rendered(tokenizer, [told, U], add_generation_prompt=True)  # the list once
    without = RLAIFDataset(jsonl(HERMES_FILE), tokenizer, 2000)[0]
    assert without.prompt[2:] == [tiny.assistant(WORDS), HERMES[2]]  # nothing is run
    data = RLAIFDataset(jsonl(MINIMIND_FILE), tokenizer, 2000, tools=[TOOL])
    turns = [{"role": "system", "content": "Be short."}, U, A, U]
    assert (data[0].prompt, data[0].tools, data[0].answer) == (turns, [TOOL], "5")
    assert data[0].text == rendered(tokenizer, turns, tools=[TOOL], add_generation_prompt=True)


def test_calls_and_results_stay_where_the_user_has_written_them_under_prompt(chat, jsonl):
    tokenizer = with_template(chat, QWEN)
    given = [U, CALLED, RESULT]
    for record, kept in (
        ({"prompt": given}, 3),
        ({"prompt": given, "answer": "5"}, 3),
        ({"messages": given}, 1),
        ({"messages": TALK}, 1),
        ({"messages": [*TALK, U, CALLED, RESULT, RESULT, A]}, 5),
        ({"messages": [*TALK, U]}, 5),
    ):
        (prompt,) = RLAIFDataset(jsonl(record), tokenizer, 2000, tools=[TOOL])
        assert len(prompt.prompt) == kept


# ---------------------------------------------------------------- thoughts


def test_a_thought_is_learned_as_the_template_writes_it(chat, jsonl):
    for name in ("reasoning_content", "thinking", "reasoning"):
        path = jsonl({"messages": [U, tiny.assistant("5", **{name: "so"})]})
        for template, said in (
            (READS, "so\n</think>\n\n5<|im_end|>"),
            (CHANNELS, "<analysis>so<end>\n5<|im_end|>"),
            (ALL, "<think>\nso\n</think>\n\n5<|im_end|>"),
        ):
            tokenizer = with_template(chat, template)
            assert learned(tokenizer, SFTDataset(path, tokenizer, 2000)[0])[0] == said
    for text, more in (("5", {}), ("<think>\nso\n</think>\n\n5", {"reasoning_content": "so"})):
        path = jsonl({"messages": [U, tiny.assistant(text, **more)]})
        assert learned(chat, SFTDataset(path, chat, 2000)[0])[0] == f"{text}<|im_end|>"


def test_a_thought_beside_a_whole_answer_is_not_learned_and_it_is_said(chat, jsonl):
    for thought, said in (("so", True), ("", False)):
        record = {"prompt": "2+3?", "answer": "5", "reasoning_content": thought}
        data = SFTDataset(jsonl(record), chat, 2000)
        assert learned(chat, data[0])[0] == "5<|im_end|>"
        assert [("beside an answer is not learned" in note) for note in data.notes()] == [True] * said


def test_a_template_that_would_write_two_thoughts_or_none_is_refused(chat, jsonl):
    path = jsonl({"messages": [U, tiny.assistant("<think>\nso\n</think>\n\n5")]})
    says = "jsonl:1: the chat template changes the answer or leaves out a part, such as a thought"
    tiny.refused(says, SFTDataset, path, with_template(chat, READS), 2000)
    path = jsonl({"messages": [U, tiny.assistant("5", reasoning_content="so")]})
    seldom = with_template(chat, READS.replace("m.reasoning_content or ''", "m.reasoning_content if m.x"))
    tiny.refused(says, SFTDataset, path, seldom, 2000)


# ---------------------------------------------------------------- the ends of answers

TWICE = [U, A, U, A]


def ending(tokenizer, template, *ends):
    """A tokenizer with <|endoftext|> as its EOS, and the ids at which the policy ends."""
    tokenizer = with_template(tokenizer, template)
    tokenizer.eos_token = "<|endoftext|>"
    return tokenizer, [tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", *ends)]


def test_nothing_behind_the_end_of_a_turn_is_learned_whichever_id_that_is(chat, jsonl):
    path = jsonl({"text": "2 + 3 = 5"}, {"messages": TWICE})
    tokenizer, ends = ending(chat, ALL, "<|im_end|>")
    data = SFTDataset(path, tokenizer, 2000)
    data.end_at(ends)
    assert learned(tokenizer, data[1])[0] == "It is 5.<|im_end|>" * 2  # without the newlines behind
    assert data.notes() == []
    tokenizer, ends = ending(chat, PHI, "<|im_end|>")
    for known, said in ((ends, "It is 5.<|im_end|>"), (ends[:1], "It is 5.<|im_end|>\n<|endoftext|>")):
        data = SFTDataset(path, tokenizer, 2000)
        data.end_at(known)
        assert learned(tokenizer, data[1])[0] == said
    (note,) = data.notes()
    assert note.startswith("turns of the assistant that are context only: 1, as the chat template writes")
    list(data)
    assert data.notes() == [note]  # each counts once


def test_every_kind_of_record_is_asked_for_its_end(chat, jsonl):
    path = jsonl({"text": "2 + 3 = 5"}, {"messages": [U, A]})
    tokenizer, ends = ending(chat, ALL)
    says = r"jsonl:2: the chat template does not end answers with the tokenizer's EOS, <\|endoftext\|>: set"
    tiny.refused(says, SFTDataset(path, tokenizer, 2000).end_at, ends)


def test_where_a_template_ends_no_answer_the_eos_is_put_behind_the_last_one(chat, jsonl):
    template = START + "{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer, ends = ending(chat, template)
    data = SFTDataset(jsonl({"text": "2 + 3 = 5"}, {"messages": TWICE}), tokenizer, 2000)
    data.end_at(ends)
    assert learned(tokenizer, data[1])[0] == "It is 5.\nIt is 5.\n<|endoftext|>"
    assert data.notes() == [
        "the chat template ends no answer; <|endoftext|> is put behind the last one, and learned"
    ]
