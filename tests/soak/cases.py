"""Prompts, and what a DynamicCache answers to them, computed beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from families import FAMILIES, build, prompt
from transformers import DynamicCache, PreTrainedModel

ANSWER = 6
GREEDY = {"do_sample": False, "max_new_tokens": ANSWER, "output_logits": True, "return_dict_in_generate": True}
DOCUMENTS = (70, 100, 150, 230)
QUESTIONS = 3
TOLERANCE = 1e-4
"""By how much logits may differ, as a share of the largest: passes of other lengths add in another order."""
_MARGIN = 20 * TOLERANCE
"""By how much the greedy token must lead, so that such a difference does not change it."""
_DISCRETE = {"qwen3_moe", "deepseek_v3"}  # the choice of experts jumps, whatever the margin


@dataclass(frozen=True)
class Turn:
    """A prompt, int64 `[1, n]`, its answer with the prompt in front, and the first logits, `[1, vocabulary]`."""

    ids: torch.Tensor
    sequence: torch.Tensor
    logits: torch.Tensor

    def differs(self, out: Any) -> str:
        """Describe the error of an answer of `generate(**GREEDY)`, or return ""."""
        if not torch.equal(out.sequences, self.sequence):
            return f"tokens {out.sequences[0, self.ids.shape[1] :].tolist()}, not {self.answer.tolist()}"
        return self.logits_differ(out)

    def logits_differ(self, out: Any) -> str:
        """Return what is wrong with the first logits of an answer, or ""."""
        off = float((out.logits[0] - self.logits).abs().max() / self.logits.abs().max())
        return "" if off <= TOLERANCE else f"the first logits are off by {off:.2g}"

    @property
    def answer(self) -> torch.Tensor:
        return self.sequence[0, self.ids.shape[1] :]


@dataclass(frozen=True)
class Case:
    """A conversation of two turns with one of the models."""

    family: str
    turns: tuple[Turn, Turn]


def families(count: int, choice: Any) -> list[str]:
    """Return Llama, and `count - 1` others drawn by `choice`, a `random.Random`."""
    return ["llama", *choice.sample(sorted(FAMILIES.keys() - _DISCRETE - {"llama"}), count - 1)]


def model_of(family: str) -> PreTrainedModel:
    """Build a model with large weights, so that attention determines its logits."""
    return build(family, initializer_range=0.2, init_std=0.2)


@torch.no_grad()
def make_cases(family: str) -> list[Case]:
    """Make conversations that share documents; those with nearly tied answers are left out."""
    model, cases = model_of(family), []
    for number, length in enumerate(DOCUMENTS):
        document, count, seed = prompt(length, seed=number), 0, 100 * number
        while count < QUESTIONS:
            seed += 1
            first = _turn(model, torch.cat([document, prompt(7 + seed % 23, seed=seed)], dim=1))
            second = first and _turn(model, torch.cat([first.sequence, prompt(19, seed=seed + 50)], dim=1))
            if second:
                cases.append(Case(family, (first, second)))
                count += 1
    return cases


def _turn(model: PreTrainedModel, ids: torch.Tensor) -> Turn | None:
    turn, decided = answer_of(model, ids)
    return turn if decided else None


def answer_of(model: PreTrainedModel, ids: torch.Tensor) -> tuple[Turn, bool]:
    """Return what a model answers without a store, and whether other rounding would not change the tokens."""
    out = model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY)
    decided = True
    for logits in out.logits:
        best, second = logits[0].topk(2).values.tolist()
        decided &= best - second >= _MARGIN * float(logits.abs().max())
    return Turn(ids, out.sequences, out.logits[0]), decided
