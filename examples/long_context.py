"""A text that is longer than memory: its KV lies on disk, and each token reads what it needs of it.

    python examples/long_context.py                             # 32,768 tokens, a small model that ships; no network
    python examples/long_context.py --model NAME_OR_PATH --text FILE --tokens 65536 --skip-full
    python examples/long_context.py --model NAME_OR_PATH --text FILE --question "Who is she?"

Facts are hidden in a text, and asked for at its end. Three processes do so, each with a memory of its own:

1. computes the text in pieces, each of which goes to the store before the next is computed, and answers;
2. opens the same store, and answers at once: nothing of the text is computed again;
3. is what they are compared with: full attention, with all KV in memory.

Host memory is given a tenth of the text's KV (--host-memory). Each token attends to a sixty-fourth of the text
(--budget), which each head chooses anew, and to the text's first and last tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
BOOK = HERE / "data" / "a_scandal_in_bohemia_part_1.txt"
REFERENCE = HERE.parent / "eval" / "reference" / "long"
sys.path.append(str(HERE.parent))  # eval/ is not installed with the package
TRAINED = 4608
"""Tokens of the longest contexts that the reference model was trained on; beyond, YaRN stretches its positions."""
DOES = {
    "store": "computes the text in pieces, and stores it",
    "again": "answers about the same text at once",
    "full": "does so with full attention",
}


def main() -> int:
    arguments = arguments_of()
    if arguments.process:
        figures = answer_with_all(arguments) if arguments.process == "full" else answer_from_store(arguments)
        print(json.dumps(figures))
        return 0

    from rich.console import Console

    console, found = Console(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="hf-tiered-long-") as folder:
        own = ["--store", arguments.store or f"{folder}/store", "--answers", f"{folder}/answers.pt", "--process"]
        for number, (name, does) in enumerate(DOES.items(), start=1):
            if name == "full" and arguments.skip_full:
                continue
            console.print(f"[bold]process {number}[/bold] {does}", highlight=False)
            command = [sys.executable, __file__, *sys.argv[1:], *own, name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                console.print(f"process {number} failed; its errors stand above")
                return done.returncode
            found[name] = json.loads(done.stdout.splitlines()[-1])
    show(console, arguments, found)
    return 0 if found["again"]["answers"][0]["restored"] else 1


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default=str(REFERENCE),
        help="a model of the hub, a folder, or a short name of eval.models; default: one that ships",
    )
    parser.add_argument("--text", type=Path, default=BOOK, help="a file that is cut, or begins again, at --tokens")
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--tokens", default=32768, **number, help="of the text; default: %(default)s")
    parser.add_argument("--questions", default=6, **number, help="about as many facts; default: %(default)s")
    parser.add_argument("--question", metavar="TEXT", help="your own, about the text as it is: no facts are hidden")
    parser.add_argument("--new-tokens", default=16, **number, help="of each answer; default: %(default)s")
    share = {"type": float, "metavar": "X"}
    parser.add_argument("--budget", default=1 / 64, **share, help="share of the text; default: %(default)s")
    parser.add_argument("--window", default=2, **share, help="budgets that device memory keeps; default: %(default)s")
    parser.add_argument("--piece", default=2048, **number, help="tokens computed at once; default: %(default)s")
    parser.add_argument("--host-memory", metavar="SIZE", help='for KV, such as "64MiB"; default: a tenth of it')
    parser.add_argument("--store", metavar="DIR", help="default: a temporary one, deleted at the end")
    parser.add_argument("--dtype", help="default: the model's; float32 for the one that ships, on a CPU")
    parser.add_argument(
        "--yarn", **share, help="stretches positions so far; default: 1, or what the model that ships needs"
    )
    parser.add_argument("--skip-full", action="store_true", help="leave the third process out")
    parser.add_argument("--process", choices=DOES, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# --- the text, and the questions about it


class Asked(NamedTuple):
    """A question, as token ids, and how its answer begins, if that is known; tokens from there to the text's end."""

    ids: list[int]
    answer: str = ""
    distance: int = 0


def facts_for(vocabulary: dict[str, int], count: int) -> list[tuple[str, str, str]]:
    """Sentences for a text, the questions about them, and how the answers begin."""
    draw = random.Random(0)
    if "<is>" in vocabulary:  # the reference models speak a language of their own, among English
        keys, firsts, seconds = (
            draw.sample(range(96), count),
            draw.sample(range(64), count),
            draw.choices(range(64), k=count),
        )
        return [
            (f"<is><k{key}><a{first}><b{second}>", f"<q><k{key}>", f"<a{first}><b{second}>")
            for key, first, second in zip(keys, firsts, seconds, strict=True)
        ]
    houses, words = draw.sample(range(100, 1000), count), draw.sample(range(1000, 10000), count)
    return [
        (
            f"\nThe pass word of house {house} is {word}.\n",
            f"\n\nQuestion: What is the pass word of house {house}?\nAnswer: The pass word of house {house} is",
            f"{word}",
        )
        for house, word in zip(houses, words, strict=True)
    ]


def prompts_for(tokenizer: Any, arguments: argparse.Namespace) -> tuple[list[int], list[Asked]]:
    """A text of `arguments.tokens` tokens with facts at equal distances in it, and the questions about them."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    text, context = encode(arguments.text.read_text()), list(tokenizer("").input_ids)
    if arguments.question:
        room = arguments.tokens - len(context)
        return context + [text[i % len(text)] for i in range(room)], [Asked(encode(arguments.question))]
    facts, asked, at = facts_for(tokenizer.get_vocab(), arguments.questions), list[Asked](), 0
    sentences = [encode(sentence) for sentence, _, _ in facts]
    room = arguments.tokens - len(context) - sum(map(len, sentences))
    if room < len(facts):
        raise SystemExit(f"--tokens: {arguments.tokens} have no room for {len(facts)} facts")
    for number, (sentence, (_, question, answer)) in enumerate(zip(sentences, facts, strict=True), start=1):
        stop = room * number // (len(facts) + 1)
        context += [text[i % len(text)] for i in range(at, stop)]
        asked.append(Asked(encode(question), answer, arguments.tokens - len(context)))
        context += sentence
        at = stop
    return context + [text[i % len(text)] for i in range(at, room)], asked


# --- what each process does


def answer_from_store(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer one question, or in the second process all, within the budget, each with a cache of its own."""
    import torch

    from hf_tiered_cache import KVStore, TieredCache
    from hf_tiered_cache.methods import KVDrive
    from hf_tiered_cache.units import parse_bytes

    model, tokenizer = load(arguments)
    context, questions = prompts_for(tokenizer, arguments)
    kv_bytes = len(context) * bytes_per_token(model, context[:64])
    host = parse_bytes(arguments.host_memory, "host_memory") if arguments.host_memory else kv_bytes // 10
    method = KVDrive(arguments.budget, window=arguments.window, prefill_tokens=arguments.piece)
    memory, answers, kept = Memory(), [], []
    with KVStore(arguments.store, host_memory=host) as store:
        for asked in questions if arguments.process == "again" else questions[:1]:
            cache = TieredCache(model, store, method=method)
            said, logits, figures = generate(model, context + asked.ids, cache, arguments.new_tokens)
            kept.append((said, logits))
            figures |= {"restored": cache.stats.tokens_restored, "computed": cache.stats.tokens_computed}
            answers.append(figures | judged(tokenizer, said, asked) | {"reason": cache.stats.reason})
        found = {"kv_bytes": kv_bytes, "host_memory": host} | memory.used()
    torch.save(kept, arguments.answers)

    def bytes_in(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    folder = Path(arguments.store)
    return found | {"answers": answers, "bytes_on_disk": bytes_in(folder), "index_bytes": bytes_in(folder / "beside")}


def answer_with_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer all questions behind KV that is computed once; and judge the second process's answers, token by token.

    Given the question and the answer so far, is the likeliest token the same, and how far (Kullback-Leibler divergence,
    in nats) is one distribution from the other?
    """
    import torch
    from transformers import DynamicCache

    model, tokenizer = load(arguments)
    context, questions = prompts_for(tokenizer, arguments)
    bytes_per_token(model, context[:64])
    memory, answers = Memory(), []
    cache = DynamicCache()  # without a config every layer keeps all, so that the text is left when questions go

    def forget_question() -> None:
        cache.crop(len(context) - cache.get_seq_length())

    for asked in questions:
        before = cache.get_seq_length()
        said, _, figures = generate(model, context + asked.ids, cache, arguments.new_tokens)
        figures |= {"restored": 0, "computed": len(context) + len(asked.ids) + len(said) - 1 - before}
        answers.append(figures | judged(tokenizer, said, asked))
        forget_question()
    found, same, divergences = memory.used(), 0, list[float]()
    for asked, (said, ours) in zip(questions, torch.load(arguments.answers), strict=True):
        ids = torch.tensor([asked.ids + said[:-1]], device=model.device)
        with torch.no_grad():
            full = model(input_ids=ids, past_key_values=cache, logits_to_keep=len(said)).logits[0].float().cpu()
        forget_question()
        same += int((full.argmax(1) == ours.argmax(1)).sum())
        both = ours.log_softmax(1), full.log_softmax(1)  # [new tokens, vocabulary]
        divergences += torch.nn.functional.kl_div(*both, log_target=True, reduction="none").sum(1).tolist()
    return found | {"answers": answers, "same": same, "of": len(divergences), "KL": statistics.mean(divergences)}


class Watch:
    """A streamer, which is told of the prompt and of every token."""

    def __init__(self, cache: Any) -> None:
        self.times, self.moved, self._cache = [time.perf_counter()], list[int](), cache

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        tiers = self._cache.stats.tiers.values() if hasattr(self._cache, "stats") else ()
        self.moved.append(sum(tier.bytes for tier in tiers))

    def end(self) -> None:
        pass


def generate(model: Any, prompt: list[int], cache: Any, new_tokens: int) -> tuple[list[int], Any, dict[str, Any]]:
    """A greedy answer, its logits `[new_tokens, vocabulary]`, and how long it took, and what was moved for it."""
    import torch

    watch, ids = Watch(cache), torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=watch,
        output_logits=True,
        return_dict_in_generate=True,
    )
    steps = max(1, new_tokens - 1)
    first, last = watch.times[2], watch.times[-1]  # the prompt comes before
    figures = {
        "ttft_s": first - watch.times[0],
        "tokens_per_s": steps / (last - first) if new_tokens > 1 else 0.0,
        "fetched_per_token": (watch.moved[-1] - watch.moved[1]) / steps,
    }
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().cpu(), figures


def judged(tokenizer: Any, said: list[int], asked: Asked) -> dict[str, Any]:
    """An answer in words, cut where the right one ends, and whether it is that one."""
    words = tokenizer.decode(said, skip_special_tokens=True).strip()
    right = bool(asked.answer) and words.startswith(asked.answer)
    return {
        "said": words[: len(asked.answer)] if asked.answer else words,
        "answer": asked.answer,
        "right": right,
        "distance": asked.distance,
    }


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """A model, where there is a GPU on it, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from eval.models import resolve

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, name = "cuda" if torch.cuda.is_available() else "cpu", resolve(arguments.model)
    config, shipped = AutoConfig.from_pretrained(name), Path(name).resolve() == REFERENCE
    trained = TRAINED if shipped else config.max_position_embeddings
    factor = arguments.yarn or (max(1.0, arguments.tokens / trained) if shipped else 1.0)
    if factor > 1:
        theta = config.rope_parameters["rope_theta"]
        config.rope_parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        config.rope_parameters["original_max_position_embeddings"] = trained
    elif arguments.tokens > trained and arguments.process == "store":
        print(
            f"the model was made for {trained} tokens; --yarn {arguments.tokens / trained:.1f} may help",
            file=sys.stderr,
        )
    dtype = arguments.dtype or ("float32" if shipped and device == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def bytes_per_token(model: Any, ids: list[int]) -> int:
    """Of KV. And a first request, which in each process is slow for reasons of its own."""
    from transformers import DynamicCache

    cache = DynamicCache()
    generate(model, ids, cache, 1)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // len(ids)


class Memory:
    """What this process takes of the memory, from now on at most."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        with suppress(OSError):  # else loading the model may be the peak
            Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        self._before = self._resident("VmRSS")
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
            self._gpu_before = self._cuda.memory_allocated()

    def used(self) -> dict[str, int]:
        """Bytes that were resident at most, how many of them came since, and the same for a GPU."""
        peak = self._resident("VmHWM")
        gpu = self._cuda.max_memory_allocated() - self._gpu_before if self._cuda else 0
        return {"resident": peak, "added": peak - self._before, "gpu_added": gpu}

    @staticmethod
    def _resident(name: str) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[name].split()[0]) * 1024  # is in kB


# --- the tables at the end


def show(console: Any, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """What the processes took, what they answered, and how far they agree."""
    from rich.markup import escape
    from rich.table import Table

    from hf_tiered_cache.units import format_bytes

    again, full = found["again"], found.get("full")
    kv, host, disk = (format_bytes(again[name]) for name in ("kv_bytes", "host_memory", "bytes_on_disk"))
    title = f"\n{arguments.tokens} tokens; {kv} of KV, {disk} on disk"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("process")
    for name in found:
        table.add_column({"store": "1 stores", "again": "2 restores", "full": "3 full"}[name], justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "first answer: first token after": lambda one: f"{one['answers'][0]['ttft_s']:.2f} s",
        "  tokens computed for it": lambda one: f"{one['answers'][0]['computed']}",
        "later answers: first token after": lambda one: (
            f"{median(one, 'ttft_s', 1):.2f} s" if one["answers"][1:] else ""
        ),
        "decoded tokens/s": lambda one: f"{median(one, 'tokens_per_s'):.1f}",
        "  fetched for a token": lambda one: "" if one is full else format_bytes(median(one, "fetched_per_token")),
        "memory beyond the model's, peak": lambda one: format_bytes(one["added"]),
        "  resident in all": lambda one: format_bytes(one["resident"]),
        "GPU memory beyond the model's": lambda one: format_bytes(one["gpu_added"]) if one["gpu_added"] else "",
        "right answers": lambda one: f"{sum(known)} of {len(known)}" if (known := graded(one)) else "",
    }
    for name, figure in rows.items():
        values = [figure(one) for one in found.values()]
        if any(values):
            table.add_row(name, *values)
    console.print(table, highlight=False)
    console.print(
        f"\nOf the memory {host} may be KV in host memory, and about {format_bytes(again['index_bytes'])} is the index "
        "by which each head chooses. The rest is what is computed at once, and what a program takes that is at work.",
        highlight=False,
    )

    table = Table(title="\nAnswers", title_justify="left", box=None)
    for heading in ("tokens back", "within the budget", "full attention", "right"):
        table.add_column(heading, justify="right" if heading == "tokens back" else "left")
    for number, ours in enumerate(again["answers"]):
        theirs = full["answers"][number]["said"] if full else ""
        table.add_row(*map(escape, (str(ours["distance"] or ""), ours["said"], theirs, ours["answer"])))
    console.print(table, highlight=False)
    if full:
        console.print(
            f"\nOf {full['of']} tokens that were answered within the budget, full attention finds {full['same']} "
            f"likeliest, too ({full['same'] / full['of']:.1%}); its distribution is {full['KL']:.4f} nats away "
            "(KL divergence, mean)."
        )
    if not again["answers"][0]["restored"]:
        console.print(f"The second process restored nothing: {again['answers'][0]['reason']}")


def median(figures: dict[str, Any], name: str, first: int = 0) -> float:
    """Of the answers from `first` on."""
    return statistics.median(one[name] for one in figures["answers"][first:])


def graded(figures: dict[str, Any]) -> list[bool]:
    """Which answers are right, of those that are known."""
    return [one["right"] for one in figures["answers"] if one["answer"]]


if __name__ == "__main__":
    raise SystemExit(main())
