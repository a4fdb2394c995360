"""What one forward pass asks for: its tokens, padding and positions, and whether they are such as can be stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_UNDERSTOOD = frozenset(
    {
        *("input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position", "use_cache"),
        *("logits_to_keep", "return_dict", "output_attentions", "output_hidden_states"),
    }
)
"""Arguments of forward that say nothing of the KV beyond tokens and positions. Others may: images, embeddings, …"""

_PER_TOKEN = ("input_ids", "position_ids", "cache_position")


@dataclass(frozen=True)
class Request:
    """The arguments of one pass, understood.

    Args:
        kwargs: all arguments of forward by name.
        pads: for each row the columns of left padding, where it begins a sequence; else None.
        revocable: columns at the end that `generate` may take back (candidates of assisted decoding).
        must_compute: columns at the end whose outputs are asked for.
    """

    kwargs: dict[str, Any]
    pads: list[int] | None
    revocable: int
    must_compute: int

    @property
    def ids(self) -> torch.Tensor:
        """int `[rows, columns]`."""
        return self.kwargs["input_ids"]

    @property
    def columns(self) -> int:
        return self.ids.shape[1]

    def only(self, columns: np.ndarray, base: int, pads: list[int]) -> dict[str, Any]:
        """The arguments for computing only some of the columns.

        Args:
            columns: int64, ascending.
            base: columns that the cache holds already.
            pads: of each row.
        """
        kwargs = dict(self.kwargs)
        if len(columns) < self.columns - columns[0]:  # of a suffix the model knows positions and length itself
            device = self.ids.device
            if kwargs.get("position_ids") is None:
                positions = torch.arange(base, base + self.columns) - torch.tensor(pads).unsqueeze(1)
                kwargs["position_ids"] = positions.clamp(min=0).to(device)  # [rows, columns]
            if kwargs.get("attention_mask") is None:
                kwargs["attention_mask"] = torch.ones(len(pads), base + self.columns, dtype=torch.int64, device=device)
        index = torch.from_numpy(columns)
        for name in _PER_TOKEN:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., index.to(kwargs[name].device)]
        return kwargs


def understand(kwargs: dict[str, Any], base: int, pads: list[int] | None) -> Request | str:
    """Read a pass's arguments.

    Args:
        kwargs: all arguments of forward by name.
        base: columns that the cache holds already.
        pads: of the rows, known from earlier passes; None for the first.

    Returns:
        The request, or why its KV can neither be stored nor restored.
    """
    ids = kwargs.get("input_ids")
    if ids is None or ids.ndim != 2:
        return "it has no token ids"
    for name, value in kwargs.items():
        if name not in _UNDERSTOOD and _holds_tensor(value):
            return f"`{name}` may change what tokens mean"
    columns = ids.shape[1]
    decoding = pads is not None and columns == 1
    found = pads if decoding else _padding(kwargs.get("attention_mask"), ids, base)
    if found is None:
        return "the attention mask is more than left padding"
    if pads is not None and found != pads:
        return "the attention mask has changed"
    if not decoding and not _counts_on(kwargs.get("position_ids"), base, found, columns):
        return "the positions do not count the tokens"
    keep = kwargs.get("logits_to_keep", 0)
    known = isinstance(keep, int) and keep > 0
    return Request(kwargs, found, keep - 1 if known else 0, min(keep, columns) if known else columns)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _padding(mask: torch.Tensor | None, ids: torch.Tensor, base: int) -> list[int] | None:
    """Columns of left padding of each row, or None if the mask is anything else."""
    rows, columns = ids.shape
    if mask is None:
        return [0] * rows
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, base + columns):
        return None
    present = mask.to("cpu", torch.bool)
    pads = (~present).sum(dim=1)
    if not torch.equal(present, torch.arange(base + columns) >= pads.unsqueeze(1)):
        return None
    return pads.tolist()


def _counts_on(positions: torch.Tensor | None, base: int, pads: list[int], columns: int) -> bool:
    """Whether each token's position is its number in the row."""
    if positions is None:
        return not any(pads)  # the model would count the padding too
    if positions.ndim != 2 or positions.shape[1] != columns:
        return False
    numbers = torch.arange(base, base + columns) - torch.tensor(pads).unsqueeze(1)  # [rows, columns]
    return bool(((positions.cpu() == numbers) | (numbers < 0)).all())
