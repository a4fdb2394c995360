"""Generated language: documents of natural text with embedded statements, and questions about the statements.

- `fact`: `<is> key a b`, among many others. Question `<q> key`, answer `a b`.
- `alias`: `<name> key` ends a document, and `<it> a b` is in the next one. Question and answer as for a fact.
- `hop`: `<copy> key2 key1` after a fact about `key1`. Question about `key2`, answer with the fact about `key1`.
- `shot`: `<ex> word word label`, several for each category of words; labels have a meaning within one context only.
  Question `<ex> word word`, answer `label`.
- `back`: `<q> <last>` after another question, with the same answer as that question.
- `values`: several facts about one key, far apart. Question `<q> key`; the most likely next tokens should be the first
  tokens of these facts. (Models did not learn to list all values without repetition, so it is not asked: the lookup of
  a key attends equally to all its facts and not to earlier answers, so it cannot exclude values already listed.)
- `track`: chain of copies, `<copy> key2 key1`, `<copy> key3 key2` and so on. Question about the last key, answer with
  the fact about the first key.

All reference models are trained on the first five kinds (`KINDS`), models of long context on all seven (`LONG_KINDS`).

An alias crosses a document boundary: the previous document binds `<it>` to its key, so the alias is lost if documents
are encoded separately. The remaining tokens are text of books, so that attention has work to do in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
MIN_VALUES, MAX_VALUES = 2, 4
"""Range of the number of values of a key, and of copies in a chain."""


def train_tokenizer(texts: Iterable[str], vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer with `vocabulary` text tokens, and add the tokens of the language."""
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
    for token in described["added_tokens"]:  # decoding keeps the tokens of the language
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
    """Question at the end of a context, and its right answer, as token ids.

    For `values`, `answer` lists the pairs of all values, and the answer is right if their first tokens are the most
    likely ones.
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    statements: int = 1
    """Number of values of the key, or of copies in the chain that ends in the key."""

    def is_answer(self, tokens: Sequence[int]) -> bool:
        """Return whether `tokens` are the answer; for `values`, whether they are the first tokens of all values."""
        return set(tokens) == set(self.answer[::2]) if self.kind == "values" else tuple(tokens) == self.answer


@dataclass(frozen=True)
class Context:
    """Documents with questions about them, as token ids. The first document begins with `<bos>`."""

    documents: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    is_text: np.ndarray
    """True for tokens of natural text; bool `[tokens]`, over all documents."""
    meant: np.ndarray
    """First token of the copied fact, at the last token of each copy, else -1; int64 `[tokens]`, over all documents."""


class Language:
    """Generator of contexts.

    Args:
        tokenizer: Tokenizer made by `train_tokenizer`.
        text: Token ids of natural text, int `[tokens]`; repeated if a context needs more.
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
        min_values: int = MIN_VALUES,
        max_values: int = MAX_VALUES,
    ) -> Context:
        """Draw documents with `tokens` tokens in total, and questions about them.

        Args:
            rng: Random generator.
            tokens: Total number of tokens of the documents.
            questions: Maximum number of questions.
            kinds: Kinds of questions, with their relative frequencies.
            density: Range of the share of tokens in statements.
            repeats: Whether a question may be repeated, so that its answer can be copied from the first time.
            min_values: Minimum number of values of a key and of copies in a chain; at least 2.
            max_values: Maximum number of values of a key and of copies in a chain.
        """
        statements = _Statements(self, rng, int(tokens * rng.uniform(*density)), kinds, (min_values, max_values))
        events = sorted(statements.events, key=lambda event: event[0])
        documents, is_text = self._write(rng, [(mark, list(ids)) for _, mark, ids in events], tokens)
        return Context(
            documents,
            self._ask(rng, statements, questions, kinds, repeats),
            is_text,
            self._meant(documents, statements),
        )

    def _meant(self, documents: tuple[tuple[int, ...], ...], statements: _Statements) -> np.ndarray:
        flat = [token for document in documents for token in document]
        referents = np.full(len(flat), -1)
        for position, token in enumerate(flat[:-2]):
            if token == self._mark["<copy>"]:
                referents[position + 2] = statements.stands_for[flat[position + 1]]
        return referents

    def _write(
        self, rng: np.random.Generator, events: list[tuple[bool, list[int]]], tokens: int
    ) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
        """Insert events, as (begins a document, ids), into text, for `tokens` tokens in total."""
        room = tokens - 1 - sum(len(ids) + begins for begins, ids in events)
        # only text comes between the two halves of an alias, whatever the gaps
        cuts = np.sort(rng.integers(0, room + 1, len(events)))
        gaps = np.diff([0, *cuts.tolist(), room])
        begin = int(rng.integers(0, max(1, len(self.text) - tokens)))
        documents, is_text = [[self._mark["<bos>"]]], [False]
        for (begins, ids), gap in zip([*events, (False, [])], gaps.tolist(), strict=True):
            if begins:
                documents.append([self._mark["<doc>"]])
                is_text.append(False)
            documents[-1].extend(self.text.take(range(begin, begin + gap), mode="wrap").tolist())
            documents[-1].extend(ids)
            is_text += [True] * gap + [False] * len(ids)
            begin += gap
        return tuple(tuple(document) for document in documents), np.array(is_text)

    def _ask(
        self, rng: np.random.Generator, statements: _Statements, count: int, kinds: Mapping[str, float], repeats: bool
    ) -> tuple[Question, ...]:
        mark, questions = self._mark, list[Question]()
        remaining = {
            kind: rng.permutation(len(statements.askable.get(kind, ()))).tolist() for kind in kinds if kind != "back"
        }
        if "shot" in remaining:
            remaining["shot"] *= 2  # each category twice, with other words
        for numbers in remaining.values() if repeats else ():
            numbers[:] = rng.choice(numbers, count).tolist() if numbers else []
        while len(questions) < count:
            names = [kind for kind in remaining if remaining[kind]]
            if "back" in kinds and questions and questions[-1].kind not in ("shot", "values"):
                names.append("back")
            if not any(remaining.values()):
                break
            chances = np.array([kinds[kind] for kind in names])
            kind = rng.choice(names, p=chances / chances.sum())
            if kind == "back":
                question = Question("back", (mark["<q>"], mark["<last>"]), questions[-1].answer)
            elif kind == "shot":
                category, label = statements.askable["shot"][remaining["shot"].pop()]
                question = Question("shot", self.shot(rng, category), (label,))
            else:
                key, answer, num_statements = statements.askable[kind][remaining[kind].pop()]
                question = Question(kind, (mark["<q>"], key), answer, num_statements)
            questions.append(question)
        return tuple(questions)

    def shot(self, rng: np.random.Generator, category: int) -> tuple[int, ...]:
        """Draw an example of a category, without its label."""
        return (self._mark["<ex>"], *rng.choice(self._words[category], 2).tolist())


class _Statements:
    """Statements as (time in [0, 1), begins a document, tokens), and the questions they allow."""

    def __init__(
        self,
        language: Language,
        rng: np.random.Generator,
        room: int,
        kinds: Mapping[str, float],
        counts: tuple[int, int],
    ) -> None:
        self.events: list[tuple[float, bool, tuple[int, ...]]] = []
        self.askable: dict[str, list[Any]] = {}
        self.stands_for: dict[int, int] = {}
        """First token of the copied fact, by key of the copy."""
        mark = language._mark
        names = [kind for kind in kinds if kind != "back"]
        keys = rng.permutation(language._keys).tolist()
        firsts = rng.permutation(language._firsts).tolist()  # distinct, so that the next token is determined
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
                # copy each fact once, or the model guesses facts that are often copied
                time_of_fact, key, answer = facts.pop(rng.integers(len(facts)))
                for share in sorted([time, *rng.random(count - 1).tolist()]):
                    source_key, key = key, keys.pop()
                    self._add(time_of_fact + (1 - time_of_fact) * share, (mark["<copy>"], key, source_key))
                    self.stands_for[key] = answer[0]
                self._ask(kind, key, answer, count)
                room -= 3 * count
                continue
            if kind == "values":
                key, pairs = keys.pop(), [(firsts.pop(), int(rng.choice(language._seconds))) for _ in range(count)]
                for pair in pairs:  # independent times, in no particular order
                    self._add(float(rng.random()), (mark["<is>"], key, *pair))
                self._ask(kind, key, tuple(token for pair in pairs for token in pair), count)
                room -= 4 * count
                continue
            key, answer = keys.pop(), (firsts.pop(), int(rng.choice(language._seconds)))
            if kind == "fact":
                self._add(time, (mark["<is>"], key, *answer))
                facts.append((time, key, answer))
                room -= 4
            else:  # adjacent times: only text comes between the two
                self._add(time, (mark["<name>"], key))
                self.events.append((np.nextafter(time, 2), True, (mark["<it>"], *answer)))
                room -= 6
            self._ask(kind, key, answer)

    def _add(self, time: float, ids: tuple[int, ...]) -> None:
        self.events.append((time, False, ids))

    def _ask(self, kind: str, key: int, answer: tuple[int, ...], statements: int = 1) -> None:
        self.askable.setdefault(kind, []).append((key, answer, statements))

    def _shots(self, language: Language, rng: np.random.Generator, room: int) -> int:
        """Add examples of up to four categories; return the number of their tokens."""
        count = min(int(rng.integers(2, 5)), room // 8)
        categories = rng.permutation(CATEGORIES)[:count].tolist()
        labels = rng.permutation(language._labels)[:count].tolist()
        num_tokens = 0
        for category, label in zip(categories, labels, strict=True):
            for _ in range(int(rng.integers(2, max(3, room // (4 * count) + 1)))):
                self._add(float(rng.random()), (*language.shot(rng, category), label))
                num_tokens += 4
            self.askable.setdefault("shot", []).append((category, label))
        return num_tokens
