"""Selectors and decode indexes: choose, within a token budget, the stored tokens that queries attend to."""

from __future__ import annotations

from inspect import isabstract

from ..plugins import Registry, ignored_member
from .clusters import ClusterBoxIndex, ClusterIndex
from .decode_index import DecodeIndex


def _fault(name: str, part: object) -> str:
    if not (isinstance(part, type) and issubclass(part, DecodeIndex)):
        return f"it is not a subclass of DecodeIndex: {part!r}"
    missing = ", ".join(sorted(getattr(part, "__abstractmethods__", ())))
    if isabstract(part):
        return f"it lacks {missing}"
    if "__dataclass_fields__" not in vars(part):
        return "it is not a dataclass; decorate it with @dataclass(frozen=True, eq=False)"
    return ignored_member(part)


DECODE_INDEXES: Registry[type[DecodeIndex]] = Registry(
    "index", "hf_tiered_cache.indexes", {"clusters": ClusterIndex, "cluster_boxes": ClusterBoxIndex}, _fault
)
"""Index types by name, those of plug-ins included."""


def register_index(name: str, kind: type[DecodeIndex]) -> None:
    """Add an index type: `KVDrive(index=name)` uses it.

    Raises:
        ConfigError: The name is invalid or taken, or `kind` is not a complete subclass of `DecodeIndex`.
    """
    DECODE_INDEXES.register(name, kind)


__all__ = ["DECODE_INDEXES", "DecodeIndex", "register_index"]
