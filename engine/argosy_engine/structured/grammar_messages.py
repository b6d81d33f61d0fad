"""Messages between the engine core and the fork server that compiles grammars.

The core sends `GrammarServerArgs` over the server's stream socket, then single bytes, each with the socket of a job.
Over the job's socket the server sends `FORKED` with a pidfd, by which the core can kill the compilation even if its
process is stopped. The core then sends a `CompileJob` and nothing more, except perhaps `LOWER_PRIORITY`; closing the
socket ends the compilation. The forked process replies with `STARTED`, one byte for the kind of answer, and the answer
in msgpack. Both structs are preceded by their length (`framed`).
"""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.structured.structured_outputs_params import GrammarSpec

FORKED = b"P"
"""Sent with a pidfd of the forked process, if the kernel supports pidfds."""
STARTED = b"S"
COMPILED = b"C"
"""Answer: the grammar, as `Serialized`."""
TABLE = b"T"
"""Answer: the vocabulary, as `TokenTable`."""
INVALID = b"I"
"""Answer: what is wrong with the grammar, as a string."""
FAULT = b"F"
"""Answer: why no grammar can be compiled, as a string."""

LOWER_PRIORITY = b"N"


class GrammarServerArgs(Struct, frozen=True):
    model_path: str
    vocab_size: int
    eos_token_ids: list[int]
    num_threads: int
    """Native threads per compilation."""


class CompileJob(Struct, frozen=True):
    deadline_s: float
    """Seconds after which the kernel kills the compilation."""
    spec: GrammarSpec | None = None
    """None asks for the `TokenTable`."""


def framed(payload: bytes) -> bytes:
    """Prefix a message with its length (4 bytes, little endian)."""
    return len(payload).to_bytes(4, "little") + payload
