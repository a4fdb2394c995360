"""Origin and digests of code, and what is known by name.

The origin of a function is determined by the file that its code was compiled from, never by `__module__` or
`__wrapped__`, which any code can set.

Descriptions leave out some settings, attributes and methods unless user code refers to them: those named below, private
settings of a configuration, and private attributes that packages add to a model.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

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
    is_known = candidate is kind or kind.__flags__ & _IMMUTABLE
    return origin_of_module(module) if module is not None and is_known else USER


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
    first, *tail = (step for step in steps[:5] if step.opname != "PUSH_NULL")
    if first.argval == "environ":
        if tail[0].opcode in dis.hasname and tail[0].argval == "get":
            tail = tail[1:]
        elif len(tail) < 2 or tail[1].opname != "BINARY_SUBSCR":
            return ""
    return tail[0].argval if tail[0].opcode in dis.hasconst and isinstance(tail[0].argval, str) else ""


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


# --- names that descriptions leave out

IRRELEVANT = frozenset(
    {
        *("architectures", "transformers_version", "torch_dtype", "dtype", "attn_implementation"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing"),
        *("problem_type", "id2label", "label2id", "num_labels", "task_specific_params", "finetuning_task"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "tokenizer_class"),
        *("chunk_size_feed_forward", "tie_word_embeddings", "initializer_range", "keys_to_ignore_at_inference"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "name_or_path"),
    }
)
"""Settings of a configuration that affect neither keys nor values."""
UNRELATED = frozenset(
    {
        *("_is_hf_initialized", "_is_torch_compile"),
        *("generation_config", "name_or_path", "loss_type", "kernel_config", "all_tied_weights_keys"),
        *("gradient_checkpointing", "rope_deltas", "max_seq_len_cached", "generate", "generate_batch"),
        *("prepare_inputs_for_generation", "quantization_method", "is_quantized", "is_loaded_in_4bit", "hf_quantizer"),
        *("base_class", "hqq_quantized", "linear_tags"),  # of hqq
        *("hf_device_map", "warnings_issued", "is_gradient_checkpointing", "peft_config", "vocab_size"),
        *("to", "cuda", "cpu", "npu", "xpu", "mlu", "sdaa", "musa", "train", "eval"),
        *("_no_split_modules", "_skip_keys_device_placement", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save"),
        *("_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_device_mesh"),
        *("_hf_peft_config_loaded", "_prepare_peft_hotswap_kwargs"),
        *("_gradient_checkpointing_func", "_output_capturing_hooks_installed", "_is_accelerate_prepared"),
    }
)
"""Attributes of torch, transformers, accelerate, peft and hqq that affect no KV or depend on the prompt."""
ADAPTER_STATE = frozenset({"_active_adapter", "_disable_adapters", "merged_adapters", "_caches"})
"""Attributes of adapter layers that `adapter_state` covers."""
OVERWRITTEN = {"bitsandbytes.autograd._functions.MatmulLtState": frozenset({"idx"})}
"""Attributes that passes set before they read them, by the class of an object."""
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_UNCALLED = CONSTRUCTORS | {
    *("__init_subclass__", "__class_getitem__", "__set_name__", "__del__"),
    *("__repr__", "__str__", "__format__", "__dir__"),
    *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"),
    *("__copy__", "__deepcopy__", "__sizeof__", "__hash__"),
}
"""Special methods that change no result: construction, printing, pickling, hashing. torch.compile replaces some."""
NO_MEMBER = frozenset(
    {
        *("loss_function", "loss_type"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__annotate_func__"),
        *("__annotations_cache__", "__slotnames__", "__qualname__"),
    }
)
"""Members that change no result."""
NOT_CONSTRUCTED = (BaseException, enum.Enum, nn.Module, torch.Tensor, PreTrainedConfig)
"""Classes with instances that no pass creates, or whose constructors pass values on only."""


def uncalled(kind: type) -> frozenset[str]:
    """Return the names of methods that no pass calls of a class."""
    return _UNCALLED if issubclass(kind, NOT_CONSTRUCTED) else frozenset()


def is_special(name: str) -> bool:
    """Return whether passes may call a method of this name without a reference to the name."""
    return name.startswith("__") and name.endswith("__") and name not in _UNCALLED


# --- functions and classes of the standard library and of packages

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
