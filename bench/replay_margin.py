"""Conditions under which a replay predicts the loss of merged layers: length, number of turns, and limit.

    PYTHONPATH=. python bench/replay_margin.py --data DATA

Conversations are suspended and resumed with the next 99 tokens. Each setting reports how many merges the replay of
`Krul` accepted, and what the accepted ones lost: KL divergence from full KV and top-1 agreement. Half of the
conversations are in the language of the reference model, half are chats of people (ShareGPT).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from conversation_answers import chat, questions
from decode_answers import compare
from lib.common import load, parser_of
from lib.pages import machine, machine_text, publish, table
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.conversations.sharing import MARGIN
from hf_tiered_cache.methods import Krul

CPU = torch.device("cpu")
NEXT_TOKENS = 99
"""Number of tokens after a conversation that are compared."""


@dataclass(frozen=True, kw_only=True)
class Early(Krul):
    """Krul without a minimum number of tokens."""

    min_tokens: ClassVar[int] = 0


@dataclass(frozen=True)
class Setting:
    """Row of the page.

    Args:
        method: Method of the last turn; the turns before it use `earlier`.
        stops: Number of tokens after each turn.
        earlier: Method of the turns before.
    """

    method: Krul
    stops: Sequence[int]
    earlier: Krul | None = None


def settings() -> dict[str, Setting]:
    """Return all settings by name."""
    settings_by_name = {}
    for change, limit in ((0.12, 0.0025), (1.0, 0.0025), (1.0, 0.01)):
        method = Early(recompute=0.0, change=change, quality=MARGIN * limit)
        for tokens in (48, 64, 128, 192, 320, 480):
            settings_by_name[f"limit {limit}, change {change}, first turn of {tokens}"] = Setting(method, [tokens])
    method, no_merge = Early(recompute=0.0), Krul(0.0, recompute=0.0)
    for tokens in (16, 32, 64, 128):
        settings_by_name[f"320 tokens, last turn of {tokens}"] = Setting(method, [320 - tokens, 320], no_merge)
    stops = [20, *range(68, 480, 48), 480]
    settings_by_name["int8, 11 turns, 480 tokens"] = Setting(no_merge, stops)
    settings_by_name["Krul(), 11 turns, 480 tokens"] = Setting(Krul(recompute=0.0), stops)
    return settings_by_name


def conversations(arguments: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield token ids, int `[1, tokens]`."""
    for make in (questions, chat):
        for talk in make(arguments, 1, arguments.count // 2):
            yield talk.ids


@torch.no_grad()
def figures_of(model: PreTrainedModel, setting: Setting, ids: torch.Tensor, folder: str) -> dict[str, Any]:
    """Suspend a conversation after each turn, resume it, and compare its next tokens with full KV."""
    end = setting.stops[-1]
    prompt_ids = ids[:, : end + NEXT_TOKENS]
    with KVStore(folder, engine="posix") as store:
        for stop in setting.stops:
            method = setting.method if stop == end or setting.earlier is None else setting.earlier
            with TieredCache(model, store, conversation="c", method=method) as cache:
                model(input_ids=ids[:, :stop], past_key_values=cache, logits_to_keep=1)
        cache = TieredCache(model, store, conversation="c", method=setting.method, record=False)
        logits = model(input_ids=prompt_ids, past_key_values=cache, logits_to_keep=NEXT_TOKENS).logits[0].float()
        assert cache.stats.tokens_restored == end
        (info,) = store.conversations()
    full_logits = (
        model(input_ids=prompt_ids, past_key_values=DynamicCache(), logits_to_keep=NEXT_TOKENS).logits[0].float()
    )
    pairs, _, proposed = info.merging.partition(" pairs")[0].partition(" of ")
    comparison = compare(logits, full_logits, tuple(full_logits.argmax(1).tolist()))
    accepted = int(pairs) if proposed else 0
    return {"pairs": accepted, "KL": comparison["KL"], "top 1": comparison["top 1"], "bytes": info.bytes}


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    rows = []
    for name, figures in document["settings"].items():
        merged_figures = [
            (loss, top)
            for loss, top, pairs in zip(figures["KL"], figures["top 1"], figures["pairs"], strict=True)
            if pairs
        ]
        losses, tops = zip(*(merged_figures or [(0.0, 100.0)]), strict=True)
        row = [name, f"{len(merged_figures)} of {len(figures['KL'])}", f"{np.mean(figures['pairs']):.1f}"]
        row += [f"{max(0.0, np.mean(losses)):.4f}", f"{max(losses):.4f}", f"{np.mean(tops):.1f}"]
        rows.append([*row, f"{np.mean(figures['top 1']):.1f}", f"{np.mean(figures['bytes']) / 1e3:.0f}"])
    heads = ["setting", "merged", "pairs", "KL, mean", "KL, max", "top 1, %", "top 1 of all, %", "kB"]
    return (
        f"# Loss of merges that a replay accepts: {document['model']}\n\n{machine_text(document['machine'])} float32, "
        f"{document['count']} conversations. *Merged*: conversations in which pairs were accepted; KL (nats per token) "
        f"and top 1 are theirs, over the next {NEXT_TOKENS} tokens. *Limit*: maximum loss of the replay.\n\n"
        + table(heads, rows)
    )


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/xs"), help="folder of a reference model")
    parser.add_argument("--count", type=int, default=24, help="number of conversations")
    parser.add_argument("--data", type=Path, required=True, help="folder with data sets, including sharegpt")
    arguments = parser.parse_args()
    arguments.tokens, arguments.answer = 592, 1
    model = load(arguments.model, torch.float32, CPU)
    results = dict[str, dict[str, list[float]]]()
    for ids in tqdm(list(conversations(arguments)), desc="conversations"):
        for name, setting in settings().items():
            with tempfile.TemporaryDirectory() as folder:
                for figure, value in figures_of(model, setting, ids, folder).items():
                    results.setdefault(name, {}).setdefault(figure, []).append(value)
    with tempfile.TemporaryDirectory() as folder:
        machine_info = machine(CPU, Path(folder))
    count = len(next(iter(results.values()))["KL"])
    document = {"machine": machine_info, "model": arguments.model.name, "count": count, "settings": results}
    publish(arguments.out, f"replay-margin-{arguments.model.name}", document, report)


if __name__ == "__main__":
    main()
