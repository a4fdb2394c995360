"""Prefixes that are loaded, computed, or both at once: time to first token from cold disks of several speeds.

    python bench/recompute_schedule.py                              # Qwen2.5-0.5B's shape, float32, this machine's CPU
    python bench/recompute_schedule.py --shape tiny --prefixes 64,128 --rates 5 --repeats 1
    python bench/recompute_schedule.py --layers 6 --prefixes 512,2048 --rates 50,200,800,0

`Exact()`, calibrated on each disk, is compared with the same method that loads everything, and with recomputation. They
answer the same prompts in turns. A rate is the bandwidth of an emulated disk, in MB/s; 0 is the real disk, without the
page cache. Weights are random. Idle time is the time in which the model waits for KV, or the disk is idle although
reads are still to come.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lib.common import (
    add_model_arguments,
    add_rates,
    figures_of,
    first_token,
    interleaved,
    kv_bytes_per_token,
    listed,
    median,
    model_of,
    parser_of,
    random_prompts,
    ratio,
)
from lib.pages import machine, machine_text, save, table
from lib.slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm

from eval.baselines import Recompute
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import Exact, Method

LATENCY_S = 100e-6
"""Latency of a read from an emulated disk."""
AUTO, LOADED, COMPUTED = "Exact, auto", "loaded", "computed"
METHODS: dict[str, Method] = {
    AUTO: Exact(),
    LOADED: Exact(recompute=0.0, decline=False),
    COMPUTED: Recompute(),
}
NEAR, BUBBLES = 1.05, 0.05
"""Aims: maximum TTFT relative to the better of loading and computing, and maximum share of idle time."""


class Bench:
    """Model, and stored prefixes of several lengths."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.model = model_of(arguments)
        self.prompts = random_prompts(self.model, arguments.prefixes, arguments.suffix)
        self.token_bytes = kv_bytes_per_token(self.model)
        self.kv_bytes = self.token_bytes * sum(self.prompts)

    def ask(self, store: KVStore, method: Method, ids: torch.Tensor) -> dict[str, Any]:
        """Run one cold request. Return its counters, and the time to its first token."""
        store.clear()
        cache = TieredCache(self.model, store, method=method, record=False)
        took = first_token(self.model, ids, lambda: cache)
        return figures_of(cache.stats) | {"ttft_s": took}

    def measure(self, rate: float) -> dict[str, Any]:
        """Measure each method for each length, on a disk of `rate` MB/s or, for 0, on the real disk."""
        engine: Any = SlowDiskEngine(SlowDisk(rate * 1e6, LATENCY_S)) if rate else "auto"
        lengths, suffix = sorted(self.prompts), self.arguments.suffix
        with KVStore(self.folder / f"{rate:g}", host_memory=2 * self.kv_bytes, engine=engine) as store:
            calibrated_lengths = self.arguments.calibrate or sorted({lengths[0], min(lengths[-1], 4096)})
            repeats = self.arguments.calibrate_repeats
            costs = store.calibrate_prefix(self.model, tokens=calibrated_lengths, repeats=repeats, progress=False)
            prompts = [ids[0, :-suffix] for ids in self.prompts.values()]
            store.precompute(self.model, prompts, progress=False)  # cut by the calibration
            summaries = {}
            for length in tqdm(lengths, unit="prefix", desc=name_of(rate)):
                actions = {
                    name: lambda method=method, length=length: self.ask(store, method, self.prompts[length])
                    for name, method in METHODS.items()
                }
                summaries[length] = summarise(length, interleaved(actions, self.arguments.repeats))
        return {"costs": [cost.as_dict() for cost in costs], "prefixes": summaries}


def name_of(rate: float) -> str:
    """Return the name of a disk."""
    return f"{rate:g} MB/s" if rate else "the disk"


def summarise(length: int, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize one length: medians, and medians of ratios within a turn."""
    times = {name: [row["ttft_s"] for row in method_rows] for name, method_rows in rows.items()}
    better = min((LOADED, COMPUTED), key=lambda name: median(times[name]))

    def share(figure: str) -> float:
        return median(row[figure] / row["ttft_s"] for row in rows[AUTO])

    return {
        "ttft_s": times,
        "better": better,
        "auto_over_better": ratio(times[AUTO], times[better]),
        "loaded_over_auto": ratio(times[LOADED], times[AUTO]),
        "computed_over_auto": ratio(times[COMPUTED], times[AUTO]),
        "recomputed": 1.0 if rows[AUTO][0]["reason"] else rows[AUTO][0]["tokens_recomputed"] / length,
        "stall_share": share("stall_seconds"),
        "load_idle_share": share("load_idle_seconds"),
        "io_share": share("io_seconds"),
    }


def report(result: dict[str, Any], measured_on: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    text = [
        f"# A prefix loaded, computed, or both, {result['shape']} in {result['dtype']} on {measured_on['device']}\n",
        f"{machine_text(measured_on)} "
        f"{result['layers']} layers, {result['token_bytes']} bytes of KV per token, suffixes of "
        f"{result['suffix']} tokens; medians of {result['repeats']} turns, ratios within a turn. Random weights.\n",
    ]
    headings = ["prefix", "loaded, s", "computed, s", "auto, s", "recomputed"]
    headings += ["auto ÷ better", f"≤ {NEAR}", "waits for KV", "disk idle", "disk busy", f"idle time ≤ {BUBBLES:.0%}"]
    for disk, disk_results in result["disks"].items():
        rows = []
        for length, figures in disk_results["prefixes"].items():
            bubbles = figures["stall_share"] + figures["load_idle_share"]
            rows.append(
                [
                    f"{int(length):,}",  # a string if it was read from JSON
                    *(f"{median(figures['ttft_s'][name]):.2f}" for name in (LOADED, COMPUTED, AUTO)),
                    f"{figures['recomputed']:.0%}",
                    f"{figures['auto_over_better']:.2f} ×",
                    "yes" if figures["auto_over_better"] <= NEAR else "no",
                    *(f"{figures[name]:.1%}" for name in ("stall_share", "load_idle_share", "io_share")),
                    "yes" if bubbles <= BUBBLES else "no",
                ]
            )
        text += [f"## {disk}\n", table(headings, rows)]
    text += [
        "\n*Recomputed*: share of the prefix that `Exact()` computes, mean over the layers. *Waits for KV*, *disk "
        "idle* (while reads are still to come) and *disk busy* are shares of its time to first token; the first two "
        "are the idle time. If everything is loaded, the model only waits.\n",
    ]
    return "\n".join(text)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_model_arguments(parser, layers=0)
    parser.add_argument(
        "--prefixes",
        type=listed(int),
        default=[512, 2048, 8192, 16384],
        help="numbers of prefix tokens, separated by commas",
    )
    parser.add_argument("--suffix", type=int, default=32, help="number of tokens after each prefix")
    add_rates(parser, [2, 5, 20, 200, 0])
    parser.add_argument("--repeats", type=int, default=3, help="number of measured turns, after one of warm-up")
    parser.add_argument(
        "--calibrate",
        type=listed(int),
        help="calibrated prefix lengths (default: shortest and longest prefix, at most 4096)",
    )
    parser.add_argument("--calibrate-repeats", type=int, default=3, help="number of repetitions of the calibration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, Path(folder))
        measured_on = machine(bench.model.device, Path(folder))
        result: dict[str, Any] = {
            "shape": arguments.shape,
            "layers": bench.model.config.num_hidden_layers,
            "dtype": arguments.dtype,
            "suffix": arguments.suffix,
            "repeats": arguments.repeats,
            "token_bytes": bench.token_bytes,
            "disks": {},
        }
        name = f"recompute-schedule-{arguments.shape}" + (f"-{arguments.layers}l" if arguments.layers else "")
        for rate in arguments.rates:  # saved after each disk, so that an interrupted run keeps its results
            result["disks"][name_of(rate)] = bench.measure(rate)
            page = report(result, measured_on)
            save(arguments.out, f"{name}-{arguments.dtype}-{arguments.device}", {"machine": measured_on} | result, page)
    print(page)


if __name__ == "__main__":
    main()
