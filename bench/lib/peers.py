"""Code that a user would write to reuse a prefix without this library, in the best form of each variant.

`prefix.py` measures these in turns with a store that is opened for the request. Times begin before a file is opened
and end at the first token. Loaded tensors are used without a copy; `DynamicCache` copies them when it appends.
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
"""Prefix of the names of all variants with a safetensors file. Aims refer to the quickest of them."""
OURS, OURS_WARM = "tiered, cold", "tiered, host"
FirstToken = Callable[[Callable[[], Any]], float]
"""Seconds from before the cache is made until the first token."""
Tensors = dict[str, torch.Tensor]


class Peers:
    """KV of one prefix in the forms in which users keep it.

    Args:
        cache: Cache that holds only the prefix.
        config: Configuration of the model.
        folder: Folder for the files.
    """

    def __init__(self, cache: DynamicCache, config: PreTrainedConfig, folder: Path) -> None:
        self.cache, self.config, self.folder = cache, config, folder
        folder.mkdir()
        tensors = {
            f"{number}.{name}": tensor.contiguous()
            for number, layer in enumerate(cache.layers)
            for name, tensor in (("keys", layer.keys), ("values", layer.values))
        }
        pickled, safetensors_path = folder / "kv.pt", folder / "kv.safetensors"
        torch.save(tensors, pickled)
        save_file(tensors, safetensors_path)
        device = str(next(iter(tensors.values())).device)
        self._loads: dict[str, Callable[[], Tensors]] = {
            "torch.load, mmap": lambda: torch.load(pickled, mmap=True, weights_only=True, map_location=device),
            f"{SAFETENSORS}, load_file": lambda: load_file(safetensors_path, device),
            f"{SAFETENSORS}, safe_open": lambda: _one_by_one(safetensors_path, device),
        }
        if "backend" in inspect.signature(load_file).parameters:  # since safetensors 0.8
            self._loads[f"{SAFETENSORS}, pread"] = lambda: load_file(safetensors_path, device, backend="pread")

    def caches(self) -> dict[str, Callable[[], DynamicCache]]:
        """Return, by variant, a function that creates a cache with the prefix."""
        return {
            "deepcopy in memory": lambda: copy.deepcopy(self.cache),
            **{name: partial(self._loaded, load) for name, load in self._loads.items()},
        }

    def ways(self, first_token: FirstToken) -> dict[str, Callable[[], float]]:
        """Return the actions for `interleaved`: each variant from memory, and with files also from a cold disk."""

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
    peers: Peers, first_token: FirstToken, tiered: dict[str, Callable[[], float]], turns: int
) -> dict[str, list[float]]:
    """Return the seconds to the first token of all variants and of `ours`, measured in turns."""
    return interleaved({**tiered, **peers.ways(first_token)}, turns)


def quickest(times: dict[str, list[float]], state: str) -> str:
    """Return the safetensors variant in a state, "cold" or "warm", with the smallest median."""
    forms = [name for name in times if name.startswith(SAFETENSORS) and name.endswith(state)]
    return min(forms, key=lambda name: median(times[name]))


def over_file(times: dict[str, list[float]]) -> float:
    """Return our first token from a cold disk relative to the quickest safetensors variant."""
    return ratio(times[OURS], times[quickest(times, "cold")])


def report(results: Iterable[dict[str, Any]]) -> str:
    """Format a table for all prefixes: first tokens, and ours relative to each variant."""
    results = list(results)
    rows = []
    for name in results[0]["peers_s"]:
        cells = []
        for times in (result["peers_s"] for result in results):
            tiered = OURS if name.endswith("cold") else OURS_WARM
            cells += [f"{median(times[name]) * 1e3:.0f} ms", f"{ratio(times[tiered], times[name]):.3f}"]
        rows.append([name, *cells])
    headings = [f"{result['prefix']}{suffix}" for result in results for suffix in ("", ", ours ÷ it")]
    return (
        "Time to first token of code without this library. It includes loading, and with a cold disk also opening our "
        "store, but not the fingerprint of the model, which a process computes once. Cold variants are compared with "
        "ours from a cold disk, the others with ours from host memory. The files of the other variants are read "
        "without checks.\n\n" + table(["variant", *headings], rows)
    )
