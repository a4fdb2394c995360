"""Measuring what a budget loses on a user's own model and text, so that a method can take a target instead of a budget.

No budget has the same loss in two models, or on two kinds of text. So each setting is asked what it predicts behind
prefixes of the user's text, and compared with full KV. `ContiguousKV(quality=0.02)` then takes the least budget that
kept the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from tqdm.auto import tqdm

from .calibrations import QualityFinding, keep_quality
from .errors import ConfigError
from .identity import Fingerprinter
from .methods import Exact, Method, describe_method, make_method
from .methods.budget import BudgetMethod
from .patches.attach import attach
from .precompute import as_prompts, precompute
from .serving import CacheOptions
from .storage import Storage
from .stored_cache import StoredCache

METHODS = ("contiguous_kv", "contiguous_kv:codec=int8", "h2o")
"""Methods that are measured by default."""
BUDGETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
QUESTION_TOKENS, QUESTIONS = 32, 4
"""Tokens of a question, and how many are asked about each prefix."""
_LEAST_PREFIX = 128

Scratch = Callable[[Method], AbstractContextManager[Storage]]
"""Opens an empty store for segments of one geometry, which is removed behind it."""


def calibrate_quality(
    storage: Storage,
    scratch: Scratch,
    model: torch.nn.Module,
    input_ids: Any,
    *,
    methods: Sequence[Method | str] = METHODS,
    budgets: Sequence[float] = BUDGETS,
    questions: int = QUESTIONS,
    progress: bool = True,
) -> list[QualityFinding]:
    """Measure what methods lose at several budgets, and keep that for this model.

    Of each text all but the last tokens are a prefix. The tokens behind it are asked as several questions, each longer
    by 32 tokens than the one before, and the prediction behind each is compared with that of full KV.

    Args:
        storage: what is found is kept there.
        scratch: opens a store for each way to cut segments.
        model: any causal LM that the methods serve.
        input_ids: texts such as the model is going to read, one or several, as for `KVStore.precompute`.
        methods: with a budget; their own is left out of account.
        budgets: shares of the prefix, in (0, 1).
        questions: about each prefix.
        progress: whether to show a progress bar.

    Returns:
        A finding for each method and budget, in this order.

    Raises:
        ConfigError: a method has no budget, a budget is none, or a text is too short.
    """
    storage.check_open()
    chosen: list[BudgetMethod] = []
    for method in map(make_method, methods):
        if not isinstance(method, BudgetMethod):
            raise ConfigError(f"{describe_method(method)} has no budget to choose, as {', '.join(METHODS)} have")
        chosen.append(cast(BudgetMethod, method.coded(storage.codec)))
    if not budgets or not all(0 < budget < 1 for budget in budgets):
        raise ConfigError(f"budgets are shares of a prefix, above 0 and below 1, not {budgets!r}")
    prompts = as_prompts(input_ids)
    asked = questions * QUESTION_TOKENS
    shortest = min(map(len, prompts), default=0)
    if questions < 1 or shortest < asked + _LEAST_PREFIX:
        raise ConfigError(
            f"a text of {shortest} tokens is too short: {questions} questions take its last {asked}, and "
            f"{_LEAST_PREFIX} stand before them at least"
        )
    settings = [replace(method, budget=budget, quality=None) for method in chosen for budget in sorted(budgets)]
    total = len(prompts) * questions * (1 + len(settings))
    findings = []
    with tqdm(total=total, desc="quality", unit="question", disable=not progress) as bar:
        full = [one.log_probs for one in _answers(scratch, model, prompts, Exact(), questions, bar.update)]
        for method in settings:
            found = list(_answers(scratch, model, prompts, method, questions, bar.update))
            losses = [
                float((known.exp() * (known - one.log_probs)).sum().clamp(min=0))
                for known, one in zip(full, found, strict=True)
            ]
            same = [bool(known.argmax() == one.log_probs.argmax()) for known, one in zip(full, found, strict=True)]
            findings.append(
                QualityFinding(
                    method=describe_method(method.as_measured),
                    budget=method.budget,
                    losses=[round(loss, 6) for loss in losses],
                    agreement=sum(same) / len(same),
                    brought=sum(one.brought for one in found) / len(found),
                    index=max(one.indexed for one in found),
                    seconds=sorted(one.seconds for one in found)[len(found) // 2],
                )
            )
    keep_quality(storage, Fingerprinter(attach(model).model)(), findings)
    return findings


class _Answer(NamedTuple):
    """Prediction behind a question, and its cost.

    Args:
        log_probs: float32 `[vocabulary]`, on the CPU.
        brought: bytes that came, without the index, as a share of the prefix's KV.
        indexed: bytes of the index, likewise.
        seconds: to the prediction.
    """

    log_probs: torch.Tensor
    brought: float
    indexed: float
    seconds: float


def _answers(
    scratch: Scratch,
    model: torch.nn.Module,
    prompts: Sequence[torch.Tensor],
    method: Method,
    questions: int,
    done: Callable[[], object],
) -> Iterator[_Answer]:
    """Ask all questions of all texts with one method."""
    device = attach(model).device_of(0)
    with scratch(method) as storage:
        for ids in prompts:
            prefix = len(ids) - questions * QUESTION_TOKENS
            precompute(storage, model, [ids[:prefix]], method=method, progress=False, pin=False, label="", tag="")
            for number in range(1, questions + 1):
                cache = StoredCache.over(model, storage, method, CacheOptions(record=False))
                row = ids[None, : prefix + number * QUESTION_TOKENS].to(device)  # [1, tokens]
                started = time.perf_counter()
                with torch.no_grad():
                    logits = cache.model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=1)[0]
                log_probs = logits[0, -1].float().log_softmax(-1).cpu()
                seconds, stats = time.perf_counter() - started, cache.stats
                kv = max(1, stats.tokens_restored) * _token_bytes(storage)
                brought = (stats.bytes_brought - stats.brought_identifying) / kv
                yield _Answer(log_probs, brought, stats.index_bytes / kv, seconds)
                del cache
                storage.flush()  # what is learnt of the tokens is there for the next question, as it is with users
                done()


def _token_bytes(storage: Storage) -> int:
    """Bytes of a token's KV, as the model computes it."""
    readers = (storage.disk.reader(row.id) for row in storage.disk.index.rows())
    return next((reader.shape.layout.bytes_per_token for reader in readers if reader is not None), 1)
