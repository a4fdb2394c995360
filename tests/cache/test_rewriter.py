"""What is decided about a segment while it is rewritten holds for the segment that replaces it."""

from __future__ import annotations

import pytest
from segments import hashes, segment

from hf_tiered_cache import Geometry, KVStore
from hf_tiered_cache.kvstore import storage_of


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("step", ["sidecars.all_of", "publish"])
def test_a_pin_of_another_thread_is_taken_over(tmp_path, monkeypatch, pinned, step):
    """Another thread pins the segment, or unpins it, after a `step` of the rewrite."""
    with KVStore(tmp_path, engine="posix") as store:
        disk, pinned_ids = storage_of(store).disk, []
        disk.publish(*segment(hashes(4)))
        (old,) = store.segments()
        store.pin([old.id], not pinned)
        owner, name = (disk, step) if step == "publish" else (disk.sidecars, "all_of")
        do_step = getattr(owner, name)

        def step_and_pin(*arguments):
            result = do_step(*arguments)
            store.pin([old.id], pinned)
            return result

        monkeypatch.setattr(owner, name, step_and_pin)
        disk.on_kept.append(pinned_ids.extend)
        assert store.relayout(Geometry(layers_per_block=5), progress=False) == 1
        (new,) = store.segments()
        assert new.id != old.id
        assert store.pinned() == ({new.id} if pinned else set())
        assert pinned_ids[-1] == new.id  # a remote that takes pinned segments only is told last that this one is pinned
