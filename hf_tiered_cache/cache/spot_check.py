"""Spot checks: some restored tokens are computed again now and then, and compared with what was restored.

The fingerprint describes what computes a pass. Spot checks find what no description can: an operator replaced by an
extension, a hardware fault, a bug in this library. They cost about one percent of the time of requests.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, with_type
from ..restore.plan import BudgetPlan, Plan
from ..restore.rows import SegmentSlice
from ..store import EXACT
from ..store.geometry import HASH_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.1
"""Maximum relative distance: the median over the tokens, in the layer where it is largest.

The second value applies to models that compute with 16 bits, or quantize what they compute with. Rounding errors are
smaller by a factor of ten.
"""


class SpotChecks:
    """Scheduler of spot checks, and record of what they found.

    A check is due when enough tokens were restored and enough time was spent on requests. It begins with a random
    credit, so that short processes check as often as long ones.

    Args:
        share: Fraction of restored tokens and of request time that checks may take; 0 for none, 1 to check every
            request.

    Raises:
        ConfigError: The share is not between 0 and 1.
    """

    def __init__(self, share: float) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(
                f"spot_checks must be a fraction of restored tokens between 0 and 1, not {with_type(share)}"
            )
        self.share = share
        self.doubted: set[str] = set()
        """Fingerprints under which wrong KV was stored."""
        self._lock = threading.Lock()
        self._random = random.Random()
        self._seconds: float | None = None  # time credit; None before the first request
        self._tokens = float(HASH_TOKENS)
        self._cost = 0.0

    @staticmethod
    def first_credit() -> float:
        """Return the initial time credit, as a fraction of the cost of a check."""
        return random.random()

    def is_due(self, tokens: int, seconds: float, restoring_seconds: float) -> bool:
        """Note a request that restored `tokens` tokens in `seconds`, and return whether to check some of them.

        The pass that restored them took `restoring_seconds`, the expected cost of the first check.
        """
        if not self.share or not tokens:
            return False
        with self._lock:
            self._cost = self._cost or restoring_seconds
            if self._seconds is None:
                self._seconds = self.first_credit() * self._cost
            self._tokens = min(self._tokens + self.share * tokens, 64.0 * HASH_TOKENS)
            self._seconds = min(self._seconds + self.share * seconds, 4 * self._cost)
            return self.share == 1 or (self._tokens >= HASH_TOKENS and self._seconds >= self._cost)

    def spend(self, seconds: float) -> None:
        """Note a check that took `seconds`."""
        with self._lock:
            self._tokens, self._seconds = self._tokens - HASH_TOKENS, (self._seconds or 0.0) - seconds
            self._cost = seconds

    def choose(self, run: RestoredRun, held_from: int) -> tuple[int, SegmentSlice] | None:
        """Return the first token to check, a multiple of 16, and the segment that holds it; None if there is none.

        `held_from` is the first token that at least one layer still holds.
        """
        choices = []
        for piece in run.pieces:
            first = max(1, -(-max(piece.at, held_from) // HASH_TOKENS))
            choices += [(HASH_TOKENS * n, piece) for n in range(first, (piece.at + piece.count) // HASH_TOKENS)]
        return self._random.choice(choices) if choices else None


@dataclass(frozen=True)
class RestoredRun:
    """Slices of segments with exact KV that a pass restored for its first row.

    The pass began at `began`, by `time.perf_counter`, and took `seconds`.
    """

    pieces: tuple[SegmentSlice, ...]
    began: float
    seconds: float

    @classmethod
    def of(cls, plan: Plan, began: float) -> RestoredRun | None:
        """Return what can be checked after a pass that followed `plan`, or None."""
        if isinstance(plan, BudgetPlan) or not plan.exact or plan.suffix is None:
            return None
        slices = next((group.pieces for group in plan.groups if 0 in group.rows), ())
        pieces = tuple(piece for piece in slices if piece.reader.header.provenance == EXACT)
        return cls(pieces, began, time.perf_counter() - began) if pieces else None


def deviation(stored_kv: Sequence[Any], computed_kv: Sequence[Any], pad: int, first: int) -> float | None:
    """Return how far restored keys and values are from computed ones, in the layer where that is farthest.

    It is the median over the 16 tokens from `first` on, after the `pad` of the first row, of the distance relative to
    the computed values; None if no layer holds the tokens. The last tokens of `computed_kv` are compared.
    """
    largest = None
    for layer, again_layer in zip(stored_kv, computed_kv, strict=True):
        begin = pad + first - (layer.num_positions - layer.held)
        if begin < 0 or again_layer.held < HASH_TOKENS or begin + HASH_TOKENS > layer.held:
            continue  # a layer with a sliding window no longer holds them
        for tensor, again in ((layer.keys, again_layer.keys), (layer.values, again_layer.values)):
            was = tensor[:1, :, begin : begin + HASH_TOKENS].float().transpose(1, 2).flatten(2)  # [1, tokens, values]
            now = again[:, :, -HASH_TOKENS:].float().transpose(1, 2).flatten(2)
            far = (was - now).norm(dim=-1) / now.norm(dim=-1).clamp_min(1e-12)
            median = float(far.median()) if bool(far.isfinite().all()) else float("inf")
            largest = median if largest is None else max(largest, median)
    return largest


def tolerance(model: PreTrainedModel) -> float:
    """Return the largest deviation that rounding explains."""
    quantizes = any("quantized" in type(module).__module__ for module in model.modules())
    return _COARSE_TOLERANCE if quantizes or model.dtype.itemsize < 4 else _TOLERANCE


def held_from(layers: Sequence[Any]) -> int | None:
    """Return the first position that some layer holds; None if a layer holds neither all positions nor a window."""
    from ..layers import DenseSource  # a store alone needs no transformers

    if not all(isinstance(layer, DenseSource) and layer.is_initialized and not layer.selects for layer in layers):
        return None
    return min(layer.num_positions - layer.held for layer in layers)
