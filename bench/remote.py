"""Restoring what another machine computed, from real servers: compared with recomputing, the local disk and memory.

    python bench/remote.py                                # Qwen2.5-0.5B's shape with four layers: some minutes
    PYTHONPATH=. python bench/remote.py --model smollm2-135m --prefixes 1024,4096,7680
    python bench/remote.py --engines redis --machines 2 --prefixes 1024

Servers and machines are processes on this computer. Each machine has a folder of its own. The first one computes a
prompt and sends it, the others restore it. Every figure is over turns that measure all variants in succession, and the
order alternates. After each request a machine forgets what it has fetched. Emulated links delay what a machine reads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import interleaved, listed, median, parser_of
from lib.machines import DISK, HOST, RECOMPUTE, SUFFIX, Machine, at_once
from lib.pages import machine, machine_text, plain_ticks, publish, table
from tqdm.auto import tqdm

from hf_tiered_cache.remote.link import SLOW
from hf_tiered_cache.remote.tier import SLOW_FETCH

sys.path.append(str(Path(__file__).parents[1] / "tests" / "lib"))
import remote_servers as servers

ENGINES = ("redis", "s3", "mooncake")
_LABELS = {DISK: "local disk, cold", HOST: "host memory", "redis": "Redis", "s3": "S3", "mooncake": "Mooncake"}
WARM_TOKENS = 512
_ROOM = 1 << 30
_MOST_TRANSFER = 30.0
"""Seconds above which a prefix is not fetched through an emulated link."""
Rows = list[dict[str, Any]]


def start(engine: str, folder: Path, stack: ExitStack, nbytes: int = _ROOM) -> tuple[str, dict[str, str]]:
    """Start the server of an engine.

    Args:
        engine: One of `ENGINES`.
        folder: Folder of the server's data, which is made.
        stack: Stops the server.
        nbytes: Room for data, where the server reserves it.

    Returns:
        Address of a place on it, and the environment of its clients.

    Raises:
        MissingServerError: It is not installed.
    """
    folder.mkdir()
    if engine == "redis":
        return f"redis://127.0.0.1:{stack.enter_context(servers.redis_server(folder)).port}", {}
    if engine == "s3":
        server = stack.enter_context(servers.s3_server(folder, max(nbytes, 8 << 30)))
        servers.make_bucket(server, "bench")
        return "s3://bench/kv", dict(servers.s3_environment(server))
    pool = stack.enter_context(servers.mooncake_server(folder, max(nbytes, _ROOM)))
    return pool.address("kv"), dict(pool.environment)


class Bench:
    """Machines, the places that they share, and the measurements.

    Args:
        arguments: Arguments of the command line.
        machines: The machines; the first one computes.
        places: Address and environment of each engine.
    """

    def __init__(
        self, arguments: argparse.Namespace, machines: list[Machine], places: dict[str, tuple[str, dict[str, str]]]
    ) -> None:
        self._arguments, self._first, self._others = arguments, machines[0], machines[1:]
        self._engines, self._linked = list(places), next(iter(places))
        self.links = {f"{rate:g} GB/s": rate * 1e9 for rate in arguments.rates}
        self._seeds = iter(range(1, 1 << 30))
        for engine, (address, environment) in places.items():
            self._first.run("open", engine, address, 0, "always", environment)
            at_once(self._others, "open", engine, address, 0, "never", environment)
        self._source, environment = places[self._linked]
        for name, rate in self.links.items():
            at_once(self._others, "open", name, self._source, rate, "never", environment)
        for peer in self._others:  # one after the other, as it is measured
            for name in (*places, *self.links):
                peer.run("warm", name, min(WARM_TOKENS, *arguments.prefixes))

    def measure(self, prefix: int) -> dict[str, Any]:
        """Return the results of a prefix length."""
        seed = next(self._seeds)
        records = {engine: self._first.run("record", engine, prefix, seed) for engine in self._engines}
        digests, nbytes = {record["digest"] for record in records.values()}, records[self._linked]["bytes"]
        assert len(digests) == 1, "the machine that computes did not compute the same bits each time"
        for peer in self._others:
            peer.run("keep", self._source, prefix, seed)
        turns = self._arguments.long_repeats if prefix > 8192 else self._arguments.repeats
        links = [name for name, rate in self.links.items() if nbytes <= _MOST_TRANSFER * rate]
        alone = [RECOMPUTE, DISK, HOST, *self._engines, *links]
        actions = {way: self._alone(way, prefix, seed) for way in alone}
        if len(self._others) > 1:
            ways = [DISK, HOST, *self._engines]
            actions |= {f"{way}, at once": self._at_once(way, prefix, seed) for way in ways}
        results_by_way = interleaved(actions, turns, note=self._note)
        rows = {way: [row for turn in results for row in turn] for way, results in results_by_way.items()}
        for way, requests in rows.items():
            for row in requests:
                assert row.get("tokens_restored", 0) in (0, prefix), (way, row)
                digest = row.pop("digest", None)
                assert not row.get("tokens_restored") or digest in digests, f"{way} restored other bits"
        return {
            "prefix": prefix,
            "bytes": nbytes,
            "turns": turns,
            "sent": {
                engine: {"compute_s": record["compute_s"], "send_s": record["send_s"]}
                for engine, record in records.items()
            },
            "requests": rows,
        }

    def _alone(self, way: str, prefix: int, seed: int) -> Callable[[], Rows]:
        """Return a measurement of one machine, another one in each turn."""
        numbers = iter(range(1 << 30))

        def measure() -> Rows:
            peer = self._others[next(numbers) % len(self._others)]
            return [peer.run("request", way, prefix, seed, next(self._seeds))]

        return measure

    def _at_once(self, way: str, prefix: int, seed: int) -> Callable[[], Rows]:
        """Return a measurement of all machines but the first, at the same time."""
        return lambda: at_once(self._others, "request", way, prefix, seed, next(self._seeds))

    @staticmethod
    def _note(way: str, rows: Rows) -> None:
        tqdm.write(f"    {way}: {', '.join(_ms(row['ttft_s']) for row in rows)}")


# --- reporting


def choice_of(row: dict[str, Any]) -> str:
    """Return what the cost model chose for a request: to fetch the prompt, or to compute it."""
    return "fetch" if row["hits"] else "compute" if {SLOW, SLOW_FETCH} & set(row["misses"]) else "late"


def link_figures(result: dict[str, Any], link: str, bytes_per_second: float) -> dict[str, Any]:
    """Return the figures of an emulated link: choices, and the ratio of the median to the best of both."""
    rows, of = result["requests"][link], result["requests"]
    took, choices = median(row["ttft_s"] for row in rows), Counter(map(choice_of, rows))
    fetching = took
    if choices["fetch"] < len(rows):  # it was not chosen each time: estimated
        fetching = result["bytes"] / bytes_per_second + _median(of[DISK])
    best = min(_median(of[RECOMPUTE]), fetching)
    return {"choices": dict(choices), "took": took, "fetching": fetching, "over_best": took / best}


def _median(rows: Rows) -> float:
    return median(row["ttft_s"] for row in rows)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def _spread(rows: Rows) -> str:
    """Return the median and the interquartile range of times to first token."""
    low, middle, high = np.percentile([row["ttft_s"] for row in rows], [25, 50, 75])
    return f"{_ms(middle)} ({_ms(low)} to {_ms(high)})"


def _engine_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for engine in document["engines"]:
        for result in document["results"]:
            of = result["requests"]
            for processes, suffix in ((2, ""), (document["machines"], ", at once")):
                if (requests := of.get(engine + suffix)) is None:
                    continue
                hits, nbytes = sum(row["hits"] for row in requests), sum(row["bytes"] for row in requests)
                rows.append([
                    engine,
                    f"{result['prefix']:,}",
                    str(processes),
                    f"{hits} of {len(requests)}",
                    f"{nbytes / 2**20:,.0f} MiB",
                    _spread(requests),
                    _ms(median(row["waiting_s"] for row in requests)),
                    _ms(_median(of[RECOMPUTE])),
                    _spread(of[DISK + suffix]),
                    _spread(of[HOST + suffix]),
                    f"{_median(of[RECOMPUTE]) / _median(requests):.1f}",
                ])  # fmt: skip
    return rows


def _link_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for link, bandwidth in document["links"].items():
        for result in document["results"]:
            if link not in result["requests"]:
                continue
            figures, requests = link_figures(result, link, bandwidth), result["requests"][link]
            speeds = [row["bytes_per_second"] for row in requests if row["bytes_per_second"]]
            rows.append([
                link,
                f"{result['prefix']:,}",
                f"{result['bytes'] / 2**20:.0f} MiB",
                f"{median(speeds) / 1e9:.3g} GB/s" if speeds else "–",
                ", ".join(f"{choice}: {count}" for choice, count in figures["choices"].items()),
                _spread(requests),
                _ms(_median(result["requests"][RECOMPUTE])),
                _ms(figures["fetching"]),
                f"{figures['over_best']:.2f}",
            ])  # fmt: skip
    return rows


def report(document: dict[str, Any]) -> str:
    """Return the page of results."""
    on, results = document["machine"], document["results"]
    notes = "".join(f"- {engine} was not measured: {reason}\n" for engine, reason in document["missing"].items())
    send_rows = [
        [
            f"{result['prefix']:,}",
            f"{result['bytes'] / 2**20:.0f} MiB",
            *(f"{_ms(record['compute_s'])}, {_ms(record['send_s'])}" for record in result["sent"].values()),
        ]
        for result in results
    ]
    return f"""# Restoring from other machines, {document["model"]} in {document["dtype"]} on CPU

{machine_text(on)} {document["weights"]} weights, suffix of {SUFFIX} tokens. Servers and machines are processes on
this computer, in the loopback network. Each machine has a folder of its own. The first one computes a prompt and sends
it. The others restored the bits that it computed, in each request. Times to first token are medians with the
interquartile range, of {", ".join(f"{r['turns']} turns at {r['prefix']:,} tokens" for r in results)}. All variants are
measured in each turn, in alternating order. A request includes the look-up, fetching to the local disk with all
checks, and restoring. Stores are opened before.

{notes}
## Engines

With 2 processes, one machine restores at a time. With {document["machines"]}, the others restore at once and share
the cores; recomputing is that of one machine alone.

{
        table(
            [
                "engine",
                "prefix",
                "processes",
                "hits",
                "fetched",
                "first token",
                "waits for the remote",
                "recompute",
                "local disk, cold",
                "local host memory",
                "recompute / remote",
            ],
            _engine_rows(document),
        )
    }
## Emulated links

A link delays what a machine reads from {document["linked"]} until its bandwidth allows it: each machine has a link of
its own, and round trips stay those of the loopback network. The measured bandwidth is that by which the cost model
decides. It includes checks and writing to the local disk. Where the model computed, fetching is estimated: the time of
the link, and restoring from the local disk. Prefixes that take a link more than {_MOST_TRANSFER:.0f} s are left out.

{
        table(
            [
                "link",
                "prefix",
                "KV",
                "measured bandwidth",
                "choice",
                "first token",
                "recompute",
                "fetch",
                "first token / best of both",
            ],
            _link_rows(document),
        )
    }
## The first machine

Seconds to compute the prompt, and to send it in the background.

{table(["prefix", "sent", *document["engines"]], send_rows)}
![times](remote-{document["name"]}.png)
"""


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Draw times to first token over the prefix length, of one machine at a time."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    results = document["results"]
    for way in (RECOMPUTE, *document["links"], *document["engines"], DISK, HOST):
        points = [(r["prefix"], _median(r["requests"][way])) for r in results if way in r["requests"]]
        is_link = way in document["links"]
        if points:
            label = f"link of {way}" if is_link else _LABELS.get(way, way)
            style = {"marker": "x", "ls": ":"} if is_link else {"marker": "o"}
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="prefix (tokens)", ylabel="time to first token (s)")
    axes.set_xticks([r["prefix"] for r in results], [f"{r['prefix']:,}" for r in results])
    axes.minorticks_off()
    plain_ticks(axes.yaxis)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="shape of a model with random weights")
    parser.add_argument("--layers", type=int, default=4, help="number of layers; fewer are faster, 0 for all")
    parser.add_argument("--model", help="pretrained model instead of a shape: name of eval.models, folder or hub id")
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--prefixes", type=listed(int), default=[1024, 4096, 16384], help="numbers of prefix tokens")
    parser.add_argument("--machines", type=int, default=4, help="number of processes that are machines, at least 2")
    parser.add_argument("--engines", type=listed(str), default=list(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument(
        "--rates", type=listed(float), default=[10, 1, 0.1, 0.001], help="GB/s of links, before the first engine"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of turns")
    parser.add_argument("--long-repeats", type=int, default=3, help="number of turns for prefixes over 8k")
    parser.add_argument("--folder", type=Path, help="parent folder of the stores (default: a temporary one)")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("shape", "layers", "model", "dtype")}
    shape = f"{arguments.shape}-{arguments.layers}l" if arguments.layers else arguments.shape
    name = f"{arguments.model or shape}-{arguments.dtype}-cpu"
    places, missing_engines = {}, {}
    with tempfile.TemporaryDirectory(prefix="bench-remote-", dir=arguments.folder) as path, ExitStack() as stack:
        folder = Path(path)
        for engine in arguments.engines:
            print(f"starting {engine}", flush=True)
            try:
                places[engine] = start(engine, folder / engine, stack)
            except servers.MissingServerError as error:
                missing_engines[engine] = str(error)
        if not places:
            raise SystemExit(f"no server is installed: {missing_engines}")
        print(f"starting {arguments.machines} machines", flush=True)
        options["threads"] = torch.get_num_threads()
        machines = [
            stack.enter_context(closing(Machine(folder / f"machine-{number}", options)))
            for number in range(arguments.machines)
        ]
        bench = Bench(arguments, machines, places)
        document = {
            "name": name,
            "model": arguments.model or shape,
            "weights": "Random" if arguments.model is None else "Pretrained",
            "dtype": arguments.dtype,
            "machine": machine(torch.device("cpu"), folder),
            "machines": arguments.machines,
            "engines": list(places),
            "missing": missing_engines,
            "linked": next(iter(places)),
            "links": bench.links,
            "results": [bench.measure(prefix) for prefix in tqdm(arguments.prefixes, desc="prefixes")],
        }
    publish(arguments.out, f"remote-{name}", document, report, plot)


if __name__ == "__main__":
    main()
