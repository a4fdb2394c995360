"""Queries ahead of their layer: hidden states on their way to a layer say what it is going to ask.

From one layer to the next hidden states change little. An earlier layer's, put through a later layer's own norm, query
projection and rotation, give nearly the queries that it will have (InfiniGen, Lee et al., OSDI 2024). Here the later
layer's forward itself is run, up to its attention function, which keeps the queries and goes no further: so no family
needs code of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache

from .layers import again, runs_unnoticed
from .rotary import RotaryTap
from .scope import QueryObserver, Scope, current, entered

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True, eq=False)
class PredictedQuery:
    """The queries that a layer is expected to have.

    Args:
        query: `[batch, heads, n, dim]`, rotated.
        own_keys: `[batch, kv_heads, n, dim]`, rotated: the keys of the same tokens, expected likewise.
        scaling: of the logits; None for dim ** -0.5.
    """

    query: torch.Tensor
    own_keys: torch.Tensor
    scaling: float | None


class LookAhead:
    """Predicts queries within one pass.

    Args:
        scope: the pass.
        layers: the model's decoder layers.
        asking: the layers whose queries are predicted, ascending. The model gives them all the same arguments.
        distance: by so many of `asking` the prediction precedes the layer; for the first ones by fewer.
        opaque: layers that cannot be run this way, which are added here and not tried again.
        targets: those of `asking` that are to be predicted; None for all.
    """

    def __init__(
        self,
        scope: Scope,
        layers: nn.ModuleList,
        asking: Sequence[int],
        distance: int,
        opaque: set[int],
        targets: Collection[int] | None = None,
    ) -> None:
        self._scope, self._layers, self._opaque = scope, layers, opaque
        self._source = {
            layer: asking[max(0, place - distance)]
            for place, layer in enumerate(asking)
            if place and (targets is None or layer in targets)
        }
        self._seen: dict[int, tuple[tuple, dict[str, Any]]] = {}  # what the sources were called with
        self._predicted: dict[int, PredictedQuery | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this, what the model hands to its layers is noted."""
        sources = dict.fromkeys(self._source.values())
        handles = [self._layers[i].register_forward_pre_hook(self._note(i), with_kwargs=True) for i in sources]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def after(self, layer: int) -> list[int]:
        """The layers whose queries can be predicted when `layer` has begun, and not before."""
        return [target for target, source in self._source.items() if source == layer]

    def query(self, layer: int) -> PredictedQuery | None:
        """What is predicted for a layer; None if its source has not begun, or it cannot be predicted."""
        if layer not in self._predicted and self._source.get(layer) in self._seen:
            self._predicted[layer] = None if layer in self._opaque else self._predict(layer)
            if self.after(source := self._source[layer])[-1] == layer:
                del self._seen[source]  # these ask one after another
        return self._predicted.get(layer)

    def _note(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
            # another thread's pass may use the same model, and call a hook that comes or goes without keywords
            if kwargs is not None and current() is self._scope:
                self._seen[layer] = args, kwargs

        return hook

    def _predict(self, layer: int) -> PredictedQuery | None:
        module, (args, kwargs) = self._layers[layer], self._seen[self._source[layer]]
        if not runs_unnoticed(module):
            return None
        args, kwargs = _again(args, kwargs)
        peek = _Peek()
        try:
            with torch.no_grad(), entered(Scope(self._scope.cache, RotaryTap(), observer=peek)):
                module.forward(*args, **kwargs)
        except _Asked:
            return peek.found
        except Exception as error:
            logger.info("the queries of layer %d cannot be predicted: %s: %s", layer, type(error).__name__, error)
        self._opaque.add(layer)
        return None


class _Asked(Exception):
    """A layer has got as far as its attention."""


class _Peek(QueryObserver):
    """Keeps the queries, and ends the layer there. Without a cache its keys are those of the same tokens."""

    found: PredictedQuery | None = None

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float | None) -> None:
        self.found = PredictedQuery(query, keys, scaling)
        raise _Asked


def _again(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A layer's arguments without its cache, and with hidden states of their own."""
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    return again(args, {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()})
