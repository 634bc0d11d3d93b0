"""A model to a ``.pth`` that MiniMind's own class loads, and a folder beside it with everything else."""

import os
import tempfile
from pathlib import Path

import torch


def save_policy(model, tokenizer, path_pth):
    """Write ``model`` as ``path_pth``, a fp16 state-dict, and what else is needed to load it beside it.

    The state-dict has the keys that MiniMind's own class loads with ``strict=True``, ``lm_head.weight``
    included when it is tied. The folder of the same stem gets the config, generation config and tokenizer.
    Every file appears whole or not at all, the ``.pth`` last.

    ``model`` is the bare model, not wrapped for data-parallel training. Raises ``ValueError`` if a weight is
    not finite in fp16 (NaN, or beyond ±65504): nothing is written then, and what was there stays.
    """
    path = Path(path_pth)
    state = _half_state_dict(model, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as temporary:
        folder = Path(temporary)
        # Not save_pretrained: it refuses the contradictory generation settings that some hub models have.
        model.config.to_json_file(folder / "config.json")
        model.generation_config.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                target = path.with_suffix("") / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                _replace(file, target)
        weights = folder / path.name
        torch.save(state, weights)
        _replace(weights, path)


def _half_state_dict(model, path):
    state = {}
    for name, tensor in model.state_dict().items():
        half = tensor.half() if tensor.is_floating_point() else tensor
        if not half.isfinite().all():
            raise ValueError(f"{name} has values that are NaN or too large for fp16: {path} not written")
        state[name] = half.cpu().contiguous()
    # Tied weights are one tensor, which torch.save then stores once.
    state.update({name: state[source] for name, source in model.all_tied_weights_keys.items()})
    return state


def _replace(source, target):
    """Move ``source`` over ``target``, flushed to disk first: a crash leaves the old file or the new one."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
