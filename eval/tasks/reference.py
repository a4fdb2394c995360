"""The language of the reference models, as tasks: they need no data, and only models trained on it understand them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..reference.language import KINDS, Language
from .base import Draw, Example, Task
from .ruler.haystack import sentences


@dataclass(frozen=True, kw_only=True)
class Reference(Task):
    """One kind of question of the language (see `eval.reference.language`).

    Args:
        kind: of question; the contexts hold statements of every kind.
    """

    kind: str

    def examples(self, draw: Draw) -> Iterator[Example]:
        tokenizer = draw.tokenizer
        text = np.array(tokenizer(" ".join(sentences(draw.data)), add_special_tokens=False)["input_ids"])
        language = Language(tokenizer, text)
        kinds = {kind: 1.0 for kind in KINDS if kind != "back"}
        found = number = 0
        while found < (500 if draw.limit is None else draw.limit):
            rng = np.random.default_rng([draw.seed, number])
            number += 1
            context = language.context(rng, draw.prefix_tokens, 40, kinds, density=(0.3, 0.5))
            asked = next((question for question in context.questions if question.kind == self.kind), None)
            if asked is None:
                continue
            found += 1
            documents = (context.documents[0][1:], *context.documents[1:])  # <bos> comes with the encoding
            yield Example(
                str(number),
                tuple(str(tokenizer.decode(list(document))) for document in documents),
                str(tokenizer.decode(list(asked.prompt))),
                answers=(str(tokenizer.decode(list(asked.answer))),),
            )


REFERENCE = tuple(
    Reference(
        name=f"reference_{kind}",
        about=f"{about} (the reference models' language)",
        metric="exact_match",
        max_new_tokens=1 if kind == "shot" else 2,
        kind=kind,
    )
    for kind, about in (
        ("fact", "a fact among others"),
        ("alias", "a fact whose subject the document before names"),
        ("hop", "a fact by another name"),
        ("shot", "the label of a category, from examples"),
    )
)
