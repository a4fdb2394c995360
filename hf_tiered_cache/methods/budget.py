"""Methods that attend to a part of the prefix: a budget, or a target that says which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .base import Method

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_BUDGET = 0.25
"""Share of the prefix that is attended to, unless told otherwise."""
UNMEASURED_BUDGET = 0.5
"""Budget of a target on a model that was not measured."""


@dataclass(frozen=True, kw_only=True)
class BudgetMethod(Method):
    """A method whose layers with full attention attend to a share of the prefix.

    Args:
        budget: this share, in (0, 1]. At 1 the output is the exact method's.
        quality: KL divergence from full KV, in nats, that a prompt may lose in the mean: the least budget that lost a
            quarter of it when `store.calibrate_quality` measured this model takes the place of `budget`, or 1 if none
            did; other text loses more than what was measured. Where nothing was measured it is a half.
    """

    budget: float = field(default=DEFAULT_BUDGET, kw_only=False)
    quality: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("budget", "the prefix", self.budget)
        target = self.quality
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise ConfigError(f"quality is a loss in nats above 0, such as 0.02, not {target!r}")

    @property
    def selects(self) -> bool:
        return self.budget < 1

    @property
    def as_measured(self) -> Self:
        """Settings that its loss at a budget depends on; the others, and the budget, are the defaults."""
        return replace(self, budget=type(self).budget, quality=None)

    def with_measured_budget(self, measured: Callable[[BudgetMethod], float | None]) -> Self:
        if self.quality is None:
            return self
        found = measured(self)
        return replace(self, budget=UNMEASURED_BUDGET if found is None else found)


def check_share(name: str, of: str, share: float) -> None:
    """Raises ConfigError if it is none."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{name} is a share of {of}, above 0 and at most 1, not {share!r}")
