"""API keys: the table that maps the key a client sends to its account, and the file that the keys are read from.

Owns: the format of key files, when the file is read again, the refusal of requests without a key in the table. Must not
know: which paths need a key.
Invariants: keys are kept as SHA-256 digests only, and a key's text appears in no message; a router that was given keys
or a key file never admits clients without a key: if the file vanishes or becomes empty, its keys are refused; a
malformed line denies its own key and no other. A change interrupts no request, and no look at the file holds up the
event loop, however many keys it has. A router that has not been able to read the file since its start refuses all keys
of it, and is not ready.

A key file has one key per line: the key itself, or `sha256:` and its digest in hexadecimal, then its terms
(`key_terms.KeyTerms`) as NAME=VALUE in any order. `#` begins a comment line.

    sha256:5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5 name=shop models=tiny,large weight=2
    sk-a-plain-key name=batch tokens_per_minute=100000 priority=10

The time of a look-up reveals nothing about a key: the digest of a guess cannot be steered, and its bytes are compared
only if the dictionary's own keyed hash already agrees.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from argosy_protocol.errors import Unauthorized
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.auth.key_terms import KeyTerms

log = logging.getLogger(__name__)


MAX_FILE_BYTES = 16 * 1024 * 1024
"""A hundred thousand keys; a Kubernetes Secret holds one."""
_DIGEST_PREFIX = "sha256:"
_TERM = re.compile(r"[a-z_]{1,24}")
"""The form of a term's name, which random keys seldom have."""
_OWN_NAME = re.compile(r"key-[0-9a-f]{32}")
"""The form of the name that a key has without one."""
_LINE_END = re.compile(r"\r\n|\n|\r")
"""Not what else ends a line in Unicode: the rest of a comment would be a key."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""What bytes become that are no UTF-8."""
_FIELDS = tuple(KeyTerms.__struct_fields__)


KEYS_PER_STEP = 256
"""Lines that are read before other work of the event loop has its turn: two milliseconds."""


class KeyFileError(ValueError):
    """A line of a key file cannot be used; the message names no key."""


class KeyTable:
    """Maps keys to accounts. Times are a monotonic clock's."""

    def __init__(self, keys: Iterable[str] = (), *, is_closed: bool = False, now: float = 0.0) -> None:
        """
        Args:
            keys: keys that are never removed.
            is_closed: whether clients need a key even if `keys` is empty, because a key file adds others.
        """
        self._fixed = {_digest(key): _default_terms(_digest(key)) for key in keys if key}
        self.is_open = not self._fixed and not is_closed
        self.is_awaited = is_closed
        """Whether keys are still to come: the key file could not be read since the start."""
        self._by_name: dict[str, Account] = {}
        self._by_digest: dict[bytes, Account] = {}
        self.routers = 1
        """Number of routers that divide the limits of all keys."""
        for _ in self._install(self._fixed, now):
            pass

    def divide(self, routers: int, now: float) -> None:
        """Divide the limits of all keys by the number of routers that serve them from now on."""
        self.routers = routers
        for account in self._by_name.values():
            account.divide(routers, now)

    def load(self, text: str, now: float) -> list[str]:
        """Replace the keys of the file by those of `text`. Accounts that stay keep what they have used.

        Returns:
            Messages about lines that were left out.
        """
        problems: list[str] = []
        for _ in self.load_in_steps(text, now, problems):
            pass
        return problems

    def load_in_steps(self, text: str, now: float, problems: list[str]) -> Iterator[None]:
        """Do the same in steps of some milliseconds: until the last one the keys before are accepted; `problems`: gets
        messages about lines that are left out."""
        keys = dict(self._fixed)
        terms_of: dict[str, KeyTerms] = {terms.name: terms for terms in keys.values()}
        for number, line in enumerate(_LINE_END.split(text), 1):
            if number % KEYS_PER_STEP == 0:
                yield
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                digest, terms = parse_line(line)
                if digest in keys:
                    raise KeyFileError("the key was given before")
                if _OWN_NAME.fullmatch(terms.name) and (
                    terms.name in terms_of or terms.name != _default_name(digest)
                ):
                    raise KeyFileError(f"{terms.name!r} is the name of a key without a name: give another")
                if terms_of.setdefault(terms.name, terms) != terms:
                    raise KeyFileError(f"keys named {terms.name!r} must have the same terms")
            except KeyFileError as error:
                problems.append(f"line {number}: {error}")
            else:
                keys[digest] = terms
        yield from self._install(keys, now)
        self.is_awaited = False

    def authenticate(self, authorization: bytes | None, api_key: bytes | None = None) -> Account:
        """Return the account behind a request's headers, as `account_of` does.

        Raises:
            Unauthorized: they have no key of the table, and the router requires one.
        """
        account = self.account_of(authorization, api_key)
        if account is None:
            raise Unauthorized(
                "missing or wrong API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        return account

    def account_of(self, authorization: bytes | None, api_key: bytes | None = None) -> Account | None:
        """Return the account behind a request's headers, or None.

        Args:
            authorization: the `Authorization` header: `Bearer KEY`, scheme case-insensitive.
            api_key: the `x-api-key` header; it counts if there is no `Authorization`.
        """
        if self.is_open:
            return ANONYMOUS
        if authorization is None and api_key is not None:
            return self._by_digest.get(hashlib.sha256(api_key.strip()).digest())
        scheme, _, key = (authorization or b"").partition(b" ")
        account = self._by_digest.get(hashlib.sha256(key.strip()).digest())
        return account if scheme.lower() == b"bearer" else None

    def account_named(self, name: str) -> Account | None:
        """Return the account of this name (`Account.name`), for work that goes on without its client; None if no key
        has it any more."""
        if self.is_open:
            return ANONYMOUS if name == ANONYMOUS.name else None
        return self._by_name.get(name)

    def _install(self, keys: dict[bytes, KeyTerms], now: float) -> Iterator[None]:
        before, routers = self._by_name, self.routers
        by_name: dict[str, Account] = {}
        for number, (digest, terms) in enumerate(keys.items(), 1):
            if number % KEYS_PER_STEP == 0:
                yield
            if terms.name in by_name:
                continue  # the first key of a name gives its secret
            account = before.get(terms.name)
            if account is None:
                account = Account(terms, now, digest, self.routers)
            else:
                account.apply(terms, now, digest)
            by_name[terms.name] = account
        by_digest: dict[bytes, Account] = {}
        for number, (digest, terms) in enumerate(keys.items(), 1):
            if number % (16 * KEYS_PER_STEP) == 0:
                yield
            by_digest[digest] = by_name[terms.name]
        self._by_name, self._by_digest = by_name, by_digest
        if self.routers != routers:  # meanwhile
            self.divide(self.routers, now)


def parse_line(line: str) -> tuple[bytes, KeyTerms]:
    """Return the digest and the terms of one key.

    Raises:
        KeyFileError: a field is unknown, twice, malformed or out of bounds.
    """
    if _SURROGATE.search(line):
        raise KeyFileError("the line is not in UTF-8")
    key, *words = line.split()
    if key.startswith(_DIGEST_PREFIX):
        digest = _read_digest(key[len(_DIGEST_PREFIX) :])
    else:
        digest = _digest(key)
    fields: dict[str, str | list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise KeyFileError("terms after the key must have the form NAME=VALUE")
        if name not in _FIELDS:
            raise KeyFileError(f"unknown term {_shown(name)}; allowed terms: {', '.join(_FIELDS)}")
        if name in fields:
            raise KeyFileError(f"the term {name} is given twice")
        fields[name] = value.split(",") if name == "models" else value
    if not fields:
        return digest, _default_terms(digest)
    try:
        return digest, msgspec.convert({"name": _default_name(digest), **fields}, KeyTerms, strict=False)
    except msgspec.ValidationError as error:
        raise KeyFileError(str(error)) from None


def _shown(name: str) -> str:
    """Return the name of an unknown term, unless it may be a key in the wrong place, with its padding as the sign."""
    return repr(name) if _TERM.fullmatch(name) else "(not shown, because it may be a key)"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _read_digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise KeyFileError(f"{_DIGEST_PREFIX} must be followed by 64 hexadecimal digits")
    if digest == _digest(""):
        raise KeyFileError("this is the digest of the empty key")
    return digest


def _default_name(digest: bytes) -> str:
    """Files, batches and limits belong to names: one of 32 bits would be another key's, too, among ten thousand."""
    return f"key-{digest.hex()[:32]}"


def _default_terms(digest: bytes) -> KeyTerms:
    return KeyTerms(name=_default_name(digest))


POLL_S = 1.0
SETTLED_NS = 2_000_000_000
"""A file that was written so long before it was read is not written again without a later time."""


class _Content(NamedTuple):
    """The file as it was read."""

    data: bytes
    text: str
    problem: str
    """Why no key of it is accepted; empty if keys are."""
    is_read: bool = True
    """Whether it could be read."""


class ApiKeys:
    """Keeps the key table up to date."""

    def __init__(
        self, keys: Sequence[str], path: Path | None, poll_s: float = POLL_S, *, routers: int = 1
    ) -> None:
        """`routers` divide the keys' limits."""
        self._path = path
        self._poll_s = poll_s
        self._content: bytes | None = None
        self._seen: tuple[int, int, int, int] | None = None
        """By what the file as it was read is known; None if it may have changed in the same moment."""
        self._problem = ""
        """The last one that was logged."""
        self.table = KeyTable(keys, is_closed=path is not None, now=time.monotonic())
        self.table.divide(routers, time.monotonic())
        if path is not None:
            for _ in self._take(self._read(path)):
                pass

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(self._poll_s)
            for _ in self._take(await asyncio.to_thread(self._read, self._path)):
                await asyncio.sleep(0)

    def problems_of(self, path: Path) -> list[str]:
        """Take the keys of another file once; return what the router would log of it."""
        content = self._read(path)
        if content is None:
            return []
        if content.problem:
            return [f"no key is accepted: it {content.problem}"]
        return self.table.load(content.text, time.monotonic())

    def _read(self, path: Path) -> _Content | None:
        """Read the file; None if it has not changed. In a thread."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                signature = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
                if signature == self._seen:
                    return None
                is_settled = found.st_mtime_ns + SETTLED_NS < time.time_ns()
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            # A line that is no UTF-8 denies its own key.
            text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        except (OSError, ValueError) as error:
            self._seen = None
            return _Content(b"", "", f"cannot be read: {error}", is_read=False)
        self._seen = signature if is_settled else None
        return _Content(data, text, "" if text.strip() else f"is empty: {path}")

    def _take(self, content: _Content | None) -> Iterator[None]:
        """Accept the keys of the file as it was read, in steps of some milliseconds."""
        if content is None:
            return
        if content.problem and content.problem != self._problem:
            log.error("no key of the API key file is accepted: it %s", content.problem)
        self._problem = content.problem
        if content.data == self._content or (self.table.is_awaited and not content.is_read):
            return
        self._content = content.data
        problems: list[str] = []
        yield from self.table.load_in_steps(content.text, time.monotonic(), problems)
        for problem in problems:
            log.error("API key file: %s", problem)
