"""Chat with conversations that are stored: their KV is kept on disk, and the next run continues with it.

    python examples/chat.py --conversation alice                       # at the command line; ctrl-D ends it
    python examples/chat.py --conversation alice --say "Who is the King?" --say "Why did he come?"     # scripted
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

from long_context import BOOK, facts_for
from stored_corpus import MODEL, load

DOCUMENT_TOKENS, FACTS = 400, 6
"""Of the document that the reference model has read: it was trained on up to 640."""


def main() -> int:
    arguments = arguments_of()
    from hf_tiered_cache import KVStore, TieredCacheError

    folder = Path(arguments.store)
    try:
        with KVStore(folder / "kv") as store:
            if arguments.list:
                show(store)
            else:
                chat(store, folder, arguments)
    except TieredCacheError as error:  # such as one that another process goes on with
        raise SystemExit(str(error)) from None
    return 0


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--conversation", default="chat", metavar="ID", help="conversation to begin or continue; default: %(default)s")
    add("--say", action="append", metavar="TEXT", help="user message, in place of the keyboard; may be repeated")
    add("--list", action="store_true", help="list the conversations and their size")
    add("--model", help=f"model of the hub, folder, or short name of eval.models; default: {MODEL}")
    add("--dtype", default="auto", help="data type of the weights; default: the model's")
    add("--document", type=Path, metavar="FILE", help="text that a new conversation begins with")
    add("--store", default="chat-store", metavar="DIR", help="folder of KV and messages; default: %(default)s")
    add("--method", default="krul", help="how KV is stored: krul, exact, ...; default: %(default)s")
    add("--calibrate", action="store_true", help="first measure what computing and loading cost on this machine")
    add("--new-tokens", type=int, metavar="N", help="maximum tokens of an answer; default: 64")
    return parser.parse_args()


@dataclass
class History:
    """What was said. A store keeps KV and hashes, no words: these lie beside it.

    Args:
        document: what it began with.
        turns: the user's words and the answer, of each.
    """

    document: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    @staticmethod
    def path(folder: Path, conversation: str) -> Path:
        return folder / "said" / f"{hashlib.sha256(conversation.encode()).hexdigest()[:32]}.json"

    @classmethod
    def read(cls, path: Path) -> History:
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        partial.replace(path)


class Talker:
    """Turns what was said into a prompt.

    Args:
        tokenizer: of the model. With a chat template that is used; the reference models have a language of their own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.speaks_language = tokenizer, "<is>" in tokenizer.get_vocab()
        named = not (self.speaks_language or tokenizer.chat_template)
        self.stop = ["\nUser:"] if named else None
        """Words that end an answer, where the model has none of its own."""

    def document(self, path: Path | None) -> tuple[str, list[str]]:
        """The text that a conversation begins with, and for the reference model's own what it may be asked."""
        if path is not None:
            return path.read_text(encoding="utf-8"), []
        if not self.speaks_language:
            return "", []
        facts = facts_for(self.tokenizer.get_vocab(), FACTS)
        text = self.tokenizer(BOOK.read_text(encoding="utf-8"), add_special_tokens=False).input_ids[:DOCUMENT_TOKENS]
        cuts = [DOCUMENT_TOKENS * number // FACTS for number in range(FACTS + 1)]
        parts = [self.tokenizer.decode(text[start:stop]) for start, stop in pairwise(cuts)]
        written = "".join(f"{part}{fact}" for part, (fact, _, _) in zip(parts, facts, strict=True))
        return written, [question[len("<q><") : -1] for _, question, _ in facts]

    def prompt(self, history: History, words: str) -> Any:
        """All that was said, and these words, as ids `[1, tokens]`."""
        if self.tokenizer.chat_template:
            messages = [{"role": "system", "content": history.document}] if history.document else []
            for user, answer in (*history.turns, (words, "")):
                messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            return self.tokenizer.apply_chat_template(messages[:-1], **options).input_ids
        if self.speaks_language:
            said = "".join(f"{in_language(user)}{answer}" for user, answer in history.turns) + in_language(words)
        else:
            said = "".join(f"\nUser: {user}\nAssistant: {answer}" for user, answer in history.turns)
            said += f"\nUser: {words}\nAssistant:"
        return self.tokenizer(history.document + said, return_tensors="pt").input_ids

    def answer(self, ids: Any) -> str:
        """Words of the ids that were generated."""
        words = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        for stop in self.stop or ():
            words = words.removesuffix(stop)
        return words if self.speaks_language else words.strip()


def in_language(words: str) -> str:
    """As `<q><k7>` for "k7", or "What is k7?"; other words as they are."""
    asked = re.findall(r"\bk\d+\b", words)
    return f"<q><{asked[-1]}>" if asked and "<" not in words else words


def chat(store: Any, folder: Path, arguments: argparse.Namespace) -> None:
    """Go on with a conversation until nothing more is said."""
    from hf_tiered_cache import TieredCache

    model, tokenizer = load(arguments.model, arguments.dtype)
    if arguments.calibrate:
        store.calibrate_prefix(model, tokens=(128, 512), progress=False)
    talker, said_in = Talker(tokenizer), History.path(folder, arguments.conversation)
    with TieredCache(model, store, conversation=arguments.conversation, method=arguments.method) as cache:
        history = History.read(said_in)  # nobody else goes on with it now
        if not history.turns:
            history.document, known = talker.document(arguments.document)
            hint = f"; ask it for {', '.join(known)}" if known else ""
            print(f"a new conversation, {arguments.conversation!r}{hint}")
        else:
            print(f"going on with {arguments.conversation!r}, after {len(history.turns)} turns")
        for words in spoken(arguments.say):
            if words == "/idle":
                tell(cache.suspend())
            elif words == "/undo":
                history.turns = history.turns[:-1]
                history.write(said_in)
            else:
                answer = reply(model, talker, cache, talker.prompt(history, words), arguments)
                history.turns.append((words, answer))
                history.write(said_in)
        if cache.get_seq_length():
            tell(cache.suspend())


def spoken(scripted: list[str] | None) -> Iterator[str]:
    """What the user says, from the keyboard or as given."""
    for words in scripted or ():
        print(f"you> {words}")
        yield words
    while scripted is None:
        try:
            words = input("you> ").strip()
        except EOFError:
            print()
            return
        if words:
            yield words


def reply(model: Any, talker: Talker, cache: Any, ids: Any, arguments: argparse.Namespace) -> str:
    """An answer, written as it comes, and what it took."""
    from transformers import TextStreamer

    class Watch(TextStreamer):
        """Also notes when the first token came; the prompt is put first."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.times = [time.perf_counter()]

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            super().put(value)

    before, known_reasons = tokens_of(cache.stats), set(cache.stats.reasons)
    watch, ids = Watch(talker.tokenizer, skip_prompt=True, skip_special_tokens=True), ids.to(model.device)
    new_tokens = arguments.new_tokens or (2 if talker.speaks_language else 64)
    stopping = {"stop_strings": talker.stop, "tokenizer": talker.tokenizer} if talker.stop else {}
    asked = {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape), "past_key_values": cache}
    out = model.generate(**asked, max_new_tokens=new_tokens, do_sample=False, streamer=watch, **stopping)
    took = {name: count - before[name] for name, count in tokens_of(cache.stats).items()}
    ttft, kept = watch.times[2] - watch.times[0], ""
    if took["tokens_kept"]:
        kept = f", {took['tokens_kept']} still in memory"
    print(
        f"     first token after {ttft:.3f} s; {took['tokens_restored']} of {ids.shape[1]} tokens "
        f"restored, of them {took['tokens_recomputed']:.0f} recomputed{kept}; {took['tokens_computed']} computed, the "
        "answer's among them"
    )
    for reason in cache.stats.reasons.keys() - known_reasons:
        print(f"     {reason}")
    return talker.answer(out[0, ids.shape[1] :])


def tokens_of(stats: Any) -> dict[str, Any]:
    """Counts of tokens in the statistics of a cache."""
    figures = asdict(stats) | asdict(stats.details)
    return {name: count for name, count in figures.items() if name.startswith("tokens_")}


def tell(suspended: Any) -> None:
    """What was put away."""
    from hf_tiered_cache.units import format_bytes

    kept = f"{suspended.tokens} tokens kept in {format_bytes(suspended.bytes)}"
    print(f"put away: {kept}{', ' + suspended.reason if suspended.reason else ''}")


def show(store: Any) -> None:
    """The conversations that there are; `hf-tiered-cache conversations DIR/kv` says more, and removes them."""
    from rich.console import Console
    from rich.table import Table

    from hf_tiered_cache.units import format_bytes

    table = Table(box=None)
    for heading in ("conversation", "method", "turns", "tokens", "on disk"):
        table.add_column(heading, justify="left" if heading in ("conversation", "method") else "right")
    for one in store.conversations():
        size = format_bytes(one.bytes)
        table.add_row(one.id, one.method, str(one.turns), str(one.tokens_there), size)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
