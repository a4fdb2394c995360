"""Settings of requests to the server: which are refused, and that none applies to the requests of other clients."""

from __future__ import annotations

import functools
import json
import time
from contextlib import suppress

import pytest
import torch
from asgi_client import Client, copy_reference
from paged import paging
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_serve_available

from hf_tiered_cache import Exact, KVStore, TieredCache
from hf_tiered_cache.tiered_cache import TieredSession

if not is_serve_available():
    pytest.skip("the server needs the extra `serve`", allow_module_level=True)
server = pytest.importorskip("hf_tiered_cache.integrations.serve")

PROMPT = "the old man saw a small house near the river , and went in to see who was there . " * 2
PAGES, PAGE_TOKENS = 10, 16
MESSAGES = [{"role": "user", "content": "who went in ?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny model that never ends its answer."""
    folder = copy_reference(tmp_path_factory.mktemp("model") / "tiny")
    size = len(AutoTokenizer.from_pretrained(folder))
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=size, num_key_value_heads=1, max_position_embeddings=4096, **shape, **ids)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clients(model, tmp_path_factory):
    """Return clients of two servers: one request after the other, and in continuous batches."""
    models = server.TieredModelManager(force_model=str(model), device="cpu", dtype="float32")
    with KVStore(tmp_path_factory.mktemp("kv") / "store") as store:
        new_cache = functools.partial(TieredCache, store=store)
        new_session = functools.partial(TieredSession, store=store, method=Exact())
        batching = server.Batching(new_session, paging(PAGES, PAGE_TOKENS))
        apps = [server.build_app(models, new_cache, batching=batching_option) for batching_option in (None, batching)]
        yield [Client(app, models) for app in apps]
        apps[1].state.generation_state.shutdown()


@pytest.fixture
def plain(clients):
    """Return a client of a server whose model is in no engine, which some versions of transformers cannot share."""
    clients[1].app.state.generation_state.shutdown()
    return clients[0]


@pytest.fixture
def batched(clients):
    """Return a client of a server in which no engine has started."""
    clients[1].app.state.generation_state.shutdown()
    return clients[1]


def complete(client, prompt=PROMPT, **more):
    """Return the answer to a greedy request of four tokens."""
    status, text = client.chat({"prompt": prompt, "max_tokens": 4, "temperature": 0} | more, "/v1/completions")
    assert status == 200, text
    return json.loads(text)


def generation(**settings):
    return {"prompt": PROMPT, "generation_config": json.dumps({"max_new_tokens": 4} | settings)}


def chat(**more):
    return {"messages": MESSAGES, "max_tokens": 4} | more


@pytest.mark.parametrize("name", ["plain", "batched"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (generation(do_sample=True, num_return_sequences=2000), "2000 beams or sequences"),
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens is 0, but must be between 1 and inf"),
        ({"prompt": PROMPT, "max_tokens": -5}, "max_tokens is -5"),
        (generation(max_new_tokens=float("nan")), "max_tokens is nan"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature is -1.0"),
        ({"prompt": PROMPT, "top_p": 1.5}, "top_p is 1.5"),
        (generation(do_sample=True, top_k="x"), "top_k is 'x'"),
        (generation(do_sample=True, top_k=2**40), "top_k is 1099511627776"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_out_of_range_is_refused_in_every_mode(request, name, body, message):
    client = request.getfixturevalue(name)
    status, text = client.chat(body, "/v1/completions")
    assert (status, message in text) == (400, True), text
    complete(client)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (generation(assistant_early_exit=-1), "assistant_early_exit is -1, but must be between 1 and 2"),
        (generation(assistant_early_exit=0.5), "assistant_early_exit is 0.5"),
        (generation(begin_suppress_tokens=[None]), "begin_suppress_tokens is [None]"),
        (generation(bos_token_id=1e30), "bos_token_id is 1e+30"),
        (generation(encoder_no_repeat_ngram_size=10**20), "encoder_no_repeat_ngram_size is 100000000000000000000"),
        (generation(prefill_chunk_size=-1), "prefill_chunk_size is -1"),
        (generation(use_cache="no"), "use_cache is 'no'"),
        (generation(watermarking_config={"context_width": 10**10}), "watermarking_config is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_generate_does_not_check_is_refused_and_the_next_request_is_served(plain, body, message):
    before = complete(plain)["choices"]
    try:
        status, text = plain.chat(body, "/v1/completions")
    except Exception as error:  # the server's fault, which it raises after its answer
        status, text = 500, str(error)
    assert (status, message in text) == (400, True), text
    assert complete(plain)["choices"] == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (generation(do_sample=True, num_return_sequences=2), "num_return_sequences"),
        (generation(num_beams=2), "num_beams"),
        (generation(guidance_scale=2.0), "guidance_scale"),
        (generation(suppress_tokens=[10**6]), "suppress_tokens"),
        (generation(eos_token_id={"a": 1}), "eos_token_id"),
        (generation(eos_token_id=[None]), "eos_token_id"),
        (chat(logit_bias={"999999": 5.0}), "logit_bias"),
        (chat(frequency_penalty=0.5), "frequency_penalty"),
        (chat(stop=["the"]), "stop"),
        ({"prompt": PROMPT * 5}, "the pages of this server (--cb-num-blocks) hold 160"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_engine_cannot_do_for_one_request_is_refused_and_others_are_served(batched, body, message):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, text = batched.chat(body, path)
    assert (status, message in text) == (400, True), text
    complete(batched)
    assert batched.app.state.generation_state.is_cb_alive()


def test_neutral_settings_are_no_reason_to_refuse_a_request(batched):
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1, "do_sample": False}
    status, text = batched.chat(generation(**neutral), "/v1/completions")
    assert status == 200, text
    complete(batched, frequency_penalty=0)


def test_an_answer_ends_where_the_pages_do(batched):
    usage = complete(batched, max_tokens=10_000)["usage"]
    assert usage["total_tokens"] == PAGES * PAGE_TOKENS
    assert complete(batched)


def test_each_request_in_a_batch_has_its_own_sampling_settings(plain, batched):
    expected = complete(plain)["choices"][0]["text"]

    def answers(**settings):
        config = {"max_new_tokens": 4, "do_sample": True, **settings}
        return complete(batched, temperature=None, generation_config=json.dumps(config))["choices"][0]["text"]

    sampled = {answers(temperature=5.0, top_k=0) for _ in range(4)}  # begins, and must not decide for the others
    assert len(sampled) > 1
    assert complete(batched)["choices"][0]["text"] == expected
    assert {answers(temperature=1e-40), answers(temperature=5.0, top_k=1), answers(top_p=1e-6)} == {expected}


def test_an_engine_that_has_ended_is_replaced(batched, monkeypatch):
    complete(batched)
    state = batched.app.state.generation_state
    ended = state._cb_manager

    def fail():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ended._cb.batch_processor, "prepare_next_batch", fail)
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with suppress(RuntimeError):  # this request may be the one that fails
        assert batched.chat(body, "/v1/completions")[0] in (200, 503)  # replaced already if it ended in between
    until = time.monotonic() + 30
    while state.is_cb_alive() and state._cb_manager is ended and time.monotonic() < until:
        time.sleep(0.01)  # it fails its requests before it ends
    assert complete(batched)["choices"]
    assert state._cb_manager is not ended
    assert state.is_cb_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_to_an_engine_that_is_ending_is_refused(batched, monkeypatch, stream):
    """Such an engine drops requests, so that their clients would wait for ever."""
    complete(batched)
    engine = batched.app.state.generation_state._cb_manager._cb
    monkeypatch.setattr(engine.background_thread_status, "can_accept_new_requests", lambda: "it is stopping")
    status, text = batched.chat({"prompt": PROMPT, "max_tokens": 4, "stream": stream}, "/v1/completions")
    assert (status, "send the request again" in text) == (503, True)
    monkeypatch.undo()
    assert complete(batched)["choices"]


def test_an_engine_that_cannot_start_is_a_fault_of_the_server(batched, monkeypatch):
    (entry,) = batched.models.loaded_models.values()
    attention = entry.model.config._attn_implementation
    monkeypatch.setattr(entry.model.generation_config, "bad_words_ids", [[5]])
    status, text = batched.chat({"prompt": PROMPT}, "/v1/completions")
    assert (status, "continuous batching cannot start" in text) == (503, True)
    assert entry.model.config._attn_implementation == attention
    monkeypatch.undo()
    complete(batched)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "max_length", "max_length": 5_000_000},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 5_000_000}},
        {"text_kwargs": {"padding": "max_length", "max_length": 5_000_000}},
        {"size": {"height": 10**6, "width": 10**6}},
        {"chat_template": "{{ 1 }}"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_clients_set_variables_of_the_template_only(plain, monkeypatch, options):
    (entry,) = plain.models.loaded_models.values()
    monkeypatch.setattr(type(entry.processor), "apply_chat_template", lambda *_, **__: pytest.fail("it was applied"))
    status, text = plain.chat(chat(chat_template_kwargs=options))
    assert (status, f"not {sorted(options)[0]}" in text) == (400, True), text


def test_a_variable_of_the_template_reaches_it(plain, monkeypatch):
    (entry,) = plain.models.loaded_models.values()
    template = "{{ raise_exception('depth ' ~ depth ~ documents[0].text) }}"
    monkeypatch.setattr(entry.processor, "chat_template", template)
    status, text = plain.chat(chat(chat_template_kwargs={"depth": 3, "documents": [{"title": "a", "text": "one"}]}))
    assert (status, "depth 3one" in text) == (400, True), text


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('no system role') }}", "no system role"), ("{{ messages[0].content.a.b }}", "no attribute")],
)
def test_messages_that_a_template_refuses_are_a_fault_of_the_client(plain, monkeypatch, template, message):
    (entry,) = plain.models.loaded_models.values()
    monkeypatch.setattr(entry.processor, "chat_template", template)
    for stream in (False, True):
        status, text = plain.chat(chat(stream=stream))
        assert (status, message in text) == (400, True), text


def test_a_chat_without_messages_is_told_so(plain):
    status, text = plain.chat({"max_tokens": 3})
    assert (status, json.loads(text)["error"]["message"]) == (400, "the request has no 'messages'")


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_cached_tokens_are_those_of_one_prompt(plain, settings):
    expected = [complete(plain)["usage"] for _ in range(2)][1]
    status, text = plain.chat(generation(**settings), "/v1/completions")
    assert status == 200, text
    usage = json.loads(text)["usage"]
    assert usage["prompt_tokens"] == expected["prompt_tokens"]
    assert usage["prompt_tokens_details"] == expected["prompt_tokens_details"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_the_server_ends_although_a_client_does_not_read(model, tmp_path, monkeypatch):
    configs = []
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda running, sockets: configs.append(running.config))
    with KVStore(tmp_path / "store") as store:
        server.serve(str(model), store, Exact(), host="127.0.0.1", port=0, device="cpu", dtype="float32")
    assert configs[0].timeout_graceful_shutdown == server.SHUTDOWN_SECONDS + server.CANCEL_SECONDS > 0
