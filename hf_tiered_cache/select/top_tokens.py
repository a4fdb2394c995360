"""H2O's choice: single tokens, by the attention that the queries of each head pay them (Zhang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..transfers import to_host
from .mass import head_mass
from .selector import Selection, SelectionInput, Selector


@dataclass(frozen=True)
class TopTokens(Selector):
    """The tokens that get most attention, for each kv head its own: the query heads it serves vote together."""

    def choose(self, asked: SelectionInput) -> Selection:
        mass = head_mass(asked.query, asked.keys(None), asked.own_keys, asked.scaling)  # [kv_heads, tokens]
        return Selection(*to_host(top_of_each(mass, asked.count), mass.mean(0, keepdim=True)))


def top_of_each(mass: torch.Tensor, count: int) -> torch.Tensor:
    """For each row of `[rows, tokens]` the `count` largest, of equals the first: int64 `[rows, count]`, ascending."""
    return mass.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
