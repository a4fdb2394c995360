"""Nothing on the way of a restore or a decoded token makes a GPU wait for this thread, or this thread for it.

On a GPU it would be each copy from ordinary memory, each index made on the host, each number read back. Here they are
counted by where they are asked for. One kind must be: a choice comes down, since the host reads the disk.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import CodeType

import numpy as np
import pytest
import torch
from families import build, prompt
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_tiered_cache
from eval.baselines import H2O
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.identity import settings
from hf_tiered_cache.methods import CacheBlend, CacheTune, ContiguousKV, Epic, Exact, Impress, Krul, KVDrive, Passages
from hf_tiered_cache.patches import rope
from hf_tiered_cache.patches.tap import RotaryTap
from hf_tiered_cache.restore.gather import Gather
from hf_tiered_cache.store.memory import to_host

PACKAGE = str(Path(hf_tiered_cache.__file__).parent)
PATCHES = str(Path(sys.modules["hf_tiered_cache.patches.attach"].__file__).parent)
NUMBERS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "equal"}
READS = {*NUMBERS, "cpu", "numpy", "nonzero", "tensor"}
MOVES = {"to", "type_as"}
INDEXES = {"__getitem__", "__setitem__", "index_put_"}
TO_HOST = {to_host.__code__, *(code for code in to_host.__code__.co_consts if isinstance(code, CodeType))}
ON_THE_CPU_ALONE = {("rope.py", "_agree")}
"""What is done to tensors on the CPU, and otherwise on a GPU."""
ONCE = {"request.py", "sequence.py"}
"""What reads the prompt itself, once: its tokens are looked up by the host."""


def our_frame():
    """Return the innermost frame of ours; None for the model's own operations."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((PACKAGE, PATCHES)):
        frame = None if "/transformers/" in frame.f_code.co_filename else frame.f_back
    return frame


class WaitingOperations(TorchDispatchMode):
    """Mode that counts our operations with a result that the host must see, including nested ones."""

    NAMES = re.compile("aten::(_local_scalar_dense|item|equal|is_nonzero|nonzero|masked_select|_?unique)")

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        indexes = args[1] if name.startswith("aten::index") and isinstance(args[1], list | tuple) else ()
        masks = [index for index in indexes if index is not None and index.dtype == torch.bool]
        if (masks or self.NAMES.match(name)) and (frame := our_frame()) is not None:
            self.found[Path(frame.f_code.co_filename).name, frame.f_code.co_name] += 1
        return function(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counter of operations that would make a GPU and a thread wait for each other, by our file and function."""

    def __init__(self):
        super().__init__()
        self.found, self.read_down, self.reads_of_the_prompt = Counter(), 0, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if self._waits(name, args, kwargs or {}):
            self._note(name)
        return function(*args, **(kwargs or {}))

    def _waits(self, name, args, kwargs):
        if name in INDEXES:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = any(isinstance(i, list | np.ndarray) or getattr(i, "dtype", None) == torch.bool for i in index)
            return lists or (name == "__setitem__" and not isinstance(args[2], torch.Tensor))
        if name in MOVES:
            return any(isinstance(a, torch.device | str) for a in (*args[1:], *kwargs.values()))
        return name in READS

    def _note(self, name):
        if (frame := our_frame()) is None:
            return
        function, module = frame.f_code.co_name, Path(frame.f_code.co_filename).name
        if (module, function) in ON_THE_CPU_ALONE:
            return
        if module in ONCE:
            self.reads_of_the_prompt += 1
        elif module == "memory.py":
            self.read_down += frame.f_code in TO_HOST and name == "to"
        elif function != "on":
            self.found[module, function, name] += 1


@pytest.fixture(autouse=True)
def counting_changes_nothing(monkeypatch):
    """Allow the counting mode, which would change the identity of the model if it were the user's."""
    monkeypatch.setattr(settings, "HARMLESS_MODES", (*settings.HARMLESS_MODES, Waits, WaitingOperations))


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=LAYERS)


def ask(model, store, ids, method, new):
    cache = TieredCache(model, store, method=method, record=False)
    with torch.no_grad():
        model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False)
    return cache


def waits(model, store, ids, method, new=1):
    with Waits() as wait_counts:
        cache = ask(model, store, ids, method, new)
    assert cache.stats.host.blocks > 0
    return wait_counts


BUDGET = {"per_head": False, "reorder": False, "period": 2}
PREFIXES = {
    "exact": (Exact(), 0),
    "contiguous_kv": (ContiguousKV(0.25, reorder=False), 4),
    "contiguous_kv periods": (ContiguousKV(0.25, **BUDGET, solo_layers=1), 3),  # the first layer by itself
    "contiguous_kv keys": (ContiguousKV(0.25, **BUDGET, identify="keys"), 2),
    "h2o": (H2O(0.25), 2 * 4),  # of each the tokens, and the attention that they get
    "impress, heads agree": (Impress(0.25, probe_heads=2, alpha=9), 2 * 4),
}


@pytest.mark.parametrize(("method", "reads"), PREFIXES.values(), ids=PREFIXES)
def test_a_prompt_waits_for_its_choices_alone(model, tmp_path, method, reads):
    document = prompt(200)
    ids = torch.cat([document, prompt(24, seed=5)], dim=1)
    with KVStore(tmp_path, engine="posix", spot_checks=0) as store:
        store.precompute(model, document, method=method, progress=False)
        ask(model, store, ids, method, 1)
        wait_counts = waits(model, store, ids, method)
    assert wait_counts.found == {}
    assert wait_counts.read_down == reads
    assert wait_counts.reads_of_the_prompt < 16


def test_rows_of_a_streamed_prefix_are_not_named_from_the_host(model, tmp_path):
    method = KVDrive(budget=0.2, local=16, prefill_tokens=64, exact_from=16, observed=16)
    ids = torch.cat([prompt(200), prompt(200, seed=5), prompt(200)])  # the first and the last share what is fetched
    with KVStore(tmp_path, engine="posix", spot_checks=0) as store, Waits() as wait_counts:
        model.generate(ids, past_key_values=TieredCache(model, store, method=method, progress=False), max_new_tokens=1)
    assert not [site for site in wait_counts.found if site[0] == "streamed.py"]


@pytest.mark.parametrize("family", ["phi", "stablelm"])
def test_a_partial_rotation_is_looked_at_once(tmp_path, family):
    model, document, new = build(family), prompt(200), (2, 4)
    ids = torch.cat([document, prompt(24, seed=5)], dim=1)
    with KVStore(tmp_path, engine="posix", spot_checks=0) as store:
        store.precompute(model, document, progress=False)
        ask(model, store, ids, Exact(), 1)
        assert [waits(model, store, ids, Exact(), count).found for count in new] == [{}, {}]


def test_a_copied_rotary_table_is_looked_at_once(monkeypatch):
    """On several GPUs each layer gets a copy, and comparing it waits for two of them."""
    compared, equal, shared = [], torch.equal, rope.TableCache()
    monkeypatch.setattr(torch, "equal", lambda *tensors: compared.append(1) or equal(*tensors))
    for first in (0, 0, 5, 7):  # at position 0 both tables are the same
        tap, angles = RotaryTap(shared), torch.arange(first, first + 1).view(1, 1, 1)
        tap.tables = [rope.RotaryTable(None, (angles * f).cos(), (angles * f).sin()) for f in (0.1, 0.2)]
        before = len(compared)
        assert (
            tap._table_with(1, *(t.clone() for t in (tap.tables[1].cos, tap.tables[1].sin))) in tap.tables[first // 5 :]
        )
        assert (len(compared) > before) == (first < 7)


@pytest.mark.parametrize("reselect", [False, True])
def test_a_decoded_token_waits_for_its_choices_alone(model, tmp_path, reselect):
    document, method = prompt(200), ContiguousKV(0.25, **BUDGET, reselect=reselect)
    ids = torch.cat([document, prompt(24, seed=5)], dim=1)
    with KVStore(tmp_path, engine="posix", spot_checks=0) as store:
        store.precompute(model, document, method=method, progress=False)
        ask(model, store, ids, method, 4)
        few, many = (waits(model, store, ids, method, new) for new in (4, 6))
    assert few.found == many.found == {}
    assert few.reads_of_the_prompt == many.reads_of_the_prompt
    assert many.read_down - few.read_down == 2 * 2 * reselect  # two tokens, two periods


@pytest.mark.parametrize(
    "method, choices",
    [(CacheTune.paper(), 0), (CacheTune(question=0), 1), (CacheTune(), 2), (CacheBlend(), 1)],
    ids=["paper", "unasked", "asked", "blend"],
)
def test_passages_wait_for_what_is_chosen_alone(model, tmp_path, method, choices):
    """They wait for the question's attention, and for the deviation of tokens."""
    passages = [prompt(64, seed=seed)[0] for seed in (11, 12, 13)]
    ids = torch.cat([*passages[::-1], prompt(24, seed=5)[0]])[None]
    with KVStore(tmp_path, engine="posix", spot_checks=0) as store:
        store.precompute(model, passages, passages=True, method=method, progress=False)
        ask(model, store, ids, method, 1)
        wait_counts = waits(model, store, ids, method)
    assert wait_counts.found == {}
    assert wait_counts.read_down == choices


LAYERS = 4
COUNTS = {"none": 0, "one": 1, "two": 2, "one per layer": LAYERS, "up to four per layer": 4 * LAYERS}
DOCUMENTED = {
    "Exact": (Exact(), "none", "none"),
    "Krul": (Krul(), "none", "none"),
    "ContiguousKV": (ContiguousKV(0.25, reorder=False), "one per layer", "one per layer"),
    "Impress": (Impress(0.25, reorder=False), "up to four per layer", "none"),
    "KVDrive": (KVDrive(0.25, local=16), "one per layer", "one per layer"),
    "CacheTune": (CacheTune(), "two", "none"),
    "CacheBlend": (CacheBlend(), "one", "none"),
    "Epic": (Epic(), "none", "none"),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_waits_of_each_method_are_those_of_the_docs(model, tmp_path, name):
    method, of_prompt, of_token = DOCUMENTED[name]
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    assert f"| `{name}` | {of_prompt} | {of_token} |" in page
    passages, prompts = isinstance(method, Passages), [prompt(64, seed=seed)[0] for seed in (11, 12, 13)]
    ids, counts = torch.cat([*prompts, prompt(24, seed=5)[0]])[None], []
    with KVStore(tmp_path, engine="posix", spot_checks=0) as store:
        store.precompute(
            model, prompts if passages else torch.cat(prompts), passages=passages, method=method, progress=False
        )
        for new in (1, 4, 6):
            ask(model, store, ids, method, new)
            with WaitingOperations() as operations:
                counts.append(waits(model, store, ids, method, new).read_down)
            sites = {site for site in operations.found if site[0] not in ONCE} - ON_THE_CPU_ALONE
            assert sites == set()
    assert counts[0] == COUNTS[of_prompt]
    assert counts[2] - counts[1] == 2 * COUNTS[of_token]


@pytest.mark.parametrize("host", ["64MiB", "0"])
@pytest.mark.parametrize("method", [method for method, _ in PREFIXES.values()], ids=PREFIXES)
def test_what_is_gathered_lies_where_the_model_computes(model, tmp_path, monkeypatch, method, host):
    """This includes tokens that were fetched ahead for a device without memory."""
    document, gathered, add = prompt(200), set(), Gather.add

    def noted(self, shape, blocks, *more):
        gathered.update(slab.untyped_storage().data_ptr() for slab in blocks.slabs)
        return add(self, shape, blocks, *more)

    monkeypatch.setattr(Gather, "add", noted)
    ids = torch.cat([document, prompt(24, seed=5)], dim=1)
    with KVStore(tmp_path, engine="posix", host_memory=host) as store:
        residency = store._storage.residency
        residency._device_types = frozenset({"cpu"})  # as if it were a GPU
        store.precompute(model, document, method=method, progress=False)
        for _ in range(2):
            ask(model, store, ids, method, 2)
        on_host = {
            slab.untyped_storage().data_ptr()
            for pool in residency.host.pools()
            for slab in pool.slabs
            if slab is not None
        }
        assert bool(on_host) == (host != "0")
        assert gathered
        assert not gathered & on_host
        device_bytes, budget = store.stats.device.bytes, store.stats.device.budget
        assert 0 < device_bytes <= budget
