"""What methods read of a prefix is measured, as a share of all of its KV, and reported with their answers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_run import lines, row, run
from transformers import LlamaConfig, LlamaForCausalLM

from eval import report
from eval.baselines import H2O
from eval.encode import Prompt
from eval.plots import draw_overview, draw_task, styles_of
from eval.subject import Subject
from hf_tiered_cache import Exact, KVStore
from hf_tiered_cache.methods import ContiguousKV, KVDrive

PREFIX, NEW = 512, 5
EACH_LAYER = ContiguousKV(0.25, chunk_tokens=16, reselect=False, reorder=False)
HEAD_DIM, BYTES = 64, 4
INDEX = (HEAD_DIM + BYTES) / (2 * HEAD_DIM * BYTES)  # a byte for each number of a key, and a scale


@pytest.fixture(scope="module")
def model(tokenizer):
    """Build a model whose blocks fill whole pages, so that padding does not distort the shares."""
    torch.manual_seed(0)
    size = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=96, **size, bos_token_id=1, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def read(model, tokenizer, tmp_path):
    """Ask a question after a prefix, and return what was read."""
    ids = np.random.default_rng(1).integers(10, len(tokenizer), PREFIX + 20).tolist()

    def read(method, host_memory="64MiB", questions=1, **how):
        prompts = [Prompt(tuple(ids[:PREFIX]), (*ids[PREFIX:], 10 + number), **asking(**how)) for number in range(3)]
        with KVStore(tmp_path / f"{host_memory} {method!r:.60}", engine="posix", host_memory=host_memory) as store:
            subject = Subject(model, tokenizer, store, method)
            subject.prepare(prompts[0].prefix)
            return [subject.ask(prompt, NEW).reading for prompt in prompts[:questions]][-1]

    return read


def asking(choices=(), answer=()):
    return {"choices": choices, "answer": answer}


@pytest.mark.parametrize("method", [Exact(), ContiguousKV(0.1)])
def test_a_prompt_without_a_prefix_is_answered(model, tokenizer, tmp_path, method):
    prompt = Prompt((), tuple(range(10, 30)), **asking())
    with KVStore(tmp_path / "store") as store:
        subject = Subject(model, tokenizer, store, method)
        subject.prepare(prompt.prefix)
        answer = subject.ask(prompt, NEW)
    assert answer.reading is None
    assert answer.text == Subject(model, tokenizer).ask(prompt, NEW).text


def test_the_exact_method_reads_all(read):
    shares = read(Exact())
    assert (shares.read, shares.identified, shares.brought, shares.answered) == (100, 0, 100, 100)
    assert (shares.per_token, shares.index) == (0, 0)


@pytest.mark.parametrize("host_memory", [0, "64MiB"])
def test_chunks_read_their_budget(read, host_memory):
    shares = read(EACH_LAYER, host_memory)
    assert shares.read == pytest.approx(25)
    assert shares.brought == pytest.approx(25)
    assert shares.answered == pytest.approx(shares.brought)
    assert shares.per_token == 0


def test_an_index_that_is_there_is_not_read(read):
    first, second = read(EACH_LAYER), read(EACH_LAYER, questions=2)
    assert first.identified == second.identified == 0
    assert first.index == second.index == pytest.approx(100 * INDEX)
    assert read(replace(EACH_LAYER, period=2, solo_layers=0)).index == pytest.approx(50 * INDEX)


@pytest.mark.parametrize(
    ("changes", "identified"),
    [
        ({"identify": "keys"}, 50),
        ({"identify": "keys", "period": 2, "solo_layers": 0}, 25),
    ],
)
def test_keys_that_are_chosen_from_count(read, changes, identified):
    for questions in (1, 2):
        shares = read(replace(EACH_LAYER, **changes), questions=questions)
        assert shares.read == pytest.approx(25)
        assert shares.identified == pytest.approx(identified)
        assert shares.brought == pytest.approx(25 + identified)
        assert shares.index == 0


@pytest.mark.parametrize("budget", [0.05, 0.25])
def test_single_tokens_read_more_than_their_budget(read, budget):
    shares = read(H2O(budget))
    assert shares.read > 1.5 * 100 * budget
    assert shares.read + shares.identified >= 50  # all keys, whatever is attended to
    assert shares.index == 0


def test_choosing_again_reads_at_each_token(read):
    method = replace(EACH_LAYER, gain=0, ahead_bytes=0)
    once, second_reading = (read(replace(method, reselect=reselect)) for reselect in (False, True))
    assert second_reading.brought == once.brought == once.answered
    assert 0 == once.per_token < second_reading.per_token < 25
    assert second_reading.answered == pytest.approx(second_reading.brought + (NEW - 1) * second_reading.per_token)


def test_choices_are_no_generated_tokens(read):
    shares = read(replace(EACH_LAYER, reselect=True), choices=((11, 12), (13,)))
    assert shares.per_token is None
    assert shares.answered == shares.brought


def test_kv_drive_chooses_by_an_index_that_is_there(read):
    shares = read(KVDrive(0.1, local=16))
    assert shares.identified == 0 < shares.index
    assert 10 < shares.read < 25  # the first and the last tokens, too


def test_an_index_is_a_share_of_the_kv_without_padding(saved, tokenizer, tmp_path):
    model = LlamaForCausalLM.from_pretrained(saved).eval()  # blocks of KVDrive's are 1 KiB in pages of 4
    ids = np.random.default_rng(1).integers(10, len(tokenizer), 220).tolist()
    prompt, method = Prompt(tuple(ids[:200]), tuple(ids[200:]), (), ()), KVDrive(0.1, local=16)
    with KVStore(tmp_path, engine="posix") as store:
        subject = Subject(model, tokenizer, store, method)
        subject.prepare(prompt.prefix)
        shares = subject.ask(prompt, 1).reading
        index_bytes = store._storage.residency.index_cache.allocated
        of_each = 2 * 2 * 16 * 4 * model.config.num_hidden_layers  # token
    assert shares.index == pytest.approx(100 * index_bytes / (192 * of_each))


@pytest.fixture(scope="module")
def finished(saved, folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    methods = "exact,contiguous_kv:identify=keys:reorder=false,contiguous_kv:reselect=True:reorder=false,h2o,cache_tune"
    common = ("--model", saved, "--data", folder, "--limit", 2, "--device", "cpu", "--prefix-tokens", 400)
    result = run(
        *common, "--tasks", "reference_fact,reference_hop", "--methods", methods, "--budgets", "0.1,0.5", "--out", out
    )
    assert result.exit_code == 0, result.output
    return out


def test_predictions_and_metrics_tell_what_was_read(finished):
    task = finished / "reference_fact"
    for line in lines(task / "exact" / "predictions.jsonl"):
        assert (line["read"], line["identified"], line["brought"]) == (100, 0, 100)
    for budget in (0.1, 0.5):
        means = json.loads((task / f"contiguous_kv-identify=keys-reorder=false@{budget}" / "metrics.json").read_text())
        assert 60 * budget < means["read"]["mean"] <= 100 * budget
        assert means["identified"]["mean"] > 0
        reselected = task / f"contiguous_kv-reselect=True-reorder=false@{budget}"
        reselected_metrics = json.loads((reselected / "metrics.json").read_text())
        assert reselected_metrics["identified"]["mean"] == 0 < reselected_metrics["index"]["mean"]
        h2o = json.loads((task / f"h2o@{budget}" / "metrics.json").read_text())
        assert h2o["read"]["mean"] > 100 * budget


def test_what_is_attended_to_is_told_beside_what_is_restored(finished):
    for path in (finished / "reference_fact").glob("*/predictions.jsonl"):
        for line in lines(path):
            if "@" in path.parent.name and "cache_tune" not in path.parent.name:
                budget = float(path.parent.name.split("@")[1])
                assert 0.5 * budget * line["restored"] < line["attended"] <= budget * line["restored"]
            elif path.parent.name != "full":
                assert line["attended"] == line["restored"]
    report.main(finished)
    (headings, *rows), *_ = [table(part) for part in (finished / "README.md").read_text().split("\n## ")[1:]]
    by_variant = {cells[0]: cells for cells in rows}
    of_h2o = json.loads((finished / "reference_fact" / "h2o@0.1" / "metrics.json").read_text())["attended"]["mean"]
    assert by_variant["h2o@0.1"][headings.index("attended")] == f"{of_h2o:.1f}"
    assert by_variant["full"][headings.index("attended")] == ""


def test_what_is_computed_is_told_of_passages_alone(finished):
    """The other methods restore the prefix of a prompt, whatever its parts."""
    for path in (finished / "reference_fact").glob("*/metrics.json"):
        metrics, passages = json.loads(path.read_text()), path.parent.name.startswith("cache_tune")
        assert ("compute" in metrics) == passages
        assert ("read" in metrics) == (not passages and path.parent.name != "full")


def test_the_page_has_a_column_of_what_was_read(finished):
    report.main(finished)
    page = (finished / "README.md").read_text()
    (headings, *_), *_ = tables = [table(part) for part in page.split("\n## ")[1:]]
    assert headings[6:9] == ["computed, %", "read, %", "identified, %"]
    for headings, *rows in tables:
        read_shares = {cells[0]: cells[headings.index("read, %")] for cells in rows}
        assert read_shares["exact"] == "100.0"
        assert read_shares["full"] == read_shares["cache_tune@0.15"] == ""
        assert float(read_shares["h2o@0.1"]) > 10
    assert "`read`: share of the stored prefix's KV" in page


def table(text):
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| -")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]


def test_a_page_without_such_figures_has_no_such_columns(tmp_path):
    config = {"model": "m", "dtype": "float32", "seed": 1, "prefix_tokens": 64, "max_length": 128}
    page = report.page(config, {"sst2": [row("sst2", "full", None, 90), row("sst2", "h2o@0.1", 0.1, 80)]})
    assert "read" not in page
    assert table(page)[0] == ["method", "accuracy, %", "top-1, %", "KL, nats", "TTFT, ms"]


def measured(task, variant, budget, brought_share, answered):
    metrics = row(task, variant, budget, 50)
    figures = {"brought": brought_share, "answered": answered}
    return metrics | {name: {"mean": at, "low": at, "high": at} for name, at in figures.items()}


def test_plots_go_against_what_was_read_where_that_is_known():
    rows = [measured("sst2", "a@0.1", 0.1, 30, 35), measured("sst2", "b@0.1", 0.1, 4, 8), row("sst2", "full", None, 9)]
    figure = draw_task("sst2", rows, styles_of(rows))
    answers, first, divergence, _ = figure.axes
    labels = [axes.get_xlabel() for axes in (answers, first, divergence)]
    assert labels == ["KV read for the answer, measured", *["KV read for the first token, measured"] * 2]
    assert first.get_ylabel() == "same first token as full KV, %"
    for axes, expected in ((answers, [0.35, 0.08]), (first, [0.3, 0.04]), (divergence, [0.3, 0.04])):
        assert [container.lines[0].get_xdata().tolist() for container in axes.containers] == [[x] for x in expected]
    assert [label.get_text() for label in first.get_xticklabels()] == ["5 %", "10 %", "20 %"]


def test_plots_go_against_shares_where_it_is_not_known_of_all():
    rows = [row("sst2", "a@0.1", 0.1, 30), measured("sst2", "b@0.1", 0.1, 4, 8)]
    figure = draw_task("sst2", rows, styles_of(rows))
    assert len(figure.axes) == 3
    assert figure.axes[0].get_xlabel() == "share attended to or recomputed"


def test_an_overview_has_answers_and_first_tokens():
    tasks = {task: [measured(task, "a@0.1", 0.1, 30, 35)] for task in ("sst2", "rte")}
    figure = draw_overview(tasks, styles_of([row for rows in tasks.values() for row in rows]))
    assert [axes.get_ylabel() for axes in figure.axes[::3]] == [
        "accuracy, %",
        "same first token as full KV, %",
        "KL to full KV, nats",
    ]
    assert [axes.get_xlabel() for axes in figure.axes[::3]] == [
        "KV read for the answer, measured",
        "",
        "KV read for the first token, measured",
    ]
    mean = figure.axes[2].containers[0].lines[0]
    assert (mean.get_xdata().tolist(), mean.get_ydata().tolist()) == ([0.35], [50])
