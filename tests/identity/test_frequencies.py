"""RoPE frequencies that depend on the prompt length are part of the fingerprint, whichever passes ran before."""

from __future__ import annotations

from families import build, longrope

from hf_tiered_cache.identity import rope_regime

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def test_regimes_of_several_kinds_of_layers_are_joined():
    def regimes(full, sliding):
        rope = {"full_attention": full, "sliding_attention": sliding}
        config = build("gemma3", num_hidden_layers=3, max_position_embeddings=40, rope_parameters=rope).config
        return [rope_regime(config, length) for length in (15, 25, 35, 45)]

    assert regimes(longrope(20), longrope(30)) == ["short short", "long short", "long long", "long long"]
    assert regimes(longrope(30), longrope(20)) == ["short short", "short long", "long long", "long long"]
    assert regimes(DYNAMIC, longrope(20)) == ["short", "long", "long", None]
    assert regimes(DEFAULT, longrope(20)) == ["short", "long", "long", "long"]
