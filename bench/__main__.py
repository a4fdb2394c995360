"""Run the benchmarks that belong together, and compare the results of two runs.

python -m bench run --suite quick --out before      # all subjects in a small size
python -m bench report before                       # one page with all results: before/README.md
python -m bench compare before after                # what became slower beyond noise
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
_TITLE = "# Results of python -m bench"
"""First line of the page of results."""
sys.path.insert(0, str(HERE))


def read_suites() -> dict[str, list[str]]:
    """Return the runs of each suite: a script and its options, separated by spaces."""
    return {name: suite["runs"] for name, suite in tomllib.loads((HERE / "suites.toml").read_text()).items()}


def run(suite: str, out: Path) -> int:
    """Run all benchmarks of a suite; a failed one does not stop the others.

    Args:
        suite: Name in `suites.toml`.
        out: Folder for the results.

    Returns:
        Number of benchmarks that failed.
    """
    _page(out)
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    runs, failed_runs = read_suites()[suite], []
    for number, line in enumerate(runs, 1):
        script, *options = line.split()
        output = [str(out)] if script == "on_gpu.py" else ["--out", str(out)]
        print(f"[{number}/{len(runs)}] bench/{line}", flush=True)
        begin = time.monotonic()
        status = subprocess.run(
            [sys.executable, str(HERE / script), *options, *output], env={**os.environ, "PYTHONPATH": path}
        ).returncode
        print(f"    {'failed' if status else 'done'} after {time.monotonic() - begin:.0f} s", flush=True)
        failed_runs += [line] if status else []
    report(out)
    for line in failed_runs:
        print(f"failed: bench/{line}", file=sys.stderr)
    return len(failed_runs)


def report(folder: Path) -> Path:
    """Write one page with all results of a folder, plots included, and return its path.

    Raises:
        SystemExit: There are no results, or the page is a file of something else.
    """
    from hf_tiered_cache.cli.output import replacing

    page = _page(folder)
    pages = [path for path in sorted(folder.glob("*.md")) if path != page]
    if not pages:
        raise SystemExit(f"error: {folder} has no results; run: python -m bench run --suite quick --out {folder}")
    texts = [path.read_text(errors="replace") for path in pages]
    titles = [text.partition("\n")[0].lstrip("# ") or path.stem for path, text in zip(pages, texts, strict=True)]
    parts = [f"{_TITLE}\n", *(f"- [{title}]({path.name})" for title, path in zip(titles, pages, strict=True)), ""]
    for path, text in zip(pages, texts, strict=True):
        nested = "\n".join(f"#{line}" if line.startswith("#") else line for line in text.splitlines())
        plots = [f"![{path.stem}]({path.stem}.png)\n"] if path.with_suffix(".png").exists() else []
        parts += [nested, "", *plots]
    with replacing(page) as temporary:
        temporary.write_text("\n".join(parts))
    print(f"wrote {page}: {len(pages)} results")
    return page


def _page(folder: Path) -> Path:
    """Return the path of the page of results. Raises SystemExit if it is a file of something else."""
    page = folder / "README.md"
    if page.exists() and page.read_text(errors="replace").partition("\n")[0] != _TITLE:
        raise SystemExit(f"error: {page} was not written by this program; name another folder")
    return page


def compare(before: Path, after: Path, show_all: bool = False) -> int:
    """Print how times changed from one folder of results to another.

    Args:
        before: Folder of the first results.
        after: Folder of the second results.
        show_all: Also print times that did not change.

    Returns:
        Number of times that became longer beyond noise.

    Raises:
        SystemExit: The folders have no time in common.
    """
    from lib.comparing import LEAST_CHANGE, LEAST_SAMPLES, compare
    from lib.pages import table

    changes = compare(before, after)
    if not changes:
        raise SystemExit(
            f"error: {before} and {after} have no time with {LEAST_SAMPLES} samples in common; both must come from the "
            "same suite"
        )
    rows = [
        [
            change.name, f"{1e3 * change.before:.3g}", f"{1e3 * change.after:.3g}",
            f"{change.after / change.before:.2f}", f"{change.low:.2f} to {change.high:.2f}", change.verdict,
        ]
        for change in changes if show_all or change.verdict
    ]  # fmt: skip
    if rows:
        print(table(["median, ms", "before", "after", "after ÷ before", "95 %", ""], rows))
    verdicts = [change.verdict for change in changes]
    slower, faster = verdicts.count("slower"), verdicts.count("faster")
    print(
        f"{slower} slower, {faster} faster, {len(changes) - slower - faster} within noise; a change "
        f"counts beyond {LEAST_CHANGE:.0%} with 95 % confidence, so about one in forty may err in either direction."
    )
    return slower


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    suites = read_suites()
    suite_list = "\n".join(
        f"{name}:\n" + "\n".join(f"  bench/{line}" for line in lines) for name, lines in suites.items()
    )
    runner = commands.add_parser(
        "run", help="run a suite", description="Run a suite. Each of its scripts explains itself with --help.",
        epilog=suite_list, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    runner.add_argument("--suite", choices=suites, default="quick", help="benchmarks to run (default: quick)")
    runner.add_argument("--out", type=Path, required=True, help="folder for the results")
    reporter = commands.add_parser("report", help="write one page with all results of a folder")
    reporter.add_argument("folder", type=Path, help="folder of results")
    comparer = commands.add_parser("compare", help="print what became slower beyond noise")
    comparer.add_argument("before", type=Path, help="folder of the first results")
    comparer.add_argument("after", type=Path, help="folder of the second results")
    comparer.add_argument("--all", action="store_true", help="also print times that did not change")
    comparer.add_argument("--fail", action="store_true", help="exit with status 1 if anything became slower")
    options = parser.parse_args(arguments)
    if options.command == "run":
        return min(1, run(options.suite, options.out))
    if options.command == "report":
        report(options.folder)
        return 0
    slower = compare(options.before, options.after, options.all)
    return int(options.fail and slower > 0)


if __name__ == "__main__":
    sys.exit(main())
