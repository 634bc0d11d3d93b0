"""The files of the runs of health.py: reward functions, prompts, and changed copies of the demo's models."""

import json
import shutil
import subprocess
import sys

import torch
from common import ROOT
from safetensors.torch import load_file, save_file

DEMO = ROOT / "model" / "demo"
# The demo with a calculator, and the calculator
CALCULATOR = ROOT / "dataset" / "demo" / "calculator.py"
CALCULATES = {
    "model": str(DEMO / "tools_policy"),
    "data_path": str(ROOT / "dataset" / "demo" / "tools_ppo.jsonl"),
    "eval_data_path": str(ROOT / "dataset" / "demo" / "tools_eval.jsonl"),
    "tools": f"{CALCULATOR}:calculate",
    "reward_fn": f"{CALCULATOR}:is_right",
    "learning_rate": 2e-4,
    "max_gen_len": 192,
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

def silent(prompts, responses, answers):
    return [None] * len(responses)


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

def seldom(prompts, responses, answers):
    return [float(found(r) == "17") for r in responses]

def blocks(prompts, responses, answers):
    return [float("<answer>" in r) for r in responses]

def tagged(prompts, responses, answers):
    form = r"<think>.*</think>.*<answer>.*</answer>\\s*"
    return [float(bool(re.fullmatch(form, r, re.S))) for r in responses]

def never(prompts, responses, answers):
    return [r.count("+") + r.count("-") + len(r) / 40 for r in responses]
"""

# A reward model with code of its own.
CODE = """import torch
from transformers import PretrainedConfig, PreTrainedModel

class LengthConfig(PretrainedConfig):
    model_type = "length"

class Length(PreTrainedModel):
    config_class = LengthConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_score(self, tokenizer, messages):
        return self.scale.item() * len(messages[-1]["content"]) / 50
"""


def reward_model_of_code(folder):
    """Write a reward model whose score is the number of characters / 50 -> its path."""
    shutil.copytree(DEMO / "reward", folder)
    (folder / "model.py").write_text(CODE, encoding="utf-8")
    auto_map = {"AutoConfig": "model.LengthConfig", "AutoModel": "model.Length"}
    config = {"model_type": "length", "architectures": ["Length"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"scale": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def policy_that_only_calls(folder):
    """Train the demo's policy that has a calculator to call it in each turn, whatever the result is -> its
    path."""
    signs = {"plus": "+", "minus": "-", "times": "*"}
    records = []
    prompts = (ROOT / "dataset" / "demo" / "tools_ppo.jsonl").read_text(encoding="utf-8").splitlines()
    for line in prompts[:768]:
        record = json.loads(line)
        left, sign, right = record["prompt"].rstrip("?.").split()[-3:]
        call = {"name": "calculate", "arguments": {"expression": f"{left} {signs[sign]} {right}"}}
        turn = {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"}
        result = {"role": "tool", "content": record["answer"]}
        asked = {"role": "user", "content": record["prompt"]}
        records.append({"conversations": [asked, turn, result, turn, result, turn]})
    (folder / "calls.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    flags = {
        "model": DEMO / "tools_policy",
        "data_path": folder / "calls.jsonl",
        "hf_dir": folder / "only_calls",
        "out_dir": folder / "stage_1",
        "max_seq_len": 256,
        "epochs": 1,
        "dtype": "float32",
        "device": "cpu",
    }
    words = [str(word) for name, x in flags.items() for word in (f"--{name}", x)]
    script = str(ROOT / "trainer" / "train_sft.py")
    subprocess.run([sys.executable, script, *words], check=True, stdout=subprocess.DEVNULL)
    return str(folder / "only_calls")


def make_files(folder):
    """Write the reward functions, the data and the changed models into ``folder`` -> {name: path}, and under
    "flags" the flags that all runs have."""
    (folder / "rewards.py").write_text(REWARDS.replace("\\\\", "\\"), encoding="utf-8")
    held_out = (ROOT / "dataset" / "demo" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:128]
    (folder / "held_out.jsonl").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    prompts = (ROOT / "dataset" / "demo" / "ppo.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "few.jsonl").write_text("\n".join(prompts[:16]) + "\n", encoding="utf-8")
    hard = [json.loads(line) for line in prompts[:256]]  # no response has their answers
    hard = [json.dumps(record | {"answer": str(10**6 + int(record["answer"]))}) for record in hard]
    (folder / "hard.jsonl").write_text("\n".join(hard) + "\n", encoding="utf-8")
    files = {path.stem: str(path) for path in folder.glob("*.jsonl")}
    files["rewards"] = str(folder / "rewards.py")
    files["flags"] = {"eval_data_path": files["held_out"]}
    template = (DEMO / "policy" / "chat_template.jinja").read_text(encoding="utf-8")
    header = template[template.index("{%- if add_generation_prompt") :]

    def changed(name, kind="policy", template_=None, eos=None, weights=None):
        place = folder / name
        shutil.copytree(DEMO / kind, place)
        if template_ == "":
            (place / "chat_template.jinja").unlink()
        elif template_ is not None:
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

    def widened(name, rows):
        changed(name)
        path, key = folder / name / "config.json", "model.embed_tokens.weight"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "vocab_size": rows}), encoding="utf-8")
        tensors = load_file(folder / name / "model.safetensors")
        old = tensors[key]
        tensors[key] = torch.cat([old, old.mean(0).expand(rows - len(old), -1)])
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})

    shuffled("other_tokenizer")
    widened("more_embeddings", 512)
    changed("no_eos", eos="<|endoftext|>")
    changed("no_header", template_=template.replace(header, ""))
    changed(
        "other_template",
        template_="{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant: {% endif %}",
    )
    changed("sharp", weights={"q_proj": 6.0, "k_proj": 6.0})
    changed("large_scores", "reward", weights={"score": 10.0})
    files["likes_length"] = reward_model_of_code(folder / "likes_length")
    changed("no_template", "reward", template_="")
    files["only_calls"] = policy_that_only_calls(folder)
    return files
