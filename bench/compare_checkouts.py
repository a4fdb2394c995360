"""Compare a benchmark of this checkout with the same benchmark of other checkouts, to find regressions.

    git worktree add ../before COMMIT
    python bench/compare_checkouts.py prefix.py --source ../before -- --prefixes 4096 --repeats 5 --recompute-repeats 1

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
EXCLUDED = ("machine", "arguments", "peers_s", "stats", "headline")
"""Keys of results that are no figures, or have no counterpart."""


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    sources = [source.resolve() for source in [*arguments.source, HERE]]
    if len({commit_of(source) for source in sources}) < len(sources):
        raise SystemExit("two of the checkouts have the same commit, so there is nothing to compare")
    figures_by_source: dict[Path, list[dict[str, float]]] = {source: [] for source in sources}
    with tqdm(total=arguments.rounds * len(sources), desc=arguments.script) as bar:
        for turn in range(arguments.rounds):
            for source in sources[:: 1 if turn % 2 == 0 else -1]:
                figures_by_source[source].append(run(source, arguments.script, arguments.options))
                bar.update()
    names = [
        name
        for name in figures_by_source[HERE][0]
        if all(name in run_figures for source_figures in figures_by_source.values() for run_figures in source_figures)
    ]
    results = {
        name: {
            commit_of(source): [run_figures[name] for run_figures in source_figures]
            for source, source_figures in figures_by_source.items()
        }
        for name in names
    }
    machine_info = machine(torch.device("cpu"), HERE)
    document = {"machine": machine_info, "options": arguments.options, "rounds": arguments.rounds, "results": results}
    text = report(results, arguments, machine_info)
    save(arguments.out, arguments.name or f"compare-{Path(arguments.script).stem}", document, text)
    print(text)


def arguments_of() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("script", help="script of bench/, in every checkout")
    parser.add_argument("--source", type=Path, action="append", required=True, help="another checkout; can be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="number of processes per checkout")
    parser.add_argument("--name", help="name of the result files; default: compare-<script>")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)  # the rest belongs to the script
    arguments = parser.parse_args(words[:end])
    arguments.options = words[end + 1 :]
    return arguments


def run(source: Path, script: str, options: list[str]) -> dict[str, float]:
    """Run a script once, and return its figures by name."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(source / "bench" / script), *options, "--out", out]
        environment = os.environ | {"PYTHONPATH": str(source)}
        process = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(f"{script} of {source} failed:\n{process.stderr[-2000:]}")
        (path,) = Path(out).glob("*.json")
        return dict(figures(json.loads(path.read_text())))


def figures(node: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a JSON document, and the medians of its lists."""
    if isinstance(node, bool) or node is None or isinstance(node, str):
        return
    if isinstance(node, int | float):
        yield name, float(node)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key not in EXCLUDED:
                yield from figures(value, f"{name} / {key}" if name else key)
    elif node and all(isinstance(number, int | float) for number in node):
        yield name, median(node)
    else:
        for number, value in enumerate(node):
            yield from figures(value, f"{name} {number}")


def report(
    results: dict[str, dict[str, list[float]]], arguments: argparse.Namespace, machine_info: dict[str, Any]
) -> str:
    """Return the page in Markdown: times and ratios by name."""
    commits = list(next(iter(results.values())))
    rows = []
    for name, by_commit in results.items():
        current = by_commit[commits[-1]]
        if not any(end in name for end in ("_s", "over", "ratio", "ttft", "seconds")):
            continue
        times = [f"{median(by_commit[commit]):.4g}" for commit in commits]
        ratios = [
            f"{ratio(current, by_commit[commit]):.3f}" if all(by_commit[commit]) else "" for commit in commits[:-1]
        ]
        rows.append([name, *times, *ratios])
    heading = (
        f"# {arguments.script} compared with another commit\n\n{machine_text(machine_info)} "
        f"Options: `{' '.join(arguments.options)}`. Medians of {arguments.rounds} rounds, and medians "
        "of the ratios within a round.\n\n"
    )
    return heading + table(["", *commits, *(f"now / {commit}" for commit in commits[:-1])], rows)


if __name__ == "__main__":
    main()
