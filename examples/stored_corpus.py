"""Documents whose KV is stored once, and answers from those that are retrieved: for `retriever.py` and a notebook.

`Reader` is the reusable part: it stores documents as passages, and answers from any of them in any order. With
`Lexical` and `made_corpus`, the example needs no embedding model, no data and no network.
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
    """Answer of a model.

    Args:
        text: Text of the answer.
        ttft: Seconds until its first token.
        tokens: Number of tokens of the prompt.
        stats: Statistics of the cache, if it was a TieredCache.
    """

    text: str
    ttft: float
    tokens: int
    stats: Any = None


class Reader:
    """Model that answers questions from documents, and restores most of the stored documents' KV.

    Args:
        model: Causal LM of transformers.
        tokenizer: Its tokenizer.
        store: `KVStore`, or the path of one.
        method: Method that restores passages; None for `CacheTune()`.
        new_tokens: Maximum number of tokens of an answer.
    """

    def __init__(self, model: Any, tokenizer: Any, store: Any, method: Any = None, new_tokens: int = 32) -> None:
        from hf_tiered_cache.methods import CacheTune

        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.method = CacheTune() if method is None else method
        self.speaks_language = speaks_language(tokenizer)
        self.new_tokens = 2 if self.speaks_language else new_tokens

    def passage(self, text: str) -> Any:
        """Return a document as a passage, with the same text in every prompt, including the border."""
        from hf_tiered_cache import Passage

        return Passage(text if self.speaks_language else f"{text.strip()}\n\n")

    def keep(self, texts: Iterable[str], progress: bool = False) -> Any:
        """Store the KV of documents that are not stored yet."""
        ids = [self.passage(text).ids(self.tokenizer) for text in texts]
        return self.store.precompute(self.model, ids, passages=True, method=self.method, progress=progress)

    def prompt(self, question: str, texts: Sequence[str]) -> Any:
        """Return the documents and the question as a `Prompt`; documents have the tokens that were stored."""
        from hf_tiered_cache import build_prompt

        passages = [self.passage(text) for text in texts]
        if self.speaks_language:
            return build_prompt(self.tokenizer, [*passages, question])
        parts = ["Answer from these documents, in as few words as you can.\n\n", *passages, f"Question: {question}"]
        if self.tokenizer.chat_template:
            return build_prompt(self.tokenizer, parts, chat_template=True)
        return build_prompt(self.tokenizer, [*parts, "\nAnswer:"])

    def answer(self, question: str, texts: Sequence[str], cache: Any = None) -> Answer:
        """Answer a question from documents.

        Args:
            question: Question about the documents.
            texts: Texts of the documents, in the order of the prompt.
            cache: Cache to use instead of a `TieredCache` with the reader's store and method.
        """
        from hf_tiered_cache import TieredCache

        if cache is None:
            cache = TieredCache(self.model, self.store, method=self.method)
        ids = self.prompt(question, texts).input_ids.to(self.model.device)
        out, ttft = generate(self.model, ids, cache, self.new_tokens)
        text = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return Answer(text.strip(), ttft, ids.shape[1], getattr(cache, "stats", None))


def speaks_language(tokenizer: Any) -> bool:
    """Return whether a tokenizer belongs to a reference model, which has a language of its own.

    See `eval.reference.language`.
    """
    return "<is>" in tokenizer.get_vocab()


# --- retrieval


def words_of(text: str) -> list[str]:
    """Return words and numbers, and the reference models' words such as `<k7>`."""
    return re.findall(r"<\w[\w.]*>|\w+", text.lower())


class Lexical:
    """Index that finds documents by the words that they share with a question (Okapi BM25).

    The best document may refer to others. Therefore, the rarest words that it shares with other documents are also
    searched for, and the document after it is included.

    Args:
        texts: Texts of the documents, in their order.
        k1: Saturation of repeated words.
        b: Penalty of long documents.
    """

    _LEADS = 4

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self._words = [Counter(words_of(text)) for text in texts]
        lengths = np.array([sum(words.values()) for words in self._words])
        self._damping = k1 * (1 - b + b * lengths / lengths.mean())  # [documents]
        self._k1, document_counts = k1, Counter(word for words in self._words for word in words)
        self._documents_with = dict(document_counts)
        self._rarity = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in document_counts.items()}

    def scores(self, words: Iterable[str]) -> np.ndarray:
        """Return the score of each document, float `[documents]`."""
        total = np.zeros(len(self._words))
        for word in set(words) & self._rarity.keys():
            count = np.array([words[word] for words in self._words])
            total += self._rarity[word] * count * (self._k1 + 1) / (count + self._damping)
        return total

    def best(self, question: str, k: int) -> list[int]:
        """Return the numbers of the `k` best documents, in the order of the documents."""
        scores = self.scores(words_of(question))
        if scores.max() > 0:
            first = int(scores.argmax())
            shared_words = [word for word in self._words[first] if self._documents_with[word] > 1]
            leads = sorted(shared_words, key=lambda word: (-self._rarity[word], word))[: self._LEADS]
            scores = scores + 0.5 * self.scores(leads)
            if first + 1 < len(scores):
                scores[first + 1] = max(scores[first + 1], scores[first])
        return sorted(np.argsort(-scores, kind="stable")[:k].tolist())


# --- documents, and questions whose answers are known


class Question(NamedTuple):
    """Question, its answer, the numbers of the documents that it needs, and its kind."""

    question: str
    answer: str
    needs: tuple[int, ...]
    kind: str


def made_corpus(language: bool, documents: int = 100, words: int = 16) -> tuple[list[str], list[Question]]:
    """Create documents of a book's words with statements among them, and questions about the statements.

    - fact: One document contains the fact.
    - alias: One document names the subject of the next one.
    - two hops: A later document refers to a fact in an earlier one.

    In the reference models' language, each document has two more statements, which no question is about.

    Args:
        language: Whether to use the reference models' language instead of English.
        documents: Number of documents.
        words: Number of the book's words in each document.
    """
    draw = random.Random(0)
    pairs = documents * 18 // 100
    units = [("fact",)] * (documents - 4 * pairs) + [("alias",)] * pairs + [("two hops", i) for i in range(pairs)] * 2
    draw.shuffle(units)
    say = _Language(draw) if language else _English(draw)
    book = BOOK.read_text(encoding="utf-8").split()
    texts, questions, open_facts = list[str](), list[Question](), dict[Any, tuple[int, str, str]]()

    def write(statement: str, at: int, **names: str) -> int:
        start = len(texts) * words
        text = [book[i % len(book)] for i in range(start, start + words)]
        text.insert(at, statement.format(**names))
        for aside in say.asides():
            text.insert(draw.randrange(1, words), aside)
        texts.append(say.begins + " ".join(text))
        return len(texts) - 1

    for kind, *index in units:
        key, answer, needs = say.key(), say.answer(), tuple[int, ...]()
        at = draw.randrange(words // 4, words)
        if kind == "fact":
            needs = (write(say.fact, at, key=key, answer=answer),)
        elif kind == "alias":
            needs = write(say.names, words, key=key), write(say.of_the_named, words // 4, answer=answer)
        elif index[0] in open_facts:
            first, first_key, answer = open_facts[index[0]]
            needs = first, write(say.same, at, key=key, other=first_key)
        else:
            open_facts[index[0]] = write(say.fact, at, key=key, answer=answer), key, answer
        if needs:
            questions.append(Question(say.question.format(key=key), answer, needs, kind))
    return texts, questions


class _Language:
    """Statements and questions in the language of the reference models."""

    begins, fact, same = "<doc>", "<is>{key}{answer}", "<copy>{key}{other}"
    names, of_the_named, question = "<name>{key}", "<it>{answer}", "<q>{key}"

    def __init__(self, draw: random.Random) -> None:
        self._keys = draw.sample(range(96), 96)
        self._values = draw.sample(range(64), 64)
        self._draw, self._said = draw, 0

    def key(self) -> str:
        return f"<k{self._keys.pop()}>"

    def answer(self) -> str:
        self._said += 1
        return f"<a{self._said % 64}><b{self._values[self._said % 64]}>"

    def asides(self) -> list[str]:
        kinds = [self._draw.randrange(3) for _ in range(2)]
        words = [[self._draw.randrange(8) for _ in range(2)] for _ in kinds]
        return [f"<ex><w{n}.{first}><w{n}.{second}><l{n}>" for n, (first, second) in zip(kinds, words, strict=True)]


class _English:
    """Statements and questions in English."""

    begins, fact, same = "", "The pass word of {key} is {answer}.", "The pass word of {key} is that of {other}."
    names, of_the_named = "The next document is about {key}.", "The pass word of this house is {answer}."
    question = "What is the pass word of {key}?"

    def __init__(self, draw: random.Random) -> None:
        self._houses = draw.sample(range(100, 1000), 400)
        self._passwords = draw.sample(range(1000, 10000), 400)

    def key(self) -> str:
        return f"house {self._houses.pop()}"

    def answer(self) -> str:
        return str(self._passwords.pop())

    def asides(self) -> list[str]:
        return []


def load(name: str | None, dtype: str = "auto") -> tuple[Any, Any]:
    """Load a model, onto the GPU if there is one, and its tokenizer.

    Args:
        name: Name on the hub, folder, or short name of eval.models. None for SmolLM2-135M-Instruct, or the reference
            model, with a message, if SmolLM2 cannot be downloaded.
        dtype: Data type of the weights; "auto" for the model's, or float32 for these two on a CPU, which is faster.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from eval.errors import EvalError
    from eval.models import resolve
    from hf_tiered_cache.integrations.hub import loading

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
    with loading(source, OSError, ValueError, AttributeError):  # the last two: no model, or no data type
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(source)
