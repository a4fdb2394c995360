"""Questions about passages that a retriever finds: BM25 over the passages of many HotpotQA questions.

In `hotpotqa` each question comes with its own ten passages. Here the passages of `_CORPUS_ROWS` questions form one
corpus, and each question gets the best matches, as in a search application. A passage is retrieved for several
questions, at different places of their prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import bm25s

from .base import Draw, Example, Task
from .rag import ASK, passage_text, question_text, with_sentences

_CORPUS_ROWS = 100
"""Number of rows with passages in the corpus; each has ten."""


@dataclass(frozen=True, kw_only=True)
class Retrieved(Task):
    """Passages retrieved from a corpus, best match last, and a question.

    Args:
        passages: Number of retrieved passages.
        question_first: Whether the question also precedes the passages, as part of the instruction.
    """

    passages: int
    question_first: bool = False
    keeps_passages: bool = True

    def examples(self, draw: Draw) -> Iterator[Example]:
        split = next((s for s in ("validation", "train") if draw.data.has("hotpotqa", s)), "validation")
        table = draw.data.rows("hotpotqa", split, ("context", "question", "answer"))
        rows = [table[index] for index in range(min(len(table), _CORPUS_ROWS))]
        corpus = list(dict.fromkeys(passage_text(*part) for row in rows for part in with_sentences(row)))
        retriever = bm25s.BM25()
        retriever.index(bm25s.tokenize(corpus, show_progress=False), show_progress=False)
        for index in draw.indices(len(rows)):
            row = rows[index]
            query = bm25s.tokenize([row["question"]], show_progress=False)
            number = min(self.passages, len(corpus))
            best = retriever.retrieve(query, k=number, show_progress=False).documents[0]
            instruction = f"{ASK}{row['question'].strip()}\n\n" if self.question_first else ASK
            texts = (corpus[place] for place in reversed(best))
            yield Example(f"{split}-{index}", (instruction, *texts), question_text(row), answers=(row["answer"],))


RETRIEVED = tuple(
    Retrieved(
        name=f"retrieved_{passages}" + "_question_first" * question_first,
        about=f"HotpotQA, {passages} passages retrieved by BM25 from 1,000"
        + ", the question before and after them" * question_first,
        metric="qa_f1",
        max_new_tokens=32,
        passages=passages,
        question_first=question_first,
    )
    for passages, question_first in ((4, False), (10, False), (30, False), (10, True))
)
