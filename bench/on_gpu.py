"""Measure this library on a machine with a GPU within ten minutes, and show the results.

    python bench/on_gpu.py run results/                 all of it, 540 seconds
    python bench/on_gpu.py run results/ --stages probe,syncs
    python bench/on_gpu.py run results/ --shape tiny    the same code on a CPU, in a minute or two
    python bench/on_gpu.py read results/                tables, each time as a share of the roofline

The folder contains at most five small files: rows.jsonl (a line for each measurement, written immediately),
report.md, trace.json.gz, gpu-tests.txt and log.txt. If a run is killed, `read` shows what it has measured. A
missing part of the machine (GPU, kvikio, pytest, another package, disk space) is reported as a row and does not stop
the run: the first stage needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lib.gpu_run import REPORT, ROWS, Run, described, foreign_file, read_rows, run_all, stages_of

BEGAN = time.monotonic()


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Measure, and write each result immediately."""
    # an import that queries CUDA would initialize its runtime here, and forked processes could not use it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from hf_tiered_cache.errors import ConfigError
    from hf_tiered_cache.units import parse_bytes

    out, shapes = arguments.out.resolve(), tuple(arguments.shape.split(","))
    lengths = arguments.prefixes or ("128,64" if shapes == ("tiny",) else "4096,16384,1024")
    tokens = tuple(map(int, lengths.split(",")))
    selected_stages = set(filter(None, arguments.stages.split(",")))
    stages = [stage for stage in stages_of(shapes) if not selected_stages or stage.name.split()[0] in selected_stages]
    if unknown_stages := selected_stages - {stage.name.split()[0] for stage in stages}:
        parser.error(f"unknown stage {min(unknown_stages)}; `python bench/on_gpu.py stages` lists the stages")
    try:
        disk_bytes = parse_bytes(arguments.disk, "--disk")
    except ConfigError as error:
        parser.error(str(error))
    if (foreign := foreign_file(out)) is not None:
        parser.error(f"{foreign} was not written by this program; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / ROWS).unlink(missing_ok=True)
    work = Path(arguments.folder or tempfile.gettempdir()) / f"on-gpu-{platform.node()}-{os.getpid()}"
    until = BEGAN + arguments.seconds
    settings = Run(
        out,
        work,
        BEGAN,
        until,
        shapes,
        arguments.dtype,
        arguments.device,
        tokens,
        arguments.turns,
        disk_bytes,
        stage="run",
    )
    settings.row("asked", **described(settings), seconds=arguments.seconds)
    with suppress(ImportError):  # spares the forked stages the imports; each of them reports what it lacks
        import lib.gpu_stages  # noqa: F401
    run_all(settings, stages, arguments.seconds)
    from lib.gpu_report import report

    page = report(read_rows(out))
    (out / REPORT).write_text(page)
    print(page)


def read(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print the results as Markdown: medians, and shares of the roofline."""
    from lib.gpu_report import report

    print(report(read_rows(arguments.folder)))


def stages(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """List the stages in order, with the share of each in 540 seconds."""
    for stage in stages_of(("qwen2.5-7b", "qwen2.5-0.5b")):
        print(f"{stage.seconds:4.0f} s  {stage.name}")


def main() -> None:
    """Parse the arguments with the standard library, since the machine may lack the packages of pyproject.toml."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    parsers = {}
    for command in (run, read, stages):
        parsers[command] = commands.add_parser(command.__name__, description=command.__doc__, help=command.__doc__)
        parsers[command].set_defaults(command=command)
    parsers[read].add_argument("folder", type=Path, help="folder of a run, complete or killed")
    add = parsers[run].add_argument
    add("out", type=Path, help="folder for results; created if missing")
    add("--seconds", type=float, default=540, help="time limit; each stage has a share, unused time goes to later ones")
    add("--stages", default="", help="stages, separated by commas; see `python bench/on_gpu.py stages`; default: all")
    add("--shape", default="qwen2.5-7b,qwen2.5-0.5b",
        help="shapes of models with random weights, separated by commas; use tiny for a test")  # fmt: skip
    add("--prefixes", default="", help="prefix lengths in tokens, separated by commas, most important first")
    add("--dtype", default="bfloat16", help="data type of the models")
    add("--device", default="auto", help="cuda, cpu, or auto")
    add("--turns", type=int, default=5, help="number of measurements of each time to first token")
    add("--disk", default="60GiB", help="maximum disk space of the stores, such as 20GiB")
    add("--folder", type=Path, help="parent folder of the stores, on the disk to measure")
    arguments = parser.parse_args()
    arguments.command(arguments, parser)


if __name__ == "__main__":
    main()
