"""Environment variables that code reads by name are described, and all of them if it reads them in another way."""

from __future__ import annotations

import os
from os import environ, getenv

import pytest
from descriptions import describe

ALIAS = environ
NAME = "SCALE"


def with_a_default(x):
    return x * float(os.environ.get("SCALE", "1"))


def by_item(x):
    return x * float(os.environ["SCALE"])


def by_getenv(x):
    return x * float(os.getenv("SCALE", "1"))


def by_globals(x):
    return x * float(environ.get("SCALE", "1")) * float(getenv("SCALE", "1"))


def by_an_import(x):
    import os

    return x * float(os.environ["SCALE"])


class Reader:
    def __init__(self):
        self.os = os

    def __call__(self, x):
        return x * float(self.os.environ.get("SCALE", "1"))


def by_a_variable(x):
    return x * float(os.environ[NAME])


def by_getenv_of_a_variable(x):
    return x * float(getenv(NAME))


def by_an_alias(x):
    return x * float(ALIAS.get("SCALE"))


def by_an_imported_alias(x):
    from os import environ as variables

    return x * float(variables["SCALE"])


def by_iteration(x):
    return x * sum(float(os.environ[name]) for name in os.environ if name.startswith("SCALE"))


def by_an_attribute_name(x):
    return x * float(getattr(os, "environ")["SCALE"])  # noqa: B009


def by_comparison(x):
    return x * (os.environ == "SCALE")


def by_a_name_and_in_another_way(x):
    return by_item(x) * by_a_variable(x)


NAMED = [with_a_default, by_item, by_getenv, by_globals, by_an_import, Reader()]
UNNAMED = [
    *(by_a_variable, by_getenv_of_a_variable, by_an_alias, by_an_imported_alias, by_iteration, by_an_attribute_name),
    *(by_comparison, by_a_name_and_in_another_way),
]


@pytest.mark.parametrize("function", [*NAMED, *UNNAMED])
@pytest.mark.parametrize("name", ["SCALE", "SCALE_OF_OTHERS"])
def test_variables_that_code_may_read_count(monkeypatch, function, name):
    counts = name == "SCALE" or function in UNNAMED
    monkeypatch.setenv("SCALE", "1")
    before = describe(function)
    monkeypatch.setenv(name, "3")
    assert before.watch.holds() == (not counts)
    assert (describe(function).words == before.words) == (not counts)
