"""Load on prompts of passages: simultaneous clients in threads, and batches of prompts."""

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
    """Streamer that records the time of each token."""

    def __init__(self) -> None:
        self.at: list[float] = []  # times of the prompt and of each token

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def serve(
    model: PreTrainedModel, store: KVStore, method: Method, prompts: list[torch.Tensor], clients: int, tokens: int
) -> dict[str, Any]:
    """Measure clients that share one model: each sends a request in its own thread after its previous answer.

    Args:
        model: Model of all clients.
        store: Store of all clients.
        method: Method of the caches.
        prompts: Prompts, int `[1, n]` each; the next free client takes the next one.
        clients: Number of clients.
        tokens: Number of tokens in each answer.
    """
    queue: SimpleQueue[torch.Tensor] = SimpleQueue()
    for ids in prompts:
        queue.put(ids)
    ready = threading.Barrier(clients + 1)

    def client() -> list[dict[str, float]]:
        client_rows = []
        ready.wait()
        while True:
            try:
                ids = queue.get_nowait()
            except Empty:
                return client_rows
            streamer, start = _FirstToken(), time.perf_counter()
            cache = TieredCache(model, store, method=method, record=False)
            options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "streamer": streamer}
            answer = model.generate(ids, past_key_values=cache, **options)
            decoded = answer.shape[1] - ids.shape[1] - 1  # the first token is the prompt's pass
            client_rows.append(
                {
                    "ttft_s": streamer.at[1] - start,
                    "took_s": time.perf_counter() - start,
                    "computed": _computed(cache, decoded) / ids.numel(),
                }
            )

    with ThreadPoolExecutor(clients) as threads:
        futures = [threads.submit(client) for _ in range(clients)]
        ready.wait()
        started = time.perf_counter()
        rows = [row for future in futures for row in future.result()]
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


def one_at_a_time(single: dict[str, Any], clients: int) -> dict[str, float]:
    """Simulate a queue in which each of `clients` requests waits for the previous answer.

    Args:
        single: Result of `serve` for one client.
        clients: Number of clients.
    """
    answer_s = statistics.fmean(row["took_s"] for row in single["rows"])
    return {"ttft_median_s": (clients - 1) * answer_s + single["ttft_median_s"], "requests_per_s": 1 / answer_s}


def batch(model: PreTrainedModel, store: KVStore, method: Method, prompts: list[torch.Tensor]) -> dict[str, Any]:
    """Measure prompts `[1, n]` in one batch: time to first token, and share of tokens that a layer computes."""
    ids = torch.cat(prompts)
    cache = TieredCache(model, store, method=method, record=False)
    took = first_token(model, ids, lambda: cache)
    return {"batch": len(ids), "ttft_s": took, "computed": _computed(cache) / ids.numel()}


def _computed(cache: TieredCache, decoded: int = 0) -> float:
    """Return the prompt tokens that a layer computed, mean over the layers, without decoded tokens."""
    return cache.stats.tokens_computed + cache.stats.tokens_recomputed - decoded


# --- telling


def tables(result: dict[str, Any]) -> str:
    """Format the tables of clients and batches, as far as they were measured."""
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
