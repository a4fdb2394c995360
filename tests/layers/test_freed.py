"""KV is freed when the cache that holds it goes, and that of a failed pass at once: no collection is waited for."""

from __future__ import annotations

import weakref

import pytest
import torch
from families import prompt
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.layers import buffer as buffer_module
from hf_tiered_cache.methods import METHODS, Passages, make_method
from hf_tiered_cache.restore.prefetch import JoinedLayers

GREEDY = {"do_sample": False, "max_new_tokens": 3}
SETTINGS = [
    "contiguous_kv:reselect=True",
    "contiguous_kv:identify=keys",
    "impress:reorder=True",
    "cache_blend",
]


class Planted(Exception):
    """Exception that ends a pass."""


@pytest.fixture
def made(monkeypatch):
    """Collect weak references to every KV buffer that is allocated, and to those of layers in one allocation."""
    buffer_refs = []

    def noting(real):
        def make(*args):
            buffer = real(*args)
            buffer_refs.append(weakref.ref(buffer))
            return buffer

        return make

    def noting_layers(real):
        def of(joined, layer):
            buffers = real(joined, layer)
            buffer_refs.extend(map(weakref.ref, buffers))
            return buffers

        return of

    monkeypatch.setattr(buffer_module, "_empty", noting(buffer_module._empty))
    monkeypatch.setattr(JoinedLayers, "of", noting_layers(JoinedLayers.of))
    return buffer_refs


def fill(store, model, method):
    """Store what a prompt is restored from. Returns the prompt."""
    passages = [prompt(64, seed=seed)[0] for seed in (1, 2)]
    if isinstance(method, Passages):
        store.precompute(model, passages, passages=True, method=method, progress=False)
    else:
        store.precompute(model, torch.cat(passages), method=method, progress=False)
    return torch.cat([*passages, prompt(20, seed=3)[0]]).unsqueeze(0)


def damage(store):
    """Damage the last layer's blocks of every segment: the pass fails after all others are restored."""
    for row in store.segments():
        reader, path = store._storage.disk.reader(row.id), store._storage.disk.path(row.id)
        shape = reader.shape
        last = max((g for g in shape.block_groups if not g.identifies), key=lambda group: group.layers)
        with open(path, "r+b") as file:
            for chunk in range(shape.chunks_in(last)):
                file.seek(reader.header.blocks.offset + shape.group_offsets[last.index] + chunk * last.block_bytes)
                file.write(b"damage")


def fails(*args):
    raise Planted


@pytest.mark.parametrize(("name", "how"), pairs([*METHODS, *SETTINGS], ["fork", "damage", "failure"]))
@pytest.mark.thin(2)
def test_a_cache_frees_its_kv_without_a_collection(model, tmp_path, made, uncollected, name, how):
    method = make_method(name)
    with KVStore(tmp_path, policy=method.policy) as store:
        ids = fill(store, model, method)
        if how == "damage":
            damage(store)
            store.clear()
        made.clear()
        cache = TieredCache(model, store, method=method, record=False)
        if how == "failure":
            hook = model.model.layers[1].mlp.register_forward_pre_hook(fails)
            with pytest.raises(Planted) as raised:
                model.generate(ids, past_key_values=cache, **GREEDY)
            hook.remove()
            del raised
            assert made
            assert [buffer for buffer in made if buffer() is not None] == []
        model.generate(ids, past_key_values=cache, **GREEDY)
        if how == "damage" and name not in ("recompute", "auto"):  # which may compute all
            assert cache.stats.details.recomputed > 0
        if how == "fork":
            twin = cache.fork()
            model.generate(torch.cat([ids, prompt(5, seed=4)], dim=1), past_key_values=twin, **GREEDY)
            del twin
        assert [buffer for buffer in made if buffer() is not None]
        del cache
        assert [buffer for buffer in made if buffer() is not None] == []
