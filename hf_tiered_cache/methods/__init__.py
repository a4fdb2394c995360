"""Methods: how a prompt's KV is cut into blocks, planned and restored. Each is a class and an entry of `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import Field, fields, is_dataclass
from functools import lru_cache
from inspect import get_annotations, isabstract
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ..errors import ConfigError, suggest, unknown_name, with_type
from ..plugins import Registry, ignored_member
from .base import BudgetMethod, Method
from .cache_tune import CacheBlend, CacheTune, Epic
from .contiguous_kv import ContiguousKV, Impress
from .exact import Auto, Exact, PrefixMethod
from .krul import ForConversation, IdleConversation, Krul, MergeDecision
from .kv_drive import KVDrive
from .passages import Passages


def _fault(name: str, part: object) -> str:
    if not (isinstance(part, type) and issubclass(part, Method)):
        return f"it is not a subclass of Method: {part!r}"
    if not is_dataclass(part) or "__dataclass_fields__" not in vars(part):
        return "it is not a dataclass; decorate it with @dataclass(frozen=True, kw_only=True)"
    if isabstract(part):
        return f"it lacks {', '.join(sorted(part.__abstractmethods__))}"
    if fault := _wrong_member(part):
        return fault
    try:
        part()
    except TypeError as error:
        return f"it cannot be created without arguments: {error}"
    return ""


@lru_cache
def _wrong_member(kind: type[Method]) -> str:
    """Return which member of a method nothing uses, or keeps the base from checking its options, or ""."""
    for interface in (BudgetMethod, Passages, ForConversation):
        methods = {name for name, member in vars(interface).items() if callable(member)} - set(dir(Method))
        members = sorted(methods & set(dir(kind)))
        if members and not issubclass(kind, interface):
            return f"it has {', '.join(members)}, but does not derive from {interface.__name__}"
    for base in kind.__mro__[: kind.__mro__.index(Method)]:
        code = getattr(vars(base).get("__post_init__"), "__code__", None)
        if code is not None and "__post_init__" not in code.co_names:
            return (
                f"{base.__name__}.__post_init__ must call super().__post_init__(), which checks the inherited options"
            )
    return ignored_member(kind)


METHODS: Registry[type[Method]] = Registry(
    "method",
    "hf_tiered_cache.methods",
    {
        "exact": Exact,
        "contiguous_kv": ContiguousKV,
        "impress": Impress,
        "auto": Auto,
        "cache_tune": CacheTune,
        "epic": Epic,
        "cache_blend": CacheBlend,
        "kv_drive": KVDrive,
        "krul": Krul,
    },
    _fault,
)
"""Methods by name, those of plug-ins included."""

__all__ = [
    "METHODS",
    "Auto",
    "BudgetMethod",
    "CacheBlend",
    "CacheTune",
    "ContiguousKV",
    "Epic",
    "Exact",
    "ForConversation",
    "IdleConversation",
    "Impress",
    "KVDrive",
    "Krul",
    "MergeDecision",
    "Method",
    "Passages",
    "PrefixMethod",
    "describe_method",
    "make_method",
    "register_method",
]


def register_method(name: str, kind: type[Method]) -> None:
    """Add a method: `make_method(name)`, the command line and the evaluations find it by this name.

    Raises:
        ConfigError: The name is invalid or taken, or `kind` is not a dataclass derived from `Method` with defaults, or
            it lacks a required member.
    """
    METHODS.register(name, kind)


def make_method(method: Method | str | None) -> Method:
    """Return a method, given as an instance, by name, or as None for exact reuse.

    Args:
        method: A string is a name of `METHODS`, optionally followed by settings after colons:
            "contiguous_kv:budget=0.1:identify=keys". With ".paper", the other settings are the paper's:
            "contiguous_kv.paper:budget=0.1".

    Raises:
        ConfigError: The name or a setting is unknown, a value is invalid, or the method has no `paper` settings. Or an
            instance has members that nothing uses, or does not call the checks of its base.
    """
    if method is None:
        return Exact()
    if isinstance(method, Method):
        if fault := _wrong_member(type(method)):
            raise ConfigError(f"{type(method).__name__} cannot be used as a method: {fault}")
        return method
    if not isinstance(method, str):
        advice = f"; use {method.__name__}()" if isinstance(method, type) else ""
        raise ConfigError(f"method must be a Method or the name of one, not {with_type(method)}{advice}")
    full_name, *options = method.split(":")
    name, _, published = full_name.partition(".")
    if name not in METHODS or published not in ("", "paper"):
        raise ConfigError(unknown_name("method", full_name, METHODS))
    kind = METHODS[name]
    make = getattr(kind, "paper", None) if published else kind
    if make is None:
        raise ConfigError(f"{name} has no published settings other than its defaults; use {name!r}")
    fields_by_name = {field.name: field for field in fields(kind) if field.init and field.name != "geometry"}
    settings = {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in fields_by_name:
            advice = suggest(key, fields_by_name, f"its options are: {', '.join(fields_by_name)}")
            if isinstance(getattr(kind, key, None), str | int | float):
                advice = f"; to make an option of {kind.__name__}.{key}, annotate it: {key}: ... = ..."
            raise ConfigError(f"{name} has no option {key!r}{advice}")
        settings[key] = _parse_option(kind, name, fields_by_name[key], text)
    return make(**settings)


def describe_method(method: Method, ignored: Collection[str] = ()) -> str:
    """Return the string that `make_method` takes for a method: its name and its settings that differ from defaults.

    Settings with a name in `ignored` are left out. Those that only Python can set are shown, too.
    """
    name = METHODS.name_of(type(method)) or type(method).__name__
    ignored = {"geometry", *ignored}
    options = [option for option in fields(method) if option.init and option.repr and option.name not in ignored]
    values = ((option, getattr(method, option.name)) for option in options)
    return ":".join([name, *(f"{option.name}={value}" for option, value in values if value != option.default)])


def _parse_option(kind: type[Method], name: str, option: Field[Any], text: str) -> Any:
    """Return the value that a text gives to an option of a method. Raises ConfigError."""
    owner = next(base for base in kind.__mro__ if option.name in get_annotations(base))
    hint: Any = None
    with suppress(Exception):  # names for type checkers alone
        hint = get_annotations(owner, eval_str=True)[option.name]
    parsers: list[Callable[[str], Any]] = []
    annotation = option.type.__name__ if isinstance(option.type, type) else str(option.type)
    for part in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if part in (int, float, str):
            parsers.append(part)
        elif part is bool:
            parsers.insert(0, lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()])
        elif part is NoneType or get_origin(part) is Literal:
            parsers.insert(0, {str(word): word for word in get_args(part) or (None,)}.__getitem__)
        else:
            raise ConfigError(
                f"{option.name} of {name} has the type {annotation}, which a text cannot give; set it in Python: "
                f"{kind.__name__}({option.name}=...)"
            )
    for parse in parsers:
        with suppress(KeyError, ValueError):
            return parse(text)
    raise ConfigError(f"{option.name} of {name} must be of type {annotation}, not {with_type(text)}")
