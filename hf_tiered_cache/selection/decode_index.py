"""Decode index interface: which chunks decoded tokens attend to, selected at each step. Accesses no files and no tiers.

An index describes the chunks of one segment, or of a run of generated tokens, at one layer. It is immutable. A row's
prefix has several segments, and generation adds an index at intervals, so a selection treats several indexes as one
(`rank`). This module also contains helpers that the index types share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

from ..errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

LARGEST = 1 << 24
"""Maximum number of intermediate values held at a time: 64 MiB of float32."""

_LAST, _MAGNITUDE = (1 << 32) - 1, (1 << 31) - 1  # bits of a name, and of a float32 without its sign


@dataclass(frozen=True, eq=False)
class DecodeIndex(ABC):
    """Index that ranks the chunks of a layer's keys for a query, per KV head. All other fields are tensors to store.

    Args:
        chunk_tokens: Tokens per chunk; the last chunk may have fewer.
    """

    chunk_tokens: int

    divisible: ClassVar[bool] = False
    """True if `part` returns the index of a part of the tokens. The index of a whole segment then serves any prompt."""

    @classmethod
    @abstractmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int) -> Self:
        """Build the index of `keys`, `[kv_heads, tokens, dim]`, rotated, with at least one token.

        Heads are independent, so the heads of several layers may be stacked in the first dimension.
        """

    @property
    @abstractmethod
    def chunks(self) -> int:
        """Number of chunks."""

    @classmethod
    @abstractmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        """Rank the chunks of indexes of this type. See `rank` for arguments and result."""

    @classmethod
    def merged(cls, indexes: Sequence[Self]) -> Sequence[Self]:
        """Merge indexes into as few as this type supports, to reduce the work per step.

        The chunks and their order stay the same, and so does their ranking.
        """
        return indexes

    def part(self, first: int, tokens: int) -> Self:
        """Return the index of `tokens` tokens from `first` on. Raises TypeError if the type is not `divisible`."""
        raise TypeError(f"{type(self).__name__} cannot be divided, because it covers all its tokens together")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to store as a sidecar, by name. The first dimension of each is KV heads."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], chunk_tokens: int) -> Self:
        """Create the index from its `tensors()`, on their current device."""
        return cls(chunk_tokens, **tensors)

    def to(self, device: torch.device) -> Self:
        """Return this index on a device."""
        if self.device == device:
            return self
        tensors = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return self.from_tensors(tensors, self.chunk_tokens)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return len(next(iter(self.tensors().values())))


_Index = TypeVar("_Index", bound=DecodeIndex)


def rank(indexes: Sequence[DecodeIndex], query: torch.Tensor, scaling: float | None, count: int) -> torch.Tensor:
    """Rank the chunks of all `indexes` together by how much attention queries pay them. Does not wait for the device.

    Args:
        indexes: Indexes of one type, in the order of the tokens.
        query: `[heads, n, dim]`, rotated; each KV head serves heads / kv_heads of them.
        scaling: Scale of the logits; None for dim ** -0.5.
        count: Number of chunks to select for each KV head, from 1 to all.

    Returns:
        Chunks, int64 `[kv_heads, count]`, best first, numbered across all indexes; the first chunk wins ties.
    """
    scaling, kind = query.shape[-1] ** -0.5 if scaling is None else scaling, type(indexes[0])
    ranked = kind.rank_together(indexes, query, scaling, count)
    expected = indexes[0].kv_heads, count
    if not isinstance(ranked, torch.Tensor) or ranked.dtype != torch.int64 or ranked.shape != expected:
        is_tensor = isinstance(ranked, torch.Tensor)
        form = f"{ranked.dtype} {list(ranked.shape)}" if is_tensor else f"a {type(ranked).__name__}"
        raise ConfigError(
            f"{kind.__name__}.rank_together returned {form}; it must return a tensor, int64 {list(expected)}"
        )
    return ranked


def check_ranking(indexes: Sequence[DecodeIndex], ranked: np.ndarray) -> None:
    """Check chunks that `rank` returned, int64 `[kv_heads, count]`, on the host.

    Raises ConfigError if some are no chunks of these indexes, or occur twice.
    """
    total, ascending = sum(index.chunks for index in indexes), np.sort(ranked, axis=1)
    if ascending[:, 0].min() < 0 or ascending[:, -1].max() >= total or (np.diff(ascending, axis=1) == 0).any():
        raise ConfigError(
            f"{type(indexes[0]).__name__}.rank_together returned chunks that are not distinct and from 0 to {total - 1}"
        )


def build_index(kind: type[_Index], keys: torch.Tensor, chunk_tokens: int) -> _Index:
    """Return the index of a type for `keys`, `[kv_heads, tokens, dim]`. See `DecodeIndex.build`.

    Raises:
        ConfigError: The result does not describe all chunks of all heads.
    """
    index, num_chunks = kind.build(keys, chunk_tokens), -(-keys.shape[1] // chunk_tokens)
    if not isinstance(index, kind):
        raise ConfigError(f"{kind.__name__}.build returned a {type(index).__name__}")
    if index.chunks != num_chunks or any(len(tensor) != len(keys) for tensor in index.tensors().values()):
        shapes = [list(tensor.shape) for tensor in index.tensors().values()]
        raise ConfigError(
            f"{kind.__name__}.build returned an index of {index.chunks} chunks with tensors {shapes}; {num_chunks} "
            f"chunks and tensors [{len(keys)}, ...] are expected"
        )
    return index


def head_slices(keys: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the heads of `[heads, tokens, dim]`, each of at most `LARGEST` values or of one head."""
    step = max(1, LARGEST // max(1, keys[0].numel()))
    for begin in range(0, len(keys), step):
        yield slice(begin, begin + step)


def mean_keys(keys: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Return the mean key of each chunk of `[heads, tokens, dim]`, float32; the last chunk may have fewer tokens."""
    whole_chunks = keys.shape[1] // chunk_tokens
    means = keys[:, : whole_chunks * chunk_tokens].unflatten(1, (whole_chunks, chunk_tokens)).float().mean(2)
    last_chunk = keys[:, whole_chunks * chunk_tokens :]
    return torch.cat([means, last_chunk.float().mean(1, keepdim=True)], 1) if last_chunk.shape[1] else means


def cut_in_chunks(keys: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Reshape `[heads, tokens, dim]` to `[heads, chunks, chunk_tokens, dim]`.

    A partial chunk is filled with copies of its last token.
    """
    if missing := -keys.shape[1] % chunk_tokens:
        keys = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], 1)
    return keys.unflatten(1, (-1, chunk_tokens))


def ranking_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an index holds representatives of keys of `dtype`: float32 keys are rounded."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


_MULTIPLIES_BFLOAT16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""True if the CPU multiplies bfloat16 matrices faster than float32 matrices."""


def logits(query: torch.Tensor, keys: Sequence[torch.Tensor], scaling: float, roughly: bool = False) -> torch.Tensor:
    """Return logits, float32 `[kv_heads, group, n, k of all]`, contiguous, of queries, `[heads, n, dim]`.

    The keys, `[kv_heads, k, dim]` each, are concatenated. With `roughly`, logits are rounded to their dtype on the CPU,
    too, which takes less time.
    """
    rows = (query * scaling).reshape(len(keys[0]), -1, query.shape[2])  # [kv_heads, group * n, dim]
    products = []
    for part in keys:
        if part.device.type == "cpu" and not (roughly and part.dtype == torch.bfloat16 and _MULTIPLIES_BFLOAT16):
            part = part.float()
        products.append(torch.bmm(rows.to(part.dtype), part.transpose(1, 2)))
    return side_by_side(products).float().unflatten(1, (-1, query.shape[1]))


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the last dimension; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -1)


def log_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    scaling: float,
    absent: torch.Tensor | None = None,
    roughly: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention that representatives, `[kv_heads, k, dim]` each, get, as if they were the only keys.

    Results are logarithms, so that representatives with tiny weights keep their order. Those in `absent`, bool
    `[kv_heads, k of all]`, get no attention. See `logits` for the other arguments.

    Returns:
        Logarithm of softmax weights, summed over query heads and queries, float32 `[kv_heads, k of all]`; and logarithm
            of the softmax denominators, `[kv_heads, group, n, 1]`.
    """
    columns = sum(part.shape[1] for part in keys)
    logs, totals = [], []
    for queries in query.split(positions_at_once(query, columns), dim=1):
        weights = logits(queries, keys, scaling, roughly)
        if absent is not None:
            weights.masked_fill_(absent[:, None, None], -torch.inf)
        totals.append(weights.logsumexp(-1, keepdim=True))
        logs.append(log_sum(weights.sub_(totals[-1])))
    return joined(logs), torch.cat(totals, 2)


def joined(logs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logarithm of a sum, given the logarithms of its terms; a single tensor is not copied."""
    return logs[0] if len(logs) == 1 else torch.stack(list(logs)).logsumexp(0)


def positions_at_once(query: torch.Tensor, columns: int) -> int:
    """Return for how many positions of `[heads, n, dim]` the logits with `columns` keys fit into `LARGEST`."""
    return max(1, LARGEST // (len(query) * columns))


def log_sum(weights: torch.Tensor) -> torch.Tensor:
    """Add up log weights, `[kv_heads, group, n, k]`, over queries and group: logarithms `[kv_heads, k]`."""
    return weights.flatten(1, 2).logsumexp(1)


def best_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return columns of the `count` largest of `[rows, columns]` float32, first on ties: int64 `[rows, count]`."""
    return best_named(scores, torch.arange(scores.shape[1], device=scores.device), count)


def best_named(scores: torch.Tensor, names: torch.Tensor, count: int) -> torch.Tensor:
    """Return names of the `count` largest scores of each row: int64 `[rows, count]`, largest score first.

    Top-k functions define no order of ties, and a stable sort takes many times as long. So score and name are combined
    into an integer that is unique in its row. The smallest name wins ties.

    Args:
        scores: float32 `[rows, columns]`.
        names: int64 `[columns]` or `[rows, columns]`, distinct in a row, from 0 to 2 ** 32 - 1.
        count: Number of scores per row.
    """
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # the sum turns -0.0 into 0.0
    ascending = bits ^ (bits >> 31 & _MAGNITUDE)  # as integers in the order of the scores
    select = _largest_on_cpu if scores.device.type == "cpu" else _largest_on_device
    return _LAST - (select(ascending.long() << 32 | _LAST - names, count) & _LAST)


def _largest_on_device(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest of each row of int64 `[rows, columns]`, largest first."""
    return values.topk(count, dim=1).values


def _largest_on_cpu(values: torch.Tensor, count: int) -> torch.Tensor:
    """Compute `_largest_on_device` with NumPy's vectorized partition and sort, in less time. Reorders `values`."""
    array, first = values.numpy(), values.shape[1] - count
    if 0 < first < array.shape[1]:
        array.partition(first, axis=1)
    largest = array[:, first:]
    largest.sort(axis=1)
    return torch.from_numpy(largest[:, ::-1].copy())


@dataclass(frozen=True, eq=False)
class Int8KeysIndex(DecodeIndex):
    """Index of all keys in int8, with one scale per token and head. It ranks chunks by the attention to their tokens.

    It has a quarter of the size of float32 keys, and selects the same tokens except among nearly equal ones.

    Args:
        codes: int8 `[kv_heads, tokens, dim]`.
        scales: float32 `[kv_heads, tokens, 1]`. A key is its codes times its scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    divisible = True

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        float_keys = keys.float()
        scales = float_keys.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        return cls(chunk_tokens, (float_keys / scales).round_().to(torch.int8), scales)

    @property
    def num_tokens(self) -> int:
        """Number of keys."""
        return self.codes.shape[1]

    @property
    def chunks(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens)

    def keys_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rotated keys in `dtype`, `[kv_heads, tokens, dim]`."""
        return self.codes.to(dtype).mul_(self.scales)

    def part(self, first: int, tokens: int) -> Self:
        span = slice(first, first + tokens)
        return type(self)(self.chunk_tokens, self.codes[:, span], self.scales[:, span])

    @classmethod
    def merged(cls, indexes: Sequence[Self]) -> Sequence[Self]:
        size = indexes[0].chunk_tokens
        if len(indexes) == 1 or any(index.num_tokens % size for index in indexes[:-1]):
            return indexes
        codes, scales = (torch.cat([getattr(index, name) for index in indexes], 1) for name in ("codes", "scales"))
        return [cls(size, codes, scales)]

    @classmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        weights, _ = log_attention(query, [index.keys_as(query.dtype) for index in indexes], scaling)
        step, scores = indexes[0].chunk_tokens, []
        for part in weights.split([index.num_tokens for index in indexes], dim=1):
            padded = pad(part, (0, -part.shape[1] % step), value=-torch.inf)
            scores.append(padded.unflatten(1, (-1, step)).logsumexp(-1))
        return best_first(side_by_side(scores), count)
