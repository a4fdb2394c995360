"""Multiple choice after demonstrations: the few-shot tasks of ContiguousKV (Table 1) and IMPRESS."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item

_QUESTION_TYPES = (" Abbreviation", " Entity", " Description", " Human", " Location", " Number")


def _sst2(row: dict[str, Any]) -> Item:
    return Item(f"{row['sentence'].strip()} It was", (" terrible", " great"), row["label"])


def _subj(row: dict[str, Any]) -> Item:
    return Item(f"{row['text'].strip()} This is", (" objective", " subjective"), row["label"])


def _trec(row: dict[str, Any]) -> Item:
    return Item(f"Question: {row['text'].strip()}\nType:", _QUESTION_TYPES, row["coarse_label"])


def _rte(row: dict[str, Any]) -> Item:
    question = f"{row['sentence1'].strip()}\nIt follows that: {row['sentence2'].strip()}\nTrue or false?"
    return Item(question, (" true", " false"), row["label"])


def _piqa(row: dict[str, Any]) -> Item:
    choices = (f" {row['sol1'].strip()}", f" {row['sol2'].strip()}")
    return Item(f"Goal: {row['goal'].strip()}\nWay:", choices, row["label"])


def _copa(row: dict[str, Any]) -> Item:
    link = {"cause": "because", "effect": "so"}[row["question"]]
    choices = tuple(f" {text[0].lower()}{text[1:]}" for text in (row["choice1"], row["choice2"]))
    return Item(f"{row['premise'].strip().rstrip('.')} {link}", choices, row["label"])


def _openbookqa(row: dict[str, Any]) -> Item:
    choices = tuple(f" {text.strip()}" for text in row["choices"]["text"])
    return Item(f"{row['question_stem'].strip()}", choices, row["choices"]["label"].index(row["answerKey"]))


CHOICES: tuple[FewShot, ...] = (
    FewShot(
        name="sst2",
        about="sentiment of a sentence (GLUE; ContiguousKV Table 1: 100 demonstrations, 3.8k tokens)",
        columns=("sentence", "label"),
        render=_sst2,
        shots=100,
    ),
    FewShot(
        name="subj",
        about="subjective or objective sentence (Pang and Lee 2004; ContiguousKV Table 1: 110 demonstrations, 4.4k "
        "tokens)",
        columns=("text", "label"),
        render=_subj,
        shots=110,
        test="test",
    ),
    FewShot(
        name="trec",
        about="type of a question, six classes (Li and Roth 2002; ContiguousKV Table 1: 120 demonstrations, 5k tokens)",
        columns=("text", "coarse_label"),
        render=_trec,
        shots=120,
        test="test",
    ),
    FewShot(
        name="rte",
        about="textual entailment (GLUE; ContiguousKV Table 1: 80 demonstrations, 6k tokens; IMPRESS)",
        columns=("sentence1", "sentence2", "label"),
        render=_rte,
        shots=80,
    ),
    FewShot(
        name="piqa",
        about="physical common sense, two choices (Bisk et al. 2020; IMPRESS)",
        columns=("goal", "sol1", "sol2", "label"),
        render=_piqa,
        shots=120,
        train="validation",
        by_label=False,
    ),
    FewShot(
        name="copa",
        about="cause or effect of a premise, two choices (SuperGLUE; IMPRESS)",
        columns=("premise", "choice1", "choice2", "question", "label"),
        render=_copa,
        shots=250,
        by_label=False,
    ),
    FewShot(
        name="openbookqa",
        about="elementary science, four choices (Mihaylov et al. 2018; IMPRESS)",
        columns=("question_stem", "choices", "answerKey"),
        render=_openbookqa,
        shots=250,
        test="test",
        by_label=False,
    ),
)
