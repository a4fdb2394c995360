"""A folder for several machines, such as one on a network file system. Needs only Python."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from ...errors import ConfigError, FormatError
from ..kinds import FileKind
from ..objects import ObjectBackend
from ..root import StoreRoot
from ..settings import path_in
from ..tree import Stored, read_all

_THREADS = 32  # reads in flight: a server of files answers each slowly, and many at once
_ANY = re.compile(".*", re.DOTALL)


class SharedFolderBackend(ObjectBackend):
    """Backend with the objects of a store as files of a folder, which is protected as that of any store.

    Unlike `FolderBackend`, machines share no database, and no lock but those of temporary files. An address is
    "file:///folder". Raises ConfigError if it is not valid, or StoreError if the folder is no store and not empty, or a
    part of it is a link.
    """

    def __init__(self, address: str) -> None:
        folder = _folder_in(address)
        super().__init__(address.rstrip("/"), threads=_THREADS)
        self.files = StoreRoot(folder)
        self.writable = self.files.writable

    def find_object(self, name: str) -> Stored | None:
        status = self.files.find(*_file_of(name))
        return None if status is None or not S_ISREG(status.st_mode) else _stored(status)

    def list_objects(self, folder: str) -> dict[str, Stored]:
        try:
            statuses = self.files.statuses(folder).items()
        except FileNotFoundError:
            if not self.files.is_reachable():
                raise
            return {}
        # links and pipes, too: `unknown` lists them, and nothing reads them
        return {name: _stored(status) for name, status in statuses if not S_ISDIR(status.st_mode)}

    def get_object(self, name: str, version: object, offset: int, nbytes: int) -> bytes:
        with suppress(FormatError), self.files.open(*_file_of(name)) as (fd, status):
            if _stored(status).version == version:
                return read_all(fd, nbytes, offset)
        raise FileNotFoundError(errno.ENOENT, "it was replaced or deleted", name)

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        self.files.write(*_file_of(name), content, replace)

    def delete_object(self, name: str) -> bool:
        return self.find_object(name) is not None and self.files.delete(*_file_of(name), is_checked=True)

    def is_reachable(self) -> bool:
        return self.files.is_reachable()

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        return self.files.remove_orphans(dry_run)

    def close(self) -> None:
        super().close()
        self.files.close()


def check_store(address: str) -> None:
    """Raise StoreError if the folder that an address names is no store, instead of making it one."""
    StoreRoot(_folder_in(address), make=False).close()


def _folder_in(address: str) -> Path:
    """Return the path of the folder that an address names. Raises ConfigError if it names none."""
    path = path_in(address)
    if path is None or not address.partition("://")[2].startswith("/"):
        raise ConfigError(f"{address} names no folder; write file:///folder")
    return path


def _file_of(name: str) -> tuple[FileKind, str]:
    folder, file = os.path.split(name)
    return FileKind(folder, _ANY, lambda *_: True), file  # `ObjectRecords` replaces only what the library wrote


def _stored(status: os.stat_result) -> Stored:
    """Return metadata with a version that differs for a file that gets the inode of a deleted one."""
    return Stored((status.st_ino, status.st_mtime_ns, status.st_size), status.st_size, status.st_size)
