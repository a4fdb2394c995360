"""The selector interface: says which restored tokens the queries of a layer attend to. It knows no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .chunks import ChunkMap
from .decode_index import DecodeIndex


@dataclass(frozen=True)
class SelectionInput:
    """What a selector is asked, for one row and layer.

    Args:
        query: `[heads, queries, dim]`, rotated: of the computed tokens.
        own_keys: `[kv_heads, own, dim]`, rotated: of all computed tokens; the last are those of the queries.
        keys: gives the restored tokens' rotated keys, `[kv_heads, tokens, dim]`, or those of the first n kv heads.
        scaling: of the logits, or None for dim ** -0.5.
        chunks: how the restored tokens are cut.
        count: how many of them to choose.
        indexes: gives the indexes of these keys, for selectors that go by such.
    """

    query: torch.Tensor
    own_keys: torch.Tensor
    keys: Callable[[int | None], torch.Tensor]
    scaling: float | None
    chunks: ChunkMap
    count: int
    indexes: Callable[[], Sequence[DecodeIndex]] = tuple


@dataclass(frozen=True)
class Selection:
    """What a selector answers.

    Args:
        tokens: int64 `[sets, count]`, each ascending: one set for all kv heads, or one for each.
        mass: float `[rows, tokens]`, what each restored token gets of the queries' attention, as far as it is known:
            one row for all kv heads, or one for each.
    """

    tokens: np.ndarray
    mass: np.ndarray


@dataclass(frozen=True)
class Selector(ABC):
    """Chooses, once for each period.

    Args:
        period: consecutive layers with full attention that share a choice, made at the first of them.
        solo_layers: the first layers with full attention, which each choose for themselves before the periods begin.
        ahead: layers with full attention between a choice and the hidden states that it is predicted from, so that what
            it is expected to want is fetched meanwhile. 0: nothing is predicted.
        choose_ahead: whether the predicted queries make the choice itself.
    """

    period: int = 1
    solo_layers: int = 0
    ahead: int = field(default=0, kw_only=True)
    choose_ahead: bool = field(default=False, kw_only=True)

    @property
    def per_head(self) -> bool:
        """Whether each kv head chooses among the chunks of its own blocks; else the first one's stand for all."""
        return False

    @property
    def index(self) -> tuple[type[DecodeIndex], int] | None:
        """The kind of index that it chooses by, and the tokens of its chunks; None for stored keys as they are."""
        return None

    @property
    def probe_heads(self) -> int | None:
        """How many kv heads' keys are looked at first, or None for all: these are fetched ahead."""
        return None

    @abstractmethod
    def choose(self, asked: SelectionInput) -> Selection:
        """The tokens to attend to: as many as asked for."""

    def choose_again(self, asked: SelectionInput, held: np.ndarray) -> np.ndarray:
        """Choose for a decoded token.

        Args:
            asked: as many tokens as `held`.
            held: int64 `[sets, tokens]`, in any order: what was chosen last.

        Returns:
            int64 `[sets, tokens]`, ascending: what is to be held from now on.
        """
        return self.choose(asked).tokens

    def choose_rows(self, asked: Iterable[SelectionInput]) -> Iterator[Selection]:
        """For the rows of a batch, in order: as many as asked for, or as few as the selector can do with.

        They stand side by side, so all rows get as many; one with fewer restored tokens gets all that it has.
        """
        return map(self.choose, asked)
