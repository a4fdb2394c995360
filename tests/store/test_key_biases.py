"""Keys of a lossy codec are stored without the bias of their projection, which every way to restore them adds again."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from families import build, prompt, with_key_biases
from paged import batched, writes
from reference import kv_of

from hf_tiered_cache import TieredCache, tiered
from hf_tiered_cache.errors import FormatError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Epic, Exact, Impress, Krul, KVDrive
from hf_tiered_cache.store.geometry import Geometry, KVLayout, LayerKV

INT8 = {"codec": "int8"}
BIAS = 60.0
"""Standard deviation of the biases. Keys without them are of the order of 1."""
CLOSE = 0.06
"""Error of an int8 key without its bias, at most. With the bias it would be about 0.7."""
BUDGETS = {
    "contiguous, tokens": ContiguousKV(0.3, **INT8),
    "contiguous, per head": ContiguousKV(0.3, per_head=True, **INT8),
    "contiguous, keys": ContiguousKV(0.3, identify="keys", **INT8),
    "impress": Impress(0.3, **INT8),
    "kv_drive": KVDrive(0.3, sinks=4, local=8, **INT8),
    "kv_drive, streamed": KVDrive(0.3, sinks=4, local=8, exact_from=8, **INT8),
}


def biased(family="qwen2", **changes):
    return with_key_biases(build(family, **changes), BIAS)


def kinds_in(store):
    return {kind for row in store.segments() for kind in storage_of(store).disk.reader(row.id).shape.layout.layers}


def num_close(keys, expected):
    """Count the keys of each head, `[heads, n, dim]`, that are close to one of `[heads, m, dim]`: the least count."""
    distance = (keys.unsqueeze(2) - expected.unsqueeze(1)).abs().amax(-1)  # [heads, n, m]
    return int((distance.amin(-1) < CLOSE).sum(-1).min())


def rotated_keys(model, ids, position):
    """Return the keys of one token in the first layer, `[heads, 1, dim]`, which depend on nothing but the token."""
    padded = ids.expand(1, position + 1)
    return kv_of(model, padded)[0][0][0, :, -1:]


@torch.no_grad()
def restored_layers(model, store, method, ids, **options):
    """Return the layers of a cache after a pass over `ids`, and the number of tokens that it has restored."""
    cache = TieredCache(model, store, method=method, record=False, **options)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache.layers, cache.stats.tokens_restored


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen2", "phi", "starcoder2"])
def test_keys_lose_no_more_than_without_their_bias(store, family, codec):
    """In `phi`, a part of each key rotates; `starcoder2` has windows. The prompt is in two segments."""
    model, ids = biased(family), prompt(150)
    for stop in (70, 150):
        store.precompute(model, ids[:, :stop], method=Exact(codec=codec), progress=False)
    assert len(store.segments()) == 2 and all(kind.unbiased for kind in kinds_in(store))
    layers, tokens_restored = restored_layers(model, store, Exact(codec=codec), ids)
    assert tokens_restored == 144
    for layer, (keys, _) in zip(layers, kv_of(model, ids), strict=True):
        positions = layer.keys.shape[2]  # fewer with a sliding window
        difference = (layer.keys - keys[:, :, -positions:])[:, :, : tokens_restored - 150].abs().max()
        assert 0 < difference < (CLOSE if codec == "int8" else 0.4)


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {"attention_bias": True}), ("phi", {"qk_layernorm": True})])
def test_keys_that_a_norm_follows_keep_what_it_makes_of_their_bias(store, family, changes):
    """Without the bias, such keys would be as large as the bias: they have lost it already."""
    model, ids = biased(family, **changes), prompt(100)
    store.precompute(model, ids, method=Exact(**INT8), progress=False)
    assert not any(kind.unbiased for kind in kinds_in(store))
    layers, tokens_restored = restored_layers(model, store, Exact(**INT8), ids)
    assert tokens_restored == 96
    for layer, (keys, _) in zip(layers, kv_of(model, ids), strict=True):
        assert 0 < (layer.keys - keys)[:, :, :tokens_restored].abs().max() < CLOSE


def test_rows_of_a_batch_and_layers_with_blocks_of_their_own(store):
    model, ids = biased(), prompt(100)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.int64), ids[:, :93]], dim=1)
    method = Exact(geometry=Geometry(layers_per_block=1), **INT8)
    store.precompute(model, ids, method=method, progress=False)
    cache, batch = TieredCache(model, store, method=method, record=False), torch.cat([ids, padded])
    model.generate(batch, attention_mask=(batch != 0).long(), past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert cache.stats.tokens_restored == 96 + 71
    for layer, (keys, _) in zip(cache.layers, kv_of(model, ids), strict=True):
        assert (layer.keys[0] - keys[0])[:, :96].abs().max() < CLOSE
        assert (layer.keys[1, :, 7:78] - keys[0, :, :71]).abs().max() < CLOSE


@pytest.mark.parametrize("name", BUDGETS)
@torch.no_grad()
def test_selected_keys_have_their_bias(store, name):
    """All selected keys, when a prompt is restored, and after tokens that have selected others."""
    model, ids, method = biased(num_hidden_layers=2), prompt(300), BUDGETS[name]
    store.precompute(model, ids, method=method, progress=False)
    longer = torch.cat([ids[:, :290], prompt(16, seed=5)], dim=1)
    expected = kv_of(model, longer)
    cache = TieredCache(model, store, method=method, record=False)
    model(input_ids=longer, past_key_values=cache, logits_to_keep=1)
    keys = expected[0][0][0]
    for more in (None, *prompt(6, seed=9).T):
        if more is not None:
            keys = torch.cat([keys, rotated_keys(model, more[None], longer.shape[1])], dim=1)
            model(input_ids=more[None], past_key_values=cache, logits_to_keep=1)
            longer = torch.cat([longer, more[None]], dim=1)
        cached_keys = cache.layers[0].keys[0]
        assert cached_keys.shape[1] < longer.shape[1]
        assert num_close(cached_keys, keys) == cached_keys.shape[1]


@pytest.mark.parametrize("method", [CacheTune(0.3, **INT8), Epic(**INT8)], ids=lambda method: type(method).__name__)
def test_passages_have_their_bias_at_other_positions(store, method):
    model, passages = biased(), [prompt(64, seed=seed)[0] for seed in (1, 2)]
    store.precompute(model, passages, passages=True, method=method, progress=False)
    ids = torch.cat([prompt(16, seed=3), passages[1][None], passages[0][None], prompt(9, seed=4)], dim=1)
    layers, tokens_restored = restored_layers(model, store, method, ids)
    assert tokens_restored > 64
    keys = kv_of(model, ids)[0][0]  # passages have the same keys in the first layer
    assert (layers[0].keys - keys).abs().max() < CLOSE


@torch.no_grad()
def test_a_conversation_of_merged_layers_has_its_bias(store):
    model, ids = biased(), prompt(160)
    method = Krul(0.5, quality=None, recompute=0.0, change=1.0, retained=0.0)
    cache = TieredCache(model, store, conversation="alice", method=method)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    suspended = cache.suspend()
    assert suspended.tokens == 160
    cache = TieredCache(model, store, conversation="alice", method=method, record=False)
    model(input_ids=torch.cat([ids, prompt(3, seed=2)], dim=1), past_key_values=cache, logits_to_keep=1)
    for layer, (keys, _) in zip(cache.layers, kv_of(model, ids), strict=True):
        assert (layer.keys[:, :, :160] - keys).abs().max() < 12  # a merge moves keys, but not by biases


def test_pages_of_an_engine_have_their_bias(store, monkeypatch):
    model, ids, kv_by_stop = biased(), prompt(130), writes(monkeypatch)
    with tiered(model, store, method=Exact(**INT8)):
        batched(model, ids.tolist())
    store.flush()
    assert all(kind.unbiased for kind in kinds_in(store))
    with tiered(model, store, method=Exact(**INT8)):
        batched(model, ids.tolist())
    ((stop, kv),) = kv_by_stop.items()
    assert stop >= 128
    for (keys, _), (expected, _) in zip(kv.values() if isinstance(kv, dict) else kv, kv_of(model, ids), strict=True):
        assert 0 < (keys - expected[:, :, :stop]).abs().max() < CLOSE


def test_lossless_kv_keeps_its_bias(store):
    model, ids = biased(), prompt(100)
    store.precompute(model, ids, progress=False)
    assert not any(kind.unbiased for kind in kinds_in(store))
    layers, tokens_restored = restored_layers(model, store, None, ids)
    assert tokens_restored == 96
    for layer, (keys, _) in zip(layers, kv_of(model, ids), strict=True):
        assert torch.equal(layer.keys[:, :, :tokens_restored], keys[:, :, :tokens_restored])


def test_offloaded_models_and_others_restore_the_same_keys(store):
    """Between its uses, an offloaded layer has no bias."""
    ids, method, offloaded, resident = prompt(100), Exact(**INT8), biased(), biased()
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    for model, request_ids in ((offloaded, ids[:, :50]), (resident, ids), (offloaded, ids)):
        store.precompute(model, request_ids, method=method, progress=False)
        assert all(kind.unbiased for kind in kinds_in(store))
        layers, tokens_restored = restored_layers(model, store, method, ids)
        assert tokens_restored == (request_ids.shape[1] - 1) // 16 * 16
        for layer, (keys, _) in zip(layers, kv_of(resident, ids), strict=True):
            assert (layer.keys - keys)[:, :, :tokens_restored].abs().max() < CLOSE


@pytest.mark.parametrize("rotated", ["", "value"])
def test_a_layout_lacks_biases_of_keys_before_rotation_only(rotated):
    layout = KVLayout((LayerKV(2, 16, 2, 16, rotated=rotated, unbiased=True),), torch.float32)
    with pytest.raises(FormatError, match="bias"):
        KVLayout.from_json(layout.to_json())
