"""Functions that a model finds by name: changes of a registry, of its entries and of what these call are noticed."""

from __future__ import annotations

import pytest
from families import build
from transformers import AttentionInterface
from transformers.integrations import moe
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_tiered_cache.identity import Fingerprinter

SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
LAYERS = {"num_hidden_layers": 2}


def larger(*arguments, **keywords):
    output, weights = SDPA(*arguments, **keywords)
    return output * 1.5, weights


def largest(*arguments, **keywords):
    output, weights = SDPA(*arguments, **keywords)
    return output * 3, weights


class Finding(AttentionInterface):
    def get_interface(self, *arguments):
        return larger


def its_method(monkeypatch):
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *arguments: larger, raising=False)


def the_method_of_its_class(monkeypatch):
    monkeypatch.setattr(AttentionInterface, "get_interface", lambda *arguments: larger)


def its_class(monkeypatch):
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "__class__", Finding)


def its_entries(monkeypatch):
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {"sdpa": larger})


def the_registry_of_masks(monkeypatch):
    monkeypatch.setattr(type(ALL_MASK_ATTENTION_FUNCTIONS), "__getitem__", lambda *arguments: larger, raising=False)


@pytest.mark.parametrize("change", [its_method, the_method_of_its_class, its_class, its_entries, the_registry_of_masks])
def test_a_change_of_a_registry_is_noticed(monkeypatch, change):
    name = Fingerprinter(build("llama", **LAYERS))
    before = name.look()
    assert not before.problem
    change(monkeypatch)
    after = name.look()
    assert after.problem or after.fingerprint != before.fingerprint


def test_another_registry_is_known_by_its_entries(monkeypatch):
    """The registry was replaced before the model was described."""
    registry, names = AttentionInterface(), set()
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", registry)
    for function in (SDPA, larger, largest):
        registry["sdpa"] = function
        names.add(Fingerprinter(build("llama", **LAYERS))())
    assert len(names) == 3


def rope_of(factor):
    """Return a user's function for RoPE frequencies."""
    dynamic = ROPE_INIT_FUNCTIONS["dynamic"]

    def frequencies(*args, **kwargs):
        tensor, scaling = dynamic(*args, **kwargs)
        return tensor, scaling * factor

    return frequencies


def test_a_users_function_in_a_table_is_described(monkeypatch):
    """The table was changed before the model was described."""
    model, names = (
        build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, **LAYERS),
        set(),
    )
    for function in (ROPE_INIT_FUNCTIONS["dynamic"], rope_of(1.5), rope_of(3.0)):
        monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "dynamic", function)
        names.add(Fingerprinter(model)())
    assert len(names) == 3


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_what_experts_are_computed_with_counts(monkeypatch, implementation):
    """A model that computes with another function may be switched to this one by `generate()`."""
    model = build("qwen3_moe", **LAYERS)
    model.set_experts_implementation(implementation)
    name, compute = Fingerprinter(model), moe._grouped_mm
    before = name.look()
    monkeypatch.setattr(moe, "_grouped_mm", lambda *args, **kwargs: compute(*args, **kwargs) * 3)
    after = name.look()
    assert not before.problem and after.fingerprint != before.fingerprint
