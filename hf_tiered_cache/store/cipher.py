"""Encryption at rest: AES-256-GCM with one key per file. The tag of a block replaces its checksum.

A store has one secret key. The key of each file is derived from it and from the file's random salt. The nonce of a
block is its number in the file. So no nonce is used twice with one key, and a block decrypts only in its own place and
file. The header of the file stays readable, with a tag that cannot be made without the key. docs/format.md specifies
the format byte by byte.
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

from ..errors import ConfigError, OtherKeyError
from .container import DIGEST_DTYPE, KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, Guard, Seal, rows
from .lazy import torch

KEY_BYTES = 32
_MOST_KEY_FILE_BYTES = 4096
_NONCE_BYTES = 12
_GCM_TAG_BYTES = DIGEST_DTYPE.itemsize
_PIECE_BYTES = 8 << 20  # bytes that are encrypted at a time, into a separate buffer: the plaintext may still be in use


class Plain:
    """Cipher of a store without a key: blocks are stored as plaintext."""

    key_id = ""

    def chain_secret(self, salt: str | bytes | None) -> str | bytes | None:
        """Return the secret that keys the token hashes."""
        return salt

    def new_seal(self) -> Seal | None:
        """Return the encryption parameters of a new file, or None without a key."""
        return None

    def guard(self, seal: Seal | None) -> Guard:
        """Return the guard of a file's blocks. Raises OtherKeyError if this store's key did not write the file."""
        if seal is not None:
            raise OtherKeyError("it is encrypted, but the store was opened without a key")
        return Guard()


class _Secret:
    """Base class of objects that hold a key. They cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("a store's key cannot be pickled; open the store again, with its key")


class Hidden(_Secret):
    """Wrapper of a secret, or of a call with secrets: tracebacks that show variables do not show them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Hidden()"


class StoreCipher(_Secret, Plain):
    """Cipher of a store with a key. The key never appears in its output or errors.

    It is 32 bytes, or the same as 64 hexadecimal digits or in base64. Raises ConfigError if the key is invalid, or the
    package `cryptography` is not installed.
    """

    def __init__(self, key: bytes | str) -> None:
        try:
            self._key = _key_of(key)
        finally:
            del key  # tracebacks may show variables
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise ConfigError(
                f"encryption requires the package cryptography ({error}); pip install 'hf-tiered-cache[encryption]'"
            ) from error
        self._hkdf: Any = lambda salt: HKDF(SHA256(), 2 * KEY_BYTES, salt, b"hf_tiered_cache file")
        self.key_id = self._derive(b"key id")[:KEY_ID_BYTES].hex()
        """Id of the key. It distinguishes keys and reveals nothing about them."""

    def chain_secret(self, salt: str | bytes | None) -> bytes:
        return self._derive(b"chain\0" + (salt.encode() if isinstance(salt, str) else salt or b""))

    def new_seal(self) -> Seal:
        return Seal(self.key_id, secrets.token_bytes(SALT_BYTES))

    def guard(self, seal: Seal | None) -> Guard:
        if seal is None:
            raise OtherKeyError("it is not encrypted, but the store was opened with a key")
        if seal.key_id != self.key_id:
            raise OtherKeyError(f"it is encrypted with the key {seal.key_id}, but the store's key is {self.key_id}")
        return FileCipher(self._hkdf(seal.salt).derive(self._key))

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, b"hf_tiered_cache " + purpose, "sha256")

    def __repr__(self) -> str:
        return f"StoreCipher(key {self.key_id})"


class FileCipher(_Secret, Guard):
    """Guard of the blocks of one encrypted file. `keys` are those of the blocks and of the tag, `KEY_BYTES` each.

    A context per block is the only API of `cryptography` that decrypts in place with a separate tag (AESGCM needs the
    tag after the block). From version 48 on it releases the GIL.
    """

    def __init__(self, keys: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._invalid, self._tag_key, algorithm = InvalidTag, keys[KEY_BYTES:], algorithms.AES(keys[:KEY_BYTES])

        def block_cipher(number: int, tag: bytes | None = None) -> Cipher[modes.GCM]:
            return Cipher(algorithm, modes.GCM(number.to_bytes(_NONCE_BYTES, "little"), tag))

        self._block_cipher = block_cipher

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
                context = self._block_cipher(number).encryptor()
                context.update_into(source, target)
                context.finalize()
                tags += context.tag
            yield sealed, np.frombuffer(bytes(tags), DIGEST_DTYPE)

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        tags = digests.tobytes()
        for at, block in enumerate(rows(blocks)):
            tag = tags[at * _GCM_TAG_BYTES : (at + 1) * _GCM_TAG_BYTES]
            context = self._block_cipher(first + at, tag).decryptor()
            context.update_into(block, block)
            try:
                context.finalize()
            except self._invalid:
                return at
        return None

    def tag(self, head: bytes) -> bytes:
        return hmac.digest(self._tag_key, head, "sha256")[:TAG_BYTES]


def cipher_of(key: bytes | str | None) -> Plain:
    """Return the cipher of a store with this key, or without a key. Raises ConfigError."""
    try:
        return Plain() if key is None else StoreCipher(key)
    finally:
        del key  # tracebacks may show variables


def _key_of(key: bytes | str) -> bytes:
    """Return the key as 32 bytes. Raises ConfigError, which must not show the given value."""
    key_bytes = b""
    if isinstance(key, bytes | bytearray):
        key_bytes = bytes(key)
    elif isinstance(key, str) and re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", key):
        key_bytes = bytes.fromhex(key)
    elif isinstance(key, str) and re.fullmatch(r"[0-9A-Za-z+/_-]{43}=?", key):
        try:
            key_bytes = base64.b64decode(key.rstrip("=").replace("-", "+").replace("_", "/") + "=", validate=True)
        except binascii.Error:
            key_bytes = b""
    if len(key_bytes) != KEY_BYTES:
        del key, key_bytes  # tracebacks may show variables
        raise ConfigError(
            f"the key is invalid; pass {KEY_BYTES} secret bytes (secrets.token_bytes({KEY_BYTES})), or these bytes as "
            f"{2 * KEY_BYTES} hexadecimal digits or in base64"
        )
    return key_bytes


def read_key_file(path: Path | None) -> bytes | None:
    """Read a key from a file, as bytes or as text. Returns None without a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(_MOST_KEY_FILE_BYTES)  # a device does not end
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read ({error.strerror})") from None
    try:
        return _key_of(data if len(data) == KEY_BYTES else data.decode("ascii", "replace").strip())
    except ConfigError:
        del data  # tracebacks may show variables
        raise ConfigError(
            f"the key file {path} does not contain a key: {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits, "
            f"such as the output of `openssl rand -hex {KEY_BYTES}`"
        ) from None
