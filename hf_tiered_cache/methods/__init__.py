"""Methods: how a prompt's KV is cut into blocks, planned and restored. Each is a class and an entry of `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass
from functools import lru_cache
from inspect import isabstract
from typing import Any

from ..errors import ConfigError, suggest, unknown_name, with_type
from ..plugins import Registry
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
    if fault := _unused_members(part):
        return fault
    try:
        part()
    except TypeError as error:
        return f"it cannot be created without arguments: {error}"
    return ""


@lru_cache
def _unused_members(kind: type[Method]) -> str:
    """Return which members of an interface a method has without deriving from it, so that nothing uses them, or ""."""
    for interface in (BudgetMethod, Passages, ForConversation):
        members = sorted(interface.__abstractmethods__ & set(dir(kind)))
        if members and not issubclass(kind, interface):
            return f"it has {', '.join(members)}, but does not derive from {interface.__name__}"
    return ""


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
            instance has members of an interface that it does not derive from.
    """
    if method is None:
        return Exact()
    if isinstance(method, Method):
        if fault := _unused_members(type(method)):
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
            raise ConfigError(f"{name} has no option {key!r}{advice}")
        try:
            settings[key] = _parse_value(text, fields_by_name[key])
        except (KeyError, ValueError):
            annotation = _annotation(fields_by_name[key])
            raise ConfigError(f"{key} of {name} must be of type {annotation}, not {with_type(text)}") from None
    return make(**settings)


def describe_method(method: Method, ignored: Collection[str] = ()) -> str:
    """Return the string that `make_method` takes for a method: its name and its settings that differ from defaults.

    Settings with a name in `ignored` are left out.
    """
    name = METHODS.name_of(type(method)) or type(method).__name__
    ignored = {"geometry", *ignored}
    options = [option for option in fields(method) if option.init and option.repr and option.name not in ignored]
    values = ((option, getattr(method, option.name)) for option in options)
    return ":".join([name, *(f"{option.name}={value}" for option, value in values if value != option.default)])


def _annotation(option: Field[Any]) -> str:
    """Return a field's annotation as it is written: without deferred annotations, a field has the type itself."""
    return option.type.__name__ if isinstance(option.type, type) else str(option.type)


def _parse_value(text: str, option: Field[Any]) -> Any:
    kind: Callable[[str], Any] = type(option.default)
    annotation = _annotation(option)
    if text == "None" and "None" in annotation:
        return None
    first = annotation.partition(" ")[0]
    if option.default is None or first in ("float", "bool"):  # such as "float | None"
        kind = {"float": float, "int": int, "bool": bool, "str": str}[first]
    if repr(text) in annotation.replace('"', "'"):  # a word of a Literal type
        return text
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    return kind(text)
