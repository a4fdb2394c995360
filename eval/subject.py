"""Model under evaluation with one method: run prompts, choose or generate answers, return log-probabilities."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_tiered_cache import KVStore, Method, RequestStats, TieredCache
from hf_tiered_cache.methods import Passages
from hf_tiered_cache.store.geometry import HASH_TOKENS

from .encode import Prompt
from .reading import Reading, reading_of


@dataclass(frozen=True)
class Answer:
    """Result of one prompt.

    Args:
        first: Log-probabilities of the first new token, float32 `[vocabulary]`.
        ttft: Time to the first new token, in seconds.
        choice: Index of the most likely choice, by the log-likelihood of its tokens, or None.
        text: Generated text, or "".
        followed: Log-probabilities at each token of the reference answer, fed one by one, float32 `[n, vocabulary]`,
            or None.
        stats: Statistics of the cache at the first new token; None for full KV.
        reading: Share of the prefix's KV that was read; None if no prefix was restored.
    """

    first: torch.Tensor
    ttft: float
    choice: int | None
    text: str
    followed: torch.Tensor | None
    stats: RequestStats | None
    reading: Reading | None = None


def likelihoods(log_probs: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """Select the log-probabilities of `tokens`, `[n]`, from those of the vocabulary, `[n, vocabulary]`."""
    return log_probs.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]


@dataclass(frozen=True)
class Prefill:
    """State after the prefill of a prompt: cache, ids `[1, tokens]`, and the first fields of an `Answer`."""

    cache: Cache
    ids: torch.Tensor
    first: torch.Tensor
    ttft: float
    stats: RequestStats | None


@dataclass
class Subject:
    """Model together with the source of its KV.

    Args:
        model: Model to evaluate.
        tokenizer: Tokenizer of the model.
        store: Store of the method; None for full KV, which is computed with a `DynamicCache`.
        method: Method that restores stored KV.
        stored: Prefixes already stored for the method; may be shared with other subjects.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: KVStore | None = None
    method: Method | None = None
    stored: set[tuple[int, ...]] = field(default_factory=set)

    def prepare(self, prefix: tuple[int, ...], passages: tuple[tuple[int, ...], ...] = ()) -> None:
        """Store the KV of a prefix, or of each of its passages if the method reuses passages."""
        if self.store is None or not prefix or prefix in self.stored:
            return
        if isinstance(self.method, Passages):
            self.store_passages(passages)
        else:
            self.store.precompute(self.model, list(prefix), method=self.method, progress=False)
        self.stored.add(prefix)

    def store_passages(self, passages: Iterable[tuple[int, ...]]) -> None:
        """Store the KV of passages of at least `HASH_TOKENS` tokens, if the method reuses passages."""
        long_enough = [list(passage) for passage in passages if len(passage) >= HASH_TOKENS]
        if not long_enough or self.store is None or not isinstance(self.method, Passages):
            return
        self.store.precompute(self.model, long_enough, passages=True, method=self.method, progress=False)

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Answer:
        """Answer one prompt with greedy decoding. New KV is not stored.

        Args:
            prompt: Prompt with its choices or reference answer.
            max_new_tokens: Number of tokens to generate. With 0, the reads of the reference answer are counted
                instead.
        """
        prefill = self.start(prompt.whole)
        choice = followed = None
        text = ""
        if prompt.choices:
            sums = [float(likelihoods(self._follow(prefill, tokens), tokens).sum()) for tokens in prompt.choices]
            choice = max(range(len(sums)), key=sums.__getitem__)
        else:
            if prompt.answer:
                followed = self._follow(prefill, prompt.answer, keep=not max_new_tokens)
            if max_new_tokens:
                text = self._generate(prefill, max_new_tokens)
        reading = self._reading(prompt, prefill)
        return Answer(prefill.first, prefill.ttft, choice, text, followed, prefill.stats, reading)

    def start(self, prompt: tuple[int, ...]) -> Prefill:
        """Prefill the prompt and compute the log-probabilities of the first new token."""
        cache = self._cache()
        ids = torch.tensor([prompt], device=self.model.device)
        started = time.perf_counter()
        with torch.no_grad():
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        first = logits[0, -1].float().log_softmax(-1).cpu()
        ttft = time.perf_counter() - started
        return Prefill(cache, ids, first, ttft, copy.deepcopy(cache.stats) if isinstance(cache, TieredCache) else None)

    def _follow(self, prefill: Prefill, tokens: tuple[int, ...], keep: bool = False) -> torch.Tensor:
        """Return the log-probabilities at each of `tokens`, fed one by one, float32 `[n, vocabulary]`.

        Args:
            prefill: Prefilled prompt.
            tokens: Continuation of the prompt, at least one token.
            keep: Whether the tokens, except the last one, remain in the cache.
        """
        cache = prefill.cache if keep or len(tokens) == 1 else copy.deepcopy(prefill.cache)
        log_probs = [prefill.first]
        for token in tokens[:-1]:
            fed = torch.tensor([[token]], device=prefill.ids.device)
            with torch.no_grad():
                logits = self.model(input_ids=fed, past_key_values=cache, use_cache=True).logits
            log_probs.append(logits[0, -1].float().log_softmax(-1).cpu())
        return torch.stack(log_probs)

    def _reading(self, prompt: Prompt, prefill: Prefill) -> Reading | None:
        if self.store is None or prefill.stats is None or isinstance(self.method, Passages):
            return None
        assert isinstance(prefill.cache, TieredCache)
        lookup = self.store.lookup(self.model, list(prompt.whole), method=self.method)
        if not (prefix_bytes := sum(lookup.bytes.values())):
            return None
        layers: Any = prefill.cache.layers
        token_bytes = sum(
            t.nbytes // t.shape[2] for layer in layers for t in (layer.keys, layer.values)
        )  # bytes per token
        tokens = prefill.cache.get_seq_length() - len(prompt.whole)
        return reading_of(prefix_bytes, token_bytes * lookup.stored, prefill.stats, prefill.cache.stats, tokens)

    def _cache(self) -> Cache:
        if self.store is None:
            return DynamicCache(config=self.model.config)
        return TieredCache(self.model, self.store, method=self.method, record=False)

    def _generate(self, prefill: Prefill, max_new_tokens: int) -> str:
        token = prefill.first.argmax().view(1, 1).to(prefill.ids.device)
        ids, start = torch.cat([prefill.ids, token], dim=1), prefill.ids.shape[1]
        if max_new_tokens > 1 and int(token) not in self._ends():
            generate: Any = self.model.generate
            ids = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=prefill.cache,
                do_sample=False,
                max_new_tokens=max_new_tokens - 1,
            )
        return str(self.tokenizer.decode(ids[0, start:], skip_special_tokens=True))

    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}
