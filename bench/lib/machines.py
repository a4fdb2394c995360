"""Machines of the benchmark of remotes: processes, each with a model and a folder of its own.

A process reads commands from its standard input, one JSON object a line, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lib.common import build, first_token, forget_page_cache
from lib.slow_disk import SlowDisk
from transformers import DynamicCache, PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store import HASH_BYTES
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.objects import ObjectBackend

SUFFIX = 64
"""Number of tokens of a request after the shared prompt."""
LOCAL, HOST, DISK, RECOMPUTE = "local", "host", "disk", "recompute"
_BENCH = Path(__file__).parents[1]
_WARM_SEED = -1
_POLL_SECONDS = 0.002


class Machine:
    """Handle of a process.

    Args:
        folder: Folder of its stores.
        options: JSON object for `_Served`.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        folder.mkdir()
        command = [sys.executable, __file__, str(folder), json.dumps(options)]
        path = [str(_BENCH), str(_BENCH.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )

    def begin(self, command: str, *arguments: Any) -> None:
        """Send a command: a method of `_Served`."""
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """Wait for the result of the command that was sent."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a machine ended with status {self._process.wait()}")
        return json.loads(line)

    def run(self, command: str, *arguments: Any) -> Any:
        """Send a command, and wait for its result."""
        self.begin(command, *arguments)
        return self.result()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def at_once(machines: Sequence[Machine], command: str, *arguments: Any) -> list[Any]:
    """Send a command to all machines, and wait for all results."""
    for machine in machines:
        machine.begin(command, *arguments)
    return [machine.result() for machine in machines]


def limit(remote: ObjectBackend, bytes_per_second: float) -> None:
    """Let a machine read from its remote no faster than through a link of a bandwidth. Round trips stay as they are."""
    link, get, get_beginnings = SlowDisk(bytes_per_second), remote.get_object, remote.get_beginnings

    def wait_until(done_at: float) -> None:
        time.sleep(max(0.0, done_at - time.monotonic()))

    def get_object(name: str, version: Any, offset: int, nbytes: int) -> bytes:
        done_at = link.begin(nbytes)
        content = get(name, version, offset, nbytes)
        wait_until(done_at)
        return content

    def get_all(names: Sequence[str], nbytes: int) -> dict[str, bytes]:
        contents = get_beginnings(names, nbytes)
        wait_until(link.begin(sum(map(len, contents.values()))))
        return contents

    remote.get_object, remote.get_beginnings = get_object, get_all  # type: ignore[method-assign]


class _Served:
    """A machine in its process.

    Args:
        folder: Folder of its stores.
        options: `shape`, `layers` and `dtype` of the model, or `model` for a pretrained one, and `threads`.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._folder, self._stores = folder, dict[str, KVStore]()
        self._model = model_of(options)
        self._tokens = self._model.config.vocab_size

    def open(self, name: str, address: str | None, bandwidth: float, write: str, environment: dict[str, str]) -> None:
        """Open a store.

        Args:
            name: Name of the store, and of its folder.
            address: Address of the remote, or None.
            bandwidth: Bytes per second of the emulated link to the remote; 0 for the real one.
            write: See `KVStore`.
            environment: Environment of the client.
        """
        os.environ.update(environment)
        remote = None if address is None else open_remote(address)
        if remote is not None and bandwidth:
            limit(remote, bandwidth)
        self._stores[name] = KVStore(self._folder / name, remote=remote, remote_write=write)

    def warm(self, name: str, tokens: int) -> None:
        """Compute a prompt that is stored nowhere, so that the time to compute a token is known."""
        self._compute(TieredCache(self._model, self._stores[name], record=False), self._random(tokens, _WARM_SEED))

    def record(self, name: str, prefix: int, seed: int) -> dict[str, Any]:
        """Compute a prompt, and send it to the remote. Returns seconds, bytes and the digest of its KV."""
        store = self._stores[name]
        cache = TieredCache(self._model, store)
        start_time, before = time.perf_counter(), store.stats.remote.bytes_written
        self._compute(cache, self._random(prefix, seed))
        compute_end = time.perf_counter()
        store.flush()
        end = time.perf_counter()
        return {
            "compute_s": compute_end - start_time,
            "send_s": end - compute_end,
            "bytes": store.stats.remote.bytes_written - before,
            "digest": _digest(cache, prefix),
        }

    def keep(self, address: str, prefix: int, seed: int) -> None:
        """Restore a prompt into the local folder and into host memory, for a store that has no remote from then on."""
        for remote in (address, None):
            if LOCAL in self._stores:
                self._stores.pop(LOCAL).close()
            self.open(LOCAL, remote, 0, "never", {})
            cache = TieredCache(self._model, self._stores[LOCAL], record=False)
            self._compute(cache, self._random(prefix, seed))
            assert cache.stats.tokens_restored, "the prompt is not in the remote"

    def request(self, way: str, prefix: int, seed: int, suffix_seed: int) -> dict[str, Any]:
        """Request a prompt with a new suffix: RECOMPUTE, DISK, HOST, or the name of a store with a remote."""
        ids = torch.cat([self._random(prefix, seed), self._random(SUFFIX, suffix_seed)], dim=1)
        if way == RECOMPUTE:
            return {"ttft_s": first_token(self._model, ids, lambda: DynamicCache(config=self._model.config))}
        if way == DISK:
            forget_page_cache(self._folder / LOCAL)
            with KVStore(self._folder / LOCAL) as cold:
                return self._restored(cold, ids, prefix)
        store = self._stores[LOCAL if way == HOST else way]
        result = self._restored(store, ids, prefix)
        if way != HOST:
            self._forget(store)
        return result

    def _restored(self, store: KVStore, ids: torch.Tensor, prefix: int) -> dict[str, Any]:
        caches: list[TieredCache] = []

        def make() -> TieredCache:
            caches.append(TieredCache(self._model, store, record=False))
            return caches[0]

        before = store.stats.remote
        took = first_token(self._model, ids, make)
        after, link = store.stats.remote, getattr(storage_of(store).remote, "link", None)
        return {
            "ttft_s": took,
            "tokens_restored": caches[0].stats.tokens_restored,
            "digest": _digest(caches[0], prefix),
            "hits": after.hits - before.hits,
            "bytes": after.bytes_read - before.bytes_read,
            "waiting_s": after.waiting_seconds - before.waiting_seconds,
            "misses": [reason for reason in after.misses if after.misses[reason] > before.misses.get(reason, 0)],
            "bytes_per_second": link.bandwidth.value if link else None,
        }

    def _forget(self, store: KVStore) -> None:
        """Delete what the store has fetched, also what arrives late, and the results of look-ups."""
        tier = storage_of(store).remote
        while tier._fetching:
            time.sleep(_POLL_SECONDS)
        store.flush()
        rows = store.segments()
        store.remove([row.id for row in rows])  # a store that sends nothing leaves it in the remote
        chains = [row.chain for row in rows]
        tier.look_ups.forget([c[at : at + HASH_BYTES].hex() for c in chains for at in range(0, len(c), HASH_BYTES)])
        tier._hidden.clear()

    def close(self) -> None:
        """Close all stores."""
        while self._stores:
            self._stores.popitem()[1].close()

    def _random(self, tokens: int, seed: int) -> torch.Tensor:
        """Return the random prompt of a seed, int64 `[1, tokens]`: the same on all machines."""
        return torch.randint(3, self._tokens, (1, tokens), generator=torch.Generator().manual_seed(seed))

    def _compute(self, cache: TieredCache, ids: torch.Tensor) -> None:
        with torch.no_grad():
            self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1)


def model_of(options: dict[str, Any]) -> PreTrainedModel:
    """Return the model that the options of a machine name, on the CPU."""
    if options["model"] is not None:
        from eval.models import load

        return load(options["model"], options["dtype"])[0]
    dtype = getattr(torch, options["dtype"])
    return build(options["shape"], dtype, torch.device("cpu"), layers=options["layers"] or None)


def _digest(cache: TieredCache, tokens: int) -> str:
    """Return a hash of the KV of the first tokens, in all layers."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            digest.update(part[:, :, :tokens].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _serve(folder: str, options: str) -> None:
    """Answer commands until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    served = _Served(Path(folder), json.loads(options))
    try:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            method: Callable[..., Any] = getattr(served, command)
            print(json.dumps(method(*arguments)), file=answers, flush=True)
    finally:
        served.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
