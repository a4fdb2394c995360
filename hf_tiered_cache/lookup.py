"""Look-up of the stored tokens of a prompt by tier, and loading them into memory, without computing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from .errors import ConfigError
from .methods import Method, make_method
from .patches.attach import attach
from .precompute import as_prompts
from .restore.prefetch import PlanUnit, units_of
from .serving import CacheOptions
from .stats import TIERS, StatsCollector
from .storage import Storage
from .stored_cache import StoredCache
from .tiers.lease import BlockRequest
from .units import format_bytes


@dataclass(frozen=True)
class Lookup:
    """Stored part of a prompt.

    Args:
        tokens: number of tokens in the prompt.
        stored: number of tokens that a request would restore. The last token is always computed.
        bytes: size of their KV in each tier, by tier name.
        reason: reason why nothing is stored, or "".
    """

    tokens: int
    stored: int
    bytes: dict[str, int]
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        where = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in self.bytes.items() if size)
        return f"{self.stored} of {self.tokens} tokens stored" + (f": {where}" if where else f"; {self.reason}")


def lookup(storage: Storage, model: nn.Module, input_ids: Any, method: Method | str | None, tag: str) -> Lookup:
    """See `KVStore.lookup`."""
    return _Prompt(storage, model, input_ids, method, tag).describe()


def warm(
    storage: Storage, model: nn.Module, input_ids: Any, method: Method | str | None, tag: str, progress: bool
) -> Lookup:
    """See `KVStore.warm`."""
    # ignore costs: load KV even if computing it would be faster now
    prompt, collector = _Prompt(storage, model, input_ids, make_method(method).regardless(), tag), StatsCollector()
    total = sum(unit.nbytes for unit in prompt.units)
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="warm", disable=not progress) as bar:
        for unit in prompt.units:
            # without a device budget, load blocks only to the host
            device = prompt.device_of(unit) if storage.residency.device_budget else torch.device("cpu")
            request = BlockRequest(unit.reader, unit.block_group.index, unit.chunks)
            lease = storage.residency.fetch([request], device, collector, ahead=True)
            try:
                lease.wait()
                lease.confirm()
            except Exception as error:  # an unreadable block counts as a miss of the next request
                storage.disk.report(unit.reader.id, error)
            finally:
                lease.release()
            bar.update(unit.nbytes)
    return prompt.describe()


class _Prompt:
    """Prompt, and the blocks that a request would restore for it."""

    def __init__(
        self, storage: Storage, model: nn.Module, input_ids: Any, method: Method | str | None, tag: str
    ) -> None:
        storage.check_open()
        prompts = as_prompts(input_ids)
        if len(prompts) != 1:
            raise ConfigError(f"one prompt at a time: token ids [tokens] or [1, tokens], not {len(prompts)} rows")
        cache = StoredCache.over(model, storage, make_method(method), CacheOptions(record=False, tag=tag))
        plan, self._reason = cache.look_up(prompts[0].unsqueeze(0))
        self._storage, self._attachment = storage, attach(model)
        self._tokens, self._restored = len(prompts[0]), 0
        self.units: list[PlanUnit] = []
        if plan is not None:
            self._restored = plan.restored_tokens
            every = replace(plan, budget_tokens=None)  # with a token budget, any block may be requested
            self.units = units_of(every)

    def device_of(self, unit: PlanUnit) -> torch.device:
        return self._attachment.device_of(unit.block_group.layers[0])

    def describe(self) -> Lookup:
        sizes = dict.fromkeys(TIERS, 0)
        for unit in self.units:
            owner = unit.reader.owner(unit.block_group.index)
            for tier, blocks in self._storage.residency.where(owner, unit.chunks, self.device_of(unit)).items():
                sizes[tier] += blocks * unit.block_group.block_bytes
        return Lookup(self._tokens, self._restored, sizes, self._reason)
