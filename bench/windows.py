"""Savings by windows of device memory while decoding: KVDrive's Figures 3, 8 and 15 and Table 3.

    PYTHONPATH=. python bench/windows.py --model eval/reference/long --tokens 4096

Contexts in the model's language are stored. The model decodes text after each context, and then questions about it with
their answers, token by token. The selections of its heads are recorded once, and windows of all sizes and policies are
simulated with them, since a window does not change selections. Contexts of one half of the seeds determine settings
(sizes by layer and head, number of ranked candidates); those of the other half are reported.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lib.common import parser_of
from lib.pages import machine, machine_text, pyplot, save, table
from tqdm.auto import tqdm
from transformers import PreTrainedModel

import eval.baselines  # noqa: F401  # registers their indexes
from eval.reference.asking import language_of, load
from eval.reference.check import contexts
from eval.reference.language import KINDS
from hf_tiered_cache import KVStore
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import KVDrive
from hf_tiered_cache.operations.windows import decode
from hf_tiered_cache.selection.window_sizes import SIZES, WindowProfile, exhaustive_sizes, greedy_sizes, measure, replay
from hf_tiered_cache.selection.window_slots import Window

INDEXES = {
    "cluster_boxes": "cluster_boxes (ours)",
    "clusters": "clusters (KVDRIVE)",
    "chunk_means": "chunk_means (ShadowKV)",
}
OURS = KVDrive.index
POOLS = (1.25, 1.5, 2.0, 3.0)
TIMES = (0, 1, 2, 3, 4)
MEMORY = (1.5, 2.0, 3.0)
_QUESTIONS = 40
_ASKED = 4 * _QUESTIONS
"""Tokens that questions and answers take, at most."""
_WIDE = 16
"""The window that choices are recorded with: one that fetches little."""


class Recorded(NamedTuple):
    """What was chosen behind one context: int32 `[steps, layers, heads, M]`, best first, B chosen ones in front."""

    pools: np.ndarray
    columns: int
    entry_bytes: int

    @property
    def skip(self) -> int:
        """Steps that fill the windows and are not counted."""
        return 1 + len(self.pools) // 8

    def fetched(self, sizes: np.ndarray, eviction: str = "lookahead") -> float:
        """Entries that windows of these sizes, `[layers, heads]` in multiples of B, fetch at a step, in all."""
        total = 0
        for layer, of_heads in enumerate(sizes):
            window = Window(self.columns, (of_heads * self.columns).astype(int), int(self.pools.max()) + 1, eviction)
            replay(window, self.pools[: self.skip, layer])
            before = int(window.hits.fetched.sum())
            total += int(replay(window, self.pools[self.skip :, layer]).fetched.sum()) - before
        return total / (len(self.pools) - self.skip)

    def hit_rate(self, sizes: np.ndarray, eviction: str = "lookahead") -> float:
        return 1 - self.fetched(sizes, eviction) / (self.columns * sizes.size)

    def among(self, pool: float) -> Recorded:
        """What it were if so many candidates had been ranked for each chosen chunk."""
        return self._replace(pools=self.pools[..., : max(self.columns, int(pool * self.columns))])

    def all(self, size: float) -> np.ndarray:
        """One size for all: `[layers, heads]`."""
        return np.full(self.pools.shape[1:3], size)

    def hit_rates(self) -> np.ndarray:
        """`[layers, heads, sizes]`."""
        return measure(self.pools, self.columns, 1, skip=self.skip).benefits / self.columns


Records = Mapping[tuple[str, float], list[Recorded]]
"""By index and budget, a list over contexts."""


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/long"), help="folder of a reference model")
    parser.add_argument("--tokens", type=int, default=4096, help="approximate number of context tokens")
    parser.add_argument("--steps", type=int, default=192, help="number of decoded tokens per context")
    parser.add_argument(
        "--contexts", type=int, default=4, help="number of reported contexts, and of contexts that determine settings"
    )
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.0156, 0.0625], help="budgets, as shares of the context"
    )
    return parser.parse_args(argv)


def record(model: PreTrainedModel, arguments: argparse.Namespace, folder: Path) -> tuple[Records, Records]:
    """Of the half to choose by, with the most candidates, and of the one to report."""
    language, steps = language_of(arguments.model), arguments.steps
    halves: list[dict[tuple[str, float], list[Recorded]]] = []
    bar = tqdm(total=arguments.contexts * steps * len(arguments.budgets) * (1 + len(INDEXES)), unit="tok")
    for seed, (indexes, pool) in enumerate((([OURS], POOLS[-1]), (list(INDEXES), POOLS[0]))):
        found: dict[tuple[str, float], list[Recorded]] = {
            (index, budget): [] for index in indexes for budget in arguments.budgets
        }
        tokens = arguments.tokens + max(0, steps - _ASKED)
        for number, (context, _) in enumerate(contexts(language, tokens, arguments.contexts, seed, KINDS)):
            ids = [token for document in context.documents for token in document]
            asked = [token for question in context.questions for token in (*question.prompt, *question.answer)]
            whole = torch.tensor([*ids, *asked])
            with KVStore(folder / f"{seed} {number}", index_memory="4GiB") as store:
                store.precompute(model, whole[:-steps], method=KVDrive(), progress=False)
                for (index, budget), records in found.items():
                    method = KVDrive(budget, index=index, window=_WIDE)
                    trace, entry_bytes = decode(
                        storage_of(store), model, whole, method, steps, pool=pool, on_token=bar.update
                    )
                    records.append(Recorded(trace.pools(), trace.num_columns, entry_bytes))
        halves.append(found)
    bar.close()
    return halves[0], halves[1]


def each(records: list[Recorded], of: Callable[[Recorded], float]) -> list[float]:
    return [of(one) for one in records]


def figures_of(budget: float, choosing: Records, reported: Records) -> dict[str, Any]:
    """All figures at one budget: lists over contexts, but for sizes."""
    ours, others = reported[OURS, budget], choosing[OURS, budget]
    first = ours[0]
    rates = np.mean([one.among(POOLS[0]).hit_rates() for one in others], axis=0)  # [layers, heads, sizes]
    mean = WindowProfile(SIZES, rates, np.broadcast_to(np.array(SIZES), rates.shape))  # a window of size 1 costs 1
    by_memory = {}
    for window in MEMORY:
        room = int(window * first.all(1).size)
        best, greedy = exhaustive_sizes(mean, room), greedy_sizes(mean, room)
        by_memory[f"{window:g}"] = {
            "uniform": each(ours, lambda one, size=window: one.hit_rate(one.all(size))),
            "2d": each(ours, lambda one, sizes=best: one.hit_rate(sizes)),
            "sizes": best.tolist(),
            "greedy / best": mean.benefit(greedy) / mean.benefit(best),
        }
    return {
        "columns": first.columns,
        "entry_bytes": first.entry_bytes,
        "profile": rates.tolist(),
        "bytes": {
            str(times): each(ours, lambda one, size=times: one.fetched(one.all(size)) * one.entry_bytes)
            for times in TIMES
        },
        "eviction": {
            index: {
                policy: each(reported[index, budget], lambda one, by=policy: one.hit_rate(one.all(2), by))
                for policy in ("lru", "lookahead")
            }
            for index in INDEXES
        },
        "memory": by_memory,
        "pools": {
            f"{pool:g}": {
                str(times): each(others, lambda one, by=pool, size=times: one.among(by).hit_rate(one.all(size)))
                for times in (2, 3)
            }
            for pool in POOLS
        },
    }


def report(document: dict[str, Any]) -> str:
    """Markdown."""
    about, results = document["machine"], document["results"]
    budgets = list(results)
    named = [f"{float(budget):.2%}" for budget in budgets]
    one = results[budgets[0]]
    layers, heads = len(one["profile"]), len(one["profile"][0])

    def percent(values: list[float]) -> str:
        return f"{100 * np.mean(values):.1f}"

    def less(values: list[float], than: list[float]) -> str:
        return f"{100 * (np.mean(values) - np.mean(than)):+.1f}"

    moved = [
        [f"×{times}", *(f"{np.mean(results[b]['bytes'][times]) / 1024:.1f}" for b in budgets)]
        for times in map(str, TIMES)
    ]
    parts = [
        f"# Windows while decoding: {document['model']}, {document['tokens']} tokens\n\n"
        f"{machine_text(about)} {document['contexts']} "
        f"contexts are reported, as many others determine settings. {document['steps']} tokens are decoded after each, "
        f"the last {_ASKED} at most are questions with answers, of four tokens each, so that selections tend to repeat "
        f"after four. The first {1 + (document['steps'] + 1) // 8} tokens are not counted. {layers} layers of "
        f"{heads} KV heads; a head attends to {' / '.join(str(results[b]['columns']) for b in budgets)} chunks of "
        f"{one['entry_bytes']} bytes, keys and values, at budgets of {' / '.join(named)}. {INDEXES[OURS]}, lookahead, "
        f"{POOLS[0]} candidates per selected chunk, unless stated otherwise. Window sizes are multiples of the number "
        "of selected chunks; ×0 keeps nothing.\n",
        "\n## KiB moved per step (Figure 3)\n\n" + table(["window", *named], moved),
    ]
    for budget, name in zip(budgets, named, strict=True):
        found = results[budget]
        eviction = [
            [label, percent(by["lru"]), percent(by["lookahead"]), less(by["lookahead"], by["lru"])]
            for index, label in INDEXES.items()
            for by in [found["eviction"][index]]
        ]
        memory = [
            [f"×{window}", percent(by["uniform"]), percent(by["2d"]), saved(by), f"{by['greedy / best']:.4f}"]
            for window, by in found["memory"].items()
        ]
        pools = [[pool, *(percent(by[times]) for times in ("2", "3"))] for pool, by in found["pools"].items()]
        sizes = found["memory"]["2"]["sizes"]
        by_head = [[str(layer), *(f"×{size}" for size in of_heads)] for layer, of_heads in enumerate(sizes)]
        parts += [
            f"\n## Hit ratio by eviction, ×2, at {name}, % (Table 3)\n\n"
            + table(["index", "LRU", "lookahead", "points"], eviction),
            f"\n## Hit ratio by layer and head at {name}, % (Figure 15)\n\nWith the same memory. The sizes are optimal "
            "for the other contexts. Last column: result of the greedy choice relative to the optimum.\n\n"
            + table(["memory", "one size", "by layer and head", "fewer bytes, %", "greedy / best"], memory),
            f"\n## Sizes in the memory of ×2 at {name} (Figure 8)\n\n"
            + table(["layer", *(f"head {head}" for head in range(heads))], by_head),
            f"\n## Hit ratio by ranked candidates per selected chunk, at {name}, %\n\nContexts that determine "
            f"settings. Selections are made among {POOLS[-1]:g} times as many candidates; windows see the number "
            "in the table.\n\n" + table(["candidates", "×2", "×3"], pools),
        ]
    return "".join(parts)


def saved(by: dict[str, Any]) -> str:
    """Of the bytes that windows of one size move, those that sizes by layer and head do not, in percent."""
    return f"{100 * (1 - (1 - np.mean(by['2d'])) / (1 - np.mean(by['uniform']))):.1f}"


def draw(document: dict[str, Any], path: Path) -> None:
    """Bytes by window, hit ratios of the same memory, and sizes by layer and head; nothing without matplotlib."""
    if (plt := pyplot()) is None:
        return
    results = document["results"]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for budget, found in results.items():
        label = f"{float(budget):.2%}"
        moved = {int(times): np.mean(values) / 1024 for times, values in found["bytes"].items()}
        (line,) = axes[0].plot(list(moved), list(moved.values()), marker="o", label=label)
        windows = [float(window) for window in found["memory"]]
        for kind, style in (("uniform", "--"), ("2d", "-")):
            rates = [100 * np.mean(by[kind]) for by in found["memory"].values()]
            name = {"uniform": "one size", "2d": "by layer and head"}[kind]
            axes[1].plot(windows, rates, style, marker="o", color=line.get_color(), label=f"{label}, {name}")
    axes[0].set(xlabel="window, × selected chunks", ylabel="KiB moved per step", yscale="log", xticks=TIMES)
    axes[1].set(xlabel="memory, × selected chunks", ylabel="hit ratio, %")
    for one in axes[:2]:
        one.legend(fontsize="small")
        one.grid(alpha=0.3)
    sizes = np.array(results[list(results)[-1]]["memory"]["2"]["sizes"])
    image = axes[2].imshow(sizes, vmin=SIZES[0], vmax=SIZES[-1], aspect="auto")
    axes[2].set(xlabel="KV head", ylabel="layer", xticks=range(sizes.shape[1]), yticks=range(len(sizes)))
    axes[2].set_title(f"sizes in the memory of ×2, {float(list(results)[-1]):.2%}", fontsize="medium")
    figure.colorbar(image, ticks=SIZES, format="×%d")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    arguments = arguments_of()
    model = load(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        about = machine(torch.device("cpu"), Path(folder))
        choosing, reported = record(model, arguments, Path(folder))
    document = {
        "machine": about,
        "model": arguments.model.name,
        "tokens": arguments.tokens,
        "steps": arguments.steps,
        "contexts": arguments.contexts,
        "results": {str(budget): figures_of(budget, choosing, reported) for budget in arguments.budgets},
    }
    name, text = f"windows-{arguments.model.name}", report(document)
    save(arguments.out, name, document, text, draw)
    print(text)


if __name__ == "__main__":
    main()
