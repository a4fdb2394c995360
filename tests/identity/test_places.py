"""Places that the watch leaves out: an edit of each is found through another place, or a new description is equal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import pytest
from changes import rich
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.identity.watch import Watch, _getter

Edit = tuple[str, Callable[[], Callable[[], None]]]
"""What is edited, and a function that edits it and returns a function that undoes the edit."""
CONTAINERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


class Mixin:
    """A class that adds nothing."""


def assigning(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Assign to an attribute, and return a function that assigns the former value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return partial(setattr, owner, name, before)


def filling(container: dict[str, Any], value: Any) -> Callable[[], None]:
    """Add an item to a dictionary, and return a function that removes it."""
    container["added"] = value
    return lambda: container.pop("added") and None


def members(kind: type) -> Callable[[], None]:
    """Add a member to a class, and return a function that removes it."""
    kind.added = 1
    return lambda: delattr(kind, "added")


def read(name: Fingerprinter, attribute: str) -> dict[int, Any]:
    """Return the objects of which the watch reads an attribute, by id."""
    places = name._description.watch._values[_getter(attribute)]
    return {number: value for (number, _), (_, value) in places.items()}


def edits_of(model: PreTrainedModel, name: Fingerprinter) -> Iterator[Edit]:
    for function in read(name, "__code__").values():
        code, label = function.__code__, function.__qualname__
        if not code.co_argcount:
            yield f"the defaults of {label}", partial(assigning, function, "__defaults__", (1.0,))
        if not code.co_kwonlyargcount:
            yield f"the keyword defaults of {label}", partial(assigning, function, "__kwdefaults__", {"scale": 1.0})
    classes = {base: None for kind in read(name, "__mro__").values() for base in kind.__mro__ if base is not object}
    for kind in classes:
        yield f"the bases of {kind}", partial(assigning, kind, "__bases__", (*kind.__bases__, Mixin))
        yield f"the members of {kind}", partial(members, kind)
    for path, module in model.named_modules():
        yield f"the mode of {path}", partial(assigning, module, "training", True)
        for container in CONTAINERS:
            new_member = nn.Identity() if container == "_modules" else None
            new_member = print if "hooks" in container else new_member
            full = OrderedDict(module.__dict__[container], added=new_member)
            label = f"{container} of {path}"
            yield f"in {label}", partial(filling, module.__dict__[container], new_member)
            yield f"more {label}", partial(assigning, module, container, full)
            yield f"equal {label}", partial(assigning, module, container, type(full)(module.__dict__[container]))
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"in the attributes of {path}", partial(filling, tensor.__dict__, 2.0)
        yield f"more attributes of {path}", partial(assigning, tensor, "__dict__", {"scale": 2.0})
        yield f"equal attributes of {path}", partial(assigning, tensor, "__dict__", dict(tensor.__dict__))
        yield f"the memory of {path}", partial(assigning, tensor, "data", tensor.detach().clone())


@lru_cache
def described() -> tuple[PreTrainedModel, Fingerprinter]:
    model = rich()
    return model, Fingerprinter(model)


@lru_cache
def edits() -> list[Edit]:
    return list(edits_of(*described()))


@settings(max_examples=settings.default.max_examples // 2)
@given(number=st.integers(0, len(edits()) - 1))
def test_an_edit_is_found_or_has_no_effect(number):
    (model, name), (_, edit) = described(), edits()[number]
    before = name.look()
    undo = None
    with suppress(TypeError):  # a class in C has no other bases, and no other members
        undo = edit()
    if undo is None:
        return
    try:
        after, anew = name.look(begins_request=False), Fingerprinter(model).look()
        assert (after.fingerprint, after.problem, after.training) == (anew.fingerprint, anew.problem, anew.training)
    finally:
        undo()
    assert name.look() == before


def test_each_kind_of_edit_is_drawn():
    kinds = {label.partition(" of ")[0] for label, _ in edits()}
    assert len(kinds) == 7 + 3 * len(CONTAINERS) + 2
    assert len(edits()) > 800


@pytest.mark.parametrize("content", [None, 0, 1.0])
def test_a_name_that_was_missing_counts_with_any_value(content):
    watch, namespace = Watch(), dict[str, Any]()
    watch.item(namespace, "missing")
    watch.complete()
    assert watch.holds()
    namespace["missing"] = content
    assert not watch.holds()
