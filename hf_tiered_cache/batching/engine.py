"""Verbs of transformers' continuous batching: all contact with its internals is in this file.

| verb | purpose |
| --- | --- |
| `manager._create_batch_processor` | attach to the processor that the manager's thread runs |
| `manager._wake_up_loop`, before 5.18 `_has_new_requests` | schedule again when a restore is complete |
| `processor.prepare_next_batch` | moment between two steps |
| `processor._generation_step` | one forward pass; enclosed to capture keys before rotation |
| `inputs_and_outputs.prepare_batch_tensors` | which tokens of which requests are packed into a pass |
| `scheduler.add_waiting_request` | arrival of a request |
| `scheduler._get_waiting_candidates` | requests that may be scheduled; those that wait for a restore are left out |
| `cache.search_prefix_match` | prefix that the pages hold; extended by what the store holds |
| `cache.update` | new KV of a layer; also writes restored KV into pages |
| `cache.extend_read_and_write_indices` | rows of a request's tokens in the pages |
| `model._cached_continuous_batching_manager` | manager that outlives a call of `generate_batch` |
| allocation and hashes of pages | see `_AllocatorPages` (since 5.18) and `_ManagerPages` (before) |

Verbs are replaced on the objects of one manager only, and restored by `Engine.detach`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from .. import reasons

logger = logging.getLogger("hf_tiered_cache")

PagedKV = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, `[1, heads, tokens, dim]` each, as the model passes them to the pages: keys are rotated."""


class Packed(NamedTuple):
    """Tokens of one request in a packed pass.

    Args:
        state: State of the request (transformers' `RequestState`).
        first: Position of the first token.
        num_tokens: Number of tokens. Requests follow each other in the pass without gaps.
    """

    state: Any
    first: int
    num_tokens: int


def id_of(state: Any) -> str:
    """Return the id of a request."""
    return str(state.request_id)


def parent_id_of(state: Any) -> str:
    """Return the id of the request that a further sequence of it was forked from, or an empty string."""
    return id_of(state).rpartition("__child#")[0]


def persistent_manager_of(model: Any) -> Any:
    """Return the manager that `generate_batch(persistent_manager=True)` has left, or None."""
    return getattr(model, "_cached_continuous_batching_manager", None)


def tokens_of(state: Any) -> list[int]:
    """Return all tokens of a request that are known so far."""
    return [*state.initial_tokens, *state.generated_tokens]


class Listener(Protocol):
    """Receiver of an engine's events, which are all raised in the thread of the engine."""

    def between_steps(self) -> None:
        """Handle what has changed since the last step."""

    def refused(self, reason: str) -> None:
        """Note why the engine runs without the store. Only `arrived` is called then."""

    def arrived(self, state: Any) -> None:
        """Note a request that begins to wait."""

    def may_be_scheduled(self, state: Any) -> bool:
        """Return whether a waiting request may be scheduled now."""

    def matched(self, state: Any, tokens: int) -> int:
        """Extend the prefix of a request that its pages hold, and return the new number of tokens."""

    def step(self, run: Callable[[], None], rows: Sequence[Packed], in_python: bool) -> None:
        """Run one forward pass over these tokens; `in_python` is False for compiled and graph-captured passes."""

    def computed(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the keys (rotated) and values of a layer in the running pass, `[1, heads, tokens, dim]` each."""


class Engine:
    """Continuous batching of one manager.

    Args:
        manager: transformers' `ContinuousBatchingManager`.
        listener: Receives the events of every processor that the manager creates.
    """

    def __init__(self, manager: Any, listener: Listener) -> None:
        self.manager, self._listener = manager, listener
        self._replaced: list[tuple[Any, str, Any]] = []
        self._processor: Any = None
        self._failed = False
        self._rows: list[Packed] = []
        self._write_pages: Callable[..., Any] = lambda *args: None  # the cache's own `update`
        self.is_fresh = getattr(manager, "batch_processor", None) is None
        """True if the pages hold nothing that was computed before this object was created."""
        self.pages: Pages | None = None
        """Pages of the processor; None before it is created."""
        self._replace(manager, "_create_batch_processor", self._create_processor)

    def detach(self) -> None:
        """Restore all replaced verbs."""
        while self._replaced:
            owner, name, previous = self._replaced.pop()
            if previous is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = previous

    def wake(self) -> None:
        """Let the engine schedule again if it waits for requests."""
        event = getattr(self.manager, "_wake_up_loop", None) or self.manager._has_new_requests
        event.set()

    def holds(self, request_id: str) -> bool:
        """Return whether a request is active or waits."""
        scheduler = self._processor.scheduler
        return request_id in scheduler.active_requests or request_id in scheduler.waiting_requests

    @property
    def has_active_requests(self) -> bool:
        """True if any request is active."""
        return bool(self._processor.scheduler.active_requests)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued in the order of the engine's passes."""
        stream = None if self._processor is None else self._processor.inputs_and_outputs.compute_stream
        return nullcontext() if stream is None else torch.get_device_module(stream.device.type).stream(stream)

    def write(self, request_id: str, first: int, kv: PagedKV) -> None:
        """Write KV of the positions from `first` on into the pages of a request, before the next pass."""
        assert self.pages is not None
        cache, count = self._processor.cache, next(iter(kv.values()))[0].shape[2]
        index: list[list[int]] = [[]]
        cache.extend_read_and_write_indices(request_id, first, count, None, index)
        with self.on_stream(), torch.no_grad():
            write = torch.tensor(index[0], dtype=torch.int64, device=cache.device)
            nothing = torch.empty(0, dtype=torch.int64, device=cache.device)
            for layer, (keys, values) in kv.items():
                if keys.device.type != "cpu":
                    for tensor in (keys, values):
                        tensor.record_stream(torch.get_device_module(keys.device.type).current_stream())
                self._write_pages(keys, values, layer, *self.pages.row_arguments(nothing, write))

    # --- verbs

    def _create_processor(self, original: Callable[[], Any]) -> Any:
        processor = original()
        if processor is self._processor:
            return processor
        self._processor, cache = processor, processor.cache
        if missing := missing_verbs(self.manager, processor):
            self._listener.refused(reasons.moved_verbs(missing))
            return processor
        if not cache.use_prefix_sharing:
            self._listener.refused(reasons.PAGES_NOT_SHARED)
            self._replace(processor.scheduler, "add_waiting_request", self._arrive)
            return processor
        has_allocators = hasattr(cache, "cache_allocators")
        self.pages = _AllocatorPages(cache) if has_allocators else _ManagerPages(cache)
        self._write_pages = cache.update
        self._replace(processor, "prepare_next_batch", self._prepare)
        self._replace(processor, "_generation_step", self._step)
        self._replace(processor.inputs_and_outputs, "prepare_batch_tensors", self._pack)
        self._replace(processor.scheduler, "add_waiting_request", self._arrive)
        self._replace(processor.scheduler, "_get_waiting_candidates", self._candidates)
        self._replace(cache, "search_prefix_match", self._match)
        self._replace(cache, "update", torch.compiler.disable(self._update))
        return processor

    def _tell(self, default: Any, event: Callable[..., Any], *args: Any) -> Any:
        """Raise an event, and return its result. If it fails, the engine goes on without the store."""
        if self._failed:
            return default
        try:
            return event(*args)
        except Exception:
            self._failed = True
            logger.exception("continuous batching goes on without the store, which has failed")
            return default

    def _prepare(self, original: Callable[[], bool]) -> bool:
        self._tell(None, self._listener.between_steps)
        return original()

    def _pack(self, original: Callable[..., None], requests_in_batch: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        self._rows = [Packed(item.state, item.state.position_offset, item.query_length) for item in requests_in_batch]
        original(requests_in_batch, *args, **kwargs)

    def _step(self, original: Callable[..., None], model: Any) -> None:
        runner, rows = self._processor.model_runner, self._rows
        if self._processor.inputs_and_outputs.use_block_table:
            in_python = not runner.use_cuda_graph_decode and runner._compiled_decode is None
        else:
            in_python = not runner.use_cuda_graph_varlen and runner._compiled_varlen is None
        self._rows, steps = [], [partial(original, model)]
        errors: list[BaseException] = []

        def run() -> None:
            try:
                steps.pop()()
            except BaseException as error:  # of the model, which the engine handles
                errors.append(error)

        self._tell(None, self._listener.step, run, rows, in_python)
        if steps:
            run()
        if errors:
            raise errors[0]

    def _arrive(self, original: Callable[[Any], None], state: Any) -> None:
        original(state)
        self._tell(None, self._listener.arrived, state)

    def _candidates(self, original: Callable[[], list[Any]]) -> list[Any]:
        return [state for state in original() if self._tell(True, self._listener.may_be_scheduled, state)]

    def _match(self, original: Callable[..., int], request_id: str, prompt_ids: list[int]) -> int:
        tokens = original(request_id, prompt_ids)
        state = self._processor.scheduler.waiting_requests.get(request_id)
        return tokens if state is None else int(self._tell(tokens, self._listener.matched, state, tokens))

    def _update(
        self,
        original: Callable[..., Any],
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._tell(None, self._listener.computed, layer_idx, key_states, value_states)
        return original(key_states, value_states, layer_idx, *args, **kwargs)

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, owner.__dict__.get(name)))
        owner.__dict__[name] = partial(replacement, original)


class Pages(ABC):
    """Pages of an engine whose requests share prefixes: allocation, and the engine's own hashes.

    Args:
        cache: transformers' `PagedAttentionCache`.
    """

    block_tokens: int
    """Number of tokens per page."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def blocks(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    @abstractmethod
    def num_free(self) -> int:
        """Return the number of pages that no request uses."""

    @abstractmethod
    def held(self, tokens: list[int]) -> int:
        """Return how many leading tokens of a prompt are in shared pages."""

    @abstractmethod
    def allocate(self, state: Any, held: int, stop: int) -> bool:
        """Allocate pages for the tokens of a waiting request up to `stop`, of which its pages hold the first `held`.

        Returns:
            False, without a change, if there are too few.
        """

    def free(self, request_id: str) -> None:
        """Return the pages of a request that has not begun."""
        self.cache.free_blocks(request_id)

    @abstractmethod
    def share(self, state: Any, count: int) -> None:
        """Give the next `count` complete pages of a request the engine's hashes, so that others can share them."""

    @abstractmethod
    def row_arguments(self, read: torch.Tensor, write: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of the engine's own `update` that say which rows of the pages it reads and writes."""


class _AllocatorPages(Pages):
    """Pages since transformers 5.18, from the allocator of the layers with full attention."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        ((self._name, self._allocator),) = cache.cache_allocators.items()
        self.block_tokens = self._allocator.tokens_per_page

    def num_free(self) -> int:
        pool, allocator = self.cache.pool, self._allocator
        unused = pool.count_free_blocks(allocator.index) + pool.num_free_sectors * allocator.blocks_per_sector
        return int(unused + len(allocator.ledger.cached_blocks))

    def held(self, tokens: list[int]) -> int:
        return len(self._allocator.match_prefix_blocks(tokens)) * self.block_tokens

    def allocate(self, state: Any, held: int, stop: int) -> bool:
        count, allocate = stop - state.current_len(), self.cache.can_store_request_tokens
        return bool(allocate(state, count) or (self.cache.evict_cached_blocks() and allocate(state, count)))

    def share(self, state: Any, count: int) -> None:
        self.cache.mark_complete_blocks(state, {self._name: count})

    def row_arguments(self, read: torch.Tensor, write: torch.Tensor) -> tuple[Any, ...]:
        kind = self._allocator.layer_type
        lengths = {"cu_seq_lens_k": {kind: read}, "max_length_k": {kind: 0}}
        return ({"read_index": [read], "write_index": [write], **lengths},)


class _ManagerPages(Pages):
    """Pages before transformers 5.18, from one block manager."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.block_tokens = cache.block_size

    def num_free(self) -> int:
        return int(self.cache.get_num_free_blocks())

    def held(self, tokens: list[int]) -> int:
        manager, size, parent = self.cache._block_manager, self.block_tokens, None
        for start in range(0, len(tokens) - size + 1, size):
            parent = manager.compute_hash(parent, tokens[start : start + size], 0)
            if parent not in manager._hash_to_id:
                return start
        return len(tokens) // size * size

    def allocate(self, state: Any, held: int, stop: int) -> bool:
        held_blocks = held // self.block_tokens
        allocated = self.cache.allocate_blocks(self.blocks(stop) - held_blocks, state.request_id, held_blocks)
        if allocated is not None and stop % self.block_tokens:
            state.allocated_blocks += 1  # the scheduler counts complete pages only
        return allocated is not None

    def share(self, state: Any, count: int) -> None:
        self.cache.mark_shareable_blocks_as_complete(state, count)

    def row_arguments(self, read: torch.Tensor, write: torch.Tensor) -> tuple[Any, ...]:
        return [read], [write]


_VERBS: dict[str, tuple[str, ...]] = {
    "": ("_create_batch_processor", "batch_processor", "_wake_up_loop|_has_new_requests"),
    "processor": ("prepare_next_batch", "_generation_step"),
    "processor.scheduler": (
        *("add_waiting_request", "_get_waiting_candidates", "_infer_request_tokens"),
        *("active_requests", "waiting_requests"),
    ),
    "processor.inputs_and_outputs": ("prepare_batch_tensors", "use_block_table", "compute_stream"),
    "processor.model_runner": (
        *("use_cuda_graph_varlen", "use_cuda_graph_decode", "_compiled_varlen", "_compiled_decode"),
    ),
    "processor.cache": (
        *("search_prefix_match", "update", "extend_read_and_write_indices", "use_prefix_sharing", "device"),
        *("cache_allocators|_block_manager", "can_store_request_tokens|allocate_blocks", "free_blocks"),
        *("mark_complete_blocks|mark_shareable_blocks_as_complete", "evict_cached_blocks|get_num_free_blocks"),
    ),
}
"""Verbs by the path of their object from the manager; alternatives are names in different versions."""


_STATE = ("request_id", "initial_tokens", "generated_tokens", "position_offset", "current_len", "allocated_blocks")
_SCHEDULED = ("state", "query_length")


def missing_verbs(manager: Any, processor: Any) -> list[str]:
    """Return the verbs that a manager and its processor lack, such as "scheduler.add_waiting_request"."""
    missing = []
    for path, verbs in _VERBS.items():
        part, _, rest = path.partition(".")
        owner = manager if not part else getattr(processor, rest, None) if rest else processor
        lacks = [verb for verb in verbs if not any(hasattr(owner, name) for name in verb.split("|"))]
        missing += [f"{rest or part or 'manager'}.{verb.replace('|', ' or ')}" for verb in lacks]
    state = RequestState(request_id="", initial_tokens=[])
    missing += [f"RequestState.{name}" for name in _STATE if not hasattr(state, name)]
    missing += [f"FutureRequestState.{name}" for name in _SCHEDULED if not hasattr(FutureRequestState, name)]
    return missing
