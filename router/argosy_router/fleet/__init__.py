"""The replicas behind the router: which there are, how loaded and how healthy each is, and what its cache holds.

Owns: services and their replicas, load, health, and the links to replicas (telemetry stream, polling).
Must not know: requests of clients, how HTTP is served.
"""
