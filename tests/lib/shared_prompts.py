"""Prompts that tests share through a remote."""

from __future__ import annotations

import torch
from families import prompt

from hf_tiered_cache import TieredCache

IDS = prompt(200)
PROMPTS = [prompt(100, seed=seed) for seed in range(10, 18)]


@torch.no_grad()
def check(model, store, ids=IDS, tokens_restored=None):
    """Restore a prompt, compare its answer, and return the number of restored tokens."""
    cache = TieredCache(model, store, record=False)
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    torch.testing.assert_close(logits, model(input_ids=ids, logits_to_keep=1).logits)
    assert tokens_restored in (None, cache.stats.tokens_restored)
    return cache.stats.tokens_restored


@torch.no_grad()
def share(model, store, *prompts):
    """Compute prompts and send them to the remote."""
    for ids in prompts or (IDS,):
        model(input_ids=ids, past_key_values=TieredCache(model, store), logits_to_keep=1)
    store.flush()
