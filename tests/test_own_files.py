"""The library deletes and overwrites only files that it created, whatever else is in a store's folder."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress

import pytest
from families import build, prompt
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from hf_tiered_cache import KVStore, TieredCache, cli
from hf_tiered_cache.errors import StoreError, TieredCacheError
from hf_tiered_cache.methods import CacheTune, ContiguousKV

FOLDERS = ["segments", "beside", "tmp", "pins", "conversations", "documents"]
IN_THE_ROOT = [
    *("lock", "catalogue.sqlite", "catalogue.sqlite-wal", "catalogue.sqlite-shm", "catalogue.sqlite-journal"),
    *("catalogue.sqlite.lock", "calibrations.json", "hf_tiered_cache.json", *FOLDERS),
]
HEX = "0123456789abcdef" * 2
NAMES = {
    "": [*IN_THE_ROOT, "notes.txt", "calibrations.4711", "catalogue.sqlite.old", "source"],
    "segments": [f"{HEX}.kv", "movie.kv", f"{HEX}.kv.bak", HEX],
    "beside": [f"{HEX}.json", f"{HEX}.index", "notes.txt"],
    "tmp": ["2024-01-15", "2024-01-15.lock", "1-2-3", "archive.lock", "thesis.docx"],
    "pins": [HEX, "pin.txt"],
    "conversations": [f"{HEX}.json", f"{HEX}.lock", f"{HEX}.partial", "chat.json", "chat.lock"],
    "documents": [f"{HEX}.json", f"{HEX}.partial", "letter.json", "draft.partial"],
}
"""Names of the library's own, and of others."""
PROMPT = prompt(60)
GREEDY = {"do_sample": False, "max_new_tokens": 2}


@pytest.fixture(scope="module")
def model():
    return build("llama")


def fill(store, model):
    """Store something of each kind."""
    model.generate(PROMPT, past_key_values=TieredCache(model, store), **GREEDY)
    with TieredCache(model, store, conversation="alice") as cache:
        model.generate(prompt(80, seed=1), past_key_values=cache, **GREEDY)
    passages = [prompt(48, seed=2)[0], prompt(48, seed=3)[0]]
    store.precompute(model, passages, segments=True, labels=["a", "b"], method=CacheTune(), progress=False)
    store.precompute(model, prompt(40, seed=4), pin=True, progress=False)
    store.flush()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A store with something of each kind in it."""
    root = tmp_path_factory.mktemp("whole") / "store"
    with KVStore(root, engine="posix") as store:
        fill(store, model)
        store.calibrate_prefix(model, tokens=(32,), repeats=1, progress=False)
    return root


# --- whatever is in the folder


def recognised(content):
    """Whether the library may take this for a file of its own: one that is blank, or begins as those do."""
    return not content.strip(b"\0") or content[:8] in (b"HFTCKV\r\n", b"HFTCBS\r\n")


contents = st.one_of(
    st.sampled_from([b"precious\n" * 600, b'{"a": 1}', b'{\n "a": 1}', b"[]", b"SQLite format 3\0 of somebody" * 9]),
    st.binary(min_size=1, max_size=40),
).filter(lambda content: not recognised(content))
entries = st.sampled_from([(folder, name) for folder, names in NAMES.items() for name in names]).flatmap(
    lambda place: st.tuples(
        st.just(place),
        st.sampled_from(
            ["file", "folder", "link to a file", "link to a folder", "link to nothing", "hard link", "pipe"]
        ),
        contents,
        st.sampled_from([0o600, 0o644, 0o440]),
    )
)


def plant(root, outside, number, entry):
    """Put something into a store's folder, in place of what has its name. Returns its path, if that can be."""
    (folder, name), kind, content, mode = entry
    path = root / folder / name
    if not path.parent.is_dir() or path.parent.is_symlink() or os.path.ismount(path):
        return None
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    target = outside / f"{number}"
    if kind in ("link to a folder", "folder"):
        made = target if kind == "link to a folder" else path
        made.mkdir()
        for inner in ("thesis.docx", f"{HEX}.kv", f"{HEX}.json", "1-2-3", "draft.partial"):
            (made / inner).write_bytes(content)
    elif kind != "link to nothing":
        target.write_bytes(content)
        target.chmod(mode)
    if kind == "file":
        target.rename(path)
    elif kind == "hard link":
        os.link(target, path)
    elif kind == "pipe":
        target.unlink()
        os.mkfifo(path)
    elif kind != "folder":
        path.symlink_to(target)
    return path


def look(path):
    """What must not change of a path, and of what is in it."""
    status = path.lstat()
    seen = {path: (status.st_mode, status.st_mtime_ns, status.st_size)}
    if stat.S_ISLNK(status.st_mode):
        seen[path] += (os.readlink(path),)
    elif stat.S_ISREG(status.st_mode):
        seen[path] += (path.read_bytes(),)
    elif stat.S_ISDIR(status.st_mode):
        for inner in sorted(path.iterdir()):
            seen |= look(inner)
    return seen


def command(*words):
    """Run the command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hf-tiered-cache", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code or 0


def use(root, model):
    """Every public operation, and every command."""
    with KVStore(root, engine="posix", disk_quota="64MiB") as store:
        ids = [row.id for row in store.segments()]
        fails = TieredCacheError, OSError
        model.generate(PROMPT, past_key_values=TieredCache(model, store), **GREEDY)  # which never fails
        for action in (
            lambda: fill(store, model),
            lambda: store.warm(model, PROMPT, progress=False) and store.lookup(model, PROMPT),
            lambda: store.calibrate_prefix(model, tokens=(32,), repeats=1, progress=False),
            lambda: store.rank("cache_tune:ranking=random", progress=False),
            lambda: store.relayout(ContiguousKV(budget=0.5), progress=False),
            lambda: store.reorder(progress=False),
            lambda: store.verify(),
            lambda: store.pin([HEX], False),
            lambda: store.pin(ids[:1]),
            lambda: store.gc(dry_run=True),
            lambda: store.gc(),
            lambda: store.verify(repair=True),
            lambda: (
                store.stats,
                store.documents(),
                store.conversations(),
                store.models(),
                store.pinned(),
                repr(store),
            ),
            lambda: store.remove_conversation("alice"),
            lambda: store.remove_document("a"),
            lambda: store.remove([HEX, *ids[:1]]),
            lambda: store.clear(disk=True),
            lambda: fill(store, model),
        ):
            with suppress(*fails):
                action()
    for words in (
        *(["ls"], ["stat"], ["stat", HEX[:8]], ["verify"], ["verify", "--repair"], ["gc", "--dry-run"]),
        *(["gc"], ["gc", "--quota", "300KiB"], ["conversations"], ["documents"], ["rm", HEX]),
    ):
        command(words[0], root, *words[1:])
    command("conversations", root, "rm", "alice")
    command("documents", root, "rm", "b")
    command("rm", root, "--all", "--yes")


@given(entries=st.lists(entries, min_size=1, max_size=5), origin=st.sampled_from(["store", "older store", "folder"]))
@example([(("tmp", "thesis.docx"), "file", b"precious", 0o600)], "store")
@example(
    [(("tmp", "thesis.docx"), "file", b"precious", 0o600), (("documents", "draft.partial"), "file", b"{}", 0o600)],
    "folder",
)
@example([(("", "tmp"), "link to a folder", b"precious", 0o600)], "store")
@example([(("", "catalogue.sqlite"), "link to a file", b"precious" * 99, 0o600)], "store")
@example([(("", "catalogue.sqlite"), "file", b"precious" * 99, 0o600)], "store")
@example([(("", "catalogue.sqlite-journal"), "file", b"precious" * 99, 0o600)], "store")
@example([(("", "calibrations.json"), "hard link", b'{"a": 1}', 0o600)], "older store")
@example([(("segments", f"{HEX}.kv"), "file", b"precious", 0o600), (("pins", HEX), "file", b"x", 0o600)], "older store")
@settings(max_examples=40)
def test_whatever_is_in_the_folder_only_the_stores_own_files_change(model, whole, tmp_path_factory, entries, origin):
    made = tmp_path_factory.mktemp("own")
    root, outside = made / "store", made / "outside"
    outside.mkdir()
    if origin == "folder":
        root.mkdir()
        for folder in FOLDERS:
            (root / folder).mkdir()
    else:
        shutil.copytree(whole, root)
        if origin == "older store":
            (root / "hf_tiered_cache.json").unlink(missing_ok=True)
    planted = {path for number, entry in enumerate(entries) if (path := plant(root, outside, number, entry))}
    planted = [path for path in planted if os.path.lexists(path)]  # a folder may have taken another's place
    root.chmod(0o750)
    before = {}
    for path in (outside, *planted):
        before |= look(path)
    everything = look(root)
    try:
        use(root, model)
        event("used")
    except StoreError as error:
        event("refused")
        assert str(root) in str(error) and "\n" not in str(error)
        command("gc", root)
        command("rm", root, "--all", "--yes")
        after = look(root)
        if origin == "folder":
            assert after == everything
    after = {}
    for path in (outside, *planted):
        after |= look(path)
    assert after == before
    assert root.stat().st_mode & 0o777 == 0o750
    shutil.rmtree(made)
