"""Reward models with code of their own: batches by get_scores where it agrees with get_score, precision,
configs of transformers 4."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import LINUX, ROOT, word_tokenizer

from errors import InputError
from model.loading import load_config
from trainer.rewards import reward_models
from trainer.rewards.reward_models import load_reward_model

CPU = torch.device("cpu")
WORDS = list("abcdefgh")
# As code for transformers 4.41: rope_scaling None means no scaling; a cache class that is gone; get_scores
# pads on the right and returns a single number for a single conversation.
CODE = """import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class JudgeConfig(PretrainedConfig):
    model_type = "judge"

    def __init__(self, vocab_size=10, hidden_size=16, rope_theta=10000, rope_scaling=None, use_cache=True,
                 fault="", **kwargs):
        self.vocab_size, self.hidden_size, self.fault = vocab_size, hidden_size, fault
        self.rope_theta, self.rope_scaling, self.use_cache = rope_theta, rope_scaling, use_cache
        super().__init__(**kwargs)


class Judge(PreTrainedModel):
    config_class = JudgeConfig

    def __init__(self, config):
        super().__init__(config)
        scaling = 1.0 if config.rope_scaling is None else config.rope_scaling["factor"]
        assert config.rope_scaling is None or set(config.rope_scaling) == {"type", "factor"}
        self.tok = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_head = nn.Linear(config.hidden_size, 1, bias=False)
        table = torch.outer(torch.arange(64.0), torch.full((config.hidden_size,), 0.1 / scaling)).cos()
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)
        self.calls = []
        self.post_init()

    def _init_weights(self, module):
        pass

    def scores(self, ids, lengths):
        if self.config.use_cache:
            raise AttributeError("type object 'DynamicCache' has no attribute 'from_legacy_cache'")
        self.calls.append(len(ids))
        if len(ids) > self.config.__dict__.get("most", 1 << 30):
            raise torch.OutOfMemoryError("CUDA out of memory")
        x = self.tok(ids) * self.table[: ids.shape[1]]
        assert x.dtype == self.tok.weight.dtype and not torch.is_autocast_enabled("cpu")
        states = torch.tanh(self.mix(x)).cumsum(1)
        places = lengths - 1 if self.config.fault != "padding" else torch.full_like(lengths, ids.shape[1] - 1)
        found = self.v_head(states).squeeze(-1)[torch.arange(len(ids)), places]
        self.head_dtype = found.dtype
        return found

    def ids(self, tokenizer, conversation):
        return torch.tensor(tokenizer(" ".join(m["content"] for m in conversation))["input_ids"])

    def get_score(self, tokenizer, conversation):
        ids = self.ids(tokenizer, conversation)
        return self.scores(ids[None], torch.tensor([len(ids)])).item()

    def get_scores(self, tokenizer, conversations):
        if self.config.fault == "raises":
            raise KeyError("no batches today")
        rows = [self.ids(tokenizer, c) for c in conversations]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        found = self.scores(ids, torch.tensor([len(row) for row in rows])).squeeze().tolist()
        return found[:-1] if self.config.fault == "count" else found
"""
PAIRS = [("a b", "c d e f g h " * (1 + i % 5) + "a") for i in range(21)]


@pytest.fixture
def judge(tmp_path):
    """A function: settings of the config, dtype -> the folder of such a model with random weights."""

    def make(dtype=torch.float32, **settings):
        folder = tmp_path / f"judge{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "modeling_judge.py").write_text(CODE)
        names = {"AutoConfig": "modeling_judge.JudgeConfig", "AutoModel": "modeling_judge.Judge"}
        config = {"model_type": "judge", "architectures": ["Judge"], "auto_map": names, "rope_scaling": None}
        config |= {"torch_dtype": str(dtype).removeprefix("torch."), "transformers_version": "4.41.0"}
        (folder / "config.json").write_text(json.dumps(config | settings))
        torch.manual_seed(0)
        width = settings.get("hidden_size", 16)
        state = {"tok.weight": torch.randn(10, width), "mix.weight": torch.randn(width, width) / width**0.5}
        state |= {"mix.bias": torch.randn(width), "v_head.weight": torch.randn(1, width)}
        state = {name: x.to(dtype) for name, x in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        word_tokenizer(WORDS).save_pretrained(folder)
        return str(folder)

    return make


def load(path, **more):
    return load_reward_model(path, CPU, trust_remote_code=True, **more)


def alone(model, pairs=PAIRS):
    chats = [[{"role": "user", "content": p}, {"role": "assistant", "content": r}] for p, r in pairs]
    return torch.tensor([model.model.get_score(model.tokenizer, chat) for chat in chats])


def test_get_scores_is_used_in_batches_where_it_agrees(judge, capsys):
    model = load(judge())
    assert model.batched
    expected = alone(model)
    assert expected.std() > 0.1
    model.model.calls.clear()
    assert model(PAIRS).allclose(expected, atol=1e-5)
    assert model.model.calls == [len(PAIRS)]  # one batch: 21 short conversations
    assert model(PAIRS[:1]).allclose(expected[:1], atol=1e-5)  # get_scores returns a number, not a list
    assert len(model([])) == 0
    assert capsys.readouterr().err == ""


FAULTS = [("padding", "and get_score differ"), ("raises", "no batches today"), ("count", "get_scores failed")]


@pytest.mark.parametrize(("fault", "says"), FAULTS)
def test_get_scores_that_does_not_agree_is_not_used(judge, capsys, fault, says):
    model = load(judge(fault=fault))
    model.model.config.fault = ""
    expected = alone(model)
    model.model.config.fault = fault
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and says in said and "scoring one at a time" in said
    assert not model.batched and model(PAIRS).equal(expected)


def test_a_batch_that_does_not_fit_is_halved_and_a_long_one_cut(judge, monkeypatch):
    model = load(judge())
    expected = alone(model)
    model.model.config.most = 6
    model.model.calls.clear()
    assert model(PAIRS).allclose(expected, atol=1e-5)
    assert max(n for n in model.model.calls if n <= 6) >= 2 and 21 in model.model.calls
    model.model.config.most = 99
    monkeypatch.setattr(reward_models, "tokens_per_pass", lambda device: 64)
    model.model.calls.clear()
    assert model(PAIRS).allclose(expected, atol=1e-5)
    assert len(model.model.calls) > 3


@pytest.mark.parametrize(
    ("saved", "weights", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),  # on a CPU
        (torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_weights_are_those_of_the_checkpoint_and_the_head_is_fp32(judge, saved, weights, expected):
    model = load(judge(saved), weights=weights, dtype=torch.bfloat16)
    assert model.model.tok.weight.dtype == model.model.mix.weight.dtype == expected
    assert model.model.table.dtype == expected
    assert model.model.v_head.weight.dtype == torch.float32
    wide = load(judge(saved), weights=torch.float32)
    if expected == torch.float32:
        assert model.model.table.equal(wide.model.table)  # not the numbers of 16 bits
    assert model(PAIRS).allclose(wide(PAIRS), rtol=0.05, atol=0.3 if expected != torch.float32 else 1e-4)
    assert model.model.head_dtype == torch.float32


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}, "no such line"])
def test_rope_scaling_is_what_the_file_says(judge, scaling):
    path = judge(rope_scaling=scaling)
    if scaling == "no such line":
        file = Path(path) / "config.json"
        config = json.loads(file.read_text())
        del config["rope_scaling"]
        file.write_text(json.dumps(config))
        scaling = None
    config = load_config(path, trust_remote_code=True)
    assert config.rope_scaling == scaling
    assert config.rope_theta == 10000
    table = torch.outer(torch.arange(64.0), torch.full((16,), 0.1 / (2.0 if scaling else 1.0))).cos()
    assert load(path).model.table.equal(table)


def test_a_failure_of_get_score_is_one_line(judge):
    model = load(judge())
    model.model.config.use_cache = True
    with pytest.raises(InputError, match=r"its get_scores failed: AttributeError: .*from_legacy_cache"):
        model(PAIRS)


MEMORY = """import sys, torch
sys.path.insert(0, sys.argv[1])
from trainer.rewards.reward_models import load_reward_model
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def load(path):
    model = load_reward_model(path, torch.device("cpu"), trust_remote_code=True).model
    return [p.view(-1).view(torch.int16)[::64].sum() for p in model.mix.parameters()]  # pages are read late
load(sys.argv[2])
before = peak()
load(sys.argv[3])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_loading_takes_no_more_memory_than_the_model(judge):
    """32M weights in bf16 are 64 MiB. A copy in fp32, or a second one, would take 128 MiB or more."""
    paths = judge(torch.bfloat16), judge(torch.bfloat16, hidden_size=5792)
    command = [sys.executable, "-c", MEMORY, str(ROOT), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 60 < int(done.stdout) / 1024 < 64 + 24
