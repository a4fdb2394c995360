"""Registries of named parts: built in, registered by a program, or provided by an installed package (entry points)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from inspect import get_annotations
from typing import Generic, TypeVar

from .errors import ConfigError

logger = logging.getLogger("hf_tiered_cache")

Part = TypeVar("Part")


class Registry(Mapping[str, Part], Generic[Part]):
    """Parts of one kind by name. Iteration yields all names; a plug-in is loaded when its name is looked up.

    Args:
        kind: What the parts are, for messages, such as "method".
        group: Entry point group of the plug-ins.
        built_in: Parts of this package. A plug-in cannot take their names.
        fault: Function that returns what is wrong with a part of a name, or "".
    """

    def __init__(
        self, kind: str, group: str, built_in: Mapping[str, Part], fault: Callable[[str, object], str]
    ) -> None:
        self._kind, self._group, self._fault = kind, group, fault
        self._built_in = frozenset(built_in)
        self._parts = dict(built_in)
        self._loaded = set[str]()  # names of parts of installed packages

    def register(self, name: str, part: Part) -> None:
        """Add a part. A part that a program registers takes precedence over one of an installed package.

        Args:
            name: Name of the part: letters, digits and underscores.
            part: The part. The same part may be registered again.

        Raises:
            ConfigError: The name is invalid or taken, or the part is invalid.
        """
        if not (isinstance(name, str) and name.isidentifier()):
            raise ConfigError(f"{name!r} is not a valid name of a {self._kind}; use letters, digits and underscores")
        if fault := self._fault(name, part):
            raise ConfigError(f"the {self._kind} {name} cannot be registered: {fault}")
        if self._parts.get(name, part) is not part and name not in self._loaded:
            names = ", ".join(self._parts)
            raise ConfigError(f"a {self._kind} with the name {name!r} already exists; choose another one than {names}")
        self._parts[name] = part
        self._loaded.discard(name)

    def name_of(self, part: object) -> str | None:
        """Return the name of a part, or None. Loads no plug-in."""
        for name, registered in self._parts.items():
            if registered is part:
                return name
        address = f"{getattr(part, '__module__', '')}:{getattr(part, '__qualname__', '')}"
        return next((name for name, entry in self._installed.items() if entry.value == address), None)

    def loaded(self) -> Iterable[Part]:
        """Return the parts that need not be loaded first."""
        return self._parts.values()

    def __getitem__(self, name: str) -> Part:
        if name not in self._parts and isinstance(name, str) and name in self._installed:
            self._parts[name] = self._load(self._installed[name])
            self._loaded.add(name)
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._parts, *self._installed]))

    def __len__(self) -> int:
        return len(set(self._parts) | set(self._installed))

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages, by name."""
        entries: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self._group):
            if not entry.name.isidentifier() or entry.name in self._built_in or entry.name in entries:
                reason = "the name is taken" if entry.name.isidentifier() else "a name has letters, digits, underscores"
                logger.warning("the %s %s of %s is ignored: %s", self._kind, entry.name, _package(entry), reason)
            else:
                entries[entry.name] = entry
        return entries

    def _load(self, entry: EntryPoint) -> Part:
        try:
            part: Part = entry.load()
        except Exception as error:  # whatever a plug-in raises
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"the {self._kind} {entry.name} of {_package(entry)} cannot be loaded: {reason}"
            ) from error
        if fault := self._fault(entry.name, part):
            raise ConfigError(f"{entry.value} of {_package(entry)} is not a {self._kind}: {fault}")
        return part


@lru_cache
def ignored_member(kind: type, optional: tuple[str, ...] = ()) -> str:
    """Return which attribute of a plug-in's class has no effect, and why, or "".

    It is an option without an annotation, or a misspelling of an inherited member (of one of `optional`, if any).
    """
    options = {option.name for option in fields(kind)} if is_dataclass(kind) else set()
    package = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == __package__]
    known = sorted(optional or {name for base in package for name in dir(base)})
    for base in (base for base in kind.__mro__ if base not in package):
        for name in vars(base):
            if name in options and name not in get_annotations(base):
                return f"{name} is an option, which only an annotation changes; write {name}: ... = ..."
            if name[0] == "_" or name in options or name in known:
                continue
            for similar in get_close_matches(name, known, 1, 0.85):  # one letter of eight differs
                return f"nothing uses {name}; did you mean {similar}? If not, choose another name"
    return ""


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else entry.value
