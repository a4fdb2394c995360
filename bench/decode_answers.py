"""Loss of selecting chunks at each token: KVDrive's index and its peers, at equal budgets.

    PYTHONPATH=. python bench/decode_answers.py --model eval/reference/long --tokens 4096

A context is stored, and questions about it are answered, each with a cache of its own. The tokens of question and
answer attend to what each index selects. The page reports right answers, and the distance of each decoded token from
full attention: top-1 agreement and KL divergence. The answer of full attention is fed token by token, so that all
indexes see the same tokens. Contexts of the first half of the seeds are for choosing settings; the others are reported.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.common import parser_of
from lib.pages import machine, machine_text, save, table
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

import eval.baselines  # noqa: F401  # registers their indexes
from eval.reference.check import contexts
from eval.reference.language import KINDS
from eval.reference.queries import language_of, load
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import KVDrive, Method

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "clusters (KVDRIVE)": {"index": "clusters"},
    "cluster_boxes (ours)": {"index": "cluster_boxes"},
    "page_bounds of 16 (Quest)": {"index": "page_bounds", "chunk_tokens": 16},
    "chunk_means (ShadowKV)": {"index": "chunk_means"},
    "token_clusters (RetroInfer)": {"index": "token_clusters", "chunk_tokens": 1},
    "random": {"index": "random"},
}


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/long"), help="folder of a reference model")
    parser.add_argument("--tokens", type=int, default=4096, help="number of context tokens")
    parser.add_argument(
        "--contexts", type=int, default=10, help="number of reported contexts, with a question of each kind"
    )
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        default=[0.0156, 0.03125, 0.0625, 0.25],
        help="budgets, as shares of the context",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="indexes to measure")
    parser.add_argument(
        "--suffix", default="", help="suffix for the name of the results, if not all indexes are measured"
    )
    parser.add_argument(
        "--choosing", action="store_true", help="use the other half of the seeds, for choosing settings"
    )
    return parser.parse_args(argv)


@torch.no_grad()
def logits_of(model: PreTrainedModel, cache: Any, prompt: torch.Tensor, answer: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of each token of an answer, given those before it, `[answer, vocabulary]`."""
    logits, next_input = [], prompt
    for token in answer:
        logits.append(model(input_ids=next_input, past_key_values=cache, logits_to_keep=1).logits[0, -1])
        next_input = torch.tensor([[token]])
    return torch.stack(logits).float()


def compare(logits: torch.Tensor, full_logits: torch.Tensor, answer: tuple[int, ...]) -> dict[str, float]:
    """Compare logits with those of full attention and with the answer: percentages, and the divergence in nats."""
    predicted, target = logits.argmax(1), torch.tensor(answer)
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(1), full_logits.log_softmax(1), log_target=True, reduction="none"
    )
    return {
        "answers": 100.0 * bool((predicted == target).all()),
        "first tokens": 100.0 * bool(predicted[0] == target[0]),
        "top 1": 100.0 * float((predicted == full_logits.argmax(1)).float().mean()),
        "KL": float(divergence.sum(1).mean()),
    }


def answer_logits(
    model: PreTrainedModel, store: KVStore, method: Method, prompt: torch.Tensor, answer: tuple[int, ...]
):
    """Answer a question with a new cache, and return the logits."""
    cache = TieredCache(model, store, method=method, record=False)
    logits = logits_of(model, cache, prompt, answer)
    assert cache.stats.tokens_restored, cache.stats.reason
    return logits


def measure(model: PreTrainedModel, arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Return lists over questions, by variant and budget."""
    language, results = language_of(arguments.model), dict[str, dict[str, Any]]()
    seed = 0 if arguments.choosing else 1
    all_contexts = list(contexts(language, arguments.tokens, arguments.contexts, seed, KINDS))
    for number, (context, questions) in enumerate(tqdm(all_contexts, desc="contexts")):
        ids = torch.tensor([[token for document in context.documents for token in document]])
        with KVStore(folder / str(number), index_memory="4GiB") as store:
            store.precompute(model, ids, method=KVDrive(), progress=False)
            for question in questions.values():
                prompt = torch.cat([ids, torch.tensor([question.prompt])], dim=1)
                full_logits = logits_of(model, DynamicCache(config=model.config), prompt, question.answer)
                note(results, "full", compare(full_logits, full_logits, question.answer))
                ways = {
                    f"{way} {budget}": partial(
                        answer_logits, model, store, KVDrive(budget, **WAYS[way]), prompt, question.answer
                    )
                    for way in arguments.ways
                    for budget in arguments.budgets
                }
                for name, ask in ways.items():
                    note(results, name, compare(ask(), full_logits, question.answer))
    return results


def note(results: dict[str, dict[str, Any]], name: str, figures: dict[str, float]) -> None:
    """Append the figures of a question to the lists of a variant."""
    for figure, value in figures.items():
        results.setdefault(name, {}).setdefault(figure, []).append(value)


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, results, budgets = document["machine"], document["results"], document["budgets"]
    questions = len(results["full"]["answers"])
    parts = [
        f"# Answers with chunks selected at each token: {document['model']}, {document['tokens']} tokens\n\n"
        f"{machine_text(machine_info)} {questions} questions, "
        f"of which full attention answers {np.mean(results['full']['answers']):.0f} %. In addition to the budget, all "
        "attend to the first chunk and the last 64 tokens.\n"
    ]
    for figure, digits in (("answers", 0), ("first tokens", 0), ("top 1", 1), ("KL", 3)):
        rows = [
            [way, *(f"{np.mean(results[f'{way} {b}'][figure]):.{digits}f}" for b in budgets)]
            for way in document["ways"]
        ]
        unit = "nats per token" if figure == "KL" else "%"
        parts.append(f"\n## {figure}, {unit}\n\n" + table(["index", *(f"{b:.2%}" for b in budgets)], rows))
    return "".join(parts)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    model = load(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        machine_info, results = machine(CPU, Path(folder)), measure(model, arguments, Path(folder))
    document = {
        "machine": machine_info,
        "model": arguments.model.name,
        "tokens": arguments.tokens,
        "budgets": arguments.budgets,
        "ways": arguments.ways,
        "results": results,
    }
    text = report(document)
    save(
        arguments.out,
        f"decode-answers-{arguments.model.name}" + "-choosing" * arguments.choosing + arguments.suffix,
        document,
        text,
    )
    print(text)


if __name__ == "__main__":
    main()
