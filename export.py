"""Converts a .pth to a Hugging Face directory, or a directory to a .pth.

    python export.py out/ppo_actor_128.pth exported/                    safetensors, tokenizer, model card
    python export.py exported/ model.pth                                the .pth and the folder beside it

A dense MiniMind becomes a Llama or a Qwen3 with the same weights, which programs load without this
repository; other models keep their class (docs/models.md). Existing files are never overwritten."""

import json
from pathlib import Path

from atomic_files import check_unused, write_whole, writing
from errors import InputError, run_script
from trainer.flags import FlagParser, Flags


def parse_args(argv: list[str] | None = None) -> Flags:
    p = FlagParser(description=__doc__)
    add = p.add
    p.group("export")
    add("source", str, "a .pth, or a directory or hub name")
    add("target", str, "a new directory, or else a new .pth")
    add(
        "--dtype",
        str,
        "default: 16 bits if nothing is lost, else float32",
        choices=["float16", "bfloat16", "float32"],
    )
    add("--tokenizer", "", "directory or hub name; default: beside the model")
    add("--trust_remote_code", bool, "run code that a model brings along")
    args = p.parse_args(argv)
    if args.source.endswith(".pth") == args.target.endswith(".pth"):
        raise InputError(
            f"{args.source} and {args.target}: one has to end in .pth, the other is a directory or hub name"
        )
    for path in (Path(args.target), Path(args.target.removesuffix(".pth"))):
        check_unused(path)
    return args


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    run_script(parse_args)

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dataset.chat_template import SYSTEM_PROMPT, TEMPLATE_KWARGS
from dataset.formats import add_system, to_messages
from model.loading import check_tokenizer, eos_ids, load_policy, load_tokenizer, quiet, tokenizer_source
from model.model_minimind import MiniMindConfig
from model.saving import name_of, rounding_error, save_directory, save_policy, whole_state


def card(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: Flags, dtype: str) -> str:
    """The model card: facts about the model, and how to use it. dtype: of the written weights."""
    name = Path(args.target).absolute().name
    # AutoTokenizer would read some of these wrongly: see ``load_tokenizer`` in model/loading.py.
    reader = "PreTrainedTokenizerFast" if type(tokenizer) is PreTrainedTokenizerFast else "AutoTokenizer"
    ask = 'tokenizer("Your text", return_tensors="pt")'
    if tokenizer.chat_template:
        switches = tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {})
        given = "".join(f", {name}={value!r}" for name, value in switches.items())
        prompt = add_system("Your question", tokenizer.init_kwargs.get(SYSTEM_PROMPT, ""))
        asked = json.dumps(to_messages(prompt), ensure_ascii=False)
        ask = f"""tokenizer.apply_chat_template({asked},
    add_generation_prompt=True, return_dict=True, return_tensors="pt"{given})"""
    # To find stop strings (--stop) ``generate`` needs the tokenizer.
    more = ", tokenizer=tokenizer" if model.generation_config.stop_strings else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

| | |
|---|---|
| architecture | `{type(model).__name__}` |
| parameters | {model.num_parameters():,} |
| weights | {dtype} |
| vocabulary | {len(tokenizer):,} tokens |

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


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    model = load_policy(args.source, args.trust_remote_code)
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(args.source), args.trust_remote_code)
    check_tokenizer(tokenizer, model)
    target = Path(args.target)
    state = whole_state(model)
    # A .pth of a run gets its own dtype back: the first one in which nothing is lost.
    exact = (x for x in (torch.float16, torch.bfloat16) if not rounding_error(state, x))
    dtype = getattr(torch, args.dtype) if args.dtype else next(exact, torch.float32)
    name = name_of(dtype)
    error = rounding_error(state, dtype)
    with quiet():
        if args.target.endswith(".pth"):
            save_policy(model, tokenizer, target, dtype, state)
        else:
            if isinstance(model.config, MiniMindConfig):
                raise InputError(
                    f"{args.source}: a MiniMind with experts is no class of transformers; chat.py and "
                    "--model can load its .pth, and MiniMind's scripts/convert_model.py converts it"
                )
            model.generation_config.eos_token_id = eos_ids(tokenizer, model)
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            save_directory(model, tokenizer, target, dtype, state)
            with writing(args.target):
                write_whole(target / "README.md", card(model, tokenizer, args, name))
    lost = (
        f"; rounding has moved them by {error:.1e} of their norm, as much as a short run may" if error else ""
    )
    print(f"{args.target}: {type(model).__name__}, {model.num_parameters():,} parameters in {name}{lost}")


if __name__ == "__main__":
    run_script(main)
