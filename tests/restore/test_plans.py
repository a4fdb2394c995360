"""Any plan is exact over exact KV: whatever is computed and whatever restored, the logits are full computation's.

And keys restored at other positions than their own are those that rotating by hand gives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from families import FAMILIES, attend_by_another_name, build, longrope, prompt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import kv_of
from thorough import pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_tiered_cache import ConfigError, KVStore, Method, TieredCache
from hf_tiered_cache.cache.sequence import SequenceState
from hf_tiered_cache.patches import rope, rotary
from hf_tiered_cache.patches.attach import attach
from hf_tiered_cache.patches.scope import current
from hf_tiered_cache.patches.tap import PreRopeKV, RotaryTap
from hf_tiered_cache.restore.plan import Plan
from hf_tiered_cache.restore.rows import PlanContext, RowGroup, SegmentSlice
from hf_tiered_cache.store.geometry import Geometry

TOKENS = 130
LAYERS = 6


@dataclass(frozen=True)
class Chosen(Method):
    """Method that computes given columns at the first layer, and fewer with depth."""

    first: frozenset[int] = frozenset()
    dropped: tuple[frozenset[int], ...] = ()
    plans: list = field(default_factory=list)

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        must = {*range(context.restorable, context.num_positions)}
        must |= {*range(context.num_positions - context.must_compute, context.num_positions)}
        columns, result = (set(self.first) & set(range(context.num_positions))) | must, []
        for layer in range(context.layers):
            columns = columns - (self.dropped[layer] if layer < len(self.dropped) else frozenset()) | must
            result.append(np.array(sorted(columns)))
        self.plans.append(result)
        return tuple(result)


@lru_cache
def stored(family, root):
    """Return a model, a store with one of its prompts, and the logits of a full computation."""
    model, ids = build(family), prompt(TOKENS)
    store = KVStore(root / family, engine="posix")
    store.precompute(model, ids, progress=False)
    with torch.no_grad():
        return model, store, ids, model(input_ids=ids, logits_to_keep=2).logits


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


columns = st.frozensets(st.integers(0, TOKENS - 1), max_size=TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=settings.default.max_examples // 6)
@given(first=columns, dropped=st.lists(columns, max_size=LAYERS).map(tuple))
@example(first=frozenset(), dropped=())
@example(first=frozenset(range(TOKENS)), dropped=())
@example(first=frozenset(range(0, TOKENS, 2)), dropped=(frozenset(), frozenset(range(0, TOKENS, 4))))
@example(first=frozenset({0}), dropped=(frozenset(),) * 5 + (frozenset({0}),))
@example(first=frozenset(range(100, TOKENS)), dropped=(frozenset(), frozenset({100, 110})))
@pytest.mark.thin(2)
def test_any_plan_is_exact_over_exact_kv(root, family, first, dropped):
    model, store, ids, full = stored(family, root)
    method = Chosen(first=first, dropped=dropped)
    cache = TieredCache(model, store, method=method, record=False)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=2).logits
    counts = [len(columns) for columns in method.plans[0]]  # layer by layer, never more
    assert cache.stats.tokens_restored == TOKENS - counts[-1]
    assert cache.stats.tokens_computed == counts[-1]
    assert cache.stats.tokens_recomputed == round(np.mean(counts) - counts[-1])
    torch.testing.assert_close(logits, full, rtol=0, atol=2e-5 * full.abs().max().item() + 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_over_wrong_kv_is_not_exact(root, family, tmp_path):
    """This shows that the test above can fail: another prompt's KV gives other logits."""
    model, _, ids, full = stored(family, root)
    with KVStore(tmp_path / "wrong") as store:
        cache = TieredCache(model, store, method=Chosen(first=frozenset(range(0, TOKENS, 3))), record=False)
        store.precompute(model, prompt(TOKENS, seed=99), progress=False)
        storage, wrong = store._storage, partial(other_hashes, store, cache)
        storage.match = lambda hashes, *args, honest=storage.match, **named: honest(wrong(), *args, **named)
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=2).logits
    assert cache.stats.tokens_restored > 0
    assert (logits - full).abs().max() > 1e-3 * full.abs().max()


def other_hashes(store, cache):
    return cache._executor.sequence.history.hasher.hashes(prompt(TOKENS, seed=99)[0].numpy())


@settings(max_examples=settings.default.max_examples // 4)
@given(first=columns, pad=st.integers(1, 40))
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_scattered_plans_honour_padding(root, family, first, pad):
    model, store, ids, _ = stored(family, root)
    batch = torch.zeros(2, TOKENS, dtype=torch.int64)
    batch[0], batch[1, pad:] = ids[0], ids[0, : TOKENS - pad]
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"input_ids": batch, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
    cache = TieredCache(model, store, method=Chosen(first=first), record=False)
    with torch.no_grad():
        logits = model(past_key_values=cache, **arguments).logits
        full = model(**arguments).logits
    assert cache.stats.tokens_restored > 0
    torch.testing.assert_close(logits, full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma2"])
def test_decoding_goes_on_from_any_plan(root, family):
    model, store, ids, _ = stored(family, root)
    arguments = {"do_sample": False, "max_new_tokens": 12}
    method = Chosen(first=frozenset(range(1, TOKENS, 3)), dropped=(frozenset(), frozenset(range(1, 60, 3))))
    cache = TieredCache(model, store, method=method, record=False)
    output = model.generate(ids, past_key_values=cache, **arguments)
    assert torch.equal(output, model.generate(ids, **arguments))


def test_after_a_plan_the_model_is_as_before(root):
    model, store, ids, _ = stored("llama", root)
    before = model.config._attn_implementation
    method = Chosen(first=frozenset({3, 50}), dropped=(frozenset(), frozenset({3})))
    model(input_ids=ids, past_key_values=TieredCache(model, store, method=method, record=False), logits_to_keep=1)
    assert model.config._attn_implementation == before
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert current() is None


def test_attention_that_cannot_place_queries_says_what_to_do(tmp_path):
    model, ids, store = build("llama"), prompt(TOKENS), KVStore(tmp_path, engine="posix")
    attend_by_another_name(model)
    store.precompute(model, ids, progress=False)
    cache = TieredCache(model, store, method=Chosen(first=frozenset({3, 50})), record=False)
    with pytest.raises(ConfigError, match=r"'of_a_user' of LlamaForCausalLM; call .*\('sdpa'\)"):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (([0, 1],), "last"),
        (([],), "last"),
        (([3, 2, 9],), "ascending"),
        (([-1, 9],), "ascending"),
        (([2, 9], [2, 3, 9]), "layer 1"),
    ],
)
def test_impossible_plans_are_refused(positions, says):
    with pytest.raises(ValueError, match=says):
        Plan(0, 10, tuple(np.array(c, np.int64) for c in positions), ())


@given(st.integers(1, 40), st.integers(0, 39), st.integers(0, 30))
def test_a_suffix_is_recognised(columns, first, base):
    first = min(first, columns - 1)
    suffix = np.arange(first, columns)
    assert Plan(base, columns, (suffix,) * 3, ()).suffix == first
    assert Plan(base, columns, (suffix, suffix.copy()), ()).suffix == first
    if columns - first > 1:
        assert Plan(base, columns, (suffix, suffix[1:]), ()).suffix is None
    if columns - first > 2:
        assert Plan(base, columns, (np.delete(suffix, 1),), ()).suffix is None


# --- positions

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "longrope": longrope(256),
}


def moved(store, place, request):
    """Plan to restore one stored segment at another position, and to compute the rest."""
    (row,) = store.segments()
    reader = store._storage.disk.reader(row.id)
    tokens = reader.shape.tokens
    positions = np.r_[0:place, place + tokens : request.num_positions]
    group = RowGroup((0,), 0, (SegmentSlice(reader, 0, tokens, place),))
    return Plan(0, request.num_positions, (positions,) * len(reader.shape.layout.layers), (group,))


@pytest.mark.parametrize(("scaling", "place"), pairs(SCALINGS, [1, 37, 160]))
@pytest.mark.parametrize(
    "geometry", [Geometry(), Geometry(chunk_tokens=8, layers_per_block=1, heads_per_block=1, split_kv=True)]
)
def test_keys_restored_elsewhere_are_those_rotated_by_hand(monkeypatch, tmp_path, scaling, place, geometry):
    """160 + 96 tokens lie within longrope's short regime, 160 + 96 + 4 in its long one."""
    model = build("llama", rope_parameters=SCALINGS[scaling])
    passage, around = prompt(96, seed=4), prompt(place + 96 + 4, seed=5)
    around[:, place : place + 96] = passage
    raw = []  # keys before rotation, as the projections give them
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(
            lambda _, __, out: raw.append(out.view(1, 96, 2, 16).transpose(1, 2))
        )
        for layer in model.model.layers
    ]
    values = [value for _, value in kv_of(model, passage)]
    for hook in hooks:
        hook.remove()
    with KVStore(tmp_path) as store:
        first = TieredCache(model, store, method=Plain(geometry=geometry))
        model(input_ids=passage, past_key_values=first, logits_to_keep=1)
        store.flush()
        cache = TieredCache(model, store, record=False)
        monkeypatch.setattr(SequenceState, "plan", lambda _, request, *__, **___: moved(store, place, request))
        model(input_ids=around, past_key_values=cache, logits_to_keep=1)
    # the frequencies that a pass of this length uses
    cos, sin = model.model.rotary_emb(raw[0], torch.arange(place + 96 + 4).unsqueeze(0))
    cos, sin = cos[:, place : place + 96], sin[:, place : place + 96]
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    for layer, keys, value in zip(cache.layers, raw, values, strict=True):
        moved_keys = layer.keys[:, :, place : place + 96]
        assert torch.equal(moved_keys, apply(keys, keys, cos, sin)[1])
        pairs = torch.complex(keys[..., :8].double(), keys[..., 8:].double())
        turned = pairs * torch.complex(cos[..., :8].double(), sin[..., :8].double()).unsqueeze(1)
        torch.testing.assert_close(moved_keys.double(), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-5)
        assert torch.equal(layer.values[:, :, place : place + 96], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_keys_are_rotated_in_pieces_with_the_same_bits(monkeypatch, dtype):
    random = torch.Generator().manual_seed(0)
    keys, tables = (torch.randn(shape, generator=random).to(dtype) for shape in ((2, 3, 51, 8), (2, 1, 51, 8)))
    cos, sin = tables
    expected, rotated_at_once = apply_rotary_pos_emb(keys, keys, cos, sin)[1], []

    def rotation(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rotated_at_once.append(k.shape[2])
        return apply_rotary_pos_emb(q, k, cos, sin)

    first = keys[:, :, :1]
    arguments = (first, first), {"cos": cos[:, :1], "sin": sin[:, :1]}
    call = rope.RotaryCall(rotation, rotary._WatchedFunction(rotation).places, *arguments, first)
    monkeypatch.setattr(rope, "_PIECE_BYTES", keys[:, :, :10].numel() * keys.element_size())
    call.rotate_(keys, cos, sin)
    assert torch.equal(keys, expected)
    assert rotated_at_once == [10] * 5 + [1]


@pytest.mark.parametrize("infers", [False, True])
def test_a_rotation_is_asked_for_keys_alone_where_it_can_do_without_queries(infers):
    keys, cos, sin = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    expected, heads = apply_rotary_pos_emb(keys, keys, cos, sin)[1], []

    def rotation(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads.append(q.shape[1])
        pairs = q.reshape(*q.shape[:-1], -1 if infers else 4, 2)  # -1 of no queries is ambiguous
        return apply_rotary_pos_emb(pairs.flatten(-2), k, cos, sin)

    call = rope.RotaryCall(rotation, rotary._WatchedFunction(rotation).places, (keys, keys, cos, sin), {}, expected)
    call.rotate_(keys, cos, sin)
    assert torch.equal(keys, expected)
    assert heads == ([0, 1] if infers else [0])


@dataclass(frozen=True)
class Plain(Method):
    """Exact reuse under another geometry."""

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        first = min(context.restorable, context.num_positions - context.must_compute)
        return (np.arange(first, context.num_positions),) * context.layers


@pytest.mark.parametrize(
    ("geometry", "family"),
    pairs(
        [
            Geometry(8, 1),
            Geometry(64, 2),
            Geometry(16, 3, 1),
            Geometry(4, 1, 1, True),
            Geometry(32, 6, None, True),
        ],
        ["llama", "gemma3", "deepseek_v3"],
    ),
    ids=str,
)
def test_the_exact_method_reads_any_geometry(tmp_path, family, geometry):
    model, ids = build(family), prompt(TOKENS)
    arguments = {"do_sample": False, "max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    with KVStore(tmp_path) as store:
        model.generate(ids, past_key_values=TieredCache(model, store, method=Plain(geometry=geometry)), **arguments)
    longer = torch.cat([ids[:, :120], prompt(7, seed=8)], dim=1)
    with KVStore(tmp_path) as store:
        assert {store._storage.disk.reader(row.id).shape.geometry for row in store.segments()} == {geometry}
        cache = TieredCache(model, store)
        output = model.generate(longer, past_key_values=cache, **arguments)
        assert cache.stats.tokens_restored == 112
    with KVStore(tmp_path / "default") as store:
        model.generate(ids, past_key_values=TieredCache(model, store), **arguments)
        reference_output = model.generate(longer, past_key_values=TieredCache(model, store), **arguments)
    assert all(torch.equal(a, b) for a, b in zip(output.logits, reference_output.logits, strict=True))


def test_tables_stay_until_frequencies_change(monkeypatch):
    """Passes rotate by the table of the first one, also later ones; changed frequencies make another at once."""
    model = build("llama")
    embedding, attachment, sizes = model.model.rotary_emb, attach(model), []
    at = rope.RotaryTable.at
    monkeypatch.setattr(rope.RotaryTable, "at", lambda self, indexes: sizes.append(len(indexes)) or at(self, indexes))

    def rotated(stop, last):
        tap = RotaryTap(attachment.tables_of("", lossless=True))
        position = torch.tensor([[last]])
        table = rotary.Call(embedding.forward, {"x": 0, "position_ids": 1}, (torch.empty(0), position), {})
        cos, sin = embedding(torch.empty(0), position)
        tap.tables.append(rope.RotaryTable(table, cos, sin))
        key, keys = torch.ones(1, 1, 1, cos.shape[2]), torch.ones(1, stop, cos.shape[2])
        watched = rotary._WatchedFunction(apply_rotary_pos_emb)
        call = rope.RotaryCall(watched.original, watched.places, (key, key, cos, sin), {}, key, tap.tables[0])
        like = PreRopeKV(key, key, "key", cos.shape[2], True, call)
        tap.rotate_at_(like, keys, torch.arange(stop)[None], stop)
        expected = embedding(torch.empty(0), torch.arange(stop)[None])
        assert torch.equal(keys, apply_rotary_pos_emb(torch.ones_like(keys)[None], keys[None] * 0 + 1, *expected)[1][0])

    for stop, last in ((40, 100), (40, 100), (30, 70), (60, 100)):
        rotated(stop, last)
    assert sizes == [101]  # compared with the table of each pass, which costs no run of the module
    rotated(40, 200)
    assert sizes == [101, 1]  # compared at one position of the cached table
    rotated(150, 200)
    assert sizes == [101, 1, 201]
    embedding.inv_freq.mul_(1 + 1e-6)
    rotated(60, 100)
    rotated(60, 100)
    assert sizes == [101, 1, 201, 101]
    embedding.inv_freq.mul_(1 + 1e-6)
    rotated(60, 200)
    assert sizes == [101, 1, 201, 101, 1, 201]
