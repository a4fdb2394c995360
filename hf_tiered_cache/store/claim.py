"""Recognition and creation of store folders, by marker or files. Links and foreign folders are refused."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from ..errors import FormatError, StoreError
from .kinds import (
    CATALOGUE,
    CATALOGUE_NAME,
    FIXED_FILES,
    FOLDERS,
    MARKER,
    MARKER_FORMAT,
    MARKER_NAME,
    MARKER_VERSION,
    SCHEMA_MARK,
    SEGMENT,
    encode_record,
    is_blank,
    json_object,
)
from .tree import FolderTree, open_file, read_all, write_all

logger = logging.getLogger("hf_tiered_cache")

_MARKER_CONTENT = encode_record({"format": MARKER_FORMAT, "version": MARKER_VERSION})


def claim(tree: FolderTree, make: bool) -> bool:
    """Mark the folder as a store, and create the parts that it lacks.

    If the folder is refused, or if it cannot be determined whether it is a store, nothing in it is changed.

    Args:
        tree: the folder.
        make: whether a missing or empty folder becomes a store. If False, nothing in it is changed.

    Returns:
        Whether the store can be written; False without `make`.

    Raises:
        StoreError: the folder is no store, and cannot or must not become one; or a part of it is a link.
    """
    _make_root(tree.path, make)
    try:
        _check_is_store(tree, make)
        if not make:
            return False
        _mark(tree)
        folders = [tree.root_descriptor, *(tree.folder_descriptor(name, make=True) for name in FOLDERS)]
        open_file("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, tree.root_descriptor).close()
        if all(os.access(".", os.W_OK, dir_fd=folder) for folder in folders):
            return True
        reason = os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
        if not make:
            raise StoreError(f"{tree.path} cannot be read ({reason}); check the disk") from error
    logger.warning("%s is not writable (%s), so no new KV is stored", tree.path, reason)
    return False


def _make_root(path: Path, make: bool) -> None:
    """Create the folder if it is missing. Raises StoreError if it is a file, or must not or cannot be created."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; pass the path of a folder to KVStore")
    if not make and not path.is_dir():
        raise StoreError(f"there is no store at {path}")
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if not path.is_dir():
            raise StoreError(f"{path} cannot be created ({error.strerror}); choose another folder") from error


def _check_is_store(tree: FolderTree, make: bool) -> None:
    """Raise StoreError if the folder is no store and must not become one, or OSError if that cannot be determined."""
    names = tree.list_names("")
    is_store = _is_marked(tree, names) or _is_store_without_marker(tree, names) or (make and not names)
    if not (is_store or _is_marked(tree, {MARKER_NAME})):  # another process may have made the store meanwhile
        if not make:
            raise StoreError(f"there is no store at {tree.path}")
        raise StoreError(
            f"{tree.path} contains files, but is not a store; pass the path of a new or an empty folder to KVStore"
        )
    _check_kinds(tree)


def _is_marked(tree: FolderTree, names: Collection[str]) -> bool:
    """Return whether the marker exists and is complete.

    Raises:
        StoreError: the marker has a newer version, or another file has its name.
    """
    if MARKER_NAME not in names:
        return False
    try:
        content = tree.read(MARKER, MARKER_NAME)
    except FileNotFoundError:
        return False
    except FormatError as error:
        raise StoreError(f"{tree.path / MARKER_NAME} is a link, or not a regular file; remove it") from error
    if is_blank(content):  # its writer was killed, or has just begun
        return False
    facts = json_object(content)
    if facts.get("format") != MARKER_FORMAT or type(version := facts.get("version")) is not int:
        raise StoreError(f"{tree.path / MARKER_NAME} is not the marker of a store; choose another folder")
    if version > MARKER_VERSION:
        raise StoreError(
            f"{tree.path} is a store of format {version}, which this version does not support; upgrade "
            "hf-tiered-cache to open it"
        )
    return True


def _is_store_without_marker(tree: FolderTree, names: Collection[str]) -> bool:
    """Return whether this is a store of a version without markers, or a store with a writer that was killed early.

    The marker is created first; versions without markers created the folder of the segments first. A store has a
    segment or a catalogue, or only its own folders and files, all of them empty. Raises OSError.
    """
    if set(names) == {MARKER_NAME}:
        return True
    if "segments" not in names:
        return False
    with suppress(FormatError, FileNotFoundError):
        if CATALOGUE_NAME in names and SCHEMA_MARK in tree.read(CATALOGUE, CATALOGUE_NAME):
            return True
    with suppress(NotADirectoryError):
        for name in tree.names(SEGMENT):
            with suppress(FormatError, FileNotFoundError):
                content = tree.read(SEGMENT, name)
                if SEGMENT.is_own(name, content) and not is_blank(content):
                    return True
    return all(_is_empty(tree, name) for name in names)


def _is_empty(tree: FolderTree, name: str) -> bool:
    """Return whether the name is an empty folder or file that belongs to a store."""
    with suppress(OSError, FormatError):
        if name in FOLDERS:
            return not tree.list_names(name)
        return name in FIXED_FILES and tree.find(FIXED_FILES[name], name).st_size == 0  # type: ignore[union-attr]
    return False


def _check_kinds(tree: FolderTree) -> None:
    """Raise StoreError if a part of the store is a link, or is not the expected file or folder."""
    for name in (*FOLDERS, *FIXED_FILES):
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=tree.root_descriptor, follow_symlinks=False).st_mode
            if S_ISDIR(mode) if name in FOLDERS else S_ISREG(mode):
                continue
            kind = "a link" if S_ISLNK(mode) else f"not a {'folder' if name in FOLDERS else 'regular file'}"
            raise StoreError(
                f"{tree.path / name} is {kind}, so a store cannot use it; remove it, or choose another folder"
            )


def _mark(tree: FolderTree) -> None:
    """Write the marker. Concurrent processes write the same bytes. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open_file(MARKER_NAME, flags, tree.root_descriptor) as file:
        if os.fstat(file.fileno()).st_nlink == 1 and is_blank(read_all(file.fileno(), len(_MARKER_CONTENT), 0)):
            write_all(file.fileno(), memoryview(_MARKER_CONTENT), 0)
