"""Settings from the environment and from a file: which one counts, and errors that say what to write."""

from __future__ import annotations

import inspect
import json

import pytest
from memory_backend import MemoryBackend
from typer.testing import CliRunner

from hf_tiered_cache import ConfigError, KVStore
from hf_tiered_cache.cli import app
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store.settings import SETTINGS, read_settings

MIB = 2**20


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_argument_counts_before_a_variable_and_a_variable_before_the_file(working_directory, monkeypatch):
    (working_directory / "hf_tiered_cache.toml").write_text('host_memory = "2MiB"\nindex_memory = 3145728\nttl = 60\n')
    monkeypatch.setenv("HF_TIERED_CACHE_INDEX_MEMORY", "4MiB")
    monkeypatch.setenv("HF_TIERED_CACHE_VERIFY", "no")
    monkeypatch.setenv("HF_TIERED_CACHE_ENGINE", "posix")
    with KVStore(working_directory / "kv", ttl=5.0) as store:
        figures = store.stats
        assert (figures.tiers["host"].budget, figures.index.budget, store.ttl) == (2 * MIB, 4 * MIB, 5.0)
        assert not storage_of(store).disk._verify
    with KVStore(working_directory / "kv", host_memory="1MiB", ttl=None) as store:
        assert (store.stats.tiers["host"].budget, store.ttl) == (MIB, None)


def test_the_file_may_be_elsewhere(working_directory, monkeypatch):
    other_path = working_directory / "other.toml"
    other_path.write_text('codec = "int8"\n')
    (working_directory / "hf_tiered_cache.toml").write_text('codec = "fp8"\n')
    assert read_settings({"HF_TIERED_CACHE_CONFIG": str(other_path)})["codec"].value == "int8"
    assert read_settings({})["codec"].value == "fp8"
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        read_settings({"HF_TIERED_CACHE_CONFIG": "nowhere.toml"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"HF_TIERED_CACHE_HOST_MEMORY": "lots"},
            "HF_TIERED_CACHE_HOST_MEMORY sets host_memory to 'lots'; it must be a size, such as",
        ),
        ({"HF_TIERED_CACHE_VERIFY": "perhaps"}, "VERIFY sets verify to 'perhaps'; it must be true or false"),
        ({"HF_TIERED_CACHE_TTL": "soon"}, "TTL sets ttl to 'soon'; it must be a number of seconds, or none"),
        ({"HF_TIERED_CACHE_REMOTE": ""}, "REMOTE sets remote to ''; it must be an address, such as s3://bucket/prefix"),
        ({"HF_TIERED_CACHE_HOST_MEM": "1GiB"}, "did you mean 'HF_TIERED_CACHE_HOST_MEMORY'"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_an_error(environment, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host_memroy = '1GiB'", "'host_memroy', which is no setting; did you mean 'host_memory'"),
        ("host_memory = 1.5", "sets host_memory to 1.5; it must be a size"),
        ("verify = 3", "sets verify to 3; it must be true or false"),
        ("host_memory = ", "is not valid TOML"),
        ("[store]\nhost_memory = '1GiB'", "'store', which is no setting"),
    ],
)
def test_a_file_that_cannot_be_meant_is_an_error(working_directory, text, message):
    (working_directory / "hf_tiered_cache.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        KVStore(working_directory / "kv")
    assert not (working_directory / "kv").exists()


def test_an_engine_from_outside_is_that_of_folders(working_directory, monkeypatch):
    monkeypatch.setenv("HF_TIERED_CACHE_ENGINE", "posix")
    for options in ({"path": "sqlite://kv.db"}, {"backend": MemoryBackend()}):
        with KVStore(**options) as store:
            assert "posix" not in repr(store)
    with KVStore("folder") as store:
        assert "posix" in repr(store)
    with pytest.raises(ConfigError, match="engine is an option of stores in folders"):
        KVStore("sqlite://kv.db", engine="posix")


def test_an_empty_remote_is_no_address(working_directory):
    with pytest.raises(ConfigError, match="remote must be an address such as s3://bucket/prefix, not ''"):
        KVStore(working_directory / "kv", remote="")


def test_every_setting_is_an_argument_and_reads_its_own_default():
    parameters = inspect.signature(KVStore).parameters
    for name, (parse, _) in SETTINGS.items():
        default = parameters[name].default
        assert default is None or parse(default) == default, name
    left_out = {"self", "path", "backend", "key", "salt"}
    assert {name for name in parameters if name not in left_out} == set(SETTINGS)


def test_the_command_shows_values_and_sources(working_directory, monkeypatch):
    (working_directory / "hf_tiered_cache.toml").write_text('disk_quota = "5GiB"\n')
    monkeypatch.setenv("HF_TIERED_CACHE_SPOT_CHECKS", "0")
    rows = json.loads(CliRunner().invoke(app, ["config", "--json"]).stdout)
    assert rows["disk_quota"] == {"value": "5GiB", "source": "the file hf_tiered_cache.toml"}
    assert rows["spot_checks"] == {"value": 0.0, "source": "environment variable HF_TIERED_CACHE_SPOT_CHECKS"}
    assert rows["host_memory"] == {"value": "1GiB", "source": "default"}
    page = CliRunner().invoke(app, ["config"]).stdout
    assert "host_memory" in page and "HF_TIERED_CACHE_HOST_MEMORY" in page and "in the working directory" in page
