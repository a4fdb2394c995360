"""Reading published KV from a repository of the Hub: huggingface_hub's client against a server in this process."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from families import build, prompt
from huggingface_hub import close_session, constants
from typer.testing import CliRunner

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cli import app
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.store.backends import hub, open_remote
from hf_tiered_cache.store.kinds import ENTRY

IDS = prompt(100)
REPO = "hf://datasets/me/corpus@v1/kv"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a repository whose files are those of a folder, and a count of the requests it has answered."""
    state = SimpleNamespace(root=tmp_path / "repository", commit="c1", requests=[], status=200, ranges=True)
    (state.root / "kv").mkdir(parents=True)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def answer(self, status, content, headers=()):
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            path = self.path.partition("?")[0]
            state.requests.append(path)
            if state.status != 200:
                return self.answer(state.status, b"{}")
            if path == "/api/datasets/me/corpus/revision/v1":
                return self.answer(200, json.dumps({"id": "me/corpus", "sha": state.commit}).encode())
            if path == f"/api/datasets/me/corpus/tree/{state.commit}/kv":
                return self.answer(200, json.dumps(list(entries(state.root))).encode())
            match = re.fullmatch(f"/datasets/me/corpus/resolve/{state.commit}/(.*)", path)
            if match is None or not (state.root / match[1]).is_file():
                return self.answer(404, b"{}", [("X-Error-Code", "EntryNotFound")])
            content = (state.root / match[1]).read_bytes()
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            return self.answer(206, content[first : last + 1]) if state.ranges else self.answer(200, content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    close_session()
    yield state
    server.shutdown()
    server.server_close()
    close_session()


def entries(root):
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            yield {"type": "directory", "path": name, "oid": "0"}
        else:
            oid = hashlib.sha1(path.read_bytes()).hexdigest()
            yield {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}


@pytest.fixture
def model():
    return build("llama")


def publish(model, repository, tmp_path, ids=IDS):
    """Store a prompt in the folder that is the repository, as the documentation says."""
    with KVStore(tmp_path / "corpus") as store:
        store.precompute(model, ids[0], progress=False)
    result = CliRunner().invoke(app, ["copy", str(tmp_path / "corpus"), f"file://{repository.root}/kv"])
    assert result.exit_code == 0, result.output


def test_prompts_are_restored_from_a_repository(model, repository, tmp_path):
    publish(model, repository, tmp_path)
    with KVStore(tmp_path / "worker", remote=REPO) as store, torch.no_grad():
        cache = TieredCache(model, store)
        output = model.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False)
        store.flush()
        assert cache.stats.tokens_restored == 96
        assert torch.equal(output, model.generate(IDS, max_new_tokens=4, do_sample=False))
        assert store.stats.remote.errors == store.stats.remote.segments_written == 0
        before = len(repository.requests)
        model(input_ids=prompt(100, seed=9), past_key_values=TieredCache(model, store), logits_to_keep=1)
        assert len(repository.requests) == before  # what is not listed is not asked for


def test_a_repository_is_copied_and_listed(model, repository, tmp_path):
    publish(model, repository, tmp_path)
    result = CliRunner().invoke(app, ["copy", REPO, str(tmp_path / "worker")])
    assert result.exit_code == 0, result.output
    assert "copied 1 segment" in result.output
    (row,) = json.loads(CliRunner().invoke(app, ["ls", REPO, "--json"]).stdout)
    assert row["tokens"] == 96


def test_a_new_commit_is_seen_after_a_while(model, repository, tmp_path, monkeypatch):
    remote = open_remote(REPO)
    assert remote.records.names(ENTRY) == []
    publish(model, repository, tmp_path)
    repository.commit = "c2"
    assert remote.records.names(ENTRY) == []
    monkeypatch.setattr(hub, "_LISTED_SECONDS", 0.0)
    (name, *_) = remote.records.names(ENTRY)
    metadata = remote.find_object(f"{ENTRY.folder}/{name}")
    path = repository.root / "kv" / ENTRY.folder / name
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    repository.commit = "c3"
    with pytest.raises(FileNotFoundError, match="replaced"):
        remote.get_object(f"{ENTRY.folder}/{name}", metadata.version, 0, 10)


@pytest.mark.parametrize("ranges", [True, False])
def test_ranges_are_read(repository, ranges):
    repository.ranges = ranges
    (repository.root / "kv" / "a.bin").write_bytes(bytes(range(200)))
    remote = open_remote(REPO)
    version = remote.find_object("a.bin").version
    for offset, nbytes in ((0, 10), (50, 100), (190, 100), (200, 5), (300, 5), (7, 0)):
        assert remote.get_object("a.bin", version, offset, nbytes) == bytes(range(200))[offset : offset + nbytes]


def test_nothing_is_written_to_a_repository(model, repository, tmp_path):
    publish(model, repository, tmp_path)
    remote = open_remote(REPO)
    for call in (lambda: remote.put_object("a", b"", True), lambda: remote.delete_object("a")):
        with pytest.raises(OSError, match="only read: copy to file:///folder") as error:
            call()
        assert error.value.errno == errno.EROFS
    result = CliRunner().invoke(app, ["copy", str(tmp_path / "corpus"), "hf://datasets/me/corpus@v1/other"])
    assert result.exit_code == 1
    assert "only read: copy to file:///folder" in result.output


def test_a_listed_file_that_is_gone_is_an_error_and_asked_for_once(repository):
    path = repository.root / "kv" / "segments" / f"{'a' * 32}.kv"
    path.parent.mkdir()
    path.write_bytes(bytes(8192))
    remote = open_remote(REPO)
    assert list(remote.names()) == ["a" * 32]
    path.unlink()
    before = len(repository.requests)
    with pytest.raises(OSError, match="of the Hub") as error:
        remote.head("a" * 32, lambda stored, page: len(page))
    assert (error.value.errno, len(repository.requests) - before) == (errno.EIO, 1)


@pytest.mark.parametrize(("status", "number"), [(401, errno.EACCES), (404, errno.ENOENT), (500, errno.EIO)])
def test_a_failing_hub_costs_no_answer(model, repository, tmp_path, status, number):
    repository.status = status
    with pytest.raises(OSError, match="of the Hub") as error:
        open_remote(REPO).list_objects("segments")
    assert error.value.errno == number
    with KVStore(tmp_path / "worker", remote=REPO) as store, torch.no_grad():
        cache = TieredCache(model, store)
        output = model.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert torch.equal(output, model.generate(IDS, max_new_tokens=4, do_sample=False))
        assert sum(store.stats.remote.misses.values()) == 1


@pytest.mark.parametrize("revision", ["refs/pr/1", "refs%2Fpr%2F1"])
def test_a_pull_request_is_a_revision(revision):
    remote = open_remote(f"hf://datasets/me/corpus@{revision}/kv")
    assert (remote._revision, remote._prefix) == ("refs/pr/1", "kv")
    remote.close()


@pytest.mark.parametrize("address", ["hf://", "hf://name", "hf://datasets/name", "hf://papers/a/b@c@d"])
def test_an_address_without_a_repository_is_refused(address):
    with pytest.raises(ConfigError, match="is not the address of a repository"):
        open_remote(address)
