"""Names that descriptions know: what they leave out unless user code refers to it, and what user code may use.

They leave out some settings, attributes and methods, private settings of a configuration, and private attributes that
packages add to a model: no class has them.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .origin import INSTALLED, PYTHON, USER, origin_of, origin_of_class

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
        *("hf_device_map", "warnings_issued", "is_gradient_checkpointing", "peft_config", "vocab_size"),
        *("to", "cuda", "cpu", "npu", "xpu", "mlu", "sdaa", "musa", "train", "eval"),
        *("_no_split_modules", "_skip_keys_device_placement", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save"),
        *("_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_device_mesh"),
        *("_hf_peft_config_loaded", "_prepare_peft_hotswap_kwargs"),
        *("_gradient_checkpointing_func", "_output_capturing_hooks_installed", "_is_accelerate_prepared"),
    }
)
"""Attributes of torch, transformers, accelerate and peft that affect no KV or depend on the prompt."""
ADAPTER_STATE = frozenset({"_active_adapter", "_disable_adapters", "merged_adapters", "_caches"})
"""Attributes of adapter layers that `adapter_state` covers."""
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
