"""Results of the benchmarks as pages: what they were measured on, JSON, Markdown and plots."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_tiered_cache

Plot = Callable[[Any, Any], Any]
"""Function that returns a figure of results, given `matplotlib.pyplot`."""


def machine(device: torch.device, folder: Path) -> dict[str, Any]:
    """Describe the hardware and software of a measurement."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    file_system = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "file_system": file_system.stdout.strip() or "unknown",
        "free_disk_bytes": shutil.disk_usage(folder).free,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_tiered_cache": hf_tiered_cache.__version__,
        "commit": commit_of(Path(__file__).parent),
    }


def machine_text(measured_on: dict[str, Any]) -> str:
    """Format the result of `machine` as a sentence; the device is in the page's title."""
    return (
        "{cpu}, {cores} cores, {torch_threads} threads, {file_system}; Python {python}, PyTorch {torch}, transformers "
        "{transformers}; {date}, commit {commit}."
    ).format(**measured_on)


def commit_of(folder: Path) -> str:
    """Return the commit of a folder's tree, with "-dirty" for uncommitted changes; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return process.stdout.strip() or "unknown"


def save(
    out: Path,
    name: str,
    document: dict[str, Any],
    markdown: str,
    plot: Plot | None = None,
) -> None:
    """Write `<name>.json` and `<name>.md`, with the measured commit at the end unless the page names it.

    Earlier results are replaced. If other files have these names, the results get another one, such as `<name>-2`.

    Args:
        out: Folder for results.
        name: Name of the files without suffix.
        document: Results, with the result of `machine` as "machine".
        markdown: Page of results.
        plot: Function that returns a figure of the results, for `<name>.png`, or None.
    """
    from hf_tiered_cache.cli.output import replacing  # needs packages that a rented machine may lack

    out.mkdir(parents=True, exist_ok=True)
    commit = document["machine"]["commit"]
    if commit not in markdown:
        markdown = f"{markdown.rstrip()}\n\nMeasured at commit {commit}.\n"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    free_name = next(candidate for candidate in names if _is_replaceable(out, candidate))
    if free_name != name:
        print(f"{out / name}.* were not written by this program, so the results are in {out / free_name}.*")
    for suffix, text in (".json", json.dumps(document, indent=1) + "\n"), (".md", markdown):
        with replacing(out / f"{free_name}{suffix}") as temporary:
            temporary.write_text(text)
    picture = out / f"{free_name}.png"
    picture.unlink(missing_ok=True)  # another link to it keeps the earlier picture
    if plot is not None:
        draw(plot, document, picture)


def publish(
    out: Path,
    name: str,
    document: dict[str, Any],
    report: Callable[[dict[str, Any]], str],
    plot: Plot | None = None,
) -> None:
    """Save results with the page that `report` makes of them, see `save`, and print the page."""
    markdown = report(document)
    save(out, name, document, markdown, plot)
    print(markdown)


def _is_replaceable(out: Path, name: str) -> bool:
    """Return whether no file has a name of results, or `save` has written them."""
    paths = [out / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    if not any(map(os.path.lexists, paths)):
        return True
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        is_own = "hf_tiered_cache" in json.loads(paths[0].read_text())["machine"]
        return is_own and all(path.is_file() for path in paths if os.path.lexists(path))
    return False


def draw(plot: Plot, results: Any, path: Path) -> None:
    """Draw results to a file. Without matplotlib, there is no file."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"figure.constrained_layout.use": True}):
        figure = plot(plt, results)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def plain_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5 of each power of ten.

    Args:
        axis: `axes.xaxis` or `axes.yaxis` of matplotlib, after the scale is set.
    """
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_locator(ticker.NullLocator())


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
