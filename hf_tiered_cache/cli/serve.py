"""Commands `serve`, an OpenAI-compatible server with a store, and `lm-eval`, lm-evaluation-harness with stored KV."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..units import parse_bytes
from .output import KeyFile

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings for `typer.Typer.command(context_settings=...)`: options that typer does not know are passed to lm_eval."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with stored KV.

    All of lm_eval's options hold; --model is hf-tiered where none is named (--model hf is the same without stored KV).
    What several requests begin with, few-shot examples above all, is computed once and restored for each of them.

    \b
    --model_args takes all that the model type hf takes, and with commas between:
      method=NAME         how stored KV is restored (default: exact, with the scores of hf up to rounding)
      budget=0.1 ...      any field of the method; NAME:budget=0.1 is the same
      store=FOLDER        the store (default: one that is deleted at the end)
      host_memory=4GiB    of the store (default: 1GiB)
      key_file=PATH       of the store's key, if it is encrypted (default: $HF_TIERED_CACHE_KEY_FILE)

    For everything else: lm_eval run --help, and hf-tiered-cache lm-eval ls tasks.
    """  # noqa: D301
    try:
        from ..integrations.lm_eval import run
    except ImportError as error:
        raise ConfigError(f"lm_eval is not installed ({error}); pip install 'hf-tiered-cache[eval]'") from None
    run(context.args)


class LogLevel(str, Enum):
    """Log level of the server and the store."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A causal LM: a name on the hub, or a folder; or none, with --allow-any-model."),
    ] = None,
    *,
    store: Annotated[Path, typer.Option(help="The store's folder; made if missing.")],
    method: Annotated[str, typer.Option(help='How KV is restored, such as "contiguous_kv:budget=0.1".')] = "exact",
    codec: Annotated[
        str, typer.Option(help="How KV is stored: raw, or int8 or fp8, which take half of bfloat16 and lose bits.")
    ] = "raw",
    host_memory: Annotated[str, typer.Option(metavar="SIZE", help="Host memory for KV.")] = "1GiB",
    device_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each GPU for KV.")] = "0",
    disk_quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the store may take on disk, e.g. 100GiB.")
    ] = None,
    key_file: KeyFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    device: Annotated[str, typer.Option(help="Of the model, such as cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the model, such as bfloat16; auto: as it was saved.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="bnb-4bit or bnb-8bit.")] = None,
    attn_implementation: Annotated[str | None, typer.Option(help="Such as flash_attention_2.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    model_timeout: Annotated[int, typer.Option(help="Seconds until an idle model is unloaded; not MODEL.")] = 300,
    allow_any_model: Annotated[
        bool,
        typer.Option("--allow-any-model", help="Without MODEL: clients load any model of the hub, and any folder."),
    ] = False,
    max_request_size: Annotated[str, typer.Option(metavar="SIZE", help="What one request may send.")] = "8MiB",
    enable_cors: Annotated[bool, typer.Option("--enable-cors", help="Let browsers ask from anywhere.")] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Of the server and the store.")] = LogLevel.info,
) -> None:
    """Run an OpenAI-compatible server with a store.

    It is transformers' own server; prompts that begin alike are computed once, also those of different clients. Clients
    change nothing. `usage` says how many tokens of a prompt were restored (`cached_tokens`), and the log what each
    request restored and computed. Ctrl-C ends it.
    """
    if (model is None) != allow_any_model:
        raise ConfigError(
            "name the one MODEL to serve, or give --allow-any-model in its place: clients then load whatever they name"
        )
    if allow_any_model and trust_remote_code:
        raise ConfigError("with --allow-any-model and --trust-remote-code clients would run any code; choose one")
    max_request_bytes = parse_bytes(max_request_size, "max_request_size")
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ConfigError("the server needs more packages: pip install 'hf-tiered-cache[serve]'")
    from ..integrations.serve import serve as run
    from ..kvstore import KVStore
    from ..methods import make_method
    from ..store.cipher import read_key_file

    chosen = make_method(method)
    with KVStore(
        store,
        host_memory=host_memory,
        device_memory=device_memory,
        disk_quota=disk_quota,
        policy=chosen.policy,
        key=read_key_file(key_file),
        codec=codec,
    ) as opened:
        run(
            model,
            opened,
            chosen,
            host=host,
            port=port,
            log_level=log_level.value,
            enable_cors=enable_cors,
            max_request_bytes=max_request_bytes,
            device=device,
            dtype=dtype,
            quantization=quantization,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            model_timeout=model_timeout,
        )
