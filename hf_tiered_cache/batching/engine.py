"""All contact with transformers' continuous batching: `_MEMBERS` lists the members that this library uses or replaces.

Members are replaced on the objects of one manager only, and restored by `Engine.detach`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from .. import reasons
from .packed import Packed

logger = logging.getLogger("hf_tiered_cache")

_GRAPH_KV = "_hf_tiered_cache_kv"  # attribute of a CUDA graph: the tensors in which a replay leaves the KV of its pass

PagedKV = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, `[1, heads, tokens, dim]` each, as the model passes them to the pages: keys are rotated.
All end at the same position; layers with a sliding window may begin later."""


def parent_id_of(state: Any) -> str:
    """Return the id of the request that a further sequence of it was forked from, or an empty string."""
    return str(state.request_id).rpartition("__child#")[0]


def persistent_manager_of(model: Any) -> Any:
    """Return the manager that `generate_batch(persistent_manager=True)` has left, or None."""
    return getattr(model, "_cached_continuous_batching_manager", None)


def last_computed(state: Any) -> int:
    """Return how many last tokens of a prompt must be computed. A request that is forked before its last needs two."""
    return 2 if state.num_children else 1


def tokens_of(state: Any) -> list[int]:
    """Return all tokens of a request that are known so far."""
    return [*state.initial_tokens, *state.generated_tokens]


class Listener(Protocol):
    """Receiver of an engine's events, which are all raised in the thread of the engine."""

    def between_steps(self) -> None:
        """Handle what has changed since the last step."""

    def refused(self, reason: str) -> None:
        """Note why the engine runs without the store. Only `arrived` is called then."""

    def failed(self) -> None:
        """Note that an event has failed. Only `arrived` is called then."""

    def arrived(self, state: Any) -> None:
        """Note a request that begins to wait."""

    def may_be_scheduled(self, state: Any) -> bool:
        """Return whether a waiting request may be scheduled now."""

    def matched(self, state: Any, tokens: int) -> int:
        """Extend the prefix of a request that its pages hold, and return the new number of tokens."""

    def step(self, run: Callable[[], None], rows: Sequence[Packed]) -> None:
        """Run one forward pass over these tokens."""

    def forward(self, run: Callable[[], None], graphed: bool, compiled: bool) -> None:
        """Run the model's code. A pass does so once, twice to make a CUDA graph (`graphed`), and not to replay one."""

    def graph_kv(self) -> Any:
        """Return what holds the KV of the latest graphed `forward`, for `replays`."""

    def replays(self, graph_kv: Any) -> None:
        """Note that the running pass replays a graph that leaves its KV there; None if it was made before."""

    def computed(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the keys (rotated) and values of a layer in the running pass, `[1, heads, tokens, dim]` each."""


class Engine:
    """Continuous batching of one manager (transformers), with a listener for the events of its processors."""

    pages: Pages
    """Pages of the processor, from its creation on."""

    def __init__(self, manager: Any, listener: Listener) -> None:
        self.manager, self._listener = manager, listener
        self._replaced = ExitStack()
        self._processor: Any = None
        self._failed = False
        self._rows: list[Packed] = []
        self.is_fresh = getattr(manager, "batch_processor", None) is None
        """True if the pages hold nothing that was computed before this object was created."""
        self._replace(manager, "_create_batch_processor", self._create_processor)

    def detach(self) -> None:
        """Restore all replaced members."""
        self._replaced.close()

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

    def write(self, request_id: str, stop: int, kv: PagedKV) -> None:
        """Write KV of the last positions before `stop` into the pages of a request, before the next pass."""
        rows: dict[int, list[torch.Tensor]] = {}  # of each group of layers, by the number of positions
        with self.on_stream(), torch.no_grad():
            for layer, (keys, values) in kv.items():
                count = keys.shape[2]
                if count not in rows:
                    rows[count] = self.pages.rows(request_id, stop - count, count)
                if keys.device.type != "cpu":
                    for tensor in (keys, values):
                        tensor.record_stream(torch.get_device_module(keys.device.type).current_stream())
                self.pages.cache.update(keys, values, layer, *self.pages.row_arguments(rows[count]))

    # --- replaced members

    def _create_processor(self, original: Callable[[], Any]) -> Any:
        processor = original()
        if processor is self._processor:
            return processor
        self._processor, cache = processor, processor.cache
        if missing_names := missing_members(self.manager, processor):
            self._listener.refused(reasons.missing_members(missing_names))
            return processor
        if hasattr(cache, "cache_allocators"):
            self.pages = Pages(cache, list(cache.cache_allocators.values()))
        else:
            self.pages = OlderPages(cache, cache.group_cache_managers)
        self._replace(processor, "prepare_next_batch", self._prepare)
        self._replace(processor, "_generation_step", self._step)
        self._replace(processor.model_runner, "_get_forward_fn", self._forward_function)
        self._replace(processor.inputs_and_outputs, "get_graph", self._get_graph)
        self._replace(processor.inputs_and_outputs, "set_graph", self._set_graph)
        self._replace(processor.inputs_and_outputs, "prepare_batch_tensors", self._pack)
        self._replace(processor.scheduler, "add_waiting_request", self._arrive)
        self._replace(processor.scheduler, "_get_waiting_candidates", self._candidates)
        self._replace(processor.scheduler, "_infer_request_tokens", self._admit)
        self._replace(cache, "search_prefix_match", self._match)
        self._replace(cache, "update", torch.compiler.disable(self._update))
        return processor

    def _tell(self, default: Any, event: Callable[..., Any], *args: Any) -> Any:
        """Raise an event, and return its result. If it fails, the engine goes on without the store."""
        if self._failed and event not in (self._listener.failed, self._listener.arrived):
            return default
        try:
            return event(*args)
        except Exception:
            logger.exception("continuous batching goes on without the store, which has failed")
            if not self._failed:
                self._failed = True
                self._tell(None, self._listener.failed)
            return default

    def _prepare(self, original: Callable[[], bool]) -> bool:
        self._tell(None, self._listener.between_steps)
        return original()

    def _pack(self, original: Callable[..., None], requests_in_batch: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        self._rows = [Packed(item.state, item.state.position_offset, item.query_length) for item in requests_in_batch]
        original(requests_in_batch, *args, **kwargs)

    def _step(self, original: Callable[..., None], model: Any) -> None:
        rows, self._rows = self._rows, []
        self._enclose(partial(original, model), self._listener.step, rows)

    def _forward_function(
        self, original: Callable[..., Any], use_block_table: bool
    ) -> tuple[Callable[..., None], bool]:
        function, makes_graphs = original(use_block_table=use_block_table)
        is_compiled = hasattr(function, "_torchdynamo_orig_callable")

        def forward(*args: Any) -> None:
            self._enclose(partial(function, *args), self._listener.forward, makes_graphs, is_compiled)

        return forward, makes_graphs

    def _get_graph(self, original: Callable[[], Any]) -> Any:
        graph = original()
        if graph is not None:
            self._tell(None, self._listener.replays, getattr(graph, _GRAPH_KV, None))
        return graph

    def _set_graph(self, original: Callable[[Any], None], graph: Any) -> None:
        setattr(graph, _GRAPH_KV, self._tell(None, self._listener.graph_kv))  # its memory lives as long as the graph
        original(graph)

    def _enclose(self, run: Callable[[], None], event: Callable[..., None], *args: Any) -> None:
        """Let the listener run a part of the engine, once, also if the listener fails. Pass the engine's errors on."""
        parts, errors = [run], []

        def run_once() -> None:
            try:
                parts.pop()()
            except BaseException as error:  # of the model, which the engine handles
                errors.append(error)

        self._tell(None, event, run_once, *args)
        if parts:
            run_once()
        if errors:
            raise errors[0]

    def _arrive(self, original: Callable[[Any], None], state: Any) -> None:
        original(state)
        self._tell(None, self._listener.arrived, state)

    def _candidates(self, original: Callable[[], list[Any]]) -> list[Any]:
        return [state for state in original() if self._tell(True, self._listener.may_be_scheduled, state)]

    def _admit(self, original: Callable[..., list[int]], *args: Any) -> list[int]:
        """Let the scheduler ask for a prefix match even if requests share no pages."""
        self.pages.cache.use_prefix_sharing = True
        try:
            return original(*args)
        finally:
            self.pages.cache.use_prefix_sharing = self.pages.are_shared

    def _match(self, original: Callable[..., int], request_id: str, prompt_ids: list[int]) -> int:
        tokens = original(request_id, prompt_ids) if self.pages.are_shared else 0
        state = self._processor.scheduler.waiting_requests.get(request_id)
        return tokens if state is None else int(self._tell(tokens, self._listener.matched, state, tokens))

    def _update(
        self, original: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        self._tell(None, self._listener.computed, layer_idx, key_states, value_states)
        return original(key_states, value_states, layer_idx, *args, **kw)

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._replaced.callback(delattr, owner, name)
        setattr(owner, name, partial(replacement, getattr(owner, name)))


class Pages:
    """Pages of an engine, which allocators take from sectors: allocation, and the engine's own hashes.

    Args:
        cache: Transformers' `PagedAttentionCache`.
        groups: The cache's allocators, one for each group of layers. With a sliding window, pages hold the window only.
    """

    def __init__(self, cache: Any, groups: Sequence[Any]) -> None:
        self.cache, self._groups = cache, groups
        self.are_shared = bool(cache.use_prefix_sharing)
        """True if a request begins with the pages that hold its prefix. Sliding windows rule that out."""

    def held(self, tokens: list[int]) -> int:
        """Return how many leading tokens are in pages of some group that the engine may give to further requests."""
        return max(len(group.match_prefix_blocks(tokens)) * int(group.tokens_per_page) for group in self._groups)

    def has_room(self, tokens: int, num_held: int) -> bool:
        """Return whether unused pages suffice for `tokens` tokens, of which shared pages hold the first `num_held`."""
        pool, sectors = self.cache.pool, 0
        for group in self._groups:
            unused = pool.count_free_blocks(group.index) + len(group.ledger.cached_blocks)
            missing_pages = group.needs_new_blocks("", 0, tokens) - num_held // group.tokens_per_page - unused
            sectors += max(0, -(-missing_pages // group.blocks_per_sector))
        return bool(sectors <= pool.num_free_sectors)

    def allocate(self, state: Any, num_held: int, stop: int) -> bool:
        """Allocate pages for a waiting request's tokens from `num_held` to `stop`; return whether they sufficed."""
        count, allocate = stop - state.current_len(), self.cache.can_store_request_tokens
        return bool(allocate(state, count) or (self.cache.evict_cached_blocks() and allocate(state, count)))

    def complete(self, state: Any, count: int) -> None:
        """Hash the pages that the next `count` tokens of a waiting request complete, where the engine would."""
        if self.are_shared:
            self.cache.mark_complete_blocks(state, self.cache.count_new_complete_blocks(state, count))

    def row_arguments(self, rows: list[torch.Tensor]) -> tuple[Any, ...]:
        """Return the arguments with which the engine's own `update` writes these rows of the pages, and reads none.

        They serve one layer, since `update` changes them.
        """
        lengths = {group.layer_type: rows[0][:0] for group in self._groups}
        index = {"read_index": [row[:0] for row in rows], "write_index": rows}
        return ({**index, "cu_seq_lens_k": lengths, "max_length_k": dict.fromkeys(lengths, 0)},)

    def rows(self, request_id: str, first: int, count: int) -> list[torch.Tensor]:
        """Return the rows of some of a request's tokens in the pages of each group of layers, int64 `[count]` each."""
        index: list[list[int]] = [[] for _ in self._groups]
        self.cache.extend_read_and_write_indices(request_id, first, count, None, index)
        return [torch.tensor(rows, dtype=torch.int64, device=self.cache.device) for rows in index]


class OlderPages(Pages):
    """Pages before transformers 5.18, which all groups take from one block manager."""

    def held(self, tokens: list[int]) -> int:
        return max(self._hashed(group._index, tokens) for group in self._groups)

    def _hashed(self, group: int, tokens: list[int]) -> int:
        manager, size, parent = self.cache._block_manager, int(self.cache.block_size), None
        for start in range(0, len(tokens) - size + 1, size):
            parent = manager.compute_hash(parent, tokens[start : start + size], group)
            if parent not in manager._hash_to_id:
                return start
        return len(tokens) // size * size

    def has_room(self, tokens: int, num_held: int) -> bool:
        held_blocks, blocks = num_held // self.cache.block_size, -(-tokens // self.cache.block_size)
        return bool(self.cache.will_allocation_be_successful(blocks - held_blocks, held_blocks))

    def allocate(self, state: Any, num_held: int, stop: int) -> bool:
        held_blocks, blocks = num_held // self.cache.block_size, -(-stop // self.cache.block_size)
        allocated = self.cache.allocate_blocks(blocks - held_blocks, state.request_id, held_blocks)
        if allocated is not None and stop % self.cache.block_size:
            state.allocated_blocks += 1  # the scheduler counts complete pages only
        return allocated is not None

    def complete(self, state: Any, count: int) -> None:
        self.cache.mark_shareable_blocks_as_complete(state, count // self.cache.block_size)

    def row_arguments(self, rows: list[torch.Tensor]) -> tuple[Any, ...]:
        return [row[:0] for row in rows], rows


_MEMBERS: dict[str, tuple[str, ...]] = {
    "manager": (
        "_create_batch_processor",  # attach to the processor that the manager's thread runs
        "batch_processor",
        "_wake_up_loop|_has_new_requests",  # schedule again when a restore is complete
    ),
    "processor": (
        "prepare_next_batch",  # moment between two steps
        "_generation_step",  # one forward pass
    ),
    "model_runner": ("_get_forward_fn",),  # function of the pass, enclosed to capture keys before rotation
    "inputs_and_outputs": (
        "get_graph",  # CUDA graph that a pass replays, if any
        "set_graph",  # new CUDA graph; it is given the tensors in which it leaves its KV
        "prepare_batch_tensors",  # which tokens of which requests are packed into a pass
        "compute_stream",
    ),
    "scheduler": (
        "add_waiting_request",  # arrival of a request
        "_get_waiting_candidates",  # requests that may be scheduled, without those that wait for a restore
        "_infer_request_tokens",  # admission of a request; asks for a prefix match if `cache.use_prefix_sharing`
        *("active_requests", "waiting_requests"),
    ),
    "cache": (
        "search_prefix_match",  # prefix that the pages hold; extended by what the store holds
        "update",  # new KV of a layer; also writes restored KV into pages
        "extend_read_and_write_indices",  # rows of a request's tokens in the pages of each group of layers
        *("max_batch_tokens", "use_prefix_sharing", "device", "free_blocks"),
        *("cache_allocators|group_cache_managers", "pool|_block_manager"),  # see `Pages` and `OlderPages`
        *("can_store_request_tokens|allocate_blocks", "evict_cached_blocks|will_allocation_be_successful"),
        *("mark_complete_blocks|mark_shareable_blocks_as_complete", "count_new_complete_blocks|block_size"),
    ),
    "RequestState": (
        *("request_id", "initial_tokens", "generated_tokens", "position_offset", "current_len"),
        *("allocated_blocks", "num_children"),
    ),
    "FutureRequestState": ("state", "query_length"),
}
"""Members by their object: the manager, its processor, or a part of that. Alternatives are names in different versions,
the latest first."""


def missing_members(manager: Any, processor: Any) -> list[str]:
    """Return the members that a manager and its processor lack, such as "scheduler.add_waiting_request"."""
    owners = {
        "manager": manager,
        "processor": processor,
        "RequestState": RequestState(request_id="", initial_tokens=[]),
        "FutureRequestState": FutureRequestState,
    }
    return [
        f"{name}.{member.replace('|', ' or ')}"
        for name, members in _MEMBERS.items()
        for member in members
        if not any(hasattr(owners.get(name, getattr(processor, name, None)), alias) for alias in member.split("|"))
    ]
