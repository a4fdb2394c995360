"""From an example to token ids: prefix and question apart, cut in the middle where they are too long."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .errors import EvalError
from .tasks import Example, Task


@dataclass(frozen=True)
class Prompt:
    """Token ids of an example.

    Args:
        prefix: what is stored.
        question: what is new.
        choices: continuations to choose from.
        answer: the first accepted answer; of a choice, the right one.
    """

    prefix: tuple[int, ...]
    question: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prefix + self.question


def encode(
    example: Example, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int, chat: bool = False
) -> Prompt:
    """Encode an example.

    A prompt that is too long keeps its first and its last half, as in LongBench (Bai et al. 2023).

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
    prefix = tokenizer(before, add_special_tokens=not templated)["input_ids"]
    asked = tokenizer(question, add_special_tokens=False)["input_ids"]
    choices = tuple(tuple(tokenizer(c, add_special_tokens=False)["input_ids"]) for c in example.choices)
    answer = tuple(tokenizer(example.answers[0], add_special_tokens=False)["input_ids"]) if example.answers else ()
    room = max_length - max(task.max_new_tokens, *(len(c) for c in choices), 1)
    if room < 16:
        raise EvalError(f"{task.name}: {max_length} tokens of context leave no room for a prompt")
    if len(prefix) + len(asked) > room:
        whole = prefix + asked
        half = room // 2
        keep = min(len(asked), room - half)
        whole = whole[:half] + whole[len(whole) - (room - half) :]
        prefix, asked = whole[: room - keep], whole[room - keep :]
    return Prompt(tuple(prefix), tuple(asked), choices, answer[: task.max_new_tokens])


def _templated(before: str, question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    message = [{"role": "user", "content": before + question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    head, found, tail = text.rpartition(question.strip())
    if not found:
        raise EvalError("the chat template changes the question; run without --chat")
    return head, found + tail
