"""Tasks in the language of the reference models. They need no data and only suit models trained on the language."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..reference.language import KINDS, Context, Language, Question
from ..reference.needles import NEEDLES
from .base import Draw, Example, Task
from .ruler.haystack import sentences


def _language(draw: Draw) -> Language:
    text = draw.tokenizer(" ".join(sentences(draw.data)), add_special_tokens=False)["input_ids"]
    return Language(draw.tokenizer, np.array(text))


def _example(name: str, tokenizer: PreTrainedTokenizerBase, context: Context, question: Question) -> Example:
    documents = (context.documents[0][1:], *context.documents[1:])  # encoding adds <bos>
    return Example(
        name,
        tuple(str(tokenizer.decode(list(document))) for document in documents),
        str(tokenizer.decode(list(question.prompt))),
        answers=(str(tokenizer.decode(list(question.answer))),),
    )


@dataclass(frozen=True, kw_only=True)
class Reference(Task):
    """Questions of one kind in the language (see `eval.reference.language`).

    Args:
        kind: Kind of question; the contexts contain statements of all kinds in `KINDS`.
    """

    kind: str

    def examples(self, draw: Draw) -> Iterator[Example]:
        language = _language(draw)
        kinds = {kind: 1.0 for kind in KINDS if kind != "back"}
        num_examples = number = 0
        while num_examples < (500 if draw.limit is None else draw.limit):
            rng = np.random.default_rng([draw.seed, number])
            number += 1
            context = language.context(rng, draw.prefix_tokens, 40, kinds, density=(0.3, 0.5))
            question = next((question for question in context.questions if question.kind == self.kind), None)
            if question is None:
                continue
            num_examples += 1
            yield _example(str(number), draw.tokenizer, context, question)


@dataclass(frozen=True, kw_only=True)
class ReferenceNeedle(Task):
    """RULER task in the language with one question and one answer (see `eval.reference.needles`).

    Args:
        needle: Key of `NEEDLES`.
    """

    needle: str

    def examples(self, draw: Draw) -> Iterator[Example]:
        language = _language(draw)
        for number in draw.indices(500):
            rng = np.random.default_rng([draw.seed, number])
            context, (question,) = NEEDLES[self.needle].draw(language, rng, draw.prefix_tokens)
            yield _example(str(number), draw.tokenizer, context, question)


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

REFERENCE_NEEDLES = tuple(
    ReferenceNeedle(
        name=f"reference_{needle.replace('-', '_')}",
        about=f"{about} (the language of reference models of long context)",
        metric="exact_match",
        max_new_tokens=2,
        needle=needle,
    )
    for needle, about in (
        ("single", "the one fact in a text"),
        ("multi-key", "one of 64 facts in a text"),
        ("tracking", "a fact by the last of four copies in a chain"),
    )
)
