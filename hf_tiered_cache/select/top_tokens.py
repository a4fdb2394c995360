"""H2O's selection: single tokens, by the attention of the queries of each head (Zhang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..transfers import to_host
from .mass import head_mass
from .selector import Selection, SelectionInput, Selector


@dataclass(frozen=True)
class TopTokens(Selector):
    """Selector of the tokens with the most attention, for each KV head; the query heads of a KV head are summed."""

    def choose(self, asked: SelectionInput) -> Selection:
        mass = head_mass(asked.query, asked.keys(None), asked.own_keys, asked.scaling)  # [kv_heads, tokens]
        return Selection(*to_host(top_of_each(mass, asked.count), mass.mean(0, keepdim=True)))


def top_of_each(mass: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest columns of each row of `[rows, tokens]`, first on ties: int64 ascending."""
    return mass.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
