"""Data of the evaluation sets' schemas, made up, and a model that can read it."""

from __future__ import annotations

import gzip
import json

import pytest
from extras import pytest_pycollect_makemodule  # noqa: F401  # a hook
from families import build

WORDS = ["time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child", "eye"]
WORDS += ["woman", "place", "work", "week", "case", "point"]


def text(number: int, words: int = 12) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(words)).capitalize() + "."


ROWS = {
    "sst2": lambda i: {"sentence": text(i), "label": i % 2},
    "subj": lambda i: {"text": text(i), "label": i % 2},
    "trec": lambda i: {"text": text(i), "coarse_label": i % 6},
    "rte": lambda i: {"sentence1": text(i), "sentence2": text(i + 1), "label": i % 2},
    "piqa": lambda i: {"goal": text(i), "sol1": text(i + 1), "sol2": text(i + 2), "label": i % 2},
    "copa": lambda i: {
        "premise": text(i),
        "choice1": text(i + 1),
        "choice2": text(i + 2),
        "question": ("cause", "effect")[i % 2],
        "label": i % 2,
    },
    "openbookqa": lambda i: {
        "question_stem": text(i),
        "choices": {"text": [text(i + j, 3) for j in range(4)], "label": list("ABCD")},
        "answerKey": "ABCD"[i % 4],
    },
    "samsum": lambda i: {"dialogue": f"A: {text(i)}\r\nB: {text(i + 1)}", "summary": text(i, 5)},
    "musique": lambda i: {
        "paragraphs": [{"title": f"T{j}", "paragraph_text": text(i + j)} for j in range(4)],
        "question": text(i, 4),
        "answer": WORDS[i % 5],
        "answer_aliases": [WORDS[i % 7]],
        "ctxs": [{"title": "", "text": text(i + j)} for j in range(3)],
        "answers": [WORDS[i % 5]],
    },
    "2wikimultihopqa": lambda i: {
        "docs": [{"title": f"T{j}", "text": text(i + j)} for j in range(4)],
        "question": text(i, 4),
        "answer": WORDS[i % 5],
    },
    "hotpotqa": lambda i: {
        "question": text(i, 4),
        "answer": WORDS[i % 5],
        "context": {"title": [f"T{i}.{j}" for j in range(3)], "sentences": [[text(i + j)] for j in range(3)]},
        "supporting_facts": {"title": [f"T{i}.0"], "sent_id": [0]},
    },
    "squad_v2": lambda i: {"question": text(i, 4), "context": text(i, 20), "answers": {"text": [WORDS[i % 5]] * 2}},
    "sharegpt": lambda i: {
        "conversations": [{"from": ("human", "gpt")[j % 2], "value": text(i + j)} for j in range(4 + i % 3)]
    },
    "longbench": lambda i: {
        "input": text(i, 4),
        "context": "Passage 1:\n" + text(i, 200) + "\nPassage 2:\n" + text(i + 1, 200),
        "answers": ["Paragraph 3"],
        "all_classes": ["Paragraph 3", "Paragraph 4"],
        "_id": f"id-{i}",
    },
}
_SPLITS = {
    "2wikimultihopqa": ("validation_lciteeval",),
    "musique": ("validation", "validation_cacheblend"),
    "longbench": ("qasper", "multi_news", "passage_retrieval_en", "trec", "lcc"),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Create twenty rows of every split of every set."""
    root = tmp_path_factory.mktemp("data")
    for name, row in ROWS.items():
        for split in _SPLITS.get(name, ("train", "validation", "test")):
            path = root / name / f"{split}.jsonl.gz"
            path.parent.mkdir(exist_ok=True)
            with gzip.open(path, "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row(i)) + "\n" for i in range(20))
    return root


@pytest.fixture(scope="session")
def tokenizer():
    from eval.data import Data
    from eval.reference.language import train_tokenizer
    from eval.tasks.ruler.haystack import sentences

    return train_tokenizer(sentences(Data(None)), 512)


@pytest.fixture(scope="session")
def saved(tmp_path_factory, tokenizer):
    """Save a tiny Llama with random weights and its tokenizer in a folder."""
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = build("llama", vocab_size=len(tokenizer), num_hidden_layers=3, max_position_embeddings=768, **ids)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def loaded_once(monkeypatch):
    """Let lm_eval load each data set once for all models."""
    import datasets

    results = {}

    def load(*arguments, real=datasets.load_dataset, **options):
        key = repr((arguments, sorted(options.items())))
        if key not in results:
            results[key] = real(*arguments, **options)
        return results[key]

    monkeypatch.setattr(datasets, "load_dataset", load)
