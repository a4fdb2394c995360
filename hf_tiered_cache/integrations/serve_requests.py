"""Requests of the server: limits against hostile or broken clients, statistics, and continuous batches."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import CBGenerateManager, CBStreamer
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ConfigError
from ..stats import RequestStats
from ..tiered_cache import TieredSession

MAX_REQUEST_BYTES = 8 << 20
HEADER_SECONDS = 10.0
"""Maximum seconds from the connection to the end of a request's headers."""
BODY_SECONDS = 30.0
MAX_CONNECTIONS = 256
"""Maximum number of concurrent connections; others are answered with status 503."""
MAX_SEQUENCES = 16
"""Maximum number of beams or returned sequences per request. Each takes the memory of a prompt."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class LimitedRequests:
    """ASGI middleware that passes on complete requests, and refuses large and slow ones.

    Args:
        app: Application to pass requests to.
        max_bytes: Maximum size of a request body.
        body_seconds: Maximum seconds for a body to arrive.
        closed_paths: Paths that are answered with status 403.
    """

    def __init__(
        self,
        app: App,
        max_bytes: int = MAX_REQUEST_BYTES,
        body_seconds: float = BODY_SECONDS,
        closed_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._max_bytes, self._body_seconds, self._closed = app, max_bytes, body_seconds, closed_paths

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].rstrip("/") in self._closed:
            await _refuse(
                send, 403, f"{scope['path']} is disabled, because this server serves one model, which stays loaded"
            )
            return
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self._body_seconds)
        except OverflowError:
            await _refuse(send, 413, f"the request is larger than {self._max_bytes} bytes")
        except asyncio.TimeoutError:
            await _refuse(send, 408, f"the request took longer than {self._body_seconds:g} s to arrive")
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected. Raises OverflowError if it is too large."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise OverflowError
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise OverflowError
            if not message.get("more_body", False):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that returns the whole body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps(error_body(reason)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),  # the rest of the request is not read
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(reason: str) -> dict[str, Any]:
    """Return an error in the format of OpenAI's API."""
    return {"error": {"message": reason, "type": "invalid_request_error"}}


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, closing connections with request headers that take longer than `HEADER_SECONDS`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the header timeout of a new connection."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process data from the client, and update the header timeout."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the header timeout of a closed connection."""
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


logger = logging.getLogger("hf_tiered_cache")

request_stats: ContextVar[list[RequestStats]] = ContextVar("hf_tiered_cache_request_stats")
"""Statistics of the prompts of the current HTTP request."""


@dataclass(frozen=True)
class Batching:
    """Session of a model, and configuration of the pages, for continuous batching of the server."""

    new_session: Callable[[PreTrainedModel], TieredSession]
    config: ContinuousBatchingConfig


class BatchedGenerateManager(CBGenerateManager):
    """Generate manager that runs requests in continuous batches, with the store."""

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
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        *args: Any,
        **kw: Any,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        name = self._begin(model, inputs, gen_config, request_id)
        return super().generate_streaming(model, processor, inputs, gen_config, name, *args, **kw)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
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
        if not inputs["input_ids"]:
            raise HTTPException(400, "the prompt has no tokens")  # the engine would end with all of its requests
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
    limit = context - tokens
    gen_config.max_new_tokens = limit if gen_config.max_new_tokens is None else min(gen_config.max_new_tokens, limit)
