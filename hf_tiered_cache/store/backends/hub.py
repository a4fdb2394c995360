"""Repositories of the Hugging Face Hub, to publish the KV of a corpus. They are only read. Needs huggingface_hub.

Copy segments to a folder, `hf-tiered-cache copy kv-corpus file:///folder`, and upload it with `hf upload`: a commit for
each segment would be too many. Tokens and endpoint are those of huggingface_hub (`hf auth login`, HF_ENDPOINT).
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import unquote

from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from ...errors import ConfigError
from ..objects import ObjectBackend
from ..tree import Stored

_ADDRESS = re.compile(
    r"hf://(?:(?P<type>datasets|models|spaces)/)?(?!(?:datasets|models|spaces|buckets|papers)/)(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/@]+|[^/@]+))?(?:/(?P<prefix>.*))?"
)
_THREADS = 16
_SECONDS = 30.0  # time limit of a request
_LISTED_SECONDS = 60.0  # seconds after which a new commit is looked for


class HubBackend(ObjectBackend):
    """Read-only backend with the objects of a store as files of a repository.

    All files are listed when the backend is first used, and again after a commit. So a lookup takes no request. An
    address is "hf://datasets/user/repository@revision/folder"; without a kind of repository, it is one of a model.
    Raises ConfigError if it is not valid.
    """

    def __init__(self, address: str) -> None:
        parts = _ADDRESS.fullmatch(address.rstrip("/"))
        if parts is None:
            raise ConfigError(f"{address} is not the address of a repository, such as hf://datasets/user/repository")
        self._repo: dict[str, Any] = {
            "repo_id": parts["repo"],
            "repo_type": {"datasets": "dataset", "spaces": "space"}.get(parts["type"] or "models", "model"),
        }
        self._revision, self._prefix = unquote(parts["revision"] or "main"), (parts["prefix"] or "").strip("/")
        super().__init__(address.rstrip("/"), threads=_THREADS)
        self.writable = False
        self._api = HfApi()
        self._listing = threading.Lock()
        self._commit = ""
        self._listed = float("-inf")
        self._files: dict[str, Stored] = {}  # by path below the prefix

    def find_object(self, name: str) -> Stored | None:
        return self._listed_files()[1].get(name)

    def list_objects(self, folder: str) -> dict[str, Stored]:
        files = self._listed_files()[1].items()
        return {path.rpartition("/")[2]: stored for path, stored in files if path.rpartition("/")[0] == folder}

    def get_object(self, name: str, version: Any, offset: int, nbytes: int) -> bytes:
        commit, files = self._listed_files()
        stored = files.get(name)
        if stored is None or stored.version != version:
            raise FileNotFoundError(errno.ENOENT, "it was replaced or deleted", name)
        stop = offset + nbytes
        with self._faults(name, missing=errno.EIO):  # it is listed, so it was not replaced
            path = f"{self._prefix}/{name}".lstrip("/")
            url = hf_hub_url(filename=path, revision=commit, endpoint=self._api.endpoint, **self._repo)
            headers = build_hf_headers() | {"Range": f"bytes={offset}-{stop - 1}"}
            response = get_session().get(url, headers=headers, timeout=_SECONDS)
            hf_raise_for_status(response)
            content: bytes = response.content
        # a server that ignores the range sends the whole file
        return content if response.status_code == 206 else content[offset:stop]

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        self._refuse(name)

    def delete_object(self, name: str) -> bool:
        self._refuse(name)

    def get_beginnings(self, names: Sequence[str], nbytes: int) -> dict[str, bytes]:
        return super().get_beginnings([name for name in names if self.find_object(name) is not None], nbytes)

    def _refuse(self, name: str) -> NoReturn:
        advice = "repositories are only read: copy to file:///folder, and upload that with `hf upload`"
        raise OSError(errno.EROFS, advice, f"{self.place}/{name}")

    def _listed_files(self) -> tuple[str, dict[str, Stored]]:
        """Return the commit and its files. Raises OSError."""
        with self._listing, self._faults(""):
            if time.monotonic() - self._listed >= _LISTED_SECONDS:
                commit = self._api.repo_info(revision=self._revision, timeout=_SECONDS, **self._repo).sha or ""
                if commit != self._commit:
                    self._files, self._commit = self._list(commit), commit
                self._listed = time.monotonic()
            return self._commit, self._files

    def _list(self, commit: str) -> dict[str, Stored]:
        files: dict[str, Stored] = {}
        tree = self._api.list_repo_tree(path_in_repo=self._prefix, recursive=True, revision=commit, **self._repo)
        with suppress(EntryNotFoundError):  # no such folder, so far
            for entry in tree:
                if isinstance(entry, RepoFile):
                    path = entry.path.removeprefix(self._prefix).lstrip("/")
                    files[path] = Stored(entry.blob_id, entry.size, entry.size)
        return files

    @contextmanager
    def _faults(self, name: str, missing: int = errno.ENOENT) -> Iterator[None]:
        """Raise the exceptions of the client, which depend on its version, as OSErrors; `missing` is that for 404."""
        try:
            yield
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            number = errno.EACCES if status in (401, 403) else missing if status == 404 else errno.EIO
            raise OSError(number, f"{type(error).__name__} of the Hub", f"{self.place}/{name}".rstrip("/")) from None
