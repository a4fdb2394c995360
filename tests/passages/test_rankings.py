"""Rankings of a passage's tokens: by energy, by change, kept with it, and shared among the passages of a prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import build
from reference import kv_of
from test_leading_text import kept_lead
from test_passages import BOS, PASSAGES, PLACES, PROMPT, ask, blend, epic, expected, fill, fixed, join, tune

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.passages.ranking import RANKINGS, low_frequency_energy, rank_tokens
from hf_tiered_cache.reasons import unranked
from hf_tiered_cache.store.geometry import Geometry


def test_energy_at_low_frequencies_by_hand():
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2, 10, 3, generator=generator)
    frequencies = torch.arange(6)  # of 10 tokens; 2 pi k n / 10
    angle = 2 * torch.pi * torch.arange(10).unsqueeze(1) * frequencies / 10
    low_pass = torch.zeros_like(tensor)
    for k in range(3):  # half of six
        basis = torch.stack([angle[:, k].cos(), angle[:, k].sin()])  # [2, tokens]
        for wave in basis:
            if wave.abs().max() > 1e-6:
                weight = torch.einsum("htd,t->hd", tensor, wave) / wave.square().sum()
                low_pass += torch.einsum("hd,t->htd", weight, wave)
    torch.testing.assert_close(low_frequency_energy(tensor, 0.5), low_pass.square().sum((0, 2)).sqrt())
    torch.testing.assert_close(low_frequency_energy(tensor, 1.0), tensor.square().sum((0, 2)).sqrt())


def test_layers_count_alike_and_ties_go_to_the_first():
    loud, quiet = torch.ones(1, 4, 2), torch.ones(1, 4, 2)
    loud[:, 1] *= 100
    quiet[:, 2] *= 100
    scores = rank_tokens([(1000 * loud, 1000 * loud), (quiet, quiet)], "low_frequency", alpha=1.0)
    assert scores[1] == pytest.approx(scores[2])
    assert scores.sum() == pytest.approx(2)


@pytest.mark.parametrize("lead", [0, 1, 40])
def test_ranked_by_how_far_the_text_of_the_lead_moves_them(lead, store):
    """The reference is the model's own KV of the passage with and without text before it."""
    model, method = build("qwen2"), CacheTune(ranking="context", lead=lead)
    fill(store, model, PASSAGES[:2], method)
    text = kept_lead(store)
    assert len(text) == (39 if lead == 40 else 63)
    without = [PASSAGES[0][None]] if lead == 0 else [join(BOS, PASSAGES[0])]
    alone, behind = kv_of(model, *without), kv_of(model, join(BOS, text, PASSAGES[0]))
    scores = torch.zeros(len(PASSAGES[0]))
    for (_, values), (_, other_values) in zip(alone, behind, strict=True):  # values: keys are rotated here
        a, b = values[0, :, -len(PASSAGES[0]) :], other_values[0, :, -len(PASSAGES[0]) :]
        scores += ((a - b).square().sum((0, 2)) / a.square().sum((0, 2))).sqrt()
    most = np.argsort(-scores_in(store, "context")[len(PASSAGES[0])])[:24]
    ranked_tokens, expected_tokens = set(most.tolist()), set(scores.topk(24).indices.tolist())
    assert len(ranked_tokens & expected_tokens) >= 16  # values alone say nearly the same
    assert len(store.segments()) == 2  # what was only looked at is not stored


def test_passages_that_stay_where_they_were_computed_are_not_ranked(store):
    """Their positions are learned: they are restored where they are exact, or not at all."""
    fill(store, build("opt", max_position_embeddings=512), PASSAGES, tune(ranking="context"))
    assert scores_in(store, "context") == dict.fromkeys(map(len, PASSAGES))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.9])
def test_passages_share_what_is_computed_where_their_scores_compare(share, store):
    model, method = build("qwen2"), tune(share, widen=1)
    fill(store, model, method=method)
    logits, cache = ask(model, store, PROMPT, method)
    scores = {n: scores_in(store, "context")[len(PASSAGES[n])] for n in PLACES}
    ranked = sorted(((-score, n, i) for n, passage_scores in scores.items() for i, score in enumerate(passage_scores)))
    chosen_tokens = {(n, i) for _, n, i in ranked[: int(share * len(ranked))]}
    if share == 0.15:  # other than a share of each
        assert any(sum(n == m for m, _ in chosen_tokens) != int(share * len(PASSAGES[n])) for n in PLACES)
    reused = [
        (start, PASSAGES[n], [i for i in range(len(PASSAGES[n])) if (n, i) not in chosen_tokens])
        for n, start in PLACES.items()
    ]
    reference = expected(model, PROMPT, [(start, tokens, indexes) for start, tokens, indexes in reused if indexes])
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    assert cache.stats.tokens_restored == len(ranked) - len(chosen_tokens)


# --- what is kept with a passage


@pytest.mark.parametrize("ranking", RANKINGS)
def test_a_passage_given_twice_is_stored_once(store, ranking, caplog):
    report = fill(store, build("qwen2"), [PASSAGES[0], PASSAGES[1], PASSAGES[0].clone()], tune(ranking=ranking))
    assert report.prompts == len(store.segments()) == 2
    assert not caplog.records


def test_laid_out_anew_a_passage_keeps_its_ranking(store):
    model, method = build("qwen2"), fixed(0.25)
    fill(store, model)
    before, _ = ask(model, store, PROMPT, method)
    assert store.relayout(Geometry(32, 3), progress=False) == len(PASSAGES)
    assert store.reorder(progress=False) == len(PASSAGES)  # by that ranking
    assert store.reorder(progress=False) == 0
    after, cache = ask(model, store, PROMPT, method)
    assert torch.equal(before, after)
    assert cache.stats.tokens_restored > 0


def test_a_passage_whose_scores_are_lost_goes_by_its_order(tmp_path):
    model, method = build("qwen2"), LOW
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, method=LOW)
        before, cache = ask(model, store, PROMPT, method)
        assert cache.stats.reason == ""
        for row in store.segments():
            store._storage.disk.path(f"{row.id}.rankings").unlink()
        assert ask(model, store, PROMPT, method)[1].stats.reason == ""  # they are still in memory
    with KVStore(tmp_path, engine="posix") as store:
        after, cache = ask(model, store, PROMPT, method)
    assert torch.equal(before, after)
    assert cache.stats.reason == unranked("low_frequency 0.5")


# --- one KV for all rankings

LOW = fixed(0.25, ranking="low_frequency")
WAYS = [
    LOW,
    fixed(0.25, ranking="random"),
    tune(0.25),
    epic(0.25),
    blend(0.25),
]


@pytest.mark.parametrize(
    "stored_by",
    [tune(), CacheTune.paper(), epic(), blend()],
    ids=["by context", "by energy", "epic", "cache_blend"],
)
@pytest.mark.thin(2)
def test_what_is_stored_once_is_found_by_every_method(stored_by, store, tmp_path):
    """Methods find the same KV, and after ranking give the answers of a store of their own."""
    model, tokens = build("qwen2", num_hidden_layers=4), sum(len(PASSAGES[n]) for n in PLACES)
    fill(store, model, method=stored_by)
    ranked = {"", stored_by.ranked_by}
    for way in WAYS:
        logits, cache = ask(model, store, PROMPT, way)
        assert sum(passage.tokens_found for passage in cache.stats.passages) == tokens
        assert cache.stats.reason == ("" if way.ranked_by in ranked else unranked(way.ranked_by))
        ranked.add(way.ranked_by)
        if way.ranked_by == "context":
            assert fill(store, model, method=way).stored == 0
        elif way.ranked_by:
            assert store.rank(way, progress=False) == len(PASSAGES)
        logits, cache = ask(model, store, PROMPT, way)
        assert cache.stats.reason == ""
        with KVStore(tmp_path / "own", engine="posix") as own:
            fill(own, model, method=way)
            reference, _ = ask(model, own, PROMPT, way)
            own.clear(disk=True)
        assert torch.equal(logits, reference)
    assert len(store.segments()) == len(PASSAGES)


@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: way.ranked_by)
def test_ranked_from_what_is_stored_as_when_it_was_computed(way, store, tmp_path):
    model = build("qwen2_sliding")  # a part of its layers has a window
    fill(store, model, method=epic())
    assert scores_in(store, way.ranked_by) == dict.fromkeys(map(len, PASSAGES))
    assert fill(store, model, method=way).stored == 0  # what is stored is ranked, and not computed
    first = scores_in(store, way.ranked_by)
    with KVStore(tmp_path / "own", engine="posix") as own:
        fill(own, model, method=way)
        for tokens, scores in scores_in(own, way.ranked_by).items():
            np.testing.assert_allclose(scores, first[tokens], rtol=1e-5)
    store.rank(WAYS[1], progress=False)  # one more than the others
    assert all(np.array_equal(scores, first[tokens]) for tokens, scores in scores_in(store, way.ranked_by).items())


def test_rankings_that_cannot_be_made_are_refused(store):
    model = build("qwen2")
    fill(store, model)
    with pytest.raises(ConfigError, match="requires the tokens of the passages, which are not stored"):
        store.rank(tune(ranking="context"), progress=False)
    with pytest.raises(ConfigError, match="does not use a ranking"):
        store.rank(epic(), progress=False)
    with pytest.raises(ConfigError, match="prefixes only"):
        store.rank("exact", progress=False)
    (row, *_) = store.segments()
    assert store.rank(replace(LOW, ranking="random"), ids=[row.id], progress=False) == 1
    ranked = {tokens for tokens, scores in scores_in(store, "random").items() if scores is not None}
    assert ranked == {row.tokens}


@pytest.mark.parametrize("options", [{}, {"key": b"k" * 32}, {"codec": "int8"}], ids=["plain", "key", "codec"])
def test_rankings_go_with_their_segment(options, tmp_path):
    model, way = build("qwen2"), replace(LOW, ranking="random")
    with KVStore(tmp_path, engine="posix", **options) as store:
        fill(store, model, method=LOW)
        store.rank(way, progress=False)
        before, _ = ask(model, store, PROMPT, way)
        ranking_paths = {row.tokens: store._storage.disk.path(f"{row.id}.rankings") for row in store.segments()}
        assert store.verify().ok
        assert store.relayout(Geometry(32, 3), progress=False) == len(PASSAGES)
        assert not any(path.exists() for path in ranking_paths.values())
    with KVStore(tmp_path, engine="posix", **options) as store:
        after, cache = ask(model, store, PROMPT, way)
        assert torch.equal(before, after) and cache.stats.reason == ""
        assert set(scores_in(store, "low_frequency 0.5")) == set(map(len, PASSAGES))
        store.gc()
        assert not any(scores is None for scores in scores_in(store, "random").values())
        store.clear(disk=True)
        assert not list((tmp_path / "beside").iterdir())


def test_a_damaged_ranking_is_said_and_made_anew(tmp_path):
    model, method = build("qwen2"), LOW
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, method=LOW)
        for row in store.segments():
            path = store._storage.disk.path(f"{row.id}.rankings")
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    with KVStore(tmp_path, engine="posix") as store:
        _, cache = ask(model, store, PROMPT, method)
        assert cache.stats.tokens_restored == 72 + 84 + 60
        assert cache.stats.reason == unranked("low_frequency 0.5")
        assert store.rank(method, progress=False) == len(PASSAGES)
        assert ask(model, store, PROMPT, method)[1].stats.reason == ""


def test_a_ranking_that_another_process_renews_is_seen(tmp_path):
    model, method = build("qwen2"), replace(LOW, ranking="random")
    with KVStore(tmp_path, engine="posix") as store, KVStore(tmp_path, engine="posix") as other_store:
        fill(store, model, method=LOW)
        assert ask(model, other_store, PROMPT, method)[1].stats.reason == unranked("random")
        store.rank(method, progress=False)
        assert ask(model, other_store, PROMPT, method)[1].stats.reason == ""


def scores_in(store, ranking):
    """Return the scores by the passage's length."""
    disk, rankings = store._storage.disk, store._storage.rankings
    return {row.tokens: rankings.of(disk.reader(row.id), ranking) for row in store.segments()}
