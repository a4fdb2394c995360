r"""Which rankings of a passage's tokens find those that the true context moves most?

    PYTHONPATH=. python bench/rankings.py --limit 50           # the reference model, where context matters
    PYTHONPATH=. python bench/rankings.py --model models/stories260K --data data \
        --tasks musique,musique_cacheblend,2wikimqa,hotpotqa

CacheTune computes a share of each passage in its true context, chosen when the passage is stored, behind others that
are. Here the tokens of a prompt's passages that have moved most in the prompt itself (their keys and values,
as a share of their norms) are compared with what each ranking chooses: how many of them it has, and how much of all
movement that could be made good. `context` sees other passages of the same prompt, or of other prompts (a corpus);
CacheBlend sees the prompt itself, as far as layer 1; EPIC takes the first tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import load, machine, save, table
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from eval.data import Data
from eval.encode import Prompt, encode
from eval.models import resolve
from eval.tasks import Draw, find_tasks
from hf_tiered_cache import KVStore
from hf_tiered_cache.geometry import HASH_TOKENS
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.passage_cache import PassageCache
from hf_tiered_cache.restore.passages import sink_token
from hf_tiered_cache.restore.spectral import KV, Ranking, rank_tokens

SHARES = (0.05, 0.15, 0.3, 0.5)
WAYS = (
    *("low frequency", "high frequency", "random", "EPIC", "CacheBlend"),
    *("context", "context, across passages", "context, across passages, corpus"),
)
ACROSS = ("CacheBlend", "context, across passages", "context, across passages, corpus")
"""Those that choose among all passages of a prompt; the others take a share of each."""


@dataclass(frozen=True)
class Passage:
    """float `[tokens]` each: how far its tokens have moved, and what each of `WAYS` goes by."""

    moved: np.ndarray
    scores: dict[str, np.ndarray]


class Ranker:
    """A model that looks at passages."""

    def __init__(self, model: torch.nn.Module, store: KVStore, corpus: list[torch.Tensor]) -> None:
        self.model, self.store = model, store
        store.precompute(model, corpus, segments=True, method=CacheTune(lead=1))
        self._corpus = [self.kept(passage) for passage in corpus]  # how they rank as a corpus
        self._numbers = {tuple(passage.tolist()): number for number, passage in enumerate(corpus)}

    def behind(self, passage: torch.Tensor, context: torch.Tensor) -> list[KV]:
        """A passage's keys and values where `context`, int64 `[n]`, stands before it."""
        cache = PassageCache(self.model, storage_of(self.store), CacheTune(lead=1), "", context=context.unsqueeze(0))
        cache.compute(passage.unsqueeze(0))
        return cache.passage.computed[0]

    def kept(self, passage: torch.Tensor) -> np.ndarray:
        """How the tokens of a stored passage rank, float32 `[tokens]`."""
        storage = storage_of(self.store)
        (row,) = PassageCache(self.model, storage, CacheTune(lead=1), "").passage.find([passage])
        assert row is not None, "a passage is not stored"
        reader = storage.disk.found(row)
        assert reader is not None, "a passage cannot be read"
        return storage.rankings.of(reader)["context"]

    def passages(self, prompt: Prompt) -> Iterator[Passage]:
        """Those of one prompt that are long enough to be stored, but for the one at its beginning, which is exact."""
        at = len(prompt.prefix) - sum(map(len, prompt.passages))  # passages follow one another up to the question
        whole, begins = torch.tensor(prompt.whole), int(prompt.whole[0] == sink_token(self.model.config))
        mine = [torch.tensor(passage) for passage in prompt.passages]
        numbers = range(len(mine))
        others = [[other for other in numbers if other != number] for number in numbers]
        self.store.rank(CacheTune(lead=1), model=self.model, passages=mine, neighbours=others, progress=False)
        for number, passage in enumerate(mine):
            if number and len(passage) >= HASH_TOKENS:
                yield self.look_at(passage, whole[begins:at])
            at += len(passage)

    def look_at(self, passage: torch.Tensor, before: torch.Tensor) -> Passage:
        """Compare a passage alone with itself behind what stands before it, and with what each ranking says."""
        alone, there = self.behind(passage, before[:0]), self.behind(passage, before)
        number = self._numbers[tuple(passage.tolist())]
        together = self.kept(passage)
        values = [pair[1][1].float() for pair in (alone, there)]  # layer 1, [heads, tokens, dim]
        scores = {
            "low frequency": self.rank(alone, "low_frequency"),
            "high frequency": self.rank(alone, "high_frequency"),
            "random": self.rank(alone, "random"),
            "EPIC": -np.arange(len(passage), dtype=float),
            "CacheBlend": (values[0] - values[1]).square().sum((0, 2)).numpy(),
            "context": together,
            "context, across passages": together,
            "context, across passages, corpus": self._corpus[number],
        }
        stored = len(alone[0][0][0]) // HASH_TOKENS * HASH_TOKENS
        return Passage(self.rank(alone, "context", there)[:stored], {way: s[:stored] for way, s in scores.items()})

    @staticmethod
    def rank(alone: list[KV], ranking: Ranking, kv_in_context: list[KV] | None = None) -> np.ndarray:
        return rank_tokens(alone, ranking, CacheTune.alpha, kv_in_context)


def best(scores: np.ndarray, share: float) -> np.ndarray:
    """bool `[tokens]`: the share with the highest scores."""
    chosen = np.zeros(len(scores), bool)
    chosen[np.argsort(-scores, kind="stable")[: int(share * len(scores) + 1e-9)]] = True
    return chosen


def compare(passages: list[Passage]) -> dict[tuple[str, float], tuple[float, float]]:
    """For each way and share: percent of the most moved tokens that are chosen, and of their movement."""
    moved, found = np.concatenate([passage.moved for passage in passages]), {}
    for share in SHARES:
        wanted = best(moved, share)
        for way in WAYS:
            scores = [passage.scores[way] for passage in passages]
            pools = [np.concatenate(scores)] if way in ACROSS else scores
            chosen = np.concatenate([best(pool, share) for pool in pools])
            has, of = (chosen & wanted).sum() / wanted.sum(), moved[chosen].sum() / moved[wanted].sum()
            found[way, share] = 100 * float(has), 100 * float(of)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/xs"))
    parser.add_argument("--tasks", default="reference_alias,reference_hop")
    parser.add_argument("--data", type=Path, help="folder of data sets, for tasks that need one")
    parser.add_argument("--limit", type=int, default=25, help="prompts of each task")
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(arguments.model)))
    model = load(arguments.model, torch.float32, torch.device("cpu"))
    room = model.config.max_position_embeddings
    draw = Draw(Data(arguments.data), arguments.limit, 42, min(arguments.prefix_tokens, room * 3 // 4), tokenizer)
    prompts = [encode(e, task, tokenizer, room) for task in find_tasks(arguments.tasks) for e in task.examples(draw)]
    corpus = [torch.tensor(passage) for prompt in prompts for passage in prompt.passages if len(passage) >= HASH_TOKENS]
    notes = []
    with tempfile.TemporaryDirectory() as folder, KVStore(folder) as store:
        ranker = Ranker(model, store, corpus)
        for prompt in tqdm(prompts, unit="prompt"):
            if passages := list(ranker.passages(prompt)):
                notes.append(compare(passages))
    means = {key: np.mean([note[key] for note in notes], axis=0) for key in notes[0]}
    rows = [[way, *(f"{means[way, share][0]:.0f} / {means[way, share][1]:.0f}" for share in SHARES)] for way in WAYS]
    name = f"rankings-{arguments.model.name}"
    listed = table(["ranking", *(f"{share:.0%}" for share in SHARES)], rows)
    page = (
        f"# What rankings of tokens find, {arguments.model.name}\n\n{arguments.tasks}: {len(notes)} prompts. Of the "
        "tokens that the true context moves most, the percentage that is chosen, and the percentage of their "
        f"movement that is made good, by share of tokens computed. Movement is measured as `context` measures it: the "
        f"change of keys and values as a share of their norms, over all layers.\n\n{listed}"
    )
    figures = {f"{way}, {share:.0%}": list(map(float, found)) for (way, share), found in means.items()}
    kept = {"tasks": arguments.tasks, "prompts": len(notes), "found_and_movement_percent": figures}
    save(arguments.out, name, kept | {"machine": machine(torch.device("cpu"), Path.cwd())}, page)
    print(page)


if __name__ == "__main__":
    main()
