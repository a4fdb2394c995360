"""What one store computed, another with the same remote restores: same bits, one lookup for each prompt."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import processes
import pytest
import torch
from families import build, prompt
from memory_backend import MemoryBackend
from reference import kv_of, prefilled
from servers import REMOTES
from typer.testing import CliRunner

from hf_tiered_cache import ConfigError, Geometry, KVStore, StoreError, TieredCache
from hf_tiered_cache.cli import app
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import ContiguousKV, Epic, Krul
from hf_tiered_cache.remote import link, tier
from hf_tiered_cache.store.backends import BACKENDS
from hf_tiered_cache.store.kinds import SEGMENT_SUFFIX

IDS = prompt(200)
PREFIX = IDS[:, :192]


@torch.no_grad()
def answer(model, store, ids=IDS, **options):
    """Logits of the last token of a prompt, and the number of tokens that were restored."""
    cache = TieredCache(model, store, **options)
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    return logits, cache.stats.tokens_restored


@torch.no_grad()
def expected(model, tokens_restored, ids=IDS):
    """Logits with the KV of a `DynamicCache` that was filled by one pass over the prompt and cropped."""
    cache = prefilled(model, [kv_of(model, ids)], tokens_restored)
    return model(input_ids=ids[:, tokens_restored:], past_key_values=cache, logits_to_keep=1).logits


def shared(model, store, ids=IDS):
    """Compute a prompt and send it to the remote."""
    answer(model, store, ids)
    store.flush()


# --- sharing


@pytest.mark.parametrize("options", [{}, {"key": bytes(32)}, {"codec": "int8"}], ids=["plain", "key", "int8"])
def test_another_machine_restores_what_one_has_computed(model, machine, options):
    first, _ = machine("a", **options)
    shared(model, first)
    second, _ = machine("b", **options)
    logits, tokens_restored = answer(model, second)
    assert tokens_restored == 192
    assert torch.equal(logits, answer(model, first)[0])
    if "codec" not in options:
        assert torch.equal(logits, expected(model, 192))
    stats = second.stats.remote
    assert (stats.lookups, stats.hits, stats.segments_read, stats.misses) == (1, 1, 1, {})
    assert first.stats.remote.bytes_written == stats.bytes_read > 0
    assert second.verify().ok


@pytest.mark.parametrize("kind", ["memory", *REMOTES])
def test_stores_share_prompts_through_every_engine(model, tmp_path, place_of, kind):
    address = place_of(kind)
    with KVStore(tmp_path / "a", remote=address) as store:
        shared(model, store)
        assert store.stats.remote.segments_written == 1
    with KVStore(tmp_path / "b", remote=address) as store:
        logits, tokens_restored = answer(model, store)
        assert (tokens_restored, store.stats.remote.errors) == (192, 0)
        assert torch.equal(logits, expected(model, 192))
        (row,) = store.segments()
        assert store.remove([row.id]) == 1
    with KVStore(tmp_path / "c", remote=address) as store:
        assert answer(model, store)[1] == 0


@pytest.mark.parametrize("kind", REMOTES)
@pytest.mark.thin(2)
def test_processes_share_prompts(tmp_path, place_of, kind):
    address = place_of(kind)
    code = """
import sys, torch
from families import build, prompt
from memory_backend import MemoryBackend
from hf_tiered_cache import KVStore, TieredCache
folder, address, name = sys.argv[1:]
with torch.no_grad(), KVStore(folder, remote=address) as store:
    model, ids = build("llama"), prompt(200)
    cache = TieredCache(model, store)
    torch.save(model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits, name)
    print(cache.stats.tokens_restored)
"""
    code = f"import sys; sys.path.insert(0, {str(Path(processes.__file__).parent)!r})\n{code}"
    restored_counts = []
    for number in range(3):
        arguments = [str(tmp_path / f"folder{number}"), address, str(tmp_path / f"{number}.pt")]
        process = processes.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        restored_counts.append(int(process.stdout))
    assert restored_counts == [0, 192, 192]
    second, third = (torch.load(tmp_path / f"{number}.pt") for number in (1, 2))
    assert torch.equal(second, third)
    assert torch.equal(second, expected(build("llama"), 192))


def test_a_prompt_of_several_segments_takes_one_look_up(model, machine):
    first, _ = machine("a")
    for tokens in (64, 144, 200):  # turns of a conversation: each adds a segment
        shared(model, first, IDS[:, :tokens])
    assert first.stats.segments == 3
    second, remote = machine("b")
    logits, tokens_restored = answer(model, second)
    assert tokens_restored == 192
    assert remote.calls["look_up"] == 1
    assert torch.equal(logits, answer(model, first)[0])
    answer(model, second)
    assert remote.calls["look_up"] == 1  # what is stored here completely is not looked up


def test_machines_continue_what_others_have_stored(model, machine):
    first, _ = machine("a")
    shared(model, first, IDS[:, :96])
    second, _ = machine("b")
    assert answer(model, second)[1] == 96
    second.flush()
    assert second.stats.remote.segments_written == 1  # the continuation alone
    third, _ = machine("c")
    assert answer(model, third)[1] == 192


def test_of_two_segments_with_the_same_beginning_the_longer_one_is_found(model, machine):
    short, _ = machine("a")
    long, _ = machine("b", remote_write="pinned")
    answer(model, long)
    shared(model, short, IDS[:, :96])
    long.flush()
    (row,) = long.segments()
    long.pin([row.id])  # sent only now
    long.flush()
    assert answer(model, machine("c")[0])[1] == 192
    again, remote = machine("d")
    shared(model, again, IDS[:, :96])
    assert (remote.calls["put"], again.stats.remote.duplicate_writes) == (0, 0)  # what came from the remote stays there


def test_answers_are_remembered_for_seconds(model, machine, monkeypatch):
    second, remote = machine("b")
    answer(model, second, record=False)
    answer(model, second, record=False)
    assert remote.calls["look_up"] == 1
    shared(model, machine("a")[0])
    assert answer(model, second, record=False)[1] == 0
    monkeypatch.setattr(link, "_ABSENT_SECONDS", 0.0)
    third, remote = machine("c")
    answer(model, third, IDS.flip(1), record=False)
    answer(model, third, IDS.flip(1), record=False)
    assert remote.calls["look_up"] == 2
    assert second.stats.remote.misses == {tier.ABSENT: 3}


@pytest.mark.parametrize(("write", "count"), [("always", 2), ("pinned", 1), ("never", 0)])
def test_remote_write_says_which_segments_are_sent(model, machine, write, count):
    store, remote = machine("a", remote_write=write)
    store.precompute(model, PREFIX[0], pin=True, progress=False)
    store.precompute(model, PREFIX[0].flip(0), progress=False)
    store.flush()
    assert (len(remote.segments()), len(remote.entries())) == (count, 5 * count)  # at 1, 2, 4, 8, 12 prefix hashes
    assert store.stats.remote.segments_written == count


def test_removed_segments_leave_the_remote_and_evicted_ones_do_not(model, machine):
    store, remote = machine("a")
    shared(model, store)
    storage_of(store).disk.remove([row.id for row in store.segments()])  # as eviction does
    store.flush()
    assert (len(remote.segments()), len(remote.entries())) == (1, 5)
    assert answer(model, store)[1] == 192  # brought back
    store.remove([row.id for row in store.segments()])
    store.flush()
    assert remote.objects == {}


def test_clear_and_documents_are_deleted_everywhere(model, machine):
    store, remote = machine("a")
    shared(model, store)
    store.precompute(model, [PREFIX[0, :48]], passages=True, method=Epic(), labels=["a"], progress=False)
    store.flush()
    assert len(remote.segments()) == 2
    assert len(remote.entries()) == 5  # passages are not found by prefix
    store.remove_document("a")
    store.flush()
    assert len(remote.segments()) == 1
    store.clear(disk=True)
    store.flush()
    assert remote.objects == {}


def test_a_prompt_is_deleted_whatever_its_geometry_here(model, machine):
    shared(model, machine("a")[0])
    store, remote = machine("b")
    answer(model, store)
    assert store.relayout(Geometry(32, 2), progress=False) == 1
    assert len(remote.segments()) == 1
    store.clear(disk=True)
    store.flush()
    assert remote.objects == {}


def test_compacted_conversations_stay_where_they_are(model, machine):
    store, remote = machine("a")
    with TieredCache(model, store, method=Krul(), conversation="alice") as cache:
        model.generate(IDS, past_key_values=cache, do_sample=False, max_new_tokens=8)
    store.flush()
    assert store.stats.segments
    assert remote.objects == {}


def test_methods_use_what_the_remote_brings(model, machine):
    method = ContiguousKV(budget=0.5, reorder=False)
    first, _ = machine("a", policy=method.policy)
    first.precompute(model, PREFIX[0], method=method, progress=False)
    first.flush()
    second, _ = machine("b", policy=method.policy)
    cache = TieredCache(model, second, method=method, record=False)
    with torch.no_grad():
        logits = model(input_ids=IDS, past_key_values=cache, logits_to_keep=1).logits
    assert cache.stats.tokens_attended < cache.stats.tokens_restored == 192
    reference_cache = TieredCache(model, first, method=method, record=False)
    with torch.no_grad():
        assert torch.equal(logits, model(input_ids=IDS, past_key_values=reference_cache, logits_to_keep=1).logits)


def test_lookup_and_warm_bring_a_prompt(model, machine):
    shared(model, machine("a")[0])
    store, remote = machine("b")
    assert store.warm(model, IDS, progress=False).stored == 192
    before = remote.calls.total()
    assert answer(model, store)[1] == 192
    assert remote.calls.total() == before


# --- tenants


def test_tenants_with_other_keys_or_salts_share_nothing(model, machine):
    tenants = [{"key": bytes(32)}, {"key": b"1" * 32}, {"salt": "a"}, {"salt": "b"}, {}]
    for number, options in enumerate(tenants):
        store, _ = machine(f"a{number}", **options)
        assert answer(model, store)[1] == 0
        store.flush()
    for number, options in enumerate(tenants):
        store, remote = machine(f"b{number}", **options)
        logits, tokens_restored = answer(model, store)
        assert tokens_restored == 192
        assert torch.equal(logits, expected(model, 192))
    assert len(remote.segments()) == len(tenants)


def test_with_a_key_the_remote_sees_neither_kv_nor_tokens(model, machine):
    plain, other_remote = machine("plain", place="other")
    shared(model, plain)
    secret, remote = machine("a", key=bytes(32))
    shared(model, secret)
    (clear,), (sealed,) = ([r.objects[name][1] for name in r.segments()] for r in (other_remote, remote))
    assert not set(other_remote.entries()) & set(remote.entries())
    step = 64
    pieces = {clear[at : at + step] for at in range(8192, len(clear) - step, step)} - {bytes(step)}
    assert not any(piece in sealed for piece in list(pieces)[:2000])


def test_planted_data_of_others_is_not_served(model, machine):
    """Who can write to the remote, but has not the key, cannot make a holder of the key use data."""
    owner, remote = machine("a", key=bytes(32))
    shared(model, owner)
    plain, other_remote = machine("b", place="other")
    shared(model, plain)
    (segment,) = remote.segments()
    remote.objects[segment] = other_remote.objects[other_remote.segments()[0]]
    for entry in remote.entries():
        remote.objects[entry] = other_remote.objects[other_remote.entries()[0]]
    reader, _ = machine("c", key=bytes(32))
    logits, tokens_restored = answer(model, reader)
    assert tokens_restored == 0
    assert torch.equal(logits, model(input_ids=IDS, logits_to_keep=1).logits)


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"remote": "teleport://x"}, "unknown backend 'teleport'"),
        ({"remote": "folder"}, "must be an address"),
        ({"remote": 5}, "must be an address"),
        ({"remote": "memory://x", "remote_write": "sometimes"}, "unknown remote_write 'sometimes'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        KVStore(tmp_path / "store", **arguments)
    assert not (tmp_path / "store").exists()


def test_settings_name_the_remote(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TIERED_CACHE_REMOTE", f"file://{tmp_path}/shared")
    monkeypatch.setenv("HF_TIERED_CACHE_REMOTE_WRITE", "always")
    with KVStore(tmp_path / "a") as store:
        shared(model, store)
        assert f"remote file://{tmp_path}/shared" in repr(store)
    assert len(list((tmp_path / "shared" / "segments").glob(f"*{SEGMENT_SUFFIX}"))) == 1


def test_clients_are_imported_when_they_are_used():
    code = "import sys, hf_tiered_cache; print([m for m in ('obstore', 'redis', 'mooncake') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("address", "extra"), [("s3://bucket", "remote"), ("redis://host", "redis"), ("mooncake://host", "mooncake")]
)
def test_a_missing_client_is_named(address, extra, tmp_path, monkeypatch):
    for name, module in (("obstore", "object_store"), ("redis", "redis"), ("mooncake.store", "mooncake")):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"hf_tiered_cache.store.backends.{module}", raising=False)
    with pytest.raises(ConfigError, match=rf"hf-tiered-cache\[{extra}\]"):
        KVStore(tmp_path / "store", remote=address)


def test_an_address_with_a_fragment_is_refused(tmp_path):
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"contains '#'; write"):  # another prefix than is meant
        KVStore(tmp_path, remote="redis://host/0/team#1")


@pytest.mark.parametrize(
    "address",
    [
        "redis://user:hunter2@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=hunter2",
        "rediss://:hunter2@127.0.0.1:1",
        "s3://key:hunter2@bucket/prefix",
        "az://account/container?sig=hunter2",
        "mooncake://user:hunter2@127.0.0.1:1",
        "teleport://user:hunter2@host",
        "redis://user:hunter2@host:port",
        "redis://user:hunter2@[host",
        "redis://:hunter2/x@127.0.0.1:1/0",
        "redis://:hunter2#x@127.0.0.1:1/0",
        "redis://127.0.0.1:1/hunter2@127.0.0.1:1",
        "s3://key:1/hunter2@bucket/prefix",
        "mooncake://127.0.0.1:1/hunter2@127.0.0.1",
    ],
)
def test_passwords_are_shown_nowhere(model, tmp_path, address, caplog, capfd):
    """In no message, log or file, though the remote cannot be reached."""
    try:
        store = KVStore(tmp_path / "store", remote=address)
    except ConfigError as error:
        text = repr(error) + str(error.__cause__)
    else:
        with store:
            answer(model, store)
            store.flush()
            text = repr(store) + str(store.stats) + repr(store.stats.as_dict())
    assert "hunter2" not in text + caplog.text + "".join(capfd.readouterr())
    assert not any(b"hunter2" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    config = CliRunner().invoke(app, ["config"], env={"HF_TIERED_CACHE_REMOTE": address})
    assert "hunter2" not in config.output


class _Counted(MemoryBackend):
    """Remote with a thread, which ends when the remote is closed."""

    opened: ClassVar[list[_Counted]] = []

    def __init__(self, address):
        super().__init__()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.ended.wait)
        self.thread.start()
        _Counted.opened.append(self)

    def close(self):
        super().close()
        self.ended.set()
        self.thread.join()


@pytest.mark.parametrize("fault", ["backend", "folder", "engine", "tiers", "key"])
def test_a_remote_is_closed_if_its_store_cannot_be_opened(model, tmp_path, monkeypatch, fault):
    monkeypatch.setitem(BACKENDS._parts, "counted", _Counted)
    monkeypatch.setattr(_Counted, "opened", [])
    options = {"path": tmp_path / "store"}
    if fault == "backend":
        options = {"backend": object()}
    elif fault == "folder":
        options["path"].write_text("")
    elif fault == "engine":
        options["engine"] = "none"
    elif fault == "tiers":
        monkeypatch.setattr("hf_tiered_cache.kvstore.Residency", Mock(side_effect=StoreError("no memory")))
    else:
        with KVStore(options["path"], key=bytes(32)) as store:
            answer(model, store)
        options["key"] = b"1" * 32
    try:
        with pytest.raises((ConfigError, StoreError)):
            KVStore(**options, remote="counted://there")
        (remote,) = _Counted.opened
        assert remote.is_closed and not remote.thread.is_alive()
    finally:
        for remote in _Counted.opened:
            remote.close()
    if fault == "backend":
        with closing(MemoryBackend()) as remote:  # it is its owner's
            with pytest.raises(ConfigError):
                KVStore(**options, remote=remote)
            assert not remote.is_closed
