"""Codecs that encode the tensors of a block. Each codec is one class and one entry of `CODECS`."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch

from ...errors import ConfigError, unknown_name, with_type
from ...plugins import Registry
from .base import Codec, Field, Fp8, Int8, Raw, checked_decode, checked_encode
from .pairs import Direction


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
        checked_decode(codec, checked_encode(codec, tensor), tensor.dtype, tensor.shape[-1])
    except ConfigError as error:
        return str(error)
    except Exception as error:  # whatever a plug-in raises
        return f"it cannot encode and decode a tensor {list(tensor.shape)}: {type(error).__name__}: {error}"
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
    "checked_decode",
    "checked_encode",
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
        ConfigError: There is no such codec, or `name` is a codec itself.
    """
    try:
        return _codec(name)
    except (KeyError, TypeError):  # unknown, or not a name at all
        if isinstance(name, str):
            raise ConfigError(f"{unknown_name('codec', name, CODECS)}. Another package may register more") from None
        advice = ""
        if hasattr(name, "encode"):
            registered = "an instance of it" if isinstance(name, type) else "it"
            advice = f"; register {registered} with register_codec(...), and pass its name"
            advice += f", codec={name.name!r}" if isinstance(getattr(name, "name", None), str) else ""
        names = ", ".join(CODECS)
        raise ConfigError(f"codec must be a name, one of {names}, not {with_type(name)}{advice}") from None


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
