"""Whether a model's attention shows what a method needs to see; where it does not, what to do."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from .errors import CacheMismatchError, ConfigError, TieredCacheError, UnsupportedModelError
from .methods import Method
from .patches.attach import Attachment
from .patches.attention import SELECTING, WRAPPED, can_scatter, can_select, shows_queries
from .patches.layers import can_drop


def check_causal(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError: KV of a prefix would depend on what follows it, or on an encoder's input."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, whose decoder's KV depends on the encoder's input; "
            "leave past_key_values to generate()"
        )
    said = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    takes_cache = {"past_key_values", "cache_params"} & inspect.signature(model.forward).parameters.keys()
    if not (any(said) if said else takes_cache):
        raise UnsupportedModelError(
            f"{name} is an encoder: its tokens attend to those behind them, so that no prefix has KV of its own; pass "
            "a causal LM"
        )


def check_depth(attachment: Attachment) -> None:
    """Raises ConfigError: the model has more or fewer layers than when it was attached, and its KV was identified."""
    depth = attachment.config.num_hidden_layers
    if depth != attachment.depth:
        raise ConfigError(
            f"{type(attachment.model).__name__} had {attachment.depth} layers when it was attached, and its "
            f"configuration says {depth} now; call detach(model) first"
        )


def check_suits(method: Method, model: PreTrainedModel) -> None:
    """Refuse a method that needs more of a model's attention than the model shows.

    Raises:
        ConfigError: another attention implementation would do.
        UnsupportedModelError: none does.
    """
    config = model.config.get_text_config(decoder=True)
    if method.selects:
        if not shows_queries(model):
            raise cannot_select(method, model)
        if not can_select(config):
            raise needs_attention(method, model, SELECTING)
    elif method.passages and not can_scatter(config):
        raise needs_attention(method, model, WRAPPED)


def cannot_observe(model: PreTrainedModel) -> str:
    """Why nobody sees the queries of this model, or ""."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if not shows_queries(model):
        return f"{name} attends to other keys than it hands to its cache, or bypasses the registered attention function"
    if not can_select(config):
        needed = " or ".join(map(repr, SELECTING))
        return (
            f"queries are seen with attention of the kind {needed}, and the model has {config._attn_implementation!r}"
        )
    return ""


def can_have_fronts(attachment: Attachment) -> bool:
    """Whether a layer can compute tokens before and behind those that it restores, and the next one fewer of them.

    Then its masks can say where each query stands, and it takes of each token nothing but hidden state and position.
    """
    model, config = attachment.model, attachment.config
    try:
        one_position = model.config is config  # of a token; those of images have several
        return one_position and can_scatter(config) and can_drop(model, attachment.depth)
    except UnsupportedModelError:
        return False


def cannot_select(method: Method, model: PreTrainedModel) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} attends to other keys than it hands to its cache, or bypasses the registered "
        f"attention function, so that {type(method).__name__} cannot choose among them; use the exact method with it"
    )


def cannot_mask(method: Method, model: PreTrainedModel) -> CacheMismatchError:
    name, needed = type(model).__name__, SELECTING[0]
    return CacheMismatchError(
        f"the layers of this cache hold different numbers of columns, by the mass of its {type(method).__name__}, and "
        f"a mask is cut for each of them in passes of the attached {name} alone, with attention of kind {needed!r}; "
        "call the model itself and no module within it, with that attention, or after detach(model) make a new "
        "TieredCache"
    )


def needs_attention(method: Method, model: PreTrainedModel, implementations: tuple[str, ...]) -> TieredCacheError:
    """Advice that works for this model: another attention implementation, if it has one, or another method."""
    name = type(method).__name__
    needed = " or ".join(map(repr, implementations))
    if "eager" not in implementations and not model._supports_sdpa:
        return UnsupportedModelError(
            f"{name} needs attention of the kind {needed}, which {type(model).__name__} does not have; use the exact "
            "method with it"
        )
    return ConfigError(
        f"{name} needs attention of the kind {needed}, and the model has {model.config._attn_implementation!r}; call "
        f"model.set_attn_implementation({implementations[0]!r}) before"
    )
