"""Precompute prompts into a store, look up how much of a prompt is stored, and load it into memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..cache.cache_state import CacheOptions
from ..cache.storage import Storage
from ..cache.stored_cache import StoredCache
from ..errors import ConfigError, with_type
from ..identity import varying_rope
from ..methods import BudgetMethod, Exact, Method, PrefixMethod, make_method
from ..patches.attach import attach
from ..restore.plan import BudgetPlan, Plan
from ..restore.prefetch import PlanUnit, units_of
from ..stats import TIERS, RequestStats
from ..store.geometry import HASH_TOKENS
from ..tiers.collector import StatsCollector
from ..tiers.handles import BlockRequest
from ..units import format_bytes

CHUNK_TOKENS = 2048
"""Tokens of a long prompt per pass: the progress bar moves, and attention takes less memory."""


@dataclass(frozen=True)
class PrecomputeReport:
    """Result of `precompute`: number of prompts, and of tokens."""

    prompts: int
    tokens: int = 0
    restored: int = 0
    """Tokens with KV that was stored before."""
    stored: int = 0
    """Tokens with KV that was not stored before and is stored now."""
    too_short: int = 0
    """Number of prompts or passages of fewer than 16 tokens, which are not stored."""
    removed: int = 0
    """Number of segments deleted because their document was replaced and no other label names them."""
    kept: int = 0
    """Number of documents that were not replaced, because not all of their new passages could be stored."""


_TOKEN_IDS = (
    "a prompt must be token ids, such as tokenizer(text).input_ids: a tensor [tokens] or [prompts, tokens], or lists"
)


def as_prompts(input_ids: Any, empty: bool = False) -> list[torch.Tensor]:
    """Return one or several prompts, on any device, as a list of int64 `[tokens]` tensors on the CPU.

    They are a tensor `[tokens]` or `[prompts, tokens]`, or lists of token ids; otherwise this raises ConfigError. With
    `empty`, prompts without tokens stay in the list.
    """
    if isinstance(input_ids, torch.Tensor) and input_ids.ndim in (1, 2):
        rows: Iterable[Any] = input_ids if input_ids.ndim == 2 else [input_ids]
    elif isinstance(input_ids, list | tuple) and input_ids:
        rows = [input_ids] if isinstance(input_ids[0], int) else input_ids
    else:
        raise ConfigError(f"{_TOKEN_IDS}, not {with_type(input_ids)}")
    try:
        prompts = [torch.as_tensor(row).view(-1) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_TOKEN_IDS} ({error})") from error
    if any(len(prompt) and (prompt.is_floating_point() or prompt.dtype == torch.bool) for prompt in prompts):
        raise ConfigError("token ids must be integers; tokenize the text, and pass its input_ids")
    return [prompt.to("cpu", torch.int64) for prompt in prompts if len(prompt) or empty]


@dataclass(frozen=True)
class PrecomputeSettings:
    """Arguments of `KVStore.precompute` that apply to prompts and passages."""

    method: Method | str | None
    progress: bool = False
    pin: bool = False
    label: str = ""
    tag: str = ""


def precompute(
    storage: Storage, model: torch.nn.Module, input_ids: Any, settings: PrecomputeSettings
) -> PrecomputeReport:
    """See `KVStore.precompute`."""
    prompts, requested_method = as_prompts(input_ids), make_method(settings.method)
    storing_method = requested_method  # approximate KV has a provenance of its own
    if not requested_method.records_approximations:
        if isinstance(requested_method, PrefixMethod):  # storing recomputes nothing, restoring will
            requested_method = requested_method.with_likely_recompute(0.0, attach(model).depth)
        storing_method = Exact(
            geometry=requested_method.geometry, codec=requested_method.codec, recompute=0.0, decline=False
        )
    tokens, stats = sum(map(len, prompts)), list[RequestStats]()
    options = CacheOptions(label=settings.label, tag=settings.tag)
    with bar_over(tokens, settings.progress) as bar:
        for prompt in prompts:
            cache = StoredCache.over(model, storage, storing_method, options)
            varies = bool(varying_rope(cache.attachment.config))  # with the length
            for chunk in prompt.split(len(prompt) if varies else CHUNK_TOKENS):
                run(cache, chunk)
                bar.update(len(chunk))
            segments = cache.store_now()
            if settings.pin:
                storage.writer.flush()
                storage.disk.pin([row.id for row in storage.disk.index.live(segments) or ()])  # the others had no room
            stats.append(cache.stats)
    storage.flush()  # a failed write is subtracted from the statistics
    restored_tokens = sum(request.tokens_restored for request in stats)
    stored_tokens = sum(request.tokens_stored for request in stats)
    too_short = sum(len(prompt) < HASH_TOKENS for prompt in prompts)
    report = PrecomputeReport(len(prompts), tokens, restored_tokens, stored_tokens, too_short)
    if (
        isinstance(requested_method, BudgetMethod)
        and requested_method.selects
        and requested_method.selector().index is not None
    ):
        options = CacheOptions(record=False, tag=settings.tag)
        for prompt in prompts:  # make and store the index, which serves any question after the prompt
            question = torch.cat([prompt, prompt[-1:]])
            # no name for the cache: one that is alive when the store is flushed delays the reordering of segments
            run(StoredCache.over(model, storage, requested_method, options), question)
        storage.flush()
    return report


@torch.no_grad()
def run(cache: StoredCache, ids: torch.Tensor, keep: int = 1) -> torch.Tensor:
    """Run tokens, int `[tokens]` or `[rows, tokens]`, after those of a cache.

    Return the logits after the last `keep` tokens (0: after all), `[rows, keep, vocabulary]`.
    """
    ids = torch.atleast_2d(ids).to(cache.attachment.device)
    return cache.attachment.forward(ids, cache, logits_to_keep=keep, **cache.positions(ids)).logits


def bar_over(tokens: int, progress: bool, name: str = "precompute") -> tqdm:
    """Return a progress bar over `tokens` tokens."""
    return tqdm(total=tokens, unit="tok", desc=name, disable=not progress)


@dataclass(frozen=True)
class Lookup:
    """Stored part of a prompt.

    Args:
        tokens: Number of tokens in the prompt.
        stored: Number of tokens that a request would restore. The last token is always computed.
        bytes: Size of their KV in each tier, by tier name.
        reason: Reason why nothing is stored, or "".
    """

    tokens: int
    stored: int
    bytes: dict[str, int]
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in self.bytes.items() if size)
        return f"{self.stored} of {self.tokens} tokens stored" + (f": {sizes}" if sizes else f"; {self.reason}")


def lookup(storage: Storage, model: nn.Module, input_ids: Any, method: Method | str | None, tag: str) -> Lookup:
    """See `KVStore.lookup`."""
    return _Prompt(storage, model, input_ids, method, tag).describe()


def warm(
    storage: Storage, model: nn.Module, input_ids: Any, method: Method | str | None, tag: str, progress: bool
) -> Lookup:
    """See `KVStore.warm`."""
    method = make_method(method)
    if isinstance(method, Exact):  # ignore costs: load KV even if computing it would be faster now
        method = replace(method, recompute=0.0, decline=False)
    prompt, collector = _Prompt(storage, model, input_ids, method, tag), StatsCollector()
    total = sum(unit.nbytes for unit in prompt.units)
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="warm", disable=not progress) as bar:
        for unit in prompt.units:
            device = prompt.device_of(unit)
            storage.residency.prepare(device)
            if not storage.residency.device_budget:  # load blocks only to the host
                device = torch.device("cpu")
            request = BlockRequest(unit.reader, unit.block_group.index, unit.chunks)
            try:
                with storage.residency.fetched(request, device, collector):
                    pass  # they are in memory now
            except Exception as error:  # an unreadable block counts as a miss of the next request
                storage.disk.report(unit.reader.id, error)
            bar.update(unit.nbytes)
    return prompt.describe()


class _Prompt:
    """Prompt, and the blocks that a request would restore for it."""

    def __init__(
        self, storage: Storage, model: nn.Module, input_ids: Any, method: Method | str | None, tag: str
    ) -> None:
        prompts = as_prompts(input_ids)
        if len(prompts) != 1:
            raise ConfigError(f"pass one prompt at a time: token ids [tokens] or [1, tokens], not {len(prompts)} rows")
        cache = StoredCache.over(model, storage, make_method(method), CacheOptions(record=False, tag=tag))
        plan, self._reason = cache.look_up(prompts[0].unsqueeze(0))
        self._storage, self._attachment = storage, attach(model)
        self._tokens, self._restored = len(prompts[0]), 0
        self.units: list[PlanUnit] = []
        if plan is not None:
            self._restored = plan.restored_tokens
            if isinstance(plan, BudgetPlan):  # any block may be requested
                plan = Plan(plan.base, plan.num_positions, plan.computed, plan.groups)
            self.units = units_of(plan)

    def device_of(self, unit: PlanUnit) -> torch.device:
        return self._attachment.devices[unit.block_group.layers[0]]

    def describe(self) -> Lookup:
        sizes = dict.fromkeys(TIERS, 0)
        for unit in self.units:
            owner = unit.reader.owners[unit.block_group.index]
            for tier, chunks in self._storage.residency.find(owner, unit.chunks, self.device_of(unit)).items():
                sizes[tier] += len(chunks) * unit.block_group.block_bytes
        return Lookup(self._tokens, self._restored, sizes, self._reason)
