"""What benchmarks of selective re-prefill share: systems with their stores, a slow disk, requests in turns."""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import first_token, median, seconds
from slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel
from workload import Prompts, requests

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Method
from hf_tiered_cache.stats import TIERS
from hf_tiered_cache.units import parse_bytes

PAPER_LOAD_S = 56 * 1024 / 7.45e9
"""Seconds to load a token's KV of Qwen2.5-7B, from the SSD of ContiguousKV's Section 5.1."""
PAPER_COMPUTE_S = 2 * 7.6e9 / (0.5 * 312e12)
"""Seconds to compute a token of it on an A800 that reaches half of its peak in bfloat16."""
LATENCY_S = 100e-6

PARTS = {
    "identify_wait_s": "waiting for scoring reads",
    "identify_s": "choosing",
    "stall_s": "waiting for selected blocks",
    "copy_s": "copying",
    "compute_s": "computing",
    "match_s": "look-up",
}
"""The parts that a time to first token is the sum of. See `summarise`."""

Rows = dict[str, list[dict[str, Any]]]
"""For each system its measured requests."""


@dataclass(frozen=True)
class System:
    """A method, and the eviction policy of the store it runs on."""

    name: str
    method: Method
    policy: str
    every: int = 1
    """It is asked one request in so many (what computes everything takes long)."""
    own_files: bool = False
    """Whether it rewrites what is stored. Others that want the same geometry share the files."""


class Bench:
    """One model, prefixes of one length whose KV it has computed, and a store for each system.

    Args:
        arguments: those of `add_arguments`.
        model: any causal LM.
        prompts: what is asked.
        folder: where stores are made.
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
        self.bandwidth = arguments.bandwidth
        if self.bandwidth is None:
            self.bandwidth = self.token_bytes / (self.token_seconds() * PAPER_LOAD_S / PAPER_COMPUTE_S)

    def token_seconds(self) -> float:
        """What a token of a suffix takes over KV that is there, in a DynamicCache in memory."""
        cache, prefix = DynamicCache(config=self.model.config), self.prompts.prefixes[0].unsqueeze(0).to(self.device)
        tokens = self.arguments.suffix
        with torch.no_grad():
            self.model(input_ids=prefix[:, : prefix.shape[1] // 8], past_key_values=cache, logits_to_keep=1)
        held = cache.get_seq_length()

        def once() -> None:
            cache.crop(held - cache.get_seq_length())  # 0 the first time, which crops nothing
            with torch.no_grad():
                self.model(input_ids=prefix[:, :tokens], past_key_values=cache, logits_to_keep=1)

        once()
        return median(seconds(once, self.device) for _ in range(5)) / tokens

    def described(self) -> dict[str, Any]:
        """What was asked of what, JSON-ready."""
        return {
            "prefixes": len(self.prompts.prefixes),
            "prefix_tokens": len(self.prompts.prefixes[0]),
            "prompts": self.prompts.about,
            "kv_bytes": self.kv_bytes,
            "token_bytes": self.token_bytes,
            "memory_bytes": {"device": self.device_memory, "host": self.host_memory},
            "disk_bytes_per_second": self.bandwidth or "real",
            "requests": {"warm_up": self.arguments.warm_up, "measured": self.arguments.requests},
        }

    def store_for(self, system: System) -> KVStore:
        """The store, cut as the system wants it, with its share of memory and the slower disk.

        Systems that want the same share the files, and nothing else; those that rewrite them have their own.
        """
        geometry = system.method.geometry
        name = f"{geometry.to_json()} {system.name if system.own_files else ''}"
        path = self.folder / re.sub(r"\W+", "-", name).strip("-")
        if not path.exists():
            shutil.copytree(self.source, path)
            with KVStore(path, host_memory=0) as store:
                store.relayout(geometry, progress=False)
        return KVStore(
            path,
            host_memory=self.host_memory,
            device_memory=self.device_memory,
            index_memory="1GiB",
            policy=system.policy,
            engine=SlowDiskEngine(SlowDisk(self.bandwidth, LATENCY_S)) if self.bandwidth else "auto",
        )

    def turns(self, systems: list[System], stores: dict[str, KVStore], rows: Rows) -> Iterator[None]:
        """Ask one request after the other, each of all systems, and enter in `rows` what was measured."""
        warm_up = self.arguments.warm_up
        for number, ids in enumerate(requests(self.prompts, warm_up + self.arguments.requests)):
            for system in systems:
                if number % system.every:
                    continue
                row = self.ask(system, stores[system.name], ids.to(self.device))
                if number >= warm_up or system.every > 1:
                    rows[system.name].append(row)
            yield

    def ask(self, system: System, store: KVStore, ids: torch.Tensor) -> dict[str, Any]:
        """One request: everything that was counted, and the time to its first token."""
        cache = TieredCache(self.model, store, method=system.method, record=False)
        took = first_token(self.model, ids, lambda: cache)
        store.flush()  # waits for IMPRESS's laying out anew, so that no other system shares the machine with it
        return cache.stats.as_dict() | {"ttft_s": took}


def ask_all(asked: list[tuple[Bench, list[System]]]) -> list[dict[str, dict[str, Any]]]:
    """Ask all systems of all benches in turns; for each bench and system what its requests come to."""
    found: list[Rows] = [{system.name: [] for system in systems} for _, systems in asked]
    with ExitStack() as stack:
        turns = []
        for (bench, systems), rows in zip(asked, found, strict=True):
            stores = {system.name: stack.enter_context(bench.store_for(system)) for system in systems}
            turns.append(bench.turns(systems, stores, rows))
        arguments = asked[0][0].arguments
        total = arguments.warm_up + arguments.requests
        for _ in tqdm(zip(*turns, strict=True), total=total, unit="request"):
            pass
    return [
        {name: summarise(some, bench.token_bytes) for name, some in rows.items()}
        for (bench, _), rows in zip(asked, found, strict=True)
    ]


def summarise(rows: list[dict[str, Any]], token_bytes: int) -> dict[str, Any]:
    """What the requests of one system come to: means, unless the name says otherwise.

    Args:
        rows: of `Bench.ask`.
        token_bytes: KV of a token, in all layers.

    Returns:
        Among others, in `parts`, the time split: PARTS add up to the mean time to first token. Disk time (`io_s`)
        passes beside them.
    """
    ttft = [row["ttft_s"] for row in rows]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    read, identifying, guessed, used = map(mean, ("bytes_read", "bytes_identifying", "bytes_guessed", "bytes_used"))
    select, stall, assemble, match = map(mean, ("select_seconds", "stall_seconds", "assemble_seconds", "match_seconds"))
    waiting = mean("select_stall_seconds")
    asked = sum(row[tier]["hits"] for row in rows for tier in TIERS)
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
        "bytes_read": read,
        "bytes_identifying": identifying,
        "bytes_guessed": guessed,
        "bytes_used": used,
        "tokens_read": (read - identifying) / token_bytes,
        "read_amplification": (read - identifying - guessed) / used if used else 1.0,
        "hit_ratio": {tier: sum(row[tier]["hits"] for row in rows) / asked if asked else 0.0 for tier in TIERS},
        "parts": parts,
        "io_s": mean("io_seconds"),
        "ttft_s": ttft,
    }


def disk_and_memory(result: dict[str, Any]) -> str:
    """For a page: what `described` says, as sentences."""
    mib, speed = 1 << 20, result["disk_bytes_per_second"]
    disk = "the real disk" if speed == "real" else f"an emulated disk of {speed / 1e6:.0f} MB/s"
    return (
        f"{result['prefixes']} prefixes of {result['prefix_tokens']} tokens, {result['kv_bytes'] / mib:.0f} MiB of KV, "
        f"{sum(result['memory_bytes'].values()) / mib:.1f} MiB of memory for it; "
        f"{result['requests']['measured']} requests after {result['requests']['warm_up']}; {disk}. {result['prompts']}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks of this kind can be told."""
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of a model with random weights (see common.py)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--suffix", type=int, default=32, help="random tokens of a suffix, and of the speed's measure")
    parser.add_argument("--requests", type=int, default=60, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=18, help="requests before, the first ones of each prefix")
    parser.add_argument("--memory-share", type=float, default=0.2, help="host memory, as a share of all KV")
    parser.add_argument("--host-memory", help="instead, such as 24GiB")
    parser.add_argument("--device-memory", default="0")
    parser.add_argument(
        "--bandwidth", type=float, help="bytes a second of the emulated disk; 0: the real one (default: see above)"
    )
    parser.add_argument("--name", help="of the results (default: from the model, dtype and device)")
    parser.add_argument("--folder", type=Path, help="where stores are made; a temporary one if not given")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
