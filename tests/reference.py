"""What to compare with: a DynamicCache filled by the same forward passes and cropped to the same prefix.

Nothing here uses hf_tiered_cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""For each layer keys and values of a whole prompt, `[1, heads, tokens, dim]`, rotated as the model does."""


class Remembering(DynamicCache):
    """A DynamicCache that also keeps what leaves a layer's window."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.seen.setdefault(layer_idx, []).append((key_states.clone(), value_states.clone()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def all(self) -> KV:
        """KV of every token, passes joined."""
        return [
            tuple(torch.cat([step[part] for step in self.seen[i]], dim=2) for part in (0, 1)) for i in sorted(self.seen)
        ]


@torch.no_grad()
def kv_of(model: PreTrainedModel, ids: torch.Tensor) -> KV:
    """The KV of one prompt, from one forward pass; ids `[1, tokens]`."""
    cache = Remembering(model)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache.all()


def prefilled(model: PreTrainedModel, rows: list[KV], columns: int, pads: list[int] | None = None) -> DynamicCache:
    """A DynamicCache of the model's that holds the first `columns` columns of a batch with these rows."""
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
    """Let a layer hold the columns given, `[batch, heads, columns, dim]`, as if it had computed them all."""
    window = getattr(layer, "sliding_window", None)
    first = 0 if window is None else max(0, keys.shape[2] - (window - 1))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys[:, :, first:].contiguous(), values[:, :, first:].contiguous()
    if window is not None:
        layer.cumulative_length = keys.shape[2]


@contextmanager
def trimming_first_pass(model: PreTrainedModel, columns: int) -> Iterator[None]:
    """For generation modes that feed the whole prompt even to a filled cache (assisted decoding)."""
    done = []

    def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if not done and columns and positions is not None and int(positions[0, 0]) == 0:
            for name in ("input_ids", "position_ids"):
                kwargs[name] = kwargs[name][:, columns:]
        done.append(True)
        return args, kwargs

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
