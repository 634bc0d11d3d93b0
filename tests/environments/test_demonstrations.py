"""Stage 1 beside PPO: a demonstration has the ids that a policy reads and writes in the same conversation."""

from argparse import Namespace
from itertools import groupby

import pytest
import tiny
import torch
from tiny import ROOT
from tiny_templates import ALL, HERMES, MINIMIND3, QWEN, QWEN3, with_template

from dataset.chat_template import set_template_kwargs
from dataset.lm_dataset import RLAIFDataset, SFTDataset
from trainer import train_ppo, train_sft
from trainer.compute.batch import new_batch
from trainer.compute.batching import pad_right
from trainer.environments.conversation import MultiTurn
from trainer.environments.environment import load_environments
from trainer.environments.tool_calls import _read_tags, error_result
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import Endings, Forbidden
from trainer.run import PpoRun
from trainer.runs.distributed import World

DEMO, DATA = ROOT / "model" / "demo", ROOT / "dataset" / "demo"
ALONE = World(0, 1, torch.device("cpu"))
ADDER = '''
def add(x: int, y: int) -> int:
    """It adds.

    Args:
        x: a number
        y: another one
    """
    return x + y
'''
U, S = tiny.user("2 + 3?"), {"role": "system", "content": "Be short."}


def calls(*pairs, text="", **more):
    functions = [{"function": {"name": "add", "arguments": {"x": x, "y": y}}} for x, y in pairs]
    return tiny.assistant(text, tool_calls=functions, **more)


def results(*values):
    return [{"role": "tool", "content": str(value)} for value in values]


FIVE = tiny.assistant("It is 5.")
UNREAD = "<tool_call>\n2 + 3\n</tool_call>"
ERROR = error_result(_read_tags(UNREAD, "").calls[0])
TALKS = {
    "a call": [U, calls((2, 3)), *results(5), FIVE],
    "a system turn": [S, U, calls((2, 3)), *results(5), FIVE],
    "three turns, two results": [
        U,
        calls((2, 3), (4, 5), text="So:"),
        *results(5, 9),
        calls((1, 2)),
        *results(3),
        FIVE,
    ],
    "a wrong call": [
        U,
        calls(("2", "3")),
        *results("23"),
        tiny.assistant(UNREAD),
        *results(ERROR),
        FIVE,
    ],
    "earlier answers": [U, FIVE, U, calls((2, 3)), *results(5), FIVE],
    "no call": [U, FIVE],
}
TEMPLATES = {
    "ChatML": (ALL, "{}"),
    "Qwen 2.5": (QWEN, "{}"),
    "Qwen 3": (QWEN3, "{}"),
    "Qwen 3 without thoughts": (QWEN3, '{"enable_thinking": false}'),
    "Hermes": (HERMES, "{}"),
    "MiniMind 3": (MINIMIND3, "{}"),
    "tools.jinja": ((ROOT / "benchmarks" / "tools.jinja").read_text(encoding="utf-8"), "{}"),
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_demonstration_is_the_conversation_of_a_run(chat, tmp_path, name, talk):
    template, kwargs = TEMPLATES[name]
    tokenizer = with_template(chat, template)
    set_template_kwargs(tokenizer, kwargs)
    (tmp_path / "adder.py").write_text(ADDER)
    environments = load_environments("", [f"{tmp_path}/adder.py:add"])
    end = tokenizer.eos_token_id
    turns = MultiTurn(
        environments,
        tokenizer,
        Endings([end], None, Forbidden(1, (end,))),
        None,
        Namespace(max_gen_len=5000, max_turns=8, reward_timeout=5.0),
        longest_prompt=5000,
    )
    path = tmp_path / "talk.jsonl"
    tiny.write_jsonl(path, [{"messages": TALKS[talk]}])
    (prompt,) = RLAIFDataset(path, tokenizer, 5000, tools=environments.schemas)
    ids, mask = SFTDataset(path, tokenizer, 5000, tools=environments.schemas)[0]
    answer = range(len(prompt.prompt_ids), len(ids))
    said = [[ids[i] for i in places] for learned, places in groupby(answer, lambda i: mask[i]) if learned]
    (conversation,) = turns.begin([prompt], noise_keys(1, 0, range(1)))
    for turn in said:
        assert not conversation.over
        tokens, lengths = pad_right([turn])
        row = new_batch(
            [conversation.context], tokens, torch.zeros(tokens.shape), lengths, torch.tensor([True])
        )
        turns.reply([conversation], row)
    assert conversation.over and conversation.finished
    sampled = len(conversation.context)
    assert conversation.context == ids[:sampled] and not any(mask[sampled:])
    assert conversation.is_action == [bool(x) for x in mask[len(prompt.prompt_ids) : sampled]]


def test_all_data_of_a_run_are_shown_the_tools_of_the_flag(tmp_path):
    """The prompts, those of the evaluation, and the demonstrations of --ptx_data_path."""
    policy = DEMO / "tools_policy"
    data = DATA / "tools_eval.jsonl"
    files = {"model": policy, "data_path": data, "eval_data_path": data, "ptx_data_path": data}
    values = {"tools": f"{DATA}/calculator.py:calculate", "reward_fn": f"{DATA}/calculator.py:is_right"}
    run = PpoRun(train_ppo.parse_args(tiny.flags(**files, **values, out_dir=tmp_path, device="cpu")), ALONE)
    assert run.held_out and run.demonstrations
    texts = [run.data[0].text, run.held_out[0].text, run.tokenizer.decode(run.demonstrations[0][0])]
    assert all(text.startswith("<|im_start|>system\nTools: calculate<|im_end|>") for text in texts)


def test_stage_1_shows_the_tools_of_its_flags(tmp_path):
    """To records that list none, the held-out ones too."""
    talk = tiny.write_jsonl(tmp_path / "talk.jsonl", [{"messages": TALKS["a call"]}] * 2)
    (tmp_path / "adder.py").write_text(ADDER)
    (tmp_path / "world.py").write_text(
        "class World:" + ADDER.replace("(x", "(self, x").replace("\n", "\n    ")
    )
    found = []
    for flags in ({"tools": f"{tmp_path}/adder.py:add"}, {"env": f"{tmp_path}/world.py:World"}, {}):
        files = {"model": DEMO / "tools_policy", "data_path": talk, "eval_data_path": talk}
        args = train_sft.parse_args(tiny.flags(**files, **flags, out_dir=tmp_path, device="cpu"))
        run = train_sft.SftRun(args, ALONE)
        shown = load_environments(args.env, args.tools).schemas if flags else []
        expected = SFTDataset(talk, run.tokenizer, args.max_seq_len, tools=shown)
        assert run.data[0] == run.held_out[0] == expected[0]
        found.append(run.tokenizer.decode(run.data[0][0]).startswith("<|im_start|>system\nTools: add"))
    assert found == [True, True, False]
    files["prompt_template"] = tmp_path / "plain.jinja"
    files["prompt_template"].write_text(ALL)
    argv = tiny.flags(**files, tools=f"{tmp_path}/adder.py:add", out_dir=tmp_path, device="cpu")
    tiny.refused("the chat template does not show tools", train_sft.main, argv)
