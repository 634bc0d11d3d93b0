"""Makes the demo's data: arithmetic with small numbers, asked in words, with answers that are often wrong.
And its tokenizer: a byte-level BPE of at most 512 entries with one token per digit.

    python dataset/demo/make_data.py            # writes dataset/demo/*.jsonl, the same bytes every time, and
                                                # dataset/demo/tokenizer/

A problem adds or subtracts twice, and all its results are between 0 and 19. There are 8,820 such problems.
500 of them are held out, together with all problems that add and subtract the same numbers in another order:
none of these is in any training file. A good response to "What is twelve plus five minus nine?" is

    <think>
    12 + 5 = 17
    17 - 9 = 8
    </think>
    <answer>
    8
    </answer>

Demonstrations have errors on purpose: about one in five has a random error, three in four of the others do
not carry the ten (7 + 5 becomes 2), and a quarter of all have a wrong format. The raters, who choose between
answers, are mostly right. The answers in the prompt files are for evaluation only: no reward uses them.

The tokenizer encodes any text (all 256 bytes are in the vocabulary). The words of the demo are one token
each.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
UP_TO_TEN = "zero one two three four five six seven eight nine ten"
WORDS = f"{UP_TO_TEN} eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
LARGEST = len(WORDS) - 1
Problem = tuple[int, str, int, str, int]  # (a, op, b, op, c)
SPOKEN = {"+": "plus", "-": "minus"}
PHRASES = ["What is {}?", "How much is {}?", "Work out {}."]
WRONG = 0.22  # of the demonstrations have a random error
FORGET = 0.75  # of the others do not carry the ten
MISFORMATTED = 0.25  # of all have a fault of format
CHATTER = ["I hope this helps.", "That is my answer.", "Is that right?", "I am not sure.", "Well done!"]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


# ---------------------------------------------------------------------------------------------------------
# Problems


def calculate(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b


def solve(problem: Problem) -> int:
    """(a, op, b, op, c) -> the right answer."""
    a, op, b, op2, c = problem
    return calculate(calculate(a, op, b), op2, c)


def all_problems() -> list[Problem]:
    numbers = range(LARGEST + 1)
    first = [(a, op, b) for a in numbers for op in "+-" for b in numbers]
    first = [step for step in first if 0 <= calculate(*step) <= LARGEST]
    both = [(*step, op, c) for step in first for op in "+-" for c in numbers]
    return [problem for problem in both if 0 <= solve(problem) <= LARGEST]


def terms(problem: Problem) -> tuple:
    """The numbers with their signs, sorted: 2 + 3 - 4, 3 + 2 - 4 and 3 - 4 + 2 have the same terms."""
    a, op, b, op2, c = problem
    return tuple(sorted([("+", a), (op, b), (op2, c)]))


def split_problems(rng: Random, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """All problems, shuffled -> (train, held out). No terms occur in both."""
    problems = all_problems()
    rng.shuffle(problems)
    evaluation = problems[:held_out]
    hidden = {terms(problem) for problem in evaluation}
    return [problem for problem in problems if terms(problem) not in hidden], evaluation


def question(rng: Random, problem: Problem) -> str:
    a, op, b, op2, c = problem
    spoken = f"{WORDS[a]} {SPOKEN[op]} {WORDS[b]} {SPOKEN[op2]} {WORDS[c]}"
    return rng.choice(PHRASES).format(spoken)


# ---------------------------------------------------------------------------------------------------------
# Responses, good and bad


def wrong_number(rng: Random, problem: Problem) -> int:
    """A wrong number that a person might answer: near misses of many kinds, and random guesses."""
    a, op, b, op2, c = problem
    other = {"+": "-", "-": "+"}
    right = solve(problem)
    slips = [
        lambda: right + rng.choice([-1, 1]),
        lambda: right + rng.choice([-1, 1]),
        lambda: right + rng.choice([-2, 2]),
        lambda: right + rng.choice([-10, 10]),
        lambda: int(str(right)[::-1]),  # digits in reverse order
        lambda: solve((a, other[op], b, op2, c)),  # plus and minus confused
        lambda: solve((a, op, b, other[op2], c)),
        lambda: calculate(a, op, b),  # stopped after the first step
        lambda: rng.choice([a, b, c]),
        lambda: rng.randrange(LARGEST + 1),
        lambda: rng.randrange(LARGEST + 1),
    ]
    while True:
        number = rng.choice(slips)()
        if number >= 0 and number != right:
            return number


def thought(problem: Problem, half: int | None = None, answer: int | str | None = None) -> str:
    """The two steps, one per line. ``half`` and ``answer``, if given, replace the right results."""
    a, op, b, op2, c = problem
    half = calculate(a, op, b) if half is None else half
    answer = max(calculate(half, op2, c), 0) if answer is None else answer
    return f"{a} {op} {b} = {half}\n{half} {op2} {c} = {answer}"


def respond(problem: Problem, answer: int | str, think: str | None = None) -> str:
    """The response in the right format. Without ``think``, the thought is one that ends with ``answer``."""
    think = thought(problem, answer=answer) if think is None else think
    return f"<think>\n{think}\n</think>\n<answer>\n{answer}\n</answer>"


def wrong_response(rng: Random, problem: Problem) -> str:
    """A response in the right format with a wrong answer."""
    a, op, b, op2, c = problem
    kind = rng.random()
    if kind < 0.45:  # an error in the second step
        return respond(problem, wrong_number(rng, problem))
    if kind < 0.75:  # an error in the first step; the second uses its result
        half = wrong_number(rng, (a, op, b, "+", 0))
        if calculate(half, op2, c) >= 0:
            return respond(problem, calculate(half, op2, c), thought(problem, half))
    if kind < 0.85:  # another number instead of one in the question
        heard = rng.choice(
            [(rng.randrange(LARGEST + 1), *problem[1:]), (*problem[:4], rng.randrange(LARGEST + 1))]
        )
        if min(calculate(*heard[:3]), solve(heard)) >= 0 and solve(heard) != solve(problem):
            return respond(heard, solve(heard))
    return respond(problem, wrong_number(rng, problem), thought(problem))  # right steps, other answer


def misformat(rng: Random, response: str) -> str:
    """A response in the right format -> one with a fault in it. Mostly the answer can still be read."""
    think, answer = response.split("</think>\n")
    number = answer.split("\n")[1]
    faults = [
        lambda: answer,  # no think block
        lambda: response.replace("</think>\n", ""),
        lambda: response.replace("<think>\n", ""),
        lambda: response.replace("\n</answer>", ""),
        lambda: response.replace("<answer>\n", ""),
        lambda: f"{think}</think>\n{number}",  # the answer outside its tags
        lambda: response.replace("<answer>\n", "<answer>\n<answer>\n"),
        lambda: response.replace("</think>", "</think>\n</think>"),
        lambda: response.replace("\n", ""),
        lambda: response.replace("\n", " "),
        lambda: f"{response}\n{rng.choice(CHATTER)}",
    ]
    return rng.choice(faults)()


def forgetful(problem: Problem) -> str:
    """The response of a person who does not carry the ten: 7 + 5 becomes 2, and 8 + 9 becomes 7."""
    a, op, b, op2, c = problem

    def step(x: int, sign: str, y: int) -> int:
        carries = sign == "+" and x % 10 + y % 10 >= 10
        return calculate(x, sign, y) - 10 * carries

    half = step(a, op, b)
    answer = step(half, op2, c)
    return respond(problem, max(answer, 0), thought(problem, half, max(answer, 0)))


def demonstration(rng: Random, problem: Problem) -> str:
    """A right response, or one with errors at the rates of ``WRONG``, ``FORGET`` and ``MISFORMATTED``."""
    response = respond(problem, solve(problem))
    if rng.random() < WRONG:
        response = wrong_response(rng, problem)
    elif rng.random() < FORGET:
        response = forgetful(problem)
    return misformat(rng, response) if rng.random() < MISFORMATTED else response


def asked(problem: Problem) -> str:
    """The problem written in digits: "12 + 5 - 9"."""
    return " ".join(map(str, problem))


def known_answer(rng: Random, problem: Problem, wrong: float = 0.03) -> str:
    """What a rater takes for the right answer: a full response or, mostly, the bare number."""
    answer = wrong_number(rng, problem) if rng.random() < wrong else solve(problem)
    return respond(problem, answer) if rng.random() < 0.25 else str(answer)


def trick(rng: Random, problem: Problem) -> str:
    """A response that could mislead a reward model: two answers, padding, cut off, empty, off the subject."""
    right, other = solve(problem), wrong_number(rng, problem)
    good = respond(problem, right)
    return rng.choice(
        [
            "",
            "<think>\n</think>\n<answer>\n</answer>",
            respond(problem, ""),
            respond(problem, f"{right} {other}"),
            respond(problem, f"{other} {right}"),
            respond(problem, f"{right}{right}"),
            respond(problem, f"{right}{rng.randrange(10)}"),
            respond(problem, f"{rng.randrange(10)}{right}"),
            respond(problem, asked(problem)),
            good + f"\n<answer>\n{other}\n</answer>",
            good + "\n" + good,
            good + "\n" + "".join(rng.choice("0123456789 \n+-=") for _ in range(rng.randrange(1, 12))),
            good[: rng.randrange(1, len(good) - 14)],
            f"<think>\n{thought(problem)}\n</think>",
            rng.choice(CHATTER),
            question(rng, problem),
        ]
    )


def bare_trick(rng: Random, problem: Problem) -> str:
    """As ``trick``, for responses that consist of the answer only."""
    right, other = solve(problem), wrong_number(rng, problem)
    choices = ["", f"{right} {other}", f"{other} {right}", f"{right}{right}", f"{right}\n{right}"]
    choices += [
        f"{right}{rng.randrange(10)}",
        f"{rng.randrange(10)}{right}",
        asked(problem),
        thought(problem),
    ]
    return rng.choice([*choices, WORDS[right], rng.choice(CHATTER)])


# ---------------------------------------------------------------------------------------------------------
# Preference pairs


def preference(rng: Random, problem: Problem) -> tuple[str, str]:
    """(chosen, rejected), by a rater who knows the answer: being right counts more than the right format."""
    right, wrong = solve(problem), wrong_number(rng, problem)
    good, bad = respond(problem, right), wrong_response(rng, problem)
    slip = respond(problem, wrong, thought(problem))  # right thought, wrong answer
    lucky = respond(problem, right, thought(problem, answer=wrong))  # wrong thought, right answer
    kinds = [
        (28, lambda: (good, bad)),
        (5, lambda: (good, slip)),
        (2, lambda: (good, lucky)),
        (3, lambda: (lucky, rng.choice([bad, slip]))),
        (36, lambda: (f"{right}", f"{wrong}")),
        (5, lambda: (f"{right}", bare_trick(rng, problem))),
        (4, lambda: (f"{right}", bad)),
        (4, lambda: (good, f"{wrong}")),
        (5, lambda: (good, misformat(rng, good))),
        (3, lambda: (good, misformat(rng, bad))),
        (4, lambda: (misformat(rng, good), bad)),
        (7, lambda: (good, trick(rng, problem))),
    ]
    return rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()


def many(rng: Random, problems: list[Problem], count: int) -> list[Problem]:
    """``count`` problems: the whole list in random order, again and again, then a part of it."""
    drawn: list[Problem] = []
    while len(drawn) < count:
        drawn += rng.sample(problems, len(problems))
    return drawn[:count]


def answers(
    rng: Random, problems: list[Problem], answer: Callable[[Random, Problem], str]
) -> Iterator[dict[str, str]]:
    for problem in problems:
        yield {"prompt": question(rng, problem), "answer": answer(rng, problem)}


def preferences(rng: Random, problems: list[Problem], noise: float) -> Iterator[dict[str, str]]:
    """One pair per problem. In a share ``noise`` of them, the chosen and the rejected answer are swapped."""
    for problem in problems:
        chosen, rejected = preference(rng, problem)
        if rng.random() < noise:
            chosen, rejected = rejected, chosen
        yield {"prompt": question(rng, problem), "chosen": chosen, "rejected": rejected}


def build_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 512,
    tags: Sequence[str] = TAGS,
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Train on texts -> a transformers tokenizer with these tags, each a token, and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # Not special: decode(skip_special_tokens=True) must keep the tags that the policy writes.
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def corpus(demonstrations: Iterable[dict[str, str]]) -> Iterator[str]:
    """The words of the chat template and the demo's sentences, without the tags."""
    yield "system\nuser\nassistant\n"
    for record in demonstrations:
        yield record["prompt"]
        answer = record["answer"]
        for tag in TAGS:
            answer = answer.replace(tag, "")
        yield answer


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make the demo's data and tokenizer")
    parser.add_argument("--out_dir", type=Path, default=HERE, help="where all is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held_out", type=int, default=500, help="problems kept out of every training file")
    parser.add_argument("--demonstrations", type=int, default=14000)
    parser.add_argument("--prompts", type=int, default=5888, help="for PPO: 46 batches of 128")
    parser.add_argument("--references", type=int, default=16000, help="what raters know: right answers")
    parser.add_argument("--pairs", type=int, default=16000)
    args = parser.parse_args(argv)

    def save(name: str, make: Callable[[Random], Iterable[dict[str, str]]]) -> list[dict[str, str]]:
        rng = Random(f"{args.seed}/{name}")  # one per file, so no file depends on the size of another
        records = list(make(rng))
        write(args.out_dir / f"{name}.jsonl", records)
        return records

    def right(rng: Random, problem: Problem) -> str:
        return str(solve(problem))

    train, held_out = split_problems(Random(f"{args.seed}/split"), args.held_out)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    demonstrations = save("sft", lambda r: answers(r, many(r, train, args.demonstrations), demonstration))
    save("ppo", lambda r: answers(r, train[: args.prompts], right))
    save("eval", lambda r: answers(r, held_out, right))
    save("references", lambda r: answers(r, many(r, train, args.references), known_answer))
    save("preferences", lambda r: preferences(r, many(r, train, args.pairs), noise=0.03))
    save("preferences_eval", lambda r: preferences(r, many(r, held_out, 1000), noise=0.0))
    build_tokenizer(corpus(demonstrations)).save_pretrained(args.out_dir / "tokenizer")


if __name__ == "__main__":
    main()
