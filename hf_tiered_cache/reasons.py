"""Messages for users: why a prompt was not restored, not stored, or read more than needed, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from .store.geometry import HASH_TOKENS
from .units import format_bytes

NOTHING = "no stored KV matches the beginning of this prompt"
NOT_FETCHED = "this store has no KV of the beginning of this prompt, and fetched none from its remote: "
"""Beginning of a reason that ends with one of `RemoteStats.misses`."""
OTHER_ROWS = (
    "a prompt of the batch is not stored, and this method restores as many positions of each row as are stored for "
    "every row; pass prompts that are not stored in a batch of their own"
)
SWITCHED_OFF = "the cache was created with restore=False"
NOT_RECORDED = "the cache was created with record=False"
SHORT = (
    f"the prompt is shorter than {HASH_TOKENS} tokens, and KV is stored and restored in units of {HASH_TOKENS} tokens"
)
NOT_STORED = (
    "some KV was not stored: the store cannot be written, or the disk quota, the free-space floor or the disk leaves "
    "no room; see the warning in the log, and store.stats.dropped_writes"
)
DOUBTED = (
    "a spot check found stored KV that differs from what this model computes, so nothing is restored or stored for "
    "this model in this process; see the warning, and set TieredCache(..., tag='...') to identify what changes the "
    "model"
)
WEIGHTS_CHANGED = (
    "the model's weights were changed without PyTorch's knowledge (through .data or shared memory), so KV computed "
    "since then is not stored; call attach(model).refresh() after such a change"
)
NOT_FINITE = "the model computed KV that is not finite (NaN or infinite), which is not stored"
ALL_LOGITS = "the logits of all tokens are requested, so all tokens are computed; pass logits_to_keep=1"
NO_LOGITS_TO_KEEP = (
    "this model always returns the logits of all tokens (its forward has no argument logits_to_keep), so all tokens "
    "are computed; use DynamicCache with it"
)
ALL_STATES = (
    "hidden states, attentions or router logits of all tokens are requested (an argument or setting output_... is "
    "True), so all tokens are computed"
)
APPROXIMATE = "the cache holds a selection of its prompt, so later tokens are computed, and neither restored nor stored"
IN_CHUNKS = (
    "generate(prefill_chunk_size=...) passes the prompt in chunks, so the method cannot keep its budget, and chunks "
    "are restored completely or computed; leave prefill_chunk_size out"
)
TRAINING = "the model is in training mode, so nothing is restored or stored; call model.eval()"
ROW_ADAPTERS = (
    "the call selects adapters by row or by token (adapter_names, activated LoRA), so nothing is restored or stored; "
    "select one for all with set_adapter()"
)
FILLED_ELSEWHERE = (
    "the cache is filled outside of the forward passes of its model, so nothing is restored, selected or stored; call "
    "the causal LM that the cache was created for, and create a new cache after detach() or the end of a session"
)
ODD_MASK = "the attention mask contains more than left padding, so nothing is restored or stored from that position on"
ODD_POSITIONS = (
    "position_ids or cache_position do not count the tokens, so nothing is restored or stored from that position on"
)
OWN_POSITIONS = (
    "without position_ids this model may not number tokens from 0, so nothing is restored or stored; pass its forward "
    "position_ids that count from 0. If its generate() drops them, use DynamicCache with generate()"
)
EDITED = "the cache's keys or values were changed in place, so nothing is restored or stored from that position on"
LOOKS_AHEAD = (
    "what a token computes depends on later tokens (is_causal, bidirectional attention, or routing that mixes tokens), "
    "so no prefix can be reused"
)
OTHER_TOKENS = "the model computes different tokens than its input, so nothing is restored or stored"
LAYER_ORDER = "the layers do not run in the order of their layer_idx, so nothing is restored"
LENGTH_ROPE = "the RoPE frequencies depend on the prompt length, so nothing is restored or stored"
MODEL_CHANGED = "the model has changed since the cache was created; create a new cache"
IMAGES = "the prompt contains images, and nothing after the first image is restored or stored"
NOT_ENCRYPTED = "the stored KV of this model is not encrypted, and a store with a key reads encrypted KV only"
NO_KEY = "the stored KV of this model is encrypted; open the store with its key"
OTHER_KEY = "the stored KV of this model is encrypted with another key; open the store with that key"
EVICTED = "the conversation's KV is no longer stored (evicted, expired or removed), so its history is computed"
EVICTED_IN_PART = (
    "a part of the conversation's KV is no longer stored (evicted, expired, damaged or removed), so the history is "
    "computed from there on"
)
OTHER_HISTORY = "the history does not begin with the tokens of the stored conversation, so it is computed"
IN_PART = "only a part of these tokens' KV is stored, which this method cannot restore; use the method that stored it"
PREFIX_NOT_STORED = (
    "the first of these tokens are not stored and must be computed while the others are loaded; this is not possible "
    "with this model, in a batch with padding, or after tokens that the cache already holds"
)
MERGED = (
    "these tokens are stored with layers merged in pairs, which methods that select tokens cannot read; use the "
    "method that stored them"
)
OTHER_LEAD = (
    "these passages are stored with a different lead than the method's, so the method cannot find them; use the lead "
    "of the method that stored them, or store them again with store.precompute(model, passages, method=..., "
    "passages=True)"
)
JOINED = (
    "stored passages occur in the prompt with a different beginning or end, for example because texts were joined "
    "and tokenized together, and the changed parts are not found; use build_prompt(), which tokenizes each passage "
    "separately. stats.passages shows what was found of each passage"
)
NO_PASSAGES = (
    "passages of this model are stored, but none was found in the prompt; if the prompt contains their text, use "
    "build_prompt(), which tokenizes each passage separately"
)
ALL_COMPUTED = (
    "stored passages were found in the prompt, but with this model the method computes all of their tokens; let it "
    "compute a smaller share, or use another method"
)
SLOWER = (
    "restoring these tokens is expected to take longer than computing them, according to measurements on this "
    "machine; use Exact(recompute=0, decline=False) to restore them anyway"
)
SLOW_RESTORE = (
    'restoring a prompt took longer than computing it would have taken; use method="auto", or call '
    "store.calibrate_prefix(model) once, so that prompts are restored only where that is faster"
)
OLDER_GRAPH = (
    "continuous batching replays a CUDA graph that it made without this store, so what such passes compute is not "
    "stored; create its manager within the session"
)
OWN_CACHE = "generate() was called with another kind of cache, which is used unchanged"
DAMAGED = "a stored segment could not be read, so its tokens were computed"
UNREADABLE = (
    "some stored segments cannot be read now, and this prompt's may be among them, so its tokens are computed; see the "
    "warning in the log. Reading is tried again soon"
)

ENGINE_CHANGED = (
    "the model may have changed since continuous batching filled its pages, so nothing is restored into them; create a "
    "new manager"
)
ENGINE_FAILED = (
    "the store has failed in continuous batching, so requests of this manager are computed without it; see the "
    "traceback in the log, and create a new manager"
)
LOOKUP_FAILED = "the lookup of a prompt has failed, so the prompt was computed; see the traceback in the log"
SLOW_LOOKUP = (
    "the lookup of a prompt took so long that continuous batching computed the prompt; see whether the disk or the "
    "server of the store is slow"
)
NOT_WRITTEN = (
    "restored KV could not be written into the pages of continuous batching, so the prompt was computed; see the "
    "warning in the log"
)
NOT_IN_TIME = (
    "continuous batching computed a prompt before its KV was restored, for lack of free pages or of time; create its "
    "manager with more pages"
)
PAGED_ATTENTION = (
    "continuous batching has switched the model to paged attention, with which other passes are wrong, so they neither "
    "restore nor store anything; stop its manager first, or load the model with attn_implementation='sdpa'"
)
SHARED_LAYERS = (
    "layers of this model use the keys and values of other layers, so continuous batching restores and stores nothing; "
    "call generate()"
)
VARYING_ROPE = (
    "this model's RoPE frequencies depend on the longest prompt of a batch, so continuous batching restores and "
    "stores nothing; call generate()"
)

EXPECTED = (NOTHING, NOT_FETCHED, SWITCHED_OFF, NOT_RECORDED, APPROXIMATE, SLOWER, OWN_CACHE)
"""Beginnings of reasons that are part of ordinary use, such as a first prompt, and need no warning."""
_BYPASSES = {
    "use_cache": (
        "generate() runs without a cache (use_cache=False); remove this setting from the call and the configurations"
    ),
    "cache_implementation": (
        "generate() creates its own cache (cache_implementation={value!r}); remove this setting from the call and "
        "the configurations"
    ),
    "custom_generate": "generate() runs with custom_generate; pass it past_key_values=TieredCache(model, store)",
    "generate": "generate() was not called as model.generate; call model.generate()",
    "": "generate() ran no forward pass with the cache of the session; pass it a TieredCache(model, store)",
}
"""Reasons why a call in a session does not use the store, by the argument that causes it."""


def nameless(part: str) -> str:
    """Return the reason why a model runs without the store: it depends on `part`, which has no name."""
    return (
        f"{part} affects what is computed and cannot be identified, so nothing is restored or stored; identify the "
        "model with TieredCache(..., tag='...')"
    )


def missing_members(names: Iterable[str]) -> str:
    """Return the reason why continuous batching of this transformers version runs without the store."""
    return (
        f"this version of transformers has no {' and no '.join(names)}, which continuous batching with a store "
        "needs, so nothing is restored or stored; call generate()"
    )


def other_codec(codec: str) -> str:
    """Return the reason why a lookup does not find KV that is stored with another codec."""
    return (
        f"these tokens are stored with the codec {codec!r}, and only a lookup with that codec finds them; pass "
        f"codec={codec!r} to the store or to the method"
    )


def no_room_for_index(budget: int) -> str:
    """Return the reason why each request reads the selection index from disk again: it exceeds the budget in bytes."""
    return (
        f"the selection index does not fit into index_memory ({format_bytes(budget)}), so each request reads it from "
        "disk again; open the store with a larger KVStore(index_memory=...). stats.details.index_bytes shows the size "
        "of the index"
    )


def unranked(ranking: str) -> str:
    """Return the reason why the recomputed tokens of passages do not follow the ranking of the method."""
    return (
        f"passages are stored without the ranking {ranking!r}, so the tokens to recompute are chosen in the stored "
        "order; add the ranking with store.rank(method), or for 'context' with store.precompute(model, passages, "
        "passages=True)"
    )


def of_another_model(parts: list[str]) -> str:
    """Return the reason why a conversation is not restored: these parts of the model have changed."""
    return (
        "the conversation is stored for another state of the model, which differs in "
        f"{' and '.join(parts) or 'facts that the store does not record'}; it is kept until this conversation is "
        "suspended in its place"
    )


def of_another_method(method: str) -> str:
    """Return the reason why a conversation is not found that another method stored under its own provenance."""
    return (
        f"the conversation is stored by the method {method!r} in its own representation, and only that method finds it"
    )


def bypassed(setting: str, value: object = None) -> str:
    """Return the reason why a call in a session does not use the store. `setting` is the argument that causes it."""
    if setting == "past_key_values":
        return OWN_CACHE
    return f"{_BYPASSES[setting].format(value=value)} to use the store"
