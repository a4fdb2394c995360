"""Selective re-prefill on disks of different speeds, including the relative speed of the paper's machine.

    python bench/bandwidths.py                    # half of Qwen2.5-0.5B's layers: about 20 minutes on 2 slow cores
    python bench/bandwidths.py --layers 24 --prefixes 8 --requests 60 --warm-up 18
    python bench/bandwidths.py --bandwidths 38,66,0 --requests 40

Compares ContiguousKV (with its defaults and with its paper's settings), IMPRESS, H2O and AttentionStore at a budget of
5 %. Workload and memory are those of reprefill.py, but with fewer prefixes and requests: 6 prefixes and, on each disk,
24 requests after 12. On each disk, the systems answer the requests in turns, from empty memory and equal stores.
IMPRESS has ordered its tokens and ContiguousKV has scored its chunks in earlier requests from the real disk (--learn).
Recomputation needs no disk and is timed once. Results are written after each disk, so an interrupted run keeps them.

On the paper's machine, the time to load a token's KV is a certain share of the time to compute the token. The disk with
the same share on this machine depends on how tokens are computed: in bulk prefill, as in the paper, or in a short
suffix, which takes longer per token. The plot marks both disks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import build
from lib.pages import draw, machine, machine_text, plain_ticks, save, table
from lib.serving import Bench, System, add_arguments, ask_all
from lib.telling import MIB, calibrated, first_cells, workload_and_memory
from lib.workload import RandomTokens, requests
from reprefill import (
    ATTENTION_STORE,
    BUDGET_OF_AIMS,
    H2O_LFU,
    IMPRESS,
    KEYS,
    OURS,
    PAPER_AGREEING,
    TIMES_FASTER,
    systems,
)

from eval.baselines import Recompute
from hf_tiered_cache.methods import ContiguousKV

SYSTEM_NAMES = (OURS, KEYS, IMPRESS, H2O_LFU, ATTENTION_STORE)
BANDWIDTHS = "19,38,66,94,150,300,0"
READINGS = {"bulk": "bulk prefill", "suffix": "suffix"}
"""Names of the two calibrations, and the passes that they time."""


def measure(
    arguments: argparse.Namespace, bench: Bench, selected_systems: list[System], document: dict[str, Any], path: Path
) -> None:
    """Run all systems on every disk, and write the results after each disk.

    Args:
        arguments: Arguments of the command line.
        bench: Model, prompts and stores.
        selected_systems: Systems to measure.
        document: Results, which the function extends.
        path: Path of the results without suffix.
    """
    for speed in map(float, arguments.bandwidths.split(",")):
        bench.bandwidth = speed * 1e6
        description = f"{speed:g} MB/s" if speed else "real disk"
        (summary,) = ask_all([(bench, selected_systems)], description)
        document["disks"].append({"bytes_per_second": bench.bandwidth or "real", "systems": summary})
        save(path.parent, path.name, document, report(document))
        draw(plot, document, path.with_name(f"{path.name}.png"))


def recomputed(bench: Bench) -> float:
    """Measure the time to first token of a prompt that is computed completely."""
    system = System("recompute", Recompute(), "lru")
    with bench.store_for(system) as store:
        ttft_s: float = bench.ask(system, store, next(requests(bench.prompts, 1)).to(bench.device))["ttft_s"]
    return ttft_s


def emulated(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of emulated disks, slowest first."""
    disks = [disk for disk in document["disks"] if disk["bytes_per_second"] != "real"]
    return sorted(disks, key=lambda disk: disk["bytes_per_second"])


def ttft_at(document: dict[str, Any], name: str, bytes_per_second: float) -> float | None:
    """Return a system's mean time to first token on a disk between two measured ones; None beyond them.

    Interpolation is linear in the logarithms.

    Args:
        document: Results.
        name: Name of the system.
        bytes_per_second: Bandwidth of the disk.
    """
    disks = emulated(document)
    speeds = [disk["bytes_per_second"] for disk in disks]
    if not speeds or not speeds[0] <= bytes_per_second <= speeds[-1]:
        return None
    times = [disk["systems"][name]["ttft_mean_s"] for disk in disks]
    return float(np.exp(np.interp(np.log(bytes_per_second), np.log(speeds), np.log(times))))


# --- telling


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, disks = document["machine"], document["disks"]
    other_names = [name for name in SYSTEM_NAMES if name != OURS]
    recompute = document["recompute_ttft_s"]
    times, ratios, first_rows = [], [], []
    for disk in disks:
        rows, label = disk["systems"], _label(disk)
        our_ttft = rows[OURS]["ttft_mean_s"]
        times.append([label, *(f"{1e3 * rows[name]['ttft_mean_s']:.0f}" for name in SYSTEM_NAMES)])
        ratios.append(
            [
                label,
                *(f"{rows[name]['ttft_mean_s'] / our_ttft:.2f}" for name in other_names),
                f"{recompute / our_ttft:.1f}",
            ]
        )
        first_rows.append([label, *first_cells(rows[OURS])])
    return "\n".join([
        f"# Selective re-prefill over the disk's bandwidth, {document['model']} in {document['dtype']} on "
        f"{machine_info['device']}, budget {document['budget']:.0%}\n",
        f"{machine_text(machine_info)} "
        f"{workload_and_memory(document)} on each disk. {document['prompts']} {OURS} selects once "
        f"per {ContiguousKV.period} layers. With the "
        f"paper's settings, a selection serves {document['period']} layers. IMPRESS's probes are assumed to agree in "
        f"{PAPER_AGREEING:.0%} of the selections, as in its paper.\n",
        "## Time to first token, ms\n",
        table(["disk, MB/s", *SYSTEM_NAMES], times),
        "Mean per request. On each disk, all systems take turns, from empty memory. IMPRESS's order of tokens and "
        f"ContiguousKV's scores, which outlive a process, come from {document['learned']} earlier requests per prefix. "
        f"Recomputation, which needs no disk, takes {recompute:.2f} s, timed once.\n",
        f"## Relative to {OURS}\n",
        table(["disk, MB/s", *other_names, "recompute"], ratios),
        "Mean time to first token, divided by that of ContiguousKV with its defaults on the same disk.\n",
        "## On the paper's disk\n",
        table(["time of a token in", "MB/s", *(f"{name} (aim {aim})" for name, aim in TIMES_FASTER.items())],
              [_reading(document, name, label) for name, label in READINGS.items()]),
        f"{calibrated(document)} Ratios as above, interpolated between the nearest measured disks, linearly in the "
        "logarithms.\n",
        "## The resident index\n",
        table(
            ["disk, MB/s", "first TTFT, ms", "MiB read", "scoring", "identification, ms", "identification later, ms"],
            first_rows,
        ),
        f"{_memory(disks)} The table shows *{OURS}*, means over the first request to each prefix, of which nothing is "
        "in memory yet. The first read of the index costs the bytes of *scoring*, and the difference between "
        "*identification* and *identification later*.\n",
    ])  # fmt: skip


def _label(disk: dict[str, Any]) -> str:
    speed = disk["bytes_per_second"]
    return "real disk" if speed == "real" else f"{speed / 1e6:g}"


def _reading(document: dict[str, Any], name: str, label: str) -> list[str]:
    """Return the row of one calibration: the equivalent disk, and the speedup over each system."""
    speed = document["calibration"][name]["bytes_per_second"]
    our_ttft, cells = ttft_at(document, OURS, speed), []
    for other_name, aim in TIMES_FASTER.items():
        if our_ttft is None or (other_ttft := ttft_at(document, other_name, speed)) is None:
            cells.append("not measured")
        else:
            cells.append(f"{other_ttft / our_ttft:.2f}, {'met' if other_ttft / our_ttft >= aim else 'missed'}")
    return [label, f"{speed / 1e6:.3g}", *cells]


def _memory(disks: list[dict[str, Any]]) -> str:
    """Describe the memory of indexes and blocks in sentences."""
    sentences = []
    for name, row in disks[0]["systems"].items() if disks else ():
        memory = row["memory_bytes"]
        if memory["index"]:
            blocks = (memory["device"] + memory["host"]) / MIB
            sentences.append(
                f"*{name}* has {blocks:.1f} MiB of memory for blocks and {memory['index'] / MIB:.1f} for its index"
            )
    return f"{'; '.join(sentences) or 'No system has an index'}; the others use the same total for blocks only."


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Plot times over bandwidth, with the paper's disk by both calibrations."""
    figure, axes = plt.subplots(figsize=(8, 5))
    disks = emulated(document)
    speeds = [disk["bytes_per_second"] / 1e6 for disk in disks]
    real_disks = [disk for disk in document["disks"] if disk["bytes_per_second"] == "real"]
    beyond = 2 * max(speeds, default=1.0)  # how fast the real disk is, is not known
    for name in SYSTEM_NAMES:
        (line,) = axes.plot(speeds, [1e3 * disk["systems"][name]["ttft_mean_s"] for disk in disks], "o-", label=name)
        for disk in real_disks:
            axes.plot([beyond], [1e3 * disk["systems"][name]["ttft_mean_s"]], "D", color=line.get_color())
    axes.axhline(1e3 * document["recompute_ttft_s"], color="gray", linestyle=":", label="recompute")
    for (name, label), style in zip(READINGS.items(), ("-", "--"), strict=True):
        speed = document["calibration"][name]["bytes_per_second"] / 1e6
        axes.axvline(speed, color="black", linewidth=1, linestyle=style, label=f"the paper's disk, by {label}")
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of the disk, MB/s", ylabel="time to first token, ms (mean)")
    axes.set_xticks(
        [*speeds, *([beyond] if real_disks else [])],
        [*(f"{speed:g}" for speed in speeds), *(["real"] if real_disks else [])],
    )
    axes.minorticks_off()
    plain_ticks(axes.yaxis)
    axes.set_title(f"{document['model']}, {document['dtype']}, budget {document['budget']:.0%}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bandwidths",
        default=BANDWIDTHS,
        help=f"bandwidths of emulated disks in MB/s; 0: the real disk (default: {BANDWIDTHS})",
    )
    parser.add_argument("--learn", type=int, default=8, help="earlier requests per prefix, without the slow disk")
    add_arguments(parser, one_disk=False)
    parser.set_defaults(layers=12, prefixes=6, tokens=4096, requests=24, warm_up=12)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = build(arguments.shape, getattr(torch, arguments.dtype), device, layers=arguments.layers)
    prompts = RandomTokens(model.config.vocab_size, arguments.prefixes, arguments.tokens, arguments.suffix)
    period = min(arguments.period, arguments.layers)
    selected_systems = [
        system for system in systems(BUDGET_OF_AIMS, period, PAPER_AGREEING) if system.name in SYSTEM_NAMES
    ]
    label = f"{arguments.shape}-{arguments.layers}l"
    name = arguments.name or f"bandwidths-{label}-{arguments.dtype}-{device.type}"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, model, prompts, Path(folder))
        for system in selected_systems:
            if not system.policy:  # LRU and LFU know nothing that outlives a process
                bench.learn(system, arguments.learn)
        document = {"model": label, "dtype": arguments.dtype, "budget": BUDGET_OF_AIMS, "period": period}
        document["learned"] = arguments.learn
        document |= {key: value for key, value in bench.described().items() if key != "disk_bytes_per_second"}
        document |= {"machine": machine(device, Path(folder)), "recompute_ttft_s": recomputed(bench), "disks": []}
        measure(arguments, bench, selected_systems, document, arguments.out / name)
    print(report(document))


if __name__ == "__main__":
    main()
