"""The estimated change of KV by a merge is that of the merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_tiered_cache.conversations.sharing import SAMPLED_TOKENS, merge_changes
from hf_tiered_cache.store.codecs import Direction
from hf_tiered_cache.store.pairs import merge_layers

LAYERS = 4


def kv_of(tokens, noise=0.5, seed=0):
    """Return keys and values of layers that are less similar the farther apart they are."""
    generator = torch.Generator().manual_seed(seed)
    layer, layers = [torch.randn(1, 2, tokens, 8, generator=generator) for _ in range(2)], []
    for number in range(LAYERS):
        layer = [tensor + noise * torch.randn(tensor.shape, generator=generator) for tensor in layer]
        layers.append(tuple((1 + number) * tensor for tensor in layer))
    return layers


def changed(before, after):
    return float((after - before).square().sum() / before.square().sum())


@pytest.mark.parametrize("toward", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("retained", [0.0, 0.05, 0.5])
def test_the_estimate_is_the_change_of_the_merge(toward, retained):
    kv = kv_of(SAMPLED_TOKENS)
    changes = merge_changes(kv, ["kind"] * LAYERS, toward, retained)
    for first in range(LAYERS):
        for second in range(first + 1, LAYERS):
            after = merge_layers(kv[first], kv[second], Direction(), toward, retained)
            squares = [
                changed(tensor, merged_tensor)
                for layer, merged_layer in zip((kv[first], kv[second]), after, strict=True)
                for tensor, merged_tensor in zip(layer, merged_layer, strict=True)
            ]
            assert changes[first, second] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-3)
    assert (changes[:-1, 1:][np.triu_indices(LAYERS - 1)] > 0.1).all() and changes[0, 1] < changes[0, 3]


def test_some_tokens_stand_for_the_others():
    kv = kv_of(8 * SAMPLED_TOKENS)
    sampled = merge_changes(kv, ["kind"] * LAYERS, 0.4, 0.05)[0, 1]
    after = merge_layers(kv[0], kv[1], Direction(), 0.4, 0.05)
    pairs = zip((*kv[0], *kv[1]), (*after[0], *after[1]), strict=True)
    assert sampled == pytest.approx(np.sqrt(np.mean([changed(*pair) for pair in pairs])), rel=0.1)


def test_equal_layers_do_not_change_and_other_kinds_cannot_be_merged():
    (narrow, *_), wide = kv_of(40), (torch.ones(1, 3, 40, 4),) * 2
    changes = merge_changes([narrow, wide, narrow, wide], ["a", "b", "a", "b"], 0.4, 0.0)
    assert changes[0, 2] == pytest.approx(0, abs=1e-3) and changes[1, 3] == pytest.approx(0, abs=1e-3)
    assert np.isinf(changes[[0, 0, 1, 2], [1, 3, 2, 3]]).all()


def test_a_layer_without_values_and_an_empty_model_are_no_fault():
    zero = (torch.zeros(1, 2, 4, 8),) * 2
    assert np.isfinite(merge_changes([zero, zero], ["kind"] * 2, 0.4, 0.0)[0, 1])
    assert merge_changes([], [], 0.4, 0.0).shape == (0, 0)
