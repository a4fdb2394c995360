"""Models that accelerate has dispatched or offloaded: KV lives where its layer computes, weights wherever."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from families import build, prompt
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache, attach, detach
from hf_tiered_cache.cache.calibrations import calibrated_ratio
from hf_tiered_cache.cache.cost_model import calibration_for
from hf_tiered_cache.identity import Fingerprinter, fingerprint, fingerprint_of
from hf_tiered_cache.methods import Exact

GREEDY = {"do_sample": False, "max_new_tokens": 6}


def dispatched(model, tmp_path):
    return dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def offloaded_to_host(model, tmp_path):
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def offloaded_to_disk(model, tmp_path):
    disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    return model


WAYS = [dispatched, offloaded_to_host, offloaded_to_disk]


@pytest.mark.parametrize(("way", "family"), pairs(WAYS, ["llama", "gemma3"]))
def test_it_restores_what_the_model_stored_when_it_was_whole(tmp_path, way, family):
    model, ids = build(family), prompt(100)
    expected = model.generate(ids, **GREEDY)
    name = fingerprint(model)
    with KVStore(tmp_path / "kv") as store:
        store.precompute(model, ids, progress=False)
        detach(model)
        model = way(model, tmp_path)
        assert fingerprint(model) == name
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
        assert cache.stats.tokens_restored == 96
        assert attach(model).devices[1] == torch.device("cpu")


@pytest.mark.parametrize("way", WAYS)
def test_it_records_and_restores_its_own(tmp_path, way):
    model, ids = build("qwen2"), prompt(100)
    expected = model.generate(ids, **GREEDY)
    model = way(model, tmp_path)
    with KVStore(tmp_path / "kv") as store:
        for tokens_restored in (0, 96):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
            assert cache.stats.tokens_restored == tokens_restored


@pytest.mark.parametrize("way", WAYS)
def test_its_costs_are_measured_where_its_layers_compute(tmp_path, way):
    model = way(build("llama"), tmp_path)
    with KVStore(tmp_path / "kv") as store:
        store.calibrate_prefix(model, tokens=[64], progress=False)
        store.calibrate(model, passages=2, tokens=32, suffix=16, repeats=1, progress=False)
        attachment, fingerprint = attach(model), fingerprint_of(attach(model))
        assert calibration_for(store._storage, fingerprint, attachment, Exact()).measured
        assert calibrated_ratio(store._storage, fingerprint, attachment.device, 80) is not None


@pytest.mark.parametrize("way", WAYS)
def test_passes_that_move_weights_are_no_change(tmp_path, way):
    model = way(build("llama"), tmp_path)
    name = Fingerprinter(model)
    before, description, weights = name.look(), name._description, name._weights
    for _ in range(20):  # more than a model that changes at every pass may change
        with torch.no_grad():
            model(prompt(4), use_cache=False)
        assert name.look(begins_request=False) is before
    assert name._description is description and name._weights is weights


@pytest.mark.parametrize("way", [offloaded_to_host, offloaded_to_disk])
def test_a_parameter_that_replaces_an_offloaded_one_counts(tmp_path, way):
    model = way(build("llama"), tmp_path)
    name = Fingerprinter(model)
    before = name()
    layer = model.model.layers[0].mlp.up_proj
    remove_hook_from_module(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape))
    assert name() == fingerprint(model) != before


@pytest.mark.parametrize("way", WAYS)
def test_detach_leaves_the_dispatch_in_place(tmp_path, way):
    model, ids = build("llama"), prompt(40)
    expected = model.generate(ids, **GREEDY)
    model = way(model, tmp_path)
    forward = model.forward
    attach(model)
    detach(model)
    assert model.forward is forward
    assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_the_layers_device_is_where_its_hook_computes():
    model = build("llama")
    for i, layer in enumerate(model.model.layers):
        add_hook_to_module(layer, AlignDevicesHook(execution_device=torch.device("meta" if i % 2 else "cpu")))
    devices = [attach(model).devices[i].type for i in range(2)]
    assert devices == ["cpu", "meta"]
    detach(model)
    remove_hook_from_module(model, recurse=True)


def test_tables_that_accelerate_copies_between_devices_are_recognised(tmp_path):
    """On several devices each layer gets cos and sin of its own; here, copies on one device."""
    model, ids = build("gemma3"), prompt(100)  # two kinds of tables

    def copying(module, args, kwargs):
        return args, {k: tuple(t.clone() for t in v) if k == "position_embeddings" else v for k, v in kwargs.items()}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(copying, with_kwargs=True)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, tag="copies", progress=False)
        kinds = store._storage.disk.reader(store.segments()[0].id).shape.layout.layers
        assert all(kind.rotated == "key" for kind in kinds)
        cache = TieredCache(model, store, tag="copies")
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
        assert cache.stats.tokens_restored == 96


@pytest.mark.parametrize("way", [dispatched, offloaded_to_host, offloaded_to_disk])
def test_it_can_be_precomputed_and_asked(tmp_path, way):
    model = way(build("llama"), tmp_path)
    with KVStore(tmp_path / "store") as store:
        store.precompute(model, prompt(100), progress=False)
        assert store.lookup(model, prompt(100)).stored == 96
        cache = TieredCache(model, store)
        output = model.generate(prompt(100), past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 96
    assert torch.equal(output, model.generate(prompt(100), **GREEDY))
    detach(model)
