"""What a model computes besides its weights: classes and their code, plain attributes, hooks, replaced functions.

What has a name becomes part of the fingerprint. What has none, such as a user's hook, is not guessed: `nameless` says
what it is, and passes of such a model run plain unless the user names it (`TieredCache(tag=...)`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .adapters import active_adapters, merged_adapters, plain_path, tuner_layers

_KNOWN = frozenset({"torch", "transformers", "accelerate", "peft", "hf_tiered_cache", "kernels"})
"""Packages whose hooks and attention functions change no KV, or in ways that the fingerprint sees."""
_INTERNAL = frozenset(nn.Module().__dict__)
_NO_KV = frozenset(
    {
        *("_is_hf_initialized", "_is_torch_compile", "_hf_hook", "_old_forward", "_hf_tiered_cache", "__reduce_ex__"),
        *("config", "generation_config", "name_or_path", "loss_type", "kernel_config", "all_tied_weights_keys"),
        *("gradient_checkpointing", "rope_deltas", "max_seq_len_cached", "forward", "generate", "generate_batch"),
        *("prepare_inputs_for_generation", "quantization_method", "is_quantized", "is_loaded_in_4bit", "hf_quantizer"),
        *(
            "hf_device_map",
            "warnings_issued",
            "layer_idx",
            "is_gradient_checkpointing",
            "peft_config",
            "training",
            "vocab_size",
        ),
    }
)
"""Attributes of modules that change no key and no value, are described elsewhere, or follow the prompt."""


class Nameless(Exception):
    """Something that changes what is computed, and that cannot be told from others of its kind."""


def describe(model: PreTrainedModel, guess: bool = False) -> list[str]:
    """A line for each module: where it stands, its class, a digest of its code, its plain attributes.

    Adapters that are switched off leave no trace, so that their model finds the base model's KV.

    Args:
        guess: whether an attribute without a name is described by its class, since the user has named the model.

    Raises:
        Nameless: an attribute is code without a name.
    """
    hidden = tuple(_hidden(model))
    lines = []
    for path, module, kind in _modules(model):
        if f"{path}.".startswith(hidden) and path:
            continue
        values = ((name, module.__dict__[name]) for name in attributes_of(module))
        said = [f"{name}={_value(f'{path}.{name}', value, guess)}" for name, value in sorted(values, key=str)]
        lines.append(f"{plain_path(path)} {_class(kind)} {' '.join(said)}")
    return lines


def nameless(model: PreTrainedModel) -> str:
    """What of a model has no name: hooks, a replaced forward, an attention function of the user's; "" if nothing."""
    if any(_strangers(getattr(torch_module, name)) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")):
        return "a hook on all modules"
    for path, module in model.named_modules():
        where = path or type(module).__name__
        if _strangers(module._forward_hooks) or _strangers(module._forward_pre_hooks):
            return f"a hook on {where}"
        if (forward := module.__dict__.get("forward")) is not None and not _is_known_forward(module, forward):
            return f"the replaced forward of {where}"
    name = model.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
    if function is not None and not _is_known(inspect.unwrap(function)):
        return f"the attention function {name!r}"
    return ""


def attention(model: PreTrainedModel) -> str:
    """The attention implementation of the language model, and a digest of its code."""
    name = str(model.config.get_text_config(decoder=True)._attn_implementation)
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return name if function is None else f"{name} {_code(inspect.unwrap(function))}"


def looks_ahead(model: PreTrainedModel) -> bool:
    """Whether tokens attend to those behind them."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False:
        return True
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return any(getattr(module, "is_causal", None) is False for module in (decoder or model).modules())


def devices(model: PreTrainedModel) -> str:
    """The kinds of device that the model computes on, also where accelerate keeps its weights elsewhere."""
    kinds = {tensor.device.type for tensor in model.parameters()}
    for module in model.modules():
        where = getattr(module.__dict__.get("_hf_hook"), "execution_device", None)
        if where is not None:
            kinds.add("cuda" if isinstance(where, int) else torch.device(where).type)
    return " ".join(sorted(kinds - {"meta"})) or "cpu"


def trains(module: nn.Module) -> bool:
    """Whether a module is in training mode, and computes something else then."""
    if not module.training:
        return False
    if isinstance(module, PreTrainedModel | nn.modules.batchnorm._BatchNorm):
        return True
    rates = (value for name, value in module.__dict__.items() if "drop" in name or "jitter" in name or name == "p")
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


# --- modules


def _modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, type]]:
    """Modules, their paths, and the classes they stand for: an idle adapter's layer stands for what it wraps."""
    idle = {id(layer): layer for _, layer in tuner_layers(model) if not _is_on(layer)}
    for path, module in model.named_modules():
        if id(module) in idle or "_orig_mod" in module._modules:  # an idle adapter, or a compiled module
            continue  # what it wraps follows, under a path that is made plain
        yield path, module, type(module)


def _is_on(layer: Any) -> bool:
    return bool(merged_adapters(layer) or active_adapters(layer))


def _hidden(model: PreTrainedModel) -> Iterator[str]:
    """Where adapters lie that are not switched on, dropouts and the like included: the beginnings of paths."""
    for path, layer in tuner_layers(model):
        active = set(layer.active_adapters) if _is_on(layer) else set()
        for name, child in layer.named_children():
            if child is getattr(layer, "base_layer", None):
                continue
            if not active:
                yield f"{path}.{name}."
            yield from (f"{path}.{name}.{key}." for key, _ in child.named_children() if key not in active)


def _class(kind: type) -> str:
    forward = getattr(kind, "forward", None)  # which others may have replaced
    return f"{kind.__module__}.{kind.__qualname__} {_source(kind)} {_code(forward)}"


@functools.lru_cache(maxsize=4096)
def _source(kind: type) -> str:
    """A digest of the file that a class was read from, or of its own code where that is none; PyTorch has a version."""
    if kind.__module__.startswith("torch."):
        return ""
    try:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        text = Path(file).read_bytes() if file else inspect.getsource(kind).encode()
    except (OSError, TypeError):
        text = kind.__qualname__.encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


# --- attributes


def attributes_of(module: nn.Module) -> list[str]:
    """The plain attributes of a module that bear on what it computes; tensors are read with the weights."""
    if hasattr(type(module), "adapter_layer_names"):  # described as an adapter
        return []
    outer = isinstance(module, PreTrainedModel)
    return [
        name
        for name, value in module.__dict__.items()
        if name not in _INTERNAL
        and name not in _NO_KV
        and not hasattr(nn.Module, name)  # to, cuda, ...: accelerate replaces these
        and not (outer and name.startswith("_"))
        and not isinstance(value, torch.Tensor)
    ]


def _value(where: str, value: Any, guess: bool) -> str:
    """A value in words that are the same in every process. Raises Nameless."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | enum.Enum):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(where, item, guess) for item in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_value(where, item, guess) for item in value))}}}"
    if isinstance(value, dict):
        pairs = (f"{key!r}: {_value(where, item, guess)}" for key, item in sorted(value.items(), key=repr))
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, functools.partial):
        parts = (_value(where, part, guess) for part in (value.func, value.args, value.keywords))
        return f"partial({', '.join(parts)})"
    if isinstance(value, types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.FunctionType | types.MethodType):
        return _function(where, value, guess)
    if isinstance(value, PreTrainedConfig):
        return type(value).__name__
    if callable(value) and not guess and not _is_known(type(value)):
        raise Nameless(where)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _function(where: str, function: Callable[..., Any], guess: bool) -> str:
    plain = getattr(function, "__func__", function)
    for cell in plain.__closure__ or ():
        if not guess and isinstance(cell.cell_contents, torch.Tensor | nn.Module):
            raise Nameless(where)
    return f"{plain.__module__}.{plain.__qualname__} {_code(plain)}"


def _code(function: Any) -> str:
    """A digest of a function's code, the same in every process."""
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", type(function).__qualname__)
    return hashlib.blake2b(_code_words(code).encode(), digest_size=8).hexdigest()


def _code_words(code: types.CodeType) -> str:
    consts = [_code_words(const) if isinstance(const, types.CodeType) else _constant(const) for const in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {consts}"


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


# --- hooks


def _strangers(hooks: dict[int, Callable[..., Any]]) -> bool:
    return any(not _is_known(hook) for hook in hooks.values())


def _is_known(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return home.split(".")[0] in _KNOWN


def _is_known_forward(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Ours, accelerate's (which keeps the old one beside a hook), or a compiled one."""
    if hasattr(forward, "_torchdynamo_orig_callable") or _is_known(type(forward)):
        plain = inspect.unwrap(forward) if not isinstance(forward, functools.partial) else forward
        return type(forward).__module__.startswith("hf_tiered_cache") or _is_known(plain)
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and _is_known(type(hook))
