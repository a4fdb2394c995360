"""A simulation of machines that share a remote: hit rates and times to first token, for 1 to 1,000 machines.

    python bench/fleet.py                             # Llama-3.1-8B on a GPU of 400 TFLOP/s, some minutes
    python bench/fleet.py --machines 1,10 --seconds 1200 --warm-up 400
    python bench/fleet.py --layers 80 --width 8192 --parameters 70.6e9 --token-bytes 327680 --tflops 3200

Nothing is timed: the costs are assumptions, which the page of results lists. Requests are those of `lib/traces.py`.
Each machine has memory and a disk that evict as those of a store do. What is restored, fetched or computed is decided
by the rules of the library.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import listed, parser_of
from lib.fleet_model import HOME, MOST_MACHINES, RANDOM, Costs, Fleet, summary
from lib.pages import machine, publish, table
from lib.traces import WORKLOADS, Workload, describe
from tqdm.auto import tqdm

from hf_tiered_cache.store.quota import Limits

_NUMBERS: dict[str, tuple[float, str]] = {
    "memory": (256.0, "memory of a machine for KV in GB"),
    "server": (1000.0, "size of the one server in GB"),
    "server-bandwidth": (12.5, "bandwidth of the one server in GB/s"),
    "link": (12.5, "bandwidth from the remote to a machine in GB/s"),
    "look-up": (0.001, "seconds of a look-up in the remote"),
    "host-bandwidth": (25.0, "GB/s from memory to the GPU"),
    "disk-bandwidth": (6.0, "GB/s from disk"),
    "parameters": (8.03e9, "number of parameters"),
    "layers": (32, "number of layers"),
    "width": (4096, "heads × size of a head"),
    "token-bytes": (131072, "bytes of KV per token"),
    "tflops": (400.0, "sustained 10^12 operations per second"),
    "load": (0.5, "share of the time that computing all prompts would take"),
    "seconds": (3600.0, "simulated seconds"),
    "warm-up": (1200.0, "simulated seconds that are not counted"),
    "seed": (1, "random seed"),
}
"""Options of one number: the default, which has the type of the option, and the help."""
NEAR = 0.03
"""Maximum difference between the hit ratio of a generated stream and the published one."""
NONE, SERVER, UNLIMITED = "none", "one server", "unlimited"


def simulate(workload: Workload, machines: int, arguments: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    """Return the results of all routes, disks and remotes for a number of machines."""
    fleet, limits, link = Fleet(workload, machines, arguments, costs), Limits(), arguments.link
    new_bytes, rows, links = fleet.new_bytes(), list[dict[str, Any]](), dict[str, Any]()
    kept_share = min(1.0, 1e9 * arguments.server_bandwidth / new_bytes)
    remotes: dict[str, tuple[np.ndarray | None, float]] = {NONE: (None, np.inf)}
    remotes |= {f"{size:g}": (fleet.shared(size * machines), np.inf) for size in arguments.remotes}
    remotes[UNLIMITED] = fleet.shared(np.inf), np.inf
    remotes[SERVER] = fleet.shared(arguments.server, kept_share), arguments.server_bandwidth
    for route in (RANDOM, HOME):
        memory = fleet.local(route, arguments.memory)
        for size in arguments.disks:
            disk = fleet.local(route, size, limits)
            for name, (remote, server) in remotes.items():
                figures = fleet.measure(memory, disk, remote, link, server)
                rows.append({"route": route, "disk_gb": size, "remote": name} | figures)
            if route == RANDOM and size == default_disk(arguments):
                links = {
                    f"{rate:g}": fleet.measure(memory, disk, fleet.shared(np.inf), rate) for rate in arguments.links
                }
    compute_seconds = costs.prefix.computing(fleet.trace.tokens[fleet.counted])
    return {
        "machines": machines,
        "requests": len(fleet.counted),
        "requests_per_s_and_machine": fleet.rate,
        "new_gb_per_s_and_machine": new_bytes / 1e9 / machines,
        "server_keeps": kept_share,
        "computed_s": summary(compute_seconds),
        "rows": rows,
        "links": links,
    }


def default_disk(arguments: argparse.Namespace) -> float:
    """Return the size of a disk for which all numbers of machines are shown."""
    sizes: list[float] = arguments.disks
    return sorted(sizes)[len(sizes) // 2]


def report(result: dict[str, Any]) -> str:
    """Return the page of results, as Markdown."""
    options, text = result["options"], ["# Machines that share a remote, simulated\n"]
    text += [
        "Nothing here was timed. The streams of requests are generated with the statistics that are published of the "
        "[Mooncake traces](https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release), and the costs are "
        "assumptions.\n",
        *assumptions(options),
        "\n## The generated streams\n",
        streams_table(result["workloads"]),
        "Published: FAST'25 paper, Table 2. Recomputed: by others, from the released traces, whose unlimited hit "
        "ratios are 2 to 4 points lower than the paper's. Generated: at the rate and duration of the trace, in its "
        "blocks of 512 tokens, with empty caches at the beginning. *LRU, 5 %*: a cache of 5 % of the distinct "
        "blocks.\n",
    ]
    for name, workload in result["workloads"].items():
        text += [f"## {name.capitalize()}\n", *workload_tables(workload, options)]
    text += [
        "Cells: tokens that are restored ÷ tokens of the prompts, mean TTFT, and its 95th percentile in parentheses. "
        "*Route*: requests go to any machine at random, or those of a session or document to the same machine. *One "
        "server*: "
        f"{options['server']:g} GB in all, with {options['server_bandwidth']:g} GB/s in each direction for all "
        "machines.\n",
        f"Simulated at commit {result['machine']['commit']}.\n",
    ]
    return "\n".join(text)


def assumptions(options: dict[str, Any]) -> list[str]:
    """Return the list of assumptions."""
    compute = 2 * options["parameters"] / options["tflops"] / 1e12
    equal = options["token_bytes"] / compute / 1e9
    return [
        f"- *Model.* {options['parameters'] / 1e9:g} billion parameters, {options['layers']} layers, attention of "
        f"width {options['width']:,}, {options['token_bytes']:,} bytes of KV per token. By default this is "
        "Llama-3.1-8B in bfloat16.",
        f"- *Computing.* {options['tflops']:g} TFLOP/s: {1e6 * compute:.0f} µs per token, and more with the length of "
        f"the prompt. KV that arrives with less than {equal:.1f} GB/s takes longer than computing a short prompt.",
        f"- *A machine.* One such GPU, {options['memory']:g} GB of memory and a disk for KV. Restoring takes "
        f"{options['host_bandwidth']:g} GB/s from memory and {options['disk_bandwidth']:g} GB/s from disk. KV in the "
        "memory of the GPU is not used again.",
        "- *Eviction.* Least recently used. A disk evicts at 95 % of its size down to 85 %, as a store does by "
        "default. Pieces of text are evicted as a whole, their ends first. All prompts are stored, and answers "
        "are not.",
        "- *The remote.* All machines send what is new. Its LRU order is that of all requests. A machine fetches what "
        "the remote has more than its disk if that is faster than computing it, with "
        f"{options['link']:g} GB/s, and waits until it is there. A look-up takes {1e3 * options['look_up']:g} ms. Then "
        "the cost model of exact reuse decides what is restored and what is computed meanwhile.",
        "- *Pool and server.* A pool has a size for each machine, and its bandwidth grows with them. Of one server, a "
        "fetch gets the bandwidth that all fetches leave. If more is sent than it takes, a random part is dropped.",
        f"- *Load.* Computing all prompts would keep a machine busy for {options['load']:.0%} of the time. Sessions "
        "and documents grow with the number of machines. Common prompts are the same for all. Requests do not wait for "
        "each other: there is no queue.",
        f"- *Time.* {options['seconds']:g} s with empty caches at the beginning, of which the last "
        f"{options['seconds'] - options['warm_up']:g} s are counted. More than {MOST_MACHINES} machines are simulated "
        "with as many fewer requests and as much smaller sizes.",
    ]


def streams_table(workloads: dict[str, Any]) -> str:
    """Return the table that compares generated streams with the traces."""
    rows = []
    for name, workload in workloads.items():
        trace, generated = workload["trace"], workload["generated"]
        rows.append(
            [
                name,
                f"{trace['requests']:,} / {generated['requests']:,}",
                f"{trace['tokens']:,.0f} / {generated['tokens']:,.0f}",
                f"{trace['published']:.2f} / {trace['released']:.2f} / **{generated['hit_ratio']:.2f}**",
                *(
                    f"{old:.2f} / {new:.2f}"
                    for old, new in zip(trace["curve"].values(), generated["curve"].values(), strict=True)
                ),
            ]
        )
    shares = [f"LRU, {float(share):.0%}" for share in next(iter(workloads.values()))["generated"]["curve"]]
    headings = ["trace", "requests, published / generated", "mean tokens, published / generated"]
    return table([*headings, "unlimited cache, published / recomputed / generated", *shares], rows)


def row_of(fleet: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return the row of a number of machines that has these values."""
    (row,) = (row for row in fleet["rows"] if all(row[name] == value for name, value in values.items()))
    return row


def cell(row: dict[str, Any]) -> str:
    """Return a table's cell: hit rate and times to the first token."""
    return f"{sum(row['hits'].values()):.0%}, {row['ttft_s']['mean']:.2f} s ({row['ttft_s']['p95']:.2f})"


def workload_tables(workload: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Return the tables of a workload, as Markdown."""
    fleets, disk = workload["fleets"], default_disk(argparse.Namespace(**options))
    remote = f"{options['remotes'][len(options['remotes']) // 2]:g}"
    titles = {NONE: "no remote", remote: f"pool of {remote} GB per machine", SERVER: "one server"}
    last, rows = fleets[-1], []
    for fleet in fleets:
        for route in (RANDOM, HOME) if fleet["machines"] > 1 else (HOME,):
            at = {"route": route, "disk_gb": disk}
            compute_cell = f"{fleet['computed_s']['mean']:.2f} s ({fleet['computed_s']['p95']:.2f})"
            cells = [compute_cell, *(cell(row_of(fleet, remote=name, **at)) for name in titles)]
            hits = row_of(fleet, remote=remote, **at)["hits"]
            rows.append([f"{fleet['machines']:,}", route, *cells, " / ".join(f"{hits[tier]:.0%}" for tier in hits)])
    text = [
        f"{last['requests_per_s_and_machine']:.2f} requests per second and machine, which make "
        f"{last['new_gb_per_s_and_machine']:.2f} GB/s of new KV per machine. Disks of {disk:g} GB:\n",
        table(["machines", "route", "all computed", *titles.values(), "pool: memory / disk / remote"], rows),
    ]
    fleet = next((fleet for fleet in fleets if fleet["machines"] == 100), fleets[-1])
    sizes = [NONE, *(f"{size:g}" for size in options["remotes"]), UNLIMITED]
    rows = [
        [f"{size:g} GB", *(cell(row_of(fleet, route=RANDOM, disk_gb=size, remote=name)) for name in sizes)]
        for size in options["disks"]
    ]
    text += [
        f"{fleet['machines']:,} machines, requests routed at random, by the sizes of disk and pool per machine:\n",
        table(["disk", *(f"{name} GB" if name not in (NONE, UNLIMITED) else name for name in sizes)], rows),
        f"The same with disks of {disk:g} GB and an unlimited pool, by the bandwidth of a machine:\n",
        table(["", *(f"{rate} GB/s" for rate in fleet["links"])], [["", *map(cell, fleet["links"].values())]]),
    ]
    return text


def plot(plt: Any, result: dict[str, Any]) -> Any:
    """Draw hit rates and times by the number of machines, and hit rates by the sizes of disk and pool."""
    options, workloads = result["options"], result["workloads"]
    disk, remote = default_disk(argparse.Namespace(**options)), f"{options['remotes'][len(options['remotes']) // 2]:g}"
    # if sessions return to their machine, a remote adds so little that the lines would cover each other
    lines = {
        (NONE, HOME): ("disks, same machine", {"color": "black", "linestyle": "--"}),
        (remote, RANDOM): ("pool, at random", {"color": "C1"}),
        (SERVER, RANDOM): ("one server, at random", {"color": "C2"}),
        (NONE, RANDOM): ("disks, at random", {"color": "C0"}),
    }
    figure, axes = plt.subplots(3, len(workloads), figsize=(4.6 * len(workloads), 10.5), squeeze=False)
    for column, (name, workload) in enumerate(workloads.items()):
        fleets = workload["fleets"]
        machines = [fleet["machines"] for fleet in fleets]
        hits, times, sizes = axes[:, column]
        for (remote_name, route), (label, style) in lines.items():
            rows = [row_of(fleet, route=route, disk_gb=disk, remote=remote_name) for fleet in fleets]
            look = {"marker": "o", "markersize": 3, "label": label, **style}
            hits.plot(machines, [100 * sum(row["hits"].values()) for row in rows], **look)
            times.plot(machines, [row["ttft_s"]["mean"] for row in rows], **look)
        times.plot(
            machines,
            [fleet["computed_s"]["mean"] for fleet in fleets],
            color="gray",
            linestyle=":",
            label="all computed",
        )
        for axis in (hits, times):
            axis.set_xscale("log")
            axis.set_xticks(machines, [f"{count:,}" for count in machines])
            axis.xaxis.minorticks_off()
            axis.set_xlabel("machines")
        fleet = next((fleet for fleet in fleets if fleet["machines"] == 100), fleets[-1])
        pools = [NONE, *(f"{size:g}" for size in options["remotes"]), UNLIMITED]
        for number, size in enumerate(options["disks"]):
            rows = [row_of(fleet, route=RANDOM, disk_gb=size, remote=pool) for pool in pools]
            heights = [100 * sum(row["hits"].values()) for row in rows]
            look = {"color": f"C{number}", "marker": "o", "markersize": 3, "label": f"disks of {size:g} GB"}
            sizes.plot(range(len(pools)), heights, **look)
        sizes.set_xticks(range(len(pools)), pools)
        sizes.set_xlabel(f"GB of the pool per machine, {fleet['machines']:,} machines at random")
        hits.set_title(name)
        for axis in (hits, times, sizes):
            axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens restored, %")
    axes[1, 0].set_ylabel("mean time to first token, s")
    axes[2, 0].set_ylabel("tokens restored, %")
    axes[2, 0].legend(fontsize=8)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--machines", type=listed(int), default=[1, 10, 100, 1000], help="numbers of machines, separated by commas")
    add("--disks", type=listed(float), default=[500, 1000, 4000], help="sizes of a machine's disk in GB")
    add("--remotes", type=listed(float), default=[250, 1000, 4000], help="sizes of the pool in GB per machine")
    add("--links", type=listed(float), default=[12.5, 5, 3, 1], help="other bandwidths of --link to compare")
    for name, (default, about) in _NUMBERS.items():
        add(f"--{name}", type=type(default), default=default, help=about)
    arguments = parser.parse_args()
    costs, workloads = Costs(arguments), dict[str, Any]()
    for name, workload in WORKLOADS.items():
        generated = describe(workload, arguments.seed)
        print(f"{name}: hit ratio {workload.published:.3f} published, {generated['hit_ratio']:.3f} generated")
        if abs(generated["hit_ratio"] - workload.published) > NEAR:
            raise SystemExit(f"error: the generated stream {name!r} is not like the published one")
        runs = [simulate(workload, number, arguments, costs) for number in tqdm(arguments.machines, desc=name)]
        facts = {
            field: getattr(workload, field) for field in ("requests", "seconds", "tokens", "published", "released")
        }
        workloads[name] = {"trace": facts | {"curve": workload.curve}, "generated": generated, "fleets": runs}
    options = {field: value for field, value in vars(arguments).items() if field != "out"}
    measured_on = machine(torch.device("cpu"), Path(__file__).parent)
    result = {"machine": measured_on, "options": options, "workloads": workloads}
    publish(arguments.out, "fleet", result, report, plot)


if __name__ == "__main__":
    main()
