"""Command `config`: the settings that a store gets from the environment and from a file."""

from __future__ import annotations

import inspect

from ..store.address import without_secrets
from ..store.settings import FILE_NAME, FILE_VARIABLE, PREFIX, SETTINGS, read_settings
from .output import AsJson, figures, print_json


def config(as_json: AsJson = False) -> None:
    """Show the settings of stores, and where they come from.

    Each setting is an argument of KVStore. It can be set by an environment variable, or by a line of the file that
    HF_TIERED_CACHE_CONFIG names, by default hf_tiered_cache.toml in the working directory:

    \b
      export HF_TIERED_CACHE_HOST_MEMORY=8GiB
      echo 'disk_quota = "100GiB"' >> hf_tiered_cache.toml

    Arguments in the code count before variables, and variables before the file.
    """  # noqa: D301
    from ..kvstore import KVStore

    defaults = inspect.signature(KVStore).parameters
    found = read_settings()
    rows = {
        name: (found[name].value, found[name].source) if name in found else (defaults[name].default, "default")
        for name in SETTINGS
    }
    rows = {name: (_shown(value), source) for name, (value, source) in rows.items()}
    if as_json:
        return print_json({name: {"value": value, "source": source} for name, (value, source) in rows.items()})
    table = figures("setting", "value", "from", "variable")
    for name, (value, source) in rows.items():
        text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        table.add_row(name, text, source, PREFIX + name.upper())
    table.show()
    print(f"\nfile: {FILE_NAME} in the working directory, or the one that {FILE_VARIABLE} names")


def _shown(value: object) -> object:
    """Return a value without passwords, such as that of a remote."""
    return without_secrets(value) if isinstance(value, str) else value
