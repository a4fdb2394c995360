"""A pipeline of micro-batches: does KVDrive decode faster if one half is ranked while the other half computes?

    PYTHONPATH=. python bench/pipeline.py                       # Qwen2.5-0.5B's shape, 4 layers, batch 4
    PYTHONPATH=. python bench/pipeline.py --shape tiny --layers 2 --contexts 512 --tokens 1 --turns 1

KVDRIVE (Section 6.1) ranks the chunks of the next micro-batch while the current one computes. This library overlaps
only reads. Three ways decode the same number of rows, with the KV in memory: one batch with all threads; its halves in
turn with all threads; its halves at the same time, in two threads of Python with half of PyTorch's threads each. In the
third way any work of one half may run beside any work of the other, so it bounds from above what a pipeline gains on
this machine, except that the halves read the weights twice. The second way shows what this alone costs. Each half has a
model of its own with equal weights, and both restore the same contexts.

Contexts, queries and figures are those of `decode.py`. Ways alternate; figures are medians over turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import System
from lib.common import add_size, build, interleaved, listed, median, parser_of, ratio
from lib.made_contexts import SUFFIX, TAG, Contexts
from lib.pages import machine, machine_text, publish, table

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import KVDrive

WHOLE, IN_TURN, AT_ONCE = "one batch", "halves in turn", "halves at once"


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_size(parser, layers=4)
    parser.add_argument("--contexts", type=listed(int), default=[8192, 32768], help="numbers of context tokens")
    parser.add_argument("--batch", type=int, default=4, help="number of rows, even")
    parser.add_argument("--budget", type=float, default=0.0156, help="share of the context that is attended to")
    parser.add_argument("--tokens", type=int, default=8, help="number of tokens per turn")
    parser.add_argument("--turns", type=int, default=7, help="number of measured turns, after two of warm-up")
    return parser.parse_args(argv)


def decode(system: System, tokens: int, threads: int) -> None:
    """Decode tokens with a number of PyTorch's threads, which is set for this thread of Python."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for _ in range(tokens):
            system.pass_over(1)


def measure(arguments: argparse.Namespace, context_tokens: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds per token of each way, one for each turn."""
    threads, device = torch.get_num_threads(), torch.device("cpu")
    steps = arguments.tokens * (arguments.turns + 2)
    with ExitStack() as stack, torch.inference_mode():
        workers = stack.enter_context(ThreadPoolExecutor(2))

        def contexts_of(rows: int) -> Contexts:
            model = build(arguments.shape, torch.float32, device, layers=arguments.layers)
            contexts = Contexts(model, context_tokens, rows, steps)
            stack.enter_context(contexts.asking())
            return contexts

        def system(contexts: Contexts) -> System:
            method = KVDrive(arguments.budget)
            cache = TieredCache(contexts.model, store, method=method, record=False, tag=TAG, fold_heads=True)
            new_system = System(contexts, cache)
            new_system.pass_over(SUFFIX)
            assert cache.stats.tokens_restored, cache.stats.reason
            return new_system

        batch = contexts_of(arguments.batch)
        host = batch.nbytes + batch.nbytes // 8 + (256 << 20)
        store = stack.enter_context(KVStore(folder, host_memory=host, index_memory="64GiB", queue_memory="64GiB"))
        batch.store(store, KVDrive())
        for ids in batch.ids:
            store.warm(batch.model, ids[: context_tokens + SUFFIX], tag=TAG, progress=False)
        full_batch = system(batch)
        half = arguments.batch // 2  # halves have the first rows of the batch
        in_turn, at_once = ([system(contexts_of(half)) for _ in range(2)] for _ in range(2))

        def timed(way: str) -> float:
            start_time = time.perf_counter()
            if way == WHOLE:
                decode(full_batch, arguments.tokens, threads)
            elif way == IN_TURN:
                for part in in_turn:
                    decode(part, arguments.tokens, threads)
            else:
                share = max(1, threads // 2)
                for future in [workers.submit(decode, part, arguments.tokens, share) for part in at_once]:
                    future.result()
            return (time.perf_counter() - start_time) / arguments.tokens

        ways = {way: partial(timed, way) for way in (WHOLE, IN_TURN, AT_ONCE)}
        return interleaved(ways, arguments.turns, warm_up=2)


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    rows = [
        [
            f"{result['tokens']:,}",
            *(f"{1e3 * median(result['seconds'][way]):.1f}" for way in (WHOLE, IN_TURN, AT_ONCE)),
            f"{ratio(result['seconds'][WHOLE], result['seconds'][AT_ONCE]):.2f} ×",
            f"{ratio(result['seconds'][IN_TURN], result['seconds'][AT_ONCE]):.2f} ×",
        ]
        for result in document["results"]
    ]
    headings = [
        "context tokens",
        *(f"{way}, ms" for way in (WHOLE, IN_TURN, AT_ONCE)),
        f"{WHOLE} ÷ {AT_ONCE}",
        f"{IN_TURN} ÷ {AT_ONCE}",
    ]
    return (
        f"# A pipeline of micro-batches: {document['layers']} layers of {document['shape']}, float32\n\n"
        f"{machine_text(document['machine'])} KVDrive with a budget of {document['budget']:.2%} and all KV in memory, "
        f"{document['batch']} rows. Milliseconds per decoded token of all rows, medians of {document['turns']} turns; "
        "ratios are taken within a turn. *Halves at once* bounds what a pipeline of two micro-batches gains.\n\n"
        + table(headings, rows)
    )


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    with tempfile.TemporaryDirectory() as folder:
        options = {name: getattr(arguments, name) for name in ("shape", "layers", "batch", "budget", "turns")}
        document: dict[str, Any] = {"machine": machine(torch.device("cpu"), Path(folder)), **options, "results": []}
        for tokens in arguments.contexts:
            with tempfile.TemporaryDirectory(dir=folder) as room:
                document["results"].append({"tokens": tokens, "seconds": measure(arguments, tokens, Path(room))})
    publish(arguments.out, f"pipeline-{arguments.shape}-{arguments.layers}l-cpu", document, report)


if __name__ == "__main__":
    main()
