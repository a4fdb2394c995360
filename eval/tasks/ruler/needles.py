"""Needles in a haystack: single key, multiple keys, multiple values, multiple queries."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..base import Draw, Example, Task
from .haystack import NOISE, filling, scattered, sentences, words

_INTRODUCTION = "Remember the secret values in this text.\n\n"


@dataclass(frozen=True, kw_only=True)
class Needles(Task):
    """Retrieval of values by their keys.

    Args:
        hay: "noise" for repeated sentences, "essay" for text of books, "needles" for the values of other keys.
        keys: Number of hidden keys.
        values: Number of values of each key.
        num_requested: Number of keys to ask for.
        uuids: "key" or "value" or both, to use UUIDs for them instead of words and numbers.
    """

    hay: Literal["noise", "essay", "needles"]
    keys: int = 1
    values: int = 1
    num_requested: int = 1
    uuids: tuple[str, ...] = ()

    def examples(self, draw: Draw) -> Iterator[Example]:
        names, essay = words(draw.data), sentences(draw.data)
        for number in draw.indices(500):
            rng = draw.rng(self.name, number)
            pairs = {self._key(rng, names): [self._value(rng) for _ in range(self.values)] for _ in range(self.keys)}
            needles = [_needle(key, value) for key, values in pairs.items() for value in values]
            rng.shuffle(needles)
            hay = filling(draw, self._hay(rng, names, essay), " ".join([_INTRODUCTION, *needles]))
            requested_keys = rng.sample(sorted(pairs), self.num_requested)
            yield Example(
                str(number),
                (_INTRODUCTION + " ".join(scattered(hay, needles, rng)),),
                f"\n\nWhat are all the secret values of {' and '.join(requested_keys)}?\nAnswer:",
                answers=tuple(value for key in requested_keys for value in pairs[key]),
            )

    def _hay(self, rng: random.Random, names: Sequence[str], essay: Sequence[str]) -> Iterator[str]:
        start = rng.randrange(len(essay))
        for number in itertools.count(start):
            if self.hay == "noise":
                yield NOISE
            elif self.hay == "essay":
                yield essay[number % len(essay)]
            else:
                yield _needle(self._key(rng, names), self._value(rng))

    def _key(self, rng: random.Random, names: Sequence[str]) -> str:
        return _uuid(rng) if "key" in self.uuids else f"{rng.choice(names)}-{rng.choice(names)}"

    def _value(self, rng: random.Random) -> str:
        return _uuid(rng) if "value" in self.uuids else str(rng.randrange(10**6, 10**7))


def _needle(key: str, value: str) -> str:
    return f"A secret value of {key} is {value}."


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _task(name: str, about: str, **options: Any) -> Needles:
    return Needles(name=f"ruler_{name}", about=f"{about} (RULER)", metric="string_match", max_new_tokens=128, **options)


NEEDLES = (
    _task("niah_single_1", "a number among repeated sentences", hay="noise"),
    _task("niah_single_2", "a number in text", hay="essay"),
    _task("niah_single_3", "an identifier in text", hay="essay", uuids=("value",)),
    _task("niah_multikey_1", "one of four numbers in text", hay="essay", keys=4),
    _task("niah_multikey_2", "a number among nothing but numbers", hay="needles"),
    _task("niah_multikey_3", "an identifier among nothing but such", hay="needles", uuids=("key", "value")),
    _task("niah_multivalue", "all four numbers of one key", hay="essay", values=4),
    _task("niah_multiquery", "the numbers of four keys", hay="essay", keys=4, num_requested=4),
)
