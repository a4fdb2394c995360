"""Which tensors a model's keys and values are computed from, and the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .adapters import idle_adapter_prefixes, plain_path
from .rope import varying_rope


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and other tensors, with their names.

    Tensors of inactive adapters are left out, and names freed of what wrappers add to them, so that switching an
    adapter off leads back to the base model's KV. The head, which reads KV and makes none, is left out, too.
    Accelerate's offloaded weights are read where they lie.

    Raises:
        UnsupportedModelError: some weights are nowhere.
    """
    idle = (*idle_adapter_prefixes(model), *_head_prefixes(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *_other_tensors(model)):
        if f"{name}.".startswith(idle) or _varies_while_running(model, name):
            continue
        if tensor.device.type == "meta":
            tensor = _offloaded(model, name)
        yield plain_path(name), tensor


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapping one (quantized weights) is made of, or the tensor itself."""
    if tensor.is_quantized:
        scales = (
            (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            if _by_channel(tensor)
            else (torch.tensor([tensor.q_scale(), tensor.q_zero_point()]),)
        )
        return [tensor.int_repr(), *scales]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner, _ = tensor.__tensor_flatten__()
    return [plain for name in inner for plain in plain_tensors(getattr(tensor, name))]


def _by_channel(tensor: torch.Tensor) -> bool:
    return tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor looks into, uint8 `[n]`, without a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are neither parameters nor buffers: plain attributes, packed and scaled weights of int8 layers."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and name != "rope_deltas":
                yield f"{path}.{name}", value
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            saved: dict[str, Any] = {}
            module._save_to_state_dict(saved, f"{path}.", True)
            own = {id(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
            yield from ((name, tensor) for name, tensor in _flat(saved) if id(tensor) not in own)


def _flat(saved: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(saved, torch.Tensor):
        yield name, saved
    elif isinstance(saved, dict):
        for key, value in saved.items():
            yield from _flat(value, str(key))
    elif isinstance(saved, list | tuple):
        for number, value in enumerate(saved):
            yield from _flat(value, f"{name}.{number}")


def _head_prefixes(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [f"{name}." for name, module in model.named_modules() if module is head and name]


def _varies_while_running(model: PreTrainedModel, name: str) -> bool:
    """Frequencies that follow the length of the prompt; the chain's RoPE regime keeps these apart."""
    return name.endswith("inv_freq") and varying_rope(model.config.get_text_config(decoder=True)) is not None


def _offloaded(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(owner), "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        weights = getattr(candidate, "weights_map", None)
        if weights is not None:
            return weights[leaf]
    raise UnsupportedModelError(
        f"the weights of {name} are on the meta device, so the model cannot be told from others; load them first"
    )
