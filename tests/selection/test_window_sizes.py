"""Choosing window sizes by layer and head: greedy against the optimum, and measured profiles against the windows."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_same
from test_selective import ask, fill, question

from hf_tiered_cache import KVStore
from hf_tiered_cache.cache.calibrations import profiled_windows
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import KVDrive
from hf_tiered_cache.operations import windows as profiling
from hf_tiered_cache.operations.windows import decode
from hf_tiered_cache.selection import window_sizes
from hf_tiered_cache.selection.window import WindowDecodeSelector
from hf_tiered_cache.selection.window_sizes import (
    Trace,
    WindowProfile,
    exhaustive_sizes,
    greedy_sizes,
    measure,
    replay,
    uniform_sizes,
)
from hf_tiered_cache.selection.window_slots import Window

METHOD = KVDrive(budget=0.2, local=16)
SIZES = (1, 2, 3, 4)


def drawn_profile(rng, layers, heads, concave=False, equal_costs=False):
    """Benefits and costs of whole numbers, some benefits no larger than those of the size before."""
    steps = rng.integers(-2, 20, (layers, heads, 4)).clip(0)
    if concave:
        steps = -np.sort(-steps, axis=2)
    costs = np.full((layers, heads, 4), 6) if equal_costs else rng.integers(1, 9, (layers, heads, 4))
    return WindowProfile(SIZES, steps.cumsum(axis=2).astype(float), costs.cumsum(axis=2))


def best_of_all(profile, budget):
    """The most that any sizes within a budget save, by trying all."""
    shape = profile.benefits.shape[:2]
    tried = (np.array(sizes).reshape(shape) for sizes in itertools.product(SIZES, repeat=int(np.prod(shape))))
    return max(profile.benefit(sizes) for sizes in tried if profile.cost(sizes) <= budget)


def hull_upgrades(profile):
    """Benefit and cost of all upgrades along the heads' concave hulls, the best for their cost first."""
    found = []
    for head, (layer, column) in enumerate(np.ndindex(*profile.benefits.shape[:2])):
        points = [*zip(profile.costs[layer, column].tolist(), profile.benefits[layer, column].tolist(), strict=True)]
        while True:
            ways = [(y - points[0][1], x - points[0][0]) for x, y in points[1:] if y > points[0][1]]
            if not ways:
                break
            benefit, cost = max(ways, key=lambda way: (way[0] / way[1], -way[1]))
            found.append((-benefit / cost, head, cost, benefit))
            points = [point for point in points if point[0] >= points[0][0] + cost]
    return [(benefit, cost) for _, _, cost, benefit in sorted(found)]


def drawn_budget(rng, profile):
    least, most = profile.costs[:, :, 0].sum(), profile.costs[:, :, -1].sum()
    return int(rng.integers(least, most + 3))


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 2), heads=st.integers(1, 2), equal_costs=st.booleans())
def test_the_exhaustive_choice_is_the_best_of_all(seed, layers, heads, equal_costs):
    rng = np.random.default_rng(seed)
    profile = drawn_profile(rng, layers, heads, equal_costs=equal_costs)
    budget = drawn_budget(rng, profile)
    sizes = exhaustive_sizes(profile, budget)
    assert sizes.shape == (layers, heads) and profile.cost(sizes) <= budget
    assert profile.benefit(sizes) == best_of_all(profile, budget)


@given(seed=st.integers(0, 10_000), heads=st.integers(1, 12), concave=st.booleans(), equal_costs=st.booleans())
def test_the_greedy_choice_lacks_less_than_one_upgrade(seed, heads, concave, equal_costs):
    rng = np.random.default_rng(seed)
    profile = drawn_profile(rng, 2, heads, concave, equal_costs)
    budget = drawn_budget(rng, profile)
    greedy, best = greedy_sizes(profile, budget), exhaustive_sizes(profile, budget)
    assert profile.cost(greedy) <= budget
    lacks = profile.benefit(best) - profile.benefit(greedy)
    room, first = budget - int(profile.costs[:, :, 0].sum()), None
    for benefit, cost in hull_upgrades(profile):
        if cost > room:
            first = benefit
            break
        room -= cost
    if first is None or (concave and equal_costs):
        assert lacks == 0
    else:
        assert 0 <= lacks < first


def test_a_whole_model_is_searched_exactly():
    """32 layers of 8 heads, one B for all: the greedy choice is within one upgrade there too."""
    rng = np.random.default_rng(0)
    profile = drawn_profile(rng, 32, 8, equal_costs=True)
    budget = int(profile.costs[:, :, 1].sum())
    uniform, greedy, best = (choose(profile, budget) for choose in (uniform_sizes, greedy_sizes, exhaustive_sizes))
    assert (uniform == 2).all()
    assert profile.cost(best) <= budget and profile.cost(greedy) <= budget
    assert profile.benefit(uniform) < profile.benefit(greedy) <= profile.benefit(best)
    assert profile.benefit(best) - profile.benefit(greedy) < 20 * 3


def test_what_saves_nothing_is_not_bought():
    benefits = np.array([[[5.0, 5, 5, 5], [5.0, 4, 9, 9]]])
    costs = np.array([[[8, 16, 24, 32]] * 2])
    profile = WindowProfile(SIZES, benefits, costs)
    for choose in (greedy_sizes, exhaustive_sizes):
        assert choose(profile, 1000).tolist() == [[1, 3]]
        assert choose(profile, 31).tolist() == [[1, 1]]
        assert choose(profile, 32).tolist() == [[1, 3]]


def test_budgets_below_the_smallest_windows_are_refused():
    profile = drawn_profile(np.random.default_rng(1), 2, 3)
    budget = int(profile.costs[:, :, 0].sum())
    for choose in (uniform_sizes, greedy_sizes, exhaustive_sizes):
        assert (choose(profile, budget) == 1).all()
        with pytest.raises(ConfigError, match="budget"):
            choose(profile, budget - 1)


def test_a_search_that_takes_too_much_is_refused(monkeypatch):
    profile = drawn_profile(np.random.default_rng(1), 2, 3)
    monkeypatch.setattr(window_sizes, "_MOST_STATES", 20)
    with pytest.raises(ConfigError, match="greedy"):
        exhaustive_sizes(profile, 10_000)


@pytest.mark.parametrize(
    ("sizes", "benefits", "costs"),
    [
        ((1, 2), [[[1.0, 2]]], [[[8, 8]]]),
        ((1, 2), [[[1.0, 2]]], [[[8, 16, 24]]]),
        ((1, 2, 3), [[[1.0, 2]]], [[[8, 16]]]),
        ((2, 1), [[[1.0, 2]]], [[[8, 16]]]),
        ((), np.empty((1, 1, 0)), np.empty((1, 1, 0), int)),
    ],
)
def test_profiles_that_make_no_sense_are_refused(sizes, benefits, costs):
    with pytest.raises(ConfigError):
        WindowProfile(sizes, np.array(benefits), np.array(costs))


def trace(steps, chunks, pool, spread):
    """Candidates of each step, `[steps, layers, heads, pool]`: each head walks among as many chunks as its `spread`."""
    rng = np.random.default_rng(0)
    found = np.empty((steps, *np.shape(spread), pool), np.int32)
    for layer, head in np.ndindex(*np.shape(spread)):
        for step in range(steps):
            found[step, layer, head] = rng.permutation(spread[layer][head])[:pool]
    assert found.max() < chunks
    return found


def test_a_profile_says_what_windows_would_have_saved():
    """A head that draws from 8 chunks finds all of them in a window of 8; a smaller one must fetch some again."""
    pools = trace(60, 40, 5, [[4 + 1, 8], [16, 40]])
    profile = measure(pools, 4, entry_bytes=100, skip=20)
    assert profile.sizes == SIZES
    assert profile.costs.tolist() == [[[4, 8, 12, 16]] * 2] * 2
    everything = 4 * 100
    assert (profile.benefits[0, 0, 1:] == everything).all() and profile.benefits[0, 0, 0] < everything
    assert (profile.benefits[0, 1, 1:] == everything).all()
    assert profile.benefits[1, 0, 3] == everything > profile.benefits[1, 0, 2]
    assert (np.diff(profile.benefits[1, 1]) > 0).all()

    counted = measure(pools, 4, entry_bytes=100)
    assert counted.benefits[0, 1, 1] == everything - 8 * 100 / 60  # each of its chunks once
    window = Window(4, [12, 12], 40)
    hits = replay(window, pools[:, 1])
    np.testing.assert_array_equal(counted.benefits[1, :, 2], (hits.in_columns + hits.from_aside) * 100 / 60)


def test_sizes_by_head_fetch_less_than_uniform_ones_of_the_same_memory():
    """The paper's Figure 15: chosen by the first half of a trace, and replayed on the second."""
    pools = trace(120, 60, 5, [[5, 16], [60, 12]])
    profile = measure(pools[:60], 4, entry_bytes=1)
    budget = 4 * 8
    fetched = []
    for choose in (uniform_sizes, greedy_sizes):
        sizes = choose(profile, budget)
        assert profile.cost(sizes) <= budget
        windows = [Window(4, sizes[layer] * 4, 60) for layer in range(2)]
        fetched.append(sum(int(replay(windows[layer], pools[60:, layer]).fetched.sum()) for layer in range(2)))
    assert fetched[1] < 0.9 * fetched[0]


def test_traces_that_say_nothing_are_refused():
    pools = trace(3, 10, 5, [[10]])
    with pytest.raises(ConfigError, match="skipped"):
        measure(pools, 4, 1, skip=3)
    with pytest.raises(ConfigError, match="at least 1"):
        measure(pools, 4, 1, sizes=(0, 1))


# --- of a model, kept in its store


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


@pytest.fixture(scope="module")
def profiled(model, tmp_path_factory):
    """A store with a profile, and what was found."""
    with KVStore(tmp_path_factory.mktemp("profiled"), engine="posix") as store:
        yield store, store.profile_windows(model, prompt(464), method=METHOD, steps=48, progress=False)


@pytest.fixture
def windows(monkeypatch):
    """Each layer's window, as it was made."""
    made = {}

    def row(self, layer, prefix, chosen, real=WindowDecodeSelector.row):
        held = real(self, layer, prefix, chosen)
        made[layer] = held.window
        return held

    monkeypatch.setattr(WindowDecodeSelector, "row", row)
    return made


def capacities(windows, columns):
    """Of each layer and head, in multiples of B."""
    layers = [windows[layer] for layer in sorted(windows)]
    starts = np.array([[*window.first_slots, window.num_slots] for window in layers])
    return (np.diff(starts, axis=1) / columns + 1).tolist()


def test_windows_follow_the_profile_and_no_output_does(model, profiled, windows):
    store, found = profiled
    ids, columns, method = question(prompt(416)), 10, replace(METHOD, window=1.5)
    sizes = found.chosen(1.5)
    assert sizes.shape == (6, 2) and sizes.sum() == 1.5 * sizes.size
    ours, cache = ask(model, store, ids, method)
    assert cache.stats.tokens_restored == 416 and capacities(windows, columns) == sizes.tolist()
    hits = [windows[layer].hits for layer in sorted(windows)]
    uniform, _ = ask(model, store, ids, replace(method, window_sizes="uniform"))
    assert capacities(windows, columns) == [[1.5, 1.5]] * 6
    assert_same(ours, uniform)
    others = [windows[layer].hits for layer in sorted(windows)]
    assert not all(np.array_equal(a.fetched, b.fetched) for a, b in zip(hits, others, strict=True))
    ask(model, store, ids, replace(METHOD, window=3))  # one profile for all windows
    assert capacities(windows, columns) == found.chosen(3).tolist() != sizes.tolist()


def test_a_profile_counts_what_windows_of_its_sizes_count(model, profiled, windows):
    """Fed with a recorded trace, a window has the hits that it has had in the model."""
    store, _ = profiled
    ids = prompt(464)
    for method in (replace(METHOD, window=2), replace(METHOD, window=1), replace(METHOD, window=3, eviction="lru")):
        trace, entry_bytes = decode(store._storage, model, ids[0], replace(method, window_sizes="uniform"), 30)
        pools, columns = trace.pools(), trace.num_columns
        assert pools.shape[:3] == (31, 6, 2) and columns == 10 and entry_bytes == 8 * 2 * 16 * 4
        for layer in range(6):
            again = Window(columns, [int(method.window_multiple * columns)] * 2, 60, method.eviction)
            for ours, theirs in zip(replay(again, pools[:, layer]), windows[layer].hits, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_the_greedy_choice_comes_near_the_best_one_of_a_recorded_profile(profiled):
    _, found = profiled
    profile = found.profile()
    assert (np.diff(profile.benefits, axis=2) >= -1e-9).all()
    for window in (1, 1.5, 2, 3, 4):
        greedy, best = found.chosen(window, greedy_sizes), found.chosen(window)
        assert profile.cost(best) <= window * best.size
        assert found.hit_rate(found.chosen(window, uniform_sizes)) <= found.hit_rate(best)
        lacks = profile.benefit(best) - profile.benefit(greedy)
        assert 0 <= lacks <= np.diff(profile.benefits, axis=2).max()  # less than one upgrade


@pytest.mark.parametrize(
    "change",
    [{"budget": 0.3}, {"index": "clusters"}, {"chunk_tokens": 16}, {"eviction": "lru"}, {"window": 5}, {"window": 0}],
    ids=str,
)
def test_other_choices_have_uniform_windows(change, model, profiled, windows):
    store, _ = profiled
    method = replace(METHOD, **change)
    _, cache = ask(model, store, question(prompt(416)), method)
    assert cache.stats.tokens_restored == 416 and cache.method.window_sizes == "profiled"
    columns = windows[0].num_columns
    assert capacities(windows, columns) == [[max(method.window_multiple, 1)] * 2] * 6


def test_another_model_and_a_store_without_a_profile_have_uniform_windows(model, profiled, windows, tmp_path):
    store, found = profiled
    other, method = build("qwen2", seed=1), replace(METHOD, window=1.5)
    assert found.chosen(1.5).tolist() != [[1.5, 1.5]] * 6
    fill(store, other, prompt(416), METHOD)
    _, cache = ask(other, store, question(prompt(416)), method)
    assert cache.stats.tokens_restored == 416 and capacities(windows, 10) == [[1.5, 1.5]] * 6
    windows.clear()
    with KVStore(tmp_path, engine="posix") as empty:
        fill(empty, model, prompt(416), METHOD)
        ask(model, empty, question(prompt(416)), method)
    assert capacities(windows, 10) == [[1.5, 1.5]] * 6


def test_what_is_kept_outlives_the_store_and_damage(model, tmp_path):
    with KVStore(tmp_path, engine="posix") as store:
        found = store.profile_windows(model, prompt(464), method=METHOD, steps=16, sizes=(1, 3), progress=False)
    path = tmp_path / "calibrations.json"
    ((name, (kept,)),) = json.loads(path.read_text()).items()
    fingerprint, choices = name.split(" ", 2)[1:]
    assert choices == METHOD.profile_name
    with KVStore(tmp_path, engine="posix") as store:
        read = partial(profiled_windows, store._storage, fingerprint, choices, 2)
        assert read() == (2, tuple(map(tuple, found.chosen(2).tolist())))
        for damaged in (7, {}, kept | {"sizes": []}, kept | {"hit_rates": [[[0.5]]]}, kept | {"layers": []}):
            path.write_text(json.dumps({name: [damaged]}))
            assert read() is None


def test_the_quickest_memory_is_taken_unless_another_is_asked_for(model, windows, tmp_path, monkeypatch):
    seconds = {1: 3.0, 2: 2.5, 3: 2.02, 4: 2.0}  # the smallest of those that take as long
    monkeypatch.setattr(profiling, "time_windows", lambda *_, **__: tuple(seconds.values()))
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, prompt(416), METHOD)
        for method in (METHOD, replace(METHOD, window_sizes="uniform")):
            ask(model, store, question(prompt(416)), method)
            assert capacities(windows, 10) == [[2, 2]] * 6  # nothing is known yet
        found = store.profile_windows(model, prompt(464), method=METHOD, steps=16, progress=False)
        assert found.quickest == 3 and replace(found, seconds=()).quickest is None
        for method, sizes in (
            (METHOD, found.chosen(3).tolist()),
            (replace(METHOD, window=1.5), found.chosen(1.5).tolist()),
            (replace(METHOD, window_sizes="uniform"), [[3, 3]] * 6),
            (replace(METHOD, window_sizes="uniform", window=2), [[2, 2]] * 6),
            (replace(METHOD, window_sizes=[[1, 2]] * 6), [[1, 2]] * 6),
        ):
            ask(model, store, question(prompt(416)), method)
            assert capacities(windows, 10) == sizes


def test_windows_are_timed_in_turns(model, windows, profiled, monkeypatch):
    """Each size decodes the same tokens, first the smallest window in front and then the largest."""
    store, _ = profiled
    asked, real, decoded = [], WindowDecodeSelector.row, []

    def row(self, layer, prefix, chosen):
        if layer == 0:
            asked.append(self.selector.window)
        return real(self, layer, prefix, chosen)

    monkeypatch.setattr(WindowDecodeSelector, "row", row)
    took = profiling.time_windows(
        store._storage, model, prompt(464)[0, :432], METHOD, 16, (1, 2, 4), on_token=lambda: decoded.append(1)
    )
    assert asked == [1, 2, 4, 4, 2, 1] and len(decoded) == 6 * 16 and min(took) > 0


def test_layers_with_a_sliding_window_have_no_sizes(windows, tmp_path):
    model = build("gemma3")
    with KVStore(tmp_path, engine="posix") as store:
        found = store.profile_windows(model, prompt(464), method=METHOD, steps=16, progress=False)
        _, cache = ask(model, store, question(prompt(416)), replace(METHOD, window=2))
    assert found.layers == (2, 5) and [*windows] == [2, 5]
    assert [len(sizes) for sizes in cache.method.window_sizes] == [0, 0, 2, 0, 0, 2]
    assert capacities(windows, 10) == found.chosen(2).tolist()


def test_sizes_given_by_hand(model, profiled, windows):
    store, _ = profiled
    sizes = [[1, 2], [2, 3], [0, 1], [2.5, 2], [4, 1], [1, 1]]
    ask(model, store, question(prompt(416)), replace(METHOD, window_sizes=sizes))
    assert capacities(windows, 10) == [[1, 2], [2, 3], [1, 1], [2.5, 2], [4, 1], [1, 1]]
    with pytest.raises(ConfigError, match="layer 0 with 2 KV heads"):
        ask(model, store, question(prompt(416)), replace(METHOD, window_sizes=[[1]] * 6))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "exact"}, "KVDrive"),
        ({"method": "kv_drive:budget=1"}, "below 1"),
        ({"method": KVDrive(0.2, local=16, window=5)}, "1 to 4 times"),
        ({"steps": 460}, "464 tokens"),
        ({"steps": 16, "method": KVDrive(0.9, local=400)}, "nothing was selected"),
    ],
    ids=str,
)
def test_what_cannot_be_profiled_is_refused(settings, says, model, tmp_path):
    with KVStore(tmp_path, engine="posix") as store, pytest.raises(ConfigError, match=says):
        store.profile_windows(model, prompt(464), progress=False, **settings)


def test_a_trace_repeats_a_chosen_candidate_where_a_step_had_fewer():
    trace, rng = Trace(), np.random.default_rng(0)
    steps = [np.stack([rng.permutation(20)[:count] for _ in range(2)]) for count in (3, 7, 5, 7)]  # [heads, M]
    for pool in steps:
        for layer in (4, 1):
            trace(layer, pool + layer)
    pools = trace.pools()
    assert pools.shape == (4, 2, 2, 7)
    assert trace.layers == (1, 4)
    for step, pool in enumerate(steps):
        for number, layer in enumerate((1, 4)):
            found, count = pools[step, number], pool.shape[1]
            assert (found[:, :count] == pool + layer).all()
            assert (found[:, count:] == pool[:, :1] + layer).all()
