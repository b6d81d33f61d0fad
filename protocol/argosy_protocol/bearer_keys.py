"""Bearer keys between router and engine, and their comparison.

The operator and the routers hold one fleet key; the engines of a service accept only
`internal_key(fleet key, service UID)`. The operator can thus put a service's key into a Secret in the service's own
namespace without disclosing the key of any other service, and no key has to be stored or synchronised.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable


def internal_key(fleet_key: bytes, service_uid: str) -> str:
    """Derive the bearer key of one service's engines: HMAC-SHA256, URL-safe base64 without padding (43 characters).

    Raises:
        ValueError: the fleet key is shorter than 16 bytes or the UID is empty.
    """
    return _derived(fleet_key, b"argosy-internal-key/1", service_uid)


def node_key(fleet_key: bytes, service_uid: str) -> str:
    """Derive the key by which the nodes of one service's engines know each other, of the same form.

    Raises:
        ValueError: the fleet key is shorter than 16 bytes or the UID is empty.
    """
    return _derived(fleet_key, b"argosy-node-key/1", service_uid)


def _derived(fleet_key: bytes, purpose: bytes, service_uid: str) -> str:
    if len(fleet_key) < 16:
        raise ValueError("fleet key must have at least 16 bytes")
    if not service_uid:
        raise ValueError("service UID must not be empty")
    digest = hmac.new(fleet_key, purpose + b"\0" + service_uid.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def bearer_token(authorization: str) -> str | None:
    """Return the key in an `Authorization` header value, `Bearer KEY` with a case-insensitive scheme; None if it is of
    another scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class KeyRing:
    """A set of accepted bearer keys, held as SHA-256 digests and compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept these keys from now on, and no others."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def accepts(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header value carries one of the keys (`Bearer KEY`, scheme case-insensitive)."""
        token = bearer_token(authorization or "")
        digest = hashlib.sha256((token or "").encode()).digest()
        accepted = False
        for known in self._digests:  # no early exit: the time taken must not depend on which key matched
            accepted |= hmac.compare_digest(known, digest)
        return accepted and token is not None
