"""LongBench (Bai et al. 2023): a question after long documents.

Metrics, answer lengths and the tasks without a chat template are those of the benchmark. The instructions are our own
wording. For scores comparable to published ones, pass the templates of the benchmark with `--prompts FILE` (a JSON
object from task to a template with {context} and {input}, as in the repository of LongBench).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .base import Draw, Example, Task

_LINES = 4
"""Number of last lines of a code file that are the question."""
_COLUMNS = ("input", "context", "answers", "all_classes")


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """Task of LongBench.

    Args:
        split: Name of the task in the benchmark.
        template: Prompt template with {context} and {input}. The prefix ends with the context.
    """

    split: str
    template: str

    def examples(self, draw: Draw) -> Iterator[Example]:
        text_before, text_after = self.template.split("{context}")
        rows = draw.data.rows("longbench", self.split, _COLUMNS)
        for index in draw.indices(len(rows)):
            row = rows[index]
            context, question = row["context"], text_after.replace("{input}", row["input"])
            if not question:  # code completion: the last lines are the question
                lines = context.splitlines(keepends=True)
                context, question = "".join(lines[:-_LINES]), "".join(lines[-_LINES:])
            yield Example(
                id=row.get("_id") or f"{self.split}-{index}",
                segments=(text_before + context,),
                question=question,
                answers=tuple(row["answers"]),
                labels=tuple(row["all_classes"] or ()),
            )


_QA = "Read the text and answer the question after it in few words.\n\n{context}\n\nQuestion: {input}\nAnswer:"
_PASSAGES = (
    "Answer the question after these passages. Give the answer alone, without an explanation.\n\n{context}\n\n"
    "Question: {input}\nAnswer:"
)
_ZH_QA = "阅读下面的文字，然后简要回答问题。\n\n{context}\n\n问题：{input}\n回答："
_MEETING = "Read the record of a meeting and answer the request after it.\n\n{context}\n\nRequest: {input}\nAnswer:"
_TYPES = "Name the type of the last question.\n\n{context}\n{input}"
_TRIVIA = "Answer from the passage, as in the examples.\n\n{context}\n\n{input}"
_DIALOGUES = "Summarize the dialogue, as in the examples.\n\n{context}\n\n{input}"
_COUNT = (
    "Some of these paragraphs may be there twice. Count how many different ones there are.\n\n{context}\n\n"
    "How many different paragraphs are there? Give the number alone.\nAnswer:"
)
_FIND = (
    "Here are numbered paragraphs, and then a summary of one of them.\n\n{context}\n\nSummary: {input}\n\n"
    'Which paragraph is it of? Answer as in "Paragraph 1".\nAnswer:'
)
_ZH_TYPES = "按照例子判断最后一条新闻的类别。\n\n{context}\n{input}"
_ZH_FIND = (
    "下面是一些编号的段落，以及其中一段的摘要。\n\n{context}\n\n摘要：{input}\n\n"
    '摘要出自哪一段？回答格式如"段落1"。\n回答：'
)
_ZH_MEETING = "下面是一段会议记录，请写出它的总结。\n\n{context}\n\n总结："
_SUMMARY = "Read the following and write a summary of it.\n\n{context}\n\nSummary:"

_TASKS: tuple[tuple[str, str, int, str, str], ...] = (
    # split, metric, max_new_tokens, template, about
    ("narrativeqa", "qa_f1", 128, _QA, "questions about a book or film script"),
    ("qasper", "qa_f1", 128, _QA, "questions about a paper"),
    ("multifieldqa_en", "qa_f1", 64, _QA, "questions about articles of many fields"),
    ("hotpotqa", "qa_f1", 32, _PASSAGES, "two-hop questions over passages"),
    ("2wikimqa", "qa_f1", 32, _PASSAGES, "multi-hop questions over passages"),
    ("musique", "qa_f1", 32, _PASSAGES, "two- to four-hop questions over passages"),
    ("gov_report", "rouge_l", 512, _SUMMARY, "summary of a government report"),
    ("qmsum", "rouge_l", 512, _MEETING, "summary of a meeting, as asked"),
    ("multi_news", "rouge_l", 512, _SUMMARY, "summary of several news articles"),
    ("trec", "classification", 64, _TYPES, "types of questions, in context"),
    ("triviaqa", "qa_f1", 32, _TRIVIA, "questions, in context"),
    ("samsum", "rouge_l", 128, _DIALOGUES, "dialogues, in context"),
    ("passage_count", "count", 32, _COUNT, "how many paragraphs differ"),
    ("passage_retrieval_en", "retrieval", 32, _FIND, "which paragraph a summary is of"),
    ("multifieldqa_zh", "qa_f1_zh", 64, _ZH_QA, "questions about articles of many fields, in Chinese"),
    ("dureader", "rouge_l_zh", 128, _ZH_QA, "questions to a search engine, in Chinese"),
    ("vcsum", "rouge_l_zh", 512, _ZH_MEETING, "summary of a meeting, in Chinese"),
    ("lsht", "classification", 64, _ZH_TYPES, "types of news, in Chinese"),
    ("passage_retrieval_zh", "retrieval", 32, _ZH_FIND, "which paragraph a summary is of, in Chinese"),
    ("lcc", "code_similarity", 64, "Complete the code.\n{context}", "the next line of a file"),
    ("repobench-p", "code_similarity", 64, "Complete the code.\n{context}{input}", "the next line, given other files"),
)
_PLAIN = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
_FIRST_LINE = {"trec", "triviaqa", "samsum", "lsht"}

LONGBENCH = tuple(
    LongBench(
        name=f"longbench_{split}",
        about=f"{about} (LongBench)",
        metric=metric,
        max_new_tokens=tokens,
        first_line=split in _FIRST_LINE,
        chat=split not in _PLAIN,
        split=split,
        template=template,
    )
    for split, metric, tokens, template, about in _TASKS
)
