"""Server of transformers with a store for its models: `hf-tiered-cache serve MODEL --store DIR`."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import jinja2
import uvicorn
import uvicorn.config
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import split_model_id

from ..cache.suitability import check_batched
from ..errors import ConfigError
from ..kvstore import KVStore
from ..methods import Method
from ..store.faults import LINE_FORMAT
from ..tiered_cache import TieredCache, TieredSession
from ..tiers.collector import StatsCollector
from .hub import loading
from .metrics import MetricsOf, exported_metrics
from .serve_generation import Batching, NewCache, PromptStats, TieredGenerationState, request_stats
from .serve_requests import (
    CANCEL_SECONDS,
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    SHUTDOWN_SECONDS,
    ImpatientProtocol,
    LimitedRequests,
    check_template_options,
    error_body,
)

try:
    from transformers.cli.serving.systemone import SystemOneHandler
except ImportError:  # before transformers 5.23
    SystemOneHandler = None  # type: ignore[assignment, misc]

logger = logging.getLogger("hf_tiered_cache")

_CLIENT_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *(RecursionError, jinja2.TemplateError),
)
"""Errors that handlers raise for invalid values, which they do not check beforehand."""

Counted = TypeVar("Counted", TieredCache, TieredSession)


class TieredModelManager(ModelManager):
    """Model manager that, with a `force_model`, lists and loads only that, without the hub's cache.

    Requests for other models raise HTTPException.
    """

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        self._check(model_id_and_revision, kwargs.get("gguf_file"))
        return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)

    def load_model_streaming(self, model_id_and_revision: str, gguf_file: str | None = None) -> AsyncIterator[str]:
        self._check(model_id_and_revision, gguf_file)
        return super().load_model_streaming(model_id_and_revision, gguf_file=gguf_file)

    def _check(self, model_id_and_revision: str, gguf_file: str | None) -> None:
        if self.force_model is not None:
            name, only_file = split_model_id(self.force_model)
            if (model_id_and_revision, gguf_file) != (self.process_model_name(name), only_file):
                raise HTTPException(400, f"this server serves only {self.force_model!r}; request that model")

    # Called by transformers before 5.24 only; later versions list a single model themselves.
    def get_gen_models(  # type: ignore[override, unused-ignore]
        self, cache_dir: str | None = None
    ) -> list[dict[str, Any]]:
        if self.force_model is None:
            return ModelManager.get_gen_models(cache_dir)  # type: ignore[attr-defined, no-any-return, unused-ignore]
        return [{"id": self.force_model, "object": "model", "owned_by": "", "created": int(time.time())}]


class ReportsCachedTokens:
    """Handler that adds the number of prompt tokens that were not computed to `usage` in a handler's responses."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        own_stats: list[PromptStats] = []
        request_stats.set(own_stats)
        check_template_options(body.get("chat_template_kwargs") or {})
        response: Response = await self.handler.handle_request(body, request_id)
        if isinstance(response, StreamingResponse):
            response.body_iterator = _events(response.body_iterator, own_stats)
        elif own_stats and isinstance(response, JSONResponse):
            response = JSONResponse(_with_cached_tokens(json.loads(bytes(response.body)), own_stats))
        return response


_USAGE_EVENT = re.compile(r'^(\S*) (.*"usage":.*)$', re.MULTILINE)
_STREAM_ERROR = re.compile(r'^data: \{"error": "(.*)"\}$', re.MULTILINE)
"""Transformers' error in a stream, in whose place OpenAI's clients show a general message."""


async def _events(events: Any, own_stats: list[PromptStats]) -> AsyncIterator[str]:
    """Yield server-sent events, with the number of cached tokens in the event that has `usage`, and readable errors."""

    def with_cached_tokens(event: re.Match[str]) -> str:
        return f"{event[1]} {json.dumps(_with_cached_tokens(json.loads(event[2]), own_stats), ensure_ascii=False)}"

    try:
        async for batch in events:
            text = _USAGE_EVENT.sub(with_cached_tokens, str(batch))
            yield _STREAM_ERROR.sub(lambda error: f"data: {json.dumps(error_body(error[1], 500))}", text)
    finally:
        await events.aclose()


def _with_cached_tokens(document: dict[str, Any], own_stats: list[PromptStats]) -> dict[str, Any]:
    """Add the number of cached tokens to a response or event, in the format of OpenAI's API."""
    usage = document.get("usage") or (document.get("response") or {}).get("usage")
    if usage:
        details = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        cached = sum((stats.tokens_restored + stats.details.tokens_kept) // rows for stats, rows in own_stats)
        usage[details] = (usage.get(details) or {}) | {"cached_tokens": cached}
    return document


_REQUIRED = {"messages", "input"}  # members of requests that transformers reads without a check


async def _answer_refused(request: Request, error: Exception) -> Response:
    """Answer a request that is refused, or fails on what handlers do not check, in the format of OpenAI's clients."""
    if isinstance(error, StarletteHTTPException):
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        reason = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        return JSONResponse(error_body(reason, 422), 422)
    reason = f"the request cannot be served: {type(error).__name__}: {error}"
    if "chat_template" in str(error):
        reason = "the model's tokenizer has no chat template; use /v1/completions, or serve a chat model"
    elif isinstance(error, KeyError) and error.args[0] in _REQUIRED:
        reason = f"the request has no {error.args[0]!r}"
    logger.debug("%s", reason, exc_info=error)
    return JSONResponse(error_body(reason), 400)


def build_app(
    models: TieredModelManager,
    new_cache: NewCache,
    *,
    batching: Batching | None = None,
    metrics: MetricsOf | None = None,
    enable_cors: bool = False,
    max_request_bytes: int = MAX_REQUEST_BYTES,
) -> FastAPI:
    """Build transformers' server, with all endpoints, for models with caches from `new_cache`.

    Args:
        models: Models to serve.
        new_cache: Function that creates the cache for a request to a model.
        batching: Session and configuration of continuous batching; None runs one request after the other.
        metrics: Metrics that `/metrics` answers with; None for no such path.
        enable_cors: Whether browsers may send requests from any origin.
        max_request_bytes: Maximum size of a request body.
    """
    state = TieredGenerationState(new_cache, batching)
    handlers: dict[str, Any] = {
        "chat_handler": ReportsCachedTokens(ChatCompletionHandler(models, state)),
        "completion_handler": ReportsCachedTokens(CompletionHandler(models, state)),
        "response_handler": ReportsCachedTokens(ResponseHandler(models, state)),
        "transcription_handler": TranscriptionHandler(models, state),
    }
    if SystemOneHandler is not None:
        handlers["systemone_handler"] = SystemOneHandler(models, state)
    app = build_server(models, **handlers, generation_state=state, enable_cors=enable_cors)
    app.state.generation_state = state
    closed_paths = frozenset() if models.force_model is None else frozenset({"/reset"})  # it unloads the model
    for error_type in (*_CLIENT_ERRORS, StarletteHTTPException, RequestValidationError):
        app.add_exception_handler(error_type, _answer_refused)
    if metrics is not None:
        app.add_api_route("/metrics", metrics.answer, response_class=Response, response_model=None)
    app.add_middleware(LimitedRequests, max_bytes=max_request_bytes, closed_paths=closed_paths)
    return app


class Server(uvicorn.Server):
    """Server that cancels the requests that still run `SHUTDOWN_SECONDS` after Ctrl-C or SIGTERM."""

    def __init__(self, config: uvicorn.Config, state: TieredGenerationState) -> None:
        super().__init__(config)
        self._state = state

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, and cancel them after a while."""
        timer = asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, self._state.cancel)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def serve(
    model: str | None,
    store: KVStore,
    method: Method,
    *,
    host: str,
    port: int,
    log_level: str = "info",
    enable_cors: bool = False,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    batching: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Serve until Ctrl-C or SIGTERM. The arguments are those of the command `serve`, with these exceptions.

    - None as `model` loads the model that each request names, from the hub or from any folder.
    - `batching` has the arguments of `ContinuousBatchingConfig`; None runs one request after the other.
    - `options` are arguments of transformers' `ModelManager`.

    Raises:
        ConfigError: The address is not available, the model cannot be loaded, or it is not supported with this method.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # same shutdown as Ctrl-C, so that computed KV is stored
    requests = StatsCollector()
    new_cache = partial(_counted, requests, partial(TieredCache, store=store, method=method))
    batches = None
    if batching is not None:
        check_batched(method)
        new_session = partial(_counted, requests, partial(TieredSession, store=store, method=method))
        batches = Batching(new_session, ContinuousBatchingConfig(**batching))
    with suppress(KeyboardInterrupt), _listen(host, port) as listener:
        with loading(model, OSError, ValueError, ImportError):
            models = TieredModelManager(force_model=model, **options)
        for loaded_model in models.loaded_models.values():
            new_cache(loaded_model.model)  # refuse unsupported models now
        app = build_app(
            models,
            new_cache,
            batching=batches,
            metrics=exported_metrics(store, requests),
            enable_cors=enable_cors,
            max_request_bytes=max_request_bytes,
        )
        config = uvicorn.Config(
            app,
            http=ImpatientProtocol,
            limit_concurrency=MAX_CONNECTIONS,
            log_level=log_level,
            log_config=_logging(log_level),
            timeout_graceful_shutdown=SHUTDOWN_SECONDS + CANCEL_SECONDS,
        )
        if model is None:
            logger.warning(
                "clients choose the model of each request: they can load any model of the Hub, and any folder"
            )
        logger.info(
            "%s on http://%s:%d/v1, KV in %s; press Ctrl-C to stop", model or "any model", host, port, store.place
        )
        try:
            Server(config, app.state.generation_state).run(sockets=[listener])
        finally:
            app.state.generation_state.shutdown()


def _counted(total: StatsCollector, make: Callable[[PreTrainedModel], Counted], model: PreTrainedModel) -> Counted:
    """Create a cache or session of a model, which also counts into `total`."""
    counted = make(model)
    counted.count_into(total)
    return counted


def _listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, before any model is loaded. Raises ConfigError if the address is not available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from error


def _logging(level: str) -> dict[str, Any]:
    """Return uvicorn's logging configuration, extended to this library."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["formatters"]["hf_tiered_cache"] = {"format": LINE_FORMAT}
    config["handlers"]["hf_tiered_cache"] = config["handlers"]["default"] | {"formatter": "hf_tiered_cache"}
    config["loggers"]["hf_tiered_cache"] = {"handlers": ["hf_tiered_cache"], "level": level.upper(), "propagate": False}
    return config
