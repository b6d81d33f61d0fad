"""The servers under test: an engine that generates, one that embeds, and a router with a storage over both.

Owns their processes. Everything listens on loopback, without keys. Contexts and answers are short, so that generated
requests cost little.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from processes import free_port, running

GENERATING, EMBEDDING = "tiny", "embedding"
ENGINE_FLAGS = (
    *("--threads", "1", "--dtype", "float32", "--device", "cpu", "--disable-log-stats"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "256", "--max-num-seqs", "16"),
    *("--override-generation-config", '{"max_new_tokens": 8}'),
)
EMBEDDING_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@dataclass(frozen=True)
class Target:
    """A server."""

    name: str
    port: int
    share: float
    """Part of the cases that it gets."""
    models: tuple[str, ...]
    only: str = ""
    """Regular expression of the paths that requests are generated for; all if it is empty."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


KEY = {"ARGOSY_FLEET_KEY": "a fleet key of tests"}


@contextlib.contextmanager
def fuzzed_servers(folder: Path) -> Iterator[list[Target]]:
    """Start the servers; stop them at the end. Logs go into `folder`."""
    with contextlib.ExitStack() as stack:
        ports = {GENERATING: free_port(), EMBEDDING: free_port()}
        flags = {
            GENERATING: (),
            EMBEDDING: ("--runner", "pooling", "--chat-template", EMBEDDING_TEMPLATE),
        }
        for name, port in ports.items():
            arguments = ["argosy_engine.api.serve", "builtin://tiny", "--served-model-name", name]
            arguments += ["--port", str(port), *ENGINE_FLAGS, *flags[name]]
            stack.enter_context(running(arguments, folder / f"{name}.log", port=port))
        port = free_port()
        fleet = folder / "fleet.json"
        fleet.write_bytes(encode_fleet(_fleet(ports)))
        arguments = ["argosy_router.main", "--port", str(port), "--admin-port", "-1", "--no-access-log"]
        batch_port = free_port()
        arguments += ["--fleet-file", str(fleet), "--batch-url", f"http://127.0.0.1:{batch_port}"]
        stack.enter_context(running(arguments, folder / "router.log", port=port, env=KEY))
        arguments = ["argosy_batch.main", "--port", str(batch_port), "--storage", str(folder / "storage")]
        arguments += ["--router-url", f"http://127.0.0.1:{port}"]
        stack.enter_context(running(arguments, folder / "batch.log", port=batch_port, env=KEY))
        yield [
            Target("engine", ports[GENERATING], 0.35, (GENERATING,)),
            Target(
                "pooling engine",
                ports[EMBEDDING],
                0.15,
                (EMBEDDING,),
                r"^/(v1/embeddings|classify|pooling|(v1/)?score|(v[12]/)?rerank|tokenize|detokenize|invocations)$",
            ),
            Target("router", port, 0.5, (GENERATING, EMBEDDING)),
        ]


def _fleet(ports: dict[str, int]) -> FleetDocument:
    return FleetDocument(
        services=tuple(
            FleetService(
                namespace="default",
                name=name,
                uid=name,
                model=name,
                endpoints=(Endpoint(name=name, url=f"http://127.0.0.1:{port}"),),
            )
            for name, port in ports.items()
        )
    )
