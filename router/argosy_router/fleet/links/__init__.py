"""Links to replicas: what keeps the router's knowledge of each replica up to date.

Owns: the telemetry stream of an Argosy engine, and the polling of an engine of another make.
Must not know: clients' requests, policies, other replicas.
"""
