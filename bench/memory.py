"""Peak memory of decoding from disk with fixed host memory, by context length.

    PYTHONPATH=. python bench/memory.py                      # Qwen2.5-0.5B's shape, 4 of its layers, 4k to 128k tokens
    PYTHONPATH=. python bench/memory.py --shape tiny --layers 0 --contexts 4096,16384

The model has random weights and a known shape; KV and queries are synthetic (see `bench/decode.py`). A first process
stores the context in segments of `--piece` tokens, and a second one builds the index. For each length and number of
caches, another process restores the context with KVDrive and decodes `--tokens` tokens with each cache. It reports how
far its memory rose above that with the loaded model.

`index_memory` is small by default, so that nearly the whole index is beyond the budgets. "Beyond budgets" is the peak
without the blocks in host memory and the indexes that the store keeps within `index_memory`. The slope is a
least-squares line through all lengths. A second cache of the same context shares the index of the first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import SHAPES, Peak, add_size, build, forget_page_cache, listed, parser_of
from lib.made_contexts import SUFFIX, TAG, Contexts
from lib.pages import machine, machine_text, publish, table
from tqdm.auto import tqdm

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import KVDrive

MIB = 1 << 20
LIMIT = 0.25
"""Aim of the slope: MiB beyond the budgets per MiB of KV."""
CACHES = (1, 2)
"""Numbers of caches of the same context."""


@dataclass(frozen=True)
class Case:
    """Settings of one process."""

    shape: str
    layers: int
    tokens: int
    caches: int
    new_tokens: int
    piece: int
    budget: float
    host_memory: str
    index_memory: str
    folder: Path

    def contexts(self) -> Contexts:
        """Build the model and its context."""
        model = build(self.shape, torch.float32, torch.device("cpu"), layers=self.layers)
        return Contexts(model, self.tokens, rows=1, steps=self.new_tokens)

    def store(self, **settings: Any) -> KVStore:
        """Open the store of the context."""
        return KVStore(self.folder / str(self.tokens), host_memory=self.host_memory, engine="posix", **settings)


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_size(parser, layers=4)
    contexts = [4096, 16384, 32768, 65536, 131072]
    parser.add_argument("--contexts", type=listed(int), default=contexts, help="numbers of tokens, multiples of 16")
    parser.add_argument("--new-tokens", type=int, default=16, help="number of decoded tokens of each cache")
    parser.add_argument("--piece", type=int, default=4096, help="tokens per segment, a multiple of 16; 0 for one")
    parser.add_argument("--budget", type=float, default=0.0156, help="share of the context that is attended to")
    parser.add_argument("--host-memory", default="16MiB", help="host memory of the store")
    parser.add_argument("--index-memory", default="1MiB", help="index memory of the store")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: a temporary one)")
    return parser.parse_args(argv)


# --- one process each


def write(case: Case) -> None:
    """Store the context."""
    with case.store(queue_memory="64GiB") as store:
        case.contexts().store(store, KVDrive(case.budget), case.piece)


@torch.no_grad()
def measure(case: Case) -> dict[str, Any]:
    """Restore the context and decode with each cache. Return the peak and what the store counts of it."""
    contexts = case.contexts()
    model, ids = contexts.model, contexts.ids
    model(input_ids=ids[:, :64], use_cache=False)  # memory of threads and kernels
    with case.store(index_memory=case.index_memory) as store, contexts.asking():
        peak, caches = Peak(), list[TieredCache]()
        for _ in range(case.caches):
            caches.append(TieredCache(model, store, method=KVDrive(case.budget), record=False, tag=TAG))
            contexts.step = 0
            model(input_ids=ids[:, : case.tokens + SUFFIX], past_key_values=caches[-1], logits_to_keep=1)
            assert caches[-1].stats.tokens_restored == case.tokens, caches[-1].stats.reason
        for step in range(case.new_tokens):
            contexts.step, at = SUFFIX + step, case.tokens + SUFFIX + step
            for cache in caches:
                model(input_ids=ids[:, at : at + 1], past_key_values=cache)
        stats = store.stats
        figures = {
            "peak_bytes": peak.end(),
            "host_bytes": stats.host.bytes,
            "index_bytes": stats.index.bytes,
            "unbudgeted_index_bytes": stats.unbudgeted_index_bytes,
        }
        return figures | {"kv_bytes": contexts.nbytes, "segments": stats.segments}


# --- all processes


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure all lengths, each in processes of its own."""
    results = []
    settings = (arguments.new_tokens, arguments.piece, arguments.budget, arguments.host_memory, arguments.index_memory)
    for tokens in tqdm(arguments.contexts, desc="contexts"):
        case = partial(Case, arguments.shape, arguments.layers, tokens)
        _in_process(write, case(1, *settings, folder))
        _in_process(measure, case(1, *settings, folder))  # makes the index
        for caches in CACHES:
            forget_page_cache(folder)
            figures = _in_process(measure, case(caches, *settings, folder))
            figures["beyond_bytes"] = figures["peak_bytes"] - figures["host_bytes"] - figures["index_bytes"]
            results.append({"tokens": tokens, "caches": caches} | figures)
    return results


def _in_process(action: Callable[[Case], Any], case: Case) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(action, case).result()


def slopes(results: list[dict[str, Any]]) -> dict[int, float]:
    """Return the bytes beyond the budgets per byte of KV, by number of caches; none for a single length."""
    slope_by_caches = {}
    for caches in sorted({result["caches"] for result in results}):
        kv, beyond = zip(*((r["kv_bytes"], r["beyond_bytes"]) for r in results if r["caches"] == caches), strict=True)
        if len(set(kv)) > 1:
            slope_by_caches[caches] = float(np.polyfit(kv, beyond, 1)[0])
    return slope_by_caches


def report(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    about, options = document["machine"], document["options"]
    text = (
        f"# Peak memory of decoding by context length: {options['layers'] or 'all'} layers of {options['shape']}, "
        f"float32, {about['device']}\n\n{machine_text(about)} Synthetic KV in segments of {options['piece']} tokens, "
        f"a budget of {options['budget']:.2%}; host memory {options['host_memory']}, index memory "
        f"{options['index_memory']}. The peak is that of the process beyond the loaded model. MiB.\n\n"
    )
    headings = ["tokens", "caches", "KV", "peak", "host memory", "index in `index_memory`", "index beyond it"]
    figures = ("kv_bytes", "peak_bytes", "host_bytes", "index_bytes", "unbudgeted_index_bytes", "beyond_bytes")
    rows = [
        [f"{result['tokens']:,}", str(result["caches"]), *(f"{result[figure] / MIB:,.1f}" for figure in figures)]
        for result in document["results"]
    ]
    text += table([*headings, "peak beyond budgets"], rows)
    for caches, slope in slopes(document["results"]).items():
        text += f"\nSlope with {caches} cache{'s' * (caches > 1)}: {slope:.3f} MiB beyond the budgets per MiB of KV"
        text += f" (aim: at most {LIMIT}).\n"
    return text


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Plot memory beyond the budgets over the KV."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for caches in sorted({result["caches"] for result in document["results"]}):
        points = [(r["kv_bytes"] / MIB, r["beyond_bytes"] / MIB) for r in document["results"] if r["caches"] == caches]
        axes.plot(*zip(*points, strict=True), "o-", label=f"{caches} cache{'s' * (caches > 1)}")
    largest = max(result["kv_bytes"] for result in document["results"]) / MIB
    axes.plot([0, largest], [0, LIMIT * largest], "--", color="grey", label=f"{LIMIT} of the KV")
    axes.set_xlabel("KV of the context, MiB")
    axes.set_ylabel("peak memory beyond the budgets, MiB")
    axes.legend()
    return figure


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    options = {name: value for name, value in vars(arguments).items() if name not in ("out", "folder")}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        document = {"machine": machine(torch.device("cpu"), Path(temporary)), "options": options}
        document["results"] = run(arguments, Path(temporary))
    document["slopes"] = slopes(document["results"])
    layers = arguments.layers or SHAPES[arguments.shape]["num_hidden_layers"]
    publish(arguments.out, f"memory-{arguments.shape}-{layers}l-cpu", document, report, plot)


if __name__ == "__main__":
    main()
