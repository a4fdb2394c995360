"""SQuAD: many questions about one article, like user questions about a document that is stored once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .base import Draw, Example, Task

_ASK = "Answer the questions about the article in a few words.\n\n"


@dataclass(frozen=True, kw_only=True)
class Squad(Task):
    """Consecutive paragraphs of an article as prefix, with questions that one of the paragraphs answers."""

    def examples(self, draw: Draw) -> Iterator[Example]:
        rows = draw.data.rows("squad_v2", "validation", ("title", "context", "question", "answers"))
        prefixes = [part for article in _articles(rows).values() for part in _parts(article, draw)]
        questions = [(number, row) for number, part in enumerate(prefixes) for row in part if row["answers"]["text"]]
        draw.rng(self.name, "order").shuffle(questions)
        for number, row in (questions[i] for i in draw.indices(len(questions))):
            paragraphs = tuple(
                f"{text.strip()}\n\n"
                for text in dict.fromkeys(question_row["context"] for question_row in prefixes[number])
            )
            question = f"Question: {row['question'].strip()}\nAnswer:"
            answers = tuple(dict.fromkeys(row["answers"]["text"]))
            yield Example(f"{number}-{row['id']}", (_ASK, *paragraphs), question, answers=answers)


def _articles(rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the questions of each article, in the order of its paragraphs."""
    articles: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        articles.setdefault(row["title"], []).append(row)
    return articles


def _parts(article: list[dict[str, Any]], draw: Draw) -> Iterator[list[dict[str, Any]]]:
    """Yield the questions of consecutive paragraphs that fill a prefix. The last part is dropped."""
    part: list[dict[str, Any]] = []
    room = draw.prefix_tokens
    for row in article:
        if not part or row["context"] != part[-1]["context"]:
            tokens = draw.count(row["context"])
            if part and tokens > room:
                yield part
                part, room = [], draw.prefix_tokens
            room -= tokens
        part.append(row)


SQUAD = Squad(
    name="squad",
    about="questions about consecutive paragraphs of an article (SQuAD 2.0, those that have an answer)",
    metric="qa_f1",
    max_new_tokens=16,
    first_line=True,
    chat=True,
)
