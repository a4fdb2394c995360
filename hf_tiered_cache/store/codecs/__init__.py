"""Codecs that encode the tensors of a block. Each codec is one module and one entry of `CODECS`."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch

from ...errors import ConfigError
from ...plugins import Registry
from .base import Codec, Field, Raw
from .pairs import Direction
from .scaled import Fp8, Int8


def _fault(name: str, part: object) -> str:
    if isinstance(part, type):
        return "it is a class; pass an instance"
    if missing := [key for key in ("name", "lossless", "fields", "encode", "decode") if not hasattr(part, key)]:
        return f"it lacks {', '.join(missing)} (see `Codec`)"
    codec = cast(Codec, part)
    if codec.name != name:
        return f"its name is {codec.name!r}"
    if codec.lossless:
        return "it is lossless, and only raw may be: exact KV is stored unchanged"
    return _fault_in_use(codec)


def _fault_in_use(codec: Codec) -> str:
    """Return what is wrong with a codec by encoding and decoding a small tensor, or ""."""
    tensor = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 64)
    try:
        fields, encoded = codec.fields(tensor.dtype, 64), codec.encode(tensor)
        if not isinstance(encoded, tuple):
            return f"encode returns {type(encoded).__name__}, not a tuple of tensors"
        wanted = [(field.dtype, (2, 3, field.dim)) for field in fields]
        if (made := [(each.dtype, tuple(each.shape)) for each in encoded]) != wanted:
            return f"encode returns {made} for a tensor {tuple(tensor.shape)}, and fields says {wanted}"
        decoded = codec.decode(encoded, tensor.dtype)
    except Exception as error:  # whatever a plug-in raises
        return f"it cannot encode and decode a tensor {tuple(tensor.shape)}: {type(error).__name__}: {error}"
    if decoded.shape != tensor.shape or decoded.dtype != tensor.dtype:
        return f"decode returns {decoded.dtype} {tuple(decoded.shape)} for {tensor.dtype} {tuple(tensor.shape)}"
    return ""


_BUILT_IN: tuple[Codec, ...] = (Raw(), Int8(), Fp8())
CODECS: Registry[Codec] = Registry(
    "codec", "hf_tiered_cache.codecs", {codec.name: codec for codec in _BUILT_IN}, _fault
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
        known = ", ".join(CODECS)
        raise ConfigError(f"unknown codec {name!r}; there are: {known}. Another package may register more") from None


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
