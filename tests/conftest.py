"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # see `_quiet_and_reproducible`; this holds for processes, too

import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings
from servers import place_of  # noqa: F401  # a fixture

import eval.baselines  # noqa: F401  # registered, so that what is asked of every method is asked of them

# background jobs of a shell ignore SIGINT, and so would their children
signal.signal(signal.SIGINT, signal.default_int_handler)

# the same examples each time, so that who changes nothing breaks nothing; `make test-thorough` looks for others
settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", action="store_true", help="run the tests that need a pretrained model, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need a pretrained model unless `--real` asks for them."""
    if not config.getoption("--real"):
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="needs a pretrained model: make test-real"))


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that the many collections of the tests skip them."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def _no_check_by_chance(monkeypatch):
    """Let spot checks start with no credit instead of a random one."""
    from hf_tiered_cache.cache.spot_check import SpotChecks

    monkeypatch.setattr(SpotChecks, "first_credit", staticmethod(lambda: 0.0))


@pytest.fixture
def root(tmp_path):
    """Return the folder of `store`."""
    return tmp_path / "store"


@pytest.fixture
def store(root):
    """Open an empty store; tests that need another one define their own."""
    from hf_tiered_cache import KVStore

    with KVStore(root, engine="posix") as opened:
        yield opened


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
