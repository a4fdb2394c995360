"""Similarity of the attention of layers, measured online (Krul, Sections 4.2 and 5: the token-wise estimator).

The distance of two layers is Euclidean, over all attention weights of a head, and averaged over the heads. It is
computed from sums of products over rows and keys: |a - b|² = a·a + b·b - 2 a·b. The attention row of each query is
computed, added to the sums and dropped, so no tokens × tokens matrix is ever held.

The ends are the first and last tenth of the sequence. Uniform attention gives 0.335: the rows near the beginning see
only the first tenth.

Fused attention kernels return no weights. So the queries of sampled positions are kept, the same positions in every
layer, and their attention rows are computed from the keys in the cache when `result` is called, at suspend. A pass is
hardly slowed down, and positions that are cropped later do not count. In long sequences, kept queries take 1/32 of the
KV's memory for each query head of a KV head.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from ..store.memory import to_device

logger = logging.getLogger("hf_tiered_cache")

_LARGEST = 1 << 24  # maximum number of attention weights held at a time: 64 MiB of float32

END_PERCENT = 10
"""Share of a sequence that counts as its beginning, and as its end, in % (Algorithm 1)."""


@dataclass(frozen=True, eq=False)
class LayerDistances:
    """Distances between the attention of layers.

    Args:
        layers: Layer numbers; the arrays have this order.
        euclidean: float64 `[layers, layers]`, the paper's distance: over the weights of all rows, mean over the heads;
            divided by the root of the number of rows, so that it does not grow with the conversation.
        initial_recent: float64 `[layers]`, share of attention that the first and last tenth of the sequence receive.
        rows: Number of sampled rows.
        missing: Reason why there are no distances, or "".
    """

    layers: tuple[int, ...]
    euclidean: np.ndarray
    initial_recent: np.ndarray
    rows: int
    missing: str = ""

    @classmethod
    def none(cls, missing: str) -> LayerDistances:
        """Return empty distances, with the reason `missing`."""
        return cls((), np.zeros((0, 0)), np.zeros(0), 0, missing)


@dataclass(frozen=True, eq=False)
class SampledQueries:
    """Queries of sampled positions in every layer.

    Args:
        positions: Padded positions, int64 `[n]`, ascending, on the host.
        weights: Number of positions that each sample represents, int64 `[n]`.
        pads: Number of left-padding positions of each sequence.
        queries: Queries of each layer, `[batch, heads, n, dim]`, rotated.
        scalings: Scale of the logits of each layer; None for dim ** -0.5.
    """

    positions: np.ndarray
    weights: np.ndarray
    pads: Sequence[int]
    queries: Sequence[torch.Tensor]
    scalings: Sequence[float | None]

    def first(self, count: int) -> SampledQueries:
        """Return the queries of the first `count` positions."""
        queries = [query[:, :, :count] for query in self.queries]
        return replace(self, positions=self.positions[:count], weights=self.weights[:count], queries=queries)

    def select(self, rows: torch.Tensor) -> SampledQueries:
        """Return the queries of reordered sequences: sequence i becomes sequence `rows[i]`."""
        queries = [query.index_select(0, rows.to(query.device)) for query in self.queries]
        return replace(self, pads=[self.pads[row] for row in rows.tolist()], queries=queries)


def joined(samples: Sequence[SampledQueries], row: int) -> SampledQueries:
    """Return the queries of one sequence of the batch, of samples in the order of their positions."""
    layers = zip(*(sample.queries for sample in samples), strict=True)
    return SampledQueries(
        np.concatenate([sample.positions for sample in samples]),
        np.concatenate([sample.weights for sample in samples]),
        samples[-1].pads[row : row + 1],
        [torch.cat([query[row : row + 1] for query in queries], dim=2) for queries in layers],
        samples[-1].scalings,
    )


def layer_distances(
    layers: Sequence[int], sample: SampledQueries, keys: Sequence[torch.Tensor], positions: int
) -> LayerDistances:
    """Compute the distances from sampled queries of one sequence of `positions` positions, with its left padding.

    The keys of each layer, `[1, kv_heads, positions, dim]`, are rotated, from padded position 0 on.
    """
    (pad,) = sample.pads
    count = int(sample.weights[sample.positions >= pad].sum())
    if not count:
        return LayerDistances.none("the observed attention is of padding only")
    products, position_weights = attention_sums(sample, keys)
    squared_norms = np.diagonal(products, axis1=1, axis2=2)
    norm_sums = squared_norms[:, :, None] + squared_norms[:, None, :]
    squared = np.maximum(0, norm_sums - products - products.swapaxes(1, 2))
    tokens = positions - pad
    initial, recent = pad + END_PERCENT * tokens // 100, pad + (100 - END_PERCENT) * tokens // 100
    ends = position_weights[:, pad:initial].sum(1) + position_weights[:, recent:].sum(1)
    return LayerDistances(tuple(layers), np.sqrt(squared / count).mean(0), ends / count, len(sample.positions))


@torch.no_grad()
def attention_sums(sample: SampledQueries, keys: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Compute sums over the attention rows of one sequence, each row as often as its weight says.

    See `layer_distances` for the arguments. Keys on other devices are copied to that of the first layer, a few KV heads
    at a time.

    Returns:
        float64 `[heads, layers, layers]`: products of the weights of two layers, summed over keys and rows; and float64
            `[layers, positions]`: weights that each position received, summed over rows, mean over the heads.
            Positions after the last row received nothing.
    """
    device, (pad,) = keys[0].device, sample.pads
    _, heads, _, _ = sample.queries[0].shape
    kv_heads, num_layers, num_keys = keys[0].shape[1], len(keys), int(sample.positions[-1]) + 1
    group = heads // kv_heads
    # [kv_heads, group, n, dim]; float32, as attention kernels compute logits
    queries = []
    for query, scaling in zip(sample.queries, sample.scalings, strict=True):
        scaled = query[0].to(device).float() * (query.shape[3] ** -0.5 if scaling is None else scaling)
        queries.append(scaled.unflatten(0, (-1, group)))
    products = torch.zeros(heads, num_layers, num_layers, device=device)
    position_weights = torch.zeros(num_layers, num_keys, device=device)
    heads_per_step = min(kv_heads, max(1, _LARGEST // (num_layers * group * num_keys)))
    for head in range(0, kv_heads, heads_per_step):
        kv = slice(head, head + heads_per_step)
        layer_keys = [layer[0, kv, :num_keys].to(device).float().transpose(1, 2) for layer in keys]  # [kv, dim, keys]
        width = group * layer_keys[0].shape[0]  # query heads
        rows_per_step = max(1, _LARGEST // (num_layers * width * num_keys))
        for row in range(0, len(sample.positions), rows_per_step):
            span = slice(row, row + rows_per_step)
            weights = _attention([query[kv, :, span] for query in queries], layer_keys, sample.positions[span], pad)
            roots = to_device(np.sqrt(sample.weights[span]), device).float()[:, None]  # a product has each root twice
            flat = weights.mul_(roots).flatten(2)  # [layers, width, n * keys]
            products[head * group : head * group + width] += torch.bmm(flat.transpose(0, 1), flat.permute(1, 2, 0))
            position_weights[:, : weights.shape[-1]] += (weights * roots).sum((1, 2)) / heads
    return products.double().cpu().numpy(), position_weights.double().cpu().numpy()


def _attention(
    queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], positions: np.ndarray, pad: int
) -> torch.Tensor:
    """Return attention weights, float32 `[layers, kv_heads * group, n, keys]`; 0 for rows at padding positions.

    Each layer has scaled queries, `[kv_heads, group, n, dim]`, and keys, `[kv_heads, dim, keys]`. A query sees the keys
    up to its own position, ascending int64 `[n]`, without the `pad` first ones.
    """
    device, num_keys = keys[0].device, int(positions[-1]) + 1
    kv_heads, group, count, _ = queries[0].shape
    weights = torch.empty(len(keys), kv_heads, group * count, num_keys, device=device)
    for layer, (query, layer_keys) in enumerate(zip(queries, keys, strict=True)):
        torch.matmul(query.flatten(1, 2), layer_keys[..., :num_keys], out=weights[layer])
    weights = weights.view(len(keys), kv_heads * group, count, num_keys)
    place = torch.arange(num_keys, device=device)
    hidden = (place > to_device(positions, device)[:, None]) | (place < pad)  # [n, keys]
    return weights.masked_fill_(hidden, -torch.inf).softmax(-1).nan_to_num_()


class KeysOfLayer(Protocol):
    """Rotated keys of a layer, `[batch, kv_heads, held, dim]`, of the last `held` of its positions, or None."""

    index: int
    window: int

    @property
    def keys(self) -> torch.Tensor | None: ...

    @property
    def num_positions(self) -> int: ...

    @property
    def held(self) -> int: ...


class AttentionDistances:
    """Distances between the attention of layers, sampled over all passes of a cache.

    Args:
        interval: Sampling interval, in positions, for decoded tokens and passes of at most this many positions.
        prompt_interval: Minimum sampling interval for longer passes.
        prompt_rows: Maximum number of sampled positions of a longer pass.
    """

    def __init__(self, *, interval: int = 16, prompt_interval: int = 4, prompt_rows: int = 128) -> None:
        self.interval, self.prompt_interval, self.prompt_rows = interval, prompt_interval, prompt_rows
        self._sources: Sequence[KeysOfLayer] = ()
        self._missing = ""
        self._samples: list[SampledQueries] = []  # in the order of their positions
        self._order: torch.Tensor | None = None  # former row of each current row, not applied to the samples yet

    # --- passes

    def begin(self, sources: Sequence[KeysOfLayer], first: int, stop: int, pads: Sequence[int]) -> SampledPass | None:
        """Begin a pass. Return its observer, or None to observe nothing of it, at no cost to the pass.

        Every layer computes the positions from `first` to `stop`, exclusive. `pads` are the rows' left paddings.
        """
        count = stop - first
        stride = self.interval if count <= self.interval else max(self.prompt_interval, -(-count // self.prompt_rows))
        positions = np.arange(first + (stride // 2 - first) % stride, stop, stride)
        if self._samples:  # positions that are computed again are not counted twice
            positions = positions[positions > self._samples[-1].positions[-1]]
        if self._missing or not len(positions):
            return None
        self._sources = _with_full_attention(sources)
        return SampledPass(self, self._sources, first, stop, pads, positions, stride)

    def cannot_see(self, why: str) -> None:
        """Note that the model's attention cannot be observed, for the reason `why`."""
        self._missing = why

    def crop(self, num_positions: int) -> None:
        """Keep only the first `num_positions` positions, like the cache."""
        counts = [int((sample.positions < num_positions).sum()) for sample in self._samples]
        self._samples = [sample.first(count) for sample, count in zip(self._samples, counts, strict=True) if count]

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i of the batch by the former row `rows[i]`. Samples follow later, in `result`."""
        self._order = rows if self._order is None else self._order.index_select(0, rows.to(self._order.device))

    def fork(self, sources: Sequence[KeysOfLayer]) -> AttentionDistances:
        """Return an independent copy for the cache that owns `sources`."""
        twin = copy.copy(self)
        twin._samples = list(self._samples)
        twin._sources = _with_full_attention(sources)
        return twin

    def take(self, sample: SampledQueries) -> None:
        """Count the sampled queries of a complete pass."""
        self._samples = [*self._ordered_samples(), sample]

    def _ordered_samples(self) -> list[SampledQueries]:
        if (order := self._order) is not None:
            self._samples, self._order = [sample.select(order) for sample in self._samples], None
        return self._samples

    # --- result

    def result(self, row: int = 0) -> LayerDistances:
        """Return the distances so far for one row of the batch. Failures are logged, not raised."""
        samples = self._ordered_samples()
        if self._missing or not samples:
            return LayerDistances.none(self._missing or "no attention was observed")
        keys = [source.keys[row : row + 1] for source in self._sources if source.keys is not None]
        try:
            layers = [source.index for source in self._sources]
            return layer_distances(layers, joined(samples, row), keys, self._sources[0].num_positions)
        except Exception as error:  # no request depends on it
            logger.warning("the attention of a conversation is not compared: %s: %s", type(error).__name__, error)
            return LayerDistances.none(f"comparing attention failed: {error}")


@dataclass(eq=False)
class SampledPass:
    """Observer of one pass that keeps the queries of sampled positions, int64 `[n]`. See `AttentionDistances.begin`.

    Each sample represents `weight` positions. `sources` are the keys of the compared layers.
    """

    owner: AttentionDistances
    sources: Sequence[KeysOfLayer]
    first: int
    stop: int
    pads: Sequence[int]
    positions: np.ndarray
    weight: int
    _queries: dict[int, tuple[torch.Tensor, float | None]] = field(default_factory=dict)
    _places: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the compared layers."""
        return [source.index for source in self.sources]

    def observe(self, layer: int, query: torch.Tensor, scaling: float | None) -> None:
        """Observe the queries of a layer, `[batch, heads, n, dim]`, rotated, with the scale of its logits, or None."""
        count, device = query.shape[2], query.device
        if layer not in self.layers or count < self.stop - self.first:
            return  # queries of other tokens; `end` reports the layer as unseen
        if count > 1:
            if (count, device) not in self._places:
                self._places[count, device] = to_device(self.positions - (self.stop - count), device)
            query = query.index_select(2, self._places[count, device])
        self._queries[layer] = query, scaling

    def undo(self) -> None:
        """Discard the pass. Called when it has failed, possibly after `end`."""
        self.owner.crop(int(self.positions[0]))

    def end(self) -> None:
        """Count the pass. Called when it is complete and the cache holds what it computed."""
        if len(layers := self.layers) < 2:
            return self.owner.cannot_see("fewer than two layers attend to their whole context")
        if missing_layers := [layer for layer in layers if layer not in self._queries]:
            return self.owner.cannot_see(
                f"the attention of layers {missing_layers} is not computed from queries and keys alone"
            )
        if any(source.held < source.num_positions for source in self.sources):
            return self.owner.cannot_see("layers hold only a part of their keys")
        queries, scalings = zip(*(self._queries[layer] for layer in layers), strict=True)
        keys = [source.keys for source in self.sources if source.keys is not None]
        heads, kv_heads = queries[0].shape[1], keys[0].shape[1]
        fit = heads % kv_heads == 0 and all(
            query.shape[1] == heads and key.shape[1] == kv_heads and query.shape[::3] == key.shape[::3]
            for query, key in zip(queries, keys, strict=True)
        )
        if not fit:
            return self.owner.cannot_see("the keys that layers hold are not the keys that their queries attend to")
        weights = np.full(len(self.positions), self.weight)
        return self.owner.take(SampledQueries(self.positions, weights, self.pads, queries, scalings))


def _with_full_attention(sources: Sequence[KeysOfLayer]) -> list[KeysOfLayer]:
    return [source for source in sources if not source.window]
