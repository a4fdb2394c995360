"""`KVStore`, the store class that users create. The implementation is in `Storage`.

Operations that run a model are imported when they are called, because a store alone needs no transformers.
It imports torch when it first reads or writes KV (see `store.lazy`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from .cache.storage import DEFAULT_POLICY, Storage
from .errors import ConfigError, check_switches, unknown_name, with_type
from .operations.contents import BATCH_TOKENS, StoreContents
from .remote.write_back import WRITES
from .store.backend import SegmentBackend
from .store.backends import open_backend, open_remote
from .store.cipher import Hidden, cipher_of
from .store.codecs import RAW, codec_in, make_codec
from .store.disk import SegmentStore
from .store.engines import Engine
from .store.folder import FolderBackend
from .store.geometry import Geometry
from .store.lazy import torch
from .store.objects import ObjectBackend
from .store.quota import Limits
from .store.settings import configurable, folder_of
from .tiers.residency import Residency
from .tiers.scores import make_policy
from .units import parse_bytes

if TYPE_CHECKING:
    from .cache.calibrations import Calibration, PrefixCosts, QualityFinding
    from .methods import Method
    from .operations.precompute import Lookup, PrecomputeReport

_MOST_TTL = 1e11  # maximum lifetime in seconds, 3,000 years: files do not hold times that are much later


class KVStore(StoreContents):
    """Persistent store of KV: segments on disk, with blocks cached in host and device memory.

    One store serves many caches, threads and processes. Use it as a context manager to close it at the end of the
    block. Otherwise, pending writes are completed when the store is garbage-collected or the interpreter exits.

    Sizes are bytes as an int, or strings such as "10GiB" or "500MB". Arguments that are omitted are taken from
    environment variables such as `HF_TIERED_CACHE_HOST_MEMORY`, and from a file `hf_tiered_cache.toml` (see
    docs/tuning.md).

    Args:
        path: Folder of the store: a new or empty folder, or an existing store. It is created if it is missing. Fast
            local storage is best. Files in the folder that the store did not write are never changed. Or an address
            such as "scheme://...", if a package that is installed, or `register_backend`, provides the scheme.
        backend: Place in which the store keeps everything, in place of `path` (see docs/extending.md). It is closed
            with the store.
        device_memory: Size of the block cache in each GPU's memory. Up to 128 MiB more are used for blocks in transit
            to a request. On a CPU-only machine, the host tier is the device tier.
        host_memory: Size of the block cache in host memory, page-locked if there is a GPU.
        index_memory: Memory, on the model's device, for the indexes by which `ContiguousKV` and `KVDrive` select, kept
            for later requests. A cache in use needs its index, so this is no limit for caches in use: they hold what
            does not fit in addition, once for all caches of a prompt, until they are deleted. If a request's own
            indexes do not fit, its `stats.reason` says so, and each request reads them from disk again unless another
            cache uses them. `store.stats.index` reports the memory within this limit,
            `store.stats.unbudgeted_index_bytes` the memory in addition, `store.stats.evicted_indexes` the number of
            evictions.
        disk_quota: Maximum size of the store on disk, never exceeded; None for no limit. The least recently used
            segments are evicted.
        verify: Whether to verify the checksum of every block that is read. Encrypted blocks are always verified.
        key: Secret that encrypts KV on disk (AES-256-GCM) and keys the hashes of tokens: 32 bytes, such as
            `secrets.token_bytes(32)`, or the same as 64 hexadecimal digits or in base64. Only holders of the key can
            read stored KV, or store KV that is restored. Segments with another key, or without one, are left alone.
            Needs the package `cryptography`: `pip install 'hf-tiered-cache[encryption]'`.
        salt: Secret that keys the hashes of tokens. Stores opened with different salts share nothing. A salt alone
            hides the tokens from readers who have only the files, but not from readers who also have the model.
        engine: I/O engine: "auto" (kvikio where GPUDirect Storage works, else posix), "kvikio" (GPUDirect Storage or
            its compat mode), "posix", "page_cache", or an `Engine` created for this store. With "page_cache" and
            `host_memory=0`, all processes of a machine share one copy in the kernel's page cache, which the kernel
            frees under memory pressure.
        policy: Eviction policy of blocks in memory: "lru", "lfu", or, for methods that select tokens, "attention" or
            "importance". Each method names the policy it was published with: `policy=method.policy`.
        ttl: Lifetime of a segment in seconds, or None for no limit.
        free_space_floor: Size of the free space that is always left on the file system.
        queue_memory: Size of the KV that may wait to be written before a request waits for the disk. KV of a cache that
            is garbage-collected cannot wait: if there is no room, it is not stored, and this is counted.
        queue_device_memory: Size of the queued KV that may stay in GPU memory, where it was computed. Beyond this
            limit, queued KV is first copied to the host. The KV of a single prompt may exceed the limit.
        codec: Encoding of KV for methods without a codec of their own: "raw" (lossless), or "int8" or "fp8", which are
            lossy and take half the space of bfloat16 on disk and in memory. KV stored with one codec is found only with
            the same codec.
        spot_checks: Share of exactly restored tokens to recompute and compare with the stored KV, in at most the same
            share of request time. If they differ by more than rounding, this `KVStore` object no longer uses or adds KV
            under the model's fingerprint, a warning names the segment, and `store.stats.failed_spot_checks` counts it.
            0 disables spot checks.
        remote: Address of a place that several machines share, such as "s3://bucket/prefix" or "redis://host:6379"
            (see docs/remote.md), or an open `ObjectBackend`. What one machine computes, the others restore: a prompt
            is looked up there if this store lacks a part of it, and the segments are copied to this store. Prompts are
            found only if they were sent by a store with this remote, or by `hf-tiered-cache copy`: `KVStore(address)`
            makes no entries for lookups. The remote never fails a request. `store.stats.remote` counts its traffic.
        remote_write: Segments that are sent to the remote, in the background: "always" (all new ones), "pinned", or
            "never". A store that sends none reads a folder ("file:///folder") only if it is a store already.

    Raises:
        ConfigError: An argument is invalid, or the store is encrypted with another key.
        StoreError: `path` cannot be a store, because it is a file or a folder with other files, or because a part of
            the store is a link. Or `remote` is a folder that is no store, and cannot or must not become one.
    """

    @configurable
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        backend: SegmentBackend | None = None,
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
        free_space_floor: int | str = "256MiB",
        queue_memory: int | str = "2GiB",
        queue_device_memory: int | str = "1GiB",
        codec: str = RAW,
        spot_checks: float = 0.01,
        remote: str | ObjectBackend | None = None,
        remote_write: str = "always",
    ) -> None:
        try:
            cipher = cipher_of(key)
            no_salt = salt is not None and not salt
            secret = Hidden(cipher.chain_secret(salt))
        finally:
            del key, salt  # tracebacks may show variables
        if ttl is not None and not (isinstance(ttl, int | float) and 0 < ttl <= _MOST_TTL):  # also NaN
            raise ConfigError(f"ttl must be a number of seconds above 0, or None for no limit, not {with_type(ttl)}")
        check_switches(verify=verify)
        if no_salt:
            raise ConfigError("the salt is empty; omit it, or pass a secret")
        if remote_write not in WRITES:
            raise ConfigError(unknown_name("remote_write", remote_write, WRITES))
        quota = None if disk_quota is None else parse_bytes(disk_quota, "disk_quota")
        limits = Limits(quota, floor=parse_bytes(free_space_floor, "free_space_floor"))
        queue_bytes = parse_bytes(queue_memory, "queue_memory")
        queue_device_bytes = parse_bytes(queue_device_memory, "queue_device_memory")
        self.ttl, self.policy, self.codec = ttl, policy, make_codec(codec).name
        sizes = parse_bytes(host_memory, "host_memory"), parse_bytes(device_memory, "device_memory")
        index_budget = parse_bytes(index_memory, "index_memory")
        make_policy(policy)  # refuses an unknown one before a folder is made
        remote_backend = None if remote is None else open_remote(remote, make=remote_write != "never")
        with ExitStack() as opened:  # closes a remote that was opened here, if the store cannot be opened
            if remote_backend is not None and isinstance(remote, str):
                opened.callback(remote_backend.close)
            place = open_backend(path, backend, engine)
            self.path = place.root if isinstance(place, FolderBackend) else None
            """Folder of the store, or None if it is in no folder."""
            residency = Residency(
                *sizes,
                policy,
                direct=place.reads_device and not cipher.key_id,  # the CPU decrypts
                index_budget=index_budget,
                register=place.register,
            )
            self._storage = Storage(
                SegmentStore(place, verify=verify, limits=limits, cipher=cipher),
                residency,
                secret=secret,
                policy=policy,
                codec=self.codec,
                ttl=ttl,
                queue_bytes=queue_bytes,
                queue_device_bytes=queue_device_bytes,
                spot_checks=spot_checks,
                remote=remote_backend,
                remote_write=remote_write,
            )
            opened.pop_all()
        for opened_backend in (place, remote_backend):
            if isinstance(opened_backend, ObjectBackend):
                opened_backend.is_used = True

    # --- KV of prompts

    def precompute(
        self,
        model: torch.nn.Module,
        input_ids: Any,
        *,
        method: Method | str | None = None,
        passages: bool = False,
        progress: bool = True,
        pin: bool = False,
        label: str = "",
        labels: Sequence[str] | None = None,
        batch_tokens: int = BATCH_TOKENS,
        tag: str = "",
    ) -> PrecomputeReport:
        """Compute and store the KV of prompts or passages ahead of time.

        Args:
            model: Causal LM of transformers.
            input_ids: One or several prompts: a tensor `[tokens]` or `[prompts, tokens]`, or lists of token ids.
            method: Method that will restore them; segments are stored in its geometry. None for exact reuse.
            passages: Whether the prompts are passages, to be restored at any position of a prompt. Each passage is
                computed alone after the method's `lead` text, without the lead's KV, and stored in multiples of 16
                tokens. The default method is then `CacheTune()`. Methods with the same lead also find these passages.
                The ranking "context" computes each passage once more without the lead text. Passages that are stored
                but lack the method's ranking are ranked.
            progress: Whether to show a progress bar.
            pin: Whether to protect the segments from eviction.
            label: See `TieredCache`.
            tag: See `TieredCache`.
            labels: For each passage, the id of the document it belongs to; several passages may share one. When all
                passages of a label are stored, earlier passages of the label are deleted unless another label names
                them.
            batch_tokens: Maximum number of tokens computed in one pass, for passages of equal length. 1 computes each
                passage alone.

        Returns:
            Number of tokens that were computed, and that were already stored.

        Raises:
            ConfigError: An argument is invalid.
            StoreError: The labels cannot be saved. The passages are stored nevertheless.
        """
        from .operations.precompute import PrecomputeSettings, precompute

        settings = PrecomputeSettings(method, progress, pin, label, tag)
        if passages:
            from .operations.passages import precompute_passages

            return precompute_passages(self._opened, model, input_ids, settings, labels, batch_tokens)
        if labels is not None:
            raise ConfigError("labels apply to passages only; also pass passages=True")
        return precompute(self._opened, model, input_ids, settings)

    def rank(self, method: Method | str, *, ids: Iterable[str] | None = None, progress: bool = True) -> int:
        """Rank the tokens of stored passages for a method, and add or update the ranking.

        Rankings by energy and the random ranking are computed from the stored KV: `store.rank(CacheTune.paper())`. The
        ranking "context" needs the model and is made by `precompute`.

        Args:
            method: Method that uses the ranking.
            ids: Ids of the segments to rank; None for all passages.
            progress: Whether to show a progress bar.

        Returns:
            Number of passages that were ranked.

        Raises:
            ConfigError: The method uses no ranking, or its ranking needs the model and the passages.
        """
        from .operations.passages import passages_method, rank_stored

        return rank_stored(self._opened, passages_method(method), ids, progress)

    def lookup(
        self, model: torch.nn.Module, input_ids: Any, *, method: Method | str | None = None, tag: str = ""
    ) -> Lookup:
        """Return how much of a prompt is stored, and in which tiers, without computing anything.

        Args:
            model: Causal LM of transformers.
            input_ids: One prompt, `[tokens]` or `[1, tokens]`.
            method: Method that would restore the prompt; None for exact reuse.
            tag: See `TieredCache`.
        """
        from .operations.precompute import lookup

        return lookup(self._opened, model, input_ids, method, tag)

    def warm(
        self,
        model: torch.nn.Module,
        input_ids: Any,
        *,
        method: Method | str | None = None,
        tag: str = "",
        progress: bool = True,
    ) -> Lookup:
        """Load the stored KV of a prompt into memory, within the memory budgets, without computing anything.

        Arguments are those of `lookup`, and whether to show a progress bar. Returns the result of `lookup` afterwards.
        """
        from .operations.precompute import warm

        return warm(self._opened, model, input_ids, method, tag, progress)

    def calibrate(self, model: torch.nn.Module, **settings: Any) -> Calibration:
        """Measure the fastest recompute ratio for this model, machine and store.

        `CacheTune(recompute="auto")` uses the result. Settings: see `hf_tiered_cache.operations.calibrate.calibrate`.
        """
        from .operations.calibrate import calibrate

        return calibrate(self._opened, model, **settings)

    def calibrate_prefix(self, model: torch.nn.Module, **settings: Any) -> list[PrefixCosts]:
        """Measure the cost per prefix token of computing and of restoring, for this model, machine and store.

        `Exact()` then chooses the share of a prefix to compute while the rest is loaded, up to all of it, that makes
        the prefix available soonest. For settings see `hf_tiered_cache.operations.calibrate.calibrate_prefix`.
        """
        from .operations.calibrate import calibrate_prefix

        return calibrate_prefix(self._opened, model, **settings)

    def calibrate_quality(self, model: torch.nn.Module, input_ids: Any, **settings: Any) -> list[QualityFinding]:
        """Measure the loss of methods at several budgets, on this model and these texts.

        `ContiguousKV(quality=0.02)` then uses the lowest budget that lost at most a quarter of 0.02 nats. The texts are
        stored in a temporary folder during the measurement, encrypted with a temporary key if this store is encrypted.
        Folders of measurements that were killed are removed.
        For arguments see `hf_tiered_cache.operations.quality.calibrate_quality`.
        """
        from .operations.quality import calibrate_quality

        return calibrate_quality(self._opened, self._scratch, model, input_ids, **settings)

    @contextmanager
    def _scratch(self, method: Method) -> Iterator[Storage]:
        from .operations.quality import scratch_folder

        key = os.urandom(32) if self._storage.disk.cipher.key_id else None
        isolated: dict[str, Any] = {"remote": None, "disk_quota": None, "ttl": None}  # whatever the environment says
        with (
            scratch_folder() as folder,
            KVStore(folder, policy=method.policy, codec=self.codec, key=key, **isolated) as store,
        ):
            yield store._storage

    def relayout(
        self, geometry: Geometry | Method | str, ids: Iterable[str] | None = None, *, progress: bool = True
    ) -> int:
        """Rewrite segments in the geometry of a method: `store.relayout(method)`. No model is needed.

        Each segment keeps its codec: its prefix hashes depend on the codec, and the tokens needed to recompute them are
        not stored.

        Args:
            geometry: New geometry, or the method that defines it. The new segment is complete on disk before the old
                one is deleted.
            ids: Ids of the segments to rewrite; None for all.
            progress: Whether to show a progress bar.

        Returns:
            Number of segments that were rewritten. Unreadable segments are left unchanged and counted in the
            statistics. Segments that hold only a part of their tokens are left unchanged as well, but not counted.

        Raises:
            ConfigError: The geometry names a lossy codec, and a segment is stored with another codec.
        """
        from .methods import Exact, make_method

        method = Exact(geometry=geometry) if isinstance(geometry, Geometry) else make_method(geometry)
        codec, ids = method.geometry.codec, None if ids is None else dict.fromkeys(ids)
        for row in self.segments() if codec != RAW else ():
            if codec_in(row.provenance) != codec and (ids is None or row.id in ids):
                raise ConfigError(
                    f"segment {row.id} is stored with the codec {codec_in(row.provenance)}, and relayout does not "
                    f"change the codec; call store.precompute(model, input_ids, method=...) with codec={codec!r} to "
                    "store the prompt again"
                )
        relayout = partial(self._storage.rewriter.relayout, geometry=method.geometry)
        return self._rewrite_segments(relayout, ids, "relayout", progress)


def open_store(store: KVStore | str | os.PathLike[str], method: Method, stores_by_path: dict[str, Any]) -> KVStore:
    """Return the given store, or open the one at the given path with the eviction policy of the method.

    Stores that were opened by path are in `stores_by_path`, so that each is opened once.

    Raises:
        ConfigError: `store` is neither a store nor a path.
        StoreClosedError: The store was closed, or opened before this process was forked.
    """
    if isinstance(store, str | os.PathLike):
        key = f"store {folder_of(store) or store}"
        kv_store = stores_by_path.get(key)
        if kv_store is None or not kv_store.usable:  # closed, or opened before this process was forked
            kv_store = stores_by_path[key] = KVStore(store, policy=method.policy)
        store = kv_store
    if not isinstance(store, KVStore):
        raise ConfigError(f"store must be a KVStore or the path of one, not {with_type(store)}")
    store._storage.check_open()
    return store


def storage_of(store: KVStore) -> Storage:
    """Return the `Storage` of a store, for caches and tools."""
    return store._storage
