"""What the order of chunks on disk is worth to choosing chunks at each token: reads and bytes of a decoding step.

    PYTHONPATH=. python bench/extents.py --model eval/reference/long --tokens 4096

A context is stored, and questions about it are asked one after another behind it, token by token, with their right
answers, so that every layout sees the same tokens. Nothing is kept on the host, so what a layer's window lacks is read.
Counted is what the engine asks the disk for, which no clock disturbs: of each batch the reads that neighbours make
together, and those that are left where gaps are read through, too.

The layouts: as the exact method cuts; each head's chunks in blocks of their own, by position; cluster after cluster of
the index, these numbered by their first chunk; clusters that are alike side by side, as `KVDrive(extents=True)` lays
them out; and in random order, to tell what position and clusters do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, save, table
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from eval.reference.asking import language_of, load
from eval.reference.check import contexts
from eval.reference.language import KINDS
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.geometry import Geometry
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import KVDrive
from hf_tiered_cache.restore.indexes import KeptIndexes
from hf_tiered_cache.select.clusters import ClusterIndex
from hf_tiered_cache.shape import TokenTables
from hf_tiered_cache.store.engines import PosixEngine, ReadOp
from hf_tiered_cache.store.engines.base import READ_THROUGH_BYTES, ReadReport, coalesce

CPU = torch.device("cpu")
INDEXES = ("cluster_boxes", "clusters")
GAPS = {"neighbours": 0, "gaps": READ_THROUGH_BYTES}
Order = Callable[[ClusterIndex], torch.Tensor]
ORDERS: dict[str, Order] = {
    "clusters by first chunk": lambda index: index.chunk_order.long(),
    "clusters that are alike": lambda index: index.order(),
    "random": lambda index: torch.rand(index.chunk_order.shape, generator=torch.Generator().manual_seed(0)).argsort(1),
}
LAYOUTS = ("as Exact cuts", "tokens", *ORDERS)


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/long"), help="a reference model")
    parser.add_argument("--tokens", type=int, default=4096, help="of a context")
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="decoded tokens behind each")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0156, 0.0625])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


class CountingEngine(PosixEngine):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def submit(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        for name, most in GAPS.items():
            calls = coalesce(ops, most)
            self.counts[f"{name} reads"] += len(calls)
            self.counts[f"{name} bytes"] += sum(call.nbytes for call in calls)
        return super().submit(ops)


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    store: KVStore,
    engine: CountingEngine,
    method: KVDrive,
    prompt: torch.Tensor,
    answer: Sequence[int],
) -> dict[str, float]:
    """What each token of `answer` makes the engine read."""
    cache = TieredCache(model, store, method=method, record=False)
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored, cache.stats.reason
    engine.counts.clear()
    for token in answer:
        model(input_ids=torch.tensor([[token]]), past_key_values=cache)
    return {name: count / len(answer) for name, count in engine.counts.items()}


def lay_out(store: KVStore, geometry: Geometry, kind: type[ClusterIndex] | None, order: Order | None) -> None:
    """Lay the one segment out anew; in the order of its tokens, if no other is given."""
    rewriter, disk = storage_of(store).rewriter, storage_of(store).disk
    (row,) = store.segments()
    reader, tables = disk.reader(row.id), None
    assert reader is not None
    if order is not None and kind is not None:
        indexes = KeptIndexes(disk, lambda write: write()).find(reader, kind, geometry.chunk_tokens)
        orders = {layer: order(index).numpy() for layer, index in indexes.items()}  # type: ignore[arg-type]
        groups = reader.shape.block_groups
        tables = TokenTables.by_chunk(orders, geometry.chunk_tokens, groups, reader.shape.tokens)
        assert not tables.same(None)
    assert rewriter._replace(row.id, geometry, tables)


def measure(model: PreTrainedModel, arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By index, budget and layout, lists over contexts."""
    language, found = language_of(arguments.model), dict[str, dict[str, list[float]]]()
    every = list(contexts(language, arguments.tokens, arguments.contexts, 1, KINDS))
    turns = tqdm(total=len(every) * len(INDEXES) * len(LAYOUTS) * len(arguments.budgets), unit="run")
    for number, (context, _) in enumerate(every):
        ids = [token for document in context.documents for token in document]
        asked = [token for question in context.questions for token in (*question.prompt, *question.answer)]
        begun = len(context.questions[0].prompt)
        prompt, rest = torch.tensor([[*ids, *asked[:begun]]]), asked[begun : begun + arguments.steps]
        for index in INDEXES:
            methods = [KVDrive(budget, index=index, extents=False) for budget in arguments.budgets]
            engine, geometry = CountingEngine(), methods[0].geometry
            where = folder / f"{number} {index}"
            with KVStore(where, engine=engine, host_memory=0, index_memory="4GiB") as store:
                store.precompute(model, prompt[:, : len(ids)], method=methods[0], progress=False)
                decode(model, store, engine, methods[0], prompt, rest[:1])  # makes the index
                store.flush()
                kind = methods[0].selector().kind
                for layout in ("tokens", *ORDERS, "as Exact cuts"):
                    if layout in ORDERS:
                        lay_out(store, geometry, kind, ORDERS[layout])
                    elif layout != "tokens":
                        lay_out(store, Geometry(), None, None)
                    for method in methods:
                        for name, count in decode(model, store, engine, method, prompt, rest).items():
                            figures = found.setdefault(f"{index} {method.budget} {layout}", {})
                            figures.setdefault(name, []).append(count)
                        turns.update()
    return found


def report(document: dict[str, Any]) -> str:
    """Markdown."""
    about, found = document["machine"], document["results"]
    parts = [
        f"# Reads of a decoding step by the order of chunks: {document['model']}, {document['tokens']} tokens\n\n"
        f"{about['cpu']}, {about['cores']} cores; {about['date']}, commit {about['commit']}. {document['contexts']} "
        f"contexts, {document['steps']} decoded tokens behind each, nothing kept on the host. Means of a step, all "
        f"layers and heads together; first without, then with gaps of up to {READ_THROUGH_BYTES >> 10} KiB read "
        "through. For the cost a read is taken to be worth as many bytes as such a gap has.\n"
    ]
    names = ["layout", "reads", "KiB", "reads, gaps read", "KiB, gaps read", "cost, of that of tokens"]
    for index in INDEXES:
        for budget in document["budgets"]:
            means = {
                layout: {name: float(np.mean(each)) for name, each in found[f"{index} {budget} {layout}"].items()}
                for layout in LAYOUTS
            }
            rows = []
            for layout, mean in means.items():
                cells = [mean[f"{way} reads"] for way in GAPS], [mean[f"{way} bytes"] / 1024 for way in GAPS]
                share = cost(mean) / cost(means["tokens"])
                rows.append(
                    [layout, *(f"{cell:.0f}" for pair in zip(*cells, strict=True) for cell in pair), f"{share:.2f}"]
                )
            parts.append(f"\n## {index}, {budget:.2%}\n\n" + table(names, rows))
    return "".join(parts)


def cost(mean: dict[str, float]) -> float:
    """Bytes read, gaps too, and for each read as many as a gap that is read instead."""
    return mean["gaps bytes"] + READ_THROUGH_BYTES * mean["gaps reads"]


def main() -> None:
    arguments = arguments_of()
    model = load(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        about, results = machine(CPU, Path(folder)), measure(model, arguments, Path(folder))
    names = ("tokens", "contexts", "steps", "budgets")
    document = {"machine": about, "model": arguments.model.name, **{name: getattr(arguments, name) for name in names}}
    document["results"] = results
    text = report(document)
    save(arguments.out, f"extents-{arguments.model.name}", document, text)
    print(text)


if __name__ == "__main__":
    main()
