"""Evaluation run: answer every example with every variant of every method. Interrupted runs can be resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_tiered_cache import KVStore, Method
from hf_tiered_cache.errors import ConfigError, unknown_name
from hf_tiered_cache.methods import METHODS, Passages, make_method
from hf_tiered_cache.store.geometry import HASH_TOKENS

from . import baselines  # noqa: F401  # registers them
from .encode import Prompt, encode
from .errors import EvalError
from .files import check_file, foreign, write
from .metrics import METRICS, interval
from .reading import Reading
from .subject import Answer, Subject, likelihoods
from .tasks import Example, Task

FULL = "full"
"""Name of the reference variant, which computes everything with a `DynamicCache`."""
_LINE = b'{"id":'
"""Beginning of each line of predictions."""

_FIGURES = (
    *(
        "score",
        "top1",
        "kl",
        "nll",
        "answer_top1",
        "answer_kl",
        "ttft",
        "restored",
        "attended",
        "computed",
        "compute",
        "bytes_read",
    ),
    *(field.name for field in fields(Reading)),
)


@dataclass(frozen=True)
class Variant:
    """Method to evaluate, with one of its shares if it has such an option.

    Args:
        name: Method with its options, and `@share` if there is one; `FULL` for full KV.
        method: The method; None for full KV.
        budget: Share of tokens to attend to or to recompute, or None.
    """

    name: str
    method: Method | None = None
    budget: float | None = None

    @property
    def folder(self) -> str:
        """Name for folders and files."""
        return self.name.replace(":", "-")


def find_variants(methods: str, budgets: str = "", ratios: str = "") -> list[Variant]:
    """Return full KV and each method of a comma-separated list, with each budget or ratio.

    Args:
        methods: Comma-separated method names, with options.
        budgets: Comma-separated shares to attend to, for methods with a `budget` that their name does not set; "" for
            the default of each method.
        ratios: Comma-separated shares to recompute, for methods with a `recompute` option; otherwise like `budgets`.

    Raises:
        EvalError: A method is unknown or has wrong options, or a share is not in (0, 1].
    """
    shares = {"budget": _shares("budgets", budgets), "recompute": _shares("ratios", ratios)}
    variants = [Variant(FULL)]
    for name in filter(None, (part.strip() for part in methods.split(","))):
        if name == FULL:
            continue
        plain_name = name.split(":")[0]
        if plain_name.split(".")[0] not in METHODS:
            raise EvalError(unknown_name("method", plain_name, [FULL, *METHODS]))
        try:
            method = make_method(name)
        except ConfigError as error:
            raise EvalError(str(error)) from error
        options = {field.name for field in fields(method)}
        option = next((o for o in shares if o in options and f"{o}=" not in name), None)
        default: Any = None if option is None else getattr(method, option)
        if option is not None and (shares[option] or isinstance(default, float)):
            for share in shares[option] or [default]:
                setting: dict[str, Any] = {option: share}
                variants.append(Variant(f"{name}@{share:g}", replace(method, **setting), share))
        else:
            variants.append(Variant(name, method))
    return list({variant.name: variant for variant in variants}.values())  # each once


def _shares(name: str, text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise EvalError(f"{name} are shares such as 0.05,0.25, not {text!r}") from None
    if any(not 0 < share <= 1 for share in shares):
        raise EvalError(f"{name} are shares above 0 and up to 1, not {text!r}")
    return shares


@dataclass
class Run:
    """Evaluation of all variants on tasks.

    Args:
        model: Model to evaluate.
        tokenizer: Tokenizer of the model.
        variants: Variants to compare, `FULL` first.
        out: Folder of results, in `<task>/<variant>/`.
        stores: Parent folder of the stores.
        max_length: Maximum number of tokens of prompt and answer.
        chat: Whether tasks that allow it use the chat template.
        host_memory: Host memory of each store.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    variants: list[Variant]
    out: Path
    stores: Path
    max_length: int
    chat: bool = False
    host_memory: str = "1GiB"

    def __call__(self, tasks: dict[Task, list[Example]]) -> dict[str, dict[str, Any]]:
        """Evaluate the examples of each task and return the metrics by task and variant."""
        results: dict[str, dict[str, Any]] = {}
        total = sum(len(examples) for examples in tasks.values()) * len(self.variants)
        with tqdm(total=total, unit="answer", desc="evaluating") as bar:
            for task, examples in tasks.items():
                bar.set_postfix_str(task.name)
                self._answer(task, examples, bar)
                results[task.name] = {v.name: self._metrics(task, v, examples) for v in self.variants}
        return results

    # --- answers

    def _answer(self, task: Task, examples: list[Example], bar: tqdm) -> None:
        finished = {variant.name: self._read_predictions(task, variant) for variant in self.variants}
        unfinished = [e for e in examples if any(e.id not in finished[v.name] for v in self.variants)]
        bar.update(len(self.variants) * (len(examples) - len(unfinished)))
        if not unfinished:
            return
        metric = METRICS[task.metric]() if task.metric in METRICS else None
        prompts = {e.id: encode(e, task, self.tokenizer, self.max_length, self.chat) for e in unfinished}
        with Stores(self) as stores:
            for variant in self.variants:
                stores.subject(variant).store_passages(chain(*(prompt.passages for prompt in prompts.values())))
            for example in unfinished:
                prompt = prompts[example.id]
                full: Answer | None = None
                for variant in self.variants:
                    if variant.name == FULL or example.id not in finished[variant.name]:
                        subject = stores.subject(variant)
                        subject.prepare(prompt.prefix, prompt.passages)
                        answer = subject.ask(prompt, task.max_new_tokens if task.generates else 0)
                        full = full or answer
                        if example.id not in finished[variant.name]:
                            line = _line(task, variant, example, prompt, answer, full, metric)
                            self._append(task, variant, line)
                    bar.update()

    def _folder(self, task: Task, variant: Variant) -> Path:
        return self.out / task.name / variant.folder

    def _read_predictions(self, task: Task, variant: Variant) -> dict[str, dict[str, Any]]:
        """Read the predictions of a variant by example id. An incomplete last line is removed from the file."""
        path = self._folder(task, variant) / "predictions.jsonl"
        if not path.exists():
            return {}
        *lines, last_line = path.read_bytes().split(b"\n")
        if not all(line.startswith(_LINE) for line in lines) or last_line[: len(_LINE)] != _LINE[: len(last_line)]:
            raise foreign(path)
        if last_line:
            write(path, "".join(f"{line.decode()}\n" for line in lines))
        return {line["id"]: line for line in map(json.loads, lines)}

    def _append(self, task: Task, variant: Variant, line: dict[str, Any]) -> None:
        folder = self._folder(task, variant)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "predictions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # --- figures

    def _metrics(self, task: Task, variant: Variant, examples: list[Example]) -> dict[str, Any]:
        records = self._read_predictions(task, variant)
        lines = [records[example.id] for example in examples]
        result: dict[str, Any] = {"task": task.name, "variant": variant.name, "metric": task.metric}
        result |= {"budget": variant.budget, "examples": len(lines)}
        for name in _FIGURES:
            values = [line[name] for line in lines if line.get(name) is not None]
            if values:
                low, high = interval(values)
                result[name] = {"mean": sum(values) / len(values), "low": low, "high": high}
        path = self._folder(task, variant) / "metrics.json"
        check_file(path, r'\{\s*"task":')
        write(path, json.dumps(result, indent=1) + "\n")
        return result


class Stores:
    """Stores and subjects of a run, created on first use.

    Methods cut segments differently, so each method has its own store. Methods that reuse passages share a store if
    they store passages in the same way.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._subjects: dict[str, Subject] = {}
        self._stores: dict[str, KVStore] = {}
        self._stored: dict[str, set[tuple[int, ...]]] = {}  # by method: the share does not change what is stored

    def subject(self, variant: Variant) -> Subject:
        if variant.name not in self._subjects:
            run, store, method, store_name = self._run, None, variant.method, variant.folder.split("@")[0]
            if method is not None:
                name = method.passages.replace(" ", "-") if isinstance(method, Passages) else store_name
                if name not in self._stores:
                    path = run.stores / name
                    self._stores[name] = KVStore(path, host_memory=run.host_memory, policy=method.policy)
                store = self._stores[name]
            stored_prompts = self._stored.setdefault(store_name, set())
            self._subjects[variant.name] = Subject(run.model, run.tokenizer, store, method, stored_prompts)
        return self._subjects[variant.name]

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *exception: object) -> None:
        for store in self._stores.values():
            store.close()


def _line(
    task: Task, variant: Variant, example: Example, prompt: Prompt, answer: Answer, full: Answer, metric: Any
) -> dict[str, Any]:
    """Return the record of one answer for `predictions.jsonl`."""
    text = answer.text
    if task.first_line:
        text = text.lstrip("\n").split("\n")[0]
    prediction = example.choices[answer.choice] if answer.choice is not None else text
    nll = None if answer.followed is None else -float(likelihoods(answer.followed, prompt.answer).mean())
    if metric is not None:
        score = metric.score(prediction, list(example.answers), example)
    else:  # metric is the perplexity of the reference answer
        score = None if nll is None else math.exp(nll)
    line = {
        "id": example.id,
        "prediction": prediction,
        "answers": list(example.answers),
        "score": score,
        "top1": _agreement(answer.first, full.first),
        "kl": _divergence(answer.first, full.first),
        "nll": nll,
        "ttft": answer.ttft,
        "tokens": {"prefix": len(prompt.prefix), "question": len(prompt.question)},
    }
    if answer.followed is not None and full.followed is not None:
        line |= {
            "answer_top1": _agreement(answer.followed, full.followed),
            "answer_kl": _divergence(answer.followed, full.followed),
        }
    if answer.stats is not None:
        stats = asdict(answer.stats)
        line |= {
            "restored": stats["tokens_restored"],
            "attended": stats["tokens_attended"],
            "computed": stats["tokens_computed"] + stats["tokens_recomputed"],
            "bytes_read": stats["bytes_read"],
        }
        stored_tokens = sum(len(passage) // HASH_TOKENS * HASH_TOKENS for passage in prompt.passages)
        if stored_tokens and isinstance(variant.method, Passages):
            line["compute"] = 100 * (line["computed"] - len(prompt.whole) + stored_tokens) / stored_tokens
    if answer.reading is not None:
        line |= asdict(answer.reading)
    return line


def _agreement(log_probs: torch.Tensor, full_log_probs: torch.Tensor) -> float:
    """Return the percentage of positions where the most likely token is that of full KV."""
    return 100 * float((log_probs.argmax(-1) == full_log_probs.argmax(-1)).float().mean())


def _divergence(log_probs: torch.Tensor, full_log_probs: torch.Tensor) -> float:
    """Return the mean KL divergence KL(full || method) of log-probabilities `[..., vocabulary]`, in nats."""
    divergences = torch.nn.functional.kl_div(log_probs, full_log_probs, reduction="none", log_target=True).sum(-1)
    return max(0.0, float(divergences.mean()))


def draw_examples(tasks: list[Task], draw: Any) -> dict[Task, list[Example]]:
    """Draw all examples of all tasks, so that errors appear before anything is written.

    Raises:
        EvalError: Data is missing, or a task has no examples or duplicate ids.
    """
    return {task: list(_checked(task, draw)) for task in tasks}


def _checked(task: Task, draw: Any) -> Iterator[Example]:
    ids: set[str] = set()
    for example in task.examples(draw):
        if example.id in ids:
            raise EvalError(f"{task.name}: two examples are called {example.id!r}")
        ids.add(example.id)
        yield example
    if not ids:
        raise EvalError(f"{task.name}: the data gave no example")
