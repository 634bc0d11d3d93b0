"""One run of TRL's GRPO for real_model.py, in TRL's own environment: its defaults but for sizes and rate.

    python benchmarks/real_model_trl.py '{"folder": …, "out": …, "task": "sums", "seed": 0, "rate": 1e-5, …}'

The weights are fp32; products are computed in bf16 where the CPU has it, as here. The reward is the same
function.
"""

import importlib.util
import json
import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def reward_of(folder, task):
    """-> the function of the task's reward file, called as TRL does."""
    spec = importlib.util.spec_from_file_location("reward", f"{folder}/{task}_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def score(prompts, completions, metadata=None, answer=None, **rest):
        texts = [completion[-1]["content"] for completion in completions]
        more = [list(map(json.loads, metadata))] if metadata else []
        return module.score(prompts, texts, answer, *more)

    return score


def record_of(row):
    """A record -> one with a prompt of messages; its metadata stay text, which a table can hold."""
    prompt = [{"role": "user", "content": row.get("question") or row["prompt"]}]
    more = {"answer": row["answer"], "metadata": json.dumps(row["metadata"])} if "answer" in row else {}
    return {"prompt": prompt, **more}


def main(request):
    folder, task = request["folder"], request["task"]
    with open(f"{folder}/{task}_train.jsonl", encoding="utf-8") as file:
        records = [record_of(json.loads(line)) for line in file]
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    data = f"{request['out']}/data.jsonl"
    with open(data, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    per_batch = request["batch_size"] // request["mini_batch_size"]
    config = GRPOConfig(
        output_dir=request["out"],
        per_device_train_batch_size=request["mini_batch_size"],
        steps_per_generation=per_batch,
        max_steps=request["max_steps"] * per_batch,
        num_generations=request["answers"],
        max_completion_length=request["length"],
        learning_rate=request["rate"],
        seed=request["seed"],
        bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=per_batch,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
        reward_funcs=reward_of(folder, task),
        train_dataset=load_dataset("json", data_files=data, split="train"),
    )
    trainer.train()
    trainer.save_model(request["out"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
