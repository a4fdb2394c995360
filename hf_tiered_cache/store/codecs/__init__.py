"""Codecs that encode the tensors of a block. Each codec is one module and one entry of `CODECS`."""

from __future__ import annotations

from functools import lru_cache

from ...errors import ConfigError
from ...plugins import Registry
from .base import Codec, Field, Raw
from .pairs import Direction
from .scaled import Fp8, Int8


def _fault(name: str, part: object) -> str:
    if isinstance(part, type):
        return "it is a class; give an instance"
    if missing := [key for key in ("name", "lossless", "fields", "encode", "decode") if not hasattr(part, key)]:
        return f"it lacks {', '.join(missing)} (see `Codec`)"
    return "" if part.name == name else f"its name is {part.name!r}"  # type: ignore[attr-defined]


_BUILT_IN: tuple[Codec, ...] = (Raw(), Int8(), Fp8())
CODECS: Registry[Codec] = Registry(
    "codec", "hf_tiered_cache.store.codecs", {codec.name: codec for codec in _BUILT_IN}, _fault
)
"""Codecs by name, those of plug-ins included."""
RAW = Raw.name
_DIRECTION = Direction()

__all__ = [
    "CODECS",
    "RAW",
    "Codec",
    "Field",
    "codec_in",
    "coded_provenance",
    "make_codec",
    "merged_codec",
    "register_codec",
]


def register_codec(codec: Codec) -> None:
    """Add a codec: `KVStore(codec=codec.name)` uses it. Reading its segments needs it, too.

    Raises:
        ConfigError: The name is invalid or taken, or `codec` lacks members of `Codec`.
    """
    CODECS.register(getattr(codec, "name", ""), codec)


def make_codec(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        ConfigError: there is no such codec.
    """
    try:
        return _codec(name)
    except (KeyError, TypeError):  # unknown, or not a name at all
        raise ConfigError(f"unknown codec {name!r}; there are: {', '.join(CODECS)}") from None


@lru_cache
def _codec(name: str) -> Codec:
    """Return `CODECS[name]`, which is looked up for each tensor of each block group."""
    return CODECS[name]


def merged_codec(name: str) -> Codec:
    """Return the codec of merged layers in a segment with the given codec.

    It encodes the shared direction, and a factor for each layer (see `pairs.py`).
    """
    return _DIRECTION if name == RAW else make_codec(name)


def coded_provenance(provenance: str, codec: str) -> str:
    """Return the provenance of KV that is stored with `codec`.

    The name of a lossy codec is appended, so that look-ups for exact KV do not match it.
    """
    return provenance if make_codec(codec).lossless else f"{provenance} {codec}"


def codec_in(provenance: str) -> str:
    """Return the name of the lossy codec in a provenance, or `RAW`."""
    last = provenance.rpartition(" ")[2]
    return last if last in CODECS and not CODECS[last].lossless else RAW
