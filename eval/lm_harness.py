"""lm-evaluation-harness over TieredCache: the model type `hf-tiered`.

    python -m eval.lm_harness --model hf-tiered \
        --model_args pretrained=Qwen/Qwen2.5-0.5B,method=exact,store=kv-store --tasks rte --num_fewshot 20

All of `lm_eval`'s own options hold. What several requests begin with (few-shot examples, above all) is computed once,
stored, and restored for each of them, as the method does it. With the default method the scores are those of `hf`.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm.auto import tqdm

from hf_tiered_cache import KVStore, TieredCache

from .runner import find_variants
from .subject import Subject


@register_model("hf-tiered")
class HFTieredLM(HFLM):
    """`hf` with stored KV.

    Args:
        store: folder of the store; default: one that is deleted afterwards.
        method: name of a method.
        budget: of a method that has one, the share of the prefix.
        host_memory: of the store.
        kwargs: all arguments of `hf`.
    """

    def __init__(
        self,
        *args: Any,
        store: str | None = None,
        method: str = "exact",
        budget: float | None = None,
        host_memory: str = "1GiB",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        variant = find_variants(method, "1" if budget is None else str(budget))[-1]
        self._folder = tempfile.TemporaryDirectory() if store is None else None
        self._store = KVStore(store or self._folder.name, host_memory=host_memory)
        self._subject = Subject(self.model, self.tokenizer, self._store, variant.method)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """Requests of one context after the other: it is run once, and each continuation goes on from there."""
        prompts = [self._split(context, continuation) for _, context, continuation in requests]
        self._share(context for context, _ in prompts)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        asked = before = None
        order = sorted(range(len(requests)), key=lambda i: prompts[i][0])
        for index in tqdm(order, desc="loglikelihoods", disable=disable_tqdm):
            context, continuation = prompts[index]
            if context != before:
                asked, before = self._subject.start(context), context
            likelihoods, greedy = self._subject.follow(asked, continuation)
            results[index] = float(likelihoods.sum()), greedy
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self._share(tuple(self.tok_encode(request.args[0])) for request in requests)
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        kwargs["past_key_values"] = TieredCache(self.model, self._store, method=self._subject.method, record=False)
        return super()._model_generate(context, max_length, stop, **kwargs)

    def _split(self, context: list[int], continuation: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `hf` does: what is too long loses its beginning."""
        whole = (context + continuation)[-(self.max_length + 1) :]
        cut = len(whole) - len(continuation)
        return tuple(whole[:cut]), tuple(continuation)

    def _share(self, contexts: Iterable[tuple[int, ...]]) -> None:
        """Store what neighbours in the sorted order of contexts begin with."""
        ordered = sorted(set(contexts))
        shared = {_common(a, b) for a, b in itertools.pairwise(ordered)}
        for prefix in sorted(prefix for prefix in shared if prefix):
            self._subject.prepare(prefix)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


if __name__ == "__main__":
    cli_evaluate()
