"""Sessions: `generate()` as it is called everywhere uses a store, or goes through as it is."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from families import build, prompt
from packaging.version import Version
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    TextIteratorStreamer,
)

from hf_tiered_cache import ConfigError, KVStore, TieredCache, attach, detach, reasons, tiered
from hf_tiered_cache.patches import attachment_of

GREEDY = {"do_sample": False, "max_new_tokens": 6}
REFERENCE = "eval/reference/xs"


def lively(family="qwen2", seed=0):
    """A tiny model that does not say one word over and over."""
    return build(family, seed=seed, initializer_range=0.2)


@pytest.fixture
def model():
    return lively()


@pytest.fixture
def store(tmp_path):
    with KVStore(tmp_path / "store") as opened:
        yield opened


# --- calls that use the store


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 4, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        pytest.param(
            {"assistant_early_exit": 2},
            marks=pytest.mark.skipif(
                Version(transformers.__version__) < Version("5.18"), reason="transformers 5.17 fails without us too"
            ),
        ),
        {"prefill_chunk_size": 32},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda how: ", ".join(how) or "greedy",
)
def test_generate_gives_the_same_tokens_and_restores_the_second_time(model, store, how):
    if "assistant_early_exit" in how:
        how = how | {"assistant_model": model}

    def generate():
        torch.manual_seed(7)
        out = model.generate(prompt(70), **(GREEDY | how))
        return out.sequences if hasattr(out, "sequences") else out

    plain = generate()
    with tiered(model, store) as session:
        assert torch.equal(generate(), plain)
        assert session.stats.tokens_restored == 0
        assert torch.equal(generate(), plain)
        assert session.stats.tokens_restored >= 62  # of each chunk of a prefill, one token at least is computed
        assert session.stats.requests == 2
    assert torch.equal(generate(), plain)


def test_an_assistant_model_drafts_with_a_cache_of_its_own(model, store):
    assistant = lively(seed=1)
    plain = model.generate(prompt(70), assistant_model=assistant, **GREEDY)
    with tiered(model, store) as session:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(70), assistant_model=assistant, **GREEDY), plain)
        assert session.stats.tokens_restored >= 64
        assert attachment_of(assistant) is None


def test_an_attached_assistant_restores_too(model, tmp_path):
    assistant = lively(seed=1)
    plain = model.generate(prompt(70), assistant_model=assistant, **GREEDY)
    with tiered(model, tmp_path / "large") as session, tiered(assistant, tmp_path / "small") as drafts:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(70), assistant_model=assistant, **GREEDY), plain)
        assert session.stats.tokens_restored >= 64
        assert drafts.stats.tokens_restored > 0


def test_a_streamer_in_a_thread_gets_the_same_text(store):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    model = build("qwen2", vocab_size=len(tokenizer), initializer_range=0.2)

    def stream():
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=model.generate, args=(prompt(70),), kwargs=GREEDY | {"streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    plain = stream()
    with tiered(model, store) as session:
        assert stream() == stream() == plain
        assert session.stats.tokens_restored == 64


def test_two_threads_at_once_get_their_own_caches(model, store):
    prompts = [prompt(70, seed=seed) for seed in range(4)]
    plain = [model.generate(ids, **GREEDY) for ids in prompts]
    answers = {}

    def ask(numbers):
        for number in numbers:
            answers.setdefault(number, []).append(model.generate(prompts[number], **GREEDY))

    with tiered(model, store) as session:
        threads = [threading.Thread(target=ask, args=(order,)) for order in ([0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert session.stats.requests == 12
        assert session.stats.tokens_restored > 0
    for number, ids in enumerate(plain):
        assert len(answers[number]) == 3
        assert all(torch.equal(answer, ids) for answer in answers[number])


def test_a_model_in_adapters(model, store):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, config).eval()
    plain = tuned.generate(input_ids=prompt(70), **GREEDY)
    with tiered(tuned, store) as session:
        for _ in range(2):
            assert torch.equal(tuned.generate(input_ids=prompt(70), **GREEDY), plain)
        assert session.stats.tokens_restored == 64
        with tuned.disable_adapter():
            bare = tuned.generate(input_ids=prompt(70), **GREEDY)
        assert session.stats.tokens_restored == 64
    with tuned.disable_adapter():
        assert torch.equal(tuned.generate(input_ids=prompt(70), **GREEDY), bare)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_model(model, store, how):
    plain = model.generate(prompt(70), **GREEDY)
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with tiered(model, store) as session:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(70), **GREEDY), plain)
        assert session.stats.tokens_restored == 64


# --- calls that go through as they are


@pytest.mark.parametrize(
    "how",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"generation_config": GenerationConfig(cache_implementation="static", **GREEDY)},
        {"generation_config": GenerationConfig(use_cache=False, **GREEDY)},
    ],
    ids=str,
)
def test_who_asks_for_another_cache_gets_it(model, store, how):
    plain = model.generate(prompt(40), **(GREEDY | how))
    with tiered(model, store) as session:
        assert torch.equal(model.generate(prompt(40), **(GREEDY | how)), plain)
        assert session.stats.requests == 0


def test_the_models_own_generation_config_is_asked_too(model, store):
    model.generation_config.cache_implementation = "static"
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        assert torch.equal(model.generate(prompt(40), **GREEDY), plain)
        assert session.stats.requests == 0


def test_who_brings_a_cache_keeps_it(model, store):
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        own = DynamicCache(config=model.config)
        assert torch.equal(model.generate(prompt(40), past_key_values=own, **GREEDY), plain)
        assert own.get_seq_length() == 45
        assert session.stats.requests == 0
        cache = TieredCache(model, store)
        model.generate(prompt(40), past_key_values=cache, **GREEDY)
        assert (cache.stats.requests, session.stats.requests) == (1, 0)


def test_a_model_in_training_is_left_alone(model, store):
    model.train()
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(40), **GREEDY), plain)
        assert session.stats.tokens_restored == 0
        assert session.stats.reasons == {reasons.TRAINING: 2}
    assert store.stats.segments == 0


def test_plain_forward_passes_use_no_store(model, store):
    with tiered(model, store) as session, torch.no_grad():
        assert isinstance(model(prompt(40), use_cache=True).past_key_values, DynamicCache)
        assert session.stats.requests == 0


@pytest.mark.parametrize("given", ["cache", "session"])
def test_generate_batch_says_that_it_ignores_the_store(model, store, caplog, given):
    def generate_batch(**more):
        done = model.generate_batch(
            inputs=[row.tolist() for row in prompt(40, rows=2)],
            generation_config=GenerationConfig(eos_token_id=-1, **GREEDY),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=128),
            progress_bar=False,
            **more,
        )
        return [output.generated_tokens for _, output in sorted(done.items())]

    plain = generate_batch()
    assert len(plain[0]) == 6
    with caplog.at_level(logging.WARNING, "hf_tiered_cache"):
        if given == "session":
            with tiered(model, store):
                assert generate_batch() == plain
        else:
            assert generate_batch(past_key_values=TieredCache(model, store)) == plain
    assert [r.message for r in caplog.records if "generate_batch() keeps its KV in pages of its own" in r.message]
    assert store.stats.segments == 0


# --- how long a session lasts


def test_an_exception_ends_the_session_and_keeps_what_was_computed(model, store):
    with pytest.raises(ZeroDivisionError), tiered(model, store):
        model.generate(prompt(70), **GREEDY)
        raise ZeroDivisionError
    assert attachment_of(model) is None
    with tiered(model, store) as session:
        model.generate(prompt(70), **GREEDY)
        assert session.stats.tokens_restored == 64


@pytest.mark.parametrize("wrong", [{"store": 5}, {"store": "store", "method": "contiguous_kv"}], ids=str)
def test_what_cannot_be_served_is_refused_at_once_and_leaves_no_trace(model, tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    model.set_attn_implementation("eager")  # in which a budget is not kept
    with pytest.raises(ConfigError):
        tiered(model, **wrong)
    assert attachment_of(model) is None


def test_a_failure_inside_generate_leaves_the_session_whole(model, store):
    plain = model.generate(prompt(70), **GREEDY)
    with tiered(model, store) as session:
        with pytest.raises(ValueError):
            model.generate(prompt(70), max_new_tokens=-1)
        for _ in range(2):
            assert torch.equal(model.generate(prompt(70), **GREEDY), plain)
        assert session.stats.tokens_restored == 64


def test_closing_twice_is_closing_once(model, store):
    session = attach(model, store=store)
    model.generate(prompt(40), **GREEDY)
    session.close()
    session.close()
    assert attachment_of(model) is None
    model.generate(prompt(40), **GREEDY)
    assert session.stats.requests == 1


def test_detach_ends_a_session(model, store):
    with tiered(model, store) as session:
        detach(model)
        model.generate(prompt(40), **GREEDY)
        assert session.stats.requests == 0
        assert attachment_of(model) is None


def test_a_session_that_was_detached_leaves_a_later_attachment_alone(model, store):
    session = attach(model, store=store)
    detach(model)
    attach(model)
    session.close()
    assert attachment_of(model) is not None


def test_of_nested_sessions_the_inner_one_is_in_force(model, tmp_path):
    with tiered(model, tmp_path / "outer") as outer:
        model.generate(prompt(70), **GREEDY)
        with tiered(model, tmp_path / "inner") as inner:
            for _ in range(2):
                model.generate(prompt(70), **GREEDY)
            assert (inner.stats.requests, inner.stats.tokens_restored) == (2, 64)
        model.generate(prompt(70), **GREEDY)
        assert (outer.stats.requests, outer.stats.tokens_restored) == (2, 64)
    assert attachment_of(model) is None


def test_sessions_that_overlap_end_in_any_order(model, tmp_path):
    first = attach(model, store=tmp_path / "first")
    second = attach(model, store=tmp_path / "second")
    first.close()
    for _ in range(2):
        model.generate(prompt(70), **GREEDY)
    assert (second.stats.requests, second.stats.tokens_restored) == (2, 64)
    second.close()
    assert first.stats.requests == 0
    assert attachment_of(model) is None


def test_two_models_have_sessions_of_their_own(store):
    one, two = lively(seed=1), lively(seed=2)
    with tiered(one, store) as first, tiered(two, store) as second:
        one.generate(prompt(70), **GREEDY)
        two.generate(prompt(70), **GREEDY)
        assert (first.stats.requests, second.stats.requests) == (1, 1)
        assert (first.stats.tokens_restored, second.stats.tokens_restored) == (0, 0)


# --- reasons


@pytest.mark.parametrize(("tokens", "restored", "reason"), [(15, 0, reasons.SHORT), (16, 15, reasons.NOTHING)])
def test_a_prompt_is_too_short_where_nothing_of_it_can_be_stored(model, store, tokens, restored, reason):
    with tiered(model, store) as session:
        model.generate(prompt(tokens), **GREEDY)
        assert session.stats.reason == reason
        model.generate(prompt(tokens), **GREEDY)
        assert session.stats.tokens_restored == restored


# --- copies


def test_what_is_saved_of_an_attached_model_loads_where_this_library_is_not(model, store, tmp_path):
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store):
        model.generate(prompt(40), **GREEDY)
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
        (tmp_path / "copy.pickle").write_bytes(pickle.dumps(copy.deepcopy(model)))
        torch.save(model, tmp_path / "model.pt")
        model.save_pretrained(tmp_path / "model")
    code = (
        "import sys; sys.modules['hf_tiered_cache'] = None  # importing it fails from here on\n"
        "import pickle, torch, transformers\n"
        "models = [pickle.load(open(name, 'rb')) for name in ('model.pickle', 'copy.pickle')]\n"
        "models += [torch.load('model.pt', weights_only=False)]\n"
        "models += [transformers.AutoModelForCausalLM.from_pretrained('model')]\n"
        "for model in models:\n"
        f"    print(model.generate(torch.tensor({prompt(40).tolist()}), **{GREEDY}).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(plain.tolist())] * 4
