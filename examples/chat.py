"""Chat with conversations that are stored: their KV is kept on disk, and the next run continues with it.

    python examples/chat.py --conversation alice                       # at the command line; ctrl-D ends it
    python examples/chat.py --conversation alice --say "What is a comet?" --say "Name one."     # scripted
    python examples/chat.py --conversation alice --say "And then?"     # another process: nothing is computed again
    python examples/chat.py --list

    python examples/chat.py --conversation bob --model Qwen/Qwen2.5-0.5B-Instruct --document report.txt
    python examples/chat.py --conversation carol --method exact        # keeps every bit, in more space
    python examples/chat.py --conversation dave --method krul:layers_shared=0.25 --calibrate

The model is SmolLM2-135M-Instruct, or any other one that --model names. If it cannot be downloaded, the project's
reference model takes its place: it needs no network, and answers one kind of question about a made document
(`--model eval/reference/xs`).

`--method` says how a conversation is stored. `krul`, the default, stores eight bits per number, which is approximate;
`exact` keeps every bit. With `--calibrate`, KV that is faster to compute than to load is computed on return.

    /idle   suspends the conversation, as the end does: memory is released, and the next turn restores the KV
    /undo   removes the last turn; the KV of the turns before it is restored all the same
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from long_context import BOOK, facts_for, positive
from stored_corpus import MODEL, load

DOCUMENT_TOKENS, FACTS = 400, 6
"""Tokens and facts of the reference model's document; the model was trained on up to 640 tokens."""


def main() -> int:
    """Run the example, and return the exit status."""
    arguments = arguments_of()
    from hf_tiered_cache import KVStore, TieredCacheError

    folder = Path(arguments.store)
    try:
        with KVStore(folder / "kv") as store:
            if arguments.list:
                show(store)
            else:
                chat(store, folder, arguments)
    except (TieredCacheError, OSError, UnicodeError) as error:  # such as a conversation that another process uses
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:  # the turns before are stored
        raise SystemExit(130) from None
    return 0


def arguments_of() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--conversation", default="chat", metavar="ID", help="conversation to begin or continue; default: %(default)s")
    add("--say", action="append", metavar="TEXT", help="user message instead of keyboard input; may be repeated")
    add("--list", action="store_true", help="list the conversations and their size")
    add("--model", help=f"model of the hub, folder, or short name of eval.models; default: {MODEL}")
    add("--dtype", default="auto", help="data type of the weights; default: the model's")
    add("--document", type=Path, metavar="FILE", help="text that a new conversation begins with")
    add("--store", default="chat-store", metavar="DIR", help="folder of KV and messages; default: %(default)s")
    add("--method", default="krul", help="how KV is stored: krul, exact, ...; default: %(default)s")
    add("--calibrate", action="store_true", help="first measure computing and loading on this machine")
    add("--new-tokens", type=positive, metavar="N", help="maximum tokens of an answer; default: 64")
    return parser.parse_args()


@dataclass
class History:
    """Messages of a conversation, in a file of their own: a store has KV and hashes, but no text.

    Args:
        document: Text at the beginning of the conversation.
        turns: The user's message and the answer of each turn.
    """

    document: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    @staticmethod
    def path(folder: Path, conversation: str) -> Path:
        return folder / "said" / f"{hashlib.sha256(conversation.encode()).hexdigest()[:32]}.json"

    @classmethod
    def read(cls, path: Path) -> History:
        """Return the messages in a file; none if it does not exist."""
        if not path.exists():
            return cls()
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            history = cls(facts["document"], [(user, answer) for user, answer in facts["turns"]])
            "".join((history.document, *(words for turn in history.turns for words in turn)))  # all are text
        except (ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"{path} is damaged ({error}); delete it to begin the conversation again") from None
        return history

    def write(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        partial.replace(path)


class Talker:
    """Converter of messages into prompts, and of tokens into answers.

    Args:
        tokenizer: Tokenizer of the model. Its chat template is used if it has one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.speaks_language = tokenizer, "<is>" in tokenizer.get_vocab()
        needs_role_names = not (self.speaks_language or tokenizer.chat_template)
        self.stop = ["\nUser:"] if needs_role_names else None
        """Strings that end an answer, if the model has no chat template."""

    def document(self, path: Path | None) -> tuple[str, list[str]]:
        """Return the text at the beginning, and for the reference model's own document the known questions."""
        if path is not None:
            return path.read_text(encoding="utf-8"), []
        if not self.speaks_language:
            return "", []
        facts = facts_for(self.tokenizer.get_vocab(), FACTS)
        text = self.tokenizer(BOOK.read_text(encoding="utf-8"), add_special_tokens=False).input_ids[:DOCUMENT_TOKENS]
        cuts = [DOCUMENT_TOKENS * number // FACTS for number in range(FACTS + 1)]
        parts = [self.tokenizer.decode(text[start:stop]) for start, stop in pairwise(cuts)]
        text_with_facts = "".join(f"{part}{fact}" for part, (fact, _, _) in zip(parts, facts, strict=True))
        return text_with_facts, [question[len("<q><") : -1] for _, question, _ in facts]

    def prompt(self, history: History, words: str) -> Any:
        """Return the ids of the history and a new message, `[1, tokens]`."""
        if self.tokenizer.chat_template:
            messages = [{"role": "system", "content": history.document}] if history.document else []
            for user, answer in (*history.turns, (words, "")):
                messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            return self.tokenizer.apply_chat_template(messages[:-1], **options).input_ids
        if self.speaks_language:
            dialogue = "".join(f"{in_language(user)}{answer}" for user, answer in history.turns) + in_language(words)
        else:
            dialogue = "".join(f"\nUser: {user}\nAssistant: {answer}" for user, answer in history.turns)
            dialogue += f"\nUser: {words}\nAssistant:"
        return self.tokenizer(history.document + dialogue, return_tensors="pt").input_ids

    def answer(self, ids: Any) -> str:
        """Decode an answer."""
        words = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        for stop in self.stop or ():
            words = words.removesuffix(stop)
        return words if self.speaks_language else words.strip()


def in_language(words: str) -> str:
    """Return `<q><k7>` for "k7" or "What is k7?", and other words unchanged."""
    keys = re.findall(r"\bk\d+\b", words)
    return f"<q><{keys[-1]}>" if keys and "<" not in words else words


def chat(store: Any, folder: Path, arguments: argparse.Namespace) -> None:
    """Continue a conversation until there are no more messages."""
    from hf_tiered_cache import TieredCache

    model, tokenizer = load(arguments.model, arguments.dtype)
    if arguments.calibrate:
        store.calibrate_prefix(model, tokens=(128, 512), progress=False)
    talker, history_path = Talker(tokenizer), History.path(folder, arguments.conversation)
    with TieredCache(model, store, conversation=arguments.conversation, method=arguments.method) as cache:
        history = History.read(history_path)  # no other process uses it now
        if not history.turns:
            history.document, known_questions = talker.document(arguments.document)
            hint = f"; ask it for {', '.join(known_questions)}" if known_questions else ""
            print(f"a new conversation, {arguments.conversation!r}{hint}")
        else:
            turns = "1 turn" if len(history.turns) == 1 else f"{len(history.turns)} turns"
            print(f"resuming {arguments.conversation!r} after {turns}")
        for words in messages(arguments.say):
            if words == "/idle":
                tell(cache.suspend())
            elif words == "/undo":
                history.turns = history.turns[:-1]
                history.write(history_path)
            else:
                answer = reply(model, talker, cache, talker.prompt(history, words), arguments)
                history.turns.append((words, answer))
                history.write(history_path)
        if cache.get_seq_length():
            tell(cache.suspend())


def messages(scripted: list[str] | None) -> Iterator[str]:
    """Yield the user's messages, from the keyboard or the command line."""
    for words in scripted or ():
        print(f"you> {words}")
        yield words
    while scripted is None:
        try:
            words = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if words:
            yield words


def reply(model: Any, talker: Talker, cache: Any, ids: Any, arguments: argparse.Namespace) -> str:
    """Generate an answer, print it token by token with its figures, and return it."""
    from transformers import TextStreamer

    class Watch(TextStreamer):
        """Streamer that also records the time of each token; the prompt comes first."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.times = [time.perf_counter()]

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            super().put(value)

    counts_before, known_reasons = tokens_of(cache.stats), set(cache.stats.reasons)
    watch, ids = Watch(talker.tokenizer, skip_prompt=True, skip_special_tokens=True), ids.to(model.device)
    new_tokens = arguments.new_tokens or (2 if talker.speaks_language else 64)
    stopping = {"stop_strings": talker.stop, "tokenizer": talker.tokenizer} if talker.stop else {}
    inputs = {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape), "past_key_values": cache}
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=watch, **stopping)
    counts = {name: count - counts_before[name] for name, count in tokens_of(cache.stats).items()}
    ttft, kept_text = watch.times[2] - watch.times[0], ""
    if counts["tokens_kept"]:
        kept_text = f", {counts['tokens_kept']} still in memory"
    print(
        f"     first token after {ttft:.3f} s; {counts['tokens_restored']} of {ids.shape[1]} tokens "
        f"restored, of which {counts['tokens_recomputed']:.0f} recomputed{kept_text}; "
        f"{counts['tokens_computed']} computed, including the answer"
    )
    for reason in cache.stats.reasons.keys() - known_reasons:
        print(f"     {reason}")
    return talker.answer(out[0, ids.shape[1] :])


def tokens_of(stats: Any) -> dict[str, Any]:
    """Return the counts of tokens in the statistics of a cache."""
    figures = asdict(stats) | asdict(stats.details)
    return {name: count for name, count in figures.items() if name.startswith("tokens_")}


def tell(suspended: Any) -> None:
    """Print the result of a suspension."""
    from hf_tiered_cache.units import format_bytes

    size_text = f"{suspended.tokens} tokens stored in {format_bytes(suspended.bytes)}"
    print(f"suspended: {size_text}{', ' + suspended.reason if suspended.reason else ''}")


def show(store: Any) -> None:
    """Print the conversations of a store, like `hf-tiered-cache conversations DIR/kv`."""
    from rich.console import Console
    from rich.table import Table

    from hf_tiered_cache.units import format_bytes

    table = Table(box=None)
    for heading in ("conversation", "method", "turns", "tokens", "on disk"):
        table.add_column(heading, justify="left" if heading in ("conversation", "method") else "right")
    for conversation in store.conversations():
        size = format_bytes(conversation.bytes)
        table.add_row(
            conversation.id, conversation.method, str(conversation.turns), str(conversation.tokens_there), size
        )
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
