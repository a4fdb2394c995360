"""Continued conversations: the earlier turns are the stored prefix, the last turn is the question.

The setup follows Krul (section 6.1): accuracy on LongBench contexts, with the last 128 tokens as the user's turn, and
multi-turn conversations of ShareGPT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import Draw, Example, Task
from .longbench import LONGBENCH, LongBench

_TURN_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class LastTurn(Task):
    """LongBench task with the last `_TURN_TOKENS` tokens of the context moved to the question."""

    task: LongBench

    def examples(self, draw: Draw) -> Iterator[Example]:
        for example in self.task.examples(draw):
            prefix = example.prefix
            end = _cut(prefix, _TURN_TOKENS, draw)
            yield replace(example, segments=(prefix[:end],), question=prefix[end:] + example.question)


def _cut(text: str, tokens: int, draw: Draw) -> int:
    """Return the index of the word boundary at which the last `tokens` tokens of a text begin."""
    low, high = 0, len(text)
    while low < high:  # find the longest suffix with at most `tokens` tokens
        middle = (low + high) // 2
        if draw.count(text[middle:]) > tokens:
            low = middle + 1
        else:
            high = middle
    space = text.find(" ", low)
    return space if space >= 0 else low


@dataclass(frozen=True, kw_only=True)
class ShareGpt(Task):
    """Last answer of each conversation, given all earlier turns. Reads rows in the format of ShareGPT."""

    def examples(self, draw: Draw) -> Iterator[Example]:
        rows = draw.data.rows("sharegpt", "train", ("conversations",))
        num_examples = 0
        for index in range(len(rows)):
            turns = rows[index]["conversations"]
            while turns and turns[-1]["from"] != "gpt":
                turns = turns[:-1]
            if len(turns) < 4 or draw.count("".join(t["value"] for t in turns[:-2])) > draw.prefix_tokens:
                continue
            texts = tuple(f"{'User' if t['from'] == 'human' else 'Assistant'}: {t['value']}\n" for t in turns[:-1])
            yield Example(
                f"train-{index}", texts[:-1], f"{texts[-1]}Assistant:", answers=(f" {turns[-1]['value'].strip()}",)
            )
            num_examples += 1
            if num_examples == draw.limit:
                return


CONVERSATIONS: tuple[Task, ...] = (
    *(
        LastTurn(
            name=f"turns_{task.split}",
            about=f"{task.about}, the last {_TURN_TOKENS} tokens of the context being the new turn (Krul)",
            metric=task.metric,
            max_new_tokens=task.max_new_tokens,
            first_line=task.first_line,
            task=task,
        )
        for task in LONGBENCH
    ),
    ShareGpt(
        name="sharegpt",
        about="how likely the last answer of a conversation is, given what was said before (ShareGPT; Krul)",
        metric="perplexity",
        max_new_tokens=256,
    ),
)
