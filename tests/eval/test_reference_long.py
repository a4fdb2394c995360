"""The reference model of long context: made from a short one, asked in every way, and knowing what its card says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from eval.reference import train
from eval.reference.batches import draw, losses
from eval.reference.check import BARS, random_tenth
from eval.reference.language import LONG_KINDS, MAX_VALUES, Language
from eval.reference.model import build, grown, sharing, unshared
from eval.reference.needles import NEEDLES
from eval.reference.queries import ContextSession, language_of, load
from eval.reference.recipes import SIZES, Size, Stage

ROOT = Path(__file__).parents[2]
XS, LONG = (ROOT / "eval" / "reference" / name for name in ("xs", "long"))
BEYOND = 4608
"""The longest contexts that it was trained on, in tokens."""


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(XS)


@pytest.fixture(scope="module")
def language():
    return language_of(XS)


@pytest.fixture(scope="module")
def xs():
    return load(XS)


@pytest.fixture
def context(language):
    kinds = dict.fromkeys([kind for kind in LONG_KINDS if kind != "back"], 1.0)
    return language.context(np.random.default_rng(0), 500, 40, kinds)


def flat(context) -> list[int]:
    return [token for document in context.documents for token in document]


def small(heads: int, kv_heads: int, **changes) -> Size:
    stage = Stage(48, LONG_KINDS, (0.9, 1.0), 0.1, least_steps=2, most_steps=3)
    return Size(32, heads, kv_heads, 64, 4, (stage, stage), 192, head_dim=16, final_steps=3, **changes)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 4), (4, 4)])
def test_a_grown_model_computes_the_same(tokenizer, heads, kv_heads):
    torch.manual_seed(0)
    base = build(small(2, 1), tokenizer, range(4))
    size = small(heads, kv_heads, continues=True)
    model = build(size, tokenizer, range(4))
    model.load_state_dict(grown(base, size))
    ids = torch.randint(0, 1000, (2, 40))
    with torch.no_grad():
        assert torch.allclose(base(ids).logits, model(ids).logits, atol=1e-5)
    assert model.config.num_key_value_heads == kv_heads


@pytest.mark.parametrize(
    "size",
    [
        replace(small(2, 1), hidden=64),
        replace(small(2, 1), layers=3),
        replace(small(2, 1), head_dim=32),
        small(3, 2),
        small(1, 1),
    ],
)
def test_what_cannot_be_made_from_a_model_is_refused(tokenizer, size):
    with pytest.raises(ValueError, match=r"goes on with|cannot be made"):
        grown(build(small(2, 1), tokenizer, range(4)), size)


def test_layers_are_shared_as_in_the_model_gone_on_from(tokenizer, xs):
    assert sharing(xs) == [0, 1, 1, 1, 1, 1, 1, 7]
    for first_layers in ([0, 1, 1, 3], [0, 1, 2, 3]):
        assert sharing(unshared(build(small(2, 1), tokenizer, first_layers))) == first_layers


def test_a_deeper_model_is_the_one_before_the_last_again(tokenizer):
    base = build(small(2, 1), tokenizer, [0, 1, 1, 3])
    size = replace(small(4, 2, continues=True), layers=6)
    first_layers = sharing(base, size.layers)
    assert first_layers == [0, 1, 1, 1, 1, 5]
    model = build(size, tokenizer, first_layers)
    model.load_state_dict(grown(base, size))
    assert sharing(model) == first_layers
    with torch.no_grad():
        ids = torch.randint(0, 1000, (1, 20))
        hidden = [variant.model(ids, output_hidden_states=True).hidden_states for variant in (base, model)]
        assert torch.allclose(hidden[0][3], hidden[1][3], atol=1e-5)
        positions = torch.arange(20)[None]
        rotated = base.model.rotary_emb(hidden[1][5], positions)
        last = base.model.layers[3](hidden[1][5], position_embeddings=rotated)
        assert torch.allclose(base.model.norm(last), hidden[1][6], atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes PyTorch 2.9 and later")
def test_going_on_from_a_model_goes_on_where_it_stopped(tokenizer, language, tmp_path):
    torch.manual_seed(0)
    base = build(small(2, 1), tokenizer, [0, 1, 1, 3])
    size = small(2, 2, continues=True, rope_theta=5e4, shares_from=1)
    runs = {}
    for name, minutes in (("whole", 10), ("parts", 0)):
        (tmp_path / name).mkdir()
        while not (run := train.Training(size, language, tokenizer, tmp_path / name, 0, base)).run(minutes):
            assert minutes == 0
        runs[name] = run
    assert runs["whole"].progress.step == runs["parts"].progress.step == 6
    state = runs["parts"].model.state_dict()
    for name, weight in runs["whole"].model.state_dict().items():
        assert torch.equal(weight, state[name]), name
    model = runs["parts"].model
    assert runs["parts"].progress.shared == [0, 1, 1, 3]
    assert model.model.layers[1] is model.model.layers[2]
    assert model.config.rope_parameters["rope_theta"] == 5e4
    assert not torch.equal(state["lm_head.weight"], base.state_dict()["lm_head.weight"])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes PyTorch 2.9 and later")
def test_rates_fall_within_a_stage_and_to_nothing_in_the_last(tokenizer, language, tmp_path):
    stage = replace(small(2, 1).stages[0], least_steps=200, most_steps=200)
    stages = (replace(stage, rates=(1.0, 0.5)), replace(stage, rates=(0.5, 0.25)))
    size = replace(small(2, 1, continues=True), stages=stages, final_steps=100)
    assert [size.rate(0, step) for step in (0, 100, 200)] == pytest.approx([1, 0.75, 0.5])
    assert [size.rate(1, step) for step in (0, 50, 100)] == pytest.approx([0.5, 0.25, 0])
    assert {SIZES["xs"].rate(stage, step) for stage in range(9) for step in (0, 50)} == {1}
    run = train.Training(size, language, tokenizer, tmp_path, 0, build(size, tokenizer, range(4)))
    run.progress.step = run.progress.in_stage = 150  # rates have risen to where they begin, and fall
    run.run(0)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers]
    assert rates == pytest.approx([rate * size.rate(0, 150) for rate in (size.matrix_rate, size.other_rate)])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes PyTorch 2.9 and later")
def test_a_run_that_goes_on_is_asked_for_with_the_model_that_it_goes_on_from(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("word " * 2000)
    command, needs = [*("--text", str(text)), *("--out", str(tmp_path / "run"))], ("--continue-from", str(XS))
    size = train.SIZES["long"]
    stages = (replace(size.stages[0], length=96, questions=8), *size.stages[1:])
    monkeypatch.setitem(train.SIZES, "long", replace(size, stages=stages, tokens_per_step=192))
    app = train.typer.Typer()
    app.command()(train.main)
    for arguments in (("--size", "long"), ("--size", "xs", *needs), ("--size", "longest")):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 2, result.output
    result = CliRunner().invoke(app, [*command, "--size", "long", *needs, "--minutes", "0"])
    assert result.exit_code == 0, result.output
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert checkpoint["progress"]["step"] == 1
    assert len(PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / "tokenizer")) == 1339
    assert not (tmp_path / "run" / "model").exists()


def test_all_values_of_a_key_are_learned_from(tokenizer, language):
    batch = draw(language, np.random.default_rng(0), Stage(256, LONG_KINDS, (0.9, 1.0)), 8)
    firsts = set(tokenizer.convert_tokens_to_ids([f"<a{i}>" for i in range(64)]))
    places = (batch.also >= 0).any(2).nonzero().tolist()
    assert len(places) > 8
    for row, at in places:
        key, extras = batch.ids[row, at - 1].item(), [token for token in batch.also[row, at].tolist() if token >= 0]
        prefix = batch.ids[row, : at - 2].tolist()
        values = [prefix[i + 1] for i, token in enumerate(prefix[:-1]) if token == key and prefix[i + 1] in firsts]
        assert sorted([batch.targets[row, at].item(), *extras]) == sorted(values)
        assert 1 < len(values) == len(set(values)) <= MAX_VALUES
        assert batch.kind[row, at] == LONG_KINDS.index("values")
    few = draw(language, np.random.default_rng(0), Stage(256, LONG_KINDS, (0.9, 1.0), max_values=2), 8)
    assert (batch.also >= 0).sum(2).max() == MAX_VALUES - 1
    assert (few.also >= 0).sum(2).max() == 1


def test_values_are_learned_when_nothing_else_is_likelier(tokenizer, language):
    """The stand-in for a model returns the given logits."""

    class Says(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self, logits: torch.Tensor) -> None:
            super().__init__()
            self.logits = logits

        def model(self, input_ids, use_cache):
            return SimpleNamespace(last_hidden_state=self.logits)

        def lm_head(self, hidden):
            return hidden

    batch = draw(language, np.random.default_rng(0), Stage(256, ("fact", "values"), (0.9, 1.0)), 4)
    logits = torch.full((*batch.ids.shape, 1339), -30.0)
    right = torch.cat([batch.targets.unsqueeze(2), batch.also], dim=2)[:, 1:]
    for row, at in (batch.kind[:, 1:] >= 0).nonzero().tolist():
        logits[row, at, [token for token in right[row, at].tolist() if token >= 0]] = 0.0
    answers, _, shares = losses(Says(logits), batch)
    assert answers.abs() < 1e-3
    assert shares == {"fact": 1.0, "values": 1.0}
    uneven, between = logits.clone(), logits.clone()
    for row, at in (batch.also[:, 1:] >= 0).any(2).nonzero().tolist():
        for model_logits in (uneven, between):
            model_logits[row, at, batch.targets[row, at + 1]] = 2.0  # likelier than the others: all are found
        between[row, at, 0] = 1.0  # what is no value is likelier than some
    assert losses(Says(uneven), batch)[0].abs() < 1e-3
    assert losses(Says(uneven), batch)[2]["values"] == 1.0
    assert losses(Says(between), batch)[0] > 0.01
    assert losses(Says(between), batch)[2]["values"] < 0.6  # second tokens are right
    assert losses(Says(between), batch)[2]["fact"] == 1.0


def test_chains_and_values_are_as_many_as_are_asked_for(tokenizer, language):
    for least, most in ((2, 2), (2, MAX_VALUES), (3, 3), (3, MAX_VALUES)):
        counts = set()
        for seed in range(10):
            kinds = {"fact": 1.0, "values": 1.0, "track": 1.0}
            context = language.context(
                np.random.default_rng(seed), 400, 40, kinds, (0.8, 0.9), min_values=least, max_values=most
            )
            counts |= {question.statements for question in context.questions if question.kind != "fact"}
        assert counts == set(range(least, most + 1))


def test_asking_behind_a_context_is_asking_with_it(xs, context):
    """Greedy answers behind stored KV are those of whole passes."""
    session = ContextSession(xs, context)
    for question in context.questions[:6]:
        ids = [*flat(context), *question.prompt]
        (answer,) = session.answers([question])
        with torch.no_grad():
            logits = xs(torch.tensor([[*ids, *answer]]), use_cache=False).logits[0]
        if question.kind == "values":
            expected = logits[len(ids) - 1].topk(question.statements).indices
        else:
            expected = logits[len(ids) - 1 : -1].argmax(-1)
        assert list(answer) == expected.tolist()
    first, second = [q for q in context.questions if q.kind == "fact"][:2]
    assert session.answers([first, second]) == [first.answer, second.answer]
    hidden = torch.ones(session.tokens, dtype=torch.bool)
    assert session.is_right(first, hidden)
    hidden[flat(context).index(first.answer[0])] = False
    assert not session.is_right(first, hidden)
    attention = session.attention(first.prompt)
    assert [layer.shape for layer in attention] == [(4, 2, session.tokens)] * 8
    assert session.is_right(first)  # nothing of it is left behind


def test_values_are_right_in_any_order_and_others_are_not(context):
    question = next(question for question in context.questions if question.kind == "values")
    firsts = question.answer[::2]
    assert question.is_answer(firsts)
    assert question.is_answer(firsts[::-1])
    assert not question.is_answer(firsts[:-1])
    assert not question.is_answer((*firsts[:-1], question.answer[1]))
    fact = next(question for question in context.questions if question.kind == "fact")
    assert not fact.is_answer(fact.answer[::-1])


def test_a_tenth_of_the_chunks_is_a_tenth():
    visible = random_tenth(165, np.random.default_rng(0))
    assert visible.sum() == 16
    assert visible.view(-1)[visible.nonzero()[0] // 16 * 16 : visible.nonzero()[0] // 16 * 16 + 16].all()


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_what_they_are_called(tokenizer, language, name):
    needle = NEEDLES[name]
    for seed in range(5):
        context, questions = needle.draw(language, np.random.default_rng(seed), 1500)
        words = tokenizer.convert_ids_to_tokens(flat(context))
        assert len(words) == 1500
        assert len(questions) == len({question.prompt for question in questions}) == needle.together
        key = tokenizer.convert_ids_to_tokens([questions[0].prompt[1]])[0]
        statements = words.count("<is>") + words.count("<copy>")
        assert statements == 1 if name == "single" else statements > 50
        if name == "multi-value":
            places = [at for at, word in enumerate(words) if word == "<is>" and words[at + 1] == key]
            assert len(places) == MAX_VALUES
        if name == "tracking":
            copied, links = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "<copy>"}, 0
            while key in copied:
                key, links = copied[key], links + 1
            assert links == MAX_VALUES


def test_yarn_reaches_the_model():
    model = load(XS, 2.0, 640)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    plain = load(XS).model.rotary_emb
    assert not torch.equal(model.model.rotary_emb.inv_freq, plain.inv_freq)
    assert model.model.rotary_emb.attention_scaling != 1


needs_model = pytest.mark.skipif(not (LONG / "model.safetensors").exists(), reason="no model of long context ships yet")


@needs_model
def test_the_shipped_model_answers_at_2048_tokens():
    """This is a quick check; eval/reference/long/check.json has the complete one."""
    language, model = Language(PreTrainedTokenizerFast.from_pretrained(LONG), language_of(LONG).text), load(LONG)
    assert model.config.num_key_value_heads >= 4
    kinds, right = ("fact", "alias", "hop", "shot"), []
    context = language.context(np.random.default_rng([9, 0]), 2048, 40, dict.fromkeys(kinds, 1.0), (0.3, 0.5))
    session = ContextSession(model, context)
    for kind in kinds:
        right += [session.is_right(question) for question in context.questions if question.kind == kind][:3]
    assert len(right) == 12
    assert sum(right) >= 12


@needs_model
def test_what_is_told_of_the_shipped_model_is_whole():
    record = json.loads((LONG / "check.json").read_text())
    figures = {(row["tokens"], row["yarn"]): row for row in record["lengths"]}
    assert {(512, 1.0), (2048, 1.0), (4096, 1.0), (8192, 1.0), (8192, 8192 / BEYOND)} <= figures.keys()
    assert all(figures[tokens, 1.0]["figures"]["full"] >= record["bars"]["full"] for tokens in (512, 2048, 4096))
    assert all(row["figures"].keys() == BARS.keys() for row in figures.values())
    curve = json.loads((LONG / "curve.json").read_text())
    assert curve[-1]["length"] == SIZES["long-chains"].stages[-1].length == BEYOND
    files = [path for path in (ROOT / "eval" / "reference").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= 12e6
