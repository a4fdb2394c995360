"""The fingerprint: two models share stored KV only if theirs are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from . import structure
from .adapters import adapter_state, rows_have_adapters, tuner_layers
from .watch import Watch, precision
from .weights import WeightDigests

_IRRELEVANT = frozenset(
    {
        *("architectures", "transformers_version", "torch_dtype", "dtype", "attn_implementation"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing"),
        *("problem_type", "id2label", "label2id", "num_labels", "task_specific_params", "finetuning_task"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "tokenizer_class"),
        *("chunk_size_feed_forward", "tie_word_embeddings", "initializer_range", "keys_to_ignore_at_inference"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
    }
)
"""What a configuration says that changes no key and no value."""
_FOLLOWING = frozenset({"weights", "modules"})
_LEADING = frozenset({"class", "dtype", "config", "RoPE", "quantization", "adapter"})
"""Facts with which the following ones differ, too."""


@dataclass(frozen=True)
class Identity:
    """What a model is at one moment.

    Args:
        fingerprint: 32 hexadecimal digits.
        facts: what it is made of, part by part: in words where these are short, else as digests. "name" is what the
            model is called; it says nothing of the KV, and is the one fact that the fingerprint leaves out.
        nameless: something that changes what is computed and has no name, so that nothing may be stored, or "".
        looks_ahead: whether tokens attend to those behind them.
        training: whether a part is in training mode, and computes something else then.
    """

    fingerprint: str
    facts: Mapping[str, str] = field(default_factory=dict)
    nameless: str = ""
    looks_ahead: bool = False
    training: bool = False


class Fingerprinter:
    """Names one model, and notices when that name has to be made anew.

    All weights are read once. From then on each pass sees what has been written to, replaced, hooked, switched or
    configured otherwise, and each request reads a part of the weights again (see `WeightDigests`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._identities: dict[str, Identity] = {}
        self._renew()

    def look(self, tag: str = "", closely: bool = True) -> Identity:
        """What the model is now.

        Args:
            tag: the user's name for what has none; part of the fingerprint.
            closely: whether a part of the weights is read again: at the beginning of a request.

        Raises:
            UnsupportedModelError: some weights cannot be read.
        """
        if self._watch.sees_another_structure() or self._weights.moved():
            self._renew()
        else:
            if self._watch.sees_other_settings():
                self._renew(self._weights)
            if self._weights.changed(reread=closely):
                self._identities.clear()
        if tag not in self._identities:
            self._identities[tag] = _identify(self._model, self._weights, tag)
        return self._identities[tag]

    def __call__(self) -> str:
        """The fingerprint of the model as it is now."""
        return self.look().fingerprint

    def refresh(self) -> None:
        """Read all weights again, now."""
        if self._weights.refresh():
            self._identities.clear()

    def rows_have_adapters(self) -> bool:
        """Whether the pass under way gives each row an adapter of its own."""
        return rows_have_adapters(self._watch.tuned)

    def _renew(self, weights: WeightDigests | None = None) -> None:
        self._weights = weights or WeightDigests(self._model)
        self._watch = Watch(self._model)
        self._identities.clear()


def fingerprint(model: PreTrainedModel) -> str:
    """The name of everything that the KV of `model` depends on: 32 hexadecimal digits.

    Raises:
        UnsupportedModelError: some weights cannot be read.
    """
    return _identify(model, WeightDigests(model), "").fingerprint


def _identify(model: PreTrainedModel, weights: WeightDigests, tag: str) -> Identity:
    config = canonical_config(model.config.get_text_config(decoder=True))
    rope = {key: config.pop(key) for key in list(config) if key.startswith("rope_")}
    adapters = adapter_state(layer for _, layer in tuner_layers(model))
    nameless, lines = structure.nameless(model), []
    try:
        lines = structure.describe(model, guess=bool(tag))
    except structure.Nameless as error:
        nameless = nameless or f"the attribute {error}"
    facts = {
        "name": str(getattr(model.config, "_name_or_path", "") or ""),
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": structure.devices(model),
        "torch": torch.__version__,
        "config": _digest(config),
        "RoPE": _digest(rope),
        "attention": structure.attention(model),
        "modules": _digest(lines),
        "quantization": _digest(_plain(getattr(model.config, "quantization_config", None))),
        "adapter": _digest([list(map(str, state)) for state in adapters]),
        "precision": " ".join(precision()),
        "weights": _digest([weights.names, hashlib.blake2b(weights.digest, digest_size=16).hexdigest()]),
        "tag": tag,
    }
    said = {fact: value for fact, value in facts.items() if fact != "name"}
    return Identity(
        _digest(said),
        facts,
        "" if tag else nameless,
        structure.looks_ahead(model),
        any(map(structure.trains, model.modules())),
    )


def differing_facts(mine: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """The facts in which two models differ, by name; those that follow from others only where nothing else says why."""
    found = [fact for fact in mine if fact != "name" and others.get(fact, "") != mine[fact]]
    return [fact for fact in found if fact not in _FOLLOWING or not _LEADING.intersection(found)]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def canonical_config(config: PreTrainedConfig) -> dict[str, Any]:
    """What of a configuration bears on keys and values, JSON-ready."""
    said = config.to_dict().items()
    return {key: _plain(value) for key, value in said if key not in _IRRELEVANT and not key.startswith("_")}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
