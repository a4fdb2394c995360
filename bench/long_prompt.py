"""Prompts longer than memory: time, peak memory and agreement of prefill in pieces, compared with transformers.

    PYTHONPATH=. python bench/long_prompt.py --model eval/reference/long --tokens 32768 --host-memory 16MiB
    PYTHONPATH=. python bench/long_prompt.py --model qwen2.5-0.5b --layers 4 --tokens 16384,65536

Each variant computes the prompt and decodes in a process of its own, which reports how far its memory rose above that
with the loaded model. Blocks on disk do not count. "at once" is one pass with a DynamicCache, "chunked" the same with
`prefill_chunk_size`, "in pieces" KVDrive with an empty store, and "stored" a second process with this store. All decode
the same tokens. The probabilities of the next tokens are compared with those of "chunked".
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import Peak, build, forget_page_cache, listed, load, median, parser_of, vocabulary
from lib.pages import machine, machine_text, save, table
from transformers import DynamicCache, PreTrainedModel

from eval.reference.check import contexts
from eval.reference.language import KINDS
from eval.reference.queries import language_of
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import KVDrive

CPU = torch.device("cpu")
OPTIONS = ("model", "layers", "piece", "budget", "host_memory")
WAYS = ("at once", "chunked", "in pieces", "stored")


@dataclass(frozen=True)
class Case:
    """Settings of one process."""

    way: str
    model: str
    layers: int
    tokens: int
    new_tokens: int
    piece: int
    budget: float
    host_memory: str
    store: str


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", default="eval/reference/long", help="folder of a reference model, or a shape of common.py"
    )
    parser.add_argument("--layers", type=int, default=0, help="number of layers of a shape (default: all)")
    parser.add_argument("--tokens", type=listed(int), default=[8192, 32768], help="numbers of prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=32, help="number of decoded tokens")
    parser.add_argument(
        "--piece", type=int, default=4096, help="number of tokens in a piece, and in transformers' chunks"
    )
    parser.add_argument("--budget", type=float, default=0.0156, help="share of the chunks that a token attends to")
    parser.add_argument("--host-memory", default="64MiB", help="host memory of the store")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="variants to measure")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: a temporary one)")
    return parser.parse_args(argv)


def model_of(case: Case) -> PreTrainedModel:
    """Load the reference model, or build a model of the shape."""
    folder = Path(case.model)
    if folder.exists():
        return load(folder, torch.float32, CPU)
    return build(case.model, torch.float32, CPU, layers=case.layers)


def text_of(case: Case) -> torch.Tensor:
    """Return contexts of the reference language in sequence, or random tokens: int64 `[1, tokens + new_tokens]`."""
    count = case.tokens + case.new_tokens
    if not Path(case.model).exists():
        return torch.randint(1, vocabulary(case.model), (1, count), generator=torch.Generator().manual_seed(0))
    language, tokens = language_of(Path(case.model)), list[int]()
    for context, _ in contexts(language, 4096, count // 2048 + 1, 1, KINDS):
        tokens += [token for document in context.documents for token in document]
    assert len(tokens) >= count
    return torch.tensor([tokens[:count]])


@torch.no_grad()
def measure(case: Case) -> dict[str, Any]:
    """Measure one variant in this process."""
    model, ids = model_of(case), text_of(case)
    model(input_ids=ids[:, :64], use_cache=False)  # threads and their memory
    prompt, new_ids, is_tiered = ids[:, : case.tokens], ids[:, case.tokens :], case.way in ("in pieces", "stored")
    with KVStore(case.store, host_memory=case.host_memory, disk_quota="1TiB") as store:
        method = KVDrive(case.budget, prefill_tokens=case.piece)
        cache = (
            TieredCache(model, store, method=method, progress=False) if is_tiered else DynamicCache(config=model.config)
        )
        peak, started = Peak(), time.perf_counter()
        step = case.piece if case.way == "chunked" else case.tokens
        for first in range(0, case.tokens, step):
            output = model(input_ids=prompt[:, first : first + step], past_key_values=cache, logits_to_keep=1)
        figures = {"first_s": time.perf_counter() - started, "prefill_peak_bytes": peak.end()}
        logits, times, peak = [output.logits[0, -1]], [], Peak()
        for token in new_ids.split(1, dim=1)[:-1]:
            started = time.perf_counter()
            logits.append(model(input_ids=token, past_key_values=cache).logits[0, -1])
            times.append(time.perf_counter() - started)
        figures |= {"token_s": median(times), "decode_peak_bytes": peak.end()}
        if isinstance(cache, TieredCache):
            stats = cache.stats
            figures |= {"bytes_read": stats.bytes_read, "host_bytes": store.stats.host.bytes}
            figures |= {"tokens_computed": stats.tokens_computed, "tokens_restored": stats.tokens_restored}
            store.flush()
            figures |= {"disk_bytes": store.stats.disk.bytes, "index_s": stats.details.index_seconds}
    return figures | {"logits": torch.stack(logits).float().log_softmax(1).numpy()}


def compare(log_probs: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Compare log-probabilities, `[tokens, vocabulary]`: those of the first token, and those of the later ones."""
    divergence = (np.exp(reference) * (reference - log_probs)).sum(1)
    return {
        "first_kl": float(divergence[0]),
        "kl": float(divergence[1:].mean()),
        "top_1": float((log_probs.argmax(1) == reference.argmax(1))[1:].mean()),
    }


def run(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of all variants and lengths, each from a new process."""
    for tokens in arguments.tokens:
        logits: dict[str, np.ndarray] = {}
        for way in arguments.ways:
            forget_page_cache(folder)
            settings = (tokens, arguments.new_tokens, arguments.piece, arguments.budget, arguments.host_memory)
            case = Case(way, arguments.model, arguments.layers, *settings, str(folder / str(tokens)))
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                figures = process.submit(measure, case).result()
            logits[way] = figures.pop("logits")
            if "chunked" in logits:
                figures |= compare(logits[way], logits["chunked"])
            yield {"way": way, "tokens": tokens} | figures


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, options = document["machine"], document["options"]
    layers = f" of {options['layers']} layers" if options["layers"] else ""
    text = (
        f"# Prompts longer than memory: {Path(options['model']).name}{layers}, float32\n\n"
        f"{machine_info['device']}, {machine_text(machine_info)} Host "
        f"memory of the store: {options['host_memory']}; pieces and chunks of {options['piece']} tokens; "
        f"{options['budget']:.2%} of the chunks are attended to while decoding. Memory is the peak of the process "
        "beyond the loaded model. KL and top-1 agreement are relative to the chunked DynamicCache, over the same "
        "tokens.\n\n"
    )
    headings = ["variant", "tokens", "TTFT", "memory, prefill", "time per token", "memory, decoding", "disk"]
    headings += ["index, share of TTFT", "read", "KL of the first token", "KL", "top-1 agreement"]
    rows = []
    for result in document["results"]:
        seconds = result["first_s"]
        is_tiered = "disk_bytes" in result
        rows.append(
            [
                result["way"],
                f"{result['tokens']:,}",
                f"{seconds:.1f} s",
                f"{result['prefill_peak_bytes'] / 2**20:,.0f} MiB",
            ]
            + [f"{1e3 * result['token_s']:.1f} ms", f"{result['decode_peak_bytes'] / 2**20:,.0f} MiB"]
            + [f"{result['disk_bytes'] / 2**20:,.0f} MiB" if is_tiered else ""]
            + [f"{result['index_s'] / seconds:.1%}" if is_tiered else ""]
            + [f"{result['bytes_read'] / 2**20:,.0f} MiB" if is_tiered else ""]
            + (
                [f"{result['first_kl']:.1e}", f"{result['kl']:.4f}", f"{result['top_1']:.0%}"]
                if "kl" in result
                else [""] * 3
            )
        )
    return text + table(headings, rows)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        document: dict[str, Any] = {
            "machine": machine(CPU, folder),
            "options": {name: getattr(arguments, name) for name in OPTIONS},
            "results": [],
        }
        for result in run(arguments, folder):  # saved immediately, so that an interrupted run keeps its results
            document["results"].append(result)
            save(arguments.out, f"long-prompt-{Path(arguments.model).name}", document, report(document))
    print(report(document))


if __name__ == "__main__":
    main()
