"""ContiguousKV: one chunk is what is scored, stored, read, cached and evicted (its paper, Section 4)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ConfigError
from ..geometry import Geometry, KeyIndex
from ..restore.selective import PREFETCHED, Prefetched
from ..select.chunks import budgeted_tokens
from ..select.selector import Selector
from ..select.top_chunks import TopChunks
from .budget import DEFAULT_BUDGET, BudgetMethod, check_share


@dataclass(frozen=True, kw_only=True)
class ContiguousKV(BudgetMethod):
    """The suffix attends to the chunks of the prefix that it pays most attention to.

    A chunk is what a block holds. Ours holds tokens of one layer and kv head, and each head chooses its own. The
    paper's holds all heads of several layers, which share a choice: real heads attend to different tokens, so sharing
    loses most of what a small budget could buy (`bench/choices.py`).

    Args:
        budget: share of the prefix's chunks that a layer attends to, in (0, 1], rounded down to whole chunks, but to
            one at least: 5 % of 512 tokens are 24. At 1 the output is the exact method's.
        quality: see `BudgetMethod`.
        mass: of the attention that all restored tokens get together of the tokens that choose, the share, in (0, 1],
            that the chunks of each choice must hold: the fewest that do, best first, one at least, and no more than
            `budget` buys. Rows of a batch take as many as the one that needs most; a decoded token chooses again among
            as many as the prompt took. Where the budget is 1 nothing is chosen. None takes all that the budget buys,
            as in the paper.
        chunk_tokens: c, tokens of a chunk (Section 4.2). 16 is the paper's; ours is 8.
        per_head: whether each kv head chooses for itself, and has blocks of its own: ours. The paper's heads share a
            choice.
        reorder: whether tokens are laid out by the attention that earlier prompts paid them, for each kv head its own
            order, in the background, after 1, 2, 4, 8, ... prompts: a chunk then holds tokens that are wanted together,
            wherever they stand in the prompt. The exact method reads such segments as well. Ours; the idea is
            IMPRESS's, which has one order for all heads.
        period: layers that share a choice (Section 4.3.1). 8 is the paper's; ours is 1.
        subperiod: layers whose KV of a chunk lies in one block, and is waited for together (Section 5.1). 4 is the
            paper's; None takes the most that divide the period, 4 at most.
        identify: what the choice is made from: "keys", all keys of a period's first layer, read as they are needed, as
            in the paper; "probe_heads", those of the first `probe_heads` kv heads; "index", all keys of that layer in
            eight bits, made at the first request and kept beside the segment, which stay in memory
            (`KVStore(index_memory=...)`) once they were read: ours.
        probe_heads: see `identify`.
        solo_layers: the first layers that each choose for themselves, in blocks of their own, before the periods begin.
            0 is the paper's.
        rechoose: whether each decoded token chooses again, by its own queries: ours. False is the paper's: the answer
            attends to what the prompt's suffix has chosen.
        gain: share of a decoded token's attention, in [0, 1), by which its choice must hold more than what is there, to
            take its place: what gains less is not worth the blocks that it takes. Ours is 0.05; 0 takes each choice.
        queries: of the prompt's new tokens the last so many choose: ours, which takes less time. 0 is the paper's: all.
        ahead: layers between a choice for the prompt and the hidden states whose queries make it, as these layers
            would ask: so blocks are on their way while the layers between run. With `identify="index"` only. 0 is the
            paper's, which chooses by a layer's own queries, and waits. (Ours; the idea is InfiniGen's, Lee et al.,
            OSDI 2024.)
    """

    geometry: Geometry = field(init=False, default=Geometry())
    mass: float | None = None
    chunk_tokens: int = 8
    per_head: bool = True
    reorder: bool = True
    period: int = 1
    subperiod: int | None = None
    identify: Literal["index", "keys", "probe_heads"] = "index"
    probe_heads: int = 1
    solo_layers: int = 0
    rechoose: bool = True
    gain: float = 0.05
    queries: int = 8
    ahead: int = 0

    policy = "attention"
    reorder_every = 1

    def __post_init__(self) -> None:
        if self.mass is not None:
            check_share("mass", "the attention", self.mass)
        if self.identify not in ("index", "keys", "probe_heads"):
            raise ConfigError(f'identify is "index", "keys" or "probe_heads", not {self.identify!r}')
        if isinstance(self.gain, bool) or not isinstance(self.gain, int | float) or not 0 <= self.gain < 1:
            raise ConfigError(f"gain is a share of a token's attention, 0 or more and below 1, not {self.gain!r}")
        for name, of, zero in (("queries", "tokens", "all"), ("ahead", "layers", "none")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is a number of {of}, 0 for {zero}, not {value!r}")
        if self.per_head and self.identify == "probe_heads":
            raise ConfigError("probe heads choose for all heads: pass per_head=False, too")
        copies = KeyIndex(self.period, self._heads)  # it checks them, too
        index, heads = None if self.identify == "index" else copies, 1 if self.per_head else None
        cut = Geometry(self.chunk_tokens, self._subperiod, heads, index=index, solo_layers=self.solo_layers)
        object.__setattr__(self, "geometry", cut)
        super().__post_init__()

    @classmethod
    def paper(cls, budget: float = DEFAULT_BUDGET, **settings: Any) -> ContiguousKV:
        """As published: a choice for every 8 layers, by all keys of the first one, for the prompt and its answer."""
        published: dict[str, Any] = {
            "chunk_tokens": 16, "per_head": False, "reorder": False, "period": 8, "subperiod": 4, "identify": "keys",
            "solo_layers": 0, "rechoose": False, "queries": 0, "ahead": 0,
        }  # fmt: skip
        return cls(budget, **(published | settings))

    @property
    def _subperiod(self) -> int:
        if self.subperiod is not None:
            return self.subperiod
        return max(size for size in (1, 2, 3, 4) if self.period % size == 0)

    @property
    def _heads(self) -> int | None:
        return self.probe_heads if self.identify == "probe_heads" else None

    def token_budget(self, prefix_tokens: int) -> int:
        return budgeted_tokens(self.budget, prefix_tokens, self.chunk_tokens)

    def misfit(self, geometry: Geometry) -> str:
        if self.identify == "index":
            geometry = replace(geometry, index=None)  # keys that are there once more do no harm
        if self.selects and self.period % self._subperiod:
            fitting = max(size for size in range(1, self._subperiod) if self.period % size == 0)
            return (
                f"subperiod={self._subperiod} does not divide period={self.period}: blocks hold layers of two periods, "
                f"and are read for each; pass subperiod={fitting}, and call store.relayout(method)"
            )
        return super().misfit(geometry)

    @property
    def prefetches(self) -> Collection[Prefetched]:
        # heads of different layers choose different tokens, and their blocks hold different ones
        return PREFETCHED - {"guesses"} if self.per_head else PREFETCHED

    def selector(self) -> Selector:
        resident = self.identify == "index"
        ahead = self.ahead if resident else 0
        return TopChunks(
            self.period,
            self.solo_layers,
            self._heads,
            resident,
            self.queries,
            self.mass,
            self.gain,
            self.per_head,
            ahead=ahead,
            choose_ahead=ahead > 0,
        )
