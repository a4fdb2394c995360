"""What a user would write to reuse a prefix without this library, in the best form of each.

`prefix.py` measures these beside a store that is opened for the request. Times begin before a file is opened and end at
the first token. A loaded tensor becomes a layer's as it is: the only copy is `DynamicCache`'s own, when it appends.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.common import forget_page_cache, interleaved, median, ratio
from lib.pages import table
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedConfig

SAFETENSORS = "safetensors"
"""How the names of all forms of a safetensors file begin: the quickest is compared with."""
OURS, OURS_WARM = "tiered, cold", "tiered, host"
FirstToken = Callable[[Callable[[], Any]], float]
"""Seconds from before the cache is made until the first token."""
Tensors = dict[str, torch.Tensor]


class Peers:
    """The KV of one prefix, kept as users keep it.

    Args:
        kept: a cache that holds the prefix and nothing else.
        config: of the model.
        folder: for the files.
    """

    def __init__(self, kept: DynamicCache, config: PreTrainedConfig, folder: Path) -> None:
        self.kept, self.config, self.folder = kept, config, folder
        folder.mkdir()
        tensors = {
            f"{number}.{name}": tensor.contiguous()
            for number, layer in enumerate(kept.layers)
            for name, tensor in (("keys", layer.keys), ("values", layer.values))
        }
        pickled, plain = folder / "kv.pt", folder / "kv.safetensors"
        torch.save(tensors, pickled)
        save_file(tensors, plain)
        device = str(next(iter(tensors.values())).device)
        self._loads: dict[str, Callable[[], Tensors]] = {
            "torch.load, mmap": lambda: torch.load(pickled, mmap=True, weights_only=True, map_location=device),
            f"{SAFETENSORS}, load_file": lambda: load_file(plain, device),
            f"{SAFETENSORS}, safe_open": lambda: _one_by_one(plain, device),
        }
        if "backend" in inspect.signature(load_file).parameters:  # since safetensors 0.8
            self._loads[f"{SAFETENSORS}, pread"] = lambda: load_file(plain, device, backend="pread")

    def caches(self) -> dict[str, Callable[[], DynamicCache]]:
        """For each form what makes a cache that holds the prefix."""
        return {
            "deepcopy in memory": lambda: copy.deepcopy(self.kept),
            **{name: partial(self._loaded, load) for name, load in self._loads.items()},
        }

    def ways(self, first_token: FirstToken) -> dict[str, Callable[[], float]]:
        """What `interleaved` measures: every form from memory, files from a cold disk too."""

        def cold(make: Callable[[], Any]) -> float:
            forget_page_cache(self.folder)
            return first_token(make)

        def warm(make: Callable[[], Any]) -> float:
            for file in self.folder.iterdir():
                file.read_bytes()
            return first_token(make)

        ways: dict[str, Callable[[], float]] = {}
        for name, make in self.caches().items():
            if name in self._loads:
                ways[f"{name}, cold"] = partial(cold, make)
                ways[f"{name}, warm"] = partial(warm, make)
            else:
                ways[name] = partial(first_token, make)
        return ways

    def _loaded(self, load: Callable[[], Tensors]) -> DynamicCache:
        cache, tensors = DynamicCache(config=self.config), load()
        for number, layer in enumerate(cache.layers):
            keys, values = tensors[f"{number}.keys"], tensors[f"{number}.values"]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache


def _one_by_one(path: Path, device: str) -> Tensors:
    with safe_open(path, framework="pt", device=device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def measure(
    peers: Peers, first_token: FirstToken, ours: dict[str, Callable[[], float]], turns: int
) -> dict[str, list[float]]:
    """Seconds to the first token, of all forms and of `ours`, side by side."""
    return interleaved({**ours, **peers.ways(first_token)}, turns)


def quickest(times: dict[str, list[float]], state: str) -> str:
    """The form of a safetensors file, "cold" or "warm", whose median is least."""
    forms = [name for name in times if name.startswith(SAFETENSORS) and name.endswith(state)]
    return min(forms, key=lambda name: median(times[name]))


def over_file(times: dict[str, list[float]]) -> float:
    """Our first token from a cold disk over the quickest form's of a safetensors file."""
    return ratio(times[OURS], times[quickest(times, "cold")])


def report(results: Iterable[dict[str, Any]]) -> str:
    """A table for all prefixes: first tokens, and ours over each of them."""
    results = list(results)
    rows = []
    for name in results[0]["peers_s"]:
        cells = []
        for times in (result["peers_s"] for result in results):
            ours = OURS if name.endswith("cold") else OURS_WARM
            cells += [f"{median(times[name]) * 1e3:.0f} ms", f"{ratio(times[ours], times[name]):.3f}"]
        rows.append([name, *cells])
    headings = [f"{result['prefix']}{what}" for result in results for what in ("", ", ours ÷ it")]
    return (
        "Time to first token of code without this library. It includes loading, and with a cold disk also opening our "
        "store, but not the fingerprint of the model, which a process computes once. Cold variants are compared with "
        "ours from a cold disk, the others with ours from host memory. The files of the other variants are read "
        "without checks.\n\n" + table(["variant", *headings], rows)
    )
