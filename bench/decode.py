"""Decoding with long contexts: tokens per second of KVDrive and its peers, and how the time is spent.

    PYTHONPATH=. python bench/decode.py                          # Qwen2.5-0.5B's shape, 4 of its layers
    PYTHONPATH=. python bench/decode.py --layers 24 --contexts 131072 --batches 1
    PYTHONPATH=. python bench/decode.py --contexts 8192,32768 --batches 4,8 --disk-bandwidth 5e8 --tokens 4 --turns 2

The model has random weights and a known shape; `--layers` takes fewer layers, and the same share of the vocabulary.
The KV of the contexts is synthetic (see `synthetic_kv.py`). It is written to a store and found by the hashes of its
tokens. Each row of a batch has its own context. Queries are synthetic, too: a hook replaces the output of each layer's
query projection, which still runs. All systems get the same queries, so that selections change as in a trained model.
Only the time of the output has a meaning, not its content.

All systems fold the query heads of a KV head at decoded tokens, except the row with transformers' own kernel. Before
transformers 5.24, and without a mask, that kernel reads each key once per query head.

Each system has its own cache over the same contexts, and decodes `--tokens` tokens in turns, in alternating order.
Figures are medians over the tokens of all turns but the first. Full attention in memory is transformers' DynamicCache,
which copies its KV at each token, and ours (Exact), which does not. transformers' offloaded cache moves KV between GPU
and host; on a CPU it moves nothing. "Full, layer by layer from disk" is FlexGen's method: at each token, all KV of a
layer is read while the previous layer computes, from a file that holds it rotated and in order, with the store's
engine. The other systems select chunks in the same framework, and differ in index, window and eviction. Quest keeps
nothing from token to token, ShadowKV keeps the last selection, RetroInfer keeps twice as much, by LRU.

With memory only, all KV is in host memory. With a disk, the host memory of each system holds `--host-share` of it, and
the rest is read without the page cache. `--disk-bandwidth` emulates a slower disk. Bytes moved are those of blocks that
a token fetched from host memory or disk. Time is split by the statistics of the cache: select (ranking and planning),
wait (for reads), fetch (the rest of the cache's work), compute (the rest of the pass). CPU is the processor time of all
threads, which other programs affect less. Selection consists of many small steps. On a busy machine, PyTorch's threads
wait for each other at each of them, and `--threads 1` is faster.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lib.attention_kernels import attend_folded, registered
from lib.common import add_size, build, interleaved, listed, median, parser_of
from lib.layer_files import LayerFiles, LayerFromDisk
from lib.made_contexts import SUFFIX, TAG, Contexts
from lib.pages import machine, machine_text, save, table
from lib.slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import eval.baselines  # noqa: F401  # registers their indexes
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import Exact, KVDrive, Method
from hf_tiered_cache.selection.held import Moves, Window
from hf_tiered_cache.store.engines import PosixEngine

MEMORY, DISK = "memory", "memory + disk"
SPLIT = ("select", "fetch", "wait", "compute")
PEER, FULL = "ShadowKV-like", "full, in memory"
OURS = "full, in memory, ours"
UNFOLDED = "full, in memory, transformers' kernel"
OFFLOADED, OFFLOAD = "full, offloaded by transformers", "full, layer by layer from disk"


def methods(budget: float) -> dict[str, Method]:
    """Return the methods by name: those that select, and one that restores all KV."""
    return {
        OURS: Exact(recompute=0.0, decline=False),
        "Quest": KVDrive(budget, index="page_bounds", chunk_tokens=16, window=0),
        PEER: KVDrive(budget, index="chunk_means", window=1, eviction="lru"),
        "RetroInfer-like": KVDrive(budget, index="token_clusters", chunk_tokens=1, eviction="lru"),
        "KVDrive (paper)": KVDrive(budget, index="clusters"),
        "KVDrive (paper), LRU": KVDrive(budget, index="clusters", eviction="lru"),
        "KVDrive": KVDrive(budget),
    }


SYSTEMS = (FULL, UNFOLDED, OFFLOADED, OFFLOAD, *methods(0.5))


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_size(parser, layers=4)
    parser.add_argument("--device", default="cpu", help="device of the model")
    contexts, batches = [8192, 32768, 131072], [1, 4, 8]
    parser.add_argument("--contexts", type=listed(int), default=contexts, help="numbers of tokens, multiples of 16")
    parser.add_argument("--batches", type=listed(int), default=batches, help="numbers of rows, each with a context")
    parser.add_argument("--budget", type=float, default=0.0156, help="share of the context that is attended to")
    parser.add_argument("--tokens", type=int, default=8, help="number of tokens that each system decodes per turn")
    parser.add_argument("--turns", type=int, default=4, help="number of measured turns, after one of warm-up")
    parser.add_argument(
        "--host-share", type=float, default=0.25, help="share of the KV in host memory, if there is a disk"
    )
    parser.add_argument("--disk-bandwidth", type=float, help="bytes per second of an emulated disk, such as 5e8")
    parser.add_argument(
        "--threads", type=int, help="number of PyTorch's threads, for all systems (default: PyTorch's choice)"
    )
    return parser.parse_args(argv)


# --- systems


@dataclass(eq=False)
class System:
    """Cache over the contexts, which continues from turn to turn."""

    contexts: Contexts
    cache: Cache
    kernel: Callable[..., Any] = attend_folded
    """Attention of decoded tokens, unless the cache replaces it."""
    step_bytes: int = 0
    """Bytes moved per token, for caches without counters."""
    waited: Callable[[], float] = lambda: 0.0
    """Function that returns the seconds of waiting, for caches without counters."""
    at: int = 0
    """Number of processed tokens after the context."""
    logits: torch.Tensor | None = None
    """Logits of the last token, `[rows, 1, vocabulary]`."""

    def pass_over(self, tokens: int) -> float:
        """Process the next tokens, and return the seconds."""
        begin = self.contexts.tokens + self.at if self.at else 0
        ids = self.contexts.ids[:, begin : self.contexts.tokens + self.at + tokens]
        if not self.at and not isinstance(self.cache, TieredCache):
            ids = ids[:, self.contexts.tokens :]
        self.contexts.step = self.at
        started = time.perf_counter()
        with nullcontext() if isinstance(self.cache, TieredCache) else registered(self.kernel):
            output = self.contexts.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
        duration = time.perf_counter() - started
        self.at, self.logits = self.at + tokens, output.logits
        return duration

    def turn(self, tokens: int) -> list[dict[str, float]]:
        """Decode `tokens` tokens, and return the figures of each."""
        rows = []
        for _ in range(tokens):
            counts_before, cpu_s = self._counts(), time.process_time()
            with counted_moves() as moves:
                seconds = self.pass_over(1)
            cpu_s = time.process_time() - cpu_s
            counts = {name: value - counts_before[name] for name, value in self._counts().items()}
            counts |= {"hits": moves["selected"] - moves["fetched"], "asked": moves["selected"]}
            cached = counts.pop("assemble")
            counts["fetch"] = cached - counts["select"] - counts["wait"] if cached else 0.0
            counts["compute"] = seconds - max(cached, counts["wait"])
            rows.append({"seconds": seconds, "cpu": cpu_s, **counts})
        return rows

    def _counts(self) -> dict[str, float]:
        if not isinstance(self.cache, TieredCache):
            return {
                "select": 0.0,
                "wait": self.waited(),
                "assemble": 0.0,
                "moved": self.step_bytes * self.at,
                "read": self.step_bytes * self.at,
            }
        stats = self.cache.stats
        return {
            "select": stats.details.select_seconds,
            "wait": stats.stall_seconds,
            "assemble": stats.details.assemble_seconds,
            "moved": stats.host.bytes + stats.disk.bytes,
            "read": stats.bytes_read,
        }


@contextmanager
def counted_moves() -> Iterator[dict[str, int]]:
    """Count the chunks that windows select, and those of them that are in no window."""
    counts, commit = {"selected": 0, "fetched": 0}, Window.commit

    def counted(window: Window, moves: Moves) -> None:
        counts["selected"] += window.num_heads * window.num_columns
        counts["fetched"] += len(moves.fetched.heads)
        commit(window, moves)

    with mock.patch.object(Window, "commit", counted):
        yield counts


def system(
    name: str, place: str, contexts: Contexts, arguments: argparse.Namespace, opener: Callable[[], KVStore], files: Path
) -> System | None:
    """Create a system by its name; None if it does not exist for this place and device.

    Args:
        name: Name in `SYSTEMS`.
        place: Place of the KV.
        contexts: Contexts of all systems.
        arguments: Arguments of the command line.
        opener: Function that opens the store of the contexts.
        files: Folder for KV outside of a store.
    """
    model, device = contexts.model, contexts.model.device
    if name == OFFLOAD:
        if place == MEMORY:
            return None
        layered = LayerFiles(contexts, files, engine_of(arguments))
        layers = [LayerFromDisk(layered, number) for number in range(contexts.layers)]
        return System(contexts, Cache(layers=layers), step_bytes=layered.step_bytes, waited=lambda: layered.waited)
    if name in (FULL, UNFOLDED, OFFLOADED):
        if place == DISK or (name == OFFLOADED and device.type == "cpu"):
            return None
        cache = DynamicCache(config=model.config, **{"offloading": True} if name == OFFLOADED else {})
        for layer in range(contexts.layers):
            cache.update(*(tensor.to(device) for tensor in contexts.batch(layer)), layer)
        kernel = sdpa_attention_forward if name == UNFOLDED else attend_folded
        return System(contexts, cache, kernel, contexts.nbytes if name == OFFLOADED else 0)
    method = methods(arguments.budget)[name]
    if isinstance(method, Exact) and place == DISK:
        return None  # after its first pass, it is in memory
    return System(contexts, TieredCache(model, opener(), method=method, record=False, tag=TAG, fold_heads=True))


def engine_of(arguments: argparse.Namespace) -> PosixEngine:
    """Return the engine of the real disk, or of the emulated one."""
    if arguments.disk_bandwidth is None:
        return PosixEngine()
    return SlowDiskEngine(SlowDisk(arguments.disk_bandwidth))


# --- measuring


def measure(contexts: Contexts, place: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all systems over the same contexts. Return lists over tokens by system and figure, or None."""
    with ExitStack() as stack, contexts.asking():
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))

        def open_store(share: float = 1.0) -> KVStore:
            host = contexts.nbytes + contexts.nbytes // 8 + (256 << 20) if share == 1 else int(share * contexts.nbytes)
            sizes = {"host_memory": max(16 << 20, host), "index_memory": "64GiB"}
            engine = engine_of(arguments)
            return stack.enter_context(KVStore(folder / "store", engine=engine, queue_memory="64GiB", **sizes))

        memory_store = open_store()
        contexts.store(memory_store, KVDrive())
        if place == MEMORY:
            for ids in contexts.ids:
                memory_store.warm(contexts.model, ids[: contexts.tokens + SUFFIX], tag=TAG, progress=False)
        systems: dict[str, System] = {}
        figures: dict[str, Any] = dict.fromkeys(SYSTEMS)
        for name in tqdm(SYSTEMS, desc="systems", leave=False):
            opens = partial(open_store, arguments.host_share) if place == DISK else lambda: memory_store
            if (new_system := system(name, place, contexts, arguments, opens, files)) is not None:
                new_system.pass_over(SUFFIX)
                systems[name] = new_system
                if isinstance(new_system.cache, TieredCache):
                    assert new_system.cache.stats.tokens_restored, new_system.cache.stats.reason
        turns = interleaved(
            {name: partial(running_system.turn, arguments.tokens) for name, running_system in systems.items()},
            arguments.turns,
        )
        for name, system_turns in turns.items():
            steps = [step for turn in system_turns for step in turn]
            figures[name] = {figure: [step[figure] for step in steps] for figure in steps[0]}
    return figures


def summary(figures: dict[str, Any]) -> dict[str, dict[str, float] | None]:
    """Return medians per token of each system, and means of figures that vary in bursts."""
    summaries: dict[str, dict[str, float] | None] = {}
    for name, lists in figures.items():
        if lists is None:
            summaries[name] = None
            continue
        lookups = sum(lists["asked"])
        mean = {figure: sum(lists[figure]) / len(lists[figure]) for figure in ("moved", "read")}
        summaries[name] = {figure: median(lists[figure]) for figure in ("seconds", "cpu", *SPLIT)} | mean
        summaries[name]["hits"] = sum(lists["hits"]) / lookups if lookups else float("nan")
    return summaries


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info = document["machine"]
    parts = [
        f"# Decoding with long contexts: {document['layers']} layers of {document['shape']}, float32, "
        f"{machine_info['device']}\n\n{machine_text(machine_info)} Synthetic KV and queries "
        f"(`bench/lib/synthetic_kv.py`), random weights, a budget of {document['budget']:.2%}. Medians over "
        f"tokens; bytes are means. With a disk, host memory holds {document['host_share']:.0%} of the KV.\n"
    ]
    for result in document["results"]:
        figures, rows = summary(result["systems"]), []
        times = {name: row["seconds"] for name, row in figures.items() if row is not None}
        for name, row in figures.items():
            if row is None:
                rows.append([name, "n/a", *[""] * 10])
                continue
            rows.append(
                [
                    name,
                    f"{result['batch'] / row['seconds']:.1f}",
                    *(f"{times[peer] / row['seconds']:.2f}" if peer in times else "" for peer in (PEER, FULL)),
                    *(f"{row[part] * 1e3:.1f}" for part in (*SPLIT, "cpu")),
                    *(f"{row[kind] / 1e6:.2f}" for kind in ("moved", "read")),
                    "" if row["hits"] != row["hits"] else f"{row['hits']:.1%}",
                ]
            )
        parts.append(
            f"\n## {result['tokens']} tokens, batch {result['batch']}, {result['place']}\n\n"
            + table(
                [
                    "",
                    "tokens/s",
                    "× ShadowKV",
                    "× full",
                    *(f"{part}, ms" for part in (*SPLIT, "CPU")),
                    "MB moved",
                    "MB read",
                    "hits",
                ],
                rows,
            )
        )
    return "".join(parts)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    model = build(arguments.shape, torch.float32, device, layers=arguments.layers or None)
    layers, steps = model.config.num_hidden_layers, arguments.tokens * (arguments.turns + 1)
    suffix = f"-{arguments.disk_bandwidth / 1e6:.0f}MBps" if arguments.disk_bandwidth else ""
    suffix += "-1-thread" if arguments.threads == 1 else ""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        document = {
            "machine": machine(device, Path(folder)),
            "shape": arguments.shape,
            "layers": layers,
            "budget": arguments.budget,
            "host_share": arguments.host_share,
            "disk_bandwidth": arguments.disk_bandwidth,
            "results": [],
        }
        for tokens in arguments.contexts:
            with tempfile.TemporaryDirectory(dir=folder) as room:
                for batch in sorted(arguments.batches):  # the rows of a larger one begin with those of a smaller one
                    contexts = Contexts(model, tokens, batch, steps)
                    for place in (MEMORY, DISK):
                        figures = measure(contexts, place, arguments, Path(room))
                        case = {"tokens": tokens, "batch": batch, "place": place}
                        document["results"].append(case | {"systems": figures})
                        save(
                            arguments.out,
                            f"decode-{arguments.shape}-{layers}l-{device.type}{suffix}",
                            document,
                            report(document),
                        )
                        print(report(document | {"results": document["results"][-1:]}), flush=True)


if __name__ == "__main__":
    main()
