"""Interface and arguments of a cache, as the patches know it, and the scope and compile stance of a forward pass."""

from __future__ import annotations

import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from .tap import RotaryTap

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the argument that holds the cache: since transformers 5.24, and before."""


def arguments_by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the signature of the called function."""
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def follows_cache(ids: torch.Tensor, mask: object) -> bool:
    """Return whether ids for `generate()`, `[batch, n]`, are only the tokens that follow those of the cache.

    As in transformers, the attention mask tells it: it covers all tokens.
    """
    return isinstance(mask, torch.Tensor) and mask.ndim == ids.ndim == 2 and mask.shape[1] > ids.shape[1]


class ServedCache(ABC):
    """Cache that runs the passes that it is used in."""

    is_followed = False
    """True if the last `generate()` got only the tokens that follow those of the cache. It drops a mask of ones."""

    @abstractmethod
    def run(self, attachment: object, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the attached model; `kwargs` holds all its arguments by name."""

    @abstractmethod
    def continue_with(self, input_ids: torch.Tensor, copies: int, mask: torch.Tensor | None) -> None:
        """Prepare for `generate()` with `copies` of each of these ids, `[batch, n]`: drop what does not match them.

        `mask` is their attention mask, or None if it is not known. See `follows_cache`.
        """

    @abstractmethod
    def end_generation(self, is_complete: bool = True) -> None:
        """Handle the end of `generate()`, which may have failed."""

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""


class Session(Protocol):
    """Supplier of caches for `generate()` calls of a model that bring none."""

    def call(self, setting: str = "", value: Any = None) -> AbstractContextManager[ServedCache | None]:
        """Enclose one call, and count it whether or not it uses the store.

        Args:
            setting: Name of the argument that excludes a cache of the session, or "".
            value: Value of that argument.

        Returns:
            A context manager that yields the call's cache, or None if a setting is given.
        """

    def batching(self, create: Callable[[], Any]) -> Any:
        """Return the manager of continuous batching that `create` makes, with the store behind its pages."""


class AttentionCall(NamedTuple):
    """Call of the attention function of a layer.

    Args:
        query: `[batch, heads, n, dim]`, rotated.
        keys: `[batch, kv_heads, positions, dim]`, rotated, as returned by the layer's cache.
        values: Like `keys`.
        mask: Attention mask of the queries, with the sizes announced for the pass; None if there is none.
        scaling: Scale of the logits; None for dim ** -0.5.
        is_plain: Whether the logits depend on nothing else, and the mask only hides positions.
        softcap: Bound of the logits (Gemma 2), which are softcap * tanh(logits / softcap); None if there is none.
        sinks: Additional logit of each query head, `[heads]`, without a value (gpt-oss); None if there are none.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    is_plain: bool = True
    softcap: float | None = None
    sinks: torch.Tensor | None = None


Attended = AttentionCall | torch.Tensor
"""Keys, values and mask of what queries attend to, or the attention output, `[batch, heads, n, dim]`."""


@dataclass(eq=False)
class Scope:
    """State of one forward pass with one of our caches.

    Args:
        cache: Cache of the pass.
        tap: Rotations observed by the rotary patch.
        positions: Padded positions of the queries if they are not a plain suffix, else None: int64 `[queries]`, or
            `[batch, queries]` if rows have different ones. Index tensors are on the model's device.
        hidden_indexes: For each layer that computes fewer positions than the one before, the indexes of that layer's
            hidden states that it keeps. Shapes as for `positions`.
        query_indexes: For each layer that computes fewer positions than the first one, the indexes of the first layer's
            queries that it has. Shapes as for `positions`.
        recompute_lengths: For each layer, the number of its queries that belong to a recomputed prefix: the first ones,
            at the first positions. Masks and `positions` cover only the other queries. () if no layer has any.
    """

    cache: object
    tap: RotaryTap
    positions: torch.Tensor | None = None
    hidden_indexes: dict[int, torch.Tensor] = field(default_factory=dict)
    query_indexes: dict[int, torch.Tensor] = field(default_factory=dict)
    recompute_lengths: tuple[int, ...] = ()
    captures: bool = True
    """True if layers pass their new keys and values to this pass, so that it has to know how they are rotated."""
    selects: bool = False
    """True if `attend` determines what queries attend to."""
    folds: bool = False
    """True if the query heads of a KV head may be folded into one batch of queries, which changes rounding."""
    preview_layer: int | None = None
    """Layer that is first run up to its attention, which may reduce what it computes, or None."""
    observer: Any = None
    """Observer of the queries (`SampledPass`), or None. It sees plain calls of the attention function only."""
    masks: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Masks of this pass: those that the model's mask functions returned, and what layers with fewer queries get."""

    def attend(self, layer: int, call: AttentionCall) -> Attended:
        """Return what the queries of a layer attend to, or the attention output if attention is computed here."""
        return call

    def preview(self, layer: int, run: Callable[[], object]) -> None:
        """Preview the `preview_layer`: `run` runs it on what the layer before has computed."""

    def recompute_mask(self, layer: int, device: torch.device) -> torch.Tensor | None:
        """Return the mask of a layer's recomputed prefix, bool `[1, 1, queries, positions]`; None if plainly causal."""
        return None


_current: ContextVar[Scope | None] = ContextVar("hf_tiered_cache_scope", default=None)


current: Callable[[], Scope | None] = _current.get
"""Function that returns the scope of this thread's pass, or None. It runs at every layer and token, so it is a C
function."""


enter: Callable[[Scope], Token[Scope | None]] = _current.set
"""Function that makes a scope the current one, and returns a token for `leave_to`."""
leave_to: Callable[[Token[Scope | None]], None] = _current.reset
"""Function that makes the scope before `enter` the current one again."""


def leave(cache: object) -> None:
    """Clear this thread's scope if it belongs to `cache`, for example after an interrupted pass."""
    scope = _current.get()
    if scope is not None and scope.cache is cache:
        _current.set(None)


class _EagerStance(AbstractContextManager[Any]):
    """Context that sets PyTorch's compile stance to eager.

    PyTorch has one stance for all threads: the first of our passes sets it, and the last one resets it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._passes:
                self._stance = torch.compiler.set_stance("force_eager")
            self._passes += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._passes -= 1
            if not self._passes:
                self._stance.__exit__(None, None, None)


EAGER_STANCE = _EagerStance()
