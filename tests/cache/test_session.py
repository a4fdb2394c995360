"""Sessions: `generate()` as it is called everywhere uses a store, or goes through as it is."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import processes
import pytest
import torch
import transformers
from families import attend_by_another_name, build, prompt
from packaging.version import Version
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    TextIteratorStreamer,
)

from hf_tiered_cache import ConfigError, TieredCache, attach, detach, reasons, tiered
from hf_tiered_cache.patches.attach import attachment_of
from hf_tiered_cache.patches.scope import CACHE_ARGUMENTS

GREEDY = {"do_sample": False, "max_new_tokens": 6}
REFERENCE = "eval/reference/xs"


def lively(family="qwen2", seed=0):
    """Build a tiny model that does not repeat one word."""
    return build(family, seed=seed, initializer_range=0.2)


@pytest.fixture
def model():
    return lively()


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


def test_a_draft_of_the_first_layers_that_fails_leaves_the_model_all_layers(model, store):
    plain = model.generate(prompt(70), **GREEDY)

    def fail_in_a_draft(ids, scores):
        if model.config.num_hidden_layers == 1:
            raise KeyboardInterrupt
        return scores

    drafting = GREEDY | {"assistant_model": model, "assistant_early_exit": 1, "logits_processor": [fail_in_a_draft]}
    with tiered(model, store) as session:
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt(70), **drafting)
        assert torch.equal(model.generate(prompt(70), **GREEDY), plain)
        assert session.stats.requests == 1  # the one that failed does not count


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
def test_who_asks_for_another_cache_gets_it_and_is_counted_with_a_reason(model, store, how, caplog):
    plain = model.generate(prompt(40), **(GREEDY | how))
    with tiered(model, store) as session:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(40), **(GREEDY | how)), plain)
        name, value = ("use_cache", False) if "use_cache" in str(how) else ("cache_implementation", "static")
        assert session.stats.reasons == {reasons.bypassed(name, value): 2}
        assert f"{name}={value!r}" in session.stats.reason
        assert session.stats.requests == 2
    assert caplog.text.count(session.stats.reason) == 1
    assert store.stats.segments == 0


def test_a_generation_config_that_is_given_by_position_is_asked_too(model, store):
    config = GenerationConfig(cache_implementation="static", **GREEDY)
    plain = model.generate(prompt(40), config)
    with tiered(model, store) as session:
        assert torch.equal(model.generate(prompt(40), config), plain)
        assert session.stats.reasons == {reasons.bypassed("cache_implementation", "static"): 1}


@pytest.mark.parametrize(("name", "value"), [("cache_implementation", "static"), ("use_cache", False)])
def test_the_models_own_generation_config_is_asked_too(model, store, name, value):
    setattr(model.generation_config, name, value)
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        assert torch.equal(model.generate(prompt(40), **GREEDY), plain)
        assert session.stats.reasons == {reasons.bypassed(name, value): 1}
        assert session.stats.requests == 1


def test_the_models_config_says_nothing_about_the_cache_of_generate(model, store):
    model.config.use_cache = False
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(40), **GREEDY), plain)
        assert (session.stats.requests, session.stats.tokens_restored) == (2, 32)


def given_cache(kwargs):
    """Return the cache among the arguments, by the name of either version of transformers."""
    return next(kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None)


def greedy_search(model, input_ids, generation_config, **kwargs):
    """Decode greedily, as a `custom_generate` of a user's own."""
    cache, ids = given_cache(kwargs), input_ids
    for _ in range(generation_config.max_new_tokens):
        logits = model(ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("kind", ["function", "folder"])
def test_custom_generate_is_counted_and_uses_a_cache_that_it_is_given(model, store, tmp_path, kind):
    how = {"custom_generate": greedy_search}
    if kind == "folder":
        (tmp_path / "repo" / "custom_generate").mkdir(parents=True)
        (tmp_path / "repo" / "custom_generate" / "generate.py").write_text(
            "def generate(model, input_ids, max_new_tokens, **kwargs):\n"
            "    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False,\n"
            "                          past_key_values=kwargs.get('cache', kwargs.get('past_key_values')))\n"
        )
        how = {"custom_generate": str(tmp_path / "repo"), "trust_remote_code": True}
    plain = model.generate(input_ids=prompt(70), **GREEDY)
    with tiered(model, store) as session, torch.no_grad():
        assert torch.equal(model.generate(input_ids=prompt(70), **how, **GREEDY), plain)
        assert session.stats.reasons == {reasons.bypassed("custom_generate"): 1}
        assert session.stats.requests == 1
        for tokens_restored in (0, 64):
            cache = TieredCache(model, store)
            output = model.generate(input_ids=prompt(70), past_key_values=cache, **how, **GREEDY)
            assert torch.equal(output, plain)
            assert cache.stats.tokens_restored == tokens_restored
        assert session.stats.requests == 1


def contrastive_search(model, input_ids, generation_config, **kwargs):
    """Decode as contrastive search does: the likeliest tokens in a batch, of which one row stays."""
    cache, ids = given_cache(kwargs), input_ids
    logits = model(ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1).logits
    for _ in range(generation_config.max_new_tokens):
        likeliest = logits[:, -1].topk(4).indices  # [1, 4]
        cache.batch_repeat_interleave(4)
        logits = model(likeliest.T, past_key_values=cache, logits_to_keep=1).logits
        best = logits[:, -1].max(-1).values.argmax().view(1)
        cache.batch_select_indices(best)
        ids, logits = torch.cat([ids, likeliest[:, best]], dim=1), logits[best]
    return ids


def dola(model, input_ids, generation_config, **kwargs):
    """Decode as DoLa does: by the difference to the logits of an early layer."""
    cache, ids = given_cache(kwargs), input_ids
    for _ in range(generation_config.max_new_tokens):
        outputs = model(ids[:, cache.get_seq_length() :], past_key_values=cache, output_hidden_states=True)
        early = model.lm_head(model.model.norm(outputs.hidden_states[1][:, -1]))
        ids = torch.cat([ids, (outputs.logits[:, -1] - early).argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.mark.parametrize(
    ("decode", "how", "tokens_restored"),
    [(contrastive_search, {"penalty_alpha": 0.6, "top_k": 4}, 64), (dola, {"dola_layers": "low"}, 0)],
)
def test_modes_that_transformers_keeps_in_repositories(model, store, monkeypatch, decode, how, tokens_restored):
    def of_a_repository(model, **arguments):
        return GenerationMixin.generate(model, custom_generate=decode, **arguments)

    monkeypatch.setattr(GenerationMixin, "load_custom_generate", lambda self, *args, **kwargs: of_a_repository)
    how = GREEDY | how | {"trust_remote_code": True}
    with torch.no_grad():
        plain = model.generate(prompt(70), **how)
        with tiered(model, store) as session:
            for _ in range(2):
                assert torch.equal(model.generate(prompt(70), **how), plain)
            assert (session.stats.requests, session.stats.tokens_restored) == (2, tokens_restored)
            assert tokens_restored or session.stats.reasons == {reasons.ALL_STATES: 2}


def test_a_replaced_generate_that_makes_its_own_cache_is_counted(model, store):
    """Loading a model whose repository has a custom_generate replaces its `generate` in this way."""
    model.generate = lambda ids, past_key_values=None, **kwargs: type(model).generate(model, ids, **kwargs)
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        assert torch.equal(model.generate(prompt(40), **GREEDY), plain)
        assert session.stats.reasons == {reasons.bypassed(""): 1}


def test_a_generate_that_the_session_does_not_see_is_counted(model, store):
    before = model.generate
    plain = before(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        assert torch.equal(before(prompt(40), **GREEDY), plain)
        assert torch.equal(type(model).generate(model, prompt(40), **GREEDY), plain)
        assert session.stats.reasons == {reasons.bypassed("generate"): 2}
        assert session.stats.requests == 2
    assert torch.equal(model.generate(prompt(40), **GREEDY), plain)


def test_embeddings_are_counted_with_a_reason(model, store):
    embeds = model.get_input_embeddings()(prompt(40)).detach()
    plain = model.generate(inputs_embeds=embeds, **GREEDY)
    with tiered(model, store) as session:
        assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), plain)
        assert session.stats.requests == 1
        assert "inputs_embeds" in session.stats.reason


def test_who_brings_a_cache_keeps_it(model, store, caplog):
    plain = model.generate(prompt(40), **GREEDY)
    with tiered(model, store) as session:
        own = DynamicCache(config=model.config)
        assert torch.equal(model.generate(prompt(40), past_key_values=own, **GREEDY), plain)
        assert own.get_seq_length() == 45
        assert session.stats.reasons == {reasons.OWN_CACHE: 1}
        assert session.stats.requests == 1
        assert not caplog.records  # it was meant
        cache = TieredCache(model, store)
        model.generate(prompt(40), past_key_values=cache, **GREEDY)
        assert (cache.stats.requests, session.stats.requests) == (1, 1)


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


def in_pages(model, **more):
    outputs = model.generate_batch(
        inputs=[row.tolist() for row in prompt(40, rows=2)],
        generation_config=GenerationConfig(eos_token_id=-1, **GREEDY),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=128),
        progress_bar=False,
        **more,
    )
    return [output.generated_tokens for _, output in sorted(outputs.items())]


def test_generate_batch_says_that_it_ignores_a_cache(model, store, caplog):
    plain = in_pages(model)
    assert len(plain[0]) == 6
    assert in_pages(model, past_key_values=TieredCache(model, store)) == plain
    assert "the TieredCache is ignored" in caplog.text
    assert store.stats.segments == 0


def test_generate_batch_in_a_session_is_served_and_counted(model, store):
    plain = in_pages(model)
    with tiered(model, store) as session:
        for _ in range(2):
            assert in_pages(model) == plain
        assert session.stats.requests == 4
        assert session.stats.tokens_restored == 2 * 32
        assert session.stats.reasons == {reasons.NOTHING: 2}


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
    attend_by_another_name(model)  # by which a budget is not kept
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
    session = tiered(model, store)
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
    session = tiered(model, store)
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
    first = tiered(model, tmp_path / "first")
    second = tiered(model, tmp_path / "second")
    first.close()
    for _ in range(2):
        model.generate(prompt(70), **GREEDY)
    assert (second.stats.requests, second.stats.tokens_restored) == (2, 64)
    second.close()
    assert first.stats.requests == 0
    assert attachment_of(model) is None


def test_two_models_have_sessions_of_their_own(store):
    first_model, second_model = lively(seed=1), lively(seed=2)
    with tiered(first_model, store) as first, tiered(second_model, store) as second:
        first_model.generate(prompt(70), **GREEDY)
        second_model.generate(prompt(70), **GREEDY)
        assert (first.stats.requests, second.stats.requests) == (1, 1)
        assert (first.stats.tokens_restored, second.stats.tokens_restored) == (0, 0)


# --- reasons


@pytest.mark.parametrize(("tokens", "tokens_restored", "reason"), [(15, 0, reasons.SHORT), (16, 15, reasons.NOTHING)])
def test_a_prompt_is_too_short_where_nothing_of_it_can_be_stored(model, store, tokens, tokens_restored, reason):
    with tiered(model, store) as session:
        model.generate(prompt(tokens), **GREEDY)
        assert session.stats.reason == reason
        model.generate(prompt(tokens), **GREEDY)
        assert session.stats.tokens_restored == tokens_restored


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
        "import sys  # importing this library fails from here on\n"
        "ours = [name for name in sys.modules if name.partition('.')[0] == 'hf_tiered_cache']\n"
        "sys.modules |= dict.fromkeys(['hf_tiered_cache', *ours])\n"
        "import pickle, torch, transformers\n"
        "models = [pickle.load(open(name, 'rb')) for name in ('model.pickle', 'copy.pickle')]\n"
        "models += [torch.load('model.pt', weights_only=False)]\n"
        "models += [transformers.AutoModelForCausalLM.from_pretrained('model')]\n"
        "for model in models:\n"
        f"    print(model.generate(torch.tensor({prompt(40).tolist()}), **{GREEDY}).tolist())"
    )
    process = processes.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [str(plain.tolist())] * 4
