"""A model to a ``.pth`` that MiniMind's own class loads, and a folder beside it with everything else."""

import contextlib
import io
import shutil
from pathlib import Path

import torch

from errors import InputError
from files import move, one_at_a_time
from model.loading import quiet
from model.lora import merged, merged_copy


def save_policy(model, tokenizer, path_pth, dtype=torch.float16):
    """Write ``model`` as ``path_pth``, a state-dict in ``dtype``, and beside it what else loading needs.

    The state-dict has the keys that MiniMind's own class loads with ``strict=True``, ``lm_head.weight``
    included when it is tied; adapters are merged. The folder of the same stem gets the config, generation
    config and tokenizer. Every file appears whole or not at all, the ``.pth`` last.

    ``model`` is the bare model, not wrapped for data-parallel training. Raises ``InputError`` if a weight is
    not finite in ``dtype`` (NaN, or beyond fp16's ±65504): nothing is written then, what was there stays.
    """
    path = Path(path_pth)
    state = _state_dict_in(dtype, model, path)
    with _whole_files(path.with_suffix(""), path) as folder:
        _write_files(folder, model, tokenizer, state, path.name)


def save_directory(model, tokenizer, path, dtype=torch.float16, **fields):
    """Write ``model``, a causal LM or a classifier, as a directory that ``from_pretrained`` loads,
    adapters merged.

    fields: more entries of its config.json. Files appear as ``save_policy``'s do, config.json last; others in
    the directory stay. Raises ``InputError`` as that does.
    """
    path = Path(path)
    _state_dict_in(dtype, model, path)  # is it finite?
    model = merged_copy(model).to(dtype)
    generation = model.generation_config if model.can_generate() else None
    if generation:
        model.generation_config = type(generation)()  # see _write_files
    vars(model.config).update(fields)
    with _whole_files(path, path / "config.json") as folder:
        with quiet():
            model.save_pretrained(folder)
        if generation:
            generation.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):  # which only their writer could read
            shutil.copymode(folder / "config.json", file)


@contextlib.contextmanager
def _whole_files(target, last):
    """A folder to write into. Its files then replace those of the same names in ``target``, each of them
    whole; the one with the name of ``last`` becomes that, after all others."""
    folder = target.with_name(f".{target.name}.tmp")
    target.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(target):  # two runs may write to the same name
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed here
        try:
            folder.mkdir()
            yield folder
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.name != last.name:
                    place = target / file.relative_to(folder)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    move(file, place)
            move(folder / last.name, last)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder, model, tokenizer, state, name):
    # Not save_pretrained: it refuses the contradictory generation settings that some hub models have.
    model.config.to_json_file(folder / "config.json")
    model.generation_config.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)
    buffer = io.BytesIO()  # torch's own writer says "unexpected pos" where a disk is full
    torch.save(state, buffer)
    (folder / name).write_bytes(buffer.getbuffer())


def check_finite(name, tensor, path):
    """InputError for a weight that a narrower type, to which it has been converted, cannot hold."""
    if not tensor.isfinite().all():
        kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(tensor.dtype, "fp32")
        raise InputError(f"{path}: not written, {name} has values that are NaN or too large for {kind}")


def _state_dict_in(dtype, model, path):
    state = {}
    for name, tensor in merged(model):
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
        check_finite(name, rounded, path)
        state[name] = rounded.cpu().contiguous()
    # Tied weights are one tensor, which torch.save then stores once.
    state.update({name: state[source] for name, source in model.all_tied_weights_keys.items()})
    return state
