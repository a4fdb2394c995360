"""Wrong use fails at once, in one sentence, with advice that works there."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import fields

import pytest
import torch
import transformers
from families import attend_by_another_name, build, build_class, prompt
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from eval.baselines import H2O
from hf_tiered_cache import ConfigError, Exact, KVStore, TieredCache, UnsupportedModelError, attach, detach, tiered
from hf_tiered_cache.cli import app
from hf_tiered_cache.errors import StoreError, TieredCacheError
from hf_tiered_cache.methods import METHODS, CacheBlend, CacheTune, ContiguousKV, Epic, Impress, make_method
from hf_tiered_cache.methods.base import DEFAULT_BUDGET
from hf_tiered_cache.patches.attach import attachment_of
from hf_tiered_cache.store.codecs import Raw

# --- models and methods


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
    """The selection at each token in long contexts has its own default."""
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


@pytest.mark.parametrize("family", ["BigBird", "MegatronBert", "RemBert", "RoFormer"])
def test_decoders_that_are_set_to_encode_are_refused(family, store):
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 1)
    for decodes in (False, True):
        kind = getattr(transformers, f"{family}Config")
        config = kind(**sizes, **tokens, num_attention_heads=2, is_decoder=decodes)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        if decodes:
            TieredCache(model, store)
        else:
            with pytest.raises(UnsupportedModelError, match="is an encoder"):
                TieredCache(model, store)


def test_decoders_without_a_kv_cache_are_not_called_encoders(store):
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="takes no KV cache"):
        TieredCache(model, store)


def test_a_decoder_with_an_unused_setting_is_none_of_them(store):
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.GPTNeoXJapaneseForCausalLM(transformers.GPTNeoXJapaneseConfig(**sizes))
    assert model.config.is_decoder is False
    TieredCache(model, store)


class Looping(LlamaForCausalLM):
    """Model that adds layers to its cache, as Dory does."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        past_key_values.layers += [copy.deepcopy(layer) for layer in past_key_values.layers[1:]]
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


def test_a_model_that_changes_the_layers_of_its_cache_is_refused(store):
    model = Looping(build("llama").config)
    with pytest.raises(UnsupportedModelError, match=r"layers of its cache itself.*DynamicCache"):
        TieredCache(model, store)


@pytest.mark.parametrize("method", ["contiguous_kv", "impress", "kv_drive"])
def test_a_budget_needs_layers_with_keys_of_their_own(method, store):
    sizes = {"head_dim": 16, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "altup_num_inputs": 2}
    layers |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model = build_class("Gemma3nForCausalLM", "Gemma3nTextConfig", **sizes, **layers)
    with pytest.raises(UnsupportedModelError, match=r"other keys than it passes to its cache.*exact method"):
        TieredCache(model, store, method=method)


@pytest.mark.parametrize("method", ["cache_tune", "cache_blend", "epic", "contiguous_kv"])
def test_a_model_without_a_list_of_its_layers_is_refused_at_once(method, store):
    model = build("llama")
    model.model.layers = torch.nn.ModuleDict({str(at): layer for at, layer in enumerate(model.model.layers)})
    with pytest.raises(UnsupportedModelError, match=r"no list of 2 decoder layers.*exact method"):
        TieredCache(model, store, method=method)


def test_layers_that_take_more_of_each_token_compute_no_fewer(store):
    model = build("falcon")
    with pytest.raises(UnsupportedModelError, match="use CacheTune or Epic"):
        TieredCache(model, store, method="cache_blend")
    for method in ("cache_tune", "epic"):
        TieredCache(model, store, method=method)


def test_a_refused_method_leaves_the_model_unattached(store):
    model = build("llama")
    attend_by_another_name(model)
    for serve in (TieredCache, tiered):
        with pytest.raises(ConfigError, match="sdpa"):
            serve(model, store, method="h2o")
        assert attachment_of(model) is None


def test_dynamic_int8_gets_a_note_when_it_is_attached(caplog):
    model = torch.ao.quantization.quantize_dynamic(build("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    attach(model)
    detach(model)
    assert "quantize the inputs of all tokens of a pass together" in caplog.text


# --- arguments


@pytest.mark.parametrize("arguments", [{"use_cache": False}, {}])
def test_a_cache_for_generate_without_a_cache_is_refused(store, arguments):
    """Every pass would append the whole prompt to it again. The setting may come from a checkpoint, as that of MPT."""
    model = build("llama", use_cache=bool(arguments))
    with pytest.raises(ConfigError, match="remove this setting from the call and the configurations"):
        model.generate(prompt(20), past_key_values=TieredCache(model, store), max_new_tokens=2, **arguments)
    cache = TieredCache(model, store)
    answer = model.generate(prompt(20), past_key_values=cache, max_new_tokens=4, do_sample=False, use_cache=True)
    assert torch.equal(answer, model.generate(prompt(20), max_new_tokens=4, do_sample=False))


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
    switches = 0
    for kind in METHODS.values():
        for option in fields(kind):
            if option.init and option.type == "bool":
                switches += 1
                with pytest.raises(ConfigError, match=f"{option.name} must be True or False, not"):
                    kind(**{option.name: wrong})
    assert switches > 5


@pytest.mark.parametrize("wrong", [0, None, "no"])
def test_switches_of_stores_and_caches_are_true_or_false(wrong, tmp_path, store):
    model = build("llama")
    with pytest.raises(ConfigError, match="verify must be True or False, not"):
        KVStore(tmp_path / "new", verify=wrong)
    assert not (tmp_path / "new").exists()
    for name in ("restore", "record", "strict", "progress", "fold_heads"):
        with pytest.raises(ConfigError, match=f"{name} must be True or False, not"):
            TieredCache(model, store, **{name: wrong})
    assert attachment_of(model) is None


@pytest.mark.parametrize("call", [KVStore, lambda model: TieredCache(model, model)], ids=["store", "cache"])
def test_a_model_in_the_place_of_a_store_is_named_in_one_line(call):
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM") as raised:
        call(build("llama"))
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", [ContiguousKV, 3])
def test_a_method_is_a_method_or_a_name(wrong, store):
    with pytest.raises(ConfigError, match="method must be a Method or the name of one"):
        TieredCache(build("llama"), store, method=wrong)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda path: make_method("contigous_kv"),
            r"unknown method 'contigous_kv'; did you mean 'contiguous_kv'\? There",
        ),
        (lambda path: make_method("ContiguousKV:budget=1"), r"did you mean 'contiguous_kv'\?"),
        (lambda path: make_method("zzz"), "unknown method 'zzz'; there are: exact, contiguous_kv, "),
        (
            lambda path: make_method("impress:bugdet=0.1"),
            r"impress has no option 'bugdet'; did you mean 'budget'\? Its",
        ),
        (lambda path: make_method("kv_drive:index=cluster"), r"unknown index 'cluster'; did you mean 'clusters'\?"),
        (
            lambda path: make_method("kv_drive:eviction=look_ahead"),
            r"eviction policy 'look_ahead'; did you mean 'lookahead'",
        ),
        (lambda path: CacheTune(ranking="contxt"), r"unknown ranking 'contxt'; did you mean 'context'\?"),
        (lambda path: ContiguousKV(identify="key"), r"unknown value of identify 'key'; did you mean 'keys'\?"),
        (lambda path: KVStore(path, codec="int_8"), r"unknown codec 'int_8'; did you mean 'int8'\? There are: raw, "),
        (lambda path: KVStore(path, policy="lur"), r"unknown eviction policy 'lur'; did you mean 'lru'\?"),
        (lambda path: KVStore(path, engine="possix"), r"unknown engine 'possix'; did you mean 'posix'\?"),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(use, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        use(tmp_path)


def test_a_misspelled_command_gets_a_suggestion(tmp_path):
    for arguments, message in {
        ("verfy", str(tmp_path)): "Did you mean 'verify'?",
        ("verify", str(tmp_path), "--repare"): "--repair",
    }.items():
        assert message in CliRunner().invoke(app, arguments).output
    for command in ("documents", "conversations"):
        error = CliRunner().invoke(app, [command, str(tmp_path), "shwo", "x"]).exception
        assert f"unknown action 'shwo' for {command}; did you mean 'show'? Use show" in str(error)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: make_method("contiguous_kv:budget=much"),
            r"budget of contiguous_kv must be of type float, not 'much' \(str",
        ),
        (lambda: ContiguousKV("10%"), r"a float above 0 and at most 1, not '10%' \(str\)"),
        (lambda: ContiguousKV(quality="low"), r"a float above 0 such as 0.02, not 'low' \(str\)"),
        (lambda: ContiguousKV(queries=1.5), r"an int, or 0 for all, not 1.5 \(float\)"),
        (lambda: Exact(recompute=2), r'a float between 0 and 1, or "auto", not 2 \(int\)'),
        (
            lambda: METHODS["krul"](layers_shared="0.5"),
            r"layers_shared must be a float between 0 and 1, not '0.5' \(str\)",
        ),
        (lambda: CacheTune(widen="2"), r"widen must be a number of at least 1, not '2' \(str\)"),
        (lambda: Epic(first=None), r"first must be a number of tokens, an int, not None \(NoneType\)"),
        (lambda: make_method(3), r"not 3 \(int\)"),
    ],
)
def test_a_wrong_value_is_named_with_its_type(use, message):
    with pytest.raises(ConfigError, match=message):
        use()


@pytest.mark.parametrize(("wrong", "advice"), [(Raw(), "register it with"), (Raw, "register an instance of it with")])
def test_a_codec_is_passed_by_name(wrong, advice, tmp_path):
    with pytest.raises(ConfigError, match=rf"must be a name, one of raw, .*; {advice} .*pass its name, codec='raw'"):
        KVStore(tmp_path, codec=wrong)
    with pytest.raises(ConfigError, match=r"must be a name, one of raw, int8, fp8.*, not 3 "):
        Exact(codec=3)


@pytest.mark.parametrize("empty", ["", b""])
def test_an_empty_salt_is_refused(tmp_path, empty):
    with pytest.raises(ConfigError, match="salt is empty"):
        KVStore(tmp_path, salt=empty)


@pytest.mark.parametrize("wrong", ["7d", 0, -1.0, float("nan"), float("inf"), 1e12, pytest.param(10**400, id="huge")])
def test_seconds_to_live_are_a_number_that_files_can_hold(tmp_path, wrong):
    with pytest.raises(ConfigError, match="ttl must be a number of seconds above 0, or None for no limit"):
        KVStore(tmp_path, ttl=wrong)


@pytest.mark.parametrize("wrong", ["~nobody-here/kv", "a\0b", "\ud800"])
def test_a_path_that_cannot_be_one_is_refused_in_one_sentence(wrong):
    with pytest.raises(ConfigError, match="cannot be the folder of a store"):
        KVStore(wrong)


def test_a_path_that_cannot_be_created_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for wrong in (tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "kv", tmp_path / "loop", tmp_path / "loop" / "kv"):
        with pytest.raises(TieredCacheError, match=r"cannot be created|cannot be the folder of a store"):
            KVStore(wrong)


def test_a_path_that_is_too_long_for_the_catalogue_is_refused_in_one_sentence(tmp_path):
    folder = tmp_path / ("x" * 200)
    folder /= "x" * (486 - len(os.fsencode(folder)))
    with KVStore(folder) as store:
        store.precompute(build("llama"), prompt(40)[0], progress=False)
        assert store.stats.segments == 1
    with pytest.raises(StoreError, match="at most 487 bytes, not 488; choose a shorter one"):
        KVStore(f"{folder}x")
    assert not os.path.exists(f"{folder}x")


@pytest.mark.parametrize("wrong", [[0.5, 1.0], torch.rand(20), torch.ones(20, dtype=torch.bool), "text", []])
def test_token_ids_are_whole_numbers(wrong, store):
    with pytest.raises(ConfigError, match="token ids"):
        store.precompute(build("llama"), wrong, progress=False)


def test_only_what_is_stored_can_be_pinned(store):
    with pytest.raises(ConfigError, match="segment 'abc' does not exist"):
        store.pin(["abc"])
    assert not store._storage.disk.backend.pinned()
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


def test_what_cannot_be_sent_to_another_process_says_what_to_do(store):
    with pytest.raises(TypeError, match="restores what is stored"):
        pickle.dumps(TieredCache(build("llama"), store))
    with pytest.raises(TypeError, match="pass its path"):
        pickle.dumps(store)
    with tiered(build("llama"), store) as session, pytest.raises(TypeError, match="a session cannot be pickled"):
        pickle.dumps(session)
