"""One layer's keys and values: a buffer that grows by doubling, with the interface of a transformers cache layer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .errors import UnsupportedModelError

_DummyLayer = getattr(cache_utils, "DummyLayer", ())  # since transformers 5.19: layers that use another's KV
_HEADROOM = 64
_LARGEST_GROWTH = 4096
"""Columns of room that a buffer has beyond what it must hold: at first, and at most, where it doubles."""


class TieredLayer(CacheLayerMixin):
    """A layer with full attention.

    Keys and values lie in buffers `[batch, heads, capacity, dim]`; the columns `[start, stop)` of them are held, and
    the first of these is column `first` of the sequence. New tokens are written in place, so decoding copies nothing
    until a buffer is full and doubles.
    """

    is_sliding = False
    is_croppable = True
    window = 0

    def __init__(self) -> None:
        self.is_initialized = False
        self._drop()
        self.expect()

    def expect(self, restored: int = 0, scattered: int = 0, first: int = 0) -> None:
        """Announce a pass that restores, so that masks are made for what `extend` is going to hold.

        Args:
            restored: columns restored in front of the computed ones, where those are a suffix.
            scattered: all columns of the pass, where they are none, or where the layer holds a part of them.
            first: columns of the pass that it does not hold: they lie before every query's window, or as many restored
                ones are attended to by none.
        """
        self._restored, self._scattered, self._skipped = restored, scattered, first

    def _drop(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._start = self._stop = self._first = 0
        self._chosen = 0  # columns in front that were chosen from among more
        self._shared = False
        self.is_initialized = False

    # --- what is held

    @property
    def keys(self) -> torch.Tensor | None:
        """`[batch, key_heads, held, key_dim]`, a view."""
        return None if self._keys is None else self._keys[:, :, self._start : self._stop]

    @property
    def values(self) -> torch.Tensor | None:
        """`[batch, value_heads, held, value_dim]`, a view."""
        return None if self._values is None else self._values[:, :, self._start : self._stop]

    @property
    def columns(self) -> int:
        """Columns of the sequence so far, held or not."""
        return self._first + self._stop - self._start

    def get_seq_length(self) -> int:
        return self.columns + self._restored

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._skipped:
            return self._scattered - self._skipped, self.columns + self._skipped
        if self._scattered:
            return self._stop - self._start + self._scattered, self._first
        return self.get_seq_length() + query_length - self._first, self._first

    # --- taking in

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, heads, n, dim]` and return all that the new queries may see."""
        count = key_states.shape[2]
        keys, values = self.extend(key_states, value_states, count)
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.seen_by(count)

    def extend(
        self, like_keys: torch.Tensor, like_values: torch.Tensor, columns: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for `columns` more columns, of which those before `first` are not kept.

        Args:
            like_keys: `[batch, heads, _, dim]`: gives the buffer its shape, dtype and device. like_values likewise.
            first: above 0 only if nothing held so far is seen any more.

        Returns:
            Views of the new columns, uninitialised: `[batch, heads, columns - first, dim]` each.
        """
        if not self.is_initialized:
            self.lazy_initialization(like_keys, like_values)
        if first:
            self._chosen = 0 if self.window else self._restored - first
            self._first = self.columns + first
            self._start = self._stop
        count = columns - first
        self._make_room(like_keys, like_values, count)
        begin, self._stop = self._stop, self._stop + count
        self.expect()
        return self._keys[:, :, begin : self._stop], self._values[:, :, begin : self._stop]

    def seen_by(self, queries: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last `queries` columns may attend to, as `get_mask_sizes` announced it; None for scattered ones."""
        return self.keys, self.values

    def _make_room(self, like_keys: torch.Tensor, like_values: torch.Tensor, count: int) -> None:
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if self._stop + count > capacity or self._shared:
            self._reallocate(like_keys, like_values, count)

    def _reallocate(self, like_keys: torch.Tensor, like_values: torch.Tensor, count: int) -> None:
        held = self._stop - self._start
        self._keys = self._moved(self.keys, like_keys, held, count)
        self._values = self._moved(self.values, like_values, held, count)
        self._start, self._stop, self._shared = 0, held, False

    def _moved(self, held: torch.Tensor | None, like: torch.Tensor, columns: int, count: int) -> torch.Tensor:
        """A buffer with room for `count` more columns than are held, and for as many again while decoding."""
        room = max(columns + count, columns + min(columns, _LARGEST_GROWTH)) + _HEADROOM
        buffer = _empty(like, like.shape[0], room)
        if columns:
            buffer[:, :, :columns] = held
        return buffer

    # --- what generate() does to a cache

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns; a positive number (as in 5.17) is what stays."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.columns)
        if not self.is_initialized:
            return
        if self._chosen and self._stop - self._start + tokens_to_remove < self._chosen:
            raise RuntimeError(
                "a cache that holds a part of its prompt, within a budget, cannot take back tokens of that prompt; "
                "make a new cache"
            )
        self._stop = max(self._start, self._stop + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._keys is not None:
            rows = torch.arange(self._keys.shape[0], device=self._keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row i becomes what row `indices[i]` was."""
        if self._keys is not None:
            self._keys = self._selected(self._keys, indices)
            self._values = self._selected(self._values, indices)
            self._shared = False

    def _selected(self, buffer: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        chosen = _empty(buffer, len(indices), buffer.shape[2])
        held = slice(self._start, self._stop)
        chosen[:, :, held] = buffer[:, :, held].index_select(0, indices.to(buffer.device))
        return chosen

    def reset(self) -> None:
        self._drop()
        self.expect()

    def mark(self) -> dict[str, Any]:
        """The layer as it is now, for `back_to`: later passes write behind it or elsewhere, never over it."""
        return dict(self.__dict__)

    def back_to(self, mark: dict[str, Any]) -> None:
        """Undo what happened since `mark`."""
        self.__dict__.update(mark)

    def fork(self) -> TieredLayer:
        """A layer that shares this one's buffers until one of the two writes."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        self._shared = twin._shared = self._keys is not None
        return twin


def _empty(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`[rows, heads, columns, dim]`, also in inference mode a tensor that later passes may write to outside of it."""
    with torch.inference_mode(False):
        return torch.empty(rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=like.device)


class TieredSlidingLayer(TieredLayer):
    """A layer whose queries see the last `window` tokens, their own included.

    Args:
        window: in tokens.
    """

    is_sliding = True

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = self.sliding_window = window
        self.record_past = False

    def get_max_length(self) -> int:
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._scattered:
            return super().get_mask_sizes(query_length)
        past = min(self.get_seq_length(), self.window - 1)
        return past + query_length, self.get_seq_length() - past

    def activate_past_recording(self) -> None:
        """Keep everything until the next `crop`, which may take tokens back (assisted decoding)."""
        self.record_past = True

    def seen_by(self, queries: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys, self.values
        if queries is not None:
            past = min(self.columns - queries, self.window - 1)
            keys, values = keys[:, :, -(past + queries) :], values[:, :, -(past + queries) :]
        if not self.record_past:
            self._forget_unseen()
        return keys, values

    def _forget_unseen(self) -> None:
        """Let go what no later query sees; give the memory back if that is most of it, as after a long prompt."""
        held = self._stop - self._start
        gone = held - min(self.columns, self.window - 1)
        if gone > 0:
            self._start, self._first = self._start + gone, self._first + gone
        if self._start > 4 * self.window:
            self._reallocate(self._keys, self._values, 0)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized:
            if self._stop - self._start < min(self.columns, self.window - 1):
                raise RuntimeError(
                    "a sliding layer cannot take back tokens whose window it no longer holds; "
                    "call `activate_past_recording` on the cache before"
                )
            self._forget_unseen()


def layers_for(model: PreTrainedModel) -> list[Any]:
    """A layer for each of the model's, as a `DynamicCache` for it would have.

    Raises:
        UnsupportedModelError: some layer keeps state that is no KV of single tokens.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, whose decoder's KV depends on the encoder's input; "
            "leave past_key_values to generate()"
        )
    if not _attends_causally(model):
        raise UnsupportedModelError(
            f"{name} is an encoder: its tokens attend to those behind them, so that no prefix has KV of its own; pass "
            "a causal LM"
        )
    config = model.config.get_text_config(decoder=True)
    layers: list[Any] = []
    kinds = getattr(config, "layer_types", None)
    for index, like in enumerate(DynamicCache(config=config).layers):
        if type(like) is DynamicLayer:
            layers.append(TieredLayer())
        elif type(like) is DynamicSlidingWindowLayer:
            layers.append(TieredSlidingLayer(like.sliding_window))
        elif isinstance(like, _DummyLayer):
            layers.append(like)
        else:
            kind = kinds[index] if kinds else type(like).__name__
            raise UnsupportedModelError(_stateful(name, index, f"state of kind {kind!r}"))
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(_stateful(name, 0, "a recurrent state"))
    return layers


def _attends_causally(model: PreTrainedModel) -> bool:
    said = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return (
        any(said)
        if said
        else bool({"past_key_values", "cache_params"} & inspect.signature(model.forward).parameters.keys())
    )


def _stateful(name: str, layer: int, what: str) -> str:
    return (
        f"layer {layer} of {name} keeps {what}, which exists at one point of the sequence only and cannot be stored in "
        "chunks of tokens; use DynamicCache with this model"
    )
