"""RoPE with frequencies that depend on the prompt length: KV of one frequency regime is not served under another."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def varying_rope(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the RoPE parameters of a model if its frequencies depend on the prompt length, otherwise None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for group in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = group.get("rope_type") or ""
        if kind == "longrope" or "dynamic" in kind:
            return group
    return None


def rope_regime(config: PreTrainedConfig, length: int) -> str | None:
    """Return the frequency regime of a pass with the last position `length - 1`.

    KV computed under one regime is not served under another.

    Returns:
        "short" or "long" for longrope. Otherwise "", or None if the frequencies depend on the exact length (dynamic NTK
        scaling beyond the trained length), so that nothing can be reused.
    """
    group = varying_rope(config)
    if group is None:
        return ""
    if group["rope_type"] == "longrope":
        original = group.get("original_max_position_embeddings") or config.max_position_embeddings
        return "long" if length > original else "short"
    return "" if length < config.max_position_embeddings else None
