"""Batches of prompts with passages, and several at once: each row computes its own tokens, and is what it is alone."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from families import build, build_deep
from hypothesis import given
from hypothesis import strategies as st
from test_passages import BOS, PASSAGES, QUESTION, blend, epic, fill, fixed, join, tune
from test_query_probe import LAYERS, NARROW_AT, Noting, Replacing, stored_kv

from eval.baselines import Recompute
from hf_tiered_cache import TieredCache
from hf_tiered_cache.restore.plan import PassagesPlan, Plan
from hf_tiered_cache.restore.rows import (
    PlanContext,
    RowGroup,
    SegmentSlice,
    of_row,
    places,
    repeats,
    row_by_row,
    side_by_side,
)

ROWS = [
    (QUESTION[:7], PASSAGES[2], PASSAGES[1], QUESTION),
    (QUESTION[:2], PASSAGES[1], PASSAGES[0], QUESTION[:9]),  # shorter, so that it is padded; a shorter question
    (QUESTION[:11], PASSAGES[0], QUESTION[:5], PASSAGES[3]),  # nobody asks
    (QUESTION, QUESTION[3:]),  # no passage
]
"""Behind the first token; none of the passages begins a row."""


def padded(rows):
    """Return the arguments of a pass over rows of several lengths, and the columns of padding of each row."""
    row_ids = [torch.cat([BOS, *row]) for row in rows]
    width = max(map(len, row_ids))
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.int64), row]) for row in row_ids])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask}, [width - len(row) for row in row_ids]


@torch.no_grad()
def run(model, store, rows, method):
    """Return the logits of the last token, `[rows, 1, vocabulary]`, and the cache."""
    inputs, _ = padded(rows)
    cache = TieredCache(model, store, method=method, record=False)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return model(**inputs, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits, cache


def close(logits, reference):
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


METHODS = {
    "reuse": tune(0.0),
    "wide": fixed(0.3, widen=6),
    "settled": tune(0.3, widen=1),
    "each passage": fixed(0.3),
    "moved": tune(0.3, question=0),
    "asked": tune(0.3),
    "blend": blend(0.15),
    "epic": epic(),
}
FAMILIES = ["llama", "phi3", "gemma3", "qwen2_sliding", "smollm3", "gpt_neox", "glm4", "gemma2", "opt"]


@pytest.mark.parametrize(
    ("family", "how"), [*(("qwen2", how) for how in METHODS), *((family, "asked") for family in FAMILIES)]
)
@pytest.mark.thin(4)
def test_a_row_is_what_it_would_be_alone(family, how, store):
    """Selection, results and counters do not depend on the other rows."""
    model, method = build_deep(family), METHODS[how]
    rows = ROWS if family == "qwen2" else [ROWS[1], ROWS[2], ROWS[0]]  # the first one not the longest
    fill(store, model)
    output, cache = run(model, store, rows, method)
    alone = [run(model, store, [row], method) for row in rows]
    close(output, torch.cat([logits for logits, _ in alone]))
    for name in ("tokens_restored", "tokens_computed", "tokens_recomputed"):
        values = [getattr(row_cache.stats, name) for _, row_cache in alone]
        assert getattr(cache.stats, name) == pytest.approx(sum(values), abs=len(rows) / 2)  # means are rounded
    if family != "opt":  # whose positions do not rotate, so that passages stay where they were computed
        assert cache.stats.tokens_restored > 200
        full = run(model, store, rows, Recompute())[0]
        assert (output - full)[:3].abs().amax((1, 2)).min() > 1e-3 * full.abs().max()  # so that this says something
        assert sorted({passage.row for passage in cache.stats.passages}) == [0, 1, 2]


@torch.no_grad()
def expected(model, row, pad, columns, computed_columns):
    """Compute the logits of one row whose layers reuse what they do not compute, without hf_tiered_cache.

    Args:
        pad: columns of padding.
        columns: of the batch.
        computed_columns: of each layer the row's columns.
    """
    begins = 1 + np.cumsum([0, *map(len, row)])
    passages = [(int(at), part) for at, part in zip(begins[:-1], row, strict=True) if len(part) > len(QUESTION)]
    kv = stored_kv(model, passages, columns - pad)
    reused = np.zeros(columns, bool)
    for at, part in passages:
        reused[pad + at : pad + at + len(part)] = True
    layers = []
    for layer_columns in computed_columns:
        without = reused.copy()
        without[layer_columns] = False
        layers.append(without[None, pad:])
    cache = Replacing(model, kv, layers)
    return model(input_ids=join(BOS, *row), past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize("how", ["reuse", "settled", "asked"])
def test_a_row_reuses_its_own_passages_and_computes_its_own_tokens(how, store):
    """The reference is transformers with each row alone."""
    model, method = build("qwen2"), Noting(**{k: getattr(METHODS[how], k) for k in ("recompute", "widen")})
    fill(store, model)
    inputs, pads = padded(ROWS[:3])
    output, _ = run(model, store, ROWS[:3], method)
    later_columns = method.chosen if how == "asked" else method.first
    columns_by_layer = [method.first if layer <= NARROW_AT else later_columns for layer in range(LAYERS)]
    for row, pad in enumerate(pads):
        row_columns = [of_row(columns, row) for columns in columns_by_layer]
        close(output[row : row + 1], expected(model, ROWS[row], pad, inputs["input_ids"].shape[1], row_columns))


def test_the_question_of_each_row_sees_what_it_would_see_alone(store):
    """It sees its own tokens and those of its row, and nothing of other rows."""
    model, method = build("qwen2"), Noting(0.3)
    fill(store, model)
    rows = [ROWS[0], (QUESTION[:20], *ROWS[1][1:]), ROWS[2]]
    _, pads = padded(rows)
    run(model, store, rows, method)
    together = method.attention
    for number, (row, pad) in enumerate(zip(rows, pads, strict=True)):
        run(model, store, [row], method)
        if number == 2:
            assert together[number] is None and method.attention is None
        else:
            np.testing.assert_allclose(together[number][pad:], method.attention[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("how", ["moved", "asked", "blend"])
def test_a_batch_computes_no_more_than_its_longest_row(how, store, monkeypatch, caplog):
    """Each layer has as many hidden states per row as the longest row alone."""
    model = build("qwen2")
    kind = type(model.model.layers[0].mlp)

    def counted(self, hidden, forward=kind.forward):
        logging.getLogger("rows").warning(hidden.shape[1])  # a list would change the model at each pass
        return forward(self, hidden)

    monkeypatch.setattr(kind, "forward", counted)
    fill(store, model)
    messages = []
    for rows in (ROWS[:2], *([row] for row in ROWS[:2])):
        caplog.clear()
        run(model, store, rows, METHODS[how])
        messages.append([record.msg for record in caplog.records if record.name == "rows"])
    assert messages[0] == np.max(messages[1:], axis=0).tolist()


def test_decoding_goes_on_in_each_row(store):
    model = build("qwen2")
    fill(store, model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

    def answers(rows, **more):
        inputs, _ = padded(rows)
        cache = TieredCache(model, store, method=METHODS["asked"], record=False)
        ids = model.generate(**inputs, past_key_values=cache, **options, **more)
        return ids[:, inputs["input_ids"].shape[1] :], cache

    together, _ = answers(ROWS[:3])
    alone = [answers([row]) for row in ROWS[:3]]
    assert torch.equal(together, torch.cat([ids for ids, _ in alone]))
    beams, cache = answers(ROWS[:3], num_beams=2)
    assert torch.equal(beams, torch.cat([answers([row], num_beams=2)[0] for row in ROWS[:3]]))
    assert cache.stats.tokens_restored == 2 * sum(row_cache.stats.tokens_restored for _, row_cache in alone)


@torch.no_grad()
def in_chunks(model, store, rows, first, method):
    """Return the logits of the last token for prompts in chunks of 50 tokens, the first one of `first`."""
    inputs, _ = padded(rows)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions, at, width = (mask.cumsum(1) - 1).clamp(min=0), 0, ids.shape[1]
    cache = TieredCache(model, store, method=method, record=False)
    for stop in (*range(first, width, 50), width):
        chunk = {"input_ids": ids[:, at:stop], "attention_mask": mask[:, :stop], "position_ids": positions[:, at:stop]}
        logits = model(**chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        at = stop
    return logits, cache


@pytest.mark.parametrize("how", ["reuse", "wide", "each passage", "moved", "asked", "epic"])
@pytest.mark.thin(2)
def test_a_row_in_chunks_is_what_it_would_be_alone(how, store):
    model, rows = build("qwen2"), ROWS[:3]
    fill(store, model)
    _, pads = padded(rows)
    output, cache = in_chunks(model, store, rows, 50, METHODS[how])
    alone = [in_chunks(model, store, [row], 50 - pad, METHODS[how]) for row, pad in zip(rows, pads, strict=True)]
    close(output, torch.cat([logits for logits, _ in alone]))
    assert cache.stats.tokens_restored == sum(row_cache.stats.tokens_restored for _, row_cache in alone) > 0


@pytest.mark.parametrize("how", ["moved", "blend"])
def test_a_chunk_that_compares_leaves_those_before_it(how, store):
    """A layer that is run twice takes over what it has restored, which stands behind what the cache holds."""
    model = build_deep("qwen2")
    fill(store, model)
    cache = TieredCache(model, store, method=METHODS[how], record=False)
    ids = join(BOS, *ROWS[0])
    with torch.no_grad():
        model(input_ids=ids[:, :60], past_key_values=cache, logits_to_keep=1)
        before = [layer.keys.clone() for layer in cache.layers]
        model(input_ids=ids[:, 60:], past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored > 100
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, :60], keys)


def test_a_part_that_begins_in_the_chunk_before(store):
    """What is computed in the chunk before stays so, and the end of this chunk is computed."""
    model, row = build("qwen2"), (QUESTION[:4], PASSAGES[1], QUESTION)
    fill(store, model)
    output, cache = in_chunks(model, store, [row], 29, tune(0.0))
    assert cache.stats.tokens_restored == 16 + 40
    positions = np.r_[0:5, 21:29, 69:93]
    close(output, expected(model, row, 0, 93, [positions] * LAYERS))


def test_rows_that_are_alike_share_their_columns(store):
    """This covers copies of one prompt, and rows that restore only exact KV."""
    model, exact = build("qwen2"), [(PASSAGES[0], QUESTION), (PASSAGES[1], QUESTION)]
    fill(store, model)
    for rows, alike in (([ROWS[0]] * 2, True), (ROWS[:2], False), (exact, True)):
        method = Noting(0.3)
        output, cache = run(model, store, rows, method)
        assert (method.first.ndim == 1) is alike and cache.stats.tokens_restored > 60
    close(output, run(model, store, exact, Recompute())[0])


@pytest.mark.parametrize("method", [tune(1.0), epic(recompute=1.0)], ids=str)
def test_computing_everything_is_full_recompute_bit_for_bit(method, store):
    model = build("qwen2")
    fill(store, model)
    output, cache = run(model, store, ROWS, method)
    assert torch.equal(output, run(model, store, ROWS, Recompute())[0])
    assert cache.stats.tokens_restored == 0


# --- several threads


@pytest.mark.parametrize("how", ["settled", "asked", "blend"])
def test_prompts_in_several_threads_at_once(how, store):
    """Each pass drops its own hidden states once, in the same layers."""
    model = build("qwen2")
    fill(store, model)
    rows = [(QUESTION[:shift], *row[1:]) for shift in (1, 3, 5) for row in ROWS[:2]]
    alone = [run(model, store, [row], METHODS[how]) for row in rows]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda row: run(model, store, [row], METHODS[how]), rows * 2))
    finally:
        sys.setswitchinterval(interval)
    for (output, cache), (reference, row_cache) in zip(results, alone * 2, strict=True):
        close(output, reference)
        assert cache.stats.tokens_restored == row_cache.stats.tokens_restored


# --- by hand


def test_each_row_goes_on_by_what_has_moved_in_it():
    """Each row has its own passages, and selects its own number of tokens."""
    pieces = [SegmentSlice(None, 0, count, at, exact=False) for count, at in ((20, 0), (16, 2))]
    groups = tuple(RowGroup((row,), 0, (piece,)) for row, piece in enumerate(pieces))
    context = PlanContext(0, 24, 0, 1, 4, groups)
    least = side_by_side([np.arange(20, 24), np.r_[0, 1, 18:24]])
    assert np.array_equal(context.inexact, np.arange(24)) and np.array_equal(context.missing, least)
    plan = PassagesPlan(0, 24, (np.arange(24),) * 4, groups, context, 1, 0.1)
    deviation = np.zeros((2, 24), np.float32)
    deviation[0, [3, 5]], deviation[1, [11, 17]] = 1, [1, 2]
    columns = blend(0.1).narrow(plan, np.arange(24), deviation, None)
    assert of_row(columns, 0).tolist() == [3, 5, 20, 21, 22, 23]
    assert of_row(columns, 1).tolist() == [0, 1, 17, *range(18, 24)]
    attention = [None, np.where(np.arange(24) == 11, 9.0, 1.0)]
    columns = tune(0.1).narrow(plan, np.arange(24), deviation, attention)
    assert of_row(columns, 1).tolist() == [0, 1, 11, *range(18, 24)]
    # what was computed up to there begins with a repeated token of a passage, which is chosen once
    positions = side_by_side([np.r_[3, 5:24], np.r_[0:24]])
    deviation = np.zeros((2, 24), np.float32)
    deviation[0, [0, 1, 2, 3, 4, 5]] = 9, 9, 9, 9, 9, 1  # columns 3, four times in front of itself, and 5
    columns = blend(0.1).narrow(plan, positions, deviation, None)
    assert of_row(columns, 0).tolist() == [3, 5, 20, 21, 22, 23]


rows_of_columns = st.lists(st.frozensets(st.integers(0, 40), min_size=1).map(sorted), min_size=1, max_size=4)


@given(rows_of_columns, st.data())
def test_columns_of_rows_side_by_side(rows, data):
    rows = [np.array([*row[:-1], 41]) if row[-1] != 41 else np.array(row) for row in rows]
    wide = side_by_side(rows)
    assert wide.ndim == (1 if all(np.array_equal(row, rows[0]) for row in rows) else 2)
    assert wide.shape[-1] == max(map(len, rows))
    for number, row in enumerate(rows):
        assert of_row(wide, number).tolist() == row.tolist()
        assert repeats(wide, number) == (wide.shape[-1] - len(row) if wide.ndim == 2 else 0)
    subsets = [np.array(sorted({*data.draw(st.sets(st.sampled_from(row.tolist()))), 41})) for row in rows]
    few = side_by_side(subsets)
    assert Plan(0, 42, (wide, few), ()).suffix is None or wide.ndim == few.ndim == 1
    at = places(few, wide)
    shape = few.shape if wide.ndim == few.ndim else (len(rows), few.shape[-1])
    wide_columns, few_columns = (np.broadcast_to(columns, (len(rows), columns.shape[-1])) for columns in (wide, few))
    if at is None:
        assert np.array_equal(few, wide)
    else:
        assert at.shape == shape
        picked_columns = np.take_along_axis(wide_columns, np.broadcast_to(at, (len(rows), at.shape[-1])), 1)
        assert np.array_equal(picked_columns, few_columns)


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (([[0, 9], [2, 8]],), "last"),
        (([[4, 4, 9], [3, 2, 9]],), "ascending"),
        (([[4, 4, 9], [2, 4, 9]], [[4, 9], [3, 9]]), "layer 1"),
        (([[4, 4, 9], [2, 4, 9]], [2, 9]), "layer 1"),
    ],
)
def test_impossible_plans_of_rows_are_refused(positions, says):
    with pytest.raises(ValueError, match=says):
        Plan(0, 10, tuple(np.array(c, np.int64) for c in positions), ())


def test_a_plan_of_rows_counts_each_row():
    groups = (RowGroup((0, 2), 0, ()), RowGroup((1,), 3, ()))
    wide = side_by_side([np.r_[0, 2, 6:10], np.r_[3, 5:10], np.r_[0, 2, 6:10]])
    few = side_by_side([np.r_[0, 7:10], np.r_[6:10], np.r_[0, 7:10]])
    plan = Plan(0, 10, (wide, wide, few, few), groups)
    assert plan.restored_until == 7 and plan.suffix is None
    assert plan.restored_tokens == 2 * (10 - 4) + (7 - 4)
    assert plan.recomputed_tokens == (2 * (2 * 2) + 2 * 2) / 4
    indexes = places(few, wide)
    assert [index.tolist() for (index,) in row_by_row(indexes)] == [[0, 3, 4, 5], [2, 3, 4, 5], [0, 3, 4, 5]]
    last = side_by_side([np.r_[6:10], np.r_[4, 7:10], np.r_[6:10]])
    assert Plan(0, 10, (last,) * 4, groups).first_position(3) == 2  # a window before the first that any row computes
    assert places(wide, wide) is None and places(few, few.copy()) is None
