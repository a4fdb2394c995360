"""Attaching to a model: its passes with a cache of ours go through that cache. `detach` puts everything back."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from . import rotary
from .layers import decoder_layers

_ATTRIBUTE = "_hf_tiered_cache"


class ServedCache(ABC):
    """A cache that wants to see the passes it is used in."""

    @abstractmethod
    def run(self, attachment: Attachment, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the attached model; `kwargs` holds all its arguments by name."""

    @abstractmethod
    def check_continues(self, input_ids: torch.Tensor) -> None:
        """`generate()` begins with these ids, `[batch, n]`: raise CacheMismatchError if this cache holds others."""


class Attachment:
    """What `attach` did to one model.

    Args:
        model: a decoder-only transformers model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.extras: dict[str, Any] = {}
        """What users of the attachment keep with it; closed, where it can be, and forgotten with `detach`."""
        self._before = {name: model.__dict__.get(name) for name in ("forward", "prepare_inputs_for_generation")}
        self.signature = inspect.signature(model.forward)
        self._devices: list[torch.device] = []
        self._handles = rotary.watch_tables(model)
        self._functions = rotary.rotary_functions(model)
        for module, name in self._functions:
            rotary.patch_function(module, name)
        model.forward = _Forward(self, model.forward)
        if hasattr(model, "prepare_inputs_for_generation"):
            model.prepare_inputs_for_generation = _PrepareInputs(self, model.prepare_inputs_for_generation)

    def undo(self) -> None:
        """Leave the model exactly as it was."""
        for name, value in self._before.items():
            if value is not None:
                setattr(self.model, name, value)
            else:
                self.model.__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        for module, name in self._functions:
            rotary.unpatch_function(module, name)
        for extra in self.extras.values():
            if hasattr(extra, "close"):
                extra.close()

    def device_of(self, layer: int) -> torch.device:
        """Where a layer computes, also if its weights are elsewhere between passes (accelerate)."""
        if not self._devices:
            count = self.config.num_hidden_layers
            try:
                self._devices = [_device(module) for module in decoder_layers(self.model, count)]
            except UnsupportedModelError:
                self._devices = [self.model.device] * count
        return self._devices[layer]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an attached model is a model that is not attached."""
        return None


class _Wrapper:
    """A bound method of the model, wrapped. In a deep copy of the model it is the copy's own method again."""

    def __init__(self, attachment: Attachment, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self.attachment = attachment
        self.method = method

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self.attachment.model)]
        return getattr(type(twin), self.method.__name__).__get__(twin)


class _Forward(_Wrapper):
    """The model's forward: passes with a cache of ours are handed to that cache."""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = _by_name(self.attachment.signature, args, kwargs)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, ServedCache):
            return cache.run(self.attachment, self.method, kwargs)
        return self.method(**kwargs)


class _PrepareInputs(_Wrapper):
    """Where `generate()` still has the whole prompt: a cache that holds another one is refused, not continued."""

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        first = kwargs.get("is_first_iteration") and kwargs.get("inputs_embeds") is None
        if first and kwargs.get("next_sequence_length") is not None and isinstance(cache, ServedCache):
            cache.check_continues(input_ids)
        return self.method(input_ids, *args, **kwargs)


def _device(module: nn.Module) -> torch.device:
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        device = next((p.device for p in module.parameters() if p.device.type != "meta"), "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _by_name(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers (PEFT adapters, `torch.compile`).

    Raises:
        UnsupportedModelError: there is none, or it is wrapped in a way that changes what its KV depends on.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if hasattr(model, "_orig_mod"):
        return base_model(model._orig_mod)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            "prompt-learning adapters put KV of their own in front of the prompt, which stored prefixes do not know; "
            "use a LoRA-style adapter or a DynamicCache"
        )
    if callable(getattr(model, "get_base_model", None)):
        return base_model(model.get_base_model())
    raise UnsupportedModelError(f"{type(model).__name__} is no transformers model; pass the model that has generate()")


def attach(model: nn.Module) -> Attachment:
    """Let `model` serve caches of ours. Does nothing if it does already; `detach` undoes it."""
    model = base_model(model)
    found = attachment_of(model)
    if found is None:
        found = Attachment(model)
        model.__dict__[_ATTRIBUTE] = found
    return found


def detach(model: nn.Module) -> None:
    """Leave `model` exactly as it was before `attach`; does nothing if it is not attached."""
    model = base_model(model)
    found = attachment_of(model)
    if found is not None:
        found.undo()
        del model.__dict__[_ATTRIBUTE]


def attachment_of(model: nn.Module) -> Attachment | None:
    """What `attach` did to `model`, or None."""
    return base_model(model).__dict__.get(_ATTRIBUTE)
