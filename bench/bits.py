"""Meaning of "bit for bit": restored prefixes, compared with the same passes and with a single pass.

    python bench/bits.py --out bench/results

The prefix of each prompt is stored, and the rest is new. The answer is compared with that of a DynamicCache filled by
the same two passes, and with that of one pass over the whole prompt. Such a DynamicCache also differs from one pass.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lib.common import build, load
from lib.pages import machine, save, table
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_tiered_cache import KVStore, TieredCache

REFERENCE = Path(__file__).parent.parent / "eval" / "reference" / "xs"
PREFIX, SUFFIX = 208, 37


def answer(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first logits, `[1, vocabulary]`, and the greedy tokens, `[1, n]`."""
    options = {"do_sample": False, "max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    return out.logits[0].float(), out.sequences


def compare(model: PreTrainedModel, prompts: int, tokens: int, store: KVStore) -> dict[str, Any]:
    """Count differences between answers, and measure the largest one."""
    pairs = {"tiered_and_same_passes": 0, "tiered_and_single_pass": 0, "same_passes_and_single_pass": 0}
    differ, greedy, largest = dict(pairs), dict(pairs), dict.fromkeys(pairs, 0.0)
    vocabulary = model.config.get_text_config().vocab_size
    for number in tqdm(range(prompts), desc=f"{type(model).__name__} {model.dtype}", unit="prompt"):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, vocabulary, (1, PREFIX + SUFFIX), generator=generator)
        store.precompute(model, ids[:, :PREFIX], progress=False)
        tiered = TieredCache(model, store, record=False)
        tiered_answer = answer(model, ids, tiered, tokens)
        if tiered.stats.tokens_restored != PREFIX:
            raise RuntimeError(f"{tiered.stats.tokens_restored} of {PREFIX} tokens were restored")
        filled = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :PREFIX], past_key_values=filled, use_cache=True)
        two_passes = answer(model, ids, filled, tokens)
        single_pass = answer(model, ids, DynamicCache(config=model.config), tokens)
        for name, (left_answer, right_answer) in zip(
            pairs, ((tiered_answer, two_passes), (tiered_answer, single_pass), (two_passes, single_pass)), strict=True
        ):
            differ[name] += not torch.equal(left_answer[0], right_answer[0])
            greedy[name] += not torch.equal(left_answer[1], right_answer[1])
            largest[name] = max(largest[name], float((left_answer[0] - right_answer[0]).abs().max()))
    return {"prompts": prompts, "logits_differ": differ, "answers_differ": greedy, "largest_difference": largest}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=60, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=24, help="number of tokens in each greedy answer")
    parser.add_argument("--out", type=Path, help="folder for results (default: print them)")
    arguments = parser.parse_args()
    cpu, results = torch.device("cpu"), {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, model in (("tiny", build("tiny", dtype, cpu)), ("reference xs", load(REFERENCE, dtype, cpu))):
            model.generation_config.pad_token_id = 0
            with tempfile.TemporaryDirectory() as folder, KVStore(folder) as store:
                counts = compare(model, arguments.prompts, arguments.tokens, store)
            results[f"{name}, {str(dtype).removeprefix('torch.')}"] = counts
    headings = [
        "model",
        "compared",
        "first logits that differ",
        "largest difference",
        f"answers of {arguments.tokens} tokens that differ",
    ]
    rows = [
        [
            model,
            pair.replace("_", " "),
            f"{counts['logits_differ'][pair]} of {counts['prompts']}",
            f"{counts['largest_difference'][pair]:.1e}",
            f"{counts['answers_differ'][pair]} of {counts['prompts']}",
        ]
        for model, counts in results.items()
        for pair in counts["logits_differ"]
    ]
    page = "# Meaning of bit for bit\n\n" + __doc__.split("\n\n", 2)[2] + "\n" + table(headings, rows)
    if arguments.out is None:
        print(page)
    else:
        save(arguments.out, "bits-cpu", {"machine": machine(cpu, Path()), "results": results}, page)


if __name__ == "__main__":
    main()
