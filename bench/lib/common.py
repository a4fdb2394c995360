"""Shared by the benchmarks: timing, what was measured on what, and results as JSON and as a table."""

from __future__ import annotations

import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import hf_tiered_cache
from hf_tiered_cache.store.memory import aligned_bytes

T = TypeVar("T")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


def vocabulary(shape: str) -> int:
    """How many tokens a model of that shape knows."""
    return 1000 if shape == "tiny" else 151936


def build(
    shape: str, dtype: torch.dtype, device: torch.device, seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """A Qwen2-architecture model of a known shape with random weights.

    Args:
        layers: so many instead of all, and of the vocabulary the same part: what a layer does keeps its share.
    """
    wanted = dict(SHAPES[shape])
    every = wanted["num_hidden_layers"]
    wanted["num_hidden_layers"] = layers = layers or every
    config = Qwen2Config(
        vocab_size=vocabulary(shape) * layers // every,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **wanted,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a trained model: of a folder, or by a short name of eval.models."""
    from eval.models import resolve

    return AutoModelForCausalLM.from_pretrained(resolve(str(folder)), dtype=dtype).to(device).eval()


def seconds(action: Callable[[], Any], device: torch.device, memory: int = 0) -> float:
    """How long `action` takes, the device's work included.

    Args:
        memory: bytes that are touched and freed before. A virtual machine may have returned free memory to its host;
            getting it back takes longer than what is measured, and whoever allocates first would pay for all.
    """
    if memory:
        aligned_bytes(memory)[:: mmap.PAGESIZE].fill_(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def first_token(model: PreTrainedModel, ids: torch.Tensor, make: Callable[[], Any], memory: int = 0) -> float:
    """Seconds that `generate()` takes to the first token, making its cache included.

    Args:
        ids: of the prompt, on the model's device.
        make: makes the cache.
        memory: as for `seconds`.
    """
    return seconds(
        lambda: model.generate(ids, past_key_values=make(), max_new_tokens=1, do_sample=False), ids.device, memory
    )


def interleaved(
    actions: dict[str, Callable[[], T]],
    repeats: int,
    warm_up: int = 1,
    note: Callable[[str, T], None] = lambda name, measured: None,
) -> dict[str, list[T]]:
    """Run measurements in turns, so that a machine that slows down slows all of them down; who comes first alternates.

    Args:
        actions: each returns what it measured, such as a time.
        repeats: turns that count.
        warm_up: turns before that do not.
        note: is told at once what counts.
    """
    times: dict[str, list[T]] = {name: [] for name in actions}
    for turn in range(warm_up + repeats):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            measured = actions[name]()
            if turn >= warm_up:
                times[name].append(measured)
                note(name, measured)
    return times


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the ratios of what was measured side by side."""
    return median(a / b for a, b in zip(over, under, strict=True))


def forget_page_cache(folder: Path) -> None:
    """Let the kernel drop what it caches of these files, so that a read is a read."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def machine(device: torch.device, folder: Path) -> dict[str, Any]:
    """What the figures were measured on and with."""
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


def commit_of(folder: Path) -> str:
    """Of the tree that a folder is in, "-dirty" behind it if anything is not committed; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    asked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def save(out: Path, name: str, document: dict[str, Any], markdown: str) -> None:
    """Write `<name>.json` and `<name>.md`, which names the commit that was measured, at its end if nowhere else.

    Args:
        document: with what `machine` says, as "machine".
    """
    out.mkdir(parents=True, exist_ok=True)
    commit = document["machine"]["commit"]
    if commit not in markdown:
        markdown = f"{markdown.rstrip()}\n\nMeasured at commit {commit}.\n"
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / f"{name}.md").write_text(markdown)


def pyplot() -> Any | None:
    """matplotlib.pyplot that draws to files, or None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
