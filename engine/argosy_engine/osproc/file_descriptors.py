"""File descriptors: raises the limit, and checks that enough are free before an engine is started.

libzmq aborts the process (SIGABRT) when it cannot open an epoll instance or accept a connection, so a shortage must be
detected or prevented beforehand.
"""

from __future__ import annotations

import os
import resource

from argosy_engine.errors import ConfigError

MIN_FREE = 32
"""A client opens about 15 for its core: sockets, pipes, epoll and event descriptors."""


def raise_limit() -> int:
    """Raise the soft limit to the hard limit, for this process and those that it starts; return the limit.

    The usual soft limit of 1024 exists only for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def require_free(count: int = MIN_FREE) -> None:
    """Check that this process can open `count` more files.

    Raises:
        ConfigError: it cannot.
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(count))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(
            f"{error.strerror}: an engine needs {count} free file descriptors, and {len(opened)} of this process's "
            f"{limit} are; raise the limit (ulimit -n)"
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
