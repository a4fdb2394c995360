"""Parts of other packages: found by their names wherever a name is asked for, and refused with a reason."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

import numpy as np
import processes
import pytest
import torch
from families import build, prompt
from test_selective import ask, fill, question

from hf_tiered_cache import KVStore, TieredCache, plugins
from hf_tiered_cache.errors import ConfigError, StoreError
from hf_tiered_cache.methods import (
    METHODS,
    BudgetMethod,
    Epic,
    Exact,
    Impress,
    KVDrive,
    Method,
    Passages,
    describe_method,
    make_method,
    register_method,
)
from hf_tiered_cache.plugins import Registry
from hf_tiered_cache.selection import DECODE_INDEXES, register_index
from hf_tiered_cache.selection.clusters import ClusterIndex
from hf_tiered_cache.selection.decode_index import DecodeIndex
from hf_tiered_cache.selection.prompt import PREFETCHED
from hf_tiered_cache.selection.selectors import Selection, SelectionInput, Selector, top_of_each
from hf_tiered_cache.store.backends import BACKENDS, register_backend
from hf_tiered_cache.store.codecs import CODECS, Field, make_codec, register_codec
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.store.objects import ObjectBackend

FAMILY = "qwen2"

DOCS = Path(__file__).parent.parent / "docs"
PREFIX = 200


def fault(name, part):
    return "" if isinstance(part, int) else "it is not a number"


@pytest.fixture
def installed(monkeypatch):
    """Return a registry of numbers with one built in, and the entry points of installed packages."""

    def with_entries(**entries):
        points = [EntryPoint(name, value, "group") for name, value in entries.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points)
        return Registry("number", "group", {"zero": 0}, fault)

    return with_entries


def test_a_plug_in_is_loaded_when_it_is_asked_for(installed):
    numbers = installed(large="sys:maxsize", broken="nowhere:x", wrong="sys:path")
    assert list(numbers) == ["zero", "large", "broken", "wrong"] and len(numbers) == 4
    assert numbers["large"] == sys.maxsize and numbers["zero"] == 0
    assert "broken" in numbers and "other" not in numbers
    with pytest.raises(ConfigError, match="number broken of nowhere:x cannot be loaded: ModuleNotFoundError"):
        numbers["broken"]
    with pytest.raises(ConfigError, match="sys:path of sys:path is not a number: it is not a number"):
        numbers["wrong"]
    with pytest.raises(KeyError):
        numbers["other"]


def test_a_plug_in_cannot_take_a_name_of_this_package(installed, caplog):
    numbers = installed(zero="sys:maxsize")
    assert numbers["zero"] == 0 and list(numbers) == ["zero"]
    assert "the number zero of sys:maxsize is ignored" in caplog.text


def test_names_are_registered_once(installed):
    numbers = installed()
    numbers.register("one", 1)
    numbers.register("one", 1)
    assert numbers["one"] == 1 and numbers.name_of(1) == "one" and numbers.name_of(2) is None
    for name, part, reason in [
        ("one", 2, "already exists; choose another one than .*one"),
        ("a:b", 3, "use letters"),
        (Path, "path", "use letters"),  # the arguments in the wrong order
        ("two", "2", "not a number"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            numbers.register(name, part)


def test_a_registered_part_replaces_one_of_a_package_loaded_or_not(installed):
    for is_loaded in (False, True):
        numbers = installed(large="sys:maxsize")
        if is_loaded:
            assert numbers["large"] == sys.maxsize
        numbers.register("large", 7)
        assert numbers["large"] == 7
        with pytest.raises(ConfigError, match="already exists"):
            numbers.register("large", 8)


def test_a_method_is_known_by_its_entry_point_before_that_is_loaded(installed):
    numbers = installed(path=f"{Method.__module__}:{Method.__qualname__}")
    assert numbers.name_of(Method) == "path"


def test_a_part_of_another_kind_is_no_backend(monkeypatch, run):
    """On the command line, one sentence says so."""
    entry = EntryPoint("another", f"{Exact.__module__}:Exact", "hf_tiered_cache.backends")
    monkeypatch.setitem(vars(BACKENDS), "_installed", {"another": entry})
    reason = f"{entry.value} of {entry.value} is not a backend: it does not derive from ObjectBackend"
    assert run("ls", "another://x") == (2, "", f"hf-tiered-cache: {reason}\n")


class Plain(Exact):
    """Method without the decorator."""


@dataclass(frozen=True, kw_only=True)
class Demanding(Exact):
    """Method that cannot be created without arguments."""

    size: int


@dataclass(frozen=True, kw_only=True)
class Unplanned(Method):
    """Method that states nothing about what to compute."""


@dataclass(frozen=True, kw_only=True)
class Unselecting(BudgetMethod):
    """Method that does not state which tokens it attends to."""


@dataclass(frozen=True, kw_only=True)
class Unbudgeted(Exact):
    """Method that selects without a base class that does, so nothing would call it."""

    budget: float = 0.25

    def token_budget(self, prefix_tokens: int) -> int:
        return int(self.budget * prefix_tokens)

    def selector(self) -> Selector:
        return Faulty()


@dataclass(frozen=True, kw_only=True)
class Unheard(Exact):
    """Method that observes, but is for no conversation."""

    def observer(self):
        raise AssertionError("is never asked")


def halves(**members):
    """Create a codec of 16 bits, with some members replaced."""
    right = {
        "name": "halves",
        "lossless": False,
        "fields": lambda dtype, dim: (Field(torch.float16, dim),),
        "encode": lambda tensor: (tensor.half(),),
        "decode": lambda fields, dtype: fields[0].to(dtype),
    }
    return SimpleNamespace(**right | members)


def in_place(tensor):
    return (tensor.mul_(2).half(),)


def over_all(tensor):
    return ((tensor / tensor.abs().amax()).half(),)


class Half(DecodeIndex):
    """Ranking without a result."""


class Bare(ClusterIndex):
    """Index whose own tensors would not be stored."""


@dataclass(frozen=True, kw_only=True)
class Unplaced(Exact):
    """Method whose geometry is a number."""

    geometry: Geometry = 3


@dataclass(frozen=True, kw_only=True)
class Unevicting(Exact):
    """Method of an eviction policy that no store has."""

    policy = "mine"


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (lambda: register_method("plain", Plain), "not a dataclass"),
        (lambda: register_method("demanding", Demanding), "without arguments"),
        (lambda: register_method("made", Exact()), "not a subclass of Method"),
        (lambda: register_method("exact", Impress), "a method with the name 'exact' already exists"),
        (
            lambda: register_method("unplanned", Unplanned),
            "unplanned cannot be registered: it lacks positions_to_compute$",
        ),
        (lambda: register_method("unselecting", Unselecting), "registered: it lacks selector$"),
        (lambda: register_method("passages", Passages), "registered: it lacks reused_tokens$"),
        (
            lambda: register_method("unbudgeted", Unbudgeted),
            "it has selector, token_budget, but does not derive from B",
        ),
        (lambda: make_method(Unbudgeted()), "Unbudgeted cannot be used as a method: it has selector, token_budget"),
        (lambda: make_method(Unheard()), "it has observer, but does not derive from ForConversation"),
        (lambda: register_index("half", Half), "it lacks build, chunks, rank_together"),
        (lambda: register_index("bare", Bare), "it is not a dataclass"),
        (lambda: register_backend("half", ObjectBackend), "it lacks delete_object, find_object, get_object"),
        (lambda: register_backend("other", Exact), "other cannot be registered: it does not derive from ObjectBackend"),
        (lambda: register_backend("two", lambda address, size: None), r"with an address alone \(missing .*'size'\)"),
        (lambda: register_backend("number", 3), "with an address alone .3 is not a callable object"),
        (lambda: Unplaced(), "geometry must be a Geometry, not 3"),
        (lambda: Unevicting(), "unknown eviction policy 'mine'"),
        (lambda: register_codec(halves(encode=in_place)), "encode changes the tensor that it gets"),
        (lambda: register_codec(halves(encode=over_all)), "encodes a token of a head differently"),
        (lambda: register_codec(halves(decode=lambda fields, dtype: fields[0].to(dtype) / 0)), "as NaN, infinity"),
        (lambda: register_codec(halves(decode=lambda fields, dtype: fields[0].to(dtype) * 0)), "or all as 0"),
        (lambda: register_codec(type("Nameless", (), {"name": "nameless"})()), "it lacks lossless"),
        (lambda: register_codec(type("Class", (), {"name": "class"})), "it is a class"),
        (lambda: register_codec(halves(lossless=True)), "only raw may be"),
        (lambda: register_codec(halves(encode=lambda tensor: tensor.half())), "encode returns Tensor, not a tuple"),
        (lambda: register_codec(halves(encode=lambda tensor: (tensor,))), "and fields says"),
        (lambda: register_codec(halves(decode=lambda fields, dtype: fields[0])), "decode returns torch.float16"),
        (lambda: register_codec(halves(decode=lambda fields, dtype: 1 / 0)), "ZeroDivisionError"),
    ],
)
def test_what_cannot_work_is_refused(register, reason):
    with pytest.raises(ConfigError, match=reason):
        register()


def test_options_of_a_module_without_deferred_annotations_have_their_types(monkeypatch):
    monkeypatch.setattr(METHODS, "_parts", dict(METHODS._parts))
    options = [("share", float, 1), ("least", float | None, None), ("tail", int, 64)]
    register_method("typed", make_dataclass("Typed", options, bases=(Exact,), frozen=True, kw_only=True))
    method = make_method("typed:share=0.5:least=0.25:tail=8")
    assert (method.share, method.least, method.tail) == (0.5, 0.25, 8)
    with pytest.raises(ConfigError, match="tail of typed must be of type int, not 'x'"):
        make_method("typed:tail=x")


@dataclass(frozen=True, kw_only=True)
class Optional(Exact):
    """Method with options of all types that a text can give, and of some others."""

    either: Literal["a", "b"] = "a"
    number: Literal[1, 2] = 1
    count: typing.Optional[int] = 3  # noqa: UP045
    share: int | float | None = None
    both: bool | None = None
    name: str | None = None
    many: list = field(default_factory=list)
    pair: tuple = (1, 2)
    function: Callable[[], int] | None = None
    path: str | Path = ""


def test_an_option_of_a_name_has_its_type_or_is_for_python_alone(monkeypatch):
    monkeypatch.setattr(METHODS, "_parts", dict(METHODS._parts))
    register_method("optional", Optional)
    for text, value in [
        *(("either=b", "b"), ("number=2", 2), ("count=4", 4), ("count=None", None), ("share=2", 2), ("share=.5", 0.5)),
        *(("share=None", None), ("both=None", None), ("both=True", True), ("both=0", False), ("name=None", None)),
        *(("name=x", "x"), ("codec=int8", "int8"), ("recompute=auto", "auto"), ("decline=false", False)),
    ]:
        actual = getattr(make_method(f"optional:{text}"), text.partition("=")[0])
        assert actual == value and type(actual) is type(value)
    for text in ("either=c", "number=3", "count=", "count=x", "share=x", "both=2", "recompute=x"):
        with pytest.raises(ConfigError, match=rf"{text.partition('=')[0]} of optional must be of type .*, not '"):
            make_method(f"optional:{text}")
    for option in ("many", "pair", "function", "path"):
        with pytest.raises(
            ConfigError, match=rf"{option} of optional has the type .*; set it in Python: Optional\({option}="
        ):
            make_method(f"optional:{option}=12")
    assert describe_method(Optional(pair=(1, 3), name="x")) == "optional:name=x:many=[]:pair=(1, 3)"


def test_all_options_of_all_methods_can_be_given_by_name():
    for name in METHODS:
        for option in fields(METHODS[name]):
            if option.init and option.name != "geometry":
                text = f"{name}:{option.name}={option.default}"
                assert make_method(text) == METHODS[name]()


@dataclass(frozen=True, kw_only=True)
class Misspelled(Impress):
    """Method with a member that nothing uses."""

    reselct = True


@dataclass(frozen=True, kw_only=True)
class Unannotated(BudgetMethod):
    """Method whose geometry would be the default one."""

    geometry = Geometry(64)

    def selector(self) -> Selector:
        return Faulty()


class MisspelledBackend(ObjectBackend):
    """Backend with a method that nothing calls, and an attribute that is its own."""

    places: ClassVar[dict] = {}

    def get_beginings(self, names, nbytes):
        return {}


@dataclass(frozen=True, eq=False)
class MisspelledIndex(ClusterIndex):
    """Index with a member that nothing uses."""

    divisble = True


def test_a_member_that_nothing_would_use_is_refused(tmp_path):
    for act, reason in [
        (lambda: register_method("misspelled", Misspelled), "nothing uses reselct; did you mean reselect?"),
        (lambda: make_method(Misspelled()), "Misspelled cannot be used as a method: nothing uses reselct"),
        (
            lambda: register_method("unannotated", Unannotated),
            "geometry is an option, which only an annotation",
        ),
        (lambda: register_index("misspelled", MisspelledIndex), "nothing uses divisble; did you mean divisible?"),
        (lambda: KVStore(backend=complete(MisspelledBackend)("x")), "get_beginings; did you mean get_beginnings?"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            act()


@dataclass(frozen=True, kw_only=True)
class Unchecked(BudgetMethod):
    """Method that would accept any budget."""

    size: int = 4

    def __post_init__(self) -> None:
        assert self.size

    def selector(self) -> Selector:
        return Faulty()


@dataclass(frozen=True, kw_only=True)
class Checked(BudgetMethod):
    """Method that calls the checks by the name of its base."""

    def __post_init__(self) -> None:
        BudgetMethod.__post_init__(self)

    def selector(self) -> Selector:
        return Faulty()


def test_a_method_without_the_checks_of_its_base_is_refused():
    reason = "Unchecked.__post_init__ must call super().__post_init__(), which checks the inherited options"
    for act in (lambda: register_method("unchecked", Unchecked), lambda: make_method(Unchecked(budget=7))):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            act()
    with pytest.raises(ConfigError, match="budget must be a share"):
        make_method(Checked(budget=7))
    make_method(Checked(budget=0.5))


def test_an_attribute_is_no_option_without_an_annotation(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Plain(Exact):
        kernel = 7

    monkeypatch.setitem(METHODS._parts, "plain", Plain)
    with pytest.raises(ConfigError, match=r"plain has no option 'kernel'; to make an option of Plain.kernel, annotate"):
        make_method("plain:kernel=5")


def test_a_place_that_its_opener_cannot_open_ends_in_one_sentence(monkeypatch, run, tmp_path):
    def unreachable(address):
        raise RuntimeError(f"no server at {address}")

    monkeypatch.setitem(BACKENDS._parts, "unreachable", unreachable)
    address = "unreachable://me:secret@x"
    for open_store in (lambda: KVStore(address), lambda: KVStore(tmp_path, remote=address)):
        with pytest.raises(StoreError, match=r"'unreachable' cannot open .*: RuntimeError: no server at") as caught:
            open_store()
        assert "secret" not in str(caught.value)
    assert run("ls", address)[1:] == ("", f"hf-tiered-cache: {caught.value}\n")


def complete(kind):
    """Return a backend's class with the five methods that it lacks."""
    members = dict.fromkeys(kind.__abstractmethods__, lambda self, *arguments, **options: None)
    return type(kind.__name__, (kind,), members)


def test_a_budget_is_a_share_of_the_tokens_unless_a_method_says_otherwise():
    class OfTokens(BudgetMethod):
        def selector(self) -> Selector:
            return Faulty()

    assert [OfTokens(share).token_budget(100) for share in (0.001, 0.29, 0.999, 1)] == [1, 29, 99, 100]


@pytest.mark.parametrize("kind", [Unplanned, Unselecting])
def test_an_incomplete_method_cannot_be_made(kind):
    with pytest.raises(TypeError, match="abstract"):
        kind()


def test_a_method_has_only_the_members_that_all_methods_need():
    """Core code that asks any method for another member fails."""
    own = {name for name in vars(Method) if not name.startswith("_")} | {"geometry"}
    assert own == {
        *("geometry", "ahead_bytes", "codec", "policy", "positions_to_compute", "provenance"),
        *("plan", "lossless", "records_approximations", "coded", "usable_hashes"),
    }


# --- a selector whose result cannot be attended to


@dataclass(frozen=True)
class Faulty(Selector):
    """Selector of a given result, from the number of restored tokens and the requested number."""

    make: object = None

    def choose(self, request: SelectionInput) -> Selection:
        tokens = self.make(request.chunks.tokens, request.count)
        return Selection(tokens, np.zeros((1, request.chunks.tokens), np.float32))


@dataclass(frozen=True, kw_only=True)
class ByFaulty(BudgetMethod):
    """Method with the selector `Faulty`."""

    make: object = None
    reselect: bool = False
    tokens: object = None
    prefetches: frozenset = PREFETCHED

    def token_budget(self, prefix_tokens: int) -> int:
        return int(self.budget * prefix_tokens) if self.tokens is None else self.tokens

    def selector(self) -> Selector:
        return Faulty(make=self.make)


FAULTS = {
    "too many": (
        lambda tokens, count: np.arange(count + 1)[None],
        r"int64 of shape \[1, 49\]; .* \[sets, 48\] with 1",
    ),
    "none": (lambda tokens, count: np.arange(0)[None], r"shape \[1, 0\]; .*48\]"),
    "twice": (lambda tokens, count: np.repeat(np.arange(count // 2), 2)[None], "are not distinct$"),
    "descending": (lambda tokens, count: np.arange(count)[None, ::-1].copy(), "are not ascending$"),
    "beyond": (lambda tokens, count: np.arange(count)[None] + tokens - count + 1, "are not from 0 to 191$"),
    "negative": (lambda tokens, count: np.arange(count)[None] - 1, "are not from 0 to 191$"),
    "sets": (lambda tokens, count: np.stack([np.arange(count)] * 3), r"with 1 or 2 sets"),
    "list": (lambda tokens, count: list(range(count)), r"\(list\); a numpy array"),
    "tensor": (lambda tokens, count: torch.arange(count)[None], r"torch.int64 of shape .*; a numpy array, int64"),
    "flat": (lambda tokens, count: np.arange(count), "int64 .sets, 48. with 1 or 2 sets, is expected"),
    "dtype": (lambda tokens, count: np.arange(count, dtype=np.int32)[None], "int32 of shape"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory, model):
    with KVStore(tmp_path_factory.mktemp("plugins"), engine="posix") as store:
        fill(store, model, prompt(PREFIX), ByFaulty())
        yield store


@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_selection_is_refused(kind, model, store):
    make, reason = FAULTS[kind]
    with pytest.raises(ConfigError, match=f"Faulty selected .*{reason}"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25, make=make))


@dataclass(frozen=True)
class ByKeys(Selector):
    """Selector of the keys with the largest first number, by its probe heads."""

    def choose(self, request: SelectionInput) -> Selection:
        keys = request.keys(self.probe_heads)[..., 0].mean(0, keepdim=True)
        return Selection(top_of_each(keys, request.count).numpy(), keys.numpy())


@dataclass(frozen=True)
class ByLayer(Selector):
    """Selector that notes which layers it selects for."""

    layers_seen: list = field(default_factory=list)

    def choose(self, request: SelectionInput) -> Selection:
        self.layers_seen.append(request.layer)
        return Selection(np.arange(request.count)[None], np.zeros((1, request.chunks.tokens), np.float32))


@pytest.mark.parametrize("reselect", [False, True])
@pytest.mark.parametrize("period", [1, 2])
def test_a_selector_knows_its_layer(model, store, monkeypatch, reselect, period):
    selector = ByLayer(period=period)
    monkeypatch.setattr(ByFaulty, "selector", lambda self: selector)
    ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25, reselect=reselect))
    firsts = list(range(0, model.config.num_hidden_layers, period))
    assert selector.layers_seen[: len(firsts)] == firsts
    assert selector.layers_seen == firsts * (len(selector.layers_seen) // len(firsts))
    assert (len(selector.layers_seen) > len(firsts)) == reselect


# --- an index whose results cannot be used


@dataclass(frozen=True, eq=False)
class FaultyIndex(ClusterIndex):
    """Index that returns what `results` makes of a true result, by the name of the method."""

    results: ClassVar[dict] = {}

    @classmethod
    def build(cls, keys, chunk_tokens):
        return cls.results.get("build", lambda index: index)(super().build(keys, chunk_tokens))

    @classmethod
    def rank_together(cls, indexes, query, scaling, count):
        ranked = super().rank_together(indexes, query, scaling, count)
        return cls.results.get("rank", lambda ranked: ranked)(ranked)


INDEX_FAULTS = {
    "none": ("rank", lambda ranked: None, "returned a NoneType"),
    "numpy": ("rank", lambda ranked: ranked.numpy(), "returned a ndarray"),
    "float": ("rank", lambda ranked: ranked.float(), "returned torch.float32"),
    "flat": ("rank", lambda ranked: ranked[0], "it must return a tensor, int64"),
    "one head": ("rank", lambda ranked: ranked[:1], "it must return a tensor, int64"),
    "fewer": ("rank", lambda ranked: ranked[:, :-1], "it must return a tensor, int64"),
    "twice": ("rank", lambda ranked: ranked[:, :1].expand_as(ranked), "not distinct"),
    "beyond": ("rank", lambda ranked: ranked + 1000, "not distinct and from 0 to"),
    "negative": ("rank", lambda ranked: -1 - ranked, "not distinct and from 0 to"),
    "another": ("build", lambda index: index.centroids, "returned a Tensor"),
    "heads": ("build", lambda index: FaultyIndex(8, index.centroids[:1], index.cluster_of[:1]), "are expected"),
    "chunks": ("build", lambda index: FaultyIndex(8, index.centroids, index.cluster_of[:, 1:]), "are expected"),
}


@pytest.mark.parametrize("kind", INDEX_FAULTS)
def test_a_faulty_result_of_an_index_is_refused(kind, model, tmp_path, monkeypatch):
    name, make, reason = INDEX_FAULTS[kind]
    monkeypatch.setattr(DECODE_INDEXES, "_parts", dict(DECODE_INDEXES._parts))
    monkeypatch.setattr(FaultyIndex, "results", {name: make})
    register_index("faulty", FaultyIndex)
    method = KVDrive(0.25, index="faulty", local=16)
    with KVStore(tmp_path, engine="posix") as store, pytest.raises(ConfigError, match=f"FaultyIndex.{name}.*{reason}"):
        fill(store, model, prompt(PREFIX), method)
        ask(model, store, question(prompt(PREFIX)), method)


@pytest.mark.parametrize("tokens", [0, -1, 48.0])
def test_a_budget_that_is_no_number_of_tokens_is_refused(tokens, model, store):
    with pytest.raises(ConfigError, match=re.escape(f"ByFaulty.token_budget(192) returned {tokens!r}")):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25, tokens=tokens))


@pytest.mark.parametrize(
    ("positions", "fault"),
    [
        (lambda end: None, r"returned None \(NoneType\); it must return 4 int64 arrays, one for each of the layers"),
        (lambda end: np.arange(end), "it must return 4 int64 arrays"),
        (lambda end: (np.arange(end),), "it must return 4 int64 arrays"),
        (lambda end: (np.arange(float(end)),) * 4, "it must return 4 int64 arrays"),
        (lambda end: (torch.arange(end),) * 4, "it must return 4 int64 arrays"),
        (lambda end: (np.arange(end - 1),) * 4, "is wrong: layer 0 must compute ascending positions"),
        (lambda end: (np.arange(9, end), *[np.arange(end)] * 3), "is wrong: layer 1 computes positions that layer 0"),
        (lambda end: (np.arange(end - 1, end),) * 4, "is wrong: layer 3 leaves out positions that cannot"),
        (lambda end: (*[np.arange(end)] * 3, np.arange(end - 1, end)), "is wrong: layer 3 leaves out positions"),
    ],
)
def test_positions_that_no_layer_can_compute_are_refused(positions, fault, store, monkeypatch):
    model = build("llama", num_hidden_layers=4)
    fill(store, model, prompt(PREFIX), Exact())
    monkeypatch.setattr(Exact, "positions_to_compute", lambda self, context: positions(context.num_positions))
    with pytest.raises(ConfigError, match=f"^Exact.positions_to_compute .*{fault}"):
        ask(model, store, question(prompt(PREFIX)), Exact())


@pytest.mark.parametrize("tokens", [None, 5, [np.zeros(3)], [[1, 2]], []], ids=repr)
def test_reused_tokens_that_are_no_arrays_are_refused(tokens, model, store, monkeypatch):
    passage, method = prompt(48, seed=3)[0], Epic(lead=1)
    store.precompute(model, passage, passages=True, method=method, progress=False)
    monkeypatch.setattr(Epic, "reused_tokens", lambda self, passages: tokens)
    with pytest.raises(ConfigError, match=r"^Epic.reused_tokens returned .*; it must return 1 int64 arrays"):
        ask(model, store, torch.cat([prompt(10), passage[None], prompt(9)], dim=1), method)


def test_an_unknown_kind_of_prefetch_is_refused(model, store):
    with pytest.raises(ConfigError, match=r"not \['valuez'\]"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25, prefetches=frozenset({"valuez"})))


@pytest.mark.parametrize(
    ("mass", "form"),
    [
        (None, "None .NoneType."),
        (np.zeros(192), "float64 of shape .192.; a numpy array, float"),
        (np.zeros((1, 5)), r"float64 of shape \[1, 5\]; .* \[sets, 192\]"),
        (np.zeros((3, 192)), r"float64 of shape \[3, 192\].* with 1 or 2 sets"),
        (np.zeros((1, 192), np.int64), "int64 of shape"),
        (torch.zeros(1, 192), r"torch.float32 of shape \[1, 192\]; a numpy array"),
    ],
    ids=["none", "flat", "short", "rows", "integers", "tensor"],
)
def test_attention_of_a_wrong_shape_is_refused(mass, form, model, store, monkeypatch):
    monkeypatch.setattr(Faulty, "choose", lambda self, request: Selection(np.arange(request.count)[None], mass))
    with pytest.raises(ConfigError, match=rf"Faulty returned mass {form}"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_attention_that_is_not_finite_is_refused(number, model, store, monkeypatch):
    """Otherwise it would be ranked in an arbitrary order."""
    mass = np.zeros((1, 192), np.float32)
    mass[0, 100] = number
    monkeypatch.setattr(Faulty, "choose", lambda self, request: Selection(np.arange(request.count)[None], mass))
    with pytest.raises(ConfigError, match=r"Faulty of the method ByFaulty returned mass with (NaN|infinity)"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25))


def test_a_class_in_place_of_a_selector_is_refused(model, store, monkeypatch):
    monkeypatch.setattr(ByFaulty, "selector", lambda self: Faulty)
    with pytest.raises(ConfigError, match=r"selector returned .*Faulty.*an instance of Selector"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25))


@pytest.mark.parametrize(
    ("member", "value", "reason"),
    [
        ("probe_heads", "a", r"Faulty.probe_heads must be an int of at least 0, not 'a' \(str\)"),
        ("probe_heads", -1, "at least 0, not -1"),
        ("period", None, "Faulty.period must be an int of at least 1, not None"),
        ("solo_layers", 0.5, "Faulty.solo_layers must be an int"),
        ("per_head", 1, "Faulty.per_head must be True or False, not 1"),
        ("per_heads", True, "Faulty cannot be used as a selector: nothing uses per_heads; did you mean per_head"),
    ],
)
def test_a_wrong_member_of_a_selector_is_refused(member, value, reason, model, store, monkeypatch):
    is_option = member in {option.name for option in fields(Faulty)}
    selector = Faulty(**{member: value}) if is_option else type("Faulty", (Faulty,), {member: value})()
    monkeypatch.setattr(ByFaulty, "selector", lambda self: selector)
    with pytest.raises(ConfigError, match=reason):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25))


def test_more_probe_heads_than_a_model_has_are_all_of_them(model, store, monkeypatch):
    answers = []
    for heads in (None, 9):
        selector = type("Probing", (ByKeys,), {"probe_heads": heads})()
        monkeypatch.setattr(ByFaulty, "selector", lambda self, selector=selector: selector)
        answers.append(ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25))[0].sequences)
    assert torch.equal(*answers)


def test_what_is_no_selection_is_refused(model, store, monkeypatch):
    monkeypatch.setattr(Faulty, "choose", lambda self, request: np.arange(request.count)[None])
    with pytest.raises(ConfigError, match=r"Faulty\.choose returned ndarray; it must be a Selection"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25))


# --- codecs of other packages


@pytest.fixture
def registered(monkeypatch):
    """Register a codec for one test."""
    codec = halves(name="halves_here")
    monkeypatch.setattr(CODECS, "_parts", dict(CODECS._parts))
    register_codec(codec)
    return codec


def test_a_report_counts_what_was_written(model, registered, tmp_path):
    registered.encode = lambda tensor: 1 / 0
    with KVStore(tmp_path, engine="posix", codec="halves_here") as store:
        report = store.precompute(model, prompt(64), progress=False)
        assert (report.tokens, report.stored, store.stats.segments, store.stats.dropped_writes) == (64, 0, 0, 1)


@pytest.mark.parametrize(
    "encode", [lambda tensor: (tensor.half()[..., :1],), lambda tensor: (tensor.float(),), lambda tensor: tensor.half()]
)
def test_wrong_fields_of_a_codec_are_not_stored(encode, model, registered, tmp_path, caplog):
    registered.encode = encode
    with KVStore(tmp_path, engine="posix", codec="halves_here") as store:
        assert store.precompute(model, prompt(64), progress=False).stored == 0
    assert "halves_here.encode returns" in caplog.text


@pytest.mark.parametrize(
    "decode",
    [lambda fields, dtype: fields[0][..., :1].to(dtype), lambda fields, dtype: fields[0]],
    ids=["dim", "dtype"],
)
def test_a_wrong_tensor_of_a_codec_is_refused(decode, model, registered, tmp_path):
    with KVStore(tmp_path, engine="posix", codec="halves_here") as store:
        store.precompute(model, prompt(64), progress=False)
        registered.decode = decode
        for method in (Exact(), ByFaulty(0.25, make=lambda tokens, count: np.arange(count)[None])):
            with pytest.raises(ConfigError, match=r"halves_here.decode returns torch.float.*, not torch.float32"):
                ask(model, store, question(prompt(64)), method)


def test_a_store_is_not_whole_without_its_codec(model, registered, tmp_path, monkeypatch):
    with KVStore(tmp_path, engine="posix", codec="halves_here") as store:
        assert store.precompute(model, prompt(64), progress=False).stored == 64
        assert store.verify(progress=False).segments == 1
    CODECS._parts.pop("halves_here")
    with KVStore(tmp_path, engine="posix") as store:
        report = store.verify(progress=False)
        assert (report.segments, report.other_format, report.bad) == (0, 1, {})
    with pytest.raises(ConfigError, match=r"unknown codec 'halves_here'; there are: raw, int8, fp8\. Another package"):
        KVStore(tmp_path, codec="halves_here")


def test_fewer_tokens_than_decoding_holds_are_refused(model, store):
    counts = []

    def fewer(tokens, count):
        counts.append(count)
        return np.arange(count - (len(counts) > model.config.num_hidden_layers))[None]

    with pytest.raises(ConfigError, match=r"selected int64 of shape \[1, 47\]; .*\[sets, 48\]"):
        ask(model, store, question(prompt(PREFIX)), ByFaulty(0.25, make=fewer, reselect=True))


# --- the page for authors of plug-ins


def blocks_of(page):
    """Return the Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def test_the_code_of_the_page_runs(tmp_path):
    """It runs in a separate process, since it registers its parts; it asserts the page's claims."""
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks_of("extending.md")))
    process = processes.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0 and "Warning" not in process.stderr, process.stderr[-3000:]
    assert "restored" in process.stdout


def test_a_baseline_is_found_by_its_name():
    assert describe_method(make_method("h2o:budget=0.1")) == "h2o:budget=0.1"
    with pytest.raises(ConfigError, match="unknown codec 'int3'"):
        make_codec("int3")
    assert TieredCache and torch  # imported for the page's sake
