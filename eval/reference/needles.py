"""Needle-in-a-haystack and variable-tracking tasks of RULER (Hsieh et al. 2024) in the generated language."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .language import MAX_VALUES, Context, Language, Question


@dataclass(frozen=True)
class Needle:
    """Statements in a text, and questions about them.

    Args:
        kinds: Kinds of statements.
        question_kind: Kind of question.
        alone: Whether the text contains only the requested statement; otherwise it contains as many statements as the
            language has words for.
        together: Number of consecutive questions; all must be answered correctly.
        statements: Number of values of the requested key, or of copies in the requested chain.
    """

    kinds: tuple[str, ...]
    question_kind: str
    alone: bool = False
    together: int = 1
    statements: int = 1

    def draw(self, language: Language, rng: np.random.Generator, tokens: int) -> tuple[Context, list[Question]]:
        """Draw a context of `tokens` tokens, and the questions about it."""
        share = 6.5 / tokens if self.alone else 0.6  # room for one fact
        while True:
            context = language.context(rng, tokens, 96, dict.fromkeys(self.kinds, 1.0), (share, share))
            fitting = [
                question
                for question in context.questions
                if question.kind == self.question_kind and question.statements == self.statements
            ]
            if len(fitting) >= self.together:
                return context, fitting[: self.together]


NEEDLES = {
    "single": Needle(("fact",), "fact", alone=True),
    "multi-key": Needle(("fact",), "fact"),
    "multi-value": Needle(("fact", "values"), "values", statements=MAX_VALUES),
    "multi-query": Needle(("fact",), "fact", together=4),
    "tracking": Needle(("fact", "track"), "track", statements=MAX_VALUES),
}
