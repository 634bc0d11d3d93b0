"""Saves a model: as a ``.pth`` with a folder beside it, or as a Hugging Face directory.

A result is written in fp16, as MiniMind's are, where that keeps what a run has learned (``SaveDtype``). At
the small learning rates of a real model the update of a weight is less than half the distance between two
numbers of fp16: rounding would give back the weight that the run started from.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from atomic_files import move, one_at_a_time, writing
from errors import InputError
from model.loading import quiet
from model.lora import merged
from model.weights import all_finite, weights_hash

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
COSINE = 0.999  # the least between an update and what rounding leaves of it
NORM = 0.01  # the most by which rounding may change the norm of an update
PIECE = 2**16  # numbers of a tensor that are compared at once, in a processor's cache
State = Mapping[str, Tensor]


# ---------------------------------------------------------------- in which dtype


class SaveDtype:
    """--save_dtype: the dtype of each file that a run writes.

    "auto" is fp16 where the rounded update, the written weights minus those that the run started from,
    equals the learned one, over all weights, within COSINE and NORM; else fp32. The start is read again from
    its file, so a resumed run decides as one that never stopped.
    """

    def __init__(
        self, asked: str, source: str, read: Callable[[torch.dtype | str], PreTrainedModel], start: nn.Module
    ) -> None:
        """asked: the flag; source: the flag that names the start; read: dtype -> the start, or InputError;
        start: as it was loaded."""
        self.asked = asked
        self.source = source
        self.read = read
        self.start_hash = weights_hash(start)
        self._chosen: dict[Path, tuple[torch.dtype, str]] = {}  # {file: (dtype, why)}

    def choose(self, path: Path, state: State, say: Callable[[str], object]) -> torch.dtype:
        """The dtype in which this state, of ``whole_state``, is to be written as ``path``. What is chosen for
        a file is said at first, and when it is another one than before."""
        before = self._chosen.get(path)
        self._chosen[path] = dtype, _ = self._choice(state)
        if not before or before[0] != dtype:
            say(f"saved    {path.name} {self.note(path).strip()}")
        return dtype

    def note(self, path: Path) -> str:
        """A line that says in which dtype a file is and why, "" if it was not written since the start or
        ``--resume``."""
        if path not in self._chosen:
            return ""
        dtype, why = self._chosen[path]
        return f"         in {name_of(dtype)} (--save_dtype {self.asked}): {why}\n"

    def _choice(self, state: State) -> tuple[torch.dtype, str]:
        """-> (dtype, why)"""
        if self.asked == "float32":
            return torch.float32, "nothing is rounded"
        half = torch.float16 if self.asked == "auto" else getattr(torch, self.asked)
        name = name_of(half)
        start = self._start()
        fits = False
        if not state.keys() & start.keys():
            why = f"what {name} loses is unknown, as {self.source} has changed or is gone"
        else:
            cosine, norm = kept_update(state, start, half)
            fits = cosine >= COSINE and abs(norm - 1) <= NORM
            why = (
                f"in {name} the update has cosine {cosine:.4f} to what was learned and {norm:.3f} of its norm"
            )
            if math.isinf(norm):
                why = f"{name} cannot hold these weights"
            elif math.isnan(norm):
                why = "no weight has changed"
        return half if fits or self.asked != "auto" else torch.float32, why

    def _start(self) -> State:
        """The weights that the run started from, {} if they are not there any more."""
        with contextlib.suppress(InputError):
            # "auto" takes the least memory, but a config.json may name another dtype than its files have.
            for dtype in ("auto", torch.float32):
                model = self.read(dtype)
                if weights_hash(model) == self.start_hash:
                    return model.state_dict()
        return {}


def kept_update(state: State, start: State, dtype: torch.dtype) -> tuple[float, float]:
    """What rounding to ``dtype`` leaves of the update from ``start`` to ``state`` -> (cosine between the
    rounded and the learned update, norm of the rounded one divided by that of the learned one).

    Weights without a start, such as the new head of a reward model, are left out: their size would hide what
    the others lose. Nor does fp16 lose them: it keeps three digits of a number.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name in _floating(state):
        if name not in start:
            continue
        for now, before in zip(*(x[name].flatten().split(PIECE) for x in (state, start)), strict=True):
            learned = now.double() - before.double()
            rounded = now.to(dtype).double() - before.double()
            sums += torch.stack([learned @ learned, rounded @ rounded, learned @ rounded])
    learned_square, rounded_square, product = sums.tolist()
    if not (learned_square and rounded_square):
        same = learned_square == rounded_square
        return float(same), 1.0 if same else (math.nan if rounded_square else 0.0)
    cosine = product / math.sqrt(learned_square * rounded_square)
    return cosine, math.sqrt(rounded_square / learned_square)


def rounding_error(state: State, dtype: torch.dtype) -> float:
    """By how much rounding to ``dtype`` moves the weights, as a share of their norm; 0: nothing is lost."""
    sums = torch.zeros(2, dtype=torch.float64)
    for name in _floating(state):
        for piece in state[name].flatten().split(PIECE):
            error = piece.to(dtype).double() - piece.double()
            sums += torch.stack([error @ error, piece.double() @ piece.double()])
    lost, square = sums.tolist()
    return math.sqrt(lost / square) if lost else 0.0


def _floating(state: State) -> list[str]:
    """The names of what is rounded."""
    return [name for name, x in state.items() if x.is_floating_point()]


def name_of(dtype: torch.dtype) -> str:
    """torch.float16 -> "float16"."""
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- what is written


def whole_state(model: PreTrainedModel, keep: bool = True) -> dict[str, Tensor]:
    """A model's state-dict on the CPU, not rounded yet: adapters merged, tied weights under one name. Of a
    sharded model all processes must call it, and only those with ``keep`` get it: else {}."""
    state = {}
    for name, x in merged(model):
        if keep and name not in model.all_tied_weights_keys:
            state[name] = x.cpu().contiguous()
    return state


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    dtype: torch.dtype = torch.float16,
    state: State | None = None,
) -> None:
    """Write ``model`` as ``path``, a state-dict which MiniMind's own class loads with ``strict=True``, and
    beside it a folder with config, generation config and tokenizer. state: of ``whole_state``, where it is
    known already. Every file appears whole or not at all, the ``.pth`` last. Raises ``InputError`` if a
    weight is not finite in ``dtype`` (NaN, or beyond fp16's ±65504) or the disk cannot be written; then old
    files stay.
    """
    rounded = _rounded(state, dtype, model, path)
    with writing(path), _whole_files(path.with_suffix(""), path) as folder:
        _write_settings(folder, model, tokenizer, dtype=name_of(dtype))
        with open(folder / path.name, "wb") as file:
            try:
                torch.save(rounded, file)
            except RuntimeError as error:  # torch's "unexpected pos", behind the error of a full disk
                raise error.__context__ or error from None


def save_directory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    dtype: torch.dtype = torch.float16,
    state: State | None = None,
    **fields: float,
) -> None:
    """Write ``model``, a causal LM or a classifier, as a directory that ``from_pretrained`` loads.

    state: as in ``save_policy``; fields: more entries for its config.json. Every file appears whole or not at
    all, config.json last. Other files there stay, but for those of another tokenizer. Raises ``InputError``
    as ``save_policy`` does.
    """
    rounded = _rounded(state, dtype, model, path)
    # transformers refuses contradictory generation settings, which some hub models have.
    plain = mock.patch.object(model, "generation_config", GenerationConfig(), create=True)
    with writing(path), _whole_files(path, path / "config.json") as folder:
        with quiet(), plain:
            model.save_pretrained(folder, state_dict=rounded)
        _write_settings(folder, model, tokenizer, dtype=name_of(dtype), **fields)
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


def _rounded(
    state: State | None, dtype: torch.dtype, model: PreTrainedModel, path: Path
) -> dict[str, Tensor]:
    """A model's state-dict in ``dtype``, tied weights under both names. state: of ``whole_state``, or None.
    Raises InputError, which names ``path``, if a weight is not finite."""
    rounded = {}
    for name, x in (whole_state(model) if state is None else state).items():
        rounded[name] = x.to(dtype) if x.is_floating_point() else x
        if not all_finite(rounded[name]):
            remedy = "; write float32" if all_finite(x) else ""
            raise InputError(
                f"{path}: not written, {name} has values that are NaN or too large for {dtype}{remedy}"
            )
    # Tied weights are the same tensor here, so torch.save stores it once.
    return rounded | {name: rounded[source] for name, source in model.all_tied_weights_keys.items()}
