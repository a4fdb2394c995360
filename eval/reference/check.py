"""Is a reference model of use? What it knows, and what it loses where something is taken from it.

    python -m eval.reference.check --model eval/reference/xs --tokens 512

Measured with plain transformers and masks, without any method of ours: the share of answers that are right with full
KV; with a random tenth of the prefix's chunks; with documents that were encoded apart (in place, so that positions
are right); and how far the chunks that get most attention agree between layers. A model that loses nothing by these
cannot show what a method costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..data import Data
from ..metrics import interval
from ..tasks.ruler.haystack import sentences
from .language import KINDS, Context, Language, Question

CHUNK = 16
BARS = {"full": 97.0, "lost by a random tenth": 15.0, "lost by documents apart": 10.0, "overlap of neighbours": 52.0}
"""In percent and points: at least so much."""


@dataclass
class Findings:
    """Right answers, in percent (0 or 100 each), under each condition; by kind, and over all."""

    right: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    overlaps: dict[str, list[float]] = field(default_factory=dict)

    def add(self, condition: str, kind: str, right: bool) -> None:
        self.right.setdefault(condition, {}).setdefault(kind, []).append(100.0 * right)

    def share(self, condition: str, kind: str | None = None) -> float:
        kinds = self.right[condition]
        return float(np.mean(kinds[kind] if kind else [score for scores in kinds.values() for score in scores]))


def questions(language: Language, tokens: int, count: int, seed: int) -> Iterator[tuple[Context, Question]]:
    """So many questions, a context each, all kinds equally often ("back" needs no context)."""
    kinds = dict.fromkeys([kind for kind in KINDS if kind != "back"], 1.0)
    for number in range(count):
        context = language.context(np.random.default_rng([seed, number]), tokens, 40, kinds, density=(0.3, 0.5))
        wanted = list(kinds)[number % len(kinds)]
        asked = [question for question in context.questions if question.kind == wanted]
        if asked:
            yield context, asked[0]


def is_right(model: PreTrainedModel, ids: torch.Tensor, answer: int, mask: torch.Tensor) -> bool:
    """Whether each token of the answer is the likeliest, given those before it.

    Args:
        ids: int64 `[tokens]`, whose last `answer` tokens are the answer.
        mask: bool `[tokens, tokens]`: which token sees which.
    """
    with torch.no_grad():
        logits = model(input_ids=ids.unsqueeze(0), attention_mask=mask[None, None], use_cache=False).logits[0]
    return bool((logits[-answer - 1 : -1].argmax(-1) == ids[-answer:]).all())


def masks(context: Context, length: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Which token sees which, bool `[length, length]`, under each condition."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    sizes = [len(document) for document in context.documents]
    prefix = sum(sizes)
    documents = torch.tensor(np.repeat(np.arange(len(sizes)), sizes))
    apart = causal.clone()
    apart[:prefix, :prefix] &= documents.unsqueeze(0) == documents.unsqueeze(1)
    chunks = prefix // CHUNK
    kept = rng.choice(chunks, max(1, chunks // 10), replace=False)
    random = causal.clone()
    random[prefix:, :prefix] = torch.from_numpy(np.isin(np.arange(prefix) // CHUNK, kept))
    return {"full": causal, "random tenth": random, "documents apart": apart}


def important(model: PreTrainedModel, ids: torch.Tensor, prefix: int, share: float) -> list[set[int]]:
    """For each layer the share of the prefix's chunks that the tokens behind it attend to most."""
    with torch.no_grad():
        weights = model(input_ids=ids.unsqueeze(0), use_cache=False, output_attentions=True).attentions
    chunks = prefix // CHUNK
    count = max(1, int(share * chunks))
    found = []
    for layer in weights:  # [1, heads, queries, keys]
        mass = layer[0, :, prefix:, : chunks * CHUNK].float().sum((0, 1)).view(chunks, CHUNK).sum(1)
        found.append(set(mass.topk(count).indices.tolist()))
    return found


def measure(model: PreTrainedModel, language: Language, tokens: int, count: int, seed: int) -> Findings:
    """All of it, on `count` questions behind contexts of `tokens` tokens."""
    findings, rng = Findings(), np.random.default_rng(seed)
    for context, question in tqdm(questions(language, tokens, count, seed), total=count, unit="question"):
        prefix = [token for document in context.documents for token in document]
        ids = torch.tensor([*prefix, *question.prompt, *question.answer])
        for condition, mask in masks(context, len(ids), rng).items():
            findings.add(condition, question.kind, is_right(model, ids, len(question.answer), mask))
    model.set_attn_implementation("eager")  # the one that gives weights
    for context, question in questions(language, tokens, min(count, 100), seed + 1):
        prefix = [token for document in context.documents for token in document]
        ids = torch.tensor([*prefix, *question.prompt])
        for share in (0.1, 0.25):
            layers = important(model, ids, len(prefix), share)
            for step, name in ((1, "neighbours"), (2, "periods of 2"), (4, "periods of 4")):
                pairs = [(layers[i], layers[i + step]) for i in range(0, len(layers) - step, step)]
                findings.overlaps.setdefault(f"{name}, {share:.0%}", []).extend(
                    100 * len(a & b) / len(a) for a, b in pairs
                )
    model.set_attn_implementation("sdpa")
    return findings


def main(
    model: Annotated[Path, typer.Option(exists=True, help="Folder of the model.")],
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of a context.")] = 512,
    count: Annotated[int, typer.Option(min=4, help="Questions.")] = 400,
    seed: int = 1,
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
) -> None:
    """Measure a reference model against the bars."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    text = np.array(tokenizer(" ".join(sentences(Data(None))), add_special_tokens=False)["input_ids"])
    findings = measure(loaded, Language(tokenizer, text), tokens, count, seed)
    table = Table(title=f"{model.name} at {tokens} tokens, right answers in percent", title_justify="left")
    for heading in ("", *findings.right["full"], "all"):
        table.add_column(heading)
    for condition, kinds in findings.right.items():
        low, high = interval([score for scores in kinds.values() for score in scores])
        cells = [f"{findings.share(condition, kind):.1f}" for kind in findings.right["full"]]
        table.add_row(condition, *cells, f"{findings.share(condition):.1f} ({low:.1f}–{high:.1f})")
    overlaps = {name: float(np.mean(values)) for name, values in findings.overlaps.items()}
    full = findings.share("full")
    figures = {
        "full": full,
        "lost by a random tenth": full - findings.share("random tenth"),
        "lost by documents apart": full - findings.share("documents apart"),
        "overlap of neighbours": overlaps["neighbours, 25%"],
    }
    bars = Table(title="Bars", title_justify="left")
    for heading in ("figure", "measured", "bar", "met"):
        bars.add_column(heading)
    for name, value in figures.items():
        bars.add_row(name, f"{value:.1f}", f"≥ {BARS[name]:.0f}", "yes" if value >= BARS[name] else "no")
    console = Console()
    console.print(table)
    console.print(
        "Overlap of the most attended chunks, %:", {name: round(value, 1) for name, value in overlaps.items()}
    )
    console.print(bars)
    if out is not None:
        shares = {c: {k: findings.share(c, k) for k in kinds} for c, kinds in findings.right.items()}
        document = {"tokens": tokens, "questions": count, "seed": seed, "right": shares, "overlaps": overlaps}
        out.write_text(json.dumps(document | {"figures": figures, "bars": BARS}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
