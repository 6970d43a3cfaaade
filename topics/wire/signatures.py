"""Signatures after records, which show who wrote a record where the permissions of brokers cannot.

Kafka grants a principal a whole topic. Every environment may write to `rollouts`, which grouping processes read, so
signatures (Ed25519, RFC 8032) distinguish marks from rollouts, and the rollouts of different environments. The public
keys are in the grouping configuration, which is part of the log. Anyone who has the log can check which records
grouping accepted, and only the holder of a private key can write records that it accepts.

A signature follows the frame of a record (`codec.signed_frame`), so other programs can read the record without it. It
covers the frame and a context, so that a signature for one use is invalid for another.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Mark
from rollstream.topics.secrets import resolve
from rollstream.topics.wire import codec

ROLLOUT = b"rollstream rollout\0"
"""Context of rollouts and cancellations. Their key decides their partition, so the context does not name it."""
_MARK = b"rollstream mark\0"
_HEX_DIGITS = 64
_REMEDY = "pip install 'rollstream[signatures]'"


def mark_context(partition: int) -> bytes:
    """Return the context of the marks of a partition; their signatures are invalid for every other partition."""
    return _MARK + partition.to_bytes(4, "big")


class Signer:
    """Signs records with one private key."""

    def __init__(self, key: str, setting: str) -> None:
        """`key` is the value of `setting`: a reference to a private key in PEM, in the form that `write_key` writes.

        Raises ConfigurationError if the key cannot be read.
        """
        self._key = _private_key(resolve(setting, key), setting)
        self.public: str = self._key.public_key().public_bytes_raw().hex()
        """The public key, in hexadecimal digits."""

    def signed(self, record: object, context: bytes) -> bytes:
        """Encode a record and append a signature."""
        frame = codec.encode(record)
        return codec.signed_frame(frame, self.signature(frame, context))

    def signature(self, content: bytes, context: bytes) -> bytes:
        """Return the signature of `content` for the use that `context` names."""
        return bytes(self._key.sign(context + content))


def signer_of(key: str, setting: str) -> Signer | None:
    """Return the signer of a setting; None if the setting is empty."""
    return Signer(key, setting) if key else None


class MarkSigner:
    """Encodes the marks of a grouping process or a tool: signed with its key, if it has one."""

    def __init__(self, key: str = "") -> None:
        """`key` is the setting grouper.signing_key. Raises ConfigurationError if it cannot be read."""
        self._signer = signer_of(key, "grouper.signing_key")

    def encoded(self, mark: Mark, partition: int) -> bytes:
        """Encode a mark for a partition."""
        return signed_or_plain(mark, self._signer, mark_context(partition))

    def check(self, mark_keys: Collection[str]) -> None:
        """Raise StateRefused unless grouping accepts the marks of this process while `mark_keys` are in force."""
        if mark_keys and (self._signer is None or self._signer.public not in mark_keys):
            own = "it is not set" if self._signer is None else f"its public key is {self._signer.public}"
            raise StateRefused(
                f"grouping.mark_keys in the log requires signed marks ({', '.join(mark_keys)}), so the marks of this "
                f"process would be ignored: name the private key of one of them in grouper.signing_key ({own})"
            )


def signed_or_plain(record: object, signer: Signer | None, context: bytes) -> bytes:
    """Encode a record, signed if there is a signer."""
    return codec.encode(record) if signer is None else signer.signed(record, context)


def is_signed_by(value: bytes, context: bytes, keys: Iterable[str]) -> bool:
    """Whether a record carries a signature for this context by one of these public keys.

    Raises StateRefused if this process cannot check signatures.
    """
    frame, signature = codec.frame_and_signature(value)
    return signature is not None and any(is_signature(signature, frame, context, key) for key in keys)


def is_signature(signature: bytes, content: bytes, context: bytes, key: str) -> bool:
    """Whether `signature` is a public key's signature of `content` for `context`. Raises as `is_signed_by` does."""
    return _verifies(key, signature, context + content)


def check_public_key(key: str, setting: str) -> None:
    """Raise ConfigurationError unless `key` has the form of a public key: 64 hexadecimal digits."""
    if len(key) != _HEX_DIGITS or set(key) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"{setting}: {key[:100]!r} is not a public key; `rollstream key show FILE` prints the public key that "
            "belongs to a private key"
        )


def parse_environment_keys(texts: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Parse public keys by environment, each in the form `ENVIRONMENT:KEY`; an environment may have several.

    Raises ConfigurationError for anything else.
    """
    by_environment: dict[str, tuple[str, ...]] = {}
    for text in texts:
        environment, _, key = text.rpartition(":")
        if not environment:
            raise ConfigurationError(f"grouping.environment_keys: {text[:100]!r} is not ENVIRONMENT:KEY")
        check_public_key(key, f"grouping.environment_keys of {environment}")
        by_environment[environment] = (*by_environment.get(environment, ()), key)
    return by_environment


def write_key(path: Path) -> str:
    """Write a new private key, readable by its owner alone, and return its public key.

    Raises ConfigurationError if the file already exists or cannot be written.
    """
    serialization, ed25519 = _library()
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        # Another key is never overwritten, because nothing could be signed with it any more.
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(pem)
    except OSError as error:
        raise ConfigurationError(f"no key was written: {error}") from error
    return str(key.public_key().public_bytes_raw().hex())


def _verifies(key: str, signature: bytes, content: bytes) -> bool:
    public, invalid = _public_key(key)
    with contextlib.suppress(invalid):
        public.verify(signature, content)
        return True
    return False


@lru_cache(maxsize=1024)
def _public_key(key: str) -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature

        _serialization, ed25519 = _library()
    except (ImportError, ConfigurationError) as error:
        raise StateRefused(f"the log requires signatures, but this process cannot check them: {_REMEDY}") from error
    return ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)), InvalidSignature


def _private_key(pem: str, setting: str) -> Any:
    serialization, ed25519 = _library()
    try:
        key = serialization.load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{setting} must name a private key in PEM; `rollstream key new` makes one") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigurationError(f"{setting} names a private key that is not of the kind Ed25519")
    return key


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigurationError(f"signing needs the package cryptography: {_REMEDY}") from error
    return serialization, ed25519


__all__ = [
    "ROLLOUT",
    "MarkSigner",
    "Signer",
    "check_public_key",
    "is_signature",
    "is_signed_by",
    "mark_context",
    "parse_environment_keys",
    "signed_or_plain",
    "signer_of",
    "write_key",
]
