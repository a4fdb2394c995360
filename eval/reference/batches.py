"""What a step of training learns from, and how right the model was about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from .language import LONG_KINDS, MOST, Language, Question
from .recipes import Stage

NOTHING, TEXT, COPY = -1, -2, -3


@dataclass
class Batch:
    """Sequences to learn from; all int64 `[rows, length]`."""

    ids: torch.Tensor
    targets: torch.Tensor
    """What to predict in each token's place: itself, but behind a copy what it stands for. Two hops that are asked for
    by the answer alone are not learned; with the first one asked for too, they are."""
    kind: torch.Tensor
    """Of targets: NOTHING to learn, natural TEXT, what a COPY stands for, else they are of an answer to the kind of
    question of that number in `LONG_KINDS`."""
    also: torch.Tensor
    """`[rows, length, MOST - 1]`: what is as right as the target, the other values of a key; else -1."""


def learned_from(question: Question) -> tuple[tuple[int, ...], list[int]]:
    """The tokens of an answer, and what is as right as the first: the first tokens of other values."""
    if question.kind == "values":
        return question.answer[:2], list(question.answer[2::2])
    return question.answer, []


def draw(language: Language, rng: np.random.Generator, stage: Stage, rows: int) -> Batch:
    """Contexts with as many questions as fill the sequence."""
    kinds = dict.fromkeys(stage.kinds, 1.0)
    ids = np.zeros((rows, stage.length), np.int64)
    targets, kind = ids.copy(), np.full((rows, stage.length), NOTHING, np.int64)
    also = np.full((rows, stage.length, MOST - 1), -1, np.int64)
    for row in range(rows):
        questions = min(stage.questions, stage.length // 8)
        room = stage.length - 4 * questions
        context = language.context(rng, room, questions, kinds, stage.density, stage.repeats, stage.least, stage.most)
        flat = [token for document in context.documents for token in document]
        labels = np.where(context.is_text, TEXT, NOTHING).tolist()
        for question in context.questions:
            answer, others = learned_from(question)
            flat += question.prompt
            if len(flat) < stage.length:
                also[row, len(flat), : len(others)] = others
            flat += answer
            labels += [NOTHING] * len(question.prompt) + [LONG_KINDS.index(question.kind)] * len(answer)
        count = min(len(flat), stage.length)
        ids[row, :count], kind[row, :count] = flat[:count], labels[:count]
        targets[row] = ids[row]
        copies = np.flatnonzero(context.meant >= 0)
        targets[row, copies + 1], kind[row, copies + 1] = context.meant[copies], COPY
    return Batch(*map(torch.from_numpy, (ids, targets, kind, also)))


def losses(model: Qwen2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Mean loss on answers, mean loss on text, and the share of right answer tokens of each kind.

    Where several are to be said, the mean loss of each against what is none of them, so that one may be likelier than
    another; and the share in which nothing else is likelier than they are.
    """
    device = model.device
    ids, kind = batch.ids.to(device), batch.kind.to(device)[:, 1:]
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = kind != NOTHING
        logits = model.lm_head(hidden[wanted])
    targets, kinds = torch.cat([batch.targets.unsqueeze(2), batch.also], 2).to(device)[:, 1:][wanted], kind[wanted]
    missing, count = targets < 0, (targets >= 0).sum(1)  # [wanted, MOST], [wanted]
    logits, at = logits.float(), torch.where(missing, targets[:, :1], targets)  # [wanted, vocabulary], [wanted, MOST]
    chosen, others = logits.gather(1, at), logits.scatter(1, at, -torch.inf)
    against = torch.logaddexp(chosen, others.logsumexp(1, keepdim=True))
    each = (against - chosen).masked_fill(missing, 0).sum(1) / count
    right = (chosen > others.max(1, keepdim=True).values).all(1)
    shares = {name: float(right[kinds == i].float().mean()) for i, name in enumerate(LONG_KINDS) if (kinds == i).any()}
    return each[kinds != TEXT].mean(), each[kinds == TEXT].mean(), shares
