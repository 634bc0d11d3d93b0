"""Loads a language model and its tokenizer from a ``.pth``, a directory or a hub name, and checks them.

Policies are loaded in fp32, if no other dtype is asked for; no model has dropout. A ``.pth`` is a state-dict
(``_read_pth``: or a checkpoint of MiniMind's, or a LoRA adapter). If a folder of the same stem is beside it
(``ppo_actor_512.pth`` and ``ppo_actor_512/``, as ``save_policy`` writes them), architecture, generation
settings and tokenizer come from that folder. If not, the file is taken for a MiniMind, which is recognised by
its keys and shapes (``minimind_config_of``). Every mistake that a user can make raises ``InputError``. No
list of families decides what can be trained: docs/models.md.
"""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from huggingface_hub import constants, get_session, try_to_load_from_cache
from tokenizers import Tokenizer
from torch import Tensor
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
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as hf_logging

from errors import InputError, as_input_error
from model.model_minimind import MiniMindConfig, plain_config

MINIMIND_FOLDER = Path(__file__).resolve().parent  # where MiniMind keeps its tokenizer
MINIMIND_IDS = 6400  # of its tokenizer
MINIMIND_HEADS = 8  # MiniMind 2 has 8 heads at every size; its state-dict does not show the number
LORA = (".lora.A.weight", ".lora.B.weight")  # ends of names in MiniMind's adapters
NUMBER = re.compile(r"\d+")  # of a layer, in a name
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


# ---------------------------------------------------------------- loading


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub name.

    A tokenizer without a pad token gets its EOS as pad token. This is safe: padding is known from lengths,
    never from the token. TAGS are no special tokens: they would be missing in decoded text. Raises
    ``InputError`` if there is no tokenizer or it cannot be read."""
    if os.path.isdir(path) and not _has_tokenizer(Path(path)):
        raise InputError(f"{path} has no tokenizer files (tokenizer.json …): pass --tokenizer")
    with quiet(), as_input_error(f"no tokenizer could be loaded from {_described(path)}"):
        check_hub(path)
        written = get_tokenizer_config(path).get("tokenizer_class")
        # These names say that tokenizer.json is the complete tokenizer. ``AutoTokenizer`` follows that for
        # some architectures only: beside a Qwen2 it would read any tokenizer as Qwen2's own, split texts as
        # Qwen2 does and add Qwen2's tokens.
        complete = written in ("PreTrainedTokenizerFast", "TokenizersBackend")
        kind = PreTrainedTokenizerFast if complete else AutoTokenizer
        tokenizer = kind.from_pretrained(path, trust_remote_code=trust_remote_code)
    names = {*TAGS} - {*tokenizer.special_tokens_map.values()}  # none that is an EOS, for example
    tags = [x for x in tokenizer.added_tokens_decoder.values() if x.special and x.content in names]
    if tags and tokenizer.is_fast:
        more = [token for token in tokenizer.extra_special_tokens if str(token) not in TAGS]
        tokenizer.init_kwargs["extra_special_tokens"] = tokenizer.extra_special_tokens = more
        for token in tags:
            token.special = False
        tokenizer.add_tokens(tags)
        # What is skipped in decoding is only known anew to a tokenizer that is read anew.
        tokenizer._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if isinstance(tokenizer.chat_template, str):  # Windows begins files with a byte order mark
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def load_policy(
    path: str | Path, trust_remote_code: bool = False, dtype: torch.dtype | str = torch.float32
) -> PreTrainedModel:
    """The causal language model of a ``.pth``, a directory or a hub name, on the CPU, in eval mode.

    dtype: of ``load_pretrained``; a ``.pth`` is always loaded in fp32. Raises ``InputError`` if the file or
    folder is missing or unreadable, is not a causal language model, or has weights that do not fit its
    architecture exactly.
    """
    if str(path).endswith(".pth"):
        return _load_pth(Path(path), trust_remote_code)
    with quiet(), as_input_error(f"no causal language model could be loaded from {_described(path)}"):
        if has_adapter(path) and not os.path.isfile(os.path.join(path, "config.json")):
            raise InputError("it holds a LoRA adapter only; merge it into its model with peft, and name that")
        config = plain_config(load_config(path, trust_remote_code))
        if "ForSequenceClassification" in str(config.architectures):
            raise InputError("it is a classifier or reward model, not a causal language model")
        if getattr(config, "quantization_config", None):
            raise InputError("its weights are quantized; take the model that it was made from")
        model = load_pretrained(AutoModelForCausalLM, path, trust_remote_code, config, dtype)
    if not model.all_tied_weights_keys:  # the files have a head of its own, whatever the config says
        model.config.tie_word_embeddings = False
    return model


def _load_pth(path: Path, trust_remote_code: bool) -> PreTrainedModel:
    """As ``load_policy``. Code in the file is never run."""
    state, owner, note = _read_pth(path)
    sidecar = owner.with_suffix("")
    described = (sidecar / "config.json").is_file()
    model_of = f"{sidecar}/config.json" if described else f"a MiniMind, nor is there a {sidecar}/config.json"
    with quiet(), as_input_error(f"{owner} is not the state-dict of {model_of}"), no_init_weights():
        config = load_config(sidecar, trust_remote_code) if described else minimind_config_of(state)
        model = AutoModelForCausalLM.from_config(
            plain_config(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        for name, source in model.all_tied_weights_keys.items():
            if not state.setdefault(name, state[source]).equal(state[source]):
                raise InputError(f"{name} and {source} differ, but the model of its config ties the two")
        model.load_state_dict(state)
        model.tie_weights()
        if (sidecar / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(sidecar)
    if not described and config.vocab_size != MINIMIND_IDS:
        warnings.warn(
            f"{owner}: taken for a MiniMind with {config.num_attention_heads} heads and the rotary positions "
            f"of that, as there is no {sidecar}/config.json",
            stacklevel=2,
        )
    if note:
        warnings.warn(f"{path}: {note}", stacklevel=2)
    return model.eval()


def minimind_config_of(state: dict[str, Tensor]) -> MiniMindConfig:
    """The ``MiniMindConfig`` whose model has the keys and shapes of ``state``, a state-dict; everything else
    has the default of its version: 3 if there are query norms, 2 if not. Any exception means that it is not a
    MiniMind. Other differences from one are found when the state is loaded into the model.
    """

    def rows(name: str) -> int:
        """Of a weight of the first layer."""
        return len(state[f"model.layers.0.{name}.weight"])

    table = state["model.embed_tokens.weight"]
    version = 3 if "model.layers.0.self_attn.q_norm.weight" in state else 2
    use_moe = "model.layers.0.mlp.gate.weight" in state
    head_dim = rows("self_attn.q_norm") if version == 3 else rows("self_attn.q_proj") // MINIMIND_HEADS
    shared = sum(name.startswith("model.layers.0.mlp.shared_experts.") for name in state)
    return MiniMindConfig(
        minimind_version=version,
        vocab_size=len(table),
        hidden_size=len(state["model.norm.weight"]),
        num_hidden_layers=len(set(re.findall(r"model\.layers\.(\d+)\.", " ".join(state)))),
        head_dim=head_dim,
        num_attention_heads=rows("self_attn.q_proj") // head_dim,
        num_key_value_heads=rows("self_attn.k_proj") // head_dim,
        intermediate_size=rows("mlp.experts.0.gate_proj" if use_moe else "mlp.gate_proj"),
        use_moe=use_moe,
        num_experts=rows("mlp.gate") if use_moe else 4,
        n_shared_experts=shared // 3,  # each has three matrices
        tie_word_embeddings=state.get("lm_head.weight", table).equal(table),
    )


def _read_pth(path: Path) -> tuple[dict[str, Tensor], Path, str]:
    """A ``.pth`` -> (its weights, the ``.pth`` whose folder describes them, what the user should know).

    It is a state-dict; a checkpoint from which MiniMind resumes, with a state-dict as ``model``; or a LoRA
    adapter of MiniMind's, which is merged into the weights beside it in the file, else into ``_base_of``."""
    if not os.path.isfile(path):  # unlike Path.is_file, False for a text that cannot be a path
        raise InputError(f"{path}: no such file")
    with as_input_error(f"{path} is not a readable torch file of tensors alone (save model.state_dict())"):
        state: dict[str, Any] = dict(torch.load(path, map_location="cpu", weights_only=True))
    note = ""
    if not all(isinstance(x, Tensor) for x in state.values()):
        if not isinstance(state.get("model"), dict):
            names = ", ".join(map(str, state))[:100]
            raise InputError(f"{path}: holds {names}, and no model with weights; save model.state_dict()")
        state = state["model"]
        note = "a checkpoint, of which only the weights are read: training begins anew"
    adapters = {name: state.pop(name) for name in [*state] if str(name).endswith(LORA)}
    owner = path
    if adapters and not state:
        owner = _base_of(path)
        if owner == path or not owner.is_file():
            raise InputError(f"{path}: a LoRA adapter; put the model that it was trained on there as {owner}")
        state, _, _ = _read_pth(owner)
        note = f"a LoRA adapter, merged into {owner}"
    elif adapters and not note:
        note = "its LoRA adapters are merged into its weights"
    with as_input_error(f"{path} is no LoRA adapter of {owner}"):
        _merge(state, {name.removeprefix("module."): x.float() for name, x in adapters.items()})
    return state, owner, note


def _merge(state: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
    """Add MiniMind's adapters, B A, to weights in place. Raises an exception unless they are all there, in
    every layer of this model."""
    adapted = {re.sub(r"\.lora\.[AB]", "", name) for name in adapters}
    kinds = {NUMBER.sub("", name) for name in adapted}
    if missing := {name for name in state if NUMBER.sub("", name) in kinds} - adapted:
        raise InputError(f"it has nothing for {min(missing)}")
    for name in adapted:
        a, b = (adapters[name.removesuffix(".weight") + end] for end in LORA)
        state[name] = state[name] + b @ a


def _base_of(path: Path) -> Path:
    """MiniMind's name of the model beside an adapter: full_sft_768.pth beside lora_medical_768.pth."""
    return path.with_name(re.sub(r".*?(_\d+(_moe)?)?$", r"full_sft\1.pth", path.stem, count=1))


def has_adapter(path: str | Path) -> bool:
    """Whether a directory holds a LoRA adapter of peft, alone or beside its model."""
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def tokenizer_source(path: str | Path) -> str:
    """Where the tokenizer of the model at ``path`` is by default: a directory or a hub name.

    For a model directory or hub name, it is the same path. For a ``.pth`` it is the folder of the same stem
    beside it if that has one, for an adapter ("lora" in its name) that of its base, otherwise this
    repository's ``model/``, as in MiniMind. Raises InputError if there is no such ``.pth``, or none of these
    has a tokenizer."""
    if not str(path).endswith(".pth"):
        return str(path)
    if not os.path.isfile(path):  # the first thing to say
        raise InputError(f"{path}: no such file")
    sidecar = Path(path).with_suffix("")
    base = [_base_of(Path(path)).with_suffix("")] if "lora" in sidecar.name else []
    for folder in (sidecar, *base, MINIMIND_FOLDER):
        if _has_tokenizer(folder):
            return str(folder)
    raise InputError(f"{path}: no tokenizer in {sidecar} nor in {MINIMIND_FOLDER}: pass --tokenizer")


# ---------------------------------------------------------------- from_pretrained, with all buffers
#
# transformers 5 builds a model without memory (on the meta device) and then fills in what the checkpoint
# holds. A buffer that is computed in ``__init__`` and not saved, such as a rotary table, gets whatever lay in
# memory (transformers issue 48892). Its own classes compute such buffers again; code that a model brings
# along does not, and then gives wrong numbers, or NaN, without an error. So models are built with real
# buffers, but no numbers in their weights, and keep those buffers.


def load_config(path: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    """``AutoConfig.from_pretrained`` without dropout: every probability of it is 0. Code from outside reads
    the ``rope_scaling`` of its file, and None for plain rotary positions: in transformers 5 that is another
    name of ``rope_parameters`` and never None, which code for transformers 4 takes for those without scaling.
    """
    check_hub(path)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if is_from_outside(config):
        written = config.get_config_dict(path)[0]
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_scaling" in written or rope.get("rope_type") == "default":
            type(config).rope_scaling = None  # an ordinary attribute from now on, not that other name
            config.rope_scaling = written.get("rope_scaling")
    return config


def is_from_outside(thing: object) -> bool:
    """Whether the class of this model or config is code that a model brought along."""
    return type(thing).__module__.startswith("transformers_modules")


def load_pretrained(
    auto_class: Any,
    path: str | Path,
    trust_remote_code: bool,
    config: PreTrainedConfig,
    dtype: torch.dtype | str = torch.float32,
) -> PreTrainedModel:
    """``auto_class.from_pretrained`` on the CPU -> the model, in eval mode. config: of ``load_config``.

    dtype: of the weights; "auto" is that of the checkpoint. The weights never take more memory than they have
    in this dtype. Raises InputError for weights that the files lack or that have another shape: transformers
    fills them with random numbers.
    """
    contexts = PreTrainedModel.get_init_context

    def real_contexts(*args, **kwargs):
        """Those without the meta device: code from outside may look at the numbers in its buffers."""
        found = [c for c in contexts(*args, **kwargs) if not isinstance(c, torch.device)]
        return [*found, no_init_weights()]

    with (
        mock.patch.object(PreTrainedModel, "get_init_context", real_contexts),
        mock.patch.object(PreTrainedModel, "named_non_persistent_buffers", return_value=[]),
    ):
        model, report = auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported, in one line
            output_loading_info=True,
        )
    if wrong := ", ".join(sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))):
        raise InputError(f"its weights lack what its config.json describes: {wrong:.200}")
    if unused := ", ".join(sorted(report["unexpected_keys"])):
        warnings.warn(f"{path}: its config.json has no place for the weights {unused:.200}", stacklevel=2)
    return model


# ---------------------------------------------------------------- helpers


def check_hub(name: str | Path) -> None:
    """Raise ``InputError`` if ``name`` has to be fetched from the hub, and the hub cannot be reached.

    huggingface_hub would try each file six times, with longer and longer pauses: 46 s until its error.
    """
    if os.path.isdir(name) or constants.HF_HUB_OFFLINE or try_to_load_from_cache(str(name), "config.json"):
        return
    with as_input_error(f"{constants.ENDPOINT} cannot be reached; give a directory"):
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _described(path: str | Path) -> str:
    return str(path) if os.path.isdir(path) else f"the hub as {path} (there is no such directory here)"


def _has_tokenizer(folder: Path) -> bool:
    return any([*folder.glob("tokenizer*"), *folder.glob("vocab.*")])


hf_logging.disable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings or load reports in this block: the callers check the outcome."""
    before = logging.root.manager.disable  # this block may be inside another one
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------- do tokenizer, model and trainer fit?


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ``InputError`` if the tokenizer cannot be this model's: it has no ids, an id for which the model
    has no embedding, or ids for less than half of the embeddings."""
    ids = tokenizer.get_vocab().values()
    rows = embeddings(model)
    largest = max(ids, default=rows)
    if largest >= rows or 2 * len(ids) < rows:
        raise InputError(
            f"--tokenizer {tokenizer.name_or_path}: it has {len(ids)} ids, the largest is {largest}, but the "
            f"model has {rows} embeddings: it is not this model's tokenizer"
        )


def embeddings(model: PreTrainedModel) -> int:
    """The number of ids that a model can read."""
    return len(next(model.get_input_embeddings().parameters()))


def is_moe(model: PreTrainedModel) -> bool:
    """Is the model a mixture of experts? MiniMind's config says so in ``use_moe``. In other families, only
    the configs of such models have a weight for the load-balancing loss."""
    return bool(getattr(model.config, "use_moe", hasattr(model.config, "router_aux_loss_coef")))


def most_positions(config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, that a model computes the same alone and in a batch; a very large
    number: no limit."""
    limits = [getattr(config, "max_position_embeddings", None)]  # ALiBi models have no limit
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo: the window depends on the longest row
        limits.append(config.window_size)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # Phi-3: one longer row changes the rotation of all rows
        limits.append(rope.get("original_max_position_embeddings"))
    return min(filter(None, limits), default=sys.maxsize)


def eos_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """The ids that end a response, sorted: the tokenizer's EOS and those of the model's generation config.

    Raises ``InputError`` if the model has no such id, or if one of the config is not a token id.
    """
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    ids = [i for i in ids if i is not None]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InputError(
            f"{model.name_or_path}: eos_token_id {configured!r:.100} in generation_config.json (without that "
            "file: in config.json) must be a token id, or a list of them; correct it, or delete it where "
            "the tokenizer has an EOS"
        )
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not any(i < embeddings(model) for i in ids):
        raise InputError(
            f"neither the tokenizer {tokenizer.name_or_path} nor the generation config (eos_token_id "
            f"{configured!r:.100}) names an EOS token of this model: responses would never end; set "
            "eos_token in tokenizer_config.json"
        )
    return sorted(set(ids))


@torch.no_grad()
def check_output_head(model: PreTrainedModel) -> None:
    """Raise ``InputError`` unless the output head applied to the backbone's output gives the model's logits.

    Training computes the logits in this way, because it needs them at response positions only. A family that
    also changes the logits (a soft-cap, a scale) would be trained as a different model, without any error.
    """
    tokens = torch.arange(16, device=model.device).view(2, 8) % embeddings(model)
    logits = model(tokens, use_cache=False).logits
    with as_input_error(f"models of type {model.config.model_type} are not supported"):
        by_hand = model.get_output_embeddings()(model.base_model(tokens, use_cache=False).last_hidden_state)
        if not by_hand.allclose(logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item()):
            raise InputError(
                "their logits are more than the output head applied to the last hidden state (a soft-cap or "
                "a scale)"
            )
