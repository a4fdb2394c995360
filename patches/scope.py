"""The forward pass under way in this thread, for the patches to find."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

if TYPE_CHECKING:
    from .rotary import RotaryTap


class Replacement:
    """Stands in for a function of transformers, or a method of a model, while a model is attached.

    Args:
        original: what it stands in for, and computes the same as.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(cast(Callable[..., Any], self), original)
        self.original = original


class QueryObserver(Protocol):
    """Is told the queries of one pass, layer by layer, before they attend; it changes nothing.

    Told are layers that attend through the registered function, by queries and keys alone: a mask that adds to logits,
    or a bias by position, would make their attention another.
    """

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float | None) -> None:
        """A layer's queries, `[batch, heads, n, dim]`, rotated, of the columns that it computes.

        Args:
            keys: `[batch, kv_heads, columns, dim]`, rotated: what its cache has handed over.
            scaling: of the logits; None for dim ** -0.5.
        """


@dataclass(eq=False)
class Scope:
    """One forward pass with one of our caches.

    Args:
        cache: the cache that this pass serves.
        tap: what the rotary patch has seen.
        positions: columns of the queries, int64 `[queries]`, or `[batch, queries]` where rows have their own, if they
            are no plain suffix; else None. Such tensors of indices lie on the model's device.
        kept: for layers that compute fewer columns than the one before, which of its hidden states they keep: likewise.
        visible: which columns queries may attend to at all, bool `[batch, columns]`; None: as the model's mask says.
        rows: for layers that compute fewer columns than the first one, which of its queries are theirs: likewise.
        fronts: for each layer how many of its queries, the first ones, stand at the first columns, one after the other;
            masks and `positions` are of the others alone. () where no layer has such.
    """

    cache: object
    tap: RotaryTap
    positions: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    fronts: tuple[int, ...] = ()
    selects: bool = False
    """Whether `attend` says what queries attend to."""
    observer: QueryObserver | None = None
    """Who wants to see the queries, if anybody."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """What a layer's queries, `[batch, heads, n, dim]`, attend to, given what its cache has handed over.

        Or what they get of it, `[batch, heads, n, dim]`, where attention is done already.
        """
        return keys, values

    def peeks_at(self, layer: int) -> bool:
        """Whether a layer first runs up to its attention, which may say that it computes fewer columns."""
        return False

    def peek(self, layer: int, run: Callable[[], object]) -> None:
        """Let it: `run` runs the layer on what the one before has computed."""

    def front_mask(self, layer: int, device: torch.device) -> torch.Tensor | None:
        """The mask of a layer's front, bool `[1, 1, queries, columns]`; None where that is causal and no more."""
        return None


def on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on `device`: itself, but where a model's layers lie on several."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def picked(tensor: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Some of what stands along a dimension.

    Args:
        tensor: `[batch or 1, ...]`.
        index: int64 `[n]`, or `[batch, n]` for each row of the batch its own.
        dim: behind the batch's.
    """
    index = on(tensor.device, index)
    if index.ndim == 1:
        return tensor.index_select(dim, index)
    rows, count = len(index), tensor.shape[dim]
    wide = tensor.expand(rows, *tensor.shape[1:]).movedim(dim, 1)
    flat = index + torch.arange(0, rows * count, count, device=index.device).unsqueeze(1)
    return wide.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape).movedim(1, dim)


_current: ContextVar[Scope | None] = ContextVar("hf_tiered_cache_scope", default=None)


current: Callable[[], Scope | None] = _current.get
"""Gives the pass under way in this thread, or None. Asked at every layer and token, so it is no Python function."""


def leave(cache: object) -> None:
    """No pass with this cache is under way in this thread, whatever was interrupted on the way out of one."""
    scope = _current.get()
    if scope is not None and scope.cache is cache:
        _current.set(None)


@contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the current one."""
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)
