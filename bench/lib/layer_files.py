"""FlexGen's way with a context: each layer's whole KV is read at each token, while the layer before computes."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from lib.made_contexts import SUFFIX, Contexts
from transformers.cache_utils import DynamicLayer

from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.engines.base import ReadOp, ReadReport
from hf_tiered_cache.store.memory import aligned_bytes


class LayerFiles:
    """Each layer's whole KV, rotated and in order, in a file; read at each pass, a layer ahead.

    Args:
        contexts: whose.
        folder: for the files.
        engine: reads them.
    """

    def __init__(self, contexts: Contexts, folder: Path, engine: PosixEngine) -> None:
        self._engine, self._layers, shape = engine, contexts.layers, contexts.shape
        self.waited = 0.0
        self._files = []
        for layer in range(contexts.layers):
            both = torch.stack(contexts.batch(layer))
            (folder / str(layer)).write_bytes(both.numpy().tobytes())
            self._files.append(engine.open(str(folder / str(layer))))
        room = contexts.steps + SUFFIX
        wanted = (2, contexts.rows, shape.kv_heads, contexts.tokens + room + -room % 64, shape.dim)
        count = torch.Size(wanted).numel()
        self._buffers = [aligned_bytes(count * 4).view(torch.float32).view(wanted) for _ in range(2)]
        self.held = contexts.tokens
        self.step_bytes = both.nbytes * contexts.layers
        self._under_way: Future[ReadReport] | None = None

    def read(self, layer: int) -> torch.Tensor:
        """`[2, rows, kv_heads, columns, dim]`, keys and values: good until the next layer's are asked for."""
        reading = self._under_way or self._start(layer)
        started = time.perf_counter()
        reading.result()
        self.waited += time.perf_counter() - started
        self._under_way = self._start((layer + 1) % self._layers)
        return self._buffers[layer % 2]

    def _start(self, layer: int) -> Future[ReadReport]:
        pieces = self._buffers[layer % 2][..., : self.held, :].flatten(0, 2)
        size = pieces[0].numel() * 4
        ops = [ReadOp(self._files[layer], n * size, one.view(-1).view(torch.uint8)) for n, one in enumerate(pieces)]
        return self._engine.submit(ops)


class LayerFromDisk(DynamicLayer):
    """Holds the tokens behind a context, and reads the context's KV whenever it is attended to."""

    def __init__(self, files: LayerFiles, number: int) -> None:
        super().__init__()
        self._files, self._number = files, number

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = super().update(key_states, value_states)
        memory, first = self._files.read(self._number), self._files.held
        stop = first + own[0].shape[2]
        for tensor, behind in zip(memory, own, strict=True):
            tensor[:, :, first:stop] = behind
        return memory[0][:, :, :stop], memory[1][:, :, :stop]

    def get_seq_length(self) -> int:
        return self._files.held + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0
