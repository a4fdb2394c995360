"""Layer-wise reading of a whole context as in FlexGen: each layer's KV is read ahead at each token."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from lib.made_contexts import SUFFIX, Contexts
from transformers.cache_utils import DynamicLayer

from hf_tiered_cache.store.engines import PosixEngine, ReadOp
from hf_tiered_cache.store.memory import aligned_bytes


class LayerFiles:
    """Files with each layer's whole KV, rotated and in order, which are read one layer ahead at each pass.

    Args:
        contexts: Contexts with the KV.
        folder: Folder for the files.
        engine: Engine that reads the files.
    """

    def __init__(self, contexts: Contexts, folder: Path, engine: PosixEngine) -> None:
        self._engine, self._layers, shape = engine, contexts.layers, contexts.shape
        self.waited = 0.0
        self._files = []
        for layer in range(contexts.layers):
            tensors = torch.stack(contexts.batch(layer))
            (folder / str(layer)).write_bytes(tensors.numpy().tobytes())
            self._files.append(engine.open(str(folder / str(layer))))
        room = contexts.steps + SUFFIX
        buffer_shape = (2, contexts.rows, shape.kv_heads, contexts.tokens + room + -room % 64, shape.dim)
        count = torch.Size(buffer_shape).numel()
        self._buffers = [aligned_bytes(count * 4).view(torch.float32).view(buffer_shape) for _ in range(2)]
        self.context_tokens = contexts.tokens
        self.step_bytes = tensors.nbytes * contexts.layers
        self._under_way: Future[int] | None = None

    def read(self, layer: int) -> torch.Tensor:
        """Return keys and values, `[2, rows, kv_heads, columns, dim]`, valid until the next layer is read."""
        reading = self._under_way or self._start(layer)
        started = time.perf_counter()
        reading.result()
        self.waited += time.perf_counter() - started
        self._under_way = self._start((layer + 1) % self._layers)
        return self._buffers[layer % 2]

    def _start(self, layer: int) -> Future[int]:
        pieces = self._buffers[layer % 2][..., : self.context_tokens, :].flatten(0, 2)
        size = pieces[0].numel() * 4
        ops = [ReadOp(self._files[layer], n * size, piece.view(-1).view(torch.uint8)) for n, piece in enumerate(pieces)]
        return self._engine.submit(ops)


class LayerFromDisk(DynamicLayer):
    """Layer that holds the tokens after a context, and reads the context's KV in each pass."""

    def __init__(self, files: LayerFiles, number: int) -> None:
        super().__init__()
        self._files, self._number = files, number

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new_kv = super().update(key_states, value_states)
        memory, first = self._files.read(self._number), self._files.context_tokens
        stop = first + new_kv[0].shape[2]
        for tensor, new_states in zip(memory, new_kv, strict=True):
            tensor[:, :, first:stop] = new_states
        return memory[0][:, :, :stop], memory[1][:, :, :stop]

    def get_seq_length(self) -> int:
        return self._files.context_tokens + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0
