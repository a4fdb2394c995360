"""Running text of books: perplexity of the continuation and divergence from full KV. No labels are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .base import Draw, Example, Task
from .ruler.haystack import sentences

_QUESTION_TOKENS = 48
_ANSWER_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Passage of a book: the first sentences are the prefix, the next ones the question, the last ones the answer."""

    def examples(self, draw: Draw) -> Iterator[Example]:
        texts = sentences(draw.data)
        lengths = [draw.count(f"{sentence} ") for sentence in texts]
        for number in draw.indices(500):
            index = draw.rng(self.name, number).randrange(len(texts))
            parts = []
            for tokens in (draw.prefix_tokens, _QUESTION_TOKENS, _ANSWER_TOKENS):
                start, room = index, tokens
                while room > 0:
                    room -= lengths[index % len(texts)]
                    index += 1
                parts.append("".join(f"{texts[i % len(texts)]} " for i in range(start, index)))
            yield Example(str(number), (parts[0],), parts[1], answers=(parts[2],))


TEXT = Text(
    name="text",
    about="perplexity of running text, behind a long passage (public-domain books)",
    metric="perplexity",
    max_new_tokens=_ANSWER_TOKENS,
    generates=False,
)
