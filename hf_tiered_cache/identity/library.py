"""Functions and classes of the standard library and of packages that user code may use."""

from __future__ import annotations

import sys
import types
from typing import Any

from .origin import INSTALLED, PYTHON, USER, origin_of, origin_of_class

_PURE = frozenset(
    {
        *("abc", "array", "base64", "binascii", "bisect", "cmath", "collections", "collections_abc", "contextlib"),
        *("copy", "copyreg", "dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json"),
        *("logging", "math", "numbers", "operator", "pprint", "re", "reprlib", "string", "struct", "textwrap", "types"),
        *("typing", "unicodedata", "warnings", "weakref", "weakrefset", "zlib"),
        *("blake2", "md5", "sha1", "sha2", "sha256", "sha3", "sha512"),
        *("inspect.signature", "inspect.Signature", "inspect.Parameter", "inspect._ParameterKind", "inspect._empty"),
        *("traceback.format_exc", "traceback.format_exception", "traceback.print_exc", "traceback.print_exception"),
        *("os.getenv", "os._Environ", "os._createenviron"),
        *("time.perf_counter", "time.perf_counter_ns", "time.monotonic"),
    }
)
"""Modules of the standard library, and members of others, that user code may use: what they return depends on what they
are given. Clocks without a fixed origin are for measuring. The environment is described as data."""
_PURE_BUILTINS = frozenset(
    {
        *("__build_class__", "abs", "aiter", "all", "anext", "any", "ascii", "bin", "callable", "chr", "delattr"),
        *("divmod", "format", "getattr", "hasattr", "hex", "isinstance", "issubclass", "iter", "len", "locals", "max"),
        *("min", "next", "oct", "ord", "pow", "print", "repr", "round", "setattr", "sorted", "sum"),
    }
)
"""Built-in functions that user code may use. Others evaluate text, read input, reach objects that no name shows, or
return a number that differs between processes."""
_READERS = frozenset(
    {"load", "load_file", "safe_open", "fromfile", "from_file", "memmap", "open_memmap", "loadtxt", "genfromtxt"}
)
"""Functions of installed packages that read files."""


def impure_part(value: Any) -> str:
    """Return the name of a function or class, or of a base, with results that depend on more than its arguments, or "".

    That is one of the standard library that is not known to compute from its arguments alone, or one that reads files.
    """
    if isinstance(value, types.FunctionType):
        parts = [(origin_of(value), value.__globals__.get("__name__"), value.__qualname__)]
    elif isinstance(value, type):
        parts = [(origin_of_class(kind), kind.__module__, kind.__qualname__) for kind in value.__mro__]
    else:
        module = getattr(getattr(value, "__objclass__", value), "__module__", None)
        origin = PYTHON if f"{module}".partition(".")[0] in sys.stdlib_module_names else INSTALLED
        parts = [(origin, module, value.__qualname__)]
    for origin, module, name in parts:
        package, member = f"{module}".lstrip("_").partition(".")[0], f"{module}.{name.partition('.')[0]}"
        if module == "builtins":  # all built-in types compute from their arguments
            is_pure = name in _PURE_BUILTINS or not isinstance(value, types.BuiltinFunctionType)
        else:
            is_pure = bool({package, member} & _PURE)
        if (origin == PYTHON and not is_pure) or (origin not in (PYTHON, USER) and name in _READERS):
            return f"{module}.{name}"
    return ""
