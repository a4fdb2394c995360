"""Base of methods that attend to a part of the prefix: a budget, or a quality target that determines the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .base import Method

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_BUDGET = 0.25
"""Default share of the prefix that is attended to."""
UNMEASURED_BUDGET = 0.5
"""Budget for a quality target on a model that was not measured."""


@dataclass(frozen=True, kw_only=True)
class BudgetMethod(Method):
    """Method with full-attention layers that attend to a share of the prefix.

    Args:
        budget: Share of the prefix that is attended to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: Maximum mean loss of a prompt: KL divergence from full KV, in nats. It replaces `budget` by the
            smallest one with a mean loss of at most a quarter of this target, and half of it in 95 % of the questions,
            when `store.calibrate_quality` measured this model, or by 1 if there is none. The margin is for other text,
            which loses more than the measured text. Without a measurement the budget is 0.5.
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
        """This method with only the settings that its loss at a budget depends on; budget and others are defaults."""
        return replace(self, budget=type(self).budget, quality=None)

    def with_measured_budget(self, measured: Callable[[BudgetMethod], float | None]) -> Self:
        if self.quality is None:
            return self
        found = measured(self)
        return replace(self, budget=UNMEASURED_BUDGET if found is None else found)


def check_share(name: str, of: str, share: float) -> None:
    """Raise ConfigError if `share` is not a number above 0 and at most 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{name} is a share of {of}, above 0 and at most 1, not {share!r}")
