"""Variable tracking: find all variables that have a value, through assignments far apart in the text."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass

from ..base import Draw, Example, Task
from .haystack import NOISE, filling, scattered

_INTRODUCTION = "Follow the variables in this text.\n\n"


@dataclass(frozen=True, kw_only=True)
class Tracking(Task):
    """Chain of assignments among noise.

    Args:
        hops: Number of assignments after the first.
    """

    hops: int = 4

    def examples(self, draw: Draw) -> Iterator[Example]:
        for number in draw.indices(500):
            rng = draw.rng(self.name, number)
            names: set[str] = set()
            while len(names) <= self.hops:
                names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
            chain = rng.sample(sorted(names), len(names))
            value = str(rng.randrange(10_000, 100_000))
            steps = [f"LET {chain[0]} = {value}."]
            steps += [f"LET {target} = {source}." for source, target in itertools.pairwise(chain)]
            hay = filling(draw, itertools.repeat(NOISE), " ".join([_INTRODUCTION, *steps]))
            yield Example(
                str(number),
                (_INTRODUCTION + " ".join(scattered(hay, steps, rng)),),
                f"\n\nWhich variables have the value {value}? Name all {len(chain)}.\nAnswer:",
                answers=tuple(chain),
            )


TRACKING = (
    Tracking(
        name="ruler_vt",
        about="all variables of a chain of four assignments (RULER)",
        metric="string_match",
        max_new_tokens=30,
    ),
)
