"""Continuous batching with and without a store: time to first token, throughput, and what a restore costs others.

    python bench/batching.py                           # Qwen2.5-0.5B's shape with four layers, 4,096 shared tokens
    python bench/batching.py --layers 0 --requests 64 --rate 4 --device cuda --dtype bfloat16

Each run has a new engine, as after a restart. Requests arrive at random times. They share a prefix, and each has tokens
of its own. In the last two runs nothing is shared. One more request decodes during each run: its intervals show what
prompts cost others.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.common import SHAPES, add_model_arguments, forget_page_cache, model_of, parser_of
from lib.pages import machine, machine_text, save, table
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_tiered_cache import KVStore, tiered

RUNS = ("engine alone", "store, cold", "store, warm host", "store, warm disk")
PRIVATE = ("engine alone, nothing shared", "store, nothing shared")
PRIVATE_TOKENS = 64
"""Number of tokens of each request alone."""
PAGE_TOKENS, BATCH_TOKENS = 16, 512
"""Tokens per page, and maximum number of tokens per pass."""
SETTLE_S = 1.0
"""Seconds before the first request of a run."""
_PAGE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"


def prompts_of(arguments: argparse.Namespace, tokens: int, shares: bool, seed: int) -> list[list[int]]:
    """Return random prompts of a vocabulary of `tokens` tokens, which share their beginning or nothing."""
    chance = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [chance.randrange(3, tokens) for _ in range(count)]

    prefix = draw(arguments.shared)
    return [(prefix if shares else draw(arguments.shared)) + draw(PRIVATE_TOKENS) for _ in range(arguments.requests)]


def run(model: Any, arguments: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Serve the prompts with a new engine, and return times in seconds."""
    longest = max(map(len, prompts)) + arguments.tokens
    pages = -(-(longest * (arguments.requests + 1) + 4096) // PAGE_TOKENS)
    config = {_PAGE: PAGE_TOKENS, "num_blocks": pages, "max_batch_tokens": BATCH_TOKENS}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(eos_token_id=-1, do_sample=False, max_new_tokens=arguments.tokens),
        continuous_batching_config=ContinuousBatchingConfig(**config),
    )
    chance, outputs = random.Random(1), {}
    manager.start()
    try:
        decoding = manager.add_request([5] * 32, max_new_tokens=4000, eos_token_id=-1, record_timestamps=True)
        time.sleep(SETTLE_S)
        start_time = time.perf_counter()
        for ids in prompts:
            manager.add_request(ids, max_new_tokens=arguments.tokens, eos_token_id=-1, record_timestamps=True)
            time.sleep(chance.expovariate(arguments.rate))
        while len(outputs) < len(prompts):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished() and output.request_id != decoding:
                assert output.error is None, output.error
                outputs[output.request_id] = output
        seconds = time.perf_counter() - start_time
        state = manager.batch_processor.scheduler.active_requests.get(decoding)
        stamps = list(state.timestamps or []) if state is not None else []
        manager.cancel_request(decoding)
    finally:
        manager.stop(block=True)
    return {
        "first_token": sorted(output.timestamps[0] - output.created_time for output in outputs.values()),
        "seconds": seconds,
        "tokens": sum(map(len, prompts)) + arguments.tokens * len(prompts),
        "intervals": intervals(stamps, [(o.created_time, o.timestamps[0]) for o in outputs.values()]),
        "answers": [outputs[name].generated_tokens for name in sorted(outputs)],
    }


def intervals(stamps: list[float], spans: list[tuple[float, float]]) -> dict[str, float]:
    """Return the median interval between tokens of the decoding request: while prompts are computed, and otherwise."""
    during, otherwise = [], []
    for before, after in itertools.pairwise(stamps):
        is_during = any(begin < after and before < end for begin, end in spans)
        (during if is_during else otherwise).append(after - before)
    return {
        "during": statistics.median(during) if during else 0.0,
        "otherwise": statistics.median(otherwise) if otherwise else 0.0,
    }


def measure(arguments: argparse.Namespace, model: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the results of all runs, by name. In every other turn the engine alone comes last."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in (*RUNS, *PRIVATE)}
    for turn in range(arguments.repeats):
        for shares, alone in ((True, RUNS[0]), (False, PRIVATE[0])):
            prompts = prompts_of(arguments, model.config.vocab_size, shares, turn + 100 * shares)
            actions = [
                lambda alone=alone, prompts=prompts: {alone: run(model, arguments, prompts)},
                lambda shares=shares, turn=turn, prompts=prompts: with_store(
                    arguments, model, folder / f"{turn}-{shares}", prompts, RUNS[1:] if shares else PRIVATE[1:]
                ),
            ]
            for action in actions[:: -1 if turn % 2 else 1]:
                for name, result in action().items():
                    results[name].append(result)
        expected = results[RUNS[0]][-1]["answers"]
        assert all(results[name][-1]["answers"] == expected for name in RUNS) or arguments.dtype != "float32"
    return results


def with_store(
    arguments: argparse.Namespace, model: Any, folder: Path, prompts: list[list[int]], names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return the results of runs with a new store: cold, and then from host memory and from disk if these are named."""
    results = {}
    for run_names in filter(None, (names[:2], names[2:])):
        forget_page_cache(folder)
        with KVStore(folder, host_memory="4GiB") as store, tiered(model, store):
            for name in run_names:
                results[name] = run(model, arguments, prompts)
                store.flush()
    return results


def quantile(values: list[float], share: float) -> float:
    """Return the value that a share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(document: dict[str, Any]) -> str:
    """Return the page of results."""
    rows = []
    for name, runs in document["runs"].items():
        first_tokens = [seconds for result in runs for seconds in result["first_token"]]
        speed = statistics.median(result["tokens"] / result["seconds"] for result in runs)
        during = statistics.median(result["intervals"]["during"] for result in runs)
        otherwise = statistics.median(result["intervals"]["otherwise"] for result in runs)
        rows.append(
            [
                name,
                *(f"{quantile(first_tokens, share):.3f} s" for share in (0.5, 0.95)),
                f"{speed:,.0f}",
                f"{1e3 * during:.1f} ms",
                f"{1e3 * otherwise:.1f} ms",
            ]
        )
    heads = ["run", "first token, p50", "first token, p95", "tokens/s", "interval, prompts", "interval, otherwise"]
    return f"""# Continuous batching, {document["model"]}

{document["requests"]} requests with {document["shared"]:,} shared and {document["private"]} own tokens each,
{document["new"]} generated tokens, {document["rate"]} requests per second, medians of {document["repeats"]} runs.
{machine_text(document["machine"])} Load average {document["load"]:.1f}.

Each run has a new engine. Tokens per second include the prompts. The interval is that between tokens of one request
that decodes during the run: while prompts wait for their first token, and otherwise.

{table(heads, rows)}
"""


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_model_arguments(parser, layers=4)
    parser.add_argument("--requests", type=int, default=16, help="number of requests per run")
    parser.add_argument("--shared", type=int, default=4096, help="number of shared tokens")
    parser.add_argument("--tokens", type=int, default=16, help="number of generated tokens")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--repeats", type=int, default=3, help="number of turns")
    arguments = parser.parse_args()
    model = model_of(arguments)
    device = model.device
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(arguments, model, Path(folder))
        layers = arguments.layers or SHAPES[arguments.shape]["num_hidden_layers"]
        name = f"{arguments.shape}-{layers}l-{arguments.dtype}-{device.type}"
        document = {
            "machine": machine(device, Path(folder)),
            "load": os.getloadavg()[0],
            "model": name,
            "dtype": arguments.dtype,
            "requests": arguments.requests,
            "shared": arguments.shared,
            "private": PRIVATE_TOKENS,
            "new": arguments.tokens,
            "rate": arguments.rate,
            "repeats": arguments.repeats,
            "runs": {
                run_name: [{key: value for key, value in result.items() if key != "answers"} for result in runs]
                for run_name, runs in results.items()
            },
        }
    save(arguments.out, f"batching-{name}", document, report(document))


if __name__ == "__main__":
    main()
