"""Cost of identifying a model: the first time, per request and per pass, compared with loading the model.

    python bench/fingerprint.py                                    # Qwen2.5-0.5B's shape, bfloat16, this machine's CPU
    python bench/fingerprint.py --shape qwen2.5-7b --device cuda

In each turn, the model is loaded from a folder with `from_pretrained`: first with its files dropped from the page
cache, then with its files in it. Files can be mapped and read on first use, so loading ends when every weight was read.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.common import SHAPES, build, forget_page_cache, load, median, ratio, seconds
from lib.pages import machine, save, table
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from hf_tiered_cache.identity.fingerprint import Fingerprinter

LOOKS = 50
LARGE_MODEL = 16e9
"""Bytes of a model with 8 billion parameters of 16 bits."""
AIMS = {"first fingerprint / loading": 0.05, "request": 0.5e-3}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="shape of the model")
    parser.add_argument("--dtype", default="bfloat16", help="data type of the weights, as named by torch")
    parser.add_argument("--device", default="cpu", help="device of the model")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="number of tokens of a prompt that is timed for comparison"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of turns")
    parser.add_argument("--out", type=Path, help="folder for results (default: print them)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(arguments.shape, getattr(torch, arguments.dtype), device).save_pretrained(folder)
        turns = [turn(folder, arguments, device) for _ in tqdm(range(1 + arguments.repeats), unit="turn")][1:]
        document = {"arguments": {**vars(arguments), "out": None}, "machine": machine(device, folder), "turns": turns}
    document["results"] = results = summary(turns)
    text = report(results, arguments)
    print(text)
    if arguments.out is not None:
        save(arguments.out, f"fingerprint-{arguments.shape}-{arguments.dtype}-{device.type}", document, text)


def turn(folder: Path, arguments: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Measure loading, fingerprints and a pass in one turn, and return their seconds."""
    forget_page_cache(folder)
    disk_times, _ = _first(folder, arguments, device, "disk")
    gc.collect()
    cache_times, (model, name) = _first(folder, arguments, device, "page cache")
    ids = torch.randint(1, 1000, (1, arguments.tokens), device=device)
    with torch.inference_mode():
        prompt = seconds(lambda: model(ids, past_key_values=DynamicCache(), logits_to_keep=1), device)
    return {
        **disk_times,
        **cache_times,
        "bytes": float(sum(tensor.nbytes for tensor in model.state_dict().values())),
        "modules": float(len(list(model.modules()))),
        "prompt": prompt,
        "reading all again": seconds(name.refresh, device),
        "request": _median_seconds(name.look, device),
        "pass": _median_seconds(lambda: name.look(begins_request=False), device),
    }


def _first(
    folder: Path, arguments: argparse.Namespace, device: torch.device, place: str
) -> tuple[dict[str, float], tuple[PreTrainedModel, Fingerprinter]]:
    objects: list[Any] = []
    loading = seconds(lambda: objects.append(_load(folder, arguments, device)), device)
    naming = seconds(lambda: objects.append(_fingerprint(objects[0])), device)
    return {f"loading from {place}": loading, f"first fingerprint, after {place}": naming}, (objects[0], objects[1])


def _load(folder: Path, arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    model = load(folder, getattr(torch, arguments.dtype), device)
    for tensor in model.state_dict().values():
        tensor.view(-1).view(torch.uint8)[::4096].sum()  # a byte of each page
    return model


def _fingerprint(model: PreTrainedModel) -> Fingerprinter:
    name = Fingerprinter(model)
    name.look()
    return name


def _median_seconds(look: Callable[[], Any], device: torch.device) -> float:
    return median(seconds(look, device) for _ in range(LOOKS))


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return medians, and ratios within a turn."""
    results = {name: median(times[name] for times in turns) for name in turns[0]}
    for place in ("disk", "page cache"):
        first = [times[f"first fingerprint, after {place}"] for times in turns]
        loading = [times[f"loading from {place}"] for times in turns]
        results[f"first fingerprint / loading from {place}"] = ratio(first, loading)
    results["first fingerprint / pass over a prompt"] = ratio(first, [times["prompt"] for times in turns])
    results["bytes per second"] = results["bytes"] / results["reading all again"]
    results["8 billion parameters, by bytes"] = LARGE_MODEL / results["bytes per second"]
    return results


def report(results: dict[str, float], arguments: argparse.Namespace) -> str:
    """Return the page in Markdown."""

    def ms(name: str) -> str:
        return f"{1e3 * results[name]:.2f} ms"

    rows = [
        ["loading, files on disk", ms("loading from disk"), ""],
        ["loading, files in the page cache", ms("loading from page cache"), ""],
        ["first fingerprint after loading", ms("first fingerprint, after disk"), _share(results, "loading from disk")],
        ["", ms("first fingerprint, after page cache"), _share(results, "loading from page cache")],
        ["", "", f"{results['first fingerprint / pass over a prompt']:.1%} of a pass over {arguments.tokens} tokens"],
        ["each request", ms("request"), f"aim: at most {1e3 * AIMS['request']:.1f} ms"],
        ["each pass", ms("pass"), ""],
        ["reading all weights again", ms("reading all again"), f"{results['bytes per second'] / 1e9:.1f} GB/s"],
        ["the same for 8 billion parameters, by bytes", ms("8 billion parameters, by bytes"), "calculated"],
    ]
    heading = (
        f"# Cost of the fingerprint: {arguments.shape}, {arguments.dtype}, {arguments.device}\n\n"
        f"{results['bytes'] / 1e9:.2f} GB of weights in {results['modules']:.0f} modules; "
        f"medians of {arguments.repeats} turns.\n\n"
    )
    return heading + table(["", "time", ""], rows)


def _share(results: dict[str, float], reference: str) -> str:
    share, aim = results[f"first fingerprint / {reference}"], AIMS["first fingerprint / loading"]
    return f"{share:.1%} of {reference} (aim: {aim:.0%})"


if __name__ == "__main__":
    main()
