"""The search for the fastest ratio: on functions that fall and then rise, from any guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.passages.recompute import LOWEST, Costs, fastest_ratio

ratios = st.floats(LOWEST, 1.0)
slopes = st.floats(0.01, 100)


@given(least=ratios, warm=st.floats(0, 1.2), falling=slopes, rising=slopes)
def test_v_shaped(least, warm, falling, rising):
    tried_ratios = []

    def seconds(ratio):
        tried_ratios.append(ratio)
        return (least - ratio) * falling if ratio < least else (ratio - least) * rising

    fastest = fastest_ratio(seconds, warm)
    assert abs(fastest - least) <= 0.01
    assert len(tried_ratios) == len(set(tried_ratios)) <= 14
    assert all(LOWEST <= ratio <= 1 for ratio in tried_ratios)


@given(least=ratios, warm=ratios, power=st.integers(2, 4))
def test_smooth(least, warm, power):
    fastest = fastest_ratio(lambda ratio: abs(ratio - least) ** power, warm)
    assert abs(fastest - least) <= 0.01


@given(warm=ratios)
def test_the_ends(warm):
    assert fastest_ratio(lambda ratio: ratio, warm) <= LOWEST + 0.01
    assert fastest_ratio(lambda ratio: -ratio, warm) >= 1 - 0.01


@given(compute=st.floats(1e-6, 1e-3), load=st.floats(1e-6, 1e-3))
def test_at_the_balanced_ratio_the_model_is_least(compute, load):
    costs = Costs(compute, load, 1e-4)
    balanced = costs.balanced

    def layer_seconds(ratio):  # Equation 9, for 100 tokens
        return max(ratio * 100 * compute, (1 - ratio) * 100 * load) + costs.overhead

    for ratio in (0.0, 0.2, 0.5, 0.8, 1.0):
        assert layer_seconds(balanced) <= layer_seconds(ratio) * (1 + 1e-9)
    assert balanced == pytest.approx(load / (compute + load))
