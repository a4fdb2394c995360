"""The evaluations whose results are committed are described completely, and run as described."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from eval import report, suite
from eval import run as evaluation
from eval.errors import EvalError
from eval.runner import find_variants
from eval.tasks import find_tasks
from hf_tiered_cache import ConfigError

SUITES = suite.read_suites()


def test_groups_name_runs_and_each_run_is_in_a_group():
    run_names = [run for runs in SUITES["groups"].values() for run in runs]
    assert sorted(run_names) == sorted(SUITES["runs"]) and len(run_names) == len(set(run_names))


@pytest.mark.parametrize("name", SUITES["runs"])
def test_a_run_is_a_valid_call_of_eval_run(name):
    arguments = suite.arguments_of(name, SUITES, Path("data"), Path("results"))
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    options = {option for p in typer.main.get_command(evaluation.app).params for option in p.opts}
    assert values.keys() <= options
    assert find_tasks(values["--tasks"])
    assert find_variants(values["--methods"], values.get("--budgets", ""), values.get("--ratios", ""))
    assert values["--out"] == str(Path("results") / name) and values["--data"] == "data"


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(EvalError, match=r"'nothing'; there are: reference, real, choosing, reference-xs"):
        suite.runs_of("nothing", SUITES)
    result = CliRunner().invoke(suite.app, ["nothing"])
    assert result.exit_code and "no group or run" in str(result.exception or result.output)


@pytest.mark.parametrize(
    "find, name, message",
    [
        (find_variants, "exact,contigous_kv", r"unknown method 'contigous_kv'; did you mean 'contiguous_kv'"),
        (find_variants, "ful", r"unknown method 'ful'; did you mean 'full'\?"),
        (find_tasks, "sst22", r"unknown task 'sst22'; did you mean 'sst2'\?"),
        (find_tasks, "fewshots", r"unknown task 'fewshots'; did you mean 'fewshot'\?"),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(find, name, message):
    with pytest.raises((ConfigError, EvalError), match=message):
        find(name)


def run_here(command):
    """Run `python -m eval.run` or `python -m eval.report` in this process."""
    _, option, name, *arguments = command
    assert option == "-m"
    app = evaluation.app
    if name == "eval.report":
        app = typer.Typer()
        app.command()(report.main)
    return SimpleNamespace(returncode=CliRunner().invoke(app, arguments).exit_code)


def test_a_group_runs_and_reports_and_skips_what_needs_data(tmp_path, monkeypatch):
    small = json.loads(json.dumps(SUITES))
    small["groups"] = {"both": ["tiny", "texts"]}
    small["runs"] = {
        "tiny": {
            **SUITES["runs"]["reference-xs"],
            "methods": ["exact"],
            "limit": 2,
            "prefix-tokens": 128,
            "budgets": [0.25],
        },
        "texts": SUITES["runs"]["text-xs"],
    }
    small["runs"]["tiny"]["tasks"] = ["reference_shot"]
    monkeypatch.setattr(suite, "read_suites", lambda: small)
    monkeypatch.setattr(suite, "subprocess", SimpleNamespace(run=run_here))
    result = CliRunner().invoke(suite.app, ["both", "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "texts: skipped, it needs --data" in result.output
    assert (tmp_path / "tiny" / "README.md").exists() and not (tmp_path / "texts").exists()
