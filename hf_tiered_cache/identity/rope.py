"""RoPE frequencies that follow the length of the prompt: KV of one regime is not served under another."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def varying_rope(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The RoPE parameters of a model whose frequencies follow the length of the prompt, or None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for group in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = group.get("rope_type") or ""
        if kind == "longrope" or "dynamic" in kind:
            return group
    return None


def rope_regime(config: PreTrainedConfig, length: int) -> str | None:
    """Which frequencies a pass uses whose last position is `length - 1`.

    KV made under one regime is not served under another. None means that the frequencies depend on more than that
    (dynamic NTK scaling beyond the trained length), and nothing can be reused.
    """
    group = varying_rope(config)
    if group is None:
        return ""
    if group["rope_type"] == "longrope":
        original = group.get("original_max_position_embeddings") or config.max_position_embeddings
        return "long" if length > original else "short"
    return "" if length < config.max_position_embeddings else None
