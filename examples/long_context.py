"""A text that is longer than memory: its KV is on disk, and each token reads the part that it needs.

    python examples/long_context.py                             # 32,768 tokens, a small model that ships; no network
    python examples/long_context.py --model NAME_OR_PATH --text FILE --tokens 65536 --skip-full
    python examples/long_context.py --model NAME_OR_PATH --text FILE --question "Who is she?"

Facts are inserted into a text, and questions about them follow at its end. Three processes answer them:

1. The first process computes the text in pieces, and stores each piece before it computes the next one.
2. The second process opens the same store, and answers without computing the text again.
3. For comparison, the third process uses full attention, with all KV in memory.

Host memory has room for a tenth of the text's KV (--host-memory). Each token attends to a sixty-fourth of the text
(--budget), which each head selects for each token, and to the text's first and last tokens.
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
"""Maximum number of context tokens in the training of the reference model; YaRN extends longer texts."""
DOES = {
    "store": "computes the text in pieces, and stores it",
    "again": "answers about the same text from the store",
    "full": "answers with full attention",
}


def main() -> int:
    """Run the three processes, and print their answers; return the exit status."""
    arguments = arguments_of()
    if arguments.process:
        from hf_tiered_cache import TieredCacheError

        try:
            figures = answer_with_all(arguments) if arguments.process == "full" else answer_from_store(arguments)
        except (TieredCacheError, OSError, UnicodeError) as error:  # such as a budget above 1
            raise SystemExit(str(error)) from None
        print(json.dumps(figures))
        return 0

    from rich.console import Console

    console, results = Console(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="hf-tiered-long-") as folder:
        process_options = [
            "--store",
            arguments.store or f"{folder}/store",
            "--answers",
            f"{folder}/answers.pt",
            "--process",
        ]
        for number, (name, description) in enumerate(DOES.items(), start=1):
            if name == "full" and arguments.skip_full:
                continue
            console.print(f"[bold]process {number}[/bold] {description}", highlight=False)
            command = [sys.executable, __file__, *sys.argv[1:], *process_options, name]
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if process.returncode:
                console.print(f"process {number} failed; see its errors above")
                return process.returncode
            results[name] = json.loads(process.stdout.splitlines()[-1])
    show(console, arguments, results)
    return 0 if results["again"]["answers"][0]["restored"] else 1


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default=str(REFERENCE),
        help="model of the hub, folder, or short name of eval.models; default: an included reference model",
    )
    parser.add_argument("--text", type=Path, default=BOOK, help="text file, cut or repeated to fill --tokens")
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--tokens", default=32768, **number, help="number of tokens in the text; default: %(default)s")
    parser.add_argument("--questions", default=6, **number, help="number of facts and questions; default: %(default)s")
    parser.add_argument("--question", metavar="TEXT", help="your own question about the unchanged text, without facts")
    parser.add_argument(
        "--new-tokens", default=16, **number, help="number of tokens in each answer; default: %(default)s"
    )
    share = {"type": float, "metavar": "X"}
    parser.add_argument("--budget", default=1 / 64, **share, help="share attended to by a token; default: %(default)s")
    parser.add_argument("--window", default=2, **share, help="device memory in budgets; default: %(default)s")
    piece = {**number, "type": int, "help": "tokens computed at once, 0 for all; default: %(default)s"}
    parser.add_argument("--piece", default=2048, **piece)
    parser.add_argument(
        "--host-memory", metavar="SIZE", help='host memory for KV, such as "64MiB"; default: a tenth of all KV'
    )
    parser.add_argument(
        "--store", metavar="DIR", help="folder of the store; default: a temporary one, deleted at the end"
    )
    parser.add_argument("--dtype", help="data type; default: the model's, or float32 for the included model on a CPU")
    parser.add_argument(
        "--yarn",
        type=factor,
        metavar="X",
        help="YaRN factor of positions; default: 1, or the factor that the included model needs",
    )
    parser.add_argument("--skip-full", action="store_true", help="skip the third process")
    parser.add_argument("--process", choices=DOES, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Parse a number of at least 1 on a command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def factor(text: str) -> float:
    """Parse a factor of at least 1 on a command line."""
    if not (number := float(text)) >= 1:  # also NaN
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


# --- the text, and the questions about it


class Question(NamedTuple):
    """Question as token ids, the begin of its answer if known, and the tokens from the fact to the text's end."""

    ids: list[int]
    answer: str = ""
    distance: int = 0


def facts_for(vocabulary: dict[str, int], count: int) -> list[tuple[str, str, str]]:
    """Return sentences for a text, questions about them, and the begins of the answers."""
    draw = random.Random(0)
    if "<is>" in vocabulary:  # the language of the reference models
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


def prompts_for(tokenizer: Any, arguments: argparse.Namespace) -> tuple[list[int], list[Question]]:
    """Return a text of `arguments.tokens` tokens with facts at equal distances, and the questions about them."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    text, context = encode(arguments.text.read_text(encoding="utf-8")), list(tokenizer("").input_ids)
    if not text:
        raise SystemExit(f"--text: {arguments.text} has no text")
    if arguments.question:
        room = arguments.tokens - len(context)
        return context + [text[i % len(text)] for i in range(room)], [Question(encode(arguments.question))]
    facts, questions, at = facts_for(tokenizer.get_vocab(), arguments.questions), list[Question](), 0
    sentences = [encode(sentence) for sentence, _, _ in facts]
    room = arguments.tokens - len(context) - sum(map(len, sentences))
    if room < len(facts):
        raise SystemExit(f"--tokens: {arguments.tokens} have no room for {len(facts)} facts")
    for number, (sentence, (_, question, answer)) in enumerate(zip(sentences, facts, strict=True), start=1):
        stop = room * number // (len(facts) + 1)
        context += [text[i % len(text)] for i in range(at, stop)]
        questions.append(Question(encode(question), answer, arguments.tokens - len(context)))
        context += sentence
        at = stop
    return context + [text[i % len(text)] for i in range(at, room)], questions


# --- what each process does


def answer_from_store(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer one question, or in the second process all, within the budget, with a cache for each."""
    import torch

    from hf_tiered_cache import KVStore, TieredCache
    from hf_tiered_cache.methods import KVDrive
    from hf_tiered_cache.units import parse_bytes

    model, tokenizer = load(arguments)
    context, questions = prompts_for(tokenizer, arguments)
    kv_bytes = len(context) * bytes_per_token(model, context[:64])
    host = parse_bytes(arguments.host_memory, "host_memory") if arguments.host_memory else kv_bytes // 10
    method = KVDrive(arguments.budget, window=arguments.window, prefill_tokens=arguments.piece)
    memory, answers, outputs = Memory(), [], []
    with KVStore(arguments.store, host_memory=host) as store:
        for question in questions if arguments.process == "again" else questions[:1]:
            cache = TieredCache(model, store, method=method)
            answer_ids, logits, figures = generate(model, context + question.ids, cache, arguments.new_tokens)
            outputs.append((answer_ids, logits))
            figures |= {"restored": cache.stats.tokens_restored, "computed": cache.stats.tokens_computed}
            answers.append(figures | judged(tokenizer, answer_ids, question) | {"reason": cache.stats.reason})
        summary = {"kv_bytes": kv_bytes, "host_memory": host} | memory.used()
    torch.save(outputs, arguments.answers)

    def bytes_in(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    folder = Path(arguments.store)
    return summary | {"answers": answers, "bytes_on_disk": bytes_in(folder), "index_bytes": bytes_in(folder / "beside")}


def answer_with_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer all questions after KV that is computed once, and compare with the second process's answers.

    The comparison is token by token, given the question and the answer so far: top-1 agreement, and KL divergence of
    the distributions in nats.
    """
    import torch
    from transformers import DynamicCache

    model, tokenizer = load(arguments)
    context, questions = prompts_for(tokenizer, arguments)
    bytes_per_token(model, context[:64])
    memory, answers = Memory(), []
    cache = DynamicCache()  # without a config, all layers keep all tokens, so that questions can be cropped

    def forget_question() -> None:
        cache.crop(len(context) - cache.get_seq_length())

    for question in questions:
        cached_tokens = cache.get_seq_length()
        answer_ids, _, figures = generate(model, context + question.ids, cache, arguments.new_tokens)
        figures |= {"restored": 0, "computed": len(context) + len(question.ids) + len(answer_ids) - 1 - cached_tokens}
        answers.append(figures | judged(tokenizer, answer_ids, question))
        forget_question()
    memory_figures, agreeing, divergences = memory.used(), 0, list[float]()
    for question, (answer_ids, logits) in zip(questions, torch.load(arguments.answers), strict=True):
        ids = torch.tensor([question.ids + answer_ids[:-1]], device=model.device)
        with torch.no_grad():
            full_logits = (
                model(input_ids=ids, past_key_values=cache, logits_to_keep=len(answer_ids)).logits[0].float().cpu()
            )
        forget_question()
        agreeing += int((full_logits.argmax(1) == logits.argmax(1)).sum())
        log_probs = logits.double().log_softmax(1), full_logits.double().log_softmax(1)  # [new tokens, vocabulary]
        divergences += torch.nn.functional.kl_div(*log_probs, log_target=True, reduction="none").sum(1).tolist()
    return memory_figures | {
        "answers": answers,
        "same": agreeing,
        "of": len(divergences),
        "KL": statistics.mean(divergences),
    }


class Watch:
    """Streamer that records the time and the moved bytes at the prompt and at each token."""

    def __init__(self, cache: Any) -> None:
        self.times, self.moved, self._cache = [time.perf_counter()], list[int](), cache

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        tiers = self._cache.stats.tiers.values() if hasattr(self._cache, "stats") else ()
        self.moved.append(sum(tier.bytes for tier in tiers))

    def end(self) -> None:
        pass


def generate(model: Any, prompt: list[int], cache: Any, new_tokens: int) -> tuple[list[int], Any, dict[str, Any]]:
    """Generate a greedy answer. Return its tokens, its logits `[new_tokens, vocabulary]`, and its figures."""
    import torch

    watch, ids = Watch(cache), torch.tensor([prompt], device=model.device)
    length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    output = {"streamer": watch, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False, **length, **output
    )
    steps = max(1, new_tokens - 1)
    first, last = watch.times[2], watch.times[-1]  # the prompt comes before
    figures = {
        "ttft_s": first - watch.times[0],
        "tokens_per_s": steps / (last - first) if new_tokens > 1 else 0.0,
        "fetched_per_token": (watch.moved[-1] - watch.moved[1]) / steps,
    }
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().cpu(), figures


def judged(tokenizer: Any, answer_ids: list[int], question: Question) -> dict[str, Any]:
    """Decode an answer, cut to the length of the right one, and compare them."""
    words = tokenizer.decode(answer_ids, skip_special_tokens=True).strip()
    is_right = bool(question.answer) and words.startswith(question.answer)
    return {
        "said": words[: len(question.answer)] if question.answer else words,
        "answer": question.answer,
        "right": is_right,
        "distance": question.distance,
    }


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model, onto a GPU if there is one, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from eval.models import resolve
    from hf_tiered_cache.integrations.hub import loading

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, name = "cuda" if torch.cuda.is_available() else "cpu", resolve(arguments.model)
    with loading(name, OSError, ValueError, AttributeError):
        config, shipped = AutoConfig.from_pretrained(name), Path(name).resolve() == REFERENCE
    trained = TRAINED if shipped else config.max_position_embeddings
    yarn = arguments.yarn or (max(1.0, arguments.tokens / trained) if shipped else 1.0)
    if yarn > 1:
        theta = config.rope_parameters["rope_theta"]
        config.rope_parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": yarn}
        config.rope_parameters["original_max_position_embeddings"] = trained
    elif arguments.tokens > trained and arguments.process == "store":
        print(
            f"the model was made for {trained} tokens; --yarn {arguments.tokens / trained:.1f} may help",
            file=sys.stderr,
        )
    dtype = arguments.dtype or ("float32" if shipped and device == "cpu" else "auto")
    with loading(name, OSError, ValueError, AttributeError):
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def bytes_per_token(model: Any, ids: list[int]) -> int:
    """Return the bytes of a token's KV. Also warms up: the first request of a process is slow."""
    from transformers import DynamicCache

    cache = DynamicCache()
    generate(model, ids, cache, 1)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // len(ids)


class Memory:
    """Peak memory of this process since this object was created."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        with suppress(OSError):  # otherwise, loading the model may be the peak
            Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        self._before = self._resident("VmRSS")
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
            self._gpu_before = self._cuda.memory_allocated()

    def used(self) -> dict[str, int]:
        """Return the peak of resident bytes, its growth, and the growth of the GPU's peak."""
        peak = self._resident("VmHWM")
        gpu = self._cuda.max_memory_allocated() - self._gpu_before if self._cuda else 0
        return {"resident": peak, "added": peak - self._before, "gpu_added": gpu}

    @staticmethod
    def _resident(name: str) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[name].split()[0]) * 1024  # is in kB


# --- the tables at the end


def show(console: Any, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the figures of the processes, their answers, and their agreement."""
    from rich.markup import escape
    from rich.table import Table

    from hf_tiered_cache.units import format_bytes

    restored_result, full = results["again"], results.get("full")
    kv, host, disk = (format_bytes(restored_result[name]) for name in ("kv_bytes", "host_memory", "bytes_on_disk"))
    title = f"\n{arguments.tokens} tokens; {kv} of KV, {disk} on disk"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("process")
    for name in results:
        table.add_column({"store": "1 stores", "again": "2 restores", "full": "3 full"}[name], justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "first answer: first token after": lambda figures: f"{figures['answers'][0]['ttft_s']:.2f} s",
        "  tokens computed for it": lambda figures: f"{figures['answers'][0]['computed']}",
        "later answers: first token after": lambda figures: (
            f"{median(figures, 'ttft_s', 1):.2f} s" if figures["answers"][1:] else ""
        ),
        "decoded tokens/s": lambda figures: f"{median(figures, 'tokens_per_s'):.1f}",
        "  fetched for a token": lambda figures: (
            "" if figures is full else format_bytes(median(figures, "fetched_per_token"))
        ),
        "memory beyond the model's, peak": lambda figures: format_bytes(figures["added"]),
        "  resident in all": lambda figures: format_bytes(figures["resident"]),
        "GPU memory beyond the model's": lambda figures: (
            format_bytes(figures["gpu_added"]) if figures["gpu_added"] else ""
        ),
        "right answers": lambda figures: f"{sum(grades)} of {len(grades)}" if (grades := graded(figures)) else "",
    }
    for name, figure in rows.items():
        values = [figure(figures) for figures in results.values()]
        if any(values):
            table.add_row(name, *values)
    console.print(table, highlight=False)
    console.print(
        f"\nUp to {host} of the memory is KV in host memory, and about {format_bytes(restored_result['index_bytes'])} "
        "is the index from which each head selects. The rest is intermediate results, and the program itself.",
        highlight=False,
    )

    table = Table(title="\nAnswers", title_justify="left", box=None)
    for heading in ("tokens back", "within the budget", "full attention", "right"):
        table.add_column(heading, justify="right" if heading == "tokens back" else "left")
    for number, answer in enumerate(restored_result["answers"]):
        full_answer = full["answers"][number]["said"] if full else ""
        table.add_row(*map(escape, (str(answer["distance"] or ""), answer["said"], full_answer, answer["answer"])))
    console.print(table, highlight=False)
    if full:
        console.print(
            f"\nOf {full['of']} tokens that were answered within the budget, full attention finds {full['same']} "
            f"likeliest, too ({full['same'] / full['of']:.1%}); its distribution is {full['KL']:.4f} nats away "
            "(KL divergence, mean)."
        )
    if not restored_result["answers"][0]["restored"]:
        console.print(f"The second process restored nothing: {restored_result['answers'][0]['reason']}")


def median(figures: dict[str, Any], name: str, first: int = 0) -> float:
    """Return the median of a figure over the answers from `first` on."""
    return statistics.median(answer[name] for answer in figures["answers"][first:])


def graded(figures: dict[str, Any]) -> list[bool]:
    """Return which of the answers with a known solution are right."""
    return [answer["right"] for answer in figures["answers"] if answer["answer"]]


if __name__ == "__main__":
    raise SystemExit(main())
