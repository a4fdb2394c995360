"""One evaluation: every example under every variant of every method, written line by line, and resumed where it was."""

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
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.geometry import HASH_TOKENS
from hf_tiered_cache.methods import Passages, make_method

from .encode import Prompt, encode
from .errors import EvalError
from .metrics import METRICS, interval
from .reading import Reading
from .subject import Answer, Subject, likelihoods
from .tasks import Example, Task

FULL = "full"
"""The variant that computes everything with a `DynamicCache`; the others are compared with it."""

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
    """A method with a budget, if it has one.

    Args:
        method: None for full KV.
    """

    name: str
    method: Method | None = None
    budget: float | None = None

    @property
    def folder(self) -> str:
        """A name for files."""
        return self.name.replace(":", "-")


def find_variants(methods: str, budgets: str = "", ratios: str = "") -> list[Variant]:
    """Full KV, and every method of a comma-separated list with every budget or ratio. Raises EvalError.

    Args:
        budgets: for methods that attend to a share of what they restore, where their names do not say which; "" is
            each method's own default.
        ratios: the same for methods that compute a share of what they could restore.
    """
    shares = {"budget": _shares("budgets", budgets), "recompute": _shares("ratios", ratios)}
    variants = [Variant(FULL)]
    for name in filter(None, (part.strip() for part in methods.split(","))):
        if name == FULL:
            continue
        try:
            method = make_method(name)
        except ConfigError as error:
            raise EvalError(str(error).replace("there are: ", f"there are: {FULL}, ")) from error
        known = {field.name for field in fields(method)}
        option = next((o for o in shares if o in known and f"{o}=" not in name), None)
        default: Any = None if option is None else getattr(method, option)
        if option is not None and (shares[option] or isinstance(default, float)):
            for share in shares[option] or [default]:
                how: dict[str, Any] = {option: share}
                variants.append(Variant(f"{name}@{share:g}", replace(method, **how), share))
        else:
            variants.append(Variant(name, method))
    return variants


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
    """One evaluation.

    Args:
        out: the folder of results; a task has a folder in it, and a variant a folder in that.
        stores: the folder of stores, one for each method.
        max_length: tokens of prompt and answer.
        chat: whether tasks that allow it use the chat template.
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
        """Evaluate, and return the metrics by task and variant."""
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
        done = {variant.name: self._read(task, variant) for variant in self.variants}
        wanted = [e for e in examples if any(e.id not in done[v.name] for v in self.variants)]
        bar.update(len(self.variants) * (len(examples) - len(wanted)))
        if not wanted:
            return
        metric = METRICS[task.metric]() if task.metric in METRICS else None
        prompts = {e.id: encode(e, task, self.tokenizer, self.max_length, self.chat) for e in wanted}
        with Stores(self) as stores:
            for variant in self.variants:
                stores.subject(variant).store_passages(chain(*(prompt.passages for prompt in prompts.values())))
            for example in wanted:
                prompt = prompts[example.id]
                full: Answer | None = None
                for variant in self.variants:
                    if variant.name == FULL or example.id not in done[variant.name]:
                        subject = stores.subject(variant)
                        subject.prepare(prompt.prefix, prompt.passages)
                        answer = subject.ask(prompt, task.max_new_tokens if task.generates else 0)
                        full = full or answer
                        if example.id not in done[variant.name]:
                            line = _line(task, variant, example, prompt, answer, full, metric)
                            self._append(task, variant, line)
                    bar.update()

    def _folder(self, task: Task, variant: Variant) -> Path:
        return self.out / task.name / variant.folder

    def _read(self, task: Task, variant: Variant) -> dict[str, dict[str, Any]]:
        """The lines that are there; a last line that was cut off is dropped."""
        path = self._folder(task, variant) / "predictions.jsonl"
        if not path.exists():
            return {}
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]
            path.write_text(text, encoding="utf-8")
        return {line["id"]: line for line in map(json.loads, text.splitlines())}

    def _append(self, task: Task, variant: Variant, line: dict[str, Any]) -> None:
        folder = self._folder(task, variant)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "predictions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # --- figures

    def _metrics(self, task: Task, variant: Variant, examples: list[Example]) -> dict[str, Any]:
        found = self._read(task, variant)
        lines = [found[example.id] for example in examples]
        result: dict[str, Any] = {"task": task.name, "variant": variant.name, "metric": task.metric}
        result |= {"budget": variant.budget, "examples": len(lines)}
        for name in _FIGURES:
            values = [line[name] for line in lines if line.get(name) is not None]
            if values:
                low, high = interval(values)
                result[name] = {"mean": sum(values) / len(values), "low": low, "high": high}
        path = self._folder(task, variant) / "metrics.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result


class Stores:
    """The stores of a run, one for each method, since methods cut segments differently; of passages one for each way to
    store them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._subjects: dict[str, Subject] = {}
        self._stores: dict[str, KVStore] = {}
        self._stored: dict[str, set[tuple[int, ...]]] = {}  # by method: whatever the share, these are stored alike

    def subject(self, variant: Variant) -> Subject:
        if variant.name not in self._subjects:
            run, store, method, own = self._run, None, variant.method, variant.folder.split("@")[0]
            if method is not None:
                name = method.passages.replace(" ", "-") or own
                if name not in self._stores:
                    path = run.stores / name
                    self._stores[name] = KVStore(path, host_memory=run.host_memory, policy=method.policy)
                store = self._stores[name]
            stored = self._stored.setdefault(own, set())
            self._subjects[variant.name] = Subject(run.model, run.tokenizer, store, method, stored)
        return self._subjects[variant.name]

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *exception: object) -> None:
        for store in self._stores.values():
            store.close()


def _line(
    task: Task, variant: Variant, example: Example, prompt: Prompt, answer: Answer, full: Answer, metric: Any
) -> dict[str, Any]:
    """What is written of one answer."""
    text = answer.text
    if task.first_line:
        text = text.lstrip("\n").split("\n")[0]
    said = example.choices[answer.choice] if answer.choice is not None else text
    nll = None if answer.followed is None else -float(likelihoods(answer.followed, prompt.answer).mean())
    if metric is not None:
        score = metric.score(said, list(example.answers), example)
    else:  # perplexity of the reference answer
        score = None if nll is None else math.exp(nll)
    line = {
        "id": example.id,
        "prediction": said,
        "answers": list(example.answers),
        "score": score,
        "top1": _same(answer.first, full.first),
        "kl": _divergence(answer.first, full.first),
        "nll": nll,
        "ttft": answer.ttft,
        "tokens": {"prefix": len(prompt.prefix), "question": len(prompt.question)},
    }
    if answer.followed is not None and full.followed is not None:
        line |= {
            "answer_top1": _same(answer.followed, full.followed),
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
        stored = sum(len(passage) // HASH_TOKENS * HASH_TOKENS for passage in prompt.passages)
        if stored and isinstance(variant.method, Passages):
            line["compute"] = 100 * (line["computed"] - len(prompt.whole) + stored) / stored
    if answer.reading is not None:
        line |= asdict(answer.reading)
    return line


def _same(said: torch.Tensor, full: torch.Tensor) -> float:
    """Return in how many per cent of all places the likeliest token is full KV's."""
    return 100 * float((said.argmax(-1) == full.argmax(-1)).float().mean())


def _divergence(said: torch.Tensor, full: torch.Tensor) -> float:
    """Return the mean KL divergence of log-probabilities `[..., vocabulary]` from full KV's, in nats."""
    each = torch.nn.functional.kl_div(said, full, reduction="none", log_target=True).sum(-1)
    return max(0.0, float(each.mean()))


def draw_examples(tasks: list[Task], draw: Any) -> dict[Task, list[Example]]:
    """All examples of all tasks, before anything is written. Raises EvalError."""
    return {task: list(_checked(task, draw)) for task in tasks}


def _checked(task: Task, draw: Any) -> Iterator[Example]:
    seen: set[str] = set()
    for example in task.examples(draw):
        if example.id in seen:
            raise EvalError(f"{task.name}: two examples are called {example.id!r}")
        seen.add(example.id)
        yield example
    if not seen:
        raise EvalError(f"{task.name}: the data gave no example")
