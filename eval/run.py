"""Evaluate methods on tasks, to measure the accuracy cost of restoring KV.

python -m eval.run --model Qwen/Qwen2.5-7B-Instruct --tasks sst2,rte,longbench_qasper --methods exact --out results/
python -m eval.run --list
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_tiered_cache import METHODS, TieredCacheError
from hf_tiered_cache.integrations.hub import go_offline_without_hub, unloadable

from .data import Data
from .encode import encode
from .errors import EvalError
from .files import check_file, check_folder, write
from .models import resolve, revision_of
from .plots import method_of, metric_label
from .runner import Run, draw_examples, find_variants
from .tasks import GROUPS, TASKS, Draw, LongBench, find_tasks

_PACKAGES = ("hf-tiered-cache", "torch", "transformers", "datasets", "evaluate", "rouge", "jieba", "rapidfuzz", "scipy")
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    model: Annotated[
        str, typer.Option(help="Model: a name on the Hub, a folder, or a short name of eval.models.")
    ] = "",
    tasks: Annotated[str, typer.Option(help="Tasks and groups of tasks, separated by commas.")] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Methods with options, such as exact,contiguous_kv:period=4. Full KV is always measured for "
            "comparison."
        ),
    ] = "exact",
    budgets: Annotated[
        str,
        typer.Option(
            help="Budgets of methods that have one, as shares of the prefix: 0.05,0.25. Default: each method's."
        ),
    ] = "",
    ratios: Annotated[
        str,
        typer.Option(help="Recomputed shares of passages, for methods that reuse them. Default: each method's."),
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of examples per task.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens of an answer; 1 measures first tokens only.")
    ] = None,
    half: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1,
            help="Use only every second example, starting with this one: one half to tune on, the other to report.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with data sets. Default: the Hub.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results; an interrupted run is continued.")] = Path("results"),
    store: Annotated[Path | None, typer.Option(help="Folder for stores. Default: in the folder for results.")] = None,
    prefix_tokens: Annotated[
        int, typer.Option(min=64, help="Length of prefixes, for tasks with a variable length.")
    ] = 4096,
    max_length: Annotated[
        int | None, typer.Option(min=64, help="Maximum number of tokens of prompt and answer. Default: the model's.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template in tasks that support it.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="LongBench templates: JSON, {task: template}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")] = 42,
    dtype: Annotated[str, typer.Option(help="Data type of the model: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str, typer.Option(help="Device of the model: cpu, cuda, or auto (distributed by accelerate).")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List tasks and methods, and exit.")] = False,
) -> None:
    """Evaluate methods on tasks."""
    if list_:
        _show_all()
        return
    try:
        if not model:
            raise EvalError("no model is specified; pass --model (a name on the Hub, or a folder)")
        _check_dtype(dtype)
        _check_device(device)
        selected_tasks, variants = find_tasks(tasks), find_variants(methods, budgets, ratios)
        if prompts is not None:
            selected_tasks = _with_prompts(selected_tasks, prompts)
        if max_new_tokens is not None:
            selected_tasks = [
                replace(task, max_new_tokens=min(max_new_tokens, task.max_new_tokens)) for task in selected_tasks
            ]
        set_seed(seed)
        source = resolve(model)
        tokenizer, text_config = _load_tokenizer(source)
        limit_of_model: int = getattr(text_config, "max_position_embeddings", 4096)
        length = max_length or limit_of_model
        prefix_tokens = min(prefix_tokens, length * 3 // 4)
        examples = draw_examples(selected_tasks, Draw(Data(data), limit, seed, prefix_tokens, tokenizer))
        if half is not None:
            examples = {task: task_examples[half::2] for task, task_examples in examples.items()}
        for task, task_examples in examples.items():
            # report encoding errors before any output is written
            encode(task_examples[0], task, tokenizer, length, chat)
        loaded_model = _load(source, dtype, device)  # load the model last, so that missing data is reported at once
        config = {
            "model": model,
            "weights": revision_of(model),
            "tasks": [task.name for task in selected_tasks],
            "variants": [variant.name for variant in variants],
            "limit": limit,
            "data": None if data is None else data.name,
            "prefix_tokens": prefix_tokens,
            "max_length": length,
            "chat": chat,
            "max_new_tokens": max_new_tokens,
            "half": half,
            "prompts": None if prompts is None else prompts.name,
            "seed": seed,
            "dtype": str(loaded_model.dtype).removeprefix("torch."),
        }
        _begin(out, config)
        results = Run(loaded_model, tokenizer, variants, out, store or out / "stores", length, chat)(examples)
    except (EvalError, TieredCacheError, OSError) as error:  # OSError: a folder that cannot be written, a full disk
        typer.echo(f"eval.run: {error}", err=True)
        raise typer.Exit(2) from None
    _show(results)


def _check_dtype(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise EvalError(f"--dtype {dtype} is invalid; use auto, float32, bfloat16 or float16")


def _check_device(device: str) -> None:
    try:
        if device not in ("", "auto"):
            torch.ones(1, device=device).tolist()  # a device of this name can lack support, or data ("meta")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EvalError(f"--device {device} cannot be used on this machine; use cpu, cuda or auto") from error


def _load_tokenizer(name: str) -> tuple[Any, Any]:
    """Return the tokenizer of a model, and the configuration of its language model."""
    if not Path(name).is_dir():
        go_offline_without_hub()
    with _cannot_be_loaded(name):
        return AutoTokenizer.from_pretrained(name), AutoConfig.from_pretrained(name).get_text_config()


def _load(name: str, dtype: str, device: str) -> Any:
    options: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    with _cannot_be_loaded(name):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    if device != "auto":
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


@contextmanager
def _cannot_be_loaded(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, AttributeError) as error:
        raise EvalError(unloadable(name, error)) from error


def _with_prompts(tasks: list[Any], path: Path) -> list[Any]:
    """Return the tasks, with the LongBench templates of a file."""
    try:
        templates = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EvalError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(templates, dict) or not all(isinstance(text, str) for text in templates.values()):
        raise EvalError(f"{path} must be a JSON object of templates: {{task: template}}")
    invalid = [name for name, text in templates.items() if text.count("{context}") != 1]
    if invalid:
        raise EvalError(f"{path}: the template of {invalid[0]} must contain {{context}} once")
    return [
        replace(t, template=templates[t.split]) if isinstance(t, LongBench) and t.split in templates else t
        for t in tasks
    ]


def _begin(out: Path, config: dict[str, Any]) -> None:
    """Write configuration and package versions to the results folder, before the run starts.

    Raises:
        EvalError: The folder holds a run with another configuration (apart from tasks, variants and limit), or other
            files.
    """
    path, versions_path = out / "config.json", out / "versions.json"
    check_folder(out, path.name)
    check_file(versions_path, r'\{\s*"python":')
    if path.exists():
        try:
            previous = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise EvalError(f"{path} is damaged, or of another program; choose another --out") from None
        may_change = {"tasks", "variants", "limit"} | {"weights"} - previous.keys()  # older runs did not record them
        changed_settings = sorted(key for key in config.keys() - may_change if previous.get(key) != config[key])
        if changed_settings:
            raise EvalError(f"{out} holds a run with a different {', '.join(changed_settings)}; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(config, indent=1) + "\n")
    versions: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    write(versions_path, json.dumps(versions, indent=1) + "\n")


def _show_all() -> None:
    console = Console()
    table = Table(title="Tasks", title_justify="left")
    table.add_column("task", min_width=max(map(len, TASKS)))  # --tasks needs whole names
    for heading in ("metric", "what"):
        table.add_column(heading)
    for task in TASKS.values():
        table.add_row(task.name, task.metric, task.about)
    console.print(table)
    console.print(f"Groups: {', '.join(GROUPS)}")
    console.print(f"Methods: full, {', '.join(METHODS)}")


def _show(results: dict[str, dict[str, Any]]) -> None:
    """Print a table for each task, at most 80 characters wide."""
    console = Console()
    for task, variants in results.items():
        first = next(iter(variants.values()))
        title = f"\n{task} ({first['examples']} examples)"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        table.add_column("method", no_wrap=True)
        for heading in ("share", metric_label(first["metric"]), "top-1, %", "KL, nats", "TTFT, s"):
            table.add_column(heading, justify="right", no_wrap=True)
        for method, rows in itertools.groupby(variants.values(), key=method_of):
            # a long method name continues in the rows of its next shares
            for name, row in itertools.zip_longest(_in_lines(method), rows):
                table.add_row(name, *(() if row is None else _cells(row)))
        console.print(table)
    console.print(
        "\nMeans; ± is half of the 95 % bootstrap interval. top-1 and KL compare the first\nnew token with full "
        "KV's. python -m eval.report writes all results, and plots."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    share = "" if row["budget"] is None else f"{100 * row['budget']:g} %"
    score, top1 = _figure(row.get("score"), ".1f", interval=True), _figure(row.get("top1"), ".1f")
    return [share, score, top1, _figure(row.get("kl"), ".1e"), _figure(row.get("ttft"), ".3g")]


_NAME_WIDTH = 25


def _in_lines(method: str) -> list[str]:
    """Split a method name before options that would exceed `_NAME_WIDTH` characters per line."""
    first, *options = method.split(":")
    lines = [first]
    for option in options:
        if len(lines[-1]) + 1 + len(option) > _NAME_WIDTH:
            lines.append(" ")
        lines[-1] += f":{option}"
    return lines


def _figure(value: dict[str, float] | None, form: str, interval: bool = False) -> str:
    if value is None:
        return ""
    interval_text = f" ± {(value['high'] - value['low']) / 2:{form}}" if interval else ""
    return f"{value['mean']:{form}}{interval_text}"


if __name__ == "__main__":
    sys.exit(app())
