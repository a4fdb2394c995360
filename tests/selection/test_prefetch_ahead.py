"""What a method with a budget fetches ahead of its need: each kind of it, and no more bytes than it was told."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from families import build_deep as build
from families import prompt
from reference import assert_same
from test_selective import PREFIX, ask, fill, question

from eval.baselines import H2O
from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import ContiguousKV, Impress, make_method
from hf_tiered_cache.restore.fetch import Fetcher
from hf_tiered_cache.selection.prompt import PREFETCHED, Prefetched, SelectiveRestore
from hf_tiered_cache.tiers.residency import Residency


@dataclass(frozen=True, kw_only=True)
class Partly(ContiguousKV):
    """Method with blocks of one layer, which prefetches only some kinds of blocks."""

    prefetches: frozenset[Prefetched] = PREFETCHED

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "geometry", replace(self.geometry, layers_per_block=1))


# layers 0 and 1 share a choice, 2 and 3, and 4 and 5; each layer has blocks of its own
SHARED = {"per_head": False, "reorder": False}
TWO = Partly(budget=0.25, period=2, identify="keys", reselect=False, **SHARED)
NOW, AHEAD = False, True


@pytest.fixture(scope="module")
def model():
    return build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def fetched(monkeypatch):
    """Record by requesting layer: whether ahead, which layer's blocks, and whether they are keys for selecting."""
    noted: dict[int, list[tuple[bool, int, str]]] = {}
    layer = -1

    def fetch(self, requests, device, collector, ahead=False, later=(), *, real=Residency.fetch):
        for request in requests:
            group = request.reader.shape.block_groups[request.block_group]
            kind = "keys" if group.identifies else "kv"
            noted.setdefault(layer, []).append((ahead, group.layers[0], kind))
        return real(self, requests, device, collector, ahead, later)

    def restore(self, index, *arguments, real=SelectiveRestore.restore):
        nonlocal layer
        layer = index
        return real(self, index, *arguments)

    monkeypatch.setattr(Residency, "fetch", fetch)
    monkeypatch.setattr(SelectiveRestore, "restore", restore)
    return noted


def asked_by(model, tmp_path, method, fetched, memory="16MiB"):
    ids = prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", host_memory=memory) as store:
        fill(store, model, ids, method)
        store._storage.residency.clear()
        fetched.clear()
        return ask(model, store, question(ids), method)


def test_all_that_can_be_known_is_fetched_ahead(model, tmp_path, fetched):
    asked_by(model, tmp_path, TWO, fetched)
    assert fetched[-1] == [(NOW, 0, "keys")]
    # its own blocks, the later layer's of this choice, and what the next choice is made from
    assert fetched[0] == [(NOW, 0, "kv"), (AHEAD, 1, "kv"), (AHEAD, 2, "keys")]
    assert 1 not in fetched
    assert (NOW, 2, "keys") not in fetched[2]


def test_without_intra_period_prefetch_later_layers_fetch_their_own(model, tmp_path, fetched):
    asked_by(model, tmp_path, replace(TWO, prefetches=frozenset({"keys"})), fetched)
    assert fetched[0] == [(NOW, 0, "kv"), (AHEAD, 2, "keys")]
    assert fetched[1] == [(NOW, 1, "kv")]
    assert fetched[3] == [(NOW, 3, "kv")]


def test_without_prefetch_of_the_next_keys_a_choice_waits_for_them(model, tmp_path, fetched):
    asked_by(model, tmp_path, replace(TWO, prefetches=frozenset({"period"})), fetched)
    assert fetched[0] == [(NOW, 0, "kv"), (AHEAD, 1, "kv")]
    assert fetched[2] == [(NOW, 2, "keys"), (NOW, 2, "kv"), (AHEAD, 3, "kv")]


@pytest.mark.parametrize(
    "method", [replace(TWO, prefetches=frozenset()), replace(TWO, ahead_bytes=0)], ids=["no kind", "0"]
)
def test_nothing_ahead_is_nothing(method, model, tmp_path, fetched):
    asked_by(model, tmp_path, method, fetched)
    assert not any(ahead for fetches in fetched.values() for ahead, _, _ in fetches)
    assert {layer: fetches for layer, fetches in fetched.items() if layer % 2} == {
        -1: [(NOW, 0, "keys")],
        **{layer: [(NOW, layer, "kv")] for layer in (1, 3, 5)},
    }


@pytest.mark.parametrize("method", [H2O(), Impress(reorder=False)], ids=["h2o", "impress"])
def test_baselines_fetch_the_next_layers_keys_ahead(method, model, tmp_path, fetched):
    """As published, the baselines run on a system that loads a layer while the previous one computes."""
    asked_by(model, tmp_path, method, fetched)
    assert [(layer, fetches.count((AHEAD, layer + 1, "kv"))) for layer, fetches in fetched.items() if layer >= 0] == [
        *((layer, 1) for layer in range(5)),
        (5, 0),
    ]


@pytest.mark.parametrize("blocks", [0, 1, 3, 7, 1000])
def test_no_more_is_under_way_than_was_told(blocks, model, tmp_path, monkeypatch):
    size = 16 * 2 * 64 * 4  # bytes of a block of keys; those of keys and values are twice as large
    most, ahead_of_need = 0, {}

    def fetch(self, requests, device, collector, ahead=False, later=(), *, real=Residency.fetch):
        nonlocal most
        for reader, group, chunks in requests if ahead else ():
            nbytes = len(chunks) * reader.shape.block_groups[group].block_bytes
            ahead_of_need[reader.id, group] = ahead_of_need.get((reader.id, group), 0) + nbytes
        most = max(most, sum(ahead_of_need.values()))
        return real(self, requests, device, collector, ahead, later)

    def wait_for(self, units, *, real=Fetcher.wait_for):
        units = list(units)
        for unit in units:
            ahead_of_need.pop((unit.reader.id, unit.block_group.index), None)
        real(self, units)

    ids = prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", host_memory="16MiB") as store:
        fill(store, model, ids, TWO)
        expected, _ = ask(model, store, question(ids), replace(TWO, ahead_bytes=0))
        monkeypatch.setattr(Residency, "fetch", fetch)
        monkeypatch.setattr(Fetcher, "wait_for", wait_for)
        output, _ = ask(model, store, question(ids), replace(TWO, ahead_bytes=blocks * size))
    assert_same(output, expected)
    assert most <= blocks * size
    assert bool(most) == bool(blocks)
    if blocks == 7:
        assert most > 5 * size  # as far as that goes


def test_the_papers_settings_are_one_name_away():
    paper = ContiguousKV.paper(0.1)
    assert (paper.budget, paper.chunk_tokens, paper.period, paper.geometry.layers_per_block) == (0.1, 16, 8, 4)
    assert (paper.identify, paper.solo_layers, paper.reselect, paper.queries) == ("keys", 0, 0, 0)
    assert ContiguousKV.paper(period=4).period == 4


def test_a_papers_settings_have_a_name_in_text_too():
    assert make_method("contiguous_kv.paper") == ContiguousKV.paper()
    assert make_method("contiguous_kv.paper:budget=0.1:period=4") == ContiguousKV.paper(0.1, period=4)
    for wrong in ("exact.paper", "contiguous_kv.published", "nothing.paper"):
        with pytest.raises(ConfigError):
            make_method(wrong)


@pytest.mark.parametrize(("period", "layers"), [(1, 1), (2, 2), (3, 3), (5, 1), (6, 3), (8, 4)])
def test_a_block_holds_layers_of_one_period(period, layers):
    assert ContiguousKV(period=period).geometry.layers_per_block == layers
    assert not ContiguousKV(period=period).geometry_warning(ContiguousKV(period=period).geometry)
