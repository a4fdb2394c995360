"""Requests of the server in continuous batches, and what all requests of the server share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import CBGenerateManager, CBStreamer

from ..errors import ConfigError
from ..stats import RequestStats
from ..tiered_cache import TieredSession
from .limits import MAX_SEQUENCES

logger = logging.getLogger("hf_tiered_cache")

request_stats: ContextVar[list[RequestStats]] = ContextVar("hf_tiered_cache_request_stats")
"""Statistics of the prompts of the current HTTP request."""


@dataclass(frozen=True)
class Batching:
    """Continuous batching of the server.

    Args:
        new_session: Function that opens a session of a model.
        config: Configuration of the pages.
    """

    new_session: Callable[[PreTrainedModel], TieredSession]
    config: ContinuousBatchingConfig


class BatchedGenerateManager(CBGenerateManager):
    """Generate manager that runs requests in continuous batches, with the store.

    Args:
        batching: Session and configuration.
    """

    def __init__(self, batching: Batching) -> None:
        super().__init__(cb_config=batching.config)
        self._batching = batching
        self._session: TieredSession | None = None
        self._numbers = itertools.count()

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        if self._session is None and self._cb is None:
            try:
                self._session = self._batching.new_session(model)
            except ConfigError as error:
                logger.warning("%s is served without the store: %s", model.name_or_path, error)
        super().init_cb(model, gen_config)

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        name = self._begin(model, inputs, gen_config, request_id)
        return super().generate_streaming(model, processor, inputs, gen_config, name, response_parser)

    async def generate_non_streaming(
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        request_id: str,
    ) -> Any:
        name = self._begin(model, inputs, gen_config, request_id)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, name)

    def stop(self) -> None:
        super().stop()
        if self._session is not None:
            self._session.close()

    def _begin(
        self, model: PreTrainedModel, inputs: dict[str, Any], gen_config: GenerationConfig, request_id: str
    ) -> str:
        """Limit and count a request, and return its name in the engine, which clients cannot repeat."""
        limit_request(model, inputs, gen_config)
        name = f"{request_id}-{next(self._numbers)}"
        if self._session is not None:
            request_stats.get([]).append(self._session.count_batched(self._cb, name))
        return name


def limit_request(model: PreTrainedModel, inputs: dict[str, Any], gen_config: GenerationConfig) -> None:
    """Limit what one request computes, since requests wait for each other.

    Raises:
        HTTPException: The request exceeds the model's context, or has too many sequences.
    """
    sequences = max(gen_config.num_beams or 1, gen_config.num_return_sequences or 1)
    if sequences > MAX_SEQUENCES:
        raise HTTPException(
            400, f"the request has {sequences} beams or sequences, but this server allows at most {MAX_SEQUENCES}"
        )
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    ids = inputs.get("input_ids")
    if not isinstance(context, int) or ids is None:
        return
    if (tokens := len(ids) if isinstance(ids, list) else ids.shape[-1]) >= context:
        raise HTTPException(400, f"the prompt has {tokens} tokens, but the model's context is {context}")
    gen_config.max_new_tokens = min(gen_config.max_new_tokens or context, context - tokens)
