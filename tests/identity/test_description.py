"""What is described, what is not, and what is said of it: cases that the inventory of changes does not draw."""

from __future__ import annotations

import enum
import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from descriptions import with_activation
from families import FAMILIES, build, prompt
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

from hf_tiered_cache import KVStore, TieredCache, reasons
from hf_tiered_cache.identity import Fingerprinter, fingerprint

IDS = prompt(60)
GREEDY = {"do_sample": False, "max_new_tokens": 2}


def problem_of(model):
    return Fingerprinter(model).look().problem


# --- what is told apart


class Kind(enum.Enum):
    ONE = 1.0


def by_enum(x):
    return x * Kind.ONE.value


def by_text(x):
    return x * getattr(HERE, "FACTOR")  # noqa: B009


FACTOR = 1.0
HERE = sys.modules[__name__]


class Descriptor:
    def __init__(self, scale):
        self.scale = scale

    def __get__(self, owner, kind):
        return self.scale


def of_a_class_with(descriptor):
    class Scaler:
        scale = descriptor

        def __call__(self, x):
            return x * self.scale

    return Scaler()


@functools.lru_cache
def cached(scale):
    return lambda x: x * scale


class Scaled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 3 if function is functional.linear else result


def namespaced(function):
    """Create a Python module with this function."""
    module = types.ModuleType("functions")
    module.run = function
    return module


def through_a_held_module(module):
    class Caller:
        def __init__(self):
            self.functions = module

        def __call__(self, x):
            return self.functions.run(x)

    return Caller()


PAIRS = {
    "a descriptor's state": (of_a_class_with(Descriptor(1.0)), of_a_class_with(Descriptor(3.0))),
    "a property's closure": (of_a_class_with(property(lambda self: 1.0)), of_a_class_with(property(lambda self: 3.0))),
    "a closure behind a cache": (cached(1.0), cached(3.0)),
    "a function in a module that an object holds": (
        through_a_held_module(namespaced(functional.silu)),
        through_a_held_module(namespaced(functional.relu)),
    ),
    "a partial's argument": (
        functools.partial(torch.mul, other=1.0),
        functools.partial(torch.mul, other=3.0),
    ),
    "NumPy's number": (
        functools.partial(torch.mul, other=np.float64(1)),
        functools.partial(torch.mul, other=np.float64(3)),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_functions_that_differ_in_one_value_are_told_apart(pair):
    first, second = (with_activation(function) for function in PAIRS[pair])
    assert not problem_of(first) and not problem_of(second)
    assert fingerprint(first) != fingerprint(second)


def edits():
    """Return changes of a model, or of what it computes with, and functions that undo them."""

    def enumerated(monkeypatch, model):
        monkeypatch.setattr(Kind.ONE, "_value_", 3.0)

    def named_in_a_text(monkeypatch, model):
        monkeypatch.setattr(HERE, "FACTOR", 3.0)

    def partially(monkeypatch, model):
        for layer in model.model.layers:
            layer.mlp.act_fn.__setstate__((torch.mul, (), {"other": 3.0}, {}))

    def parameter_class(monkeypatch, model):
        model.model.layers[1].mlp.up_proj.weight.__class__ = Scaled

    def order_of_children(monkeypatch, model):
        children = model.model.layers._modules
        for name, child in list(children.items())[::-1]:
            del children[name]
            children[name] = child

    def metaclass_free_mro(monkeypatch, model):
        monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: self.forward(x) * 3, raising=False)

    def inner_operator(monkeypatch, model):
        real = torch._C._nn.silu
        monkeypatch.setattr(torch._C._nn, "silu", lambda x: real(x) * 3)

    return {
        "a value of an enumeration": (by_enum, enumerated),
        "a global named in a text": (by_text, named_in_a_text),
        "a partial given another state": (functools.partial(torch.mul, other=1.0), partially),
        "the class of a parameter": (functional.silu, parameter_class),
        "the order of modules": (functional.silu, order_of_children),
        "a method of torch's": (functional.silu, metaclass_free_mro),
        "an operator of torch's": (functional.silu, inner_operator),
    }


@pytest.mark.parametrize("edit", edits())
def test_an_edit_is_noticed(monkeypatch, edit):
    function, change = edits()[edit]
    model = with_activation(function)
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem
    change(monkeypatch, model)
    after = name.look()
    assert after.problem or after.fingerprint != before.fingerprint


@pytest.mark.parametrize("part", ["k_proj", "q_proj"])
def test_views_of_one_memory_with_other_offsets_are_told_apart(part):
    def fused(first):
        model = build("llama")
        for layer in model.model.layers:
            linear = getattr(layer.self_attn, part)
            rows, columns = linear.weight.shape
            memory = torch.randn(columns, 2 * rows, generator=torch.Generator().manual_seed(1))
            linear.weight = nn.Parameter(memory[:, first * rows : (first + 1) * rows].t())
        return model

    assert fingerprint(fused(0)) == fingerprint(fused(0)) != fingerprint(fused(1))


# --- what cannot be described


def reads_the_environment(x):
    return x * float(os.environ.get("SCALE", 1))


def gets_a_variable(x):
    return x * float(os.getenv("SCALE", "1"))


def reads_a_file(x):
    return x * float(open("scale").read())


def draws(x):
    return x * torch.rand(1, generator=torch.default_generator)


def evaluates(x):
    return eval("x * 2")


class Counting(modeling_llama.LlamaMLP):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("function", [reads_a_file, draws, evaluates])
def test_what_code_cannot_say_runs_plain_with_a_reason(tmp_path, function):
    model = with_activation(function)
    assert "act_fn" in problem_of(model)


@pytest.mark.parametrize("function", [reads_the_environment, gets_a_variable])
def test_the_environment_that_code_reads_is_described(monkeypatch, function):
    names = []
    for scale in ("1", "3", "1"):
        monkeypatch.setenv("SCALE", scale)
        model = with_activation(function)
        assert not problem_of(model)
        names.append(fingerprint(model))
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("bit", ["negative", "conjugate"])
def test_lazily_negated_and_conjugated_weights_give_a_reason(tmp_path, bit):
    model = build("llama")
    pair = torch.randn(64, dtype=torch.complex64)
    lazy = torch._neg_view(pair.real.clone()) if bit == "negative" else pair.conj()
    model.model.layers[0].mlp.extra = lazy
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        model.generate(IDS, past_key_values=cache, **GREEDY)
        assert "mlp.extra" in cache.stats.reason and "lazily" in cache.stats.reason
        store.flush()
        assert not store.segments()


def test_what_changes_at_every_pass_is_said_and_does_not_slow_each_token(tmp_path, monkeypatch):
    model = build("llama")
    model.model.layers[-1].mlp.__class__ = Counting
    described = []
    real = Fingerprinter._describe
    monkeypatch.setattr(Fingerprinter, "_describe", lambda self: (described.append(1), real(self)))
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        expected = model.generate(IDS, do_sample=False, max_new_tokens=60)
        assert torch.equal(model.generate(IDS, past_key_values=cache, do_sample=False, max_new_tokens=60), expected)
        for _ in range(8):
            cache = TieredCache(model, store)
            model.generate(IDS, past_key_values=cache, do_sample=False, max_new_tokens=60)
        assert "calls" in cache.stats.reason and "every pass" in cache.stats.reason
        assert len(described) < 20
        store.precompute(model, IDS, tag="counting", progress=False)
        cache = TieredCache(model, store, tag="counting", record=False)
        model.generate(IDS, past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 48


def in_reverse(model):
    model.model.layers = nn.ModuleList(list(model.model.layers)[::-1])


def sharing_a_cache(model):
    model.model.layers[2].self_attn.layer_idx = 3


@pytest.mark.parametrize("change", [in_reverse, sharing_a_cache])
def test_layers_that_run_in_another_order_are_a_miss(tmp_path, change):
    model = build("llama", num_hidden_layers=4)
    change(model)
    expected = model.generate(IDS, **GREEDY)
    with KVStore(tmp_path) as store:
        for _ in range(2):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), expected)
            assert cache.stats.tokens_restored == 0 and "order of the layers" in cache.stats.reason
            store.flush()


@pytest.mark.parametrize("change", [in_reverse, sharing_a_cache])
def test_layers_whose_order_shows_in_a_pass_alone_are_a_miss(tmp_path, monkeypatch, change):
    model = build("llama", num_hidden_layers=4)
    with KVStore(tmp_path) as store:
        monkeypatch.setattr("hf_tiered_cache.identity.model.ModelDescription._check_order", lambda *_: None)
        change(model)
        expected = model.generate(IDS, **GREEDY)
        for _ in range(2):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), expected)
            store.flush()
        assert (cache.stats.tokens_restored, cache.stats.reason) == (0, reasons.LAYER_ORDER)


# --- stability


@pytest.mark.parametrize("family", FAMILIES)
def test_using_a_model_changes_nothing_of_it(family):
    model = build(family)
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem
    model.generate(prompt(20), do_sample=False, max_new_tokens=3)
    assert name._description.watch.holds()
    assert name.look().fingerprint == before.fingerprint


def test_another_process_gives_the_same_names():
    script = (
        "from families import build; from hf_tiered_cache.identity import fingerprint\n"
        "for family in ('llama', 'gemma3', 'qwen3_moe'): print(fingerprint(build(family)))"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "tests" / "lib"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [fingerprint(build(family)) for family in ("llama", "gemma3", "qwen3_moe")]


def test_kv_computed_since_a_write_into_data_is_not_stored_under_the_old_name(tmp_path, monkeypatch):
    """Requests read a small part of the weights again, and may find the write late."""
    for name in ("REREAD_BYTES", "ROW_BYTES"):
        monkeypatch.setattr(f"hf_tiered_cache.identity.weights.{name}", 4096)
    model, original = build("llama"), build("llama")
    with KVStore(tmp_path) as store:
        store.precompute(model, prompt(32, seed=5), progress=False)
        model.model.layers[-1].mlp.down_proj.weight.data.view(-1)[1500:] *= 3
        cache = TieredCache(model, store)
        model.generate(IDS, past_key_values=cache, **GREEDY)
        del cache
        store.flush()
    with KVStore(tmp_path) as store:
        cache = TieredCache(original, store, record=False)
        expected = original.generate(IDS, **GREEDY)
        assert torch.equal(original.generate(IDS, past_key_values=cache, **GREEDY), expected)
        assert cache.stats.tokens_restored == 0
        assert TieredCache(original, store).look_up(prompt(32, seed=5))[0] is not None  # what was stored before stays


def test_who_waits_for_the_weights_to_be_read_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_tiered_cache.identity.weights.REREAD_BYTES", 64)
    monkeypatch.setattr("hf_tiered_cache.identity.weights.ROW_BYTES", 64)
    model = build("llama")
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        model.generate(IDS, past_key_values=cache, **GREEDY)
        model.model.layers[-1].mlp.down_proj.weight.data.view(-1)[1500:] *= 3
        cache._executor.finish()
        store.flush()
        assert (cache.stats.tokens_stored, store.stats.dropped_writes) == (0, 1)
        assert reasons.WEIGHTS_CHANGED in cache.stats.reasons


# --- code that leaves no trace, and code in its place


def capturing(model):
    """Install transformers' own hooks, which remain after a call."""
    model(IDS, output_hidden_states=True, output_attentions=False)


def test_hooks_of_transformers_leave_no_trace():
    model = build("llama")
    capturing(model)
    identity = Fingerprinter(model).look()
    assert not identity.problem and identity.fingerprint == fingerprint(build("llama"))


def test_a_hook_of_the_users_within_one_of_transformers_is_refused():
    from transformers.utils import can_return_tuple

    model = build("llama")
    model.model.layers[1].register_forward_hook(can_return_tuple(lambda module, args, output: output * 3))
    assert "a hook on model.layers.1" in problem_of(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_patched_hook_of_accelerate_is_refused(monkeypatch, when):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build("llama")
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    name = None if when == "before" else Fingerprinter(model)
    assert name is None or not name.look().problem
    monkeypatch.setattr(AlignDevicesHook, "post_forward", lambda self, module, output: output * 3)
    assert "accelerate hook" in (name or Fingerprinter(model)).look().problem


class Custom(modeling_llama.LlamaForCausalLM):
    """Model with custom code that came with its weights."""

    scale = 1.0

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_model_of_the_users_code_has_a_name_that_its_path_and_generation_settings_do_not_change():
    def made():
        torch.manual_seed(0)
        return Custom(build("llama").config).eval()

    model = made()
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem and fingerprint(made()) == before.fingerprint != fingerprint(build("llama"))
    model.generation_config.temperature = 0.3
    model.name_or_path = "elsewhere"
    assert name.look().fingerprint == before.fingerprint
    model.__class__ = type("Custom", (Custom,), {"scale": 3.0})
    assert name.look().fingerprint != before.fingerprint
