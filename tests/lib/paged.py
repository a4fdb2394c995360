"""Continuous batching of tiny models on the CPU, with the oldest and the newest version of transformers."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_tiered_cache import KVStore, tiered
from hf_tiered_cache.batching.engine import Engine

NEW_TOKENS = 8
_PAGE_OPTION = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"


def paging(pages: int = 128, tokens: int = 16, **options: Any) -> ContinuousBatchingConfig:
    """Return a configuration with `pages` pages of `tokens` tokens."""
    options = {"max_batch_tokens": 256, _PAGE_OPTION: tokens, "num_blocks": pages} | options
    return ContinuousBatchingConfig(**options)


def greedy(**options: Any) -> GenerationConfig:
    return GenerationConfig(**({"eos_token_id": -1, "do_sample": False, "max_new_tokens": NEW_TOKENS} | options))


def alone(model: Any, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Return the answers of `generate()`, one prompt after the other, without a store."""
    answers = []
    for ids in prompts:
        output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=new_tokens, eos_token_id=None)
        answers.append(output[0, len(ids) :].tolist())
    return answers


def batched(model: Any, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """Return the answers of `generate_batch()`."""
    outputs = model.generate_batch(
        inputs=list(prompts),
        generation_config=options.pop("generation", greedy()),
        persistent_manager=options.pop("persistent_manager", False),
        continuous_batching_config=paging(**options),
        progress_bar=False,
    )
    assert not [output.error for output in outputs.values() if output.error]
    return [output.generated_tokens for output in outputs.values()]


@contextmanager
def running(model: Any, generation: GenerationConfig | None = None, **options: Any):
    """Run a manager's thread."""
    manager = model.init_continuous_batching(
        generation_config=generation or greedy(), continuous_batching_config=paging(**options)
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)


def arriving(manager: Any, prompts: Sequence[list[int]], seed: int = 0, pause: float = 0.01) -> list[list[int]]:
    """Return the answers to requests that arrive one by one, at random times."""
    chance = random.Random(seed)
    names = []
    for ids in prompts:
        names.append(manager.add_request(ids, max_new_tokens=NEW_TOKENS, eos_token_id=-1))
        time.sleep(chance.random() * pause)
    return finished(manager, names)


def finished(manager: Any, names: Sequence[str], seconds: float = 240) -> list[list[int]]:
    """Return the answers to these requests; fail if they do not arrive."""
    answers: dict[str, list[int]] = {}
    until = time.monotonic() + seconds
    while len(answers) < len(names):
        assert time.monotonic() < until, f"no answer to {sorted(set(names) - set(answers))}"
        output = manager.get_result(timeout=0.2)
        if output is not None and output.is_finished():
            assert output.error is None, output.error
            answers[output.request_id] = output.generated_tokens
    return [answers[name] for name in names]


def leaked(manager: Any) -> int:
    """Return the number of pages held by requests, according to the engine; 0 if all have ended."""
    cache = manager.batch_processor.cache
    if hasattr(cache, "cache_allocators"):
        allocators, used_sectors = cache.cache_allocators.values(), 0
        assert not any(allocator.block_table for allocator in allocators)
        cache.pool.try_to_free_sectors()
        for allocator in allocators:  # an allocator's sectors consist of free blocks and of cached blocks
            block_count = cache.pool.count_free_blocks(allocator.index) + len(allocator.ledger.cached_blocks)
            assert block_count % allocator.blocks_per_sector == 0
            used_sectors += block_count // allocator.blocks_per_sector
        return cache.num_sectors - cache.pool.num_free_sectors - used_sectors
    assert not any(group.block_table for group in cache.group_cache_managers)
    return cache.num_blocks - cache.get_num_free_blocks()


def settled(manager: Any, seconds: float = 10) -> int:
    """Return `leaked` once the engine is idle."""
    until = time.monotonic() + seconds
    while manager.batch_processor.has_pending_requests() and time.monotonic() < until:
        time.sleep(0.01)
    return leaked(manager)


def moved_to_host_memory(
    model: Any, root: Any, prompts: Sequence[list[int]], monkeypatch: Any
) -> list[list[list[int]]]:
    """Return the answers of an engine that moves requests to host memory: with an empty store, and again."""
    empty, answers = torch.empty, []  # memory can be page-locked for a GPU only
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    for _ in range(2):
        options = {"pages": 20, "cpu_offload_space": 0.01}
        with KVStore(root) as store, tiered(model, store), running(model, **options) as manager:
            answers.append(arriving(manager, prompts, pause=0.0))
            assert settled(manager) == 0
    return answers


def writes(monkeypatch: Any) -> dict[int, Any]:
    """Return a dict that gets all KV restored to pages from now on, by the number of tokens up to its end."""
    kv_by_stop, write = dict[int, Any](), Engine.write

    def noting(self: Engine, request: Any, stop: int, kv: Any) -> None:
        kv_by_stop[stop] = kv
        write(self, request, stop, kv)

    monkeypatch.setattr(Engine, "write", noting)
    return kv_by_stop
