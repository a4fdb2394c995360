"""Wrong use fails at once, in one sentence, with advice that works there."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import transformers
from families import build, prompt
from transformers import GptOssConfig, GptOssForCausalLM

from eval.baselines import H2O
from hf_tiered_cache import ConfigError, Exact, KVStore, TieredCache, UnsupportedModelError, attach, detach, tiered
from hf_tiered_cache.methods import METHODS, CacheBlend, CacheTune, ContiguousKV, Epic, Impress
from hf_tiered_cache.methods.budget import DEFAULT_BUDGET
from hf_tiered_cache.patches import attachment_of


@pytest.fixture
def store(tmp_path):
    with KVStore(tmp_path / "store") as opened:
        yield opened


# --- models and methods


def test_attention_with_sinks_is_not_told_to_use_what_it_lacks(store):
    """gpt-oss has no sdpa."""
    config = GptOssConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = GptOssForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"does not support.*exact method") as refused:
        TieredCache(model, store, method=ContiguousKV(0.25))
    assert "set_attn_implementation" not in str(refused.value)
    TieredCache(model, store)


@pytest.mark.parametrize("method", ["cache_tune", "cache_blend", "epic"])
def test_passages_need_attention_that_places_queries(method, store):
    model = build("llama", attn_implementation="flex_attention")
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        TieredCache(model, store, method=method)


def test_the_share_comes_first_and_the_rest_by_name():
    for kind in (ContiguousKV, Impress, H2O):
        assert kind(0.1) == kind(budget=0.1)
    for kind in (CacheTune, CacheBlend, Epic):
        assert kind(0.2) == kind(recompute=0.2)
    for kind in (ContiguousKV, Impress, H2O, CacheTune, CacheBlend, Epic):
        with pytest.raises(TypeError, match="positional"):
            kind(0.1, 16)
    with pytest.raises(TypeError, match="positional"):
        Exact(0.1)


def test_one_default_budget():
    """But for that of each token, out of long contexts."""
    budgets = {name: kind().budget for name, kind in METHODS.items() if hasattr(kind(), "budget")}
    assert budgets.pop("kv_drive") == 0.0156
    assert set(budgets.values()) == {DEFAULT_BUDGET}


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "ModernBertForMaskedLM", "RobertaForMaskedLM"])
def test_encoders_are_refused(kind, store):
    family = kind.removesuffix("Model").removesuffix("ForMaskedLM")
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 1)
    config = getattr(transformers, f"{family}Config")(**sizes, **tokens, num_attention_heads=2)
    with pytest.raises(ConfigError, match="is an encoder"):
        TieredCache(getattr(transformers, kind)(config), store)


def test_a_refused_method_leaves_the_model_unattached(store):
    model = build("llama", attn_implementation="eager")
    for serve in (TieredCache, tiered):
        with pytest.raises(ConfigError, match="sdpa"):
            serve(model, store, method="h2o")
        assert attachment_of(model) is None


def test_dynamic_int8_gets_a_note_when_it_is_attached(caplog):
    model = torch.ao.quantization.quantize_dynamic(build("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    attach(model)
    detach(model)
    assert "dynamically quantized" in caplog.text


# --- arguments


@pytest.mark.parametrize("wrong", [None, 3, ["kv-store"]])
def test_a_store_is_a_store_or_a_path(wrong):
    with pytest.raises(ConfigError, match="store must be a KVStore or the path of one"):
        TieredCache(build("llama"), wrong)


def test_an_empty_path_is_no_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="path of the store is empty"):
        KVStore("")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["10%", None, True, 0, 1.5])
def test_shares_are_numbers(wrong):
    for method in (ContiguousKV, Impress, H2O):
        with pytest.raises(ConfigError, match="budget must be a share"):
            method(wrong)
    if wrong not in (0, None):
        for passages in (CacheTune, CacheBlend, Epic):
            with pytest.raises(ConfigError, match="recompute must be a share"):
                passages(wrong)


@pytest.mark.parametrize("wrong", [0, 1, 4, None, "true"])
def test_switches_are_true_or_false(wrong):
    asked = 0
    for kind in METHODS.values():
        for option in fields(kind):
            if option.init and option.type == "bool":
                asked += 1
                with pytest.raises(ConfigError, match=f"{option.name} must be True or False, not"):
                    kind(**{option.name: wrong})
    assert asked > 5


@pytest.mark.parametrize("wrong", [ContiguousKV, 3])
def test_a_method_is_a_method_or_a_name(wrong, store):
    with pytest.raises(ConfigError, match="method must be a Method or the name of one"):
        TieredCache(build("llama"), store, method=wrong)


@pytest.mark.parametrize("empty", ["", b""])
def test_an_empty_salt_is_refused(tmp_path, empty):
    with pytest.raises(ConfigError, match="salt is empty"):
        KVStore(tmp_path, salt=empty)


def test_seconds_to_live_are_a_number(tmp_path):
    with pytest.raises(ConfigError, match="ttl must be a number of seconds"):
        KVStore(tmp_path, ttl="7d")


def test_a_session_without_a_store_is_none():
    with pytest.raises(ConfigError, match="also requires store="):
        attach(build("llama"), method="h2o")


@pytest.mark.parametrize("wrong", [[0.5, 1.0], torch.rand(20), torch.ones(20, dtype=torch.bool), "text", []])
def test_token_ids_are_whole_numbers(wrong, store):
    with pytest.raises(ConfigError, match="token ids"):
        store.precompute(build("llama"), wrong, progress=False)


def test_only_what_is_stored_can_be_pinned(store):
    with pytest.raises(ConfigError, match="segment 'abc' does not exist"):
        store.pin(["abc"])
    assert not store._storage.disk.pinned()
    store.pin(["abc"], pinned=False)


def test_relayout_takes_a_method_too(store):
    model, method = build("llama"), ContiguousKV(0.1)
    store.precompute(model, prompt(64), progress=False)
    assert store.relayout(method, progress=False) == 1
    assert store.relayout(method.geometry, progress=False) == 0
    assert store.relayout("exact", progress=False) == 1
    with pytest.raises(ConfigError, match="unknown method"):
        store.relayout("exakt", progress=False)


def test_a_path_is_opened_with_the_methods_policy(tmp_path, caplog):
    model = build("llama")
    assert TieredCache(model, tmp_path / "a", method="contiguous_kv").store.policy == "attention"
    assert not caplog.records
    cache = TieredCache(model, tmp_path / "a", method="h2o")
    assert cache.store.policy == "attention"
    assert "this store uses 'attention'" in caplog.text
    TieredCache(model, tmp_path / "a", method="h2o")
    assert caplog.text.count("eviction policy") == 1
    detach(model)
