"""Datasets: prompts, chat templates, the order of records, shares of processes; on tiny and real files."""

import json
from collections import Counter
from itertools import chain

import pytest
from tiny import ROOT, word_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dataset.chat_template import conversation_ids
from dataset.data_order import (
    epoch_order,
    global_batch,
    local_positions,
    minibatch_rows,
    record_batches,
)
from dataset.demo.make_tokenizer import build_tokenizer
from dataset.lm_dataset import PreferenceDataset, RLAIFDataset, SFTDataset
from dataset.record_files import open_records
from errors import InputError

SHARED = ROOT.parent / "shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="real data is not here")


@pytest.fixture(scope="module")
def chat():
    """A tokenizer like the demo's: a chat template, one token per digit."""
    return build_tokenizer(["user assistant system", "What is two plus three?", "2 + 3 = 5"])


@pytest.fixture(scope="module")
def plain(chat, tmp_path_factory):
    """The same without a chat template."""
    folder = tmp_path_factory.mktemp("plain")
    chat.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), "utf-8")
        return path

    return write


# ---------------------------------------------------------------------------------------------------------
# Prompts


def test_minimind_conversations(chat, jsonl):
    user, placeholder = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "7"}
    path = jsonl(
        {"conversations": [user, placeholder]},
        {"conversations": [{"content": "hi"}, {"content": "7"}]},  # no roles: user, assistant, ...
        {"conversations": [user]},  # ends with the question: nothing to drop, no answer
        {"conversations": [{"role": "system", "content": "S"}, user, placeholder, user, placeholder]},
    )
    data = RLAIFDataset(path, chat, 100)
    assert [p.index for p in data] == [0, 1, 2, 3]
    assert [p.answer for p in data] == ["7", "7", None, "7"]
    assert data[0].prompt == data[1].prompt == data[2].prompt == [user]
    assert [m["role"] for m in data[3].prompt] == ["system", "user", "assistant", "user"]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert data[0].prompt_ids == chat(text, add_special_tokens=False)["input_ids"]
    assert chat.decode(data[0].prompt_ids) == text


def test_prompt_records(chat, plain, jsonl):
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    path = jsonl({"prompt": "hi", "answer": "5"}, "", {"prompt": messages})
    with_template = RLAIFDataset(path, chat, 100)
    assert [p.prompt for p in with_template] == ["hi", messages]  # as the file has them
    one_message = chat.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.decode(with_template[0].prompt_ids).startswith(one_message)
    assert (with_template[0].answer, with_template[1].answer) == ("5", None)
    without = RLAIFDataset(path, plain, 100)
    assert [p.prompt for p in without] == ["hi", messages]
    assert [p.prompt_ids for p in without] == [plain(text)["input_ids"] for text in ("hi", "one\ntwo")]


def test_long_prompts_are_dropped_not_cut(chat, jsonl):
    path = jsonl({"prompt": "2 " * 50}, {"prompt": "hi"}, {"prompt": "3 " * 50})
    data = RLAIFDataset(path, chat, 30)
    assert len(data) == 1 and data.dropped == 2 and data[0].index == 1  # the number of its record
    assert data[0].prompt == "hi"
    with pytest.raises(InputError, match="--max_seq_len"):
        RLAIFDataset(path, chat, 3)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"instruction": "a"}', 'no prompt .an "instruction" needs an "output" beside it'),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": 3}', "must be text or a list"),
        ('{"prompt": "a", "answer": [{}]}', "turn 1 of the conversation has no text"),
        ('{"conversations": []}', "not empty"),
        ('{"conversations": [{"role": "user"}]}', "turn 1"),
        ('{"conversations": [{"role": "assistant", "content": "x"}]}', "prompt is empty"),
    ],
)
def test_bad_lines_are_named(chat, jsonl, line, says):
    path = jsonl({"prompt": "fine"}, line)
    with pytest.raises(InputError, match=says) as caught:
        RLAIFDataset(path, chat, 100)
    assert f"{path}:2" in str(caught.value)


def test_bad_files(chat, plain, tmp_path, jsonl):
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        open_records(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="the library datasets cannot read it"):
        open_records(tmp_path)
    with pytest.raises(InputError, match="no records"):
        open_records(jsonl("", "  "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(InputError, match=r"latin\.jsonl:2: not JSON in UTF-8"):
        RLAIFDataset(tmp_path / "latin.jsonl", chat, 100)
    refusing = "{{ raise_exception('user turns only') }}"
    chat_template, chat.chat_template = chat.chat_template, refusing
    try:
        with pytest.raises(InputError, match=r"data\.jsonl:1: .*user turns only"):
            RLAIFDataset(jsonl({"prompt": "a"}), chat, 100)
    finally:
        chat.chat_template = chat_template


@needs_shared
def test_real_minimind_prompts():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "minimind2-tokenizer")
    data = RLAIFDataset(SHARED / "rlaif-mini.jsonl", tokenizer, 512)
    assert len(data) + data.dropped == 10000
    one = data[17]
    assert one.prompt_ids == tokenizer.apply_chat_template(
        one.prompt, add_generation_prompt=True, return_dict=False
    )
    few = RLAIFDataset(SHARED / "rlaif-mini.jsonl", tokenizer, 40)
    assert few.dropped > 0 and max(len(p.prompt_ids) for p in few) == 40


@needs_shared
def test_real_tokenizer_without_template(jsonl):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "dreams-260k")
    data = RLAIFDataset(jsonl({"prompt": "I dreamt of a tree"}), tokenizer, 64)
    assert data[0].prompt == "I dreamt of a tree"
    assert data[0].prompt_ids[0] == tokenizer.bos_token_id


def test_the_fingerprints_of_files_are_those_of_older_runs():
    """As the program of November 2026 computed them, before a Prompt had its record: older runs resume."""
    demo = ROOT / "dataset/demo"
    tokenizer = AutoTokenizer.from_pretrained(demo / "tokenizer")
    assert RLAIFDataset(demo / "eval.jsonl", tokenizer, 256).fingerprint == "64f8c7b817e2"
    assert SFTDataset(demo / "preferences_eval.jsonl", tokenizer, 256).fingerprint == "87ec6c742863"
    assert PreferenceDataset(demo / "preferences_eval.jsonl", tokenizer, 256).fingerprint == "7094bdd2ff3f"


# ---------------------------------------------------------------------------------------------------------
# Order


def test_order_is_a_pure_function():
    assert sorted(epoch_order(20, 1, 0)) == list(range(20))
    orders = [epoch_order(20, *key).tolist() for key in ((1, 0), (1, 1), (2, 1), (2 + 2**32, 1), (1, 0))]
    assert orders[0] == orders[4] and len({tuple(order) for order in orders}) == 4
    assert epoch_order(8, 42, 3).tolist() == [2, 6, 5, 1, 3, 7, 0, 4]  # the same under every numpy


def test_global_batches_are_one_endless_stream():
    stream = [i for epoch in range(4) for i in epoch_order(7, 5, epoch)]
    batches = [global_batch(7, 5, step, 4) for step in range(7)]
    assert [i for batch in batches for i in batch] == stream
    assert global_batch(3, 0, 0, 7) == [i for e in range(3) for i in epoch_order(3, 0, e)][:7]


def test_a_minibatch_is_the_same_set_for_any_number_of_processes():
    n, seed, global_size, global_mini = 50, 3, 16, 8
    whole = [global_batch(n, seed, step, global_size) for step in range(5)]
    for world in (1, 2, 4):
        size, mini = global_size // world, global_mini // world
        positions = [local_positions(size, rank, world) for rank in range(world)]
        ranks = [list(record_batches(n, seed, range(5), global_size, mine, 1)) for mine in positions]
        for step in range(5):
            for k in range(global_size // global_mini):
                rows = [i for rank in ranks for i in rank[step][k * mini : (k + 1) * mini]]
                assert sorted(rows) == sorted(whole[step][k * global_mini : (k + 1) * global_mini])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("batch", "mini", "answers", "together"),
    [
        (16, 8, 2, 1),
        (32, 8, 4, 1),
        (32, 8, 8, 2),
        (32, 8, 2, 1),
        (48, 16, 4, 4),
        (96, 32, 6, 2),
        (12, 12, 3, 3),
    ],
)
def test_answers_to_a_prompt_are_spread_over_minibatches(world, batch, mini, answers, together):
    """batch, mini: over all processes. A minibatch is the same set of positions for any number of processes;
    it has ``together`` answers to each of its prompts; a process has all answers to a prompt, in a row."""
    if mini % world or batch // answers % world:
        pytest.skip("these sizes cannot be shared")
    sizes = batch // world, mini // world
    ranks = [local_positions(sizes[0], rank, world, answers) for rank in range(world)]
    assert sorted(chain(*ranks)) == list(range(batch))
    for positions in ranks:
        for first in range(0, len(positions), answers):
            group = positions[first : first + answers]
            assert group == list(range(group[0], group[0] + answers))
            assert group[0] % answers == 0
    cut, alone = minibatch_rows(*sizes, answers), minibatch_rows(batch, mini, answers)
    one = local_positions(batch, 0, 1, answers)
    assert [len(rows) for rows in cut] == [sizes[1]] * (batch // mini)
    for rows, rows_alone in zip(cut, alone, strict=True):
        found = sorted(positions[row] for positions in ranks for row in rows)
        assert found == sorted(one[row] for row in rows_alone)
        asked = Counter(position // answers for position in found)
        assert set(asked.values()) == {together}


@pytest.mark.parametrize("world", [1, 2])
def test_a_prompt_is_read_once_for_all_its_answers(world):
    asked = [list(batches(16 // world, rank, world, answers=2)) for rank in range(world)]
    for step in range(6):
        batch = global_batch(10, 0, step, 8)
        assert sorted(chain(*(lists[step] for lists in asked))) == sorted(batch)
        for rank, lists in enumerate(asked):
            assert lists[step] == [batch[p // 2] for p in local_positions(16 // world, rank, world, 2)[::2]]


def batches(batch_size, rank, world, first=0, answers=1):
    positions = local_positions(batch_size, rank, world, answers)
    return record_batches(10, 0, range(first, 6), world * batch_size // answers, positions, answers)


def test_local_positions_and_resuming():
    assert local_positions(4, 0, 1) == [0, 1, 2, 3]
    assert local_positions(4, 1, 2) == [1, 3, 5, 7]
    assert local_positions(3, 0, 2) == [0, 2, 4]  # the last minibatch may be smaller
    whole = list(batches(4, 1, 2))
    assert list(batches(4, 1, 2, first=4)) == whole[4:] and len(whole) == 6
    batch = global_batch(10, 0, 4, 8)
    assert whole[4] == [batch[position] for position in local_positions(4, 1, 2)]


# ---------------------------------------------------------------------------------------------------------
# Demonstrations and preferences


def trained_text(tokenizer, sample):
    ids, mask = sample
    assert len(ids) == len(mask)
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


def test_sft_mask_covers_what_the_assistant_says(chat, plain, jsonl):
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    path = jsonl({"prompt": "2 + 3", "answer": "5"}, {"conversations": [user, assistant, user, assistant]})
    one, two = SFTDataset(path, chat, 100)
    assert chat.decode(one[0]) == "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    assert one[1] == [0] * (len(one[0]) - 3) + [1, 1, 0]  # "5", <|im_end|>, not the newline
    assert trained_text(chat, two) == "yes<|im_end|>yes<|im_end|>"
    prompt = RLAIFDataset(path, chat, 100)[0].prompt_ids
    assert one[0][: len(prompt)] == prompt  # what PPO will generate from

    text = SFTDataset(jsonl({"prompt": "2 + 3 =", "answer": " 5"}), plain, 100)[0]
    assert plain.decode(text[0]) == "2 + 3 = 5<|im_end|>"
    assert trained_text(plain, text) == " 5<|im_end|>"


def test_a_text_is_learned_to_its_end_where_it_begins_with_the_eos(jsonl):
    """OPT's tokenizer puts its EOS before every text."""
    tokenizer = word_tokenizer("ab")
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", eos)]
    )
    ((ids, mask),) = SFTDataset(jsonl({"text": "a b"}), tokenizer, 100)
    assert ids == [eos, *tokenizer.convert_tokens_to_ids(["a", "b"]), eos] and mask == [0, 1, 1, 1]


def test_sft_limits_and_errors(chat, jsonl):
    path = jsonl({"prompt": "hi", "answer": "5"}, {"prompt": "hi", "answer": "5 " * 50})
    data = SFTDataset(path, chat, 30)
    assert (len(data), data.dropped) == (1, 1)
    with pytest.raises(InputError, match=r"data\.jsonl:1: no answer"):
        SFTDataset(jsonl({"prompt": "hi"}), chat, 30)


def test_preferences_are_what_ppo_will_have_scored(chat, plain, jsonl):
    user = {"role": "user", "content": "hi"}
    as_text = {"prompt": "hi", "chosen": "5", "rejected": "6"}
    as_messages = {
        side: [user, {"role": "assistant", "content": as_text[side]}] for side in ("chosen", "rejected")
    }
    path = jsonl(as_text, {**as_text, "prompt": [user]}, as_messages)
    pairs = [pair[:2] for pair in PreferenceDataset(path, chat, 100)]
    assert pairs[0] == pairs[1] == pairs[2]
    for ids, response in zip(pairs[0], "56", strict=True):
        text = chat.apply_chat_template([user, {"role": "assistant", "content": response}], tokenize=False)
        assert ids == chat(text, add_special_tokens=False)["input_ids"]
        assert [ids, ids] == conversation_ids(chat, [([user], response), ("hi", response)])
    assert plain.decode(PreferenceDataset(path, plain, 100)[2][1]) == "hi\n6"
    with pytest.raises(InputError, match="--max_seq_len"):
        PreferenceDataset(path, chat, 4)
    with pytest.raises(InputError, match=r'data\.jsonl:1: no "rejected"; keys found: "prompt", "chosen"'):
        PreferenceDataset(jsonl({"prompt": "hi", "chosen": "5"}), chat, 100)
