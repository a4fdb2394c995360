"""One long text, three questions, three processes: the first computes and stores, the others restore.

    make demo                                               # SmolLM2-135M-Instruct; a GPU is used if there is one
    make demo ARGS="--model Qwen/Qwen2.5-0.5B-Instruct"     # any causal LM: of the hub, of a folder, of eval.models

Each process asks its question twice: through TieredCache, and by recomputing everything. If SmolLM2 cannot be
downloaded, a model of 100M parameters with random weights takes its place: its answers mean nothing, but they are the
same with both variants, and they take as long as those of a trained model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # eval/ is not installed with the package

TEXT = Path(__file__).parent / "data" / "a_scandal_in_bohemia_part_1.txt"
QUESTIONS = (
    "What is the name of the friend of Sherlock Holmes?",
    "What did the King wear on his face?",
    "How much money does the King lay on the table?",
)
MODEL = "smollm2-135m"
ANSWER_TOKENS = 32


def ask(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask one question about the text in this process, with restored and with recomputed KV."""
    import torch
    from transformers import set_seed
    from transformers.utils import logging

    from hf_tiered_cache import KVStore, TieredCache

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(0)
    model, encode, decode = load(arguments.model)
    ids = encode(QUESTIONS[arguments.ask]).to(model.device)
    with torch.no_grad():  # warm up: the first pass of a process starts threads and allocates memory
        model(input_ids=ids[:, :64], use_cache=False)
    with KVStore(arguments.store) as store:
        cache = TieredCache(model, store)
        restored_ids, restored_ttft = generate(model, ids, cache)
        recomputed_ids, recomputed_ttft = generate(model, ids)
    stats = cache.stats
    return {
        "question": QUESTIONS[arguments.ask],
        "answer": decode(restored_ids[0, ids.shape[1] :]),
        "prompt_tokens": ids.shape[1],
        "ttft_s": restored_ttft,
        "recompute_ttft_s": recomputed_ttft,
        "tokens_restored": stats.tokens_restored,
        "bytes_read": stats.bytes_read,
        "tier": stats.tier,
        "same_tokens": torch.equal(restored_ids, recomputed_ids),
    }


def generate(model: Any, ids: Any, cache: Any = None, new_tokens: int = ANSWER_TOKENS) -> tuple[Any, float]:
    """Return the greedy answer, and the seconds until its first token. Without a cache, all tokens are computed."""

    class FirstToken:
        started = time.perf_counter()
        seconds = 0.0
        puts = 0

        def put(self, value: Any) -> None:
            self.puts += 1
            if self.puts == 2:  # the prompt comes first
                self.seconds = time.perf_counter() - self.started

        def end(self) -> None:
            pass

    streamer = FirstToken()
    out = model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=streamer,
        **({} if cache is None else {"past_key_values": cache}),
    )
    return out, streamer.seconds


def load(name: str | None) -> tuple[Any, Callable[[str], Any], Callable[[Any], str]]:
    """Load a model, and functions from a question to the ids `[1, tokens]` of its prompt and from ids to text.

    Args:
        name: Name on the hub, or folder; None builds a model with random weights.
    """
    import torch

    text = TEXT.read_text(encoding="utf-8")
    if name is not None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hf_tiered_cache.integrations.hub import loading

        device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", "float32")
        with loading(name, OSError, ValueError):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(name)

        def encode(question: str) -> Any:
            if tokenizer.chat_template is None:
                return tokenizer(f"{text}\n\nQuestion: {question} Answer:", return_tensors="pt").input_ids
            messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            return inputs["input_ids"]

        return model, encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=True).strip()

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<pad>"], show_progress=False)
    tokenizer.train_from_iterator([text, *QUESTIONS], trainer)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.06,  # wide enough that answers are not one word over and over
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    return (
        model,
        lambda question: torch.tensor([tokenizer.encode(f"{text}\n\n{question}").ids]),
        lambda ids: tokenizer.decode(ids.tolist()),
    )


def find_model(name: str | None) -> str | None:
    """Return the name or folder of the model to load, or None for random weights if the default is unavailable."""
    from eval.errors import EvalError
    from eval.models import resolve

    try:
        return resolve(name or MODEL)
    except EvalError as error:
        if name is not None:
            raise SystemExit(f"demo: {error}") from None
        print(f"A model with random weights takes the place of {MODEL}: {error}")
        return None


def main() -> int:
    """Run the three processes, and print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help=f"a model of the hub, a folder, or a short name of eval.models; default: {MODEL}"
    )
    parser.add_argument("--store", help="folder of the store; default: a temporary one, deleted at the end")
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask is not None:
        from hf_tiered_cache import TieredCacheError

        try:
            print(json.dumps(ask(arguments)))
        except TieredCacheError as error:  # such as a folder that is no store
            raise SystemExit(str(error)) from None
        return 0

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hf_tiered_cache.units import format_bytes

    console, model = Console(), find_model(arguments.model)
    table = Table(title="\nOne text, three questions, three processes", title_justify="left", box=None)
    for heading in ("process", "TTFT", "recompute", "", "restored", "read", "tier", "tokens"):
        table.add_column(heading, justify="left" if heading in ("process", "tier", "tokens") else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(prefix="hf-tiered-demo-") as temporary:
        all_same = True
        for number in range(len(QUESTIONS)):
            command = [sys.executable, __file__, "--ask", str(number), "--store", arguments.store or temporary]
            command += ["--model", model] if model else []
            with console.status(f"process {number + 1} of {len(QUESTIONS)}: {QUESTIONS[number]}"):
                process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if process.returncode:
                console.print(f"process {number + 1} failed; see its errors above")
                return process.returncode
            result = json.loads(process.stdout.splitlines()[-1])
            all_same &= result["same_tokens"]
            console.print(f"[bold]{result['question']}[/bold] {escape(result['answer'])}", highlight=False)
            table.add_row(
                f"{number + 1} {'stores' if not result['tokens_restored'] else 'restores'}",
                f"{result['ttft_s']:.2f} s",
                f"{result['recompute_ttft_s']:.2f} s",
                f"{result['recompute_ttft_s'] / result['ttft_s']:.1f}×",
                f"{result['tokens_restored']} of {result['prompt_tokens']}",
                format_bytes(result["bytes_read"]),
                result["tier"],
                "the same" if result["same_tokens"] else "DIFFER",
            )
    console.print(table)
    console.print("TTFT: seconds to the first token. Each process is new, and restores KV from the store's folder.")
    return 0 if all_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
