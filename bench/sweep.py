"""ContiguousKV alone: effect of chunk size, period, budget and prefix length.

    python bench/sweep.py                                  # Qwen2.5-0.5B's shape on this machine's CPU
    python bench/sweep.py --sweeps budget,tokens --requests 24
    python bench/sweep.py --shape tiny --tokens 256 --lengths 128,256 --prefixes 2 --warm-up 2 --requests 4

One setting at a time is varied from the method's defaults (chunks of 8 tokens, a period of 2 layers, both in a block, a
quarter of the prefix), with the resident index and with all keys (identify="index" and "keys"). All settings answer
every request in succession, each with a store and memory of its own, so that a slower machine affects all of them. The
KV of each prefix is computed once, and rewritten for each geometry. Prompts, emulated disk and memory, of which the
resident index takes a part, are those of reprefill.py. With random weights, times and bytes have a meaning, but not the
content of selections.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lib.common import SHAPES, build
from lib.pages import machine, machine_text, pyplot, save, table
from lib.serving import Bench, System, add_arguments, ask_all
from lib.telling import MIB, disk_and_memory
from lib.workload import RandomTokens

from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.stats import TIERS

SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "chunk_tokens": ("tokens of a chunk", (4, 8, 16, 32, 64)),
    "period": ("layers of a period", (1, 2, 4, 8, 12, 24)),
    "solo_layers": ("solo layers", (0, 1, 2)),
    "budget": ("budget", (0.05, 0.1, 0.25, 0.5, 1.0)),
    "tokens": ("tokens of the prefix", (512, 1024, 2048, 4096)),
}
"""Label and values of each sweep; the values of "tokens" are replaced by --lengths."""
WAYS = ("index", "keys")


@dataclass(frozen=True)
class Point:
    """Value of a sweep with one variant of identification: a method, and the length of its prefixes."""

    sweep: str
    value: float
    method: ContiguousKV
    tokens: int

    @property
    def system(self) -> System:
        """System of the point. Points with the same settings share a name, and are measured once."""
        method = self.method
        names = ("chunk_tokens", "period", "solo_layers", "budget", "identify")
        name = " ".join(str(getattr(method, name)) for name in names)
        return System(name, method, method.policy)


def points(default: ContiguousKV, sweeps: list[str], layers: int, tokens: int, lengths: list[int]) -> list[Point]:
    """Return all points by sweep, value and variant, as far as the model has enough layers."""
    all_points = []
    for sweep in sweeps:
        values = lengths if sweep == "tokens" else SWEEPS[sweep][1]
        if limit := {"period": layers, "solo_layers": layers}.get(sweep):
            values = [value for value in values if value <= limit]
        for value in values:
            method, prefix_tokens = (default, value) if sweep == "tokens" else (varied(default, sweep, value), tokens)
            all_points += [Point(sweep, value, replace(method, identify=way), prefix_tokens) for way in WAYS]
    return all_points


def varied(default: ContiguousKV, sweep: str, value: float) -> ContiguousKV:
    """Return the default with one value changed."""
    return replace(default, **{sweep: value})


def measure(arguments: argparse.Namespace, selected_points: list[Point], folder: Path) -> dict[str, Any]:
    """Measure the systems of all points, those of all lengths in the same turns."""
    model = build(arguments.shape, getattr(torch, arguments.dtype), torch.device(arguments.device))
    benches: dict[int, Bench] = {}
    # most sweeps use this length, so it comes first and defines the disk
    lengths = {point.tokens for point in selected_points}
    for tokens in sorted(lengths, key=lambda tokens: (tokens != arguments.tokens, tokens)):
        prompts = RandomTokens(model.config.vocab_size, arguments.prefixes, tokens, arguments.suffix)
        benches[tokens] = Bench(arguments, model, prompts, folder / str(tokens))
        arguments.bandwidth = benches[tokens].bandwidth
    systems = {
        tokens: list({point.system.name: point.system for point in selected_points if point.tokens == tokens}.values())
        for tokens in benches
    }
    summaries = dict(
        zip(benches, ask_all([(bench, systems[tokens]) for tokens, bench in benches.items()]), strict=True)
    )
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for point in selected_points:
        summary = summaries[point.tokens][point.system.name]
        row = {"value": point.value, "identify": point.method.identify}
        sweeps.setdefault(point.sweep, []).append(row | summary)
    first_bench = next(iter(benches.values()))
    return first_bench.described() | {"sweeps": sweeps}


# --- telling


def report(result: dict[str, Any], measured_on: dict[str, Any]) -> str:
    """Return the page in Markdown, with a table for each sweep."""
    text = [
        f"# ContiguousKV's settings, {result['model']} in {result['dtype']} on {measured_on['device']}\n",
        f"{machine_text(measured_on)} {disk_and_memory(result)}\n",
        f"One setting at a time is varied from {result['defaults']}. All KV and its memory vary with the length of the "
        "prefix.\n",
    ]
    heading = ["identify", "TTFT, ms", "p95", "MiB read for scoring", "attended to", "amplification",
               "hits device / host / disk, %"]  # fmt: skip
    for sweep, rows in result["sweeps"].items():
        title = SWEEPS[sweep][0]
        text += [
            f"## {title[0].upper()}{title[1:]}\n",
            table([title, *heading], [_cells(row) for row in rows]),
        ]
    text.append(
        "Means per request. Bytes are those read from disk: for scoring, and the rest. "
        "*Amplification*: bytes read per byte that is attended to (blocks are whole pages of 4 KiB, which small blocks "
        "do not fill).\n"
    )
    return "\n".join(text)


def _read(row: dict[str, Any]) -> dict[str, float]:
    """Return the MiB read, by purpose."""
    scoring = row["bytes_identifying"]
    split = {"scoring": scoring, "attended to": row["bytes_read"] - scoring}
    return {name: nbytes / MIB for name, nbytes in split.items()}


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['value']:g}",
        row["identify"],
        *(f"{row[key] * 1e3:.0f}" for key in ("ttft_mean_s", "ttft_p95_s")),
        *(f"{mib:.2f}" for mib in _read(row).values()),
        f"{row['read_amplification']:.2f}",
        " / ".join(f"{100 * row['hit_ratio'][tier]:.0f}" for tier in TIERS),
    ]


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the time to first token and the bytes read of each sweep, where matplotlib is installed."""
    if (plt := pyplot()) is None:
        return
    sweeps = result["sweeps"]
    figure, axes = plt.subplots(
        2, len(sweeps), figsize=(3.3 * len(sweeps) + 1, 5.6), squeeze=False, sharex="col", height_ratios=(3, 2)
    )
    for (times, reads), (sweep, rows) in zip(axes.T, sweeps.items(), strict=True):
        _panel(times, reads, rows)
        reads.set_xlabel(SWEEPS[sweep][0])
    axes[0, 0].set_ylabel("time to first token, ms")
    axes[1, 0].set_ylabel("read from disk, MiB\n(left: index, right: keys)")
    for row in axes:
        row[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"ContiguousKV, {result['model']}, {result['dtype']}: one setting varied at a time")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _panel(times: Any, reads: Any, rows: list[dict[str, Any]]) -> None:
    """Plot one sweep: lines of times, and stacked bars of bytes for both variants."""
    for number, way in enumerate(WAYS):
        way_rows = [row for row in rows if row["identify"] == way]
        places = range(len(way_rows))
        color = f"C{number}"
        times.plot(places, [1e3 * row["ttft_mean_s"] for row in way_rows], "o-", color=color, label=f"{way}, mean")
        p95 = [1e3 * row["ttft_p95_s"] for row in way_rows]
        times.plot(places, p95, "_", color=color, label=f"{way}, 95th percentile")
        bottom = [0.0] * len(way_rows)
        positions = [place + 0.4 * number - 0.2 for place in places]
        for part, name in enumerate(_read(way_rows[0])):
            heights = [_read(row)[name] for row in way_rows]
            label = None if number else name
            reads.bar(positions, heights, 0.36, bottom=bottom, color=f"C{2 + part}", label=label)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        reads.set_xticks(places, [f"{row['value']:g}" for row in way_rows])
    times.set_ylim(bottom=0)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sweeps", default=",".join(SWEEPS), help="settings to vary, separated by commas (default: all)"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="number of tokens in a prefix, unless it is varied")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="numbers of prefix tokens, if they are varied")
    parser.add_argument("--prefixes", type=int, default=4, help="number of prefixes of each length")
    add_arguments(parser)
    parser.set_defaults(requests=12, warm_up=4)
    arguments = parser.parse_args()
    selected_sweeps = arguments.sweeps.split(",")
    if unknown_sweeps := sorted(set(selected_sweeps) - set(SWEEPS)):
        parser.error(f"unknown sweep {unknown_sweeps[0]!r}; choose from {', '.join(SWEEPS)}")
    lengths = [int(length) for length in arguments.lengths.split(",")]
    layers = SHAPES[arguments.shape]["num_hidden_layers"]
    default = ContiguousKV(period=min(ContiguousKV.period, layers))
    defaults = (
        f"chunks of {default.chunk_tokens} tokens, a period of {default.period} layers, subperiods of "
        f"{default.geometry.layers_per_block}, a budget of {default.budget:.0%} and prefixes of {arguments.tokens} "
        "tokens"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        sweep_results = measure(arguments, points(default, selected_sweeps, layers, arguments.tokens, lengths), folder)
        measured_on = machine(torch.device(arguments.device), folder)
    result = (
        {"model": arguments.shape, "dtype": arguments.dtype, "defaults": defaults}
        | sweep_results
        | {"machine": measured_on}
    )
    name = arguments.name or f"sweep-{arguments.shape}-{arguments.dtype}-{torch.device(arguments.device).type}"
    text = report(result, measured_on)
    save(arguments.out, name, result, text, plot)
    print(text)


if __name__ == "__main__":
    main()
