"""Models that think: the template's switches, what their answers are rewarded for, which format they have.

The templates behave as Qwen3's and MiniMind-3's do: without thinking the prompt ends with an empty thought.
"""

import json
from unittest import mock

import pytest
import same_runs
import tiny
import torch
from test_invariants import make_run

import chat
import export
from dataset.chat_template import conversation_text, load_thinking, set_template_kwargs
from dataset.lm_dataset import LoggedAnswers, RLAIFDataset, SFTDataset
from errors import InputError
from model.loading import load_tokenizer
from trainer import train_ppo, train_reward, train_sft
from trainer.generation.engine import Sampler
from trainer.inputs import choose_reasoning, load_trained_tokenizer, read_prompts
from trainer.rewards.combine import EvalReward, Reward
from trainer.rewards.rules import thinking_reward

TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ 'assistant <think>\\n' + (m.content.split('</think>')[0].split('<think>')[-1].strip() "
    "if '</think>' in m.content else '') + '\\n</think>\\n\\n' + m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.role + ' ' + m.content }}{% endif %}{{ ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}"
)
EMPTY = "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
QWEN3 = TURNS + "{% if enable_thinking is defined and enable_thinking is false %}" + EMPTY
OPENING = "{% if open_thinking is defined and open_thinking is true %}{{ '<think>\\n' }}{% else %}"
MINIMIND3 = TURNS + OPENING + EMPTY
TEMPLATES = {"Qwen3": QWEN3, "MiniMind-3": MINIMIND3}
CLOSED, OPENED = "assistant <think>\n\n</think>\n\n", "assistant <think>\n"


def tokenizer_of(name, **kwargs):
    tokenizer = tiny.word_tokenizer([*tiny.WORDS, "user", "assistant", "<think>", "</think>"])
    tokenizer.chat_template = TEMPLATES.get(name)
    set_template_kwargs(tokenizer, json.dumps(kwargs))
    return tokenizer


RENDERED = [  # template, its arguments, the end of the prompt
    ("Qwen3", {}, "assistant "),
    ("Qwen3", {"enable_thinking": True}, "assistant "),
    ("Qwen3", {"enable_thinking": False}, CLOSED),
    ("MiniMind-3", {}, CLOSED),
    ("MiniMind-3", {"open_thinking": False}, CLOSED),
    ("MiniMind-3", {"open_thinking": True}, OPENED),
]


@pytest.mark.parametrize(("name", "kwargs", "end"), RENDERED)
def test_every_stage_renders_the_prompt_with_the_arguments(tmp_path, name, kwargs, end):
    tokenizer = tokenizer_of(name, **kwargs)
    (prompt,) = RLAIFDataset(tiny.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}]), tokenizer, 64)
    assert prompt.text == f"user a b </s> {end}"
    assert prompt.prompt_ids == tokenizer(prompt.text)["input_ids"]
    demonstration = [{"prompt": "a b", "answer": "<think>\nc\n</think>\n\nd"}]
    path = tiny.write_jsonl(tmp_path / "d.jsonl", demonstration)
    if end == CLOSED:  # this answer has a thought
        tiny.refused("cannot be split", SFTDataset, path, tokenizer, 64)
        return
    ((ids, mask),) = SFTDataset(path, tokenizer, 64)
    learned = [i for i, counts in zip(ids, mask, strict=True) if counts]
    assert ids[: len(prompt.prompt_ids)] == prompt.prompt_ids
    opened = "" if end == OPENED else "<think> "
    assert tokenizer.decode(learned) == f"{opened}c </think> d </s>"


DROPS = (
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{{ m.content.split('</think>')[-1] }}{% endif %}{{ ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
THOUGHT_OUT = {"role": "assistant", "content": "b", "reasoning_content": "a"}
SAID = [  # the last turn, whether a template that writes no thoughts writes all of it
    (tiny.assistant("<think>\na\n</think>\n\nb"), False),
    (tiny.assistant(" <think> a </think>  b "), False),
    (THOUGHT_OUT, False),
    (tiny.assistant("<think> a </think> c"), False),  # as the user says
    (tiny.assistant("  a b\n"), True),
]


@pytest.mark.parametrize(("turn", "whole"), SAID)
def test_an_answer_whose_thought_the_template_leaves_out_is_refused(tmp_path, turn, whole):
    """DeepSeek-R1-Distill's does, in stage 1 and in offline PPO; in an earlier turn as well."""
    asked = [tiny.user("a <think> a </think> c")]
    talks = [[*asked, turn], [*asked, turn, *asked, tiny.assistant("d")]]
    paths = [tiny.write_jsonl(tmp_path / f"{n}.jsonl", [{"messages": x}]) for n, x in enumerate(talks)]
    pair = {"prompt": asked, "chosen": [turn], "rejected": [tiny.assistant("e")]}
    pairs = tiny.write_jsonl(tmp_path / "pairs.jsonl", [pair])
    eos = {"max_response": 64, "eos": [0]}
    for template in (
        QWEN3,
        MINIMIND3.replace("is defined and open_thinking is true", "is not defined"),
        DROPS,
    ):
        tokenizer = tokenizer_of("Qwen3")
        tokenizer.chat_template = template
        if template != DROPS or whole:
            assert all(len(SFTDataset(path, tokenizer, 64)) for path in paths)
            assert len(LoggedAnswers(pairs, tokenizer, 64, **eos)) == 2
            continue
        for path in paths:
            says = r"\d\.jsonl:1: .*leaves out a part, .*--prompt_template"
            tiny.refused(says, SFTDataset, path, tokenizer, 64)
        tiny.refused(r"pairs\.jsonl:1: .*leaves out", LoggedAnswers, pairs, tokenizer, 64, **eos)


@pytest.mark.parametrize(("name", "thinks"), [("Qwen3", "assistant "), ("MiniMind-3", OPENED)])
def test_a_share_of_the_prompts_thinks_whatever_their_order(tmp_path, name, thinks):
    tokenizer, path = tokenizer_of(name), tiny.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}] * 200)

    def ends(ratio, seed=0, places=range(200)):
        data = RLAIFDataset(path, tokenizer, 64, thinking=load_thinking(tokenizer, ratio, seed))
        return [data[i].text.removeprefix("user a </s> ") for i in places]

    most = ends(0.9)
    assert set(most) == {thinks, CLOSED} and 165 < most.count(thinks) < 195
    assert ends(0.9, places=range(199, -1, -1)) == most[::-1]
    assert ends(0.9, seed=1) != most
    assert set(ends(0)) == {CLOSED} and set(ends(1)) == {thinks}
    assert all(a == thinks for a, b in zip(most, ends(0.5), strict=True) if b == thinks)


KWARGS = "--chat_template_kwargs"


WRONG = [  # template, flags, what is said
    ("Qwen3", {"chat_template_kwargs": "{enable"}, rf"{KWARGS} \{{enable: must be"),
    ("Qwen3", {"chat_template_kwargs": "[1]"}, rf"{KWARGS} \[1\]: must be a JSON object"),
    ("Qwen3", {"chat_template_kwargs": '{"open_thinking": true}'}, f"{KWARGS}: open_thinking is not read by"),
    ("Qwen3", {"chat_template_kwargs": '{"add_generation_prompt": true}'}, "add_generation_prompt"),
    ("Qwen3", {"chat_template_kwargs": '{"enable_thinking": "False"}'}, "write false without quotes"),
    (None, {"chat_template_kwargs": '{"x": 1}'}, f"{KWARGS}: x is not read by .*, if the tokenizer has one"),
    (None, {"thinking_ratio": 0.9}, "--thinking_ratio 0.9: the chat template reads neither enable_thinking"),
    ("Qwen3", {"thinking_ratio": 1.5}, "--thinking_ratio 1.5: must be at most 1"),
]


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory):
    """{template: the files of a run}"""
    folder = tmp_path_factory.mktemp("thinkers")
    files = tiny.run_files(folder)
    del files["reward_model"], files["missing_eos_penalty"]
    found = {}
    for name in (*TEMPLATES, None):
        policy = tiny.save_policy_dir(folder / str(name), tokenizer_of(name), layers=2, spread=2.0)
        found[name] = files | {"model": policy}
    return found


@pytest.mark.parametrize(("name", "flags_", "message"), WRONG)
def test_what_cannot_be_rendered_is_one_line(thinkers, tmp_path, name, flags_, message):
    tiny.refused(message, train_ppo.main, tiny.flags(**thinkers[name], **flags_, out_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


THOUGHT = "the answer is surely two"  # 24 characters
CASES = [  # response, MiniMind's points, what is judged
    (f"<think>\n{THOUGHT}\n</think>\n\n2", 1.25, "2"),
    (f"{THOUGHT}\n</think>\n\n2", 1.25, "2"),  # the template has opened the thought
    ("x" * 20 + "</think>2", 1.25, "2"),
    ("x" * 19 + "</think>2", -0.25, "2"),
    ("<think>\n" + "x" * 300 + "\n</think>2", 1.25, "2"),
    ("<think>\n" + "x" * 301 + "\n</think>2", -0.25, "2"),
    ("<think></think>2", -0.25, "2"),
    (f"{THOUGHT}</think>2</think>3", 0.75, "3"),
    ("</think></think>", -0.75, ""),
    (f"<think>\n{THOUGHT}", 0.0, f"<think>\n{THOUGHT}"),  # cut while it thinks: all of it is judged
    ("2", 0.0, "2"),
]


@pytest.mark.parametrize(("response", "points", "said"), CASES)
def test_a_thought_by_hand(response, points, said):
    assert thinking_reward("p", response, 1.0) == points
    assert thinking_reward("p", response, 2.0) == 2 * points
    seen = []

    def model(conversations):
        seen.extend(text for _, text in conversations)
        return torch.zeros(len(conversations))

    def function(prompts, responses, answers):
        seen.extend(responses)
        return [0.0] * len(responses)

    models = {"model": (model, 1.0)}
    asked = tiny.request_of(["p"], [response], texts=[f"user p {OPENED}"])
    functions = {"function": (function, 1.0)}
    parts = Reward(models, functions, reasoning=False, thinking_reward=1.0)(asked)
    assert parts["thinking"].tolist() == parts["score"].tolist() == [points]
    assert seen == [said, response]  # a function gets the whole response
    EvalReward(models, functions).score_parts(asked)
    assert seen[2:] == [said, response]


def test_the_format_of_2025_is_judged_as_a_whole():
    seen = []
    model = {"model": (lambda pairs: seen.extend(pairs) or torch.zeros(len(pairs)), 1.0)}
    response = "<think>\na\n</think>\n<answer>\nb\n</answer>"
    Reward(model, reasoning=True)(tiny.request_of(["p"], [response]))
    EvalReward(model, with_thoughts=True).score_parts(tiny.request_of(["p"], [response]))
    assert seen == [("p", response), ("p", "b"), ("p", response)]


def test_a_thought_that_the_template_has_closed_is_the_templates():
    """Nothing is paid for a second one, which would be an easy way to 1.25."""
    response = f"{THOUGHT}</think>2"
    reward = Reward(reasoning=False, thinking_reward=1.0)
    assert reward.names == ["thinking", "score"]
    texts = [f"user p </s> {end}" for end in (CLOSED, OPENED, "assistant ")]
    parts = reward(tiny.request_of(["p"] * 3, [response] * 3, texts=texts))
    assert parts["thinking"].tolist() == [0.0, 1.25, 1.25]


def test_repetition_is_that_of_the_answer_and_length_that_of_the_whole():
    thought, answer = "x " * 60, "one two three four"
    reward = Reward(reasoning=False, repetition_penalty=0.5, length_reward=0.5)
    responses = [f"{thought}</think>{answer}", thought, answer]
    parts = reward(tiny.request_of(["p"] * 3, responses))
    assert parts["repetition"].tolist() == [0.0, -0.5, 0.0]
    assert parts["length_reward"].tolist() == [0.5, 0.5, -0.5]


def chosen(path, records, name="Qwen3", given=None, **kwargs):
    """-> (--reasoning, the line that says why)."""
    data = tiny.write_jsonl(path / "data.jsonl", records)
    more = {} if given is None else {"reasoning": given}
    args = train_ppo.parse_args(tiny.flags(model=path, reward_url="http://x", data_path=data, **more))
    said = choose_reasoning(args, RLAIFDataset(data, tokenizer_of(name, **kwargs), 64))
    return args.reasoning, said


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"open_thinking": True}])
def test_a_tag_of_thinking_in_template_or_prompt_is_no_format(tmp_path, kwargs):
    name = "MiniMind-3" if "open_thinking" in kwargs else "Qwen3"
    records = [{"prompt": "a <think> <answer>", "answer": "b"}] * 20
    assert chosen(tmp_path, records, name, **kwargs) == (0, None)


@pytest.mark.parametrize(("with_tag", "on"), [(4, 1), (3, 0)])
def test_a_quarter_of_the_answers_of_the_data_is_enough(tmp_path, with_tag, on):
    answers = ["<think> a </think> <answer> b </answer>"] * with_tag + ["b"] * (16 - with_tag)
    records = [{"prompt": "a", "answer": answer} for answer in answers] + [{"prompt": "a"}] * 16
    said = f"format   --reasoning 1, as 4 of 16 first answers of {tmp_path}/data.jsonl have <answer>"
    assert chosen(tmp_path, records) == ((1, said) if on else (0, None))
    lists = [{"prompt": "a", "answer": answers[::-1]}]  # each of several right answers counts
    assert chosen(tmp_path, lists) == ((1, said) if on else (0, None))


def test_nothing_is_sampled_to_choose_the_format(tmp_path):
    """Not even of the demo's policy, which has it: it is the demo only without --model."""
    demo = tiny.ROOT / "model/demo/policy"
    data = tiny.write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a"}] * 4)
    args = train_ppo.parse_args(tiny.flags(model=demo, reward_url="http://x", data_path=data))
    with mock.patch.object(Sampler, "sample", side_effect=AssertionError):
        prompts, _ = read_prompts(args, load_trained_tokenizer(args))
        choose_reasoning(args, prompts)
    assert args.reasoning == 0
    assert train_ppo.parse_args([]).reasoning == 1


def test_a_given_flag_stays(tmp_path):
    for given in (0, 1):
        assert chosen(tmp_path, [{"prompt": "a"}], given=given) == (given, None)


RUN = {**same_runs.EXACT, **same_runs.CRITIC, "max_gen_len": 6, "max_steps": 4, "eval_interval": 0}


def test_the_arguments_stay_with_the_run_its_result_and_the_export(thinkers, tmp_path, capsys):
    closed = '{"enable_thinking": false}'
    files = thinkers["Qwen3"] | RUN | same_runs.sizes(8)
    argv = tiny.flags(**files, chat_template_kwargs=closed, out_dir=tmp_path)
    train_ppo.main(argv)
    said = capsys.readouterr().out
    assert f"\ntemplate with {closed}\n" in said
    assert "\nformat " not in said
    config = json.loads((tmp_path / "r/config.json").read_text())
    assert config["chat_template_kwargs"] == closed and config["reasoning"] == 0
    with pytest.raises(InputError, match=r"--chat_template_kwargs was .* and is now None; set it back"):
        train_ppo.main([*argv, "--chat_template_kwargs", "{}", "--resume", "auto"])
    (pth,) = tmp_path.glob("*.pth")

    def asked(*more):
        speaker = chat.Speaker(str(pth), chat.parse_args(["--model", str(pth), *more]), torch.device("cpu"))
        return speaker.tokenizer.decode(speaker.encode("a b"))

    assert asked() == "user a b </s> assistant <think> </think>"
    assert asked("--chat_template_kwargs", "{}") == "user a b </s> assistant"
    exported = tmp_path / "exported"
    export.main([str(pth), str(exported)])
    tokenizer = load_tokenizer(str(exported))
    assert conversation_text(tokenizer, "a", "b")
    assert tokenizer.init_kwargs["chat_template_kwargs"] == {"enable_thinking": False}
    card = (exported / "README.md").read_text()
    assert 'add_generation_prompt=True, return_dict=True, return_tensors="pt", enable_thinking=False)' in card
    following = same_runs.built(thinkers["Qwen3"], model=pth, reasoning=0, out_dir=tmp_path / "next")
    assert following.args.chat_template_kwargs == closed


@pytest.mark.parametrize(
    ("main", "sides"), [(train_sft.main, ["answer"]), (train_reward.main, ["chosen", "rejected"])]
)
def test_the_stages_before_keep_them_too(thinkers, tmp_path, main, sides, capsys):
    records = [{"prompt": "a", **{name: name[0] for name in sides}}] * 20
    data = tiny.write_jsonl(tmp_path / "stage.jsonl", records)
    more = {"data_path": data, "out_dir": tmp_path / "out", "max_steps": 1, "device": "cpu"}
    kwargs = '{"enable_thinking": false}'
    main(tiny.flags(model=thinkers["Qwen3"]["model"], chat_template_kwargs=kwargs, **more))
    assert f"\ntemplate with {kwargs}" in capsys.readouterr().out
    kept = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("tokenizer_config.json")]
    assert kept[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_run_goes_on_behind_the_beginning_of_the_answers(tmp_path):
    """It is sampled from there, shown as part of the prompt, and belongs to the answer."""
    files = tiny.run_files(tmp_path)
    turns = [tiny.user("a b"), tiny.assistant("c d")]
    data = tiny.write_jsonl(tmp_path / "begun.jsonl", [{"prompt": turns, "answer": "c d e"}] * 3)
    run, _ = make_run(files, data_path=data, eval_data_path=data)
    assert run.data[0].text == "user a b </s> assistant c d"
    with mock.patch("trainer.rollout.response_texts", lambda batch, *_: [" e"] * len(batch.tokens)):
        found, shown = run.evaluate()
    assert (found["eval/accuracy"], found["eval/accuracy_greedy"]) == (1, 1)
    row = shown["eval_samples.jsonl"][0]
    assert (row["prompt"], row["response"]) == (turns, " e")
