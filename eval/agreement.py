"""Agreement with full KV: how far a method's next-token distributions are from those of computing everything.

    python -m eval.agreement --model MODEL --text FILE

The text is cut into windows; of each, the first part is stored as a prefix and the rest asked for as a suffix, by the
method and by a DynamicCache. No labels are needed, and the measure is far more sensitive than accuracy.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_tiered_cache import METHODS, KVStore, TieredCache, TieredCacheError


@dataclass(frozen=True)
class Agreement:
    """Over all suffix tokens of all windows."""

    windows: int
    tokens: int
    restored: int
    """Tokens restored rather than computed."""
    top1: float
    """Share of positions where both would say the same next token."""
    kl: float
    """Mean Kullback-Leibler divergence of the method's distribution from full KV's, in nats."""
    largest_logit_difference: float


def measure(
    model: PreTrainedModel,
    ids: torch.Tensor,
    store: KVStore,
    *,
    method: str = "exact",
    window: int = 512,
    suffix: int = 32,
) -> Agreement:
    """Compare `method` with full KV on consecutive windows of `ids`, int64 `[tokens]`."""
    windows = ids[: len(ids) // window * window].view(-1, window)
    agree = kl = largest = 0.0
    restored = 0
    for row in tqdm(windows, desc=f"agreement of {method}", unit="window"):
        prefix, whole = row[: window - suffix].unsqueeze(0), row.unsqueeze(0)
        store.precompute(model, prefix, progress=False)
        cache = TieredCache(model, store, method=method, record=False)
        with torch.no_grad():
            ours = model(input_ids=whole, past_key_values=cache, logits_to_keep=suffix).logits[0].float()
            full = model(input_ids=whole, use_cache=False, logits_to_keep=suffix).logits[0].float()
        restored += cache.stats.tokens_restored
        agree += float((ours.argmax(-1) == full.argmax(-1)).sum())
        divergence = torch.nn.functional.kl_div(
            ours.log_softmax(-1), full.log_softmax(-1), reduction="none", log_target=True
        )
        kl += float(divergence.sum())
        largest = max(largest, float((ours - full).abs().max()))
    tokens = len(windows) * suffix
    if not tokens:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one window of {window}; use a smaller --window")
    return Agreement(len(windows), tokens, restored, agree / tokens, kl / tokens, largest)


def main(
    model: Annotated[str, typer.Option(help="A model of the hub, or a folder.")],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A text file.")],
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = "exact",
    window: Annotated[int, typer.Option(min=34, help="Tokens of a window.")] = 512,
    suffix: Annotated[int, typer.Option(min=1, help="Of these, tokens of the suffix.")] = 32,
    limit: Annotated[int, typer.Option(min=1, help="Windows at most.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
) -> None:
    """Measure how well a method agrees with full KV."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[0][: window * limit]
    with tempfile.TemporaryDirectory() as folder, KVStore(folder) as store:
        try:
            result = measure(loaded, ids, store, method=method, window=window, suffix=suffix)
        except (TieredCacheError, ValueError) as error:
            typer.echo(f"eval.agreement: {error}", err=True)
            raise typer.Exit(2) from None
    if out is not None:
        out.write_text(
            json.dumps(
                {"model": model, "method": method, "window": window, "suffix": suffix} | asdict(result), indent=1
            )
            + "\n"
        )
    table = Table(title=f"{method} against full KV", title_justify="left", show_header=False)
    for name, value in asdict(result).items():
        table.add_row(name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
