"""TieredCache: what users make. What it does stands in `StoredCache`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from torch import nn

from .kvstore import KVStore, open_store, storage_of
from .methods import Method, make_method
from .serving import CacheOptions
from .stored_cache import StoredCache, prepare


class TieredCache(StoredCache):
    """A cache whose KV outlives it: `model.generate(**inputs, past_key_values=TieredCache(model, store))`.

    The longest stored prefix of the prompt is restored from device memory, host memory or disk, only the rest is
    computed, and what is new is stored, generated tokens too. The output is `DynamicCache`'s. A cache serves one
    request, or one conversation that goes on; it is cheap to make.

    Args:
        model: any decoder-only causal LM of transformers; it is attached (see `attach`) if it is not yet.
        store: a `KVStore`, or the path of one. A path's store is opened once for each model, and closed by `detach`.
        method: how KV is restored: a `Method`, its name, or None for exact reuse.
        restore: whether stored KV is used.
        record: whether new KV is stored.
        segments: for methods that reuse passages, the tokens of the prompt at which stored ones may begin; None looks
            for them everywhere.
        strict: what happens when the cache is given a prompt that does not begin with what it holds. False crops it to
            what the two have in common, restores what the store has, and goes on; True raises CacheMismatchError.
        progress: whether prompts that are computed in pieces (`KVDrive`) show a bar.
        label: stands in the header of the segments that this cache stores, for `hf-tiered-cache ls`.
        tag: a name for what the model computes, where that has none of its own (a hook that steers it, a replaced
            forward, an attention function of the user's). KV is shared only under the same tag.

    Raises:
        ConfigError: an argument is not valid, or the model's attention does not suit the method.
        UnsupportedModelError: the model keeps state that is no KV of single tokens, or the method cannot serve it.
    """

    def __init__(
        self,
        model: nn.Module,
        store: KVStore | str | os.PathLike[str],
        *,
        method: Method | str | None = None,
        restore: bool = True,
        record: bool = True,
        segments: Sequence[int] | None = None,
        strict: bool = False,
        progress: bool = True,
        label: str = "",
        tag: str = "",
    ) -> None:
        chosen = make_method(method)
        attachment, layers = prepare(model, chosen)
        self._store = open_store(store, chosen, attachment.extras)
        begins = None if segments is None else tuple(segments)
        options = CacheOptions(restore, record, begins, strict, progress, label, tag)
        super().__init__(attachment, layers, storage_of(self._store), chosen, options)

    @property
    def store(self) -> KVStore:
        """Where KV is looked for, and stored."""
        return self._store

    def _fresh(self) -> TieredCache:
        return TieredCache(self.model, self._store, method=self.method, **asdict(self._serving.options))

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"TieredCache({model}, {self.store!r}, {type(self.method).__name__}, {self.get_seq_length()} tokens)"
