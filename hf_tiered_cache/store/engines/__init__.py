"""I/O engines, which read bytes from files into memory. They share one interface and are selected at run time.

A new engine needs one module here and one entry in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...errors import ConfigError, EngineUnavailableError, unknown_name
from ..faults import LOGGER
from .base import Engine, EngineFile, ReadOp
from .kvikio import KvikioEngine
from .posix import PosixEngine

ENGINES: dict[str, Callable[[], Engine]] = {
    "kvikio": KvikioEngine,
    "page_cache": partial(PosixEngine, direct=False),
    "posix": PosixEngine,
}

__all__ = ["ENGINES", "Engine", "EngineFile", "ReadOp", "open_engine"]


def open_engine(name: str | Engine = "auto") -> Engine:
    """Open the engine called `name`. An `Engine` object is returned as it is.

    "auto" selects kvikio if GPUDirect Storage works, else posix. Raises ConfigError if there is no such engine, or
    EngineUnavailableError if it does not work on this machine.
    """
    engine: Engine
    if isinstance(name, Engine):
        engine = name
    elif name != "auto":
        if name not in ENGINES:
            raise ConfigError(unknown_name("engine", name, ["auto", *ENGINES]))
        engine = ENGINES[name]()
    else:
        try:
            engine = KvikioEngine(compat=False)
        except EngineUnavailableError as error:
            LOGGER.debug("I/O engine: %s", error)
            engine = PosixEngine()
    LOGGER.info("I/O engine: %s", engine.describe())
    return engine
