"""TieredCache: what users make. What it does stands in `StoredCache`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from .conversation import Conversation, Suspended, put_away
from .errors import ConfigError, StoreClosedError
from .kvstore import KVStore, open_store, storage_of
from .methods import Method, make_method
from .patches.attach import Attachment
from .serving import CacheOptions
from .store.conversations import conversation_name
from .stored_cache import StoredCache, prepare

logger = logging.getLogger("hf_tiered_cache")


class TieredCache(StoredCache):
    """A cache whose KV outlives it: `model.generate(**inputs, past_key_values=TieredCache(model, store))`.

    The longest stored prefix of the prompt is restored from device memory, host memory or disk, only the rest is
    computed, and what is new is stored, generated tokens too. The output is `DynamicCache`'s. A cache serves one
    request, or one conversation that goes on; it is cheap to make.

    Args:
        model: any decoder-only causal LM of transformers; it is attached (see `attach`) if it is not yet.
        store: a `KVStore`, or the path of one. A path's store is opened once for each model, and closed by `detach`.
        conversation: an id, of 1 to 200 letters, under which the conversation comes back: `suspend()` stores it, and
            the next cache with this id, in any process, goes on with it, given the whole history as always. One cache
            at a time: a newer one of this process takes over, and the older one finishes its answer and then raises,
            until the newer one is suspended or gone.
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
        ConversationInUseError: another process goes on with the conversation.
        StoreClosedError: the store was closed, or opened before this process was forked.
    """

    def __init__(
        self,
        model: nn.Module,
        store: KVStore | str | os.PathLike[str],
        *,
        conversation: str | None = None,
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
        if conversation is not None:
            chosen = chosen.for_conversation(conversation_name(conversation))
        attachment, layers = prepare(model, chosen)
        self._store = open_store(store, chosen, attachment.extras)
        begins = None if segments is None else tuple(segments)
        options = CacheOptions(restore, record, begins, strict, progress, label, tag)
        storage = storage_of(self._store)
        super().__init__(attachment, layers, storage, chosen, options)
        if conversation is not None:
            self._serving.conversation = Conversation(storage, conversation)

    @property
    def store(self) -> KVStore:
        """Where KV is looked for, and stored."""
        return self._store

    @property
    def conversation(self) -> str | None:
        """The id of the conversation that it goes on with."""
        return None if self._serving.conversation is None else self._serving.conversation.id

    def suspend(self) -> Suspended:
        """Store what is computed and not stored yet, note the conversation, and let its KV and its lock go.

        The cache is empty then; used again, it restores. Tokens are stored in multiples of 16, and the next turn
        computes the few behind. Without a conversation, too, all is stored and let go. It waits until all is durable.

        Returns:
            How much is stored; and where the disk is full or cannot be written, what could not be kept, and why.

        Raises:
            StoreClosedError: the store was closed.
        """
        serving = self._serving
        with ExitStack() as stack:
            if serving.conversation is not None:
                stack.callback(serving.conversation.release)  # last
            stack.callback(self._start_over, serving.collector)
            return put_away(serving, self.get_seq_length())

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.suspend()
        except StoreClosedError as closed:
            if error is None:
                raise
            logger.warning("the conversation was not suspended: %s", closed)  # what was raised first comes through

    @torch.compiler.disable
    def run(self, attachment: Attachment, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """See `StoredCache`."""
        conversation, serving = self._serving.conversation, self._serving
        if conversation is None:
            return super().run(attachment, forward, kwargs)
        begins, empty, ids = serving.untold, not self.get_seq_length(), kwargs.get("input_ids")
        if begins or empty:  # an answer under way is finished, whoever has taken over
            conversation.claim()
        if empty and isinstance(ids, torch.Tensor):
            _check_one(ids)
        output = super().run(attachment, forward, kwargs)
        conversation.turns += begins and not serving.untold
        return output

    def continue_with(self, input_ids: torch.Tensor, copies: int = 1) -> None:
        """See `StoredCache`."""
        if self._serving.conversation is not None:
            self._serving.conversation.claim()
            _check_one(input_ids)
        super().continue_with(input_ids, copies)

    def _fresh(self) -> TieredCache:
        return TieredCache(self.model, self._store, method=self.method, **asdict(self._serving.options))

    def __repr__(self) -> str:
        model = type(self.model).__name__
        named = "" if self.conversation is None else f", conversation={self.conversation!r}"
        method, tokens = type(self.method).__name__, self.get_seq_length()
        return f"TieredCache({model}, {self.store!r}, {method}, {tokens} tokens{named})"


def _check_one(ids: torch.Tensor) -> None:
    """Raises ConfigError: the rows of a batch, int `[rows, n]`, are several conversations, and not beams of one."""
    if ids.ndim == 2 and len(ids) > 1 and not bool((ids == ids[:1]).all()):
        raise ConfigError(
            f"a cache with a conversation goes on with one prompt, not a batch of {len(ids)}; make a TieredCache with "
            "an id of its own for each, and call generate() for each"
        )
