"""Run the evaluations whose results are committed, as `eval/suites.toml` describes them.

python -m eval.suite --list
python -m eval.suite real --data DATA          # all runs of a group
python -m eval.suite real-smollm2-135m         # one run
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from hf_tiered_cache.errors import suggest

from .errors import EvalError

SUITES = Path(__file__).parent / "suites.toml"
RESULTS = Path(__file__).parent / "results"
DEFAULTS: Mapping[str, Any] = {"seed": 45, "half": 1, "dtype": "float32"}
app = typer.Typer(add_completion=False)


def read_suites(path: Path = SUITES) -> dict[str, dict[str, Any]]:
    """Return groups, shared lists of methods, and runs."""
    suites: dict[str, dict[str, Any]] = tomllib.loads(path.read_text())
    return suites


def runs_of(name: str, suites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the runs of a group, or the run of this name.

    Raises:
        EvalError: There is neither a group nor a run of this name.
    """
    if name in suites["groups"]:
        return list(suites["groups"][name])
    if name not in suites["runs"]:
        names = [*suites["groups"], *suites["runs"]]
        raise EvalError(f"no group or run is named {name!r}{suggest(name, names, 'there are: ' + ', '.join(names))}")
    return [name]


def arguments_of(name: str, suites: Mapping[str, Mapping[str, Any]], data: Path | None, results: Path) -> list[str]:
    """Return the arguments of `eval.run` for a run.

    Args:
        name: Name of the run.
        suites: Result of `read_suites`.
        data: Folder of data sets; None for the hub.
        results: Folder of all results.
    """
    options = {**DEFAULTS, **suites["runs"][name]}
    options.pop("needs-data", None)
    if isinstance(options["methods"], str):
        options["methods"] = suites["methods"][options["methods"]]
    arguments = []
    for option, value in options.items():
        arguments += [f"--{option}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return [*arguments, *(["--data", str(data)] if data else []), "--out", str(results / name)]


@app.command(help=__doc__)
def main(
    name: Annotated[str, typer.Argument(help="Group or run of eval/suites.toml. Default: list the groups.")] = "",
    data: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with data sets. Default: the Hub.")
    ] = None,
    results: Annotated[Path, typer.Option(file_okay=False, help="Folder for all results.")] = RESULTS,
    list_: Annotated[bool, typer.Option("--list", help="List groups and runs, and exit.")] = False,
) -> None:
    """Run a group or a run, and write its report."""
    suites = read_suites()
    if list_ or not name:
        for group, names in suites["groups"].items():
            print(f"{group}: {', '.join(names)}")
        return
    try:
        names = runs_of(name, suites)
    except EvalError as error:
        raise SystemExit(f"error: {error}") from None
    for run in names:
        if suites["runs"][run].get("needs-data") and data is None:
            print(f"{run}: skipped, it needs --data")
            continue
        command = [sys.executable, "-m", "eval.run", *arguments_of(run, suites, data, results)]
        print(" ".join(command[1:]), flush=True)
        for step in (command, [sys.executable, "-m", "eval.report", str(results / run)]):
            if status := subprocess.run(step).returncode:
                raise SystemExit(status)


if __name__ == "__main__":
    app()
