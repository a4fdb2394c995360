"""Tokens are picked from wherever their blocks lie, and come to the columns that were asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from hf_tiered_cache.restore.fetch import FetchUnit
from hf_tiered_cache.restore.gather import Gather
from hf_tiered_cache.store.geometry import Geometry, KVLayout, LayerKV, block_groups
from hf_tiered_cache.store.shape import SegmentShape, TokenTables
from hf_tiered_cache.tiers.slabs import Blocks

LAYERS, HEADS, DIM = 3, 4, 8
LAYOUT = KVLayout((LayerKV(HEADS, DIM, HEADS, DIM),) * LAYERS, torch.float32)


def made(tokens, geometry, ordered, seed):
    """Create a segment's shape, its keys and values `[layers, heads, tokens, dim]`, and blocks by KV cache group."""
    random = np.random.default_rng(seed)
    importance = random.random((LAYERS, 1, tokens))
    tables = TokenTables.by_importance(importance, block_groups(LAYOUT, geometry)) if ordered else None
    shape = SegmentShape(LAYOUT, geometry, tokens, tables)
    kv = {name: torch.from_numpy(random.random((LAYERS, HEADS, tokens, DIM), np.float32)) for name in ("key", "value")}
    memory = []
    for block_group in shape.block_groups:
        blocks = torch.zeros(shape.chunks_in(block_group), block_group.block_bytes, dtype=torch.uint8)
        for part in block_group.parts:
            heads = slice(part.first_head, part.first_head + part.heads)
            shape.pack(blocks, block_group, part, kv[part.tensor][part.layer, heads])
        memory.append(blocks)
    return shape, kv, memory


def scattered(blocks, chunks, slabs, random):
    """Place the blocks of some chunks in slots of slabs in any order, as in used memory."""
    room = len(chunks) + 2
    memory = tuple(torch.zeros(room, blocks.shape[1], dtype=torch.uint8) for _ in range(slabs))
    slab = random.integers(0, slabs, len(chunks))
    slot = np.concatenate([random.permutation(room)[: len(chunks)] if len(chunks) else []]).astype(np.int64)
    for chunk, a, b in zip(chunks, slab, slot, strict=True):
        memory[a][b] = blocks[chunk]
    return Blocks(np.asarray(chunks), memory, slab, slot)


def heads_of(block_group):
    return {head for part in block_group.parts for head in range(part.first_head, part.first_head + part.heads)}


geometries = st.builds(
    Geometry,
    chunk_tokens=st.sampled_from([4, 16]),
    layers_per_block=st.integers(1, 3),
    heads_per_block=st.sampled_from([None, 1, 3]),
    split_kv=st.booleans(),
)


@given(
    geometry=geometries,
    tokens=st.integers(1, 70),
    ordered=st.booleans(),
    slabs=st.integers(0, 3),
    sets=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_picked_is_what_was_packed(geometry, tokens, ordered, slabs, sets, seed):
    """Blocks are in one slab in order (0 slabs) or in any slots, with tokens of all heads or of each."""
    random = np.random.default_rng(seed)
    segments = [made(tokens, geometry, ordered, seed + i) for i in range(2)]
    count = int(random.integers(1, tokens + 1))
    # of each segment and head so many tokens, side by side behind those of the first
    picks = [[np.sort(random.permutation(tokens)[:count]) for _ in range(HEADS if sets else 1)] for _ in segments]
    if random.random() < 0.5:
        picks = [[np.arange(tokens - count, tokens) for _ in pick] for pick in picks]
    for number, block_group in enumerate(segments[0][0].block_groups):
        gather = Gather(segments[0][0], block_group)
        for at, ((shape, _, memory), pick) in enumerate(zip(segments, picks, strict=True)):
            chunks = shape.chunks_of(block_group, np.unique(np.concatenate(pick)))
            if slabs:
                blocks = scattered(memory[number], chunks, slabs, random)
            else:
                blocks = Blocks.alone(chunks, memory[number][chunks])
            if not sets:
                gather.add(shape, blocks, pick[0], np.arange(count) + at * count)
            for head in heads_of(block_group) if sets else ():
                gather.add(shape, blocks, pick[head], np.arange(count) + at * count, head)
        for part in block_group.parts:
            target = torch.full((HEADS, 2 * count, DIM), -1.0)
            gather.copy([(part, target)])
            for head in range(part.first_head, part.first_head + part.heads):
                expected = [
                    kv[part.tensor][part.layer, head, pick[head if sets else 0]]
                    for (_, kv, _), pick in zip(segments, picks, strict=True)
                ]
                assert torch.equal(target[head], torch.cat(expected))
            other_heads = [head for head in range(HEADS) if not 0 <= head - part.first_head < part.heads]
            assert bool((target[other_heads] == -1).all())


@pytest.mark.parametrize("ordered", [False, True])
def test_one_gather_copies_the_single_heads_of_a_layer(ordered):
    """Each head has its own tokens, blocks and order."""
    random = np.random.default_rng(0)
    importance = random.random((LAYERS, HEADS, 40))
    geometry = Geometry(8, 1, heads_per_block=1)
    tables = TokenTables.by_importance(importance, block_groups(LAYOUT, geometry)) if ordered else None
    shape = SegmentShape(LAYOUT, geometry, 40, tables)
    kv = {name: torch.from_numpy(random.random((HEADS, 40, DIM), np.float32)) for name in ("key", "value")}
    groups = [group for group in shape.block_groups if group.layers == (1,)]
    gather, chunks = Gather(shape, groups[0]), np.arange(5)
    slab = torch.zeros(len(groups) * len(chunks), groups[0].block_bytes, dtype=torch.uint8)
    picks = [np.sort(random.permutation(40)[:11]) for _ in groups]
    for head, (group, tokens) in enumerate(zip(groups, picks, strict=True)):
        slots = head * len(chunks) + random.permutation(len(chunks))
        memory = torch.zeros(len(chunks), group.block_bytes, dtype=torch.uint8)
        for part in group.parts:
            shape.pack(memory, group, part, kv[part.tensor][head : head + 1])
        slab[slots] = memory
        blocks = Blocks(chunks, (slab,), np.zeros(len(chunks), np.int64), slots)
        gather.add(shape, blocks, tokens, np.arange(len(tokens)), head, group)
    for part in groups[0].parts:
        target = torch.full((HEADS, 11, DIM), -1.0)
        gather.copy([(part, target)])
        assert all(torch.equal(target[head], kv[part.tensor][head, tokens]) for head, tokens in enumerate(picks))
    assert len(gather._picked) == 1  # one copy of each tensor


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sets", [1, HEADS])
def test_more_runs_take_no_more_steps(sets):
    """Every second block of one slab takes the same number of steps for 8 runs as for 64."""
    geometry, steps = Geometry(4, 1), []
    for chunks in (16, 128):
        shape, _, block_groups = made(chunks * 4, geometry, False, 0)
        fetched_chunks = np.arange(0, chunks, 2)
        tokens = (fetched_chunks[:, None] * 4 + np.arange(3)).ravel()
        gather = Gather(shape, shape.block_groups[0])
        blocks = Blocks(fetched_chunks, (block_groups[0],), np.zeros(len(fetched_chunks), np.int64), fetched_chunks)
        for head in range(sets):
            gather.add(shape, blocks, tokens, np.arange(len(tokens)), head if sets > 1 else -1)
        target = torch.empty(HEADS, len(tokens), DIM)
        gather.copy([(shape.block_groups[0].parts[0], target)])
        with Calls() as calls:
            gather.copy([(shape.block_groups[0].parts[0], target)])
        steps.append(calls.count)
    assert steps[0] == steps[1]


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3], [1, 5, 40]], ids=["a run", "scattered"])
def test_blocks_that_were_not_fetched_are_not_taken_for_others(tokens):
    """A missing fetch raises an error, and never returns other tokens' KV."""
    shape, _, memory = made(64, Geometry(8, 1), False, 0)
    gather, chunks = Gather(shape, shape.block_groups[0]), np.array([1, 2, 5])
    blocks = Blocks.alone(chunks, memory[0][chunks])
    with pytest.raises(LookupError, match="not fetched"):
        gather.add(shape, blocks, np.array(tokens), np.arange(len(tokens)))
        gather.copy([(shape.block_groups[0].parts[0], torch.empty(HEADS, len(tokens), DIM))])


class Read:
    """Reader with the attributes that a unit needs."""

    def __init__(self, shape):
        self.shape = shape


@given(geometry=geometries, tokens=st.integers(1, 70), ordered=st.booleans(), seed=st.integers(0, 1000))
def test_bytes_are_counted_once_for_each_token_head_and_layer(geometry, tokens, ordered, seed):
    """The reference is a mask over all tokens, independent of how often they were used."""
    random = np.random.default_rng(seed)
    shape, _, _ = made(tokens, geometry, ordered, seed)
    for group in shape.block_groups:
        unit, is_used = FetchUnit(Read(shape), group), np.zeros((LAYERS, HEADS, tokens), bool)
        for _ in range(int(random.integers(0, 4))):
            layers = [layer for layer in group.layers if random.random() < 0.7]
            sets = [np.flatnonzero(random.random(tokens) < 0.3) for _ in range(random.choice([1, HEADS]))]
            unit.use(layers, sets)
            for head in range(HEADS):
                is_used[np.ix_(layers, [head], sets[head % len(sets)])] = True
        chunks = np.flatnonzero(random.random(shape.chunks_in(group)) < 0.5)
        inside = np.isin(shape.slot_of_token(group, np.arange(tokens)) // geometry.chunk_tokens, chunks)
        expected = sum(
            int((is_used[part.layer, part.first_head : part.first_head + part.heads] & inside).sum()) * DIM * 4
            for part in group.parts
        )
        assert unit.bytes_used(chunks) == expected
        assert unit.tokens_used().tolist() == np.flatnonzero(is_used.any((0, 1))).tolist()


@given(first=st.integers(0, 69), seed=st.integers(0, 1000), split=st.booleans())
def test_what_is_held_from_a_token_on_is_copied_in_runs(first, seed, split):
    """Tokens in order are copied in runs, although slots do not have the tokens' numbers."""
    plain, kv, _ = made(70, Geometry(16, 1, split_kv=split), False, seed)
    shape = SegmentShape(LAYOUT, plain.geometry, 70, TokenTables.by_pairs([first, 0, 70], {}, plain.block_groups, 70))
    for block_group in shape.block_groups:
        tokens = shape.tokens_by_slot(block_group)
        blocks = torch.zeros(shape.chunks_in(block_group), block_group.block_bytes, dtype=torch.uint8)
        for part in block_group.parts:
            shape.pack(blocks, block_group, part, kv[part.tensor][part.layer])
        random = np.random.default_rng(seed)
        tail = tokens[int(random.integers(0, len(tokens))) :] if len(tokens) else tokens
        gather = Gather(shape, block_group)
        chunks = shape.chunks_of(block_group, tail)
        gather.add(shape, Blocks.alone(chunks, blocks[chunks]), tail, np.arange(len(tail)) + 3)
        assert not gather._added
        for part in block_group.parts:
            target = torch.full((HEADS, len(tail) + 3, DIM), -1.0)
            gather.copy([(part, target)])
            assert torch.equal(target[:, 3:], kv[part.tensor][part.layer][:, tail]) and (target[:, :3] == -1).all()
