"""lm-evaluation-harness with TieredCache. Importing this module registers the model type `hf-tiered`.

On the command line, run `hf-tiered-cache lm-eval`. In Python, call `lm_eval.simple_evaluate(model="hf-tiered", ...)`.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm.auto import tqdm

from ..errors import ConfigError, suggest
from ..kvstore import KVStore
from ..methods import METHODS, Method, Passages, make_method
from ..operations import precompute
from ..store import KEY_FILE_VARIABLE
from ..store.cipher import read_key_file
from ..store.geometry import HASH_TOKENS
from ..tiered_cache import TieredCache
from ..units import parse_bytes
from .hub import go_offline_without_hub, unloadable

Tokens = tuple[int, ...]


@register_model("hf-tiered")
class HFTieredLM(HFLM):  # type: ignore[misc]
    """Model type `hf` with stored KV: prefixes that several requests share are computed once, stored and restored.

    With the exact method the scores are those of `hf`. Methods that reuse passages find those that the store already
    holds (`KVStore.precompute(..., passages=True)`).

    Args:
        pretrained: Name of a model on the hub, a folder, or a loaded model.
        method: Name of `METHODS`, optionally with settings: "contiguous_kv:budget=0.1".
        store: Folder of the store. None uses a temporary one, which is deleted at the end.
        host_memory: Host memory of the store, such as "4GiB"; None for the default of `KVStore`.
        key_file: File with the store's key, if it is encrypted. By default, the file that the environment variable
            names.
        kwargs: Fields of the method (budget=0.1), and all arguments of `hf`.

    Raises:
        ConfigError: A method, setting or size is invalid, or the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: Any = None,
        *,
        method: str = "exact",
        store: str | None = None,
        host_memory: int | str | None = None,
        key_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        if pretrained is None:
            raise ConfigError(
                "no model is specified; pass --model_args pretrained=NAME (a name on the Hub, or a folder)"
            )
        make_method(method)  # loads it, if it is a plug-in
        names = {field.name for kind in METHODS.loaded() for field in fields(kind)} - {"geometry"}
        options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        self._method: Method = make_method(":".join([method, *(f"{k}={v}" for k, v in options.items())]))
        key_file = key_file or os.environ.get(KEY_FILE_VARIABLE)
        key = read_key_file(Path(key_file) if key_file else None)
        memory: dict[str, Any] = {} if host_memory is None else {"host_memory": host_memory}
        parse_bytes(host_memory or 0, "host_memory")  # validate before loading the model, which takes long
        if store is None and isinstance(self._method, Passages):
            raise ConfigError(f"{method} reuses passages that were stored before; pass their store with store=FOLDER")
        try:
            super().__init__(pretrained, **kwargs)
        except OSError as error:
            raise ConfigError(unloadable(pretrained, error)) from error
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None:
                raise
            advice = suggest(unknown[1], names, "neither hf-tiered, nor hf, nor the model accepts it")
            raise ConfigError(f"unknown argument {unknown[1]!r}{advice}") from error
        if store is None:
            self._folder = tempfile.TemporaryDirectory()  # deleted together with this object
            store = self._folder.name
        self._store = KVStore(store, policy=self._method.policy, key=key, **memory)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """Run requests grouped by context: each context once, and its continuations from there."""
        prompts = [self._split(context, continuation) for _, context, continuation in requests]
        self._share(context for context, _ in prompts)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: prompts[i][0])
        with tqdm(total=len(order), desc="loglikelihoods", disable=disable_tqdm) as bar:
            for context, group in itertools.groupby(order, key=lambda i: prompts[i][0]):
                cache = self._cache()
                first = self._logprobs(context, cache, keep=1)
                for index in group:
                    results[index] = self._follow(prompts[index][1], first, cache)
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
                    bar.update()
        return results

    def _follow(self, continuation: Tokens, first: torch.Tensor, cache: TieredCache) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether it is the most likely one."""
        log_probs = first  # [n, vocabulary]
        if len(continuation) > 1:
            log_probs = torch.cat([first, self._logprobs(continuation[:-1], cache.fork())])
        targets = torch.tensor(continuation, device=log_probs.device)  # [n]
        likelihood = log_probs.gather(1, targets.unsqueeze(1)).sum()
        return float(likelihood), bool((log_probs.argmax(-1) == targets).all())

    def _logprobs(self, tokens: Tokens, cache: TieredCache, keep: int = 0) -> torch.Tensor:
        """Return log-probabilities after each of the last `keep` tokens (0 for all), `[keep, vocabulary]`."""
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            logits = precompute.run(cache, torch.tensor(tokens), keep)
        return logits[0].log_softmax(-1, dtype=self.softmax_dtype)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self._share(tuple(self.tok_encode(request.args[0])) for request in requests)
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        return super()._model_generate(context, max_length, stop, past_key_values=self._cache(), **kwargs)

    def _cache(self) -> TieredCache:
        return TieredCache(self.model, self._store, method=self._method, record=False)

    def _split(self, context: list[int], continuation: list[int]) -> tuple[Tokens, Tokens]:
        """Split into context and continuation as `hf` does: the beginning of a request that is too long is cut off."""
        tokens = (context + continuation)[-(self.max_length + 1) :]
        context_length = len(tokens) - len(continuation)
        return tuple(tokens[:context_length]), tuple(continuation)

    def _share(self, contexts: Iterable[Tokens]) -> None:
        """Store the common prefixes of contexts that are adjacent in sorted order."""
        if isinstance(self._method, Passages):
            return  # a stored prefix would be restored exactly, instead of its passages
        ordered = sorted({context for context in contexts if len(context) <= self.max_length})
        prefixes = {_common_prefix(a, b) for a, b in itertools.pairwise(ordered)}
        for prefix in sorted(prefixes - {()}):
            self._store.precompute(self.model, list(prefix), method=self._method, progress=False)


def _common_prefix(a: Tokens, b: Tokens) -> Tokens:
    """Return the common prefix of two prompts, in multiples of the hashed length."""
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[: count // HASH_TOKENS * HASH_TOKENS]


def run(arguments: list[str]) -> None:
    """Run lm_eval's own command with these arguments, and with `hf-tiered` as the default model type.

    Raises:
        ConfigError: No task is named, a task is unknown, its data cannot be reached, or as in `HFTieredLM`.
    """
    has_model = any(argument.partition("=")[0] in ("--model", "-M") for argument in arguments)
    is_evaluation = arguments[:1] not in (["ls"], ["validate"])
    sys.argv = ["lm_eval", *arguments, *(["--model", "hf-tiered"] if is_evaluation and not has_model else [])]
    go_offline_without_hub()
    try:
        cli_evaluate()
    except ConnectionError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{reason}; without network access, use tasks with local or cached data") from error
    except ValueError as error:
        if not str(error).startswith(("Tasks not found", "No tasks specified")):
            raise
        raise ConfigError(f"{error}; `hf-tiered-cache lm-eval ls tasks` lists all tasks") from None
