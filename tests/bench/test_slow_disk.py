"""The emulated disk of the benchmarks: as slow as it should be, and the same bytes."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from lib.slow_disk import SlowDisk, SlowDiskEngine

from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.store.engines import ReadOp
from hf_tiered_cache.store.geometry import ALIGNMENT
from hf_tiered_cache.store.memory import aligned_bytes


def test_reads_share_the_bandwidth_and_their_latencies_overlap():
    clock = time.monotonic()
    disk = SlowDisk(1e6, 0.05)
    end_times = [disk.begin(50_000), disk.begin(100_000)]
    assert end_times[0] >= clock + 0.05 + 0.05
    assert end_times[1] - end_times[0] == pytest.approx(0.1, abs=1e-6)


def test_a_batch_takes_as_long_as_on_that_disk_and_brings_the_same_bytes(tmp_path):
    """Only a lower bound: machines are busy."""
    pages = torch.arange(750, dtype=torch.int16).repeat_interleave(ALIGNMENT // 2)
    (tmp_path / "pages").write_bytes(pages.numpy().tobytes())
    engine = SlowDiskEngine(SlowDisk(10e6, 0.01))
    dest = aligned_bytes(750 * ALIGNMENT)
    started = time.monotonic()
    nbytes = engine.submit([ReadOp(engine.open(str(tmp_path / "pages")), 0, dest)]).result()
    assert time.monotonic() - started >= dest.numel() / 10e6
    assert nbytes == dest.numel()
    assert torch.equal(dest.view(torch.int16), pages)
    assert "10 MB/s" in engine.describe()
    engine.close()


def test_two_batches_at_once_are_no_faster_than_one_after_the_other(tmp_path):
    (tmp_path / "zeros").write_bytes(bytes(1 << 20))
    engine = SlowDiskEngine(SlowDisk(10e6))

    def read(_: int) -> None:
        engine.submit([ReadOp(engine.open(str(tmp_path / "zeros")), 0, aligned_bytes(1 << 20))]).result()

    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2)))
    assert time.monotonic() - started >= 2 * (1 << 20) / 10e6
    engine.close()


@pytest.mark.parametrize("arguments", [(0,), (-1.0,), (1e6, -0.1)])
def test_a_disk_without_speed_is_refused(arguments):
    with pytest.raises(ConfigError):
        SlowDisk(*arguments)
