"""Every form of record that docs/data.md names, as a prompt, a demonstration, a pair or a rated answer."""

import gzip
import json
import shlex

import pytest
from test_dataset import chat, jsonl, needs_shared, plain  # noqa: F401  (fixtures)
from tiny import ROOT, SHARED, flags, read_jsonl, word_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dataset.answers import comparable
from dataset.chat_template import (
    conversation_ids,
    conversation_text,
    prompt_text,
    set_system_prompt,
    set_template,
    unmark,
)
from dataset.formats import Keys, named, to_demonstration, to_messages, to_pair, to_prompt, to_rated
from dataset.lm_dataset import (
    PreferenceDataset,
    RLAIFDataset,
    SFTDataset,
)
from errors import InputError
from trainer import train_ppo


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


TALK = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 2 + 3"
ASKED = f"{TALK}\n\nAssistant:"

FORMS = {  # name: (record, prompt, answer)
    "minimind": ({"conversations": [user("hi"), assistant("5")]}, [user("hi")], "5"),
    "minimind placeholder": ({"conversations": [user("hi"), assistant("无")]}, [user("hi")], None),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "5"}]},
        [user("hi")],
        "5",
    ),
    "a bot": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "bot", "value": "5"}]},
        [user("hi")],
        "5",
    ),
    "openai": ({"messages": [user("hi"), assistant("5")]}, [user("hi")], "5"),
    "trl prompt-only": ({"prompt": "hi"}, "hi", None),
    "trl prompt-only, turns": ({"prompt": [user("hi")]}, [user("hi")], None),
    "ours": ({"prompt": "hi", "answer": "5"}, "hi", "5"),
    "an answer is what it is": ({"prompt": "is there any?", "answer": "无"}, "is there any?", "无"),
    "trl completion": ({"prompt": "hi", "completion": "5"}, "hi", "5"),
    "trl completion, turns": ({"prompt": [user("hi")], "completion": [assistant("5")]}, [user("hi")], "5"),
    "trl completion of several turns": (
        {"prompt": [user("hi")], "completion": [assistant("5"), user("and?"), assistant("6")]},
        [user("hi"), assistant("5"), user("and?")],
        "6",
    ),
    "a pair": ({"prompt": "hi", "chosen": "5", "rejected": "6"}, "hi", "5"),
    "chatllama": ({"user_input": "hi", "completion": "5", "score": 4.5}, "hi", "5"),
    "hh as text": ({"text": f"{TALK}\n\nAssistant: 5"}, ASKED, "5"),
    "hh without an answer": ({"text": ASKED}, ASKED, None),
    "hh ending with a question": ({"text": TALK}, ASKED, None),
    "hh as a prompt": ({"prompt": ASKED, "answer": "5"}, ASKED, "5"),
    "plain text": ({"text": "once upon a time"}, "once upon a time", None),
    "alpaca": ({"instruction": "Add.", "input": "2 and 3", "output": "5"}, "Add.\n\n2 and 3", "5"),
    "alpaca without an input": ({"instruction": "hi", "input": "", "output": "5"}, "hi", "5"),
    "alpaca with no input key": ({"instruction": "hi", "output": "5"}, "hi", "5"),
    "a question alone": ({"question": "hi"}, "hi", None),
    "a question with a number": ({"question": "hi", "answer": 5}, "hi", "5"),
    "turns with an answer beside them": ({"messages": [user("hi")], "answer": "5"}, [user("hi")], "5"),
    "a completion of turns is added": (
        {"prompt": "hi", "answer": None, "completion": [assistant("1"), user("and?"), assistant("5")]},
        [user("hi"), assistant("1"), user("and?")],
        "5",
    ),
    "alpaca with a text of both": (
        {"instruction": "hi", "input": " ", "output": "5", "text": "Below is an instruction … 5"},
        "hi",
        "5",
    ),
    "a system turn": (
        {"messages": [{"role": "system", "content": "S"}, user("hi"), assistant("5")]},
        [{"role": "system", "content": "S"}, user("hi")],
        "5",
    ),
    "openai's developer": (
        {"messages": [{"role": "developer", "content": "S"}, user("hi"), assistant("5")]},
        [{"role": "system", "content": "S"}, user("hi")],
        "5",
    ),
    "openai's parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in "hi"]},
                assistant("5"),
            ]
        },
        [user("hi")],
        "5",
    ),
}
VERL = {  # as verl's script for GSM8K writes it
    "data_source": "openai/gsm8k",
    "prompt": [user("hi")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "so\n#### 72", "question": "hi"},
}


@pytest.mark.parametrize("name", FORMS)
def test_prompts(name):
    record, prompt, answer = FORMS[name]
    assert to_prompt(record) == (prompt, answer)
    if answer is not None:
        assert to_demonstration(record) == (prompt, answer)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("6*12 = <<6*12=72>>72\n#### 72", "72"),
        ("so\n#### 1,240", "1240"),
        ("so\n#### $-2.50\n", "-2.50"),
        ("####72", "72"),
        ("#### 1. Data\n#### 2. Tools", "#### 1. Data\n#### 2. Tools"),  # headings
        ("#### 72 eggs", "#### 72 eggs"),
        ("72", "72"),
        ("so", "so"),
        ("", ""),
    ],
)
def test_of_a_solution_the_final_number_is_the_answer_and_all_of_it_is_learned(solution, answer):
    record = {"question": "hi", "answer": solution}
    assert to_prompt(record) == ("hi", answer)
    assert to_demonstration(record) == ("hi", solution)
    assert to_prompt({"prompt": "hi", "answer": solution}) == ("hi", answer)
    assert to_prompt(named({"q": "hi", "a": solution}, Keys(prompt="q", answer="a"))) == ("hi", answer)
    verl = VERL | {"reward_model": {"ground_truth": solution}}
    assert to_prompt(verl) == ([user("hi")], answer)


@pytest.mark.parametrize(
    ("answer", "there"),
    [
        ("72", True),
        (" -1,240.5 ", True),
        ("C", True),
        ("Ada Lovelace", True),
        (r"\frac{1}{2}", True),
        ("苹果", True),
        ("1" * 60, True),  # a number of any length
        ("one\ntwo", False),
        ("It is late, and so I go home.", False),
        ("苹果是一种水果，" * 6, False),
    ],
)
def test_an_answer_that_a_response_can_equal_is_a_number_or_a_few_words(answer, there):
    assert comparable(answer) is there


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("72", "72"),
        (72, "72"),
        (["7", "ü"], '["7", "ü"]'),
        ({"target": ["a"]}, '{"target": ["a"]}'),
        (None, None),
    ],
)
def test_verls_ground_truth(truth, answer):
    """It is the answer to compare with, as JSON if it is no text, and never an answer to learn."""
    record = VERL | {"reward_model": {"style": "rule", "ground_truth": truth}}
    assert to_prompt(record) == ([user("hi")], answer)
    with pytest.raises(InputError, match=r"no answer to learn from .*; keys found: .*--answer_key"):
        to_demonstration(record)
    assert to_prompt({**record, "answer": "5"}) == ([user("hi")], "5")
    assert to_prompt({**record, "reward_model": "a name"}) == ([user("hi")], None)


PAIRS = {  # name: (record, prompt, chosen, rejected)
    "explicit": ({"prompt": "hi", "chosen": "5", "rejected": "6"}, "hi", "5", "6"),
    "explicit, turns": (
        {"prompt": [user("hi")], "chosen": [assistant("5")], "rejected": [assistant("6")]},
        [user("hi")],
        "5",
        "6",
    ),
    "implicit, turns": (
        {"chosen": [user("hi"), assistant("5")], "rejected": [user("hi"), assistant("6")]},
        [user("hi")],
        "5",
        "6",
    ),
    "a prompt repeated in both sides": (
        {
            "prompt": "hi",
            "chosen": [user("hi"), assistant("5")],
            "rejected": [user("hi"), assistant("6")],
        },
        [user("hi")],
        "5",
        "6",
    ),
    "a question": ({"question": "hi", "chosen": "5", "rejected": "6"}, "hi", "5", "6"),
    "turns beside both": (
        {
            "messages": [user("hi"), assistant("5")],
            "chosen": [user("hi"), assistant("5")],
            "rejected": [user("hi"), assistant("6")],
        },
        [user("hi")],
        "5",
        "6",
    ),
    "hh": (
        {"chosen": f"{TALK}\n\nAssistant: 5", "rejected": f"{TALK}\n\nAssistant: 6"},
        ASKED,
        "5",
        "6",
    ),
    "hh with the prompt apart": ({"prompt": ASKED, "chosen": " 5", "rejected": " 6"}, ASKED, " 5", " 6"),
    "an empty answer": (
        {"chosen": f"{TALK}\n\nAssistant: 5", "rejected": f"{TALK}\n\nAssistant: "},
        ASKED,
        "5",
        "",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    record, prompt, chosen, rejected = PAIRS[name]
    assert to_pair(record) == ([(prompt, chosen), (prompt, rejected)], 0.0)
    assert to_pair({**record, "margin": 2})[1] == 2.0
    assert to_prompt(record) == to_demonstration(record) == (prompt, chosen)


def test_sides_may_have_prompts_of_their_own():
    """In a few pairs of HH-RLHF the two sides differ before the last question."""
    sides = [f"\n\nHuman: {question}\n\nAssistant: 5" for question in ("one", "two")]
    (chosen, rejected), _ = to_pair(dict(zip(("chosen", "rejected"), sides, strict=True)))
    assert (chosen, rejected) == (
        ("\n\nHuman: one\n\nAssistant:", "5"),
        ("\n\nHuman: two\n\nAssistant:", "5"),
    )


def test_rated_answers():
    record = {"user_input": "hi", "completion": "5", "score": "4.5"}  # ChatLLaMA's own files quote it
    assert to_rated(record) == ([("hi", "5")], 4.5)
    assert to_rated({"prompt": [user("hi")], "answer": "5", "score": -1}) == ([([user("hi")], "5")], -1.0)
    assert to_rated({"prompt": "hi", "answer": "5", "score": True}) == ([("hi", "5")], 1.0)


def test_a_transcript_is_turns_for_who_has_a_template_and_text_for_who_has_not(chat, plain):  # noqa: F811
    turns = [user("hi"), assistant("yes?"), user("2 + 3")]
    assert to_messages(ASKED) == turns
    assert prompt_text(chat, ASKED) == chat.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert prompt_text(plain, ASKED) == ASKED
    whole = chat.apply_chat_template([*turns, assistant("5")], tokenize=False)
    assert unmark(conversation_text(chat, ASKED, "5")) == whole
    assert conversation_text(plain, ASKED, "5") == f"{TALK}\n\nAssistant: 5"  # as HH has it
    twice = "\n\nHuman: hi\n\nHuman: there\n\nAssistant: 5\n\nAssistant: 6\n\nHuman: so"
    assert to_messages(twice) == [user("hi\n\nthere"), assistant("5\n\n6"), user("so")]
    for text in ("Human: a word in a text", "he said\n\nHuman: hi\n\nAssistant:"):  # no transcripts
        assert to_messages(text) == [user(text)]


def test_what_is_no_answer_beside_a_conversation_is_left_alone():
    """A list of accepted answers, which a reward function reads from the record."""
    record = {"messages": [user("hi")], "answer": ["5", "five"]}
    assert to_prompt(record) == ([user("hi")], None)
    for name in ("messages", "conversations"):
        record = {name: [user("hi"), assistant("a")], "answer": ["x", "y"]}
        assert to_prompt(record) == to_demonstration(record) == ([user("hi")], "a")


def test_a_prompt_may_end_with_the_beginning_of_its_answer():
    text = "\n\nHuman: hi\n\nAssistant: Sure,"
    assert to_prompt({"prompt": text, "completion": " five"}) == (text, " five")


def test_an_answer_that_looks_like_a_transcript_is_an_answer():
    for said in ("Human: hi\n\nAssistant: hello", f"{TALK}\n\nAssistant: 5"):
        record = {"instruction": "Write a dialogue", "output": said}
        assert to_prompt(record) == to_demonstration(record) == ("Write a dialogue", said)


@pytest.mark.parametrize("answer", [["5", "five"], {"x": 5}, 5])
def test_an_answer_that_is_no_text_becomes_json(answer):
    for prompt in ("hi", [user("hi")]):
        assert to_prompt({"prompt": prompt, "answer": answer}) == (prompt, json.dumps(answer))
        pair = {"prompt": prompt, "chosen": answer, "rejected": "6"}
        assert to_pair(pair) == ([(prompt, json.dumps(answer)), (prompt, "6")], 0.0)


@pytest.mark.parametrize(
    ("form", "record", "says"),
    [
        (
            to_prompt,
            {"instruction": "hi", "response": "5"},
            'no prompt .an "instruction" needs .*keys found: "instruction", "response": .*--prompt_key',
        ),
        (to_prompt, {"instruction": " ", "input": "", "output": "5"}, "prompt is empty"),
        (to_prompt, {"text": 3}, "must be text or a list of"),
        (to_prompt, {"text": ""}, "prompt is empty"),
        (to_prompt, {"user_input": ["hi"]}, "turn 1 of the conversation has no text"),
        (to_demonstration, {"prompt": "hi", "completion": [user("5")]}, "no answer to learn from"),
        (to_prompt, {"messages": [{"role": 3, "content": "hi"}]}, 'turn 1 .* "role" that is no text'),
        (to_prompt, {"messages": ["hi"]}, "turn 1"),
        (to_demonstration, {"text": ""}, "prompt is empty"),
        (to_demonstration, {"text": ASKED}, "no answer"),
        (
            to_demonstration,
            {"prompt": "hi"},
            'no answer to learn from .*; keys found: "prompt": .*--answer_key',
        ),
        (
            to_pair,
            {"question": "hi", "good": "5"},
            'no "chosen"; keys found: "question", "good".*--chosen_key',
        ),
        (
            to_pair,
            {"prompt": "hi", "chosen": "5"},
            'no "rejected"; keys found: "prompt", "chosen".*--rejected_k',
        ),
        (to_pair, {"prompt": "hi", "chosen": "5", "rejected": "6", "margin": 10**400}, '"margin" must be'),
        (to_pair, {"prompt": "", "chosen": "5", "rejected": "6"}, '"chosen" must be an answer to'),
        (to_pair, {"chosen": "It is 5", "rejected": "It is 6"}, '"chosen" must be an .*--prompt_key'),
        (to_pair, {"chosen": f"{TALK}\n\nAssistant: 5", "rejected": "6"}, '"rejected" must be an answer to'),
        (to_pair, {"chosen": [user("hi")], "rejected": [user("hi")]}, '"chosen" must be an answer to'),
        (
            to_pair,
            {"chosen": [assistant("5")], "rejected": [assistant("6")]},
            '"chosen" must be an answer to',
        ),
        (to_pair, {"prompt": "hi", "chosen": "5", "rejected": "6", "margin": "much"}, '"margin" must be'),
        (to_pair, {"prompt": "hi", "chosen": "5", "rejected": "6", "margin": None}, '"margin" must be'),
        (to_rated, {"user_input": "hi", "completion": "5"}, 'no rated answer; keys found: "user_input"'),
        (to_rated, {"user_input": "hi", "score": 3}, "no rated answer"),
        (to_rated, {"user_input": "hi", "completion": "5", "score": "nan"}, '"score" must be'),
    ],
)
def test_bad_records(form, record, says):
    with pytest.raises(InputError, match=says):
        form(record)


def test_all_forms_through_the_datasets(chat, jsonl):  # noqa: F811
    """Files with one record of each form: every dataset finds the same question and answers in each."""
    asked = chat.apply_chat_template([user("hi")], tokenize=False, add_generation_prompt=True)
    path = jsonl(*[record for record, prompt, _ in FORMS.values() if prompt in ("hi", [user("hi")])])
    data = RLAIFDataset(path, chat, 100)
    assert len(data) > 8 and {chat.decode(p.prompt_ids) for p in data} == {asked}
    path = jsonl(
        *[r for r, prompt, answer in FORMS.values() if prompt in ("hi", [user("hi")]) and answer == "5"]
    )
    samples = SFTDataset(path, chat, 100)
    assert len(samples) > 6 and all(sample == samples[0] for sample in samples)
    path = jsonl(*[r for r, prompt, _, _ in PAIRS.values() if prompt in ("hi", [user("hi")])])
    pairs = PreferenceDataset(path, chat, 100)
    assert len(pairs) == 6 and all(pair == pairs[0] for pair in pairs)
    assert pairs[0][2] == 0.0 and pairs.pairs
    rated = PreferenceDataset(jsonl({"user_input": "hi", "completion": "5", "score": 2}), chat, 100)
    assert not rated.pairs and list(rated) == [(conversation_ids(chat, [("hi", "5")])[0], 2.0)]


def test_a_text_is_learned_whole(chat, plain, jsonl):  # noqa: F811
    path = jsonl({"text": "2 + 3 = 5"})
    assert to_demonstration({"text": "2 + 3", "answer": "5"}) == ("2 + 3", "5")  # then it is a prompt
    assert to_prompt({"prompt": None, "text": "2 + 3", "answer": "5"}) == ("2 + 3", "5")
    for tokenizer in (chat, plain):
        ((ids, mask),) = SFTDataset(path, tokenizer, 100)
        assert tokenizer.decode(ids) == "2 + 3 = 5<|im_end|>"
        assert mask == [0] + [1] * (len(ids) - 1)  # the first token cannot be predicted


def test_system_prompt(chat, plain, jsonl):  # noqa: F811
    system = {"role": "system", "content": "be short"}
    path = jsonl({"prompt": "hi"}, {"prompt": [{"role": "system", "content": "own"}, user("hi")]})
    one, two = RLAIFDataset(path, chat, 100, "be short")
    assert one.prompt == [system, user("hi")]  # what the reward model reads as well
    assert chat.decode(one.prompt_ids) == chat.apply_chat_template(
        one.prompt, tokenize=False, add_generation_prompt=True
    )
    assert two.prompt[0]["content"] == "own"
    path = jsonl({"prompt": "hi", "chosen": "5", "rejected": "6"})
    assert (
        PreferenceDataset(path, chat, 100, "be short")[0][0]
        == conversation_ids(chat, [([system, user("hi")], "5")])[0]
    )
    with pytest.raises(InputError, match=r"--system_prompt: .*no chat template"):
        set_system_prompt(plain, "be short")
    assert SFTDataset(path, chat, 100, "be short")[0][0][: len(one.prompt_ids)] == one.prompt_ids


# ---------------------------------------------------------------------------------------------------------
# Templates


def test_prompt_template(plain, jsonl, tmp_path):  # noqa: F811
    template = "\\n\\nHuman: {prompt}\\n\\nAssistant:"
    (tmp_path / "template.txt").write_text(template.replace("\\n", "\n") + "\n", "utf-8")
    for given in (template, str(tmp_path / "template.txt")):
        plain.chat_template = None
        set_template(plain, given)
        data = list(RLAIFDataset(jsonl({"prompt": "2 + 3"}, {"prompt": ASKED}), plain, 100))
        assert plain.decode(data[0].prompt_ids) == "\n\nHuman: 2 + 3\n\nAssistant:"
        eos = plain.eos_token
        assert plain.decode(data[1].prompt_ids) == ASKED.replace(" yes?", f"yes?{eos}")
        ids, mask = SFTDataset(jsonl({"prompt": "2 + 3", "answer": "5"}), plain, 100)[0]
        assert plain.decode(ids) == f"\n\nHuman: 2 + 3\n\nAssistant:5{eos}"
        assert plain.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f"5{eos}"
        assert ids[: len(data[0].prompt_ids)] == data[0].prompt_ids
        plain.save_pretrained(tmp_path / "saved")
        assert type(plain).from_pretrained(tmp_path / "saved").chat_template == plain.chat_template
    plain.chat_template = None
    set_template(plain, '{"q": "{prompt}", "ü\'": 1}')  # characters with a meaning in Jinja strings
    assert prompt_text(plain, "hi") == '{"q": "hi", "ü\'": 1}'
    plain.chat_template = None
    set_template(plain, "{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert prompt_text(plain, "hi") == "<hi>"
    plain.chat_template = None


def test_a_template_keeps_the_bos_that_the_tokenizer_would_add(jsonl):  # noqa: F811
    tokenizer = word_tokenizer("abc")
    tokenizer.bos_token = tokenizer.eos_token
    for begins in ([], [tokenizer.bos_token_id]):
        if begins:
            opening = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
            tokenizer.backend_tokenizer.post_processor = opening
        set_template(tokenizer, "a {prompt} b")
        ids = RLAIFDataset(jsonl({"prompt": "c"}), tokenizer, 100)[0].prompt_ids
        assert ids == begins + tokenizer("a c b", add_special_tokens=False)["input_ids"]


TYPO = "{% for m in messages %}Q: {{ m['contents'] }}{% endfor %}"


@pytest.mark.parametrize("template", ["no hole", "{prompt} {prompt}", "{{ nonsense", "{{ 'fixed' }}", TYPO])
def test_bad_templates(plain, template):  # noqa: F811
    with pytest.raises(InputError, match="--prompt_template"):
        set_template(plain, template)
    plain.chat_template = None


def test_a_template_from_a_text_needs_an_eos():
    tokenizer = word_tokenizer("abc")
    tokenizer.eos_token = None
    with pytest.raises(InputError, match=r"--prompt_template.*no EOS token to end answers with"):
        set_template(tokenizer, "a {prompt} b")


# ---------------------------------------------------------------------------------------------------------
# Real data


@needs_shared
def test_hh_rlhf(chat):  # noqa: F811
    path = SHARED / "hh-rlhf-harmless-test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    pairs = PreferenceDataset(path, chat, 10**6)
    assert len(pairs) == len(lines) == 2312 and pairs.dropped == 0
    two_turns = 0
    for line in lines:
        ((prompt, chosen), _), _ = to_pair(line)
        if "\n\nAssistant:" not in (behind := line["chosen"].removeprefix(prompt)):
            assert behind.removeprefix(" ") == chosen
        two_turns += chosen not in line["chosen"]
        assert prompt.count("\n\nHuman:") == line["chosen"].count("\n\nHuman:")
        turns = to_messages(prompt)
        assert [turn["role"] for turn in turns] == (["user", "assistant"] * len(turns))[: len(turns)]
        assert turns[-1]["role"] == "user"
    assert two_turns < 5
    assert len(SFTDataset(path, chat, 10**6)) == 2312


# ---------------------------------------------------------------------------------------------------------
# docs/data.md

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_page_of_forms():
    """Every example record of docs/data.md is read as its table says."""
    records = [json.loads(line) for line in PAGE.split("```json\n")[1].split("```")[0].splitlines()]
    assert len(records) == 17
    for record in records:
        prompt, answer = to_prompt(record)
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if "chosen" in record:
            assert to_pair(record)[0][0] == (prompt, answer) == to_demonstration(record)
        if "score" in record:
            assert to_rated(record) == ([(prompt, answer)], 4.5)
        if text.startswith("Once"):
            assert (answer, to_demonstration(record)) == (None, (None, text))
        else:
            assert "2 + 3?" in text and answer == "5"


@pytest.mark.parametrize("name", ["from_pairs", "templated"])
def test_the_page_of_commands(name, tmp_path):
    (line,) = [line for line in PAGE.splitlines() if line.endswith(name)]
    _, *argv = shlex.split(line)[1:]
    train_ppo.main(
        [*argv, *flags(out_dir=tmp_path, batch_size=8, mini_batch_size=8, eval_interval=0, max_gen_len=8)]
    )
    sample = read_jsonl(tmp_path / name / "samples.jsonl")[0]
    if name == "templated":
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ppo_actor_128")
        assert prompt_text(tokenizer, "hi") == "Question: hi\nAnswer:"
    else:
        assert sample["prompt"] in {r["prompt"] for r in read_jsonl(ROOT / "dataset/demo/preferences.jsonl")}
