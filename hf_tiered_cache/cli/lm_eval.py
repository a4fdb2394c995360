"""Command `lm-eval`: lm-evaluation-harness with stored KV."""

from __future__ import annotations

import typer

from ..errors import ConfigError

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
