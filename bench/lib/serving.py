"""Common parts of benchmarks of selective re-prefill: systems with stores, a slow disk, requests in turns."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import figures_of, first_token, median, seconds
from lib.slow_disk import SlowDisk, SlowDiskEngine
from lib.workload import Prompts, requests
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import ContiguousKV, Method
from hf_tiered_cache.stats import TIERS
from hf_tiered_cache.units import parse_bytes

PAPER_LOAD_S = 56 * 1024 / 7.45e9
"""Seconds to load a token's KV of Qwen2.5-7B, from the SSD of ContiguousKV's Section 5.1."""
PAPER_COMPUTE_S = 2 * 7.6e9 / (0.5 * 312e12)
"""Seconds to compute a token of it on an A800 that reaches half of its peak in bfloat16."""
LATENCY_S = 100e-6

PARTS = {
    "identify_wait_s": "waiting for scoring reads",
    "identify_s": "selecting",
    "stall_s": "waiting for selected blocks",
    "copy_s": "copying",
    "compute_s": "computing",
    "match_s": "lookup",
}
"""Parts that add up to the time to first token. See `summarise`."""

Rows = dict[str, list[dict[str, Any]]]
"""Measured requests by system."""


@dataclass(frozen=True)
class System:
    """Method with the eviction policy of its store."""

    name: str
    method: Method
    policy: str = ""
    """Eviction policy; "" for the method's."""
    interval: int = 1
    """Every how many requests the system answers one; higher for slow systems."""


class Bench:
    """Model, prefixes of one length with their KV, and a store for each system.

    `bandwidth` is the bandwidth of the emulated disk in bytes per second, or 0 for the real disk. It applies to stores
    that are opened afterwards.

    Args:
        arguments: Arguments of `add_arguments`.
        model: Causal LM.
        prompts: Prefixes and suffixes of the requests.
        folder: Parent folder of the stores.
    """

    def __init__(self, arguments: argparse.Namespace, model: PreTrainedModel, prompts: Prompts, folder: Path) -> None:
        self.arguments, self.model, self.prompts, self.folder = arguments, model, prompts, folder
        self.device = torch.device(arguments.device)
        self.source = folder / "source"
        with KVStore(self.source, host_memory=0) as store:
            store.precompute(model, prompts.prefixes)
            rows = store.segments()
            self.kv_bytes = sum(row.nbytes for row in rows)
            self.token_bytes = storage_of(store).disk.reader(rows[0].id).shape.layout.bytes_per_token
        share = int(arguments.memory_share * self.kv_bytes)
        self.host_memory = parse_bytes(arguments.host_memory or share, "host_memory")
        self.device_memory = parse_bytes(arguments.device_memory, "device_memory")
        self._indexes: dict[str, int] = {}
        self._learned: dict[str, Path] = {}
        self.bandwidth: float = arguments.bandwidth
        if arguments.bandwidth is None:
            self.bandwidth = self.calibration["bulk"]["bytes_per_second"]

    # --- the disk

    @cached_property
    def calibration(self) -> dict[str, dict[str, float]]:
        """Equivalent of the paper's disk on this machine, by the time of a token in bulk prefill and in a suffix."""
        load_over_compute = PAPER_LOAD_S / PAPER_COMPUTE_S
        return {
            name: {"token_s": token_s, "bytes_per_second": self.token_bytes / (token_s * load_over_compute)}
            for name, token_s in self.token_seconds().items()
        }

    def token_seconds(self) -> dict[str, float]:
        """Measure the seconds that a token takes to compute, as medians.

        Returns:
            "bulk": token of a whole prefix, computed at once. "suffix": token of a suffix after an eighth of a prefix
            in memory.
        """
        prefix = self.prompts.prefixes[0].unsqueeze(0).to(self.device)  # [1, tokens]
        tokens, suffix = prefix.shape[1], self.arguments.suffix

        def new_cache() -> DynamicCache:
            return DynamicCache(config=self.model.config)

        def compute(ids: torch.Tensor, cache: DynamicCache) -> None:
            with torch.no_grad():
                self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

        cache = new_cache()
        compute(prefix[:, : tokens // 8], cache)
        cached_tokens = cache.get_seq_length()

        def compute_suffix() -> None:
            cache.crop(cached_tokens - cache.get_seq_length())  # 0 the first time, which crops nothing
            compute(prefix[:, :suffix], cache)

        compute_suffix()
        return {
            "bulk": median(seconds(lambda: compute(prefix, new_cache()), self.device) for _ in range(3)) / tokens,
            "suffix": median(seconds(compute_suffix, self.device) for _ in range(5)) / suffix,
        }

    def described(self) -> dict[str, Any]:
        """Return the settings and sizes of the benchmark, JSON-ready."""
        return {
            "prefixes": len(self.prompts.prefixes),
            "prefix_tokens": len(self.prompts.prefixes[0]),
            "suffix_tokens": self.arguments.suffix,
            "prompts": self.prompts.about,
            "kv_bytes": self.kv_bytes,
            "token_bytes": self.token_bytes,
            "memory_bytes": {"device": self.device_memory, "host": self.host_memory},
            "disk_bytes_per_second": self.bandwidth or "real",
            "calibration": self.calibration,
            "requests": {"warm_up": self.arguments.warm_up, "measured": self.arguments.requests},
        }

    # --- stores

    def memory(self, system: System) -> dict[str, int]:
        """Return the bytes of memory of a system's store: for blocks on the device and the host, and for its index.

        All systems have the same total. An index takes its memory from the blocks, on the device as far as possible.
        """
        device, host, on_gpu = self.device_memory, self.host_memory, self.device.type == "cuda"
        index = min(self.index_bytes(system), host + device * on_gpu)
        device_index = min(index, device) if on_gpu else 0
        return {"device": device - device_index, "host": host - (index - device_index), "index": index}

    def index_bytes(self, system: System) -> int:
        """Return the memory of a system's index of all prefixes, extrapolated from one prefix."""
        if not isinstance(system.method, ContiguousKV):
            return 0
        if system.name not in self._indexes:
            with KVStore(self._files(system, "throwaway"), host_memory=0, index_memory="1GiB") as store:
                self.ask(system, store, next(requests(self.prompts, 1)).to(self.device))
                self._indexes[system.name] = store.stats.index.bytes * len(self.prompts.prefixes)
        return self._indexes[system.name]

    def _files(self, system: System, name: str) -> Path:
        """Create the folder of a store with the system's geometry and the state that `learn` left.

        Segments are hard links: they never change, and a new layout writes new segments.
        """
        geometry, path = system.method.geometry, self.folder / "stores" / _as_name(name)
        cut_store = self.folder / "cut" / _as_name(str(geometry.to_json()))
        if not cut_store.exists():
            shutil.copytree(self.source, cut_store, copy_function=_link)
            with KVStore(cut_store, host_memory=0) as store:
                store.relayout(geometry, progress=False)
        shutil.rmtree(path, ignore_errors=True)
        return Path(shutil.copytree(self._learned.get(system.name, cut_store), path, copy_function=_link))

    def learn(self, system: System, times: int) -> None:
        """Request each prefix `times` times from the real disk. Stores that are opened later keep the effects.

        Effects are the order of IMPRESS's tokens, and the scores for eviction.
        """
        bandwidth, self.bandwidth = self.bandwidth, 0
        random, path = np.random.default_rng(2), self.folder / "learned" / _as_name(system.name)
        with self.store_for(system) as store:
            for number, prefix in list(enumerate(self.prompts.prefixes)) * times:
                suffix = torch.from_numpy(self.prompts.suffix(number, random))
                self.ask(system, store, torch.cat([prefix, suffix]).unsqueeze(0).to(self.device))
        self.bandwidth, self._learned[system.name] = bandwidth, Path(shutil.copytree(store.path, path))

    def store_for(self, system: System) -> KVStore:
        """Open a new store for a system, with its share of memory and the emulated disk."""
        memory = self.memory(system)
        return KVStore(
            self._files(system, system.name),
            host_memory=memory["host"],
            device_memory=memory["device"],
            index_memory=memory["index"],
            policy=system.policy or system.method.policy,
            engine=SlowDiskEngine(SlowDisk(self.bandwidth, LATENCY_S)) if self.bandwidth else "auto",
        )

    # --- requests

    def turns(self, systems: list[System], stores: dict[str, KVStore], rows: Rows) -> Iterator[None]:
        """Answer each request with all systems, and append the results to `rows`.

        A row says whether it counts (`measured`), and whether it is the first request to its prefix (`first`).
        """
        warm_up, prefixes = self.arguments.warm_up, len(self.prompts.prefixes)
        for number, ids in enumerate(requests(self.prompts, warm_up + self.arguments.requests)):
            for system in systems:
                if number % system.interval:
                    continue
                row = self.ask(system, stores[system.name], ids.to(self.device))
                row |= {"measured": number >= warm_up or system.interval > 1, "first": number < prefixes}
                rows[system.name].append(row)
            yield

    def ask(self, system: System, store: KVStore, ids: torch.Tensor) -> dict[str, Any]:
        """Answer one request. Return its counters and the time to its first token."""
        cache = TieredCache(self.model, store, method=system.method, record=False)
        took = first_token(self.model, ids, lambda: cache)
        store.flush()  # waits for IMPRESS's new layout, so that it does not slow down another system
        return figures_of(cache.stats) | {"ttft_s": took}


def ask_all(benches: list[tuple[Bench, list[System]]], about: str | None = None) -> list[dict[str, dict[str, Any]]]:
    """Run the requests of all benches in turns, and return a summary by bench and system.

    Args:
        benches: Benches with their systems.
        about: Description of the progress bar.
    """
    rows_by_bench: list[Rows] = [{system.name: [] for system in systems} for _, systems in benches]
    with ExitStack() as stack:
        turns = []
        for (bench, systems), rows in zip(benches, rows_by_bench, strict=True):
            stores = {system.name: stack.enter_context(bench.store_for(system)) for system in systems}
            turns.append(bench.turns(systems, stores, rows))
        arguments = benches[0][0].arguments
        total = arguments.warm_up + arguments.requests
        for _ in tqdm(zip(*turns, strict=True), total=total, unit="request", desc=about):
            pass
    return [
        {
            system.name: summarise(rows[system.name], bench.token_bytes) | {"memory_bytes": bench.memory(system)}
            for system in systems
        }
        for (bench, systems), rows in zip(benches, rows_by_bench, strict=True)
    ]


def summarise(rows: list[dict[str, Any]], token_bytes: int) -> dict[str, Any]:
    """Summarize the requests of one system: means of the measured requests, unless the name says otherwise.

    Args:
        rows: Rows of `Bench.turns`.
        token_bytes: Bytes of a token's KV in all layers.

    Returns:
        Among others: `parts`, which add up to the mean time to first token; `io_s`, the disk time, concurrent with
        them; `first`, means of the first request to each prefix, measured or not.
    """
    first = _first([row for row in rows if row["first"]])
    rows = [row for row in rows if row["measured"]]
    ttft = [row["ttft_s"] for row in rows]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    read_bytes, identifying_bytes, used_bytes = map(mean, ("bytes_read", "bytes_identifying", "bytes_used"))
    select, stall, assemble, match = map(mean, ("select_seconds", "stall_seconds", "assemble_seconds", "match_seconds"))
    waiting = mean("select_stall_seconds")
    lookups = sum(row[tier]["hits"] for row in rows for tier in TIERS)
    parts = {
        "identify_wait_s": waiting,
        "identify_s": select - waiting,
        "stall_s": stall - waiting,
        "copy_s": assemble - select - (stall - waiting),
        "compute_s": statistics.fmean(ttft) - assemble - match,
        "match_s": match,
    }
    return {
        "requests": len(rows),
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p95_s": float(np.percentile(ttft, 95)),
        "ttft_median_s": median(ttft),
        "bytes_read": read_bytes,
        "bytes_identifying": identifying_bytes,
        "bytes_used": used_bytes,
        "tokens_read": (read_bytes - identifying_bytes) / token_bytes,
        "read_amplification": (read_bytes - identifying_bytes) / used_bytes if used_bytes else 1.0,
        "hit_ratio": {tier: sum(row[tier]["hits"] for row in rows) / lookups if lookups else 0.0 for tier in TIERS},
        "parts": parts,
        "io_s": mean("io_seconds"),
        "ttft_s": ttft,
        "first": first,
    }


def _first(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = {"ttft_s": "ttft_mean_s", "select_seconds": "identify_s"}
    names |= {name: name for name in ("bytes_read", "bytes_identifying")}
    return {"requests": len(rows)} | {new: statistics.fmean(row[name] for row in rows) for name, new in names.items()}


def _link(source: str, target: str) -> None:
    """Copy a file of a store; hard-link segments, which never change."""
    (os.link if Path(source).parent.name == "segments" else shutil.copy2)(source, target)


def _as_name(text: str) -> str:
    return re.sub(r"\W+", "-", text).strip("-")


def add_arguments(parser: argparse.ArgumentParser, one_disk: bool = True) -> None:
    """Add the arguments of all benchmarks of selective re-prefill.

    Args:
        parser: Parser of the benchmark.
        one_disk: Whether the benchmark uses one disk, with an argument for its bandwidth.
    """
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="shape of a model with random weights, see common.py")
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of the model")
    parser.add_argument("--layers", type=int, help="number of layers of the shape (default: all)")
    periods = "layers per selection with the paper's settings of ContiguousKV, at most all"
    parser.add_argument("--period", type=int, default=8, help=periods)
    parser.add_argument("--prefixes", type=int, default=8, help="number of prefixes")
    parser.add_argument("--tokens", type=int, help="number of tokens in a prefix")
    parser.add_argument("--suffix", type=int, default=32, help="number of random tokens in a suffix")
    parser.add_argument("--requests", type=int, default=60, help="number of measured requests")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=18,
        help="number of requests before the measurement, including the first one to each prefix",
    )
    parser.add_argument(
        "--memory-share", type=float, default=0.2, help="host memory for KV and indexes, as a share of all KV"
    )
    parser.add_argument("--host-memory", help="host memory in bytes, such as 24GiB; replaces --memory-share")
    parser.add_argument("--device-memory", default="0", help="device memory for KV, such as 10GiB")
    if one_disk:
        parser.add_argument(
            "--bandwidth",
            type=float,
            help="bytes per second of the emulated disk; 0: the real disk (default: see above)",
        )
    else:
        parser.set_defaults(bandwidth=0.0)
    parser.add_argument("--name", help="name of the result files (default: from model, dtype and device)")
    parser.add_argument("--folder", type=Path, help="parent folder of the stores (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder for results")
