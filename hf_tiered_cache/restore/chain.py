"""The hash chain: each link names `LINK_TOKENS` tokens and everything before them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np

from ..geometry import LINK_TOKENS
from ..store.format import LINK_BYTES


class Chain:
    """Hashes token ids into links.

    Two sequences share a link only if they share every token up to it, the model that made their KV, and how it was
    made. With a salt every link is keyed, so that nobody without it can guess tokens from links.

    Args:
        root: what all sequences of this chain have in common: fingerprint, provenance, RoPE regime.
        salt: a secret, or None.
    """

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None) -> None:
        secret = salt.encode() if isinstance(salt, str) else salt
        self._key = hmac.digest(secret, b"hf_tiered_cache chain", "sha256") if secret else b""
        self.root = self._hash("\0".join(root).encode())

    def links(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """The links of all full groups of `LINK_TOKENS` tokens, in order; a ragged end has none.

        Args:
            tokens: int `[n]`.
            parent: the link before the first token, or None at the start of a sequence.
        """
        link = self.root if parent is None else parent
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step = LINK_TOKENS * 4
        result = []
        for start in range(0, len(data) - step + 1, step):
            link = self._hash(link + data[start : start + step])
            result.append(link)
        return result

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=LINK_BYTES, key=self._key).digest()
