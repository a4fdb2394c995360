"""Attaching and detaching: symmetric, without traces, without a model disturbing another; compiled models fall back."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import build, prompt
from thorough import pairs
from threads import run_in_threads
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_tiered_cache
from hf_tiered_cache import CacheMismatchError, KVStore, TieredCache, UnsupportedModelError, attach, detach, tiered
from hf_tiered_cache.patches import rotary
from hf_tiered_cache.patches.attach import attachment_of
from hf_tiered_cache.patches.scope import CACHE_ARGUMENTS, current

GREEDY = {"do_sample": False, "max_new_tokens": 6}


def state(model):
    """Return everything that attaching could change: modules' attributes and hooks, globals, registries."""
    modules = {
        name: (
            {k: id(v) for k, v in vars(m).items() if not k.startswith("_forward")},
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
        )
        for name, m in model.named_modules()
    }
    code = {name: id(value) for name, value in vars(sys.modules[type(model).__module__]).items()}
    registered = [dict(functions) for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    return modules, code, registered, dict(vars(model.config))


def test_two_threads_may_attach_a_model_at_once(monkeypatch):
    model, watch = build("llama"), rotary.watch_tables

    def slow(model):
        time.sleep(0.2)
        return watch(model)

    monkeypatch.setattr(rotary, "watch_tables", slow)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(attach, [model, model])
    assert first is second is attachment_of(model)


def test_detach_leaves_the_model_exactly_as_it_was(tmp_path):
    model = build("llama")
    before = state(model)
    attach(model)
    assert state(model) != before
    with KVStore(tmp_path) as store:
        model.generate(prompt(50), past_key_values=TieredCache(model, store), **GREEDY)
        detach(model)
    assert state(model) == before
    assert attachment_of(model) is None


def test_attaching_twice_is_attaching_once_and_detaching_twice_is_harmless():
    model = build("llama")
    before = state(model)
    assert attach(model) is attach(model)
    detach(model)
    detach(model)
    assert state(model) == before


def test_importing_patches_nothing():
    code = (
        "import sys, transformers.models.llama.modeling_llama as m; before = m.apply_rotary_pos_emb\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as a; keys = sorted(a.valid_keys())\n"
        "import hf_tiered_cache, hf_tiered_cache.patches\n"
        "assert m.apply_rotary_pos_emb is before and sorted(a.valid_keys()) == keys\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_two_models_of_one_family_do_not_disturb_each_other(tmp_path):
    """They share the modelling code that is patched; either may be detached first."""
    first, second = build("llama", seed=1), build("llama", seed=2)  # imports the module, not yet patched
    function = sys.modules["transformers.models.llama.modeling_llama"].apply_rotary_pos_emb
    with KVStore(tmp_path) as store:
        for model in (first, second):
            model.generate(prompt(60), past_key_values=TieredCache(model, store), **GREEDY)
        detach(first)
        cache = TieredCache(second, store)
        output = second.generate(prompt(60), past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored > 0
        assert torch.equal(output, second.generate(prompt(60), **GREEDY))
        detach(second)
    assert sys.modules["transformers.models.llama.modeling_llama"].apply_rotary_pos_emb is function


def test_attached_models_work_without_a_cache_of_ours(tmp_path):
    model = build("llama")
    before = model.generate(prompt(40), **GREEDY)
    attach(model)
    assert torch.equal(model.generate(prompt(40), **GREEDY), before)
    assert torch.equal(model.generate(prompt(40), past_key_values=DynamicCache(config=model.config), **GREEDY), before)
    assert torch.equal(model(prompt(40)).logits, model(input_ids=prompt(40), use_cache=False).logits)


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_either_name_of_the_argument_takes_the_cache_without_a_warning(tmp_path, name):
    """`past_key_values` was renamed `cache` in transformers 5.24."""
    model, ids = build("llama"), prompt(40)
    before = model.generate(ids, **GREEDY)
    with KVStore(tmp_path) as store, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for tokens_restored in (0, 32):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(ids, **{name: cache}, **GREEDY), before)
            assert cache.stats.tokens_restored == tokens_restored
        cache = TieredCache(model, store)
        model(ids, **{name: cache}, logits_to_keep=1)
        assert cache.stats.tokens_restored == 32
        with tiered(model, store) as session:
            assert torch.equal(model.generate(ids, **{name: None}, **GREEDY), before)
        assert session.stats.tokens_restored == 32
        assert torch.equal(model.generate(ids, **{name: None}, **GREEDY), before)


def test_a_cache_without_its_model_attached_is_still_right(tmp_path):
    """After a detachment in between, nothing is restored or recorded, and results are right."""
    model = build("llama")
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        detach(model)
        assert torch.equal(
            model.generate(prompt(40), past_key_values=cache, **GREEDY), model.generate(prompt(40), **GREEDY)
        )
        assert store.stats.segments == 0


def test_positional_arguments_are_understood(tmp_path):
    model = build("llama")
    with KVStore(tmp_path) as store, torch.no_grad():
        store.precompute(model, prompt(60), progress=False)
        mask = torch.ones(1, 60, dtype=torch.int64)
        cache = TieredCache(model, store)
        logits = model(prompt(60), mask, None, cache, logits_to_keep=1).logits
        assert cache.stats.tokens_restored == 48
        torch.testing.assert_close(logits, model(prompt(60)).logits[:, -1:], rtol=0, atol=1e-5)


def test_a_deep_copy_of_an_attached_model_is_a_model_of_its_own(tmp_path):
    model = build("llama")
    attach(model)
    twin = copy.deepcopy(model)
    assert attachment_of(twin) is None
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    alone = build("llama")
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(1.5)
    assert torch.equal(twin(prompt(20)).logits, alone(prompt(20)).logits)
    with KVStore(tmp_path) as store:
        cache = TieredCache(twin, store)
        assert torch.equal(
            twin.generate(prompt(40), past_key_values=cache, **GREEDY), alone.generate(prompt(40), **GREEDY)
        )


def replica(model, source_model):
    """Return a replica of a model with the weights of another one, as `nn.DataParallel` makes it for a device."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for (module, twin), source in zip(replicas.items(), source_model.modules(), strict=True):
        twin._modules = {name: replicas.get(child) for name, child in module._modules.items()}
        for name, parameter in source._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                setattr(twin, name, parameter.detach())
    return replicas[model]


def test_a_replica_of_an_attached_model_computes_with_its_own_weights():
    model, other_model = build("llama"), build("llama", seed=2)
    expected = other_model(prompt(20)).logits
    attach(model)
    twin = replica(model, other_model)
    assert attachment_of(twin) is None
    assert torch.equal(twin(prompt(20)).logits, expected)
    detach(model)
    assert torch.equal(replica(model, other_model)(prompt(20)).logits, expected)


def test_an_attached_model_can_be_saved_and_loaded(tmp_path):
    model = build("llama")
    attach(model)
    model.save_pretrained(tmp_path / "saved")
    reloaded_model = type(model).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(model(prompt(20)).logits, reloaded_model(prompt(20)).logits)


def test_an_attached_model_can_be_exported():
    model, ids = build("llama"), prompt(20)
    attach(model)
    exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False).module()
    logits = model(ids, use_cache=False).logits
    assert torch.allclose(exported(ids, use_cache=False).logits, logits, rtol=0, atol=1e-6)  # PyTorch 2.8 rounds so
    detach(model)


def test_a_cache_of_another_model_is_refused(tmp_path):
    first, second = build("llama", seed=1), build("llama", seed=2)
    with KVStore(tmp_path) as store:
        attach(second)
        with pytest.raises(CacheMismatchError, match="another"):
            second.generate(prompt(40), past_key_values=TieredCache(first, store), **GREEDY)


def test_a_cache_of_a_session_that_has_ended_is_refused_with_advice(store):
    model = build("llama")
    with tiered(model, store):
        cache = TieredCache(model, store)
    with tiered(model, store), pytest.raises(CacheMismatchError, match=r"was detached .* create a new cache"):
        model.generate(prompt(40), past_key_values=cache, **GREEDY)


def test_what_is_no_transformers_model_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="Linear"):
        TieredCache(nn.Linear(2, 2), tmp_path)


def test_one_model_in_several_threads(tmp_path):
    """Each thread has its own passes, one of them without our cache."""
    model = build("qwen2")
    prompts = [prompt(80, seed=i % 3) for i in range(6)]
    expected = [model.generate(p, **GREEDY) for p in prompts]
    with KVStore(tmp_path, host_memory="200KiB") as store:

        def work(number):
            for _ in range(6):
                cache = None if number == 0 else TieredCache(model, store)
                out = model.generate(prompts[number], past_key_values=cache, **GREEDY)
                assert torch.equal(out, expected[number])
                assert current() is None

        run_in_threads(work, range(6))
    assert model.config._attn_implementation == "sdpa"


# --- torch.compile


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


def forward(model):
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    return model


def inner(model):
    model.model = torch.compile(model.model, backend="eager")
    return model


def layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager", fullgraph=True)
    return model


COMPILED = *pairs([whole, in_place, forward, inner, layers], ["before", "after"]), *pairs([inner, layers], ["last"])


@pytest.mark.parametrize(("compiled", "when"), COMPILED)
def test_compiled_models_fall_back(tmp_path, compiled, when):
    """The model is compiled before or after it is attached, or last, after its cache was created."""
    torch._dynamo.reset()
    model, ids = build("llama"), prompt(70)
    expected = model.generate(ids, **GREEDY)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, progress=False)
        if when == "before":
            detach(model)
        cache = TieredCache(model, store) if when == "last" else None
        compiled_model = compiled(model)
        cache = cache or TieredCache(compiled_model, store)
        assert torch.equal(compiled_model.generate(ids, past_key_values=cache, **GREEDY), expected)
        assert cache.stats.tokens_restored == 64
        detach(compiled_model)


class Calling(torch.nn.Module):
    """Module that calls a function."""

    def __init__(self):
        super().__init__()
        self.function = torch.nn.functional.silu

    def forward(self, x):
        return self.function(x)


def tripling(graph, inputs):
    return lambda *args: [3 * part for part in graph.forward(*args)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_function_in_a_model_runs_uncompiled(tmp_path, when):
    """What it computes depends on the compiler, which the fingerprint does not know."""
    torch._dynamo.reset()
    model, ids = build("llama"), prompt(70)
    for layer in model.model.layers:
        layer.mlp.act_fn = Calling()
    expected = model.generate(ids, **GREEDY)
    with KVStore(tmp_path) as store:
        for backend in ("eager", tripling):
            cache = TieredCache(model, store) if when == "before" else None
            for layer in model.model.layers:
                layer.mlp.act_fn.function = torch.compile(torch.nn.functional.silu, backend=backend)
            cache = cache or TieredCache(model, store)
            assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
            store.flush()


def test_a_compiled_model_stays_compiled_for_others():
    """Being attached costs other passes nothing: what was one graph still is."""
    torch._dynamo.reset()
    model = build("llama")
    attach(model)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=counting, fullgraph=True)
    with torch.no_grad():
        model(input_ids=prompt(20), use_cache=False)
    assert len(graphs) == 1


def test_compiled_models_in_several_threads_stay_compiled_afterwards(tmp_path):
    """Two passes overlap; after both, the compiler's stance is unchanged."""
    torch._dynamo.reset()
    model, graphs = build("llama"), []
    attach(model)
    first_attachment, second_attachment = attachment_of(model), attachment_of(model)
    first_attachment.compiled = True
    first, second = first_attachment.running_eagerly(), second_attachment.running_eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=counting)(torch.zeros(1))
    assert len(graphs) == 1


# --- what generate() does on the way to the model


@pytest.mark.parametrize("mode", [{}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}])
def test_a_cache_of_another_prompt_is_refused_in_every_mode(tmp_path, mode):
    model = build("llama")
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store, strict=True)
        model.generate(prompt(60), past_key_values=cache, **GREEDY)
        with pytest.raises(CacheMismatchError, match="begins with only 0"):
            model.generate(prompt(90, seed=8), past_key_values=cache, **GREEDY | mode)


@pytest.mark.parametrize("mode", [{"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_second_turn_in_other_modes(tmp_path, mode, family):
    model = build(family)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        output = model.generate(prompt(60), past_key_values=cache, **GREEDY)
        longer = torch.cat([output, prompt(30, seed=8)], dim=1)
        longer_output = model.generate(longer, past_key_values=cache, **GREEDY | mode)
        assert torch.equal(longer_output, model.generate(longer, **GREEDY))
        assert cache.get_seq_length() == longer_output.shape[1] - 1


def test_phi3_does_not_lose_its_cache_on_long_prompts(tmp_path):
    """Its code drops a cache that is shorter than a prompt beyond the trained length; an empty one is given back."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 80,
    }
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=80)
    ids = prompt(200)
    with KVStore(tmp_path) as store:
        for tokens_restored in (0, 192):
            cache = TieredCache(model, store)
            output = model.generate(ids, past_key_values=cache, **GREEDY)
            assert torch.equal(output, model.generate(ids, **GREEDY))
            assert cache.stats.tokens_restored == tokens_restored
            del cache


def test_a_path_whose_store_was_closed_is_opened_again(tmp_path):
    model, ids = build("llama"), prompt(60)
    cache = TieredCache(model, tmp_path)
    model.generate(ids, past_key_values=cache, **GREEDY)
    cache.store.close()
    second_cache = TieredCache(model, tmp_path)
    assert torch.equal(model.generate(ids, past_key_values=second_cache, **GREEDY), model.generate(ids, **GREEDY))
    assert second_cache.stats.tokens_restored == 48
    detach(model)


def test_version():
    assert hf_tiered_cache.__version__


def test_a_users_attention_in_place_of_sdpa_is_called(tmp_path):
    """Also with padding on the CPU, where PyTorch's kernel is called in place of the function of transformers."""

    def doubled(module, query, key, value, mask, **kwargs):
        return sdpa_attention_forward(module, query, key, 2 * value, mask, **kwargs)

    model, ids = build("llama"), prompt(20, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", doubled)
    try:
        want = model(ids, attention_mask=mask).logits
        with KVStore(tmp_path) as store:
            cache = TieredCache(model, store, tag="doubled")
            assert torch.equal(model(ids, attention_mask=mask, past_key_values=cache).logits, want)
    finally:
        detach(model)
        AttentionInterface.register("sdpa", before)
