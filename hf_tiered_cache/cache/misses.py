"""Why a prompt was not found in a store: what it holds instead, in a message with a remedy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import reasons
from ..identity import differing_facts
from ..passages.finder import find_passages
from ..store import EXACT
from ..store.codecs import RAW, codec_in, coded_provenance
from ..store.format import is_passage
from ..store.geometry import HASH_TOKENS
from .storage import Storage

_MOST_MODELS = 64


def reason_of_miss(
    store: Storage,
    tokens: np.ndarray,
    fingerprint: str,
    facts: Mapping[str, str],
    regime: str,
    passages: tuple[str, int | None] | None = None,
    codec: str = RAW,
) -> str:
    """Return the reason why nothing was found for a prompt.

    Args:
        store: Store that was searched.
        tokens: int64 `[n]`, tokens of one row, without padding.
        fingerprint: Fingerprint of the model.
        facts: Facts of the model (`Identity.facts`).
        regime: RoPE regime of the prompt.
        passages: For methods that reuse passages, the provenance that they look for and the sink token; else None.
        codec: Codec of the lookup.
    """
    if len(tokens) < HASH_TOKENS:
        return reasons.SHORT
    facts_by_fingerprint = store.disk.index.models()
    other_models = [name for name in facts_by_fingerprint if name != fingerprint][:_MOST_MODELS]
    for other_model in other_models:
        if _begins(store, tokens, other_model, codec, regime):
            parts = (
                " and ".join(differing_facts(facts, facts_by_fingerprint[other_model]))
                or "facts that the store does not record"
            )
            return f"these tokens are stored for another state of the model, which differs in {parts}"
    for other_codec in sorted(
        {codec_in(provenance) for provenance in store.disk.index.provenances(fingerprint)} - {codec}
    ):
        if _begins(store, tokens, fingerprint, other_codec, regime):
            return reasons.other_codec(other_codec)
    if passages is not None and (why := _passages_otherwise(store, tokens, fingerprint, regime, *passages)):
        return why
    if why := _other_keys(store, fingerprint):
        return why
    return (
        reasons.NO_PASSAGES
        if passages is not None and has_passages(store, fingerprint, passages[0])
        else reasons.NOTHING
    )


def has_passages(store: Storage, fingerprint: str, provenance: str) -> bool:
    """Return whether passages of a model are stored under this provenance."""
    return provenance in store.disk.index.provenances(fingerprint)


def _begins(store: Storage, tokens: np.ndarray, fingerprint: str, codec: str, regime: str) -> bool:
    """Return whether a stored prefix with this model and codec begins with the same tokens."""
    hasher = store.hasher(fingerprint, coded_provenance(EXACT, codec), regime)
    return bool(store.disk.find(hasher.hashes(tokens[:HASH_TOKENS])))


def _other_keys(store: Storage, fingerprint: str) -> str:
    """Return the reason if all KV of the model is stored with other encryption keys, or an empty string.

    Prefix hashes depend on the key, so the KV cannot be found without it.
    """
    keys, own_key = store.disk.index.keys(fingerprint), store.disk.cipher.key_id
    if not keys or own_key in keys:
        return ""
    return reasons.NO_KEY if not own_key else reasons.OTHER_KEY if keys - {""} else reasons.NOT_ENCRYPTED


def _passages_otherwise(
    store: Storage, tokens: np.ndarray, fingerprint: str, regime: str, provenance: str, sink: int | None
) -> str:
    """Return the reason why stored passages are not found, or an empty string."""
    codecs = {p: codec_in(p) for p in store.disk.index.provenances(fingerprint) if is_passage(p) and p != provenance}
    for other_provenance, codec in codecs.items():
        hasher = store.passage_hasher(fingerprint, other_provenance, sink, regime)
        if find_passages(tokens, hasher, store.find_parts):
            return reasons.OTHER_LEAD if codec == codec_in(provenance) else reasons.other_codec(codec)
    return ""
