"""`method="auto"` against what it chooses from: time to first token from cold disks of several speeds.

    python bench/auto.py                                 # two layers of Qwen2.5-0.5B's shape, this machine's CPU
    python bench/auto.py --layers 4 --rates 5,20
    PYTHONPATH=. python bench/auto.py --model smollm2-135m --prefixes 512,4096
    python bench/auto.py --shape tiny --prefixes 64,128 --rates 5 --repeats 1

The candidates are recomputing without a store, restoring everything, and restoring while a fixed share is computed. All
answer the same prompts in turns, in alternating order. For each request a store is opened, so that the KV is on disk
and not in memory; opening it is not timed. A rate is the bandwidth of an emulated disk, in MB/s; 0 is the real disk,
without the page cache. On each disk, `"auto"` begins with an empty store: its first cache calibrates, and then the
prompts are stored. Tokens are random, and so are weights without `--model`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.common import (
    add_model_arguments,
    add_rates,
    first_token,
    forget_page_cache,
    interleaved,
    kv_bytes_per_token,
    listed,
    median,
    model_of,
    parser_of,
    random_prompts,
    ratio,
)
from lib.pages import machine, machine_text, plain_ticks, save, table
from lib.slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.calibrations import prefix_calibration
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Auto, Exact, Method
from hf_tiered_cache.store import EXACT

LATENCY_S = 100e-6
"""Latency of a read from an emulated disk."""
AUTO, RECOMPUTE, RESTORE = "auto", "recompute", "restore"
SHARES = {f"{share:.0%} computed": Exact(recompute=share, decline=False) for share in (0.25, 0.5, 0.75)}
METHODS: dict[str, Method | None] = {
    RECOMPUTE: None,
    RESTORE: Exact(recompute=0.0, decline=False),
    **SHARES,
    AUTO: Auto(),
}
NEAR = 1.05
"""Aim: maximum time to first token relative to the best candidate, and relative to recomputing."""
SHORT, LONG = 1024, 8192
"""Numbers of prefix tokens up to which there are three times as many turns, and above which `--long-repeats` counts and
there is no turn of warm-up."""


class Bench:
    """Model, prompts, and stores with the KV of their prefixes."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.model = model_of(arguments)
        self.prompts = random_prompts(self.model, arguments.prefixes, arguments.suffix)
        self.token_bytes = kv_bytes_per_token(self.model)

    def store(self, folder: str, rate: float = 0.0) -> KVStore:
        """Open a store on a disk of `rate` MB/s or, for 0, on the real disk."""
        engine: Any = SlowDiskEngine(SlowDisk(rate * 1e6, LATENCY_S)) if rate else "auto"
        memory = 2 * self.token_bytes * max(self.prompts)
        return KVStore(self.folder / folder, host_memory=max(memory, 1 << 20), engine=engine)

    def fill(self, store: KVStore, method: Method) -> None:
        """Store the prefixes."""
        suffix = self.arguments.suffix
        store.precompute(self.model, [ids[0, :-suffix] for ids in self.prompts.values()], method=method, progress=False)

    def fill_candidates(self) -> None:
        """Store the prefixes for the candidates, which are the same on all disks."""
        for name in (RESTORE, next(iter(SHARES))):
            with self.store(self.folder_of(name, 0)) as store:
                self.fill(store, METHODS[name])

    def folder_of(self, name: str, rate: float) -> str:
        """Return the folder of a system's store. All shares have one."""
        return f"{AUTO} {rate:g}" if name == AUTO else "shares" if name in SHARES else name

    def ask(self, name: str, rate: float, length: int) -> dict[str, Any]:
        """Run one cold request. Return the time to its first token, and what was restored and computed."""
        ids, method = self.prompts[length], METHODS[name]
        memory = 2 * self.token_bytes * length
        if method is None:
            cache = DynamicCache(config=self.model.config)
            return {"ttft_s": first_token(self.model, ids, lambda: cache, memory)}
        folder, caches = self.folder_of(name, rate), []
        forget_page_cache(self.folder / folder)
        with self.store(folder, rate) as store:

            def make() -> TieredCache:
                caches.append(TieredCache(self.model, store, method=method, record=False, progress=False))
                return caches[0]

            row: dict[str, Any] = {"ttft_s": first_token(self.model, ids, make, memory)}
        stats = caches[0].stats
        figures = ("tokens_restored", "tokens_recomputed", "bytes_read", "stall_seconds", "seconds_saved", "reason")
        return row | {figure: getattr(stats, figure) for figure in figures}

    def measure(self, rate: float) -> dict[str, Any]:
        """Measure all systems for each length, on a disk of `rate` MB/s or, for 0, on the real disk."""
        arguments, model = self.arguments, self.model
        with self.store(self.folder_of(AUTO, rate), rate) as store:
            start_time = time.perf_counter()
            TieredCache(model, store, method=Auto(), progress=False)
            calibration_s = time.perf_counter() - start_time
            fingerprint, device = Fingerprinter(model)(), model.device
            calibration = prefix_calibration(storage_of(store), fingerprint, device, EXACT)
            costs = {n: calibration.at(n) for n in self.prompts}
            self.fill(store, Auto())
        summaries = {}
        for length in tqdm(sorted(self.prompts), unit="prefix", desc=name_of(rate)):
            actions = {name: lambda name=name, length=length: self.ask(name, rate, length) for name in METHODS}
            rows = interleaved(actions, turns_of(arguments, length), warm_up=length <= LONG)
            summaries[length] = summarise(length, rows)
            if (costs_at := costs[length]) is not None:
                summaries[length]["predicted_recompute_s"] = float(costs_at.computing(length)) + costs_at.overhead
        return {"calibration_s": calibration_s, "prefixes": summaries}


def turns_of(arguments: argparse.Namespace, length: int) -> int:
    """Return the number of measured turns of a prefix length: short ones vary more."""
    if length > LONG:
        return int(arguments.long_repeats)
    return int(arguments.repeats) * (3 if length <= SHORT else 1)


def name_of(rate: float) -> str:
    """Return the name of a disk."""
    return f"{rate:g} MB/s" if rate else "real disk"


def summarise(length: int, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize one length: all times, the best candidate by its median, and medians of ratios within a turn."""
    times = {name: [row["ttft_s"] for row in system_rows] for name, system_rows in rows.items()}
    best = min((name for name in times if name != AUTO), key=lambda name: median(times[name]))
    return {
        "ttft_s": times,
        "best": best,
        "auto_over_best": ratio(times[AUTO], times[best]),
        "auto_over_recompute": ratio(times[AUTO], times[RECOMPUTE]),
        "chosen": [choice(length, row) for row in rows[AUTO]],
        "auto": rows[AUTO],
    }


def choice(length: int, row: dict[str, Any]) -> float:
    """Return the share of the prefix that a request with "auto" computed, mean over the layers; 1 for all."""
    return 1 - (row["tokens_restored"] - row["tokens_recomputed"]) / length


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, candidates = document["machine"], [name for name in METHODS if name != AUTO]
    parts = [
        f'# `method="auto"` against what it chooses from, {document["layers"]} layers of {document["shape"]} in '
        f"{document['dtype']} on {machine_info['device']}\n",
        f"{machine_text(machine_info)} {document['token_bytes']} bytes of KV per token, suffixes of "
        f"{document['suffix']} tokens, {document['weights']} weights. Seconds to the first token, medians of "
        f"{document['repeats']} turns, {3 * document['repeats']} up to {SHORT:,} tokens and "
        f"{document['long_repeats']} for more than {LONG:,}; ratios within a turn.\n",
    ]
    headings = ["prefix", *candidates, AUTO, "it computed", "auto ÷ best", f"≤ {NEAR}", "auto ÷ recompute", f"≤ {NEAR}"]
    cells = [cell for disk in document["disks"].values() for cell in disk["prefixes"].values()]
    for disk_name, disk in document["disks"].items():
        rows = []
        for length, cell in disk["prefixes"].items():
            rows.append([f"{int(length):,}", *(_seconds(cell, name) for name in (*candidates, AUTO))])
            rows[-1].append(f"{median(cell['chosen']):.0%}")
            for name in ("auto_over_best", "auto_over_recompute"):
                rows[-1] += [f"{cell[name]:.2f} ×", "yes" if cell[name] <= NEAR else "no"]
        parts += [f"## {disk_name}\n", table(headings, rows), f"Calibration: {disk['calibration_s']:.1f} s.\n"]
    met = {name: sum(cell[name] <= NEAR for cell in cells) for name in ("auto_over_best", "auto_over_recompute")}
    predictions = [
        f"{cell['predicted_recompute_s'] / median(cell['ttft_s'][RECOMPUTE]):.2f}"
        for cell in cells
        if "predicted_recompute_s" in cell
    ]
    parts.append(
        f"*Auto ÷ best* is at most {NEAR} in {met['auto_over_best']} of {len(cells)} cells, *auto ÷ recompute* in "
        f'{met["auto_over_recompute"]}. *It computed*: share of the prefix that `"auto"` computed, mean over the '
        "layers. The shares of the candidates are means over the layers too. The calibration's prediction of the time "
        f"to recompute, as a share of the measured time, in the order of the tables: {', '.join(predictions)}.\n"
    )
    return "\n".join(parts)


def _seconds(cell: dict[str, Any], name: str) -> str:
    """Format a median time, in bold if it is the best candidate's."""
    text = f"{median(cell['ttft_s'][name]):.2f}"
    return f"**{text}**" if name == cell["best"] else text


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Draw the times of all systems relative to the best candidate, for each disk and length."""
    disks = document["disks"]
    figure, all_axes = plt.subplots(1, len(disks), figsize=(3.2 * len(disks) + 1.5, 4), sharey=True, squeeze=False)
    for axes, (disk_name, disk) in zip(all_axes[0], disks.items(), strict=True):
        lengths = [int(length) for length in disk["prefixes"]]
        for name in METHODS:
            times = [median(cell["ttft_s"][name]) / _best_seconds(cell) for cell in disk["prefixes"].values()]
            style = {"color": "black", "linewidth": 2, "marker": "o"} if name == AUTO else {"marker": "."}
            axes.plot(lengths, times, label=name, **style)
        axes.axhline(NEAR, color="gray", linestyle=":", label=f"{NEAR} ×")
        axes.set(xscale="log", yscale="log", title=disk_name, xlabel="prefix, tokens")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
    axes = all_axes[0][0]
    axes.set_ylabel("time to first token ÷ best candidate")
    plain_ticks(axes.yaxis)
    all_axes[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _best_seconds(cell: dict[str, Any]) -> float:
    return median(cell["ttft_s"][cell["best"]])


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_model_arguments(parser, layers=2)
    parser.add_argument("--model", help="pretrained model instead of a shape: name of eval.models, folder or hub id")
    parser.add_argument(
        "--prefixes",
        type=listed(int),
        default=[512, 4096, 16384],
        help="numbers of prefix tokens, separated by commas",
    )
    parser.add_argument("--suffix", type=int, default=32, help="number of tokens after each prefix")
    add_rates(parser, [5, 20, 100, 0])
    parser.add_argument("--repeats", type=int, default=2, help="number of measured turns, after one of warm-up")
    parser.add_argument("--long-repeats", type=int, default=1, help=f"the same for more than {LONG} tokens, no warm-up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, Path(folder))
        document: dict[str, Any] = {"machine": machine(bench.model.device, Path(folder))}
        document |= {key: getattr(arguments, key) for key in ("dtype", "suffix", "repeats", "long_repeats")}
        document |= {
            "shape": Path(arguments.model or arguments.shape).name,
            "weights": "random" if arguments.model is None else "pretrained",
        }
        document |= {"layers": bench.model.config.num_hidden_layers, "token_bytes": bench.token_bytes, "disks": {}}
        name = f"auto-{document['shape']}-{document['layers']}l-{arguments.dtype}-{bench.model.device.type}"
        bench.fill_candidates()
        for rate in arguments.rates:  # saved after each disk, so that an interrupted run keeps its results
            document["disks"][name_of(rate)] = bench.measure(rate)
            save(arguments.out, name, document, report(document), plot)
    print(report(document))


if __name__ == "__main__":
    main()
