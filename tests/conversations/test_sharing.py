"""Which layers share: Algorithm 1 of Krul, on distances made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.conversations.sharing import ALIKE, LayerDistances, calibrated_gamma, share_layers


def distances(near, shares, layers=None, far=0.9):
    """All layers `far` from one another, but for the pairs in `near`."""
    count = len(shares)
    relative = np.full((count, count), far)
    np.fill_diagonal(relative, 0)
    for (first, second), distance in near.items():
        relative[first, second] = relative[second, first] = distance
    return LayerDistances(layers or tuple(range(count)), relative, relative, np.array(shares, float), 10)


def test_nearest_pairs_come_first_and_no_layer_is_in_two():
    near = {(2, 3): 0.1, (3, 4): 0.15, (4, 5): 0.2, (0, 1): 0.3, (1, 2): 0.12}
    found = share_layers(distances(near, [1] * 8), 0.5, layers_shared=0.5)
    assert found.pairs == ((2, 3), (4, 5)) and found.why_fewer == ""
    assert share_layers(distances(near, [1] * 8), 0.5, layers_shared=0.75).pairs == ((2, 3), (4, 5), (0, 1))
    assert share_layers(distances(near, [1] * 8), 0.5, layers_shared=0).pairs == ()


def test_pairs_need_not_be_neighbours_and_names_are_the_layers_own():
    near = {(0, 3): 0.1, (1, 2): 0.2}
    assert share_layers(distances(near, [1] * 4, (5, 11, 17, 23)), 0.5, 1.0).pairs == ((5, 23), (11, 17))


def test_the_ratio_is_reached_as_in_the_paper():
    near = {(first, first + 1): 0.1 for first in range(9)}
    for layers, shared, pairs in ((5, 0.5, 2), (8, 0.3, 2), (9, 1.0, 4), (8, 0.25, 1)):
        few = {pair: distance for pair, distance in near.items() if pair[1] < layers}
        assert len(share_layers(distances(few, [1] * layers), 0.5, shared).pairs) == pairs


def test_layers_that_are_not_initial_recent_never_share():
    near = {(0, 1): 0.01, (2, 3): 0.2, (1, 2): 0.1}
    found = share_layers(distances(near, [0.9, 0.4, 0.8, 0.5]), 0.5, 1.0)
    assert found.initial_recent == (0, 2, 3) and found.pairs == ((2, 3),)
    assert "2 layers share KV instead of 4" in found.why_fewer and "no other two" in found.why_fewer
    assert "no layers share" in share_layers(distances(near, [0.9, 0.1, 0.1, 0.1]), 0.5).why_fewer


def test_layers_that_are_not_alike_never_share_and_it_says_so():
    found = share_layers(distances({(0, 1): 0.3}, [1] * 6, far=ALIKE + 0.01), 0.5, 1.0)
    assert found.pairs == ((0, 1),)
    assert "2 layers share KV instead of 6" in found.why_fewer and f"{ALIKE + 0.01:.2f}" in found.why_fewer
    assert len(share_layers(distances({}, [1] * 6, far=ALIKE), 0.5, 1.0).pairs) == 3
    assert share_layers(distances({}, [1] * 6), 0.5).why_fewer.startswith("no layers share")


def test_without_distances_nothing_shares():
    found = share_layers(LayerDistances.none("nobody looked"), 0.5)
    assert found.pairs == () and found.why_fewer == "nobody looked"


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=12), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.8, 0.875, 1.0]),
)
def test_gamma_reproduces_its_target(shares, target):
    every = np.concatenate(shares)
    gamma = calibrated_gamma([np.array(each) for each in shares], target)
    wanted = round(target * len(every))
    below = every < gamma
    if len(set(every)) == len(every) and np.diff(np.sort(every)).min(initial=1) > 1e-12:
        assert (~below).sum() == wanted
    else:  # layers of the same share are on the same side
        assert (every > gamma).sum() <= wanted or below.sum() <= len(every) - wanted


def test_gamma_comes_of_something():
    with pytest.raises(ValueError, match="at least one"):
        calibrated_gamma([])
