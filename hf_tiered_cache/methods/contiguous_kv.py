"""ContiguousKV, and IMPRESS, with which its paper compares: attention to a part of the prefix (Section 4 of both)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, unknown_name
from ..selection.selectors import ProbeHeads, Selector, TopChunks, budgeted_tokens
from ..store.geometry import Geometry, KeyIndex
from .base import DEFAULT_BUDGET, BudgetMethod, is_count, is_number, require


@dataclass(frozen=True, kw_only=True)
class ContiguousKV(BudgetMethod):
    """ContiguousKV: new tokens attend to the chunks of a restored prefix that they pay most attention to.

    A block, on disk and in memory, holds exactly one chunk, so restoring a selection reads no other tokens. In the
    paper a chunk has the KV of all heads and several layers, which share a selection. In this implementation a chunk
    has the KV of one layer and one KV head, and each head selects its own chunks: real heads attend to different
    tokens, so a shared selection loses most of what a small budget could buy (`bench/choices.py`). Also ours are
    selection by an int8 index of the keys, reordered tokens, and reselection for each decoded token.
    `ContiguousKV.paper()` has the paper's settings.

    Args:
        budget: Share of the prefix's chunks that a layer attends to, in (0, 1], rounded down to whole chunks, at least
            one: 5 % of 512 tokens are 24 tokens. At 1 the output is that of `Exact`.
        quality: Loss that chooses the budget, in place of `budget`: see `BudgetMethod`.
        chunk_tokens: Tokens per chunk, c (Section 4.2). The paper's is 16; ours is 8.
        per_head: Whether each KV head selects for itself and has its own blocks (ours). The paper's heads share a
            selection.
        reorder: Whether segments are rewritten in the background, with tokens in the order of the attention that
            earlier prompts paid them, for each KV head separately, after 1, 2, 4, 8, ... prompts. A chunk then holds
            tokens that are needed together, wherever they are in the prompt. `Exact` reads such segments, too. Ours;
            the idea is IMPRESS's, which has one order for all heads.
        period: Number of layers that share a selection (Section 4.3.1). The paper's is 8; ours is 1. A block has the KV
            of a subperiod (Section 5.1): the largest divisor of the period, at most 4 layers.
        identify: Keys that the selection is made from. "keys": all keys of a period's first layer, read when needed, as
            in the paper. "index": all keys of that layer in int8 (ours), built by `precompute` or at the first request,
            kept as a sidecar, and in memory once read (`KVStore(index_memory=...)`).
        solo_layers: Number of leading layers that each select for themselves, with their own blocks, before the periods
            begin. The paper's is 0.
        reselect: Whether each decoded token reselects by its own queries (ours). False is the paper's: the answer
            attends to the selection of the prompt's suffix.
        gain: Share of a decoded token's attention, in [0, 1), by which a new selection must exceed the current one to
            replace it. A smaller gain is not worth the blocks to read. Ours is 0.05; 0 replaces it always.
        queries: Number of trailing new tokens of the prompt that select. Ours is 8, which takes less time; 0 is the
            paper's: all.
    """

    geometry: Geometry = field(init=False, default=Geometry())
    chunk_tokens: int = 8
    per_head: bool = True
    reorder: bool = True
    period: int = 1
    identify: Literal["index", "keys"] = "index"
    solo_layers: int = 0
    reselect: bool = True
    gain: float = 0.05
    queries: int = 8

    policy = "attention"
    reorder_every = 1

    def __post_init__(self) -> None:
        if self.identify not in ("index", "keys"):
            raise ConfigError(unknown_name("value of identify", self.identify, ["index", "keys"]))
        expected = "a share of a token's attention, a float of at least 0 and below 1"
        require(is_number(self.gain, 0) and self.gain < 1, "gain", expected, self.gain)
        require(is_count(self.queries), "queries", "a number of tokens, an int, or 0 for all", self.queries)
        copies = KeyIndex(self.period, None)  # also validates the period
        index, heads = None if self.identify == "index" else copies, 1 if self.per_head else None
        subperiod = max(size for size in (1, 2, 3, 4) if self.period % size == 0)
        geometry = Geometry(self.chunk_tokens, subperiod, heads, index=index, solo_layers=self.solo_layers)
        object.__setattr__(self, "geometry", geometry)
        super().__post_init__()

    @classmethod
    def paper(cls, budget: float = DEFAULT_BUDGET, **settings: Any) -> ContiguousKV:
        """Return the paper's settings: one selection per 8 layers, by all keys of the first, for prompt and answer."""
        published: dict[str, Any] = {
            "chunk_tokens": 16, "per_head": False, "reorder": False, "period": 8, "identify": "keys", "solo_layers": 0,
            "reselect": False, "queries": 0,
        }  # fmt: skip
        return cls(budget, **(published | settings))

    def token_budget(self, prefix_tokens: int) -> int:
        return budgeted_tokens(self.budget, prefix_tokens, self.chunk_tokens)

    def selector(self) -> Selector:
        resident = self.identify == "index"
        return TopChunks(self.period, self.solo_layers, resident, self.queries, self.gain, self.per_head)


@dataclass(frozen=True, kw_only=True)
class Impress(BudgetMethod):
    """IMPRESS: each layer attends to the tokens that a few probe heads pay most attention to, if these heads agree.

    If they do not agree, each KV head selects its own tokens.

    Args:
        budget: Share of the prefix's tokens that a head attends to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: Loss that chooses the budget, in place of `budget`: see `BudgetMethod`.
        chunk_tokens: Consecutive tokens in a block of keys or of values. The whole block is read for one token.
        probe_heads: Number of probe KV heads. Their keys are stored separately (Section 4.1), so that no key is read
            twice: keys of other heads are read when they are selected, or all of them if the probes disagree. With
            grouped-query attention, a probe represents its group. For models with four KV heads or fewer, two probes
            are enough.
        alpha: Exponent of the similarity at which probes agree: see `ProbeHeads`.
        reorder: Whether the tokens of a segment are ordered by importance, layer by layer, once prompts have shown it
            (Section 4.4.1), so that selected tokens are in few blocks. `Exact` reads such segments, too.
    """

    geometry: Geometry = field(init=False, default=Geometry())
    chunk_tokens: int = 64
    probe_heads: int = 3
    alpha: float = 0.6
    reorder: bool = True

    policy = "importance"

    def __post_init__(self) -> None:
        geometry = Geometry(self.chunk_tokens, 1, self.probe_heads, split_kv=True)
        object.__setattr__(self, "geometry", geometry)
        super().__post_init__()

    def selector(self) -> Selector:
        return ProbeHeads(heads=self.probe_heads, alpha=self.alpha)
