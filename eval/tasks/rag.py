"""Retrieved passages as separate segments: MuSiQue, 2WikiMultihopQA, HotpotQA, and also SAMSum and Multi-News.

These are the data sets of CacheTune (Table 1) and CacheBlend. The KV of each passage is stored separately, since the
passage occurs again in other prompts among other passages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .base import Draw, Example, Task

ASK = "Answer the question from the passages. Give the answer alone.\n\n"


def question_text(row: dict[str, Any]) -> str:
    """Return the end of a prompt."""
    return f"Question: {row['question'].strip()}\nAnswer:"


def answer_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the only accepted answer of a row."""
    return (row["answer"],)


@dataclass(frozen=True, kw_only=True)
class Rag(Task):
    """Passages and a question.

    Args:
        dataset: Name of the data set; "" for that of the task.
        splits: Candidate splits; the first available one is used.
        columns: Required columns.
        passages: Function from a row to its passages, as (title, text).
        question: Function from a row to its question.
        answers: Function from a row to its accepted answers.
        instruction: Text before the passages.
    """

    metric: str = "qa_f1"
    max_new_tokens: int = 32
    dataset: str = ""
    splits: tuple[str, ...] = ("validation",)
    columns: tuple[str, ...]
    passages: Callable[[dict[str, Any]], list[tuple[str, str]]]
    question: Callable[[dict[str, Any]], str] = question_text
    answers: Callable[[dict[str, Any]], tuple[str, ...]] = answer_of
    instruction: str = ASK
    keeps_passages: bool = True

    def examples(self, draw: Draw) -> Iterator[Example]:
        dataset = self.dataset or self.name
        split = next((s for s in self.splits if draw.data.has(dataset, s)), self.splits[0])
        rows = draw.data.rows(dataset, split, self.columns)
        for index in draw.indices(len(rows)):
            row = rows[index]
            texts = (passage_text(title, text) for title, text in self.passages(row))
            yield Example(f"{split}-{index}", (self.instruction, *texts), self.question(row), answers=self.answers(row))


def passage_text(title: str, text: str) -> str:
    """Return a passage as it stands in a prompt."""
    return f"{title}\n{text.strip()}\n\n" if title else f"{text.strip()}\n\n"


def with_sentences(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the title and text of each passage of a HotpotQA row."""
    context = row["context"]
    return [(title, "".join(parts)) for title, parts in zip(context["title"], context["sentences"], strict=True)]


def _articles(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [("", text) for text in re.split(r"Passage \d+:\n", row["context"]) if text.strip()]


@dataclass(frozen=True, kw_only=True)
class Dialogues(Task):
    """Dialogue to summarize, after solved examples. Each solved dialogue is a segment.

    Args:
        shown: Maximum number of solved dialogues, limited by `prefix_tokens`.
    """

    shown: int = 12

    def examples(self, draw: Draw) -> Iterator[Example]:
        columns = ("dialogue", "summary")
        solved = draw.data.rows("samsum", "train", columns)
        rows = draw.data.rows("samsum", "test", columns)
        for index in draw.indices(len(rows)):
            rng, room, segments = draw.rng(self.name, index), draw.prefix_tokens, []
            for number in rng.sample(range(len(solved)), min(self.shown, len(solved))):
                text = f"{_dialogue(solved[number])} {solved[number]['summary'].strip()}\n\n"
                room -= draw.count(text)
                if room < 0:
                    break
                segments.append(text)
            yield Example(
                f"test-{index}", tuple(segments), _dialogue(rows[index]), answers=(rows[index]["summary"].strip(),)
            )


def _dialogue(row: dict[str, Any]) -> str:
    lines = "\n".join(row["dialogue"].splitlines())
    return f"{lines}\nSummary:"


RAG: tuple[Task, ...] = (
    Rag(
        name="musique",
        about="multi-hop questions, 20 passages (Trivedi et al. 2022; CacheTune)",
        splits=("validation", "train"),
        columns=("paragraphs", "question", "answer", "answer_aliases"),
        passages=lambda row: [(p["title"], p["paragraph_text"]) for p in row["paragraphs"]],
        answers=lambda row: (row["answer"], *row["answer_aliases"]),
    ),
    Rag(
        name="musique_cacheblend",
        about="MuSiQue as CacheBlend cuts it, 10 chunks of about 415 words (CacheBlend; CacheTune)",
        dataset="musique",
        splits=("validation_cacheblend",),
        columns=("ctxs", "question", "answers"),
        passages=lambda row: [(p["title"], p["text"]) for p in row["ctxs"]],
        answers=lambda row: tuple(row["answers"]),
    ),
    Rag(
        name="2wikimqa",
        about="multi-hop questions, 60 and more passages (Ho et al. 2020, as L-CiteEval has it; CacheTune)",
        dataset="2wikimultihopqa",
        splits=("validation_lciteeval",),
        columns=("docs", "question", "answer"),
        passages=lambda row: [("", p["text"]) for p in row["docs"]],
    ),
    Rag(
        name="hotpotqa",
        about="two-hop questions, 10 passages (Yang et al. 2018, distractor setting; CacheTune)",
        columns=("context", "question", "answer"),
        passages=with_sentences,
    ),
    Rag(
        name="multi_news",
        about="summary of several articles (Fabbri et al. 2019, rows of LongBench; CacheTune)",
        metric="rouge_l",
        max_new_tokens=512,
        dataset="longbench",
        splits=("multi_news",),
        columns=("context", "answers"),
        passages=_articles,
        question=lambda row: "Write one summary of all of these articles.\nSummary:",
        answers=lambda row: tuple(row["answers"]),
        instruction="Here are news articles about one event.\n\n",
    ),
    Dialogues(
        name="samsum",
        about="summary of a dialogue behind solved ones (Gliwa et al. 2019; CacheTune, CacheBlend)",
        metric="rouge_l",
        max_new_tokens=128,
        first_line=True,
    ),
)
