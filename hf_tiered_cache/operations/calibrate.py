"""Measurements on this machine: the fastest recompute ratio, and the cost of restoring a prefix."""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

from ..cache.cache_state import CacheOptions
from ..cache.calibrations import Calibration, PrefixCosts, check_saving, keep, keep_prefix_costs, prefix_calibration
from ..cache.cost_model import RESTORE_ALL
from ..cache.request import ForwardArguments
from ..cache.storage import Storage
from ..cache.stored_cache import StoredCache
from ..errors import ConfigError, StoreError
from ..identity import fingerprint_of
from ..methods import CacheTune, Exact, Method, PrefixMethod
from ..passages.recompute import LOWEST, Costs, fastest_ratio
from ..patches.attach import Attachment, attach
from ..patches.layers import base_model
from ..stats import TIERS, RequestStats
from ..store.geometry import HASH_TOKENS
from .passages import precompute_passages
from .precompute import PrecomputeSettings, precompute, run

_WIDTH = 0.02  # interval width at which the search for the ratio stops; timing noise hides finer differences
_AUTO_TOKENS = (256, 1024, 4096)
"""Lengths of the prefixes that a method measures by itself, unless that takes long; longer ones are more accurate."""
_AUTO_SUFFIX = 32
_AUTO_SECONDS = 8.0  # expected seconds above which a method measures no longer prefix by itself
_CHUNK, _CONTEXT = 256, 8192
"""Numbers of tokens that are computed, and before them in the cache, to measure the growth of the compute cost."""
_CONTEXT_BYTES = 512 << 20  # maximum bytes of KV of this context
_GROWTH_SECONDS = 3.0  # seconds after which the growth is not measured again
_FINALS = 3  # rounds that compare the best ratio with the lowest one


def calibrate(
    storage: Storage,
    model: torch.nn.Module,
    *,
    passages: int = 8,
    tokens: int = 512,
    suffix: int = 32,
    repeats: int = 3,
    cold: bool = True,
    progress: bool = True,
    tag: str = "",
) -> Calibration:
    """Measure the time to first token of a prompt of passages at several recompute ratios, and save the best one.

    Random passages are stored, requested and removed again. Earlier results for other prompt lengths are kept if they
    were measured with the same `cold`.

    Args:
        storage: Storage to measure, and to save the result in.
        model: Causal LM.
        passages: Number of passages in the prompt.
        tokens: Number of tokens per passage.
        suffix: Number of tokens after the passages.
        repeats: Number of runs per measurement; the median is used.
        cold: Whether to clear the store's memory before each run, so that passages are read from disk.
        progress: Whether to show a progress bar.
        tag: The `tag` of the caches that will use the result.

    Raises:
        ConfigError: The prompt is longer than the model's maximum position.
    """
    method, options = CacheTune.paper(), CacheOptions(record=False, tag=tag)  # the same tokens in all layers
    length = passages * tokens + suffix
    attachment, ids = _model_and_ids(storage, model, method, length, f"{passages} passages of {tokens} tokens exceed")
    inner, device, prompt = attachment.model, attachment.device, ids.unsqueeze(0)
    bar = tqdm(desc="calibrate", unit="ratio", disable=not progress)
    with torch.no_grad(), bar, storage.without_remote(), _temporary(storage) as label:
        prompts = list(ids[: passages * tokens].split(tokens))
        precompute_passages(storage, model, prompts, PrecomputeSettings(method, label=label, tag=tag))

        def request(ratio: float) -> float:
            cache = StoredCache.over(model, storage, replace(method, recompute=ratio), options)
            return _seconds(lambda: run(cache, prompt), device)

        times: dict[float, list[float]] = {}

        def median_seconds(ratio: float) -> float:
            return statistics.median(times[ratio])

        def measure(ratio: float, rounds: int = repeats) -> float:
            for _ in range(rounds):
                if cold:
                    storage.residency.clear()
                times.setdefault(ratio, []).append(request(ratio))
            bar.update()
            bar.set_postfix(ratio=f"{ratio:.2f}", seconds=f"{median_seconds(ratio):.3f}")
            return median_seconds(ratio)

        request(0.5)  # warm-up: hooks, kernels, open files
        reused, full = measure(0.0), measure(1.0)
        single_token_seconds = statistics.median(
            _seconds(lambda: inner(input_ids=prompt[:, :1], use_cache=False), device) for _ in range(3)
        )
        layers = attachment.depth
        compute, load = (
            max(pass_seconds - single_token_seconds, 1e-9) / (length * layers) for pass_seconds in (full, reused)
        )
        costs = Costs(compute, load, single_token_seconds / layers)
        best = fastest_ratio(measure, costs.balanced, width=_WIDTH)
        finals = sorted({LOWEST, 1.0 if full < median_seconds(best) else best})
        for _ in range(_FINALS * (len(finals) > 1)):  # alternate, so that temporary load affects both ratios
            for ratio in finals:
                measure(ratio, 1)
    seconds = {ratio: median_seconds(ratio) for ratio in times}
    ratio = min(finals, key=seconds.__getitem__)
    calibration = Calibration(ratio, seconds, costs, costs.balanced, length, cold)
    keep(storage, fingerprint_of(attachment, tag), device, calibration)
    return calibration


def calibrate_prefix(
    storage: Storage,
    model: torch.nn.Module,
    *,
    tokens: Sequence[int] = (512, 4096),
    suffix: int = 32,
    repeats: int = 3,
    seconds: float = math.inf,
    progress: bool = True,
    tag: str = "",
) -> list[PrefixCosts]:
    """Measure the cost per prefix token of computing and of restoring from disk and memory, and save it.

    `Exact()` then computes the share of a prefix that makes it available soonest, while the rest is loaded. Random
    prefixes are stored, requested and removed again. Memory means the tier that a prefix reaches within the store's
    budgets: device memory if it has a budget, else host memory. Without a memory budget, memory is not measured.

    Args:
        storage: Storage to measure, and to save the result in.
        model: Causal LM.
        tokens: Prefix lengths to measure; costs are interpolated between them. For longer prefixes, the compute cost
            grows as measured with a few tokens after a long context.
        suffix: Number of tokens after each prefix.
        repeats: Number of runs per measurement; the median is used.
        seconds: Expected seconds of a length, from the time of the shorter one, above which it is not measured.
        progress: Whether to show a progress bar.
        tag: The `tag` of the caches that will use the result.

    Raises:
        ConfigError: A length is below 16, or above the model's maximum position.
    """
    method = RESTORE_ALL.coded(storage.codec)
    lengths = sorted(set(tokens))
    if not lengths or lengths[0] < HASH_TOKENS:
        raise ConfigError(f"prefixes must have at least {HASH_TOKENS} tokens, not {list(tokens)}")
    exceeded = f"a prefix of {lengths[-1]} tokens exceeds"
    attachment, ids = _model_and_ids(storage, model, method, lengths[-1] + suffix, exceeded)
    costs: list[PrefixCosts] = []
    bar = tqdm(lengths, desc="calibrate", unit="prefix", disable=not progress)
    with torch.no_grad(), storage.without_remote(), bar:
        for length in bar:
            if costs:
                to_restore = length * costs[-1].restore.get(TIERS[-1], 0.0)
                if (repeats + 1) * (costs[-1].computing(length) + to_restore) > seconds:  # stored or warmed up once
                    break
            costs.append(_prefix_costs(storage, attachment, ids[: length + suffix], length, method, repeats, tag))
        growth = _compute_growth(attachment, ids.unsqueeze(0), repeats)
    costs = [replace(cost, growth=growth) for cost in costs]
    keep_prefix_costs(storage, fingerprint_of(attachment, tag), attachment.device, method.provenance, costs)
    return costs


def calibrate_once(storage: Storage, model: torch.nn.Module, method: Method, *, progress: bool, tag: str = "") -> None:
    """Measure the costs of prefixes for a method that needs them, unless the store has them or cannot be written.

    If they cannot be saved, such as on a full disk, this is logged, and the method restores all that is stored.
    """
    if not (isinstance(method, PrefixMethod) and method.calibrates) or not storage.disk.backend.writable:
        return
    attachment = attach(base_model(model))
    checked = attachment.extras.setdefault("calibrated", set())
    if (storage.place, tag) in checked:
        return
    provenance = Exact().coded(storage.codec).provenance
    if not prefix_calibration(storage, fingerprint_of(attachment, tag), attachment.device, provenance).measured:
        model, lengths = attachment.model, _auto_lengths(attachment)
        try:
            calibrate_prefix(
                storage, model, tokens=lengths, suffix=_AUTO_SUFFIX, seconds=_AUTO_SECONDS, progress=progress, tag=tag
            )
        except (StoreError, OSError) as error:
            storage.disk.warn("calibration", f"costs were not measured, so all stored KV is restored: {error}")
    checked.add((storage.place, tag))


def _auto_lengths(attachment: Attachment) -> list[int]:
    """Return the lengths of the prefixes that a method measures by itself, within the model's positions."""
    limit = getattr(attachment.config, "max_position_embeddings", _AUTO_TOKENS[-1])
    longest = max(HASH_TOKENS, (limit - _AUTO_SUFFIX) // HASH_TOKENS * HASH_TOKENS)
    return [min(tokens, longest) for tokens in _AUTO_TOKENS]


def _prefix_costs(
    storage: Storage, attachment: Attachment, ids: torch.Tensor, length: int, method: Method, repeats: int, tag: str
) -> PrefixCosts:
    """Measure the costs of one prefix: the first `length` tokens of `ids`, int `[tokens]`."""
    model, device, prompt = attachment.model, attachment.device, ids.unsqueeze(0)

    def request(restore: bool) -> tuple[float, RequestStats]:
        """Run the prompt. Return the duration in seconds, and the request's statistics."""
        cache = StoredCache.over(model, storage, method, CacheOptions(restore=restore, record=False, tag=tag))
        return _seconds(lambda: run(cache, prompt), device), cache.stats

    with _temporary(storage) as label:
        precompute(storage, model, ids[:length], PrecomputeSettings(method, label=label, tag=tag))
        new_ids = _labelled(storage, label)
        times: dict[str, list[float]] = {}  # by the slowest tier that the request read from
        read_seconds: list[float] = []
        request(True)  # warm-up
        for _ in range(repeats):
            storage.residency.forget(new_ids)  # the allocated buffers stay, as after other prompts
            for seconds, stats in (request(True), request(True), request(False)):
                times.setdefault(stats.tier, []).append(seconds)
                if stats.tier == TIERS[-1]:
                    read_seconds.append(stats.details.io_seconds)
        suffix_seconds = statistics.median(
            _seconds(lambda: model(input_ids=prompt[:, length:], use_cache=False), device) for _ in range(repeats)
        )
    costs = {
        tier: max(statistics.median(durations) - suffix_seconds, 0.0) / length for tier, durations in times.items()
    }
    load = {TIERS[-1]: statistics.median(read_seconds) / length} if read_seconds else {}
    return PrefixCosts(length, costs.pop("none"), costs, load, suffix_seconds)


def _compute_growth(attachment: Attachment, ids: torch.Tensor, repeats: int) -> float:
    """Measure `PrefixCosts.growth`: how many seconds longer each token takes per token before it, divided by two.

    It follows from passes of a few tokens of `ids`, int64 `[1, tokens]`, without and with a long context. Computing the
    context would take long, so its KV is that of these tokens, repeated.
    """
    limit = getattr(attachment.config, "max_position_embeddings", _CHUNK + _CONTEXT)
    chunk = ids[:, : min(_CHUNK, limit // 2)]

    def continued(context: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, DynamicCache]:
        """Run the chunk after KV of a context. Return the duration in seconds, and the cache."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(context):
            cache.update(keys, values, layer)
        positions = ForwardArguments.of(attachment).positions(chunk, cache.get_seq_length())
        seconds = _seconds(lambda: attachment.forward(chunk, cache, logits_to_keep=1, **positions), attachment.device)
        return seconds, cache

    _, computed_cache = continued([])
    layers: list[Any] = computed_cache.layers
    tokens = chunk.shape[1]
    chunk_bytes = sum(kv.nbytes for layer in layers for kv in (layer.keys, layer.values))
    times = min(_CONTEXT, limit - tokens, _CONTEXT_BYTES * tokens // chunk_bytes) // tokens
    if times < 1:
        return 0.0
    context = [(layer.keys.repeat(1, 1, times, 1), layer.values.repeat(1, 1, times, 1)) for layer in layers]
    differences: list[float] = []
    started = time.perf_counter()
    while len(differences) < repeats and (not differences or time.perf_counter() - started < _GROWTH_SECONDS):
        (alone, _), (after, _) = continued([]), continued(context)
        differences.append(after - alone)
    return max(0.0, statistics.median(differences) / (2 * tokens * times * tokens))


def _model_and_ids(
    storage: Storage, model: torch.nn.Module, method: Method, count: int, exceeded: str
) -> tuple[Attachment, torch.Tensor]:
    """Return the attached model, and token ids, int64 `[count]`, that no other measurement uses at the same time.

    Raises ConfigError, with `exceeded` as beginning of the message, if the model has fewer positions, or StoreError if
    no result could be saved.
    """
    check_saving(storage)
    attachment = StoredCache.over(model, storage, method, CacheOptions(record=False)).attachment
    if count > getattr(attachment.config, "max_position_embeddings", count):
        raise ConfigError(f"{exceeded} the model's maximum number of positions; use fewer")
    generator = torch.Generator()
    generator.seed()
    ids = torch.randint(3, attachment.config.vocab_size, (count,), generator=generator)
    return attachment, ids.to(attachment.device)


def _labelled(storage: Storage, label: str) -> list[str]:
    return [row.id for row in storage.disk.index.rows() if row.label == label]


@contextmanager
def _temporary(storage: Storage) -> Iterator[str]:
    """Yield a label, and delete what was stored under it: other caches store their KV at the same time."""
    label = f"measurement {uuid.uuid4().hex}"
    try:
        yield label
    finally:
        storage.disk.remove(_labelled(storage, label))


def _seconds(action: Callable[[], Any], device: torch.device) -> float:
    synchronize: Callable[[], Any] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - started
