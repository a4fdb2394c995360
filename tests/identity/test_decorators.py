"""Decorated functions of user code: what a decorator of a package was given is described with the function."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from descriptions import with_activation
from families import prompt
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_tiered_cache.identity import Fingerprinter, fingerprint

SCALE = 1.0


@contextmanager
def scaling(scale):
    """Multiply the results of `scaled` by `scale`."""
    global SCALE
    before, SCALE = SCALE, scale
    yield
    SCALE = before


def casting(dtype):
    return torch.autocast("cpu", dtype)(lambda x: functional.silu(x))


def scaled(scale):
    return scaling(scale)(lambda x: functional.silu(x) * SCALE)


def dispatched(scale):
    function = functools.singledispatch(lambda x: x)
    function.register(torch.Tensor, lambda x: functional.silu(x) * scale)
    return function


def attending(backend):
    return sdpa_kernel(backend)(lambda x: functional.scaled_dot_product_attention(x, x, x))


def vectorized(scale):
    return torch.func.vmap(lambda x: functional.silu(x) * scale)


PAIRS = {
    casting: (torch.bfloat16, torch.float16),
    scaled: (1.0, 3.0),
    dispatched: (1.0, 3.0),
    attending: (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    vectorized: (1.0, 3.0),
}


@pytest.mark.parametrize("decorated", PAIRS)
def test_arguments_of_a_decorator_are_told_apart(decorated):
    first, second = PAIRS[decorated]
    models = [with_activation(decorated(argument)) for argument in (first, first, second)]
    names = [fingerprint(model) for model in models]
    assert not Fingerprinter(models[0]).look().problem
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("decorated", [casting, scaled, dispatched])
def test_a_call_of_a_decorated_function_changes_no_name(decorated):
    model = with_activation(decorated(PAIRS[decorated][0]))
    name = Fingerprinter(model)
    before = name.look().fingerprint
    model(prompt(4), use_cache=False)
    assert name.look().fingerprint == before


def test_a_function_that_is_registered_again_is_noticed():
    function = dispatched(1.0)
    name = Fingerprinter(with_activation(function))
    before = name.look().fingerprint
    function.register(torch.Tensor, functional.relu)
    assert name.look().fingerprint != before
