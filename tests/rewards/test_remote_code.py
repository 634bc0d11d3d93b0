"""Models with code of their own: built whole, in their own precision; batches by get_scores where it agrees
with get_score; configs of transformers 4."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tiny import LINUX, ROOT, assistant, refused, save_policy_dir, save_reward_dir, user, word_tokenizer

from model.loading import load_config, load_policy
from trainer.rewards import reward_models
from trainer.rewards.reward_models import load_reward_model

CPU = torch.device("cpu")
# As code that was written for transformers 4.41: rotary tables that are computed in __init__ and not saved;
# tied keys as a list; config.use_return_dict; numbers that are read in __init__; rope_scaling None means no
# scaling; a cache class that is gone; get_scores pads on the right and returns a single number for a single
# conversation.
CODE = """import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput


class OldConfig(PretrainedConfig):
    model_type = "old_style"

    def __init__(self, vocab_size=10, hidden_size=16, rope_theta=10000, rope_scaling=None, use_cache=True,
                 fault="", **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, 1
        self.rope_theta, self.use_cache, self.fault = rope_theta, use_cache, fault
        self.rope_scaling = rope_scaling
        super().__init__(**kwargs)


class Rotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        scaling = 1.0 if config.rope_scaling is None else config.rope_scaling["factor"]
        assert config.rope_scaling is None or set(config.rope_scaling) == {"type", "factor"}
        powers = torch.arange(0, config.hidden_size, 2).float() / config.hidden_size
        inv_freq = 1.0 / (10000**powers * scaling)
        self.register_buffer("inv_freq", inv_freq.to(torch.get_default_dtype()), persistent=False)
        angles = torch.outer(torch.arange(64).float(), self.inv_freq.float()).repeat(1, 2)
        assert angles[1, 0].item() in (1.0, 0.5)
        self.register_buffer("cos_cached", angles.cos().to(self.inv_freq.dtype), persistent=False)
        self.register_buffer("sin_cached", angles.sin().to(self.inv_freq.dtype), persistent=False)

    def forward(self, x):
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos_cached[: x.shape[1]] + turned * self.sin_cached[: x.shape[1]]


class OldModel(PreTrainedModel):
    config_class = OldConfig
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.tok = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_head = nn.Linear(config.hidden_size, 1, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.calls = []
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.5)

    def get_input_embeddings(self):
        return self.tok

    def states(self, ids):
        x = self.rotary(self.tok(ids))
        assert x.dtype == self.tok.weight.dtype and not torch.is_autocast_enabled("cpu")
        return torch.tanh(self.mix(x)).cumsum(1)

    def scores(self, rows):
        if self.config.use_cache:
            raise AttributeError("type object 'DynamicCache' has no attribute 'from_legacy_cache'")
        self.calls.append(len(rows))
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        ends = [ids.shape[1] if self.config.fault == "padding" else len(row) for row in rows]
        found = self.v_head(self.states(ids)).squeeze(-1)[torch.arange(len(rows)), torch.tensor(ends) - 1]
        self.head_dtype = found.dtype
        return found

    def ids(self, tokenizer, conversation):
        return torch.tensor(tokenizer(" ".join(m["content"] for m in conversation))["input_ids"])

    def get_score(self, tokenizer, conversation):
        return self.scores([self.ids(tokenizer, conversation)]).item()

    def get_scores(self, tokenizer, conversations):
        if self.config.fault == "raises":
            raise KeyError("no batches today")
        found = self.scores([self.ids(tokenizer, c) for c in conversations]).squeeze().tolist()
        return found[:-1] if self.config.fault == "count" else found


class OldPolicy(OldModel):
    def forward(self, input_ids, return_dict=None, **kwargs):
        return_dict = return_dict if return_dict is not None else self.config.use_return_dict
        logits = self.lm_head(self.states(input_ids))
        return CausalLMOutputWithPast(logits=logits) if return_dict else (logits,)


class OldForSequenceClassification(OldModel):
    def forward(self, input_ids, attention_mask=None, **kwargs):
        last = attention_mask.sum(1) - 1
        states = self.states(input_ids)[torch.arange(len(last)), last]
        return SequenceClassifierOutput(logits=self.v_head(states))
"""
KINDS = {"AutoModel": "OldModel", "AutoModelForCausalLM": "OldPolicy"}
KINDS |= {"AutoModelForSequenceClassification": "OldForSequenceClassification"}
PAIRS = [("a b", "c d e f g h " * (1 + i % 5) + "a") for i in range(21)]
IDS = torch.tensor([[2, 3, 4, 5, 6, 7]])


def save_old(folder, kind="AutoModel", dtype=torch.float32, **settings):
    """A folder with the code above and random weights -> (its path, the model by hand, its tokenizer).
    settings: of its config."""
    folder.mkdir()
    source = folder / "modeling_old.py"
    source.write_text(CODE)
    spec = importlib.util.spec_from_file_location(f"by_hand_{kind}", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    module.OldConfig.rope_scaling = None  # in transformers 5 another name of rope_parameters
    sizes = {"hidden_size": settings.get("hidden_size", 16), "num_labels": 1, "pad_token_id": 0}
    config = module.OldConfig(**sizes, use_cache=False)
    by_hand = getattr(module, KINDS[kind])(config).eval()
    state = {name: x.to(dtype).contiguous() for name, x in by_hand.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    names = {"AutoConfig": "modeling_old.OldConfig", kind: f"modeling_old.{KINDS[kind]}"}
    config = {"model_type": "old_style", "architectures": [KINDS[kind]], "auto_map": names, "num_labels": 1}
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "transformers_version": "4.41.0"}
    config |= {"pad_token_id": 0, "eos_token_id": 0} | settings
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = word_tokenizer("abcdefgh")
    tokenizer.save_pretrained(folder)
    return str(folder), by_hand, tokenizer


def load(path, **more):
    return load_reward_model(path, CPU, trust_remote_code=True, **more)


def alone(model, tokenizer):
    """Its scores of PAIRS, one at a time."""
    chats = [[user(prompt), assistant(response)] for prompt, response in PAIRS]
    return torch.tensor([model.get_score(tokenizer, chat) for chat in chats])


@pytest.fixture
def no_lucky_memory(monkeypatch):
    """Memory that nothing was written to holds NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))


def test_it_scores_as_built_by_hand_and_in_batches(tmp_path, no_lucky_memory, capsys, monkeypatch):
    path, by_hand, tokenizer = save_old(tmp_path / "m")
    refused("--trust_remote_code", load_reward_model, path, CPU)
    refused("it reads messages", load_reward_model, path, CPU, True, form="{prompt}{response}")
    model, expected = load(path), alone(by_hand, tokenizer)
    assert model.batched and expected.std() > 0.1
    assert alone(model.model, tokenizer).equal(expected)
    buffers = {n for n, _ in model.model.named_non_persistent_buffers()}
    assert buffers == {"rotary.inv_freq", "rotary.cos_cached", "rotary.sin_cached"}
    assert model(PAIRS[:1]).allclose(expected[:1], atol=1e-5)  # get_scores returns a number, not a list
    assert len(model([])) == 0
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model), "get_scores", lambda self, _, chats: read.extend(chats) or [0.0])
        model([("\n\nHuman: hi\n\nAssistant: So", " it is")])  # the answer continues the transcript
    assert read == [[user("hi"), assistant("So it is")]]
    assert capsys.readouterr().err == ""

    def sizes_of_batches():
        model.model.calls.clear()
        assert model(PAIRS).allclose(expected, atol=1e-5)
        return model.model.calls

    assert sizes_of_batches() == [21]  # short conversations
    monkeypatch.setattr(reward_models, "tokens_per_forward", lambda device: 64)
    assert len(sizes_of_batches()) > 3
    model.model.config.use_cache = True
    refused(r"its get_scores failed: AttributeError: .*from_legacy_cache", model, PAIRS)


def test_weights_may_be_in_torchs_own_file_and_missing_ones_and_packages_are_named(tmp_path):
    path, by_hand, tokenizer = save_old(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(by_hand.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    assert load(path)(PAIRS).allclose(alone(by_hand, tokenizer), atol=1e-5)
    state = {n: x.contiguous() for n, x in by_hand.state_dict().items() if n != "v_head.weight"}
    save_file(state, tmp_path / "m" / "model.safetensors")
    refused(r"its weights lack .*: v_head\.weight", load, path)
    (tmp_path / "m" / "modeling_old.py").write_text("import no_such_package\n" + CODE)
    refused("no_such_package", load, path)


FAULTS = {"padding": "and get_score differ", "raises": "no batches today", "count": "get_scores failed"}


@pytest.mark.parametrize("fault", FAULTS)
def test_get_scores_that_does_not_agree_is_not_used(tmp_path, capsys, fault):
    path, by_hand, tokenizer = save_old(tmp_path / "m", fault=fault)
    model = load(path)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and FAULTS[fault] in said and "scoring one at a time" in said
    assert not model.batched and model(PAIRS).equal(alone(by_hand, tokenizer))


DTYPES = [  # (of the checkpoint, asked for, of the weights)
    (torch.bfloat16, "auto", torch.bfloat16),
    (torch.float16, "auto", torch.float32),  # on a CPU
    (torch.float16, torch.float16, torch.float16),
]


@pytest.mark.parametrize(("saved", "weights", "expected"), DTYPES)
def test_weights_are_those_of_the_checkpoint_and_the_head_is_fp32(tmp_path, saved, weights, expected):
    path, by_hand, tokenizer = save_old(tmp_path / "m", dtype=saved)
    model = load(path, weights=weights, dtype=torch.bfloat16)
    assert model.model.tok.weight.dtype == model.model.mix.weight.dtype == expected
    assert model.model.rotary.inv_freq.equal(by_hand.rotary.inv_freq.to(expected))
    assert model.model.v_head.weight.dtype == torch.float32
    exact = alone(by_hand.to(saved).float(), tokenizer)
    assert model(PAIRS).allclose(exact, rtol=0.05, atol=0.3 if expected != torch.float32 else 1e-4)
    assert model.model.head_dtype == torch.float32


LINEAR = {"type": "linear", "factor": 2.0}
NEW = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
ROPES = [  # (what the file says, rope_scaling)
    ({"rope_scaling": None}, None),
    ({"rope_scaling": LINEAR}, LINEAR),
    ({"rope_parameters": NEW | {"rope_type": "default"}}, None),  # the new name alone
    ({"rope_parameters": NEW}, NEW),
]


@pytest.mark.parametrize(("settings", "wanted"), ROPES)
def test_the_kind_of_rotary_positions_reaches_it(tmp_path, settings, wanted):
    """None where positions are plain."""
    name = "new" if wanted == NEW else "m"  # of a module, whose class load_config changes
    path, by_hand, _ = save_old(tmp_path / name, **settings)
    config = load_config(path, trust_remote_code=True)
    assert config.rope_scaling == wanted
    assert config.rope_theta == 10000
    if wanted != NEW:  # which this code does not know
        assert load(path).model.rotary.inv_freq.equal(by_hand.rotary.inv_freq / (2 if wanted else 1))


def test_a_classifier_and_a_policy(tmp_path, no_lucky_memory):
    path, by_hand, _ = save_old(tmp_path / "c", "AutoModelForSequenceClassification")
    mask = torch.ones_like(IDS)
    assert load(path).model(IDS, attention_mask=mask).logits.equal(by_hand(IDS, attention_mask=mask).logits)
    path, by_hand, _ = save_old(tmp_path / "p", "AutoModelForCausalLM")
    assert load_policy(path, trust_remote_code=True)(IDS).logits.equal(by_hand(IDS).logits)


def test_models_without_code_are_the_same_with_trust_remote_code(tmp_path, no_lucky_memory):
    """The policy beside a reward model that brings its code."""
    path = save_policy_dir(tmp_path / "llama", word_tokenizer("abcdefgh"))
    plain, trusting = (load_policy(path, trust_remote_code=trust) for trust in (False, True))
    assert trusting(IDS).logits.equal(plain(IDS).logits)
    judge = save_reward_dir(tmp_path / "judge", word_tokenizer("abcdefgh"))
    assert load(judge)(PAIRS).equal(load_reward_model(judge, CPU)(PAIRS))


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
def test_loading_takes_no_more_memory_than_the_model(tmp_path):
    """32M weights in bf16 are 64 MiB. A copy in fp32, or a second one, would take 128 MiB or more."""
    paths = (save_old(tmp_path / str(n), dtype=torch.bfloat16, hidden_size=n)[0] for n in (16, 5792))
    command = [sys.executable, "-c", MEMORY, str(ROOT), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 60 < int(done.stdout) / 1024 < 64 + 32
