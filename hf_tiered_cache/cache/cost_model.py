"""Cost model of restoring a prefix soonest: load it, compute it, or both, by measured costs and block locations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from .. import reasons
from ..methods import BudgetMethod, Exact, Method, Passages, PrefixMethod
from ..methods.base import with_few_layers
from ..patches.attach import Attachment
from ..patches.layers import can_drop
from ..restore.plan import BudgetPlan, Plan
from ..restore.prefetch import PlanUnit, units_of
from ..restore.schedule import RATIOS, STEEPNESS, Load, Streams, fastest, recompute_lengths
from ..stats import TIERS
from ..store import EXACT
from ..store.codecs import RAW, coded_provenance, make_codec
from ..store.geometry import HASH_TOKENS
from ..store.segment import UnstoredPrefixReader
from ..tiers.residency import Residency
from .calibrations import (
    PrefixCalibration,
    PrefixCosts,
    calibrated_ratio,
    prefix_calibration,
    quality_budget,
    warn_of_loss,
)
from .sequence import SequenceState
from .storage import Storage
from .suitability import can_recompute_prefix

RESTORE_ALL = Exact(recompute=0.0, decline=False)
"""Method that restores whatever is stored."""
_LIKELY_TOKENS = 1024  # minimum length of the prefix for which a geometry is chosen
_DIM = 64  # size of a head, for estimates of a codec's bytes

_MARGIN = 1.5  # factor by which computing may be slower than calibrated before what is not stored delays a return

_MUCH_SECONDS = 0.5  # seconds that a restore must lose before a warning


def choose_strategy(plan: Plan, sequence: SequenceState) -> tuple[Plan | None, str]:
    """Choose whether to load a plan's prefix, recompute parts of it meanwhile, or compute all of it.

    Return the plan with recomputed prefixes by layer and "", or None and the reason why all is computed.
    """
    if plan.suffix is None:
        return plan, ""
    method = sequence.method if isinstance(sequence.method, PrefixMethod) else RESTORE_ALL
    recompute, decline = method.recompute, method.decline
    if recompute == "auto" and not sequence.calibration.measured:  # nothing to choose by
        recompute, decline = 0.0, False
    required = required_recompute(plan)
    is_incomplete = bool(required.any())
    if not (decline or recompute or is_incomplete):
        return plan, ""
    if not _may_recompute_prefix(plan, sequence):
        recompute = 0.0
        if is_incomplete:
            return None, reasons.PREFIX_NOT_STORED
    costs = sequence.calibration.at(plan.base + plan.suffix)
    tiers = sequence.store.residency, sequence.attachment.devices.__getitem__
    chosen_plan = fastest_plan(plan, required, recompute, decline, costs, *tiers, method.recompute_steepness)
    return chosen_plan, "" if chosen_plan is not None else reasons.SLOWER


def warn_of_slow_restore(sequence: SequenceState, saved: float) -> None:
    """Warn once if a restore lost much time that a calibration would have saved. `saved` are `seconds_saved`."""
    method = sequence.method
    declines = isinstance(method, PrefixMethod) and method.decline
    if saved < -_MUCH_SECONDS and declines and not sequence.calibration.measured:
        sequence.store.warn_of(reasons.SLOW_RESTORE)


def calibration_for(storage: Storage, fingerprint: str, attachment: Attachment, method: Method) -> PrefixCalibration:
    """Return what was measured for exact KV in the method's codec.

    Without a measurement with this codec, the disk's costs are those of raw KV, scaled by the bytes.
    """
    model, codec = attachment.model, method.geometry.codec
    provenance = coded_provenance(EXACT, codec) if method.records_approximations else method.provenance
    calibration = prefix_calibration(storage, fingerprint, attachment.device, provenance)
    if calibration.measured or codec == RAW:
        return calibration
    raw = prefix_calibration(storage, fingerprint, calibration.device, EXACT)
    coded_bytes = sum(field.dtype.itemsize * field.dim for field in make_codec(codec).fields(model.dtype, _DIM))
    load = raw.factors.load * coded_bytes / (model.dtype.itemsize * _DIM)
    return replace(raw, factors=replace(raw.factors, load=load))


def _may_recompute_prefix(plan: Plan, sequence: SequenceState) -> bool:
    """Return whether layers may recompute a part of what a plan restores, and the model supports it."""
    restores_all = plan.exact and not isinstance(plan, BudgetPlan)
    plain = plan.base == 0 and not any(sequence.history.pads)
    lossless = all(make_codec(reader.shape.geometry.codec).lossless for reader in plan.readers)
    lossless = lossless or sequence.method.records_approximations
    return restores_all and plain and lossless and can_recompute_prefix(sequence.attachment)


def fastest_plan(
    plan: Plan,
    required: np.ndarray,
    recompute: float | Literal["auto"],
    decline: bool,
    costs: PrefixCosts | None,
    residency: Residency,
    device_of: Callable[[int], torch.device],
    steepness: Sequence[float] = STEEPNESS,
) -> Plan | None:
    """Return the plan with the recomputed prefixes that finish the prompt soonest; None to compute the whole prompt.

    Blocks in a tier that was not measured count as free, so that they are restored.

    Args:
        plan: Plan that restores whole tokens and computes only the suffix.
        required: See `required_recompute`.
        recompute: Share of the prefix to compute while the rest is loaded, or "auto" for the fastest share.
        decline: Whether the whole prompt may be computed.
        costs: Costs per token for a prefix of this length; None if nothing was measured.
        residency: Memory tiers, which know the locations of blocks.
        device_of: Returns the device of a layer.
        steepness: How fast the number of recomputed tokens may fall with depth; the first one for a fixed share.
    """
    ratio = 0.0 if recompute == "auto" else recompute
    minimum = recomputing(plan, required)
    has_unstored = any(isinstance(reader, UnstoredPrefixReader) for reader in plan.readers)
    compares = costs is not None and (decline or recompute == "auto")
    units = unit_tiers_of(minimum, residency, device_of) if has_unstored or compares else []
    if recompute == "auto" and costs is not None:
        partial_schedules = [plan_recompute_lengths(plan, RATIOS[:-1], steep) for steep in steepness]
    else:
        partial_schedules = [plan_recompute_lengths(plan, np.array([ratio]), steepness[0])]
    schedules = np.concatenate([*partial_schedules, plan_recompute_lengths(plan, np.ones(1))])
    best, computes_all = 0, len(schedules) - 1
    if costs is not None and compares:
        seconds = streams_of(minimum, costs, units).seconds(np.maximum(schedules, required))
        if recompute == "auto":
            best = fastest(seconds, decline)
        elif seconds[computes_all] < seconds[0]:
            best = computes_all
        if best == computes_all:
            return None
    lengths = schedules[best]
    if has_unstored:
        lengths = np.minimum(lengths, _read_until(minimum, units))
    return recomputing(plan, np.maximum(lengths, required))


def recomputing(plan: Plan, lengths: np.ndarray) -> Plan:
    """Return a plan whose layers also compute prefixes of these lengths, int64 `[layers]`."""
    return plan.with_recompute_lengths(lengths.tolist()) if lengths.any() else plan


def required_recompute(plan: Plan) -> np.ndarray:
    """Return the length of the prefix that each layer must compute because it is not stored: int64 `[layers]`.

    It does not increase with depth. A sliding-window layer needs only the tokens in the window before the suffix.
    """
    required = np.zeros(len(plan.computed), np.int64)
    for group in plan.groups:
        for piece in group.pieces:
            if piece.first + piece.count <= piece.reader.shape.whole_hashes * HASH_TOKENS:
                continue
            start = piece.at + group.pad - plan.base  # position of its first token
            missing = ~group.held_by_any(piece)  # [layers, count]
            for layer, kind in enumerate(piece.reader.shape.layout.layers):
                if kind is not None and kind.window:
                    missing[layer, : max(0, plan.restored_until - (kind.window - 1) - start)] = False
            lacked = np.where(missing.any(1), piece.count - missing[:, ::-1].argmax(1), 0)
            required = np.maximum(required, np.where(lacked > 0, start + lacked, 0))
    if required.any():
        required = np.minimum(required, plan.restored_until)
    return np.maximum.accumulate(required[::-1])[::-1]


UnitTiers = list[tuple[PlanUnit, dict[str, np.ndarray]]]
"""Units of a plan, each with its chunks by the tier that holds them, int64 ascending."""


def unit_tiers_of(plan: Plan, residency: Residency, device_of: Callable[[int], torch.device]) -> UnitTiers:
    """Return the units that a plan restores, and where their chunks are. For arguments see `fastest_plan`."""
    return [
        (unit, residency.find(unit.reader.owners[group.index], unit.chunks, device_of(group.layers[0])))
        for unit in units_of(plan)
        for group in [unit.block_group]
    ]


def _index_of(unit: PlanUnit, chunks: np.ndarray) -> np.ndarray | slice:
    """Return the index of some of a unit's chunks, int64 ascending. Mostly, one tier holds all of them."""
    return slice(None) if len(chunks) == len(unit.chunks) else np.isin(unit.chunks, chunks, assume_unique=True)


def _read_until(plan: Plan, units: UnitTiers) -> np.ndarray:
    """Return the position after the last token that each layer reads from disk: int64 `[layers]`, non-increasing."""
    until = np.zeros(len(plan.computed), np.int64)
    for unit, chunks_by_tier in units:
        if not len(on_disk := chunks_by_tier[TIERS[-1]]):
            continue
        ends = _block_ends(plan, unit)[_index_of(unit, on_disk)]
        for layer in unit.block_group.layers:
            until[layer] = max(until[layer], ends.max(initial=0))
    return np.maximum.accumulate(until[::-1])[::-1]


def idle_recompute_ratio(tokens: int, layers: int, costs: PrefixCosts, stored: float, step: int) -> float:
    """Return the share of a conversation to recompute so that it returns from disk soonest.

    It is the fastest share if computing takes `_MARGIN` times as long as the costs for a prefix of this length say, or
    0 if that saves too little. `stored` are the bytes of the conversation's KV, as a share of the bytes that the costs
    refer to, and `step` is the granularity in tokens.
    """
    disk = TIERS[-1]
    ends = np.minimum(np.arange(step, tokens + step, step), tokens)
    seconds = np.diff(ends, prepend=0) * costs.loading(disk) * stored / layers
    loads = tuple(Load((layer,), ends, seconds) for layer in range(layers))
    restoring = costs.placing(disk) / layers
    slower = replace(costs, compute=_MARGIN * costs.compute, growth=_MARGIN * costs.growth)
    streams = Streams(tokens, costs.overhead / layers, lambda n: slower.computing(n) / layers, restoring, loads)
    returns = streams.seconds(recompute_lengths(tokens, RATIOS, layers, step=step))
    return float(RATIOS[fastest(returns, may_compute_all=False)])


def with_measured_settings(
    method: Method, storage: Storage, fingerprint: str, attachment: Attachment, tokens: int
) -> tuple[Method, PrefixCalibration]:
    """Return a method with what was measured for prompts of `tokens` tokens, and its costs. Warn if it loses much."""
    calibration = calibration_for(storage, fingerprint, attachment, method)
    if isinstance(method, Passages):
        ratio = partial(calibrated_ratio, storage, fingerprint, calibration.device, tokens)
        method = with_few_layers(method.with_calibrated_ratio(ratio), attachment.depth)
        if not can_drop(attachment.model, attachment.depth):
            method = method.with_equal_positions()
    if isinstance(method, BudgetMethod):
        method = method.with_measured_budget(partial(quality_budget, storage, fingerprint))
        if method.selects:
            warn_of_loss(storage, method, calibration.losses)
    if isinstance(method, PrefixMethod):
        is_fixed = method.recompute not in ("auto", 0)
        if (is_fixed or calibration.measured) and can_recompute_prefix(attachment):
            costs, share = calibration.at(max(tokens, _LIKELY_TOKENS)), 0.0
            if costs is not None and TIERS[-1] in costs.restore:
                share = idle_recompute_ratio(costs.tokens, attachment.depth, costs, 1.0, HASH_TOKENS)
            method = method.with_likely_recompute(share, attachment.depth)
    return method, calibration


def plan_recompute_lengths(plan: Plan, ratio: float | np.ndarray, steepness: float = 1) -> np.ndarray:
    """Return `recompute_lengths` of the tokens that a plan restores, in multiples of its chunk size."""
    shapes = [reader.shape for reader in plan.readers]
    block_groups = (group for shape in shapes for group in shape.block_groups)
    groups = {group.layers for group in block_groups if not (group.identifies or group.merged)}
    step = max(shape.geometry.chunk_tokens for shape in shapes)
    return recompute_lengths(plan.restored_until, ratio, len(plan.computed), sorted(groups), step, steepness)


def streams_of(plan: Plan, costs: PrefixCosts, units: UnitTiers) -> Streams:
    """Return the work of the compute and load streams for a plan that computes only what it has to."""
    layers, tokens = len(plan.computed), plan.restored_until
    rows = sum(len(group.rows) for group in plan.groups)
    restoring, loads = 0.0, dict[tuple[int, ...], list[tuple[np.ndarray, np.ndarray]]]()
    for unit, chunks_by_tier in units:
        group = unit.block_group
        ends, took = _block_ends(plan, unit), np.zeros(len(unit.chunks))
        block_tokens = group.block_bytes / unit.reader.shape.token_bytes  # tokens with as many bytes as a block
        for tier, chunks in chunks_by_tier.items():
            if len(chunks):
                took[_index_of(unit, chunks)] = block_tokens * costs.loading(tier)
                restoring += len(chunks) * block_tokens * costs.placing(tier)
        loads.setdefault(group.layers, []).append((ends, took))
    ordered = []
    for together, blocks in sorted(loads.items()):
        ends, took = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        order = np.argsort(ends, kind="stable")
        ordered.append(Load(together, ends[order], took[order]))

    def compute(lengths: np.ndarray) -> np.ndarray:
        seconds = costs.computing(plan.base + lengths) - costs.computing(plan.base)
        return plan.restored_tokens / max(1, tokens) / layers * seconds  # padding is not counted

    suffix = max(costs.overhead, rows * float(costs.computing(plan.num_positions - tokens)))
    return Streams(tokens, suffix / layers, compute, restoring / max(1, tokens) / layers, tuple(ordered))


def _block_ends(plan: Plan, unit: PlanUnit) -> np.ndarray:
    """Return, for each block of a unit, the end (exclusive) of the positions that a plan needs: int64 `[chunks]`."""
    ends = np.zeros(len(unit.chunks), np.int64)
    for group, piece, tokens in unit.pieces:
        at = np.searchsorted(unit.chunks, unit.chunk_of_each(tokens))
        np.maximum.at(ends, at, tokens + (piece.at + group.pad - plan.base - piece.first + 1))
    return ends
