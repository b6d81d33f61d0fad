"""What the server's flags say for all requests: usage in streams, names of tokens, and the log of requests."""

from __future__ import annotations

import logging

import msgspec

from argosy_engine.api.server_args import ServerArgs
from argosy_protocol.openai import GenerationRequest, StreamOptions

logger = logging.getLogger("argosy.requests")


def apply_flags(options: ServerArgs, request: GenerationRequest) -> None:
    """Set the fields of a request that flags determine."""
    if options.enable_force_include_usage and request.stream:
        request.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if options.stream_interval > 1:
        request.stream_interval = max(request.stream_interval or 1, options.stream_interval)
    if request.return_tokens_as_token_ids is None and options.return_tokens_as_token_ids:
        request.return_tokens_as_token_ids = True


def log_request(options: ServerArgs, request: msgspec.Struct, request_id: str) -> None:
    """Log a request's id and its numbers, if `--enable-log-requests` is given. Texts may be prompts and stay out."""
    if options.enable_log_requests:
        logger.info("Received request %s: %s", request_id, _numbers(request))


def _numbers(request: msgspec.Struct) -> str:
    """Return the fields that are numbers or truth values and not the default, as `name=value`."""
    shown = []
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        if isinstance(value, int | float) and value != field.default:
            shown.append(f"{field.name}={value}")
    return " ".join(shown)
