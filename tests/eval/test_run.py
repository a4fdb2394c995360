"""The commands: predictions equal plain transformers', runs resume, wrong input ends in one line and exit code 2."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
import time

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from thorough import amount
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from eval import report
from eval.baselines import H2O
from eval.data import Data
from eval.encode import encode
from eval.models import MODELS, RealModel
from eval.plots import draw_overview, mean_over, styles_of
from eval.run import _show as show
from eval.run import app
from eval.runner import draw_examples, find_variants
from eval.tasks import TASKS, Draw
from hf_tiered_cache import METHODS, KVStore
from hf_tiered_cache.integrations.hub import go_offline_without_hub, unloadable
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Epic

TASKS_RUN = (
    "sst2,subj,trec,rte,piqa,copa,openbookqa,samsum,musique,musique_cacheblend,2wikimqa,hotpotqa,sharegpt,multi_news,"
    "longbench_qasper,longbench_trec,longbench_lcc,turns_qasper,ruler_niah_single_1,ruler_niah_multikey_2,ruler_vt,"
    "ruler_qa_1,reference"
)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(saved, folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "results"
    common = ("--model", saved, "--data", folder, "--limit", 2, "--out", out, "--prefix-tokens", 500, "--device", "cpu")
    common += ("--max-new-tokens", amount(4, 24))  # answers of a model that never ends have up to 512 tokens
    result = run("--tasks", TASKS_RUN, *common)
    assert result.exit_code == 0, result.output
    return out, common


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_exact_method_predicts_what_plain_transformers_does(finished):
    out, _ = finished
    tokens_restored = 0
    for folder in sorted(out.glob("*/full")):
        full, exact = (lines(folder.parent / name / "predictions.jsonl") for name in ("full", "exact"))
        assert len(full) == len(exact) >= 1
        for plain, line in zip(full, exact, strict=True):
            assert line["prediction"] == plain["prediction"]
            assert line["score"] == pytest.approx(plain["score"], rel=1e-4)
            assert line["top1"] == 100
            assert line["kl"] < 1e-6
            tokens_restored += line["restored"]
            # all but what does not fill a chunk is restored
            assert line["restored"] >= line["tokens"]["prefix"] - 16
    assert len(list(out.glob("*/full"))) == len(TASKS_RUN.split(",")) + 3  # reference is four
    assert tokens_restored > 10_000


def test_a_run_says_what_it_was(finished, saved):
    out, _ = finished
    config = json.loads((out / "config.json").read_text())
    assert config["model"] == str(saved)
    assert config["variants"] == ["full", "exact"]
    assert json.loads((out / "versions.json").read_text())["transformers"]
    metrics = json.loads((out / "sst2" / "exact" / "metrics.json").read_text())
    assert metrics["examples"] == 2
    assert metrics["score"]["low"] <= metrics["score"]["mean"] <= metrics["score"]["high"]
    assert metrics["restored"]["mean"] > 100


def test_a_run_records_its_weights_and_goes_on_where_an_older_one_did_not(finished, saved, tmp_path):
    before, common = finished
    out = tmp_path / "results"
    shutil.copytree(before, out)
    common = [out if argument == before else argument for argument in common]
    path = out / "config.json"
    recorded = json.loads(path.read_text())
    weights = recorded.pop("weights")
    checksum = hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    assert weights == {"source": "folder", "sha256": checksum}
    path.write_text(json.dumps(recorded))
    assert run("--tasks", "sst2", *common).exit_code == 0
    assert json.loads(path.read_text())["weights"] == weights
    path.write_text(json.dumps(recorded | {"weights": {"source": "folder", "sha256": "0" * 64}}))
    result = run("--tasks", "sst2", *common)
    assert result.exit_code == 2 and "different weights" in result.output


def test_a_model_may_have_a_short_name(saved, folder, tmp_path, monkeypatch):
    model = RealModel("toy", "owner/toy", (), "0" * 64, "Apache-2.0")
    monkeypatch.setitem(MODELS, "toy", model)
    monkeypatch.setenv("HF_TIERED_CACHE_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(saved, tmp_path / "models" / "toy")
    weight_bytes = (saved / "model.safetensors").stat().st_size
    record = {"gguf_sha256": model.gguf_sha256, "sha256": "1" * 64, "bytes": weight_bytes}
    (tmp_path / "models" / "toy" / "provenance.json").write_text(json.dumps(record))
    out = tmp_path / "results"
    common = ("--data", folder, "--limit", 2, "--out", out, "--device", "cpu", "--prefix-tokens", 200)
    result = run("--model", "toy", "--tasks", "sst2", *common)
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())
    assert config["model"] == "toy"
    weights = {"source": "packages", "hub_id": "owner/toy", "gguf_sha256": "0" * 64, "sha256": "1" * 64}
    assert config["weights"] == weights


def test_an_interrupted_run_goes_on(finished, tmp_path):
    before, common = finished
    out = tmp_path / "results"
    shutil.copytree(before, out)
    path = out / "sst2" / "exact" / "predictions.jsonl"
    content = path.read_text()
    content_lines = content.splitlines(keepends=True)
    path.write_text(content_lines[0] + content_lines[1][:30])  # ended in the middle of a line
    modified_ns = (out / "rte" / "exact" / "predictions.jsonl").stat().st_mtime_ns
    arguments = [out if argument == before else argument for argument in common]
    result = run("--tasks", "sst2,rte", *arguments)
    assert result.exit_code == 0, result.output
    new_lines = lines(path)
    assert [line["id"] for line in new_lines] == [json.loads(line)["id"] for line in content_lines]
    assert [line["prediction"] for line in new_lines] == [json.loads(line)["prediction"] for line in content_lines]
    assert (out / "rte" / "exact" / "predictions.jsonl").stat().st_mtime_ns == modified_ns


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--tasks": "sst2,sst3"}, "unknown task 'sst3'"),
        ({"--tasks": ""}, "name at least one task"),
        ({"--methods": "exact,fancy"}, "unknown method 'fancy'; there are: full, exact"),
        ({"--budgets": "a"}, "budgets are shares"),
        ({"--budgets": "1.5"}, "budgets are shares"),
        ({"--model": "nowhere/at-all"}, "the model 'nowhere/at-all' cannot be loaded: there is no such folder"),
        ({"--model": ""}, "no model is specified"),
        ({"--tasks": "longbench_narrativeqa"}, "has no narrativeqa.jsonl"),
        ({"--tasks": "ruler_cwe"}, "too few for this task; raise --prefix-tokens"),
        ({"--max-length": "100", "--tasks": "longbench_qasper"}, "leave no room"),
        ({"--dtype": "float33"}, "--dtype float33 is invalid"),
        ({"--dtype": "nn"}, "--dtype nn is invalid"),
        ({"--dtype": "int8"}, "--dtype int8 is invalid"),
        ({"--device": "nowhere"}, "--device nowhere cannot be used"),
        ({"--device": "xpu"}, "--device xpu cannot be used"),
        ({"--device": "meta"}, "--device meta cannot be used"),
    ],
)
def test_wrong_input_is_one_line_exit_2_and_nothing_written(saved, folder, tmp_path, changes, says, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "results"
    arguments = {"--model": saved, "--tasks": "sst2", "--data": folder, "--limit": 2, "--out": out, "--device": "cpu"}
    result = run(*(part for pair in (arguments | {"--prefix-tokens": 200} | changes).items() for part in pair))
    assert result.exit_code == 2
    messages = [line for line in result.output.splitlines() if "eval.run:" in line]
    assert len(messages) == 1
    assert says in messages[0]
    assert not out.exists()


@pytest.mark.parametrize("content", ['["a"]', '{"qasper": 3}', "3", "{"])
def test_templates_of_another_form_are_refused_in_one_line(saved, folder, tmp_path, content):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(content)
    result = run("--model", saved, "--tasks", "sst2", "--data", folder, "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert f"eval.run: {prompts}" in result.output


def test_a_seed_out_of_range_is_refused(tmp_path):
    result = run("--model", "model", "--tasks", "sst2", "--seed", -1, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "--seed" in result.output


def test_a_folder_that_cannot_be_written_is_named_in_one_line(saved, folder, tmp_path):
    (tmp_path / "file").write_text("a file, no folder")
    out = tmp_path / "file" / "out"
    arguments = ("--tasks", "sst2", "--data", folder, "--limit", 1, "--device", "cpu", "--prefix-tokens", 200)
    result = run("--model", saved, "--out", out, *arguments)
    assert result.exit_code == 2
    assert f"eval.run: [Errno 20] Not a directory: '{out}" in result.output


@pytest.mark.parametrize("missing", ["data", "model"])
def test_without_a_network_it_says_so_within_ten_seconds(saved, silent_hub, tmp_path, monkeypatch, missing):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    out, began = tmp_path / "results", time.monotonic()
    model = saved if missing == "data" else "nowhere/at-all"
    result = run("--model", model, "--tasks", "rte", "--out", out, "--device", "cpu", "--prefix-tokens", 200)
    assert time.monotonic() - began < 10
    assert result.exit_code == 2
    (text,) = [line for line in result.output.splitlines() if "eval.run:" in line]
    assert ("with --data DIR" if missing == "data" else "'nowhere/at-all' cannot be loaded: there is no such") in text
    assert not out.exists()


def test_a_hub_that_answers_stays_in_use(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        go_offline_without_hub.cache_clear()

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert go_offline_without_hub()
        thread.join(5)
    go_offline_without_hub.cache_clear()
    assert not constants.HF_HUB_OFFLINE


def test_a_missing_column_is_named(saved, folder, tmp_path):
    data = tmp_path / "data"
    (data / "sst2").mkdir(parents=True)
    for split in ("train", "validation"):
        (data / "sst2" / f"{split}.jsonl").write_text('{"sentence": "good"}\n')
    out = tmp_path / "results"
    result = run("--model", saved, "--tasks", "sst2", "--data", data, "--out", out)
    assert result.exit_code == 2
    assert "sst2/train has no column 'label'; it has sentence" in result.output
    assert not out.exists()


def test_another_configuration_does_not_mix_with_a_run(finished):
    _, common = finished
    result = run("--tasks", "sst2", *common, "--seed", 7)
    assert result.exit_code == 2
    assert "holds a run with a different seed; choose another --out" in result.output


def test_the_list_names_every_task():
    result = run("--list")
    assert result.exit_code == 0
    for name in TASKS:
        assert name in result.output


def test_methods_with_a_budget_come_once_for_each(monkeypatch):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Budgeted(H2O):
        budget: float = 1.0

    monkeypatch.setitem(METHODS._parts, "budgeted", Budgeted)
    variants = find_variants("exact,budgeted", "0.1,0.5")
    assert [variant.name for variant in variants] == ["full", "exact", "budgeted@0.1", "budgeted@0.5"]
    assert [getattr(variant.method, "budget", None) for variant in variants] == [None, None, 0.1, 0.5]


def test_without_shares_a_method_has_its_own():
    variants = find_variants("contiguous_kv,cache_tune,epic,h2o:budget=0.3,cache_tune:recompute=auto")
    assert [variant.name for variant in variants[1:]] == [
        *(f"contiguous_kv@{ContiguousKV().budget:g}", f"cache_tune@{CacheTune().recompute:g}", "epic"),
        *("h2o:budget=0.3", "cache_tune:recompute=auto"),
    ]
    assert [variant.method for variant in variants[1:4]] == [ContiguousKV(), CacheTune(), Epic()]


def test_a_method_or_share_that_is_named_twice_is_measured_once():
    names = [variant.name for variant in find_variants("exact,exact,contiguous_kv", budgets="0.1,0.1")]
    assert names == ["full", "exact", "contiguous_kv@0.1"]


def test_methods_with_a_ratio_come_once_for_each():
    variants = find_variants("cache_tune,epic,cache_tune:recompute=0.4,cache_tune:ranking=random", "0.1", "0.15,0.5")
    assert [v.name.replace("cache_tune", "c") for v in variants] == [
        *("full", "c@0.15", "c@0.5", "epic@0.15", "epic@0.5", "c:recompute=0.4"),
        *("c:ranking=random@0.15", "c:ranking=random@0.5"),
    ]
    assert [v.method.recompute for v in variants[1:]] == [0.15, 0.5, 0.15, 0.5, 0.4, 0.15, 0.5]


def test_all_budgets_of_a_method_store_a_prefix_once(saved, tmp_path, monkeypatch):
    prompts = []

    def precompute(self, model, prompt, *, method, real=KVStore.precompute, **how):
        prompts.append((method.geometry, tuple(prompt)))
        return real(self, model, prompt, method=method, **how)

    monkeypatch.setattr(KVStore, "precompute", precompute)
    common = ("--model", saved, "--limit", 2, "--tasks", "reference_fact", "--device", "cpu", "--prefix-tokens", 100)
    result = run(*common, "--methods", "contiguous_kv,h2o", "--budgets", "0.1,0.5", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert len(prompts) == len(set(prompts)) == 2 * 2


def test_running_text_is_followed_token_by_token(saved, folder, tmp_path):
    common = ("--model", saved, "--data", folder, "--limit", 1, "--tasks", "text", "--device", "cpu")
    methods = "exact,contiguous_kv:budget=0.2:gain=0,contiguous_kv:budget=0.2:reselect=False"
    result = run(*common, "--methods", methods, "--out", tmp_path, "--prefix-tokens", 300)
    assert result.exit_code == 0, result.output
    predictions = {path.parent.name: lines(path) for path in tmp_path.glob("text/*/predictions.jsonl")}
    names = ("full", "exact", "contiguous_kv-budget=0.2-gain=0", "contiguous_kv-budget=0.2-reselect=False")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    (_, examples), *_ = draw_examples([TASKS["text"]], Draw(Data(folder), 1, 42, 300, tokenizer)).items()
    for example, full, exact, every_token, once in zip(examples, *(predictions[name] for name in names), strict=True):
        prompt = encode(example, TASKS["text"], tokenizer, model.config.max_position_embeddings)
        with torch.no_grad():
            logits = model(torch.tensor([prompt.whole + prompt.answer])).logits[0, len(prompt.whole) - 1 : -1]
        perplexity = torch.nn.functional.cross_entropy(logits, torch.tensor(prompt.answer)).exp()
        assert full["score"] == pytest.approx(float(perplexity), rel=1e-4)
        assert exact["score"] == pytest.approx(full["score"], rel=1e-4)
        assert exact["answer_kl"] < 1e-6 and exact["answer_top1"] == 100
        assert full["prediction"] == exact["prediction"] == ""
        assert every_token["answer_kl"] > 1e-6 and once["answer_kl"] > 1e-6
        assert every_token["answered"] > every_token["brought"] and once["answered"] == once["brought"]


def test_passages_are_stored_apart_and_found(saved, folder, tmp_path):
    common = ("--model", saved, "--data", folder, "--limit", 2, "--tasks", "musique,reference_fact", "--device", "cpu")
    common += ("--max-new-tokens", 8)
    methods = "cache_tune:recompute=0,cache_tune:recompute=1,cache_blend:recompute=0.5"
    result = run(*common, "--methods", methods, "--out", tmp_path, "--prefix-tokens", 400)
    assert result.exit_code == 0, result.output
    for task in ("musique", "reference_fact"):
        reused = lines(tmp_path / task / "cache_tune-recompute=0" / "predictions.jsonl")
        assert all(line["restored"] > 32 for line in reused)
        everything = lines(tmp_path / task / "cache_tune-recompute=1" / "predictions.jsonl")
        full = lines(tmp_path / task / "full" / "predictions.jsonl")
        assert [line["prediction"] for line in everything] == [line["prediction"] for line in full]


def test_prompts_of_the_benchmark_may_be_given(saved, folder, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"qasper": "Here: {context} And now {input} is asked:"}))
    common = ("--model", saved, "--data", folder, "--limit", 1, "--tasks", "longbench_qasper", "--device", "cpu")
    common += ("--max-new-tokens", 2)
    assert run(*common, "--prompts", path, "--out", tmp_path / "a").exit_code == 0
    assert run(*common, "--out", tmp_path / "b").exit_code == 0
    path.write_text(json.dumps({"qasper": "no place for it"}))
    result = run(*common, "--prompts", path, "--out", tmp_path / "c")
    assert result.exit_code == 2
    assert "must contain {context} once" in result.output


def test_the_report_draws_every_task(finished, tmp_path):
    before, _ = finished
    out = tmp_path / "results"
    shutil.copytree(before, out)
    for folder in [path for path in out.iterdir() if path.is_dir()]:
        if folder.name not in {"sst2", "samsum", "reference_fact"}:  # each plot takes a second
            shutil.rmtree(folder)
    for share, score in ((0.1, 20.0), (0.5, 60.0)):  # as a method with budgets would leave them
        folder = out / "sst2" / f"some@{share}"
        folder.mkdir()
        row = json.loads((out / "sst2" / "exact" / "metrics.json").read_text())
        row |= {
            "variant": f"some@{share}",
            "budget": share,
            "score": {"mean": score, "low": score - 5, "high": score + 5},
        }
        (folder / "metrics.json").write_text(json.dumps(row))
    result = CliRunner().invoke(_report_app(), [str(out)])
    assert result.exit_code == 0, result.output
    page = (out / "README.md").read_text()
    assert "| method | accuracy, % |" in page
    assert "| some@0.5 | 60.0 (55.0–65.0) |" in page
    metrics = json.loads((out / "metrics.json").read_text())
    assert {(row["task"], row["variant"]) for row in metrics} >= {("sst2", "full"), ("sst2", "some@0.5")}
    for task in {path.parent.name for path in out.glob("*/full")}:
        assert (out / f"{task}.png").stat().st_size > 5_000
        assert f"({task}.png)" in page
    assert (out / "overview.png").stat().st_size > 5_000
    assert "(overview.png)" in page


def test_a_report_can_be_made_again_from_its_own_metrics(tmp_path):
    config = {"model": "m", "dtype": "float32", "seed": 1, "prefix_tokens": 64, "max_length": 128}
    pages = []
    for name, path in (("first", "sst2/full/metrics.json"), ("again", "metrics.json")):
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        metrics = row("sst2", "full", None, 90)
        (tmp_path / name / path).write_text(json.dumps([metrics] if path == "metrics.json" else metrics))
        result = CliRunner().invoke(_report_app(), [str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        pages.append([(tmp_path / name / file).read_text() for file in ("README.md", "metrics.json")])
    assert pages[0] == pages[1]
    assert "| full | 90.0 (85.0–100.0) |" in pages[0][0]


def row(task, variant, budget, score, metric="accuracy"):
    def figure(mean):
        return {"mean": mean, "low": mean - 5, "high": mean + 10}

    metrics = {"task": task, "variant": variant, "budget": budget, "metric": metric, "examples": 100}
    return metrics | {"score": figure(score), "top1": figure(99.5), "kl": figure(1.3e-3), "ttft": figure(0.0123)}


def test_the_table_is_whole_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    long = "cache_tune:ranking=low_frequency:widen=1"
    rows = [row("sst2", "full", None, 100), row("sst2", f"{long}@0.05", 0.05, 12), row("sst2", f"{long}@0.5", 0.5, 88)]
    text = [row("text", "full", None, 1234.5, "perplexity"), row("text", f"{long}@0.05", 0.05, 12345.6, "perplexity")]
    keys = "contiguous_kv:identify=keys"
    fact = [row("fact", "full", None, 100, "exact_match"), row("fact", f"{keys}@0.05", 0.05, 50, "exact_match")]
    show({name: {r["variant"]: r for r in part} for name, part in (("sst2", rows), ("text", text), ("fact", fact))})
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert [line.split() for line in printed.splitlines() if line.strip()][:7] == [
        ["sst2", "(100", "examples)"],
        ["method", "share", "accuracy,", "%", "top-1,", "%", "KL,", "nats", "TTFT,", "s"],
        ["full", "100.0", "±", "7.5", "99.5", "1.3e-03", "0.0123"],
        ["cache_tune", "5", "%", "12.0", "±", "7.5", "99.5", "1.3e-03", "0.0123"],
        [":ranking=low_frequency", "50", "%", "88.0", "±", "7.5", "99.5", "1.3e-03", "0.0123"],
        [":widen=1"],
        ["text", "(100", "examples)"],
    ]
    assert printed.splitlines()[-1].endswith("writes all results, and plots.")


def test_curves_that_coincide_look_different_and_axes_name_the_metric():
    tasks = {
        task: [row(task, "full", None, 100), *(row(task, f"{m}@{s}", s, 50) for m in METHODS for s in (0.1, 0.5))]
        for task in ("sst2", "rte")
    }
    styles = styles_of([row for rows in tasks.values() for row in rows])
    assert len({(s.color, s.marker) for s in styles.values()}) == len(styles)
    assert len({s.x_value(0.1) for name, s in styles.items() if name != "full"}) == len(METHODS)
    figure = draw_overview(tasks, styles)
    scores, means = figure.axes[0], figure.axes[2]
    assert scores.get_ylabel() == "accuracy, %"
    assert means.get_title() == "mean of 2 tasks"
    assert len(means.containers) == len(METHODS)


def test_a_mean_over_tasks_is_of_what_all_of_them_have():
    tasks = {"a": [row("a", "m@0.1", 0.1, 20), row("a", "n", None, 1)], "b": [row("b", "m@0.1", 0.1, 40)]}
    (mean,) = mean_over(tasks)
    assert mean["score"]["mean"] == 30


def test_a_report_of_nothing_says_so(tmp_path):
    result = CliRunner().invoke(_report_app(), [str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no run of eval.run" in result.output


def _report_app():
    import typer

    report_app = typer.Typer()
    report_app.command()(report.main)
    return report_app


@pytest.mark.parametrize(
    ("kind", "says"), [(RepositoryNotFoundError, "no such model on the Hub"), (GatedRepoError, "x")]
)
def test_a_model_that_the_hub_refuses_is_told_from_one_that_it_lacks(kind, says):
    error = OSError("x\nmore")
    error.__cause__ = kind.__new__(kind)
    assert says in unloadable("nowhere/at-all", error)
