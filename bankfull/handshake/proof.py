"""The messages of the handshake and what each end makes of them, without connections.

Both ends speak at once. The listener greets with its version and a nonce; the caller says what it wants, with a nonce
of its own and an early HMAC: it needs no answer, so a caller that knows the token is told from a silent one by its
first packet. The early HMAC could be a recording. The caller's proof is therefore an HMAC over both nonces, and so is
the listener's, so that nothing goes to a process that has taken over its port. All messages have a fixed length:
nothing is parsed before the other end is known.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final

import bankfull
from bankfull.errors import BankfullError

PROTOCOL = 3
"""Version of this handshake and of the messages behind it. Both ends must have the same."""
MAGIC = b"bankfull"
NONCE, SUBJECT, MAC = 32, 32, 32
"""Bytes of a nonce, of a subject and of an HMAC."""
VERSION_BYTES = 32
TAG = 16
"""Bytes of the tag of a sealed message."""

CONTROL: Final = b"C"
"""To a gateway: opens a session, named by the subject. The gateway sends its heartbeats, and reads commands."""
ENGINE: Final = b"E"
"""To a gateway: becomes the socket of a new engine process, in the session that a CONTROL connection has opened."""
RANK: Final = b"R"
"""To the host of a rank: becomes the socket of the rank's process."""
PAGES: Final = b"P"
"""To an engine that decodes: carries state of the form that the subject names."""

ACCEPTED, WRONG_TOKEN, WRONG_VERSION = b"+", b"T", b"V"
IN_USE, NO_SESSION, FAILED, OTHER_FORM, NO_TLS = b"U", b"S", b"F", b"O", b"N"

Part = bytes | bytearray | memoryview

GREETING = struct.Struct(f"<{len(MAGIC)}sH{VERSION_BYTES}s{NONCE}s")
HELLO = struct.Struct(f"<{len(MAGIC)}sH{VERSION_BYTES}sc{SUBJECT}s{NONCE}s{MAC}s")
PROOF = struct.Struct(f"<{MAC}s")
REPLY = struct.Struct(f"<c{MAC}s")
"""The outcome, and the listener's HMAC if it accepts."""


class HandshakeRefused(BankfullError):
    """The two ends do not belong together. Another attempt would fail, too."""


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Keys of one connection: they follow from the token and both nonces, and are never sent."""

    of_caller: bytes
    """Seals what the caller sends."""
    of_listener: bytes

    @staticmethod
    def of(token: bytes, said: bytes) -> SessionKeys:
        session_key = derived(token, b"session " + said)
        return SessionKeys(derived(session_key, b"caller"), derived(session_key, b"listener"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """An authenticated connection."""

    purpose: bytes
    subject: bytes
    proof: bytes
    """The listener's HMAC, sent with its reply."""
    keys: SessionKeys


class Seal:
    """Tags of the messages that one end sends, in their order: a message that is changed, repeated, left out or moved
    has another tag."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def tag(self, *parts: Part) -> bytes:
        """The tag of the next message."""
        hasher = blake2b(digest_size=TAG, key=self._key, salt=self._count.to_bytes(16, "little"))
        self._count += 1
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def opens(self, tag: Part, *parts: Part) -> bool:
        """Whether this is the tag of the next message."""
        return hmac.compare_digest(tag, self.tag(*parts))


class CallerSide:
    """The end that connects. It sends `hello` at once."""

    def __init__(self, token: bytes, purpose: bytes, subject: bytes) -> None:
        self._token = token
        said = _HELLO_HEAD.pack(MAGIC, PROTOCOL, padded(own_version()), purpose, subject, secrets.token_bytes(NONCE))
        self.hello = said + mac(token, b"hello", said)
        self._said = b""

    def proof(self, greeting: bytes) -> bytes:
        """What answers the greeting. Raises HandshakeRefused."""
        magic, protocol, version, _ = GREETING.unpack(greeting)
        if magic != MAGIC:
            raise HandshakeRefused("The process at this address is not one of bankfull's.")
        check_versions(protocol, version)
        self._said = greeting + self.hello
        return mac(self._token, b"caller", self._said)

    def judge(self, reply: bytes) -> SessionKeys:
        """Raises HandshakeRefused, or ConnectionError if another attempt may succeed."""
        outcome, proof = REPLY.unpack(reply)
        if outcome in _REFUSED:
            raise _REFUSED[outcome]()
        if not hmac.compare_digest(proof, mac(self._token, b"listener", self._said)):
            raise HandshakeRefused("The process at this address could not prove that it knows the token.")
        return SessionKeys.of(self._token, self._said)


class ListenerSide:
    """The end that listens. It sends `greeting` at once."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self.greeting = GREETING.pack(MAGIC, PROTOCOL, padded(own_version()), secrets.token_bytes(NONCE))
        self._hello = b""

    def take_hello(self, hello: bytes) -> bytes:
        """The nonce of a caller that seems to know the token; empty: it does not."""
        self._hello = hello
        said, early = hello[: _HELLO_HEAD.size], hello[_HELLO_HEAD.size :]
        return said[-NONCE:] if hmac.compare_digest(early, mac(self._token, b"hello", said)) else b""

    def take_proof(self, proof: bytes) -> Wanted | bytes:
        """What the caller wants, or the outcome by which it is refused."""
        said = self.greeting + self._hello
        if not hmac.compare_digest(proof, mac(self._token, b"caller", said)):
            return WRONG_TOKEN
        _, protocol, version, purpose, subject, _, _ = HELLO.unpack(self._hello)
        try:
            check_versions(protocol, version)
        except HandshakeRefused:
            return WRONG_VERSION
        return Wanted(purpose, subject, mac(self._token, b"listener", said), SessionKeys.of(self._token, said))


def derived(token: bytes, label: bytes) -> bytes:
    """A key for one use. Who learns it learns neither the token nor the other keys."""
    return blake2b(label, digest_size=32, key=token, person=b"bankfull key").digest()


def mac(token: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + said, "sha256")


def own_version() -> bytes:
    return bankfull.__version__.encode()[:VERSION_BYTES]


def padded(version: bytes) -> bytes:
    return version.ljust(VERSION_BYTES, b"\0")


def check_versions(protocol: int, version: bytes) -> None:
    theirs, ours = version.rstrip(b"\0").decode("ascii", "replace"), own_version().decode()
    if (protocol, theirs) != (PROTOCOL, ours):
        raise HandshakeRefused(
            f"The two ends run different versions of bankfull: {ours} with protocol {PROTOCOL} here, {theirs} with "
            f"protocol {protocol} there; install the same version on all nodes."
        )


_HELLO_HEAD = struct.Struct(f"<{len(MAGIC)}sH{VERSION_BYTES}sc{SUBJECT}s{NONCE}s")
_REFUSED: dict[bytes, Callable[[], Exception]] = {
    WRONG_TOKEN: partial(
        HandshakeRefused, "The process at this address has another token: it belongs to another server or cluster."
    ),
    WRONG_VERSION: partial(
        HandshakeRefused,
        "The process at this address runs another version of bankfull; install the same one on all nodes.",
    ),
    OTHER_FORM: partial(HandshakeRefused, "The process at this address keeps its state in another form."),
    NO_TLS: partial(
        HandshakeRefused,
        "The machine at this address cannot use its files for --link-tls; its log says why.",
    ),
    IN_USE: partial(ConnectionError, "the replica is in use by another server"),
    NO_SESSION: partial(ConnectionError, "the gateway has ended the session"),
    FAILED: partial(ConnectionError, "the gateway could not start the engine process"),
}
