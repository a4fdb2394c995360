"""The model under a method: asks, chooses, generates, and says how sure it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_tiered_cache import KVStore, Method, RequestStats, TieredCache
from hf_tiered_cache.geometry import HASH_TOKENS
from hf_tiered_cache.methods import Passages

from .encode import Prompt
from .reading import Reading, reading_of


@dataclass(frozen=True)
class Answer:
    """What came of one prompt.

    Args:
        first: log-probabilities of the first new token, float32 `[vocabulary]`.
        ttft: seconds until it was there.
        choice: number of the most likely choice, by the log-likelihood of its tokens, or None.
        text: what was generated, or "".
        nll: mean negative log-likelihood of the reference answer's tokens, in nats, or None.
        stats: of the cache, or None for full KV.
        reading: what came of the prefix's KV; None where nothing of a prefix was restored.
    """

    first: torch.Tensor
    ttft: float
    choice: int | None
    text: str
    nll: float | None
    stats: RequestStats | None
    reading: Reading | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt that was run: its cache, its ids `[1, tokens]`, and as in `Answer`."""

    cache: Cache
    ids: torch.Tensor
    first: torch.Tensor
    ttft: float
    stats: RequestStats | None


@dataclass
class Subject:
    """A model, and how it gets its KV.

    Args:
        store: of the method, or None for full KV: everything is computed, with a `DynamicCache`.
        method: how stored KV is restored.
        stored: prefixes whose KV the store has as the method wants it; may be shared with other subjects.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: KVStore | None = None
    method: Method | None = None
    stored: set[tuple[int, ...]] = field(default_factory=set)

    def prepare(self, prefix: tuple[int, ...], passages: tuple[tuple[int, ...], ...] = ()) -> None:
        """Have the KV of a prefix stored, or that of its passages, each by itself, if the method reuses such."""
        if self.store is None or prefix in self.stored:
            return
        if isinstance(self.method, Passages):
            self.store_passages(passages)
        else:
            self.store.precompute(self.model, list(prefix), method=self.method, progress=False)
        self.stored.add(prefix)

    def store_passages(self, passages: Iterable[tuple[int, ...]]) -> None:
        """Have the KV of passages stored, if the method reuses such."""
        long_enough = [list(passage) for passage in passages if len(passage) >= HASH_TOKENS]
        if not long_enough or self.store is None or not isinstance(self.method, Passages):
            return
        self.store.precompute(self.model, long_enough, segments=True, method=self.method, progress=False)

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Answer:
        """Answer one prompt, greedily. What is new in it is not stored."""
        asked = self.start(prompt.whole)
        choice = nll = None
        text = ""
        if prompt.choices:
            sums = [float(self.follow(asked, tokens)[0].sum()) for tokens in prompt.choices]
            choice = max(range(len(sums)), key=sums.__getitem__)
        else:
            if prompt.answer:
                nll = -float(self.follow(asked, prompt.answer)[0].mean())
            text = self._generate(asked, max_new_tokens)
        reading = self._reading(prompt, asked)
        return Answer(asked.first, asked.ttft, choice, text, nll, asked.stats, reading)

    def start(self, prompt: tuple[int, ...]) -> Asked:
        """Run the prompt up to its first new token."""
        cache = self._cache()
        ids = torch.tensor([prompt], device=self.model.device)
        started = time.perf_counter()
        with torch.no_grad():
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        first = logits[0, -1].float().log_softmax(-1).cpu()
        ttft = time.perf_counter() - started
        return Asked(cache, ids, first, ttft, copy.copy(cache.stats) if isinstance(cache, TieredCache) else None)

    def follow(self, asked: Asked, tokens: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
        """Log-probabilities, float32 `[n]`, of `tokens` as what follows; and whether they are the likeliest ones."""
        said = asked.first.unsqueeze(0)  # [n, vocabulary]
        if len(tokens) > 1:
            fed = torch.tensor([tokens[:-1]], device=asked.ids.device)
            with torch.no_grad():
                logits = self.model(input_ids=fed, past_key_values=copy.deepcopy(asked.cache), use_cache=True).logits
            said = torch.cat([said, logits[0].float().log_softmax(-1).cpu()])
        wanted = torch.tensor(tokens)
        return said.gather(1, wanted.unsqueeze(1))[:, 0], bool((said.argmax(-1) == wanted).all())

    def _reading(self, prompt: Prompt, asked: Asked) -> Reading | None:
        if self.store is None or asked.stats is None or isinstance(self.method, Passages):
            return None
        assert isinstance(asked.cache, TieredCache)
        stored = self.store.lookup(self.model, list(prompt.whole), method=self.method)
        if not (whole := sum(stored.bytes.values())):
            return None
        layers: Any = asked.cache.layers
        of_each = sum(t.nbytes // t.shape[2] for layer in layers for t in (layer.keys, layer.values))  # token
        tokens = asked.cache.get_seq_length() - len(prompt.whole)
        return reading_of(whole, of_each * stored.stored, asked.stats, asked.cache.stats, tokens)

    def _cache(self) -> Cache:
        if self.store is None:
            return DynamicCache(config=self.model.config)
        return TieredCache(self.model, self.store, method=self.method, record=False)

    def _generate(self, asked: Asked, max_new_tokens: int) -> str:
        token = asked.first.argmax().view(1, 1).to(asked.ids.device)
        ids, start = torch.cat([asked.ids, token], dim=1), asked.ids.shape[1]
        if max_new_tokens > 1 and int(token) not in self._ends():
            generate: Any = self.model.generate
            ids = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=asked.cache,
                do_sample=False,
                max_new_tokens=max_new_tokens - 1,
            )
        return str(self.tokenizer.decode(ids[0, start:], skip_special_tokens=True))

    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}
