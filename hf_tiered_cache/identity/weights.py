"""The bytes of a model's weights: all of them digested once, then watched.

A write through PyTorch raises a tensor's version, and only what it touched is digested again. A write through `.data`
leaves no trace: each look reads `REREAD_BYTES` of the whole again, in turn, and the beginnings of some tensors, so that
any edit of a model of B bytes is found within B / REREAD_BYTES looks, and one of many tensors at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .adapters import idle_adapter_prefixes, plain_path
from .rope import varying_rope

BLOCK_BYTES = 4 << 20
"""Of weights, digested at once."""
REREAD_BYTES = 2 << 20
"""Of weights, read again at each look."""
WINDOW_BYTES = 64
WINDOWS = 64
"""Beginnings of tensors, and how many, read again at each look: an edit of many tensors is found at once."""


@dataclass(frozen=True)
class _Block:
    """A run of bytes of one tensor."""

    tensor: int
    data: torch.Tensor
    """uint8 `[bytes]`, a view."""


class WeightDigests:
    """Digests of everything that a model's keys and values are computed from.

    Tensors of inactive adapters are left out, and names freed of what wrappers add to them, so that switching an
    adapter off leads back to the base model's KV. The head, which reads KV and makes none, is left out, too.
    Accelerate's offloaded weights are read where they lie, once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.names: list[str] = []
        self._watched: list[torch.Tensor] = []
        self._blocks: list[_Block] = []
        for name, tensor in _tensors(model):
            self.names.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}")
            for plain in _plain_tensors(tensor):
                self._add(plain)
        self._digests = self._all_digests()
        self._versions = self._read_versions()
        self._next = 0
        self._first_blocks: list[int] = []
        seen: set[int] = set()
        for number, block in enumerate(self._blocks):
            if block.tensor not in seen and len(block.data) >= WINDOW_BYTES:
                seen.add(block.tensor)
                self._first_blocks.append(number)
        self._turn = 0
        self._windows = [self._read_windows(turn) for turn in range(self._turns)]

    @property
    def _turns(self) -> int:
        return -(-len(self._first_blocks) // WINDOWS)

    def _add(self, tensor: torch.Tensor) -> None:
        number = len(self._watched)
        self._watched.append(tensor)
        data = _bytes_of(tensor)
        self._blocks += [_Block(number, data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]

    @property
    def digest(self) -> bytes:
        """Of all of it."""
        return self._digests.tobytes()

    def changed(self, reread: bool = True) -> bool:
        """Look again. Returns whether anything was found to have changed; then `digest` is that of now.

        Args:
            reread: whether bytes are read, or only versions looked at.
        """
        versions, changed = self._read_versions(), False
        if versions != self._versions:
            written = {n for n, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new}
            self._versions = versions
            changed = self._digest_again([n for n, block in enumerate(self._blocks) if block.tensor in written])
        return (reread and self._edited()) or changed

    def _edited(self) -> bool:
        """Whether what is read of the weights in this turn has changed without a trace; then all of it is read."""
        if self._turns:
            self._turn = (self._turn + 1) % self._turns
            if self._read_windows(self._turn) != self._windows[self._turn]:
                return self.refresh()
        return self._reread_some() and self.refresh()

    def refresh(self) -> bool:
        """Read everything again. Returns whether anything had changed."""
        before, self._digests = self._digests, self._all_digests()
        self._versions = self._read_versions()
        self._windows = [self._read_windows(turn) for turn in range(self._turns)]
        return not np.array_equal(before, self._digests)

    def _reread_some(self) -> bool:
        """Whether the next blocks in turn have changed."""
        read = 0
        for _ in self._blocks:
            number, self._next = self._next, (self._next + 1) % len(self._blocks)
            if _digest(self._blocks[number].data) != self._digests[number]:
                return True
            read += len(self._blocks[number].data)
            if read >= REREAD_BYTES:
                break
        return False

    def _digest_again(self, numbers: list[int]) -> bool:
        before = self._digests.copy()
        for number in numbers:
            self._digests[number] = _digest(self._blocks[number].data)
        touched = {self._blocks[number].tensor for number in numbers}
        for place, first in enumerate(self._first_blocks):
            if self._blocks[first].tensor in touched:
                self._windows[place // WINDOWS] = self._read_windows(place // WINDOWS)
        return not np.array_equal(before, self._digests)

    def _all_digests(self) -> np.ndarray:
        """uint64 `[blocks]`; on the CPU by several threads, for hashing lets go of the interpreter."""
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "hf-tiered-digest") as pool:
            return np.fromiter(pool.map(_digest, [block.data for block in self._blocks]), np.uint64, len(self._blocks))

    def _read_versions(self) -> list[int]:
        try:
            return list(map(_version, self._watched))
        except RuntimeError:  # made in inference mode: these count no versions
            return [0 if tensor.is_inference() else tensor._version for tensor in self._watched]

    def _read_windows(self, turn: int) -> bytes:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for number in self._first_blocks[turn * WINDOWS : (turn + 1) * WINDOWS]:
            data = self._blocks[number].data
            by_device.setdefault(data.device, []).append(data[:WINDOW_BYTES])
        return b"".join(torch.cat(windows).cpu().numpy().tobytes() for windows in by_device.values())


_version = attrgetter("_version")


def _digest(data: torch.Tensor) -> int:
    """xxh3-64 of uint8 `[n]`. Other devices copy what they hold."""
    return xxhash.xxh3_64_intdigest(data.cpu().numpy().data)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor looks into, uint8 `[n]`, without a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What is read, by name."""
    idle = (*idle_adapter_prefixes(model), *_head_prefixes(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *_other_tensors(model)):
        if f"{name}.".startswith(idle) or _varies_while_running(model, name):
            continue
        if tensor.device.type == "meta":
            tensor = _offloaded(model, name)
        yield plain_path(name), tensor


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


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
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
    return [plain for name in inner for plain in _plain_tensors(getattr(tensor, name))]


def _by_channel(tensor: torch.Tensor) -> bool:
    return tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


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
