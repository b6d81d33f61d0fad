"""What engine, router, operator and command line agree on, and nothing else.

Owns: the OpenAI wire types, `prompt_view` and its chunk hashes, telemetry frames, the fleet document, the
routable report, header names, error shapes, internal keys.
Must not know: torch, tokenizers, HTTP servers, Kubernetes. It is the only part of the engine that the other
programs import, so it stays importable in milliseconds.
Invariant: both ends of every wire import the same definition from here; a change that an older peer cannot read
bumps the version beside the type.
"""
