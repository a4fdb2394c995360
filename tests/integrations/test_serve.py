"""transformers' server with a store, asked by an OpenAI client over loopback."""

from __future__ import annotations

import asyncio
import functools
import http.client
import importlib.util
import json
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import processes
import pytest
from asgi_client import Client, copy_reference
from families import build, prompt
from paged import finished, greedy, paging
from transformers.utils.import_utils import is_serve_available

from hf_tiered_cache import Exact, KVStore, TieredCache, UnsupportedModelError
from hf_tiered_cache.tiered_cache import TieredSession
from hf_tiered_cache.tiers.collector import StatsCollector

if not is_serve_available():
    pytest.skip("the server needs the extra `serve`", allow_module_level=True)
openai = pytest.importorskip("openai")

uvicorn = pytest.importorskip("uvicorn")
generation = pytest.importorskip("hf_tiered_cache.integrations.serve_generation")
limits = pytest.importorskip("hf_tiered_cache.integrations.serve_requests")
server = pytest.importorskip("hf_tiered_cache.integrations.serve")

ROOT = Path(__file__).parents[2]
SYSTEM = "the old man saw a small house near the river , and went in to see who was there . " * 6
QUESTIONS = ("who went in ?", "what did he see ?", "where was it ?")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of the reference model, with a chat template."""
    folder = copy_reference(tmp_path_factory.mktemp("model") / "xs")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["response_template"] = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"assistant\s*:",
        "fields": {"content": {"content": "text"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def connected(port, alive=lambda: True):
    """Return a client of a server that answers."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, max_retries=0)
    for _ in range(240):
        try:
            client.get("../health", cast_to=dict)
            break
        except openai.APIConnectionError:
            assert alive()
            time.sleep(0.25)
    return client


@contextmanager
def serving(model, store, *options):
    """Run a server in a separate process; yield a client, and a function that returns the server's log."""
    port, log = free_port(), store.with_suffix(".log")
    command = [sys.executable, "-m", "hf_tiered_cache.cli", "serve", model, "--store", store, "--dtype", "float32"]
    with log.open("w") as out:
        process = processes.Popen([*map(str, command), "--port", str(port), *options], stderr=out, cwd=ROOT)
    try:
        yield connected(port, lambda: process.poll() is None), log.read_text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(30)


def chat(client, model, messages, **more):
    return client.chat.completions.create(
        model=str(model), messages=messages, max_tokens=8, temperature=0, extra_body={"seed": 0}, **more
    )


def conversation(client, model, system=SYSTEM):
    """Run three turns. Return the messages, and the cached tokens of each turn."""
    messages, cached = [{"role": "system", "content": system}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = chat(client, model, messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    return messages, cached


@functools.cache
def plain_conversation(model):
    """Run the same three turns with transformers' unmodified server, in a thread of this process."""
    from transformers.cli.serve import Serve

    port = free_port()
    server = Serve(force_model=str(model), dtype="float32", host="127.0.0.1", port=port, non_blocking=True)
    try:
        client = connected(port)
        messages = [{"role": "system", "content": SYSTEM}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = chat(client, model, messages).choices[0].message.content
            messages.append({"role": "assistant", "content": answer})
        return messages
    finally:
        server.kill_server()


PAGES = ("--continuous-batching", "--cb-num-blocks", 64, "--cb-block-size", 16, "--cb-max-batch-tokens", 256)


def test_continuous_batches_give_the_same_answers_and_survive_a_restart(model, tmp_path):
    store = tmp_path / "store"
    expected = plain_conversation(model)
    with serving(model, store, *map(str, PAGES)) as (client, log):
        messages, cached = conversation(client, model)
        assert messages == expected
        assert cached[0] == 0
        assert cached[1] > 0  # in pages
    with serving(model, store, *map(str, PAGES)) as (client, log):
        messages, cached = conversation(client, model)
        assert messages == expected
        assert cached[0] > 100  # from the store
        assert "tokens restored" in log()
        answers = [None] * 4

        def ask(at):
            chunks = chat(client, model, messages[:2], stream=True, stream_options={"include_usage": True})
            text = (chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            answers[at] = "".join(text).strip()

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [messages[2]["content"]] * 4


def test_a_model_that_no_store_supports_is_batched_without_one(caplog):
    def refuse(model):
        raise UnsupportedModelError("it has a state")

    batches, ids = generation.BatchedGenerateManager(server.Batching(refuse, paging())), prompt(20)[0].tolist()
    try:
        for _ in range(2):
            batches.init_cb(build("llama"), greedy())
        assert len(finished(batches._cb, [batches._cb.add_request(ids, max_new_tokens=8, eos_token_id=-1)])[0]) == 8
    finally:
        batches.stop()
    assert caplog.text.count("is served without the store: it has a state") == 1


def test_a_prompt_without_tokens_is_refused(store):
    manager = generation.TieredGenerateManager(functools.partial(TieredCache, store=store), generation.Cancellation())
    answer = manager.generate_non_streaming(build("llama"), None, {"input_ids": prompt(0)}, greedy())
    with pytest.raises(server.HTTPException, match="has no tokens"):
        asyncio.run(answer)


def test_an_empty_prompt_does_not_end_the_engine_of_the_others():
    model, batches = build("llama"), generation.BatchedGenerateManager(server.Batching(lambda model: None, paging()))
    batches.init_cb(model, greedy())
    try:
        with pytest.raises(server.HTTPException, match="has no tokens"):
            asyncio.run(batches.generate_non_streaming(model, None, {"input_ids": []}, greedy(), "empty"))
        ids = prompt(20)[0].tolist()
        assert len(finished(batches._cb, [batches._cb.add_request(ids, max_new_tokens=8, eos_token_id=-1)])[0]) == 8
    finally:
        batches.stop()


def test_the_example_of_a_client_asks_at_once_and_shows_what_was_cached(model, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("batched_client", ROOT / "examples" / "batched_client.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)  # for its dataclass
    spec.loader.exec_module(example)
    text = tmp_path / "text.txt"
    text.write_text(SYSTEM)
    questions = [option for question in QUESTIONS for option in ("--question", question)]
    with serving(model, tmp_path / "store", *map(str, PAGES)) as (client, _):
        argv = ["x", "--url", str(client.base_url), "--text", str(text), "--new-tokens", "4", *questions]
        monkeypatch.setattr(sys, "argv", argv)
        for is_second in (False, True):
            assert example.main() == 0
            rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("?")]
            assert len(rows) == 3
            assert all(0 <= int(cached) < int(tokens) for tokens, cached, *_ in rows)
            assert all(int(cached) > 100 for _, cached, *_ in rows) or not is_second
    with pytest.raises(SystemExit, match=f"no server answers at {client.base_url}"):
        example.main()
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SystemExit, match="pip install openai"):
        example.main()


def test_continuous_batches_need_the_exact_method(run, model, tmp_path):
    code, _, err = run("serve", model, "--store", tmp_path / "s", "--method", "cache_tune", "--continuous-batching")
    assert code == 2
    assert "use the exact method" in err
    code, _, err = run("serve", model, "--store", tmp_path / "s", "--cb-num-blocks", 5)
    assert code == 2
    assert "--continuous-batching" in err


def test_clients_get_the_same_answers_and_restore_what_was_said(model, tmp_path):
    store = tmp_path / "store"
    expected = plain_conversation(model)
    with serving(model, store) as (client, log):
        messages, cached = conversation(client, model)
        assert messages == expected
        assert cached[0] == 0
        assert 0 < cached[1] < cached[2]
        assert f"{cached[2]} tokens restored" in log()

        parts = list(chat(client, model, messages[:-1], stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text.strip() == messages[-1]["content"]
        assert parts[-1].usage.prompt_tokens_details.cached_tokens >= cached[2]

        request = {"model": str(model), "input": messages[:-1], "max_output_tokens": 8, "temperature": 0}
        response = client.responses.create(**request, stream=False)
        assert response.output_text == messages[-1]["content"]
        assert response.usage.input_tokens_details.cached_tokens >= cached[2]
        *_, completed = client.responses.create(**request, stream=True)
        assert completed.response.usage.input_tokens_details.cached_tokens >= cached[2]

        completion = client.completions.create(model=str(model), prompt=SYSTEM, max_tokens=4, temperature=0)
        second_response = client.completions.create(model=str(model), prompt=SYSTEM, max_tokens=4, temperature=0)
        assert second_response.choices[0].text == completion.choices[0].text
        assert second_response.usage.prompt_tokens_details.cached_tokens > 0

    with serving(model, store) as (client, _):  # after a restart
        messages, cached_again = conversation(client, model)
        assert messages == expected
        assert cached_again[0] >= cached[1]
    with KVStore(store) as kv_store:
        assert kv_store.verify(progress=False).ok


@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_requests_that_outlast_the_end_of_the_server_are_answered_and_end(model, tmp_path, monkeypatch, waiting):
    """Requests that ran on aborted the process when the interpreter exited, after an answer with status 500."""
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 0.1)
    models = server.TieredModelManager(force_model=str(model), device="cpu", dtype="float32")
    with KVStore(tmp_path / "store") as store:
        app = server.build_app(models, functools.partial(TieredCache, store=store))
        state = app.state.generation_state
        manager = state.get_manager(models.process_model_name(models.force_model))
        running, thread, client = in_a_thread(app)
        events = [threading.Event(), threading.Event()]
        if waiting:
            manager.submit(lambda: [events[0].set(), events[1].wait(30)])
            events[0].wait(30)
        ask_for_long(client)
        while not running.server_state.tasks or not (waiting or manager._running.locked()):
            time.sleep(0.01)
        running.should_exit = True
        while not state.cancellation.requested.is_set():
            time.sleep(0.01)
        events[1].set()
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())) == (503, STOPPED)
        client.close()
        thread.join(30)
        assert not thread.is_alive()
        state.shutdown()
        assert not manager._running.locked()
        with pytest.raises(server.HTTPException):
            manager.submit(int).result()


STOPPED = {"error": {"message": "the server is stopping", "type": "server_error"}}


def in_a_thread(app):
    """Run an app in a thread. Return the server, the thread, and a connection."""
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=30)
    running, listener = server.Server(config, app.state.generation_state), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    return running, thread, http.client.HTTPConnection(*listener.getsockname(), timeout=30)


def ask_for_long(client, **more):
    """Request more tokens than are computed before the server ends."""
    body = {"prompt": SYSTEM, "max_tokens": 10_000, "generation_config": '{"eos_token_id": []}'} | more
    client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_requests_in_batches_that_outlast_the_end_of_the_server_are_answered(model, tmp_path, monkeypatch, stream):
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 0.1)
    models = server.TieredModelManager(force_model=str(model), device="cpu", dtype="float32")
    with KVStore(tmp_path / "store") as store:
        batching = server.Batching(functools.partial(TieredSession, store=store, method=Exact()), paging())
        app = server.build_app(models, functools.partial(TieredCache, store=store), batching=batching)
        state = app.state.generation_state
        running, thread, client = in_a_thread(app)
        ask_for_long(client, stream=stream)
        while state._cb_manager is None or not (state._cb_manager._answers or state._cb_manager._streams):
            time.sleep(0.01)
        batches = state._cb_manager
        running.should_exit = True
        answer = client.getresponse()
        text = answer.read().decode()
        if stream:
            assert (answer.status, json.loads(text.splitlines()[-2].removeprefix("data: "))) == (200, STOPPED)
        else:
            assert (answer.status, json.loads(text)) == (503, STOPPED)
        client.close()
        thread.join(30)
        assert not thread.is_alive()
        # the engine computes it no longer, or has ended: transformers' delivery to a closed event loop ends it
        while batches._cb.is_running() and batches.scheduler.active_requests:
            time.sleep(0.01)
        with pytest.raises(server.HTTPException, match="stopping"):
            asyncio.run(batches.generate_non_streaming(None, None, {"input_ids": [1]}, greedy(), "late"))
        state.shutdown()


# --- hostile clients


@pytest.fixture(scope="module")
def app(model, tmp_path_factory):
    models = server.TieredModelManager(force_model=str(model), device="cpu", dtype="float32")
    with KVStore(tmp_path_factory.mktemp("kv") / "store") as store:
        requests = StatsCollector()
        new_cache = functools.partial(server._counted, requests, functools.partial(TieredCache, store=store))
        metrics = server.exported_metrics(store, requests)
        yield Client(server.build_app(models, new_cache, metrics=metrics, max_request_bytes=100_000), models)


def good(app, **more):
    """Ask what can be answered; the server still does."""
    status, text = app.chat({"prompt": SYSTEM, "max_tokens": 2, "temperature": 0} | more, "/v1/completions")
    assert status == 200, text
    return json.loads(text)


def test_metrics_count_requests(app):
    pytest.importorskip("prometheus_client")

    def count():
        status, text = app.ask("/metrics", method="GET")
        assert status == 200
        (line,) = [line for line in text.splitlines() if line.startswith("hf_tiered_cache_requests_requests_total")]
        return float(line.split()[1])

    before = count()
    good(app)
    assert count() == before + 1


MESSAGES = [{"role": "user", "content": "who went in ?"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", b"{"),
        ("chat", b"[" * 60_000),
        ("chat", b"[1, 2]"),
        ("chat", b"\xff\xfe"),
        ("chat", b"{}"),
        ("chat", {"messages": 5}),
        ("chat", {"messages": [5]}),
        ("chat", {"messages": [{"role": "user", "content": {"a": 1}}]}),
        ("chat", {"messages": MESSAGES, "max_tokens": "many"}),
        ("chat", {"messages": MESSAGES, "temperature": "hot"}),
        ("chat", {"messages": MESSAGES, "seed": "x"}),
        ("chat", {"messages": MESSAGES, "generation_config": "{"}),
        ("chat", {"messages": MESSAGES, "generation_config": '{"num_beams": 5000}'}),
        ("chat", {"messages": MESSAGES, "generation_config": '{"num_return_sequences": 1000000, "do_sample": true}'}),
        ("chat", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("chat", {"messages": MESSAGES, "chat_template_kwargs": 7}),
        ("chat", {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": False}}),
        ("chat", {"messages": MESSAGES, "model": "gpt2"}),
        ("chat", {"messages": MESSAGES, "model": "../../etc"}),
        ("chat", {"messages": MESSAGES, "model": 7}),
        ("chat", {"messages": MESSAGES, "what": 7}),
        ("completion", {"prompt": 5}),
        ("completion", {"prompt": "who went in ? " * 5000}),
        ("completion", {"prompt": SYSTEM, "max_tokens": -5}),
        ("completion", {"prompt": SYSTEM, "max_tokens": 0}),
        ("completion", {"prompt": SYSTEM, "generation_config": '{"num_beams": 0}'}),
        ("completion", {"prompt": SYSTEM, "generation_config": "[" * 60_000}),
        ("completion", {"prompt": SYSTEM, "generation_config": '{"temperature": "hot", "do_sample": true}'}),
        ("completion", {"prompt": SYSTEM, "top_p": 2}),
        ("completion", {"prompt": SYSTEM, "generation_config": '{"cache_implementation": "static"}'}),
        ("response", {"input": 5}),
        ("load", {"model": "gpt2"}),
        ("load", {"model": 7}),
        ("load", {}),
        ("reset", b""),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:60],
)
def test_what_cannot_be_answered_is_a_4xx_and_the_server_goes_on(app, path, body):
    paths = {"chat": "chat/completions", "completion": "completions", "response": "responses"}
    path = {"load": "/load_model", "audio": "/v1/audio/transcriptions", "reset": "/reset"}.get(path) or (
        f"/v1/{paths[path]}"
    )
    before = dict(app.models.loaded_models)
    status, text = app.ask(path, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert 400 <= status < 500, text
    assert json.loads(text)["error"]["message"]  # OpenAI's clients show nothing else
    assert "Traceback" not in text
    assert app.models.loaded_models == before


def test_another_model_is_not_loaded_by_any_endpoint(app, monkeypatch):
    monkeypatch.setattr(server.ModelManager, "_load_model", lambda *args, **kwargs: pytest.fail("it was loaded"))
    boundary = b"--x\r\nContent-Disposition: form-data; name="
    form = boundary + b'"model"\r\n\r\ngpt2\r\n' + boundary + b'"file"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
    requests = [
        app.chat({"messages": MESSAGES, "model": "gpt2"}),
        app.chat({"input": "a", "model": "gpt2"}, "/v1/responses"),
        app.chat({"model": "gpt2"}, "/load_model"),
        app.ask("/v1/audio/transcriptions", form, [(b"content-type", b"multipart/form-data; boundary=x")]),
    ]
    for status, text in requests:
        assert status == 400 or "python-multipart" in text, text
    with pytest.raises(server.HTTPException, match="400"):  # what the transcriptions call
        app.models.load_model_and_processor("gpt2@main")
    good(app)


def test_a_request_that_is_too_large_is_refused_before_it_is_read(app):
    assert app.ask("/v1/completions", headers=[(b"content-length", b"100001")], chunks=[b""])[0] == 413
    assert app.ask("/v1/completions", chunks=[b"x" * 40_000] * 3)[0] == 413
    good(app)


def test_a_body_that_does_not_arrive_is_given_up():
    async def never(scope, receive, send):
        raise AssertionError

    client = Client(limits.LimitedRequests(never, body_seconds=0.2))
    assert client.ask("/", chunks=[b"{", b"}"], pause=0.15)[0] == 408


def test_an_answer_ends_with_the_models_context(app, monkeypatch):
    context = good(app)["usage"]["prompt_tokens"] + 16
    (entry,) = app.models.loaded_models.values()
    monkeypatch.setattr(entry.model.config, "max_position_embeddings", context)
    assert good(app, max_tokens=10**9)["usage"]["total_tokens"] <= context
    status, text = app.chat({"prompt": SYSTEM * 2}, "/v1/completions")
    assert (status, f"the model's context is {context}" in text) == (400, True)


def test_a_client_that_asks_for_another_cache_is_served_and_it_is_said(app, caplog):
    config = json.dumps({"max_new_tokens": 2, "do_sample": False, "use_cache": False})
    assert good(app, generation_config=config)
    assert "use_cache=False" in caplog.text


def test_connections_that_send_nothing_are_closed_and_others_are_served(app, monkeypatch):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    config = uvicorn.Config(
        app.app, http=limits.ImpatientProtocol, limit_concurrency=64, log_level="critical", lifespan="off"
    )
    running, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    address = listener.getsockname()
    try:
        idle = [socket.create_connection(address, timeout=10) for _ in range(40)]
        for number, connection in enumerate(idle):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"[: number + 1])
        client = http.client.HTTPConnection(*address, timeout=10)
        for _ in range(2):  # on one connection
            client.request("GET", "/health")
            assert json.loads(client.getresponse().read()) == {"status": "ok"}
        client.close()
        for connection in idle:
            with connection:
                assert connection.recv(4096) == b""
    finally:
        running.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()


# --- what goes wrong is said in one line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--allow-any-model"),
        (["model", "--allow-any-model"], "specify one MODEL"),
        (["--allow-any-model", "--trust-remote-code"], "clients could then run any code"),
        (["model", "--max-request-size", "much"], "max_request_size='much' is not a valid size"),
    ],
    ids=str,
)
def test_a_server_of_any_model_must_be_meant(run, tmp_path, options, message):
    status, _, err = run("serve", *options, "--store", tmp_path / "store")
    assert status == 2
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["--dtype", "float7"], "Unsupported dtype: 'float7'"),
        (["--method", "none_such"], "unknown method 'none_such'"),
        (["--method", "impress", "--attn-implementation", "flex_attention"], "sdpa"),
        (["--host-memory", "much"], "host_memory='much' is not a valid size"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_serve_refuses_in_one_line(run, model, tmp_path, options, message):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = [option.format(taken=port) for option in options]
        status, _, err = run("serve", model, "--store", tmp_path / "store", *options)
    assert status == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("hf-tiered-cache: ")
    assert message.format(taken=port) in err.splitlines()[-1]


def test_serve_refuses_a_model_that_is_not_there(run, tmp_path):
    status, _, err = run("serve", tmp_path / "none", "--store", tmp_path / "store", "--port", free_port())
    assert status == 2
    assert "cannot be loaded: there is no such folder; check the path" in err.splitlines()[-1]


def test_serve_says_within_ten_seconds_that_a_model_cannot_be_had(run, silent_hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    began = time.monotonic()
    status, _, err = run("serve", "nowhere/at-all", "--store", tmp_path / "store", "--port", free_port())
    assert time.monotonic() - began < 10
    assert status == 2
    assert "'nowhere/at-all' cannot be loaded" in err.splitlines()[-1]


def test_serve_names_the_packages_it_misses(run, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    status, _, err = run("serve", "model", "--store", tmp_path / "store")
    assert status == 2
    assert "pip install 'hf-tiered-cache[serve]'" in err
    assert not (tmp_path / "store").exists()
