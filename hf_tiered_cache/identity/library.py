"""Functions and classes of the standard library and of packages that user code may use."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

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
DRAWING = frozenset(
    {
        *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_"),
        *("multinomial", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("random_", "randperm", "trunc_normal_", "uniform_"),
    }
)
"""Functions and methods of PyTorch that draw random numbers."""
_IMPURE = DRAWING | {
    *("load", "load_file", "safe_open", "fromfile", "from_file", "memmap", "open_memmap", "loadtxt", "genfromtxt"),
    *("binomial", "normal", "get_default_device"),
}
"""Functions of installed packages that read files, draw random numbers, or return a setting that is not identified.
`binomial` and `normal` are common names of other things, so code that only names them is not suspected (`DRAWING`)."""
_IMPURE_MODULES = ("torch.random", "torch.cuda.random", "torch.cuda.memory", "torch.distributions", "torch.quasirandom")
_READABLE_SETTINGS = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype"})
"""Settings of PyTorch that user code may read, besides those of autocast: they are identified, or change no result."""


def impure_part(value: Any) -> str:
    """Return the name of a function or class, or of a base, with results that depend on more than its arguments, or "".

    That is one of the standard library that is not known to compute from its arguments alone, or one of a package that
    reads files, random numbers or the state of PyTorch.
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
        if origin not in (PYTHON, USER):
            is_named = value.__name__ in _IMPURE or f"{module}".startswith(_IMPURE_MODULES)
            is_pure = not is_named and not _reads_state(value)
        if origin != USER and not is_pure:
            return f"{module}.{name}"
    return ""


def _reads_state(value: Any) -> bool:
    """Return whether a function is one that PyTorch defines in C++ besides its operators, to read or set its state."""
    is_internal = getattr(value, "__self__", None) is torch._C
    return is_internal and not ("autocast" in value.__name__ or value.__name__ in _READABLE_SETTINGS)
