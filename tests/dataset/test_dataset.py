"""Datasets: what is read from a file, the order of its records, shares of processes, templates, flags."""

from argparse import Namespace
from collections import Counter
from itertools import chain

import pytest
import tiny
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dataset.chat_template import (
    conversation_ids,
    own_system,
    prompt_text,
    set_system_prompt,
    set_template,
)
from dataset.formats import Keys
from dataset.lm_dataset import (
    LoggedAnswers,
    LoggedPairs,
    PreferenceDataset,
    RLAIFDataset,
    SFTDataset,
    epoch_order,
    global_batch,
    local_positions,
)
from model.loading import load_tokenizer
from trainer import train_reward, train_sft
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.inputs import describe_texts
from trainer.train_ppo import minibatch_rows

SYSTEM = {"role": "system", "content": "S"}


def test_prompts_are_read_with_the_chat_template_or_as_text(chat, plain, jsonl):
    messages = [tiny.user("one"), tiny.user("two")]
    asked = [SYSTEM, tiny.user("hi")]
    path = jsonl({"prompt": "hi", "answer": "5"}, "", {"prompt": messages}, {"prompt": asked})
    with_template = RLAIFDataset(path, chat, 100)
    without = RLAIFDataset(path, plain, 100)
    assert [p.index for p in with_template] == [0, 1, 2]  # the number of its record
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert with_template[0].prompt_ids == chat(text, add_special_tokens=False)["input_ids"]
    for data in (with_template, without):
        assert [p.prompt for p in data] == ["hi", messages, asked]  # as the file has them
        assert [p.answer for p in data] == ["5", None, None]
    assert [p.prompt_ids for p in without] == [plain(t)["input_ids"] for t in ("hi", "one\ntwo", "S\nhi")]


def test_long_prompts_are_dropped_not_cut(chat, jsonl):
    path = jsonl({"prompt": "2 " * 50}, {"prompt": "hi"}, {"prompt": "3 " * 50})
    data = RLAIFDataset(path, chat, 30)
    assert len(data) == 1 and data.dropped == 2 and data[0].index == 1
    assert data[0].prompt == "hi"
    sides = jsonl({"prompt": "hi", "chosen": "5", "rejected": "6"})
    for kind in (RLAIFDataset, SFTDataset, PreferenceDataset):
        tiny.refused("--max_seq_len", kind, sides, chat, 3)


def test_a_wrong_record_is_named_with_file_and_line(chat, jsonl):
    refusing = AutoTokenizer.from_pretrained(tiny.ROOT / "dataset/demo/tokenizer")
    refusing.chat_template = "{% if messages[0].content == 'a' %}{{ raise_exception('no a') }}{% endif %}b"
    fine = {"prompt": "b", "answer": "b"}
    sides = {"prompt": "b", "chosen": "b", "rejected": "c"}
    cases = [
        (RLAIFDataset, [fine, fine, {"prompt": "a"}], 3, "no a", refusing),
        (SFTDataset, [fine, {"prompt": "b"}], 2, "no answer", chat),
        (PreferenceDataset, [{"prompt": "b", "chosen": "5"}], 1, 'no "rejected"', chat),
        (logged, [sides, {"prompt": "b", "chosen": "c"}], 2, 'no "rejected"', chat),
        (logged, [{**fine, "score": 1}, sides], 2, "no rated answer", chat),
        (logged, [{**fine, "prompt": "", "score": 1}], 1, "the prompt is empty", chat),
    ]
    for kind, records, line, says, tokenizer in cases:
        tiny.refused(rf"data\.jsonl:{line}: .*{says}", kind, jsonl(*records), tokenizer, 100)


def test_named_keys_are_read_line_by_line_and_records_stay_as_they_are(chat, jsonl):
    path = jsonl({"q": "hi", "a": "5", "x": 1}, {"q": [tiny.user("hi")], "a": 5, "prompt": "another"})
    prompts = RLAIFDataset(path, chat, 100, keys=Keys("q", "a"))
    assert prompts[0].prompt_ids == prompts[1].prompt_ids and [p.answer for p in prompts] == ["5", "5"]
    assert list(prompts.columns) == ["q", "a", "x", "prompt"]  # of all records
    one, two = SFTDataset(path, chat, 100, keys=Keys("q", "a"))
    assert one == two
    says = r'data\.jsonl:2: no "b" \(--prompt_key\); keys found: "q"'
    tiny.refused(says, RLAIFDataset, jsonl({"b": "hi"}, {"q": "hi"}), chat, 100, keys=Keys("b"))
    turns = [tiny.user("hi"), {"role": "tool", "content": "7"}]
    record = {"q": turns, "answer": ["a", "b"], "score": 1, "reward_model": {"ground_truth": "5"}}
    keys = Keys("q", "reward_model.ground_truth")
    prompts = RLAIFDataset(jsonl(record), chat, 100, keys=keys)
    answers = logged(jsonl(record), chat, 100, keys=keys)
    for data in (prompts, answers):
        assert data[0].record == record and data[0].prompt == turns
        assert list(data.columns) == list(record)
    assert prompts[0].answer == answers[0].response == "5"


def test_the_fingerprints_of_files_are_those_of_older_runs(tmp_path):
    """As the program of November 2026 computed them, before a Prompt had its record: older runs resume."""
    demo = tiny.ROOT / "dataset/demo"
    tokenizer = AutoTokenizer.from_pretrained(demo / "tokenizer")
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join((demo / "preferences_eval.jsonl").read_text().splitlines(True)[:20]))
    assert RLAIFDataset(path, tokenizer, 256).fingerprint == "1c49c9e97e63"
    assert SFTDataset(path, tokenizer, 256).fingerprint == "148ae2e3bc8e"
    assert PreferenceDataset(path, tokenizer, 256).fingerprint == "a82db1cd73ad"


def test_order_is_a_pure_function_and_global_batches_are_one_endless_stream():
    assert sorted(epoch_order(20, 1, 0)) == list(range(20))
    orders = [epoch_order(20, *key).tolist() for key in ((1, 0), (1, 1), (2, 1), (2 + 2**32, 1), (1, 0))]
    assert orders[0] == orders[4] and len({tuple(order) for order in orders}) == 4
    assert epoch_order(8, 42, 3).tolist() == [2, 6, 5, 1, 3, 7, 0, 4]  # the same under every numpy
    stream = [i for epoch in range(4) for i in epoch_order(7, 5, epoch)]
    batches = [global_batch(7, 5, step, 4) for step in range(7)]
    assert [i for batch in batches for i in batch] == stream
    assert global_batch(3, 0, 0, 7) == [i for e in range(3) for i in epoch_order(3, 0, e)][:7]
    assert local_positions(4, 1, 2, 1) == [1, 3, 5, 7]
    assert local_positions(3, 0, 2, 1) == [0, 2, 4]  # the last minibatch may be smaller


SHARES = [  # a batch, a minibatch over all processes, answers to a prompt, how many of these together
    (16, 8, 1, 1),
    (32, 8, 4, 1),
    (32, 8, 8, 2),
    (96, 32, 6, 2),
]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("batch", "mini", "answers", "together"), SHARES)
def test_answers_to_a_prompt_are_spread_over_minibatches(world, batch, mini, answers, together):
    """batch, mini: over all processes. A minibatch is the same set of positions for any number of processes;
    it has ``together`` answers to each of its prompts; a process has all answers to a prompt, in a row."""
    sizes = batch // world, mini // world
    ranks = [local_positions(sizes[0], rank, world, answers) for rank in range(world)]
    assert sorted(chain(*ranks)) == list(range(batch))
    for positions in ranks:
        for first in range(0, len(positions), answers):
            start = positions[first]
            assert start % answers == 0
            assert positions[first : first + answers] == list(range(start, start + answers))
    cut, alone = minibatch_rows(*sizes, answers), minibatch_rows(batch, mini, answers)
    one = local_positions(batch, 0, 1, answers)
    assert [len(rows) for rows in cut] == [sizes[1]] * (batch // mini)
    for rows, rows_alone in zip(cut, alone, strict=True):
        found = sorted(positions[row] for positions in ranks for row in rows)
        assert found == sorted(one[row] for row in rows_alone)
        assert set(Counter(position // answers for position in found).values()) == {together}


def learned(tokenizer, sample):
    ids, mask = sample
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


def test_what_the_assistant_says_is_learned(chat, plain, jsonl):
    turns = [tiny.user("hi"), tiny.assistant("yes")]
    path = jsonl({"prompt": "2 + 3", "answer": "5"}, {"conversations": turns * 2})
    one, two = SFTDataset(path, chat, 100)
    assert chat.decode(one[0]) == "<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    assert one[1] == [0] * (len(one[0]) - 3) + [1, 1, 0]  # "5", <|im_end|>, not the newline
    assert learned(chat, two) == "yes<|im_end|>yes<|im_end|>"
    prompt = RLAIFDataset(path, chat, 100)[0].prompt_ids
    assert one[0][: len(prompt)] == prompt  # what PPO will generate from
    no = [turns[0], tiny.assistant("yes <|im_end|>", weight=0)]
    for talk in ([*no, turns[0], tiny.assistant("5", weight=1)], [turns[0], tiny.assistant("5"), *no]):
        assert learned(chat, SFTDataset(jsonl({"messages": talk}), chat, 100)[0]) == "5<|im_end|>"
    for tokenizer in (chat, plain):
        path = jsonl({"messages": no})
        tiny.refused(":1: no answer to learn from: its", SFTDataset, path, tokenizer, 100)
        (prompt,) = RLAIFDataset(path, tokenizer, 100)
        assert (prompt.prompt, prompt.answer) == (turns[:1], "yes <|im_end|>")
    text = SFTDataset(jsonl({"prompt": "2 + 3 =", "answer": " 5"}), plain, 100)[0]
    assert plain.decode(text[0]) == "2 + 3 = 5<|im_end|>"
    assert learned(plain, text) == " 5<|im_end|>"


def test_a_text_is_learned_whole(chat, plain, jsonl):
    for tokenizer in (chat, plain):
        ((ids, mask),) = SFTDataset(jsonl({"text": "2 + 3 = 5"}), tokenizer, 100)
        assert tokenizer.decode(ids) == "2 + 3 = 5<|im_end|>"
        assert mask == [0] + [1] * (len(ids) - 1)  # the first token cannot be predicted
    tokenizer = adding("</s>")  # OPT's tokenizer puts its EOS before every text
    ((ids, mask),) = SFTDataset(jsonl({"text": "a b"}), tokenizer, 100)
    assert ids == [0, *tokenizer.convert_tokens_to_ids(["a", "b"]), 0] and mask == [0, 1, 1, 1]


def adding(token):
    """A tokenizer that puts this token before any text."""
    tokenizer = tiny.word_tokenizer(tiny.WORDS)
    special = [(token, tokenizer.convert_tokens_to_ids(token))]
    processor = TemplateProcessing(single=f"{token} $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def test_the_system_message_comes_first_unless_there_is_one(chat, plain, jsonl):
    path = jsonl({"prompt": "hi"}, {"prompt": [{"role": "system", "content": "own"}, tiny.user("hi")]})
    one, two = RLAIFDataset(path, chat, 100, "S")
    assert one.prompt == [SYSTEM, tiny.user("hi")]  # what the reward model reads as well
    text = chat.apply_chat_template(one.prompt, tokenize=False, add_generation_prompt=True)
    assert chat.decode(one.prompt_ids) == text
    assert two.prompt[0]["content"] == "own"
    path = jsonl({"prompt": "hi", "chosen": "5", "rejected": "6"})
    read_by_ppo = conversation_ids(chat, [([SYSTEM, tiny.user("hi")], "5")])[0]
    assert PreferenceDataset(path, chat, 100, "S")[0][0] == read_by_ppo
    assert SFTDataset(path, chat, 100, "S")[0][0][: len(one.prompt_ids)] == one.prompt_ids
    tiny.refused(r"--system_prompt: .*no chat template", set_system_prompt, plain, "S")


WRITTEN = "<|im_start|>system\\nYou are\\n a model.<|im_end|>\\n"
OWN = "{% if messages[0].role != 'system' %}{{ '" + WRITTEN + "' }}{% endif %}"
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def test_the_system_text_that_a_template_writes_by_itself_is_said(chat, plain, jsonl):
    """Not by templates that write none, write it beside the user's text, or take no system message."""
    data = RLAIFDataset(jsonl({"prompt": "hi"}), chat, 100)
    own = chat.chat_template
    beside = "{{ 'user ' + (messages[0].content if messages[1:] else '') + messages[-1].content }}"
    for template, text in ((OWN + own, "You are\n a model."), (own, ""), (PICKY + own, ""), (beside, "")):
        chat.chat_template = template
        assert own_system(chat) == text, template
    assert own_system(plain) == ""
    chat.chat_template = OWN + own
    for given, line in (("", "system   the chat template's own: You are a model. ("), ("S", "system   S")):
        args = Namespace(system_prompt=given, chat_template_kwargs=None, num_workers=0)
        (said,) = describe_texts(args, [None, data])
        assert said.startswith(line)
    args = Namespace(system_prompt="S", chat_template_kwargs=None, num_workers=8)  # as in MiniMind's commands
    assert describe_texts(args, [data])[0] == (
        "note     --num_workers changes nothing: the main process reads the records"
    )


def test_no_text_has_the_byte_order_mark_of_its_file(plain, chat, tmp_path):
    (tmp_path / "t.txt").write_text("Q: {prompt} A:\n", "utf-8-sig")
    set_template(plain, str(tmp_path / "t.txt"))
    assert prompt_text(plain, "hi") == "Q: hi A:"
    chat.save_pretrained(tmp_path / "chat")
    file = tmp_path / "chat" / "chat_template.jinja"
    file.write_text(chat.chat_template, "utf-8-sig")
    assert load_tokenizer(tmp_path / "chat").chat_template == chat.chat_template
    # As the shell gives it: --system_prompt "$(cat system.txt)"
    args = train_sft.parse_args(["--system_prompt", "\ufeffBe short.", "--data_path=\ufeffx"])
    assert (args.system_prompt, args.data_path) == ("Be short.", "x")


def test_a_text_as_template(plain, jsonl, tmp_path):
    template = "\\n\\nHuman: {prompt}\\n\\nAssistant:"
    (tmp_path / "template.txt").write_text(template.replace("\\n", "\n") + "\n", "utf-8")
    talk = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 2 + 3\n\nAssistant:"
    eos = plain.eos_token
    for given in (template, str(tmp_path / "template.txt")):
        plain.chat_template = None
        set_template(plain, given)
        data = list(RLAIFDataset(jsonl({"prompt": "2 + 3"}, {"prompt": talk}), plain, 100))
        assert plain.decode(data[0].prompt_ids) == "\n\nHuman: 2 + 3\n\nAssistant:"
        assert plain.decode(data[1].prompt_ids) == talk.replace(" yes?", f"yes?{eos}")
        one = SFTDataset(jsonl({"prompt": "2 + 3", "answer": "5"}), plain, 100)[0]
        assert plain.decode(one[0]) == f"\n\nHuman: 2 + 3\n\nAssistant:5{eos}"
        assert learned(plain, one) == f"5{eos}"
        plain.save_pretrained(tmp_path / "saved")
        assert type(plain).from_pretrained(tmp_path / "saved").chat_template == plain.chat_template
    for tokenizer, begins in ((words(chat=False), []), (adding("</s>"), [0])):
        tokenizer.bos_token = tokenizer.eos_token  # a template keeps the BOS that the tokenizer would add
        set_template(tokenizer, "a {prompt} b")
        ids = RLAIFDataset(jsonl({"prompt": "c"}), tokenizer, 100)[0].prompt_ids
        assert ids == begins + tokenizer("a c b", add_special_tokens=False)["input_ids"]
    meaning = '{"q": "%s", "ü\'": 1}'  # characters with a meaning in Jinja strings
    jinja = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    for given, shown in ((meaning % "{prompt}", meaning % "hi"), (jinja, "<hi>")):
        set_template(plain, given)
        assert prompt_text(plain, "hi") == shown
    turns = [SYSTEM, *[tiny.user("hi"), tiny.assistant("yes")] * 2]
    talk = SFTDataset(jsonl({"messages": turns}), plain, 100)[0]
    # although nothing in this template says whose turn it is, or ends one
    assert learned(plain, talk) == f"<yes><yes>{eos}"
    typo = "{% for m in messages %}Q: {{ m['contents'] }}{% endfor %}"
    for template in ("no hole", "{prompt} {prompt}", "{{ nonsense", typo):
        tiny.refused("--prompt_template", set_template, plain, template)
    plain.eos_token = None
    tiny.refused(r"--prompt_template.*no EOS token to end answers with", set_template, plain, "a {prompt} b")


PAIRS = [
    {"prompt": "a b", "chosen": "c d", "rejected": "e"},
    {"prompt": [tiny.user("b")], "chosen": [tiny.assistant("f f f")], "rejected": [tiny.assistant("g")]},
    {"chosen": "\n\nHuman: a c\n\nAssistant: b", "rejected": "\n\nHuman: a c\n\nAssistant: d d"},
]
RATED = [{"prompt": "a b", "answer": "c", "score": 2.5}, {"user_input": "d", "completion": "", "score": "-1"}]
C, D, H = (tiny.WORDS.index(word) + 2 for word in "cdh")


def logged(path, tokenizer, limit=20, kind=LoggedAnswers, max_response=20, eos=None, **more):
    eos = eos or [tokenizer.eos_token_id]
    return kind(path, tokenizer, limit, max_response=max_response, eos=eos, **more)


def words(chat=True):
    return tiny.word_tokenizer(tiny.WORDS, chat)


@pytest.mark.parametrize("chat", [False, True])
def test_a_pair_is_two_answers_of_which_each_is_tokenised_as_in_the_other_stages(jsonl, chat):
    path = jsonl(*PAIRS)
    data = logged(path, words(chat))
    assert len(data) == 6 and data.pairs
    items = [data[i] for i in range(6)]
    assert [item.score for item in items] == [1, -1] * 3
    prompts = RLAIFDataset(path, words(chat), 20)
    demonstrations = SFTDataset(path, words(chat), 20)
    for n in range(3):
        chosen, rejected = items[2 * n], items[2 * n + 1]
        assert chosen.prompt_ids == rejected.prompt_ids == prompts[n].prompt_ids
        assert chosen.prompt == rejected.prompt == prompts[n].prompt and chosen.answer is None
        ids, mask = demonstrations[n]
        assert chosen.prompt_ids + chosen.response_ids == ids[: len(mask) - mask[::-1].index(1)]
        assert chosen.response_ids != rejected.response_ids
    assert items[0].response == "c d" and items[1].response == "e"
    assert items[0].response_ids == [C, D, 0]


def test_an_answer_of_the_policy_has_the_tokens_that_it_sampled(tmp_path, jsonl):
    tokenizer, model = words(), tiny.tiny_llama(10, seed=3)
    asked = [{"prompt": tiny.WORDS[n % 8]} for n in range(40)]
    prompts = RLAIFDataset(tiny.write_jsonl(tmp_path / "p.jsonl", asked), tokenizer, 20)
    ids = [prompt.prompt_ids for prompt in prompts]
    rollout = Sampler(model).sample(ids, noise_keys(0, 0, range(40)), [0], 12, 1.0)
    ended = [i for i in range(40) if rollout.finished[i] and 1 not in rollout.responses()[i]]
    assert len(ended) > 10
    texts = response_texts(rollout, tokenizer)
    data = logged(jsonl(*({**asked[i], "answer": texts[i], "score": 0} for i in ended)), tokenizer)
    found = [item.prompt_ids + item.response_ids for item in data]
    assert found == [ids[i] + rollout.responses()[i] for i in ended]


def test_rated_answers_have_their_own_score_and_end_where_the_policy_ends(jsonl):
    data = logged(jsonl(*RATED), words())
    assert [item.score for item in data] == [2.5, -1.0]
    assert [item.response_ids for item in data] == [[C, 0], [0]]
    assert data[0].record == RATED[0]
    item = logged(jsonl(RATED[0]), adding("<unk>"))[0]  # the prompt alone begins with a BOS
    assert item.prompt_ids[0] == 1 and item.response_ids == [C, 0]
    others = ([{**RATED[0], "score": 2.6}, RATED[1]], [{**RATED[0], "answer": "d"}, RATED[1]], RATED)
    prints = [logged(jsonl(*records), words()).fingerprint for records in others]
    assert len(set(prints)) == 3 and prints[2] == data.fingerprint
    tokenizer = words()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' h ' }}{% endfor %}"
    tiny.refused(r"data.jsonl:1: the answer does not end with an EOS", logged, jsonl(*RATED), tokenizer)
    assert logged(jsonl(*RATED), tokenizer, eos=[0, H])[0].response_ids == [C, H]


def test_answers_that_are_too_long_are_dropped_and_counted(jsonl):
    path = jsonl(
        {"prompt": "a", "chosen": "b b", "rejected": "c c c"},
        {"prompt": "a a a a a a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": "b", "rejected": "c"},
    )
    data = logged(path, words(), 6, max_response=3)
    assert [(item.prompt, item.response) for item in data] == [("a", "b b"), ("d", "b"), ("d", "c")]
    assert data.describe() == "3 (3 of 6 read dropped, longer than --max_seq_len or --max_gen_len)"
    assert data.longest == len(data[0].prompt_ids)
    ((chosen, rejected),) = logged(path, words(), 6, kind=LoggedPairs, max_response=3)
    assert (chosen.prompt, chosen.response, rejected.response, rejected.score) == ("d", "b", "c", -1)
    for limit, most in ((1, 3), (6, 1)):
        says = "every record is longer than --max_seq_len or --max_gen_len"
        tiny.refused(says, logged, path, words(), limit, max_response=most)


SIZES = {"batch_size": 4, "max_steps": 1, "max_seq_len": 32}


def test_ppo_takes_the_named_keys_and_compares_them_on_resuming(tmp_path, capsys):
    """And of an answer in the shape of GSM8K's the number."""
    files = tiny.run_files(tmp_path) | {"reward_fn": f"{tiny.ROOT}/trainer/rewards/rules.py:exact_answer"}
    records = [{"prompt": "a", "x": {"q": "b c d"}, "gold": "6*12\n#### 72", "tools": [{}]}] * 4
    long = records[0] | {"x": {"q": "b " * 40}}
    path = tiny.write_jsonl(tmp_path / "named.jsonl", [*records, long])
    files |= {"data_path": path, "eval_data_path": path, "out_dir": tmp_path / "out", "run_name": "r"}
    files |= SIZES | {"mini_batch_size": 4, "max_gen_len": 4, "critic_warmup_steps": 0, "reasoning": 0}
    tiny.train(**files, prompt_key="x.q", answer_key="gold")
    said = capsys.readouterr().out
    assert said.count(f"note     {path}: no tool is run; ") == 1  # though it is held out too
    keeps = "longer than --max_seq_len 32; --max_seq_len 43 keeps them"  # user, 40 words, </s>, assistant
    assert f"\nheld out 4 (1 of 5 read dropped, {keeps}) prompts\n" in said
    assert tiny.read_jsonl(tmp_path / "out/r/samples.jsonl")[0]["prompt"] == "b c d"
    assert "  held out at step 1: accuracy 0.000 | greedy 0.000 | " in said
    assert "because eval/function was never above 0.000\n" in said
    says = r"--prompt_key was 'x\.q' and is now ''; set it back"
    tiny.refused(says, tiny.train, **files, answer_key="gold", resume="auto")


def test_the_two_stages_before_take_them_as_well(tmp_path, capsys):
    model = tiny.save_policy_dir(tmp_path / "policy", words())
    records = [{"q": {"x": "a b"}, "good": "c", "bad": "d e", "tools": [{}]}] * 8
    long = records[0] | {"good": "c " * 40}
    path = tiny.write_jsonl(tmp_path / "named.jsonl", [*records, long])
    common = SIZES | {"data_path": path, "model": model, "device": "cpu", "eval_interval": 0}
    common |= {"out_dir": tmp_path, "prompt_key": "q.x"}
    limit = "--max_seq_len 32; --max_seq_len 46 keeps them"  # user a b </s> assistant, 40 words, </s>
    dropped = f" (1 of 9 read dropped, longer than {limit})\n"
    train_sft.main(tiny.flags(**common, answer_key="good", eval_size=4))
    said = capsys.readouterr().out
    assert said.count("no tool is run; lists of tools are left out") == 1
    assert f": 4{dropped}held out 4\n" in said  # what was dropped counts once
    train_reward.main(tiny.flags(**common, eval_data_path=path, chosen_key="good", rejected_key="bad"))
    assert f": 8{dropped}held out 8{dropped}" in capsys.readouterr().out
    assert (tmp_path / "full_sft_32.pth").is_file() and (tmp_path / "reward_32").is_dir()
    says = r'named\.jsonl:1: no "rejected"; keys found: .*"bad"'
    tiny.refused(says, train_reward.main, tiny.flags(**common, chosen_key="good"))
