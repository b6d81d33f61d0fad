"""The configuration of `argosy batch`: every flag's name, type, bounds, default and help text.

`main` makes the flags from `BatchConfig` (`argosy_protocol.program.flags`). Fields without a description have no flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from argosy_protocol.batch_program import DEFAULT_PORT
from argosy_protocol.program.flags import Flag

MAX_BYTES = 1 << 50

Name = Annotated[str, Meta(max_length=253)]
Url = Annotated[str, Meta(max_length=2048)]
LogLevel = Literal["debug", "info", "warning", "error"]

_LISTEN = "listening"
_ROUTER = "router"
_STORAGE = "storage"
_BATCHES = "batches"
_LOGS = "logs"


class ConfigError(Exception):
    """The configuration cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The whole configuration."""

    host: Annotated[Name, Meta(description="address for the routers"), Flag(group=_LISTEN)] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="port for the routers; 0: any free port"), Flag(group=_LISTEN)
    ] = DEFAULT_PORT
    router_url: Annotated[
        Url,
        Meta(
            pattern=r"^https?://[^/?#@]+/?$",
            description="the router, or what stands before several, through which the requests of batches are sent",
        ),
        Flag(group=_ROUTER, metavar="URL", form="must be a URL such as http://HOST:PORT, without a path"),
    ] = "http://127.0.0.1:8080"
    storage: Annotated[
        Url,
        Meta(
            description="keep the files, batches and responses of clients in a directory (a path or file:///PATH) or a "
            "bucket (s3://BUCKET/PREFIX, gs://BUCKET/PREFIX; needs the extra `storage`)"
        ),
        Flag(group=_STORAGE, metavar="URL", default="required"),
    ] = ""
    storage_max_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="what the files and batches of one API key may have, and its responses",
        ),
        Flag(group=_STORAGE, is_size=True),
    ] = 10 * 1024 * 1024 * 1024
    storage_max_objects: Annotated[
        int,
        Meta(ge=1, le=1 << 24, description="how many files and batches one API key may have, and responses"),
        Flag(group=_STORAGE, metavar="N"),
    ] = 10_000
    storage_ttl_s: Annotated[
        float,
        Meta(
            ge=3600.0, le=365 * 86_400.0, description="time after which stored files and batches are deleted"
        ),
        Flag(group=_STORAGE, metavar="S"),
    ] = 30 * 86_400.0
    """OpenAI keeps the files of batches for 30 days, too."""
    max_file_bytes: Annotated[
        int,
        Meta(ge=1, le=1 << 40, description="size of an uploaded file"),
        Flag(group=_STORAGE, is_size=True),
    ] = 200 * 1024 * 1024
    """OpenAI's limit for files of batches."""
    batch_max_requests: Annotated[
        int, Meta(ge=1, le=1 << 24, description="requests in one batch"), Flag(group=_BATCHES, metavar="N")
    ] = 50_000
    """OpenAI's limit."""
    batch_max_inflight: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 16,
            description="requests of batches in flight, of all services; beyond it, one of a service that has none",
        ),
        Flag(group=_BATCHES, metavar="N"),
    ] = 64
    lease_s: Annotated[float, Flag(is_hidden=True)] = 30.0
    """How long the batches of a process that died wait for another one. It writes once in a sixth of it for each batch
    that it runs."""
    shutdown_timeout_s: Annotated[
        float,
        Meta(ge=0.0, le=3600.0, description="seconds that requests in flight may take after SIGTERM"),
        Flag(group=_LISTEN, metavar="S"),
    ] = 30.0
    log_level: Annotated[LogLevel, Meta(description="log level"), Flag(group=_LOGS)] = "info"
    fleet_key: Annotated[bytes, Flag(is_hidden=True, environment="ARGOSY_FLEET_KEY")] = b""
    """The key that this program's and the routers' common key is derived from."""
    fleet_key_dir: Annotated[Path | None, Flag(is_hidden=True, environment="ARGOSY_FLEET_KEY_DIR")] = None
    """Mounted Secret with that key, which may be rotated while the program runs (`argosy_protocol.fleet_keys`)."""

    def check(self) -> None:
        """
        Raises:
            ConfigError: something that must be given is missing.
        """
        if not self.storage:
            raise ConfigError(
                "--storage is required: a directory or a bucket, which keeps what clients leave"
            )
        if not self.fleet_key and self.fleet_key_dir is None:
            raise ConfigError(
                "ARGOSY_FLEET_KEY must be set, to the same value as the routers': by a key derived from it they and "
                "this program know each other"
            )
