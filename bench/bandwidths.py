"""Selective re-prefill on disks of many speeds: where on that curve the paper's machine stands, and what it shows.

    python bench/bandwidths.py                    # half of Qwen2.5-0.5B's layers: about 20 minutes on 2 slow cores
    python bench/bandwidths.py --layers 24 --prefixes 8 --requests 60 --warm-up 18
    python bench/bandwidths.py --bandwidths 38,66,0 --requests 40

At a budget of 5 %, ContiguousKV as it is by default and as in its paper, IMPRESS, H2O and AttentionStore, with the
workload and the memory of reprefill.py, but fewer prefixes and requests: 6 prefixes and, on each disk, 24 requests
after 12. On each disk all systems are asked in turns, from memory that is empty and stores that are the same: IMPRESS
has ordered its tokens, and ContiguousKV scored its chunks, in requests from the real disk (--learn). Computing
everything needs no disk, and is timed once. Results are written behind each disk, so that of a run that was interrupted
there is what it has measured.

On the paper's machine loading a token's KV takes a certain share of the time that computing a token takes. Which disk
that is here depends on the token: one of a prefix that is computed in bulk, which the paper's figure is of, or one of a
short suffix, which takes longer. Both are measured, and marked on the curve.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import build, machine, pyplot, save, table
from lib.serving import Bench, System, add_arguments, ask_all
from lib.telling import MIB, calibrated, first_cells, workload_and_memory
from lib.workload import RandomTokens, requests
from reprefill import (
    AHEAD,
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

WANTED = (OURS, AHEAD, KEYS, IMPRESS, H2O_LFU, ATTENTION_STORE)
BANDWIDTHS = "19,38,66,94,150,300,0"
READINGS = {"bulk": "bulk prefill", "suffix": "a suffix"}
"""The two calibrations, and what they time."""


def measure(
    arguments: argparse.Namespace, bench: Bench, wanted: list[System], document: dict[str, Any], path: Path
) -> None:
    """Ask all systems on every disk, and write what there is behind each.

    Args:
        document: gets it.
        path: of the results, without the ending.
    """
    for speed in map(float, arguments.bandwidths.split(",")):
        bench.bandwidth = speed * 1e6
        about = f"{speed:g} MB/s" if speed else "real disk"
        (summary,) = ask_all([(bench, wanted)], about)
        document["disks"].append({"bytes_per_second": bench.bandwidth or "real", "systems": summary})
        save(path.parent, path.name, document, report(document))
        plot(document, path.with_name(f"{path.name}.png"))


def recomputed(bench: Bench) -> float:
    """Time to first token of a prompt of which nothing is reused."""
    system = System("recompute", Recompute(), "lru")
    with bench.store_for(system) as store:
        took: float = bench.ask(system, store, next(requests(bench.prompts, 1)).to(bench.device))["ttft_s"]
    return took


def emulated(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured on disks whose speed is known, slowest first."""
    known = [disk for disk in document["disks"] if disk["bytes_per_second"] != "real"]
    return sorted(known, key=lambda disk: disk["bytes_per_second"])


def ttft_at(document: dict[str, Any], name: str, bytes_per_second: float) -> float | None:
    """A system's mean time to first token on a disk between two measured ones, in seconds; None beyond them.

    Between them logarithms lie on a straight line.
    """
    disks = emulated(document)
    speeds = [disk["bytes_per_second"] for disk in disks]
    if not speeds or not speeds[0] <= bytes_per_second <= speeds[-1]:
        return None
    times = [disk["systems"][name]["ttft_mean_s"] for disk in disks]
    return float(np.exp(np.interp(np.log(bytes_per_second), np.log(speeds), np.log(times))))


# --- telling


def report(document: dict[str, Any]) -> str:
    """The page of results, as Markdown."""
    on, disks = document["machine"], document["disks"]
    others = [name for name in WANTED if name != OURS]
    recompute = document["recompute_ttft_s"]
    times, ratios, first = [], [], []
    for disk in disks:
        rows, label = disk["systems"], _label(disk)
        ours = rows[OURS]["ttft_mean_s"]
        times.append([label, *(f"{1e3 * rows[name]['ttft_mean_s']:.0f}" for name in WANTED)])
        ratios.append(
            [label, *(f"{rows[name]['ttft_mean_s'] / ours:.2f}" for name in others), f"{recompute / ours:.1f}"]
        )
        first.append([label, *first_cells(rows[OURS])])
    return "\n".join([
        f"# Selective re-prefill over the disk's bandwidth, {document['model']} in {document['dtype']} on "
        f"{on['device']}, budget {document['budget']:.0%}\n",
        f"{on['cpu']}, {on['cores']} cores; PyTorch {on['torch']}, transformers {on['transformers']}; {on['date']}. "
        f"{workload_and_memory(document)} on each disk. {document['prompts']} {OURS} chooses for "
        f"{ContiguousKV.period} layers at once, *{AHEAD}* a layer before the first of them has its queries; as in the "
        f"paper it is {document['period']} layers. IMPRESS's probes are taken to agree at "
        f"{PAPER_AGREEING:.0%} of the choices, as in its paper.\n",
        "## Time to first token, ms\n",
        table(["disk, MB/s", *WANTED], times),
        "Means of a request. On each disk all systems took turns, from empty memory. What outlives a process, "
        f"IMPRESS's order of tokens and ContiguousKV's scores, came from {document['learned']} requests to each prefix "
        "before. "
        f"Computing everything, which needs no disk, takes {recompute:.2f} s, timed once.\n",
        f"## Beside {OURS}\n",
        table(["disk, MB/s", *others, "recompute"], ratios),
        "Mean time to first token over that of ContiguousKV as it is by default, on the same disk.\n",
        "## On the paper's disk\n",
        table(["by the time of a token in", "MB/s", *(f"{name} (aim {aim})" for name, aim in TIMES_FASTER.items())],
              [_reading(document, name, label) for name, label in READINGS.items()]),
        f"{calibrated(document)} Ratios as above, between the two measured disks on either side: logarithms of times "
        "lie on straight lines there.\n",
        "## The resident index\n",
        table(["disk, MB/s", "first TTFT, ms", "MiB read", "scoring", "identification, ms", "the same, later"], first),
        f"{_memory(disks)} The table is of *{OURS}*, means over the first request to each prefix, of which memory has "
        "nothing yet: what is read for *scoring*, and *identification* beyond what it takes *later*, is what the "
        "first read of the index costs.\n",
    ])  # fmt: skip


def _label(disk: dict[str, Any]) -> str:
    speed = disk["bytes_per_second"]
    return "real disk" if speed == "real" else f"{speed / 1e6:g}"


def _reading(document: dict[str, Any], name: str, label: str) -> list[str]:
    """A row: the paper's disk by one calibration, and how often faster than each system it is there."""
    speed = document["calibration"][name]["bytes_per_second"]
    ours, cells = ttft_at(document, OURS, speed), []
    for other, aim in TIMES_FASTER.items():
        if ours is None or (theirs := ttft_at(document, other, speed)) is None:
            cells.append("not measured")
        else:
            cells.append(f"{theirs / ours:.2f}, {'met' if theirs / ours >= aim else 'missed'}")
    return [label, f"{speed / 1e6:.3g}", *cells]


def _memory(disks: list[dict[str, Any]]) -> str:
    """Which of the systems have an index, and what it leaves for blocks, in sentences."""
    told = []
    for name, row in disks[0]["systems"].items() if disks else ():
        memory = row["memory_bytes"]
        if memory["index"]:
            blocks = (memory["device"] + memory["host"]) / MIB
            told.append(
                f"*{name}* has {blocks:.1f} MiB of memory for blocks and {memory['index'] / MIB:.1f} for its index"
            )
    return f"{'; '.join(told) or 'No system has one'}; the others have the same together, all for blocks."


def plot(document: dict[str, Any], path: Path) -> None:
    """Times over bandwidth, where matplotlib is installed, and the paper's disk by both readings."""
    if (plt := pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    disks = emulated(document)
    speeds = [disk["bytes_per_second"] / 1e6 for disk in disks]
    real = [disk for disk in document["disks"] if disk["bytes_per_second"] == "real"]
    beyond = 2 * max(speeds, default=1.0)  # how fast the real disk is, is not known
    for name in WANTED:
        (line,) = axes.plot(speeds, [1e3 * disk["systems"][name]["ttft_mean_s"] for disk in disks], "o-", label=name)
        for disk in real:
            axes.plot([beyond], [1e3 * disk["systems"][name]["ttft_mean_s"]], "D", color=line.get_color())
    axes.axhline(1e3 * document["recompute_ttft_s"], color="gray", linestyle=":", label="recompute")
    for (name, label), style in zip(READINGS.items(), ("-", "--"), strict=True):
        speed = document["calibration"][name]["bytes_per_second"] / 1e6
        axes.axvline(speed, color="black", linewidth=1, linestyle=style, label=f"the paper's disk, by {label}")
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of the disk, MB/s", ylabel="time to first token, ms (mean)")
    axes.set_xticks(
        [*speeds, *([beyond] if real else [])], [*(f"{speed:g}" for speed in speeds), *(["real"] if real else [])]
    )
    axes.minorticks_off()
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plt.FormatStrFormatter("%g"))
    axes.set_title(f"{document['model']}, {document['dtype']}, budget {document['budget']:.0%}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bandwidths", default=BANDWIDTHS, help=f"of emulated disks, MB/s; 0: the real disk (default: {BANDWIDTHS})"
    )
    parser.add_argument("--layers", type=int, default=12, help="so many of the shape's (default: 12)")
    parser.add_argument(
        "--period", type=int, default=8, help="layers for which the paper's ContiguousKV chooses once (at most all)"
    )
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prefix")
    parser.add_argument("--learn", type=int, default=8, help="requests to each prefix before, without the slow disk")
    add_arguments(parser, one_disk=False)
    parser.set_defaults(requests=24, warm_up=12)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = build(arguments.shape, getattr(torch, arguments.dtype), device, layers=arguments.layers)
    prompts = RandomTokens(model.config.vocab_size, arguments.prefixes, arguments.tokens, arguments.suffix)
    period = min(arguments.period, arguments.layers)
    wanted = [one for one in systems(BUDGET_OF_AIMS, period, PAPER_AGREEING) if one.name in WANTED]
    label = f"{arguments.shape}-{arguments.layers}l"
    name = arguments.name or f"bandwidths-{label}-{arguments.dtype}-{device.type}"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, model, prompts, Path(folder))
        for system in wanted:
            if system.policy not in ("lru", "lfu"):  # of which nothing outlives a process
                bench.learn(system, arguments.learn)
        document = {"model": label, "dtype": arguments.dtype, "budget": BUDGET_OF_AIMS, "period": period}
        document["learned"] = arguments.learn
        document |= {key: value for key, value in bench.described().items() if key != "disk_bytes_per_second"}
        document |= {"machine": machine(device, Path(folder)), "recompute_ttft_s": recomputed(bench), "disks": []}
        measure(arguments, bench, wanted, document, arguments.out / name)
    print(report(document))


if __name__ == "__main__":
    main()
