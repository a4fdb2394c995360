"""An address names the place that it says, or is refused."""

from __future__ import annotations

import os
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.settings import path_in, without_secrets

names = st.binary(min_size=1, max_size=20).filter(
    lambda name: not {b"/"[0], 0} & set(name) and name not in (b".", b"..")
)
"""Names of files, UTF-8 or not."""


@given(names)
def test_an_encoded_address_names_any_file(name):
    path = os.path.realpath(b"/data/" + name)
    for address in (f"file:///data/{quote_from_bytes(name)}", f"sqlite://data/..//data/{quote_from_bytes(name)}"):
        parsed_path = path_in(address)
        assert parsed_path is not None
        assert os.fsencode(parsed_path).endswith(path)


@given(
    st.text(st.characters(exclude_characters="/%", exclude_categories=["Cs"]), min_size=1).filter(
        lambda n: n.strip(".")
    )
)
def test_an_address_as_it_is_names_that_path_or_is_refused(name):
    try:
        assert str(path_in(f"file:///data/{name}")) == f"/data/{name}"
    except ConfigError as error:
        assert "%23" in str(error) and "\n" not in str(error)
        assert any(letter in "#?" or letter < " " for letter in name)


@pytest.mark.parametrize("name", ["kv#2", "k\nv", "k%00v"])
@pytest.mark.parametrize("scheme", ["file://", "sqlite://"])
def test_an_address_never_leads_to_another_store(tmp_path, run, scheme, name):
    store = tmp_path / "store"
    KVStore(store).close()
    KVStore(tmp_path / "kv").close()
    before = sorted(tmp_path.rglob("*"))
    address = f"{scheme}{tmp_path}/{name}"
    for words in (["ls", address], ["rm", address, "--all", "--yes"], ["copy", store, address]):
        status, out, err = run(*words)
        assert (status, out, err.count("\n")) == (2, "", 1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("address", ["s3://bucket/kv#2", "s3://bucket/kv?2", "gs://bucket/k\nv", "memory://kv#2"])
def test_a_prefix_that_would_be_cut_is_refused(address):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match="%23"):
        open_remote(address)


@pytest.mark.parametrize("name", ["under-score", "under_score", "a.b", "3d"])
def test_an_address_with_an_unknown_name_makes_no_folder_and_shows_no_password(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    address = f"{name}://user:secret@host/kv"
    for argument in ("path", "remote"):
        with pytest.raises(ConfigError, match=f"unknown backend '{name}' in the address '{name}://host/kv'"):
            KVStore(**{argument: address})
    assert without_secrets(address) == f"{name}://host/kv"
    assert list(tmp_path.iterdir()) == []
