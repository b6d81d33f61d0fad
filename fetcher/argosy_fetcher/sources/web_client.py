"""Web client: GET requests to one server and to where it redirects.

Owns encryption, redirects, credentials and what a status means. Credentials (ARGOSY_HTTPS_TOKEN as a bearer token if
ARGOSY_HTTPS_HOST names the server, else its entry in netrc) go to the server of the source alone, never to where it
redirects: whoever writes a model's source does not decide who gets the token. Unencrypted HTTP is spoken with loopback
addresses only, and never after HTTPS. Must not know files, ranges or retries. Messages have no URLs, whose queries may
be signatures.
"""

from __future__ import annotations

import contextlib
import email.utils
import logging
import netrc
import time
from collections.abc import Collection, Generator, Mapping
from pathlib import Path

import httpx

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
)
from argosy_fetcher.loopback import is_loopback
from argosy_fetcher.sources.credential_values import header_value
from argosy_fetcher.sources.tls import is_untrusted, trusted, untrusted
from argosy_fetcher.sources.unknown_host import is_unknown_host, unknown_host
from argosy_protocol import __version__

MAX_REDIRECTS = 5
TIMEOUT = httpx.Timeout(30, connect=10, pool=None)
"""Seconds of silence, not of a whole response."""
MAX_DISCARDED_BYTES = 4096
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16)

_log = logging.getLogger(__name__)
_REDIRECTS = {301, 302, 303, 307, 308}
_TRANSIENT = {408, 425, 429}


class WebClient:
    """Requests of one source. Thread-safe.

    Args:
        server: any URL of the source's server.

    Raises:
        AccessDenied: the credentials are malformed.
        InvalidSource: the server is not on loopback and its URL not https://, or the file of trusted certificates is
            unusable.
    """

    def __init__(self, source: str, server: httpx.URL, credentials: Mapping[str, str]) -> None:
        if server.scheme != "https" and not is_loopback(server.host):
            raise InvalidSource(
                f"{source}: only loopback addresses are read without encryption; use https://"
            )
        self._origin = _origin(server)
        self._auth = _authentication(source, server, credentials)
        self._remedy = _remedy(server, credentials, self._auth)
        self._client = httpx.Client(
            verify=trusted(credentials),
            # a proxy could not reach this machine's own servers
            trust_env=not is_loopback(server.host),
            headers={
                "user-agent": f"argosy-fetcher/{__version__}",
                "accept": "*/*",
                "accept-encoding": "identity",
            },
            timeout=TIMEOUT,
            limits=LIMITS,
        )

    def get(
        self, url: httpx.URL, where: str, headers: Mapping[str, str], accepted: Collection[int] = (200, 206)
    ) -> httpx.Response:
        """Return a response whose body was not read yet; the caller closes it, or reads it by `chunks`.

        Args:
            where: names the model and the file in errors.
            accepted: statuses that are returned.

        Raises:
            FetchError, TransientError: another status, no connection, or a redirect that is not followed.
        """
        for _ in range(MAX_REDIRECTS + 1):
            response = self._send(url, where, headers)
            if response.status_code not in _REDIRECTS:
                break
            self.discard(response)
            url = _redirected(url, response.headers.get("location", ""), where)
        else:
            raise FetchError(f"{where}: more than {MAX_REDIRECTS} redirects")
        if response.status_code in accepted:
            return response
        self.discard(response)
        raise self._refusal(response, where)

    def chunks(self, response: httpx.Response, where: str) -> Generator[bytes, None, None]:
        """Yield a response's body as it comes, and close the response.

        Raises:
            TransientError: the connection was cut.
        """
        try:
            yield from response.iter_raw()
        except httpx.TransportError as error:
            raise TransientError(f"{where}: the connection was cut ({type(error).__name__})") from None
        finally:
            response.close()

    def discard(self, response: httpx.Response) -> None:
        """Close a response; read it before if it is short, so that its connection can be used again."""
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) <= MAX_DISCARDED_BYTES:
            with contextlib.suppress(httpx.TransportError):
                for _ in response.iter_raw():
                    pass
        response.close()

    def close(self) -> None:
        self._client.close()

    def _send(self, url: httpx.URL, where: str, headers: Mapping[str, str]) -> httpx.Response:
        request = self._client.build_request("GET", url, headers=headers)
        auth = self._auth if _origin(url) == self._origin else None
        try:
            return self._client.send(request, stream=True, auth=auth)
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise FetchError(f"{where}: the request cannot be sent ({type(error).__name__})") from None
        except httpx.TransportError as error:
            if "in location header" in str(error):  # httpx reads it even if it is not to follow it
                raise FetchError(f"{where}: the server redirects to something that is not a URL") from None
            if is_untrusted(error):
                raise untrusted(where, url.host) from None
            if is_unknown_host(error):
                raise unknown_host(where, url.host, "the URL") from None
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TransientError(f"{where}: no answer from {url.host} ({reason})") from None

    def _refusal(self, response: httpx.Response, where: str) -> FetchError | TransientError:
        status = response.status_code
        if status in _TRANSIENT or status >= 500:
            wait_s = retry_after_s(response.headers.get("retry-after", ""), time.time())
            return TransientError(f"{where}: the server is busy or out of order (HTTP {status})", wait_s)
        if status in (401, 403):
            return AccessDenied(f"{where}: access denied (HTTP {status}){self._remedy}")
        if status in (404, 410):
            return ModelNotFound(f"{where}: the server has no such file (HTTP {status}); check the URL")
        if status in (412, 416):
            return SourceChanged(f"{where}: the file has changed since it was listed; fetch again")
        return FetchError(f"{where}: the server answers HTTP {status}")


def retry_after_s(value: str, now: float) -> float | None:
    """Return the seconds of a `Retry-After` header, which is a number or a date; None if it is neither.

    Args:
        now: seconds since the epoch.
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _redirected(url: httpx.URL, location: str, where: str) -> httpx.URL:
    try:
        target = url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise FetchError(f"{where}: the server redirects to something that is not a URL") from None
    if not location or not target.host or target.userinfo or target.scheme not in ("http", "https"):
        raise FetchError(f"{where}: the server redirects to a URL that is not followed")
    if target.scheme == "http" and not (url.scheme == "http" and is_loopback(target.host)):
        raise FetchError(f"{where}: the server redirects to {target.host} without encryption")
    return target


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _authentication(source: str, server: httpx.URL, credentials: Mapping[str, str]) -> httpx.Auth | None:
    token = credentials.get("ARGOSY_HTTPS_TOKEN", "").strip()
    if token and _token_host(credentials) == _authority(server):
        return _Bearer(header_value(source, "ARGOSY_HTTPS_TOKEN", token))
    named = credentials.get("NETRC")
    path = Path(named).expanduser() if named else Path(credentials.get("HOME", "/nonexistent"), ".netrc")
    try:
        # a `default` entry is not taken: it would give a password to any server
        entry = netrc.netrc(str(path)).hosts.get(server.host)
    except OSError as error:
        if named:
            raise AccessDenied(f"{source}: {path} cannot be read: {error.strerror}") from None
        return None
    except (netrc.NetrcParseError, ValueError):
        # not the parser's text, which quotes words
        if named:
            raise AccessDenied(f"{source}: {path} is malformed") from None
        _log.warning("%s is malformed; its entries are not used", path)
        return None
    return httpx.BasicAuth(entry[0], entry[2] or "") if entry is not None else None


def _remedy(server: httpx.URL, credentials: Mapping[str, str], auth: httpx.Auth | None) -> str:
    """What to do if access is denied: the end of a message."""
    if isinstance(auth, _Bearer):
        return "; check ARGOSY_HTTPS_TOKEN"
    if auth is not None:
        return "; check the host's entry in netrc"
    host = f"ARGOSY_HTTPS_HOST={_authority(server)}"
    if credentials.get("ARGOSY_HTTPS_TOKEN", "").strip():
        return f" without credentials; ARGOSY_HTTPS_TOKEN is sent to one host only: set {host} if it is meant"
    return f" without credentials; set ARGOSY_HTTPS_TOKEN and {host}, or add the host to ~/.netrc"


def _token_host(credentials: Mapping[str, str]) -> str:
    """Return HOST[:PORT] that the token is for."""
    host = credentials.get("ARGOSY_HTTPS_HOST", "").strip().lower()
    return host.removeprefix("https://").rstrip("/").removesuffix(":443")


def _authority(url: httpx.URL) -> str:
    """Return HOST[:PORT] without the port that the scheme implies."""
    return url.netloc.decode("ascii", "replace").lower()


class _Bearer(httpx.Auth):
    def __init__(self, token: str) -> None:
        self._value = f"Bearer {token}"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = self._value
        yield request
