"""The size of micro-batches settles on what was quickest."""

import pytest

from hf_tiered_cache.selection.decode import MicroBatches


def run(sizes: MicroBatches, rows: int, seconds: dict[int, float], passes: int, layers: int = 3) -> list[int]:
    sizes_used = []
    for number in range(passes):
        sizes.begin()
        for _ in range(layers):
            size = sizes.size_for(rows)
            sizes.add_time(1000.0 if number == 0 else seconds[size])
        sizes_used.append(size)
    return sizes_used


@pytest.mark.parametrize("quickest", [1, 2, 4, 8])
def test_the_quickest_stays(quickest):
    sizes = MicroBatches()
    sizes_used = run(sizes, 8, {size: 2.0 - (size == quickest) for size in (1, 2, 4, 8)}, 20)
    assert sizes_used[:13] == [8, *(8, 4, 2, 1) * 3]  # the first pass, which finds nothing in place, counts for none
    assert set(sizes_used[13:]) == {quickest} == {sizes.size}


def test_one_slow_pass_does_not_decide():
    sizes, seconds = MicroBatches(), {8: 1.0, 4: 2.0, 2: 2.0, 1: 2.0}
    run(sizes, 8, seconds, 5)
    run(sizes, 8, seconds | {8: 50.0}, 1)
    assert set(run(sizes, 8, seconds, 20)[10:]) == {8}


def test_odd_numbers_of_rows_and_single_ones():
    assert run(MicroBatches(), 6, dict.fromkeys((6, 3, 2, 1), 1.0), 5)[1:] == [6, 3, 2, 1]
    alone = MicroBatches()
    assert set(run(alone, 1, {1: 1.0}, 9)) == {1} == {alone.size}


def test_another_batch_is_measured_anew():
    sizes = MicroBatches()
    run(sizes, 4, {4: 2.0, 2: 2.0, 1: 1.0}, 20)
    assert sizes.size == 1
    assert set(run(sizes, 2, {2: 1.0, 1: 2.0}, 20)[8:]) == {2}
