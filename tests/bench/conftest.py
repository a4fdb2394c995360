"""Benchmarks need the extra `eval`."""

from extras import pytest_pycollect_makemodule  # noqa: F401  # a hook
