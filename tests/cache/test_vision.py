"""Vision models: text is reused as in any model, and prompts with images up to the first of them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from families import prompt
from reference import kv_of

from hf_tiered_cache import TieredCache, reasons
from hf_tiered_cache.methods import CacheTune
from hf_tiered_cache.operations import precompute

GREEDY = {"do_sample": False, "max_new_tokens": 5}
IMAGE, START, END = 150, 152, 153
_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_VISION = {"depth": 4, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_MODELS = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 64, "in_channels": 3},
    "Qwen2_5_VL": {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}


@pytest.fixture(scope="module", params=_MODELS)
def model(request):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    config = getattr(transformers, f"{request.param}Config")(
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config=_VISION | _MODELS[request.param],
        image_token_id=IMAGE,
        video_token_id=151,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    vision_model = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()
    vision_model.generation_config.pad_token_id = 0
    return vision_model


def text(tokens, seed=1, rows=1):
    """Draw ids that are no image tokens."""
    return prompt(tokens, seed=seed, rows=rows) % 140 + 5


def seen(seed=0, before=50):
    """Return a prompt with an image of 16 tokens after `before` of text, as a processor returns it."""
    image = torch.tensor([START] + [IMAGE] * 16 + [END]).unsqueeze(0)
    ids = torch.cat([text(before), image, text(30, seed=4)], dim=1)
    pixels = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    types = (ids == IMAGE).long()
    return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]]), "mm_token_type_ids": types}


@pytest.mark.parametrize("types", [False, True])
def test_text_is_reused(model, store, types):
    ids = text(100)
    more = {"mm_token_type_ids": torch.zeros_like(ids)} if types else {}
    want = model.generate(ids, **GREEDY, **more)
    for tokens_restored in (0, 96):
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY, **more), want)
        assert cache.stats.tokens_restored == tokens_restored, cache.stats.reason


def test_padded_batches_of_text_are_reused(model, store):
    ids = text(60, rows=2)
    ids[0, :7] = 0
    arguments = {"attention_mask": (ids != 0).long(), "mm_token_type_ids": torch.zeros_like(ids)}
    want = model.generate(ids, **GREEDY, **arguments)
    for tokens_restored in (0, 48 + 41):  # up to the column that both rows can restore
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY, **arguments), want)
        assert cache.stats.tokens_restored == tokens_restored


def test_a_prompt_with_an_image_is_reused_up_to_it(model, store):
    ids, arguments = seen()
    want = model.generate(ids, **GREEDY, **arguments)
    for tokens_restored in (0, 48):
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY, **arguments), want)
        assert cache.stats.tokens_restored == tokens_restored
        assert cache.stats.tokens_stored == 48 - tokens_restored
        assert cache.stats.tokens_computed == ids.shape[1] + GREEDY["max_new_tokens"] - 1 - tokens_restored
        assert cache.stats.reason == reasons.IMAGES


def test_another_image_is_never_taken_for_this_one(model, store):
    for seed in range(3):
        ids, arguments = seen(seed)
        cache = TieredCache(model, store)
        output = model.generate(ids, past_key_values=cache, **GREEDY, **arguments)
        assert torch.equal(output, model.generate(ids, **GREEDY, **arguments))


def test_text_after_a_request_with_an_image(model, store):
    """Vision models remember the last image's positions."""
    ids, arguments = seen()
    model.generate(ids, past_key_values=TieredCache(model, store), **GREEDY, **arguments)
    alone = text(100)
    want = model.generate(alone, **GREEDY)
    for _ in range(2):
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(alone, past_key_values=cache, **GREEDY), want)


def test_text_without_positions_after_a_request_with_an_image(model, store, monkeypatch):
    """Vision models add what the last image took of the positions, as soon as a cache holds something."""
    monkeypatch.setattr(precompute, "CHUNK_TOKENS", 48)
    ids, arguments = seen()
    alone = text(120)
    with torch.no_grad():
        expected = model(alone, logits_to_keep=1).logits
        model.generate(ids, past_key_values=TieredCache(model, store), **GREEDY, **arguments)
        assert model.model.rope_deltas.any()
        store.precompute(model, [alone[0, :64], alone[0]], progress=False)
        cache = TieredCache(model, store, record=False)
        logits = model(alone, past_key_values=cache, logits_to_keep=1).logits
        assert (cache.stats.tokens_restored, cache.stats.reason) == (0, reasons.OWN_POSITIONS)
        torch.testing.assert_close(logits, expected)
        model.model.rope_deltas = None
        cache = TieredCache(model, store, record=False)
        model.generate(alone, past_key_values=cache, do_sample=False, max_new_tokens=1)
        assert cache.stats.tokens_restored == 112
        for layer, kv in zip(cache.layers, kv_of(model, alone), strict=True):
            torch.testing.assert_close(layer.keys, kv[0])
            torch.testing.assert_close(layer.values, kv[1])


def test_an_image_at_once(model, store):
    ids, arguments = seen(before=3)
    want = model.generate(ids, **GREEDY, **arguments)
    for _ in range(2):
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY, **arguments), want)
        assert cache.stats.tokens_restored == cache.stats.tokens_stored == 0


def test_a_kept_cache_with_an_image_drops_another_prompt(model, store):
    ids, arguments = seen()
    cache = TieredCache(model, store)
    output = model.generate(ids, past_key_values=cache, **GREEDY, **arguments)
    for new_ids in (text(40, seed=7), text(140, seed=7)):
        twin = copy.deepcopy(cache)
        assert torch.equal(model.generate(new_ids, past_key_values=twin, **GREEDY), model.generate(new_ids, **GREEDY))
    more = torch.cat([output, text(9, seed=3)], dim=1)
    want = model.generate(more, **GREEDY, **arguments | {"mm_token_type_ids": (more == IMAGE).long()})
    assert torch.equal(model.generate(more, past_key_values=cache, **GREEDY), want)


def test_passages_are_reused_by_a_model_with_as_many_vision_layers(model, store):
    method = CacheTune(recompute=0.3, lead=1)
    passages = [text(48, seed=seed) for seed in (1, 2, 3)]
    store.precompute(model, [ids[0] for ids in passages], passages=True, method=method, progress=False)
    cache = TieredCache(model, store, method=method, record=False)
    ids = torch.cat([text(8, seed=9), *passages, text(20, seed=10)], dim=1)
    model(ids, position_ids=torch.arange(ids.shape[1])[None], past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored > 0


# --- Gemma 4: tokens of an image attend to each other


@pytest.fixture(scope="module")
def gemma():
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 40}
    sizes = {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160}
    config = transformers.Gemma4Config(
        text_config=_TEXT | layers | sizes | {"use_bidirectional_attention": "vision", "initializer_range": 0.3},
        vision_config=None,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=151,
        audio_token_id=154,
    )
    torch.manual_seed(0)
    return transformers.Gemma4ForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize(("image", "types"), [(False, False), (False, True), (True, True)])
def test_text_is_reused_although_images_look_ahead(gemma, store, image, types):
    ids = text(100)
    ids[:, 60:70] = IMAGE if image else 7
    more = {"mm_token_type_ids": (ids == IMAGE).long()} if types else {}
    options = {"output_logits": True, "return_dict_in_generate": True} | GREEDY | more
    logits = torch.stack(gemma.generate(ids, **options).logits)
    for tokens_restored in (0, 0 if image else 96):
        cache = TieredCache(gemma, store)
        restored_logits = torch.stack(gemma.generate(ids, past_key_values=cache, **options).logits)
        torch.testing.assert_close(restored_logits, logits, rtol=0, atol=1e-9)
        assert cache.stats.tokens_restored == tokens_restored, cache.stats.reason


@pytest.mark.skipif(not hasattr(transformers, "Exaone4_5_Config"), reason="this version of transformers lacks it")
def test_a_model_that_sets_rope_deltas_but_never_uses_them_counts_positions(store):
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_key_value_heads": 2}
    config = transformers.Exaone4_5_Config(
        text_config=_TEXT | {"model_type": "exaone4"},
        vision_config=vision | {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
        image_token_id=IMAGE,
        video_token_id=151,
    )
    model, alone = transformers.Exaone4_5_ForConditionalGeneration(config).eval(), text(100)
    for tokens_restored in (0, 96):  # generate() passes no positions to it
        cache = TieredCache(model, store)
        output = model.generate(alone, past_key_values=cache, **GREEDY)
        assert torch.equal(output, model.generate(alone, **GREEDY))
        assert cache.stats.tokens_restored == tokens_restored
