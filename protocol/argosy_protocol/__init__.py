"""The wire contract between engine, router, operator and command line.

Owns: the OpenAI wire types, prompt segments and their chunk hashes, telemetry frames, the fleet document, the routable
report, header names, error formats and internal keys. The package `program` beside them is no part of the contract: it
holds the flags, listening sockets and log format that the programs have in common.
Must not know: torch, tokenizers, HTTP servers, Kubernetes. It sets no environment variable, and imports in
milliseconds, because every program imports it.
Invariant: both ends of a connection import the same definition from here; a change that an older peer cannot read bumps
the version beside the type.
"""

__version__ = "0.1.0"
