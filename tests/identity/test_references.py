"""What user code refers to by name is described, whether the name is bound yet or not."""

from __future__ import annotations

import os
import sys
import types

import numpy as np
import pytest
import torch
from descriptions import describe
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.identity.description import Undescribable

WAYS = {
    "in a function": "try:\n        factor = {name}\n    except NameError:\n        factor = 1.0",
    "by attribute": "factor = settings.{name} if hasattr(settings, '{name}') else 1.0",
    "by text": "factor = getattr(settings, '{name}', 1.0)",
    "in a submodule": "factor = getattr(settings.inner, '{name}', 1.0)",
}


def module_of(source, name="user_code", **members):
    """Create a module of the user's from its source."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    exec(compile(source, f"/home/user/{name}.py", "exec"), module.__dict__)
    return module


@given(way=st.sampled_from(sorted(WAYS)), name=st.sampled_from(["SCALE", "scale", "len", "__scale__", "act"]))
def test_a_name_that_is_bound_later_is_noticed(way, name):
    inner = types.ModuleType("inner")
    settings = module_of("", "settings", inner=inner)
    source = f"def run(x):\n    {WAYS[way].format(name=name)}\n    return x * factor"
    module = module_of(source, settings=settings)
    before = describe(module.run)
    assert before.watch.holds()
    setattr({"in a function": module, "in a submodule": inner}.get(way, settings), name, 3.0)
    assert not before.watch.holds()
    assert describe(module.run).words != before.words


@pytest.mark.parametrize("namespace", ["torch.ops", "torch.ops.tiered_cache_tests"])
def test_an_operator_of_the_users_is_refused_before_its_first_call(namespace):
    library = torch.library.Library("tiered_cache_tests", "FRAGMENT")
    library.define(f"scaled{len(namespace)}(Tensor x) -> Tensor")
    operator = f"{'tiered_cache_tests.' if namespace == 'torch.ops' else ''}scaled{len(namespace)}"
    module = module_of(f"import torch\nops = {namespace}\ndef act(x):\n    return ops.{operator}(x)")
    with pytest.raises(Undescribable, match="the operator tiered_cache_tests"):
        describe(module.act)


IMPORTS = [
    "from .math import scale",
    "from . import math; scale = math.scale",
    "from ..sub.math import scale",
    "from .. import sub; scale = sub.math.scale",
    "from tiered_cache_pkg.sub.math import scale",
    "import tiered_cache_pkg.sub.layers; scale = tiered_cache_pkg.sub.math.scale",
    "import tiered_cache_pkg.sub.math as m; scale = m.scale",
]


@pytest.fixture
def package(monkeypatch):
    """Return the modules of a package of the user's, by the ends of their names."""
    modules = {}
    for name in ("", ".sub", ".sub.math", ".sub.layers"):
        module = modules[name] = types.ModuleType(f"tiered_cache_pkg{name}")
        module.__package__ = module.__name__ if name in ("", ".sub") else "tiered_cache_pkg.sub"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if name:
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, module)
    modules[".sub.math"].scale = 1.0
    return modules


@pytest.mark.parametrize("statement", IMPORTS)
def test_an_import_within_a_function_is_that_of_its_package(package, statement):
    layers = package[".sub.layers"]
    exec(f"def run(x):\n    {statement}\n    return x * scale", layers.__dict__)
    before = describe(layers.run)
    package[".sub.math"].scale = 3.0
    assert not before.watch.holds()
    assert describe(layers.run).words != before.words


@pytest.mark.parametrize("statement", ["from . import lazy", "from .lazy import scale", "from .... import scale"])
def test_an_import_of_what_is_not_loaded_is_refused(package, statement):
    exec(f"def run(x):\n    {statement}\n    return x", package[".sub.layers"].__dict__)
    with pytest.raises(Undescribable, match=r"it, which imports \."):
        describe(package[".sub.layers"].run)


PURE = [
    *("abs", "all", "any", "callable", "chr", "divmod", "getattr", "isinstance", "iter", "len"),
    *("max", "min", "next", "pow", "print", "repr", "round", "sorted", "sum"),
]
IMPURE = [
    *("__import__", "breakpoint", "compile", "dir", "eval", "exec", "globals", "hash", "id", "input", "open", "vars")
]
USES = {
    "as an attribute": "def run(x):\n    return x.{name}(x.inner.{name})",
    "as a method": "class Layer:\n    {name} = abs\nlayer = Layer()\nrun = lambda x: layer.{name}(x)",
    "as an item": "def run(x, **options):\n    return x * options['{name}']",
    "as a keyword": "def run(x):\n    return x.scale({name}=1.0)",
    "as a local variable": "def run(x):\n    {name} = x\n    return {name} * 2",
}
CALLS = {
    "by name": "def run(x):\n    return x * {name}('1')",
    "in a nested function": "def run(x):\n    return [{name}(item) for item in x]",
    "by another name": "call = {name}\ndef run(x):\n    return x * call('1')",
    "as a default": "def run(x, call={name}):\n    return x * call('1')",
    "in a table": "calls = {{'call': {name}}}\ndef run(x):\n    return x * calls['call']('1')",
    "in a module": "import builtins\ndef run(x):\n    return x * builtins.{name}('1')",
    "by import": "def run(x):\n    from builtins import {name} as call\n    return x * call('1')",
}


@given(use=st.sampled_from(sorted(USES)), name=st.sampled_from([*PURE, *IMPURE, "time", "sleep", "compile", "random"]))
def test_names_of_attributes_are_no_names_of_builtins_or_members(use, name):
    """What these modules and builtins have under such a name matters only if code refers to it."""
    before = "import re, time\ndef timed():\n    return time.perf_counter()\n"
    module = module_of(before + USES[use].format(name=name))
    assert describe(module.run).words
    assert describe(module.timed).words


@given(call=st.sampled_from(sorted(CALLS)), name=st.sampled_from([*PURE, *IMPURE]))
def test_builtins_that_do_not_compute_from_their_arguments_alone_are_refused(call, name):
    run = module_of(CALLS[call].format(name=name)).run
    if name in PURE:
        assert describe(run).words
    else:
        with pytest.raises(Undescribable, match=f"which uses (_?io|builtins).{name},"):
            describe(run)


def test_a_key_of_a_dictionary_may_be_of_a_class_of_the_users():
    source = (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Key:\n    name: str\n"
        "table = {Key('a'): 1.0}\ndef run(x):\n    return x * table[Key('a')]"
    )
    module = types.ModuleType("keyed")
    sys.modules["keyed"] = module  # dataclasses looks there
    try:
        exec(source, module.__dict__)
    finally:
        del sys.modules["keyed"]
    assert describe(module.run).words


SETTINGS = {
    "an item of a dictionary": ("STATE = {'scale': 1.0}", "STATE['scale']", "STATE['scale'] = 3.0"),
    "an item of a large dictionary": (
        "STATE = dict.fromkeys(range(1000), 1.0)",
        "STATE[999]",
        "STATE[999] = 3.0",
    ),
    "an added item": ("STATE = {}", "STATE.get('scale', 1.0)", "STATE['scale'] = 3.0"),
    "an item of a list": ("STATE = [1.0]", "STATE[0]", "STATE[0] = 3.0"),
    "an attribute": ("class State: pass\nSTATE = State()\nSTATE.scale = 1.0", "STATE.scale", "STATE.scale = 3.0"),
    "an added attribute": ("class State: pass\nSTATE = State()", "getattr(STATE, 'scale', 1)", "STATE.scale = 3.0"),
    "an attribute of a namespace": (
        "import types\nSTATE = types.SimpleNamespace(scale=1.0)",
        "STATE.scale",
        "STATE.scale = 3.0",
    ),
}


def installed(monkeypatch, source):
    """Create a module of an installed package from its source."""
    file = os.path.join(os.path.dirname(np.__file__), os.pardir, "tiered_cache_pkg.py")
    module = types.ModuleType("tiered_cache_pkg")
    module.__file__ = os.path.normpath(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_an_installed_package_are_described(monkeypatch, case):
    state, use, change = SETTINGS[case]
    module = installed(monkeypatch, f"{state}\ndef run(x):\n    return x * {use}")
    before = describe(module.run)
    assert before.watch.holds() and describe(module.run).words == before.words
    exec(change, module.__dict__)
    assert not before.watch.holds()
    assert describe(module.run).words != before.words


def test_the_level_of_a_logger_is_no_setting(monkeypatch):
    module = installed(
        monkeypatch, "import logging\nSTATE = logging.getLogger('a')\ndef run(x):\n    return STATE and x"
    )
    before = describe(module.run)
    monkeypatch.setattr(module.STATE, "level", 50)
    assert describe(module.run).words == before.words
