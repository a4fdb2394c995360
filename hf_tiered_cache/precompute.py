"""Filling a store ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from .errors import ConfigError
from .identity import varying_rope
from .methods import Exact, Method, make_method
from .patches.attach import attach
from .serving import CacheOptions
from .storage import Storage
from .stored_cache import StoredCache

CHUNK_TOKENS = 2048
"""Tokens of a long prompt per pass: the progress bar moves, and attention takes less memory."""


@dataclass(frozen=True)
class PrecomputeReport:
    """Result of `precompute`: number of prompts, and of tokens."""

    prompts: int
    tokens: int = 0
    restored: int = 0
    """Tokens with KV that was stored before."""
    stored: int = 0
    """Tokens with KV that was not stored before and is stored now."""
    too_short: int = 0
    """Number of passages of fewer than 16 tokens, which are not stored."""
    removed: int = 0
    """Number of segments deleted because their document was replaced and no other label names them."""

    def with_prompt(self, tokens: int, restored: int, stored: int) -> PrecomputeReport:
        """Return this report with the tokens of one more prompt added."""
        return replace(
            self, tokens=self.tokens + tokens, restored=self.restored + restored, stored=self.stored + stored
        )


def as_prompts(input_ids: Any, empty: bool = False) -> list[torch.Tensor]:
    """Return one or several prompts, on any device, as a list of int64 `[tokens]` tensors on the CPU.

    Args:
        input_ids: tensor `[tokens]` or `[prompts, tokens]`, or lists of token ids.
        empty: whether to keep prompts without tokens in the list.

    Raises:
        ConfigError: `input_ids` are not token ids.
    """
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
    return [prompt.to("cpu", torch.int64) for prompt in prompts if len(prompt) or empty]


def precompute(
    storage: Storage,
    model: torch.nn.Module,
    input_ids: Any,
    *,
    method: Method | str | None,
    progress: bool,
    pin: bool,
    label: str,
    tag: str,
) -> PrecomputeReport:
    """See `KVStore.precompute`."""
    storage.check_open()
    prompts, theirs = as_prompts(input_ids), make_method(method)
    by = theirs  # with KV that other look-ups do not find
    if not theirs.records_approximations:
        by = Exact(geometry=theirs.geometry, codec=theirs.codec, recompute=0.0, decline=False)
    report = PrecomputeReport(len(prompts))
    with bar_over(sum(map(len, prompts)), progress) as bar:
        for prompt in prompts:
            cache = StoredCache.over(model, storage, by, CacheOptions(label=label, tag=tag))
            fill(storage, cache, prompt, pin, _chunk_tokens(cache), bar.update)
            report = report.with_prompt(len(prompt), cache.stats.tokens_restored, cache.stats.tokens_stored)
    storage.flush()
    if theirs.selects and theirs.selector().index is not None:
        for prompt in prompts:
            _index(storage, model, theirs, prompt, tag)
        storage.flush()
    return report


def _index(storage: Storage, model: torch.nn.Module, method: Method, prompt: torch.Tensor, tag: str) -> None:
    """Make and store the index of a stored prompt that a method selects by. It serves any question after the prompt."""
    cache = StoredCache.over(model, storage, method, CacheOptions(record=False, tag=tag))
    ids = torch.cat([prompt, prompt[-1:]]).unsqueeze(0).to(attach(cache.model).device_of(0))  # [1, tokens + 1]
    with torch.no_grad():
        cache.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def fill(
    storage: Storage,
    cache: StoredCache,
    prompt: torch.Tensor,
    pin: bool,
    chunk_tokens: int | None = None,
    done: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Compute a prompt, and store its new KV.

    Args:
        storage: storage of the cache.
        cache: empty cache.
        prompt: int `[tokens]`.
        pin: whether to protect the prompt's segments from eviction.
        chunk_tokens: number of tokens per pass; None for one pass.
        done: function called after each pass with its number of tokens.
    """
    ids = prompt.unsqueeze(0).to(attach(cache.model).device_of(0))  # [1, tokens]; `model.device` is `meta` if offloaded
    with torch.no_grad():
        for chunk in ids.split(chunk_tokens or len(prompt), dim=1):
            cache.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
            done(chunk.shape[1])
    segments = cache.store_now()
    if pin:
        storage.writer.flush()
        storage.pin(segments)


def _chunk_tokens(cache: StoredCache) -> int | None:
    """Return the number of tokens per pass; None if the RoPE frequencies depend on the prompt's length."""
    varies = varying_rope(cache.model.config.get_text_config(decoder=True)) is not None
    return None if varies else CHUNK_TOKENS


def bar_over(tokens: int, progress: bool, name: str = "precompute") -> tqdm:
    """Return a progress bar over `tokens` tokens."""
    return tqdm(total=tokens, unit="tok", desc=name, disable=not progress)
