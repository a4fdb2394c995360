"""Passages restored anywhere in a prompt: found by their tokens, at their new positions, the rest in true context."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from families import build, build_deep, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import Remembering, kv_of
from test_plans import SCALINGS
from thorough import some

from hf_tiered_cache import KVStore, TieredCache, reasons
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import CacheBlend, CacheTune, Epic, Exact
from hf_tiered_cache.passages.finder import PassageIndex, find_passages
from hf_tiered_cache.passages.ranking import RANKINGS
from hf_tiered_cache.passages.report import CHANGED, COVERED, CUT
from hf_tiered_cache.restore.hashes import PassageHasher, siphash
from hf_tiered_cache.store.catalogue import SegmentRow
from hf_tiered_cache.store.disk import SegmentStore
from hf_tiered_cache.store.geometry import Geometry

# a passage and the prompt it stands in are under the same frequencies
ROPES = SCALINGS | {"longrope": SCALINGS["longrope"] | {"original_max_position_embeddings": 2048}}
PASSAGES = [prompt(tokens, seed=seed)[0] for seed, tokens in enumerate((96, 64, 112, 80), start=1)]
QUESTION = prompt(24, seed=77)[0]
BOS = torch.tensor([1])


tune, epic, blend = (partial(method, lead=1) for method in (CacheTune, Epic, CacheBlend))
"""Methods for passages that are computed behind the first token alone."""


def fill(store, model, passages=PASSAGES, method=None):
    return store.precompute(model, passages, passages=True, method=method or tune(), progress=False)


def join(*parts):
    return torch.cat(parts).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class PerPassage(CacheTune):
    """Select the same share of each passage, although the scores of passages compare."""

    def reused_tokens(self, passages):
        return [CacheTune.reused_tokens(self, [passage])[0] for passage in passages]


def fixed(recompute, **options):
    """Select the tokens of each passage by its ranking, the same in all layers and for all questions."""
    return PerPassage(recompute, **({"lead": 1, "widen": 1} | options))


@torch.no_grad()
def ask(model, store, ids, method, **options):
    cache = TieredCache(model, store, method=method, record=False, **options)
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits, cache


class Replacing(Remembering):
    """DynamicCache with the KV of separately encoded passages in some columns, from some layer on."""

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
    """Compute the logits of the last token if `reused`, a list of (start, tokens, index), is not computed in context.

    Without hf_tiered_cache: a passage is computed behind its sink at the positions where it will stand.
    """
    columns, parts = [], []
    for start, tokens, indexes in reused:
        cache = Remembering(model)
        positions = torch.arange(start - len(sink), start + len(tokens)).unsqueeze(0)
        model(input_ids=join(sink, tokens), position_ids=positions, past_key_values=cache, use_cache=True)
        columns += [start + int(i) for i in indexes]
        parts.append([tuple(t[:, :, len(sink) + torch.as_tensor(indexes)] for t in layer) for layer in cache.all()])
    kv = [tuple(torch.cat([part[i][t] for part in parts], dim=2) for t in (0, 1)) for i in range(len(parts[0]))]
    return model(input_ids=ids, past_key_values=Replacing(model, columns, kv, from_layer), logits_to_keep=1).logits


PROMPT = join(BOS, prompt(7, seed=50)[0], PASSAGES[2], PASSAGES[0], prompt(3, seed=51)[0], PASSAGES[3], QUESTION)
PLACES = {2: 8, 0: 120, 3: 219}
"""Where passages stand in it."""


def of_each(choose):
    return [(start, PASSAGES[number], choose(PASSAGES[number])) for number, start in PLACES.items()]


def chosen_by(store, share, ranking="context"):
    """Return the tokens of each passage that its stored ranking leaves to be restored."""
    disk, rankings = store._storage.disk, store._storage.rankings
    scores = {row.tokens: rankings.of(disk.reader(row.id), ranking) for row in store.segments()}

    def restored(passage):
        order = np.argsort(-scores[len(passage)], kind="stable")
        return sorted(order[int(share * len(passage)) :].tolist())

    return restored


@pytest.mark.skipif(not hasattr(transformers, "BeamConfig"), reason="newer transformers")
def test_layers_that_take_more_of_each_token_compute_the_same_ones(store):
    """Beam scales the queries of each token."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mlp_layer_types": ["dense"] * 6, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.BeamForCausalLM(transformers.BeamConfig(**sizes, **heads)).eval()
    fill(store, model)
    logits, cache = ask(model, store, PROMPT, tune(0.3))
    assert cache.stats.tokens_restored > 0
    torch.testing.assert_close(logits, ask(model, store, PROMPT, tune(0.3, widen=1))[0], rtol=0, atol=0)


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


@pytest.mark.parametrize("family", some(FAMILIES))
@pytest.mark.thin(2)
def test_reused_tokens_stand_at_their_new_positions(family, store):
    """Full reuse is compared with passages that were computed at these positions."""
    model = build(family)
    fill(store, model)
    logits, cache = ask(model, store, PROMPT, tune(recompute=0.0))
    assert cache.stats.tokens_restored == sum(len(PASSAGES[number]) for number in PLACES)
    reference = expected(model, PROMPT, of_each(lambda passage: range(len(passage))))
    full = model(input_ids=PROMPT, logits_to_keep=1).logits.detach()
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(full.abs().max()))
    assert (logits - full).abs().max() > 1e-3 * full.abs().max()  # so that the line above says something


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.thin(2)
def test_positions_under_every_scaling(rope, store):
    model = build("llama", rope_parameters=ROPES[rope], max_position_embeddings=2048)
    fill(store, model)
    logits, cache = ask(model, store, PROMPT, fixed(0.25))
    assert cache.stats.tokens_restored > 0
    reference = expected(model, PROMPT, of_each(chosen_by(store, 0.25)))
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.thin(4)
def test_chosen_tokens_are_computed_in_true_context(ranking, share, store):
    model = build("qwen2")
    method = fixed(share, ranking=ranking)
    fill(store, model, method=method)
    logits, cache = ask(model, store, PROMPT, method)
    reference = expected(model, PROMPT, of_each(chosen_by(store, share, method.ranked_by)))
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    expected_tokens = sum(len(PASSAGES[n]) - int(share * len(PASSAGES[n])) for n in PLACES)
    assert cache.stats.tokens_restored == expected_tokens
    assert cache.stats.tokens_recomputed == 0


def test_epic_computes_the_beginnings(store):
    model = build("qwen2")
    fill(store, model, method=epic())
    logits, _ = ask(model, store, PROMPT, epic(first=20))
    reference = expected(model, PROMPT, of_each(lambda passage: range(20, len(passage))))
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_cacheblend_computes_what_has_changed_most(share, store):
    model = build("qwen2")
    fill(store, model)
    logits, _ = ask(model, store, PROMPT, blend(recompute=share))
    values, deviation = kv_of(model, PROMPT)[1][1], {}
    for number, start in PLACES.items():
        alone = kv_of(model, join(BOS, PASSAGES[number]))[1][1][:, :, 1:]
        changes = (values[:, :, start : start + alone.shape[2]] - alone).square().sum((0, 1, 3))
        deviation |= {(number, i): float(d) for i, d in enumerate(changes)}
    recomputed_tokens = set(sorted(deviation, key=lambda token: -deviation[token])[: int(share * len(deviation))])
    reused = [
        (start, PASSAGES[number], [i for i in range(len(PASSAGES[number])) if (number, i) not in recomputed_tokens])
        for number, start in PLACES.items()
    ]
    reference = expected(model, PROMPT, reused, from_layer=2)
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


def test_cacheblend_of_everything_is_full_recompute(store):
    model = build("qwen2")
    fill(store, model)
    logits, _ = ask(model, store, PROMPT, blend(recompute=1.0))
    full = model(input_ids=PROMPT, logits_to_keep=1).logits.detach()
    torch.testing.assert_close(logits, full, rtol=0, atol=1e-5 * float(full.abs().max()))


@pytest.mark.parametrize(("layers", "method"), [(2, blend()), (2, blend(recompute=0.0)), (4, tune(recompute=1.0))])
def test_a_method_that_computes_all_tokens_of_passages_says_so(layers, method, store, caplog):
    """CacheBlend computes all tokens in two layers, and a model may have no more."""
    model = build("qwen2", num_hidden_layers=layers)
    fill(store, model, method=method)
    for _ in range(2):
        _, cache = ask(model, store, PROMPT, method)
        assert (cache.stats.tokens_restored, cache.stats.reason) == (0, reasons.ALL_COMPUTED)
    assert caplog.text.count(reasons.ALL_COMPUTED) == 1
    _, cache = ask(model, store, PROMPT, epic())
    assert cache.stats.tokens_restored > 0 and not cache.stats.reason


def test_computing_everything_is_full_recompute(store):
    model = build("qwen2")
    fill(store, model)
    logits, cache = ask(model, store, PROMPT, tune(recompute=1.0))
    assert torch.equal(logits, model(input_ids=PROMPT, logits_to_keep=1).logits)
    assert cache.stats.tokens_restored == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "opt"])
def test_a_passage_at_the_beginning_is_exact(family, store):
    """After the sink that it was computed with, nothing of it is computed."""
    model, ids = build(family), join(BOS, PASSAGES[0], QUESTION)
    fill(store, model)
    logits, cache = ask(model, store, ids, tune(recompute=0.5))
    assert cache.stats.tokens_restored == len(PASSAGES[0])
    full = model(input_ids=ids, logits_to_keep=1).logits.detach()
    torch.testing.assert_close(logits, full, rtol=0, atol=2e-5 * float(full.abs().max()))


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
    logits, cache = ask(model, store, ids, fixed(0.25))
    begins = len(beginning[0])
    reference = expected(model, ids, [(begins, PASSAGES[0], chosen_by(store, 0.25)(PASSAGES[0]))])
    assert cache.stats.tokens_restored == begins // 16 * 16 + 72
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


# --- where passages are


def test_the_same_passage_twice(store):
    model = build("qwen2")
    fill(store, model)
    ids = join(BOS, QUESTION, PASSAGES[1], PASSAGES[1], QUESTION)
    logits, cache = ask(model, store, ids, fixed(0.25))
    indexes = chosen_by(store, 0.25)(PASSAGES[1])
    reference = expected(model, ids, [(25, PASSAGES[1], indexes), (89, PASSAGES[1], indexes)])
    assert cache.stats.tokens_restored == 2 * 48
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


def test_rows_of_a_batch_have_passages_of_their_own(store):
    model = build("qwen2")
    fill(store, model)
    rows = [torch.cat([BOS, PASSAGES[2], QUESTION]), torch.cat([BOS, QUESTION, PASSAGES[1], PASSAGES[0], QUESTION])]
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.int64), row]) for row in rows])
    mask = (ids != 0).long()
    arguments = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 1}
    cache = TieredCache(model, store, method=tune(recompute=0.0), record=False)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, **arguments).logits
    assert cache.stats.tokens_restored > 0
    first = model(input_ids=rows[0].unsqueeze(0), logits_to_keep=1).logits
    torch.testing.assert_close(logits[:1], first, rtol=0, atol=1e-4 * float(first.abs().max()))  # exact in this row


@pytest.mark.parametrize("family", some(["llama", "gemma2", "qwen2_sliding", "gpt_neox"]))
def test_chunked_prefill_restores_all_passages(family, store):
    """Exceptions are a chunk's last token, and the beginning of a part that the chunk cuts."""
    model = build(family)
    fill(store, model)
    cache = TieredCache(model, store, method=tune(recompute=0.0), record=False)
    with torch.no_grad():
        for chunk in PROMPT.split(100, dim=1):
            logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    computed_positions = {*range(88, 100), 199}
    reused = [
        (start, PASSAGES[n], [i for i in range(len(PASSAGES[n])) if start + i not in computed_positions])
        for n, start in PLACES.items()
    ]
    reference = expected(model, PROMPT, reused)
    assert cache.stats.tokens_restored == 112 + 96 + 80 - 13
    assert [passage.tokens_missed for passage in cache.stats.passages] == [0, 0, 0]
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    cache = TieredCache(model, store, method=tune(recompute=0.0))
    model.generate(PROMPT, past_key_values=cache, prefill_chunk_size=100, max_new_tokens=4, do_sample=False)
    assert (cache.stats.tokens_restored, cache.stats.tokens_stored) == (112 + 96 + 80 - 13, 0)


@pytest.mark.parametrize(
    "method",
    [fixed(0.25), epic(), tune(0.25), blend(0.25)],
    ids=["fixed", "Epic", "CacheTune", "CacheBlend"],
)
@pytest.mark.thin(2)
def test_chunked_prefill_with_what_is_computed(method, store):
    """A passage in each chunk, so that each chunk chooses as one pass would, unless it compares or asks."""
    model, between = build_deep("qwen2"), prompt(4, seed=51)[0]
    fill(store, model)
    ids = join(BOS, between, PASSAGES[1], between, PASSAGES[3], between, QUESTION)
    reference, _ = ask(model, store, ids, method)
    cache = TieredCache(model, store, method=method, record=False)
    with torch.no_grad():
        for chunk in ids.split([1 + 4 + 64 + 2, len(ids[0]) - 71], dim=1):
            logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    assert [passage.tokens_found for passage in cache.stats.passages] == [64, 80]
    if method in (fixed(0.25), epic()):
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_layer_that_compares_holds_no_more_than_its_window(attention, store):
    """All layers with a sliding window share a mask, so they need as many positions in the next chunk."""
    model = build("mistral")
    model.set_attn_implementation(attention)
    fill(store, model)
    cache = TieredCache(model, store, method=tune(0.25), record=False)
    with torch.no_grad():
        for chunk in PROMPT.split(100, dim=1):
            logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            assert {layer.keys.shape[2] for layer in cache.layers} == {model.config.sliding_window - 1}
    assert torch.isfinite(logits).all()
    assert [passage.tokens_found for passage in cache.stats.passages] == [112, 96, 80]


def test_the_next_turn_finds_passages_too(store):
    model = build("qwen2")
    fill(store, model)
    cache = TieredCache(model, store, method=tune(recompute=0.0))
    answer = model.generate(join(BOS, QUESTION, PASSAGES[1], QUESTION), past_key_values=cache, max_new_tokens=4)
    model.generate(join(answer[0], PASSAGES[3], QUESTION), past_key_values=cache, max_new_tokens=4)
    assert cache.stats.tokens_restored == 64 + 80
    assert [passage.tokens_found for passage in cache.stats.passages] == [64, 80]
    assert cache.stats.tokens_stored == 0


# --- what is said of each


def told(cache):
    return [
        (passage.start, passage.tokens_found, passage.tokens_missed, passage.reason) for passage in cache.stats.passages
    ]


def test_each_passage_is_told(store):
    model = build("qwen2")
    store.precompute(model, PASSAGES, passages=True, method=tune(), progress=False, label="a corpus")
    ids = join(BOS, QUESTION, changed(PASSAGES[0], 40, removed=2), QUESTION, PASSAGES[1], PASSAGES[2][:70])
    _, cache = ask(model, store, ids, tune(recompute=0.5))
    assert told(cache) == [
        (25, 80, 16, f"16 tokens {CHANGED}"),
        (144, 64, 0, ""),
        (208, 64, 48, f"48 tokens {CUT}"),
    ]
    assert {passage.label for passage in cache.stats.passages} == {"a corpus"}
    assert "3 / 208 / 64" in str(cache.stats) and "passage at token 25" in cache._repr_html_()
    assert cache.stats.as_dict()["passages"][1]["tokens_found"] == 64


def test_what_covers_a_passage_is_told(store):
    """A stored prefix is exact, and comes first."""
    model = build("qwen2")
    fill(store, model)
    beginning = join(BOS, QUESTION, PASSAGES[0][:50])
    store.precompute(model, beginning, progress=False)
    _, cache = ask(model, store, join(beginning[0], PASSAGES[0][50:], QUESTION), tune(recompute=0.0))
    assert told(cache) == [(25, 48, 48, f"48 tokens {COVERED}")]
    assert cache.stats.tokens_restored == 64 + 48


def test_a_passage_twice_is_told_twice(store):
    model = build("qwen2")
    fill(store, model)
    _, cache = ask(model, store, join(BOS, PASSAGES[1], PASSAGES[1], QUESTION), tune(recompute=0.0))
    assert told(cache) == [(1, 64, 0, ""), (65, 64, 0, "")]


def test_a_passage_twice_is_opened_once(tmp_path, monkeypatch):
    model, names, open_segment = build("qwen2"), [], SegmentStore._open
    with KVStore(tmp_path) as store:
        fill(store, model)
    with KVStore(tmp_path) as store:
        monkeypatch.setattr(SegmentStore, "_open", lambda disk, name: names.append(name) or open_segment(disk, name))
        _, cache = ask(model, store, join(BOS, PASSAGES[1], PASSAGES[1], QUESTION), tune(recompute=0.0))
    assert cache.stats.tokens_restored == 128 and len(names) == 1


def test_a_passage_that_is_too_short_to_be_stored_is_told(store, caplog):
    model, short = build("qwen2"), prompt(9, seed=60)[0]
    report = fill(store, model, [PASSAGES[0], short])
    assert report.too_short == 1 and report.stored == 96
    assert "1 of 2 passages have fewer than 16 tokens" in caplog.text
    _, cache = ask(model, store, join(BOS, PASSAGES[1], short, PASSAGES[0], QUESTION), tune(recompute=0.0))
    assert told(cache) == [(74, 96, 0, "")]


def test_passages_of_rows_are_told_row_by_row(store):
    model = build("qwen2")
    fill(store, model)
    rows = torch.stack([torch.cat([BOS, QUESTION, PASSAGES[n][:64], QUESTION]) for n in (1, 0)])
    _, cache = ask(model, store, rows, tune(recompute=0.0))
    assert [
        (passage.row, *each_told) for passage, each_told in zip(cache.stats.passages, told(cache), strict=True)
    ] == [
        (0, 25, 64, 0, ""),
        (1, 25, 64, 32, f"16 tokens {CHANGED}; 16 tokens {CUT}"),
    ]


def changed(passage, at, removed=1, inserted=(5,)):
    """Return a passage with some of its tokens replaced."""
    return torch.cat([passage[:at], torch.tensor(inserted, dtype=torch.int64), passage[at + removed :]])


@pytest.mark.parametrize(
    ("variant", "indexes"),
    [
        (changed(PASSAGES[0], 40), [*range(32), *range(48, 96)]),  # one token is another
        (changed(PASSAGES[0], 0), range(16, 96)),
        (changed(PASSAGES[0], 40, removed=2), [*range(32), *range(48, 96)]),  # two were merged
        (changed(PASSAGES[0], 95, removed=1, inserted=()), range(80)),
        (PASSAGES[0][5:], range(16, 96)),  # cut in front
        (PASSAGES[0][:70], range(64)),
    ],
    ids=["another", "first", "merged", "last", "cut in front", "cut"],
)
@pytest.mark.thin(2)
def test_a_passage_is_found_from_any_part(variant, indexes, store):
    """What stands there otherwise costs 16 tokens, and not the rest; KV stands at its positions in this prompt."""
    model = build("qwen2")
    fill(store, model)
    ids = join(BOS, QUESTION, variant, torch.tensor([5]), PASSAGES[1], QUESTION)
    logits, cache = ask(model, store, ids, tune(recompute=0.0))
    shift = len(variant) - len(PASSAGES[0])
    front = [i for i in indexes if torch.equal(variant[: i + 1], PASSAGES[0][: i + 1])]
    behind = [i for i in indexes if i not in front]
    reused = [(25, PASSAGES[0], front), (25 + shift, PASSAGES[0], behind)]
    reused = [part for part in reused if len(part[2])]
    reference = expected(model, ids, [*reused, (26 + len(variant), PASSAGES[1], range(64))])
    assert cache.stats.tokens_restored == len(indexes) + 64
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


def test_a_changed_passage_at_the_beginning_is_not_exact(store):
    """It stands where it stood, and the rest of it does not stand behind the same tokens."""
    model = build("qwen2")
    fill(store, model)
    ids = join(BOS, changed(PASSAGES[0], 40), QUESTION)
    logits, cache = ask(model, store, ids, tune(recompute=0.0))
    reference = expected(model, ids, [(1, PASSAGES[0], [*range(32), *range(48, 96)])])
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    assert cache.stats.tokens_restored == 80
    _, half = ask(model, store, ids, fixed(0.5))
    assert half.stats.tokens_restored == 32 + 24  # what stands before the change is exact, and restored whole


def test_passages_that_end_alike_are_two_segments(store):
    """A segment's name covers all of its hashes, which do not cover one another."""
    model, end = build("qwen2"), PASSAGES[0][-32:]
    passages = [torch.cat([PASSAGES[1], end]), torch.cat([PASSAGES[3][:64], end])]
    assert fill(store, model, passages).stored == 2 * 96
    ids = join(BOS, QUESTION, *passages, QUESTION)
    assert ask(model, store, ids, tune(recompute=0.0))[1].stats.tokens_restored == 2 * 96
    store.relayout(Geometry(16, 2), progress=False)
    assert len(store.segments()) == 2
    assert ask(model, store, ids, tune(recompute=0.0))[1].stats.tokens_restored == 2 * 96


def test_what_another_process_stores_and_removes_is_seen(tmp_path):
    """Removed entries lead to nothing, however many there were."""
    model = build("qwen2")
    with KVStore(tmp_path, engine="posix") as store, KVStore(tmp_path, engine="posix") as other_store:

        def found():
            return ask(model, other_store, PROMPT, tune(recompute=0.0))[1].stats.tokens_restored

        assert found() == 0
        fill(store, model, PASSAGES[:1])
        assert found() == 96
        fill(store, model)
        assert found() == 96 + 112 + 80
        store.relayout(Geometry(32, 2), progress=False)
        assert found() == 96 + 112 + 80
        store.remove(row.id for row in store.segments() if row.tokens == 112)
        assert found() == 96 + 80
        store.clear(disk=True)
        assert found() == 0
        for _ in range(2):  # under the names they had, also where nobody has looked meanwhile
            fill(store, model)
            assert found() == 96 + 112 + 80
            store.clear(disk=True)


def test_a_lost_catalogue_is_read_from_the_segments(tmp_path):
    model = build("qwen2")
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model)
    for path in tmp_path.glob("catalogue*"):
        path.unlink()
    with KVStore(tmp_path, engine="posix") as store:
        assert ask(model, store, PROMPT, tune(recompute=0.0))[1].stats.tokens_restored == 96 + 112 + 80


def test_the_quick_hash_is_siphash():
    """CPython hashes bytes with it, under a key of zeros if that is asked for."""
    if sys.hash_info.algorithm != "siphash13":
        pytest.skip("this Python has another hash")
    words = np.random.default_rng(0).integers(0, 2**63, 20).astype(np.uint64)
    code = "import sys; print([hash(bytes.fromhex(word)) % 2**64 for word in sys.argv[1:]])"
    args = [word.astype("<u8").tobytes().hex() for word in words]
    run = subprocess.run(
        [sys.executable, "-c", code, *args], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(siphash(words, 0, 0).tolist())


def test_quick_hashes_are_of_sixteen_tokens_and_under_the_secret():
    tokens = np.random.default_rng(0).integers(0, 2**17, 100)
    hasher = PassageHasher(("model", "passage 1", ""), b"secret")
    quick_hashes = hasher.scan(tokens)
    assert len(quick_hashes) == 85 and len(set(quick_hashes.tolist())) == 85
    for at in (0, 1, 50, 84):
        assert hasher.scan(tokens[at : at + 16]).tolist() == [quick_hashes[at]]
        for position in range(16):
            assert hasher.scan(changed_at(tokens[at : at + 16], position)) != quick_hashes[at]
    assert hasher.scan_hashes(tokens) == quick_hashes[:81:16].astype("<u4").tobytes()
    assert len(hasher.scan(tokens[:15])) == 0
    for root, salt in ((("model", "passage 1", ""), b"another"), (("other", "passage 1", ""), b"secret")):
        assert not set(PassageHasher(root, salt).scan(tokens).tolist()) & set(quick_hashes.tolist())


def changed_at(tokens, at):
    edited = tokens.copy()
    edited[at] += 1
    return edited


def test_a_heading_that_a_thousand_passages_have_costs_no_time(monkeypatch):
    """Only a few of the places are checked, and the rest of the passage decides."""
    hasher, random = PassageHasher(("model", "passage", "")), np.random.default_rng(0)
    passages = [np.concatenate([np.arange(32), random.integers(0, 1000, 64)]) for _ in range(1000)]
    rows = [row_of(hasher, passage) for passage in passages]
    seeds = PassageIndex(Listed(rows)).seeds
    tokens = np.concatenate([passages[900], passages[17], np.arange(32), random.integers(0, 1000, 9)])
    matches = find_passages(tokens, hasher, seeds)
    assert [(match.at, match.first, match.num_hashes) for match in matches] == [(0, 0, 6), (96, 0, 6), (192, 0, 2)]
    assert [match.row.id for match in matches[:2]] == [rows[900].id, rows[17].id]
    assert len(seeds(hasher.scan(tokens)).at) <= 6 * 32 + 2 * 4


def test_the_catalogue_is_asked_once_for_a_prompt_unless_it_has_changed():
    hasher, random = PassageHasher(("model", "passage", "")), np.random.default_rng(0)
    passages = [random.integers(0, 1000, 64) for _ in range(4)]
    listed = Listed([row_of(hasher, passage) for passage in passages[:3]])
    seeds, hashes = PassageIndex(listed).seeds, hasher.scan(np.concatenate(passages))

    def found():
        listed.asked = 0
        return {row.id for row in seeds(hashes).rows}, listed.asked

    found()
    assert found() == (set(listed.rows), 1)
    new = row_of(hasher, passages[3])
    listed.rows[new.id] = new
    assert found() == (set(listed.rows), 2)
    deleted = next(iter(listed.rows))
    listed.numbers = {name: number for number, name in enumerate(listed.rows, start=1)}
    del listed.rows[deleted]
    assert found() == (set(listed.rows), 2) and found() == (set(listed.rows), 1)
    listed.generation += 1
    assert found()[0] == set(listed.rows)


words = st.lists(st.integers(0, 2), min_size=16, max_size=80)


@given(st.lists(words, min_size=1, max_size=4), st.data())
def test_found_against_trying_everything(passages, data):
    """With few different tokens, passages repeat, overlap and contain one another."""
    hasher = PassageHasher(("model", "passage", ""))
    rows = [row_of(hasher, np.array(passage)) for passage in passages]
    parts = data.draw(st.lists(st.sampled_from(passages) | st.lists(st.integers(0, 2), max_size=20), max_size=5))
    tokens = np.array([token for part in parts for token in part], np.int64)
    start = data.draw(st.integers(0, 20))
    matches = find_passages(tokens, hasher, PassageIndex(Listed(rows)).seeds, start)
    trimmed_passages = [np.array(passage[: len(passage) // 16 * 16]) for passage in passages]
    for match in matches:  # each is there
        assert match.at >= start
        first, count = 16 * match.first, 16 * match.num_hashes
        passage = passages[[row.id for row in rows].index(match.row.id)]
        assert tokens[match.at : match.stop].tolist() == passage[first : first + count]
    for previous, following in itertools.pairwise(matches):
        assert previous.stop <= following.at
    longest = 0
    for at in range(start, len(tokens)):
        for passage in trimmed_passages:
            for first in range(0, len(passage), 16):
                count = min(len(passage) - first, len(tokens) - at)
                is_equal = tokens[at : at + count] == passage[first : first + count]
                longest = max(longest, (count if is_equal.all() else int(np.argmin(is_equal))) // 16)
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
        scan=hasher.scan_hashes(tokens),
    )


class Listed:
    """Segments with these rows."""

    def __init__(self, rows):
        self.index, self.rows = self, {row.id: row for row in rows}
        self.numbers, self.generation, self.asked = {}, 0, 0

    def passages(self, number, ids):
        self.asked += 1
        numbered = [(self.numbers.get(row.id, i), row) for i, row in enumerate(self.rows.values(), start=1)]
        new = [(i, row.id, row.scan) for i, row in numbered if i > number]
        return self.generation, new, [self.rows[name] for name in ids if name in self.rows]

    def is_hidden(self, segment_id):
        return False


# --- provenance, faults, words


def test_what_is_approximate_is_never_taken_for_exact(store):
    model = build("qwen2")
    fill(store, model)
    cache = TieredCache(model, store, method=tune(recompute=0.15))
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
    with KVStore(tmp_path / "store", engine="posix", host_memory=0) as second_store:
        reader = second_store._storage.disk.reader(row.id)
        data = bytearray(second_store._storage.disk.path(row.id).read_bytes())
        for chunk in range(reader.shape.chunks_in(reader.shape.block_groups[0])):
            data[reader.header.blocks.offset + chunk * reader.shape.block_groups[0].block_bytes] ^= 1
        second_store._storage.disk.path(row.id).write_bytes(data)
        logits, cache = ask(model, second_store, PROMPT, tune(recompute=0.0))
        reused = [(start, PASSAGES[n], range(len(PASSAGES[n]))) for n, start in PLACES.items() if n != 0]
        reference = expected(model, PROMPT, reused)
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
        assert cache.stats.details.verification_failures >= 1


def test_a_passage_is_stored_once_and_read_without_what_is_computed(tmp_path):
    model = build_deep("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    passage = prompt(320, seed=9)[0]
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        assert fill(store, model, [passage]).stored == 320
        assert fill(store, model, [passage]).restored == 320
        assert len(store.segments()) == 1
        token = 6 * 2 * 2 * 64 * 4  # layers, keys and values, heads, dim, bytes
        _, cache = ask(model, store, join(QUESTION, passage, QUESTION), epic(first=24))
        assert cache.stats.details.bytes_used == (320 - 24) * token
        assert cache.stats.bytes_read == (320 - 16) * token  # in their own order: the first block is not read
        assert store.reorder(progress=False) == 1  # by the ranking
        _, cache = ask(model, store, join(QUESTION, passage, QUESTION), fixed(0.15))
        assert cache.stats.details.bytes_used == (320 - 48) * token
        assert cache.stats.bytes_read == (320 - 48) * token  # 48 tokens are three blocks
        fill(store, model, [passage], epic())
        _, cache = ask(model, store, join(QUESTION, passage, QUESTION), epic(first=64, ranking="context"))
        # the first ones lie anywhere: more is read than used
        assert cache.stats.details.bytes_used == (320 - 64) * token
        assert cache.stats.bytes_read > (320 - 64) * token


def test_epic_without_a_sink(store):
    """Each passage is computed with nothing before it, and found by who asks for such."""
    model = build("qwen2")
    fill(store, model, method=epic(lead=0))
    assert ask(model, store, PROMPT, epic(first=20))[1].stats.tokens_restored == 0
    logits, cache = ask(model, store, PROMPT, epic(first=20, lead=0))
    assert cache.stats.tokens_restored == sum(len(PASSAGES[number]) - 20 for number in PLACES)
    reference = expected(model, PROMPT, of_each(lambda passage: range(20, len(passage))), sink=BOS[:0])
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    assert (logits - expected(model, PROMPT, of_each(lambda passage: range(20, len(passage))))).abs().max() > 1e-3


def test_another_model_finds_nothing(store):
    model = build("qwen2")
    fill(store, model)
    assert ask(build("qwen2", seed=5), store, PROMPT, tune())[1].stats.tokens_restored == 0
    assert ask(model, store, PROMPT, None)[1].stats.tokens_restored == 0


@pytest.mark.parametrize("wrong", [{"recompute": 1.5}, {"recompute": -0.1}, {"ranking": "best"}], ids=str)
def test_settings_without_meaning_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tune(**wrong)


def test_passages_are_stored_for_methods_that_reuse_them(store):
    with pytest.raises(ConfigError, match="prefixes only"):
        store.precompute(build("qwen2"), PASSAGES, passages=True, method=Exact(), progress=False)


def test_the_reference_is_full_computation_where_nothing_is_reused():
    """This shows that the comparisons above can fail for the right reason."""
    model = build("qwen2")
    kv = kv_of(model, PROMPT)
    own = [tuple(t[:, :, 8:40] for t in layer) for layer in kv]
    with torch.no_grad():
        logits = model(
            input_ids=PROMPT, past_key_values=Replacing(model, list(range(8, 40)), own, 0), logits_to_keep=1
        ).logits
        full = model(input_ids=PROMPT, logits_to_keep=1).logits
    torch.testing.assert_close(logits, full, rtol=0, atol=1e-5)
