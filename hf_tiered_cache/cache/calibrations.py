"""Results of `calibrate`, `calibrate_prefix` and `calibrate_quality`, saved with the store.

Computing a token costs more in a longer prompt, while loading it does not. Results therefore hold for one prompt
length, and ratios and costs are interpolated between measured lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import as_store_error
from ..methods import BudgetMethod, describe_method
from ..passages.recompute import Costs
from ..stats import TIERS
from .storage import Storage

TRANSFER = 4
"""Factor by which a loss is taken to be larger on text of another kind (see `bench/quality.py`)."""
_MUCH = 0.1  # mean loss in nats above which a budget causes a warning
_REQUIRED = {"tokens", "ratio", "cold"}  # keys of a `Calibration` record that are read back
_MOST_NUMBER = 1e12  # largest number that a sound record holds
_Saved = list[dict[str, Any]]
"""Records that are saved under a name."""


@dataclass(frozen=True)
class _Measured:
    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class Calibration(_Measured):
    """Result of `calibrate` for one model on one device.

    Args:
        ratio: Share of each passage to compute, used by `CacheTune(recompute="auto")`.
        seconds: Time to first token by ratio, for all ratios that were measured; 1 is full recompute.
        costs: Costs of a token in one layer.
        balanced: Ratio that follows from these costs, where the search started.
        tokens: Number of tokens in the prompt.
        cold: Whether passages were read from disk rather than from memory.
    """

    ratio: float
    seconds: dict[float, float]
    costs: Costs
    balanced: float
    tokens: int
    cold: bool

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"seconds": {f"{ratio:.4f}": value for ratio, value in sorted(self.seconds.items())}}


@dataclass(frozen=True)
class PrefixCosts(_Measured):
    """Costs per prefix token, for one model on one device with one I/O engine and codec.

    Args:
        tokens: Length of the prefix that was measured.
        compute: Seconds to compute a token.
        restore: Seconds to restore a token, by tier name.
        load: Seconds of `restore` in which reading keeps the tier busy, by tier name, where measured.
        overhead: Seconds of a pass without a prefix, which are not part of `compute` and `restore`.
        growth: Increase of `compute` per token of the prefix: n tokens take n (compute + growth (n - tokens)) seconds.
    """

    tokens: int
    compute: float
    restore: dict[str, float]
    load: dict[str, float] = field(default_factory=dict)
    overhead: float = 0.0
    growth: float = 0.0

    def computing(self, tokens: int | np.ndarray) -> np.ndarray:
        """Return the seconds to compute a prefix of `tokens` tokens."""
        return tokens * np.maximum(self.compute + self.growth * (np.asarray(tokens) - self.tokens), 0.0)

    def placing(self, tier: str) -> float:
        """Return the seconds per token that a pass takes for KV of a tier after it has arrived.

        This is the lowest restore cost, memory tiers included; 0 if memory or the tier was not measured.
        """
        memory = [cost for name, cost in self.restore.items() if name != TIERS[-1]]
        return min([*memory, self.restore[tier]]) if memory and tier in self.restore else 0.0

    def loading(self, tier: str) -> float:
        """Return the seconds per token of a tier for its transfer, which may overlap with computation."""
        if tier in self.load:
            return self.load[tier]
        return self.restore.get(tier, 0.0) - (self.placing(tier) if tier != TIERS[-1] else 0.0)

    def scaled(self, factors: CostFactors) -> PrefixCosts:
        """Return the costs times observed factors, or for KV of another number of bytes on disk."""
        disk, scaled = TIERS[-1], factors.compute
        costs = replace(
            self, compute=scaled * self.compute, growth=scaled * self.growth, overhead=scaled * self.overhead
        )
        if disk not in costs.restore:
            return costs
        load = self.loading(disk)
        restore = self.restore[disk] + (factors.load - 1) * load
        return replace(costs, restore=self.restore | {disk: restore}, load=self.load | {disk: factors.load * load})

    @property
    def is_sound(self) -> bool:
        tiers = *self.restore.values(), *self.load.values()
        return _are_numbers(self.tokens, self.compute, self.overhead, self.growth, *tiers) and self.tokens >= 1


@dataclass(frozen=True)
class CostFactors(_Measured):
    """Observed costs relative to the calibrated ones: of computing a token, and of loading one from disk."""

    compute: float = 1.0
    load: float = 1.0

    @property
    def is_sound(self) -> bool:
        return _are_numbers(self.compute, self.load) and self.compute > 0 and self.load > 0


@dataclass(frozen=True)
class QualityFinding(_Measured):
    """Losses of a method at one budget, for one model.

    Args:
        method: `describe_method` of the method, without its `loss_ignores`.
        budget: Share of the prefix.
        losses: KL divergence of each question's prediction from that with full KV, in nats.
        agreement: Share of the questions with the same most likely token.
        brought: bytes loaded until the first token, without the index, as a share of the prefix's KV; a mean.
        index: bytes of the index used for selection, as a share of the prefix's KV.
        seconds: Median time to first token.
    """

    method: str
    budget: float
    losses: list[float]
    agreement: float
    brought: float
    index: float
    seconds: float

    @property
    def loss(self) -> float:
        """Mean of the losses, in nats."""
        return float(np.mean(self.losses))

    def keeps(self, quality: float) -> bool:
        """Return whether the loss should be at most `quality` on average, and twice that in 95 % of questions.

        Text of another kind than was measured may lose `TRANSFER` times as much, so the measured losses must be lower
        by this factor.
        """
        most = quality / TRANSFER
        return self.loss <= most and float(np.quantile(self.losses, 0.95)) <= 2 * most

    @property
    def is_sound(self) -> bool:
        return 0 < self.budget <= 1 and bool(self.losses) and _are_numbers(*map(abs, self.losses))


def _are_numbers(*values: object) -> bool:
    """Return whether all values of a record are numbers from 0 to `_MOST_NUMBER`, so neither NaN nor infinite."""
    return all(isinstance(value, int | float) and 0 <= value <= _MOST_NUMBER for value in values)


_Record = TypeVar("_Record", PrefixCosts, CostFactors, QualityFinding)


def _loaded(kind: type[_Record], saved: _Saved) -> list[_Record]:
    """Return records as objects; none if one is damaged or has figures that no measurement gives (`is_sound`)."""
    try:
        records = [kind(**record) for record in saved]
        return records if all(record.is_sound for record in records) else []
    except (TypeError, AttributeError):
        return []


def quality_budget(storage: Storage, fingerprint: str, method: BudgetMethod) -> float | None:
    """Return the lowest measured budget at which a method keeps its quality target on this model; 1 if none does.

    Return None, with a one-time warning, if nothing was measured.
    """
    name, quality = describe_method(method, method.loss_ignores), method.quality
    assert quality is not None
    findings = _loaded(QualityFinding, records_of(storage, f"quality {fingerprint}"))
    findings = [finding for finding in findings if finding.method == name]
    if not findings:
        storage.disk.warn(
            f"quality of {name}",
            f"the loss of {name} was not measured for this model, so quality={quality:g} uses a budget of 0.5; call "
            "store.calibrate_quality(model, texts)",
        )
        return None
    return min((finding.budget for finding in findings if finding.keeps(quality)), default=1.0)


def warn_of_loss(storage: Storage, method: BudgetMethod, findings: Sequence[QualityFinding]) -> None:
    """Warn once if the smallest measured budget that is not below the method's loses much on this model."""
    if not findings:
        return
    name = describe_method(method, method.loss_ignores)
    findings = [finding for finding in findings if finding.method == name and finding.budget >= method.budget]
    smallest = min(findings, key=lambda finding: finding.budget, default=None)
    if smallest is not None and smallest.loss > _MUCH:
        storage.disk.warn(
            f"loss of {name} {method.budget}",
            f"{name} loses {smallest.loss:.2g} nats on this model at a budget of {smallest.budget:g}, as measured by "
            f"store.calibrate_quality; use a larger budget than {method.budget:g}, or quality=0.02",
        )


def keep_quality(storage: Storage, fingerprint: str, findings: list[QualityFinding]) -> None:
    """Save findings, and replace earlier ones of the same methods."""
    measured_methods = {finding.method for finding in findings}

    def merged(saved: _Saved) -> _Saved:
        earlier_findings = [
            finding for finding in _loaded(QualityFinding, saved) if finding.method not in measured_methods
        ]
        return [finding.as_dict() for finding in (*earlier_findings, *findings)]

    change_records(storage, f"quality {fingerprint}", merged)


def calibrated_ratio(storage: Storage, fingerprint: str, device: torch.device, tokens: int) -> float | None:
    """Return the ratio of `calibrate` for this model and device, interpolated to `tokens`, or None."""
    records = records_of(storage, f"{fingerprint} {_describe(device)}")
    sound = [record for record in records if record.keys() >= _REQUIRED]
    sound = [record for record in sound if _are_numbers(record["tokens"], record["ratio"]) and record["ratio"] <= 1]
    return _between(tokens, {record["tokens"]: record["ratio"] for record in sound}) if sound else None


@dataclass(frozen=True)
class PrefixCalibration:
    """Costs that `calibrate_prefix` measured for one model, device, I/O engine and provenance (codec).

    Args:
        device: Device of the first layer.
        measured: Costs for prefixes of the measured lengths; none without a calibration.
        factors: What prompts have shown since, relative to these costs.
        losses: Losses that `calibrate_quality` measured for the model.
    """

    device: torch.device
    measured: Sequence[PrefixCosts] = ()
    factors: CostFactors = CostFactors()
    losses: Sequence[QualityFinding] = ()

    def at(self, tokens: int) -> PrefixCosts | None:
        """Return the costs times the factors, interpolated to `tokens` tokens, or None if nothing was measured.

        Tiers that were not measured are left out. Beyond the longest measured prefix, the compute cost per token grows
        linearly, and restoring takes as long per further token as between the two longest ones.
        """
        if not self.measured:
            return None
        by_length = {costs.tokens: costs for costs in self.measured}

        def values(name: str) -> dict[int, Any]:
            return {length: getattr(costs, name) for length, costs in by_length.items()}

        longest = by_length[max(by_length)]
        growth = min(longest.growth, *(costs.compute / costs.tokens for costs in self.measured))  # no cost below 0
        compute = _between(tokens, values("compute")) + growth * max(0, tokens - longest.tokens)
        restore, load = (_by_tier(tokens, values(name)) for name in ("restore", "load"))
        overhead = _between(tokens, values("overhead"))
        return PrefixCosts(tokens, compute, restore, load, overhead, growth).scaled(self.factors)


def prefix_calibration(storage: Storage, fingerprint: str, device: torch.device, provenance: str) -> PrefixCalibration:
    """Return what `calibrate_prefix` measured, and the losses of the model."""
    names = _prefix_name(storage, fingerprint, device, provenance), _factors_name(storage, fingerprint, device)
    records = storage.calibrations.read()
    measured, factors, losses = (records.get(name, []) for name in (*names, f"quality {fingerprint}"))
    costs, findings = _loaded(PrefixCosts, measured), _loaded(QualityFinding, losses)
    return PrefixCalibration(device, costs, _factors_in(factors), findings)


def _by_tier(tokens: int, measured: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return each tier's cost per token for a length, from the lengths at which it is known."""
    values: dict[str, dict[int, float]] = {}
    for length, costs in measured.items():
        for tier, cost in costs.items():
            values.setdefault(tier, {})[length] = cost
    return {tier: _restoring(tokens, tier_costs) for tier, tier_costs in values.items()}


def _restoring(tokens: int, measured: dict[int, float]) -> float:
    """Return the cost per token to restore a prefix, interpolated between measured lengths.

    A request has costs that do not depend on the length. Beyond the longest one, a token therefore costs as much as the
    further tokens of the longest one, which are at least half of its cost per token.
    """
    *shorter, longest = sorted(measured)
    if tokens <= longest or not shorter:
        return _between(tokens, measured)
    cost = measured[longest]
    further = (longest * cost - shorter[-1] * measured[shorter[-1]]) / (longest - shorter[-1])
    return (longest * cost + (tokens - longest) * min(max(further, cost / 2), cost)) / tokens


def _between(tokens: int, measured: dict[int, float]) -> float:
    """Return the value for a length, interpolated linearly, or that of the nearest length outside the range."""
    lengths = sorted(measured)
    return float(np.interp(tokens, lengths, [measured[length] for length in lengths]))


def _prefix_name(storage: Storage, fingerprint: str, device: torch.device, provenance: str) -> str:
    return f"prefix {fingerprint} {_describe(device)} {storage.disk.backend.reads_with} {provenance}"


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def records_of(storage: Storage, name: str) -> _Saved:
    """Return the records that are saved under a name."""
    return storage.calibrations.read().get(name, [])


def keep(storage: Storage, fingerprint: str, device: torch.device, calibration: Calibration) -> None:
    """Save a calibration. Earlier ones for other prompt lengths are kept if they have the same `cold`."""

    def merged(saved: _Saved) -> _Saved:
        sound = [record for record in saved if record.keys() >= _REQUIRED]
        other_records = [
            record for record in sound if record["tokens"] != calibration.tokens and record["cold"] == calibration.cold
        ]
        return [*other_records, calibration.as_dict()]

    change_records(storage, f"{fingerprint} {_describe(device)}", merged)


def keep_prefix_costs(
    storage: Storage, fingerprint: str, device: torch.device, provenance: str, measured: list[PrefixCosts]
) -> None:
    """Save prefix costs, and replace earlier ones of the same model, device, engine and codec."""
    name = _prefix_name(storage, fingerprint, device, provenance)
    keep_records(storage, name, [costs.as_dict() for costs in measured])
    if cost_factors(storage, fingerprint, device) != CostFactors():
        change_cost_factors(storage, fingerprint, device, lambda factors: CostFactors())


def cost_factors(storage: Storage, fingerprint: str, device: torch.device) -> CostFactors:
    """Return the factors of a model's calibrated costs on a device, which are 1 before any conversation returned."""
    return _factors_in(records_of(storage, _factors_name(storage, fingerprint, device)))


def _factors_in(saved: _Saved) -> CostFactors:
    return next(iter(_loaded(CostFactors, saved)), CostFactors())


def change_cost_factors(
    storage: Storage, fingerprint: str, device: torch.device, change: Callable[[CostFactors], CostFactors]
) -> None:
    """Save what `change` makes of the factors of a model's calibrated costs on a device. See `change_records`."""
    name = _factors_name(storage, fingerprint, device)
    change_records(storage, name, lambda saved: [change(_factors_in(saved)).as_dict()])


def _factors_name(storage: Storage, fingerprint: str, device: torch.device) -> str:
    return f"factors {fingerprint} {_describe(device)} {storage.disk.backend.reads_with}"


def keep_records(storage: Storage, name: str, records: _Saved) -> None:
    """Save records under a name, and replace earlier ones."""
    change_records(storage, name, lambda saved: records)


def check_saving(storage: Storage) -> None:
    """Raise StoreError if `change_records` would fail. Call this before a measurement."""
    storage.disk.check_writable()
    storage.calibrations.check_writable()


def change_records(storage: Storage, name: str, change: Callable[[_Saved], _Saved]) -> _Saved:
    """Save what `change` makes of the records under a name, and return it. Other threads and processes wait meanwhile.

    Suspended conversations write to this file, too. Raises StoreError if it cannot be written.
    """
    check_saving(storage)
    with as_store_error(f"calibrations.json in {storage.place} cannot be written"), storage.disk.backend.locked():
        records = change(records_of(storage, name))
        storage.calibrations.write(name, records)
    return records
