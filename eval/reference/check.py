"""Check a reference model: accuracy with full KV, and loss of accuracy with reduced context.

    python -m eval.reference.check --model eval/reference/xs
    python -m eval.reference.check --model eval/reference/long --long --tokens 512 --tokens 4096 --tokens 8192

The check uses plain transformers with attention masks, without methods of this project. It measures the share of right
answers with full KV, with a random tenth of the prefix's chunks, and with separately encoded documents (at their
positions in the prompt), and the overlap of the most attended chunks between layers and between the KV heads of a
layer. A model that loses no accuracy under these conditions cannot show the cost of a method. Models of long context
also run the needle tasks (`needles.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..metrics import interval
from .language import KINDS, LONG_KINDS, Context, Language, Question
from .needles import NEEDLES
from .queries import ContextSession, language_of, load

CHUNK = 16
BARS = {"full": 97.0, "lost by a random tenth": 15.0, "lost by documents apart": 10.0, "overlap of neighbours": 52.0}
"""Minimum of each figure, in percent or percentage points."""


@dataclass
class Findings:
    """Scores of answers (0 or 100) by condition and kind of question, and overlaps in percent."""

    right: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    overlaps: dict[str, list[float]] = field(default_factory=dict)

    def add(self, condition: str, kind: str, right: bool) -> None:
        self.right.setdefault(condition, {}).setdefault(kind, []).append(100.0 * right)

    def share(self, condition: str, kind: str | None = None) -> float:
        kinds = self.right[condition]
        return float(np.mean(kinds[kind] if kind else [score for scores in kinds.values() for score in scores]))

    def figures(self) -> dict[str, float]:
        """Return the figures that are compared with `BARS`."""
        full = self.share("full")
        return {
            "full": full,
            "lost by a random tenth": full - self.share("random tenth"),
            "lost by documents apart": full - self.share("documents apart"),
            "overlap of neighbours": float(np.mean(self.overlaps["neighbours, 25%"])),
        }

    def document(self) -> dict[str, Any]:
        """Return all means as a JSON-serializable dict."""
        shares = {c: {kind: self.share(c, kind) for kind in kinds} for c, kinds in self.right.items()}
        overlaps = {name: float(np.mean(values)) for name, values in self.overlaps.items()}
        return {"right": shares, "overlaps": overlaps, "figures": self.figures()}


def contexts(
    language: Language, tokens: int, count: int, seed: int, question_kinds: Sequence[str] = KINDS
) -> Iterator[tuple[Context, dict[str, Question]]]:
    """Yield `count` contexts, each with one question per kind, except "back", which needs no context."""
    kinds = dict.fromkeys([kind for kind in question_kinds if kind != "back"], 1.0)
    for number in range(count):
        context = language.context(np.random.default_rng([seed, number]), tokens, 40, kinds, density=(0.3, 0.5))
        question_by_kind = {question.kind: question for question in reversed(context.questions)}
        yield context, {kind: question_by_kind[kind] for kind in kinds if kind in question_by_kind}


def questions(language: Language, tokens: int, count: int, seed: int) -> Iterator[tuple[Context, Question]]:
    """Yield up to `count` questions, each with its own context, cycling through the kinds."""
    kinds = [kind for kind in KINDS if kind != "back"]
    for number, (context, question_by_kind) in enumerate(contexts(language, tokens, count, seed)):
        if kinds[number % len(kinds)] in question_by_kind:
            yield context, question_by_kind[kinds[number % len(kinds)]]


def document_mask(context: Context) -> torch.Tensor:
    """Return the causal mask of separately encoded documents, bool `[tokens, tokens]`."""
    sizes = [len(document) for document in context.documents]
    documents = torch.tensor(np.repeat(np.arange(len(sizes)), sizes))
    return (documents.unsqueeze(0) == documents.unsqueeze(1)).tril()


def random_tenth(tokens: int, rng: np.random.Generator) -> torch.Tensor:
    """Select a random tenth of the complete chunks, as a mask, bool `[tokens]`."""
    chunks = tokens // CHUNK
    selected_chunks = rng.choice(chunks, max(1, chunks // 10), replace=False)
    return torch.from_numpy(np.isin(np.arange(tokens) // CHUNK, selected_chunks))


def overlaps(session: ContextSession, ids: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Yield overlaps of the most attended chunks, in percent, between layers and between the KV heads of a layer."""
    chunks, kv_heads = session.tokens // CHUNK, session.model.config.num_key_value_heads
    mass = [
        layer[..., : chunks * CHUNK].unflatten(-1, (chunks, CHUNK)).unflatten(0, (kv_heads, -1)).sum((1, 2, 4))
        for layer in session.attention(ids)
    ]  # per layer [kv_heads, chunks]
    for share in (0.1, 0.25):
        count = max(1, int(share * chunks))
        layers = [set(head_mass.sum(0).topk(count).indices.tolist()) for head_mass in mass]
        for step, name in ((1, "neighbours"), (2, "periods of 2"), (4, "periods of 4")):
            for i in range(0, len(layers) - step, step):
                yield f"{name}, {share:.0%}", 100 * len(layers[i] & layers[i + step]) / count
        for head_mass in mass:
            for a, b in combinations([set(mass_of_head.topk(count).indices.tolist()) for mass_of_head in head_mass], 2):
                yield f"kv heads, {share:.0%}", 100 * len(a & b) / count


def measure(
    model: PreTrainedModel,
    language: Language,
    tokens: int,
    count: int,
    seed: int,
    question_kinds: Sequence[str] = KINDS,
) -> Findings:
    """Measure answers and overlaps on `count` contexts of `tokens` tokens, with one question per kind for each."""
    findings, rng = Findings(), np.random.default_rng(seed)
    for context, questions in tqdm(
        contexts(language, tokens, count, seed, question_kinds), total=count, unit="context"
    ):
        session = ContextSession(model, context)
        for kind, question in questions.items():
            findings.add("full", kind, session.is_right(question))
            findings.add("random tenth", kind, session.is_right(question, random_tenth(session.tokens, rng)))
            for name, percent in overlaps(session, question.prompt):
                findings.overlaps.setdefault(name, []).append(percent)
        session = ContextSession(model, context, document_mask(context))
        for kind, question in questions.items():
            findings.add("documents apart", kind, session.is_right(question))
    return findings


def measure_needles(
    model: PreTrainedModel, language: Language, tokens: int, count: int, seed: int
) -> dict[str, list[float]]:
    """Return the scores (0 or 100) of each needle task in `count` contexts of `tokens` tokens."""
    scores: dict[str, list[float]] = {}
    for number, (name, needle) in enumerate(NEEDLES.items()):
        for number_of_context in tqdm(range(count), desc=name, unit="context"):
            context, questions = needle.draw(language, np.random.default_rng([seed, number, number_of_context]), tokens)
            answers = ContextSession(model, context).answers(questions)
            is_right = all(question.is_answer(answer) for question, answer in zip(questions, answers, strict=True))
            scores.setdefault(name, []).append(100.0 * is_right)
    return scores


def show(console: Console, title: str, findings: Findings) -> None:
    """Print scores, figures and overlaps."""
    table = Table(title=f"{title}, right answers in percent", title_justify="left")
    for heading in ("", *findings.right["full"], "all"):
        table.add_column(heading)
    for condition, kinds in findings.right.items():
        low, high = interval([score for scores in kinds.values() for score in scores])
        cells = [f"{findings.share(condition, kind):.1f}" for kind in findings.right["full"]]
        table.add_row(condition, *cells, f"{findings.share(condition):.1f} ({low:.1f}–{high:.1f})")
    bars = Table(title="Bars", title_justify="left")
    for heading in ("figure", "measured", "bar", "met"):
        bars.add_column(heading)
    for name, value in findings.figures().items():
        bars.add_row(name, f"{value:.1f}", f"≥ {BARS[name]:.0f}", "yes" if value >= BARS[name] else "no")
    console.print(table, bars)
    console.print(
        "Overlap of the most attended chunks, %:",
        {name: round(float(np.mean(values)), 1) for name, values in findings.overlaps.items()},
    )


def main(
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the model.")],
    tokens: Annotated[list[int], typer.Option(min=128, help="Number of context tokens. Can be repeated.")] = [  # noqa: B006
        512
    ],
    count: Annotated[int, typer.Option(min=1, help="Number of contexts, with one question of each kind.")] = 100,
    long: Annotated[bool, typer.Option("--long", help="Also run long-context tasks: values, track, needles.")] = False,
    yarn_beyond: Annotated[int, typer.Option(help="Use YaRN for contexts that are longer than this; 0: never.")] = 0,
    seed: int = 1,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this file, as JSON.")] = None,
) -> None:
    """Measure a reference model and compare the figures with their minimums."""
    language, console = language_of(model), Console()
    document: dict[str, Any] = {"seed": seed, "bars": BARS, "lengths": []}
    for length in tokens:
        for yarn in (1.0, *([length / yarn_beyond] if 0 < yarn_beyond < length else [])):
            loaded_model = load(model, yarn, yarn_beyond)
            findings = measure(loaded_model, language, length, count, seed, LONG_KINDS if long else KINDS)
            show(console, f"{model.name} at {length} tokens" + (f", YaRN {yarn:.2f}" if yarn > 1 else ""), findings)
            figures = {"tokens": length, "yarn": yarn, "contexts": count, **findings.document()}
            if long:
                scores = measure_needles(loaded_model, language, length, count, seed)
                figures["needles"] = {name: float(np.mean(values)) for name, values in scores.items()}
                console.print("Needles, right answers in percent:", figures["needles"])
            document["lengths"].append(figures)
            if out is not None:
                out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
