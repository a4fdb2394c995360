"""Documents whose KV is stored once, and answers from those that are retrieved: for `retriever.py` and a notebook.

`Reader` is the part to take along: it stores documents as passages, and answers from any of them in any order.
`Lexical` and `made_corpus` are here so that the example needs no embedding model, no data and no network.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from demo import generate

HERE = Path(__file__).resolve().parent
BOOK = HERE / "data" / "a_scandal_in_bohemia_part_1.txt"
REFERENCE = HERE.parent / "eval" / "reference" / "xs"
MODEL = "smollm2-135m"


# --- answers


@dataclass(frozen=True)
class Answer:
    """What a model said.

    Args:
        text: of the answer.
        ttft: seconds until its first token.
        tokens: of the prompt.
        stats: of the cache, where it was a TieredCache.
    """

    text: str
    ttft: float
    tokens: int
    stats: Any = None


class Reader:
    """Answers questions from documents, and computes little of those that are stored.

    Args:
        model, tokenizer: any causal LM of transformers.
        store: a `KVStore`, or the path of one.
        method: how passages are restored; None for `CacheTune()`.
        new_tokens: of an answer, at most.
    """

    def __init__(self, model: Any, tokenizer: Any, store: Any, method: Any = None, new_tokens: int = 32) -> None:
        from hf_tiered_cache.methods import CacheTune

        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.method = CacheTune() if method is None else method
        self.speaks_language = speaks_language(tokenizer)
        self.new_tokens = 2 if self.speaks_language else new_tokens

    def passage(self, text: str) -> Any:
        """A document as it stands in every prompt: the same text, border included, or it would not be found."""
        from hf_tiered_cache import Passage

        return Passage(text if self.speaks_language else f"{text.strip()}\n\n")

    def keep(self, texts: Iterable[str], progress: bool = False) -> Any:
        """Store the KV of documents. Those that are stored are left."""
        ids = [self.passage(text).ids(self.tokenizer) for text in texts]
        return self.store.precompute(self.model, ids, passages=True, method=self.method, progress=progress)

    def prompt(self, question: str, texts: Sequence[str]) -> Any:
        """The documents and the question, as a `Prompt`: each document has the tokens that it was stored with."""
        from hf_tiered_cache import build_prompt

        passages = [self.passage(text) for text in texts]
        if self.speaks_language:
            return build_prompt(self.tokenizer, [*passages, question])
        parts = ["Answer from these documents, in as few words as you can.\n\n", *passages, f"Question: {question}"]
        if self.tokenizer.chat_template:
            return build_prompt(self.tokenizer, parts, chat_template=True)
        return build_prompt(self.tokenizer, [*parts, "\nAnswer:"])

    def answer(self, question: str, texts: Sequence[str], cache: Any = None) -> Answer:
        """What the model says to a question about these documents.

        Args:
            cache: to take in place of a `TieredCache` with the reader's store and method.
        """
        from hf_tiered_cache import TieredCache

        if cache is None:
            cache = TieredCache(self.model, self.store, method=self.method)
        ids = self.prompt(question, texts).input_ids.to(self.model.device)
        out, ttft = generate(self.model, ids, cache, self.new_tokens)
        said = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return Answer(said.strip(), ttft, ids.shape[1], getattr(cache, "stats", None))


def speaks_language(tokenizer: Any) -> bool:
    """Whether it is of a reference model, which speaks a language of its own (see `eval.reference.language`)."""
    return "<is>" in tokenizer.get_vocab()


# --- retrieval


def words_of(text: str) -> list[str]:
    """Words, numbers, and the reference models' words, such as `<k7>`."""
    return re.findall(r"<\w[\w.]*>|\w+", text.lower())


class Lexical:
    """Finds documents by the words that they share with a question (Okapi BM25).

    A document that has what is asked for may lead on: the rarest words that the best one shares with others are looked
    for as well, and the document behind it is taken along.

    Args:
        texts: of the documents, in their order.
        k1, b: how soon more of a word counts no more, and how much long documents are held back.
    """

    _LEADS = 4

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self._words = [Counter(words_of(text)) for text in texts]
        lengths = np.array([sum(words.values()) for words in self._words])
        self._damping = k1 * (1 - b + b * lengths / lengths.mean())  # [documents]
        self._k1, found = k1, Counter(word for words in self._words for word in words)
        self._documents_with = dict(found)
        self._rarity = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found.items()}

    def scores(self, words: Iterable[str]) -> np.ndarray:
        """How well each document fits: float `[documents]`."""
        total = np.zeros(len(self._words))
        for word in set(words) & self._rarity.keys():
            count = np.array([words[word] for words in self._words])
            total += self._rarity[word] * count * (self._k1 + 1) / (count + self._damping)
        return total

    def best(self, question: str, k: int) -> list[int]:
        """The numbers of the `k` documents that fit best, in the order of the documents."""
        scores = self.scores(words_of(question))
        if scores.max() > 0:
            first = int(scores.argmax())
            shared = [word for word in self._words[first] if self._documents_with[word] > 1]
            leads = sorted(shared, key=lambda word: (-self._rarity[word], word))[: self._LEADS]
            scores = scores + 0.5 * self.scores(leads)
            if first + 1 < len(scores):
                scores[first + 1] = max(scores[first + 1], scores[first])
        return sorted(np.argsort(-scores, kind="stable")[:k].tolist())


# --- documents, and questions whose answers are known


class Asked(NamedTuple):
    """A question, its answer, the numbers of the documents that it takes, and which kind it is."""

    question: str
    answer: str
    needs: tuple[int, ...]
    kind: str


def made_corpus(language: bool, documents: int = 100, words: int = 16) -> tuple[list[str], list[Asked]]:
    """Documents of a book's words with statements among them, and the questions that these answer.

    - fact: one document says it.
    - alias: one document names who the next one is about.
    - two hops: a later document says that this is the same as something else, which an earlier one tells.

    In the reference models' language two more statements stand in each, which nobody asks for: it is thick with them.

    Args:
        language: whether it is the reference models', or plain English.
        documents: how many.
        words: of the book in each.
    """
    draw = random.Random(0)
    pairs = documents * 18 // 100
    units = [("fact",)] * (documents - 4 * pairs) + [("alias",)] * pairs + [("two hops", i) for i in range(pairs)] * 2
    draw.shuffle(units)
    say = _Language(draw) if language else _English(draw)
    book = BOOK.read_text(encoding="utf-8").split()
    texts, asked, begun = list[str](), list[Asked](), dict[Any, tuple[int, str, str]]()

    def write(statement: str, at: int) -> int:
        start = len(texts) * words
        text = [book[i % len(book)] for i in range(start, start + words)]
        text.insert(at, statement)
        for aside in say.asides():
            text.insert(draw.randrange(1, words), aside)
        texts.append(say.begins + " ".join(text))
        return len(texts) - 1

    for kind, *which in units:
        key, answer = say.key(), say.answer()
        at = draw.randrange(words // 4, words)
        if kind == "fact":
            asked.append(Asked(say.question(key), answer, (write(say.fact(key, answer), at),), kind))
        elif kind == "alias":
            both = write(say.names(key), words), write(say.of_the_named(answer), words // 4)
            asked.append(Asked(say.question(key), answer, both, kind))
        elif which[0] in begun:
            first, before, answer = begun[which[0]]
            both = first, write(say.same(key, before), at)
            asked.append(Asked(say.question(key), answer, both, kind))
        else:
            begun[which[0]] = write(say.fact(key, answer), at), key, answer
    return texts, asked


class _Language:
    """The words of the reference models."""

    begins = "<doc>"

    def __init__(self, draw: random.Random) -> None:
        self._keys = draw.sample(range(96), 96)
        self._values = draw.sample(range(64), 64)
        self._draw, self._said = draw, 0

    def key(self) -> str:
        return f"<k{self._keys.pop()}>"

    def answer(self) -> str:
        self._said += 1
        return f"<a{self._said % 64}><b{self._values[self._said % 64]}>"

    def fact(self, key: str, answer: str) -> str:
        return f"<is>{key}{answer}"

    def names(self, key: str) -> str:
        return f"<name>{key}"

    def of_the_named(self, answer: str) -> str:
        return f"<it>{answer}"

    def same(self, key: str, other: str) -> str:
        return f"<copy>{key}{other}"

    def question(self, key: str) -> str:
        return f"<q>{key}"

    def asides(self) -> list[str]:
        kinds = [self._draw.randrange(3) for _ in range(2)]
        words = [[self._draw.randrange(8) for _ in range(2)] for _ in kinds]
        return [f"<ex><w{n}.{one}><w{n}.{two}><l{n}>" for n, (one, two) in zip(kinds, words, strict=True)]


class _English:
    """The same for other models."""

    begins = ""

    def __init__(self, draw: random.Random) -> None:
        self._houses = draw.sample(range(100, 1000), 400)
        self._passwords = draw.sample(range(1000, 10000), 400)

    def key(self) -> str:
        return f"house {self._houses.pop()}"

    def answer(self) -> str:
        return str(self._passwords.pop())

    def fact(self, key: str, answer: str) -> str:
        return f"The pass word of {key} is {answer}."

    def names(self, key: str) -> str:
        return f"The next document is about {key}."

    def of_the_named(self, answer: str) -> str:
        return f"The pass word of this house is {answer}."

    def same(self, key: str, other: str) -> str:
        return f"The pass word of {key} is that of {other}."

    def question(self, key: str) -> str:
        return f"What is the pass word of {key}?"

    def asides(self) -> list[str]:
        return []


def load(name: str | None, dtype: str = "auto") -> tuple[Any, Any]:
    """Load a model, onto the GPU if there is one, and its tokenizer.

    Args:
        name: name on the hub, folder, or short name of eval.models. None for SmolLM2-135M-Instruct, or the reference
            model, with a message, if SmolLM2 cannot be downloaded.
        dtype: data type of the weights; "auto" for the model's, or float32 for these two on a CPU, which is faster.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from eval.errors import EvalError
    from eval.models import resolve

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        source = resolve(name or MODEL)
    except EvalError as error:
        if name is not None:
            raise SystemExit(str(error)) from None
        print(f"The reference model takes the place of {MODEL}: {error}")
        source = str(REFERENCE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device == "cpu" and (name is None or Path(source).resolve() == REFERENCE):
        dtype = "float32"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(source)
