"""The five tasks of learning.py: policy, prompts, rewards and sizes, written to a folder as a user has them.

    a  three tokens of nine, random rewards: the best possible policy is known exactly
    b  the bundled demo
    c  answers of 208 tokens from a small real model, and a reward function
    d  the same model behind a reward model that was trained on noisy pairs
    e  as d, a policy of 22.8M parameters and 300 steps: which rate of the actor is right for a long run

c, d and e need that model's folder (``--dreams DIR``): a causal language model without a chat template.
"""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from common import ROOT
from learning_rewards import WORD, gold
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model.loading import load_policy, load_tokenizer
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts

REWARDS = ROOT / "benchmarks" / "learning_rewards.py"
DEMO = ROOT / "dataset" / "demo"
POINTS = 8  # evaluations of a run, besides the one at its start
FEW_POINTS = 2  # of the trainers at the defaults of their estimator
HELD_OUT = {"c": 128, "d": 512, "e": 96}  # answers of an evaluation on dreams
WORDS = "abcdefg"  # with EOS and the unknown word: nine tokens
# Trainers at the defaults of their estimator: {name in --who: flags of train_ppo.py, None for one of TRL}
AT_DEFAULTS = {
    "grpo": None,
    "our_group": {"advantage": "group", "num_generations": 4},
    "rloo": None,
    "our_rloo": {"advantage": "rloo", "num_generations": 4},
    "our_gae": {},
}


def at_defaults(*rates, critic):
    """The same learning rates of the actor for all of them; critic: the rate of PPO's."""
    return dict.fromkeys(AT_DEFAULTS, rates) | {"our_gae": [(rate, critic) for rate in rates]}


# "flags": what all trainers get; "rates": those of TRL's PPO, and pairs (actor, critic) of ours; "ours",
# "trl": what only these two get; "more": samples with --more; "ablate": with --variants and AT_DEFAULTS;
# "ablate_rates": with --variants
TASKS = {
    "a": {
        "title": "three tokens, exact gap",
        "figure": "closed",
        "flags": {
            "max_gen_len": 3, "kl_coef": 0.2, "missing_eos_penalty": 0, "reasoning": 0,
            "batch_size": 256, "mini_batch_size": 64, "ppo_epochs": 4,
        },
        "samples": 25_600,
        "rates": {"trl": [3e-4, 6e-4, 1.2e-3], "ours": [(1e-3, 3e-3)]} | at_defaults(1e-3, critic=3e-3),
        "ours": {
            "kl_in": "reward", "critic_warmup_steps": 1, "lam": 0.95, "replay_batches": 8, "ppo_epochs": 8,
        },
        "seeds": 5,
        "more": 102_400,
        "ablate": 6_400,
    },
    "b": {
        "title": "the demo",
        "figure": "accuracy",
        "flags": {
            "max_gen_len": 64, "kl_coef": 0.02, "missing_eos_penalty": 1, "reasoning": 1,
            "batch_size": 128, "mini_batch_size": 32, "ppo_epochs": 1,
        },
        "samples": 5_888,
        "rates": {
            "trl": [2.5e-4, 5e-4, 1e-3], "ours": [(2.5e-4, 5e-4), (5e-4, 5e-4), (1e-3, 5e-4)],
        } | at_defaults(2.5e-4, 5e-4, 1e-3, critic=5e-4),
        "seeds": 3,
        "more": 2_944,
        "ablate_rates": [5e-4, 5e-4],  # the program's own: best of three seeds, if not with the first
        "trl": {"num_ppo_epochs": 2},
    },
    "c": {
        "title": "long answers",
        "figure": "objective",
        "flags": {
            "max_gen_len": 208, "kl_coef": 0.05, "missing_eos_penalty": 0, "reasoning": 0,
            "batch_size": 64, "mini_batch_size": 16, "ppo_epochs": 2,
        },
        "samples": 1_024,
        "more": 512,
        "ablate": 512,
        "ours": {"kl_in": "reward", "critic_warmup_steps": 1, "lam": 1},
        "rates": {
            "trl": [4e-5, 7.5e-5, 1.5e-4, 3e-4],
            "ours": [(4e-5, 1e-3), (7.5e-5, 1e-3)],
        } | at_defaults(4e-5, 7.5e-5, 1.5e-4, critic=1e-3),
        "seeds": 3,
    },
    "d": {
        "title": "a reward model",
        "figure": "objective",
        "flags": {
            "max_gen_len": 64, "kl_coef": 0.1, "missing_eos_penalty": 0, "reasoning": 0,
            "batch_size": 128, "mini_batch_size": 32, "ppo_epochs": 2,
        },
        "samples": 3_072,
        "more": 1_536,
        "ablate": 1_536,
        "ours": {"kl_in": "reward", "critic_warmup_steps": 1, "lam": 0.95},
        "rates": {
            "trl": [7.5e-5, 1.5e-4, 3e-4],
            "ours": [(4e-5, 5e-4), (7.5e-5, 5e-4), (1.5e-4, 5e-4)],
        } | at_defaults(4e-5, 7.5e-5, 1.5e-4, critic=5e-4),
        "seeds": 3,
    },
    "e": {
        "title": "22.8M parameters, 300 steps",
        "figure": "objective",
        "flags": {  # the defaults of the program but for the sizes
            "max_gen_len": 24, "kl_coef": 0.02, "missing_eos_penalty": 0, "reasoning": 0,
            "batch_size": 16, "mini_batch_size": 8, "ppo_epochs": 1,
        },
        "samples": 4_800,
        "ours": {"dtype": "bfloat16"},
        "rates": {"trl": [], "ours": [(5.9e-5, 5e-4), (3e-5, 5e-4), (1.5e-5, 5e-4)]},
        "seeds": 1,
    },
}  # fmt: skip


def prepare(name, folder, start=0, dreams=None):
    """Write the inputs of a task, unless they are there -> the flags that name them.

    start: the number of the start, task (a) only; dreams: the folder of the model of (c), (d) and (e).
    """
    folder = Path(folder) / (f"a{start}" if name == "a" else name)
    done = folder / "files.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files = {"a": closed_form, "b": demo, "c": long_answers, "d": behind_a_judge, "e": long_run}[name]
        done.write_text(json.dumps(files(folder, start if name == "a" else dreams)))
    return json.loads(done.read_text())


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def script(name, *flags):
    """Run one of the trainer's scripts; its output is shown only if it fails."""
    command = [sys.executable, str(ROOT / "trainer" / name), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr}")


# ------------------------------------------------------------------------------------ (a) a known maximum


def closed_form(folder, start):
    """A random policy of nine tokens and a reward for each of its 657 possible answers."""
    vocabulary = {word: i for i, word in enumerate(["</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    torch.manual_seed(1000 + start)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=48, num_hidden_layers=2, intermediate_size=96,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() == 2 else 1.0)  # far from a uniform policy
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    (folder / "combine.py").write_text(
        "import random\n\n\ndef score(prompts, responses, answers):\n"
        f"    return [random.Random(f'{start} {{text}}').uniform(-1, 1) for text in responses]\n"
    )
    # Two different words: after equal tokens alone, attention cannot tell positions apart.
    prompts = write_jsonl(folder / "prompts.jsonl", [{"prompt": "a b"}] * 256)
    return {
        "model": str(folder / "policy"),
        "data_path": prompts,
        "reward_fn": f"{folder / 'combine.py'}:score",
    }


def exact_objective(flags, reward, tokenizer, prompt, reference):
    """-> a function: policy -> {"closed", "score", "kl"}, all exact. closed: the share of the way from the
    reference's E[reward] - beta KL to the largest possible one, beta log E_ref[exp(reward / beta)]."""
    longest, beta, eos = flags.max_gen_len, flags.kl_coef, tokenizer.eos_token_id
    answers, open_ = [], [()]
    for _ in range(longest):
        grown = [(*ids, token) for ids in open_ for token in range(reference.config.vocab_size)]
        answers += [ids for ids in grown if ids[-1] == eos]
        open_ = [ids for ids in grown if ids[-1] != eos]
    answers += open_
    texts = tokenizer.batch_decode(
        [[t for t in ids if t != eos] for ids in answers], skip_special_tokens=True
    )
    [(function, _)] = reward.functions.values()
    rewards = torch.tensor(function([None] * len(texts), texts, [None] * len(texts)), dtype=torch.double)
    rows = torch.tensor([[*prompt.prompt_ids, *ids, *[eos] * (longest - len(ids))] for ids in answers])
    mask = torch.tensor([[t < len(ids) for t in range(longest)] for ids in answers])
    first = len(prompt.prompt_ids)

    @torch.no_grad()
    def log_p(policy):
        logits = policy(rows).logits[:, first - 1 : -1].double().log_softmax(-1)
        return (logits.gather(-1, rows[:, first:, None])[..., 0] * mask).sum(1)

    ref = log_p(reference)
    maximum = beta * torch.logsumexp(ref + rewards / beta, 0)
    before = (ref.exp() * rewards).sum()

    def measure(policy):
        p = log_p(policy)
        score, kl = ((p.exp() * x).sum() for x in (rewards, p - ref))
        closed = (score - beta * kl - before) / (maximum - before)
        return {"closed": closed.item(), "score": score.item(), "kl": kl.item()}

    return measure


def demo(folder, _):
    """(b): the bundled files, and their 500 held-out problems."""
    return {
        "model": str(ROOT / "model/demo/policy"),
        "reward_model": str(ROOT / "model/demo/reward"),
        "data_path": str(DEMO / "ppo.jsonl"),
        "eval_data_path": str(DEMO / "eval.jsonl"),
    }


# --------------------------------------------------------------------------------- (c), (d), (e) dreams


def starts():
    """The beginnings of dreams: 48 to train on, 16 held out."""
    things = ("Echoes", "Flickers", "Fragments", "Frames", "Pulses", "Whispers", "Threads", "Shadows")
    ends = ("of", "in", "like", "drift", "dance", "through", "unfold", "and")
    found = [f'"{thing} {end}' for thing in things for end in ends]
    random.Random(0).shuffle(found)
    return found[:48], found[48:]


def write_prompts(folder, task):
    """Training prompts in 32 rounds, held-out ones as many times as an evaluation needs."""
    train, held_out = starts()
    rounds = HELD_OUT[task] // len(held_out)
    return {
        "data_path": write_jsonl(folder / "prompts.jsonl", [{"prompt": x} for x in train * 32]),
        "eval_data_path": write_jsonl(folder / "held_out.jsonl", [{"prompt": x} for x in held_out * rounds]),
    }


def sampled_texts(path, prompts, seed, length, temperature):
    """Answers of the model at ``path`` to these prompts -> texts."""
    model, tokenizer = load_policy(str(path)).eval(), load_tokenizer(str(path))
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    keys = noise_keys(seed, 0, range(len(ids)))
    rollout = Sampler(model).load(model).sample(ids, keys, [tokenizer.eos_token_id], length, temperature)
    return response_texts(rollout, tokenizer)


def write_known_words(folder, texts):
    """What ``spelling`` judges by: the words that these texts have often."""
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    (folder / "known_words.json").write_text(json.dumps([w for w, count in counts.items() if count >= 10]))


def long_answers(folder, dreams):
    """(c): the model knows 128 positions. Stage 1 teaches a copy with 512 to write two or three of its own
    dreams in one text, about 230 tokens. Then the copy's embedding of EOS becomes zero, which makes EOS very
    unlikely: every answer has all tokens. Also writes the words that dreams often have (``spelling``)."""
    train, _ = starts()
    texts = sampled_texts(dreams, (train * 120)[:5600], 7, 110, 0.8)
    tokenizer, rng = load_tokenizer(str(dreams)), random.Random(7)
    prompts = (train * 120)[:5600]
    dreams_of = [f"{prompt}{text}" for prompt, text in zip(prompts, texts, strict=True)]
    rng.shuffle(dreams_of)
    long_texts, ids = [], []
    for text in dreams_of:
        ids = [*ids, *tokenizer(f" {text}" if ids else text, add_special_tokens=not ids).input_ids]
        if len(ids) >= 230:
            long_texts.append({"text": tokenizer.decode(ids[1 : rng.randint(215, 250)])})
            ids = []
    policy, wider = load_policy(str(dreams)), folder / "wider"
    policy.config.max_position_embeddings = 512
    policy.save_pretrained(wider)
    tokenizer.save_pretrained(wider)
    script(
        "train_sft.py", "--model", wider, "--data_path", write_jsonl(folder / "long.jsonl", long_texts),
        "--max_seq_len", 300, "--epochs", 4, "--batch_size", 16, "--learning_rate", 1e-3, "--eval_size", 64,
        "--out_dir", folder, "--run_name", "sft", "--hf_dir", folder / "policy", "--dtype", "float32",
    )  # fmt: skip
    policy = load_policy(str(folder / "policy"))
    with torch.no_grad():
        policy.get_input_embeddings().weight[tokenizer.eos_token_id] = 0.0
    policy.save_pretrained(folder / "policy")
    write_known_words(folder, texts)
    reward = {"model": str(folder / "policy"), "reward_fn": f"{REWARDS}:nature"}
    return reward | write_prompts(folder, "c")


def behind_a_judge(folder, dreams, task="d", length=64):
    """(d): pairs of answers, labelled by a noisy preference for the higher ``gold``, and a reward model that
    stage 2 trains on them."""
    train, _ = starts()
    prompts, rng = train * 168, random.Random(3)
    left, right = (sampled_texts(dreams, prompts, seed, length, 1.0) for seed in (11, 12))
    pairs = []
    for prompt, *texts in zip(prompts, left, right, strict=True):
        a, b = gold([prompt] * 2, texts, [None] * 2)
        prefers_first = rng.random() < 1 / (1 + math.exp(-3 * (a - b)))  # Bradley and Terry
        chosen, rejected = texts if prefers_first else texts[::-1]
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    rng.shuffle(pairs)
    script(
        "train_reward.py", "--model", dreams, "--data_path", write_jsonl(folder / "pairs.jsonl", pairs[512:]),
        "--eval_data_path", write_jsonl(folder / "test.jsonl", pairs[:512]), "--max_seq_len", 120,
        "--epochs", 1, "--batch_size", 32, "--learning_rate", 1e-3, "--dtype", "float32",
        "--out_dir", folder, "--run_name", "judge",
    )  # fmt: skip
    reward = {"model": str(dreams), "reward_model": str(next(folder.glob("reward_*/")))}
    return reward | write_prompts(folder, task)


def long_run(folder, dreams):
    """(e): (d) with pairs of 32 tokens. The policy has MiniMind's 512x8: stage 1 teaches it, from random
    weights, the texts of the pairs. The critic starts from the reward model and is as small."""
    files = behind_a_judge(folder, dreams, "e", 32)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [f"{pair['prompt']}{pair[side]}" for pair in pairs[:2500] for side in ("chosen", "rejected")]
    write_known_words(folder, texts)
    script(
        "train_sft.py", "--hidden_size", 512, "--num_hidden_layers", 8, "--tokenizer", dreams,
        "--data_path", write_jsonl(folder / "texts.jsonl", [{"text": text} for text in texts]),
        "--epochs", 1, "--batch_size", 16, "--learning_rate", 7e-4, "--dtype", "bfloat16",
        "--out_dir", folder, "--run_name", "sft", "--hf_dir", folder / "policy",
    )  # fmt: skip
    return files | {"model": str(folder / "policy")}
