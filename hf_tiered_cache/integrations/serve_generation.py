"""How the server computes requests with a store: one after the other, or in continuous batches."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from fastapi import HTTPException
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
)

from .. import reasons
from ..errors import ConfigError
from ..stats import RequestStats
from ..store.faults import Notices
from ..tiered_cache import TieredCache, TieredSession
from .serve_requests import limit_request, rows_of, sampling_of

logger = logging.getLogger("hf_tiered_cache")

_notices = Notices()

NewCache = Callable[[PreTrainedModel], TieredCache]
"""Function that creates the cache of a request to a model."""
STOPPING = "the server is stopping"
"""Error of cancelled requests."""
ENDING = "continuous batching has ended after an error; send the request again, which starts it anew"
"""Error of requests to an engine that is ending."""
PromptStats = tuple[RequestStats, int]
"""Statistics of a prompt, summed over its rows, and the number of rows."""
request_stats: ContextVar[list[PromptStats]] = ContextVar("hf_tiered_cache_request_stats")
"""Statistics of the prompts of the current HTTP request."""


@dataclass(frozen=True)
class Batching:
    """Session of a model, and configuration of the pages, for continuous batching of the server."""

    new_session: Callable[[PreTrainedModel], TieredSession]
    config: ContinuousBatchingConfig


_GREEDY = {"temperature": 0.5, "top_k": 1, "top_p": 0.0}
"""Sampling settings that always select the most likely token. They are not neutral, so that no processor is missing."""


class Cancellation(StoppingCriteria):
    """Cancellation of all requests, which end with an error at their next token."""

    def __init__(self) -> None:
        self.requested = threading.Event()

    def check(self) -> None:
        """Raise HTTPException if requests are cancelled."""
        if self.requested.is_set():
            raise HTTPException(503, STOPPING)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        """Return that no sequence `[batch]` ends, unless requests are cancelled."""
        self.check()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


class TieredGenerateManager(GenerateManager):
    """Generate manager that creates a `TieredCache` for each request, by a function of the model."""

    def __init__(self, new_cache: NewCache, cancellation: Cancellation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._new_cache, self._cancellation = new_cache, cancellation
        self._running = threading.Lock()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().submit(self._run, fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().async_submit(self._run, fn, *args, **kwargs)

    def stop(self) -> None:
        """Wait until cancelled requests have ended: the thread must not run a model when the interpreter exits."""
        with self._running:
            pass

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._running:
            self._cancellation.check()
            return fn(*args, **kwargs)

    def generate_streaming(
        self, model: PreTrainedModel, processor: Any, inputs: dict[str, Any], gen_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[asyncio.Queue[Any], DirectStreamer]:
        inputs = self._with_cache(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: Any, inputs: dict[str, Any], gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inputs = self._with_cache(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    def _with_cache(
        self, model: PreTrainedModel, inputs: dict[str, Any], gen_config: GenerationConfig
    ) -> dict[str, Any]:
        """Return the inputs of `generate()`, with a cache unless another one is requested or the model unsupported.

        Raises:
            HTTPException: The request exceeds the model's context, or has too many sequences.
        """
        limit_request(model, inputs, gen_config)
        inputs = {**inputs, "stopping_criteria": StoppingCriteriaList([self._cancellation])}
        implementation = gen_config.cache_implementation or model.generation_config.cache_implementation
        if gen_config.use_cache is False or implementation:
            reason = reasons.bypassed("cache_implementation" if implementation else "use_cache", implementation)
            _notices.warn(reason, reason)
            return inputs
        try:
            cache = self._new_cache(model)
        except ConfigError as error:
            logger.warning("%s is served without the store: %s", model.name_or_path, error)
            return inputs
        request_stats.get([]).append((cache.stats, rows_of(gen_config)))
        return {**inputs, "past_key_values": cache}


class BatchedGenerateManager(CBGenerateManager):
    """Generate manager that runs requests in continuous batches, with the store."""

    def __init__(self, batching: Batching) -> None:
        config = copy.copy(batching.config)
        config.per_request_processors = True
        super().__init__(cb_config=config)
        self._batching = batching
        self._session: TieredSession | None = None
        self._numbers = itertools.count()
        self._sampling: dict[str, dict[str, float]] = {}
        self._is_stopping = False
        self._answers: set[asyncio.Future[Any]] = set()
        self._streams: WeakKeyDictionary[CBStreamer, asyncio.Queue[Any]] = WeakKeyDictionary()

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Start the engine, with the settings of the model. No request's settings must apply to the others."""
        if self._cb is not None:
            return
        if self._session is None:
            try:
                self._session = self._batching.new_session(model)
            except ConfigError as error:
                logger.warning("%s is served without the store: %s", model.name_or_path, error)
        config = copy.deepcopy(model.generation_config)
        config.update(do_sample=True, num_beams=1, num_return_sequences=1, **_GREEDY)
        attention = model.config._attn_implementation
        try:
            engine = model.init_continuous_batching(
                generation_config=config, continuous_batching_config=self._cb_config
            )
            engine.batch_processor = engine._create_batch_processor()  # limits of requests depend on its pages
        except Exception as error:
            logger.exception("continuous batching cannot start")
            model.set_attn_implementation(attention)  # the engine switches to its own, and back only when it ends
            raise HTTPException(503, f"continuous batching cannot start: {error}") from error
        engine.add_request = partial(self._add, engine, engine.add_request)
        engine.start()
        self._cb = engine

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, *args: Any, **kw: Any
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        name = self._begin(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, name, *args, **kw)
        self._streams[streamer] = queue
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> Any:
        name = self._begin(model, inputs, gen_config, request_id)
        answer = asyncio.ensure_future(super().generate_non_streaming(model, processor, inputs, gen_config, name))
        self._answers.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self._cb.cancel_request(name)  # type: ignore[union-attr]
            if self._is_stopping:
                raise HTTPException(503, STOPPING) from None
            raise
        finally:
            self._answers.discard(answer)

    def cancel(self) -> None:
        """End all requests with an error, in the event loop, and refuse others."""
        self._is_stopping = True
        for answer in list(self._answers):
            answer.cancel()
        for streamer, queue in list(self._streams.items()):
            queue.put_nowait(_StreamError(STOPPING))
            streamer.cancel()

    def stop(self) -> None:
        super().stop()
        if self._session is not None:
            self._session.close()

    def _begin(
        self, model: PreTrainedModel, inputs: dict[str, Any], gen_config: GenerationConfig, request_id: str
    ) -> str:
        """Limit and count a request, and return its name in the engine, which clients cannot repeat."""
        if self._is_stopping:
            raise HTTPException(503, STOPPING)
        processor = getattr(self._cb, "batch_processor", None)
        limit_request(model, inputs, gen_config, None if processor is None else _page_tokens(processor.cache))
        sampling = sampling_of(model, gen_config)
        name = f"{request_id}-{next(self._numbers)}"
        self._sampling[name] = sampling
        if self._session is not None:
            request_stats.get([]).append((self._session.count_batched(self._cb, name), 1))
        return name

    def _add(
        self, engine: Any, add: Callable[..., Any], input_ids: list[int], request_id: str | None = None, **options: Any
    ) -> Any:
        """Add a request to the engine, with its own sampling settings. Raises HTTPException if the engine is ending."""
        sampling = self._sampling.pop(request_id or "", {})
        name = add(input_ids, request_id=request_id, **options, **sampling)
        if name is None or engine.background_thread_status.can_accept_new_requests() is not None:
            raise HTTPException(503, ENDING)  # it drops requests, and nothing would ever answer them
        return name


def _page_tokens(cache: Any) -> int:
    """Return the maximum number of tokens of one request that the pages of an engine hold."""

    def overflow(tokens: int) -> bool:
        if not hasattr(cache, "cache_allocators"):  # before transformers 5.18
            return bool(cache.blocks_needed(-(-tokens // cache.block_size), 0) > cache.num_blocks)
        groups = cache.cache_allocators.values()
        sectors = sum(-(-group.needs_new_blocks("", 0, tokens) // group.blocks_per_sector) for group in groups)
        return bool(sectors > cache.num_sectors)

    return bisect_left(range(1, 1 << 40), True, key=overflow)


class TieredGenerationState(GenerationState):
    """Generation state that runs requests with a `TieredCache`, one after the other, or in continuous batches."""

    def __init__(self, new_cache: NewCache, batching: Batching | None = None) -> None:
        super().__init__(continuous_batching=batching is not None)
        self._new_cache, self._batching = new_cache, batching
        self.cancellation = Cancellation()
        self._managers: dict[str, TieredGenerateManager] = {}
        self._cb_manager: BatchedGenerateManager | None = None
        self._cb_model_id: str | None = None

    def get_manager(self, model_id: str, use_cb: bool = False) -> TieredGenerateManager | BatchedGenerateManager:
        if use_cb and self._batching is not None:
            if self._cb_manager is None or self._cb_model_id != model_id or not self.is_cb_alive():
                super().shutdown()
                self._cb_manager, self._cb_model_id = BatchedGenerateManager(self._batching), model_id
            return self._cb_manager
        if model_id not in self._managers:
            self._managers[model_id] = TieredGenerateManager(self._new_cache, self.cancellation)
        return self._managers[model_id]

    def cancel(self) -> None:
        """Cancel all requests. Called in the event loop."""
        self.cancellation.requested.set()
        if self._cb_manager is not None:
            self._cb_manager.cancel()

    def shutdown(self) -> None:
        """Cancel requests that run alone, and wait until none runs."""
        self.cancellation.requested.set()
        super().shutdown()
        for manager in self._managers.values():
            manager.stop()
