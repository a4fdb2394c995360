"""Where each layer's keys and values come from: a source for each, one file for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedModelError
from .base import KVSource, LayerTensors, RestoringPass
from .dense import DenseSource, SlidingSource
from .selected import SelectedSource

__all__ = [
    "DenseSource",
    "KVSource",
    "LayerTensors",
    "RestoringPass",
    "SelectedSource",
    "SlidingSource",
    "kv_sources",
    "sources_for",
]

_DummyLayer = getattr(cache_utils, "DummyLayer", ())  # since transformers 5.19: layers that use another's KV


def sources_for(model: PreTrainedModel, full: Callable[[int], DenseSource]) -> list[Any]:
    """A source for each of the model's layers, of the kind of layer that a `DynamicCache` for it would have.

    Args:
        model: a decoder-only causal LM (see `check_causal`).
        full: makes those of layers with full attention, given their index.

    Raises:
        UnsupportedModelError: some layer keeps state that is no KV of single tokens.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    layers: list[Any] = []
    kinds = getattr(config, "layer_types", None)
    for index, like in enumerate(DynamicCache(config=config).layers):
        if type(like) is DynamicLayer:
            layers.append(full(index))
        elif type(like) is DynamicSlidingWindowLayer:
            layers.append(SlidingSource(index, like.sliding_window))
        elif isinstance(like, _DummyLayer):
            layers.append(like)
        else:
            kind = kinds[index] if kinds else type(like).__name__
            raise UnsupportedModelError(_stateful(name, index, f"state of kind {kind!r}"))
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(_stateful(name, 0, "a recurrent state"))
    return layers


def kv_sources(layers: Sequence[Any]) -> list[DenseSource]:
    """The sources among a cache's layers; others have no KV of their own."""
    return [layer for layer in layers if isinstance(layer, DenseSource)]


def _stateful(name: str, layer: int, what: str) -> str:
    return (
        f"layer {layer} of {name} keeps {what}, which exists at one point of the sequence only and cannot be stored in "
        "chunks of tokens; use DynamicCache with this model"
    )
