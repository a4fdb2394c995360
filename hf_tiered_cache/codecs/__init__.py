"""How the tensors of a block become bytes. One file and one row in `CODECS` each; knows nothing of blocks."""

from __future__ import annotations

from ..errors import ConfigError
from .base import Codec, Field
from .fp8 import Fp8
from .int8 import Int8
from .pairs import Direction
from .raw import Raw

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Int8(), Fp8())}
RAW = Raw.name
_DIRECTION = Direction()

__all__ = ["CODECS", "RAW", "Codec", "Field", "codec_in", "coded_provenance", "make_codec", "merged_codec"]


def make_codec(name: str) -> Codec:
    """The codec of this name. Raises ConfigError if there is none."""
    if not isinstance(name, str) or name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; there are: {', '.join(CODECS)}")
    return CODECS[name]


def merged_codec(name: str) -> Codec:
    """What stands, where the codec of this name does, between the vectors of two merged layers and their fields:
    the direction that both share, and a factor of each (see `pairs.py`)."""
    return _DIRECTION if name == RAW else make_codec(name)


def coded_provenance(provenance: str, codec: str) -> str:
    """How KV came about that was computed so and stored with `codec`: one that loses bits has a provenance of its own,
    so that no look-up takes it for what was computed."""
    return provenance if make_codec(codec).lossless else f"{provenance} {codec}"


def codec_in(provenance: str) -> str:
    """The name of the lossy codec that a provenance speaks of, or `RAW`."""
    last = provenance.rpartition(" ")[2]
    return last if last in CODECS and not CODECS[last].lossless else RAW
