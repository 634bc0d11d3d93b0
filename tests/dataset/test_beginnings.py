"""Prompts that end with the beginning of the answer, and texts that the chat template has written already."""

import json
from argparse import Namespace

import pytest
from tiny import assistant, refused, user, word_tokenizer

from dataset.chat_template import conversation_text, pair_ids, prompt_text, read_back, render, unmark
from dataset.formats import begun, to_demonstration, to_messages, to_pair, to_prompt, to_rated, whole_answer
from dataset.lm_dataset import LoggedAnswers, PreferenceDataset, RLAIFDataset, SFTDataset
from trainer.inputs import describe_texts

NO_FLAGS = Namespace(system_prompt="", chat_template_kwargs=None, num_workers=0)
U = user("4, 6 -> 24?")
THOUGHT = "Let me think.\n<think>"
BEGUN = [U, assistant(THOUGHT)]
WHOLE = [U, assistant("It is 4*6.")]
TRUTH = {"reward_model": {"style": "rule", "ground_truth": "4*6"}}
SOLVED = " so </think>4*6"
SIDES = {"chosen": [assistant(SOLVED)], "rejected": "no"}

PROMPTS = {  # name: (record, prompt, answer)
    "TRL": ({"prompt": BEGUN, "answer": "4*6"}, BEGUN, "4*6"),
    "alone": ({"prompt": BEGUN}, BEGUN, None),
    "not a thought": ({"prompt": WHOLE, "answer": "5"}, WHOLE, "5"),
    "verl": ({"prompt": BEGUN, **TRUTH}, BEGUN, "4*6"),
    "several right answers": ({"prompt": BEGUN, "answer": ["4*6", "6*4"]}, BEGUN, ["4*6", "6*4"]),
    "as tables have turns": ({"prompt": json.dumps(BEGUN), "answer": "4*6"}, BEGUN, "4*6"),
    "an open thought beside an answer": ({"messages": BEGUN, "answer": "4*6"}, BEGUN, "4*6"),
    "an open thought beside answers": ({"conversations": BEGUN, "answer": ["a", "b"]}, BEGUN, ["a", "b"]),
    "an open thought beside verl's truth": ({"messages": BEGUN, **TRUTH}, BEGUN, "4*6"),
    "a pair": ({"prompt": BEGUN, **SIDES}, BEGUN, SOLVED),
    # In a conversation the last turn is the answer, or stands where the answer beside it belongs.
    "a conversation": ({"messages": WHOLE}, [U], "It is 4*6."),
    "an open thought alone": ({"messages": BEGUN}, [U], THOUGHT),
    "a solution beside its answer": ({"messages": WHOLE, "answer": "4*6"}, [U], "4*6"),
    "a solution beside verl's truth": ({"messages": WHOLE, **TRUTH}, [U], "4*6"),
    "no truth": ({"messages": WHOLE, "reward_model": {"ground_truth": None}}, [U], "It is 4*6."),
    "a placeholder": ({"prompt": [U, assistant("无")], "answer": "5"}, [U], "5"),
    "ultrafeedback": (
        {"prompt": "p", "messages": WHOLE, "chosen": WHOLE, "rejected": BEGUN},
        [U],
        "It is 4*6.",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_when_the_last_turn_is_the_beginning_of_the_answer(name):
    record, prompt, answer = PROMPTS[name]
    assert to_prompt(record) == (prompt, answer)
    is_begun = prompt[-1]["role"] == "assistant"
    assert begun(to_prompt(record)[0]) == (prompt[-1]["content"] if is_begun else "")


def test_answers_to_learn_to_compare_and_to_rate_follow_the_beginning():
    assert to_demonstration({"prompt": BEGUN, "answer": SOLVED}) == (BEGUN, SOLVED)
    refused('"prompt" ends .* call it "messages"', to_demonstration, {"prompt": WHOLE})
    assert to_rated({"prompt": BEGUN, "completion": SOLVED, "score": 2}) == ([(BEGUN, SOLVED)], 2.0)
    pair = [(BEGUN, SOLVED), (BEGUN, "no")]
    assert to_pair({"prompt": BEGUN, **SIDES})[0] == pair
    repeated = [U, assistant(THOUGHT + SOLVED)]  # an answer that repeats the prompt
    assert to_pair({"prompt": BEGUN, "chosen": repeated, "rejected": "no"})[0] == pair
    assert whole_answer(*to_pair({"prompt": BEGUN, **SIDES})[0][0]) == ([U], THOUGHT + SOLVED)


def test_the_answer_goes_on_behind_the_beginning(chat, plain, jsonl):
    """As with transformers' continue_final_message, in all stages; text that looks like an EOS stays text."""
    begins = [U, assistant(THOUGHT + " <|im_end|>")]
    path = jsonl({"prompt": begins, **SIDES})
    (prompt,) = RLAIFDataset(path, chat, 100)
    text = chat.apply_chat_template(begins, tokenize=False, continue_final_message=True)
    assert prompt.text == text and text.endswith(begins[-1]["content"])
    assert chat.eos_token_id not in prompt.prompt_ids[-8:]
    answer = chat(SOLVED, add_special_tokens=False)["input_ids"]
    logged = LoggedAnswers(path, chat, 100, max_response=50, eos=[chat.eos_token_id])[0]
    assert (logged.prompt_ids, logged.text) == (prompt.prompt_ids, text)
    assert logged.response_ids == [*answer, chat.eos_token_id]
    demonstrations = SFTDataset(path, chat, 100)
    assert not demonstrations.notes()  # all turns of the assistant are learned
    ids, mask = demonstrations[0]
    assert [i for i, learned in zip(ids, mask, strict=True) if learned] == logged.response_ids
    assert ids[: len(prompt.prompt_ids)] == prompt.prompt_ids and not any(mask[: len(prompt.prompt_ids)])
    chosen, *_ = PreferenceDataset(path, chat, 100)[0]
    assert chosen == ids
    (prompt,) = RLAIFDataset(path, plain, 100)
    assert prompt.text == f"{U['content']}\n{begins[-1]['content']}"
    whole = [to_pair({"prompt": begins, **SIDES})[0][0]]
    assert unmark(conversation_text(plain, *whole[0])) == prompt.text + SOLVED
    assert pair_ids(plain, whole) == pair_ids(plain, [whole_answer(*whole[0])])


def test_a_transcript_may_end_with_the_beginning(chat):
    asked = "\n\nHuman: hi\n\nAssistant: So"
    assert to_messages(asked) == [user("hi"), assistant("So")]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo"
    assert prompt_text(chat, asked) == text
    assert conversation_text(chat, asked, " 5") == f"{text} 5<|im_end|>\n"


ENDS = "{% if add_generation_prompt %}a: <think>\n%s{% endif %}"
SAID = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '</s>' }}{% endfor %}"


@pytest.mark.parametrize("closed", ["", "\n</think>\n\n"])
def test_a_thought_that_the_template_opens_is_not_opened_twice(closed):
    tokenizer = word_tokenizer(["a"])
    tokenizer.chat_template = SAID + ENDS.replace("%s", closed)
    prompt, _ = to_prompt({"prompt": [user("hi"), assistant("<think>\nSo")]})
    assert prompt_text(tokenizer, prompt) == "u: hi</s>a: <think>\nSo"
    prompt, _ = to_prompt({"prompt": [user("hi"), assistant("So")]})
    assert prompt_text(tokenizer, prompt) == f"u: hi</s>a: <think>\n{closed}So"


# ---------------------------------------------------------------- what the chat template has written


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nOwn.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<start>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>model\\n' }}{% endif %}"
)
ZEPHYR = (  # its marks are ordinary text
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no') }}"
    "{% endif %}{% endfor %}"
)
MINIMIND = (  # of the first version: the BOS begins each turn
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' + m.content + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
TEMPLATES = {  # name: (template, BOS, EOS, does it take a system message?)
    "ChatML": (CHATML, "<|im_start|>", "<|im_end|>", True),
    "Llama 3": (LLAMA3, "<|begin|>", "<|eot|>", True),
    "Gemma": (GEMMA, "<bos>", "<end>", False),
    "Zephyr": (ZEPHYR, "<s>", "</s>", True),
    "Mistral": (MISTRAL, "<s>", "</s>", False),
    "MiniMind": (MINIMIND, "<s>", "</s>", True),
}
MORE = user("and\n\n3?")


def rendering(name):
    template, bos, eos, system = TEMPLATES[name]
    tokenizer = word_tokenizer(["hi"])
    special = {"bos_token": bos, "eos_token": eos, "pad_token": eos}
    tokenizer.add_special_tokens({**special, "extra_special_tokens": ["<|head|>", "<|/head|>", "<start>"]})
    tokenizer.chat_template = template
    return tokenizer, system


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_that_the_template_has_written_is_read_as_its_messages(name):
    tokenizer, takes_system = rendering(name)
    bos = tokenizer.bos_token
    first = [user("2+2?")]
    for turns in (
        first,
        [{"role": "system", "content": "Be short."}, *first],
        [*first, assistant("4"), MORE],
    ):
        if turns[0]["role"] == "system" and not takes_system:
            continue
        for more, generate in (([], True), ([], False), ([assistant("4")], False)):
            text = render(tokenizer, [*turns, *more], generate=generate)
            # Some drop the BOS and let the tokenizer add it; some strip white space.
            texts = [
                text,
                text.rstrip(),
                text.removeprefix(bos) if name in ("Llama 3", "Gemma", "Mistral") else text,
            ]
            for given in texts:
                assert read_back(tokenizer, given) == [*turns, *more]
        text = render(tokenizer, turns, generate=True) + THOUGHT
        assert read_back(tokenizer, text) == [*turns, assistant(THOUGHT)]
    for text in ("hi", "user\nhi", "assistant", f"hi {bos}", "[INST] hi", "<|user|> hi", "", "User: hi"):
        assert read_back(tokenizer, text) is None


def test_a_text_of_another_template_is_refused():
    tokenizer, _ = rendering("ChatML")
    turn = "<|im_start|>user\n2+2?<|im_end|>\n"
    own = f"{turn}<|im_start|>assistant\n"  # the system message is the template's own
    assert read_back(tokenizer, own) == [user("2+2?")]
    for turns in (f"{turn}<|im_start|>tool\n4<|im_end|>\n", turn.replace("2+2?", "2<|im_end|>2")):
        text = f"{turns}<|im_start|>assistant\n"
        refused(r"begins with <\|im_start\|>user as what the chat template", read_back, tokenizer, text)


@pytest.mark.parametrize("mark", ["<|start_header_id|>user", "<start_of_turn>user", "[INST] 2+2?", "own"])
def test_marks_that_stay_text_are_noted(chat, plain, jsonl, mark):
    own = render(chat, [U], generate=True)
    record = {"prompt": [{"role": "system", "content": "Be short."}, user(own if mark == "own" else mark)]}
    for tokenizer in (chat, plain):
        (note,) = RLAIFDataset(jsonl(record), tokenizer, 200).notes()
        assert "marks of a chat template, such as <|im_start|> or [INST], which stay text" in note
    (note,) = RLAIFDataset(jsonl({"prompt": own}), plain, 200).notes()
    assert "stay text" in note
    assert not RLAIFDataset(jsonl({"prompt": "[1, 2] <|a|>"}), chat, 200).notes()


def test_such_texts_are_read_in_every_field_and_it_is_said(chat, jsonl):
    asked = render(chat, [U], generate=True)
    said = render(chat, WHOLE)
    learned = "It is 4*6."

    def read(kind, record, **more):
        data = kind(jsonl(record), chat, 200, **more)
        (note,) = describe_texts(NO_FLAGS, [data])
        assert note.endswith("texts that the chat template has written already are read as messages")
        return data[0]

    for record in (
        {"prompt": asked, "answer": learned},
        {"prompt": [user(asked)], "answer": learned},  # TinyZero's
        {"prompt": asked, "completion": f"{learned}<|im_end|>\n"},
        {"prompt": asked, "chosen": f"{learned}<|im_end|>\n", "rejected": "no<|im_end|>"},
        {"chosen": said, "rejected": render(chat, [U, assistant("no")])},
        {"text": said},
        {"instruction": asked, "input": "", "output": learned},
    ):
        prompt = read(RLAIFDataset, record)
        assert (prompt.text, prompt.prompt, prompt.answer) == (asked, [U], learned)
        ids, mask = read(SFTDataset, record)
        assert chat.decode([i for i, on in zip(ids, mask, strict=True) if on]) == f"{learned}<|im_end|>"
        if "chosen" in record:
            assert chat.decode(read(PreferenceDataset, record)[1]) == render(chat, [U, assistant("no")])
    begins = read(RLAIFDataset, {"prompt": asked + THOUGHT, "answer": "4*6"})
    assert begins.text == asked + THOUGHT and begun(begins.prompt) == THOUGHT
    begins = read(RLAIFDataset, {"instruction": asked + "Sure: ", "output": "4*6"})
    assert (begins.text, begins.answer) == (asked + "Sure: ", "4*6")
    for record in ({"instruction": "hi", "output": "5"}, {"instruction": asked, "input": "x", "output": "5"}):
        data = RLAIFDataset(jsonl(record), chat, 200)
        texts = "\n\n".join(text for text in (record["instruction"], record.get("input")) if text)
        assert data[0].prompt == texts
    plain = RLAIFDataset(jsonl({"prompt": "hi", "answer": "5<|im_end|>"}), chat, 200)
    assert plain[0].answer == "5<|im_end|>" and plain.notes() == []


def test_an_answer_in_the_place_of_a_turn_is_said(chat, jsonl):
    for record, replaced in (
        ({"messages": WHOLE, "answer": "4*6"}, True),
        ({"messages": WHOLE, "answer": ""}, False),
        ({"messages": WHOLE}, False),
        ({"messages": BEGUN, "answer": "4*6"}, False),
        ({"conversations": [U, assistant("")], "answer": "4*6"}, False),
        ({"messages": WHOLE, "chosen": WHOLE, "rejected": BEGUN, "answer": "5"}, False),
    ):
        data = RLAIFDataset(jsonl(record), chat, 200)
        notes = describe_texts(NO_FLAGS, [data])
        assert [("left out where an answer is beside it" in note) for note in notes] == [True] * replaced
