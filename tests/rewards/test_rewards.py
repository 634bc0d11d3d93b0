"""Rewards: how scores of models and answer blocks add up, reward models of both kinds, several of them."""

import json
from math import nan

import pytest
import torch
from tiny import (
    flags,
    llama_config,
    read_jsonl,
    request_of,
    run_files,
    save_policy_dir,
    save_reward_dir,
    word_tokenizer,
)
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
)

from errors import InputError
from trainer import train_ppo
from trainer.models import critic_start
from trainer.rewards.combine import RawScores, Reward
from trainer.rewards.reward_models import conversation_ids, load_reward_model, parse_spec
from trainer.runs.displays import PARTS, metric_names

CPU = torch.device("cpu")
GOOD = "<think>\n1 + 1\n</think>\n<answer>\n2\n</answer>"
WORDS = ["user", "assistant", "one", "two", "three", "four", "five"]

REMOTE_CODE = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class LengthConfig(PretrainedConfig):
    model_type = "length_reward"

class LengthReward(PreTrainedModel):
    """Scores the number of words the assistant said, times a weight."""
    config_class = LengthConfig
    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.post_init()
    def _init_weights(self, module):
        pass
    def get_score(self, tokenizer, messages):
        assert messages[-1]["role"] == "assistant"
        return self.weight.item() * len(tokenizer(messages[-1]["content"]).input_ids)
'''


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_reward_dir(tmp_path_factory.mktemp("rm"), word_tokenizer(WORDS, chat=True), layers=2)


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    word_tokenizer(WORDS).save_pretrained(folder)
    (folder / "modeling_length.py").write_text(REMOTE_CODE)
    auto = {"AutoConfig": "modeling_length.LengthConfig", "AutoModel": "modeling_length.LengthReward"}
    config = {"model_type": "length_reward", "architectures": ["LengthReward"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"weight": torch.tensor(0.5)}, folder / "pytorch_model.bin")
    return str(folder)


def test_the_answer_block_is_scored_on_its_own():
    """0.4 * score(whole) + 0.6 * score(answer only), each clipped to +-3 first; parts add up."""
    table = {GOOD: 1.0, "2": 5.0, "no block": -7.0}
    asked = []

    def model(conversations):
        asked.extend(conversations)
        return torch.tensor([table[response] for _, response in conversations])

    parts = Reward({"model": (model, 1.0)})(request_of(["p", "q"], [GOOD, "no block"]))
    assert asked == [("p", GOOD), ("q", "no block"), ("p", "2")]
    assert parts["model"].tolist() == pytest.approx([0.4 * 1 + 0.6 * 3, -3.0])
    assert parts["score"].tolist() == pytest.approx([0.5 + 1.0 + 2.2, -3.0])


def test_a_score_is_at_its_limit_where_the_clip_holds_it():
    """Whole responses: those of one reward model or of two. Answer blocks and weights do not count."""
    table = {"a": 3.0, "b": -3.5, "c": 2.99, GOOD: 0.0, "2": 9.0}
    model = (lambda c: torch.tensor([table[response] for _, response in c]), -0.5)
    other = (lambda c: torch.tensor([float(response == "c") * 4 for _, response in c]), 1.0)
    for models, wanted in (({"m": model}, [1, 1, 0, 0]), ({"m": model, "o": other}, [1, 1, 1, 0])):
        reward = Reward(models)
        raw = reward.raw_scores(request_of(["p"] * 4, ["a", "b", "c", GOOD]))
        assert reward.at_limit(raw).tolist() == [bool(x) for x in wanted]


def test_some_raw_scores_are_replaced_by_hand():
    """Of four responses the second and the fourth are new. Of these the fourth has an answer block, as the
    first and the second had."""
    parts, blocks = ({"model": torch.tensor(x)} for x in ([1.0, 2, 3, 4], [10.0, 20, nan, nan]))
    old = RawScores(parts, blocks, steps=[[(0, 1.0)], [(1, 2.0)], [], [(3, 4.0)]])
    parts, blocks = ({"model": torch.tensor(x)} for x in ([5.0, 6], [nan, 60]))
    new = RawScores(parts, blocks, steps=[[(5, 5.0)], []])
    old.replace([1, 3], new)
    assert old.parts["model"].tolist() == [1, 5, 3, 6]
    assert old.blocks["model"].nan_to_num(-1).tolist() == [10, -1, -1, 60]
    assert old.steps == [[(0, 1.0)], [(5, 5.0)], [], []]
    no_model = RawScores({"function": torch.tensor([5.0, 6])}, steps=[[], []])
    no_model.replace([1], RawScores({"function": torch.tensor([7.0])}, steps=[[]]))
    assert no_model.parts["function"].tolist() == [5, 7]


def test_without_reasoning_only_the_whole_is_scored():
    asked = []
    reward = Reward({"model": (lambda c: asked.extend(c) or torch.ones(len(c)), 1.0)}, reasoning=False)
    parts = reward(request_of(["p"], ["<answer>2</answer>"]))
    assert {name: x.tolist() for name, x in parts.items()} == {"model": [1.0], "score": [1.0]}
    assert asked == [("p", "<answer>2</answer>")]  # and not the answer block


def test_a_cut_response_pays_the_missing_eos_penalty():
    reward = Reward(function=lambda *_: [1.0, 1.0], reasoning=False, missing_eos_penalty=0.75)
    assert reward(request_of(["p", "p"], ["a", "b"], finished=[True, False]))["score"].tolist() == [1.0, 0.25]


def test_a_score_loses_its_offset_and_a_long_conversation_its_beginning(tmp_path):
    tokenizer = word_tokenizer(WORDS, chat=True)
    path = save_reward_dir(tmp_path, tokenizer, reward_offset=5.0)
    reward_model = load_reward_model(path, CPU)
    reward_model.max_length = 6
    score = reward_model([("one two three", "four five four five two")])
    ids = tokenizer("user one two three </s> assistant four five four five two </s>").input_ids
    with torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(path)
        last, first = (model(torch.tensor([x])).logits.item() for x in (ids[-6:], ids[:6]))
    assert score.item() == pytest.approx(last - 5.0, abs=1e-5)
    assert abs(first - last) > 1e-3


def test_the_critic_starts_from_no_model_with_fewer_embeddings_than_the_policy(classifier):
    """Policies often have a few more embeddings than their tokenizer has ids, and can sample every one."""
    reward = load_reward_model(classifier, CPU)
    rows = len(reward.tokenizer)
    for more, found in ((-1, reward.model), (0, reward.model), (1, None)):
        policy = LlamaForCausalLM(llama_config(rows + more))
        start = critic_start("auto", {"model": (reward, 1.0)}, policy, reward.tokenizer)
        assert start == (found or policy, 1.0)
    with pytest.raises(InputError, match=f"--critic_init reward: .*at least its {rows + 1} embeddings"):
        critic_start("reward", {"model": (reward, 1.0)}, policy, reward.tokenizer)


@pytest.mark.parametrize("kind", ["packed", "padded", "no pad token", "encoder"])
def test_a_classifier_scores_a_conversation_as_if_it_were_alone(tmp_path, monkeypatch, kind):
    """In an encoder all tokens see each other, so padding must be masked. A decoder that looks for its last
    token by the pad token, and has none, gets one conversation at a time."""
    tokenizer = word_tokenizer(WORDS, chat=True)
    if kind != "packed":
        monkeypatch.setattr("trainer.rewards.reward_models.pack_sequences", lambda backbone: False)
    save_reward_dir(tmp_path, tokenizer, pad_token_id=None if kind == "no pad token" else 1)
    if kind == "encoder":
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        more = {"num_labels": 1, "initializer_range": 0.5, "pad_token_id": 1, "architectures": None}
        config = BertConfig(vocab_size=len(tokenizer), **sizes, **more)
        BertForSequenceClassification(config).save_pretrained(tmp_path)
    model = load_reward_model(str(tmp_path), CPU)
    assert model.packs == (kind == "packed")
    conversations = [("one", "two </s>"), ("one two three", "four"), ("five", "one two three four five")]
    found = model(conversations).tolist()
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for pair, score in zip(conversations, found, strict=True):
        (ids,) = conversation_ids(model.tokenizer, [pair])
        with torch.no_grad():
            assert score == pytest.approx(peer(torch.tensor([ids])).logits.item(), abs=1e-5)
    assert max(found) - min(found) > 1e-3


def test_remote_code_needs_permission_and_then_scores(remote):
    with pytest.raises(InputError, match="--trust_remote_code"):
        load_reward_model(remote, CPU)
    model = load_reward_model(remote, CPU, trust_remote_code=True)
    assert model([("one", "one two three"), ("two", "one")]).tolist() == [1.5, 0.5]


def test_what_is_no_reward_model_is_refused(tmp_path):
    save_policy_dir(tmp_path / "a causal LM", word_tokenizer(WORDS))
    save_reward_dir(tmp_path / "two labels", word_tokenizer(WORDS), num_labels=2)
    for name in ("missing", "a causal LM", "two labels"):
        with pytest.raises(InputError, match="--reward_model"):
            load_reward_model(str(tmp_path / name), CPU)


def test_specs_of_reward_models(tmp_path):
    odd = tmp_path / "a=0.5"
    odd.mkdir()
    assert parse_spec("org/name") == ("org/name", 1.0)
    assert parse_spec("org/name=0.3") == ("org/name", 0.3)
    assert parse_spec(str(odd)) == (str(odd), 1.0)  # a path that exists is taken whole
    assert parse_spec(f"{odd}=2") == (str(odd), 2.0)
    for weight in ("0", "nan", "inf"):
        with pytest.raises(InputError, match="--reward_model a="):
            parse_spec(f"a={weight}")


def test_training_with_several_reward_models(tmp_path):
    files = run_files(tmp_path) | {"reward_fn": "", "run_name": "r", "out_dir": tmp_path / "out"}
    tokenizer = word_tokenizer(list("abcdefgh"), chat=True)
    more = save_reward_dir(tmp_path / "more", tokenizer, seed=9)
    high = save_reward_dir(tmp_path / "high", tokenizer, reward_offset=-50.0)  # about 50 for every response
    sizes = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "critic_warmup_steps": 0}
    sizes["device"] = "cpu"
    reward_models = ["--reward_model", f"{files.pop('reward_model')}=0.5", f"{more}=2", f"{high}=0.1"]
    argv = flags(**files, **sizes, max_steps=2, length_reward=0.1, repetition_penalty=0.3)
    train_ppo.main([*argv, *reward_models])
    for metrics in read_jsonl(tmp_path / "out" / "r" / "metrics.jsonl")[1:]:
        parts = [metrics[name] for name in metric_names(PARTS, {name: [x] for name, x in metrics.items()})]
        names = ("model_reward", "model_more", "length_reward", "repetition")
        assert {f"reward/{name}" for name in names} <= metrics.keys()
        assert metrics["reward/score"] == pytest.approx(sum(parts), abs=1e-5)
        assert metrics["reward/at_limit"] == 1.0
    reward_models[2] = f"{more}=3"
    with pytest.raises(InputError, match=r"--reward_model .* does not hold what the run began with"):
        train_ppo.main([*argv, *reward_models, "--resume", "auto"])
