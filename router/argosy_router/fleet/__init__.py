"""The replicas behind the router: membership, load, health and cached prefixes of each.

Must not know: clients' requests, how HTTP is served.
"""
