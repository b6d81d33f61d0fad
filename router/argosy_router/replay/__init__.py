"""Replay of request traces through the router's own routing code, in simulated time.

Owns: trace files, a synthetic trace, a model of an engine, and the figures that compare policies.
Must not know: sockets, clocks. Service, index, load account and policies are the production code; only engines and time
are simulated.
"""

# Not compiled: a simulator, which is no part of a running router.
