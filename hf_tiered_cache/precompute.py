"""Filling a store ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from .errors import ConfigError
from .methods import Exact, Method, make_method

if TYPE_CHECKING:
    from .cache import TieredCache
    from .kvstore import KVStore


@dataclass(frozen=True)
class PrecomputeReport:
    """What `precompute` did, in tokens."""

    prompts: int
    tokens: int = 0
    restored: int = 0
    """Tokens whose KV was stored before."""
    stored: int = 0
    """Tokens whose KV is stored now and was not before."""

    def with_prompt(self, tokens: int, restored: int, stored: int) -> PrecomputeReport:
        """This and one prompt more."""
        return replace(
            self, tokens=self.tokens + tokens, restored=self.restored + restored, stored=self.stored + stored
        )


def as_prompts(input_ids: Any) -> list[torch.Tensor]:
    """One or several prompts as a list of int64 `[tokens]`. Raises ConfigError."""
    if isinstance(input_ids, torch.Tensor) and input_ids.ndim in (1, 2):
        rows: Iterable[Any] = input_ids if input_ids.ndim == 2 else [input_ids]
    elif isinstance(input_ids, list | tuple) and input_ids:
        rows = [input_ids] if isinstance(input_ids[0], int) else input_ids
    else:
        raise ConfigError("a prompt is token ids: a tensor [tokens] or [prompts, tokens], or lists of ids")
    try:
        prompts = [torch.as_tensor(row).view(-1) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"a prompt is token ids; tokenize the text first ({error})") from error
    if any(len(prompt) and (prompt.is_floating_point() or prompt.dtype == torch.bool) for prompt in prompts):
        raise ConfigError("token ids are whole numbers; tokenize the text, and pass its input_ids")
    return [prompt.to(torch.int64) for prompt in prompts if len(prompt)]


def precompute(
    store: KVStore, model: torch.nn.Module, input_ids: Any, *, method: Method | str | None, progress: bool, pin: bool
) -> PrecomputeReport:
    """See `KVStore.precompute`."""
    from .cache import TieredCache  # a cache knows its store; only here does the store make caches

    prompts, exact = as_prompts(input_ids), Exact(geometry=make_method(method).geometry)
    report = PrecomputeReport(len(prompts))
    with bar_over(prompts, progress) as bar:
        for prompt in prompts:
            cache = TieredCache(model, store, method=exact)
            fill(cache, prompt, pin)
            report = report.with_prompt(len(prompt), cache.stats.tokens_restored, cache.stats.tokens_stored)
            bar.update(len(prompt))
    store.flush()
    return report


def fill(cache: TieredCache, prompt: torch.Tensor, pin: bool) -> None:
    """Compute a prompt, and have what is new stored."""
    ids = prompt.unsqueeze(0).to(cache.model.device)
    with torch.no_grad():
        cache.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    segments = cache.store_now()
    if pin:
        cache.store.writer.flush()
        cache.store.pin(segments)


def bar_over(prompts: list[torch.Tensor], progress: bool) -> tqdm:
    return tqdm(total=sum(map(len, prompts)), unit="tok", desc="precompute", disable=not progress)
