"""Prompts of texts and passages, whose tokens are the same wherever a passage stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .errors import ConfigError


@dataclass(frozen=True)
class Passage:
    """A text that is found again in other prompts, among other texts.

    Args:
        text: of it. What looks like a special token in it is text as well.
    """

    text: str

    def ids(self, tokenizer: Any) -> torch.Tensor:
        """Its tokens, int64 `[tokens]`: `KVStore.precompute(model, [passage.ids(tokenizer), ...], segments=True)`."""
        found = tokenizer(self.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return torch.tensor(found, dtype=torch.int64)


Part = str | Passage


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a model is asked.

    Args:
        input_ids: int64 `[1, tokens]`, on the CPU.
        passages: of each passage, in order, its columns, half-open.
    """

    input_ids: torch.Tensor
    passages: tuple[tuple[int, int], ...]


def build_prompt(
    tokenizer: Any,
    parts: Sequence[Part] | Sequence[Mapping[str, Any]],
    *,
    chat_template: bool | str | None = None,
    **options: Any,
) -> Prompt:
    """Join texts and passages into a prompt in which each passage has the tokens that it has by itself.

    A text that is tokenized in one piece has tokens that reach over the borders of its passages, and what is stored of
    these is not found. Here each passage is tokenized by itself, and so is what stands between two of them.

    Args:
        tokenizer: of the model.
        parts: texts and passages, one behind the other; or chat messages, `{"role": ..., "content": ...}`, each
            content a text or such a list.
        chat_template: whether the tokenizer's chat template goes around; or one to take in its place. None: where there
            are messages. Parts without roles are what the user says.
        options: for the template, such as `add_generation_prompt=False`, which is true if it is not given.

    Returns:
        The prompt. Special tokens that stand in front, such as BOS, are those of the template; without one, those that
        the tokenizer puts in front of a text.

    Raises:
        ConfigError: there is nothing to ask, something is neither text nor passage, there is no template, or one that
            does not say each content once.

    Example:
        >>> prompt = build_prompt(tokenizer, ["Read this:\\n", Passage(document), "\\nWhat does it say?"])
        >>> model.generate(prompt.input_ids, past_key_values=TieredCache(model, store, method="cache_tune"))
    """
    if isinstance(parts, str | Passage) or not parts:
        raise ConfigError("parts is a list: texts and passages, or chat messages")
    talk = isinstance(parts[0], Mapping)
    if chat_template or (chat_template is None and talk):
        messages = parts if talk else [{"role": "user", "content": list(parts)}]
        template = chat_template if isinstance(chat_template, str) else None
        pieces = _templated(tokenizer, cast("Sequence[Mapping[str, Any]]", messages), template, options)
        ids = torch.empty(0, dtype=torch.int64)  # the template says what stands in front
    elif talk or options:
        raise ConfigError("messages and options are for a chat template; leave chat_template to its default")
    else:
        pieces = list(_checked(parts))
        ids = torch.tensor(_in_front(tokenizer), dtype=torch.int64)
    spans = []
    for piece in _joined(pieces):
        if isinstance(piece, Passage):
            new = piece.ids(tokenizer)
            spans.append((len(ids), len(ids) + len(new)))
        else:
            new = torch.tensor(tokenizer(piece, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        ids = torch.cat([ids, new])
    if not len(ids):
        raise ConfigError("a prompt without a token")
    return Prompt(ids.unsqueeze(0), tuple(spans))


def _checked(parts: Sequence[Any]) -> Iterator[Part]:
    for part in parts:
        if not isinstance(part, str | Passage):
            raise ConfigError(f"a part is a text or a Passage, not {type(part).__name__}")
        yield part


def _joined(pieces: Sequence[Part]) -> Iterator[Part]:
    """Texts that follow one another are one: only passages have borders of their own."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
        text = ""
        yield piece
    if text:
        yield text


def _in_front(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts in front of a text."""
    text = "a"
    alone = tokenizer(text, add_special_tokens=False)["input_ids"]
    found: list[int] = tokenizer(text)["input_ids"]
    starts = range(len(found) - len(alone) + 1)
    return next((found[:at] for at in starts if found[at : at + len(alone)] == alone), [])


def _templated(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None, options: Mapping[str, Any]
) -> list[Part]:
    """What the template makes of messages, with their passages in place. It is given a mark for each of these."""
    if template is None and not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; pass chat_template=, a text in Jinja, or False")
    passages: list[Passage] = []
    told = []
    for message in messages:
        content = message["content"]
        whole = ""
        for part in _checked([content] if isinstance(content, str) else content):
            whole += part if isinstance(part, str) else _mark(len(passages))
            passages += [part] if isinstance(part, Passage) else []
        told.append({**message, "content": whole})
    settings = {"add_generation_prompt": True, **options, "tokenize": False, "chat_template": template}
    text = str(tokenizer.apply_chat_template(told, **settings))
    pieces: list[Part] = []
    for number, passage in enumerate(passages):
        before, found, text = text.partition(_mark(number))
        if not found or _mark(number) in text:
            raise ConfigError(f"the chat template does not say passage {number} once, in its place; take another")
        pieces += [before, passage]
    return [*pieces, text]


def _mark(number: int) -> str:
    """What stands for a passage while a template is filled in: letters of private use, which no text has."""
    return f"\ue000{number}\ue001"
