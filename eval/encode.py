"""From an example to token ids: prefix and question apart, shortened where they are too long."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .errors import EvalError
from .tasks import Example, Task

_BEGINNING = 64
"""Tokens of a passage that make it worth having, where not all can be had."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of an example.

    Args:
        prefix: what is stored.
        question: what is new.
        choices: continuations to choose from.
        answer: the first accepted answer; of a choice, the right one.
        passages: the parts of the prefix that are segments of their own, as far as they are whole; without the one that
            begins it, which is an instruction, or would be exact wherever it is stored.
    """

    prefix: tuple[int, ...]
    question: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...]
    passages: tuple[tuple[int, ...], ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prefix + self.question


def encode(
    example: Example, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int, chat: bool = False
) -> Prompt:
    """Encode an example.

    A prompt that is too long keeps its first and its last half, as in LongBench (Bai et al. 2023); one of passages
    keeps the beginnings of as many as it can, if the task says so.

    Args:
        max_length: tokens of prompt and answer together.
        chat: whether tasks that allow it are put into the tokenizer's chat template.

    Raises:
        EvalError: choices or answer leave no room for a prompt, or the template hides the question.
    """
    before, question = example.prefix, example.question
    templated = chat and task.chat and tokenizer.chat_template is not None
    if templated:
        before, question = _templated(before, question, tokenizer)
    offsets = tokenizer.is_fast and not templated
    encoded = tokenizer(before, add_special_tokens=not templated, return_offsets_mapping=offsets)
    prefix = encoded["input_ids"]
    ranges = _ranges(example.segments, encoded["offset_mapping"]) if offsets else []
    asked = tokenizer(question, add_special_tokens=False)["input_ids"]
    choices = tuple(tuple(tokenizer(c, add_special_tokens=False)["input_ids"]) for c in example.choices)
    answer = tuple(tokenizer(example.answers[0], add_special_tokens=False)["input_ids"]) if example.answers else ()
    room = max_length - max(task.max_new_tokens, *(len(c) for c in choices), 1)
    if room < 16:
        raise EvalError(f"{task.name}: {max_length} tokens of context leave no room for a prompt")
    if len(prefix) + len(asked) > room and task.keeps_passages and ranges:
        prefix, ranges = shortened(prefix, ranges, room - len(asked))
    if len(prefix) + len(asked) > room:
        whole = prefix + asked
        half = room // 2
        keep = min(len(asked), room - half)
        cut = len(whole) - room  # tokens that go, from number `half` on
        ranges = [(a, b) if b <= half else (a - cut, b - cut) for a, b in ranges if b <= half or a >= half + cut]
        whole = whole[:half] + whole[len(whole) - (room - half) :]
        prefix, asked = whole[: room - keep], whole[room - keep :]
    passages = tuple(tuple(prefix[a:b]) for a, b in ranges[1:] if b <= len(prefix))
    return Prompt(tuple(prefix), tuple(asked), choices, answer[: task.max_new_tokens], passages)


def _ranges(segments: tuple[str, ...], offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens of each segment, half-open; one that reaches over a boundary belongs to neither side.

    Args:
        segments: texts that follow one another.
        offsets: of each token its letters in all of the text, half-open; nothing for special tokens.
    """
    found, end = [], 0
    for segment in segments:
        begin, end = end, end + len(segment)
        inside = [i for i, (first, last) in enumerate(offsets) if begin <= first < last <= end]
        if inside:
            found.append((inside[0], inside[-1] + 1))
    return found


def shortened(tokens: list[int], ranges: list[tuple[int, int]], room: int) -> tuple[list[int], list[tuple[int, int]]]:
    """As many segments, given by their ranges, as have room for a beginning; the longest are cut to one length."""
    kept = tokens[: ranges[0][0]]  # a special token
    room -= len(kept)
    lengths = [b - a for a, b in ranges]
    count = bisect_right(range(len(lengths)), room, key=lambda n: sum(min(k, _BEGINNING) for k in lengths[: n + 1]))
    longest = bisect_right(range(room + 1), room, key=lambda most: sum(min(k, most) for k in lengths[:count])) - 1
    found = []
    for a, b in ranges[:count]:
        found.append((len(kept), len(kept) + min(b - a, longest)))
        kept += tokens[a : min(b, a + longest)]
    return kept, found


def _templated(before: str, question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    message = [{"role": "user", "content": before + question}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    head, found, tail = text.rpartition(question.strip())
    if not found:
        raise EvalError("the chat template changes the question; run without --chat")
    return head, found + tail
