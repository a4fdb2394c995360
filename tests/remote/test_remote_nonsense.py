"""Servers that are none: what they answer is a counted fault, in one sentence, and no error of the request."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from families import prompt
from servers import s3_environment
from shared_prompts import check, share

from hf_tiered_cache import KVStore
from hf_tiered_cache.store.backends import open_remote


@contextmanager
def answering(content):
    """Run a server that answers everything with the same bytes, and return its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection):
            with connection:
                while connection.recv(1 << 16):
                    connection.sendall(content)

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$abc\r\n", b":1\r\n" * 9])
def test_what_is_no_redis_server_is_a_fault(model, answer):
    pytest.importorskip("redis")
    with answering(answer) as port:
        address = f"redis://127.0.0.1:{port}"
        remote = open_remote(address)
        calls = [remote.names, lambda: remote.find("0" * 32), lambda: remote.get_beginnings(["prefixes/a"], 8)]
        for call in calls:
            with pytest.raises(OSError, match=r"\[Errno"):
                call()
        remote.close()
        with KVStore(address) as store:
            share(model, store, prompt(40))


def test_a_bucket_that_does_not_exist_is_said_in_one_line(model, tmp_path, monkeypatch, caplog):
    pytest.importorskip("obstore")
    with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as port:
        for name, value in s3_environment(SimpleNamespace(port=port)).items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.WARNING), KVStore(tmp_path, remote="s3://missing/kv") as store:
            share(model, store, prompt(40))
            check(model, store, prompt(40), tokens_restored=32)
        (message,) = [record.getMessage() for record in caplog.records if "was not sent" in record.getMessage()]
        assert "there is no such object or bucket" in message and "\n" not in message
