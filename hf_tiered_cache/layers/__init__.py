"""Cache layers that provide each layer's keys and values, one file for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedModelError
from .dense import DenseSource, LayerTensors, SlidingSource
from .selected import SelectedSource

__all__ = [
    "DenseSource",
    "LayerTensors",
    "LayeredCache",
    "SelectedSource",
    "SlidingSource",
    "kv_sources",
    "sources_for",
]

_DummyLayer = getattr(cache_utils, "DummyLayer", ())  # since transformers 5.19: layers that share another layer's KV


def sources_for(model: PreTrainedModel, full: Callable[[int], DenseSource]) -> list[Any]:
    """Create a cache layer for each of the model's layers, of the kinds that a `DynamicCache` would use.

    `full` creates that of a layer with full attention, given its index. Where a layer shares another layer's KV,
    transformers' own dummy layer is used. Raises UnsupportedModelError if a layer keeps state other than KV of tokens.
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


class LayeredCache(Protocol):
    """Cache with layers as `sources_for` creates them."""

    @property
    def layers(self) -> Sequence[Any]:
        """Layers, one per model layer."""

    @property
    def kv_sources(self) -> list[DenseSource]:
        """Layers that hold KV of their own."""

    def get_seq_length(self) -> int:
        """Return the number of cached positions."""


def kv_sources(layers: Sequence[Any]) -> list[DenseSource]:
    """Return the cache layers that hold KV of their own."""
    return [layer for layer in layers if isinstance(layer, DenseSource)]


def _stateful(name: str, layer: int, state: str) -> str:
    return (
        f"layer {layer} of {name} keeps {state}, which exists for one position of the sequence only and cannot be "
        "stored in chunks of tokens; use DynamicCache with this model"
    )
