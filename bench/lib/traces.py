"""Request streams with the published statistics of the Mooncake traces: conversations, tools and agents, documents.

The traces of the FAST'25 paper name the blocks of 512 tokens of each prompt, but not its session. The parameters of
sessions, agents and documents are chosen here such that the generated streams have the published numbers and lengths,
and the hit ratios of LRU caches that were recomputed from the released traces. `describe` returns them for comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

BLOCK = 512
"""Tokens of a block in the traces."""
LONGEST = 126_000
"""Tokens of the longest prompt. The traces have prompts of up to 128K tokens."""
_HISTORY = 3600.0
"""Seconds before the beginning in which sessions begin: their later turns have prefixes that no cache has seen."""


class LogNormal(NamedTuple):
    """Distribution of positive numbers by their median, and the standard deviation of their logarithm."""

    median: float
    spread: float

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draw numbers, float `[count]`."""
        return self.median * np.exp(self.spread * random.standard_normal(count))


_ONE_TURN = LogNormal(0.0, 0.0)


@dataclass(frozen=True)
class Source:
    """Requests of one kind.

    Args:
        share: Share of the sessions, or of the documents' requests.
        common: Tokens of a prompt that all sessions of this kind begin with.
        own: Tokens that follow in the first prompt of a session, or of a document.
        more: Probability that a turn is followed by another one.
        growth: Mean tokens that a turn adds to a prompt, the last answer included.
        gap: Seconds between two turns.
        documents: Number of documents at the rate of the trace. If there are any, each request asks about one of them.
        skew: Exponent of the Zipf distribution of the documents' popularity.
    """

    share: float
    common: int
    own: LogNormal
    more: float = 0.0
    growth: float = 0.0
    gap: LogNormal = _ONE_TURN
    documents: int = 0
    skew: float = 0.0


@dataclass(frozen=True)
class Workload:
    """One of the traces: what is published about it, and the sources that reproduce it.

    Args:
        requests: Number of requests (FAST'25 paper, Table 2).
        seconds: Duration.
        tokens: Mean tokens of a prompt (Table 2).
        answer: Mean tokens of an answer (Table 2).
        published: Share of the tokens that an unlimited cache holds (Table 2).
        released: The same, recomputed by others from the released trace.
        curve: Hit ratio of an LRU cache by its size, as a share of the distinct blocks, recomputed by others.
        sources: The sources.
    """

    requests: int
    seconds: float
    tokens: float
    answer: float
    published: float
    released: float
    curve: dict[float, float]
    sources: tuple[Source, ...]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""Sizes of LRU caches for which hit ratios are known, as shares of the distinct blocks."""


def _curve(*ratios: float) -> dict[float, float]:
    return dict(zip(SHARES, ratios, strict=True))


WORKLOADS = {
    "conversation": Workload(
        *(12031, 3537.0, 12035.0, 343.0, 0.40, 0.366),
        _curve(0.052, 0.195, 0.278, 0.353, 0.363),
        (Source(1.0, 512, LogNormal(5600, 1.17), more=0.4, growth=1500, gap=LogNormal(170, 1.0)),),
    ),
    "tools and agents": Workload(
        *(23608, 3537.0, 8596.0, 182.0, 0.59, 0.553),
        _curve(0.346, 0.449, 0.508, 0.551, 0.552),
        (
            Source(0.57, 6144, LogNormal(450, 1.0)),
            Source(0.43, 512, LogNormal(3450, 1.45), more=0.46, growth=900, gap=LogNormal(140, 0.8)),
        ),
    ),
    "documents": Workload(
        *(3993, 1022.0, 15325.0, 149.0, 0.66, 0.640),
        _curve(0.034, 0.155, 0.260, 0.443, 0.589),
        (
            Source(0.2, 0, LogNormal(100, 1.5), more=0.4, growth=400, gap=LogNormal(60, 0.8)),
            Source(0.667, 0, LogNormal(18400, 0.66), documents=1200, skew=0.75),
        ),
    ),
}


@dataclass
class Trace:
    """Requests in the order of their arrival. The prompt of a request is a path of nodes, each a piece of text.

    Args:
        seconds: float `[requests]`, time of arrival.
        key: int64 `[requests]`, session or document, by which a router can tell where it was answered before.
        first: int64 `[requests + 1]`, position of each path in `nodes`.
        nodes: int64 `[pieces]`, the nodes of all paths. Equal nodes have equal text, and equal nodes before them.
        sizes: int64 `[nodes]`, tokens of each node.
    """

    seconds: np.ndarray
    key: np.ndarray
    first: np.ndarray
    nodes: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray = field(init=False)
    """int64 `[requests]`, tokens of each prompt."""

    def __post_init__(self) -> None:
        self.tokens = np.add.reduceat(self.sizes[self.nodes], self.first[:-1])

    def __len__(self) -> int:
        return len(self.seconds)


def generate(workload: Workload, factor: float, seconds: float, seed: int) -> Trace:
    """Generate requests.

    Args:
        workload: The trace to reproduce.
        factor: Requests per second, as a multiple of the trace's. There are as many more sessions and documents, but
            the common prompts are the same.
        seconds: Duration.
        seed: Seed of the random numbers.
    """
    random = np.random.default_rng(seed)
    total = sum(source.share / (1 - source.more) for source in workload.sources)
    count = len(workload.sources)
    sizes = [np.array([source.common for source in workload.sources], np.int64)]  # nodes 0, 1, ...: common prompts
    parts: list[tuple[np.ndarray, ...]] = []
    keys = 0
    for number, source in enumerate(workload.sources):
        rate = factor * workload.rate * source.share / total  # of sessions
        make = _documents if source.documents else _sessions
        times, key, paths, new = make(source, rate, factor, seconds, random, count)
        paths[paths == -1] = number if source.common else -2
        parts.append((times, key + keys, paths))
        sizes.append(new)
        keys += int(key.max(initial=0)) + 1
        count += len(new)
    return _joined(parts, np.concatenate(sizes), seconds)


def _sessions(
    source: Source, rate: float, factor: float, seconds: float, random: np.random.Generator, offset: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return times, sessions and paths of requests, and the tokens of nodes: those of the turns, from `offset` on.

    A path is a row of nodes, int64: first -1 for the common prompt, then the turns up to this one, -2 where it ended.
    """
    sessions = random.poisson(rate * (seconds + _HISTORY))
    turns = np.minimum(random.geometric(1 - source.more, sessions), 24)
    session = np.repeat(np.arange(sessions), turns)
    begin = np.cumsum(turns) - turns
    turn = np.arange(len(session)) - begin[session]
    tokens = random.exponential(source.growth, len(session))
    own = source.own.draw(random, sessions)
    tokens = np.maximum(1, np.where(turn == 0, own[session], tokens)).astype(np.int64)
    tokens = np.minimum(tokens, LONGEST - source.common)
    gaps = source.gap.draw(random, len(session))
    gaps = np.where(turn == 0, random.uniform(-_HISTORY, seconds, sessions)[session], gaps)
    times, length = _cumulated(gaps, begin, session), source.common + _cumulated(tokens, begin, session)
    depth = np.arange(turns.max(initial=1))
    paths = np.where(depth <= turn[:, None], offset + begin[session][:, None] + depth, -2)
    paths = np.column_stack([np.full(len(session), -1), paths])
    in_range = (times >= 0) & (times < seconds) & (length <= LONGEST)
    return times[in_range], session[in_range], paths[in_range], tokens


def _documents(
    source: Source, rate: float, factor: float, seconds: float, random: np.random.Generator, offset: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what `_sessions` does, for questions about documents: a document is a node, and each question another."""
    requests, documents = random.poisson(rate * seconds), max(1, round(factor * source.documents))
    popularity = 1 / np.arange(1, documents + 1) ** source.skew
    document = random.choice(documents, requests, p=popularity / popularity.sum())
    tokens = np.minimum(np.maximum(1, source.own.draw(random, documents)), LONGEST - 100).astype(np.int64)
    questions = random.integers(16, 100, requests)
    paths = np.column_stack([np.full(requests, -1), offset + document, offset + documents + np.arange(requests)])
    return random.uniform(0, seconds, requests), document, paths, np.concatenate([tokens, questions])


def _cumulated(values: np.ndarray, begin: np.ndarray, session: np.ndarray) -> np.ndarray:
    """Return the sums of the values of a session up to each turn."""
    sums = np.cumsum(values)
    return sums - (sums[begin] - values[begin])[session] if len(values) else sums


def _joined(parts: list[tuple[np.ndarray, ...]], sizes: np.ndarray, seconds: float) -> Trace:
    """Return the trace of all sources, ordered by time."""
    times, key = (np.concatenate([part[index] for part in parts]) for index in (0, 1))
    width = max(part[2].shape[1] for part in parts)
    padded = [np.pad(paths, ((0, 0), (0, width - paths.shape[1])), constant_values=-2) for _, _, paths in parts]
    order = np.argsort(times, kind="stable")
    paths = np.concatenate(padded)[order]
    present = paths != -2
    first = np.concatenate([[0], np.cumsum(present.sum(1))])
    return Trace(times[order], key[order], first, paths[present], sizes)


def replay(trace: Trace, machine: np.ndarray, capacity: float, low: float = 1.0, kept_share: float = 1.0) -> np.ndarray:
    """Return the tokens at the beginning of each prompt that the LRU cache of its machine holds: int64 `[requests]`.

    Each prompt is stored afterwards. Its end is evicted before its beginning, as in a store.

    Args:
        trace: The requests.
        machine: int64 `[requests]`, machine that answers each request.
        capacity: Tokens of a cache.
        low: Share of the capacity down to which a full cache evicts.
        kept_share: Share of the new nodes that are stored, drawn at random.
    """
    caches = [OrderedDict[int, int]() for _ in range(int(machine.max(initial=0)) + 1)]
    used_tokens, down = [0] * len(caches), low * capacity
    nodes, first, sizes = trace.nodes.tolist(), trace.first.tolist(), trace.sizes.tolist()
    is_stored = np.random.default_rng(0).random(len(nodes)) < kept_share
    hits = np.zeros(len(trace), np.int64)
    for request, number in enumerate(machine.tolist()):
        cache, begin, end = caches[number], first[request], first[request + 1]
        hit = 0
        for at in range(begin, end):
            if nodes[at] not in cache:
                break
            hit += sizes[nodes[at]]
        hits[request] = hit
        for at in range(end - 1, begin - 1, -1):
            node = nodes[at]
            if node in cache:
                cache.move_to_end(node)
            elif is_stored[at]:
                cache[node] = sizes[node]
                used_tokens[number] += sizes[node]
        if used_tokens[number] > capacity:
            while cache and used_tokens[number] > down:
                used_tokens[number] -= cache.popitem(last=False)[1]
    return hits


def describe(workload: Workload, seed: int) -> dict[str, Any]:
    """Return the statistics of a generated stream with the rate and duration of the trace, counted in its blocks."""
    trace = generate(workload, 1.0, workload.seconds, seed)
    alone, blocks = np.zeros(len(trace), np.int64), -(-trace.tokens // BLOCK)
    unlimited = replay(trace, alone, np.inf)
    distinct = int((blocks - unlimited // BLOCK).sum())
    curve = {share: replay(trace, alone, share * distinct * BLOCK) for share in SHARES}
    return {
        "requests": len(trace),
        "tokens": float(trace.tokens.mean()),
        "median_tokens": float(np.median(trace.tokens)),
        "p99_tokens": float(np.quantile(trace.tokens, 0.99)),
        "blocks": distinct,
        "hit_ratio": float((unlimited // BLOCK).sum() / blocks.sum()),
        "curve": {f"{share:g}": float((hits // BLOCK).sum() / blocks.sum()) for share, hits in curve.items()},
    }
