"""All measurements that need a GPU, in one run of ten minutes."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

BEGAN = time.monotonic()

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _top() -> None:
    """Measure this library on a machine with a GPU within ten minutes, and show the results.

    \b
      python bench/on_gpu.py run results/                 all of it, 540 seconds
      python bench/on_gpu.py run results/ --stages probe,syncs
      python bench/on_gpu.py run results/ --shape tiny    the same code on a CPU, in a minute or two
      python bench/on_gpu.py read results/                tables, each time as a share of the roofline

    The folder contains at most five small files: rows.jsonl (a line for each measurement, written immediately),
    report.md, trace.json.gz, gpu-tests.txt and log.txt. If a run is killed, `read` shows what it has measured. A
    missing part of the machine (GPU, kvikio, pytest, disk space) is reported as a row and does not stop the run.
    """


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="Folder for results; created if missing.")],
    seconds: Annotated[
        float, typer.Option(help="Time limit. Each stage has a share of it; unused time goes to later stages.")
    ] = 540,
    stages: Annotated[
        str, typer.Option(help="Stages, separated by commas; see `python bench/on_gpu.py stages`. Default: all.")
    ] = "",
    shape: Annotated[
        str, typer.Option(help="Shapes of models with random weights, separated by commas; use tiny for a test.")
    ] = "qwen2.5-7b,qwen2.5-0.5b",
    prefixes: Annotated[
        str, typer.Option(help="Prefix lengths in tokens, separated by commas, most important first.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Data type of the models.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device: cuda, cpu, or auto.")] = "auto",
    turns: Annotated[int, typer.Option(min=1, help="Number of measurements of each time to first token.")] = 5,
    disk: Annotated[str, typer.Option(help="Maximum disk space of the stores, such as 20GiB.")] = "60GiB",
    folder: Annotated[Path | None, typer.Option(help="Parent folder of the stores, on the disk to measure.")] = None,
) -> None:
    """Measure, and write each result immediately."""
    # asked by an import, the runtime would be begun in this process, and fail in those that are forked from it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from lib.gpu_run import REPORT, ROWS, Run, described, read_rows, run_all

    shapes = tuple(shape.split(","))
    lengths = prefixes or ("128,64" if shapes == ("tiny",) else "4096,16384,1024")
    out.mkdir(parents=True, exist_ok=True)
    (out / ROWS).unlink(missing_ok=True)
    work = Path(tempfile.gettempdir() if folder is None else folder) / f"on-gpu-{os.getpid()}"
    tokens = tuple(map(int, lengths.split(",")))
    planned = Run(out.resolve(), work, BEGAN, BEGAN + seconds, shapes, dtype, device, tokens, turns, 0, "run")
    try:
        from lib.gpu_report import report
        from lib.gpu_stages import stages_of

        from hf_tiered_cache.units import parse_bytes
    except ImportError as error:  # without its dependencies nothing can be measured
        planned.skip("all of it", f"{error.name or error} is not installed")
        print(f"nothing was measured: {error}")
        raise typer.Exit(2) from error
    planned = replace(planned, disk_bytes=parse_bytes(disk, "--disk"))
    wanted = set(filter(None, stages.split(",")))
    known = stages_of(shapes)
    if unknown := wanted - {stage.name.split()[0] for stage in known}:
        raise typer.BadParameter(f"unknown stage {min(unknown)}; `python bench/on_gpu.py stages` lists the stages")
    planned.row("asked", **described(planned), seconds=seconds, imported_after_s=round(time.monotonic() - BEGAN, 1))
    run_all(planned, [stage for stage in known if not wanted or stage.name.split()[0] in wanted], seconds)
    page = report(read_rows(out))
    (out / REPORT).write_text(page)
    print(page)


@app.command()
def read(folder: Annotated[Path, typer.Argument(help="Folder of a run, complete or killed.")]) -> None:
    """Print the results as Markdown: medians, and shares of the roofline."""
    from lib.gpu_report import report
    from lib.gpu_run import read_rows

    print(report(read_rows(folder)))


@app.command("stages")
def list_stages() -> None:
    """List the stages in order, with the share of each in 540 seconds."""
    from lib.gpu_stages import stages_of

    for stage in stages_of(("qwen2.5-7b", "qwen2.5-0.5b")):
        function = getattr(stage.measure, "func", stage.measure)
        print(f"{stage.seconds:4.0f} s  {stage.name:22} {(function.__doc__ or '').splitlines()[0]}")


if __name__ == "__main__":
    app()
