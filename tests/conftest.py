"""Fixtures and settings of all tests."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
from collections import Counter

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # see `_quiet_and_reproducible`; this holds for processes, too

import warnings

import pytest
import torch
import typer.main
from families import build
from hypothesis import settings
from servers import place_of, silent_hub  # noqa: F401  # fixtures
from thorough import FEW, THOROUGH
from transformers import PreTrainedModel

import eval.baselines  # noqa: F401  # registered, so that what is asked of every method is asked of them

# background jobs of a shell ignore SIGINT, and so would their children
signal.signal(signal.SIGINT, signal.default_int_handler)

# a call of a Typer app builds the objects of all its commands, which takes longer than most commands
typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", action="store_true", help="run the tests that need a pretrained model, too")
    parser.addoption("--backend", help="address that tests/store/test_backend.py checks; {} becomes a name")
    parser.addoption("--thorough", action="store_true", help="run all combinations, and more examples of each property")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples of a property are drawn, and prepare the import of test modules."""
    settings.load_profile(THOROUGH if config.getoption("--thorough") else FEW)
    worker = getattr(config, "workerinput", None)
    if worker or not config.getoption("numprocesses", None):  # the process that distributes tests collects none
        gc.disable()  # until `pytest_collection_finish`: nearly all that imports and collection make stays


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out."""
    thorough = config.getoption("--thorough")
    return "examples: " + ("all" if thorough else "some of each property; make test-thorough runs all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that only `--thorough` runs, and skip those with a pretrained model unless `--real` is given."""
    if not config.getoption("--thorough"):
        deselected = [item for item in items if item.get_closest_marker("thorough")] + _thinned(items)
        config.hook.pytest_deselected(items=deselected)
        left_out = set(deselected)
        items[:] = [item for item in items if item not in left_out]
    if not config.getoption("--real"):
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="needs a pretrained model: make test-real"))


def _thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the combinations that tests marked `thin(n)` leave out, where n values of a parameter take turns."""
    left_out, numbers = [], Counter[str]()
    for item in items:
        if (marker := item.get_closest_marker("thin")) and not item.get_closest_marker("thorough"):
            period, test = marker.args[0], item.nodeid.partition("[")[0]
            turn, value = divmod(numbers[test], period)
            if value != (turn + turn // period) % period:  # not in step with a parameter that takes turns itself
                left_out.append(item)
            numbers[test] += 1
    return left_out


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that the many collections of the tests skip them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return a tiny model of the module's `FAMILY`, a Llama if it names none."""
    return build(getattr(request.module, "FAMILY", "llama"))


@pytest.fixture
def uncollected():
    """Disable garbage collection in the test: what is freed is freed with its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _quiet_and_reproducible():
    """Use one thread, which is faster for tiny tensors and leaves cores to other test workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def handlers_at_start():
    """Return the handlers of the library's logger before any test."""
    from hf_tiered_cache.store.faults import LOGGER

    return list(LOGGER.handlers)


@pytest.fixture(autouse=True)
def _logger_as_at_start(handlers_at_start):
    """Undo what a server configured for the whole process: uvicorn sets level, handlers and propagation."""
    from hf_tiered_cache.store.faults import LOGGER

    LOGGER.setLevel(logging.NOTSET)
    LOGGER.propagate = True
    LOGGER.handlers[:] = handlers_at_start


@pytest.fixture(autouse=True)
def _nothing_by_chance(monkeypatch):
    """Let spot checks start with no credit instead of a random one, and let no busy machine cause a warning."""
    from hf_tiered_cache.cache import cost_model
    from hf_tiered_cache.cache.spot_check import SpotChecks

    monkeypatch.setattr(SpotChecks, "first_credit", staticmethod(lambda: 0.0))
    monkeypatch.setattr(cost_model, "_MUCH_SECONDS", float("inf"))


@pytest.fixture
def root(tmp_path):
    """Return the folder of `store`."""
    return tmp_path / "store"


@pytest.fixture
def store(root):
    """Open an empty store; tests that need another one define their own."""
    from hf_tiered_cache import KVStore

    with KVStore(root, engine="posix") as kv_store:
        yield kv_store


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command in this process, with exit status, standard output and error."""

    def run(*arguments):
        from hf_tiered_cache import cli

        monkeypatch.setattr(sys, "argv", ["hf-tiered-cache", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute decoded tokens with the kernel of a DynamicCache, so that bits can be compared (see test_fold.py)."""
    monkeypatch.setattr("hf_tiered_cache.patches.attention.can_fold", lambda *args: False)
