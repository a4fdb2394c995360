"""Adapters of PEFT of kinds other than one LoRA: idle ones beside the active one, saved modules and trained tokens."""

from __future__ import annotations

import pytest
from families import build

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

