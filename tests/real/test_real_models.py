"""Pretrained models, whose KV and attention are not those of random weights. `make test-real` runs these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference import kv_of, prefilled

from eval.errors import EvalError
from eval.models import cached_folder, folder_of, load
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV

TEXT = Path(__file__).parents[2] / "examples" / "data" / "a_scandal_in_bohemia_part_1.txt"
PREFIX_TOKENS = 320
GREEDY = {"do_sample": False, "max_new_tokens": 16, "output_logits": True, "return_dict_in_generate": True}

pytestmark = [
    pytest.mark.real,
    pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"]),
]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def loaded():
    """Return a model and its tokenizer by name and dtype; skip if the model is not available."""
    models = {}

    def get(name, dtype=torch.float32):
        if name != "smollm2-135m" and cached_folder(name) is None:
            pytest.skip(f"{name} is not cached: python -m eval.models {name}")
        try:
            folder_of(name)
        except EvalError as error:
            pytest.skip(str(error))
        if (name, dtype) not in models:
            models.clear()  # one at a time in memory
            models[name, dtype] = load(name, dtype)
        return models[name, dtype]

    return get


def prompts_of(tokenizer):
    """Return two prompts `[1, tokens]` that share `PREFIX_TOKENS` tokens of a text and end in different questions."""
    text = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :PREFIX_TOKENS]
    questions = (" Who is Irene Adler to him?", " Where did Watson live before his marriage?")
    return [torch.cat([text, tokenizer(words, return_tensors="pt").input_ids], dim=1) for words in questions]


def first_difference(output, expected):
    """Return the first generated token whose logits differ in a bit, or None."""
    steps = zip(output.logits, expected.logits, strict=True)
    return next((step for step, (a, b) in enumerate(steps) if not torch.equal(a, b)), None)


@both_dtypes
def test_a_restored_prompt_is_continued_bit_for_bit(loaded, tmp_path, name, dtype):
    model, tokenizer = loaded(name, dtype)
    first, second = prompts_of(tokenizer)
    with KVStore(tmp_path) as store:
        model.generate(first, past_key_values=TieredCache(model, store), max_new_tokens=1, do_sample=False)
    with KVStore(tmp_path) as store:  # its memory is empty: KV comes from the files
        cache = TieredCache(model, store)
        output = model.generate(second, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == PREFIX_TOKENS
    assert cache.stats.tier == "disk"
    expected = model.generate(second, past_key_values=prefilled(model, [kv_of(model, first)], PREFIX_TOKENS), **GREEDY)
    assert torch.equal(output.sequences, expected.sequences)
    assert first_difference(output, expected) is None


def test_a_budget_of_everything_is_the_exact_method(loaded, tmp_path, name):
    model, tokenizer = loaded(name)
    _, prompt = prompts_of(tokenizer)
    answers = []
    for method in ("exact", ContiguousKV(budget=1.0)):
        with KVStore(tmp_path / str(len(answers))) as store:
            store.precompute(model, prompt[0, :PREFIX_TOKENS].tolist(), method=method, progress=False)
            cache = TieredCache(model, store, method=method)
            answers.append(model.generate(prompt, past_key_values=cache, **GREEDY))
            assert cache.stats.tokens_restored >= PREFIX_TOKENS - 16
    exact, everything = answers
    assert torch.equal(exact.sequences, everything.sequences)
    for logits, expected in zip(everything.logits, exact.logits, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


@both_dtypes
def test_the_converted_weights_know_the_capital_of_france(loaded, name, dtype):
    model, tokenizer = loaded(name, dtype)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(prompt, use_cache=False).logits[0, -1].argmax()) == " Paris"


def test_the_chat_template_gets_an_answer_from_a_text(loaded, name):
    model, tokenizer = loaded(name)
    text = "Anna is a baker. She lives in a red house by the river, and her bread is known in the whole town."
    messages = [{"role": "user", "content": f"{text}\n\nWhat is the color of the house?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
    assert "red" in tokenizer.decode(answer)
