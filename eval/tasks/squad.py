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
        prefixes = [found for article in _articles(rows).values() for found in _parts(article, draw)]
        asked = [(number, row) for number, part in enumerate(prefixes) for row in part if row["answers"]["text"]]
        draw.rng(self.name, "order").shuffle(asked)
        for number, row in (asked[i] for i in draw.some(len(asked))):
            paragraphs = tuple(
                f"{text.strip()}\n\n" for text in dict.fromkeys(each["context"] for each in prefixes[number])
            )
            question = f"Question: {row['question'].strip()}\nAnswer:"
            answers = tuple(dict.fromkeys(row["answers"]["text"]))
            yield Example(f"{number}-{row['id']}", (_ASK, *paragraphs), question, answers=answers)


def _articles(rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the questions of each article, in the order of its paragraphs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["title"], []).append(row)
    return found


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
