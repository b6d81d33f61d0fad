"""Errors of the fetcher. Each message names the model, what went wrong and the remedy, and never a credential."""

from __future__ import annotations


class FetchError(Exception):
    """The model cannot be fetched, and trying again without a change would not help."""


class InvalidSource(FetchError):
    """The source is malformed, or its scheme is unknown."""


class ModelNotFound(FetchError):
    """The repository, bucket, image or revision does not exist, or is hidden from these credentials."""


class ModelHidden(ModelNotFound):
    """The repository does not exist or is hidden from these credentials; the source does not say which."""


class AccessDenied(FetchError):
    """Credentials are missing, wrong, or the model is gated."""


class UnsupportedModel(FetchError):
    """The model has files that are not served, or an architecture that the engine does not know."""


class HashMismatch(FetchError):
    """The bytes received differ from what the source announced, more than once."""


class NoSpace(FetchError):
    """The disk has no room for what is missing."""


class ModelTooLarge(NoSpace):
    """The model is larger than the caller allows."""


class SourceChanged(FetchError):
    """The source changed a file while it was read, although its revision should be immutable."""


class ModelInUse(FetchError):
    """The model cannot be removed from the store, because a process uses or fetches it."""


class ModelRemoved(FetchError):
    """The model was removed from the store before it could be held."""


class Offline(FetchError):
    """The model is not in the store, and the network may not be used."""


class TransientError(Exception):
    """A request failed in a way that another attempt may cure: cut connections, timeouts, 429, 5xx.

    Args:
        retry_after_s: seconds to wait before the next attempt, if the server said so.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownHost(TransientError):
    """The network's name servers know no host of this name. Few attempts are worth making: they may be out of date."""
