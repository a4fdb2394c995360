"""Conversations that come back by id: the same bits, one owner at a time, and nothing lost whoever dies when."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import sys
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, replace

import processes
import pytest
import torch
from conversing import Conversing
from families import build, build_deep, prompt
from reference import Remembering, prefilled
from thorough import amount

from hf_tiered_cache import ConfigError, ConversationInUseError, KVStore, StoreClosedError, TieredCache, reasons
from hf_tiered_cache.cache import suspend
from hf_tiered_cache.errors import OtherFormatError, StoreError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import ContiguousKV, Exact, Impress, KVDrive, describe_method, make_method
from hf_tiered_cache.store.codecs import coded_provenance
from hf_tiered_cache.store.conversations import ConversationRecord, Conversations, Ownership, conversation_name
from hf_tiered_cache.store.kinds import CONVERSATION_LOCK
from hf_tiered_cache.store.root import StoreRoot

LIB = os.path.dirname(processes.__file__)
GREEDY = {"do_sample": False, "max_new_tokens": 20}
LOGITS = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
FIRST = 60


def turn(model, cache, history, more=12, seed=5):
    """Run a turn with `more` tokens of the user and an answer. Return the history, int `[1, n]`."""
    ids = torch.cat([history, prompt(more, seed=seed)], dim=1)
    return model.generate(ids, past_key_values=cache, **GREEDY)


def begun(model, store, name="alice-42", **settings):
    """Suspend a conversation of one turn, and return its history."""
    with TieredCache(model, store, conversation=name, **settings) as cache:
        return turn(model, cache, prompt(FIRST))


def plain(model, ids):
    return model.generate(ids, **GREEDY)


def info(store, name="alice-42"):
    (match,) = [record for record in store.conversations() if record.id == name]
    return match


def record_path(root, name="alice-42"):
    return root / "conversations" / f"{conversation_name(name)}.json"


def lock_path(root, name="alice-42"):
    return record_path(root, name).with_suffix(".lock")


def lock(root):
    return StoreRoot(root).lock(CONVERSATION_LOCK, lock_path(root).name)


# --- coming back

OTHER_PROCESS = f"""
import sys
sys.path.insert(0, {LIB!r})
import torch
torch.set_num_threads(1)
from families import *
from hf_tiered_cache import KVStore, TieredCache
family, dtype, root = sys.argv[1:]
model = build(family, getattr(torch, dtype))
with KVStore(root) as store, TieredCache(model, store, conversation="alice-42") as cache:
    model.generate(prompt({FIRST}), past_key_values=cache, do_sample=False, max_new_tokens=20)
"""


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma3", "float32")])
def test_a_turn_in_another_process_has_the_bits_of_an_uninterrupted_one(root, family, dtype):
    """The reference is a DynamicCache that was filled by the same passes and cropped."""
    processes.run([sys.executable, "-c", OTHER_PROCESS, family, dtype, str(root)], check=True, timeout=240)
    model = build(family, getattr(torch, dtype))
    remembering = Remembering(model)
    history = model.generate(prompt(FIRST), past_key_values=remembering, **GREEDY)
    ids = torch.cat([history, prompt(9, seed=5)], dim=1)
    with KVStore(root) as store:
        cache = TieredCache(model, store, conversation="alice-42")
        output = model.generate(ids, past_key_values=cache, **LOGITS)
        tokens_restored = cache.stats.tokens_restored
    assert tokens_restored == (FIRST + 20 - 1) // 16 * 16  # the last token said was never computed with
    expected = model.generate(ids, past_key_values=prefilled(model, [remembering.all()], tokens_restored), **LOGITS)
    assert torch.equal(output.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(output.logits, expected.logits, strict=True))


def test_turn_after_turn_each_with_a_cache_of_its_own(model, store):
    history = prompt(FIRST)
    for number in range(4):
        with TieredCache(model, store, conversation="alice-42") as cache:
            ids = torch.cat([history, prompt(12, seed=number)], dim=1)
            before, history = history.shape[1], model.generate(ids, past_key_values=cache, **GREEDY)
            assert torch.equal(history, plain(model, ids))
            assert cache.stats.tokens_restored == ((before - 1) // 16 * 16 if number else 0)
            assert cache.stats.reason == ("" if number else reasons.NOTHING)
    assert info(store).turns == 4


def test_suspend_says_what_it_kept_and_lets_memory_go(model, store, uncollected):
    cache = TieredCache(model, store, conversation="alice-42")
    history = turn(model, cache, prompt(FIRST))
    buffers = [weakref.ref(layer._keys) for layer in cache.layers]
    length = cache.get_seq_length()
    suspension = cache.suspend()
    assert [ref() for ref in buffers] == [None] * len(buffers)
    assert cache.get_seq_length() == 0
    assert (suspension.tokens, suspension.unstored, suspension.reason) == (length // 16 * 16, length % 16, "")
    assert suspension.bytes == sum(row.nbytes for row in store.segments()) and suspension.seconds > 0
    assert torch.equal(turn(model, cache, history, seed=8), plain(model, torch.cat([history, prompt(12, seed=8)], 1)))
    assert cache.stats.tokens_restored == suspension.tokens
    second_suspension = cache.suspend()
    assert second_suspension.tokens > suspension.tokens
    assert info(store).turns == 2 and info(store).tokens == second_suspension.tokens
    assert cache.suspend().tokens == 0 and info(store).turns == 2  # nothing was said: nothing is noted


def test_what_was_computed_is_durable_when_suspend_returns(model, root, monkeypatch):
    synced = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.fstat(fd).st_ino), fdatasync(fd)))
    with KVStore(root) as store:
        begun(model, store)
        assert {(root / "segments" / f"{row.id}.kv").stat().st_ino for row in store.segments()} <= set(synced)


@pytest.mark.parametrize("edit", [0, 5, 16, 40, 71])
def test_an_edited_history_is_restored_up_to_the_edit(model, store, edit):
    history = begun(model, store)
    edited = history.clone()
    edited[0, edit] = (edited[0, edit] + 1) % 100 + 3
    with TieredCache(model, store, conversation="alice-42") as cache:
        assert torch.equal(turn(model, cache, edited), plain(model, torch.cat([edited, prompt(12, seed=5)], dim=1)))
        assert cache.stats.tokens_restored == edit // 16 * 16
        assert cache.stats.reason == ("" if edit >= 16 else reasons.OTHER_HISTORY)
    assert info(store).turns == 2
    with TieredCache(model, store, conversation="alice-42") as cache:  # the edited one is the conversation now
        turn(model, cache, edited)
        assert cache.stats.tokens_restored >= edited.shape[1] // 16 * 16


def test_without_an_id_suspend_stores_and_lets_go_too(model, store):
    with TieredCache(model, store) as cache:
        turn(model, cache, prompt(FIRST))
        length = cache.get_seq_length()
    assert cache.conversation is None and cache.get_seq_length() == 0
    assert cache.suspend().tokens == 0
    assert sum(row.tokens for row in store.segments()) == length // 16 * 16
    assert store.conversations() == []


def test_conversations_share_what_is_exact(model, store):
    begun(model, store, "alice-42")
    with TieredCache(model, store, conversation="bob") as cache:
        turn(model, cache, prompt(FIRST))
        assert cache.stats.tokens_restored > 0
    assert len(store.conversations()) == 2


# --- with


def test_an_exception_inside_with_comes_through_and_what_was_said_is_kept(model, store):
    with pytest.raises(KeyError, match="mine"), TieredCache(model, store, conversation="alice-42") as cache:
        history = turn(model, cache, prompt(FIRST))
        raise KeyError("mine")
    assert info(store).tokens == (history.shape[1] - 1) // 16 * 16
    assert info(store).in_use_by is None


class Stop(Exception):
    pass


class Stopping:
    """Streamer that ends generate() in the middle of the answer."""

    def __init__(self):
        self.tokens = 0

    def put(self, value):
        self.tokens += 1
        if self.tokens == 12:
            raise Stop

    def end(self):
        pass


def test_an_answer_that_is_cut_off_is_kept_as_far_as_it_went(model, store):
    with pytest.raises(Stop), TieredCache(model, store, conversation="alice-42") as cache:
        model.generate(prompt(FIRST), past_key_values=cache, streamer=Stopping(), **GREEDY)
    assert info(store).tokens == 64
    with TieredCache(model, store, conversation="alice-42") as cache:
        assert torch.equal(model.generate(prompt(FIRST), past_key_values=cache, **GREEDY), plain(model, prompt(FIRST)))
        assert cache.stats.tokens_restored == 48


def test_a_store_that_is_closed_under_way_raises_unless_something_else_did(model, root, caplog):
    store = KVStore(root)
    with pytest.raises(StoreClosedError), TieredCache(model, store, conversation="alice-42") as cache:
        turn(model, cache, prompt(FIRST))
        store.close()
    assert cache.get_seq_length() == 0
    store = KVStore(root)
    with pytest.raises(KeyError, match="mine"), TieredCache(model, store, conversation="alice-42") as cache:
        store.close()
        raise KeyError("mine")
    assert "was not suspended" in caplog.text
    assert not lock_path(root).exists()


# --- one conversation, not several


def test_a_batch_of_several_prompts_is_refused(model, store):
    cache = TieredCache(model, store, conversation="alice-42")
    for ask in (model.generate, model):
        with pytest.raises(ConfigError, match="its own conversation id for each prompt"):
            ask(prompt(40, rows=2), past_key_values=cache)
    assert cache.get_seq_length() == 0
    turn(model, cache, prompt(FIRST))


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_beams_and_samples_are_one_conversation(model, store, mode):
    torch.manual_seed(3)
    with TieredCache(model, store, conversation="alice-42") as cache:
        output = model.generate(prompt(FIRST), past_key_values=cache, **GREEDY | mode)[:1]
    assert info(store).tokens >= FIRST // 16 * 16
    with TieredCache(model, store, conversation="alice-42") as cache:
        turn(model, cache, output)
        assert cache.stats.tokens_restored == (FIRST + 20 - 1) // 16 * 16  # of whichever row


def test_a_fork_goes_on_without_the_name(model, store):
    cache = TieredCache(model, store, conversation="alice-42")
    history = turn(model, cache, prompt(FIRST))
    twin = cache.fork()
    assert (twin.conversation, cache.conversation) == (None, "alice-42")
    for seed, kv_cache in ((7, twin), (8, cache)):
        ids = torch.cat([history, prompt(12, seed=seed)], dim=1)
        assert torch.equal(model.generate(ids, past_key_values=kv_cache, **GREEDY), plain(model, ids))


def test_a_fork_of_a_conversation_leaves_its_segments_as_they_are(model, store):
    cache = TieredCache(model, store, conversation="alice-42", method="krul:recompute=0.3")
    history = turn(model, cache, prompt(FIRST))
    cache.store_now()
    store.flush()
    twin, before = cache.fork(), {row.id for row in store.segments()}
    turn(model, twin, history, seed=7)
    twin.suspend()
    assert before <= {row.id for row in store.segments()}
    cache.suspend()
    (segment_id,) = info(store).segments
    assert before.isdisjoint(row.id for row in store.segments())
    assert segment_id in {row.id for row in store.segments()}


@pytest.mark.parametrize("name", ["", "x" * 201, 7, None, "\ud800", b"alice"])
def test_what_can_be_no_id(model, store, name):
    if name is None:
        assert TieredCache(model, store, conversation=name).conversation is None
        return
    with pytest.raises(ConfigError, match="id"):
        TieredCache(model, store, conversation=name)


@pytest.mark.parametrize("name", ["x" * 200, "../../etc/passwd", "a\nb\x1b[31m", "ü 🙂", ".", "int8"])
def test_any_other_text_is_an_id(model, store, root, name):
    begun(model, store, name)
    assert info(store, name).id == name
    assert len(list((root / "conversations").iterdir())) == 1
    assert store.remove_conversation(name) == 2  # what was asked, and what was said


# --- one owner at a time

HOLDER = f"""
import sys, time
sys.path.insert(0, {LIB!r})
from families import *
from hf_tiered_cache import KVStore, TieredCache
store, model = KVStore(sys.argv[1]), build("llama")
cache = TieredCache(model, store, conversation="alice-42")
said = model.generate(prompt({FIRST}), past_key_values=cache, do_sample=False, max_new_tokens=20)
print("ready", flush=True)
sys.stdin.readline()
cache.suspend()
print("suspended", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(root):
    """Start another process that uses the conversation."""
    process = processes.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=processes.PIPE, stdout=processes.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_second_process_is_told_and_nothing_is_lost(model, store, holder):
    before = time.time()
    with pytest.raises(
        ConversationInUseError, match=f"in use by process {holder.pid} since .*suspend it there"
    ) as raised:
        TieredCache(model, store, conversation="alice-42")
    assert raised.value.pid == holder.pid and before - 60 < raised.value.since < before
    with TieredCache(model, store, conversation="bob") as cache:  # others are free
        turn(model, cache, prompt(FIRST, seed=9))
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "suspended\n"  # it lives on, and has let go
    with TieredCache(model, store, conversation="alice-42") as cache:
        turn(model, cache, plain(model, prompt(FIRST)))
        assert cache.stats.tokens_restored == (FIRST + 20 - 1) // 16 * 16
    assert info(store).turns == 2


def test_kill_9_frees_the_conversation(model, store, holder):
    with pytest.raises(ConversationInUseError):
        TieredCache(model, store, conversation="alice-42")
    holder.kill()
    holder.wait()
    assert torch.equal(begun(model, store), plain(model, torch.cat([prompt(FIRST), prompt(12, seed=5)], dim=1)))


def test_listings_say_who_goes_on_with_it(model, store, root):
    begun(model, store)
    process = processes.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=processes.PIPE, stdout=processes.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        record = info(store)
        assert record.in_use_by == process.pid and record.used == record.in_use_since
        with pytest.raises(ConversationInUseError):
            store.remove_conversation("alice-42")
        assert info(store).turns == 1
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert info(store).in_use_by is None
    cache = TieredCache(model, store, conversation="alice-42")
    assert info(store).in_use_by == os.getpid()
    del cache


def test_a_newer_cache_takes_over_and_the_older_one_goes_on_when_it_is_suspended(model, store):
    older = TieredCache(model, store, conversation="alice-42")
    history = turn(model, older, prompt(FIRST))
    newer = TieredCache(model, store, conversation="alice-42")
    with pytest.raises(ConversationInUseError, match="a newer cache of this process"):
        turn(model, older, history)
    history = turn(model, newer, history)
    assert newer.stats.tokens_restored == (FIRST + 12 + 20 - 1) // 16 * 16  # what the older one had not stored yet
    newer.suspend()
    ids = torch.cat([history, prompt(12, seed=6)], dim=1)
    assert torch.equal(model.generate(ids, past_key_values=older, **GREEDY), plain(model, ids))
    older.suspend()
    assert info(store).turns == 3


def test_an_answer_under_way_is_finished_though_another_cache_has_taken_over(model, store):
    class TakingOver(Stopping):
        def put(self, value):
            self.tokens += 1
            if self.tokens == 5:
                self.newer = TieredCache(model, store, conversation="alice-42")

    older, streamer = TieredCache(model, store, conversation="alice-42"), TakingOver()
    output = model.generate(prompt(FIRST), past_key_values=older, streamer=streamer, **GREEDY)
    assert torch.equal(output, plain(model, prompt(FIRST)))
    with pytest.raises(ConversationInUseError, match="call its suspend"):
        turn(model, older, output)
    older.suspend()
    with pytest.raises(ConversationInUseError):
        model(prompt(FIRST), past_key_values=older)
    del streamer.newer
    model(prompt(FIRST), past_key_values=older)


def test_suspending_the_older_of_two_leaves_the_record_to_the_newer(model, store):
    older = TieredCache(model, store, conversation="alice-42")
    turn(model, older, prompt(FIRST))
    newer = TieredCache(model, store, conversation="alice-42")
    suspension = older.suspend()
    assert "a newer cache of this process" in suspension.reason and suspension.tokens > 0
    assert store.conversations() == [] and older.get_seq_length() == 0
    turn(model, newer, prompt(FIRST))
    assert newer.stats.tokens_restored == (FIRST + 12 - 1) // 16 * 16
    newer.suspend()
    assert info(store).turns == 1


def test_an_older_cache_that_is_suspended_last_goes_on_from_the_newer_ones_record(model, store):
    older = TieredCache(model, store, conversation="alice-42")
    history = turn(model, older, prompt(FIRST))
    with TieredCache(model, store, conversation="alice-42") as newer:
        turn(model, newer, history)
    before = info(store)
    assert older.suspend().reason == ""
    assert (info(store).turns, info(store).created) == (2, before.created)


def test_a_newer_cache_through_another_store_takes_over_too(model, store, root):
    older = TieredCache(model, store, conversation="alice-42")
    with KVStore(root) as other_store:
        newer = TieredCache(model, other_store, conversation="alice-42")
        with pytest.raises(ConversationInUseError):
            turn(model, older, prompt(FIRST))
        del newer
    turn(model, older, prompt(FIRST))


@pytest.mark.parametrize("how", ["suspended", "collected", "closed"])
def test_the_lock_is_free_when_its_cache_is(model, root, how, uncollected):
    store = KVStore(root)
    cache = TieredCache(model, store, conversation="alice-42")
    turn(model, cache, prompt(FIRST))
    assert lock(root) is None
    if how == "suspended":
        cache.suspend()
    elif how == "collected":
        del cache
    else:
        store.close()
    with lock(root) as free:
        assert free is not None
    if how != "closed":
        store.close()
    with KVStore(root) as second_store:
        cache = TieredCache(model, second_store, conversation="alice-42")
        turn(model, cache, prompt(FIRST))
        assert cache.stats.tokens_restored == (FIRST + 12 - 1) // 16 * 16  # stored, whichever way it ended
        del cache


def test_a_cache_may_be_dropped_without_a_warning(model, store, recwarn):
    warnings.simplefilter("always")
    cache = TieredCache(model, store, conversation="alice-42")
    del cache
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_a_forked_child_leaves_the_lock_to_its_parent(model, store, root):
    cache = TieredCache(model, store, conversation="alice-42")
    child = os.fork()
    if not child:
        cache._executor.conversation.release()
        del cache
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lock(root) is None and lock_path(root).exists()
    cache.suspend()


def test_a_segment_that_is_deleted_with_its_conversation_cannot_be_pinned(model, store, monkeypatch):
    begun(model, store)
    ids, remove, outcomes = [row.id for row in store.segments()], Conversations.remove, []

    def pin():
        with pytest.raises(ConfigError, match="does not exist"):
            store.pin(ids)
        outcomes.append(True)

    thread = threading.Thread(target=pin)

    def removing(conversations, ids):
        thread.start()
        thread.join(0.2)  # it waits until the segments are deleted
        remove(conversations, ids)

    monkeypatch.setattr(Conversations, "remove", removing)
    assert store.remove_conversation("alice-42") == len(ids)
    thread.join()
    assert outcomes and not store.pinned()


def test_where_files_cannot_be_locked_it_goes_on_and_says_so(model, store, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        cache = TieredCache(model, store, conversation="alice-42")
    assert "cannot be locked, so another process may continue with it, too" in caplog.text
    turn(model, cache, prompt(FIRST))
    assert cache.suspend().reason == ""
    assert info(store).turns == 1


def test_who_looks_does_not_keep_others_from_it(tmp_path):
    conversations, stop = Conversations(StoreRoot(tmp_path)), threading.Event()

    def look():
        while not stop.is_set():
            conversations.holder("alice-42")

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            owned = Ownership("alice-42", conversations.files)
            owned.take(over=False)
            owned.release()
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


# --- what cannot be kept


def test_a_full_disk_is_said_and_the_turn_before_stays(model, store, monkeypatch, caplog):
    history = begun(model, store)
    before = info(store)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = TieredCache(model, store, conversation="alice-42")
    output = turn(model, cache, history, more=40)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        suspension = cache.suspend()
    assert (suspension.tokens, suspension.unstored) == (before.tokens, output.shape[1] - 1 - before.tokens)
    assert "No space left" in suspension.reason or suspension.reason == reasons.NOT_STORED
    assert info(store) == before
    assert [path.suffix for path in (store.path / "conversations").iterdir()] == [".json"]
    with TieredCache(model, store, conversation="alice-42") as cache:
        assert torch.equal(turn(model, cache, output), plain(model, torch.cat([output, prompt(12, seed=5)], dim=1)))
        assert cache.stats.tokens_restored == before.tokens


def test_a_quota_without_room_is_said(model, root):
    with KVStore(root, disk_quota="300KiB") as store:
        with TieredCache(model, store, conversation="alice-42") as cache:
            turn(model, cache, prompt(900))
            suspension = cache.suspend()
        assert (suspension.tokens, suspension.unstored > 800) == (0, True)
        assert suspension.reason == reasons.NOT_STORED
        assert store.conversations() == []


def test_a_store_that_cannot_be_written_restores_and_says_so(model, root, monkeypatch):
    with KVStore(root) as store:
        history = begun(model, store)
    monkeypatch.setattr(StoreRoot, "lock", lambda *_: os.open("/proc/nowhere", os.O_RDONLY))
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with KVStore(root) as store:
        before = info(store)
        with TieredCache(model, store, conversation="alice-42") as cache:
            turn(model, cache, history, more=40)
            assert cache.stats.tokens_restored == before.tokens
            suspension = cache.suspend()
        assert suspension.tokens == before.tokens and suspension.reason
        assert info(store) == before


def test_what_is_not_recorded_is_not_noted(model, store):
    with TieredCache(model, store, conversation="alice-42", record=False) as cache:
        turn(model, cache, prompt(FIRST))
        suspension = cache.suspend()
    assert (suspension.tokens, suspension.reason) == (0, reasons.NOT_RECORDED)
    assert store.conversations() == []


def test_what_cannot_be_stored_is_said(store):
    model = build("llama")
    with TieredCache(model, store, conversation="alice-42") as cache:
        model(prompt(FIRST), past_key_values=cache, logits_to_keep=1)
        mask = torch.ones(1, FIRST + 40, dtype=torch.long)
        mask[0, 50] = 0
        model(prompt(40, seed=2), attention_mask=mask, past_key_values=cache)
        suspension = cache.suspend()
        assert (suspension.tokens, suspension.unstored, suspension.reason) == (48, FIRST + 40 - 48, reasons.ODD_MASK)
        assert info(store).tokens == 48
        model.train()
        model(prompt(FIRST), past_key_values=cache)
        suspension = cache.suspend()
        assert (suspension.tokens, suspension.unstored, suspension.reason) == (0, FIRST, reasons.TRAINING)
        assert info(store).turns == 1


# --- why nothing comes back


def test_kv_that_was_evicted_has_its_reason_and_is_listed(model, store):
    history = begun(model, store)
    store.remove([row.id for row in store.segments()])
    record = info(store)
    assert (record.evicted, record.tokens_there, record.bytes) == (record.segments, 0, 0) and record.tokens > 0
    with TieredCache(model, store, conversation="alice-42") as cache:
        assert torch.equal(turn(model, cache, history), plain(model, torch.cat([history, prompt(12, seed=5)], dim=1)))
        assert cache.stats.reason == reasons.EVICTED
    assert info(store).evicted == [] and info(store).turns == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_kv_of_a_turn_that_was_evicted_has_its_reason(model, store, lost):
    history = begun(model, store)
    with TieredCache(model, store, conversation="alice-42") as cache:
        history = turn(model, cache, history, more=40)
        assert cache.stats.reason == ""
    segments = info(store).segments
    first = next(row for row in store.segments() if row.id == segments[0])
    store.remove([segments[lost]])
    with TieredCache(model, store, conversation="alice-42") as cache:
        assert torch.equal(turn(model, cache, history), plain(model, torch.cat([history, prompt(12, seed=5)], dim=1)))
        expected = (first.tokens, reasons.EVICTED_IN_PART) if lost else (0, reasons.EVICTED)
        assert (cache.stats.tokens_restored, cache.stats.reason) == expected
    with TieredCache(model, store, conversation="alice-42") as cache:
        turn(model, cache, history[:, :40])  # an edited history, of which nothing is lost
        assert cache.stats.tokens_restored and cache.stats.reason == ""


def test_another_model_leaves_the_record_until_it_is_suspended_in_its_place(store):
    first, second = build("llama"), build("llama", seed=1)
    history = begun(first, store)
    before = info(store)
    cache = TieredCache(second, store, conversation="alice-42")
    turn(second, cache, history)
    assert "for another state of the model, which differs in weights" in cache.stats.reason
    assert info(store).fingerprint == before.fingerprint and info(store).turns == 1
    cache.suspend()
    assert info(store).fingerprint != before.fingerprint and info(store).turns == 2
    assert info(store).created == before.created
    begun(first, store, "bob")
    store.remove([row.id for row in store.segments()])
    with TieredCache(second, store, conversation="bob") as cache:
        turn(second, cache, history)
        assert "the conversation is stored for another state of the model" in cache.stats.reason


# --- looking after them


def test_what_is_listed(model, store):
    started = time.time()
    history = begun(model, store, method=Exact(decline=False))
    record = info(store)
    assert record.model["class"] == "LlamaForCausalLM"
    assert (record.method, record.provenance) == ("exact:decline=False", "exact")
    assert record.tokens == record.tokens_there == (history.shape[1] - 1) // 16 * 16
    assert record.segments == [row.id for row in sorted(store.segments(), key=lambda row: row.position)]
    assert started <= record.created <= record.used <= time.time()
    assert json.loads(json.dumps(record.as_dict()))["id"] == "alice-42"


def test_a_conversation_is_removed_with_what_is_its_own(model, store):
    common_ids = prompt(48)
    for name, seed in (("alice", 5), ("bob", 6)):
        with TieredCache(model, store, conversation=name) as cache:
            model(common_ids, past_key_values=cache, logits_to_keep=1)
            cache.store_now()
            turn(model, cache, common_ids, seed=seed)
    shared_ids = set(info(store, "alice").segments) & set(info(store, "bob").segments)
    assert shared_ids
    assert store.remove_conversation("alice") == len(info(store, "bob").segments) - len(shared_ids)
    assert [record.id for record in store.conversations()] == ["bob"]
    assert info(store, "bob").evicted == []
    with pytest.raises(ConfigError, match="conversation 'alice' does not exist"):
        store.remove_conversation("alice")
    store.pin(info(store, "bob").segments[:1])
    store.remove_conversation("bob")
    assert len(store.segments()) == 1


@pytest.mark.parametrize("fault", ["unreadable", "newer"])
def test_what_a_record_that_cannot_be_read_may_name_is_not_deleted(model, store, root, monkeypatch, fault):
    shared_ids = prompt(48)
    for name in ("alice", "bob"):
        with TieredCache(model, store, conversation=name) as cache:
            model(shared_ids, past_key_values=cache, logits_to_keep=1)
    store.flush()  # uses are counted later
    segments, name = store.segments(), conversation_name("bob") + ".json"
    if fault == "newer":
        path = root / "conversations" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}, indent=1))
    else:
        real_read = StoreRoot.read

        def failing(self, kind, file):
            if file == name:
                raise OSError(errno.EMFILE, "too many open files")
            return real_read(self, kind, file)

        monkeypatch.setattr(StoreRoot, "read", failing)
    error, text = (OtherFormatError, None) if fault == "newer" else (StoreError, "too many open files")
    with pytest.raises(error, match=text):
        store.remove_conversation("alice")
    monkeypatch.undo()
    assert store.segments() == segments
    assert info(store, "alice").evicted == []


def test_a_pin_that_is_set_while_a_conversation_is_rewritten_passes_to_its_new_segment(model, store, monkeypatch):
    cache = TieredCache(model, store, conversation="alice", method="krul:recompute=0.3")
    model(prompt(200), past_key_values=cache, logits_to_keep=1)
    pinned, real = [], suspend._replace

    def pin_first(storage, old, new):
        pinned.extend(old)
        store.pin(old[:1])
        real(storage, old, new)

    monkeypatch.setattr(suspend, "_replace", pin_first)
    cache.suspend()
    assert pinned
    assert storage_of(store).disk.backend.pinned() == set(info(store, "alice").segments)


def test_gc_forgets_conversations_of_which_nothing_is_left(model, store, root):
    begun(model, store, "alice")
    begun(model, store, "bob")
    store.remove(info(store, "bob").segments)
    (folder := root / "conversations").joinpath("0" * 32 + ".json").write_text("{")
    folder.joinpath("1" * 32 + ".partial").write_text("{")
    folder.joinpath("2" * 32 + ".lock").write_text("")
    folder.joinpath("4" * 32 + ".json").write_text("")
    newer = folder / ("3" * 32 + ".json")
    newer.write_text(json.dumps({"format": 99}))
    store.remove(row.id for row in store.segments())
    open_cache = TieredCache(model, store, conversation="alice")  # in use: it stays
    assert store.gc(dry_run=True).conversations == 2
    assert len(list(folder.iterdir())) == 8
    assert store.gc().conversations == 2
    assert [record.id for record in store.conversations()] == ["alice"]
    assert len(list(folder.iterdir())) == 5 and newer.exists()  # and alice's record and lock, and what is not ours
    open_cache.suspend()
    report = store.gc()
    assert report.conversations == 1
    file_names = sorted(path.name for path in folder.iterdir())
    assert file_names == ["0" * 32 + ".json", "1" * 32 + ".partial", newer.name]
    assert report.unknown == [f"conversations/{name}" for name in file_names]


def test_a_conversation_keeps_its_segments_when_they_are_rewritten(model, store):
    begun(model, store)
    begun(model, store, "bob")
    (before,) = {tuple(record.segments) for record in store.conversations()}
    assert store.relayout(ContiguousKV(0.3), progress=False) == len(before)
    for record in store.conversations():
        assert record.tokens_there == record.tokens and not record.evicted
        assert not set(record.segments) & set(before)
    assert store.gc().conversations == 0
    store.remove_conversation("bob")
    assert len(store.segments()) == len(before)
    assert store.remove_conversation("alice-42") == len(before) and not store.segments()


def test_a_segment_stays_if_the_record_of_its_conversation_cannot_be_written(model, store, monkeypatch, caplog):
    begun(model, store)
    (before,) = (record.segments for record in store.conversations())

    def fail(*names):
        raise OSError(5, "the disk fails")

    monkeypatch.setattr(Conversations, "rename_segment", fail)
    assert store.relayout(ContiguousKV(0.3), progress=False) == 0
    assert "stays, since conversations name it" in caplog.text
    (conversation,) = store.conversations()
    assert conversation.segments == before and conversation.tokens_there == conversation.tokens
    assert store.gc().conversations == 0


def test_clearing_the_disk_forgets_conversations(model, store, root):
    begun(model, store)
    store.clear()
    assert len(store.conversations()) == 1
    store.clear(disk=True)
    assert store.conversations() == [] and not list((root / "conversations").iterdir())


def test_records_count_in_the_quota(model, store, root):
    begun(model, store)
    used_before = store._storage.disk.used_bytes()
    (root / "conversations" / ("0" * 32 + ".json")).write_bytes(bytes(100_000))
    assert store._storage.disk.used_bytes() - used_before >= 100_000
    shutil.rmtree(root / "conversations")
    assert store._storage.disk.used_bytes() - used_before < 50_000
    begun(model, store)  # and the folder is made anew
    assert len(store.conversations()) == 1


NOT_RECOGNISED = ["no text", "another's", "cut", "garbage", "no object", "nested"]


def damaged(record, way):
    facts = json.loads(record.encode())
    facts |= {
        "outside": {"segments": ["../../precious"]},
        "no text": {"id": 7},
        "no number": {"tokens": "many"},
        "not finite": {"suspended": float("nan")},
        "negative": {"turns": -1},
        "another's": {"id": "bob"},
    }.get(way, {})
    if way == "a part":
        del facts["segments"]
    text = json.dumps(facts).encode()
    return {"cut": text[:50], "garbage": b"\xff" * 40, "no object": b"[1]", "nested": b"[" * 100_000}.get(way, text)


@pytest.mark.parametrize(
    "way",
    [
        "outside",
        "no text",
        "no number",
        "not finite",
        "negative",
        "another's",
        "a part",
        "cut",
        "garbage",
        "no object",
        "nested",
    ],
)
def test_a_damaged_record_is_none(model, store, root, way):
    history = begun(model, store)
    conversations = Conversations(StoreRoot(root))
    record = conversations.read("alice-42")
    assert ConversationRecord.decode(record.encode()) == record
    record_path(root).write_bytes(content := damaged(record, way))
    assert store.conversations() == [] and conversations.read("alice-42") is None
    with pytest.raises(ConfigError, match="conversation 'alice-42' does not exist"):
        store.remove_conversation("alice-42")
    with TieredCache(model, store, conversation="alice-42") as cache:  # KV is found by its tokens
        turn(model, cache, history)
        assert cache.stats.tokens_restored > 0
        reason = cache.suspend().reason
    if way in NOT_RECOGNISED:  # nobody knows whose it is
        assert "was not written by this library" in reason and store.conversations() == []
        assert record_path(root).read_bytes() == content
        store.gc()
        store.clear(disk=True)
        assert record_path(root).read_bytes() == content
    else:
        assert info(store).turns == 1


# --- what is approximate, and a conversation's own


@dataclass(frozen=True, kw_only=True)
class Private(ContiguousKV, Conversing):
    """Method that restores a part, and stores its computed tokens under a name of each conversation."""

    whose: str = ""

    @property
    def provenance(self):
        return coded_provenance(" ".join(["private", *[self.whose] * bool(self.whose)]), self.geometry.codec)

    def for_conversation(self, name):
        return replace(self, whose=name)


def test_what_is_computed_behind_a_choice_is_the_conversations_own(model, store):
    method = Private(0.25, period=2)
    assert (
        method.records_approximations
        and not Exact().records_approximations
        and not Exact(codec="int8").records_approximations
    )
    history = prompt(200)
    token_counts = []
    for seed in range(3):
        with TieredCache(model, store, conversation="alice-42", method=method) as cache:
            history = turn(model, cache, history, more=40, seed=seed)
            token_counts.append(cache.stats.tokens_restored)
            if seed:
                assert 0 < cache.stats.tokens_attended < cache.stats.tokens_restored
            suspension = cache.suspend()
        assert suspension.tokens == (history.shape[1] - 1) // 16 * 16 and suspension.reason == ""
    assert token_counts == [0, 256, 304]
    assert {row.provenance for row in store.segments()} == {info(store).provenance}
    assert info(store).provenance.startswith("private ")
    for options in (
        {"method": Exact()},
        {"method": method},
        {"conversation": "bob", "method": method},
        {"conversation": "alice-42", "method": Exact()},
        {"method": ContiguousKV(0.25, period=2)},
    ):
        cache = TieredCache(model, store, record=False, **options)
        ids = torch.cat([history, prompt(12, seed=9)], dim=1)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), plain(model, ids))
        assert cache.stats.tokens_restored == 0
        if options.get("conversation") == "alice-42":
            assert "stored by the method 'Private" in cache.stats.reason


@pytest.mark.parametrize("method", [ContiguousKV(0.25, period=2), Impress(0.25)], ids=["contiguous_kv", "impress"])
def test_turns_after_a_selection_are_computed_exactly_when_suspended(model, store, method):
    """Any method and conversation then restores them."""
    history, token_counts, stored_counts = prompt(200), [], [0]
    for seed in range(4):
        with TieredCache(model, store, conversation="alice-42", method=method, progress=False) as cache:
            history = turn(model, cache, history, more=40, seed=seed)
            token_counts.append(cache.stats.tokens_restored)
            assert not seed or 0 < cache.stats.tokens_attended < token_counts[-1]
            suspension = cache.suspend()
        assert suspension.tokens >= (history.shape[1] - 1) // 16 * 16 and suspension.reason == ""
        stored_counts.append(suspension.tokens)
    assert token_counts == stored_counts[:-1]
    ids = torch.cat([history, prompt(12, seed=9)], dim=1)
    cache = TieredCache(model, store, method=Exact(recompute=0.0, decline=False), record=False)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        torch.testing.assert_close(logits, model(ids, logits_to_keep=1).logits, rtol=0, atol=1e-5)
    assert cache.stats.tokens_restored >= 384


def test_a_context_that_memory_may_not_hold_is_not_computed_exactly_and_says_so(model, store):
    method = KVDrive(0.25, exact_from=60, prefill_tokens=256)
    with TieredCache(model, store, conversation="alice-42", method=method) as cache:
        history = turn(model, cache, prompt(600), more=100)  # an empty store is filled exactly
    stored_tokens = info(store).tokens
    with TieredCache(model, store, conversation="alice-42", method=method) as cache:
        turn(model, cache, history, more=20)
        assert cache.stats.tokens_attended < cache.stats.tokens_restored
        suspension = cache.suspend()
    assert suspension.tokens == stored_tokens and suspension.reason == reasons.APPROXIMATE


@torch.no_grad()
def test_columns_that_could_have_been_taken_back_are_kept(model, store):
    """Several logits are requested to check candidates, some of which are removed."""
    with TieredCache(model, store, conversation="alice-42") as cache:
        model(input_ids=prompt(64), past_key_values=cache, logits_to_keep=4)
        suspended = cache.suspend()
    assert (suspended.tokens, suspended.unstored, suspended.reason) == (64, 0, "")
    assert info(store).tokens == 64 and len(store.segments()) == 1


class Compacting(Exact, Conversing):
    """Exact reuse of a conversation."""


def test_the_method_is_told_before_the_record_is_written(model, store):
    records = []

    @dataclass(frozen=True, kw_only=True)
    class Told(Compacting):
        def compact(self, idle):
            records.append(([reader.id for reader in idle.readers], store.conversations()))
            return None

    history = begun(model, store, method=Told())
    ((segments, record),) = records
    assert segments == info(store).segments and record == []

    @dataclass(frozen=True, kw_only=True)
    class Failing(Compacting):
        def compact(self, idle):
            raise OSError(5, "Input/output error")

    with TieredCache(model, store, conversation="alice-42", method=Failing()) as cache:
        turn(model, cache, history)
        assert "the conversation could not be rewritten" in cache.suspend().reason
    assert info(store).turns == 2


@pytest.mark.parametrize(
    "text", ["exact", "exact:codec=int8:decline=False", "contiguous_kv:budget=0.1", "kv_drive:window=3.0"]
)
def test_methods_in_words_are_what_make_method_takes(text):
    method = make_method(text)
    assert make_method(describe_method(method)) == method
    assert set(describe_method(method).split(":")) == set(text.split(":"))


# --- kill -9

KILLED = f"""
import sys
sys.path.insert(0, {LIB!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from families import *
from kill_steps import count_writes, kill_at_steps
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.store.catalogue import Catalogue

root, method, draws, end = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
model = build_deep("llama")

def suspend(folder):
    with KVStore(folder) as store:
        cache = TieredCache(model, store, conversation="alice-42", method=method)
        history = torch.load(root / "history.pt")
        model.generate(history, past_key_values=cache, do_sample=False, max_new_tokens=4)
        count_writes(Catalogue, "add", "touch")
        cache.suspend()

print(kill_at_steps(root, suspend, draws, end))  # the record is written at the end
"""


MERGING = "krul:layers_shared=0.7:recompute=0.3:change=1.0:quality=None"


@pytest.mark.parametrize(
    ("method", "before", "shared_segments"),
    [("exact", 1, 2), (MERGING, 1, 0), (MERGING, 3, 1), (MERGING, 4, 0)],
    ids=["exact", "all rewritten", "appended", "joined"],
)
def test_kill_9_while_it_is_suspended_leaves_a_whole_turn(tmp_path, method, before, shared_segments):
    """The kill comes after `before` turns; the last turn leaves `shared_segments` earlier segments unchanged."""
    model = build_deep("llama")
    with KVStore(tmp_path / "first") as store:
        history = begun(model, store, method=method)
        for _ in range(before - 1):
            with TieredCache(model, store, conversation="alice-42", method=method) as cache:
                ids = torch.cat([history, prompt(40, seed=6)], dim=1)
                history = model.generate(ids, past_key_values=cache, **GREEDY | {"max_new_tokens": 4})
        first = info(store)
    ids = torch.cat([history, prompt(40, seed=6)], dim=1)
    torch.save(ids, tmp_path / "history.pt")
    draws, end = amount((3, 6), (6, 12))
    command = [sys.executable, "-c", KILLED, str(tmp_path), method, str(draws), str(end)]
    process = processes.run(command, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 20
    folders = [*tmp_path.glob("killed-*"), tmp_path / "whole"]
    assert len(folders) == draws + end + 1
    turns = set()
    short = GREEDY | {"max_new_tokens": 4}
    expected = model.generate(ids, **short)
    for folder in folders:
        with KVStore(folder) as store:
            assert store.verify().ok
            record = info(store)
            turns.add(record.turns)
            assert record.evicted == [] and record.tokens_there == record.tokens and record.in_use_by is None
            assert record.tokens == first.tokens if record.turns == before else record.tokens > first.tokens
            if folder.name == "whole":
                assert len(set(record.segments) & set(first.segments)) == shared_segments
            with TieredCache(model, store, conversation="alice-42", method=method) as cache:
                output = model.generate(ids, past_key_values=cache, **short)
                assert method != "exact" or torch.equal(output, expected)
                assert cache.stats.tokens_restored >= first.tokens
            assert info(store).turns == record.turns + 1
            store.gc()
            assert [path.suffix for path in (folder / "conversations").iterdir()] == [".json"]
            assert not list((folder / "tmp").iterdir())
    assert turns == {before, before + 1}
