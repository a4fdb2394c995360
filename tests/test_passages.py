"""Passages restored anywhere in a prompt: found by their tokens, at their new positions, the rest in true context."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import Remembering, kv_of
from test_plans import SCALINGS

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import CacheBlend, CacheTune, Epic, Exact
from hf_tiered_cache.restore.passages import find_passages
from hf_tiered_cache.restore.prefix_hasher import PrefixHasher
from hf_tiered_cache.restore.spectral import RANKINGS
from hf_tiered_cache.store.catalogue import SegmentRow

# a passage and the prompt it stands in are under the same frequencies
ROPES = SCALINGS | {"longrope": SCALINGS["longrope"] | {"original_max_position_embeddings": 2048}}
PASSAGES = [prompt(tokens, seed=seed)[0] for seed, tokens in enumerate((96, 64, 112, 80), start=1)]
QUESTION = prompt(24, seed=77)[0]
BOS = torch.tensor([1])


@pytest.fixture
def store(tmp_path):
    with KVStore(tmp_path / "store", engine="posix") as opened:
        yield opened


def fill(store, model, passages=PASSAGES, method=None):
    return store.precompute(model, passages, segments=True, method=method, progress=False)


def join(*parts):
    return torch.cat(parts).unsqueeze(0)


@torch.no_grad()
def ask(model, store, ids, method, **options):
    cache = TieredCache(model, store, method=method, record=False, **options)
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits, cache


class Replacing(Remembering):
    """A DynamicCache in which some columns' KV is that of passages encoded apart, from some layer on."""

    def __init__(self, model, columns, kv, from_layer):
        super().__init__(model)
        self.columns, self.kv, self.from_layer = columns, kv, from_layer

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx >= self.from_layer and key_states.shape[2] > 1:
            key_states[:, :, self.columns] = self.kv[layer_idx][0]
            value_states[:, :, self.columns] = self.kv[layer_idx][1]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def expected(model, ids, reused, from_layer=0, sink=BOS):
    """Logits of the last token where `reused`, a list of (start, tokens, which of them), is not computed in context.

    Without hf_tiered_cache: a passage is computed behind its sink at the positions where it will stand.
    """
    columns, parts = [], []
    for start, tokens, which in reused:
        cache = Remembering(model)
        positions = torch.arange(start - len(sink), start + len(tokens)).unsqueeze(0)
        model(input_ids=join(sink, tokens), position_ids=positions, past_key_values=cache, use_cache=True)
        columns += [start + int(i) for i in which]
        parts.append([tuple(t[:, :, len(sink) + torch.as_tensor(which)] for t in layer) for layer in cache.all()])
    kv = [tuple(torch.cat([part[i][t] for part in parts], dim=2) for t in (0, 1)) for i in range(len(parts[0]))]
    return model(input_ids=ids, past_key_values=Replacing(model, columns, kv, from_layer), logits_to_keep=1).logits


PROMPT = join(BOS, prompt(7, seed=50)[0], PASSAGES[2], PASSAGES[0], prompt(3, seed=51)[0], PASSAGES[3], QUESTION)
PLACES = {2: 8, 0: 120, 3: 219}
"""Where passages stand in it."""


def of_each(choose):
    return [(start, PASSAGES[number], choose(PASSAGES[number])) for number, start in PLACES.items()]


def orders_in(store):
    """By the passage's length."""
    return {row.tokens: store._storage.disk.reader(row.id).shape.tables for row in store.segments()}


def chosen_by(store, share):
    """Of each passage, the tokens that its stored ranking leaves to be restored."""
    places = {
        tokens: order.slot_of_token[0].astype(int) for tokens, order in orders_in(store).items() if order is not None
    }
    return lambda passage: [i for i, place in enumerate(places[len(passage)]) if place >= int(share * len(passage))]


# --- exactness


FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
    "qwen2_sliding",
    "smollm3",
    "gpt_neox",
    "glm4",
    "cohere",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_reused_tokens_stand_at_their_new_positions(family, store):
    """Full reuse, against passages that were computed where they stand."""
    model = build(family)
    fill(store, model)
    ours, cache = ask(model, store, PROMPT, CacheTune(recompute=0.0))
    assert cache.stats.tokens_restored == sum(len(PASSAGES[number]) for number in PLACES)
    theirs = expected(model, PROMPT, of_each(lambda passage: range(len(passage))))
    full = model(input_ids=PROMPT, logits_to_keep=1).logits.detach()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(full.abs().max()))
    assert (ours - full).abs().max() > 1e-3 * full.abs().max()  # so that the line above says something


@pytest.mark.parametrize("rope", ROPES)
def test_positions_under_every_scaling(rope, store):
    model = build("llama", rope_parameters=ROPES[rope], max_position_embeddings=2048)
    fill(store, model)
    ours, cache = ask(model, store, PROMPT, CacheTune(recompute=0.25))
    assert cache.stats.tokens_restored > 0
    theirs = expected(model, PROMPT, of_each(chosen_by(store, 0.25)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("check_layer", [0, 1])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("ranking", RANKINGS)
def test_chosen_tokens_are_computed_in_true_context(ranking, share, check_layer, store):
    model = build("qwen2")
    method = CacheTune(recompute=share, ranking=ranking, check_layer=check_layer, across=False)
    fill(store, model, method=method)
    ours, cache = ask(model, store, PROMPT, method)
    theirs = expected(model, PROMPT, of_each(chosen_by(store, share)), from_layer=check_layer)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    restored = sum(len(PASSAGES[n]) - int(share * len(PASSAGES[n])) for n in PLACES)
    assert cache.stats.tokens_restored == (0 if check_layer else restored)


def test_epic_computes_the_beginnings(store):
    model = build("qwen2")
    fill(store, model)
    ours, _ = ask(model, store, PROMPT, Epic(first=20))
    theirs = expected(model, PROMPT, of_each(lambda passage: range(20, len(passage))))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_cacheblend_computes_what_has_changed_most(share, store):
    model = build("qwen2")
    fill(store, model)
    ours, _ = ask(model, store, PROMPT, CacheBlend(recompute=share))
    values, deviation = kv_of(model, PROMPT)[1][1], {}
    for number, start in PLACES.items():
        alone = kv_of(model, join(BOS, PASSAGES[number]))[1][1][:, :, 1:]
        changed = (values[:, :, start : start + alone.shape[2]] - alone).square().sum((0, 1, 3))
        deviation |= {(number, i): float(d) for i, d in enumerate(changed)}
    chosen = set(sorted(deviation, key=lambda token: -deviation[token])[: int(share * len(deviation))])
    reused = [
        (start, PASSAGES[number], [i for i in range(len(PASSAGES[number])) if (number, i) not in chosen])
        for number, start in PLACES.items()
    ]
    theirs = expected(model, PROMPT, reused, from_layer=2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_cacheblend_of_everything_is_full_recompute(store):
    model = build("qwen2")
    fill(store, model)
    ours, _ = ask(model, store, PROMPT, CacheBlend(recompute=1.0))
    full = model(input_ids=PROMPT, logits_to_keep=1).logits.detach()
    torch.testing.assert_close(ours, full, rtol=0, atol=1e-5 * float(full.abs().max()))


def test_computing_everything_is_full_recompute(store):
    model = build("qwen2")
    fill(store, model)
    ours, cache = ask(model, store, PROMPT, CacheTune(recompute=1.0))
    assert torch.equal(ours, model(input_ids=PROMPT, logits_to_keep=1).logits)
    assert cache.stats.tokens_restored == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "opt"])
def test_a_passage_at_the_beginning_is_exact(family, store):
    """Behind the sink it was computed with: nothing of it is computed, also where it could stand nowhere else."""
    model, ids = build(family), join(BOS, PASSAGES[0], QUESTION)
    fill(store, model)
    ours, cache = ask(model, store, ids, CacheTune(recompute=0.5))
    assert cache.stats.tokens_restored == len(PASSAGES[0])
    full = model(input_ids=ids, logits_to_keep=1).logits.detach()
    torch.testing.assert_close(ours, full, rtol=0, atol=2e-5 * float(full.abs().max()))


def test_a_stored_prefix_is_restored_whole(store):
    model = build("qwen2")
    fill(store, model)
    beginning = join(BOS, PASSAGES[1], PASSAGES[2])
    with torch.no_grad():
        cache = TieredCache(model, store)
        model(input_ids=beginning, past_key_values=cache)
        cache.store_now()
    store.flush()
    ids = join(beginning[0], PASSAGES[0], QUESTION)
    ours, cache = ask(model, store, ids, CacheTune(recompute=0.25))
    begins = len(beginning[0])
    theirs = expected(model, ids, [(begins, PASSAGES[0], chosen_by(store, 0.25)(PASSAGES[0]))])
    assert cache.stats.tokens_restored == begins // 16 * 16 + 72
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


# --- where passages are


def test_the_same_passage_twice(store):
    model = build("qwen2")
    fill(store, model)
    ids = join(BOS, QUESTION, PASSAGES[1], PASSAGES[1], QUESTION)
    ours, cache = ask(model, store, ids, CacheTune(recompute=0.25))
    which = chosen_by(store, 0.25)(PASSAGES[1])
    theirs = expected(model, ids, [(25, PASSAGES[1], which), (89, PASSAGES[1], which)])
    assert cache.stats.tokens_restored == 2 * 48
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_rows_of_a_batch_have_passages_of_their_own(store):
    model = build("qwen2")
    fill(store, model)
    rows = [torch.cat([BOS, PASSAGES[2], QUESTION]), torch.cat([BOS, QUESTION, PASSAGES[1], PASSAGES[0], QUESTION])]
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.int64), row]) for row in rows])
    mask = (ids != 0).long()
    arguments = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 1}
    cache = TieredCache(model, store, method=CacheTune(recompute=0.0), record=False)
    with torch.no_grad():
        ours = model(input_ids=ids, past_key_values=cache, **arguments).logits
    assert cache.stats.tokens_restored > 0
    first = model(input_ids=rows[0].unsqueeze(0), logits_to_keep=1).logits
    torch.testing.assert_close(ours[:1], first, rtol=0, atol=1e-4 * float(first.abs().max()))  # exact in this row


def test_boundaries_may_be_named(store):
    model = build("qwen2")
    fill(store, model)
    found, cache = ask(model, store, PROMPT, CacheTune(), segments=list(PLACES.values()))
    everywhere, other = ask(model, store, PROMPT, CacheTune())
    assert torch.equal(found, everywhere)
    assert cache.stats.tokens_restored == other.stats.tokens_restored
    _, none = ask(model, store, PROMPT, CacheTune(), segments=[1, 2])
    assert none.stats.tokens_restored == 0


words = st.lists(st.integers(0, 2), min_size=16, max_size=80)


@given(st.lists(words, min_size=1, max_size=4), st.data())
def test_found_against_trying_everything(passages, data):
    """Few different tokens, so that passages repeat, overlap and contain one another."""
    hasher = PrefixHasher(("model", "passage", ""))
    rows = [row_of(hasher, np.array(passage)) for passage in passages]
    parts = data.draw(st.lists(st.sampled_from(passages) | st.lists(st.integers(0, 2), max_size=20), max_size=5))
    tokens = np.array([token for part in parts for token in part], np.int64)
    start = data.draw(st.integers(0, 20))
    matches = find_passages(tokens, hasher, lambda hashes: [row for row in rows if row.first in hashes], start)
    whole = [np.array(passage[: len(passage) // 16 * 16]) for passage in passages]
    for match in matches:  # each is there
        assert match.at >= start
        assert any(
            len(p) >= match.stop - match.at and (tokens[match.at : match.stop] == p[: match.stop - match.at]).all()
            for p in whole
        )
    for one, other in itertools.pairwise(matches):
        assert one.stop <= other.at
    longest = 0
    for at in range(start, len(tokens)):
        for passage in whole:
            count = min(len(passage), len(tokens) - at)
            same = tokens[at : at + count] == passage[:count]
            longest = max(longest, (count if same.all() else int(np.argmin(same))) // 16)
    assert max((match.num_hashes for match in matches), default=0) == longest


def row_of(hasher, tokens):
    hashes = hasher.hashes(tokens)
    name = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
    return SegmentRow(
        id=name,
        fingerprint="model",
        provenance="passage",
        first=hashes[0],
        chain=b"".join(hashes),
        tokens=16 * len(hashes),
        valid_hashes=len(hashes),
        position=0,
        nbytes=0,
        created=0.0,
        expires=None,
        used=0.0,
        uses=0,
    )


# --- provenance, faults, words


def test_what_is_approximate_is_never_taken_for_exact(store):
    model = build("qwen2")
    fill(store, model)
    cache = TieredCache(model, store, method=CacheTune(recompute=0.15))
    sequence = model.generate(PROMPT, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert cache.stats.tokens_stored == 0
    turn = join(sequence[0], QUESTION)
    model.generate(turn, past_key_values=cache, max_new_tokens=3, do_sample=False)
    del cache
    store.flush()
    assert len(store.segments()) == len(PASSAGES)
    exact = TieredCache(model, store)
    assert torch.equal(
        model.generate(turn, past_key_values=exact, max_new_tokens=5, do_sample=False),
        model.generate(turn, max_new_tokens=5, do_sample=False),
    )
    assert exact.stats.tokens_restored == 0


def test_a_damaged_passage_is_computed(store, tmp_path):
    model = build("qwen2")
    fill(store, model)
    row = next(row for row in store.segments() if row.tokens == len(PASSAGES[0]))
    store.close()
    with KVStore(tmp_path / "store", engine="posix", host_memory=0) as again:
        reader = again._storage.disk.reader(row.id)
        data = bytearray(again._storage.disk.path(row.id).read_bytes())
        for chunk in range(reader.shape.chunks_in(reader.shape.block_groups[0])):
            data[reader.header.blocks.offset + chunk * reader.shape.block_groups[0].block_bytes] ^= 1
        again._storage.disk.path(row.id).write_bytes(data)
        ours, cache = ask(model, again, PROMPT, CacheTune(recompute=0.0))
        left = [(start, PASSAGES[n], range(len(PASSAGES[n]))) for n, start in PLACES.items() if n != 0]
        theirs = expected(model, PROMPT, left)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
        assert cache.stats.verification_failures >= 1


def test_a_passage_is_stored_once_and_read_without_what_is_computed(tmp_path):
    model = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    passage = prompt(320, seed=9)[0]
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        assert fill(store, model, [passage]).stored == 320
        assert fill(store, model, [passage]).restored == 320
        assert len(store.segments()) == 1
        _, cache = ask(model, store, join(QUESTION, passage, QUESTION), CacheTune(recompute=0.15))
        token = 6 * 2 * 2 * 64 * 4  # layers, keys and values, heads, dim, bytes
        assert cache.stats.bytes_used == (320 - 48) * token
        assert cache.stats.bytes_read == (320 - 48) * token  # 48 tokens are three blocks
        _, cache = ask(model, store, join(QUESTION, passage, QUESTION), Epic(first=24))
        assert cache.stats.bytes_used == (320 - 24) * token  # the first ones lie anywhere: more is read than used
        assert cache.stats.bytes_used < cache.stats.bytes_read <= 320 * token


def test_another_ranking_or_model_finds_nothing(store):
    model = build("qwen2")
    fill(store, model)
    assert ask(model, store, PROMPT, CacheTune(ranking="random"))[1].stats.tokens_restored == 0
    assert ask(build("qwen2", seed=5), store, PROMPT, CacheTune())[1].stats.tokens_restored == 0
    assert ask(model, store, PROMPT, None)[1].stats.tokens_restored == 0


@pytest.mark.parametrize(
    "wrong", [{"recompute": 1.5}, {"recompute": -0.1}, {"ranking": "best"}, {"alpha": 0}, {"check_layer": 2}], ids=str
)
def test_settings_without_meaning_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CacheTune(**wrong)


def test_passages_are_stored_for_methods_that_reuse_them(store):
    with pytest.raises(ConfigError, match="prefixes only"):
        store.precompute(build("qwen2"), PASSAGES, segments=True, method=Exact(), progress=False)


def test_the_reference_is_full_computation_where_nothing_is_reused():
    """So that the comparisons above can fail for the right reason."""
    model = build("qwen2")
    kv = kv_of(model, PROMPT)
    own = [tuple(t[:, :, 8:40] for t in layer) for layer in kv]
    with torch.no_grad():
        ours = model(
            input_ids=PROMPT, past_key_values=Replacing(model, list(range(8, 40)), own, 0), logits_to_keep=1
        ).logits
        full = model(input_ids=PROMPT, logits_to_keep=1).logits
    torch.testing.assert_close(ours, full, rtol=0, atol=1e-5)
