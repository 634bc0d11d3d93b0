"""The evaluation's arithmetic by hand, and which model it evaluates."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import (
    WORDS,
    assistant,
    dialogue,
    flags,
    run_files,
    tiny_llama,
    user,
    word_tokenizer,
    write_jsonl,
)

from dataset.answers import is_correct
from dataset.formats import TurnText
from dataset.lm_dataset import RLAIFDataset
from trainer import evaluation, train_ppo
from trainer.compute.batch import Batch
from trainer.evaluation import EVAL_STEP, Evaluation
from trainer.generation.sampling import noise_keys, uniform
from trainer.inputs import accuracy_note, load_trained_tokenizer, read_prompts
from trainer.run import PpoRun
from trainer.runs.distributed import World

ALONE = World(0, 1, torch.device("cpu"))
RIGHT = "<think>\nx\n</think>\n<answer>\n{}\n</answer>"


class Prompts(list):
    """Answers (None where a record has none), as a dataset of prompts."""

    has_accuracy = True

    def __getitem__(self, place):
        return SimpleNamespace(index=place, prompt="?", answer=list.__getitem__(self, place), tools=["add"])


def evaluated(monkeypatch, prompts, sampled, greedy, reasoning=False):
    """What ``evaluate`` finds where these are the responses to the prompts, without a model. sampled: a text
    or, for each of the prompts, as many texts."""
    several = [said if isinstance(said, list) else [said] for said in sampled]

    def batch(asked, said):
        texts = [text for prompt in asked for text in said[prompt.index]]
        lengths = torch.tensor([len(text) for text in texts])
        parts = {"score": lengths / 10}
        if reasoning:
            parts["format"] = 0.5 * torch.tensor([float("<think>" in text) for text in texts])
        asked = [prompt for prompt in asked for _ in said[0]]
        return Batch(None, None, lengths, lengths % 2 == 0, None, asked, texts, parts=parts)

    def answer(evaluation, asked):
        return {"": batch(asked, several), "_greedy": batch(asked, [[text] for text in greedy])}

    monkeypatch.setattr(Evaluation, "answer", answer)
    args = SimpleNamespace(reasoning=reasoning, num_generations=len(several[0]))
    engine = SimpleNamespace(weights_of=lambda model: nullcontext())
    models = SimpleNamespace(actor=None)
    return Evaluation(args, ALONE, prompts, None, models, engine, (), None, None).of_prompts()[0]


def test_with_reasoning_the_answer_block_counts_and_the_format_is_a_rate(monkeypatch):
    said = [RIGHT.format(7), RIGHT.format(7), "9"], [RIGHT.format(n) for n in (7, 8, 9)]
    found = evaluated(monkeypatch, Prompts(["7", "8", "9"]), *said, reasoning=True)
    assert found["eval/accuracy"] == pytest.approx(1 / 3)  # an answer outside of the block is none
    assert found["eval/format_rate"] == pytest.approx(2 / 3)
    assert found["eval/format"] == pytest.approx(1 / 3)
    assert found["eval/accuracy_greedy"] == found["eval/format_rate_greedy"] == 1


def test_a_prompt_is_solved_where_one_of_its_own_answers_is_right(monkeypatch):
    sampled = [["1", "1"], ["x", "y"], ["x", "3"]]
    found = evaluated(monkeypatch, Prompts(["1", "2", "3"]), sampled, ["x", "2", "3"])
    assert found["eval/pass@2"] == found["eval/accuracy_greedy"] == pytest.approx(2 / 3)
    assert found["eval/accuracy"] == 0.5


def test_of_several_turns_sampled_tokens_and_calls_are_counted_and_the_last_text_is_compared(monkeypatch):
    lengths = torch.tensor([5, 3])
    talks = [dialogue("so", user("c"), "7", turns=2, calls=2, failed_calls=1, observation_tokens=2)]
    talks.append(dialogue("8", calls=1, hung=True))
    prompts = Prompts(["7", "9"])

    def answer(evaluation, asked):
        is_action = torch.tensor([[True, True, False, False, True], [True, True, True, False, False]])
        batch = Batch(None, None, lengths, lengths > 3, None, asked, ["7", "8"], is_action=is_action)
        batch.dialogues = talks
        return {"": batch, "_greedy": replace(batch, dialogues=talks[:1] * 2)}

    monkeypatch.setattr(Evaluation, "answer", answer)
    args = SimpleNamespace(reasoning=False, num_generations=1)
    engine = SimpleNamespace(weights_of=lambda model: nullcontext())
    models = SimpleNamespace(actor=None)
    made = Evaluation(args, ALONE, prompts, None, models, engine, (), None, None)
    found, rows = made.of_prompts()
    counted = ["length", "turns", "calls", "failed_calls", "observation_tokens", "hung", "accuracy"]
    assert [found[f"eval/{x}"] for x in counted] == [3, 1.5, 1.5, pytest.approx(1 / 3), 1, 0.5, 0.5]
    assert [found[f"eval/{x}_greedy"] for x in counted] == [3, 2, 2, 0.5, 2, 0, 0.5]
    first, second = rows["eval_samples.jsonl"]
    assert first["messages"] == first["greedy"]["messages"] == talks[0].messages
    assert second["messages"] == talks[1].messages


def test_the_accuracy_of_a_later_turn_leaves_the_beginning_of_the_first_one_out(monkeypatch):
    begun = [user("q"), assistant(TurnText("<think>\n", is_begun=True))]
    talks = [dialogue("a</think>b", user("c"), "7"), dialogue("x</think>7"), dialogue("7")]
    prompts = Prompts(["7", "7", "7"])
    texts = ["7", "x</think>7", "7"]  # the last one is still a thought
    sizes = torch.ones(3, dtype=torch.int64)

    def answer(evaluation, asked):
        asked = [SimpleNamespace(**{**vars(prompt), "prompt": begun}) for prompt in asked]
        batch = Batch(None, None, sizes, sizes > 0, None, asked, texts, dialogues=talks)
        return {"": batch, "_greedy": batch}

    monkeypatch.setattr(Evaluation, "answer", answer)
    args = SimpleNamespace(reasoning=False, num_generations=1)
    engine = SimpleNamespace(weights_of=lambda model: nullcontext())
    made = Evaluation(args, ALONE, prompts, None, SimpleNamespace(actor=None), engine, (), None, None)
    assert made.of_prompts()[0]["eval/accuracy"] == pytest.approx(2 / 3)


def test_accuracy_is_of_the_answers_that_a_response_can_equal(monkeypatch):
    prompts, said = (
        Prompts(["5", "a long text, which nobody says twice", None]),
        (["so 5", "a", "b"], ["5", "a", "b"]),
    )
    found = evaluated(monkeypatch, prompts, *said)
    assert found["eval/accuracy"] == found["eval/accuracy_greedy"] == 1
    prompts.has_accuracy = False
    found = evaluated(monkeypatch, prompts, *said)
    assert "eval/score" in found
    assert not any("accuracy" in name or "format_rate" in name for name in found)


@pytest.mark.parametrize(
    ("response", "answer", "reasoning", "right"),
    [
        ("6 * 12 is 72.", "72", 0, True),
        ("72 is 6 * 12", "72", 0, False),  # the last number counts
        (r"so \boxed{72}, which is 6 * 12", "72.0", 0, True),
        ("It costs $1,240.", "1240", 0, True),
        ("<think>\n5\n</think>\n\nso 72", "72", 0, True),
        ("<think>\n72\n</think>\n\nnone", "72", 0, False),
        ("<think>\nhm\n</think> Paris ", "Paris", 0, True),
        ("It is Paris", "Paris", 0, False),  # no number: the whole text
        (RIGHT.format(72), "72", 1, True),
        (RIGHT.format("72.0"), "72", 1, True),
        (RIGHT.format("so 72"), "72", 1, False),  # the block has to be the answer
        ("72", "72", 1, False),  # no answer block
        (RIGHT.format("Paris"), "Paris", 1, True),
        (RIGHT.format(72) + " 5", "72", 1, True),
        ("It is 72", ["71", "72"], 0, True),  # each of a list is right
        ("It is 70", ["71", "72"], 0, False),
        (RIGHT.format("two"), ["2", "two"], 1, True),
    ],
)
def test_what_is_compared_with_the_answer(response, answer, reasoning, right):
    assert is_correct(response, answer, reasoning) is right


@pytest.mark.parametrize(("short", "there"), [(0, False), (1, False), (2, True), (4, True)])
def test_a_file_has_an_accuracy_where_half_of_its_answers_can_be_compared(short, there, tmp_path):
    """Conversations end with long texts, and some with a word: such a word says nothing of the others."""

    def held_out(records):
        return RLAIFDataset(write_jsonl(tmp_path / "held_out.jsonl", records), word_tokenizer(WORDS), 64)

    records = [{"prompt": "a", "answer": "5" if n < short else "b c d e f g"} for n in range(4)]
    found = held_out([*records, {"prompt": "a"}])
    assert found.has_accuracy is there
    line = f"accuracy none: of 4 held-out answers only {short} are a number or a few words, which"
    assert (accuracy_note(found) or line).startswith(line) and (accuracy_note(found) is None) is there
    without = held_out([{"prompt": "a"}])  # any answer: there is no line either
    assert not without.has_accuracy and accuracy_note(without) is accuracy_note(None) is None


def test_formulas_have_a_line_that_names_the_library_that_compares_them(tmp_path, monkeypatch):
    records = [
        {"prompt": "a", "answer": answer} for answer in (r"\sqrt{2}", r"\frac{1}{2}", ["5", r"\pi"], "C")
    ]
    held_out = RLAIFDataset(write_jsonl(tmp_path / "held_out.jsonl", records), word_tokenizer(WORDS), 64)
    (tmp_path / "math_verify.py").touch()
    assert accuracy_note(held_out).startswith("accuracy 2 held-out answers are formulas")
    assert "pip install 'math-verify[" in accuracy_note(held_out)
    monkeypatch.syspath_prepend(tmp_path)
    assert accuracy_note(held_out) is None


def test_processes_share_the_prompts():
    shares = [World(rank, 3, torch.device("cpu")).share_of(range(7)) for rank in range(3)]
    assert sorted(place for share in shares for place in share) == list(range(7))
    assert max(map(len, shares)) - min(map(len, shares)) == 1
    assert World(2, 3, torch.device("cpu")).share_of(range(2)) == [0, 1]  # too few: each takes all


@torch.no_grad()
def respond(model, prompt, temperature, seed, sample=0):
    """A response of at most five tokens, token by token, in plain torch. The noise is that of evaluation."""
    ids, found = list(prompt.prompt_ids), []
    for u in uniform(noise_keys(seed, EVAL_STEP, [prompt.index], sample), 5)[0]:
        logits = model(torch.tensor([ids + found])).logits[0, -1].double()
        if temperature:
            found.append(int((torch.softmax(logits / temperature, -1).cumsum(0) <= u).sum()))
        else:
            found.append(int(logits.argmax()))
        if found[-1] == 0:
            break
    return found


def asked_together(run, monkeypatch):
    """-> the prompts of each call of the sampler from now on."""
    calls = []
    plain = run.engine.sampler.sample

    def sample(prompt_ids, *args, **more):
        calls.append(prompt_ids)
        return plain(prompt_ids, *args, **more)

    monkeypatch.setattr(run.engine.sampler, "sample", sample)
    return calls


@pytest.mark.parametrize("answers", [1, 2])
def test_the_actor_is_evaluated_sampled_and_greedy(answers, tmp_path, monkeypatch):
    """Actor, old actor and reference differ; the answers of some records are what the actor says."""
    monkeypatch.setattr(evaluation, "EVAL_BATCH", 5)
    values = {**run_files(tmp_path), "update_old_actor_freq": 2, "temperature": 0.7, "max_gen_len": 5}
    values |= {"missing_eos_penalty": 0.0, "batch_size": 8, "mini_batch_size": 8, "dtype": "float32"}
    values |= {"num_generations": answers, "seed": 3}
    del values["reward_model"]
    tokenizer = word_tokenizer(WORDS, chat=True)
    plain = tiny_llama(len(WORDS) + 2, seed=9, layers=2, spread=3.0)
    records = [{"prompt": " ".join(WORDS[i] for i in (n % 8, n // 8))} for n in range(13)]
    values["eval_data_path"] = write_jsonl(tmp_path / "held_out.jsonl", records)
    args = train_ppo.parse_args(flags(**values))
    _, held_out = read_prompts(args, load_trained_tokenizer(args))
    ids = {}
    for kind, temperature, samples in (("", 0.7, range(answers)), ("_greedy", 0.0, range(1))):
        asked = [held_out[i] for i in range(len(held_out))]
        ids[kind] = [respond(plain, p, temperature, args.seed, sample) for p in asked for sample in samples]
    responses = {kind: tokenizer.batch_decode(rows, skip_special_tokens=True) for kind, rows in ids.items()}
    for n, record in enumerate(records):  # greedy: right in every second record; sampled: in every third
        kind = "_greedy" if n % 2 else "" if n % 3 == 0 else None
        record["answer"] = responses[kind][n if kind else n * answers] if kind is not None else "nothing"
    write_jsonl(tmp_path / "held_out.jsonl", records)
    run = PpoRun(args, ALONE)
    run.models.actor.load_state_dict(plain.state_dict())
    found, rows = run.evaluate()
    calls = asked_together(run, monkeypatch)
    assert run.evaluate() == (found, rows)
    rows_of_a_call = 5 // (answers + 1) * (answers + 1)
    assert max(map(len, calls)) == rows_of_a_call and sum(map(len, calls)) == 13 * (answers + 1)
    for asked in calls:  # each prompt, then it again for its other answers
        assert asked == [prompt for prompt in asked[:: answers + 1] for _ in range(answers + 1)]
    shown = rows["eval_samples.jsonl"]
    assert [row["place"] for row in shown] == list(range(8))
    assert [row["response"] for row in shown] == responses[""][: 8 * answers : answers]
    assert [row["greedy"]["response"] for row in shown] == responses["_greedy"][:8]
    for n, row in enumerate(shown):  # each with what is known of it
        assert row["answer"] == records[n]["answer"]
        for kept, said in ((row, ids[""][n * answers]), (row["greedy"], ids["_greedy"][n])):
            text = kept["response"]
            assert kept["prompt"] == records[n]["prompt"]
            assert kept["parts"]["function"] == pytest.approx(text.split().count("a") - 0.1 * len(text))
            assert (kept["length"], kept["finished"]) == (len(said), said[-1] == 0)
    for kind, texts in responses.items():
        each = len(texts) // 13
        right = [text == records[i // each]["answer"] for i, text in enumerate(texts)]
        assert 0.1 < sum(right) / len(texts) < 0.9
        assert found[f"eval/accuracy{kind}"] == pytest.approx(sum(right) / len(texts))
        assert found[f"eval/length{kind}"] == pytest.approx(sum(map(len, ids[kind])) / len(texts))
        ended = sum(row[-1] == 0 for row in ids[kind])
        assert found[f"eval/finished{kind}"] == pytest.approx(ended / len(texts))
        scores = [text.split().count("a") - 0.1 * len(text) for text in texts]
        assert found[f"eval/function{kind}"] == pytest.approx(sum(scores) / len(texts), abs=1e-6)
        if each == 2:
            solved = sum(one or other for one, other in zip(right[::2], right[1::2], strict=True))
            assert found["eval/pass@2"] == pytest.approx(solved / 13)
            assert texts[::2] != texts[1::2]
    assert {name for name in found if "pass" in name} == ({"eval/pass@2"} if answers == 2 else set())
    assert responses[""][::answers] != responses["_greedy"]
