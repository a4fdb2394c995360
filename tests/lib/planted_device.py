"""Device without a GPU: its tensors refuse what CUDA tensors refuse, so that tests find mixed devices."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
_ASKS = {"__get__", "size", "dim", "numel", "is_floating_point", "__len__", "stride", "is_complex", "data_ptr"}


class OnDevice(torch.Tensor):
    """Tensor with values in host memory, which only `cpu()`, `to("cpu")` and reads of single numbers return."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function == torch.Tensor.device.__get__:
            return DEVICE
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name not in _ASKS and any(not isinstance(t, OnDevice) and t.dim() for t in tensors):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
        with torch._C.DisableTorchFunctionSubclass():
            unwrapped = tree_map_only(OnDevice, lambda tensor: tensor.as_subclass(torch.Tensor), (args, kwargs))
            targets = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, str | torch.device)]
            if name == "cpu" or (name == "to" and targets):
                if any(torch.device(target).type != "cpu" for target in targets):
                    args = (args[0], *(a for a in args[1:] if not isinstance(a, str | torch.device)))
                    return args[0].as_subclass(OnDevice)
                return function(*unwrapped[0], **unwrapped[1])
            result = function(*unwrapped[0], **unwrapped[1])
            return tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(OnDevice), result)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the planted device."""
    return tensor.clone().as_subclass(OnDevice)
