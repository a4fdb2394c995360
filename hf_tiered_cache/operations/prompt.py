"""Prompts of texts and passages, in which a passage has the same tokens wherever it occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch

from ..errors import ConfigError


@dataclass(frozen=True)
class Passage:
    """Text that can be found again in other prompts, between other texts.

    Args:
        text: Text of the passage. Strings that look like special tokens are treated as text.
    """

    text: str

    def ids(self, tokenizer: Any) -> torch.Tensor:
        """Return the tokens of the passage, int64 `[tokens]`.

        To store them: `KVStore.precompute(model, [passage.ids(tokenizer), ...], passages=True)`.
        """
        token_ids = tokenizer(self.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return torch.tensor(token_ids, dtype=torch.int64)


Part = str | Passage


@dataclass(frozen=True, eq=False)
class Prompt:
    """Prompt, and where its passages are.

    Args:
        input_ids: int64 `[1, tokens]`, on the CPU.
        passages: Half-open token range of each passage, in order.
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
    r"""Join texts and passages into a prompt in which each passage has the tokens that it has by itself.

    If a text is tokenized as a whole, some tokens cross the borders of its passages, and the stored KV of these tokens
    is not found. This function tokenizes each passage, and each text between two passages, separately.

    Args:
        tokenizer: Tokenizer of the model.
        parts: Texts and passages in order; or chat messages, `{"role": ..., "content": ...}`, where each content is a
            text or a list of texts and passages.
        chat_template: Whether to apply the tokenizer's chat template, or a template to use instead. None applies it if
            `parts` are messages. Parts without roles become one user message.
        options: Options of the template, such as `add_generation_prompt=False` (True by default).

    Returns:
        The prompt. Special tokens at its beginning, such as BOS, come from the template; without a template, from the
        tokenizer.

    Raises:
        ConfigError: The prompt is empty, a part is neither a text nor a passage, there is no template, the template
            does not contain each passage once, or messages or options are given without a template.

    Example:
        >>> prompt = build_prompt(tokenizer, ["Read this:\n", Passage(document), "\nWhat does it say?"])
        >>> model.generate(prompt.input_ids, past_key_values=TieredCache(model, store, method="cache_tune"))
    """
    if isinstance(parts, str | Passage) or not parts:
        raise ConfigError("parts must be a list of texts and passages, or of chat messages")
    is_chat = isinstance(parts[0], Mapping)
    if chat_template or (chat_template is None and is_chat):
        messages = parts if is_chat else [{"role": "user", "content": list(parts)}]
        template = chat_template if isinstance(chat_template, str) else None
        pieces = _apply_template(tokenizer, cast("Sequence[Mapping[str, Any]]", messages), template, options)
        ids = torch.empty(0, dtype=torch.int64)  # the template adds the special tokens
    elif is_chat or options:
        raise ConfigError("messages and options require a chat template; leave chat_template at its default")
    else:
        pieces = list(_checked(parts))
        ids = torch.tensor(_leading_tokens(tokenizer), dtype=torch.int64)
    spans = []
    for piece in _joined(pieces):
        if isinstance(piece, Passage):
            part_ids = piece.ids(tokenizer)
            spans.append((len(ids), len(ids) + len(part_ids)))
        else:
            part_ids = torch.tensor(tokenizer(piece, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        ids = torch.cat([ids, part_ids])
    if not len(ids):
        raise ConfigError("the prompt has no tokens")
    return Prompt(ids.unsqueeze(0), tuple(spans))


def _checked(parts: Sequence[Any]) -> Iterator[Part]:
    for part in parts:
        if not isinstance(part, str | Passage):
            raise ConfigError(f"a part must be a str or a Passage, not {type(part).__name__}")
        yield part


def _joined(pieces: Sequence[Part]) -> Iterator[Part]:
    """Yield the pieces with adjacent texts joined: only passages have token borders of their own."""
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if not is_text:
            yield from run
        elif text := "".join(map(str, run)):
            yield text


def _leading_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    text = "a"
    text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    token_ids: list[int] = tokenizer(text)["input_ids"]
    starts = range(len(token_ids) - len(text_ids) + 1)
    return next((token_ids[:start] for start in starts if token_ids[start : start + len(text_ids)] == text_ids), [])


def _apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None, options: Mapping[str, Any]
) -> list[Part]:
    """Apply the template to messages, and return its text with the passages in place.

    A mark represents each passage while the template is applied.
    """
    if template is None and not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; pass a Jinja template as chat_template=, or False")
    passages: list[Passage] = []
    rendered = []
    for message in messages:
        content = message["content"]
        rendered_text = ""
        for part in _checked([content] if isinstance(content, str) else content):
            rendered_text += part if isinstance(part, str) else _mark(len(passages))
            passages += [part] if isinstance(part, Passage) else []
        rendered.append({**message, "content": rendered_text})
    settings = {"add_generation_prompt": True, **options, "tokenize": False, "chat_template": template}
    text = str(tokenizer.apply_chat_template(rendered, **settings))
    pieces: list[Part] = []
    for number, passage in enumerate(passages):
        text_before, mark, text = text.partition(_mark(number))
        if not mark or _mark(number) in text:
            raise ConfigError(
                f"the chat template does not render passage {number} exactly once and in order; use another template"
            )
        pieces += [text_before, passage]
    return [*pieces, text]


def _mark(number: int) -> str:
    """Return the mark of a passage in a template: private-use characters, which do not occur in text."""
    return f"\ue000{number}\ue001"
