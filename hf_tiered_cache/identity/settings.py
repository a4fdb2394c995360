"""Settings that passes depend on besides objects: of PyTorch, and of the adapters and the RoPE of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import flop_counter
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedConfig, PreTrainedModel, modeling_rope_utils

HARMLESS_MODES: tuple[type, ...] = (
    DeviceContext,
    getattr(flop_counter, "_FlopCounterMode", flop_counter.FlopCounterMode),
)
"""PyTorch modes that only set the device of new tensors or count operations."""


def computing_state(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the PyTorch settings that affect results on these device types: autocast, and precision against speed."""
    casts = [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in devices if torch.is_autocast_enabled(kind)]
    unusual = (f"{name} {value}" for name, switch, usual in _RARE_SWITCHES if (value := switch()) not in usual)
    return (*casts, *_float32_matmuls(), *(str(switch()) for switch in _SWITCHES), *unusual)


_SWITCHES: tuple[Callable[[], object], ...] = (
    partial(getattr, torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    partial(getattr, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_dtype,
    torch._C._get_mkldnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
)
_USUAL: dict[str, list[object]] = {
    "cudnn_sdp_enabled": [True],
    "overrideable_sdp_enabled": [True],
    "fa3_sdp_enabled": [False],
    # PyTorch puts cuDNN (3) first at the first attention on a GPU of capability 9.0 or 10.0
    "sdp_priority_order": [[1, 2, 0, 3, 4], [3, 1, 2, 0, 4]],
    "math_sdp_allow_fp16_bf16_reduction": [False],
    "cublas_allow_fp16_accumulation": [False],
    "cpu_allow_fp16_reduced_precision_reduction": [False],
    "mkldnn_deterministic": [False],
    "onednn_allow_tf32": [None, False],
    "cudnn_enabled": [True],
    "cudnn_deterministic": [False],
    "cudnn_benchmark": [False],
    "cudnn_benchmark_limit": [10],
    "cudnn_depthwise_kernel": ["auto"],
    "miopen_immediate": [False],
    "nnpack_enabled": [True],
    "qengine": [4],  # "x86"; ARM processors have another default, which is named
    "blas_preferred_backend": [torch._C._BlasBackend.Cublas, torch._C._BlasBackend.Default],
    "linalg_preferred_backend": [torch._C._LinalgBackend.Default],
}
_USUAL_PRECISIONS: dict[tuple[str, str], list[object]] = {
    ("cuda", "conv"): ["tf32"],
    ("cuda", "rnn"): ["tf32"],
    ("mkldnn", "conv"): ["none", "ieee"],
    ("mkldnn", "rnn"): ["none", "ieee"],
}
"""Precisions of float32 in operators other than matrix products, by backend and operator."""
_precision_of: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
if _precision_of is None:  # PyTorch 2.8
    _USUAL["cudnn_allow_tf32"] = [True]
    _USUAL["sdp_priority_order"] = [[1, 2, 0, 3, 0], [3, 1, 2, 0, 0]]  # the last number has no meaning
    _USUAL_PRECISIONS = {}
_RARE_SWITCHES: tuple[tuple[str, Callable[[], object], list[object]], ...] = (
    *(
        (name, getter, usual)
        for name, usual in _USUAL.items()
        for prefix in ("_get", "_cuda_get")  # the second one only in a build for CUDA
        if (getter := getattr(torch._C, f"{prefix}_{name}", None)) is not None
    ),
    *(
        (f"{backend} {operator}", partial(_precision_of, backend, operator), usual)
        for (backend, operator), usual in _USUAL_PRECISIONS.items()
    ),
    ("mha_fastpath", torch.backends.mha.get_fastpath_enabled, [True]),
    ("denormals", lambda: sys.float_info.min / 2 > 0, [True]),  # of this thread: `torch.set_flush_denormal`
)
"""Further switches with the values that add nothing to the state: names, functions and values."""


def _float32_matmuls() -> tuple[str, ...]:
    if _precision_of is None:
        return torch.get_float32_matmul_precision(), str(torch.backends.cuda.matmul.allow_tf32)
    # The older names set both, and raise if a user has set these directly.
    precisions = (_precision_of(backend, "matmul") for backend in ("cuda", "mkldnn"))
    return tuple("ieee" if precision == "none" else precision for precision in precisions)


def active_mode() -> str:
    """Describe an active PyTorch mode that may change any operation of this thread, or return ""."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return ""
    modes: Iterable[Any] = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    unknown = next((type(mode) for mode in modes if type(mode) not in HARMLESS_MODES), None)
    return "" if unknown is None else f"the active mode {unknown.__name__}"


_KERNELS = frozenset(torch.library._impls)
"""Kernels in Python when this library was imported, such as those of PyTorch itself: namespace/operator/key."""


_HARMLESS_KERNELS = ("/Meta", "/FuncTorchBatched")
"""Kernels that compute no values, and those that PyTorch adds when it vectorizes a function for the first time."""


def changed_kernel(begins_request: bool) -> str:
    """Describe a kernel in Python of a PyTorch operator that was added or removed since the import, or return "".

    Within a request, kernels are compared only if their number changes: 50 microseconds at each token are too long.
    """
    if begins_request:
        _changed_kernel.cache_clear()
    return _changed_kernel(len(torch.library._impls))


@lru_cache(maxsize=1)
def _changed_kernel(num_kernels: int) -> str:
    changed = sorted(key for key in torch.library._impls ^ _KERNELS if key.startswith("aten/"))
    return next((f"the kernel {key}" for key in changed if not key.endswith(_HARMLESS_KERNELS)), "")


# --- training mode


def draws_in_training(module: nn.Module) -> bool:
    """Return whether a module of torch or transformers computes different results in training mode."""
    if isinstance(module, PreTrainedModel | nn.modules.batchnorm._NormBase | nn.RReLU):
        return True
    rates = (value for name, value in module.__dict__.items() if "drop" in name or "jitter" in name or name == "p")
    return any(type(rate) in (int, float) and rate > 0 for rate in rates)


# --- adapters


def is_tuner(module: Any) -> bool:
    """Return whether a module is a layer that an adapter wraps."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "active_adapters")


def active_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the active adapters of a layer."""
    return () if getattr(layer, "disable_adapters", False) else tuple(layer.active_adapters)


def merged_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the adapters that are merged into the weights of a layer."""
    return tuple(getattr(layer, "merged_adapters", ()))


def adapter_state(layers: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the adapter state of layers with an active or merged adapter.

    Returns:
        For each such layer its index in `layers`, the active adapters, the merged adapters and the scales of the active
        ones.
    """
    states = []
    for number, layer in enumerate(layers):
        merged = merged_adapters(layer)
        active = active_adapters(layer)
        if active or merged:
            scaling = layer.__dict__.get("scaling", {})  # not of the module that a wrapper of PEFT wraps
            states.append((number, active, merged, tuple(scaling.get(adapter) for adapter in active)))
    return tuple(states)


def rows_have_adapters(layers: Iterable[Any]) -> bool:
    """Return whether the current pass selects adapters by row (PEFT's `adapter_names`, activated LoRA)."""
    hooks = (hook for layer in layers for hook in list(layer._forward_pre_hooks.values()))  # other threads add theirs
    return any({"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys() for hook in hooks)


# --- RoPE


def varying_rope(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the groups of RoPE parameters of a model with frequencies that depend on the prompt length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = (parameters, *(value for value in parameters.values() if isinstance(value, dict)))
    return [group for group in groups if _varies(group.get("rope_type"))]


def rope_regime(config: PreTrainedConfig, length: int) -> str | None:
    """Return the frequency regime of a pass with the last position `length - 1`.

    KV computed under one regime is not served under another.

    Returns:
        "short" or "long" for longrope, joined if several kinds of layers have their own. Otherwise "", or None if some
        frequencies depend on the exact length (dynamic NTK scaling beyond the trained length), so that nothing can be
        reused.
    """
    regimes = []
    for group in varying_rope(config):
        if group["rope_type"] == "longrope":
            original = group.get("original_max_position_embeddings") or config.max_position_embeddings
            regimes.append("long" if length > original else "short")
        elif length >= config.max_position_embeddings:
            return None
    return " ".join(regimes)


def varying_kinds(module: Any) -> dict[str, str]:
    """Return the kinds of RoPE of a module with frequencies that depend on the length, by prefix of its attributes.

    Passes of other modules than those that transformers decorates (`dynamic_rope_update`) change no frequencies.
    """
    kinds = module.__dict__.get("rope_type")
    function: Any = getattr(type(module), "forward", None)
    by_prefix = {f"{name}_": kind for name, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
    while getattr(function, "__globals__", None) is not vars(modeling_rope_utils):
        if not hasattr(function, "__wrapped__"):
            return {}
        function = function.__wrapped__
    return {prefix: kind for prefix, kind in by_prefix.items() if _varies(kind)}


def names_passes_replace(kinds: dict[str, str]) -> frozenset[str]:
    """Return the names of attributes and buffers that passes of a module with these varying kinds of RoPE replace."""
    names = {prefix + name for prefix in kinds for name in ("inv_freq", "long_inv_freq", "max_seq_len_cached")}
    names |= {f"{prefix}original_inv_freq" for prefix, kind in kinds.items() if kind != "longrope"}
    if kinds and "" not in kinds:
        names.add("attention_scaling")  # set by passes, but those of the layer types are used
    return frozenset(names)


def frequencies_in_use(modules: Iterable[Any]) -> list[torch.Tensor | None]:
    """Return the RoPE frequencies of each varying kind that passes of modules use without computing them.

    These are the long ones of longrope (None before the first pass, which computes them), and those for prompts within
    the trained length of dynamic NTK scaling: the first pass after a longer one restores the original ones.
    """
    tensors = []
    for module in modules:
        for prefix, kind in varying_kinds(module).items():
            if kind == "longrope":
                tensors.append(getattr(module, f"{prefix}long_inv_freq", None))
            else:
                longest = getattr(module, f"{prefix}max_seq_len_cached", module.max_seq_len_cached)
                grown = bool(longest > module.original_max_seq_len)
                tensors.append(getattr(module, f"{prefix}original_inv_freq" if grown else f"{prefix}inv_freq"))
    return tensors


def _varies(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)
