"""Conversations that resume, with more KV than fits in memory: time to first token, bytes and idle time of all systems.

    python bench/conversation.py                         # 8 layers of Qwen2.5-0.5B's shape, this machine's CPU
    python bench/conversation.py --rates 5,0 --conversations 3 --turns 3
    python bench/conversation.py --model smollm2-135m --rates 5,20,200,0
    python bench/conversation.py --model smollm2-135m --rates 5,20,200,0 --host-share 0.1   # int8 from disk, too
    python bench/conversation.py --model eval/reference/long --opening 1024
    python bench/conversation.py --shape tiny --layers 4 --rates 2 --conversations 2 --turns 2 --opening 64 --answer 4

A trace defines when conversations continue: each one begins with a long prompt and continues after think times, all
drawn with a seed. Time is simulated, so nothing sleeps. Conversations resume in the order of the simulated times, and
find their KV in memory or on disk, depending on the others. At each turn, each system gets the whole history and the
new tokens. It has a store of its own. The tokens of the trace are then decoded, and the conversation is suspended.
Systems take turns, in alternating order.

A rate is the read bandwidth of an emulated disk, in MB/s; 0 is the real disk, without the page cache. Idle time is
the time in which the model waits for KV, or the disk is idle although reads are still to come.

With random weights no layers are similar, and pairs have no meaning. Krul is therefore forced to merge layers
(`change=1, quality=None`); the benchmark measures time and bytes, not quality. With `--model`, Krul selects
pairs itself. MiniCache always merges. H2O (`eval.baselines`) attends to a share of the history: it reads all keys, and
only the values of the selected tokens. It stores all KV, exactly.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import (
    add_model_arguments,
    add_rates,
    figures_of,
    forget_page_cache,
    interleaved,
    kv_bytes_per_token,
    median,
    model_of,
    parser_of,
    ratio,
    ratio_interval,
    seconds,
)
from lib.pages import draw, machine, machine_text, plain_ticks, save, table
from lib.slow_disk import SlowDisk, SlowDiskEngine
from lib.stored import payload_bytes, shapes_of
from lib.workload import REFERENCE, Prompts, RandomTokens, ReferenceLanguage, RunningText, Turn, turns_of
from tqdm.auto import tqdm
from transformers import DynamicCache

from eval.baselines import H2O, MiniCache, PartialRecompute
from eval.models import resolve
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import Exact, Krul, Method

LATENCY_S = 100e-6
"""Latency of a read from an emulated disk."""
HOST_SHARE = 0.5
"""Default host memory, as a share of the KV of all conversations."""
SAMPLED = 16
"""Number of decoded tokens per sampled query; times are compared in runs of this length."""
RECOMPUTE, LOAD, PARTIAL, SELECTED = "full recompute", "full load", "partial recompute", "H2O"
INT8_LOAD, KRUL, INT8_KRUL = "full load, int8", "Krul, auto", "Krul, int8"
PEERS = (RECOMPUTE, LOAD, PARTIAL, INT8_LOAD)
"""Systems without Krul's parts. Krul should be at most `NEAR` times slower than the best of them."""
NEAR = 1.05
OVER_LOAD, OVER_PARTIAL, BUBBLES, WATCHING = 2.35, 1.5, 0.05, 1.02
"""Aims: TTFT of a full load and of partial recomputation over Krul's, idle time as a share of TTFT, decoding."""


def methods(trained: bool, keep: float = 0.5) -> dict[str, Method | None]:
    """Return the methods of the systems by name; None for a DynamicCache.

    Args:
        trained: Whether the model is trained. If not, Krul is forced to merge layers.
        keep: Share of the history that H2O attends to.
    """
    forced: dict[str, Any] = {} if trained else {"change": 1.0, "quality": None}
    return {
        RECOMPUTE: None,
        LOAD: Exact(recompute=0.0, decline=False),
        "Exact, auto": Exact(recompute="auto"),
        PARTIAL: PartialRecompute(),
        SELECTED: H2O(budget=keep, quality=None),
        "MiniCache": MiniCache(),
        "Krul, all loaded": Krul(recompute=0.0, codec="raw", **forced),
        KRUL: Krul(recompute="auto", codec="raw", **forced),
        INT8_LOAD: Exact(recompute=0.0, decline=False, codec="int8"),
        "front, int8": Krul(0.0, recompute="auto"),
        INT8_KRUL: Krul(recompute="auto", **forced),
    }


# --- systems


@dataclass(eq=False)
class System:
    """Variant of storing conversations.

    Args:
        method: Method of the caches, or None.
        store: Store of the conversations, or None.
    """

    method: Method | None
    store: KVStore | None


class Bench:
    """Model and trace.

    Args:
        arguments: Arguments of the command line.
        folder: Parent folder of the stores.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.model = model_of(arguments)
        lengths = arguments.opening, arguments.new, arguments.answer
        self.trace = turns_of(arguments.conversations, arguments.turns, lengths, arguments.think, arguments.seed)
        self.longest = max(turn.end for turn in self.trace)
        longest, vocabulary = self.longest, self.model.config.vocab_size
        prompts: Prompts
        if arguments.model is None:
            prompts = RandomTokens(vocabulary, arguments.conversations, longest, 1)
        elif (folder := Path(resolve(str(arguments.model))).resolve()).parent == REFERENCE:
            prompts = ReferenceLanguage(folder, arguments.conversations, longest)
        else:
            prompts = RunningText(folder, arguments.conversations, longest, 1)
        self.about = prompts.about
        self.texts = [ids.to(self.model.device) for ids in prompts.prefixes]
        self.token_bytes = kv_bytes_per_token(self.model)

    def measure(self, rate: float, note: Callable[[dict[str, Any]], None]) -> None:
        """Run the trace on a disk with a bandwidth of `rate` MB/s; 0 for the real disk.

        Args:
            rate: Bandwidth in MB/s.
            note: Called with each turn, and with the calibration.
        """
        arguments = self.arguments
        ends = {turn.conversation: turn.end for turn in self.trace}  # the last turn's
        host = round(arguments.host_share * sum(ends.values()) * self.token_bytes)
        with tempfile.TemporaryDirectory(dir=self.folder) as name, ExitStack() as stack:
            root = Path(name)

            def open_store(folder: str) -> KVStore:
                engine: Any = SlowDiskEngine(SlowDisk(rate * 1e6, LATENCY_S)) if rate else "auto"
                return stack.enter_context(KVStore(root / folder, host_memory=max(host, 1 << 20), engine=engine))

            probe = open_store("probe")
            lengths = sorted({max(16, arguments.opening // 2), max(16, self.longest)})
            costs = probe.calibrate_prefix(
                self.model,
                tokens=lengths,
                suffix=arguments.new,
                repeats=arguments.calibrate_repeats,
                progress=False,
            )
            note({"costs": [cost.as_dict() for cost in costs]})
            systems = {}
            of_names = methods(arguments.model is not None, arguments.keep)
            for number, (name, method) in enumerate((name, of_names[name]) for name in arguments.systems):
                store = None if method is None else open_store(str(number))
                if store is not None:  # all go by the same figures
                    shutil.copy(probe.path / "calibrations.json", store.path)
                systems[name] = System(method, store)
            for number, turn in enumerate(tqdm(self.trace, unit="turn", desc=name_of(rate))):
                for name in list(systems)[:: 1 if number % 2 else -1]:
                    if not rate:
                        forget_page_cache(root)
                    row = self.turn(systems[name], turn)
                    note({"system": name, "turn": number, "conversation": turn.conversation, **row})

    @torch.no_grad()
    def turn(self, system: System, turn: Turn) -> dict[str, Any]:
        """Run one turn of one system. Return its times, and the counters up to its first token."""
        answer = self.texts[turn.conversation]
        ids = answer[None, : turn.stop]
        caches: list[Any] = []

        def compute_prompt() -> None:
            if system.store is None:
                caches.append(DynamicCache(config=self.model.config))
            else:
                options = {"conversation": f"c{turn.conversation}", "method": system.method}
                caches.append(TieredCache(self.model, system.store, **options))
            self.model(input_ids=ids, past_key_values=caches[0], use_cache=True, logits_to_keep=1)

        row: dict[str, Any] = {"history": turn.history, "new": turn.stop - turn.history}
        row["ttft_s"] = seconds(compute_prompt, ids.device)
        (cache,) = caches
        if isinstance(cache, TieredCache):
            row |= restore_figures(cache, turn.history)
        decode_times = [
            seconds(lambda at=at: self.model(input_ids=answer[None, at : at + 1], past_key_values=cache), ids.device)
            for at in range(turn.stop, turn.end)
        ]
        row["decode_s"] = sum(decode_times) / len(decode_times)
        if isinstance(cache, TieredCache) and system.store is not None:
            suspended = cache.suspend()
            assert suspended.tokens and not suspended.reason, suspended
            row["suspend_s"] = suspended.seconds
            row["stored_bytes"] = suspended.bytes / suspended.tokens
            shapes = shapes_of(system.store, f"c{turn.conversation}")
            row["payload_bytes"] = sum(map(payload_bytes, shapes)) / suspended.tokens
        return row

    @torch.no_grad()
    def decoding(self) -> dict[str, list[float]]:
        """Return the seconds of each decoded token without a store, with one, and with sampled queries."""
        ids = self.texts[0][None, : self.arguments.opening]
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, KVStore(folder) as store:
            caches = {
                "DynamicCache": DynamicCache(config=self.model.config),
                "Exact": TieredCache(self.model, store, restore=False, method=Exact(recompute=0.0, decline=False)),
                "Krul": TieredCache(self.model, store, conversation="c", restore=False, method=Krul()),
                "Krul, by attention": TieredCache(
                    self.model, store, conversation="d", restore=False, method=Krul(pairs_by="attention")
                ),
            }
            for cache in caches.values():
                self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            actions = {
                name: lambda cache=cache: seconds(
                    lambda: self.model(input_ids=ids[:, :1], past_key_values=cache), ids.device
                )
                for name, cache in caches.items()
            }
            return interleaved(actions, self.arguments.decode_steps * SAMPLED, warm_up=4)


def restore_figures(cache: TieredCache, history: int) -> dict[str, Any]:
    """Return the figures of a restore."""
    stats, figures = cache.stats, figures_of(cache.stats)
    bytes_of = {name: tier.bytes for name, tier in stats.tiers.items()}
    loaded_share = (stats.tokens_restored - stats.tokens_recomputed) / max(1, history)
    from_disk = bytes_of["disk"] / max(1, sum(bytes_of.values()))
    return {
        "from_memory": loaded_share * (1 - from_disk),
        "from_disk": loaded_share * from_disk,
        "restored": stats.tokens_restored,
        "recomputed": stats.tokens_recomputed,
        "reason": stats.reason,
    } | {
        name: figures[name]
        for name in (
            "stall_seconds",
            "load_idle_seconds",
            "io_seconds",
            "assemble_seconds",
            "match_seconds",
            "bytes_read",
        )
    }


# --- reporting


def name_of(rate: float) -> str:
    """Return the name of a disk."""
    return f"{rate:g} MB/s" if rate else "the disk"


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize the resumed turns that all systems have run; {} if there are none."""
    rows_by_system: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["history"]:
            rows_by_system.setdefault(row["system"], {})[row["turn"]] = row
    shared_turns = sorted(set.intersection(*map(set, rows_by_system.values()))) if rows_by_system else []
    if not shared_turns or not {*PEERS, INT8_KRUL} <= set(rows_by_system):
        return {}
    times = {
        name: [system_rows[turn]["ttft_s"] for turn in shared_turns] for name, system_rows in rows_by_system.items()
    }
    summaries = {}
    for name, system_rows in rows_by_system.items():
        selected_rows = [system_rows[turn] for turn in shared_turns]
        summaries[name] = {
            "ttft_each_s": times[name],
            "ttft_s": median(times[name]),
            "ttft_mean_s": float(np.mean(times[name])),
            "ttft_p90_s": float(np.quantile(times[name], 0.9)),
            "load_over_it": ratio(times[LOAD], times[name]),
            "partial_over_it": ratio(times[PARTIAL], times[name]),
            "decode_s": median(row["decode_s"] for row in selected_rows),
        }
        if "stored_bytes" in selected_rows[0]:
            keys = ("stored_bytes", "payload_bytes", "from_memory", "from_disk", "suspend_s")
            summaries[name] |= {key: float(np.mean([row[key] for row in selected_rows])) for key in keys}
            is_from_disk = np.array([row["from_disk"] > row["from_memory"] for row in selected_rows])
            summaries[name]["turns_from_disk"] = float(is_from_disk.mean())
            for key, is_source in (("memory", ~is_from_disk), ("disk", is_from_disk)):
                source_times = np.array(times[name])[is_source]
                summaries[name][f"ttft_{key}_s"] = float(source_times.mean()) if len(source_times) else None
            total = sum(times[name])
            for key in ("stall_seconds", "load_idle_seconds", "io_seconds"):
                summaries[name][key.replace("seconds", "share")] = sum(row[key] for row in selected_rows) / total
    return summaries


def watching(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the time of a decoded token relative to a DynamicCache, by system: median over runs of tokens."""
    runs = {name: np.array(token_times).reshape(-1, SAMPLED).sum(1).tolist() for name, token_times in times.items()}
    return {name: ratio(token_times, runs["DynamicCache"]) for name, token_times in runs.items()}


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, options = document["machine"], document["options"]
    parts = [
        f"# Conversations that resume: {document['layers']} layers of {document['shape']} in {options['dtype']}, "
        f"{machine_info['device']}\n\n{machine_text(machine_info)} {document['about']} "
        f"{options['conversations']} conversations of {options['turns']} turns: about {options['opening']} tokens, "
        f"then {options['new']} per turn, and {options['answer']} decoded tokens. {document['token_bytes']} bytes of "
        f"KV per token; host memory for {options['host_share']:.0%} of all KV. Each system has a store of its own. "
        "Times are those of turns that resume a conversation. Ratios are taken within a turn.\n"
    ]
    if options["model"] is None:
        parts.append(
            "\nKrul's pairs are forced (`change=1, quality=None`): a model with random weights has no similar layers.\n"
        )
    headings = ["", "TTFT, s", "mean", "p90", "from memory", "from disk", "full load ÷ it", "partial ÷ it"]
    headings += [
        "payload",
        "file",
        "in memory",
        "on disk",
        "computed",
        "waits",
        "disk idle",
        "suspend, s",
        "decode, ms",
    ]
    for rate, rate_results in document["rates"].items():
        figures = summarise(rate_results["rows"])
        if not figures:
            continue
        rows = []
        for name, row in figures.items():
            line = [name, *(f"{row[key]:.2f}" for key in ("ttft_s", "ttft_mean_s", "ttft_p90_s"))]
            sources = ("ttft_memory_s", "ttft_disk_s")
            line += [f"{row[key]:.2f}" if row.get(key) is not None else "" for key in sources]
            line += [f"{row[key]:.2f}" for key in ("load_over_it", "partial_over_it")]
            if "stored_bytes" in row:
                computed_share = 1 - row["from_memory"] - row["from_disk"]
                shares = (
                    row["from_memory"],
                    row["from_disk"],
                    computed_share,
                    row["stall_share"],
                    row["load_idle_share"],
                )
                line += [f"{row['payload_bytes']:.0f}", f"{row['stored_bytes']:.0f}"]
                line += [f"{share:.0%}" for share in shares]
                line.append(f"{row['suspend_s']:.2f}")
            else:
                line += ["0", "0", "0%", "0%", "100%", "", "", ""]
            rows.append([*line, f"{row['decode_s'] * 1e3:.1f}"])
        parts.append(f"\n## {rate}\n\n{table(headings, rows)}\n{aims(figures)}\n")
    if document["decode"]:
        ratios = watching(document["decode"])
        parts.append(
            "\n## Observing queries\n\nTime of a decoded token relative to that of a DynamicCache, measured in turns: "
            + ", ".join(f"{name} {relative:.3f}" for name, relative in ratios.items() if name != "DynamicCache")
            + f' (aim: at most {WATCHING}). Krul observes them with `pairs_by="attention"` only.\n'
        )
    parts.append(
        "\n*TTFT*: median. *From memory*, *from disk*: mean of the turns that loaded more from there. *Payload*, "
        "*file*: bytes stored per token, without and with padding, tables and headers. *In memory*, *on disk*, "
        "*computed*: source of the history, as shares of its tokens, means over the layers. "
        "*Waits* (the model waits for KV) and *disk idle* (while reads are still to come) are shares of the time to "
        "first token; their sum is the idle time. *÷ it* is the time of another system divided by that of the row. "
        f"*H2O* attends to {options['keep']:.0%} of the history. All systems but the full loads and H2O compute "
        "everything if this is faster according to the calibration.\n"
    )
    return "".join(parts)


def aims(figures: dict[str, dict[str, Any]]) -> str:
    """Return which aims are met at one rate."""
    stall_share = figures[LOAD]["stall_share"]
    return (
        f"A full load waits {stall_share:.0%} of its time, so the link is "
        f"{'' if stall_share > 0.5 else 'not '}the bottleneck. "
        + " ".join(aims_of(name, figures) for name in (KRUL, INT8_KRUL) if name in figures)
    )


def aims_of(name: str, figures: dict[str, dict[str, Any]]) -> str:
    """Return which aims one setting of Krul meets."""
    krul, full_load = figures[name], figures[LOAD]
    bubbles = krul["stall_share"] + krul["load_idle_share"]
    best = min(PEERS, key=lambda peer: figures[peer]["ttft_mean_s"])
    over_best = krul["ttft_mean_s"] / figures[best]["ttft_mean_s"]
    low, high = ratio_interval(krul["ttft_each_s"], figures[best]["ttft_each_s"])

    def verdict(is_met: bool) -> str:
        return "met" if is_met else "**not met**"

    def relative(key: str) -> str:
        return f"{full_load[key] / krul[key]:.2f} ×" if krul[key] else "any multiple of"  # a front may be everything

    return (
        f"Aims of {name}: full load ≥ {OVER_LOAD} × its TTFT, {krul['load_over_it']:.2f}, "
        f"{verdict(krul['load_over_it'] >= OVER_LOAD)}; partial recompute ≥ {OVER_PARTIAL} ×, "
        f"{krul['partial_over_it']:.2f}, {verdict(krul['partial_over_it'] >= OVER_PARTIAL)}; at most {NEAR} × the best "
        f"other system ({best}, means), {over_best:.2f} (95 % interval {low:.2f} to {high:.2f}), "
        f"{verdict(over_best <= NEAR)}; idle time ≤ {BUBBLES:.0%}, "
        f"{bubbles:.1%}, {verdict(bubbles <= BUBBLES)}. A full load stores {relative('payload_bytes')} its payload, "
        f"in files of {relative('stored_bytes')} the size."
    )


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Plot the median TTFT by rate."""
    rates = {
        rate: summaries
        for rate, rate_results in document["rates"].items()
        if (summaries := summarise(rate_results["rows"]))
    }
    figure, axes = plt.subplots(figsize=(8.5, 4.2))
    names = [name for name in methods(trained=False) if all(name in summaries for summaries in rates.values())]
    for name, marker in zip(names, itertools.cycle("osv^D*Px")):
        axes.plot(list(rates), [summaries[name]["ttft_s"] for summaries in rates.values()], marker=marker, label=name)
    axes.set(yscale="log", xlabel="disk: emulated bandwidth, or the real one", ylabel="time to first token, median (s)")
    plain_ticks(axes.yaxis)
    axes.set_title(f"{document['layers']} layers of {document['shape']}, {document['machine']['device']}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def arguments_of() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_model_arguments(parser, layers=8)
    parser.add_argument(
        "--model",
        type=Path,
        help="trained model to use instead: name of eval.models, or folder",
    )
    add_rates(parser, [2, 5, 20, 0])
    parser.add_argument("--conversations", type=int, default=4, help="number of conversations")
    parser.add_argument("--turns", type=int, default=4, help="number of turns per conversation")
    parser.add_argument("--opening", type=int, default=1024, help="approximate number of tokens in the first prompt")
    parser.add_argument("--new", type=int, default=32, help="approximate number of tokens in each later prompt")
    parser.add_argument("--answer", type=int, default=16, help="approximate number of decoded tokens per turn")
    parser.add_argument("--think", type=float, default=60.0, help="mean number of simulated seconds between turns")
    parser.add_argument(
        "--host-share", type=float, default=HOST_SHARE, help="host memory, as a share of the KV of all conversations"
    )
    parser.add_argument("--keep", type=float, default=0.5, help="share of the history that H2O attends to")
    parser.add_argument(
        "--decode-steps", type=int, default=8, help=f"number of runs of {SAMPLED} tokens for the comparison of decoding"
    )
    parser.add_argument("--calibrate-repeats", type=int, default=3, help="number of repetitions of the calibration")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the trace")
    parser.add_argument(
        "--leave-out", type=_names, default=[], help="systems to leave out, separated by semicolons, such as MiniCache"
    )
    arguments = parser.parse_args()
    arguments.systems = [name for name in methods(trained=False) if name not in arguments.leave_out]
    return arguments


def _names(text: str) -> list[str]:
    """Return the names of systems that may be left out.

    Raises:
        ArgumentTypeError: A name is unknown, or the page needs this system.
    """
    names = text.split(";")
    if wrong := [name for name in names if name not in methods(trained=False) or name in (*PEERS, INT8_KRUL)]:
        raise argparse.ArgumentTypeError(f"cannot leave out {wrong}")
    return names


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    with tempfile.TemporaryDirectory(prefix="bench-conversation-", dir=arguments.folder) as folder:
        bench = Bench(arguments, Path(folder))
        layers = bench.model.config.num_hidden_layers
        shape = arguments.shape if arguments.model is None else arguments.model.name
        document: dict[str, Any] = {
            "shape": shape,
            "layers": layers,
            "about": bench.about,
            "token_bytes": bench.token_bytes,
            "machine": machine(bench.model.device, Path(folder)),
            "options": {key: _plain(value) for key, value in vars(arguments).items() if key not in ("out", "folder")},
            "rates": {},
            "decode": {},
        }
        name = f"conversation-{shape}-{layers}l-{arguments.dtype}-{arguments.device}"
        if arguments.host_share != HOST_SHARE:
            name += f"-host-{arguments.host_share:.0%}".removesuffix("%")

        def write() -> None:
            save(arguments.out, name, document, report(document))

        for rate in arguments.rates:
            rate_results = document["rates"][name_of(rate)] = {"costs": [], "rows": []}

            def note(row: dict[str, Any], rate_results: dict[str, Any] = rate_results) -> None:
                if "costs" in row:
                    rate_results |= row
                else:
                    rate_results["rows"].append(row)
                write()

            bench.measure(rate, note)
        document["decode"] = bench.decoding()
        write()
        draw(plot, document, arguments.out / f"{name}.png")
        print(report(document))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
