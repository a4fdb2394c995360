"""Transfers of small tensors between host and device: indices without a wait, and selections with one wait."""

from __future__ import annotations

import numpy as np
import torch

from .store.memory import try_page_lock


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy of `array` on `device`, without a wait of GPU or thread; on the CPU, share the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    locked = try_page_lock(tensor.pin_memory)
    return (tensor if locked is None else locked).to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return the values of tensors of one device as arrays, and wait for them once."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tuple(copy.numpy() for copy in copies)
