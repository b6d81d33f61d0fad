"""Source URIs: the grammar of places where models are.

Owns parsing and its bounds. Must not know stores, protocols or credentials. Invariant: no text that this module returns
or raises has a credential in it: a URL's query may be a signature, and is neither taken nor shown.

    hf://ORG/NAME[@REVISION]                 a repository of a Hugging Face hub
    hf://ORG/NAME:QUANT[@REVISION]           one GGUF file of it, as in llama.cpp and vLLM, such as :Q4_K_M
    s3://BUCKET[/PREFIX], gs://BUCKET[/PREFIX]
    s3://BUCKET/PATH.gguf, gs://BUCKET/PATH.gguf    one GGUF file; of one in parts the first
    oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]
    https://HOST[:PORT]/PATH/SHA256SUMS      a folder with a list of its files; http:// for loopback addresses only
    file://PATH, pvc://CLAIM/PATH, builtin://NAME    local, never fetched
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from argosy_fetcher.errors import InvalidSource

RemoteScheme = Literal["hf", "s3", "gs", "oci", "https", "http"]
LocalScheme = Literal["file", "pvc", "builtin"]
REMOTE: Final[tuple[str, ...]] = get_args(RemoteScheme)
LOCAL: Final[tuple[str, ...]] = get_args(LocalScheme)

MAX_URI_CHARACTERS: Final = 4096
MAX_REVISION_CHARACTERS: Final = 255
"""The longest file name of common file systems, and so the longest branch of a repository on one."""

_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB: Final = re.compile(
    rf"(?P<location>{_HUB_NAME}/{_HUB_NAME})(?::(?P<quantization>{_HUB_NAME}))?(?:@(?P<revision>.*))?",
    re.DOTALL,
)
_REVISION: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._/+-]{{0,{MAX_REVISION_CHARACTERS - 1}}}")
_BUCKET: Final = {
    "s3": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
}
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    r"(?P<host>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:]{2,45}\])(?::[0-9]{1,5})?)"
    rf"/(?P<repository>{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MAX_REPOSITORY_CHARACTERS: Final = 255
_IMAGE_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|sha256:[0-9a-f]{64}")
_LISTING: Final = "SHA256SUMS"


class SourceUri(Struct, frozen=True):
    """A parsed source. `str()` gives it back in its canonical form."""

    scheme: RemoteScheme | LocalScheme
    location: str
    """What stands between `://` and the revision, such as `Qwen/Qwen3-0.6B` or `BUCKET/PREFIX`."""
    revision: str = ""
    """As the user wrote it: a branch, tag or commit of a hub, a tag or `sha256:DIGEST` of an image. Empty if
    none."""
    quantization: str = ""
    """Which GGUF file of a hub's repository is meant, in capitals; empty if the model is in Hugging Face's layout."""

    @property
    def is_remote(self) -> bool:
        """Whether the model has to be fetched."""
        return self.scheme in REMOTE

    @property
    def is_gguf(self) -> bool:
        """Whether it is one GGUF file, and not a model in Hugging Face's layout."""
        return bool(gguf_of(self.name))

    @property
    def name(self) -> str:
        """The URI without revision."""
        return f"{self.scheme}://{self.location}" + (f":{self.quantization}" if self.quantization else "")

    def __str__(self) -> str:
        if not self.revision:
            return self.name
        is_tag = self.scheme == "oci" and not self.revision.startswith("sha256:")
        return f"{self.name}{':' if is_tag else '@'}{self.revision}"

    def at_revision(self, revision: str) -> SourceUri:
        """Return the same source at another revision.

        Raises:
            InvalidSource: the revision is malformed or differs from the one in the URI, or the scheme has none.
        """
        if not revision or revision == self.revision:
            return self
        if self.revision:
            raise InvalidSource(
                f"{self}: the source names another revision than {_shown(revision)}; give one of them"
            )
        if self.scheme == "hf":
            return replace(self, revision=_hub_revision(str(self), revision))
        if self.scheme == "oci" and _IMAGE_REVISION.fullmatch(revision):
            return replace(self, revision=revision)
        if self.scheme == "oci":
            raise InvalidSource(f"{self}: the revision {_shown(revision)} must be a tag or sha256:DIGEST")
        raise InvalidSource(f"{self}: {self.scheme}:// has no revisions; leave out {_shown(revision)}")


def parse(text: str) -> SourceUri:
    """Parse a URI.

    Raises:
        InvalidSource: the scheme is missing or unknown, or the rest does not follow its grammar.
    """
    if len(text) > MAX_URI_CHARACTERS:
        raise InvalidSource(
            f"a model's source has at most {MAX_URI_CHARACTERS} characters, this one {len(text)}"
        )
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in (*REMOTE, *LOCAL):
        known = ", ".join(f"{name}://" for name in (*REMOTE, *LOCAL) if name != "http")
        raise InvalidSource(f"model source {_shown(scheme)}: must begin with one of {known}")
    if not text.isprintable():
        raise InvalidSource(f"model source {_shown(rest, f'{scheme}://')}: it has control characters")
    if scheme == "hf":
        return _parse_hub(rest)
    if scheme in _BUCKET:
        return _parse_bucket("s3" if scheme == "s3" else "gs", rest)
    if scheme == "oci":
        return _parse_image(rest)
    if scheme in ("https", "http"):
        return _parse_url(text)
    if not rest:
        raise InvalidSource(f"model source {scheme}://: nothing follows")
    return SourceUri("file" if scheme == "file" else "pvc" if scheme == "pvc" else "builtin", rest)


def from_argument(text: str) -> SourceUri:
    """Parse a model as people type it: a URI, a directory, or `ORG/NAME[:QUANT][@REVISION]` for the hub.

    What exists on this machine is a directory, even if its name has the form of a repository's; `hf://` says otherwise.

    Raises:
        InvalidSource: as `parse`.
    """
    if "://" in text:
        return parse(text)
    if _exists(text) or not (found := _HUB.fullmatch(text)):
        return SourceUri("file", text)
    return _parse_hub(found[0])


def gguf_of(source: str) -> str:
    """Return which GGUF file a source is, given its canonical name with or without an endpoint: of a hub the
    quantisation, of a bucket the name of the file; empty if it is none."""
    scheme, _, location = source.partition("://")
    if scheme == "hf":
        found = _HUB.fullmatch(location.partition("?")[0])
        return (found["quantization"] or "") if found else ""
    file = location.partition("?endpoint=")[0].rpartition("/")[2]
    return file if scheme in _BUCKET and file.endswith(".gguf") else ""


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, or a home directory of nobody
        return False


def _parse_hub(rest: str) -> SourceUri:
    found = _HUB.fullmatch(rest)
    if found is None:
        raise InvalidSource(
            f"model source {_shown(rest, 'hf://')}: must be hf://ORG/NAME or hf://ORG/NAME@REVISION, or "
            f"hf://ORG/NAME:QUANT for a GGUF file{_old_name(rest)}"
        )
    uri = SourceUri("hf", found["location"], quantization=(found["quantization"] or "").upper())
    revision = found["revision"]
    return uri if revision is None else replace(uri, revision=_hub_revision(str(uri), revision))


def _old_name(rest: str) -> str:
    """What to say about a name from before repositories had organisations: the end of a message, or nothing."""
    if not re.fullmatch(rf"{_HUB_NAME}(?:@.*)?", rest):
        return ""
    return "; the hub's page of a model with an old name shows the whole one: gpt2 is openai-community/gpt2"


def _hub_revision(name: str, revision: str) -> str:
    is_sound = _REVISION.fullmatch(revision) and ".." not in revision and "//" not in revision
    if not is_sound or revision.endswith(("/", ".lock")):
        order = "; a GGUF file of it is ORG/NAME:QUANT@REVISION" if ":" in revision else ""
        raise InvalidSource(
            f"{name}: the revision {_shown(revision)} must be a branch, a tag or a commit{order}"
        )
    return revision


def _parse_bucket(scheme: Literal["s3", "gs"], rest: str) -> SourceUri:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET[scheme].fullmatch(bucket) or ".." in bucket:
        raise InvalidSource(
            f"model source {_shown(rest, f'{scheme}://')}: {_shown(bucket)} is no name of a bucket: give "
            f"{scheme}://BUCKET/PREFIX, where BUCKET is three or more lower-case letters, digits, '-' and '.'"
        )
    if any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise InvalidSource(
            f"model source {_shown(rest, f'{scheme}://')}: the prefix has an empty or a dotted part"
        )
    return SourceUri(scheme, f"{bucket}/{prefix}" if prefix else bucket)


def _parse_image(rest: str) -> SourceUri:
    found = _IMAGE.fullmatch(rest)
    if found is None or len(found["repository"]) > _MAX_REPOSITORY_CHARACTERS:
        raise InvalidSource(
            f"model source {_shown(rest, 'oci://')}: must be oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]"
        )
    # A digest is exact; a tag beside it is a comment, as in container runtimes.
    return SourceUri("oci", f"{found['host']}/{found['repository']}", found["digest"] or found["tag"] or "")


def _parse_url(text: str) -> SourceUri:
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port  # the port is checked when it is read
    except ValueError:
        raise InvalidSource("model source https://...: the URL's host or port is malformed") from None
    if "@" in url.netloc:
        raise InvalidSource(
            f"model source {url.scheme}://{host}...: a URL must not have credentials in it; "
            "give them through the environment"
        )
    if not host:
        raise InvalidSource(f"model source {url.scheme}://...: the URL has no host")
    if url.scheme == "http" and not is_loopback(host):
        raise InvalidSource(
            f"model source http://{host}...: http:// is for loopback addresses only; use https://"
        )
    if url.query or url.fragment or url.path.rpartition("/")[2] != _LISTING:
        raise InvalidSource(
            f"model source {url.scheme}://{host}...: must be https://HOST/PATH/{_LISTING}, without a query and a "
            f"fragment. Archives are not read over https://: unpack the model there and list its files (sha256sum * > "
            f"{_LISTING}), or push it to a registry (oci://) or a bucket (s3://, gs://)"
        )
    return SourceUri("https" if url.scheme == "https" else "http", f"{url.netloc.lower()}{url.path}")


def is_loopback(host: str) -> bool:
    """Whether a host of a URL, without brackets, is this machine. Only such hosts are spoken to without encryption,
    unless an endpoint is configured so."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(text: str, scheme: str = "") -> str:
    """Quote a text of the user's for a message: bounded, and without a query or what stands before a host's @."""
    head, slash, tail = text.partition("?")[0].partition("/")
    return repr(scheme + (head.rpartition("@")[2] + slash + tail)[:200])
