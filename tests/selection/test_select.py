"""Choosing within a budget, without a model: against brute force."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from segments import LAYOUT

from hf_tiered_cache.restore.rows import RowGroup, SegmentSlice
from hf_tiered_cache.selection.fetched import RowPrefix, RowTokens, attention_of
from hf_tiered_cache.selection.selectors import (
    ChunkMap,
    ProbeHeads,
    SelectionInput,
    budgeted_tokens,
    head_mass,
    jaccard_threshold,
    mean_jaccard,
    top_chunks,
    top_of_each,
)
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.store.shape import SegmentShape


@st.composite
def cut(draw):
    """Draw chunks of a row, in another order in each set, and the mass of each token, often with ties."""
    size = draw(st.sampled_from([1, 3, 16]))
    slots = []
    for segment, chunks in enumerate(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))):
        last = draw(st.integers(1, size))
        slots += [segment * 6 * size + slot for slot in range((chunks - 1) * size + last)]
    sets = draw(st.integers(1, 3))
    ordered = draw(st.booleans())
    orders = [slots if ordered else draw(st.permutations(slots)) for _ in range(sets)]
    rows = sets if sets > 1 else draw(st.integers(1, 3))
    row = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=len(slots), max_size=len(slots))
    mass = draw(st.lists(row, min_size=rows, max_size=rows))
    return ChunkMap.by_slot(np.array(orders), size), np.array(mass, np.float32), draw(st.integers(1, len(slots)))


def chunks_of(chunks, row):
    """Return the chunks of one row, each a list of its tokens in the order of their slots."""
    return [[token for token in chunk if token >= 0] for chunk in chunks.members[row % len(chunks.members)].tolist()]


@given(cut())
def test_chunks_hold_the_tokens_of_consecutive_slots(case):
    chunks, mass, _ = case
    for row in range(len(mass)):
        parts = chunks_of(chunks, row)
        assert sorted(token for chunk in parts for token in chunk) == list(range(chunks.tokens))
        assert [len(chunk) for chunk in parts] == chunks.counts[row % len(chunks.counts)].tolist()
        numbers = chunks.chunk[row % len(chunks.chunk)]
        assert [np.flatnonzero(numbers == number).tolist() for number in range(len(parts))] == list(map(sorted, parts))
        sums = [mass[row][chunk].sum(dtype=np.float64) for chunk in parts]
        assert chunks.sums(mass)[row].tolist() == pytest.approx(sums)


@given(cut())
def test_the_best_chunks_are_taken_whole_until_the_budget_is_spent(case):
    chunks, mass, count = case
    selected_tokens = top_chunks(mass, chunks, count)
    for row, row_mass in enumerate(mass):
        parts = chunks_of(chunks, row)
        parts = list(filter(None, parts))
        order = sorted(range(len(parts)), key=lambda i: (-float(np.mean(row_mass[parts[i]], dtype=np.float64)), i))
        expected: list[int] = []
        for i in order:
            expected += parts[i][: count - len(expected)]
        assert selected_tokens[row].tolist() == sorted(expected)


@pytest.mark.parametrize(
    ("budget", "tokens", "chunk", "expected"),
    [
        (1.0, 100, 16, 100),
        (0.05, 1600, 16, 80),  # 5 of 100 chunks
        (0.05, 100, 16, 16),  # at least one chunk
        (0.29, 1600, 16, 464),  # 0.29 * 100 is a little less than 29 in floating point
        (0.5, 10, 16, 10),  # no more than there are
        (0.25, 1000, 16, 240),  # 63 chunks, the last ragged: 15
    ],
)
def test_what_a_budget_buys(budget, tokens, chunk, expected):
    assert budgeted_tokens(budget, tokens, chunk) == expected


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_mass_is_what_softmax_gives(kv_heads, group, queries, tokens, scaled):
    """Softmax over restored and own keys, causal among the own; summed over rows and heads, by rows × heads."""
    generator = torch.Generator().manual_seed(queries * 100 + tokens)
    heads, dim, scaling = kv_heads * group, 8, 0.5 if scaled else None
    query = torch.randn(heads, queries, dim, generator=generator)
    keys = torch.randn(kv_heads, tokens, dim, generator=generator)
    own = torch.randn(kv_heads, queries, dim, generator=generator)
    all_keys = torch.cat([keys, own], dim=1).repeat_interleave(group, 0)
    logits = query @ all_keys.transpose(1, 2) * (scaling or dim**-0.5)
    visible = torch.ones(queries, tokens + queries, dtype=torch.bool).tril(tokens)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)[:, :, :tokens]
    expected = weights.sum((0, 1)) / (heads * queries)
    mass = head_mass(query, keys, own, scaling).mean(0)
    assert torch.allclose(mass, expected, atol=1e-6)
    assert float(mass.sum()) <= 1 + 1e-5


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_the_best_tokens_of_each_head(heads, tokens, data):
    row = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=tokens, max_size=tokens)
    mass = data.draw(st.lists(row, min_size=heads, max_size=heads))
    count = data.draw(st.integers(1, tokens))
    best = top_of_each(torch.tensor(mass), count)
    for head_tokens, row_mass in zip(best.tolist(), mass, strict=True):
        assert head_tokens == sorted(sorted(range(tokens), key=lambda i: (-row_mass[i], i))[:count])


def test_the_threshold_is_that_of_the_paper():
    """According to the notes on IMPRESS, it is .111, .171, .311 and .517 at 5, 10, 25 and 50 %."""
    thresholds = [jaccard_threshold(round(1000 * budget), 1000, 0.6) for budget in (0.05, 0.1, 0.25, 0.5)]
    assert thresholds == pytest.approx([0.111, 0.171, 0.311, 0.517], abs=5e-4)


def test_how_alike_sets_are():
    sets = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [2, 3, 4, 5]])
    assert mean_jaccard(sets) == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)  # hand-counted: 4 of 4, 2 of 6, 2 of 6
    assert mean_jaccard(sets[:1]) == 1


def test_heads_that_agree_vote_and_others_choose_for_themselves():
    """Keys that three heads' queries meet or miss: two agree on tokens 1 and 2, the third wants 0 and 1."""
    keys = torch.zeros(3, 6, 4)
    for head, tokens in enumerate([(1, 2), (1, 2), (1, 0)]):
        keys[head, tokens[0], 0], keys[head, tokens[1], 0] = 8, 7
    query = torch.zeros(3, 1, 4)
    query[:, :, 0] = 8
    heads_read: list[int | None] = []

    def given(heads):
        heads_read.append(heads)
        return keys[:heads]

    request = SelectionInput(query, torch.zeros(3, 1, 4), given, None, ChunkMap.by_slot(np.arange(6)[None], 6), 2)
    choice = ProbeHeads(heads=3, alpha=0.6).choose(request)  # 0.56 alike, the threshold is 0.38
    assert (choice.tokens.tolist(), heads_read) == ([[1, 2]], [3])
    choice = ProbeHeads(heads=3, alpha=0.1).choose(request)  # the threshold is 0.85
    assert (choice.tokens.tolist(), heads_read) == ([[1, 2], [1, 2], [0, 1]], [3, 3, None])


def test_mass_in_pieces_is_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, keys, own = (torch.randn(n, t, 8, generator=generator) for n, t in ((4, 9), (2, 50), (2, 9)))
    at_once = head_mass(query, keys, own)
    monkeypatch.setattr("hf_tiered_cache.selection.selectors._LARGEST", 400)  # two rows at a time
    assert torch.allclose(head_mass(query, keys, own), at_once, atol=1e-7)


def test_chunks_that_all_heads_share_are_rated_by_the_attention_of_all_heads():
    """A selector may return one set of tokens, and the attention of each head."""
    shape = SegmentShape(LAYOUT, Geometry(16), 32)
    reader = Mock(shape=shape, owners=[("segment", group.index, 0) for group in shape.block_groups])
    row = RowPrefix(RowGroup((0,), 0, (SegmentSlice(reader, 0, 32, 0),)), 32)
    mass = np.zeros((2, 32), np.float32)
    mass[0, :16], mass[1, 16:] = 0.5, 0.25
    attention = attention_of(RowTokens(row, np.arange(32)[None]), mass, (0,), set())
    assert [chunk_mass.tolist() for *_, chunk_mass, _ in attention] == [[4.0, 2.0]]
