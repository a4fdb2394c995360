"""The prefix index: chained hashes, and the longest prefix against a search by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.geometry import LINK_TOKENS
from hf_tiered_cache.restore.chain import Chain
from hf_tiered_cache.restore.history import History
from hf_tiered_cache.restore.match import longest_prefix
from hf_tiered_cache.store.catalogue import SegmentRow

CHAIN = Chain(("model", "exact", ""))
words = st.lists(st.integers(0, 1), max_size=8)  # each letter stands for a group of tokens


def tokens(word) -> np.ndarray:
    return np.repeat(np.array(word, np.int64), LINK_TOKENS)


def row(number: int, links: list[bytes], usable: int | None = None) -> SegmentRow:
    return SegmentRow(
        str(number),
        "model",
        "exact",
        links[0],
        len(links) if usable is None else usable,
        len(links) * LINK_TOKENS,
        0,
        0,
        0.0,
        None,
        0.0,
        0,
        b"".join(links),
    )


# --- the chain


@given(words, words)
def test_links_are_equal_exactly_as_far_as_tokens_are(a, b):
    first, second = CHAIN.links(tokens(a)), CHAIN.links(tokens(b))
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    shared = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(a), len(b)))
    assert shared == common


@given(words, words, st.integers(0, LINK_TOKENS - 1))
def test_a_chain_goes_on_from_any_link_and_leaves_a_ragged_end_out(a, b, ragged):
    whole = CHAIN.links(np.concatenate([tokens(a + b), np.zeros(ragged, np.int64)]))
    first = CHAIN.links(tokens(a))
    rest = CHAIN.links(tokens(b), first[-1] if first else None)
    assert whole == first + rest


@pytest.mark.parametrize(
    "other",
    [
        Chain(("other", "exact", "")),
        Chain(("model", "approximate", "")),
        Chain(("model", "exact", "long")),
        Chain(("model", "exact", ""), "salt"),
    ],
)
def test_chains_of_other_models_methods_regimes_and_salts_share_nothing(other):
    ids = tokens([0, 1, 1])
    assert not set(CHAIN.links(ids)) & set(other.links(ids))


def test_every_link_is_keyed_by_the_salt():
    """Whoever knows a link, but not the salt, cannot test guesses of the tokens that follow it."""
    a, b = Chain(("model",), "salt a"), Chain(("model",), b"salt b")
    parent = a.links(tokens([0]))[0]
    assert a.links(tokens([1]), parent) != b.links(tokens([1]), parent)
    assert a.links(tokens([1]), parent) != Chain(("model",)).links(tokens([1]), parent)


def test_links_do_not_depend_on_the_kind_of_integers():
    ids = torch.arange(64)
    assert CHAIN.links(ids.numpy()) == CHAIN.links(ids.to(torch.int32).numpy()) == CHAIN.links(np.arange(64))


# --- the longest prefix


def brute_force(links, rows):
    """How many links can be covered by segments that begin anywhere within what is covered."""
    covered = 0
    while True:
        reach = covered
        for start in range(covered + 1):
            for r in rows:
                chain = [r.chain[i : i + 16] for i in range(0, r.usable_links * 16, 16)]
                n = 0
                while n < len(chain) and start + n < len(links) and chain[n] == links[start + n]:
                    n += 1
                if n:
                    reach = max(reach, start + n)
        if reach == covered:
            return covered
        covered = reach


segments = st.lists(st.tuples(words.filter(bool), st.integers(0, 7), st.integers(0, 8)), max_size=10)


@given(words, segments)
def test_the_longest_prefix_is_found(prompt, stored):
    """Segments are cut from random sequences at random places, some damaged behind some link."""
    links = CHAIN.links(tokens(prompt))
    rows = []
    for number, (word, cut, usable) in enumerate(stored):
        mine = CHAIN.links(tokens(word))[cut:]
        if mine:
            rows.append(row(number, mine, min(usable, len(mine))))
    runs = longest_prefix(links, [r for r in rows if r.first in links and r.usable_links])
    at = 0
    for run in runs:
        assert run.start == at
        assert 0 < run.links <= run.row.usable_links
        assert run.row.chain[: run.links * 16] == b"".join(links[at : at + run.links])
        at = run.stop
    assert at == brute_force(links, rows)


def test_a_tree_of_prompts_shares_its_trunk():
    trunk, left, right = [0, 1, 0], [1, 1], [0, 0, 0]
    rows = [
        row(0, CHAIN.links(tokens(trunk + left))),
        row(1, CHAIN.links(tokens(trunk + right))[3:]),  # stored when the trunk was there
    ]
    runs = longest_prefix(CHAIN.links(tokens([*trunk, *right, 1])), rows)
    assert [(run.row.id, run.start, run.links) for run in runs] == [("0", 0, 3), ("1", 3, 3)]


def test_nothing_stored_is_nothing_found():
    assert longest_prefix(CHAIN.links(tokens([0, 1])), []) == []
    assert longest_prefix([], [row(0, CHAIN.links(tokens([0])))]) == []


# --- the history of a cache


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 40)),
        st.tuples(st.just("crop"), st.integers(0, 30)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    ),
    max_size=12,
)


@given(steps, st.lists(st.integers(0, 20), min_size=3, max_size=3), st.booleans())
def test_a_history_knows_its_tokens_and_links_through_everything(steps, pads, look):
    """Against the rectangle of ids that the same steps give."""
    history = History(CHAIN, list(pads))
    rectangle = torch.empty(3, 0, dtype=torch.int64)
    offsets = list(pads)
    for number, (verb, argument) in enumerate(steps):
        if verb == "append":
            ids = torch.randint(0, 3, (3, argument), generator=torch.Generator().manual_seed(number))
            history.append(ids)
            rectangle = torch.cat([rectangle, ids], dim=1)
        elif verb == "crop":
            columns = min(argument, rectangle.shape[1])
            history.crop(columns)
            rectangle = rectangle[:, : rectangle.shape[1] - columns]
        else:
            history.select(argument)
            rectangle = rectangle[argument]
            offsets = [offsets[i] for i in argument]
        if look:
            history.links(0)
    assert history.columns == rectangle.shape[1]
    assert (history.ids() == rectangle.numpy()).all()
    more = np.arange(40)
    for r in range(3):
        row_ids = rectangle[r].numpy()
        assert history.links(r) == CHAIN.links(row_ids[offsets[r] :])
        assert history.links_with(r, more) == CHAIN.links(np.concatenate([row_ids, more])[offsets[r] :])


def test_a_forked_history_goes_its_own_way():
    history = History(CHAIN, [0])
    history.append(torch.zeros(1, 20, dtype=torch.int64))
    twin = history.fork()
    history.append(torch.ones(1, 20, dtype=torch.int64))
    twin.crop(5)
    assert (history.columns, twin.columns) == (40, 15)
    assert history.links(0) == CHAIN.links(np.r_[np.zeros(20), np.ones(20)])
    assert twin.links(0) == []
