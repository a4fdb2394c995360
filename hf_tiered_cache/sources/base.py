"""The interface of KV sources: one for each layer, as long as the cache lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..errors import UnsupportedModelError
from ..geometry import LayerKV
from ..patches.rotary import PreRopeKV, RotaryTap
from ..restore.live import Choices, LayerAhead, Live
from ..restore.plan import Plan
from ..restore.prefetch import Prefetch
from ..restore.selective import SelectiveRestore
from ..restore.streamed import StreamedPrefix

LayerTensors = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""


class Pass(Protocol):
    """What the sources of one forward pass share."""

    tap: RotaryTap

    def rechoice(self, live: Live) -> Choices:
        """The choices of the pass, for sources that choose again."""

    def to_choose_by(
        self, layer: int, query: torch.Tensor, own_keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's own queries and keys of the same tokens, or the predicted ones where these make the choice."""

    def layers_ahead(self, layer: int) -> Iterator[LayerAhead]:
        """The layers whose queries can be predicted now that `layer` has chosen; none where nothing is predicted."""


class RestoringPass(Pass, Protocol):
    """A pass that restores something."""

    plan: Plan
    prefetch: Prefetch
    selection: SelectiveRestore | None
    """Chooses what layers hold, where that is a part of what is restored."""
    streamed: StreamedPrefix | None
    """All of it, for layers that attend to it without holding it."""

    def columns(self, layer: int, first: int, device: torch.device) -> torch.Tensor:
        """The columns that a layer computes, int64 `[n]` or `[batch, n]`, counted from `first`.

        Layers that compute the same get one tensor.
        """

    def park(self, layer: int) -> None:
        """A layer's keys and values were taken in, and wait for its queries to choose the rest."""

    def unpark(self) -> None:
        """It has its queries."""

    def cannot_select(self) -> UnsupportedModelError:
        """The model does not show what it attends to."""

    def hidden(self, first: int, device: torch.device) -> torch.Tensor | None:
        """Which columns from `first` on are neither restored nor computed, and seen by none: bool `[batch, n]`."""

    def take_filled(self, layer: int) -> dict[str, Any] | None:
        """The state of a layer's buffer that holds what is restored already, if there is one."""

    def may_fill(self, layer: int, filled: dict[str, Any]) -> bool:
        """Whether a layer runs for its attention alone, and the state of its buffer is kept for when it is computed."""

    def compares(self, layer: int) -> bool:
        """Whether a layer's stored and computed KV is to be compared now."""

    def compare(self, layer: int, stored: LayerTensors, computed: LayerTensors) -> None:
        """A layer's stored and computed KV, `[batch, heads, n, dim]` each, says what is computed from then on."""


class KVSource(Protocol):
    """Where a layer's keys and values come from: computed, restored, or chosen among what is restored.

    A pass that restores begins with `begin_pass`; of every pass come `append`, from the cache's `update`, and `attend`,
    from the registered attention function; `end_pass` ends it. The rest is transformers' interface of a cache layer.
    """

    window: int
    """Of a sliding layer, in tokens; else 0."""

    def settle(self) -> None:
        """A pass is about to begin, and has announced nothing yet: what is held may be held otherwise."""

    def begin_pass(self, restoring: RestoringPass) -> None:
        """Announce a pass that restores, so that masks are made for what the layer is going to hold."""

    def append(
        self, kind: LayerKV, pre_rope: PreRopeKV, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in what the layer has computed.

        Args:
            kind: what the model hands over for this layer.
            pre_rope: keys and values as they are stored.
            keys: `[batch, kv_heads, n, dim]`, rotated; values likewise.

        Returns:
            What the model takes on: all that the queries may see, unless `attend` says otherwise.
        """

    def attend(
        self,
        forward_pass: Pass,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """What queries attend to, or what they get of it, `[batch, heads, n, dim]`.

        Args:
            forward_pass: which is under way.
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, as the attention function was given them; values likewise.
            mask: of the queries and what the masks of the pass were announced.
            scaling: of the logits; None for dim ** -0.5.
        """

    def end_pass(self) -> None:
        """The pass is over, well or not; `rollback` undoes one that failed."""
