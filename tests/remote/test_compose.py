"""The compose files of docs/remote.md: they can be read, and their commands run servers that serve a remote."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from remote_servers import Server, free_port, running

from hf_tiered_cache.store.backends import open_remote

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
TEXT = PAGE.read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = {
    name: service
    for text in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.S)
    for name, service in yaml.safe_load(text)["services"].items()
}


def command_of(name: str, **options: object) -> list[str]:
    """Return a service's command with other options, which win because they are last. Skip if it is not installed."""
    program, *words = shlex.split(SERVICES[name]["command"])
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"{program} is not installed")
    return [path, *words, *(word for option, value in options.items() for word in (f"--{option}", str(value)))]


def check(address: str) -> None:
    """Write an object to a remote and read it."""
    remote = open_remote(address)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                remote.put_object("segments/a.kv", b"content", replace=False)
                break
            except OSError:  # the pool has no memory yet
                assert time.monotonic() < deadline
                time.sleep(0.2)
        metadata = remote.find_object("segments/a.kv")
        assert metadata is not None
        assert remote.get_object("segments/a.kv", metadata.version, 0, 7) == b"content"
    finally:
        remote.close()


def test_each_service_has_an_image_and_a_command():
    assert set(SERVICES) == {"redis", "s3", "master", "pool"}
    for service in SERVICES.values():
        assert ("image" in service) != ("build" in service)
        assert service["command"]
    for scheme in ("redis", "s3", "mooncake"):
        assert f"export HF_TIERED_CACHE_REMOTE={scheme}://" in TEXT


def test_the_redis_server_serves_a_remote(tmp_path):
    pytest.importorskip("redis")
    with running(Server(command_of("redis", port="{port}", bind="127.0.0.1"), tmp_path)) as server:
        check(f"redis://127.0.0.1:{server.port}")


def test_the_mooncake_master_and_pool_serve_a_remote(tmp_path, monkeypatch):
    pytest.importorskip("mooncake.store")
    metadata, admin = free_port(), free_port()
    monkeypatch.setenv("MOONCAKE_TE_META_DATA_SERVER", f"http://127.0.0.1:{metadata}/metadata")
    master_options = {"rpc_port": "{port}", "http_metadata_server_port": metadata, "metrics_port": admin}
    with ExitStack() as stack:
        master = stack.enter_context(running(Server(command_of("master", **master_options), tmp_path)))
        pool_options = {
            "host": "127.0.0.1",
            "port": "{port}",
            "global_segment_size": "64MB",
            "master_server_address": f"127.0.0.1:{master.port}",
            "metadata_server": f"http://127.0.0.1:{metadata}/metadata",
        }
        stack.enter_context(running(Server(command_of("pool", **pool_options), tmp_path)))
        check(f"mooncake://127.0.0.1:{master.port}/x?admin={admin}")
