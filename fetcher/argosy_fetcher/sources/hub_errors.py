"""Hub errors: what a hub's refusals mean, and what their readers can do about them.

Owns the mapping from statuses and headers to fetch errors. Must not know clients or files. Invariant: messages hold
neither the token, even if a server sends it back, nor a query, which may be a signature.

The hub names its refusals in `X-Error-Code` and explains them in `X-Error-Message`. Without a token it answers 401 for
a repository that does not exist, for one that is private, and for a gated one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    ModelHidden,
    ModelNotFound,
    SourceChanged,
    TransientError,
)
from argosy_fetcher.sources.unknown_host import is_unknown_host, unknown_host

_TRANSIENT: Final = frozenset((408, 425, 429))
"""Beside all from 500 on, some of which are of proxies in front of a server, such as Cloudflare's 520 to 530."""
_RATE_LIMIT: Final = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})')
"""The hub's own header, after draft-ietf-httpapi-ratelimit-headers: nothing remains for so many seconds."""
_MAX_MESSAGE_CHARACTERS: Final = 200


class HubModel(Struct, frozen=True):
    """The model that a hub was asked for, as messages name it."""

    endpoint: str
    repo_id: str
    revision: str
    token: str | None

    def __repr__(self) -> str:
        return f"HubModel({self.name!r} at {self.endpoint!r})"

    @property
    def name(self) -> str:
        return f"hf://{self.repo_id}" + (f"@{self.revision}" if self.revision else "")

    @property
    def page(self) -> str:
        return f"{self.endpoint}/{self.repo_id}"


def error_of(
    model: HubModel, status: int, headers: Mapping[str, str], path: str = ""
) -> FetchError | TransientError:
    """Return the error for a hub's answer.

    Args:
        path: the file that was asked for; empty if it was the list of files.
    """
    code, told = headers.get("x-error-code", ""), _told(model, headers)
    if _is_transient(status):
        return _transient(model, status, headers)
    if code == "GatedRepo":
        return AccessDenied(_gated(model))
    if headers.get("x-error-message") == "Access to this resource is disabled.":
        return AccessDenied(f"{model.name} is disabled on {model.endpoint}; see {model.page}")
    if status == 401 and model.token:
        return AccessDenied(
            f"{model.name}: {model.endpoint} does not accept the token: it is wrong, expired or revoked{told}; "
            f"set HF_TOKEN to one from {model.endpoint}/settings/tokens, or unset it for a public model"
        )
    if status == 401:
        return ModelHidden(
            f"{model.name} does not exist on {model.endpoint}, or it is private and no token was sent; "
            "check its name, or set HF_TOKEN (or run `hf auth login`)"
        )
    if code == "RevisionNotFound":
        if path:
            return _vanished(model, "the revision")
        return ModelNotFound(
            f"{model.name}: the repository has no revision {model.revision or 'main'!r}; "
            f"{model.page}/tree/main lists its branches and tags"
        )
    if code == "EntryNotFound" or (path and status in (404, 410, 416)):
        return _vanished(model, path)
    if status == 404:
        who = "the token's account may not see it" if model.token else "it is private and no token was sent"
        return ModelHidden(
            f"{model.name} does not exist on {model.endpoint}, or {who}; check its name and HF_TOKEN"
        )
    if status == 403:
        return AccessDenied(
            f"{model.name}: {model.endpoint} refuses access{told}; "
            + ("check what the token may read" if model.token else "set HF_TOKEN")
            + f" at {model.endpoint}/settings/tokens"
        )
    return FetchError(
        f"{model.name}: {model.endpoint} answers with status {status}{told}; check HF_ENDPOINT, which must be a hub"
    )


def storage_error(
    model: HubModel, host: str, status: int, headers: Mapping[str, str], path: str
) -> FetchError | TransientError:
    """Return the error for the answer of a host to which the hub sent us for a file's content."""
    if _is_transient(status):
        return TransientError(
            f"{model.name}: {path}: {host} answers with status {status}", retry_after_s(headers)
        )
    if status in (404, 410, 416):
        return _vanished(model, path)
    return AccessDenied(
        f"{model.name}: {path}: {host}, where the hub keeps the file, answers with status {status} to an address that "
        "the hub has just signed; a proxy or firewall may block that host"
    )


def unreachable(model: HubModel, error: Exception, storage_host: str = "") -> TransientError:
    """Return the error for a request that got no answer, from the hub or from the host of a file's content."""
    if is_unknown_host(error):
        host = storage_host or urlsplit(model.endpoint).netloc
        return unknown_host(model.name, host, "HF_ENDPOINT")
    if storage_host:
        return TransientError(
            f"{model.name}: {storage_host}, where {model.endpoint} keeps its files, does not answer ({reason(error)}); "
            "a proxy or firewall may block it"
        )
    return TransientError(
        f"{model.name}: {model.endpoint} does not answer ({reason(error)}); check the network and HF_ENDPOINT, or, "
        "outside a cluster, set HF_HUB_OFFLINE=1 to use only what is stored here"
    )


def reason(error: Exception) -> str:
    """Return an error of a transport as text, which may be empty in some libraries."""
    return _line(str(error)) or type(error).__name__


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a server asks to wait, from `Retry-After` or the hub's `RateLimit`; None if neither.

    A date counts from the server's own `Date`, so that clocks need not agree.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    try:
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", ""))
        return max((until - now).total_seconds(), 0.0)
    except (TypeError, ValueError):
        pass
    found = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(found[1]) if found else None


def _is_transient(status: int) -> bool:
    return status in _TRANSIENT or status >= 500


def _transient(model: HubModel, status: int, headers: Mapping[str, str]) -> TransientError:
    if status == 429:
        hint = "" if model.token else "; with a token (HF_TOKEN) the limit is higher"
        text = f"{model.name}: {model.endpoint} limits the rate of requests{hint}"
    else:
        text = f"{model.name}: {model.endpoint} answers with status {status}"
    return TransientError(text, retry_after_s(headers))


def _gated(model: HubModel) -> str:
    if model.token:
        return (
            f"{model.name} is gated, and the token's account has not been given access; accept the terms at "
            f"{model.page} (some authors answer by hand) and let the token read gated repositories"
        )
    return f"{model.name} is gated; accept the terms at {model.page}, then set HF_TOKEN to a token of that account"


def _vanished(model: HubModel, what: str) -> SourceChanged:
    return SourceChanged(
        f"{model.name}: {what} is not on {model.endpoint} any more, or has changed; fetch the model anew"
    )


def _told(model: HubModel, headers: Mapping[str, str]) -> str:
    text = headers.get("x-error-message", "")
    if model.token:
        text = text.replace(model.token, "***")
    text = _line(text).rstrip(".")
    return f" ({text})" if text else ""


def _line(text: str) -> str:
    """Return foreign text in one bounded line of printable characters."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())[:_MAX_MESSAGE_CHARACTERS]
