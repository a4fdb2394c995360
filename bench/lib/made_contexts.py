"""Contexts that no model has read: their KV is made, and stands in a store as if a cache had computed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lib.synthetic_kv import Shape, keys_and_values, queries, turned
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.request import DecodingCheck
from hf_tiered_cache.identity import Identity, rope_regime
from hf_tiered_cache.methods import Exact, Method
from hf_tiered_cache.store.geometry import HASH_TOKENS, LayerKV

SUFFIX = 16
"""Tokens of the prompt behind the context: the first choice is theirs."""
TAG = "made queries"
"""What the hooked model is called: caches that use the contexts must say so."""


@dataclass(eq=False)
class Contexts:
    """Rows of made KV behind which a model decodes.

    Args:
        model: with a hook at each layer that puts made queries in place.
        tokens: of each context.
        rows: of the batch, a context each.
        steps: tokens to be decoded, at most.
    """

    model: PreTrainedModel
    tokens: int
    rows: int
    steps: int
    step: int = 0
    """Of the tokens behind the contexts, the first one of the pass under way."""
    ids: torch.Tensor = field(init=False)
    """int64 `[rows, tokens + SUFFIX + steps]`."""

    def __post_init__(self) -> None:
        config, behind = self.model.config, SUFFIX + self.steps
        self.shape, self.layers = Shape.of(config), config.num_hidden_layers
        random = torch.Generator().manual_seed(self.tokens)
        self.ids = torch.randint(1, config.vocab_size, (self.rows, self.tokens + behind), generator=random)
        rotation = self._rotation(torch.arange(self.tokens, self.tokens + behind))
        self._asked = [  # [rows, behind, heads * dim] each, as the projection would give it
            torch.stack(
                [
                    turned(queries(self.shape, behind, (row, layer)), *rotation, back=True).transpose(0, 1).flatten(1)
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
        """Rotated keys, and values: `[kv_heads, tokens, dim]`."""
        return keys_and_values(self.shape, self.tokens, (row, layer))

    def batch(self, layer: int) -> list[torch.Tensor]:
        """The same of all rows: `[rows, kv_heads, tokens, dim]` each."""
        every = [self.kv(row, layer) for row in range(self.rows)]
        return [torch.stack(tensors) for tensors in zip(*every, strict=True)]

    @property
    def nbytes(self) -> int:
        """Of all rows' KV."""
        return self.rows * self.layers * self.tokens * self.shape.kv_heads * self.shape.dim * 2 * 4

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let the model's queries be the made ones."""

        def ask(layer: int, module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            return self._asked[layer][:, self.step : self.step + output.shape[1]]

        hooks = [
            layer.self_attn.q_proj.register_forward_hook(partial(ask, number))
            for number, layer in enumerate(self.model.model.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def store(self, store: KVStore, method: Method, piece: int = 0) -> None:
        """Write them, cut as `method` wants it, as a cache would that has computed them; what is stored stays.

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
            identity = executor.identify(closely=True)
            assert isinstance(identity, Identity), identity
            regime = rope_regime(self.model.config, self.tokens) or ""
            recorder = executor.new_recorder(identity, regime, [0], DecodingCheck())
            layers = [(turned(keys, cos, sin, back=True)[None], values[None]) for keys, values in self._layers_of(row)]
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
