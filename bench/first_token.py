"""Parts of the time that an exact prompt, and a token after it, take in addition to `DynamicCache`.

    python bench/first_token.py

A warm pass of a Llama with small layers over a prefix in host memory, as in `steps.py`: the time is mostly this
library's own work. Each part is timed around functions that do not call each other. *Rest* is what no part covers, such
as masks, rotary tables and attention, less what `DynamicCache` takes to append its tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lib.common import interleaved, median, parser_of
from lib.pages import machine, machine_text, save, table
from steps import CPU, PREFIX, Workload

from hf_tiered_cache import TieredCache
from hf_tiered_cache.cache.cache_state import CacheState
from hf_tiered_cache.cache.executor import Executor
from hf_tiered_cache.cache.forward_pass import RestoringForward
from hf_tiered_cache.cache.sequence import SequenceState
from hf_tiered_cache.cache.storage import Storage
from hf_tiered_cache.layers import DenseSource

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "create the cache": ((TieredCache, "__init__"),),
    "identify the model": ((CacheState, "identify"),),
    "read the request, begin a sequence": ((CacheState, "_parse"),),
    "find what is stored": ((SequenceState, "_look_up"),),
    "plan": ((SequenceState, "_plan_restore"),),
    "prepare the pass, begin to fetch": ((Executor, "_forward_pass"), (RestoringForward, "_begin")),
    "restore the layers": ((DenseSource, "append"),),
    "count, record, note uses": ((Executor, "_commit"), (Storage, "note_uses")),
}


@contextmanager
def timing(seconds: dict[str, float]) -> Iterator[None]:
    """Add the seconds of each part to `seconds` while the context lasts."""

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began

        return call

    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield


@torch.no_grad()
def measure(layers: int, turns: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each part of a prompt and of a token, and those beyond `DynamicCache`."""
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(Path(folder), layers)
        model, prompt, token = work.model, work.prompts["Exact"], work.suffix[:, :1]
        caches = {"token": work.cache("Exact")}
        model(input_ids=prompt, past_key_values=caches["token"], logits_to_keep=1)

        def run(kind: str, cache: Any) -> float:
            began = time.perf_counter()
            ids = token
            if kind == "prompt":
                ids = prompt[:, PREFIX:] if cache is work.dynamic else prompt
                cache = work.cache("Exact") if cache is None else cache
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            return time.perf_counter() - began

        def dynamic(kind: str) -> tuple[float, dict[str, float]]:
            work.dynamic.crop(min(0, PREFIX - work.dynamic.get_seq_length()))
            return run(kind, work.dynamic), {}

        def tiered(kind: str) -> tuple[float, dict[str, float]]:
            parts: dict[str, float] = {}
            with timing(parts):
                return run(kind, caches.get(kind)), parts

        figures = {}
        for kind in ("prompt", "token"):
            ways = {name: partial(way, kind) for name, way in (("DynamicCache", dynamic), ("TieredCache", tiered))}
            times = interleaved(ways, turns, warm_up=10)
            pairs = zip(times["TieredCache"], times["DynamicCache"], strict=True)
            parts = {
                part: median(turn_parts.get(part, 0.0) for _, turn_parts in times["TieredCache"]) for part in PARTS
            }
            beyond = median(ours - theirs for (ours, _), (theirs, _) in pairs)
            figures[kind] = {**parts, "rest": beyond - sum(parts.values()), "in addition to DynamicCache": beyond}
        work.close()
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=200, help="number of timed turns")
    parser.add_argument("--layers", default="2,30", help="numbers of layers, separated by commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers = list(map(int, arguments.layers.split(",")))
    document = {
        "machine": machine(CPU, arguments.out.parent),
        "turns": arguments.turns,
        "layers": {str(count): measure(count, arguments.turns) for count in layers},
    }
    columns = [(count, kind) for count in map(str, layers) for kind in ("prompt", "token")]
    rows = [
        [part, *(f"{document['layers'][count][kind][part] * 1e3:.3f}" for count, kind in columns)]
        for part in (*PARTS, "rest", "in addition to DynamicCache")
    ]
    page = (
        f"# Parts of a first token and a token\n\n{machine_text(document['machine'])} A prefix of {PREFIX} tokens in "
        f"host memory, one thread; medians of {arguments.turns} turns, in milliseconds.\n\n"
    ) + table(["exact method", *(f"{count} layers, {kind}" for count, kind in columns)], rows)
    save(arguments.out, "first-token-cpu", document, page)
    print(page)


if __name__ == "__main__":
    main()
