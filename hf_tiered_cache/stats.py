"""Statistics of requests and stores, counted and printable."""

from __future__ import annotations

import copy
import html
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from .units import format_bytes

TIERS = ("device", "host", "disk")
"""Fastest first. Statistics are tables by these names: a further tier is one name more."""
_MOST_PASSAGES = 8
"""Of those not found whole, so many are printed."""


def render(table: Table) -> str:
    """The table as plain text."""
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def render_html(table: Table) -> str:
    """The table as HTML, for notebooks."""

    def row(tag: str, cells: Iterable[object]) -> str:
        styled = zip(cells, table.columns, strict=True)
        return "".join(f'<{tag} style="text-align: {c.justify}">{html.escape(str(cell))}</{tag}>' for cell, c in styled)

    title = f"<caption>{html.escape(str(table.title))}</caption>" if table.title else ""
    head = f"<tr>{row('th', (c.header for c in table.columns))}</tr>" if table.show_header else ""
    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in zip(*(c.cells for c in table.columns), strict=True))
    return f"<table>{title}{head}{body}</table>"


@dataclass
class TierStats:
    """Traffic of one request with one tier."""

    blocks: int = 0
    """Blocks this tier gave."""
    bytes: int = 0
    """Their bytes, padding included."""
    hits: int = 0
    """Blocks looked for here and found."""
    misses: int = 0
    """Blocks looked for here and not found."""


@dataclass
class TierUse:
    """What a store has in one tier."""

    bytes: int = 0
    budget: int | None = 0
    """Bytes that are never exceeded, or None."""


@dataclass(frozen=True)
class PassageStats:
    """A stored passage in a prompt."""

    row: int
    """Of the batch; the first one of those that are alike."""
    at: int
    """The token of the row at which it begins, or would if its first tokens were there."""
    tokens: int
    """That are stored of it; of one that was only said to begin here, how many stand there."""
    found: int
    """Of these, the ones that stand in the prompt: they are restored, but for those that the method computes."""
    why: str = ""
    """Why the others are not, or ""."""
    segment: str = ""
    label: str = ""

    @property
    def missed(self) -> int:
        """Tokens of it that were not found."""
        return self.tokens - self.found


@dataclass
class RequestStats:
    """One request's statistics: every figure is counted, none estimated.

    `bytes_read` is what came from the disk; `bytes_used` is the part of it that went into attention.
    `io_seconds` is time during which at least one read was under way, `stall_seconds` the part of the request in
    which the model waited for KV, and `load_idle_seconds` that in which no read was under way, but another one followed
    in the same pass.
    """

    requests: int = 0
    """Prompts: 1, or more where a cache went on, and in sums."""
    tokens_restored: int = 0
    tokens_recomputed: int = 0
    """Of these, the ones that layers computed all the same, since it was quicker, or since other text stands before a
    passage now: a mean over the layers. Where a question went through layers by itself first, it counts here.
    """
    tokens_computed: int = 0
    tokens_stored: int = 0
    """Handed to the store; what it then has no room for does not count."""
    tokens_kept: int = 0
    """Held by a cache that went on, and standing in its next prompt."""
    tokens_dropped: int = 0
    """Held by a cache that went on with a prompt in which they do not stand."""
    tokens_attended: int = 0
    """Of those restored, the ones that layers with full attention could attend to: all, or what a budget bought, or as
    few of that as hold the share of attention that was asked for: a mean over these layers, where it differs.
    """
    tiers: dict[str, TierStats] = field(default_factory=lambda: {name: TierStats() for name in TIERS})
    """By name, fastest first. `stats.host` is short for `stats.tiers["host"]`, and so with the others."""
    bytes_read: int = 0
    bytes_used: int = 0
    bytes_identifying: int = 0
    """Of `bytes_read`, those from which it was chosen what to attend to."""
    bytes_guessed: int = 0
    """Of `bytes_read`, those that were fetched for a choice that fell otherwise."""
    bytes_brought: int = 0
    """Of the blocks that layers were given, padding included, whichever tier had them: `bytes_read`, if none were in
    memory, and no gap was read through. A block that is asked for again while decoding counts again."""
    brought_identifying: int = 0
    """Of `bytes_brought`, blocks that a choice was made from, and that hold nothing of what was chosen."""
    brought_guessed: int = 0
    """Of `bytes_brought`, blocks for a choice that fell otherwise."""
    index_bytes: int = 0
    """Of the indexes in memory that prompts chose by: keys in eight bits, or indexes of chunks."""
    ahead_blocks: int = 0
    """Blocks that were fetched ahead of a decoding layer, by the queries that were predicted for it."""
    ahead_hits: int = 0
    """Of these, the ones that it asked for; the others were fetched for nothing."""
    ahead_misses: int = 0
    """Blocks that decoding layers asked for and had to wait for from there on."""
    io_seconds: float = 0.0
    stall_seconds: float = 0.0
    load_idle_seconds: float = 0.0
    match_seconds: float = 0.0
    select_seconds: float = 0.0
    """Choosing what to attend to, and waiting for what that takes."""
    select_stall_seconds: float = 0.0
    """Of `select_seconds`, and of `stall_seconds`, the waiting."""
    index_seconds: float = 0.0
    """Of `select_seconds`, making the indexes that chunks are chosen by, where they are not stored yet."""
    assemble_seconds: float = 0.0
    verification_failures: int = 0
    read_errors: int = 0
    recomputed: int = 0
    """Times a restore failed midway and the prompt was planned again."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why prompts were not restored or not stored, or why more was read for them, and how often."""
    passages: list[PassageStats] = field(default_factory=list)
    """Of methods that reuse passages: those that stand in the prompt, row by row. Not in sums over requests."""

    @property
    def device(self) -> TierStats:
        return self.tiers["device"]

    @property
    def host(self) -> TierStats:
        return self.tiers["host"]

    @property
    def disk(self) -> TierStats:
        return self.tiers["disk"]

    @property
    def reason(self) -> str:
        """Why nothing was restored, not all was stored, or more was read; "" if nothing stood in the way."""
        return "; ".join(self.reasons)

    @property
    def read_amplification(self) -> float:
        """Bytes read from disk to be attended to, for each byte that was; 1.0 where nothing was read."""
        read = self.bytes_read - self.bytes_identifying - self.bytes_guessed
        return read / self.bytes_used if self.bytes_used else 1.0

    @property
    def tier(self) -> str:
        """The slowest tier that gave a block, or "none"."""
        return next((name for name in reversed(self.tiers) if self.tiers[name].blocks), "none")

    def as_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready, each tier under its name."""
        more = {"read_amplification": self.read_amplification, "tier": self.tier, "reason": self.reason}
        return _by_tier(self) | more

    def _tables(self) -> list[Table]:
        summary = Table(title="TieredCache", title_justify="left", show_header=False)
        summary.add_column(justify="left")
        summary.add_column(justify="right")
        rows: list[tuple[object, ...]] = [
            ("requests", self.requests),
            ("tokens restored / computed / stored", self.tokens_restored, self.tokens_computed, self.tokens_stored),
            ("read from disk / used", format_bytes(self.bytes_read), format_bytes(self.bytes_used)),
            ("read amplification", f"{self.read_amplification:.2f}"),
            (
                "match / choice / I/O / stall",
                *map(_ms, (self.match_seconds, self.select_seconds, self.io_seconds, self.stall_seconds)),
            ),
            ("assembly, stall included", _ms(self.assemble_seconds)),
            ("failed checks / read errors / replans", self.verification_failures, self.read_errors, self.recomputed),
        ]
        if self.tokens_recomputed:
            idle = _ms(self.load_idle_seconds)
            rows.insert(2, ("tokens recomputed, of the restored / disk idle", self.tokens_recomputed, idle))
        if self.tokens_kept or self.tokens_dropped:
            rows.insert(2, ("tokens kept / dropped where a cache went on", self.tokens_kept, self.tokens_dropped))
        if self.tokens_attended != self.tokens_restored:
            read = (format_bytes(self.bytes_identifying), format_bytes(self.bytes_guessed))
            rows.insert(2, ("tokens attended, of the restored", self.tokens_attended))
            rows.append(("scoring reads / mis-speculated reads", *read))
        if self.ahead_blocks:
            rows.append(("blocks ahead / asked for / late", self.ahead_blocks, self.ahead_hits, self.ahead_misses))
        if self.passages:
            found, tokens = (sum(getattr(each, name) for each in self.passages) for name in ("found", "tokens"))
            rows.append(("passages / their tokens found / missed", len(self.passages), found, tokens - found))
            cut = [each for each in self.passages if each.missed]
            for each in cut[:_MOST_PASSAGES]:
                what = f"passage at {each.at}" + f" of row {each.row}" * bool(each.row)
                rows.append((what, f"{each.found} of {each.tokens} tokens: {each.why}"))
            if len(cut) > _MOST_PASSAGES:
                rows.append(("passages not found whole, besides", len(cut) - _MOST_PASSAGES))
        for name, *values in rows:
            summary.add_row(str(name), " / ".join(map(str, values)))
        for reason, times in self.reasons.items():
            summary.add_row("reason" if self.requests < 2 else f"reason, {times} of {self.requests} requests", reason)
        tiers = Table()
        for heading in ("tier", "blocks", "bytes", "hits", "misses"):
            tiers.add_column(heading, justify="left" if heading == "tier" else "right")
        for name, tier in self.tiers.items():
            tiers.add_row(name, str(tier.blocks), format_bytes(tier.bytes), str(tier.hits), str(tier.misses))
        return [summary, tiers]

    def __str__(self) -> str:
        return "\n".join(map(render, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(map(render_html, self._tables()))


def _by_tier(stats: RequestStats | StoreStats) -> dict[str, Any]:
    figures = asdict(stats)
    tiers = figures.pop("tiers")
    return figures | tiers


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


class StatsCollector:
    """A `RequestStats` that the request and the reading threads add to."""

    def __init__(self) -> None:
        self.stats = RequestStats()
        self.total: StatsCollector | None = None
        """Where the same is counted once more, for a sum over requests."""
        self._lock = threading.Lock()
        self._reads_under_way = 0
        self._reading_since = 0.0
        self._more_to_read = False
        self._idle_since: float | None = None  # no read is under way, and another one is to follow

    def add(self, **amounts: float) -> None:
        """Add to the named figures."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)
        if self.total is not None:
            self.total.add(**amounts)

    def explain(self, reason: str) -> None:
        """Note why a prompt was not restored, or not stored."""
        with self._lock:
            self.stats.reasons[reason] = self.stats.reasons.get(reason, 0) + 1
        if self.total is not None:
            self.total.explain(reason)

    def tell_passages(self, passages: list[PassageStats]) -> None:
        """Note what became of the passages of the prompt, in the place of what was known so far."""
        with self._lock:
            self.stats.passages = passages

    def looked_up(self, tier: str, found: int, missing: int, block_bytes: int) -> None:
        """Note how many blocks were looked for in `tier`, and how many of them it gives."""
        with self._lock:
            counts = self.stats.tiers[tier]
            counts.hits += found
            counts.misses += missing
            counts.blocks += found
            counts.bytes += found * block_bytes
        if self.total is not None:
            self.total.looked_up(tier, found, missing, block_bytes)

    def read_started(self) -> None:
        if self.total is not None:
            self.total.read_started()
        idle = 0.0
        with self._lock:
            if self._reads_under_way == 0:
                self._reading_since = time.perf_counter()
                if self._idle_since is not None:
                    idle, self._idle_since = self._reading_since - self._idle_since, None
            self._reads_under_way += 1
        if idle:
            self.add(load_idle_seconds=idle)

    def expect_reads(self, more: bool) -> None:
        """Note whether the pass under way has more to read than what was started."""
        with self._lock:
            self._more_to_read = more

    def forget_reads(self) -> None:
        """Note that the pass is over."""
        with self._lock:
            self._more_to_read, self._idle_since = False, None

    def read_done(self, nbytes: int) -> None:
        """Note that a read has ended, and how much it brought (0 if it failed)."""
        if self.total is not None:
            self.total.read_done(nbytes)
        with self._lock:
            self.stats.bytes_read += nbytes
            self._reads_under_way -= 1
            if self._reads_under_way == 0:
                now = time.perf_counter()
                self.stats.io_seconds += now - self._reading_since
                self._idle_since = now if self._more_to_read else None

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the time the body takes to the figure called `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - started})


@dataclass
class StoreStats:
    """A store's statistics since it was opened, and what it holds now."""

    segments: int = 0
    encrypted_segments: int = 0
    tokens: int = 0
    tiers: dict[str, TierUse] = field(default_factory=lambda: {name: TierUse() for name in TIERS})
    """By name, as for requests. The budget on disk is the quota."""
    index: TierUse = field(default_factory=TierUse)
    """Memory of the keys, and indexes of keys, that methods choose by, on all devices together."""
    segments_written: int = 0
    bytes_written: int = 0
    duplicate_writes: int = 0
    """Segments another process had written first."""
    dropped_writes: int = 0
    """Segments not stored: disk full, quota, an unwritable folder, a full queue, or a lock that is not to be had."""
    evicted_segments: int = 0
    expired_segments: int = 0
    damaged_files: int = 0
    newer_files: int = 0
    """Segments of a newer format, left alone."""
    other_key_files: int = 0
    """Segments of another key than the store's, or of none, that were looked for and left alone."""
    verification_failures: int = 0
    read_errors: int = 0
    spot_checks: int = 0
    """Times that restored tokens were computed again and compared."""
    failed_spot_checks: int = 0
    """Spot checks that found a difference beyond rounding."""
    catalogue_errors: int = 0
    evicted_blocks: int = 0
    evicted_indexes: int = 0
    """Indexes of keys, a segment's at one layer, that left `index` for others or found no room in it."""
    queued_bytes: int = 0
    """Of KV that waits to be written, now."""
    queued_device_bytes: int = 0
    """Memory of GPUs that it keeps alive."""

    @property
    def device(self) -> TierUse:
        return self.tiers["device"]

    @property
    def host(self) -> TierUse:
        return self.tiers["host"]

    @property
    def disk(self) -> TierUse:
        return self.tiers["disk"]

    def as_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready, each tier under its name."""
        return _by_tier(self)

    def _table(self) -> Table:
        table = Table(title="KVStore", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("tiers", "index"):
                for name, use in self.tiers.items() if f.name == "tiers" else [(f.name, value)]:
                    budget = "no limit" if use.budget is None else format_bytes(use.budget)
                    table.add_row(f"{name}, of its budget", f"{format_bytes(use.bytes)} / {budget}")
            else:
                table.add_row(f.name.replace("_", " "), format_bytes(value) if "bytes" in f.name else str(value))
        return table

    def __str__(self) -> str:
        return render(self._table())

    def _repr_html_(self) -> str:
        return render_html(self._table())


class Counters:
    """`StoreStats` that several threads add to."""

    def __init__(self) -> None:
        self._stats = StoreStats()
        self._lock = threading.RLock()  # finalizers count too

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            setattr(self._stats, name, getattr(self._stats, name) + amount)

    def snapshot(self) -> StoreStats:
        with self._lock:
            return copy.deepcopy(self._stats)
