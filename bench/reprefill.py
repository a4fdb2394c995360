r"""Selective re-prefill: ContiguousKV, IMPRESS and the systems that they are compared with, on one workload.

    python bench/reprefill.py                                   # Qwen2.5-0.5B's shape, float32, this machine's CPU
    python bench/reprefill.py --shape llama-3.2-1b --layers 8 --period 4 --prefixes 6
    PYTHONPATH=. python bench/reprefill.py --model eval/reference/xs --period 1 --prefixes 40 \
        --requests 120 --warm-up 80
    python bench/reprefill.py --ablation --budget 0.25          # effect of each part of ContiguousKV
    python bench/reprefill.py --shape qwen2.5-7b --dtype bfloat16 --device cuda --bandwidth 0 \
        --device-memory 10GiB --host-memory 24GiB --prefixes 64 --tokens 8192

Many shared prefixes, which together exceed their memory, are requested repeatedly with new suffixes. The number of
requests per prefix follows a normal distribution (ContiguousKV, Section 5.1). All systems answer every request in
succession, each with a store and budgets of its own, so that a slower machine affects all of them. All have the same
memory; a resident index takes a part of it.

Reads are cold (O_DIRECT), from an emulated disk. Without --bandwidth, its speed is chosen so that the ratio of loading
to computing a token in bulk prefill equals that of the paper's machine (Qwen2.5-7B on an A800, an SSD of 7.45 GB/s). A
token of a suffix takes longer to compute than one in bulk prefill; the page also states the disk for this reading, and
bandwidths.py measures many disks.

With --shape, weights and tokens are random, so the content of selections has no meaning. IMPRESS's probe heads would
never agree and are assumed to agree in a share of the layers. With --model, a trained reference model answers questions
in its language, and the probe heads agree as measured. eval/ measures accuracy. Use a memory of at least 8 MiB; smaller
memories are not divided among blocks of several sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import build, load
from lib.pages import machine, machine_text, save, table
from lib.probes import NotedImpress
from lib.serving import PARTS, Bench, System, add_arguments, ask_all
from lib.telling import MIB, disk_and_memory, first_requests, memory_cell
from lib.workload import CONTEXT, RandomTokens, ReferenceLanguage

from eval.baselines import H2O, AttentionStore, Recompute
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.selection.prompt import PREFETCHED, Prefetched
from hf_tiered_cache.stats import TIERS

OURS, KEYS, IMPRESS = "ContiguousKV", "ContiguousKV as in the paper", "IMPRESS"
H2O_LFU, ATTENTION_STORE = "H2O + LFU", "AttentionStore + LRU"
WITHOUT: dict[str, frozenset[Prefetched]] = {
    "": PREFETCHED,
    ", no intra-period prefetch": frozenset({"keys"}),
    ", no prefetch of the next keys": frozenset({"period"}),
    ", no prefetch": frozenset(),
}
"""Ablations by their suffix in names, with the remaining kinds of prefetching."""
PAPER_AGREEING = 0.8
"""Share of the layers in which IMPRESS's probes agree: its paper has fewer than a fifth in which they do not."""
BUDGET_OF_AIMS = 0.05
TIMES_FASTER = {IMPRESS: 3.85, H2O_LFU: 5.83, ATTENTION_STORE: 6.16}
"""Aims at that budget: mean TTFT over ours, as in ContiguousKV's paper."""
ACCURACY = Path(__file__).parent.parent / "eval" / "results" / "reference-xs" / "metrics.json"


@dataclass(frozen=True, kw_only=True)
class Ablated(ContiguousKV):
    """ContiguousKV with only some kinds of prefetching."""

    prefetches: frozenset[Prefetched] = PREFETCHED


def contiguous(budget: float, period: int) -> tuple[ContiguousKV, ContiguousKV]:
    """Return ContiguousKV with its defaults, and with the paper's settings and this period."""
    return ContiguousKV(budget), ContiguousKV.paper(budget, period=period)


def systems(budget: float, period: int, agreeing: float | None) -> list[System]:
    """Return all systems at one budget.

    Args:
        budget: Share of the prefix that is attended to.
        period: Layers per selection with the paper's settings.
        agreeing: Share of the selections in which IMPRESS's probes are assumed to agree; None for their actual
            agreement.
    """
    default, keys = contiguous(budget, period)
    return [
        System(OURS, default),
        System(KEYS, keys),
        *impress(NotedImpress(budget=budget, emulated=agreeing)),
        System(H2O_LFU, H2O(budget=budget), "lfu"),
        System("H2O + LRU", H2O(budget=budget), "lru"),
        System(ATTENTION_STORE, AttentionStore(), "lru"),
        System("recompute", Recompute(), "lru", interval=12),
    ]


def impress(method: NotedImpress) -> list[System]:
    """Return IMPRESS, its variant without reordering, and with actual probes if their agreement is emulated."""
    names = {IMPRESS: method, f"{IMPRESS}, without reordering": replace(method, reorder=False, notes=[])}
    if method.emulated is not None:
        names[f"{IMPRESS}, probes as they are"] = replace(method, emulated=None, notes=[])
    return [System(name, variant) for name, variant in names.items()]


def ablation(budget: float, period: int) -> list[System]:
    """Return ContiguousKV without each kind of prefetch, without all of them, and with other eviction policies."""
    ablated = []
    for name, method in zip((OURS, KEYS), contiguous(budget, period), strict=True):
        settings = {setting.name: getattr(method, setting.name) for setting in fields(method) if setting.init}
        for suffix, prefetches in WITHOUT.items():
            ablated.append(System(f"{name}{suffix}", Ablated(**settings, prefetches=prefetches)))
        ablated += [System(f"{name}, {policy.upper()}", method, policy) for policy in ("lfu", "lru")]
    return ablated


@dataclass(frozen=True)
class Aim:
    """Aim at a budget of 5 %, with the measured figure."""

    text: str
    sign: str
    bound: float
    measured: float
    shown: str

    @property
    def met(self) -> bool:
        """Whether the aim is met."""
        return self.measured <= self.bound if self.sign == "<=" else self.measured >= self.bound


def aims(summary: dict[str, dict[str, Any]]) -> list[Aim]:
    """Return the aims, relative to IMPRESS as published, with reordering."""
    our_row, impress = summary[OURS], summary[IMPRESS]
    share = our_row["tokens_read"] / impress["tokens_read"] if impress["tokens_read"] else float("inf")
    amplification, identifying = our_row["read_amplification"], our_row["bytes_identifying"]
    results = [
        Aim("tokens read from disk ≤ 6 % of IMPRESS's", "<=", 0.06, share, f"{share:.1%}"),
        Aim("read amplification 1.00 outside identification", "<=", 1.005, amplification, f"{amplification:.3f}"),
        Aim('identify="index": no identification reads', "<=", 0, identifying, f"{identifying / MIB:.2f} MiB"),
    ]
    for name, bound in TIMES_FASTER.items():
        times = summary[name]["ttft_mean_s"] / our_row["ttft_mean_s"]
        results.append(Aim(f"mean TTFT ≥ {bound} × faster than {name}", ">=", bound, times, f"{times:.2f} ×"))
    return results


# --- telling


def report(result: dict[str, Any], measured_on: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    rows = result["systems"]
    text = [
        f"# Selective re-prefill, {result['model']} in {result['dtype']} on {measured_on['device']}, "
        f"budget {result['budget']:.0%}\n",
        f"{machine_text(measured_on)} {disk_and_memory(result)} {OURS} selects once per "
        f"{ContiguousKV.period} layers. With the paper's "
        f"settings, a selection serves {result['period']} layers. {budgets(result)}{probes(result)}\n",
        "## What is read\n",
        table(
            ["system", "TTFT, ms", "p95", "MiB read", "scoring", "tokens read", "amplification",
             "hits device / host / disk, %", "memory, MiB"],
            [_read(name, row) for name, row in rows.items()],
        ),
        "Means per request. *Tokens read*: bytes read from disk, without scoring reads, divided by the KV of a token "
        f"in all layers ({result['token_bytes'] / 1024:g} KiB). *Amplification*: bytes of the blocks that are attended "
        "to, per byte that is attended to, without scoring reads. Blocks that are read for scoring "
        "and then attended to (H2O's keys) count as attended to. *Memory*: for blocks + for a resident index; all "
        "systems have the same total.\n",
        "## First request to a prefix\n",
        first_requests(rows),
        "Means over the prefixes, of which nothing is in memory yet; most of these requests are in the warm-up. The "
        "first read of a resident index costs the bytes of *scoring*, and the difference between *identification* and "
        "*identification later*.\n",
        "## Parts of the time\n",
        table(
            ["system", "TTFT, ms", "identification", "waiting in it", "stall", "copying", "compute", "lookup", "load"],
            [_time(name, row) for name, row in rows.items()],
        ),
        "Means per request, ms. *Identification*: selecting what to attend to, and waiting for its reads. *Stall*: "
        "waiting for selected blocks. *Copying*: starting reads, copying blocks to positions, rotating keys. "
        "*Compute*: the rest, the model and `generate()`. These parts and the lookup add up to the TTFT. *Load*: time "
        "during which a read was in progress, concurrent with the other parts.\n",
    ]  # fmt: skip
    if "aims" in result:
        text += [
            "## Aims at 5 %\n",
            table(
                ["aim", "measured", "met"],
                [[aim["text"], aim["shown"], "yes" if aim["met"] else "no"] for aim in result["aims"]],
            ),
            f"Aims of *{OURS}*, compared with IMPRESS with reordering and the probes as stated above."
            f"{accuracy(result['budget'])}\n",
        ]
    return "\n".join(text)


def budgets(result: dict[str, Any]) -> str:
    """Describe the budget of each unit of selection in a sentence."""
    return (
        f"Of a prefix's {result['prefix_tokens']} tokens, the budget is {result['chosen_tokens']['chunks']} in whole "
        f"chunks, rounded down, and {result['chosen_tokens']['tokens']} for methods that select single tokens. "
    )


def probes(result: dict[str, Any]) -> str:
    """Describe the agreement of IMPRESS's probes in a sentence; "" without IMPRESS."""
    if (figures := result.get("probes")) is None:
        return ""
    probe_count = min(figures["asked"], figures["kv_heads"])
    share = figures["agreed"][IMPRESS]
    text = f"IMPRESS probes {probe_count} of {figures['kv_heads']} KV heads, which agree in {share:.0%} of "
    if figures["emulated"] is None:
        return text + "the selections, measured on this trained model. "
    as_they_are = figures["agreed"][f"{IMPRESS}, probes as they are"]
    return (
        f"{text}the selections. This is emulated, as in its paper; with random weights they agree in {as_they_are:.0%} "
        "(*probes as they are*). "
    )


def accuracy(budget: float, path: Path = ACCURACY) -> str:
    """Describe the accuracy that eval/ measured at the same budget in a sentence; "" if there is none."""
    rows = json.loads(path.read_text()) if path.exists() else []
    texts = []
    for method in ("contiguous_kv", "impress:probe_heads=2", "h2o"):
        selected_rows = [row for row in rows if row["variant"] == f"{method}@{budget:g}"]
        if selected_rows:
            means = (statistics.fmean(row[name]["mean"] for row in selected_rows) for name in ("score", "top1"))
            texts.append(f"{method} {' / '.join(f'{mean:.0f}' for mean in means)}")
    if not texts:
        return ""
    return f" Right answers / right first tokens of the reference model at this budget, %: {', '.join(texts)} (eval/)."


def _read(name: str, row: dict[str, Any]) -> list[str]:
    return [
        name,
        *(f"{row[key] * 1e3:.0f}" for key in ("ttft_mean_s", "ttft_p95_s")),
        *(f"{row[key] / MIB:.2f}" for key in ("bytes_read", "bytes_identifying")),
        f"{row['tokens_read']:.1f}",
        f"{row['read_amplification']:.2f}",
        " / ".join(f"{100 * row['hit_ratio'][tier]:.0f}" for tier in TIERS),
        memory_cell(row),
    ]


def _time(name: str, row: dict[str, Any]) -> list[str]:
    parts = row["parts"]
    identification = parts["identify_wait_s"] + parts["identify_s"]
    times = [row["ttft_mean_s"], identification]
    times += [parts[key] for key in ("identify_wait_s", "stall_s", "copy_s", "compute_s", "match_s")]
    return [name, *(f"{1e3 * seconds:.1f}" for seconds in (*times, row["io_s"]))]


def plot(plt: Any, result: dict[str, Any]) -> Any:
    """Plot the mean time to first token of each system by part."""
    rows, names = result["systems"], list(result["systems"])
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(rows) + 1.6))
    bar_starts = [0.0] * len(rows)
    for key, label in PARTS.items():
        widths = [1e3 * row["parts"][key] for row in rows.values()]
        axes.barh(names, widths, left=bar_starts, label=label)
        bar_starts = [a + b for a, b in zip(bar_starts, widths, strict=True)]
    p95 = [1e3 * row["ttft_p95_s"] for row in rows.values()]
    axes.plot(p95, names, "k|", markersize=12, label="95th percentile")
    # full recomputation takes so long that the other bars would be too small to see
    end = 1.08 * max(time for name, time in zip(names, p95, strict=True) if name != "recompute")
    for name, mean in zip(names, bar_starts, strict=True):
        if mean > end:
            axes.text(0.98 * end, name, f"{mean:.0f} ms →", ha="right", va="center", color="white")
    axes.set(xlim=(0, end), xlabel="mean time to first token by part, ms")
    axes.set_title(f"{result['model']}, {result['dtype']}, budget {result['budget']:.0%}")
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a trained reference model, instead of --shape")
    parser.add_argument("--budget", type=float, default=BUDGET_OF_AIMS, help="share of the prefix that is attended to")
    parser.add_argument(
        "--agreeing",
        type=float,
        default=PAPER_AGREEING,
        help="share of the selections in which IMPRESS's probes are assumed to agree, with --shape",
    )
    parser.add_argument(
        "--ablation", action="store_true", help="measure ContiguousKV only, without one of its parts at a time"
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    count = arguments.prefixes
    if arguments.model:
        model, label = load(arguments.model, dtype, device), arguments.model.name
        prompts = ReferenceLanguage(arguments.model, count, arguments.tokens or CONTEXT - 16)
    else:
        model, label = build(arguments.shape, dtype, device, layers=arguments.layers), arguments.shape
        label += f"-{arguments.layers}l" if arguments.layers else ""
        prompts = RandomTokens(model.config.vocab_size, count, arguments.tokens or 4096, arguments.suffix)
    period = min(arguments.period, model.config.num_hidden_layers)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(arguments, model, prompts, Path(folder))
        agreeing = None if arguments.model else arguments.agreeing
        selected_systems = (
            ablation(arguments.budget, period) if arguments.ablation else systems(arguments.budget, period, agreeing)
        )
        (summary,) = ask_all([(bench, selected_systems)])
        measured_on = machine(device, Path(folder))
    result = {"model": label, "dtype": arguments.dtype, "budget": arguments.budget, "period": period}
    result |= bench.described() | {"machine": measured_on, "systems": summary}
    default, token_method, tokens = (
        contiguous(arguments.budget, period)[0],
        H2O(arguments.budget),
        result["prefix_tokens"],
    )
    result["chosen_tokens"] = {"chunks": default.token_budget(tokens), "tokens": token_method.token_budget(tokens)}
    if not arguments.ablation:
        noted = {system.name: system.method for system in selected_systems if isinstance(system.method, NotedImpress)}
        result["probes"] = {
            "kv_heads": model.config.num_key_value_heads,
            "asked": NotedImpress.probe_heads,
            "emulated": agreeing,
            "agreed": {name: float(np.mean(method.notes)) for name, method in noted.items()},
        }
    if not arguments.ablation and abs(arguments.budget - BUDGET_OF_AIMS) < 1e-9:
        result["aims"] = [vars(aim) | {"met": aim.met} for aim in aims(summary)]
    kind = "ablation" if arguments.ablation else "reprefill"
    kind += "" if arguments.budget == BUDGET_OF_AIMS else f"-{arguments.budget:.0%}".rstrip("%")
    name = arguments.name or f"{kind}-{label}-{arguments.dtype}-{device.type}"
    text = report(result, measured_on)
    save(arguments.out, name, result, text, plot)
    print(text)


if __name__ == "__main__":
    main()
