"""PPO on tasks whose optimum is known exactly: the trainer, run by its command line, must reach it.

With a reward r and KL coefficient beta, the policy that maximises E[r] - beta KL(pi || ref) is
ref * exp(r / beta), normalised, and the maximum is beta * log E_ref[exp(r / beta)].
"""

import random

import pytest
import torch
from tiny import load_weights, save_policy_dir, tiny_llama, train, word_tokenizer, write_jsonl

REWARD = """import random

def score(prompts, responses, answers):
    return [random.Random(response).uniform(-1, 1) for response in responses]
"""
# Two different words: attention cannot tell the positions of equal ones apart, so no policy could be optimal.
PROMPT = "a b"


def rewards_of(texts):
    return torch.tensor([random.Random(text).uniform(-1, 1) for text in texts], dtype=torch.float64)


def trained(folder, tokenizer, sizes, steps, **values):
    """Train on one prompt with REWARD through the command line -> (reference, trained policy)."""
    policy = save_policy_dir(folder / "policy", tokenizer, **sizes)
    (folder / "combine.py").write_text(REWARD)
    data = write_jsonl(folder / "prompts.jsonl", [{"prompt": PROMPT}] * 8)
    common = {"reasoning": 0, "missing_eos_penalty": 0, "epochs": 10**6}
    common |= {"out_dir": folder / "out", "run_name": "run", "reward_fn": f"{folder / 'combine.py'}:score"}
    train(model=policy, data_path=data, max_steps=steps, **common, **values)
    ref, actor = tiny_llama(len(tokenizer), **sizes), tiny_llama(len(tokenizer), **sizes)
    report = actor.load_state_dict(load_weights(folder / "out" / "run", steps), strict=False)
    assert set(report.missing_keys) <= {"lm_head.weight", "model.embed_tokens.weight"}  # tied: saved once
    return ref, actor


@torch.no_grad()
def sequence_logprobs(model, prompt, sequences, longest):
    """Exact log-probability of each response: tuples of ids, ended by 0 (EOS) or cut at ``longest``."""
    rows = [[*prompt, *s, *[0] * (longest - len(s))] for s in sequences]
    log_p = model(torch.tensor(rows)).logits.double().log_softmax(-1)
    total = torch.zeros(len(rows), dtype=torch.float64)
    for t in range(longest):
        token = torch.tensor([s[t] if t < len(s) else 0 for s in sequences])
        step = log_p[torch.arange(len(rows)), len(prompt) + t - 1, token]
        total += torch.where(torch.tensor([t < len(s) for s in sequences]), step, 0.0)
    return total


def all_responses(vocabulary, longest):
    done, open_ = [], [()]
    for _ in range(longest):
        grown = [(*s, token) for s in open_ for token in range(vocabulary)]
        done += [s for s in grown if s[-1] == 0]
        open_ = [s for s in grown if s[-1] != 0]
    return done + open_


def texts_of(tokenizer, sequences):
    ids = [s[:-1] if s[-1] == 0 else s for s in sequences]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


GAE = {"critic_warmup_steps": 1, "critic_learning_rate": 3e-3}
ESTIMATORS = {
    "gae": GAE,
    "gae, four answers": {**GAE, "num_generations": 4},
    "rloo": {"advantage": "rloo", "num_generations": 4},
    "reinforce": {"advantage": "reinforce"},
    "cispo": {**GAE, "policy_loss": "cispo"},
    "gspo": {**GAE, "policy_loss": "gspo", "clip_epsilon": 0.1, "clip_epsilon_high": 0.1},
}


MORE = [("cispo", "loss"), ("gspo", "loss"), ("reinforce", "loss"), ("rloo", "reward"), ("rloo", "loss")]
MORE += [("gae", "reward"), ("gae, four answers", "loss")]


@pytest.mark.parametrize(
    ("estimator", "kl_in"), [("gae", "loss"), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_one_token_task_reaches_the_known_optimum(estimator, kl_in, tmp_path):
    tokenizer, beta = word_tokenizer("abcdefghi"), 0.5
    sizes = {"spread": 4.0}
    ref, actor = trained(  # in fp32 on every CPU: bf16 rounds the optimum itself
        tmp_path, tokenizer, sizes, steps=15, kl_in=kl_in, kl_coef=beta, max_gen_len=1, batch_size=128,
        mini_batch_size=32, ppo_epochs=4, learning_rate=1e-3, dtype="float32", **ESTIMATORS[estimator],
    )  # fmt: skip
    answers = all_responses(len(tokenizer), 1)
    ref, p = (sequence_logprobs(m, tokenizer(PROMPT).input_ids, answers, 1) for m in (ref, actor))
    optimum = (ref + rewards_of(texts_of(tokenizer, answers)) / beta).log_softmax(-1)
    before, after = ((x.exp() * (x - optimum)).sum().item() for x in (ref, p))
    print(f"KL to the optimum, {estimator}, --kl_in {kl_in}: {before:.3f} before, {after:.5f} after")
    assert before > 0.3
    assert after < 0.01


def three_tokens(folder, **flags):
    """Train on 585 responses of up to three tokens, with KL in the reward, which is exact for sequences ->
    the share of the gap to the known maximum that was closed."""
    tokenizer, beta, longest = word_tokenizer("abcdefg"), 0.2, 3
    sizes = {"hidden": 48, "layers": 2, "spread": 4.0}
    more = {"kl_in": "reward", "kl_coef": beta, "max_gen_len": longest, "dtype": "float32"}
    ref, actor = trained(folder, tokenizer, sizes, **more, **flags)
    answers = all_responses(len(tokenizer), longest)
    ref, p = (sequence_logprobs(m, tokenizer(PROMPT).input_ids, answers, longest) for m in (ref, actor))
    reward = rewards_of(texts_of(tokenizer, answers))
    assert ref.exp().sum().item() == pytest.approx(1.0, abs=1e-5)  # nothing was left out
    maximum = beta * torch.logsumexp(ref + reward / beta, 0)
    before, after = ((x.exp() * (reward - beta * (x - ref))).sum() for x in (ref, p))
    closed = ((after - before) / (maximum - before)).item()
    print(f"objective {before:.3f} -> {after:.3f}, maximum {maximum:.3f}: {closed:.3f} of the gap closed")
    return closed


SEQUENCES = {  # estimator: samples of a step and of a minibatch, flags
    "gae": (1024, 256, {"learning_rate": 6e-4, "critic_learning_rate": 2e-3, "critic_warmup_steps": 1}),
    "rloo": (512, 128, {**ESTIMATORS["rloo"], "learning_rate": 8e-4}),
    "reinforce": (512, 128, {**ESTIMATORS["reinforce"], "learning_rate": 8e-4}),
    "gspo": (512, 128, {**ESTIMATORS["gspo"], "learning_rate": 8e-4}),
    # An eighth of the samples close nearly as much
    "replay": (256, 64, {**GAE, "steps": 30, "ppo_epochs": 8, "replay_batches": 8, "learning_rate": 1e-3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("estimator", SEQUENCES)
def test_three_token_sequences_close_the_gap_to_the_known_maximum(estimator, tmp_path):
    batch, mini, values = SEQUENCES[estimator]
    values = {"steps": 60, "ppo_epochs": 4, "batch_size": batch, "mini_batch_size": mini, **values}
    assert three_tokens(tmp_path, **values) > (0.95 if estimator == "gae" else 0.94)
