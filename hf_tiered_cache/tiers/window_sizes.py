"""Window sizes by layer and head: 2D window scaling (KVDRIVE, Section 5.2).

Heads differ in what a larger window saves them. A profile says, for each layer and head, what each size saves and
costs; a size for each is chosen so that most is saved within a budget, a multiple-choice knapsack. As in the paper,
greedy upgrades choose for large models and an exact search for small ones. Ours are upgrades that pass over sizes, by
which the greedy choice comes with a bound, and the dynamic program, which is exact for large models too where costs
share a divisor (all windows of one B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .window import HitCounts, Window

SIZES = (1, 2, 3, 4)
_MOST_STATES = 1 << 28  # of the dynamic program, a byte each


class Trace:
    """The candidates of a request's steps, for a profile: see `ByIndex.trace`. Of one row."""

    def __init__(self) -> None:
        self._pools: dict[int, list[np.ndarray]] = {}  # of each layer, int32 [heads, M] each

    def __call__(self, layer: int, pool: np.ndarray) -> None:
        """Take those of a layer's step, int64 `[heads, M]`, best first; of the first step the B chosen ones alone."""
        self._pools.setdefault(layer, []).append(pool.astype(np.int32))

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that chose, ascending."""
        return tuple(sorted(self._pools))

    @property
    def num_columns(self) -> int:
        """B; 0 if none chose."""
        return next((pools[0].shape[1] for pools in self._pools.values()), 0)

    def pools(self) -> np.ndarray:
        """All of them, int32 `[steps, layers, heads, M]`, as `measure` takes them.

        M is the largest of all. Where a step had fewer candidates, one that it has chosen is repeated, which says
        nothing: a window keeps what is chosen.
        """
        of_layers = [self._pools[layer] for layer in self.layers]
        most = max(pool.shape[1] for pools in of_layers for pool in pools)
        as_wide = [
            [np.concatenate([pool, pool[:, :1].repeat(most - pool.shape[1], axis=1)], axis=1) for pool in pools]
            for pools in of_layers
        ]
        return np.array(as_wide).swapaxes(0, 1)


@dataclass(frozen=True, eq=False)
class WindowProfile:
    """What windows of each size save and cost.

    Args:
        sizes: multiples of B, ascending.
        benefits: float64 `[layers, heads, sizes]`, bytes that need not be fetched a step, against a window that keeps
            nothing.
        costs: int64 `[layers, heads, sizes]`, entries in device memory, rising with the size.

    Raises:
        ConfigError: shapes that do not fit, or costs that do not rise.
    """

    sizes: tuple[int, ...]
    benefits: np.ndarray
    costs: np.ndarray

    def __post_init__(self) -> None:
        if self.benefits.ndim != 3 or self.benefits.shape != self.costs.shape:
            raise ConfigError("a profile has one benefit and one cost for each layer, head and size")
        if not self.sizes or self.benefits.shape[2] != len(self.sizes) or sorted(set(self.sizes)) != [*self.sizes]:
            raise ConfigError(
                f"a profile of {self.benefits.shape[2]} sizes in ascending order cannot be of {self.sizes}"
            )
        if (self.costs < 0).any() or (np.diff(self.costs, axis=2) <= 0).any():
            raise ConfigError("a larger window costs more")

    def benefit(self, sizes: np.ndarray) -> float:
        """Bytes that a choice of sizes, `[layers, heads]`, saves a step."""
        return float(self._of(self.benefits, sizes).sum())

    def cost(self, sizes: np.ndarray) -> int:
        """Entries that a choice of sizes, `[layers, heads]`, takes."""
        return int(self._of(self.costs, sizes).sum())

    def _of(self, table: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, np.searchsorted(self.sizes, sizes)[:, :, None], axis=2)


def uniform_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """The largest size that fits for all, int64 `[layers, heads]`: what choosing by head is compared with.

    Raises:
        ConfigError: not even the smallest fits.
    """
    _room_for_upgrades(profile, budget)
    totals = profile.costs.sum(axis=(0, 1))
    return np.full(profile.benefits.shape[:2], profile.sizes[int(np.flatnonzero(totals <= budget)[-1])], np.int64)


def greedy_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """Sizes by the best upgrades first, int64 `[layers, heads]`.

    All begin with the smallest size. Of all upgrades that fit, the one with most benefit for its cost comes next, until
    none fits; an upgrade may pass over sizes, so that as long as all fit it goes along the concave hull of its head's
    sizes. What is chosen lacks less of the optimum than the benefit of one upgrade: of the first on the hulls that did
    not fit. Where benefits are concave and all upgrades cost the same, it is the optimum.

    Args:
        profile: what sizes save and cost.
        budget: entries in all.

    Raises:
        ConfigError: not even the smallest sizes fit.
    """
    room = _room_for_upgrades(profile, budget)
    layers, heads, sizes = profile.benefits.shape
    benefits, costs = profile.benefits.reshape(-1, sizes), profile.costs.reshape(-1, sizes)  # [layers · heads, sizes]
    chosen = np.zeros(len(costs), np.int64)  # indices of sizes
    while True:
        more = benefits - np.take_along_axis(benefits, chosen[:, None], axis=1)
        cost = costs - np.take_along_axis(costs, chosen[:, None], axis=1)
        fits = (cost > 0) & (cost <= room) & (more > 0)
        if not fits.any():
            return np.asarray(profile.sizes, np.int64)[chosen].reshape(layers, heads)
        best = int(np.where(fits, more / np.maximum(cost, 1), 0).argmax())  # of equals the nearest size
        head, size = divmod(best, sizes)
        room -= int(cost[head, size])
        chosen[head] = size


def exhaustive_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """The sizes that save most, int64 `[layers, heads]`, by dynamic programming over the budget.

    Args:
        profile: what sizes save and cost.
        budget: entries in all.

    Raises:
        ConfigError: not even the smallest sizes fit, or heads times units of the budget are too many; a unit is the
            greatest common divisor of what upgrades cost.
    """
    layers, heads, sizes = profile.benefits.shape
    extra = (profile.costs - profile.costs[:, :, :1]).reshape(-1, sizes)  # [layers · heads, sizes], over the smallest
    gain = profile.benefits.reshape(-1, sizes)
    unit, units = _units(profile, budget)
    if len(extra) * (units + 1) > _MOST_STATES:
        raise ConfigError(f"{len(extra)} heads and {units} units of memory are too many to search; choose greedily")
    best = np.zeros(units + 1)  # by units that may be spent: the most that the heads so far save
    choice = np.zeros((len(extra), units + 1), np.int8)
    for head in range(len(extra)):
        before, best = best, best + gain[head, 0]
        for size in range(1, sizes):
            spent = int(extra[head, size]) // unit
            if spent > units:
                break
            value = before[: units + 1 - spent] + gain[head, size]
            better = value > best[spent:]
            choice[head, spent:][better] = size
            best[spent:][better] = value[better]
    chosen = np.zeros(len(extra), np.int64)
    left = units
    for head in reversed(range(len(extra))):
        chosen[head] = choice[head, left]
        left -= int(extra[head, chosen[head]]) // unit
    return np.asarray(profile.sizes, np.int64)[chosen].reshape(layers, heads)


def best_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """The sizes that save most, int64 `[layers, heads]`: searched exactly where that is feasible, else greedily.

    Raises:
        ConfigError: not even the smallest sizes fit.
    """
    few = profile.costs[:, :, 0].size * (_units(profile, budget)[1] + 1) <= _MOST_STATES
    return exhaustive_sizes(profile, budget) if few else greedy_sizes(profile, budget)


def measure(
    pools: np.ndarray,
    num_columns: int,
    entry_bytes: int,
    policy: str = "lookahead",
    sizes: Sequence[int] = SIZES,
    skip: int = 0,
) -> WindowProfile:
    """The profile of a recorded trace: what windows of each size would have saved.

    Args:
        pools: integers `[steps, layers, heads, M]`: the candidates of each step, best first, B chosen ones in front.
        num_columns: B.
        entry_bytes: of one chunk of one head, keys and values.
        policy: of the windows.
        sizes: multiples of B to measure, ascending, at least 1.
        skip: steps at the beginning that fill the windows and are not counted.

    Raises:
        ConfigError: no step is left to count, or a size is below 1.
    """
    steps, layers, heads, _ = pools.shape
    if not 0 <= skip < steps:
        raise ConfigError(f"of {steps} steps {skip} cannot be skipped")
    if min(sizes, default=0) < 1:
        raise ConfigError("a window that keeps nothing saves nothing: sizes are at least 1")
    num_chunks = int(pools.max()) + 1
    benefits = np.empty((layers, heads, len(sizes)))
    for layer in range(layers):
        for index, size in enumerate(sizes):
            window = Window(num_columns, np.full(heads, size * num_columns), num_chunks, policy)
            before = replay(window, pools[:skip, layer])
            after = replay(window, pools[skip:, layer])
            hits = (after.in_columns - before.in_columns) + (after.from_aside - before.from_aside)
            benefits[layer, :, index] = hits * entry_bytes / (steps - skip)
    costs = np.broadcast_to(np.asarray(sizes, np.int64) * num_columns, benefits.shape).copy()
    return WindowProfile(tuple(sizes), benefits, costs)


def replay(window: Window, pools: np.ndarray) -> HitCounts:
    """Put a window through the steps of a trace, integers `[steps, heads, M]`. Returns its counts since it was made."""
    for pool in pools.astype(np.int64, copy=False):
        window.commit(window.plan(pool[:, : window.num_columns], pool))
    return window.hits


def _units(profile: WindowProfile, budget: int) -> tuple[int, int]:
    """Entries that all upgrades cost a multiple of, and how many times that may be spent."""
    extra = profile.costs - profile.costs[:, :, :1]
    unit = max(int(np.gcd.reduce(extra.ravel())), 1)
    return unit, min(_room_for_upgrades(profile, budget), int(extra[:, :, -1].sum())) // unit


def _room_for_upgrades(profile: WindowProfile, budget: int) -> int:
    """Entries that the smallest windows leave. Raises ConfigError if they do not fit."""
    least = int(profile.costs[:, :, 0].sum())
    if least > budget:
        raise ConfigError(f"windows of the smallest size take {least} entries, and the budget is {budget}")
    return budget - least
