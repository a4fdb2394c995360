"""Attachment to a model: forward passes with one of our caches run through that cache. `detach` undoes it."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..reasons import bypassed
from . import attention, rope, rotary
from .layers import PREFILL_CONTINUES_CACHE, base_model, cache_argument, devices_of, restoring_depth, warn_if_inexact
from .replacement import Replacement, copy_as_it_is, copy_without, without_hook
from .scope import CACHE_ARGUMENTS, EAGER_STANCE, ServedCache, Session, arguments_by_name, current, follows_cache

logger = logging.getLogger("hf_tiered_cache")

_ATTRIBUTE = "_hf_tiered_cache"
_generating: ContextVar[Attachment | None] = ContextVar("hf_tiered_cache_generating", default=None)
"""Attached model with `generate()` running in this thread."""


class Attachment:
    """State that `attach` adds to one model, a decoder-only one of transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.extras: dict[str, Any] = {}
        """Objects that users of the attachment keep with it. `detach` closes those with `close()`, and drops all."""
        self.signature = inspect.signature(model.forward)
        self.cache_argument = cache_argument(self.signature)
        self.compiled = False
        """True if a part of the model is compiled, as of the last pass."""
        self.causal = False
        """True if the model was found to be a causal LM."""
        self.sessions: list[Session] = []
        """Sessions that supply the cache of a `generate()` that brings none; the last one is active."""
        self.by_session = False
        """True if the attachment ends with the sessions that use it."""
        self.depth = self.config.num_hidden_layers
        """Number of layers when the model was attached."""
        self.batched_passes = 0
        """Number of passes that engines of continuous batching have begun."""
        self._batching = threading.RLock()
        self.excluding_engine_passes: AbstractContextManager[Any] = nullcontext()
        """Context that no pass of an engine overlaps; before the first such pass, it does nothing."""
        self._devices: list[torch.device] = []
        self._rotary_tables: dict[bool, rope.TableCache] = {}  # with key biases, or without
        self._fingerprint = ""  # of the model's latest state, which the tables are of
        self._tables = rotary.watch_tables(model)
        for module, handle in self._tables:
            copy_without(module, without_hook(handle))
        copy_without(model, _detached)
        self._patches = [*rotary.patches_of(model), *attention.patches_of(model)]
        for patch in self._patches:
            patch.apply()
        self.active = True
        warn_if_inexact(model)

    @contextmanager
    def batched_pass(self) -> Iterator[None]:
        """Enclose a pass of an engine of continuous batching, during which the model's configuration differs.

        Transformers sets `config.is_causal` for such a pass, so a pass of another thread would attend to later tokens.
        """
        with self._batching:
            self.batched_passes += 1
            self.excluding_engine_passes = self._batching
            yield

    def tables_of(self, fingerprint: str, lossless: bool) -> rope.TableCache:
        """Return the rotary tables that all sequences under a fingerprint share, and discard those of another one.

        Unless their KV is stored `lossless`, the tables hold the key biases: a codec then encodes what differs between
        keys, and not what is the same in all.
        """
        if fingerprint != self._fingerprint:
            self._rotary_tables, self._fingerprint = {}, fingerprint
        if (tables := self._rotary_tables.get(lossless)) is None:
            biases = None if lossless else rotary.key_biases_of(self.model)
            tables = self._rotary_tables.setdefault(lossless, rope.TableCache(biases))
        return tables

    def refresh(self) -> None:
        """Examine the model again immediately: its methods, and every byte of its weights."""
        self.rewrap()
        for extra in self.extras.values():
            if hasattr(extra, "refresh"):
                extra.refresh()

    def rewrap(self) -> None:
        """Wrap the model's methods, also those replaced or compiled since."""
        model = self.model
        self._devices = []
        for name, wrapper in _WRAPPERS.items():
            method = getattr(model, name, None)
            if method is not None and not isinstance(method, wrapper):
                setattr(model, name, wrapper(self, name, method))

    def at_outermost_call(self) -> bool:
        """Return whether a session is active, and no `generate()` of this model runs in this thread.

        A model that drafts for itself calls `generate()` within `generate()`.
        """
        return self.active and bool(self.sessions) and _generating.get() is not self

    def watching_compiled(self) -> AbstractContextManager[None]:
        """Return a context in which compiled code reports its rotations. Each report splits what is compiled."""
        return rotary.watching_compiled(self._tables, self._patches)

    def running_eagerly(self) -> AbstractContextManager[Any]:
        """Return a context in which a compiled model runs uncompiled, since our passes differ at every call."""
        return EAGER_STANCE if self.compiled else nullcontext()

    def forward(self, ids: torch.Tensor, cache: object, **options: Any) -> Any:
        """Run the model on token ids, int `[rows, tokens]`, that follow those of a cache, and return the output.

        The cache is passed under the name that the argument has in this version of transformers.
        """
        return self.model(input_ids=ids, use_cache=True, **{self.cache_argument: cache}, **options)

    def undo(self) -> None:
        """Restore the model exactly as it was."""
        self.active = False
        _detached(self.model.__dict__)
        copy_as_it_is(self.model)
        for module, handle in self._tables:
            copy_as_it_is(module)
            handle.remove()
        for patch in self._patches:
            patch.undo()
        for extra in self.extras.values():
            if hasattr(extra, "close"):
                extra.close()

    @property
    def devices(self) -> list[torch.device]:
        """Device on which each layer computes, even if its weights are offloaded (accelerate)."""
        if not (devices := self._devices):  # another thread may reset it
            devices = self._devices = devices_of(self.model, self.config.num_hidden_layers)
        return devices

    @property
    def device(self) -> torch.device:
        """Device of the first layer, which prompts go to. `model.device` is `meta` for an offloaded model."""
        return self.devices[0]


_ATTACH_LOCK = threading.RLock()  # lock for threads that create the first caches of a model at the same time


class _Wrapper(Replacement):
    """Wrapper of a bound method of the model. One of the model's class is what the class has at the call."""

    def __init__(self, attachment: Attachment, name: str, method: Callable[..., Any]) -> None:
        self.attachment = attachment
        self._name = name
        self.replaced_attribute = attachment.model.__dict__.get(name)
        """Instance attribute that the wrapper replaces, or None if the method belongs to the class."""
        self._member = getattr(type(attachment.model), name, None)
        super().__init__(method)

    @property
    def original(self) -> Callable[..., Any]:
        kind = type(self.attachment.model)
        if self.replaced_attribute is None and (member := getattr(kind, self._name)) is not self._member:
            self._member, self.original = member, member.__get__(self.attachment.model, kind)
        return self._original

    @original.setter
    def original(self, method: Callable[..., Any]) -> None:
        self._original = method
        self.__signature__ = inspect.signature(method)  # `generate()` reads it several times per call
        self.cache_argument = cache_argument(self.__signature__)

    @property
    def __code__(self) -> CodeType:
        """Code of the replaced method, which `torch.export` asks for."""
        code: CodeType = self.original.__code__
        return code

    def serves(self, values: Iterable[Any]) -> bool:
        """Return whether the arguments include one of our caches, and no outer call serves it already."""
        for value in values:  # in a way that the compilers of all versions of PyTorch follow
            if isinstance(value, ServedCache) and self.attachment.active:
                scope = None if torch.compiler.is_compiling() else current()
                return scope is None or scope.cache is not value
        return False

    def take_cache(self, kwargs: dict[str, Any]) -> Any:
        """Return the cache among the arguments, or None. One of ours, and None, get the argument name of the method.

        Code for either name of the argument therefore runs with every version of transformers, without a warning.
        """
        name = next((name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), "")
        cache = kwargs.get(name)
        if name != self.cache_argument and isinstance(cache, ServedCache):
            kwargs[self.cache_argument] = kwargs.pop(name)
        elif cache is None:
            for argument in CACHE_ARGUMENTS:
                if argument != self.cache_argument:
                    kwargs.pop(argument, None)
        return cache


class _Forward(_Wrapper):
    """Wrapper of the model's forward: passes with one of our caches are delegated to that cache."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.serves((*args, *kwargs.values())):
            return self.original(*args, **kwargs)
        if args:
            kwargs = arguments_by_name(self.attachment.signature, args, kwargs)
        return self.take_cache(kwargs).run(self.attachment, self.original, kwargs)


class _CompiledCall(_Wrapper):
    """Wrapper of the call that `model.compile()` made: passes with one of our caches bypass it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs_uncompiled = self.serves((*args, *kwargs.values()))
        return (self.attachment.model._call_impl if runs_uncompiled else self.original)(*args, **kwargs)  # type: ignore[no-untyped-call]


class _Generate(_Wrapper):
    """Wrapper of `generate()`, where the whole prompt is known.

    A cache drops what does not match the prompt. A call without a cache may get one from a session.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and "generation_config" in self.__signature__.parameters:  # `_setting` reads it by name
            args, kwargs = (), arguments_by_name(self.__signature__, args, kwargs)
        with self._session_call(kwargs) as session_cache, restoring_depth(self.attachment.config):
            if session_cache is not None:
                for name in CACHE_ARGUMENTS:
                    kwargs.pop(name, None)
                kwargs[self.cache_argument] = session_cache
            cache = self.take_cache(kwargs)
            ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
            if isinstance(cache, ServedCache) and isinstance(ids, torch.Tensor) and kwargs.get("inputs_embeds") is None:
                copies = max(self._setting(kwargs, name) or 1 for name in ("num_beams", "num_return_sequences"))
                mask = self._mask(kwargs, ids)
                cache.is_followed = follows_cache(ids, mask)
                cache.continue_with(ids, copies, mask)
                if cache.get_seq_length() and not PREFILL_CONTINUES_CACHE:
                    kwargs["prefill_chunk_size"] = None
            token, is_complete = _generating.set(self.attachment), False
            try:
                output = self.original(*args, **kwargs)
                is_complete = True
            finally:
                _generating.reset(token)
                if isinstance(cache, ServedCache) and _generating.get() is not self.attachment:
                    cache.end_generation(is_complete)
            return output

    def _session_call(self, kwargs: dict[str, Any]) -> AbstractContextManager[ServedCache | None]:
        """Return the active session's context, unless this call is nested or brings one of our caches."""
        cache = self.take_cache(kwargs)
        if not self.attachment.at_outermost_call() or isinstance(cache, ServedCache):
            return nullcontext()
        settings = {
            "past_key_values": cache,
            "custom_generate": kwargs.get("custom_generate"),
            "cache_implementation": self._setting(kwargs, "cache_implementation"),
            "use_cache": False if self._setting(kwargs, "use_cache") is False else None,
        }
        setting = next((name for name, value in settings.items() if value is not None), "")
        return self.attachment.sessions[-1].call(setting, settings.get(setting))

    def _mask(self, kwargs: dict[str, Any], ids: torch.Tensor) -> torch.Tensor | None:
        """Return the attention mask of a prompt. Without one, `generate()` masks the padding token, wherever it is."""
        mask = kwargs.get("attention_mask")
        pad, end = (self._setting(kwargs, name) for name in ("pad_token_id", "eos_token_id"))
        if isinstance(end, torch.Tensor):
            end = end.tolist()
        if mask is None and pad is not None and pad not in (end if isinstance(end, Iterable) else [end]):
            return ids.ne(pad).long()
        return mask

    def _setting(self, kwargs: dict[str, Any], name: str) -> Any:
        """Return a generation setting from the arguments, else from the configurations."""
        configs = (kwargs.get("generation_config"), self.attachment.model.generation_config)
        settings = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in settings if value is not None), None)


class _PrepareCache(_Wrapper):
    """Wrapper of the method with which `generate()` makes its cache.

    A call through another reference to `generate` bypasses `_Generate`, and is counted here.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attachment.at_outermost_call():
            with self.attachment.sessions[-1].call("generate"):
                pass
        return self.original(*args, **kwargs)


class _GenerateBatch(_Wrapper):
    """Wrapper of continuous batching, which keeps its KV in pages. In a session, the store fills these pages."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.serves(kwargs.values()):
            kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, ServedCache)}
            logger.warning(
                "generate_batch() keeps its KV in its own pages, so the TieredCache is ignored; use `with "
                "tiered(model, store):` to restore and store the KV of its requests"
            )
        return self.original(*args, **kwargs)


class _InitBatching(_Wrapper):
    """Wrapper of the method that makes the manager of continuous batching."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        create = functools.partial(self.original, *args, **kwargs)
        if not (self.attachment.active and self.attachment.sessions):
            return create()
        return self.attachment.sessions[-1].batching(create)


class _PrepareInputs(_Wrapper):
    """Wrapper of the method that prepares the arguments of each pass of `generate()`."""

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = self.take_cache(kwargs)
        if not isinstance(cache, ServedCache):
            return self.original(input_ids, *args, **kwargs)
        if kwargs.get("use_cache") is False:  # every pass would append the whole prompt to the cache again
            raise ConfigError(bypassed("use_cache"))
        num_cached = cache.get_seq_length()
        is_first = kwargs.get("is_first_iteration") and kwargs.get("next_sequence_length", 0) is None
        if num_cached and is_first and not cache.is_followed:
            # assisted decoding passes the whole prompt again, although the cache holds its beginning
            kwargs["next_sequence_length"] = input_ids.shape[1] - num_cached
        inputs = self.original(input_ids, *args, **kwargs)
        if not num_cached and inputs.get(self.cache_argument) is None:
            # Phi-3 drops caches that are shorter than a long prompt, empty ones too
            inputs[self.cache_argument] = cache
        return inputs


_WRAPPERS: dict[str, type[_Wrapper]] = {
    "forward": _Forward,
    "generate": _Generate,
    "generate_batch": _GenerateBatch,
    "init_continuous_batching": _InitBatching,
    "_prepare_cache_for_generation": _PrepareCache,
    "prepare_inputs_for_generation": _PrepareInputs,
    "_compiled_call_impl": _CompiledCall,
}


def _detached(state: dict[str, Any]) -> None:
    """Remove from a model's state what `attach` added."""
    state.pop(_ATTRIBUTE, None)
    for name, wrapper in _WRAPPERS.items():
        if isinstance(method := state.get(name), wrapper):
            if method.replaced_attribute is None:
                del state[name]
            else:
                state[name] = method.replaced_attribute


def attach(model: nn.Module) -> Attachment:
    """Attach to `model`, so that it serves our caches. An attached model is only wrapped again. `detach` undoes it."""
    model = base_model(model)
    with _ATTACH_LOCK:
        attachment = attachment_of(model)
        if attachment is None:
            attachment = Attachment(model)
            model.__dict__[_ATTRIBUTE] = attachment
        attachment.rewrap()
    return attachment


def detach(model: nn.Module) -> None:
    """Restore `model` exactly as it was before `attach`; do nothing if it is not attached."""
    if (attachment := attachment_of(model)) is not None:
        attachment.undo()


def attachment_of(model: nn.Module) -> Attachment | None:
    """Return the attachment of `model`, or None."""
    return base_model(model).__dict__.get(_ATTRIBUTE)
