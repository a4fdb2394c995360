"""Hooks of mkdocs: links between pages and the rest of the repository, and the generated references.

Pages are written for GitHub, where all files of the repository can be linked. In the site, links to pages and pictures
stay in the site, and links to other files lead to the repository. A link to a missing file is a warning.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PACKAGE = "hf_tiered_cache"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "*/results/*.md",
    "*/results/*.png",
    "*/results/*/*.md",
    "*/results/*/*.png",
    "*/reference/*/*.md",
    "*/reference/*/*.png",
)
"""Pages and pictures of the site that are not in docs/, as patterns."""
HOME = {"README.md": "index.md"}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)
_MARK = re.compile(r"<!-- (commands|counters|names) ?(\S*) -->")
_NOT_IN_THE_SITE = re.compile(r"<!-- not in the site -->.*?<!-- end -->\n*", re.S)
_TERMINAL_WIDTH = 100
"""Width of the terminal that usage lines are wrapped for."""
logger = logging.getLogger("mkdocs.plugins.hooks")


def uri_of(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return HOME.get(path) or path.removeprefix("docs/")


def path_of(uri: str, files: Files) -> str:
    """Return the path in the repository of a page of the site."""
    file = files.get_file_from_path(uri)
    return Path(file.abs_src_path).relative_to(ROOT).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are outside docs/."""
    paths = [*HOME, *(path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in ROOT.glob(pattern))]
    for path in sorted({*paths}):
        file = File(uri_of(path), str(ROOT), config.site_dir, config.use_directory_urls)
        file.abs_src_path = str(ROOT / path)
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the generated references, leave out what refers to them, and rewrite links that lead out of docs/."""
    markdown = _NOT_IN_THE_SITE.sub("", markdown)
    markdown = _MARK.sub(lambda mark: _GENERATORS[mark[1]](mark[2]), markdown)
    here = path_of(page.file.src_uri, files)

    def rewritten(link: re.Match[str]) -> str:
        return link[1] + target_of(link[2], here, config.repo_url.rstrip("/"), files) + link[3]

    parts = _CODE.split(markdown)  # code is at odd places
    return "".join(part if place % 2 else _LINK.sub(rewritten, part) for place, part in enumerate(parts))


def target_of(link: str, here: str, repository: str, files: Files) -> str:
    """Return the target in the site of a link from a page of the repository.

    Args:
        link: Link as it is in the page: relative, or an address of the repository's main branch.
        here: Path of the page in the repository.
        repository: Address of the repository.
        files: Files of the site.
    """
    raw = repository.replace("github.com", "raw.githubusercontent.com")
    address, hash_sign, anchor = link.partition("#")
    for prefix in (f"{repository}/blob/main/", f"{raw}/main/"):
        if address.startswith(prefix):
            path = address.removeprefix(prefix)
            break
    else:
        if not address or "://" in address or address.startswith("mailto:"):
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), address))
    if not (ROOT / path).exists():
        logger.warning("%s links to %s, which does not exist", here, path)
    uri = uri_of(path)
    if files.get_file_from_path(uri) is None:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{repository}/{kind}/main/{path}{hash_sign}{anchor}"
    return posixpath.relpath(uri, posixpath.dirname(uri_of(here)) or ".") + hash_sign + anchor


def names(module_path: str) -> str:
    """Return mkdocstrings directives for all public names of a module; names of other pages are listed as links."""
    module = griffe.load(module_path, search_paths=[str(ROOT)], resolve_aliases=False)
    others = [f"{PACKAGE}.{page}" for page in ("methods", "errors") if module_path == PACKAGE]
    # base classes are on the same page, except those of the main package, which are private
    options = f"\n    options:\n      inherited_members: {str(module_path == PACKAGE).lower()}"
    directives, links = [], []
    for name in sorted(module.exports or (name for name, member in module.classes.items() if member.is_public)):
        member = module[name]
        target = member.target_path if member.is_alias else member.path
        if any(target.startswith(f"{other}.") for other in others):
            links.append(f"[`{name}`][{'.'.join(target.split('.')[:2])}.{name}]")
        else:
            directives.append(f"::: {module_path}.{name}{options}")
    listed = f"Also exported, and described on the next pages: {', '.join(links)}.\n\n" if links else ""
    return listed + "\n\n".join(directives)


def counters(class_name: str) -> str:
    """Return the table of a class of statistics: its description, then all fields and properties with theirs."""
    kind = griffe.load(f"{PACKAGE}.stats", search_paths=[str(ROOT)])[class_name]
    rows = [
        f"| `{name}` | {_cell(member.docstring.value)} |"
        for name, member in kind.attributes.items()
        if member.is_public and member.docstring
    ]
    return "\n".join([kind.docstring.value, "", "| counter | meaning |", "| --- | --- |", *rows])


def commands(_: str) -> str:
    """Return the reference of the command line, from the program itself."""
    from hf_tiered_cache.cli import app

    group = typer.main.get_command(app)
    parts = []
    for name in group.commands:
        command = group.commands[name]
        context = command.make_context(
            name, [], parent=typer.Context(group, info_name="hf-tiered-cache"), resilient_parsing=True
        )
        context.terminal_width = _TERMINAL_WIDTH
        usage = " ".join(command.get_usage(context).split()).removeprefix("Usage: ")
        records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
        rows = [f"| `{_cell(option)}` | {_cell(text).replace('<', '&lt;')} |" for option, text in records]
        examples = "\n".join(line.strip() for line in (command.epilog or "").splitlines()[2:])
        description = (command.help or "").replace("\b\n", "").strip()
        table = "\n".join(["| argument or option | |", "| --- | --- |", *rows])
        parts += [f"## {name}", description, f"```\n{usage}\n```", table, f"```\n{examples}\n```"]
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_GENERATORS = {"commands": commands, "counters": counters, "names": names}
