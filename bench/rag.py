"""Passages anywhere in a prompt: CacheTune and its peers, from memory and from disks of several speeds.

    python bench/rag.py                                  # 6 layers of Qwen2.5-0.5B's shape, float32, this machine's CPU
    python bench/rag.py --shape tiny --pool 6 --passages 4 --tokens 64 --requests 2 --media host,disk
    python bench/rag.py --shape qwen2.5-7b --dtype bfloat16 --device cuda --device-memory 10GiB

Passages are stored as a corpus, before any prompt is known. A prompt consists of an instruction, a random selection of
passages in any order, and a new question, so no passage is at the beginning, where its KV would be exact. All systems
answer the same prompts in succession, every second time in reverse order, so that a slower machine affects all of
them. Media: `host`, all passages in memory; `disk`, the real disk, cold each time (O_DIRECT); `ssd` and `hdd`, an
emulated disk on which computing and loading balance at the best ratios of the paper for such disks (0.31 and 0.36).
`auto` is the ratio that the calibration finds for the medium. For prefix caching, the instruction and the first passage
of each prompt are stored as its beginning. Weights are random; eval/ measures quality.

Arrivals: requests arrive at random (Poisson) with increasing rates and are served one at a time. The queue is simulated
with the measured times, 2,000 requests per rate. In addition, real clients use one model simultaneously, in threads,
and decode, and prompts run in batches (rag_load.py). Results are written immediately.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import add_model_arguments, figures_of, first_token, listed, model_of, parser_of
from lib.pages import draw, machine, machine_text, plain_ticks, save, table
from lib.rag_load import batch, serve, tables
from lib.slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm

from eval.baselines import Recompute
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import CacheBlend, CacheTune, Epic, Exact, Method

BALANCED = {"ssd": 0.31, "hdd": 0.36}
"""Recomputed shares at which computing and loading balance on the emulated disks."""
LATENCY_S = {"ssd": 100e-6, "hdd": 5e-3}
MEDIA = ("host", "disk", "ssd", "hdd")
_TITLES = {"host": "from memory", "disk": "from disk, cold", "ssd": "slow SSD, emulated", "hdd": "slow HDD, emulated"}
FULL, AUTO = "full recompute", "CacheTune, auto"
RATES = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Arrival rates, as multiples of the maximum rate of full recompute."""
SERVED = 2000
Note = Callable[[str, str, Any], None]
"""Function that is called immediately with each result: part of the document, key, and value."""


@dataclass(frozen=True)
class System:
    """Method with the way in which its passages are stored."""

    name: str
    method: Method
    passages: bool = True
    """Whether it reuses passages that were stored separately; otherwise the stored beginnings of prompts."""
    once: bool = False
    """Whether it answers the last prompt only, since it computes nearly all of each prompt."""


def systems(ratio: float) -> list[System]:
    """Return all systems at one ratio of recomputation, and one that calibrates its ratio."""
    return [
        System(FULL, Recompute(), passages=False),
        System("prefix caching", Exact(), passages=False, once=True),
        System("full reuse", CacheTune(recompute=0.0)),
        System(f"EPIC, {ratio:.0%}", Epic(recompute=ratio)),
        System(f"CacheBlend, {ratio:.0%}", CacheBlend(recompute=ratio)),
        System(f"CacheTune as in the paper, {ratio:.0%}", CacheTune.paper(ratio)),
        System(f"CacheTune, {ratio:.0%}", CacheTune(recompute=ratio)),
        System(AUTO, CacheTune(recompute="auto")),
    ]


class Bench:
    """Model, pool of passages, and prompts made of them."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.model = model_of(arguments)
        self.device = self.model.device
        random, vocabulary = np.random.default_rng(0), self.model.config.vocab_size
        self.pool = [torch.from_numpy(random.integers(3, vocabulary, arguments.tokens)) for _ in range(arguments.pool)]
        prompts = []
        instruction = torch.from_numpy(random.integers(3, vocabulary, arguments.instruction))
        for _ in range(max(arguments.requests + 1, arguments.load_requests)):
            selected_passages = random.permutation(arguments.pool)[: arguments.passages]
            question = torch.from_numpy(random.integers(3, vocabulary, arguments.suffix))
            parts = [instruction, *(self.pool[i] for i in selected_passages), question]
            prompts.append(torch.cat(parts).unsqueeze(0).to(self.device))
        self.prompts = prompts[: arguments.requests + 1]  # the first one warms up
        self.load = prompts[: arguments.load_requests]
        self.beginnings = [ids[0, : arguments.instruction + arguments.tokens].cpu() for ids in self.prompts]
        for passages in (False, True):
            with KVStore(self.source(passages), host_memory=0) as store:
                if passages:
                    for method in (CacheTune.paper(), CacheTune()):  # which have other leads
                        store.precompute(self.model, self.pool, passages=True, method=method)
                else:
                    store.precompute(self.model, self.beginnings)
                rows = store.segments()
        self.kv_bytes = sum(row.nbytes for row in rows) // 2  # of one lead
        self.token_bytes = 2 * self.kv_bytes // sum(row.tokens for row in rows)

    def source(self, passages: bool) -> Path:
        """Return the folder of the separate passages, or of the beginnings of prompts."""
        return self.folder / ("passages" if passages else "prefixes")

    def store(self, passages: bool, medium: str, compute: float) -> KVStore:
        """Open the store of the passages on a medium.

        Args:
            passages: See `source`.
            medium: Name in `MEDIA`.
            compute: Seconds per token in full recompute.
        """
        engine: Any = "auto"
        if medium in BALANCED:
            load = compute * BALANCED[medium] / (1 - BALANCED[medium])
            engine = SlowDiskEngine(SlowDisk(self.token_bytes / load, LATENCY_S[medium]))
        memory = 2 * self.kv_bytes if medium == "host" else 0
        device_memory = self.arguments.device_memory
        return KVStore(self.source(passages), host_memory=memory, device_memory=device_memory, engine=engine)

    def ask(self, system: System, store: KVStore, ids: torch.Tensor) -> dict[str, Any]:
        """Run one request. Return its counters, and the time to its first token."""
        cache = TieredCache(self.model, store, method=system.method, record=False)
        took = first_token(self.model, ids, lambda: cache)
        return figures_of(cache.stats) | {
            "ttft_s": took,
            "ratio": getattr(cache.method, "recompute", None) if system.passages else None,
        }

    def warm(self, store: KVStore, prefixes: KVStore) -> None:
        """Bring all passages into memory."""
        question = self.prompts[0][0, -self.arguments.suffix :]
        for system in systems(0.0)[2:-1]:
            self.ask(system, store, torch.cat([*self.pool, question.cpu()]).unsqueeze(0).to(self.device))
        for beginning in self.beginnings:
            self.ask(systems(0.0)[1], prefixes, torch.cat([beginning, question.cpu()]).unsqueeze(0).to(self.device))

    def turns(
        self, selected_systems: list[System], store: KVStore, prefixes: KVStore, medium: str
    ) -> Iterator[tuple[System, dict[str, Any]]]:
        """Run each prompt with all systems, and yield the rows. The first prompt warms up and is left out."""
        for number, ids in enumerate(tqdm(self.prompts, unit="request", desc=medium)):
            for system in selected_systems[:: -1 if number % 2 else 1]:
                if system.once and number < len(self.prompts) - 1:
                    continue
                row = self.ask(system, store if system.passages else prefixes, ids)
                if number:
                    yield system, row

    def measure(self, media: list[str], note: Note) -> None:
        """Measure all systems on each medium."""
        all_systems = systems(self.arguments.ratio)
        with KVStore(self.folder / "none", host_memory=0) as empty_store:  # the first one warms up
            warm_up_times = [self.ask(all_systems[0], empty_store, self.prompts[0])["ttft_s"] for _ in range(2)]
        compute = warm_up_times[1] / self.prompts[0].shape[1]
        for medium in media:
            with self.store(True, medium, compute) as store, self.store(False, medium, compute) as prefixes:
                if medium == "host":
                    self.warm(store, prefixes)
                store.calibrate(
                    self.model,
                    passages=self.arguments.passages,
                    tokens=self.arguments.tokens,
                    suffix=self.arguments.suffix,
                    repeats=1,
                    cold=medium != "host",
                )
                rows: dict[str, list[dict[str, Any]]] = {}
                for system, row in self.turns(all_systems, store, prefixes, medium):
                    rows.setdefault(system.name, []).append(row)
            note("media", medium, {system.name: summarise(rows[system.name]) for system in all_systems})

    def measure_load(self, clients: list[int], batches: list[int], note: Note) -> None:
        """Measure simultaneous clients, and prompts in batches, with all passages in memory."""
        ratio, tokens = self.arguments.ratio, self.arguments.decode
        methods = {system.name: system.method for system in systems(ratio)}
        cache_tune, blend = f"CacheTune, {ratio:.0%}", f"CacheBlend, {ratio:.0%}"
        with self.store(True, "host", 0.0) as store:
            for ids in self.load:  # brings passages into memory
                batch(self.model, store, methods["full reuse"], [ids])
            for name in (FULL, cache_tune):
                rows: list[dict[str, Any]] = []
                for count in tqdm(clients, unit="clients", desc=name):
                    client_prompts = self.load[: max(2, count)] if name == FULL else self.load  # which takes long
                    rows.append(serve(self.model, store, methods[name], client_prompts, count, tokens))
                    note("load", name, rows)
            for name in (blend, cache_tune):
                rows = []
                for size in tqdm([size for size in batches if size <= len(self.load)], unit="batch", desc=name):
                    rows.append(batch(self.model, store, methods[name], self.load[:size]))
                    note("batches", name, rows)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the requests of one system: medians."""

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return {
        "ttft_median_s": median("ttft_s"),
        "ttft_s": [row["ttft_s"] for row in rows],
        "ratio": rows[0]["ratio"],
        "tokens_computed": statistics.median(row["tokens_computed"] + row["tokens_recomputed"] for row in rows),
        "bytes_read": median("bytes_read"),
        "read_amplification": median("read_amplification"),
        "stall_s": median("stall_seconds"),
        "io_s": median("io_seconds"),
    }


def arrivals(times: list[float], rates: list[float], seed: int = 0) -> list[dict[str, float]]:
    """Simulate a queue of random arrivals. Return mean time to first token including waiting, and throughput.

    Args:
        times: Measured times of requests, one of which is drawn for each arrival.
        rates: Arrivals per second.
        seed: Random seed.
    """
    random, points = np.random.default_rng(seed), []
    for rate in rates:
        arrival_times = np.cumsum(random.exponential(1 / rate, SERVED))
        service_times = random.choice(times, SERVED)
        free_at, end_times = 0.0, []
        for at, service_time in zip(arrival_times, service_times, strict=True):
            free_at = max(free_at, at) + service_time
            end_times.append(free_at)
        points.append(
            {"rate": rate, "ttft_s": float(np.mean(end_times - arrival_times)), "throughput": SERVED / end_times[-1]}
        )
    return points


# --- telling


def loaded_ttft(row: dict[str, Any], point: dict[str, float]) -> str:
    """Format the seconds to the first token under load; "unstable" if the queue grows without bound."""
    return "unstable" if point["rate"] * statistics.mean(row["ttft_s"]) >= 1 else f"{point['ttft_s']:.1f}"


def aims(results: dict[str, dict[str, Any]], ratio: float) -> list[list[str]]:
    """Return the aims, the measured figures, and whether they are met."""
    rows: list[tuple[str, float, bool]] = []
    fixed = f"CacheTune, {ratio:.0%}"
    if "host" in results:
        times = results["host"][FULL]["ttft_median_s"] / results["host"][fixed]["ttft_median_s"]
        rows.append((f"host: {fixed} ≥ 4.86 × faster than full recompute", times, times >= 4.86))
    for medium, medium_rows in results.items():
        auto_ttft, fixed_ttft, full_ttft = (medium_rows[name]["ttft_median_s"] for name in (AUTO, fixed, FULL))
        is_same = medium_rows[AUTO]["ratio"] == medium_rows[fixed]["ratio"]
        rows.append(
            (
                f"{medium}: auto as fast as fixed" + ", which it equals" * is_same,
                fixed_ttft / auto_ttft,
                is_same or auto_ttft <= fixed_ttft,
            )
        )
        rows.append((f"{medium}: auto no slower than full recompute", full_ttft / auto_ttft, auto_ttft <= full_ttft))
    return [[text, f"{times:.2f} ×", "yes" if is_met else "no"] for text, times, is_met in rows]


def report(result: dict[str, Any], measured_on: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    text = [
        f"# Passages in a prompt, {result['shape']} in {result['dtype']} on {measured_on['device']}\n",
        f"{machine_text(measured_on)} Prompts of {result['passages']} passages of "
        f"{result['tokens']} tokens out of {result['pool']}, with {result['instruction']} tokens before and "
        f"{result['suffix']} after them; medians of {result['requests']} prompts. Random weights. Passages are stored "
        "as a corpus, before any prompt is known.[^together]\n",
    ]
    for medium, medium_rows in result["media"].items():
        full_ttft, points = medium_rows[FULL]["ttft_median_s"], result["arrivals"][medium]
        text += [
            f"## {medium}\n",
            table(
                [
                    "system",
                    "TTFT, s",
                    "full ÷ it",
                    "computed",
                    "tokens computed",
                    "MiB read",
                    "amplification",
                    "stall, s",
                    "TTFT under load, s",
                    "maximum requests per minute",
                ],
                [
                    [
                        name,
                        f"{row['ttft_median_s']:.2f}",
                        f"{full_ttft / row['ttft_median_s']:.2f} ×",
                        "" if row["ratio"] is None else f"{row['ratio']:.0%}",
                        f"{row['tokens_computed']:.0f}",
                        f"{row['bytes_read'] / (1 << 20):.1f}",
                        f"{row['read_amplification']:.2f}",
                        f"{row['stall_s']:.2f}",
                        loaded_ttft(row, points[name][RATES.index(0.9)]),
                        f"{60 / statistics.mean(row['ttft_s']):.1f}",
                    ]
                    for name, row in medium_rows.items()
                ],
            ),
        ]
    text += [tables(result), "## Aims\n", table(["aim", "measured", "met"], aims(result["media"], result["ratio"]))]
    text += [
        "\n*Tokens computed*: mean over the layers; CacheBlend computes all tokens in the first layer.",
        "*auto* was calibrated on prompts of this length, with other passages. *TTFT under load*: requests arrive at "
        "random and are served one at a time, in a queue simulated with the measured times. It includes waiting, at "
        "0.9 of the rate that full recompute can serve. The plot and the JSON have all rates. Prefix caching is "
        "measured on one prompt.\n",
        "[^together]: If passages are stored together with the others of a prompt, they are ranked after these. This "
        "changes which tokens are computed, but not how many, nor what is read, so the figures are the same.\n",
    ]
    return "\n".join(text)


def plot(plt: Any, result: dict[str, Any]) -> Any:
    """Plot the time to first token including waiting over the arrival rate: a panel for each medium."""
    media = result["arrivals"]
    figure, axes = plt.subplots(1, len(media), figsize=(3.6 * len(media) + 2, 4.2), sharey=True, squeeze=False)
    for panel, (medium, points_by_system) in zip(axes[0], media.items(), strict=True):
        for name, points in points_by_system.items():
            panel.plot([p["rate"] for p in points], [p["ttft_s"] for p in points], "o-", markersize=3, label=name)
        panel.set(title=_TITLES[medium], xlabel="requests that arrive per second", yscale="log")
    axes[0][0].set_ylabel("mean time to first token, waiting included, s")
    plain_ticks(axes[0][0].yaxis)
    axes[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_model_arguments(parser, layers=6)
    parser.add_argument("--media", type=listed(str), default=list(MEDIA[:3]), help=f"media of {', '.join(MEDIA)}")
    parser.add_argument("--pool", type=int, default=12, help="number of different passages")
    parser.add_argument("--passages", type=int, default=10, help="number of passages in a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="number of tokens in a passage")
    parser.add_argument("--requests", type=int, default=4, help="number of measured requests, after one of warm-up")
    parser.add_argument("--clients", type=listed(int), default=[1, 2, 4], help="numbers of simultaneous clients")
    parser.add_argument("--batches", type=listed(int), default=[1, 2, 4, 8], help="batch sizes")
    parser.add_argument("--load-requests", type=int, default=8, help="number of prompts for clients and batches")
    parser.add_argument("--device-memory", default="0", help="device memory of the stores")
    # of a prompt: tokens before and after the passages, recomputed share where it is fixed, and tokens of an answer
    parser.set_defaults(instruction=24, suffix=32, ratio=0.15, decode=8)
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or None
    option_names = [
        "shape",
        "layers",
        "dtype",
        "pool",
        "passages",
        "tokens",
        "instruction",
        "suffix",
        "ratio",
        "requests",
        "decode",
    ]
    result: dict[str, Any] = {name: getattr(arguments, name) for name in option_names}
    result |= {"media": {}, "arrivals": {}, "load": {}, "batches": {}}
    depth = f"-{arguments.layers}l" if arguments.layers else ""
    name = f"rag-{arguments.shape}{depth}-{arguments.dtype}-{torch.device(arguments.device).type}"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured_on = machine(torch.device(arguments.device), Path(folder))

        def note(part: str, key: str, value: Any) -> None:
            result[part][key] = value
            if part == "media":
                first_medium = next(iter(result["media"].values()))
                rates = [rate / first_medium[FULL]["ttft_median_s"] for rate in RATES]
                result["arrivals"][key] = {name: arrivals(row["ttft_s"], rates) for name, row in value.items()}
            save(arguments.out, name, result | {"machine": measured_on}, report(result, measured_on))

        bench = Bench(arguments, Path(folder))
        bench.measure(arguments.media, note)
        bench.measure_load(arguments.clients, arguments.batches, note)
    draw(plot, result, arguments.out / f"{name}.png")
    print(report(result, measured_on))


if __name__ == "__main__":
    main()
