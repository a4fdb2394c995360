"""Reference: a DynamicCache filled by the same forward passes and cropped to the same prefix.

Nothing here uses hf_tiered_cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

GREEDY = {"do_sample": False, "max_new_tokens": 6}
KV = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of a whole prompt by layer, `[1, heads, tokens, dim]`, rotated as in the model."""


class Remembering(DynamicCache):
    """DynamicCache that also keeps KV that leaves a layer's window."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.seen.setdefault(layer_idx, []).append((key_states.clone(), value_states.clone()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def all(self) -> KV:
        """Return the KV of all tokens, with passes joined."""
        return [
            tuple(torch.cat([step[part] for step in self.seen[i]], dim=2) for part in (0, 1)) for i in sorted(self.seen)
        ]


def plain(model: PreTrainedModel, ids: torch.Tensor, **changes: Any) -> torch.Tensor:
    """Return prompts and answers that transformers generates with `GREEDY` and other options."""
    return model.generate(ids, **GREEDY | changes)


@torch.no_grad()
def kv_of(model: PreTrainedModel, ids: torch.Tensor) -> KV:
    """Return the KV of one prompt with ids `[1, tokens]`, from one forward pass."""
    cache = Remembering(model)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache.all()


def prefilled(model: PreTrainedModel, rows: list[KV], columns: int, pads: list[int] | None = None) -> DynamicCache:
    """Return a DynamicCache with the first `columns` columns of a batch of these rows."""
    cache = DynamicCache(config=model.config)
    pads = pads or [0] * len(rows)
    for index, layer in enumerate(cache.layers):
        if columns:
            put(layer, *(_columns([row[index][part] for row in rows], columns, pads) for part in (0, 1)))
    return cache


def _columns(tensors: list[torch.Tensor], columns: int, pads: list[int]) -> torch.Tensor:
    _, heads, _, dim = tensors[0].shape
    batch = tensors[0].new_zeros(len(tensors), heads, columns, dim)
    for row, (tensor, pad) in enumerate(zip(tensors, pads, strict=True)):
        batch[row, :, pad:] = tensor[0, :, : max(0, columns - pad)]
    return batch


def put(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Set the KV of a layer, `[batch, heads, columns, dim]`, as if it had computed all columns."""
    window = getattr(layer, "sliding_window", None)
    first = 0 if window is None else max(0, keys.shape[2] - (window - 1))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys[:, :, first:].contiguous(), values[:, :, first:].contiguous()
    if window is not None:
        layer.cumulative_length = keys.shape[2]


def assert_same(actual: Any, expected: Any, atol: float = 0.0) -> None:
    """Assert that two `generate()` returned the same tokens, and equal logits within `atol`."""
    assert torch.equal(actual.sequences, expected.sequences)
    assert len(actual.logits) == len(expected.logits)
    for step, (a, b) in enumerate(zip(actual.logits, expected.logits, strict=True)):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=0, atol=atol), f"step {step}: logits differ by {(a - b).abs().max()}"


def assert_like_reference(
    model: PreTrainedModel,
    cache: Any,
    ids: torch.Tensor,
    stored_ids: torch.Tensor,
    settings: dict[str, Any],
    atol: float = 0.0,
) -> None:
    """Assert that `generate()` returns the same with `cache` and with a DynamicCache of the same passes.

    Args:
        model: Model to run.
        cache: Cache under test.
        ids: Prompt.
        stored_ids: The prompt, or another one with the same restored tokens.
        settings: Settings of `generate()`, with logits.
        atol: See `assert_same`.
    """
    actual = model.generate(ids, past_key_values=cache, **settings)
    reference = prefilled(model, [kv_of(model, stored_ids)], cache.stats.tokens_restored)
    assert_same(actual, model.generate(ids, past_key_values=reference, **settings), atol)


@torch.no_grad()
def attending_to(
    model: PreTrainedModel, stored: KV, token_sets: Sequence[np.ndarray], own: KV, inputs: torch.Tensor, position: int
) -> tuple[torch.Tensor, KV]:
    """Run a pass whose layers each attend to some tokens of a prefix, and to all tokens after it.

    Args:
        model: Model to run.
        stored: KV of the prefix.
        chosen: Tokens of the prefix by layer, int64 `[n]`; a layer with a window sees those in its window.
        own: KV of the tokens after the prefix so far.
        inputs: Ids `[1, n]`.
        position: Position of the first id.

    Returns:
        Logits of the last token, `[1, vocabulary]`, and `own` with these tokens.
    """
    cache, count = DynamicCache(config=model.config), own[0][0].shape[2] + inputs.shape[1]
    for layer, tokens, pairs in zip(cache.layers, token_sets, zip(stored, own, strict=True), strict=True):
        put(
            layer,
            *(torch.cat([prefix_kv[:, :, tokens], own_kv], dim=2) for prefix_kv, own_kv in zip(*pairs, strict=True)),
        )
    positions = torch.arange(position, position + inputs.shape[1]).unsqueeze(0)
    with _masks_of_their_own(model, cache):
        output = model(input_ids=inputs, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    return output.logits[:, -1], [(layer.keys[:, :, -count:], layer.values[:, :, -count:]) for layer in cache.layers]


@contextmanager
def _masks_of_their_own(model: PreTrainedModel, cache: DynamicCache) -> Iterator[None]:
    """Set causal masks of each full-attention layer's own width; transformers makes one for all."""
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == len(cache.layers))

    def mask(cached_tokens: int) -> Any:
        def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            queries = args[0].shape[1]
            causal_mask = (
                torch.ones(queries, cached_tokens + queries, dtype=torch.bool).tril(cached_tokens)
                if queries > 1
                else None
            )
            assert "attention_mask" in kwargs
            return args, kwargs | {"attention_mask": causal_mask if causal_mask is None else causal_mask[None, None]}

        return hook

    with ExitStack() as stack:
        for block, layer in zip(blocks, cache.layers, strict=True):
            if not layer.is_sliding:
                handle = block.register_forward_pre_hook(mask(layer.keys.shape[2]), with_kwargs=True)
                stack.callback(handle.remove)
        yield


@contextmanager
def trimming_first_pass(model: PreTrainedModel, columns: int) -> Iterator[None]:
    """Trim the first pass for generation modes that feed the whole prompt (assisted decoding)."""
    passes = []

    def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if not passes and columns and positions is not None and int(positions[0, 0]) == 0:
            for name in ("input_ids", "position_ids"):
                kwargs[name] = kwargs[name][:, columns:]
        passes.append(True)
        return args, kwargs

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
