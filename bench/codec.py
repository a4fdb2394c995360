"""Savings and costs of codecs: bytes on disk, time to first token, and agreement with full KV.

    PYTHONPATH=. python bench/codec.py --models eval/reference/xs

Bytes and times are those of one stored prefix and a new suffix, for random weights of a known shape: from an emulated
slow disk, from the real disk (cold, O_DIRECT), and from host memory, where only decoding differs. All variants are
measured in every turn. Figures are medians.

Agreement is measured on trained reference models: the distribution of each next token of questions and answers is
compared with that of a DynamicCache filled by the same two passes. Peers are the 8-bit forms of transformers'
QuantizedCache: the backend "fp8" (since transformers 5.21), with one scale per tensor and layer, and the backend "hqq"
with eight bits. If hqq is not installed, its scheme is computed directly: codes from 0 to 255, with a scale and a zero
point for each 64 numbers from their minimum and maximum, without hqq's optimization of the zero point.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import add_shape, build, first_token, forget_page_cache, interleaved, load, median, parser_of, ratio
from lib.pages import machine, machine_text, publish, table
from lib.slow_disk import SlowDisk, SlowDiskEngine
from tqdm.auto import tqdm
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, QuantizedCache, cache_utils
from transformers.utils import is_hqq_available

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.store.codecs import CODECS
from hf_tiered_cache.store.geometry import HASH_TOKENS

SUFFIX = 64
GROUP = 64
LATENCY_S = 100e-6
PLACES = ("slow disk", "disk", "host memory")
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")
"""Whether QuantizedCache has the backend "fp8"."""


# --- bytes and times


class Bench:
    """Model, and a folder with the same prefix for each codec."""

    def __init__(self, arguments: argparse.Namespace, dtype: str, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.device = torch.device("cpu")
        self.model = build(arguments.shape, getattr(torch, dtype), self.device)
        self._random = torch.Generator().manual_seed(0)

    def ids(self, tokens: int) -> torch.Tensor:
        """Draw random tokens, int64 `[1, tokens]`."""
        return torch.randint(1, self.model.config.vocab_size, (1, tokens), generator=self._random)

    def run(self, prefix: int) -> dict[str, Any]:
        """Measure bytes and times of all codecs for one prefix length."""
        document, suffix = self.ids(prefix), self.ids(SUFFIX)
        sizes: dict[str, int] = {}
        for codec in CODECS:
            with KVStore(self.folder / codec, engine="posix", codec=codec) as store:
                store.precompute(self.model, document, progress=False)
                sizes[codec] = sum(row.nbytes for row in store.segments())
        ids = torch.cat([document, suffix], dim=1)
        times = {
            place: interleaved(
                {codec: lambda codec=codec, place=place: self.first_token(ids, codec, place) for codec in CODECS},
                self.arguments.repeats,
            )
            for place in PLACES
        }
        for codec in CODECS:
            shutil.rmtree(self.folder / codec)
        return {"prefix": prefix, "suffix": SUFFIX, "bytes_on_disk": sizes, "ttft_s": times}

    def first_token(self, ids: torch.Tensor, codec: str, place: str) -> float:
        """Measure the seconds of `generate()` to the first token, with a store opened for it."""
        engine = SlowDiskEngine(SlowDisk(self.arguments.bandwidth, LATENCY_S)) if place == "slow disk" else "posix"
        forget_page_cache(self.folder / codec)
        with KVStore(self.folder / codec, engine=engine, codec=codec, host_memory="2GiB") as store:
            if place == "host memory":
                store.warm(self.model, ids, progress=False)
            cache = TieredCache(self.model, store, record=False)
            took = first_token(self.model, ids, lambda: cache)
        assert cache.stats.tokens_restored == (ids.shape[1] - SUFFIX) // HASH_TOKENS * HASH_TOKENS
        assert cache.stats.tier == ("host" if place == "host memory" else "disk")
        return took


# --- agreement

Fill = Callable[[torch.Tensor], Cache]
"""Function that takes a prefix, int64 `[1, tokens]`, and returns a cache that holds or restores its KV."""


def by_groups(tensor: torch.Tensor) -> torch.Tensor:
    """Round to eight bits in groups of 64 numbers, with a scale and a zero point in float32 for each."""
    wide = tensor.float().reshape(-1, GROUP)
    low, high = wide.aminmax(dim=1, keepdim=True)
    scale = (255 / (high - low)).clamp_(max=2e4)  # as hqq has it
    zero = -low * scale
    codes = (wide * scale + zero).round_().clamp_(0, 255)
    return ((codes - zero) / scale).view(tensor.shape).to(tensor.dtype)


@torch.no_grad()
def fill_cache(model: PreTrainedModel, cache: Cache, prefix: torch.Tensor) -> Cache:
    """Run a pass over the prefix, and return the cache."""
    model(input_ids=prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def quantized_by_hand(model: PreTrainedModel, prefix: torch.Tensor) -> Cache:
    """Return a cache of the prefix with keys and values rounded by `by_groups`."""
    cache = fill_cache(model, DynamicCache(config=model.config), prefix)
    for layer in cache.layers:
        layer.keys, layer.values = by_groups(layer.keys), by_groups(layer.values)
    return cache


def ways(model: PreTrainedModel, folder: Path, stack: ExitStack) -> Iterator[tuple[str, Fill]]:
    """Yield the names of the compared caches with functions that fill them; `stack` closes their stores."""
    config = model.config
    for codec in CODECS:
        store = stack.enter_context(KVStore(folder / codec, codec=codec, engine="posix", host_memory=0))

        def fill(prefix: torch.Tensor, store: KVStore = store) -> Cache:
            store.precompute(model, prefix, progress=False)
            return TieredCache(model, store, record=False)

        yield f"ours, {codec}", fill
    if HAS_FP8:
        yield "QuantizedCache, fp8", lambda prefix: fill_cache(model, QuantizedCache("fp8", config), prefix)
    if is_hqq_available():
        options = {"nbits": 8, "axis_key": 1, "axis_value": 1, "q_group_size": GROUP}
        yield (
            "QuantizedCache, hqq, 8 bits",
            lambda prefix: fill_cache(model, QuantizedCache("hqq", config, **options), prefix),
        )
    else:
        yield "8 bits in groups of 64, by hand", lambda prefix: quantized_by_hand(model, prefix)


def questions(folder: Path, tokens: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield contexts in multiples of 16 tokens, question and answer, int64 `[1, n]`, and the length of the answer."""
    from eval.data import Data
    from eval.reference import check
    from eval.reference.language import Language
    from eval.tasks.ruler.haystack import sentences

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = np.array(tokenizer(" ".join(sentences(Data(None))), add_special_tokens=False)["input_ids"])
    for context, question in check.questions(Language(tokenizer, text), tokens, count, seed=0):
        ids = [token for document in context.documents for token in document]
        border = len(ids) // HASH_TOKENS * HASH_TOKENS
        ids = torch.tensor([[*ids, *question.prompt, *question.answer]])
        yield ids[:, :border], ids[:, border:], len(question.answer)


@torch.no_grad()
def agreement(
    model: PreTrainedModel, folder: Path, tokens: int, count: int, compared: dict[str, Fill]
) -> dict[str, Any]:
    """Compare each variant with full KV: top-1 agreement, divergence, and right answers."""
    rows_by_way: dict[str, dict[str, list[float]]] = {}

    def note(way: str, logits: torch.Tensor, full: torch.Tensor, suffix: torch.Tensor, answer: int) -> None:
        log_probs, full_log_probs = logits.log_softmax(-1), full.log_softmax(-1)
        row = rows_by_way.setdefault(way, {"top1": [], "kl": [], "right": []})
        row["top1"] += (log_probs.argmax(-1) == full_log_probs.argmax(-1)).double().tolist()
        row["kl"] += (full_log_probs.exp() * (full_log_probs - log_probs)).sum(-1).clamp(min=0).tolist()
        row["right"].append(float((logits[-answer - 1 : -1].argmax(-1) == suffix[0, -answer:]).all()))

    for prefix, suffix, answer in tqdm(questions(folder, tokens, count), total=count, unit="question"):

        def ask(cache: Cache, suffix: torch.Tensor = suffix) -> torch.Tensor:
            out = model(input_ids=suffix, past_key_values=cache, use_cache=True)
            return out.logits[0, -suffix.shape[1] :].double()

        full = ask(fill_cache(model, DynamicCache(config=model.config), prefix))
        note("full KV", full, full, suffix, answer)
        for way, fill in compared.items():
            cache = fill(prefix)
            if isinstance(cache, TieredCache):
                logits = ask_behind(model, cache, prefix, suffix)
                assert cache.stats.tokens_restored == prefix.shape[1], "the prefix was not restored"
            else:
                logits = ask(cache)
            note(way, logits, full, suffix, answer)
    return {
        way: {
            "tokens": len(row["kl"]),
            "top1_percent": 100 * float(np.mean(row["top1"])),
            "kl_mean": float(np.mean(row["kl"])),
            "kl_p99": float(np.quantile(row["kl"], 0.99)),
            "kl_max": float(np.max(row["kl"])),
            "right_percent": 100 * float(np.mean(row["right"])),
        }
        for way, row in rows_by_way.items()
    }


def ask_behind(model: PreTrainedModel, cache: TieredCache, prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    """Return the logits of `suffix`, float64 `[tokens, vocabulary]`, after a prefix that the cache restores."""
    ids = torch.cat([prefix, suffix], dim=1)
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=suffix.shape[1]).logits[0].double()


# --- reporting


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info = document["machine"]
    text = [
        "# Codecs\n",
        f"{machine_text(machine_info)} "
        f"Load average {document['load'][0]:.1f} at the beginning and {document['load'][1]:.1f} at the end; above "
        f"{machine_info['cores']}, other programs were running.\n",
        f"## Bytes and times, shape of {document['shape']}\n",
        f"A stored prefix and a suffix of {SUFFIX} tokens; medians of {document['repeats']} turns. The slow disk has "
        f"{document['bandwidth'] / 1e6:.0f} MB/s. In brackets: bytes relative to raw, and the median speedup over raw "
        "within a turn.\n",
    ]
    rows = [
        [
            f"{result['prefix']}, {result['dtype']}, {codec}",
            f"{sizes[codec] / 2**20:.1f} MiB ({sizes[codec] / sizes['raw']:.3f})",
            *(
                f"{1e3 * median(times[codec]):.0f} ms ({ratio(times['raw'], times[codec]):.2f} ×)"
                for times in (result["ttft_s"][place] for place in PLACES)
            ),
        ]
        for result in document["times"]
        for sizes in [result["bytes_on_disk"]]
        for codec in CODECS
    ]
    text += [table(["prefix, dtype, codec", "on disk", *(f"first token, {place}" for place in PLACES)], rows)]
    text += ["## Agreement with full KV\n", document["beside"] + "\n"]
    for name, result in document["agreement"].items():
        if "skipped" in result:
            text.append(f"*{name}*: not measured, {result['skipped']}.\n")
            continue
        head = f"### {name}, {result['questions']} questions about contexts of {result['context']} tokens\n"
        rows = [
            [
                way,
                f"{row['top1_percent']:.2f} %",
                *(f"{row[key]:.1e}" for key in ("kl_mean", "kl_p99", "kl_max")),
                f"{row['right_percent']:.1f} %",
            ]
            for way, row in result["ways"].items()
        ]
        text += [
            head,
            table(["KV", "top-1 agreement", "KL, mean", "KL, 99th percentile", "KL, maximum", "right answers"], rows),
        ]
    text.append(
        "KL: divergence of the next token's distribution from that of full KV, in nats, over all tokens of questions "
        "and answers. Our codecs encode keys before rotation. QuantizedCache, and hqq's scheme, encode rotated keys, "
        "and the backend fp8 also encodes the tokens after the prefix. These models are small (8 layers, heads of 32 "
        "dimensions); large ones have not been measured.\n"
    )
    return "\n".join(text)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    add_shape(parser, "1024,4096", repeats=7)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="data types, separated by commas")
    parser.add_argument("--bandwidth", type=float, default=100e6, help="bytes per second of the slow disk")
    parser.add_argument(
        "--models", default="eval/reference/xs", help="folders of reference models, separated by commas"
    )
    parser.add_argument("--tokens", default="512", help="number of context tokens for each model, separated by commas")
    parser.add_argument("--questions", default="100", help="number of questions for each model, separated by commas")
    parser.add_argument("--store", type=Path, help="folder on the disk to measure (default: a temporary one)")
    arguments = parser.parse_args()
    folder, load_before = Path(tempfile.mkdtemp(prefix="bench-codec-", dir=arguments.store)), os.getloadavg()[0]
    try:
        times = []
        for dtype in arguments.dtypes.split(","):
            bench = Bench(arguments, dtype, folder)
            for prefix in tqdm(arguments.prefixes.split(","), desc=dtype):
                times.append({"dtype": dtype} | bench.run(int(prefix)))
            del bench
            gc.collect()
        agreement_by_model: dict[str, Any] = {}
        settings = zip(
            *(values.split(",") for values in (arguments.models, arguments.tokens, arguments.questions)), strict=True
        )
        for model, tokens, count in ((Path(name), int(tokens), int(count)) for name, tokens, count in settings):
            if not (model / "config.json").exists():
                agreement_by_model[model.name] = {"skipped": "the model is not here"}
                continue
            for dtype in arguments.dtypes.split(","):
                stores = folder / f"{model.name}-{dtype}"
                loaded_model = load(model, getattr(torch, dtype), torch.device("cpu"))
                with ExitStack() as stack:
                    ways_of_model = agreement(
                        loaded_model, model, tokens, count, dict(ways(loaded_model, stores, stack))
                    )
                agreement_by_model[f"{model.name} {dtype}"] = {
                    "dtype": dtype,
                    "context": tokens,
                    "questions": count,
                    "ways": ways_of_model,
                }
        document = {
            "shape": arguments.shape,
            "repeats": arguments.repeats,
            "bandwidth": arguments.bandwidth,
            "load": [load_before, os.getloadavg()[0]],
            "machine": machine(torch.device("cpu"), folder),
            "times": times,
            "agreement": agreement_by_model,
            "beside": "hqq is installed: QuantizedCache with eight bits is that of transformers."
            if is_hqq_available()
            else "hqq is not installed, and quanto has no eight bits. hqq's scheme is computed directly (groups "
            "of 64, scale and zero point in float32, from minimum and maximum).",
        }
        publish(arguments.out, "codec-cpu", document, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
