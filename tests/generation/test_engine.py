"""Sampling responses: lengths, distribution, noise by index, KV cache, all model families.

What happens on a GPU only: test_cuda_branches.py.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from test_families import FAMILIES, PADDED, VOCAB, build
from tiny import ROOT, refused, tiny_llama

from trainer.compute.cpu import kernels as cpu
from trainer.compute.precision import round_frozen
from trainer.compute.scoring import PolicyScorer, pack_sequences, score_all
from trainer.generation import kv_cache, sampler_copy
from trainer.generation.engine import Engine, Sampler
from trainer.generation.kv_cache import KVCache
from trainer.generation.sampling import noise_keys
from trainer.inputs import check_sampling

PROMPTS = [[2 + i % 5] * (1 + i % 6) for i in range(16)]
VOCABULARY = 12


@pytest.fixture(scope="module")
def model():
    return tiny_llama(VOCABULARY, layers=2, spread=3.0)


def draw(model, rows, max_gen_len=10, temperature=1.0, eos=(0,), seed=7):
    keys = noise_keys(seed, 3, rows)
    return Sampler(model).sample([PROMPTS[i] for i in rows], keys, list(eos), max_gen_len, temperature)


@pytest.mark.parametrize("count", [3, 11])
def test_rows_that_are_decoded_and_rows_of_the_head_come_in_multiples_of_eight(model, count):
    """Products of 1 to 3 rows round differently: a result would depend on the other sequences."""
    sampler, decoded, read = Sampler(model), set(), set()
    copy = sampler.copy.model
    noted = lambda _, args, x: decoded.add(tuple(x["input_ids"].shape))  # noqa: E731
    copy.base_model.register_forward_pre_hook(noted, with_kwargs=True)
    copy.get_output_embeddings().register_forward_pre_hook(lambda _, x: read.add(len(x[0])))
    sampler.sample([[3, 4]] * count, noise_keys(7, 3, range(count)), [0], 10, 1.0)
    whole = {8} if count <= 8 else {8, 16}
    assert {rows for rows, width in decoded if width == 1} <= whole
    assert read <= whole


def test_every_token_is_computed_once(model, monkeypatch):
    """Continuous batching: little is computed for rows that have finished but are not yet removed."""
    rows, forward = [], model.model.__class__.forward

    def spy(self, **kwargs):
        if kwargs.get("use_cache", True):  # pack_sequences tries out the sampler's copy without a cache
            rows.append(tuple(kwargs["input_ids"].shape))
        return forward(self, **kwargs)

    monkeypatch.setattr(model.model.__class__, "forward", spy)
    rollout = Sampler(model, slots=6).sample(PROMPTS, noise_keys(7, 3, range(16)), [0], 10, 1.0)
    assert max(shape[0] for shape in rows) == 6
    decoded = sum(shape[0] for shape in rows if shape[1] == 1)
    needed = rollout.response_len.sum().item() - 16  # the first token comes from the prompt's forward
    assert decoded <= 1.25 * needed + 16  # prompts of one token are prefills of width one


def test_attention_reads_no_more_than_the_longest_live_row():
    """Once a long sequence has finished, the columns of the cache that only it filled are no longer read."""
    cache = KVCache(tiny_llama(5), slots=3, width=50)
    cache.prefill(0)
    x = torch.randn(3, 1, 9, 16)
    cache.update(x, x, 0)
    masks = cache.decode(torch.tensor([9, 4]), 10)
    keys, _ = cache.update(x[:2, :, :1], x[:2, :, :1], 0)
    assert masks.shape == (2, 1, 1, 10)
    assert (masks == 0).sum(-1).flatten().tolist() == [10, 5]  # a token sees itself and those before it
    assert keys.shape == (2, 1, 10, 16)
    assert keys[0, 0, 9].equal(x[0, 0, 0])
    assert keys[1, 0, 4].equal(x[1, 0, 0])
    assert keys[1, 0, :4].equal(x[1, 0, :4])
    assert keys.data_ptr() == cache.keys[0].data_ptr()  # a view: nothing is copied


@pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")
def test_answers_to_a_prompt_read_it_in_one_slot(model, monkeypatch):
    """Whatever comes, ends and moves: a row reads, in a live row, only what its own prompt begins with."""
    prompts = [[2 + (i + j) % 7 for j in range(20 + i)] for i in range(5) for _ in range(4)]
    sampler, read, right = Sampler(model, slots=9), [], cpu.decode_attention

    def decode_attention(n, *arguments):
        engine, table = sampler.engine, arguments[-1][:n].tolist()
        assert sorted(row for row, _, _ in table) == list(range(n))
        leaders = [leader for _, leader, _ in table]
        assert leaders == sorted(leaders)  # answers to a prompt follow each other
        mine = [engine.prompts[i] for i in engine.row[: engine.live].tolist()] + [()] * (n - engine.live)
        assert len({mine[row] for row, _, length in table if not length} - {()}) == len(set(mine) - {()})
        for row, leader, length in table:
            assert mine[row][:length] == mine[leader][:length] and length <= len(mine[row])
            assert length in (0, len(mine[row]))
            read.append(length)
        return right(n, *arguments)

    monkeypatch.setattr(cpu, "decode_attention", decode_attention)
    together = sampler.sample(prompts, noise_keys(7, 3, range(20)), [0], 10, 1.0)
    assert sum(x > 0 for x in read) > len(read) / 3
    monkeypatch.setattr(cpu, "decode_attention", right)
    share = KVCache.share
    monkeypatch.setattr(KVCache, "share", lambda cache, mine: share(cache, [(i,) for i in range(len(mine))]))
    alone = Sampler(model, slots=9).sample(prompts, noise_keys(7, 3, range(20)), [0], 10, 1.0)
    assert together.tokens.equal(alone.tokens)
    assert together.sampler_logprobs.equal(alone.sampler_logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_copy_has_the_weights_that_were_loaded_last(dtype, compiled, monkeypatch):
    """In a layout of their own, with biases, the joined ones in their order; and nothing is kept twice but a
    tied table."""
    if not compiled:
        monkeypatch.setattr(cpu, "library", lambda: None)
    monkeypatch.setattr(sampler_copy, "PANELS_FROM", 1000)  # some of its weights are smaller
    first, other = (build(FAMILIES["Qwen2"]()) for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p))
    pack_sequences(first.base_model)
    sampler = Sampler(first, dtype)
    sampler.copy.unload()
    sampler.load(other)
    x = torch.randn(3, other.config.hidden_size).to(dtype)
    ours, theirs = sampler.copy.model.model.layers[1], other.model.layers[1]
    attention, mlp = theirs.self_attn, theirs.mlp
    parts = {
        ours.self_attn.qkv: [attention.q_proj, attention.k_proj, attention.v_proj],
        ours.self_attn.o_proj: [attention.o_proj],
        ours.mlp.gate_up: [mlp.gate_proj, mlp.up_proj],
        sampler.copy.model.lm_head: [other.lm_head],
    }
    if compiled and dtype == torch.float32 and cpu.library() is not None:
        assert {joined.kernels is None for joined in parts} == {True, False}
    for joined, linears in parts.items():
        wanted = torch.cat([linear(x.float()) for linear in linears], -1)
        assert (joined(x) - wanted).abs().max() < (
            1e-5 if dtype == torch.float32 else 0.05
        ) * wanted.abs().max()
    if all(layer.kernels is None and not layer.is_blocked for layer in sampler.copy.joined):
        kept = sum(size for _, size in sampler.copy.storages) / dtype.itemsize
        assert kept == sum(p.numel() for p in (*other.parameters(), other.lm_head.weight))


def gap(policy, dtype, prompts=PROMPTS):
    """Sampled in this dtype -> (the sampler, by how much its log-probs are off the scorer's, in the mean)"""
    sampler = Sampler(policy, dtype)
    rollout = sampler.sample(prompts, noise_keys(7, 3, range(len(prompts))), [0], 10, 1.0)
    assert (sampler.copy.model.dtype, rollout.sampler_logprobs.dtype) == (dtype, torch.float32)
    scored, _ = score_all(rollout, PolicyScorer(policy))
    return sampler, ((scored - rollout.sampler_logprobs).abs().sum() / rollout.action_mask.sum()).item()


def test_log_probs_are_within_the_rounding_of_the_samplers_dtype_also_of_far_tokens():
    """Rotary frequencies are not cast: rounded to bf16, they would turn far tokens by radians."""
    policy = tiny_llama(VOCABULARY, layers=2, spread=2.0)
    exact, half, rough = (gap(policy, dtype)[1] for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert exact < half < 0.5 * rough
    assert half < 2e-3
    sampler, far = gap(policy, torch.bfloat16, [[2 + i * 7 % 9 for i in range(230)]] * 8)
    assert 0 < max(rough, far) < 0.02
    copy = sampler.copy.model.model
    assert copy.rotary_emb.inv_freq.equal(policy.model.rotary_emb.inv_freq)
    assert (copy.norm.weight.dtype, policy.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.slow
def test_bf16_where_onednn_refuses_it():
    code = "from tests.generation.test_engine import *\n"
    code += "policy = tiny_llama(VOCABULARY, layers=2, spread=2.0)\n"
    code += "print(gap(policy, torch.bfloat16, PROMPTS[:8])[1])"
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 0.02


# every kind of cache and mask
SAMPLED = ["Llama", "Mistral", "Qwen2, mixed windows", "Qwen3-MoE", "SmolLM3", "Phi-3", "Gemma 3", "GPT-2"]
SAMPLED += ["GPT-J", "GPT-NeoX", "OPT", "MiniMind 2 MoE", "MiniMind 3", "PhiMoE"]


@pytest.mark.parametrize("name", SAMPLED)
def test_every_family_samples_and_scores_what_transformers_computes(name):
    """Each greedy token is the likeliest in the padded forward of the whole sequence; log-probs, of packed
    sequences too, are those of that forward."""
    model, keys = build(FAMILIES[name]()), noise_keys(0, 0, range(8))
    prompts = [[2 + (7 * i + j) % (VOCAB - 2) for j in range(1 + i % 6)] for i in range(8)]
    for packed in (False, True):
        if packed:
            assert pack_sequences(model.base_model) == (name not in PADDED)
        sampler = Sampler(model, slots=5)
        for temperature in (0.0, 0.9):
            rollout = sampler.sample(prompts, keys, [0], 10, temperature)
            scored, _, _ = PolicyScorer(model)(rollout.tokens, rollout.layout, temperature or 1.0)
            places = rollout.prompt_len[:, None] - 1 + torch.arange(scored.shape[1])
            places = places.clamp(max=rollout.tokens.shape[1] - 2)
            exact = (model(rollout.tokens).logits[:, :-1] / (temperature or 1.0)).log_softmax(-1)
            exact = exact.gather(1, places[..., None].expand(-1, -1, VOCAB))
            tokens = rollout.tokens.gather(1, places + 1)
            for wanted in (rollout.sampler_logprobs, exact.gather(2, tokens[..., None]).squeeze(2)):
                assert ((wanted - scored) * rollout.action_mask).abs().max() < 1e-3
            assert temperature or (exact.argmax(-1) == tokens)[rollout.action_mask].all()
            ends = [response[-1] == 0 for response in rollout.responses()]
            assert rollout.finished.tolist() == ends
            assert all(len(x) == 10 or end for x, end in zip(rollout.responses(), ends, strict=True))
            assert not any(0 in response[:-1] for response in rollout.responses())
    check_sampling(model, model.device)


def test_the_check_of_sampling_reaches_a_sliding_window(monkeypatch):
    """However long it is; here the cache has none."""
    model = build(FAMILIES["Mistral"]())
    model.config.sliding_window = 64
    monkeypatch.setattr(kv_cache, "hidden_places", lambda behind, window: behind < 0)
    refused("gives other log-probs", check_sampling, model, model.device)
    assert model.config.sliding_window == 64


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-2"])
def test_weights_rounded_once_score_as_those_that_autocast_rounds_at_every_call(name):
    model = build(FAMILIES[name]())
    pack_sequences(model.base_model)
    rollout = Sampler(model).sample([[2, 3, 4], [5]], noise_keys(0, 0, range(2)), [0], 10, 1.0)
    scored = []
    for _ in range(2):
        with torch.no_grad():
            scored.append(PolicyScorer(model, torch.bfloat16)(rollout.tokens, rollout.layout, 1.0)[0])
        round_frozen([model], torch.bfloat16)
    assert scored[0].equal(scored[1])
    linear = [x.weight for x in model.base_model.modules() if type(x) is torch.nn.Linear]
    assert {x.dtype for x in linear} <= {torch.bfloat16}
    assert model.get_input_embeddings().weight.dtype == torch.float32


def test_a_later_turn_goes_on_where_the_response_stands(model):
    """A response that is sampled in two or three parts is the one that is sampled at once: noise, budget and
    --min_gen_len count from its beginning, in any slot."""
    rows = range(16)
    keys = noise_keys(7, 3, rows)
    at_once = Sampler(model).sample(PROMPTS, keys, [0], 10, 1.0, min_gen_len=6)
    responses = at_once.responses()
    assert len({*map(len, responses)}) > 2
    sampler = Sampler(model, slots=5)
    first = [row % 6 for row in rows]  # so many tokens stand there already
    begun = [[*PROMPTS[row], *responses[row][: first[row]]] for row in rows]
    rest = sampler.sample(begun, keys, [0], 10, 1.0, min_gen_len=6, first_places=first)
    assert rest.responses() == [ids[place:] for ids, place in zip(responses, first, strict=True)]
    assert rest.finished.equal(at_once.finished)
    assert rest.prompt_len.tolist() == [len(ids) for ids in begun]
    for row, place in enumerate(first):
        expected = at_once.sampler_logprobs[row, place : len(responses[row])]
        assert torch.allclose(rest.sampler_logprobs[row, : len(expected)], expected, atol=1e-5)
    again = sampler.sample(PROMPTS, keys, [0], 10, 1.0, min_gen_len=6)
    assert again.responses() == responses


def in_three_turns(sampler, prompts, load=None, observation=3):
    """-> responses of three turns, with what stands between them, all log-probs, and how many tokens were
    prefilled in later turns. load: newer weights before each of these."""
    keys = noise_keys(7, 3, range(len(prompts)))
    contexts, first = [[*prompt] for prompt in prompts], [0] * len(prompts)
    logprobs, prefilled = [], 0
    for turn in range(3):
        if turn and load:
            sampler.load(load)
        with prefills(sampler) as seen:
            batch = sampler.sample(contexts, keys, [0, 3], 100, 1.0, first_places=first)
        prefilled += turn and sum(seen)
        logprobs += [row[:n] for row, n in zip(batch.sampler_logprobs, batch.response_len, strict=True)]
        said = [[2 + (row + turn + i) % 5 for i in range(observation)] for row in range(len(prompts))]
        new = [ids + more for ids, more in zip(batch.responses(), said, strict=True)]
        contexts = [ids + more for ids, more in zip(contexts, new, strict=True)]
        first = [n + len(more) for n, more in zip(first, new, strict=True)]
    return contexts, torch.cat(logprobs), prefilled


@contextmanager
def prefills(sampler):
    """Notes the numbers of tokens of each prefill."""
    seen, plain = [], Engine._prefill

    def noted(engine, prompts, groups):
        seen.append(sum(map(len, prompts)))
        return plain(engine, prompts, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_prefill", noted)
        yield seen


def forgetful(model, **more):
    """A sampler that computes each turn anew."""
    sampler = Sampler(model, **more)
    sample = sampler.sample

    def again(*given, **named):
        sampler.release()
        return sample(*given, **named)

    sampler.sample = again
    return sampler


LONG = [[2 + (row + i) % 5 for i in range(20 + row % 4 * 9)] for row in (0, 0, 0, 1, 2, 3, 3, 5, 6, 7)]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3-MoE", "Gemma 3", "GPT-NeoX", "MiniMind 3 MoE"])
def test_a_later_turn_computes_its_new_tokens_only(name):
    """And samples what is sampled where every turn is computed anew. Some prompts are alike."""
    model = build(FAMILIES[name]())
    expected, logprobs, prefilled = in_three_turns(forgetful(model), LONG)
    assert prefilled > 500
    found, others, none = in_three_turns(Sampler(model), LONG)
    assert found == expected and none == 0
    assert torch.allclose(others, logprobs, atol=1e-4)
    few = Sampler(model, slots=4)  # what has lost its slot is computed anew
    found, others, some = in_three_turns(few, LONG)
    assert found == expected and 0 < some < prefilled
    assert torch.allclose(others, logprobs, atol=1e-4)


def test_a_later_turn_with_many_new_tokens_is_computed_anew(model):
    found, _, prefilled = in_three_turns(Sampler(model), LONG, observation=20)
    expected, _, whole = in_three_turns(forgetful(model), LONG, observation=20)
    assert found == expected and whole / 4 < prefilled <= whole


def test_newer_weights_compute_the_whole_turn(model):
    newer = tiny_llama(VOCABULARY, seed=1, layers=2, spread=3.0)
    expected, _, prefilled = in_three_turns(forgetful(model), LONG, load=newer)
    found, _, again = in_three_turns(Sampler(model), LONG, load=newer)
    assert (found, again) == (expected, prefilled)


def test_what_an_interrupted_call_has_left_is_not_gone_on_from(model, monkeypatch):
    """It has prefilled into slots that held earlier turns."""
    keys = noise_keys(7, 3, range(len(LONG)))
    sampler = Sampler(model, slots=6)
    batch = sampler.sample(LONG, keys, [0, 3], 60, 1.0, first_places=[0] * len(LONG))
    later = [[*ids, *more, 4, 5] for ids, more in zip(LONG, batch.responses(), strict=True)]
    places = [len(new) - len(ids) for ids, new in zip(LONG, later, strict=True)]
    expected = Sampler(model).sample(later, keys, [0, 3], 60, 1.0, first_places=places)
    plain = Engine._prefill

    def interrupted(engine, prompts, groups):
        plain(engine, prompts, groups)
        raise KeyboardInterrupt

    others = [[5, 4] * 15] * len(LONG)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "_prefill", interrupted)
        sampler.sample(others, keys, [0, 3], 60, 1.0, first_places=[0] * len(LONG))
    found = sampler.sample(later, keys, [0, 3], 60, 1.0, first_places=places)
    assert found.responses() == expected.responses()
    assert torch.allclose(found.sampler_logprobs, expected.sampler_logprobs, atol=1e-4)
