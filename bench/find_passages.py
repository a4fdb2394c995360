"""Time to find stored passages in a prompt, step by step, compared with a hash in Python at every token.

    python bench/find_passages.py          # prompts of 31,000 tokens, stores of 60 and of 1,000 passages

No KV is read: the model is tiny, and only hashes matter. Times are those of one thread, best and median of many turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import build, listed, median, parser_of
from lib.pages import machine, machine_text, save, table
from tqdm.auto import tqdm

from hf_tiered_cache import KVStore
from hf_tiered_cache.cache.cache_state import CacheOptions
from hf_tiered_cache.cache.stored_cache import StoredCache
from hf_tiered_cache.identity import Fingerprinter, rope_regime
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.methods.passages import sink_token
from hf_tiered_cache.passages.finder import find_passages

STEPS = {
    "scan": "scan hashes of the prompt, at every token",
    "index": "lookup of the scan hashes",
    "found": "everything: both steps, merging, and comparison of the hashes of 16 tokens",
    "matched": "the same within a request, with prefix lookup, opening segments and reading scores",
    "before": "hash of 16 tokens at every token, in a Python loop",
}


class Bench:
    """Store of passages, and prompts with and without them."""

    def __init__(self, arguments: argparse.Namespace, passages: int, folder: Path) -> None:
        self.arguments = arguments
        device = torch.device("cpu")
        self.model = build("tiny", torch.float32, device, layers=1)
        random, vocabulary = np.random.default_rng(0), self.model.config.vocab_size
        pool = [torch.from_numpy(random.integers(3, vocabulary, arguments.tokens)) for _ in range(passages)]
        self.store = KVStore(folder, host_memory=0, engine="posix")
        self.store.precompute(self.model, pool, passages=True)
        size = arguments.prompt
        parts = itertools.chain.from_iterable(
            (torch.from_numpy(random.integers(3, vocabulary, 5)), pool[i])
            for i in random.permutation(passages)[: size // arguments.tokens]
        )
        random_tokens = torch.from_numpy(random.integers(3, vocabulary, size))
        passage_tokens = torch.cat(list(parts))[:size]
        self.prompts = {
            "full of passages": torch.cat([passage_tokens, random_tokens[len(passage_tokens) :]]),
            "without any": random_tokens,
        }

    def measure(self) -> dict[str, Any]:
        """Return the number of passages and the seconds of each step, by prompt."""
        return {name: self._measure(ids) for name, ids in self.prompts.items()}

    def _measure(self, ids: torch.Tensor) -> dict[str, Any]:
        storage, method, config = storage_of(self.store), CacheTune(), self.model.config
        regime = rope_regime(config, len(ids)) or ""
        fingerprint = Fingerprinter(self.model)()
        hasher = storage.passage_hasher(fingerprint, method.passages, sink_token(config), regime)
        tokens, hashes = ids.numpy(), hasher.scan(ids.numpy())
        matches = find_passages(tokens, hasher, storage.passage_index.seeds)

        def match() -> float:
            cache = StoredCache.over(self.model, storage, method, CacheOptions(record=False))
            cache.look_up(ids.unsqueeze(0))
            return cache.stats.details.match_seconds

        def before() -> None:
            for at in range(len(tokens) - 15):
                hasher.hashes(tokens[at : at + 16])

        steps: dict[str, Callable[[], object]] = {
            "scan": lambda: hasher.scan(tokens),
            "index": lambda: storage.passage_index.seeds(hashes),
            "found": lambda: find_passages(tokens, hasher, storage.passage_index.seeds),
            "matched": match,
            "before": before,
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in tqdm(range(self.arguments.repeats), unit="turn"):
            for name, step in steps.items():
                started = time.perf_counter()
                result = step()
                times[name].append(result if isinstance(result, float) else time.perf_counter() - started)
        return {"passages": len(matches), "tokens": 16 * sum(match.num_hashes for match in matches), "seconds": times}


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    rows, machine_info = [], document["machine"]
    for passages, prompts in document["results"].items():
        for name, result in prompts.items():
            for step, description in STEPS.items():
                times = result["seconds"][step]
                cells = [passages, f"{name}, {result['tokens']:,} tokens found"] if step == "scan" else ["", ""]
                rows.append([*cells, description, f"{min(times) * 1e3:.1f} ms", f"{median(times) * 1e3:.1f} ms"])
    headings = ["passages stored", f"prompt of {document['prompt']:,} tokens", "step", "best", "median"]
    return f"""# Finding passages

{machine_text(machine_info)} Load average {document["load"]:.1f}; above
{machine_info["cores"]}, other programs were running.

{table(headings, rows)}
"""


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    sizes = [60, 1000]
    parser.add_argument("--passages", type=listed(int), default=sizes, help="numbers of passages, a store for each")
    parser.add_argument("--tokens", type=int, default=512, help="number of tokens in a passage")
    parser.add_argument("--prompt", type=int, default=31000, help="number of tokens in the prompts")
    parser.add_argument("--repeats", type=int, default=30, help="number of turns")
    parser.add_argument("--store", default=None, help="parent folder of the stores, which are removed at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench-find-", dir=arguments.store) as folder:
        machine_info = machine(torch.device("cpu"), Path(folder))
        for passages in arguments.passages:
            bench = Bench(arguments, passages, Path(folder) / str(passages))
            results[str(passages)] = bench.measure()
            bench.store.close()
    load = os.getloadavg()[0]
    document = {
        "machine": machine_info,
        "load": load,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "results": results,
    }
    save(arguments.out, "find-passages-cpu", document, report(document))


if __name__ == "__main__":
    main()
