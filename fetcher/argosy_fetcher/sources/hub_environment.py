"""Hub environment: endpoint, token, cache and offline mode of a Hugging Face hub, by the names that its users know.

Owns how these are read from credentials. Must not know requests or models. Invariant: the token is in no message and in
no `repr`.

    HF_ENDPOINT                         the hub; https://huggingface.co if not set
    HF_TOKEN, HF_TOKEN_PATH, HF_HOME    the token, or where `hf auth login` has left it
    HF_HUB_DISABLE_IMPLICIT_TOKEN       send no token
    HF_HUB_CACHE, HF_HOME               Hugging Face's own cache
    HF_HUB_OFFLINE, ARGOSY_OFFLINE      make no request
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx
from huggingface_hub import constants, get_token

from argosy_fetcher.errors import AccessDenied, InvalidSource
from argosy_fetcher.sources.hub_endpoint import hub_address

MAX_TOKEN_BYTES: Final = 16 << 10
"""Tokens of the hub have 37 characters, but those that stand for a workload's identity are JWTs."""

_TOKEN: Final = re.compile(r"[!-~]+")
_LOGIN: Final = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HOME",
    "XDG_CACHE_HOME",
    "HF_OIDC_RESOURCE",
)
"""What decides which token huggingface_hub finds."""


def endpoint(credentials: Mapping[str, str]) -> httpx.URL:
    """Return the hub's address, whose path has no slash at its end.

    Raises:
        InvalidSource: HF_ENDPOINT is not the address of a web server.
    """
    try:
        return httpx.URL(hub_address(credentials))
    except httpx.InvalidURL as error:
        raise InvalidSource(f"HF_ENDPOINT is not a URL: {error}") from None


def find_token(credentials: Mapping[str, str]) -> str | None:
    """Return the token to send, or None.

    Where the credentials are those of this process's environment, huggingface_hub finds it, which also renews the
    tokens of logins in a browser.

    Raises:
        AccessDenied: there is a token that cannot be read or sent.
    """
    if _is_true(credentials.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    given = credentials.get("HF_TOKEN") or credentials.get("HUGGING_FACE_HUB_TOKEN") or ""
    if given.strip():
        return _checked(given, "HF_TOKEN")
    if all(credentials.get(name) == os.environ.get(name) for name in _LOGIN):
        try:
            found = get_token()
        except Exception as error:  # files and the exchange of identities fail in many ways
            raise AccessDenied(f"the hub's token cannot be read: {error}") from None
        return _checked(found, "the hub's token") if found else None
    if path := credentials.get("HF_TOKEN_PATH"):
        return _read(_expand(path))
    if home := credentials.get("HF_HOME"):
        return _read(_expand(home) / "token")
    return None


def hub_cache(credentials: Mapping[str, str]) -> Path:
    """Return the directory of Hugging Face's own cache, which need not exist."""
    if path := credentials.get("HF_HUB_CACHE") or credentials.get("HUGGINGFACE_HUB_CACHE"):
        return _expand(path)
    if home := credentials.get("HF_HOME"):
        return _expand(home) / "hub"
    return Path(constants.HF_HUB_CACHE)


def is_offline(credentials: Mapping[str, str]) -> bool:
    return _is_true(credentials.get("HF_HUB_OFFLINE")) or _is_true(credentials.get("ARGOSY_OFFLINE"))


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AccessDenied(f"the hub's token cannot be read: {path}: {error.strerror}") from None
    text = content.decode("utf-8", "replace")
    return _checked(text, str(path)) if text.strip() else None


def _checked(token: str, origin: str) -> str:
    """Return a token that fits in a header. HTTP libraries would show another one in their errors."""
    token = token.strip()
    if len(token) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(token):
        raise AccessDenied(f"{origin} is not a token: it has spaces, line breaks or other odd characters")
    return token


def _expand(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def _is_true(value: str | None) -> bool:
    return (value or "").upper() in constants.ENV_VARS_TRUE_VALUES
