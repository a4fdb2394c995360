"""Encryption at rest: AES-256-GCM, a key for each file, the tag of a block in the place of its checksum.

A store has one secret key. For each file a new key is derived from it and the file's random salt; a block's nonce is
its number in the file. So no nonce comes twice under one key, and no block opens in another place or file. The head of
the file stays readable, under a tag that nobody makes without the key. docs/format.md has it byte by byte.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, OtherKeyError
from .digest import DIGEST_DTYPE, Checksums, Guard, rows
from .format import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, Seal

KEY_BYTES = 32
_NONCE_BYTES = 12
_GCM_TAG_BYTES = DIGEST_DTYPE.itemsize
_PIECE_BYTES = 8 << 20
"""Bytes of a block group that are encrypted at a time: in memory of their own, since others may still want it."""


class Plain:
    """Of stores without a key: blocks lie in files as they are."""

    key_id = ""

    def chain_secret(self, salt: str | bytes | None) -> str | bytes | None:
        """What keys the hashes of tokens."""
        return salt

    def new_seal(self) -> Seal | None:
        """For a new file."""
        return None

    def guard(self, seal: Seal | None) -> Guard:
        """What reads and writes the blocks of a file.

        Raises:
            OtherKeyError: this store has not its key.
        """
        if seal is not None:
            raise OtherKeyError("it is encrypted, and the store was opened without a key")
        return Checksums()


class _Secret:
    """Holds a key, and is not pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("a store's key is not pickled; open the store anew, with its key")


class Hidden(_Secret):
    """A secret on its way between functions: tracebacks that show variables show this.

    Args:
        value: the secret.
    """

    def __init__(self, value: str | bytes | None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Hidden()"


class StoreCipher(_Secret, Plain):
    """Of stores with a key. Nothing that it prints or raises shows the key.

    Args:
        key: 32 bytes, or the same as 64 hexadecimal digits or in base64.

    Raises:
        ConfigError: that is no key, or the package `cryptography` is not installed.
    """

    def __init__(self, key: bytes | str) -> None:
        try:
            self._key = _key_of(key)
        finally:
            del key  # tracebacks may show variables
        self._library = _Library()
        self.key_id = self._derive(b"key id")[:KEY_ID_BYTES].hex()
        """Tells keys apart, and nothing about them."""

    def chain_secret(self, salt: str | bytes | None) -> bytes:
        return self._derive(b"chain\0" + (salt.encode() if isinstance(salt, str) else salt or b""))

    def new_seal(self) -> Seal:
        return Seal(self.key_id, secrets.token_bytes(SALT_BYTES))

    def guard(self, seal: Seal | None) -> Guard:
        if seal is None:
            raise OtherKeyError("it is not encrypted, and the store was opened with a key")
        if seal.key_id != self.key_id:
            raise OtherKeyError(f"it is encrypted with the key {seal.key_id}, and the store's is {self.key_id}")
        return FileCipher(self._library, self._library.expand(self._key, seal.salt))

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, b"hf_tiered_cache " + purpose, "sha256")

    def __repr__(self) -> str:
        return f"StoreCipher(key {self.key_id})"


class FileCipher(_Secret):
    """Guards the blocks of one file.

    Args:
        library: encrypts.
        keys: of the blocks and of the tag, `KEY_BYTES` each.
    """

    def __init__(self, library: _Library, keys: bytes) -> None:
        self._library = library
        self._algorithm = library.algorithm(keys[:KEY_BYTES])
        self._tag_key = keys[KEY_BYTES:]

    def seal(
        self, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        step = max(1, _PIECE_BYTES // blocks.shape[1])
        memory = torch.empty_like(blocks[:step])
        for at in range(0, len(blocks), step):
            plain = blocks[at : at + step]
            sealed = memory[: len(plain)]
            tags = bytearray()
            for number, (source, target) in enumerate(zip(rows(plain), rows(sealed), strict=True), first + at):
                context = self._library.encryptor(self._algorithm, number)
                context.update_into(source, target)
                context.finalize()
                tags += context.tag
            yield sealed, np.frombuffer(bytes(tags), DIGEST_DTYPE)

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        tags = digests.tobytes()
        for at, block in enumerate(rows(blocks)):
            tag = tags[at * _GCM_TAG_BYTES : (at + 1) * _GCM_TAG_BYTES]
            context = self._library.decryptor(self._algorithm, first + at, tag)
            context.update_into(block, block)
            try:
                context.finalize()
            except self._library.invalid:
                return at
        return None

    def tag(self, head: bytes) -> bytes:
        return hmac.digest(self._tag_key, head, "sha256")[:TAG_BYTES]


class _Library:
    """The package `cryptography`, imported when a key is given.

    Of its ways to decrypt, a context for each block is the one that works in place with the tag elsewhere (AESGCM wants
    it behind the block). From version 48 on it lets go of the interpreter's lock.
    """

    def __init__(self) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise ConfigError(
                f"a key needs the package cryptography ({error}); pip install 'hf-tiered-cache[encryption]'"
            ) from error
        self.invalid = InvalidTag
        self.algorithm = algorithms.AES
        self._cipher, self._gcm, self._hkdf, self._sha256 = Cipher, modes.GCM, HKDF, SHA256

    def expand(self, key: bytes, salt: bytes) -> bytes:
        """The keys of a file's blocks and of its tag, side by side."""
        return self._hkdf(self._sha256(), 2 * KEY_BYTES, salt, b"hf_tiered_cache file").derive(key)

    def encryptor(self, algorithm: Any, number: int) -> Any:
        return self._cipher(algorithm, self._gcm(_nonce(number))).encryptor()

    def decryptor(self, algorithm: Any, number: int, tag: bytes) -> Any:
        return self._cipher(algorithm, self._gcm(_nonce(number), tag)).decryptor()


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")


def cipher_of(key: bytes | str | None) -> Plain:
    """What a store with this key, or none, reads and writes with. Raises ConfigError."""
    try:
        return Plain() if key is None else StoreCipher(key)
    finally:
        del key  # tracebacks may show variables


def _key_of(key: bytes | str) -> bytes:
    """Raises ConfigError, which must not show what was given."""
    found = b""
    if isinstance(key, bytes | bytearray):
        found = bytes(key)
    elif isinstance(key, str) and re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", key):
        found = bytes.fromhex(key)
    elif isinstance(key, str) and re.fullmatch(r"[0-9A-Za-z+/_-]{43}=?", key):
        try:
            found = base64.b64decode(key.rstrip("=").replace("-", "+").replace("_", "/") + "=", validate=True)
        except binascii.Error:
            found = b""
    if len(found) != KEY_BYTES:
        del key, found  # tracebacks may show variables
        raise ConfigError(
            f"the key is {KEY_BYTES} secret bytes (secrets.token_bytes({KEY_BYTES})), or these as "
            f"{2 * KEY_BYTES} hexadecimal digits or in base64; what was given is neither"
        )
    return found


def read_key_file(path: Path | None) -> bytes | None:
    """The key that a file holds, as bytes or as text; None without a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read ({error.strerror})") from None
    try:
        return _key_of(data if len(data) == KEY_BYTES else data.decode("ascii", "replace").strip())
    except ConfigError:
        del data  # tracebacks may show variables
        raise ConfigError(
            f"the key file {path} holds no key: {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits, such as "
            f"`openssl rand -hex {KEY_BYTES}` prints"
        ) from None
