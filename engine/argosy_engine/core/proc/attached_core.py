"""AttachedCore: the engine core as a client in a further API process sees it, which has not started it.

It has the interface of `CoreHandle` as far as `AsyncMPClient` needs it. Such a client cannot tell why a core has ended
unless the core says so: that is known to the process that started it, which ends all API processes then.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from argosy_engine.core.proc.client_group import client_addresses
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.messages.core_messages import RequestType
from argosy_engine.messages.handshake import (
    Advanced,
    Attached,
    Failed,
    HandshakeMessage,
    Hello,
    Loading,
    Ready,
)
from argosy_engine.osproc.child_process import open_pidfd, wait_readable
from argosy_engine.resolved_config import ResolvedConfig


class AttachedCore:
    """
    Args:
        directory: of the core's sockets; the process that started the core deletes it.
        index: this client's number, from 1.
    """

    last_message_ms = 0
    watch = None
    """The process that started the core watches its load, and ends this one."""

    def __init__(self, directory: Path, index: int) -> None:
        self.input_address, self.output_address = client_addresses(directory, index)
        self.config: ResolvedConfig | None = None
        self.reason = ""
        self.pid = 0
        """0 before the core has said it."""
        self.pidfd: int | None = None
        self._index = index

    def poll(self) -> int | None:
        """Return None while the core lives, else 0: its exit code is not known here."""
        if self.pidfd is not None:
            return 0 if wait_readable([self.pidfd], 0) else None
        if self.pid:
            try:
                os.kill(self.pid, 0)
            except OSError:
                return 0
        return None

    def dead(self, doing: str = "") -> EngineDead:
        return EngineDead(self.reason or f"the engine core (process {self.pid}) ended{doing}")

    def greeting(self, payload: bytes) -> list[bytes] | None:
        """Process the next message of the handshake; return the reply, if any (`CoreHandle.greeting`)."""
        message = msgspec.msgpack.decode(payload, type=HandshakeMessage)
        match message:
            case Hello():
                self.pid = message.pid
                self.pidfd = open_pidfd(message.pid)
                return [RequestType.HANDSHAKE, msgspec.msgpack.encode(Attached(self._index))]
            case Ready():
                self.config = message.config
            case Failed():
                raise ConfigError(message.message) if message.is_config_error else EngineDead(message.message)
            case Loading() | Advanced():
                pass
            case _:
                raise EngineDead(f"the engine core answered with {type(message).__name__}")
        return None

    def end(self) -> None:
        """Forget the core, which goes on."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
