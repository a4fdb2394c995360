"""Measure what second requests save if a few requests to an object store take long.

    python bench/hedged_reads.py          # about a minute

Requests go to objects in memory, and each takes 10 ms, or 500 ms with a probability of 2 %. Fetches read a segment of
16 MiB, and look-ups ask for the 256 prefix hashes of a prompt of 4,096 tokens.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import parser_of
from lib.pages import machine, machine_text, publish, table

from hf_tiered_cache.store import hedged
from hf_tiered_cache.store.backends.object_store import ObjectStoreBackend
from hf_tiered_cache.store.engines import ReadOp
from hf_tiered_cache.store.kinds import SEGMENT_SUFFIX
from hf_tiered_cache.store.memory import aligned_bytes

USUAL_SECONDS, LONG_SECONDS, LONG_SHARE = 0.01, 0.5, 0.02
SEGMENT = "0" * 32
SEGMENT_BYTES, PROMPT_HASHES, ENTRY_BYTES = 16 << 20, 256, 4096
SHARES = {"with": hedged._SHARE, "without": 0.0}


class Client:
    """Client of an object store, some of whose requests take long."""

    def __init__(self, client: Any) -> None:
        self._client, self._random = client, random.Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, *arguments: Any, **options: Any) -> Any:
        """Read a range after a delay."""
        time.sleep(LONG_SECONDS if self._random.random() < LONG_SHARE else USUAL_SECONDS)
        return self._client.get(*arguments, **options)


def measure(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of fetches and look-ups, and the number of second requests, with and without them."""
    results: dict[str, dict[str, list[float]]] = {name: {} for name in SHARES}
    names = [f"prefixes/{number:032x}" for number in range(PROMPT_HASHES)]
    content = aligned_bytes(SEGMENT_BYTES)
    for name, share in SHARES.items():
        hedged._SHARE = share
        with closing(ObjectStoreBackend(f"memory://{name}")) as backend:
            backend.client = Client(backend.client)
            for path in names:
                backend.put_object(path, bytes(ENTRY_BYTES), replace=True)
            backend.put_object(f"segments/{SEGMENT}{SEGMENT_SUFFIX}", bytes(SEGMENT_BYTES), replace=True)
            _, _, file = backend.open(SEGMENT, lambda stored, page: 0)
            results[name]["fetch"] = times(lambda b=backend, f=file: b.read([ReadOp(f, 0, content)]).result(), repeats)
            results[name]["look-up"] = times(lambda b=backend: b.get_beginnings(names, ENTRY_BYTES), repeats)
            results[name]["second requests"] = [float(reads.hedged) for reads in backend.hedges]
    return results


def times(action: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of an action, after some that are not measured."""
    seconds = []
    for number in range(repeats + 3):
        start_time = time.perf_counter()
        action()
        if number >= 3:
            seconds.append(time.perf_counter() - start_time)
    return seconds


def report(document: dict[str, Any]) -> str:
    """Return the page of results."""
    rows = []
    for operation in ("fetch", "look-up"):
        for name, result in document["results"].items():
            quantiles = np.quantile(result[operation], [0.5, 0.95, 0.99])
            rows.append([f"{operation}, {name} second requests", *(f"{1e3 * seconds:.0f} ms" for seconds in quantiles)])
    fetched, looked_up = document["results"]["with"]["second requests"]
    repeats = document["repeats"]
    return f"""# Second requests for reads that take long

{machine_text(document["machine"])} Each request takes {1e3 * USUAL_SECONDS:.0f} ms, or {1e3 * LONG_SECONDS:.0f} ms with
a probability of {LONG_SHARE:.0%}. A fetch reads {SEGMENT_BYTES >> 20} MiB in requests of 1 MiB, and a look-up asks for
{PROMPT_HASHES} prefix hashes. There were {repeats} of each.

{table(["", "p50", "p95", "p99"], rows)}
Second requests per request: {fetched / (SEGMENT_BYTES >> 20) / (repeats + 3):.1%} of fetches,
{looked_up / PROMPT_HASHES / (repeats + 3):.1%} of look-ups.
"""


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="number of fetches and of look-ups")
    arguments = parser.parse_args()
    on = machine(torch.device("cpu"), Path(tempfile.gettempdir()))
    document = {"machine": on, "repeats": arguments.repeats, "results": measure(arguments.repeats)}
    publish(arguments.out, "hedged-reads-cpu", document, report)


if __name__ == "__main__":
    main()
