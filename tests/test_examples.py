"""The demo and the README's code do what they say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from families import build

from hf_tiered_cache import KVStore, TieredCache

ROOT = Path(__file__).parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_asks_in_processes_of_their_own(tmp_path, monkeypatch, capfd):
    """With a small model from a folder, so that it is quick; the demo's own model is `make demo`'s."""
    model = build("qwen2", vocab_size=300, max_position_embeddings=8192)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    demo = load(ROOT / "examples" / "demo.py")
    monkeypatch.setattr(
        sys, "argv", ["demo.py", "--model", str(tmp_path / "model"), "--store", str(tmp_path / "store")]
    )
    assert demo.main() == 0
    printed = capfd.readouterr().out
    assert printed.count("the same") == 3
    assert "1 stores" in printed
    assert "2 restores" in printed
    assert "3 restores" in printed
    assert "disk" in printed


def save_tokenizer(folder):
    """Letters as tokens; enough for a text to become ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set((ROOT / "examples/data/a_scandal_in_bohemia_part_1.txt").read_text()[:4000]))
    words = {"<pad>": 0, "<unk>": 1} | {c: i for i, c in enumerate(characters, start=2)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)


def test_the_readmes_code_runs(tmp_path, monkeypatch):
    """Its first block, with a model that is here in place of the hub's."""
    import transformers

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    model = build("qwen2", vocab_size=300, max_position_embeddings=8192)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    real = {name: getattr(transformers, name).from_pretrained for name in ("AutoModelForCausalLM", "AutoTokenizer")}
    for name, loader in real.items():
        monkeypatch.setattr(
            getattr(transformers, name), "from_pretrained", lambda _, loader=loader, **__: loader(tmp_path / "model")
        )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("A long report. " * 40)
    names: dict = {}
    attended = []
    for block in blocks:
        exec(block, names)
        stats = names["cache"].stats
        assert stats.tokens_restored > 0
        attended.append(stats.tokens_attended / stats.tokens_restored)
    assert min(attended) < 0.5 < max(attended)  # one of them has a budget


def test_the_readmes_passages_are_found_behind_any_text(tmp_path, monkeypatch):
    """With a tokenizer that merges letters over the borders of texts, and nothing else stored."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (block,) = (
        b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "segments=" in b
    )
    folder = ROOT / "eval" / "reference" / "xs"
    monkeypatch.chdir(tmp_path)
    names = {
        "KVStore": KVStore,
        "TieredCache": TieredCache,
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "document": "The old man looked out over the sea, where nothing had moved since the morning. " * 8,
    }
    exec(block, names)
    stored = sum(len(passage) // 16 * 16 for passage in names["passages"])
    assert names["cache"].stats.tokens_restored == stored - int(0.15 * stored)


STORIES = ROOT.parent / "shared" / "models" / "stories260K"


@pytest.mark.skipif(not STORIES.exists(), reason="the stories260K model is not part of the project")
def test_a_trained_model_restores_what_it_would_have_said(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    ids = tokenizer("Once upon a time there was a little girl named Lily. " * 6, return_tensors="pt").input_ids
    from hf_tiered_cache import TieredCache

    with KVStore(tmp_path) as store:
        outputs = []
        for _ in range(2):
            cache = TieredCache(model, store)
            outputs.append(model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False))
        assert cache.stats.tokens_restored > ids.shape[1] - 16
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], model.generate(ids, max_new_tokens=40, do_sample=False))


def test_each_promise_names_tests_that_there_are():
    text = (ROOT / "docs" / "promises.md").read_text()
    there = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 20
    assert not [name for name in named if f"def {name}(" not in there]
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "promise |" not in line and "---" not in line
    ]
    assert all("`test_" in row for row in rows)
