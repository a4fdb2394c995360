"""Sessions: `generate()` uses a store without changes to its callers (pipelines, servers, third-party code)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

from torch import nn
from transformers import PreTrainedModel

from . import patches, reasons
from .cache import TieredCache
from .errors import ConfigError
from .kvstore import KVStore, open_store, storage_of
from .methods import Method, make_method
from .patches.attach import Attachment, attachment_of, base_model
from .stats import RequestStats, StatsCollector

logger = logging.getLogger("hf_tiered_cache")


class TieredSession:
    """Session in which every `generate()` without a cache uses the store: `with tiered(model, store) as session:`.

    Each such call gets a new `TieredCache`; `session.stats` sums over them. Calls that request something else
    (`past_key_values`, `cache_implementation`, `use_cache=False`, `custom_generate`, `generate_batch()`) run unchanged.
    They count as requests too, with the reason why the store is not used. A call with its own `TieredCache` counts only
    in the `stats` of that cache.

    Args:
        model: A causal LM of transformers.
        store: A `KVStore`, or the path of one.
        method, restore, record, segments, label, tag: As for `TieredCache`.

    Raises:
        ConfigError, StoreClosedError: As for `TieredCache`.
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
        label: str = "",
        tag: str = "",
    ) -> None:
        self.method = make_method(method)
        self._account = StatsCollector()
        was_attached = attachment_of(model) is not None
        self._attachment = patches.attach(model)
        if not was_attached:
            self._attachment.by_session = True
        try:
            self.store = open_store(store, self.method, self._attachment.extras)
            self._new_cache = partial(
                TieredCache,
                self._attachment.model,
                self.store,
                method=self.method,
                restore=restore,
                record=record,
                segments=segments,
                label=label,
                tag=tag,
            )
            self._new_cache()  # raises here, not in the first generate()
        except BaseException:
            self._leave()
            raise
        self._attachment.sessions.append(self)

    @contextmanager
    def call(self, setting: str = "", value: Any = None) -> Iterator[TieredCache | None]:
        """Enclose one `generate()` of the model. See `patches.attach.Session`."""
        account, cache = StatsCollector(), None
        account.total = self._account
        if not setting:
            cache = self._new_cache()
            cache.count_into(account)  # also counts copies that generate() makes of the cache
        yield cache
        if not account.stats.requests:
            reason = reasons.bypassed(setting, value)
            account.add(requests=1)
            account.explain(reason)
            logger.info("the store is not used; %s", reason)
            if not reasons.is_expected(reason):
                storage_of(self.store).disk.warn(reason, reason)

    @property
    def model(self) -> PreTrainedModel:
        """Model that the session serves."""
        return self._attachment.model

    @property
    def stats(self) -> RequestStats:
        """Sum over all requests so far. Prints as a table."""
        return self._account.stats

    def close(self) -> None:
        """End the session: `generate()` works as before, and computed KV is still stored."""
        if self in self._attachment.sessions:
            self._attachment.sessions.remove(self)
            self._leave()

    def _leave(self) -> None:
        attachment = self._attachment
        if attachment.active and attachment.by_session and not attachment.sessions:  # the last session ends
            patches.detach(attachment.model)

    def __enter__(self) -> TieredSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TieredSession({type(self.model).__name__}, {self.store!r}, {type(self.method).__name__})"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()


tiered = TieredSession
"""Alias of `TieredSession` for `with` blocks: `with tiered(model, store) as session:`."""


@overload
def attach(model: nn.Module) -> Attachment: ...
@overload
def attach(
    model: nn.Module,
    *,
    store: KVStore | str | os.PathLike[str],
    method: Method | str | None = None,
    label: str = "",
    tag: str = "",
) -> TieredSession: ...
def attach(
    model: nn.Module,
    *,
    store: KVStore | str | os.PathLike[str] | None = None,
    method: Method | str | None = None,
    label: str = "",
    tag: str = "",
) -> Attachment | TieredSession:
    """Prepare a model for `TieredCache`; with a store, also use it in every `generate()` without a cache.

    Args:
        model: A causal LM of transformers.
        store: A `KVStore`, or the path of one; None only attaches the model, as the first `TieredCache` does.
        method: As for `TieredCache`; needs a store.
        label: As for `TieredCache`; needs a store.
        tag: As for `TieredCache`; needs a store.

    Returns:
        With a store, the session, which lasts until its `close()` or `detach(model)`; else the attachment.

    Raises:
        ConfigError: `method`, `label` or `tag` is given without a store.
        UnsupportedModelError: The model or the method is not supported.
    """
    if store is not None:
        return TieredSession(model, store, method=method, label=label, tag=tag)
    if method is not None or label or tag:
        raise ConfigError("attach(model, method=..., label=..., tag=...) also needs store=: a KVStore, or a path")
    return patches.attach(base_model(model))
