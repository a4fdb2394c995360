"""Simulate selections within a budget: loss of the first token, by how KV is cut, shared and ordered.

    PYTHONPATH=. python bench/choices.py --model smollm2-135m --data DATA  # SST-2, RTE and running text, 1,000 tokens
    PYTHONPATH=. python bench/choices.py --model MODEL --data DATA --tasks text --tokens 4000 --half 1

The prefix is computed once. The last queries of each layer then select what the question attends to, as in
`ContiguousKV`. The first token is compared with that of full KV: KL divergence in nats, and top-1 agreement. Nothing is
stored or read.

A variant determines the unit of selection (a token or a chunk), which heads and layers share a selection, and the order
in which tokens are cut into units. The order is by position, by clusters of keys (spherical k-means, known when a
prompt is stored), or by the attention of earlier questions about the same prefix (known from the second question on).
Variants that need an earlier question are compared on the questions that have one ("later questions").
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import add_questions, listed
from lib.pages import machine, save, table
from torch.nn.functional import normalize, pad
from tqdm.auto import tqdm
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eval.data import Data
from eval.encode import encode
from eval.models import load
from eval.tasks import Draw, find_tasks
from hf_tiered_cache.selection.selectors import head_mass

QUERIES = 8
"""Number of last tokens of a question that select, as in `ContiguousKV`."""
CLUSTER_TOKENS, ITERATIONS = 16, 8
_NAME = "simulated_choice"


@dataclass(frozen=True)
class Way:
    """Rule by which tokens are selected.

    Args:
        unit: Number of tokens that are selected together.
        heads: Heads that share a selection: each "query" head, each "kv" head, or "all" heads together.
        layers: Number of layers that share a selection.
        solo: Number of first layers with a selection of their own.
        order: Order in which tokens are cut into units: "position", "clusters" or "questions".
    """

    unit: int
    heads: str = "kv"
    layers: int = 1
    solo: int = 0
    order: str = "position"


WAYS = {
    "tokens, per query head": Way(1, "query"),
    "tokens, per kv head": Way(1),
    "chunks of 4, per kv head": Way(4),
    "chunks of 8, per kv head": Way(8),
    "chunks of 8, all heads, 2 layers": Way(8, "all", 2, solo=1),
    "chunks of 16, all heads, 8 layers": Way(16, "all", 8),
    "clusters cut by 4, per kv head": Way(4, order="clusters"),
    "clusters cut by 8, per kv head": Way(8, order="clusters"),
    "earlier questions, cut by 8, per kv head": Way(8, order="questions"),
    "earlier questions, cut by 16, per kv head": Way(16, order="questions"),
}


@dataclass(eq=False)
class Prefix:
    """Prefix with its KV.

    Args:
        layers: Rotated keys and values of each layer, `[1, kv_heads, tokens, dim]`.
        attention: Attention of earlier questions by layer, float `[kv_heads, tokens]`.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    _clusters: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.layers[0][0].shape[2]

    def order(self, name: str, layer: int) -> torch.Tensor:
        """Return the tokens of each kv head in an order, int64 `[kv_heads, tokens]`."""
        if name == "questions":
            return self.attention[layer].argsort(dim=1, descending=True)
        if layer not in self._clusters:
            self._clusters[layer] = torch.stack([by_clusters(keys) for keys in self.layers[layer][0][0].float()])
        return self._clusters[layer]


def by_clusters(keys: torch.Tensor) -> torch.Tensor:
    """Return the tokens of one head, whose keys are `[tokens, dim]`, cluster by cluster: int64 `[tokens]`."""
    points = normalize(keys - keys.mean(0), dim=1)
    centres = points[torch.linspace(0, len(points) - 1, max(1, len(points) // CLUSTER_TOKENS)).long()]
    for _ in range(ITERATIONS):
        nearest = (points @ centres.T).argmax(dim=1)
        centres = normalize(torch.zeros_like(centres).index_add_(0, nearest, points), dim=1)
    return nearest.argsort(stable=True)


@dataclass(eq=False)
class Choice:
    """Selections of one pass over a question.

    Args:
        way: Rule of the selection; None to attend to all, and record the attention in `mass`.
        share: Share of the prefix's units.
        prefix: Prefix from which to select.
    """

    way: Way | None
    share: float
    prefix: Prefix
    mass: dict[int, torch.Tensor] = field(default_factory=dict)
    _selected: dict[int, torch.Tensor] = field(default_factory=dict)

    def visible(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor | None:
        """Return which restored tokens each query head attends to, bool `[heads, tokens]`; None for all.

        Args:
            layer: Number of the layer.
            query: Rotated queries, `[heads, n, dim]`.
            keys: Rotated keys, `[kv_heads, tokens + n, dim]`.
            scaling: Scale of the logits.
        """
        tokens, heads = self.prefix.tokens, len(query)
        prefix_keys, new_keys = keys[:, :tokens], keys[:, tokens:]
        if self.way is None:
            layer_mass = head_mass(query[:, -QUERIES:], prefix_keys, new_keys, scaling)  # [kv_heads, tokens]
            self.mass[layer] = layer_mass / layer_mass.sum(1, keepdim=True)
            return None
        first = layer - max(0, layer - self.way.solo) % self.way.layers
        if first not in self._selected:
            single = self.way.heads == "query"
            group = heads // len(keys)
            wide = [part.repeat_interleave(group, 0) if single else part for part in (prefix_keys, new_keys)]
            mass = head_mass(query[:, -QUERIES:], *wide, scaling)  # [heads or kv_heads, tokens]
            if self.way.heads == "all":
                mass = mass.sum(0, keepdim=True)
            self._selected[first] = self._best(layer, mass)
        return self._selected[first].repeat_interleave(heads // len(self._selected[first]), 0)

    def _best(self, layer: int, mass: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the best units, bool `[selections, tokens]`."""
        unit, tokens = self.way.unit, mass.shape[1]
        order = None if self.way.order == "position" else self.prefix.order(self.way.order, layer)
        if order is not None:
            mass = mass.gather(1, order)
        units = pad(mass, (0, -tokens % unit)).unflatten(1, (-1, unit)).sum(2)
        best = units.topk(max(1, int(self.share * math.ceil(tokens / unit) + 1e-9)), dim=1).indices
        is_selected = (
            torch.zeros_like(units, dtype=torch.bool).scatter_(1, best, True).repeat_interleave(unit, 1)[:, :tokens]
        )
        return is_selected if order is None else torch.zeros_like(is_selected).scatter_(1, order, is_selected)


class Simulation:
    """Model whose attention is restricted to selected tokens.

    Args:
        model: Causal LM with one kind of attention layer.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._choice, self._plain = model, None, model.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attend)

    @torch.inference_mode()
    def prefix(self, ids: list[int]) -> Prefix:
        """Compute a prefix."""
        self._model.set_attn_implementation(self._plain)
        cache = DynamicCache()
        self._model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        return Prefix([(layer.keys, layer.values) for layer in cache.layers])

    @torch.inference_mode()
    def first_token(self, ids: list[int], choice: Choice) -> torch.Tensor:
        """Return the log-probabilities of the token after a question, float32 `[vocabulary]`."""
        cache = DynamicCache()
        for layer, layer_kv in enumerate(choice.prefix.layers):
            cache.update(*layer_kv, layer)
        self._choice = choice
        self._model.set_attn_implementation(_NAME)
        return self._model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].float().log_softmax(-1)

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        new, columns = query.shape[2], key.shape[2]
        mask = torch.arange(columns) <= torch.arange(columns - new, columns)[:, None]  # [new, columns]
        selected_mask = self._choice.visible(module.layer_idx, query[0], key[0], scale)
        if selected_mask is not None:
            mask = mask.expand(query.shape[1], -1, -1).clone()
            mask[:, :, : selected_mask.shape[1]] &= selected_mask[:, None]
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None


def questions(arguments: argparse.Namespace, tokenizer: Any, task_name: str) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prefixes and questions, those of one prefix together."""
    (task,) = find_tasks(task_name)
    draw = Draw(Data(arguments.data), arguments.limit, arguments.seed, arguments.tokens, tokenizer)
    prompts = [encode(example, task, tokenizer, 1 << 20) for example in task.examples(draw)]
    if arguments.half is not None:
        prompts = prompts[arguments.half :: 2]
    yield from sorted((list(prompt.prefix), list(prompt.question)) for prompt in prompts)


def measure(simulation: Simulation, prompts: list[tuple[list[int], list[int]]], shares: list[float]) -> list[dict]:
    """Return a row for each question, share and way: KL, agreement, and whether an earlier question was asked."""
    rows, prefix, last_ids = [], None, None
    for number, (ids, question) in enumerate(tqdm(prompts, unit="question")):
        if ids != last_ids:
            prefix, last_ids = simulation.prefix(ids), ids
        asked_before, everything = bool(prefix.attention), Choice(None, 1.0, prefix)
        full = simulation.first_token(question, everything)
        for share in shares:
            for name, way in WAYS.items():
                if way.order == "questions" and not asked_before:
                    continue
                logprobs = simulation.first_token(question, Choice(way, share, prefix))
                kl = float((full.exp() * (full - logprobs)).sum())
                is_same = bool(logprobs.argmax() == full.argmax())
                rows.append(
                    {"question": number, "share": share, "way": name, "kl": kl, "same": is_same, "later": asked_before}
                )
        for layer, layer_mass in everything.mass.items():
            prefix.attention[layer] = prefix.attention.get(layer, 0) + layer_mass
    return rows


def summary(rows: list[dict[str, Any]], share: float, way: str, later_only: bool) -> str:
    """Return the mean KL with a 95 % interval by bootstrap, and the agreement."""
    selected_rows = [
        row for row in rows if (row["share"], row["way"]) == (share, way) and (row["later"] or not later_only)
    ]
    if not selected_rows:
        return "–"
    losses = np.array([row["kl"] for row in selected_rows])
    means = losses[np.random.default_rng(0).integers(0, len(losses), (1000, len(losses)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{losses.mean():.3f} [{low:.3f}, {high:.3f}] / {100 * np.mean([row['same'] for row in selected_rows]):.0f}"


def report(document: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    arguments, parts = document["arguments"], ["# Simulated selections within a budget\n"]
    parts.append(
        f"{arguments['model']}, float32, prefixes of about {arguments['tokens']:,} tokens. Cells: mean KL divergence "
        "of the first token from full KV in nats, with its 95 % bootstrap interval / top-1 agreement in percent. "
        "Columns: share of the prefix's KV that each layer and head attends to. Indexes are not counted.\n"
    )
    for task, rows in document["tasks"].items():
        for later_only in (False, True):
            question_numbers = {row["question"] for row in rows if row["later"] or not later_only}
            if later_only and not question_numbers:
                continue
            heading = "later questions" if later_only else "all questions"
            lines = [
                [name, *(summary(rows, share, name, later_only) for share in arguments["shares"])]
                for name, way in WAYS.items()
                if later_only or way.order != "questions"
            ]
            headings = ["", *(f"{share:.0%}" for share in arguments["shares"])]
            parts.append(f"## {task}, {heading} ({len(question_numbers)})\n\n" + table(headings, lines))
    return "\n".join(parts)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="short name of eval.models, name on the Hub, or folder")
    add_questions(parser, tasks="sst2,rte,text", limit=64)
    shares = [0.05, 0.1, 0.25]
    parser.add_argument("--shares", type=listed(float), default=shares, help="budgets, as shares of the prefix")
    parser.add_argument("--out", type=Path, help="folder for results (default: print them)")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    model, tokenizer = load(arguments.model, torch.float32)
    simulation, name = Simulation(model), Path(arguments.model).name
    document: dict[str, Any] = {
        "arguments": {**vars(arguments), "model": name, "data": None, "out": None},
        "machine": machine(torch.device("cpu"), Path(__file__).parent),
        "tasks": {},
    }
    for task in arguments.tasks.split(","):
        prompts = list(questions(arguments, tokenizer, task))
        document["tasks"][task] = measure(simulation, prompts, arguments.shares)
    text = report(document)
    print(text)
    if arguments.out is not None:
        save(arguments.out, f"choices-{name}-{arguments.tokens}", json.loads(json.dumps(document)), text)


if __name__ == "__main__":
    main()
