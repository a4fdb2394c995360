"""Servers of remotes for tests: real ones, in processes of their own. A test is skipped where one is not installed."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REMOTES = ["file", "redis", "s3"]
"""Kinds of remotes that processes share."""
AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_numbers = itertools.count()


class Server:
    """A server that runs in its own process.

    Args:
        command: Command, with "{port}" for the port and "{folder}" for its folder.
        folder: Folder of its data.
        environment: Further variables of its environment.
    """

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.port, self._folder, self._environment = free_port(), folder, environment or {}
        self._command = [word.format(port=self.port, folder=folder) for word in command]
        self.start()

    def start(self) -> None:
        """Start it, on the same port as before, and wait until it answers."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            env=os.environ | self._environment,
        )
        for _ in range(600):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"{self._command[0]} did not start")

    def kill(self) -> None:
        """End it at once, as a power failure does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it: it takes connections and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Server]:
    """Run a Redis server. Skip the test if there is none."""
    pytest.importorskip("redis", reason="install redis-py: pip install '.[redis]'")
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("install a Redis server: apt-get install redis-server")
    command = [program, "--port", "{port}", "--bind", "127.0.0.1", "--save", "", "--dir", "{folder}", *options]
    with _running(Server(command, folder)) as server:
        yield server


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    """Run an S3-compatible server. Skip the test if there is none."""
    pytest.importorskip("obstore", reason="install obstore: pip install '.[remote]'")
    if importlib.util.find_spec("moto") is None:
        pytest.skip("install an S3-compatible server: pip install 'moto[server]'")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "{port}"]
    with _running(Server(command, folder)) as server:
        yield server


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def place_of(tmp_path_factory):
    """Function that returns the address of an empty place of a kind of remote, and runs its server."""
    with pytest.MonkeyPatch.context() as patch:
        servers: dict[str, Server] = {}
        contexts = []

        def place(kind: str) -> str:
            number = next(_numbers)
            if kind in ("file", "memory"):
                pytest.importorskip("obstore", reason="install obstore: pip install '.[remote]'")
                folder = tmp_path_factory.mktemp("remote")
                return f"file://{folder}/{number}" if kind == "file" else f"memory://{number}"
            if kind not in servers:
                run = {"redis": redis_server, "s3": s3_server}[kind](tmp_path_factory.mktemp(kind))
                servers[kind] = run.__enter__()
                contexts.append(run)
                if kind == "s3":
                    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{servers[kind].port}")
                    for name, value in AWS.items():
                        patch.setenv(name, value)
            port = servers[kind].port
            if kind == "redis":
                return f"redis://127.0.0.1:{port}/0/{number}"
            make_bucket(port, f"bucket{number}")
            return f"s3://bucket{number}/prefix"

        yield place
        for context in reversed(contexts):
            context.__exit__(None, None, None)


def make_bucket(port: int, name: str) -> None:
    """Make a bucket on the S3-compatible server at a port."""
    import boto3

    address = f"http://127.0.0.1:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket=name)
