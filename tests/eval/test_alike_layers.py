"""Which layers of real models share, and that the choice follows the conversation."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from conversing import Conversing

from eval.reference.queries import language_of, load
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.conversations.distances import AttentionDistances
from hf_tiered_cache.conversations.sharing import calibrated_gamma, share_layers
from hf_tiered_cache.methods import Exact

XS = Path(__file__).parents[2] / "eval" / "reference" / "xs"
KINDS = {"fact": 1.0, "alias": 1.0, "hop": 1.0, "shot": 1.0}
EVERY_ROW = {"interval": 1, "prompt_interval": 1, "prompt_rows": 1 << 30}


class Watched(Exact, Conversing):
    """Exact reuse with an observer."""

    def observer(self):
        return AttentionDistances()


@lru_cache
def xs():
    return load(XS), language_of(XS)


def observed(model, ids, **options):
    with TemporaryDirectory() as folder, KVStore(folder, engine="posix") as store:
        cache = TieredCache(model, store, method=Watched(), record=False)
        if options:
            cache._executor.observer = AttentionDistances(**options)
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        return cache._executor.observer.result()


def conversation(number, tokens=500):
    """Draw a conversation: even ones are text of books, odd ones have statements among it."""
    _, language = xs()
    if number % 2 == 0:
        return language.text[number * 500 :][:tokens].tolist()
    context = language.context(np.random.default_rng(number), tokens, 4, KINDS)
    return [token for document in context.documents for token in document]


@lru_cache
def distances_of(number):
    return observed(xs()[0], conversation(number), **EVERY_ROW)


def neighbours(distances):
    return np.diagonal(distances.euclidean, 1)


def test_shared_layers_of_the_reference_model_are_alike_and_the_outer_ones_are_not():
    for number in range(6):
        near = neighbours(distances_of(number))
        assert near[2:6].max() < min(near[0], near[6])


def test_strategies_differ_between_conversations():
    gamma = calibrated_gamma([distances_of(number).initial_recent for number in range(8)])
    chosen_pairs = [share_layers(distances_of(number), gamma) for number in range(8)]
    assert len({frozenset(pairs) for pairs in chosen_pairs}) > 1
    for number, pairs in enumerate(chosen_pairs):
        paired = [layer for pair in pairs for layer in pair]
        assert (distances_of(number).initial_recent[paired] >= gamma).all() and len(pairs) <= 2


def test_gamma_holds_for_conversations_it_was_not_calibrated_on():
    gamma = calibrated_gamma([distances_of(number).initial_recent for number in range(8)], 0.75)
    shares = [(distances_of(number).initial_recent >= gamma).mean() for number in range(8, 14)]
    assert np.mean(shares) == pytest.approx(0.75, abs=0.25)  # all layers have similar shares
    exact = [(distances_of(number).initial_recent >= gamma).mean() for number in range(8)]
    assert np.mean(exact) == 0.75


@pytest.mark.parametrize("tokens", [250, 1000])
def test_the_estimate_is_near_and_chooses_alike(tokens):
    """It uses one row in four, and at most 128."""
    for number in range(3):
        ids = conversation(number, tokens)
        exact, sampled = observed(xs()[0], ids, **EVERY_ROW), observed(xs()[0], ids)
        assert exact.rows == tokens and sampled.rows <= 128
        assert np.abs(sampled.euclidean - exact.euclidean).max() < 0.1
        assert np.abs(neighbours(sampled) - neighbours(exact))[2:6].max() < 0.1
        assert np.abs(sampled.initial_recent - exact.initial_recent).max() < 0.1
        (pair,) = share_layers(sampled, 0.0, 0.25)
        assert exact.euclidean[pair] < 1.1 * neighbours(exact).min()
