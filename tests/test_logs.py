"""Log lines name the library, in programs that configure logging and in those that do not."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from hf_tiered_cache.store.faults import LOGGER, StandaloneHandler, mark_lines

WARN = "logging.getLogger('hf_tiered_cache').warning('%d tokens', 5)"


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("pass", "[hf_tiered_cache] 5 tokens"),
        ("logging.basicConfig(format='%(name)s says %(message)s')", "hf_tiered_cache says 5 tokens"),
        ("logging.getLogger('hf_tiered_cache').addHandler(logging.StreamHandler())", "5 tokens"),
        ("logging.getLogger('hf_tiered_cache').propagate = False", "[hf_tiered_cache] 5 tokens"),
    ],
)
def test_each_line_is_printed_once_and_names_the_library(before, line):
    code = f"import logging, hf_tiered_cache\n{before}\n{WARN}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert process.stderr.splitlines() == [line]
    assert not process.stdout


def test_the_handler_is_added_once_and_leaves_levels_to_the_program():
    mark_lines()
    assert sum(isinstance(handler, StandaloneHandler) for handler in LOGGER.handlers) == 1
    assert LOGGER.level == logging.NOTSET


def test_a_platform_without_file_locks_is_refused_at_import_with_what_to_do():
    code = "import sys; sys.modules['fcntl'] = None; import hf_tiered_cache"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ImportError: hf_tiered_cache needs Linux or another POSIX system")
