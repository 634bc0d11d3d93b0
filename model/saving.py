"""Saves a model: as a ``.pth`` with a folder beside it, or as a Hugging Face directory."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import torch
from transformers import GenerationConfig, PreTrainedModel

from atomic_files import move, one_at_a_time
from errors import InputError
from model.loading import quiet
from model.lora import merged, merged_copy


def save_policy(model, tokenizer, path_pth, dtype=torch.float16, ready=None, state=None):
    """Write ``model`` as ``path_pth``, a state-dict in ``dtype``, and beside it what else loading needs.

    A MiniMind's state-dict can be loaded by MiniMind's own class with ``strict=True``: ``lm_head.weight`` is
    included even if it is tied. Adapters are merged. The folder of the same stem gets the config, generation
    config and tokenizer. Every file appears whole or not at all, and the ``.pth`` appears last.

    ``model`` is the bare model, not wrapped for data-parallel training. Raises ``InputError`` if a weight is
    not finite in ``dtype`` (NaN, or beyond fp16's ±65504). Then nothing is written, and old files stay.

    ready: a ``.pth`` that this function wrote of the same model, with other weights: it is copied instead.
    state: the state-dict of a sharded model, from ``state_dict_in``.
    """
    path = Path(path_pth)
    state = None if ready else state or state_dict_in(dtype, model, path)
    with _whole_files(path.with_suffix(""), path) as folder:
        _write_settings(folder, model, tokenizer)
        if ready:
            shutil.copyfile(ready, folder / path.name)
            return
        buffer = io.BytesIO()  # if a disk is full, torch's own writer says only "unexpected pos"
        torch.save(state, buffer)
        (folder / path.name).write_bytes(buffer.getbuffer())


def save_directory(model, tokenizer, path, dtype=torch.float16, **fields):
    """Write ``model``, a causal LM or a classifier, as a directory that ``from_pretrained`` loads.

    Adapters are merged. fields: more entries for its config.json. Every file appears whole or not at all,
    config.json last. Other files in the directory stay. Raises ``InputError`` as ``save_policy`` does.
    """
    path = Path(path)
    model = rounded_copy(model, dtype, path)
    vars(model.config).update(fields)
    with _whole_files(path, path / "config.json") as folder:
        write_directory(model, tokenizer, folder)


def rounded_copy(model: PreTrainedModel, dtype: torch.dtype, path: Path) -> PreTrainedModel:
    """A copy of a model in ``dtype``, adapters merged. Raises InputError, which names ``path``, if a weight
    is not finite."""
    model = merged_copy(model).to(dtype)
    for name, tensor in model.state_dict().items():
        check_finite(name, tensor, path)
    return model


def write_directory(model: PreTrainedModel, tokenizer, folder: Path) -> None:
    """Write what ``from_pretrained`` needs into a folder that is there."""
    plain = mock.patch.object(model, "generation_config", GenerationConfig(), create=True)
    with quiet(), plain:  # for the reason, see _write_settings
        model.save_pretrained(folder)
    _write_settings(folder, model, tokenizer)
    for file in folder.glob("*.safetensors"):  # safetensors makes them readable by their owner only
        shutil.copymode(folder / "config.json", file)


@contextlib.contextmanager
def _whole_files(target, last):
    """Gives the ``with`` block an empty folder to write into. Then its files replace those of the same names
    in ``target``, one by one, each of them whole. The file with the name of ``last`` is moved to ``last``,
    after all others."""
    folder = target.with_name(f".{target.name}.tmp")
    target.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(target):  # two runs may write to the same name
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed here
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


def _write_settings(folder, model, tokenizer):
    """Write the config, generation config and tokenizer, so that transformers 4 reads them right too.

    It takes the rotary base from ``rope_theta``, and other kinds of rotary positions from ``rope_scaling``;
    without these it silently takes 10000 and no scaling. It does not know the class of tokenizers that
    transformers 5 writes.
    """
    # Not save_pretrained: it refuses contradictory generation settings, which some hub models have.
    model.config.to_json_file(folder / "config.json")
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        rope = fields.get("rope_parameters") or {}
        if "rope_theta" in rope:  # not where every kind of layer has its own
            fields["rope_theta"] = rope["rope_theta"]
            if rope.get("rope_type", "default") != "default":
                fields["rope_scaling"] = {name: x for name, x in rope.items() if name != "rope_theta"}
        if fields.get("tokenizer_class") == "TokenizersBackend":
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_finite(name, tensor, path):
    """InputError if ``tensor``, already converted to the type to be saved, has a NaN or an infinity."""
    if not tensor.isfinite().all():
        raise InputError(
            f"{path}: not written, {name} has values that are NaN or too large for {tensor.dtype}"
        )


def state_dict_in(dtype, model, path, keep=True):
    """A model's state-dict as it is saved: in ``dtype``, on the CPU, adapters merged, tied weights under both
    names. Of a sharded model all processes must call it, and only those with ``keep`` get it: else None.
    Raises InputError, which names ``path``, if a weight is not finite."""
    state = {}
    for name, tensor in merged(model):
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
        check_finite(name, rounded, path)
        if keep:
            state[name] = rounded.cpu().contiguous()
    if not keep:
        return None
    # Tied weights are the same tensor here, so torch.save stores it once.
    state.update({name: state[source] for name, source in model.all_tied_weights_keys.items()})
    return state
