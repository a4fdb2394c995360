"""The library deletes and overwrites only files that it created, whatever else is in a store's folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import stat
import sys
from contextlib import closing, suppress
from unittest.mock import Mock

import processes
import pytest
from families import prompt
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from hf_tiered_cache import KVStore, TieredCache, cli
from hf_tiered_cache.errors import ConfigError, StoreError, TieredCacheError
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Exact
from hf_tiered_cache.store.kinds import CATALOGUE_LOCK, LOCK, PAGE_BYTES, SEGMENT, SIDECAR, TEMPORARY, kind_of
from hf_tiered_cache.store.root import StoreRoot

FOLDERS = ["segments", "beside", "tmp", "pins", "conversations", "documents"]
IN_THE_ROOT = [
    *("lock", "catalogue.sqlite", "catalogue.sqlite-wal", "catalogue.sqlite-shm", "catalogue.sqlite-journal"),
    *("catalogue.sqlite.lock", "calibrations.json", "hf_tiered_cache.json", *FOLDERS, "prefixes"),
]
HEX = "0123456789abcdef" * 2
DIARY = b'{\n "notes": "precious"\n}'
NAMES = {
    "": [*IN_THE_ROOT, "notes.txt", "calibrations.4711", "catalogue.sqlite.old", "source"],
    "segments": [f"{HEX}.kv", "movie.kv", f"{HEX}.kv.bak", HEX],
    "beside": [f"{HEX}.json", f"{HEX}.index", f"{HEX}.txt", "notes.txt"],
    "tmp": ["2024-01-15", "2024-01-15.lock", "1-2-3", "archive.lock", "thesis.docx"],
    "pins": [HEX, "pin.txt"],
    "conversations": [f"{HEX}.json", f"{HEX}.lock", f"{HEX}.partial", "chat.json", "chat.lock"],
    "documents": [f"{HEX}.json", f"{HEX}.partial", "letter.json", "draft.partial"],
    "prefixes": [HEX, "notes.txt"],
}
"""Names of the library's own, and of others."""
NO_TABLES = b"SQLite format 3\0" + bytes(84) + b"\r" + bytes(3995)
"""Database without tables, or whose tables are in its log."""
PROMPT = prompt(60)
LOADED = Exact(recompute=0, decline=False)
GREEDY = {"do_sample": False, "max_new_tokens": 2}


def fill(store, model):
    """Store something of each kind."""
    model.generate(PROMPT, past_key_values=TieredCache(model, store), **GREEDY)
    with TieredCache(model, store, conversation="alice") as cache:
        model.generate(prompt(80, seed=1), past_key_values=cache, **GREEDY)
    passages = [prompt(48, seed=2)[0], prompt(48, seed=3)[0]]
    store.precompute(model, passages, passages=True, labels=["a", "b"], method=CacheTune(), progress=False)
    store.precompute(model, prompt(40, seed=4), pin=True, progress=False)
    store.flush()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Create a store with a file of each kind."""
    root = tmp_path_factory.mktemp("whole") / "store"
    with KVStore(root, engine="posix") as store:
        fill(store, model)
        store.calibrate_prefix(model, tokens=(32,), repeats=1, progress=False)
    return root


# --- whatever is in the folder


def recognised(content):
    """Return whether the library may take this for its own file: a blank one, or one with the same beginning."""
    return not content.strip(b"\0") or content[:8] in (b"HFTCKV\r\n", b"HFTCBS\r\n")


contents = st.one_of(
    st.sampled_from([b"precious\n" * 600, b'{"a": 1}', DIARY, b"[]", b"SQLite format 3\0 of somebody" * 9, NO_TABLES]),
    st.binary(min_size=1, max_size=40),
    st.tuples(st.text(), st.text()).map(lambda around: HEX.join(around).encode()),
    st.dictionaries(
        st.sampled_from([HEX, f"quality {HEX}", "id", "segment", "format"]),
        st.sampled_from([HEX, 1, {}, {HEX: 1}, [1], [{}, 1]]),
        min_size=1,
    ).map(lambda facts: json.dumps(facts).encode()),
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
        directory = target if kind == "link to a folder" else path
        directory.mkdir()
        for inner in ("thesis.docx", f"{HEX}.kv", f"{HEX}.json", "1-2-3", "draft.partial"):
            (directory / inner).write_bytes(content)
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
    """Return what must not change of a path and its content."""
    status = path.lstat()
    is_used = stat.S_ISDIR(status.st_mode) and path.name in FOLDERS  # the store writes to its own folders
    snapshot = {path: (status.st_mode, 0 if is_used else status.st_mtime_ns, status.st_size)}
    if stat.S_ISLNK(status.st_mode):
        snapshot[path] += (os.readlink(path),)
    elif stat.S_ISREG(status.st_mode):
        snapshot[path] += (path.read_bytes(),)
    elif stat.S_ISDIR(status.st_mode):
        for inner in sorted(path.iterdir()):
            snapshot |= look(inner)
    return snapshot


def command(*words):
    """Run the command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hf-tiered-cache", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code or 0


def use(root, model):
    """Run every public operation, and every command."""
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


@given(entries=st.lists(entries, min_size=1, max_size=5), origin=st.sampled_from(["store", "folder"]))
@example([(("tmp", "thesis.docx"), "file", b"precious", 0o600)], "store")
@example(
    [(("tmp", "thesis.docx"), "file", b"precious", 0o600), (("documents", "draft.partial"), "file", b"{}", 0o600)],
    "folder",
)
@example(
    [
        (("tmp", "2024-01-15"), "file", DIARY, 0o600),
        (("beside", f"{HEX}.txt"), "file", f"segment {HEX}: contract".encode(), 0o600),
        (("", "calibrations.json"), "file", f'{{"{HEX}": "precious"}}'.encode(), 0o600),
    ],
    "store",
)
@example([(("", "tmp"), "link to a folder", b"precious", 0o600)], "store")
@example([(("", "catalogue.sqlite"), "link to a file", b"precious" * 99, 0o600)], "store")
@example([(("", "catalogue.sqlite"), "file", b"precious" * 99, 0o600)], "store")
@example([(("", "catalogue.sqlite-journal"), "file", b"precious" * 99, 0o600)], "store")
@example([(("", "calibrations.json"), "hard link", b'{"a": 1}', 0o600)], "store")
@example([(("segments", f"{HEX}.kv"), "file", b"precious", 0o600), (("pins", HEX), "file", b"x", 0o600)], "store")
@settings(max_examples=settings.default.max_examples // 4)
def test_whatever_is_in_the_folder_only_the_stores_own_files_change(model, whole, tmp_path_factory, entries, origin):
    base = tmp_path_factory.mktemp("own")
    root, outside = base / "store", base / "outside"
    outside.mkdir()
    if origin == "folder":
        root.mkdir()
        for folder in FOLDERS:
            (root / folder).mkdir()
    else:
        shutil.copytree(whole, root)
        (root / "prefixes").mkdir()
    planted_paths = {path for number, entry in enumerate(entries) if (path := plant(root, outside, number, entry))}
    planted_paths = [path for path in planted_paths if os.path.lexists(path)]  # a folder may have taken another's place
    root.chmod(0o750)
    before = {}
    for path in (outside, *planted_paths):
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
    for path in (outside, *planted_paths):
        after |= look(path)
    assert {path: after.get(path) for path in before} == before  # a planted folder may hold the store's files, too
    assert root.stat().st_mode & 0o777 == 0o750
    shutil.rmtree(base)


@given(contents)
def test_no_content_of_others_is_recognised_although_it_names_a_segment(content):
    for folder, names in NAMES.items():
        for name in names:
            kind = kind_of(folder, name)
            if kind not in (None, LOCK, CATALOGUE_LOCK, TEMPORARY):  # recognised by other things than content
                assert not kind.is_own(name, content)


def test_segments_and_sidecars_with_a_damaged_magic_are_recognised(whole):
    for kind in (SEGMENT, SIDECAR):
        paths = list((whole / kind.folder).iterdir())
        assert paths
        assert all(kind.is_own(path.name, b"damaged:" + path.read_bytes()[8:PAGE_BYTES]) for path in paths)


# --- which folders are stores

MARKER = "hf_tiered_cache.json"


def has(root, model):
    """Return how many tokens of the prompt a store restores."""
    with KVStore(root, engine="posix") as store:
        cache = TieredCache(model, store, method=LOADED)
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
        return cache.stats.tokens_restored


def test_a_new_store_has_a_durable_marker_with_its_format(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino) or fsync(fd))
    KVStore(tmp_path / "store").close()
    path = tmp_path / "store" / MARKER
    assert path.stat().st_ino in synced
    assert json.loads(path.read_text()) == {"format": "hf_tiered_cache store", "version": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    mtime_ns = path.stat().st_mtime_ns
    KVStore(tmp_path / "store").close()
    assert path.stat().st_mtime_ns == mtime_ns


def test_an_empty_folder_becomes_a_store_and_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    KVStore(tmp_path).close()
    assert (tmp_path / MARKER).exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("marker", [None, b""], ids=["no marker", "blank marker"])
@pytest.mark.parametrize("name", ["main.py", "tmp/notes.txt", "documents/letter.json", "segments/movie.kv", "empty/"])
def test_a_folder_with_other_files_is_refused_and_not_touched(tmp_path, run, name, marker):
    root = tmp_path / "project"
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).mkdir() if name.endswith("/") else (root / name).write_text("precious")
    if marker is not None:
        (root / MARKER).write_bytes(marker)
    before = look(root)
    with pytest.raises(StoreError, match="contains files, but is not a store"):
        KVStore(root)
    for words in (["ls"], ["gc"], ["verify", "--repair"], ["rm", "--all", "--yes"]):
        status, out, err = run(words[0], root, *words[1:])
        assert (status, out, err) == (2, "", f"hf-tiered-cache: there is no store at {root}\n")
    assert look(root) == before


def test_a_blank_marker_is_written_again(whole, model, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    content = (root / MARKER).read_bytes()
    for blank in (b"", bytes(len(content))):
        (root / MARKER).write_bytes(blank)
        assert has(root, model) == 48
        assert (root / MARKER).read_bytes() == content


def test_a_store_of_a_newer_version_is_refused(tmp_path):
    KVStore(tmp_path).close()
    (tmp_path / MARKER).write_text('{"format": "hf_tiered_cache store", "version": 2}')
    before = look(tmp_path)
    with pytest.raises(StoreError, match=r"format 2.*upgrade"):
        KVStore(tmp_path)
    assert look(tmp_path) == before


DYING = f"""
import os, sys
sys.path = {sys.path!r}
import kill_steps
from hf_tiered_cache import KVStore
kill_steps.last = int(sys.argv[2])
kill_steps.count(os, "open", "mkdir", "pwrite")
store = KVStore(sys.argv[1], engine="posix")
print(kill_steps.steps, flush=True)
os._exit(0)
"""


def test_kill_9_while_a_store_is_made_leaves_one_that_opens(tmp_path, model):
    command = [sys.executable, "-c", DYING]
    process = processes.run([*command, tmp_path / "whole", "0"], capture_output=True, text=True, check=True)
    steps = int(process.stdout)
    assert steps > 8
    for last in range(1, steps + 1):
        assert processes.run([*command, tmp_path / f"{last}", f"{last}"]).returncode == -signal.SIGKILL
        assert has(tmp_path / f"{last}", model) == 0
        assert has(tmp_path / f"{last}", model) == 48


# --- links


@pytest.mark.parametrize("name", [name for name in IN_THE_ROOT if name != "calibrations.json"])
@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "pipe"])
def test_a_part_of_the_store_that_is_a_link_is_refused_in_one_sentence(whole, tmp_path, run, name, kind):
    root, outside = tmp_path / "store", tmp_path / "outside"
    shutil.copytree(whole, root)
    outside.mkdir()
    plant(root, outside, 0, (("", name), kind, b"precious", 0o600))
    before = look(tmp_path)
    with pytest.raises(StoreError) as error:
        KVStore(root)
    assert str(root / name) in str(error.value) and "\n" not in str(error.value)
    status, _, err = run("gc", root)
    assert (status, err.count("\n")) == (2, 1) and str(root / name) in err
    assert look(tmp_path) == before


def test_the_folder_of_a_store_may_be_a_link_and_is_resolved_once(whole, model, tmp_path):
    shutil.copytree(whole, tmp_path / "store")
    (tmp_path / "link").symlink_to("store")
    with KVStore(tmp_path / "link", engine="posix") as store:
        (tmp_path / "link").unlink()
        (tmp_path / "link").mkdir()
        cache = TieredCache(model, store, method=LOADED)
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 48
        fill(store, model)
    assert not list((tmp_path / "link").iterdir())


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.thin(2)
def test_a_folder_that_becomes_a_link_under_an_open_store_is_not_followed(whole, model, tmp_path, name):
    root, outside = tmp_path / "store", tmp_path / "outside"
    shutil.copytree(whole, root)
    outside.mkdir()
    for inner in ("thesis.docx", f"{HEX}.kv", f"{HEX}.json", "1-2-3", HEX):
        (outside / inner).write_bytes(b"precious")
    with KVStore(root, engine="posix") as store:
        shutil.rmtree(root / name)
        (root / name).symlink_to(outside)
        before = look(outside)
        model.generate(prompt(50, seed=9), past_key_values=TieredCache(model, store), **GREEDY)
        for action in (store.flush, store.gc, lambda: store.verify(repair=True), lambda: store.clear(disk=True)):
            with suppress(TieredCacheError, OSError):
                action()
        with suppress(TieredCacheError, OSError):
            fill(store, model)
    assert look(outside) == before


# --- files that are ours in name alone, or have a second name


def test_a_second_name_of_any_of_its_files_keeps_what_it_had(whole, model, tmp_path):
    """A backup with hard links has such names."""
    root, backup = tmp_path / "store", tmp_path / "backup"
    shutil.copytree(whole, root)
    shutil.copytree(root, backup, copy_function=os.link)
    before = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
    use(root, model)
    assert {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()} == before
    assert has(backup, model) == 48


def plant_text(path):
    path.write_bytes(b"precious" * 99_999)


def plant_database(path):
    """Write the files of a database that a killed program has left: its tables are in the log only."""
    source = path.parent.with_name("made.sqlite")
    with closing(sqlite3.connect(source, isolation_level=None)) as database:
        database.executescript("PRAGMA journal_mode=WAL; CREATE TABLE models (a); INSERT INTO models VALUES (1)")
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(f"{source}{suffix}", f"{path}{suffix}")


@pytest.mark.parametrize("plant_catalogue", [plant_text, plant_database])
def test_a_catalogue_of_somebody_else_is_left_and_the_store_serves_without(
    whole, model, tmp_path, caplog, plant_catalogue
):
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    for path in root.glob("catalogue*"):
        path.unlink()
    plant_catalogue(root / "catalogue.sqlite")
    planted_paths = list(root.glob("catalogue*"))
    before = [look(path) for path in planted_paths]
    assert has(root, model) == 48
    assert "was not written by this library; move it elsewhere, with catalogue.sqlite-*" in caplog.text
    with KVStore(root, engine="posix") as store:
        assert store._storage.disk.backend.usage() < 99_999
        assert store.verify().unknown == store.gc().unknown == ["catalogue.sqlite"]
    assert [look(path) for path in planted_paths] == before


def test_files_of_others_do_not_count_in_the_quota(whole, model, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    with KVStore(root, engine="posix") as store:
        disk = store._storage.disk
        used_bytes = disk.used_bytes()
        names = [
            *("notes.txt", "tmp/thesis.docx", "documents/letter.json", "segments/movie.kv", "beside/notes.txt"),
            *("tmp/2024-01-15", f"beside/{HEX}.txt", f"segments/{HEX}.kv"),
            *(f"conversations/{HEX}.json", f"conversations/{HEX}.lock", f"documents/{HEX}.json"),
        ]
        for name in names:
            (root / name).write_bytes(b"precious" * 99_999)
        disk.index.scan()
        assert disk.used_bytes() - used_bytes < 65_536
        assert sorted(store.verify().unknown) == sorted(names) and store.verify().ok
        for name in names:  # a file that has become the library's own counts again, though its name is known
            (root / name).unlink()
        content = (root / "segments" / f"{store.segments()[0].id}.kv").read_bytes()
        (root / "beside" / f"{HEX}.txt").write_bytes(content)
        assert disk.used_bytes() - used_bytes >= len(content)


# --- stores that cannot be written


def test_a_store_that_cannot_be_written_says_so_in_one_sentence(whole, model, tmp_path, monkeypatch, run):
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    before = look(root)
    monkeypatch.setattr(os, "access", lambda *_, dir_fd=None: dir_fd is None)  # not of the command's own check
    with KVStore(root, engine="posix") as store:
        ids = [row.id for row in store.segments()]
        for action in (
            store.gc,
            lambda: store.clear(disk=True),
            lambda: store.relayout(ContiguousKV(budget=0.5), progress=False),
            lambda: store.reorder(progress=False),
            lambda: store.remove(ids),
            lambda: store.pin(ids),
            lambda: store.verify(repair=True),
            lambda: store.remove_conversation("alice"),
            lambda: store.remove_document("a"),
            lambda: store.calibrate_prefix(model, tokens=(32,), repeats=1, progress=False),
        ):
            with pytest.raises(StoreError, match="is not writable"):
                action()
        assert store.gc(dry_run=True).expired == 0
        assert store.verify().ok
        store.clear()
        cache = TieredCache(model, store, method=LOADED)
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 48
    for words in (["gc"], ["rm", "--all", "--yes"], ["verify", "--repair"]):
        status, _, err = run(words[0], root, *words[1:])
        assert status == 2 and "Traceback" not in err
        assert err.splitlines()[-1].startswith(f"hf-tiered-cache: {root} is not writable"), err
    files_before = {path: state for path, state in before.items() if path.is_file()}
    assert {path: look(path)[path] for path in files_before} == files_before


def test_a_folder_that_cannot_become_a_store_says_which_part_it_lacks(root, monkeypatch, caplog):
    root.mkdir()
    refuse = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr("hf_tiered_cache.store.root.open_file", refuse)
    with KVStore(root, engine="posix") as store:
        for action in (store.verify, store.segments, store.documents):
            with pytest.raises(StoreError, match=r"it has no folder 'segments', which .* could not be created"):
                action()
    assert "it has no folder 'segments'" in caplog.text and not list(root.iterdir())


@pytest.mark.parametrize("failing", ["lock", "list_names"])
def test_a_file_that_cannot_be_used_is_reported_in_one_sentence_that_names_the_store(
    whole, model, tmp_path, monkeypatch, caplog, failing
):
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    with KVStore(root, engine="posix") as store:
        ids = [row.id for row in store.segments()]
        error = PermissionError(errno.EACCES, "Permission denied", "x")
        monkeypatch.setattr(StoreRoot, failing, Mock(side_effect=error))
        raised = []
        for action in (
            store.gc,
            store.verify,
            store.pinned,
            lambda: store.clear(disk=True),
            lambda: store.remove(ids[:1]),
            lambda: store.pin(ids[1:]),
            lambda: store.relayout(ContiguousKV(budget=0.5), progress=False),
            lambda: store.remove_conversation("alice"),
            lambda: store.remove_document("a"),
            lambda: store.precompute(model, prompt(40, seed=5), pin=True, progress=False),
            lambda: store.precompute(
                model, [prompt(48, seed=6)[0]], passages=True, labels=["c"], method=CacheTune(), progress=False
            ),
        ):
            try:
                action()
            except ConfigError:  # a document that cannot be read does not exist
                pass
            except StoreError as error:
                raised.append(str(error))
        monkeypatch.undo()
    assert len(raised) >= 2
    assert all(str(root) in message and "\n" not in message for message in raised), raised
    assert "Errno" not in "".join(raised) + caplog.text
