"""Encoding of examples: token ids of prefix and question, truncated if they are too long."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .errors import EvalError
from .tasks import Example, Task

_BEGINNING = 64
"""Number of tokens that a truncated passage should keep at least."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of an example.

    Args:
        prefix: Tokens with stored KV.
        question: New tokens after the prefix.
        choices: Continuations to choose from.
        answer: First accepted answer; for multiple choice, the right choice.
        passages: Segments of the prefix that were not cut, except the first one, which is an instruction or has exact
            KV wherever it is stored.
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

    A prompt that is too long loses its middle, as in LongBench (Bai et al. 2023). If the task has `keeps_passages`,
    its passages are truncated first, see `shortened`.

    Args:
        example: Example to encode.
        task: Task of the example.
        tokenizer: Tokenizer of the model.
        max_length: Maximum number of tokens of prompt and answer together.
        chat: Whether to apply the tokenizer's chat template in tasks that allow it.

    Raises:
        EvalError: Choices or answer leave no room for a prompt, or the chat template changes the question.
    """
    prefix_text, question = example.prefix, example.question
    templated = chat and task.chat and tokenizer.chat_template is not None
    if templated:
        prefix_text, question = _apply_chat_template(prefix_text, question, tokenizer)
    offsets = tokenizer.is_fast and not templated
    encoded = tokenizer(prefix_text, add_special_tokens=not templated, return_offsets_mapping=offsets)
    prefix = encoded["input_ids"]
    ranges = _ranges(example.segments, encoded["offset_mapping"]) if offsets else []
    question_ids = tokenizer(question, add_special_tokens=False)["input_ids"]
    choices = tuple(tuple(tokenizer(c, add_special_tokens=False)["input_ids"]) for c in example.choices)
    answer = tuple(tokenizer(example.answers[0], add_special_tokens=False)["input_ids"]) if example.answers else ()
    room = max_length - max(task.max_new_tokens, *(len(c) for c in choices), 1)
    if room < 16:
        raise EvalError(f"{task.name}: {max_length} tokens of context leave no room for a prompt")
    if len(prefix) + len(question_ids) > room and task.keeps_passages and ranges:
        prefix, ranges = shortened(prefix, ranges, room - len(question_ids))
    if len(prefix) + len(question_ids) > room:
        prompt_ids = prefix + question_ids
        half = room // 2
        keep = min(len(question_ids), room - half)
        gap = len(prompt_ids) - room  # number of removed tokens, from index `half`
        ranges = [(a, b) if b <= half else (a - gap, b - gap) for a, b in ranges if b <= half or a >= half + gap]
        prompt_ids = prompt_ids[:half] + prompt_ids[len(prompt_ids) - (room - half) :]
        prefix, question_ids = prompt_ids[: room - keep], prompt_ids[room - keep :]
    passages = tuple(tuple(prefix[a:b]) for a, b in ranges[1:] if b <= len(prefix))
    return Prompt(tuple(prefix), tuple(question_ids), choices, answer[: task.max_new_tokens], passages)


def _ranges(segments: tuple[str, ...], offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the half-open token range of each segment that has tokens.

    A token that crosses a segment boundary belongs to neither segment.

    Args:
        segments: Consecutive texts.
        offsets: Half-open character range of each token in the joined text; empty for special tokens.
    """
    ranges, end = [], 0
    for segment in segments:
        begin, end = end, end + len(segment)
        inside = [i for i, (first, last) in enumerate(offsets) if begin <= first < last <= end]
        if inside:
            ranges.append((inside[0], inside[-1] + 1))
    return ranges


def shortened(tokens: list[int], ranges: list[tuple[int, int]], room: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Truncate segments to a common maximum length and drop the last ones if too many.

    Args:
        tokens: Token ids of all segments.
        ranges: Half-open token range of each segment.
        room: Maximum number of tokens to keep.

    Returns:
        The remaining tokens, and the range of each kept segment in them. The number of segments is the largest with
        room for the first `_BEGINNING` tokens of each.
    """
    remaining = tokens[: ranges[0][0]]  # special tokens before the first segment
    room -= len(remaining)
    lengths = [b - a for a, b in ranges]
    count = bisect_right(range(len(lengths)), room, key=lambda n: sum(min(k, _BEGINNING) for k in lengths[: n + 1]))
    longest = bisect_right(range(room + 1), room, key=lambda limit: sum(min(k, limit) for k in lengths[:count])) - 1
    new_ranges = []
    for a, b in ranges[:count]:
        new_ranges.append((len(remaining), len(remaining) + min(b - a, longest)))
        remaining += tokens[a : min(b, a + longest)]
    return remaining, new_ranges


def _apply_chat_template(prefix: str, question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    message = [{"role": "user", "content": prefix + question}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    head, separator, tail = text.rpartition(question.strip())
    if not separator:
        raise EvalError("the chat template changes the question; run without --chat")
    return head, separator + tail
