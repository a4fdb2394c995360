"""Queries to a reference model: the context is prefilled once, and answers are decoded after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from ..data import Data
from ..tasks.ruler.haystack import sentences
from .language import Context, Language, Question


def load(folder: Path, yarn: float = 1.0, trained: int = 0) -> PreTrainedModel:
    """Load a model in float32, optionally with YaRN (Peng et al. 2023, implementation of transformers).

    Args:
        folder: Folder of the model.
        yarn: Factor by which YaRN extends the context; 1 for none.
        trained: Context length in tokens that the model was trained on; used with YaRN only.
    """
    config = AutoConfig.from_pretrained(folder)
    if yarn != 1:
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": config.rope_parameters["rope_theta"],
            "factor": yarn,
            "original_max_position_embeddings": trained,
        }
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def language_of(folder: Path) -> Language:
    """Return the language with the tokenizer of a model and the text that ships with the project."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer(" ".join(sentences(Data(None))), add_special_tokens=False)["input_ids"]
    return Language(tokenizer, np.array(text))


class ContextSession:
    """Context that is prefilled into the cache of a model.

    Args:
        model: Model to query.
        context: Context to prefill.
        mask: Attention mask, bool `[tokens, tokens]`; None for causal attention.
    """

    def __init__(self, model: PreTrainedModel, context: Context, mask: torch.Tensor | None = None) -> None:
        ids = [token for document in context.documents for token in document]
        self.model, self.tokens = model, len(ids)
        self._cache = DynamicCache(config=model.config)
        self._pass(ids, None if mask is None else mask[None, None])

    def answers(self, questions: Sequence[Question], visible: torch.Tensor | None = None) -> list[tuple[int, ...]]:
        """Ask questions one after another and return the answers, each as long as the right answer.

        Answers are decoded greedily. The answer to a `values` question is the set of most likely first tokens, as many
        as there are values.

        Args:
            questions: Questions in order; later ones attend to earlier questions and answers.
            visible: bool `[self.tokens]`, context tokens that questions and answers attend to; None for all.
        """
        decoded_answers, last = list[tuple[int, ...]](), list[int]()
        for question in questions:
            num_values = question.statements if question.kind == "values" else 1
            answer_length = num_values if question.kind == "values" else len(question.answer)
            decoded, last = list[int](), [*last, *question.prompt]
            while len(decoded) < answer_length:
                logits = self._pass(last, self._mask(len(last), visible)).logits[0, -1]
                decoded += logits.topk(num_values).indices.tolist()
                last = decoded[-1:]
            decoded_answers.append(tuple(decoded))
        self.forget()
        return decoded_answers

    def is_right(self, question: Question, visible: torch.Tensor | None = None) -> bool:
        """Return whether the question, asked alone, is answered correctly."""
        return question.is_answer(self.answers([question], visible)[0])

    def attention(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Return how `ids` after the context attend to the context, per layer `[heads, len(ids), self.tokens]`."""
        self.model.set_attn_implementation("eager")  # this implementation returns attention weights
        weights = self._pass(ids, None, output_attentions=True).attentions
        self.model.set_attn_implementation("sdpa")
        self.forget()
        return [layer[0, :, :, : self.tokens] for layer in weights]

    def forget(self) -> None:
        """Remove the tokens after the context from the cache."""
        self._cache.crop(self.tokens - self._cache.get_seq_length())

    def _mask(self, num_new: int, visible: torch.Tensor | None) -> torch.Tensor | None:
        if visible is None:
            return None
        num_cached = self._cache.get_seq_length()
        mask = torch.ones(num_new, num_cached + num_new, dtype=torch.bool).tril(num_cached)
        mask[:, : self.tokens] = visible
        return mask[None, None]

    @torch.no_grad()
    def _pass(self, ids: Sequence[int], mask: torch.Tensor | None, **options: bool) -> Any:
        return self.model(
            input_ids=torch.tensor([list(ids)]),
            attention_mask=mask,
            past_key_values=self._cache,
            logits_to_keep=1,
            **options,
        )
