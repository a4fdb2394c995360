"""KVStore: its arguments, its life, and the many who share it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import processes
import pytest
import torch
from families import build, prompt
from thorough import pairs
from threads import run_in_threads
from transformers import DynamicCache

from hf_tiered_cache import (
    ConfigError,
    EngineUnavailableError,
    KVStore,
    StoreClosedError,
    StoreError,
    TieredCache,
    attach,
    detach,
    tiered,
)
from hf_tiered_cache.operations import precompute
from hf_tiered_cache.store.folder import FolderBackend

GREEDY = {"do_sample": False, "max_new_tokens": 6}
LIB = os.path.dirname(processes.__file__)


def restored(model, store, ids=None):
    ids = prompt(100) if ids is None else ids
    cache = TieredCache(model, store, record=False)
    mask = torch.ones_like(ids)  # generated ids may be the padding's, which generate() would take for padding
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(ids, attention_mask=mask, **GREEDY))
    return cache.stats.tokens_restored


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"engine": "tape"}, ConfigError, "posix"),
        ({"policy": "fifo"}, ConfigError, "lru, lfu"),
        ({"disk_quota": "lots"}, ConfigError, "disk_quota"),
        ({"ttl": 0}, ConfigError, "ttl"),
        ({"free_space_floor": -1}, ConfigError, "free_space_floor"),
    ],
)
def test_meaningless_arguments_are_refused_before_anything_is_made(tmp_path, arguments, error, says):
    with pytest.raises(error, match=says):
        KVStore(tmp_path / "store", **arguments)
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kvikio may well work here")
def test_an_engine_that_does_not_work_here_is_an_error_if_it_was_asked_for(tmp_path):
    with pytest.raises(EngineUnavailableError, match="CUDA"):
        KVStore(tmp_path / "store", engine="kvikio")


def test_a_path_that_cannot_be_a_store_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="folder"):
        KVStore(tmp_path / "file")


# --- life


def test_a_closed_store_says_so_and_closes_twice(model, tmp_path):
    store = KVStore(tmp_path)
    cache = TieredCache(model, store)
    store.close()
    store.close()
    for action in (store.flush, store.verify, store.gc, store.segments, lambda: store.precompute(model, prompt(40))):
        with pytest.raises(StoreClosedError, match="open it again"):
            action()
    with pytest.raises(StoreClosedError):
        model.generate(prompt(40), past_key_values=cache, **GREEDY)
    for make in (TieredCache, tiered):
        with pytest.raises(StoreClosedError, match="open it again"):
            make(model, store)
    assert "closed" in repr(store)


@pytest.mark.parametrize("look", ["verify", "gc"])
def test_a_store_closed_under_a_look_at_its_files_reports_no_damage(model, tmp_path, monkeypatch, look):
    store = KVStore(tmp_path)
    store.precompute(model, prompt(40), progress=False)
    listed, real = ("names", FolderBackend.names) if look == "verify" else ("unknown", FolderBackend.unknown)
    monkeypatch.setattr(FolderBackend, listed, lambda *arguments: (real(*arguments), store.close())[0])
    with pytest.raises(StoreClosedError):
        getattr(store, look)()


def test_a_store_closed_under_a_request_does_not_fail_it(model, tmp_path):
    """The prompt's pass is done; decoding goes on, and what cannot be stored is not."""
    store = KVStore(tmp_path)

    class Closing:
        steps = 0

        def put(self, value):
            self.steps += 1
            if self.steps == 3:
                store.close()

        def end(self):
            pass

    output = model.generate(
        prompt(40), past_key_values=TieredCache(model, store), do_sample=False, max_new_tokens=600, streamer=Closing()
    )
    assert torch.equal(output, model.generate(prompt(40), do_sample=False, max_new_tokens=600))


def test_what_was_computed_is_stored_when_the_interpreter_ends(tmp_path):
    """The script does not flush, close or delete anything."""
    code = f"""
import ctypes, sys
sys.path.insert(0, {LIB!r})
from families import *
from hf_tiered_cache import KVStore, TieredCache
model, store = build("llama"), KVStore({str(tmp_path)!r})
cache = TieredCache(model, store)
model.generate(prompt(40), past_key_values=cache, do_sample=False, max_new_tokens=30)
ctypes.pythonapi.Py_Exit(0)  # end the interpreter, as after a script
"""
    processes.run([sys.executable, "-c", code], check=True, timeout=120)
    with KVStore(tmp_path) as store:
        assert sum(row.tokens for row in store.segments()) == 64


def test_a_store_that_is_collected_has_written(model, tmp_path):
    store = KVStore(tmp_path)
    model.generate(prompt(100), past_key_values=TieredCache(model, store), **GREEDY)
    writer = store._storage.writer
    del store
    gc.collect()
    writer.close()  # waits for it
    with KVStore(tmp_path) as second_store:
        assert restored(model, second_store) == 96


def test_a_store_in_a_forked_process_says_what_to_do(model, tmp_path):
    with KVStore(tmp_path) as store:
        store.precompute(model, prompt(40), progress=False)
        store._storage._pid -= 1
        for action in (lambda: TieredCache(model, store), lambda: store._storage.match([], 0, len, None)):
            with pytest.raises(StoreClosedError, match="forked"):
                action()
        store._storage._pid += 1


def test_a_path_stands_for_a_store_that_is_opened_once(tmp_path):
    model = build("llama")
    first, second = TieredCache(model, tmp_path / "kv"), TieredCache(model, str(tmp_path / "kv"))
    assert first.store is second.store
    model.generate(prompt(100), past_key_values=first, **GREEDY)
    assert restored(model, tmp_path / "kv") == 96
    detach(model)
    with pytest.raises(StoreClosedError):
        first.store.flush()
    with KVStore(tmp_path / "kv") as store:
        assert restored(model, store) == 96


def test_a_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with KVStore("~/kv") as store:
        assert store.path == tmp_path / "kv"


# --- precompute


def test_precompute_takes_prompts_in_many_forms(model, tmp_path):
    first, second = prompt(50), prompt(40, seed=2)
    forms = [
        first,
        first[0],
        first[0].tolist(),
        [first[0], second[0]],
        [first[0].tolist(), second[0].tolist()],
        torch.cat([first, first]),
    ]
    with KVStore(tmp_path) as store:
        reports = [store.precompute(model, form, progress=False) for form in forms]
    assert [r.prompts for r in reports] == [1, 1, 1, 2, 2, 2]
    assert [r.stored for r in reports] == [48, 0, 0, 32, 0, 0]
    assert reports[1].restored == 48


@pytest.mark.parametrize("wrong", ["a text", None, [], [["a"]], torch.zeros(2, 2, 2), [1.5, "x"]])
def test_precompute_says_what_it_takes(model, tmp_path, wrong):
    with (
        KVStore(tmp_path) as store,
        pytest.raises(ConfigError, match=r"token ids, such as tokenizer\(text\).input_ids"),
    ):
        store.precompute(model, wrong)


def test_precompute_counts_prompts_that_are_too_short(model, tmp_path):
    with KVStore(tmp_path) as store:
        report = store.precompute(model, [[3] * 15, [3] * 16], progress=False)
    assert (report.prompts, report.stored, report.too_short) == (2, 16, 1)


def test_precompute_shows_its_progress(model, tmp_path, capsys):
    with KVStore(tmp_path) as store:
        store.precompute(model, [prompt(50)[0], prompt(30, seed=2)[0]])
        assert "precompute: 100%" in capsys.readouterr().err
        store.precompute(model, prompt(20, seed=3), progress=False)
    assert capsys.readouterr().err == ""


def test_a_long_prompt_is_computed_in_chunks_and_shows_its_progress(model, tmp_path, monkeypatch):
    monkeypatch.setattr(precompute, "CHUNK_TOKENS", 64)
    ids, updates = prompt(200), []
    bar_over = precompute.bar_over

    def watched(prompts, progress):
        bar = bar_over(prompts, progress)
        update = bar.update
        monkeypatch.setattr(bar, "update", lambda tokens: (updates.append(tokens), update(tokens)))
        return bar

    monkeypatch.setattr(precompute, "bar_over", watched)
    with KVStore(tmp_path) as store:
        report = store.precompute(model, ids)
        assert (updates, report.stored, report.restored) == ([64, 64, 64, 8], 192, 0)
        (row,) = store.segments()
        assert row.tokens == 192
        cache, reference = TieredCache(model, store, record=False), DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for chunk in ids.split(64, dim=1):
                model(input_ids=chunk, past_key_values=reference, use_cache=True)
        assert cache.stats.tokens_restored == 192
        for layer, expected in zip(cache.layers, reference.layers, strict=True):
            assert torch.equal(layer.keys[:, :, :192], expected.keys[:, :, :192])
            assert torch.equal(layer.values[:, :, :192], expected.values[:, :, :192])
        second_report = store.precompute(model, ids, progress=False)
        assert second_report.stored == 0
        assert second_report.restored >= 192 - 3  # the last token of each chunk is computed


def test_a_prompt_whose_rope_follows_its_length_is_computed_in_one_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(precompute, "CHUNK_TOKENS", 64)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 80}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    with KVStore(tmp_path) as store:
        report = store.precompute(build("llama", rope_parameters=rope | factors), prompt(200), progress=False)
        assert report.stored == 192


def test_what_is_precomputed_is_durable_and_can_be_pinned(model, tmp_path):
    with KVStore(tmp_path) as store:
        store.precompute(model, prompt(100), progress=False, pin=True)
        assert store._storage.disk.backend.pinned() == {row.id for row in store.segments()}
        store._storage.disk.limits = type(store._storage.disk.limits)(quota=1)
        assert store.gc().evicted == 0
        assert restored(model, store) == 96


# --- sharing


def test_pinned_prompts_that_do_not_fit_are_counted_and_the_others_are_stored(model, tmp_path):
    with KVStore(tmp_path, disk_quota="700KiB") as store:
        report = store.precompute(model, [prompt(160, seed=seed)[0] for seed in range(12)], pin=True, progress=False)
        stored_ids = {row.id for row in store.segments()}
        assert 0 < report.stored < report.tokens and store.stats.dropped_writes
        assert store.pinned() == stored_ids and len(stored_ids) * 160 == report.stored


def test_a_salt_keeps_stores_apart(model, tmp_path):
    with KVStore(tmp_path, salt="secret") as store:
        store.precompute(model, prompt(100), progress=False)
        assert restored(model, store) == 96
    for salt, expected in ((None, 0), ("other", 0), (b"secret", 96)):
        with KVStore(tmp_path, salt=salt) as store:
            assert restored(model, store) == expected


def test_segments_expire(model, tmp_path):
    with KVStore(tmp_path, ttl=0.5) as store:
        store.precompute(model, prompt(100), progress=False)
        assert restored(model, store) == 96
        time.sleep(0.6)
        assert restored(model, store) == 0
        assert store.gc().expired == 1
        assert store.segments() == []


def test_two_models_share_a_store(tmp_path):
    models = [build("llama"), build("gemma3"), build("deepseek_v3"), build("llama", torch.bfloat16)]
    with KVStore(tmp_path, host_memory="300KiB") as store:
        for _ in range(2):
            for model in models:
                store.precompute(model, prompt(100), progress=False)
                cache = TieredCache(model, store)
                model.generate(prompt(100), past_key_values=cache, **GREEDY)
                assert cache.stats.tokens_restored == 96
        assert len(store.segments()) == 4
        assert store.stats.host.bytes <= 300 << 10


@pytest.mark.parametrize(("host", "policy"), pairs([0, "64KiB", "200KiB", "1GiB"], ["lru", "lfu"]))
@pytest.mark.thin(2)
def test_any_host_budget_is_kept_and_right(model, tmp_path, host, policy):
    with KVStore(tmp_path, host_memory=host, policy=policy) as store:
        for seed in (1, 2, 3, 1, 2, 1):
            ids = prompt(100, seed=seed)
            model.generate(ids, past_key_values=TieredCache(model, store), **GREEDY)
            assert restored(model, store, ids) >= 96
            assert store.stats.host.bytes <= store.stats.host.budget


def test_many_threads_write_and_read_one_store(tmp_path):
    """Each thread has its own model, so that passes overlap."""
    models = [build("llama") for _ in range(4)]
    prompts = [prompt(80 + 10 * i, seed=i % 3) for i in range(8)]
    expected = [models[0].generate(p, **GREEDY) for p in prompts]
    with KVStore(tmp_path, host_memory="500KiB", disk_quota="3MiB", queue_memory="1KiB") as store:

        def work(number):
            for i in range(12):
                index = (number + i) % len(prompts)
                cache = TieredCache(models[number], store)
                output = models[number].generate(prompts[index], past_key_values=cache, **GREEDY)
                assert torch.equal(output, expected[index])

        run_in_threads(work, range(4))
        assert store.verify().ok


def test_processes_share_a_store_while_it_is_in_use(model, tmp_path):
    """A running process finds what another one stores."""
    with KVStore(tmp_path) as store:
        assert restored(model, store) == 0
        code = f"""
import sys
sys.path.insert(0, {LIB!r})
from families import *
from hf_tiered_cache import KVStore
with KVStore({str(tmp_path)!r}) as store:
    store.precompute(build("llama"), prompt(100), progress=False)
"""
        processes.run([sys.executable, "-c", code], check=True, timeout=120)
        assert restored(model, store) == 96


def test_a_prompt_asked_again_at_once_waits_for_its_writing(model, tmp_path, monkeypatch):
    """It is not computed twice."""
    with KVStore(tmp_path) as store:
        publish = type(store._storage.disk).publish

        def slow(*args, **kwargs):
            time.sleep(0.3)
            return publish(*args, **kwargs)

        monkeypatch.setattr(type(store._storage.disk), "publish", slow)
        model.generate(prompt(100), past_key_values=TieredCache(model, store), **GREEDY)
        assert restored(model, store) == 96


def test_a_full_queue_makes_requests_wait_and_loses_nothing(model, tmp_path, monkeypatch):
    with KVStore(tmp_path, queue_memory="1KiB") as store:
        publish = type(store._storage.disk).publish

        def slow(*args, **kwargs):
            time.sleep(0.05)
            return publish(*args, **kwargs)

        monkeypatch.setattr(type(store._storage.disk), "publish", slow)
        for seed in range(6):
            model.generate(prompt(100, seed=seed), past_key_values=TieredCache(model, store, restore=False), **GREEDY)
        store.flush()
        assert sum(row.tokens for row in store.segments() if row.position == 0) == 6 * 96


@pytest.mark.parametrize("mode", ["chunked prefill", "a second turn"])
def test_a_request_does_not_wait_for_its_own_writing(model, tmp_path, monkeypatch, mode):
    with KVStore(tmp_path) as store:
        publish, may_write = type(store._storage.disk).publish, threading.Event()

        def held_up(*args, **kwargs):
            may_write.wait()
            return publish(*args, **kwargs)

        monkeypatch.setattr(type(store._storage.disk), "publish", held_up)
        timer = threading.Timer(60, may_write.set)  # ends a test that fails
        timer.start()
        try:
            cache, arguments = TieredCache(model, store), GREEDY
            if mode == "chunked prefill":
                arguments = GREEDY | {"prefill_chunk_size": 64}
            else:
                model.generate(prompt(300)[:, :200], past_key_values=cache, max_new_tokens=1)
            output = model.generate(prompt(300), past_key_values=cache, **arguments)
            assert not may_write.is_set()
        finally:
            timer.cancel()
            may_write.set()
        assert torch.equal(output, model.generate(prompt(300), **GREEDY))
        store.flush()
        assert restored(model, store, prompt(300)) == 288


def test_chunks_of_a_long_prompt_become_one_segment(model, tmp_path):
    with KVStore(tmp_path) as store:
        model.generate(prompt(300), past_key_values=TieredCache(model, store), prefill_chunk_size=32, **GREEDY)
        store.flush()
        assert sum(row.tokens for row in store.segments()) >= 288
        assert len(store.segments()) <= 2


def test_a_look_up_leaves_other_conversations_alone(model, tmp_path):
    with KVStore(tmp_path) as store:
        caches = [TieredCache(model, store) for _ in range(3)]
        with torch.no_grad():
            for seed, cache in enumerate(caches):
                model(input_ids=prompt(100, seed=seed), past_key_values=cache, logits_to_keep=1)
        assert restored(model, store, prompt(100, seed=1)) == 96
        assert [cache._executor.sequence.recorder.num_unsealed for cache in caches] == [100, 4, 100]


def test_unfinished_chunks_of_one_cache_are_found_by_another(model, tmp_path):
    """A short answer is not written at once; another request of the process finds it all the same."""
    with KVStore(tmp_path) as store:
        first = TieredCache(model, store)
        out = model.generate(prompt(40), past_key_values=first, do_sample=False, max_new_tokens=25)
        assert store.stats.segments == 0
        assert restored(model, store, torch.cat([out, prompt(3, seed=4)], dim=1)) == 64


def test_attach_before_the_first_cache_is_allowed(tmp_path):
    model = build("llama")
    attach(model)
    with KVStore(tmp_path) as store:
        assert restored(model, store) == 0


def test_a_store_shows_its_users_no_internals(tmp_path):
    with KVStore(tmp_path) as store:
        assert {name for name in dir(store) if not name.startswith("_")} == {
            *("path", "ttl", "policy", "codec", "encrypted", "usable", "stats"),
            *("precompute", "lookup", "warm"),
            *("calibrate", "calibrate_prefix", "calibrate_quality"),
            *("relayout", "reorder", "rank", "conversations", "remove_conversation", "documents", "remove_document"),
            *("place", "segments", "models", "pinned", "pin", "remove", "verify", "gc", "clear", "flush", "close"),
        }


def test_stats_of_a_store(model, tmp_path):
    with KVStore(tmp_path, disk_quota="1GiB") as store:
        store.precompute(model, prompt(100), progress=False)
        stats = store.stats
        assert (stats.segments, stats.tokens, stats.segments_written) == (1, 96, 1)
        assert stats.disk.bytes == stats.bytes_written > 96 * 2 * 2 * 2 * 16 * 4
        assert stats.disk.budget == 1 << 30
        assert "96" in str(stats)
        assert stats.as_dict()["tokens"] == 96


NO_TENSORS = """
import sys
from hf_tiered_cache import KVStore

def check(use):
    assert not {"torch", "transformers", "accelerate"} & sys.modules.keys(), use

check("import")
with KVStore(sys.argv[1]) as store:
    check("open")
    for use in sys.argv[2:]:
        eval(use)
        check(use)
check("close")

with KVStore(sys.argv[1]) as store:
    assert store.verify().segments == 1
torch = sys.modules["torch"]
held = {name: vars(module)["torch"] for name, module in list(sys.modules.items())
        if name.startswith("hf_tiered_cache.") and "torch" in vars(module)}
assert len(held) > 20
assert all(module is torch for module in held.values()), held
"""


def test_a_store_imports_torch_for_tensors_only(model, root):
    with KVStore(root) as store:
        store.precompute(model, prompt(40), progress=False)
    uses = [
        "str(store)",
        "store.stats._repr_html_()",
        "store.segments()",
        "store.models()",
        "store.pinned()",
        "store.conversations()",
        "store.documents()",
        "store.gc(dry_run=True)",
        "store.gc()",
        "store.pin([store.segments()[0].id])",
        "store.flush()",
        "store.clear()",
    ]
    process = subprocess.run(
        [sys.executable, "-c", NO_TENSORS, str(root), *uses], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr


def test_a_store_needs_no_transformers(root):
    """Tools that list, check and clean a store start in a third of the time."""
    code = f"""
import sys

sys.modules["transformers"] = None
from hf_tiered_cache import KVStore
from hf_tiered_cache.methods import METHODS, make_method

with KVStore({str(root)!r}) as store:
    print(len(store.segments()), store.verify(), store.gc(), store.stats, store.conversations())
for name in METHODS:
    make_method(name)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
