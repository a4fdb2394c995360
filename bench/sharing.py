"""One copy of stored KV for all processes of a machine: memory savings and cost in time.

    python bench/sharing.py                                             # 4 processes, Qwen2.5-0.5B's shape, 6 layers
    python bench/sharing.py --shape tiny --layers 2 --prompts 2 --tokens 64 --processes 2 --repeats 1

N processes request the same prompts simultaneously, each in its own order, with one thread each. *Own copies*: each
process keeps all KV in its own host memory. *Page cache*: `KVStore(engine="page_cache", host_memory=0)`. *Disk*: no
process keeps KV. Each turn starts new processes; a first round, which fills memory, is not counted. Memory is the
growth of the processes after loading the model, and the store's files in the kernel's page cache. Weights are random.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import add_size, build, first_token, forget_page_cache, interleaved, median, parser_of, ratio
from lib.pages import machine, machine_text, publish, table

from hf_tiered_cache import KVStore, TieredCache

OWN, SHARED, DISK = "own copies", "page cache", "disk"
SUFFIX = 32
"""Number of new tokens after those of a prompt that are stored."""
ROUNDS = 2
"""Number of measured rounds through all prompts."""


def resident_bytes(folder: Path) -> int:
    """Return the bytes of the store's files in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)  # an address; nothing is read
            pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            status = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)), pages)
            del view
            if status:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            total += sum(page & 1 for page in pages) * mmap.PAGESIZE
    return total


def own_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) << 10


class Bench:
    """Model that each process builds, and a store on disk."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        model = self.model()
        with KVStore(folder, host_memory=0) as store:
            store.precompute(model, [ids[0, :-SUFFIX] for ids in self.prompts(model)], progress=False)
            self.kv_bytes = sum(row.nbytes for row in store.segments())

    def model(self) -> Any:
        """Build the model."""
        return build(self.arguments.shape, torch.float32, torch.device("cpu"), layers=self.arguments.layers or None)

    def prompts(self, model: Any) -> list[torch.Tensor]:
        """Draw the prompts, the same in all processes."""
        random = torch.Generator().manual_seed(7)
        size = (1, self.arguments.tokens + SUFFIX)
        return [
            torch.randint(3, model.config.vocab_size, size, generator=random) for _ in range(self.arguments.prompts)
        ]

    def store(self, way: str) -> KVStore:
        """Open the store of a variant."""
        return KVStore(
            self.folder,
            host_memory=2 * self.kv_bytes if way == OWN else 0,
            engine="page_cache" if way == SHARED else "posix",
        )

    def turn(self, way: str) -> dict[str, Any]:
        """Start the processes, and return their figures."""
        forget_page_cache(self.folder)
        spawning = multiprocessing.get_context("forkserver")  # modules are imported once, and not for each process
        spawning.set_forkserver_preload([__name__, "hf_tiered_cache", "transformers"])
        gate, answers = spawning.Barrier(self.arguments.processes), spawning.Queue()
        workers = [
            spawning.Process(target=work, args=(self, way, number, gate, answers))
            for number in range(self.arguments.processes)
        ]
        for worker in workers:
            worker.start()
        worker_results = [answers.get(timeout=600) for _ in workers]
        for worker in workers:
            worker.join()
        cached = resident_bytes(self.folder)
        own_total = sum(result["own_bytes"] for result in worker_results)
        seconds = [duration for result in worker_results for duration in result["first_token_s"]]
        return {
            "first_token_s": median(seconds),
            "requests_per_s": len(seconds) / max(result["seconds"] for result in worker_results),
            "own_bytes": own_total,
            "page_cache_bytes": cached,
            "bytes": own_total + cached,
        }


def work(bench: Bench, way: str, number: int, gate: Any, answers: Any) -> None:
    """Run the requests of one process."""
    torch.set_num_threads(1)
    model = bench.model()
    prompts = bench.prompts(model)
    model.generate(prompts[0], max_new_tokens=1, do_sample=False)
    random = torch.Generator().manual_seed(number)
    with bench.store(way) as store:
        bytes_before = own_bytes()
        times: list[float] = []
        for turn in range(1 + ROUNDS):
            gate.wait()
            if turn == 1:
                times, started = [], time.perf_counter()
            for index in torch.randperm(len(prompts), generator=random).tolist():
                cache = TieredCache(model, store, record=False)
                times.append(first_token(model, prompts[index], lambda cache=cache: cache))
                assert cache.stats.tokens_restored >= bench.arguments.tokens // 16 * 16, "nothing was restored"
                del cache
        took = time.perf_counter() - started
        answers.put({"first_token_s": times, "seconds": took, "own_bytes": own_bytes() - bytes_before})
        gate.wait()  # all processes stay until the last one is measured


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    options, machine_info = document["arguments"], document["machine"]
    ways, mib = document["ways"], 1 << 20
    rows = [
        [
            way,
            f"{median(turn['bytes'] for turn in turns) / mib:,.0f}",
            f"{median(turn['own_bytes'] for turn in turns) / mib:,.0f}",
            f"{median(turn['page_cache_bytes'] for turn in turns) / mib:,.0f}",
            f"{1e3 * median(turn['first_token_s'] for turn in turns):,.0f}",
            f"{document['first_token_over_own'][way]:.2f} ×",
            f"{median(turn['requests_per_s'] for turn in turns):.1f}",
        ]
        for way, turns in ways.items()
    ]
    headings = ["", "memory, MiB", "own", "page cache", "first token, ms", "÷ own copies", "requests / s"]
    return (
        f"# One copy for {options['processes']} processes, {options['shape']} in float32 on CPU\n\n"
        f"{machine_text(machine_info)} {options['layers'] or 'All'} layers; {options['prompts']} prompts of "
        f"{options['tokens']:,} stored tokens, {document['kv_bytes'] / mib:,.0f} MiB of KV, and "
        f"{SUFFIX} new tokens. Each process requests each prompt {ROUNDS} times after a round "
        f"that fills memory. Medians of {options['repeats']} turns. Random weights.\n\n"
        + table(headings, rows)
        + "\n*Memory*: growth of all processes after loading the "
        "model, and the store's files in the kernel's page cache. *÷ own copies*: median of the ratios within a turn.\n"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_size(parser, layers=6)
    parser.add_argument("--folder", type=Path, help="parent folder of the store (default: a temporary one)")
    parser.add_argument("--processes", type=int, default=4, help="number of processes")
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=2048, help="number of stored tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3, help="number of turns, each with new processes")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        bench = Bench(arguments, folder)
        ways = interleaved({way: partial(bench.turn, way) for way in (OWN, SHARED, DISK)}, arguments.repeats, warm_up=0)
        times = {way: [turn["first_token_s"] for turn in turns] for way, turns in ways.items()}
        document = {
            "arguments": {key: value for key, value in vars(arguments).items() if key not in ("folder", "out")},
            "machine": machine(torch.device("cpu"), folder),
            "kv_bytes": bench.kv_bytes,
            "ways": ways,
            "first_token_over_own": {way: ratio(times[way], times[OWN]) for way in ways},
        }
    publish(arguments.out, f"sharing-{arguments.shape}-float32-cpu", document, report)


if __name__ == "__main__":
    main()
