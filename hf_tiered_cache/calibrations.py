"""The results of `calibrate`, `calibrate_prefix` and `profile_windows`, kept with the store.

Computing a token costs more in a longer prompt, loading it does not; so what was found holds for prompts of one length,
and between two such the ratio, or the time, goes from one to the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from .errors import ConfigError, FormatError
from .methods import describe_method
from .methods.budget import BudgetMethod
from .restore.recompute import Costs
from .select.by_index import WindowSizes
from .stats import TIERS
from .storage import Storage
from .store.kinds import CALIBRATIONS, CALIBRATIONS_NAME, encode_record
from .tiers.window_sizes import WindowProfile, best_sizes

_SUSPENDED = 64
"""Times that conversations of one model were suspended, of which it is noted where their attention went."""
_NEAR = 1.03
"""Times that differ by less are the same."""
TRANSFER = 4
"""How many times as much text of one kind loses as text of another: up to 3.6 of a target (bench/quality.py)."""
_MUCH = 0.1
"""Nats that no budget should lose unnoticed."""
_KEPT = {"tokens", "ratio", "cold"}
"""What is read again of each `Calibration`."""


@dataclass(frozen=True)
class Calibration:
    """What was found for one model on one device.

    Args:
        ratio: share of each passage to compute: `CacheTune(recompute="auto")` takes it.
        seconds: to the first token at that ratio, and at those that were tried, by ratio; 1 is full recompute.
        costs: of a token in one layer.
        balanced: the ratio that these say, where the search began.
        tokens: of the prompt.
        cold: whether passages were read from disk, or came from memory.
    """

    ratio: float
    seconds: dict[float, float]
    costs: Costs
    balanced: float
    tokens: int
    cold: bool

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self) | {"seconds": {f"{ratio:.4f}": value for ratio, value in sorted(self.seconds.items())}}


@dataclass(frozen=True)
class PrefixCosts:
    """What a token of a prefix costs, for one model on one device, through one engine, stored with one codec.

    Args:
        tokens: of the prefix it was measured with.
        compute: seconds to compute one.
        restore: seconds to restore one, by the name of the tier.
        load: of these, how long reading it keeps a tier busy, where that was measured.
        least: seconds of a pass without a prefix, whose time is left out above.
        growth: by how much `compute` grows with each token of the prefix; what was found for several lengths says it.
    """

    tokens: int
    compute: float
    restore: dict[str, float]
    load: dict[str, float] = field(default_factory=dict)
    least: float = 0.0
    growth: float = 0.0

    def computing(self, tokens: int | np.ndarray) -> np.ndarray:
        """Seconds to compute a prefix of so many tokens."""
        return tokens * np.maximum(self.compute + self.growth * (np.asarray(tokens) - self.tokens), 0.0)

    def placing(self, tier: str) -> float:
        """Seconds that a pass takes for a token of a tier when it has arrived: what those take that lie in memory."""
        memory = [cost for name, cost in self.restore.items() if name != TIERS[-1]]
        return min([*memory, self.restore[tier]]) if memory and tier in self.restore else 0.0

    def loading(self, tier: str) -> float:
        """Seconds in which a token of a tier arrives, while the pass may do other things."""
        if tier in self.load:
            return self.load[tier]
        return self.restore.get(tier, 0.0) - (self.placing(tier) if tier != TIERS[-1] else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class WindowFindings:
    """What windows of several sizes were found to have, for one model and one way to choose.

    Args:
        layers: of the model, those that choose.
        sizes: of windows, ascending, in multiples of what a head attends to.
        hit_rates: for each of these layers, each kv head and each size the share of chosen entries that the window had.
        columns: entries that a head attended to, a mean over the texts.
        entry_bytes: of one of them, keys and values.
        steps: tokens that were decoded, of all texts.
        seconds: of a token, with windows of each size, a median; () where that was not measured.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    hit_rates: list[list[list[float]]]
    columns: float
    entry_bytes: int
    steps: int
    seconds: tuple[float, ...] = ()

    @property
    def quickest(self) -> float | None:
        """The size with which tokens came quickest; of those that took as long, to the noise, the smallest."""
        near = _NEAR * min(self.seconds, default=0.0)
        return next((float(size) for size, took in zip(self.sizes, self.seconds, strict=False) if took <= near), None)

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)

    def profile(self) -> WindowProfile:
        """What sizes save and cost; one window of the size 1 costs 1, since all that it is asked for has one B."""
        benefits = np.array(self.hit_rates, float) * self.columns * self.entry_bytes  # [layers, heads, sizes]
        return WindowProfile(self.sizes, benefits, np.broadcast_to(np.array(self.sizes), benefits.shape))

    def chosen(self, window: float, choose: Callable[[WindowProfile, int], np.ndarray] = best_sizes) -> np.ndarray:
        """Sizes by layer and head in the memory of windows of one size: int64 `[layers, heads]`.

        Args:
            window: that size.
            choose: of a profile, within a budget; those that save most, by default.

        Raises:
            ConfigError: it is below all that were measured.
        """
        return choose(self.profile(), int(window * np.size(self.hit_rates) / len(self.sizes)))

    def hit_rate(self, sizes: np.ndarray) -> float:
        """The share of chosen entries that windows of these sizes, int64 `[layers, heads]`, had."""
        return self.profile().benefit(sizes) / (self.columns * self.entry_bytes * sizes.size)


@dataclass(frozen=True)
class QualityFinding:
    """Losses of a method at one budget, for one model.

    Args:
        method: `describe_method` of its `as_measured`.
        budget: share of the prefix.
        losses: KL divergence of each question's prediction from that with full KV, in nats.
        agreement: share of the questions whose likeliest token was the same.
        brought: bytes that came until the first token, as a share of the prefix's KV; a mean. Without the index.
        index: bytes of the index that was chosen by, as a share of the prefix's KV.
        seconds: to the first token, a median.
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
        """The mean of the losses."""
        return float(np.mean(self.losses))

    def keeps(self, quality: float) -> bool:
        """Return whether it should lose `quality` at most in the mean, and twice that at most in 95 % of the questions.

        Also of text of another kind than was measured: there it may lose `TRANSFER` times as much.
        """
        most = quality / TRANSFER
        return self.loss <= most and float(np.quantile(self.losses, 0.95)) <= 2 * most

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)


def quality_budget(storage: Storage, fingerprint: str, method: BudgetMethod) -> float | None:
    """Return the least budget at which a method was found to keep its target on this model; 1 if it keeps it at none.

    Args:
        storage: keeps what was found.
        fingerprint: of the model.
        method: with a target.

    Returns:
        None where nothing was measured, which warns once.
    """
    name, quality = describe_method(method.as_measured), method.quality
    assert quality is not None
    found = [one for one in _qualities(storage, fingerprint) if one.method == name]
    if not found:
        storage.disk.warn(
            f"quality of {name}",
            f"what {name} loses was not measured for this model, so quality={quality:g} is taken for a budget of a "
            "half; call store.calibrate_quality(model, texts)",
        )
        return None
    return min((one.budget for one in found if one.keeps(quality)), default=1.0)


def warn_of_loss(storage: Storage, fingerprint: str, method: BudgetMethod) -> None:
    """Warn once if a budget is known to lose much on this model: it, or a larger one, did when it was measured."""
    name = describe_method(method.as_measured)
    known = [one for one in _qualities(storage, fingerprint) if one.method == name and one.budget >= method.budget]
    least = min(known, key=lambda one: one.budget, default=None)
    if least is not None and least.loss > _MUCH:
        storage.disk.warn(
            f"loss of {name} {method.budget}",
            f"{name} loses {least.loss:.2g} nats on this model at a budget of {least.budget:g}, as "
            f"store.calibrate_quality has measured; take a larger budget than {method.budget:g}, or quality=0.02",
        )


def keep_quality(storage: Storage, fingerprint: str, found: list[QualityFinding]) -> None:
    """Keep what was found of some methods in place of what was."""
    new = {one.method for one in found}
    others = [one for one in _qualities(storage, fingerprint) if one.method not in new]
    keep_records(storage, _quality_name(fingerprint), [one.as_dict() for one in (*others, *found)])


def _qualities(storage: Storage, fingerprint: str) -> list[QualityFinding]:
    try:
        return [QualityFinding(**one) for one in records_of(storage, _quality_name(fingerprint))]
    except TypeError:  # damaged
        return []


def _quality_name(fingerprint: str) -> str:
    return f"quality {fingerprint}"


def profiled_windows(
    storage: Storage, fingerprint: str, name: str, window: float | None
) -> tuple[float, WindowSizes] | None:
    """What `profile_windows` found for this model and a method's choices.

    Args:
        window: a size, in whose memory all windows are to lie; None for the one that was quickest.

    Returns:
        This size, and those by layer and head. None where nothing was found, or the size lies beyond those that were
        measured.
    """
    try:
        (found,) = (WindowFindings(**one) for one in records_of(storage, _windows_name(fingerprint, name)))
        window = found.quickest if window is None else window
        if window is None or not found.sizes[0] <= window <= found.sizes[-1]:
            return None
        sizes = dict(zip(found.layers, found.chosen(window).tolist(), strict=True))
    except (TypeError, ValueError, IndexError, ConfigError):  # none yet, or damaged
        return None
    return window, tuple(tuple(sizes.get(layer, ())) for layer in range(max(sizes) + 1))


def keep_windows(storage: Storage, fingerprint: str, name: str, found: WindowFindings) -> None:
    """Keep what was found in place of what was."""
    keep_records(storage, _windows_name(fingerprint, name), [found.as_dict()])


def _windows_name(fingerprint: str, name: str) -> str:
    return f"windows {fingerprint} {name}"


def note_initial_recent(storage: Storage, fingerprint: str, shares: np.ndarray) -> list[np.ndarray]:
    """Keep how much attention each layer gave to the ends of its context in a conversation that this model has had.

    Args:
        shares: `LayerDistances.initial_recent`, float `[layers]`.

    Returns:
        The last ones that were noted, this one the last.

    Raises:
        StoreBusyError, OSError: it cannot be kept.
    """
    name = f"initial recent {fingerprint}"
    try:
        before = [np.array(one["shares"], float) for one in records_of(storage, name)]
    except (KeyError, TypeError, ValueError):  # damaged
        before = []
    found = [*(each for each in before if each.shape == shares.shape), shares][-_SUSPENDED:]
    if storage.disk.backend.writable:
        keep_records(storage, name, [{"shares": each.round(4).tolist()} for each in found])
    return found


def calibrated_ratio(storage: Storage, fingerprint: str, device: torch.device, tokens: int) -> float | None:
    """What `calibrate` found for this model on this device, for prompts of so many tokens, or None."""
    found = records_of(storage, f"{fingerprint} {_describe(device)}")
    return _between(tokens, {one["tokens"]: one["ratio"] for one in found if one.keys() >= _KEPT})


def prefix_costs(
    storage: Storage, fingerprint: str, device: torch.device, provenance: str, tokens: int
) -> PrefixCosts | None:
    """What `calibrate_prefix` found for this model, device, engine and codec, for a prefix of so many tokens, or None.

    A tier that was not measured is left out. Beyond the longest prefix that was measured computing goes on to grow.
    """
    found = records_of(storage, _prefix_name(storage, fingerprint, device, provenance))
    try:
        known = [PrefixCosts(**one) for one in found]
        compute = _between(tokens, {one.tokens: one.compute for one in known})
        restore, load = (
            _by_tier(tokens, {one.tokens: costs for one, costs in zip(known, some, strict=True)})
            for some in ([one.restore for one in known], [one.load for one in known])
        )
        least = _between(tokens, {one.tokens: one.least for one in known})
        growth = _growth(known)
    except (TypeError, AttributeError, ValueError):  # damaged
        return None
    if compute is None or least is None:
        return None
    beyond = max(0, tokens - max(one.tokens for one in known))
    return PrefixCosts(tokens, compute + growth * beyond, restore, load, least, growth)


def _by_tier(tokens: int, known: dict[int, dict[str, float]]) -> dict[str, float]:
    """For each tier that is known for some lengths, the value for another."""
    found = {}
    for tier in {tier for costs in known.values() for tier in costs}:
        cost = _between(tokens, {length: costs[tier] for length, costs in known.items() if tier in costs})
        if cost is not None:
            found[tier] = cost
    return found


def _growth(known: list[PrefixCosts]) -> float:
    """Of the cost of computing a token with the length of the prefix, on the line that lies closest."""
    if len({one.tokens for one in known}) < 2:
        return 0.0
    slope = float(np.polyfit([one.tokens for one in known], [one.compute for one in known], 1)[0])
    return max(0.0, min(slope, *(one.compute / one.tokens for one in known)))


def _between(tokens: int, known: dict[int, float]) -> float | None:
    """Of what is known for some lengths, the value for another; beyond them that of the nearest."""
    lengths = sorted(known)
    return float(np.interp(tokens, lengths, [known[length] for length in lengths])) if lengths else None


def _prefix_name(storage: Storage, fingerprint: str, device: torch.device, provenance: str) -> str:
    return f"prefix {fingerprint} {_describe(device)} {storage.disk.backend.reads_with} {provenance}"


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(storage: Storage) -> dict[str, list[dict[str, Any]]]:
    """For each model on each device what was found, as `Calibration.as_dict` gives it."""
    try:
        found = json.loads(storage.files.read(CALIBRATIONS, CALIBRATIONS_NAME))
        sound = all(isinstance(one, dict) for some in found.values() for one in some)
    except (OSError, FormatError, ValueError, AttributeError, TypeError):  # none yet, or damaged
        sound = False
    return found if sound else {}  # as if nothing had been measured


def records_of(storage: Storage, name: str) -> list[dict[str, Any]]:
    """Return what was kept under a name."""
    return _read(storage).get(name, [])


def keep(storage: Storage, fingerprint: str, device: torch.device, found: Calibration) -> None:
    """Keep what was found, beside what was found for prompts of other lengths from the same place."""
    name = f"{fingerprint} {_describe(device)}"
    sound = [one for one in records_of(storage, name) if one.keys() >= _KEPT]
    others = [one for one in sound if one["tokens"] != found.tokens and one["cold"] == found.cold]
    keep_records(storage, name, [*others, found.as_dict()])


def keep_prefix_costs(
    storage: Storage, fingerprint: str, device: torch.device, provenance: str, found: list[PrefixCosts]
) -> None:
    """Keep what was found in place of what was."""
    keep_records(storage, _prefix_name(storage, fingerprint, device, provenance), [one.as_dict() for one in found])


def keep_records(storage: Storage, name: str, found: list[dict[str, Any]]) -> None:
    """Keep what was found under a name, in place of what was. Conversations that are suspended write here, too."""
    storage.disk.check_writable()
    with storage.disk.backend.locked():
        storage.files.write(CALIBRATIONS, CALIBRATIONS_NAME, encode_record(_read(storage) | {name: found}))
