"""Replaying traces of requests against the router's own choosing, in simulated time.

Owns: trace files, a synthetic trace, a model of an engine, and the figures that compare policies.
Must not know: sockets, clocks. Service, index, load account and policies are the ones production runs; only engines and
time are simulated.
"""
