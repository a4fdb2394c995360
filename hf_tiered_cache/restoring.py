"""One pass that restores: what is announced to the model before it, and how each layer gets its keys and values."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from .errors import ConfigError, RestoreError, TieredCacheError, UnsupportedModelError
from .geometry import LayerKV
from .kvstore import KVStore
from .layer import TieredLayer
from .methods import Method
from .patches.attach import Attachment
from .patches.attention import SELECTING, WRAPPED, can_scatter, can_select, shows_queries
from .patches.layers import decoder_layers, dropping
from .patches.rotary import Unrotated
from .patches.scope import Scope
from .restore.assemble import check_fit, restore_layer
from .restore.plan import Plan
from .restore.prefetch import Prefetch
from .restore.selective import SelectiveRestore
from .stats import Account


class Restoring:
    """Follows a plan through one forward pass.

    Args:
        plan: what is computed and what restored.
        layers: of the cache.
        scope: of the pass.
        attachment: of the model.
        store: where blocks are.
        method: whose plan it is.
        account: counts what happens.
    """

    def __init__(
        self,
        plan: Plan,
        layers: list[object],
        scope: Scope,
        attachment: Attachment,
        store: KVStore,
        method: Method,
        account: Account,
    ) -> None:
        self.plan, self.scope, self.method, self.account = plan, scope, method, account
        self._attachment, self._layers = attachment, layers
        self._deferred: dict[int, tuple[Unrotated, torch.Tensor]] = {}
        self._prefetch = Prefetch(plan, store.residency, account, attachment.device_of, method.ahead_bytes)
        self._selective: SelectiveRestore | None = None
        if plan.attended is not None:
            self._selective = SelectiveRestore(
                plan,
                choosing_layers(layers),
                method.selector(),
                store.residency,
                account,
                attachment.device_of,
                method.ahead_bytes > 0,
                store.upkeep.importance if method.reorder else None,
            )

    @property
    def waiting(self) -> bool:
        """Whether a layer's keys and values were taken in, and wait for its queries to choose the rest."""
        return bool(self._deferred)

    def begin(self, stack: ExitStack) -> None:
        """Announce what is going to be restored, to masks and layers, and start to fetch it; `stack` ends all of it."""
        plan, config = self.plan, self._attachment.config
        for layer in self._layers:
            if isinstance(layer, TieredLayer):
                self._announce(layer)
        if plan.suffix is None:
            if not can_scatter(config):
                raise needs_attention(self.method, self._attachment.model, WRAPPED)
            self.scope.positions = torch.from_numpy(plan.computed[0] + plan.base)
            self._drop_with_depth(plan)
            if self.scope.rows:
                layers = decoder_layers(self._attachment.model, len(plan.computed))
                stack.enter_context(dropping(layers, min(self.scope.rows)))
        stack.callback(self._prefetch.cancel)
        if self._selective is not None:
            if not can_select(config):
                raise needs_attention(self.method, self._attachment.model, SELECTING)
            self.scope.attended = self._attended
            stack.callback(setattr, self.scope, "attended", None)  # a cycle would keep the cache until a collection
            stack.callback(self._selective.cancel)
            self._selective.start()
        self._prefetch.start()

    def _announce(self, layer: TieredLayer) -> None:
        plan = self.plan
        if plan.attended is not None and not layer.window:
            layer.expect(plan.suffix, plan.columns, plan.unattended)
        elif plan.suffix is not None:
            layer.expect(restored=plan.suffix)
        else:
            layer.expect(scattered=plan.columns, first=max(0, plan.first_kept(layer.window)))

    def cannot_choose(self) -> UnsupportedModelError:
        """The model does not show what it attends to."""
        return cannot_choose(self.method, self._attachment.model)

    def _drop_with_depth(self, plan: Plan) -> None:
        self.scope.rows.clear()
        self.scope.kept.clear()
        for layer in range(len(plan.computed)):
            if (rows := plan.rows(layer)) is not None:
                self.scope.rows[layer] = torch.from_numpy(rows)
            if (kept := plan.kept(layer)) is not None:
                self.scope.kept[layer] = torch.from_numpy(kept)

    # --- a layer's keys and values

    def take(
        self, index: int, kind: LayerKV, bare: Unrotated, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's computed columns, `[batch, heads, n, dim]`; return all that its queries may see."""
        if key_states.shape[2] != len(self.plan.computed[index]):
            reader = self.plan.groups[0].pieces[0].reader
            raise RestoreError(reader.id, f"layer {index} computes other tokens than those it is given")
        if self._selective is not None and not kind.window:
            check_fit(self.plan, index, kind, bare.keys.dtype)
            if self._deferred or bare.rotated == "value":
                raise self.cannot_choose()
            self._deferred[index] = (bare, key_states)
            return key_states, value_states
        with self.account.timing("assemble_seconds"):
            return self._assemble(index, kind, bare, key_states, value_states)

    def _assemble(
        self, index: int, kind: LayerKV, bare: Unrotated, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Restored and computed columns, side by side."""
        layer, plan = self._layers[index], self.plan
        first = max(0, plan.first_kept(layer.window))
        keys, values = layer.extend(key_states, value_states, plan.columns, first)
        rotate_ = partial(self.scope.tap.rotate_, bare.call, bare.dims)
        restore_layer(self._prefetch, index, kind, bare.keys.dtype, keys, values, first, rotate_)
        if plan.suffix is not None:
            keys[:, :, plan.suffix - first :] = key_states
            values[:, :, plan.suffix - first :] = value_states
            return layer.seen_by(key_states.shape[2])
        columns = torch.from_numpy(plan.computed[index] - first).to(keys.device)
        if index == plan.compares:
            self._compare(values.index_select(2, columns), value_states)
        keys.index_copy_(2, columns, key_states)
        values.index_copy_(2, columns, value_states)
        return layer.seen_by(None)

    def _compare(self, stored: torch.Tensor, computed: torch.Tensor) -> None:
        """Stored and computed values of a layer, `[batch, heads, n, dim]`, say what later layers compute."""
        deviation = (stored.float() - computed.float()).square().sum((0, 1, 3)).cpu().numpy()  # [n]
        every, least = self.plan.computed[self.plan.compares], self.plan.computed[-1]
        reusable = np.isin(every, least, invert=True)
        chosen = np.union1d(least, every[reusable][self.method.deviating(deviation[reusable])])
        layers = tuple(before if before is not least else chosen for before in self.plan.computed)
        self.plan = replace(self.plan, computed=layers)
        self._drop_with_depth(self.plan)

    def _attended(
        self,
        index: int,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        scaling: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's queries, `[batch, heads, n, dim]`, attend to: the chosen among the restored, and their own."""
        layer, plan = self._layers[index], self.plan
        if layer.window:
            return key_states, value_states
        bare, mine = self._deferred.pop(index, (None, None))
        if mine is not key_states:
            raise self.cannot_choose()
        with self.account.timing("assemble_seconds"):
            keys, values = layer.extend(key_states, value_states, plan.columns, plan.unattended)
            parts = [t[:, :, : plan.attended] for t in (keys, values)]

            def rotate_(tensor: torch.Tensor, positions: np.ndarray) -> None:
                self.scope.tap.rotate_at_(bare.call, bare.dims, tensor, torch.from_numpy(positions))

            self._selective.fill(index, query, key_states, *parts, bare.rotated, rotate_, scaling)
            keys[:, :, plan.attended :] = key_states
            values[:, :, plan.attended :] = value_states
            return layer.seen_by(key_states.shape[2])


def check_depth(attachment: Attachment) -> None:
    """Raises ConfigError: the model has more or fewer layers than when it was attached, and its KV was identified."""
    depth = attachment.config.num_hidden_layers
    if depth != attachment.depth:
        raise ConfigError(
            f"{type(attachment.model).__name__} had {attachment.depth} layers when it was attached, and its "
            f"configuration says {depth} now; call detach(model) first"
        )


def check_suits(method: Method, model: PreTrainedModel) -> None:
    """Refuse a method that needs more of a model's attention than the model shows.

    Raises:
        ConfigError: another attention implementation would do.
        UnsupportedModelError: none does.
    """
    config = model.config.get_text_config(decoder=True)
    if method.selects:
        if not shows_queries(model):
            raise cannot_choose(method, model)
        if not can_select(config):
            raise needs_attention(method, model, SELECTING)
    elif method.passages and not can_scatter(config):
        raise needs_attention(method, model, WRAPPED)


def cannot_choose(method: Method, model: PreTrainedModel) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} attends to other keys than it hands to its cache, or bypasses the registered "
        f"attention function, so that {type(method).__name__} cannot choose among them; use the exact method with it"
    )


def needs_attention(method: Method, model: PreTrainedModel, implementations: tuple[str, ...]) -> TieredCacheError:
    """Advice that works for this model: another attention implementation, if it has one, or another method."""
    name = type(method).__name__
    needed = " or ".join(map(repr, implementations))
    if "eager" not in implementations and not model._supports_sdpa:
        return UnsupportedModelError(
            f"{name} needs attention of the kind {needed}, which {type(model).__name__} does not have; use the exact "
            "method with it"
        )
    return ConfigError(
        f"{name} needs attention of the kind {needed}, and the model has {model.config._attn_implementation!r}; call "
        f"model.set_attn_implementation({implementations[0]!r}) before"
    )


def choosing_layers(layers: list[object]) -> list[int]:
    """Those with full attention; the others keep all of their window."""
    return [i for i, layer in enumerate(layers) if isinstance(layer, TieredLayer) and not layer.window]
