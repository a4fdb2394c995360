"""Commands `serve`, an OpenAI-compatible server with a store, and `lm-eval`, lm-evaluation-harness with stored KV."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..units import parse_bytes
from .output import KeyFile

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings for `typer.Typer.command(context_settings=...)`: options that typer does not know are passed to lm_eval."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with stored KV.

    All options of lm_eval are supported. The default of --model is hf-tiered (--model hf runs without stored KV).
    Common prefixes of several requests, such as few-shot examples, are computed once and restored for each request.

    \b
    --model_args accepts all arguments of the model type hf, and these, separated by commas:
      method=NAME         method that restores KV (default: exact, with the scores of hf up to rounding)
      budget=0.1 ...      any field of the method; NAME:budget=0.1 is equivalent
      store=FOLDER        folder of the store (default: a temporary store, deleted at the end)
      host_memory=4GiB    host memory of the store (default: 1GiB)
      key_file=PATH       file with the key of an encrypted store (default: $HF_TIERED_CACHE_KEY_FILE)

    For other options, see lm_eval run --help. hf-tiered-cache lm-eval ls tasks lists the tasks.
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
        typer.Argument(help="Causal LM: a name on the Hub, or a folder. Omit it only with --allow-any-model."),
    ] = None,
    *,
    store: Annotated[str, typer.Option(help="Folder of the store, created if missing, or address of a backend.")],
    method: Annotated[
        str,
        typer.Option(
            help="Method that restores KV: auto, cache_blend, cache_tune, contiguous_kv, epic, exact, impress, krul, "
            'kv_drive, or that of a plug-in. Settings follow its name: "contiguous_kv:budget=0.1".'
        ),
    ] = "exact",
    codec: Annotated[
        str | None,
        typer.Option(
            help="Codec that stores KV: raw (default); int8 or fp8, which are lossy and half as large as bfloat16; or "
            "one of a plug-in."
        ),
    ] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory for KV (default: 1GiB).")] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for KV on each GPU (default: 0).")
    ] = None,
    disk_quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum size of the store on disk, e.g. 100GiB.")
    ] = None,
    key_file: KeyFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    device: Annotated[str, typer.Option(help="Device of the model, such as cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Data type of the model, such as bfloat16; auto: as saved.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="Quantization of the model: bnb-4bit or bnb-8bit.")] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help="Attention implementation, such as flash_attention_2.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")
    ] = False,
    model_timeout: Annotated[
        int, typer.Option(help="Seconds until an idle model is unloaded; does not apply to MODEL.")
    ] = 300,
    allow_any_model: Annotated[
        bool,
        typer.Option(
            "--allow-any-model", help="Instead of MODEL: let clients load any model of the Hub, and any folder."
        ),
    ] = False,
    max_request_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a request.")] = "8MiB",
    enable_cors: Annotated[
        bool, typer.Option("--enable-cors", help="Allow browser requests from any origin (CORS).")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Log level of the server and the store.")] = LogLevel.info,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Compute requests together, with KV in pages.")
    ] = False,
    cb_block_size: Annotated[int | None, typer.Option(help="Tokens per page.")] = None,
    cb_num_blocks: Annotated[int | None, typer.Option(help="Number of pages; by default what memory allows.")] = None,
    cb_max_batch_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per pass.")] = None,
    cb_max_memory_percent: Annotated[float | None, typer.Option(help="Share of the memory for pages.")] = None,
) -> None:
    """Run an OpenAI-compatible server with a store.

    This is the server of transformers with stored KV: common prefixes of prompts, also of different clients, are
    computed once. Clients need no changes. `usage` reports the number of restored tokens of a prompt (`cached_tokens`),
    and the log reports what each request restored and computed. Press Ctrl-C to stop the server.
    """
    if (model is None) != allow_any_model:
        raise ConfigError("specify one MODEL to serve, or pass --allow-any-model, which lets clients load any model")
    if allow_any_model and trust_remote_code:
        raise ConfigError(
            "--allow-any-model and --trust-remote-code cannot be combined, because clients could then run any code"
        )
    paging = {
        "block_size": cb_block_size,
        "num_blocks": cb_num_blocks,
        "max_batch_tokens": cb_max_batch_tokens,
        "max_memory_percent": cb_max_memory_percent,
    }
    paging = {name: value for name, value in paging.items() if value is not None}
    if paging and not continuous_batching:
        raise ConfigError("the options --cb-... require --continuous-batching")
    max_request_bytes = parse_bytes(max_request_size, "max_request_size")
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ConfigError("the server requires more packages: pip install 'hf-tiered-cache[serve]'")
    from ..integrations.serve import serve as run
    from ..kvstore import KVStore
    from ..methods import make_method
    from ..store.cipher import read_key_file

    parsed_method = make_method(method)
    options = {
        "host_memory": host_memory, "device_memory": device_memory, "disk_quota": disk_quota, "codec": codec,
    }  # fmt: skip
    given_options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    with KVStore(store, policy=parsed_method.policy, key=read_key_file(key_file), **given_options) as kv_store:
        run(
            model,
            kv_store,
            parsed_method,
            host=host,
            port=port,
            log_level=log_level.value,
            enable_cors=enable_cors,
            max_request_bytes=max_request_bytes,
            batching=paging if continuous_batching else None,
            device=device,
            dtype=dtype,
            quantization=quantization,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            model_timeout=model_timeout,
        )
