"""Code of another installed package may compute with settings that transformers itself ignores."""

from __future__ import annotations

import importlib

import pytest
from families import build

from hf_tiered_cache.identity import Fingerprinter

SOURCE = """
from transformers.models.llama.modeling_llama import LlamaMLP

class Scaled(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * self.config.hidden_dropout * self.vocab_size
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Return a model with an MLP of an installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_layers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    built = build("llama", num_hidden_layers=2)
    built.config.hidden_dropout = 1.0
    for layer in built.model.layers:
        layer.mlp.__class__ = importlib.import_module("installed_layers").Scaled
        layer.mlp.vocab_size = 1
    return built


def a_setting(model):
    model.config.hidden_dropout = 3.0


def an_attribute(model):
    model.model.layers[0].mlp.vocab_size = 3


@pytest.mark.parametrize("change", [a_setting, an_attribute])
def test_what_transformers_ignores_counts_for_an_installed_package(model, change):
    name = Fingerprinter(model)
    before = name.look()
    change(model)
    assert not before.problem and name.look().fingerprint != before.fingerprint
