"""Compare a benchmark of this checkout with the same benchmark of other checkouts, to find regressions.

    git worktree add ../before COMMIT
    python bench/beside.py prefix.py --source ../before -- --prefixes 4096 --repeats 5 --recompute-repeats 1

Each round runs the script of every checkout with its own library, in a process of its own. The order alternates. All
numbers with the same name in the JSON files are compared: medians over rounds, and the median of the ratios within a
round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lib.common import median, parser_of, ratio
from lib.pages import commit_of, machine, machine_text, save, table
from tqdm.auto import tqdm

HERE = Path(__file__).parent.parent
LEFT_OUT = ("machine", "arguments", "peers_s", "stats", "headline")
"""What is no figure, or has no counterpart."""


def main() -> None:
    arguments = arguments_of()
    sources = [source.resolve() for source in [*arguments.source, HERE]]
    if len({commit_of(source) for source in sources}) < len(sources):
        raise SystemExit("two of the checkouts have the same commit, so there is nothing to compare")
    found: dict[Path, list[dict[str, float]]] = {source: [] for source in sources}
    with tqdm(total=arguments.rounds * len(sources), desc=arguments.script) as bar:
        for turn in range(arguments.rounds):
            for source in sources[:: 1 if turn % 2 == 0 else -1]:
                found[source].append(run(source, arguments.script, arguments.options))
                bar.update()
    names = [name for name in found[HERE][0] if all(name in one for ours in found.values() for one in ours)]
    results = {
        name: {commit_of(source): [one[name] for one in ours] for source, ours in found.items()} for name in names
    }
    about = machine(torch.device("cpu"), HERE)
    document = {"machine": about, "options": arguments.options, "rounds": arguments.rounds, "results": results}
    text = report(results, arguments, about)
    save(arguments.out, f"beside-{Path(arguments.script).stem}", document, text)
    print(text)


def arguments_of() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("script", help="script of bench/, in every checkout")
    parser.add_argument("--source", type=Path, action="append", required=True, help="another checkout; can be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="number of processes per checkout")
    said = sys.argv[1:]
    end = said.index("--") if "--" in said else len(said)  # what is behind it is the script's
    arguments = parser.parse_args(said[:end])
    arguments.options = said[end + 1 :]
    return arguments


def run(source: Path, script: str, options: list[str]) -> dict[str, float]:
    """The figures of one run, by name."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(source / "bench" / script), *options, "--out", out]
        environment = os.environ | {"PYTHONPATH": str(source)}
        done = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{script} of {source} failed:\n{done.stderr[-2000:]}")
        (path,) = Path(out).glob("*.json")
        return dict(figures(json.loads(path.read_text())))


def figures(found: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a JSON document, lists of them by their median."""
    if isinstance(found, bool) or found is None or isinstance(found, str):
        return
    if isinstance(found, int | float):
        yield name, float(found)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key not in LEFT_OUT:
                yield from figures(value, f"{name} / {key}" if name else key)
    elif found and all(isinstance(one, int | float) for one in found):
        yield name, median(found)
    else:
        for number, value in enumerate(found):
            yield from figures(value, f"{name} {number}")


def report(results: dict[str, dict[str, list[float]]], arguments: argparse.Namespace, about: dict[str, Any]) -> str:
    """Markdown: the figures that times and ratios are, by name."""
    commits = list(next(iter(results.values())))
    rows = []
    for name, by_commit in results.items():
        last = by_commit[commits[-1]]
        if not any(end in name for end in ("_s", "over", "ratio", "ttft", "seconds")):
            continue
        times = [f"{median(by_commit[commit]):.4g}" for commit in commits]
        ratios = [f"{ratio(last, by_commit[commit]):.3f}" if all(by_commit[commit]) else "" for commit in commits[:-1]]
        rows.append([name, *times, *ratios])
    heading = (
        f"# {arguments.script} compared with another commit\n\n{machine_text(about)} "
        f"Options: `{' '.join(arguments.options)}`. Medians of {arguments.rounds} rounds, and medians "
        "of the ratios within a round.\n\n"
    )
    return heading + table(["", *commits, *(f"now / {commit}" for commit in commits[:-1])], rows)


if __name__ == "__main__":
    main()
