"""Other people's code over `generate()`, unchanged: pipelines, LangChain, lm-eval."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import CHAT_TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_tiered_cache import tiered

REFERENCE = Path(__file__).parents[2] / "eval" / "reference" / "xs"
TEXT = "the old man saw a small house near the river , and went in to see who was there . " * 4
QUESTIONS = ("who went in ?", "what did the old man see there ?", "where was it , and who was in the house ?")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(REFERENCE, dtype="float32").eval()


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def writer(model, tokenizer):
    """Return a text-generation pipeline."""
    return pipeline(
        "text-generation", model=model, tokenizer=tokenizer, device="cpu", do_sample=False, max_new_tokens=6
    )


def twice(ask, model, store):
    """Ask without a session, and twice in one. Assert equal answers, restored the second time."""
    plain = ask()
    with tiered(model, store) as session:
        assert ask() == plain
        first = session.stats.tokens_restored
        assert ask() == plain
        tokens_restored = session.stats.tokens_restored - first
    return plain, tokens_restored


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_pipeline_over_a_list_of_prompts(model, store, writer, batch_size):
    prompts = [TEXT + question for question in QUESTIONS]
    assert len({len(writer.tokenizer(text).input_ids) for text in prompts}) > 1  # so that a batch is padded

    def ask():
        answers = writer(prompts, batch_size=batch_size, return_tensors=True)
        return [answer[0]["generated_token_ids"] for answer in answers]

    _, tokens_restored = twice(ask, model, store)
    assert tokens_restored >= 3 * 64


def test_a_pipeline_that_chats(model, store, writer):
    def ask():
        messages = [{"role": "system", "content": TEXT}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (answer,) = writer(messages)
            messages = answer["generated_text"]
        assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * 3
        return messages

    plain = ask()
    with tiered(model, store) as session:
        assert ask() == plain
        assert session.stats.requests == 3
        assert session.stats.tokens_restored > 2 * 64  # the second turn finds the first one, the third the second


def test_langchains_pipeline_alone_and_in_batches(model, store, writer):
    langchain = pytest.importorskip("langchain_huggingface", reason="langchain-huggingface is not installed")
    llm = langchain.HuggingFacePipeline(pipeline=writer, batch_size=2)
    prompts = [TEXT + question for question in QUESTIONS]
    _, tokens_restored = twice(lambda: llm.invoke(prompts[0]), model, store)
    assert tokens_restored >= 64
    answers, tokens_restored = twice(lambda: llm.batch(prompts), model, store)
    assert len(set(answers)) > 1
    assert tokens_restored >= 3 * 64


def test_lm_evals_hf_model_on_a_generating_task(model, tokenizer, store):
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    questions = Dataset.from_list([{"question": question, "answer": "in"} for question in QUESTIONS])
    task = ConfigurableTask(
        config={
            "task": "questions",
            "dataset_path": "json",
            "custom_dataset": lambda **_: {"test": questions},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": TEXT + "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        }
    )

    def ask():
        lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=2)
        evaluated = lm_eval.evaluate(lm=lm, task_dict={"questions": task}, log_samples=True, bootstrap_iters=0)
        return [sample["resps"] for sample in evaluated["samples"]["questions"]]

    answers, tokens_restored = twice(ask, model, store)
    assert len(answers) == 3
    assert all(answers)
    assert tokens_restored >= 3 * 64
