"""Finding the ratio of recomputation that is fastest on this machine, and keeping it with the store.

Computing a token costs more in a longer prompt, loading it does not; so what was found holds for prompts of one length,
and between two such the ratio goes from one to the other.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from .errors import ConfigError
from .identity import Fingerprinter
from .methods import CacheTune
from .restore.recompute import LOWEST, Costs, fastest_ratio

if TYPE_CHECKING:
    from .kvstore import KVStore

_FILE = "calibrations.json"
_KEPT = {"tokens", "ratio", "cold"}
"""What is read again of each."""
_WIDTH = 0.02
"""How far apart the last two probes of the search are: finer than that, machines are too noisy to tell."""
_FINALS = 3
"""Rounds in which the best ratio runs against the lowest one."""


@dataclass(frozen=True)
class Calibration:
    """What was found for one model on one device.

    Args:
        ratio: share of each passage to compute: `CacheTune(recompute="auto")` takes it.
        seconds: to the first token at that ratio, and at those that were tried, by ratio; 1 is full recompute.
        costs: of a token in one layer.
        balanced: the ratio that these say, where the search began.
        tokens: of the prompt.
        cold: whether passages were read from disk, or came from memory.
    """

    ratio: float
    seconds: dict[float, float]
    costs: Costs
    balanced: float
    tokens: int
    cold: bool

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self) | {"seconds": {f"{ratio:.4f}": value for ratio, value in sorted(self.seconds.items())}}


def calibrate(
    store: KVStore,
    model: torch.nn.Module,
    *,
    passages: int = 8,
    tokens: int = 512,
    suffix: int = 32,
    repeats: int = 3,
    cold: bool = True,
    progress: bool = True,
) -> Calibration:
    """Measure how long a prompt of passages takes at several ratios, and keep the best one in the store.

    Random passages are stored, asked for, and removed again; with `cold` the store's memory is emptied each time. What
    was kept for prompts of other lengths stays, if passages came from the same place.

    Args:
        store: whose disk and memory it is about.
        model: any causal LM.
        passages: in the prompt.
        tokens: of each passage.
        suffix: tokens behind them.
        repeats: of each measurement; the median counts.
        cold: whether passages are read from disk each time, or come from memory once they were read.
        progress: whether to show a progress bar.

    Raises:
        ConfigError: the model's positions end before such a prompt does.
    """
    from .cache import TieredCache  # a cache knows its store; only here does the store make caches

    method, probe = CacheTune(), TieredCache(model, store, record=False)
    inner, config = probe.model, probe.model.config.get_text_config(decoder=True)
    length = passages * tokens + suffix
    if length > getattr(config, "max_position_embeddings", length):
        raise ConfigError(f"{passages} passages of {tokens} tokens are more than the model's positions; ask for fewer")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (length,), generator=generator)
    prompt = ids.unsqueeze(0).to(inner.device)
    bar = tqdm(desc="calibrate", unit="ratio", disable=not progress)
    with torch.no_grad(), bar, _stored(store, model, list(ids[: passages * tokens].split(tokens)), method):

        def ask(ratio: float) -> float:
            cache = TieredCache(model, store, method=replace(method, recompute=ratio), record=False)
            return _seconds(
                lambda: inner(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1), inner.device
            )

        times: dict[float, list[float]] = {}

        def typical(ratio: float) -> float:
            return statistics.median(times[ratio])

        def measured(ratio: float, rounds: int = repeats) -> float:
            for _ in range(rounds):
                if cold:
                    store.residency.clear()
                times.setdefault(ratio, []).append(ask(ratio))
            bar.update()
            bar.set_postfix(ratio=f"{ratio:.2f}", seconds=f"{typical(ratio):.3f}")
            return typical(ratio)

        ask(0.5)  # what is done once only: hooks, kernels, open files
        reused, full = measured(0.0), measured(1.0)
        one = statistics.median(
            _seconds(lambda: inner(input_ids=prompt[:, :1], use_cache=False), inner.device) for _ in range(3)
        )
        layers = config.num_hidden_layers
        compute, load = (max(whole - one, 1e-9) / (length * layers) for whole in (full, reused))
        costs = Costs(compute, load, one / layers)
        best = fastest_ratio(measured, costs.balanced, width=_WIDTH)
        finals = sorted({LOWEST, 1.0 if full < typical(best) else best})
        for _ in range(_FINALS * (len(finals) > 1)):  # side by side, so that no passing load decides
            for ratio in finals:
                measured(ratio, 1)
    seconds = {ratio: typical(ratio) for ratio in times}
    ratio = min(finals, key=seconds.__getitem__)
    found = Calibration(ratio, seconds, costs, costs.balanced, length, cold)
    _keep(store, f"{Fingerprinter(inner)()} {_describe(inner.device)}", found)
    return found


def calibrated_ratio(store: KVStore, fingerprint: str, device: torch.device, tokens: int) -> float | None:
    """What `calibrate` found for this model on this device, for prompts of so many tokens, or None."""
    found = _read(store).get(f"{fingerprint} {_describe(device)}")
    if not found:
        return None
    known = sorted((one["tokens"], one["ratio"]) for one in found)
    return float(np.interp(tokens, *zip(*known, strict=True)))


@contextmanager
def _stored(store: KVStore, model: torch.nn.Module, passages: list[torch.Tensor], method: CacheTune) -> Iterator[None]:
    """Passages in the store for as long as this lasts."""
    stored_as = method.coded(store.codec).passages
    before = {row.id for row in store.segments()}
    store.precompute(model, passages, segments=True, method=method, progress=False)
    try:
        yield
    finally:
        mine = [row.id for row in store.segments() if row.id not in before and row.provenance == stored_as]
        store.remove(mine)


def _seconds(action: Callable[[], Any], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    started = time.perf_counter()
    action()
    settle()
    return time.perf_counter() - started


# --- what is kept


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(store: KVStore) -> dict[str, list[dict[str, Any]]]:
    """For each model on each device what was found, as `Calibration.as_dict` gives it."""
    try:
        found = json.loads((store.path / _FILE).read_text(encoding="utf-8"))
        sound = all(one.keys() >= _KEPT for some in found.values() for one in some)
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged
        sound = False
    return found if sound else {}  # as if nothing had been measured


def _keep(store: KVStore, name: str, found: Calibration) -> None:
    path = store.path / _FILE
    partial = path.with_suffix(f".{os.getpid()}")
    kept = _read(store)
    others = [one for one in kept.get(name, ()) if one["tokens"] != found.tokens and one["cold"] == found.cold]
    partial.write_text(json.dumps(kept | {name: [*others, found.as_dict()]}, indent=1) + "\n", encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)
