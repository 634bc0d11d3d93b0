"""The tables of docs/recipes.md and docs/algorithms.md: the memory that each command needs, and its rates.

    python benchmarks/recipes.py

Nothing is run: the models have their sizes and no weights (torch's meta device), and the memory is that of
trainer/memory_plan.py, in the phase that takes the most. The commands and their flags are read from the page.
The reward model, if a command has one, is a classifier with the policy's sizes, saved in fp16 as
train_reward.py does, and the critic starts from it. The evaluation, if there is one, has 256 prompts or more.
GB are 10^9 bytes.
"""

import re
import shlex

import torch
from common import ROOT, read, table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen2Config

from model.model_minimind import MiniMindConfig, plain_config
from trainer.inputs import EVAL_BATCH, complete_sizes, rate_by_size
from trainer.memory_plan import GB, USABLE, ModelSizes, PlannedRun, fitted_plan
from trainer.train_ppo import flag_parser

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
QWEN = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
MAIN_MEMORY = 16  # GB of the laptop
CARD = 25.7  # GB of a card that is sold as 24 GB, which are 24 times 2^30 bytes
ALGORITHMS = ROOT / "docs" / "algorithms.md"
MINIMIND_104M = MiniMindConfig(hidden_size=768, num_hidden_layers=16)
# A section of the page: (the policy's config, GB of the GPU or None for a CPU, what --dtype auto is there).
RECIPES = {
    "MiniMind 26M": (plain_config(MiniMindConfig()), 6, torch.bfloat16),
    "MiniMind 104M": (
        plain_config(MINIMIND_104M),
        12,
        torch.bfloat16,
    ),
    "SmolLM2-135M": (
        LlamaConfig(**SMOLLM2, intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True),
        16,
        torch.bfloat16,
    ),
    "Qwen2.5-0.5B, all weights": (
        Qwen2Config(**QWEN, intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True),
        CARD,
        torch.bfloat16,
    ),
}
RECIPES["Qwen2.5-0.5B, LoRA"] = RECIPES["Qwen2.5-0.5B, all weights"]
RECIPES["Qwen2.5-0.5B on a T4"] = (RECIPES["Qwen2.5-0.5B, LoRA"][0], 16, torch.float16)
RECIPES["MiniMind 26M on a laptop"] = (RECIPES["MiniMind 26M"][0], None, torch.float32)

QWEN_1_5B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
CARD_24 = {  # of docs/algorithms.md: (what its command has, the policy's config)
    "MiniMind 26M": ("--hidden_size 512 ", RECIPES["MiniMind 26M"][0]),
    "MiniMind 104M": ("--hidden_size 768 ", RECIPES["MiniMind 104M"][0]),
    "Qwen2.5-0.5B": ("Qwen2.5-0.5B", RECIPES["Qwen2.5-0.5B, LoRA"][0]),
    "Qwen2.5-1.5B": (
        "Qwen2.5-1.5B",
        Qwen2Config(**QWEN_1_5B, intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True),
    ),
}


def flags_of(section):
    """The flags of the train_ppo.py command in this section of the page, sizes completed."""
    text = read(ROOT / "docs/recipes.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    command = re.search(r"^python trainer/train_ppo\.py (.*)$", text, re.MULTILINE)[1]
    args = flag_parser().parse_args(shlex.split(command))
    complete_sizes(args)
    return args


def row_of(section):
    """-> {column: text} of one recipe."""
    config, card, dtype = RECIPES[section]
    args, device = flags_of(section), torch.device("cuda" if card else "cpu")
    plan, models = planned(args, config, card, dtype, device)
    parts, total, actor = dict(plan.phases[plan.fullest]), plan.peak, models["actor"]
    kinds, lora = ("actor", "critic"), args.lora_r > 0
    rates = [rate_by_size(kind, models[kind].all, lora) for kind in kinds]
    others = {name: parts.pop(name, 0) for name in ("moments", "gradients", "KV cache")}
    models = sum(size for name, size in parts.items() if name not in ("micro-batch", "logits"))
    columns = {"all": total, "models": models, **others, "micro-batch": total - models - sum(others.values())}
    return {
        "recipe": section,
        "parameters": f"{actor.all / 1e6:.0f}M",
        **{name: f"{size / GB:.1f}" for name, size in columns.items()},
        "of the card": f"{total / GB / card:.0%} of {card}" if card else "",
        "rates, actor and critic": " ".join(f"{rate:g}" for rate in rates),
    }


def planned(args, config, card, dtype, device):
    """-> (the ``Plan`` of a command with the largest micro-batches that fit, {"actor": ``ModelSizes``,
    "critic": …}). card: GB, or None for a CPU."""
    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config)
        config.num_labels = 1
        reward = AutoModelForSequenceClassification.from_config(config)
    reward.to(torch.float32 if device.type == "cpu" and dtype == torch.float32 else torch.float16)
    start = (reward if args.reward_model else actor).base_model
    actor, reward, start = (ModelSizes(model, dtype) for model in (actor, reward, start))
    actor.exact = dtype == torch.bfloat16  # saved in it, where adapters are trained
    responses = max(args.batch_size, EVAL_BATCH if args.eval_data_path else 0)
    models = {"actor": actor} | ({"critic": start} if args.advantage == "gae" else {})
    rewards, width = [reward] if args.reward_model else [], args.max_seq_len + args.max_gen_len
    available = USABLE * (card or MAIN_MEMORY) * GB
    run = PlannedRun(args, device, dtype, models, rewards, responses, width)
    return fitted_plan(run, available), models


def commands_table():
    """The table of the commands of docs/algorithms.md: their memory with a critic and without."""
    text, rows = read(ALGORITHMS).split("\n## Commands for one card of 24 GB\n")[1].split("\n## ")[0], []
    for number, command in enumerate(re.findall(r"^python trainer/train_ppo\.py (.*)$", text, re.M), 1):
        args = flag_parser().parse_args(shlex.split(command))
        complete_sizes(args)
        name = next(name for name, (sign, _) in CARD_24.items() if sign in command)
        row = {"command": number, "policy": name + (", LoRA" if args.lora_r else "")}
        for advantage, column in (("gae", "GB with a critic"), ("rloo", "GB without")):
            given = (
                args.completed(advantage=advantage),
                CARD_24[name][1],
                CARD,
                torch.bfloat16,
                torch.device("cuda"),
            )
            size = f"{planned(*given)[0].peak / GB:.1f}"
            row[column] = f"**{size}**" if advantage == args.advantage else size
        rows.append(row)
    return table(rows)


if __name__ == "__main__":
    print(table([row_of(section) for section in RECIPES]))
    print(commands_table())
