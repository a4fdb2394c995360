"""lm-evaluation-harness: the model type `hf-tiered` scores what `hf` does, in Python and on the command line."""

from __future__ import annotations

import json
import logging
import sys
from functools import partialmethod

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_tiered_cache import ConfigError, KVStore, cli
from hf_tiered_cache.integrations.lm_eval import HFTieredLM
from hf_tiered_cache.methods import CacheTune, ContiguousKV

TASK = """
task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/sst2/train.jsonl.gz, validation: {folder}/sst2/validation.jsonl.gz}}}}
test_split: validation
fewshot_split: train
fewshot_config: {{sampler: first_n}}
num_fewshot: 6
doc_to_text: "{{{{sentence}}}} It was"
{how}
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: ["terrible", "very great"]
doc_to_target: label
metric_list: [{metric: acc}]"""
GENERATE = """output_type: generate_until
doc_to_target: "{{['terrible', 'great'][label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]"""


@pytest.mark.parametrize(("kind", "how"), [("choice", CHOICE), ("generate", GENERATE)])
def test_scores_equal_those_of_hf(saved, folder, tmp_path, loaded_once, kind, how):
    (tmp_path / "task.yaml").write_text(TASK.format(kind=kind, folder=folder, how=how))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    arguments = {"pretrained": str(saved), "dtype": "float32", "device": "cpu", "batch_size": 1}
    results = []
    for model in (HFLM(**arguments), HFTieredLM(**arguments, method="exact", store=str(tmp_path / "kv"))):
        evaluation = lm_eval.simple_evaluate(
            model=model, tasks=[f"local_{kind}"], task_manager=manager, limit=6, bootstrap_iters=0
        )
        results.append((evaluation["results"], [s["filtered_resps"] for s in evaluation["samples"][f"local_{kind}"]]))
    (plain, plain_responses), (exact, exact_responses) = results
    scores = [{k: v for k, v in r[f"local_{kind}"].items() if "," in k} for r in (plain, exact)]
    assert scores[0] == scores[1]
    assert scores[0]
    if kind == "generate":
        assert plain_responses == exact_responses
    else:
        for plain_row, exact_row in zip(plain_responses, exact_responses, strict=True):
            for (a, greedy_a), (b, greedy_b) in zip(plain_row, exact_row, strict=True):
                assert a == pytest.approx(b, abs=1e-4)
                assert greedy_a == greedy_b
    assert model._store.stats.segments >= 1  # the few-shot prefix was stored and shared


@pytest.fixture
def run(monkeypatch, capfd):
    """Run `hf-tiered-cache lm-eval` in this process. Return exit status, standard output and error."""
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])  # lm_eval adds some
    own_tasks = partialmethod(TaskManager.__init__, include_defaults=False)  # listing those that ship takes seconds
    monkeypatch.setattr(TaskManager, "__init__", own_tasks)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-tiered-cache", "lm-eval", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_the_command_scores_what_hf_does(run, saved, folder, tmp_path, loaded_once):
    (tmp_path / "task.yaml").write_text(TASK.format(kind="choice", folder=folder, how=CHOICE))
    common = ("--include_path", tmp_path, "--tasks", "local_choice", "--device", "cpu", "--batch_size", 1, "--limit", 8)
    scores = []
    for model, more in (((), f",store={tmp_path / 'kv'},host_memory=64MiB"), (("--model", "hf"), "")):
        out = tmp_path / "-".join(("out", *model))
        arguments = (*model, "--model_args", f"pretrained={saved},dtype=float32{more}", "--output_path", out)
        status, printed, err = run(*common, *arguments)
        assert status == 0, err
        assert "local_choice" in printed
        (path,) = out.glob("**/results_*.json")
        report = json.loads(path.read_text())
        scores.append((report["config"]["model"], report["results"]["local_choice"]["acc,none"]))
    assert [model for model, _ in scores] == ["hf-tiered", "hf"]
    assert scores[0][1] == scores[1][1]
    with KVStore(tmp_path / "kv", host_memory=0) as store:
        assert store.stats.segments >= 1


def test_a_store_has_the_key_of_the_arguments_or_of_the_environment(saved, tmp_path, monkeypatch):
    (tmp_path / "kv.key").write_text("0f" * 32)
    common = f"pretrained={saved},device=cpu,store={tmp_path / 'kv'}"
    assert HFTieredLM.create_from_arg_string(f"{common},key_file={tmp_path / 'kv.key'}")._store.encrypted
    assert not HFTieredLM.create_from_arg_string(common)._store.encrypted
    monkeypatch.setenv("HF_TIERED_CACHE_KEY_FILE", str(tmp_path / "kv.key"))
    assert HFTieredLM.create_from_arg_string(common)._store.encrypted


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("method=fancy", "unknown method 'fancy'"),
        ("method=impress,period=4", "impress has no option 'period'"),
        ("method=contiguous_kv,budget=2", "budget must be a share"),
        ("method=contiguous_kv,budget=much", "budget of contiguous_kv must be of type float"),
        ("bugdet=0.1", "unknown argument 'bugdet'"),
        ("host_memory=lots", "host_memory='lots' is not a valid size"),
        ("method=cache_tune", "pass their store with store=FOLDER"),
        ("pretrained=nowhere/at-all", "the model 'nowhere/at-all' cannot be loaded: there is no such folder"),
        ("pretrained=None", "no model is specified"),
    ],
)
def test_wrong_arguments_are_one_line(saved, arguments, says):
    with pytest.raises(ConfigError, match=says) as raised:
        HFTieredLM.create_from_arg_string(f"pretrained={saved},device=cpu,{arguments}")
    assert "\n" not in str(raised.value)


def test_the_command_ends_with_one_line_and_exit_status_2(run, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # lm-eval's logger keeps the error stream of the first run
    for options, says in ((["--tasks", "there_is_none"], "Tasks not found: there_is_none"), ([], "No tasks specified")):
        status, _, err = run(*options)
        assert status == 2
        assert err.splitlines()[-1].startswith(f"hf-tiered-cache: {says}")
        assert "Traceback" not in err


def test_without_lm_eval_the_command_says_what_to_install(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "hf_tiered_cache.integrations.lm_eval")
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    status, _, err = run("--tasks", "rte")
    assert status == 2
    assert "pip install 'hf-tiered-cache[eval]'" in err


def test_help_shows_the_arguments_and_an_example(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "host_memory=4GiB" in out
    assert "--num_fewshot 20" in out


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ("method=contiguous_kv", ContiguousKV()),
        ("method=contiguous_kv,budget=0.1,period=4", ContiguousKV(budget=0.1, period=4)),
        ("method=contiguous_kv:budget=0.1,identify=keys", ContiguousKV(budget=0.1, identify="keys")),
        ("method=cache_tune,recompute=auto,question=8,store={store}", CacheTune(recompute="auto", question=8)),
    ],
)
def test_a_methods_fields_are_arguments_with_its_own_defaults(saved, tmp_path, arguments, method):
    arguments = arguments.format(store=tmp_path / "kv")
    model = HFTieredLM.create_from_arg_string(f"pretrained={saved},device=cpu,{arguments}")
    assert model._method == method
