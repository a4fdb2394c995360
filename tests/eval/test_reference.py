"""The reference models: their language can be answered, training goes on where it stopped, the shipped one knows it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from eval.reference.batches import draw
from eval.reference.check import BARS, measure
from eval.reference.language import KINDS, LONG_KINDS, Language, train_tokenizer
from eval.reference.model import lookup_layer, unshared
from eval.reference.recipes import Size, Stage
from eval.reference.train import Training

SHIPPED = Path(__file__).parents[2] / "eval" / "reference" / "xs"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 400


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], vocabulary=320)


@pytest.fixture(scope="module")
def language(tokenizer):
    return Language(tokenizer, np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"]))


def solve(tokenizer: PreTrainedTokenizerFast, context, questions) -> list[str]:
    """Derive the answer to each question from the documents by rules."""
    words = tokenizer.convert_ids_to_tokens([token for document in context.documents for token in document])
    facts, values, name, labels = {}, {}, None, Counter()
    for at, word in enumerate(words):
        if word == "<name>":
            name = words[at + 1]
        elif word in ("<is>", "<it>"):
            key = name if word == "<it>" else words[at + 1]
            begin = at + (1 if word == "<it>" else 2)
            facts[key] = words[begin : begin + 2]
            values.setdefault(key, []).append(facts[key])
        elif word == "<copy>":
            facts[words[at + 1]] = facts[words[at + 2]]
        elif word == "<ex>":
            category = words[at + 1].split(".")[0]
            assert words[at + 2].split(".")[0] == category
            labels[category, words[at + 3]] += 1
    answers, last = [], None
    for question in questions:
        prompt = tokenizer.convert_ids_to_tokens(list(question.prompt))
        if question.kind == "shot":
            (label,) = {label for category, label in labels if category == prompt[1].split(".")[0]}
            answers.append([label])
            continue
        if question.kind == "values":
            assert question.statements == len(values[prompt[1]]) > 1
            answers.append(sorted(values[prompt[1]]))
            continue
        last = last if question.kind == "back" else facts[prompt[1]]
        answers.append(last)
    return answers


@pytest.mark.parametrize(
    ("tokens", "names"), [(48, KINDS), (200, KINDS), (600, KINDS), (200, LONG_KINDS), (3000, LONG_KINDS)]
)
def test_every_question_has_one_answer_that_the_documents_give(tokenizer, language, tokens, names):
    kinds = dict.fromkeys(names, 1.0)
    counts = Counter()
    for seed in range(30):
        context = language.context(np.random.default_rng(seed), tokens, 20, kinds)
        flat = [token for document in context.documents for token in document]
        assert len(flat) == len(context.is_text) == tokens
        assert flat[0] == tokenizer.bos_token_id
        expected = solve(tokenizer, context, context.questions)
        answers = [tokenizer.convert_ids_to_tokens(list(question.answer)) for question in context.questions]
        for number, question in enumerate(context.questions):
            if question.kind == "values":  # in any order
                answers[number] = sorted([answers[number][i : i + 2] for i in range(0, len(answers[number]), 2)])
        assert answers == expected
        counts.update(question.kind for question in context.questions)
        # nothing is asked twice: the second time it could be read off the first
        prompts = [q.prompt for q in context.questions if q.kind not in ("shot", "back")]
        assert len(prompts) == len(set(prompts))
    assert all(counts[kind] > 5 for kind in names)


def test_a_short_text_begins_again(tokenizer, language):
    text = language.text[:50]
    context = Language(tokenizer, text).context(np.random.default_rng(0), 300, 1, {"fact": 1.0}, (0.03, 0.03))
    flat = np.array([token for document in context.documents for token in document])
    assert context.is_text.sum() > 200
    assert np.isin(flat[context.is_text], text).all()


def test_aliases_cross_documents(tokenizer, language):
    pronoun, name, doc = tokenizer.convert_tokens_to_ids(["<it>", "<name>", "<doc>"])
    context = language.context(np.random.default_rng(3), 400, 10, {"alias": 1.0, "fact": 1.0})
    documents = [document for document in context.documents if pronoun in document]
    assert len(documents) > 2
    for document in documents:
        assert document[0] == doc
        assert name not in document[: document.index(pronoun)]  # who is meant stands in the document before


def test_batches_ask_for_what_documents_say(tokenizer, language):
    batch = draw(language, np.random.default_rng(0), Stage(96, KINDS, (0.6, 1.0)), 8)
    answers = batch.kind >= 0
    assert torch.equal(batch.targets[batch.kind != -3], batch.ids[batch.kind != -3])
    assert answers.any(1).all()
    copy = tokenizer.convert_tokens_to_ids("<copy>")
    for row, column in (batch.kind == -3).nonzero().tolist():
        assert batch.ids[row, column - 3] == copy
        tokens_before = batch.ids[row, :column].tolist()
        assert batch.targets[row, column].item() in tokens_before  # it was said before, of the key that is copied


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes PyTorch 2.9 and later")
def test_training_goes_on_where_it_stopped_and_shares_layers_when_it_should(tokenizer, language, tmp_path):
    stage = Stage(48, ("fact",), (0.9, 1.0), 0.1, least_steps=2, most_steps=3)
    size = Size(32, 2, 1, 64, 4, (stage, stage), 192, shares_from=1, final_steps=3)
    uninterrupted = Training(size, language, tokenizer, tmp_path / "whole", 0)
    (tmp_path / "whole").mkdir()
    assert uninterrupted.run(10)
    (tmp_path / "parts").mkdir()
    parts = 0
    while not Training(size, language, tokenizer, tmp_path / "parts", 0).run(0):  # a step, and out of time
        parts += 1
    assert parts == 6
    resumed = Training(size, language, tokenizer, tmp_path / "parts", 0)
    assert resumed.progress.step == uninterrupted.progress.step == 6
    for (name, a), b in zip(uninterrupted.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    layers, first_layers = resumed.model.model.layers, resumed.progress.shared
    assert [layers[number] is layers[first] for number, first in enumerate(first_layers)] == [True] * 4
    assert first_layers[3] == 3  # the last is never shared
    assert len({id(layer) for layer in layers}) == len(set(first_layers))
    alone = unshared(resumed.model)
    assert alone.dtype == torch.bfloat16
    assert len({id(layer) for layer in alone.model.layers}) == 4
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(
            alone.float()(ids).logits, resumed.model.eval().to(torch.bfloat16).float()(ids, use_cache=False).logits
        )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes PyTorch 2.9 and later")
def test_the_layer_that_looks_up_is_copied(tokenizer, language, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.reference.train.lookup_layer", lambda model, language: 1)
    stage = Stage(48, ("fact",), least_steps=1, most_steps=1)
    size = Size(32, 2, 1, 64, 5, (stage, stage), 96, shares_from=1, final_steps=9)
    training = Training(size, language, tokenizer, tmp_path, 0)
    before = training.model.state_dict()
    training.run(0)
    assert training.progress.shared == [0, 1, 1, 1, 4]
    state = training.model.state_dict()
    assert state.keys() == before.keys()
    for name, first in (("model.layers.3.", "model.layers.1."), ("model.layers.4.", "model.layers.4.")):
        for parameter in [key for key in state if key.startswith(name)]:
            assert torch.equal(state[parameter], before[parameter.replace(name, first)])


needs_model = pytest.mark.skipif(not (SHIPPED / "model.safetensors").exists(), reason="no reference model ships yet")


@needs_model
def test_the_shipped_model_is_of_use():
    """This is a quick check; eval/reference/xs/check.json has the complete one."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    text = np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    shares = measure(model, Language(tokenizer, text), 512, 6, seed=5)
    full = shares.share("full")
    assert full >= 93
    assert full - shares.share("random tenth") >= BARS["lost by a random tenth"]
    assert full - shares.share("documents apart") >= BARS["lost by documents apart"]


@needs_model
def test_the_layer_that_looks_up_is_found():
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    text = np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert lookup_layer(model, Language(tokenizer, text)) in range(1, 7)  # these are the same, the others cannot


@needs_model
def test_what_is_told_of_the_shipped_model_is_whole():
    record = json.loads((SHIPPED / "check.json").read_text())
    (figures,) = record["lengths"]
    assert figures["tokens"] == 512
    assert figures["figures"].keys() == record["bars"].keys() == BARS.keys()
    assert figures["contexts"] >= 100
    curve = json.loads((SHIPPED / "curve.json").read_text())
    assert curve[-1]["step"] > curve[0]["step"]
    size = sum(path.stat().st_size for path in SHIPPED.iterdir())
    assert size < 12e6
