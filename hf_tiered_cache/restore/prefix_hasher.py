"""Prefix hashes: each names `HASH_TOKENS` tokens and everything before them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np

from ..geometry import HASH_TOKENS
from ..store.format import HASH_BYTES


class PrefixHasher:
    """Hashes token ids, `HASH_TOKENS` at a time, with everything before them (vLLM: block hashes).

    Two sequences share a prefix hash only if they share every token up to it, the model that made their KV, and how it
    was made. With a salt every prefix hash is keyed, so that nobody without it can guess tokens from it.

    Args:
        root: what all sequences have in common: fingerprint, provenance, RoPE regime.
        salt: a secret, or None.
    """

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None) -> None:
        secret = salt.encode() if isinstance(salt, str) else salt
        self._key = hmac.digest(secret, b"hf_tiered_cache chain", "sha256") if secret else b""
        self.root = self._hash("\0".join(root).encode())

    def hashes(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """The prefix hashes of all full groups of `HASH_TOKENS` tokens, in order; a ragged end has none.

        Args:
            tokens: int `[n]`.
            parent: the prefix hash before the first token, or None at the start of a sequence.
        """
        prefix_hash = self.root if parent is None else parent
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step = HASH_TOKENS * 4
        result = []
        for start in range(0, len(data) - step + 1, step):
            prefix_hash = self._hash(prefix_hash + data[start : start + step])
            result.append(prefix_hash)
        return result

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._key).digest()
