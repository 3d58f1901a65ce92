"""Ed25519 keys: who an island is, and what it has said.

An island's id *is* its public key. Every signature covers a domain (the kind of payload) and the exact
payload bytes, so a signed Ready can never be shown as a signed Report. Private keys are files of mode
0600, made on first use and never overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import BadFrame, ConfigError
from protocol.messages import IslandId, Signed

KEY_BYTES = 32


class Identity:
    """A key pair that signs. Make one with `load_or_create` or from 32 secret bytes."""

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.island = IslandId(self._key.public_key().public_bytes_raw())

    def sign(self, domain: str, payload: bytes) -> Signed:
        return Signed(payload, self.island, self._key.sign(_covered(domain, payload)))


def _covered(domain: str, payload: bytes) -> bytes:
    return b"atoll.v1/" + domain.encode() + b"\0" + payload


def verified(signed: Signed, domain: str) -> bytes:
    """The payload, if its signature holds. Raises BadFrame otherwise."""
    key = Ed25519PublicKey.from_public_bytes(signed.signer)
    try:
        key.verify(signed.signature, _covered(domain, signed.payload))
    except InvalidSignature:
        raise BadFrame(f"a {domain} with a wrong signature of {short(signed.signer)}") from None
    return signed.payload


def short(island: bytes) -> str:
    """First eight hex digits: for people, never for decisions."""
    return island.hex()[:8]


def load_or_create(path: Path) -> Identity:
    """Reads the key file, or makes one (mode 0600). Raises ConfigError on a damaged file."""
    try:
        return load(path)
    except FileNotFoundError:
        create(path, os.urandom(KEY_BYTES))
        return load(path)


def create(path: Path, secret: bytes) -> None:
    """Writes a new key file, whole or not at all; an existing one is never overwritten."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink()


def load(path: Path) -> Identity:
    data = path.read_bytes()
    try:
        secret = bytes.fromhex(data.decode().strip())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"{path}: not a key file (64 hex digits): restore it from your copy")
    return Identity(secret)
