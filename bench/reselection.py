"""Cost of reselection while decoding: tokens per second, compared with one selection for the prompt, and with all KV.

    python bench/reselection.py                                    # Qwen2.5-0.5B's shape, random weights
    python bench/reselection.py --model FOLDER --prefix 512  # a trained model, whose selections change less

*Each token* is the default: a new selection replaces the current one if it holds 5 % more of the token's attention.
With *gain=0*, each new selection replaces the current one. Random weights spread attention evenly, so no selection
gains 5 %. The former therefore shows the cost of selecting; the latter replaces most of the selection at each token.

Each variant has a cache of its own over the same prefix, and decodes the same tokens. Variants take turns token by
token. Ratios are those of sums over tokens. For answers with one selection and with reselection, see
eval/results/reference-xs.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.common import SHAPES, build, interleaved, listed, load, median, parser_of, seconds
from lib.pages import machine, machine_text, save, table
from tqdm.auto import tqdm

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV

SUFFIX = 32
AIM = 1.05
WAYS: dict[str, dict[str, Any]] = {
    "once": {"reselect": False},
    "each token": {},
    "each token, gain=0": {"gain": 0},
}
AGAIN = [name for name in WAYS if name != "once"]


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="shape of a model with random weights")
    parser.add_argument("--model", type=Path, help="folder of a model to use instead")
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--device", default="cpu", help="device of the model")
    parser.add_argument("--prefix", type=int, default=1024, help="number of stored tokens")
    parser.add_argument("--budgets", type=listed(float), default=[0.05, 0.1], help="budgets, as shares of the prefix")
    parser.add_argument("--periods", type=listed(int), default=[2, 8], help="numbers of layers per selection")
    parser.add_argument("--tokens", type=int, default=32, help="number of decoded tokens")
    return parser.parse_args(argv)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    model = load(arguments.model, dtype, device) if arguments.model else build(arguments.shape, dtype, device)
    random = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    ids = torch.randint(1, vocabulary, (1, arguments.prefix + SUFFIX), generator=random).to(device)
    tokens = torch.randint(1, vocabulary, (arguments.tokens + 3,), generator=random).to(device)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        machine_info = machine(device, Path(folder))
        for period in tqdm(arguments.periods, desc="periods"):
            with KVStore(Path(folder) / str(period), policy=ContiguousKV.policy) as store:
                for budget in arguments.budgets:
                    figures = measure(model, store, ids, tokens, period, budget)
                    results.append({"period": period, "budget": budget, **figures})
    name = arguments.model.name if arguments.model else arguments.shape
    document = {"machine": machine_info, "prefix": arguments.prefix, "tokens": arguments.tokens, "results": results}
    text = report(results, f"{name}, {arguments.dtype}", machine_info, arguments.prefix)
    save(arguments.out, f"reselection-{name}-{arguments.dtype}-{arguments.device}", document, text)
    print(text)


def measure(
    model: Any, store: KVStore, ids: torch.Tensor, tokens: torch.Tensor, period: int, budget: float
) -> dict[str, float]:
    """Measure the seconds per token of each variant: medians, and ratios of sums over one selection."""
    methods: dict[str, Any] = {name: ContiguousKV(budget, period=period, **settings) for name, settings in WAYS.items()}
    store.precompute(model, ids[:, :-SUFFIX], method=methods["once"], progress=False)
    caches = {}
    for name, method in (methods | {"all KV": None}).items():
        caches[name] = TieredCache(model, store, method=method, record=False)
        model(input_ids=ids, past_key_values=caches[name], logits_to_keep=1)
        assert caches[name].stats.tokens_restored, caches[name].stats.reason
    times: dict[str, list[float]] = {name: [] for name in caches}
    for token in tokens:
        step = {name: partial(decode_seconds, model, cache, token) for name, cache in caches.items()}
        for name, (token_times,) in interleaved(step, 1, warm_up=0).items():
            times[name].append(token_times)
    warm_times = {name: token_times[3:] for name, token_times in times.items()}  # the first tokens run cold code
    figures = {name: median(token_times) for name, token_times in warm_times.items()}
    return figures | {f"{name} / once": sum(warm_times[name]) / sum(warm_times["once"]) for name in AGAIN}


def decode_seconds(model: Any, cache: TieredCache, token: torch.Tensor) -> float:
    """Measure the seconds of one decoded token."""
    return seconds(lambda: model(input_ids=token.view(1, 1), past_key_values=cache), token.device)


def report(results: list[dict[str, Any]], model_text: str, machine_info: dict[str, Any], prefix: int) -> str:
    """Return the page in Markdown."""
    rows = [
        [
            str(row["period"]),
            f"{row['budget']:.0%}",
            *(f"{1 / row[name]:.1f}" for name in ("all KV", *WAYS)),
            *(f"{row[f'{name} / once']:.2f}" for name in AGAIN),
        ]
        for row in results
    ]
    headings = [
        "period",
        "budget",
        "all KV",
        *(f"selected {name}" for name in WAYS),
        *(f"{name} / once" for name in AGAIN),
    ]
    return (
        f"# Reselection while decoding: {model_text}, {machine_info['device']}\n\n"
        f"{machine_text(machine_info)} A prefix of {prefix} "
        f"tokens. Cells: tokens per second, and time relative to one selection (aim: at most {AIM}).\n\n"
        + table(headings, rows)
    )


if __name__ == "__main__":
    main()
