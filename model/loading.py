"""Loads a language model and its tokenizer from a ``.pth``, a directory or a hub name, and checks them.

Policies are loaded in fp32 with dropout off. A ``.pth`` is a state-dict. If a folder of the same stem is
beside it (``ppo_actor_512.pth`` and ``ppo_actor_512/``, as ``save_policy`` writes them), the architecture,
the generation settings and the tokenizer come from that folder. If not, the file is taken for a MiniMind,
whose architecture follows from its keys and shapes (model_minimind.py).

``load_pretrained`` is transformers' ``from_pretrained``, with all buffers as ``__init__`` computes them.
transformers 5 builds a model without memory (on the meta device) and then fills in what the checkpoint holds.
A buffer that is computed in ``__init__`` and not saved, such as a rotary table, gets whatever lay in memory
(transformers issue 48892). Its own classes compute such buffers again; code that a model brings along does
not, and then gives wrong numbers, or NaN, without an error. So a second model is built from the config, with
real buffers but no numbers in its weights, and the first one takes over its buffers.

Every mistake that a user can make raises ``InputError``.
"""

import contextlib
import json
import logging
import math
import os
import re
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub import constants, get_session
from huggingface_hub.file_download import repo_folder_name
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as hf_logging

from errors import InputError, first_line
from model.model_minimind import minimind_config_of, plain_config

MINIMIND_FOLDER = Path(__file__).resolve().parent  # where MiniMind keeps its tokenizer
MOST_PARTS = 4096  # layers, heads, experts: no model has more, and building them would take too long
FEWEST_IDS = 0.5  # of a model's embeddings
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


# ---------------------------------------------------------------- loading


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub name.

    A tokenizer without a pad token gets its EOS as pad token. This is safe: padding is known from lengths,
    never from the token. Raises ``InputError`` if there is no tokenizer or it cannot be read.
    """
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
    kind = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class")
    return kind in ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_policy(path: str | Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a ``.pth``, a directory or a hub name: fp32, on the CPU, dropout off.

    Raises ``InputError`` if the file or folder is missing or unreadable, is not a causal language model, or
    has weights that do not fit its architecture exactly.
    """
    if str(path).endswith(".pth"):
        model = _load_pth(Path(path), trust_remote_code)
    else:
        with quiet(), as_input_error(f"no causal language model could be loaded from {_described(path)}"):
            config = plain_config(load_config(path, trust_remote_code))
            if "ForSequenceClassification" in str(config.architectures):
                raise InputError("it is a classifier or reward model, not a causal language model")
            _check_size(Path(path), _built(config, trust_remote_code))
            model = load_pretrained(AutoModelForCausalLM, path, trust_remote_code, config=config)
    disable_dropout(model)
    return model


def _built(config, trust_remote_code):
    """The model of a config, without numbers in its weights: the system gives no memory for them."""
    for name, value in config.to_dict().items():
        if re.search("layer|head|expert", name) and isinstance(value, int) and value > MOST_PARTS:
            raise InputError(f"its config says {name} = {value:.1e}, which is impossibly large")
    with no_init_weights():
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def _check_size(folder, model):
    """Raise ``InputError`` if a model has more weights than the files of a folder can hold, with a bit each.
    transformers would fill the missing ones with random numbers until the memory is full."""
    size = sum(file.stat().st_size for file in folder.glob("*") if file.suffix != ".json")
    if size and model.num_parameters() > max(8 * size, 10**8):
        raise InputError(
            f"config.json describes {model.num_parameters():.1e} weights, too many for its files"
        )


def _load_pth(path, trust_remote_code):
    state = _read_state_dict(path)
    sidecar = path.with_suffix("")
    described = (sidecar / "config.json").is_file()
    what = f"{path} is not a MiniMind checkpoint, and any other model needs its config.json in {sidecar}"
    if described:
        what = f"{path} is not the model of {sidecar}/config.json (move that folder if it is not this file's)"
    with quiet(), as_input_error(what):
        config = load_config(sidecar, trust_remote_code) if described else minimind_config_of(state)
        model = _built(plain_config(config), trust_remote_code)
        for name, source in model.all_tied_weights_keys.items():
            if not state.setdefault(name, state[source]).equal(state[source]):
                raise InputError(f"{name} and {source} differ, but the model of its config ties the two")
        model.load_state_dict(state)
        model.tie_weights()
        if (sidecar / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(sidecar))
    return model.eval()


def _read_state_dict(path):
    """The tensors of a ``.pth`` by name, on the CPU. Code in the file is never run."""
    if not os.path.isfile(path):  # unlike Path.is_file, False for a text that cannot be a path
        raise InputError(f"{path}: no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on bytes that are not a checkpoint, the unpickler can raise anything
        raise InputError(
            f"{path} is not a readable torch file of tensors alone ({type(error).__name__}): save "
            "model.state_dict(), without other Python objects, which could run code"
        ) from error
    if not (isinstance(state, dict) and all(map(_is_ordinary, state.values()))):
        raise InputError(f"{path} is not a state-dict, that is a dict of tensors: save model.state_dict()")
    return dict(state)


def _is_ordinary(x):
    return torch.is_tensor(x) and x.layout == torch.strided and not (x.is_meta or x.is_complex())


def disable_dropout(model: PreTrainedModel) -> None:
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


def tokenizer_source(path: str | Path) -> str:
    """Where the tokenizer of the model at ``path`` is by default: a directory or a hub name.

    For a model directory or hub name, it is the same path. For a ``.pth`` it is the folder of the same stem
    beside it, otherwise this repository's ``model/``, as in MiniMind. Raises ``InputError`` if there is no
    such ``.pth``, or none of the two has a tokenizer.
    """
    if not str(path).endswith(".pth"):
        return str(path)
    if not os.path.isfile(path):  # the first thing to say
        raise InputError(f"{path}: no such file")
    sidecar = Path(path).with_suffix("")
    for folder in (sidecar, MINIMIND_FOLDER):
        if _has_tokenizer(folder):
            return str(folder)
    raise InputError(f"{path}: no tokenizer in {sidecar} nor in {MINIMIND_FOLDER}: pass --tokenizer")


# ---------------------------------------------------------------- from_pretrained, with all buffers


def load_config(path: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    """``AutoConfig.from_pretrained``, where code from outside reads the ``rope_scaling`` that is in its file.

    In transformers 5 it is another name of ``rope_parameters``, and never None. Code that was written for
    transformers 4 takes None for rotary positions without scaling, and fails otherwise.
    """
    check_hub(path)
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    if is_from_outside(config):
        written = config.get_config_dict(str(path))[0]
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_scaling" in written or rope.get("rope_type") == "default":
            type(config).rope_scaling = None  # an ordinary attribute from now on, not that other name
            config.rope_scaling = written.get("rope_scaling")
    return config


def is_from_outside(thing: object) -> bool:
    """Whether the class of this model or config is code that a model brought along."""
    return type(thing).__module__.startswith("transformers_modules")


def load_pretrained(auto_class, path, trust_remote_code, dtype=torch.float32, config=None, **settings):
    """``auto_class.from_pretrained`` on the CPU -> the model.

    dtype: of the weights; "auto" is that of the checkpoint. The weights never take more memory than they have
    in this dtype. settings: values of the config that are set before the model is built. Raises InputError
    for weights that the files lack or that have another shape: transformers fills them with random numbers.
    """
    config = config or load_config(path, trust_remote_code)
    for name, value in settings.items():
        setattr(config, name, value)
    context = classmethod(_real_context if trust_remote_code else _init_context)
    with mock.patch.object(PreTrainedModel, "get_init_context", context):
        model, report = auto_class.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported, in one line
            output_loading_info=True,
        )
    if report["missing_keys"]:
        raise InputError(f"its weights lack {', '.join(sorted(report['missing_keys']))[:200]}")
    if report["mismatched_keys"]:
        names = ", ".join(name for name, *_ in report["mismatched_keys"])
        raise InputError(f"the shapes of {names[:200]} do not fit its config.json")
    fill_buffers(model)
    return model


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Give all buffers that no checkpoint holds the numbers of a newly built model, in place, on the CPU. The
    new one is built in ``dtype``, by default that of the model's first weight."""
    names = [name for name, _ in model.named_non_persistent_buffers()]
    if names:
        with no_init_weights():  # the system gives no memory for weights to which nothing is written
            fresh = type(model)._from_config(model.config, dtype=dtype or model.dtype)
    for name in names:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_buffer(last, fresh.get_buffer(name), persistent=False)


_init_context = PreTrainedModel.get_init_context.__func__


def _real_context(cls, *args, **kwargs):
    """The contexts in which ``from_pretrained`` builds a model, without the meta device: code from outside
    may look at the numbers in its buffers, which has none there."""
    contexts = _init_context(cls, *args, **kwargs)
    return [*(c for c in contexts if not isinstance(c, torch.device)), no_init_weights()]


# ---------------------------------------------------------------- helpers


def check_hub(name: str | Path) -> None:
    """Raise ``InputError`` if ``name`` has to be fetched from the hub, and the hub cannot be reached.

    huggingface_hub would try each file six times, with longer and longer pauses: 46 s until its error.
    """
    if os.path.isdir(name) or constants.HF_HUB_OFFLINE:
        return
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=str(name), repo_type="model"))
    if any(cached.glob("snapshots/*/*")):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of whatever client huggingface_hub has; an answer is none, whatever it says
        why = f"{constants.ENDPOINT} cannot be reached ({first_line(error)})"
        raise InputError(f"{why}; give a directory, or connect to the network") from error


def _described(path):
    return str(path) if os.path.isdir(path) else f"the hub as {path} (there is no such directory here)"


def _has_tokenizer(folder):
    return any(os.path.isfile(folder / name) for name in TOKENIZER_FILES)


@contextlib.contextmanager
def as_input_error(what):
    """Turn an exception of transformers into an ``InputError``: ``what``, then the exception's text."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    except BaseException as error:  # bad files and hubs lead to exceptions of every class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # but that one is of tokenizers' Rust code
        reason = " ".join(str(error).split())[:250]
        hint = " (see --trust_remote_code)" if "trust_remote_code" in str(error) else ""
        raise InputError(f"{what}: {type(error).__name__}: {reason}{hint}") from error


hf_logging.disable_progress_bar()


@contextlib.contextmanager
def quiet():
    """No warnings or load reports in this block: the callers check the outcome."""
    before = logging.root.manager.disable  # this block may be inside another one
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------- do tokenizer, model and trainer fit?
#
# No list of model families decides. Every causal language model of transformers is tried, and two checks
# refuse it if it would be trained wrong: check_output_head here and check_sampling in trainer/inputs.py. The
# families that were tried: docs/models.md.


def check_tokenizer(tokenizer, model):
    """Raise ``InputError`` if the tokenizer cannot be this model's: it has no ids, an id for which the model
    has no embedding, or ids for less than half of the embeddings."""
    ids = tokenizer.get_vocab().values()
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(ids, default=None)
    if not ids or largest >= rows or len(ids) < FEWEST_IDS * rows:
        raise InputError(
            f"--tokenizer {tokenizer.name_or_path}: it has {len(ids)} ids, the largest is {largest}, but the "
            f"model has {rows} embeddings: it is not this model's tokenizer"
        )


def not_finite(module: nn.Module) -> str:
    """The name of the first parameter that holds a NaN or an infinity; '' if none does."""
    return next((name for name, p in module.named_parameters() if not p.isfinite().all()), "")


def is_moe(model):
    """Is the model a mixture of experts? MiniMind's config says so in ``use_moe``. In other families, only
    the configs of such models have a weight for the load-balancing loss."""
    config = model.config.to_dict()
    return bool(config.get("use_moe", "router_aux_loss_coef" in config))


def most_positions(config):
    """The longest sequence, in tokens, that a model computes the same alone and in a batch; inf: no limit."""
    limits = [getattr(config, "max_position_embeddings", None) or math.inf]  # ALiBi models have no limit
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo: the window depends on the longest row
        limits.append(config.window_size)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # Phi-3: one longer row changes the rotation of all rows
        limits.append(rope.get("original_max_position_embeddings") or math.inf)
    return min(limits)


def eos_ids(tokenizer, model):
    """The ids that end a response, sorted: the tokenizer's EOS and those of the model's generation config.

    Raises ``InputError`` if there is no such id, or if one of them is not a token id.
    """
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    ids = [i for i in (*ids, tokenizer.eos_token_id) if i is not None]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InputError(
            f"the generation config's eos_token_id is {configured!r:.100}: give a token id, or a list"
        )
    if not ids:
        raise InputError(
            f"neither the tokenizer {tokenizer.name_or_path} nor the model's generation config names an EOS "
            "token: responses would never end; set eos_token in tokenizer_config.json"
        )
    return sorted(set(ids))


def check_ends(item, tokenizer, model):
    """Raise InputError if a demonstration, (token ids, mask), teaches the model to end answers with a token
    at which PPO does not stop."""
    if not any(mask and token in eos_ids(tokenizer, model) for token, mask in zip(*item, strict=True)):
        raise InputError(
            f"the chat template does not end answers with the tokenizer's EOS, {tokenizer.eos_token}: set "
            "eos_token in tokenizer_config.json to the token that ends a turn, or give another "
            "--prompt_template"
        )


@torch.no_grad()
def check_output_head(model):
    """Raise ``InputError`` unless the output head applied to the backbone's output gives the model's logits.

    Training computes the logits in this way, because it needs them at response positions only. A family that
    also changes the logits (a soft-cap, a scale) would be trained as a different model, without any error.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(16, device=model.device).view(2, 8) % rows
    logits = model(tokens, use_cache=False).logits
    head = model.get_output_embeddings()
    backbone = model.base_model
    by_hand = None
    if head is not None and backbone is not model:
        by_hand = head(backbone(tokens, use_cache=False).last_hidden_state)
    limit = 1e-5 * logits.abs().max().item()
    if (
        by_hand is None
        or by_hand.shape != logits.shape
        or not by_hand.allclose(logits, rtol=1e-5, atol=limit)
    ):
        raise InputError(
            f"models of type {model.config.model_type} are not supported: their logits are more than the "
            "output head applied to the last hidden state (a soft-cap or a scale)"
        )
