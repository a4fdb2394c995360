"""Checks of what the methods of an `ObjectBackend` return, since plug-ins implement them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral
from typing import Any, TypeVar

from ..errors import ConfigError, with_type
from .tree import Stored

_T = TypeVar("_T")


def _is_stored(answer: object) -> bool:
    return isinstance(answer, Stored) and isinstance(answer.size, Integral) and isinstance(answer.nbytes, Integral)


def _is_bytes(answer: Any) -> bool:
    try:
        memoryview(answer)
    except TypeError:
        return False
    return True


def _holds(answer: object, is_valid: Callable[[object], bool]) -> bool:
    return isinstance(answer, Mapping) and all(map(is_valid, answer.values()))


ANSWERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "find_object": ("Stored(version, size, nbytes) or None", lambda answer: answer is None or _is_stored(answer)),
    "list_objects": (
        "a dict of Stored(version, size, nbytes) by name in the folder",
        lambda answer: _holds(answer, _is_stored) and not any("/" in name for name in answer),
    ),
    "get_object": ("bytes", _is_bytes),
    "get_beginnings": ("a dict of bytes by name", lambda answer: _holds(answer, _is_bytes)),
    "delete_object": ("True or False", lambda answer: isinstance(answer, Integral)),
    "free": ("a number of bytes or None", lambda answer: answer is None or isinstance(answer, Integral)),
}
"""Descriptions of what each method must return, and checks of it, by name of the method."""


def check_answers(kind: type) -> None:
    """Let the methods that a class defines raise ConfigError, which names them, if they return anything else."""
    for name in ANSWERS.keys() & vars(kind).keys():
        setattr(kind, name, _checked(vars(kind)[name], name))


def _checked(method: Callable[..., _T], name: str) -> Callable[..., _T]:
    expected, is_valid = ANSWERS[name]

    @wraps(method)
    def call(backend: object, /, *args: Any, **kwargs: Any) -> _T:
        answer = method(backend, *args, **kwargs)
        if not is_valid(answer):
            message = f"{type(backend).__name__}.{name} must return {expected}, not {with_type(answer)}"
            raise ConfigError(f"{message} for {args[0]}" if args and isinstance(args[0], str) else message)
        return answer

    return call
