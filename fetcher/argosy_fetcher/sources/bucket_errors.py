"""Failures of object stores: tells apart what a user must do about them.

obstore gives most failures one class and a text, which quotes the HTTP status and the store's error document; both are
read from there. An error document itself is never repeated: some quote parts of the signed request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from obstore.exceptions import BaseError, InvalidPathError

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.sources.unknown_host import names_unknown_host, unknown_host

Provider: TypeAlias = Literal["s3", "gs"]

_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9.]{0,63})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")

_TRANSIENT_STATUSES = {408, 425, 429}
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
    """Return the error to raise instead of what obstore raised."""
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
    if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUSES or status >= 500:
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
