"""Messages for users: why a prompt was not restored, not stored, or read more than needed, and what to do."""

from __future__ import annotations

from .store.geometry import HASH_TOKENS
from .units import format_bytes

NOTHING = "nothing is stored that begins with these tokens"
SWITCHED_OFF = "the cache was made with restore=False"
NOT_RECORDED = "the cache was made with record=False"
SHORT = f"the prompt is shorter than {HASH_TOKENS} tokens, and KV is stored and restored {HASH_TOKENS} at a time"
NO_ROOM = (
    "not all was stored: the quota, the free-space floor or the folder leaves no room; raise disk_quota, or see "
    "store.stats.dropped_writes"
)
DOUBTED = (
    "a spot check found stored KV of this model that the model does not compute, so nothing is restored or stored "
    "under its name in this process; see the warning, and name what is different with TieredCache(..., tag='...')"
)
WEIGHTS_CHANGED = (
    "the model's weights were changed behind PyTorch's back (through .data or shared memory), so what was computed "
    "since is not stored; call attach(model).refresh() after such a change"
)
ALL_LOGITS = "the logits of every token are asked for, so every token is computed; pass logits_to_keep=1"
ALL_STATES = "hidden states or attentions of every token are asked for, so every token is computed"
APPROXIMATE = "the cache holds a selection of its prompt; what follows is computed, and neither restored nor stored"
TRAINING = "the model is in training mode, so nothing is restored or stored; call model.eval()"
ROW_ADAPTERS = "the rows of the batch have adapters of their own, so nothing is restored or stored"
FILLED_ELSEWHERE = "the cache was filled outside of the model's passes, so nothing is restored or stored"
ODD_MASK = "an attention mask is more than left padding, so nothing is restored or stored from there on"
ODD_POSITIONS = "positions do not count the tokens, so nothing is restored or stored from there on"
LOOKS_AHEAD = "tokens attend to those behind them (is_causal, bidirectional attention), so no prefix can be reused"
OTHER_TOKENS = "the model computes other tokens than those it is given, so nothing is restored or stored"
LAYER_ORDER = "the layers run in another order than their layer_idx says, so nothing is restored"
LENGTH_ROPE = "the RoPE frequencies depend on the length of the prompt, so nothing is restored or stored"
MODEL_CHANGED = "the model has changed since the cache was begun; make a new cache"
IMAGES = "the prompt holds images, and what follows the first of them is neither restored nor stored"
NOT_ENCRYPTED = "what is stored of this model is not encrypted, and a store with a key reads only what is"
NO_KEY = "what is stored of this model is encrypted; open the store with its key"
OTHER_KEY = "what is stored of this model is encrypted with another key; open the store with that one"
EVICTED = "the conversation's KV is not stored any more (evicted, expired or removed), so its history is computed"
OTHER_HISTORY = "the history begins with other tokens than the conversation that is stored, so it is computed"
IN_PART = "of these tokens a part is stored, which the method that stored them restores, and this one does not"
NO_FRONT = (
    "the first of these tokens are not stored: they are computed while the others are loaded, which cannot be done "
    "with this model, in a batch with padding, or behind tokens that the cache holds already"
)
MERGED = (
    "these tokens are stored with layers merged in pairs, which methods that choose among tokens cannot read; the "
    "method that stored them restores them"
)
OLD_PASSAGES = (
    "passages of this model were stored by an earlier version, under the name of their ranking, and are found no more; "
    "store them anew with store.precompute(model, passages, segments=True), and remove the old ones"
)
OTHER_LEAD = (
    "these passages are stored behind another lead than the method's, by which it finds none; give it the lead of the "
    "method that stored them, or store them anew with store.precompute(model, passages, method=..., segments=True)"
)
JOINED = (
    "stored passages stand in the prompt with another beginning or end, as where texts are joined and tokenized in one "
    "piece, and that much of them is not found; build_prompt() gives each the tokens that it has by itself, and "
    "stats.passages tells what was found of each"
)
NO_PASSAGES = (
    "passages of this model are stored, and none of them was found in the prompt; if they stand there as text, "
    "build_prompt() gives each the tokens that it has by itself"
)
SLOWER = (
    "restoring these tokens is expected to take longer than computing them, by what was measured on this machine; "
    "Exact(recompute=0, decline=False) restores them all the same"
)
OWN_CACHE = "generate() was given a cache of another kind, which it uses as it is"
DAMAGED = "a stored segment could not be read, so its tokens were computed"

_EXPECTED = frozenset({NOTHING, SWITCHED_OFF, NOT_RECORDED, APPROXIMATE, SLOWER, OWN_CACHE})
_BYPASSES = {
    "use_cache": "generate() runs without a cache (use_cache=False); leave that out of the call and the configurations",
    "cache_implementation": (
        "generate() makes a cache of its own (cache_implementation={value!r}); leave that out of the call and the "
        "configurations"
    ),
    "custom_generate": "generate() runs a custom_generate; pass it past_key_values=TieredCache(model, store)",
    "generate_batch": "generate_batch() keeps its KV in pages of its own; call generate()",
    "generate": "generate() was called by another name than model.generate; call that",
    "": "generate() made no pass with the cache that the session gave it; pass it a TieredCache(model, store)",
}
"""Reasons why a call in a session does not use the store, by the argument that causes it."""


def nameless(what: str) -> str:
    """Return the reason why a model runs without the store: it depends on `what`, which has no name."""
    return (
        f"{what} changes what is computed and has no name, so nothing is restored or stored; name the model with "
        "TieredCache(..., tag='...')"
    )


def other_codec(codec: str) -> str:
    """Return the reason why a lookup does not find KV that is stored with another codec."""
    return (
        f"these tokens are stored with the codec {codec!r}, and found with it alone; open the store, or make the "
        f"method, with codec={codec!r}"
    )


def no_room_for_index(budget: int) -> str:
    """Return the reason why each request reads the selection index from disk again.

    Args:
        budget: Bytes of index memory of the store, which cannot hold the index.
    """
    return (
        f"the index that is chosen by is larger than index_memory, {format_bytes(budget)}, so each request reads it "
        "from disk again; open the store with a larger KVStore(index_memory=...); stats.index_bytes says what it takes"
    )


def unranked(ranking: str) -> str:
    """Return the reason why the recomputed tokens of passages do not follow the ranking of the method."""
    return (
        f"passages are stored without the ranking {ranking!r}, so what is computed of them goes by the order they were "
        "stored in; store.rank(method) adds it, or for 'context' store.precompute(model, passages, segments=True)"
    )


def of_another_model(parts: list[str]) -> str:
    """Return the reason why a conversation is not restored that another model, or state of it, computed.

    Args:
        parts: Parts of the model that differ.
    """
    return (
        "the conversation is stored for another state of the model, which differs in "
        f"{' and '.join(parts) or 'what the store does not name'}; it stays until this one is suspended in its place"
    )


def of_another_method(method: str) -> str:
    """Return the reason why a conversation is not found that another method stored under its own provenance."""
    return f"the conversation is stored by the method {method!r}, in a way of its own, and found with that alone"


def bypassed(setting: str, value: object = None) -> str:
    """Return the reason why a call in a session does not use the store.

    Args:
        setting: Argument of `generate()` that causes it, or another key of `_BYPASSES`.
        value: Value of that argument.
    """
    if setting == "past_key_values":
        return OWN_CACHE
    return f"{_BYPASSES[setting].format(value=value)} to use the store"


def is_expected(reason: str) -> bool:
    """Return whether a reason is part of ordinary use, such as a first prompt, and needs no warning."""
    return reason in _EXPECTED
