"""Description of a model: its modules, configurations, adapters, and the functions that these choose by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from ..patches.layers import offloaded
from ..patches.replacement import ADDED, Replacement
from .code import METHODS, CodeDescription
from .description import PLAIN, Undescribable
from .functions import LEAF, NOTHING
from .origin import ADAPTER_STATE, IRRELEVANT, PYTHON, TRUSTED, UNRELATED, USER, home_of, origin_of_class
from .settings import (
    active_adapters,
    draws_in_training,
    frequencies_in_use,
    is_tuner,
    merged_adapters,
    names_passes_replace,
    varying_kinds,
)
from .watch import Places, Watch

_DESCRIBED_OTHERWISE = frozenset({"_hf_hook", "_old_forward", "_hf_tiered_cache", *ADDED, *METHODS})
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
_CALLED = frozenset({"forward", "__call__"})
_LOOKUPS = frozenset({"__getattribute__", "__getitem__", "get", "get_interface"})
"""Methods of a registry that find a function."""
_SWITCHED_EXPERTS = (None, "grouped_mm", "batched_mm")
"""Names of the functions for experts that `generate()` exchanges on a GPU between a prompt and the tokens after it."""


class ModelDescription(CodeDescription):
    """Description of a model, which the constructor makes.

    For `statics` see `CodeDescription`, and for `unsteady` see `Watch`.
    """

    def __init__(self, model: PreTrainedModel, statics: Places, unsteady: Places) -> None:
        super().__init__(Watch(unsteady), statics)
        self.tuned: list[Any] = []
        """Layers wrapped by an adapter."""
        self.rotary: list[Any] = []
        """Modules with RoPE frequencies that depend on the prompt length."""
        self._trains = self._in_training = False
        self._model = model
        self._text = model.config.get_text_config(decoder=True)
        self._idle = NOTHING  # inactive adapters that parts of the next module may belong to
        self._head = self.original("the output head", model.get_output_embeddings())
        self._head_parts: list[tuple[str, torch.Tensor]] = []
        self._add_model(model)
        self.watch.complete()

    @property
    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors that KV is computed from, in the order of the description."""
        return list(self.tensors.values())

    @property
    def trains(self) -> bool:
        """True if a module is in training mode and may compute different results for that reason."""
        return self._trains or (self._in_training and "training" in self._names)

    def _add_model(self, model: PreTrainedModel) -> None:
        for name in _GLOBAL_HOOKS:
            self.watch.inner(vars(torch_module), name)
            self.add_hooks("all modules", getattr(torch_module, name))
        for kind in (torch.Tensor, nn.Parameter):
            self.watch.members(kind)
            self._depth = LEAF
            self._guard(self.add_members, kind.__name__, kind, frozenset(kind.__dict__))
            self._depth = 0
        self.add("", model)
        self.add("the configuration", self._text)
        self._guard(lambda location: self.finish(), "the code of the model")
        if not self.origins <= {*TRUSTED, PYTHON}:  # other code may compute KV with the output head
            module, self._head = self._head, None
            for location, part in self._head_parts:
                self._guard(self._add_part, location, part, module)
            self._guard(lambda location: self.finish(), "the code of the model")
        self._check_order(model)

    # --- modules

    def original(self, location: str, value: Any) -> Any:
        """Return the object that a value replaces, such as a compiled module, or one wrapped by inactive adapters."""
        value = super().original(location, value)
        if type(value) is OptimizedModule:  # passes with a tiered cache run uncompiled
            self.watch.item(value._modules, "_orig_mod")
            self.add_runners(location, value)
            return self.original(location, value._modules["_orig_mod"])
        tuner = isinstance(value, nn.Module) and is_tuner(value)
        base = next((name for name in _BASES if name in value._modules), "") if tuner else ""
        if base and not (active_adapters(value) or merged_adapters(value)):
            self.tuned.append(value)
            self.watch.item(value._modules, base)
            self.add_runners(location, value)
            self.check_class(f"the code of {location}", type(value), _CALLED)
            return self.original(location, value._modules[base])
        return value

    def add_module(self, location: str, module: nn.Module) -> None:
        """Describe a module: its class, state, hooks and submodules. The code of a scripted one cannot be read."""
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            for name, tensor in module.state_dict(keep_vars=True).items():
                self.add(f"{location}.{name}", tensor)
            raise Undescribable(f"{location}, a scripted module,")
        idle, self._idle = self._idle, NOTHING
        self.origins.update(map(origin_of_class, kind.__mro__))
        self.add_runners(location or kind.__name__, module)
        inner_idle = NOTHING  # names of its inactive adapters
        if is_tuner(module):
            self.tuned.append(module)
            layer: Any = module
            names = {name for container in layer.adapter_layer_names for name in getattr(layer, container, {})}
            inner_idle = frozenset(names - set(active_adapters(module)))
        self.words.append(f"{kind.__module__}.{kind.__qualname__}")
        self._guard(self.add_members, location or kind.__name__, kind, _CALLED)
        is_random, reads_mode = draws_in_training(module), "training" in self._members.get(kind, NOTHING)
        if is_random or reads_mode:
            self.watch.item(module.__dict__, "training")
        self._trains |= is_random and module.training
        if reads_mode and module.training:
            self._in_training = True
            self.words.append("training")
        self.ignore(location or kind.__name__, module.__dict__, "training")
        kinds = varying_kinds(module)
        replaced = names_passes_replace(kinds)
        self._add_attributes(location, module, inner_idle, replaced)
        is_offloaded = offloaded(module) is not None
        for parts in (module._parameters, module._buffers, module._modules):
            if parts:
                self.watch.content(parts)  # including the order, which matters for a list of modules
            is_ordered = parts is module._modules or origin_of_class(kind) == USER
            for name, part in parts.items() if is_ordered else sorted(parts.items()):  # PEFT registers some again
                # accelerate replaces an offloaded weight at each pass; its source is watched
                is_moved = is_offloaded and isinstance(part, torch.Tensor) and part.is_meta
                if name in idle or name in replaced or not (is_moved or self.watch.item(parts, name)):
                    continue
                self.words.append(name)
                path = f"{location}.{name}" if location else name
                if isinstance(part, nn.Module):
                    self._idle = NOTHING if name in _BASES else inner_idle
                    self.add(path, part)
                    self._idle = NOTHING
                elif part is not None:
                    self._guard(self._add_part, path, part, module)
        if kinds:
            self._guard(self._add_frequencies, location, module, kinds)

    def _add_part(self, location: str, part: torch.Tensor, module: nn.Module) -> None:
        """Describe a parameter or buffer. Parts of the output head, which makes no KV, are described by type first."""
        if module is self._head:
            self.words.append(type(part).__name__)
            self._head_parts.append((location, part))
        elif part.device.type == "meta":
            self.number(part)
            name, weights_by_name = location.rpartition(".")[2], offloaded(module)
            if weights_by_name is None:
                raise UnsupportedModelError(
                    f"the weights of {location} are on the meta device, so the model cannot be identified; load the "
                    "weights first"
                )
            weights = weights_by_name[name]
            self._watch_offloaded(weights_by_name, name)
            self.words += [f"tensor {weights.dtype} {tuple(weights.shape)}", "end"]  # as `add` does
            self.tensors[id(part)] = location, weights
        else:
            self.add(location, part)

    def _watch_offloaded(self, weights: Any, name: str) -> None:
        """Watch where accelerate finds offloaded weights: in a dictionary, which several mappings may wrap."""
        while weights is not None and not isinstance(weights, dict):
            for attribute in vars(weights):
                self.watch.item(vars(weights), attribute)
            name = getattr(weights, "prefix", "") + name
            weights = getattr(weights, "dataset", getattr(weights, "state_dict", None))
        if weights is not None:
            self.watch.item(weights, name)

    def _add_frequencies(self, location: str, module: nn.Module, kinds: dict[str, str]) -> None:
        """Describe the RoPE frequencies that passes use, by names that do not depend on earlier passes."""
        for (prefix, kind), tensor in zip(kinds.items(), frequencies_in_use([module]), strict=True):
            if tensor is None:  # the first pass computes them
                device, layer_type = getattr(module, f"{prefix}original_inv_freq").device, prefix[:-1] or None
                compute: Any = ROPE_INIT_FUNCTIONS[kind]
                tensor, _ = compute(module.config, device, seq_len=sys.maxsize, layer_type=layer_type)
            self.words.append(f"{prefix}frequencies")
            self.add(f"{location}.{prefix}inv_freq", tensor)
        self.rotary.append(module)

    def _add_attributes(self, location: str, module: nn.Module, idle: frozenset[str], replaced: frozenset[str]) -> None:
        """Describe the attributes of a module, without those that passes replace and those of `idle` adapters."""
        kind, state = type(module), module.__dict__
        for name in sorted(state.keys() - _INTERNAL):
            value = state[name]
            if isinstance(value, Replacement) or name in replaced or name in _DESCRIBED_OTHERWISE:
                continue
            is_added = name.startswith("_") and isinstance(module, PreTrainedModel) and not hasattr(kind, name)
            if name in UNRELATED or is_added or (is_tuner(module) and name in ADAPTER_STATE):
                self.ignore(f"the attribute {location or kind.__name__}", state, name)
                continue
            if type(value) not in PLAIN and self._is_impure(value):  # such as a path; no code may name the attribute
                self.ignore(f"the attribute {location or kind.__name__}", state, name, by_any_code=True)
                continue
            if not self.watch.item(state, name):
                continue
            self.words.append(name)
            if type(value) is torch.ScriptObject and origin_of_class(kind) == "torch":  # saved as tensors, see below
                continue
            if type(value) is dict and not idle.isdisjoint(value):
                self.watch.content(value)
                for key in value.keys() - idle:
                    self.watch.item(value, key)
                value = {key: item for key, item in value.items() if key not in idle}
            # modules of packages keep values of their configuration
            add = self._add_setting if origin_of_class(kind) in TRUSTED else self.add
            add(f"the attribute {location}.{name}" if location else f"the attribute {name}", value)
        save = kind._save_to_state_dict
        # torch packs weights of int8 layers; what other packages save may change the module (bitsandbytes)
        if save is not nn.Module._save_to_state_dict and home_of(save) == "torch":
            saved: dict[str, Any] = {}
            module._save_to_state_dict(saved, "", True)
            own_ids = {id(part) for part in (*module._parameters.values(), *module._buffers.values())}
            for name, tensor in _flat(saved):
                if id(tensor) not in own_ids:
                    self.words.append(name)
                    self.add_tensor(f"{location}.{name}", tensor)

    def _is_impure(self, value: Any) -> bool:
        """Return whether user code may not use a value, or a part of it."""
        aside = CodeDescription(statics=self._statics)
        aside.add("", value)
        return aside.is_impure

    def add_config(self, location: str, config: PreTrainedConfig) -> None:
        """Describe a configuration, without settings that affect no KV."""
        self.watch.type_of(config)
        self.watch.state_of(config)
        self.words.append(type(config).__name__)
        if origin_of_class(type(config)) == USER:
            self.add_members(location, type(config), NOTHING, special=False)
        state = {"model_type": type(config).model_type} | config.__dict__  # one that was saved has this setting itself
        for base in type(config).__mro__:
            self.watch.members(base)
            for name, value in base.__dict__.items():
                if type(value) in PLAIN and not (name.startswith("_") or name in IRRELEVANT or name in config.__dict__):
                    self.watch.member(base, name)
                    if name not in state:
                        self.words.append(f"{base.__qualname__}.{name} {value!r}")
        for name, value in sorted(state.items()):
            is_internal = name in ("_attn_implementation_internal", "_experts_implementation_internal")
            if name in IRRELEVANT or (name.startswith("_") and not is_internal):
                self.ignore(location, config.__dict__, name)
                continue
            self.watch.item(config.__dict__, name)
            if name == "_attn_implementation_internal":
                self._guard(self._add_attention, value)
            elif name == "_experts_implementation_internal":
                self._guard(self._add_experts, value)
            else:
                self.words.append(name)
                self._guard(self._add_setting, f"{location}.{name}", value)

    def _add_setting(self, location: str, value: Any) -> None:
        """Describe a value of a configuration without what saving loses: the order of dictionaries, and tuples."""
        if type(value) is not dict or not all(type(key) is str for key in value):
            self.add(location, list(value) if type(value) is tuple else value)
            return
        self.words.append(f"dict of {len(value)}")
        self.watch.content(value)
        for key in sorted(value):
            self.add(f"{location} key", key)
            if self.watch.item(value, key):
                self._add_setting(f"{location}[{key!r}]", value[key])

    def _add_attention(self, name: Any) -> None:
        """Describe the attention function called `name` and its mask function.

        A paged function is described as the function that `generate()` uses, if both compute the same.
        """
        base = unpaged(self._model, name)
        self.words.append(f"attention {base}")
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            self._add_registry("the attention functions", registry)
            for registered in dict.fromkeys((base, name)):
                function = self._registered("attention", registry, registered)
                if function is not None and registered == base:
                    self.add("the attention function", function)

    def _add_experts(self, name: Any) -> None:
        """Describe the function called `name` that computes experts (MoE), or all that `generate()` may switch to."""
        self._add_registry("the experts functions", ALL_EXPERTS_FUNCTIONS)
        if name not in _SWITCHED_EXPERTS:
            self.words.append(f"experts {name}")
        for registered in _SWITCHED_EXPERTS if name in _SWITCHED_EXPERTS else (name,):
            function = self._registered("experts", ALL_EXPERTS_FUNCTIONS, registered)
            if function is not None:
                self.add("the experts function", function)

    def _add_registry(self, location: str, registry: Any) -> None:
        """Describe how a registry of functions finds one by its name."""
        self.watch.type_of(registry)
        self.watch.item(registry.__dict__, "_local_mapping")
        self._add_state(location, registry, frozenset({"_local_mapping"}))
        for kind in type(registry).__mro__:
            self.watch.members(kind)
            for name in sorted(_LOOKUPS & kind.__dict__.keys()):
                self.watch.member(kind, name)
                self.add(f"{location}.{name}", kind.__dict__[name])

    def _registered(self, group: str, registry: Any, name: Any) -> Any:
        """Return the function that a registry has under a name, or None. A user's function is a problem."""
        for mapping in (registry._local_mapping, type(registry)._global_mapping):
            self.watch.item(mapping, name)
        function = registry.get(name) if isinstance(name, str) else None
        if isinstance(function, Replacement):
            function = function.original
        if function is not None and home_of(function) not in TRUSTED:
            self.problem = self.problem or f"the {group} function {name!r}"
        return function

    def _check_order(self, model: PreTrainedModel) -> None:
        """Record a problem if layers run in an order other than their `layer_idx`, or share an index."""
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self._text.num_hidden_layers:
                numbers = [_layer_number(layer) for layer in module]
                indices = [number for number in numbers if number is not None]
                if indices != sorted(set(indices)):
                    self.problem = self.problem or "the order of the layers, which differs from their `layer_idx`,"


def unpaged(model: PreTrainedModel, attention: Any) -> Any:
    """Return the name of the attention that `generate()` uses in place of a paged one, if both compute the same.

    While continuous batching runs, the model may use another function of that name, "paged|" before it. KV serves both,
    unless the paged function ignores arguments of the other one, such as `softcap`.
    """
    base = attention.removeprefix("paged|") if isinstance(attention, str) else attention
    if base == attention or base not in ("eager", "sdpa") or attention not in ALL_ATTENTION_FUNCTIONS:
        return attention
    files = (sys.modules.get(name) for name in {type(module).__module__ for module in model.modules()})
    own = [vars(file)["eager_attention_forward"] for file in files if hasattr(file, "eager_attention_forward")]
    passed_names = set[str]().union(*map(_parameters, own))
    accepted_names = passed_names if base == "eager" else passed_names & _parameters(ALL_ATTENTION_FUNCTIONS[base])
    ignored = accepted_names - _parameters(ALL_ATTENTION_FUNCTIONS[attention]) - {"dropout"}  # 0 in eval mode
    return base if own and not ignored else attention


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


_INTERNAL = frozenset(nn.Module().__dict__)
_BASES = ("base_layer", "token_adapter", "original_module")
"""Names of the module that a layer with inactive adapters runs, depending on its class."""


def _layer_number(layer: nn.Module) -> int | None:
    indices = (part.__dict__.get("layer_idx") for part in layer.modules())
    return next((number for number in indices if isinstance(number, int)), None)


def _flat(saved: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(saved, torch.Tensor):
        yield name, saved
    elif isinstance(saved, dict):
        for key, value in saved.items():
            yield from _flat(value, str(key))
    elif isinstance(saved, list | tuple):
        for number, value in enumerate(saved):
            yield from _flat(value, f"{name}.{number}")
