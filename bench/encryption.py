"""Cost of encryption: restoring from disk and recording with and without a key, and the speed of decryption.

    python bench/encryption.py                                      # Qwen2.5-0.5B's shape, float32, this machine's CPU

Both variants are measured in every turn, in alternating order. Figures are medians; ratios are taken within a turn.
Reads are cold: O_DIRECT, and the files are dropped from the page cache. For blocks in memory, the best of many short
turns is reported, since only other programs slow a turn down.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cryptography
import numpy as np
import torch
from lib.common import add_shape, build, first_token, forget_page_cache, interleaved, median, parser_of, ratio, seconds
from lib.pages import machine, machine_text, publish, table
from tqdm.auto import tqdm

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store.cipher import StoreCipher
from hf_tiered_cache.store.container import Guard
from hf_tiered_cache.store.memory import aligned_bytes

SUFFIX = 64
BLOCKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
THREADS = (1, 8)
WAYS = ("plain", "encrypted")


class Bench:
    """Model, and a folder for each variant."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.device = torch.device("cpu")
        self.model = build(arguments.shape, getattr(torch, arguments.dtype), self.device)
        self.keys = {"plain": None, "encrypted": secrets.token_bytes(32)}
        self._random = torch.Generator().manual_seed(0)

    def ids(self, tokens: int) -> torch.Tensor:
        """Draw random tokens, int64 `[1, tokens]`."""
        return torch.randint(1, self.model.config.vocab_size, (1, tokens), generator=self._random)

    def store(self, path: Path, way: str) -> KVStore:
        """Open the store of a variant."""
        return KVStore(path / way, key=self.keys[way], engine="posix")

    def first_token(self, ids: torch.Tensor, cache: TieredCache) -> float:
        """Return the seconds that `generate()` takes to the first token."""
        return first_token(self.model, ids, lambda: cache)

    def run(self, prefix: int) -> dict[str, Any]:
        """Measure recording, restoring and reading of one prefix length."""
        path, document = self.folder / str(prefix), self.ids(prefix)
        result: dict[str, Any] = {"prefix": prefix, "suffix": SUFFIX}
        result |= self.recording(document, path)
        result |= self.restoring(document, path)
        result |= self.reading(path)
        shutil.rmtree(path)
        gc.collect()
        return result

    def recording(self, document: torch.Tensor, path: Path) -> dict[str, Any]:
        """Measure the first request, and the time until its KV is on disk. The last turn fills the stores."""
        write_times: dict[str, list[float]] = {way: [] for way in WAYS}

        def record(way: str) -> float:
            with self.store(path, way) as store:
                store.clear(disk=True)
                cache = TieredCache(self.model, store)
                took = self.first_token(torch.cat([document, self.ids(SUFFIX)], dim=1), cache)
                cache.store_now()
                write_times[way].append(seconds(store.flush, self.device))
            return took

        times = in_turns(record, self.arguments.record_repeats, warm_up=0)
        return {
            "record_s": times,
            "record_ratio": _ratio(times),
            "flush_s": write_times,
            "flush_ratio": _ratio(write_times),
        }

    def restoring(self, document: torch.Tensor, path: Path) -> dict[str, Any]:
        """Measure the same prefix with another suffix from disk, with newly opened stores."""
        ids = torch.cat([document, self.ids(SUFFIX)], dim=1)
        stats: dict[str, Any] = {}

        def restore(way: str) -> float:
            forget_page_cache(path)
            with self.store(path, way) as store:
                cache = TieredCache(self.model, store, record=False)
                took = self.first_token(ids, cache)
            assert cache.stats.tokens_restored >= document.shape[1] // 16 * 16, "nothing was restored"
            stats[way] = cache.stats.as_dict()
            return took

        times = in_turns(restore, self.arguments.repeats, warm_up=2)
        return {"disk_s": times, "disk_ratio": _ratio(times), "stats": stats}

    def reading(self, path: Path) -> dict[str, Any]:
        """Measure reading all blocks of the prefix through the store, with checks or decryption."""
        stores = {way: self.store(path, way) for way in WAYS}
        readers = {}
        for way, store in stores.items():
            (row,) = [row for row in store.segments() if row.position == 0]
            readers[way] = storage_of(store).disk.reader(row.id)
        shape = readers["plain"].shape
        block_groups = [
            aligned_bytes(shape.chunks_in(block_group) * block_group.block_bytes).view(-1, block_group.block_bytes)
            for block_group in shape.block_groups
        ]

        def read(way: str) -> float:
            forget_page_cache(path)
            started = time.perf_counter()
            for future in [readers[way].read(number, [(0, memory)]) for number, memory in enumerate(block_groups)]:
                future.result()
            return time.perf_counter() - started

        times = in_turns(read, max(self.arguments.repeats, 7), warm_up=2)
        for store in stores.values():
            store.close()
        return {
            "read_bytes": sum(memory.numel() for memory in block_groups),
            "read_s": times,
            "read_ratio": _ratio(times),
        }


def in_turns(action: Callable[[str], float], repeats: int, warm_up: int) -> dict[str, list[float]]:
    """Run both variants in every turn."""
    return interleaved({way: partial(action, way) for way in WAYS}, repeats, warm_up)


def _ratio(times: dict[str, list[float]]) -> float:
    return ratio(times["encrypted"], times["plain"])


def raw(nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measure checks and decryption of blocks in memory, in bytes per second, by one and by several threads."""
    cipher = StoreCipher(secrets.token_bytes(32))
    guards: dict[str, Guard] = {"plain": Guard(), "encrypted": cipher.guard(cipher.new_seal())}
    results = []
    for block in BLOCKS:
        plain = aligned_bytes(nbytes // block * block).view(-1, block).random_(256)
        memory, sealed, digests = torch.empty_like(plain), {}, {}
        for way, guard in guards.items():
            pieces = [(piece.clone(), table) for piece, table in guard.seal(0, plain)]
            sealed[way] = torch.cat([piece for piece, _ in pieces])
            digests[way] = np.concatenate([table for _, table in pieces])

        def speed(way: str, threads: int, memory=memory, sealed=sealed, digests=digests) -> float:
            memory.copy_(sealed[way])
            faults: list[int | None] = []

            def work(start: int, stop: int) -> None:
                faults.append(guards[way].open(start, memory[start:stop], digests[way][start:stop]))

            bounds = itertools.pairwise(np.linspace(0, len(memory), threads + 1).astype(int).tolist())
            workers = [threading.Thread(target=work, args=pair) for pair in bounds]
            started = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            took = time.perf_counter() - started
            assert faults == [None] * threads, "a sealed block cannot be opened"
            return memory.numel() / took

        for threads in THREADS:
            speeds = in_turns(lambda way, threads=threads: speed(way, threads), repeats, warm_up=1)
            results.append({"block_bytes": block, "threads": threads, "bytes_per_s": speeds})
    return results


# --- reporting


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info = document["machine"]

    def medians(times: dict[str, list[float]]) -> list[str]:
        return [f"{median(times[way]) * 1e3:.0f} ms" for way in WAYS]

    rows = [
        [
            str(result["prefix"]),
            f"{result['read_bytes'] / 2**20:.0f} MiB",
            *medians(result["disk_s"]),
            f"{result['disk_ratio']:.3f}",
            *(f"{result['read_bytes'] / median(result['read_s'][way]) / 1e9:.2f} GB/s" for way in WAYS),
            f"{result['read_ratio']:.2f}",
        ]
        for result in document["results"]
    ]
    recording_rows = [
        [
            str(result["prefix"]),
            *medians(result["record_s"]),
            f"{result['record_ratio']:.3f}",
            *medians(result["flush_s"]),
            f"{result['flush_ratio']:.2f}",
        ]
        for result in document["results"]
    ]
    speeds = [
        [
            f"{result['block_bytes'] >> 10} KiB",
            str(result["threads"]),
            *(f"{max(result['bytes_per_s'][way]) / 1e9:.1f} GB/s" for way in WAYS),
        ]
        for result in document["raw"]
    ]
    return (
        f"# Encryption at rest, {document['shape']} in {document['dtype']} on {machine_info['device']}\n\n"
        f"{machine_text(machine_info)} cryptography {document['cryptography']}. Random "
        f"weights, suffix of {SUFFIX} tokens. Medians of {document['repeats']} turns ({document['record_repeats']} of "
        "recording). Ratios are those with a key to those without, within a turn. The load average was "
        f"{document['load'][0]:.1f} at the beginning and {document['load'][1]:.1f} at the end; above 2, other programs "
        "were running, and times are longer and less certain. The JSON has all times.\n\n"
        "## Restoring from disk, cold\n\n"
        + table(
            [
                "prefix",
                "KV",
                "first token",
                "with a key",
                "ratio",
                "read and check",
                "read and decrypt",
                "ratio",
            ],
            rows,
        )
        + "\n## Recording\n\n"
        + table(
            [
                "prefix",
                "first request",
                "with a key",
                "ratio",
                "until stored on disk",
                "with a key",
                "ratio",
            ],
            recording_rows,
        )
        + f"\n## Blocks in memory, best of {document['raw_turns']} turns\n\n"
        + table(["block", "threads", "xxh3, checked", "AES-256-GCM, decrypted"], speeds)
    )


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_shape(parser, "1024,4096", repeats=9)
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--record-repeats", type=int, default=4, help="number of turns that compute the whole prompt")
    parser.add_argument("--raw-turns", type=int, default=60, help="number of turns with blocks in memory")
    parser.add_argument("--raw-bytes", type=int, default=8 << 20, help="bytes of blocks in memory")
    parser.add_argument("--store", type=Path, help="folder on the disk to measure (default: a temporary one)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-encryption-", dir=arguments.store))
    try:
        load = os.getloadavg()[0]
        speeds = raw(arguments.raw_bytes, arguments.raw_turns)
        bench = Bench(arguments, folder)
        results = [bench.run(int(prefix)) for prefix in tqdm(arguments.prefixes.split(","), desc="prefixes")]
        document = {
            "shape": arguments.shape,
            "dtype": arguments.dtype,
            "repeats": arguments.repeats,
            "record_repeats": arguments.record_repeats,
            "raw_turns": arguments.raw_turns,
            "load": [load, os.getloadavg()[0]],
            "cryptography": cryptography.__version__,
            "machine": machine(bench.device, folder),
            "raw": speeds,
            "results": results,
        }
        publish(arguments.out, f"encryption-{arguments.shape}-{arguments.dtype}-cpu", document, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
