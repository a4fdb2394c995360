"""Adapters of PEFT of kinds other than one LoRA: idle ones beside the active one, saved modules and trained tokens."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt

from hf_tiered_cache import TieredCache
from hf_tiered_cache.identity import Fingerprinter, fingerprint

peft = pytest.importorskip("peft")

KINDS = {
    "fourierft_scaling": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=["v_proj"], init_weights=False),
    "hra_apply_GS": lambda: peft.HRAConfig(r=4, target_modules=["v_proj"], init_weights=False),
}


@pytest.mark.parametrize("setting", KINDS)
def test_a_setting_of_the_active_adapter_counts_while_another_is_idle(setting):
    base = build("llama")
    tuned = peft.get_peft_model(base, KINDS[setting](), adapter_name="one")
    tuned.add_adapter("two", KINDS[setting]())
    tuned.set_adapter("one")
    tuned.eval()
    name = Fingerprinter(base)
    before = name()
    for module in base.modules():
        if hasattr(type(module), "adapter_layer_names") and setting in module.__dict__:
            settings = module.__dict__[setting]
            settings["one"] = not settings["one"] if isinstance(settings["one"], bool) else settings["one"] * 3
    assert name() == fingerprint(base) != before


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["self_attn"]}, {"trainable_token_indices": [3, 4]}],
)
def test_a_wrapped_module_is_the_original_while_adapters_are_disabled(options):
    base = build("llama")
    plain = fingerprint(base)
    targets = ["up_proj"] if "self_attn" in options.get("modules_to_save", ()) else ["v_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    tuned = peft.get_peft_model(base, config).eval()
    name = Fingerprinter(base)
    enabled = name.look()
    with tuned.disable_adapter():
        disabled = name.look()
    assert not enabled.problem and not disabled.problem
    assert disabled.fingerprint == plain != enabled.fingerprint
    assert name() == enabled.fingerprint


def test_an_edit_of_a_saved_module_counts_while_adapters_are_enabled_only():
    base = build("llama")
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["up_proj"])
    tuned = peft.get_peft_model(base, config).eval()
    name = Fingerprinter(base)
    names = []
    for _ in range(2):
        with tuned.disable_adapter():
            names.append((name(), fingerprint(base)))
        names.append((name(), fingerprint(base)))
        with torch.no_grad():
            base.model.layers[1].mlp.up_proj.modules_to_save["default"].weight.add_(1)
    assert all(watched == new for watched, new in names)
    assert names[0] == names[2] and names[1] != names[3]


def test_a_tuned_parameter_that_a_pass_registers_again_keeps_its_fingerprint():
    base = build("qwen3_moe", num_hidden_layers=2)
    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).eval()
    name = Fingerprinter(base)
    before = name()
    with torch.no_grad():
        base(prompt(4), use_cache=False)
    assert name() == fingerprint(base) == before


def test_an_adapter_that_mixes_the_tokens_of_a_pass_looks_ahead_while_it_is_active():
    if not hasattr(peft, "LilyConfig"):
        pytest.skip("this version of PEFT has no such adapter")
    base = build("llama")
    tuned = peft.get_peft_model(base, peft.LilyConfig(target_modules=["k_proj"])).eval()
    name = Fingerprinter(base)
    assert name.look().looks_ahead
    with tuned.disable_adapter():
        assert not name.look().looks_ahead


def test_adapters_of_several_kinds_restore_what_they_stored(store):
    kind = peft.LoHaConfig(r=4, target_modules=["v_proj"], init_weights=False)
    tuned = peft.get_peft_model(build("llama"), kind, mixed=True)
    tuned.add_adapter("two", peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))
    tuned.set_adapter(["default", "two"])
    tuned.eval()
    expected = tuned.generate(prompt(70), max_new_tokens=6)
    for tokens_restored in (0, 64):
        cache = TieredCache(tuned, store)
        assert torch.equal(tuned.generate(prompt(70), past_key_values=cache, max_new_tokens=6), expected)
        assert cache.stats.tokens_restored == tokens_restored
