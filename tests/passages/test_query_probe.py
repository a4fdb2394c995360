"""Passages of which the question says what is computed: what it attends to, what moved, and fewer tokens with depth."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from families import build_deep as build
from reference import Remembering
from test_passages import BOS, PASSAGES, PLACES, PROMPT, QUESTION, ask, blend, fill, join, tune
from test_rankings import scores_in
from thorough import some

from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.passages.recompute import ProbeAttentionSum
from hf_tiered_cache.patches.scope import AttentionCall

COLUMNS = PROMPT.shape[1]
HOLDS = {n: np.arange(at, at + len(PASSAGES[n])) for n, at in PLACES.items()}
"""The columns of each passage in the prompt."""
LAYERS, NARROW_AT = 6, 2


class Noting(CacheTune):
    """Selector that records its selections."""

    def __init__(self, *settings, **options):
        super().__init__(*settings, **({"lead": 1} | options))

    def positions_to_compute(self, context):
        positions = super().positions_to_compute(context)
        self.__dict__.update(first=positions[0])
        return positions

    def narrow(self, plan, columns, deviation, attention):
        chosen_columns = super().narrow(plan, columns, deviation, attention)
        self.__dict__.update(chosen=chosen_columns, attention=attention)
        return chosen_columns

    def with_calibrated_ratio(self, ratio):
        return self


class Replacing(Remembering):
    """DynamicCache with stored KV in the columns that layers do not compute."""

    def __init__(self, model, kv, without):
        super().__init__(model)
        self.kv, self.without = kv, without  # without: of each layer, bool [rows, columns]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if key_states.shape[2] > 1:
            is_stored = torch.from_numpy(self.without[layer_idx])[:, None, :, None]
            key_states = torch.where(is_stored, self.kv[layer_idx][0], key_states)
            value_states = torch.where(is_stored, self.kv[layer_idx][1], value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def stored_kv(model, places, columns):
    """Return each layer's KV of a prompt's passages, computed alone after the sink; zero elsewhere."""
    kv = None
    for at, tokens in places:
        cache, positions = Remembering(model), torch.arange(at - 1, at + len(tokens)).unsqueeze(0)
        model(input_ids=join(BOS, tokens), position_ids=positions, past_key_values=cache, use_cache=True)
        passage_kv = cache.all()
        if kv is None:
            kv = [[t.new_zeros(*t.shape[:2], columns, t.shape[3]) for t in layer] for layer in passage_kv]
        for stored_layer, layer in zip(kv, passage_kv, strict=True):
            for to, tensor in zip(stored_layer, layer, strict=True):
                to[:, :, at : at + len(tokens)] = tensor[:, :, 1:]
    return [tuple(layer) for layer in kv]


def reusable():
    mask = np.zeros(COLUMNS, bool)
    for columns in HOLDS.values():
        mask[columns] = True
    return mask


def without(computed_columns):
    """Return the passages' columns that are not computed, bool `[1, columns]`."""
    mask = reusable()
    mask[computed_columns] = False
    return mask[None]


@torch.no_grad()
def expected(model, first, second, narrow_at, **options):
    kv = stored_kv(model, [(at, PASSAGES[n]) for n, at in PLACES.items()], COLUMNS)
    layers = [without(first if layer <= narrow_at else second) for layer in range(model.config.num_hidden_layers)]
    return model(input_ids=PROMPT, past_key_values=Replacing(model, kv, layers), logits_to_keep=1, **options)


FAMILIES = ["llama", "qwen2", "phi3", "gemma2", "gemma3", "qwen2_sliding", "smollm3", "gpt_neox", "glm4", "cohere"]


@pytest.mark.parametrize("family", some(FAMILIES))
@pytest.mark.thin(2)
def test_what_is_chosen_under_way_is_computed_in_true_context(family, store):
    model, method = build(family), Noting(0.3)
    fill(store, model, method=tune())
    logits, cache = ask(model, store, PROMPT, method)
    assert 0 < len(method.chosen) < len(method.first) < COLUMNS
    reference = expected(model, method.first, method.chosen, NARROW_AT).logits
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    full = model(input_ids=PROMPT, logits_to_keep=1).logits.detach()
    assert (logits - full).abs().max() > 1e-3 * full.abs().max()  # so that the lines above say something
    many, few = len(method.first), len(method.chosen)
    assert cache.stats.tokens_computed == few
    assert cache.stats.tokens_recomputed == round(NARROW_AT * (many - few) / LAYERS)
    assert cache.stats.tokens_restored == COLUMNS - few


def share_of(layers, mean=0.3, wide=NARROW_AT):
    few = mean * layers / (2 * wide + layers)
    return 3 * few, few


def eager(family):
    model = build(family)
    model.set_attn_implementation("eager")
    return model


def highest(scores, count):
    return set(sorted(scores, key=lambda column: (-scores[column], column))[:count])


def test_the_first_layers_compute_those_that_other_text_moves_most(store):
    """They compute more tokens than the others, which are the candidates."""
    model, method = build("llama"), Noting(0.3, widen=3)
    fill(store, model, method=tune())
    ask(model, store, PROMPT, method)
    scores, reusable_columns = {}, np.flatnonzero(reusable())
    for n, columns in HOLDS.items():
        scores |= zip(columns, scores_in(store, "context")[len(PASSAGES[n])], strict=True)
    wide, _ = share_of(LAYERS)
    assert highest(scores, int(wide * len(reusable_columns))) == set(method.first) & set(reusable_columns)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_what_goes_on_has_moved_and_is_asked_for(family, store):
    """The reference is brute force over the KV of the comparing layer and the question's attention."""
    model, method = build(family), Noting(0.3, widen=3)
    fill(store, model, method=tune())
    ask(model, store, PROMPT, method)
    plain, at = eager(family), NARROW_AT
    output = expected(plain, method.first, method.first, LAYERS, output_attentions=True)
    kv = stored_kv(plain, [(place, PASSAGES[n]) for n, place in PLACES.items()], COLUMNS)[at]
    layer_kv = output.past_key_values.all()[at]
    deviation = sum(
        (new - old).square().sum((0, 1, 3)) / old.square().sum((0, 1, 3)).clamp_min(1e-30)
        for new, old in zip(layer_kv, kv, strict=True)
    ).sqrt()
    attention = sum(weights[0, :, -len(QUESTION) :].mean((0, 1)) for weights in output.attentions[: at + 1])
    is_reusable = reusable()
    torch.testing.assert_close(torch.from_numpy(method.attention[0]), attention.float())
    scores = deviation * (attention / attention[torch.from_numpy(is_reusable)].mean() + 1)
    among = [column for column in method.first if is_reusable[column]]
    _, few = share_of(LAYERS)
    expected_columns = highest({column: float(scores[column]) for column in among}, int(few * is_reusable.sum()))
    assert expected_columns == set(method.chosen) & set(np.flatnonzero(is_reusable))


def test_attention_by_hand():
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 4, 5, 8, generator=generator), torch.randn(2, 2, 9, 8, generator=generator)
    mask = torch.rand(2, 1, 5, 9, generator=generator) > 0.3
    question_lengths = (3, 1)
    asking = ProbeAttentionSum(question_lengths)
    asking.note(AttentionCall(query, keys, keys, mask, None))
    additive = torch.zeros(1, 1, 5, 9).masked_fill(~mask[:1], -torch.inf)
    asking.note(AttentionCall(query, keys, keys, additive, 0.5))
    total = np.zeros((2, 9))
    for scaling, masks in ((8**-0.5, mask), (0.5, mask[:1].expand(2, -1, -1, -1))):
        for row in range(2):
            for head in range(4):
                last = slice(-question_lengths[row], None)
                logits = query[row, head, last] @ keys[row, head // 2].T * scaling
                weights = logits.masked_fill(~masks[row, 0, last], -torch.inf).softmax(-1)
                total[row] += weights.sum(0).numpy() / (4 * question_lengths[row])
    np.testing.assert_allclose(asking.result(), total, rtol=1e-5)
    nobody = ProbeAttentionSum((0, 1))
    nobody.note(AttentionCall(query, keys, keys, None, None))
    assert nobody.result()[0] is None and nobody.result()[1].sum() == pytest.approx(1)


def test_a_prompt_that_ends_in_a_passage_asks_nobody(store):
    model, method = build("qwen2"), Noting(0.3)
    fill(store, model, method=tune())
    ids = join(BOS, QUESTION, PASSAGES[0], PASSAGES[1])
    _, cache = ask(model, store, ids, method)
    assert method.attention is None
    assert cache.stats.tokens_restored > 0
    ask(model, store, join(ids[0], QUESTION), method)
    assert method.attention is not None


def test_the_question_may_be_named(store):
    """It is a part of a longer text after the passages."""
    model = build("qwen2")
    fill(store, model, method=tune())
    attentions = []
    for question in (32, 5, len(QUESTION)):
        method = Noting(0.3, question=question)
        ask(model, store, PROMPT, method)
        attentions.append(method.attention)
    np.testing.assert_array_equal(attentions[0][0], attentions[2][0])
    assert np.abs(attentions[0][0] - attentions[1][0]).max() > 1e-4


def test_without_a_view_of_queries_nobody_is_asked(store, monkeypatch):
    """Tokens are then selected by their deviation in the next layer."""
    model, method = build("qwen2"), Noting(0.3, widen=3)
    monkeypatch.setattr("hf_tiered_cache.cache.forward_pass.can_select", lambda model: False)
    fill(store, model, method=tune())
    logits, _ = ask(model, store, PROMPT, method)
    assert method.attention is None
    reference = expected(model, method.first, method.chosen, NARROW_AT).logits
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


# --- baselines, settings


def test_cacheblend_attends_in_its_comparing_layer_with_what_it_chose(store, monkeypatch, caplog):
    """Layer 1 computes keys and values of all tokens, and the rest of it of the chosen ones only."""
    model = build("qwen2")
    kind = type(model.model.layers[0].mlp)

    def counted(self, hidden, forward=kind.forward):
        logging.getLogger("rows").warning(hidden.shape[1])  # a list would change the model at each pass
        return forward(self, hidden)

    def rows():
        messages = [record.msg for record in caplog.records if record.name == "rows"]
        caplog.clear()
        return messages

    monkeypatch.setattr(kind, "forward", counted)
    fill(store, model, method=tune())
    rows()
    _, cache = ask(model, store, PROMPT, blend(0.15))
    must = COLUMNS - int(reusable().sum())
    few = must + int(0.15 * reusable().sum())
    assert rows() == [COLUMNS, *[few] * 5]
    assert cache.stats.tokens_computed == few
    assert cache.stats.tokens_recomputed == round((COLUMNS - few) / 6)


def test_the_paper_is_one_name_away(store):
    model = build("qwen2")
    method = CacheTune.paper(0.25)
    fill(store, model, method=method)
    logits, cache = ask(model, store, PROMPT, method)
    assert method.ranking == "low_frequency" and not method.narrowing(24)
    assert cache.stats.tokens_recomputed == 0
    plain = tune(0.25, ranking="low_frequency", widen=1)
    assert torch.equal(logits, ask(model, store, PROMPT, plain)[0])


@pytest.mark.parametrize("mean", [0.02, 0.15, 0.3, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("layers", [4, 8, 24, 80])
def test_what_is_computed_is_a_mean_over_the_layers(mean, layers):
    wide, few = CacheTune(mean, widen=3.0)._shares(layers)
    first = min(6, 3 * layers // 8)  # of the narrow layers
    assert (first * wide + (layers - first) * few) / layers == pytest.approx(mean)
    assert few <= wide <= 1
    assert wide == pytest.approx(min(1.0, 3 * few)) or wide == 1.0


@pytest.mark.parametrize("wrong", [{"question": -1}, {"widen": 0.5}], ids=str)
def test_settings_without_meaning_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tune(**wrong)
