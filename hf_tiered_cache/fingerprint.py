"""Who made this KV: a name for everything about a model that its keys and values depend on.

Two models share stored KV only if their fingerprints are equal: configuration with RoPE parameters, dtype,
quantization, weights, active adapters and autocast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from .errors import UnsupportedModelError
from .store.digest import xxh3

WHOLE_BYTES = 16 << 10
"""Tensors up to this are hashed whole; of larger ones `WINDOWS` windows of `WINDOW_BYTES`, evenly spread."""
WINDOWS = 8
WINDOW_BYTES = 512

_IRRELEVANT = frozenset(
    {
        *("architectures", "transformers_version", "torch_dtype", "dtype", "attn_implementation"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing"),
        *("problem_type", "id2label", "label2id", "num_labels", "task_specific_params", "finetuning_task"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "tokenizer_class", "is_decoder"),
        *("chunk_size_feed_forward", "tie_word_embeddings", "initializer_range", "keys_to_ignore_at_inference"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
    }
)
"""What a configuration says that changes no key and no value."""


class Fingerprinter:
    """Names one model, and notices when that name has to be made anew.

    Before each request the samples of all weights are read again, which takes a millisecond or two: weights can be
    written to in ways that leave no other trace (merging an adapter, say).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._placed: tuple | None = None
        self._samples: Samples | None = None
        self._seen: tuple | None = None
        self._name = ""
        self.facts: dict[str, str] = {}
        """What the fingerprint of the last call is made of (see `facts`)."""

    def __call__(self) -> str:
        """The fingerprint of the model as it is now: 32 hexadecimal digits."""
        adapters = _adapter_state(self.model)
        placed = (adapters, tuple(_place(t) for t in (*self.model.parameters(), *self.model.buffers())))
        if self._samples is None or placed != self._placed:
            self._samples, self._placed = Samples(self.model), placed
        seen = (adapters, _autocast(), xxh3(self._samples.read()))
        if seen != self._seen:
            self.facts, self._seen = facts(self.model, self._samples), seen
            self._name = _name(self.facts)
        return self._name


def fingerprint(model: PreTrainedModel) -> str:
    """The name of everything that the KV of `model` depends on: 32 hexadecimal digits.

    Raises:
        UnsupportedModelError: some weights cannot be read.
    """
    return _name(facts(model, Samples(model)))


def _name(facts: Mapping[str, str]) -> str:
    said = {fact: value for fact, value in facts.items() if fact != "name"}
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def facts(model: PreTrainedModel, samples: Samples) -> dict[str, str]:
    """What the KV of `model` depends on, part by part: in words where these are short, else as digests.

    "name" is what the model is called; it says nothing of the KV, and is the one fact that the fingerprint leaves out.
    """
    config = canonical_config(model.config.get_text_config(decoder=True))
    rope = {key: config.pop(key) for key in list(config) if key.startswith("rope_")}
    return {
        "name": str(getattr(model.config, "_name_or_path", "") or ""),
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": _digest(config),
        "RoPE": _digest(rope),
        "quantization": _digest(_plain(getattr(model.config, "quantization_config", None))),
        "adapter": _digest([list(map(str, state)) for state in _adapter_state(model)]),
        "autocast": " ".join(_autocast()),
        "weights": _digest([samples.names, hashlib.blake2b(samples.read(), digest_size=16).hexdigest()]),
    }


_WITH_WEIGHTS = frozenset({"class", "dtype", "config", "RoPE", "quantization", "adapter"})
"""Facts with which the weights differ, too."""


def differing_facts(mine: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """The facts in which two models differ, by name; weights only where nothing else says why."""
    found = [fact for fact in mine if fact != "name" and others.get(fact, "") != mine[fact]]
    return [fact for fact in found if fact != "weights" or not _WITH_WEIGHTS.intersection(found)]


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


# --- weights


class Samples:
    """Views of the bytes that stand for a model's weights: small tensors whole, of large ones evenly spread windows.

    Tensors of inactive adapters are left out and names freed of what wrappers add to them, so that switching an
    adapter off leads back to the base model's KV. The head, which reads KV and makes none, is left out too: where it
    is tied to the embeddings, whether it has a tensor of its own depends on how the model was loaded. Accelerate's
    offloaded weights are read where they lie.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.names: list[str] = []
        self._views: dict[torch.device, list[torch.Tensor]] = {}
        idle = (*_idle_adapter_prefixes(model), *_head_prefixes(model))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if f"{name}.".startswith(idle) or _varies_while_running(model, name):
                continue
            lent = tensor.device.type == "meta"
            if lent:
                tensor = _offloaded(model, name)
            name = name.replace(".base_layer.", ".").replace("_orig_mod.", "")
            self.names.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
            for plain in _plain_tensors(tensor):
                self._views.setdefault(plain.device, []).extend(_windows(plain, lent))

    def read(self) -> bytes:
        """The sampled bytes, as they are now."""
        return b"".join(torch.cat(views).cpu().numpy().tobytes() for views in self._views.values())


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapping one (quantized weights) is made of, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach()]
    inner, _ = tensor.__tensor_flatten__()
    return [plain for name in inner for plain in _plain_tensors(getattr(tensor, name))]


def _windows(tensor: torch.Tensor, lent: bool) -> list[torch.Tensor]:
    """Views into `tensor`, or small copies if it was made for us and must not be kept alive."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    lent = lent or flat.data_ptr() != tensor.data_ptr()
    if flat.numel() <= WHOLE_BYTES:
        windows = [flat]
    else:
        starts = np.linspace(0, flat.numel() - WINDOW_BYTES, WINDOWS).astype(np.int64).tolist()
        windows = [flat[start : start + WINDOW_BYTES] for start in starts]
    return [window.clone() for window in windows] if lent else windows


def _place(tensor: torch.Tensor) -> tuple:
    """Changes when a tensor is replaced or moved."""
    return id(tensor), 0 if tensor.device.type == "meta" or is_traceable_wrapper_subclass(tensor) else tensor.data_ptr()


def _head_prefixes(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [f"{name}." for name, module in model.named_modules() if module is head and name]


def _varies_while_running(model: nn.Module, name: str) -> bool:
    """Frequencies that follow the length of the prompt; the chain's RoPE regime keeps these apart."""
    return name.endswith("inv_freq") and varying_rope(model.config.get_text_config(decoder=True)) is not None


def _offloaded(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(owner), "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        weights = getattr(candidate, "weights_map", None)
        if weights is not None:
            return weights[leaf]
    raise UnsupportedModelError(
        f"the weights of {name} are on the meta device, so the model cannot be told from others; load them first"
    )


# --- adapters and precision


def _tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            yield name, module


def _adapter_state(model: nn.Module) -> tuple[tuple, ...]:
    """For each layer with an adapter switched on: its name, the active and the merged adapters, and their scales."""
    states = []
    for name, layer in _tuner_layers(model):
        merged = tuple(getattr(layer, "merged_adapters", ()))
        active = () if getattr(layer, "disable_adapters", False) else tuple(layer.active_adapters)
        if active or merged:
            scaling = getattr(layer, "scaling", {})
            states.append((name, active, merged, tuple(scaling.get(adapter) for adapter in active)))
    return tuple(states)


def _idle_adapter_prefixes(model: nn.Module) -> Iterator[str]:
    for name, layer in _tuner_layers(model):
        active = () if getattr(layer, "disable_adapters", False) else tuple(layer.active_adapters)
        for container in layer.adapter_layer_names:
            for adapter in getattr(layer, container, {}):
                if adapter not in active:
                    yield f"{name}.{container}.{adapter}."


def rows_have_adapters(model: nn.Module) -> bool:
    """Whether the pass under way gives each row an adapter of its own (PEFT's `adapter_names`, activated LoRA)."""
    hooks = (hook for _, layer in _tuner_layers(model) for hook in layer._forward_pre_hooks.values())
    return any({"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys() for hook in hooks)


def _autocast() -> tuple[str, ...]:
    """The precisions that passes are cast to, as set by the caller's `torch.autocast`."""
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    return tuple(f"{kind} {torch.get_autocast_dtype(kind)}" for kind in kinds)


# --- RoPE


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
