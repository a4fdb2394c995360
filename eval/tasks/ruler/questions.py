"""Question answering with the supporting passages among passages of other questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..base import Draw, Example, Task
from .haystack import filling

Read = Callable[[Any], tuple[list[tuple[str, tuple[str, ...], tuple[str, ...]]], list[str]]]
"""Function from rows to a list of (question, answers, supporting passages), and all passages."""


@dataclass(frozen=True, kw_only=True)
class Questions(Task):
    """Question with its supporting passages and as many other passages as fit.

    Args:
        dataset: Name of the data set.
        columns: Required columns.
        convert: Function that converts the rows.
    """

    dataset: str
    columns: tuple[str, ...]
    convert: Read

    def examples(self, draw: Draw) -> Iterator[Example]:
        questions, passages = self.convert(draw.data.rows(self.dataset, "validation", self.columns))
        draw.rng(self.name, "order").shuffle(questions)
        for number in draw.indices(min(500, len(questions))):
            question, answers, own_passages = questions[number]
            rng = draw.rng(self.name, number)
            other_passages = [p for p in rng.sample(passages, len(passages)) if p not in own_passages]
            own_text = "".join(_document(100, passage) for passage in own_passages)
            fit = filling(draw, (_document(100, passage) for passage in other_passages), own_text)
            all_passages = [*own_passages, *other_passages[: len(fit)]]
            rng.shuffle(all_passages)
            documents = tuple(_document(i, text) for i, text in enumerate(all_passages, start=1))
            yield Example(str(number), documents, f"Question: {question}\nAnswer:", answers=answers)


def _document(number: int, text: str) -> str:
    return f"Document {number}:\n{text}\n\n"


def _squad(rows: Any) -> tuple[list[Any], list[str]]:
    questions = [
        (row["question"], tuple(dict.fromkeys(row["answers"]["text"])), (row["context"],))
        for row in rows
        if row["answers"]["text"]
    ]
    return questions, sorted({row["context"] for row in rows})


def _hotpot(rows: Any) -> tuple[list[Any], list[str]]:
    questions, passages = [], list[str]()
    for row in rows:
        context = row["context"]
        texts = {t: f"{t}\n{''.join(s)}" for t, s in zip(context["title"], context["sentences"], strict=True)}
        own_passages = tuple(texts[t] for t in dict.fromkeys(row["supporting_facts"]["title"]) if t in texts)
        questions.append((row["question"], (row["answer"],), own_passages))
        passages += texts.values()
    return questions, sorted(set(passages))


QUESTIONS = (
    Questions(
        name="ruler_qa_1",
        about="SQuAD questions among other passages (RULER)",
        metric="string_match_any",
        max_new_tokens=32,
        dataset="squad_v2",
        columns=("question", "answers", "context"),
        convert=_squad,
    ),
    Questions(
        name="ruler_qa_2",
        about="HotpotQA questions among other passages (RULER)",
        metric="string_match_any",
        max_new_tokens=32,
        dataset="hotpotqa",
        columns=("question", "answer", "context", "supporting_facts"),
        convert=_hotpot,
    ),
)
