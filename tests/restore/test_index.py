"""The prefix index: chained hashes, and the longest prefix against a search by brute force."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.restore.hashes import History, PrefixHasher, longest_prefix
from hf_tiered_cache.store.catalogue import SegmentRow
from hf_tiered_cache.store.geometry import HASH_TOKENS

HASHER = PrefixHasher(("model", "exact", ""))
words = st.lists(st.integers(0, 1), max_size=8)  # each letter stands for a group of tokens


def tokens(word) -> np.ndarray:
    return np.repeat(np.array(word, np.int64), HASH_TOKENS)


def row(number: int, hashes: list[bytes], usable: int | None = None) -> SegmentRow:
    return SegmentRow(
        str(number),
        "model",
        "exact",
        hashes[0],
        len(hashes) if usable is None else usable,
        len(hashes) * HASH_TOKENS,
        0,
        0,
        0.0,
        None,
        0.0,
        0,
        b"".join(hashes),
    )


# --- the chain


@given(words, words)
def test_prefix_hashes_are_equal_exactly_as_far_as_tokens_are(a, b):
    first, second = HASHER.hashes(tokens(a)), HASHER.hashes(tokens(b))
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    num_shared = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(a), len(b)))
    assert num_shared == common


@given(words, words, st.integers(0, HASH_TOKENS - 1))
def test_hashing_goes_on_from_any_prefix_hash_and_leaves_a_ragged_end_out(a, b, ragged):
    all_hashes = HASHER.hashes(np.concatenate([tokens(a + b), np.zeros(ragged, np.int64)]))
    first = HASHER.hashes(tokens(a))
    more_hashes = HASHER.hashes(tokens(b), first[-1] if first else None)
    assert all_hashes == first + more_hashes


@pytest.mark.parametrize(
    "other_hasher",
    [
        PrefixHasher(("other", "exact", "")),
        PrefixHasher(("model", "approximate", "")),
        PrefixHasher(("model", "exact", "long")),
        PrefixHasher(("model", "exact", ""), "salt"),
    ],
)
def test_chains_of_other_models_methods_regimes_and_salts_share_nothing(other_hasher):
    ids = tokens([0, 1, 1])
    assert not set(HASHER.hashes(ids)) & set(other_hasher.hashes(ids))


def test_every_prefix_hash_is_keyed_by_the_salt():
    """Whoever knows a prefix hash, but not the salt, cannot test guesses of the tokens that follow it."""
    a, b = PrefixHasher(("model",), "salt a"), PrefixHasher(("model",), b"salt b")
    parent = a.hashes(tokens([0]))[0]
    assert a.hashes(tokens([1]), parent) != b.hashes(tokens([1]), parent)
    assert a.hashes(tokens([1]), parent) != PrefixHasher(("model",)).hashes(tokens([1]), parent)


def test_prefix_hashes_do_not_depend_on_the_kind_of_integers():
    ids = torch.arange(64)
    assert HASHER.hashes(ids.numpy()) == HASHER.hashes(ids.to(torch.int32).numpy()) == HASHER.hashes(np.arange(64))


# --- the longest prefix


def brute_force(hashes, rows):
    """Return the maximum number of prefix hashes covered by segments that begin anywhere in the covered part."""
    num_covered = 0
    while True:
        reach = num_covered
        for start in range(num_covered + 1):
            for r in rows:
                chain = [r.chain[i : i + 16] for i in range(0, r.valid_hashes * 16, 16)]
                n = 0
                while n < len(chain) and start + n < len(hashes) and chain[n] == hashes[start + n]:
                    n += 1
                if n:
                    reach = max(reach, start + n)
        if reach == num_covered:
            return num_covered
        num_covered = reach


segments = st.lists(st.tuples(words.filter(bool), st.integers(0, 7), st.integers(0, 8)), max_size=10)


@given(words, segments)
def test_the_longest_prefix_is_found(prompt, stored):
    """Segments are cut from random sequences at random places, some damaged behind some prefix hash."""
    hashes = HASHER.hashes(tokens(prompt))
    rows = []
    for number, (word, offset, usable) in enumerate(stored):
        word_hashes = HASHER.hashes(tokens(word))[offset:]
        if word_hashes:
            rows.append(row(number, word_hashes, min(usable, len(word_hashes))))
    runs = longest_prefix(hashes, [r for r in rows if r.first in hashes and r.valid_hashes])
    at = 0
    for run in runs:
        assert run.start == at
        assert 0 < run.num_hashes <= run.row.valid_hashes
        assert run.row.chain[: run.num_hashes * 16] == b"".join(hashes[at : at + run.num_hashes])
        at = run.stop
    assert at == brute_force(hashes, rows)


def test_a_tree_of_prompts_shares_its_trunk():
    trunk, left_branch, right_branch = [0, 1, 0], [1, 1], [0, 0, 0]
    rows = [
        row(0, HASHER.hashes(tokens(trunk + left_branch))),
        row(1, HASHER.hashes(tokens(trunk + right_branch))[3:]),  # stored when the trunk was there
    ]
    runs = longest_prefix(HASHER.hashes(tokens([*trunk, *right_branch, 1])), rows)
    assert [(run.row.id, run.start, run.num_hashes) for run in runs] == [("0", 0, 3), ("1", 3, 3)]


def test_nothing_stored_is_nothing_found():
    assert longest_prefix(HASHER.hashes(tokens([0, 1])), []) == []
    assert longest_prefix([], [row(0, HASHER.hashes(tokens([0])))]) == []


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
def test_a_history_knows_its_tokens_and_prefix_hashes_through_everything(steps, pads, look):
    """The reference is the rectangle of ids after the same steps."""
    history = History(HASHER, list(pads))
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
            history.prefix_hashes(0)
    assert history.num_positions == rectangle.shape[1]
    assert (history.ids() == rectangle.numpy()).all()
    more = np.arange(40)
    for r in range(3):
        row_ids = rectangle[r].numpy()
        assert history.prefix_hashes(r) == HASHER.hashes(row_ids[offsets[r] :])
        row_tokens = np.concatenate([row_ids, more])[offsets[r] :]
        assert history.prefix_hashes_of(r, row_tokens) == HASHER.hashes(row_tokens)


def test_a_forked_history_goes_its_own_way():
    history = History(HASHER, [0])
    history.append(torch.zeros(1, 20, dtype=torch.int64))
    twin = history.fork()
    history.append(torch.ones(1, 20, dtype=torch.int64))
    twin.crop(5)
    assert (history.num_positions, twin.num_positions) == (40, 15)
    assert history.prefix_hashes(0) == HASHER.hashes(np.r_[np.zeros(20), np.ones(20)])
    assert twin.prefix_hashes(0) == []


def test_a_history_keeps_its_tokens_when_the_caller_writes_to_them():
    """A loop of the caller's own may pass the same tensor for every token."""
    history, ids = History(HASHER, [0]), torch.zeros(1, 16, dtype=torch.int64)
    history.append(ids)
    ids.fill_(1)
    history.append(ids.numpy())
    ids.fill_(2)
    assert history.prefix_hashes(0) == HASHER.hashes(np.r_[np.zeros(16), np.ones(16)])


def test_threads_may_read_a_history_at_once():
    """Its cache looks a prompt up while the lookup of another cache asks whether it begins with the same tokens."""
    at_once = threading.Barrier(2)

    class Meeting(PrefixHasher):
        def hashes(self, tokens, parent=None):
            with suppress(threading.BrokenBarrierError):
                at_once.wait(0.2)
            return super().hashes(tokens, parent)

    history = History(Meeting(("",)), [0])
    history.append(np.arange(64)[None])
    threads = [threading.Thread(target=history.prefix_hashes, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert history.prefix_hashes(0) == PrefixHasher(("",)).hashes(np.arange(64))
