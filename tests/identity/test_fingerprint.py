"""The fingerprint: whatever changes keys and values changes it, and nothing else does."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from families import FAMILIES, build, longrope, prompt
from thorough import some
from torch.backends import ContextProp
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MptConfig,
    MptForCausalLM,
    WhisperConfig,
    WhisperForCausalLM,
)

from hf_tiered_cache import KVStore, TieredCache, UnsupportedModelError, detach
from hf_tiered_cache.identity import Fingerprinter, differing_facts, fingerprint, rope_regime
from hf_tiered_cache.identity import model as inspected
from hf_tiered_cache.patches.layers import dropping
from hf_tiered_cache.patches.scope import Scope
from hf_tiered_cache.patches.tap import RotaryTap

peft = pytest.importorskip("peft")

GREEDY = {"do_sample": False, "max_new_tokens": 4}


def restored(model, store, ids=None):
    """Return how many tokens of the stored prompt `model` restores, and whether its output is right."""
    ids = prompt(70) if ids is None else ids
    cache = TieredCache(model, store, record=False)
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(ids, **GREEDY))
    return cache.stats.tokens_restored


def fill(model, store):
    store.precompute(model, prompt(70), progress=False)


@pytest.mark.parametrize("ends", [lambda model, store: fill(model, store), lambda model, store: detach(model)])
def test_memory_of_replaced_weights_is_freed(ends, tmp_path):
    """As by `model.to()`: at the next request, or when the model is detached."""
    model = build("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    array = weight.detach().numpy().copy()
    weight.data, memory = torch.from_numpy(array), weakref.ref(array)
    del array
    with KVStore(tmp_path) as store:
        fill(model, store)
        weight.data = weight.data.clone()
        store.flush()
        ends(model, store)
        gc.collect()
        assert memory() is None


CHANGES = {
    "other weights of the same shape": lambda: build("llama", seed=1),
    "rope_theta": lambda: build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "rope scaling": lambda: build(
        "llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "bf16": lambda: build("llama", torch.bfloat16),
    "fp16": lambda: build("llama", torch.float16),
    "norm epsilon": lambda: build("llama", rms_norm_eps=1e-3),
    "another class": lambda: build("mistral", sliding_window=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_a_miss(tmp_path, change):
    with KVStore(tmp_path) as store:
        model = build("llama")
        fill(model, store)
        assert restored(model, store) == 64
        assert restored(CHANGES[change](), store) == 0


def test_bf16_against_fp16(tmp_path):
    """Both have the same bytes per token, and other numbers."""
    with KVStore(tmp_path) as store:
        fill(build("llama", torch.bfloat16), store)
        assert restored(build("llama", torch.float16), store) == 0
        assert restored(build("llama", torch.bfloat16), store) == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_same_in_every_process_and_for_every_copy(family):
    first_model = build(family)
    assert fingerprint(first_model) == fingerprint(build(family)) == fingerprint(copy.deepcopy(first_model))
    assert fingerprint(first_model) != fingerprint(build(family, seed=1))


def test_a_model_that_was_saved_and_loaded_keeps_it(tmp_path):
    """Saving adds the type of the model to the configuration, and sorts what is in its dictionaries."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}
    model = build("llama", rope_parameters=rope)
    model.save_pretrained(tmp_path)
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert list(loaded_model.config.rope_parameters) != list(model.config.rope_parameters)
    name = Fingerprinter(loaded_model)
    before = name()
    assert before == fingerprint(model)
    loaded_model.config.rope_parameters["factor"] = 3.0
    assert name() == fingerprint(loaded_model) != before


def glm4_moe():
    """Return a model whose layers keep a dictionary of the configuration."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **heads, **experts))


def mpt():
    """Return a model with a configuration within its configuration."""
    return MptForCausalLM(MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=97, max_seq_len=256))


def whisper():
    """Return a model with a tuple in its configuration."""
    heads = {"decoder_attention_heads": 4, "encoder_attention_heads": 4}
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 96, "encoder_layers": 1}
    return WhisperForCausalLM(WhisperConfig(vocab_size=97, **sizes, **heads, pad_token_id=0))


@pytest.mark.parametrize("make", [glm4_moe, mpt, whisper])
def test_saving_changes_values_of_a_configuration_but_not_the_fingerprint(make, tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    assert fingerprint(type(model).from_pretrained(tmp_path).eval()) == fingerprint(model)


def test_private_keys_of_a_quantization_count():
    """TorchAO names its kind of quantization by such keys. A miss says that the quantization differs."""
    model, facts = build("llama"), []
    for kind in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        model.config.quantization_config = {"quant_type": {"default": {"_type": kind}}}
        facts.append(Fingerprinter(model).look().facts)
    assert "quantization" in differing_facts(*facts)


def test_an_upgrade_of_the_library_or_its_format_leaves_what_is_stored(tmp_path, monkeypatch):
    """Nothing of ours is part of a model's name: no version, and none of the code that an attached model runs."""
    alone = fingerprint(build("llama"))
    with KVStore(tmp_path) as store:
        model = build("llama")
        fill(model, store)
        assert restored(model, store) == 64
        assert fingerprint(model) == alone
    for name in ("hf_tiered_cache.__version__", "transformers.__version__"):
        monkeypatch.setattr(name, "99.0.0")
    monkeypatch.setattr("hf_tiered_cache.store.format.FORMAT_VERSION", 99)
    with KVStore(tmp_path) as store:
        later_model = build("llama")
        assert restored(later_model, store) == 64
        assert fingerprint(later_model) == alone
    monkeypatch.setattr("torch.__version__", "99.0.0")  # other kernels, other bits
    assert fingerprint(later_model) != alone


@pytest.mark.parametrize("family", some(FAMILIES))
@pytest.mark.thin(2)
def test_any_one_tensor_counts(family):
    model = build(family)
    fingerprints = {fingerprint(model)}
    head = model.get_output_embeddings()
    parameters = [(n, p) for n, p in model.named_parameters() if p is not head.weight]
    for _, parameter in parameters[:: max(1, len(parameters) // 12)]:
        with torch.no_grad():
            parameter.view(-1)[0] += 0.25
        fingerprints.add(fingerprint(model))
    assert len(fingerprints) == 1 + len(parameters[:: max(1, len(parameters) // 12)])


def test_what_changes_no_kv_changes_nothing():
    model = build("llama")
    name = fingerprint(model)
    model.config._name_or_path = "elsewhere"
    model.config.use_cache = False
    model.config.transformers_version = "6.0"
    model.config.pad_token_id = 7
    model.generation_config.temperature = 0.3
    assert fingerprint(model) == name
    model.requires_grad_(False)
    assert fingerprint(model) == name


def test_weights_written_to_behind_its_back_are_noticed(tmp_path):
    """A write through `.data` does not change the version counter."""
    with KVStore(tmp_path) as store:
        model = build("llama")
        fill(model, store)
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)
        assert restored(model, store) == 0
        model.model.layers[0].self_attn.k_proj.weight.data.div_(1.5)


def test_weights_replaced_moved_and_loaded_are_noticed():
    model = build("llama")
    name = Fingerprinter(model)
    fingerprints = [name()]
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(
        torch.randn_like(model.model.layers[1].mlp.up_proj.weight)
    )
    fingerprints.append(name())
    model.load_state_dict(build("llama", seed=3).state_dict())
    fingerprints.append(name())
    model.to(torch.bfloat16)
    fingerprints.append(name())
    assert len(set(fingerprints)) == 4
    assert name() == fingerprints[-1]


# --- adapters


def lora(model, seed=5):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_an_adapter_is_a_miss_and_its_kv_its_own(tmp_path):
    with KVStore(tmp_path) as store:
        base = build("llama")
        fill(base, store)
        tuned = lora(base)
        assert restored(tuned, store) == 0
        fill(tuned, store)
        assert restored(tuned, store) == 64
        with tuned.disable_adapter():
            assert restored(tuned, store) == 64  # the base model's KV
        assert restored(build("llama"), store) == 64


def test_adapters_with_other_weights_scale_or_merged_are_told_apart():
    base = build("llama")
    names = {"base": fingerprint(base)}
    tuned = lora(base)
    names["lora"] = fingerprint(base)
    torch.manual_seed(9)
    tuned.add_adapter("second", peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))
    assert fingerprint(base) == names["lora"]  # loaded, but not switched on
    tuned.set_adapter("second")
    names["second"] = fingerprint(base)
    tuned.set_adapter("default")
    assert fingerprint(base) == names["lora"]
    for module in base.modules():
        if isinstance(getattr(module, "scaling", None), dict) and "default" in module.scaling:
            module.scaling["default"] *= 2
    names["scaled"] = fingerprint(base)
    tuned.merge_adapter()
    names["merged"] = fingerprint(base)
    assert len(set(names.values())) == len(names)


def test_an_adapter_switched_on_between_two_requests_is_noticed(tmp_path):
    with KVStore(tmp_path) as store:
        model = lora(build("llama"))
        fill(model, store)
        assert restored(model, store) == 64
        model.base_model.disable_adapter_layers()
        assert restored(model, store) == 0
        model.base_model.enable_adapter_layers()
        assert restored(model, store) == 64
        model.merge_adapter()
        assert restored(model, store) == 0


def test_an_adapter_switched_on_between_two_turns_is_noticed(tmp_path):
    """The second turn has the adapter's KV, the first turn the base model's."""
    with KVStore(tmp_path) as store:
        model = lora(build("llama"))
        model.base_model.disable_adapter_layers()
        cache = TieredCache(model, store)
        with torch.no_grad():
            model(input_ids=prompt(100)[:, :70], past_key_values=cache, logits_to_keep=1)
            model.base_model.enable_adapter_layers()
            model(input_ids=prompt(100)[:, 70:], past_key_values=cache, logits_to_keep=1)
        del cache
        store.flush()
        assert restored(model, store, prompt(100)) == 0
        model.base_model.disable_adapter_layers()
        assert restored(model, store, prompt(100)) == 64


def test_rows_with_adapters_of_their_own_are_neither_stored_nor_restored(tmp_path):
    with KVStore(tmp_path) as store:
        model, ids = lora(build("llama")), prompt(70).repeat(2, 1)
        names = ["__base__", "default"]
        expected = model.generate(input_ids=ids, adapter_names=names, **GREEDY)
        fill(model, store)
        cache = TieredCache(model, store)
        assert torch.equal(
            model.generate(input_ids=ids, adapter_names=names, past_key_values=cache, **GREEDY), expected
        )
        assert cache.stats.tokens_restored == cache.stats.tokens_stored == 0
        store.flush()
        assert len(store.segments()) == 1


def test_an_idle_adapter_whose_name_begins_anothers_hides_nothing():
    model = lora(build("llama"))
    model.add_adapter("default2", model.peft_config["default"])
    model.set_adapter("default2")
    before = fingerprint(model.get_base_model())
    weights = next(p for name, p in model.named_parameters() if name.endswith("lora_A.default2.weight"))
    with torch.no_grad():
        weights.add_(1)
    assert fingerprint(model.get_base_model()) != before


def test_prompt_learning_is_refused(tmp_path):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="prompt-learning"):
        TieredCache(peft.get_peft_model(build("llama"), config), tmp_path)


# --- precision and offloading


def test_autocast_is_another_precision(tmp_path):
    with KVStore(tmp_path) as store:
        model = build("llama")
        fill(model, store)
        with torch.autocast("cpu", torch.bfloat16):
            assert restored(model, store) == 0
            fill(model, store)
            assert restored(model, store) == 64
            assert store.stats.read_errors == 0
        assert restored(model, store) == 64


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch 2.9 and later")
@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_float32_computed_as_bfloat16_or_tf32_is_another_precision(tmp_path, backend):
    matmul = getattr(torch.backends, backend).matmul
    before = matmul.fp32_precision
    with KVStore(tmp_path) as store:
        model = build("llama")
        fill(model, store)
        matmul.fp32_precision = "tf32" if backend == "cuda" else "bf16"
        try:
            assert restored(model, store) == 0
        finally:
            matmul.fp32_precision = before
        assert restored(model, store) == 64


cuda, mha = torch.backends.cuda, torch.backends.mha


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda: cuda.enable_cudnn_sdp(False), lambda: cuda.enable_cudnn_sdp(True)),
        (lambda: cuda.enable_flash_sdp(False), lambda: cuda.enable_flash_sdp(True)),
        (lambda: cuda.allow_fp16_bf16_reduction_math_sdp(True), lambda: cuda.allow_fp16_bf16_reduction_math_sdp(False)),
        (
            lambda: setattr(cuda.matmul, "allow_fp16_accumulation", True),
            lambda: setattr(cuda.matmul, "allow_fp16_accumulation", False),
        ),
        (
            lambda: torch._C._set_sdp_priority_order([0, 1, 2, 3, 4]),
            partial(torch._C._set_sdp_priority_order, torch._C._get_sdp_priority_order()),
        ),
        (lambda: torch.backends.nnpack.set_flags(False), lambda: torch.backends.nnpack.set_flags(True)),
        (
            lambda: setattr(torch.backends.quantized, "engine", "qnnpack"),
            partial(setattr, torch.backends.quantized, "engine", torch.backends.quantized.engine),
        ),
        (lambda: mha.set_fastpath_enabled(False), lambda: mha.set_fastpath_enabled(True)),
        (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    ],
    ids=["cudnn", "flash", "reduction", "accumulation", "order", "nnpack", "quantized", "fast path", "denormals"],
)
def test_switches_that_change_rounding_are_part_of_it(change, undo):
    model = build("llama")
    name = fingerprint(model)
    change()
    try:
        assert fingerprint(model) != name
    finally:
        undo()
    assert fingerprint(model) == name


@pytest.mark.parametrize("module", ["cudnn", "mkldnn", "miopen"])
def test_all_settings_of_backends_are_part_of_it(module):
    """Whatever a backend lets a user set, also settings of later versions."""
    module = getattr(torch.backends, module, None)
    if module is None:
        pytest.skip("this version of PyTorch lacks this backend")
    members = vars(type(module))
    places = [(module, name) for name, member in members.items() if isinstance(member, ContextProp)]
    kind = getattr(torch.backends, "_FP32Precision", ())  # PyTorch 2.9 and later
    places += [(member, "fp32_precision") for member in members.values() if isinstance(member, kind)]
    model = build("llama", num_hidden_layers=1)
    name = fingerprint(model)
    assert places
    for owner, setting in places:
        if (before := getattr(owner, setting)) is None:  # not on this machine
            continue
        values = (not before,) if isinstance(before, bool) else _VALUES[setting]
        setattr(owner, setting, next(value for value in values if value != before))
        try:
            assert fingerprint(model) != name, setting
        finally:
            setattr(owner, setting, before)
        assert fingerprint(model) == name


_VALUES = {
    "benchmark_limit": (10, 5),
    "depthwise_kernel": ("cudnn", "native"),
    "fp32_precision": ("tf32", "ieee"),
}


def test_the_order_that_pytorch_chooses_at_the_first_attention_on_a_gpu_is_no_change():
    """On a GPU of capability 9.0 or 10.0 that is cuDNN first, from then on."""
    model = build("llama")
    name, order = fingerprint(model), torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([3, 1, 2, 0])  # the last one stays
    try:
        assert fingerprint(model) == name
    finally:
        torch._C._set_sdp_priority_order(order)


def test_a_kernel_in_python_runs_plain_until_it_is_removed(tmp_path):
    model = build("llama")
    with KVStore(tmp_path) as store:
        fill(model, store)
        torch.func.vmap(torch.sin)(torch.ones(2))  # for which PyTorch adds kernels
        assert restored(model, store) == 64
        library = torch.library.Library("aten", "IMPL")
        library.impl("silu", torch.sin, "CPU")
        try:
            assert restored(model, store) == 0
            assert "the kernel aten/silu/CPU" in Fingerprinter(model).look().problem
        finally:
            library._destroy()
        assert restored(model, store) == 64


def test_a_kernel_that_takes_the_place_of_another_is_noticed():
    name = Fingerprinter(build("llama"))
    library = torch.library.Library("hf_tiered_cache_test", "FRAGMENT")
    library.define("identity(Tensor x) -> Tensor")
    library.impl("identity", lambda x: x, "CPU")
    assert not name.look().problem
    library._destroy()
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu", lambda x: x * 3, "CPU")
    try:
        assert "aten/silu" in name.look().problem
    finally:
        kernels._destroy()


def test_quantization_is_part_of_it():
    model = build("llama")
    name = fingerprint(model)
    model.config.quantization_config = {"quant_method": "something", "bits": 4}
    assert fingerprint(model) != name


def test_weights_on_the_meta_device_cannot_be_named():
    with torch.device("meta"):
        model = build("llama")
    with pytest.raises(UnsupportedModelError, match=r"meta device.*load the weights"):
        fingerprint(model)


# --- RoPE that follows the length

LONGROPE = longrope(80)


def test_longrope_keeps_its_two_regimes_apart(tmp_path):
    model = build("llama", rope_parameters=LONGROPE)
    short, long = prompt(70), prompt(120)
    long[:, :70] = short
    with KVStore(tmp_path) as store:
        store.precompute(model, [short[0]], progress=False)
        assert restored(model, store, short) == 64
        assert restored(model, store, long) == 0
        store.precompute(model, [long[0]], progress=False)
        assert restored(model, store, long) == 112
        assert restored(model, store, short) == 64


def test_longrope_records_nothing_across_the_border(tmp_path):
    """Generation leads from the short regime into the long one: those tokens' KV is of neither."""
    model, ids = build("llama", rope_parameters=LONGROPE), prompt(70)
    with KVStore(tmp_path) as store:
        out = model.generate(ids, past_key_values=TieredCache(model, store), do_sample=False, max_new_tokens=40)
        store.flush()
        assert max(row.position + row.tokens for row in store.segments()) <= 80
        assert restored(model, store, out) == 0


def test_dynamic_scaling_reuses_only_what_it_does_not_scale(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=100)
    with KVStore(tmp_path) as store:
        store.precompute(model, [prompt(70)[0]], progress=False)
        assert restored(model, store, prompt(70)) == 64
        long = torch.cat([prompt(70), prompt(60, seed=2)], dim=1)
        assert restored(model, store, long) == 0
        assert restored(model, store, prompt(70)) == 64  # also after the frequencies have grown and come back


def test_regimes_of_known_configurations():
    assert rope_regime(build("llama").config, 5000) == ""
    config = build("llama", rope_parameters=LONGROPE).config
    assert (rope_regime(config, 80), rope_regime(config, 81)) == ("short", "long")
    assert rope_regime(build("gemma3").config, 10) == ""


def test_a_hook_that_another_thread_adds_meanwhile_is_no_problem(monkeypatch):
    """Passes in other threads add hooks of this library while the model is inspected."""
    model = build("llama")
    layers, home, other_hooks = model.model.layers, inspected.home_of, ExitStack()
    expected = fingerprint(model)

    def meanwhile(hook):
        other_hooks.enter_context(dropping(layers, 0, Scope(None, RotaryTap())))
        return home(hook)

    with other_hooks, dropping(layers, 0, Scope(None, RotaryTap())):
        monkeypatch.setattr(inspected, "home_of", meanwhile)
        assert fingerprint(model) == expected
