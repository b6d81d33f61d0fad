"""Errors returned to clients, in OpenAI's format.

ApiError
├── BadRequest            400  invalid_request_error   the client must change the request
│   └── ContextLengthExceeded  400, code context_length_exceeded
├── Unauthorized          401  authentication_error    the client must present a key
├── Forbidden             403  permission_error        not allowed with any key
├── NotFound              404  not_found_error         unknown model or route
│   └── ResponseNotFound       invalid_request_error   no stored response or item has this id, or it is another's
├── MethodNotAllowed      405  invalid_request_error
├── PayloadTooLarge       413  invalid_request_error
├── HeadersTooLarge       431  invalid_request_error
├── RequestTimeout        408  timeout_error           the client was too slow sending
├── TooManyRequests       429  rate_limit_error        retry after the hint
├── InternalError         500  internal_error
├── BadGateway            502  upstream_error          a replica failed and no other could take over
├── Unavailable           503  service_unavailable     retry after the hint
│   ├── ResourceUnavailable    code resource_busy      what requests like this one need is busy; others are answered
│   └── StorageUnavailable     code storage_unavailable
│       └── StorageFull   507  code storage_full
└── GatewayTimeout        504  timeout_error

Messages are written for the client: they contain no addresses, paths or tracebacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import msgspec
from msgspec import Struct

from argosy_protocol.headers import RESOURCE_BUSY

MAX_REASON_BYTES: Final = 16 * 1024
"""A body beyond it is no error of the API, and is not read for its reason."""
_MAX_WORD: Final = 64
_NAME: Final = r"_?[A-Za-z]{1,32}[0-9]{0,3}(?:_[A-Za-z]{1,32}[0-9]{0,3})*"
_HARMLESS: Final = re.compile(rf"{_NAME}(?:\.{_NAME}|\[[0-9]{{1,6}}\])*")
"""Names of fields and the paths of such names. Keys and tokens do not match: they have hyphens, or digits among their
letters."""


class ErrorReason(NamedTuple):
    """What a log may tell of an error: words that match a harmless pattern, and empty where one does not."""

    type: str = ""
    code: str = ""
    param: str = ""

    @classmethod
    def of(cls, type_: object, code: object, param: object) -> ErrorReason:
        """Take what is harmless of values that a client or an engine may have chosen."""
        return cls(_harmless(type_), _harmless(code), _harmless(param))

    @classmethod
    def read(cls, body: bytes) -> ErrorReason:
        """Read the reason from an answer's body: of OpenAI's or Anthropic's shape, or of OpenAI's without `error`
        around it, as SGLang's. Nothing is read from other bodies."""
        if len(body) > MAX_REASON_BYTES:
            return NO_REASON
        try:
            answer = _decode_answer(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return NO_REASON
        given = answer.error if answer.error is not None else answer
        code = given.code
        if code is None and isinstance(given.details, dict):
            code = given.details.get("error_code")
        return cls.of(given.type, code, given.param)


NO_REASON: Final = ErrorReason()


class _GivenError(Struct):
    type: object = None
    code: object = None
    param: object = None
    details: object = None


class _GivenAnswer(_GivenError):
    error: _GivenError | None = None


_decode_answer = msgspec.json.Decoder(_GivenAnswer).decode


def _harmless(value: object) -> str:
    if isinstance(value, str) and len(value) <= _MAX_WORD and _HARMLESS.fullmatch(value) is not None:
        return value
    return ""


class ErrorBody(Struct, frozen=True):
    """As OpenAI's: `code` is a text that programs may compare, or null, and never the status."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct, frozen=True):
    """`{"error": {"message", "type", "param", "code"}}`."""

    error: ErrorBody


class ApiError(Exception):
    """Base class; `http_status` and `error_type` are set per class, the rest per instance."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"
    default_code: ClassVar[str | None] = None
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        model: str = "",
    ) -> None:
        """`model` is the main name of a model, quoted in the message, which the client may have called otherwise."""
        super().__init__(message)
        self.message = message
        self.model = model
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def name_as_asked(self, asked: str) -> None:
        """Have the message name the model as the client did."""
        if self.model and asked:
            self.message = self.message.replace(repr(self.model), repr(asked), 1)
            self.model = asked

    def body(self) -> bytes:
        return msgspec.json.encode(
            ErrorResponse(ErrorBody(self.message, self.error_type, self.param, self.code))
        )

    def reason(self) -> ErrorReason:
        """Return what a log may tell of the error."""
        return ErrorReason.of(self.error_type, self.code, self.param)

    def headers(self) -> dict[str, str]:
        """Extra response headers. OpenAI SDKs prefer `retry-after-ms` to `retry-after`; both are rounded up."""
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(self.retry_after_s * 1000))),
        }

    def retry_advice(self) -> dict[str, str]:
        """The header that OpenAI's SDKs obey before the status."""
        if self.http_status < 500 and not self.retryable:
            return {}
        return {"x-should-retry": "true" if self.retryable else "false"}


class BadRequest(ApiError):
    http_status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    default_code = "context_length_exceeded"


class Unauthorized(ApiError):
    http_status = 401
    error_type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ApiError):
    http_status = 403
    error_type = "permission_error"


class NotFound(ApiError):
    http_status = 404
    error_type = "not_found_error"


def no_route(method: str, path: str) -> NotFound:
    """Return the error of a path that nothing answers."""
    twice = "; the client's base URL has /v1 twice" if path.startswith("/v1/v1/") else ""
    return NotFound(f"no route {method} {path[:128]}{twice}")


class ResponseNotFound(NotFound):
    error_type = "invalid_request_error"


class MethodNotAllowed(ApiError):
    """
    Args:
        allowed: the methods that the path takes, which every such answer has to name (RFC 9110, 15.5.6).
    """

    http_status = 405
    error_type = "invalid_request_error"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)

    def headers(self) -> dict[str, str]:
        return {"allow": ", ".join(self.allowed)}


class RequestTimeout(ApiError):
    http_status = 408
    error_type = "timeout_error"


class PayloadTooLarge(ApiError):
    http_status = 413
    error_type = "invalid_request_error"


class HeadersTooLarge(ApiError):
    http_status = 431
    error_type = "invalid_request_error"


class TooManyRequests(ApiError):
    http_status = 429
    error_type = "rate_limit_error"
    retryable = True


class InternalError(ApiError):
    pass


class NotSupported(ApiError):
    """The request is for something that the API has and this server never will answer as asked."""

    http_status = 501
    default_code = "not_supported"


class BadGateway(ApiError):
    http_status = 502
    error_type = "upstream_error"
    retryable = True


class Unavailable(ApiError):
    http_status = 503
    error_type = "service_unavailable"
    retryable = True


class StorageUnavailable(Unavailable):
    """What clients leave cannot be read or written now; the log of `argosy batch` has the cause."""

    default_code = "storage_unavailable"

    def __init__(self, reason: str = "") -> None:
        """`reason` is for clients: it must name no path."""
        because = f": {reason}" if reason else ""
        super().__init__(
            f"the storage (argosy batch --storage) does not answer{because}; retry later", retry_after_s=1.0
        )


class StorageFull(StorageUnavailable):
    """The disk has no room; nothing was stored."""

    http_status = 507
    default_code = "storage_full"

    def __init__(self) -> None:
        Unavailable.__init__(
            self,
            "the storage (argosy batch --storage) is full, and nothing was stored; delete files, or retry later",
            retry_after_s=10.0,
        )


class ResourceUnavailable(Unavailable):
    default_code = "resource_busy"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), RESOURCE_BUSY: "true"}


class GatewayTimeout(ApiError):
    http_status = 504
    error_type = "timeout_error"
    retryable = True
