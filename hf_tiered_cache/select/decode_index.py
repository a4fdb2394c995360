"""The index interface: which chunks decoded tokens attend to, chosen anew at each step. It knows no file and no tier.

An index describes the chunks of one segment, or of a run of generated tokens, at one layer. It never changes. A row's
prefix is several segments, and generation adds an index every so many tokens, so a choice runs over several indexes
side by side as if they were one (`rank`). Here is also what the indexes share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

if TYPE_CHECKING:
    from typing_extensions import Self

LARGEST = 1 << 24
"""Values held at a time in what is computed on the way: 64 MiB of float32."""

_LAST, _MAGNITUDE = (1 << 32) - 1, (1 << 31) - 1  # a name's bits, and those of a float32 without its sign


@dataclass(frozen=True, eq=False)
class DecodeIndex(ABC):
    """Says which chunks of a layer's keys a query needs, for each kv head. Its other fields are tensors to be stored.

    Args:
        chunk_tokens: tokens of a chunk; the last chunk may have fewer.
    """

    chunk_tokens: int

    divisible: ClassVar[bool] = False
    """Whether a part of it is the index of a part of the tokens: then that of a whole segment serves any prompt."""

    @classmethod
    @abstractmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int) -> Self:
        """The index of `keys`, `[kv_heads, tokens, dim]`, rotated, with at least one token.

        Heads know nothing of each other, so those of several layers may be built together in the first dimension.
        """

    @property
    @abstractmethod
    def chunks(self) -> int:
        """How many there are."""

    @classmethod
    @abstractmethod
    def rank_together(
        cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `rank`, whose arguments these are."""

    @classmethod
    def merged(cls, indexes: Sequence[Self]) -> Sequence[Self]:
        """As few indexes of the same chunks, in the same order, as this kind can make of them: less to do at each step.

        They rank as the several do.
        """
        return indexes

    def part(self, first: int, tokens: int) -> Self:
        """The index of so many tokens from `first` on, of a kind that is `divisible`."""
        raise TypeError(f"{type(self).__name__} is of all its tokens together")

    def tensors(self) -> dict[str, torch.Tensor]:
        """What to store beside the segment, by name: all begin with a dimension of kv heads."""
        every = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], chunk_tokens: int) -> Self:
        """The index whose `tensors()` these are, on whatever device they are now."""
        return cls(chunk_tokens, **tensors)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
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


def rank(
    indexes: Sequence[DecodeIndex], query: torch.Tensor, scaling: float | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks that queries need most, among those of all `indexes` together; nothing waits for the device.

    Args:
        indexes: of one kind, in the order of the tokens.
        query: `[heads, n, dim]`, rotated; each kv head serves heads / kv_heads of them.
        scaling: of the logits; None for dim ** -0.5.
        count: chunks to choose for each kv head, from 1 to as many as there are.

    Returns:
        Chunks, int64 `[kv_heads, count]`, best first, numbered through all indexes; of equals the first wins. And their
        scores, float32 `[kv_heads, count]`, which never rise along a row; inf for a chunk that is always chosen.
    """
    kind, total = type(indexes[0]), sum(index.chunks for index in indexes)
    if any(type(index) is not kind for index in indexes):
        raise ValueError("indexes of several kinds cannot be ranked together")
    if not 1 <= count <= total:
        raise ValueError(f"count must be from 1 to {total}, not {count}")
    return kind.rank_together(indexes, query, query.shape[-1] ** -0.5 if scaling is None else scaling, count)


def head_slices(keys: torch.Tensor) -> Iterator[slice]:
    """Runs of heads of `[heads, tokens, dim]`, each of at most `LARGEST` values if one head is."""
    step = max(1, LARGEST // max(1, keys[0].numel()))
    for begin in range(0, len(keys), step):
        yield slice(begin, begin + step)


def mean_keys(keys: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """The mean key of each chunk of `[heads, tokens, dim]`, the last one of fewer tokens: float32."""
    whole = keys.shape[1] // chunk_tokens
    means = keys[:, : whole * chunk_tokens].unflatten(1, (whole, chunk_tokens)).float().mean(2)
    rest = keys[:, whole * chunk_tokens :]
    return torch.cat([means, rest.float().mean(1, keepdim=True)], 1) if rest.shape[1] else means


def cut_in_chunks(keys: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """`[heads, tokens, dim]` as `[heads, chunks, chunk_tokens, dim]`: a ragged chunk repeats its last token."""
    if missing := -keys.shape[1] % chunk_tokens:
        keys = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], 1)
    return keys.unflatten(1, (-1, chunk_tokens))


def logits(query: torch.Tensor, keys: Sequence[torch.Tensor], scaling: float) -> torch.Tensor:
    """Products of `[heads, n, dim]` with several `[kv_heads, k, dim]` side by side.

    Keys stand in front: there are many of them for few queries, and that product is a third faster on the CPU.

    Returns:
        float32 `[kv_heads, group, n, k of all]`, contiguous.
    """
    rows = query.reshape(len(keys[0]), -1, query.shape[2])  # [kv_heads, group * n, dim]
    zero = keys[0].new_zeros(())
    found = [
        torch.baddbmm(zero, some, rows.to(some.dtype).transpose(1, 2), beta=0, alpha=scaling).transpose(1, 2)
        for some in keys
    ]
    return side_by_side(found).contiguous().float().unflatten(1, (-1, query.shape[1]))


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joined along the last dimension; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -1)


def log_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    scaling: float,
    absent: torch.Tensor | None = None,
    group_max: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much attention representatives get, as if they were all the keys there are.

    In logarithms, so that what gets next to nothing keeps its rank.

    Args:
        query: `[heads, n, dim]`.
        keys: `[kv_heads, k, dim]` each.
        absent: bool `[kv_heads, k of all]`, those that get nothing.
        group_max: take the largest weight among the query heads of a kv head instead of their sum.

    Returns:
        float32 `[kv_heads, k of all]`, the logarithm of softmax weights, summed over query heads and queries; and the
        logarithm of what each softmax divides by, `[kv_heads, group, n, 1]`.
    """
    columns = sum(some.shape[1] for some in keys)
    found, totals = [], []
    for some in query.split(positions_at_once(query, columns), dim=1):
        weights = logits(some, keys, scaling)
        if absent is not None:
            weights.masked_fill_(absent[:, None, None], -torch.inf)
        shares = weights.log_softmax(-1)
        if absent is None:
            totals.append(weights[..., :1] - shares[..., :1])
        else:
            totals.append(weights.logsumexp(-1, keepdim=True))
        found.append(log_sum(shares, group_max))
    return joined(found), torch.cat(totals, 2)


def joined(logs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The logarithm of the sum of numbers whose logarithms these are; a single one is not copied."""
    return logs[0] if len(logs) == 1 else torch.stack(list(logs)).logsumexp(0)


def positions_at_once(query: torch.Tensor, columns: int) -> int:
    """Of how many positions of `[heads, n, dim]` logits with `columns` keys may be held."""
    return max(1, LARGEST // (len(query) * columns))


def log_sum(weights: torch.Tensor, group_max: bool = False) -> torch.Tensor:
    """Logarithms `[kv_heads, group, n, k]`, summed as numbers to `[kv_heads, k]`; of a group the sum or the largest."""
    return weights.amax(1).logsumexp(1) if group_max else weights.flatten(1, 2).logsumexp(1)


def best_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the `count` largest of `[rows, columns]` float32, of equals the first: int64 `[rows, count]`."""
    return best_named(scores, torch.arange(scores.shape[1], device=scores.device), count)[0]


def best_named(scores: torch.Tensor, names: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of `[rows, columns]` float32, of equals those of the least name.

    Nothing that selects says anything of equals, and a stable sort takes many times as long. So a number is made of
    score and name which no other column has.

    Args:
        names: int64 `[columns]` or `[rows, columns]`, distinct in a row, from 0 to 2 ** 32 - 1.

    Returns:
        Their names, int64 `[rows, count]`, largest first, and their scores, float32 likewise.
    """
    scores = (scores.float() + 0.0).contiguous()  # 0.0 + -0.0 is 0.0
    select = _largest_on_cpu if scores.device.type == "cpu" else _largest_on_device
    unique = select(scores.view(torch.int32), names, count)
    ascending = (unique >> 32).int()
    return _LAST - (unique & _LAST), (ascending ^ (ascending >> 31 & _MAGNITUDE)).view(torch.float32)


def _largest_on_device(bits: torch.Tensor, names: torch.Tensor, count: int) -> torch.Tensor:
    """The largest of what is unique, int64 `[rows, count]`, of the bits of scores, int32 `[rows, columns]`."""
    ascending = bits ^ (bits >> 31 & _MAGNITUDE)  # as integers they now stand as the scores do
    return (ascending.long() << 32 | _LAST - names).topk(count, dim=1).values


def _largest_on_cpu(bits: torch.Tensor, names: torch.Tensor, count: int) -> torch.Tensor:
    """The same by NumPy, which takes half the time or less: a selection and a sort with the widest registers."""
    given = bits.numpy()
    unique = (given ^ (given >> 31 & _MAGNITUDE)).astype(np.int64)
    unique <<= 32
    unique |= _LAST - names.numpy()
    first = unique.shape[1] - count
    if 0 < first < unique.shape[1]:
        unique.partition(first, axis=1)
    unique = unique[:, first:]
    unique.sort(axis=1)
    return torch.from_numpy(unique[:, ::-1].copy())
