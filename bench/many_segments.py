"""Measure how long a store with many segments and conversations takes to open, look up, list and clean up.

    python bench/many_segments.py          # 20,000 segments and 1,000 conversations, and a tenth and a hundredth

One store grows from size to size. Segments have 32 tokens of a tiny model, since only their number matters. Opening and
commands run in processes of their own. Opening is timed without imports, commands with them.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import build, forget_page_cache, listed, median, parser_of
from lib.pages import machine, machine_text, plain_ticks, save, table
from tqdm.auto import tqdm

from hf_tiered_cache import KVStore, TieredCache

TOKENS = 32
"""Number of tokens in a segment, which has two prefix hashes."""
MEASURES = {
    "open": "open, file cache dropped",
    "open, catalogue lost": "open after the catalogue was deleted: all headers are read",
    "hit": "look up a stored prompt",
    "miss": "look up a prompt that is not stored",
    "restore": "restore a stored prompt, including one pass of the model",
    "gc": "`store.gc()`, nothing to collect",
    "conversations": "`store.conversations()`",
    "ls": "`hf-tiered-cache ls`",
    "ls --json": "`hf-tiered-cache ls --json`",
    "gc command": "`hf-tiered-cache gc`",
    "--help": "`hf-tiered-cache --help`, which opens nothing",
}
COMMANDS = {
    "ls": ("ls", "STORE"),
    "ls --json": ("ls", "STORE", "--json"),
    "gc command": ("gc", "STORE"),
    "--help": ("--help",),
}
OPEN = """
import sys, time
from hf_tiered_cache import KVStore
started = time.perf_counter()
store = KVStore(sys.argv[1], host_memory=0, engine="posix")
print(time.perf_counter() - started)
store.close()
"""


class Bench:
    """Growing store, and the model of its KV."""

    def __init__(self, folder: Path, repeats: int) -> None:
        self.folder, self.repeats = folder, repeats
        self.model = build("tiny", torch.float32, torch.device("cpu"), layers=1)
        self.prompts = torch.empty(0, TOKENS, dtype=torch.int64)  # those stored, [segments, tokens]
        self.conversations = 0
        self._random = np.random.default_rng(0)

    def grow(self, segments: int, conversations: int) -> None:
        """Store prompts and suspend conversations until there are so many; a conversation is a segment, too."""
        with self._store() as store:
            for number in tqdm(range(self.conversations, conversations), unit="conversation"):
                with TieredCache(self.model, store, conversation=f"user-{number}") as cache, torch.no_grad():
                    self.model(self._draw(1), past_key_values=cache, logits_to_keep=1)
            new_prompts = self._draw(segments - conversations - len(self.prompts))
            store.precompute(self.model, list(new_prompts), progress=False)
            self.prompts = torch.cat([self.prompts, new_prompts])
            self.conversations = conversations

    def _draw(self, count: int) -> torch.Tensor:
        """Return random prompts, int64 `[count, tokens]`."""
        return torch.from_numpy(self._random.integers(3, self.model.config.vocab_size, (count, TOKENS)))

    def _store(self) -> KVStore:
        return KVStore(self.folder, host_memory=0, engine="posix", queue_memory="64MiB")

    def measure(self) -> dict[str, list[float]]:
        """Return the seconds of each repeat, by measure."""
        times: dict[str, list[float]] = {name: [] for name in MEASURES}
        for _ in range(self.repeats):
            times["open"].append(self._open())
            for name, arguments in COMMANDS.items():
                times[name].append(self._command(*arguments))
        with self._store() as store:
            for _ in range(self.repeats):
                times["gc"].append(_seconds(store.gc))
                times["conversations"].append(_seconds(store.conversations))
            for ids, missing_ids in zip(self._sample(), self._draw(20 * self.repeats), strict=True):
                times["hit"].append(_seconds(lambda ids=ids: store.lookup(self.model, ids)))
                times["miss"].append(_seconds(lambda ids=missing_ids: store.lookup(self.model, ids)))
                times["restore"].append(_seconds(lambda ids=ids: self._restore(store, ids)))
        for _ in range(self.repeats):
            for path in self.folder.glob("catalogue*"):
                path.unlink()
            times["open, catalogue lost"].append(self._open())
        return times

    def _sample(self) -> torch.Tensor:
        """Return stored prompts drawn at random, `[20 * repeats, tokens]`."""
        return self.prompts[torch.from_numpy(self._random.integers(0, len(self.prompts), 20 * self.repeats))]

    def _restore(self, store: KVStore, ids: torch.Tensor) -> None:
        cache = TieredCache(self.model, store, record=False)
        with torch.no_grad():
            self.model(ids.unsqueeze(0), past_key_values=cache, logits_to_keep=1)
        assert cache.stats.tokens_restored

    def _open(self) -> float:
        forget_page_cache(self.folder)
        command = [sys.executable, "-c", OPEN, str(self.folder)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=_environment())
        return float(process.stdout)

    def _command(self, *arguments: str) -> float:
        arguments = tuple(str(self.folder) if argument == "STORE" else argument for argument in arguments)
        return _seconds(
            lambda: subprocess.run(
                [sys.executable, "-m", "hf_tiered_cache.cli", *arguments],
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=600,
                env=_environment(),
            )
        )


def _environment() -> dict[str, str]:
    """Return the environment of a process that imports the code that is measured."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}


def _seconds(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def report(document: dict[str, Any]) -> str:
    """Return the page."""
    machine_info, results = document["machine"], document["results"]
    rows = [
        [description, *(_shown(result["seconds"][name]) for result in results)]
        for name, description in MEASURES.items()
    ]
    sizes = [f"{result['segments']:,} segments, {result['conversations']:,} conversations" for result in results]
    sizes_text = ", ".join(f"{result['bytes'] / 2**20:.0f} MiB" for result in results)
    return f"""# Many segments

{machine_text(machine_info)} Medians of
{document["repeats"]} repetitions ({20 * document["repeats"]} for lookups and restores). Segments of {TOKENS} tokens;
sizes of the stores: {sizes_text}.

{table(["", *sizes], rows)}
![times](many-segments-cpu.png)
"""


def _shown(times: list[float]) -> str:
    if not times:
        return "not measured"
    seconds = median(times)
    return (
        f"{1e3 * seconds:.2f} ms"
        if seconds < 0.01
        else f"{1e3 * seconds:.0f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Draw the medians over the number of segments."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True)
    sizes = [result["segments"] for result in document["results"]]
    calls = [name for name in MEASURES if name not in COMMANDS]
    for axes, title, names in zip(panels, ("in a program", "commands"), (calls, COMMANDS), strict=True):
        for name in names:
            times = [median(result["seconds"][name] or [math.nan]) for result in document["results"]]
            axes.plot(sizes, times, label=name, marker="o", markersize=4)
        axes.set(title=title, xscale="log", yscale="log", xlabel="segments in the store")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.xaxis.minorticks_off()
        axes.legend(loc="upper left", fontsize="small", ncols=2)
    plain_ticks(panels[0].yaxis)
    panels[0].set_ylim(top=1000)  # room for the legends
    panels[0].set_ylabel("seconds, median")
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    sizes = [200, 2000, 20000]
    parser.add_argument("--segments", type=listed(int), default=sizes, help="numbers of stored segments, ascending")
    parser.add_argument("--share", type=int, default=20, help="segments per conversation")
    parser.add_argument("--repeats", type=int, default=5, help="number of repetitions")
    parser.add_argument("--store", help="parent folder of the store, which is removed at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-many-", dir=arguments.store) as folder:
        machine_info = machine(torch.device("cpu"), Path(folder))
        bench = Bench(Path(folder) / "store", arguments.repeats)
        for segments in arguments.segments:
            bench.grow(segments, segments // arguments.share)
            seconds = bench.measure()
            with KVStore(bench.folder, host_memory=0, engine="posix") as store:
                stats = store.stats
            assert stats.segments == segments, stats.segments
            counts = {"segments": segments, "conversations": bench.conversations, "bytes": stats.disk.bytes}
            results.append(counts | {"seconds": seconds})
            print(segments, {name: _shown(times) for name, times in seconds.items()})
    document = {"machine": machine_info, "repeats": arguments.repeats, "tokens": TOKENS, "results": results}
    save(arguments.out, "many-segments-cpu", document, report(document), plot)


if __name__ == "__main__":
    main()
