"""Measure how the time to make room in a full memory tier depends on the number of its blocks.

    python bench/tier_slots.py          # about a minute

A fetch asks which of its blocks the tier keeps, reserves their slots, which evicts others, and enters the new blocks.
Between the fetches, other blocks are used. Blocks have 64 bytes here, so that a million of them fit in memory: their
size does not matter, since none is copied. "Ranking all" is the time of one ranking of all slots, the least that a
fetch would take if it kept no ranking.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import listed, parser_of
from lib.pages import machine, machine_text, plain_ticks, publish, table

from hf_tiered_cache.store.memory import aligned_bytes
from hf_tiered_cache.tiers.pool import Tier
from hf_tiered_cache.tiers.scores import Usage, make_policy

BLOCK_BYTES, SEGMENT_CHUNKS = 64, 4096


def measure(policy: str, slots: int, chunks: int, fetches: int) -> dict[str, list[float]]:
    """Return the seconds of each fetch of `chunks` blocks in a tier of `slots` slots, and of rankings of all slots."""
    numbers = np.random.default_rng(0)
    tier = Tier("host", 2 * slots * BLOCK_BYTES, make_policy(policy), aligned_bytes)
    owners = [(f"segment-{number}", 0, 0) for number in range(slots // SEGMENT_CHUNKS)]
    for owner in owners:
        insert(tier, owner, np.arange(SEGMENT_CHUNKS))
    (pool,) = tier.pools()
    tier._budget = tier.allocated  # full from now on
    insert(tier, ("rest", 0, 0), np.arange(len(pool.free)))
    rate(tier, owners, numbers)
    results: dict[str, list[float]] = {"fetch": [], "ranking all": []}
    for number in range(fetches):
        owner = owners[numbers.integers(len(owners))]
        slots_read = np.sort(numbers.choice(SEGMENT_CHUNKS, chunks, replace=False))
        if (cached := tier.find(owner, slots_read)) is not None:
            pool.pin(cached[1])
            pool.use(cached[1], tier.clock)
            pool.unpin(cached[1])
        start_time = time.perf_counter()
        insert(tier, (f"new-{number}", 0, 0), np.arange(chunks))
        results["fetch"].append(time.perf_counter() - start_time)
        start_time = time.perf_counter()
        tier.policy.victims(pool.usage(slice(None)), chunks)
        results["ranking all"].append(time.perf_counter() - start_time)
    return results


def insert(tier: Tier, owner: tuple[str, int, int], chunks: np.ndarray) -> None:
    """Enter new blocks, as a fetch does."""
    tier.clock += 1
    arriving = Usage(np.full(len(chunks), tier.clock), np.ones(len(chunks)), *np.full((2, len(chunks)), 1e6))
    pool, slots, indices = tier.acquire(BLOCK_BYTES, len(chunks), arriving)
    tier.insert(pool, slots, owner, chunks[indices], len(chunks))
    pool.unpin(slots)


def rate(tier: Tier, owners: list[tuple[str, int, int]], numbers: np.random.Generator) -> None:
    """Give all blocks scores, most of which differ."""
    for owner in owners:
        mass, share = numbers.random(SEGMENT_CHUNKS), np.ones(SEGMENT_CHUNKS)
        tier.rescore(tier._scores.note([(owner, SEGMENT_CHUNKS, np.arange(SEGMENT_CHUNKS), mass, share)]))


def report(document: dict[str, Any]) -> str:
    """Return the page of results."""
    rows = []
    for result in document["results"]:
        fetch, ranking = 1e3 * np.array(result["fetch"]), 1e3 * np.array(result["ranking all"])
        figures = [np.median(fetch), fetch.mean(), fetch.max(), np.median(ranking)]
        rows.append([result["policy"], f"{result['slots']:,}", *(f"{milliseconds:.2f} ms" for milliseconds in figures)])
    return f"""# Time to make room in a full tier

{machine_text(document["machine"])} A fetch brings {document["chunks"]} new blocks, and as many others are used before
it. There were {document["fetches"]} fetches of each kind. The longest ones rank the slots again.

{table(["policy", "blocks in the tier", "median", "mean", "longest", "ranking all, median"], rows)}
"""


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Draw the mean time of a fetch, and of ranking all slots, by the number of slots."""
    figure, axis = plt.subplots(figsize=(6, 4))
    for policy in dict.fromkeys(result["policy"] for result in document["results"]):
        results = [result for result in document["results"] if result["policy"] == policy]
        slots = [result["slots"] for result in results]
        line = axis.plot(slots, [1e3 * np.mean(result["fetch"]) for result in results], "o-", label=f"fetch, {policy}")
        ranking = [1e3 * np.mean(result["ranking all"]) for result in results]
        axis.plot(slots, ranking, "o:", color=line[0].get_color(), label=f"ranking all, {policy}")
    axis.set(xscale="log", yscale="log", xlabel="blocks in the tier", ylabel="mean time (ms)", title="Making room")
    plain_ticks(axis.yaxis)
    axis.legend()
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--slots", type=listed(int), default=[1 << 13, 1 << 16, 1 << 18, 1 << 20], help="tier sizes")
    parser.add_argument("--chunks", type=int, default=128, help="new blocks of a fetch")
    parser.add_argument("--fetches", type=int, default=300, help="number of fetches")
    arguments = parser.parse_args()
    results = [
        {"policy": policy, "slots": slots, **measure(policy, slots, arguments.chunks, arguments.fetches)}
        for slots in arguments.slots
        for policy in ("lru", "attention")
    ]
    on = machine(torch.device("cpu"), Path(tempfile.gettempdir()))
    sizes = {"chunks": arguments.chunks, "fetches": arguments.fetches}
    document = {"machine": on, **sizes, "results": results}
    publish(arguments.out, "tier-slots-cpu", document, report, plot)


if __name__ == "__main__":
    main()
