"""Measure a store with many conversations: suspend, resume, list and clean up, and two processes that share it.

    python bench/conversations_many.py          # 10, 100 and 1,000 conversations, with Exact and Krul

One store per method grows from size to size. Conversations have one short turn of a tiny model, since only their number
matters; further turns continue conversations drawn at random. With few conversations, most turns repeat an earlier one,
so that suspending them writes nothing. A worker is a process that continues conversations of the same store. Two
workers draw from all conversations, and then from four of them only, so that they often meet: a conversation in use is
refused, and counted. All turns of a worker count, not the start of its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lib.common import build, median, parser_of
from lib.pages import machine, machine_text, publish, table
from tqdm.auto import tqdm

from hf_tiered_cache import ConversationInUseError, KVStore, TieredCache

OPENING, NEW = 64, 32
"""Tokens of the first turn, and of each later one."""
CONTESTED = 4
"""Number of conversations from which two workers draw to meet often."""
METHODS = ("exact", "krul:recompute=0.4")
MEASURES = {
    "resume": "resume: first token of a turn",
    "suspend": "suspend",
    "first suspend": "suspend a new conversation",
    "list": "`store.conversations()`",
    "gc": "`store.gc()`, nothing to collect",
    "remove": "`store.remove_conversation()`",
    "one worker": "turn of a worker, alone",
    "two workers": "turn of one of two workers",
    "two workers, contested": f"the same, {CONTESTED} conversations",
}


class Conversations:
    """Conversations of a store, which grow by turns.

    Args:
        folder: Folder of the store.
        method: Method in words.
        seed: Seed of the draws.
    """

    def __init__(self, folder: Path, method: str, seed: int = 0) -> None:
        self.folder, self.method = folder, method
        self.model = build("tiny", torch.float32, torch.device("cpu"), layers=2)
        self.generator = torch.Generator().manual_seed(seed)

    def open(self) -> KVStore:
        """Open the store."""
        return KVStore(self.folder, host_memory="16MiB", engine="posix", queue_memory="64MiB")

    def text(self, number: int) -> torch.Tensor:
        """Return the tokens of a conversation, int64 `[1, tokens]`; the same in all processes."""
        generator = torch.Generator().manual_seed(number)
        return torch.randint(3, self.model.config.vocab_size, (1, 8192), generator=generator)

    def draw(self, count: int) -> int:
        """Return a random conversation of the first `count`."""
        return int(torch.randint(0, count, (1,), generator=self.generator))

    @torch.no_grad()
    def turn(self, store: KVStore, number: int, tokens: int) -> dict[str, float]:
        """Run one turn of a conversation, up to so many tokens. Return its seconds, by step.

        Raises:
            ConversationInUseError: Another process uses it.
        """
        started = time.perf_counter()
        cache = TieredCache(self.model, store, conversation=f"user-{number}", method=self.method)
        self.model(self.text(number)[:, :tokens], past_key_values=cache, logits_to_keep=1)
        resumed = time.perf_counter()
        suspended = cache.suspend()
        assert suspended.tokens == tokens // 16 * 16 and not suspended.reason, suspended
        return {"resume": resumed - started, "suspend": time.perf_counter() - resumed}


def work(folder: str, method: str, count: str, turns: str, seed: str) -> dict[str, Any]:
    """Continue random conversations of a store in this process. Return the seconds of its turns, and the refusals."""
    torch.set_num_threads(1)
    conversations = Conversations(Path(folder), method, int(seed))
    seconds: list[float] = []
    refusal_times: list[float] = []
    with conversations.open() as store:
        for _ in range(int(turns)):
            number = conversations.draw(int(count))
            started = time.perf_counter()
            try:
                conversations.turn(store, number, OPENING + 2 * NEW)
                seconds.append(time.perf_counter() - started)
            except ConversationInUseError:
                refusal_times.append(time.perf_counter() - started)
    return {"seconds": seconds, "refused": refusal_times}


def worker(*arguments: Any) -> dict[str, Any]:
    """Run `work` in a new process."""
    folder = Path(__file__).parent
    command = [sys.executable, str(folder / "conversations_many.py"), "--work", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(folder.parent)}
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200, env=environment)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure(conversations: Conversations, before: int, count: int, repeats: int, turns: int) -> dict[str, Any]:
    """Grow a store from `before` to `count` conversations. Return its bytes, and the seconds of each measure."""
    times: dict[str, list[float]] = {name: [] for name in MEASURES}
    with conversations.open() as store:
        for number in tqdm(range(before, count), unit="conversation"):
            times["first suspend"].append(conversations.turn(store, number, OPENING)["suspend"])
        for _ in range(turns):
            step = conversations.turn(store, conversations.draw(count), OPENING + NEW)
            times["resume"].append(step["resume"])
            times["suspend"].append(step["suspend"])
        for number in range(repeats):
            times["list"].append(_seconds(store.conversations))
            times["gc"].append(_seconds(store.gc))
            extra = f"user-{count + number}"
            conversations.turn(store, count + number, OPENING)
            times["remove"].append(_seconds(lambda name=extra: store.remove_conversation(name)))
        assert len(store.conversations()) == count
    options = conversations.folder, conversations.method
    times["one worker"] = worker(*options, count, turns, 1)["seconds"]
    refusals = {}
    for name, choices in (("two workers", count), ("two workers, contested", min(count, CONTESTED))):
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda seed, choices=choices: worker(*options, choices, turns, seed), (2, 3)))
        times[name] = [seconds for result in results for seconds in result["seconds"]]
        refusals[name] = [seconds for result in results for seconds in result["refused"]]
    with conversations.open() as store:
        assert store.verify().ok
        nbytes = store.stats.disk.bytes
    return {"conversations": count, "bytes": nbytes, "seconds": times, "refused": refusals}


def _seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def report(document: dict[str, Any]) -> str:
    """Return the page."""
    parts = [
        f"# Many conversations\n\n{machine_text(document['machine'])} Conversations of {OPENING} to "
        f"{OPENING + 2 * NEW} tokens of a tiny model. Medians and 90th percentiles, in milliseconds. Workers are "
        f"processes that continue {document['turns']} random conversations each.\n"
    ]
    for method, results in document["results"].items():
        headings = ["", *(f"{result['conversations']:,} conversations" for result in results)]
        rows = [[text, *(_shown(result["seconds"][name]) for result in results)] for name, text in MEASURES.items()]
        for name, text in (("two workers", "refused, two workers"), ("two workers, contested", "refused, contested")):
            rows.append([text, *(_refused(result["refused"][name], document["turns"]) for result in results)])
        rows.append(["bytes of the store", *(f"{result['bytes'] / 2**20:.1f} MiB" for result in results)])
        parts.append(f"\n## {method}\n\n{table(headings, rows)}")
    return "".join(parts)


def _shown(seconds: list[float]) -> str:
    if not seconds:
        return "not measured"
    return f"{1e3 * median(seconds):.2f}, {1e3 * sorted(seconds)[int(0.9 * (len(seconds) - 1))]:.2f}"


def _refused(seconds: list[float], turns: int) -> str:
    return f"{len(seconds)} of {2 * turns}" + (f", {1e3 * median(seconds):.1f} ms" if seconds else "")


def main() -> None:
    """Run the benchmark, or the work of a worker."""
    parser = parser_of(__doc__)
    parser.add_argument("--conversations", default="10,100,1000", help="numbers of conversations, ascending")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--turns", type=int, default=100, help="number of turns of each measure and worker")
    parser.add_argument("--repeats", type=int, default=5, help="number of listings, collections and removals")
    parser.add_argument("--store", default=None, help="parent folder of the stores, which are removed at the end")
    parser.add_argument("--work", nargs=5, default=None, help="used by the benchmark: run a worker")
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(work(*arguments.work)))
        return
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-conversations-", dir=arguments.store) as folder:
        machine_info = machine(torch.device("cpu"), Path(folder))
        for place, method in enumerate(arguments.methods.split(",")):
            conversations, before = Conversations(Path(folder) / str(place), method), 0
            for count in map(int, arguments.conversations.split(",")):
                result = measure(conversations, before, count, arguments.repeats, arguments.turns)
                results.setdefault(method, []).append(result)
                before = count
    document = {"machine": machine_info, "turns": arguments.turns, "repeats": arguments.repeats, "results": results}
    publish(arguments.out, "conversations-many-cpu", document, report)


if __name__ == "__main__":
    main()
