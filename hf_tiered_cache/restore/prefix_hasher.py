"""Prefix hashes of `HASH_TOKENS` tokens and all tokens before them; those of passages cover these tokens alone."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np

from ..geometry import HASH_TOKENS
from ..store.format import HASH_BYTES


class PrefixHasher:
    """Hasher of token ids, `HASH_TOKENS` at a time, with all tokens before them (vLLM: block hashes).

    Two sequences share a prefix hash only if they share every token up to it, the model that computed their KV, and how
    it was computed. With a salt, prefix hashes are keyed: tokens cannot be guessed from them without the salt.

    Args:
        root: Strings common to all sequences: fingerprint, provenance, RoPE regime.
        salt: A secret, or None.
    """

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None) -> None:
        secret = salt.encode() if isinstance(salt, str) else salt
        self._key = hmac.digest(secret, b"hf_tiered_cache chain", "sha256") if secret else b""
        self.root = self._hash("\0".join(root).encode())

    def hashes(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """Return the prefix hashes of all full groups of `HASH_TOKENS` tokens, in order; a remainder has none.

        Args:
            tokens: int `[n]`.
            parent: Prefix hash before the first token, or None at the start of a sequence.
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
        """Return no scan hashes for `tokens`, int `[n]`: prefixes are not searched inside other sequences."""
        return b""

    def _hash(self, data: bytes, nbytes: int = HASH_BYTES) -> bytes:
        return hashlib.blake2b(data, digest_size=nbytes, key=self._key).digest()


class PassageHasher(PrefixHasher):
    """Hasher of passage tokens, `HASH_TOKENS` at a time, without the tokens before them.

    So a passage is found by any part. A second, fast hash of each group, the scan hash, selects the candidates in a
    prompt. It is keyed like the others, by the root of all passages and the salt, so it reveals no more about the
    tokens than they do.
    """

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None) -> None:
        super().__init__(root, salt)
        self._scan_key = np.frombuffer(self._hash(self.root + b"scan", 24), "<u8")

    def hashes(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """Return the hashes of all full groups of `HASH_TOKENS` tokens, int `[n]`, in order; a remainder has none."""
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step, root, key, blake2b = HASH_TOKENS * 4, self.root, self._key, hashlib.blake2b
        starts = range(0, len(data) - step + 1, step)  # `_hash` inlined: there may be thousands
        return [blake2b(root + data[at : at + step], digest_size=HASH_BYTES, key=key).digest() for at in starts]

    def scan(self, tokens: np.ndarray) -> np.ndarray:
        """Return the scan hash of the `HASH_TOKENS` tokens from each token on: uint32 `[n - 15]`, or empty.

        Args:
            tokens: int `[n]`.
        """
        power, *key = (int(word) for word in self._scan_key)
        if len(tokens) < HASH_TOKENS:
            return np.empty(0, np.uint32)
        found = tokens.astype("<i4").astype(np.uint32).astype(np.uint64)
        span, power = 1, power | 1
        while span < HASH_TOKENS:  # double the number of tokens of each polynomial
            found = found[:-span] * np.uint64(power) + found[span:]
            span, power = 2 * span, power * power % 2**64
        return siphash(found, key[0], key[1]).astype(np.uint32)

    def scan_hashes(self, tokens: np.ndarray) -> bytes:
        """Return the scan hashes of all full groups of `HASH_TOKENS` tokens, int `[n]`, `SCAN_BYTES` each."""
        return self.scan(tokens)[::HASH_TOKENS].astype("<u4").tobytes()


def siphash(words: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return SipHash-1-3 of each word, uint64 `[n]`, under a key of two words (Aumasson and Bernstein 2012)."""
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

    for word in (words, np.uint64(8 << 56)):  # the last word encodes the length of eight bytes
        np.bitwise_xor(d, word, out=d)
        mix()
        np.bitwise_xor(a, word, out=a)
    np.bitwise_xor(c, np.uint64(0xFF), out=c)
    for _ in range(3):
        mix()
    return a ^ b ^ c ^ d
