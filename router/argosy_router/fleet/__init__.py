"""The replicas behind the router: membership, load, health and cached prefixes of each.

Owns: services and their replicas, load, health, and the links that keep them up to date (telemetry, polling).
Must not know: clients' requests, how HTTP is served.
"""
