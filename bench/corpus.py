"""Speed of storing a corpus of passages: tokens per second, one at a time and batched, with and without ranking.

    python bench/corpus.py                                   # 1,000 passages, Qwen2.5-0.5B's shape with four layers
    python bench/corpus.py --model eval/reference/xs --passages 200

Each turn stores the corpus in a new store. For the ranking `context`, each passage is computed a second time, without
the lead text.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import SHAPES, build, interleaved, load, median, parser_of
from lib.pages import machine, machine_text, save, table

from hf_tiered_cache import KVStore
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.operations.contents import BATCH_TOKENS
from hf_tiered_cache.passages.ranking import Ranking
from hf_tiered_cache.store.geometry import HASH_TOKENS

RANKINGS: dict[str, Ranking] = {"not ranked": "random", "by energy": "low_frequency", "by context": "context"}
"""The random ranking takes no time."""


def lengths(least: int, most: int, count: int) -> list[int]:
    """Draw the numbers of tokens of the passages, uniformly between two bounds."""
    return np.random.default_rng(0).integers(least, most + 1, count).tolist()


def passages_of(tokens: list[int], vocabulary: int) -> list[torch.Tensor]:
    """Draw random passages."""
    random = np.random.default_rng(1)
    return [torch.from_numpy(random.integers(3, vocabulary, count)) for count in tokens]


def measure(arguments: argparse.Namespace, model: torch.nn.Module, passages: list[torch.Tensor]) -> dict[str, Any]:
    """Measure the seconds of each turn, by ranking and batch size."""

    def store(ranking: Ranking, batch_tokens: int) -> float:
        method = CacheTune(ranking=ranking)
        with tempfile.TemporaryDirectory(dir=arguments.store) as folder, KVStore(folder) as opened:
            started = time.perf_counter()
            report = opened.precompute(
                model, passages, passages=True, method=method, batch_tokens=batch_tokens, progress=False
            )
            took = time.perf_counter() - started
            assert report.stored == sum(len(passage) // HASH_TOKENS * HASH_TOKENS for passage in passages), report
            return took

    batched: list[int] = arguments.batch_tokens
    ways = {
        (name, batch_limit): (ranking, batch_limit) for name, ranking in RANKINGS.items() for batch_limit in batched
    }
    actions = {f"{name}, {batch_limit}": lambda way=way: store(*way) for (name, batch_limit), way in ways.items()}  # type: ignore[misc]
    return interleaved(actions, arguments.repeats, warm_up=0)


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, tokens, rows = document["machine"], document["tokens"], []
    for name in RANKINGS:
        speeds = [
            tokens / median(document["seconds"][f"{name}, {batch_limit}"]) for batch_limit in document["batch_tokens"]
        ]
        rows.append([name, *(f"{speed:,.0f}" for speed in speeds), f"{speeds[-1] / speeds[0]:.2f} ×"])
    wide = [
        "one at a time" if batch_limit == 1 else f"{batch_limit:,} tokens" for batch_limit in document["batch_tokens"]
    ]
    return f"""# Storing a corpus of passages, {document["model"]}

{document["passages"]:,} passages of {document["least"]} to {document["most"]} tokens, {tokens:,} in all; float32.
{machine_text(machine_info)} Load average {document["load"]:.1f}.

Tokens of the corpus per second, medians of {document["repeats"]}. Passages of one length are computed together, up to
the number of tokens in the heading.

{table(["ranking", *wide, "last ÷ first"], rows)}
"""


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=4, help="number of layers of a shape")
    parser.add_argument("--passages", type=int, default=1000, help="number of passages")
    parser.add_argument("--tokens", default="256,512", help="minimum and maximum number of tokens in a passage")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        nargs="+",
        default=[1, BATCH_TOKENS],
        help="maximum numbers of tokens that are computed together",
    )
    parser.add_argument("--repeats", type=int, default=1, help="number of turns")
    parser.add_argument("--store", default=None, help="parent folder of the stores, which are removed at the end")
    arguments = parser.parse_args()
    cpu, shape = torch.device("cpu"), arguments.model in SHAPES
    model = (
        build(arguments.model, torch.float32, cpu, layers=arguments.layers)
        if shape
        else load(Path(arguments.model), torch.float32, cpu)
    )
    least, most = map(int, arguments.tokens.split(","))
    passages = passages_of(lengths(least, most, arguments.passages), model.config.vocab_size)
    seconds = measure(arguments, model, passages)
    name = f"{arguments.model}-{arguments.layers}l" if shape else Path(arguments.model).name
    document = {
        "machine": machine(cpu, Path(arguments.store or tempfile.gettempdir())),
        "load": os.getloadavg()[0],
        "model": name,
        "passages": len(passages),
        "tokens": sum(map(len, passages)),
        "least": least,
        "most": most,
        "batch_tokens": arguments.batch_tokens,
        "repeats": arguments.repeats,
        "seconds": seconds,
    }
    save(arguments.out, f"corpus-{name}-float32-cpu", document, report(document))


if __name__ == "__main__":
    main()
