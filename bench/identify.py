"""Recall of cheaper ways to select chunks, relative to a selection by all keys.

    PYTHONPATH=. python bench/identify.py --model eval/reference/xs

For the same queries, at every layer, the chunks that ContiguousKV selects by all keys are compared with selections by
keys in eight bits (identify="index"), by the keys of the first KV head, by the mean of each
chunk's keys, and by their minimum and maximum in each dimension (Quest, Tang et al. 2024). All keys are rotated. Recall
is the share of the chunks selected by all keys that the other selection contains. Contexts and questions are in the
language of the reference models. Layers continue with a quarter of the chunks, selected by all keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from lib.common import parser_of
from lib.pages import machine, save, table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.data import Data
from eval.reference.check import questions
from eval.reference.language import Language
from eval.tasks.ruler.haystack import sentences
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.selection.decode_index import Int8KeysIndex
from hf_tiered_cache.selection.selector import Selection, SelectionInput, budgeted_tokens, top_chunks
from hf_tiered_cache.selection.selectors import TopChunks, head_mass

BUDGETS = (0.05, 0.1, 0.25, 0.5)
WAYS = ("eight bits", "first KV head", "chunk means", "chunk min/max")

Note = dict[tuple[str, float], float]
"""Recall of each way at each budget, for one question and layer."""


def quest_mass(inputs: SelectionInput, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mass of each chunk by its bounds: the maximum score of a key within them, for each query.

    Args:
        inputs: Queries of the selection.
        chunks: Rotated keys of each chunk, `[kv_heads, its tokens, dim]`.

    Returns:
        Softmax over the chunks, summed over queries and heads, float32 `[chunks]`.
    """
    low, high = (torch.stack(bounds, dim=1) for bounds in zip(*((c.amin(1), c.amax(1)) for c in chunks), strict=True))
    query = inputs.query.unflatten(0, (len(low), -1)).flatten(1, 2)  # [kv_heads, group * queries, dim]
    # sum over d of max(q * least, q * most): the sign of q decides which
    scores = query.clamp(min=0) @ high.transpose(1, 2) + query.clamp(max=0) @ low.transpose(1, 2)
    scaling = query.shape[-1] ** -0.5 if inputs.scaling is None else inputs.scaling
    return (scores * scaling).softmax(-1).sum((0, 1))


def recalls(inputs: SelectionInput) -> Note:
    """Return the recall of each variant relative to a selection by all keys."""
    keys = inputs.keys(None)  # [kv_heads, tokens, dim]
    group = inputs.query.shape[0] // len(keys)

    def mass(way_keys: torch.Tensor) -> torch.Tensor:
        query, own_keys = inputs.query[: len(way_keys) * group], inputs.own_keys[: len(way_keys)]
        return head_mass(query, way_keys, own_keys, inputs.scaling).mean(0)

    coarse = Int8KeysIndex.build(keys).keys_as(keys.dtype)
    (counts,) = inputs.chunks.counts
    chunks = keys.split(counts.tolist(), dim=1)
    means = torch.stack([chunk.mean(1) for chunk in chunks], dim=1)
    tokens_of_each = torch.from_numpy(counts)
    of_chunks = (
        token_mass.repeat_interleave(tokens_of_each) for token_mass in (mass(means), quest_mass(inputs, chunks))
    )
    mass_by_way = dict(zip(WAYS, (mass(coarse), mass(keys[:1]), *of_chunks), strict=True))
    note = {}
    for budget in BUDGETS:
        count = budgeted_tokens(budget, inputs.chunks.tokens, int(counts.max()))
        reference, *selections = (
            set(inputs.chunks.chunk[0, top_chunks(token_mass[None].numpy(), inputs.chunks, count)[0]].tolist())
            for token_mass in (mass(keys), *mass_by_way.values())
        )
        note |= {
            (way, budget): len(reference & selection) / len(reference)
            for way, selection in zip(WAYS, selections, strict=True)
        }
    return note


@dataclass(frozen=True)
class Noting(TopChunks):
    """Selector by all keys that records the recall of the other variants."""

    notes: list[Note] = field(default_factory=list, compare=False)

    def choose(self, inputs: SelectionInput) -> Selection:
        self.notes.append(recalls(inputs))
        return super().choose(inputs)


@dataclass(frozen=True)
class NotingKV(ContiguousKV):
    """ContiguousKV with the selector `Noting`."""

    notes: list[Note] = field(default_factory=list, compare=False)

    def selector(self) -> Noting:
        return Noting(self.period, notes=self.notes)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/xs"), help="folder of a reference model")
    parser.add_argument("--tokens", type=int, default=512, help="number of context tokens")
    parser.add_argument("--questions", type=int, default=100, help="number of questions")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    text = np.array(tokenizer(" ".join(sentences(Data(None))), add_special_tokens=False)["input_ids"])
    language, notes = Language(tokenizer, text), []
    method = NotingKV(budget=0.25, per_head=False, reorder=False, identify="keys", notes=notes)
    with tempfile.TemporaryDirectory() as folder, KVStore(folder) as store:
        prompts = questions(language, arguments.tokens, arguments.questions, 0)
        for context, question in tqdm(prompts, total=arguments.questions, unit="question"):
            prefix = [token for document in context.documents for token in document]
            store.precompute(model, prefix, method=method, progress=False)
            cache = TieredCache(model, store, method=method, record=False)
            with torch.no_grad():
                model(input_ids=torch.tensor([[*prefix, *question.prompt]]), past_key_values=cache, logits_to_keep=1)
    layers = model.config.num_hidden_layers
    by_layer = {
        f"{way}, {budget:.0%}": [
            100 * float(np.mean([note[way, budget] for note in notes[layer::layers]])) for layer in range(layers)
        ]
        for way in WAYS
        for budget in BUDGETS
    }
    rows = [
        [name, f"{np.mean(row):.1f}", *(f"{value:.0f}" for value in row[:layers])] for name, row in by_layer.items()
    ]
    name = f"identify-{arguments.model.name}"
    heading = ["way, budget", "all layers", *(f"layer {layer}" for layer in range(layers))]
    page = (
        f"# Recall of identification, {arguments.model.name}\n\nRecall in percent of the chunks selected by all keys, "
        f"contexts of {arguments.tokens} tokens, {len(notes) // layers} questions, chunks of 16."
        f"\n\n{table(heading, rows)}"
    )
    figures = {"tokens": arguments.tokens, "questions": len(notes) // layers, "recall_percent": by_layer}
    save(arguments.out, name, figures | {"machine": machine(torch.device("cpu"), Path.cwd())}, page)
    print(page)


if __name__ == "__main__":
    main()
