"""Documents: passages under labels, listed, replaced and deleted, whole whoever is killed when."""

from __future__ import annotations

import copy
import errno
import json
import sys
from unittest.mock import Mock

import processes
import pytest
import torch
from families import build, prompt
from memory_backend import MemoryBackend
from test_passages import BOS, PASSAGES, PLACES, PROMPT, QUESTION, ask, epic, join, tune
from thorough import amount, pairs

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import ConfigError, StoreError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.operations import contents, passages
from hf_tiered_cache.store.documents import DocumentRecord
from hf_tiered_cache.store.geometry import Geometry

FAMILY = "qwen2"

EPIC = epic()
NEW = [prompt(tokens, seed=seed)[0] for seed, tokens in enumerate((48, 128), start=20)]


def fill(store, model, texts, labels, method=EPIC, **options):
    return store.precompute(model, texts, passages=True, method=method, labels=labels, progress=False, **options)


def lengths(store):
    """Return the lengths of the stored passages."""
    return sorted(row.tokens for row in store.segments())


def found(store, model, text):
    """Return how many tokens of a passage a prompt finds."""
    stats = ask(model, store, join(BOS, QUESTION, text, QUESTION), EPIC)[1].stats
    return sum(passage.tokens_found for passage in stats.passages)


def test_documents_are_listed_and_found_by_label(store, model):
    assert store.documents() == []
    fill(store, model, PASSAGES[:3], ["report", "minutes", "report"])
    report, minutes = store.documents("report")[0], store.documents("minutes")[0]
    assert [info.label for info in store.documents()] == ["minutes", "report"]
    assert (report.passages, report.tokens, report.tokens_there, report.evicted, report.shared) == (2, 208, 208, 0, 0)
    assert report.model["class"] == "Qwen2ForCausalLM" and report.bytes > minutes.bytes > 0
    assert len(report.segments) == 2 and store.documents("letter") == []
    assert {row.label for row in store.segments()} == {"report", "minutes"}
    json.dumps(report.as_dict())


def test_a_deleted_document_goes_with_what_is_its_own(store, model):
    fill(store, model, PASSAGES[:3], ["report", "minutes", "report"])
    assert store.remove_document("report") == 2
    assert [info.label for info in store.documents()] == ["minutes"]
    assert lengths(store) == [64] and found(store, model, PASSAGES[0]) == 0
    with pytest.raises(ConfigError, match="document 'report' does not exist"):
        store.remove_document("report")


def test_two_labels_may_have_the_same_text(store, model):
    fill(store, model, [PASSAGES[0], PASSAGES[0], PASSAGES[1]], ["a", "b", "b"])
    assert lengths(store) == [64, 96]
    assert [info.shared for info in store.documents()] == [1, 1]
    assert store.remove_document("a") == 0
    assert found(store, model, PASSAGES[0]) == 96
    fill(store, model, [PASSAGES[0]], ["c"])
    assert fill(store, model, [PASSAGES[1]], ["b"]).removed == 0  # the other label has what goes
    assert found(store, model, PASSAGES[0]) == 96
    assert store.remove_document("c") == 1
    assert lengths(store) == [64]


def test_what_begins_another_passage_lies_in_it(store, model):
    """It is stored once, and remains while a label names it."""
    fill(store, model, [PASSAGES[0]], ["long"])
    assert fill(store, model, [PASSAGES[0][:48]], ["short"]).stored == 0
    store.remove_document("long")
    assert found(store, model, PASSAGES[0][:48]) == 48
    assert store.remove_document("short") == 1


def test_passages_that_one_segment_stores_count_once(store, model):
    fill(store, model, [PASSAGES[0]], ["long"])
    fill(store, model, [PASSAGES[0], PASSAGES[0][:48], PASSAGES[1]], ["report"] * 3)
    info = store.documents("report")[0]
    assert (info.passages, info.tokens, info.tokens_there) == (2, 160, 160)


def test_a_replaced_document_leaves_nothing_behind(store, model):
    fill(store, model, PASSAGES[:2], ["report", "report"], pin=True)
    created = store.documents()[0].created
    report = fill(store, model, [PASSAGES[1], *NEW], ["report"] * 3)
    assert (report.restored, report.stored, report.removed) == (64, 48 + 128, 1)
    assert lengths(store) == [48, 64, 128]
    (info,) = store.documents()
    assert (info.passages, info.tokens_there, info.created) == (3, 240, created)
    assert fill(store, model, [PASSAGES[1], *NEW], ["report"] * 3).stored == 0
    assert fill(store, model, [PASSAGES[3][:8]], ["report"]).removed == 3  # too short to be stored
    assert (store.documents()[0].passages, lengths(store)) == (0, [])


class Faulty(MemoryBackend):
    """Place at which some kinds of calls for segments fail."""

    def __init__(self, objects):
        super().__init__()
        self.objects, self.failing = objects, ()

    def _fail(self, kind, name):
        if kind in self.failing and name.startswith("segments/"):
            raise OSError(errno.EIO, "no answer")

    def find_object(self, name):
        self._fail("find", name)
        return super().find_object(name)

    def get_object(self, name, *args):
        self._fail("get", name)
        return super().get_object(name, *args)

    def put_object(self, name, *args, **options):
        self._fail("put", name)
        return super().put_object(name, *args, **options)


@pytest.mark.parametrize("failing", [("find",), ("get",), ("put",), ("get", "put"), ("find", "get", "put")])
@pytest.mark.parametrize("numbers", [(0, 1), (0, 3), (3,)], ids=["same", "half", "new"])
def test_a_document_stays_if_the_new_one_cannot_be_stored(model, failing, numbers, caplog):
    objects, texts = {}, [PASSAGES[number] for number in numbers]
    with KVStore(backend=Faulty(objects)) as store:
        fill(store, model, PASSAGES[:2], ["report", "report"])
        (before,) = store.documents()
    backend = Faulty(objects)
    with KVStore(backend=backend, host_memory=0) as store:
        backend.failing = failing
        report = fill(store, model, texts, ["report"] * len(texts))
        backend.failing = ()
    with KVStore(backend=Faulty(objects)) as store:
        (after,) = store.documents()
        assert after.tokens_there == before.tokens_there and after.segments == before.segments
        assert not store.gc().deleted and store.documents() == [after]
    was_stored = numbers == (0, 1) and failing == ("put",)  # so nothing was to be written
    assert report.kept == (not was_stored) and report.stored == report.removed == 0
    assert ("document 'report' was not replaced" in caplog.text) == bool(report.kept)


def test_gc_names_the_replaced_passages_that_a_killed_process_has_left(store, model, monkeypatch):
    fill(store, model, [PASSAGES[0]], ["report"])
    (old,) = store.segments()
    with monkeypatch.context() as killed:
        killed.setattr(contents, "_delete_replaced", lambda storage, records: [])
        fill(store, model, [PASSAGES[1]], ["report"])
    before = store.stats.disk.bytes
    report = store.gc(dry_run=True)
    assert (lengths(store), list(report.deleted.values())) == ([64, 96], ["its document was replaced"])
    assert store.gc().as_dict() == report.as_dict()
    assert (lengths(store), before - store.stats.disk.bytes) == ([64], report.freed_bytes)
    assert old.id in next(iter(report.deleted))


def test_gc_evicts_nothing_in_place_of_replaced_passages(root, model, monkeypatch):
    with KVStore(root) as store:
        fill(store, model, [PASSAGES[0]], ["report"])
        with monkeypatch.context() as killed:
            killed.setattr(contents, "_delete_replaced", lambda storage, records: [])
            fill(store, model, [PASSAGES[1]], ["report"])
        used_bytes = storage_of(store).disk.used_bytes()
    with KVStore(root, disk_quota=used_bytes - 1) as store:
        report = store.gc(dry_run=True)
        assert (report.evicted, list(report.deleted.values())) == (0, ["its document was replaced"])
        assert store.gc().as_dict() == report.as_dict()


def test_a_document_stays_if_there_is_no_room_for_the_new_one(root, model):
    with KVStore(root) as store:
        fill(store, model, PASSAGES[:1], ["report"])
        before = store.documents()
    with KVStore(root, disk_quota=600_000) as store:
        report = fill(store, model, [prompt(960, seed=2)[0].tolist()], ["report"])
        assert (report.kept, report.stored, report.removed) == (1, 0, 0)
        assert store.documents() == before


@pytest.mark.parametrize("labels", [["report", "report"], ["letter", "report"]], ids=["no label", "a label"])
def test_of_a_document_that_is_not_replaced_no_new_passage_is_pinned(root, model, labels):
    with KVStore(root) as store:
        fill(store, model, PASSAGES[:1], ["report"], pin=True)
        (old,) = store.pinned()
    with KVStore(root, disk_quota=600_000) as store:
        report = fill(store, model, [PASSAGES[1], prompt(960, seed=2)[0]], labels, pin=True)
        assert (report.kept, report.stored) == (1, 64)
        assert store.pinned() == {old} | {name for info in store.documents("letter") for name in info.segments}
        assert len(store.pinned()) == len(set(labels))


def test_no_passage_is_pinned_before_its_label_is_saved(store, model, monkeypatch):
    monkeypatch.setattr(passages, "enter_documents", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fill(store, model, PASSAGES[:1], ["report"], pin=True)
    assert lengths(store) == [96] and not store.pinned()


def test_a_model_that_cannot_be_identified_has_no_document(root, store, model):
    fill(store, model, PASSAGES[:1], ["report"])
    before, copied_model = store.documents(), copy.deepcopy(model)
    copied_model.model.layers[0].register_forward_hook(lambda *_: None)
    report = fill(store, copied_model, PASSAGES[1:2], ["report"])
    assert report.stored == 0 and store.documents() == before


@pytest.mark.parametrize("kind", ["documents", "calibrations"])
def test_a_file_of_another_program_in_place_of_a_record_is_said_in_one_sentence(root, model, kind):
    method = EPIC if kind == "documents" else "epic"  # with a lead text, which the store keeps
    with KVStore(root) as store:
        fill(store, model, PASSAGES[:1], ["report"])
        (record,) = (root / "documents").glob("*.json")
        path = record if kind == "documents" else root / "calibrations.json"
        path.write_text("mine")
        message = "labels cannot be saved" if kind == "documents" else "is damaged, or of another program"
        with pytest.raises(StoreError, match=message):
            fill(store, model, PASSAGES[1:2], ["report"], method)
    assert path.read_text() == "mine"


def test_another_model_has_a_document_of_its_own(store, model):
    other_model = build("llama")
    fill(store, model, [PASSAGES[0]], ["report"])
    fill(store, other_model, [PASSAGES[0]], ["report"])
    assert [info.model["class"] for info in store.documents("report")].count("LlamaForCausalLM") == 1
    assert fill(store, other_model, [PASSAGES[1]], ["report"]).removed == 1
    assert found(store, model, PASSAGES[0]) == 96
    assert store.remove_document("report") == 2 and store.documents() == []


def test_labels_that_can_be_none_are_refused(store, model):
    for labels, message in ((["a"], "one for each"), (["a", ""], "1 to 1000 characters"), ("ab", "one for each")):
        with pytest.raises(ConfigError, match=message):
            fill(store, model, PASSAGES[:2], labels)
    with pytest.raises(ConfigError, match="Unicode"):
        fill(store, model, PASSAGES[:1], ["\ud800"])
    with pytest.raises(ConfigError, match="passages=True"):
        store.precompute(model, PASSAGES[0], labels=["a"])
    assert store.segments() == []


def test_labels_outlive_catalogue_layout_and_process(root, model):
    with KVStore(root, engine="posix") as store:
        fill(store, model, PASSAGES[:2], ["a", "b"])
        assert store.relayout(Geometry(32, 3), progress=False) == 2
        before = store.documents()
        assert [info.evicted for info in before] == [0, 0]
    for path in root.glob("catalogue.sqlite*"):
        path.unlink()
    with KVStore(root, engine="posix") as store:
        assert store.documents() == before
        assert store.remove_document("a") == 1


def test_a_store_of_before_opens(root, model):
    with KVStore(root, engine="posix") as store:
        store.precompute(model, PASSAGES, passages=True, method=EPIC, progress=False)
    (root / "documents").rmdir()
    with KVStore(root, engine="posix") as store:
        assert store.documents() == [] and found(store, model, PASSAGES[0]) == 96
        assert fill(store, model, PASSAGES, list("abcd")).stored == 0
        assert len(store.documents()) == 4


def test_evicted_passages_are_said_and_come_back(store, model):
    fill(store, model, PASSAGES[:2], ["a", "a"])
    store.remove([row.id for row in store.segments() if row.tokens == 64])
    (info,) = store.documents()
    assert (info.passages, info.evicted, info.tokens, info.tokens_there) == (2, 1, 160, 96)
    assert fill(store, model, PASSAGES[:2], ["a", "a"]).stored == 64
    assert store.documents()[0].evicted == 0
    store.remove([row.id for row in store.segments()])
    assert store.gc(dry_run=True).documents == 1 and store.documents()
    assert store.gc().documents == 1 and not store.documents()


def test_damaged_and_forged_records_are_none(root, store, model):
    fill(store, model, PASSAGES[:2], ["a", "b"])
    first, second = sorted((root / "documents").iterdir())
    record = DocumentRecord.decode(first.read_bytes())
    assert DocumentRecord.decode(record.encode()) == record
    second.write_bytes(first.read_bytes())  # what it says is another's name
    assert [info.label for info in store.documents()] == [record.label]
    for text in ("", "[]", "{}", first.read_text().replace("passage", "pas"), first.read_text()[:-9], "null"):
        second.write_text(text)
        assert [info.label for info in store.documents()] == [record.label]
    second.write_text(first.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StoreError, match="format 2"):  # which may name what goes
        store.remove_document(record.label)
    assert lengths(store) == [64, 96]
    second.write_text("not ours")
    report = store.gc()
    assert (report.documents, report.unknown) == (0, [f"documents/{second.name}"])
    assert second.read_text() == "not ours"
    second.write_text("")
    assert store.gc().documents == 1 and not second.exists()


def test_what_another_process_deletes_meanwhile_is_stored_again(root, store, model, monkeypatch):
    """Its passage was found, and was another label's alone until that was deleted."""
    fill(store, model, [PASSAGES[0]], ["a"])

    def late(storage, entries, incomplete):
        with KVStore(root, engine="posix") as other_store:
            other_store.remove_document("a")
        return contents.enter_documents(storage, entries, incomplete)

    monkeypatch.setattr(passages, "enter_documents", late)
    fill(store, model, [PASSAGES[0]], ["b"], pin=True)
    assert [(info.label, info.evicted) for info in store.documents()] == [("b", 0)]
    assert store.pinned() == {row.id for row in store.segments()}
    assert found(store, model, PASSAGES[0]) == 96


def test_a_store_that_cannot_be_written_says_so(root, store, model, monkeypatch):
    fill(store, model, [PASSAGES[0]], ["a"])
    monkeypatch.setattr(storage_of(store).disk.backend, "writable", False)
    with pytest.raises(StoreError, match="is not writable"):
        fill(store, model, [PASSAGES[0]], ["b"])


# --- other processes

READING = f"""
import sys
sys.path = {sys.path!r}
import torch
torch.set_num_threads(1)
from families import *
from test_corpus import *
root, turns = sys.argv[1], int(sys.argv[2])
model = build("qwen2")
ids = join(BOS, QUESTION, PASSAGES[0], NEW[0], QUESTION)
with KVStore(root, engine="posix", host_memory=0) as store:
    full = model(input_ids=ids, logits_to_keep=1).logits
    print("ready", flush=True)
    counts = set()
    for turn in range(turns):
        logits, cache = ask(model, store, ids, tune(1.0))
        assert torch.equal(logits, full), turn
        counts.add(sum(each.tokens_found for each in cache.stats.passages))
        if sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]: break
    print(sorted(counts))
"""


def test_a_document_is_replaced_while_another_process_reads(root, model):
    with KVStore(root, engine="posix") as store:
        fill(store, model, [PASSAGES[0]], ["report"])
        reader = processes.Popen(
            [sys.executable, "-c", READING, str(root), "500"],
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=processes.PIPE,
            text=True,
        )
        assert reader.stdout.readline() == "ready\n", reader.stderr.read()
        for turn in range(6):
            fill(store, model, [[NEW[0]], [PASSAGES[0]]][turn % 2], ["report"])
        reader.stdin.write("enough\n")
        reader.stdin.close()
        assert reader.wait(120) == 0, reader.stderr.read()
        assert store.verify().ok and lengths(store) == [96]


KILLED = f"""
import sys
sys.path = {sys.path!r}
from pathlib import Path
import torch
torch.set_num_threads(1)
from families import *
from kill_steps import count_writes, kill_at_steps
from test_corpus import *
from hf_tiered_cache.store.catalogue import Catalogue

model = build("qwen2")

def replace(folder):
    with KVStore(folder, engine="posix") as store:
        count_writes(Catalogue, "add", "remove")
        fill(store, model, [PASSAGES[1], *NEW], ["report"] * 3)

kill_at_steps(Path(sys.argv[1]), replace, int(sys.argv[2]), int(sys.argv[3]))  # labels are entered at the end
"""


def stores_killed(tmp_path, code, draws, end):
    """Return the store that `code` has changed completely, and those changed in part, with folders, verified."""
    command = [sys.executable, "-c", code, str(tmp_path), str(draws), str(end)]
    process = processes.run(command, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    for folder in [*tmp_path.glob("killed-*"), tmp_path / "whole"]:
        with KVStore(folder, engine="posix") as store:
            assert store.verify().ok
            yield folder, store


def test_kill_9_while_a_document_is_replaced_leaves_the_old_one_or_the_new_one(model, tmp_path):
    with KVStore(tmp_path / "first", engine="posix") as store:
        fill(store, model, [PASSAGES[0], PASSAGES[1], PASSAGES[2]], ["report", "report", "other"])
    token_counts = set()
    for folder, store in stores_killed(tmp_path, KILLED, *amount((4, 12), (10, 30))):
        report, other_document = store.documents("report")[0], store.documents("other")[0]
        assert report.evicted == other_document.evicted == 0 and report.tokens == report.tokens_there
        assert report.tokens in (160, 240)
        token_counts.add(report.tokens)
        texts = PASSAGES[:2] if report.tokens == 160 else [PASSAGES[1], *NEW]
        assert [found(store, model, text) for text in texts] == list(map(len, texts))
        store.gc()
        if report.tokens == 240:  # what was replaced is gone, whatever was killed
            assert lengths(store) == [48, 64, 112, 128]
        assert fill(store, model, [PASSAGES[1], *NEW], ["report"] * 3).restored >= 64
        assert lengths(store) == [48, 64, 112, 128]
        assert {path.suffix for path in (folder / "documents").iterdir()} == {".json"}
    assert token_counts == {160, 240}


REMOVED = KILLED.replace('fill(store, model, [PASSAGES[1], *NEW], ["report"] * 3)', 'store.remove_document("report")')


def test_kill_9_while_a_document_is_removed_loses_nothing_else_and_it_can_be_removed_again(model, tmp_path):
    assert REMOVED != KILLED
    with KVStore(tmp_path / "first", engine="posix") as store:
        fill(store, model, [PASSAGES[0], PASSAGES[1], PASSAGES[1], PASSAGES[2]], ["report", "report", "other", "other"])
    outcomes = set()
    for folder, store in stores_killed(tmp_path, REMOVED, *amount((4, 8), (8, 16))):
        (other_document,) = store.documents("other")
        assert other_document.evicted == 0 and other_document.tokens == other_document.tokens_there
        assert [found(store, model, text) for text in PASSAGES[1:3]] == list(map(len, PASSAGES[1:3]))
        outcomes.add((bool(store.documents("report")), found(store, model, PASSAGES[0])))
        if store.documents("report"):
            store.remove_document("report")
        store.gc()
        assert not store.documents("report")
        assert lengths(store) == sorted(len(text) // 16 * 16 for text in PASSAGES[1:3])
        assert {path.suffix for path in (folder / "documents").iterdir()} == {".json"}
    assert {(True, len(PASSAGES[0])), (False, 0)} <= outcomes <= {(True, len(PASSAGES[0])), (True, 0), (False, 0)}


# --- batches


@pytest.mark.parametrize(
    ("family", "dtype"),
    pairs(["llama", "qwen2_sliding", "gpt_neox", "gemma3"], [torch.float32, torch.bfloat16]),
    ids=str,
)
@pytest.mark.thin(2)
def test_batched_passages_have_the_kv_that_they_have_alone(family, dtype, tmp_path):
    model = build(family).to(dtype)
    texts = [prompt(tokens, seed=seed)[0] for seed, tokens in enumerate((64, 70, 64, 16, 79, 30, 17, 96), start=1)]
    stored_blocks = []
    for batch_tokens in (1, 150, 4096):
        with KVStore(tmp_path / str(batch_tokens), engine="posix") as store:
            report = fill(store, model, texts, None, batch_tokens=batch_tokens)
            assert (report.prompts, report.stored) == (8, 4 * 64 + 3 * 16 + 96)
            disk = storage_of(store).disk
            readers = {row.chain: disk.reader(row.id) for row in store.segments()}
            stored_blocks.append({chain: _blocks(reader) for chain, reader in readers.items()})
    for chain, blocks in stored_blocks[0].items():
        for other_blocks in stored_blocks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(blocks, other_blocks[chain], strict=True))


def _blocks(reader):
    return [reader.blocks(index) for index in range(len(reader.shape.block_groups))]


def test_passes_hold_so_many_tokens_of_one_length(model, store, monkeypatch):
    rows = []
    compute = passages.PassageCache.compute

    def counted(cache, ids):
        rows.append(tuple(ids.shape))
        return compute(cache, ids)

    monkeypatch.setattr(passages.PassageCache, "compute", counted)
    texts = [prompt(tokens, seed=seed)[0] for seed, tokens in enumerate((64, 65, 79, 80, 64, 64), start=1)]
    fill(store, model, texts, None, batch_tokens=200)
    assert rows == [(1, 80), (3, 64), (2, 64)]


@pytest.mark.parametrize("options", [{}, {"key": b"k" * 32}, {"codec": "int8"}], ids=["plain", "key", "codec"])
def test_prompts_find_documents_in_every_kind_of_store(options, root, model):
    with KVStore(root, engine="posix", **options) as store:
        fill(store, model, PASSAGES, list("abcd"), tune())
        _, cache = ask(model, store, PROMPT, tune())
        assert sum(passage.tokens_found for passage in cache.stats.passages) == sum(len(PASSAGES[n]) for n in PLACES)
        assert cache.stats.reason == ""
        assert {passage.label for passage in cache.stats.passages} == {"a", "c", "d"}
        assert store.remove_document("c") == 1
