"""Windows against a model of plain sets, and against memory that does what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.selection.held import EMPTY, WINDOW_POLICIES, Window


class SetWindow:
    """Window of one head in plain Python: the chunks in columns, and those set aside."""

    def __init__(self, capacity: int, num_columns: int, policy: str) -> None:
        self.capacity, self.num_columns, self.policy = capacity, num_columns, policy
        self.columns: set[int] = set()
        self.aside: set[int] = set()
        self.last_chosen: dict[int, int] = {}
        self.counts = [0, 0, 0]  # of the last step: in columns, from aside, from elsewhere

    def step(self, step: int, selection: list[int], pool: list[int]) -> None:
        if self.capacity == 0:
            self.columns.clear()
        target = set(selection)
        self.counts = [len(target & self.columns), len(target & self.aside), len(target - self.columns - self.aside)]
        leaving = (self.columns | self.aside) - target
        room = max(self.capacity - self.num_columns, 0)
        while len(leaving) > room:
            leaving.remove(min(leaving, key=lambda chunk: self.worth(chunk, pool)))
        self.columns, self.aside = target, leaving
        self.last_chosen.update(dict.fromkeys(selection, step))

    def worth(self, chunk: int, pool: list[int]) -> tuple[int, int, int]:
        in_pool = self.policy == "lookahead" and chunk in pool
        return (-pool.index(chunk) if in_pool else -len(pool), self.last_chosen[chunk], chunk)


class Memory:
    """Device memory of a window, of single numbers: an entry is head and chunk."""

    def __init__(self, window: Window) -> None:
        self.columns = np.full((window.num_heads, window.num_columns), EMPTY)
        self.aside = np.full(window.num_slots, EMPTY)

    @staticmethod
    def entry(heads, chunks):
        return np.where(chunks == EMPTY, EMPTY, heads * 100_000 + chunks)

    def move(self, moves) -> None:
        _, back, set_aside, fetched, _ = moves
        out = self.columns[set_aside.heads, set_aside.columns]
        self.columns[back.heads, back.columns] = self.aside[back.slots]
        self.aside[set_aside.slots] = out
        self.columns[fetched.heads, fetched.columns] = self.entry(fetched.heads, fetched.chunks)


def ranked(rng, steps, heads, chunks, pool, memory=0.9):
    """Draw candidates of each step, best first, int64 `[steps, heads, pool]`, with drifting scores."""
    mean, drift = rng.normal(size=(2, heads, chunks))
    rankings = np.empty((steps, heads, pool), np.int64)
    for step in range(steps):
        drift = memory * drift + (1 - memory**2) ** 0.5 * rng.normal(size=drift.shape)
        rankings[step] = np.argsort(-(mean + drift), axis=1)[:, :pool]
    return rankings


def run(window, pools):
    for pool in pools:
        window.commit(window.plan(pool[:, : window.num_columns], pool))
    return window


def state(window):
    return window.columns.tolist(), window.aside.tolist()


def head_of_slot(window):
    return np.arange(window.num_slots) // max(1, window.num_slots // window.num_heads)


@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(WINDOW_POLICIES),
    num_columns=st.integers(1, 7),
    extra=st.integers(0, 6),
    room=st.sampled_from([None, 0, 1, 2, 5, 9, 30]),
    heads=st.integers(1, 4),
    memory=st.sampled_from([0.0, 0.8, 0.95]),
)
def test_windows_do_what_the_model_does(seed, policy, num_columns, extra, room, heads, memory):
    rng = np.random.default_rng(seed)
    capacity, chunks = 0 if room is None else num_columns + room, num_columns + extra + 20
    window = Window(num_columns, heads, capacity, chunks, policy)
    assert window.num_slots == heads * (room or 0)
    models = [SetWindow(capacity, num_columns, policy) for _ in range(heads)]
    device = Memory(window)
    for step, pool in enumerate(ranked(rng, 25, heads, chunks, num_columns + extra, memory)):
        if step == 12:
            chunks += 5
            window.grow(chunks)
            pool = np.where(pool == pool.min(), chunks - 1, pool)
        selection = rng.permuted(pool[:, :num_columns], axis=1)
        columns, aside = state(window)
        moves = window.plan(selection, pool)
        assert state(window) == (columns, aside)
        window.commit(moves)
        device.move(moves)

        assert window.columns.shape == (heads, num_columns)
        slot_heads = head_of_slot(window)
        for head, model in enumerate(models):
            model.step(step, selection[head].tolist(), pool[head].tolist())
            in_columns = window.columns[head].tolist()
            in_slots = [chunk for chunk in window.aside[slot_heads == head].tolist() if chunk != EMPTY]
            assert sorted(in_columns) == sorted(model.columns) == sorted(selection[head].tolist())
            assert sorted(in_slots) == sorted(model.aside)
            assert len({*in_columns, *in_slots}) == len(in_columns) + len(in_slots) <= max(model.capacity, num_columns)
            num_fetched, num_brought = ((of.heads == head).sum() for of in (moves.fetched, moves.brought))
            assert [num_columns - num_brought - num_fetched, num_brought, num_fetched] == model.counts
            if model.capacity:
                stay = [column for column, chunk in enumerate(columns[head]) if chunk in model.columns]
                assert all(in_columns[column] == columns[head][column] for column in stay)
                assert num_fetched + num_brought == num_columns - len(stay)
        occupied = window.aside != EMPTY
        np.testing.assert_array_equal(device.columns, Memory.entry(np.arange(heads)[:, None], window.columns))
        np.testing.assert_array_equal(device.aside[occupied], Memory.entry(slot_heads, window.aside)[occupied])
        assert_moves_are_disjoint(moves)


def assert_moves_are_disjoint(moves):
    """Assert that nothing is written twice, and that moved entries are in their stated places."""
    into = [*zip(moves.brought.heads.tolist(), moves.brought.columns.tolist(), strict=True)]
    into += zip(moves.fetched.heads.tolist(), moves.fetched.columns.tolist(), strict=True)
    assert len(set(into)) == len(into)
    assert len(set(moves.set_aside.slots.tolist())) == len(moves.set_aside.slots)
    assert len(set(moves.brought.slots.tolist())) == len(moves.brought.slots)


def test_a_plan_that_was_not_committed_leaves_no_trace():
    pools = ranked(np.random.default_rng(1), 12, 3, 60, 10)
    window, undisturbed = (Window(8, 3, 20, 60) for _ in range(2))
    for pool in pools:
        window.plan(pool[:, 2:].copy(), None)  # a fetch fails, and the step is given up
        run(window, [pool])
        run(undisturbed, [pool])
        assert state(window) == state(undisturbed)


def test_moves_are_committed_once_and_in_their_step():
    pools = ranked(np.random.default_rng(2), 3, 2, 40, 8)
    window = Window(8, 2, 16, 40)
    moves = window.plan(pools[0])
    window.commit(moves)
    with pytest.raises(ValueError, match="step"):
        window.commit(moves)
    stale = window.plan(pools[1])
    run(window, pools[2:])
    with pytest.raises(ValueError, match="step"):
        window.commit(stale)


@pytest.mark.parametrize("grown", [0, 10])
def test_copies_go_their_own_ways(grown):
    pools = ranked(np.random.default_rng(3), 12, 2, 60, 10)
    window = run(Window(8, 2, 24, 90), pools[:4])
    before, twin = state(window), window.copy()
    assert state(twin) == before
    twin.grow(90 + grown)
    run(twin, pools[4:8] + 30)
    assert state(window) == before and state(twin) != before
    assert state(run(window, pools[4:])) == state(run(Window(8, 2, 24, 90), pools))


def test_growing_chunk_by_chunk_keeps_what_is_held():
    rng = np.random.default_rng(5)
    window, wide = Window(4, 3, 12, 30), Window(4, 3, 12, 200)
    for chunks in range(30, 200, 3):
        window.grow(chunks)
        pool = rng.permuted(np.tile(np.arange(chunks - 12, chunks), (3, 1)), axis=1)[:, :6]
        assert state(run(window, [pool])) == state(run(wide, [pool]))
    with pytest.raises(ValueError, match="shrink"):
        window.grow(5)


def test_lookahead_keeps_what_ranks_and_lru_what_was_chosen_last():
    steps = [np.array([[0, 1]]), np.array([[2, 3]]), np.array([[4, 5]])]
    pools = [np.array([[0, 1, 6]]), np.array([[2, 3, 0]]), np.array([[4, 5, 0]])]
    aside = {}
    for policy in ("lookahead", "lru"):
        window = Window(2, 1, 4, 8, policy)
        for selection, pool in zip(steps, pools, strict=True):
            window.commit(window.plan(selection, pool))
        aside[policy] = sorted(window.aside.tolist())
    assert aside == {"lookahead": [0, 3], "lru": [2, 3]}


def hit_rates(pools, num_columns, chunks, sizes, policy="lookahead"):
    rates = []
    for size in sizes:
        window, fetched = Window(num_columns, pools.shape[1], size * num_columns, chunks, policy), 0
        for pool in pools:
            moves = window.plan(pool[:, :num_columns], pool)
            window.commit(moves)
            fetched += len(moves.fetched.chunks)
        rates.append(1 - fetched / pools[:, :, :num_columns].size)
    return rates


def test_lookahead_hits_more_often_than_lru():
    """Scores move slowly, with w = 2 and M = 1.25 B as in the paper's Table 3; larger pools gain more."""
    for seed in range(5):
        pools = ranked(np.random.default_rng(seed), 80, 4, 512, 128, memory=0.9)
        (lru,) = hit_rates(pools, 32, 512, (2,), "lru")
        (narrow,) = hit_rates(pools[:, :, :40], 32, 512, (2,))
        (wide,) = hit_rates(pools, 32, 512, (2,))
        assert lru < narrow < wide
        assert wide > lru + 0.01


def test_larger_windows_hit_more_often():
    pools = ranked(np.random.default_rng(7), 80, 4, 512, 40, memory=0.9)
    rates = hit_rates(pools, 32, 512, (0, 1, 2, 3, 4))
    assert rates[0] == 0 and rates == sorted(set(rates))


@pytest.mark.parametrize(
    "arguments",
    [(8, 1, 16, 40, "fifo"), (8, 1, 7, 40), (0, 1, 4, 40), (8, 1, -1, 40), (8, 1, 16, 1 << 24)],
)
def test_windows_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ConfigError):
        Window(*arguments)


@pytest.mark.parametrize(
    ("selection", "pool"),
    [
        ([[0, 1, 1], [0, 1, 2]], None),  # twice from outside
        ([[3, 4, 3], [0, 1, 2]], None),  # twice from a column
        ([[6, 4, 6], [0, 1, 2]], None),  # twice from aside
        ([[0, 1, 40], [0, 1, 2]], None),
        ([[0, 1, 2], [-1, 1, 2]], None),
        ([[0, 1], [0, 1]], None),
        ([[0.0, 1, 2], [0, 1, 2]], None),
        ([[0, 1, 2], [0, 1, 2]], [[0, 1, 2, 40], [0, 1, 2, 3]]),
        ([[0, 1, 2], [0, 1, 2]], [[0, 1], [0, 1]]),
    ],
)
def test_choices_that_make_no_sense_are_refused(selection, pool):
    window = Window(3, 2, 6, 40)
    run(window, [np.array([[6, 7, 8], [6, 7, 8]]), np.array([[3, 4, 5], [3, 4, 5]])])
    before = state(window)
    with pytest.raises(ValueError):
        window.plan(np.array(selection), None if pool is None else np.array(pool))
    assert state(window) == before
