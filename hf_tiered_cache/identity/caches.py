"""Detection of `functools.lru_cache` functions that were filled before something that they compute with changed.

A description follows such a function into what it computes with, but not into the results that it keeps: these differ
between processes without effect. After a change they have an effect that other processes do not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .code import CodeDescription, Statics
from .description import Undescribable, cached_functions
from .origin import USER, origin_of


class CacheCheck:
    """Check of the caches of user code, from one description of the model to the next."""

    def __init__(self, statics: Statics) -> None:
        self._statics = statics
        self._inputs: dict[int, tuple[Any, list[Any], CodeDescription]] = {}
        self._outdated: dict[int, tuple[Any, int]] = {}

    def update(self, caches: Iterable[Any]) -> None:
        """Compare what each cache computes with to the last call. A change outdates what the cache holds."""
        for cache in {id(cache): cache for cache in caches}.values():
            if all(origin_of(function) != USER for function in cached_functions(cache)):
                continue
            description = CodeDescription(statics=self._statics)
            inputs = _inputs_of(cache, description)
            _, inputs_before, _ = self._inputs.get(id(cache), (cache, inputs, description))
            info = cache.cache_info()
            if inputs != inputs_before and info.currsize:
                self._outdated[id(cache)] = cache, info.misses
            self._inputs[id(cache)] = cache, inputs, description  # keeps the inputs, so that their ids stay unique

    def problem(self) -> str:
        """Name a cache that holds outdated results, or return "". `cache_clear` removes them."""
        for cache, misses in list(self._outdated.values()):
            info = cache.cache_info()
            if info.currsize and info.misses >= misses:  # `cache_clear` resets both
                return f"the cache of {cache.__name__}, filled before something it uses changed (call its cache_clear),"
            del self._outdated[id(cache)]
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
