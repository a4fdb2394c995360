"""Scores of lm-evaluation-harness with stored KV, compared with those of plain transformers (`hf`), on five tasks.

    PYTHONPATH=. python bench/harness.py --model smollm2-135m --data DATA

The tasks are SST-2, RTE, COPA, PIQA and OpenBookQA, from local files, after the same solved examples for all questions.
`hf` and `hf-tiered` with the exact method must choose the same answers. `hf-tiered` is also measured at several
budgets.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from lib.common import listed, parser_of
from lib.pages import machine, machine_text, publish, table
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from eval.models import resolve
from hf_tiered_cache.integrations.lm_eval import HFTieredLM

TASKS: dict[str, dict[str, Any]] = {
    "sst2": {
        "doc_to_text": "{{sentence}}\nPositive or negative?",
        "doc_to_choice": ["negative", "positive"],
    },
    "rte": {
        "doc_to_text": "{{sentence1}}\nIt follows that: {{sentence2}}\nTrue or false?",
        "doc_to_choice": ["True", "False"],
    },
    "copa": {
        "doc_to_text": "{{premise.strip().rstrip('.')}} {{'because' if question == 'cause' else 'therefore'}}",
        "doc_to_choice": "{{[choice1, choice2]}}",
    },
    "piqa": {"doc_to_text": "Goal: {{goal}}\nSolution:", "doc_to_choice": "{{[sol1, sol2]}}"},
    "openbookqa": {
        "doc_to_text": "{{question_stem}}",
        "doc_to_choice": "{{choices.text}}",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
    },
}
HF, EXACT = "hf", "hf-tiered, exact"


def write_tasks(data: Path, shots: int, folder: Path) -> None:
    """Write the task files. Without a training split, solved examples come from the validation split."""
    for name, template in TASKS.items():
        splits = {path.name.partition(".")[0]: str(path) for path in (data / name).glob("*.jsonl*")}
        files = {"validation": splits["validation"]} | ({"train": splits["train"]} if "train" in splits else {})
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "test_split": "validation",
            "fewshot_split": "train" if "train" in files else "validation",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": shots,
            "output_type": "multiple_choice",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task | template))  # JSON is YAML


def ask(model: HFLM, manager: TaskManager, limit: int) -> dict[str, Any]:
    """Return, by task, the scores of the answers `[questions, choices]`, their correctness, and the seconds."""
    results: dict[str, Any] = {}
    for name in TASKS:
        started = time.perf_counter()
        result = lm_eval.simple_evaluate(
            model=model, tasks=[f"local_{name}"], task_manager=manager, limit=limit, bootstrap_iters=0
        )
        samples = result["samples"][f"local_{name}"]
        results[name] = {
            "scores": [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples],
            "right": [bool(sample["acc"]) for sample in samples],
            "seconds": time.perf_counter() - started,
        }
    return results


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    results, rows = document["found"], []
    for way, tasks in results.items():
        pairs = [
            (np.array(scores), np.array(hf_scores))
            for name, task in tasks.items()
            for scores, hf_scores in zip(task["scores"], results[HF][name]["scores"], strict=True)
        ]
        agreement = 100 * np.mean([scores.argmax() == hf_scores.argmax() for scores, hf_scores in pairs])
        largest = max(np.abs(scores - hf_scores).max() for scores, hf_scores in pairs)
        right = [f"{100 * np.mean(task['right']):.1f}" for task in tasks.values()]
        seconds = sum(task["seconds"] for task in tasks.values())
        rows.append([way, *right, f"{agreement:.1f}", f"{largest:.2g}", f"{seconds:.0f}"])
    headings = ["model type", *TASKS, "same choice, %", "largest difference, nats", "seconds"]
    machine_info = document["machine"]
    return (
        f"# lm-evaluation-harness: {document['model']}\n\n{machine_text(machine_info)} "
        f"float32, {document['shots']} solved examples, {document['limit']} questions of each task. Right answers in "
        "percent. *Same choice* and *largest difference* of an answer's log-likelihood are relative to `hf`. Seconds "
        f"are those of one run in this order, on a machine that may have been busy.\n\n{table(headings, rows)}\n"
    )


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Plot the right answers of each task: a bar for full KV, and one for each budget."""
    figure, axes = plt.subplots(figsize=(6.5, 3.5))
    names = [HF, *(way_of(budget) for budget in document["budgets"])]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        right = [100 * np.mean(document["found"][name][task]["right"]) for task in TASKS]
        positions = np.arange(len(TASKS)) + width * (number - (len(names) - 1) / 2)
        axes.bar_label(axes.bar(positions, right, width, label=name), fmt="%.0f", fontsize="small")
    axes.set_xticks(range(len(TASKS)), TASKS)
    axes.set(ylabel="right answers, %", ylim=(0, 100))
    axes.set_title(f"{document['model']}, {document['limit']} questions of each task", fontsize="medium")
    axes.legend(fontsize="small", ncols=len(names), loc="upper right")
    return figure


def way_of(budget: float) -> str:
    """Return the name of a row."""
    return f"hf-tiered, contiguous_kv, {budget:.0%}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="short name of eval.models, name on the Hub, or folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with data sets")
    parser.add_argument("--shots", type=int, default=16, help="number of solved examples before each question")
    parser.add_argument("--limit", type=int, default=16, help="number of questions per task")
    budgets = [0.05, 0.1, 0.25]
    parser.add_argument("--budgets", type=listed(float), default=budgets, help="budgets, as shares of the prefix")
    return parser.parse_args(arguments)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "batch_size": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(arguments.data, arguments.shots, folder)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        hf_model = HFLM(pretrained=resolve(arguments.model), **options)
        results = {HF: ask(hf_model, manager, arguments.limit)}
        ways = {EXACT: "exact"} | {way_of(budget): f"contiguous_kv:budget={budget}" for budget in arguments.budgets}
        for number, (way, method) in enumerate(ways.items()):
            tiered_model = HFTieredLM(
                resolve(arguments.model), method=method, store=str(folder / f"kv{number}"), **options
            )
            results[way] = ask(tiered_model, manager, arguments.limit)
        machine_info = machine(torch.device("cpu"), folder)
    document = {
        **{"machine": machine_info, "model": Path(arguments.model).name, "found": results},
        **{name: getattr(arguments, name) for name in ("shots", "limit", "budgets")},
    }
    publish(arguments.out, f"harness-{document['model']}", document, report, plot)


if __name__ == "__main__":
    main()
