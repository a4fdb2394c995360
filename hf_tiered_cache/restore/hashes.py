"""Prefix hashes, each of `HASH_TOKENS` tokens and all tokens before them, and what is stored of a prompt by them.

Hashes of passages cover their own tokens alone.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..store import HASH_BYTES
from ..store.catalogue import SegmentRow
from ..store.geometry import HASH_TOKENS
from ..store.lazy import torch


class PrefixHasher:
    """Hasher of token ids, `HASH_TOKENS` at a time, with all tokens before them (vLLM: block hashes).

    Two sequences share a prefix hash only if they share every token up to it, the model that computed their KV, and how
    it was computed: the strings `root` (fingerprint, provenance, RoPE regime). With a secret `salt`, prefix hashes are
    keyed: tokens cannot be guessed from them without it.
    """

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None) -> None:
        secret = salt.encode() if isinstance(salt, str) else salt
        self._key = hmac.digest(secret, b"hf_tiered_cache chain", "sha256") if secret else b""
        self.root = self._hash("\0".join(root).encode())

    def hashes(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """Return the prefix hashes of all full groups of `HASH_TOKENS` of int `[n]` tokens; a remainder has none.

        `parent` is the prefix hash before the first token, or None at the start of a sequence.
        """
        prefix_hash = self.root if parent is None else parent
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step, key, blake2b, result = HASH_TOKENS * 4, self._key, hashlib.blake2b, []
        for start in range(0, len(data) - step + 1, step):  # `_hash` inlined: there may be thousands
            prefix_hash = blake2b(prefix_hash + data[start : start + step], digest_size=HASH_BYTES, key=key).digest()
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

    def __init__(self, root: Sequence[str], salt: str | bytes | None = None, sink: int | None = None) -> None:
        super().__init__(root, salt)
        self.sink = sink
        """Token that preceded the passages while their KV was computed, or None."""
        self._scan_key = np.frombuffer(self._hash(self.root + b"scan", 24), "<u8")

    def hashes(self, tokens: np.ndarray, parent: bytes | None = None) -> list[bytes]:
        """Return the hashes of all full groups of `HASH_TOKENS` tokens, int `[n]`, in order; a remainder has none."""
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        step, root, key, blake2b = HASH_TOKENS * 4, self.root, self._key, hashlib.blake2b
        starts = range(0, len(data) - step + 1, step)  # `_hash` inlined: there may be thousands
        return [blake2b(root + data[at : at + step], digest_size=HASH_BYTES, key=key).digest() for at in starts]

    def scan(self, tokens: np.ndarray) -> np.ndarray:
        """Return the scan hash of `HASH_TOKENS` tokens from each token, int `[n]`, on: uint32 `[n - 15]` or empty."""
        power, *key = (int(word) for word in self._scan_key)
        if len(tokens) < HASH_TOKENS:
            return np.empty(0, np.uint32)
        words = tokens.astype("<i4").astype(np.uint32).astype(np.uint64)
        span, power = 1, power | 1
        while span < HASH_TOKENS:  # double the number of tokens of each polynomial
            words = words[:-span] * np.uint64(power) + words[span:]
            span, power = 2 * span, power * power % 2**64
        return siphash(words, key[0], key[1]).astype(np.uint32)

    def scan_hashes(self, tokens: np.ndarray) -> bytes:
        """Return the scan hashes of all full groups of `HASH_TOKENS` tokens, int `[n]`, `SCAN_BYTES` each."""
        return self.scan(tokens)[::HASH_TOKENS].astype("<u4").tobytes()


def siphash(words: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return SipHash-1-3 of each word, uint64 `[n]`, under a key of two words (Aumasson and Bernstein 2012)."""
    constants = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
    keys = low, high, low, high
    a, b, c, d = (np.full(len(words), k ^ constant, np.uint64) for k, constant in zip(keys, constants, strict=True))
    spare = np.empty(len(words), np.uint64)

    def rotate(x: np.ndarray, bits: int) -> None:
        np.right_shift(x, np.uint64(64 - bits), out=spare)
        np.left_shift(x, np.uint64(bits), out=x)
        np.bitwise_or(x, spare, out=x)

    def mix() -> None:
        for x, y, bits, partner in ((a, b, 13, a), (c, d, 16, None), (a, d, 21, None), (c, b, 17, c)):
            np.add(x, y, out=x)
            rotate(y, bits)
            np.bitwise_xor(y, x, out=y)
            if partner is not None:
                rotate(partner, 32)

    for word in (words, np.uint64(8 << 56)):  # the last word encodes the length of eight bytes
        np.bitwise_xor(d, word, out=d)
        mix()
        np.bitwise_xor(a, word, out=a)
    np.bitwise_xor(c, np.uint64(0xFF), out=c)
    for _ in range(3):
        mix()
    return a ^ b ^ c ^ d


class History:
    """Token ids of every position of the cache. Row r begins with `pads[r]` positions of left padding.

    Ids are copied to the host on first use, so that decoding does not wait for a copy at each step. Other threads may
    read `ids` and `prefix_hashes` while this one does.
    """

    def __init__(self, hasher: PrefixHasher, pads: list[int]) -> None:
        self.hasher = hasher
        self.pads = pads
        self.num_positions = 0
        self._ids = np.empty((len(pads), 0), np.int64)
        self._fresh: list[torch.Tensor | np.ndarray] = []  # [rows, n] each, not yet in _ids
        self._prefix_hashes: list[list[bytes]] = [[] for _ in pads]
        self._lock = threading.RLock()

    @property
    def rows(self) -> int:
        return len(self.pads)

    def tokens_in(self, num_positions: int) -> int:
        """Return the number of tokens of all rows in the first `num_positions` positions, without left padding."""
        return sum(max(0, num_positions - pad) for pad in self.pads)

    def append(self, ids: torch.Tensor | np.ndarray) -> None:
        """Append `ids`, int `[rows, n]`, that the cache now holds. A tensor is copied to the host on first use."""
        self._fresh.append(ids.copy() if isinstance(ids, np.ndarray) else ids.clone())  # the caller may write to it
        self.num_positions += ids.shape[1]

    def ids(self) -> np.ndarray:
        """Return all token ids, int64 `[rows, positions]`, on the host."""
        with self._lock:
            if self._fresh:
                fresh = (i if isinstance(i, np.ndarray) else i.to("cpu", torch.int64).numpy() for i in self._fresh)
                joined = np.concatenate([self._ids, *fresh], axis=1)
                self.__dict__.update(_ids=joined, _fresh=[])  # atomic: a Ctrl-C must not leave ids in both
            return self._ids

    def prefix_hashes(self, row: int) -> list[bytes]:
        """Return the prefix hashes of a row's tokens without padding. An incomplete last group has no hash."""
        with self._lock:
            prefix_hashes, tokens = self._prefix_hashes[row], self.ids()[row, self.pads[row] :]
            if len(tokens) // HASH_TOKENS > len(prefix_hashes):
                parent = prefix_hashes[-1] if prefix_hashes else None
                prefix_hashes.extend(self.hasher.hashes(tokens[len(prefix_hashes) * HASH_TOKENS :], parent))
            return prefix_hashes

    def prefix_hashes_of(self, row: int, tokens: np.ndarray) -> list[bytes]:
        """Return the prefix hashes of `tokens`, int `[n]`, which begin with a row's tokens without padding."""
        prefix_hashes = self.prefix_hashes(row)
        parent = prefix_hashes[-1] if prefix_hashes else None
        return prefix_hashes + self.hasher.hashes(tokens[len(prefix_hashes) * HASH_TOKENS :], parent)

    def num_common(self, prompt: np.ndarray) -> int:
        """Return the number of leading positions shared with a batch of prompts, int64 `[rows, n]`."""
        ids = self.ids()
        if len(ids) != len(prompt):
            return 0
        num_positions = min(self.num_positions, prompt.shape[1])
        differ = (ids[:, :num_positions] != prompt[:, :num_positions]).any(axis=0)
        return int(differ.argmax()) if differ.any() else num_positions

    def crop(self, count: int) -> None:
        """Remove the last `count` positions."""
        remaining = self.num_positions - count
        # hashes first: a Ctrl-C may leave too few hashes, but never hashes of other tokens
        for row, prefix_hashes in enumerate(self._prefix_hashes):
            del prefix_hashes[max(0, remaining - self.pads[row]) // HASH_TOKENS :]
        self._ids, self.num_positions = self.ids()[:, :remaining], remaining

    def select(self, order: list[int]) -> None:
        """Replace row i by the former row `order[i]` (beam search, repeats and subsets of a batch)."""
        prefix_hashes = [list(self._prefix_hashes[row]) for row in order]
        pads = [self.pads[row] for row in order]
        self._ids, self._prefix_hashes, self.pads = self.ids()[order], prefix_hashes, pads

    def fork(self) -> History:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._lock = threading.RLock()
        twin._fresh = list(self._fresh)
        twin._prefix_hashes = [list(prefix_hashes) for prefix_hashes in self._prefix_hashes]
        twin.pads = list(self.pads)
        return twin


@dataclass(frozen=True)
class MatchedRun:
    """Run of a segment's first `num_hashes` prefix hashes that equal those of the prompt from index `start` on."""

    row: SegmentRow
    start: int
    num_hashes: int

    @property
    def stop(self) -> int:
        return self.start + self.num_hashes


def longest_prefix(prefix_hashes: Sequence[bytes], rows: Iterable[SegmentRow], start: int = 0) -> list[MatchedRun]:
    """Return the fewest segment runs that cover the longest stored run of prefix hashes from index `start` on.

    A segment is a node, found by its first prefix hash. Usually the next node begins where the last one ends or where
    the prompt diverges from it. After a race of writers nodes overlap; then the one that reaches furthest is taken. The
    first run may begin before `start`, up to which the cache holds the prompt.
    """
    nodes: dict[bytes, list[SegmentRow]] = {}
    for row in rows:
        nodes.setdefault(row.first, []).append(row)
    runs: list[MatchedRun] = []
    covered, furthest = start, None
    for at, prefix_hash in enumerate(prefix_hashes):
        for row in nodes.get(prefix_hash, ()):
            run = MatchedRun(row, at, _shared(row, prefix_hashes, at))
            if furthest is None or run.stop > furthest.stop:
                furthest = run
        if at == covered:
            if furthest is None or furthest.stop <= covered:
                break
            if runs:
                runs[-1] = replace(runs[-1], num_hashes=furthest.start - runs[-1].start)
            runs.append(furthest)
            covered = furthest.stop
    return runs


def _shared(row: SegmentRow, prefix_hashes: Sequence[bytes], at: int) -> int:
    """Return the number of leading prefix hashes of the segment that equal the prompt's from `at` on."""
    most = min(row.valid_hashes, len(prefix_hashes) - at)
    for i in range(most):
        if row.chain[i * HASH_BYTES : (i + 1) * HASH_BYTES] != prefix_hashes[at + i]:
            return i
    return most
