"""Temporary files of dead processes in the folder of a store."""

from __future__ import annotations

from contextlib import suppress

from .kinds import LOCK_SUFFIX, TEMPORARY, TEMPORARY_LOCK
from .root import StoreRoot
from .tree import nbytes_of


def remove_orphans(files: StoreRoot, dry_run: bool = False) -> tuple[dict[str, int], bool]:
    """Delete the temporary files of dead processes. See `SegmentBackend.clean_up`."""
    try:
        names = files.names(TEMPORARY)
        names = sorted({*names, *(name.removesuffix(LOCK_SUFFIX) for name in files.names(TEMPORARY_LOCK))})
    except OSError:
        return {}, False
    orphans: dict[str, int] = {}
    published = False
    for name in names:
        with suppress(OSError):
            published |= _remove_orphan(files, name, dry_run, orphans)
    return orphans, published


def _remove_orphan(files: StoreRoot, name: str, dry_run: bool, orphans: dict[str, int]) -> bool:
    """Delete a temporary file if its lock is free. Returns whether it was also published; that name is kept."""
    lock_name = name + LOCK_SUFFIX
    status = files.find(TEMPORARY, name)
    if files.is_locked(TEMPORARY_LOCK, lock_name) or (status is not None and not files.is_own(TEMPORARY, name)):
        return False
    named = status is not None and status.st_nlink > 1
    if not dry_run:
        lock = files.lock(TEMPORARY_LOCK, lock_name)
        if lock is None:
            return False
        with lock:
            files.delete(TEMPORARY, name)
            files.delete(TEMPORARY_LOCK, lock_name)
    if status is not None:
        orphans[str(files.where(TEMPORARY, name))] = 0 if named else nbytes_of(status)
    return named
