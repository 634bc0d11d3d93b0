"""Tiny real models, tokenizers and files for tests, and the trainer's command line run in this process."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
CHAT = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def word_tokenizer(words, chat=False):
    """One token a word; id 0 is the EOS and the pad, id 1 the unknown word."""
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def llama_config(vocab_size, hidden=32, layers=1, **more):
    sizes = {"intermediate_size": 2 * hidden, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None}
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        **{**sizes, **ids, **more},
    )


def tiny_llama(vocab_size, seed=0, spread=1.0, **more):
    """A random Llama whose next-token distribution is far from uniform when ``spread`` is large."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(vocab_size, **more)).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(spread)
    return model


def save_policy_dir(folder, tokenizer, **more):
    """A policy directory as users have them -> its path as text."""
    tiny_llama(len(tokenizer), **more).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_reward_dir(folder, tokenizer, seed=1, **more):
    """A real sequence classifier with one label and random weights -> its path as text."""
    torch.manual_seed(seed)
    config = llama_config(len(tokenizer), **{"num_labels": 1, **more})
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def flags(**values):
    """{"batch_size": 8} -> ["--batch_size", "8"]."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def train(**values):
    """Run train_ppo.py's main in this process, as its command line would."""
    from trainer import train_ppo

    train_ppo.main(flags(device="cpu", eval_interval=0, log_interval=1000, save_interval=10_000, **values))


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def load_actor(run_folder, step):
    """The fp32 actor of a checkpoint, as a state-dict."""
    from safetensors.torch import load_file

    return load_file(Path(run_folder) / "checkpoints" / f"step_{step}" / "actor.safetensors")


PYTHON = sys.executable
