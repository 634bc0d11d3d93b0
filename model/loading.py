"""A path or a hub name -> model and tokenizer, checked; and a model back to a ``.pth``.

Models are loaded in fp32 with dropout off. A ``.pth`` is a state-dict. A folder of the same stem beside it
(``ppo_actor_512.pth`` and ``ppo_actor_512/``, as ``save_policy`` writes them) tells the architecture, the
generation settings and the tokenizer; without one the file is taken for MiniMind's own and the architecture
is read from its keys and shapes.

What a user can get wrong raises ``InputError``.
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
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from errors import InputError
from model.hub import check_hub
from model.model_minimind import MiniMindConfig

MINIMIND_FOLDER = Path(__file__).resolve().parent  # where MiniMind keeps its tokenizer
MINIMIND_HEADS = 8  # MiniMind 2 has eight heads at every size; its state-dict does not tell
MOST_PARTS = 4096  # layers, heads, experts: no model has as many, and building them would take for ever
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


# ---------------------------------------------------------------- loading


def load_tokenizer(path, trust_remote_code=False):
    """The tokenizer of a directory or hub name.

    One without a pad token gets its EOS as pad: lengths tell padding apart here, never the token itself.
    Raises ``InputError`` if there is none or it cannot be read.
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
    """Does the tokenizer of this folder say that its tokenizer.json is all there is to it?

    ``AutoTokenizer`` believes that of some architectures only: beside a Qwen2, it would read any file as
    Qwen2's tokenizer, cut texts as that does and add its tokens.
    """
    settings = Path(path) / "tokenizer_config.json"
    if not settings.is_file() or not (Path(path) / "tokenizer.json").is_file():
        return False
    kind = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class")
    return kind in ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_policy(path, trust_remote_code=False):
    """The causal language model of a ``.pth``, a directory or a hub name: fp32, on the CPU, dropout off.

    Raises ``InputError`` for a file or folder that is missing or unreadable, is no causal language model, or
    whose weights do not fit its architecture exactly.
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
        model, report = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, in one line
            output_loading_info=True,
        )
    if "ForSequenceClassification" in str(model.config.architectures):
        raise InputError(f"{path} is a classifier or reward model, not a causal language model")
    # transformers fills what is missing or of another shape with random numbers.
    if report["missing_keys"]:
        raise InputError(f"{path}: its weights lack {_few(report['missing_keys'])}")
    if report["mismatched_keys"]:
        names = [name for name, *_ in report["mismatched_keys"]]
        raise InputError(f"{path}: the shapes of {_few(names)} do not fit its config.json")
    return model


def _check_size(folder, trust_remote_code):
    """Raise ``InputError`` if the config of a folder asks for far more numbers than its files hold:
    transformers would make them up, until the memory is full."""
    with quiet(), as_input_error(f"no causal language model could be loaded from {folder}"):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        model = _outline(config, trust_remote_code)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    size = sum(file.stat().st_size for file in Path(folder).iterdir() if file.suffix != ".json")
    if size and numbers > max(8 * size, 10**8):  # one bit a number; what is small is judged below
        raise InputError(
            f"{folder}: config.json asks for {numbers:.1e} numbers, the files beside it hold fewer"
        )


def _outline(config, trust_remote_code):
    """The model of a config, with shapes but without memory for its weights."""
    for name, value in config.to_dict().items():
        if re.search("layer|head|expert", name) and isinstance(value, int) and value > MOST_PARTS:
            raise InputError(f"its config has {value:.1e} for {name}, which cannot be meant")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _load_pth(path, trust_remote_code):
    state = _read_state_dict(path)
    sidecar = path.with_suffix("")
    generation_config = None
    if (sidecar / "config.json").is_file():
        what = f"{sidecar}/config.json does not describe a causal language model"
        with quiet(), as_input_error(what):
            config = AutoConfig.from_pretrained(str(sidecar), trust_remote_code=trust_remote_code)
            if (sidecar / "generation_config.json").is_file():
                generation_config = GenerationConfig.from_pretrained(str(sidecar))
    else:
        what = f"{path} is not a MiniMind checkpoint"
        config = _infer_minimind_config(state, path)

    with quiet(), as_input_error(what):
        outline = _outline(config, trust_remote_code)
    _check_fit(outline, state, path)
    with quiet(), as_input_error(what):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        model.load_state_dict(state, strict=True)
    model.generation_config = generation_config or model.generation_config
    return model.eval()


def _check_fit(model, state, path):
    """Raise ``InputError`` unless ``state``, what is tied filled in, has the keys and shapes of ``model``."""
    for name, source in model.all_tied_weights_keys.items():
        if source in state and not torch.equal(state.setdefault(name, state[source]), state[source]):
            raise InputError(f"{path}: {name} and {source} differ, but the model of its config ties the two")
    expected = model.state_dict()
    if missing := expected.keys() - state.keys():
        raise InputError(f"{path} lacks {_few(missing)}: it is not a checkpoint of {type(model).__name__}")
    if unexpected := state.keys() - expected.keys():
        raise InputError(f"{path} has {_few(unexpected)}, which {type(model).__name__} does not")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise InputError(
                f"{path}: {name} has shape {list(state[name].shape)}, {type(model).__name__} needs "
                f"{list(tensor.shape)}"
            )


def _read_state_dict(path):
    """The tensors of a ``.pth`` by name, on the CPU. Code in the file is never run."""
    if not os.path.isfile(path):  # unlike Path's, false for what can be no path
        raise InputError(f"{path}: no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on bytes that are no checkpoint, the unpickler can raise anything
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
        raise InputError(f"{path}: {_few(odd)} is sparse, complex or without numbers: save ordinary tensors")
    return dict(state)


def _infer_minimind_config(state, path):
    """The ``MiniMindConfig`` whose model has the keys and shapes of ``state``, by MiniMind's conventions.

    Shapes that follow no MiniMind are left for the strict comparison with the model's own.
    """

    def rows(name):
        if name not in state or state[name].dim() == 0:
            raise InputError(
                f"{path} has no {name}: not a MiniMind checkpoint. Any other needs its config.json in the "
                f"folder {path.with_suffix('')}"
            )
        return state[name].shape[0]

    layer = "model.layers.0."
    version = 3 if f"{layer}self_attn.q_norm.weight" in state else 2
    query_rows, key_rows = rows(f"{layer}self_attn.q_proj.weight"), rows(f"{layer}self_attn.k_proj.weight")
    if version == 3:
        head_dim = rows(f"{layer}self_attn.q_norm.weight")
    else:
        head_dim = query_rows // MINIMIND_HEADS
    if head_dim == 0 or head_dim % 2 or query_rows % head_dim or key_rows % head_dim or not key_rows:
        raise InputError(
            f"{path}: queries of {query_rows} and keys of {key_rows} rows do not split into heads "
            f"of size {head_dim}: not a MiniMind checkpoint"
        )
    layers = {found[1] for name in state if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    sizes = {
        "vocab_size": rows("model.embed_tokens.weight"),
        "hidden_size": rows("model.norm.weight"),
        "num_hidden_layers": len(layers),
        "head_dim": head_dim,
        "num_attention_heads": query_rows // head_dim,
        "num_key_value_heads": key_rows // head_dim,
    }
    use_moe = f"{layer}mlp.gate.weight" in state
    if use_moe:
        shared = re.compile(re.escape(f"{layer}mlp.shared_experts.") + r"\d+\.gate_proj\.weight")
        sizes["num_experts"] = rows(f"{layer}mlp.gate.weight")
        sizes["n_shared_experts"] = sum(shared.fullmatch(name) is not None for name in state)
        sizes["intermediate_size"] = rows(f"{layer}mlp.experts.0.gate_proj.weight")
    else:
        sizes["intermediate_size"] = rows(f"{layer}mlp.gate_proj.weight")
    tied = "lm_head.weight" not in state or torch.equal(
        state["lm_head.weight"], state["model.embed_tokens.weight"]
    )
    return MiniMindConfig(minimind_version=version, use_moe=use_moe, tie_word_embeddings=tied, **sizes)


def disable_dropout(model):
    """Set every dropout probability of ``model`` to zero, in place: train mode then computes what eval does.

    That is ``p`` of the dropout modules, and whatever modules and configs keep under a name with "drop" in it
    (``attention_dropout``, ``resid_pdrop``, ``layerdrop``), which some families read in their forward.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in (*model.modules(), model.config, model.config.get_text_config()):
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)


def tokenizer_source(path):
    """Where the tokenizer of the model at ``path`` lies when nobody says: a directory or a hub name.

    A model directory or hub name has its own. For a ``.pth`` it is the folder of the same stem beside it, and
    otherwise this repository's ``model/``, as in MiniMind. Raises ``InputError`` where there is none.
    """
    if not str(path).endswith(".pth"):
        if os.path.isdir(path) and not _has_tokenizer(Path(path)):
            raise InputError(f"{path} has no tokenizer files (tokenizer.json …): pass --tokenizer")
        return str(path)
    sidecar = Path(path).with_suffix("")
    for folder in (sidecar, MINIMIND_FOLDER):
        if _has_tokenizer(folder):
            return str(folder)
    raise InputError(f"{path}: no tokenizer in {sidecar} nor in {MINIMIND_FOLDER}: pass --tokenizer")


# ---------------------------------------------------------------- small things


def _check_folder_or_hub_name(path):
    """Raise ``InputError`` for a file, and for a missing folder that cannot be a hub name."""
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


def _few(names, limit=3):
    """``a, b, c and 7 more``"""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@contextlib.contextmanager
def as_input_error(what):
    """Turn an exception of transformers into an ``InputError``: ``what``, then the exception's first line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    except BaseException as error:  # a file or a hub can be wrong in more ways than there are exceptions
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # of tokenizers' Rust
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = reason if len(reason) <= 250 else f"{reason[:250]}…"
        hint = " (see --trust_remote_code)" if "trust_remote_code" in str(error) else ""
        raise InputError(f"{what}: {type(error).__name__}: {reason}{hint}") from error


@contextlib.contextmanager
def quiet():
    """No progress bars, load reports or retry notices in this block: what they would say is checked here."""
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
