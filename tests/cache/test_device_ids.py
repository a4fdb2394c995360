"""Token ids may lie on the device, wherever ids are taken: what they are compared and joined with lies elsewhere."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt
from planted_device import on_device

from hf_tiered_cache import KVStore, TieredCache, tiered
from hf_tiered_cache.methods import CacheTune, ContiguousKV

PASSAGES = [prompt(64, seed=seed)[0] for seed in (7, 8, 9)]


def test_the_planted_device_refuses_what_a_gpu_refuses():
    ids = on_device(torch.arange(4))
    assert ids.device.type == (ids + 1).device.type == ids.view(2, 2).to(torch.int32).device.type == "cuda"
    assert ids.cpu().device.type == ids.to("cpu", torch.int64).device.type == "cpu"
    assert (ids + 1).tolist() == [1, 2, 3, 4]
    for mixed in (
        lambda: torch.cat([ids, torch.arange(4)]),
        lambda: ids + torch.arange(4),
        lambda: ids == torch.ones(4),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError):
        ids.numpy()


@pytest.mark.parametrize("shape", ["one", "rows", "list"])
def test_prompts_are_stored_found_and_brought_into_memory(model, tmp_path, shape):
    first, second = prompt(100), prompt(100, seed=2)
    given_ids = {"one": first[0], "rows": torch.cat([first, second]), "list": [first[0], second[0]]}[shape]
    device_ids = [on_device(ids) for ids in given_ids] if shape == "list" else on_device(given_ids)
    with KVStore(tmp_path) as store:
        assert store.precompute(model, device_ids, progress=False).stored == 96 * (1 if shape == "one" else 2)
        assert store.precompute(model, given_ids, progress=False).stored == 0
        store.clear()
        assert store.lookup(model, on_device(first)).bytes["disk"] > 0
        assert store.warm(model, on_device(first), progress=False).bytes["disk"] == 0


@pytest.mark.parametrize("method", [CacheTune(), CacheTune.paper()], ids=["tune", "paper"])
def test_passages_are_stored_and_found(model, tmp_path, method):
    ids = torch.cat([*PASSAGES[::-1], prompt(20)[0]])
    with KVStore(tmp_path) as store:
        device_passages = [on_device(PASSAGES[0]), PASSAGES[1], on_device(PASSAGES[2])]
        assert store.precompute(model, device_passages, passages=True, method=method, progress=False).stored == 192
        assert store.lookup(model, on_device(ids), method=method).stored > 0


@pytest.mark.parametrize("method", [None, ContiguousKV(0.25)], ids=["exact", "contiguous_kv"])
def test_caches_plan_and_go_on(model, tmp_path, method):
    ids = prompt(100)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, progress=False)
        plan, reason = TieredCache(model, store, method=method).look_up(on_device(ids))
        assert plan is not None, reason
        cache = TieredCache(model, store, method=method, record=False)
        model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        cache.continue_with(on_device(torch.cat([ids[:, :60], prompt(20, seed=3)], dim=1)))
        assert cache.get_seq_length() in (0, 60)


class Moving(torch.nn.Embedding):
    """Model that moves ids to its device; only before it do they lie on the planted device."""

    def forward(self, ids):
        assert ids.device.type == "cuda"
        return super().forward(ids.cpu())


def test_a_session_serves_ids_on_the_device(tmp_path):
    model, ids = build("llama"), prompt(100)
    model.model.embed_tokens.__class__ = Moving
    with KVStore(tmp_path) as store, tiered(model, store) as session, torch.no_grad():
        for tokens_restored in (0, 96):
            cache = session._new_cache()
            for more in (ids, prompt(1, seed=5)):
                model(input_ids=on_device(more), past_key_values=cache, use_cache=True, logits_to_keep=1)
            assert cache.stats.tokens_restored == tokens_restored
            cache.store_now()
