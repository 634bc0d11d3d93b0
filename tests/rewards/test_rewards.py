"""Rewards: how scores of parts, models and answer blocks add up, normalised or not; reward models that are
classifiers, at their own precision; several of them."""

import json
import math
import zlib

import pytest
import tiny
import torch
import transformers as T
from steps import take_step
from test_invariants import make_run
from tokenizers.processors import TemplateProcessing

from dataset.answers import after_thinking
from dataset.chat_template import conversation_text
from dataset.formats import TurnText
from model.critic import CriticModel
from model.loading import load_policy, load_tokenizer
from model.weights import HalfEmbedding, HalfLinear, ScoreHead, weights_hash
from trainer import train_ppo
from trainer.compute.precision import round_frozen
from trainer.inputs import DEMO
from trainer.rewards.combine import (
    EvalReward,
    RawScores,
    Reward,
    RunningStats,
    load_models,
    make_eval_reward,
    make_reward,
)
from trainer.rewards.reward_function import Request
from trainer.rewards.reward_models import conversation_ids, load_reward_model, models_hash, parse_spec
from trainer.run import critic_start
from trainer.runs.distributed import World

ALONE = World(0, 1, torch.device("cpu"))
CPU = torch.device("cpu")
GOOD = "<think>\n1 + 1\n</think>\n<answer>\n2\n</answer>"
WORDS = ["user", "assistant", "one", "two", "three", "four", "five"]
PAIRS = [("one two", "three " * n + "four") for n in range(1, 9)]


def judging(table, weight=1.0):
    """A reward model and its weight. table: {"prompt: response": score}, for no other conversation."""
    return lambda asked: torch.tensor([table[f"{prompt}: {text}"] for prompt, text in asked]), weight


OWN = {"functions": {"function": (lambda prompts, *_: [1.0] * len(prompts), 1.0)}, "reasoning": False}
UNEQUAL = {"models": {"model": judging({"p: a": 8.0, "q: b": 0.0}, -0.5)}, "reasoning": False}
NORMALISED = {
    "normalize_reward": True,
    "functions": {"function": (lambda prompts, *_: [50.0, 70.0][: len(prompts)], 1.0)},
    "server": lambda request: torch.tensor([50.0, 70.0])[: len(request.responses)],
    "length_reward": 0.5,
    "missing_eos_penalty": 0.25,
}
RULES = {"repetition_penalty": 0.5, "length_reward": 0.25, "missing_eos_penalty": 2.0}
RULES |= {"max_gen_len": 8, "overlong_buffer": 4, "overlong_penalty": 0.5}
SUMS = [  # (the reward's fields, responses to p, q, r, {part: scores}, what else is known of the responses)
    (
        {
            "models": {"model": judging({f"p: {GOOD}": 1.0, "p: 2": 5.0, "q: no block": -7.0})},
            "reasoning": True,
        },
        [GOOD, "no block"],  # whole responses and answer blocks are clipped first
        {"format": [0.5, 0], "marks": [1, 0], "model": [0.4 * 1 + 0.6 * 3, -3], "score": [3.7, -3]},
    ),
    (
        {"models": {"model": judging({"p: <answer>2</answer>": 1.0})}, "reasoning": False},
        ["<answer>2</answer>"],  # and not the answer block
        {"model": [1], "score": [1]},
    ),
    (
        OWN | RULES,
        ["a", "b", "x " * 30],
        {"function": [1, 1, 1], "repetition": [0, 0, -0.5], "length_reward": [-0.25, -0.25, 0.25]}
        | {"missing_eos": [0, 0, -2], "overlong": [0, -0.375, -0.5], "score": [0.75, 0.375, -1.75]},
        {"finished": [True, True, False], "lengths": [3, 7, 8]},
    ),
    (UNEQUAL, ["a", "b"], {"model": [-1.5, 0], "score": [-1.5, 0]}),
    (
        UNEQUAL | NORMALISED,
        ["a", "b"],
        {"model": [-0.5, 0.5], "function": [50, 70], "server": [-1, 1], "length_reward": [-0.5, -0.5]}
        | {"missing_eos": [0, -0.25], "score": [48, 70.75]}
        | {"score_raw": [95.5, 139.25]},  # with weights, neither clipped nor normalised
        {"finished": [True, False]},
    ),
    (
        {"models": {"model": judging({f"p: {GOOD}": 6.0, "p: 2": 8.0, "q: no": 4.0}, 0.5)}}
        | {"reasoning": True, "normalize_reward": True},  # 4 and 6 become -1 and 1, the block's 8 becomes 3
        [GOOD, "no"],
        {"format": [0.5, 0], "marks": [1, 0], "model": [0.5 * (0.4 * 1 + 0.6 * 3), -0.5]}
        | {"score": [2.6, -0.5], "score_raw": [1.5 + 0.5 * (0.4 * 6 + 0.6 * 8), 2]},
    ),
]


def test_the_beginning_in_the_prompt_belongs_to_the_answer():
    """To its format and thought; a reward model reads what is said, behind the beginning or the thought."""
    question = [tiny.user("q")]
    begun = [*question, tiny.assistant(TurnText("Well: <think>\n1 ", is_begun=True))]
    sure = [*question, tiny.assistant(TurnText("Sure: ", is_begun=True))]
    rest = GOOD.removeprefix("<think>\n1 ")
    asked = []

    def model(conversations):
        asked.extend(conversations)
        return torch.zeros(len(conversations))

    prompts, responses = [begun, begun, sure], [rest, "no end", "5"]
    models = {"model": (model, 1.0)}
    found = Reward(models, thinking_reward=1.0)(
        tiny.request_of(prompts, responses, texts=["Well: <think>\n1 "] * 3)
    )
    assert asked == [(question, after_thinking(GOOD)), (question, ""), (question, "Sure: 5")]
    assert found["thinking"].tolist() == [-0.25, 0, 0]
    ended = [*question, tiny.assistant(TurnText("</think>", is_begun=True))]
    found = Reward(thinking_reward=1.0)(tiny.request_of([begun, ended], [rest, rest], texts=["q", "q"]))
    assert found["thinking"].tolist() == [-0.25, 0]
    asked.clear()
    found = Reward(models, reasoning=True)(tiny.request_of(prompts, responses))
    assert (found["format"].tolist(), found["marks"].tolist()) == ([0.5, 0, 0], [1, 0.25, 0])
    assert asked[:3] == [
        (question, "Well: " + GOOD),
        (question, "Well: <think>\n1 no end"),
        (question, "Sure: 5"),
    ]
    assert asked[3:] == [(question, "2")]


@pytest.mark.parametrize("case", SUMS)
def test_parts_and_their_sum(case):
    fields, responses, wanted, *more = case
    reward = Reward(**fields)
    raw = reward.score_parts(tiny.request_of(list("pqr")[: len(responses)], responses, **dict(*more)))
    parts = reward.combine(raw, ALONE)
    assert {name: x.tolist() for name, x in parts.items()} == {n: pytest.approx(x) for n, x in wanted.items()}
    assert list(parts) == list(wanted) == reward.names
    models = {name for name in ("model", "server") if name in wanted}
    assert set(reward.running) == (models if reward.normalize_reward else set())


def number_of(*texts):
    """A number from -2.4 to 2.4 that follows from these texts, other texts have another one."""
    return zlib.crc32(" | ".join(texts).encode()) % 97 / 20 - 2.4


def steps_of(prompts, responses, answers, tag):
    """Of every second response in steps"""
    rows = zip(map(number_of, prompts, responses, answers, tag), map(len, responses), strict=True)
    return [[(None, x), (n // 2, 1.0)] if n % 2 else x for x, n in rows]


ROWS = {
    "models": {name: (lambda asked: torch.tensor([number_of(*x) for x in asked]), 0.5) for name in "mn"},
    "functions": {"function": (steps_of, 1.0)},
    "server": lambda request: [
        number_of(p.text, r) for p, r in zip(request.prompts, request.responses, strict=True)
    ],
    "missing_eos_penalty": 0.25,
    "repetition_penalty": 0.5,
    "length_reward": 0.5,
    "max_gen_len": 8,
    "overlong_buffer": 5,
    "thinking_reward": 1.0,
}
RESPONSES = [
    GOOD,
    "b " * 30,
    GOOD.replace("2", "3"),
    "</think>c",
    f"a</think>{'b' * 40}",
    "<answer>4</answer> d",
    "e",
]


@pytest.mark.parametrize("kind", ["rewards", "two functions", "reasoning", "normalised", "judge"])
def test_each_response_of_a_batch_is_scored_as_if_it_were_alone(kind):
    """Part by part: with its own prompt, answer, record, length and end, and the scores of its own block."""
    reward = (EvalReward if kind == "judge" else Reward)(**ROWS, reasoning=kind == "reasoning")
    if kind == "two functions":
        reward.functions = {name: (steps_of, weight) for name, weight in (("f", 1.0), ("g", 0.5))}
    if kind == "normalised":
        reward.normalize_reward = True
        reward.running = {name: RunningStats(4, 0.5, 9.0) for name in ("m", "n", "server")}
    rows = range(len(RESPONSES))
    whole = tiny.request_of(
        [f"p {n}" for n in rows],
        RESPONSES,
        answers=[f"{n}" for n in rows],
        finished=[n != 1 for n in rows],
        records=[{"tag": f"t {n}"} for n in rows],
        lengths=[2 + n for n in rows],
        texts=[f"text {n}" + "</think>" * (n == 4) for n in rows],
    )
    raw = reward.score_parts(whole)
    parts = reward.combine(raw)
    for name, x in {**raw.parts, **parts}.items():
        assert not x.equal(x.flip(0)), f"{name}: rows that change places would not be noticed"
    assert raw.blocks["m"].isfinite().sum() == (3 if kind == "reasoning" else 0)
    for n in rows:
        own = [[x[n]] for x in (whole.prompts, whole.responses, whole.finished, whole.lengths)]
        alone = reward.score_parts(Request(*own))
        pairs = (raw.parts, alone.parts), (raw.blocks, alone.blocks), (parts, reward.combine(alone))
        for found, wanted in pairs:
            found = {name: x[n].item() for name, x in found.items()}
            assert found == {
                name: pytest.approx(x.item(), abs=1e-6, nan_ok=True) for name, x in wanted.items()
            }
        assert [raw.steps[n]] == alone.steps


def test_a_score_is_at_its_limit_where_the_clip_holds_it():
    """Whole responses: those of one reward model or of two. Answer blocks and weights do not count."""
    table = {"p: a": 3.0, "p: b": -3.5, "p: c": 2.99, f"p: {GOOD}": 0.0, "p: 2": 9.0}
    other = judging({said: 4.0 * (said == "p: c") for said in table})
    for more, wanted in (({}, [1, 1, 0, 0]), ({"other": other}, [1, 1, 1, 0])):
        reward = Reward({"model": judging(table, -0.5)} | more, reasoning=True)
        raw = reward.score_parts(tiny.request_of(["p"] * 4, ["a", "b", "c", GOOD]))
        assert reward.at_limit(raw).tolist() == wanted


def test_some_raw_scores_are_replaced_by_hand():
    """Of four responses the second and the fourth are new. The fourth has an answer block, as two had."""
    parts, blocks = ({"model": torch.tensor(x)} for x in ([1.0, 2, 3, 4], [10.0, 20, math.nan, math.nan]))
    old = RawScores(parts, blocks, steps=[[(0, 1.0)], [(1, 2.0)], [], [(3, 4.0)]])
    parts, blocks = ({"model": torch.tensor(x)} for x in ([5.0, 6], [math.nan, 60]))
    old.replace([1, 3], RawScores(parts, blocks, steps=[[(5, 5.0)], []]))
    assert old.parts["model"].tolist() == [1, 5, 3, 6]
    assert old.blocks["model"].nan_to_num(-1).tolist() == [10, -1, -1, 60]
    assert old.steps == [[(0, 1.0)], [(5, 5.0)], [], []]
    no_model = RawScores({"function": torch.tensor([5.0, 6])}, steps=[[], []])
    no_model.replace([1], RawScores({"function": torch.tensor([7.0])}, steps=[[]]))
    assert no_model.parts["function"].tolist() == [5, 7]


def close(one, other):
    assert one.count == other.count
    assert (one.mean, one.squares) == pytest.approx((other.mean, other.squares), rel=1e-12)


def scaled(stats, scores):
    return Reward(running={"model": stats})._clipped("model", scores)


def test_running_stats_by_hand():
    both = RunningStats.of(torch.tensor([1.0, 2.0, 6.0])) + RunningStats.of(torch.tensor([7.0]))
    assert (both.count, both.mean, both.squares) == (4, 4.0, 26.0)  # 9 + 4 + 4 + 9
    assert scaled(both, torch.tensor([4.0, 10.5])).tolist() == pytest.approx([0.0, 6.5 / math.sqrt(6.5)])
    far = RunningStats.of(torch.tensor([10_001.0, 10_002.0])) + RunningStats.of(torch.tensor([10_006.0]))
    close(far, RunningStats(3, 10_003.0, 14.0))
    close(RunningStats.of(torch.tensor([1.0, 2.0, 2.0])), RunningStats(3, 5 / 3, 2 / 3))  # fp64
    for scores in (torch.full((5,), 0.1), torch.tensor([7.0])):  # without spread
        seen = RunningStats.of(scores) + RunningStats.of(scores)
        assert scaled(seen, scores).tolist() == [0.0] * len(scores)


def test_normalised_scores_by_hand():
    """The statistics are of whole responses; answer blocks are scaled with the same; weights come last."""
    block = "a<answer>x</answer>"
    table = {f"p: {block}": 10.0, "p: x": 30.0, "p: b": 20.0, "p: c": 30.0, "p: d": 100.0}
    reward = Reward({"model": judging(table, 2.0)}, reasoning=True, normalize_reward=True)
    first, later = (
        reward.score_parts(tiny.request_of(["p"] * len(x), x)) for x in ([block, "b", "c"], ["d"])
    )
    parts = reward.combine(first, ALONE)
    close(reward.running["model"], RunningStats(3, 20.0, 200.0))
    unit = math.sqrt(200 / 3)
    assert parts["model"].tolist() == pytest.approx([2 * (-4 + 6) / unit, 0.0, 20 / unit])
    assert parts["score"].equal(parts["format"] + parts["marks"] + parts["model"])
    assert not reward.at_limit(first).any()  # -1.2 to 1.2
    assert reward.at_limit(later).tolist() == [True]  # 9.8
    assert reward.combine(later)["model"].tolist() == [6.0]  # as in evaluation: clipped to 3, then weighted
    close(reward.running["model"], RunningStats(3, 20.0, 200.0))
    reward.combine(later, ALONE)
    close(reward.running["model"], RunningStats(4, 40.0, 5000.0))


def test_specs_of_reward_models(tmp_path):
    odd = tmp_path / "a=0.5"
    odd.mkdir()
    assert parse_spec("org/name") == ("org/name", 1.0)
    assert parse_spec("org/name=0.3") == ("org/name", 0.3)
    assert parse_spec(str(odd)) == (str(odd), 1.0)  # a path that exists is taken whole
    assert parse_spec(f"{odd}=2") == (str(odd), 2.0)
    for weight in ("0", "nan", "inf"):
        tiny.refused("--reward_model a=", parse_spec, f"a={weight}")


def test_every_flag_reaches_the_reward(tmp_path):
    """Several reward models are named after their folders."""
    tokenizer = tiny.word_tokenizer(WORDS, chat=True)
    one, other = (tiny.save_reward_dir(tmp_path / name, tokenizer) for name in ("one", "other"))
    wanted = {"missing_eos_penalty": 0.5, "repetition_penalty": 0.1, "length_reward": 0.2, "max_gen_len": 7}
    wanted |= {"overlong_buffer": 3, "overlong_penalty": 0.4, "thinking_reward": 0.6}
    wanted |= {"reward_timeout": 9, "normalize_reward": 1, "reasoning": 0}
    argv = tiny.flags(**wanted, reward_dtype="bfloat16")
    both = [f"{one}=-2", other], {"model_one": -2, "model_other": 1}
    for specs, weights in (([one], {"model": 1}), both):
        args = train_ppo.parse_args([*argv, "--reward_model", *specs])
        reward = make_reward(args, {})
        assert {name: weight for name, (_, weight) in reward.models.items()} == weights
        load_models(reward, args, CPU, torch.float32)
        assert {name: weight for name, (_, weight) in reward.models.items()} == weights
        for model, _ in reward.models.values():
            assert model.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert wanted.items() <= vars(reward).items() and reward.server is None


def test_a_step_logs_the_mean_of_each_part_and_the_share_at_the_limit(tmp_path):
    tokenizer = tiny.word_tokenizer(tiny.WORDS, chat=True)
    high = tiny.save_reward_dir(tmp_path / "high", tokenizer, reward_offset=-50.0)
    run, prompts = make_run(tiny.run_files(tmp_path) | {"reward_model": high})
    logged, batch = take_step(run, 0, [prompts[i] for i in range(16)])
    assert logged["reward/at_limit"] == 1.0
    for name, scores in batch.parts.items():
        assert logged[f"reward/{name}"] == pytest.approx(scores.mean().item(), abs=1e-6)


def test_what_is_no_number_or_no_reward_model_is_refused(tmp_path):
    reward = Reward({"model": judging({"p: a": math.nan})})
    says = '--reward_model: the score nan for the response "a"'
    tiny.refused(says, reward.score_parts, tiny.request_of(["p"], ["a"]))
    path = tiny.save_reward_dir(tmp_path, tiny.word_tokenizer(WORDS), num_labels=2)
    tiny.refused("--reward_model .*: it has 2 labels", load_reward_model, path, CPU)


def save_encoder(folder, kind):
    """A BERT, DeBERTa v3 or RoBERTa that takes 8 tokens: RoBERTa's positions begin behind its pad token's."""
    tokenizer = tiny.word_tokenizer([*WORDS, "<s>"])
    tokenizer.add_special_tokens({"cls_token": "<s>"})
    around = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=around
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    types = ["token_type_ids"] * (kind == "Bert")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": ["input_ids", *types]}))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes["max_position_embeddings"] = 10 if kind == "Roberta" else 8
    sizes["type_vocab_size"] = {"Bert": 2, "Roberta": 1, "DebertaV2": 0}[kind]
    more = {"num_labels": 1, "pad_token_id": 1, "initializer_range": 0.5}
    torch.manual_seed(0)
    config = getattr(T, f"{kind}Config")(vocab_size=len(tokenizer), **sizes, **more)
    getattr(T, f"{kind}ForSequenceClassification")(config).save_pretrained(folder)


ENCODERS = ("Bert", "Roberta", "DebertaV2")


@pytest.mark.parametrize("kind", ["packed", "padded", "no pad token", *ENCODERS])
def test_a_classifier_scores_a_conversation_as_if_it_were_alone(tmp_path, monkeypatch, kind):
    """An encoder's score is read at the first token, and its tokens see each other: padding is masked.
    A decoder that looks for its last token by the pad token, and has none, gets one at a time. A score loses
    its offset, and a long conversation its beginning, but for an encoder's first token. An encoder reads
    prompt and response as the two texts of its tokenizer."""
    encoder = kind in ENCODERS
    if kind in ("padded", "no pad token"):
        monkeypatch.setattr("trainer.rewards.reward_models.pack_sequences", lambda backbone: False)
    if encoder:
        save_encoder(tmp_path, kind)
    else:
        pad = None if kind == "no pad token" else 1
        tokenizer = tiny.word_tokenizer(WORDS, chat=kind != "padded")
        tiny.save_reward_dir(tmp_path, tokenizer, pad_token_id=pad, reward_offset=5.0)
    model = load_reward_model(str(tmp_path), CPU)
    assert (model.packs, model.causal, model.pairs) == (kind == "packed", not encoder, encoder)
    if not encoder:
        model.max_length = 8
    conversations = [("one", "two </s>"), ("one two", "three"), ("one two", "five four " * 9 + "three")]
    conversations += [("one two", "four"), ("one", "four five </s>"), ("one", "two </s>")]
    computed = []
    table = model.model.get_input_embeddings()
    table.register_forward_hook(lambda module, given, out: computed.append(given[0].numel()))
    found = model(conversations).tolist()
    peer = T.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for pair, score in zip(conversations, found, strict=True):
        inputs = {"input_ids": conversation_ids(model.tokenizer, [pair])[0]}
        if encoder:
            inputs = model.tokenizer(pair[0], pair[1].replace("</s>", "unknown"))
            assert ("token_type_ids" in inputs) == model.has_types == (kind == "Bert")
        cut = {k: torch.tensor([[*x[:encoder], *x[encoder:][encoder - 8 :]]]) for k, x in inputs.items()}
        with torch.no_grad():
            alone = peer(**cut).logits.item()
        assert score == pytest.approx(alone - (0.0 if encoder else 5.0), abs=1e-5)
    assert max(found) - min(found) > 1e-3
    if kind == "packed":  # what the texts of a prompt begin with is computed once
        lengths = [min(len(x), 8) for x in conversation_ids(model.tokenizer, conversations)]
        assert computed == [sum(lengths) - 2 * 4]  # "user one </s> assistant"
        fits = sum(lengths) - 2 * 4 + 2  # with the memory of the keys
        monkeypatch.setattr("trainer.rewards.reward_models.tokens_per_forward", lambda device: fits)
        assert model(conversations).tolist() == found
        assert len(computed) == 2


def test_without_a_chat_template_a_model_reads_what_it_was_trained_on(tmp_path):
    """Stage 2 trains without an EOS, TRL with one; --reward_template also replaces a chat template."""
    plain = tiny.word_tokenizer(WORDS)
    ours = load_reward_model(tiny.save_reward_dir(tmp_path / "ours", plain, reward_offset=0.0), CPU)
    path = tiny.save_reward_dir(tmp_path / "trl", plain, pad_token_id=1)
    trls = load_reward_model(path, CPU)
    chat = tiny.save_reward_dir(tmp_path / "chat", tiny.word_tokenizer(WORDS, chat=True), pad_token_id=1)
    form = "user {prompt} assistant {response} {eos} five"
    given = load_reward_model(chat, CPU, form=form)
    forms = [model.form for model in (ours, trls, load_reward_model(chat, CPU), given)]
    assert forms == ["{prompt}\n{response}", "{prompt}{response}{eos}", "", form]
    pair = ("one </s>two", " three </s>")  # characters of special tokens stay text: an unknown word
    peer = T.AutoModelForSequenceClassification.from_pretrained(path)  # both have the same weights
    for model, text in (
        (trls, "one unknown three unknown </s>"),
        (given, "user one unknown assistant three unknown </s> five"),
    ):
        with torch.no_grad():
            alone = peer(**plain(text, return_tensors="pt")).logits.item()
        assert model([pair]).item() == pytest.approx(alone, abs=1e-5)
    hashes = {models_hash({"model": (model, 1.0)}) for model in (trls, given)}
    trls.form = forms[0]
    assert len(hashes | {models_hash({"model": (trls, 1.0)})}) == 3


def test_the_flag_says_what_reward_models_read(tmp_path):
    run, _ = make_run(tiny.run_files(tmp_path), reward_template="{prompt}\\n{response}")
    assert (
        f"note     {tmp_path / 'reward'} reads '{{prompt}}\\n{{response}}' (--reward_template)" in run.about()
    )
    assert run.reward.models["model"][0].form == "{prompt}\n{response}"
    assert run.facts()["without_template"] == ""


def test_what_a_reward_template_makes_of_a_text():
    tokenizer = tiny.word_tokenizer(WORDS)
    for form, prompt, response, wanted in (
        ("{prompt}\n{response}", "a", "b", "a\nb"),
        ("{prompt}{response}{eos}", "{response}", " {eos}", "{response} {eos}</s>"),
        ("{prompt}{response}{eos}", "Human: a\n\nAssistant:", "b", "Human: a\n\nAssistant: b</s>"),
        ("{prompt}\n{response}", "Human: a\n\nAssistant:", " b", "Human: a\n\nAssistant: b"),
        (
            "Q: {prompt}\nA: {response}",
            [tiny.user("a"), tiny.assistant("b"), tiny.user("c")],
            "d",
            "Q: a\nb\nc\nA: d",
        ),
    ):
        assert conversation_text(tokenizer, prompt, response, form) == wanted


def test_an_encoder_takes_no_reward_template(tmp_path):
    save_encoder(tmp_path, "Bert")
    says = "it reads messages, or prompt and response as two; leave --reward_template out"
    tiny.refused(says, load_reward_model, str(tmp_path), CPU, form="{prompt}{response}")


MERGED = "system: s\nuser: a\nassistant: b\n以上是对话历史。我的新问题是：\nc"
TURNS = [{"role": "system", "content": "s "}, tiny.user("a"), tiny.assistant("b"), tiny.user("c")]


def test_with_merge_history_reward_models_read_one_message_as_minimind_writes_it():
    asked = []
    args = train_ppo.parse_args(["--merge_history", "1", "--eval_reward_model", "x"])
    for reward in (make_reward(args, {}), make_eval_reward(args, {})):
        reward.models = {"model": (lambda pairs: asked.append(pairs) or torch.zeros(len(pairs)), 1.0)}
        reward(tiny.request_of([TURNS, "plain", [tiny.user("one")]], ["x", "y", "z"]))
    wanted = [([tiny.user(MERGED)], "x"), ("plain", "y"), ([tiny.user("one")], "z")]
    assert asked == [wanted, wanted]


def test_a_batch_changes_no_score_of_the_others(tmp_path):
    """Longer conversations would change the rotation of all (Phi-3). XLNet reads the last column, so it gets
    no padding."""
    tokenizer = tiny.word_tokenizer(WORDS, chat=True)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 80, "rope_parameters": rope}
    sizes["original_max_position_embeddings"] = 20
    more = {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": 1, "eos_token_id": 2}
    small = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
    models = {
        "phi3": T.Phi3ForSequenceClassification(T.Phi3Config(**sizes, **more)),
        "xlnet": T.XLNetForSequenceClassification(T.XLNetConfig(**small, **more)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    assert load_reward_model(str(tmp_path / "phi3"), CPU).max_length == 20
    xlnet = load_reward_model(str(tmp_path / "xlnet"), CPU)
    alone = [xlnet([pair]).item() for pair in PAIRS[:2]]
    assert xlnet(PAIRS[:2]).tolist() == pytest.approx(alone, abs=1e-6)


def saved_in(folder, dtype, offset=0.0):
    path = tiny.save_reward_dir(folder, tiny.word_tokenizer(WORDS, chat=True), layers=2)
    model = T.AutoModelForSequenceClassification.from_pretrained(path).to(dtype)
    model.config.reward_offset = offset
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("stored", "products"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_a_16_bit_checkpoint_stays_in_16_bits_and_scores_the_same(tmp_path, stored, products):
    path = saved_in(tmp_path, stored, offset=0.25)
    kept = load_reward_model(path, CPU, dtype=products, weights=stored)
    wide = load_reward_model(path, CPU, dtype=products, weights=torch.float32)
    assert kept.packs and wide.packs
    types = {name: p.dtype for name, p in kept.model.named_parameters()}
    assert types["model.embed_tokens.weight"] == types["model.layers.1.mlp.up_proj.weight"] == stored
    assert types["score.weight"] == types["model.norm.weight"] == torch.float32
    assert {p.dtype for p in wide.model.parameters()} == {torch.float32}
    scores = wide(PAIRS)
    assert kept(PAIRS).equal(scores)  # bit for bit
    assert weights_hash(kept.model) == weights_hash(wide.model)
    kept.packs = False  # as a model that cannot read packed rows
    assert kept(PAIRS).allclose(wide(PAIRS), atol=1e-5 if products == torch.float32 else 2e-2)
    kept.packs = True
    for run in (torch.float32, products):  # rounding rounds nothing in a run of fp32, and never the head
        round_frozen([kept.model], run)
        dtype = kept.model.model.layers[0].mlp.up_proj.weight.dtype
        assert dtype == (stored if run == torch.float32 else run)
        assert kept.model.score.weight.dtype == torch.float32
        assert kept(PAIRS).equal(scores)
    for share in (False, True):
        critic = CriticModel.from_model(kept.model, share, weight=-2.0)
        assert {p.dtype for p in critic.parameters()} == {torch.float32}
        assert kept(PAIRS).equal(scores)  # the reward model scores as before
        assert critic.value_head.bias.item() == 0.5


DTYPES = [  # (of the checkpoint, of products, asked for, of the weights)
    (torch.float16, torch.float32, "auto", torch.float32),  # a CPU computes in fp32
    (torch.float32, torch.bfloat16, "auto", torch.float32),
    (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize(("stored", "products", "asked", "dtype"), DTYPES)
def test_weights_have_the_dtype_of_the_file_or_what_is_asked_for(tmp_path, stored, products, asked, dtype):
    """Whether its config names it or not. The head computes in fp32, always: scores are finer than bf16."""
    path = saved_in(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    for _ in range(2):
        model = load_reward_model(path, CPU, dtype=products, weights=asked)
        inner = model.model.model
        assert inner.embed_tokens.weight.dtype == inner.layers[0].mlp.up_proj.weight.dtype == dtype
        config.pop("dtype", None)
        (tmp_path / "config.json").write_text(json.dumps(config))
    if dtype == torch.bfloat16:
        kinds = inner.layers[0].mlp.up_proj, inner.embed_tokens, model.model.score
        assert [type(kind) for kind in kinds] == [HalfLinear, HalfEmbedding, ScoreHead]
    for model.packs in (True, False):
        scores = model(PAIRS)
        assert not scores.equal(scores.bfloat16().float())


def test_the_critic_starts_with_weight_and_sign_on_the_demo():
    """Its first values are weight * (score - offset), from the model with the largest weight."""
    folder, tokenizer = str(DEMO["reward_model"]), load_tokenizer(DEMO["model"])
    reward = load_reward_model(folder, CPU)
    small = load_reward_model(folder, CPU)
    policy = load_policy(DEMO["model"])
    start, weight = critic_start("auto", {"a": (small, 0.5), "b": (reward, -0.7)}, policy, tokenizer)
    assert (start, weight) == (reward.model, -0.7)
    critic = CriticModel.from_model(start, weight=weight)
    pair = ("What is two plus two?", "<answer>\nfour\n</answer>")
    (ids,) = conversation_ids(reward.tokenizer, [pair])
    place = max(i for i, token in enumerate(ids) if token != reward.pad_id)
    with torch.no_grad():
        value = tiny.values_of(critic, torch.tensor([ids]))[0, place].item()
    assert value == pytest.approx(-0.7 * reward([pair]).item(), abs=1e-4)
    assert critic_start("actor", {"b": (reward, -0.7)}, policy, tokenizer) == (policy, 1.0)


def test_the_critic_starts_from_no_model_with_fewer_embeddings_than_the_policy(tmp_path):
    """Policies often have a few more embeddings than their tokenizer has ids, and can sample every one."""
    path = tiny.save_reward_dir(tmp_path, tiny.word_tokenizer(WORDS, chat=True))
    reward = load_reward_model(path, CPU)
    rows = len(reward.tokenizer)
    for more, found in ((-1, reward.model), (0, reward.model), (1, None)):
        policy = T.LlamaForCausalLM(tiny.llama_config(rows + more))
        start = critic_start("auto", {"model": (reward, 1.0)}, policy, reward.tokenizer)
        assert start == (found or policy, 1.0)
    says = f"--critic_init reward: .*at least its {rows + 1} embeddings"
    tiny.refused(says, critic_start, "reward", {"model": (reward, 1.0)}, policy, reward.tokenizer)
    policy = T.LlamaForCausalLM(tiny.llama_config(rows))
    positions = reward.model.config.max_position_embeddings
    at_most = (positions, True, reward.model)
    for longest, causal, found in (at_most, (positions + 1, True, None), (9, False, None)):
        reward.causal = causal  # False: of an encoder, which sees what comes later
        start, _ = critic_start("auto", {"model": (reward, 1.0)}, policy, reward.tokenizer, longest)
        assert start is (found or policy)
