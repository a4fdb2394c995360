"""Slot pools against a model that keeps a plain dictionary: budgets, evictions, pins."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.store.geometry import ALIGNMENT
from hf_tiered_cache.tiers import pool as pool_module
from hf_tiered_cache.tiers import slabs as slabs_module
from hf_tiered_cache.tiers.pool import SLAB_BYTES, Tier
from hf_tiered_cache.tiers.scores import POLICIES, ScoreTable, Usage, make_policy
from hf_tiered_cache.tiers.slabs import FREE, RESERVED, SlotPool

SIZES = (4096, 8192)
CHUNKS = 12


class TierMachine(RuleBasedStateMachine):
    """Random fetches of blocks of two sizes, with a dictionary of the expected blocks in order of use."""

    @initialize(budget=st.integers(0, 40), policy=st.sampled_from(sorted(POLICIES)), slab=st.integers(1, 6))
    def start(self, budget, policy, slab):
        self.slab_before = pool_module.SLAB_BYTES
        pool_module.SLAB_BYTES = slab * 4096
        self.taken = 0
        self.gone: list[tuple] = []
        self.policy = policy
        self.tier = Tier("host", budget * 4096, make_policy(policy), self.allocate, self.evicted)
        self.held: dict[tuple, list[int]] = {}  # (segment, block group, chunk) -> [last used, uses]
        self.pinned: list[tuple] = []
        self.scores: dict[tuple, list[float]] = {}  # (segment, block group, chunk) -> [importance, accesses], for ever

    def teardown(self):
        if hasattr(self, "slab_before"):
            pool_module.SLAB_BYTES = self.slab_before

    def allocate(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def evicted(self, owner, count, blocks, usage):
        chunks, runs = blocks.chunks, blocks.runs()
        assert len(usage.last_used) == len(chunks)
        assert count == CHUNKS
        listed = [first + i for first, blocks in runs for i in range(len(blocks))]
        assert listed == chunks.tolist() == sorted(chunks.tolist())
        for first, blocks in runs:
            for i, block in enumerate(blocks):
                assert block[:8].view(torch.int64).item() == self.stamp(owner, first + i)
        self.gone += [(*owner, chunk) for chunk in chunks.tolist()]

    @staticmethod
    def stamp(owner, chunk):
        return hash((*owner, int(chunk))) % (1 << 60)

    @rule(
        segment=st.sampled_from("abc"),
        block_group=st.integers(0, 1),
        first=st.integers(0, CHUNKS - 1),
        count=st.integers(1, CHUNKS),
        keep=st.booleans(),
    )
    def fetch(self, segment, block_group, first, count, keep):
        owner, block_bytes = (segment, block_group), SIZES[block_group]
        chunks = np.arange(first, min(CHUNKS, first + count))
        self.tier.clock += 1
        slots = self.tier.lookup(owner, chunks)
        assert [(*owner, c) in self.held for c in chunks.tolist()] == (slots >= 0).tolist()
        pool = self.tier.pool(block_bytes)
        present = slots >= 0
        if present.any():
            found_pool, found_slots, is_held = self.tier.find(owner, chunks)
            assert found_pool is pool and np.array_equal(found_slots, slots[present]) and (is_held == present).all()
            pool.pin(found_slots)
            pool.use(found_slots, self.tier.clock)
            for slot, chunk in zip(slots[present], chunks[present], strict=True):
                self.held[(*owner, int(chunk))][0] = self.tier.clock
                self.held[(*owner, int(chunk))][1] += 1
                assert self.memory(pool, slot)[:8].view(torch.int64).item() == self.stamp(owner, chunk)
        missing_chunks = chunks[~present]
        self.gone.clear()
        pinned_before = {key for _, _, keys in self.pinned for key in keys} | {
            (*owner, int(c)) for c in chunks[present]
        }
        _, new, _ = self.tier.acquire(block_bytes, len(missing_chunks))
        assert not pinned_before & set(self.gone)
        self.check_victims(pool, block_group)
        for key in self.gone:
            del self.held[key]
        missing_chunks = missing_chunks[: len(new)]
        pool.chunk[new] = missing_chunks
        for slot, chunk in zip(new, missing_chunks, strict=True):
            self.memory(pool, slot)[:8].view(torch.int64).fill_(self.stamp(owner, chunk))
        if len(new):
            self.tier.insert(pool, new, owner, missing_chunks, CHUNKS)
            assert np.array_equal(self.tier.lookup(owner, missing_chunks), new)
        for chunk in missing_chunks.tolist():
            self.held[(*owner, chunk)] = [self.tier.clock, 1]
        held_slots = np.concatenate([slots[present], new]).astype(np.int64)
        keys = [(*owner, int(c)) for c in np.concatenate([chunks[present], missing_chunks])]
        if keep:
            self.pinned.append((pool, held_slots, keys))
        else:
            pool.unpin(held_slots)

    def check_victims(self, pool, block_group):
        """Assert that evicted blocks of one size scored no higher than evictable blocks that stayed."""
        if not self.gone or any(SIZES[key[1]] != pool.block_bytes for key in self.gone):
            return
        pinned = {key for _, _, keys in self.pinned for key in keys}
        stayed = [
            k
            for k in self.held
            if k[1] == block_group and k not in pinned and k not in self.gone and self.held[k][0] < self.tier.clock
        ]
        score = {
            "lru": lambda k: (self.held[k][0],),
            "lfu": lambda k: tuple(self.held[k][::-1]),
        }.get(self.policy, lambda k: (np.prod(self.scores.get(k, (0, 0))), self.held[k][0]))
        if stayed:
            assert max(map(score, self.gone)) <= min(map(score, stayed))

    def memory(self, pool, slot):
        return pool.blocks(np.array([slot]), np.array([0])).runs()[0][1][0]

    @rule(
        owner=st.tuples(st.sampled_from("abc"), st.integers(0, 1)),
        chunks=st.sets(st.integers(0, CHUNKS - 1), min_size=1),
        mass=st.sampled_from([0.25, 0.5, 2.0]),
    )
    def note(self, owner, chunks, mass):
        """Report that a selector chose these chunks, in memory or not."""
        ascending = np.array(sorted(chunks))
        share = np.full(len(ascending), 0.5)
        self.tier.rescore(self.tier._scores.note([(owner, CHUNKS, ascending, np.full(len(ascending), mass), share)]))
        for chunk in chunks:
            score = self.scores.setdefault((*owner, chunk), [0.0, 0.0])
            score[0] = 0.5 if self.policy == "importance" else score[0] + mass  # a moving average of the same share
            score[1] += 1

    @rule()
    def unpin(self):
        if self.pinned:
            pool, slots, _ = self.pinned.pop(0)
            pool.unpin(slots)

    @invariant()
    def within_budget(self):
        if hasattr(self, "tier"):
            real = sum(slab.numel() for p in self.tier._pools.values() for slab in p.slabs if slab is not None)
            assert real <= self.tier.allocated <= self.tier.budget

    @invariant()
    def tables_and_slots_agree(self):
        if not hasattr(self, "tier"):
            return
        for owner, number, pool, slots in self.tier._tables.values():
            for chunk, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    assert pool.owner[slot] == number
                    assert pool.chunk[slot] == chunk
                    assert (*owner, chunk) in self.held
        assert sum((table.slots >= 0).sum() for table in self.tier._tables.values()) == len(self.held)

    @invariant()
    def masks_are_those_of_owners_and_pins(self):
        for pool in self.tier._pools.values() if hasattr(self, "tier") else ():
            assert np.array_equal(pool.free, np.flatnonzero(pool.owner == FREE))
            assert np.array_equal(pool.is_evictable, (pool.owner >= 0) & (pool.pins == 0))
            newest = [pool.last_used[pool.slots_of(index)].max() for index in range(len(pool.slabs))]
            assert pool.newest.tolist() == newest

    @rule(count=st.integers(1, 20), few=st.integers(0, 6))
    def rank(self, count, few):
        """Assert that the first victims are those of a ranking of all slots, however old the pool's ranking is."""
        for pool in self.tier._pools.values():
            slots = np.flatnonzero(pool.is_evictable)
            expected = slots[self.tier.policy.victims(pool.usage(slots), count)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(slabs_module, "_FEW_SLOTS", few)
                assert np.array_equal(pool.first_victims(self.tier.policy, count), expected)


TestTier = TierMachine.TestCase
TestTier.settings = settings(stateful_step_count=30)


def test_runs_break_at_slabs_at_gaps_and_between_chunks():
    pool = SlotPool(4096)
    pool.add_slab(torch.zeros(4, 4096, dtype=torch.uint8))
    pool.add_slab(torch.zeros(4, 4096, dtype=torch.uint8))
    runs = pool.blocks(np.array([1, 2, 3, 4, 6, 7]), np.array([0, 1, 2, 3, 4, 6])).runs()
    assert [(first, len(blocks)) for first, blocks in runs] == [(0, 3), (3, 1), (4, 1), (6, 1)]
    assert runs[1][1].data_ptr() == pool.slabs[1].data_ptr()


def test_a_block_brought_in_twice_is_kept_once():
    tier = Tier("host", 1 << 20, make_policy("lru"), lambda n: torch.zeros(n, dtype=torch.uint8))
    chunks = np.arange(3)
    pool, first, _ = tier.acquire(4096, 3)
    _, second, _ = tier.acquire(4096, 3)
    tier.insert(pool, first, ("s", 0), chunks, 3)
    tier.insert(pool, second, ("s", 0), chunks, 3)
    assert (pool.owner[first] >= 0).all()
    assert (pool.owner[second] == RESERVED).all()
    tier.discard(pool, second)
    assert (pool.owner[second] == FREE).all()
    assert tier.lookup(("s", 0), chunks).tolist() == first.tolist()


def test_a_pool_in_use_takes_memory_from_one_that_is_not():
    """Another model's blocks, of another size, were used longer ago."""
    tier = Tier("host", 20 * (4096 + ALIGNMENT), make_policy("lru"), lambda n: torch.zeros(n, dtype=torch.uint8))
    tier.clock = 1
    small, slots, _ = tier.acquire(4096, 30)
    tier.insert(small, slots, ("old", 0), np.arange(len(slots)), len(slots))
    small.unpin(slots)
    tier.clock = 2
    large, slots, _ = tier.acquire(8192, 8)
    assert len(slots) == 8
    assert tier.allocated <= tier.budget
    assert not any(slab is not None for slab in small.slabs)
    tier.insert(large, slots, ("new", 0), np.arange(8), 8)
    assert tier.lookup(("old", 0), np.arange(30)).max() == -1


@pytest.mark.parametrize("block_bytes", [4096, 65536, 3 * 65536, 1 << 20])
def test_a_slab_with_its_alignment_is_no_larger_than_a_power_of_two(block_bytes):
    """PyTorch page-locks whole powers of two: one byte more would cost as much again."""
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes + ALIGNMENT)
        return torch.empty(nbytes, dtype=torch.uint8)

    tier = Tier("host", 8 * SLAB_BYTES, make_policy("lru"), allocate)
    tier.acquire(block_bytes, 2 * SLAB_BYTES // block_bytes)
    assert len(sizes) >= 2
    assert SLAB_BYTES - block_bytes <= sizes[0] <= SLAB_BYTES
    assert SLAB_BYTES.bit_count() == 1


@pytest.mark.parametrize("budget", [1 << 16, 5 << 20, 8 << 20, 65 << 20, 1 << 30])
def test_blocks_of_several_sizes_find_room_in_a_small_budget(budget):
    """No size takes all of it at its first block, unless it is smaller than slabs are worth while."""
    tier = Tier("host", budget, make_policy("lru"), lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    for block_bytes in (4096, 8192):
        assert len(tier.acquire(block_bytes, 1)[1]) == (1 if budget >= 8 << 20 or block_bytes == 4096 else 0)
    assert tier.allocated <= budget


@pytest.mark.parametrize("budget", [12, 16, 32, 64, 79, 80, 127, 128, 512])
def test_slabs_for_direct_reads_are_allocations_of_their_own(budget):
    """PyTorch cuts what is smaller than 10 MiB out of 20 MiB, and another address is registered than is read to."""
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes + ALIGNMENT)
        return torch.empty(nbytes, dtype=torch.uint8)

    tier = Tier("device", budget << 20, make_policy("lru"), allocate, least_slab=pool_module.DIRECT_SLAB_BYTES)
    assert len(tier.acquire(32 << 10, 1)[1]) == 1
    assert 10 << 20 <= sizes[0] <= min(SLAB_BYTES, budget << 20)


def test_a_tier_goes_on_with_the_memory_it_could_get(caplog, monkeypatch):
    """It says so once, and asks again later."""
    sizes, clock = [], [1000.0]
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def allocate(nbytes):
        sizes.append(nbytes)
        if len(sizes) > 1:
            raise torch.OutOfMemoryError("planted")
        return torch.zeros(nbytes, dtype=torch.uint8)

    tier = Tier("device", 8 * SLAB_BYTES, make_policy("lru"), allocate)
    tier.clock = 1
    count = SLAB_BYTES // 65536
    pool, slots, _ = tier.acquire(65536, 2 * count)
    assert len(slots) == count - 1
    assert tier.budget == tier.allocated <= SLAB_BYTES
    tier.insert(pool, slots, ("s", 0), np.arange(len(slots)), len(slots))
    pool.unpin(slots)
    assert len(tier.acquire(65536, 2 * count)[1]) == count - 1  # others go instead
    assert len(sizes) == 2
    clock[0] += pool_module.RETRY_SECONDS
    assert tier.budget == 8 * SLAB_BYTES
    assert len(tier.acquire(65536, 2 * count)[1]) == 0
    assert len(sizes) == 3
    clock[0] += pool_module.RETRY_SECONDS
    monkeypatch.setattr(tier, "allocate", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    assert len(tier.acquire(65536, count // 2)[1]) == count // 2
    assert ["planted" in record.message for record in caplog.records] == [True]


def test_lru_and_lfu_disagree_where_they_should():
    usage = Usage(np.array([5, 1, 9, 3]), np.array([1, 8, 2, 1]), *np.zeros((2, 4)))
    assert make_policy("lru").victims(usage, 1).tolist() == [1]
    assert sorted(make_policy("lfu").victims(usage, 2).tolist()) == [0, 3]
    assert make_policy("lfu").victims(usage, 1).tolist() == [3]  # of equals, the one used longest ago
    assert len(make_policy("lru").victims(usage, 9)) == 4
    assert len(make_policy("lru").victims(usage, 0)) == 0


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 3)), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 3)), max_size=6),
    st.integers(0, 6),
)
def test_the_host_keeps_what_scores_higher_than_what_it_has(arriving, resident, free):
    """The reference is a heap; blocks arrive one after the other, the best first."""
    usage = [
        Usage(*np.zeros((2, len(blocks)), np.int64), *np.array(blocks, float).reshape(-1, 2).T)
        for blocks in (arriving, resident)
    ]
    heap, expected = sorted(i * f for i, f in resident), [False] * len(arriving)
    slots = free
    for index in sorted(range(len(arriving)), key=lambda i: -arriving[i][0] * arriving[i][1]):
        if slots:
            slots -= 1
        elif heap and heap[0] < arriving[index][0] * arriving[index][1]:
            heap.pop(0)
        else:
            continue
        expected[index] = True
    order = np.argsort(usage[1].importance * usage[1].accesses)[: max(0, len(arriving) - free)]
    usage[1] = Usage(*(getattr(usage[1], field.name)[order] for field in fields(Usage)))  # as they would be evicted
    is_kept = make_policy("attention").keeps(*usage, free)
    score = np.array([i * f for i, f in arriving])
    assert sorted(score[is_kept]) == sorted(score[np.array(expected)])
    assert make_policy("lru").keeps(*usage, free).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20), st.integers(0, 22))
def test_attention_evicts_the_first_ones_in_order_of_score_and_use(blocks, count):
    score, last_used = np.array(blocks, np.int64).reshape(-1, 2).T
    usage = Usage(last_used, np.ones_like(score), score.astype(float), np.ones(len(score)))
    expected = sorted(range(len(blocks)), key=lambda block: (*blocks[block], block))[:count]
    assert make_policy("attention").victims(usage, count).tolist() == expected


def test_scores_outlive_the_process_in_bytes():
    table, other_table = (ScoreTable(make_policy("attention").learn) for _ in range(2))
    table.note([(("s", 2), 5, np.array([1, 4]), np.array([0.5, 0.25]), np.ones(2))])
    table.note([(("s", 2), 5, np.array([1]), np.array([0.5]), np.ones(1))])
    changes = table.changes()
    assert table.changes() == []
    other_table.load(changes)
    for scores in (table, other_table):
        assert scores.of(("s", 2), np.array([0, 1, 4])).tolist() == [[0, 1, 0.25], [0, 2, 1]]
        assert scores.of(("t", 0), np.array([3])).tolist() == [[0], [0]]


def test_importance_is_a_moving_average_of_the_chosen_share():
    table = ScoreTable(make_policy("importance").learn)
    for share in (0.5, 1.0, 0.25):
        table.note([(("s", 0), 3, np.array([1]), np.array([9.0]), np.array([share]))])
    assert table.of(("s", 0), np.array([0, 1])).tolist() == [[0, 0.5], [0, 3]]


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'fifo'.*lru, lfu, attention"):
        make_policy("fifo")


@given(
    st.lists(st.tuples(st.sampled_from([FREE, RESERVED, 0, 1]), st.integers(0, 2), st.integers(0, 9)), min_size=1),
    st.integers(0, 14),
)
def test_the_first_victims_are_evictable_and_used_longest_ago(slots, count):
    pool = SlotPool(8)
    pool.add_slab(torch.zeros(len(slots), 8, dtype=torch.uint8))
    pool.owner[:], pins, pool.last_used[:] = np.array(slots, np.int64).T
    pool.mend([np.flatnonzero(pins >= most) for most in (1, 2)])
    candidates = [slot for slot, (state, num_pins, _) in enumerate(slots) if state >= 0 and not num_pins]
    expected = sorted(candidates, key=lambda slot: (pool.last_used[slot], slot))[:count]
    assert pool.first_victims(make_policy("lru"), count).tolist() == expected
