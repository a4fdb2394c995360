"""The store: one folder of segments, the tiers of memory before it, and the thread that writes behind it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from .calibrate import Calibration, calibrate
from .codecs import RAW, codec_in, make_codec
from .errors import ConfigError, StoreClosedError
from .geometry import Geometry
from .precompute import PrecomputeReport, precompute
from .restore.chain import Chain
from .restore.match import MatchedRun, longest_prefix
from .stats import Counters, StoreStats
from .store import maintain
from .store.catalogue import Catalogue, SegmentRow
from .store.cipher import cipher_of
from .store.disk import SegmentStore
from .store.engines import Engine, open_engine
from .store.folder import FolderBackend
from .store.quota import Limits
from .store.segment import SegmentReader
from .store.writer import Draft, Writer
from .tiers.residency import Residency
from .tiers.scores import ScoreTable
from .units import parse_bytes
from .upkeep import Upkeep

if TYPE_CHECKING:
    from .lookup import Lookup
    from .methods import Method
    from .record import Recorder

DEFAULT_POLICY = "lru"


class KVStore:
    """KV of prompts, kept in chunks on disk and cached in host and device memory.

    One store serves many caches, threads and processes. As a context manager it is closed at the end; otherwise what
    is still to be written is written when it is collected or the interpreter ends.

    Args:
        path: a folder; made if missing. On fast local storage, best.
        device_memory: bytes of each GPU's memory for blocks. On a CPU-only machine the host tier is the device tier.
        host_memory: bytes of host memory for blocks, page-locked where there is a GPU.
        index_memory: bytes of memory, where the model computes, for keys that methods with a resident index choose by.
        disk_quota: bytes on disk that are never exceeded, or None. The least recently used segments make room.
        verify: whether the checksum of every block is compared when it is read. Encrypted ones always are.
        key: a secret that encrypts KV on disk (AES-256-GCM) and keys the hashes of tokens: 32 bytes, such as
            `secrets.token_bytes(32)`, or these as 64 hexadecimal digits or in base64. Only who has it can read what is
            stored, or store what is served. Segments of another key, or of none, are left alone. Needs the package
            `cryptography`: `pip install 'hf-tiered-cache[encryption]'`.
        salt: a secret that keys the hashes of tokens. Stores opened with another salt share nothing. By itself it hides
            tokens from those who have the files, not from those who have the model, too.
        engine: "auto", "kvikio" (GPUDirect Storage or its compat mode), "posix", or an `Engine` made for this store.
        policy: which blocks leave memory first: "lru", "lfu", or for methods that choose what to attend to "attention"
            or "importance"; each method names its own: `policy=method.policy`.
        ttl: seconds a segment lives, or None.
        watermarks: shares of the quota to which eviction goes, and at which it begins.
        free_space_floor: bytes of the file system that always stay free.
        queue_memory: bytes of KV that may wait to be written before a request waits for the disk. What a cache
            leaves when it is collected cannot wait: without room it is not stored, and counted.
        codec: how KV becomes bytes, where a method names none of its own: "raw", or "int8" or "fp8", which take half of
            what bfloat16 takes, on disk and in memory, and lose bits. What is stored with one is found with it alone.

    Raises:
        ConfigError: an argument has no meaning, or what is stored is encrypted with another key.
        StoreError: `path` cannot be a store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device_memory: int | str = "0",
        host_memory: int | str = "1GiB",
        index_memory: int | str = "256MiB",
        disk_quota: int | str | None = None,
        verify: bool = True,
        key: bytes | str | None = None,
        salt: str | bytes | None = None,
        engine: str | Engine = "auto",
        policy: str = DEFAULT_POLICY,
        ttl: float | None = None,
        watermarks: tuple[float, float] = (0.85, 0.95),
        free_space_floor: int | str = "256MiB",
        queue_memory: int | str = "2GiB",
        codec: str = RAW,
    ) -> None:
        if ttl is not None and (not isinstance(ttl, int | float) or ttl <= 0):
            raise ConfigError(f"ttl is a number of seconds above 0, not {ttl!r}")
        if not os.fspath(path):
            raise ConfigError("the path of a store is empty; name a folder, or '.' for this one")
        if salt is not None and not salt:
            raise ConfigError("the salt is empty; leave it out, or give a secret")
        low, high = watermarks
        floor = parse_bytes(free_space_floor, "free_space_floor")
        quota = None if disk_quota is None else parse_bytes(disk_quota, "disk_quota")
        limits = Limits(quota, high, low, floor)
        queue_bytes = parse_bytes(queue_memory, "queue_memory")
        self.path = Path(path).expanduser().resolve()  # whatever the working directory becomes
        cipher = cipher_of(key)
        self._secret = cipher.chain_secret(salt)
        self.ttl = ttl
        self.policy = policy
        self.codec = make_codec(codec).name
        self._counters = Counters()
        self._engine = open_engine(engine)
        self.residency = Residency(
            parse_bytes(host_memory, "host_memory"),
            parse_bytes(device_memory, "device_memory"),
            policy,
            pin=torch.cuda.is_available(),
            direct=self._engine.reads_device and key is None,  # the CPU decrypts
            index_budget=parse_bytes(index_memory, "index_memory"),
        )
        backend = FolderBackend(self.path, self._engine)
        self.disk = SegmentStore(backend, verify=verify, limits=limits, counters=self._counters, cipher=cipher)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        try:
            if (other := self.disk.other_key()) is not None:
                named = f"{other}, and not {cipher.key_id}, as the two are called"
                raise ConfigError(f"{self.path} is encrypted with another key: {named}")
            self.upkeep = Upkeep(self.disk)
            close = partial(_close, self.upkeep, self.disk, self.residency.scores)
            self.writer = Writer(self.disk, queue_bytes, partial(_seal, self._recorders, self._lock), close)
            self._close = weakref.finalize(self, self.writer.end)  # anywhere: the writer's thread does the rest
        except BaseException:  # also Ctrl-C: nobody is going to close it
            self.disk.close()
            raise
        self._close.atexit = False  # the writer sees to that
        self.disk.on_gone += [self.residency.forget, self.upkeep.importance.forget]
        self.residency.scores.load(self.disk.index.scores())

    # --- for caches

    def chain(self, fingerprint: str, provenance: str, regime: str) -> Chain:
        """The hash chain of KV made by this model, in this way, under these RoPE frequencies."""
        return Chain((fingerprint, provenance, regime), self._secret)

    def match(
        self, links: list[bytes], start: int = 0, asking: Recorder | None = None
    ) -> list[tuple[MatchedRun, SegmentReader]]:
        """The longest stored prefix of a sequence, from link number `start` on: runs of segments, opened.

        What other caches of this process than the `asking` one have computed but not stored yet is stored first, as far
        as it matters.
        """
        self._check()
        if start >= len(links):
            return []
        self.seal(links[0], asking)
        self.writer.wait_for(links[start:])
        rows = self.disk.find(links)
        while True:
            found = [(run, self.disk.found(run.row)) for run in longest_prefix(links, rows, start)]
            lost = {run.row.id for run, reader in found if reader is None}
            if not lost:
                break
            rows = [row for row in rows if row.id not in lost]  # gone or damaged: look for a way around it
        self._looked_up([run.row.id for run, _ in found])
        return found

    def find(self, links: Sequence[bytes]) -> list[SegmentRow]:
        """The stored segments that begin with one of `links`."""
        self._check()
        rows = self.disk.find(links)
        self._looked_up([row.id for row in rows])
        return rows

    def _looked_up(self, used: list[str]) -> None:
        """Behind the request: note what was used, and forget what another process has removed."""
        self.writer.later(partial(_after_look_up, self.disk, self.residency, used))

    def submit(self, draft: Draft, wait: bool = True) -> None:
        """Queue a segment for writing; its blocks are cached in host memory on the way."""
        written, refused = partial(_admit, draft, self.residency), partial(_refused, draft, self.residency)
        self.writer.submit(replace(draft, written=written, refused=refused), wait)

    def register(self, recorder: Recorder) -> None:
        """Let `flush`, `close` and other caches' look-ups seal what this recorder has caught."""
        with self._lock:
            self._recorders.add(recorder)

    def seal(self, beginning: bytes | None = None, but: Recorder | None = None) -> None:
        """Queue what live caches have computed and not stored, between their passes.

        Args:
            beginning: if given, only of caches that hold a sequence with this first link.
            but: is left alone.
        """
        with self._lock:
            recorders = list(self._recorders)
        for recorder in recorders:
            if recorder is not but and (beginning is None or recorder.begins_with(beginning)):
                recorder.seal()

    def _check(self) -> None:
        if not self._close.alive:
            raise StoreClosedError(f"the store {self.path} is closed; open it anew")
        if os.getpid() != self._pid:
            raise StoreClosedError(f"the store {self.path} was opened before this process was forked; open it anew")

    @property
    def usable(self) -> bool:
        """Whether it is open, and was opened by this process."""
        return self._close.alive and os.getpid() == self._pid

    # --- for users

    def precompute(
        self,
        model: torch.nn.Module,
        input_ids: Any,
        *,
        method: Method | str | None = None,
        segments: bool = False,
        progress: bool = True,
        pin: bool = False,
        label: str = "",
        tag: str = "",
    ) -> PrecomputeReport:
        """Compute and store the KV of prompts ahead of time.

        Args:
            model: any causal LM of transformers.
            input_ids: one prompt or several: `[tokens]` or `[prompts, tokens]` as a tensor, or lists of ids.
            method: by which they are going to be restored, if not exactly: they are cut as it wants them.
            segments: whether these are passages, to be restored wherever they stand in a prompt: each is computed
                alone, behind a sink token whose KV is left out, and stored as far as whole links of 16 tokens go. The
                method is then `CacheTune()`, if none is given. With the ranking "context", those of one call stand
                before one another, so give together what is asked for together; what is stored keeps its ranking.
            progress: whether to show a progress bar.
            pin: whether to keep these segments from eviction.
            label, tag: as for `TieredCache`.

        Returns:
            How many tokens were computed and how many were stored already.
        """
        self._check()
        if segments:
            from .passages import precompute_passages  # its caches know their store

            return precompute_passages(
                self, model, input_ids, method=method, progress=progress, pin=pin, label=label, tag=tag
            )
        return precompute(self, model, input_ids, method=method, progress=progress, pin=pin, label=label, tag=tag)

    def lookup(
        self, model: torch.nn.Module, input_ids: Any, *, method: Method | str | None = None, tag: str = ""
    ) -> Lookup:
        """How much of a prompt is stored, and in which tier, without computing anything.

        Args:
            model: any causal LM of transformers.
            input_ids: one prompt, `[tokens]` or `[1, tokens]`.
            method: by which it would be restored.
            tag: as for `TieredCache`.
        """
        self._check()
        from .lookup import lookup

        return lookup(self, model, input_ids, method, tag)

    def warm(
        self,
        model: torch.nn.Module,
        input_ids: Any,
        *,
        method: Method | str | None = None,
        tag: str = "",
        progress: bool = True,
    ) -> Lookup:
        """Bring what is stored of a prompt into memory, as far as the budgets have room, without computing anything.

        Args:
            model, input_ids, method, tag: as for `lookup`.
            progress: whether to show a progress bar.

        Returns:
            What `lookup` says then.
        """
        self._check()
        from .lookup import warm

        return warm(self, model, input_ids, method, tag, progress)

    def clear(self, *, disk: bool = False) -> None:
        """Let go of all blocks in host and device memory.

        Args:
            disk: whether every segment is deleted, too, pinned ones included.
        """
        self.flush()
        if disk:
            self.remove(row.id for row in self.segments())
        self.residency.clear()

    def calibrate(self, model: torch.nn.Module, **settings: Any) -> Calibration:
        """Measure which ratio of recomputation is fastest for this model on this machine, from this store.

        `CacheTune(recompute="auto")` takes what was found. See `hf_tiered_cache.calibrate.calibrate` for settings.
        """
        self._check()
        return calibrate(self, model, **settings)

    def relayout(
        self, geometry: Geometry | Method | str, ids: Iterable[str] | None = None, *, progress: bool = True
    ) -> int:
        """Lay segments out anew, as a method wants them: `store.relayout(method)`. No model is needed.

        Each keeps its codec: the hashes of its tokens name it, and the tokens are not stored.

        Args:
            geometry: how they are to be cut, or the method that says so. The new segment is whole on disk before the
                old one goes.
            ids: which; all, if None.
            progress: whether to show a progress bar.

        Returns:
            How many were cut in another way. What cannot be read is left as it is, and counted.

        Raises:
            ConfigError: a lossy codec is named, and a segment has another.
        """
        from .methods import make_method

        cut = geometry if isinstance(geometry, Geometry) else make_method(geometry).geometry
        if cut.codec != RAW:
            self._check_codec(cut.codec, ids)
        return self._each(partial(self.upkeep.relayout, geometry=cut), ids, "relayout", progress)

    def _check_codec(self, codec: str, ids: Iterable[str] | None) -> None:
        wanted = None if ids is None else set(ids)
        for row in self.segments():
            if codec_in(row.provenance) != codec and (wanted is None or row.id in wanted):
                raise ConfigError(
                    f"segment {row.id} is stored as {codec_in(row.provenance)}, and relayout leaves that as it is; "
                    f"store.precompute(model, input_ids, method=...) with codec={codec!r} stores a prompt anew"
                )

    def reorder(self, ids: Iterable[str] | None = None, *, progress: bool = True) -> int:
        """Lay the tokens of segments out by the attention that prompts of this process paid them, most of it first.

        `Impress(reorder=True)` asks for that by itself, in the background, after 4, 8, 16, ... prompts of a segment.

        Args:
            ids: which; all, if None.
            progress: whether to show a progress bar.

        Returns:
            How many were laid out anew. What cannot be read is left as it is, and counted.
        """
        return self._each(self.upkeep.reorder, ids, "reorder", progress)

    def _each(self, action: Callable[[str], bool], ids: Iterable[str] | None, name: str, progress: bool) -> int:
        self.flush()
        wanted = [row.id for row in self.segments()] if ids is None else list(ids)
        changed = sum(action(old) for old in tqdm(wanted, unit="segment", desc=name, disable=not progress))
        self.disk.sync()
        return changed

    def flush(self) -> None:
        """Write everything that has been computed, and make it durable; background work is done then, too."""
        self._check()
        self.seal()
        self.upkeep.wait()
        self.writer.flush()
        _keep_scores(self.disk, self.residency.scores)

    def close(self) -> None:
        """Write everything that has been computed, and let files, threads and memory go."""
        if self.usable:
            self.seal()
            self._close()
            self.writer.close()
            self.residency.clear()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def encrypted(self) -> bool:
        """Whether it was opened with a key."""
        return bool(self.disk.cipher.key_id)

    def __repr__(self) -> str:
        notes = [self._engine.describe(), *["encrypted"] * self.encrypted, *["closed"] * (not self._close.alive)]
        return f"KVStore({str(self.path)!r}, {', '.join(notes)})"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    @property
    def stats(self) -> StoreStats:
        """What the store holds and what happened since it was opened."""
        stats = self._counters.snapshot()
        if self._close.alive:
            counts = self.disk.index.ask(Catalogue.counts, (0, 0, 0, 0))
            stats.segments, stats.tokens, stats.disk.bytes, stats.encrypted_segments = counts
        stats.disk.budget = self.disk.limits.quota
        stats.host.bytes, stats.host.budget = self.residency.host.allocated, self.residency.host.budget
        stats.device.bytes = sum(tier.allocated for tier in self.residency.devices.values())
        stats.device.budget = self.residency.device_budget
        stats.evicted_blocks = self.residency.evicted
        return stats

    def segments(self) -> list[SegmentRow]:
        """What is stored, last used last."""
        self._check()
        return self.disk.index.rows()

    def verify(self, *, progress: bool = False, repair: bool = False) -> maintain.VerifyReport:
        """Read every stored byte and compare every checksum. Damaged segments are named in the report.

        Segments that the store's key does not open are counted, and not read.

        Args:
            progress: whether to show a progress bar.
            repair: whether they are removed too.
        """
        self._check()
        self.writer.flush()
        return maintain.verify(self.disk, progress=progress, repair=repair)

    def gc(self, *, dry_run: bool = False) -> maintain.GcReport:
        """Delete what no request can use, and what is over the quota; with `dry_run`, only say how much that is."""
        self._check()
        return maintain.gc(self.disk, dry_run=dry_run)

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments by id. Returns how many there were."""
        self._check()
        return self.disk.remove(ids)

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Keep segments from eviction, or (`pinned=False`) let them go again. Raises ConfigError for unknown ids."""
        self._check()
        ids = list(ids)
        unknown = set(ids) - self.disk.index.ask(Catalogue.ids, set(ids))
        if pinned and unknown:
            raise ConfigError(
                f"no segment is called {min(map(str, unknown))!r}; store.segments() lists them, and "
                "store.precompute(model, input_ids, pin=True) pins a prompt"
            )
        self.disk.pin(ids, pinned)


def open_store(store: KVStore | str | os.PathLike[str], method: Method, kept: dict[str, Any]) -> KVStore:
    """The store itself, or the one at a path, opened with the method's policy.

    Args:
        kept: where stores that were opened by path are kept, so that each is opened once.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(store, str | os.PathLike):
        key = f"store {Path(store).expanduser().resolve()}"
        opened = kept.get(key)
        if opened is None or not opened.usable:  # closed, or opened before this process was forked
            opened = kept[key] = KVStore(store, policy=method.policy)
        store = opened
    if not isinstance(store, KVStore):
        raise ConfigError(f"store is a KVStore, or the path of one, not {store!r}")
    if method.policy not in (DEFAULT_POLICY, store.policy):
        store.disk.warn(
            f"policy {method.policy}",
            f"{type(method).__name__} was published with the eviction policy {method.policy!r}, and this store evicts "
            f"by {store.policy!r}; open it with KVStore(path, policy=method.policy)",
        )
    return store


def _keep_scores(disk: SegmentStore, scores: ScoreTable) -> None:
    if disk.backend.writable:
        disk.index.keep_scores(scores.changes())


def _admit(draft: Draft, residency: Residency, lane: int, blocks: torch.Tensor, content: int) -> None:
    """Put a lane of the draft into memory, under what it contains: another file may yet come first."""
    residency.admit((draft.header.id, lane, content), blocks)


def _refused(draft: Draft, residency: Residency) -> None:
    residency.forget([draft.header.id])
    draft.refused()


def _after_look_up(disk: SegmentStore, residency: Residency, used: list[str]) -> None:
    if used:
        disk.index.touch(used)
    disk.forget_deleted(residency.segments())


def _seal(recorders: weakref.WeakSet[Recorder], lock: threading.RLock) -> bool:
    """Queue what live caches have computed. Returns False while another thread holds one of them."""
    with lock:  # others may be registered meanwhile
        found = list(recorders)
    return False not in [recorder.finish() for recorder in found]  # none is left out


def _close(upkeep: Upkeep, disk: SegmentStore, scores: ScoreTable) -> None:
    upkeep.close()
    _keep_scores(disk, scores)
    disk.close()
