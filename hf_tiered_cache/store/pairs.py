"""Merge of two layers' keys or values into a shared direction and a magnitude for each layer (MiniCache).

A vector is the key or value of one token in one head: keys and values are merged separately. A merged vector is stored
as a direction. Each layer multiplies it by its own factor, which restores the original length of its vector. Rotary
position embedding (RoPE) preserves lengths and angles, so keys may be merged before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from .codecs import Codec, checked_decode, checked_encode
from .lazy import torch

TOWARD = 0.6
"""Interpolation weight of the second, deeper layer's direction (MiniCache, Section 4)."""
_PARALLEL = 1e-3
"""Sine of the angle below which interpolation is linear. It differs from spherical interpolation by at most 1e-6."""

_KeysValues: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute the angles between the vectors of two tensors, `[..., dim]`, in radians: float32 `[...]`.

    The angle is 0 if a vector is zero or not finite, since merging does not rotate the vectors in this case.
    """
    (first_unit, _), (second_unit, _) = _directions(first, second)
    return _angle(first_unit, second_unit).squeeze(-1).float()


def merge(
    first: torch.Tensor, second: torch.Tensor, toward: float = TOWARD
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the vectors of two tensors, `[..., dim]`, by spherical interpolation.

    Opposite vectors have no unique arc: the direction is that of the vector with the larger weight, or of the second if
    the weights are equal. A vector that is zero or not finite does not rotate the other. The magnitude of a vector that
    is not finite is NaN.

    The weight `toward` is 0 for the first layer's direction, 1 for the second's. Returns float32 directions,
    `[..., dim]`, of length 1, or 0 if both vectors are zero; and both magnitudes, `[..., 1]`.
    """
    (first_unit, magnitude), (second_unit, magnitude_of_other) = _directions(first, second)
    between = _angle(first_unit, second_unit)  # [..., 1]
    sine = between.sin()
    parallel = sine < _PARALLEL
    sine = sine.masked_fill(parallel, 1)
    weight = torch.where(parallel, 1 - toward, ((1 - toward) * between).sin() / sine)
    weight_of_other = torch.where(parallel, toward, (toward * between).sin() / sine)
    weighted_sum = weight.float() * first_unit + weight_of_other.float() * second_unit
    length = torch.linalg.vector_norm(weighted_sum, dim=-1, keepdim=True)
    cancelled = length < _PARALLEL
    direction = torch.where(cancelled, second_unit, weighted_sum / length.masked_fill(cancelled, 1))
    return direction, magnitude, magnitude_of_other


def encode(
    first: torch.Tensor, second: torch.Tensor, codec: Codec, toward: float = TOWARD
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Merge the vectors of two layers, `[..., dim]`, and encode them. See `merge`.

    The factors compensate for the rounded length of the direction, so magnitudes are preserved. They are limited such
    that finite vectors near the maximum of the dtype do not overflow to infinity when they are rotated. Returns the
    fields of both layers with the codec of merged KV cache groups; both contain the same direction.
    """
    direction, *magnitudes = merge(first, second, toward)
    encoded_direction, ones = checked_encode(codec, direction.to(first.dtype))
    ones = torch.ones_like(ones)
    decoded = codec.decode((encoded_direction, ones), torch.float32)
    length = torch.linalg.vector_norm(decoded, dim=-1, keepdim=True)
    zero = length == 0
    limits = torch.finfo(first.dtype)
    most = limits.max / decoded.abs().amax(-1, keepdim=True).masked_fill(zero, 1) * (1 - torch.finfo(torch.float32).eps)
    length.masked_fill_(zero, 1)
    first_factor, second_factor = (torch.minimum(magnitude / length, most) for magnitude in magnitudes)  # NaN stays NaN
    return (encoded_direction, first_factor), (encoded_direction, second_factor)


def retained(angles: torch.Tensor, share: float = 0.05) -> torch.Tensor:
    """Return the tokens to leave unmerged, int64, ascending: the `share` of them with the largest mean angles.

    The formula in the paper (MiniCache), read literally, selects the smallest angles; its text means the largest.
    `angles` is `[..., tokens]`, for example of all heads, of keys and values.
    """
    mean_angles = angles.float().reshape(-1, angles.shape[-1]).mean(0)  # [tokens]
    count = round(share * len(mean_angles))
    return mean_angles.argsort(descending=True, stable=True)[:count].sort().values


def merge_layers(
    first: _KeysValues, second: _KeysValues, codec: Codec, toward: float, share: float
) -> tuple[_KeysValues, _KeysValues]:
    """Return keys and values of two layers, `[..., tokens, dim]` each, as restored after `encode` and `retained`."""
    angles = [angle(*tensors).flatten(0, -2) for tensors in zip(first, second, strict=True)]
    unmerged = retained(torch.cat(angles), share)

    def restored(a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
        for tensor, fields in zip((a, b), encode(a, b, codec, toward), strict=True):
            decoded = checked_decode(codec, fields, tensor.dtype, tensor.shape[-1])
            yield decoded.index_copy(-2, unmerged, tensor.index_select(-2, unmerged))

    (first_keys, second_keys), (first_values, second_values) = map(restored, first, second)
    return (first_keys, first_values), (second_keys, second_values)


def _directions(
    first: torch.Tensor, second: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Normalize the vectors of both tensors. Vectors without a direction get the other's. Lengths are `[..., 1]`."""
    (first_unit, length), (second_unit, length_of_other) = map(_unit, (first, second))
    turned = torch.where(length > 0, first_unit, second_unit), torch.where(length_of_other > 0, second_unit, first_unit)
    return (turned[0], length), (turned[1], length_of_other)


def _unit(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize vectors to length 1, or 0, in float32. The returned lengths are NaN for vectors that are not finite."""
    wide = tensor.float()
    finite = wide.isfinite().all(-1, keepdim=True)
    wide = wide.masked_fill(~finite, 0)
    # squares of very large and small float32 numbers need the range of float64
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float64)
    length = length.clamp(max=torch.finfo(torch.float32).max).float()
    unit = wide / length.masked_fill(length == 0, 1)
    return unit, length.masked_fill(~finite, torch.nan)


def _angle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the angles between unit vectors, float64 `[..., 1]`. Unlike arc cosine, it is exact for small angles.

    In float32, the last bit would depend on a vector's index: kernels process the last elements separately.
    """
    apart, together = (torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (a - b, a + b))
    return 2 * torch.atan2(apart.double(), together.double())
