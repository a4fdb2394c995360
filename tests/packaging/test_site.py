"""`make docs` builds a site in which every link leads somewhere, and every public name and command is described."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from building import ROOT

import hf_tiered_cache
import hf_tiered_cache.methods
from hf_tiered_cache import RequestStats, StoreStats
from hf_tiered_cache.cli import app
from hf_tiered_cache.errors import TieredCacheError
from hf_tiered_cache.stats import RemoteStats, RequestDetails


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="install the extra docs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return folder


def described(site: Path, page: str) -> set[str]:
    """Return the anchors of a page."""
    return set(re.findall(r' id="([^"]+)"', (site / page / "index.html").read_text(encoding="utf-8")))


def public_exceptions(base: type[Exception]) -> set[str]:
    names = {base.__name__} if base.__module__ == "hf_tiered_cache.errors" else set()
    return names.union(*map(public_exceptions, base.__subclasses__()))


def test_every_public_name_is_described(site):
    names = public_exceptions(TieredCacheError)
    assert names >= {"LostKVError", "OtherKeyError"}
    assert {f"hf_tiered_cache.errors.{name}" for name in names} <= described(site, "api-errors")
    of_methods = set(hf_tiered_cache.methods.__all__)
    assert {f"hf_tiered_cache.methods.{name}" for name in of_methods} <= described(site, "api-methods")
    other_names = set(hf_tiered_cache.__all__) - names - of_methods
    assert {f"hf_tiered_cache.{name}" for name in other_names} <= described(site, "api")
    of_bases = {"KVStore.verify", "TieredCache.fork", "TieredCache.suspend"}  # also members that a class inherits
    assert {f"hf_tiered_cache.{name}" for name in of_bases} <= described(site, "api")


def test_every_command_is_described(site):
    assert set(typer.main.get_command(app).commands) <= described(site, "cli")


def test_every_counter_is_described(site):
    html = (site / "statistics" / "index.html").read_text(encoding="utf-8")
    names = {field.name for kind in (RequestStats, RequestDetails, StoreStats, RemoteStats) for field in fields(kind)}
    assert not [name for name in sorted(names) if f"<code>{name}</code>" not in html]


def test_pages_and_pictures_of_results_are_in_the_site_and_code_is_not(site):
    html = (site / "performance" / "index.html").read_text(encoding="utf-8")
    assert 'href="../bench/results/prefix-qwen2.5-0.5b-float32-cpu/"' in html
    assert (site / "bench/results/prefix-qwen2.5-0.5b-float32-cpu/index.html").exists()
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="bench/results/prefix-smollm2-135m-float32-cpu.png"' in home
    assert 'href="quick-start/"' in home and "/blob/main/LICENSE" in home
    assert not list(site.rglob("*.py"))
