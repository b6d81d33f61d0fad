"""The wire contract between engine, router, operator and command line.

The package `program` is no part of the contract: it holds what the programs have in common, such as flags.
Must not know: torch, tokenizers, HTTP servers, Kubernetes. It sets no environment variable, and imports in
milliseconds, because every program imports it.
Invariant: both ends of a connection import the same definition from here; a change that an older peer cannot read bumps
the version beside the type.
"""

__version__ = "0.1.0"
