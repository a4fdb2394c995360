"""Measurement of the quality loss of budgets on a user's model and text, for methods with a target instead of a budget.

The loss of a budget depends on the model and on the kind of text. Each setting therefore predicts the next token after
prefixes of the user's text, and is compared with full KV. `ContiguousKV(quality=0.02)` then takes the smallest budget
that lost at most a quarter of the target, because other text loses more.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from ..cache.cache_state import CacheOptions
from ..cache.calibrations import QualityFinding, check_saving, keep_quality
from ..cache.storage import Storage
from ..cache.stored_cache import StoredCache
from ..errors import ConfigError, StoreError
from ..identity import fingerprint_of
from ..methods import BudgetMethod, Exact, Method, describe_method, make_method
from ..patches.attach import attach
from ..store.root import StoreRoot
from ..store.tree import try_flock
from .precompute import PrecomputeSettings, as_prompts, precompute, run

METHODS = ("contiguous_kv", "contiguous_kv:codec=int8")
"""Methods that are measured by default."""
BUDGETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
QUESTION_TOKENS, QUESTIONS = 32, 4
"""Number of tokens of a question, and number of questions about each prefix."""
_LEAST_PREFIX = 128

_SCRATCH_PREFIX = "hf-tiered-quality-"

Scratch = Callable[[Method], AbstractContextManager[Storage]]
"""Function that opens an empty store for segments of one geometry, which is removed afterwards."""


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Create a temporary folder for a store, locked until it is removed. Those of killed processes are removed first.

    A folder is of a killed process if it is a store of this user, and nobody holds the lock.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(OSError, StoreError), closing(StoreRoot(path, make=False)) as files:
            is_own = os.fstat(files.root_descriptor).st_uid == os.geteuid()
            if is_own and try_flock(files.root_descriptor, fcntl.LOCK_EX):
                files.remove()
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX) as folder, ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, descriptor)
        with suppress(OSError):  # without locks, nobody takes it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield folder


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
    tag: str = "",
) -> list[QualityFinding]:
    """Measure the quality loss of methods at several budgets, and store the findings for this model.

    The last tokens of each text form its questions, and the other tokens are its prefix. Each question is 32 tokens
    longer than the previous one. The prediction after each question is compared with that of full KV (KL divergence).

    Args:
        storage: Store that keeps the findings.
        scratch: Opens a temporary store for each geometry.
        model: Any causal LM that the methods support.
        input_ids: One or several texts like those that the model will read, as for `KVStore.precompute`.
        methods: Methods with a budget; their own budget is ignored.
        budgets: Fractions of the prefix, in (0, 1).
        questions: Number of questions about each prefix.
        progress: Whether to show a progress bar.
        tag: The `tag` of the caches that will use the result.

    Returns:
        One finding for each method and budget, in this order.

    Raises:
        ConfigError: A method has no budget, a budget is not in (0, 1), or a text is too short.
        StoreError: The findings could not be saved.
    """
    budget_methods: list[BudgetMethod] = []
    for method in map(make_method, methods):
        if not isinstance(method, BudgetMethod):
            raise ConfigError(f"{describe_method(method)} has no budget to choose, unlike {', '.join(METHODS)}")
        budget_methods.append(method.coded(storage.codec))
    if not budgets or not all(0 < budget < 1 for budget in budgets):
        raise ConfigError(f"budgets must be shares of a prefix above 0 and below 1, not {budgets!r}")
    check_saving(storage)
    prompts = as_prompts(input_ids)
    question_tokens = questions * QUESTION_TOKENS
    shortest = min(map(len, prompts), default=0)
    if questions < 1 or shortest < question_tokens + _LEAST_PREFIX:
        raise ConfigError(
            f"a text of {shortest} tokens is too short: {questions} questions need its last {question_tokens} tokens, "
            f"after a prefix of at least {_LEAST_PREFIX}"
        )
    shares = sorted(budgets)
    total = len(prompts) * questions * (1 + len(budget_methods) * len(shares))
    findings = []
    with tqdm(total=total, desc="quality", unit="question", disable=not progress) as bar:
        (full,) = _answers(scratch, model, prompts, [Exact()], questions, bar.update, tag)
        for method in budget_methods:
            settings = [replace(method, budget=budget, quality=None) for budget in shares]
            answers = _answers(scratch, model, prompts, settings, questions, bar.update, tag)
            findings += [_finding(setting, answer, full) for setting, answer in zip(settings, answers, strict=True)]
    keep_quality(storage, fingerprint_of(attach(model), tag), findings)
    return findings


class _Answer(NamedTuple):
    """Prediction after a question, and its cost.

    Args:
        log_probs: float32 `[vocabulary]`, on the CPU.
        brought: Bytes of delivered blocks, without those used only for selection, as a fraction of the prefix's KV.
        indexed: Bytes of the index, as a fraction of the prefix's KV.
        seconds: Time to the prediction.
    """

    log_probs: torch.Tensor
    brought: float
    indexed: float
    seconds: float


def _finding(method: BudgetMethod, answers: Sequence[_Answer], full: Sequence[_Answer]) -> QualityFinding:
    """Compare the answers of a method with those of full KV."""
    pairs = [(expected.log_probs, answer.log_probs) for expected, answer in zip(full, answers, strict=True)]
    losses = [float((p.exp() * (p - q)).sum().clamp(min=0)) for p, q in pairs]  # KL divergence
    return QualityFinding(
        method=describe_method(method, method.loss_ignores),
        budget=method.budget,
        losses=[round(loss, 6) for loss in losses],
        agreement=sum(bool(p.argmax() == q.argmax()) for p, q in pairs) / len(pairs),
        brought=sum(answer.brought for answer in answers) / len(answers),
        index=max(answer.indexed for answer in answers),
        seconds=sorted(answer.seconds for answer in answers)[len(answers) // 2],
    )


def _answers(
    scratch: Scratch,
    model: torch.nn.Module,
    prompts: Sequence[torch.Tensor],
    settings: Sequence[Method],
    questions: int,
    on_answer: Callable[[], object],
    tag: str,
) -> list[list[_Answer]]:
    """Return the predictions after all questions of all texts, for each setting of one method.

    The settings share stored KV, so each text is computed once. They take turns at each question: all of them find
    what the questions before left, such as token statistics.
    """
    answers: list[list[_Answer]] = [[] for _ in settings]
    with scratch(settings[0]) as storage:
        for ids in prompts:
            prefix = len(ids) - questions * QUESTION_TOKENS
            precompute(storage, model, [ids[:prefix]], PrecomputeSettings(settings[0], tag=tag))
            for number in range(1, questions + 1):
                for setting, answers_of_setting in zip(settings, answers, strict=True):
                    question = ids[: prefix + number * QUESTION_TOKENS]
                    answers_of_setting.append(_answer(storage, model, question, setting, tag))
                    on_answer()
                storage.flush()  # the next question finds the token statistics stored, as in normal use
    return answers


def _answer(storage: Storage, model: torch.nn.Module, ids: torch.Tensor, method: Method, tag: str) -> _Answer:
    """Predict the token after a prompt."""
    cache = StoredCache.over(model, storage, method, CacheOptions(record=False, tag=tag))
    started = time.perf_counter()
    log_probs = run(cache, ids)[0, -1].float().log_softmax(-1).cpu()
    seconds, stats = time.perf_counter() - started, cache.stats
    readers = (storage.disk.reader(row.id) for row in storage.disk.index.rows())
    token_bytes = next((reader.shape.layout.bytes_per_token for reader in readers if reader is not None), 1)
    kv = max(1, stats.tokens_restored) * token_bytes  # as the model computes it
    share_loaded = (stats.details.bytes_delivered - stats.details.bytes_delivered_identifying) / kv
    return _Answer(log_probs, share_loaded, stats.details.index_bytes / kv, seconds)
