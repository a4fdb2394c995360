"""Descriptions of code, and models that compute with code of the user's."""

from __future__ import annotations

from typing import Any

from families import build
from transformers import PreTrainedModel

from hf_tiered_cache.identity.code import CodeDescription


def describe(value: Any) -> CodeDescription:
    """Return the completed description of a function or object."""
    description = CodeDescription()
    description.add("it", value)
    description.finish()
    description.watch.complete()
    return description


def with_activation(function: Any) -> PreTrainedModel:
    """Build a model of two layers with an activation function of the user's."""
    model = build("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        del layer.mlp._modules["act_fn"]
        layer.mlp.act_fn = function
    return model
