"""Stages 1 and 2 as a user runs them, at a tiny size: what goes in, what comes out, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dataset.lm_dataset import conversation_ids, right_pad
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
