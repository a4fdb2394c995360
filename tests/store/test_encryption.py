"""Encryption at rest: the same answers; without the key nothing to be read, and nothing to be planted."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import shutil
import sqlite3
import struct
import subprocess
import sys
import traceback
from pathlib import Path

import fake_kvikio
import processes
import pytest
import torch
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_like_reference
from segments import hashes, open_store, read_back, read_file, segment, without_catalogue
from test_forged import ODD, places
from test_relayout import geometries
from thorough import pairs

from eval.baselines import H2O, AttentionStore
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError, StoreError
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Exact, Impress
from hf_tiered_cache.store.catalogue import Catalogue
from hf_tiered_cache.store.cipher import StoreCipher, cipher_of, read_key_file
from hf_tiered_cache.store.container import TAG_BYTES, xxh3
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.format import HASH_BYTES, HEADER_BYTES, MAGIC, PREFIX, decode_header
from hf_tiered_cache.store.geometry import HASH_TOKENS
from hf_tiered_cache.store.memory import aligned_bytes

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
IDS, OTHER = prompt(100), prompt(100, seed=9)
GREEDY = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}


def fill(root, model, ids=(IDS[0], OTHER[0]), **options):
    with KVStore(root, **options) as store:
        store.precompute(model, list(ids), progress=False)


@pytest.fixture
def root(tmp_path, model):
    """Create an encrypted store with two prompts of 96 whole tokens each."""
    fill(tmp_path / "store", model, key=KEY)
    return tmp_path / "store"


def files(root):
    return sorted((root / "segments").glob("*.kv"))


def ask(model, store, ids=IDS, **options):
    """Generate, compare the logits with a DynamicCache's of the same passes, and return the stats."""
    cache = TieredCache(model, store, **options)
    # recomputed tails come from passes of another shape
    assert_like_reference(model, cache, ids, ids, GREEDY, atol=1e-5)
    return cache.stats


# --- keys


@pytest.mark.parametrize(
    "key",
    [
        KEY,
        bytearray(KEY),
        KEY.hex(),
        KEY.hex().upper(),
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",
    ],
)
def test_one_key_in_every_form(key):
    assert cipher_of(key).key_id == StoreCipher(KEY).key_id != StoreCipher(OTHER_KEY).key_id


def test_base64_of_either_alphabet():
    key = b"\xfb\xff" * 16
    standard, urlsafe = base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode()
    assert standard != urlsafe
    assert StoreCipher(standard).key_id == StoreCipher(urlsafe).key_id == StoreCipher(key).key_id


@pytest.mark.parametrize("key", [b"", "", b"short", "short", KEY + b"x", KEY.hex()[:-1], "ü" * 43, 7, KEY * 2])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path, key):
    with pytest.raises(ConfigError, match="32 secret bytes") as raised:
        KVStore(tmp_path / "store", key=key)
    assert "short" not in str(raised.value)
    assert not (tmp_path / "store").exists()


def test_without_the_package_it_is_said_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.kdf.hkdf", None)
    with pytest.raises(ConfigError, match=r"pip install 'hf-tiered-cache\[encryption\]'"):
        KVStore(tmp_path, key=KEY)
    KVStore(tmp_path).close()


def test_a_plain_store_does_not_import_the_package(tmp_path):
    code = (
        "import sys; from hf_tiered_cache import KVStore; KVStore(sys.argv[1]).close(); "
        "assert not [name for name in sys.modules if name.startswith('cryptography')]"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr


def test_a_key_shows_nowhere(tmp_path, model, caplog):
    caplog.set_level(logging.DEBUG)
    secret = StoreCipher(KEY)
    with KVStore(tmp_path, key=KEY) as store:
        texts = [repr(store), str(store.stats), repr(store._storage.disk), repr(secret), str(ask(model, store))]
        assert "encrypted" in repr(store)
        for thing in (store, secret, store._storage.disk.cipher.guard(secret.new_seal())):
            with pytest.raises(TypeError):
                pickle.dumps(thing)
    with pytest.raises(ConfigError) as raised:
        KVStore(tmp_path, key=OTHER_KEY)
    texts += [str(raised.value), caplog.text]
    for key in (KEY, OTHER_KEY):
        assert not [text for text in texts if repr(key)[2:-1] in text or key.hex() in text]
    assert "encrypted" not in repr(KVStore(tmp_path / "plain"))


def _shown(error):
    """Return a traceback with the variables of all frames, except those of the test."""
    inside = error.__traceback__.tb_next
    return "".join(traceback.TracebackException(type(error), error, inside, capture_locals=True).format())


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "file"},
        {"key": KEY[:-1]},
        {"key": KEY.hex()[:-1]},
        {"host_memory": "much"},
        {"salt": ""},
        {"engine": "none"},
        {"key": OTHER_KEY},
    ],
    ids=str,
)
def test_no_traceback_with_variables_shows_a_key_or_a_salt(tmp_path, wrong):
    (tmp_path / "file").write_text("")
    KVStore(tmp_path / "store", key=KEY).close()
    with KVStore(tmp_path / "store", key=KEY) as store:
        store.precompute(build("llama"), prompt(32), progress=False)
    arguments = {"path": "store", "key": KEY, "salt": "pepper"} | wrong
    arguments["path"] = tmp_path / arguments["path"]
    with pytest.raises((ConfigError, StoreError)) as raised:
        KVStore(**arguments)
    text = _shown(raised.value)
    assert "kvstore.py" in text
    chain_secret = StoreCipher(KEY).chain_secret("pepper")
    for secret in (KEY[:-1], OTHER_KEY[:-1], chain_secret):
        assert repr(secret)[2:-1] not in text
        assert secret.hex() not in text
    assert "pepper" not in text


def test_no_traceback_with_variables_shows_what_a_key_file_holds(tmp_path):
    (tmp_path / "key").write_text(KEY.hex() + "zz")
    with pytest.raises(ConfigError) as raised:
        read_key_file(tmp_path / "key")
    assert KEY.hex() not in _shown(raised.value)


def test_a_store_that_failed_to_open_has_a_repr():
    assert repr(KVStore.__new__(KVStore)) == "KVStore(not open)"


def test_key_files(tmp_path):
    path = tmp_path / "key"
    for data in (KEY, KEY.hex().encode() + b"\n", b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n"):
        path.write_bytes(data)
        assert read_key_file(path) == KEY
    path.write_text("not much of a secret")
    with pytest.raises(ConfigError, match="does not contain a key") as raised:
        read_key_file(path)
    assert "much" not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="does not contain a key"):
        read_key_file(Path("/dev/zero"))


# --- the same answers


@pytest.mark.parametrize(("memory", "verify"), pairs([0, "64KiB", "1GiB"], [True, False]))
def test_what_is_stored_comes_back_exactly(tmp_path, model, memory, verify):
    with KVStore(tmp_path, key=KEY, host_memory=memory, verify=verify) as store:
        assert ask(model, store).tokens_restored == 0
        store.flush()
        for _ in range(2):  # from the disk or memory, and once more
            assert ask(model, store, record=False).tokens_restored == 96
    with KVStore(tmp_path, key=KEY.hex(), host_memory=memory, verify=verify) as store:
        stats = ask(model, store)
        assert (stats.tokens_restored, stats.reason) == (96, "")
        assert stats.disk.blocks > 0
        assert store.verify().ok
        assert (store.stats.encrypted_segments, store.stats.segments) == (1, 1)


def test_blocks_in_memory_are_those_of_the_file(tmp_path, model):
    """What the writer puts into memory is found under the name that the reader of the file gives it."""
    with KVStore(tmp_path, key=KEY) as store:
        ask(model, store)
        store.flush()
        stats = ask(model, store, record=False)
        assert stats.host.blocks > 0
        assert stats.disk.blocks == 0


ANOTHER_PROCESS = f"""
import sys, torch
sys.path = {sys.path!r}
from families import build
from test_encryption import IDS, KEY, ask
from hf_tiered_cache import KVStore
with KVStore(sys.argv[1], key=KEY) as store:
    print(ask(build("llama"), store).tokens_restored)
"""


def test_another_process_restores_it(root):
    process = processes.run(
        [sys.executable, "-c", ANOTHER_PROCESS, str(root)], capture_output=True, text=True, timeout=240
    )
    assert process.stdout.strip() == "96", process.stderr


@pytest.mark.parametrize(
    "method",
    [
        Exact(),
        AttentionStore(),
        ContiguousKV(budget=1, period=2, identify="index"),
        ContiguousKV(budget=0.25, period=2, solo_layers=0, identify="keys"),
        Impress(budget=0.25, probe_heads=2, chunk_tokens=16),
        H2O(budget=0.25),
    ],
    ids=lambda method: f"{type(method).__name__} {getattr(method, 'budget', '')}",
)
def test_every_method_gives_what_it_gives_without_a_key(tmp_path, model, method):
    logits = []
    for options in ({}, {"key": KEY}):
        path = tmp_path / str(len(options))
        with KVStore(path, **options) as store:
            store.precompute(model, [IDS[0]], method=method, progress=False)
        with KVStore(path, host_memory="64KiB", **options) as store, torch.no_grad():
            cache = TieredCache(model, store, method=method, record=False)
            logits.append(model(input_ids=IDS, past_key_values=cache, logits_to_keep=1).logits)
            assert cache.stats.tokens_restored == 96
            assert cache.stats.disk.blocks > 0
    assert torch.equal(*logits)


def test_passages_come_back_too(tmp_path, model):
    method, logits = CacheTune(recompute=0.25), []
    ids = torch.cat([prompt(8, seed=4)[0], OTHER[0, :96], IDS[0, :96], prompt(8, seed=5)[0]]).unsqueeze(0)
    for options in ({}, {"key": KEY}):
        with KVStore(tmp_path / str(len(options)), **options) as store, torch.no_grad():
            store.precompute(model, [IDS[0, :96], OTHER[0, :96]], passages=True, method=method, progress=False)
            store._storage.residency.clear()
            cache = TieredCache(model, store, method=method, record=False)
            logits.append(model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits)
            assert cache.stats.tokens_restored > 0
    assert torch.equal(*logits)


def test_segments_are_laid_out_anew_under_another_key_of_their_own(root, model):
    with KVStore(root, key=KEY) as store:
        before = {store._storage.disk.reader(row.id).header.seal for row in store.segments()}
        assert store.relayout(ContiguousKV(period=2), progress=False) == 2
        after = {store._storage.disk.reader(row.id).header.seal for row in store.segments()}
        assert len(before | after) == 4
        assert {seal.key_id for seal in after} == {StoreCipher(KEY).key_id}
        store._storage.residency.clear()
        assert ask(model, store).tokens_restored == 96
        assert store.verify().ok


@given(st.data())
def test_any_blocks_of_any_geometry_are_read_as_they_were_written(tmp_path_factory, data):
    """This covers single blocks, runs, and whole KV cache groups."""
    store = open_store(tmp_path_factory.mktemp("store"), cipher=StoreCipher(KEY))
    header, chain, block_groups = segment(hashes(4), geometry=data.draw(geometries))
    assert store.publish(header, chain, block_groups)
    reader = store.reader(header.id)
    for _ in range(4):
        block_group = data.draw(st.integers(0, len(block_groups) - 1))
        chunks = len(block_groups[block_group])
        first = data.draw(st.integers(0, chunks - 1))
        count = data.draw(st.integers(1, chunks - first))
        memory = aligned_bytes(count * reader.shape.block_groups[block_group].block_bytes).view(count, -1)
        reader.read(block_group, [(first, memory)]).result()
        assert torch.equal(memory, block_groups[block_group][first : first + count])
    for read_blocks, block_group in zip(read_back(store, header.id), block_groups, strict=True):
        assert torch.equal(read_blocks, block_group)
    store.close()


def test_large_block_groups_are_encrypted_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_tiered_cache.store.cipher._PIECE_BYTES", 3 * 4096)
    store = open_store(tmp_path, cipher=StoreCipher(KEY))
    header, chain, block_groups = segment(hashes(7))
    assert store.publish(header, chain, block_groups)
    for read_blocks, block_group in zip(read_back(store, header.id), block_groups, strict=True):
        assert torch.equal(read_blocks, block_group)
    store.close()


def test_devices_are_filled_by_way_of_the_host(tmp_path, monkeypatch):
    """The CPU decrypts, so GPUDirect Storage has nothing to fill."""
    fake_kvikio.install(monkeypatch, gds=True)
    with (
        KVStore(tmp_path / "plain", engine="kvikio") as plain,
        KVStore(tmp_path / "key", engine="kvikio", key=KEY) as store,
    ):
        assert plain._storage.residency._direct
        assert not store._storage.residency._direct


# --- nothing to be read


def test_files_hold_no_block_and_repeat_nothing(tmp_path, model):
    """Two files of the same KV have no 16 bytes in common, and no row of a block."""
    header, chain, block_groups = segment(hashes(6), fill=7)
    contents = []
    for number in range(2):
        store = open_store(tmp_path / str(number), cipher=StoreCipher(KEY))
        assert store.publish(header, chain, block_groups)
        data = store.path(header.id).read_bytes()[read_file(store.path(header.id)).header.blocks.offset :]
        pieces = {data[at : at + 16] for at in range(0, len(data), 16)}
        assert len(pieces) == len(data) // 16  # blocks are alike, and so are the bytes in them
        assert bytes([7]) * 16 not in data
        contents.append(pieces)
        store.close()
    assert contents[0].isdisjoint(contents[1])


def recovered(root, model, cipher):
    """Recover the tokens from layer 0's values with the model, over all segments in order."""
    inner = model.model
    with torch.no_grad():
        normed = inner.layers[0].input_layernorm(inner.embed_tokens.weight)
        table = inner.layers[0].self_attn.v_proj(normed)  # [vocabulary, heads * dim]
    engine, token_ids = PosixEngine(), []
    for path in files(root):
        head = read_file(path, cipher)
        shape = head.header.shape
        block_group = shape.block_groups[0]
        data = path.read_bytes()[head.header.blocks.offset :][: shape.chunks_in(block_group) * block_group.block_bytes]
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, block_group.block_bytes)
        if cipher is not None:
            assert head.guard.open(0, blocks, head.digests[0]) is None
        (part,) = [part for part in block_group.parts if part.layer == 0 and part.tensor == "value"]
        values = shape.unpack(blocks, block_group, part).transpose(0, 1).flatten(1)  # [tokens, heads * dim]
        token_ids.append(torch.cdist(values.nan_to_num(), table).argmin(1))
    engine.close()
    return token_ids


def test_who_has_the_model_reads_tokens_out_of_a_salted_store_but_not_out_of_an_encrypted_one(tmp_path, model):
    fill(tmp_path / "salted", model, (IDS[0],), salt="a long secret of letters")
    fill(tmp_path / "encrypted", model, (IDS[0],), key=KEY)
    (token_ids,) = recovered(tmp_path / "salted", model, None)
    assert torch.equal(token_ids, IDS[0, :96])
    (token_ids,) = recovered(tmp_path / "encrypted", model, StoreCipher(KEY))
    assert torch.equal(token_ids, IDS[0, :96])  # so the key is what it takes
    (token_ids,) = recovered(tmp_path / "encrypted", model, None)
    assert (token_ids == IDS[0, :96]).sum() < 8


def test_prefix_hashes_say_nothing_without_the_key_and_both_secrets_count(tmp_path):
    chains = {}
    for name, options in {
        "none": {},
        "salt": {"salt": "s"},
        "key": {"key": KEY},
        "other key": {"key": OTHER_KEY},
        "both": {"key": KEY, "salt": "s"},
        "other salt": {"key": KEY, "salt": "t"},
    }.items():
        with KVStore(tmp_path / name, **options) as store:
            chains[name] = tuple(store._storage.hasher("model", "exact", "").hashes(IDS[0].numpy()))
    assert len(set(chains.values())) == len(chains)
    assert set(map(len, chains.values())) == {6}


# --- of another key, or of none


def test_another_key_is_refused_at_the_door(root):
    with pytest.raises(ConfigError, match="encrypted with another key") as raised:
        KVStore(root, key=OTHER_KEY)
    assert StoreCipher(KEY).key_id in str(raised.value)
    assert len(files(root)) == 2
    shutil.copytree(root, root.parent / "no catalogue", ignore=shutil.ignore_patterns("catalogue*"))
    with pytest.raises(ConfigError, match="encrypted with another key"):
        KVStore(root.parent / "no catalogue", key=OTHER_KEY)


def test_a_store_without_the_key_leaves_files_alone(root, model, caplog):
    before = {path: path.read_bytes() for path in files(root)}
    for _ in range(2):
        with KVStore(root) as store:
            stats = ask(model, store, record=False)
            assert (stats.tokens_restored, stats.reason) == (
                0,
                "the stored KV of this model is encrypted; open the store with its key",
            )
            row = store.segments()[0]
            assert store._storage.disk.found([row])[0] is None
            assert store._storage.disk.reader(row.id) is None
            report = store.verify(repair=True)
            assert (report.segments, report.unread, report.bad) == (0, 2, {})
            assert store.gc().damaged == 0
            assert store.relayout(ContiguousKV(), progress=False) == 0
            counts = store.stats
            assert (counts.other_key_files, counts.verification_failures, counts.segments) == (2 + 2, 0, 2)
    assert {path: path.read_bytes() for path in files(root)} == before
    assert "without a key" in caplog.text


def test_storing_without_the_key_beside_encrypted_segments_is_said(root, model, caplog):
    with KVStore(root) as store:
        ask(model, store)
    assert "new KV is stored without encryption" in caplog.text
    with KVStore(root) as store:
        assert ask(model, store, record=False).tokens_restored == 96
        assert (store.stats.segments, store.stats.encrypted_segments) == (3, 2)


def test_what_was_stored_without_a_key_is_not_used_with_one(tmp_path, model):
    fill(tmp_path, model)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with KVStore(tmp_path, key=KEY) as store:
        stats = ask(model, store)
        assert stats.tokens_restored == 0
        assert "is not encrypted" in stats.reason
        for row in store.segments():
            assert store._storage.disk.found([row])[0] is None or row.key
        assert store.stats.other_key_files == 2
        store.flush()
        assert ask(model, store, record=False).tokens_restored == 96
        report = store.verify(repair=True)
        assert (report.segments, report.unread, report.bad) == (1, 2, {})
    assert {path: path.read_bytes() for path in before} == before


def test_two_keys_in_one_folder(root, model):
    with KVStore(root, key=KEY) as first:
        first._storage.disk._keys.clear()
    shutil.copytree(root, root.parent / "both")
    with KVStore(root.parent / "mine", key=OTHER_KEY) as other_store:
        ask(model, other_store)
    for path in files(root.parent / "mine"):
        shutil.copy(path, root.parent / "both" / "segments")
    for key in (KEY, OTHER_KEY):
        with KVStore(root.parent / "both", key=key) as store:
            assert ask(model, store, record=False).tokens_restored == 96
            assert store.verify().ok
    assert len(files(root.parent / "both")) == 3


# --- damage


@pytest.mark.parametrize("verify", [True, False])
def test_what_stands_before_the_damage_is_served(root, model, verify):
    with KVStore(root, key=KEY, verify=verify) as store:
        (row,) = [row for row in store.segments() if row.first == chain_of(store, model, IDS)[0]]
        path, reader = store._storage.disk.path(row.id), store._storage.disk.reader(row.id)
        block_group = reader.shape.block_groups[0]
        offset = reader.header.blocks.offset + reader.shape.group_offsets[0] + 3 * block_group.block_bytes + 100
        flip(path, offset)
        stats = ask(model, store, record=False)
        assert (stats.tokens_restored, stats.details.verification_failures) == (3 * HASH_TOKENS, 1)
        assert path.exists()
        assert list(store.verify().bad) == [row.id]


def chain_of(store, model, ids):
    cache = TieredCache(model, store, record=False)
    cache.look_up(ids)
    return cache._executor.sequence.history.hasher.hashes(ids[0].numpy())


def flip(path, offset, bits=16):
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


# --- forgeries


def reseal(data, change=lambda page: None):
    """Change the header in a file's bytes, and correct every checksum that needs no key."""
    _, version, length, _ = PREFIX.unpack_from(data)
    page = json.loads(data[PREFIX.size : PREFIX.size + length])
    change(page)
    for name, section in page["sections"].items():
        if name != "blocks":
            section[2] = xxh3(bytes(data[section[0] : section[0] + section[1]]))
    text = json.dumps(page, separators=(",", ":")).encode()
    tag = bytes(data[HEADER_BYTES - TAG_BYTES : HEADER_BYTES])
    header = bytearray(PREFIX.pack(MAGIC, version, len(text), 0) + text).ljust(HEADER_BYTES, b"\0")
    header[HEADER_BYTES - TAG_BYTES :] = tag
    struct.pack_into("<Q", header, PREFIX.size - 8, xxh3(bytes(header)))
    return bytes(header) + bytes(data[HEADER_BYTES:])


def section(data, name):
    header, _ = decode_header(bytes(data[:HEADER_BYTES]))
    extent = getattr(header, name)
    return slice(extent.offset, extent.offset + extent.nbytes)


def block_of(data, number):
    """Return the offsets of a block and of its digest in the bytes of a file."""
    header, _ = decode_header(bytes(data[:HEADER_BYTES]))
    shape, number = header.shape, number % header.shape.first_blocks[-1]
    block_group = shape.block_groups[number // shape.chunks_in(shape.block_groups[0])]  # all hold as many
    start = header.blocks.offset + shape.group_offsets[block_group.index]
    start += number % shape.chunks_in(block_group) * block_group.block_bytes
    digest = header.digests.offset + number * 16
    return slice(start, start + block_group.block_bytes), slice(digest, digest + 16)


IDENTITY = ("id", "parent", "position", "provenance", "fingerprint")


@pytest.fixture(scope="module")
def forgery(tmp_path_factory, model):
    """Create an encrypted store, one under another key, and a plain one, of the same prompts in another model's KV."""
    base = tmp_path_factory.mktemp("forgery")
    stranger = build("llama")
    with torch.no_grad():
        for weight in stranger.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    fill(base / "ours", model, key=KEY)
    fill(base / "elsewhere", stranger, key=OTHER_KEY)
    fill(base / "plain", stranger)
    expected = {}
    for name, ids in (("first", IDS), ("second", OTHER)):
        expected[name] = model.generate(ids, past_key_values=None, **GREEDY).logits
    return base, expected


def whole(data, of):
    """Give `data` the header and chain of the file `of`, with its own blocks and salt."""
    data = bytearray(data)
    data[section(data, "chain")] = of[section(of, "chain")]
    other_page = json.loads(of[PREFIX.size : PREFIX.size + PREFIX.unpack_from(of)[2]])
    return reseal(data, lambda page: page.update({name: other_page[name] for name in IDENTITY}))


def with_cipher(data, of):
    """Return a plain file that claims to be encrypted like `of`."""
    data = bytearray(data)
    other_page = json.loads(of[PREFIX.size : PREFIX.size + PREFIX.unpack_from(of)[2]])
    return reseal(data, lambda page: page.update(cipher=other_page["cipher"]))


FORGERIES = [
    "any byte",
    "any byte, checksums right",
    "any value of the header",
    "blocks swapped within",
    "blocks swapped between",
    "blocks swapped within, digests too",
    "blocks swapped between, digests too",
    "tables of another",
    "head of another",
    "the other under this name",
    "the other called this",
    "salt of another",
    "another key's",
    "another key's, called ours",
    "a plain one",
    "a plain one, called encrypted",
    "the other's row",
    "a row's chain",
]


def forge(root, base, kind, draw):
    """Apply one forgery of an attacker who may write everything, and knows everything but the key."""
    paths = files(root)
    number = draw(st.integers(0, 1))
    path, other_path = paths[number], paths[1 - number]
    a, b = bytearray(path.read_bytes()), bytearray(other_path.read_bytes())
    if kind.startswith("any byte"):
        checked = "right" in kind
        at = draw(st.integers(HEADER_BYTES if checked else 0, len(a) - 1))
        a[at] ^= draw(st.integers(1, 255))
        path.write_bytes(reseal(a) if checked else a)
    elif kind == "any value of the header":

        def change(page):
            way = draw(st.sampled_from([way for way in places(page) if way[0] not in ("sections", "layout")]))
            other_holder = json.loads(b[PREFIX.size : PREFIX.size + PREFIX.unpack_from(b)[2]])
            holder = page
            for name in way[:-1]:
                holder, other_holder = holder[name], other_holder[name]
            holder[way[-1]] = draw(st.sampled_from([other_holder[way[-1]], *ODD]))

        path.write_bytes(reseal(a, change))
    elif kind.startswith("blocks swapped"):
        target = a if "within" in kind else b
        (first, first_digest), (second, second_digest) = (
            block_of(a, draw(st.integers(0, 99))),
            block_of(target, draw(st.integers(0, 99))),
        )
        if a[first] == target[second] or len(a[first]) != len(target[second]):
            return
        a[first], target[second] = target[second], a[first]
        if "digests" in kind:
            a[first_digest], target[second_digest] = target[second_digest], a[first_digest]
        path.write_bytes(reseal(a))
        other_path.write_bytes(reseal(b))
    elif kind == "tables of another":
        name = draw(st.sampled_from(["chain", "digests"]))
        a[section(a, name)] = b[section(b, name)]
        path.write_bytes(reseal(a))
    elif kind == "head of another":
        start = section(a, "blocks").start
        path.write_bytes(a[:start] + b[start:])
    elif kind == "the other under this name":
        path.write_bytes(b)
    elif kind == "the other called this":
        path.write_bytes(whole(b, a))
    elif kind == "salt of another":
        other_page = json.loads(b[PREFIX.size : PREFIX.size + PREFIX.unpack_from(b)[2]])
        path.write_bytes(reseal(a, lambda page: page.update(cipher=other_page["cipher"])))
    elif kind in ("the other's row", "a row's chain"):
        with sqlite3.connect(root / "catalogue.sqlite") as db:
            columns = "first, chain, position, tokens, provenance, fingerprint, key, usable_links"
            if kind == "a row's chain":
                columns = "first, chain"
            query = f"UPDATE segments SET ({columns}) = (SELECT {columns} FROM segments WHERE id = ?) WHERE id = ?"
            db.execute(query, (other_path.stem, path.stem))
            if draw(st.booleans()):
                db.execute("DELETE FROM segments WHERE id = ?", (other_path.stem,))
                other_path.unlink()
        db.close()
        return
    else:
        foreign = files(base / ("plain" if "plain" in kind else "elsewhere"))[draw(st.integers(0, 1))]
        data = foreign.read_bytes()
        if kind.endswith("called encrypted") or kind.endswith("called ours"):
            data = with_cipher(data, a)
        path.write_bytes(whole(data, a))
    if draw(st.booleans()):
        without_catalogue(root)


@pytest.mark.parametrize("kind", FORGERIES)
@settings(max_examples=settings.default.max_examples // 12)
@given(data=st.data())
def test_no_forgery_is_served(tmp_path_factory, model, forgery, kind, data):
    base, expected = forgery
    root = tmp_path_factory.mktemp("forged") / "store"
    shutil.copytree(base / "ours", root)
    forge(root, base, kind, data.draw)
    memory = data.draw(st.sampled_from([0, "64KiB", "64MiB"]))
    verify = data.draw(st.booleans())
    for _ in range(2):
        try:
            store = KVStore(root, key=KEY, host_memory=memory, verify=verify)
        except ConfigError:
            assert kind.startswith("any value")  # of the id of the key
            break
        with store:
            for name, ids in (("first", IDS), ("second", OTHER)):
                cache = TieredCache(model, store, record=False)
                output = model.generate(ids, past_key_values=cache, **GREEDY)
                for x, y in zip(output.logits, expected[name], strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=1e-4)
    shutil.rmtree(root.parent)


def test_a_row_that_says_what_its_file_does_not_is_set_right(root, model):
    """This includes stores without a key, since the catalogue is not trusted."""
    fill(root.parent / "plain", model)
    for path, options in ((root, {"key": KEY}), (root.parent / "plain", {})):
        with sqlite3.connect(path / "catalogue.sqlite") as db:
            names = [row[0] for row in db.execute("SELECT id FROM segments ORDER BY number")]  # IDS, OTHER
            first, second = (path / "segments" / f"{name}.kv" for name in names)
            chain = db.execute("SELECT chain FROM segments WHERE id = ?", (second.stem,)).fetchone()[0]
            db.execute("UPDATE segments SET chain = ?, first = ? WHERE id = ?", (chain, chain[:HASH_BYTES], first.stem))
            db.execute("DELETE FROM segments WHERE id = ?", (second.stem,))
        db.close()
        second.unlink()
        with KVStore(path, **options) as store:
            for tokens in (0, 96):
                assert sum(ask(model, store, ids, record=False).tokens_restored for ids in (IDS, OTHER)) == tokens
            assert store.stats.catalogue_errors == 1
            assert first.exists()


# --- the command line


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "kv.key"
    path.write_text(KEY.hex() + "\n")
    return path


def test_what_reads_no_kv_needs_no_key(root, run, key_file):
    status, out, _ = run("ls", root)
    assert (status, out.count("encrypted")) == (0, 2)
    assert [row["encrypted"] for row in json.loads(run("ls", root, "--json")[1])] == [True, True]
    assert json.loads(run("stat", root, "--json")[1])["encrypted"] == 2
    name = files(root)[0].stem
    assert f"aes-256-gcm, key {StoreCipher(KEY).key_id}" in run("stat", root, name[:12])[1]
    assert run("gc", root)[0] == 0
    assert run("rm", root, name[:12])[0] == 0
    assert len(files(root)) == 1


def test_verify_wants_the_key(root, run, key_file, monkeypatch):
    status, out, err = run("verify", root, "--json")
    assert (status, json.loads(out)["unread"]) == (2, 2)
    assert "2 segments could not be checked: no --key-file was given" in err
    status, out, _ = run("verify", root, "--key-file", key_file)
    assert (status, "2 segments" in out, "no damage found" in out) == (0, True, True)
    monkeypatch.setenv("HF_TIERED_CACHE_KEY_FILE", str(key_file))
    assert run("verify", root)[0] == 0
    key_file.write_text(OTHER_KEY.hex())
    status, _, err = run("verify", root)
    assert (status, "another key" in err) == (2, True)
    key_file.write_text("x")
    assert "does not contain a key" in run("verify", root)[2]
    flip(files(root)[0], -1 % files(root)[0].stat().st_size)
    monkeypatch.delenv("HF_TIERED_CACHE_KEY_FILE")
    key_file.write_text(KEY.hex())
    assert run("verify", root, "--key-file", key_file)[0] == 1


def test_commands_that_store_take_the_key(run, tmp_path, model, key_file, monkeypatch):
    """Serving and calibrating encrypt what they store."""
    import hf_tiered_cache.integrations.serve as serving

    model.save_pretrained(tmp_path / "model")
    flags = []
    monkeypatch.setattr(serving, "serve", lambda name, store, method, **options: flags.append(store.encrypted))
    common = ("--store", tmp_path / "served", "--key-file", key_file)
    assert run("serve", tmp_path / "model", *common)[0] == 0
    assert flags == [True]

    keys = set()
    add = Catalogue.add

    def noting(self, rows, *more):
        keys.update(row.key for row, _ in rows)
        return add(self, rows, *more)

    monkeypatch.setattr(Catalogue, "add", noting)
    arguments = ("--passages", 2, "--tokens", 32, "--repeats", 1, "--json", "--key-file", key_file)
    status, _, err = run("calibrate", tmp_path / "calibrated", "--model", tmp_path / "model", *arguments)
    assert status == 0, err
    assert keys == {StoreCipher(KEY).key_id}
