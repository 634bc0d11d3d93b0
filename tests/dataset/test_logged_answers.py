"""Logged answers: pairs and rated answers, as the policy would have written them."""

import pytest
from tiny import WORDS, tiny_llama, word_tokenizer, write_jsonl
from tokenizers.processors import TemplateProcessing

from dataset.lm_dataset import LoggedAnswers, LoggedPairs, RLAIFDataset, SFTDataset
from errors import InputError
from trainer.generation.engine import sample
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts

PAIRS = [
    {"prompt": "a b", "chosen": "c d", "rejected": "e"},
    {"prompt": [{"role": "user", "content": "b"}], "chosen": [{"role": "assistant", "content": "f f f"}]}
    | {"rejected": [{"role": "assistant", "content": "g"}]},
    {"chosen": "\n\nHuman: a c\n\nAssistant: b", "rejected": "\n\nHuman: a c\n\nAssistant: d d"},
]
RATED = [{"prompt": "a b", "answer": "c", "score": 2.5}, {"user_input": "d", "completion": "", "score": "-1"}]


def load(tmp_path, records, chat=True, kind=LoggedAnswers, limits=(20, 20), **more):
    path = write_jsonl(tmp_path / "logged.jsonl", records)
    return kind(path, word_tokenizer(WORDS, chat), limits[0], max_response=limits[1], eos=[0], **more)


@pytest.mark.parametrize("chat", [False, True])
def test_a_pair_is_two_answers_of_which_each_is_tokenised_as_in_the_other_stages(tmp_path, chat):
    logged = load(tmp_path, PAIRS, chat)
    assert len(logged) == 6 and logged.pairs
    items = [logged[i] for i in range(6)]
    assert [item.score for item in items] == [1, -1] * 3
    prompts = RLAIFDataset(logged.path, logged.tokenizer, 20)
    demonstrations = SFTDataset(logged.path, logged.tokenizer, 20)
    for n in range(3):
        chosen, rejected = items[2 * n], items[2 * n + 1]
        assert chosen.prompt_ids == rejected.prompt_ids == prompts[n].prompt_ids
        assert chosen.prompt == rejected.prompt == prompts[n].prompt and chosen.answer is None
        ids, mask = demonstrations[n]
        assert chosen.prompt_ids + chosen.response_ids == ids[: len(mask) - mask[::-1].index(1)]
        assert chosen.response_ids != rejected.response_ids
    assert items[0].response == "c d" and items[1].response == "e"
    assert items[0].response_ids == [WORDS.index("c") + 2, WORDS.index("d") + 2, 0]


def test_only_the_prompt_begins_with_the_bos_that_the_tokenizer_adds(tmp_path):
    tokenizer = word_tokenizer(WORDS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 1)]
    )
    logged = LoggedAnswers(
        write_jsonl(tmp_path / "l.jsonl", PAIRS[:1]), tokenizer, 20, max_response=20, eos=[0]
    )
    assert logged[0].prompt_ids[0] == 1
    assert logged[0].response_ids == [WORDS.index("c") + 2, WORDS.index("d") + 2, 0]


def test_a_record_of_a_pair_is_counted_once(tmp_path):
    logged = load(tmp_path, [{**PAIRS[0], "tools": [{"name": "f"}]}, *PAIRS[1:]])
    found = [logged[place] for place in (3, 0, 2)]
    assert [item.score for item in found] == [-1, 1, 1]


def test_rated_answers_have_their_own_score(tmp_path):
    logged = load(tmp_path, RATED)
    assert [item.score for item in logged] == [2.5, -1.0]
    assert [item.response_ids for item in logged] == [[WORDS.index("c") + 2, 0], [0]]
    assert logged[0].record == RATED[0]


def test_an_answer_of_the_policy_has_the_tokens_that_it_sampled(tmp_path):
    tokenizer, model = word_tokenizer(WORDS, chat=True), tiny_llama(10, seed=3)
    asked = [{"prompt": WORDS[n % 8]} for n in range(40)]
    prompts = RLAIFDataset(write_jsonl(tmp_path / "p.jsonl", asked), tokenizer, 20)
    ids = [prompt.prompt_ids for prompt in prompts]
    rollout = sample(model, ids, noise_keys(0, 0, range(40)), [0], 12, 1.0)
    ended = [i for i in range(40) if rollout.finished[i] and 1 not in rollout.responses()[i]]
    assert len(ended) > 10
    texts = response_texts(rollout, tokenizer)
    logged = load(tmp_path, [{**asked[i], "answer": texts[i], "score": 0} for i in ended])
    assert [item.prompt_ids + item.response_ids for item in logged] == [
        ids[i] + rollout.responses()[i] for i in ended
    ]


def test_what_is_too_long_is_dropped_and_counted(tmp_path):
    records = [
        {"prompt": "a", "chosen": "b b", "rejected": "c c c"},
        {"prompt": "a a a a a a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": "b", "rejected": "c"},
    ]
    logged = load(tmp_path, records, limits=(6, 3))
    assert [(item.prompt, item.response) for item in logged] == [("a", "b b"), ("d", "b"), ("d", "c")]
    assert logged.describe() == "3 (3 of 6 read dropped, longer than --max_seq_len or --max_gen_len)"
    assert logged.dropped == 3
    assert logged.longest == len(logged[0].prompt_ids)
    pairs = load(tmp_path, records, kind=LoggedPairs, limits=(6, 3))
    assert [(chosen.response, rejected.response) for chosen, rejected in pairs] == [("b", "c")]
    assert [chosen.prompt for chosen, _ in pairs] == ["d"] and pairs[0][1].score == -1
    for limits in ((1, 3), (6, 1)):
        with pytest.raises(InputError, match="every record is longer than --max_seq_len or --max_gen_len"):
            load(tmp_path, records, limits=limits)


def test_other_answers_or_scores_have_another_fingerprint(tmp_path):
    same = [load(tmp_path, RATED).fingerprint for _ in range(2)]
    other = load(tmp_path, [{**RATED[0], "score": 2.6}, RATED[1]]).fingerprint
    longer = load(tmp_path, [{**RATED[0], "answer": "d"}, RATED[1]]).fingerprint
    assert len({*same, other, longer}) == 3


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([*PAIRS, {"prompt": "a", "chosen": "b"}], r"logged.jsonl:4: no \"rejected\""),
        ([*RATED, PAIRS[0]], r"logged.jsonl:3: no rated answer"),
        ([{"prompt": "a", "answer": "b"}], r"logged.jsonl:1: no \"chosen\""),
        ([{"prompt": "", "answer": "b", "score": 1}], r"logged.jsonl:1: the prompt is empty"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, records, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path, records)


def test_an_answer_has_to_end_where_the_policy_ends(tmp_path):
    path = write_jsonl(tmp_path / "logged.jsonl", RATED)
    tokenizer = word_tokenizer(WORDS, chat=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' h ' }}{% endfor %}"
    with pytest.raises(InputError, match=r"logged.jsonl:1: the answer does not end with an EOS"):
        LoggedAnswers(path, tokenizer, 20, max_response=20, eos=[0])
    ends = LoggedAnswers(path, tokenizer, 20, max_response=20, eos=[0, WORDS.index("h") + 2])
    assert ends[0].response_ids == [WORDS.index("c") + 2, WORDS.index("h") + 2]
