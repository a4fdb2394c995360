"""Model of machines that share a remote: what their caches hold of a trace, and what a request takes.

Nothing is timed. The costs are assumptions; what is restored, fetched or computed follows from them by the rules of the
library.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from hf_tiered_cache.cache.calibrations import PrefixCosts
from hf_tiered_cache.restore.schedule import RATIOS, Load, Streams, fastest, recompute_lengths
from hf_tiered_cache.stats import TIERS
from hf_tiered_cache.store.geometry import HASH_TOKENS
from hf_tiered_cache.store.quota import Limits

from .traces import Trace, Workload, generate, replay

MOST_MACHINES = 100
"""More machines are simulated at as much fewer requests, with as much smaller caches."""
SAMPLE = 40_000
"""Requests for which times to first token are computed."""
RANDOM, HOME = "random", "same machine"
"""Routes: each request to any machine, or all of a session or a document to one."""
_, HOST, DISK = TIERS
_FULL = Limits(high=1.0, low=1.0)
_LONGEST = 1 << 17
"""Tokens of the longest prompt for which times are computed."""
_STEP = 256
"""Tokens of a block that is loaded at once."""


class Costs:
    """Seconds that parts of a request take.

    Args:
        arguments: Options of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        flops = arguments.tflops * 1e12
        self.layers, self.token_bytes = arguments.layers, float(arguments.token_bytes)
        host, disk = (self.token_bytes / 1e9 / rate for rate in (arguments.host_bandwidth, arguments.disk_bandwidth))
        self.prefix = PrefixCosts(
            tokens=0,
            compute=2 * arguments.parameters / flops,
            restore={HOST: host, DISK: host + disk},
            load={DISK: disk},
            growth=2 * arguments.layers * arguments.width / flops,
        )
        lengths, shares = np.geomspace(HASH_TOKENS, _LONGEST, 14), np.linspace(0, 1, 5)
        values = [[[self._restore(n, share, suffix) for suffix in lengths] for share in shares] for n in lengths]
        self._table = RegularGridInterpolator((np.log(lengths), shares, np.log(lengths)), np.log(np.array(values)))

    def _restore(self, tokens: float, on_disk: float, suffix: float) -> float:
        """Return the seconds of a prompt whose first tokens are stored, as the library's cost model schedules them.

        Args:
            tokens: Tokens that are stored, in memory first and then on disk.
            on_disk: Share of them that is on disk.
            suffix: Tokens that follow.
        """
        prefix, stored_tokens = self.prefix, round(tokens)
        ends = np.append(np.arange(_STEP, stored_tokens, _STEP), stored_tokens)
        on_disk_before = np.maximum(0.0, ends - (1 - on_disk) * stored_tokens)
        seconds = np.diff(on_disk_before, prepend=0.0) * prefix.loading(DISK) / self.layers
        loads = tuple(Load((layer,), ends, seconds) for layer in range(self.layers))
        after = float(prefix.computing(stored_tokens + round(suffix)) - prefix.computing(stored_tokens)) / self.layers
        placing = prefix.placing(DISK) / self.layers
        streams = Streams(stored_tokens, after, lambda n: prefix.computing(n) / self.layers, placing, loads)
        took = streams.seconds(recompute_lengths(stored_tokens, RATIOS, self.layers, step=HASH_TOKENS))
        return float(took[fastest(took)])

    def first_token(self, tokens: np.ndarray, memory: np.ndarray, disk: np.ndarray) -> np.ndarray:
        """Return the seconds to the first token: float `[requests]`.

        Args:
            tokens: Tokens of the prompts.
            memory: Tokens of them in memory.
            disk: Tokens of them on disk.
        """
        stored_tokens = np.maximum(1, memory + disk)
        point = np.column_stack([stored_tokens, disk / stored_tokens, np.maximum(1, tokens - stored_tokens)])
        point[:, [0, 2]] = np.log(point[:, [0, 2]].clip(HASH_TOKENS, _LONGEST))
        return np.where(memory + disk < HASH_TOKENS, self.prefix.computing(tokens), np.exp(self._table(point)))


class Fleet:
    """The requests of a workload to a number of machines, and what their caches hold of them.

    Args:
        workload: The workload.
        machines: Number of machines.
        arguments: Options of the command line.
        costs: Seconds that parts of a request take.
    """

    def __init__(self, workload: Workload, machines: int, arguments: argparse.Namespace, costs: Costs) -> None:
        self.arguments, self.costs, self.machines = arguments, costs, machines
        self.scale = max(1.0, machines / MOST_MACHINES)
        sample = generate(workload, 1.0, workload.seconds, arguments.seed)
        self.rate = arguments.load / float(costs.prefix.computing(sample.tokens).mean())  # of a machine
        factor = self.rate * machines / self.scale / workload.rate
        self.trace: Trace = generate(workload, factor, arguments.seconds, arguments.seed)
        self.counted = np.flatnonzero(self.trace.seconds >= arguments.warm_up)
        random = np.random.default_rng(arguments.seed + 1)
        self._anywhere = random.integers(0, machines, len(self.trace))
        home = random.integers(0, machines, int(self.trace.key.max(initial=0)) + 1)
        self._home = home[self.trace.key]
        self.sample = random.permutation(self.counted)[:SAMPLE]
        self._shared: dict[tuple[float, float], np.ndarray] = {}

    def tokens_of(self, gigabytes: float) -> float:
        """Return the tokens that a place of a machine holds, as it is simulated."""
        return 1e9 * gigabytes / self.costs.token_bytes / self.scale

    def local(self, route: str, gigabytes: float, limits: Limits = _FULL) -> np.ndarray:
        """Return the tokens of each prompt that a tier of its machine holds.

        Args:
            route: How requests are routed.
            gigabytes: Size of the tier.
            limits: Shares of it above which it evicts, and down to which.
        """
        machine = self._anywhere if route == RANDOM else self._home
        return replay(self.trace, machine, limits.high * self.tokens_of(gigabytes), limits.low / limits.high)

    def shared(self, gigabytes: float, kept_share: float = 1.0) -> np.ndarray:
        """Return the tokens of each prompt that a remote of this size holds."""
        key = (gigabytes, kept_share)
        if key not in self._shared:
            alone = np.zeros(len(self.trace), np.int64)
            self._shared[key] = replay(self.trace, alone, self.tokens_of(gigabytes), kept_share=kept_share)
        return self._shared[key]

    def new_bytes(self) -> float:
        """Return the bytes of KV per second that all machines compute and no other has computed before."""
        shared_tokens = self.shared(np.inf)
        new = (self.trace.tokens - shared_tokens)[self.counted].sum()
        return float(new * self.costs.token_bytes * self.scale / self._counted_seconds)

    @property
    def _counted_seconds(self) -> float:
        return self.arguments.seconds - self.arguments.warm_up

    def measure(
        self, memory: np.ndarray, disk: np.ndarray, remote: np.ndarray | None, link: float, server: float = np.inf
    ) -> dict[str, Any]:
        """Return hit rates by tier, and times to the first token.

        Args:
            memory: Tokens of each prompt in memory.
            disk: Tokens of each prompt on disk, those in memory among them.
            remote: Tokens of each prompt in the remote; None for no remote.
            link: GB/s of a machine.
            server: GB/s of the remote for all machines.
        """
        trace, costs = self.trace, self.costs
        memory, counted_requests = np.minimum(memory, disk), self.counted
        fetched, bandwidth = np.zeros_like(disk), link
        if remote is not None:
            bandwidth = self._bandwidth(disk, remote, min(link, server), server)
            fetched = self._fetched(disk, remote, bandwidth)
        waiting = fetched * costs.token_bytes / (1e9 * bandwidth)
        if remote is not None:
            waiting = waiting + self.arguments.look_up
        sample = self.sample
        seconds = waiting[sample] + costs.first_token(
            trace.tokens[sample], (memory + fetched)[sample], (disk - memory)[sample]
        )
        total = trace.tokens[counted_requests].sum()
        hits = {"memory": memory, "disk": disk - memory, "remote": fetched}
        return {
            "hits": {name: float(tokens[counted_requests].sum() / total) for name, tokens in hits.items()},
            "ttft_s": summary(seconds),
            "fetch_gb_per_s": float(bandwidth),
        }

    def _fetched(self, disk: np.ndarray, remote: np.ndarray, bandwidth: float) -> np.ndarray:
        """Return the tokens that are fetched: all that the remote has more, if computing them would take longer."""
        more = np.maximum(0, remote - disk)
        saved_seconds = self.costs.prefix.computing(disk + more) - self.costs.prefix.computing(disk)
        return np.where(more * self.costs.token_bytes / (1e9 * max(bandwidth, 1e-9)) < saved_seconds, more, 0)

    def _bandwidth(self, disk: np.ndarray, remote: np.ndarray, link: float, server: float) -> float:
        """Return the GB/s of a fetch: what all fetches leave of the server, at most that of the link."""
        disk, remote = disk[self.counted], remote[self.counted]

        def left(bandwidth: float) -> float:
            nbytes = self._fetched(disk, remote, bandwidth).sum() * self.costs.token_bytes * self.scale
            return server - nbytes / 1e9 / self._counted_seconds

        low, high = 0.0, link
        if left(high) >= high:
            return high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if left(middle) >= middle else (low, middle)
        return max(low, 1e-9)


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Return mean, median and 95th percentile."""
    return {
        "mean": float(seconds.mean()),
        "p50": float(np.median(seconds)),
        "p95": float(np.quantile(seconds, 0.95)),
    }
