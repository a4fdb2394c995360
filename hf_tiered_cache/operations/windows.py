"""Measurement of the device-memory windows that save the most reads while a model decodes (KVDRIVE, Section 5.2)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..cache.calibrations import WindowFindings, keep_windows, quality_budget
from ..cache.executor import CacheOptions
from ..cache.storage import Storage
from ..cache.stored_cache import StoredCache
from ..errors import ConfigError
from ..identity import Fingerprinter
from ..layers import kv_sources
from ..methods import KVDrive, Method, make_method
from ..patches.attach import attach
from ..selection.window import ByIndex
from ..selection.window_sizes import SIZES, Trace, measure
from .precompute import as_prompts, precompute

_LEAST_CONTEXT = 16
"""Minimum number of context tokens before the decoded ones; a shorter context is not stored."""
_TIMED, _ROUNDS = 64, 2
"""Number of decoded tokens that are timed with each window size, and number of rounds."""


def profile_windows(
    storage: Storage,
    model: torch.nn.Module,
    input_ids: Any,
    *,
    method: Method | str | None = None,
    steps: int = 256,
    sizes: Sequence[int] = SIZES,
    progress: bool = True,
) -> WindowFindings:
    """Decode the ends of long texts, and store how often windows of each size would have hit, and how fast they decode.

    The findings apply to this model and to the method's index, budget, chunk size and eviction policy, with any
    `window` between the smallest and the largest of `sizes`. `KVDrive` then selects the sizes per layer and head that
    read the least within its memory. The total size for `window="auto"` follows from timed tokens: each window size
    decodes them in turn, from the tiers as this store has them.

    Args:
        storage: Store for the contexts, if they are not stored yet, and for the findings.
        model: Any causal LM that the method supports.
        input_ids: One or several texts like those that the model will decode after, as for `KVStore.precompute`. The
            store cannot provide them: it keeps KV, and only hashes of tokens.
        method: A `KVDrive`, or its name and settings; None for the defaults.
        steps: Number of tokens at the end of each text that are decoded one by one; the others are their context.
        sizes: Window sizes to measure, ascending, in multiples of what a head attends to: 1 or more.
        progress: Whether to show a progress bar.

    Returns:
        The findings, as kept in the store.

    Raises:
        ConfigError: The method is not a `KVDrive` with a budget below 1, its window is outside `sizes`, or a text is
            too short.
    """
    kv_drive = KVDrive() if method is None else make_method(method)
    if not isinstance(kv_drive, KVDrive) or not kv_drive.selects:
        raise ConfigError(f"window sizes are measured for KVDrive with a budget below 1, not for {kv_drive}")
    if not sizes[0] <= (window := kv_drive.window_multiple) <= sizes[-1]:
        raise ConfigError(f"windows of {sizes[0]} to {sizes[-1]} times the budget can be measured, not {window:g}")
    fingerprint = Fingerprinter(attach(model).model)()
    kv_drive = replace(kv_drive.with_measured_budget(partial(quality_budget, storage, fingerprint)), quality=None)
    prompts = as_prompts(input_ids)
    shortest = min(map(len, prompts), default=0)
    if steps < 2 or shortest < steps + _LEAST_CONTEXT:
        raise ConfigError(f"a text of {shortest} tokens is too short to decode its last {steps} after a context")
    precompute(
        storage,
        model,
        [ids[:-steps] for ids in prompts],
        method=kv_drive,
        progress=progress,
        pin=False,
        label="",
        tag="",
    )
    widest = replace(kv_drive, window=sizes[-1], window_sizes="uniform")  # reads least, and selects the same
    rates, columns = [], []
    timed = min(steps, _TIMED)
    total = steps * len(prompts) + timed * len(sizes) * _ROUNDS
    with tqdm(total=total, desc="profile", unit="tok", disable=not progress) as bar:
        for ids in prompts:
            trace, entry_bytes = decode(storage, model, ids, widest, steps, on_token=bar.update)
            pools, count = trace.pools(), trace.num_columns
            window_rates = measure(pools, count, 1, kv_drive.eviction, sizes, skip=1 + steps // 8)
            rates.append(window_rates.benefits / count)
            columns.append(count)
        longest = max(prompts, key=len)
        end = len(longest) - steps + timed
        seconds = time_windows(storage, model, longest[:end], kv_drive, timed, sizes, on_token=bar.update)
    mean = np.average(rates, axis=0, weights=columns)  # [layers, heads, sizes]
    findings = WindowFindings(
        layers=trace.layers,
        sizes=tuple(sizes),
        hit_rates=mean.tolist(),
        columns=float(np.mean(columns)),
        entry_bytes=entry_bytes,
        steps=steps * len(prompts),
        seconds=seconds,
    )
    keep_windows(storage, fingerprint, kv_drive.profile_name, findings)
    return findings


def decode(
    storage: Storage,
    model: torch.nn.Module,
    ids: torch.Tensor,
    method: KVDrive,
    steps: int,
    *,
    pool: float | None = None,
    on_token: Callable[[], object] = lambda: None,
) -> tuple[Trace, int]:
    """Decode the last tokens of a text one by one after a stored context, and trace the candidates.

    Args:
        storage: Store that holds the context.
        model: Any causal LM that the method supports.
        ids: int `[tokens]`, on the CPU.
        method: Method to trace.
        steps: Number of tokens to decode.
        pool: Number of ranked candidates per selected chunk; None for the default of `ByIndex`.
        on_token: Called after each decoded token.

    Returns:
        The candidates of each step and layer, and the number of bytes of one selected entry, keys and values.

    Raises:
        ConfigError: The context is not stored, or the budget covers all of it.
    """
    trace = Trace()
    settings = {field.name: getattr(method, field.name) for field in fields(KVDrive) if field.init}
    traced = TracedKVDrive(**settings, trace=trace, pool=pool)
    cache = StoredCache.over(model, storage, traced, CacheOptions(record=False))
    row = ids.unsqueeze(0).to(attach(cache.model).devices[0])  # [1, tokens]
    with torch.no_grad():
        cache.model(input_ids=row[:, :-steps], past_key_values=cache, use_cache=True, logits_to_keep=1)
        if not trace.layers:
            reason = cache.stats.reason or "the budget covers all tokens of the context"
            raise ConfigError(f"nothing was selected from a context of {len(ids) - steps} tokens: {reason}")
        for token in row[:, -steps:].split(1, dim=1):
            cache.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            on_token()
    source = next(source for source in kv_sources(cache.layers) if source.index == trace.layers[0])
    assert source.keys is not None and source.values is not None
    token_bytes = (source.keys.shape[3] + source.values.shape[3]) * source.keys.element_size()
    return trace, method.chunk_tokens * token_bytes


def time_windows(
    storage: Storage,
    model: torch.nn.Module,
    ids: torch.Tensor,
    method: KVDrive,
    steps: int,
    sizes: Sequence[float],
    *,
    on_token: Callable[[], object] = lambda: None,
) -> tuple[float, ...]:
    """Return the median seconds per decoded token with windows of each size.

    Each size decodes the same tokens once per round. The tokens were decoded before, so that memory holds the same
    blocks for each size.

    Args:
        storage: Store that holds the context.
        model: Any causal LM that the method supports.
        ids: int `[tokens]`, on the CPU.
        method: Method to time.
        steps: Number of tokens to decode.
        sizes: Window sizes, the same for all heads.
        on_token: Called after each decoded token.
    """
    durations: dict[float, list[float]] = {size: [] for size in sizes}
    for number in range(_ROUNDS):
        for size in list(sizes)[:: -1 if number % 2 else 1]:
            uniform = replace(method, window=size, window_sizes="uniform")
            cache = StoredCache.over(model, storage, uniform, CacheOptions(record=False))
            row = ids.unsqueeze(0).to(attach(cache.model).devices[0])  # [1, tokens]
            with torch.no_grad():
                cache.model(input_ids=row[:, :-steps], past_key_values=cache, use_cache=True, logits_to_keep=1)
                for token in row[:, -steps:].split(1, dim=1):
                    started = time.perf_counter()
                    logits = cache.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)[0]
                    logits.flatten()[0].item()  # synchronizes with the device
                    durations[size].append(time.perf_counter() - started)
                    on_token()
    return tuple(statistics.median(seconds) for seconds in durations.values())


@dataclass(frozen=True, kw_only=True)
class TracedKVDrive(KVDrive):
    """`KVDrive` method that records the candidates of its selector."""

    trace: Trace
    pool: float | None = None

    def selector(self) -> ByIndex:
        return replace(self._by_index, trace=self.trace, pool=self.pool or ByIndex.pool)
