"""Replay of the last tokens of a cache over changed KV. See `conversations.sharing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..conversations.sharing import REPLAYED_TOKENS
from ..layers import DenseSource, LayerTensors


class CacheReplay:
    """Replay of the last tokens of one sequence.

    Args:
        run: Function that runs the model on token ids, int `[1, n]`, and a cache, and returns logits
            `[1, n, vocabulary]`.
        layers: Cache layers of all layers of the model, which hold the whole sequence or a window of it.
        ids: Tokens of the sequence, int `[1, tokens]`.
        count: Number of tokens to replay.

    Raises:
        ValueError: A layer does not hold the KV before the replayed tokens.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor, Cache], torch.Tensor],
        layers: Sequence[Any],
        ids: torch.Tensor,
        count: int = REPLAYED_TOKENS,
    ) -> None:
        self._run, self._ids, self._layers = run, ids[:, -count:], list[_FixedLayer]()
        for layer in layers:
            if not isinstance(layer, DenseSource) or layer.selects or layer.columns != ids.shape[1]:
                raise ValueError("a layer does not hold the KV of the conversation")
            if layer.held <= count or layer.keys is None or layer.values is None:
                raise ValueError(f"a layer holds only the last {layer.held} tokens")
            held = slice(0, layer.held - count)
            keys, values = (tensor[:1, :, held] for tensor in (layer.keys, layer.values))
            self._layers.append(_FixedLayer(keys, values, layer.columns - layer.held, layer.is_sliding))
        self._expected: torch.Tensor | None = None

    def kv(self, layer: int) -> LayerTensors:
        """Return the rotated keys and values of a layer before the replayed tokens, `[1, heads, n, dim]`."""
        fixed = self._layers[layer]
        return fixed.fixed_keys, fixed.fixed_values

    def loss(self, changed: Mapping[int, LayerTensors]) -> float:
        """Return the mean KL divergence from the unchanged KV's predictions, in nats; NaN if any is not finite.

        Args:
            changed: Keys and values of changed layers, in the form of `kv`.
        """
        if self._expected is None:
            self._expected = self._log_probs({})
        log_probs = self._log_probs(changed)
        divergence = (self._expected.exp() * (self._expected - log_probs)).sum(-1)  # [tokens]
        return float(divergence.mean())

    @torch.no_grad()
    def _log_probs(self, changed: Mapping[int, LayerTensors]) -> torch.Tensor:
        """Return the predictions over changed KV, float32 `[tokens, vocabulary]`."""
        layers: list[Any] = [
            _FixedLayer(*changed[index], layer.first, layer.is_sliding) if index in changed else layer
            for index, layer in enumerate(self._layers)
        ]
        return self._run(self._ids, Cache(layers=layers))[0].float().log_softmax(-1)


class _FixedLayer(CacheLayerMixin):
    """Cache layer whose KV never grows: a pass sees it, followed by the pass's own KV.

    Args:
        keys: Rotated keys, `[1, heads, n, dim]`.
        values: Values, likewise.
        first: Position of the first of them.
        is_sliding: Whether the layer has sliding window attention.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, first: int, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed_keys, self.fixed_values = keys, values
        self.first, self.is_sliding, self.is_initialized = first, is_sliding, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer is initialized."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat([self.fixed_keys, key_states], dim=2)
        return keys, torch.cat([self.fixed_values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fixed_keys.shape[2] + query_length, self.first

    def get_seq_length(self) -> int:
        return self.first + self.fixed_keys.shape[2]

    def get_max_length(self) -> int:
        return -1
