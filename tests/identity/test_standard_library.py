"""User code may use functions of the standard library that compute from their arguments alone, and extensions."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import operator
import os
import re
import time
import types
import warnings
from pathlib import Path

import pytest
from markupsafe import _speedups

from hf_tiered_cache.identity.code import CodeDescription
from hf_tiered_cache.identity.description import Undescribable
from hf_tiered_cache.identity.origin import INSTALLED, PYTHON, origin_of_file

IMPURE = (
    *("asyncio", "ctypes", "datetime", "decimal", "gc", "getpass", "glob", "importlib", "io", "locale", "mmap", "os"),
    *(
        "pathlib",
        "pickle",
        "platform",
        "queue",
        "random",
        "resource",
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
    ),
    *("sqlite3", "subprocess", "sys", "tempfile", "threading", "tracemalloc", "urllib.request", "uuid", "zoneinfo"),
)
CODE = types.FunctionType | types.BuiltinFunctionType | type
PURE = [
    *(math.sqrt, functools.reduce, functools.partial, itertools.accumulate, copy.deepcopy, re.compile, json.dumps),
    *(collections.deque, collections.namedtuple, operator.itemgetter, dataclasses.replace, warnings.warn, sum, range),
    *(os.environ.get, time.perf_counter),
]


def describe(value):
    """Describe a function that calls another one."""
    description = CodeDescription()
    description.add("it", lambda *arguments: value(*arguments))
    description.finish()
    return description.words


@pytest.mark.parametrize("name", IMPURE)
def test_what_depends_on_more_than_its_arguments_is_not_described(name):
    module = importlib.import_module(name)
    home = name.partition(".")[0]
    own = {member for member in vars(module).values() if isinstance(member, CODE)}
    own = {member for member in own if f"{member.__module__}".lstrip("_").partition(".")[0] == home}
    own -= {type(os.environ), os.getenv}  # the environment is described as data
    own = {member for member in own if not (isinstance(member, type) and issubclass(member, Exception | tuple))}
    assert own
    for member in own:
        with pytest.raises(Undescribable, match=re.escape(member.__qualname__)):
            describe(member)


@pytest.mark.parametrize("function", PURE, ids=lambda function: function.__qualname__)
def test_what_computes_from_its_arguments_is_described_alike_each_time(function):
    assert describe(function) == describe(function)


def extension(folder, end):
    """Load a copy of an extension from a file with a different end."""
    original = Path(_speedups.__file__)
    file = folder / original.name
    file.parent.mkdir()
    file.write_bytes(original.read_bytes() + end)
    spec = importlib.util.spec_from_file_location("_speedups", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_extension_that_was_built_again_is_described_otherwise(tmp_path):
    builds = [extension(tmp_path / f"{number}", end) for number, end in enumerate([b"a", b"b", b"a"])]
    first, second, third = (describe(build._escape_inner) for build in builds)
    assert first == third != second


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
@pytest.mark.parametrize("home", [os.path.dirname(os.__file__), "/usr/lib/python3", "/opt/venv/lib/python3.11"])
def test_packages_in_any_site_packages_are_no_standard_library(home, folder):
    assert origin_of_file(os.path.join(home, folder, "mypkg", "layer.py")) == INSTALLED
    assert origin_of_file(os.__file__) == PYTHON
