"""Noticing, at every pass, that a model may compute something else than before."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from .adapters import adapter_state, tuner_layers
from .rope import varying_rope
from .structure import attributes_of

_training = attrgetter("training")
_children = attrgetter("_modules")


class Watch:
    """What can be seen of a model without reading it: which objects it is made of, and how many of each.

    It keeps these objects, so that none that comes later can have the address of one that is gone.

    Args:
        model: as it is now.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = list(model.modules())
        varies = varying_rope(model.config.get_text_config(decoder=True)) is not None
        self._parts = _Slots(
            (slots, name)
            for module in self._modules
            for slots in (module._modules, module._parameters, module._buffers)
            for name in slots
            if not (varies and name.endswith("inv_freq"))
        )
        self._attributes = _Slots(
            (module.__dict__, name)
            for module in self._modules
            if not (varies and type(module).__name__.endswith("RotaryEmbedding"))
            for name in attributes_of(module)
        )
        self._filled = [
            *(slots for module in self._modules for slots in (module._modules, module._parameters, module.__dict__)),
            *(hooks for module in self._modules for hooks in (module._forward_hooks, module._forward_pre_hooks)),
            *(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks),
        ]
        self.tuned = [layer for _, layer in tuner_layers(model)]
        """Layers that an adapter wraps."""
        self._slots = list(map(_children, self._modules))
        self._forwards = {kind: getattr(kind, "forward", None) for kind in map(type, self._modules)}
        self._containers = [value for value in self._attributes.values if isinstance(value, dict | list | set)]
        configs = (model.config, *(getattr(module, "config", None) for module in self._modules))
        found = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
        text = model.config.get_text_config(decoder=True)
        self._configs = list((found | {id(text): text}).values())
        self._structure, self._settings = self._read_structure(), self._read_settings()

    def sees_another_structure(self) -> bool:
        """Whether there is another module, parameter, hook, forward, mode, adapter or precision: then watch anew."""
        return not (
            self._parts.hold()
            and all(map(is_, self._slots, map(_children, self._modules)))
            and all(getattr(kind, "forward", None) is forward for kind, forward in self._forwards.items())
            and self._read_structure() == self._structure
        )

    def sees_other_settings(self) -> bool:
        """Whether a plain attribute of a module, or a configuration, is another: then watch anew."""
        return not (self._attributes.hold() and self._read_settings() == self._settings)

    def _read_structure(self) -> tuple[Any, ...]:
        modes = list(map(_training, self._modules))
        return list(map(len, self._filled)), modes, adapter_state(self.tuned), precision()

    def _read_settings(self) -> tuple[Any, ...]:
        return [container.copy() for container in self._containers], list(map(_config_state, self._configs))


class _Slots:
    """Places in dictionaries, and the objects that were there."""

    def __init__(self, places: Iterable[tuple[dict[str, Any], str]]) -> None:
        found = list(places)
        self._dicts, self._names = [slots for slots, _ in found], [name for _, name in found]
        self.values = list(map(dict.get, self._dicts, self._names))

    def hold(self) -> bool:
        """Whether the same objects are still there."""
        return all(map(is_, self.values, map(dict.get, self._dicts, self._names)))


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
