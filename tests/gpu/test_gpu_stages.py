"""Stages 1 and 2, reward models and chat on a GPU beside the CPU's."""

import pytest
import torch
from on_gpu import assert_near, needs_gpu
from tiny import WORDS, flags, read_jsonl, save_policy_dir, word_tokenizer, write_jsonl

import chat
from dataset.demo import make_reward
from trainer import train_reward, train_sft

pytestmark = needs_gpu


def text(n, k):
    return " ".join(WORDS[(n + i) % 8] for i in range(1 + (n + k) % 6))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path} of a policy, pairs (which are demonstrations too) and ratings."""
    folder = tmp_path_factory.mktemp("stages")
    kinds = {
        "pairs": lambda n: {"prompt": text(n, 0), "chosen": text(n, 1), "rejected": text(n + 3, 2)},
        "ratings": lambda n: {"prompt": text(n, 0), "completion": text(n, 1), "score": n % 5 - 2.0},
    }
    found = {name: write_jsonl(folder / name, map(kind, range(40))) for name, kind in kinds.items()}
    tokenizer = word_tokenizer(WORDS, chat=True)
    return found | {"policy": save_policy_dir(folder / "policy", tokenizer, layers=2, spread=2.0)}


CASES = {
    "demonstrations, checkpointing": (train_sft, "pairs", {"gradient_checkpointing": 1}),
    "pairs": (train_reward, "pairs", {}),
    "pairs, the demo's losses": (make_reward, "pairs", {}),
    "ratings": (train_reward, "ratings", {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stage_logs_what_the_cpu_logs(files, tmp_path, case):
    script, data, more = case
    sizes = {"batch_size": 8, "epochs": 1, "eval_size": 8, "eval_interval": 2, "save_interval": 2}
    given = {"model": files["policy"], "data_path": files[data], "run_name": "r", **sizes, **more}
    lines, before = {}, torch.get_float32_matmul_precision()
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "auto")):
        out = tmp_path / f"{device}_{dtype}"
        script.main(flags(**given, device=device, dtype=dtype, out_dir=out))
        torch.set_float32_matmul_precision(before)
        lines[device, dtype] = read_jsonl(out / "r" / "metrics.jsonl")
    assert_near(lines["cpu", "float32"], lines["cuda", "float32"], 1e-2)
    assert len(lines["cuda", "auto"]) == len(lines["cpu", "float32"])


def test_chat_answers(files, capsys):
    said = []
    for device in ("cpu", "cuda"):
        more = {"model": files["policy"], "prompt": "a b c", "max_gen_len": 6, "temperature": 0}
        chat.main(flags(**more, device=device))
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
