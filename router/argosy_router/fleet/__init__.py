"""The replicas behind the router: membership, load, health and cached prefixes of each.

Owns: services and their replicas, load, health, and the links to replicas (telemetry stream, polling).
Must not know: clients' requests, how HTTP is served.
"""
