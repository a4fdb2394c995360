"""Which layers share, on distances made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.conversations.distances import LayerDistances
from hf_tiered_cache.conversations.sharing import (
    calibrated_gamma,
    nearest_pairs,
    share_layers,
    target_pairs,
)


def matrix(near, count, far=0.9):
    """Return distances: `far` for all layers except the pairs in `near`."""
    distances = np.full((count, count), far)
    np.fill_diagonal(distances, 0)
    for (first, second), distance in near.items():
        distances[first, second] = distances[second, first] = distance
    return distances


def distances(near, shares, layers=None):
    euclidean = matrix(near, len(shares))
    return LayerDistances(layers or tuple(range(len(shares))), euclidean, np.array(shares, float), 10)


def test_nearest_pairs_come_first_and_no_layer_is_in_two():
    near = {(2, 3): 0.1, (3, 4): 0.15, (4, 5): 0.2, (0, 1): 0.3, (1, 2): 0.12}
    assert share_layers(distances(near, [1] * 8), 0.5, 0.5) == ((2, 3), (4, 5))
    assert share_layers(distances(near, [1] * 8), 0.5, 0.75) == ((2, 3), (4, 5), (0, 1))
    assert share_layers(distances(near, [1] * 8), 0.5, 0) == ()
    assert share_layers(distances(near, [1] * 8), 0.5, 0.5, ((3, 4),)) == ((3, 4), (1, 2))


def test_pairs_need_not_be_neighbours_and_names_are_the_layers_own():
    near = {(0, 3): 0.1, (1, 2): 0.2}
    assert share_layers(distances(near, [1] * 4, (5, 11, 17, 23)), 0.5, 1.0) == ((5, 23), (11, 17))


def test_the_ratio_is_reached_as_in_the_paper():
    for layers, share, pairs in ((5, 0.5, 2), (8, 0.3, 2), (9, 1.0, 4), (8, 0.25, 1)):
        assert target_pairs(layers, share) == len(share_layers(distances({}, [1] * layers), 0.5, share)) == pairs


def test_layers_that_are_not_initial_recent_never_share():
    near = {(0, 1): 0.01, (2, 3): 0.2, (1, 2): 0.1}
    assert share_layers(distances(near, [0.9, 0.4, 0.8, 0.5]), 0.5, 1.0) == ((2, 3),)
    assert share_layers(distances(near, [0.9, 0.1, 0.1, 0.1]), 0.5) == ()


@pytest.mark.parametrize("far", [0.4, np.inf, np.nan])
def test_layers_beyond_the_maximum_never_share(far):
    near = matrix({(0, 1): 0.3, (2, 4): 0.2}, 6, far=far)
    assert nearest_pairs(range(6), near, 3, most_distance=0.3) == ((2, 4), (0, 1))
    assert nearest_pairs(range(6), near, 3, most_distance=0.25) == ((2, 4),)
    assert nearest_pairs(range(6), near, 3, most_distance=0.1, shared=((1, 5),)) == ((1, 5),)
    assert nearest_pairs([], np.zeros((0, 0)), 3) == ()


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=12), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.8, 0.875, 1.0]),
)
def test_gamma_reproduces_its_target(shares, target):
    all_shares = np.concatenate(shares)
    gamma = calibrated_gamma([np.array(layer_shares) for layer_shares in shares], target)
    expected = round(target * len(all_shares))
    below = all_shares < gamma
    if len(set(all_shares)) == len(all_shares) and np.diff(np.sort(all_shares)).min(initial=1) > 1e-12:
        assert (~below).sum() == expected
    else:  # layers of the same share are on the same side
        assert (all_shares > gamma).sum() <= expected or below.sum() <= len(all_shares) - expected


def test_gamma_comes_of_something():
    with pytest.raises(ValueError, match="at least one"):
        calibrated_gamma([])
