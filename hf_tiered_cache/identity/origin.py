"""Origin and digests of code.

The origin of a function is determined by the file that its code was compiled from, never by `__module__` or
`__wrapped__`, which any code can set.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TRUSTED = frozenset({"torch", "transformers", "accelerate", "peft", "hf_tiered_cache"})
"""Trusted packages: their hooks and replaced methods change no KV, or only in ways that a model description covers."""
PYTHON, INSTALLED, USER = "python", "installed", "user"
"""Other origins: the standard library, other installed packages, and everything else."""

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_SITE_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names under which code reads environment variables."""
_IMMUTABLE = 1 << 8  # flag of classes that are not made by Python code (`Py_TPFLAGS_IMMUTABLETYPE`)


@functools.lru_cache(maxsize=4096)
def origin_of_file(file: str) -> str:
    """Return the trusted package that a source file belongs to, or `PYTHON`, `INSTALLED` or `USER`."""
    for name in TRUSTED:
        module = sys.modules.get(name)
        home = getattr(module, "__file__", None)
        if home and file.startswith(os.path.dirname(home) + os.sep):
            return name
    if any(folder in file for folder in _SITE_PACKAGES):  # also those of the Python that an environment is based on
        return INSTALLED
    if file.startswith((_STANDARD_LIBRARY, "<frozen ")):
        return PYTHON
    return USER


def origin_of(function: types.FunctionType) -> str:
    """Return the origin of a function's code.

    Generated code, such as that of `dataclasses`, has no file; its origin is the module of its globals.
    """
    file = function.__code__.co_filename
    if file == "<string>":
        file = function.__globals__.get("__file__") or file
    return origin_of_file(file)


def compiled_from(method: Any) -> Callable[..., Any] | None:
    """Return the function that a wrapper of `torch.compile` compiles, or None if `method` is no such wrapper."""
    if not isinstance(method, types.FunctionType) or "_dynamo" not in method.__code__.co_filename:
        return None
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    return cells["fn"].cell_contents if origin_of(method) == "torch" and "fn" in cells else None


def origin_of_class(kind: Any) -> str:
    """Return the origin of a class: that of the module that defines it under its name, otherwise user code."""
    return _origin_of_class(kind)


@functools.lru_cache(maxsize=4096)
def _origin_of_class(kind: Any) -> str:
    module = sys.modules.get(kind.__module__)
    candidate: object = module
    for part in kind.__qualname__.split("."):
        candidate = getattr(candidate, part, None)
    known = candidate is kind or kind.__flags__ & _IMMUTABLE
    return origin_of_module(module) if module is not None and known else USER


def origin_of_module(module: types.ModuleType) -> str:
    """Return the origin of a module. One without a file is user code unless it is built in, frozen or part of another.

    Modules that an extension creates, such as `torch._C._nn`, have no file of their own.
    """
    file = module.__dict__.get("__file__")
    if file is not None:
        return origin_of_file(file)
    if getattr(module.__dict__.get("__spec__"), "origin", None) in ("built-in", "frozen"):
        return PYTHON
    parent = sys.modules.get(module.__name__.rpartition(".")[0])
    return USER if parent is None else origin_of_module(parent)


def home_of(function: Any) -> str:
    """Return the origin of the code that a callable runs."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return origin_of(function)
    if isinstance(function, types.BuiltinFunctionType):
        return "torch" if str(function.__module__).startswith("torch") else USER
    return origin_of_class(type(function))


@functools.lru_cache(maxsize=16384)
def code_digest(code: types.CodeType) -> str:
    """Return a digest of a code object. It is equal in all processes with the same source and Python version."""
    return hashlib.blake2b(_code_words(code).encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=16384)
def referenced_names(code: types.CodeType) -> frozenset[str]:
    """Return all names of globals and attributes that a code object and its nested code objects refer to."""
    nested = (referenced_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*nested)


class References(NamedTuple):
    """Names that a code object and its nested code objects refer to."""

    globals: frozenset[str] = frozenset()
    """Names of globals and builtins."""
    members: frozenset[str] = frozenset()
    """Names of attributes, and texts that may be such names, for example arguments of `getattr`."""
    imports: frozenset[tuple[str, tuple[str, ...]]] = frozenset()
    """Names of modules, with leading dots if relative, and the names that are imported from each."""
    variables: frozenset[str] = frozenset()
    """Names of environment variables that are read, and "" if others may be read, too."""


@functools.lru_cache(maxsize=16384)
def references(code: types.CodeType) -> References:
    """Return what a code object and its nested code objects refer to."""
    global_names: set[str] = set()
    members: set[str] = set()
    imports: set[tuple[str, tuple[str, ...]]] = set()
    variables: set[str] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for number, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, imported = (constant.argval for constant in steps[number - 2 : number])
            imports.add(("." * level + step.argval, imported or ()))
            if not imported:  # `import a.b` binds a
                imports.add((step.argval.partition(".")[0], ()))
        elif step.opcode in dis.hasname:
            is_member = "ATTR" in step.opname or step.opname in ("LOAD_METHOD", "IMPORT_FROM")
            (members if is_member else global_names).add(step.argval)
            if step.argval in ENVIRONMENT:
                variables.add(_variable(steps[number:]))
        elif step.opcode in dis.hasconst and step.opname != "KW_NAMES":
            if steps[min(number + 1, len(steps) - 1)].opname.endswith("_KW"):
                continue  # the names of the keyword arguments of a call
            members |= (names := text_names(step.argval))
            if names & ENVIRONMENT:
                variables.add("")
    nested = [references(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = References(frozenset(global_names), frozenset(members), frozenset(imports), frozenset(variables))
    return References(*(frozenset().union(*parts) for parts in zip(own, *nested, strict=True)))


def _variable(steps: list[dis.Instruction]) -> str:
    """Return the constant name of the variable that the first step, a name of `ENVIRONMENT`, reads, or ""."""
    first, *rest = (step for step in steps[:5] if step.opname != "PUSH_NULL")
    if first.argval == "environ":
        if rest[0].opcode in dis.hasname and rest[0].argval == "get":
            rest = rest[1:]
        elif len(rest) < 2 or rest[1].opname != "BINARY_SUBSCR":
            return ""
    return rest[0].argval if rest[0].opcode in dis.hasconst and isinstance(rest[0].argval, str) else ""


def text_names(constant: object) -> frozenset[str]:
    """Return the texts in a constant that may be names of attributes."""
    if isinstance(constant, (tuple, frozenset)):
        return frozenset().union(*map(text_names, constant))
    return frozenset(filter(str.isidentifier, constant.split("."))) if isinstance(constant, str) else frozenset()


@functools.lru_cache(maxsize=4096)
def file_digest(file: str) -> str:
    """Return a digest of a source file or an extension, or "" if it cannot be read."""
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _code_words(code: types.CodeType) -> str:
    constants = [
        _code_words(constant) if isinstance(constant, types.CodeType) else _constant(constant)
        for constant in code.co_consts
    ]
    shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    handlers = getattr(code, "co_exceptiontable", b"")
    return f"{code.co_code.hex()} {handlers.hex()} {shape} {names} {constants}"


def _constant(value: object) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
