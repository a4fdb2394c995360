"""Selective re-prefill: ContiguousKV, IMPRESS and the systems they beat, on one workload, in one run.

    python bench/reprefill.py                                   # Qwen2.5-0.5B's shape, float32, this machine's CPU
    python bench/reprefill.py --shape qwen2.5-7b --dtype bfloat16 --device cuda --bandwidth 0 \
        --device-memory 10GiB --host-memory 24GiB --prefixes 64 --tokens 8192

Many shared prefixes, together larger than the memory for them, are asked again and again under new suffixes; how often
each is asked follows a normal distribution (ContiguousKV, Section 5.1). Every request goes to all systems, one after
the other, each with a store and budgets of its own, so that a machine that slows down slows all of them down. Reads
are cold (O_DIRECT), from a disk that is slowed down: unless --bandwidth says otherwise, so much that loading the KV of
a token takes as long, beside computing one, as on the paper's machine (Qwen2.5-7B on an A800, an SSD of 7.45 GB/s).
Weights are random, so which chunks are chosen means nothing here: accuracy is measured in eval/.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import build, machine, median, save, seconds, table
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import parse_bytes
from hf_tiered_cache.methods import H2O, AttentionStore, ContiguousKV, Impress, Method, Recompute
from hf_tiered_cache.stats import TIERS
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.engines.posix import SlowDisk

PAPER_LOAD_S = 56 * 1024 / 7.45e9
"""Seconds to load a token's KV of Qwen2.5-7B, from the SSD of ContiguousKV's Section 5.1."""
PAPER_COMPUTE_S = 2 * 7.6e9 / (0.5 * 312e12)
"""Seconds to compute a token of it on an A800 that reaches half of its peak in bfloat16."""
LATENCY_S = 100e-6


@dataclass(frozen=True)
class System:
    """A method, and the eviction policy of the store it runs on."""

    name: str
    method: Method
    policy: str
    every: int = 1
    """It is asked one request in so many (what computes everything takes long)."""


def systems(budget: float, layers: int) -> list[System]:
    """All of them at one budget."""
    ours = ContiguousKV(budget=budget, period=min(8, layers))
    keys = replace(ours, identify="keys")
    impress = Impress(budget=budget)
    return [
        System("ContiguousKV, resident index", ours, ours.policy),
        System("ContiguousKV, keys (the paper's)", keys, keys.policy),
        System("  without prefetch", replace(keys, ahead_bytes=0), keys.policy),
        System("  with LFU", keys, "lfu"),
        System("IMPRESS, without reordering", impress, impress.policy),
        System("H2O + LFU", H2O(budget=budget), "lfu"),
        System("H2O + LRU", H2O(budget=budget), "lru"),
        System("AttentionStore + LRU", AttentionStore(), "lru"),
        System("recompute", Recompute(), "lru", every=12),
    ]


def aims(summary: dict[str, dict[str, Any]]) -> dict[str, tuple[str, float, float]]:
    """What the project aims at with a budget of 5 %, and what was measured."""
    ours = summary["ContiguousKV, resident index"]

    def times(name: str) -> float:
        return summary[name]["ttft_mean_s"] / ours["ttft_mean_s"]

    impress = summary["IMPRESS, without reordering"]
    return {
        "tokens read, of IMPRESS's": ("<=", 0.06, ours["bytes_read"] / impress["bytes_read"]),
        "read amplification": ("<=", 1.005, ours["read_amplification"]),
        "TTFT, IMPRESS / ours": (">=", 3.85, times("IMPRESS, without reordering")),
        "TTFT, H2O + LFU / ours": (">=", 5.83, times("H2O + LFU")),
        "TTFT, AttentionStore / ours": (">=", 6.16, times("AttentionStore + LRU")),
    }


class Bench:
    """One model, the prefixes it has computed, and a store for each system."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.device = torch.device(arguments.device)
        self.model: PreTrainedModel = build(arguments.shape, getattr(torch, arguments.dtype), self.device)
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.prefixes, arguments.tokens)
        self.prefixes = torch.randint(1, self.model.config.vocab_size, shape, generator=generator)
        self.kv_bytes = 0

    def run(self) -> dict[str, Any]:
        source = self.compute()
        self.bandwidth = self.arguments.bandwidth
        compute = self.suffix_seconds()
        if self.bandwidth is None:
            load = compute / self.arguments.suffix * PAPER_LOAD_S / PAPER_COMPUTE_S
            self.bandwidth = self.kv_bytes / self.prefixes.numel() / load
        wanted = systems(self.arguments.budget, self.model.config.num_hidden_layers)
        with ExitStack() as stack:
            stores = {system.name: stack.enter_context(self.store_for(system, source)) for system in wanted}
            records = self.ask(wanted, stores)
        return {
            "prefixes": len(self.prefixes),
            "prefix_tokens": self.arguments.tokens,
            "suffix_tokens": self.arguments.suffix,
            "budget": self.arguments.budget,
            "kv_bytes": self.kv_bytes,
            "memory_bytes": {"device": self.device_memory, "host": self.host_memory},
            "disk_bytes_per_second": self.bandwidth or "real",
            "suffix_compute_s": compute,
            "requests": {"warm_up": self.arguments.warm_up, "measured": self.arguments.requests},
            "systems": {name: summarise(rows) for name, rows in records.items()},
        }

    # --- before

    def compute(self) -> Path:
        """The KV of all prefixes, computed once."""
        path = self.folder / "source"
        with KVStore(path, host_memory=0) as store:
            store.precompute(self.model, list(self.prefixes))
            self.kv_bytes = sum(row.nbytes for row in store.segments())
        return path

    def suffix_seconds(self) -> float:
        """What a suffix takes over KV that is there: a DynamicCache in memory."""
        cache = DynamicCache(config=self.model.config)
        prefix = self.prefixes[:1].to(self.device)
        with torch.no_grad():
            self.model(input_ids=prefix[:, : self.arguments.tokens // 8], past_key_values=cache, logits_to_keep=1)
        held = cache.get_seq_length()

        def once() -> None:
            cache.crop(held - cache.get_seq_length() or 0)
            with torch.no_grad():
                self.model(input_ids=prefix[:, : self.arguments.suffix], past_key_values=cache, logits_to_keep=1)

        once()
        return median(seconds(once, self.device) for _ in range(5))

    def store_for(self, system: System, source: Path) -> KVStore:
        """The store, cut as the system wants it, with its share of memory and the slower disk.

        Systems that want the same share the files, and nothing else.
        """
        geometry = system.method.geometry
        path = self.folder / "-".join(map(str, geometry.to_json())).replace(", ", "-").strip("[]")
        if not path.exists():
            shutil.copytree(source, path)
            with KVStore(path, host_memory=0) as store:
                store.relayout(geometry, progress=False)
        share = self.arguments.memory_share
        self.host_memory = parse_bytes(self.arguments.host_memory or int(share * self.kv_bytes), "host_memory")
        self.device_memory = parse_bytes(self.arguments.device_memory, "device_memory")
        engine = PosixEngine(slow_disk=SlowDisk(self.bandwidth, LATENCY_S)) if self.bandwidth else "auto"
        return KVStore(
            path,
            host_memory=self.host_memory,
            device_memory=self.device_memory,
            index_memory="1GiB",
            policy=system.policy,
            engine=engine,
        )

    # --- requests

    def requests(self) -> Iterator[torch.Tensor]:
        """Prompts: a prefix, drawn by a normal distribution over their numbers, and a new suffix."""
        random = np.random.default_rng(1)
        count = len(self.prefixes)
        for _ in range(self.arguments.warm_up + self.arguments.requests):
            number = int(np.clip(round(random.normal((count - 1) / 2, count / 5)), 0, count - 1))
            suffix = random.integers(1, self.model.config.vocab_size, self.arguments.suffix)
            yield torch.cat([self.prefixes[number], torch.from_numpy(suffix)]).unsqueeze(0).to(self.device)

    def ask(self, wanted: list[System], stores: dict[str, KVStore]) -> dict[str, list[dict[str, Any]]]:
        records: dict[str, list[dict[str, Any]]] = {system.name: [] for system in wanted}
        total = self.arguments.warm_up + self.arguments.requests
        for number, ids in enumerate(tqdm(self.requests(), total=total, unit="request")):
            for system in wanted:
                if number % system.every:
                    continue
                cache = TieredCache(self.model, stores[system.name], method=system.method, record=False)
                took = seconds(
                    lambda cache=cache, ids=ids: self.model.generate(
                        ids, past_key_values=cache, max_new_tokens=1, do_sample=False
                    ),
                    self.device,
                )
                if number >= self.arguments.warm_up or system.every > 1:
                    records[system.name].append(cache.stats.as_dict() | {"ttft_s": took})
        return records


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the requests of one system come to."""
    ttft = [row["ttft_s"] for row in rows]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    read = {name: sum(row[name] for row in rows) for name in ("bytes_read", "bytes_identifying", "bytes_guessed")}
    used = sum(row["bytes_used"] for row in rows)
    attended = read["bytes_read"] - read["bytes_identifying"] - read["bytes_guessed"]
    hits = {}
    asked = sum(row[tier]["hits"] for row in rows for tier in TIERS)
    for tier in TIERS:
        hits[tier] = sum(row[tier]["hits"] for row in rows) / asked if asked else 0.0
    return {
        "requests": len(rows),
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p95_s": float(np.percentile(ttft, 95)),
        "ttft_median_s": median(ttft),
        **{name: value / len(rows) for name, value in read.items()},
        "bytes_used": used / len(rows),
        "read_amplification": attended / used if used else 1.0,
        "hit_ratio": hits,
        "select_s": mean("select_seconds"),
        "io_s": mean("io_seconds"),
        "stall_s": mean("stall_seconds"),
        "assemble_s": mean("assemble_seconds"),
        "compute_s": statistics.fmean(ttft) - mean("assemble_seconds") - mean("match_seconds"),
        "ttft_s": ttft,
    }


# --- telling


def report(result: dict[str, Any], measured_on: dict[str, Any], shape: str, dtype: str) -> str:
    mib = 1 << 20
    rows = []
    for name, row in result["systems"].items():
        hit = row["hit_ratio"]
        rows.append(
            [
                name,
                f"{row['ttft_mean_s'] * 1e3:.0f}",
                f"{row['ttft_p95_s'] * 1e3:.0f}",
                f"{row['bytes_read'] / mib:.1f}",
                f"{row['bytes_identifying'] / mib:.1f}",
                f"{row['bytes_guessed'] / mib:.1f}",
                f"{row['read_amplification']:.2f}",
                " / ".join(f"{100 * hit[tier]:.0f}" for tier in TIERS),
                f"{row['select_s'] * 1e3:.0f}",
                f"{row['stall_s'] * 1e3:.0f}",
                f"{row['assemble_s'] * 1e3:.0f}",
                f"{row['compute_s'] * 1e3:.0f}",
            ]
        )
    speed = result["disk_bytes_per_second"]
    disk = "the real disk" if speed == "real" else f"an emulated disk of {speed / 1e6:.0f} MB/s"
    memory = sum(result["memory_bytes"].values())
    text = [
        f"# Selective re-prefill, {shape} in {dtype} on {measured_on['device']}, budget {result['budget']:.0%}\n",
        f"{measured_on['cpu']}, {measured_on['cores']} cores; PyTorch {measured_on['torch']}, transformers "
        f"{measured_on['transformers']}; {measured_on['date']}. {result['prefixes']} prefixes of "
        f"{result['prefix_tokens']} tokens, {result['kv_bytes'] / mib:.0f} MiB of KV, "
        f"{memory / mib:.0f} MiB of memory for it; suffixes of {result['suffix_tokens']} tokens; "
        f"{result['requests']['measured']} requests after {result['requests']['warm_up']}; {disk}. Random weights.\n",
        table(
            [
                "system",
                "TTFT, ms",
                "p95",
                "MiB read",
                "to choose by",
                "on a wrong guess",
                "amplification of the rest",
                "hits device / host / disk, %",
                "choice, ms",
                "stall",
                "assembly, all",
                "compute",
            ],
            rows,
        ),
        "Means of the requests. Choice and stall are parts of the assembly; stalls while choosing count in both.\n",
    ]
    if abs(result["budget"] - 0.05) < 1e-9:
        found = aims(result["systems"])
        met = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b}
        text += [
            "## Aims at 5 %\n",
            table(
                ["figure", "aim", "measured", "met"],
                [
                    [name, f"{sign} {aim:g}", f"{value:.3f}", "yes" if met[sign](value, aim) else "no"]
                    for name, (sign, aim, value) in found.items()
                ],
            ),
        ]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of the model (see common.py)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=0.05, help="share of the prefix that is attended to")
    parser.add_argument("--prefixes", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prefix")
    parser.add_argument("--suffix", type=int, default=32, help="tokens of a suffix")
    parser.add_argument("--requests", type=int, default=60, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=15, help="requests before")
    parser.add_argument("--memory-share", type=float, default=0.2, help="host memory, as a share of all KV")
    parser.add_argument("--host-memory", help="instead, such as 24GiB")
    parser.add_argument("--device-memory", default="0")
    parser.add_argument(
        "--bandwidth", type=float, help="bytes a second of the emulated disk; 0: the real one (default: see above)"
    )
    parser.add_argument("--name", help="of the results; the shape, dtype and device if not given")
    parser.add_argument("--folder", type=Path, help="where stores are made; a temporary one if not given")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, Path(folder))
        result = bench.run()
        measured_on = machine(bench.device, Path(folder))
    text = report(result, measured_on, arguments.shape, arguments.dtype)
    name = arguments.name or f"reprefill-{arguments.shape}-{arguments.dtype}-{bench.device.type}"
    save(
        arguments.out, name, result | {"machine": measured_on, "shape": arguments.shape, "dtype": arguments.dtype}, text
    )
    print(text)


if __name__ == "__main__":
    main()
