"""The runs of health.py: what is changed of the demo, and which finding should say so.

``BROKEN``: {name: (what is changed, flags, findings of which one should be the first or the second)}.
``HEALTHY``: {name: (what is changed, flags)}. Both take the files that ``make_files`` has made.
"""

import json
import shutil

from common import ROOT
from safetensors.torch import load_file, save_file

DEMO = ROOT / "model" / "demo"
TRAINED = {
    "max_steps": 24,
    "batch_size": 32,
    "mini_batch_size": 8,
    "eval_interval": 12,
    "save_interval": 1000,
    "device": "cpu",
}
# Broken runs with fewer steps, because what is wrong with them shows early.
SHORTER = {
    8: (
        "rate 1e-8",
        "no KL",
        "no EOS",
        "constant",
        "thousands",
        "30 PPO epochs",
        "clip 0.001",
        "grad_clip 1e-6",
        "no header",
        "other template",
        "other tokenizer",
        "temperature 0.1",
        "temperature 3",
        "weak judge",
        "blind judge",
        "most dropped",
        "gamma 0.5",
    ),
    16: (
        "rate x12",
        "rate x1/15",
        "KL alone",
        "answers cut",
        "pays for length",
        "pays for shortness",
        "one answer",
        "wrong answers",
        "repetition",
        "never ends",
        "scores at the limit",
        "critic starved",
        "critic x100",
        "critic held",
        "target_kl 1e-6",
        "sampler apart",
        "judge turned round",
        "small batch",
    ),
}
# Reward functions: (prompts, responses, answers) -> scores.
REWARDS = """import re, zlib

def right(prompts, responses, answers):
    return [float(found(r) == a) for r, a in zip(responses, answers)]

def near(prompts, responses, answers):
    def of(r, a):
        said = found(r)
        return 1 / (1 + abs(int(said) - int(a))) if re.fullmatch(r"-?[0-9]{1,4}", said) else 0.0
    return [of(r, a) for r, a in zip(responses, answers)]

def found(r):
    return (re.findall(r"<answer>\\\\s*(.*?)\\\\s*</answer>", r, re.S) or [""])[0]

def longer(prompts, responses, answers):
    return [len(r) / 50 for r in responses]

def shorter(prompts, responses, answers):
    return [-len(r) / 20 for r in responses]

def noise(prompts, responses, answers):
    return [zlib.crc32(r.encode()) % 1000 / 300 for r in responses]

def constant(prompts, responses, answers):
    return [1.0] * len(responses)

def thousands(prompts, responses, answers):
    return [1000 * x for x in near(prompts, responses, answers)]

def wrong(prompts, responses, answers):
    return [2 - 2 * x for x in right(prompts, responses, answers)]

def repeated(prompts, responses, answers):
    def of(r):
        three = [r[i : i + 3] for i in range(len(r) - 2)]
        return 10 * (1 - len(set(three)) / len(three)) if three else 0.0
    return [of(r) for r in responses]

def seven(prompts, responses, answers):
    return [3.0 * (found(r) == "7") - abs(len(r) - 60) / 60 for r in responses]

def never(prompts, responses, answers):
    return [r.count("+") + r.count("-") + len(r) / 40 for r in responses]
"""


def make_files(folder):
    """Write the reward functions, the data and the changed models into ``folder`` -> {name: path}, and under
    "flags" the flags that all runs have."""
    (folder / "rewards.py").write_text(REWARDS.replace("\\\\", "\\"), encoding="utf-8")
    held_out = (ROOT / "dataset" / "demo" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:128]
    (folder / "held_out.jsonl").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    prompts = (ROOT / "dataset" / "demo" / "ppo.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "few.jsonl").write_text("\n".join(prompts[:16]) + "\n", encoding="utf-8")
    long = [
        {**json.loads(line), "prompt": "Please be careful. " * 30 + json.loads(line)["prompt"]}
        for line in prompts
    ]
    some = [json.dumps(r) if n % 4 else prompts[n] for n, r in enumerate(long)]
    (folder / "long.jsonl").write_text("\n".join(some) + "\n", encoding="utf-8")
    files = {path.stem: str(path) for path in folder.glob("*.jsonl")}
    files["rewards"] = str(folder / "rewards.py")
    files["flags"] = {"eval_data_path": files["held_out"]}
    template = (DEMO / "policy" / "chat_template.jinja").read_text(encoding="utf-8")
    header = template[template.index("{%- if add_generation_prompt") :]

    def changed(name, kind="policy", template_=None, eos=None, weights=None):
        place = folder / name
        shutil.copytree(DEMO / kind, place)
        if template_ is not None:
            (place / "chat_template.jinja").write_text(template_, encoding="utf-8")
        if eos:
            path = place / "tokenizer_config.json"
            path.write_text(
                path.read_text(encoding="utf-8").replace('"<|im_end|>"', f'"{eos}"'), encoding="utf-8"
            )
            for other in ("config.json", "generation_config.json"):
                values = json.loads((place / other).read_text(encoding="utf-8"))
                (place / other).write_text(json.dumps({**values, "eos_token_id": 0}), encoding="utf-8")
        if weights:
            tensors = load_file(place / "model.safetensors")
            for key, x in tensors.items():
                factor = next((f for part, f in weights.items() if part in key), None)
                tensors[key] = (x.float() * factor).to(x.dtype) if factor else x
            save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        files[name] = str(place)

    def shuffled(name):
        changed(name)
        path = folder / name / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        special = {token["id"] for token in content["added_tokens"]}
        words = {word: i for word, i in content["model"]["vocab"].items() if i not in special}
        turned = dict(zip(words, reversed(words.values()), strict=True))
        content["model"]["vocab"] |= turned
        path.write_text(json.dumps(content), encoding="utf-8")

    shuffled("other_tokenizer")
    changed("no_eos", eos="<|endoftext|>")
    changed("no_header", template_=template.replace(header, ""))
    changed(
        "other_template",
        template_="{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant: {% endif %}",
    )
    changed("sharp", weights={"q_proj": 6.0, "k_proj": 6.0})
    changed("large_scores", "reward", weights={"score": 10.0})
    changed("blind", "reward", template_="{{ messages[0].content }}<|im_end|>")
    return files


def BROKEN(f):
    """The files of ``make_files`` -> the broken runs."""

    def fn(name, **more):
        return {"reward_fn": f"{f['rewards']}:{name}", **more}

    rates = ("unusual_flags", "steps_too_large", "kl_far", "ratio_drastic")
    judge = str(DEMO / "reward")
    return {
        "rate x30": ("--learning_rate 0.015", {"learning_rate": 0.015}, rates),
        "rate x100": ("--learning_rate 0.05", {"learning_rate": 0.05}, rates),
        "rate x12": (
            "--learning_rate 0.006 --ppo_epochs 4",
            {"learning_rate": 0.006, "ppo_epochs": 4},
            rates,
        ),
        "rate 1e-8": ("--learning_rate 1e-8", {"learning_rate": 1e-8}, ("unusual_flags", "policy_is_stuck")),
        "rate x1/15": ("--learning_rate 3e-5", {"learning_rate": 3e-5}, ("policy_is_stuck",)),
        "no KL": ("--kl_coef 0", {"kl_coef": 0}, ("nothing_holds_the_policy",)),
        "KL alone": ("--kl_coef 50", {"kl_coef": 50}, ("unusual_flags", "policy_is_stuck")),
        "no EOS": (
            "a policy whose EOS is another token",
            {"model": f["no_eos"], **demo(judge)},
            ("never_ends", "template_without_eos"),
        ),
        "answers cut": ("--max_gen_len 12", {"max_gen_len": 12}, ("never_ends", "few_end")),
        "pays for length": (
            "a reward function: length",
            fn("longer", reasoning=0),
            ("length_is_gamed", "score_follows_length"),
        ),
        "pays for shortness": (
            "a reward function: minus length",
            fn("shorter", reasoning=0),
            ("length_is_gamed", "score_follows_length", "empty_answers"),
        ),
        "noise": ("a reward function: a hash", fn("noise", reasoning=0), ("score_is_flat",)),
        "constant": ("a reward function: always 1", fn("constant", reasoning=0), ("scores_alike",)),
        "thousands": ("a reward function times 1000", fn("thousands"), ("kl_weighs_nothing",)),
        "wrong answers": ("a reward function that pays for wrong answers", fn("wrong"), ("held_out_falls",)),
        "repetition": (
            "a reward function: repeated words",
            fn("repeated", reasoning=0, missing_eos_penalty=0),
            ("repetition", "score_follows_length"),
        ),
        "one answer": (
            "a reward function: 7 is always right",
            fn("seven"),
            ("held_out_falls", "answers_alike"),
        ),
        "never ends": (
            "a reward function: signs and length",
            fn("never", reasoning=0, missing_eos_penalty=0),
            ("few_end", "length_is_gamed", "score_follows_length"),
        ),
        "scores at the limit": (
            "a reward model times 10",
            {"reward_model": f["large_scores"]},
            ("scores_at_limit",),
        ),
        "critic starved": (
            "--critic_learning_rate 1e-7",
            {"critic_learning_rate": 1e-7},
            ("unusual_flags", "critic_biased", "critic_learns_nothing"),
        ),
        "critic x100": (
            "--critic_learning_rate 0.05",
            {"critic_learning_rate": 0.05},
            ("unusual_flags", "critic_useless", "critic_learns_nothing", "critic_biased"),
        ),
        "critic held": (
            "--cliprange_value 0.001",
            {"cliprange_value": 0.001},
            ("unusual_flags", "critic_is_held"),
        ),
        "30 PPO epochs": (
            "--ppo_epochs 30",
            {"ppo_epochs": 30},
            ("unusual_flags", "steps_too_large"),
        ),
        "target_kl 1e-6": ("--target_kl 1e-6", {"target_kl": 1e-6}, ("early_stop_starves", "unusual_flags")),
        "clip 0.001": ("--clip_epsilon 0.001", {"clip_epsilon": 0.001}, ("unusual_flags",)),
        "grad_clip 1e-6": ("--grad_clip 1e-6", {"grad_clip": 1e-6}, ("unusual_flags", "gradient_is_cut")),
        "no header": (
            "a chat template without the assistant's header",
            {"model": f["no_header"], **demo(judge)},
            ("missing_header",),
        ),
        "other template": (
            "another chat template",
            {"model": f["other_template"], **demo(judge)},
            ("template_without_eos", "never_ends", "format_unknown"),
        ),
        "other tokenizer": (
            "a tokenizer with other ids",
            {"model": f["other_tokenizer"], **demo(judge)},
            ("policy_is_lost", "other_tokenizer", "format_unknown"),
        ),
        "few prompts": ("16 prompts", {"data_path": f["few"], "epochs": 96}, ("few_prompts",)),
        "temperature 0.1": ("--temperature 0.1", {"temperature": 0.1}, ("unusual_flags",)),
        "temperature 3": ("--temperature 3", {"temperature": 3}, ("unusual_flags", "never_ends")),
        "sampler apart": (
            "a policy that bf16 cannot hold",
            {"model": f["sharp"], **demo(judge), "dtype": "bfloat16"},
            ("sampler_apart",),
        ),
        "weak judge": (
            "the judge's weight 0.02",
            {"reward_model": f"{judge}=0.02"},
            ("form_outweighs_judge",),
        ),
        "judge turned round": (
            "the judge's weight -1",
            {"reward_model": f"{judge}=-1"},
            ("judge_against", "held_out_falls"),
        ),
        "blind judge": (
            "a judge whose template has no answer",
            {"reward_model": f["blind"]},
            ("judge_is_blind",),
        ),
        "most dropped": (
            "three quarters of the prompts too long",
            {"data_path": f["long"], "max_seq_len": 64},
            ("records_dropped",),
        ),
        "small batch": (
            "--batch_size 4",
            {"batch_size": 4, "mini_batch_size": 4},
            ("small_batch",),
        ),
        "gamma 0.5": ("--gamma 0.5", {"gamma": 0.5}, ("unusual_flags",)),
    }


def demo(judge):
    """The flags of the demo beside --model, which are not filled in where a model is named."""
    return {"reward_model": judge, "data_path": str(ROOT / "dataset" / "demo" / "ppo.jsonl"), "reasoning": 1}


def HEALTHY(f):
    """The files of ``make_files`` -> the healthy runs."""

    def fn(name, **more):
        return {"reward_fn": f"{f['rewards']}:{name}", **more}

    changes = {
        **{f"seed {n}": {"seed": n} for n in (42, 1, 2)},
        "fp32": {"dtype": "float32"},
        "lam 1": {"lam": 1},
        "KL in the reward": {"kl_in": "reward"},
        "LoRA": {"lora_r": 8},
        "normalised": {"normalize_reward": 1},
        "batch 64": {"batch_size": 64, "mini_batch_size": 16},
        "2 PPO epochs": {"ppo_epochs": 2},
        "critic from actor": {"critic_init": "actor"},
        "old actor every 2": {"update_old_actor_freq": 2},
        "replay": {"replay_batches": 2},
        "constant rate": {"lr_schedule": "constant", "learning_rate": 3e-4},
        "target_kl 0.02": {"target_kl": 0.02},
        "96 tokens": {"max_gen_len": 96},
        "temperature 0.8": {"temperature": 0.8},
        "right answers": fn("right"),
        "right answers, no format": fn("right", reasoning=0),
        "near answers": fn("near"),
        "no value clip": {"cliprange_value": 0},
    }
    words = {
        name: " ".join(f"--{n} {x}" for n, x in flags.items() if n != "reward_fn")
        for name, flags in changes.items()
    }
    return {
        name: ((f"a reward function {words[name]}" if "reward_fn" in flags else words[name]).strip(), flags)
        for name, flags in changes.items()
    }


REMEDIES = (
    "rate x30",
    "rate x12",
    "rate x1/15",
    "no KL",
    "KL alone",
    "answers cut",
    "scores at the limit",
    "critic starved",
    "critic held",
    "target_kl 1e-6",
    "clip 0.001",
    "temperature 0.1",
    "weak judge",
    "most dropped",
    "small batch",
)
