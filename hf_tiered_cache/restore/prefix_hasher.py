"""Prefix hashes: each names `HASH_TOKENS` tokens and everything before them; a passage's these tokens alone."""

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

    def scan_hashes(self, tokens: np.ndarray) -> bytes:
        """What these tokens, int `[n]`, are looked for by inside other sequences: nothing."""
        return b""

    def _hash(self, data: bytes, nbytes: int = HASH_BYTES) -> bytes:
        return hashlib.blake2b(data, digest_size=nbytes, key=self._key).digest()


class PassageHasher(PrefixHasher):
    """Hashes the tokens of passages, `HASH_TOKENS` at a time, with nothing before them: a passage is found by any part.

    A second, quick hash of each says where in a prompt to look. It is keyed as the others are, by what all passages
    have in common and the salt, so that it tells nothing of the tokens that they do not.
    """

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None) -> None:
        super().__init__(root, salt)
        self._scan_key = np.frombuffer(self._hash(self.root + b"scan", 24), "<u8")

    def hashes(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """The hashes of all full groups of `HASH_TOKENS` tokens, int `[n]`, in order; a ragged end has none."""
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step, root, key, blake2b = HASH_TOKENS * 4, self.root, self._key, hashlib.blake2b
        starts = range(0, len(data) - step + 1, step)  # as `_hash` does; thousands, so without a call of its own
        return [blake2b(root + data[at : at + step], digest_size=HASH_BYTES, key=key).digest() for at in starts]

    def scan(self, tokens: np.ndarray) -> np.ndarray:
        """The quick hash of the `HASH_TOKENS` tokens from each on: uint32 `[n - 15]`, or none.

        Args:
            tokens: int `[n]`.
        """
        power, *key = (int(word) for word in self._scan_key)
        if len(tokens) < HASH_TOKENS:
            return np.empty(0, np.uint32)
        found = tokens.astype("<i4").astype(np.uint32).astype(np.uint64)
        span, power = 1, power | 1
        while span < HASH_TOKENS:  # the polynomial of the tokens, from that of half as many
            found = found[:-span] * np.uint64(power) + found[span:]
            span, power = 2 * span, power * power % 2**64
        return siphash(found, key[0], key[1]).astype(np.uint32)

    def scan_hashes(self, tokens: np.ndarray) -> bytes:
        """The quick hashes of all full groups of `HASH_TOKENS` tokens, int `[n]`, `SCAN_BYTES` each, side by side."""
        return self.scan(tokens)[::HASH_TOKENS].astype("<u4").tobytes()


def siphash(words: np.ndarray, low: int, high: int) -> np.ndarray:
    """SipHash-1-3 of each of these words, uint64 `[n]`, under a key of two words (Aumasson and Bernstein 2012)."""
    constants = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
    keys = low, high, low, high
    a, b, c, d = (np.full(len(words), k ^ each, np.uint64) for k, each in zip(keys, constants, strict=True))
    spare = np.empty(len(words), np.uint64)

    def rotate(x: np.ndarray, bits: int) -> None:
        np.right_shift(x, np.uint64(64 - bits), out=spare)
        np.left_shift(x, np.uint64(bits), out=x)
        np.bitwise_or(x, spare, out=x)

    def mix() -> None:
        for x, y, bits, other in ((a, b, 13, a), (c, d, 16, None), (a, d, 21, None), (c, b, 17, c)):
            np.add(x, y, out=x)
            rotate(y, bits)
            np.bitwise_xor(y, x, out=y)
            if other is not None:
                rotate(other, 32)

    for word in (words, np.uint64(8 << 56)):  # the last one says that there were eight bytes
        np.bitwise_xor(d, word, out=d)
        mix()
        np.bitwise_xor(a, word, out=a)
    np.bitwise_xor(c, np.uint64(0xFF), out=c)
    for _ in range(3):
        mix()
    return a ^ b ^ c ^ d
