"""Passages in a prompt under load: clients that ask at once, each in a thread of its own, and batches of prompts."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from lib.common import first_token
from lib.pages import table
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import Method


class _FirstToken(BaseStreamer):
    """Notes when the first token of an answer is there."""

    def __init__(self) -> None:
        self.at: list[float] = []  # of the prompt, and of each token

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def served(
    model: PreTrainedModel, store: KVStore, method: Method, prompts: list[torch.Tensor], clients: int, tokens: int
) -> dict[str, Any]:
    """What clients see that share one model: each asks in a thread of its own, again when its answer is whole.

    Args:
        store: that all ask.
        prompts: int `[1, n]` each, asked once, by whoever comes first.
        clients: how many.
        tokens: of each answer.
    """
    waiting: SimpleQueue[torch.Tensor] = SimpleQueue()
    for ids in prompts:
        waiting.put(ids)
    ready = threading.Barrier(clients + 1)

    def client() -> list[dict[str, float]]:
        found = []
        ready.wait()
        while True:
            try:
                ids = waiting.get_nowait()
            except Empty:
                return found
            noted, asked = _FirstToken(), time.perf_counter()
            cache = TieredCache(model, store, method=method, record=False)
            options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "streamer": noted}
            answer = model.generate(ids, past_key_values=cache, **options)
            decoded = answer.shape[1] - ids.shape[1] - 1  # the first token is the prompt's pass
            found.append(
                {
                    "ttft_s": noted.at[1] - asked,
                    "took_s": time.perf_counter() - asked,
                    "computed": _computed(cache, decoded) / ids.numel(),
                }
            )

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(client) for _ in range(clients)]
        ready.wait()
        started = time.perf_counter()
        rows = [row for each in running for row in each.result()]
        took = time.perf_counter() - started
    ttft = [row["ttft_s"] for row in rows]
    return {
        "clients": clients,
        "requests": len(rows),
        "ttft_median_s": statistics.median(ttft),
        "ttft_p95_s": float(np.percentile(ttft, 95)),
        "requests_per_s": len(rows) / took,
        "computed": statistics.fmean(row["computed"] for row in rows),
        "rows": rows,
    }


def one_at_a_time(alone: dict[str, Any], clients: int) -> dict[str, float]:
    """The queue, simulated: what `clients` would see if each request waited until the one before it was whole.

    Args:
        alone: what `served` found for one client.
    """
    whole = statistics.fmean(row["took_s"] for row in alone["rows"])
    return {"ttft_median_s": (clients - 1) * whole + alone["ttft_median_s"], "requests_per_s": 1 / whole}


def batch(model: PreTrainedModel, store: KVStore, method: Method, prompts: list[torch.Tensor]) -> dict[str, Any]:
    """The time to the first token of prompts `[1, n]` in one batch, and the share of tokens that a layer computes."""
    ids = torch.cat(prompts)
    cache = TieredCache(model, store, method=method, record=False)
    took = first_token(model, ids, lambda: cache)
    return {"batch": len(ids), "ttft_s": took, "computed": _computed(cache) / ids.numel()}


def _computed(cache: TieredCache, decoded: int = 0) -> float:
    """Tokens of its prompts that a layer computed, a mean over the layers, without those of passes that decoded."""
    return cache.stats.tokens_computed + cache.stats.tokens_recomputed - decoded


# --- telling


def tables(result: dict[str, Any]) -> str:
    """Of the page: what clients and batches saw, as far as it was measured."""
    text = []
    if any(result["load"].values()):
        text += [
            "## Simultaneous clients\n",
            "Passages are in memory. Each client is a thread that calls `generate()` on the same model, with a cache "
            f"of its own, for {result['decode']} tokens, and sends the next request after the answer. *Computed*: "
            "share of all tokens of the prompt. *One at a time*: a queue simulated with the times of one client, in "
            "which each request waits for the previous one. Threads share the cores. The gain over one at a time comes "
            "from not waiting for each other.\n",
            table(
                [
                    *("system", "clients", "requests", "TTFT, median, s", "p95, s", "requests/s", "computed"),
                    *("one at a time: TTFT, s", "one at a time: requests/s"),
                ],
                [
                    [
                        name,
                        str(row["clients"]),
                        str(row["requests"]),
                        f"{row['ttft_median_s']:.2f}",
                        f"{row['ttft_p95_s']:.2f}",
                        f"{row['requests_per_s']:.2f}",
                        f"{row['computed']:.1%}",
                        f"{(queue := one_at_a_time(rows[0], row['clients']))['ttft_median_s']:.2f}",
                        f"{queue['requests_per_s']:.2f}",
                    ]
                    for name, rows in result["load"].items()
                    for row in rows
                ],
            ),
        ]
    if any(result["batches"].values()):
        text += [
            "## Batches\n",
            "Passages are in memory, and each row has another prompt. Each row computes its own tokens.\n",
            table(
                ["system", "batch", "TTFT, s", "prompts/s", "computed"],
                [
                    [
                        name,
                        str(row["batch"]),
                        f"{row['ttft_s']:.2f}",
                        f"{row['batch'] / row['ttft_s']:.2f}",
                        f"{row['computed']:.1%}",
                    ]
                    for name, rows in result["batches"].items()
                    for row in rows
                ],
            ),
        ]
    return "\n".join(text)
