"""Measure how long a remote with many segments takes to answer look-ups and to be listed, and the memory of clients.

    python bench/remote_segments.py                      # 100,000 segments; 10,000 behind the S3-compatible gateway
    python bench/remote_segments.py --engines redis --segments 20000 --listed 20000
    python bench/remote_segments.py --engines mooncake,s3 --keep    # add to the results of other engines

Segments have 16 tokens of a made-up model, since only their number matters: an object of 12 KiB each, and a look-up
entry of 4 KiB. Several threads write them through the interface of the backends. Look-ups are of prompts of 1,024
tokens that were not looked up before. Commands run in processes of their own. They read every segment, one after the
other, so they run when a few (--listed) are stored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import median, parser_of
from lib.pages import machine, machine_text, plain_ticks, save, table
from remote import start
from tqdm.auto import tqdm

from hf_tiered_cache.remote.entries import encode_entry
from hf_tiered_cache.remote.link import Breaker, LookUps
from hf_tiered_cache.store import HASH_BYTES
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.container import Guard, block_digests
from hf_tiered_cache.store.format import SegmentHeader, encode_head, lay_out, segment_id
from hf_tiered_cache.store.geometry import HASH_TOKENS, Geometry, KVLayout, LayerKV
from hf_tiered_cache.store.kinds import SEGMENT_SUFFIX
from hf_tiered_cache.store.objects import ObjectBackend
from hf_tiered_cache.store.shape import SegmentShape

sys.path.append(str(Path(__file__).parents[1] / "tests" / "lib"))
from remote_servers import MissingServerError

ENGINES = ("redis", "file", "mooncake", "s3")
PROMPT_HASHES = 64
"""Number of prefix hashes of a prompt of 1,024 tokens."""
LOOK_UPS = 50
WRITERS = 16
SHAPE = SegmentShape(KVLayout((LayerKV(1, 8, 1, 8),), torch.float32), Geometry(), HASH_TOKENS)
PARENT = bytes(HASH_BYTES)
_LIMIT = 60.0
_COMMAND = """
import sys, time
from pathlib import Path
def most_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
sys.argv = sys.argv[:1]
import hf_tiered_cache.kvstore
from hf_tiered_cache.cli import main
before, began = most_memory(), time.perf_counter()
sys.argv += {arguments!r}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("", time.perf_counter() - began, before, most_memory(), file=sys.stderr)
"""
MEASURES = {
    "hit": "look up a prompt whose beginning is stored",
    "miss": "look up a prompt of which nothing is stored",
    "names": "list the names of all segments",
    "ls": "`hf-tiered-cache ls --json`, which reads every header",
    "gc": "`hf-tiered-cache gc --dry-run`, which also reads every look-up entry",
}


def objects(number: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of the objects of a segment: the segment itself, and then its look-up entry."""
    prefix_hash = hash_of(number)
    name = segment_id(PARENT, prefix_hash, SHAPE, "exact")
    header = lay_out(SegmentHeader(name, "model", SHAPE, PARENT, 0, created=time.time()), 1)
    blocks = [
        torch.full((SHAPE.chunks_in(group), group.block_bytes), number % 251, dtype=torch.uint8)
        for group in SHAPE.block_groups
    ]
    digests = np.concatenate([block_digests(group) for group in blocks])
    head = encode_head(header, [prefix_hash], digests, Guard())
    content = b"".join([head, *(group.numpy().tobytes() for group in blocks)]).ljust(header.file_bytes, b"\0")
    yield f"segments/{name}{SEGMENT_SUFFIX}", content
    yield f"prefixes/{prefix_hash.hex()}", encode_entry(head)


def hash_of(number: int) -> bytes:
    """Return the prefix hash of a stored segment, or of a prompt that is not stored if the number is negative."""
    return hashlib.blake2b(str(number).encode(), digest_size=HASH_BYTES).digest()


def prompt_of(number: int, hits: bool) -> list[str]:
    """Return the prefix hashes of a prompt of 1,024 tokens, in hexadecimal digits.

    Args:
        number: Number of a stored segment.
        hits: Whether the prompt begins with this segment.
    """
    first = 2 * PROMPT_HASHES * number + PROMPT_HASHES * hits + 1
    other_hashes = [hash_of(-first - at) for at in range(PROMPT_HASHES)]
    return [prefix_hash.hex() for prefix_hash in ([hash_of(number)] if hits else []) + other_hashes][:PROMPT_HASHES]


def fill(remote: ObjectBackend, numbers: range) -> float:
    """Write the segments of these numbers with their look-up entries, and return the seconds."""

    def write(number: int) -> None:
        for name, content in objects(number):
            remote.put_object(name, content, replace=True)

    start_time = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in tqdm(pool.map(write, numbers), total=len(numbers), unit="segment", mininterval=2):
            pass
    return time.perf_counter() - start_time


def look_up(remote: ObjectBackend, segments: int) -> dict[str, list[float]]:
    """Return the seconds of look-ups that hit and miss, in turns, as a store does them, and the memory they need."""
    errors: list[object] = []

    def failed(_: Breaker, error: object) -> None:
        errors.append(error)

    times: dict[str, list[float]] = {"hit": [], "miss": []}
    with closing(LookUps(remote, failed)) as look_ups:
        before = _memory()
        for number in np.random.default_rng(0).choice(segments, min(segments, LOOK_UPS), replace=False):
            for measure in times:
                names = prompt_of(int(number), measure == "hit")
                start_time = time.perf_counter()
                entries = look_ups.find(names, _LIMIT)
                times[measure].append(time.perf_counter() - start_time)
                assert len(entries) == (measure == "hit"), (measure, entries, errors)
        times["memory"] = [_memory() - before]
    return times


def _memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def command(*arguments: str) -> dict[str, float]:
    """Run a command. Returns its seconds without imports, and the bytes of memory that it needed beyond them."""
    code = _COMMAND.format(arguments=arguments)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
        env=environment,
    )
    seconds, before, most = map(float, process.stderr.split()[-3:])
    return {"seconds": seconds, "memory": most - before}


def measure(engine: str, segments: int, listed: int, folder: Path) -> dict[str, Any]:
    """Return the results of an engine. Commands that list it run when `listed` segments are stored.

    Raises:
        MissingServerError: Its server is not installed.
    """
    result: dict[str, Any] = {"engine": engine, "segments": segments, "listed": listed}
    with ExitStack() as stack:
        address, environment = f"file://{folder / engine}", {}
        if engine != "file":
            address, environment = start(engine, folder / engine, stack, segments * 32 << 10)
        os.environ.update(environment)
        with closing(open_remote(address)) as remote:
            print(f"{engine}: writing {segments} segments", flush=True)
            write_s = fill(remote, range(listed))
            for name, arguments in {"ls": ("ls", address, "--json"), "gc": ("gc", address, "--dry-run")}.items():
                print(f"{engine}: {name}", flush=True)
                figures = command(*arguments)
                result |= {name: [figures["seconds"]], f"{name}_memory": figures["memory"]}
            result["write_s"] = write_s + fill(remote, range(listed, segments))
            result |= look_up(remote, segments)
            start_time = time.perf_counter()
            assert len(remote.names()) == segments
            result["names"] = [time.perf_counter() - start_time]
    return result


def report(document: dict[str, Any]) -> str:
    """Return the page of results."""
    results = document["results"]
    heads = [f"{result['engine']}, {result['segments']:,} segments" for result in results]
    rows = [["write all, per second", *(f"{r['segments'] / r['write_s']:,.0f}" for r in results)]]
    rows += [[text, *(_shown(result[name]) for result in results)] for name, text in MEASURES.items()]
    rows.append(["segments when the commands run", *(f"{result['listed']:,}" for result in results)])
    rows.append(["commit", *(result["commit"] for result in results)])
    memory = {"memory": "look-ups", "ls_memory": "`ls`", "gc_memory": "`gc`"}
    for name, text in memory.items():
        rows.append([f"memory of {text}", *(f"{_single(result[name]) / 2**20:.0f} MiB" for result in results)])
    notes = "".join(f"- {engine} was not measured: {reason}\n" for engine, reason in document["missing"].items())
    return f"""# Remotes with many segments

{machine_text(document["machine"])} Servers are processes on this computer, in the loopback network. Segments have
{HASH_TOKENS} tokens, and prompts {PROMPT_HASHES * HASH_TOKENS:,}. Look-ups are medians of {LOOK_UPS}, with the 95th
percentile in parentheses. Listings are measured once. Commands read every segment, one after the other, and run when
fewer are stored. Their times and memory are those beyond importing the library.

{notes}
{table(["", *heads], rows)}
![times](remote-segments-cpu.png)
"""


def _single(value: float | list[float]) -> float:
    return value[0] if isinstance(value, list) else value


def _shown(times: list[float]) -> str:
    def text(seconds: float) -> str:
        return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"

    return text(median(times)) + (f" ({text(float(np.percentile(times, 95)))})" if len(times) > 1 else "")


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Draw the medians of all measures by engine."""
    figure, axes = plt.subplots(figsize=(7.5, 3))
    labels = {"hit": "look-up, hit", "miss": "look-up, miss", "names": "names of all segments", "ls": "ls", "gc": "gc"}
    for result in document["results"]:
        listed = f", ls and gc of {result['listed']:,}"
        times = [median(result[name]) for name in MEASURES]
        label = f"{result['engine']}: {result['segments']:,} segments{listed}"
        axes.plot(times, [labels[name] for name in MEASURES], "o", label=label)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="seconds, median")
    plain_ticks(axes.xaxis)
    axes.grid(axis="y", color="0.9")
    figure.legend(loc="outside upper center")
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--segments", type=int, default=100_000, help="number of segments")
    parser.add_argument("--s3-segments", type=int, default=10_000, help="the same for s3, which takes longer to fill")
    parser.add_argument("--listed", type=int, default=500, help="number of segments when ls and gc run")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--keep", action="store_true", help="keep the results of other engines that are in --out")
    parser.add_argument("--folder", type=Path, help="parent folder of the servers' data (default: a temporary one)")
    arguments: argparse.Namespace = parser.parse_args()
    engines, results, missing_engines = arguments.engines.split(","), [], {}
    if arguments.keep:
        earlier_results = json.loads((arguments.out / "remote-segments-cpu.json").read_text())["results"]
        results = [result for result in earlier_results if result["engine"] not in engines]
    with tempfile.TemporaryDirectory(prefix="bench-remote-", dir=arguments.folder) as path:
        on = machine(torch.device("cpu"), Path(path))
        for engine in engines:
            segments = min(arguments.segments, arguments.s3_segments) if engine == "s3" else arguments.segments
            try:
                measurement = measure(engine, segments, min(segments, arguments.listed), Path(path))
                results.append(measurement | {"commit": on["commit"]})
            except MissingServerError as error:
                missing_engines[engine] = str(error)
            document = {"machine": on, "missing": missing_engines, "results": results}
            save(arguments.out, "remote-segments-cpu", document, report(document), plot)
    print(report(document))


if __name__ == "__main__":
    main()
