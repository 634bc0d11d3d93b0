"""Loads a language model and its tokenizer from a ``.pth``, a directory or a hub name, and checks them.

Models are loaded in fp32 with dropout off. A ``.pth`` is a state-dict. If a folder of the same stem is beside
it (``ppo_actor_512.pth`` and ``ppo_actor_512/``, as ``save_policy`` writes them), the architecture, the
generation settings and the tokenizer come from that folder. If not, the file is taken for a MiniMind, and
minimind_pth.py reads the architecture from its keys and shapes.

Every mistake that a user can make raises ``InputError``.
"""

import contextlib
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import torch
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from errors import InputError
from model.hub_connection import check_hub
from model.minimind_pth import minimind_config_of
from model.pretrained import check_report, few, load_config, load_pretrained, parameters_without_memory

MINIMIND_FOLDER = Path(__file__).resolve().parent  # where MiniMind keeps its tokenizer
MOST_PARTS = 4096  # layers, heads, experts: no model has more, and building them would take too long
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


# ---------------------------------------------------------------- loading


def load_tokenizer(path, trust_remote_code=False):
    """The tokenizer of a directory or hub name.

    A tokenizer without a pad token gets its EOS as pad token. This is safe: padding is known from lengths,
    never from the token. Raises ``InputError`` if there is no tokenizer or it cannot be read.
    """
    _check_folder_or_hub_name(path)
    if os.path.isdir(path) and not _has_tokenizer(Path(path)):
        raise InputError(f"{path} has no tokenizer files (tokenizer.json …): pass --tokenizer")
    with quiet(), as_input_error(f"no tokenizer could be loaded from {_described(path)}"):
        check_hub(path)
        kind = PreTrainedTokenizerFast if _is_whole_in_json(path) else AutoTokenizer
        tokenizer = kind.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_whole_in_json(path):
    """Does this folder's tokenizer_config.json say that tokenizer.json is the complete tokenizer?

    ``AutoTokenizer`` follows that for some architectures only. Beside a Qwen2 it would read any tokenizer as
    Qwen2's own: it would split texts as Qwen2 does and add Qwen2's tokens.
    """
    settings = Path(path) / "tokenizer_config.json"
    if not settings.is_file() or not (Path(path) / "tokenizer.json").is_file():
        return False
    kind = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class")
    return kind in ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_policy(path, trust_remote_code=False):
    """The causal language model of a ``.pth``, a directory or a hub name: fp32, on the CPU, dropout off.

    Raises ``InputError`` if the file or folder is missing or unreadable, is not a causal language model, or
    has weights that do not fit its architecture exactly.
    """
    if str(path).endswith(".pth"):
        model = _load_pth(Path(path), trust_remote_code)
    else:
        model = _load_pretrained(path, trust_remote_code)
    disable_dropout(model)
    return model


def _load_pretrained(path, trust_remote_code):
    _check_folder_or_hub_name(path)
    if os.path.isdir(path):
        if not (Path(path) / "config.json").is_file():
            raise InputError(f"{path} has no config.json: it is not a model directory")
        _check_size(path, trust_remote_code)
    with quiet(), as_input_error(f"no causal language model could be loaded from {_described(path)}"):
        check_hub(path)
        model, report = load_pretrained(AutoModelForCausalLM, path, trust_remote_code)
    if "ForSequenceClassification" in str(model.config.architectures):
        raise InputError(f"{path} is a classifier or reward model, not a causal language model")
    check_report(report, f"{path}: ")
    return model


def _check_size(folder, trust_remote_code):
    """Raise ``InputError`` if the config of a folder describes far more weights than its files can hold.
    transformers would fill the missing ones with random numbers until the memory is full."""
    with quiet(), as_input_error(f"no causal language model could be loaded from {folder}"):
        config = load_config(folder, trust_remote_code)
        model = _outline(config, trust_remote_code)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    size = sum(file.stat().st_size for file in Path(folder).iterdir() if file.suffix != ".json")
    # Not even one bit per weight. Below 1e8 weights nothing is refused here: loading finds what is missing.
    if size and numbers > max(8 * size, 10**8):
        raise InputError(
            f"{folder}: config.json describes {numbers:.1e} weights, which the files beside it cannot hold"
        )


def _outline(config, trust_remote_code):
    """The model of a config on the meta device: it has shapes, but no memory for weights."""
    for name, value in config.to_dict().items():
        if re.search("layer|head|expert", name) and isinstance(value, int) and value > MOST_PARTS:
            raise InputError(f"its config says {name} = {value:.1e}, which is impossibly large")
    # Code from outside may look at the numbers in its buffers, which has none on the meta device.
    with parameters_without_memory() if trust_remote_code else torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _load_pth(path, trust_remote_code):
    state = _read_state_dict(path)
    sidecar = path.with_suffix("")
    generation_config = None
    if (sidecar / "config.json").is_file():
        beside = f" (as {sidecar}/config.json says; move that folder if it is not this file's)"
        what = f"{sidecar}/config.json does not describe a causal language model"
        with quiet(), as_input_error(what):
            config = load_config(sidecar, trust_remote_code)
            if (sidecar / "generation_config.json").is_file():
                generation_config = GenerationConfig.from_pretrained(str(sidecar))
    else:
        what, beside = f"{path} is not a MiniMind checkpoint", ""
        config = minimind_config_of(state, path)

    with quiet(), as_input_error(what):
        outline = _outline(config, trust_remote_code)
    _check_fit(outline, state, path, beside)
    with quiet(), as_input_error(what):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        model.load_state_dict(state, strict=True)
    model.generation_config = generation_config or model.generation_config
    return model.eval()


def _check_fit(model, state, path, beside):
    """Raise ``InputError``, which ends with ``beside``, unless ``state`` has exactly the keys and shapes of
    ``model``. Tied weights that ``state`` lacks are filled in first."""
    for name, source in model.all_tied_weights_keys.items():
        if source in state and not torch.equal(state.setdefault(name, state[source]), state[source]):
            raise InputError(f"{path}: {name} and {source} differ, but the model of its config ties the two")
    expected = model.state_dict()
    if missing := expected.keys() - state.keys():
        raise InputError(
            f"{path} lacks {few(missing)}: it is not a checkpoint of {type(model).__name__}{beside}"
        )
    if unexpected := state.keys() - expected.keys():
        raise InputError(f"{path} has {few(unexpected)}, which {type(model).__name__} does not{beside}")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise InputError(
                f"{path}: {name} has shape {list(state[name].shape)}, {type(model).__name__} needs "
                f"{list(tensor.shape)}{beside}"
            )


def _read_state_dict(path):
    """The tensors of a ``.pth`` by name, on the CPU. Code in the file is never run."""
    if not os.path.isfile(path):  # unlike Path.is_file, False for a text that cannot be a path
        raise InputError(f"{path}: no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on bytes that are not a checkpoint, the unpickler can raise anything
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise InputError(
                f"{path} holds Python objects besides tensors, and reading those could run code: "
                "save model.state_dict() alone"
            ) from error
        raise InputError(f"{path} is not a readable torch file ({type(error).__name__})") from error
    if (
        not isinstance(state, dict)
        or not state
        or not all(isinstance(name, str) and torch.is_tensor(tensor) for name, tensor in state.items())
    ):
        raise InputError(f"{path} is not a state-dict, that is a dict of tensors: save model.state_dict()")
    odd = [n for n, x in state.items() if x.layout != torch.strided or x.is_meta or x.is_complex()]
    if odd:
        raise InputError(f"{path}: {few(odd)} is sparse, complex or a meta tensor: save ordinary tensors")
    return dict(state)


def disable_dropout(model):
    """Set every dropout probability of ``model`` to zero, in place: train mode then computes what eval does.

    This sets ``p`` of the dropout modules, and each float of modules and configs whose name contains "drop"
    (``attention_dropout``, ``resid_pdrop``, ``layerdrop``), because the forward of some families reads those.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in (*model.modules(), model.config, model.config.get_text_config()):
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)


def tokenizer_source(path):
    """Where the tokenizer of the model at ``path`` is by default: a directory or a hub name.

    For a model directory or hub name, it is the same path. For a ``.pth`` it is the folder of the same stem
    beside it, otherwise this repository's ``model/``, as in MiniMind. Raises ``InputError`` if neither has
    one.
    """
    if not str(path).endswith(".pth"):
        if os.path.isdir(path) and not _has_tokenizer(Path(path)):
            raise InputError(f"{path} has no tokenizer files (tokenizer.json …): pass --tokenizer")
        return str(path)
    sidecar = Path(path).with_suffix("")
    for folder in (sidecar, MINIMIND_FOLDER):
        if _has_tokenizer(folder):
            return str(folder)
    if not os.path.isfile(path):  # the first thing to say
        raise InputError(f"{path}: no such file")
    raise InputError(f"{path}: no tokenizer in {sidecar} nor in {MINIMIND_FOLDER}: pass --tokenizer")


# ---------------------------------------------------------------- helpers


def _check_folder_or_hub_name(path):
    """Raise ``InputError`` for a file, and for a path that does not exist and cannot be a hub name."""
    if os.path.isfile(path):
        raise InputError(
            f"{path} is a file, where a directory or a hub name is needed (a model may be a .pth)"
        )
    if not os.path.exists(path) and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(path)):
        raise InputError(f"{path}: no such directory")


def _described(path):
    return str(path) if os.path.isdir(path) else f"the hub as {path} (there is no such directory here)"


def _has_tokenizer(folder):
    return any(os.path.isfile(folder / name) for name in TOKENIZER_FILES)


@contextlib.contextmanager
def as_input_error(what):
    """Turn an exception of transformers into an ``InputError``: ``what``, then the exception's first line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    except BaseException as error:  # bad files and hubs lead to exceptions of every class
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # tokenizers' Rust code raises it, as a BaseException
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = reason if len(reason) <= 250 else f"{reason[:250]}…"
        hint = " (see --trust_remote_code)" if "trust_remote_code" in str(error) else ""
        raise InputError(f"{what}: {type(error).__name__}: {reason}{hint}") from error


@contextlib.contextmanager
def quiet():
    """No progress bars, load reports or retry notices in this block: the callers check the outcome."""
    verbosity, hub_verbosity = hf_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            hf_logging.enable_progress_bar()
