"""Saves a model: as a ``.pth`` with a folder beside it, or as a Hugging Face directory."""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from atomic_files import move, one_at_a_time, writing
from errors import InputError
from model.loading import quiet
from model.lora import merged

# Those that not every tokenizer has.
TOKENIZER_FILES = [
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
]
# Of a generation config. Others (a repetition penalty, beams, forced tokens) change greedy answers, and were
# not there in training.
KEPT = [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "stop_strings",
    "max_length",
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
]
# {what transformers 4 reads in a config: the name in transformers 5, there or in rope_parameters}
OLD_NAMES = {
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",  # GPT-NeoX
    "num_experts": "num_local_experts",  # Qwen3-MoE
}


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    dtype: torch.dtype = torch.float16,
    write: bool = True,
) -> None:
    """Write ``model`` as ``path``, the state-dict of ``state_dict_in``, which MiniMind's own class loads
    with ``strict=True``, and beside it a folder with config, generation config and tokenizer. Every file
    appears whole or not at all, the ``.pth`` last. Raises ``InputError`` if a weight is not finite in
    ``dtype`` (NaN, or beyond fp16's ±65504) or the disk cannot be written; then old files stay. Of a sharded
    model all processes must call it, with ``write`` in one of them.
    """
    state = state_dict_in(dtype, model, path, keep=write)
    if not write:
        return
    data = io.BytesIO()  # if a disk is full, torch's own writer says only "unexpected pos"
    torch.save(state, data)
    with writing(path), _whole_files(path.with_suffix(""), path) as folder:
        _write_settings(folder, model, tokenizer)
        (folder / path.name).write_bytes(data.getbuffer())


def save_directory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    dtype: torch.dtype = torch.float16,
    **fields: float,
) -> None:
    """Write ``model``, a causal LM or a classifier, as a directory that ``from_pretrained`` loads.

    Adapters are merged. fields: more entries for its config.json. Every file appears whole or not at all,
    config.json last. Other files there stay, but for those of another tokenizer. Raises ``InputError`` as
    ``save_policy`` does.
    """
    state = state_dict_in(dtype, model, path)
    # transformers refuses contradictory generation settings, which some hub models have.
    plain = mock.patch.object(model, "generation_config", GenerationConfig(), create=True)
    with writing(path), _whole_files(path, path / "config.json") as folder:
        with quiet(), plain:
            model.save_pretrained(folder, state_dict=state)
        _write_settings(folder, model, tokenizer, dtype=str(dtype).removeprefix("torch."), **fields)
        for file in folder.glob("*.safetensors"):  # safetensors makes them readable by their owner only
            shutil.copymode(folder / "config.json", file)


@contextlib.contextmanager
def _whole_files(target: Path, last: Path) -> Iterator[Path]:
    """Gives the ``with`` block an empty folder to write into. Then its files replace those of the same names
    in ``target``, one by one, each of them whole. The file with the name of ``last`` is moved to ``last``,
    after all others."""
    target = target.resolve()
    folder = target.with_name(f".{target.name}.tmp")
    target.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(target):  # two runs may write to the same name
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed here
        try:
            folder.mkdir()
            yield folder
            stale = [name for name in TOKENIZER_FILES if not (folder / name).exists()]
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.name != last.name:
                    place = target / file.relative_to(folder)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    move(file, place)
            for name in stale:  # of another tokenizer, which would be read too
                (target / name).unlink(missing_ok=True)
            move(folder / last.name, last)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write_settings(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **fields: object
) -> None:
    """Write the config, generation config and tokenizer, so that transformers 4 reads them right too: under
    its names, without which it silently takes its defaults. fields: more entries of the config."""
    config = json.loads(model.config.to_json_string()) | fields
    rope = config.get("rope_parameters") or {}
    known = config | rope
    config |= {old: known[new] for old, new in OLD_NAMES.items() if new in known}
    # Where every kind of layer has its own positions, there is no rope_type.
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {name: x for name, x in rope.items() if name not in OLD_NAMES}
    if model.can_generate():
        generation = model.generation_config.to_diff_dict()
        kept = {name: generation[name] for name in KEPT if name in generation}
        _write_json(folder / "generation_config.json", kept)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    written = settings.read_text("utf-8")
    # What transformers 4 reads there; 5 reads it too.
    written = written.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    written = written.replace('"extra_special_tokens": [', '"additional_special_tokens": [')
    settings.write_text(written, "utf-8")
    _write_json(folder / "config.json", config)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def state_dict_in(
    dtype: torch.dtype, model: PreTrainedModel, path: Path, keep: bool = True
) -> dict[str, Tensor]:
    """A model's state-dict as it is saved: in ``dtype``, on the CPU, adapters merged, tied weights under both
    names. Of a sharded model all processes must call it, and only those with ``keep`` get it: else {}.
    Raises InputError, which names ``path``, if a weight is not finite."""
    state = {}
    for name, tensor in merged(model):
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not rounded.isfinite().all():
            raise InputError(f"{path}: not written, {name} has values that are NaN or too large for {dtype}")
        if keep:
            state[name] = rounded.cpu().contiguous()
    # Tied weights are the same tensor here, so torch.save stores it once.
    tied = model.all_tied_weights_keys if keep else {}
    return state | {name: state[source] for name, source in tied.items()}
