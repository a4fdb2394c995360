"""Whatever is changed, wherever, in whatever way, at whatever moment: equal logits, or nothing restored."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from changes import inventory, rich
from families import prompt
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hf_tiered_cache import ConfigError, KVStore, TieredCache

TOKENS = 60
IDS = prompt(TOKENS)
GREEDY = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}

property_settings = settings(max_examples=settings.default.max_examples // 2)
any_site = st.sampled_from(inventory())


def logits(model, cache=None):
    output = model.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, **GREEDY)
    return torch.stack(output.logits)


def plain(model):
    """Return the logits without a store, or None if the change breaks the model."""
    try:
        return logits(model)
    except Exception:
        return None


def asks(model, store):
    """Ask a stored prompt; what is restored gives the logits of the model as it is. Returns how many tokens."""
    expected = plain(model)
    assume(expected is not None and bool(expected.isfinite().all()))
    try:
        cache = TieredCache(model, store, record=False)
    except ConfigError:  # another number of layers: a clear error
        assume(False)
    actual = logits(model, cache)
    if cache.stats.tokens_restored:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    return cache.stats.tokens_restored


def records(model, store):
    """Store the prompt, as the model is now."""
    cache = None
    try:
        cache = TieredCache(model, store)
        logits(model, cache)
    except Exception:  # the change breaks the model
        assume(False)
    del cache
    store.flush()


@contextmanager
def changed(site, model):
    undo = site.change(model)
    try:
        yield
    finally:
        undo()


@pytest.fixture(scope="module")
def model():
    return rich()


@property_settings
@given(site=any_site)
def test_between_two_requests(tmp_path_factory, model, site):
    with KVStore(tmp_path_factory.mktemp("kv"), spot_checks=0) as store:
        records(model, store)
        assert asks(model, store) == 48
        with changed(site, model):
            asks(model, store)
        assert asks(model, store) == 48


@property_settings
@given(site=any_site)
def test_before_it_is_stored(tmp_path_factory, model, site):
    """Another process does not restore KV that was computed under the change."""
    with KVStore(tmp_path_factory.mktemp("kv"), spot_checks=0) as store:
        with changed(site, model):
            records(model, store)
        asks(copy.deepcopy(model), store)
        asks(model, store)


@property_settings
@given(site=any_site)
@example(site=next(site for site in inventory() if site.name == "model.rotary_emb in a module"))
def test_stored_and_asked_under_it(tmp_path_factory, model, site):
    """What was stored under a change is exact for the model under this change, if it is restored."""
    with KVStore(tmp_path_factory.mktemp("kv"), spot_checks=0) as store, changed(site, model):
        records(model, store)
        asks(model, store)


@property_settings
@given(site=any_site, tokens=st.integers(1, 18))
def test_between_two_tokens(tmp_path_factory, model, site, tokens):
    """A write into `.data` is found before what was computed is stored."""
    with KVStore(tmp_path_factory.mktemp("kv"), spot_checks=0) as store:
        cache = TieredCache(model, store)
        with torch.no_grad():
            model(input_ids=IDS[:, :40], past_key_values=cache, logits_to_keep=1)
            undo = lambda: None  # noqa: E731
            try:
                for at in range(40, TOKENS):
                    if at == 40 + tokens:
                        undo = site.change(model)
                    model(input_ids=IDS[:, at : at + 1], past_key_values=cache)
                del cache
                store.flush()
            except Exception:
                assume(False)
            finally:
                undo()
        asks(model, store)
        asks(copy.deepcopy(model), store)


@property_settings
@given(first=any_site, second=any_site)
def test_one_change_is_not_taken_for_another(tmp_path_factory, model, first, second):
    with KVStore(tmp_path_factory.mktemp("kv"), spot_checks=0) as store:
        with changed(first, model):
            records(model, store)
        with changed(second, model):
            asks(model, store)


def test_nothing_of_the_inventory_is_left_changed(tmp_path, model):
    """The sites undo themselves, and reading them is no change."""
    assert len(inventory()) > 500
    with KVStore(tmp_path, spot_checks=0) as store:
        records(model, store)
        assert asks(model, store) == asks(copy.deepcopy(model), store) == asks(rich(), store) == 48
