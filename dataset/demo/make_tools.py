"""Makes the data of the demo with a tool: sums and products of three-digit numbers, and a calculator that is often
left alone. And its tokenizer: as the demo's, with one token for each tag around calls and results.

    python dataset/demo/make_tools.py           # writes dataset/demo/tools_*.jsonl, the same bytes every time,
                                                # and for stage 1 out/demo_tools/
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

import sys
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transformers.utils import get_json_schema

from dataset.demo.calculator import calculate
from dataset.demo.make_data import HERE, build_tokenizer, write
from dataset.formats import Messages, Record, TurnText
import json

ROOT = HERE.parents[1]
SCHEMA = get_json_schema(calculate)
PHRASES = ["What is {}?", "How much is {}?", "Work out {}."]
SPOKEN = {"+": "plus", "-": "minus", "*": "times"}
TAGS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
Problem = tuple[int, str, int]
KINDS = {"called": 0.3, "guessed": 0.4, "misread": 0.15, "miscopied": 0.15}


def expression(problem):
    return " ".join(map(str, problem))


def call(text: str, name="calculate") -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": {"expression": text}})}\n</tool_call>'


def near(rng: Random, number: int) -> int:
    """Another number of as many digits, some of them changed"""
    digits = list(str(abs(number)))
    while True:
        for place in rng.sample(range(len(digits)), rng.randint(1, len(digits))):
            digits[place] = rng.choice("0123456789")
        if digits[0] != "0" and int("".join(digits)) != abs(number):
            return int("".join(digits)) * (-1 if number < 0 else 1)


def demonstration(rng, problem):
    a, sign, b = problem
    result = int(calculate(expression(problem)))
    kind = rng.choices([*KINDS], [*KINDS.values()])[0]
    if kind == "guessed":
        return [{"role": "assistant", "content": str(near(rng, result))}]
    asked = problem
    if kind == "misread":
        asked = rng.choice([(near(rng, a), sign, b), (a, sign, near(rng, b)), (a, rng.choice([x for x in SPOKEN if x != sign]), b)])
    found = calculate(expression(asked))
    said = str(near(rng, int(found))) if kind == "miscopied" else found
    return [{"role": "assistant", "content": call(expression(asked))}, {"role": "tool", "content": found}, {"role": "assistant", "content": said}]


def problem(rng):
    return rng.randint(100, 999), rng.choice([*SPOKEN]), rng.randint(100, 999)


def question(rng, p):
    a, sign, b = p
    return rng.choice(PHRASES).format(f"{a} {SPOKEN[sign]} {b}")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out_dir", type=Path, default=HERE)
    parser.add_argument("--stage1_dir", type=Path, default=ROOT / "out" / "demo_tools")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=12000)
    args = parser.parse_args(argv)
    rng = Random(f"{args.seed}")
    problems = list({problem(rng): None for _ in range(20000)})
    held, prompts, demos = problems[:200], problems[200:200+3200], problems[3400:3400+args.demonstrations]
    args.stage1_dir.mkdir(parents=True, exist_ok=True)
    for name, ps in (("tools_ppo", prompts), ("tools_eval", held)):
        write(args.out_dir / f"{name}.jsonl", [{"prompt": question(rng, p), "answer": calculate(expression(p))} for p in ps])
    records = [{"tools": [SCHEMA], "messages": [{"role": "user", "content": question(rng, p)}, *demonstration(rng, p)]} for p in demos]
    write(args.stage1_dir / "sft.jsonl", records)
    def texts():
        for r in records[:2000]:
            yield "system\nuser\nassistant\ntool\n"
            yield json.dumps(SCHEMA)
            for m in r["messages"]: yield m["content"]
            yield "You can call these tools:\n To call one, write its name and arguments as JSON:\n\n{\"name\": NAME, \"arguments\": {…}}\n"
    t = build_tokenizer(texts(), tags=TAGS, chat_template=(HERE.parent / "tools.jinja").read_text().removesuffix("\n"))
    t.save_pretrained(args.stage1_dir / "tokenizer")

if __name__ == "__main__":
    main()
