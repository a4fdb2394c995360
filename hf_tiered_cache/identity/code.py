"""Description of code: functions by what they refer to, classes by the members that described code names."""

from __future__ import annotations

import torch
from torch import nn

from .description import HEAP_TYPE, functions_of
from .functions import LEAF, NOTHING, FunctionDescription
from .names import CONSTRUCTORS, NO_MEMBER, NOT_CONSTRUCTED, is_special, uncalled
from .origin import INSTALLED, USER, code_digest, origin_of_class, referenced_names


class CodeDescription(FunctionDescription):
    """A description that follows functions and classes into what they refer to. See `FunctionDescription`."""

    def _describe_class(self, location: str, kind: type) -> None:
        names = NOTHING if issubclass(kind, NOT_CONSTRUCTED) else CONSTRUCTORS | {"__call__"}
        if issubclass(kind, torch.autograd.Function):
            names = frozenset({"forward"})  # which `apply` runs
        elif origin_of_class(kind) != USER:  # of a package: calls of its constructors are not followed
            self._depth = LEAF
        self.add_members(location, kind, names, special=False)

    def _add_called_members(self) -> None:
        for kind, location in list(self._user_classes.items()):
            named = {name for base in kind.__mro__ if origin_of_class(base) == USER for name in base.__dict__}
            self._guard(self.add_members, location, kind, frozenset(named & self._called - uncalled(kind)), False)
        for kind, location in list(self._package_classes.items()):
            named = {name for base in kind.__mro__ if _holds_methods(base) for name in base.__dict__}
            self._guard(self.add_members, location, kind, frozenset(named & self._called - uncalled(kind)), False)

    def add_members(self, location: str, kind: type, names: frozenset[str], special: bool = True) -> None:
        """Describe the members of a class with the given names, and the members that their code refers to.

        Of a class in user code, `forward`, special methods and data are described, too, and if `special`, the special
        methods of its bases. `finish` describes what other code calls.
        """
        described = self._members.get(kind)
        if described is not None and names <= described and not (special and kind not in self._with_special):
            return
        bases = [base for base in kind.__mro__ if base.__flags__ & HEAP_TYPE]
        pending = set(names)
        if described is None:
            described = self._members[kind] = set()
            self.words.append(" ".join(f"{base.__module__}.{base.__qualname__}" for base in bases))
            self.watch.slot(kind, "__mro__")  # a class gets another one if the bases of any of its bases change
            for base in bases:
                self.watch.members(base)
                if origin_of_class(base) == USER:
                    self._user_classes[kind] = location
                    pending |= self._add_own_members(base) - uncalled(kind) - {"__hash__"}
            if origin_of_class(type(kind)) == USER:  # a metaclass
                self.watch.type_of(kind)
                self.add(location, type(kind))
        if special and kind not in self._with_special:
            self._with_special.add(kind)
            self._package_classes[kind] = location
            pending |= {name for base in bases for name in base.__dict__ if is_special(name)}
        pending -= described | NO_MEMBER
        while pending:
            described |= pending
            referenced: set[str] = set()
            for base in bases:
                origin = origin_of_class(base)
                for name in sorted(pending & base.__dict__.keys()):
                    if not self.watch.member(base, name):
                        continue
                    self.words.append(f"{base.__qualname__}.{name}")
                    member = base.__dict__[name]
                    self._refer(f"{location}.{name}", member, origin)
                    for function in functions_of(member, []):
                        referenced |= referenced_names(function.__code__)
            pending = referenced - described - NO_MEMBER

    def _add_own_members(self, kind: type) -> set[str]:
        """Describe the code of all members of a user class, and return those that are used without their name."""
        unnamed = set()
        for name in sorted(kind.__dict__.keys() - NO_MEMBER):
            functions = functions_of(kind.__dict__[name], [])
            self.watch.member(kind, name)
            self.words += [name, *(code_digest(function.__code__) for function in functions)]
            for function in functions:
                self.watch.function(function)
            if not functions or name == "forward" or (name.startswith("__") and name.endswith("__")):
                unnamed.add(name)
        return unnamed


def _holds_methods(kind: type) -> bool:
    """Return whether passes may call methods of a package's class on an object that they do not belong to.

    The methods of torch and of the base classes of transformers have common names, which mean others in most code.
    """
    is_module_of_others = issubclass(kind, nn.Module) and origin_of_class(kind) == INSTALLED
    return is_module_of_others or kind.__module__.startswith(("transformers.models.", "peft.tuners."))
