"""Measure whether heads attend to the same tokens, as IMPRESS assumes: its test, on pretrained models.

    PYTHONPATH=. python bench/heads_agree.py --model smollm2-135m qwen2.5-coder-0.5b --data DATA

At each selection of IMPRESS (one per layer and question), all KV heads are probes: each selects its tokens of the
prefix. The page reports the mean Jaccard index of the sets of two heads, the share of the selections in which it
reaches IMPRESS's threshold, so that one set is used for all heads, and the index of two random sets.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choices import questions
from lib.common import add_questions, parser_of
from lib.pages import draw, machine, save, table
from tqdm.auto import tqdm

from eval.models import load
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import Impress
from hf_tiered_cache.selection.selectors import ProbeHeads, jaccard_threshold, mean_jaccard


@dataclass(frozen=True)
class ComparedHeads(ProbeHeads):
    """Probe heads that record the similarity of their selections.

    Args:
        alike: Mean Jaccard index and threshold of each selection.
    """

    alike: list[tuple[float, float]] = field(default_factory=list, compare=False, repr=False)

    def agree(self, sets: np.ndarray, tokens: int) -> bool:
        self.alike.append((mean_jaccard(sets), jaccard_threshold(sets.shape[1], tokens, self.alpha)))
        return super().agree(sets, tokens)


@dataclass(frozen=True, kw_only=True)
class ComparingImpress(Impress):
    """IMPRESS with `ComparedHeads`; see there for the arguments."""

    alike: list[tuple[float, float]] = field(default_factory=list, compare=False, repr=False)

    def selector(self) -> ProbeHeads:
        return ComparedHeads(heads=self.probe_heads, alpha=self.alpha, alike=self.alike)


@torch.no_grad()
def measure(model: Any, prompts: list[tuple[list[int], list[int]]], budget: float) -> np.ndarray:
    """Return the Jaccard index and the threshold of each question and layer, `[questions, layers, 2]`."""
    heads, similarities = model.config.num_key_value_heads, []
    with tempfile.TemporaryDirectory() as folder, KVStore(folder, policy=Impress.policy) as store:
        for prefix, question in tqdm(prompts, desc=f"{budget:.0%}", unit="question", leave=False):
            method = ComparingImpress(budget=budget, probe_heads=heads, reorder=False)
            store.precompute(model, prefix, method=method, progress=False)
            cache = TieredCache(model, store, method=method, record=False)
            model(input_ids=torch.tensor([prefix + question]), past_key_values=cache, logits_to_keep=1)
            similarities.append(method.alike)
    return np.array(similarities)


def summary(similarities: np.ndarray, budget: float) -> list[str]:
    """Return the cells of one row."""
    alike, threshold = similarities[..., 0], similarities[..., 1]
    agreeing = alike >= threshold
    random = budget / (2 - budget)
    return [
        *(f"{alike.mean():.2f}", f"{random:.2f}", f"{threshold.mean():.2f}", f"{100 * agreeing.mean():.0f}"),
        *(f"{alike.mean(0).min():.2f}", f"{alike.mean(0).max():.2f}"),
    ]


def plot(plt: Any, runs: list[dict[str, Any]]) -> Any:
    """Plot the index of each layer: a panel for each model, a color for each task, dotted for the smaller budget."""
    models = list(dict.fromkeys(run["model"] for run in runs))
    tasks, budgets = (list(dict.fromkeys(run[key] for run in runs)) for key in ("task", "budget"))
    figure, axes = plt.subplots(1, len(models), figsize=(5 * len(models) + 2, 3.6), sharey=True, squeeze=False)
    for panel, model in zip(axes[0], models, strict=True):
        for run in (run for run in runs if run["model"] == model):
            alike = np.array(run["alike"])[..., 0].mean(0)
            look = {"color": f"C{tasks.index(run['task'])}", "ls": (":", "-", "--")[budgets.index(run["budget"]) % 3]}
            panel.plot(alike, label=f"{run['task']}, {run['budget']:.0%}", **look)
        panel.set(title=model, xlabel="layer", ylim=(0, 1))
    axes[0][0].set_ylabel("Jaccard index of the tokens of two heads")
    axes[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model", nargs="+", required=True, help="names for eval.models.load; models with at least two KV heads"
    )
    add_questions(parser, tasks="sst2,rte,squad,text", limit=8)
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.1, 0.25], help="budgets, as shares of the prefix"
    )
    return parser.parse_args(arguments)


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    rows = [
        [
            *(run["model"], f"{run['kv_heads']}", run["task"], f"{run['budget']:.0%}"),
            *summary(np.array(run["alike"]), run["budget"]),
        ]
        for run in document["runs"]
    ]
    headings = [
        *("model", "KV heads", "task", "budget", "Jaccard", "Jaccard, random sets", "threshold", "agree, %"),
        *("lowest layer", "highest layer"),
    ]
    return (
        f"# Do heads attend to the same tokens?\n\nPrefixes of about {document['tokens']:,} tokens, "
        f"{document['runs'][0]['questions']} questions of each task, float32. *Jaccard*: index of the tokens that two "
        "KV heads select, mean over questions, layers and heads, with its lowest and highest mean of one layer. "
        f"*Agree*: share of the selections in which it reaches IMPRESS's threshold (alpha {Impress.alpha:g}), so that "
        f"the set of the probe heads is used for all heads.\n\n{table(headings, rows)}\n"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    runs: list[dict[str, Any]] = []
    for name in arguments.model:
        model, tokenizer = load(name, "float32")
        for task in arguments.tasks.split(","):
            prompts = list(questions(arguments, tokenizer, task))
            for budget in arguments.budgets:
                similarities = measure(model, prompts, budget)
                run = {"model": Path(name).name, "task": task, "budget": budget, "questions": len(prompts)}
                runs.append(
                    run | {"kv_heads": model.config.num_key_value_heads, "alike": similarities.round(4).tolist()}
                )
    document = {
        "machine": machine(torch.device("cpu"), Path(__file__).parent),
        "tokens": arguments.tokens,
        "runs": runs,
    }
    text = report(document)
    save(arguments.out, "heads-agree", document, text)
    draw(plot, runs, arguments.out / "heads-agree.png")
    print(text)


if __name__ == "__main__":
    main()
