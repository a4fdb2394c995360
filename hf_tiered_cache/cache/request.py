"""Parsing of one forward pass: its tokens, padding and positions, and whether its KV can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..patches.attach import Attachment
from ..patches.scope import CACHE_ARGUMENTS
from ..reasons import IMAGES, LOOKS_AHEAD, ODD_MASK, ODD_POSITIONS, OWN_POSITIONS
from ..store.memory import to_device
from .suitability import counts_positions

_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that mark each token as text (0) or as an image placeholder."""
_UNDERSTOOD = frozenset(
    {
        *("input_ids", "attention_mask", "position_ids", *CACHE_ARGUMENTS, "cache_position", "use_cache"),
        *("logits_to_keep", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("is_causal", "num_items_in_batch"),
        *("tokenizer", "assistant_tokenizer"),  # `generate()` passes its own on
    }
)
"""Arguments of `forward` that affect the KV by tokens and positions only, or are checked. Others may affect it."""
_IMAGES = frozenset(
    {
        *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"),
        *("mm_encoder_outputs", "image_sizes", "pixel_attention_mask", "image_attention_mask"),
    }
)
"""Arguments that affect image placeholders, and no token before the first of them."""
_SIMPLE = (bool, int, float, str)
_PER_TOKEN = ("input_ids", "position_ids", "cache_position", *_TOKEN_TYPES)


@dataclass(frozen=True)
class ForwardArguments:
    """Meaning of the arguments of a model's `forward`.

    Args:
        placeholders: Tokens that represent images, videos or audio.
        defaults: Default values, by name.
        counts_positions: Whether tokens without `position_ids` have the positions 0, 1, and so on.
        masks_images: Whether the mask may let tokens of images attend to later ones. It is made from the types of all
            tokens, so such prompts are computed from the beginning.
    """

    placeholders: frozenset[int] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    counts_positions: bool = True
    masks_images: bool = False

    @classmethod
    def of(cls, attachment: Attachment) -> ForwardArguments:
        """Return those of an attached model."""
        parameters = attachment.signature.parameters
        if (counts := attachment.extras.get("counts positions")) is None:
            counts = attachment.extras["counts positions"] = counts_positions(attachment.model)
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        kinds = (f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index"))
        tokens = (getattr(attachment.model.config, kind, None) for kind in kinds)
        placeholders = frozenset(token for token in tokens if isinstance(token, int))
        return cls(placeholders, defaults, counts, hasattr(attachment.model, "create_masks_for_generate"))

    def positions(self, ids: torch.Tensor, base: int = 0) -> dict[str, torch.Tensor]:
        """Return the argument with which `generate()` numbers tokens, int `[rows, tokens]`, after `base` others."""
        if self.counts_positions:
            return {}
        return {"position_ids": torch.arange(base, base + ids.shape[1], device=ids.device).expand(ids.shape)}

    def is_default(self, name: str, value: Any) -> bool:
        """Return whether a pass with this value of an argument computes the same as one without the argument."""
        default = self.defaults.get(name)
        return value is default or (type(value) is type(default) in _SIMPLE and value == default)


@dataclass(frozen=True)
class Request:
    """Parsed arguments of one pass.

    Args:
        kwargs: All arguments of `forward` by name.
        ids: Token ids, int `[rows, positions]`.
        base: Number of positions that the cache holds already.
        num_positions: Number of positions that the pass adds.
        pads: Left padding of each row, in positions.
        revocable: Number of positions at the end that `generate` may remove (candidates of assisted decoding).
        must_compute: Number of positions at the end to compute: their outputs are requested, or an image precedes them.
        text: Number of positions before the first image; all of them if there is none.
    """

    kwargs: dict[str, Any]
    ids: torch.Tensor
    base: int
    num_positions: int
    pads: list[int]
    revocable: int
    must_compute: int
    text: int

    @cached_property
    def host_ids(self) -> np.ndarray:
        """Token ids in host memory, int64 `[rows, positions]`. The first use waits for the device."""
        return self.ids.to("cpu", torch.int64).numpy()

    def beginning(self, num_positions: int) -> Request:
        """Return a request for the first `num_positions` positions of the prompt, with the last logits only."""
        kwargs = self.kwargs | {"logits_to_keep": 1}
        for name in (*_PER_TOKEN, "attention_mask"):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :num_positions]
        ids = kwargs["input_ids"]
        return replace(
            self, kwargs=kwargs, ids=ids, num_positions=num_positions, revocable=0, must_compute=1, text=num_positions
        )

    def of_row(self, row: int) -> Request:
        """Return a request for one row of the batch, without its padding."""
        tokens, pad = self.num_positions - self.pads[row], self.pads[row]
        kwargs = dict(self.kwargs)
        for name in (*_PER_TOKEN, "attention_mask"):
            if (value := kwargs.get(name)) is None:
                continue
            if value.ndim == 1:  # `cache_position`, which counts the padding
                kwargs[name] = value[:tokens]
            else:
                number = row if value.shape[-2] > 1 else 0
                kwargs[name] = value[..., number : number + 1, pad:]
        return replace(
            self,
            kwargs=kwargs,
            ids=kwargs["input_ids"],
            num_positions=tokens,
            pads=[0],
            must_compute=min(self.must_compute, tokens),
            text=self.text - pad,
        )

    def numbers(self, positions: np.ndarray | None = None) -> torch.Tensor:
        """Return the numbers of the tokens at some or all of the positions, int64 `[rows, n]`, which omit the padding.

        They are negative in the padding, and from the first image on, where a model counts otherwise.
        """
        indices = torch.arange(self.num_positions) if positions is None else torch.from_numpy(positions)
        numbers = indices + self.base - torch.tensor(self.pads).unsqueeze(1)
        return numbers.masked_fill(indices >= self.text, -1)

    def only(self, positions: np.ndarray, suffix: bool) -> dict[str, Any]:
        """Return the arguments for computing only some of the positions (see `Positions`).

        `suffix` tells whether every layer computes exactly these positions, and they include all after the first.
        """
        kwargs = dict(self.kwargs)
        if not suffix:  # for a suffix, the model derives positions and length itself
            device, stop = self.ids.device, self.base + self.num_positions
            if kwargs.get("position_ids") is None:
                ids = torch.arange(self.base, stop) - torch.tensor(self.pads).unsqueeze(1)
                kwargs["position_ids"] = ids.clamp(min=0).to(device)  # [rows, positions]
            if kwargs.get("attention_mask") is None:
                kwargs["attention_mask"] = torch.ones(len(self.pads), stop, dtype=torch.int64, device=device)
        alike = positions.ndim == 1 and len(positions) == self.num_positions - positions[0]  # all from the first one on
        index = slice(int(positions[0]), None) if alike else to_device(positions, self.ids.device)
        for name in _PER_TOKEN:
            if kwargs.get(name) is not None:
                kwargs[name] = _select_positions(kwargs[name], index).contiguous()  # as models may view them
        return kwargs


@dataclass(eq=False)
class DecodingCheck:
    """Check of masks and positions in single-token passes, evaluated on their device and read later.

    Reading the result at every token would synchronize the GPU each time.
    """

    _odd: dict[torch.device, torch.Tensor] = field(default_factory=dict)  # bool scalars
    _was_odd: bool = False  # whether one of those read so far was true
    _padding_of: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = field(default_factory=dict)

    def add(self, kwargs: dict[str, Any], base: int, pads: list[int]) -> str:
        """Check a single-token pass with the arguments `kwargs`, given the number of cached positions and left padding.

        Return the reason if the pass is known to be unusual without reading tensors, or an empty string.
        """
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None and any(pads):
            return ODD_MASK
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.shape != (len(pads), base + 1):
                return ODD_MASK
            present = torch.arange(base + 1, device=mask.device) >= self._padding(pads, mask.device)
            self._note(mask != present)  # [rows, positions]
        if positions is None and any(pads):
            return ODD_POSITIONS
        if positions is not None:
            if positions.ndim not in (2, 3) or positions.shape[-1] != 1:
                return ODD_POSITIONS
            self._note(positions != base - self._padding(pads, positions.device))
        if (cache_position := kwargs.get("cache_position")) is not None:
            if cache_position.shape != (1,):
                return ODD_POSITIONS
            self._note(cache_position != base)
        return ""

    def odd(self) -> bool:
        """Return whether any pass so far was unusual."""
        self._was_odd |= any(bool(odd) for odd in self._odd.values())
        self._odd.clear()
        return self._was_odd

    def fork(self) -> DecodingCheck:
        """Return a check of the same passes, to which others are added independently."""
        return replace(self, _odd=dict(self._odd), _padding_of=dict(self._padding_of))

    def _padding(self, pads: list[int], device: torch.device) -> torch.Tensor:
        """Return the left padding of each row on a device, int64 `[rows, 1]`."""
        key = (tuple(pads), device)
        if key not in self._padding_of:
            self._padding_of[key] = torch.tensor(pads, device=device).unsqueeze(1)
        return self._padding_of[key]

    def _note(self, differs: torch.Tensor) -> None:
        odd = differs.any()
        before = self._odd.get(odd.device)
        self._odd[odd.device] = odd if before is None else before | odd


def parse_request(
    kwargs: dict[str, Any],
    base: int,
    pads: list[int] | None,
    arguments: ForwardArguments,
    check: DecodingCheck | None,
) -> Request | str:
    """Parse the arguments of a pass. Return the reason instead if its KV can neither be stored nor restored.

    The cache holds `base` positions already. `pads` is the left padding of the rows, None at the first pass. `check`
    takes the masks and positions of single-token passes, to be read later; if None, they are read at once.
    """
    ids = kwargs.get("input_ids")
    if ids is None or ids.ndim != 2 or not ids.shape[1]:
        return "the prompt has no token ids (inputs_embeds?), so nothing is restored or stored"
    num_positions = text = ids.shape[1]
    placeholders = arguments.placeholders
    understood = {*_UNDERSTOOD, *_TOKEN_TYPES} if placeholders else _UNDERSTOOD  # GPT-2 adds embeddings of types
    for name, value in kwargs.items():
        if name in _IMAGES and placeholders:
            text = 0 if _holds_tensor(value) else text
        elif name not in understood and not arguments.is_default(name, value):
            return f"`{name}` may change the meaning of tokens, so nothing is restored or stored"
    if num_positions > 1 and (not text or any(kwargs.get(name) is not None for name in _TOKEN_TYPES)):
        text = _num_text_positions(kwargs, placeholders)
    if not text or (text < num_positions and (base or kwargs.get("position_ids") is None)):
        return IMAGES
    if kwargs.get("is_causal") is False:
        return LOOKS_AHEAD
    if kwargs.get("position_ids") is None and not arguments.counts_positions:
        return OWN_POSITIONS
    if check is not None and pads is not None and num_positions == 1 and max(pads) < base:
        if odd := check.add(kwargs, base, pads):
            return odd
    else:
        padding = left_padding(kwargs.get("attention_mask"), ids, base)
        if padding is None or (pads is not None and not _continues(padding, pads, base)):
            return ODD_MASK
        pads = padding
        if not _counts_on(kwargs, base, pads, num_positions, text):
            return ODD_POSITIONS
    can_keep = "logits_to_keep" in arguments.defaults  # among other keywords, a model ignores it
    keep = kwargs.get("logits_to_keep", 0) if can_keep else 0
    is_count = isinstance(keep, int) and keep > 0
    num_excluded = num_positions if arguments.masks_images and text < num_positions else num_positions - text
    must_compute = max(min(keep, num_positions) if is_count else num_positions, num_excluded)
    return Request(kwargs, ids, base, num_positions, pads, keep - 1 if is_count else 0, must_compute, text)


def asks_for_all(kwargs: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Return whether a pass requests outputs that need every token to be computed, such as hidden states.

    The arguments, and the settings of the configuration in their place, are named `output_...`.
    """
    requested = {name: True for name, value in vars(config).items() if name.startswith("output_") and value is True}
    requested |= {name: bool(getattr(config, name, False)) for name in ("output_hidden_states", "output_attentions")}
    output_flags = {name: value for name, value in kwargs.items() if name.startswith("output_") and value is not None}
    return any((requested | output_flags).values())


def _select_positions(value: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    """Return some positions of a per-token argument, which are its last dimension: `[..., positions]`."""
    if isinstance(index, slice) or index.ndim == 1:
        return value[..., index]
    if value.ndim == 1:  # `cache_position`; masks get each row's positions in another way
        return value[index[0]]
    return torch.take_along_dim(value, index.expand(*value.shape[:-2], -1, -1), dim=-1)


def _num_text_positions(kwargs: dict[str, Any], placeholders: frozenset[int]) -> int:
    """Return the number of positions before the first one at which a row has no text."""
    ids = kwargs["input_ids"]
    is_image = torch.isin(ids, torch.tensor(sorted(placeholders), dtype=ids.dtype, device=ids.device))
    for name in _TOKEN_TYPES:
        if kwargs.get(name) is not None:
            is_image = is_image | (kwargs[name] != 0)
    has_image = is_image.any(dim=0).cpu().numpy()
    return int(has_image.argmax()) if has_image.any() else len(has_image)


def count_tokens(kwargs: dict[str, Any]) -> int:
    """Return the number of tokens of a pass, over all rows, without padding."""
    tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= tokens.shape[1] > 1:
        return int(mask[:, -tokens.shape[1] :].count_nonzero())
    return tokens.shape[0] * tokens.shape[1]


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def left_padding(mask: torch.Tensor | None, ids: torch.Tensor, base: int) -> list[int] | None:
    """Return the left padding of each row, or None if the mask is anything else."""
    rows, num_positions = ids.shape
    if mask is None:
        return [0] * rows
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, base + num_positions):
        return None
    mask = mask.cpu()
    pads = (mask == 0).sum(dim=1)
    present = torch.arange(base + num_positions) >= pads.unsqueeze(1)
    if not torch.equal(mask, present.to(mask.dtype)):  # some models add up the values to number tokens
        return None
    return pads.tolist()


def _continues(padding: list[int], pads: list[int], base: int) -> bool:
    """Return whether rows with the left padding `pads` in the first `base` positions may continue with `padding`.

    The padding of a row without a token so far may be longer, as in a prompt that is passed in chunks.
    """
    return all(new == old or min(new, old) >= base for new, old in zip(padding, pads, strict=True))


def _counts_on(kwargs: dict[str, Any], base: int, pads: list[int], num_positions: int, text: int) -> bool:
    """Return whether the position ids of the first `text` tokens count the tokens of each row.

    Vision models give a token several position ids, `[kinds, rows, positions]`, which are equal for text. Code from
    elsewhere may derive the position ids from `cache_position`, `[positions]`, which counts padding and images, too.
    """
    position_ids, cache_position = kwargs.get("position_ids"), kwargs.get("cache_position")
    count = np.arange(base, base + num_positions)
    if cache_position is not None and not np.array_equal(cache_position.cpu().numpy(), count):
        return False
    if position_ids is None:
        return not any(pads)  # the model would count the padding too
    if position_ids.ndim not in (2, 3) or position_ids.shape[-1] != num_positions:
        return False
    numbers = count[:text] - np.array(pads)[:, None]  # [rows, text]
    return bool(((position_ids.cpu().numpy()[..., :text] == numbers) | (numbers < 0)).all())
