"""Training on models and data that others made (../shared/data); skipped where that folder is absent."""

import pytest
import tiny
import torch
from test_rewards import remote  # noqa: F401  (a fixture)

from model.loading import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.saving import save_policy
from trainer import train_ppo

pytestmark = pytest.mark.skipif(not tiny.SHARED.exists(), reason="needs ../shared/data")

WATER = '''
WORDS = ("water", "sea", "river", "ocean", "swim", "boat", "wave", "rain", "lake", "pool", "beach", "ship")

def score(prompts, responses, answers):
    """How many of the words occur; each counts once, so that repeating one does not pay."""
    return [float(sum(word in text.lower() for word in WORDS)) for text in responses]
'''


@pytest.mark.slow
def test_ppo_raises_a_reward_on_a_model_nobody_here_made(tmp_path):
    (tmp_path / "water.py").write_text(WATER)
    said = ["I was", "I dreamed that", "We were", "There was", "My friend and I", "I am", "A woman", "I had"]
    tiny.train(
        model=tiny.SHARED / "dreams-260k",
        reward_fn=f"{tmp_path / 'water.py'}:score",
        data_path=tiny.write_jsonl(tmp_path / "starts.jsonl", [{"prompt": s} for s in said]),
        out_dir=tmp_path, reasoning=0, epochs=1000, max_steps=60, batch_size=32, mini_batch_size=16,
        ppo_epochs=2, max_gen_len=48, learning_rate=3e-4, critic_learning_rate=1e-3,
        missing_eos_penalty=0, kl_coef=0.1,
    )  # fmt: skip
    metrics = tiny.read_jsonl(tmp_path / "run_1" / "metrics.jsonl")[1:]
    first, last = metrics[:5], metrics[-5:]
    before, after = (sum(m["reward/score"] for m in part) / 5 for part in (first, last))
    kl = max(m["kl/k3"] for m in metrics)
    print(f"reward {before:.2f} -> {after:.2f}, largest KL {kl:.3f} nats a token")
    assert len(metrics) == 60
    assert after > 2 * before + 0.2
    assert kl < 0.5
    assert all(m["kl/k3"] >= 0 for m in metrics)


@pytest.mark.parametrize("kind", ["classifier", pytest.param("remote code", marks=pytest.mark.slow)])
def test_minimind_512x8_on_minimind_prompts(kind, remote, tmp_path):  # noqa: F811
    """MiniMind's own flags, prompts, tokenizer and sizes; random weights; both kinds of reward model."""
    tokenizer_path = str(tiny.SHARED / "minimind2-tokenizer")
    tokenizer = load_tokenizer(tokenizer_path)
    torch.manual_seed(0)
    save_policy(MiniMindForCausalLM(MiniMindConfig()), tokenizer, tmp_path / "full_sft_512.pth")
    if kind == "classifier":
        tokenizer.pad_token = "<|endoftext|>"
        reward = tiny.save_reward_dir(tmp_path / "reward", tokenizer, hidden=64, layers=2)
    else:
        reward = remote
    sizes = {"hidden_size": 512, "batch_size": 4, "mini_batch_size": 2, "max_gen_len": 12, "max_steps": 3}
    files = {
        "data_path": tiny.SHARED / "rlaif-mini.jsonl",
        "tokenizer": tokenizer_path,
        "reward_model": reward,
    }
    argv = tiny.flags(**sizes, **files, out_dir=tmp_path, reasoning=0, critic_warmup_steps=1)
    argv += ["--learning_rate", "1e-6", "--critic_init", "actor", "--ppo_epochs", "1", "--device", "cpu"]
    argv += ["--trust_remote_code"] if kind == "remote code" else []
    train_ppo.main(argv)
    assert [m["step"] for m in tiny.read_jsonl(tmp_path / "run_1" / "metrics.jsonl")] == [0, 1, 2, 3]
    if kind == "remote code":  # once is enough: the file is the same
        return
    command = [tiny.PYTHON, str(tiny.ROOT / "chat.py"), "--out_dir", str(tmp_path), "--prompt", "你好"]
    command += ["--max_gen_len", "5"]
    out, _ = tiny.finish(tiny.start_script(command, {}))
    assert out.strip()
