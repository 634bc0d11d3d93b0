"""Models are loaded whole: buffers that no checkpoint holds are those that ``__init__`` computes."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file
from tiny import save_policy_dir, save_reward_dir, word_tokenizer

from errors import InputError
from model.loading import load_config, load_policy
from trainer.rewards.reward_models import load_reward_model

# As code that was written for transformers 4.41: rotary tables and a cache that grows, both computed in
# __init__ and not saved; tied keys as a list; config.use_return_dict; numbers that are read in __init__.
CODE = """import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput


class OldConfig(PretrainedConfig):
    model_type = "old_style"

    def __init__(self, vocab_size=12, hidden_size=16, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, 1
        super().__init__(**kwargs)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.grow(4)

    def grow(self, length):
        self.length = length
        angles = torch.outer(torch.arange(length).float(), self.inv_freq.cpu()).repeat(1, 2)
        assert angles[1, 0].item() == 1.0
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.grow(2 * x.shape[1])
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos_cached[: x.shape[1]] + turned * self.sin_cached[: x.shape[1]]


class OldModel(PreTrainedModel):
    config_class = OldConfig
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.tok = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.5)

    def get_input_embeddings(self):
        return self.tok

    def states(self, ids):
        return torch.tanh(self.mix(self.rotary(self.tok(ids)))).cumsum(1)

    def get_score(self, tokenizer, messages):
        ids = tokenizer(" ".join(m["content"] for m in messages))["input_ids"]
        return self.score(self.states(torch.tensor([ids])))[0, -1, 0].item()


class OldPolicy(OldModel):
    def forward(self, input_ids, return_dict=None, **kwargs):
        return_dict = return_dict if return_dict is not None else self.config.use_return_dict
        logits = self.lm_head(self.states(input_ids))
        return CausalLMOutputWithPast(logits=logits) if return_dict else (logits,)


class OldForSequenceClassification(OldModel):
    def forward(self, input_ids, attention_mask=None, **kwargs):
        last = attention_mask.sum(1) - 1
        states = self.states(input_ids)[torch.arange(len(last)), last]
        return SequenceClassifierOutput(logits=self.score(states))
"""
KINDS = {"AutoModel": "OldModel", "AutoModelForCausalLM": "OldPolicy"}
KINDS |= {"AutoModelForSequenceClassification": "OldForSequenceClassification"}


def save_old(folder, kind, first_line=""):
    """A folder with the code above and random weights -> (its path, the model by hand, its tokenizer)."""
    folder.mkdir()
    source = folder / "modeling_old.py"
    source.write_text(first_line + CODE)
    spec = importlib.util.spec_from_file_location(f"by_hand_{kind}", source)
    module = importlib.util.module_from_spec(spec)
    tokenizer = word_tokenizer("abcdefgh")
    if not first_line:
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        by_hand = getattr(module, KINDS[kind])(module.OldConfig(num_labels=1, pad_token_id=0)).eval()
        save_file({n: x.contiguous() for n, x in by_hand.state_dict().items()}, folder / "model.safetensors")
    names = {"AutoConfig": "modeling_old.OldConfig", kind: f"modeling_old.{KINDS[kind]}"}
    config = {"model_type": "old_style", "architectures": [KINDS[kind]], "auto_map": names, "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 0, "eos_token_id": 0}))
    tokenizer.save_pretrained(folder)
    return str(folder), None if first_line else by_hand, tokenizer


@pytest.fixture
def no_lucky_memory(monkeypatch):
    """Memory that nothing was written to holds NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))


def test_a_reward_model_with_code_of_its_own_scores_as_built_by_hand(tmp_path, no_lucky_memory):
    path, by_hand, tokenizer = save_old(tmp_path / "m", "AutoModel")
    loaded = load_reward_model(path, torch.device("cpu"), trust_remote_code=True)
    for text in ("a b", "a b c d e f g h a b c"):  # the second one is longer than the cache
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        assert loaded([("a", text)]).item() == torch.tensor(by_hand.get_score(tokenizer, messages)).item()
    buffers = {n for n, _ in loaded.model.named_non_persistent_buffers()}
    assert buffers == {"rotary.inv_freq", "rotary.cos_cached", "rotary.sin_cached"}


def test_a_classifier_and_a_policy_with_code_of_their_own(tmp_path, no_lucky_memory):
    ids = torch.tensor([[2, 3, 4, 5, 6, 7]])
    path, by_hand, _ = save_old(tmp_path / "c", "AutoModelForSequenceClassification")
    loaded = load_reward_model(path, torch.device("cpu"), trust_remote_code=True)
    mask = torch.ones_like(ids)
    assert loaded.model(ids, attention_mask=mask).logits.equal(by_hand(ids, attention_mask=mask).logits)
    path, by_hand, _ = save_old(tmp_path / "p", "AutoModelForCausalLM")
    assert load_policy(path, trust_remote_code=True)(ids).logits.equal(by_hand(ids).logits)


def test_models_without_code_of_their_own_are_the_same_with_trust_remote_code(tmp_path, no_lucky_memory):
    """The policy beside a reward model that brings its code."""
    path = save_policy_dir(tmp_path / "llama", word_tokenizer("abcdefgh"))
    plain, trusting = (load_policy(path, trust_remote_code=trust) for trust in (False, True))
    ids = torch.tensor([[2, 3, 4, 5, 6, 7]])
    assert trusting(ids).logits.equal(plain(ids).logits)
    judge = save_reward_dir(tmp_path / "judge", word_tokenizer("abcdefgh"))
    plain, trusting = (load_reward_model(judge, torch.device("cpu"), trust) for trust in (False, True))
    assert trusting([("a", "b c")]).equal(plain([("a", "b c")]))


def test_weights_that_are_missing_are_refused(tmp_path):
    path, by_hand, _ = save_old(tmp_path / "m", "AutoModel")
    state = {n: x.contiguous() for n, x in by_hand.state_dict().items() if n != "score.weight"}
    save_file(state, tmp_path / "m" / "model.safetensors")
    with pytest.raises(InputError, match=r"its weights lack .*: score\.weight"):
        load_reward_model(path, torch.device("cpu"), trust_remote_code=True)


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_the_kind_of_rotary_positions_reaches_code_of_its_own(tmp_path, kind):
    """None only where positions are plain; a file may have the new name, ``rope_parameters``, alone."""
    path, *_ = save_old(tmp_path / kind, "AutoModel")
    file = tmp_path / kind / "config.json"
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    found = load_config(path, True).rope_scaling
    assert found is None if kind == "default" else found["factor"] == 4.0


def test_a_package_that_the_code_needs_is_named(tmp_path):
    path, *_ = save_old(tmp_path / "m", "AutoModel", "import no_such_package\n")
    with pytest.raises(InputError, match="no_such_package") as caught:
        load_reward_model(path, torch.device("cpu"), trust_remote_code=True)
    assert len(str(caught.value).splitlines()) == 1
