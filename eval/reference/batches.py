"""What a step of training learns from, and how right the model was about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from .language import LONG_KINDS, Language, Question
from .recipes import Stage

NOTHING, TEXT, COPY, ANY_OF = -1, -2, -3, -4


@dataclass
class Batch:
    """Sequences to learn from; all int64 `[rows, length]`."""

    ids: torch.Tensor
    targets: torch.Tensor
    """What to predict in each token's place: itself, but behind a copy what it stands for. Two hops that are asked for
    by the answer alone are not learned; with the first one asked for too, they are."""
    kind: torch.Tensor
    """Of targets: NOTHING to learn, natural TEXT, what a COPY stands for, ANY_OF several values (learned, but not
    counted), else they are of an answer to the kind of question of that number in `LONG_KINDS`."""


def learned_from(question: Question) -> tuple[tuple[int, ...], list[int]]:
    """The tokens of an answer, and their kinds."""
    number = LONG_KINDS.index(question.kind)
    if question.kind == "values":  # the first of some in no order
        return question.answer[:2], [ANY_OF, number]
    return question.answer, [number] * len(question.answer)


def draw(language: Language, rng: np.random.Generator, stage: Stage, rows: int) -> Batch:
    """Contexts with as many questions as fill the sequence."""
    kinds = dict.fromkeys(stage.kinds, 1.0)
    ids = np.zeros((rows, stage.length), np.int64)
    targets, kind = ids.copy(), np.full((rows, stage.length), NOTHING, np.int64)
    for row in range(rows):
        questions = min(stage.questions, stage.length // 8)
        context = language.context(rng, stage.length - 4 * questions, questions, kinds, stage.density, stage.repeats)
        flat = [token for document in context.documents for token in document]
        labels = np.where(context.is_text, TEXT, NOTHING).tolist()
        for question in context.questions:
            answer, kinds_of_answer = learned_from(question)
            flat += [*question.prompt, *answer]
            labels += [NOTHING] * len(question.prompt) + kinds_of_answer
        count = min(len(flat), stage.length)
        ids[row, :count], kind[row, :count] = flat[:count], labels[:count]
        targets[row] = ids[row]
        copies = np.flatnonzero(context.meant >= 0)
        targets[row, copies + 1], kind[row, copies + 1] = context.meant[copies], COPY
    return Batch(*map(torch.from_numpy, (ids, targets, kind)))


def losses(model: Qwen2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Mean loss on answers, mean loss on text, and the share of right answer tokens of each kind."""
    device = model.device
    ids, kind = batch.ids.to(device), batch.kind.to(device)[:, 1:]
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = kind != NOTHING
        logits = model.lm_head(hidden[wanted])
    targets, kinds = batch.targets.to(device)[:, 1:][wanted], kind[wanted]
    each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    right = logits.argmax(-1) == targets
    shares = {name: float(right[kinds == i].float().mean()) for i, name in enumerate(LONG_KINDS) if (kinds == i).any()}
    return each[kinds != TEXT].mean(), each[kinds == TEXT].mean(), shares
