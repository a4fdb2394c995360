"""Simultaneous questions about one text, from an OpenAI client to a server with a store.

    hf-tiered-cache serve Qwen/Qwen2.5-0.5B-Instruct --store kv-store --continuous-batching
    python examples/batched_client.py

The first run computes the text. Restart the server and run this again: the text then comes from the store, and the
column "cached" shows its tokens. Within one run, questions share the text in pages.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOK = Path(__file__).resolve().parent / "data" / "a_scandal_in_bohemia_part_1.txt"
QUESTIONS = (
    "Who tells the story?",
    "Who visits Sherlock Holmes?",
    "What does the visitor wear over his face?",
    "Which photograph does the visitor want back?",
)


@dataclass(frozen=True)
class Answer:
    """Answer of the server.

    Args:
        text: Its text.
        first_token: Seconds until its first token.
        prompt_tokens: Number of tokens of the prompt.
        cached_tokens: Number of tokens of the prompt that were not computed.
    """

    text: str
    first_token: float
    prompt_tokens: int
    cached_tokens: int


async def ask(client: Any, model: str, text: str, question: str, new_tokens: int) -> Answer:
    """Ask one question about a text, and stream the answer."""
    start_time, first_token, words, usage = time.perf_counter(), 0.0, [], None
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": text}, {"role": "user", "content": question}],
        max_tokens=new_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        word = chunk.choices[0].delta.content if chunk.choices else None
        if word:
            first_token = first_token or time.perf_counter() - start_time
            words.append(word)
    if usage is None:
        raise SystemExit("the server sent no usage")
    details = usage.prompt_tokens_details
    cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    return Answer("".join(words).strip(), first_token, usage.prompt_tokens, cached_tokens)


async def ask_all(url: str, text: str, questions: list[str], new_tokens: int) -> list[Answer]:
    """Ask all questions at once, of the model that the server lists first."""
    try:
        from openai import APIConnectionError, AsyncOpenAI
    except ImportError:
        raise SystemExit("this example needs OpenAI's client: pip install openai") from None
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        try:
            model = (await client.models.list()).data[0].id
        except APIConnectionError:
            raise SystemExit(f"no server answers at {url}; start one first (see --help)") from None
        return await asyncio.gather(*(ask(client, model, text, question, new_tokens) for question in questions))


def main() -> int:
    """Ask the questions, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="address of the server; default: %(default)s")
    add("--text", type=Path, default=BOOK, metavar="FILE", help="text that the questions are about; default: a story")
    add("--words", type=int, default=800, metavar="N", help="use the first N words of the text; default: %(default)s")
    add("--question", action="append", metavar="TEXT", help="question; may be repeated")
    add("--new-tokens", type=int, default=32, metavar="N", help="maximum tokens of an answer; default: %(default)s")
    arguments = parser.parse_args()
    questions = arguments.question or list(QUESTIONS)
    try:
        text = " ".join(arguments.text.read_text(encoding="utf-8").split()[: arguments.words])
    except (OSError, UnicodeError) as error:
        raise SystemExit(f"--text: {error}") from None
    print(f"asking {len(questions)} questions about {len(text):,} characters at once ...", flush=True)
    answers = asyncio.run(ask_all(arguments.url, text, questions, arguments.new_tokens))
    print(f"{'prompt':>8}{'cached':>8}{'first token':>14}  question and answer")
    for question, answer in zip(questions, answers, strict=True):
        print(f"{answer.prompt_tokens:8,}{answer.cached_tokens:8,}{answer.first_token:12.2f} s  {question}")
        print(f"{'':32}{answer.text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
