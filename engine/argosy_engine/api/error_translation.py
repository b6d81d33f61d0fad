"""Errors of requests as errors of the API; unexpected ones are logged, without a text that may quote a prompt."""

from __future__ import annotations

import logging

from argosy_engine.api.openai.openai_serving import to_api_error
from argosy_engine.errors import EngineError
from argosy_protocol.errors import (
    ApiError,
)
from argosy_protocol.program.log_format import format_frames

logger = logging.getLogger("argosy.api")


def translated_error(error: Exception) -> ApiError:
    """Return `error` as the API shows it; log an unexpected one."""
    if not isinstance(error, ApiError | EngineError):
        logger.error(
            "a request failed with %s\n%s", type(error).__qualname__, format_frames(error.__traceback__)
        )
    return to_api_error(error)
