"""Converts a .pth to a Hugging Face directory, or a directory to a .pth.

    python export.py out/ppo_actor_128.pth exported/                    safetensors, tokenizer, model card
    python export.py out/ppo_actor_128.pth exported/ --run out/run_1    with the run's figures in the card
    python export.py exported/ model.pth                                the .pth and the folder beside it

A dense MiniMind 2 becomes a LlamaForCausalLM, a MiniMind 3 a Qwen3ForCausalLM or Qwen3MoeForCausalLM, with
the same weights. Every program that reads those classes can load the directory without this repository. Other
models keep their class. Existing files are never overwritten.
"""

import os
import sys
from pathlib import Path

from errors import InputError, run_script
from trainer.flags import FlagParser


def parse_args(argv=None):
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add
    p.group("export")
    add("source", str, "a .pth, or a directory or hub name")
    add("target", str, "a new directory, or else a new .pth")
    add("--dtype", "float16", "type of the weights", choices=["float16", "bfloat16", "float32"])
    add("--tokenizer", "", "directory or hub name; default: beside the model")
    add("--run", "", "folder of the run that trained it, for the model card")
    add("--trust_remote_code", bool, "run code that a model brings along")
    args = p.parse_args(argv)
    to_pth = args.target.endswith(".pth")
    if args.source.endswith(".pth") == to_pth:
        raise InputError(
            f"{args.source} and {args.target}: one has to end in .pth, the other is a directory or hub name"
        )
    if to_pth and args.run:
        raise InputError(f"--run {args.run}: goes into the model card of a directory, a .pth has none")
    return args


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    run_script(parse_args)

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atomic_files import write_whole, writing
from dataset.chat_template import TEMPLATE_KWARGS
from model.loading import check_tokenizer, eos_ids, load_policy, load_tokenizer, quiet, tokenizer_source
from model.model_minimind import as_plain
from model.saving import save_directory, save_policy


def check_free(target: str):
    """InputError if something would be overwritten. An empty directory may be there."""
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise InputError(f"{target}: is there, and nothing is overwritten; name a new one or delete it")


def read_figures(run: str) -> str:
    """What the run's summary.md says, without its last line on files."""
    path = Path(run) / "summary.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    figures = text.partition("\n\nFiles: ")[0].strip()
    if not figures:
        raise InputError(
            f"--run {run}: has no figures in a summary.md, which a run with --eval_data_path writes when it "
            "ends; name such a run, or leave --run out"
        )
    return figures


def tokenizer_reader(folder: str, tokenizer) -> str:
    """The name of the class that reads the tokenizer of a folder unchanged. Why: ``_is_whole_in_json`` in
    model/loading.py."""
    if type(tokenizer) is not PreTrainedTokenizerFast:
        return "AutoTokenizer"
    again = type(AutoTokenizer.from_pretrained(folder))
    if again is PreTrainedTokenizerFast:
        return "AutoTokenizer"
    print(
        f"note: AutoTokenizer would read this tokenizer as a {again.__name__}, which may split texts in "
        "other ways; load it with PreTrainedTokenizerFast, as the model card does",
        file=sys.stderr,
    )
    return "PreTrainedTokenizerFast"


def write_directory(model, tokenizer, args, figures: str):
    """Write what ``from_pretrained`` needs, and a model card."""
    generation = model.generation_config
    generation.eos_token_id = eos_ids(tokenizer, model)
    generation.pad_token_id = tokenizer.pad_token_id
    target = args.target
    save_directory(model, tokenizer, target, getattr(torch, args.dtype))
    text = card(model, tokenizer, args, tokenizer_reader(target, tokenizer), figures)
    write_whole(Path(target) / "README.md", text)


def card(model, tokenizer, args, reader: str, figures: str) -> str:
    """The model card: facts about the model, how to use it, and the figures of its training. reader: the
    class that reads the tokenizer."""
    name = Path(args.target).absolute().name
    facts = {
        "architecture": f"`{type(model).__name__}`",
        "parameters": f"{model.num_parameters():,}",
        "weights": args.dtype,
        "positions": getattr(model.config, "max_position_embeddings", "any number"),
        "vocabulary": f"{len(tokenizer):,} tokens",
        "chat template": "yes" if tokenizer.chat_template else "no: it continues text",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    ask = 'tokenizer("Your text", return_tensors="pt")'
    if tokenizer.chat_template:
        switches = tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
        given = "".join(f", {name}={value!r}" for name, value in switches.items())
        ask = f"""tokenizer.apply_chat_template([{{"role": "user", "content": "Your question"}}],
    add_generation_prompt=True, return_dict=True, return_tensors="pt"{given})"""
    # To find stop strings (--stop) ``generate`` needs the tokenizer.
    more = ", tokenizer=tokenizer" if model.generation_config.stop_strings else ""
    trained = f"\n## Training\n\n{figures}\n" if figures else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

| | |
|---|---|
{rows}
{trained}
## Use

```python
from transformers import AutoModelForCausalLM, {reader}

tokenizer = {reader}.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = {ask}
answer = model.generate(**inputs, do_sample=False, max_new_tokens=128{more})
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

Written by the `export.py` of small-lm-ppo.
"""


def main(argv=None):
    args = parse_args(argv)
    to_pth = args.target.endswith(".pth")
    check_free(args.target)
    check_free(args.target.removesuffix(".pth"))
    figures = read_figures(args.run) if args.run else ""
    model = load_policy(args.source, args.trust_remote_code)
    if not to_pth:
        with quiet():
            model = as_plain(model)
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(args.source), args.trust_remote_code)
    check_tokenizer(tokenizer, model)
    with writing(args.target), quiet():
        if to_pth:
            save_policy(model, tokenizer, args.target, getattr(torch, args.dtype))
        else:
            write_directory(model, tokenizer, args, figures)
    print(f"{args.target}: {type(model).__name__}, {model.num_parameters():,} parameters in {args.dtype}")


if __name__ == "__main__":
    run_script(main)
