"""Codecs, which encode the tensors of a block: raw, and two with 8 bits for each number. Packages can register more.

A codec encodes a tensor of keys or values to the fields that a block holds, and decodes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from ..errors import ConfigError, unknown_name, with_type
from ..plugins import Registry
from .lazy import torch


class Field(NamedTuple):
    """Tensor of encoded keys or values: `dim` numbers of a dtype for each token and head."""

    dtype: torch.dtype
    dim: int


class Codec(Protocol):
    """Encoder and decoder between tensors and the bytes of a block.

    Each token of each head is encoded independently. So fields can be sliced, moved and indexed by token before they
    are decoded. Equal tensors are encoded to equal bytes on every machine. A lossy codec gets keys without the bias of
    their projection, where the model has one (see `LayerKV.unbiased`).
    """

    name: str
    """Name in `KVStore(codec=...)` and in segment headers."""
    lossless: bool
    """True if decoding restores every bit of the input."""

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        """Return the fields of a tensor with the given dtype, and `dim` numbers for each token and head."""

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode `tensor`, `[..., dim]`, to its fields, `[..., field.dim]` each."""

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Decode fields to `[..., dim]` in `dtype`, on the fields' device."""


def checked_encode(codec: Codec, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encode a tensor, `[..., dim]`. Raises ConfigError if the dtypes or shapes differ from the codec's `fields`."""
    encoded = codec.encode(tensor)
    if codec.lossless:  # only `Raw` is: plug-ins cannot be
        return encoded
    if not isinstance(encoded, tuple):
        raise ConfigError(f"{codec.name}.encode returns {type(encoded).__name__}, not a tuple of tensors")
    leading = tensor.shape[:-1]
    expected = [(field.dtype, (*leading, field.dim)) for field in codec.fields(tensor.dtype, tensor.shape[-1])]
    if [(field.dtype, field.shape) for field in encoded] != expected:
        raise ConfigError(
            f"{codec.name}.encode returns {_list_of(encoded)} for {_form(tensor)}, "
            f"and fields says [{', '.join(f'{dtype} {list(shape)}' for dtype, shape in expected)}]"
        )
    return encoded


def checked_decode(codec: Codec, fields: tuple[torch.Tensor, ...], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Decode fields to `[..., dim]` in `dtype`. Raises ConfigError if the codec returns another dtype or shape."""
    decoded = codec.decode(fields, dtype)
    expected = (*fields[0].shape[:-1], dim)
    if decoded.shape != expected or decoded.dtype != dtype:
        raise ConfigError(
            f"{codec.name}.decode returns {_form(decoded)} for {_list_of(fields)}, not {dtype} {list(expected)}"
        )
    return decoded


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _list_of(tensors: Iterable[torch.Tensor]) -> str:
    return f"[{', '.join(map(_form, tensors))}]"


class Raw:
    """Lossless codec with the tensor as its only field."""

    name = "raw"
    lossless = True

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return (Field(dtype, dim),)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor,)

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return fields[0]


@dataclass(eq=False)
class Scaled:
    """Codec with 8 bits for each number.

    A number is decoded as its code times the scale of its token and head. The scale is the largest magnitude of the
    token in that head, divided by `largest`. Scales are float32, since scales of bfloat16 tensors exceed the range of
    float16. With 128 dims per head, scales are 3 % of the bytes. If a token has non-finite numbers in a head, the whole
    token is decoded as NaN in that head: it would corrupt the model's output anyway, and must not become finite.
    """

    lossless = False
    name: str
    largest: float  # magnitude of the largest code
    code: str  # name of the dtype of the codes
    stored: str  # name of the dtype that they are stored as: some devices have no indexing kernels for float8

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return Field(getattr(torch, self.stored), dim), Field(torch.float32, 1)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = tensor.float()
        most = wide.abs().amax(-1, keepdim=True) if tensor.shape[-1] else wide.new_zeros(*wide.shape[:-1], 1)
        limits, code_dtype = torch.finfo(torch.float32), getattr(torch, self.code)
        # limited so that neither the division by a scale nor the largest code times the scale overflows
        # not `most / self.largest`: a GPU multiplies by the reciprocal instead, and its last bit may differ
        scales = (most * (1 / self.largest)).clamp_(limits.tiny, limits.max / self.largest * (1 - limits.eps))
        finite = most.isfinite()
        scales.masked_fill_(~finite, torch.nan)
        numbers = (wide / scales).masked_fill_(~finite, 0)  # up to rounding, at most `largest` in magnitude
        numbers = numbers.clamp_(-self.largest, self.largest) if code_dtype.is_floating_point else numbers.round_()
        return numbers.to(code_dtype).view(getattr(torch, self.stored)), scales

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = fields
        return codes.view(getattr(torch, self.code)).to(torch.float32).mul_(scales).to(dtype)


class Direction:
    """Codec of merged vectors in uncompressed segments: a direction in the tensor's dtype, and a float32 factor.

    8-bit codecs do not need it: their scale serves as the factor.
    """

    name = "direction"
    lossless = False

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return Field(dtype, dim), Field(torch.float32, 1)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor, torch.ones(*tensor.shape[:-1], 1, device=tensor.device)

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        direction, factor = fields
        return (direction.float() * factor).to(dtype)


# --- registry


def _fault(name: str, part: object) -> str:
    if isinstance(part, type):
        return "it is a class; pass an instance"
    if missing_members := [key for key in ("name", "lossless", "fields", "encode", "decode") if not hasattr(part, key)]:
        return f"it lacks {', '.join(missing_members)} (see `Codec`)"
    codec = cast(Codec, part)
    if codec.name != name:
        return f"its name is {codec.name!r}"
    if codec.lossless:
        return "it is lossless, and only raw may be: exact KV is stored unchanged"
    tensor = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 64)
    original = tensor.clone()
    try:
        encoded = checked_encode(codec, original)
        decoded = checked_decode(codec, encoded, tensor.dtype, tensor.shape[-1])
        alone = checked_encode(codec, tensor[:1, 1:2].clone())
        if not torch.equal(original, tensor):
            return "encode changes the tensor that it gets"
        if not all(map(torch.equal, (part[:1, 1:2] for part in encoded), alone)):
            return "it encodes a token of a head differently if others are encoded with it, or at each call"
        if not torch.isfinite(decoded).all() or not decoded.any():
            return "it decodes finite numbers as NaN, infinity, or all as 0"
    except ConfigError as error:
        return str(error)
    except Exception as error:  # whatever a plug-in raises
        return f"it cannot encode and decode a tensor {list(tensor.shape)}: {type(error).__name__}: {error}"
    return ""


_BUILT_IN: tuple[Codec, ...] = (
    Raw(),
    Scaled("int8", 127.0, "int8", "int8"),  # the error is at most 1/254 of the token's largest magnitude in that head
    Scaled("fp8", 448.0, "float8_e4m3fn", "uint8"),  # a relative error of at most 1/16, or a small absolute error
)
CODECS: Registry[Codec] = Registry(
    "codec", "hf_tiered_cache.codecs", {codec.name: codec for codec in _BUILT_IN}, _fault
)
"""Codecs by name, those of plug-ins included."""
RAW = Raw.name
_DIRECTION = Direction()


def register_codec(codec: Codec) -> None:
    """Add a codec: `KVStore(codec=codec.name)` uses it. Reading its segments needs it, too.

    Raises ConfigError if the name is invalid or taken, or `codec` lacks members of `Codec`.
    """
    CODECS.register(getattr(codec, "name", ""), codec)


def make_codec(name: str) -> Codec:
    """Return the codec of a name. Raises ConfigError if there is none, or if `name` is a codec itself."""
    try:
        return CODECS[name]
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


def merged_codec(name: str) -> Codec:
    """Return the codec of merged layers in a segment with a codec: a shared direction, and a factor for each layer."""
    return _DIRECTION if name == RAW else make_codec(name)


def coded_provenance(provenance: str, codec: str) -> str:
    """Return the provenance of KV stored with `codec`: that of a lossy codec differs from that of exact KV."""
    return provenance if make_codec(codec).lossless else f"{provenance} {codec}"


def codec_in(provenance: str) -> str:
    """Return the name of the lossy codec in a provenance, or `RAW`."""
    last = provenance.rpartition(" ")[2]
    return last if last in CODECS and not CODECS[last].lossless else RAW
