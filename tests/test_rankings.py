"""Rankings of a passage's tokens: by energy, by change, kept with it, and shared among the passages of a prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import build, prompt
from reference import kv_of
from test_passages import BOS, PASSAGES, PLACES, PROMPT, ask, expected, fill, join, orders_in

from hf_tiered_cache import KVStore
from hf_tiered_cache.geometry import Geometry
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.restore.spectral import RANKINGS, band_energy, rank_tokens


@pytest.fixture
def store(tmp_path):
    with KVStore(tmp_path / "store", engine="posix") as opened:
        yield opened


def test_energy_at_low_frequencies_by_hand():
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2, 10, 3, generator=generator)
    frequencies = torch.arange(6)  # of 10 tokens; 2 pi k n / 10
    angle = 2 * torch.pi * torch.arange(10).unsqueeze(1) * frequencies / 10
    kept = torch.zeros_like(tensor)
    for k in range(3):  # half of six
        basis = torch.stack([angle[:, k].cos(), angle[:, k].sin()])  # [2, tokens]
        for wave in basis:
            if wave.abs().max() > 1e-6:
                weight = torch.einsum("htd,t->hd", tensor, wave) / wave.square().sum()
                kept += torch.einsum("hd,t->htd", weight, wave)
    torch.testing.assert_close(band_energy(tensor, 0.5), kept.square().sum((0, 2)).sqrt())
    torch.testing.assert_close(band_energy(tensor, 0.5, low=False), (tensor - kept).square().sum((0, 2)).sqrt())
    torch.testing.assert_close(band_energy(tensor, 1.0), tensor.square().sum((0, 2)).sqrt())


def test_layers_count_alike_and_ties_go_to_the_first():
    loud, quiet = torch.ones(1, 4, 2), torch.ones(1, 4, 2)
    loud[:, 1] *= 100
    quiet[:, 2] *= 100
    scores = rank_tokens([(1000 * loud, 1000 * loud), (quiet, quiet)], "low_frequency", 1.0)
    assert scores[1] == pytest.approx(scores[2])
    assert scores.sum() == pytest.approx(2)


def test_ranked_by_how_far_other_text_moves_them(store):
    """Against the model's own KV of the passage, alone and behind the others."""
    model, method = build("qwen2"), CacheTune(ranking="context")
    fill(store, model, PASSAGES[:2], method)
    alone, behind = kv_of(model, join(BOS, PASSAGES[0])), kv_of(model, join(BOS, PASSAGES[1], PASSAGES[0]))
    scores = torch.zeros(len(PASSAGES[0]))
    for (_, mine), (_, other) in zip(alone, behind, strict=True):  # values: keys are rotated here
        a, b = mine[0, :, 1:], other[0, :, 1 + len(PASSAGES[1]) :]
        moved = ((a - b).square().sum((0, 2)) / a.square().sum((0, 2))).sqrt()
        scores += moved
    row = next(row for row in store.segments() if row.tokens == len(PASSAGES[0]))
    places = store._storage.disk.reader(row.id).shape.tables.slot_of_token[0].astype(int)
    ours, theirs = set(np.flatnonzero(places < 24)), set(scores.topk(24).indices.tolist())
    assert len(ours & theirs) >= 16  # values alone say nearly the same
    assert len(store.segments()) == 2  # what was only looked at is not stored


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_what_stands_before_a_passage_has_positions(family, store):
    """A model of 128 positions, some of them learned, is not asked for more."""
    model, method = build(family, max_position_embeddings=128), CacheTune(ranking="context")
    fill(store, model, [*PASSAGES, prompt(127, seed=6)[0]], method)
    importance = [store._storage.disk.reader(row.id).shape.tables.importance for row in store.segments()]
    assert sum(scores.max() > 0 for scores in importance) == len(PASSAGES)
    assert sum((scores == 0).all() for scores in importance) == 1  # where no position is left for anything else


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.9])
def test_passages_share_what_is_computed_where_their_scores_compare(share, store):
    model, method = build("qwen2"), CacheTune(recompute=share, ranking="context")
    fill(store, model, method=method)
    ours, cache = ask(model, store, PROMPT, method)
    scores = {n: orders_in(store)[len(PASSAGES[n])].importance for n in PLACES}
    every = sorted(((-score, n, i) for n, some in scores.items() for i, score in enumerate(some)))
    chosen = {(n, i) for _, n, i in every[: int(share * len(every))]}
    if share == 0.15:  # other than a share of each
        assert any(sum(n == m for m, _ in chosen) != int(share * len(PASSAGES[n])) for n in PLACES)
    reused = [
        (start, PASSAGES[n], [i for i in range(len(PASSAGES[n])) if (n, i) not in chosen])
        for n, start in PLACES.items()
    ]
    theirs = expected(model, PROMPT, [(start, tokens, which) for start, tokens, which in reused if which])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    assert cache.stats.tokens_restored == len(every) - len(chosen)


# --- what is kept with a passage


@pytest.mark.parametrize("ranking", RANKINGS)
def test_a_passage_given_twice_is_stored_once(store, ranking, caplog):
    model, method = build("qwen2"), CacheTune(ranking=ranking)
    report = fill(store, model, [PASSAGES[0], PASSAGES[1], PASSAGES[0].clone()], method)
    assert report.prompts == len(store.segments()) == 2
    assert not caplog.records
    fill(store, model, [PASSAGES[2]], method)
    assert ("store several" in caplog.text) == (ranking == "context")


def test_laid_out_anew_a_passage_keeps_its_ranking(store):
    model, method = build("qwen2"), CacheTune(recompute=0.25)
    fill(store, model)
    before, _ = ask(model, store, PROMPT, method)
    assert store.relayout(Geometry(32, 3), progress=False) == len(PASSAGES)
    assert store.reorder(progress=False) == 0
    after, cache = ask(model, store, PROMPT, method)
    assert torch.equal(before, after)
    assert cache.stats.tokens_restored > 0


def test_a_passage_stored_without_scores_goes_by_its_order(store):
    """As format 2 stored them."""
    model, method = build("qwen2"), CacheTune(recompute=0.25)
    fill(store, model)
    before, _ = ask(model, store, PROMPT, method)
    for row in store.segments():
        reader = store._storage.disk.reader(row.id)
        store._storage.rewriter._replace(row.id, reader.shape.geometry, replace(reader.shape.tables, importance=None))
    assert all(order.importance is None for order in orders_in(store).values())
    after, cache = ask(model, store, PROMPT, method)
    assert torch.equal(before, after)
    assert cache.stats.tokens_restored > 0
