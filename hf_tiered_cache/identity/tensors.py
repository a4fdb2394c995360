"""Bytes of a tensor, including quantized tensors and wrapper subclasses."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def signature(tensor: torch.Tensor) -> str:
    """Return the dtype, shape and memory layout of a tensor, which its bytes do not show, as text."""
    part = "" if tensor.is_quantized or tensor.is_contiguous() else f" at {_offset(tensor)}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}{part}"


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a quantized tensor or wrapper subclass consists of, or the tensor itself."""
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


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without a copy, uint8 `[n]`; of its whole storage if it is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _by_channel(tensor: torch.Tensor) -> bool:
    return tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


def _offset(tensor: torch.Tensor) -> object:
    return 0 if is_traceable_wrapper_subclass(tensor) else tensor.storage_offset()
