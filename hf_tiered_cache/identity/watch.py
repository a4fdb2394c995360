"""Noticing, at every pass, that a model may compute something else than before."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from .adapters import adapter_state
from .rope import varying_rope
from .structure import attributes_of

_training = attrgetter("training")
_children = attrgetter("_modules")
Slots = Sequence[tuple[dict[str, Any], str]]


class Watch:
    """What can be seen of a model without reading it: which objects it is made of, and how many of each.

    Args:
        model: as it is now. When `structure` is no more what it was, make a new watch.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = list(model.modules())
        varies = varying_rope(model.config.get_text_config(decoder=True)) is not None
        self._parts: Slots = [
            (slots, name)
            for module in self._modules
            for slots in (module._modules, module._parameters, module._buffers)
            for name in slots
            if not (varies and name.endswith("inv_freq"))
        ]
        self._sizes = [
            slots
            for module in self._modules
            for slots in (module._modules, module._parameters, module._forward_hooks, module._forward_pre_hooks)
        ]
        self._sizes += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._classes = list({type(module) for module in self._modules})
        self._dicts = [module.__dict__ for module in self._modules]
        self._attributes: Slots = [
            (module.__dict__, name)
            for module in self._modules
            if not (varies and type(module).__name__.endswith("RotaryEmbedding"))
            for name in attributes_of(module)
        ]
        self._containers = [
            slots[name] for slots, name in self._attributes if isinstance(slots[name], dict | list | set)
        ]
        configs = (model.config, *(getattr(module, "config", None) for module in self._modules))
        found = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
        text = model.config.get_text_config(decoder=True)
        self._configs = list((found | {id(text): text}).values())

    def structure(self) -> tuple[Any, ...]:
        """Changes with a module, a parameter, a hook, a replaced forward, train(), an adapter, or a precision."""
        return (
            [id(slots.get(name)) for slots, name in self._parts],
            list(map(len, self._sizes)),
            list(map(len, self._dicts)),
            list(map(_training, self._modules)),
            list(map(id, map(_children, self._modules))),
            [id(getattr(kind, "forward", None)) for kind in self._classes],
            adapter_state(self._modules),
            precision(),
        )

    def settings(self) -> tuple[Any, ...]:
        """Changes with a plain attribute of a module, or a configuration."""
        return (
            [id(slots.get(name)) for slots, name in self._attributes],
            [container.copy() for container in self._containers],
            [_config_state(config) for config in self._configs],
        )


def _config_state(config: PreTrainedConfig) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in config.__dict__.items()}


def precision() -> tuple[str, ...]:
    """How PyTorch computes now: the caller's autocast, and switches that trade bits for speed."""
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    casts = [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in kinds]
    reduced = str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)
    return (*casts, *_float32_matmuls(), reduced)


def _float32_matmuls() -> tuple[str, ...]:
    cuda = torch.backends.cuda.matmul
    if not hasattr(cuda, "fp32_precision"):  # PyTorch 2.8
        return torch.get_float32_matmul_precision(), str(cuda.allow_tf32)
    # The older names, which set these, raise where a user has set these directly.
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a stub lacks it
    both = (cuda.fp32_precision, cpu.fp32_precision)
    return tuple("ieee" if how == "none" else how for how in both)
