"""Exact prefix reuse: time to first token from disk and host memory, compared with recomputing, DynamicCache and files.

    python bench/prefix.py                                      # Qwen2.5-0.5B's shape, float32, this machine's CPU
    PYTHONPATH=. python bench/prefix.py --model smollm2-135m --prefixes 1024,4096,7680
    python bench/prefix.py --shape qwen2.5-7b --dtype bfloat16 --device cuda --device-memory 20GiB

Every figure is a median over turns that measure all variants in succession. Ratios are taken within a turn. Reads are
cold: O_DIRECT, and the files are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import peers
from lib.common import add_shape, build, first_token, forget_page_cache, interleaved, median, parser_of, ratio, seconds
from lib.pages import draw, machine, machine_text, plain_ticks, save, table
from lib.raw_disk import direct_read, fio
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store.memory import aligned_bytes

SUFFIX = 64
_TIMES_KV = 6  # upper bound of the memory of all variants
AIMS = {
    "recompute / disk at 4k": (">=", 20.0),
    "host / DynamicCache at 4k": ("<=", 1.10),
    "disk / max(raw read, DynamicCache) at 4k": ("<=", 1.20),
    "disk read / raw O_DIRECT read at 4k": (">=", 0.80),
    "with recording / without at 4k": ("<=", 1.05),
    "decode, tokens/s over DynamicCache's at 4k": (">=", 1.0),
    "disk / safetensors file at 4k": ("<=", 0.95),
    "disk / safetensors file at 16k": ("<=", 0.85),
}


class Bench:
    """Model and folder; measures one prefix length at a time."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.device = torch.device(arguments.device)
        self.model: PreTrainedModel = self._model()
        self.random = torch.Generator().manual_seed(0)
        self.kv_bytes = 0  # of the prefix, set by `run`

    def _model(self) -> PreTrainedModel:
        if self.arguments.model is None:
            return build(self.arguments.shape, getattr(torch, self.arguments.dtype), self.device)
        from eval.models import load

        return load(self.arguments.model, self.arguments.dtype)[0].to(self.device)

    def ids(self, tokens: int) -> torch.Tensor:
        """Draw random tokens, int64 `[1, tokens]`."""
        vocabulary = self.model.config.vocab_size
        return torch.randint(1, vocabulary, (1, tokens), generator=self.random).to(self.device)

    def first_token(self, ids: torch.Tensor, cache: Any) -> float:
        """Return the seconds that `generate()` takes to the first token."""
        return self.first_token_with(ids, lambda: cache)

    def first_token_with(self, ids: torch.Tensor, make: Callable[[], Any]) -> float:
        """Return the seconds to the first token, including the creation of the cache."""
        return first_token(self.model, ids, make, _TIMES_KV * self.kv_bytes)

    def generate(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Generate one token."""
        return self.model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)

    def store(self, path: Path) -> KVStore:
        """Open a store with the memory and engine of the arguments."""
        options = self.arguments
        return KVStore(
            path, host_memory=options.host_memory, device_memory=options.device_memory, engine=options.engine
        )

    # --- the measurements

    def run(self, prefix: int) -> dict[str, Any]:
        """Measure everything for one prefix length."""
        path = self.folder / str(prefix)
        turns = self.arguments.long_repeats if prefix > 8192 else self.arguments.repeats
        print(f"prefix of {prefix} tokens", flush=True)
        document = self.ids(prefix)
        result: dict[str, Any] = {"prefix": prefix, "suffix": SUFFIX, "turns": turns}
        result |= self.recording(document, path, max(1, min(turns, self.arguments.recompute_repeats)))
        self.kv_bytes = result["kv_bytes"]
        dynamic = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(input_ids=document, past_key_values=dynamic, logits_to_keep=1)
        result |= self.reuse(document, dynamic, path, turns)
        result |= self.peers(document, dynamic, path, turns)
        result |= self.disk(path, turns)
        result |= self.decode(document, path)
        shutil.rmtree(path)
        gc.collect()
        return result

    def recording(self, document: torch.Tensor, path: Path, turns: int) -> dict[str, Any]:
        """Measure the first request without a store, and with one that records it. The last turn fills `path`."""
        store = self.store(path)

        def recorded() -> float:
            store.remove([row.id for row in store.segments()])
            cache = TieredCache(self.model, store)
            took = self.first_token(torch.cat([document, self.ids(SUFFIX)], dim=1), cache)
            del cache
            store.flush()
            return took

        def plain() -> float:
            ids = torch.cat([document, self.ids(SUFFIX)], dim=1)
            return self.first_token(ids, DynamicCache(config=self.model.config))

        times = interleaved({"recompute": plain, "record": recorded}, turns, warm_up=0)
        result = {
            "recompute_s": times["recompute"],
            "record_s": times["record"],
            "record_over_recompute": ratio(times["record"], times["recompute"]),
            "kv_bytes": sum(row.nbytes for row in store.segments()),
        }
        store.close()
        return result

    def reuse(self, document: torch.Tensor, dynamic: DynamicCache, path: Path, turns: int) -> dict[str, Any]:
        """Measure the same prefix with new suffixes: DynamicCache in memory, host tier, disk."""
        warm = self.store(path)
        stats: dict[str, Any] = {}
        suffix = self.ids(SUFFIX)

        def in_memory() -> float:
            dynamic.crop(min(0, document.shape[1] - dynamic.get_seq_length()))
            return self.first_token(torch.cat([document, suffix], dim=1), dynamic)

        def restored(store: KVStore, name: str) -> float:
            cache = TieredCache(self.model, store, record=False)
            took = self.first_token(torch.cat([document, suffix], dim=1), cache)
            assert cache.stats.tokens_restored >= document.shape[1] // 16 * 16, "nothing was restored"
            stats[name] = cache.stats.as_dict()
            return took

        def from_disk() -> float:
            forget_page_cache(path)
            with self.store(path) as cold:
                return restored(cold, "disk")

        times = interleaved(
            {"dynamic": in_memory, "host": lambda: restored(warm, "host"), "disk": from_disk}, turns, warm_up=2
        )
        warm.close()
        return {
            "dynamic_s": times["dynamic"],
            "host_s": times["host"],
            "disk_s": times["disk"],
            "host_over_dynamic": ratio(times["host"], times["dynamic"]),
            "disk_over_dynamic": ratio(times["disk"], times["dynamic"]),
            "stats": stats,
        }

    def peers(self, document: torch.Tensor, dynamic: DynamicCache, path: Path, turns: int) -> dict[str, Any]:
        """Measure code that users would write, and a store opened for the request or before."""
        ids = torch.cat([document, self.ids(SUFFIX)], dim=1)
        dynamic.crop(min(0, document.shape[1] - dynamic.get_seq_length()))
        user_caches = peers.Peers(dynamic, self.model.config, self.folder / "peers")

        def timed(make: Callable[[], Any]) -> float:
            return self.first_token_with(ids, make)

        def tiered(store: KVStore) -> TieredCache:
            return TieredCache(self.model, store, record=False)

        def opened() -> float:
            forget_page_cache(path)
            with ExitStack() as closing:
                return timed(lambda: TieredCache(self.model, closing.enter_context(self.store(path)), record=False))

        with self.store(path) as warm:
            caches = user_caches.caches() | {"ours": partial(tiered, warm)}
            tokens = {int(self.generate(ids, make())[0, -1]) for make in caches.values()}
            assert len(tokens) == 1, f"the ways differ in the first token: {tokens}"
            assert warm.stats.host.bytes, "nothing was restored"
            tiered_actions = {peers.OURS: opened, peers.OURS_WARM: lambda: timed(caches["ours"])}
            times = peers.measure(user_caches, timed, tiered_actions, turns)
        shutil.rmtree(user_caches.folder)
        return {"peers_s": times, "disk_over_file": peers.over_file(times)}

    def disk(self, path: Path, turns: int) -> dict[str, Any]:
        """Measure reading all blocks: through the store with checksums, and with plain parallel O_DIRECT reads."""
        store = self.store(path)
        (row,) = [row for row in store.segments() if row.position == 0]
        reader = storage_of(store).disk.reader(row.id)
        file = storage_of(store).disk.path(row.id)
        block_groups = [
            aligned_bytes(reader.shape.chunks_in(block_group) * block_group.block_bytes).view(
                -1, block_group.block_bytes
            )
            for block_group in reader.shape.block_groups
        ]
        nbytes = sum(memory.numel() for memory in block_groups)
        raw = aligned_bytes(nbytes)

        def read_blocks() -> float:
            forget_page_cache(path)
            started = time.perf_counter()
            futures = [reader.read(i, [(0, memory)]) for i, memory in enumerate(block_groups)]
            for future in futures:
                future.result()
            return time.perf_counter() - started

        def read_raw() -> float:
            forget_page_cache(path)
            return direct_read(file, reader.header.blocks.offset, raw)

        times = interleaved({"ours": read_blocks, "raw": read_raw}, max(turns, 7), warm_up=2)
        result = {
            "read_bytes": nbytes,
            "read_s": times["ours"],
            "raw_read_s": times["raw"],
            "read_over_raw": ratio(times["raw"], times["ours"]),
            "fio_bytes_per_s": fio(file),
        }
        store.close()
        return result

    def decode(self, document: torch.Tensor, path: Path) -> dict[str, Any]:
        """Measure steps of one token after the prefix, in turns."""
        steps = self.arguments.decode_steps
        dynamic = DynamicCache(config=self.model.config)
        store = self.store(path)
        tiered = TieredCache(self.model, store)
        token = document[:, :1]
        with torch.no_grad():
            for cache in (dynamic, tiered):
                self.model(input_ids=document, past_key_values=cache, logits_to_keep=1)
            times = interleaved(
                {
                    name: lambda cache=cache: seconds(
                        lambda: self.model(input_ids=token, past_key_values=cache), self.device
                    )
                    for name, cache in (("dynamic", dynamic), ("tiered", tiered))
                },
                steps,
                warm_up=8,
            )
        store.close()
        return {
            "decode_dynamic_s": median(times["dynamic"]),
            "decode_tiered_s": median(times["tiered"]),
            "decode_speed_over_dynamic": ratio(times["dynamic"], times["tiered"]),
        }


# --- reporting


def headline(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of the aims, at the 4k prefix or the longest shorter one."""
    at = max((r for r in results if r["prefix"] <= 4096), key=lambda r: r["prefix"])
    return {
        "recompute / disk at 4k": median(at["recompute_s"]) / median(at["disk_s"]),
        "host / DynamicCache at 4k": at["host_over_dynamic"],
        "disk / max(raw read, DynamicCache) at 4k": _over_bound(at),
        "disk read / raw O_DIRECT read at 4k": at["read_over_raw"],
        "with recording / without at 4k": at["record_over_recompute"],
        "decode, tokens/s over DynamicCache's at 4k": at["decode_speed_over_dynamic"],
        "disk / safetensors file at 4k": at["disk_over_file"],
    } | {f"disk / safetensors file at {r['prefix'] >> 10}k": r["disk_over_file"] for r in results if r is not at}


def _over_bound(result: dict[str, Any]) -> float:
    """Return the time from disk over its lower bound: reading takes as long as a raw read, or is hidden by the rest."""
    return median(result["disk_s"]) / max(median(result["raw_read_s"]), median(result["dynamic_s"]))


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, results = document["machine"], document["results"]
    rows = [
        [
            str(r["prefix"]),
            f"{r['kv_bytes'] / 2**20:.0f} MiB",
            f"{r['kv_bytes'] / r['prefix'] / 1024:.0f} KiB",
            f"{median(r['recompute_s']):.2f} s",
            f"{median(r['disk_s']) * 1e3:.0f} ms",
            f"{median(r['host_s']) * 1e3:.0f} ms",
            f"{median(r['dynamic_s']) * 1e3:.0f} ms",
            f"{median(r['recompute_s']) / median(r['disk_s']):.1f}",
            f"{r['host_over_dynamic']:.3f}",
            f"{r['disk_over_dynamic']:.3f}",
            f"{_over_bound(r):.3f}",
        ]
        for r in results
    ]
    disk_rows = [
        [
            str(r["prefix"]),
            f"{r['read_bytes'] / median(r['read_s']) / 1e9:.2f} GB/s",
            f"{r['read_bytes'] / median(r['raw_read_s']) / 1e9:.2f} GB/s",
            "–" if r["fio_bytes_per_s"] is None else f"{r['fio_bytes_per_s'] / 1e9:.2f} GB/s",
            f"{r['read_over_raw']:.2f}",
            f"{r['record_over_recompute']:.3f}",
            f"{1 / r['decode_tiered_s']:.1f}",
            f"{1 / r['decode_dynamic_s']:.1f}",
            f"{r['decode_speed_over_dynamic']:.2f}",
        ]
        for r in results
    ]
    aims = [
        [
            name,
            f"{sign} {aim}",
            f"{document['headline'][name]:.3f}",
            "yes" if _met(document["headline"][name], sign, aim) else "**no**",
        ]
        for name, (sign, aim) in AIMS.items()
        if name in document["headline"]
    ]
    return (
        f"# Exact prefix reuse, {document['shape']} in {document['dtype']} on {machine_info['device']}\n\n"
        f"{machine_text(machine_info)} {document['weights']} weights, suffix of {SUFFIX} tokens, "
        f"engine {document['engine']}. Medians; ratios are taken within a turn.\n\n"
        "## Time to first token\n\n"
        + table(
            ["prefix", "KV on disk", "per token", "recompute", "from disk, cold", "from host", "DynamicCache in memory",
             "recompute / disk", "host / DynamicCache", "disk / DynamicCache", "disk / max(raw read, DynamicCache)"],
            rows,
        )
        + f"\n## Compared with code of your own\n\n{peers.report(results)}"
        + "\n## Disk, recording, decoding\n\n"
        + table(
            ["prefix", "read with checks", "raw O_DIRECT read", "fio", "read / raw", "first request, recording / not",
             "decode tok/s", "DynamicCache, tok/s", "ratio"],
            disk_rows,
        )
        + "\n## Aims\n\n"
        + table(["figure", "aim", "measured", "met"], aims)
    )  # fmt: skip


def _met(value: float, sign: str, aim: float) -> bool:
    return value >= aim if sign == ">=" else value <= aim


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Plot TTFT over prefix length."""
    figure, axes = plt.subplots(figsize=(6.5, 4.5))
    lengths = [r["prefix"] for r in document["results"]]
    for key, label in (
        ("recompute_s", "recompute"),
        ("disk_s", "TieredCache, cold disk"),
        ("host_s", "TieredCache, host memory"),
        ("dynamic_s", "DynamicCache already in memory"),
    ):
        values = [median(r[key]) for r in document["results"]]
        low = [np.min(r[key]) for r in document["results"]]
        high = [np.max(r[key]) for r in document["results"]]
        axes.plot(lengths, values, marker="o", label=label)
        axes.fill_between(lengths, low, high, alpha=0.15)
    for result in document["results"]:
        length, recompute, disk = result["prefix"], median(result["recompute_s"]), median(result["disk_s"])
        axes.vlines(length, disk, recompute, color="gray", linestyle=":", linewidth=1)
        middle = (recompute * disk) ** 0.5  # on a logarithmic axis
        axes.annotate(f"{recompute / disk:.0f} ×", (length, middle), ha="center", va="center", backgroundcolor="white")
    axes.set(xscale="log", yscale="log", xlabel="prefix (tokens)", ylabel="time to first token (s)")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in lengths])
    axes.minorticks_off()
    plain_ticks(axes.yaxis)
    axes.margins(x=0.1)
    axes.set_title(
        f"{document['shape']}, {document['dtype']}, {document['machine']['device']}\n"
        f"medians of {len(document['results'][0]['disk_s'])}; shaded: from the fastest to the slowest",
        fontsize="medium",
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_shape(parser, "1024,4096,16384", repeats=9)
    parser.add_argument("--model", help="pretrained model instead of a shape: name of eval.models, folder or hub id")
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--device", default="cpu", help="device of the model")
    parser.add_argument("--long-repeats", type=int, default=5, help="number of turns for prefixes over 8k")
    parser.add_argument(
        "--recompute-repeats", type=int, default=3, help="number of turns that compute the whole prompt"
    )
    parser.add_argument("--decode-steps", type=int, default=60, help="number of decoded tokens")
    parser.add_argument("--engine", default="auto", help="engine: auto, kvikio or posix")
    parser.add_argument("--host-memory", default="2GiB", help="host memory of the store")
    parser.add_argument("--device-memory", default="0", help="device memory of the store")
    parser.add_argument("--store", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--name", help="name of the result files (default: prefix-<shape>-<dtype>-<device>)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-prefix-", dir=arguments.store))
    try:
        bench = Bench(arguments, folder)
        with KVStore(folder / "probe", engine=arguments.engine) as probe:
            engine = probe._storage.disk.backend.reads_with
        results = [bench.run(int(prefix)) for prefix in tqdm(arguments.prefixes.split(","), desc="prefixes")]
        document = {
            "shape": arguments.model or arguments.shape,
            "weights": "Random" if arguments.model is None else "Pretrained",
            "dtype": arguments.dtype,
            "engine": engine,
            "machine": machine(bench.device, folder),
            "headline": headline(results),
            "results": results,
        }
        name = arguments.name or f"prefix-{arguments.model or arguments.shape}-{arguments.dtype}-{bench.device.type}"
        save(arguments.out, name, document, report(document))
        draw(plot, document, arguments.out / f"{name}.png")
        print(report(document))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
