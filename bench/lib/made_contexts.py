"""Contexts with synthetic KV, written to a store as if a cache had computed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lib.synthetic_kv import Shape, keys_and_values, queries, rotate
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.identity import Identity, rope_regime
from hf_tiered_cache.methods import Exact, Method
from hf_tiered_cache.store.geometry import HASH_TOKENS, LayerKV

SUFFIX = 16
"""Number of prompt tokens after the context, which make the first selection."""
TAG = "made queries"
"""Tag of the hooked model; caches that use the contexts need it."""


@dataclass(eq=False)
class Contexts:
    """Batch of contexts with synthetic KV, after which a model decodes.

    Args:
        model: Model whose queries are replaced by a hook in each layer.
        tokens: Number of tokens in each context.
        rows: Number of rows in the batch, one context each.
        steps: Maximum number of decoded tokens.
    """

    model: PreTrainedModel
    tokens: int
    rows: int
    steps: int
    step: int = 0
    """First token of the current pass, counted from the end of the contexts."""
    ids: torch.Tensor = field(init=False)
    """int64 `[rows, tokens + SUFFIX + steps]`."""

    def __post_init__(self) -> None:
        config, new_tokens = self.model.config, SUFFIX + self.steps
        self.shape, self.layers = Shape.of(config), config.num_hidden_layers
        random = torch.Generator().manual_seed(self.tokens)
        self.ids = torch.randint(1, config.vocab_size, (self.rows, self.tokens + new_tokens), generator=random)
        rotation = self._rotation(torch.arange(self.tokens, self.tokens + new_tokens))
        self._queries = [  # [rows, new_tokens, heads * dim] each, as the projection would return them
            torch.stack(
                [
                    rotate(queries(self.shape, new_tokens, (row, layer)), *rotation, inverse=True)
                    .transpose(0, 1)
                    .flatten(1)
                    for row in range(self.rows)
                ]
            )
            for layer in range(self.layers)
        ]

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            cos, sin = self.model.model.rotary_emb(torch.empty(0), positions[None])
        return cos[0], sin[0]

    def kv(self, row: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys, and values: `[kv_heads, tokens, dim]`."""
        return keys_and_values(self.shape, self.tokens, (row, layer))

    def batch(self, layer: int) -> list[torch.Tensor]:
        """Return rotated keys and values of all rows: `[rows, kv_heads, tokens, dim]` each."""
        row_kv = [self.kv(row, layer) for row in range(self.rows)]
        return [torch.stack(tensors) for tensors in zip(*row_kv, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of all rows."""
        return self.rows * self.layers * self.tokens * self.shape.kv_heads * self.shape.dim * 2 * 4

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Replace the model's queries by synthetic ones."""

        def replace(layer: int, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return self._queries[layer][:, self.step : self.step + output.shape[1]]

        hooks = [
            layer.self_attn.q_proj.register_forward_hook(partial(replace, number))
            for number, layer in enumerate(self.model.model.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def store(self, store: KVStore, method: Method, piece: int = 0) -> None:
        """Write the contexts with the method's geometry, unless they are stored already.

        Args:
            store: Store to write to.
            method: Method that defines the geometry.
            piece: Number of tokens per segment, a multiple of 16; 0 for one segment per context.
        """
        positions = torch.arange(self.tokens)
        cos, sin = self._rotation(positions)
        kind = LayerKV(*(self.shape.kv_heads, self.shape.dim) * 2, 0, "key", self.shape.dim, position_independent=True)
        for row in tqdm(range(self.rows), desc=f"contexts of {self.tokens} tokens", disable=self.rows < 2):
            ids = self.ids[row : row + 1, : self.tokens]
            if store.lookup(self.model, ids, method=method, tag=TAG).stored >= self.tokens - HASH_TOKENS:
                continue
            exact = Exact(geometry=method.geometry, recompute=0.0, decline=False)
            executor = TieredCache(self.model, store, method=exact, tag=TAG)._executor
            identity = executor.identify(begins_request=True)
            assert isinstance(identity, Identity), identity
            regime = rope_regime(self.model.config, self.tokens) or ""
            recorder = executor.new_recorder(identity, regime, [0])
            layers = [
                (rotate(keys, cos, sin, inverse=True)[None], values[None]) for keys, values in self._layers_of(row)
            ]
            for tokens in torch.arange(self.tokens).split(piece or self.tokens):
                span = slice(int(tokens[0]), int(tokens[-1]) + 1)
                recorder.begin(span.start)
                for layer, (keys, values) in enumerate(layers):
                    recorder.capture(layer, kind, keys[:, :, span], values[:, :, span])
                recorder.end(ids[:, span], len(tokens))
                recorder.seal()
            store.flush()

    def _layers_of(self, row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.kv(row, layer) for layer in range(self.layers))
