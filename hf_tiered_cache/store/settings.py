"""Settings of stores from environment variables and from a file, and names of stores. Imports nothing large.

An argument in the code counts before the variable `HF_TIERED_CACHE_<NAME>`, and a variable before the file. The name of
a store is the path of a folder, or an address such as `s3://bucket/prefix`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from ..errors import ConfigError, suggest, unknown_name, with_type
from ..units import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

P = ParamSpec("P")
S = TypeVar("S")
PREFIX = "HF_TIERED_CACHE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
FILE_NAME = "hf_tiered_cache.toml"
OTHER_VARIABLES = (f"{PREFIX}KEY_FILE", f"{PREFIX}MODELS", FILE_VARIABLE)
"""Variables with this prefix that are no settings of a store."""


class Setting(NamedTuple):
    """Value of an argument of `KVStore`, and its source, such as "environment variable HF_TIERED_CACHE_ENGINE"."""

    value: Any
    source: str


def _size(text: str | int) -> str | int:
    parse_bytes(text, "size")
    return text


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value == "none" else parse(value)


def _switch(value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]


def _address(text: str) -> str:
    if not scheme_of(text):
        raise ValueError(text)
    return text


_SIZE = _size, "a size, such as 10GiB"
SETTINGS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "device_memory": _SIZE,
    "host_memory": _SIZE,
    "index_memory": _SIZE,
    "disk_quota": (_optional(_size), "a size, such as 100GiB, or none"),
    "free_space_floor": _SIZE,
    "queue_memory": _SIZE,
    "queue_device_memory": _SIZE,
    "engine": (str, "the name of an I/O engine"),
    "policy": (str, "the name of an eviction policy"),
    "codec": (str, "the name of a codec"),
    "verify": (_switch, "true or false"),
    "ttl": (_optional(float), "a number of seconds, or none"),
    "spot_checks": (float, "a share, such as 0.01"),
    "remote": (_address, "an address, such as s3://bucket/prefix"),
    "remote_write": (str, "always, pinned or never"),
}
"""Arguments of `KVStore` that can be set from outside: a function that reads the value, and what the value is."""


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """Return the settings of the file and of the environment. Raises ConfigError for unknown or unreadable ones.

    The file is the one that `HF_TIERED_CACHE_CONFIG` names, else `hf_tiered_cache.toml` in the working directory.
    """
    settings = {}
    path = environment.get(FILE_VARIABLE)
    if path or Path(FILE_NAME).is_file():
        file = Path(path or FILE_NAME)
        for name, value in _read_file(file).items():
            settings[name] = _setting(name, value, f"the file {file}")
    by_variable = {PREFIX + name.upper(): name for name in SETTINGS}
    for variable, value in environment.items():
        if variable in by_variable:
            name = by_variable[variable]
            settings[name] = _setting(name, value, f"environment variable {variable}")
        elif variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            raise ConfigError(unknown_name("environment variable", variable, [*by_variable, *OTHER_VARIABLES]))
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read ({error.strerror})") from None
    except ValueError as error:  # also not UTF-8
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from None
    return document


def _setting(name: str, value: Any, source: str) -> Setting:
    if name not in SETTINGS:
        advice = "the settings are: " + ", ".join(SETTINGS)
        raise ConfigError(f"{source} sets {name!r}, which is no setting{suggest(name, SETTINGS, advice)}")
    parse, meaning = SETTINGS[name]
    try:
        return Setting(parse(value), source)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"{source} sets {name} to {value!r}; it must be {meaning}") from None


def _is_in_folder(path: object = None, *, backend: object = None, **_: object) -> bool:
    return backend is None and not (isinstance(path, str) and scheme_of(path))


def configurable(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Let an `__init__` take arguments that its caller omits from `read_settings`."""
    from .cipher import Hidden  # imports numpy, which the commands that import this module do without

    @wraps(init)
    def configured(self: S, /, *arguments: P.args, **keywords: P.kwargs) -> None:
        call = Hidden(partial(init, self, *arguments, **keywords))
        arguments, keywords = (), {}  # type: ignore[assignment]  # tracebacks may show variables
        outside = {name: setting.value for name, setting in read_settings().items() if name not in call.value.keywords}
        if not _is_in_folder(*call.value.args[1:], **call.value.keywords):
            outside.pop("engine", None)  # other backends read by themselves
        call.value(**outside)

    return configured


_ADDRESS = re.compile(r"([\w.+-]+)://.*", re.DOTALL)


def scheme_of(store: str | os.PathLike[str]) -> str:
    """Return the scheme of an address, such as "s3", or an empty string for a path."""
    match = _ADDRESS.fullmatch(store) if isinstance(store, str) else None
    return match[1] if match else ""


def folder_of(store: str | os.PathLike[str]) -> Path | None:
    """Return the resolved path of a folder, or None for the address of a backend. Raises ConfigError for others."""
    if not isinstance(store, str | os.PathLike):
        raise ConfigError(f"a store is a folder or an address, as a str or Path, not {with_type(store)}")
    if not os.fspath(store):
        raise ConfigError("the path of the store is empty; pass a folder, or '.' for the current folder")
    if scheme_of(store):
        return None
    try:
        return Path(store).expanduser().resolve()  # independent of later changes of the working directory
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a null character
        raise ConfigError(f"{os.fspath(store)!r} cannot be the folder of a store: {error}") from None


def without_secrets(address: str) -> str:
    """Return an address for messages: without user, password, and options, which can be a signature or a password.

    A password with a character that it must not have, such as "/", seems to end there: then all of it is left out.
    """
    if not (scheme := scheme_of(address)):
        return address
    try:
        parts = urlsplit(address.removeprefix(f"{scheme}:"))  # no scheme of a URL has an underscore
    except ValueError:
        return f"{scheme}://..."
    if ":" in parts.netloc and "@" not in parts.netloc and "@" in address:
        return f"{scheme}://..."
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def split_address(address: str, has_options: bool = False) -> SplitResult:
    """Return the parts of an address. Raises ConfigError if it would name another place than it seems to.

    "#" and, unless it `has_options`, "?" would end its path, and control characters would be left out.
    """
    for letter in address:
        if letter == "#" or (letter == "?" and not has_options) or letter < " ":
            raise ConfigError(
                f"{without_secrets(address)} contains {letter!r}; write /, ?, # and @ in a name, a password or a "
                "prefix as %2F, %3F, %23 and %40, and a line break as %0A"
            )
    return urlsplit(address)


def split_server(address: str) -> SplitResult:
    """Return the parts of a server's address. Raises ConfigError as `split_address`, or if its port is invalid."""
    parts = split_address(address, has_options=True)
    try:
        _ = parts.port
    except ValueError:  # the message shows it, and it may be a part of the password
        raise ConfigError(
            f"{without_secrets(address)} names no valid port; write /, ?, # and @ in a password as %2F, %3F, %23 and "
            "%40"
        ) from None
    return parts


def path_in(address: str) -> Path | None:
    """Return the resolved path that an address of a file or folder names, or None. Raises as `split_address`."""
    parts = split_address(address)
    path = unquote_to_bytes(os.fsencode(parts.netloc + parts.path))  # not `unquote`, which replaces what is not UTF-8
    return None if not path.strip(b"/") or b"\0" in path else Path(os.path.realpath(os.fsdecode(path)))
