"""KVStore: what users see of a store. What stands behind it is `Storage`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .calibrate import Calibration, PrefixCosts, calibrate, calibrate_prefix
from .codecs import RAW, codec_in, make_codec
from .documents import documents_of, finish_documents, remove_documents
from .errors import ConfigError
from .geometry import Geometry
from .lookup import Lookup, lookup, warm
from .methods import Exact, Method, make_method
from .passages import BATCH_TOKENS, precompute_passages
from .precompute import PrecomputeReport, precompute
from .profiling import WindowFindings, profile_windows
from .quality import QualityFinding, calibrate_quality
from .ranking import passages_method, rank_stored
from .stats import Counters, StoreStats
from .storage import DEFAULT_POLICY, Storage
from .store import maintain
from .store.catalogue import SegmentRow
from .store.cipher import Hidden, cipher_of
from .store.conversations import ConversationInfo
from .store.disk import SegmentStore
from .store.documents import DocumentInfo
from .store.engines import Engine, open_engine
from .store.folder import FolderBackend
from .store.quota import Limits
from .tiers.residency import Residency
from .units import parse_bytes


class KVStore:
    """KV of prompts, kept in chunks on disk and cached in host and device memory.

    One store serves many caches, threads and processes. As a context manager it is closed at the end; otherwise what
    is still to be written is written when it is collected or the interpreter ends.

    Args:
        path: a folder, new, empty, or a store already; made if missing. On fast local storage, best. Files in it that
            the store did not write are never changed.
        device_memory: bytes of each GPU's memory for blocks that stay there; 128 MiB more, where needed, are for those
            on their way to a request. On a CPU-only machine the host tier is the device tier.
        host_memory: bytes of host memory for blocks, page-locked where there is a GPU.
        index_memory: bytes of memory, where the model computes, for the indexes that `ContiguousKV` and `KVDrive`
            choose by; what has no room is read from disk again, which a request's `stats.reason` says, if even its own
            do not fit. `store.stats.index` says how much of it they take, `evicted_indexes` how many had to go.
        disk_quota: bytes on disk that are never exceeded, or None. The least recently used segments make room.
        verify: whether the checksum of every block is compared when it is read. Encrypted ones always are.
        key: a secret that encrypts KV on disk (AES-256-GCM) and keys the hashes of tokens: 32 bytes, such as
            `secrets.token_bytes(32)`, or these as 64 hexadecimal digits or in base64. Only who has it can read what is
            stored, or store what is served. Segments of another key, or of none, are left alone. Needs the package
            `cryptography`: `pip install 'hf-tiered-cache[encryption]'`.
        salt: a secret that keys the hashes of tokens. Stores opened with another salt share nothing. By itself it hides
            tokens from those who have the files, not from those who have the model, too.
        engine: "auto" (kvikio where GPUDirect Storage works, else posix), "kvikio" (GPUDirect Storage or its compat
            mode), "posix", "page_cache", or an `Engine` made for this store. With "page_cache" and `host_memory=0` all
            processes of a machine share one copy in memory, which the kernel keeps, and frees for whoever needs it.
        policy: which blocks leave memory first: "lru", "lfu", or for methods that choose what to attend to "attention"
            or "importance"; each method names its own: `policy=method.policy`.
        ttl: seconds a segment lives, or None.
        watermarks: shares of the quota to which eviction goes, and at which it begins.
        free_space_floor: bytes of the file system that always stay free.
        queue_memory: bytes of KV that may wait to be written before a request waits for the disk. What a cache
            leaves when it is collected cannot wait: without room it is not stored, and counted.
        queue_device_memory: bytes of it that may lie on GPUs, where it was computed. Beyond, what waits is brought down
            to the host first; what one prompt has computed may be more.
        codec: how KV becomes bytes, where a method names none of its own: "raw", or "int8" or "fp8", which take half of
            what bfloat16 takes, on disk and in memory, and lose bits. What is stored with one is found with it alone.
        spot_checks: share of exactly restored tokens that are computed again and compared, in at most this share of the
            time of requests. Where they differ by more than rounding, nothing stored under this model's name is used or
            added any more, a warning names the segment, and `stats.failed_spot_checks` counts it. 0: none.

    Raises:
        ConfigError: an argument is invalid, or what is stored is encrypted with another key.
        StoreError: `path` cannot be a store: it is a file, or a folder with other files; or a part of the store is a
            link.
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
        queue_device_memory: int | str = "1GiB",
        codec: str = RAW,
        spot_checks: float = 0.01,
    ) -> None:
        self.path = Path(path).expanduser().resolve()  # whatever the working directory becomes
        try:
            cipher = cipher_of(key)
            no_salt = salt is not None and not salt
            secret = Hidden(cipher.chain_secret(salt))
        finally:
            del key, salt  # tracebacks may show variables
        if ttl is not None and (not isinstance(ttl, int | float) or ttl <= 0):
            raise ConfigError(f"ttl is a number of seconds above 0, not {ttl!r}")
        if not os.fspath(path):
            raise ConfigError("the path of a store is empty; name a folder, or '.' for this one")
        if no_salt:
            raise ConfigError("the salt is empty; leave it out, or give a secret")
        low, high = watermarks
        floor = parse_bytes(free_space_floor, "free_space_floor")
        quota = None if disk_quota is None else parse_bytes(disk_quota, "disk_quota")
        limits = Limits(quota, high, low, floor)
        queue_bytes = parse_bytes(queue_memory, "queue_memory")
        queue_device_bytes = parse_bytes(queue_device_memory, "queue_device_memory")
        self.ttl = ttl
        self.policy = policy
        self.codec = make_codec(codec).name
        self._engine = open_engine(engine)
        residency = Residency(
            parse_bytes(host_memory, "host_memory"),
            parse_bytes(device_memory, "device_memory"),
            policy,
            pin=torch.cuda.is_available(),
            direct=self._engine.reads_device and not cipher.key_id,  # the CPU decrypts
            index_budget=parse_bytes(index_memory, "index_memory"),
            register=self._engine.register,
        )
        backend = FolderBackend(self.path, self._engine)
        disk = SegmentStore(backend, verify=verify, limits=limits, counters=Counters(), cipher=cipher)
        self._storage = Storage(
            backend.files,
            disk,
            residency,
            secret=secret,
            policy=policy,
            codec=self.codec,
            ttl=ttl,
            queue_bytes=queue_bytes,
            queue_device_bytes=queue_device_bytes,
            spot_checks=spot_checks,
        )

    # --- KV of prompts

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
        labels: Sequence[str] | None = None,
        batch_tokens: int = BATCH_TOKENS,
        tag: str = "",
    ) -> PrecomputeReport:
        """Compute and store the KV of prompts ahead of time.

        Args:
            model: any causal LM of transformers.
            input_ids: one prompt or several: `[tokens]` or `[prompts, tokens]` as a tensor, or lists of ids.
            method: by which they are going to be restored, if not exactly: they are cut as it wants them.
            segments: whether these are passages, to be restored wherever they stand in a prompt: each is computed
                by itself, behind the method's `lead`, whose KV is left out, and stored in multiples of 16 tokens. The
                method is then `CacheTune()`, if none is given; others of the same lead find them, too. Its ranking,
                "context", computes each once more, without the text of the lead. What is stored already is ranked as
                this method asks for if it is not yet.
            progress: whether to show a progress bar.
            pin: whether to keep these segments from eviction.
            label, tag: as for `TieredCache`.
            labels: of passages, for each the id of the document that it is of; several may share one. What a label
                stood for before is deleted when all that it stands for now is stored, unless another label has it, too.
            batch_tokens: of passages of one length, so many are computed in one pass. 1 computes each by itself.

        Returns:
            How many tokens were computed and how many were stored already.

        Raises:
            ConfigError: an argument is invalid. StoreError: the labels cannot be kept; what was stored is.
        """
        if not segments:
            if labels is not None:
                raise ConfigError("labels are of passages: give segments=True, too")
            return precompute(
                self._storage, model, input_ids, method=method, progress=progress, pin=pin, label=label, tag=tag
            )
        return precompute_passages(
            self._storage,
            model,
            input_ids,
            method=method,
            progress=progress,
            pin=pin,
            label=label,
            labels=labels,
            batch_tokens=batch_tokens,
            tag=tag,
        )

    def rank(self, method: Method | str, *, ids: Iterable[str] | None = None, progress: bool = True) -> int:
        """Rank the tokens of stored passages as a method wants it: add that to the rankings they have, or renew it.

        Rankings by energy, and the random one, follow from the stored KV: `store.rank(CacheTune.paper())`. For the
        ranking "context" passages are computed: `precompute` makes it.

        Args:
            method: whose ranking it is.
            ids: of segments; all passages, if None.
            progress: whether to show a progress bar.

        Returns:
            How many passages were ranked.

        Raises:
            ConfigError: the method ranks nothing, or its ranking takes the model and the passages.
        """
        return rank_stored(self._storage, passages_method(method), ids, progress)

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
        return lookup(self._storage, model, input_ids, method, tag)

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
        return warm(self._storage, model, input_ids, method, tag, progress)

    def clear(self, *, disk: bool = False) -> None:
        """Let go of all blocks in host and device memory.

        Args:
            disk: whether every segment is deleted, too, pinned ones included.
        """
        self._storage.clear(disk)

    def calibrate(self, model: torch.nn.Module, **settings: Any) -> Calibration:
        """Measure which ratio of recomputation is fastest for this model on this machine, from this store.

        `CacheTune(recompute="auto")` takes what was found. See `hf_tiered_cache.calibrate.calibrate` for settings.
        """
        return calibrate(self._storage, model, **settings)

    def calibrate_prefix(self, model: torch.nn.Module, **settings: Any) -> list[PrefixCosts]:
        """Measure what a token of a prefix costs here, computed and restored, for this model on this machine.

        `Exact()` then computes as much of a prefix, or all of it, as makes it come soonest, while the rest is loaded.
        For settings see `hf_tiered_cache.calibrate.calibrate_prefix`.
        """
        return calibrate_prefix(self._storage, model, **settings)

    def profile_windows(self, model: torch.nn.Module, input_ids: Any, **settings: Any) -> WindowFindings:
        """Measure which windows save most while this model decodes behind long contexts, for each layer and head.

        `KVDrive()` then shares the memory of its windows among heads by what was found. For arguments see
        `hf_tiered_cache.profiling.profile_windows`.
        """
        return profile_windows(self._storage, model, input_ids, **settings)

    def calibrate_quality(self, model: torch.nn.Module, input_ids: Any, **settings: Any) -> list[QualityFinding]:
        """Measure what methods lose at several budgets on this model and these texts.

        `ContiguousKV(quality=0.02)` then takes the least budget that lost no more than 0.02 nats. Texts are stored in a
        temporary folder meanwhile, with a key of its own if this store has one. For arguments see
        `hf_tiered_cache.quality.calibrate_quality`.
        """
        return calibrate_quality(self._storage, self._scratch, model, input_ids, **settings)

    @contextmanager
    def _scratch(self, method: Method) -> Iterator[Storage]:
        key = os.urandom(32) if self._storage.disk.cipher.key_id else None
        with (
            tempfile.TemporaryDirectory(prefix="hf-tiered-quality-") as folder,
            KVStore(folder, policy=method.policy, codec=self.codec, key=key) as store,
        ):
            yield store._storage

    def relayout(
        self, geometry: Geometry | Method | str, ids: Iterable[str] | None = None, *, progress: bool = True
    ) -> int:
        """Lay segments out anew, as a method wants them: `store.relayout(method)`. No model is needed.

        Each keeps its codec: the hashes of its tokens name it, and the tokens are not stored. `KVDrive` wants
        chunks in the order of an index, which its first request makes; without one they are in the order of tokens.

        Args:
            geometry: how they are to be cut, or the method that says so. The new segment is whole on disk before the
                old one goes.
            ids: which; all, if None.
            progress: whether to show a progress bar.

        Returns:
            How many were laid out in another way. What cannot be read is left as it is, and counted; so is, uncounted,
            what holds a part of its tokens.

        Raises:
            ConfigError: a lossy codec is named, and a segment has another.
        """
        method = Exact(geometry=geometry) if isinstance(geometry, Geometry) else make_method(geometry)
        if method.geometry.codec != RAW:
            self._check_codec(method.geometry.codec, ids)
        action = partial(self._storage.rewriter.relayout, geometry=method.geometry)
        return self._storage.each(action, ids, "relayout", progress)

    def _check_codec(self, codec: str, ids: Iterable[str] | None) -> None:
        wanted = None if ids is None else set(ids)
        for row in self.segments():
            if codec_in(row.provenance) != codec and (wanted is None or row.id in wanted):
                raise ConfigError(
                    f"segment {row.id} is stored as {codec_in(row.provenance)}, and relayout leaves that as it is; "
                    f"store.precompute(model, input_ids, method=...) with codec={codec!r} stores a prompt anew"
                )

    def reorder(self, ids: Iterable[str] | None = None, *, progress: bool = True) -> int:
        """Lay the tokens of segments out by the attention that prompts paid them, most of it first.

        `ContiguousKV` asks for that by itself, in the background, after 1, 2, 4, ... prompts of a segment, `Impress`
        after 4, 8, 16, ...
        Passages are laid out by their ranking "context": of those that are computed no blocks are read then.

        Args:
            ids: which; all, if None.
            progress: whether to show a progress bar.

        Returns:
            How many were laid out anew. What cannot be read is left as it is, and counted.
        """
        return self._storage.each(self._storage.rewriter.reorder, ids, "reorder", progress)

    # --- its life

    def flush(self) -> None:
        """Write everything that has been computed, and make it durable; background work is done then, too."""
        self._storage.flush()

    def close(self) -> None:
        """Write everything that has been computed, and let files, threads and memory go."""
        self._storage.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether it is open, and was opened by this process."""
        return self._storage.usable

    @property
    def encrypted(self) -> bool:
        """Whether it was opened with a key."""
        return bool(self._storage.disk.cipher.key_id)

    def __repr__(self) -> str:
        if not hasattr(self, "_storage"):  # opening it failed, and a traceback shows it
            return "KVStore(not open)"
        notes = [self._engine.describe(), *["encrypted"] * self.encrypted, *["closed"] * self._storage.is_closed]
        return f"KVStore({str(self.path)!r}, {', '.join(notes)})"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    @property
    def stats(self) -> StoreStats:
        """What the store holds and what happened since it was opened."""
        return self._storage.stats()

    # --- what is stored

    def segments(self) -> list[SegmentRow]:
        """What is stored, last used last."""
        return self._storage.segments()

    def verify(self, *, progress: bool = False, repair: bool = False) -> maintain.VerifyReport:
        """Read every stored byte and compare every checksum. Damaged segments are named in the report.

        Segments that the store's key does not open are counted, and not read.

        Args:
            progress: whether to show a progress bar.
            repair: whether they are removed too.
        """
        return self._storage.verify(progress, repair)

    def gc(self, *, dry_run: bool = False) -> maintain.GcReport:
        """Delete what no request can use, and what is over the quota; with `dry_run`, only say how much that is."""
        documents = finish_documents(self._storage, dry_run)
        report = self._storage.gc(dry_run)
        deleted = report.deleted | dict.fromkeys(documents, "its passages are gone")
        return replace(report, documents=len(documents), deleted=deleted)

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments by id. Returns how many there were."""
        return self._storage.remove(ids)

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Keep segments from eviction, or (`pinned=False`) let them go again. Raises ConfigError for unknown ids."""
        self._storage.pin(ids, pinned)

    def conversations(self) -> list[ConversationInfo]:
        """The conversations that were suspended, last used last: what is stored of each, and who goes on with it."""
        return self._storage.list_conversations()

    def remove_conversation(self, conversation_id: str) -> int:
        """Delete a conversation, and the segments that no other conversation lies in; pinned ones stay.

        Prompts without a conversation may share them: they are computed again.

        Returns:
            How many segments went.

        Raises:
            ConfigError: there is none of this id.
            ConversationInUseError: a cache goes on with it.
        """
        return self._storage.remove_conversations([conversation_id])

    def documents(self, label: str | None = None) -> list[DocumentInfo]:
        """The documents that passages were stored as, by label: what is stored of each.

        Args:
            label: of those that are asked for (one for each model, and way of computing); None for all.
        """
        return documents_of(self._storage, label)

    def remove_document(self, label: str) -> int:
        """Delete a document, and the passages that no other label names, pinned ones, too.

        Those that were stored without a label as well are computed again.

        Returns:
            How many segments went.

        Raises:
            ConfigError: there is none of this label.
        """
        return remove_documents(self._storage, [label])

    def models(self) -> dict[str, dict[str, str]]:
        """For each fingerprint of which segments are stored what is known of the model."""
        self._storage.check_open()
        return self._storage.disk.index.models()

    def pinned(self) -> set[str]:
        """Which segments are pinned."""
        return self._storage.disk.pinned()


def open_store(store: KVStore | str | os.PathLike[str], method: Method, kept: dict[str, Any]) -> KVStore:
    """The store itself, or the one at a path, opened with the method's policy.

    Args:
        kept: where stores that were opened by path are kept, so that each is opened once.

    Raises:
        ConfigError: it is neither.
        StoreClosedError: it was closed, or opened before this process was forked.
    """
    if isinstance(store, str | os.PathLike):
        key = f"store {Path(store).expanduser().resolve()}"
        opened = kept.get(key)
        if opened is None or not opened.usable:  # closed, or opened before this process was forked
            opened = kept[key] = KVStore(store, policy=method.policy)
        store = opened
    if not isinstance(store, KVStore):
        raise ConfigError(f"store is a KVStore, or the path of one, not {store!r}")
    store._storage.check_open()
    return store


def storage_of(store: KVStore) -> Storage:
    """What stands behind a store, for caches and tools."""
    return store._storage
