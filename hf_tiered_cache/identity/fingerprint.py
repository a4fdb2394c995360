"""Model fingerprints. Two models share stored KV only if their fingerprints are equal."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..patches.attach import Attachment
from ..patches.layers import convert_weights, is_compiled
from ..store.threads import RepairGuard, fork_lock
from .code import CodeDescription
from .description import PLAIN, Undescribable, cached_functions
from .model import ModelDescription, unpaged
from .origin import IRRELEVANT, USER, origin_of
from .settings import (
    active_adapters,
    active_mode,
    adapter_state,
    changed_kernel,
    computing_state,
    frequencies_in_use,
    rows_have_adapters,
    varying_rope,
)
from .watch import Places
from .weights import WeightDigests

_FOLLOWING = frozenset({"weights", "modules"})
_MOST_CHANGES = 12
"""Number of consecutive looks with a change after which the model is treated as changing at every pass."""
_LEADING = frozenset({"class", "dtype", "config", "RoPE", "quantization", "adapter"})
"""Facts that imply a difference of the facts in `_FOLLOWING` if they differ."""
_IMAGES_LOOK_AHEAD = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Types of models that let tokens of images, but not of text, attend to later tokens if a setting is "vision"."""
_DOGE_LOSES_MASK = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18)
"""True if Doge attends to all tokens of a pass without padding, as it does in early versions of transformers."""


@dataclass(frozen=True)
class Identity:
    """Identity of a model at one point in time.

    Args:
        fingerprint: 32 hexadecimal digits.
        facts: Parts of the fingerprint by name, as text if short, otherwise as digests. "name" is the name of the
            model, the only fact that is not part of the fingerprint.
        problem: Something that affects the computation and cannot be described, or "". With a problem no KV may be
            stored.
        looks_ahead: Whether what a token computes depends on later tokens.
        training: Whether a module is in training mode and computes different results for that reason.
        compiles: Whether a part of the model is compiled by `torch.compile`, so that results depend on the compiler.
        rope_varies: Whether the frequencies of RoPE depend on the length of the prompt (see `rope_regime`).
        weights_held: Function that takes a time of `time.monotonic` and returns whether the weights still match the
            fingerprint, based on a complete read that began after that time. Thread-safe.
    """

    fingerprint: str
    facts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    looks_ahead: bool = False
    training: bool = False
    compiles: bool = False
    rope_varies: bool = False
    weights_held: Callable[[float], bool] = field(default=lambda moment: True, compare=False, repr=False)


class CacheCheck:
    """Check for `functools.lru_cache` functions that were filled before something that they compute with changed.

    A description follows such a function into what it computes with, but not into the results that it keeps: these
    differ between processes without effect. After a change they have an effect that other processes do not have.
    """

    def __init__(self, statics: Places) -> None:
        self._statics = statics
        self._inputs: dict[Any, tuple[list[Any], CodeDescription]] = {}
        self._outdated: dict[Any, int] = {}

    def update(self, caches: Iterable[Any]) -> None:
        """Compare what each cache computes with to the last call. A change outdates what the cache holds."""
        for cache in dict.fromkeys(caches):
            if all(origin_of(function) != USER for function in cached_functions(cache)):
                continue
            description = CodeDescription(statics=self._statics)
            inputs = _inputs_of(cache, description)
            inputs_before, _ = self._inputs.get(cache, (inputs, description))
            info = cache.cache_info()
            if inputs != inputs_before and info.currsize:
                self._outdated[cache] = info.misses
            self._inputs[cache] = inputs, description  # keeps the inputs, so that their ids stay unique

    def problem(self) -> str:
        """Name a cache that holds outdated results, or return "". `cache_clear` removes them."""
        for cache, misses in list(self._outdated.items()):
            info = cache.cache_info()
            if info.currsize and info.misses >= misses:  # `cache_clear` resets both
                return f"the cache of {cache.__name__}, filled before something it uses changed (call its cache_clear),"
            del self._outdated[cache]
        return ""


def _inputs_of(cache: Any, description: CodeDescription) -> list[Any]:
    """Return what the function behind a cache computes with: words, and the ids and versions of tensors."""
    try:
        description.add("", cache)
        description.finish()
    except Undescribable as problem:  # the model has this problem, too
        return [str(problem)]
    tensors = (tensor for _, tensor in description.tensors.values())
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    return [description.words, list(description.tensors), versions]


class Fingerprinter:
    """Fingerprint of one model, with detection of changes.

    The model is described and all weights are read once. After that, each pass compares the objects in the description
    with the current ones, and each request reads a part of the weights again (see `Watch` and `WeightDigests`). Any
    thread may call the methods: while one reads changed weights, the others wait for the new fingerprint.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = fork_lock()
        self._guard = RepairGuard(self._read_again)
        self._identities: dict[tuple[str, str, tuple[str, ...]], Identity] = {}
        self._statics: Places = {}
        self._caches = CacheCheck(self._statics)
        convert_weights(model)
        self._forget_changes()
        self._read_again()

    def look(self, tag: str = "", begins_request: bool = True) -> Identity:
        """Return the current identity of the model.

        Args:
            tag: The user's name for parts that cannot be described; part of the fingerprint.
            begins_request: Whether to read a part of the weights again, as at the beginning of a request.

        Raises:
            UnsupportedModelError: Some weights cannot be read.
        """
        with self._lock, self._guard:
            if tag or not self._changing:
                self._watch(begins_request)
            if self._weights.has_moved():
                self._read_again()
            elif self._weights.changed(reread=begins_request):
                self._identities = {}
            if not self._identities:
                self._caches.update(self._description.caches)
            if begins_request:
                torch.clear_autocast_cache()  # it may hold casts of earlier weights
            problem = self._caches.problem() or active_mode() or changed_kernel(begins_request)
            key = tag, problem, computing_state(self._devices)
            if key not in self._identities:
                self._identities[key] = self._identify(*key)
            return self._identities[key]

    def __call__(self) -> str:
        """Return the current fingerprint of the model."""
        return self.look().fingerprint

    def refresh(self) -> None:
        """Describe the model and read all weights again."""
        with self._lock, self._guard:
            self._forget_changes()
            self._describe()
            if self._weights.has_moved():
                self._read_again()
            elif self._weights.refresh():
                self._identities = {}

    def rows_have_adapters(self) -> bool:
        """Return whether the current pass selects adapters by row."""
        tuned = self._description.tuned
        return bool(tuned) and rows_have_adapters(tuned)

    def _forget_changes(self) -> None:
        self._changes: list[tuple[bool, Places]] = []  # of consecutive looks, with `begins_request`
        self._changing = ""  # name of something that changes at every pass
        self._unsteady: Places = {}  # values that change at every pass, which are left out of the description

    def _watch(self, begins_request: bool) -> None:
        """Describe the model again if a watched object, the adapter state or the RoPE frequencies in use changed."""
        watch, frequencies = self._description.watch, frequencies_in_use(self._description.rotary)
        same_adapters = adapter_state(self._description.tuned) == self._adapters
        if watch.holds() and same_adapters and all(map(is_, frequencies, self._frequencies)):
            self._changes = []
            return
        changed, words, weights = _kept(watch.changed()), self._description.words, self._weights
        self._describe()
        replaced = self._weights is not weights
        if self._description.words != words or (replaced and not begins_request):  # nobody edits a model between tokens
            self._changes.append((begins_request, changed))
        elif not replaced:
            self._changes = []
        if len(self._changes) == _MOST_CHANGES:  # such as a counter: a description at each token would take too long
            self._changing = next((str(key) for _, key in changed), "something")
            if not all(begins_request for begins_request, _ in self._changes):
                self._unsteady |= _unsteady_places([places for _, places in self._changes[1:]])
            self._changes = []

    def _read_again(self) -> None:
        """Describe the model and read all weights again: memory was replaced, or a look was interrupted."""
        self._weights = WeightDigests(())
        self._describe()

    def _describe(self) -> None:
        """Describe the model again. Read its weights again only if its tensors were replaced."""
        self._description = description = ModelDescription(self._model, self._statics, self._unsteady)
        self._adapters = adapter_state(description.tuned)
        self._frequencies = frequencies_in_use(description.rotary)
        self._devices = tuple(dict.fromkeys((*devices(self._model).split(), "cpu")))
        if not self._weights.are_of(description.named_tensors):
            self._weights = WeightDigests(description.named_tensors)
        self._identities = {}

    def _identify(self, tag: str, mode: str, state: tuple[str, ...]) -> Identity:
        description, model = self._description, self._model
        text = model.config.get_text_config(decoder=True)
        config = _settings(text.to_dict())
        rope = {key: config.pop(key) for key in list(config) if key.startswith("rope_")}
        facts = {
            "name": str(getattr(model.config, "_name_or_path", "") or ""),
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": devices(model),
            "torch": torch.__version__,
            "config": _digest(config),
            "RoPE": _digest(rope),
            "attention": str(unpaged(model, text._attn_implementation)),
            "modules": _digest(description.words),
            "quantization": _digest(_settings({"": getattr(model.config, "quantization_config", None)})),
            "adapter": _digest([list(map(str, state)) for state in self._adapters]),
            "precision": " ".join(state),
            "weights": _digest(
                [self._weights.names, hashlib.blake2b(self._weights.digest, digest_size=16).hexdigest()]
            ),
            "tag": tag,
        }
        described = {fact: value for fact, value in facts.items() if fact != "name"}
        changing = f"the attribute {self._changing}, which changes at every pass," if self._changing else ""
        problem = "" if tag else mode or changing or description.problem
        return Identity(
            _digest(described),
            facts,
            problem,
            looks_ahead(model),
            description.trains,
            description.compiles or is_compiled(model),
            bool(varying_rope(text)),
            partial(self._weights.held_since, self._weights.digest),
        )


def fingerprinter_of(attachment: Attachment) -> Fingerprinter:
    """Return the fingerprinter of an attached model. The first call reads all weights."""
    if "fingerprinter" not in attachment.extras:
        attachment.extras["fingerprinter"] = Fingerprinter(attachment.model)
    fingerprinter: Fingerprinter = attachment.extras["fingerprinter"]
    return fingerprinter


def fingerprint_of(attachment: Attachment, tag: str = "") -> str:
    """Return the current fingerprint of an attached model with a user's tag, between the passes of an engine."""
    with attachment.excluding_engine_passes:
        return fingerprinter_of(attachment).look(tag).fingerprint


def fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of everything that the KV of `model` depends on: 32 hexadecimal digits.

    Raises:
        UnsupportedModelError: Some weights cannot be read.
    """
    return Fingerprinter(model)()


def differing_facts(facts: Mapping[str, str], other_facts: Mapping[str, str]) -> list[str]:
    """Return the names of the facts in which two models differ.

    Facts that depend on other facts are omitted if one of the latter differs.
    """
    differing = [fact for fact in facts if fact != "name" and other_facts.get(fact, "") != facts[fact]]
    return [fact for fact in differing if fact not in _FOLLOWING or not _LEADING.intersection(differing)]


def _kept(places: Places) -> Places:
    """Return places with plain values, weak references to tensors other than parameters, and None for other values."""
    items: Places = {}
    for place, (container, value) in places.items():
        tensor = weakref.ref(value) if type(value) is torch.Tensor else None
        items[place] = container, value if type(value) in PLAIN else tensor
    return items


def _unsteady_places(changes: list[Places]) -> Places:
    """Return the places that had another number, text or tensor at each of these changes, which `_kept` returned."""
    unsteady: Places = {}
    for place, (container, _) in changes[0].items():
        values = [change[place][1] for change in changes if place in change]
        if len(values) == len(changes) == len(set(map(repr, values))):
            unsteady[place] = container, None
    return unsteady


def looks_ahead(model: PreTrainedModel) -> bool:
    """Return whether what a token computes depends on later tokens."""
    config = model.config.get_text_config(decoder=True)
    setting = getattr(config, "use_bidirectional_attention", None)
    if setting == "vision" and config.model_type in _IMAGES_LOOK_AHEAD:
        setting = None
    if setting or getattr(config, "is_causal", True) is False:
        return True
    if config.model_type == "doge" and (config.is_moe or _DOGE_LOSES_MASK):  # its router mixes the tokens of a pass
        return True
    if any("lily_router" in module._modules and active_adapters(module) for module in model.modules()):
        return True  # PEFT's Lily adapters route by the mean over the tokens of a pass
    decoder = (model.get_decoder() if hasattr(model, "get_decoder") else None) or model
    # a module that is not causal beside one that is attends to an encoder (see `forward`'s arguments in `cache`)
    siblings = [[decoder], *(list(module.children()) for module in decoder.modules())]
    flags = [{getattr(module, "is_causal", None) for module in modules} for modules in siblings]
    return any(False in causal and True not in causal for causal in flags)


def devices(model: PreTrainedModel) -> str:
    """Return the device types that the model computes on, sorted, even if accelerate offloads its weights."""
    types = {tensor.device.type for tensor in model.parameters()}
    for module in model.modules():
        device = getattr(module.__dict__.get("_hf_hook"), "execution_device", None)
        if device is not None:
            types.add("cuda" if isinstance(device, int) else torch.device(device).type)
    return " ".join(sorted(types - {"meta"})) or "cpu"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration that may affect keys and values, ready for JSON."""
    return {key: _plain(value) for key, value in config.items() if key not in IRRELEVANT and not key.startswith("_")}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        is_config = "model_type" in value  # a configuration within the other one
        return _settings(value) if is_config else {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
