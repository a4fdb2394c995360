"""Loss of keeping conversations in less space: Krul and its peers, over the bytes stored.

    PYTHONPATH=. python bench/conversation_answers.py --model eval/reference/xs --tokens 480
    PYTHONPATH=. python bench/conversation_answers.py --model smollm2-135m --tokens 768 --data DATA --dtype float32

A conversation is computed, suspended, and resumed from the store for each question. The page reports right answers, and
the distance of each answer token from full KV: top-1 agreement and KL divergence. The right answer is fed token by
token, so that all variants see the same tokens. In running text, the last 128 tokens are the new turn (Krul, Section
8.1). Chats are from people (ShareGPT): the first turns are the conversation, the next question and the beginning of its
answer are the new turn. Only reference models get questions, in their own language.

Bytes are those of the keys and values of a token in all layers, relative to their size in the model's dtype. They
exclude padding, since the heads of these models are small, and token tables. The sizes of files, which include both,
are listed as well. H2O (Zhang et al. 2023) drops tokens permanently: each head those that the context attended to
least. Layers with a sliding window keep their window. It runs on KV in memory.

Conversations of the first half of the seeds are for choosing settings, and for the pairs that are fixed for the model.
The others are reported.

`--openings 5 100 --turns 2 20` repeats the chats with a first turn of so many tokens, and equally long further turns.
The conversation is suspended after each turn, and the next one resumes it: a loss also changes the KV computed later.
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_answers import compare, note
from lib.common import load, parser_of
from lib.conversation_ways import NOISE, FixedPairs, Watching, Way, attended, forgetful, kv_bytes, ways
from lib.pages import machine, machine_text, save, table
from lib.stored import payload_bytes, shapes_of
from lib.workload import REFERENCE
from tqdm.auto import tqdm
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel

from eval.data import Data
from eval.metrics import interval
from eval.models import resolve
from eval.reference.check import contexts
from eval.reference.language import KINDS
from eval.reference.queries import language_of
from eval.tasks.ruler.haystack import sentences
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.conversations.distances import LayerDistances
from hf_tiered_cache.conversations.sharing import (
    MOST_CHANGE,
    calibrated_gamma,
    nearest_pairs,
    share_layers,
    target_pairs,
)
from hf_tiered_cache.methods import Method

CPU = torch.device("cpu")
TURN_TOKENS = 128
"""Number of last tokens of running text that are the new turn; maximum number of tokens of a chat's question."""
WITHIN = 0.99
"""Share of full KV's score that counts as no loss."""
SCORES = {"questions": "answers", "books": "top 1", "longbench": "top 1", "chat": "top 1"}
"""Figure that shows a loss, by kind of conversation."""
LONGBENCH = ("gov_report", "multi_news", "qmsum", "hotpotqa", "narrativeqa", "qasper", "multifieldqa_en", "musique")
_LETTERS = 8
"""Upper bound of the letters per token in LongBench's texts."""
_FILE, _PROPOSED = "file bytes a token", "proposed pairs"
_MARKERS = "osD^vPX*<"


@dataclass(frozen=True)
class Conversation:
    """Stored tokens, `[1, tokens]`, and the following questions: prompts and the tokens of their answers.

    The conversation is suspended after each number of tokens in `stops`, and at its end.
    """

    ids: torch.Tensor
    questions: list[tuple[tuple[int, ...], tuple[int, ...]]]
    stops: tuple[int, ...] = ()


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="eval/reference/xs", help="folder, or short name of eval.models")
    parser.add_argument("--tokens", type=int, default=480, help="number of tokens in a conversation, a multiple of 16")
    parser.add_argument("--count", type=int, default=20, help="number of conversations of each kind")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="data type of the model and its KV"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=list(MAKERS), default=list(MAKERS), help="kinds of conversations to measure"
    )
    parser.add_argument("--answer", type=int, default=48, help="number of tokens of an answer in a chat to compare")
    parser.add_argument(
        "--openings", nargs="+", type=int, default=[], help="numbers of tokens of a first turn of the chats"
    )
    parser.add_argument(
        "--turns", nargs="+", type=int, default=[2], help="numbers of turns of the chats with such a first turn"
    )
    parser.add_argument("--data", type=Path, help="folder with data sets, including longbench and sharegpt")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=ways(),
        default=list(ways()),
        metavar="WAY",
        help="variants to measure, in addition to full KV",
    )
    parser.add_argument(
        "--suffix", default="", help="suffix for the name of the results, if not all variants are measured"
    )
    parser.add_argument(
        "--choosing", action="store_true", help="use the other half of the seeds, for choosing settings"
    )
    arguments = parser.parse_args(argv)
    arguments.name, arguments.model = Path(arguments.model).name, Path(resolve(arguments.model))
    arguments.ways = list(dict.fromkeys(["full", NOISE, *arguments.ways]))  # what all are compared with
    if arguments.tokens % 16:
        parser.error("--tokens must be a multiple of 16; other tokens would be computed, not restored")
    if not all(0 < opening < arguments.tokens for opening in arguments.openings) or min(arguments.turns) < 2:
        parser.error(f"openings must have 1 to {arguments.tokens - 1} tokens, and chats at least 2 turns")
    return arguments


# --- conversations


def questions(arguments: argparse.Namespace, seed: int, count: int) -> Iterator[Conversation]:
    """Yield contexts in the reference models' language, with a question of each kind."""
    for context, questions_by_kind in contexts(language_of(arguments.model), arguments.tokens, count, seed, KINDS):
        ids = torch.tensor([[token for document in context.documents for token in document]])
        yield Conversation(ids, [(question.prompt, question.answer) for question in questions_by_kind.values()])


def books(arguments: argparse.Namespace, seed: int, count: int) -> Iterator[Conversation]:
    """Yield overlapping sections of the included book: of its first half for seed 0, else of its second half."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = tokenizer(" ".join(sentences(Data(None))), add_special_tokens=False)["input_ids"]
    tokens = arguments.tokens + TURN_TOKENS
    half = len(text) // 2
    for at in np.linspace(seed * half, (seed + 1) * half - tokens, count).astype(int).tolist():
        yield conversation_of(text[at : at + tokens], arguments)


def longbench(arguments: argparse.Namespace, seed: int, count: int) -> Iterator[Conversation]:
    """Yield the beginnings of LongBench's contexts: even rows for seed 0, else odd rows."""
    data, tokenizer = Data(arguments.data), AutoTokenizer.from_pretrained(arguments.model)
    sets = [data.rows("longbench", name, ("context",)) for name in LONGBENCH]
    texts = (rows[number]["context"] for number in range(seed, min(map(len, sets)), 2) for rows in sets)
    tokens = arguments.tokens + TURN_TOKENS
    encoded = (tokenizer(text[: _LETTERS * tokens], add_special_tokens=False)["input_ids"] for text in texts)
    for ids in islice((ids for ids in encoded if len(ids) >= tokens), count):
        yield conversation_of(ids, arguments)


def chat(arguments: argparse.Namespace, seed: int, count: int) -> Iterator[Conversation]:
    """Yield chats of people: those with even numbers for seed 0, else with odd numbers."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = Data(arguments.data).rows("sharegpt", "train", ("conversations",))
    talks = (said_in(rows[number]["conversations"], tokenizer, arguments) for number in range(seed, len(rows), 2))
    yield from islice((talk for talk in talks if talk is not None), count)


def in_turns(opening: int, turns: int, arguments: argparse.Namespace, seed: int, count: int) -> Iterator[Conversation]:
    """Yield chats of `turns` turns: a first one of `opening` tokens, and equally long ones."""
    stops = np.linspace(opening, arguments.tokens, turns).astype(int).tolist()
    for talk in chat(arguments, seed, count):
        yield replace(talk, stops=tuple(stops[:-1]))


def said_in(turns: list[dict[str, str]], tokenizer: Any, arguments: argparse.Namespace) -> Conversation | None:
    """Cut a chat into the stored first turns and the next question; None if it is too short."""
    ids, begin = list[int](), [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for question, reply in zip(turns[::2], turns[1::2], strict=False):
        prompt = begin + tokenizer(f"User: {question['value']}\nAssistant:", add_special_tokens=False)["input_ids"]
        answer = tokenizer(f" {reply['value'].strip()}\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= arguments.tokens and len(prompt) <= TURN_TOKENS and len(answer) >= arguments.answer:
            prompt = ids[arguments.tokens :][-TURN_TOKENS:] + prompt
            return Conversation(
                torch.tensor([ids[: arguments.tokens]]), [(tuple(prompt), tuple(answer[: arguments.answer]))]
            )
        ids, begin = ids + prompt + answer, []
    return None


def conversation_of(text: list[int], arguments: argparse.Namespace) -> Conversation:
    """Make a conversation of running text, preceded by the model's first token; its last tokens are the new turn."""
    begin = AutoTokenizer.from_pretrained(arguments.model).bos_token_id
    ids = [*([] if begin is None else [begin]), *text]
    turn = tuple(ids[arguments.tokens : arguments.tokens + TURN_TOKENS])
    return Conversation(torch.tensor([ids[: arguments.tokens]]), [(turn[:1], turn[1:])])


def skipped(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the kinds of conversations that are not measured, with the reason."""
    reasons = {} if arguments.model.resolve().parent == REFERENCE else {"questions": "not in the model's language"}
    if arguments.data is None:
        return reasons | {"longbench": "no --data", "chat": "no --data"}
    data = Data(arguments.data)
    lacking = [name for name in LONGBENCH if not data.has("longbench", name)]
    reasons |= {"longbench": f"--data has no {lacking[0]}"} if lacking else {}
    return reasons | ({} if data.has("sharegpt", "train") else {"chat": "--data has no sharegpt"})


MAKERS = {"questions": questions, "books": books, "longbench": longbench, "chat": chat}


# --- asking


@torch.no_grad()
def logits_of(
    model: PreTrainedModel, cache: Cache, before: torch.Tensor, prompt: tuple[int, ...], answer: tuple[int, ...]
) -> torch.Tensor:
    """Return the logits of each token of an answer, given those before it, `[answer, vocabulary]`.

    Args:
        model: Model to run.
        cache: Cache with the conversation, or an empty cache that restores it.
        before: Tokens of the conversation, `[1, n]`.
        prompt: Tokens of the question.
        answer: Tokens of the answer.
    """
    ids = torch.cat([before, torch.tensor([[*prompt, *answer[:-1]]])], dim=1)
    positions = torch.arange(ids.shape[1])[None]  # the tokens that H2O keeps have their original positions
    first = before.shape[1] if cache.get_seq_length() else 0
    output = model(
        input_ids=ids[:, first:],
        position_ids=positions[:, first:],
        past_key_values=cache,
        logits_to_keep=len(answer),
    )
    return output.logits[0].float()


@torch.no_grad()
def full_kv_of(model: PreTrainedModel, ids: torch.Tensor, piece: int = 0) -> DynamicCache:
    """Compute full KV of a conversation in memory, `piece` tokens at a time; 0 for all at once."""
    cache = DynamicCache(config=model.config)
    for chunk in ids.split(piece or ids.shape[1], dim=1):
        model(input_ids=chunk, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def suspend(
    model: PreTrainedModel, store: KVStore, method: Method, talk: Conversation, name: str
) -> tuple[Callable[[], Cache], dict[str, float]]:
    """Suspend a conversation. Return a function that creates caches which resume it, and the stored sizes."""
    for stop in (*talk.stops, talk.ids.shape[1]):
        cache = TieredCache(model, store, conversation=name, method=method)
        model(input_ids=talk.ids[:, :stop], past_key_values=cache, logits_to_keep=1)
        result = cache.suspend()
    assert result.tokens == talk.ids.shape[1] and not result.reason, result
    shapes = shapes_of(store, name)
    full = result.tokens * shapes[0].layout.bytes_per_token
    figures = {
        "storage": 100 * sum(map(payload_bytes, shapes)) / full,
        _FILE: result.bytes / result.tokens,
        "pairs": len(shapes[0].geometry.pairs),
        _PROPOSED: float(match[1]) if (match := re.match(r"\d+ of (\d+) pairs", result.merging)) else 0.0,
    }

    def returns() -> Cache:
        return TieredCache(model, store, conversation=name, method=method, record=False)

    return returns, figures


def layer_distances(
    model: PreTrainedModel, store: KVStore, talks: Sequence[Conversation]
) -> list[tuple[LayerDistances, np.ndarray]]:
    """Return the similarity of the layers in some conversations (see `Watching`)."""
    watching = Watching(recompute=0.0)
    for number, talk in enumerate(talks):
        suspend(model, store, watching, talk, str(number))
    return watching.distances


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return lists over questions and conversations by kind and way, the similarity of layers, and skipped kinds."""
    dtype, seed = getattr(torch, arguments.dtype), 0 if arguments.choosing else 1
    model = load(arguments.model, dtype, CPU)
    eager = load(arguments.model, dtype, CPU)
    eager.set_attn_implementation("eager")  # the one that gives weights
    lacking = skipped(arguments)
    kinds = {kind: make for kind, make in MAKERS.items() if kind not in lacking and kind in arguments.kinds}
    if "chat" in kinds:
        kinds |= {
            f"chat, opening of {opening}, {turns} turns": partial(in_turns, opening, turns)
            for turns in arguments.turns
            for opening in arguments.openings
        }
    with KVStore(folder / "watched") as store:
        measured_kinds = {kind: kinds[kind] for kind in kinds if kind in MAKERS}
        calibration_talks = [talk for make in measured_kinds.values() for talk in make(arguments, 0, arguments.count)]
        distances = layer_distances(model, store, calibration_talks)
    gamma, layers = calibrated_gamma(attention.initial_recent for attention, _ in distances), distances[0][0].layers
    mean = np.mean([changes for _, changes in distances], axis=0)

    def nearest(changes: np.ndarray, shared: float = 0.5) -> tuple[tuple[int, int], ...]:
        return nearest_pairs(layers, changes, target_pairs(len(layers), shared), most_distance=MOST_CHANGE)

    variants = ways(lambda shared: nearest(mean, shared))
    results: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for kind, make in kinds.items():
        talks = list(make(arguments, seed, arguments.count))
        stores = {name: KVStore(folder / kind / name.replace(" ", "-")) for name in arguments.ways}
        for number, talk in enumerate(tqdm(talks, desc=kind)):
            ask_all(
                model,
                eager,
                talk,
                str(number),
                {name: variants[name] for name in arguments.ways},
                stores,
                results[kind],
            )
        for store in stores.values():
            store.close()
    alike = {
        "layers": layers,
        "changes": mean.tolist(),
        "gamma": gamma,
        "chosen": {
            "Krul 0.5": [nearest(changes) for _, changes in distances],
            "published 0.5": [share_layers(attention, gamma, 0.5) for attention, _ in distances],
        },
        "fixed": {name: way.method.fixed for name, way in variants.items() if isinstance(way.method, FixedPairs)},
    }
    return {"found": results, "alike": alike, "skipped": lacking}


def ask_all(
    model: PreTrainedModel,
    eager: PreTrainedModel,
    talk: Conversation,
    name: str,
    variants: dict[str, Way],
    stores: dict[str, KVStore],
    results: dict[str, Any],
) -> None:
    """Store a conversation with every variant, and record its answers."""
    context = full_kv_of(model, talk.ids)
    expected = [logits_of(model, copy.deepcopy(context), talk.ids, *question) for question in talk.questions]
    masses = attended(eager, talk.ids) if any(way.method is None and not way.piece for way in variants.values()) else []
    for label, way in variants.items():
        if way.method is not None:
            returns, figures = suspend(model, stores[label], way.method, talk, name)
        else:
            resident = full_kv_of(model, talk.ids, way.piece) if way.piece else forgetful(context, masses, way.share)
            figures = {"storage": 100 * kv_bytes(resident) / kv_bytes(context), "pairs": 0}
            returns = lambda resident=resident: copy.deepcopy(resident)  # noqa: E731
        note(results, label, figures)
        for question, full in zip(talk.questions, expected, strict=True):
            cache = returns()
            note(results, label, compare(logits_of(model, cache, talk.ids, *question), full, question[1]))
            if isinstance(cache, TieredCache):
                assert cache.stats.tokens_restored == talk.ids.shape[1], cache.stats.reason


# --- telling


def largest_saving(results: dict[str, Any], score: str, variants: dict[str, Way]) -> dict[str, str]:
    """Return the variant with the least storage within 1 % of full KV by system; "" if there is none."""
    threshold, best = WITHIN * np.mean(results["full"][score]), dict[str, str]()
    for name in sorted(results, key=lambda name: -np.mean(results[name]["storage"])):
        best.setdefault(variants[name].system, "")
        if np.mean(results[name][score]) >= threshold:
            best[variants[name].system] = name
    return {system: name for system, name in best.items() if system != "full"}


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    parts = [
        f"# Answers of conversations that resume: {document['model']}, {document['tokens']} tokens\n\n"
        f"{machine_text(document['machine'])} {document['dtype']}, "
        f"up to {document['count']} conversations of each kind. *Storage*: bytes of keys and values relative to full "
        "KV. *File*: the same for files, which include padding and token tables. A *front* (recomputed prefix) is not "
        "stored, but recomputed on resume, which takes additional time. *Replayed*: pairs that were proposed to a "
        "replay in the last turn. *KL*: nats per token. In brackets: 95 % "
        "bootstrap intervals. *Rounded otherwise*: full KV, computed in pieces of 61 tokens; its loss is noise.\n",
        alike_text(document["alike"]),
    ]
    for kind, results in document["found"].items():
        parts.append(f"\n## {kind}\n\n" + kind_text(results, SCORES.get(kind, "top 1")))
    parts += [f"\n## {kind}\n\nNot measured: {reason}.\n" for kind, reason in document["skipped"].items()]
    return "".join(parts)


def alike_text(alike: dict[str, Any]) -> str:
    """Describe the similarity of layers in the conversations for choosing settings."""
    changes, layers = np.array(alike["changes"]), alike["layers"]
    steps = ", ".join(f"{layers[a]}-{layers[b]} {changes[a, b]:.2f}" for a, b in pairwise(range(len(layers))))
    count = sum(changes[a, b] <= MOST_CHANGE for a, b in pairwise(range(len(layers))))
    fixed = "; ".join(f"{name}: {', '.join(f'{a}-{b}' for a, b in pairs)}" for name, pairs in alike["fixed"].items())
    overlaps = " ".join(
        f"{name} selects {np.mean([len(pairs) for pairs in pairs_of_talks]):.1f} pairs per conversation. Two "
        f"conversations agree on {overlap(pairs_of_talks):.0f} % of the pairs that either of them selects."
        for name, pairs_of_talks in alike["chosen"].items()
    )
    return (
        f"\nChange of the KV of neighboring layers by a merge, mean over the conversations for choosing settings: "
        f"{steps}. {count} of {len(layers) - 1} change by at most {MOST_CHANGE:g}. "
        f"Pairs that are fixed for the model: {fixed}. {overlaps}\n"
    )


def overlap(pairs_of_talks: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the percentage of pairs that two conversations have in common, mean over all combinations of two."""
    sets = [{tuple(pair) for pair in pairs} for pairs in pairs_of_talks]
    return float(np.mean([100 * len(a & b) / max(1, len(a | b)) for a, b in combinations(sets, 2)] or [100]))


def kind_text(results: dict[str, Any], score: str) -> str:
    """Format one kind: all variants, and the largest saving of each system."""
    variants, rows = ways(), []
    for name, figures in results.items():
        low, high = interval(figures[score])
        storage = np.mean(figures["storage"])
        file = (
            f"{100 * np.mean(figures[_FILE]) / np.mean(results['full'][_FILE]):.0f} %"
            if _FILE in figures
            else "in memory"
        )
        scores = [f"{np.mean(figures[score]):.1f} ({low:.1f} to {high:.1f})"]
        scores += [f"{np.mean(figures['top 1']):.1f}"] * (score != "top 1")
        proposed = f"{np.mean(figures[_PROPOSED]):.1f}" if any(figures.get(_PROPOSED, [])) else ""
        sizes = [f"{np.mean(figures['pairs']):.1f}", proposed, f"{storage:.1f} %", f"{100 / storage:.2f}", file]
        rows.append([name, *sizes, *scores, f"{max(0.0, np.mean(figures['KL'])):.4f}"])
    heads = [
        "variant",
        "pairs",
        "replayed",
        "storage",
        "saving, ×",
        "file",
        f"{score}, %",
        *["top 1, %"] * (score != "top 1"),
        "KL",
    ]
    saving = [
        [system, name or "none", f"{100 / np.mean(results[name]['storage']):.2f}" if name else "1"]
        for system, name in largest_saving(results, score, variants).items()
    ]
    rounded, full = (np.mean(results[name][score]) for name in (NOISE, "full"))
    doubt = " Rounding alone loses more than that here, so this figure says nothing." * bool(rounded < WITHIN * full)
    return (
        f"{len(results['full'][score])} questions.\n\n{table(heads, rows)}\nLargest storage saving within 1 % of "
        f"full KV ({score}).{doubt}\n\n{table(['system', 'variant', 'saving, ×'], saving)}"
    )


def plot(plt: Any, document: dict[str, Any]) -> Any:
    """Plot quality over storage: a column for each kind, score above, divergence below."""
    variants, kinds = ways(), document["found"]
    width = max(7, 5 * len(kinds))
    figure, axes = plt.subplots(2, len(kinds), figsize=(width, 8), sharex=True, squeeze=False)
    systems = list(dict.fromkeys(way.system for way in variants.values()))
    colors = plt.get_cmap("tab20")
    for column, (kind, results) in enumerate(kinds.items()):
        for panel, figure_of in zip(axes[:, column], (SCORES.get(kind, "top 1"), "KL"), strict=True):
            for number, system in enumerate(systems):
                names = [name for name in results if variants[name].system == system]
                points = sorted(
                    (np.mean(results[name]["storage"]), np.mean(results[name][figure_of])) for name in names
                )
                if points:
                    look = {
                        "color": colors(number % colors.N),
                        "marker": _MARKERS[number % len(_MARKERS)],
                        "markersize": 6,
                    }
                    panel.plot(*zip(*points, strict=True), label=system, linewidth=1, **look)
            panel.set(
                xlabel="storage, % of full KV", ylabel="KL, nats per token" if figure_of == "KL" else f"{figure_of}, %"
            )
        axes[0, column].axhline(
            WITHIN * np.mean(results["full"][SCORES.get(kind, "top 1")]), color="gray", linestyle=":", linewidth=1
        )
        axes[0, column].set_title(kind)
        axes[1, column].set_yscale("symlog", linthresh=1e-4)
        largest = max(np.mean(figures["KL"]) for figures in results.values())
        axes[1, column].set_ylim(-2e-5, 2 * largest + 1e-4)  # below 1e-4 the axis is linear, and 0 is on it
    handles = {
        label: line for panel in axes.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=width // 2, fontsize="small")
    return figure


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of()
    with tempfile.TemporaryDirectory() as folder:
        machine_info, results = machine(CPU, Path(folder)), measure(arguments, Path(folder))
    settings = {name: getattr(arguments, name) for name in ("tokens", "count", "dtype", "choosing")}
    document = {"machine": machine_info, "model": arguments.name, **settings, **results}
    text = report(document)
    name = (
        f"conversation-answers-{arguments.name}-{arguments.dtype}" + "-choosing" * arguments.choosing + arguments.suffix
    )
    save(arguments.out, name, document, text, plot)
    print(text)


if __name__ == "__main__":
    main()
