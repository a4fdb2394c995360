"""Optional dependencies of this project that tests need."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

_EVAL = ("bm25s", "datasets", "evaluate", "gguf", "jieba", "lm_eval", "matplotlib", "rapidfuzz", "rouge", "scipy")


def need_eval() -> None:
    """Skip the test, or the module that is collected, if a package of the extra `eval` is not installed."""
    if missing := [package for package in _EVAL if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}: pip install '.[eval]'")


class _EvalModule(pytest.Module):
    """Test module that needs the extra `eval`."""

    def collect(self):
        need_eval()
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    """Collect the modules of a folder, if its conftest.py imports this hook, as modules that need the extra `eval`."""
    return _EvalModule.from_parent(parent, path=module_path)
