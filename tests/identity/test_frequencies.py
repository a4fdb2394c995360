"""RoPE frequencies that depend on the prompt length are part of the fingerprint, whichever passes ran before."""

from __future__ import annotations

import inspect

import pytest
import torch
from families import build, longrope, prompt
from transformers.modeling_rope_utils import dynamic_rope_update

from hf_tiered_cache.identity import Fingerprinter, fingerprint, rope_regime

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = {
    "dynamic": ("llama", DYNAMIC),
    "longrope": ("llama", longrope(30)),
    "dynamic and longrope": ("gemma3", {"full_attention": DYNAMIC, "sliding_attention": longrope(20)}),
    "longrope and default": ("gemma3", {"full_attention": longrope(30), "sliding_attention": DEFAULT}),
}

KEEPS_LONG = 'f"{layer_type}_long_inv_freq"' not in inspect.getsource(dynamic_rope_update)
"""Whether long passes keep their frequencies. Transformers 5.17 looks for them by another name: it computes them again
from the configuration, and with kinds of layers it fails at the second long pass."""


def rotating(kind, **changes):
    """Build a model with RoPE frequencies of this kind, trained for 40 tokens."""
    family, parameters = KINDS[kind]
    groups = {name: {**group, **changes} if isinstance(group, dict) else group for name, group in parameters.items()}
    edited = groups if "rope_type" not in groups else {**groups, **changes}
    return build(family, num_hidden_layers=3, max_position_embeddings=40, rope_parameters=edited)


def run(model, tokens):
    with torch.no_grad():
        model(prompt(tokens), use_cache=False)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_any_length_leave_the_fingerprint(kind):
    if not KEEPS_LONG and kind.startswith(("dynamic and", "longrope and")):
        pytest.skip("this version of transformers fails at the second long pass")
    model = rotating(kind)
    name = Fingerprinter(model)
    expected = name()
    for tokens in (10, 35, 60, 10, 70, 35):
        run(model, tokens)
        assert name() == fingerprint(model) == expected


def frequencies_of(rotary, name):
    return next(value for key, value in {**rotary.__dict__, **rotary._buffers}.items() if key.endswith(name))


def scale_in_place(name):
    return lambda rotary: frequencies_of(rotary, name).mul_(0.3)


def scale_attention(rotary):
    name = next(key for key in rotary.__dict__ if key.endswith("attention_scaling"))
    setattr(rotary, name, 2.0)


EDITS = {
    "dynamic": (["inv_freq", "attention"], []),
    "longrope": (["original_inv_freq", "attention"], ["long_inv_freq"]),
    "dynamic and longrope": (["attention"], ["sliding_attention_long_inv_freq"]),
    "longrope and default": (["sliding_attention_inv_freq"], ["full_attention_long_inv_freq"]),
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_of_frequencies_in_use_is_noticed(kind, is_used):
    for edit in EDITS[kind][0] + is_used * EDITS[kind][1]:
        model = rotating(kind)
        if is_used:
            run(model, 60)
            run(model, 10)
        name = Fingerprinter(model)
        before = name()
        (scale_attention if edit == "attention" else scale_in_place(edit))(model.model.rotary_emb)
        assert name() == fingerprint(model) != before, edit


def test_dynamic_frequencies_that_the_next_pass_restores_count():
    """After a long prompt, a short one restores the original frequencies."""
    model = rotating("dynamic")
    run(model, 60)
    name = Fingerprinter(model)
    before = name()
    model.model.rotary_emb.original_inv_freq.mul_(0.3)
    edited = name()
    assert edited != before
    run(model, 10)
    assert name() == edited


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("dynamic", "rope_theta", 300.0),
        ("longrope", "rope_theta", 300.0),
        ("longrope", "short_factor", [3.0] * 8),
        ("longrope", "long_factor", [9.0] * 8),
    ],
)
def test_an_edited_configuration_does_not_name_frequencies_that_it_did_not_make(kind, setting, value):
    """Passes go on with the frequencies that were computed from the configuration before its edit."""
    if not KEEPS_LONG and setting == "long_factor":
        pytest.skip("this version of transformers reads the edited configuration at the next long pass")
    model = rotating(kind)
    run(model, 10)
    model.config.rope_parameters[setting] = value
    assert fingerprint(model) != fingerprint(rotating(kind, **{setting: value}))


def test_regimes_of_several_kinds_of_layers_are_joined():
    def regimes(full, sliding):
        rope = {"full_attention": full, "sliding_attention": sliding}
        config = build("gemma3", num_hidden_layers=3, max_position_embeddings=40, rope_parameters=rope).config
        return [rope_regime(config, length) for length in (15, 25, 35, 45)]

    assert regimes(longrope(20), longrope(30)) == ["short short", "long short", "long long", "long long"]
    assert regimes(longrope(30), longrope(20)) == ["short short", "short long", "long long", "long long"]
    assert regimes(DYNAMIC, longrope(20)) == ["short", "long", "long", None]
    assert regimes(DEFAULT, longrope(20)) == ["short", "long", "long", "long"]
