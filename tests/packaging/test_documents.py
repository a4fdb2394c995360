"""The links of the documents lead to files that are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/results/**/*.md"))]
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def links_of(page: Path) -> list[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    return _LINK.findall(prose)


def test_the_readmes_links_hold_where_it_is_shown_without_the_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = f"{project['urls']['Repository']}/blob/main/"
    links = links_of(ROOT / "README.md")
    assert len(links) > 5
    headings = re.findall(r"^#+ (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    anchors = {"#" + heading.lower().replace(" ", "-") for heading in headings}
    assert [link for link in links if "://" not in link and link not in anchors] == []
    own_paths = [
        link.removeprefix(files).partition("#")[0] for link in links if link.startswith(project["urls"]["Homepage"])
    ]
    assert [path for path in own_paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_to_files(page):
    paths = [link.partition("#")[0] for link in links_of(page) if "://" not in link]
    assert [path for path in paths if path and not (page.parent / path).exists()] == []
