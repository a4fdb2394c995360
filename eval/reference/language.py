"""The generated language: documents of natural text with statements among it, and questions that need them.

- `fact`: `<is> key a b`, among many others; asked `<q> key`, answered `a b`.
- `alias`: `<name> key` ends a document and `<it> a b` stands in the next; asked and answered like a fact.
- `hop`: `<copy> key2 key1` after a fact about `key1`; asked about `key2`, answered with that fact.
- `shot`: `<ex> word word label`, several for each category of words, labels meaning something in one context only;
  asked `<ex> word word`, answered `label`.
- `back`: after another question, `<q> <last>`; answered as that one.
- `values`: several facts about one key, far apart; asked `<q> key`, and the likeliest words are those that these
  facts begin with. (To say one after another, and none twice, was not learned, and is not asked for: what looks a
  key up attends to all its facts alike and to nothing that was answered, so nothing tells it what to leave out.)
- `track`: a chain of copies, `<copy> key2 key1`, `<copy> key3 key2` and so on; asked about its last key, answered with
  the fact about its first.

The first five are what every reference model knows (`KINDS`), all seven what those of long context know (`LONG_KINDS`).

An alias crosses a border: `<it>` is bound to its key by what the document before said, so documents that are encoded
apart lose it. All else is text of books, which gives attention something to do in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MARKS = ("<pad>", "<bos>", "<eos>", "<doc>", "<is>", "<q>", "<name>", "<it>", "<copy>", "<ex>", "<last>")
KEYS = tuple(f"<k{i}>" for i in range(96))
FIRSTS = tuple(f"<a{i}>" for i in range(64))
SECONDS = tuple(f"<b{i}>" for i in range(64))
CATEGORIES, WORDS_EACH = 8, 8
WORDS = tuple(f"<w{c}.{i}>" for c in range(CATEGORIES) for i in range(WORDS_EACH))
LABELS = tuple(f"<l{i}>" for i in range(16))
KINDS = ("fact", "alias", "hop", "shot", "back")
LONG_KINDS = (*KINDS, "values", "track")
LEAST, MOST = 2, 4
"""Values of a key, and copies in a chain."""


def train_tokenizer(texts: Iterable[str], vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of `vocabulary` pieces of text, and the words of the language beside them."""
    names = [*MARKS, *KEYS, *FIRSTS, *SECONDS, *WORDS, *LABELS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary + len(names),
            special_tokens=names,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:  # the language's words are said, not skipped in decoding
        token["special"] = token["content"] in MARKS[:3]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


@dataclass(frozen=True)
class Question:
    """What is asked at the end of a context, and the right answer, as token ids.

    To `values` any of its pairs is an answer, and all are known if their first tokens are the likeliest.
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    statements: int = 1
    """Values that a key has, or copies in the chain that it ends."""

    def is_answer(self, said: Sequence[int]) -> bool:
        """Whether these tokens are right: as many as `answer` has; to `values`, the likeliest in any order."""
        return set(said) == set(self.answer[::2]) if self.kind == "values" else tuple(said) == self.answer


@dataclass(frozen=True)
class Context:
    """Documents and questions about them, as token ids. The first document begins with `<bos>`."""

    documents: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    is_text: np.ndarray
    """bool, over the documents set one after the other: which tokens are of natural text."""
    meant: np.ndarray
    """int64, likewise: for the key that a copy ends in, the first token of what it stands for; -1 elsewhere."""


class Language:
    """Draws contexts.

    Args:
        tokenizer: made by `train_tokenizer`.
        text: token ids of natural text, int `[tokens]`; where a context needs more, it begins again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: np.ndarray) -> None:
        self.text = text
        vocabulary = tokenizer.get_vocab()
        self._mark = {mark: vocabulary[mark] for mark in MARKS}
        self._keys, self._firsts, self._seconds, self._labels = (
            np.array(tokenizer.convert_tokens_to_ids(list(names))) for names in (KEYS, FIRSTS, SECONDS, LABELS)
        )
        self._words = np.array(tokenizer.convert_tokens_to_ids(list(WORDS))).reshape(CATEGORIES, WORDS_EACH)

    def context(
        self,
        rng: np.random.Generator,
        tokens: int,
        questions: int,
        kinds: Mapping[str, float],
        density: tuple[float, float] = (0.3, 0.7),
        repeats: bool = False,
        least: int = LEAST,
        most: int = MOST,
    ) -> Context:
        """Draw documents of `tokens` tokens together, and at most so many questions.

        Args:
            kinds: how often each kind of question is asked, relative to the others.
            density: range of the share of tokens that statements take.
            repeats: whether the same may be asked again, and read off the first time.
            least, most: values of a key, and copies in a chain; at least 2.
        """
        said = _Said(self, rng, int(tokens * rng.uniform(*density)), kinds, (least, most))
        events = sorted(said.events, key=lambda event: event[0])
        documents, is_text = self._write(rng, [(mark, list(ids)) for _, mark, ids in events], tokens)
        return Context(
            documents, self._ask(rng, said, questions, kinds, repeats), is_text, self._meant(documents, said)
        )

    def _meant(self, documents: tuple[tuple[int, ...], ...], said: _Said) -> np.ndarray:
        flat = [token for document in documents for token in document]
        meant = np.full(len(flat), -1)
        for at, token in enumerate(flat[:-2]):
            if token == self._mark["<copy>"]:
                meant[at + 2] = said.stands_for[flat[at + 1]]
        return meant

    def _write(
        self, rng: np.random.Generator, events: list[tuple[bool, list[int]]], tokens: int
    ) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
        """Set events (and whether a new document begins with them) among text, `tokens` in all."""
        room = tokens - 1 - sum(len(ids) + begins for begins, ids in events)
        # an alias' two halves may have text between them, but no other half: gaps are free
        cuts = np.sort(rng.integers(0, room + 1, len(events)))
        gaps = np.diff([0, *cuts.tolist(), room])
        at = int(rng.integers(0, max(1, len(self.text) - tokens)))
        documents, is_text = [[self._mark["<bos>"]]], [False]
        for (begins, ids), gap in zip([*events, (False, [])], gaps.tolist(), strict=True):
            if begins:
                documents.append([self._mark["<doc>"]])
                is_text.append(False)
            documents[-1].extend(self.text.take(range(at, at + gap), mode="wrap").tolist())
            documents[-1].extend(ids)
            is_text += [True] * gap + [False] * len(ids)
            at += gap
        return tuple(tuple(document) for document in documents), np.array(is_text)

    def _ask(
        self, rng: np.random.Generator, said: _Said, count: int, kinds: Mapping[str, float], repeats: bool
    ) -> tuple[Question, ...]:
        mark, asked = self._mark, list[Question]()
        left = {kind: rng.permutation(len(said.askable.get(kind, ()))).tolist() for kind in kinds if kind != "back"}
        if "shot" in left:
            left["shot"] *= 2  # with other words
        for some in left.values() if repeats else ():
            some[:] = rng.choice(some, count).tolist() if some else []
        while len(asked) < count:
            names = [kind for kind in left if left[kind]]
            if "back" in kinds and asked and asked[-1].kind not in ("shot", "values"):
                names.append("back")
            if not any(left.values()):
                break
            chances = np.array([kinds[kind] for kind in names])
            kind = rng.choice(names, p=chances / chances.sum())
            if kind == "back":
                question = Question("back", (mark["<q>"], mark["<last>"]), asked[-1].answer)
            elif kind == "shot":
                category, label = said.askable["shot"][left["shot"].pop()]
                question = Question("shot", self.shot(rng, category), (label,))
            else:
                key, answer, statements = said.askable[kind][left[kind].pop()]
                question = Question(kind, (mark["<q>"], key), answer, statements)
            asked.append(question)
        return tuple(asked)

    def shot(self, rng: np.random.Generator, category: int) -> tuple[int, ...]:
        """An example of a category, without its label."""
        return (self._mark["<ex>"], *rng.choice(self._words[category], 2).tolist())


class _Said:
    """Statements, each with a time in [0, 1), whether it begins a document, and its tokens; what may be asked."""

    def __init__(
        self,
        language: Language,
        rng: np.random.Generator,
        room: int,
        kinds: Mapping[str, float],
        counts: tuple[int, int],
    ) -> None:
        self.events: list[tuple[float, bool, tuple[int, ...]]] = []
        self.askable: dict[str, list] = {}
        self.stands_for: dict[int, int] = {}
        """For each key that is a copy, the first token of what it stands for."""
        mark = language._mark
        names = [kind for kind in kinds if kind != "back"]
        keys = rng.permutation(language._keys).tolist()
        firsts = rng.permutation(language._firsts).tolist()  # distinct, so that what follows them is certain
        facts: list[tuple[float, int, tuple[int, int]]] = []
        if "shot" in kinds:
            room -= self._shots(language, rng, min(room // 2, 120))
            names.remove("shot")
        while room >= 6 and names and len(keys) > 2 and firsts:
            kind, time = rng.choice(names), float(rng.random())
            count = 1 if kind == "hop" else 0
            if kind in ("values", "track"):
                count = int(rng.integers(counts[0], counts[1] + 1))
            if kind in ("hop", "track") and (not facts or len(keys) < count or room < 3 * count):
                kind = "fact"
            if kind == "values" and (len(firsts) < count or room < 4 * count):
                kind = "fact"
            if kind in ("hop", "track"):
                # once each, or what is often copied is guessed
                told, key, answer = facts.pop(rng.integers(len(facts)))
                for share in sorted([time, *rng.random(count - 1).tolist()]):
                    before, key = key, keys.pop()
                    self._add(told + (1 - told) * share, (mark["<copy>"], key, before))
                    self.stands_for[key] = answer[0]
                self._ask(kind, key, answer, count)
                room -= 3 * count
                continue
            if kind == "values":
                key, pairs = keys.pop(), [(firsts.pop(), int(rng.choice(language._seconds))) for _ in range(count)]
                for pair in pairs:  # independent times: in no order
                    self._add(float(rng.random()), (mark["<is>"], key, *pair))
                self._ask(kind, key, tuple(token for pair in pairs for token in pair), count)
                room -= 4 * count
                continue
            key, answer = keys.pop(), (firsts.pop(), int(rng.choice(language._seconds)))
            if kind == "fact":
                self._add(time, (mark["<is>"], key, *answer))
                facts.append((time, key, answer))
                room -= 4
            else:  # two neighbours in time: nothing but text comes between them
                self._add(time, (mark["<name>"], key))
                self.events.append((np.nextafter(time, 2), True, (mark["<it>"], *answer)))
                room -= 6
            self._ask(kind, key, answer)

    def _add(self, time: float, ids: tuple[int, ...]) -> None:
        self.events.append((time, False, ids))

    def _ask(self, kind: str, key: int, answer: tuple[int, ...], statements: int = 1) -> None:
        self.askable.setdefault(kind, []).append((key, answer, statements))

    def _shots(self, language: Language, rng: np.random.Generator, room: int) -> int:
        """Examples of two to four categories; returns the tokens they take."""
        count = min(int(rng.integers(2, 5)), room // 8)
        categories = rng.permutation(CATEGORIES)[:count].tolist()
        labels = rng.permutation(language._labels)[:count].tolist()
        used = 0
        for category, label in zip(categories, labels, strict=True):
            for _ in range(int(rng.integers(2, max(3, room // (4 * count) + 1)))):
                self._add(float(rng.random()), (*language.shot(rng, category), label))
                used += 4
            self.askable.setdefault("shot", []).append((category, label))
        return used
