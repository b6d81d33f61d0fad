"""What engine, router, operator and command line agree on, and nothing else.

Owns: the OpenAI wire types, `prompt_view` and its chunk hashes, telemetry frames, the fleet document, the
routable report, header names, error shapes, internal keys.
Must not know: torch, tokenizers, HTTP servers, Kubernetes; it sets no environment variable. All programs import it,
so it stays importable in milliseconds.
Invariant: both ends of every wire import the same definition from here; a change that an older peer cannot read
bumps the version beside the type.
"""

__version__ = "0.1.0"
