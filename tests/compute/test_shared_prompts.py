"""A prompt is computed once for all its answers, with the numbers and gradients of whole sequences."""

import random
import warnings
from itertools import product

import pytest
import torch
import transformers as T
from test_fused_layers import KNOWN, OTHERS, SIZES, WAYS, build, way  # noqa: F401  (a fixture)

from model.critic import CriticModel
from model.lora import add_adapters
from trainer.compute import fused_layers
from trainer.compute.batch import Batch
from trainer.compute.batching import (
    Layout,
    common_beginnings,
    micro_batches,
    tokens_per_micro_batch,
    tokens_saved,
)
from trainer.compute.precision import PRODUCT_ROW_MULTIPLE
from trainer.compute.scoring import (
    PolicyScorer,
    ValueScorer,
    pack_sequences,
    prepare_training,
    score_all,
    shares_beginnings,
)

# Row by row the prompt, and the length of its answer. The answers to a prompt are apart.
ROWS = [("a", 5), ("b", 6), ("a", 1), ("c", 4), ("d", 2), ("b", 6), ("a", 9), ("d", 3), ("e", 7)]
LENGTHS = {"a": 7, "b": 4, "c": 3, "d": 1, "e": 7}
COMPUTED = sum(LENGTHS.values()) + sum(count for _, count in ROWS)
WHOLE = sum(LENGTHS[name] + count for name, count in ROWS)


def make_batch(vocabulary=32):
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(1, vocabulary, (count,), generator=generator).tolist()

    prompts = {name: ids(count) for name, count in LENGTHS.items()}
    prompts["e"] = [*prompts["a"][:-1], prompts["a"][-1] % 31 + 1]  # all but its last token
    sequences = [prompts[name] + ids(count) for name, count in ROWS]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in sequences], batch_first=True)
    prompt_len, response_len = (
        torch.tensor(x) for x in ([LENGTHS[name] for name, _ in ROWS], [count for _, count in ROWS])
    )
    ended = torch.ones(len(ROWS), dtype=torch.bool)
    return Batch(tokens, prompt_len, response_len, ended, torch.zeros(len(ROWS), 9))


def prepared(config, checkpointing=0, lora_r=0):
    """-> scorers of a policy and of a critic"""
    model = build(config).requires_grad_(True)
    for p in model.parameters():
        p.data.mul_(0.6)  # so that rounding is below 1e-6
    critic = CriticModel.from_model(model)
    torch.nn.init.normal_(critic.value_head.weight, std=0.2)
    for backbone in (model.base_model, critic.backbone):
        prepare_training(backbone, checkpointing)
        if lora_r:
            pytest.importorskip("peft")
            add_adapters(backbone, lora_r, seed=1)
            for name, p in backbone.named_parameters():
                if "lora_B" in name:  # it starts at zero, and so would the gradient of the other one
                    torch.nn.init.normal_(p, std=0.05)
    return PolicyScorer(model, learn_entropy=True), ValueScorer(critic)


def numbers_and_gradients(scorers, batch, shared, dtype=torch.float32):
    """-> log-probs, entropies, values and the gradients of all that trains, and the tokens of each forward"""
    policy, value = scorers
    mb = batch.rows(range(len(ROWS)), shared)
    share = torch.linspace(-1, 1, mb.action_mask.numel()).view_as(mb.action_mask) / mb.action_mask.sum()
    found, counts = [], []
    for scorer, more in ((policy, [0.7]), (value, [])):
        scorer.dtype = dtype
        hook = scorer.backbone.get_input_embeddings().register_forward_hook(
            lambda *given: counts.append(given[1][0].numel())
        )
        *numbers, _ = scorer(mb.tokens, mb.layout, *more)
        hook.remove()
        trained = [p for p in scorer.parameters() if p.requires_grad]
        loss = sum((share * x).sum() for x in numbers)
        found += [*(x.detach() for x in numbers), *torch.autograd.grad(loss, trained)]
    return found, counts


def assert_within(tolerance, wanted, found):
    for x, y in zip(wanted, found, strict=True):
        assert (x - y).abs().max() <= tolerance * max(1, x.abs().max())


CASES = [*product(["llama", "qwen3"], WAYS), ("qwen2", WAYS[0]), *product(OTHERS, WAYS[1:3])]


@pytest.mark.parametrize(("name", "way"), CASES, indirect=["way"])
def test_numbers_and_gradients_are_those_of_whole_sequences(name, way):  # noqa: F811
    scorers = prepared((KNOWN | OTHERS)[name])
    batch = make_batch()
    plain, computed = numbers_and_gradients(scorers, batch, False)
    assert computed == [WHOLE, WHOLE]
    shared, computed = numbers_and_gradients(scorers, batch, True)
    assert computed == [COMPUTED, COMPUTED]
    assert_within(1e-6, plain, shared)
    halves = numbers_and_gradients(scorers, batch, True, torch.bfloat16)[0]
    rounded = numbers_and_gradients(scorers, batch, False, torch.bfloat16)[0]
    for exact, wanted, found in zip(plain, rounded, halves, strict=True):
        assert (found - exact).norm() <= 2 * (wanted - exact).norm() + 1e-3


@pytest.mark.parametrize(
    "more", [{"lora_r": 2}, {"checkpointing": 1}, {"lora_r": 2, "checkpointing": 1}], ids=str
)
def test_adapters_and_checkpoints_of_layers_learn_the_same(more):
    scorers = prepared(KNOWN["llama"], **more)
    batch = make_batch()
    plain = numbers_and_gradients(scorers, batch, False)[0]
    assert_within(1e-6, plain, numbers_and_gradients(scorers, batch, True)[0])


def test_a_batch_is_scored_with_each_prompt_once_a_micro_batch(monkeypatch):
    """The rows of a prompt come together from wherever they are. A group that is too large is cut."""
    scorer, _ = prepared(KNOWN["llama"])
    batch = make_batch()
    computed = []
    scorer.backbone.get_input_embeddings().register_forward_hook(
        lambda *given: computed.append(given[1][0].numel())
    )
    monkeypatch.setattr("trainer.compute.scoring.tokens_per_forward", lambda device: 24)
    logprobs, entropy = score_all(batch, scorer, temperature=0.7)
    # Three answers to "a", and the memory of two more copies of its keys; "e"; "b" and "c"; "d"
    assert computed == [7 + 9 + 5 + 1, 14, 4 + 6 + 6 + 3 + 4, 1 + 2 + 3]
    del computed[:]
    monkeypatch.setattr("trainer.compute.scoring.tokens_per_forward", lambda device: 22)
    assert_within(1e-6, [logprobs, entropy], score_all(batch, scorer, temperature=0.7))
    assert computed[0] == 7 + 9 + 5  # and its other answer later
    assert sum(computed) == COMPUTED + 7
    del computed[:]
    scorer.backbone.shares_beginnings = False
    with pytest.warns(
        UserWarning, match="^LlamaModel: a prompt is computed once for each answer, which is slower$"
    ):
        wanted = score_all(batch, scorer, temperature=0.7)
    assert sum(computed) == WHOLE
    assert_within(1e-6, wanted, [logprobs, entropy])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score_all(batch.rows([0, 1, 3, 4, 8]), scorer, temperature=0.7)  # one answer each


def test_experts_are_balanced_over_whole_sequences():
    """Their loss is of each sequence, so that its prompt counts once for each answer."""
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    backbone = build(T.Qwen3MoeConfig(head_dim=16, **sizes)).base_model
    assert pack_sequences(backbone)
    assert not shares_beginnings(backbone)


def _fails(out):
    raise RuntimeError("these lengths differ")


@pytest.mark.parametrize("fault", [_fails, lambda out: 1.01 * out], ids=["raises", "differs"])
def test_where_the_trial_fails_sequences_are_computed_whole(fault, monkeypatch):
    real = fused_layers.rotated_attention

    def faulty(query, key, value, cos, sin, packing, *more):
        out = real(query, key, value, cos, sin, packing, *more)
        return out if packing.key_index is None else fault(out)

    monkeypatch.setattr(fused_layers, "rotated_attention", faulty)
    backbone = build(KNOWN["llama"]).base_model
    assert pack_sequences(backbone)
    assert not shares_beginnings(backbone)
    assert pack_sequences(backbone)  # again: it is found once


def test_places_of_a_layout_by_hand():
    """Two answers to "0 1 2", of two tokens and of one, and between them one answer to another prompt."""
    layout = Layout.of_responses([3, 1, 3], [2, 1, 1], prompt=[0, 1, 0], shared=True)
    #                                    the prompt, its first answer, its second; the other sequence
    assert layout.row.tolist() == [0, 0, 0, 0, 0, 2, 1, 1]
    assert layout.position.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 6, 8]
    assert layout.cu_seqlens_k.tolist() == [0, 3, 8, 12, 14]
    assert layout.key_index.tolist() == [0, 1, 2, *(0, 1, 2, 3, 4), *(0, 1, 2, 5), *(6, 7)]
    assert layout.predicted_by.tolist() == [2, 3, 6, 2]  # row by row
    assert layout.predicted.tolist() == [3, 4, 7, 5]
    assert layout.response.tolist() == [0, 1, 2, 4]
    assert (layout.segments, layout.longest_q, layout.longest, layout.lengths) == (4, 3, 5, [5, 2, 4])
    assert layout.places([0, 1, 2]).tolist() == [0, 7, 2]
    prompts, answers = layout.padded
    assert prompts.position is None
    assert answers.position.tolist() == [[3, 4], [3, 3]]  # padding sees what the last query sees
    filled = layout.filled
    assert len(filled.row) == PRODUCT_ROW_MULTIPLE
    assert filled.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 64]
    assert filled.key_index[:14].equal(layout.key_index)
    plain = Layout.of_responses([3, 1, 3], [2, 1, 1], prompt=[0, 1, 2], shared=True)
    assert plain.key_index is None
    assert plain.cu_seqlens is not plain.cu_seqlens_k
    assert plain.cu_seqlens.tolist() == plain.cu_seqlens_k.tolist() == [0, 5, 7, 11]
    assert plain.predicted.equal(plain.predicted_by + 1)


def test_equal_prompts_are_found_by_their_tokens():
    """Padding and what follows a prompt do not count. Some rows of a batch keep what is known of them."""
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 7, 8], [5, 6, 7, 1]])
    batch = Batch(tokens, torch.tensor([2, 2, 3, 3]), torch.tensor([2, 1, 1, 1]), None, torch.zeros(4, 2))
    assert batch.layout.prompt == [0, 0, 1, 1]
    assert batch.layout.key_index is None
    some = batch.rows([3, 0, 2])
    assert some.layout.prompt == [1, 0, 1]
    assert len(some.rows([0, 2], shared=True).layout.row) == 5
    assert len(some.rows([0, 2]).layout.row) == 8


def test_micro_batches_keep_groups_together_within_the_budget():
    """Counted is what is computed, and for each further copy of a beginning's keys a twelfth of it. All that
    fits into one forward is one micro-batch."""
    rng = random.Random(0)
    split = 0
    for _ in range(200):
        group_of = [rng.randint(0, 9) for _ in range(rng.randint(1, 40))]
        common = [rng.randint(0, 60) for _ in range(10)]
        lengths = [common[group] + rng.randint(1, 30) for group in group_of]
        beginnings = [(group, common[group]) for group in group_of]
        budget = rng.randint(1, 900)
        cut = micro_batches(lengths, budget, beginnings)
        assert sorted(row for batch in cut for row in batch) == list(range(len(lengths)))

        def size(rows, lengths=lengths, group_of=group_of, common=common):
            groups = [group_of[row] for row in rows]
            computed = sum(lengths[row] - common[group_of[row]] for row in rows)
            for group in {*groups}:
                copies = groups.count(group)
                computed += common[group] + (copies - 1) * -(-common[group] // 12)
            return computed

        for batch in cut:
            assert len(batch) == 1 or size(batch) <= budget
        for group in {*group_of}:
            rows = [row for row, mine in enumerate(group_of) if mine == group]
            parts = sum(any(row in batch for row in rows) for batch in cut)
            alone = max(size(rows), len(rows) * max(lengths[row] for row in rows) / 2)
            if common[group] and alone <= budget:
                assert parts == 1
            split += parts > 1
        saved = tokens_saved(beginnings)
        assert sum(lengths) - saved == size(range(len(lengths)))
        whole = tokens_per_micro_batch(10**6, lengths, 1, saved)
        padded = len(lengths) * max(lengths)
        assert whole == max(sum(lengths) - saved, -((saved - padded) // 2))
        assert len(micro_batches(lengths, whole, beginnings)) == 1
        assert tokens_per_micro_batch(10**6, lengths, 4, saved) == -(-(sum(lengths) - saved) // 4)
    assert split > 100
    assert micro_batches([65] * 10, 200, [(0, 60)] * 10) == [[*range(10)]]  # 10 x 65 is more than 2 x 200


def test_a_common_beginning_leaves_each_sequence_a_token():
    sequences = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 5], [1, 2, 9], [7], [1, 2, 3]]
    assert common_beginnings(sequences, ["x", "x", "x", "y", "y", ("z",)]) == [
        (0, 2), (0, 2), (0, 2), (1, 0), (1, 0), (2, 2),
    ]  # fmt: skip
