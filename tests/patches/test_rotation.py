"""Keys rotated at other positions: with the bits of the model's own function, and faster where those are sure."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt
from thorough import pairs

from hf_tiered_cache import TieredCache
from hf_tiered_cache.patches import rope

GREEDY = {"do_sample": False, "max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
BY_HALVES = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox")
OTHERS = ("cohere", "glm4")
"""They rotate neighboring dimensions against each other."""


@pytest.fixture
def halves(monkeypatch):
    """Record the numbers of keys that were rotated by halves, including sampled ones."""
    counts: list[int] = []
    rotate = rope.rotate_halves_

    def counting(keys, cos, sin):
        counts.append(keys.shape[2])
        rotate(keys, cos, sin)

    monkeypatch.setattr(rope, "rotate_halves_", counting)
    return counts


def restored(model, store):
    """Return the logits of a prompt whose beginning is computed, and of the same with the beginning restored."""
    ids = prompt(180)
    plain = model.generate(ids, **GREEDY)
    store.precompute(model, ids[:, :128], progress=False)
    cache = TieredCache(model, store)
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 128
    return plain.logits, output.logits


@pytest.mark.parametrize(("family", "dtype"), pairs(BY_HALVES + OTHERS, [torch.float32, torch.bfloat16]), ids=str)
def test_keys_are_rotated_by_halves_where_the_bits_are_the_models(family, dtype, store, halves):
    model = build(family, dtype)
    plain, restored_logits = restored(model, store)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for a, b in zip(restored_logits, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    if family in BY_HALVES:
        assert halves.count(128) >= 1  # layers without a window
    else:
        assert max(halves, default=0) <= rope._SAMPLED


@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("name", ["scale", "signs"])
def test_a_function_that_differs_is_called(name, scale):
    """It may differ at one dimension only, or in the sign of a half."""
    calls = []

    def own(q, k, cos, sin):
        calls.append(k.shape)
        first, second = k.chunk(2, dim=-1)
        turned = torch.cat((second, -first) if name == "signs" else (-second, first), dim=-1)
        factors = torch.ones(k.shape[-1])
        factors[-1] = scale if name == "scale" else 1
        return q, (k * cos.unsqueeze(1) + turned * sin.unsqueeze(1)) * factors

    angles = torch.outer(torch.arange(64.0), 10000 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
    cos, sin = angles.cos()[None], angles.sin()[None]
    keys = torch.randn(1, 2, 64, 16)
    places = {"q": 0, "k": 1, "cos": 2, "sin": 3}
    call = rope.RotaryCall(own, places, (keys, keys, cos, sin), {}, keys)
    is_own = scale != 1 or name == "signs"
    assert rope.TableCache().is_by_halves(call, keys, cos, sin) == (not is_own)
    assert not rope.TableCache().is_by_halves(call, keys, cos[:, :8], sin[:, :8])  # position 0 alone shows nothing


def test_a_tensor_that_the_function_gets_besides_is_not_ignored():
    """A scale that differs by layer is an example."""

    def scaled(q, k, cos, sin, scale):
        return q, rotated(k, cos, sin) * scale

    def rotated(k, cos, sin):
        k = k.clone()
        rope.rotate_halves_(k, cos, sin)
        return k

    keys, table = torch.randn(1, 2, 32, 16), torch.randn(1, 32, 16)
    places = {"q": 0, "k": 1, "cos": 2, "sin": 3, "scale": 4}
    call = rope.RotaryCall(scaled, places, (keys, keys, table, table, torch.ones(())), {}, keys)
    assert not rope.TableCache().is_by_halves(call, keys, table, table)
