"""transformers' server with a store, asked by an OpenAI client over loopback."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from families import CHAT_TEMPLATE
from transformers.utils.import_utils import is_serve_available

from hf_tiered_cache import KVStore

if not is_serve_available():
    pytest.skip("the server needs the extra `serve`", allow_module_level=True)
openai = pytest.importorskip("openai")

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "eval" / "reference" / "xs"
SYSTEM = "the old man saw a small house near the river , and went in to see who was there . " * 6
QUESTIONS = ("who went in ?", "what did he see ?", "where was it ?")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder: the reference model, with a chat template."""
    folder = tmp_path_factory.mktemp("model") / "xs"
    shutil.copytree(REFERENCE, folder, ignore=shutil.ignore_patterns("curve.*", "check.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
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
    """A client of a server that answers."""
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
    """A server in a process of its own; yields a client, and a function that gives what the server has logged."""
    port, log = free_port(), store.with_suffix(".log")
    command = [sys.executable, "-m", "hf_tiered_cache.cli", "serve", model, "--store", store, "--dtype", "float32"]
    with log.open("w") as out:
        process = subprocess.Popen([*map(str, command), "--port", str(port), *options], stderr=out, cwd=ROOT)
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
    """Three turns; returns the messages, and the cached tokens of each turn."""
    messages, cached = [{"role": "system", "content": system}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = chat(client, model, messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    return messages, cached


def plain_conversation(model):
    """The same three turns with transformers' server as it is, in a thread of this process."""
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


@pytest.mark.timeout(120)
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

        asked = {"model": str(model), "input": messages[:-1], "max_output_tokens": 8, "temperature": 0}
        response = client.responses.create(**asked, stream=False)
        assert response.output_text == messages[-1]["content"]
        assert response.usage.input_tokens_details.cached_tokens >= cached[2]
        *_, completed = client.responses.create(**asked, stream=True)
        assert completed.response.usage.input_tokens_details.cached_tokens >= cached[2]

        completion = client.completions.create(model=str(model), prompt=SYSTEM, max_tokens=4, temperature=0)
        again = client.completions.create(model=str(model), prompt=SYSTEM, max_tokens=4, temperature=0)
        assert again.choices[0].text == completion.choices[0].text
        assert again.usage.prompt_tokens_details.cached_tokens > 0

    with serving(model, store) as (client, _):  # after a restart
        messages, cached_again = conversation(client, model)
        assert messages == expected
        assert cached_again[0] >= cached[1]
    with KVStore(store) as opened:
        assert opened.verify(progress=False).ok


# --- what goes wrong is said in one line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["--dtype", "float7"], "Unsupported dtype: 'float7'"),
        (["--method", "none_such"], "unknown method 'none_such'"),
        (["--method", "impress", "--attn-implementation", "eager"], "sdpa"),
        (["--host-memory", "much"], "host_memory='much' is not a valid size"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_serve_refuses_in_one_line(run, model, tmp_path, options, said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        options = [option.format(taken=taken) for option in options]
        status, _, err = run("serve", model, "--store", tmp_path / "store", *options)
    assert status == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("hf-tiered-cache: ")
    assert said.format(taken=taken) in err.splitlines()[-1]


def test_serve_refuses_a_model_that_is_not_there(run, tmp_path):
    status, _, err = run("serve", tmp_path / "none", "--store", tmp_path / "store", "--port", free_port())
    assert status == 2
    assert "cannot be loaded" in err.splitlines()[-1]


def test_serve_names_the_packages_it_misses(run, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    status, _, err = run("serve", "model", "--store", tmp_path / "store")
    assert status == 2
    assert "pip install 'hf-tiered-cache[serve]'" in err
    assert not (tmp_path / "store").exists()
