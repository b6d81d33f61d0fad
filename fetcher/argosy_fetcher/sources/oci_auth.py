"""Authentication to a registry: Basic, and Bearer tokens from the token server that the registry names.

Owns challenges, tokens and where credentials may be sent: to the registry itself, and to its token server over TLS (or
without it, if the registry is asked without TLS and the server's host may be). Must not know what is read.
Thread-safe: of several requests that a registry refuses at once, one gets a new token and the others use it.

Protocol: https://distribution.github.io/distribution/spec/auth/token/ and .../oauth/
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
from msgspec import Struct

from argosy_fetcher.errors import AccessDenied, FetchError, TransientError
from argosy_fetcher.sources.documents import MalformedDocument, decode_document
from argosy_fetcher.sources.oci_credentials import CredentialLookup, RegistryCredential, find_credential
from argosy_fetcher.sources.oci_http import error_of, read_document, translated
from argosy_fetcher.sources.oci_reference import ImageReference

MAX_CHALLENGE_CHARACTERS: Final = 4096
MAX_TOKEN_CHARACTERS: Final = 16 << 10
"""Longer headers are refused by common servers anyway."""
MAX_TOKEN_RESPONSE_BYTES: Final = 64 << 10
CLIENT_ID: Final = "argosy-fetcher"

_WORD: Final = re.compile(r"[\s,]*([A-Za-z][A-Za-z0-9_-]*)")
_VALUE: Final = re.compile(r'\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class AuthChallenge:
    """One challenge of a WWW-Authenticate header."""

    scheme: str
    """In lower case."""
    parameters: Mapping[str, str]


class TokenResponse(Struct, frozen=True):
    """What a token server answers; the names are those of two generations of the protocol."""

    token: str | None = None
    access_token: str | None = None


class RegistryAuthenticator:
    """Authorization of requests for one repository."""

    def __init__(
        self,
        reference: ImageReference,
        values: Mapping[str, str],
        http: httpx.Client,
        may_receive: Callable[[httpx.URL], bool],
    ) -> None:
        """
        Args:
            values: where credentials are looked for, at the first challenge.
            may_receive: whether a token server's URL is secure enough for credentials.
        """
        self._reference = reference
        self._values = values
        self._http = http
        self._may_receive = may_receive
        self._lock = threading.Lock()
        self._authorization = ""
        self._lookup: CredentialLookup | None = None

    @property
    def authorization(self) -> str:
        """Value of the Authorization header for the next request; empty before the first challenge."""
        return self._authorization

    def remedy(self) -> str:
        """Return what to do if access is denied.

        Raises:
            InvalidSource: the credentials are malformed.
        """
        return self._found().remedy

    def answer(self, headers: Sequence[str], refused: str) -> None:
        """Renew the authorization after a 401.

        Args:
            headers: WWW-Authenticate of the response.
            refused: the authorization that the refused request had.

        Raises:
            AccessDenied: there is nothing to answer with, or the token server refuses.
            TransientError: the token server cannot be reached or has failed.
        """
        with self._lock:
            if self._authorization != refused:
                return  # another thread was refused too, and has renewed it
            self._authorization = self._answer(parse_challenges(headers), refused)

    def _answer(self, challenges: Sequence[AuthChallenge], refused: str) -> str:
        found = self._found()
        for challenge in challenges:
            if challenge.scheme == "bearer" and challenge.parameters.get("realm"):
                return f"Bearer {self._token(challenge, found.credential)}"
        basic = found.credential.basic if found.credential else ""
        if any(challenge.scheme == "basic" for challenge in challenges) and basic not in ("", refused):
            return basic
        schemes = ", ".join(sorted({challenge.scheme[:32] for challenge in challenges})) or "nothing"
        raise AccessDenied(
            f"{self._reference}: {self._reference.host} requires authentication ({schemes}); {found.remedy}"
        )

    def _token(self, challenge: AuthChallenge, credential: RegistryCredential | None) -> str:
        subject = f"{self._reference}: token"
        with translated(subject):
            realm = httpx.URL(challenge.parameters["realm"])
            if realm.userinfo or not realm.host or not self._may_receive(realm):
                raise AccessDenied(
                    f"{self._reference}: the registry names a token server that is not asked, because its URL is "
                    "not https:// or has a user name in it"
                )
            response = self._http.send(self._token_request(realm, challenge, credential), stream=True)
        try:
            if response.status_code != 200:
                raise self._refusal(response, subject)
            content = read_document(response, MAX_TOKEN_RESPONSE_BYTES, subject)
        finally:
            response.close()
        try:
            answer = decode_document(content, TokenResponse)
        except MalformedDocument as error:
            raise AccessDenied(f"{subject}: {realm.host} sent no token: {error}") from None
        token = answer.token or answer.access_token or ""
        if len(token) > MAX_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token):
            raise AccessDenied(f"{subject}: {realm.host} sent no token that can be used")
        return token

    def _refusal(self, response: httpx.Response, subject: str) -> FetchError | TransientError:
        error = error_of(response, subject, self.remedy)
        if isinstance(error, (TransientError, AccessDenied)):
            return error
        host, status = response.url.host, response.status_code
        return AccessDenied(f"{subject}: the token server {host} refuses ({status}); {self.remedy()}")

    def _token_request(
        self, realm: httpx.URL, challenge: AuthChallenge, credential: RegistryCredential | None
    ) -> httpx.Request:
        scope = challenge.parameters.get("scope") or f"repository:{self._reference.repository}:pull"
        fields = {"scope": scope}
        if service := challenge.parameters.get("service"):
            fields["service"] = service
        if credential and credential.identity_token:
            fields |= {
                "grant_type": "refresh_token",
                "client_id": CLIENT_ID,
                "refresh_token": credential.identity_token,
            }
            return self._http.build_request("POST", realm, data=fields)
        headers = {"Authorization": credential.basic} if credential and credential.basic else {}
        return self._http.build_request("GET", realm.copy_merge_params(fields), headers=headers)

    def _found(self) -> CredentialLookup:
        if self._lookup is None:
            self._lookup = find_credential(self._reference, self._values)
        return self._lookup


def parse_challenges(headers: Sequence[str]) -> list[AuthChallenge]:
    """Parse WWW-Authenticate headers, each of which may have several challenges (RFC 9110, section 11.6.1).

    What cannot be parsed is left out.
    """
    challenges: list[AuthChallenge] = []
    for header in headers:
        if len(header) > MAX_CHALLENGE_CHARACTERS:
            continue
        position = 0
        parameters: dict[str, str] | None = None
        while word := _WORD.match(header, position):
            value = _VALUE.match(header, word.end())
            if value is None:
                parameters = {}
                challenges.append(AuthChallenge(word[1].lower(), parameters))
            elif parameters is not None:
                quoted = value[1]
                text = value[2] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                parameters.setdefault(word[1].lower(), text)
            position = word.end() if value is None else value.end()
    return challenges
