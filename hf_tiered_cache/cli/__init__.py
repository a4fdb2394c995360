"""Command line `hf-tiered-cache`: inspect, check and clean up a store.

A command is a function in a module of this package and an entry below. Modules import torch, transformers and whatever
needs them inside functions, so that commands start fast.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import TieredCacheError, reason_of
from . import calibrate, listing, maintain, records, serve, timeline, top

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    if is_requested:
        print(f"hf-tiered-cache {__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\nExit status: 0 success; 1 damage was found; 2 the command failed, and one line says why.",
)
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Inspect, check and clean up a KV store; serve and evaluate models with a store.

    A store is the folder that was passed to KVStore(...) or TieredCache(model, ...). For ls, stat, verify, gc, rm,
    copy, calibrate and serve it can also be an address:

    \b
      hf-tiered-cache ls kv-store                 list the segments of each model
      hf-tiered-cache stat kv-store 1f3a9c02      show a segment, given the first characters of its id
      hf-tiered-cache top kv-store                watch uses, new segments and evictions
      hf-tiered-cache verify kv-store             check every byte for damage
      hf-tiered-cache gc kv-store --quota 100GiB  delete unused files and make room
      hf-tiered-cache rm kv-store 1f3a9c02        delete a segment
      hf-tiered-cache copy kv-store s3://b/kv     copy segments to a remote, or back
      hf-tiered-cache conversations kv-store      list stored conversations by id
      hf-tiered-cache documents kv-store          list stored passages by label
      hf-tiered-cache calibrate kv-store ...      measure what to load and what to compute
      hf-tiered-cache timeline trace.json         draw where a request spent its time
      hf-tiered-cache config                      show the settings of stores and where they come from
      hf-tiered-cache serve MODEL --store DIR     run an OpenAI-compatible server

    All commands can run while programs use the store. Commands that inspect a store accept --json for scripts. Run a
    command with --help for its options. On an encrypted store, commands that read KV require --key-file, or the
    environment variable HF_TIERED_CACHE_KEY_FILE; ls, stat, gc and rm need no key.
    """  # noqa: D301


def _add(name: str, command: Callable[..., None], *examples: str, settings: dict[str, Any] | None = None) -> None:
    lines = "\n".join(f"  hf-tiered-cache {name} {example}".rstrip() for example in examples)
    app.command(name, epilog=f"\b\nExamples:\n{lines}", context_settings=settings)(command)


_add("ls", listing.ls, "kv-store", "kv-store --json | jq -r '.[] | select(.uses == 0) | .id'")
_add("stat", listing.stat, "kv-store", "kv-store 1f3a9c02", "kv-store 1f3a9c02 --json")
_add("top", top.top, "kv-store", "kv-store --interval 5", "kv-store --seconds 10 > activity.txt")
_add("verify", maintain.verify, "kv-store", "kv-store --repair", "kv-store --key-file kv.key")
_add("gc", maintain.gc, "kv-store", "kv-store --quota 100GiB --dry-run")
_add(
    "rm",
    maintain.rm,
    "kv-store 1f3a9c02 77d0e1b4",
    "kv-store --model Qwen/Qwen2.5-0.5B --dry-run",
    "kv-store --all --yes",
)
_add(
    "copy",
    maintain.copy,
    "kv-store s3://bucket/corpus",
    "s3://bucket/corpus kv-worker",
    "kv-store redis://host:6379/0 1f3a9c02 --key-file kv.key",
)
_add("conversations", records.conversations, "kv-store", "kv-store show alice-42", "kv-store rm alice-42 --dry-run")
_add(
    "documents",
    records.documents,
    "kv-store",
    "kv-store show report-2024",
    "kv-store rm report-2023 report-2024 --dry-run",
    "kv-store --json | jq -r '.[] | select(.evicted > 0) | .label'",
)
_add(
    "calibrate",
    calibrate.calibrate,
    "kv-store --model Qwen/Qwen2.5-0.5B",
    "kv-store --model ./my-model --dtype bfloat16 --passages 16 --tokens 1024",
    "kv-store --model ./my-model --prefix 512,4096",
    "kv-store --model ./my-model --quality 0.02 --text document.txt --plot losses.png",
)
_add("config", listing.config, "", "--json")
_add("timeline", timeline.timeline, "trace.json", "trace.json --plot request.png")
_add(
    "serve",
    serve.serve,
    "Qwen/Qwen2.5-0.5B-Instruct --store kv-store",
    "./my-model --store kv-store --method contiguous_kv:budget=0.1 --host-memory 16GiB",
)
_add(
    "lm-eval",
    serve.lm_eval,
    "--tasks rte --num_fewshot 20 --batch_size 1 \\\n"
    "    --model_args pretrained=Qwen/Qwen2.5-0.5B,method=contiguous_kv,budget=0.1,store=kv-store",
    settings=serve.PASS_ON,
)


def main() -> None:
    """Run the command line. An error that the user can fix is printed as one line, with exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # labels may have characters that a terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None  # the exit status after SIGPIPE
    except TieredCacheError as error:
        reason = str(error)
    except OSError as error:
        reason = reason_of(error)
    else:
        return
    print(f"hf-tiered-cache: {' '.join(reason.split())}", file=sys.stderr)
    raise SystemExit(2) from None
