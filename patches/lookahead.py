"""Prediction of queries: an earlier layer's hidden states give approximately the queries of a later layer.

From one layer to the next, hidden states change little. Those of an earlier layer, passed through a later layer's own
norm, query projection and rotation, give nearly its queries (InfiniGen, Lee et al., OSDI 2024). Here the later layer's
own forward runs up to its attention function, which records the queries and stops, so no model family needs its own
code.
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

from .layers import has_no_side_effects, with_copied_states
from .rope import RotaryTap
from .scope import QueryObserver, Scope, current, enter, leave_to

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True, eq=False)
class PredictedQuery:
    """Predicted queries of a layer.

    Args:
        query: `[batch, heads, n, dim]`, rotated.
        own_keys: `[batch, kv_heads, n, dim]`, rotated: predicted keys of the same tokens.
        scaling: Scale of the logits; None for dim ** -0.5.
    """

    query: torch.Tensor
    own_keys: torch.Tensor
    scaling: float | None


class LookAhead:
    """Prediction of queries within one pass.

    Args:
        scope: Scope of the pass.
        layers: Decoder layers of the model.
        query_layers: Layers with predicted queries, ascending. The model passes the same arguments to all of them.
        distance: Number of query layers from a prediction to its layer; fewer for the first ones.
        targets: Layers of `query_layers` to predict; None for all.
    """

    def __init__(
        self,
        scope: Scope,
        layers: nn.ModuleList,
        query_layers: Sequence[int],
        distance: int,
        targets: Collection[int] | None = None,
    ) -> None:
        self._scope, self._layers = scope, layers
        self._source = {
            layer: query_layers[max(0, place - distance)]
            for place, layer in enumerate(query_layers)
            if place and (targets is None or layer in targets)
        }
        self._arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # arguments of the source layers
        self._predicted: dict[int, PredictedQuery | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the arguments that the model passes to its layers, within this context."""
        sources = dict.fromkeys(self._source.values())
        handles = [self._layers[i].register_forward_pre_hook(self._note(i), with_kwargs=True) for i in sources]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._arguments.clear()

    def after(self, layer: int) -> list[int]:
        """Return the layers with queries that can be predicted once `layer` has begun, and not before."""
        return [target for target, source in self._source.items() if source == layer]

    def query(self, layer: int) -> PredictedQuery | None:
        """Return the prediction for a layer; None if its source layer has not begun, or it cannot be predicted."""
        if layer not in self._predicted and self._source.get(layer) in self._arguments:
            self._predicted[layer] = self._predict(layer)
            if self.after(source := self._source[layer])[-1] == layer:
                del self._arguments[source]  # the targets of a source are requested in order
        return self._predicted.get(layer)

    def _note(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            # a pass of another thread may call a hook that is being added or removed without keyword arguments
            if kwargs is not None and current() is self._scope:
                self._arguments[layer] = args, kwargs

        return hook

    def _predict(self, layer: int) -> PredictedQuery | None:
        module, (args, kwargs) = self._layers[layer], self._arguments[self._source[layer]]
        if not has_no_side_effects(module):
            return None
        args, kwargs = _without_cache(args, kwargs)
        recorder = _QueryRecorder()
        token = enter(Scope(self._scope.cache, RotaryTap(), observer=recorder))
        try:
            with torch.no_grad():
                module.forward(*args, **kwargs)
        except _AttentionReached:
            return recorder.prediction
        except Exception as error:
            logger.info("the queries of layer %d cannot be predicted: %s: %s", layer, type(error).__name__, error)
        finally:
            leave_to(token)
        return None


class _AttentionReached(Exception):
    """Signal that a layer has reached its attention."""


class _QueryRecorder(QueryObserver):
    """Observer that records the queries and stops the layer. Without a cache, its keys are those of the same tokens."""

    prediction: PredictedQuery | None = None

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float | None) -> None:
        self.prediction = PredictedQuery(query, keys, scaling)
        raise _AttentionReached


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments without its cache, and with a copy of the hidden states."""
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    return with_copied_states(args, kwargs)
