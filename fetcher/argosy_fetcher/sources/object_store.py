"""Object stores: models below a prefix of a bucket, `s3://BUCKET/PREFIX` (S3 and what speaks it) and `gs://BUCKET/PREFIX`.

Owns the listing of a prefix as a snapshot, reads of its objects, where credentials are found, and what a store's
failures mean. Every read asks for the ETag that was listed (If-Match), so that an object that changed meanwhile is
noticed. Clients are obstore's, which sign; they make one attempt a request, because retries are the caller's.

A file's digest is the one that an object `SHA256SUMS` below the prefix names, else the object's ETag where that is an
MD5 sum. A listing does not say whether it is: ETags of multipart uploads have a dash, but those of objects encrypted
with managed keys only look like a sum, as do those of some other stores. Hence one small object is read and compared
before ETags are believed. Objects without a digest are checked by size and ETag.

Credentials for S3, in this order: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; a web identity
(AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE, as EKS sets them for a service account); static keys of AWS_PROFILE in
the AWS tools' files; a container's credentials (AWS_CONTAINER_CREDENTIALS_*); the role of a machine on EC2; else none,
and requests are not signed. The tools' files are left out with a warning if they are malformed and nobody named them.

Credentials for Google, in this order: GOOGLE_BEARER_TOKEN; GOOGLE_SERVICE_ACCOUNT_KEY (the JSON itself);
GOOGLE_APPLICATION_CREDENTIALS (its path); gcloud's own file below HOME, unless it cannot be used, which is a warning;
the service account of a machine on Google Cloud, or of a pod with workload identity there; else none.
STORAGE_EMULATOR_HOST means none.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import hashlib
import json
import logging
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit

import httpx
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import GCSStore, S3Store

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.gguf_files import part_paths
from argosy_fetcher.source import MAX_FILE_BYTES, MAX_FILES, Chunk, Digest, RemoteFile, Snapshot, check_path
from argosy_fetcher.source_uri import SourceUri, gguf_of, is_loopback
from argosy_fetcher.sources.http import (
    MAX_SUMS_BYTES,
    SUMS_FILE,
    is_transient,
    names_unknown_host,
    parse_sha256sums,
    unknown_host,
)
from argosy_fetcher.sources.registry import bucket_name, custom_endpoint, header_value, is_true, read_text
from argosy_protocol import __version__

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ClientConfig, GCSConfig, GCSCredential, RetryConfig, S3Config

CHUNK_BYTES = 1 << 20
"""Smallest chunk that is passed on: what a cut connection loses at most."""
MAX_PROBE_BYTES = 1 << 20
"""Largest object that is read to learn whether ETags are MD5 sums."""
_ETAG = re.compile(r'(W/)?"[!#-~]{1,256}"')
_MD5_ETAG = re.compile(r'"([0-9a-fA-F]{32})"')


class _Listed(NamedTuple):
    """An object, as the listing shows it."""

    size: int
    etag: str
    """In quotes, as headers have it; empty if the store names none."""
    modified: str


class ObjectStoreSource:
    """`Source` of one prefix of one bucket, or of one GGUF file in it.

    Raises:
        InvalidSource: the URI or the endpoint is malformed.
    """

    def __init__(self, uri: SourceUri, credentials: Mapping[str, str]) -> None:
        self._provider: Provider = "s3" if uri.scheme == "s3" else "gs"
        self._bucket, self._prefix = _location(uri)
        self._wanted: tuple[str, ...] = ()
        """Names of the parts of a GGUF file in the folder, if the source is one."""
        if file := gguf_of(uri.name):
            self._prefix = self._prefix.removesuffix(file).rstrip("/")
            self._wanted = part_paths(file)
        self._credentials = credentials
        self._name = bucket_name(uri, credentials)

    @property
    def name(self) -> str:
        return self._name

    @property
    def requested_revision(self) -> str:
        return ""

    def snapshot(self) -> Snapshot:
        listed = _files(self._list(), self.name)
        if self._wanted and not any(path in listed for path in self._wanted):
            raise ModelNotFound(
                f"{self.name}: the bucket has no such object; name a GGUF file of it, or a folder"
            )
        if not listed:
            where = f"below {self._prefix}/" if self._prefix else "in it"
            raise ModelNotFound(
                f"{self.name}: the bucket has no objects {where}; name the folder that holds config.json"
            )
        digests = self._digests(listed)
        files = tuple(
            RemoteFile(path, entry.size, digests.get(path), entry.etag)
            for path, entry in sorted(listed.items())
        )
        return Snapshot(self.name, _revision(listed), files)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        if start >= stop:
            return
        options: GetOptions = {"range": (start, stop)}
        if file.version and not file.version.startswith("W/"):
            options["if_match"] = file.version
        key = f"{self._prefix}/{file.path}" if self._prefix else file.path
        left = stop - start
        store, bucket = self._client
        with explained(bucket, file.path):
            result = store.get(key, options=options)
            if _is_other(result.meta, file):
                raise SourceChanged(f"{self.name}: {file.path} has changed since it was listed; fetch again")
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(chunk)[:left]
                left -= min(left, len(chunk))

    def close(self) -> None:
        self.__dict__.pop("_client", None)

    @functools.cached_property
    def _client(self) -> tuple[S3Store | GCSStore, Bucket]:
        return open_bucket(self.name, self._provider, self._bucket, self._credentials)

    def _list(self) -> dict[str, _Listed]:
        """Objects below the prefix by their path below it; some are folders."""
        start = f"{self._prefix}/" if self._prefix else ""
        found: dict[str, _Listed] = {}
        store, bucket = self._client
        with explained(bucket):
            for page in store.list(self._prefix or None, chunk_size=1000):
                for item in page:
                    if not item["path"].startswith(start) or item["path"] == start.rstrip("/"):
                        continue  # obstore cuts the slash off a name such as `PREFIX/`, which is the folder itself
                    path = item["path"][len(start) :]
                    if self._wanted and path not in (*self._wanted, SUMS_FILE):
                        continue
                    found[path] = _Listed(item["size"], _etag(item), item["last_modified"].isoformat())
                    if len(found) > MAX_FILES:
                        raise UnsupportedModel(
                            f"{self.name}: more than {MAX_FILES} objects; name the folder that holds config.json"
                        )
        return found

    def _digests(self, listed: Mapping[str, _Listed]) -> dict[str, Digest]:
        digests: dict[str, Digest] = {}
        if (entry := listed.get(SUMS_FILE)) is not None:
            if entry.size > MAX_SUMS_BYTES:
                raise UnsupportedModel(f"{self.name}: {SUMS_FILE} is too large: {entry.size} bytes")
            digests = parse_sha256sums(self._content(SUMS_FILE, entry), self.name)
        sums = {
            path: match[1].lower()
            for path, entry in listed.items()
            if path not in digests and (match := _MD5_ETAG.fullmatch(entry.etag))
        }
        small = [(listed[path].size, path) for path in sums if 0 < listed[path].size <= MAX_PROBE_BYTES]
        if small:
            _, path = min(small)
            content = self._content(path, listed[path])
            if hashlib.md5(content, usedforsecurity=False).hexdigest() == sums[path]:
                digests |= {path: Digest("md5", sum_) for path, sum_ in sums.items()}
        return digests

    def _content(self, path: str, entry: _Listed) -> bytes:
        content = b"".join(self.read(RemoteFile(path, entry.size, version=entry.etag), 0, entry.size))
        if len(content) != entry.size:
            raise TransientError(f"{self.name}: {path} ended early")
        return content


def _location(uri: SourceUri) -> tuple[str, str]:
    """Bucket and prefix of a URI."""
    bucket, _, prefix = uri.location.partition("/")
    try:
        return bucket, check_path(prefix) if prefix else ""
    except UnsupportedModel:
        raise InvalidSource(f"{uri.name}: the prefix must be a path that files can have too") from None


def _files(found: Mapping[str, _Listed], source: str) -> dict[str, _Listed]:
    """Leave out empty objects that stand for folders, and what a store of models has put beside its files."""
    folders = {path[:end] for path in found for end in range(len(path)) if path[end] == "/"}
    files = {}
    for path, entry in found.items():
        if any(part.startswith(".argosy") for part in path.split("/")) or (
            path in folders and entry.size == 0
        ):
            continue
        if path in folders:
            raise UnsupportedModel(f"{source}: {path!r} is an object and a folder at once")
        if entry.size > MAX_FILE_BYTES:
            raise UnsupportedModel(f"{source}: {path!r} is too large: {entry.size} bytes")
        files[check_path(path)] = entry
    return files


def _revision(listed: Mapping[str, _Listed]) -> str:
    lines = (
        f"{path}\0{entry.size}\0{entry.etag or entry.modified}\n" for path, entry in sorted(listed.items())
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def _etag(meta: ObjectMeta) -> str:
    """An object's ETag in quotes; empty if it has none that a header could carry."""
    etag = meta["e_tag"] or ""
    etag = etag if etag.endswith('"') else f'"{etag}"'
    return etag if _ETAG.fullmatch(etag) else ""


def _is_other(meta: ObjectMeta, file: RemoteFile) -> bool:
    """Whether an object is not the one that was listed, told for stores that do not know If-Match."""
    etag = _etag(meta).removeprefix("W/")
    return meta["size"] != file.size or bool(
        etag and file.version and etag != file.version.removeprefix("W/")
    )


CONNECT_TIMEOUT = timedelta(seconds=10)
READ_TIMEOUT = timedelta(seconds=30)
"""Longest silence while a response arrives."""
REQUEST_TIMEOUT = timedelta(minutes=10)
"""Longest duration of a request and its response; a part on a slow line is then continued by another request."""
_ONE_ATTEMPT: RetryConfig = {"max_retries": 0}
_AWS = "https://s3.amazonaws.com"
_GOOGLE = "https://storage.googleapis.com"


def open_bucket(
    source: str, provider: Provider, name: str, credentials: Mapping[str, str]
) -> tuple[S3Store | GCSStore, Bucket]:
    """Return a client and its bucket. Makes no request, except to the metadata service of a machine on EC2.

    Args:
        source: name of the model's source, for errors.
        name: the bucket.

    Raises:
        AccessDenied: credentials are incomplete, or of a kind that is not supported.
        InvalidSource: the endpoint or the certificates cannot be used.
    """
    endpoint = custom_endpoint(provider, credentials)
    options = _options(endpoint, credentials)
    try:
        if provider == "s3":
            return _open_s3(source, name, endpoint, credentials, options)
        return _open_google(source, name, endpoint, credentials, options)
    except BaseError:
        # its text quotes what it could not read, which may be a key
        raise AccessDenied(f"{source}: the credentials cannot be used; check their files and names") from None


def _open_s3(
    source: str, name: str, endpoint: str, credentials: Mapping[str, str], options: ClientConfig
) -> tuple[S3Store | GCSStore, Bucket]:
    config = s3_config(source, credentials)
    if endpoint:
        config["endpoint"] = endpoint
    store = S3Store(name, config=config, client_options=options, retry_config=_ONE_ATTEMPT)
    is_anonymous = config.get("skip_signature", False)
    return store, Bucket(source, name, "s3", endpoint or _AWS, is_anonymous)


def _open_google(
    source: str, name: str, endpoint: str, credentials: Mapping[str, str], options: ClientConfig
) -> tuple[S3Store | GCSStore, Bucket]:
    config, token = google_access(source, credentials)
    is_anonymous = config.get("skip_signature", False)
    is_plain = endpoint.startswith("http://") and not is_loopback(urlsplit(endpoint).hostname or "")
    if is_plain and not is_anonymous:
        raise InvalidSource(f"{source}: {endpoint} would show the credentials to the network; use https")
    if endpoint:
        config["base_url"] = endpoint

    def give_token() -> GCSCredential:
        return {"token": token, "expires_at": None}

    # with a provider obstore looks for no files, so that a broken one does not matter to anonymous reads
    provider = give_token if token or is_anonymous else None
    store = GCSStore(
        name, config=config, client_options=options, retry_config=_ONE_ATTEMPT, credential_provider=provider
    )
    return store, Bucket(source, name, "gs", endpoint or _GOOGLE, is_anonymous)


def _options(endpoint: str, credentials: Mapping[str, str]) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "timeout": REQUEST_TIMEOUT,
        "user_agent": f"argosy-fetcher/{__version__}",
    }
    if bundle := credentials.get("AWS_CA_BUNDLE") or credentials.get("SSL_CERT_FILE"):
        try:
            ssl.create_default_context(cafile=bundle)
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise InvalidSource(f"the certificates in {bundle} cannot be used: {error.strerror}") from None
    return options


Provider: TypeAlias = Literal["s3", "gs"]
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9.]{0,63})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")

_TRANSIENT_CODES = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted", "Busy",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "ThrottlingException", "TooManyRequestsException",
}  # fmt: skip
_UNKNOWN_KEY_CODES = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_REGION_CODES = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}  # fmt: skip
_MISSING_BUCKET_CODES = {"NoSuchBucket", "InvalidBucketName"}
_ARCHIVED_CODES = {"InvalidObjectState"}
_TRANSPORT = ("HTTP error", "request or response body", "error decoding response", "response body:")
_BAD_CERTIFICATE = re.compile(r"InvalidCertificate|UnknownIssuer|invalid peer certificate")
_CREDENTIALS_REMEDY = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or allow public reads of the bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or allow public reads of the bucket",
}
_PERMISSIONS = {
    "s3": "s3:ListBucket on the bucket and s3:GetObject on its objects",
    "gs": "storage.objects.list and storage.objects.get on the bucket",
}
_CREDENTIALS_NAMES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_ENDPOINT_NAME = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST and GOOGLE_BASE_URL"}


@dataclass(frozen=True)
class Bucket:
    """What errors say about a bucket."""

    source: str
    """Name of the model's source."""
    name: str
    provider: Provider
    endpoint: str
    """Base URL of the store, without credentials."""
    is_anonymous: bool


@contextlib.contextmanager
def explained(bucket: Bucket, path: str | None = None) -> Iterator[None]:
    """Raise what obstore raises as an error of the fetcher.

    Args:
        path: path of the file that is read; None while the bucket is listed.
    """
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise explain(error, bucket, path) from None


def explain(error: Exception, bucket: Bucket, path: str | None) -> FetchError | TransientError:
    """Return the error to raise instead of what obstore raised.

    obstore gives most failures one class and a text, which quotes the HTTP status and the store's error document; both
    are read from there. An error document itself is never repeated: some quote parts of the signed request.
    """
    text, _, details = str(error).partition("\n\nDebug source:")
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    code = match[1] if (match := _CODE.search(text)) else ""
    answer = code or f"HTTP {status}"
    where = f"{bucket.source}: {path}" if path else bucket.source
    if isinstance(error, InvalidPathError):
        return UnsupportedModel(
            f"{where}: an object's name has an empty part, `.`, `..` or control characters"
        )
    if status == 0:
        return _unanswered(text, details, bucket, where)
    if code in _TRANSIENT_CODES or is_transient(status):
        return TransientError(f"{where}: the store is busy or out of order ({answer})")
    if "token request" in text:  # the store was not asked yet
        return AccessDenied(
            f"{where}: no token for the credentials ({answer}); check {_CREDENTIALS_NAMES[bucket.provider]}"
        )
    if code == "RequestTimeTooSkewed":
        return FetchError(
            f"{where}: the clocks of this machine and of the store differ too much; set this one"
        )
    if code in _WRONG_REGION_CODES or 300 <= status < 400:
        return _wrong_region(where, text)
    if code in _MISSING_BUCKET_CODES or (status == 404 and path is None):
        return ModelNotFound(
            f"{where}: {bucket.endpoint} has no bucket {bucket.name!r}; check its name and "
            f"{_ENDPOINT_NAME[bucket.provider]}"
        )
    if code in _ARCHIVED_CODES:
        return FetchError(f"{where}: the object is archived; restore it to a class that can be read at once")
    if status in (401, 403) or code in _UNKNOWN_KEY_CODES | _EXPIRED_CODES:
        return AccessDenied(f"{where}: {_denial(bucket, code, answer)}")
    if status in (404, 412, 416):
        return SourceChanged(f"{where}: the object has changed since it was listed; fetch again")
    return FetchError(f"{where}: the store answers {answer}")


def _unanswered(text: str, details: str, bucket: Bucket, where: str) -> FetchError | TransientError:
    """Failures without a status of the store: none came, or what came makes no sense."""
    if "redirect without LOCATION" in text:
        return _wrong_region(where, text)
    if _BAD_CERTIFICATE.search(text) or _BAD_CERTIFICATE.search(details):
        return FetchError(
            f"{where}: the certificate of {bucket.endpoint} is not trusted; name a file with its authority's "
            "certificate in AWS_CA_BUNDLE or SSL_CERT_FILE"
        )
    if "non-partial response" in text:
        return FetchError(f"{where}: {bucket.endpoint} cannot read parts of objects (Range)")
    if "Requested" in text and ", got" in text:
        return SourceChanged(f"{where}: the object has changed since it was listed; fetch again")
    if "Got invalid list response" in text:
        return FetchError(
            f"{where}: {bucket.endpoint} does not answer as an object store; check "
            f"{_ENDPOINT_NAME[bucket.provider]}"
        )
    if "builder error" in text:
        return FetchError(f"{where}: {bucket.endpoint} cannot be used as an endpoint")
    if names_unknown_host(details):
        return unknown_host(where, bucket.endpoint, _ENDPOINT_NAME[bucket.provider])
    if any(phrase in text for phrase in _TRANSPORT):
        return TransientError(f"{where}: no connection to {bucket.endpoint}, or it was cut")
    return FetchError(
        f"{where}: the client of the object store failed: {text.splitlines()[0][:200] if text else ''}"
    )


def _wrong_region(where: str, text: str) -> FetchError:
    region = match[1] if (match := _REGION.search(text)) else ""
    remedy = f"AWS_REGION={region}" if region else "AWS_REGION to the bucket's region"
    return FetchError(f"{where}: the bucket lies in another region or at another endpoint; set {remedy}")


def _denial(bucket: Bucket, code: str, answer: str) -> str:
    if bucket.is_anonymous:
        return f"access denied ({answer}) without credentials; {_CREDENTIALS_REMEDY[bucket.provider]}"
    names = _CREDENTIALS_NAMES[bucket.provider]
    if code in _EXPIRED_CODES:
        return f"the credentials have expired ({code}); renew {names}"
    if code in _UNKNOWN_KEY_CODES:
        return f"{bucket.endpoint} does not accept the credentials ({code}); check {names}"
    return f"access denied ({answer}); the credentials need {_PERMISSIONS[bucket.provider]}"


_log = logging.getLogger(__name__)
_DEFAULT_PROFILE = "default"


def s3_config(source: str, credentials: Mapping[str, str]) -> S3Config:
    """Return credentials and region for obstore; `skip_signature` is set if there are no credentials. Makes no request,
    except to the metadata service of a machine on EC2.

    Args:
        source: name of the model's source, for errors.

    Raises:
        AccessDenied: credentials are incomplete, malformed or of a kind that is not supported.
    """
    config = _credentials(source, credentials)
    if region := _region(source, credentials):
        config["region"] = region
    return config


def _credentials(source: str, credentials: Mapping[str, str]) -> S3Config:
    if is_true(credentials, "AWS_SKIP_SIGNATURE"):
        return {"skip_signature": True}
    key, secret = credentials.get("AWS_ACCESS_KEY_ID", ""), credentials.get("AWS_SECRET_ACCESS_KEY", "")
    if bool(key) != bool(secret):
        raise AccessDenied(f"{source}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are needed together")
    if key:
        return _keys(source, key, secret, credentials.get("AWS_SESSION_TOKEN", ""))
    if _are_set(credentials, "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        return _named(
            credentials, "role_arn", "web_identity_token_file", "role_session_name", "endpoint_url_sts"
        )
    if (config := _profile_keys(source, credentials)) is not None:
        return config
    if _are_set(credentials, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return _named(credentials, "container_credentials_relative_uri")
    if _are_set(credentials, "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        return _named(credentials, "container_credentials_full_uri", "container_authorization_token_file")
    if metadata := role_service(credentials):
        return {"metadata_endpoint": metadata}
    return {"skip_signature": True}


def _are_set(credentials: Mapping[str, str], *names: str) -> bool:
    return all(credentials.get(name) for name in names)


def _named(credentials: Mapping[str, str], *keys: str) -> S3Config:
    """Return obstore's options that are named like the variables of the AWS tools, as far as these are set."""
    found = {key: credentials.get(f"AWS_{key.upper()}") for key in keys}
    return cast("S3Config", {key: value for key, value in found.items() if value})


def _keys(source: str, key: str, secret: str, token: str) -> S3Config:
    config: S3Config = {
        "access_key_id": header_value(source, "AWS_ACCESS_KEY_ID", key),
        "secret_access_key": header_value(source, "AWS_SECRET_ACCESS_KEY", secret),
    }
    if token:
        config["session_token"] = header_value(source, "AWS_SESSION_TOKEN", token)
    return config


def _profile_keys(source: str, credentials: Mapping[str, str]) -> S3Config | None:
    """Static keys of the profile; None if there are none and none was asked for."""
    profile = credentials.get("AWS_PROFILE") or _DEFAULT_PROFILE
    section = _section(source, credentials, "AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    key, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if key and secret:
        return _keys(source, key, secret, section.get("aws_session_token", ""))
    if credentials.get("AWS_PROFILE"):
        raise AccessDenied(
            f"{source}: the AWS tools' credentials file has no keys for the profile {profile!r}; for other kinds of "
            f"profiles run `eval $(aws configure export-credentials --profile {profile} --format env)`"
        )
    return None


def _region(source: str, credentials: Mapping[str, str]) -> str:
    """The region as named, or as the profile has it; empty if neither."""
    named = credentials.get("AWS_REGION") or credentials.get("AWS_DEFAULT_REGION")
    if not named:
        profile = credentials.get("AWS_PROFILE") or _DEFAULT_PROFILE
        section = profile if profile == _DEFAULT_PROFILE else f"profile {profile}"
        named = _section(source, credentials, "AWS_CONFIG_FILE", "config", section).get("region", "")
    return header_value(source, "AWS_REGION", named)


def _section(
    source: str, credentials: Mapping[str, str], variable: str, file_name: str, section: str
) -> Mapping[str, str]:
    """A section of a file of the AWS tools; empty if there is none.

    Args:
        variable: names the file; without it, it is `.aws/FILE_NAME` below HOME.
    """
    if named := credentials.get(variable):
        path = Path(named).expanduser()
    elif home := credentials.get("HOME"):
        path = Path(home, ".aws", file_name)
    else:
        return {}
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(read_text(path))
    except OSError:
        return {}
    except (configparser.Error, ValueError):
        # not the parser's text, which quotes lines
        if named or credentials.get("AWS_PROFILE"):
            raise AccessDenied(f"{source}: {path} is not a file of the AWS tools") from None
        _log.warning("%s is not a file of the AWS tools; it is not used", path)
        return {}
    return parser[section] if parser.has_section(section) else {}


PROBE_TIMEOUT_S: Final = 1.0
"""As in AWS's tools: the service runs beside the machine."""
VENDOR_FILE: Final = Path("/sys/class/dmi/id/sys_vendor")
_ADDRESS: Final = "http://169.254.169.254"
_ROLES: Final = "/latest/meta-data/iam/security-credentials/"


def role_service(credentials: Mapping[str, str], vendor_file: Path = VENDOR_FILE) -> str:
    """Return the URL of the service that gives out credentials of this machine's role; empty if it has none.

    AWS's tools ask the service's address on every machine. Here only machines whose firmware is Amazon's do, because
    elsewhere nobody answers there, and public buckets should not wait for that. A machine without a role, and a pod
    that is kept from the service, read public buckets.

    AWS_METADATA_ENDPOINT names the service and says that there is a role; AWS_EC2_METADATA_SERVICE_ENDPOINT names it,
    and AWS_EC2_METADATA_DISABLED forbids to ask it.
    """
    if is_true(credentials, "AWS_EC2_METADATA_DISABLED"):
        return ""
    if named := credentials.get("AWS_METADATA_ENDPOINT"):
        return named
    url = credentials.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or (_ADDRESS if is_ec2(vendor_file) else "")
    url = url.rstrip("/")
    return url if url and _has_role(url) else ""


def is_ec2(vendor_file: Path) -> bool:
    """Whether a machine's firmware, as this file names its vendor, is that of EC2."""
    try:
        return vendor_file.read_text("utf-8").strip() == "Amazon EC2"
    except (OSError, ValueError):
        return False


def _has_role(url: str) -> bool:
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            token = client.put(
                f"{url}/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            )
            token.raise_for_status()
            roles = client.get(f"{url}{_ROLES}", headers={"X-aws-ec2-metadata-token": token.text})
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return roles.status_code == 200 and bool(roles.text.strip())


_MACHINE = Path("/sys/class/dmi/id/product_name")
_GCLOUD_FILE = ".config/gcloud/application_default_credentials.json"
_TYPES = ("service_account", "authorized_user")


def google_access(source: str, credentials: Mapping[str, str]) -> tuple[GCSConfig, str]:
    """Return how to authorize requests: configuration for obstore, in which `skip_signature` is set if there are no
    credentials, and a token to send as it is, if not empty. Makes no request.

    Args:
        source: name of the model's source, for errors.

    Raises:
        AccessDenied: credentials are malformed, or of a kind that is not supported.
    """
    if credentials.get("STORAGE_EMULATOR_HOST") or is_true(credentials, "GOOGLE_SKIP_SIGNATURE"):
        return {"skip_signature": True}, ""
    if token := credentials.get("GOOGLE_BEARER_TOKEN"):
        return {}, header_value(source, "GOOGLE_BEARER_TOKEN", token)
    if key := credentials.get("GOOGLE_SERVICE_ACCOUNT_KEY"):
        return {"service_account_key": key}, ""
    if (path := _credentials_file(source, credentials)) is not None:
        return {"application_credentials": str(path)}, ""
    if _has_metadata(credentials):
        return {}, ""
    return {"skip_signature": True}, ""


def _credentials_file(source: str, credentials: Mapping[str, str]) -> Path | None:
    if named := credentials.get("GOOGLE_APPLICATION_CREDENTIALS"):
        path = Path(named).expanduser()
    else:
        path = Path(credentials.get("HOME", "/nonexistent"), _GCLOUD_FILE)
        if not path.is_file():
            return None
    if (fault := _fault(path)) is None:
        return path
    if named:
        raise AccessDenied(f"{source}: {path} {fault}")
    _log.warning("%s %s; it is not used", path, fault)
    return None


def _fault(path: Path) -> str | None:
    """What is wrong with a file of credentials; None if nothing."""
    try:
        kind = json.loads(read_text(path))["type"]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return "is not a file of Google credentials"
    if kind not in _TYPES:
        return (
            f"has credentials of a type other than {' and '.join(_TYPES)}; set "
            "GOOGLE_BEARER_TOKEN=$(gcloud auth print-access-token)"
        )
    return None


def _has_metadata(credentials: Mapping[str, str]) -> bool:
    """Whether this machine gives out tokens of a service account, told as google-auth does: by its firmware's name."""
    if credentials.get("GCE_METADATA_HOST"):
        return True
    try:
        return _MACHINE.read_text("utf-8").startswith("Google")
    except (OSError, ValueError):
        return False
