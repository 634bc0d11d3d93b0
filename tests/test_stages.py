"""Stages 1 and 2 as a user runs them, at a tiny size, and the data from which they make the demo's models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dataset.demo import make_data
from dataset.lm_dataset import RLAIFDataset, conversation_ids, right_pad
from dataset.records import open_records
from errors import InputError
from model.loading import load_policy
from trainer import train_reward, train_sft

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ["Is two small?", "Is six small?", "Is ten small?", "Is one small?"]


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """A tiny policy trained from nothing: (folder, what main returned)."""
    folder = tmp_path_factory.mktemp("sft")
    data = write(folder / "sft.jsonl", [{"prompt": q, "answer": "yes"} for q in QUESTIONS * 30])
    sizes = "--hidden_size 32 --num_hidden_layers 1 --epochs 6 --batch_size 8 --eval_size 8"
    sizes += " --learning_rate 1e-2 --device cpu"
    result = train_sft.main(["--data_path", data, "--out_dir", str(folder), *sizes.split()])
    return folder, result


def test_sft_learns_and_both_of_its_outputs_load(sft):
    folder, result = sft
    assert result["after"] < 0.5 * result["before"]
    directory, pth = folder / "full_sft_32", folder / "full_sft_32.pth"
    state = torch.load(pth, weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = torch.tensor([conversation_ids(tokenizer, QUESTIONS[0], "yes")])
    reloaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(reloaded(tokens).logits, load_policy(pth)(tokens).logits)
    # MiniMind 2's feed-forward width, rope and tied head
    assert reloaded.config.intermediate_size == 128
    assert reloaded.config.rope_parameters["rope_theta"] == 1e6
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_sft_continues_from_a_model_and_repeats_itself(sft, tmp_path):
    folder, _ = sft
    data = write(tmp_path / "sft.jsonl", [{"prompt": q, "answer": "no"} for q in QUESTIONS * 6])
    flags = [
        "--model",
        str(folder / "full_sft_32.pth"),
        "--data_path",
        data,
        "--eval_size",
        "4",
        "--epochs",
        "1",
    ]
    flags += ["--device", "cpu", "--batch_size", "4"]
    results = [train_sft.main([*flags, "--out_dir", str(tmp_path / name)]) for name in "ab"]
    assert results[0] == results[1] and results[0]["after"] < results[0]["before"]
    first, second = (torch.load(tmp_path / name / "full_sft_32.pth", weights_only=True) for name in "ab")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_answer_loss_by_hand():
    """One row: only the masked token counts, and it is predicted from the position before it."""
    logits = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]]])

    class Fixed(torch.nn.Module):
        def base_model(self, tokens):
            return type("Output", (), {"last_hidden_state": logits})

        def get_output_embeddings(self):
            return torch.nn.Identity()

    loss = train_sft.answer_loss(Fixed(), torch.tensor([[0, 1, 2]]), torch.tensor([[False, False, True]]))
    expected = torch.logsumexp(torch.tensor([1.0, 2.0, 3.0]), 0) - 3.0
    assert loss.item() == pytest.approx(expected.item())


def test_reward_learns_to_rank_and_reloads(sft, tmp_path):
    folder, _ = sft
    pairs = [{"prompt": q, "chosen": "yes", "rejected": "no, or so"} for q in QUESTIONS]
    data, held_out = (
        write(tmp_path / "train.jsonl", pairs[:3] * 20),
        write(tmp_path / "eval.jsonl", pairs[3:] * 4),
    )
    flags = ["--model", str(folder / "full_sft_32"), "--data_path", data, "--eval_data_path", held_out]
    flags += ["--tokenizer", str(folder / "full_sft_32"), "--out_dir", str(tmp_path / "reward")]
    result = train_reward.main(
        [*flags, "--epochs", "6", "--batch_size", "6", "--learning_rate", "3e-3", "--device", "cpu"]
    )
    assert result["after"]["pair_accuracy"] == 1.0
    assert result["after"]["chosen_mean"] > 0 > result["after"]["rejected_mean"]

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert model.config.num_labels == 1
    rows = [conversation_ids(tokenizer, QUESTIONS[3], response) for response in ("yes", "no, or so")]
    batched = model(right_pad(rows, model.config.pad_token_id)).logits[:, 0]
    single = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows])
    assert torch.allclose(batched, single, atol=1e-6) and batched[0] > batched[1]


def test_reward_losses_by_hand():
    scores = torch.tensor([1.0, 0.0, 0.0, 2.0])  # pairs (1, 0) and (0, 2)
    loss, accuracy = train_reward.pair_loss(scores, 0.1)
    softplus = torch.nn.functional.softplus(torch.tensor([-1.0, 2.0])).mean()
    assert loss.item() == pytest.approx(softplus.item() + 0.1 * 5 / 2)
    assert accuracy.item() == 0.5


def test_parting_loss_by_hand():
    """The two responses part at the second token, with scores 2 and 9."""
    tokens = torch.tensor([[5, 6, 7], [5, 7, 7]])
    loss = train_reward.parting_loss(torch.tensor([[1.0, 2.0, 0.0], [0.0, 9.0, 0.0]]), tokens)
    assert loss.item() == pytest.approx(torch.nn.functional.softplus(torch.tensor(7.0)).item())


def test_language_loss_by_hand():
    """Of the chosen 1 2 3, only the 3 is learned: up to the 2 the rejected response says the same."""
    tokens = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 0]])
    hidden = torch.zeros(2, 4, 5)
    hidden[0, 1, 3] = 2.0  # the logits at the 2, which predict the 3
    loss = train_reward.language_loss(hidden, tokens, torch.tensor([3]), torch.nn.Identity())
    expected = torch.logsumexp(torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0]), 0) - 2.0
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        ("train_sft", "--data_path nowhere.jsonl", "nowhere.jsonl"),
        ("train_sft", "--epochs 0", "--epochs"),
        ("train_sft", "--hidden_size 100", "--hidden_size"),
        ("train_sft", "--data_path {few} --max_seq_len 5", "--max_seq_len"),
        ("train_sft", "--data_path {few} --eval_size 9", "--eval_size"),
        ("train_reward", "--learning_rate -1", "--learning_rate"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(script, flags, says, tmp_path):
    module = {"train_sft": train_sft, "train_reward": train_reward}[script]
    few = write(tmp_path / "few.jsonl", [{"prompt": "one", "answer": "1"}] * 9)
    flags = flags.format(few=few)
    with pytest.raises(InputError, match=says):
        module.main([*flags.split(), "--out_dir", str(tmp_path / "out"), "--device", "cpu"])
    assert not (tmp_path / "out").exists()


def test_a_script_runs_from_any_folder_and_exits_with_2(tmp_path):
    command = [sys.executable, str(ROOT / "trainer/train_reward.py"), "--model", "/nowhere.pth"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: /nowhere.pth")
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------------
# The demo's data and tokenizer


def test_demo_data_is_a_function_of_its_seed(tmp_path):
    small = ["--demonstrations", "50", "--pairs", "50"]
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        make_data.main(["--out_dir", str(tmp_path / name), "--seed", seed, *small])
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "c" / file.name).read_bytes()


def test_committed_data_is_what_the_script_makes(tmp_path):
    make_data.main(["--out_dir", str(tmp_path)])
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (make_data.HERE / file.name).read_bytes(), file.name


def problem_of(text):
    """A question -> (a, op, b, op, c)."""
    words = text.rstrip("?.").split()[-5:]
    symbols = {word: symbol for symbol, word in make_data.SPOKEN.items()}
    return tuple(symbols[w] if w in symbols else make_data.WORDS.index(w) for w in words)


def test_held_out_problems_occur_in_no_training_file():
    def problems(name):
        return {problem_of(record["prompt"]) for record in open_records(make_data.HERE / name)}

    held_out = problems("eval.jsonl")
    terms = {make_data.terms(problem) for problem in held_out}
    assert len(held_out) == 500 and problems("preferences_eval.jsonl") == held_out
    for name in ("sft.jsonl", "preferences.jsonl", "ppo.jsonl"):
        assert not {make_data.terms(problem) for problem in problems(name)} & terms, name


def test_demonstrations_are_noisy_and_answers_right():
    for record in open_records(make_data.HERE / "eval.jsonl"):
        assert int(record["answer"]) == make_data.solve(problem_of(record["prompt"]))
    right = well_formed = total = 0
    for record in open_records(make_data.HERE / "sft.jsonl"):
        answer = make_data.solve(problem_of(record["prompt"]))
        total += 1
        right += f"<answer>\n{answer}\n</answer>" in record["answer"]
        well_formed += record["answer"].count("\n") == 6 and record["answer"].endswith("\n</answer>")
    assert 0.5 < right / total < 0.7 and 0.75 < well_formed / total < 0.85


def test_demo_tokenizer_keeps_digits_apart_and_encodes_anything():
    tokenizer = AutoTokenizer.from_pretrained(make_data.HERE / "tokenizer")
    assert len(tokenizer) <= 512
    response = "<think>\n27 + 15 = 42\n</think>\n<answer>\n42\n</answer>"
    ids = tokenizer(response)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids).count("4") == 2 and len(ids) == 21
    assert tokenizer.decode(ids, skip_special_tokens=True) == response
    for text in ("naïve 空 🎉\t\r\n", "  two  spaces ", "<answer>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert RLAIFDataset(make_data.HERE / "eval.jsonl", tokenizer, 64).dropped == 0
