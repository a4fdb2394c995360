"""Servers of remotes for tests: real ones, in processes of their own. A test is skipped where one is not installed."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import remote_servers as servers
from huggingface_hub import constants
from remote_servers import MissingServerError, Mooncake, Server, make_bucket, s3_environment

from hf_tiered_cache.integrations.hub import go_offline_without_hub

REMOTES = ["file", "sqlite", "redis", "s3", "mooncake"]
"""Kinds of remotes that processes share."""
_numbers = itertools.count()
__all__ = [
    "REMOTES",
    "make_bucket",
    "mooncake_server",
    "place_of",
    "redis_server",
    "s3_environment",
    "s3_server",
    "silent_hub",
]


@contextmanager
def _skipping(run, *arguments) -> Iterator:
    """Run a server. Skip the test if there is none."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(run(*arguments))
        except MissingServerError as error:
            pytest.skip(str(error))
        yield server


def redis_server(folder: Path, *options: str) -> Iterator[Server]:
    """Run a Redis server. Skip the test if there is none."""
    return _skipping(servers.redis_server, folder, *options)


def s3_server(folder: Path) -> Iterator[Server]:
    """Run an S3-compatible server. Skip the test if there is none."""
    return _skipping(servers.s3_server, folder)


def mooncake_server(folder: Path, *options: int) -> Iterator[Mooncake]:
    """Run a Mooncake master with a pool. Skip the test if the package is not installed."""
    return _skipping(servers.mooncake_server, folder, *options)


@pytest.fixture
def silent_hub(monkeypatch):
    """Start a hub that accepts connections and never answers, like a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        datasets = sys.modules.get("datasets")  # of the extra eval
        for module in (constants, *([datasets.config] if datasets else [])):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        go_offline_without_hub.cache_clear()
        yield
    go_offline_without_hub.cache_clear()


@pytest.fixture(scope="session")
def place_of(tmp_path_factory):
    """Return a function that runs the server of a kind of remote, and returns the address of an empty place on it."""
    runs = {"redis": redis_server, "s3": s3_server, "mooncake": mooncake_server}
    started, missing_servers = {}, {}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:

        def server_of(kind):
            if kind in missing_servers:
                pytest.skip(missing_servers[kind])
            if kind not in started:
                try:
                    started[kind] = stack.enter_context(runs[kind](tmp_path_factory.mktemp(kind)))
                except pytest.skip.Exception as error:
                    missing_servers[kind] = str(error)
                    raise
                environment = {"s3": s3_environment, "mooncake": lambda server: server.environment}
                for name, value in environment.get(kind, lambda _: {})(started[kind]).items():
                    patch.setenv(name, value)
            return started[kind]

        def place(kind: str) -> str:
            number = next(_numbers)
            if kind == "sqlite":
                return f"sqlite://{tmp_path_factory.mktemp('remote')}/{number}.db"
            if kind == "file":
                return f"file://{tmp_path_factory.mktemp('remote')}/{number}"
            if kind == "memory":
                pytest.importorskip("obstore", reason="install obstore: pip install '.[remote]'")
                return f"memory://{number}"
            server = server_of(kind)
            if kind == "redis":
                return f"redis://127.0.0.1:{server.port}/0/{number}"
            if kind == "mooncake":
                return server.address(str(number))
            make_bucket(server, f"bucket{number}")
            return f"s3://bucket{number}/prefix"

        yield place
