"""Converts a .pth to a Hugging Face directory, or a directory to a .pth.

    python export.py out/ppo_actor_128.pth exported/                    safetensors, tokenizer, model card
    python export.py out/ppo_actor_128.pth exported/ --run out/run_1    with the run's figures in the card
    python export.py exported/ model.pth                                the .pth and the folder beside it

A dense MiniMind 2 becomes a LlamaForCausalLM, a MiniMind 3 a Qwen3ForCausalLM or Qwen3MoeForCausalLM, with
the same weights. Every program that reads those classes can load the directory without this repository. Other
models keep their class. Existing files are never overwritten.
"""

import json
import os
import shutil
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

from atomic_files import writing
from dataset.chat_template import TEMPLATE_KWARGS
from model import saving
from model.loading import check_tokenizer, eos_ids, load_policy, load_tokenizer, quiet, tokenizer_source
from model.model_minimind import as_plain
from model.saving import rounded_copy, save_policy


def check_free(target):
    """InputError if something would be overwritten. An empty directory may be there."""
    if os.path.isdir(target):
        if os.listdir(target):
            raise InputError(
                f"{target}: is not empty, and nothing is overwritten; name a new one or delete it"
            )
    elif os.path.lexists(target):
        raise InputError(f"{target}: is there, and nothing is overwritten; name a new one or delete it")


def read_figures(run):
    """What the run's summary.md says, without its last line on files; '' without a run."""
    if not run:
        return ""
    path = Path(run) / "summary.md"
    if not path.is_file():
        raise InputError(
            f"--run {run}: has no summary.md, which a run writes when it ends; name a finished run"
        )
    figures = path.read_text(encoding="utf-8", errors="replace").partition("\n\nFiles: ")[0].strip()
    if not figures:
        raise InputError(f"--run {run}: its summary.md is empty, it had no --eval_data_path; leave --run out")
    return figures


def write_directory(model, tokenizer, target, dtype, figures=""):
    """Write what ``from_pretrained`` needs and a model card. The directory appears whole or not at all."""
    ends = eos_ids(tokenizer, model)
    model = rounded_copy(model, dtype, target)
    generation = model.generation_config
    generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    generation.pad_token_id = tokenizer.pad_token_id
    target = Path(os.path.abspath(target))
    folder = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with writing(target), quiet():
            folder.mkdir(parents=True)
            saving.write_directory(model, tokenizer, folder)
            reader = tokenizer_reader(folder, tokenizer)
            text = card(model, tokenizer, target.name, reader, figures, generation.stop_strings)
            (folder / "README.md").write_text(text, encoding="utf-8")
            os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tokenizer_reader(folder, tokenizer):
    """The name of the class that reads the tokenizer of a folder unchanged. Why: ``_is_whole_in_json`` in
    model/loading.py."""
    if type(tokenizer) is not PreTrainedTokenizerFast:
        return "AutoTokenizer"
    again = AutoTokenizer.from_pretrained(folder)
    read, own = (json.loads(t.backend_tokenizer.to_str()) for t in (again, tokenizer))
    if all(read[key] == own[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")):
        return "AutoTokenizer"
    print(
        f"note: AutoTokenizer would read this tokenizer as a {type(again).__name__}, which is wrong; load it "
        "with PreTrainedTokenizerFast, as the model card does",
        file=sys.stderr,
    )
    return "PreTrainedTokenizerFast"


def card(model, tokenizer, name, reader, figures, stops=None):
    """The model card: facts about the model, how to use it, and the figures of its training. stops: the stop
    strings of its training (``--stop``): to find them ``generate`` needs the tokenizer."""
    config = model.config
    facts = {
        "architecture": f"`{type(model).__name__}`",
        "parameters": f"{model.num_parameters():,}",
        "weights": str(model.dtype).removeprefix("torch."),
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden size": getattr(config, "hidden_size", None),
        "attention heads": getattr(config, "num_attention_heads", None),
        "key/value heads": getattr(config, "num_key_value_heads", None),
        "positions": getattr(config, "max_position_embeddings", None),
        "vocabulary": f"{len(tokenizer):,} tokens",
        "chat template": "yes" if tokenizer.chat_template else "no: it continues text",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)
    ask = 'tokenizer("Your text", return_tensors="pt")'
    if tokenizer.chat_template:
        switches = tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
        ask = (
            'tokenizer.apply_chat_template([{"role": "user", "content": "Your question"}],\n'
            '    add_generation_prompt=True, return_dict=True, return_tensors="pt"'
            + "".join(f", {name}={value!r}" for name, value in switches.items())
            + ")"
        )
    more = ", tokenizer=tokenizer" if stops else ""
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
    dtype = getattr(torch, args.dtype)
    with writing(args.target):
        check_free(args.target)
        check_free(args.target.removesuffix(".pth"))
    figures = read_figures(args.run)
    model = load_policy(args.source, args.trust_remote_code)
    if not to_pth:
        with quiet():
            model = as_plain(model)
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(args.source), args.trust_remote_code)
    check_tokenizer(tokenizer, model)
    if to_pth:
        with writing(args.target):
            save_policy(model, tokenizer, args.target, dtype)
    else:
        write_directory(model, tokenizer, args.target, dtype, figures)
    print(f"{args.target}: {type(model).__name__}, {model.num_parameters():,} parameters in {args.dtype}")


if __name__ == "__main__":
    run_script(main)
