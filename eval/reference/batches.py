"""Training batches and their losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from .language import LONG_KINDS, MAX_VALUES, Language, Question
from .recipes import Stage

NOTHING, TEXT, COPY = -1, -2, -3


@dataclass
class Batch:
    """Training sequences; tensors are int64 `[rows, length]` unless stated otherwise."""

    ids: torch.Tensor
    targets: torch.Tensor
    """Target at each position: the token itself, but directly after a copy the first token of the copied fact.

    The model does not learn two hops from the answers alone; it does with this target for the first hop.
    """
    kind: torch.Tensor
    """Kind of each target: NOTHING (no loss), TEXT (natural text), COPY (first token of a copied fact), or else the
    index in `LONG_KINDS` of the kind of question that it answers."""
    also: torch.Tensor
    """Other right targets, padded with -1, `[rows, length, MAX_VALUES - 1]`: first tokens of a key's other values."""


def learned_from(question: Question) -> tuple[tuple[int, ...], list[int]]:
    """Return the answer tokens to learn, and alternatives to the first one: the first tokens of other values."""
    if question.kind == "values":
        return question.answer[:2], list(question.answer[2::2])
    return question.answer, []


def draw(language: Language, rng: np.random.Generator, stage: Stage, rows: int) -> Batch:
    """Draw a batch of contexts, each followed by questions, cut to the sequence length."""
    kinds = dict.fromkeys(stage.kinds, 1.0)
    ids = np.zeros((rows, stage.length), np.int64)
    targets, kind = ids.copy(), np.full((rows, stage.length), NOTHING, np.int64)
    also = np.full((rows, stage.length, MAX_VALUES - 1), -1, np.int64)
    for row in range(rows):
        questions = min(stage.questions, stage.length // 8)
        room = stage.length - 4 * questions
        context = language.context(
            rng, room, questions, kinds, stage.density, stage.repeats, stage.min_values, stage.max_values
        )
        flat = [token for document in context.documents for token in document]
        labels = np.where(context.is_text, TEXT, NOTHING).tolist()
        for question in context.questions:
            answer, other_targets = learned_from(question)
            flat += question.prompt
            if len(flat) < stage.length:
                also[row, len(flat), : len(other_targets)] = other_targets
            flat += answer
            labels += [NOTHING] * len(question.prompt) + [LONG_KINDS.index(question.kind)] * len(answer)
        count = min(len(flat), stage.length)
        ids[row, :count], kind[row, :count] = flat[:count], labels[:count]
        targets[row] = ids[row]
        copies = np.flatnonzero(context.meant >= 0)
        targets[row, copies + 1], kind[row, copies + 1] = context.meant[copies], COPY
    return Batch(*map(torch.from_numpy, (ids, targets, kind, also)))


def losses(model: Qwen2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Compute the mean loss on answers and copies, the mean loss on text, and the share of right tokens by kind.

    If several tokens are right, the loss is the mean over them, each against all wrong tokens, so that right tokens do
    not compete. Such a target counts as right if every right token is more likely than all wrong tokens.
    """
    device = model.device
    ids, kind = batch.ids.to(device), batch.kind.to(device)[:, 1:]
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        is_target = kind != NOTHING
        logits = model.lm_head(hidden[is_target])
    targets = torch.cat([batch.targets.unsqueeze(2), batch.also], 2).to(device)[:, 1:][is_target]
    kinds, logits = kind[is_target], logits.float()  # [targets], [targets, vocabulary]
    is_padding, count = targets < 0, (targets >= 0).sum(1)  # [targets, MAX_VALUES], [targets]
    target_ids = torch.where(is_padding, targets[:, :1], targets)  # [targets, MAX_VALUES]
    target_logits, other_logits = logits.gather(1, target_ids), logits.scatter(1, target_ids, -torch.inf)
    against = torch.logaddexp(target_logits, other_logits.logsumexp(1, keepdim=True))
    token_losses = (against - target_logits).masked_fill(is_padding, 0).sum(1) / count
    is_right = (target_logits > other_logits.max(1, keepdim=True).values).all(1)
    shares = {
        name: float(is_right[kinds == i].float().mean()) for i, name in enumerate(LONG_KINDS) if (kinds == i).any()
    }
    return token_losses[kinds != TEXT].mean(), token_losses[kinds == TEXT].mean(), shares
