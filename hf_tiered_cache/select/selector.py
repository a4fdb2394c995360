"""Selector interface: chooses the restored tokens that the queries of a layer attend to. Selectors access no files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import ConfigError
from .chunks import ChunkMap
from .decode_index import DecodeIndex


@dataclass(frozen=True)
class SelectionInput:
    """Selection request for one row and one layer.

    Args:
        query: Queries of the last computed tokens, `[heads, queries, dim]`, rotated.
        own_keys: Keys of all computed tokens, `[kv_heads, own, dim]`, rotated; the last ones belong to the queries.
        keys: Function that returns the rotated keys of the restored tokens, `[kv_heads, tokens, dim]`: of the first n
            KV heads, or of all heads for None.
        scaling: Scale of the logits; None for dim ** -0.5.
        chunks: Chunks that hold the restored tokens.
        count: Number of tokens to select.
        indexes: Function that returns the decode indexes of these keys, for selectors that use them.
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
    """Result of a selector.

    Args:
        tokens: Selected tokens, int64 `[sets, count]`, ascending in each set: one set for all KV heads, or one per KV
            head.
        mass: Attention of the queries to each restored token, as far as known, float `[rows, tokens]`: one row for all
            KV heads, or one per KV head.
    """

    tokens: np.ndarray
    mass: np.ndarray


def check_selection(selector: object, tokens: np.ndarray, asked: SelectionInput, exactly: bool = False) -> None:
    """Check the tokens that a selector returned, so that a faulty selector cannot change what attention sees silently.

    Args:
        selector: The selector, for the message.
        tokens: Its result, see `Selection.tokens`.
        asked: Selection request.
        exactly: Whether `asked.count` tokens must be selected, not fewer.

    Raises:
        ConfigError: The tokens are too many, too few, not ascending, duplicate, or not restored tokens.
    """
    name, sets = type(selector).__name__, (1, asked.own_keys.shape[0])
    if tokens.ndim != 2 or tokens.dtype != np.int64 or len(tokens) not in sets:
        form = f"{tokens.dtype} of shape {list(tokens.shape)}"
        raise ConfigError(f"{name} selected {form}; int64 [sets, tokens] is expected, with {sets[0]} or {sets[1]} sets")
    count = tokens.shape[1]
    if not 1 <= count <= asked.count or (exactly and count < asked.count):
        raise ConfigError(f"{name} selected {count} tokens where {asked.count} were asked for")
    if tokens[:, 0].min() < 0 or tokens[:, -1].max() >= asked.chunks.tokens or (np.diff(tokens, axis=1) <= 0).any():
        raise ConfigError(
            f"{name} selected tokens that are not distinct, ascending and from 0 to {asked.chunks.tokens - 1}"
        )


@dataclass(frozen=True)
class Selector(ABC):
    """Base class of selectors. A selection is made once per period of layers.

    Args:
        period: Number of consecutive full-attention layers that share a selection, made at the first of them.
        solo_layers: Number of leading full-attention layers that each select for themselves, before the periods begin.
        ahead: Number of full-attention layers between a selection for the prompt and the hidden states that its queries
            are predicted from, so that its blocks arrive earlier. 0 disables prediction.
    """

    period: int = 1
    solo_layers: int = 0
    ahead: int = field(default=0, kw_only=True)

    @property
    def per_head(self) -> bool:
        """True if each KV head selects among the chunks of its own blocks. If not, all use the first head's chunks."""
        return False

    @property
    def index(self) -> tuple[type[DecodeIndex], int] | None:
        """Type of the decode index that the selector uses, and tokens per chunk; None to use the stored keys."""
        return None

    @property
    def probe_heads(self) -> int | None:
        """Number of KV heads whose keys are read first, and prefetched; None for all."""
        return None

    @abstractmethod
    def choose(self, asked: SelectionInput) -> Selection:
        """Select `asked.count` tokens to attend to."""

    def choose_again(self, asked: SelectionInput, held: np.ndarray) -> np.ndarray:
        """Reselect for a decoded token.

        Args:
            asked: Selection request for as many tokens as `held`.
            held: Tokens of the last selection, int64 `[sets, tokens]`, in any order.

        Returns:
            Tokens of the new selection, int64 `[sets, tokens]`, ascending in each set.
        """
        return self.choose(asked).tokens

    def choose_rows(self, asked: Iterable[SelectionInput]) -> Iterator[Selection]:
        """Select for each row of a batch, in order: as many tokens as requested, or as few as the selector can do with.

        The rows share one mask, so all rows get the same number of tokens. A row with fewer restored tokens gets all of
        them.
        """
        return map(self.choose, asked)
