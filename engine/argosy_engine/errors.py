"""The engine's errors, grouped by who must act.

EngineError
├── ConfigError            whoever runs the engine: a flag or model cannot work; the message names the remedy
│   └── DoesNotFit         not enough memory; the message says which --max-model-len would fit
├── FetchFailed            whoever runs the engine, by trying again: the model's source or the network does not answer,
│                          or the disk is full
├── InvalidRequest         the client: HTTP 400 (`param` names the field)
│   └── PromptTooLong      code context_length_exceeded
├── RequestFailed          nobody: this request failed through the engine's fault (HTTP 500); others are not affected
├── UtilityFailed          the caller: an administrative call could not be carried out; the engine keeps running
├── EngineBusy             the client, by retrying later: HTTP 503 with a retry hint
│   ├── ResourceBusy       the same; requests that do not need what is busy are answered
│   └── EngineAsleep       whoever put the engine to sleep; other replicas may be awake
├── EngineClosed           the caller of an offline engine, who has closed it
└── EngineDead             nobody: the core process has exited; in-flight requests fail, /health reports unhealthy
    └── LoadStalled        whoever runs the engine: its load has not advanced for --load-stall-timeout; a volume or
                           device does not answer
"""

from __future__ import annotations

OTHER_ENGINES = (
    "or serve it with vLLM behind Argosy's router: engine.type vllm in an InferenceService, or argosy router --replica "
    "with the URL of a vLLM that runs"
)
"""The way out for a model that this engine does not serve; ends a message."""


def installation(extra: str) -> str:
    """Return how an optional part of the package is installed, of which no index has a release."""
    return (
        f"`pip install '.[{extra}]'` in the checkout, or `pip install 'FILE.whl[{extra}]'` with a wheel that was built "
        "of it; the engine's image has it"
    )


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(EngineError):
    pass


class DoesNotFit(ConfigError):
    pass


class FetchFailed(EngineError):
    pass


class InvalidRequest(EngineError):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    pass


class RequestFailed(EngineError):
    pass


class UtilityFailed(EngineError):
    pass


class EngineBusy(EngineError):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ResourceBusy(EngineBusy):
    pass


class EngineAsleep(EngineBusy):
    pass


class EngineClosed(EngineError):
    pass


class EngineDead(EngineError):
    pass


class LoadStalled(EngineDead):
    pass
