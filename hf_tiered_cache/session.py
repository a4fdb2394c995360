"""A model whose `generate()` uses a store without being told to: pipelines, servers and other people's code."""

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
    """`with tiered(model, store) as session:` every `generate()` in the block that brings no cache uses the store.

    Each such call gets a fresh `TieredCache`; `session.stats` sums over them. Calls that ask for something else
    (`past_key_values`, `cache_implementation`, `use_cache=False`, `custom_generate`, `generate_batch()`) run unchanged.
    They count as requests too, with the reason why the store is not used. A call that brings a `TieredCache` counts in
    that cache's `stats` alone.

    Args:
        model: a causal LM of transformers.
        store: a `KVStore`, or the path of one.
        method, restore, record, segments, label, tag: as for `TieredCache`.

    Raises:
        ConfigError, StoreClosedError: as `TieredCache` does.
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
            self._new_cache()  # what cannot be served is refused here, not in the first generate()
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
            cache.count_into(account)  # copies that generate() makes of the cache count there, too
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
        """The model that is served."""
        return self._attachment.model

    @property
    def stats(self) -> RequestStats:
        """The sum over all requests so far. Printed, it is a table."""
        return self._account.stats

    def close(self) -> None:
        """From now on `generate()` is what it was before. What was computed is stored."""
        if self in self._attachment.sessions:
            self._attachment.sessions.remove(self)
            self._leave()

    def _leave(self) -> None:
        attachment = self._attachment
        if attachment.active and attachment.by_session and not attachment.sessions:  # the last session goes
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
"""What a `with` block reads best: `with tiered(model, store) as session:`."""


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
    """Let `model` serve caches of ours; with a store, also in every `generate()` that brings no cache.

    Args:
        model: a causal LM of transformers.
        store: a `KVStore`, or the path of one; None attaches the model alone, as the first `TieredCache` does.
        method, label, tag: as for `TieredCache`.

    Returns:
        With a store the session that lasts until its `close()` or `detach(model)`, else the attachment.

    Raises:
        ConfigError: a method, label or tag without a store.
        UnsupportedModelError: the model or the method cannot be served.
    """
    if store is not None:
        return TieredSession(model, store, method=method, label=label, tag=tag)
    if method is not None or label or tag:
        raise ConfigError("attach(model, method=..., label=..., tag=...) also needs store=: a KVStore, or a path")
    return patches.attach(base_model(model))
