"""Shared by the benchmarks: arguments, models and timing."""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from hf_tiered_cache import RequestStats
from hf_tiered_cache.store.memory import aligned_bytes

T = TypeVar("T")
_RESAMPLES = 2000
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


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Create a parser of a benchmark's arguments, with a folder for results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder for results")
    return parser


def add_size(parser: argparse.ArgumentParser, layers: int) -> None:
    """Add the shape of a model with random weights, and its number of layers with its default."""
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="shape of a model with random weights")
    parser.add_argument("--layers", type=int, default=layers, help="number of layers; fewer are faster, 0 for all")


def add_model_arguments(parser: argparse.ArgumentParser, layers: int) -> None:
    """Add the arguments of a model with random weights, its device, and the parent folder of stores.

    Args:
        parser: Parser of the benchmark.
        layers: Default number of layers.
    """
    add_size(parser, layers)
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of the model")
    parser.add_argument("--folder", type=Path, help="parent folder of the stores (default: a temporary one)")


def add_shape(parser: argparse.ArgumentParser, prefixes: str, repeats: int) -> None:
    """Add the shape of a model, the prefixes that it restores, and how often they are measured."""
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="qwen2.5-0.5b, qwen2.5-7b or tiny, with random weights")
    parser.add_argument("--prefixes", default=prefixes, help="numbers of prefix tokens, separated by commas")
    parser.add_argument("--repeats", type=int, default=repeats, help="number of turns")


def add_questions(parser: argparse.ArgumentParser, tasks: str, limit: int) -> None:
    """Add the tasks of `eval`, and the questions about their prefixes."""
    parser.add_argument("--data", type=Path, help="folder with data sets (default: the Hub)")
    parser.add_argument("--tasks", default=tasks, help="tasks, separated by commas")
    parser.add_argument("--tokens", type=int, default=1000, help="approximate number of tokens in a prefix")
    parser.add_argument("--limit", type=int, default=limit, help="number of questions per task")
    parser.add_argument(
        "--half", type=int, choices=(0, 1), help="use only every second question, starting with this one"
    )
    parser.add_argument("--seed", type=int, default=47, help="random seed")


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of values of a kind, separated by commas."""
    return lambda text: [kind(value) for value in text.split(",") if value]


def add_rates(parser: argparse.ArgumentParser, default: list[float]) -> None:
    """Add the bandwidths of the disks that a benchmark compares."""
    parser.add_argument(
        "--rates",
        type=listed(float),
        default=default,
        help="disk bandwidths in MB/s, separated by commas; 0: the real disk",
    )


def vocabulary(shape: str) -> int:
    """Return the vocabulary size of a shape."""
    return 1000 if shape == "tiny" else 151936


def build(
    shape: str, dtype: torch.dtype, device: torch.device, seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """Build a Qwen2-architecture model of a known shape with random weights.

    Args:
        shape: Name in `SHAPES`.
        dtype: Data type of the weights.
        device: Device of the model.
        seed: Random seed of the weights.
        layers: Number of layers; None for all. The vocabulary shrinks in proportion, so that a layer keeps its share.
    """
    settings = dict(SHAPES[shape])
    all_layers = settings["num_hidden_layers"]
    settings["num_hidden_layers"] = layers = layers or all_layers
    config = Qwen2Config(
        vocab_size=vocabulary(shape) * layers // all_layers,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **settings,
    )
    torch.manual_seed(seed)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(default_dtype)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a trained model from a folder, or by a short name of eval.models."""
    from eval.models import resolve

    return AutoModelForCausalLM.from_pretrained(resolve(str(folder)), dtype=dtype).to(device).eval()


def model_of(arguments: argparse.Namespace) -> PreTrainedModel:
    """Return the model of `add_model_arguments`: pretrained if there is a `--model`, else with random weights."""
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    if (folder := getattr(arguments, "model", None)) is not None:
        return load(folder, dtype, device)
    return build(arguments.shape, dtype, device, layers=arguments.layers or None)


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * dim * model.dtype.itemsize)


def random_prompts(model: PreTrainedModel, lengths: Iterable[int], suffix: int) -> dict[int, torch.Tensor]:
    """Return a prompt, int `[1, length + suffix]`, for each length, of other tokens than a calibration takes."""
    random, vocabulary = torch.Generator().manual_seed(7), model.config.vocab_size
    prompts = {length: torch.randint(3, vocabulary, (1, length + suffix), generator=random) for length in lengths}
    return {length: ids.to(model.device) for length, ids in prompts.items()}


def seconds(action: Callable[[], Any], device: torch.device, memory: int = 0) -> float:
    """Return the seconds that `action` takes, including the device's work.

    Args:
        action: Function to time.
        device: Device to synchronize with.
        memory: Bytes to touch and free before. A virtual machine may have returned free memory to its host, and
            getting it back takes longer than the measured action.
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
    """Return the seconds that `generate()` takes to the first token, including creating its cache.

    Args:
        model: Model to run.
        ids: Prompt, int64 `[1, tokens]`, on the model's device.
        make: Function that creates the cache.
        memory: See `seconds`.
    """
    return seconds(
        lambda: model.generate(ids, past_key_values=make(), max_new_tokens=1, do_sample=False), ids.device, memory
    )


def figures_of(stats: RequestStats) -> dict[str, Any]:
    """Return all counters of a request by name, including those of `stats.details`."""
    figures = stats.as_dict()
    details = figures.pop("details")
    return figures | details


def interleaved(
    actions: dict[str, Callable[[], T]],
    repeats: int,
    warm_up: int = 1,
    note: Callable[[str, T], None] = lambda name, measurement: None,
) -> dict[str, list[T]]:
    """Run measurements in turns, in alternating order, so that a slower machine affects all of them.

    Args:
        actions: Functions that return a measurement, such as a time.
        repeats: Number of turns that count.
        warm_up: Number of turns before, which do not count.
        note: Called immediately with each measurement that counts.
    """
    times: dict[str, list[T]] = {name: [] for name in actions}
    for turn in range(warm_up + repeats):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            measurement = actions[name]()
            if turn >= warm_up:
                times[name].append(measurement)
                note(name, measurement)
    return times


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """Return the median of the ratios of values that were measured in the same turn."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def ratio_interval(numerators: list[float], denominators: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of means of values measured in the same turns, by bootstrap of the turns."""
    pairs = np.array([numerators, denominators])  # [2, turns]
    turns = pairs.shape[1]
    means = pairs[:, np.random.default_rng(0).integers(turns, size=(_RESAMPLES, turns))].mean(-1)  # [2, resamples]
    low, high = np.quantile(means[0] / means[1], (0.025, 0.975))
    return float(low), float(high)


def forget_page_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache, so that reads go to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Peak:
    """Peak memory of the process since this object was created, in bytes beyond the memory held then."""

    def __init__(self) -> None:
        self._page_bytes, self._ended = resource.getpagesize(), threading.Event()
        self._before = self._most = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * self._page_bytes

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self._most = max(self._most, self._now())

    def end(self) -> int:
        """Stop watching, and return the peak."""
        self._ended.set()
        self._thread.join()
        return self._most - self._before
