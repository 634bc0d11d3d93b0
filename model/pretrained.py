"""``from_pretrained`` that leaves no buffer uninitialised: weights from the files, buffers as ``__init__``
computes them.

transformers 5 builds a model without memory (on the meta device) and then fills in what the checkpoint holds.
A buffer that is computed in ``__init__`` and not saved, such as a rotary table, gets whatever lay in memory
(transformers issue 48892). Its own classes compute such buffers again; code that a model brings along does
not, and then gives wrong numbers, or NaN, without an error.

So a second model is built from the config, with real buffers but parameters without memory. With
``--trust_remote_code`` a model takes its buffers from that one. Without it, which leaves transformers' own
classes, the buffers are compared with it.

Code from outside also gets ``config.rope_scaling`` as its config.json has it (``load_config``).
"""

import contextlib

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from errors import InputError


def load_config(path, trust_remote_code):
    """``AutoConfig.from_pretrained``, where code from outside reads the ``rope_scaling`` that is in its file.

    In transformers 5 it is another name of ``rope_parameters``, and never None. Code that was written for
    transformers 4 takes None for rotary positions without scaling, and fails otherwise.
    """
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    if is_from_outside(config):
        written = config.get_config_dict(str(path))[0]
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_scaling" in written or rope.get("rope_type") == "default":
            type(config).rope_scaling = None  # an ordinary attribute from now on, not that other name
            config.rope_scaling = written.get("rope_scaling")
    return config


def is_from_outside(thing):
    """Whether the class of this model or config is code that a model brought along."""
    return type(thing).__module__.startswith("transformers_modules")


def load_pretrained(auto_class, path, trust_remote_code, dtype=torch.float32, **settings):
    """``auto_class.from_pretrained`` on the CPU -> (model, transformers' report on missing and mismatched
    weights).

    dtype: of the weights; "auto" is that of the checkpoint. The weights never take more memory than they have
    in this dtype. settings: values of the config that are set before the model is built. Raises InputError
    for a buffer of transformers' own class that is not what ``__init__`` computes.
    """
    config = load_config(path, trust_remote_code)
    for name, value in settings.items():
        setattr(config, name, value)
    with _built_with_real_buffers() if trust_remote_code else contextlib.nullcontext():
        model, report = auto_class.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported, in one line
            output_loading_info=True,
        )
    fill_buffers(model, fill=trust_remote_code)  # transformers' own classes were built in the same way there
    return model, report


def check_report(report, where=""):
    """Raises InputError, which begins with ``where``, for weights that the files lack or that have another
    shape: transformers fills them with random numbers."""
    if report["missing_keys"]:
        raise InputError(f"{where}its weights lack {few(report['missing_keys'])}")
    if report["mismatched_keys"]:
        names = [name for name, *_ in report["mismatched_keys"]]
        raise InputError(f"{where}the shapes of {few(names)} do not fit its config.json")


def few(names, limit=3):
    """Names as text, shortened: ``a, b, c and 7 more``."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@torch.no_grad()
def fill_buffers(model, fill, dtype=None):
    """Compare all buffers that no checkpoint holds with those of a newly built model; ``fill``: take these
    over. The new one is built in ``dtype``, by default that of the model's first weight.

    Raises InputError that names a buffer which differs, if they are only compared.
    """
    if not any(True for _ in model.named_non_persistent_buffers()):
        return
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype or model.dtype)
    try:
        with parameters_without_memory():
            fresh = dict(type(model)(model.config).named_buffers())
    finally:
        torch.set_default_dtype(usual)
    for name, buffer in list(model.named_non_persistent_buffers()):
        expected = fresh[name].to(buffer.device)
        if fill:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_buffer(last, expected, persistent=False)
        elif not torch.equal(buffer.nan_to_num(), expected.to(buffer.dtype).nan_to_num()):
            raise InputError(
                f"{name} is not what {type(model).__name__} computes: this version of transformers loads it "
                "wrong; use another"
            )


@contextlib.contextmanager
def parameters_without_memory():
    """Modules that are built in this block have real buffers, and parameters on the meta device."""
    register, initialisers = nn.Module.register_parameter, {}

    def register_on_meta(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    for name in dir(nn.init):  # random numbers for weights that are thrown away would take minutes
        if name.endswith("_") and not name.startswith("_"):
            initialisers[name] = getattr(nn.init, name)
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
        for name, function in initialisers.items():
            setattr(nn.init, name, function)


@contextlib.contextmanager
def _built_with_real_buffers():
    """In this block ``from_pretrained`` builds models with real buffers: code from outside may look at the
    numbers in them, which has none on the meta device."""
    original = PreTrainedModel.__dict__["get_init_context"]

    def contexts(cls, *args, **kwargs):
        kept = [c for c in original.__get__(None, cls)(*args, **kwargs) if not isinstance(c, torch.device)]
        return [*kept, parameters_without_memory()]

    PreTrainedModel.get_init_context = classmethod(contexts)
    try:
        yield
    finally:
        PreTrainedModel.get_init_context = original
