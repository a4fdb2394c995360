"""Two layers' keys or values in one: a direction that both share, and a magnitude for each (MiniCache).

A vector is what one token has in one head: keys and values are merged apart. In the merged vector's place stands its
direction; times a factor of its own it gives each layer a vector of the length that it had. Rotation by position
(RoPE) keeps lengths and angles, so keys may be merged before it or behind it.
"""

from __future__ import annotations

import torch

from .base import Codec, Field

TOWARD = 0.6
"""How far the direction lies from the first layer's to the second's, which is deeper (MiniCache, Section 4)."""
_PARALLEL = 1e-3
"""Below this sine of their angle vectors are joined in a straight line: that differs from the arc by 1e-6 at most."""


class Direction:
    """How a merged vector is stored where numbers are stored as they are: its direction in the tensor's dtype, and f32.

    Codecs of eight bits need nothing of the kind: their scale is such a factor.
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


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The angle between the vectors of two tensors, `[..., dim]`, in radians: float32 `[...]`.

    It is 0 where one of them is zero or not finite, since merging turns neither then.
    """
    (one, _), (other, _) = _directions(first, second)
    return _angle(one, other).squeeze(-1).float()


def merge(
    first: torch.Tensor, second: torch.Tensor, toward: float = TOWARD
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the vectors of two tensors, `[..., dim]`, on the arc between them.

    Opposite vectors have no arc: the direction is then that of the one that is nearer, and of the second where neither
    is. One that is zero turns the other nowhere, nor does one that is not finite, whose magnitude is NaN.

    Args:
        toward: 0 gives the first one's direction, 1 the second one's.

    Returns:
        The direction, `[..., dim]`, of length 1, or 0 where both are zero; and both magnitudes, `[..., 1]`; float32.
    """
    (one, magnitude), (other, magnitude_of_other) = _directions(first, second)
    between = _angle(one, other)  # [..., 1]
    sine = between.sin()
    parallel = sine < _PARALLEL
    sine = sine.masked_fill(parallel, 1)
    weight = torch.where(parallel, 1 - toward, ((1 - toward) * between).sin() / sine)
    weight_of_other = torch.where(parallel, toward, (toward * between).sin() / sine)
    merged = weight.float() * one + weight_of_other.float() * other
    length = torch.linalg.vector_norm(merged, dim=-1, keepdim=True)
    cancelled = length < _PARALLEL
    direction = torch.where(cancelled, other, merged / length.masked_fill(cancelled, 1))
    return direction, magnitude, magnitude_of_other


def encode(
    first: torch.Tensor, second: torch.Tensor, codec: Codec, toward: float = TOWARD
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The fields of two layers' tensors, `[..., dim]`, merged: the direction is the same in both.

    Factors make up for what rounding does to the direction's length, so magnitudes are kept; but no finite number
    becomes an infinite one, which a vector near the end of the dtype's range may, when it is turned.

    Args:
        codec: of merged block groups (see `merged_codec`).
    """
    direction, *magnitudes = merge(first, second, toward)
    stored, ones = codec.encode(direction.to(first.dtype))
    ones = torch.ones_like(ones)
    decoded = codec.decode((stored, ones), torch.float32)
    length = torch.linalg.vector_norm(decoded, dim=-1, keepdim=True)
    zero = length == 0
    limits = torch.finfo(first.dtype)
    most = limits.max / decoded.abs().amax(-1, keepdim=True).masked_fill(zero, 1) * (1 - torch.finfo(torch.float32).eps)
    length.masked_fill_(zero, 1)
    one, other = (torch.minimum(magnitude / length, most) for magnitude in magnitudes)  # NaN stays NaN
    return (stored, one), (stored, other)


def retained(angles: torch.Tensor, share: float = 0.05) -> torch.Tensor:
    """The tokens to leave unmerged: this share of them, of the largest angles.

    The paper's printed rule, read literally, leaves the closest ones unmerged; its text means these.

    Args:
        angles: `[..., tokens]`, of heads, or of keys and values; a token goes by their mean.

    Returns:
        int64, ascending.
    """
    each = angles.float().reshape(-1, angles.shape[-1]).mean(0)  # [tokens]
    count = round(share * len(each))
    return each.argsort(descending=True, stable=True)[:count].sort().values


def _directions(
    first: torch.Tensor, second: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Of both tensors the vectors at length 1, and their lengths, `[..., 1]`; one without direction has the other's."""
    (one, length), (other, length_of_other) = map(_unit, (first, second))
    turned = torch.where(length > 0, one, other), torch.where(length_of_other > 0, other, one)
    return (turned[0], length), (turned[1], length_of_other)


def _unit(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors at length 1, or 0, in float32, and their lengths: NaN where they are not finite."""
    wide = tensor.float()
    finite = wide.isfinite().all(-1, keepdim=True)
    wide = wide.masked_fill(~finite, 0)
    # squares of numbers near the ends of float32's range need float64's
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float64)
    length = length.clamp(max=torch.finfo(torch.float32).max).float()
    unit = wide / length.masked_fill(length == 0, 1)
    return unit, length.masked_fill(~finite, torch.nan)


def _angle(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Between vectors of length 1, float64 `[..., 1]`; exact for small angles, too, which an arc cosine is not.

    In float32 its last bit would depend on where in a tensor a vector stands: kernels take the last few numbers apart.
    """
    apart, together = (torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (one - other, one + other))
    return 2 * torch.atan2(apart.double(), together.double())
