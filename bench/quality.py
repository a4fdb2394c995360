"""Measure whether quality targets are met on text that was not used for calibration.

    PYTHONPATH=. python bench/quality.py --model smollm2-135m --data DATA

The loss of methods is calibrated on one kind of text (a story, `store.calibrate_quality`). Prompts of other kinds then
use `quality=` as the target, and are compared with full KV: mean loss of the first token, share of the prompts that
lose at most twice the target, and bytes read. Methods that learn do so from the questions in their order.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.pages import machine, save, table
from tqdm.auto import tqdm
from transformers import DynamicCache

import eval.baselines  # noqa: F401  # registers them
from eval.data import Data
from eval.encode import encode
from eval.models import load, revision_of
from eval.tasks import Draw, find_tasks
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.calibrations import keep_quality
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.methods import make_method

STORY = Path(__file__).parent.parent / "examples" / "data" / "a_scandal_in_bohemia_part_1.txt"
METHODS = "contiguous_kv,contiguous_kv:codec=int8,h2o"
TARGETS = (0.005, 0.02, 0.1)


@torch.no_grad()
def loss(model: Any, ids: torch.Tensor, prefix: Any, cache: TieredCache) -> float:
    """Return the KL divergence of the token after `ids`, `[1, tokens]`, from full KV, in nats.

    Args:
        model: Model to run.
        ids: Prefix and question.
        prefix: Keys and values of the prefix by layer.
        cache: Cache that restores the prefix.
    """
    dynamic = DynamicCache()
    for layer, layer_kv in enumerate(prefix):
        dynamic.update(*layer_kv, layer)
    new_ids = ids[:, dynamic.get_seq_length() :]
    full_logprobs = (
        model(input_ids=new_ids, past_key_values=dynamic, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
    )
    logprobs = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
    return float((full_logprobs.exp() * (full_logprobs - logprobs)).sum().clamp(min=0))


@torch.no_grad()
def ask(model: Any, prompts: list[Any], method: Any, findings: list[Any], target: float) -> dict[str, Any]:
    """Return the loss of a method with a target over prompts sorted by prefix, and the bytes it read."""
    losses, read_shares, budgets, last_prefix, prefix = [], [], [], None, []
    with tempfile.TemporaryDirectory() as folder, KVStore(folder, policy=method.policy, host_memory="2GiB") as store:
        keep_quality(store._storage, Fingerprinter(model)(), findings)
        for prompt in tqdm(prompts, desc=f"{target:g}", unit="question", leave=False):
            if prompt.prefix != last_prefix:
                last_prefix, cache = prompt.prefix, DynamicCache()
                model(input_ids=torch.tensor([prompt.prefix]), past_key_values=cache, logits_to_keep=1)
                prefix = [(layer.keys, layer.values) for layer in cache.layers]
                store.precompute(model, list(prompt.prefix), method=method, progress=False)
            cache = TieredCache(model, store, method=method, record=False)
            losses.append(loss(model, torch.tensor([prompt.whole]), prefix, cache))
            stats, config = cache.stats, model.config
            heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            kv = stats.tokens_restored * config.num_hidden_layers * 2 * heads * width * model.dtype.itemsize
            read_shares.append((stats.details.bytes_delivered - stats.details.bytes_delivered_identifying) / max(1, kv))
            budgets.append(cache.method.budget)
            del cache
            store.flush()
    return {
        "target": target,
        "budget": budgets[0],
        "loss": float(np.mean(losses)),
        "within_twice": float(np.mean(np.array(losses) <= 2 * target)),
        "brought": float(np.mean(read_shares)),
        "prompts": len(losses),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="short name of eval.models, name on the Hub, or folder")
    parser.add_argument("--methods", default=METHODS, help="methods, separated by commas")
    parser.add_argument("--tasks", default="sst2,rte,squad", help="tasks, separated by commas")
    parser.add_argument("--data", type=Path, help="folder with data sets (default: the Hub)")
    parser.add_argument("--tokens", type=int, default=1000, help="approximate number of tokens in a prefix")
    parser.add_argument("--limit", type=int, default=24, help="number of prompts per task")
    parser.add_argument("--text", type=Path, default=STORY, help="text for the calibration")
    parser.add_argument("--seed", type=int, default=49, help="random seed")
    parser.add_argument("--out", type=Path, help="folder for results (default: print them)")
    return parser.parse_args(arguments)


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    arguments = document["arguments"]
    rows = [
        [
            *(row["method"], row["task"], f"{row['target']:g}", f"{row['budget']:.0%}", f"{row['loss']:.2g}"),
            *(f"{row['within_twice']:.0%}", f"{row['brought']:.0%}"),
        ]
        for row in document["rows"]
    ]
    calibrated = [
        [
            finding["method"],
            f"{finding['budget']:.0%}",
            f"{np.mean(finding['losses']):.2g}",
            f"{finding['brought']:.0%}",
        ]
        for finding in document["calibrated"]
    ]
    return "\n".join(
        [
            "# Quality targets on text that was not used for calibration\n",
            f"{arguments['model']}, float32, prefixes of about {arguments['tokens']:,} tokens, {arguments['limit']} "
            "prompts of each task. Losses are KL divergences of the first token from full KV, in nats. *KV read*: "
            "bytes read for the first token, as a share of the prefix's KV, without the index.\n",
            table(["method", "task", "target", "budget", "mean loss", "within twice the target", "KV read"], rows),
            f"\n## Calibrated on {arguments['text']}\n",
            table(["method", "budget", "mean loss", "KV read"], calibrated),
        ]
    )


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    model, tokenizer = load(arguments.model, "float32")
    ids = tokenizer(arguments.text.read_text(), add_special_tokens=False)["input_ids"]
    texts = [ids[at : at + arguments.tokens] for at in range(0, len(ids) - arguments.tokens + 1, arguments.tokens)]
    methods = arguments.methods.split(",")
    with tempfile.TemporaryDirectory() as folder, KVStore(folder) as store:
        findings = store.calibrate_quality(model, texts, methods=methods)
    draw = Draw(Data(arguments.data), arguments.limit, arguments.seed, arguments.tokens, tokenizer)
    prompts_by_task = {}
    for task in find_tasks(arguments.tasks):
        prompts = [encode(example, task, tokenizer, 1 << 20, True) for example in task.examples(draw)]
        prompts_by_task[task.name] = sorted(prompts, key=lambda prompt: prompt.prefix)
    rows: list[dict[str, Any]] = []
    for name in methods:
        for target in TARGETS:
            method = make_method(f"{name}:quality={target}")
            for task, prompts in prompts_by_task.items():
                rows.append({"method": name, "task": task} | ask(model, prompts, method, findings, target))
    name = Path(arguments.model).name
    document = {
        "arguments": {**vars(arguments), "model": name, "data": None, "out": None, "text": arguments.text.name},
        "weights": revision_of(arguments.model),
        "machine": machine(torch.device("cpu"), Path(__file__).parent),
        "calibrated": [asdict(finding) for finding in findings],
        "rows": rows,
    }
    text = report(document)
    print(text)
    if arguments.out is not None:
        save(arguments.out, f"quality-{name}", document, text)


if __name__ == "__main__":
    main()
