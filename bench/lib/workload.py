"""Workloads of the benchmarks: prefixes that many prompts share, with new suffixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

REFERENCE = Path(__file__).resolve().parents[2] / "eval" / "reference"
"""Folder of the reference models."""
CONTEXT = 512
"""Context length of the reference model, which includes prefix and question."""


class Prompts(Protocol):
    """Source of prompts."""

    about: str
    """Sentence for the page of results."""
    prefixes: list[torch.Tensor]
    """Prefixes of the same length, int64 `[tokens]` each."""

    def suffix(self, prefix: int, random: np.random.Generator) -> np.ndarray:
        """Return another suffix for a prefix, int64 `[tokens]`."""
        ...


class RandomTokens:
    """Random tokens, for models with random weights.

    Args:
        vocabulary: Vocabulary size; token 0 is padding, and not used.
        count: Number of prefixes.
        tokens: Number of tokens in each prefix.
        suffix: Number of tokens in a suffix.
    """

    about = "Weights and tokens are random, so selections have no meaning."

    def __init__(self, vocabulary: int, count: int, tokens: int, suffix: int) -> None:
        self._vocabulary, self._suffix = vocabulary, suffix
        generator = torch.Generator().manual_seed(0)
        self.prefixes = list(torch.randint(1, vocabulary, (count, tokens), generator=generator))

    def suffix(self, prefix: int, random: np.random.Generator) -> np.ndarray:
        return random.integers(1, self._vocabulary, self._suffix)


class ReferenceLanguage:
    """Documents in the language of the reference models, with questions about them as suffixes.

    Args:
        model: Folder of a reference model, for its tokenizer.
        count: Number of prefixes.
        tokens: Number of tokens in each prefix.
    """

    about = "A trained model. Prefixes are documents in its language, and each suffix is a question about them."

    def __init__(self, model: Path, count: int, tokens: int) -> None:
        # imported here: machines that only measure random weights lack the packages of eval/
        from transformers import AutoTokenizer

        from eval.data import Data
        from eval.reference.language import KINDS, Language
        from eval.tasks.ruler.haystack import sentences

        tokenizer = AutoTokenizer.from_pretrained(model)
        text = np.array(tokenizer(" ".join(sentences(Data(None))), add_special_tokens=False)["input_ids"])
        language, kinds = Language(tokenizer, text), dict.fromkeys([kind for kind in KINDS if kind != "back"], 1.0)
        contexts = [
            language.context(np.random.default_rng([0, number]), tokens, 40, kinds, density=(0.3, 0.5))
            for number in range(count)
        ]
        self.prefixes = [torch.tensor([token for part in context.documents for token in part]) for context in contexts]
        self._questions = [[question.prompt for question in context.questions] for context in contexts]

    def suffix(self, prefix: int, random: np.random.Generator) -> np.ndarray:
        questions = self._questions[prefix]
        return np.array(questions[random.integers(len(questions))])


class RunningText:
    """Sections of the book that ships with the project, for pretrained models.

    Args:
        model: Folder of a pretrained model, for its tokenizer.
        count: Number of prefixes; they overlap if the book is too short for all.
        tokens: Number of tokens of each prefix.
        suffix: Number of tokens of a suffix.
    """

    about = "A pretrained model. Texts are runs of a book."

    def __init__(self, model: Path, count: int, tokens: int, suffix: int) -> None:
        from transformers import AutoTokenizer

        from eval.data import Data
        from eval.tasks.ruler.haystack import sentences

        tokenizer, text = AutoTokenizer.from_pretrained(model), " ".join(sentences(Data(None)))
        self._text = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        self._tokens = suffix
        starts = np.linspace(0, len(self._text) - tokens, count).astype(int)
        self.prefixes = [torch.tensor(self._text[begin : begin + tokens]) for begin in starts]

    def suffix(self, prefix: int, random: np.random.Generator) -> np.ndarray:
        begin = random.integers(len(self._text) - self._tokens)
        return self._text[begin : begin + self._tokens]


def requests(prompts: Prompts, count: int, seed: int = 1) -> Iterator[torch.Tensor]:
    """Yield prompts, int64 `[1, tokens]`: each prefix once, then prefixes from a normal distribution."""
    random, prefixes = np.random.default_rng(seed), len(prompts.prefixes)
    for turn in range(count):
        number = int(np.clip(round(random.normal((prefixes - 1) / 2, prefixes / 5)), 0, prefixes - 1))
        number = turn if turn < prefixes else number
        suffix = torch.from_numpy(prompts.suffix(number, random))
        yield torch.cat([prompts.prefixes[number], suffix]).unsqueeze(0)


@dataclass(frozen=True)
class Turn:
    """Turn of a conversation.

    Args:
        conversation: Number of the conversation.
        at: Seconds since the begin of the trace.
        history: Number of tokens before the new ones.
        stop: End of the new tokens.
        end: End of the answer.
    """

    conversation: int
    at: float
    history: int
    stop: int
    end: int


def turns_of(conversations: int, turns: int, lengths: tuple[int, int, int], think: float, seed: int) -> list[Turn]:
    """Return the turns of several conversations in the order of their times.

    Args:
        conversations: Number of conversations, which begin within one think time.
        turns: Number of turns per conversation.
        lengths: Tokens of the first prompt, of each later one, and of an answer; drawn with up to 25 % deviation.
        think: Mean seconds between two turns of a conversation.
        seed: Random seed.
    """
    random, trace = np.random.default_rng(seed), []

    def draw_length(tokens: int) -> int:
        return int(random.integers(max(1, tokens * 3 // 4), tokens * 5 // 4 + 1))

    opening, new, answer = lengths
    for number in range(conversations):
        at, end = float(random.uniform(0, think)), 0
        for turn in range(turns):
            history, stop = end, end + draw_length(new if turn else opening)
            end = stop + draw_length(answer)
            trace.append(Turn(number, at, history, stop, end))
            at += float(random.exponential(think))
    return sorted(trace, key=lambda turn: turn.at)
