"""Queries ahead of their layer: how much of what a layer wants is predicted, and how long it still waits.

    PYTHONPATH=. python bench/lookahead.py --model eval/reference/long --tokens 4096

A context is stored, and questions about it with their answers are decoded behind it, token by token. By layers ahead,
and budget: which share of the chunks that a layer chooses was among those predicted for it; of those that it has to
fetch, which share was under way; and what was fetched for nothing. These are counts, and the machine's load does not
touch them. Then the same tokens at the first budget from emulated disks, by several distances in turns, token by token:
how long a step takes, and its layers wait, over those of no look-ahead.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, save, seconds, table
from slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from eval.reference.asking import language_of, load
from eval.reference.check import contexts
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import KVDrive
from hf_tiered_cache.restore.window import WindowChoices

CPU = torch.device("cpu")
COLD = 4  # tokens that do not count: the first ones find an empty window


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/long"), help="a reference model")
    parser.add_argument("--tokens", type=int, default=4096, help="of a context")
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--steps", type=int, default=36, help="tokens that are decoded behind each")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0156, 0.03125, 0.0625])
    parser.add_argument("--ahead", type=int, nargs="+", default=[1, 2, 3, 4], help="layers")
    parser.add_argument("--timed", type=int, nargs="+", default=[0, 1, 2, 4], help="layers ahead on the slow disk")
    parser.add_argument("--timed-contexts", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=100e6, help="of that disk, bytes a second")
    parser.add_argument("--latencies", type=float, nargs="+", default=[1e-3, 5e-3], help="of its reads, seconds")
    parser.add_argument("--host-memory", default="8MiB", help="while it is timed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def tasks(arguments: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contexts, `[1, n]`, and what is asked and answered behind each, `[1, m]`."""
    for context, _ in contexts(language_of(arguments.model), arguments.tokens, arguments.contexts, 1):
        ids = [token for document in context.documents for token in document]
        behind = [token for question in context.questions for token in (*question.prompt, *question.answer)]
        yield torch.tensor([ids]), torch.tensor([behind[: arguments.steps + 2]])


def opened(model: PreTrainedModel, store: KVStore, ids: torch.Tensor, behind: torch.Tensor, method: KVDrive):
    """A cache behind the first two tokens of a question."""
    cache = TieredCache(model, store, method=method, record=False)
    model(input_ids=torch.cat([ids, behind[:, :2]], dim=1), past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored, cache.stats.reason
    return cache


@contextmanager
def noting_choices(shares: list[float]) -> Iterator[None]:
    """Within this, note for each choice of a row which share of it was predicted."""
    predicted: dict[int, list[np.ndarray]] = {}
    plan, prepare = WindowChoices._plan, WindowChoices.prepare
    ahead = False

    def noting_plan(self: WindowChoices, layer: int, *given: Any) -> Any:
        steps = plan(self, layer, *given)
        chosen = [_chosen(step) for step in steps]
        if ahead:
            predicted[layer] = chosen
        else:
            for now, before in zip(chosen, predicted.pop(layer, []), strict=False):
                shares.extend(np.isin(a, b).mean() for a, b in zip(now, before, strict=True))
        return steps

    def noting_prepare(self: WindowChoices, *given: Any) -> None:
        nonlocal ahead
        ahead = True
        try:
            prepare(self, *given)
        finally:
            ahead = False

    WindowChoices._plan, WindowChoices.prepare = noting_plan, noting_prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        WindowChoices._plan, WindowChoices.prepare = plan, prepare


def _chosen(step: Any) -> np.ndarray:
    """The chunks that a row holds in its columns when a step is done, int64 `[kv_heads, columns]`."""
    columns = step.held.window.columns.copy()
    for came in (step.moves.brought, step.moves.fetched):
        columns[came.heads, came.columns] = came.chunks
    return columns


def predicted_shares(model: PreTrainedModel, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """By budget and layers ahead."""
    counts: dict[tuple[float, int], dict[str, Any]] = {}
    for number, (ids, behind) in enumerate(tqdm(list(tasks(arguments)), desc="contexts")):
        with KVStore(folder / f"counted {number}") as store:
            store.precompute(model, ids, method=KVDrive(), progress=False)
            for budget in arguments.budgets:
                for ahead in arguments.ahead:
                    found = counts.setdefault((budget, ahead), {"shares": [], "blocks": [], "hits": [], "misses": []})
                    cache = opened(model, store, ids, behind, KVDrive(budget, ahead=ahead))
                    with noting_choices(found["shares"]):
                        for token in behind[0, 2:]:
                            model(input_ids=token.view(1, 1), past_key_values=cache)
                    stats = cache.stats
                    for name in ("blocks", "hits", "misses"):
                        found[name].append(getattr(stats, f"ahead_{name}"))
                    found["block_bytes"] = _block_bytes(store)
    return [
        {
            "budget": budget,
            "ahead": ahead,
            "chosen, predicted": float(np.mean(found["shares"])),
            "fetched, predicted": sum(found["hits"]) / (sum(found["hits"]) + sum(found["misses"])),
            "brought, wanted": sum(found["hits"]) / sum(found["blocks"]),
            "wasted bytes a token": (sum(found["blocks"]) - sum(found["hits"]))
            * found["block_bytes"]
            / (len(found["blocks"]) * arguments.steps),
            **{name: found[name] for name in ("blocks", "hits", "misses")},
        }
        for (budget, ahead), found in counts.items()
    ]


def _block_bytes(store: KVStore) -> int:
    (segment,) = store.segments()
    reader = store._storage.disk.reader(segment.id)
    assert reader is not None
    return reader.shape.block_groups[0].block_bytes


def waits(model: PreTrainedModel, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """By latency of the disk: for each distance lists over tokens. Each has a disk and memory of its own."""
    results = []
    for latency in arguments.latencies:
        figures: dict[int, dict[str, list[float]]] = {
            ahead: {"step_s": [], "stall_s": [], "cpu_s": []} for ahead in arguments.timed
        }
        for number, (ids, behind) in enumerate(list(tasks(arguments))[: arguments.timed_contexts]):
            place = folder / f"counted {number}"
            with ExitStack() as stack:
                caches = {}
                for ahead in arguments.timed:
                    engine = SlowDiskEngine(SlowDisk(arguments.bandwidth, latency))
                    store = stack.enter_context(KVStore(place, engine=engine, host_memory=arguments.host_memory))
                    caches[ahead] = opened(model, store, ids, behind, KVDrive(arguments.budgets[0], ahead=ahead))
                for at, token in enumerate(tqdm(behind[0, 2:], desc=f"{1e3 * latency:.1f} ms", leave=False)):
                    for ahead in arguments.timed[:: 1 if at % 2 else -1]:
                        for name, spent in decoded(model, caches[ahead], token).items() if at >= COLD else ():
                            figures[ahead][name].append(spent)
        results.append({"latency": latency, "ways": {str(ahead): found for ahead, found in figures.items()}})
    return results


def decoded(model: PreTrainedModel, cache: TieredCache, token: torch.Tensor) -> dict[str, float]:
    """Seconds that a token takes, that its layers wait, and that all threads compute."""
    stalled, busy = cache.stats.stall_seconds, time.process_time()
    spent = seconds(lambda: model(input_ids=token.view(1, 1), past_key_values=cache), CPU)
    return {
        "step_s": spent,
        "stall_s": cache.stats.stall_seconds - stalled,
        "cpu_s": time.process_time() - busy,
    }


def report(document: dict[str, Any]) -> str:
    """Markdown."""
    about = document["machine"]
    rows = [
        [
            f"{found['budget']:.2%}",
            str(found["ahead"]),
            *(f"{found[name]:.1%}" for name in ("chosen, predicted", "fetched, predicted", "brought, wanted")),
            f"{found['wasted bytes a token'] / 1024:.0f}",
        ]
        for found in document["predicted"]
    ]
    headings = [
        "budget",
        "layers ahead",
        "chosen, predicted",
        "fetched, predicted",
        "brought, wanted",
        "wasted KiB/token",
    ]
    text = (
        f"# Queries ahead of their layer: {document['model']}, {document['tokens']} tokens\n\n"
        f"{about['cpu']}, {about['cores']} cores; {about['date']}, commit {about['commit']}. "
        f"{document['contexts']} contexts, {document['steps']} tokens of questions and answers decoded behind each. "
        "Chosen: of the chunks that a layer chooses, those that were predicted, all layers but the first. Fetched: of "
        "the blocks that all layers have to fetch, those that were under way. Brought: of the blocks under way, those "
        "that were asked for.\n\n" + table(headings, rows)
    )
    for found in document["waits"]:
        ways = {ahead: {name: np.array(each) for name, each in way.items()} for ahead, way in found["ways"].items()}
        base = next(iter(ways.values()))
        rows = [
            [ahead]
            + [
                text
                for name, spent in way.items()
                for text in (f"{1e3 * np.median(spent):.1f}", f"{np.median(spent) / np.median(base[name]):.2f}")
            ]
            for ahead, way in ways.items()
        ]
        headings = ["layers ahead", "step, ms", "ratio", "stall, ms", "ratio", "CPU, ms", "ratio"]
        text += (
            f"\n## A disk of {document['bandwidth'] / 1e6:.0f} MB/s, {found['latency'] * 1e3:.1f} ms a read\n\n"
            f"Medians over tokens, in turns; {document['budgets'][0]:.2%}, {document['host_memory']} on the host.\n\n"
            + table(headings, rows)
        )
    return text


@torch.no_grad()
def main() -> None:
    arguments = arguments_of()
    model = load(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        document = {
            "machine": machine(CPU, Path(folder)),
            "model": arguments.model.name,
            **{name: getattr(arguments, name) for name in ("tokens", "contexts", "steps", "budgets", "bandwidth")},
            "host_memory": arguments.host_memory,
            "predicted": predicted_shares(model, arguments, Path(folder)),
            "waits": waits(model, arguments, Path(folder)),
        }
    text = report(document)
    save(arguments.out, f"lookahead-{arguments.model.name}", document, text)
    print(text)


if __name__ == "__main__":
    main()
