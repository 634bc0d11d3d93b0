"""Keys that the user names: --prompt_key and its like; records by which they decide, and errors."""

import json

import pytest
from test_dataset import chat, jsonl  # noqa: F401  (fixtures)
from tiny import flags, read_jsonl, run_files, save_policy_dir, train, word_tokenizer, write_jsonl

from dataset.formats import (
    Keys,
    is_rated,
    keys_found,
    named,
    to_demonstration,
    to_pair,
    to_prompt,
    to_rated,
)
from dataset.lm_dataset import LoggedAnswers, RLAIFDataset, SFTDataset
from errors import InputError
from trainer import train_reward, train_sft

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "5"}
NESTED = {"extra_info": {"question": "hi", "answer": "5"}, "prompt": "another", "answer": "another"}

NAMED = {  # name: (record, keys, prompt, answer)
    "both": ({"problem": "hi", "solution": "5"}, Keys("problem", "solution"), "hi", "5"),
    "paths": (NESTED, Keys("extra_info.question", "extra_info.answer"), "hi", "5"),
    "the prompt alone": ({"problem": "hi", "answer": "5"}, Keys("problem"), "hi", "5"),
    "the answer alone": ({"prompt": "hi", "answer": "6", "gold": "5"}, Keys("", "gold"), "hi", "5"),
    "beside a completion": ({"prompt": "hi", "completion": "6", "gold": "5"}, Keys("", "gold"), "hi", "5"),
    "beside a completion of turns": (
        {"prompt": "hi", "completion": [ASSISTANT, USER, ASSISTANT], "gold": "5"},
        Keys("", "gold"),
        "hi",
        "5",
    ),
    "before turns": ({"messages": [{**USER, "content": "no"}], "q": "hi"}, Keys("q"), "hi", None),
    "before a text": ({"text": "once", "q": "hi"}, Keys("q"), "hi", None),
    "before a question": ({"question": "no", "answer": "5", "q": "hi"}, Keys("q"), "hi", "5"),
    "turns": ({"dialog": [USER]}, Keys("dialog"), [USER], None),
    "turns that end with the answer": ({"dialog": [USER, ASSISTANT]}, Keys("dialog"), [USER], "5"),
    "an answer beside turns": (
        {"messages": [USER, {**ASSISTANT, "content": "6"}], "gold": "5"},
        Keys("", "gold"),
        [USER],
        "5",
    ),
    "an answer that is a number": ({"prompt": "hi", "gold": 5}, Keys("", "gold"), "hi", "5"),
    "an answer that is a turn": ({"prompt": "hi", "gold": [ASSISTANT]}, Keys("", "gold"), [USER], "5"),
    "an answer that is no text": ({"prompt": "hi", "gold": ["5"]}, Keys("", "gold"), "hi", '["5"]'),
    "an answer that is no text, beside turns": (
        {"messages": [USER, ASSISTANT], "gold": ["6"]},
        Keys("", "gold"),
        [USER],
        '["6"]',
    ),
    "a prompt beside an answer that is no text": ({"q": [USER], "answer": ["5"]}, Keys("q"), [USER], '["5"]'),
    "an answer that is no text elsewhere": (
        {"prompt": "hi", "answer": 6, "a": "5"},
        Keys("", "a"),
        "hi",
        "5",
    ),
    "a name with a dot": ({"a.b": "hi", "a": {"b": "no"}}, Keys("a.b"), "hi", None),
    "beside a pair": ({"q": "hi", "chosen": "5", "rejected": "6"}, Keys("q"), "hi", "5"),
    "of a pair": ({"q": "hi", "chosen": "6", "rejected": "7", "a": "5"}, Keys("q", "a"), "hi", "5"),
    "a field without a name": ({"": "row 7", "prompt": "hi", "gold": "5"}, Keys("", "gold"), "hi", "5"),
    "verl's truth": ({"prompt": "hi", "reward_model": {"ground_truth": "5"}}, Keys("prompt"), "hi", "5"),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_keys_decide(name):
    record, keys, prompt, answer = NAMED[name]
    before = json.dumps(record)
    record_ = named(record, keys)
    assert to_prompt(record_) == (prompt, answer)
    if answer is not None and "reward_model" not in record:
        assert to_demonstration(record_) == (prompt, answer)
    assert json.dumps(record) == before


def test_named_sides_of_pairs_and_named_rated_answers():
    record = {"q": {"text": "hi"}, "good": "5", "bad": "6", "chosen": 3}
    keys = Keys("q.text", chosen="good", rejected="bad")
    assert to_pair(named(record, keys)) == ([("hi", "5"), ("hi", "6")], 0.0)
    turns = {"good": [USER, ASSISTANT], "bad": [USER, {**ASSISTANT, "content": "6"}]}
    turns = named(turns, Keys(chosen="good", rejected="bad"))
    assert to_pair(turns) == ([([USER], "5"), ([USER], "6")], 0.0)
    assert to_rated(named({"q": "hi", "a": "5", "score": 2}, Keys("q", "a"))) == ([("hi", "5")], 2.0)
    both = {"score": 2, "q": {"text": "hi"}, "good": "a", "bad": "b"}
    assert is_rated(both) and not is_rated(named(both, keys))


@pytest.mark.parametrize(
    ("form", "record", "keys", "says"),
    [
        (
            to_prompt,
            {"problem": "hi", "x": 1},
            Keys("q"),
            r'no "q" \(--prompt_key\); keys found: "problem", "x"',
        ),
        (to_prompt, {"q": "hi"}, Keys("q", "a"), r'no "a" \(--answer_key\); keys found: "q"'),
        (to_prompt, {"q": None}, Keys("q"), r'no "q" \(--prompt_key\)'),
        (to_prompt, {"q": {"x": "hi"}}, Keys("q.y"), r'no "q\.y" \(--prompt_key\); keys found: "q"$'),
        (to_prompt, {"q": "hi"}, Keys("q.y"), r'no "q\.y" \(--prompt_key\); keys found: "q"$'),
        (to_prompt, {"q": 5}, Keys("q"), "must be text or a list of"),
        (to_prompt, {"q": []}, Keys("q"), "not empty"),
        (to_prompt, {"q": ""}, Keys("q"), "prompt is empty"),
        (to_demonstration, {"q": "hi", "a": [USER]}, Keys("q", "a"), "no answer to learn from"),
        (to_prompt, {"q": "hi", "a": [{"x": 1}]}, Keys("q", "a"), "turn 1 of the conversation has no text"),
        (to_pair, {"prompt": "hi", "bad": "5"}, Keys(chosen="good", rejected="bad"), r"\(--chosen_key\)"),
        (to_pair, {"prompt": "hi", "good": "5"}, Keys(chosen="good", rejected="bad"), r"\(--rejected_key\)"),
    ],
)
def test_what_is_not_there_is_named_with_the_keys_found(form, record, keys, says):
    with pytest.raises(InputError, match=says):
        form(named(record, keys))


def test_a_list_of_many_keys_is_cut():
    line = keys_found({f"key\n{i}": 1 for i in range(1000)})
    assert len(line) < 250 and "\n" not in line
    assert to_prompt(named({"a": {"b": "hi"}, "c": {"d": 0}}, Keys("a.b", "c.d"))) == ("hi", "0")


def test_files_are_read_by_the_named_keys_line_by_line(chat, jsonl):  # noqa: F811
    path = jsonl({"q": "hi", "a": "5", "x": 1}, {"q": [USER], "a": 5, "prompt": "another"})
    prompts = RLAIFDataset(path, chat, 100, keys=Keys("q", "a"))
    assert prompts[0].prompt_ids == prompts[1].prompt_ids and [p.answer for p in prompts] == ["5", "5"]
    assert list(prompts.columns) == ["q", "a", "x", "prompt"]  # of all records
    one, two = SFTDataset(path, chat, 100, keys=Keys("q", "a"))
    assert one == two
    with pytest.raises(InputError, match=r'data\.jsonl:2: no "b" \(--prompt_key\); keys found: "q"'):
        RLAIFDataset(jsonl({"b": "hi"}, {"q": "hi"}), chat, 100, keys=Keys("b"))


def test_reward_functions_get_the_record_as_the_file_has_it(chat, jsonl):  # noqa: F811
    turns = [USER, {"role": "tool", "content": "7"}]
    record = {"q": turns, "answer": ["a", "b"], "score": 1, "reward_model": {"ground_truth": "5"}}
    keys = Keys("q", "reward_model.ground_truth")
    prompts = RLAIFDataset(jsonl(record), chat, 100, keys=keys)
    logged = LoggedAnswers(jsonl(record), chat, 100, keys=keys, max_response=9, eos=[chat.eos_token_id])
    for data in (prompts, logged):
        assert data[0].record == record and data[0].prompt == [USER]
        assert list(data.columns) == list(record)
    assert prompts[0].answer == logged[0].response == "5"


# ---------------------------------------------------------------------------------------------------------
# The flags, in all three scripts


SIZES = {"batch_size": 4, "max_steps": 1, "device": "cpu", "max_seq_len": 32, "eval_interval": 0}


def test_ppo_takes_the_named_keys_and_compares_them_on_resuming(tmp_path):
    files = run_files(tmp_path)
    records = [{"prompt": "a", "x": {"q": "b c d"}, "gold": "a"}] * 4
    path = write_jsonl(tmp_path / "named.jsonl", records)
    files |= {"data_path": path, "eval_data_path": path, "out_dir": tmp_path / "out", "run_name": "r"}
    sizes = SIZES | {"mini_batch_size": 4, "max_gen_len": 4, "critic_warmup_steps": 0}
    del sizes["device"], sizes["eval_interval"]
    train(**files, **sizes, prompt_key="x.q", answer_key="gold")
    assert read_jsonl(tmp_path / "out/r/samples.jsonl")[0]["prompt"] == "b c d"
    assert "eval/accuracy" in read_jsonl(tmp_path / "out/r/metrics.jsonl")[0]
    with pytest.raises(InputError, match=r"--prompt_key was 'x\.q' and is now ''; set it back"):
        train(**files, **sizes, answer_key="gold", resume="auto")


def test_the_two_stages_before_take_them_as_well(tmp_path):
    tokenizer = word_tokenizer(list("abcdefgh"), chat=True)
    model = save_policy_dir(tmp_path / "policy", tokenizer)
    records = [{"q": {"x": "a b"}, "good": "c", "bad": "d e"}] * 8
    common = SIZES | {"data_path": write_jsonl(tmp_path / "named.jsonl", records), "model": model}
    common |= {"eval_size": 4, "out_dir": tmp_path, "prompt_key": "q.x"}
    train_sft.main(flags(**common, answer_key="good"))
    train_reward.main(flags(**common, chosen_key="good", rejected_key="bad", max_gen_len=4))
    assert (tmp_path / "full_sft_32.pth").is_file() and (tmp_path / "reward_32").is_dir()
    with pytest.raises(
        InputError, match=r'named\.jsonl:1: no "rejected"; keys found: .*"bad".*--rejected_key'
    ):
        train_reward.main(flags(**common, chosen_key="good", max_gen_len=4))
