"""Two layers' vectors in one: magnitudes are kept, the direction lies on the arc, and odd vectors spoil nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.store.codecs import CODECS, make_codec, merged_codec
from hf_tiered_cache.store.pairs import TOWARD, angle, encode, merge, retained

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_codec = pytest.mark.parametrize("codec", CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@st.composite
def two(draw, magnitudes=(0.0, 1e-5, 1.0, 300.0)):
    """Draw two tensors `[heads, tokens, dim]`: apart, alike, parallel or opposite, of any magnitude, or zero."""
    dtype = draw(st.sampled_from(DTYPES))
    heads, tokens, dim = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 8, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    first, noise = torch.randn(2, heads, tokens, dim, generator=generator)
    mix = st.sampled_from([(0, 1), (1, 0), (-1, 0), (1, 0.1), (1, 1e-3), (-1, 0.1)])
    mixed = torch.tensor([[draw(mix) for _ in range(tokens)] for _ in range(heads)])  # [heads, tokens, 2]
    second = first * mixed[..., :1] + noise * mixed[..., 1:]
    sizes = st.lists(st.sampled_from(magnitudes), min_size=heads * tokens, max_size=heads * tokens)
    return [
        (torch.nn.functional.normalize(tensor, dim=-1) * torch.tensor(draw(sizes)).view(heads, tokens, 1)).to(dtype)
        for tensor in (first, second)
    ]


def length(tensor):
    return tensor.double().norm(dim=-1)


def between(first, second):
    """Return the angle in float64, or 0 if one has no direction."""
    first_unit, second_unit = (torch.nn.functional.normalize(tensor.double(), dim=-1) for tensor in (first, second))
    radians = 2 * torch.atan2((first_unit - second_unit).norm(dim=-1), (first_unit + second_unit).norm(dim=-1))
    return radians.masked_fill((length(first) == 0) | (length(second) == 0), 0)


def merged(first, second, codec, toward=TOWARD):
    pair_codec = merged_codec(codec)
    return [pair_codec.decode(fields, first.dtype) for fields in encode(first, second, pair_codec, toward)]


@every_codec
@given(tensors=two())
def test_magnitudes_are_kept_and_both_have_one_direction(codec, tensors):
    limits = torch.finfo(tensors[0].dtype)
    eps = 2 * limits.eps if tensors[0].dtype == torch.float32 else limits.eps  # where factors round as well
    little = tensors[0].shape[-1] ** 0.5 * limits.smallest_normal * limits.eps  # a step of the smallest numbers
    back = merged(*tensors, codec)
    for before, after in zip(tensors, back, strict=True):
        assert after.dtype == before.dtype and after.shape == before.shape
        assert ((length(after) - length(before)).abs() <= eps * length(before) + little).all()
        assert (after[length(before) == 0] == 0).all()
    large = (length(back[0]) > 0.1) & (length(back[1]) > 0.1)
    assert (between(*back)[large] < 2 * limits.eps).all()


@given(tensors=two(), toward=st.sampled_from([0.0, 0.25, 0.5, TOWARD, 1.0]))
def test_the_direction_lies_on_the_arc_between_the_two(tensors, toward):
    direction, *magnitudes = merge(*tensors, toward)
    first, second = tensors
    apart = between(first, second)
    zero = [length(tensor) == 0 for tensor in tensors]
    lengths = length(direction)
    torch.testing.assert_close(lengths, (~(zero[0] & zero[1])).double(), rtol=0, atol=1e-6)
    for tensor, magnitude in zip(tensors, magnitudes, strict=True):
        torch.testing.assert_close(magnitude.squeeze(-1).double(), length(tensor), rtol=1e-6, atol=0)
    usual = ~zero[0] & ~zero[1] & (apart < math.pi - 0.01)
    torch.testing.assert_close(between(first, direction)[usual], (toward * apart)[usual], rtol=0, atol=2e-5)
    torch.testing.assert_close(between(second, direction)[usual], ((1 - toward) * apart)[usual], rtol=0, atol=2e-5)
    opposite = ~zero[0] & ~zero[1] & (apart > math.pi - 1e-4)
    assert (between(second if toward >= 0.5 else first, direction)[opposite] < 1e-3).all()
    for alone, other_is_zero in ((first, zero[1] & ~zero[0]), (second, zero[0] & ~zero[1])):
        assert (between(alone, direction)[other_is_zero] < 1e-6).all()


@given(tensors=two())
def test_angles_are_those_of_float64_and_do_not_depend_on_magnitudes(tensors):
    angles = angle(*tensors)
    assert angles.dtype == torch.float32 and angles.shape == tensors[0].shape[:-1]
    torch.testing.assert_close(angles.double(), between(*tensors), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(angle(tensors[1].float() * 3, tensors[0]), angles, rtol=1e-5, atol=1e-6)


def test_small_angles_are_told_apart():
    """They are below the root of float32's last bit, where a cosine is 1."""
    for small in (1e-5, 1e-4, 1e-3):
        first, second = torch.tensor([1.0, 0.0]), torch.tensor([math.cos(small), math.sin(small)])
        assert abs(float(angle(first, second)) / small - 1) < 1e-2


@every_codec
@given(tensors=two((0.0, 1.0, 300.0)))  # the smallest of float16 have few directions
def test_what_was_merged_is_merged_into_itself(codec, tensors):
    once = merged(*tensors, codec)
    twice = merged(*once, codec)
    limits = torch.finfo(once[0].dtype)
    for before, after in zip(once, twice, strict=True):
        off = (after.double() - before.double()).abs()
        largest = before.double().abs().amax(-1, keepdim=True)
        steps = 4 if codec == "raw" else 2  # of the largest number
        # a code on the edge may change, if the vectors that came back are not quite parallel after their rounding
        edge = {"raw": 0, "int8": 1 / 127, "fp8": 1 / 8}[codec]
        assert (off <= largest * (steps * limits.eps + edge) + 8 * limits.smallest_normal * limits.eps).all()


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@given(tensors=two())
def test_with_codes_a_merged_vector_is_what_the_codec_decodes(codec, tensors):
    kv_codec = make_codec(codec)
    for fields in encode(*tensors, merged_codec(codec)):
        codes, factor = fields
        assert (codes.dtype, factor.dtype) == tuple(field.dtype for field in kv_codec.fields(torch.bfloat16, 1))
        assert [field.shape[-1] for field in fields] == [tensors[0].shape[-1], 1]
        back = merged_codec(codec).decode(fields, torch.bfloat16)
        assert torch.equal(back, kv_codec.decode(fields, torch.bfloat16))


@every_codec
@given(tensors=two())
def test_fields_are_as_they_are_declared_and_the_direction_is_one(codec, tensors):
    pair_codec, (first, second) = merged_codec(codec), encode(*tensors, merged_codec(codec))
    assert first[0] is second[0]
    for fields in (first, second):
        declared = pair_codec.fields(tensors[0].dtype, tensors[0].shape[-1])
        assert [(field.dtype, field.shape[-1]) for field in fields] == [tuple(field) for field in declared]


@every_codec
@pytest.mark.parametrize("dim", [8, 64])
def test_a_token_is_merged_by_itself_and_always_alike(codec, dim):
    """The result does not depend on its position in a tensor, or on the number of tokens."""
    tensors = torch.randn(2, 2, 96, dim)
    whole_fields = encode(*tensors, merged_codec(codec))
    for run in (slice(0, 1), slice(20, 40), slice(41, 96)):
        alone = encode(*(tensor[:, run].clone() for tensor in tensors), merged_codec(codec))
        for run_fields, expected_fields in zip(alone, whole_fields, strict=True):
            assert all(torch.equal(a, b[:, run]) for a, b in zip(run_fields, expected_fields, strict=True))


@every_codec
@every_dtype
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_a_vector_that_is_not_finite_comes_back_as_nan_and_spoils_no_other(codec, dtype, odd):
    first, second = torch.randn(2, 2, 4, 8).to(dtype)
    first[1, 2, 3] = odd
    assert float(angle(first, second)[1, 2]) == 0
    back = merged(first, second, codec)
    spoiled = torch.zeros(2, 4, dtype=torch.bool)
    spoiled[1, 2] = True
    assert back[0][spoiled].isnan().all() and back[0][~spoiled].isfinite().all() and back[1].isfinite().all()
    rough = {"raw": torch.finfo(dtype).eps, "int8": 0.02, "fp8": 0.1}[codec]
    torch.testing.assert_close(back[1][spoiled], second[spoiled], rtol=0, atol=4 * rough)  # nothing turned it


@every_codec
@every_dtype
def test_no_finite_number_becomes_an_infinite_one(codec, dtype):
    """The longest possible vector is turned toward one axis."""
    most = torch.finfo(dtype).max
    first, second = torch.full((1, 1, 64), most, dtype=dtype), torch.zeros(1, 1, 64, dtype=dtype)
    second[..., 5] = -most
    for toward in (0.0, 0.6, 1.0):
        for back in merged(first, second, codec, toward):
            assert back.isfinite().all() and back.abs().max() > 0.9 * most / 8


@every_dtype
def test_the_smallest_vectors_keep_their_length_and_the_rest_is_not_divided_by_zero(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    first, second = torch.full((1, 3, 4), tiny).to(dtype), torch.full((1, 3, 4), -tiny / 2).to(dtype)
    second[0, 2] = 0
    for before, after in zip((first, second), merged(first, second, "raw"), strict=True):
        torch.testing.assert_close(length(after), length(before), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_tokens_of_the_largest_angles_are_retained():
    angles = torch.tensor([[0.1, 0.9, 0.2, 0.0, 0.9], [0.1, 0.1, 0.8, 0.0, 0.9]])  # means .1 .5 .5 0 .9
    assert retained(angles, 0.2).tolist() == [4]
    assert retained(angles, 0.4).tolist() == [1, 4]  # of equals the first
    assert retained(angles, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert retained(angles, 0.0).tolist() == []
    assert retained(angles[0], 0.2).tolist() == [1]
    assert len(retained(torch.rand(3, 2, 512))) == round(0.05 * 512)
