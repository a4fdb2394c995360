"""Checks that a model, a method and the way of running them fit each other, with advice if they do not."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import CacheMismatchError, ConfigError, TieredCacheError, UnsupportedModelError
from ..identity.origin import referenced_names
from ..methods import BudgetMethod, ForConversation, Method, Passages, PrefixMethod
from ..patches.attach import Attachment
from ..patches.attention import WRAPPED, can_scatter, can_select, passes_mask_on, shows_queries
from ..patches.layers import can_drop, code_of
from ..patches.scope import CACHE_ARGUMENTS

_HIDES_KEYS = (
    "attends to other keys than it passes to its cache, weighs them by more than its queries and its mask, or bypasses "
    "the registered attention function"
)
_CHOICES = " or ".join(map(repr, WRAPPED))
_OWN_POSITIONS = frozenset({"create_position_ids_from_input_ids", "rope_deltas"})
"""Members of modules that number tokens by themselves, if a method uses them."""


def check_causal(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a prefix's KV depends on later tokens, or on the input of an encoder."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model, and its decoder's KV depends on the encoder's input; do not pass a "
            "TieredCache to generate()"
        )
    causal_flags = [
        module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)
    ]
    takes_cache = {*CACHE_ARGUMENTS, "cache_params"} & inspect.signature(model.forward).parameters.keys()
    if not takes_cache and not causal_flags:  # GPT-1, RWKV
        raise UnsupportedModelError(
            f"{name} takes no KV cache, so there is no KV to restore; do not pass a TieredCache to generate()"
        )
    code = code_of(type(model.base_model).forward)
    # a model may be a decoder only if its configuration says so
    settings = {"is_decoder", "causal"}.intersection(code.co_names if code else ())
    is_set_to_encode = any(getattr(model.config, setting, True) is False for setting in settings)
    if not (any(causal_flags) if causal_flags else takes_cache and not is_set_to_encode):
        raise UnsupportedModelError(
            f"{name} is an encoder: its tokens attend to later tokens, so the KV of a prefix cannot be reused; pass a "
            "causal LM"
        )
    if any(_refers_to_layers(module) for module in model.modules() if isinstance(module, PreTrainedModel)):
        raise UnsupportedModelError(
            f"{name} reads or adds layers of its cache itself, so they cannot be restored; use DynamicCache"
        )


def _refers_to_layers(module: PreTrainedModel) -> bool:
    """Return whether the code of `forward` refers to `layers` of its cache argument."""
    code = code_of(type(module).forward)
    for before, step in pairwise(dis.get_instructions(code) if code else ()):
        if step.argval == "layers" and step.opname == "LOAD_ATTR":
            loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
            if loaded in CACHE_ARGUMENTS:
                return True
    return False


def counts_positions(model: PreTrainedModel) -> bool:
    """Return whether tokens without `position_ids` have the positions that `generate()` passes: 0, 1, and so on.

    RoBERTa and its relatives count from behind the number of the padding token, and vision models from where the last
    image moved the count (`rope_deltas`). Of code from elsewhere that is not known, unless it uses RoPE, whose
    positions are relative.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return True
    modules = list(model.modules())
    for module in modules:
        table = getattr(module, "position_embeddings", None)
        if getattr(table, "padding_idx", None) is not None or _numbers_tokens(module):
            return False
    owners = (type(model).forward.__module__, type(model.base_model).forward.__module__)
    is_known = all(owner.partition(".")[0] == "transformers" for owner in owners)
    return is_known or any(type(module).__name__.endswith("RotaryEmbedding") for module in modules)


def _numbers_tokens(module: nn.Module) -> bool:
    """Return whether a module has one of `_OWN_POSITIONS` for more than to initialize it, as Exaone 4.5 does."""
    if not any(hasattr(module, name) for name in _OWN_POSITIONS):
        return False
    methods = [method for name, method in inspect.getmembers(type(module), inspect.isfunction) if name != "__init__"]
    return any(code and _OWN_POSITIONS & referenced_names(code) for code in map(code_of, methods))


def check_depth(attachment: Attachment) -> None:
    """Raise ConfigError if the model's number of layers has changed since it was attached and its KV was identified."""
    depth = attachment.config.num_hidden_layers
    if depth != attachment.depth:
        raise ConfigError(
            f"{type(attachment.model).__name__} had {attachment.depth} layers when it was attached, but its "
            f"configuration now has {depth}; call detach(model) first"
        )


def check_suits(method: Method, model: PreTrainedModel, cache_layers: Sequence[Any]) -> None:
    """Refuse a method that needs more of the model's attention than it exposes, given the layers of a cache for it.

    Raises:
        ConfigError: Another attention implementation is sufficient.
        UnsupportedModelError: No attention implementation is sufficient.
    """
    config = model.config.get_text_config(decoder=True)
    if isinstance(method, BudgetMethod) and method.selects:
        if not shows_queries(model, cache_layers):
            raise cannot_select(method, model)
        if not can_select(model):
            raise needs_attention(method, model)
    elif isinstance(method, Passages):
        if not can_scatter(config):
            raise needs_attention(method, model)
        if not can_drop(model, config.num_hidden_layers):
            method.with_equal_positions()  # raises if it cannot


def cannot_observe(model: PreTrainedModel) -> str:
    """Return the reason why the queries of this model cannot be observed, or an empty string."""
    if not shows_queries(model):
        return f"{type(model).__name__} {_HIDES_KEYS}"
    return "" if can_select(model) else f"queries cannot be observed with {_attention_of(model)}"


def can_recompute_prefix(attachment: Attachment) -> bool:
    """Return whether layers can compute a prefix besides their suffix, and later layers a shorter one.

    This requires masks that can give the position of each query, and layers that take only the hidden state and the
    position of each token. Attention that makes a mask of its own would take queries for the last ones.
    """
    model, config = attachment.model, attachment.config
    try:
        one_position = model.config is config  # per token; tokens of images have several
        # the mask of a recomputed prefix is causal, maybe with a sliding window (see `Scope.recompute_mask`)
        has_other_mask = "chunked_attention" in (getattr(config, "layer_types", None) or ())
        can_mask = can_scatter(config) and not has_other_mask and passes_mask_on(model)
        return one_position and can_mask and can_drop(model, attachment.depth)
    except UnsupportedModelError:
        return False


def cannot_select(method: Method, model: PreTrainedModel) -> UnsupportedModelError:
    """Return the error for a method that selects among keys that the model does not expose."""
    return UnsupportedModelError(
        f"{type(model).__name__} {_HIDES_KEYS}, so {type(method).__name__} cannot select among them; use the exact "
        "method with this model"
    )


def cannot_mask(method: Method, model: PreTrainedModel) -> CacheMismatchError:
    """Return the error for a pass in which no mask of the model fits all rows of the cache."""
    return CacheMismatchError(
        "the rows of this cache hold different numbers of positions, selected by its "
        f"{type(method).__name__}, and only forward passes of the attached {type(model).__name__} with the attention "
        f"implementation {_CHOICES} can build a mask for each of them; call the model itself instead of a module "
        "within it, with that implementation, or create a new TieredCache after detach(model)"
    )


def needs_attention(method: Method, model: PreTrainedModel) -> TieredCacheError:
    """Return an error that advises another attention implementation, if the model has one, or another method."""
    choice, is_used = "sdpa" if model._supports_sdpa else "eager", model.config._attn_implementation
    if choice == is_used:
        return UnsupportedModelError(
            f"{type(model).__name__} has attention of its own, which {type(method).__name__} does not know; use the "
            "exact method with this model"
        )
    return ConfigError(
        f"{type(method).__name__} does not support {_attention_of(model)}; call "
        f"model.set_attn_implementation({choice!r}) first"
    )


def _attention_of(model: PreTrainedModel) -> str:
    return f"the attention implementation {model.config._attn_implementation!r} of {type(model).__name__}"


def check_batched(method: Method) -> None:
    """Raise ConfigError if a method does not restore whole exact prefixes, which pages need."""
    if not isinstance(method, PrefixMethod) or isinstance(method, ForConversation):
        raise ConfigError(
            f"continuous batching restores exact prefixes only, and {type(method).__name__} restores something else; "
            "use the exact method, or call generate()"
        )
