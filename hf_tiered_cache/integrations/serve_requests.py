"""Requests of the server: limits against hostile or broken clients, and settings."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from inspect import signature
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.processing_utils import (
    AudioKwargs,
    ImagesKwargs,
    ProcessingKwargs,
    ProcessorMixin,
    TextKwargs,
    VideosKwargs,
)
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_REQUEST_BYTES = 8 << 20
HEADER_SECONDS = 10.0
"""Maximum seconds from the connection to the end of a request's headers."""
BODY_SECONDS = 30.0
MAX_CONNECTIONS = 256
"""Maximum number of concurrent connections; others are answered with status 503."""
SHUTDOWN_SECONDS = 15
"""Maximum seconds for running requests to end after Ctrl-C or SIGTERM, before they are cancelled."""
CANCEL_SECONDS = 5
"""Maximum seconds for a cancelled request to compute its token and to be answered, before its connection is closed."""
MAX_SEQUENCES = 16
"""Maximum number of beams or returned sequences per request. Each takes the memory of a prompt."""
MIN_TEMPERATURE = 1e-10
"""Lower temperatures select the most likely token, since float32 cannot represent the quotients."""
_MOST = 2**31 - 1
_COUNTS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "prefill_chunk_size"), (1, math.inf)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0, math.inf)),
    **dict.fromkeys(("num_beams", "num_return_sequences"), (1, MAX_SEQUENCES)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"), (1, _MOST)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0, 1024)),  # each takes its memory
    "top_k": (0, _MOST),
}
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e10),
    **dict.fromkeys(("top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), (0, 1)),
    "assistant_confidence_threshold": (0, 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "max_time"), (-1e10, 1e10)),
    **dict.fromkeys(("length_penalty", "guidance_scale", "diversity_penalty"), (-1e10, 1e10)),
}
_TOKENS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
}
_FLAGS = {
    *("do_sample", "use_cache", "remove_invalid_values", "renormalize_logits", "disable_compile", "low_memory"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
}
_CHECKED_BY_GENERATE = {
    *("early_stopping", "exponential_decay_length_penalty", "sequence_bias", "stop_strings", "transformers_version"),
}
"""Settings whose values `generate()` checks, or ignores."""
_CLIENT_NAMES = {
    "max_new_tokens": "max_tokens",
    "repetition_penalty": "frequency_penalty",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}
"""Names in requests of generation settings."""


@dataclass(frozen=True)
class LimitedRequests:
    """ASGI middleware that passes on complete requests to `app`, and refuses large and slow ones."""

    app: ASGIApp
    max_bytes: int = MAX_REQUEST_BYTES
    """Maximum size of a request body."""
    body_seconds: float = BODY_SECONDS
    """Maximum seconds for a body to arrive."""
    closed_paths: frozenset[str] = frozenset()
    """Paths that are answered with status 403."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer: ASGIApp
        if scope["path"].rstrip("/") in self.closed_paths:
            reason = f"{scope['path']} is disabled, because this server serves one model, which stays loaded"
            answer = _refusal(403, reason)
        else:
            try:
                body = await asyncio.wait_for(self._body(scope, receive), self.body_seconds)
                answer, receive = self.app, _replay(body, receive)
            except OverflowError:
                answer = _refusal(413, f"the request is larger than {self.max_bytes} bytes")
            except asyncio.TimeoutError:
                answer = _refusal(408, f"the request took longer than {self.body_seconds:g} s to arrive")
            except ClientDisconnect:
                return
        await answer(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body. Raises OverflowError if it is too large, or ClientDisconnect."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            raise OverflowError
        body = bytearray()
        async for part in Request(scope, receive).stream():
            body += part
            if len(body) > self.max_bytes:
                raise OverflowError
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that returns the whole body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _refusal(status: int, reason: str) -> JSONResponse:
    # the rest of the request is not read
    return JSONResponse(error_body(reason), status, headers={"connection": "close"})


def error_body(reason: str, status: int = 400) -> dict[str, Any]:
    """Return an error in the format of OpenAI's API, whose clients show its message."""
    return {"error": {"message": reason, "type": "invalid_request_error" if status < 500 else "server_error"}}


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, closing connections with request headers that take longer than `HEADER_SECONDS`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
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


_PER_REQUEST = {
    *("max_new_tokens", "eos_token_id", "do_sample", "temperature", "top_k", "top_p"),
    *("use_cache", "pad_token_id", "bos_token_id"),  # without effect
}
"""Generation settings that each request in continuous batches can have for itself."""


def _changed_settings(model: PreTrainedModel, gen_config: GenerationConfig) -> dict[str, Any]:
    """Return the settings of a request, by name, that differ from the model's and from transformers' defaults."""
    defaults = GenerationConfig._get_default_generation_params()
    neutral = (vars(model.generation_config), defaults, vars(GenerationConfig()))
    return {
        name: value
        for name, value in vars(gen_config).items()
        if name[0] != "_" and all(value != values.get(name) for values in neutral)
    }


def _check_settings(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Raise HTTPException for a setting that `generate()` does not check: it can raise any error, or never end."""
    ranges = _COUNTS | _NUMBERS
    ranges["assistant_early_exit"] = (1, model.config.get_text_config(decoder=True).num_hidden_layers)
    for name, value in settings.items():
        condition, is_allowed = "", name in _CHECKED_BY_GENERATE
        if name in ranges:
            least, most = ranges[name]
            kinds = (int, float) if name in _NUMBERS else int
            condition = f"must be between {least:g} and {most:g}" + ("" if name in _NUMBERS else ", and an integer")
            is_allowed = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
        elif name in _FLAGS:
            condition, is_allowed = "must be true or false", isinstance(value, bool)
        elif name in _TOKENS:
            condition, is_allowed = "must be a token id or a list of token ids", _has_tokens(value)
        if not is_allowed:
            reason = f"is {value!r}, but {condition}" if condition else "is not supported by this server: omit that"
            raise HTTPException(400, f"{_CLIENT_NAMES.get(name, name)} {reason}")


def _has_tokens(value: Any) -> bool:
    """Return whether a value is a token id, or consists of lists of token ids."""
    if isinstance(value, list):
        return all(map(_has_tokens, value))
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST


def sampling_of(model: PreTrainedModel, gen_config: GenerationConfig) -> dict[str, float]:
    """Return the sampling settings of a request in continuous batches.

    Raises:
        HTTPException: The request has settings that the engine can only have for all requests together.
    """
    settings = _changed_settings(model, gen_config)
    unsupported = [_CLIENT_NAMES.get(name, name) for name in settings if name not in _PER_REQUEST]
    if unsupported:
        raise HTTPException(
            400, f"this server computes requests together and does not support {', '.join(unsupported)}: omit that"
        )
    own, defaults = vars(model.generation_config), GenerationConfig._get_default_generation_params()

    def setting(name: str) -> Any:
        values = (getattr(gen_config, name), own.get(name), defaults.get(name))
        return next((value for value in values if value is not None), None)

    if not setting("do_sample"):
        return {}
    size = model.config.get_text_config(decoder=True).vocab_size
    top_k = min(int(setting("top_k") or size), size)
    return {"temperature": float(setting("temperature")), "top_k": top_k, "top_p": float(setting("top_p"))}


def limit_request(
    model: PreTrainedModel, inputs: dict[str, Any], gen_config: GenerationConfig, page_tokens: int | None = None
) -> None:
    """Limit what one request computes, since requests wait for each other.

    Args:
        model: Model that computes the request.
        inputs: Inputs of `generate()`.
        gen_config: Generation settings of the request; `max_new_tokens` is limited in place.
        page_tokens: Maximum number of tokens in the pages of continuous batching, if any.

    Raises:
        HTTPException: A setting is out of range, the request exceeds the model's context or the pages, or has too many
            sequences.
    """
    if (sequences := rows_of(gen_config)) > MAX_SEQUENCES:
        raise HTTPException(
            400, f"the request has {sequences} beams or sequences, but this server allows at most {MAX_SEQUENCES}"
        )
    _check_settings(model, _changed_settings(model, gen_config))
    if gen_config.temperature is not None and gen_config.temperature < MIN_TEMPERATURE:
        gen_config.do_sample = False
    ids = inputs.get("input_ids")
    if ids is None:
        return
    tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if not tokens:  # the engine of continuous batching would end with all of its requests
        raise HTTPException(400, "the prompt has no tokens")
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = {"the model's context is": context, "the pages of this server (--cb-num-blocks) hold": page_tokens}
    for setting, limit in limits.items():
        if not isinstance(limit, int):
            continue
        if tokens >= limit:
            raise HTTPException(400, f"the prompt has {tokens} tokens, but {setting} {limit}")
        max_tokens = gen_config.max_new_tokens
        gen_config.max_new_tokens = limit - tokens if max_tokens is None else min(max_tokens, limit - tokens)


_CALLS = (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
_OPTIONS = (ProcessingKwargs, TextKwargs, ImagesKwargs, VideosKwargs, AudioKwargs)
_NO_TEMPLATE_VARIABLES = {
    *(name for call in _CALLS for name in signature(call).parameters),
    *(name for options in _OPTIONS for name in options.__annotations__),
} - {"documents"}
"""Options of tokenizers and processors. Clients must not replace the template, which is code, nor pad or resize."""


def check_template_options(options: Any) -> None:
    """Raise HTTPException unless the value of `chat_template_kwargs` has variables of the chat template only."""
    if not isinstance(options, dict):
        raise HTTPException(400, "chat_template_kwargs must be an object")
    if reserved := sorted(_NO_TEMPLATE_VARIABLES & options.keys()):
        raise HTTPException(
            400, f"chat_template_kwargs can set variables of the chat template only, not {', '.join(reserved)}"
        )


def rows_of(gen_config: GenerationConfig) -> int:
    """Return the number of sequences that a request computes at once."""
    return max(gen_config.num_beams or 1, gen_config.num_return_sequences or 1)
