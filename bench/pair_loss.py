"""Loss of merging single pairs of layers: what a replay of a conversation's last tokens says of each pair.

    PYTHONPATH=. python bench/pair_loss.py --model smollm2-135m --tokens 800 --data DATA

Each pair of neighboring layers, and of layers next to a neighbor, is merged alone, as `Krul` would. The page reports
the mean angle between the layers' keys and values, by how much the merge changes them, and the KL divergence of the
last 32 tokens' predictions. Chats are from people (ShareGPT); a reference model reads its own language.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversation_answers import chat, questions
from lib.common import load, parser_of
from lib.pages import machine, machine_text, publish, table
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from eval.models import resolve
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.suspend import CacheReplay
from hf_tiered_cache.conversations.sharing import MARGIN
from hf_tiered_cache.methods import Krul
from hf_tiered_cache.patches.tap import RotaryTap
from hf_tiered_cache.store.codecs import merged_codec
from hf_tiered_cache.store.pairs import angle, merge_layers

CPU = torch.device("cpu")
METHOD = Krul()


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="eval/reference/xs", help="folder, or short name of eval.models")
    parser.add_argument("--tokens", type=int, default=480, help="number of tokens in a conversation")
    parser.add_argument("--count", type=int, default=2, help="number of conversations")
    parser.add_argument("--data", type=Path, help="folder with data sets, including sharegpt")
    arguments = parser.parse_args(argv)
    arguments.answer, arguments.name = 32, Path(arguments.model).name
    arguments.model = Path(resolve(arguments.model))
    return arguments


@torch.no_grad()
def replay_of(model: PreTrainedModel, store: KVStore, ids: torch.Tensor) -> CacheReplay:
    """Return a replay of the last tokens of a conversation, int `[1, tokens]`, over KV in memory."""
    cache = TieredCache(model, store, record=False)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

    def run(replayed_ids: torch.Tensor, replayed: Any, tap: RotaryTap) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=replayed_ids, past_key_values=replayed).logits
        return logits

    return CacheReplay(run, cache.layers, ids, RotaryTap())


def figures_of(replay: CacheReplay, first: int, second: int) -> dict[str, float]:
    """Return angle in degrees, relative change and loss of one merged pair."""
    before = replay.kv(first), replay.kv(second)
    after = merge_layers(*before, merged_codec(METHOD.geometry.codec), METHOD.toward, METHOD.retained)
    tensors = [(old, new) for pair in zip(before, after, strict=True) for old, new in zip(*pair, strict=True)]
    return {
        "angle": math.degrees(
            np.mean([float(angle(*tensor_pair).mean()) for tensor_pair in zip(*before, strict=True)])
        ),
        "change": float(np.mean([float((new - old).norm() / old.norm()) for old, new in tensors])),
        "KL": replay.loss({first: after[0], second: after[1]}),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each pair, by its layers, over conversations."""
    model = load(arguments.model, torch.float32, CPU)
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    pairs = [(full[at], full[at + step]) for step in (1, 2) for at in range(len(full) - step)]
    figures = dict[str, dict[str, list[float]]]()
    with KVStore(folder) as store:
        for talk in (questions if arguments.data is None else chat)(arguments, 1, arguments.count):
            replay = replay_of(model, store, talk.ids)
            for first, second in tqdm(pairs, desc="pairs"):
                for name, value in figures_of(replay, first, second).items():
                    figures.setdefault(f"{first}-{second}", {}).setdefault(name, []).append(value)
    return figures


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    limit = METHOD.quality / MARGIN if METHOD.quality is not None else 0.0
    pairs = sorted(document["pairs"].items(), key=lambda item: np.mean(item[1]["KL"]))
    rows = [
        [name, f"{np.mean(figures['angle']):.0f}", f"{np.mean(figures['change']):.2f}", f"{np.mean(figures['KL']):.4f}"]
        for name, figures in pairs
    ]
    count, accepted = (
        sum(len(figures["KL"]) for _, figures in pairs),
        sum(loss <= limit for _, figures in pairs for loss in figures["KL"]),
    )
    return (
        f"# Loss of single merged pairs of layers: {document['model']}, {document['tokens']} tokens\n\n"
        f"{machine_text(document['machine'])} float32, {document['count']} conversations. *Angle*: degrees, mean over "
        "tokens, heads, keys and values. *Change*: relative distance of the merged keys and values. *KL*: nats per "
        f"token, mean of the last 32 tokens. Of {count} merges, {accepted} lose at most {limit:g} nats, the "
        "limit of `Krul()`.\n\n" + table(["layers", "angle", "change", "KL"], rows)
    )


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    with tempfile.TemporaryDirectory() as folder:
        machine_info, pairs = machine(CPU, Path(folder)), measure(arguments, Path(folder))
    document = {"machine": machine_info, "model": arguments.name, "pairs": pairs}
    document |= {"tokens": arguments.tokens, "count": arguments.count}
    publish(arguments.out, f"pair-loss-{arguments.name}", document, report)


if __name__ == "__main__":
    main()
