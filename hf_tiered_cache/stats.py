"""Statistics of requests and stores, printable. All are counted except `RequestStats.seconds_saved`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .units import format_bytes, format_seconds, listing, render, render_html

if TYPE_CHECKING:
    from rich.table import Table

TIERS = ("device", "host", "disk")
"""Names of the tiers, fastest first. Statistics are tables by these names: a new tier is one more name."""
_MOST_PASSAGES = 8  # maximum number of incompletely found passages that are printed
Tier = TypeVar("Tier")


def _printed(name: str, value: object) -> str:
    """Return the value of a figure for printing; floats are seconds."""
    if isinstance(value, dict):
        return ", ".join(f"{reason}: {count}" for reason, count in value.items()) or "none"
    if isinstance(value, float):
        return format_seconds(value)
    if isinstance(value, int) and "bytes" in name:
        return format_bytes(value)
    return "unknown" if value is None else str(value)


class _Printable(ABC):
    """Figures that print as tables."""

    @abstractmethod
    def _tables(self) -> list[Table]:
        """Return the figures as tables to print."""

    def __str__(self) -> str:
        return "\n".join(map(render, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(map(render_html, self._tables()))


@dataclass
class TierStats:
    """Traffic of one request with one tier."""

    blocks: int = 0
    """Number of blocks that this tier delivered."""
    bytes: int = 0
    """Bytes of these blocks, including padding."""
    hits: int = 0
    """Number of blocks that were looked up in this tier and found."""
    misses: int = 0
    """Number of blocks that were looked up in this tier and not found. On disk: blocks of failed reads."""


@dataclass
class TierUse:
    """Current use of one tier by a store, in `bytes`; None if it is not known (see `StoreStats`)."""

    bytes: int | None = 0
    budget: int | None = 0
    """Maximum number of bytes, which is never exceeded; None for no limit."""


@dataclass
class RemoteStats:
    """Traffic of a store with its remote since the store was opened."""

    lookups: int = 0
    """Number of prompts that were looked up in the remote, because they are not stored here completely."""
    hits: int = 0
    """Number of these prompts for which a segment was fetched in time."""
    misses: dict[str, int] = field(default_factory=dict)
    """Reasons why prompts were not restored from the remote, with their counts."""
    segments_read: int = 0
    """Number of segments that were fetched."""
    bytes_read: int = 0
    """Bytes of the segments that were fetched, also of those that came too late for their prompt."""
    read_seconds: float = 0.0
    """Seconds in which they were fetched, added up."""
    waiting_seconds: float = 0.0
    """Seconds that prompts waited for the remote."""
    hedged_reads: int = 0
    """Number of requests that took unusually long and were sent a second time."""
    won_hedges: int = 0
    """Number of these for which the second request was answered first."""
    segments_written: int = 0
    """Number of segments that were sent."""
    bytes_written: int = 0
    """Bytes of the segments that were sent."""
    write_seconds: float = 0.0
    """Seconds in which they were sent."""
    duplicate_writes: int = 0
    """Number of segments that the remote had already."""
    dropped_writes: int = 0
    """Number of segments that were not sent: full queue, evicted before, or a failing remote."""
    failed_deletions: int = 0
    """Number of segments that were deleted here and stay in the remote, because it failed."""
    damaged: int = 0
    """Number of damaged segments that were found in the remote. They are deleted, unless nothing is sent to it."""
    errors: int = 0
    """Number of failed calls, and of lookups that took too long."""
    queued_writes: int = 0
    """Number of segments that currently wait to be sent."""


@dataclass(frozen=True)
class PassageStats:
    """Stored passage that occurs in a prompt."""

    row: int
    """Row of the batch; of several equal rows, the first."""
    start: int
    """Index of the token in the row at which the passage begins, or would begin if its first tokens were there."""
    tokens: int
    """Number of stored tokens of the passage. If nothing is stored that begins at a start given by `segments`, the
    number of tokens that the prompt has there.
    """
    tokens_found: int
    """Number of these tokens found in the prompt. They are restored, except those that the method recomputes."""
    reason: str = ""
    """Reason why the other tokens were not found, or an empty string."""
    segment: str = ""
    label: str = ""

    @property
    def tokens_missed(self) -> int:
        """Number of tokens of the passage that were not found."""
        return self.tokens - self.tokens_found


class _Figures(_Printable, Generic[Tier]):
    """Figures of requests or of a store, with a table of the tiers."""

    tiers: dict[str, Tier]

    @property
    def device(self) -> Tier:
        return self.tiers["device"]

    @property
    def host(self) -> Tier:
        return self.tiers["host"]

    @property
    def disk(self) -> Tier:
        return self.tiers["disk"]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as a JSON-serializable dict, with each tier under its name."""
        figures: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # all subclasses are dataclasses
        return figures | figures.pop("tiers")


@dataclass
class RequestDetails(_Printable):
    """Counters of one request, or sums over several, that explain its `RequestStats`. All times are in seconds."""

    tokens_kept: int = 0
    """Number of tokens that a reused cache held already and that its next prompt contains."""
    tokens_dropped: int = 0
    """Number of tokens that a reused cache held and that its next prompt does not contain."""
    bytes_used: int = 0
    """Bytes of `bytes_read` that went into attention."""
    bytes_identifying: int = 0
    """Bytes of `bytes_read` that were used only to select what to attend to."""
    bytes_superseded: int = 0
    """Bytes of `bytes_read` for tokens that a pass compared with computed ones, and then computed."""
    bytes_delivered: int = 0
    """Bytes of all blocks delivered to layers, from any tier, including padding, and of indexes read from disk. Equal
    to `bytes_read` if no block was in memory and no gap between blocks was read. A block that is requested again
    while decoding counts again.
    """
    bytes_delivered_identifying: int = 0
    """Bytes of `bytes_delivered` in indexes, and in blocks used only for a selection that hold nothing selected."""
    index_bytes: int = 0
    """Bytes of the in-memory indexes that prompts selected with: 8-bit keys, or indexes of chunks."""
    io_seconds: float = 0.0
    """Seconds with at least one read in progress."""
    load_idle_seconds: float = 0.0
    """Seconds without a read in progress although another read followed in the same pass."""
    match_seconds: float = 0.0
    """Seconds of the lookup."""
    select_seconds: float = 0.0
    """Seconds spent on selecting what to attend to, including waiting for the data that this needs."""
    select_stall_seconds: float = 0.0
    """Seconds of waiting within `select_seconds`; they are part of `stall_seconds` as well."""
    index_seconds: float = 0.0
    """Seconds of `select_seconds` spent on building indexes of chunks that are not stored yet."""
    assemble_seconds: float = 0.0
    """Seconds of the model's thread to restore and select KV, including waiting."""
    verification_failures: int = 0
    """Number of fetches that failed because of damaged blocks."""
    read_errors: int = 0
    """Number of fetches that failed for other reasons."""
    recomputed: int = 0
    """Number of times that a restore failed midway and the prompt was planned again."""

    def _tables(self) -> list[Table]:
        names = {f.name: f.name.removesuffix("_seconds").replace("_", " ") for f in fields(self)}
        return [listing("Details", [(label, _printed(name, getattr(self, name))) for name, label in names.items()])]


@dataclass
class RequestStats(_Figures[TierStats]):
    """Statistics of one request, or sums over several. All figures are counted, except the estimate `seconds_saved`.

    Tokens are those of prompts and answers over all rows, without padding.
    """

    requests: int = 0
    """Number of prompts: 1, or more for a cache that was used for several prompts, and in sums."""
    tokens_restored: int = 0
    """Number of tokens restored from the store."""
    tokens_recomputed: int = 0
    """Number of restored tokens that layers computed nevertheless, because that was faster or because other text
    precedes a passage now. Mean over the layers.
    """
    tokens_computed: int = 0
    """Number of tokens computed by the model."""
    tokens_stored: int = 0
    """Number of tokens handed to the writer, without those that the store then had no room for or refused."""
    tokens_attended: int = 0
    """Number of restored tokens that layers with full attention could attend to: all, those within a budget, or the
    part of the budget that holds the requested share of attention. Mean over these layers, where they differ.
    """
    tiers: dict[str, TierStats] = field(default_factory=lambda: {name: TierStats() for name in TIERS})
    """Traffic with each tier by name, fastest first. `stats.host` is short for `stats.tiers["host"]`, and so on."""
    bytes_read: int = 0
    """Bytes read from disk."""
    stall_seconds: float = 0.0
    """Seconds that the model waited for KV."""
    seconds_saved: float = 0.0
    """Estimated seconds that prompts took less than if their restored tokens had been computed: the time to compute
    tokens that no layer computed, minus the time to look up and restore them. It is negative where restoring was
    slower. The time to compute a token is that of a calibration, else that of earlier prompts in this process, else, on
    a CPU, that of 64 or more tokens computed by the same prompt. Prompts without any of these, and those of continuous
    batching, count 0.
    """
    reasons: dict[str, int] = field(default_factory=dict)
    """Reasons why prompts were not restored or not stored, or why more was read for them, with their counts."""
    passages: list[PassageStats] = field(default_factory=list)
    """Stored passages in the prompt, row by row, for methods that reuse passages. Not in sums over requests."""
    details: RequestDetails = field(default_factory=RequestDetails)
    """Further counters, which explain these."""

    @property
    def reason(self) -> str:
        """Reasons why not all was restored or stored or why more was read, joined by semicolons, or an empty string."""
        return "; ".join(self.reasons)

    @property
    def read_amplification(self) -> float:
        """Bytes read from disk for attention, per byte that went into attention; 1.0 if nothing was read."""
        details = self.details
        attended_bytes = self.bytes_read - details.bytes_identifying - details.bytes_superseded
        return attended_bytes / details.bytes_used if details.bytes_used else 1.0

    @property
    def tier(self) -> str:
        """Name of the slowest tier that delivered a block, or "none"."""
        return next((name for name in reversed(self.tiers) if self.tiers[name].blocks), "none")

    def as_dict(self) -> dict[str, Any]:
        derived = {"read_amplification": self.read_amplification, "tier": self.tier, "reason": self.reason}
        return super().as_dict() | derived

    def _tables(self) -> list[Table]:
        from rich.table import Table

        rows: list[tuple[object, ...]] = [
            ("requests", self.requests),
            ("tokens restored / computed / stored", self.tokens_restored, self.tokens_computed, self.tokens_stored),
            ("read from disk", format_bytes(self.bytes_read)),
            ("waited for KV", format_seconds(self.stall_seconds)),
        ]
        if self.seconds_saved:
            rows.append(("saved, estimated", format_seconds(self.seconds_saved)))
        if self.tokens_recomputed:
            rows.insert(2, ("restored tokens recomputed", self.tokens_recomputed))
        if self.tokens_attended != self.tokens_restored:
            rows.insert(2, ("restored tokens attended to", self.tokens_attended))
        if self.details.verification_failures or self.details.read_errors:
            rows.append(("failed checks / read errors", self.details.verification_failures, self.details.read_errors))
        if self.passages:
            num_found, tokens = (
                sum(getattr(passage, name) for passage in self.passages) for name in ("tokens_found", "tokens")
            )
            rows.append(("passages / their tokens found / missed", len(self.passages), num_found, tokens - num_found))
            incomplete = [passage for passage in self.passages if passage.tokens_missed]
            for passage in incomplete[:_MOST_PASSAGES]:
                label = f"passage at token {passage.start}" + f" in row {passage.row}" * bool(passage.row)
                rows.append((label, f"{passage.tokens_found} of {passage.tokens} tokens: {passage.reason}"))
            if len(incomplete) > _MOST_PASSAGES:
                rows.append(("other passages not found completely", len(incomplete) - _MOST_PASSAGES))
        for reason, count in self.reasons.items():
            rows.append(("reason" if self.requests < 2 else f"reason, {count} of {self.requests} requests", reason))
        tiers = Table()
        for heading in ("tier", "blocks", "bytes", "hits", "misses"):
            tiers.add_column(heading, justify="left" if heading == "tier" else "right")
        for name, tier in self.tiers.items():
            tiers.add_row(name, str(tier.blocks), format_bytes(tier.bytes), str(tier.hits), str(tier.misses))
        return [listing("TieredCache", [(str(name), " / ".join(map(str, values))) for name, *values in rows]), tiers]


@dataclass
class StoreStats(_Figures[TierUse]):
    """Statistics of a store since it was opened, and its current content.

    `segments`, `encrypted_segments` and `tokens` count what is stored now. They, and the bytes on disk, are None while
    the catalogue fails. The other figures without a description of their own count events since the store was opened:
    `bytes_written` and `segments_written` to disk, segments removed by the quota (`evicted_segments`) or because of
    their age (`expired_segments`), files without a readable header (`damaged_files`), failed uses of damaged data
    (`verification_failures`), failed reads (`read_errors`) and catalogue operations (`catalogue_errors`), and blocks
    evicted from memory (`evicted_blocks`).
    """

    segments: int | None = 0
    encrypted_segments: int | None = 0
    tokens: int | None = 0
    tiers: dict[str, TierUse] = field(default_factory=lambda: {name: TierUse() for name in TIERS})
    """Current use of each tier by name, as for requests. The budget of the disk is the quota."""
    index: TierUse = field(default_factory=TierUse)
    """Current memory of the keys and indexes of keys that methods select with, over all devices: those that are kept
    for later requests, whether or not a cache uses them now.
    """
    unbudgeted_index_bytes: int = 0
    """Bytes of indexes that caches use now and that are not in `index`: those that do not fit into its budget, each
    shared by all caches of a prompt, and those of generated tokens.
    """
    segments_written: int = 0
    bytes_written: int = 0
    duplicate_writes: int = 0
    """Number of segments that another process had written first."""
    dropped_writes: int = 0
    """Number of segments and sidecars that were not stored: full disk, quota, unwritable folder, full queue, a lock
    that was not available, or changed weights.
    """
    evicted_segments: int = 0
    expired_segments: int = 0
    damaged_files: int = 0
    newer_files: int = 0
    """Number of times that a file of a newer format was found; such files are not changed."""
    other_key_files: int = 0
    """Number of times that a looked-up file was encrypted with another key, or not encrypted although the store has a
    key; such files are not changed.
    """
    verification_failures: int = 0
    read_errors: int = 0
    spot_checks: int = 0
    """Number of times that restored tokens were computed again and compared."""
    failed_spot_checks: int = 0
    """Number of spot checks that found a difference larger than rounding."""
    catalogue_errors: int = 0
    evicted_blocks: int = 0
    evicted_indexes: int = 0
    """Number of indexes of keys (one prompt or segment and layer each) evicted from `index`, or too large for it."""
    queued_bytes: int = 0
    """Bytes of KV that currently wait to be written."""
    queued_device_bytes: int = 0
    """Bytes of GPU memory that this KV currently keeps allocated."""
    remote: RemoteStats = field(default_factory=RemoteStats)
    """Traffic with the remote."""

    def _tables(self) -> list[Table]:
        rows = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("tiers", "index"):
                for name, use in self.tiers.items() if f.name == "tiers" else [(f.name, value)]:
                    budget = "no limit" if use.budget is None else format_bytes(use.budget)
                    rows.append((f"{name}, used / budget", f"{_printed('bytes', use.bytes)} / {budget}"))
            elif isinstance(value, RemoteStats):
                figures = vars(value).items() if value != RemoteStats() else ()
                rows += [(f"remote {name.replace('_', ' ')}", _printed(name, figure)) for name, figure in figures]
            else:
                rows.append((f.name.replace("_", " "), _printed(f.name, value)))
        return [listing("KVStore", rows)]
