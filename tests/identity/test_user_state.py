"""Changes of what user code computes with, in places where state hides, give another name or run plain."""

from __future__ import annotations

import collections
import decimal
import enum
import functools
import logging
import os
import random
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from descriptions import with_activation
from families import build
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertLMHeadModel
from transformers.models.llama import modeling_llama

from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.identity.origin import PYTHON, USER, origin_of_class

LAYERS = 2


def with_mlp(kind, **attributes):
    """Build a model with an MLP class of the user's."""
    model = build("llama", num_hidden_layers=LAYERS)
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
        layer.mlp.__dict__.update(attributes)
    return model


def assigned(owner, name, value):
    """Return a function that assigns an attribute."""
    return lambda: setattr(owner, name, value)


# --- classes without a name that a module has


def data_of_a_local_class():
    class Settings:
        scale = 1.0

    return with_activation(lambda x: x * Settings.scale), assigned(Settings, "scale", 3.0)


def data_of_the_class_of_an_instance():
    class Settings:
        scale = 1.0

    settings = Settings()
    return with_activation(lambda x: x * settings.scale), assigned(Settings, "scale", 3.0)


def a_static_method_of_a_local_class():
    class Functions:
        @staticmethod
        def run(x):
            return functional.silu(x)

    return with_activation(lambda x: Functions.run(x)), assigned(Functions, "run", staticmethod(functional.relu))


def data_of_a_class_made_by_type():
    settings = type("AnotherName", (), {"scale": 1.0})
    return with_activation(lambda x: x * settings.scale), assigned(settings, "scale", 3.0)


def an_attribute_added_to_a_local_class():
    class Settings:
        pass

    settings = Settings()
    return with_activation(lambda x: x * getattr(settings, "scale", 1.0)), assigned(Settings, "scale", 3.0)


def data_of_a_class_in_a_module_without_a_file():
    module = sys.modules["made_by_hand"] = types.ModuleType("made_by_hand")
    exec("class Settings:\n    scale = 1.0", module.__dict__)
    settings = module.Settings
    return with_activation(lambda x: x * settings.scale), assigned(settings, "scale", 3.0)


# --- state of functions, tensors, enumerations, descriptors and classes


def an_attribute_of_a_function():
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 1.0
    return with_activation(scaled), assigned(scaled, "scale", 3.0)


def an_attribute_of_a_parameter():
    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * self.up_proj.weight.scale

    model = with_mlp(Scaled)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.scale = 1.0
    return model, assigned(layer.mlp.up_proj.weight, "scale", 3.0)


def an_attribute_added_to_a_parameter():
    model, _ = an_attribute_of_a_parameter()
    return model, assigned(model.model.layers[0].mlp.gate_proj.weight, "scale", 3.0)


class ScaledParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return result * args[1]._scale if function is functional.linear else result


def a_private_attribute_of_a_parameter_subclass():
    model = build("llama", num_hidden_layers=LAYERS)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.__class__ = ScaledParameter
    weight._scale = 1.0
    return model, assigned(weight, "_scale", 3.0)


def scales():
    """Create an enumeration with state and a method."""

    class Scale(enum.Enum):
        ONE = (1.0,)

        def __init__(self, number):
            self.number = number

        def apply(self, x):
            return x * self.number

    return Scale


def an_attribute_of_an_enumeration_member():
    scale = scales().ONE
    return with_activation(lambda x: scale.apply(x)), assigned(scale, "number", 3.0)


def a_method_of_an_enumeration():
    scale = scales().ONE
    return with_activation(lambda x: scale.apply(x)), assigned(type(scale), "apply", lambda self, x: x * 3)


def what_a_mapping_proxy_shows():
    settings = {"scale": 1.0}
    proxy = types.MappingProxyType(settings)
    return with_activation(lambda x: x * proxy["scale"]), lambda: settings.update(scale=3.0)


def an_attribute_of_a_partial():
    class Scaled(functools.partial):
        def __call__(self, x):
            return super().__call__(x) * self.scale

    partial = Scaled(functional.silu)
    partial.scale = 1.0
    return with_activation(partial), assigned(partial, "scale", 3.0)


def the_class_of_a_property():
    class Scale(property):
        scale = 1.0

        def __get__(self, instance, kind):
            return self.scale

    class Scaled:
        value = Scale(lambda self: 1.0)

        def __call__(self, x):
            return x * self.value

    return with_activation(Scaled()), assigned(Scale, "scale", 3.0)


FACTOR = 1.0


def a_property_of_a_metaclass(monkeypatch):
    class Meta(type):
        @property
        def scale(cls):
            return FACTOR

    class Settings(metaclass=Meta):
        pass

    change = functools.partial(monkeypatch.setattr, sys.modules[__name__], "FACTOR", 3.0)
    return with_activation(lambda x: x * Settings.scale), change


def the_bases_of_a_class():
    class Base(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x)

    class Other(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 3

    class Derived(Base):
        pass

    return with_mlp(Derived), assigned(Derived, "__bases__", (Other,))


def what_a_module_computes_for_a_name():
    values = {"SCALE": 1.0}
    module = types.ModuleType("computed")
    module.__getattr__ = lambda name: values[name]
    return with_activation(lambda x: x * module.SCALE), lambda: values.update(SCALE=3.0)


def an_item_that_a_container_hides():
    class Hiding(list):
        def __iter__(self):
            return iter(())

        def __len__(self):
            return 0

    scales = Hiding([1.0])
    return with_activation(lambda x: x * scales[0]), lambda: scales.__setitem__(0, 3.0)


def the_order_of_a_dictionary():
    scales = collections.OrderedDict(a=1.0, b=3.0)
    return with_activation(lambda x: x * next(iter(scales.values()))), lambda: scales.move_to_end("a")


def the_level_of_a_logger():
    """Change the level of the parent, which counts."""
    parent, logger = logging.getLogger("hf_tiered_cache_test"), logging.getLogger("hf_tiered_cache_test.child")
    parent.setLevel(logging.DEBUG)

    def scaled(x):
        logger.debug("a pass")
        return x * (1.0 if logger.isEnabledFor(logging.DEBUG) else 3.0)

    return with_activation(scaled), lambda: parent.setLevel(logging.ERROR)


def the_name_of_a_profiled_region():
    region = torch.profiler.record_function("1.0")

    def scaled(x):
        with region:
            return x * float(region.name)

    return with_activation(scaled), assigned(region, "name", "3.0")


# --- names that packages do not compute with, but user code does


def a_private_attribute_of_the_model():
    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * self.owner[0]._scale

    model = with_mlp(Scaled)
    model._scale = 1.0
    for layer in model.model.layers:
        layer.mlp.owner = [model]
    return model, assigned(model, "_scale", 3.0)


def a_private_method_of_an_inner_model():
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    model = BertLMHeadModel(BertConfig(**sizes, num_attention_heads=4, is_decoder=True)).eval()
    real = model.bert._create_attention_masks
    return model, assigned(model.bert, "_create_attention_masks", lambda *args, **kwargs: real(*args, **kwargs))


def a_private_setting():
    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * self.config._scale

    model = with_mlp(Scaled)
    model.config._scale = 1.0
    return model, assigned(model.config, "_scale", 3.0)


def a_setting_that_transformers_ignores():
    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * self.config.attention_dropout

    model = with_mlp(Scaled)
    return model, assigned(model.config, "attention_dropout", 3.0)


def an_attribute_of_a_configuration_class():
    class Configuration(modeling_llama.LlamaConfig):
        extra_scale = 1.0

    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * self.config.extra_scale

    model = with_mlp(Scaled)
    model.config.__class__ = Configuration
    return model, assigned(Configuration, "extra_scale", 3.0)


# --- methods, hooks, compiled modules


class TwoMethods(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x)

    def other(self, x):
        return super().forward(x) * 3


def another_method_as_forward():
    model = with_mlp(TwoMethods)
    mlp = model.model.layers[1].mlp
    return model, assigned(mlp, "forward", mlp.other)


def the_forward_of_a_base():
    model = with_mlp(TwoMethods)
    mlp = model.model.layers[1].mlp
    return model, assigned(mlp, "forward", types.MethodType(modeling_llama.LlamaMLP.forward, mlp))


def hooks_of_a_sequential_hook():
    from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module

    class Tripling(ModelHook):
        def post_forward(self, module, output):
            return output * 3

    model = build("llama", num_hidden_layers=LAYERS)
    mlp = model.model.layers[1].mlp
    add_hook_to_module(mlp, SequentialHook(ModelHook(), ModelHook()))
    return model, assigned(mlp._hf_hook, "hooks", (Tripling(),))


def compiled():
    """Build a model with one compiled MLP."""
    model = build("llama", num_hidden_layers=LAYERS)
    wrapper = model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    return model, wrapper


def a_hook_on_a_compiled_module():
    model, wrapper = compiled()
    return model, lambda: wrapper.register_forward_hook(lambda module, args, output: output * 3)


def a_pre_hook_on_a_compiled_module():
    model, wrapper = compiled()
    return model, lambda: wrapper.register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def the_forward_of_a_compiled_module():
    model, wrapper = compiled()
    forward = wrapper.forward
    return model, assigned(wrapper, "forward", lambda x: forward(x) * 3)


# --- modules in training mode


def a_layer_that_reads_training():
    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * (3.0 if self.training else 1.0)

    model = with_mlp(Scaled)
    return model, model.model.layers[1].mlp.train


def training_of(module):
    model = build("llama", num_hidden_layers=LAYERS)
    model.model.layers[1].mlp.act_fn = module.eval()
    return model, module.train


def a_dropout_of_one():
    return training_of(nn.Sequential(nn.SiLU(), nn.Dropout(1)))


def a_random_activation():
    return training_of(nn.RReLU())


CASES = [
    *(data_of_a_local_class, data_of_the_class_of_an_instance, a_static_method_of_a_local_class),
    *(data_of_a_class_made_by_type, an_attribute_added_to_a_local_class, data_of_a_class_in_a_module_without_a_file),
    *(an_attribute_of_a_function, an_attribute_of_a_parameter, an_attribute_added_to_a_parameter),
    *(a_private_attribute_of_a_parameter_subclass, an_attribute_of_an_enumeration_member, a_method_of_an_enumeration),
    *(what_a_mapping_proxy_shows, an_attribute_of_a_partial, the_class_of_a_property, a_property_of_a_metaclass),
    *(the_bases_of_a_class, what_a_module_computes_for_a_name, the_level_of_a_logger, the_name_of_a_profiled_region),
    *(an_item_that_a_container_hides, the_order_of_a_dictionary),
    *(a_private_attribute_of_the_model, a_private_method_of_an_inner_model, a_private_setting),
    *(a_setting_that_transformers_ignores, an_attribute_of_a_configuration_class),
    *(another_method_as_forward, the_forward_of_a_base, hooks_of_a_sequential_hook),
    *(a_hook_on_a_compiled_module, a_pre_hook_on_a_compiled_module, the_forward_of_a_compiled_module),
    *(a_layer_that_reads_training, a_dropout_of_one, a_random_activation),
]


@pytest.mark.parametrize("case", CASES)
def test_a_change_of_what_user_code_computes_with_is_noticed(monkeypatch, case):
    model, change = case(monkeypatch) if case is a_property_of_a_metaclass else case()
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem and not before.training
    change()
    after = name.look()
    assert after.problem or after.training or after.fingerprint != before.fingerprint


def test_a_compiled_module_has_the_name_of_the_module_in_it():
    model, wrapper = compiled()
    identity = Fingerprinter(model).look()
    model.model.layers[1].mlp = wrapper._orig_mod
    assert not identity.problem and identity.fingerprint == Fingerprinter(model).look().fingerprint


def test_settings_that_no_code_refers_to_change_no_name():
    model = with_activation(lambda x: x * 2)
    name = Fingerprinter(model)
    before = name.look().fingerprint
    model.config._name_or_path, model.config.attention_dropout, model._hf_peft_config_loaded = "elsewhere", 0.5, False
    assert name.look().fingerprint == before


def test_a_class_of_the_standard_library_is_no_user_code():
    kinds = (Path, functools.partial, type(sys.flags), types.SimpleNamespace, enum.Enum)
    assert {origin_of_class(kind) for kind in kinds} == {PYTHON}
    assert origin_of_class(type("Path", (), {"__module__": "pathlib"})) == USER


# --- what is not described


def masked_array():
    array = np.ma.masked_array(np.ones(96, np.float32), mask=np.zeros(96, bool))
    return lambda x: x * torch.from_numpy(array.filled(3.0))


def packed():
    weights = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    packed_weights = torch.ops.quantized.linear_prepack(weights, None)
    return lambda x: x * packed_weights.unpack()[0].dequantize()[0, 0]


def traced():
    constant = torch.arange(96.0)
    return torch.jit.trace(lambda x: x * constant, torch.zeros(96))


def from_a_file(x):
    return x * float(Path("scale").read_text())


def from_an_import(x):
    import importlib

    return x * importlib.import_module("settings").scale


def from_a_module(x):
    return x * vars(sys)["maxsize"]


FILE = Path("scale")


def from_a_path_elsewhere(x):
    with FILE.open() as file:
        return x * float(file.read())


def from_the_clock(x):
    return x * time.time()


def from_chance(x):
    return x * random.random()


def from_a_context(x):
    return x * float(decimal.Decimal(1) / 3)


def from_a_command(x):
    import subprocess

    return x * float(subprocess.check_output(["cat", "scale"]))


def from_the_size_of_a_file(x):
    return x * os.stat("scale").st_size


def from_an_array_in_a_file(x):
    return x * torch.from_numpy(np.load("scale.npy"))


def from_a_tensor_in_a_file(x):
    return x * torch.load("scale.pt")


def from_random_numbers(x):
    return x + torch.randn(1)


def from_a_method_that_draws(x):
    return x + torch.empty_like(x).normal_()


def from_a_distribution(x):
    return x * torch.distributions.Normal(0.0, 1.0).sample()


def from_the_seed(x):
    return x * torch.initial_seed()


def from_the_number_of_threads(x):
    return x * torch.get_num_threads()


def from_the_default_device(x):
    return x * len(torch.get_default_device().type)


def from_an_open_file():
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the function uses it later
    return lambda x: x * float(file.read())


def from_a_thread():
    class Local(threading.local):
        scale = 1.0

    local = Local()
    return lambda x: x * local.scale


HIDDEN = [
    *(masked_array(), packed(), traced(), from_a_file, from_an_import, from_a_module, from_the_clock),
    *(from_a_path_elsewhere, from_chance, from_a_context, from_a_command, from_the_size_of_a_file, from_a_thread()),
    *(from_an_array_in_a_file, from_a_tensor_in_a_file, from_an_open_file(), from_random_numbers),
    *(from_a_method_that_draws, from_a_distribution, from_the_seed, from_the_number_of_threads),
    *(from_the_default_device,),
]


@pytest.mark.parametrize("function", HIDDEN)
def test_inputs_that_code_does_not_show_run_plain_with_a_reason(function):
    assert "act_fn" in Fingerprinter(with_activation(function)).look().problem


class Jittering(modeling_llama.LlamaMLP):
    """A layer that draws random numbers in training mode only."""

    def forward(self, x):
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1) + torch.randn_like(x)
        return super().forward(x)


def test_random_numbers_that_only_training_draws_are_no_reason():
    model = with_mlp(Jittering)
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem
    model.model.layers[0].mlp.train()
    assert name.look().fingerprint != before.fingerprint and name.look().training


# --- with a tag


def in_another_function(change):
    model = with_activation(lambda x: x * FACTOR)
    model.model.layers[0].mlp.act_fn = from_the_clock
    return model, lambda: change("FACTOR", 3.0)


def in_the_same_function(change):
    return with_activation(lambda x: x * time.time() * FACTOR), lambda: change("FACTOR", 3.0)


def in_the_same_object(change):
    class Settings:
        def __init__(self):
            self.lock, self.scale = threading.Lock(), 1.0

        def __call__(self, x):
            return x * self.scale

    settings = Settings()
    return with_activation(settings), assigned(settings, "scale", 3.0)


def in_the_same_container(change):
    values = [threading.Lock(), 1.0]
    return with_activation(lambda x: x * values[1]), lambda: values.__setitem__(1, 3.0)


def in_the_same_configuration(change):
    model = build("llama", num_hidden_layers=LAYERS)
    model.config.extra_clock = time.time
    return model, assigned(model.config, "rms_norm_eps", 0.5)


TAGGED = [
    in_another_function,
    in_the_same_function,
    in_the_same_object,
    in_the_same_container,
    in_the_same_configuration,
]


@pytest.mark.parametrize("case", TAGGED)
def test_what_a_tag_names_hides_no_other_change(monkeypatch, case):
    model, change = case(functools.partial(monkeypatch.setattr, sys.modules[__name__]))
    name = Fingerprinter(model)
    before = name.look("tag")
    assert name.look().problem and not before.problem
    change()
    assert name.look("tag").fingerprint != before.fingerprint


BASE = 1.0


@functools.lru_cache
def table(size):
    return torch.full((size,), BASE)


def test_a_cache_that_was_filled_before_a_change_runs_plain_until_it_is_cleared(monkeypatch):
    table.cache_clear()
    name = Fingerprinter(with_activation(lambda x: x * table(x.shape[-1])))
    before = name.look()
    table(96)
    assert name.look() == before and not before.problem
    monkeypatch.setattr(sys.modules[__name__], "BASE", 3.0)
    assert "table" in name.look().problem and "cache_clear" in name.look().problem
    table.cache_clear()
    after = name.look()
    assert not after.problem and after.fingerprint != before.fingerprint
    table(96)
    assert not name.look().problem
