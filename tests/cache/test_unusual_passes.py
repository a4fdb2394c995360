"""Whatever is done to a cache, its answers are those of DynamicCache, and what it stores is right for its tokens."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import ROUNDS_MORE, build, prompt
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM, RobertaConfig, RobertaForCausalLM

from hf_tiered_cache import CacheMismatchError, KVStore, TieredCache, attach, reasons
from hf_tiered_cache.identity.fingerprint import Fingerprinter

LAYERS = 4
LARGE = {"initializer_range": 0.3}
"""Weights so large that wrong KV changes the logits of float64 by far more than rounding."""
QUIET = {"spot_checks": 0.0}


class Scaled(LlamaForCausalLM):
    """Model with an argument that is no tensor, and changes the meaning of tokens."""

    def forward(self, input_ids=None, alpha=0.0, logits_to_keep=0, **kwargs):
        embeds = self.model.embed_tokens(input_ids) * (1 + (alpha or 0))
        outputs = self.model(inputs_embeds=embeds, **kwargs)
        outputs.logits = self.lm_head(outputs.last_hidden_state)[:, -logits_to_keep:]
        return outputs


class FailedError(Exception):
    """Failure of a pass."""


@pytest.fixture(scope="module")
def scaled():
    torch.manual_seed(0)
    return Scaled(build("llama", num_hidden_layers=LAYERS, **LARGE).config).double().eval()


def last_logits(model, ids, cache, **kwargs):
    """Run a pass, and return the logits of the last token."""
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, **kwargs).logits[:, -1]


def expected(model, ids):
    return last_logits(model, ids, DynamicCache(config=model.config), logits_to_keep=1)


def assert_right(root, model, prompts):
    """Assert that what a store restores of prompts is right. Return the numbers of restored tokens."""
    token_counts = []
    with KVStore(root, **QUIET) as store:
        for ids in prompts:
            full_prompt = torch.cat([ids, prompt(2, rows=len(ids), seed=99)], dim=1)
            cache = TieredCache(model, store, record=False)
            logits = last_logits(model, full_prompt, cache, logits_to_keep=1)
            torch.testing.assert_close(logits, expected(model, full_prompt), rtol=0, atol=1e-6 if ROUNDS_MORE else 1e-9)
            token_counts.append(cache.stats.tokens_restored)
    return token_counts


def failing_at(cache, layer, error):
    """Let the next pass of a cache fail in a layer."""
    real = cache.update

    def update(keys, values, index, *args, **kwargs):
        if index == layer:
            raise error
        return real(keys, values, index, *args, **kwargs)

    cache.update = update


OUTPUTS = {"last": {"logits_to_keep": 1}, "all": {}, "states": {"logits_to_keep": 1, "output_hidden_states": True}}
PASSES = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 2, 15, 16, 17, 33]),
        "seed": st.integers(0, 1),
        "output": st.sampled_from(sorted(OUTPUTS)),
        "fails": st.sampled_from([None, None, None, 0, 2, LAYERS - 1]),
        "alpha": st.sampled_from([None, None, None, 0.0, 2.0]),
    }
)
CHANGES = st.sampled_from(["odd position", "odd mask", "edit", "crop", "fork"])


@given(st.lists(st.one_of(PASSES, PASSES, PASSES, CHANGES), min_size=2, max_size=6), st.booleans())
@example([{"tokens": 33, "seed": s, "output": o, "fails": f, "alpha": None} for s, o, f in
          [(0, "last", None), (0, "last", 2), (1, "all", None)]], True)  # fmt: skip
def test_whatever_is_done_answers_and_stored_kv_are_right(scaled, tmp_path_factory, actions, stored_before):
    root, ids, prompts = tmp_path_factory.mktemp("store"), prompt(0), []
    reference = DynamicCache(config=scaled.config)
    with KVStore(root, **QUIET) as store:
        if stored_before:
            store.precompute(scaled, torch.cat([prompt(33, seed=0), prompt(33, seed=1)], dim=1), progress=False)
        cache = TieredCache(scaled, store)
        for action in actions:
            length = ids.shape[1]
            if action == "fork":
                cache = copy.deepcopy(cache)
            elif action == "edit":
                for layer in (*cache.layers, *reference.layers):
                    if length:
                        layer.values.mul_(3)
            elif action == "crop" and length > 3:
                for past in (cache, reference):
                    past.crop(-3)
                ids = ids[:, :-3]
            elif action in ("odd position", "odd mask") and length:
                token, mask = prompt(1, seed=7), torch.ones(1, length + 1, dtype=torch.int64)
                mask[:, : length // 2] = 0
                kwargs = {"position_ids": torch.tensor([[length + 20]])}
                if action == "odd mask":
                    kwargs = {"attention_mask": mask, "position_ids": torch.tensor([[length]])}
                logits, right = (last_logits(scaled, token, past, **kwargs) for past in (cache, reference))
                torch.testing.assert_close(logits, right, rtol=0, atol=1e-9)
                ids = torch.cat([ids, token], dim=1)
            elif isinstance(action, dict):
                new = prompt(action["tokens"], seed=action["seed"])
                kwargs = OUTPUTS[action["output"]] | ({} if action["alpha"] is None else {"alpha": action["alpha"]})
                prompts.append(torch.cat([ids, new], dim=1))
                if action["fails"] is not None:
                    failing_at(cache, action["fails"], FailedError())
                    with pytest.raises(FailedError):
                        last_logits(scaled, new, cache, **kwargs)
                    del cache.update
                    continue
                logits, right = (last_logits(scaled, new, past, **kwargs) for past in (cache, reference))
                torch.testing.assert_close(logits, right, rtol=0, atol=1e-9)
                ids = prompts[-1]
        event(f"restored {cache.stats.tokens_restored > 0}, {cache.stats.reason or 'stored'}")
    assert_right(root, scaled, prompts)


@pytest.mark.parametrize("fails", range(LAYERS))
@pytest.mark.parametrize("next_step", ["last", "all", "states", "single"])
def test_a_failed_pass_leaves_no_trace_in_what_is_stored_next(scaled, tmp_path, fails, next_step):
    first, failed, second = (prompt(count, seed=seed) for seed, count in ((1, 40), (2, 24), (3, 24)))
    with KVStore(tmp_path, **QUIET) as store:
        store.precompute(scaled, torch.cat([first, failed], dim=1), progress=False)
        cache = TieredCache(scaled, store)
        last_logits(scaled, first, cache, logits_to_keep=1)
        failing_at(cache, fails, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            last_logits(scaled, failed, cache, logits_to_keep=1)
        del cache.update
        for piece in second.split(1 if next_step == "single" else 24, dim=1):
            last_logits(scaled, piece, cache, **OUTPUTS.get(next_step, {}))
    prompts = [torch.cat([first, ids], dim=1) for ids in (failed, second)]
    assert assert_right(tmp_path, scaled, prompts) == [64, 64]


@pytest.mark.parametrize("next_step", ["crop", "select", "fork", "go on"])
def test_a_look_up_that_was_interrupted_is_undone(scaled, tmp_path, next_step):
    """The interrupt comes where nothing can undo it at once: between the lookup and the pass."""
    first, second = prompt(40, seed=1), prompt(60, seed=2)
    with KVStore(tmp_path, **QUIET) as store:
        cache = TieredCache(scaled, store)
        last_logits(scaled, first, cache, logits_to_keep=1)
        recorder = cache._executor.sequence.recorder
        recorder.note_stored(0, 2, 9, ("0" * 32,))
        if next_step == "crop":
            cache.crop(-3)
            second = torch.cat([first[:, -3:], second], dim=1)
        elif next_step == "select":
            cache.batch_select_indices(torch.tensor([0]))
        elif next_step == "fork":
            cache = cache.fork()
        last_logits(scaled, second, cache)
    assert assert_right(tmp_path, scaled, [torch.cat([first, second[:, -60:]], dim=1)]) == [96]


def test_an_argument_that_is_no_tensor_has_to_be_known(scaled, tmp_path):
    ids = prompt(60)
    with KVStore(tmp_path, **QUIET) as store:
        for alpha, is_plain in ((2.0, True), (0, True), (None, True), (torch.zeros(1), True), (0.0, False)):
            cache = TieredCache(scaled, store)
            last_logits(scaled, ids, cache, logits_to_keep=1, alpha=alpha)
            assert ("`alpha` may change" in cache.stats.reason) == is_plain
    assert assert_right(tmp_path, scaled, [ids]) == [48]


def test_what_generate_passes_on_to_the_model_changes_nothing(tmp_path):
    model, ids = build("llama"), prompt(60)
    with KVStore(tmp_path) as store:
        for tokens_restored in (0, 48):
            cache = TieredCache(model, store)
            options = {"do_sample": False, "max_new_tokens": 2, "tokenizer": object(), "assistant_tokenizer": object()}
            model.generate(ids, past_key_values=cache, **options)
            assert cache.stats.tokens_restored == tokens_restored


def test_a_cache_whose_kv_was_edited_neither_stores_nor_restores(scaled, tmp_path):
    ids = prompt(96)
    with KVStore(tmp_path, **QUIET) as store:
        store.precompute(scaled, ids, progress=False)
        cache = TieredCache(scaled, store)
        last_logits(scaled, ids[:, :40], cache, logits_to_keep=1)
        for layer in cache.layers:
            layer.keys[:, 0].neg_()
        last_logits(scaled, ids[:, 40:], cache, logits_to_keep=1)
        assert cache.stats.tokens_restored == 32
        assert reasons.EDITED in cache.stats.reasons
    assert_right(tmp_path, scaled, [ids])


@pytest.mark.parametrize("in_turn", [False, True], ids=["keys, then values", "layer by layer"])
@pytest.mark.parametrize("dropped", [0, 8])
@pytest.mark.parametrize("stored", [False, True])
def test_keys_and_values_may_be_replaced_by_fewer(scaled, tmp_path, in_turn, dropped, stored):
    """Code that compresses caches assigns other tensors to the layers of a `DynamicCache`."""
    ids, more = prompt(40), [prompt(n, seed=n) for n in (1, 3, 1)]

    def answers(cache):
        all_logits = [last_logits(scaled, ids, cache, logits_to_keep=1)]
        for layer in cache.layers:
            keys = layer.keys[:, :, dropped:].clone()
            if in_turn:
                layer.keys = keys
                layer.values = layer.values[:, :, dropped:]
            else:
                layer.keys, layer.values = keys, layer.values[:, :, dropped:]
            assert layer.keys is not None and layer.keys.shape == layer.values.shape
        assert cache.get_seq_length() == 40 - dropped
        for further_ids in more:
            all_logits.append(last_logits(scaled, further_ids, cache))
        cache.crop(-2)
        return [*all_logits, last_logits(scaled, more[0], cache)]

    with KVStore(tmp_path, **QUIET) as store:
        if stored:
            store.precompute(scaled, ids, progress=False)
        cache = TieredCache(scaled, store)
        for logits, right in zip(answers(cache), answers(DynamicCache(config=scaled.config)), strict=True):
            torch.testing.assert_close(logits, right, rtol=0, atol=1e-9)
        assert reasons.EDITED in cache.stats.reasons
        del cache
        store.flush()
        assert {row.tokens for row in store.segments()} <= {32, 40}
    assert_right(tmp_path, scaled, [torch.cat([ids, *more], 1), torch.cat([ids[:, 8:], *more], 1)])


@pytest.mark.parametrize("method", ["contiguous_kv:budget=0.5", "kv_drive:budget=0.5"])
def test_a_selection_cannot_be_replaced(tmp_path, method):
    model, ids = build("llama"), prompt(400)
    with KVStore(tmp_path, **QUIET) as store:
        store.precompute(model, ids[:, :384], method=method, progress=False)
        cache = TieredCache(model, store, method=method)
        last_logits(model, ids, cache, logits_to_keep=1)
        with pytest.raises(CacheMismatchError, match="attends to a part of its prompt cannot be replaced"):
            cache.layers[0].keys = cache.layers[0].keys[:, :, 8:]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_are_iterated_as_those_of_a_dynamic_cache(tmp_path, family):
    model, ids = build(family), prompt(60)
    dynamic = DynamicCache(config=model.config)
    with KVStore(tmp_path, **QUIET) as store:
        cache = TieredCache(model, store)
        for past in (dynamic, cache):
            last_logits(model, ids, past)
        for layer, right in zip(cache, dynamic, strict=True):
            for tensor, expected_tensor in zip(layer, right, strict=True):
                is_none = tensor is None and expected_tensor is None
                assert is_none or torch.equal(tensor, expected_tensor)


@pytest.mark.parametrize("pad", [0, 5])
def test_router_logits_that_generate_discards_keep_nothing_from_being_restored(tmp_path, pad):
    model, ids = build("qwen3_moe"), prompt(80)
    model.config.output_router_logits = True
    mask = torch.ones_like(ids)
    mask[:, :pad] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    with KVStore(tmp_path, **QUIET) as store:
        for token_count in (0, min((80 - pad) // 16 * 16, 79 - pad)):
            cache = TieredCache(model, store)
            output = model.generate(ids, past_key_values=cache, **options)
            assert torch.equal(output, model.generate(ids, **options)) and cache.stats.tokens_restored == token_count


@pytest.mark.parametrize("place", ["argument", "config"])
def test_router_logits_are_those_of_all_tokens(tmp_path, place):
    model, ids = build("qwen3_moe"), prompt(80)
    options = {"output_router_logits": True} if place == "argument" else {}
    model.config.output_router_logits = place == "config"

    def outputs(cache):
        with torch.no_grad():
            mask = torch.ones_like(ids)
            return model(input_ids=ids, past_key_values=cache, attention_mask=mask, logits_to_keep=1, **options)

    right = outputs(DynamicCache(config=model.config))
    with KVStore(tmp_path, **QUIET) as store:
        store.precompute(model, ids, progress=False)
        cache = TieredCache(model, store)
        output = outputs(cache)
        assert cache.stats.reason == reasons.ALL_STATES
    assert torch.equal(output.logits, right.logits) and torch.equal(output.aux_loss, right.aux_loss)
    assert all(map(torch.equal, output.router_logits, right.router_logits))


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("forked", [True, False])
def test_nothing_is_restored_behind_an_odd_token(scaled, tmp_path, record, forked):
    ids, reference = prompt(82), DynamicCache(config=scaled.config)
    with KVStore(tmp_path, **QUIET) as store:
        store.precompute(scaled, ids, progress=False)
        cache = TieredCache(scaled, store, record=record)
        for past in (cache, reference):
            last_logits(scaled, ids[:, :40], past, logits_to_keep=1)
            last_logits(scaled, ids[:, 40:41], past, position_ids=torch.tensor([[60]]))
        if forked:
            cache = cache.fork()
        logits, right = (last_logits(scaled, ids[:, 41:], past, logits_to_keep=1) for past in (cache, reference))
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-9)
        assert reasons.ODD_MASK in cache.stats.reasons


def test_a_model_in_which_an_engine_begins_is_identified_again(scaled, tmp_path, monkeypatch):
    """The engine's pass changes the configuration, so the model has another identity meanwhile."""
    ids, attachment, real = prompt(60), attach(scaled), Fingerprinter.look

    def look(fingerprinter, *args):
        identity = real(fingerprinter, *args)
        if not attachment.batched_passes:
            attachment.batched_passes, identity = 1, replace(identity, fingerprint="0" * 32)
        return identity

    with KVStore(tmp_path, **QUIET) as store:
        monkeypatch.setattr(Fingerprinter, "look", look)
        last_logits(scaled, ids, TieredCache(scaled, store), logits_to_keep=1)
        monkeypatch.undo()
        attachment.batched_passes = 0
    assert assert_right(tmp_path, scaled, [ids]) == [48]


@pytest.mark.parametrize("record", [True, False])
def test_a_pass_during_which_an_engine_begins_is_run_again(scaled, tmp_path, record):
    """The engine's pass changes the model's configuration, so this pass may have attended to later tokens."""
    ids, layers = prompt(60), []
    attachment = attach(scaled)
    with KVStore(tmp_path, **QUIET) as store:
        cache = TieredCache(scaled, store, record=record)
        real = cache.update

        def update(keys, values, index, *args, **kwargs):
            layers.append(index)
            attachment.batched_passes += len(layers) == 2
            return real(keys if len(layers) > LAYERS else keys + 1, values, index, *args, **kwargs)

        cache.update = update
        logits = last_logits(scaled, ids, cache, logits_to_keep=1)
        del cache.update
        attachment.batched_passes = 0
        torch.testing.assert_close(logits, expected(scaled, ids), rtol=0, atol=1e-9)
        assert layers == 2 * list(range(LAYERS))
        assert cache.get_seq_length() == 60
    assert assert_right(tmp_path, scaled, [ids]) == [48 if record else 0]


# --- arguments from which models derive positions


class Numbered(LlamaForCausalLM):
    """Model that numbers its tokens by an argument that transformers has for code from elsewhere."""

    def forward(self, input_ids=None, cache_position=None, logits_to_keep=0, **kwargs):
        if cache_position is not None:
            kwargs["position_ids"] = cache_position.unsqueeze(0)
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)


@pytest.fixture(scope="module")
def numbering(scaled):
    """Return models by the argument from which they derive positions; OPT adds up the values of a mask."""
    opt = build("opt", dtype=torch.float64, num_hidden_layers=2, init_std=0.3)
    return {"cache_position": Numbered(scaled.config).double().eval(), "attention_mask": opt}


@settings(max_examples=12)
@given(
    argument=st.sampled_from(["cache_position", "attention_mask"]),
    dtype=st.sampled_from([torch.int64, torch.float64]),
    odd_from=st.sampled_from([None, 5, 46, 47]),
)
@example("cache_position", torch.int64, 47)
@example("attention_mask", torch.int64, 47)
def test_an_argument_that_shifts_positions_is_noticed(numbering, tmp_path_factory, argument, dtype, odd_from):
    root, model, ids = tmp_path_factory.mktemp("store"), numbering[argument], prompt(48)
    values = torch.arange(48) if argument == "cache_position" else torch.ones(1, 48, dtype=dtype)
    if odd_from is not None:
        values[..., odd_from:] += 1
    with KVStore(root, **QUIET) as store:
        cache = TieredCache(model, store)
        for start, stop in [(0, 47), (47, 48)]:
            given_values = values[start:stop] if argument == "cache_position" else values[:, :stop]
            last_logits(model, ids[:, start:stop], cache, **{argument: given_values})
    assert assert_right(root, model, [ids]) == [48 if odd_from is None else 0]


# --- positions that a model counts by itself


@pytest.fixture(scope="module")
def roberta():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = RobertaConfig(vocab_size=160, max_position_embeddings=256, is_decoder=True, **sizes, **LARGE)
    return RobertaForCausalLM(config).double().eval()


def generated(model, ids, cache):
    options = {"do_sample": False, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, past_key_values=cache, **options).logits[0]


@pytest.mark.parametrize("first", ["precompute", "generate", "forward"])
def test_positions_that_a_model_counts_otherwise_are_not_mixed_up(roberta, tmp_path, first):
    ids = prompt(80)
    with KVStore(tmp_path, **QUIET) as store:
        if first == "precompute":
            store.precompute(roberta, ids, progress=False)
        else:
            run = generated if first == "generate" else lambda *args: last_logits(*args, logits_to_keep=1)
            run(roberta, ids, TieredCache(roberta, store))
        store.flush()
        cache = TieredCache(roberta, store, record=False)
        output = generated(roberta, ids, cache)
        torch.testing.assert_close(
            output, generated(roberta, ids, DynamicCache(config=roberta.config)), rtol=0, atol=1e-9
        )
        assert cache.stats.tokens_restored == (0 if first == "forward" else 79)
        cache = TieredCache(roberta, store)
        torch.testing.assert_close(last_logits(roberta, ids, cache, logits_to_keep=1), expected(roberta, ids))
        assert cache.stats.reason == reasons.OWN_POSITIONS
        assert (TieredCache(roberta, store).look_up(ids)[0] is not None) == (first != "forward")


def test_the_advice_where_generate_drops_positions_is_not_to_pass_them_there(roberta, tmp_path, monkeypatch):
    """Kosmos-2.5 drops them."""
    prepare = type(roberta).prepare_inputs_for_generation

    def without_positions(model, *arguments, **options):
        return prepare(model, *arguments, **options) | {"position_ids": None}

    monkeypatch.setattr(type(roberta), "prepare_inputs_for_generation", without_positions)
    ids = prompt(80)
    with KVStore(tmp_path, **QUIET) as store:
        cache = TieredCache(roberta, store)
        roberta.generate(ids, position_ids=torch.arange(80)[None], past_key_values=cache, max_new_tokens=1)
        assert cache.stats.reason == reasons.OWN_POSITIONS
        assert reasons.OWN_POSITIONS.endswith("If its generate() drops them, use DynamicCache with generate()")


# --- rows


def test_rows_of_a_cache_without_the_store_are_repeated_and_selected(scaled, tmp_path):
    ids, mask = prompt(40, rows=2), torch.ones(2, 40, dtype=torch.int64)
    mask[0, 5] = 0  # more than left padding
    with KVStore(tmp_path) as store:
        caches = TieredCache(scaled, store), DynamicCache(config=scaled.config)
        results = []
        for cache in caches:
            last_logits(scaled, ids, cache, attention_mask=mask, logits_to_keep=1)
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
            wide = torch.cat([mask, mask.new_ones(2, 1)], dim=1).repeat_interleave(2, dim=0).flip(0)
            results.append(last_logits(scaled, prompt(1, rows=4), cache, attention_mask=wide))
        torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "indices", [torch.tensor([-1, 0]), [0, 2], torch.tensor([True, False, True]), torch.tensor([2], dtype=torch.int32)]
)
def test_rows_are_selected_by_whatever_selects_rows_of_a_tensor(scaled, tmp_path, indices):
    ids = prompt(40, rows=3)
    with KVStore(tmp_path) as store:
        caches = TieredCache(scaled, store), DynamicCache(config=scaled.config)
        results = []
        for cache in caches:
            last_logits(scaled, ids, cache, logits_to_keep=1)
            cache.batch_select_indices(indices)
            results.append(last_logits(scaled, prompt(1, rows=cache.layers[0].keys.shape[0]), cache))
        torch.testing.assert_close(*results, rtol=0, atol=1e-9)


# --- values


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", "float32")])
def test_precision_may_change_between_passes(tmp_path, dtypes):
    """Autocast leaves rotated keys in float32; `double` changes both keys and values."""
    model, reference = build("llama", **LARGE), DynamicCache()
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        for turn, dtype in enumerate(dtypes):
            ids = prompt(80, seed=turn)  # the buffers grow, too
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits, right = (last_logits(model, ids, past) for past in (cache, reference))
            assert torch.equal(logits, right)
        model.double()
        logits, right = (last_logits(model, prompt(3), past) for past in (cache, reference))
        assert torch.equal(logits, right)
        assert reasons.MODEL_CHANGED in cache.stats.reasons


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kv_that_is_not_finite_is_not_stored(tmp_path, value):
    model, ids = build("llama"), prompt(60)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        attach(model)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[0, 0] = value
        last_logits(model, ids, cache, logits_to_keep=1)
        cache.store_now()
        store.flush()
        assert not store.segments()
        assert cache.stats.tokens_stored == 0
        assert reasons.NOT_FINITE in cache.stats.reasons


def test_a_pass_without_tokens_has_no_images(tmp_path):
    model, ids = build("falcon"), prompt(60)
    with KVStore(tmp_path) as store, torch.no_grad():
        cache, reference = TieredCache(model, store), DynamicCache(config=model.config)
        for part in (ids, ids[:, :0], ids):
            logits, right = (model(part, past_key_values=past).logits for past in (cache, reference))
            assert torch.equal(logits, right)
        assert any("no token ids" in reason for reason in cache.stats.reasons)
        assert reasons.IMAGES not in cache.stats.reasons
