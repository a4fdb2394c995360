"""Models and data of the hub: whether it can be reached, and why a model cannot be loaded.

The hub is asked once and for a few seconds, since its clients retry for minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from huggingface_hub import constants, get_session
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from ..errors import ConfigError, TieredCacheError
from ..store.threads import DaemonPool

PROBE_SECONDS = 3.0
_MISSING: dict[type[Exception], str] = {
    HFValidationError: "there is no such folder; check the path",
    LocalEntryNotFoundError: (
        "there is no such folder, the local cache of the Hub does not have it, and the Hub is not reached; check the "
        "name, or download the model first"
    ),
    RepositoryNotFoundError: (
        "there is no such folder, and no such model on the Hub; check the name, or call `hf auth login` if it is "
        "private"
    ),
}
"""Advice by error of the hub's client, for the errors that mean a missing model."""


@cache
def go_offline_without_hub() -> bool:
    """Use only the local cache for data sets and models if the hub does not answer within `PROBE_SECONDS`.

    The hub is not contacted if HF_HUB_OFFLINE is set.

    Returns:
        Whether the hub answered.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answered = _hub_answers()
    if not answered:
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it copied the setting on import; a later import copies the new value
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return answered


def _hub_answers() -> bool:
    """Return whether the hub answers, through the proxy and with the certificates of its client."""
    pool = DaemonPool(1, "hf-tiered-hub")  # a DNS lookup has no time limit of its own
    try:
        pool.submit(partial(get_session().head, constants.ENDPOINT, timeout=PROBE_SECONDS)).result(PROBE_SECONDS)
    except Exception:  # clients raise different errors by version; all mean no answer
        return False
    finally:
        pool.close(0.0)
    return True


@contextmanager
def loading(name: str | None, *errors: type[Exception]) -> Iterator[None]:
    """Enclose the loading of a model; None if none is loaded yet. Raises ConfigError in place of these errors."""
    if name is not None and not Path(name).is_dir():
        go_offline_without_hub()
    try:
        yield
    except (TieredCacheError, MemoryError, torch.OutOfMemoryError):
        raise
    except errors as error:
        raise ConfigError(unloadable(name, error)) from error


def unloadable(name: object, error: BaseException) -> str:
    """Return one sentence that says why a model cannot be loaded, and what to do if it does not exist."""
    reason, cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__, error.__cause__
    if isinstance(name, str) and (folder := Path(name)).is_dir() and not any(folder.glob("*config.json")):
        reason = "the folder has no config.json; pass the folder that save_pretrained() wrote"
    elif not isinstance(cause, GatedRepoError):
        reason = next((advice for kind, advice in _MISSING.items() if isinstance(cause, kind)), reason)
    return f"the model {name!r} cannot be loaded: {reason}"
