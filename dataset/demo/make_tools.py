"""Makes the data and the tokenizer of the demo with a tool: a calculator that a policy seldom uses well.

    python dataset/demo/make_tools.py     # writes dataset/demo/tools_ppo.jsonl and tools_eval.jsonl, the same
                                          # bytes every time, and what stage 1 reads into out/demo_tools/

A problem adds, subtracts or multiplies two numbers of three digits, which no model of this size can do in its
head. A good response to "What is 417 plus 286?" is two turns, with the result of the tool between them:

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "417 + 286"}}
    </tool_call>
                                                                                             703
    703

Demonstrations have errors on purpose, ``KINDS``: most guess, or call in a wrong way, or do not say what the
tool has given. No problem is in two files.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers.utils import get_json_schema

from dataset.demo.calculator import OPERATORS, calculate
from dataset.demo.make_data import CHAT_TEMPLATE, HERE, PHRASES, build_tokenizer, write
from dataset.formats import Messages, Record
from trainer.environments.tool_calls import error_result

STAGE1 = HERE.parents[1] / "out" / "demo_tools"
Problem = tuple[int, str, int]  # (a, operator, b)
SPOKEN = {"+": "plus", "-": "minus", "*": "times"}
KINDS = {  # of demonstrations: their shares
    "good": 0.3,
    "guess": 0.35,  # no call, and a wrong number
    "words": 0.12,  # "417 plus 286", which the calculator cannot read, and a guess
    "misread": 0.12,  # another number or operator than those of the question
    "misreport": 0.11,  # another number than the result
}
TAGS = ["<tool_call>", "</tool_call>"]
TOOLS_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\\nTools:' }}"
    "{%- for tool in tools -%}{{ ' ' + tool.function.name }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}{%- endif -%}" + CHAT_TEMPLATE
)


def written(problem: Problem) -> str:
    """The problem as the calculator reads it: "417 + 286"."""
    return " ".join(map(str, problem))


def spoken(problem: Problem) -> str:
    """The problem as it is asked: "417 plus 286"."""
    a, sign, b = problem
    return f"{a} {SPOKEN[sign]} {b}"


def question(rng: Random, problem: Problem) -> str:
    return rng.choice(PHRASES).format(spoken(problem))


def another(rng: Random, number: int) -> int:
    """A number with as many digits, of which at least one differs."""
    digits = len(str(abs(number)))
    while True:
        size = rng.randrange(10 ** (digits - 1), 10**digits)
        if size != abs(number):
            return size if number >= 0 else -size


def misread(rng: Random, problem: Problem) -> Problem:
    """The problem with another number or operator."""
    a, sign, b = problem
    others = [other for other in OPERATORS if other != sign]
    return rng.choice([(another(rng, a), sign, b), (a, rng.choice(others), b), (a, sign, another(rng, b))])


def called(expression: str) -> Messages:
    """A turn that calls the calculator, and what a run answers."""
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    try:
        result = str(calculate(expression))
    except KeyError as error:
        result = error_result(error)
    return [
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": result},
    ]


def demonstration(rng: Random, problem: Problem) -> Messages:
    """The turns behind the question, good or bad."""
    (kind,) = rng.choices([*KINDS], [*KINDS.values()])
    result = calculate(written(problem))
    turns: Messages = []
    said = another(rng, result)
    if kind == "good":
        turns = called(written(problem))
        said = result
    elif kind == "words":
        turns = called(spoken(problem))
    elif kind == "misread":
        asked = written(misread(rng, problem))
        turns = called(asked)
        said = calculate(asked)
    elif kind == "misreport":
        turns = called(written(problem))
    return [*turns, {"role": "assistant", "content": str(said)}]


def draw(rng: Random, count: int) -> list[Problem]:
    """``count`` problems, no two alike."""
    found: dict[Problem, None] = {}
    while len(found) < count:
        found[rng.randrange(100, 1000), rng.choice([*OPERATORS]), rng.randrange(100, 1000)] = None
    return [*found]


def corpus(demonstrations: Iterable[Record]) -> Iterator[str]:
    """The words of the chat template and of the demonstrations, without the tags."""
    yield "system\nuser\nassistant\ntool\nTools: calculate\n"
    for record in demonstrations:
        for turn in record["messages"]:
            text = turn["content"]
            for tag in TAGS:
                text = text.replace(tag, "")
            yield text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make the data of the demo with a tool")
    parser.add_argument("--out_dir", type=Path, default=HERE, help="where the prompts are written")
    parser.add_argument("--stage1_dir", type=Path, default=STAGE1, help="demonstrations and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held_out", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=3072, help="for PPO: 24 batches of 128")
    parser.add_argument("--demonstrations", type=int, default=16000)
    args = parser.parse_args(argv)
    rng = Random(f"{args.seed}/tools")
    problems = draw(rng, args.held_out + args.prompts + args.demonstrations)
    schema = get_json_schema(calculate)
    args.stage1_dir.mkdir(parents=True, exist_ok=True)
    for name, count in (("tools_eval", args.held_out), ("tools_ppo", args.prompts)):
        mine, problems = problems[:count], problems[count:]
        records = [{"prompt": question(rng, x), "answer": str(calculate(written(x)))} for x in mine]
        write(args.out_dir / f"{name}.jsonl", records)
    demonstrations = [
        {
            "tools": [schema],
            "messages": [{"role": "user", "content": question(rng, x)}, *demonstration(rng, x)],
        }
        for x in problems
    ]
    write(args.stage1_dir / "sft.jsonl", demonstrations)
    tokenizer = build_tokenizer(corpus(demonstrations), tags=TAGS, chat_template=TOOLS_TEMPLATE)
    tokenizer.save_pretrained(args.stage1_dir / "tokenizer")


if __name__ == "__main__":
    main()
